"""Batches of graphs, gathered: equal to ``Batch.from_data_list`` in every attribute.

A recipe is made once for each way samples are built.  Per batch it looks up the rows
once for all fields that share them, gathers each field into one new tensor, adds the
increments on the way, and fills in PyG's bookkeeping (``batch``, ``ptr``,
``_slice_dict``, ``_inc_dict``).  What PyG alone can join (sparse tensors, EdgeIndex)
goes through its own collate, field by field.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.datasets.arena import make_arena
from loaderkit.datasets.gathering import BatchColumn, BatchGather
from loaderkit.datasets.graph_fields import (
    FieldFactory,
    FieldSize,
    GraphField,
    batch_and_ptr,
    bookkeeping_bytes,
    is_composite,
    needs_pyg_collate,
)
from loaderkit.datasets.kinds import store_of
from loaderkit.datasets.structure import Leaf, Nest
from loaderkit.pyg import import_pyg

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from loaderkit.array_types import Ints
    from loaderkit.cache.store import Store
    from loaderkit.datasets.classes import ClassRegistry
    from loaderkit.datasets.structure import Structure
    from loaderkit.memory.page_locked import PageLockedBatch


class GraphRecipe:
    """How to gather batches of graphs that are all built alike.

    Args:
        store: The cache.
        structure: How its samples are built.
        number: The variant that the graphs are.
        classes: Where their classes are.
    """

    def __init__(
        self, store: Store, structure: Structure, number: int, classes: ClassRegistry
    ) -> None:
        self.store, self.classes = store, classes
        graph = structure.variants[number]
        assert isinstance(graph, Nest)
        self.graph = graph
        factory = FieldFactory(store, classes, structure.columns)
        self._stores = [
            _StoreRecipe(store, factory, str(graph.cls), key, fields)
            for key, fields in _stores_of_graph(graph)
        ]

    @property
    def needs_pyg(self) -> bool:
        """Whether some fields go through PyG's own collate."""
        return any(store.fields_joined_by_pyg for store in self._stores)

    def gathers(self, exclude_keys: Collection[str]) -> bool:
        """Tell whether every field is gathered, or can go through PyG on its own."""
        fields = [
            field
            for store in self._stores
            for name, field in store.fields_joined_by_pyg.items()
            if name not in exclude_keys
        ]
        if not fields:
            return True
        # A class's own __inc__ may ask for other fields, which are not there then.
        cls = self.classes[str(self.graph.cls)]
        data = import_pyg().data
        if cls.__inc__ is not data.__inc__ or cls.__cat_dim__ is not data.__cat_dim__:
            return False
        return all(is_composite(field) for field in fields)

    def batch(
        self,
        rows: Ints,
        follow_batch: Collection[str],
        exclude_keys: Collection[str],
        page_locked: PageLockedBatch | None = None,
    ) -> Any:
        """Gather one batch.

        Args:
            rows: Sample numbers ``[B]``, at least one, all of this variant.
            follow_batch: Fields that get a ``_batch`` and a ``_ptr`` of their own.
            exclude_keys: Fields that are left out.
            page_locked: Where its tensors are made; None for ordinary memory.

        Returns:
            The batch; every tensor in it is new.

        Raises:
            UnlikeShapesError: Fields of the samples cannot be joined.
        """
        gather = BatchGather(self.store, rows, page_locked)
        # In a worker all tensors of the batch lie in one segment, which travels whole;
        # how large it must be is computed there alone.
        gather.arena = make_arena(lambda: self._bytes_of_batch(gather, exclude_keys))
        batch = copy.copy(self._blank_batch)
        slice_dict: dict[Any, Any] = {}
        inc_dict: dict[Any, Any] = {}
        for store, recipe in zip(batch.stores, self._stores, strict=True):
            slices, increments = recipe.fill(store, gather, follow_batch, exclude_keys)
            if recipe.key is None:
                slice_dict.update(slices)
                inc_dict.update(increments)
            # PyG has no entry for a type without fields.
            elif slices:
                slice_dict[recipe.key] = slices
                inc_dict[recipe.key] = increments
        batch._num_graphs = len(rows)
        batch._slice_dict = slice_dict
        batch._inc_dict = inc_dict
        return batch

    @functools.cached_property
    def _blank_batch(self) -> Any:
        """An empty batch of the samples' class, as PyG makes it."""
        cls = self.classes[str(self.graph.cls)]
        sample = self.classes.blank(str(self.graph.cls))
        # PyG makes a store as it is first asked for, in that order.
        for key in self.graph.keys:
            store_of(sample, key)
        return import_pyg().batch(_base_cls=cls).stores_as(sample)

    def _bytes_of_batch(
        self, gather: BatchGather, exclude_keys: Collection[str]
    ) -> int:
        """Bytes of all tensors of a batch, each with room to be aligned."""
        return sum(store.nbytes(gather, exclude_keys) for store in self._stores)


