"""How large samples are, told by the cache's offsets, and by lists' texts, alone."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.datasets.containers import attribute_names
from loaderkit.datasets.gathering import Gathering, leaf_dtype
from loaderkit.datasets.plain import count_items
from loaderkit.datasets.structure import Leaf, Nest, is_graph
from loaderkit.errors import DatasetError
from loaderkit.joining import graphs_in
from loaderkit.pyg import is_pyg_data

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from loaderkit.datasets.base import _Opened

    Ints = NDArray[np.int64]

_TEXTS_AT_ONCE = 8192
"""Lists whose texts are in memory at once: some 10 MB for 200 numbers each."""


@dataclass(frozen=True)
class GraphSizes:
    """How large each sample is."""

    nodes: Ints
    """Nodes of each sample ``[n]``, of all types together."""
    edges: Ints
    """Edges of each sample ``[n]``, of all types together."""
    bytes: Ints
    """Bytes of each sample's values ``[n]``, as they are in a batch."""


@dataclass(frozen=True)
class SampleSizes:
    """How large each sample is that is no graph."""

    tokens: Ints | None
    """Length of the longest field of each sample ``[n]``: of tensors, arrays and lists
    whose length differs from sample to sample, or of all of them where none's does.
    None where a sample has no such field."""
    bytes: Ints
    """Bytes of each sample's values ``[n]``, as they are in a batch."""


def graph_sizes(opened: _Opened, rows: Ints) -> GraphSizes:
    """Measure graphs without reading them.

    Args:
        opened: The cache they are in.
        rows: Their numbers in it ``[n]``.

    Returns:
        Nodes, edges and bytes of each.

    Raises:
        DatasetError: A sample is no graph.
    """
    sizes = GraphSizes(*(np.zeros(len(rows), np.int64) for _ in range(3)))
    for places in opened.store.places_at_once(rows):
        part = _graph_sizes_at_once(opened, rows[places])
        sizes.nodes[places] = part.nodes
        sizes.edges[places] = part.edges
        sizes.bytes[places] = part.bytes
    return sizes


def _graph_sizes_at_once(opened: _Opened, rows: Ints) -> GraphSizes:
    nodes, edges, nbytes = (np.zeros(len(rows), np.int64) for _ in range(3))
    variants = opened.variants(rows)
    for number in occurring(variants):
        at = np.flatnonzero(variants == number)
        graph = opened.structure.variants[number]
        if not is_graph(graph):
            what = f"Sample {rows[at[0]]} of {opened.store.path} is no graph."
            why = "the sizes of a SafeGraphDataset are its nodes and edges"
            fix = "pack graphs only; or SafeDataset(cache=path).sizes(), in bytes"
            raise DatasetError(what, why=why, fix=fix)
        gathering = Gathering(opened.store, rows[at])
        parts: Any = graph.children
        for part in parts:
            if part.nodes:
                nodes[at] += gathering.numbers(part.nodes)
            edges[at] += _edges(gathering, part)
            nbytes[at] += stored_bytes(gathering, part)
    return GraphSizes(nodes, edges, nbytes)


def sample_sizes(opened: _Opened, rows: Ints) -> SampleSizes:
    """Measure samples that are no graphs, without reading them.

    Args:
        opened: The cache they are in.
        rows: Their numbers in it ``[n]``.

    Returns:
        Tokens and bytes of each.
    """
    nbytes = np.zeros(len(rows), np.int64)
    variants = opened.variants(rows)
    for number in occurring(variants):
        at = np.flatnonzero(variants == number)
        gathering = Gathering(opened.store, rows[at])
        nbytes[at] = stored_bytes(gathering, opened.structure.variants[number])
    chosen = _token_lengths(opened)
    tokens = np.max([*chosen.values()], axis=0) if chosen else None
    if tokens is None or (tokens == _ABSENT).any():
        return SampleSizes(None, nbytes)
    return SampleSizes(tokens[rows], nbytes)


_ABSENT = -1
"""In place of the length of a field that a sample does not have."""


