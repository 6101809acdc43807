"""What can be packed: lists, map-style datasets, PyG's datasets, classes with ``load``.

Folders of ``.pt`` files are in pt_folder.py, what can only be read in order is in
streams.py.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch.utils.data import IterableDataset

from loaderkit.arguments import check_integer
from loaderkit.datasets.compact_keys import compact_keys
from loaderkit.datasets.compositions import has_keys, key_of
from loaderkit.datasets.fingerprint import (
    CodeRead,
    Fingerprint,
    fingerprint_of,
    note_values_left,
    read_code,
)
from loaderkit.datasets.key_index import first_doubled
from loaderkit.datasets.key_texts import key_in_code, key_text, text_has_address
from loaderkit.datasets.own_samples import asking_for_keys
from loaderkit.datasets.pt_folder import PtFolder
from loaderkit.datasets.source_files import files_named_by, files_named_in_code
from loaderkit.datasets.state_hash import hash_state
from loaderkit.datasets.streams import IterableSource, SpanSource, StreamSource
from loaderkit.errors import DatasetError, OptionError
from loaderkit.fixes import Fix, Pack, Setting
from loaderkit.function_arguments import refusal_of_call
from loaderkit.mistaken import mistaken_for_dataset
from loaderkit.pyg import loaded_pyg
from loaderkit.value_words import show_value, with_article

if TYPE_CHECKING:
    from loaderkit.fixes import Part


_MOST_SPANS = 10**6
"""Of a span there is a task and at least one file; chosen."""


class Source(Protocol):
    """Samples that can be read one by one, by several processes."""

    def __len__(self) -> int:
        """Count the samples; at least one."""

    def key(self, row: int) -> str:
        """Name a sample, for messages and for the cache."""

    def read(self, row: int) -> Any:
        """Read a sample; it may share memory with the source."""

    def fingerprint(self) -> Fingerprint:
        """Say what the samples are made from: code and keys."""

    def root(self) -> Path | None:
        """Say where the raw data lies; None where that is not known."""

    def named_files(self) -> Iterator[str]:
        """List the files that keys and settings name, by absolute path."""

    def runs_user_code(self) -> bool:
        """Tell whether reading runs code that may open files for itself to keep.

        Such files must not be open before workers are forked: an open HDF5 file or
        database that two processes read through gives one the other's bytes.
        """

    def state(self) -> str | None:
        """Hash what samples are made from besides code, keys and files.

        None where that cannot be told: whether an unfinished build is of the same
        samples is then seen by reading them again.
        """

    def values(self) -> Mapping[str, str]:
        """Hash values that samples may be made from, by names that a user knows.

        They are compared only where the fingerprint differs, to say what does.
        """


def as_source(source: object, spans: int | None = None) -> Source | StreamSource:
    """Make a source of what a user wants to pack.

    Args:
        source: A list or tuple of samples, a map-style dataset, a PyG dataset, a
            ``PtFolder``, or the path of a folder of ``.pt`` files; an iterable of
            samples; or a function that gives an iterable a span.
        spans: Into how many spans the function cuts the samples; None for all others.

    Returns:
        The source.  One that knows its length is known to hold at least one sample.

    Raises:
        DatasetError: It is none of these, or empty; the message says what to do.
        OptionError: ``spans`` is no number of spans, or the source is no function.
    """
    if spans is not None:
        return _as_spans(source, spans)
    if isinstance(source, str | os.PathLike):
        source = PtFolder(source)
    if isinstance(source, Iterator):
        # Generators, zip, map: what one process reads once, in order.
        return IterableSource(source)

    mistake = mistaken_for_dataset(source)
    if mistake is not None:
        preparation = "".join(f"{line}\n" for line in mistake.preparation)
        fix = Fix.of(preparation, Pack(mistake.instead))
        raise DatasetError(mistake.message, why=mistake.why, fix=fix)

    if isinstance(source, PtFolder | KeyedSource | MapSource):
        packable: Source = source
    elif isinstance(source, Mapping):
        raise _cannot_pack_error(source, *_advice_on_mapping(source))
    elif _makes_by_load(source):
        packable = KeyedSource(cast("KeyedSamples", source))
        packable.refuse_keys()
    elif isinstance(source, IterableDataset) or not hasattr(source, "__getitem__"):
        return _as_iterable(source)
    elif not hasattr(source, "__len__"):
        raise _cannot_pack_error(source, "it has no length", "give it a __len__")
    else:
        packable = MapSource(source)

    refuse_empty(packable, source)
    return packable


def _advice_on_mapping(given: Mapping[Any, Any]) -> tuple[str, Pack]:
    """Say what a mapping probably is, and what to pack instead.

    Returns:
        Why it cannot be packed, and the fix.
    """
    values = list(given.values())
    kinds = {type(value) for value in values}
    if not isinstance(given, dict) and kinds == {list}:
        # What a tokenizer of Hugging Face gives for one text, or for several.
        if all(isinstance(item, list) for value in values for item in value):
            columns = "torch.utils.data.StackDataset(**encoding)"
            return "it holds columns, and a dataset has rows", Pack(columns)
        return "it is one sample", Pack("[dict(sample)]")
    # Samples by name are of one kind; the fields of one sample seldom are.
    if len(kinds) > 1 or kinds & {int, float, bool, str, type(None)}:
        return "it is one sample: fields by name", Pack("[sample]")
    return "a dict names samples", Pack("list(samples.values())")


def refuse_empty(packable: Source, given: object) -> None:
    """Refuse to pack no samples.

    Args:
        packable: The source.
        given: What the user has, to be named.

    Raises:
        DatasetError: There are none.
    """
    if len(packable):
        return
    message = f"There is nothing to pack: {given!r} has no samples."
    why, fix = "a cache holds at least one", "give it at least one sample"
    if isinstance(packable, KeyedSource):
        name = type(given).__name__
        message = f"There is nothing to pack: {name}.keys() is empty."
        fix = "def keys(self): return range(100)"
        raw = packable.root()
        if raw is not None:
            why = _what_is_in(raw)
        if raw is not None and not raw.exists():
            fix = _fix_of_missing_raw(name)
        elif raw is not None:
            fix = f"look at what {name}.keys() searches for, or at raw={str(raw)!r}"
    raise DatasetError(message, why=why, fix=fix)


def refuse_missing_raw(name: str, raw: Path | None) -> None:
    """Refuse to be a dataset of nothing, because of a folder that is not there.

    A loop over it would do nothing, and tell nobody.

    Args:
        name: The class, whose ``keys`` are none.
        raw: Where it looked.

    Raises:
        DatasetError: There is no such folder.
    """
    if raw is not None and not raw.exists():
        message = f"{name}.keys() is empty."
        raise DatasetError(message, why=_what_is_in(raw), fix=_fix_of_missing_raw(name))


def _fix_of_missing_raw(name: str) -> str:
    return f"{name}(raw=...) with its whole path; a relative one begins at {Path.cwd()}"


def _what_is_in(raw: Path) -> str:
    """Say what a class that finds no keys has for raw data."""
    if not raw.exists():
        return f"there is no {raw}, its raw data"
    if not raw.is_dir():
        return f"{raw}, its raw data, is a file, and has no files in it"
    names = sorted(entry.name for entry in raw.iterdir())
    if not names:
        return f"{raw}, its raw data, is an empty folder"
    others = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f"{raw}, its raw data, holds {', '.join(names[:3])}{others}"


def _as_iterable(source: object) -> IterableSource:
    if isinstance(source, Iterable):
        return IterableSource(source)
    why = "it can neither be read by number nor iterated over"
    fix = Fix.of(Pack("list(samples)"), ", or a map-style dataset")
    if callable(source):
        why = "a function gives one iterable a span, and spans= says how many there are"
        in_spans = Pack("source", options=(Setting("spans", 8),))
        fix = Fix.of(in_spans, ", or ", Pack("source()"), " for one iterable")
    raise _cannot_pack_error(source, why, fix)


def _as_spans(source: object, spans: int) -> SpanSource:
    # An int: numpy's are not written to the manifest.
    spans = check_integer("spans", spans, least=1, most=_MOST_SPANS)
    if not callable(source) or isinstance(source, type | torch.nn.Module):
        message = f"{with_article(type(source).__name__)} was given with spans={spans}."
        why = "spans are the parts that a function source(span, spans) gives"
        fix = "leave spans out, or give such a function"
        if isinstance(source, type):
            message = f"The class {source.__name__} was given with spans={spans}."
            fix = f"lambda span, spans: {source.__name__}(...), with what a span needs"
        raise OptionError(message, why=why, fix=fix)
    refused = refusal_of_call(source, "span", "spans")
    if refused is not None:
        name = getattr(source, "__name__", type(source).__name__)
        message = f"{name} cannot be called for a span: {refused}."
        why = f"it is called as source(span, spans), with span from 0 to {spans - 1}"
        fix = "def source(span, spans): return samples[span::spans]"
        raise OptionError(message, why=why, fix=fix)
    return SpanSource(source, spans)


def describe_rows(source: Source | StreamSource, rows: range) -> str:
    """Say which samples some rows are, for messages.

    Args:
        source: Where they come from.
        rows: Rows; of a stream, spans.
    """
    if isinstance(source, StreamSource):
        name = source.name_span(rows.start)
        return f"{name[0].lower()}{name[1:]}"
    key = source.key(rows.start)
    return f"samples {rows.start:,} to {rows.stop - 1:,}, from {key!r} on"


def _are_one_key_of_dicts(key: object, other: object) -> bool:
    """Tell whether a dict has two keys as one; of arrays and NaN it never has."""
    try:
        return len({key, other}) == 1
    except TypeError:
        return False


def _makes_by_load(source: object) -> bool:
    """Tell whether ``load`` of each of ``keys()`` gives the samples of a source.

    A part of a ``SafeDataset``, one with a transform or with a ``__getitem__`` of its
    own, and one over a cache alone give others.
    """
    methods = (getattr(source, name, None) for name in ("keys", "load"))
    return all(map(callable, methods)) and getattr(source, "makes_by_load", True)


class NumberedSamples(Protocol):
    """What torch calls a map-style dataset."""

    def __len__(self) -> int:
        """Count the samples."""

    def __getitem__(self, row: int, /) -> Any:
        """Read one."""


class KeyedSamples(Protocol):
    """Samples that have keys, each made by ``load``."""

    def keys(self) -> Iterable[Any]:
        """List the samples."""

    def load(self, key: Any, /) -> Any:
        """Make one."""


class MapSource:
    """A list, or any dataset with a length and numbered samples."""

    def __init__(self, dataset: NumberedSamples) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def key(self, row: int) -> str:
        """Name the sample as the dataset does; number it where it has no names."""
        if self._has_keys:
            return key_of(self._dataset, row)
        return str(row)

    @functools.cached_property
    def _has_keys(self) -> bool:
        return has_keys(self._dataset)

    def read(self, row: int) -> Any:
        """Read a sample, without letting an ``InMemoryDataset`` keep a copy of it."""
        dataset = self._dataset
        pyg = loaded_pyg()
        if pyg is None or not isinstance(dataset, pyg.in_memory_dataset):
            return dataset[row]
        sample = dataset[row]
        # PyG keeps every graph that was read once: packing would hold them all.
        cached_graphs = getattr(dataset, "_data_list", None)
        if cached_graphs is not None:
            cached_graphs[dataset.indices()[row]] = None
        return copy.copy(sample)

    def fingerprint(self) -> Fingerprint:
        """Count the samples: what is in a list cannot be told from its code."""
        read_sample = getattr(type(self._dataset), "__getitem__", len)
        return fingerprint_of(read_sample, range(len(self)))

    def root(self) -> Path | None:
        """Nobody knows."""
        return None

    def named_files(self) -> Iterator[str]:
        """Name none: of a cache, keys are only names."""
        return iter(())

    def runs_user_code(self) -> bool:
        """A list runs none, nor does PyG's own dataset without a transform."""
        dataset = self._dataset
        pyg = loaded_pyg()
        if pyg is not None and isinstance(dataset, pyg.in_memory_dataset):
            reads_as_pyg = type(dataset).get is pyg.in_memory_dataset.get
            return not reads_as_pyg or dataset.transform is not None
        return type(dataset) not in {list, tuple}

    def state(self) -> str | None:
        """Nothing but the samples themselves can tell."""
        return None

    def values(self) -> Mapping[str, str]:
        """Name none."""
        return {}


