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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from loaderkit.datasets.arena import make_arena
from loaderkit.datasets.decode import decode
from loaderkit.datasets.gathering import BatchGather, batch_dtype, leaf_reader
from loaderkit.datasets.kinds import (
    LEAF_KINDS,
    NEST_KINDS,
    ColumnSpec,
    GraphJoin,
    Kind,
    store_of,
)
from loaderkit.datasets.structure import INCREMENT_BY_PYG, Leaf, Nest
from loaderkit.pyg import import_pyg

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray

    from loaderkit.cache.store import Store
    from loaderkit.datasets.classes import ClassRegistry
    from loaderkit.datasets.structure import Node, Structure

    Ints = NDArray[np.int64]

_BOOKKEEPING_TENSORS = 4
"""Of a field, at most: slices, increments, and ``_batch`` and ``_ptr`` of
``follow_batch``."""
_ALIGNMENT_NUMBERS = 9
"""64 bytes to align a tensor of int64, and the one number that slices have more than
samples."""


class JoinedField(NamedTuple):
    """A field of all samples of a batch.

    Of dicts and lists each member is a dict or list of those of their parts.
    """

    value: Any
    slices: Any
    """Where each sample begins in it ``[B + 1]``."""
    increments: Any
    """What was added to each sample ``[B]``; None where nothing can be."""


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
        self.increment_widths: dict[str, int] = {}
        """Numbers a sample in the columns of increments; 0 for a single one.  Columns
        that were zero in every sample are not written, and not here."""
        stored_columns = store.manifest.shards.column_names
        for column in structure.columns.values():
            if column.kind is not Kind.INCREMENT:
                continue
            # PyG's __inc__ gives a scalar, or a [2, 1] tensor: of an edge_index
            # between two node types, one number for the sources and one for the
            # targets.  A pair is added even where it is zero in every sample: it
            # makes PyG widen the dtype.
            if column.ndim:
                self.increment_widths[column.name] = 2
            elif column.name in stored_columns:
                self.increment_widths[column.name] = 0
        self.fields_joined_by_pyg = {
            (key, name): field
            for key, store_fields in _stores_of_graph(graph)
            for name, field in store_fields.items()
            if name != "ptr" and _needs_pyg_collate(name, field)
        }

    def gathers(self, exclude_keys: Collection[str]) -> bool:
        """Tell whether every field is gathered, or can go through PyG on its own."""
        fields = [
            field
            for (_, name), field in self.fields_joined_by_pyg.items()
            if name not in exclude_keys
        ]
        if not fields:
            return True
        # A class's own __inc__ may ask for other fields, which are not there then.
        cls = self.classes[str(self.graph.cls)]
        data = import_pyg().data
        if cls.__inc__ is not data.__inc__ or cls.__cat_dim__ is not data.__cat_dim__:
            return False
        return all(_is_composite(field) for field in fields)

    def batch(
        self, rows: Ints, follow_batch: Collection[str], exclude_keys: Collection[str]
    ) -> Any:
        """Gather one batch.

        Args:
            rows: Sample numbers ``[B]``, at least one, all of this variant.
            follow_batch: Fields that get a ``_batch`` and a ``_ptr`` of their own.
            exclude_keys: Fields that are left out.

        Returns:
            The batch; every tensor in it is new.

        Raises:
            UnlikeShapesError: Fields of the samples cannot be joined.
        """
        gather = BatchGather(self.store, rows)
        gather.arena = make_arena(lambda: self._bytes_of_batch(gather, exclude_keys))
        batch = copy.copy(self._blank_batch)
        slice_dict: dict[Any, Any] = {}
        inc_dict: dict[Any, Any] = {}
        stores = zip(batch.stores, _stores_of_graph(self.graph), strict=True)
        for store, (key, fields) in stores:
            filler = _StoreFiller(self, gather, key)
            filler.fill(store, fields, follow_batch, exclude_keys)
            if key is None:
                slice_dict.update(filler.slices)
                inc_dict.update(filler.increments)
            elif filler.slices:
                slice_dict[key] = filler.slices
                inc_dict[key] = filler.increments
        batch._num_graphs = len(rows)
        batch._slice_dict = slice_dict
        batch._inc_dict = inc_dict
        return batch

    @functools.cached_property
    def _blank_batch(self) -> Any:
        """An empty batch of the samples' class, as PyG makes it."""
        cls = self.classes[str(self.graph.cls)]
        sample = self.classes.blank(str(self.graph.cls))
        for key in self.graph.keys:
            store_of(sample, key)
        return import_pyg().batch(_base_cls=cls).stores_as(sample)

    def _bytes_of_batch(
        self, gather: BatchGather, exclude_keys: Collection[str]
    ) -> int:
        """Bytes of all tensors of a batch, each with room to be aligned."""
        bookkeeping_bytes = 8 * (len(gather) + _ALIGNMENT_NUMBERS)
        nbytes = 0
        for _, fields in _stores_of_graph(self.graph):
            for name, field in fields.items():
                if name in exclude_keys:
                    continue
                for leaf in _gathered_leaves(field):
                    nbytes += _BOOKKEEPING_TENSORS * bookkeeping_bytes
                    nbytes += _value_bytes(gather, leaf)
            if fields.nodes:
                nodes = int(gather.per_sample(fields.nodes.name).sum())
                nbytes += 8 * nodes + bookkeeping_bytes
        return nbytes