def _token_lengths(opened: _Opened) -> dict[str, Ints]:
    """Find the lengths that count as tokens, for all samples of a cache, by path.

    Whether a field's length differs is asked of the whole cache, so that a part of a
    dataset tells the same as the dataset.
    """
    lengths = _lengths_by_path(opened)
    ragged = {path: each for path, each in lengths.items() if _differ(each)}
    return ragged or lengths


def _differ(lengths: Ints) -> bool:
    """Tell whether the samples that have a field have it in several lengths."""
    present = lengths[lengths != _ABSENT]
    return bool((present != present[:1]).any())


def occurring(variants: Ints) -> list[int]:
    """Number the ways of being built that some samples have, in order.

    ``np.unique`` would sort them, and it imports numpy.ma, which takes 11 ms.
    """
    numbers: list[int] = np.flatnonzero(np.bincount(variants)).tolist()
    return numbers


@dataclass(frozen=True)
class SizeCounter:
    """Counts what samples hold that a user's code made of those in a cache.

    It counts no more than ``sizes()`` would of samples that were left as they are.
    """

    token_fields: frozenset[str]
    """Paths of the fields whose lengths are tokens in the cache."""

    def totals(self, samples: Sequence[Any]) -> dict[str, int]:
        """Count what the samples of a batch hold together.

        Args:
            samples: As the user's code gave them.

        Returns:
            Nodes, edges, bytes of tensors and arrays, and tokens.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyG's, where it must guess num_nodes
            graphs = [graph for sample in samples for graph in graphs_in(sample)]
            nodes = sum(graph.num_nodes or 0 for graph in graphs)
            edges = sum(graph.num_edges or 0 for graph in graphs)
        fields = [field for sample in samples for _, field in _fields_in(sample)]
        nbytes = sum(_nbytes(field) for field in fields)
        tokens = self._tokens(samples)
        return {"nodes": nodes, "edges": edges, "bytes": nbytes, "tokens": tokens}

    def _tokens(self, samples: Sequence[Any]) -> int:
        """Sum up the longest field of each, of those that are ragged here or there."""
        lengths = [dict(_lengths_in(sample)) for sample in samples]
        paths = {path for each in lengths for path in each}
        counted = {
            path
            for path in paths
            if path in self.token_fields
            or len({each[path] for each in lengths if path in each}) > 1
        }
        return sum(
            max((each[path] for path in counted if path in each), default=0)
            for each in lengths
        )


def size_counter(opened: _Opened, *, graphs: bool) -> SizeCounter:
    """Make the counter for samples that are made of those in a cache."""
    return SizeCounter(frozenset(() if graphs else _token_lengths(opened)))


def _fields_in(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Go through the tensors, arrays and plain lists of a sample, with their paths."""
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, torch.Tensor | np.ndarray):
        yield path, value
    elif is_pyg_data(value):
        children = ((n, v) for store in value.stores for n, v in store.items())
    elif isinstance(value, Mapping):
        children = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = ((name, getattr(value, name)) for name in attribute_names(value))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        children = zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        plain = all(isinstance(each, int | float | complex | str) for each in value)
        if plain:
            yield path, value
        else:
            children = enumerate(value)
    for name, child in children:
        yield from _fields_in(child, f"{path}.{name}" if path else str(name))


def _nbytes(field: Any) -> int:
    if isinstance(field, torch.Tensor) and field.layout is not torch.strided:
        return 0  # sparse ones do not say
    return int(getattr(field, "nbytes", 0))


def _lengths_in(sample: Any) -> Iterator[tuple[str, int]]:
    """Find the length of every field of a sample that has one, by its path."""
    for path, field in _fields_in(sample):
        if getattr(field, "ndim", 1):
            yield path, len(field)


