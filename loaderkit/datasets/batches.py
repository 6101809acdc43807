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
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.datasets.composites import KINDS
from loaderkit.datasets.decode import decode, store_of
from loaderkit.datasets.gathering import (
    Arena,
    Gathering,
    in_worker,
    leaf_dtype,
    reader,
)
from loaderkit.datasets.structure import LOOSE, Leaf, Nest
from loaderkit.pyg import import_pyg

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from loaderkit.cache.store import Store
    from loaderkit.datasets.classes import ClassRegistry
    from loaderkit.datasets.structure import Structure

    Ints = NDArray[np.int64]
    Collated = tuple[Any, Any, Any]
    """A field's joined value, its slices and its increments."""


class Recipe:
    """How to gather batches of samples that are all built alike."""

    def __init__(
        self, store: Store, structure: Structure, number: int, classes: ClassRegistry
    ) -> None:
        self.store, self.classes = store, classes
        variant: Any = structure.variants[number]
        self.variant: Nest = variant
        kept = store.manifest.shards.column_names
        self.widths = {
            name: 2 * raw[3]
            for name, raw in structure.columns.items()
            if raw[1] == "inc" and (raw[3] or name in kept)
        }
        """Numbers a sample in the columns of increments that are not all zero."""
        self.loose = {
            (key, name): node
            for key, part in variant.items()
            for name, node in part.items()
            if name != "ptr" and _is_loose(name, node)
        }

    def gathers(self, exclude_keys: Collection[str]) -> bool:
        """Tell whether every field is gathered, or can go through PyG on its own."""
        loose = [n for (_, name), n in self.loose.items() if name not in exclude_keys]
        cls = self.classes[str(self.variant.cls)]
        data = import_pyg().data
        plain = cls.__inc__ is data.__inc__ and cls.__cat_dim__ is data.__cat_dim__
        return not loose or (plain and all(_is_composite(node) for node in loose))

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
        gathering = Gathering(self.store, rows)
        if in_worker():
            gathering.arena = Arena(self._nbytes(gathering, exclude_keys))
        out = copy.copy(self._blank)
        slice_dict: dict[Any, Any] = {}
        inc_dict: dict[Any, Any] = {}
        for store, (key, part) in zip(out.stores, self.variant.items(), strict=True):
            filler = _Filler(self, gathering, key)
            filler.fill(store, part, follow_batch, exclude_keys)
            if key is None:
                slice_dict.update(filler.slices)
                inc_dict.update(filler.incs)
            elif filler.slices:
                slice_dict[key], inc_dict[key] = filler.slices, filler.incs
        out._num_graphs = len(rows)
        out._slice_dict = slice_dict
        out._inc_dict = inc_dict
        return out

    @functools.cached_property
    def _blank(self) -> Any:
        """An empty batch of the samples' class, as PyG makes it."""
        cls = self.classes[str(self.variant.cls)]
        sample = self.classes.blank(str(self.variant.cls))
        for key in self.variant.keys:
            store_of(sample, key)
        return import_pyg().batch(_base_cls=cls).stores_as(sample)

    def _nbytes(self, gathering: Gathering, exclude_keys: Collection[str]) -> int:
        """Bytes of all tensors of a batch, each with room to be aligned."""
        total, bookkeeping = 0, 8 * (len(gathering) + 9)
        parts: Any = self.variant.children
        for part in parts:
            kept = [node for name, node in part.items() if name not in exclude_keys]
            for leaf in (leaf for node in kept for leaf in _leaves(node)):
                total += 4 * bookkeeping
                if leaf.kind == "tensor":
                    column = self.store.column(leaf.column, stacked=leaf.axis is None)
                    runs, rest = gathering.layout(column)
                    numel = math.prod(rest) * runs.total
                    widened = leaf.inc is not None and leaf.dtype != "int64"
                    total += numel * (8 if widened else leaf_dtype(leaf).itemsize)
            if part.nodes:
                total += 8 * int(gathering.numbers(part.nodes).sum()) + bookkeeping
        return total


