"""How the fields of graphs are joined to a batch: decided once, and done per batch.

Each class joins one kind of field, equal to PyG's own collate.  What follows from the
cache alone (the column, its dtype, whether anything is added to it) is looked up when
the field is made: of 128 molecules that takes longer than to copy their values.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from loaderkit.datasets.decode import decode
from loaderkit.datasets.gathering import BatchColumn, leaf_reader
from loaderkit.datasets.kinds import LEAF_KINDS, NEST_KINDS, ColumnSpec, GraphJoin, Kind
from loaderkit.datasets.structure import INCREMENT_BY_PYG, Leaf, Nest
from loaderkit.pyg import import_pyg

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from loaderkit.array_types import Ints
    from loaderkit.cache.store import Store
    from loaderkit.datasets.classes import ClassRegistry
    from loaderkit.datasets.gathering import BatchGather
    from loaderkit.datasets.structure import Node

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


class GraphField(Protocol):
    """A field of graphs that are all built alike."""

    def join(self, gather: BatchGather) -> JoinedField:
        """Join the values of a batch.

        Raises:
            UnlikeShapesError: The samples' values cannot be joined.
        """


class FieldFactory:
    """Decides how fields are joined.

    Args:
        store: The cache.
        classes: Where the samples' classes are.
        columns: The columns of all variants.
    """

    def __init__(
        self, store: Store, classes: ClassRegistry, columns: Mapping[str, ColumnSpec]
    ) -> None:
        self._store, self._classes = store, classes
        self._increment_widths: dict[str, int] = {}
        """Numbers a sample in the columns of increments; 0 for a single one.  Columns
        that were zero in every sample are not written, and not here."""
        stored_columns = store.manifest.shards.column_names
        for column in columns.values():
            if column.kind is not Kind.INCREMENT:
                continue
            # PyG's __inc__ gives a scalar, or a [2, 1] tensor: of an edge_index
            # between two node types, one number for the sources and one for the
            # targets.  A pair is added even where it is zero in every sample: it
            # makes PyG widen the dtype.
            if column.ndim:
                self._increment_widths[column.name] = 2
            elif column.name in stored_columns:
                self._increment_widths[column.name] = 0

    def field(self, node: Node) -> GraphField:
        """Decide how a field is joined that ``needs_pyg_collate`` does not name."""
        if isinstance(node, Leaf):
            column = node.column
            how = LEAF_KINDS[column.kind].graph_join(column.dtype)
            if how is GraphJoin.CONCATENATE:
                return _TensorField(self._column(node), self._increments(node))
            if how is GraphJoin.TENSOR_OF_NUMBERS:
                return _NumberField(self._column(node), self._increments(node))
        elif node.kind is Kind.DICT:
            return _DictField({key: self.field(child) for key, child in node.items()})
        elif _is_tensor_list(node):
            return _ListField([self.field(child) for child in node.children])
        return _ValuesField(node, self._classes)

    def field_joined_by_pyg(self, cls: str, store: Nest, name: str) -> GraphField:
        """Leave a field to PyG's own collate.

        Args:
            cls: Class of the graphs.
            store: The store that has the field.
            name: The field.
        """
        return _FieldJoinedByPyG(self._store, self._classes, cls, store, name)

    def _column(self, leaf: Leaf) -> BatchColumn:
        return BatchColumn(self._store, leaf.column)

    def _increments(self, leaf: Leaf) -> _Increments | None:
        """Say what PyG adds to a field; None where nothing ever is."""
        if not isinstance(leaf.increment, ColumnSpec):
            return None
        name = leaf.increment.name
        width = self._increment_widths.get(name)
        return None if width is None else _Increments(name, width)


class _Increments(NamedTuple):
    """What PyG adds to the values of each sample, summed up over those before it."""

    name: str
    """Of the column."""
    width: int
    """Numbers a sample; 0 for a single one."""

    def steps(self, gather: BatchGather) -> Ints | None:
        """Sum up what is added to each sample ``[B]`` or ``[B, 2]``; None for zeros."""
        steps = gather.exclusive_cumsum(self.name, self.width)[:-1]
        # The last is nearly always more than zero, and tells without the others.
        return steps if self.width or steps[-1] or steps.any() else None


class _TensorField:
    """Tensors that are joined along an axis, with increments added."""

    def __init__(self, column: BatchColumn, increments: _Increments | None) -> None:
        self._column, self._increments = column, increments
        self._sum_dtype = column.dtype
        """What PyG's addition makes of the dtype."""
        if increments is not None:
            is_pair = increments.width > 0
            self._sum_dtype = _increased_dtype(column.dtype, is_pair=is_pair)

    def join(self, gather: BatchGather) -> JoinedField:
        steps = self._increments and self._increments.steps(gather)
        if steps is None:
            value, ranges = gather.tensor(self._column)
            return JoinedField(value, gather.slices(ranges), gather.zeros())
        increments = _increments_as_pyg(gather, steps)
        dtype = self._sum_dtype
        is_pair = steps.ndim == 2
        if not is_pair and not steps[-1]:
            # Zeros for all but the last sample, whose own increment nobody needs.
            value, ranges = gather.tensor(self._column)
        elif dtype.is_floating_point or dtype.is_complex:
            value, ranges = gather.tensor(self._column)
            lengths = torch.from_numpy(ranges.lengths)
            axis = self._column.axis or 0
            added = _add_to_floats(value, axis, increments, lengths)
            value = value if added is value else gather.take_in(added)
        else:
            value, ranges = gather.tensor(self._column, dtype, steps)
        return JoinedField(value, gather.slices(ranges), increments)


