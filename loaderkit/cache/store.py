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

from loaderkit.cache.column_reader import ABSENT, ColumnReader, Part, lacks_column
from loaderkit.cache.files import check_files, load_manifest, load_sources
from loaderkit.cache.gather import Piece, Runs
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
"""A cache can be replaced while it is opened; not so often in a row."""


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
            self.manifest = self._load(self.path)
        if generation is not None and self.manifest.generation != generation:
            raise replaced(self.path)
        self._shards = Shards(
            self.path, self.manifest, checksums, free_bytes, self.mirror
        )
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
                check_files(path, manifest.shards)
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
    def firsts(self) -> Ints:
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
        shard = int(np.searchsorted(self.firsts, sample, side="right")) - 1
        self._shards.prepare([shard])
        return shard, sample - int(self.firsts[shard])

    def let_go(self) -> None:
        """Let other processes have the room that shards of a store take here.

        No batch may be read meanwhile; whatever is read next is mapped again.
        """
        self._shards.let_go()

    def places_at_once(self, samples: Ints) -> Iterator[Ints]:
        """Divide many samples into what can be read at once.

        Args:
            samples: Sample numbers ``[n]``.

        Yields:
            Places in ``samples``: all of them, or those of one shard after the other
            where a mirror cannot hold all shards.
        """
        if self.mirror is None or not self.mirror.is_capped:
            yield np.arange(len(samples))
            return
        shards = self.firsts.searchsorted(samples, side="right")
        order = np.argsort(shards, kind="stable")
        [changes] = np.diff(shards[order]).nonzero()
        for places in np.split(order, changes + 1):
            if len(places):
                yield places

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
            self._shards.prepare([0])
            return Pick(self, samples, np.zeros(len(samples), np.int64), [0])
        shards = self.firsts.searchsorted(samples, side="right")
        shards -= 1
        touched = sorted(set(shards.tolist()))  # 4 us less than np.unique
        self._shards.prepare(touched)
        return Pick(self, samples - self.firsts.take(shards), shards, touched)


class Share(NamedTuple):
    """The samples of a batch that are in one part of a column."""

    number: int
    """Number of the part."""
    part: Part
    samples: Ints
    """Their numbers, each in its shard."""
    shards: Ints
    """Numbers of their shards."""
    places: Ints | None
    """Where they stand in the batch; None when they are all of it, in order."""
    touched: list[int]
    """The shards among ``shards``, each once."""


class Pick:
    """The samples of one batch, and where their rows lie in each column.

    Args:
        store: The cache.
        samples: Sample numbers, each in its shard ``[B]``.
        shards: Numbers of their shards ``[B]``.
        touched: The shards among them, each once.
    """

    def __init__(
        self, store: Store, samples: Ints, shards: Ints, touched: list[int]
    ) -> None:
        self.store, self.samples, self.shards = store, samples, shards
        self.touched = touched
        self._runs: dict[object, Runs] = {}
        self._places: dict[int, list[tuple[int, Ints | None]]] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def shares(
        self, column: ColumnReader, *, absent_allowed: bool = False
    ) -> list[Share]:
        """Divide the samples among the parts of a column.

        Args:
            column: The column.
            absent_allowed: Leave samples out that do not have it.

        Returns:
            A share for each part that the batch touches.

        Raises:
            CacheError: Samples do not have the column, or a file cannot be read.
        """
        grouping = column.grouping
        if grouping.part_of_shard is None:
            part = column.part(0, self.touched)
            return [Share(0, part, self.samples, self.shards, None, self.touched)]
        if grouping.key not in self._places:
            parts = grouping.part_of_shard.take(self.shards)
            self._places[grouping.key] = _split(parts)
        shares = []
        for number, places in self._places[grouping.key]:
            if number == ABSENT:
                self._absent(column, allowed=absent_allowed)
                continue
            if places is None:
                part = column.part(number, self.touched)
                return [
                    Share(number, part, self.samples, self.shards, None, self.touched)
                ]
            shards, samples = self.shards.take(places), self.samples.take(places)
            touched = sorted(set(shards.tolist()))
            part = column.part(number, touched)
            shares.append(Share(number, part, samples, shards, places, touched))
        return shares

    def runs(self, column: ColumnReader) -> Runs:
        """Look up the rows of the samples in a column.

        Args:
            column: A column that all the samples have.

        Returns:
            The same object for all columns that share their offsets.
        """
        shares = self.shares(column)
        key = tuple([share.part.key for share in shares])
        runs = self._runs.get(key)
        if runs is None:
            runs = self._runs[key] = self._find(shares)
        return runs

    def _find(self, shares: list[Share]) -> Runs:
        pieces: list[Piece] = []
        lengths = np.empty(len(self), np.int64)
        for share in shares:
            part = share.part
            starts, counts = part.find(share.samples, share.shards)
            pieces.append(
                Piece(
                    share.number,
                    starts,
                    counts,
                    share.places,
                    shards=share.shards,
                    touched=share.touched,
                    single=part.has_single_rows,
                )
            )
            if share.places is None:
                return Runs((pieces[0],), counts)
            lengths[share.places] = counts
        return Runs(tuple(pieces), lengths)

    def _absent(self, column: ColumnReader, *, allowed: bool) -> list[Share]:
        if not allowed:
            shard = self.touched[0]
            raise lacks_column(self.store.manifest.shards.file(shard).file, column.name)
        return []


def _split(parts: Ints) -> list[tuple[int, Ints | None]]:
    """Say which places of a batch each part has; None for all of them."""
    numbers = sorted(set(parts.tolist()))
    if len(numbers) == 1:
        return [(numbers[0], None)]
    return [(number, (parts == number).nonzero()[0]) for number in numbers]
