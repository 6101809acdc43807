"""Take a sample apart: a tree that says how it is built, and one array per leaf.

Refuses what a cache cannot hold by naming it; nothing is ever pickled.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.cache.layout import DTYPES
from loaderkit.datasets.classes import class_name, mapping_name, private_names
from loaderkit.datasets.composites import put_together, take_apart
from loaderkit.datasets.containers import (
    FACTORIES,
    attribute_names,
    can_be_made_again,
)
from loaderkit.datasets.dtypes import as_array, dtype_name
from loaderkit.datasets.plain import encode_text, to_bytes, to_json
from loaderkit.datasets.structure import LOOSE, tree_keys
from loaderkit.errors import DatasetError
from loaderkit.pyg import import_pyg, is_pyg_data

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Tree = tuple[Any, ...]
    Values = dict[tuple[Any, ...], NDArray[Any]]

_PLAIN_TYPES = (str, int, float, bool, complex, bytes, type(None))
_NONE = ("none", None, (), (), None)
_MOST_DEPTH = 100
"""Containers in containers; chosen.  Reading takes about three of Python's 1,000 frames
for each."""
_MOST_AXES = 31
"""HDF5 has 32, and one of them may be the samples'."""
_MOST_KEY_BITS = 1024
"""Chosen.  Python writes integers of up to 4,300 digits."""


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
    if is_pyg_data(sample):
        return encoder.graph(sample), encoder.values
    return encoder.node("", sample), encoder.values


