"""What the columns of a sample's parts are called: paths that people can read.  Pure.

A part's column is called by the keys that lead to it, with dots between: ``atoms.pos``.
Keys are escaped, so that no two paths are alike.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def distinct_names(keys: Sequence[object]) -> list[str]:
    """Name the columns of what lies side by side: no two alike.

    >>> distinct_names(["x", "a.b", 1, "1", ""])
    ['x', 'a%2Eb', '1', '1~2', '%']
    """
    names = [escape(key) for key in keys]
    if len(set(names)) == len(names):
        return names
    # An escaped text has no ~, so that a number makes it unlike all others.
    times: dict[str, int] = {}
    for position, name in enumerate(names):
        times[name] = times.get(name, 0) + 1
        if times[name] > 1:
            names[position] = f"{name}~{times[name]}"
    return names


def join_path(path: str, name: str) -> str:
    """Name a part of what lies at a path.

    >>> join_path("atoms", "pos"), join_path("", "atoms")
    ('atoms.pos', 'atoms')
    """
    return f"{path}.{name}" if path else name


def escape(key: object) -> str:
    """Make a key part of a column's name: readable, and no two texts alike.

    >>> escape("edge_index"), escape("a.b"), escape(("atom", "bond", "atom"))
    ('edge_index', 'a%2Eb', 'atom__bond__atom')
    """
    if isinstance(key, tuple):
        return _escape_text("__".join(map(str, key)))
    return _escape_text(str(key))


@functools.lru_cache(maxsize=4096)
def _escape_text(text: str) -> str:
    # Asked for each field of each sample: 12 % of encoding a molecule without a cache.
    if not text:
        return "%"
    for char in "%/.@~\0":
        text = text.replace(char, f"%{ord(char):02X}")
    if text.isascii():
        return text
    # UTF-8, in which HDF5 keeps names, has no surrogates.
    return "".join(
        f"%u{ord(char):04X}" if "\ud800" <= char <= "\udfff" else char for char in text
    )
