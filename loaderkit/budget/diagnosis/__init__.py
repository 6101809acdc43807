"""Why did it run out of memory?

Read in this order.  ``translations`` puts into English what systems say in other
languages, ``log_text`` undoes what a log made of a message, ``messages`` reads it: by
the sharp wordings of ``oom_patterns``, else by ``grammar`` from its words
(``lexicon``, ``statements``, ``amounts``), unless they report nothing (``moods``,
``evidence``).  ``literals`` says which patterns a text cannot match.
``judge`` says what the numbers mean, ``diagnose`` is the front door.
"""
