"""New samples made of those of a dataset, packed into a cache of their own."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import xxhash

from loaderkit.arguments import check_names, check_truth, refuse_value
from loaderkit.datasets.absent import refuse_options
from loaderkit.datasets.base import BaseDataset
from loaderkit.datasets.columns import column_names
from loaderkit.datasets.fingerprint import CodeRead, note_values_left, read_value
from loaderkit.datasets.pack_options import PackOptions
from loaderkit.datasets.packing import PackOutcome, pack_source
from loaderkit.datasets.pad_names import pad_value_of
from loaderkit.datasets.sources import KeyedSource
from loaderkit.errors import DatasetError, OptionError, StaleCacheError
from loaderkit.function_arguments import check_function_of_samples
from loaderkit.nearest_names import suggest_name
from loaderkit.value_words import kind_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection

    from loaderkit.cache.remote import CacheLocation
    from loaderkit.datasets.opened import OpenedCache


@dataclass(frozen=True)
class MappedCache:
    """The cache that ``map`` packed, and what a dataset over it is made with."""

    opened: OpenedCache
    """The cache itself."""
    location: CacheLocation
    """Where it is."""
    classes: tuple[type, ...]
    """Classes that its samples are made of."""
    ragged: dict[str, Any]
    """How the dataset that it was made of joins ragged fields; not for graphs."""


def map_samples(
    source: BaseDataset[Any],
    function: Callable[..., Any],
    *,
    with_indices: bool,
    remove_columns: str | Collection[str] | None,
    cache: str | os.PathLike[str] | None,
    workers: int | None,
    overwrite: bool,
    version: object,
    others: Mapping[str, Any],
) -> MappedCache:
    """Pack what a function makes of the samples; see ``SafeDataset.map``."""
    known = ("function", "with_indices", "remove_columns", "cache", "workers")
    refuse_options("map", others, (*known, "overwrite", "version"))
    if not isinstance(version, str | int):
        name = "version"
        raise refuse_value(name, version, "a text or a number", 2)
    check_truth("with_indices", with_indices)
    check_function_of_samples(function, with_indices=with_indices)
    if isinstance(remove_columns, str):
        remove_columns = [remove_columns]
    wanted = () if remove_columns is None else remove_columns
    removed = check_names("remove_columns", wanted)
    _check_removed(source, removed)
    packing = PackOptions(workers=workers, overwrite=overwrite)
    make = functools.partial(
        _MappedSamples,
        source,
        function,
        with_indices=with_indices,
        removed=removed,
        version=str(version),
    )
    # Made twice: the folder is named by the version, and only they can tell theirs.
    path = _default_path(source, make()) if cache is None else cache
    mapped = make(cache=path, packing=packing)
    try:
        return mapped.open_or_pack()
    except StaleCacheError as error:
        message = f"{path} is a cache of other samples, or of another function's."
        fix = f"map(function, cache={str(path)!r}, overwrite=True), or another folder"
        raise StaleCacheError(message, why=error.what, fix=fix) from None


def _check_removed(source: BaseDataset[Any], removed: tuple[str, ...]) -> None:
    """Refuse to remove fields that no sample has.

    Raises:
        OptionError: There are no such fields, or the samples are no dicts.
    """
    if not removed or not len(source):
        return
    first = source[0]
    if not isinstance(first, Mapping):
        message = f"remove_columns={list(removed)} was given, and samples are "
        message += f"{kind_of(first)} each."
        why = "fields of dicts are left out; others are as the function returns them"
        raise OptionError(message, why=why, fix="drop it")
    known = {str(name) for name in first}
    if source.reads_cache:
        # Of samples that are built in several ways, the first has not every field.
        known |= column_names(source._open_cache())
    for name in removed:
        if name not in known:
            message = f"remove_columns names {name!r}, which no sample has."
            why = f"their fields are {', '.join(sorted(known))}"
            fix = suggest_name(name, sorted(known))
            raise OptionError(message, why=why, fix=fix)


class _MappedSamples(BaseDataset[Any]):
    """What a function makes of the samples of a dataset, by their rows."""

    # What they do is in the version.
    _PACKED_WITHOUT: ClassVar[frozenset[str]] = BaseDataset._PACKED_WITHOUT | {
        *("source", "function", "with_indices", "removed", "version", "code"),
        *("is_packed_now", "has_own_version"),
    }

    def __init__(
        self,
        source: BaseDataset[Any],
        function: Callable[..., Any],
        *,
        with_indices: bool,
        removed: tuple[str, ...],
        version: str,
        cache: str | os.PathLike[str] | None = None,
        packing: PackOptions | None = None,
    ) -> None:
        super().__init__(cache=cache, packing=packing, checksums=source.checksums)
        self.classes = source.classes.and_of_module(_module_of(function))
        self.source = source
        self.function = function
        self.with_indices = with_indices
        self.removed = removed
        self.code = self._read_code()
        self.is_packed_now = False
        self.has_own_version = bool(version)
        # Which makes a cache stale when one of them changes.
        made_from: list[object] = [source.identity(), with_indices, removed]
        made_from += [code.xxh3 for code in self.code]
        if version:
            made_from.append(version)
        self.version = xxhash.xxh3_64_hexdigest(repr(made_from).encode())

    def keys(self) -> range:
        """Number the samples, as the source does."""
        return range(len(self.source))

    def load(self, row: int) -> Any:
        """Call the function with a sample."""
        sample = self.source[row]
        returned = (
            self.function(sample, row) if self.with_indices else self.function(sample)
        )
        if returned is None:
            message = f"The function returned None for sample {row}."
            why = "map packs what it returns; Hugging Face's would keep the sample as "
            why += "it was before the call"
            fix = "return sample at the end of the function"
            raise DatasetError(message, why=why, fix=fix)
        if not isinstance(sample, Mapping) or not isinstance(returned, Mapping):
            return returned
        # As with Hugging Face's map, a field that is to be removed stays where the
        # function gives it in a dict of its own, and goes where that is the sample.
        left_out = set(self.removed)
        if returned is not sample:
            left_out -= set(returned)
        fields = {**sample, **returned}
        return {name: value for name, value in fields.items() if name not in left_out}

    def _read_code(self) -> tuple[CodeRead, CodeRead]:
        """Read the code of the function, and of the transform in front of it."""
        return read_value(self.function), read_value(self.source.transform)

    def _pack_samples(self) -> PackOutcome:
        self.is_packed_now = True
        source = _KeyedLikeSource(self)
        outcome = pack_source(source, self._cache_location, self.packing)
        for before, after in zip(self.code, self._read_code(), strict=True):
            note_values_left(before, after)
        return outcome

    def open_or_pack(self) -> MappedCache:
        """Give the cache of the new samples, packed now unless it was before."""
        opened = self._open_cache()
        unread = [location for code in self.code for location in code.unread]
        # Who gives a version says by it when something has changed.
        if unread and not self.is_packed_now and not self.has_own_version:
            text = f"map opened {self.cache}, which it packed before, and cannot tell "
            text += f"whether {unread[0]} has changed since. If it has: map(..., "
            text += "overwrite=True) packs again, and version=2 packs another cache."
            # Above are map_samples and map, and then the user's line.
            warnings.warn(text, UserWarning, stacklevel=4)
        names = sorted(opened.structure.class_names())
        return MappedCache(
            opened,
            location=self._cache_location,
            classes=tuple(self.classes[name] for name in names),
            ragged={
                "ragged": self.source.ragged,
                "pad_value": pad_value_of(opened, self.source.pad_value),
            },
        )


class _KeyedLikeSource(KeyedSource):
    """Mapped samples, with the names that they had before."""

    def __init__(self, mapped: _MappedSamples) -> None:
        super().__init__(mapped)
        self._source = mapped.source

    def key(self, row: int) -> str:
        """Name a sample as the dataset does that the function is called with."""
        return self._source.key(row)


def _default_path(source: BaseDataset[Any], mapped: _MappedSamples) -> Path:
    """Name a folder beside the source's by what makes the samples."""
    if not isinstance(source.cache, Path):
        message = "map does not know where to pack the new samples."
        why = "the dataset has no cache to put them beside"
        if source.cache is not None:
            why = "beside the dataset's own they would go into its store"
        raise OptionError(message, why=why, fix='dataset.map(function, cache="folder")')
    name = getattr(mapped.function, "__name__", type(mapped.function).__name__)
    word = name if name.isidentifier() else "map"
    return source.cache.with_name(f"{source.cache.name}-{word}-{mapped.version[:8]}")


def _module_of(function: object) -> str:
    """Name the module in which a function, or the class of a callable, is written."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", type(function).__module__))