class _StoreFiller:
    """Fills one store of a batch."""

    def __init__(self, recipe: GraphRecipe, gather: BatchGather, key: Any) -> None:
        self.recipe, self.gather, self.key = recipe, gather, key
        self.slices: dict[str, Any] = {}
        self.increments: dict[str, Any] = {}

    def fill(
        self,
        store: Any,
        fields: Nest,
        follow_batch: Collection[str],
        exclude_keys: Collection[str],
    ) -> None:
        if fields.nodes:
            # A few bytes may stand for many nodes, and ``batch`` has them all.
            nodes = self.gather.per_sample(fields.nodes.name)
            self.gather.room.take(16 * int(nodes.sum()))
        # The store is fresh: it has cached nothing that store[name] = would drop.
        mapping = store._mapping
        for name, field in fields.items():
            if name in exclude_keys or name == "ptr":
                continue
            if name == "num_nodes" and isinstance(field, Leaf):
                store._num_nodes = self.gather.tensor(field.column)[0].tolist()
                store.num_nodes = sum(store._num_nodes)
                continue
            if (self.key, name) in self.recipe.fields_joined_by_pyg:
                joined = self._join_with_pyg(name, fields)
            else:
                joined = self._join_field(field)
            mapping[name] = joined.value
            self.slices[name] = joined.slices
            self.increments[name] = joined.increments
            if name in follow_batch:
                batch, ptr = _batch_and_ptr(joined.slices)
                store[f"{name}_batch"] = batch
                store[f"{name}_ptr"] = ptr
        if fields.nodes:
            graph_of_node = np.arange(len(nodes)).repeat(nodes)
            mapping["batch"] = self.gather.to_tensor(graph_of_node)
            ptr = self.gather.exclusive_cumsum(fields.nodes.name)
            mapping["ptr"] = self.gather.to_tensor(ptr.copy())

    def _join_field(self, field: Node) -> JoinedField:
        if isinstance(field, Leaf):
            column = field.column
            how = LEAF_KINDS[column.kind].graph_join(column.dtype)
            if how is GraphJoin.CONCATENATE:
                return self._join_tensors(field)
            if how is GraphJoin.TENSOR_OF_NUMBERS:
                return self._join_numbers(field)
        elif field.kind is Kind.DICT:
            parts = {key: self._join_field(child) for key, child in field.items()}
            return JoinedField(
                {key: part.value for key, part in parts.items()},
                {key: part.slices for key, part in parts.items()},
                {key: part.increments for key, part in parts.items()},
            )
        elif _is_tensor_list(field):
            items = [self._join_field(child) for child in field.children]
            return JoinedField(
                [item.value for item in items],
                [item.slices for item in items],
                [item.increments for item in items],
            )
        values = self.gather.values(field, self.recipe.classes)
        return JoinedField(values, self.gather.arange(), None)

    def _join_tensors(self, leaf: Leaf) -> JoinedField:
        column, gather = leaf.column, self.gather
        steps = self._increments_of(leaf)
        if steps is None:
            value, runs = gather.tensor(column)
            return JoinedField(value, gather.slices(runs), gather.zeros())
        increments = _increments_as_pyg(gather, steps)
        is_pair = steps.ndim == 2
        if not is_pair and not steps[-1]:
            # Zeros for all but the last sample, whose own increment nobody needs.
            value, runs = gather.tensor(column)
            return JoinedField(value, gather.slices(runs), increments)
        dtype = _increased_dtype(batch_dtype(column), is_pair=is_pair)
        if dtype.is_floating_point or dtype.is_complex:
            value, runs = gather.tensor(column)
            lengths = torch.from_numpy(runs.lengths)
            value = _add_to_floats(value, column.axis or 0, increments, lengths)
        else:
            value, runs = gather.tensor(column, dtype, steps)
        return JoinedField(value, gather.slices(runs), increments)

    def _join_numbers(self, leaf: Leaf) -> JoinedField:
        gather = self.gather
        value, _ = gather.tensor(leaf.column)
        if value.is_floating_point():
            # PyG makes a tensor of a list of Python's floats.
            value = value.to(torch.get_default_dtype())
        steps = self._increments_of(leaf)
        if steps is None:
            return JoinedField(value, gather.arange(), gather.zeros())
        increments = _increments_as_pyg(gather, steps)
        if steps[-1]:
            value.add_(increments)
        return JoinedField(value, gather.arange(), increments)

    def _increments_of(self, leaf: Leaf) -> Ints | None:
        """Sum up what PyG adds to each sample ``[B]`` or ``[B, 2]``; None for zeros."""
        if not isinstance(leaf.increment, ColumnSpec):
            return None
        name = leaf.increment.name
        width = self.recipe.increment_widths.get(name)
        if width is None:
            return None
        steps = self.gather.exclusive_cumsum(name, width)[:-1]
        return steps if width or steps.any() else None

    def _join_with_pyg(self, name: str, fields: Nest) -> JoinedField:
        """Let PyG join one field of otherwise empty graphs."""
        recipe, classes = self.recipe, self.recipe.classes
        field = dict(fields.items())[name]
        samples = []
        for position, row in enumerate(self.gather.rows.tolist()):
            sample = classes.blank(str(recipe.graph.cls))
            sample[name] = decode(field, leaf_reader(recipe.store, row), classes)
            if fields.nodes:
                nodes = self.gather.per_sample(fields.nodes.name)
                sample.num_nodes = int(nodes[position])
            samples.append(sample)
        batch = import_pyg().batch.from_data_list(samples)
        return JoinedField(batch[name], batch._slice_dict[name], batch._inc_dict[name])


