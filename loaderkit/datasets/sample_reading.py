"""Samples of a dataset, each a copy that its reader owns: alone, or many at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import TypeVar

from loaderkit.answers import answer_wrong_calls
from loaderkit.datasets.cached_samples import CachedSamplesMixin
from loaderkit.datasets.decode import decode
from loaderkit.datasets.gathering import BatchGather, UnlikeShapesError, leaf_reader
from loaderkit.datasets.key_index import KeyIndex
from loaderkit.datasets.key_texts import key_text
from loaderkit.datasets.many_samples import read_samples
from loaderkit.datasets.owned_copy import owned_copy
from loaderkit.datasets.plain import decode_text
from loaderkit.datasets.rows import normalize_index, normalize_indices
from loaderkit.datasets.structure import KEY, KEY_COLUMN
from loaderkit.errors import LoaderkitError, NoSuchKeyError, OptionError
from loaderkit.nearest_names import similar_name
from loaderkit.units import count_of
from loaderkit.value_words import show_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T", default=Any)

_KEYS_AT_ONCE = 4096
"""Chosen: 0.5 MB of keys of 100 letters."""
_MOST_COMPARED = 1000
"""Keys that are compared with one that nobody has, letter by letter: 30 ms."""


@answer_wrong_calls
class SampleReading(CachedSamplesMixin[T]):
    """What a dataset does to give samples.

    A method that a user's subclass has in place of ours is seen by its module: such
    samples are never taken straight from the cache.
    """

    transform: Callable[[Any], Any] | None

    def __len__(self) -> int:
        rows = self._loaderkit.rows
        return self._count_samples() if rows is None else len(rows)

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError

    @property
    def reads_cache(self) -> bool:
        """Whether samples come from the cache, with no code of yours on the way."""
        own_reading = is_ours(self.__getitem__)
        return self.cache is not None and self.transform is None and own_reading

    @property
    def has_whole_cache(self) -> bool:
        """Whether the samples are those of the cache: all, in order, as they are."""
        if not self.reads_cache:
            return False
        rows = self._loaderkit.rows
        if rows is None:
            return True
        count = len(self._open_cache().store)
        # As many may be others: shuffled, or one of them several times.
        return len(rows) == count and bool((rows == np.arange(count)).all())

    @property
    def transforms_cache(self) -> bool:
        """Whether samples come from the cache, and then go through ``transform``."""
        own_reading = is_ours(self.__getitem__)
        return self.cache is not None and self.transform is not None and own_reading

    @property
    def loads_each_time(self) -> bool:
        """Whether ``load`` makes a sample again each time that it is read."""
        has_none = self.cache is None and self._has_own_load()
        return has_none and is_ours(self.__getitem__)

    @property
    def makes_by_load(self) -> bool:
        """Whether the samples are what ``load`` makes of each of ``keys()``."""
        whole = self._loaderkit.rows is None and self.transform is None
        return whole and self._has_own_load() and is_ours(self.__getitem__)

    def read_together(self, rows: Sequence[int]) -> list[T]:
        """Read samples, at once where they are built alike in a cache.

        Args:
            rows: Their rows, in any order, repeats allowed.

        Returns:
            New samples, as ``self[row]`` gives them one by one.
        """
        read = self.read_untransformed(rows) if is_ours(self.__getitem__) else None
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
        opened = self._open_cache()
        try:
            cached = self._rows_in_cache(normalize_indices(rows, len(self)))
            variant = opened.one_variant(cached)
            if variant is None:
                return None
            node = opened.structure.variants[variant]
            return read_samples(opened.store, node, cached, self.classes)
        # Read one by one then, which raises again where it must: an error of many
        # samples could not name the one that it is about.
        except (LoaderkitError, UnlikeShapesError, IndexError, TypeError):
            return None

    def key(self, row: int) -> str:
        """Name the sample of a row, as it was called when it was packed."""
        unchecked_row: object = row  # by who checks no types
        if isinstance(unchecked_row, str):
            raise self._no_row(unchecked_row)
        at = self._row_in_cache(normalize_index(row, len(self)))
        if self.cache is None:
            return key_text(self._list_keys()[at])
        store = self._open_cache().store
        shard, sample = store.locate(at)
        return decode_text(KEY, store.column(KEY).read(shard, sample).tobytes())

    def _no_row(self, text: str) -> OptionError:
        """Say that a text is no row, and whether it is a key."""
        message = f"a row is an integer, got {show_value(text)}."
        why, fix = "it is a text, and key() names the sample of a row", "dataset.key(0)"
        if self._find_row(text) is not None:
            why, fix = "it is the key of a sample", f"dataset.row_of({text!r})"
        return OptionError(message, why=why, fix=fix)

    def row_of(self, key: object) -> int:
        """Find the row of the sample of a key, the other way round than ``key``.

        The first call reads all keys, which takes about a second for a million and
        keeps 16 bytes for each.  A cache in a store that ``open_cache`` opened is
        downloaded for it.

        Args:
            key: What ``keys()`` gave, or its text, as ``key(row)`` gives it.

        Returns:
            The row; the first one, where several samples have the key.

        Raises:
            NoSuchKeyError: No sample of this dataset has it.

        >>> dataset[dataset.row_of("CCO")]  # doctest: +SKIP
        """
        text = key_text(key)
        row = self._find_row(text)
        if row is not None:
            return row
        message = f"{show_value(key)} is the key of no sample here."
        if not len(self):
            why = "a dataset of no samples has no keys"
            raise NoSuchKeyError(message, why=why, fix="choose some rows first")
        why = f"none of the {count_of(len(self), 'samples')} has it; the key of the "
        why += f"first one is {show_value(self.key(0))}"
        raise NoSuchKeyError(message, why=why, fix=self._instead_of_key(key, text))

    def _instead_of_key(self, key: object, text: str) -> str:
        """Say what was probably meant by a key that no sample has."""
        is_text = isinstance(key, str | bytes)
        if isinstance(key, Iterable) and not is_text and not isinstance(key, tuple):
            return "[dataset.row_of(key) for key in keys], one key after the other"
        if len(self) <= _MOST_COMPARED:
            names = [self.key(row) for row in range(len(self))]
            nearest = similar_name(text, names)
            if nearest is not None:
                return f"did you mean {nearest!r}?"
        return "dataset.key(row) names the sample of a row"

    def all_rows_of(self, key: object) -> list[int]:
        """Find all rows whose samples have a key; mostly there is one, or none.

        Args:
            key: As for ``row_of``.
        """
        return list(self._rows_with_key(key_text(key)))

    def _find_row(self, text: str) -> int | None:
        """Find the row of a key's text; None where no sample has it."""
        return next(self._rows_with_key(text), None)

    def _rows_with_key(self, text: str) -> Iterator[int]:
        """Find the rows of a key's text, in order."""
        own = self._loaderkit
        if own.key_index is None:
            own.key_index = KeyIndex(self._texts_of_keys())
        rows = own.key_index.candidates(text)
        # The index is of the cache; a part of the dataset has its rows in an order of
        # its own, and may have one several times.
        if own.rows is not None:
            rows = np.flatnonzero(np.isin(own.rows, rows))
        # Of many keys two may have one hash.
        yield from (row for row in rows.tolist() if self.key(row) == text)

    def _texts_of_keys(self) -> Iterator[str]:
        """Give the keys of all samples of the cache, in its order."""
        # A cache of other keys is stale.  Those of one in a store would be downloaded.
        if self._has_own_load():
            yield from map(key_text, self._list_keys())
            return
        store = self._open_cache().store
        for start in range(0, len(store), _KEYS_AT_ONCE):
            rows = np.arange(start, min(start + _KEYS_AT_ONCE, len(store)))
            yield from BatchGather(store, rows).texts(KEY_COLUMN)

    def _read_sample(self, row: int) -> Any:
        if self.cache is None:
            sample = owned_copy(self._load_checked(self._list_keys()[row]))
        else:
            opened = self._open_cache()
            variant = opened.structure.variants[opened.variant(row)]
            sample = decode(variant, leaf_reader(opened.store, row), self.classes)
        return sample if self.transform is None else self.transform(sample)


def is_ours(method: Callable[..., Any]) -> bool:
    """Tell whether a method is loaderkit's own, and not one of a user's subclass."""
    return method.__module__.startswith("loaderkit.")
