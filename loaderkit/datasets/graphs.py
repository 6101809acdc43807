"""SafeGraphDataset: a SafeDataset of PyG graphs, batched as PyG batches them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch_geometric.data import Batch
from torch_geometric.data.data import BaseData

from loaderkit.datasets.base import SafeDataset, collating
from loaderkit.datasets.batches import Recipe
from loaderkit.datasets.gathering import UnlikeShapesError
from loaderkit.datasets.room import Room
from loaderkit.datasets.sizes import Sizes, graph_sizes
from loaderkit.errors import DatasetError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Sequence

    from loaderkit.cache.store import Checksums
    from loaderkit.datasets.base import _Opened
    from loaderkit.datasets.pack import PackOptions


class SafeGraphDataset(SafeDataset):
    """A dataset of graphs whose every sample and batch is a copy.

    Subclass it and write ``keys()`` and ``load(key)``, which returns PyG's ``Data`` or
    ``HeteroData``, or a subclass with its own ``__inc__`` and ``__cat_dim__``.

    Args:
        raw: Where the samples come from, for ``keys`` and ``load`` to use as
            ``self.raw``.
        cache: Folder of the cache, packed on first use; None to load each time.
        transform: Called with each graph after it is read, as in PyG.
        follow_batch: Fields that get a ``_batch`` vector of their own, as in PyG.
        exclude_keys: Fields left out of batches, as in PyG.
        packing: How the cache is packed.
        classes: Classes that samples are made of, beyond PyG's and those that the
            subclass's own module knows.
        checksums: When the cache's files are hashed; as in ``SafeDataset``.
    """

    def __init__(
        self,
        raw: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        *,
        transform: Callable[[Any], Any] | None = None,
        follow_batch: Collection[str] | None = None,
        exclude_keys: Collection[str] | None = None,
        packing: PackOptions | None = None,
        classes: Iterable[type] = (),
        checksums: Checksums = "once",
    ) -> None:
        super().__init__(
            raw,
            cache,
            transform=transform,
            packing=packing,
            classes=classes,
            checksums=checksums,
        )
        self.follow_batch = tuple(follow_batch or ())
        self.exclude_keys = tuple(exclude_keys or ())

    def batch(
        self,
        rows: Sequence[int],
        *,
        follow_batch: Collection[str] | None = None,
        exclude_keys: Collection[str] | None = None,
    ) -> Any:
        """Gather a batch from the cache in one go.

        Args:
            rows: Rows of the batch, at least one, in any order, repeats allowed.
            follow_batch: Fields that get a ``_batch`` vector; the dataset's if None.
            exclude_keys: Fields left out; the dataset's if None.

        Returns:
            What ``Batch.from_data_list([self[row] for row in rows])`` returns, equal
            in every attribute; every tensor is new.

        Raises:
            DatasetError: The graphs cannot be batched.
        """
        follow = self.follow_batch if follow_batch is None else follow_batch
        exclude = self.exclude_keys if exclude_keys is None else exclude_keys
        chosen = self._chosen(rows)
        recipe = None
        if self.cache is not None and self.transform is None:
            opened = self._open()
            recipe = opened.recipe(self._recipe, opened.one_variant(chosen))
        if recipe is not None and recipe.gathers(exclude):
            try:
                with collating():
                    return recipe.batch(chosen, follow, exclude)
            except UnlikeShapesError as error:
                raise self._unlike(str(error)) from None
        samples = [self._sample(int(row)) for row in chosen]
        # PyG's ``batch`` and ``ptr`` have a number for every node.
        Room(len(chosen)).take(16 * sum(map(_told_nodes, samples)))
        with collating():
            return Batch.from_data_list(samples, list(follow), list(exclude))

    def collate(self, samples: Any) -> Any:
        """Serve as ``collate_fn``: pass a finished batch on, join a list of graphs.

        Args:
            samples: What ``__getitems__`` gave, or a list of graphs.

        Returns:
            A batch.
        """
        if type(samples) is not list:
            return samples
        follow, exclude = list(self.follow_batch), list(self.exclude_keys)
        return Batch.from_data_list(samples, follow, exclude)

    def sizes(self) -> Sizes:
        """Tell how large each sample is, from the cache's offsets alone.

        Returns:
            Nodes, edges and bytes of each sample.

        Raises:
            DatasetError: There is no cache.
        """
        return graph_sizes(*self._sized())

    @property
    def num_node_features(self) -> Any:
        """Features of a node, as in PyG; by node type for ``HeteroData``."""
        return self._first().num_node_features

    @property
    def num_features(self) -> Any:
        """Features of a node, as in PyG."""
        return self._first().num_features

    @property
    def num_edge_features(self) -> Any:
        """Features of an edge, as in PyG; by edge type for ``HeteroData``."""
        return self._first().num_edge_features

    @property
    def num_classes(self) -> int:
        """Classes in ``y``, as PyG counts them: over all samples of this dataset."""
        labels = [self[row].get("y") for row in range(len(self))]
        found = [torch.as_tensor(each) for each in labels if each is not None]
        if not found:
            return 0
        y = torch.cat([each.reshape(1) if each.dim() == 0 else each for each in found])
        if y.numel() == y.size(0) and not y.is_floating_point():
            return int(y.max()) + 1
        if y.numel() == y.size(0):
            return int(torch.unique(y).numel())
        return int(y.size(-1))

    def _first(self) -> Any:
        return self[0]

    def _loaded(self, key: Any) -> Any:
        graph = self.load(key)
        if isinstance(graph, BaseData):
            return graph
        what = f"load({key!r}) returned a {type(graph).__name__}, not a graph."
        fix = "return torch_geometric.data.Data, or subclass SafeDataset instead"
        raise DatasetError(what, why="SafeGraphDataset holds PyG graphs", fix=fix)

    def _recipe(self, opened: _Opened, variant: int) -> Any:
        return Recipe(opened.store, opened.structure, variant, self.classes)


def _told_nodes(graph: BaseData) -> int:
    """Count the nodes that a graph says it has, beyond those that tensors stand for."""
    told = [store.get("num_nodes") for store in graph.node_stores]
    return sum(each for each in told if isinstance(each, int))