class _NumberField:
    """One number a sample, with increments added."""

    def __init__(self, column: BatchColumn, increments: _Increments | None) -> None:
        self._column, self._increments = column, increments

    def join(self, gather: BatchGather) -> JoinedField:
        value, _ = gather.tensor(self._column)
        dtype = torch.get_default_dtype()
        if value.is_floating_point() and value.dtype is not dtype:
            # PyG makes a tensor of a list of Python's floats.
            value = gather.take_in(value.to(dtype))
        steps = self._increments and self._increments.steps(gather)
        if steps is None:
            return JoinedField(value, gather.arange(), gather.zeros())
        increments = _increments_as_pyg(gather, steps)
        if steps[-1]:
            value.add_(increments)
        return JoinedField(value, gather.arange(), increments)


class _DictField:
    """A dict, joined value by value."""

    def __init__(self, fields: Mapping[Any, GraphField]) -> None:
        self._fields = fields

    def join(self, gather: BatchGather) -> JoinedField:
        joined_fields = {key: field.join(gather) for key, field in self._fields.items()}
        return JoinedField(
            {key: joined.value for key, joined in joined_fields.items()},
            {key: joined.slices for key, joined in joined_fields.items()},
            {key: joined.increments for key, joined in joined_fields.items()},
        )


class _ListField:
    """A list that PyG joins item by item."""

    def __init__(self, fields: list[GraphField]) -> None:
        self._fields = fields

    def join(self, gather: BatchGather) -> JoinedField:
        items = [field.join(gather) for field in self._fields]
        return JoinedField(
            [item.value for item in items],
            [item.slices for item in items],
            [item.increments for item in items],
        )


class _ValuesField:
    """Texts and other values, which PyG keeps as a list."""

    def __init__(self, node: Node, classes: ClassRegistry) -> None:
        self._node, self._classes = node, classes
        self._are_texts = isinstance(node, Leaf) and node.column.row.is_text

    def join(self, gather: BatchGather) -> JoinedField:
        values = gather.values(self._node, self._classes)
        if not self._are_texts:
            gather.note_others()
        return JoinedField(values, gather.arange(), None)


class _FieldJoinedByPyG:
    """What PyG alone can join: it is given graphs that have nothing else."""

    def __init__(
        self, store: Store, classes: ClassRegistry, cls: str, fields: Nest, name: str
    ) -> None:
        self._store, self._classes, self._cls = store, classes, cls
        self._name, self._nodes = name, fields.nodes
        self._node = dict(fields.items())[name]

    def join(self, gather: BatchGather) -> JoinedField:
        samples = []
        for position, row in enumerate(gather.rows.tolist()):
            sample = self._classes.blank(self._cls)
            value = decode(self._node, leaf_reader(self._store, row), self._classes)
            sample[self._name] = value
            if self._nodes:
                nodes = gather.per_sample(self._nodes.name)
                sample.num_nodes = int(nodes[position])
            samples.append(sample)
        batch, name = import_pyg().batch.from_data_list(samples), self._name
        gather.note_others()
        return JoinedField(batch[name], batch._slice_dict[name], batch._inc_dict[name])


