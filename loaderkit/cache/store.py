"""Open a cache and read rows from it: mapped, no Python object per sample.

A ``Store`` is one generation of a cache; shards.py hashes, maps and watches its files;
column_reader.py reads one column from all of them.  Before anything is made room for,
offsets, rows and counts are checked.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loaderkit.cache.column_parts import ABSENT, Part, column_is_missing
from loaderkit.cache.column_reader import ColumnReader
from loaderkit.cache.files import check_files, load_manifest, load_sources
from loaderkit.cache.gather import PartRanges, RowRanges
from loaderkit.cache.mirror import Mirror
from loaderkit.cache.remote import RemoteCache
from loaderkit.cache.shards import Checksums, Shards, check_checksums, replaced
from loaderkit.errors import CacheError, DamagedCacheError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from loaderkit.cache.manifest import Manifest

    Ints = NDArray[np.int64]

_UNLIMITED = 1 << 62
_OPENING_TRIES = 20
"""A cache can be replaced while it is opened; not so often in a row.  Chosen."""


class Store:
    """An open cache: one generation of it, whatever is packed there afterwards.

    Opening reads the manifest and looks for the files: no sample, no offset.

    Args:
        path: The cache's folder, or the store that it is in.
        checksums: When shards are hashed: "once", "always" or "never".
        generation: Open this one or none, so that workers read what their parent does.
        free_bytes: Says how much memory pages of the files may take.  Where they are
            larger, just the pages of each batch are read, and those together.

    Raises:
        CacheError: There is no whole cache in the folder.
        StaleCacheError: Another generation stands there now.
        ValueError: ``checksums`` is none of the three.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | RemoteCache,
        *,
        checksums: Checksums = "once",
        generation: str | None = None,
        free_bytes: Callable[[], int] = lambda: _UNLIMITED,
    ) -> None:
        check_checksums(checksums)
        self.mirror: Mirror | None = None
        """Where the shards of a store are kept; None for a cache in a folder."""
        if isinstance(path, RemoteCache):
            self.mirror = Mirror(path, generation)
            self.path, self.manifest = self.mirror.folder, self.mirror.manifest
        else:
            # Absolute: programs change the current folder (Hydra does).
            self.path = Path(path).absolute()
            self.manifest = self._load_manifest_of_whole_cache(self.path)
        if generation is not None and self.manifest.generation != generation:
            raise replaced(self.path)
        self._shards = Shards(
            self.path, self.manifest, checksums, free_bytes, self.mirror
        )
        self._columns: dict[tuple[str, bool], ColumnReader] = {}

    @staticmethod
    def _load_manifest_of_whole_cache(path: Path) -> Manifest:
        """Read a manifest whose files are all there.

        Between reading a manifest and looking for its files, another process may put a
        new cache in place and delete the old one's files; then the new one is read.
        """
        for _ in range(_OPENING_TRIES):
            manifest = load_manifest(path)
            try:
                check_files(path, manifest.shards)
            except DamagedCacheError:
                if load_manifest(path).generation == manifest.generation:
                    raise
            else:
                return manifest
        message = f"The cache {path} is packed again and again while it is opened."
        fix = "wait until the process that packs it has ended"
        raise CacheError(message, why="its files change faster than they open", fix=fix)

    def __len__(self) -> int:
        return self.manifest.samples

    def load_sources(self) -> str | None:
        """Read the list of the files that the cache was made from; None without one.

        Raises:
            CacheError: It is not the list that was written, or cannot be read.
        """
        if self.mirror is not None:
            return self.mirror.load_sources()
        sources = self.manifest.sources
        return None if sources is None else load_sources(self.path, sources)

    @cached_property
    def first_samples(self) -> Ints:
        """Number of the first sample of each shard, and of the one behind the last."""
        return np.concatenate([[0], np.cumsum(self.manifest.shards.samples)])

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
        shard = int(np.searchsorted(self.first_samples, sample, side="right")) - 1
        self._shards.prepare([shard])
        return shard, sample - int(self.first_samples[shard])

    def let_go(self) -> None:
        """Let other processes have the room that shards of a store take here.

        No batch may be read meanwhile; whatever is read next is mapped again.
        """
        self._shards.let_go()

    def positions_at_once(self, samples: Ints) -> Iterator[Ints]:
        """Divide many samples into what can be read at once.

        Args:
            samples: Sample numbers ``[n]``.

        Yields:
            Positions in ``samples``: all of them, or those of one shard after the other
            where a mirror cannot hold all shards.
        """
        if self.mirror is None or not self.mirror.is_capped:
            yield np.arange(len(samples))
            return
        shards = self.first_samples.searchsorted(samples, side="right")
        order = np.argsort(shards, kind="stable")
        [changes] = np.diff(shards[order]).nonzero()
        for positions in np.split(order, changes + 1):
            if len(positions):
                yield positions

    def select(self, samples: Ints) -> SampleSelection:
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
            self._shards.prepare([0])
            shards = np.zeros(len(samples), np.int64)
            return SampleSelection(self, samples, shards, [0])

        shards = self.first_samples.searchsorted(samples, side="right")
        shards -= 1
        unique_shards = sorted(set(shards.tolist()))  # 4 us less than np.unique
        self._shards.prepare(unique_shards)
        in_shards = samples - self.first_samples.take(shards)
        return SampleSelection(self, in_shards, shards, unique_shards)


