"""Copies that share nothing, and the proof that they do not.

``owned_copy(x)`` copies a nest of any depth so that every tensor has a storage of
exactly its own bytes; ``shares_memory(a, b)`` tells whether two nests have memory in
common.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import enum
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils.data import get_worker_info

from loaderkit.call_keywords import suggest_keywords
from loaderkit.datasets.containers import make_named_tuple, refilled
from loaderkit.datasets.kinds import flatten_composite, unflatten_composite
from loaderkit.errors import DatasetError
from loaderkit.nests import is_named_tuple
from loaderkit.pyg import is_pyg_data

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch_geometric.data.data import BaseData

    from loaderkit.datasets.kinds import Composite

T = TypeVar("T")

_ATOM_TYPES = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    enum.Enum,
    type,
    torch.dtype,
)
"""Cannot be changed in place, so that two samples may have the same one."""
_PLAIN_TYPES = (
    pathlib.PurePath,
    datetime.date,
    datetime.timedelta,
    slice,
    range,
    torch.device,
)
"""Hold no memory of tensors, but a subclass may: they are copied deeply."""


@suggest_keywords
def owned_copy(sample: T) -> T:
    """Copy a sample so that its owner can do with it what they like.

    Args:
        sample: PyG data, or any nest of containers, dataclasses, tensors, arrays and
            plain values.

    Returns:
        An equal sample that shares no memory with it: views are compacted (a slice no
        longer drags its whole storage along), tensors are contiguous and detached from
        autograd.  A tensor under two keys becomes two.

    Raises:
        DatasetError: It holds something that cannot be copied with certainty, a cycle,
            or, inside a DataLoader's worker, a tensor on a device.
    """
    copied: T = _own_value(sample, "sample", ())
    return copied


def shares_memory(a: object, b: object) -> bool:
    """Tell whether two nests have any memory in common.

    Args:
        a: Any nest of tensors and arrays.
        b: Another.

    Returns:
        True when a storage of one overlaps a storage of the other: then a change to
        one can reach the other, or keeping one keeps the other's memory.

    Raises:
        DatasetError: They hold an object whose memory cannot be known.
    """
    ranges_of_a = sorted(_address_ranges(a))
    return any(
        start < stop_b and start_b < stop
        for start, stop in ranges_of_a
        for start_b, stop_b in _address_ranges(b)
    )


def _own_value(value: object, path: str, enclosing_ids: tuple[int, ...]) -> Any:
    if isinstance(value, torch.Tensor):
        return _own_tensor(value, path)
    if isinstance(value, _ATOM_TYPES):
        return value
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise _cannot_copy_error(path, value, "its elements are Python objects")
        if isinstance(value, np.generic):
            return value
        if type(value) is np.ndarray or isinstance(value, np.memmap):
            return np.array(value, copy=True)
        return value.copy()  # a masked array with its mask
    if id(value) in enclosing_ids:
        raise _cannot_copy_error(path, value, "it contains itself")
    return _own_nest(value, path, (*enclosing_ids, id(value)))


def _own_nest(value: object, path: str, enclosing_ids: tuple[int, ...]) -> Any:
    if is_pyg_data(value):
        return _own_graph(value, path, enclosing_ids)
    for kinds, copier in _COPIERS:
        if isinstance(value, kinds):
            return copier(value, path, enclosing_ids)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _own_dataclass(value, path, enclosing_ids)
    composite = flatten_composite(value)
    if composite is None:
        raise _cannot_copy_error(
            path, value, "loaderkit does not know what memory it holds"
        )
    return _own_composite(composite, path)


def _own_mapping(
    value: Mapping[Any, Any], path: str, enclosing_ids: tuple[int, ...]
) -> Any:
    pairs = {
        key: _own_value(item, f"{path}[{key!r}]", enclosing_ids)
        for key, item in value.items()
    }
    if type(value) is dict:
        return pairs
    try:
        return refilled(value, pairs)
    except TypeError as error:
        raise _cannot_copy_error(path, value, str(error)) from None


def _own_sequence(
    value: list[Any] | tuple[Any, ...], path: str, enclosing_ids: tuple[int, ...]
) -> Any:
    items = [
        _own_value(item, f"{path}[{position}]", enclosing_ids)
        for position, item in enumerate(value)
    ]
    if not is_named_tuple(value):
        return type(value)(items)
    duplicate: Any = make_named_tuple(type(value), items)
    # What a subclass keeps beside its fields, and may not let anybody set.
    if getattr(value, "__dict__", None):
        duplicate.__dict__.update(value.__dict__)
    return duplicate


def _own_set(
    value: set[Any] | frozenset[Any], path: str, enclosing_ids: tuple[int, ...]
) -> Any:
    return type(value)(_own_value(item, path, enclosing_ids) for item in value)


def _own_plain(value: object, path: str, enclosing_ids: tuple[int, ...]) -> Any:
    del path, enclosing_ids
    return copy.deepcopy(value)


def _own_dataclass(
    value: DataclassInstance, path: str, enclosing_ids: tuple[int, ...]
) -> Any:
    duplicate = copy.copy(value)
    for field in dataclasses.fields(value):
        copied = _own_value(
            getattr(value, field.name), f"{path}.{field.name}", enclosing_ids
        )
        # As the __init__ of a frozen dataclass does; nobody else has the copy yet.
        object.__setattr__(duplicate, field.name, copied)
    return duplicate


def _own_graph(data: BaseData, path: str, enclosing_ids: tuple[int, ...]) -> Any:
    duplicate = copy.copy(data)
    for store, copied in zip(data.stores, duplicate.stores, strict=True):
        for key, value in store.items():
            copied[key] = _own_value(value, f"{path}[{key!r}]", enclosing_ids)
        # What a Batch keeps beside its fields: to_data_list needs it.
        for key in ("_slice_dict", "_inc_dict", "_num_nodes"):
            if key in store.__dict__:
                copied.__dict__[key] = _own_value(
                    store.__dict__[key], path, enclosing_ids
                )
    return duplicate


_COPIERS: tuple[tuple[Any, Callable[[Any, str, tuple[int, ...]], Any]], ...] = (
    (Mapping, _own_mapping),
    ((list, tuple), _own_sequence),
    ((set, frozenset), _own_set),
    (_PLAIN_TYPES, _own_plain),
)


def _own_tensor(value: torch.Tensor, path: str) -> Any:
    if value.device.type not in {"cpu", "meta"} and get_worker_info() is not None:
        message = f"{path} is on {value.device} inside a DataLoader worker."
        why = "a worker that touches a device takes memory there, or fails after a fork"
        fix = (
            'load to the CPU: torch.load(file, map_location="cpu"); move whole batches'
        )
        raise DatasetError(message, why=why, fix=fix)
    if value.is_nested:
        return _own_nested(value.detach())
    composite = None if _is_plain_tensor(value) else flatten_composite(value)
    if composite is not None:
        return _own_composite(composite, path)
    return value.detach().clone(memory_format=torch.contiguous_format)


def _own_nested(value: Any) -> Any:
    # Any: torch's hints do not know the methods of a jagged tensor.
    if value.layout is not torch.jagged:
        return value.clone()
    clone = functools.partial(torch.clone, memory_format=torch.contiguous_format)
    lengths = value.lengths()
    # torch has no public name for the axis that is ragged.
    axis: int = value._ragged_idx
    return torch.nested.nested_tensor_from_jagged(
        clone(value.values()),
        clone(value.offsets()),
        None if lengths is None else clone(lengths),
        jagged_dim=axis,
    )


def _own_composite(composite: Composite, path: str) -> Any:
    components = {
        name: _own_value(component, f"{path}.{name}", ())
        for name, component in composite.parts.items()
    }
    return unflatten_composite(composite.kind, components)


def _address_ranges(value: object) -> Iterator[tuple[int, int]]:
    """List the address ranges of all storages in a nest."""
    if isinstance(value, torch.Tensor):
        yield from _tensor_address_ranges(value)
    elif isinstance(value, np.ndarray):
        # A view holds the whole memory of the array that it was taken of.
        while isinstance(value.base, np.ndarray):
            value = value.base
        if value.nbytes:
            yield np.lib.array_utils.byte_bounds(value)
    elif not isinstance(value, (*_ATOM_TYPES, *_PLAIN_TYPES, np.generic)):
        for item in _items_inside(value):
            yield from _address_ranges(item)


def _tensor_address_ranges(value: Any) -> Iterator[tuple[int, int]]:
    # Any: torch's hints do not know the methods of a jagged tensor.
    composite = None if _is_plain_tensor(value) else flatten_composite(value)
    if composite is not None:
        yield from _address_ranges(composite.parts)
    elif value.is_nested and value.layout is torch.jagged:
        yield from _address_ranges((value.values(), value.offsets(), value.lengths()))
    elif value.is_nested:
        yield from _address_ranges(value.unbind())
    elif value.device.type != "meta" and value.untyped_storage().nbytes():
        start = value.untyped_storage().data_ptr()
        yield start, start + value.untyped_storage().nbytes()


def _items_inside(value: object) -> list[Any]:
    """List what a nest holds."""
    if is_pyg_data(value):
        return [item for store in value.stores for item in store.values()]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    composite = flatten_composite(value)
    if composite is None:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        message = f"Whether a {kind} shares memory cannot be told."
        why = "loaderkit does not know what memory it holds"
        raise DatasetError(message, why=why, fix="compare the tensors in it")
    return list(composite.parts.values())


def _is_plain_tensor(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and type(value) is torch.Tensor


def _cannot_copy_error(path: str, value: object, why: str) -> DatasetError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    message = f"{path} is a {kind}, which cannot be copied safely."
    return DatasetError(message, why=why, fix="return it as tensors, or leave it out")
