"""Text of a run as HTML: escaped, and long names break at their joints.  Pure."""

from __future__ import annotations

import html
import re

LONGEST_UNBROKEN = 28
"""Letters of a word that a table does not break, where there is room for columns: the
longest name of a setting, ``multiprocessing_context``, and calls such as
``error.with_traceback(None)``."""

_PARTS = re.compile(r"[_./=:,-]*[^_./=:,-]+[_./=:,-]*|[_./=:,-]+")
"""Parts of a name, with the joint behind them; the first has that in front of it too,
so that no line ends with the root of a path."""


def escape_words(text: str) -> str:
    """Escape a text; a word that is too long for a line breaks where its parts end.

    >>> escape_words("a < b")
    'a &lt; b'
    >>> escape_words("model.encoder.layers.11.attention")
    'model.<wbr>encoder.<wbr>layers.<wbr>11.<wbr>attention'
    >>> escape_words("/home/someone/projects/train_model.py")
    '/home/<wbr>someone/<wbr>projects/<wbr>train_<wbr>model.<wbr>py'
    """
    words = re.split(r"(\s+)", text)
    return "".join(
        "<wbr>".join(map(_escape, _PARTS.findall(word)))
        if len(word) > LONGEST_UNBROKEN
        else _escape(word)
        for word in words
    )


def _escape(text: str) -> str:
    return html.escape(text, quote=False)
