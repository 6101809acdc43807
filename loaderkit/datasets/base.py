"""What every dataset of samples that are copies does: read, choose, gather, show."""

from __future__ import annotations

import copy
import inspect
import itertools
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, SupportsIndex, overload

import numpy as np
from torch.utils.data import Dataset
from typing_extensions import Self, TypeVar

from loaderkit.answers import answer_wrong_calls
from loaderkit.arguments import refuse_value
from loaderkit.cache.files import refuse_cut_url
from loaderkit.cache.layout import MANIFEST
from loaderkit.cache.remote import RemoteCache, locate_cache
from loaderkit.cache.shards import Checksums, check_checksums
from loaderkit.call_keywords import suggest_keywords
from loaderkit.datasets.absent import ABSENT, CONSTRUCTORS, no_such_attribute
from loaderkit.datasets.assigned_options import (
    GivenOption,
    checked_option,
    refuse_options_set_beside,
)
from loaderkit.datasets.batch_joining import BatchJoining, unlike_shapes_error
from loaderkit.datasets.cached_samples import DatasetState
from loaderkit.datasets.classes import ClassRegistry, modules_of
from loaderkit.datasets.collate_errors import Collating
from loaderkit.datasets.columns import (
    check_column,
    column_names,
    column_rows,
    join_column,
    stores_of,
)
from loaderkit.datasets.compositions import ReadBehind
from loaderkit.datasets.gathering import UnlikeShapesError
from loaderkit.datasets.key_texts import key_text
from loaderkit.datasets.pack_options import PackOptions
from loaderkit.datasets.padding import PadValue, fill_padding
from loaderkit.datasets.rows import is_single_index, normalize_index, normalize_indices
from loaderkit.datasets.sample_reading import is_ours
from loaderkit.datasets.selecting import RowSelection
from loaderkit.datasets.sizes import sample_sizes, size_counter
from loaderkit.datasets.taken_names import (
    is_a_method,
    is_own,
    is_own_method,
    name_is_taken,
    private_names_of,
)
from loaderkit.errors import (
    DatasetError,
    NoSuchAttributeError,
    NoSuchRowError,
    NotChangeableError,
    OptionError,
)
from loaderkit.notebook import card
from loaderkit.operations import answer_operations
from loaderkit.path_arguments import check_path
from loaderkit.pyg import is_pyg_data
from loaderkit.units import count_of
from loaderkit.value_words import kind_of, show_value

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Iterable,
        Iterator,
    )

    import torch
    from numpy.typing import NDArray

    from loaderkit.array_types import Ints
    from loaderkit.datasets.opened import OpenedCache
    from loaderkit.datasets.ragged import RaggedLayout

_KINDS_OF_KEYS = (str, bytes, int, float, tuple, PurePath, np.generic)
"""What samples are named by, and are seldom themselves."""
_ACCESSORS = ("__func__", "fget", "func")
"""Where methods of classes, properties and cached properties keep their functions."""
_MOST_KEYS_READ = 100_000
"""Of a cache, for the words of an error: they take 0.1 s."""

T = TypeVar("T", default=Any)
R = TypeVar("R")


class _NoSuchConstructor:
    """Answers the name of a constructor of other libraries, asked of a class.

    A metaclass would answer all names, and could not be joined with those that users'
    other base classes have.
    """

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, _: object, kind: type) -> Any:
        raise no_such_attribute(kind.__name__, self._name, ())


