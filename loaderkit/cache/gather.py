"""Copy many short runs of rows out of columns, in one go.  Pure: arrays in and out.

Two ways, chosen by the mean size of a run (measured on 2 cores, 128 runs of a mapped
column in page cache):

    a run of      one vectorised index   slice after slice
    100 B              2 us                  24 us
    800 B              4 us                  23 us
    6 KiB             27 us                  34 us
    50 KiB           330 us                 280 us

so small runs are taken through an expanded index, which all fields with the same rows
share, and large ones are copied slice by slice straight to their place.

Side by side, for padded batches, runs of any size are copied slice by slice: an index
would be needed on both sides.  32 runs of 32 B take 40 us by slices and 24 us by an
index, 32 of 512 B take 20 us either way, 32 of 8 KiB 47 us by slices and 410 us by an
index (measured on 2 busy cores).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

SLICE_BYTES = 16 << 10
"""From this mean run size on, slices beat an index."""
_CACHED_BYTES = 1 << 20
"""A padded batch up to this size is filled with zeros first: it saves a call a sample,
a third of the time of small ones.  A larger one leaves the processor's cache meanwhile,
and writing it twice costs up to a third more than zeros behind each sample."""


class Values(Protocol):
    """Rows ``[n, *rest]`` that can be sliced: mapped, or decompressed on the way."""

    @property
    def shape(self) -> tuple[int, ...]:
        """``(n, *rest)``."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """What the numbers are kept in."""

    def __getitem__(self, span: slice, /) -> NDArray[Any]:
        """Give the rows of a span, without a promise about who owns them."""


class Piece:
    """The runs of a batch that lie in one part of a column.

    A plain class whose index is made when first asked for: in Python 3.11 a
    ``cached_property`` takes a lock, 15 of which cost 20 us a batch.
    """

    __slots__ = ("_index", "lengths", "part", "places", "shards", "starts", "touched")

    def __init__(
        self,
        part: int,
        starts: Ints,
        lengths: Ints,
        places: Ints | None,
        *,
        shards: Ints,
        touched: Sequence[int],
        single: bool,
    ) -> None:
        self.part = part
        """Number of the part."""
        self.starts, self.lengths = starts, lengths
        """First row, and number of rows, of each run."""
        self.places = places
        """Which samples of the batch these are; None when they are all, in order."""
        self.shards = shards
        """In which shard each sample is."""
        self.touched = touched
        """Those shards, each once."""
        # With one row a run, the starts are the index.
        self._index: Ints | None = starts if single else None

    def lies_within(self, first_rows: Ints | int, row_counts: Ints | int) -> bool:
        """Tell whether every run lies in so many rows from a first one on."""
        if not len(self.starts):
            return True
        if int(self.lengths.min()) < 0:
            return False
        begins = self.starts - first_rows
        fits = begins + self.lengths <= row_counts
        return int(begins.min()) >= 0 and bool(fits.all())

    def index(self) -> Ints:
        """Give every row of every run, one after the other."""
        if self._index is None:
            self._index = _expand(self.starts, self.lengths)
        return self._index


class Runs:
    """Where the rows of a batch lie, for all columns that share their offsets."""

    __slots__ = ("_homes", "ends", "lengths", "pieces", "total")

    def __init__(self, pieces: tuple[Piece, ...], lengths: Ints) -> None:
        self.pieces = pieces
        self.lengths = lengths
        """Rows of each sample ``[B]``, in the order of the batch."""
        self.ends = np.zeros(len(lengths) + 1, np.int64)
        """Where each sample begins and ends in the batch ``[B + 1]``."""
        np.add.accumulate(lengths, out=self.ends[1:])
        self.total = int(self.ends[-1])
        """Rows in the batch."""
        self._homes: list[Ints] | None = None

    def homes(self, piece: int) -> Ints:
        """Give the rows of the batch where the index of a piece goes."""
        if self._homes is None:
            self._homes = [
                _expand(self.ends[each.places], each.lengths) for each in self.pieces
            ]
        home: Ints = self._homes[piece]
        return home


def _expand(starts: Ints, lengths: Ints) -> Ints:
    ends = lengths.cumsum()
    index: Ints = (starts - ends + lengths).repeat(lengths)
    index += np.arange(len(index))
    return index


def gather(
    columns: Mapping[int, Values],
    runs: Runs,
    out: NDArray[Any],
    add: Ints | None = None,
) -> None:
    """Copy the rows of a batch into ``out``, adding each sample's increment.

    Args:
        columns: The parts of the column by their number, each ``[n, *rest]``.
        runs: Where the rows lie.
        out: Where they go ``[runs.total, *rest]``; any strides, and a wider integer
            type than the column's where an increment asks for it.
        add: What to add to all rows of a sample ``[B]`` or ``[B, *rest]``; None for
            nothing.
    """
    if not runs.total or not out.size:
        return
    if _by_slices(columns, runs, out):
        if add is None and out.flags.c_contiguous:
            _copy_plain_slices(columns, runs, out)
        else:
            _copy_slices(columns, runs, out, add)
        return
    _take(columns, runs, out, add)


def gather_padded(columns: Mapping[int, Values], runs: Runs, out: NDArray[Any]) -> None:
    """Copy the rows of a batch side by side, with zeros behind each sample.

    Args:
        columns: The parts of the column by their number, each ``[n, *rest]``.
        runs: Where the rows lie.
        out: Where they go ``[B, L, *rest]``, contiguous; no sample has more than
            ``L`` rows.
    """
    if not out.size:
        return
    row_stride = out.shape[1]
    rows = out.reshape(-1, *out.shape[2:])
    is_zeroed = out.nbytes <= _CACHED_BYTES
    if is_zeroed:
        out.fill(0)
    for values, place, start, length in _spans(columns, runs):
        begin = place * row_stride
        end = begin + length
        rows[begin:end] = values[start : start + length]
        if not is_zeroed and length < row_stride:
            rows[end : begin + row_stride] = 0


def gather_apart(
    columns: Mapping[int, Values], runs: Runs, outs: Sequence[NDArray[Any]]
) -> None:
    """Copy the rows of each sample of a batch into an array of its own.

    Args:
        columns: The parts of the column by their number, each ``[n, *rest]``.
        runs: Where the rows lie.
        outs: Where those of each sample go ``[B]`` of ``[n, *rest]``; any strides, all
            in the same order, and a wider integer type than the column's if need be.
    """
    if not outs:
        return
    axes = _memory_order(outs[0])
    for values, place, start, length in _spans(columns, runs):
        rows = values[start : start + length]
        outs[place].transpose(axes)[...] = rows.transpose(axes)


def _by_slices(columns: Mapping[int, Values], runs: Runs, out: NDArray[Any]) -> bool:
    first: object = columns[runs.pieces[0].part]
    if not isinstance(first, np.ndarray):
        return True
    mean_bytes = out.nbytes // len(runs.lengths)
    crowded = len(runs.lengths) >= 4 * len(runs.pieces)
    return mean_bytes >= SLICE_BYTES or not crowded


def _take(
    columns: Mapping[int, Values], runs: Runs, out: NDArray[Any], add: Ints | None
) -> None:
    repeated = None
    if add is not None:
        repeated = add.repeat(runs.lengths, axis=0)
        repeated = repeated.reshape(repeated.shape + (1,) * (out.ndim - add.ndim))
    for number, piece in enumerate(runs.pieces):
        values: Any = columns[piece.part]
        alone = piece.places is None
        if alone and repeated is None and _same_layout(values, out):
            values.take(piece.index(), axis=0, out=out, mode="clip")
            return
        rows = values.take(piece.index(), axis=0, mode="clip")
        home = ... if alone else runs.homes(number)
        if repeated is not None and alone:
            axes = _memory_order(out)
            rows, repeated = rows.transpose(axes), repeated.transpose(axes)
            np.add(
                rows, repeated, out.transpose(axes), dtype=out.dtype, casting="unsafe"
            )
        elif repeated is not None:
            out[home] = np.add(rows, repeated[home], dtype=out.dtype, casting="unsafe")
        else:
            out[home] = rows


def _same_layout(values: NDArray[Any], out: NDArray[Any]) -> bool:
    return values.dtype == out.dtype and out.flags.c_contiguous


def _copy_plain_slices(
    columns: Mapping[int, Values],
    runs: Runs,
    out: NDArray[Any],
) -> None:
    begins = runs.ends.tolist()
    for values, place, start, length in _spans(columns, runs):
        begin = begins[place]
        out[begin : begin + length] = values[start : start + length]


def _spans(
    columns: Mapping[int, Values], runs: Runs
) -> Iterator[tuple[Values, int, int, int]]:
    """Give each sample's column, its place in the batch, its first row and its rows."""
    for piece in runs.pieces:
        values = columns[piece.part]
        places = (
            range(len(runs.lengths)) if piece.places is None else piece.places.tolist()
        )
        spans = zip(places, piece.starts.tolist(), piece.lengths.tolist(), strict=True)
        for place, start, length in spans:
            yield values, place, start, length


