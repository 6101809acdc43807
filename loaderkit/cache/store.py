"""Open a cache and read rows from it: mapped, no Python object per sample.

Nothing on disk is believed.  A shard is hashed before its first use (once a machine,
see verified.py); offsets, rows and counts are checked before anything is made room for;
and before each batch the files are looked at, so that one cut short is an error where
the system would end the process (SIGBUS).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from loaderkit.cache.files import (
    FileIdentity,
    check_open_digest,
    check_size,
    identity_of,
    load_manifest,
    map_open_file,
    missing,
    opened,
    unreadable,
    wrong_size,
)
from loaderkit.cache.gather import Piece, Runs, Values, gather
from loaderkit.cache.hdf5 import ChunkedValues, joined_shape
from loaderkit.cache.verified import VerifiedFiles, record_path
from loaderkit.errors import CacheError, DamagedCacheError, StaleCacheError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loaderkit.cache.layout import Array, Manifest, Shard

    Ints = NDArray[np.int64]

_CHECKED_AT_ONCE = 1 << 20
"""So many offsets of a shard are checked when it is opened (4 ms).  Where there are
more, each batch checks its own, which costs it 5 us a column."""
_OPENING_TRIES = 20
"""A cache can be replaced while it is opened; not so often in a row."""


Checksums = Literal["once", "always", "never"]
"""When a shard is hashed and compared with the manifest.

once: before its first use, unless this machine has done so before.  always: before its
first use in each process.  never: not at all; flipped bits are served as data.
"""


def check_checksums(checksums: object) -> None:
    """Refuse what is none of the three words.

    >>> check_checksums("sometimes")
    Traceback (most recent call last):
    ValueError: checksums must be one of once, always, never, got 'sometimes'
    """
    known = get_args(Checksums)
    if checksums not in known:
        msg = f"checksums must be one of {', '.join(known)}, got {checksums!r}"
        raise ValueError(msg)


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
    """Check that offsets go up and stay inside the values."""
    ordered = bool((offsets[1:] >= offsets[:-1]).all())
    return ordered and int(offsets[0]) >= 0 and int(offsets[-1]) <= rows


def _are_sample_numbers(rows: Ints, samples: int) -> bool:
    """Check that rows name samples of the shard, each once, in order."""
    ordered = bool((rows[1:] > rows[:-1]).all())
    return ordered and (not len(rows) or (rows[0] >= 0 and rows[-1] < samples))


class Shards:
    """The files of a cache, each hashed and mapped when first read.

    Columns hold on to this rather than to the store, so that a dataset that is let go
    unmaps its files at once, without waiting for the garbage collector.
    """

    def __init__(self, path: Path, manifest: Manifest, checksums: Checksums) -> None:
        self.path, self.manifest, self._checksums = path, manifest, checksums
        record = record_path() if checksums == "once" else None
        self._verified = VerifiedFiles(record)
        self._maps: dict[int, NDArray[np.uint8]] = {}
        self._paths: dict[int, str] = {}
        self._identities: dict[int, FileIdentity] = {}

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
        array = self.manifest.shards[shard].arrays[name]
        if array.offset is not None:
            mapped = self._mapped(shard, array)
            return mapped.reshape(joined_shape(array.shape)) if joined else mapped
        return ChunkedValues(
            self._file(shard),
            array,
            self.index_array(shard, str(array.chunk_index)),
            str(self.manifest.compression),
            joined=joined,
            damaged=lambda why: self.damaged(shard, name, why),
        )

    def check_unchanged(self, shard: int) -> None:
        """See that a file is still the one that was hashed and mapped.

        Costs 1 us.  What is cut off while a batch is copied still ends the process.

        Args:
            shard: Number of the shard; nothing happens if it is not mapped yet.

        Raises:
            DamagedCacheError: It was cut short, or its bytes were changed.
        """
        known = self._identities.get(shard)
        if known is None:
            return
        try:
            now = identity_of(os.stat(self._paths[shard]))
        except OSError:
            return  # without a name it cannot be cut short; what is mapped stays
        if now == known or (now.device, now.inode) != (known.device, known.inode):
            return
        if now.bytes != known.bytes:
            raise wrong_size(Path(self._paths[shard]), now.bytes, known.bytes)
        # Written to, or only touched: the bytes will tell.
        del self._maps[shard], self._identities[shard]
        self._file(shard)

    def damaged(self, shard: int, column: str, why: str) -> DamagedCacheError:
        """Say that a column's bytes contradict each other."""
        file = self.path / self.manifest.shards[shard].file
        what = f"Column {column!r} of {file} is damaged: {why}."
        fix = "loaderkit verify CACHE, then pack it again"
        return DamagedCacheError(what, why="the file was changed on disk", fix=fix)

    def _mapped(self, shard: int, array: Array) -> NDArray[Any]:
        if not array.nbytes:
            return np.empty(array.shape, array.dtype)
        start = array.offset or 0
        piece = self._file(shard)[start : start + array.nbytes]
        return piece.view(array.dtype).reshape(array.shape)

    def _file(self, shard: int) -> NDArray[np.uint8]:
        """Give all bytes of a shard, mapped, and hashed first where that is asked."""
        mapped = self._maps.get(shard)
        if mapped is not None:
            return mapped
        described = self.manifest.shards[shard]
        file = self.path / described.file
        try:
            with opened(file) as descriptor:
                identity = self._verify(descriptor, file, described)
                mapped = map_open_file(descriptor, described)
        except FileNotFoundError:
            raise self._gone(file) from None
        except OSError as error:
            raise unreadable(file, error) from error
        self._paths[shard], self._identities[shard] = os.fspath(file), identity
        self._maps[shard] = mapped
        return mapped

    def _verify(self, descriptor: int, file: Path, shard: Shard) -> FileIdentity:
        identity = identity_of(os.fstat(descriptor))
        if identity.bytes != shard.bytes:
            raise wrong_size(file, identity.bytes, shard.bytes)
        if self._checksums == "never":
            return identity
        if (identity, shard.xxh3) not in self._verified:
            identity = check_open_digest(descriptor, file, shard)
            self._verified.add(identity, shard.xxh3)
        return identity

    def _gone(self, file: Path) -> CacheError:
        """Tell a cache that was packed again from one that lost a file."""
        try:
            now = load_manifest(self.path).generation
        except CacheError:
            now = ""
        if not now or now == self.manifest.generation:
            return missing(file)
        return replaced(self.path)