def ask_for_keys(dataset: KeyedSamples) -> Iterable[Any]:
    """Call ``keys()``, which is the user's.

    Args:
        dataset: Whose keys.

    Returns:
        What it gave.

    Raises:
        DatasetError: It is no method, or gave no keys: a number, a text, None; or a
            set; or it asked the dataset for its samples.
    """
    kind = type(dataset).__name__
    method: object = dataset.keys
    why = "it lists the samples: names, paths, numbers, in a stable order"
    if not callable(method):
        message = f"{kind}.keys is no method: {show_value(method)}."
        fix = f"def keys(self): return {show_value(method)}"
        raise DatasetError(message, why=why, fix=fix)
    with asking_for_keys(dataset):
        keys: object = method()
    if isinstance(keys, str | bytes | os.PathLike):
        message = f"{kind}.keys() gave one name: {keys!r}."
        fix = f"return [{keys!r}], or sorted(os.listdir({os.fsdecode(keys)!r}))"
        raise DatasetError(message, why=why, fix=fix)
    if isinstance(keys, set | frozenset):
        message = f"{kind}.keys() gave a set, which has no order."
        why = "the order of texts in a set differs from process to process"
        raise DatasetError(message, why=why, fix="return sorted(keys)")
    if not hasattr(keys, "__iter__") and not hasattr(keys, "__getitem__"):
        message = f"{kind}.keys() gave no keys, but {show_value(keys)}."
        fix = f"return range({keys})" if isinstance(keys, int) else "return range(100)"
        raise DatasetError(message, why=why, fix=fix)
    return cast("Iterable[Any]", keys)


