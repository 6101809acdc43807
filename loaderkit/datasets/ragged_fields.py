"""Which fields of samples are stacked in batches, and which are ragged.

That holds for all batches of a dataset, so it follows from the shapes that a field has
in all samples of it, not from those of a batch:

    one shape                                     stacked
    first axes differ, and nothing else           ragged
    another axis differs too, as of images        stacked where a batch has one shape

A field may be of several dtypes, or have several numbers of axes: then each of these is
a field of its own here, as it is a column of its own in a cache.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from loaderkit.datasets.gathering import batch_dtype
from loaderkit.datasets.kinds import LEAF_KINDS, NEST_KINDS, DictJoin, Kind
from loaderkit.datasets.structure import Leaf, is_graph

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from loaderkit.cache.store import Store
    from loaderkit.datasets.opened import OpenedCache
    from loaderkit.datasets.padding import Path
    from loaderkit.datasets.structure import Node


class Joining(Enum):
    """How the values of a field are joined."""

    STACKED = auto()
    RAGGED = auto()
    STACKED_IF_EQUAL = auto()
    """Stacked, and refused where the samples of a batch differ in shape."""
    KEPT_APART = auto()
    """A list with one value a sample: of lists, see list_forms.py."""


class ValueKind(NamedTuple):
    """What the values of a field are; those of one kind have a column of their own."""

    is_array: bool
    """Of numpy's."""
    dtype: torch.dtype
    ndim: int


class Shapes(NamedTuple):
    """The shapes that a field has in some samples."""

    length: int | None
    """The size of the first axis; None where it differs."""
    row_shape: tuple[int, ...] | None
    """The sizes of all others; None where they differ."""

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Shapes:
        """Tell the shapes of samples that have one; numbers have one row."""
        return cls(shape[0], shape[1:]) if shape else cls(1, ())

    def beside(self, other: Shapes) -> Shapes:
        """Tell the shapes of these samples and others together."""
        length = self.length if self.length == other.length else None
        row_shape = self.row_shape if self.row_shape == other.row_shape else None
        return Shapes(length, row_shape)

    @property
    def joining(self) -> Joining:
        """How such values are joined."""
        if self.row_shape is None:
            return Joining.STACKED_IF_EQUAL
        return Joining.RAGGED if self.length is None else Joining.STACKED


FieldShapes: TypeAlias = "Mapping[Path, Mapping[ValueKind, Shapes]]"
"""The shapes of each kind of values, by the keys that lead to a field."""


class JointShapes(NamedTuple):
    """The shapes of fields in several caches."""

    caches: list[OpenedCache]
    """As they are open in this process."""
    shapes: FieldShapes


def field_shapes(store: Store, variants: Iterable[Node]) -> FieldShapes:
    """Find the shapes of all fields of tensors in a cache, without reading any.

    Args:
        store: The cache.
        variants: The ways in which its samples are built, or a part of them is.
    """
    of_variants = []
    for variant in variants:
        if is_graph(variant):
            continue  # PyG knows how to join its fields
        for path, leaf in _leaves_with_paths(variant, ()):
            spec = leaf.column
            if LEAF_KINDS[spec.kind].in_dicts is not DictJoin.TENSOR or not spec.ndim:
                continue
            shapes = column_shapes(store, spec.name)
            if shapes is not None:
                is_array = spec.kind is Kind.ARRAY
                kind = ValueKind(is_array, batch_dtype(spec), spec.ndim)
                of_variants.append({path: {kind: shapes}})
    return together(of_variants)


def joining_of(
    shapes: FieldShapes, path: Path, values: Sequence[Any]
) -> Joining | None:
    """Say how the values of a field are joined.

    Args:
        shapes: Those of the dataset's fields.
        path: The keys that lead to the field.
        values: Tensors and arrays.

    Returns:
        None where the dataset has no such field.
    """
    by_kind = shapes.get(path)
    if by_kind is None:
        return None
    # Where all kinds of the field are joined alike the values need not be looked at.
    joinings = {of_kind.joining for of_kind in by_kind.values()}
    if len(joinings) > 1:
        kinds = _kinds_of(values) & by_kind.keys()
        joinings = {by_kind[kind].joining for kind in kinds}
    # The most careful of several: what differs in more than its length is not ragged.
    for joining in (Joining.STACKED_IF_EQUAL, Joining.RAGGED, Joining.STACKED):
        if joining in joinings:
            return joining
    return None


def _kinds_of(values: Sequence[Any]) -> set[ValueKind]:
    # Few values are unlike, and a batch has many.
    unlike = {(type(value), value.dtype, value.ndim): value for value in values}
    return {
        ValueKind(isinstance(value, np.ndarray), as_tensor(value).dtype, value.ndim)
        for value in unlike.values()
    }


def as_tensor(value: object) -> torch.Tensor:
    """See a tensor or an array as a tensor, in this machine's order of bytes."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    return torch.as_tensor(value)


def together(parts: Iterable[FieldShapes]) -> FieldShapes:
    """Tell the shapes of fields in all parts of a dataset."""
    joint: dict[Path, dict[ValueKind, Shapes]] = {}
    for field_shapes in parts:
        for path, by_kind in field_shapes.items():
            of_field = joint.setdefault(path, {})
            for kind, shapes in by_kind.items():
                of_field[kind] = of_field.get(kind, shapes).beside(shapes)
    return joint


def _leaves_with_paths(node: Node, path: Path) -> Iterator[tuple[Path, Leaf]]:
    if isinstance(node, Leaf):
        yield path, node
        return
    row = NEST_KINDS[node.kind]
    if not row.is_container:
        return
    keys = range(len(node.children)) if row.is_sequence else node.keys
    for key, child in zip(keys, node.children, strict=True):
        yield from _leaves_with_paths(child, (*path, key))


def column_shapes(store: Store, name: str) -> Shapes | None:
    """Tell the shapes of a column's values in all samples; None where it has none."""
    shapes: Shapes | None = None
    for group in store.manifest.shards.groups:
        column = group.schema.column.get(name)
        if column is None:
            continue
        # Their shapes are in the file, sample by sample; that they differ in several
        # axes is why they are there.
        if column.shapes is not None:
            return Shapes(None, None)
        is_ragged = column.offsets is not None
        for shape, _ in group.by_row_shape(column.values, 0):
            # What lies behind the axis of samples, or behind that of their rows.
            of_group = Shapes(None, shape) if is_ragged else Shapes.of(shape)
            shapes = of_group if shapes is None else shapes.beside(of_group)
    return shapes
