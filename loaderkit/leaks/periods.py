"""What is called an epoch, in words: "epoch", "second", "window of 500 ms".  Pure."""

from __future__ import annotations


def noun_of(period: str) -> str:
    """Write what is called an epoch without its length, where that was said.

    >>> noun_of("epoch"), noun_of("window of 500 ms")
    ('epoch', 'window')
    """
    return period.partition(" ")[0]


def plural_of(period: str) -> str:
    """Write more than one of what is called an epoch.

    >>> plural_of("epoch"), plural_of("window of 500 ms")
    ('epochs', 'windows of 500 ms')
    """
    noun, _, attribute = period.partition(" ")
    return f"{noun}s {attribute}".strip()
