"""SafeDataset: say which samples there are and how one is made; the rest is ours."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex, TypeGuard, overload

import numpy as np
import xxhash
from torch.utils.data import Dataset
from typing_extensions import Self, TypeVar

from loaderkit.arguments import suggest_keywords, suggest_name
from loaderkit.cache.build import finish_killed_commit
from loaderkit.cache.download_ahead import StoredRows
from loaderkit.cache.layout import MANIFEST
from loaderkit.cache.remote import RemoteCache, locate_cache
from loaderkit.cache.shards import Checksums, check_checksums
from loaderkit.cache.store import Store
from loaderkit.cache.stored_arrays import StoredArrays, stored_arrays
from loaderkit.datasets.absent import ABSENT, no_such_attribute
from loaderkit.datasets.classes import ClassRegistry, modules_of
from loaderkit.datasets.collate_errors import collating
from loaderkit.datasets.columns import (
    check_column,
    column_names,
    column_rows,
    field_names,
    join_column,
    stores_of,
)
from loaderkit.datasets.decode import decode
from loaderkit.datasets.dict_batches import RAGGED, DictRecipe, collate_samples
from loaderkit.datasets.freshness import check_fresh
from loaderkit.datasets.gathering import (
    UnlikeShapesError,
    leaf_reader,
)
from loaderkit.datasets.lazy import LAST_GIVEN, LazySamples
from loaderkit.datasets.many_samples import read_samples
from loaderkit.datasets.opened import OpenedCache
from loaderkit.datasets.owned_copy import owned_copy
from loaderkit.datasets.pack_options import PackOptions
from loaderkit.datasets.packing import Packed, has_cache, pack_source
from loaderkit.datasets.plain import decode_text
from loaderkit.datasets.ragged import PadValue, check_pad_value, fill_padding
from loaderkit.datasets.room import page_cache_bytes
from loaderkit.datasets.rows import is_one, many_rows, one_row
from loaderkit.datasets.selecting import RowSelection
from loaderkit.datasets.sizes import sample_sizes, size_counter
from loaderkit.datasets.sources import KeyedSource
from loaderkit.datasets.structure import KEY
from loaderkit.datasets.taken_names import is_own, name_is_taken, private_names_of
from loaderkit.errors import DatasetError, LoaderkitError, OptionError
from loaderkit.joining import check_no_keys, join
from loaderkit.notebook import card

if TYPE_CHECKING:
    import os
    from collections.abc import (
        Callable,
        Collection,
        Iterable,
        Iterator,
        Sequence,
    )

    from numpy.typing import NDArray

    from loaderkit.cache.remote import CacheLocation

    Ints = NDArray[np.int64]

T = TypeVar("T", default=Any)
R = TypeVar("R")


class SafeDataset(RowSelection[T], Dataset[T]):
    """A dataset whose every sample is a copy that its reader owns.

    Subclass it, and write ``keys()`` and ``load(key)``.  With ``cache=`` every sample
    is loaded once, packed, and read from mapped columns ever after; without, it is
    loaded each time.  Either way, changing a sample in place, keeping it, or sending
    it to another process never touches the cache or another sample.

    ``SafeDataset[dict[str, Tensor]]`` tells a type checker what a sample is.

    Args:
        raw: Where the samples come from, for ``keys`` and ``load`` to use as
            ``self.raw``.
        cache: Folder of the cache, or a URL that fsspec knows ("s3://bucket/name");
            packed on first use.  None to load each time.
        transform: Called with each sample after it is read; may change it in place.
        ragged: What a batch holds for tensors whose first axes differ: "padded",
            "packed" or "jagged" (see ``loaderkit.datasets.dict_batches``).
        pad_value: What padded batches hold behind a sample's end: a number, or numbers
            by field, such as ``{"labels": -100}``; 0 (False) for the others.
        packing: How the cache is packed.
        classes: Classes that samples are made of, beyond PyG's and those that the
            subclass's own module knows.
        checksums: When the cache's files are hashed: "once" a machine before their
            first use, "always" in each process, or "never".
        storage_options: What fsspec makes the file system of a URL with.
        mirror: Folder on local disk in which the shards of a URL are kept.
        mirror_bytes: The most it may take, such as "200 GB"; None for all there is.

    Raises:
        ValueError: ``ragged`` or ``checksums`` is none of the three.
        OptionError: An option of URLs was given without one; or ``pad_value`` is no
            number, or nothing is padded.
    """

    _PACKED_WITHOUT: ClassVar[frozenset[str]] = frozenset(
        {
            *("raw", "cache", "transform", "ragged", "packing", "classes", "checksums"),
            *(
                "_loaderkit",
                "gives_unread",
                "follow_batch",
                "exclude_keys",
                "largest_column_bytes",
                "pad_value",
            ),
        }
    )
    """Attributes of ours, which decide nothing about what ``load`` returns."""
    _taken_names: ClassVar[frozenset[str]] = frozenset()
    """Private names of ours that a user's subclass may not have."""
    _sizes_are_of_graphs: ClassVar[bool] = False
    _shows_fields: ClassVar[bool] = False
    """Whether a field of the samples is an attribute of the dataset, as in PyG."""
    gives_unread = False
    """Batches are given to torch unread: our ``collate`` joined the one before."""
    largest_column_bytes: int = 1 << 30
    """What ``column`` may gather at most, 1 GiB unless you set another bound: a field
    of all samples lies in memory at once."""
    version: str = ""
    """Raise it when samples change in a way that ``load`` does not show."""

    @suggest_keywords
    def __init__(
        self,
        raw: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | RemoteCache | None = None,
        *,
        transform: Callable[[Any], Any] | None = None,
        ragged: str = "padded",
        pad_value: PadValue = 0,
        packing: PackOptions | None = None,
        classes: Iterable[type] = (),
        checksums: Checksums = "once",
        storage_options: Mapping[str, Any] | None = None,
        mirror: str | os.PathLike[str] | None = None,
        mirror_bytes: int | str | None = None,
    ) -> None:
        check_checksums(checksums)
        if ragged not in RAGGED:
            msg = f"ragged must be one of {', '.join(RAGGED)}, got {ragged!r}"
            raise ValueError(msg)
        self.raw = None if raw is None else Path(raw)
        if self.raw is not None and cache is None:
            _refuse_cache_as_raw(type(self).__name__, self.raw)
        self.cache = locate_cache(cache, storage_options, mirror, mirror_bytes)
        """Where the cache is: a folder, or a store; None for no cache."""
        self.transform = transform
        check_pad_value(pad_value, ragged)
        self.ragged = ragged
        self.pad_value = pad_value
        self.packing = packing or PackOptions()
        self.classes = ClassRegistry(classes, modules_of(type(self)))
        self.checksums: Checksums = checksums
        self._loaderkit = _State()

    @classmethod
    def _over(cls, opened: OpenedCache, *, plain: bool, **options: Any) -> Self:
        """Make the dataset of a cache that is open, without packing or opening it.

        Args:
            opened: The cache.
            plain: As it was opened, for other processes that open it again.
            options: The constructor's own.
        """
        dataset = cls(**options)
        dataset._loaderkit = replace(dataset._loaderkit, opened=opened, plain=plain)
        return dataset

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a class that would replace what the dataset reads with.

        Raises:
            DatasetError: It has a private name that is one of ours.
        """
        super().__init_subclass__(**options)
        if is_own(cls):
            return
        cls._taken_names = private_names_of(cls)
        for name in cls._taken_names:
            owner = next(base for base in cls.__mro__ if name in vars(base))
            if not is_own(owner):
                raise name_is_taken(owner.__qualname__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._taken_names:
            raise name_is_taken(type(self).__qualname__, name)
        super().__setattr__(name, value)

    def keys(self) -> Sequence[Any]:
        """List the samples: names, paths, numbers, in a stable order.

        Raises:
            NotImplementedError: The subclass does not say.
        """
        msg = f"{type(self).__name__} must say which samples there are: def keys(self)"
        raise NotImplementedError(msg)

    def load(self, key: Any, /) -> T:
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
        whole = self._loaderkit.rows is None and self.transform is None
        has_load = type(self).load is not SafeDataset.load
        return whole and has_load and _is_ours(self.__getitem__)

    def __len__(self) -> int:
        rows = self._loaderkit.rows
        return self._count() if rows is None else len(rows)

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: str | tuple[str, ...]) -> Any: ...
    @overload
    def __getitem__(self, index: Any) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        if is_one(index):
            return self._sample(self._row(one_row(index, len(self))))
        if isinstance(index, str):
            return self.column(index)
        return self.subset(many_rows(index, len(self)))

    if not TYPE_CHECKING:  # a type checker shall go on to find misspelt names

        def __getattr__(self, name: str) -> Any:
            is_private = name.startswith("_")
            is_known_elsewhere = name in ABSENT
            if (is_private and not is_known_elsewhere) or hasattr(type(self), name):
                # Also a property that raised an AttributeError of its own: again.
                return object.__getattribute__(self, name)
            if self._shows_fields and name in self._fields_if_open():
                return self.column(name)
            known = [name for name in dir(type(self)) if not name.startswith("_")]
            fields = self._fields_if_open()
            stores = self._stores_if_open()
            kind = type(self).__name__
            raise no_such_attribute(kind, name, known, fields, stores)

    def __iter__(self) -> Iterator[T]:
        return (self[row] for row in range(len(self)))

    def __getitems__(self, rows: Sequence[int]) -> list[T]:
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

    def read_together(self, rows: Sequence[int]) -> list[T]:
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

    def read_untransformed(self, rows: Sequence[int]) -> list[T] | None:
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
        batch = self._gathered(recipe, cached)
        self.fill_padding(batch)
        return batch

    def _gathered(self, recipe: Any, cached: Ints, *options: Any) -> Any:
        """Have a recipe gather rows of the cache; ``options`` are the recipe's own."""
        try:
            with collating():
                return recipe.batch(cached, *options)
        except UnlikeShapesError as error:
            raise self._unlike(str(error)) from None

    def fill_padding(self, batch: Any) -> None:
        """Write ``pad_value`` behind the ends of the samples of a padded batch.

        Args:
            batch: A batch of these samples, whose padding is written in place.

        Raises:
            DatasetError: A field cannot hold its number, or there is no such field.
        """
        pad_value = self.pad_value
        if not isinstance(pad_value, Mapping) and pad_value == 0:
            return
        names = fill_padding(batch, pad_value)
        if isinstance(pad_value, Mapping) and not names.issuperset(pad_value):
            self._check_padded_fields(set(pad_value) - names, names)

    def _check_padded_fields(self, absent: set[str], names: Collection[str]) -> None:
        """Refuse names that neither this batch nor any sample of the cache has."""
        known = set(names)
        if self.cache is not None:
            known |= field_names(self._open())
        unknown = sorted(absent - known)
        if unknown:
            message = (
                f"pad_value names {unknown[0]!r}, which is no field of the samples."
            )
            why = f"their fields are {', '.join(sorted(known))}"
            raise DatasetError(message, why=why, fix=suggest_name(unknown[0], known))

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

    def column(self, name: str) -> Any:
        """Gather one field of all samples, whole, as the cache has it.

        ``dataset["label"]`` is the same, as in Hugging Face's datasets, and of graphs
        ``dataset.y``, as in PyG's, once the cache is open.

        Args:
            name: A field that all samples have; of dicts a key.

        Returns:
            What a batch of all samples has under that name, ``transform`` aside.

        Raises:
            DatasetError: There is no such field, no cache, or it takes more than
                ``largest_column_bytes``.
        """
        opened, rows = self._sized("columns")
        check_column(opened, rows, name, self.largest_column_bytes)
        return self._column(opened, rows, name)

    def map(
        self,
        function: Callable[..., Any],
        with_indices: bool = False,  # noqa: FBT001, FBT002 -- as Hugging Face has it
        *,
        remove_columns: str | Collection[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        workers: int | None = None,
        **others: Any,
    ) -> Any:
        """Make new samples of these, and pack them into a cache of their own.

        What was packed of the same samples by the same code is opened, and the
        function not called again.  To call one each time a sample is read, use
        ``transform=`` instead.

        Args:
            function: Called with a sample, which it may change; returns the new one.
                Of dicts it may return some fields, which are put beside the others, as
                in Hugging Face's datasets.
            with_indices: Call it with the sample and its row.
            remove_columns: Fields of dicts to leave out.
            cache: The new cache's folder; beside this one, under a name that follows
                from the function, if None.
            workers: Processes that call the function; as for ``pack``.
            others: None; arguments of Hugging Face's method are refused by name.

        Returns:
            A dataset over the new cache.

        Raises:
            OptionError: An argument is not what it should be.
            StaleCacheError: In the folder is a cache of other samples or other code.
        """
        # Here, since it opens the new cache as a dataset, maybe of graphs: a subclass.
        from loaderkit.datasets.mapping import map_samples

        return map_samples(
            self,
            function,
            with_indices=with_indices,
            remove_columns=remove_columns,
            cache=cache,
            workers=workers,
            others=others,
        )

    def identity(self) -> str:
        """Hash what tells these samples from others, in every process.

        Of a cache it is what was packed when, and the rows; without one the code of
        ``load`` and the keys.  What ``transform`` does is not in it.
        """
        digest = xxhash.xxh3_128()
        if self.cache is None:
            digest.update(repr(KeyedSource(self).fingerprint()).encode())
        else:
            digest.update(str(self._open().store.manifest.generation).encode())
        if self._loaderkit.rows is not None:
            digest.update(self._loaderkit.rows.tobytes())
        return digest.hexdigest()

    def sizes(self) -> Any:
        """Tell how large each sample is, from the cache's offsets alone.

        Returns:
            Tokens and bytes of each sample: a ``SampleSizes``.

        Raises:
            DatasetError: There is no cache.
        """
        return sample_sizes(*self._sized())

    def stored_rows(self) -> StoredRows | None:
        """Say in which shards of a store the samples are.

        Returns:
            Where they are; None where they are on this machine, or are loaded.
        """
        if not isinstance(self.cache, RemoteCache):
            return None
        store = self._open().store
        mirror, manifest = store.mirror, store.manifest
        assert mirror is not None
        is_missing = np.zeros(len(manifest.shards), bool)
        is_missing[mirror.missing()] = True
        shard_of_row = np.repeat(
            np.arange(len(manifest.shards)), manifest.shards.samples
        )
        return StoredRows(
            remote=self.cache,
            generation=manifest.generation,
            shard_of_row=self._select(shard_of_row),
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
        manifest = self._open().store.manifest
        return stored_arrays(manifest, self.cache, free_bytes=page_cache_bytes())

    def let_go_of_shards(self) -> None:
        """Leave the room that shards of a store take to workers, who read from now on.

        A sample that is read here afterwards maps its shard again.
        """
        opened = self._loaderkit.opened
        mirror = None if opened is None else opened.store.mirror
        if opened is not None and mirror is not None and mirror.is_capped:
            opened.store.let_go()

    def _select(self, values: Ints) -> Ints:
        """Take the values of this dataset's samples from those of the cache's."""
        rows = self._loaderkit.rows
        return values if rows is None else values[rows]

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

    def subset(self, rows: Ints) -> Self:
        """Give some rows as a dataset over the same cache, as ``dataset[rows]`` does.

        Args:
            rows: Rows ``[n]`` int64 from 0 to ``len(self) - 1``, repeats allowed.
        """
        part = copy.copy(self)
        part._loaderkit = replace(self._loaderkit, rows=self._in_cache(rows))
        return part

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
        opened, generation = self._loaderkit.opened, self._loaderkit.generation
        if opened is not None:
            generation = opened.store.manifest.generation
        state = replace(self._loaderkit, opened=None, generation=generation)
        return {**self.__dict__, "_loaderkit": state}

    def __repr__(self) -> str:
        where = "no cache" if self.cache is None else str(self.cache)
        return f"{type(self).__name__}({len(self):,} samples, {where})"

    def _repr_html_(self) -> str:
        known_only = "samples are counted when it is first read"
        if self._loaderkit.opened is None and type(self).load is not SafeDataset.load:
            title, rows = f"{type(self).__name__} ({known_only})", []
        else:
            title = repr(self)
            rows = [] if self.cache is None else column_rows(self._open())
        return card(title, heads=("field", "kind", "dtype"), rows=rows)

    def _sample(self, row: int) -> Any:
        if self.cache is None:
            sample = owned_copy(self._load_checked(self._all_keys()[row]))
        else:
            opened = self._open()
            variant = opened.structure.variants[opened.variant(row)]
            sample = decode(variant, leaf_reader(opened.store, row), self.classes)
        return sample if self.transform is None else self.transform(sample)

    def _load_checked(self, key: Any) -> Any:
        return self.load(key)

    def _row(self, row: int) -> int:
        rows = self._loaderkit.rows
        return row if rows is None else int(rows[row])

    def _numbers(self, rows: Sequence[int] | Ints) -> Ints:
        """Check the rows of a batch."""
        if is_one(rows):
            message = f"batch takes the rows of one batch, got {rows}."
            fix = (
                f"dataset.batch([{rows}]), or build_loader(dataset, batch_size={rows})"
            )
            raise OptionError(message, why="it is one number", fix=fix)
        numbers = many_rows(rows, len(self))
        if not len(numbers):
            msg = "a batch needs at least one row, got none"
            raise IndexError(msg)
        return numbers

    def _in_cache(self, rows: Ints) -> Ints:
        own_rows = self._loaderkit.rows
        return rows if own_rows is None else own_rows[rows]

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
        alike = type(other) is type(self) and other.ragged == self.ragged
        return alike and other is not None and other.pad_value == self.pad_value

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
        batch = join(samples, others, follow_batch, exclude_keys)
        self.fill_padding(batch)
        return batch

    def _column(self, opened: OpenedCache, rows: Ints, name: str) -> Any:
        """Gather a field of rows of the cache, known to be there in all of them."""
        with collating():
            column = join_column(opened, rows, name, self.classes, self.ragged)
        is_padded = not isinstance(self.pad_value, Mapping) or name in self.pad_value
        if is_padded and self.pad_value != 0:
            fill_padding(column, self.pad_value, name)
        return column

    def _fields_if_open(self) -> frozenset[str]:
        """Name the fields of the samples, where that runs no code of a user's.

        Opening a cache may pack it, or call ``keys`` to see whether it is stale: both
        would ask for the very attribute that is not there.
        """
        return column_names(self._open()) if self._opens_quietly else frozenset()

    @property
    def _opens_quietly(self) -> bool:
        """Whether there is a cache, and opening it runs no code of a user's."""
        if self.__dict__.get("cache") is None:
            return False
        is_open = self._loaderkit.opened is not None
        return is_open or type(self).load is SafeDataset.load

    def _stores_if_open(self) -> dict[Any, list[str]]:
        """Name the fields of node and edge types, as ``_fields_if_open`` does."""
        return stores_of(self._open()) if self._opens_quietly else {}

    def _count(self) -> int:
        if self.cache is None:
            return len(self._all_keys())
        return len(self._open().store)

    def _sized(self, what: str = "sizes") -> tuple[OpenedCache, Ints]:
        if self.cache is None:
            text = f"The {what} of the samples are not known."
            fix = f'{type(self).__name__}(..., cache="folder")'
            raise DatasetError(text, why=f"{what} are read from a cache", fix=fix)
        opened = self._open()
        rows = self._loaderkit.rows
        return opened, np.arange(len(opened.store)) if rows is None else rows

    def _all_keys(self) -> list[Any]:
        if self._loaderkit.keys is None:
            self._loaderkit.keys = list(self.keys())
        return self._loaderkit.keys

    def _recipe(self, opened: OpenedCache, variant: int) -> Any:
        node = opened.structure.variants[variant]
        return DictRecipe(opened.store, node, self.classes, self.ragged)

    def _open(self) -> OpenedCache:
        own = self._loaderkit
        if own.opened is None:
            if own.generation is None:
                self._pack_once()
            store = Store(
                self._location,
                checksums=self.checksums,
                generation=own.generation,
                free_bytes=page_cache_bytes,
            )
            own.opened = OpenedCache(store, self.classes, plain=own.plain)
        return own.opened

    @property
    def _location(self) -> CacheLocation:
        assert self.cache is not None
        return self.cache

    def _pack_once(self) -> None:
        """Pack on first use; refuse a cache that was made from something else."""
        location = self._location
        if type(self).load is SafeDataset.load:
            self._refuse_to_pack_without_load()
            return
        is_needed = self.packing.overwrite or not has_cache(location)
        if is_needed and self._pack().is_ours:
            return
        # There is a cache, perhaps since a moment ago, by another process: of what?
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
        if not is_subclass or has_cache(self._location):
            return
        name = type(self).__name__
        message = f"{name} cannot pack the cache {self.cache}: it has no load(key)."
        why = "keys() names the samples and load(key) makes one; PyG's process() and "
        why += "get(), or torch's __getitem__, are not called"
        fix = "def keys(self): return range(100), and def load(self, key): return ..."
        raise DatasetError(message, why=why, fix=fix)

    def _pack(self) -> Packed:
        return pack_source(KeyedSource(self), self._location, self.packing)

    def _unlike(self, column: str) -> DatasetError:
        message = f"Field {column!r} has shapes in this batch that cannot be joined."
        why = "an axis behind the first differs between the samples, or their number"
        fix = "give the samples one shape in load() or transform, or a batch size of 1"
        return DatasetError(message, why=why, fix=fix)


@dataclass
class _State:
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
    generation: str | None = None
    """The only generation of the cache that may be opened; None for any."""
    plain: bool = False
    """Classes that are not known are read as plain containers."""


def _refuse_cache_as_raw(class_name: str, raw: Path) -> None:
    """Refuse a cache where the folder of raw data is named, as in ``Rings("a.lk")``.

    PyG's first argument is the root of everything; here nothing would be packed, and
    every sample would be made each time that it is read.
    """
    if raw.suffix != ".lk" and not (raw / MANIFEST).exists():
        return
    message = f"{class_name} was given {str(raw)!r} as its raw data, and no cache."
    why = "the first argument is the folder that load() reads from"
    raise OptionError(message, why=why, fix=f"{class_name}(cache={str(raw)!r})")


def _is_ours(method: Callable[..., Any]) -> bool:
    """Tell whether a method is loaderkit's own, and not one of a user's subclass."""
    return method.__module__.startswith("loaderkit.")
