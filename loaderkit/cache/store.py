"""Open a cache and read rows from it: mapped, no Python object per sample."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.cache.files import check_digest, check_size, load_manifest, map_file
from loaderkit.cache.gather import Piece, Runs, Values, gather
from loaderkit.cache.hdf5 import ChunkedValues, joined_shape
from loaderkit.errors import CacheError, DamagedCacheError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loaderkit.cache.layout import Array, Manifest

    Ints = NDArray[np.int64]

HASHED_AT_OPEN = 16 << 20
"""Caches up to this size are hashed whole when opened: about 1 ms in page cache."""


_CHECKED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Part:
    """One column in one shard."""

    values: Values
    """Rows end to end ``[n, *rest]``."""
    offsets: Ints | None
    shapes: Ints | None
    rows: Ints | None
    """Samples of the shard that have the column; None for all."""
    each: int
    """Rows of every sample where there are no offsets."""
    key: tuple[object, ...]
    """Equal for columns of one shard whose rows lie alike."""
    unstackable: bool
    """True when samples that should be stacked have different shapes."""
    sound: bool
    """True when no offset can point outside the values, so that none is checked."""

    def find(self, samples: Ints) -> tuple[Ints, Ints]:
        """Say where the rows of samples lie.

        Args:
            samples: Sample numbers in the shard ``[B]``; all have the column.

        Returns:
            First row and number of rows of each ``[B]``.
        """
        if self.rows is not None:
            samples = np.searchsorted(self.rows, samples).clip(0, len(self.rows) - 1)
        if self.offsets is None:
            lengths = np.full(len(samples), self.each, np.int64)
            return (samples if self.each == 1 else samples * self.each), lengths
        starts = self.offsets.take(samples)
        lengths = self.offsets.take(samples + 1)
        lengths -= starts
        return starts, lengths


def _is_sound(offsets: Ints, rows: int) -> bool:
    """Check all offsets of a shard once, where that is cheap (4 ms a million).

    Otherwise each batch checks its own, which costs it 5 us a column.
    """
    if len(offsets) > _CHECKED_AT_ONCE:
        return False
    ordered = bool((offsets[1:] >= offsets[:-1]).all())
    return ordered and int(offsets[0]) >= 0 and int(offsets[-1]) <= rows


class Shards:
    """The files of a cache, each mapped when first read.

    Columns hold on to this rather than to the store, so that a dataset that is let go
    unmaps its files at once, without waiting for the garbage collector.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._maps: dict[int, NDArray[np.uint8]] = {}

    def index_array(self, shard: int, name: str) -> Ints:
        """Map one of a shard's arrays of offsets, shapes or rows."""
        return self._mapped(shard, self.manifest.shards[shard].arrays[name])

    def values(self, shard: int, name: str, *, joined: bool) -> Values:
        """Open the values of a column in one shard.

        Args:
            shard: Number of the shard.
            name: The array's name in it.
            joined: See ``[m, k, *rest]`` as ``[m * k, *rest]``.

        Returns:
            Mapped and read-only, or decompressed as they are read.
        """
        described = self.manifest.shards[shard]
        array = described.arrays[name]
        if array.offset is None:
            path = self.path / described.file
            return ChunkedValues(path, name, array, joined=joined)
        mapped = self._mapped(shard, array)
        return mapped.reshape(joined_shape(array.shape)) if joined else mapped

    def _mapped(self, shard: int, array: Array) -> NDArray[Any]:
        if not array.nbytes:
            return np.empty(array.shape, array.dtype)
        if shard not in self._maps:
            self._maps[shard] = map_file(self.path, self.manifest.shards[shard])
        start = array.offset or 0
        piece = self._maps[shard][start : start + array.nbytes]
        return piece.view(array.dtype).reshape(array.shape)


