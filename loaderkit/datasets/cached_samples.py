"""Samples that ``load`` makes once: packed on first use, opened from a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
import xxhash
from typing_extensions import TypeVar

from loaderkit.answers import answer_wrong_calls
from loaderkit.cache.build import finish_killed_commit
from loaderkit.cache.download_ahead import StoredRows
from loaderkit.cache.remote import RemoteCache
from loaderkit.cache.store import Store
from loaderkit.cache.stored_arrays import StoredArrays, stored_arrays
from loaderkit.datasets.encode import none_for_a_sample
from loaderkit.datasets.freshness import check_fresh
from loaderkit.datasets.key_texts import key_in_code
from loaderkit.datasets.opened import OpenedCache
from loaderkit.datasets.packing import PackOutcome, has_cache, pack_source
from loaderkit.datasets.room import page_cache_bytes
from loaderkit.datasets.sources import (
    KeyedSource,
    ask_for_keys,
    refuse_empty,
    refuse_missing_raw,
)
from loaderkit.errors import DatasetError, MissingMethodError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loaderkit.array_types import Ints
    from loaderkit.cache.remote import CacheLocation
    from loaderkit.cache.shards import Checksums
    from loaderkit.datasets.classes import ClassRegistry
    from loaderkit.datasets.key_index import KeyIndex
    from loaderkit.datasets.pack_options import PackOptions
    from loaderkit.datasets.ragged_fields import JointShapes

T = TypeVar("T", default=Any)


@dataclass
class DatasetState:
    """What a dataset keeps for itself.

    In one attribute, since subclasses have attributes of their own: a user's
    ``self._rows`` must not decide which samples there are.
    """

    rows: Ints | None = None
    """Numbers in the cache of the dataset's samples ``[n]``; None for all of them."""
    keys: list[Any] | None = None
    """What ``keys()`` gave, once it was asked."""
    opened: OpenedCache | None = None
    """The cache, once it is open in this process."""
    key_index: KeyIndex | None = None
    """Finds the rows of the cache by keys, once it was asked for one."""
    generation: str | None = None
    """The only generation of the cache that may be opened; None for any."""
    plain: bool = False
    """Classes that are not known are read as plain containers."""
    beside: tuple[Any, ...] = ()
    """The datasets whose samples are joined with these, of a concatenation."""
    joint_shapes: JointShapes | None = None
    """The shapes of fields in the caches of all of them, once asked for."""
    has_warned_of_lists: bool = False
    """It was told that lists have a form by batch."""
    checked_pad_value: object = None
    """The ``pad_value`` whose names were found to be right."""