@answer_operations
@answer_wrong_calls
class BaseDataset(ReadBehind[T], BatchJoining[T], RowSelection[T], Dataset[T]):
    """What ``SafeDataset`` and ``SafeGraphDataset`` have in common; not for users.

    That is all but ``map``: it makes a dataset of another cache, so it stands where
    both classes are known.

    The arguments are explained in ``SafeDataset``.

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
    largest_column_bytes: int = 1 << 30
    """What ``column`` may gather at most, 1 GiB unless you set another bound: a field
    of all samples lies in memory at once.  A text such as "4 GB" may be assigned."""

    @suggest_keywords
    def __init__(
        self,
        raw: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | RemoteCache | None = None,
        *,
        transform: Callable[[Any], Any] | None = None,
        ragged: RaggedLayout = "padded",
        pad_value: PadValue = 0,
        packing: PackOptions | None = None,
        classes: Iterable[type] = (),
        checksums: Checksums = "once",
        storage_options: Mapping[str, Any] | None = None,
        mirror: str | os.PathLike[str] | None = None,
        mirror_bytes: int | str | None = None,
    ) -> None:
        options = {
            "raw": GivenOption(raw, None),
            "cache": GivenOption(cache, None),
            "transform": GivenOption(transform, None),
            "ragged": GivenOption(ragged, "padded"),
            "pad_value": GivenOption(pad_value, 0),
            "packing": GivenOption(packing, None),
            "classes": GivenOption(classes, ()),
            "checksums": GivenOption(checksums, "once"),
            "storage_options": GivenOption(storage_options, None),
            "mirror": GivenOption(mirror, None),
            "mirror_bytes": GivenOption(mirror_bytes, None),
        }
        if "_loaderkit" not in vars(self):  # the constructor may be called twice
            refuse_options_set_beside(self, options)
        check_checksums(checksums)
        _check_packing(packing)
        _check_raw(type(self).__name__, raw)
        self.raw = None if raw is None else Path(raw)
        if self.raw is not None and cache is None:
            _refuse_cache_as_raw(type(self).__name__, self.raw)
            _ask_about_raw_that_nobody_reads(type(self), self.raw)
        refuse_cut_url("cache", cache)
        self.cache = locate_cache(cache, storage_options, mirror, mirror_bytes)
        """Where the cache is: a folder, or a store; None for no cache."""
        self.transform = transform
        self.ragged = ragged
        self.pad_value = pad_value
        self.packing = packing or PackOptions()
        self.classes = ClassRegistry(classes, modules_of(type(self)))
        self.checksums: Checksums = checksums
        self._loaderkit = DatasetState()
        self._refuse_cache_that_nobody_packs()

    @classmethod
    def _of_opened(cls, opened: OpenedCache, *, plain: bool, **options: Any) -> Self:
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

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._taken_names:
            raise name_is_taken(type(self).__qualname__, name)
        if is_own_method(type(self), name) and not callable(value):
            raise is_a_method(type(self).__qualname__, name, show_value(value))
        if self._shows_fields and self._hides_field(name):
            # It would hide the field here, and the samples would have it as before.
            raise self._stays_as_packed(f"{name} = ...")
        super().__setattr__(name, checked_option(self, name, value))

    # Arrays and tensors of any size have an ``__index__`` to type checkers; a tensor
    # may well be a single row, as when somebody loops over ``torch.randperm``.
    @overload
    def __getitem__(self, index: NDArray[Any]) -> Self: ...
    @overload
    def __getitem__(self, index: torch.Tensor | str | tuple[str, ...]) -> Any: ...
    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: Any) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        if is_single_index(index):
            try:
                row = normalize_index(index, len(self))
            except NoSuchRowError as error:
                raise self._key_for_a_row(index) or error from None
            return self._read_sample(self._row_in_cache(row))
        if isinstance(index, str):
            try:
                return self.column(index)
            except DatasetError as error:
                raise self._key_for_a_field(index) or error from None
        try:
            rows = normalize_indices(index, len(self))
        except OptionError as error:
            raise self._key_for_rows(index) or error from None
        return self.subset(rows)

    if not TYPE_CHECKING:  # a type checker shall go on to find misspelt names

        def __getattr__(self, name: str) -> Any:
            if name in self._PACKED_WITHOUT and "_loaderkit" not in self.__dict__:
                raise _not_made(type(self).__name__)
            is_private = name.startswith("_")
            is_known_elsewhere = name in ABSENT
            if (is_private and not is_known_elsewhere) or hasattr(type(self), name):
                # Also a property that raised an AttributeError of its own: again.
                return object.__getattribute__(self, name)
            if self._shows_fields and name in self._fields_if_open():
                return self.column(name)
            known: list[str] = []
            if not is_known_elsewhere:
                # Its own answer names no other attribute.  Each epoch asks for a
                # ``state_dict``, and listing all that there are takes 20 us.
                public = (name for name in dir(type(self)) if not name.startswith("_"))
                known = [name for name in public if name not in ABSENT]
            fields = self._fields_if_open()
            stores = self._stores_if_open()
            kind = type(self).__name__
            raise no_such_attribute(kind, name, known, fields, stores)

    def __setitem__(self, index: object, _: object) -> None:
        raise self._stays_as_packed(f"[{show_value(index)}] = ...")

    def __delitem__(self, index: object) -> None:
        raise self._stays_as_packed(f"del [{show_value(index)}]")

    def __enter__(self) -> NoReturn:
        message = f"{type(self).__name__} is not opened and closed: with dataset."
        why = "its files are mapped, and closed with its last reference"
        raise OptionError(message, why=why, fix="dataset = loaderkit.open_cache(path)")

    def __exit__(self, *_: object) -> None:
        """Never called: Python asks whether there is one before it enters."""

    def _hides_field(self, name: str) -> bool:
        """Tell whether a new attribute has the name of a field.

        A cache is not opened for that: constructors set attributes before its classes
        are known.
        """
        state = vars(self).get("_loaderkit")
        is_open = state is not None and state.opened is not None
        return is_open and name not in vars(self) and name in self._fields_if_open()

    def _stays_as_packed(self, wish: str) -> NotChangeableError:
        message = f"{type(self).__name__} cannot be changed: {wish}."
        why = "a cache is packed once, and every sample that is read is a copy"
        fix = (
            "dataset.map(function, cache=path), dataset[rows], or extend(dataset, more)"
        )
        return NotChangeableError(message, why=why, fix=fix)

    def __iter__(self) -> Iterator[T]:
        return (self[row] for row in range(len(self)))

    def __contains__(self, sample: object) -> bool:
        self._refuse_key(sample)
        self._refuse_other_kind(sample)
        # PyG's graphs have an __eq__, which compares where they are.
        has_no_equality = type(sample).__eq__ is object.__eq__ and sample is not None
        is_only_itself = has_no_equality or is_pyg_data(sample)
        if is_only_itself and (self.reads_cache or self.transforms_cache):
            message = f"{show_value(sample)} cannot be looked for among the samples."
            why = f"{kind_of(sample)} is equal to itself alone, and samples are copies"
            fix = "dataset.row_of(key) for a key; or any(f(other) for other in dataset)"
            raise OptionError(message, why=why, fix=fix)
        return any(_is_same(other, sample) for other in self)

    def _refuse_key(self, sample: object) -> None:
        """Refuse the key of a sample, where a sample is looked for.

        Raises:
            OptionError: It is one, and not that sample itself.
        """
        if not isinstance(sample, _KINDS_OF_KEYS):
            return
        row = self._row_of_key(key_text(sample))
        if row is None:
            return
        other = self[row]
        # Of numbers that are named by numbers, each may be meant.
        if not isinstance(sample, str) and isinstance(other, type(sample)):
            return
        if type(other) is not type(sample) or other != sample:
            shown = show_value(sample)
            message = f"{shown} is the key of a sample, and no sample."
            why = "a dataset holds samples, and this would compare each of them with it"
            fix = f"dataset.row_of({shown}) is its row"
            if self._has_own_load():
                # As keys() gives it: 3 is called "3" too.
                key = self._list_keys()[self._row_in_cache(row)]
                fix = f"{show_value(key)} in dataset.keys()"
            raise OptionError(message, why=why, fix=fix)

    def _refuse_other_kind(self, sample: object) -> None:
        """Refuse to look for what is no dict or graph among samples that are.

        Raises:
            OptionError: It is a row, a field or a key, and can be no sample.
        """
        if isinstance(sample, Mapping) or is_pyg_data(sample) or not len(self):
            return
        first = self[0]
        if not isinstance(first, Mapping) and not is_pyg_data(first):
            return
        kind = kind_of(first)
        shown = show_value(sample)
        message = f"{shown} cannot be among the samples, of which the first is {kind}."
        why = "a dataset holds samples, and this would compare each of them with it"
        if self._has_own_load() and isinstance(sample, _KINDS_OF_KEYS):
            fix = f"{shown} in dataset.keys()"
        elif isinstance(sample, str):
            fix = f"{shown} in dataset[0] asks for a field; of keys, "
            fix += f"bool(dataset.all_rows_of({shown}))"
        elif isinstance(sample, int | np.integer):
            fix = f"0 <= {shown} < len(dataset) asks for a row"
        else:
            fix = "any(f(other) for other in dataset)"
        raise OptionError(message, why=why, fix=fix)

    def _key_for_a_field(self, name: str) -> DatasetError | None:
        """Say that a text is the key of a sample, where a field was asked for by it."""
        row = self._row_of_key(name)
        if row is None:
            return None
        message = f"{name!r} is the key of a sample, and was asked for as a field."
        why = "dataset[text] gathers a field of all samples; samples have rows"
        return DatasetError(message, why=why, fix=f"dataset[{row}]")

    def _key_for_rows(self, index: object) -> OptionError | None:
        """Say that a key was given for rows, such as a pair of a name and a number."""
        if not isinstance(index, _KINDS_OF_KEYS):
            return None
        row = self._row_of_key(key_text(index))
        if row is None:
            return None
        message = (
            f"{show_value(index)} is the key of a sample, and was asked for as rows."
        )
        why = "samples are read by their rows, which are counted from 0"
        fix = f"dataset[{row}], or dataset[dataset.row_of({show_value(index)})]"
        return OptionError(message, why=why, fix=fix)

    def _key_for_a_row(self, number: SupportsIndex) -> NoSuchRowError | None:
        """Say that a number is the key of a sample, where a row was asked for by it."""
        row = self._row_of_key(key_text(number))
        if row is None:
            return None
        message = f"row {number} was asked of a dataset of "
        message += f"{count_of(len(self), 'samples')}."
        why = f"it is the key of row {row}; rows are counted from 0"
        fix = f"dataset[{row}], or dataset[dataset.row_of({number})]"
        return NoSuchRowError(message, why=why, fix=fix)

    def _row_of_key(self, text: str) -> int | None:
        """Find the row of a sample by its key, for the words of an error.

        Returns:
            The row; None where there is no such key, and where to find out would take
            long.
        """
        if not self._has_own_load():
            if not isinstance(self.cache, Path) or len(self) > _MOST_KEYS_READ:
                return None
            # What was packed of a list has its rows for keys.
            row = self._find_row(text)
            is_named = row is not None and text != str(self._row_in_cache(row))
            return row if is_named else None
        return self._find_row(text)

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
        opened, rows = self._cache_and_rows("columns")
        check_column(opened, rows, name, self.largest_column_bytes)
        return self._join_column(opened, rows, name)

    def sizes(self) -> Any:
        """Tell how large each sample is, from the cache's offsets alone.

        Returns:
            Tokens and bytes of each sample: a ``SampleSizes``.

        Raises:
            DatasetError: There is no cache.
        """
        return sample_sizes(*self._cache_and_rows())

    def size_counter(self) -> Any:
        """Give what counts the size of samples that a transform made.

        Returns:
            A ``SizeCounter``; None where there is no cache, or ``sizes`` is your own.
        """
        if self.cache is None or not is_ours(self.sizes):
            return None
        return size_counter(self._open_cache(), graphs=self._sizes_are_of_graphs)

    def graph_fields(self) -> frozenset[str] | None:
        """Name the fields of the graphs in the samples, as the cache has them.

        Returns:
            Their names; None where there is no cache, or code of yours makes other
            samples of what is in it.
        """
        return self._open_cache().graph_fields if self.reads_cache else None

    def subset(self, rows: Ints) -> Self:
        """Give some rows as a dataset over the same cache, as ``dataset[rows]`` does.

        Args:
            rows: Rows ``[n]`` int64 from 0 to ``len(self) - 1``, repeats allowed.
        """
        selected = copy.copy(self)
        selected._loaderkit = replace(self._loaderkit, rows=self._rows_in_cache(rows))
        return selected

    def __repr__(self) -> str:
        where = "no cache" if self.cache is None else str(self.cache)
        if self.loads_each_time:
            where = "no cache: load() at each read"
        samples = "samples are counted when it is first read"
        if not self._would_be_packed():
            samples = count_of(len(self), "samples")
        return f"{type(self).__name__}({samples}, {where})"

    def _refuse_cache_that_nobody_packs(self) -> None:
        """Refuse a new cache for samples that a subclass reads by itself.

        Its ``__getitem__`` would be called each time, and there would be no cache.
        """
        reads_itself = not is_ours(self.__getitem__) and not self._has_own_load()
        if not reads_itself or not isinstance(self.cache, Path) or self.cache.exists():
            return
        name = type(self).__name__
        message = f"{name} has a cache, {self.cache}, that is never packed."
        why = "it has a __getitem__ of its own, and no load(key), which packing calls"
        fix = "def keys(self): return range(100), and def load(self, key): return ..., "
        fix += f"in place of __getitem__; or loaderkit.pack({name}(), path) of a class "
        fix += "that is torch's Dataset"
        raise OptionError(message, why=why, fix=fix)

    def _would_be_packed(self) -> bool:
        """Tell whether reading starts by packing, or by asking whether it must."""
        return self._loaderkit.opened is None and self._has_own_load()

    def _repr_html_(self) -> str:
        rows = []
        if not self._would_be_packed() and self.cache is not None:
            rows = column_rows(self._open_cache())
        return card(repr(self), heads=("field", "kind", "dtype"), rows=rows)

    def _join_column(self, opened: OpenedCache, rows: Ints, name: str) -> Any:
        """Gather a field of rows of the cache, known to be there in all of them."""
        try:
            with Collating():
                column = join_column(opened, rows, name, self.classes, self.ragged)
        except UnlikeShapesError as error:
            raise unlike_shapes_error(opened.store, str(error), rows) from None
        if self.pad_value != 0:
            fill_padding(column, self.pad_value, (name,))
        return column

    def _fields_if_open(self) -> frozenset[str]:
        """Name the fields of the samples, where that runs no code of a user's.

        Opening a cache may pack it, or call ``keys`` to see whether it is stale: both
        would ask for the very attribute that is not there.
        """
        return column_names(self._open_cache()) if self._opens_quietly else frozenset()

    @property
    def _opens_quietly(self) -> bool:
        """Whether there is a cache, and opening it runs no code of a user's."""
        if self.__dict__.get("cache") is None:
            return False
        is_open = self._loaderkit.opened is not None
        return is_open or not self._has_own_load()

    def _stores_if_open(self) -> dict[Any, list[str]]:
        """Name the fields of node and edge types, as ``_fields_if_open`` does."""
        return stores_of(self._open_cache()) if self._opens_quietly else {}