def refuse_load(dataset: KeyedSamples) -> None:
    """Refuse a ``load`` that cannot be called with a key.

    Raises:
        DatasetError: It takes nothing, or needs more.
    """
    refused = refusal_of_call(dataset.load, "key")
    if refused is not None:
        message = f"{type(dataset).__name__}.load cannot be called: {refused}."
        why = "it is called as load(key), once for each of keys()"
        raise DatasetError(message, why=why, fix="def load(self, key): return ...")
    if inspect.iscoroutinefunction(dataset.load):
        message = f"{type(dataset).__name__}.load is async, and nothing awaits it."
        why = "each call makes a coroutine in place of a sample"
        fix = "def load(self, key): return ..., with asyncio.run(coroutine) where it "
        raise DatasetError(message, why=why, fix=f"{fix}waits for something")


class KeyedSource:
    """An object with ``keys()`` and ``load(key)``, such as a ``SafeDataset``.

    Raises:
        DatasetError: ``keys()`` gives no keys, or ``load`` takes none.
    """

    def __init__(self, dataset: KeyedSamples) -> None:
        self._dataset = dataset
        refuse_load(dataset)
        self._keys = compact_keys(ask_for_keys(dataset))

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, row: int) -> str:
        """Name the sample as ``keys()`` does."""
        return key_text(self._keys[row])

    def refuse_keys(self) -> None:
        """Refuse to pack samples of keys that do not name each of them.

        Raises:
            DatasetError: Two have one key, and ``row_of`` finds one of them; or a key
                has another text in each process.  It names the first.
        """
        self._refuse_keys_with_addresses()
        self._refuse_doubled_keys()

    def _refuse_doubled_keys(self) -> None:
        doubled = first_doubled(self._keys)
        if doubled is None:
            return
        name = type(self._dataset).__name__
        key, other = self._keys[doubled.first], self._keys[doubled.second]
        shown, other_shown = key_in_code(key), key_in_code(other)
        if shown == other_shown:
            message = f"{name}.keys() gives {shown} twice: in rows {doubled.first:,} "
            message += f"and {doubled.second:,}."
            why = "a key names one sample, and load() would make it twice"
            fix = "return list(dict.fromkeys(keys))"
            if not _are_one_key_of_dicts(key, other):
                fix = "return list({str(key): key for key in keys}.values())"
            fix += "; dataset[rows] may have a row twice"
            raise DatasetError(message, why=why, fix=fix)

        message = f"{name}.keys() gives {shown} in row {doubled.first:,} "
        message += f"and {other_shown} in row {doubled.second:,}."
        if key_text(key) == key_text(other):
            why = "a cache has the names of keys, and both are called "
            why += show_value(key_text(key))
        else:
            why = f"{shown} == {other_shown}: a dict has both as one key"
        fix = 'return [f"{type(key).__name__} {key}" for key in keys], or other names'
        raise DatasetError(message, why=why, fix=fix)

    def _refuse_keys_with_addresses(self) -> None:
        # Texts and numbers, which nearly all keys are, are kept in arrays: of millions
        # none is looked at.
        if not isinstance(self._keys, list):
            return
        for row, key in enumerate(self._keys):
            if not text_has_address(key):
                continue
            message = f"{type(self._dataset).__name__}.keys() gives {key_in_code(key)} "
            message += f"in row {row:,}."
            why = "its text has an address, another one in each process, so that the "
            why += "cache would be stale in the next"
            fix = "return names, paths or numbers, and find the object by them in "
            raise DatasetError(message, why=why, fix=f"{fix}load(key)")

    def read(self, row: int) -> Any:
        """Call ``load``."""
        # A SafeGraphDataset checks what ``load`` returned, and names the key.
        load = getattr(self._dataset, "_load_checked", self._dataset.load)
        return load(self._keys[row])

    def fingerprint(self) -> Fingerprint:
        """Look at the code of ``load``, the keys and the class's version."""
        version = str(getattr(self._dataset, "version", ""))
        return self._code_of_load.fingerprint(self._keys, version=version)

    @functools.cached_property
    def _code_of_load(self) -> CodeRead:
        """The code of ``load``: read once, since graphs on ``self`` take seconds."""
        return read_code(self._dataset.load)

    def note_values_left(self) -> None:
        """Look at the values that the code reads again: loading may change some."""
        before = self._code_of_load
        if before.values:
            note_values_left(before, read_code(self._dataset.load))

    def root(self) -> Path | None:
        """Look at the dataset's ``raw``."""
        raw = getattr(self._dataset, "raw", None)
        return Path(raw) if isinstance(raw, str | os.PathLike) else None

    def named_files(self) -> Iterator[str]:
        """Look at ``raw``, and at keys, attributes and constants that are paths."""
        root = self.root()
        if root is not None and root.is_file():
            yield os.path.abspath(root)
        yield from files_named_by(self._keys, root)
        yield from files_named_by(self._users_attributes().values(), root)
        yield from files_named_in_code(self._code_of_load.paths, root)

    def runs_user_code(self) -> bool:
        """``load`` is the user's."""
        return True

    def state(self) -> str | None:
        """Hash the dataset's attributes, as another process would receive them."""
        return self._hash_of_attributes

    def values(self) -> Mapping[str, str]:
        """Name the attributes, and the variables that code reads."""
        hashes = {
            f"self.{name}": hashed
            for name, hashed in self._hashes_of_attributes.items()
            if hashed is not None
        }
        return {**self._code_of_load.values, **hashes}

    @functools.cached_property
    def _hash_of_attributes(self) -> str | None:
        """As they were when packing began."""
        hashes = self._hashes_of_attributes
        return None if None in hashes.values() else hash_state(hashes)

    @functools.cached_property
    def _hashes_of_attributes(self) -> dict[str, str | None]:
        """As they were when packing began; None of what cannot be hashed."""
        attributes = self._users_attributes()
        return {name: hash_state(value) for name, value in attributes.items()}

    def _users_attributes(self) -> dict[str, Any]:
        """Give the attributes that are the user's own."""
        our_names: frozenset[str] = getattr(
            self._dataset, "_PACKED_WITHOUT", frozenset()
        )
        attributes = getattr(self._dataset, "__dict__", {})
        return {
            name: value for name, value in attributes.items() if name not in our_names
        }


def _cannot_pack_error(source: object, why: str, fix: Part | Fix) -> DatasetError:
    message = f"{with_article(type(source).__name__)} cannot be packed."
    return DatasetError(message, why=why, fix=fix)
