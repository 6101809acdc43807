"""How large samples are, told by the cache's offsets, and by lists' texts, alone."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.answers import answer_wrong_names
from loaderkit.datasets.gathering import BatchGather, batch_dtype
from loaderkit.datasets.kinds import LEAF_KINDS, NEST_KINDS, Kind, Length
from loaderkit.datasets.page import size_section
from loaderkit.datasets.plain import count_items
from loaderkit.datasets.structure import Leaf, Nest, is_graph, leaves_of
from loaderkit.errors import DatasetError
from loaderkit.joining import graphs_in
from loaderkit.notebook import card
from loaderkit.pages.document import Page, write_page
from loaderkit.sample_sizes import count_edges, count_nodes, fields_in, lengths_in
from loaderkit.units import count_of, format_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from loaderkit.array_types import Ints
    from loaderkit.datasets.kinds import ColumnSpec
    from loaderkit.datasets.opened import OpenedCache
    from loaderkit.datasets.structure import Node

_TEXTS_AT_ONCE = 8192
"""Lists whose texts are in memory at once: some 10 MB for 200 numbers each."""


class _ComparedByValues:
    """Equal where all fields are, whose arrays dataclasses would ask for one truth."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        ours, theirs = vars(self), vars(other)
        return all(np.array_equal(ours[name], theirs[name]) for name in ours)

    def __hash__(self) -> int:
        # Arrays have no hash; those of equal sizes are as long.
        return hash((type(self), *map(np.size, vars(self).values())))


@answer_wrong_names()
@dataclass(frozen=True, eq=False)
class GraphSizes(_ComparedByValues):
    """How large each sample is."""

    nodes: Ints
    """Nodes of each sample ``[n]``, of all types together; 0 for streams of events
    (``TemporalData``), whose nodes are numbers that no field counts."""
    edges: Ints
    """Edges of each sample ``[n]``, of all types together."""
    bytes: Ints
    """Bytes of each sample's values ``[n]``, as they are in a batch."""

    def __repr__(self) -> str:
        columns = {"nodes": self.nodes, "edges": self.edges}
        return _spread_of(self, columns, self.bytes)

    def _repr_html_(self) -> str:
        columns = {"nodes": self.nodes, "edges": self.edges}
        return _card_of(columns, self.bytes)

    def page(
        self, *, max_nodes: int | None = None, max_edges: int | None = None
    ) -> Page:
        """Show how nodes and edges are spread, with what a batch may hold drawn in.

        Args:
            max_nodes: As for ``build_loader``.
            max_edges: As for ``build_loader``.

        Returns:
            Its title and sections.
        """
        return Page(
            f"Sizes of {count_of(len(self.nodes), 'graphs')}",
            sections=(
                size_section(self.nodes, "nodes", most=max_nodes),
                size_section(self.edges, "edges", most=max_edges),
                size_section(self.bytes, "bytes"),
            ),
        )

    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        max_nodes: int | None = None,
        max_edges: int | None = None,
    ) -> Path:
        """Write one page with pictures, which needs no network and no other file.

        Args:
            path: Of the file; replaced if it is there.
            max_nodes: What a batch may hold, drawn in.
            max_edges: The same, of edges.

        Returns:
            The path.

        Raises:
            NotWrittenError: The file cannot be written; also an ``OSError``.
        """
        return write_page(self.page(max_nodes=max_nodes, max_edges=max_edges), path)


