"""The largest batch that fits, and what each remedy would save.

Read in this order.  ``samples`` has the sizes of a dataset's samples, ``peak_model``
predicts a batch's peak from its sizes, ``cost_model`` fits that to a model and a
dataset and solves for the largest batch, ``savings`` estimates the remedies, ``plan``
is the front door, and ``page`` shows what it gives.  ``assertions`` are for tests.
"""
