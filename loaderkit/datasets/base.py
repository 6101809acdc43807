"""SafeDataset: say which samples there are and how one is made; the rest is ours."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard, TypeVar

import numpy as np
from torch.utils.data import Dataset

from loaderkit.cache.build import finish_killed_commit
from loaderkit.cache.files import load_sources
from loaderkit.cache.layout import MANIFEST
from loaderkit.cache.shards import Checksums, check_checksums
from loaderkit.cache.store import Store
from loaderkit.datasets.classes import Classes, modules_of
from loaderkit.datasets.decode import decode
from loaderkit.datasets.dict_batches import RAGGED, DictRecipe, collate_samples
from loaderkit.datasets.fingerprint import Fingerprint, differences, fingerprint_of
from loaderkit.datasets.gathering import UnlikeShapesError, reader
from loaderkit.datasets.lazy import LAST_GIVEN, LazySamples
from loaderkit.datasets.many_samples import read_samples
from loaderkit.datasets.own import own
from loaderkit.datasets.pack import Packed, PackOptions, pack_source
from loaderkit.datasets.plain import decode_text
from loaderkit.datasets.room import check_chunks, page_cache_bytes
from loaderkit.datasets.rows import is_one, many_rows, one_row
from loaderkit.datasets.sizes import sample_sizes, size_counter
from loaderkit.datasets.soundness import check_columns
from loaderkit.datasets.source_files import SourceFileList
from loaderkit.datasets.sources import KeyedSource
from loaderkit.datasets.structure import KEY, VARIANT, Nest, Structure
from loaderkit.errors import DatasetError, LoaderkitError, StaleCacheError
from loaderkit.joining import check_no_keys, join

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

T = TypeVar("T")

_COLLATE_ERRORS = (
    *(AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError),
    *(RuntimeError, NotImplementedError, AssertionError, MemoryError),
)
"""What torch and PyG say of samples that they cannot join."""


@contextlib.contextmanager
def collating() -> Iterator[None]:
    """Turn what torch or PyG say of samples that cannot be joined into our error.

    Raises:
        DatasetError: They could not be joined; it names their error.
    """
    try:
        yield
    except (LoaderkitError, UnlikeShapesError):
        raise
    except _COLLATE_ERRORS as error:
        what = f"The samples of this batch cannot be joined: {error!r:.300}."
        why = "torch or PyG cannot join what they hold, or they are built differently"
        fix = "give them one form in load() or transform, or use a batch size of 1"
        raise DatasetError(what, why=why, fix=fix) from error


class SafeDataset(Dataset[Any]):
    """A dataset whose every sample is a copy that its reader owns.

    Subclass it, and write ``keys()`` and ``load(key)``.  With ``cache=`` every sample
    is loaded once, packed, and read from mapped columns ever after; without, it is
    loaded each time.  Either way, changing a sample in place, keeping it, or sending
    it to another process never touches the cache or another sample.

    Args:
        raw: Where the samples come from, for ``keys`` and ``load`` to use as
            ``self.raw``.
        cache: Folder of the cache, packed on first use; None to load each time.
        transform: Called with each sample after it is read; may change it in place.
        ragged: What a batch holds for tensors whose first axes differ: "padded",
            "packed" or "jagged" (see ``loaderkit.datasets.dict_batches``).
        packing: How the cache is packed.
        classes: Classes that samples are made of, beyond PyG's and those that the
            subclass's own module knows.
        checksums: When the cache's files are hashed: "once" a machine before their
            first use, "always" in each process, or "never".

    Raises:
        ValueError: ``ragged`` or ``checksums`` is none of the three.
    """

    _PACKED_WITHOUT: ClassVar[frozenset[str]] = frozenset(
        {
            *("raw", "cache", "transform", "ragged", "packing", "classes", "checksums"),
            *("_rows", "_keys", "_opened", "_generation", "_plain", "gives_unread"),
            *("follow_batch", "exclude_keys"),
        }
    )
    """Attributes of ours, which decide nothing about what ``load`` returns."""
    _sizes_are_of_graphs: ClassVar[bool] = False
    gives_unread = False
    """Batches are given to torch unread: our ``collate`` joined the one before."""
    version: ClassVar[str] = ""
    """Raise it when samples change in a way that ``load`` does not show."""

    def __init__(
        self,
        raw: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        *,
        transform: Callable[[Any], Any] | None = None,
        ragged: str = "padded",
        packing: PackOptions | None = None,
        classes: Iterable[type] = (),
        checksums: Checksums = "once",
    ) -> None:
        check_checksums(checksums)
        if ragged not in RAGGED:
            msg = f"ragged must be one of {', '.join(RAGGED)}, got {ragged!r}"
            raise ValueError(msg)
        self.raw = None if raw is None else Path(raw)
        self.cache = None if cache is None else Path(cache).absolute()
        self.transform = transform
        self.ragged = ragged
        self.packing = packing or PackOptions()
        self.classes = Classes(classes, modules_of(type(self)))
        self.checksums: Checksums = checksums
        self._generation: str | None = None
        self._plain = False
        self._rows: Ints | None = None
        self._keys: list[Any] | None = None
        self._opened: _Opened | None = None

    def keys(self) -> Sequence[Any]:
        """List the samples: names, paths, numbers, in a stable order.

        Raises:
            NotImplementedError: The subclass does not say.
        """
        msg = f"{type(self).__name__} must say which samples there are: def keys(self)"
        raise NotImplementedError(msg)

    def load(self, key: Any) -> Any:
        """Make one sample; called once for each key when there is a cache.

        Args:
            key: One of ``keys()``.

        Raises:
            NotImplementedError: The subclass does not say.
        """
        msg = f"{type(self).__name__} must say how {key!r} is made: def load(self, key)"
        raise NotImplementedError(msg)

    @property
    def gathers(self) -> bool:
        """Whether batches come from the cache, with no code of yours on the way."""
        return self.reads_cache and _is_ours(self.batch) and _is_ours(self.collate)

    @property
    def reads_cache(self) -> bool:
        """Whether samples come from the cache, with no code of yours on the way."""
        own_reading = _is_ours(self.__getitem__)
        return self.cache is not None and self.transform is None and own_reading

    @property
    def transforms_cache(self) -> bool:
        """Whether samples come from the cache, and then go through ``transform``."""
        own_reading = _is_ours(self.__getitem__)
        return self.cache is not None and self.transform is not None and own_reading

    @property
    def makes_by_load(self) -> bool:
        """Whether the samples are what ``load`` makes of each of ``keys()``."""
        whole = self._rows is None and self.transform is None
        has_load = type(self).load is not SafeDataset.load
        return whole and has_load and _is_ours(self.__getitem__)

    def __len__(self) -> int:
        return self._count() if self._rows is None else len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if is_one(index):
            return self._sample(self._row(one_row(index, len(self))))
        return self._subset(many_rows(index, len(self)))

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Give the samples of a batch, as torch's DataLoader asks for them.

        Args:
            rows: Rows of the batch, in order.

        Returns:
            A list of new samples, for any ``collate_fn``.  Where they come straight
            from a cache, and ``collate`` of this dataset joined the batch before, the
            list is filled when it is first looked into: ``collate`` never does so, but
            gathers the batch instead.
        """
        numbers = many_rows(rows, len(self))
        # A batch() of a subclass's own needs the rows from the first batch on.
        unread = self.gives_unread or not _is_ours(self.batch)
        if unread and self.reads_cache:
            return LazySamples.of(self, numbers)
        samples = self.read_together(numbers.tolist())
        if self.reads_cache:
            LAST_GIVEN.note(samples, self)
        return samples

    def read_together(self, rows: Sequence[int]) -> list[Any]:
        """Read samples, at once where they are built alike in a cache.

        Args:
            rows: Their rows, in any order, repeats allowed.

        Returns:
            New samples, as ``self[row]`` gives them one by one.
        """
        read = self.read_untransformed(rows) if _is_ours(self.__getitem__) else None
        if read is None:
            return [self[row] for row in rows]
        if self.transform is None:
            return read
        return [self.transform(sample) for sample in read]

    def read_untransformed(self, rows: Sequence[int]) -> list[Any] | None:
        """Read samples of the cache at once, without calling ``transform``.

        Args:
            rows: Their rows, in any order, repeats allowed.

        Returns:
            New samples; None where they are to be read one by one: there is no cache,
            they are built differently, or one of them cannot be read, and which one is
            known then.
        """
        if self.cache is None:
            return None
        opened = self._open()
        try:
            cached = self._in_cache(many_rows(rows, len(self)))
            variant = opened.one_variant(cached)
            if variant is None:
                return None
            node = opened.structure.variants[variant]
            return read_samples(opened.store, node, cached, self.classes)
        except (LoaderkitError, UnlikeShapesError, IndexError, TypeError):
            return None

    def unread(self, rows: Sequence[int]) -> list[Any]:
        """Give the samples of a batch to somebody who joins them with ``collate``.

        Args:
            rows: Rows of the batch, in order.

        Returns:
            A list that is filled when it is first looked into.
        """
        return LazySamples.of(self, many_rows(rows, len(self)))

    def batch(self, rows: Sequence[int] | Ints) -> Any:
        """Gather a batch from the cache in one go.

        Args:
            rows: Rows of the batch, at least one, in any order, repeats allowed.

        Returns:
            The samples' nest with a batch at each leaf; every tensor is new.

        Raises:
            DatasetError: The samples cannot be batched.
        """
        numbers = self._numbers(rows)
        cached = self._in_cache(numbers)
        recipe = self._recipe_of(cached)
        if recipe is None:
            samples = [self[row] for row in numbers.tolist()]
            with collating():
                return self._joined(samples)
        return self._gathered(recipe, cached)

    def _gathered(self, recipe: Any, cached: Ints, *options: Any) -> Any:
        """Have a recipe gather rows of the cache; ``options`` are the recipe's own."""
        try:
            with collating():
                return recipe.batch(cached, *options)
        except UnlikeShapesError as error:
            raise self._unlike(str(error)) from None

    def collate(
        self,
        samples: Any,
        *,
        follow_batch: Collection[str] | None = None,
        exclude_keys: Collection[str] | None = None,
    ) -> Any:
        """Join samples; serves as ``collate_fn`` of any DataLoader.

        Args:
            samples: A list of samples.  The one that ``__getitems__`` gave is not
                read: its batch is gathered from the cache.
            follow_batch: Fields of graphs in the samples that get a ``_batch`` vector.
            exclude_keys: Fields of graphs in the samples that are left out.

        Returns:
            A batch; what is no list is taken for one and returned as it is.

        Raises:
            DatasetError: The samples cannot be batched.
        """
        if not isinstance(samples, list):
            return samples
        follow, exclude = follow_batch or (), exclude_keys or ()
        if isinstance(samples, LazySamples) and self._joins_like(samples.dataset):
            check_no_keys(follow, exclude, "a cache without one")
            return samples.dataset.batch(samples.rows)
        self._expect_more_of(samples)
        return self._joined(samples, follow, exclude)

    def sizes(self) -> Any:
        """Tell how large each sample is, from the cache's offsets alone.

        Returns:
            Tokens and bytes of each sample: a ``SampleSizes``.

        Raises:
            DatasetError: There is no cache.
        """
        return sample_sizes(*self._sized())

    def size_counter(self) -> Any:
        """Give what counts the size of samples that a transform made.

        Returns:
            A ``SizeCounter``; None where there is no cache, or ``sizes`` is your own.
        """
        if self.cache is None or not _is_ours(self.sizes):
            return None
        return size_counter(self._open(), graphs=self._sizes_are_of_graphs)

    def graph_fields(self) -> frozenset[str] | None:
        """Name the fields of the graphs in the samples, as the cache has them.

        Returns:
            Their names; None where there is no cache, or code of yours makes other
            samples of what is in it.
        """
        return self._open().graph_fields if self.reads_cache else None

    def key(self, row: int) -> str:
        """Name the sample of a row, as it was called when it was packed."""
        at = self._row(one_row(row, len(self)))
        if self.cache is None:
            return str(self._all_keys()[at])
        store = self._open().store
        shard, sample = store.locate(at)
        return decode_text(KEY, store.column(KEY).read(shard, sample).tobytes())

    def __getstate__(self) -> dict[str, Any]:
        """Travel as paths and settings: another process opens the cache itself.

        It opens the generation that is open here, or none: workers must not read a
        cache that was packed in between.
        """
        generation = self._generation
        if self._opened is not None:
            generation = self._opened.store.manifest.generation
        return {**self.__dict__, "_opened": None, "_generation": generation}

    def __repr__(self) -> str:
        where = "no cache" if self.cache is None else str(self.cache)
        return f"{type(self).__name__}({len(self):,} samples, {where})"

    def _sample(self, row: int) -> Any:
        if self.cache is None:
            sample = own(self._loaded(self._all_keys()[row]))
        else:
            opened = self._open()
            variant = opened.structure.variants[opened.variant(row)]
            sample = decode(variant, reader(opened.store, row), self.classes)
        return sample if self.transform is None else self.transform(sample)

    def _loaded(self, key: Any) -> Any:
        return self.load(key)

    def _subset(self, rows: Ints) -> SafeDataset:
        part = copy.copy(self)
        part._rows = rows if self._rows is None else self._rows[rows]
        return part

    def _row(self, row: int) -> int:
        return row if self._rows is None else int(self._rows[row])

    def _numbers(self, rows: Sequence[int] | Ints) -> Ints:
        """Check the rows of a batch."""
        numbers = many_rows(rows, len(self))
        if not len(numbers):
            msg = "a batch needs at least one row, got none"
            raise IndexError(msg)
        return numbers

    def _in_cache(self, rows: Ints) -> Ints:
        return rows if self._rows is None else self._rows[rows]

    def _recipe_of(self, rows: Ints) -> Any:
        """Say how samples are gathered; None where they must be read one by one.

        Args:
            rows: Numbers of the samples in the cache.
        """
        if not self.reads_cache:
            return None
        opened = self._open()
        return opened.recipe(self._recipe, opened.one_variant(rows))

    def _joins_like(self, other: SafeDataset | None) -> TypeGuard[SafeDataset]:
        """Tell whether another dataset, such as a part of this one, joins as we do."""
        return type(other) is type(self) and other.ragged == self.ragged

    def _expect_more_of(self, samples: list[Any]) -> None:
        """Have the dataset that gave a list give the next one unread."""
        giver = LAST_GIVEN.giver_of(samples)
        if self._joins_like(giver):
            giver.gives_unread = True

    def _joined(
        self,
        samples: list[Any],
        follow_batch: Collection[str] = (),
        exclude_keys: Collection[str] = (),
    ) -> Any:
        others = functools.partial(collate_samples, ragged=self.ragged)
        return join(samples, others, follow_batch, exclude_keys)

    def _count(self) -> int:
        if self.cache is None:
            return len(self._all_keys())
        return len(self._open().store)

    def _sized(self) -> tuple[_Opened, Ints]:
        if self.cache is None:
            what = "The sizes of the samples are not known."
            fix = f'{type(self).__name__}(..., cache="folder")'
            raise DatasetError(what, why="sizes are read from a cache", fix=fix)
        opened = self._open()
        rows = np.arange(len(opened.store)) if self._rows is None else self._rows
        return opened, rows

    def _all_keys(self) -> list[Any]:
        if self._keys is None:
            self._keys = list(self.keys())
        return self._keys

    def _recipe(self, opened: _Opened, variant: int) -> Any:
        node = opened.structure.variants[variant]
        return DictRecipe(opened.store, node, self.classes, self.ragged)

    def _open(self) -> _Opened:
        if self._opened is None:
            if self._generation is None:
                self._pack_once()
            store = Store(
                self._path,
                checksums=self.checksums,
                generation=self._generation,
                free_bytes=page_cache_bytes,
            )
            self._opened = _Opened(store, self.classes, plain=self._plain)
        return self._opened

    @property
    def _path(self) -> Path:
        assert self.cache is not None
        return self.cache

    def _pack_once(self) -> None:
        """Pack on first use; refuse a cache that was made from something else."""
        if type(self).load is SafeDataset.load:
            return
        is_needed = self.packing.overwrite or not (self._path / MANIFEST).exists()
        if is_needed and self._pack().is_ours:
            return
        # There is a cache, perhaps since a moment ago, by another process: of what?
        finish_killed_commit(self._path)
        self._check_fresh()

    def _pack(self) -> Packed:
        return pack_source(KeyedSource(self), self._path, self.packing)

    def _check_fresh(self) -> None:
        manifest = Store(self._path).manifest
        packed = Fingerprint.from_json(manifest.fingerprint)
        raw_is_here = self.raw is None or self.raw.exists()
        if raw_is_here:
            now = KeyedSource(self).fingerprint()
        else:
            now = self._fingerprint_without_raw(packed)
        changes = list(differences(packed, now))
        track = raw_is_here and self.packing.track_files != "none"
        if not changes and manifest.sources and track:
            text = load_sources(self._path, manifest.sources)
            sources = SourceFileList.from_json(text, where=manifest.sources.file)
            root = "" if self.raw is None else os.path.abspath(self.raw)
            changes = list(itertools.islice(sources.changed(root), 3))
        if changes:
            what = f"The cache {self._path} is stale: {'; '.join(changes)}."
            why = f"{type(self).__name__} would make other samples than those in it"
            fix = (
                f"{type(self).__name__}(..., packing=PackOptions(overwrite=True)), "
                f"or delete {self._path}"
            )
            raise StaleCacheError(what, why=why, fix=fix)

    def _fingerprint_without_raw(self, packed: Fingerprint) -> Fingerprint:
        """Take the fingerprint where the raw data is not: it was packed elsewhere.

        Keys that are read from the raw data cannot be told then, and those of the cache
        count.  Others, such as numbers or a fixed list, are there all the same.
        """
        try:
            now = KeyedSource(self).fingerprint()
        except Exception:  # noqa: BLE001 -- keys() looks for files that are not here
            now = None
        if now is not None and now.count:
            return now
        rest = fingerprint_of(self.load, (), version=str(self.version))
        return replace(rest, keys=packed.keys, count=packed.count)

    def _unlike(self, column: str) -> DatasetError:
        what = f"Field {column!r} has shapes in this batch that cannot be joined."
        why = "more than one axis differs between the samples"
        fix = "give the samples one shape in load() or transform, or a batch size of 1"
        return DatasetError(what, why=why, fix=fix)