class FieldSize:
    """How many bytes the tensors of a field take in a batch.

    What PyG joins is not counted: it makes room itself.

    Args:
        store: The cache.
        node: How the field is built.
    """

    def __init__(self, store: Store, node: Node) -> None:
        leaves = list(_gathered_leaves(node))
        self._leaf_count = len(leaves)
        self._tensors: list[tuple[BatchColumn, int]] = []
        """Columns of tensors, and bytes of one of their numbers in a batch."""
        for leaf in leaves:
            # Other values take little beside the bookkeeping.
            if leaf.column.kind is Kind.TENSOR:
                column = BatchColumn(store, leaf.column)
                is_widened = leaf.increment is not None
                itemsize = 8 if is_widened else column.dtype.itemsize
                self._tensors.append((column, itemsize))

    def in_batch(self, gather: BatchGather) -> int:
        """Count the bytes, each tensor with room to be aligned."""
        bookkeeping = _BOOKKEEPING_TENSORS * bookkeeping_bytes(gather)
        nbytes = self._leaf_count * bookkeeping
        for column, itemsize in self._tensors:
            nbytes += itemsize * gather.count_numbers(column)
        return nbytes


def bookkeeping_bytes(gather: BatchGather) -> int:
    """Bytes of a tensor of one number a sample, with room to be aligned."""
    return 8 * (len(gather) + _ALIGNMENT_NUMBERS)


def needs_pyg_collate(name: str, field: Node) -> bool:
    """Tell whether a field is joined by PyG's own collate."""
    if isinstance(field, Leaf):
        column = field.column
        if name == "num_nodes" and column.kind is not Kind.INT:
            return True
        how = LEAF_KINDS[column.kind].graph_join(column.dtype)
        return how is GraphJoin.BY_PYG or field.increment == INCREMENT_BY_PYG
    if is_composite(field) or name == "num_nodes":
        return True
    if field.kind is Kind.DICT or _is_tensor_list(field):
        return any(needs_pyg_collate("", child) for child in field.children)
    return False


def is_composite(node: Node) -> bool:
    """Tell whether a field is an object that PyG or torch makes of several tensors."""
    return isinstance(node, Nest) and NEST_KINDS[node.kind].is_composite


def batch_and_ptr(slices: object) -> tuple[Any, Any]:
    """Make what ``follow_batch`` adds for a field: ``name_batch`` and ``name_ptr``."""
    if isinstance(slices, torch.Tensor) and slices.dim() == 1:
        lengths = slices[1:] - slices[:-1]
        batch = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return batch, slices - slices[:1]
    if isinstance(slices, dict):
        batches, ptrs = {}, {}
        for key, inner in slices.items():
            batches[key], ptrs[key] = batch_and_ptr(inner)
        return batches, ptrs
    if isinstance(slices, list) and isinstance(slices[0], torch.Tensor):
        pairs = [batch_and_ptr(inner) for inner in slices]
        return [batch for batch, _ in pairs], [ptr for _, ptr in pairs]
    return None, None


@functools.lru_cache(maxsize=128)
def _increased_dtype(dtype: torch.dtype, *, is_pair: bool) -> torch.dtype:
    """Say what PyG's addition of an int64 number, or of a pair, makes of a dtype."""
    increment = torch.zeros((2, 1) if is_pair else (), dtype=torch.int64)
    return torch.result_type(torch.empty((1, 1), dtype=dtype), increment)


def _increments_as_pyg(gather: BatchGather, steps: Ints) -> torch.Tensor:
    """Make PyG's tensor of increments: ``[B]``, or ``[B, 2, 1]`` of pairs."""
    increments = steps if steps.ndim == 1 else steps[:, :, None]
    return gather.bookkeeping(increments.copy())


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


def _gathered_leaves(node: Node) -> Iterator[Leaf]:
    """List the leaves that are gathered; PyG makes room for the others itself."""
    if isinstance(node, Leaf):
        yield node
    elif not is_composite(node):
        for child in node.children:
            yield from _gathered_leaves(child)


def _is_tensor_list(nest: Nest) -> bool:
    """Tell whether PyG joins a list item by item: its first item is a tensor."""
    if not NEST_KINDS[nest.kind].is_sequence or not nest.children:
        return False
    first = nest.children[0]
    if isinstance(first, Leaf):
        return first.column.kind is Kind.TENSOR
    return is_composite(first)