class ColumnReader:
    """One column across all shards, opened shard by shard as rows are asked for."""

    def __init__(self, shards: Shards, name: str, *, stacked: bool) -> None:
        self._shards, self.name, self._stacked = shards, name, stacked
        self._parts: dict[int, Part] = {}

    def part(self, shard: int) -> Part:
        """Give the column in one shard.

        Args:
            shard: Number of the shard.

        Returns:
            Its arrays, mapped.

        Raises:
            CacheError: The shard has no such column.
        """
        part = self._parts.get(shard)
        if part is None:
            part = self._parts[shard] = self._open(shard)
        return part

    def gather(
        self,
        runs: Runs,
        out: NDArray[Any],
        *,
        add: Ints | None = None,
        apart: int | None = None,
    ) -> None:
        """Copy the rows of a batch.

        Args:
            runs: Where they lie, from ``Pick.runs`` for this column.
            out: Where they go ``[runs.total, *rest]``.
            add: What to add to the rows of each sample ``[B]`` or ``[B, *rest]``.
            apart: Rows of ``out`` for each sample, for padded batches.

        Raises:
            DamagedCacheError: The offsets on disk point outside the column.
        """
        values: dict[int, Values] = {}
        for piece in runs.pieces:
            part = self.part(piece.shard)
            values[piece.shard] = part.values
            if not part.sound and not piece.inside(part.values.shape[0]):
                raise self._outside(piece.shard)
        gather(values, runs, out, add, apart=apart)

    @cached_property
    def rest(self) -> tuple[int, ...] | None:
        """Shape of a row behind its first axis; None where samples differ in that."""
        found: set[tuple[int, ...] | None] = set()
        for shard in self._shards.manifest.shards:
            column = shard.columns.get(self.name)
            if column is not None:
                shape = shard.arrays[column.values].shape
                joined = column.offsets is None and not self._stacked and len(shape) > 1
                apart = column.shapes or (self._stacked and column.offsets)
                found.add(None if apart else shape[1 + joined :])
        return found.pop() if len(found) == 1 else None

    def read(self, shard: int, sample: int) -> NDArray[Any]:
        """Copy one sample's value out of the column.

        Args:
            shard: Number of the shard.
            sample: The sample's number in it.

        Returns:
            A new array of the shape that was packed; it keeps nothing mapped.
        """
        part = self.part(shard)
        if part.rows is not None:
            sample = min(int(np.searchsorted(part.rows, sample)), len(part.rows) - 1)
        if part.offsets is None:
            rows = np.array(self._cut(part, sample * part.each, part.each))
            return rows.reshape(self._dense_shape(shard))
        start, stop = part.offsets[sample : sample + 2].tolist()
        rows = np.array(self._cut(part, start, stop - start))
        return rows if part.shapes is None else self._shaped(rows, part, sample)

    def _cut(self, part: Part, start: int, length: int) -> NDArray[Any]:
        if start < 0 or length < 0 or start + length > part.values.shape[0]:
            raise self._outside(None)
        return part.values[start : start + length]

    def _outside(self, shard: int | None) -> DamagedCacheError:
        file = "" if shard is None else f" in shard {shard}"
        what = f"The offsets of {self.name!r}{file} point outside its rows."
        fix = "loaderkit verify CACHE, then pack it again"
        return DamagedCacheError(what, why="the file was changed on disk", fix=fix)

    def _shaped(self, rows: NDArray[Any], part: Part, sample: int) -> NDArray[Any]:
        shape = part.shapes[sample].tolist() if part.shapes is not None else []
        try:
            return rows.reshape(shape)
        except ValueError:
            what = f"A value of {self.name!r} has {rows.size} numbers, not {shape}."
            fix = "loaderkit verify CACHE, then pack it again"
            raise DamagedCacheError(what, why="the file was changed", fix=fix) from None

    def _dense_shape(self, shard: int) -> tuple[int, ...]:
        described = self._shards.manifest.shards[shard]
        return described.arrays[described.columns[self.name].values].shape[1:]

    def _open(self, shard: int) -> Part:
        described = self._shards.manifest.shards[shard]
        column = described.columns.get(self.name)
        if column is None:
            what = f"{described.file} holds no column {self.name!r}."
            raise CacheError(what, why="none of its samples has it")
        array = described.arrays[column.values]
        joined = column.offsets is None and not self._stacked and len(array.shape) > 1
        offsets, shapes, rows = (
            self._shards.index_array(shard, name) if name else None
            for name in (column.offsets, column.shapes, column.rows)
        )
        values = self._shards.values(shard, column.values, joined=joined)
        each = array.shape[1] if joined else 1
        key = (column.offsets or each, column.rows)
        apart = self._stacked and column.offsets is not None
        sound = offsets is None or _is_sound(offsets, values.shape[0])
        return Part(
            values, offsets, shapes, rows, each, key, unstackable=apart, sound=sound
        )