class _StoreRecipe:
    """How to gather one store of a batch.

    Args:
        store: The cache.
        factory: Decides how fields are joined.
        cls: Class of the graphs.
        key: The node or edge type; None for the only store.
        fields: What is in it.
    """

    def __init__(
        self, store: Store, factory: FieldFactory, cls: str, key: object, fields: Nest
    ) -> None:
        self.key = key
        self.fields_joined_by_pyg = {
            name: field
            for name, field in fields.items()
            if name != "ptr" and needs_pyg_collate(name, field)
        }
        self._nodes = fields.nodes and fields.nodes.name
        """Column of the number of nodes, where PyG can tell it."""
        self._sizes = {name: FieldSize(store, field) for name, field in fields.items()}
        self._fields: dict[str, GraphField | BatchColumn] = {}
        """In PyG's order; the one that is a column is ``num_nodes``."""
        for name, field in fields.items():
            if name == "num_nodes" and isinstance(field, Leaf):
                self._fields[name] = BatchColumn(store, field.column)
            elif name in self.fields_joined_by_pyg:
                self._fields[name] = factory.field_joined_by_pyg(cls, fields, name)
            elif name != "ptr":
                self._fields[name] = factory.field(field)

    def nbytes(self, gather: BatchGather, exclude_keys: Collection[str]) -> int:
        """Bytes of all tensors of the store, each with room to be aligned."""
        sizes = self._sizes.items()
        nbytes = sum(
            s.in_batch(gather) for name, s in sizes if name not in exclude_keys
        )
        if self._nodes:
            nodes = int(gather.per_sample(self._nodes).sum())
            nbytes += 8 * nodes + bookkeeping_bytes(gather)
        return nbytes

    def fill(
        self,
        store: Any,
        gather: BatchGather,
        follow_batch: Collection[str],
        exclude_keys: Collection[str],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fill a store of a batch.

        Args:
            store: PyG's, fresh.
            gather: The batch in the making.
            follow_batch: Fields that get a ``_batch`` and a ``_ptr`` of their own.
            exclude_keys: Fields that are left out.

        Returns:
            Where each sample begins in each field, and what was added to it.

        Raises:
            UnlikeShapesError: Fields of the samples cannot be joined.
        """
        if self._nodes:
            # A few bytes may stand for many nodes, and ``batch`` has them all.
            nodes = gather.per_sample(self._nodes)
            gather.room.take(16 * int(nodes.sum()))
        # The store is fresh: it has cached nothing that store[name] = would drop.
        mapping = store._mapping
        slices: dict[str, Any] = {}
        increments: dict[str, Any] = {}
        for name, field in self._fields.items():
            if name in exclude_keys:
                continue
            if isinstance(field, BatchColumn):
                store._num_nodes = gather.tensor(field)[0].tolist()
                store.num_nodes = sum(store._num_nodes)
                continue
            mapping[name], slices[name], increments[name] = field.join(gather)
            if name in follow_batch:
                batch, ptr = gather.take_in(batch_and_ptr(slices[name]))
                store[f"{name}_batch"] = batch
                store[f"{name}_ptr"] = ptr
        if self._nodes:
            graph_of_node = np.arange(len(nodes)).repeat(nodes)
            mapping["batch"] = gather.to_tensor(graph_of_node)
            # A copy: fields that add the number of nodes share this array, and the
            # batch's tensors are the user's to change.
            ptr = gather.exclusive_cumsum(self._nodes)
            mapping["ptr"] = gather.to_tensor(ptr.copy())
        return slices, increments


def _stores_of_graph(graph: Nest) -> Iterator[tuple[Any, Nest]]:
    """Go through the stores of a graph."""
    for key, store in graph.items():
        assert isinstance(store, Nest)
        yield key, store
