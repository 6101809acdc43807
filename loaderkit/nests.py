"""Samples and batches as nests: what is inside, and the same nest of other values.

A nest is a container of containers, at the bottom of which are leaves.  Containers are

    dicts and other mappings, lists, tuples, named tuples, dataclasses
    graphs of PyG and batches of them, whose stores hold their fields
    ``PackedSequence``, which holds its data and its two permutations

and everything else is a leaf: tensors, arrays, numbers, texts, None, objects of
classes that are not known here.  Every room that copies, moves, cuts or counts a batch
walks it by these functions, so that all of them agree on what is in it.  torch's own
trees do not enter mappings other than ``dict`` (the batches of Hugging Face are such),
nor dataclasses, nor graphs.

A container is rebuilt as its own class, by the least that its class must allow: where
that is possible it is copied and filled again, since a constructor may take other
arguments than the parts, or compute something from them a second time.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

from loaderkit.pyg import is_pyg_data

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch_geometric.data.data import BaseData

T = TypeVar("T")
IsLeaf = Callable[[Any], bool]
"""Tells of a container whether it is to be taken as a leaf."""


def flatten(nest: object, is_leaf: IsLeaf | None = None) -> list[Any]:
    """List the leaves of a nest, in the order of its containers.

    Args:
        nest: Any value; one that is no container is its own leaf.
        is_leaf: Tells which containers not to enter; all are entered if None.

    Returns:
        The leaves; these are the objects in the nest, not copies.

    >>> flatten({"x": [1, 2], "name": "a"})
    [1, 2, 'a']
    >>> flatten({"x": [1, 2], "name": "a"}, is_leaf=lambda part: isinstance(part, list))
    [[1, 2], 'a']
    """
    return list(_leaves_below(nest, is_leaf))


def flatten_tensors(nest: object) -> list[torch.Tensor]:
    """List the tensors of a nest, in the order of its containers.

    Args:
        nest: As for :func:`flatten`.

    Returns:
        The tensors; one that is in the nest twice is listed twice.
    """
    return [
        leaf for leaf in _leaves_below(nest, None) if isinstance(leaf, torch.Tensor)
    ]


def map_leaves(
    change: Callable[[Any], Any], nest: T, is_leaf: IsLeaf | None = None
) -> T:
    """Make a nest again with every leaf changed.

    Args:
        change: Gives what takes a leaf's place.
        nest: It is not changed.
        is_leaf: As for :func:`flatten`.

    Returns:
        A new nest of the same classes.

    >>> map_leaves(lambda leaf: leaf * 2, {"x": (1, 2), "name": "a"})
    {'x': (2, 4), 'name': 'aa'}
    """
    kind = _kind_of(nest, is_leaf)
    if kind is None:
        changed: T = change(nest)
        return changed
    children = [map_leaves(change, child, is_leaf) for child in kind.children(nest)]
    refilled: T = kind.refill(nest, children)
    return refilled


def map_tensors(change: Callable[[torch.Tensor], Any], nest: T) -> T:
    """Make a nest again with every tensor changed.

    Args:
        change: Gives what takes a tensor's place.
        nest: It is not changed.

    Returns:
        A new nest of the same classes; leaves that are no tensors are the same objects.
    """

    def change_tensor(leaf: object) -> Any:
        return change(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(change_tensor, nest)


def rebuild(like: T, leaves: Iterable[Any], is_leaf: IsLeaf | None = None) -> T:
    """Make a nest of other leaves: what :func:`flatten` takes apart, put together.

    Args:
        like: The nest whose containers are made again; it is not changed.
        leaves: As many as it has, in the order of :func:`flatten`.
        is_leaf: As it was given to :func:`flatten`.

    Returns:
        A new nest of the same classes.

    Raises:
        ValueError: There are more or fewer leaves than the nest has.

    >>> rebuild({"x": [1, 2], "name": "a"}, [3, 4, "b"])
    {'x': [3, 4], 'name': 'b'}
    """
    leaves = list(leaves)
    count = sum(1 for _ in _leaves_below(like, is_leaf))
    if len(leaves) != count:
        msg = f"a nest with {count} leaves cannot be rebuilt of {len(leaves)}"
        raise ValueError(msg)
    next_leaf = iter(leaves)
    return map_leaves(lambda _: next(next_leaf), like, is_leaf)


def _leaves_below(nest: object, is_leaf: IsLeaf | None) -> Iterator[Any]:
    kind = _kind_of(nest, is_leaf)
    if kind is None:
        yield nest
    else:
        for child in kind.children(nest):
            yield from _leaves_below(child, is_leaf)


class _Kind(NamedTuple):
    """A kind of container."""

    matches: Callable[[Any], bool]
    """Tells whether a value is one."""
    children: Callable[[Any], list[Any]]
    """Lists what is in it."""
    refill: Callable[[Any, list[Any]], Any]
    """Makes a new one like it, with other values in the order of ``children``."""


def _kind_of(value: object, is_leaf: IsLeaf | None) -> _Kind | None:
    """Find what kind of container a value is; None for a leaf."""
    # Most values are tensors, and asking eight questions of each would take longer.
    if isinstance(value, torch.Tensor):
        return None
    if is_leaf is not None and is_leaf(value):
        return None
    for kind in _KINDS:
        if kind.matches(value):
            return kind
    return None


def _graph_children(graph: BaseData) -> list[Any]:
    return [value for store in graph.stores for value in store.values()]


def _refill_graph(graph: BaseData, children: list[Any]) -> BaseData:
    # Not PyG's ``apply``: it hands every leaf to the function, keeps the old value if
    # that raises anything at all, and makes lists of tuples.
    copied = copy.copy(graph)
    next_child = iter(children)
    for store in copied.stores:
        for name in list(store.keys()):
            store[name] = next(next_child)
    return copied


def _packed_children(packed: PackedSequence) -> list[Any]:
    # ``batch_sizes`` is no child: torch wants it on the CPU, wherever the data is.
    return [packed.data, packed.sorted_indices, packed.unsorted_indices]


def _refill_packed(packed: PackedSequence, children: list[Any]) -> PackedSequence:
    data, sorted_indices, unsorted_indices = children
    return type(packed)(data, packed.batch_sizes, sorted_indices, unsorted_indices)


def _refill_mapping(mapping: Mapping[Any, Any], children: list[Any]) -> Any:
    items = dict(zip(mapping, children, strict=True))
    if type(mapping) is dict:
        return items
    mapping_type: Any = type(mapping)
    if not isinstance(mapping, MutableMapping):
        return mapping_type(items)
    # One by one: ``ModelOutput`` of transformers refuses ``update``.
    copied = copy.copy(mapping)
    for key, child in items.items():
        copied[key] = child
    return copied


def is_named_tuple(value: object) -> TypeGuard[NamedTuple]:
    """Tell whether a value is a namedtuple, of whatever class."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _refill_named_tuple(value: NamedTuple, children: list[Any]) -> Any:
    # ``_make`` takes the values whatever the class's own ``__new__`` takes.
    return type(value)._make(children)


