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
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import get_worker_info

from loaderkit.datasets.composites import put_together, take_apart
from loaderkit.datasets.containers import make_named_tuple, refilled
from loaderkit.errors import DatasetError
from loaderkit.pyg import is_pyg_data

T = TypeVar("T")

_ATOMS = (str, bytes, int, float, complex, type(None), enum.Enum, type, torch.dtype)
_PLAIN = (
    pathlib.PurePath,
    datetime.date,
    datetime.timedelta,
    slice,
    range,
    torch.device,
)


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
    copied: T = _own(sample, "sample", ())
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
    ours = sorted(_extents(a))
    return any(
        start < stop_b and start_b < stop
        for start, stop in ours
        for start_b, stop_b in _extents(b)
    )


def _own(value: Any, path: str, above: tuple[int, ...]) -> Any:
    if isinstance(value, torch.Tensor):
        return _own_tensor(value, path)
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise _refused(path, value, "its elements are Python objects")
        if isinstance(value, np.generic):
            return value
        if type(value) is np.ndarray or isinstance(value, np.memmap):
            return np.array(value, copy=True)
        return value.copy()  # a masked array with its mask
    if id(value) in above:
        raise _refused(path, value, "it contains itself")
    return _own_nest(value, path, (*above, id(value)))


def _own_nest(value: Any, path: str, above: tuple[int, ...]) -> Any:
    if is_pyg_data(value):
        return _own_graph(value, path, above)
    for kinds, copier in _COPIERS:
        if isinstance(value, kinds):
            return copier(value, path, above)
    if dataclasses.is_dataclass(value):
        return _own_dataclass(value, path, above)
    parts = take_apart(value)
    if parts is None:
        raise _refused(path, value, "loaderkit does not know what memory it holds")
    return _own_composite(parts, path)


def _own_mapping(value: Any, path: str, above: tuple[int, ...]) -> Any:
    pairs = {k: _own(v, f"{path}[{k!r}]", above) for k, v in value.items()}
    if type(value) is dict:
        return pairs
    try:
        return refilled(value, pairs)
    except TypeError as error:
        raise _refused(path, value, str(error)) from None


def _own_sequence(value: Any, path: str, above: tuple[int, ...]) -> Any:
    inside = [_own(v, f"{path}[{at}]", above) for at, v in enumerate(value)]
    if not hasattr(value, "_fields"):
        return type(value)(inside)
    made = make_named_tuple(type(value), inside)
    if getattr(value, "__dict__", None):
        made.__dict__.update(value.__dict__)
    return made


def _own_set(value: Any, path: str, above: tuple[int, ...]) -> Any:
    return type(value)(_own(each, path, above) for each in value)


def _own_plain(value: Any, path: str, above: tuple[int, ...]) -> Any:
    del path, above
    return copy.deepcopy(value)


def _own_dataclass(value: Any, path: str, above: tuple[int, ...]) -> Any:
    made = copy.copy(value)
    for field in dataclasses.fields(value):
        copied = _own(getattr(value, field.name), f"{path}.{field.name}", above)
        object.__setattr__(made, field.name, copied)
    return made


def _own_graph(data: Any, path: str, above: tuple[int, ...]) -> Any:
    made = copy.copy(data)
    for store, copied in zip(data.stores, made.stores, strict=True):
        for key, value in store.items():
            copied[key] = _own(value, f"{path}[{key!r}]", above)
        for key in ("_slice_dict", "_inc_dict", "_num_nodes"):
            if key in store.__dict__:
                copied.__dict__[key] = _own(store.__dict__[key], path, above)
    return made


_COPIERS: tuple[tuple[Any, Callable[[Any, str, tuple[int, ...]], Any]], ...] = (
    (Mapping, _own_mapping),
    ((list, tuple), _own_sequence),
    ((set, frozenset), _own_set),
    (_PLAIN, _own_plain),
)


def _own_tensor(value: torch.Tensor, path: str) -> Any:
    if value.device.type not in {"cpu", "meta"} and get_worker_info() is not None:
        what = f"{path} is on {value.device} inside a DataLoader worker."
        why = "a worker that touches a device takes memory there, or fails after a fork"
        fix = (
            'load to the CPU: torch.load(file, map_location="cpu"); move whole batches'
        )
        raise DatasetError(what, why=why, fix=fix)
    if value.is_nested:
        return _own_nested(value.detach())
    parts = None if _is_plain_tensor(value) else take_apart(value)
    if parts is not None:
        return _own_composite(parts, path)
    return value.detach().clone(memory_format=torch.contiguous_format)


def _own_nested(value: Any) -> Any:
    if value.layout is not torch.jagged:
        return value.clone()
    values, offsets, lengths = (
        None if part is None else part.clone(memory_format=torch.contiguous_format)
        for part in (value.values(), value.offsets(), value.lengths())
    )
    axis: int = value._ragged_idx
    return torch.nested.nested_tensor_from_jagged(
        cast("torch.Tensor", values), offsets, lengths, jagged_dim=axis
    )


def _own_composite(parts: dict[str, Any], path: str) -> Any:
    kind = parts.pop("kind")
    return put_together(kind, {k: _own(v, f"{path}.{k}", ()) for k, v in parts.items()})


def _extents(value: Any) -> Iterator[tuple[int, int]]:
    """List the address ranges of all storages in a nest."""
    if isinstance(value, torch.Tensor):
        yield from _tensor_extents(value)
    elif isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        if value.nbytes:
            yield np.lib.array_utils.byte_bounds(value)
    elif not isinstance(value, (*_ATOMS, *_PLAIN, np.generic)):
        for each in _inside(value):
            yield from _extents(each)


def _tensor_extents(value: Any) -> Iterator[tuple[int, int]]:
    parts = None if _is_plain_tensor(value) else take_apart(value)
    if parts is not None:
        yield from _extents(parts)
    elif value.is_nested and value.layout is torch.jagged:
        yield from _extents((value.values(), value.offsets(), value.lengths()))
    elif value.is_nested:
        yield from _extents(value.unbind())
    elif value.device.type != "meta" and value.untyped_storage().nbytes():
        start = value.untyped_storage().data_ptr()
        yield start, start + value.untyped_storage().nbytes()


def _inside(value: Any) -> list[Any]:
    """List what a nest holds."""
    if is_pyg_data(value):
        return [each for store in value.stores for each in store.values()]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    parts = take_apart(value)
    if parts is None:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        what = f"Whether a {kind} shares memory cannot be told."
        why = "loaderkit does not know what memory it holds"
        raise DatasetError(what, why=why, fix="compare the tensors in it")
    return list(parts.values())


def _is_plain_tensor(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and type(value) is torch.Tensor


def _refused(path: str, value: object, why: str) -> DatasetError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    what = f"{path} is a {kind}, which cannot be copied safely."
    return DatasetError(what, why=why, fix="return it as tensors, or leave it out")