def _stores_of_graph(graph: Nest) -> Iterator[tuple[Any, Nest]]:
    """Go through the stores of a graph."""
    for key, store in graph.items():
        assert isinstance(store, Nest)
        yield key, store


def _value_bytes(gather: BatchGather, leaf: Leaf) -> int:
    """Say how many bytes a field's tensor takes in a batch; numbers are not counted."""
    column = leaf.column
    if column.kind is not Kind.TENSOR:
        return 0
    is_widened = leaf.increment is not None and column.dtype != "int64"
    if is_widened:
        return 8 * gather.count_numbers(column)
    return gather.total_bytes(column)


@functools.lru_cache(maxsize=128)
def _increased_dtype(dtype: torch.dtype, *, is_pair: bool) -> torch.dtype:
    """Say what PyG's addition of an int64 number, or of a pair, makes of a dtype."""
    increment = torch.zeros((2, 1) if is_pair else (), dtype=torch.int64)
    return torch.result_type(torch.empty((1, 1), dtype=dtype), increment)


def _increments_as_pyg(gather: BatchGather, steps: Ints) -> torch.Tensor:
    """Make PyG's tensor of increments: ``[B]``, or ``[B, 2, 1]`` of pairs."""
    increments = steps if steps.ndim == 1 else steps[:, :, None]
    return gather.to_tensor(increments.copy())


def _add_to_floats(
    value: torch.Tensor, axis: int, increments: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Add increments to floats, which PyG does in the wider of the two dtypes."""
    repeated = torch.repeat_interleave(increments, lengths, dim=0)
    if increments.dim() > 1:
        return value + repeated.squeeze(-1).t()
    shape = [1] * value.dim()
    shape[axis] = -1
    return value.add_(repeated.view(shape).to(value.dtype))


def _batch_and_ptr(slices: Any) -> tuple[Any, Any]:
    """Make what ``follow_batch`` adds for a field: ``name_batch`` and ``name_ptr``."""
    if isinstance(slices, torch.Tensor) and slices.dim() == 1:
        lengths = slices[1:] - slices[:-1]
        batch = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return batch, slices - slices[:1]
    if isinstance(slices, dict):
        pairs = {key: _batch_and_ptr(part) for key, part in slices.items()}
        batches = {key: batch for key, (batch, _) in pairs.items()}
        ptrs = {key: ptr for key, (_, ptr) in pairs.items()}
        return batches, ptrs
    if isinstance(slices, list) and isinstance(slices[0], torch.Tensor):
        items = [_batch_and_ptr(part) for part in slices]
        return [batch for batch, _ in items], [ptr for _, ptr in items]
    return None, None


def _gathered_leaves(node: Node) -> Iterator[Leaf]:
    """List the leaves that are gathered; PyG makes room for the others itself."""
    if isinstance(node, Leaf):
        yield node
    elif not _is_composite(node):
        for child in node.children:
            yield from _gathered_leaves(child)


def _needs_pyg_collate(name: str, field: Node) -> bool:
    """Tell whether a field is joined by PyG's own collate."""
    if isinstance(field, Leaf):
        column = field.column
        if name == "num_nodes" and column.kind is not Kind.INT:
            return True
        how = LEAF_KINDS[column.kind].graph_join(column.dtype)
        return how is GraphJoin.BY_PYG or field.increment == INCREMENT_BY_PYG
    if _is_composite(field) or name == "num_nodes":
        return True
    if field.kind is Kind.DICT or _is_tensor_list(field):
        return any(_needs_pyg_collate("", child) for child in field.children)
    return False


def _is_composite(node: Node) -> bool:
    return isinstance(node, Nest) and NEST_KINDS[node.kind].is_composite


def _is_tensor_list(nest: Nest) -> bool:
    """Tell whether PyG joins a list item by item: its first item is a tensor."""
    if not NEST_KINDS[nest.kind].is_sequence or not nest.children:
        return False
    first = nest.children[0]
    if isinstance(first, Leaf):
        return first.column.kind is Kind.TENSOR
    return _is_composite(first)
