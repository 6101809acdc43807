"""Finds the rows of samples by their keys, and keys that two have.  Pure.

16 bytes a key, and no Python object: a dict of 10^7 texts takes 1.5 GB, this 160 MB.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xxhash

from loaderkit.datasets.compact_keys import Integers, Texts
from loaderkit.datasets.key_texts import key_text
from loaderkit.datasets.plain import encode_text

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from numpy.typing import NDArray

    from loaderkit.array_types import Ints


class KeyIndex:
    """Rows by the hash of their key.

    Args:
        texts: The keys as texts, in the order of the rows.

    >>> index = KeyIndex(["tea", "mate", "tea"])
    >>> index.candidates("tea"), index.candidates("milk")
    (array([0, 2]), array([], dtype=int64))
    """

    def __init__(self, texts: Iterable[str]) -> None:
        hashes = np.fromiter(map(_hash_of, texts), np.uint64)
        # Rows of one hash stay in order.
        self._rows: Ints = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._rows]

    def candidates(self, text: str) -> Ints:
        """Give the rows that probably have a key, in order.

        Args:
            text: The key as a text.

        Returns:
            Rows ``[n]``; all that have the key are among them, and others whose keys
            have the same hash.
        """
        wanted = np.uint64(_hash_of(text))
        first = np.searchsorted(self._hashes, wanted, side="left")
        last = np.searchsorted(self._hashes, wanted, side="right")
        return self._rows[first:last]


class Doubled(NamedTuple):
    """Two rows of one key."""

    first: int
    second: int


def first_doubled(keys: Sequence[Any]) -> Doubled | None:
    """Find the first row whose key an earlier row has.

    Keys are one if they are called alike, since a cache has their names; and if Python
    says that they are equal, since ``load`` may look them up in a dict.

    8 bytes a key while it looks.

    Args:
        keys: The keys, as ``compact_keys`` keeps them.

    >>> first_doubled(["tea", "mate", "tea", "mate"]), first_doubled([1, 2, "1"])
    (Doubled(first=0, second=2), Doubled(first=0, second=2))
    >>> first_doubled([0, 1, True]), first_doubled([[0.0], [-0.0]])
    (Doubled(first=1, second=2), Doubled(first=0, second=1))
    >>> first_doubled(range(10**9)), first_doubled(["a", "b"])
    (None, None)
    """
    if isinstance(keys, range):
        return None  # of numbers that differ
    pairs = [_first_of_one_hash(keys, _hashes_of, key_text)]
    # Equal texts and integers are called alike.
    if not isinstance(keys, Texts | Integers):
        pairs.append(_first_of_one_hash(keys, _hashes_of_values, _comparable))
    doubled = [pair for pair in pairs if pair is not None]
    return min(doubled, key=operator.attrgetter("second"), default=None)


def _first_of_one_hash(
    keys: Sequence[Any],
    hash_all: Callable[[Sequence[Any]], NDArray[Any]],
    compared: Callable[[Any], Hashable],
) -> Doubled | None:
    """Find the first row that is as an earlier one.

    Args:
        keys: The keys.
        hash_all: Hashes what is compared of each ``[n]``.
        compared: Gives what is compared of a key.
    """
    hashes = hash_all(keys)
    ordered = np.sort(hashes)
    doubled = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if not doubled:
        return None
    first_rows: dict[Hashable, int] = {}
    for row, key_hash in enumerate(hashes.tolist()):
        if key_hash in doubled:
            # Two keys may have one hash and be others.
            first = first_rows.setdefault(compared(keys[row]), row)
            if first != row:
                return Doubled(first, row)
    return None


def _hashes_of_values(keys: Sequence[Any]) -> NDArray[np.int64]:
    """Hash the keys themselves ``[n]``: those of equal keys are equal."""
    return np.fromiter((hash(_comparable(key)) for key in keys), np.int64)


def _comparable(key: object) -> Hashable:
    """Give what is equal for two keys that are, and can be hashed.

    Lists are not equal to tuples.  A tensor or array stands for its numbers.
    """
    if isinstance(key, torch.Tensor | np.ndarray):
        key = key.tolist()
    if isinstance(key, list):
        return (list, *map(_comparable, key))
    if type(key) is tuple:
        return tuple(map(_comparable, key))
    if type(key).__hash__ is None:
        return key_text(key)  # a set, a dict, an object that only says what is equal
    return key


def _hashes_of(keys: Sequence[Any] | NDArray[Any]) -> NDArray[np.uint64]:
    """Hash what keys are called ``[n]``; of integers alone, the integers will do."""
    values = keys.values if isinstance(keys, Integers) else keys
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        return np.array(values, np.int64).view(np.uint64)
    if isinstance(keys, Texts):
        hashes: Iterable[int] = map(xxhash.xxh3_64_intdigest, keys.encoded())
    else:
        hashes = map(_hash_of, map(key_text, keys))
    return np.fromiter(hashes, np.uint64)


def _hash_of(text: str) -> int:
    return xxhash.xxh3_64_intdigest(encode_text(text))
