"""Take a sample apart: a tree that says how it is built, and one array per leaf.

Refuses what a cache cannot hold by naming it; nothing is ever pickled.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch_geometric.data import Batch
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import NodeStorage

from loaderkit.cache.layout import DTYPES
from loaderkit.datasets.classes import class_name
from loaderkit.datasets.composites import put_together, take_apart
from loaderkit.datasets.dtypes import as_array, dtype_name
from loaderkit.datasets.structure import LOOSE
from loaderkit.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Tree = tuple[Any, ...]
    Values = dict[tuple[Any, ...], NDArray[Any]]

_PLAIN = (str, int, float, bool, complex, bytes, type(None))
_NONE = ("none", None, (), (), None)


def encode(sample: object) -> tuple[Tree, Values]:
    """Take a sample apart.

    Args:
        sample: PyG data, or any nest of dicts, lists, tuples and dataclasses of
            tensors, arrays, numbers, strings and None.

    Returns:
        How it is built, and its values by raw column: C-contiguous, the axis along
        which samples are joined first.  The values may share the sample's memory.

    Raises:
        DatasetError: It holds something that a cache cannot, named by its path.
    """
    encoder = _Encoder()
    if isinstance(sample, BaseData):
        return encoder.graph(sample), encoder.values
    return encoder.node("", sample), encoder.values


class _Encoder:
    def __init__(self) -> None:
        self.values: Values = {}

    def graph(self, data: Any) -> Tree:
        if isinstance(data, Batch) or not hasattr(data, "stores"):
            what = f"The sample is a {type(data).__name__}, which is not one graph."
            fix = "pack batch.to_data_list(), or Data and HeteroData objects"
            raise DatasetError(what, why="a cache holds samples", fix=fix)
        stores = [self._store(data, store) for store in data.stores]
        keys = tuple(store._key for store in data.stores)
        return "graph", _stored_class("", data), keys, tuple(stores), None

    def _store(self, data: Any, store: Any) -> Tree:
        prefix = _store_path(store._key)
        keys, children = [], []
        for key, value in store.items():
            keys.append(key)
            rule = functools.partial(self._rule, data, store, key)
            children.append(self.node(prefix + escape(key), value, rule))
        nodes = None
        if isinstance(store, NodeStorage) and store.can_infer_num_nodes:
            nodes = (prefix + "@nodes", "nodes", "int64", 0, None)
            self.values[nodes] = np.array(int(store.num_nodes or 0), "<i8")
        return "store", None, tuple(keys), tuple(children), nodes

    def _rule(
        self, data: Any, store: Any, key: Any, inner: Any, value: Any
    ) -> tuple[Any, Any]:
        """Ask PyG how values of this name are joined and incremented."""
        name = key if inner is None else inner
        if not isinstance(value, torch.Tensor):
            return None, _increment(data, name, value, store)
        axis = data.__cat_dim__(str(name), value, store)
        stacked = axis is None or value.dim() == 0
        if stacked:
            value = value.unsqueeze(0)
        return None if stacked else axis, _increment(data, str(name), value, store)

    def node(
        self, path: str, value: Any, rule: Callable[..., Any] | None = None
    ) -> Tree:
        if value is None:
            return _NONE
        if isinstance(value, torch.Tensor):
            return self._tensor(path, value, rule)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(path, value)
        if isinstance(value, str | int | float | complex | bytes):
            return self._scalar(path, value, rule)
        if path and isinstance(value, list | tuple) and _is_plain(value):
            return self._leaf(path, "json", "", _text(json.dumps(_tagged(value))))
        return self._nest(path, value, rule)

    def _nest(self, path: str, value: Any, rule: Callable[..., Any] | None) -> Tree:
        if isinstance(value, Mapping):
            keys = tuple(value)
            if not all(_is_literal(key) for key in keys):
                raise _refused(path, value, "its keys are no strings or numbers")
            kind, inside = "dict", [(k, v, k) for k, v in value.items()]
            cls = None if type(value) is dict else _stored_class(path, value)
        elif isinstance(value, list | tuple):
            named = hasattr(value, "_fields")
            keys = getattr(value, "_fields", tuple(range(len(value))))
            kind = "named" if named else type(value).__mro__[-2].__name__
            inside = [(k, v, None) for k, v in zip(keys, value, strict=True)]
            cls = _stored_class(path, value) if named else None
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            keys = tuple(each.name for each in dataclasses.fields(value))
            kind, cls = "dataclass", _stored_class(path, value)
            inside = [(key, getattr(value, key), key) for key in keys]
        else:
            return self._composite(path, value)
        children = [
            self.node(
                _join(path, key), child, rule and functools.partial(_inner, rule, name)
            )
            for key, child, name in inside
        ]
        return kind, cls, keys, tuple(children), None

    def _tensor(
        self, path: str, value: torch.Tensor, rule: Callable[..., Any] | None
    ) -> Tree:
        _check_tensor(path, value)
        if value.layout is not torch.strided or type(value) not in _PLAIN_TENSORS:
            return self._composite(path, value)
        value = value.detach()
        axis, inc = (
            (0 if value.dim() else None, 0) if rule is None else rule(None, value)
        )
        if axis is not None and not isinstance(axis, int):
            axis, inc = 0, LOOSE
        axis = None if axis is None else axis % value.dim()
        moved = value.movedim(axis, 0) if axis else value
        raw = (path, "tensor", dtype_name(value.dtype), value.dim(), axis)
        self.values[raw] = as_array(moved)
        return "leaf", raw, self._increment(path, inc, value, axis)

    def _increment(
        self, path: str, inc: Any, value: torch.Tensor | None, axis: int | None
    ) -> Any:
        if isinstance(inc, torch.Tensor):
            pairs = inc.shape == (2, 1) and value is not None and value.dim() == 2
            if inc.dtype != torch.int64 or not (
                inc.dim() == 0 or (pairs and axis == 1)
            ):
                return LOOSE
            inc = inc.numpy().reshape(-1) if inc.dim() else int(inc)
        if isinstance(inc, str) or not isinstance(inc, int | np.ndarray):
            return LOOSE
        if isinstance(inc, int) and not -(1 << 63) <= inc < 1 << 63:
            return LOOSE
        found = np.asarray(inc, "<i8")
        raw = (path + "@inc", "inc", "int64", found.ndim, None)
        self.values[raw] = found
        return raw

    def _array(self, path: str, value: Any) -> Tree:
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        plain = value.dtype.kind in "biufc" and value.dtype.itemsize <= 16
        if not plain or value.dtype.newbyteorder("<").str not in DTYPES:
            raise _refused(path, value, f"its dtype is {value.dtype}")
        stored = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        axis = 0 if value.ndim else None
        raw = (path, kind, value.dtype.str, value.ndim, axis)
        self.values[raw] = stored.reshape(value.shape)
        return "leaf", raw, None

    def _scalar(self, path: str, value: Any, rule: Callable[..., Any] | None) -> Tree:
        kind = next(k.__name__ for k in _SCALARS if isinstance(value, k))
        if kind == "str":
            return self._leaf(path, kind, "", _text(value))
        if kind == "bytes":
            return self._leaf(path, kind, "", np.frombuffer(value, np.uint8))
        if kind == "int" and not -(1 << 63) <= value < 1 << 63:
            return self._leaf(path, "bigint", "", _text(json.dumps(int(value))))
        inc = None if rule is None or kind == "complex" else rule(None, value)[1]
        raw = (
            path,
            kind,
            _SCALARS[type(value) if type(value) in _SCALARS else int],
            0,
            None,
        )
        self.values[raw] = np.array(value, raw[2])
        incremented = None if inc is None else self._increment(path, inc, None, None)
        return "leaf", raw, incremented

    def _leaf(self, path: str, kind: str, dtype: str, value: NDArray[Any]) -> Tree:
        raw = (path, kind, dtype, value.ndim, 0)
        self.values[raw] = value
        return "leaf", raw, None

    def _composite(self, path: str, value: Any) -> Tree:
        parts = take_apart(value)
        if parts is None:
            why = (
                "it is neither tensor, array, number, string, None nor a nest of these"
            )
            raise _refused(path, value, why)
        kind = parts.pop("kind")
        try:
            put_together(kind, parts, checked=True)
        except (RuntimeError, ValueError) as error:
            fix = "mend its indices, or leave it out"
            raise _refused(path, value, str(error).splitlines()[0], fix) from None
        keys = tuple(parts)
        children = [self.node(_join(path, key), parts[key]) for key in keys]
        return kind, None, keys, tuple(children), None


_SCALARS = {
    bool: "|b1", int: "<i8", float: "<f8", complex: "<c16", str: "", bytes: ""
}  # fmt: skip
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _increment(data: Any, name: Any, value: Any, store: Any) -> Any:
    try:
        return data.__inc__(name, value, store)
    except Exception:  # noqa: BLE001 -- it is the user's; PyG will raise it in a batch
        return LOOSE


def _inner(rule: Callable[..., Any], name: Any, inner: Any, value: Any) -> Any:
    return rule(name if inner is None else inner, value)


def _check_tensor(path: str, value: torch.Tensor) -> None:
    if value.device.type != "cpu":
        why = f"it is on {value.device}; a cache holds what is in host memory"
        raise _refused(path, value, why, 'torch.load(..., map_location="cpu")')
    if value.is_nested or value.is_quantized:
        why = f"it is {'nested' if value.is_nested else 'quantized'}"
        raise _refused(path, value, why, "store its parts: .values() and .offsets()")


def _is_plain(value: Any) -> bool:
    if type(value) in {list, tuple}:
        return all(_is_plain(each) for each in value)
    if type(value) is dict:
        return all(_is_literal(k) and _is_plain(v) for k, v in value.items())
    return type(value) in _PLAIN


def _is_literal(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_literal(each) for each in key)
    return type(key) in {str, int, bool, float, type(None)} and key == key


def _tagged(value: Any) -> Any:
    """Make plain Python JSON, marking what JSON has no notion of."""
    if isinstance(value, tuple):
        return {"t": [_tagged(each) for each in value]}
    if isinstance(value, list):
        return [_tagged(each) for each in value]
    if isinstance(value, dict):
        return {"d": [[_tagged(k), _tagged(v)] for k, v in value.items()]}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"b": base64.b64encode(value).decode()}
    return value


def _text(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


def escape(key: object) -> str:
    """Make a key part of a column's name: readable, and no two keys alike.

    >>> escape("edge_index"), escape("a.b"), escape(("atom", "bond", "atom"))
    ('edge_index', 'a%2Eb', 'atom__bond__atom')
    """
    return _escape_text(
        "__".join(map(str, key)) if isinstance(key, tuple) else str(key)
    )


@functools.lru_cache(maxsize=4096)
def _escape_text(text: str) -> str:
    # Asked for each field of each sample: 12 % of encoding a molecule without a cache.
    for char in "%/.@~\0":
        text = text.replace(char, f"%{ord(char):02X}")
    return text.encode("utf-8", "backslashreplace").decode()


def _join(path: str, key: object) -> str:
    return f"{path}.{escape(key)}" if path else escape(key)


def _store_path(key: Any) -> str:
    return "" if key is None else escape(key) + "."


def _stored_class(path: str, value: object) -> str:
    """Name the class of a container; refuse one that no other process can find."""
    cls = type(value)
    if "<locals>" in cls.__qualname__:
        why = f"{cls.__qualname__} is written inside a function, where nobody finds it"
        fix = (
            f"move `class {cls.__name__}` to the top of a module (in a notebook: to "
            "the top of a cell)"
        )
        raise _refused(path, value, why, fix)
    return class_name(cls)


def _refused(path: str, value: object, why: str, fix: str = "") -> DatasetError:
    what = f"A cache cannot hold {path or 'the sample'!r}, a {type(value).__name__}."
    return DatasetError(
        what, why=why, fix=fix or "return it as tensors, or leave it out"
    )