def _refill_list(values: list[Any], children: list[Any]) -> list[Any]:
    if type(values) is list:
        return children
    copied = copy.copy(values)
    copied[:] = children
    return copied


def _refill_tuple(values: tuple[Any, ...], children: list[Any]) -> tuple[Any, ...]:
    return type(values)(children)


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _dataclass_children(value: DataclassInstance) -> list[Any]:
    return [getattr(value, field.name) for field in dataclasses.fields(value)]


def _refill_dataclass(value: DataclassInstance, children: list[Any]) -> Any:
    # Not ``dataclasses.replace``: it runs ``__post_init__`` again, which may scale or
    # shift what it has already scaled, and it cannot give an ``InitVar``.
    copied = copy.copy(value)
    for field, child in zip(dataclasses.fields(value), children, strict=True):
        # As the __init__ of a frozen dataclass does; nobody else has the copy yet.
        object.__setattr__(copied, field.name, child)
    return copied


def attribute_names(value: DataclassInstance) -> tuple[str, ...]:
    """List a dataclass's fields, then what else was set on it."""
    names = [field.name for field in dataclasses.fields(value)]
    names += [name for name in getattr(value, "__dict__", ()) if name not in names]
    return tuple(names)


_KINDS = (
    _Kind(is_pyg_data, _graph_children, _refill_graph),
    # Before named tuples, of which it is one.
    _Kind(
        lambda value: isinstance(value, PackedSequence),
        _packed_children,
        _refill_packed,
    ),
    # Before dataclasses: a ``ModelOutput`` is both, and its items follow no attribute
    # that is set past its own ``__setattr__``.
    _Kind(
        lambda value: isinstance(value, Mapping),
        lambda mapping: list(mapping.values()),
        _refill_mapping,
    ),
    _Kind(is_named_tuple, list, _refill_named_tuple),
    _Kind(lambda value: isinstance(value, list), list, _refill_list),
    _Kind(lambda value: isinstance(value, tuple), list, _refill_tuple),
    _Kind(_is_dataclass, _dataclass_children, _refill_dataclass),
)
"""In the order in which they are asked; a new container is a row."""


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the numbers of a tensor on the CPU as bytes, in their order.

    Args:
        tensor: Of any strides; those that are not contiguous are copied.

    Returns:
        ``[nbytes]`` uint8, which shares memory with a contiguous tensor.

    >>> tensor_bytes(torch.tensor(1, dtype=torch.int32).expand(1))
    tensor([1, 0, 0, 0], dtype=torch.uint8)
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.numel() <= 1:
        # Of up to one number any stride is contiguous; torch views as bytes only 1.
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8)


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """List the tensors with memory of their own that a tensor is made of.

    Args:
        tensor: Of any layout, nested or of a subclass that wraps others, such as PyG's
            ``EdgeIndex``.

    Returns:
        The tensor itself if it is dense, or does not tell its parts.  Of a sparse one
        its values first, then what places them; of a subclass what its
        ``__tensor_flatten__`` names, which is torch's protocol for that, and what else
        it has among its attributes.

    >>> [list(part.shape) for part in dense_parts(torch.eye(3).to_sparse())]
    [[3], [2, 3]]
    """
    flatten_subclass = getattr(tensor, "__tensor_flatten__", None)
    if flatten_subclass is not None:
        return _parts_of_wrapper(tensor, flatten_subclass)
    if tensor.layout is torch.sparse_coo:
        # The public values() and indices() refuse a tensor that is not coalesced.
        return [tensor._values(), tensor._indices()]  # noqa: SLF001
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    if tensor.is_nested:
        return [tensor.values()]
    return [tensor]


def _parts_of_wrapper(
    tensor: torch.Tensor, flatten_subclass: Callable[[], tuple[list[str], Any]]
) -> list[torch.Tensor]:
    names, _ = flatten_subclass()
    wrapped = [getattr(tensor, name) for name in names]
    if not all(isinstance(component, torch.Tensor) for component in wrapped):
        return [tensor]
    # EdgeIndex of PyG does not name its ``_T_index``, the indices of its transpose.
    held = flatten_tensors([wrapped, vars(tensor)])
    unique = {id(component): component for component in held}
    return [dense for component in unique.values() for dense in dense_parts(component)]