def replaced(path: Path) -> StaleCacheError:
    """Say that a cache was packed again under an open dataset."""
    what = f"The cache {path} was packed again while this dataset was open."
    why = "a dataset reads one cache from beginning to end, never old and new together"
    return StaleCacheError(what, why=why, fix="open it again: open_cache(path)")


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
            start = sample * part.each
            rows = np.array(part.values[start : start + part.each])
            return rows.reshape(self._dense_shape(shard))
        start, stop = part.offsets[sample : sample + 2].tolist()
        length = stop - start
        if start < 0 or length < 0 or stop > part.values.shape[0]:
            raise self._outside(shard)
        flat: NDArray[Any] = np.array(part.values[start:stop])
        if part.shapes is None:
            return flat
        shape = part.shapes[sample].tolist()
        if min(shape, default=0) < 0 or math.prod(shape) != length:
            why = f"a value has {length:,} numbers, and the shape {shape}"
            raise self._shards.damaged(shard, self.name, why)
        shaped: NDArray[Any] = flat.reshape(shape)
        return shaped

    def numbers(self, shard: int, samples: Ints) -> NDArray[Any]:
        """Look up one small number, or row of numbers, of some samples.

        Args:
            shard: Number of the shard.
            samples: Sample numbers in it ``[B]``; all have the column.

        Returns:
            ``[B]`` or ``[B, k]``, new.

        Raises:
            DamagedCacheError: A number is smaller or larger than any that was packed.
        """
        part = self.part(shard)
        values: Any = part.values
        found: NDArray[Any] = values.take(part.find(samples)[0], axis=0)
        column = self._shards.manifest.shards[shard].columns[self.name]
        if column.low is not None and column.high is not None and found.size:
            low, high = int(found.min()), int(found.max())
            if low < column.low or high > column.high:
                why = (
                    f"it holds numbers from {low:,} to {high:,}, "
                    f"not from {column.low:,} to {column.high:,}"
                )
                raise self._shards.damaged(shard, self.name, why)
        return found

    def _outside(self, shard: int) -> DamagedCacheError:
        return self._shards.damaged(shard, self.name, "its offsets point outside it")

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
        if rows is not None and not _are_sample_numbers(rows, described.samples):
            raise self._shards.damaged(shard, self.name, "its rows are in no order")
        each = array.shape[1] if joined else 1
        key = (column.offsets or each, column.rows)
        apart = self._stacked and column.offsets is not None
        small = offsets is not None and len(offsets) <= _CHECKED_AT_ONCE
        if offsets is not None and small and not _is_sound(offsets, values.shape[0]):
            raise self._outside(shard)
        sound = offsets is None or small
        return Part(
            values, offsets, shapes, rows, each, key, unstackable=apart, sound=sound
        )


