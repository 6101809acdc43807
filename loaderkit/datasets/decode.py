"""Put a sample together again from the arrays of its leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.datasets.composites import KINDS, put_together
from loaderkit.datasets.containers import make_named_tuple
from loaderkit.datasets.dtypes import as_tensor
from loaderkit.datasets.plain import (
    CONTRADICTIONS,
    damaged,
    decode_text,
    from_bytes,
    from_json,
)
from loaderkit.datasets.structure import Leaf
from loaderkit.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from loaderkit.datasets.classes import ClassRegistry
    from loaderkit.datasets.structure import Nest

    Read = Callable[[Leaf], NDArray[Any]]

_NUMBERS = {"int": int, "float": float, "bool": bool, "complex": complex}


def decode(node: Leaf | Nest, read: Read, classes: ClassRegistry) -> Any:
    """Put one sample together.

    Args:
        node: How it is built.
        read: Gives a leaf's value as a new, writable array.
        classes: Where its classes are.

    Returns:
        A sample equal to the one that was packed; its memory is its own.

    Raises:
        DatasetError: A class it is made of is not known.
        DamagedCacheError: Its bytes are no such sample.
    """
    if isinstance(node, Leaf):
        return decode_leaf(node, read(node), joined=False)
    if node.kind == "none":
        return None
    inside = (decode(child, read, classes) for child in node.children)
    if node.kind == "graph":
        return _graph(node, read, classes)
    if node.kind in KINDS:
        parts = dict(zip(node.keys, inside, strict=True))
        try:
            return put_together(node.kind, parts, checked=True)
        except ImportError as error:
            what = f"The sample holds a {node.kind}, which cannot be made here."
            fix = "install what it names, or pack the samples without it"
            raise DatasetError(what, why=str(error), fix=fix) from None
        except CONTRADICTIONS as error:
            raise damaged(f"its parts make no {node.kind}: {error}") from None
    return make_nest(node, list(inside), classes)


def decode_leaf(leaf: Leaf, array: NDArray[Any], *, joined: bool) -> Any:
    """Turn a leaf's array into the value it was made from.

    Args:
        leaf: What kind of value it is.
        array: Its own array, writable.
        joined: The axis of a tensor was put in its place already.

    Returns:
        The value; a tensor or array uses the array's memory.
    """
    if leaf.kind == "tensor":
        tensor = as_tensor(array, leaf.dtype)
        # A clone keeps no more than its own bytes, laid out as torch would.
        return (
            tensor.movedim(0, leaf.axis).contiguous()
            if leaf.axis and not joined
            else tensor
        )
    if leaf.kind in {"array", "scalar"}:
        array = array.astype(np.dtype(leaf.dtype), copy=False)
        return array if leaf.kind == "array" else array[()]
    if leaf.kind in _NUMBERS:
        return _NUMBERS[leaf.kind](array[()])
    return decode_bytes(leaf, array.tobytes())


def decode_bytes(leaf: Leaf, raw: bytes) -> Any:
    """Turn the bytes of a leaf that is kept as such into its value.

    Args:
        leaf: A text, bytes, a large integer, or a list of plain Python values.
        raw: What its column holds of one sample.

    Returns:
        The value.

    Raises:
        DamagedCacheError: The bytes are nothing that ``pack`` writes.
    """
    if leaf.kind == "bytes":
        return raw
    if leaf.kind == "json":
        return from_bytes(leaf.column, raw)
    text = decode_text(leaf.column, raw)
    return text if leaf.kind == "str" else from_json(leaf.column, text)


def make_nest(node: Nest, inside: list[Any], classes: ClassRegistry) -> Any:
    """Fill a container with its children.

    Args:
        node: What container it is.
        inside: The children's values.
        classes: Where its class is.

    Returns:
        The container.
    """
    if node.kind == "list":
        return inside
    if node.kind == "tuple":
        return tuple(inside)
    if node.kind == "named":
        return make_named_tuple(classes[str(node.cls)], inside)
    pairs = dict(zip(node.keys, inside, strict=True))
    if node.kind == "dataclass":
        cls = classes[str(node.cls)]
        made = cls.__new__(cls)
        for key, value in pairs.items():
            object.__setattr__(made, key, value)
        return made
    if node.cls is None:
        return pairs
    return classes.mapping(node.cls, pairs)


def _graph(node: Nest, read: Read, classes: ClassRegistry) -> Any:
    data = classes.blank(str(node.cls))
    for key, child in node.items():
        store = store_of(data, key)
        for name, leaf in child.items():
            store[name] = decode(leaf, read, classes)
    return data


def store_of(data: Any, key: Any) -> Any:
    """Give one of a graph's stores, new where the graph has none of that key.

    Not ``data[key]``: a field of the whole graph may be called as a node type is, and
    would be given instead.

    Args:
        data: A graph.
        key: A node type, an edge type, or None for what belongs to all of it.
    """
    if isinstance(key, tuple):
        return data.get_edge_store(*key)
    if key is not None:
        return data.get_node_store(key)
    return data._store if hasattr(data, "_store") else data._global_store