class PartSelection(NamedTuple):
    """The samples of a batch that are in one part of a column."""

    number: int
    """Number of the part."""
    part: Part
    samples: Ints
    """Their numbers, each in its shard ``[k]``."""
    shards: Ints
    """Numbers of their shards ``[k]``."""
    positions: Ints | None
    """Where they stand in the batch ``[k]``; None when they are all of it, in order."""
    unique_shards: list[int]
    """The shards among ``shards``, each once."""


class SampleSelection:
    """The samples of one batch, and where their rows lie in each column.

    Args:
        store: The cache.
        samples: Sample numbers, each in its shard ``[B]``.
        shards: Numbers of their shards ``[B]``.
        unique_shards: The shards among them, each once.
    """

    def __init__(
        self, store: Store, samples: Ints, shards: Ints, unique_shards: list[int]
    ) -> None:
        self.store, self.samples, self.shards = store, samples, shards
        self.unique_shards = unique_shards
        # What columns have in common is looked up once a batch: fields of one graph
        # share their offsets, and their shards are grouped alike.
        self._row_ranges: dict[object, RowRanges] = {}
        self._positions: dict[int, list[tuple[int, Ints | None]]] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def by_part(
        self, column: ColumnReader, *, absent_allowed: bool = False
    ) -> list[PartSelection]:
        """Divide the samples among the parts of a column.

        Args:
            column: The column.
            absent_allowed: Leave samples out that do not have it.

        Returns:
            The samples of each part that the batch touches.

        Raises:
            CacheError: Samples do not have the column, or a file cannot be read.
        """
        grouping = column.grouping
        if grouping.part_of_shard is None:
            return [self._all_in_part(column, 0)]
        if grouping.key not in self._positions:
            parts = grouping.part_of_shard.take(self.shards)
            self._positions[grouping.key] = _positions_by_part(parts)

        selections = []
        for number, positions in self._positions[grouping.key]:
            if number == ABSENT:
                if not absent_allowed:
                    raise self._column_is_missing(column, grouping.part_of_shard)
                continue
            if positions is None:
                return [self._all_in_part(column, number)]
            shards, samples = self.shards.take(positions), self.samples.take(positions)
            unique_shards = sorted(set(shards.tolist()))
            part = column.part(number, unique_shards)
            selections.append(
                PartSelection(number, part, samples, shards, positions, unique_shards)
            )
        return selections

    def row_ranges(self, column: ColumnReader) -> RowRanges:
        """Look up the rows of the samples in a column.

        Args:
            column: A column that all the samples have.

        Returns:
            The same object for all columns that share their offsets.
        """
        selections = self.by_part(column)
        # Rows that lie alike may be in parts of other numbers: a column that the shards
        # before lack has fewer parts than its neighbour.
        key = tuple([(part.number, part.part.layout_key) for part in selections])
        ranges = self._row_ranges.get(key)
        if ranges is None:
            ranges = self._row_ranges[key] = self._locate_rows(selections)
        return ranges

    def _all_in_part(self, column: ColumnReader, number: int) -> PartSelection:
        part = column.part(number, self.unique_shards)
        return PartSelection(
            number, part, self.samples, self.shards, None, self.unique_shards
        )

    def _locate_rows(self, selections: list[PartSelection]) -> RowRanges:
        ranges_of_parts: list[PartRanges] = []
        lengths_in_batch = np.empty(len(self), np.int64)
        for selection in selections:
            part = selection.part
            starts, lengths = part.locate_rows(selection.samples, selection.shards)
            ranges = PartRanges(
                selection.number,
                starts,
                lengths,
                selection.positions,
                shards=selection.shards,
                unique_shards=selection.unique_shards,
                has_single_rows=part.has_single_rows,
            )
            if selection.positions is None:
                return RowRanges((ranges,), lengths)
            ranges_of_parts.append(ranges)
            lengths_in_batch[selection.positions] = lengths
        return RowRanges(tuple(ranges_of_parts), lengths_in_batch)

    def _column_is_missing(
        self, column: ColumnReader, part_of_shard: Ints
    ) -> CacheError:
        without_column = [
            shard for shard in self.unique_shards if part_of_shard[shard] == ABSENT
        ]
        file = self.store.manifest.shards.file(without_column[0]).file
        return column_is_missing(file, column.name)


def _positions_by_part(parts: Ints) -> list[tuple[int, Ints | None]]:
    """Say which positions of a batch are in each part; None for all of them.

    >>> _positions_by_part(np.array([4, 2, 4]))
    [(2, array([1])), (4, array([0, 2]))]
    """
    numbers = sorted(set(parts.tolist()))
    if len(numbers) == 1:
        return [(numbers[0], None)]
    return [(number, (parts == number).nonzero()[0]) for number in numbers]
