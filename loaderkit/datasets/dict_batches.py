"""Batches of dicts, tuples and dataclasses: as torch's ``default_collate`` makes them.

Where a field has one shape in the whole dataset it is stacked.  Where its first axis
differs from sample to sample, ``ragged`` says what a batch holds in its place:

    "padded"   Padded(values [B, L, *rest], lengths [B], mask [B, L])
    "packed"   Packed(values [N, *rest], offsets [B + 1])
    "jagged"   a torch.nested tensor in jagged layout

That holds for all batches of a dataset: one of samples that happen to be equally long
is padded (packed, jagged) like the others, as the code behind it expects.  A field of
which another axis differs, as of images, is stacked where a batch has one shape; see
ragged_fields.py.

A field of lists is joined item by item, as ``default_collate`` does, where all lists of
the dataset have one form; else it is a list with one value a sample, see list_forms.py.

Beyond ``default_collate``, a None stays in a list and a dataclass becomes a dataclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch

from loaderkit.datasets.arena import make_arena
from loaderkit.datasets.containers import (
    make_dataclass,
    make_named_tuple,
    refilled,
)
from loaderkit.datasets.gathering import BatchColumn, BatchGather
from loaderkit.datasets.kinds import LEAF_KINDS, NEST_KINDS, Container, DictJoin
from loaderkit.datasets.list_forms import are_kept_apart
from loaderkit.datasets.padding import path_text
from loaderkit.datasets.plain_columns import PlainColumn
from loaderkit.datasets.ragged import (
    END_TO_END,
    Padded,
    error_of_shapes,
    join_ragged,
    mask_of,
)
from loaderkit.datasets.ragged_fields import Joining, as_tensor, column_shapes
from loaderkit.datasets.structure import Leaf, Nest
from loaderkit.error_texts import is_out_of_memory
from loaderkit.errors import DatasetError
from loaderkit.memory.shm_batch import default_collate
from loaderkit.nests import attribute_names
from loaderkit.stand_ins import array_in_place_of
from loaderkit.value_words import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loaderkit.array_types import Ints
    from loaderkit.cache.store import Store
    from loaderkit.datasets.classes import ClassRegistry
    from loaderkit.datasets.list_forms import ListForms
    from loaderkit.datasets.padding import Path
    from loaderkit.datasets.structure import Node
    from loaderkit.memory.page_locked import PageLockedBatch

    JoiningOf: TypeAlias = Callable[[Path, Sequence[Any]], Joining | None]

_ALIGNMENT_NUMBERS = 17
"""Room to align a field's two tensors, 64 bytes each, and one number more of the
lengths."""


class DictRecipe:
    """How to gather batches of samples that are all built alike.

    Args:
        store: The cache.
        variant: How the samples are built.
        classes: Where their classes are.
        ragged: "padded", "packed" or "jagged", for tensors whose first axes differ.
        forms: Of the lists in all parts of the dataset; none: each batch is joined as
            its own lists are.
    """

    def __init__(
        self,
        store: Store,
        variant: Node,
        classes: ClassRegistry,
        ragged: str,
        forms: Sequence[ListForms] = (),
    ) -> None:
        self.store, self.classes, self.ragged = store, classes, ragged
        self._kept_apart = frozenset(
            path for path in frozenset().union(*forms) if are_kept_apart(forms, path)
        )
        """The fields of lists that stay one a sample."""
        self.variant = _stack_equal_shapes(store, variant)
        self._of_many_shapes = _columns_of_many_shapes(store, self.variant)
        """Those whose axes behind the first differ, too."""
        self._columns = {
            leaf.column.name: BatchColumn(store, leaf.column)
            for leaf in self._gathered_leaves()
        }
        """Those that tensors are gathered from, by name."""
        self._plain_columns: dict[str, PlainColumn] | None = None
        """By name; None before the first batch, which groups the shards."""

    def batch(self, rows: Ints, page_locked: PageLockedBatch | None = None) -> Any:
        """Gather one batch.

        Args:
            rows: Sample numbers ``[B]``, at least one, all of this variant.
            page_locked: Where its tensors are made; None for ordinary memory.

        Returns:
            The samples' nest, with a batch of values at each leaf.

        Raises:
            UnlikeShapesError: Fields of the samples cannot be joined.
        """
        gather = BatchGather(self.store, rows, page_locked)
        if self._plain_columns is None:
            self._plain_columns = self._find_plain_columns()
        gather.arena = make_arena(lambda: self._batch_bytes(gather))
        return self._join_node(gather, self.variant, ())

    def _gathered_leaves(self) -> Iterator[Leaf]:
        """List the leaves that tensors are gathered for in one go."""
        for leaf in _tensor_leaves(self.variant, self._kept_apart):
            if leaf.column.name not in self._of_many_shapes:
                yield leaf

    def _join_node(self, gather: BatchGather, node: Node, path: Path) -> Any:
        if path in self._kept_apart:
            gather.note_others()
            return gather.values(node, self.classes)
        if isinstance(node, Leaf):
            return self._join_leaf(gather, node)
        row = NEST_KINDS[node.kind]
        if not row.is_container:
            return self._join_values(gather, node)
        keys = range(len(node.children)) if row.is_sequence else node.keys
        parts = [
            self._join_node(gather, child, (*path, key))
            for key, child in zip(keys, node.children, strict=True)
        ]
        if row.is_sequence:
            pairs = zip(node.children, parts, strict=True)
            parts = [tuple(v) if _stays_in_a_tuple(n) else v for n, v in pairs]
        make = row.make_batch or row.make
        return make(Container(node.keys, parts, node.cls), self.classes)

    def _join_leaf(self, gather: BatchGather, leaf: Leaf) -> Any:
        column = leaf.column
        plain = self._plain_columns and self._plain_columns.get(column.name)
        if plain:
            joined = plain.join(gather)
            if joined is not None:
                return joined
        how = LEAF_KINDS[column.kind].in_dicts
        if how is DictJoin.TEXTS:
            return gather.texts(column)
        if how is DictJoin.BY_TORCH:
            return self._join_values(gather, leaf)
        if column.name in self._of_many_shapes:
            gather.note_others()
            return stack_equal(
                gather.values(leaf, self.classes), column.name, self.ragged
            )
        of_batch = self._columns[column.name]
        if column.axis is None:
            return gather.tensor(of_batch)[0]
        if self.ragged == "padded":
            value, runs = gather.padded(of_batch)
            # A copy: fields whose samples are equally long have the same ``runs``.
            lengths = gather.to_tensor(runs.lengths.copy())
            mask = gather.take_in(mask_of(runs.lengths, value.shape[1]))
            return Padded(value, lengths, mask)
        value, runs = gather.tensor(of_batch)
        # A copy, as above.
        return END_TO_END[self.ragged](value, gather.to_tensor(runs.ends.copy()))

    def _join_values(self, gather: BatchGather, node: Node) -> Any:
        gather.note_others()
        return _collate_plain(gather.values(node, self.classes))

    def _find_plain_columns(self) -> dict[str, PlainColumn]:
        """Find the columns that are joined with the fewest calls."""
        columns = {}
        for leaf in self._gathered_leaves():
            spec = leaf.column
            if spec.axis is None or (spec.axis == 0 and self.ragged == "padded"):
                plain = PlainColumn.of(self.store, spec)
                if plain is not None:
                    columns[spec.name] = plain
        return columns

    def _batch_bytes(self, gather: BatchGather) -> int:
        """Bytes of all tensors of a batch, each with room to be aligned."""
        nbytes = 0
        for leaf in self._gathered_leaves():
            nbytes += gather.total_bytes(self._columns[leaf.column.name])
            nbytes += 8 * (len(gather) + _ALIGNMENT_NUMBERS)
        return nbytes


def _unknown_joining(_: Path, __: Sequence[Any]) -> Joining | None:
    return None


def collate_samples(
    samples: Sequence[Any],
    ragged: str,
    joining_of: JoiningOf = _unknown_joining,
    path: Path = (),
) -> Any:
    """Batch samples that are in memory.

    Args:
        samples: At least one, all built alike.
        ragged: "padded", "packed" or "jagged", for tensors whose first axes differ.
        joining_of: Says of the keys that lead to a field, and its values (tensors and
            arrays, or lists and tuples), how it is joined in the whole dataset; None
            where that is not known, so that it is what these samples show.
        path: The keys that lead to these samples.

    Returns:
        The samples' nest, with a batch of values at each leaf.

    Raises:
        DatasetError: Tensors differ in more than their first axis.
    """

    def collate_field(name: Any, values: Sequence[Any]) -> Any:
        return collate_samples(values, ragged, joining_of, (*path, name))

    _refuse_other_forms(samples, path)
    first = samples[0]
    are_arrays = any(
        isinstance(sample, torch.Tensor | np.ndarray) for sample in samples
    )
    if are_arrays and first is not None:
        return _collate_tensors(samples, ragged, joining_of(path, samples), path)
    batches: dict[Any, Any] = {}
    if isinstance(first, Mapping):
        for key in first:
            batches[key] = collate_field(key, [sample[key] for sample in samples])
        return batches if type(first) is dict else refilled(first, batches)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        for name in attribute_names(first):
            values = [getattr(sample, name) for sample in samples]
            batches[name] = collate_field(name, values)
        return make_dataclass(type(first), batches)
    # Lists of several lengths have no items to join, one with one: torch refuses them,
    # and they are kept as they are below.
    is_list = isinstance(first, list | tuple) and not hasattr(first, "_fields")
    if is_list and joining_of(path, samples) is Joining.KEPT_APART:
        return list(samples)
    if isinstance(first, list | tuple) and all(len(s) == len(first) for s in samples):
        by_number = enumerate(zip(*samples, strict=True))
        items = [collate_field(number, values) for number, values in by_number]
        if hasattr(first, "_fields"):
            return make_named_tuple(type(first), items)
        # A list for a tuple too, as torch's default_collate has it.
        return items
    return _collate_plain(samples)


def _collate_tensors(
    samples: Sequence[Any], ragged: str, joining: Joining | None, path: Path
) -> Any:
    """Stack the tensors of a field, or join them as ragged ones."""
    tensors = [as_tensor(sample) for sample in samples]
    if joining is Joining.STACKED_IF_EQUAL:
        return stack_equal(tensors, ".".join(map(str, path)), ragged)
    are_alike = all(tensor.shape == tensors[0].shape for tensor in tensors)
    # Those that happen to be alike in this batch are joined as in all others: what a
    # model is given must not depend on which samples met.  A number has no axis to join
    # along.
    differs_elsewhere = joining is Joining.RAGGED and tensors[0].dim() > 0
    if are_alike and not differs_elsewhere:
        return default_collate(tensors)
    return join_ragged(tensors, ragged)


def _refuse_other_forms(samples: Sequence[Any], path: Path) -> None:
    """Refuse what is joined in one way among what is joined in another.

    A number among tensors, say, or a list among dicts.  torch decides by the first of
    a batch what it does, so whether it refuses would depend on their order.

    Raises:
        DatasetError: There are two forms, and one of them is more than a plain value.
    """
    if len(set(map(type, samples))) == 1:
        return  # as nearly always
    # Who joins them says what is done about None.
    there = [(n, value) for n, value in enumerate(samples) if value is not None]
    forms = {_form_of(value) for _, value in there}
    if len(forms) < 2 or forms <= {_Form.NUMBER, _Form.OTHER}:
        return
    arrays = [value for _, value in there if _form_of(value) is _Form.ARRAY]
    if forms == {_Form.ARRAY, _Form.NUMBER} and not any(array.ndim for array in arrays):
        return  # a tensor [] is a number

    (first, one), (other, another) = _two_forms(there)
    field = f"{path_text(path)!r} of samples" if path else "Samples"
    message = f"{field} {first} and {other} of a batch cannot be joined: "
    message += f"{kind_of(one)} and {kind_of(another)}."
    why = "a batch holds tensors, numbers, or containers of one kind in a field"
    if _Form.MAPPING in forms:
        why = "a dict is joined key by key"
    fix = "give them one form in load() or transform, or use a batch size of 1"
    if arrays and _Form.NUMBER in forms:
        why = "a number has no axes, along which arrays are joined"
        stand_in = array_in_place_of(next(array for array in arrays if array.ndim))
        fix = "in place of the number, an array of the others' shape and dtype: "
        fix += stand_in
    raise DatasetError(message, why=why, fix=fix)


class _Form(Enum):
    """How values are joined; those of two forms are not joined with each other."""

    ARRAY = auto()
    """A tensor or an array."""
    NUMBER = auto()
    MAPPING = auto()
    SEQUENCE = auto()
    DATACLASS = auto()
    OTHER = auto()
    """Such as a text, which stays in a list."""


def _form_of(value: object) -> _Form:
    if isinstance(value, torch.Tensor | np.ndarray):
        return _Form.ARRAY
    if isinstance(value, int | float | np.number | np.bool_):
        return _Form.NUMBER
    if isinstance(value, Mapping):
        return _Form.MAPPING
    if isinstance(value, list | tuple):
        return _Form.SEQUENCE
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return _Form.DATACLASS if is_dataclass else _Form.OTHER


def _two_forms(
    numbered: Sequence[tuple[int, Any]],
) -> tuple[tuple[int, Any], tuple[int, Any]]:
    """Give the first value, and the first of another form, with their places."""
    first = numbered[0]
    form = _form_of(first[1])
    return first, next(pair for pair in numbered if _form_of(pair[1]) is not form)


def stack_equal(values: Sequence[Any], field: str, ragged: str) -> Any:
    """Stack values of a field whose axes behind the first differ in the dataset.

    Args:
        values: Tensors and arrays, at least one.
        field: What the field is called.
        ragged: As for ``collate_samples``.

    Raises:
        DatasetError: They differ in shape.
    """
    tensors = [as_tensor(value) for value in values]
    if all(0 in tensor.shape[1:] for tensor in tensors):
        # Which axes differ is not known of values without numbers, such as [3, 0] and
        # [5, 0]: a cache keeps the shape of each, as of those that do.
        return join_ragged(tensors, ragged)
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        raise error_of_shapes(field, [tensor.shape for tensor in tensors])
    return default_collate(tensors)


def _columns_of_many_shapes(store: Store, node: Node) -> frozenset[str]:
    """Find the columns whose axes behind the first differ among samples."""
    names = (leaf.column.name for leaf in _tensor_leaves(node) if leaf.column.ndim)
    return frozenset(name for name in names if _has_many_row_shapes(store, name))


def _has_many_row_shapes(store: Store, name: str) -> bool:
    shapes = column_shapes(store, name)
    return shapes is not None and shapes.row_shape is None


def _tensor_leaves(
    node: Node, kept_apart: frozenset[Path] = frozenset(), path: Path = ()
) -> Iterator[Leaf]:
    """List the leaves that are tensors in a batch."""
    if path in kept_apart:
        return
    if isinstance(node, Leaf):
        if LEAF_KINDS[node.column.kind].in_dicts is DictJoin.TENSOR:
            yield node
        return
    row = NEST_KINDS[node.kind]
    if row.is_container:
        keys = range(len(node.children)) if row.is_sequence else node.keys
        for key, child in zip(keys, node.children, strict=True):
            yield from _tensor_leaves(child, kept_apart, (*path, key))


def _stays_in_a_tuple(node: Node) -> bool:
    return isinstance(node, Leaf) and LEAF_KINDS[node.column.kind].stays_in_a_tuple


def _collate_plain(values: Sequence[Any]) -> Any:
    """Collate what is no tensor, or keep it as a list where torch would refuse.

    Raises:
        TypeError: None stands beside what is joined.  Behind it, None is refused: what
            can be joined must not depend on the order of the samples.
    """
    try:
        return default_collate(cast("list[Any]", values))  # any sequence will do
    except (
        *(TypeError, RuntimeError, ValueError, OverflowError, NotImplementedError),
    ) as error:
        has_none = any(value is None for value in values)
        if is_out_of_memory(error) or (has_none and any(map(_is_joined, values))):
            raise
        return values


def _is_joined(value: object) -> bool:
    """Tell whether a value is joined with others of its kind, or part by part."""
    joined = isinstance(value, torch.Tensor | np.ndarray | Mapping | list | tuple)
    return joined or dataclasses.is_dataclass(value)


def _stack_equal_shapes(store: Store, node: Node) -> Node:
    """Have the leaves that have one shape in all shards stacked."""
    if isinstance(node, Nest):
        children = tuple(_stack_equal_shapes(store, child) for child in node.children)
        return node._replace(children=children)
    column = node.column
    shapes = None if column.row.is_text else column_shapes(store, column.name)
    if shapes is None or shapes.joining is not Joining.STACKED:
        return node
    return node._replace(column=column._replace(axis=None))