def _copy_slices(
    columns: Mapping[int, Values],
    runs: Runs,
    out: NDArray[Any],
    add: Ints | None,
) -> None:
    axes, begins = _memory_order(out), runs.ends.tolist()
    if add is not None:  # one sample's addend, shaped to meet its rows [n, *rest]
        shape = (len(add), 1, *add.shape[1:], *(1,) * (out.ndim - add.ndim))
        more = add.reshape(shape).transpose(0, *(axis + 1 for axis in axes))
    for values, place, start, length in _spans(columns, runs):
        begin = begins[place]
        home = out[begin : begin + length].transpose(axes)
        rows = values[start : start + length].transpose(axes)
        if add is not None and rows.dtype == out.dtype:
            # unsafe: bytes wrap around, as they do in torch
            np.add(rows, more[place], out=home, casting="unsafe")
            continue
        home[...] = rows
        if add is not None:
            np.add(home, more[place], out=home, casting="unsafe")


def _memory_order(array: NDArray[Any]) -> list[int]:
    """List the axes from the slowest to the fastest.

    Adding in this order takes 4 us instead of 18 for the edge_index [2, n] of 128
    molecules: numpy would follow the [n, 2] of the column.
    """
    return sorted(range(array.ndim), key=array.strides.__getitem__, reverse=True)
