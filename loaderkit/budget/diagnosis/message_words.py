"""The words of messages about memory, to tell a word that a terminal broke.

Pure but for reading the tables beside it.
"""

from __future__ import annotations

import functools
import re
from importlib import resources

_TABLES = (
    "oom_patterns.txt",
    "phrases.txt",
    "statements.txt",
    "amount_roles.txt",
    "moods.txt",
)
_SHORTEST = 4
"""Letters of a word taken from a pattern: shorter ones are endings, such as "ing"."""
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def is_word(token: str) -> bool:
    """Whether a token is a word of such messages, or put together from such words.

    >>> [is_word(token) for token in ("memory.", "OutOfMemoryError", "mem0ry", "17")]
    [True, True, False, True]
    """
    token = token.strip(".,").rsplit(".", 1)[-1]
    if token.lower() in _known_words() or token.isdigit():
        return True
    words = _PARTS.findall(token)
    if len(words) < 2 or "".join(words) != token.replace("_", ""):
        return False
    # A single letter is a digit of a name such as 29d72966e0be.
    return all(
        word.isdigit() or (len(word) > 1 and word.lower() in _known_words())
        for word in words
    )


@functools.cache
def _known_words() -> frozenset[str]:
    folder = resources.files(__package__)
    words = set(folder.joinpath("words.txt").read_text("utf-8").lower().split())
    for name in _TABLES:
        text = re.sub(r"\\.", " ", folder.joinpath(name).read_text("utf-8"))
        letters = re.findall(r"[A-Za-z]+", text)
        words |= {word.lower() for word in letters if len(word) >= _SHORTEST}
    return frozenset(words)