class Store:
    """An open cache.

    Opening reads the manifest and asks for the files' sizes: no sample, no offset.
    A small cache is hashed whole as well, since that costs about a millisecond.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.manifest = load_manifest(self.path)
        self._shards = Shards(self.path, self.manifest)
        self._columns: dict[tuple[str, bool], ColumnReader] = {}
        for shard in self.manifest.shards:
            check_size(self.path, shard)
        if self.manifest.bytes <= HASHED_AT_OPEN:
            for shard in self.manifest.shards:
                check_digest(self.path, shard)

    def __len__(self) -> int:
        return self.manifest.samples

    @cached_property
    def firsts(self) -> Ints:
        """Number of the first sample of each shard, and of the one behind the last."""
        counts = [shard.samples for shard in self.manifest.shards]
        return np.concatenate([[0], np.cumsum(np.array(counts, np.int64))])

    def column(self, name: str, *, stacked: bool = False) -> ColumnReader:
        """Give a column by name.

        Args:
            name: Its name in the manifest.
            stacked: Its samples become rows of their own in a batch, instead of
                being joined along their first axis.

        Returns:
            A reader of it; nothing is opened yet.
        """
        key = (name, stacked)
        if key not in self._columns:
            self._columns[key] = ColumnReader(self._shards, name, stacked=stacked)
        return self._columns[key]

    def locate(self, sample: int) -> tuple[int, int]:
        """Turn a sample's number into its shard's and its number in there."""
        shard = int(np.searchsorted(self.firsts, sample, side="right")) - 1
        return shard, sample - int(self.firsts[shard])

    def pick(self, samples: Ints) -> Pick:
        """Choose the samples of a batch.

        Args:
            samples: Sample numbers ``[B]`` from 0 to ``len(store) - 1``, in any
                order, repeats allowed.

        Returns:
            Where they lie, shard by shard.
        """
        if len(self.manifest.shards) == 1:
            return Pick(self, len(samples), ((0, samples, None),))
        shards = self.firsts.searchsorted(samples, side="right") - 1
        local = samples - self.firsts.take(shards)
        touched = sorted(set(shards.tolist()))  # 4 us less than np.unique
        if len(touched) == 1:
            return Pick(self, len(samples), ((touched[0], local, None),))
        places = [(shards == shard).nonzero()[0] for shard in touched]
        groups = zip(touched, places, strict=True)
        return Pick(self, len(samples), tuple((s, local[p], p) for s, p in groups))


class Pick:
    """The samples of one batch, and where their rows lie in each column."""

    def __init__(
        self,
        store: Store,
        count: int,
        groups: tuple[tuple[int, Ints, Ints | None], ...],
    ) -> None:
        self.store, self.count, self.groups = store, count, groups
        self._runs: dict[object, Runs] = {}

    def runs(self, column: ColumnReader) -> Runs:
        """Look up the rows of the samples in a column.

        Args:
            column: A column that all the samples have.

        Returns:
            The same object for all columns that share their offsets.
        """
        parts = [column.part(shard) for shard, _, _ in self.groups]
        key = parts[0].key if len(parts) == 1 else tuple(part.key for part in parts)
        runs = self._runs.get(key)
        if runs is None:
            runs = self._runs[key] = self._find(parts)
        return runs

    def _find(self, parts: Sequence[Part]) -> Runs:
        pieces: list[Piece] = []
        lengths = np.empty(self.count, np.int64)
        for (shard, samples, places), part in zip(self.groups, parts, strict=True):
            starts, counts = part.find(samples)
            single = part.offsets is None and part.each == 1
            pieces.append(Piece(shard, starts, counts, places, single=single))
            if places is None:
                return Runs((pieces[0],), counts)
            lengths[places] = counts
        return Runs(tuple(pieces), lengths)