class Store:
    """An open cache: one generation of it, whatever is packed there afterwards.

    Opening reads the manifest and asks for the files' sizes: no sample, no offset.

    Args:
        path: The cache's folder.
        checksums: When shards are hashed: "once", "always" or "never".
        generation: Open this one or none, so that workers read what their parent does.

    Raises:
        CacheError: There is no whole cache in the folder.
        StaleCacheError: Another generation stands there now.
        ValueError: ``checksums`` is none of the three.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        checksums: Checksums = "once",
        generation: str | None = None,
    ) -> None:
        check_checksums(checksums)
        self.path = Path(path)
        self.manifest = self._load(self.path)
        if generation is not None and self.manifest.generation != generation:
            raise replaced(self.path)
        self._shards = Shards(self.path, self.manifest, checksums)
        self._columns: dict[tuple[str, bool], ColumnReader] = {}

    @staticmethod
    def _load(path: Path) -> Manifest:
        """Read a manifest whose files are all there.

        Between reading a manifest and looking for its files, another process may put a
        new cache in place and delete the old one's files; then the new one is read.
        """
        for _ in range(_OPENING_TRIES):
            manifest = load_manifest(path)
            try:
                for shard in manifest.shards:
                    check_size(path, shard)
            except DamagedCacheError:
                if load_manifest(path).generation == manifest.generation:
                    raise
            else:
                return manifest
        what = f"The cache {path} is packed again and again while it is opened."
        fix = "wait until the process that packs it has ended"
        raise CacheError(what, why="its files change faster than they open", fix=fix)

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
        """Turn a sample's number into its shard's and its number in there.

        Raises:
            DamagedCacheError: The shard was changed since it was mapped.
        """
        shard = int(np.searchsorted(self.firsts, sample, side="right")) - 1
        self._shards.check_unchanged(shard)
        return shard, sample - int(self.firsts[shard])

    def pick(self, samples: Ints) -> Pick:
        """Choose the samples of a batch.

        Args:
            samples: Sample numbers ``[B]`` from 0 to ``len(store) - 1``, in any
                order, repeats allowed.

        Returns:
            Where they lie, shard by shard.

        Raises:
            DamagedCacheError: A shard was changed since it was mapped.
        """
        if len(self.manifest.shards) == 1:
            self._shards.check_unchanged(0)
            return Pick(self, len(samples), ((0, samples, None),))
        shards = self.firsts.searchsorted(samples, side="right") - 1
        local = samples - self.firsts.take(shards)
        touched = sorted(set(shards.tolist()))  # 4 us less than np.unique
        for shard in touched:
            self._shards.check_unchanged(shard)
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