class _Filler:
    """Fills one store of a batch."""

    def __init__(self, recipe: Recipe, gathering: Gathering, key: Any) -> None:
        self.recipe, self.gathering, self.key = recipe, gathering, key
        self.slices: dict[str, Any] = {}
        self.incs: dict[str, Any] = {}

    def fill(
        self,
        store: Any,
        part: Nest,
        follow_batch: Collection[str],
        exclude_keys: Collection[str],
    ) -> None:
        if part.nodes:
            # A few bytes may stand for many nodes, and ``batch`` has them all.
            nodes = self.gathering.numbers(part.nodes)
            self.gathering.room.take(16 * int(nodes.sum()))
        mapping = store._mapping  # fresh: nothing cached that store[name] = would drop
        for name, node in part.items():
            if name in exclude_keys or name == "ptr":
                continue
            if name == "num_nodes":
                store._num_nodes = self.gathering.tensor(node)[0].tolist()
                store.num_nodes = sum(store._num_nodes)
                continue
            loose = (self.key, name) in self.recipe.loose
            value, slices, incs = self._alone(name, part) if loose else self._join(node)
            mapping[name] = value
            self.slices[name], self.incs[name] = slices, incs
            if name in follow_batch:
                batch, ptr = _batch_and_ptr(slices)
                store[f"{name}_batch"], store[f"{name}_ptr"] = batch, ptr
        if part.nodes:
            numbers = np.arange(len(nodes)).repeat(nodes)
            mapping["batch"] = self.gathering.keep(numbers)
            mapping["ptr"] = self.gathering.keep(self.gathering.sums(part.nodes).copy())

    def _join(self, node: Leaf | Nest) -> Collated:
        if isinstance(node, Leaf):
            if node.kind == "tensor":
                return self._tensor(node)
            if node.kind in {"int", "float", "bool"}:
                return self._number(node)
        elif node.kind == "dict":
            parts = {key: self._join(child) for key, child in node.items()}
            return tuple({k: p[at] for k, p in parts.items()} for at in range(3))  # type: ignore[return-value]
        elif _is_tensor_list(node):
            joined = [self._join(child) for child in node.children]
            return tuple([part[at] for part in joined] for at in range(3))  # type: ignore[return-value]
        values = self.gathering.values(node, self.recipe.classes)
        return values, self.gathering.count_up(), None

    def _tensor(self, leaf: Leaf) -> Collated:
        steps = self._steps(leaf)
        incs = (
            self.gathering.zeros() if steps is None else _as_incs(self.gathering, steps)
        )
        paired = steps is not None and steps.ndim == 2
        if steps is None or not (paired or steps[-1]):
            value, runs = self.gathering.tensor(leaf)
            return value, self.gathering.slices(runs), incs
        wider = _widened(leaf_dtype(leaf), paired=paired)
        if wider.is_floating_point or wider.is_complex:
            value, runs = self.gathering.tensor(leaf)
            value = _add_later(value, leaf, incs, torch.from_numpy(runs.lengths))
        else:
            value, runs = self.gathering.tensor(leaf, wider, steps)
        return value, self.gathering.slices(runs), incs

    def _number(self, leaf: Leaf) -> Collated:
        value, _ = self.gathering.tensor(leaf)
        if leaf.kind == "float":
            value = value.to(torch.get_default_dtype())
        steps = self._steps(leaf)
        incs = (
            self.gathering.zeros() if steps is None else _as_incs(self.gathering, steps)
        )
        if steps is not None and steps[-1]:
            value.add_(incs)
        return value, self.gathering.count_up(), incs

    def _steps(self, leaf: Leaf) -> Ints | None:
        """Sum up what PyG adds to each sample ``[B]`` or ``[B, 2]``; None for zeros."""
        width = None if leaf.inc is None else self.recipe.widths.get(leaf.inc)
        if leaf.inc is None or width is None:
            return None
        steps = self.gathering.sums(leaf.inc, width)[:-1]
        return steps if width or steps.any() else None

    def _alone(self, name: str, part: Nest) -> Collated:
        """Let PyG join one field of otherwise empty graphs."""
        classes, node = self.recipe.classes, dict(part.items())[name]
        samples = []
        for at, row in enumerate(self.gathering.rows.tolist()):
            sample = classes.blank(str(self.recipe.variant.cls))
            sample[name] = decode(node, reader(self.recipe.store, row), classes)
            if part.nodes:
                sample.num_nodes = int(self.gathering.numbers(part.nodes)[at])
            samples.append(sample)
        batch = import_pyg().batch.from_data_list(samples)
        return batch[name], batch._slice_dict[name], batch._inc_dict[name]


