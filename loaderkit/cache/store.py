"""Open a cache, and find the rows of a batch in its columns.

The values stay in mapped files: no Python object is made for each sample.

A ``Store`` is one generation of a cache.  Its parts are in other files: shards.py
hashes, maps and watches the files, column_reader.py reads one column of all shards.
Offsets, rows and counts come from disk and are checked before memory is allocated for
what they describe.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loaderkit.cache.column_parts import ABSENT, Part, column_is_missing
from loaderkit.cache.column_reader import ColumnReader, Grouping
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

    from loaderkit.array_types import Ints
    from loaderkit.cache.manifest import Manifest
    from loaderkit.cache.mirrored_shards import BatchReading

_UNLIMITED = 1 << 62
"""More bytes than any cache has."""
_MAX_OPENING_TRIES = 20
"""A cache may be replaced while it is opened, and is then opened again.  Chosen: nobody
packs a cache twenty times within milliseconds."""


class Store:
    """An open cache.  It stays the same generation, even if it is packed again.

    Opening reads the manifest and checks that the files exist.  It reads no samples and
    no offsets.

    Args:
        path: Folder of the cache, or its location in an object store.
        checksums: When shards are hashed: "once", "always" or "never".
        generation: If given, only this generation is opened.  Workers pass that of
            their parent, so that all read the same samples.
        free_bytes: Returns the memory in bytes that pages of the files may take.  If
            the cache is larger, the system is told not to read ahead, and the pages of
            each batch are requested together.

    Raises:
        CacheError: There is no complete cache in the folder.
        StaleCacheError: The folder holds another generation now.
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
        """Local copies of the shards of an object store; None for a local cache."""
        if isinstance(path, RemoteCache):
            self.mirror = Mirror(path, generation)
            self.path, self.manifest = self.mirror.folder, self.mirror.manifest
        else:
            # Absolute, since programs change the current folder (Hydra does).
            self.path = Path(path).absolute()
            self.manifest = self._load_complete_manifest(self.path)
        if generation is not None and self.manifest.generation != generation:
            raise replaced(self.path)
        self._shards = Shards(
            self.path, self.manifest, checksums, free_bytes, self.mirror
        )
        self._columns: dict[tuple[str, bool], ColumnReader] = {}
        self._has_one_shard = len(self.manifest.shards) == 1

    @staticmethod
    def _load_complete_manifest(path: Path) -> Manifest:
        """Read a manifest, and check that all of its files exist.

        After the manifest was read, another process may put a new cache in place and
        delete the files of the old one.  Then the new manifest is read.

        Raises:
            CacheError: There is no complete cache, or it is replaced all the time.
        """
        for _ in range(_MAX_OPENING_TRIES):
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
        """Read the list of the files that the cache was packed from.

        Returns:
            The list as JSON; None if the cache has none.

        Raises:
            CacheError: The list was changed since it was written, or cannot be read.
        """
        if self.mirror is not None:
            return self.mirror.load_sources()
        sources = self.manifest.sources
        return None if sources is None else load_sources(self.path, sources)

    @cached_property
    def first_samples(self) -> Ints:
        """First sample of each shard, then the number of samples ``[shards + 1]``."""
        return np.concatenate([[0], np.cumsum(self.manifest.shards.samples)])

    def column(self, name: str, *, stacked: bool = False) -> ColumnReader:
        """Make the reader of a column, or return the one made before.

        Args:
            name: Name of the column in the manifest.
            stacked: True if a batch stacks its samples; False if it concatenates them
                along their first axis.

        Returns:
            The reader.  No file is opened yet.
        """
        key = (name, stacked)
        if key not in self._columns:
            self._columns[key] = ColumnReader(self._shards, name, stacked=stacked)
        return self._columns[key]

    def locate(self, sample: int) -> tuple[int, int]:
        """Find the shard of a sample, and check it.

        Args:
            sample: Number of the sample in the cache.

        Returns:
            Number of the shard, and number of the sample in it.

        Raises:
            DamagedCacheError: The shard was changed since it was mapped.
        """
        shard = int(np.searchsorted(self.first_samples, sample, side="right")) - 1
        self._shards.prepare([shard])
        return shard, sample - int(self.first_samples[shard])

    def let_go(self) -> None:
        """Unmap shards of an object store, so that other processes may replace them.

        No batch may be read meanwhile.  What is read next is mapped again.
        """
        self._shards.let_go()

    def positions_at_once(self, samples: Ints) -> Iterator[Ints]:
        """Split many samples into groups that can be read at once.

        Args:
            samples: Sample numbers ``[n]``.

        Yields:
            Positions in ``samples``.  There is one group, or one for each shard if the
            local disk space for shards of an object store is limited.
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
        """Find the shards of the samples of a batch, and check them.

        Args:
            samples: Sample numbers ``[B]`` from 0 to ``len(store) - 1``, in any
                order, repeats allowed.

        Returns:
            The samples, by shard.

        Raises:
            DamagedCacheError: A shard was changed since it was mapped.
        """
        if self._has_one_shard:
            reading = self._shards.prepare([0])
            shards = np.zeros(len(samples), np.int64)
            return SampleSelection(self, samples, shards, [0], reading)

        shards = self.first_samples.searchsorted(samples, side="right")
        shards -= 1
        unique_shards = sorted(set(shards.tolist()))  # 4 us less than np.unique
        reading = self._shards.prepare(unique_shards)
        in_shards = samples - self.first_samples.take(shards)
        return SampleSelection(self, in_shards, shards, unique_shards, reading)


class PartSelection(NamedTuple):
    """The samples of a batch that are in one part of a column.

    A part is what can be read as one array (see column_parts.py).
    """

    number: int
    """Number of the part."""
    part: Part
    samples: Ints
    """Numbers of the samples, each counted in its shard ``[k]``."""
    shards: Ints
    """Number of each sample's shard ``[k]``."""
    positions: Ints | None
    """Position of each sample in the batch ``[k]``; None if these are all the samples
    of the batch, in order."""
    unique_shards: list[int]
    """The numbers in ``shards``, each once, in order."""

    def locate_rows(self) -> PartRanges:
        """Look up the rows of the samples in the part."""
        starts, lengths = self.part.locate_rows(self.samples, self.shards)
        return PartRanges(
            self.number,
            starts,
            lengths,
            self.positions,
            shards=self.shards,
            unique_shards=self.unique_shards,
            has_single_rows=self.part.has_single_rows,
        )


