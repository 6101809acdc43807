"""Batches of dicts, tuples and dataclasses: as torch's ``default_collate`` makes them.

Where a field has one shape in the whole dataset it is stacked.  Where its first axis
differs from sample to sample, ``ragged`` says what a batch holds in its place:

    "padded"   Padded(values [B, L, *rest], lengths [B], mask [B, L])
    "packed"   Packed(values [N, *rest], offsets [B + 1])
    "jagged"   a torch.nested tensor in jagged layout

Beyond ``default_collate``, a None stays in a list and a dataclass becomes a dataclass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from loaderkit.datasets.composites import KINDS
from loaderkit.datasets.containers import (
    attribute_names,
    make_named_tuple,
    refilled,
)
from loaderkit.datasets.gathering import Arena, Gathering, in_worker, leaf_dtype
from loaderkit.datasets.ragged import Padded, jag, join, mask_of, pack_rows, pad
from loaderkit.datasets.structure import Leaf, Nest
from loaderkit.memory.shm_batch import default_collate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loaderkit.cache.store import Store
    from loaderkit.datasets.classes import ClassRegistry

    Ints = NDArray[np.int64]

END_TO_END = {"packed": pack_rows, "jagged": jag}
"""Makes a batch of values that lie end to end, and of their lengths."""
RAGGED = ("padded", *END_TO_END)


class DictRecipe:
    """How to gather batches of samples that are all built alike."""

    def __init__(
        self, store: Store, variant: Leaf | Nest, classes: ClassRegistry, ragged: str
    ) -> None:
        self.store, self.classes, self.ragged = store, classes, ragged
        self.variant = _stacked(store, variant)

    def batch(self, rows: Ints) -> Any:
        """Gather one batch.

        Args:
            rows: Sample numbers ``[B]``, at least one, all of this variant.

        Returns:
            The samples' nest, with a batch of values at each leaf.

        Raises:
            UnlikeShapesError: Fields of the samples cannot be joined.
        """
        gathering = Gathering(self.store, rows)
        if in_worker():
            gathering.arena = Arena(self._nbytes(gathering, self.variant))
        return self._join(gathering, self.variant)

    def _join(self, gathering: Gathering, node: Leaf | Nest) -> Any:
        if isinstance(node, Leaf):
            return self._leaf(gathering, node)
        if node.kind not in {"dict", "list", "tuple", "named", "dataclass"}:
            return _collate_plain(gathering.values(node, self.classes))
        inside = [self._join(gathering, child) for child in node.children]
        if node.kind in {"list", "tuple", "named"}:
            # torch leaves text in the tuple that zip(*samples) made of it
            pairs = zip(node.children, inside, strict=True)
            inside = [tuple(v) if _is_text(child) else v for child, v in pairs]
        return _nest(node, inside, self.classes)

    def _leaf(self, gathering: Gathering, leaf: Leaf) -> Any:
        if leaf.kind == "str":
            return gathering.texts(leaf)
        if leaf.kind in {"bytes", "json", "bigint", "complex"}:
            return _collate_plain(gathering.values(leaf, self.classes))
        if leaf.axis is None:
            return gathering.tensor(leaf)[0]
        if self.ragged == "padded":
            value, runs = gathering.padded(leaf)
            # A copy: fields whose samples are equally long have the same ``runs``.
            lengths = gathering.keep(runs.lengths.copy())
            return Padded(value, lengths, mask_of(runs.lengths, value.shape[1]))
        value, runs = gathering.tensor(leaf)
        return END_TO_END[self.ragged](value, gathering.keep(runs.lengths))

    def _nbytes(self, gathering: Gathering, node: Leaf | Nest) -> int:
        if isinstance(node, Nest):
            if node.kind in KINDS:
                return 0
            return sum(self._nbytes(gathering, child) for child in node.children)
        if node.kind in {"str", "bytes", "json", "bigint", "complex"}:
            return 0
        column = self.store.column(node.column, stacked=node.axis is None)
        runs, rest = gathering.layout(column)
        return math.prod(rest) * runs.total * leaf_dtype(node).itemsize + 8 * (
            len(gathering) + 17
        )


def collate_samples(samples: Sequence[Any], ragged: str) -> Any:
    """Batch samples that are in memory.

    Args:
        samples: At least one, all built alike.
        ragged: "padded", "packed" or "jagged", for tensors whose first axes differ.

    Returns:
        The samples' nest, with a batch of values at each leaf.

    Raises:
        DatasetError: Tensors differ in more than their first axis.
    """
    first = samples[0]
    if isinstance(first, torch.Tensor | np.ndarray):
        tensors = [torch.as_tensor(each) for each in samples]
        if all(each.shape == tensors[0].shape for each in tensors):
            return default_collate(tensors)
        if ragged == "padded":
            return pad(tensors)
        return END_TO_END[ragged](*join(tensors))
    if isinstance(first, Mapping):
        made = {k: collate_samples([s[k] for s in samples], ragged) for k in first}
        return made if type(first) is dict else refilled(first, made)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        made = {
            name: collate_samples([getattr(s, name) for s in samples], ragged)
            for name in attribute_names(first)
        }
        return _dataclass(type(first), made)
    if isinstance(first, list | tuple) and all(len(s) == len(first) for s in samples):
        inside = [collate_samples(each, ragged) for each in zip(*samples, strict=True)]
        if hasattr(first, "_fields"):
            return make_named_tuple(type(first), inside)
        return inside
    return _collate_plain(samples)


def _is_text(node: Leaf | Nest) -> bool:
    return isinstance(node, Leaf) and node.kind in {"str", "bytes"}


def _collate_plain(values: Sequence[Any]) -> Any:
    """Collate what is no tensor, or keep it as a list where torch would refuse."""
    try:
        return default_collate(cast("list[Any]", values))  # any sequence will do
    except (TypeError, RuntimeError, ValueError, OverflowError, NotImplementedError):
        return values


def _stacked(store: Store, node: Leaf | Nest) -> Leaf | Nest:
    """Mark the leaves that have one shape in all shards, so that they are stacked."""
    if isinstance(node, Nest):
        inside = tuple(_stacked(store, child) for child in node.children)
        return dataclasses.replace(node, children=inside)
    shapes: set[tuple[int, ...] | None] = set()
    for group in store.manifest.shards.groups:
        column = group.schema.column.get(node.column)
        if column is not None:
            dense = column.offsets is None
            by_shape = group.by_row_shape(column.values, 0) if dense else [(None, None)]
            shapes |= {shape for shape, _ in by_shape}
    one_shape = len(shapes) == 1 and None not in shapes
    texts = node.kind in {"str", "bytes", "json", "bigint"}
    return dataclasses.replace(node, axis=None) if one_shape and not texts else node


def _nest(node: Nest, inside: list[Any], classes: ClassRegistry) -> Any:
    """Make a batch's container: a tuple becomes a list, as with ``default_collate``."""
    if node.kind in {"list", "tuple"}:
        return inside
    if node.kind == "named":
        return make_named_tuple(classes[str(node.cls)], inside)
    made = dict(zip(node.keys, inside, strict=True))
    if node.kind == "dataclass":
        return _dataclass(classes[str(node.cls)], made)
    if node.cls is None:
        return made
    return classes.mapping(node.cls, made)


def _dataclass(cls: Any, fields: Mapping[str, Any]) -> Any:
    made = cls.__new__(cls)
    for key, value in fields.items():
        object.__setattr__(made, key, value)
    return made