for _name in CONSTRUCTORS:
    _answer = _NoSuchConstructor()
    _answer.__set_name__(BaseDataset, _name)
    setattr(BaseDataset, _name, _answer)


def _not_made(class_name: str) -> NoSuchAttributeError:
    """Say that a subclass has a constructor that does not call ours."""
    message = f"{class_name} does not know yet where its cache is."
    why = f"{class_name}.__init__ has not called super().__init__()"
    fix = "super().__init__(cache=cache), in __init__"
    return NoSuchAttributeError(message, why=why, fix=fix)


def _check_raw(class_name: str, raw: object) -> None:
    """Refuse samples where the folder of raw data is named."""
    if raw is None:
        return
    if isinstance(raw, str | os.PathLike):
        check_path("raw", raw, "raw/molecules")
        return
    message = f"{class_name} takes a path as raw, got {show_value(raw)}."
    why = f"it is {kind_of(raw)}; keys() and load(key) make samples of what is there"
    raise OptionError(message, why=why, fix="loaderkit.pack(samples, path)")


def _check_packing(packing: object) -> None:
    if packing is not None and not isinstance(packing, PackOptions):
        name, example = "packing", PackOptions(workers=2)
        raise refuse_value(name, packing, "a PackOptions", example)


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


def _ask_about_raw_that_nobody_reads(cls: type, raw: Path) -> None:
    """Warn of raw data that the class does not read, as in ``Rings("folder")``.

    Where a cache was meant, nothing would be packed.  What a function that is given the
    dataset reads is not seen, so this is no error.
    """
    has_own_init = not is_own(next(c for c in cls.__mro__ if "__init__" in vars(c)))
    if is_own(cls) or has_own_init:
        return
    users_classes = [kind for kind in cls.__mro__ if not is_own(kind)]
    code_objects = itertools.chain.from_iterable(map(_code_in, users_classes))
    if not any("raw" in code_object.co_names for code_object in code_objects):
        name = cls.__name__
        text = f"{name} was given {str(raw)!r} as its raw data, and no method of it "
        text += f"reads self.raw: did you mean {name}(cache={str(raw)!r})? Without a "
        text += "cache load() makes each sample at each read."
        # Whose line it is depends on the classes between: Python shows it once.
        warnings.warn(text, UserWarning, stacklevel=2)


def _code_in(kind: type) -> Iterator[CodeType]:
    """Go through the code that stands in a class's body."""
    for value in vars(kind).values():
        functions = [value, *(getattr(value, name, None) for name in _ACCESSORS)]
        for function in functions:
            code = getattr(inspect.unwrap(function), "__code__", None)
            if isinstance(code, CodeType):
                yield from _with_inner_code(code)


def _with_inner_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner_code(constant)


def _is_same(other: object, sample: object) -> bool:
    """Compare two samples as ``in`` does.

    Raises:
        OptionError: They have no answer: a tensor's is a tensor.
    """
    try:
        return other is sample or bool(other == sample)
    except (RuntimeError, ValueError) as error:
        message = f"{show_value(sample)} cannot be looked for among the samples."
        why = "tensors and arrays are compared value by value"
        fix = "any(torch.equal(other, sample) for other in dataset), or "
        fix += "dataset.row_of(key) for a key"
        raise OptionError(message, why=why, fix=fix) from error
