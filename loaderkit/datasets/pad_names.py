"""Which fields a ``pad_value`` may name: those whose samples are padded in batches.

A name that pads nothing is refused, and not passed over: whoever gave it wants another
batch than the one that they would get.  Samples of tensors and arrays with an axis may
differ in length, and so may be padded; where all happen to be equally long no place is
to be filled, and the name is right.  ``None`` is not padded: in batches of samples that
have a value and others that have None, both stand side by side in a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from loaderkit.datasets.kinds import LEAF_KINDS, NEST_KINDS, DictJoin, Kind
from loaderkit.datasets.padding import parts_with_keys, path_text
from loaderkit.datasets.ragged import PADDED
from loaderkit.datasets.structure import Leaf
from loaderkit.errors import DatasetError
from loaderkit.nearest_names import suggest_name
from loaderkit.pyg import is_pyg_data

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import SupportsFloat

    from loaderkit.datasets.opened import OpenedCache
    from loaderkit.datasets.padding import PadValue, Path
    from loaderkit.datasets.structure import Node

_NUMBER = "one number in each sample"
_LIST = "a list in each sample"
_TEXT = "a text in each sample"
_GRAPH = "a graph in each sample"
_NONE = "None in each sample"


class NamedValue(NamedTuple):
    """A value of the samples, or of a batch of them."""

    path: Path
    """The keys that lead to it."""
    never_padded: str | None
    """What it is, where that is never padded; None where it may be, or is not known."""
    is_float: bool = False
    """Whether it is one number with a fraction."""


def check_names_in_cache(opened: OpenedCache, pad_value: PadValue) -> None:
    """Refuse names that pad nothing in any batch of the samples of a cache.

    Args:
        opened: The cache.
        pad_value: A number, which is for whatever is padded; or numbers by fields.

    Raises:
        DatasetError: There is no such field, or it is never padded.
    """
    if isinstance(pad_value, Mapping):
        if pad_value:
            _check_names(pad_value, _values_in(opened))
        return
    if pad_value != 0 and all(value.never_padded for value in _values_in(opened)):
        raise _nothing_to_pad(pad_value)


def pad_value_of(opened: OpenedCache, pad_value: PadValue) -> PadValue:
    """Leave out of a ``pad_value`` what pads nothing in the samples of a cache.

    Args:
        opened: The cache, whose samples were made of others.
        pad_value: What the others are padded with.
    """
    values = _values_in(opened)
    if not isinstance(pad_value, Mapping):
        return 0 if all(value.never_padded for value in values) else pad_value
    padded = [_names_of(value.path) for value in values if value.never_padded is None]
    names = set().union(*padded)
    return {name: number for name, number in pad_value.items() if name in names} or 0


def _values_in(opened: OpenedCache) -> list[NamedValue]:
    variants = opened.structure.variants
    return [value for v in variants for value in _values_of_node(v, ())]


def check_names_in_batch(
    batch: object, pad_value: Mapping[str, Any], opened: OpenedCache | None
) -> bool:
    """Refuse names that pad nothing in a batch, nor in any other of the same samples.

    Args:
        batch: The samples, joined.
        pad_value: Numbers by fields.
        opened: The cache that the samples are made of; a field that is in it, and not
            in this batch, may be in the next.  None for samples of no cache.

    Returns:
        Whether it is known of all names what they pad.  Of a field that is None in all
        samples of this batch the next one may tell.

    Raises:
        DatasetError: There is no such field, or it is never padded.
    """
    values = [*_values_of_batch(batch, ())]
    missing = pad_value.keys() - _all_names(values)
    if missing and opened is not None:
        for variant in opened.structure.variants:
            packed = _values_of_node(variant, ())
            values += [value for value in packed if missing & _names_of(value.path)]

    known = [value for value in values if value.never_padded != _NONE]
    undecided = (pad_value.keys() & _all_names(values)) - _all_names(known)
    decided = {name: pad_value[name] for name in pad_value if name not in undecided}
    _check_names(decided, values)
    return not undecided


def _names_of(path: Path) -> set[str]:
    """Give all names that mean a value: its own, and those of what it is in."""
    paths = {path_text(path[: depth + 1]) for depth in range(len(path))}
    return paths | {key for key in path if isinstance(key, str)}


def _all_names(values: Iterable[NamedValue]) -> set[str]:
    return set().union(*(_names_of(value.path) for value in values))


def _check_names(pad_value: Mapping[str, Any], values: list[NamedValue]) -> None:
    by_name: dict[str, list[NamedValue]] = {}
    for value in values:
        for name in _names_of(value.path):
            by_name.setdefault(name, []).append(value)
    for name, number in pad_value.items():
        if name not in by_name:
            raise _no_field(name, by_name)
        if all(value.never_padded for value in by_name[name]):
            raise _never_padded(name, number, by_name[name], values)


def _no_field(name: str, known: Iterable[str]) -> DatasetError:
    message = f"pad_value names {name!r}, which is no field of the samples."
    why = f"their fields are {', '.join(sorted(known)) or 'without a name'}"
    return DatasetError(message, why=why, fix=suggest_name(name, known))


def _nothing_to_pad(pad_value: PadValue) -> DatasetError:
    message = f"pad_value={pad_value!r} pads nothing: no field of the samples is a "
    message += "tensor or array with a first axis that may differ."
    why = "it is written behind the end of shorter samples, and lists stay lists"
    fix = "leave it out; or a transform that makes tensors of lists"
    return DatasetError(message, why=why, fix=fix)


def _never_padded(
    name: str, number: object, of_name: list[NamedValue], values: list[NamedValue]
) -> DatasetError:
    """Say that nothing is padded where a name leads to, and where something is."""
    kinds = dict.fromkeys(str(value.never_padded) for value in of_name)
    others = [kind for kind in kinds if kind != _NONE]
    shown = " and ".join(others) or _NONE
    if others and _NONE in kinds:
        shown += ", or None"
    message = f"pad_value names {name!r}, which is {shown}."
    why = "only tensors and arrays are padded, whose lengths may differ"
    if _LIST in kinds:
        why = "tensors and arrays are padded; a list of numbers stays a list"
        fix = 'pack(dataset.with_format("torch"), path) for those of Hugging Face; '
        fix += f"or a transform that makes a tensor of sample[{name!r}]"
        return DatasetError(message, why=why, fix=fix)
    can_be_padded = sorted(
        {path_text(value.path) for value in values if value.never_padded is None} - {""}
    )
    if others == [_NUMBER] and _NONE in kinds:
        why = "it is written behind the end of shorter tensors and arrays, and takes "
        why += "the place of no None"
        # A batch that began with an int would have another dtype than one of floats.
        is_float = any(value.is_float for value in of_name)
        number = float(cast("SupportsFloat", number)) if is_float else number
        fix = f"a transform that gives a number for None: sample[{name!r}] = {number!r}"
        if {value.path for value in of_name} == {(name,)}:
            value = f"sample[{name!r}]"
            replacement = f"{number!r} if {value} is None else {value}"
            fix = f"transform=lambda sample: {{**sample, {name!r}: {replacement}}}"
        return DatasetError(message, why=why, fix=fix)
    fix = f"leave {name!r} out"
    if can_be_padded:
        fix += f"; what can be padded is {', '.join(map(repr, can_be_padded))}"
    return DatasetError(message, why=why, fix=fix)


def _values_of_node(node: Node, path: Path) -> Iterator[NamedValue]:
    """Go through the values of samples that are built alike."""
    if isinstance(node, Leaf):
        column = node.column
        row = LEAF_KINDS[column.kind]
        never_padded: str | None = None
        if column.kind is Kind.JSON:
            never_padded = _LIST
        elif row.is_text and column.kind is not Kind.BIGINT:
            never_padded = _TEXT
        elif row.in_dicts is not DictJoin.TENSOR or not column.ndim:
            never_padded = _NUMBER
        yield NamedValue(path, never_padded, column.kind is Kind.FLOAT)
        return
    row_of_nest = NEST_KINDS[node.kind]
    if not row_of_nest.is_container:
        is_none = node.kind is Kind.NONE
        words = f"a tensor ({node.kind}) that has no padding"
        yield NamedValue(path, _NONE if is_none else words)
        return
    if not node.children:
        yield NamedValue(path, "empty in each sample")
    keys: Iterable[Any] = node.keys
    if row_of_nest.is_sequence:
        keys = range(len(node.children))
    for key, child in zip(keys, node.children, strict=True):
        # As fields of a batch are named: a number is a name in a dict.
        is_number = row_of_nest.is_sequence or isinstance(key, tuple)
        yield from _values_of_node(child, (*path, key if is_number else str(key)))


def _values_of_batch(batch: object, path: Path) -> Iterator[NamedValue]:
    if isinstance(batch, tuple(PADDED.values())):
        yield NamedValue(path, None)
    elif batch is None:
        yield NamedValue(path, _NONE)
    elif isinstance(batch, torch.Tensor):
        has_layout = batch.layout is torch.strided
        layout = str(batch.layout).removeprefix("torch.")
        never = None if has_layout else f"a tensor ({layout}) that has no padding"
        yield NamedValue(path, _NUMBER if has_layout and batch.dim() < 2 else never)
    elif is_pyg_data(batch):
        yield NamedValue(path, _GRAPH)
        for key in batch.keys():  # noqa: SIM118 -- PyG iterates over pairs
            yield NamedValue((*path, str(key)), "a field of a graph")
    elif isinstance(batch, list | tuple) and _are_plain_values(batch):
        is_float = any(isinstance(value, float) for value in batch)
        kinds = dict.fromkeys(map(_kind_of_plain, batch))
        yield from [NamedValue(path, kind, is_float) for kind in kinds]
    else:
        pairs = list(parts_with_keys(batch))
        if not pairs:
            yield NamedValue(path, "nothing that can be padded")
        for key, value in pairs:
            yield from _values_of_batch(value, (*path, key))


def _are_plain_values(batch: list[Any] | tuple[Any, ...]) -> bool:
    """Tell whether these are values side by side that nobody joined."""
    if hasattr(batch, "_fields"):
        return False
    plain = (str, bytes, int, float, complex, list)
    return any(value is None or isinstance(value, plain) for value in batch)


def _kind_of_plain(value: object) -> str | None:
    """Say what a value that nobody joined is; None where it may be padded."""
    if value is None:
        return _NONE
    if isinstance(value, str | bytes):
        return _TEXT
    if isinstance(value, list):
        return _LIST
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim:
        return None
    return _NUMBER