def _lengths_by_path(opened: _Opened) -> dict[str, Ints]:
    """Find the length of every field that has one, in each sample ``[n]``.

    A field may be kept in several columns: as int64 in some samples, say, and as
    float32 in others.  They share its path.
    """
    count = len(opened.store)
    variants = opened.variants(np.arange(count))
    lengths: dict[str, Ints] = {}
    for number in occurring(variants):
        at = np.flatnonzero(variants == number)
        gathering = Gathering(opened.store, at)
        for path, found in _lengths(
            gathering, opened, opened.structure.variants[number]
        ):
            field = lengths.setdefault(path, np.full(count, _ABSENT, np.int64))
            field[at] = found
    return lengths


def _lengths(
    gathering: Gathering, opened: _Opened, node: Leaf | Nest
) -> Iterator[tuple[str, Ints]]:
    """Walk the fields of samples that are built alike."""
    if not isinstance(node, Leaf):
        if node.kind == "list" and _is_numbers(node):
            # A sample that is a bare list of numbers has no path, and no column.
            yield "", np.full(len(gathering), len(node.children), np.int64)
        elif node.kind in {"dict", "list", "tuple", "named", "dataclass"}:
            for child in node.children:
                yield from _lengths(gathering, opened, child)
    elif node.kind in {"tensor", "array"} and node.ndim:
        yield opened.structure.columns[node.column][0], _rows(gathering, node)
    elif node.kind == "json":
        path = opened.structure.columns[node.column][0]
        yield path, _list_lengths(opened, node, gathering.rows)


def _is_numbers(node: Nest) -> bool:
    kinds = {child.kind for child in node.children}
    return kinds <= {"int", "float", "bool"}


def _rows(gathering: Gathering, leaf: Leaf) -> Ints:
    """Look up the length of a field's first axis in each sample."""
    column = gathering.store.column(leaf.column)
    lengths = np.empty(len(gathering), np.int64)
    for share in gathering.pick.shares(column):
        part, samples = share.part, share.samples
        if part.shapes is None:
            found = part.find(samples, share.shards)[1]
        else:  # more than one axis differs: the rows are single numbers
            held = samples if part.rows is None else part.rows.searchsorted(samples)
            found = part.shapes[held, 0]
        lengths[... if share.places is None else share.places] = found
    return lengths


def _list_lengths(opened: _Opened, leaf: Leaf, rows: Ints) -> Ints:
    """Count the items of lists of plain values."""
    lengths: list[int] = []
    for start in range(0, len(rows), _TEXTS_AT_ONCE):
        some = Gathering(opened.store, rows[start : start + _TEXTS_AT_ONCE])
        lengths += [count_items(leaf.column, raw) for raw in some.raw_bytes(leaf)]
    return np.array(lengths, np.int64)


def _edges(gathering: Gathering, part: Any) -> Any:
    """Count edges as PyG does: by the first field whose last or first axis is edges."""
    for name, node in part.items():
        leaf = node
        if not isinstance(leaf, Leaf):
            leaf = dict(node.items()).get("data") if node.kind == "edge_index" else None
        if leaf is None or leaf.kind != "tensor" or "edge" not in str(name):
            continue
        if leaf.axis is not None:
            column = gathering.store.column(leaf.column)
            lengths = gathering.pick.runs(column).lengths
            if node is leaf or leaf.axis:
                return lengths
    return 0


def stored_bytes(gathering: Gathering, part: Leaf | Nest) -> Ints:
    """Sum up the bytes of samples that are built alike."""
    total = np.zeros(len(gathering), np.int64)
    for node in [part] if isinstance(part, Leaf) else part.children:
        if not isinstance(node, Leaf):
            total += stored_bytes(gathering, node)
            continue
        column = gathering.store.column(node.column, stacked=node.axis is None)
        text = node.kind in {"str", "bytes", "json", "bigint"}
        itemsize = 1 if text else leaf_dtype(node).itemsize
        lengths = gathering.pick.runs(column).lengths
        for share in gathering.pick.shares(column):
            in_batch = slice(None) if share.places is None else share.places
            numel = math.prod(share.part.values.shape[1:])
            total[in_batch] += lengths[in_batch] * numel * itemsize
    return total
