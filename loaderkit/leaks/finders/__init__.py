"""What can have grown, a file for each way to find it.

Read ``evidence`` first: what a finder is given, and what it gives.  ``items`` says what
is in a container.  The rows are in ``leaks/blame.py``: a new finder is a file here and
a row there.
"""