@answer_wrong_names()
@dataclass(frozen=True, eq=False)
class SampleSizes(_ComparedByValues):
    """How large each sample is that is no graph."""

    tokens: Ints | None
    """Length of the longest field of each sample ``[n]``: of tensors, arrays and lists
    whose length differs from sample to sample, or of all of them where none's does.
    None where a sample has no such field."""
    bytes: Ints
    """Bytes of each sample's values ``[n]``, as they are in a batch."""

    def __repr__(self) -> str:
        columns = {} if self.tokens is None else {"tokens": self.tokens}
        return _spread_of(self, columns, self.bytes)

    def _repr_html_(self) -> str:
        columns = {} if self.tokens is None else {"tokens": self.tokens}
        return _card_of(columns, self.bytes)

    def page(self, *, max_tokens: int | None = None) -> Page:
        """Show how tokens and bytes are spread, with what a batch may hold drawn in.

        Args:
            max_tokens: As for ``build_loader``.

        Returns:
            Its title and sections.

        Raises:
            DatasetError: There is a limit of tokens, and no field that has a length.
        """
        sections = [size_section(self.bytes, "bytes")]
        if self.tokens is not None:
            sections.insert(0, size_section(self.tokens, "tokens", most=max_tokens))
        elif max_tokens is not None:
            message = (
                f"max_tokens={max_tokens} cannot be drawn: samples have no tokens."
            )
            why = "tokens are the length of the longest field, and some have none"
            raise DatasetError(message, why=why, fix="leave max_tokens out")
        return Page(
            f"Sizes of {count_of(len(self.bytes), 'samples')}", sections=tuple(sections)
        )

    def to_html(
        self, path: str | os.PathLike[str], *, max_tokens: int | None = None
    ) -> Path:
        """Write one page with pictures, which needs no network and no other file.

        Args:
            path: Of the file; replaced if it is there.
            max_tokens: What a batch may hold, drawn in.

        Returns:
            The path.

        Raises:
            NotWrittenError: The file cannot be written; also an ``OSError``.
            DatasetError: There is a limit of tokens, and no field that has a length.
        """
        return write_page(self.page(max_tokens=max_tokens), path)


def _spread_of(sizes: object, columns: Mapping[str, Ints], sample_bytes: Ints) -> str:
    """Write sizes by their least, middle and most."""
    count = len(sample_bytes)
    parts = [f"{count_of(count, 'samples')}"]
    if count:
        for name, numbers in columns.items():
            low, middle, high = numbers.min(), np.median(numbers), numbers.max()
            parts.append(f"{name} {low:,} to {high:,} (median {middle:,.0f})")
        low, high = int(sample_bytes.min()), int(sample_bytes.max())
        parts.append(f"{format_bytes(low)} to {format_bytes(high)} each")
    return f"{type(sizes).__name__}({', '.join(parts)})"


def _card_of(columns: Mapping[str, Ints], sample_bytes: Ints) -> str:
    """Show sizes in a notebook: how each is spread, and its sum."""
    rows = []
    for name, numbers in {**columns, "bytes": sample_bytes}.items():
        if not len(numbers):
            continue
        least, median, most = (
            int(number) for number in np.percentile(numbers, _SPREAD)
        )
        amounts = (least, median, most, int(numbers.sum()))
        in_words = format_bytes if name == "bytes" else "{:,}".format
        rows.append((name, *map(in_words, amounts)))
    title = f"Sizes of {count_of(len(sample_bytes), 'samples')}"
    return card(
        title,
        heads=("of a sample", "least", "median", "most", "all together"),
        rows=rows,
    )


_SPREAD = (0, 50, 100)
"""Percentiles: the least, the median, the most."""


def graph_sizes(opened: OpenedCache, rows: Ints) -> GraphSizes:
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
    # Of a store as many shards at a time as its mirror may hold.
    for positions in opened.store.positions_at_once(rows):
        sizes_at_once = _graph_sizes_at_once(opened, rows[positions])
        sizes.nodes[positions] = sizes_at_once.nodes
        sizes.edges[positions] = sizes_at_once.edges
        sizes.bytes[positions] = sizes_at_once.bytes
    return sizes


def _graph_sizes_at_once(opened: OpenedCache, rows: Ints) -> GraphSizes:
    """Measure graphs whose shards can all be on local disk at once."""
    count = len(rows)
    nodes, edges, nbytes = (np.zeros(count, np.int64) for _ in range(3))
    variants = opened.variants(rows)
    for number in occurring(variants):
        positions = np.flatnonzero(variants == number)
        graph = opened.structure.variants[number]
        if not is_graph(graph):
            message = f"Sample {rows[positions[0]]} of {opened.store.path} is no graph."
            why = "the sizes of a SafeGraphDataset are its nodes and edges"
            fix = "pack graphs only; or SafeDataset(cache=path).sizes(), in bytes"
            raise DatasetError(message, why=why, fix=fix)
        gather = BatchGather(opened.store, rows[positions])
        for store in graph.children:
            assert isinstance(store, Nest)
            if store.nodes:
                nodes[positions] += gather.per_sample(store.nodes.name)
            edges[positions] += _count_edges(gather, store)
            if graph.cls == _EVENTS:
                edges[positions] += _count_events(gather, store)
            nbytes[positions] += stored_bytes(gather, store)
    return GraphSizes(nodes, edges, nbytes)