class _Encoder:
    def __init__(self) -> None:
        self.values: Values = {}
        self._depth = 0

    def graph(self, data: Any) -> Tree:
        if isinstance(data, import_pyg().batch) or not hasattr(data, "stores"):
            what = f"The sample is a {type(data).__name__}, which is not one graph."
            fix = "pack batch.to_data_list(), or Data and HeteroData objects"
            raise DatasetError(what, why="a cache holds samples", fix=fix)
        all_stores = data.stores
        _check_private("", data, vars(data))
        keys = tuple(store._key for store in all_stores)
        fields = [tuple(store.keys()) for store in all_stores]
        # The fields of the graph itself and the names of its stores share one level.
        level: list[Any] = []
        for key, names in zip(keys, fields, strict=True):
            level += names if key is None else [key]
        columns = iter(distinct_names(level))
        stores = []
        for store, key, names in zip(all_stores, keys, fields, strict=True):
            if key is None:
                prefix, inside = "", [next(columns) for _ in names]
            else:
                prefix, inside = next(columns) + ".", distinct_names(names)
            stores.append(self._store(data, store, prefix, inside))
        return "graph", _stored_class("", data), keys, tuple(stores), None

    def _store(self, data: Any, store: Any, prefix: str, names: list[str]) -> Tree:
        _check_private(prefix, data, vars(store))
        keys, children = [], []
        for name, (key, value) in zip(names, store.items(), strict=True):
            keys.append(key)
            rule = functools.partial(self._rule, data, store, key)
            children.append(self.node(prefix + name, value, rule))
        nodes = None
        node_storage = import_pyg().node_storage
        if isinstance(store, node_storage) and store.can_infer_num_nodes:
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
            return self._leaf(path, "json", "", _plain(path, value))
        if self._depth >= _MOST_DEPTH:
            why = f"it is {_MOST_DEPTH} containers deep, or contains itself"
            raise _refused(path[:40], value, why, "flatten it: a list of its values")
        self._depth += 1
        tree = self._nest(path, value, rule)
        self._depth -= 1
        return tree

    def _nest(self, path: str, value: Any, rule: Callable[..., Any] | None) -> Tree:
        if isinstance(value, Mapping):
            keys = tuple(value)
            if not all(_is_key(key) for key in keys):
                why = "its keys are no strings or finite numbers"
                raise _refused(path, value, why, "make its keys texts: str(key)")
            kind, inside = "dict", [(v, k) for k, v in value.items()]
            cls = None if type(value) is dict else _mapping_class(path, value)
        elif isinstance(value, list | tuple):
            named = _is_named_tuple(value)
            keys = getattr(value, "_fields", ()) if named else tuple(range(len(value)))
            kind = "named" if named else type(value).__name__
            if not named and type(value) not in {list, tuple}:
                raise _subclass(path, value, list if isinstance(value, list) else tuple)
            inside = [(item, None) for item in value]
            cls = _stored_class(path, value) if named else None
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            keys = attribute_names(value)
            kind, cls = "dataclass", _stored_class(path, value)
            inside = [(getattr(value, key), key) for key in keys]
        else:
            return self._composite(path, value)
        children = []
        for name, (child, key) in zip(distinct_names(keys), inside, strict=True):
            inner = rule and functools.partial(_inner, rule, key)
            children.append(self.node(_join(path, name), child, inner))
        if kind == "dict":
            keys = tree_keys(keys)
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
        if type(value) is not np.ndarray:
            _check_array_class(path, value)
        if value.ndim > _MOST_AXES:
            raise _too_many_axes(path, value, value.ndim)
        plain = value.dtype.kind in "biufc" and value.dtype.itemsize <= 16
        if not plain or value.dtype.newbyteorder("<").str not in DTYPES:
            raise _refused(path, value, f"its dtype is {value.dtype}")
        stored = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        axis = 0 if value.ndim else None
        raw = (path, kind, value.dtype.str, value.ndim, axis)
        self.values[raw] = stored.reshape(value.shape)
        return "leaf", raw, None

    def _scalar(self, path: str, value: Any, rule: Callable[..., Any] | None) -> Tree:
        if type(value) not in _SCALARS:
            raise _subclass(
                path, value, next(k for k in _SCALARS if isinstance(value, k))
            )
        kind = type(value).__name__
        if kind == "str":
            return self._leaf(
                path, kind, "", np.frombuffer(encode_text(value), np.uint8)
            )
        if kind == "bytes":
            return self._leaf(path, kind, "", np.frombuffer(value, np.uint8))
        if kind == "int" and not -(1 << 63) <= value < 1 << 63:
            return self._leaf(path, "bigint", "", _plain(path, value))
        inc = None if rule is None or kind == "complex" else rule(None, value)[1]
        raw = (path, kind, _SCALARS[type(value)], 0, None)
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
            fix = "store its .value" if isinstance(value, enum.Enum) else ""
            raise _refused(path, value, why, fix)
        kind = parts.pop("kind")
        try:
            put_together(kind, parts, checked=True)
        except (RuntimeError, ValueError) as error:
            fix = "mend its indices, or leave it out"
            raise _refused(path, value, str(error).splitlines()[0], fix) from None
        keys = tuple(parts)
        children = [self.node(_join(path, escape(key)), parts[key]) for key in keys]
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
    if value.dim() > _MOST_AXES:
        raise _too_many_axes(path, value, value.dim())


def _too_many_axes(path: str, value: Any, axes: int) -> DatasetError:
    why = f"it has {axes} axes, and a cache holds {_MOST_AXES}"
    return _refused(path, value, why, "store it flat, and its shape as a tuple")


def _check_array_class(path: str, value: Any) -> None:
    """Refuse what is more than an array, and numbers of a class of their own."""
    if isinstance(value, np.memmap):  # only where its memory lies is lost
        return
    if isinstance(value, np.ma.MaskedArray):
        why = "a cache holds arrays, and its mask would be lost"
        fix = "store x.filled(0) and np.ma.getmaskarray(x)"
        raise _refused(path, value, why, fix)
    if isinstance(value, np.ndarray):
        raise _subclass(path, value, np.ndarray, "np.asarray")
    plain = value.dtype.kind in "biufc" and np.dtype(value.dtype.str).type
    if plain and type(value) is not plain:
        raise _subclass(path, value, plain, f"np.{plain.__name__}")


def _subclass(path: str, value: object, base: type, call: str = "") -> DatasetError:
    kind = type(value).__qualname__
    why = f"a {base.__name__} would come back, and not a {kind}"
    fix = f"store {call or base.__name__}(x)"
    if isinstance(value, enum.Enum):
        fix = "store x.value"
    return _refused(path, value, why, fix)


