"""How large samples are that are read: what a cache knows without reading them.

Nodes, edges, bytes and tokens mean the same here as in a cache's ``sizes()``.  Those of
samples in memory are measured here (``SizesInMemory``), and what is needed to measure
samples that a transform made.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from loaderkit.joining import graphs_in
from loaderkit.nests import attribute_names, dense_parts, flatten, is_named_tuple
from loaderkit.pyg import is_pyg_data, loaded_pyg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch_geometric.data.data import BaseData

    from loaderkit.array_types import Ints

_READS_MEMORY = {kind.__getitem__ for kind in (list, tuple, dict, TensorDataset)}
"""How containers read a sample that is there already; a subclass may read otherwise."""
_NUMBER_BYTES = {bool: 1, int: 8, float: 8, complex: 16}
"""Bytes of Python's numbers in a batch."""


def lies_in_memory(dataset: object) -> bool:
    """Tell whether samples lie in memory, and reading one runs no code of the user's.

    Args:
        dataset: Any; not a subset, whose samples are those of another dataset.
    """
    pyg = loaded_pyg()
    if pyg is not None and isinstance(dataset, pyg.in_memory_dataset):
        theirs = pyg.in_memory_dataset
        is_theirs = (type(dataset).get, type(dataset).__getitem__) == (
            theirs.get,
            theirs.__getitem__,
        )
        # A subclass that does not call its parent's constructor has no such attribute.
        return is_theirs and getattr(dataset, "transform", None) is None
    return getattr(type(dataset), "__getitem__", None) in _READS_MEMORY


class SizesInMemory:
    """Sizes of samples that lie in memory, each of which is looked at for each of them.

    Args:
        samples: They can be read again and again, by their numbers.
    """

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    @property
    def nodes(self) -> Ints | None:
        """Nodes of each sample ``[n]``; None where some sample has no graph."""
        return self._sum_over_graphs(count_nodes)

    @property
    def edges(self) -> Ints | None:
        """Edges of each sample ``[n]``; None where some sample has no graph."""
        return self._sum_over_graphs(count_edges)

    @property
    def bytes(self) -> Ints | None:
        """Bytes of each sample ``[n]``; None where some sample's are not known."""
        sizes = np.zeros(len(self._samples), np.int64)
        for row, sample in enumerate(self._read_all()):
            nbytes = _bytes_of_sample(sample)
            if nbytes is None:
                return None
            sizes[row] = nbytes
        return sizes

    @property
    def tokens(self) -> Ints | None:
        """Length of the longest field of each sample ``[n]``, as in a cache.

        None for graphs, and where some sample has no field with a length.
        """
        shortest: dict[str, int] = {}
        longest: dict[str, int] = {}
        for sample in self._read_all():
            if is_pyg_data(sample):
                return None
            for path, length in lengths_in(sample):
                shortest[path] = min(length, shortest.get(path, length))
                longest[path] = max(length, longest.get(path, length))
        ragged = {path for path in longest if shortest[path] < longest[path]}
        counted = ragged or set(longest)

        # Looked at again, so that all that is kept is a number for each sample.
        sizes = np.zeros(len(self._samples), np.int64)
        for row, sample in enumerate(self._read_all()):
            lengths = [length for path, length in lengths_in(sample) if path in counted]
            if not lengths:
                return None
            sizes[row] = max(lengths)
        return sizes

    def _sum_over_graphs(self, count: Callable[[BaseData], int]) -> Ints | None:
        sizes = np.zeros(len(self._samples), np.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyG's, where it must guess num_nodes
            for row, sample in enumerate(self._read_all()):
                graphs = [*graphs_in(sample)]
                if not graphs:
                    return None
                sizes[row] = sum(map(count, graphs))
        return sizes

    def _read_all(self) -> Iterator[Any]:
        for row in range(len(self._samples)):
            yield self._samples[row]


def count_nodes(graph: BaseData) -> int:
    """Count the nodes of a graph, of all types together."""
    return int(graph.num_nodes or 0)


def count_edges(graph: BaseData) -> int:
    """Count the edges of a graph, of all types together."""
    return int(graph.num_edges or 0)


def _bytes_of_sample(sample: object) -> int | None:
    """Sum up the bytes of a sample's values; None where it has others than these."""
    total = 0
    for leaf in flatten(sample):
        if isinstance(leaf, torch.Tensor):
            total += sum(part.nbytes for part in dense_parts(leaf))
        elif isinstance(leaf, np.ndarray | np.generic):
            total += leaf.nbytes
        elif isinstance(leaf, str):
            total += len(leaf.encode(errors="replace"))
        elif isinstance(leaf, bytes):
            total += len(leaf)
        elif type(leaf) in _NUMBER_BYTES:
            total += _NUMBER_BYTES[type(leaf)]
        elif leaf is not None:
            return None
    return total


def fields_in(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Go through the tensors, arrays and plain lists of a sample, with their paths.

    Args:
        value: A sample, or a part of one.
        path: Where it is in the sample.

    >>> dict(fields_in({"ids": [7, 8], "parts": {"name": "a", "words": ["b"]}}))
    {'ids': [7, 8], 'parts.words': ['b']}
    """
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, torch.Tensor | np.ndarray):
        yield path, value
    elif is_pyg_data(value):
        children = ((n, v) for store in value.stores for n, v in store.items())
    elif isinstance(value, Mapping):
        children = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = ((name, getattr(value, name)) for name in attribute_names(value))
    elif is_named_tuple(value):
        children = zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        plain = all(
            isinstance(element, int | float | complex | str) for element in value
        )
        if plain:
            yield path, value
        else:
            children = enumerate(value)
    for name, child in children:
        child_path = f"{path}.{name}" if path else str(name)
        yield from fields_in(child, child_path)


def lengths_in(sample: object) -> Iterator[tuple[str, int]]:
    """Find the length of every field of a sample that has one, by its path."""
    for path, field in fields_in(sample):
        if getattr(field, "ndim", 1):
            # Nested tensors have a size in their first dimension, but no length.
            is_nested = isinstance(field, torch.Tensor) and field.is_nested
            yield path, field.size(0) if is_nested else len(field)