def sample_sizes(opened: OpenedCache, rows: Ints) -> SampleSizes:
    """Measure samples that are no graphs, without reading them.

    Args:
        opened: The cache they are in.
        rows: Their numbers in it ``[n]``.

    Returns:
        Tokens and bytes of each.
    """
    nbytes = np.zeros(len(rows), np.int64)
    for positions in opened.store.positions_at_once(rows):
        nbytes[positions] = _sample_bytes_at_once(opened, rows[positions])
    chosen = _token_lengths(opened)
    tokens = np.max([*chosen.values()], axis=0) if chosen else None
    # One sample without any such field, and no limit of tokens could hold for all.
    if tokens is None or (tokens == _ABSENT).any():
        return SampleSizes(None, nbytes)
    return SampleSizes(tokens[rows], nbytes)


def _sample_bytes_at_once(opened: OpenedCache, rows: Ints) -> Ints:
    """Measure samples whose shards can all be on local disk at once."""
    nbytes = np.zeros(len(rows), np.int64)
    variants = opened.variants(rows)
    for number in occurring(variants):
        positions = np.flatnonzero(variants == number)
        gather = BatchGather(opened.store, rows[positions])
        nbytes[positions] = stored_bytes(gather, opened.structure.variants[number])
    return nbytes


_ABSENT = -1
"""In place of the length of a field that a sample does not have."""


def _token_lengths(opened: OpenedCache) -> dict[str, Ints]:
    """Find the lengths that count as tokens, for all samples of a cache, by path.

    Whether a field's length differs is asked of the whole cache, so that a part of a
    dataset tells the same as the dataset.
    """
    lengths = _lengths_by_path(opened)
    ragged = {
        path: path_lengths
        for path, path_lengths in lengths.items()
        if _lengths_differ(path_lengths)
    }
    return ragged or lengths


def _lengths_differ(lengths: Ints) -> bool:
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
class TransformedSizeCounter:
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
            nodes = sum(map(count_nodes, graphs))
            edges = sum(map(count_edges, graphs))
        fields = [field for sample in samples for _, field in fields_in(sample)]
        nbytes = sum(_bytes_of_field(field) for field in fields)
        tokens = self._count_tokens(samples)
        return {"nodes": nodes, "edges": edges, "bytes": nbytes, "tokens": tokens}

    def _count_tokens(self, samples: Sequence[Any]) -> int:
        """Sum up the longest field of each, of those that are ragged here or there."""
        lengths = [dict(lengths_in(sample)) for sample in samples]
        lengths_by_path: dict[str, set[int]] = defaultdict(set)
        for sample_lengths in lengths:
            for path, length in sample_lengths.items():
                lengths_by_path[path].add(length)
        counted = {
            path
            for path, occurring_lengths in lengths_by_path.items()
            if path in self.token_fields or len(occurring_lengths) > 1
        }
        tokens = 0
        for sample_lengths in lengths:
            of_counted = [sample_lengths.get(path, 0) for path in counted]
            tokens += max(of_counted, default=0)
        return tokens


def size_counter(opened: OpenedCache, *, graphs: bool) -> TransformedSizeCounter:
    """Make the counter for samples that are made of those in a cache."""
    token_lengths = () if graphs else _token_lengths(opened)
    return TransformedSizeCounter(frozenset(token_lengths))


def _bytes_of_field(field: object) -> int:
    if isinstance(field, torch.Tensor) and field.layout is not torch.strided:
        return 0  # sparse ones do not say
    return int(getattr(field, "nbytes", 0))


def _lengths_by_path(opened: OpenedCache) -> dict[str, Ints]:
    """Find the length of every field that has one, in each sample ``[n]``.

    A field may be kept in several columns: as int64 in some samples, say, and as
    float32 in others.  They share its path.
    """
    count = len(opened.store)
    all_rows = np.arange(count)
    lengths: dict[str, Ints] = {}
    for rows in opened.store.positions_at_once(all_rows):
        variants = opened.variants(rows)
        for number in occurring(variants):
            of_variant = rows[variants == number]
            gather = BatchGather(opened.store, of_variant)
            variant = opened.structure.variants[number]
            for path, variant_lengths in _lengths_of_fields(gather, variant):
                field = lengths.setdefault(path, np.full(count, _ABSENT, np.int64))
                field[of_variant] = variant_lengths
    return lengths