def _check_private(path: str, data: Any, attributes: dict[str, Any]) -> None:
    """Refuse what PyG keeps beside the fields of a graph, where names begin with _."""
    lost = private_names(type(data), attributes)
    if lost:
        why = "PyG keeps names that begin with _ out of a graph's fields"
        fix = (
            f"store it as {lost[0].strip('_')!r}, or leave it out: "
            "type(data).from_dict(data.to_dict())"
        )
        raise _refused(f"{path}{lost[0]}", attributes[lost[0]], why, fix)


def _is_named_tuple(value: Any) -> bool:
    fields = getattr(type(value), "_fields", None)
    return (
        isinstance(value, tuple)
        and type(fields) is tuple
        and len(fields) == len(value)
        and not getattr(value, "__dict__", None)
    )


def _mapping_class(path: str, value: Any) -> str:
    """Name the class of a mapping; refuse one that is more than its pairs."""
    factory = getattr(value, "default_factory", None)
    known = (
        factory is None or FACTORIES.get(getattr(factory, "__name__", "")) is factory
    )
    if not known or not can_be_made_again(value):
        why = (
            "its class and its pairs are not all there is to it: attributes, a factory"
        )
        raise _refused(
            path, value, why, "store dict(x), and what else it has by itself"
        )
    return mapping_name(_stored_class(path, value), value)


def _is_plain(value: Any, depth: int = 0) -> bool:
    if type(value) in _PLAIN_TYPES:
        return True
    if depth >= _MOST_DEPTH:
        return False
    if type(value) in {list, tuple}:
        return all(_is_plain(each, depth + 1) for each in value)
    if type(value) is dict:
        return all(_is_literal(k) and _is_plain(v, depth + 1) for k, v in value.items())
    return False


def _is_literal(key: Any, depth: int = 0) -> bool:
    if type(key) is tuple:
        return depth < _MOST_DEPTH and all(_is_literal(k, depth + 1) for k in key)
    return type(key) in {str, int, bool, float, type(None)} and key == key


def _is_key(key: Any) -> bool:
    """Tell whether a key can be written in the manifest, as Python writes it."""
    if type(key) is str:
        return True
    if type(key) is int:
        return key.bit_length() <= _MOST_KEY_BITS
    if type(key) is float:
        return math.isfinite(key)
    if type(key) is tuple:
        return _is_literal(key) and all(_is_key(each) for each in key)
    return type(key) in {bool, type(None)}


def _plain(path: str, value: Any) -> NDArray[np.uint8]:
    """Write a list or tuple of plain values, or an integer of more than 64 bits."""
    try:
        written = encode_text(to_json(value)) if type(value) is int else to_bytes(value)
    except ValueError as error:  # an integer of more digits than Python writes
        raise _refused(path, value, str(error), "store a text: hex(x)") from None
    return np.frombuffer(written, np.uint8)


def distinct_names(keys: Sequence[object]) -> list[str]:
    """Name the columns of what lies side by side: no two alike.

    >>> distinct_names(["x", "a.b", 1, "1", ""])
    ['x', 'a%2Eb', '1', '1~2', '%']
    """
    names = [escape(key) for key in keys]
    if len(set(names)) == len(names):
        return names
    # An escaped text has no ~, so that a number makes it unlike all others.
    times: dict[str, int] = {}
    for at, name in enumerate(names):
        times[name] = times.get(name, 0) + 1
        if times[name] > 1:
            names[at] = f"{name}~{times[name]}"
    return names


def escape(key: object) -> str:
    """Make a key part of a column's name: readable, and no two texts alike.

    >>> escape("edge_index"), escape("a.b"), escape(("atom", "bond", "atom"))
    ('edge_index', 'a%2Eb', 'atom__bond__atom')
    """
    return _escape_text(
        "__".join(map(str, key)) if isinstance(key, tuple) else str(key)
    )


@functools.lru_cache(maxsize=4096)
def _escape_text(text: str) -> str:
    # Asked for each field of each sample: 12 % of encoding a molecule without a cache.
    if not text:
        return "%"
    for char in "%/.@~\0":
        text = text.replace(char, f"%{ord(char):02X}")
    if text.isascii():
        return text
    return "".join(
        f"%u{ord(char):04X}" if "\ud800" <= char <= "\udfff" else char for char in text
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


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
