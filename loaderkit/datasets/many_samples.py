"""Several samples at once, each with memory of its own: equal to reading one by one.

What asks for samples rather than a batch (PyG's DataLoader, a transform, your own
``collate_fn``) gets them from here.  Small values of all samples are gathered in one
go and then copied apart, which takes torch a fifth of the time that finding, copying
and converting each would; large ones are copied straight to their place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from loaderkit.cache.gather import SLICE_BYTES
from loaderkit.datasets.composites import KINDS
from loaderkit.datasets.decode import make_nest, store_of
from loaderkit.datasets.gathering import Gathering, UnlikeShapesError
from loaderkit.datasets.structure import Leaf, Nest

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from loaderkit.cache.store import Store
    from loaderkit.datasets.classes import ClassRegistry

    Ints = NDArray[np.int64]

_AT_ONCE = 128
"""Samples whose small values are in memory twice while they are copied apart."""


def read_samples(
    store: Store, node: Leaf | Nest, rows: Ints, classes: ClassRegistry
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
        gathering = Gathering(store, rows[start : start + _AT_ONCE])
        samples += _Reader(gathering, classes).values(node)
    return samples


class _Reader:
    def __init__(self, gathering: Gathering, classes: ClassRegistry) -> None:
        self._gathering, self._classes = gathering, classes

    def values(self, node: Leaf | Nest) -> Sequence[Any]:
        """Read a part of every sample ``[B]``."""
        if isinstance(node, Leaf):
            return self._leaves(node)
        if node.kind == "none":
            return [None] * len(self._gathering)
        if node.kind == "graph":
            return self._graphs(node)
        if node.kind in KINDS:
            return self._gathering.values(node, self._classes)
        fields = [self.values(child) for child in node.children]
        return [
            make_nest(node, [field[at] for field in fields], self._classes)
            for at in range(len(self._gathering))
        ]

    def _leaves(self, leaf: Leaf) -> Sequence[Any]:
        if leaf.kind in {"int", "float", "bool"}:
            numbers: list[Any] = self._gathering.tensor(leaf)[0].tolist()
            return numbers
        if leaf.kind != "tensor":
            return self._gathering.values(leaf, self._classes)
        try:
            return self._tensors(leaf)
        except UnlikeShapesError:  # more than one axis differs
            return self._gathering.values(leaf, self._classes)

    def _tensors(self, leaf: Leaf) -> Sequence[torch.Tensor]:
        if self._gathering.mean_bytes(leaf) >= SLICE_BYTES:
            return self._gathering.apart(leaf)
        joined, runs = self._gathering.tensor(leaf)
        # torch's own annotations say that these two return nothing.
        unbind_copy: Any = torch.unbind_copy
        split_copy: Any = torch.split_with_sizes_copy
        tensors: Sequence[torch.Tensor]
        if leaf.axis is None:
            tensors = unbind_copy(joined)
        else:
            tensors = split_copy(joined, runs.lengths.tolist(), leaf.axis)
        return tensors

    def _graphs(self, node: Nest) -> list[Any]:
        graphs = self._classes.blanks(str(node.cls), len(self._gathering))
        for key, child in node.items():
            # PyG keeps no field that is None.
            kept = [pair for pair in child.items() if pair[1].kind != "none"]
            names = [name for name, _ in kept]
            fields = zip(*[self.values(field) for _, field in kept], strict=True)
            for graph, values in zip(graphs, fields, strict=False):
                # New stores: nothing is cached that store[name] = value would drop.
                mapping = store_of(graph, key)._mapping
                mapping.update(zip(names, values, strict=True))
        return graphs