def _lengths_of_fields(gather: BatchGather, node: Node) -> Iterator[tuple[str, Ints]]:
    """Walk the fields of samples that are built alike."""
    if isinstance(node, Nest):
        if node.kind is Kind.LIST and _is_numbers(node):
            # A sample that is a bare list of numbers has no path, and no column.
            yield "", np.full(len(gather), len(node.children), np.int64)
        elif NEST_KINDS[node.kind].is_container:
            for child in node.children:
                yield from _lengths_of_fields(gather, child)
        return
    column = node.column
    length = LEAF_KINDS[column.kind].length
    if length is Length.FIRST_AXIS and column.ndim:
        yield column.path, _first_axes(gather, column)
    elif length is Length.ITEMS:
        yield column.path, _list_lengths(gather, column)


def _is_numbers(nest: Nest) -> bool:
    number_kinds = {Kind.INT, Kind.FLOAT, Kind.BOOL}
    return all(
        isinstance(child, Leaf) and child.column.kind in number_kinds
        for child in nest.children
    )


def _first_axes(gather: BatchGather, spec: ColumnSpec) -> Ints:
    """Look up the length of a field's first axis in each sample."""
    column = gather.store.column(spec.name)
    lengths = np.empty(len(gather), np.int64)
    for selection in gather.selection.by_part(column):
        column_part, samples = selection.part, selection.samples
        if column_part.shapes is None:
            part_lengths = column_part.locate_rows(samples, selection.shards)[1]
        else:
            # More than one axis differs: the rows are single numbers, and how many
            # there are says nothing of the first axis.
            numbers = samples
            if column_part.rows is not None:
                numbers = column_part.rows.searchsorted(samples)
            part_lengths = column_part.shapes[numbers, 0]
        positions = selection.positions
        lengths[... if positions is None else positions] = part_lengths
    return lengths


def _list_lengths(gather: BatchGather, spec: ColumnSpec) -> Ints:
    """Count the items of lists of plain values."""
    lengths: list[int] = []
    for start in range(0, len(gather), _TEXTS_AT_ONCE):
        rows = gather.rows[start : start + _TEXTS_AT_ONCE]
        texts = BatchGather(gather.store, rows).raw_bytes(spec)
        lengths += [count_items(spec.name, raw) for raw in texts]
    return np.array(lengths, np.int64)


def _count_edges(gather: BatchGather, store: Nest) -> Ints | int:
    """Count edges as PyG does: by the first field whose last or first axis is edges."""
    for name, field in store.items():
        leaf: Node | None = field
        is_edge_index = isinstance(field, Nest) and field.kind is Kind.EDGE_INDEX
        if isinstance(field, Nest):
            leaf = dict(field.items())["data"] if is_edge_index else None
        if not isinstance(leaf, Leaf) or "edge" not in str(name):
            continue
        spec = leaf.column
        if spec.kind is not Kind.TENSOR or spec.axis is None:
            continue
        # The data of an EdgeIndex is a tensor [2, edges] without a graph's rule, so it
        # is kept along its first axis, which says nothing of edges.
        if spec.axis or not is_edge_index:
            column = gather.store.column(spec.name)
            return gather.selection.row_ranges(column).lengths
    return 0


_EVENTS = "torch_geometric.data.temporal:TemporalData"
"""Whose edges are its events, to PyG."""


def _count_events(gather: BatchGather, store: Nest) -> Ints | int:
    """Count the events of a stream as PyG does, by their sources."""
    sources = dict(store.items()).get("src")
    return _first_axes(gather, sources.column) if isinstance(sources, Leaf) else 0


def stored_bytes(gather: BatchGather, node: Node) -> Ints:
    """Sum up the bytes of samples that are built alike."""
    total = np.zeros(len(gather), np.int64)
    for leaf in leaves_of(node):
        spec = leaf.column
        column = gather.store.column(spec.name, stacked=spec.axis is None)
        itemsize = 1 if spec.row.is_text else batch_dtype(spec).itemsize
        lengths = gather.selection.row_ranges(column).lengths
        for selection in gather.selection.by_part(column):
            positions = selection.positions
            in_batch = slice(None) if positions is None else positions
            numel = math.prod(selection.part.values.shape[1:])
            total[in_batch] += lengths[in_batch] * numel * itemsize
    return total
