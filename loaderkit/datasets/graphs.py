"""What a dataset of PyG graphs does beyond others: batch them as PyG does."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import Self, TypeVar

from loaderkit.answers import answer_wrong_calls
from loaderkit.arguments import check_names
from loaderkit.call_keywords import suggest_keywords
from loaderkit.datasets.assigned_options import GivenOption, refuse_options_set_beside
from loaderkit.datasets.base import BaseDataset
from loaderkit.datasets.batch_joining import note_others, unlike_shapes_error
from loaderkit.datasets.batches import GraphRecipe
from loaderkit.datasets.collate_errors import Collating
from loaderkit.datasets.columns import (
    TypeColumns,
    are_names,
    check_column,
    fields_of_type,
    find_type,
    join_graph_column,
    join_labels,
)
from loaderkit.datasets.gathering import UnlikeShapesError
from loaderkit.datasets.key_texts import key_in_code
from loaderkit.datasets.lazy import LazySamples
from loaderkit.datasets.room import Room
from loaderkit.datasets.sample_reading import is_ours
from loaderkit.datasets.sizes import GraphSizes, graph_sizes
from loaderkit.datasets.structure import is_graph
from loaderkit.errors import DatasetError
from loaderkit.joining import check_known_keys, graphs_in
from loaderkit.pyg import import_pyg, is_pyg_data

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor
    from torch_geometric.data.data import BaseData

    from loaderkit.array_types import Ints
    from loaderkit.cache.remote import RemoteCache
    from loaderkit.cache.shards import Checksums
    from loaderkit.datasets.opened import OpenedCache
    from loaderkit.datasets.pack_options import PackOptions
    from loaderkit.datasets.structure import StoreKey
    from loaderkit.memory.page_locked import PageLockedBatch

T = TypeVar("T", default=Any)

_MOST_FLOAT_CLASSES = 2
"""Labels of two classes are often floats, for the loss; PyG warns of more too."""


@answer_wrong_calls
class GraphDataset(BaseDataset[T]):
    """What makes ``SafeGraphDataset`` one of graphs; not for users.

    The arguments are explained in ``SafeGraphDataset``.
    """

    _sizes_are_of_graphs = True
    _shows_fields = True

    @suggest_keywords
    def __init__(
        self,
        raw: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | RemoteCache | None = None,
        *,
        transform: Callable[[Any], Any] | None = None,
        follow_batch: Collection[str] | None = None,
        exclude_keys: Collection[str] | None = None,
        packing: PackOptions | None = None,
        classes: Iterable[type] = (),
        checksums: Checksums = "once",
        storage_options: Mapping[str, Any] | None = None,
        mirror: str | os.PathLike[str] | None = None,
        mirror_bytes: int | str | None = None,
    ) -> None:
        options = {
            "follow_batch": GivenOption(follow_batch, None),
            "exclude_keys": GivenOption(exclude_keys, None),
        }
        if "_loaderkit" not in vars(self):
            refuse_options_set_beside(self, options)
        super().__init__(
            raw,
            cache,
            transform=transform,
            packing=packing,
            classes=classes,
            checksums=checksums,
            storage_options=storage_options,
            mirror=mirror,
            mirror_bytes=mirror_bytes,
        )
        self.follow_batch = _names_of("follow_batch", follow_batch)
        self.exclude_keys = _names_of("exclude_keys", exclude_keys)
        # ``load`` may be the first to name PyG, as torch.load does.  Workers that are
        # forked later need not each import it then.
        import_pyg()

    def batch(
        self,
        rows: Sequence[int] | NDArray[Any] | slice | Tensor,
        *,
        follow_batch: Collection[str] | None = None,
        exclude_keys: Collection[str] | None = None,
    ) -> Any:
        """Gather a batch from the cache in one go.

        Args:
            rows: Rows of the batch, at least one, in any order, repeats allowed; or a
                slice, or a mask ``[len(dataset)]``.
            follow_batch: Fields that get a ``_batch`` vector; the dataset's if None.
            exclude_keys: Fields left out; the dataset's if None.

        Returns:
            What ``Batch.from_data_list([self[row] for row in rows])`` returns, equal
            in every attribute; every tensor is new.

        Raises:
            DatasetError: The graphs cannot be batched.
            OptionError: No graph of the cache has a field of such a name.
        """
        follow = _names_of("follow_batch", follow_batch, self.follow_batch)
        exclude = _names_of("exclude_keys", exclude_keys, self.exclude_keys)
        return self._batch_of_rows(self._checked_rows(rows), follow, exclude)

    def _batch_of_rows(
        self,
        numbers: Ints,
        follow_batch: Collection[str] = (),
        exclude_keys: Collection[str] = (),
        page_locked: PageLockedBatch | None = None,
    ) -> Any:
        """Gather a batch of rows ``[B]`` that were checked, at least one."""
        follow, exclude = follow_batch, exclude_keys
        if follow or exclude:
            check_known_keys(follow, exclude, self.graph_fields())
        cached = self._rows_in_cache(numbers)
        recipe = self._recipe_for(cached)
        if recipe is None or not recipe.gathers(exclude):
            note_others(page_locked)
            return self._join_read_samples(numbers, follow, exclude)
        try:
            with Collating():
                return recipe.batch(cached, follow, exclude, page_locked=page_locked)
        except UnlikeShapesError as error:
            column = str(error)
        # Other samples of the dataset are unlike in shape, but perhaps not these.
        note_others(page_locked)
        try:
            return self._join_read_samples(numbers, follow, exclude)
        except DatasetError as error:
            raise unlike_shapes_error(recipe.store, column, cached) from error

    def _join_read_samples(
        self, rows: Ints, follow_batch: Collection[str], exclude_keys: Collection[str]
    ) -> Any:
        """Read samples one by one, and join them."""
        samples = [self[row] for row in rows.tolist()]
        # PyG's ``batch`` and ``ptr`` have a number for every node.
        graphs = (graph for sample in samples for graph in graphs_in(sample))
        Room(len(samples)).take(16 * sum(map(_told_nodes, graphs)))
        return self._join_samples(samples, follow_batch, exclude_keys)

    def collate(
        self,
        samples: object,
        *,
        follow_batch: Collection[str] | None = None,
        exclude_keys: Collection[str] | None = None,
    ) -> Any:
        """Join graphs; serves as ``collate_fn`` of any DataLoader.

        Args:
            samples: A list of graphs, or of what ``transform`` makes of them: pairs,
                dicts, anything that PyG's DataLoader takes.  The list that
                ``__getitems__`` gave is not read: its batch is gathered.
            follow_batch: Fields that get a ``_batch`` vector; the dataset's if None.
            exclude_keys: Fields left out; the dataset's if None.

        Returns:
            A batch; what is no list is taken for one and returned as it is.

        Raises:
            DatasetError: The graphs cannot be batched.
        """
        if not isinstance(samples, list):
            return samples
        follow = self.follow_batch if follow_batch is None else follow_batch
        exclude = self.exclude_keys if exclude_keys is None else exclude_keys
        if isinstance(samples, LazySamples) and self._joins_like(samples.dataset):
            graphs: Any = samples.dataset
            if len(samples.rows) and is_ours(graphs.batch):
                return graphs._batch_of_rows(
                    samples.rows, follow, exclude, samples.page_locked
                )
            return graphs.batch(samples.rows, follow_batch=follow, exclude_keys=exclude)
        self._expect_more_of(samples)
        return self._join_samples(samples, follow, exclude)

    if not TYPE_CHECKING:  # a type checker knows the one of BaseDataset

        def __getitem__(self, index: Any) -> Any:
            if isinstance(index, str) or are_names(index):
                opened, _ = self._cache_and_rows("columns")
                key = find_type(opened, index)
                if key is not None:
                    return TypeColumns(self, key, fields_of_type(opened, key))
            return super().__getitem__(index)

    def column(self, name: str, *, of_type: StoreKey = None) -> Any:
        """Gather one field of all graphs, whole, as the cache has it.

        ``dataset.y`` is the same, as in PyG's datasets, once the cache is open.  Of
        typed graphs ``dataset["paper"].x`` is ``column("x", of_type="paper")``.

        Args:
            name: A field that all graphs have.
            of_type: The node or edge type that it belongs to, for ``HeteroData``; None
                for fields of the graph itself.

        Returns:
            What a batch of all samples has there, ``transform`` aside.

        Raises:
            DatasetError: There is no such field, no cache, or it takes more than
                ``largest_column_bytes``.
        """
        if of_type is None:
            return super().column(name)
        opened, rows = self._cache_and_rows("columns")
        check_column(opened, rows, name, self.largest_column_bytes, of_type)
        return self._graph_column(opened, rows, name, of_type)

    def sizes(self) -> GraphSizes:
        """Tell how large each sample is, from the cache's offsets alone.

        Returns:
            Nodes, edges and bytes of each sample.

        Raises:
            DatasetError: There is no cache.
        """
        return graph_sizes(*self._cache_and_rows())

    def copy(self, idx: Sequence[int] | None = None) -> Self:
        """Copy the dataset, as PyG's ``InMemoryDataset`` does.

        Args:
            idx: Rows of the copy, in order; all if None.

        Returns:
            Another dataset over the same cache: its samples are copies anyway.
        """
        return copy.copy(self) if idx is None else self.index_select(idx)

    def get_summary(self) -> Any:
        """Summarise nodes and edges of the graphs: PyG's ``Summary``.

        Its fields can be read as they are; to print it takes the ``tabulate`` library.
        """
        return import_pyg().summary.from_dataset(self)

    def print_summary(self, fmt: str = "psql") -> None:
        """Print the summary of the graphs, as PyG's datasets do.

        Args:
            fmt: A table format of the ``tabulate`` library, which this needs.

        Raises:
            DatasetError: That library is not installed.
        """
        summary = self.get_summary()
        try:
            table = summary.format(fmt=fmt)
        except ModuleNotFoundError as error:
            message = f"The summary cannot be printed: {error}."
            why = "PyG formats its tables with tabulate"
            fix = "pip install tabulate; the fields of get_summary() do without"
            raise DatasetError(message, why=why, fix=fix) from error
        print(table)  # noqa: T201 -- its purpose

    @property
    def num_node_features(self) -> Any:
        """Features of a node, as in PyG; by node type for ``HeteroData``."""
        return self._first_graph().num_node_features

    @property
    def num_features(self) -> Any:
        """Features of a node, as in PyG."""
        return self._first_graph().num_features

    @property
    def num_edge_features(self) -> Any:
        """Features of an edge, as in PyG; by edge type for ``HeteroData``."""
        return self._first_graph().num_edge_features

    @property
    def num_classes(self) -> int:
        """Classes in ``y``, as PyG counts them: over all samples of this dataset."""
        y = self._gather_labels()
        if y is None:
            # Behind a transform, or built differently: PyG reads each graph too.
            labels = [
                torch.as_tensor(graph.y)
                for sample in self
                for graph in graphs_in(sample)
                if graph.get("y") is not None
            ]
            if not labels:
                return 0
            y = torch.cat([y.reshape(1) if y.dim() == 0 else y for y in labels])
        if y.numel() != y.size(0):
            return int(y.size(-1))
        if y.is_floating_point():
            return self._count_values(y)
        return int(y.max()) + 1

    def _gather_labels(self) -> torch.Tensor | None:
        """Give ``y`` of all graphs; None where no column of the cache is just that."""
        if not self.reads_cache or not len(self):
            return None
        opened, rows = self._cache_and_rows()
        with Collating():
            return join_labels(opened, rows, self.classes)

    def _join_column(self, opened: OpenedCache, rows: Ints, name: str) -> Any:
        if not all(is_graph(variant) for variant in opened.structure.variants):
            return super()._join_column(opened, rows, name)
        return self._graph_column(opened, rows, name, None)

    def _graph_column(
        self, opened: OpenedCache, rows: Ints, name: str, key: StoreKey
    ) -> Any:
        """Gather a field of graphs, known to be there in all of them."""
        try:
            with Collating():
                column = join_graph_column(opened, rows, name, self.classes, key)
        except UnlikeShapesError as error:
            raise unlike_shapes_error(opened.store, str(error), rows) from None
        if column is not None:
            return column
        graphs = copy.copy(self)
        graphs.transform = None
        others = opened.graph_fields - {name}
        every = np.arange(len(rows))
        batch = graphs.batch(every, follow_batch=(), exclude_keys=others)
        return batch[name] if key is None else batch[key][name]

    def _count_values(self, y: torch.Tensor) -> int:
        count = int(torch.unique(y).numel())
        if count > _MOST_FLOAT_CLASSES:
            text = (
                f"y is made of floats: num_classes counts its {count} unique elements"
            )
            warnings.warn(text, UserWarning, stacklevel=3)
        return count

    def _first_graph(self) -> Any:
        graph = next(graphs_in(self[0]), None)
        if graph is None:
            message = (
                f"The transform returned a {type(self[0]).__name__} without a graph."
            )
            fix = "ask the dataset that has no transform"
            raise DatasetError(message, why="features are those of a graph", fix=fix)
        return graph

    def _load_checked(self, key: object) -> Any:
        graph = self.load(key)
        if is_pyg_data(graph):
            return graph
        message = (
            f"load({key_in_code(key)}) returned a {type(graph).__name__}, not a graph."
        )
        fix = "return torch_geometric.data.Data, or subclass SafeDataset instead"
        raise DatasetError(message, why="SafeGraphDataset holds PyG graphs", fix=fix)

    def _make_recipe(self, opened: OpenedCache, variant: int) -> Any:
        if not is_graph(opened.structure.variants[variant]):
            return None  # such as a dict: joined as a SafeDataset joins it
        return GraphRecipe(opened.store, opened.structure, variant, self.classes)


def _names_of(
    option: str, given: Collection[str] | None, otherwise: Collection[str] = ()
) -> Collection[str]:
    """Take the names that an option was given; those of another place where it is None.

    Raises:
        OptionError: They are no names.
    """
    return otherwise if given is None else check_names(option, given)


def _told_nodes(graph: BaseData) -> int:
    """Count the nodes that a graph says it has, beyond those that tensors stand for."""
    node_counts = [store.get("num_nodes") for store in graph.node_stores]
    return sum(count for count in node_counts if isinstance(count, int))
