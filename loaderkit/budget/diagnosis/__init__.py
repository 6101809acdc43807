"""Why did it run out of memory?

Read in this order.  ``translations`` puts into English what systems say in other
languages, ``log_text`` undoes what a log made of a message (``line_prefixes``,
``json_records``, ``folded_tracebacks``, ``joined_lines``, ``broken_words`` with the
``message_words``), ``quotations`` sets apart the errors that a sentence quotes,
``messages`` reads it: by the sharp wordings of ``oom_patterns``, else by ``grammar``
from its words (``lexicon``, ``statements``, ``amounts``): which phrases of exhaustion
there are (``clues``) in which sentences (``sentences``), whether a sentence begins with
what failed (``clauses``), whether one of them reports something (``reports``, unless
``moods`` or ``evidence`` say that it does not), and of which memory (``places``).
``literals`` says which patterns a text cannot match,
``folding`` searches with the rest where capitals do not count.  ``judge`` says what the
numbers mean, ``diagnose`` is the front door, and ``page`` shows what it gives.
"""