class _Opened:
    """A cache opened by this process, and the recipes made for it."""

    def __init__(self, store: Store, classes: Classes, *, plain: bool = False) -> None:
        self.store = store
        self.structure = Structure.from_json(store.manifest.structure)
        check_columns(self.structure, store.manifest)
        check_chunks(store.manifest)
        if plain:
            self.structure = self.structure.without_classes(classes.fits)
        classes.check(self.structure)
        self._recipes: dict[int, Any] = {}

    @functools.cached_property
    def graph_fields(self) -> frozenset[str]:
        """Names of the fields that the graphs of some sample have."""
        variants = [v for v in self.structure.variants if isinstance(v, Nest)]
        stores = [n for v in variants for n in v.nests() if n.kind == "store"]
        return frozenset(str(name) for store in stores for name in store.keys)

    def variant(self, row: int) -> int:
        """Say how one sample is built."""
        return int(self.variants(np.array([row]))[0])

    def variants(self, rows: Ints) -> Ints:
        """Say how each of some samples is built ``[B]``."""
        from loaderkit.datasets.gathering import Gathering

        if len(self.structure.variants) == 1:
            return np.zeros(len(rows), np.int64)
        return Gathering(self.store, rows).numbers(VARIANT)

    def one_variant(self, rows: Ints) -> int | None:
        """Say how all of some samples are built; None when they differ."""
        if len(self.structure.variants) == 1:
            return 0
        found = self.variants(rows)
        return int(found[0]) if (found == found[0]).all() else None

    def recipe(
        self, make: Callable[[_Opened, int], T | None], variant: int | None
    ) -> T | None:
        """Give the recipe of a variant, made once."""
        if variant is None:
            return None
        if variant not in self._recipes:
            self._recipes[variant] = make(self, variant)
        found: T | None = self._recipes[variant]
        return found


def _is_ours(method: Callable[..., Any]) -> bool:
    """Tell whether a method is loaderkit's own, and not one of a user's subclass."""
    return method.__module__.startswith("loaderkit.")
