"""Several samples at once, each with memory of its own: equal to reading one by one.

What asks for samples rather than a batch (PyG's DataLoader, a transform, your own
``collate_fn``) gets them from here.  Small values of all samples are gathered in one
go and then copied apart, which takes torch a fifth of the time that finding, copying
and converting each would; large ones are copied straight to their place.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from loaderkit.cache.gather import SLICE_BYTES
from loaderkit.datasets.decode import make_nest
from loaderkit.datasets.gathering import BatchColumn, BatchGather, UnlikeShapesError
from loaderkit.datasets.kinds import (
    LEAF_KINDS,
    NEST_KINDS,
    GraphJoin,
    Kind,
    store_of,
)
from loaderkit.datasets.structure import Leaf, Nest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loaderkit.array_types import Ints
    from loaderkit.cache.store import Store
    from loaderkit.datasets.classes import ClassRegistry
    from loaderkit.datasets.kinds import ColumnSpec
    from loaderkit.datasets.structure import Node

_AT_ONCE = 128
"""Samples whose small values are in memory twice while they are copied apart.  Chosen:
as many as a batch has."""


def read_samples(
    store: Store, node: Node, rows: Ints, classes: ClassRegistry
) -> list[Any]:
    """Read samples that are all built alike.

    Args:
        store: The cache.
        node: How they are built.
        rows: Their numbers in the cache ``[B]``, in any order, repeats allowed.
        classes: Where their classes are.

    Returns:
        The samples in the order of ``rows``; no two share memory.

    Raises:
        LoaderkitError: One of them cannot be read.  Which one is not said.
    """
    samples: list[Any] = []
    for start in range(0, len(rows), _AT_ONCE):
        gather = BatchGather(store, rows[start : start + _AT_ONCE])
        samples += _SamplesReader(gather, classes).values(node)
    return samples


class _SamplesReader:
    """Reads the parts of some samples, part by part."""

    def __init__(self, gather: BatchGather, classes: ClassRegistry) -> None:
        self._gather, self._classes = gather, classes

    def values(self, node: Node) -> Sequence[Any]:
        """Read a part of every sample ``[B]``."""
        if isinstance(node, Leaf):
            return self._leaf_values(node)
        if node.kind is Kind.GRAPH:
            return self._read_graphs(node)
        if NEST_KINDS[node.kind].is_composite:
            return self._gather.values(node, self._classes)
        child_values = [self.values(child) for child in node.children]
        return [
            make_nest(
                node, [values[position] for values in child_values], self._classes
            )
            for position in range(len(self._gather))
        ]

    def _leaf_values(self, leaf: Leaf) -> Sequence[Any]:
        column = leaf.column
        how = LEAF_KINDS[column.kind].in_graphs
        if how is GraphJoin.TENSOR_OF_NUMBERS:
            numbers, _ = self._gather.tensor(self._batch_column(column))
            values: list[Any] = numbers.tolist()
            return values
        if how is GraphJoin.CONCATENATE:
            # More than one axis may differ: then they are read one by one.
            with contextlib.suppress(UnlikeShapesError):
                return self._read_tensors(column)
        return self._gather.values(leaf, self._classes)

    def _read_tensors(self, column: ColumnSpec) -> Sequence[torch.Tensor]:
        of_batch = self._batch_column(column)
        if self._gather.mean_bytes(of_batch) >= SLICE_BYTES:
            return self._gather.separate_tensors(of_batch)
        joined, runs = self._gather.tensor(of_batch)
        # torch's own annotations say that these two return nothing.
        unbind_copy: Any = torch.unbind_copy
        split_copy: Any = torch.split_with_sizes_copy
        tensors: Sequence[torch.Tensor]
        if column.axis is None:
            tensors = unbind_copy(joined)
        else:
            tensors = split_copy(joined, runs.lengths.tolist(), column.axis)
        return tensors

    def _batch_column(self, column: ColumnSpec) -> BatchColumn:
        return BatchColumn(self._gather.store, column)

    def _read_graphs(self, node: Nest) -> list[Any]:
        graphs = self._classes.blanks(str(node.cls), len(self._gather))
        for key, store in node.items():
            assert isinstance(store, Nest)
            names, parts = [], []
            for name, field in store.items():
                # PyG keeps no field that is None.
                is_none = isinstance(field, Nest) and field.kind is Kind.NONE
                if not is_none:
                    names.append(name)
                    parts.append(self.values(field))
            for graph, values in zip(graphs, zip(*parts, strict=True), strict=False):
                # New stores: nothing is cached that store[name] = value would drop.
                mapping = store_of(graph, key)._mapping
                mapping.update(zip(names, values, strict=True))
        return graphs