@answer_wrong_calls
class CachedSamplesMixin(Generic[T]):
    """What a dataset does to have its samples: list, load, pack, and open the cache.

    ``BaseDataset`` sets the attributes; nobody else has this as a base class.
    """

    raw: Path | None
    cache: CacheLocation | None
    packing: PackOptions
    classes: ClassRegistry
    checksums: Checksums
    version: str = ""
    """Raise it when samples change in a way that ``load`` does not show."""
    _loaderkit: DatasetState

    def keys(self) -> Sequence[Any] | NDArray[Any]:
        """List the samples: names, paths, numbers, in a stable order.

        Raises:
            NotImplementedError: The subclass does not say.
        """
        # Two who miss keys(): somebody who opened a packed cache, and the author of a
        # subclass.  Their next steps have nothing in common.
        if self.cache is not None and type(self).load is CachedSamplesMixin.load:
            message = f"{type(self).__name__} has no keys: its samples have numbers."
            why = "its cache was packed before, and is read by rows"
            fix = "range(len(dataset)); dataset.key(row), as what it was packed, and "
            fix += "dataset.row_of(key)"
            raise MissingMethodError(message, why=why, fix=fix)
        message = f"{type(self).__name__} must say which samples there are."
        why = "it has no keys(), and no cache"
        fix = "def keys(self): return range(100)"
        raise MissingMethodError(message, why=why, fix=fix)

    def load(self, key: Any, /) -> T:
        """Make one sample; called once for each key when there is a cache.

        Args:
            key: One of ``keys()``.

        Raises:
            NotImplementedError: The subclass does not say.
        """
        message = f"{type(self).__name__} must say how {key_in_code(key)} is made."
        why = "it has no load(key), and no cache"
        fix = "def load(self, key): return ..."
        raise MissingMethodError(message, why=why, fix=fix)

    def identity(self) -> str:
        """Hash what tells these samples from others, in every process.

        Of a cache it is what was packed when, and the rows; without one the code of
        ``load`` and the keys.  What ``transform`` does is not in it.
        """
        digest = xxhash.xxh3_128()
        # Not Python's hash(): that of texts differs from process to process.
        if self.cache is None:
            digest.update(repr(KeyedSource(self).fingerprint()).encode())
        else:
            digest.update(str(self._open_cache().store.manifest.generation).encode())
        if self._loaderkit.rows is not None:
            digest.update(self._loaderkit.rows.tobytes())
        return digest.hexdigest()

    def stored_rows(self) -> StoredRows | None:
        """Say in which shards of a store the samples are.

        Returns:
            Where they are; None where they are on this machine, or are loaded.
        """
        if not isinstance(self.cache, RemoteCache):
            return None
        store = self._open_cache().store
        mirror, manifest = store.mirror, store.manifest
        assert mirror is not None  # a store of a RemoteCache has one
        is_missing = np.zeros(len(manifest.shards), bool)
        is_missing[mirror.missing()] = True
        shard_of_row = np.repeat(
            np.arange(len(manifest.shards)), manifest.shards.samples
        )
        return StoredRows(
            remote=self.cache,
            generation=manifest.generation,
            shard_of_row=self._values_of_rows(shard_of_row),
            shard_bytes=manifest.shards.bytes,
            is_missing=is_missing,
        )

    def stored_arrays(self) -> StoredArrays | None:
        """Say how many bytes the cache has on local disk, array by array.

        Returns:
            The sums; None where there is no cache, or it is in a store.
        """
        if not isinstance(self.cache, Path):
            return None
        manifest = self._open_cache().store.manifest
        return stored_arrays(manifest, self.cache, free_bytes=page_cache_bytes())

    def let_go_of_shards(self) -> None:
        """Leave the room that shards of a store take to workers, who read from now on.

        A sample that is read here afterwards maps its shard again.
        """
        opened = self._loaderkit.opened
        mirror = None if opened is None else opened.store.mirror
        if opened is not None and mirror is not None and mirror.is_capped:
            opened.store.let_go()

    def __getstate__(self) -> dict[str, Any]:
        """Travel as paths and settings: another process opens the cache itself.

        It opens the generation that is open here, or none: workers must not read a
        cache that was packed in between.
        """
        opened, generation = self._loaderkit.opened, self._loaderkit.generation
        if opened is not None:
            generation = opened.store.manifest.generation
        # Mapped files and what was read through them stay behind; rows and keys travel.
        state = replace(
            self._loaderkit,
            opened=None,
            key_index=None,
            generation=generation,
            joint_shapes=None,
        )
        return {**self.__dict__, "_loaderkit": state}

    def _open_cache(self) -> OpenedCache:
        own = self._loaderkit
        if own.opened is None:
            # A generation is known where another process has opened the cache: a worker
            # neither packs it nor asks whether it is fresh.
            if own.generation is None:
                self._pack_once()
            store = Store(
                self._cache_location,
                checksums=self.checksums,
                generation=own.generation,
                free_bytes=page_cache_bytes,
            )
            own.opened = OpenedCache(store, self.classes, plain=own.plain)
        return own.opened

    @property
    def _cache_location(self) -> CacheLocation:
        assert self.cache is not None
        return self.cache

    def _pack_once(self) -> None:
        """Pack on first use; refuse a cache that was made from something else."""
        location = self._cache_location
        if not self._has_own_load():
            self._refuse_to_pack_without_load()
            return
        is_needed = self.packing.overwrite or not has_cache(location)
        # What this process has packed just now needs no look at its freshness.
        if is_needed and self._pack_samples().is_ours:
            return
        # There is a cache, perhaps since a moment ago, by another process: of what?
        # First the end of a commit that was killed between two renames: half of it
        # would be refused as damaged.
        if isinstance(location, Path):
            finish_killed_commit(location)
        check_fresh(self)

    def _refuse_to_pack_without_load(self) -> None:
        """Tell a subclass that nothing can be packed: there is no cache, and no load.

        Raises:
            DatasetError: It is so.  ``SafeDataset`` itself opens what is packed, and
                says elsewhere that there is no cache.
        """
        is_subclass = not type(self).__module__.startswith("loaderkit.")
        if not is_subclass or has_cache(self._cache_location):
            return
        name = type(self).__name__
        message = f"{name} cannot pack the cache {self.cache}: it has no load(key)."
        why = "keys() names the samples and load(key) makes one; PyG's process() and "
        why += "get(), or torch's __getitem__, are not called"
        fix = "def keys(self): return range(100), and def load(self, key): return ..."
        raise DatasetError(message, why=why, fix=fix)

    def _pack_samples(self) -> PackOutcome:
        source = KeyedSource(self)
        refuse_empty(source, self)
        source.refuse_keys()
        return pack_source(source, self._cache_location, self.packing)

    def _load_checked(self, key: Any) -> Any:
        sample = self.load(key)
        if sample is None:
            name = type(self).__name__
            raise none_for_a_sample(f"{name}.load({key_in_code(key)}) returned None.")
        return sample

    def _list_keys(self) -> list[Any]:
        if self._loaderkit.keys is None:
            keys = list(ask_for_keys(self))
            if not keys:
                refuse_missing_raw(type(self).__name__, self.raw)
            self._loaderkit.keys = keys
        return self._loaderkit.keys

    def _count_samples(self) -> int:
        if self.cache is None:
            return len(self._list_keys())
        return len(self._open_cache().store)

    def _row_in_cache(self, row: int) -> int:
        rows = self._loaderkit.rows
        return row if rows is None else int(rows[row])

    def _rows_in_cache(self, rows: Ints) -> Ints:
        own_rows = self._loaderkit.rows
        return rows if own_rows is None else own_rows[rows]

    def _values_of_rows(self, values: Ints) -> Ints:
        """Take the values of this dataset's samples from those of the cache's."""
        rows = self._loaderkit.rows
        return values if rows is None else values[rows]

    def _cache_and_rows(self, what: str = "sizes") -> tuple[OpenedCache, Ints]:
        if self.cache is None:
            text = f"The {what} of the samples are not known."
            fix = f'{type(self).__name__}(..., cache="folder")'
            raise DatasetError(text, why=f"{what} are read from a cache", fix=fix)
        opened = self._open_cache()
        rows = self._loaderkit.rows
        return opened, np.arange(len(opened.store)) if rows is None else rows

    @classmethod
    def _has_own_load(cls) -> bool:
        """Tell whether a subclass says how a sample is made."""
        return cls.load is not CachedSamplesMixin.load