@functools.lru_cache(maxsize=128)
def _widened(dtype: torch.dtype, *, paired: bool) -> torch.dtype:
    """Say what PyG's addition of an int64 number, or of a pair, makes of a dtype."""
    number = torch.zeros((2, 1) if paired else (), dtype=torch.int64)
    return torch.result_type(torch.empty((1, 1), dtype=dtype), number)


def _as_incs(gathering: Gathering, steps: Ints) -> torch.Tensor:
    return gathering.keep((steps if steps.ndim == 1 else steps[:, :, None]).copy())


def _add_later(
    value: torch.Tensor, leaf: Leaf, incs: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Add increments to floats, which PyG does in the wider of the two dtypes."""
    repeated = torch.repeat_interleave(incs, lengths, dim=0)
    axis = leaf.axis or 0
    if incs.dim() > 1:
        return value + repeated.squeeze(-1).t()
    shape = [1] * value.dim()
    shape[axis] = -1
    return value.add_(repeated.view(shape).to(value.dtype))


def _batch_and_ptr(slices: Any) -> tuple[Any, Any]:
    if isinstance(slices, torch.Tensor) and slices.dim() == 1:
        repeats = slices[1:] - slices[:-1]
        numbers = torch.arange(len(repeats))
        return torch.repeat_interleave(numbers, repeats), slices - slices[:1]
    if isinstance(slices, dict):
        pairs = {key: _batch_and_ptr(each) for key, each in slices.items()}
        return {k: p[0] for k, p in pairs.items()}, {k: p[1] for k, p in pairs.items()}
    if isinstance(slices, list) and isinstance(slices[0], torch.Tensor):
        both = [_batch_and_ptr(each) for each in slices]
        return [b for b, _ in both], [p for _, p in both]
    return None, None


def _leaves(node: Leaf | Nest) -> list[Leaf]:
    """List the leaves that are gathered; PyG's own collate makes room for the rest."""
    if isinstance(node, Leaf):
        return [node]
    if _is_composite(node):
        return []
    return [leaf for child in node.children for leaf in _leaves(child)]


def _is_loose(name: str, node: Leaf | Nest) -> bool:
    """Tell whether a field needs PyG's own collate."""
    if isinstance(node, Leaf):
        if name == "num_nodes" and node.kind != "int":
            return True
        floats = node.kind == "scalar" and node.dtype == "<f8"
        return floats or node.kind == "bigint" or node.inc == LOOSE
    if _is_composite(node) or name == "num_nodes":
        return True
    if node.kind == "dict" or _is_tensor_list(node):
        return any(_is_loose("", child) for child in node.children)
    return False


def _is_composite(node: Leaf | Nest) -> bool:
    return isinstance(node, Nest) and node.kind in KINDS


def _is_tensor_list(node: Nest) -> bool:
    """Tell whether PyG joins a list item by item: its first item is a tensor."""
    if node.kind not in {"list", "tuple", "named"} or not node.children:
        return False
    first = node.children[0]
    return _is_composite(first) or (isinstance(first, Leaf) and first.kind == "tensor")
