"""Will it fit, what to change, why did it die?

One folder a subject; each one's docstring gives its reading order:

    step         the peak of a training step, without its memory
    batch        the largest batch that fits, and what each remedy saves
    environment  variables that change what memory and threads do, and those that do not
    diagnosis    what the text of an out-of-memory error says, and what to do
    pieces       train all the same: a step in pieces that equals the whole

Beside them: ``remedies`` (what can be changed when memory is short, cheapest first),
``cutting`` (a batch in pieces of whole samples) and ``keywords`` (the options as a type
checker sees them).
"""
