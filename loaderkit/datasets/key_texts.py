"""Keys as text: for people, for code to paste, and for the hash of all keys.  Pure."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import xxhash

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")
"""How Python ends the text of an object that has none of its own."""
_KEYS_PER_BLOCK = 1 << 16
"""Keys that are hashed at once.  Part of what a fingerprint is: never change it."""


def key_text(key: object) -> str:
    """Convert a key to text, as Python writes the plain value that it stands for.

    Numbers of numpy and torch are written as Python's, so that a cache whose keys are
    an ``arange`` is not told stale by another release of numpy, which writes them
    otherwise.

    >>> key_text("a.pt"), key_text(PurePath("x") / "a.pt"), key_text(3)
    ('a.pt', 'x/a.pt', '3')
    >>> key_text(np.int64(3)), key_text((np.float32(0.5), torch.tensor(2), "a"))
    ('3', "(0.5, 2, 'a')")
    """
    if isinstance(key, str):
        return str.__str__(key)  # of an enum or of numpy too
    return key.as_posix() if isinstance(key, PurePath) else key_in_code(key)


def typed_key_text(key: object) -> str:
    """Convert a key to text so that 1 and "1" differ."""
    if isinstance(key, str | PurePath):
        return key_text(key)
    return f"\1{key_text(key)}"


def key_in_code(key: object) -> str:
    """Write a key as Python writes the plain value that it stands for.

    >>> key_in_code(np.str_("a")), key_in_code((np.int8(3),)), key_in_code(b"a")
    ("'a'", '(3,)', "b'a'")
    """
    if isinstance(key, str) and type(key) is not str:
        return repr(str.__str__(key))
    if isinstance(key, np.datetime64 | np.timedelta64):
        # Python has no type for nanoseconds: item() gives an integer.
        return repr(str(key))
    if isinstance(key, np.generic):
        return repr(key.item())
    if isinstance(key, np.ndarray | torch.Tensor):
        return repr(key.tolist())
    if isinstance(key, tuple | list | set | frozenset):
        return _nest_in_code(key)
    return repr(key)


def text_has_address(key: object) -> bool:
    """Tell whether a key's text has the address of an object, as ``object`` writes it.

    >>> text_has_address(object()), text_has_address((3, print)), text_has_address("a")
    (True, False, False)
    """
    return not isinstance(key, str) and _ADDRESS.search(key_text(key)) is not None


def _nest_in_code(
    key: tuple[Any, ...] | list[Any] | set[Any] | frozenset[Any],
) -> str:
    """Write a key that holds others; one of a class of the user's as that says."""
    kind = type(key)
    item_texts = list(map(key_in_code, key))
    if kind is list:
        return f"[{', '.join(item_texts)}]"
    if kind is tuple:
        # A tuple of one item has a comma behind it.
        return f"({', '.join(item_texts)}{',' if len(item_texts) == 1 else ''})"
    if kind is set and item_texts:
        return f"{{{', '.join(sorted(item_texts))}}}"
    if kind is frozenset and item_texts:
        # Its own order differs from process to process.
        return f"frozenset({{{', '.join(sorted(item_texts))}}})"
    names = getattr(kind, "_fields", None)
    if names is None or kind.__repr__ is tuple.__repr__:
        return repr(key)
    named = zip(names, item_texts, strict=True)
    fields = [f"{name}={item_text}" for name, item_text in named]
    return f"{kind.__name__}({', '.join(fields)})"


def hash_keys(key_texts: list[str]) -> str:
    """Hash the keys of a dataset in their order.

    Args:
        key_texts: What :func:`typed_key_text` gave of each.
    """
    digest = xxhash.xxh3_128()
    # In blocks, since the joined text of ten million keys would double the memory.
    for start in range(0, len(key_texts), _KEYS_PER_BLOCK):
        block = key_texts[start : start + _KEYS_PER_BLOCK]
        # With their lengths, so that ["a\0", "b"] and ["a", "\0b"] differ.
        lengths = [str(len(text)) for text in block]
        digest.update("\0".join(lengths).encode())
        digest.update("\0".join(block).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
