"""Keys of samples without a Python object each.  Pure.

Whoever reads an object writes to it: its count of references.  A packing worker that is
forked gets a private copy of each page that it writes to, so a list of 10^6 texts grew
into 60 MB in every worker, page by page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np

from loaderkit.datasets.plain import encode_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

_READ_TOGETHER = 1 << 16
"""Ends of texts that are Python's integers at once.  Chosen: 2 MB of them."""


def compact_keys(keys: Iterable[Any]) -> Sequence[Any]:
    """Keep keys as they are now.

    Args:
        keys: Keys of any kind, in order.

    Returns:
        The same keys.  Texts, integers of up to 64 bits, and numbers of an array of
        numpy are made anew each time.

    >>> list(compact_keys(["a", "bc"])), list(compact_keys([3, -1]))
    (['a', 'bc'], [3, -1])
    >>> compact_keys(range(10**9))[-1], compact_keys([1, "1"])
    (999999999, [1, '1'])
    """
    if type(keys) is range:
        return keys
    if type(keys) is np.ndarray and keys.ndim == 1 and keys.dtype.kind != "O":
        return cast("Sequence[Any]", keys.copy())
    # By type(): True is an int to isinstance, and would come back as 1.
    as_list = list(keys)
    kinds = set(map(type, as_list))
    if kinds == {str}:
        return Texts(as_list)
    if kinds == {int} and all(-(1 << 63) <= key < 1 << 63 for key in as_list):
        return Integers(np.array(as_list, np.int64))
    return as_list


class Integers(Sequence[int]):
    """Integers of up to 64 bits.

    Args:
        values: They ``[n]``.
    """

    def __init__(self, values: NDArray[np.int64]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, row: int) -> int: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[int]: ...
    def __getitem__(self, row: int | slice) -> int | Sequence[int]:
        if isinstance(row, slice):
            return Integers(self.values[row])
        return int(self.values[row])


class Texts(Sequence[str]):
    """Texts end to end.

    Args:
        texts: They.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        # Two objects for all of them: bytes, and where each text ends in these.
        encoded = list(map(encode_text, texts))
        self._content = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    def encoded(self) -> Iterator[memoryview]:
        """Give each as a column keeps it."""
        content, start = memoryview(self._content), 0
        for first in range(1, len(self._ends), _READ_TOGETHER):
            for stop in self._ends[first : first + _READ_TOGETHER].tolist():
                yield content[start:stop]
                start = stop

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[str]: ...
    def __getitem__(self, row: int | slice) -> str | Sequence[str]:
        rows = range(len(self))[row]
        if isinstance(rows, range):
            return [self[position] for position in rows]
        start, stop = self._ends[rows : rows + 2].tolist()
        return self._content[start:stop].decode("utf-8", "surrogatepass")