class SampleSelection:
    """The samples of one batch; finds their rows in each column.

    Args:
        store: The cache.
        samples: Numbers of the samples, each counted in its shard ``[B]``.
        shards: Number of each sample's shard ``[B]``.
        unique_shards: The numbers in ``shards``, each once, in order.
        reading: What keeps these shards mapped.
    """

    def __init__(
        self,
        store: Store,
        samples: Ints,
        shards: Ints,
        unique_shards: list[int],
        reading: BatchReading | None = None,
    ) -> None:
        self.store, self.samples, self.shards = store, samples, shards
        self.unique_shards = unique_shards
        self._reading = reading
        # Columns that share offsets (fields of one graph, say) share their row ranges,
        # and columns whose shards form the same parts share the grouping: each is
        # looked up once for a batch.
        self._row_ranges: dict[object, RowRanges] = {}
        self._positions: dict[int, list[tuple[int, Ints | None]]] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def by_part(
        self, column: ColumnReader, *, absent_allowed: bool = False
    ) -> list[PartSelection]:
        """Group the samples by the parts of a column.

        Args:
            column: The column.
            absent_allowed: Leave out samples of shards that do not have the column,
                instead of raising.

        Returns:
            One selection for each part that has samples of the batch.

        Raises:
            CacheError: Some samples do not have the column, or a file cannot be read.
        """
        grouping = column.grouping
        if grouping.part_of_shard is None:
            return [self._all_in_part(column, 0)]

        selections = []
        for number, positions in self._group_positions(grouping):
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

    def only_part(self, column: ColumnReader) -> Part | None:
        """Give the part of a column that has all samples; None where several do.

        Raises:
            CacheError: A file cannot be read.
        """
        number = self._only_number(column.grouping)
        return None if number == ABSENT else column.part(number, self.unique_shards)

    def _only_number(self, grouping: Grouping) -> int:
        """Give the number of the part that has all samples; ``ABSENT`` if none has."""
        if grouping.part_of_shard is None:
            return 0
        groups = self._group_positions(grouping)
        return groups[0][0] if len(groups) == 1 else ABSENT

    def _group_positions(self, grouping: Grouping) -> list[tuple[int, Ints | None]]:
        """Group the positions of the samples by part, once for a batch."""
        assert grouping.part_of_shard is not None
        groups = self._positions.get(grouping.key)
        if groups is None:
            parts = grouping.part_of_shard.take(self.shards)
            groups = self._positions[grouping.key] = _positions_by_part(parts)
        return groups

    def row_ranges(self, column: ColumnReader) -> RowRanges:
        """Look up the rows of the samples in a column.

        Args:
            column: A column that all the samples have.

        Returns:
            The ranges of rows.  Columns that share their offsets get the same object.
        """
        if column.grouping.part_of_shard is None:
            return self.locate(column)[1]
        selections = self.by_part(column)
        # Columns with the same layout may number their parts differently: if earlier
        # shards lack a column, it has fewer parts.  So the number belongs to the key.
        key = tuple([(chosen.number, chosen.part.layout_key) for chosen in selections])
        ranges = self._row_ranges.get(key)
        if ranges is None:
            ranges = self._row_ranges[key] = self._locate_rows(selections)
        return ranges

    def locate(self, column: ColumnReader) -> tuple[NDArray[Any] | None, RowRanges]:
        """Look up the rows of the samples, and the array in which they lie.

        Most columns of a batch are one array from which it can take its rows at once,
        so this is kept short.

        Args:
            column: A column that all the samples have.

        Returns:
            That array; None where ``column.gather`` has to see to the values first:
            there are several, they are compressed, larger than memory, or have offsets
            to check.  And the ranges of rows, as ``row_ranges`` gives them.
        """
        number = self._only_number(column.grouping)
        if number == ABSENT:
            return None, self.row_ranges(column)
        part = column.part(number, self.unique_shards)
        key = part.layout_key
        if column.grouping.part_of_shard is not None:
            # As ``row_ranges`` has it: columns may number their parts differently.
            key = ((number, key),)
        ranges = self._row_ranges.get(key)
        if ranges is None:
            in_part = self._all_in_part(column, number).locate_rows()
            ranges = self._row_ranges[key] = RowRanges((in_part,), in_part.lengths)
        return part.ready_values, ranges

    def _all_in_part(self, column: ColumnReader, number: int) -> PartSelection:
        part = column.part(number, self.unique_shards)
        return PartSelection(
            number, part, self.samples, self.shards, None, self.unique_shards
        )

    def _locate_rows(self, selections: list[PartSelection]) -> RowRanges:
        ranges_of_parts: list[PartRanges] = []
        lengths_in_batch = np.empty(len(self), np.int64)
        for selection in selections:
            ranges = selection.locate_rows()
            if selection.positions is None:
                return RowRanges((ranges,), ranges.lengths)
            ranges_of_parts.append(ranges)
            lengths_in_batch[selection.positions] = ranges.lengths
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
    """Group the positions of a batch by part; None stands for all positions.

    >>> _positions_by_part(np.array([4, 2, 4]))
    [(2, array([1])), (4, array([0, 2]))]
    """
    numbers = sorted(set(parts.tolist()))
    if len(numbers) == 1:
        return [(numbers[0], None)]
    return [(number, (parts == number).nonzero()[0]) for number in numbers]
