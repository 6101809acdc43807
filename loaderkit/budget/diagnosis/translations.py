"""What systems say in other languages, in English.  Pure but for reading a table.

A kernel's errors and a shell's "Killed" come in the language of whose machine it is;
what stands around them is English mostly.  So these few phrases are translated before
anything is read, and nothing else has to know of them.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from loaderkit.budget.diagnosis.lexicon import read_table


class _Translation(NamedTuple):
    """A phrase in other languages."""

    replacement: str
    """In English, as ``re.sub`` takes it."""
    hints: tuple[str, ...]
    """One of these is in whatever the pattern matches."""
    ascii_hints: tuple[str, ...]
    """Those that a text of Latin letters without accents can have."""
    pattern: re.Pattern[str]


_LINE_OF_A_SCRIPT = re.compile(
    r"(?:: ?|\uff1a) ?(?:行|Zeile|ligne|línea|linea|linha|riga|строка|줄|第) ?"
    r"(\d{1,6})(?: ?行)?(?:: ?|\uff1a)(?= *\d)"
)
"""How bash says in which line of a script a process ended."""
_ALONE = r"^(?P<before>(?:[^\n]*(?:\d|\][+-]?))? *)(?:{})(?=\s*$| {{2,}}\S| \()"
"""A word that has other senses in its language: it is a line, or stands behind the
number of a process or of a job, as a shell prints it, with the command behind it."""


@functools.cache
def _translations() -> tuple[_Translation, ...]:
    rows = []
    for head, phrases in read_table("translations.txt"):
        is_alone = head[0] == "alone"
        pattern, replacement = phrases, " ".join(head)
        if is_alone:
            pattern = _ALONE.format(phrases)
            replacement = rf"\g<before>{' '.join(head[1:])}"
        hints = tuple(phrase.replace("\\", "") for phrase in phrases.split("|"))
        compiled = re.compile(pattern, re.MULTILINE)
        ascii_hints = tuple(filter(str.isascii, hints))
        rows.append(_Translation(replacement, hints, ascii_hints, compiled))
    return tuple(rows)


def in_english(text: str) -> str:
    r"""Write what a system said in another language in English.

    >>> in_english("OSError: [Errno 12] 无法分配内存")
    'OSError: [Errno 12] Cannot allocate memory'
    >>> in_english("./run.sh\uff1a行 3\uff1a 4711 已杀死       python t.py")
    './run.sh: line 3: 4711 Killed       python t.py'
    >>> in_english("Il gatto ha ucciso: Morto il topo")
    'Il gatto ha ucciso: Morto il topo'
    """
    is_ascii = text.isascii()
    if not is_ascii:
        text = _LINE_OF_A_SCRIPT.sub(r": line \1:", text)
    for translation in _translations():
        hints = translation.ascii_hints if is_ascii else translation.hints
        if any(hint in text for hint in hints):
            text = translation.pattern.sub(translation.replacement, text)
    return text
