"""One field of all samples, gathered whole: ``dataset.y``, ``dataset["paper"].x``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.datasets.batches import GraphRecipe
from loaderkit.datasets.collate_errors import Collating
from loaderkit.datasets.decode import decode
from loaderkit.datasets.dict_batches import DictRecipe, collate_samples
from loaderkit.datasets.gathering import BatchGather, leaf_reader
from loaderkit.datasets.kinds import COUNTER_KINDS, Kind
from loaderkit.datasets.list_forms import are_kept_apart, list_forms
from loaderkit.datasets.missing_fields import MissingField, refuse_field_name
from loaderkit.datasets.ragged_fields import Joining, field_shapes, joining_of
from loaderkit.datasets.sizes import occurring, stored_bytes
from loaderkit.datasets.structure import (
    Leaf,
    Nest,
    Structure,
    fields_of_variant,
    is_graph,
)
from loaderkit.errors import (
    DatasetError,
    NoSuchAttributeError,
    NotChangeableError,
)
from loaderkit.nearest_names import suggest_name
from loaderkit.units import count_of, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loaderkit.array_types import Ints
    from loaderkit.datasets.classes import ClassRegistry
    from loaderkit.datasets.opened import OpenedCache
    from loaderkit.datasets.padding import Path
    from loaderkit.datasets.safe import SafeGraphDataset
    from loaderkit.datasets.structure import StoreKey


def column_names(opened: OpenedCache) -> frozenset[str]:
    """Name the fields that some sample of a cache has.

    Args:
        opened: The cache.

    Returns:
        Names of a graph's fields, or of a dict's keys, a dataclass's or a named
        tuple's fields; of ``HeteroData`` those that belong to no type.
    """
    return frozenset(
        name
        for variant in opened.structure.variants
        for name in fields_of_variant(variant)
    )


def dtype_in_words(dtype: str) -> str:
    """Write a dtype as torch and numpy name it.

    Args:
        dtype: As a cache stores it: torch's name, or numpy's code; empty for text.

    Returns:
        Its name; numpy's code where a name would not say all, as of another byte order.

    >>> dtype_in_words("<i8"), dtype_in_words("float32"), dtype_in_words(">f4")
    ('int64', 'float32', '>f4')
    """
    if not dtype.startswith(("<", "|")) or np.dtype(dtype).kind not in "biufc":
        return dtype
    return str(np.dtype(dtype))


def column_rows(opened: OpenedCache) -> list[tuple[str, str, str]]:
    """Name the columns of a cache with their kinds and dtypes, for people.

    Args:
        opened: The cache.

    Returns:
        Path, kind and dtype of each column that holds values of samples.
    """
    return [
        (column.path, str(column.kind), dtype_in_words(column.dtype))
        for column in opened.structure.columns.values()
        if column.kind not in COUNTER_KINDS and "@" not in column.path
    ]


_WHY_UNCHANGED = "a cache is packed once, and every column that is read is a copy"
_FIX_UNCHANGED = "dataset.map(function, cache=path), which packs another cache"


class TypeColumns:
    """The fields of one node or edge type, in all samples: ``dataset["paper"]``.

    ``dataset["paper"].x`` gathers a field whole, as ``dataset.y`` does: what a batch of
    all samples has there.

    Args:
        dataset: The dataset.
        key: The node type, or the edge type (source, relation, target).
        names: Its fields, in some sample.
    """

    def __init__(
        self, dataset: SafeGraphDataset[Any], key: StoreKey, names: list[str]
    ) -> None:
        self._dataset, self._key, self._names = dataset, key, names

    def keys(self) -> list[str]:
        """Name the fields."""
        return list(self._names)

    def __getitem__(self, name: str) -> Any:
        return self._dataset.column(name, of_type=self._key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._names:
            message = f"{self._key!r} has no field {name!r}."
            fix = suggest_name(name, self._names)
            raise NoSuchAttributeError(
                message, why=f"its fields are {', '.join(self._names)}", fix=fix
            )
        return self[name]

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            message = f"{self._key!r} cannot be changed: .{name} = ...."
            raise NotChangeableError(message, why=_WHY_UNCHANGED, fix=_FIX_UNCHANGED)
        super().__setattr__(name, value)

    def __setitem__(self, name: str, value: object) -> None:
        message = f"{self._key!r} cannot be changed: [{name!r}] = ...."
        raise NotChangeableError(message, why=_WHY_UNCHANGED, fix=_FIX_UNCHANGED)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._names]

    def __repr__(self) -> str:
        return f"TypeColumns({self._key!r}: {', '.join(self._names)})"


def find_type(opened: OpenedCache, name: str | tuple[str, ...]) -> StoreKey:
    """Find a node or edge type, named as ``HeteroData`` lets it be named.

    Args:
        opened: The cache.
        name: A node type; a relation or (source, target) that one edge type has; or
            an edge type.

    Returns:
        The type; None where no sample has it, or several types are named so.
    """
    graphs = [variant for variant in opened.structure.variants if is_graph(variant)]
    keys = dict.fromkeys(key for graph in graphs for key in graph.keys)
    keys.pop(None, None)  # what belongs to the whole graph
    if name in keys:
        return name
    edges = [key for key in keys if isinstance(key, tuple)]
    if isinstance(name, str):
        edge_types = [key for key in edges if key[1] == name]
    else:
        edge_types = [key for key in edges if (key[0], key[-1]) == tuple(name)]
    return edge_types[0] if len(edge_types) == 1 else None


def fields_of_type(opened: OpenedCache, key: StoreKey) -> list[str]:
    """Name the fields that a type has in some sample, in their order."""
    names = [
        name
        for variant in opened.structure.variants
        for name in fields_of_variant(variant, key)
    ]
    return list(dict.fromkeys(names))


def check_column(
    opened: OpenedCache,
    rows: Ints,
    name: str,
    most_bytes: int,
    key: StoreKey = None,
) -> None:
    """See that all samples have a field, and that all of it may lie in memory at once.

    Args:
        opened: The cache they are in.
        rows: Their numbers in it ``[n]``.
        name: The field.
        most_bytes: What may be gathered.
        key: The type that it belongs to; None for fields of whole samples.

    Raises:
        DatasetError: A sample has no such field, or they take more together.
    """
    unchecked_name: object = name  # by who checks no types
    if not isinstance(unchecked_name, str) and not are_names(unchecked_name):
        raise refuse_field_name(opened, unchecked_name)
    variants = opened.variants(rows)
    nbytes = 0
    for number in occurring(variants):
        held = rows[variants == number]
        variant = opened.structure.variants[number]
        # A field may be built differently from variant to variant, and take others.
        node = fields_of_variant(variant, key).get(name)
        if node is None:
            raise MissingField(opened, number, name, int(held[0]), key).error()
        sample_bytes = stored_bytes(BatchGather(opened.store, held), node)
        # Fields of graphs lie end to end; of others each is padded to the longest.
        is_padded = isinstance(node, Leaf) and node.column.axis is not None
        if is_padded and not is_graph(variant):
            nbytes += int(sample_bytes.max()) * len(sample_bytes)
        else:
            nbytes += int(sample_bytes.sum())
    if nbytes > most_bytes:
        message = (
            f"Field {name!r} takes {format_bytes(nbytes)} in "
            f"{count_of(len(rows), 'samples')}."
        )
        why = f"largest_column_bytes is {format_bytes(most_bytes)}: a column is "
        why += "gathered whole"
        fix = "dataset[:1000].column(name), or dataset.largest_column_bytes = "
        raise DatasetError(message, why=why, fix=f"{fix}{nbytes}")


def join_column(
    opened: OpenedCache, rows: Ints, name: str, classes: ClassRegistry, ragged: str
) -> Any:
    """Gather a field of samples that are no graphs.

    Args:
        opened: The cache they are in.
        rows: Their numbers in it ``[n]``, at least one.
        name: A field that they all have.
        classes: Where the classes are that it is made of.
        ragged: "padded", "packed" or "jagged", for tensors whose first axes differ.

    Returns:
        What a batch of these samples has under that name.
    """
    numbers = opened.variants(rows)
    fields = {
        n: fields_of_variant(opened.structure.variants[n])[name]
        for n in occurring(numbers)
    }
    forms = list_forms(
        opened.structure,
        [
            of_variant[name]
            for of_variant in map(fields_of_variant, opened.structure.variants)
            if name in of_variant
        ],
    )
    if len(fields) == 1:
        [node] = fields.values()
        return DictRecipe(opened.store, node, classes, ragged, [forms]).batch(rows)
    # No recipe gathers what is built differently: each value is read, and all are
    # joined as samples in memory are.
    values = [
        decode(fields[number], leaf_reader(opened.store, row), classes)
        for row, number in zip(rows.tolist(), numbers.tolist(), strict=True)
    ]
    shapes = field_shapes(opened.store, fields.values())

    def joining(path: Path, values: Sequence[Any]) -> Joining | None:
        if isinstance(values[0], list | tuple):
            return Joining.KEPT_APART if are_kept_apart([forms], path) else None
        return joining_of(shapes, path, values)

    with Collating(values, f"[{name!r}]"):
        return collate_samples(values, ragged, joining)


def join_graph_column(
    opened: OpenedCache, rows: Ints, name: str, classes: ClassRegistry, key: StoreKey
) -> Any:
    """Gather a field of graphs, and nothing else of them.

    Args:
        opened: The cache they are in.
        rows: Their numbers in it ``[n]``, at least one.
        name: A field that they all have.
        classes: Where the classes are that it is made of.
        key: The type that it belongs to; None for fields of the graph itself.

    Returns:
        What a batch of these graphs has there; None where it cannot be gathered apart:
        they are built differently, or PyG has to join it.
    """
    number = opened.one_variant(rows)
    if number is None:
        return None
    graph = opened.structure.variants[number]
    assert isinstance(graph, Nest)
    # A graph that has this field alone, for the recipe that makes batches: so a column
    # is what a batch of all samples has, by the same code.
    field = fields_of_variant(graph, key)[name]
    alone = Nest(Kind.STORE, keys=(name,), children=(field,))
    # PyG makes a store for each type, so the others are there, without fields.
    stores = tuple(alone if other == key else Nest(Kind.STORE) for other in graph.keys)
    graph = graph._replace(children=stores)
    structure = Structure(variants=[graph], columns=opened.structure.columns)
    recipe = GraphRecipe(opened.store, structure, 0, classes)
    if recipe.needs_pyg:
        # PyG may ask for the graph's number of nodes, which another field tells.
        return None
    batch = recipe.batch(rows, (), ())
    return batch[name] if key is None else batch[key][name]


def join_labels(
    opened: OpenedCache, rows: Ints, classes: ClassRegistry
) -> torch.Tensor | None:
    """Gather the ``y`` of graphs as one tensor, its samples end to end.

    Args:
        opened: The cache they are in.
        rows: Their numbers in it ``[n]``, at least one.
        classes: Where the classes are that it is made of.

    Returns:
        The labels ``[N, *rest]``; None where each graph is to be read for its own.
    """
    number = opened.one_variant(rows)
    if number is None:
        return None
    graph = opened.structure.variants[number]
    label = fields_of_variant(graph).get("y") if is_graph(graph) else None
    # A label that PyG stacks, or joins along another axis, is no row of classes.
    if not isinstance(label, Leaf) or label.column.axis not in {None, 0}:
        return None
    is_stacked = label.column.axis is None and label.column.ndim > 0
    if label.column.kind not in _KINDS_OF_LABELS or is_stacked:
        return None
    labels = join_graph_column(opened, rows, "y", classes, None)
    return labels if isinstance(labels, torch.Tensor) else None


_KINDS_OF_LABELS = frozenset({Kind.TENSOR, Kind.INT, Kind.FLOAT})


def stores_of(opened: OpenedCache) -> dict[Any, list[str]]:
    """Name the fields of node and edge types of the first graph, by type.

    Args:
        opened: The cache they are in.

    Returns:
        Nothing where its samples are no graphs, or have no types.
    """
    variant = opened.structure.variants[0] if opened.structure.variants else None
    if variant is None or not is_graph(variant):
        return {}
    return {
        key: sorted(fields_of_variant(variant, key))
        for key in variant.keys
        if key is not None
    }


def are_names(index: object) -> bool:
    """Tell whether an index is a tuple of texts, as types of edges are."""
    is_tuple = isinstance(index, tuple) and bool(index)
    return is_tuple and all(isinstance(name, str) for name in index)  # type: ignore[attr-defined]
