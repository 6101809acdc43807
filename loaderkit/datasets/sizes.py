"""How large samples are, told by the cache's offsets, and by lists' texts, alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.datasets.decode import damaged, decode_json
from loaderkit.datasets.gathering import Gathering, leaf_dtype
from loaderkit.datasets.structure import Leaf, Nest, is_graph
from loaderkit.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from loaderkit.datasets.base import _Opened

    Ints = NDArray[np.int64]

_TEXTS_AT_ONCE = 8192
"""Lists whose texts are in memory at once: some 10 MB for 200 numbers each."""


@dataclass(frozen=True)
class Sizes:
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


def graph_sizes(opened: _Opened, rows: Ints) -> Sizes:
    """Measure graphs without reading them.

    Args:
        opened: The cache they are in.
        rows: Their numbers in it ``[n]``.

    Returns:
        Nodes, edges and bytes of each.

    Raises:
        DatasetError: A sample is no graph.
    """
    nodes, edges, nbytes = (np.zeros(len(rows), np.int64) for _ in range(3))
    variants = opened.variants(rows)
    for number in np.unique(variants).tolist():
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
            nbytes[at] += _bytes(gathering, part)
    return Sizes(nodes, edges, nbytes)


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
    for number in np.unique(variants).tolist():
        at = np.flatnonzero(variants == number)
        gathering = Gathering(opened.store, rows[at])
        nbytes[at] = _bytes(gathering, opened.structure.variants[number])
    tokens = _tokens(opened)
    return SampleSizes(None if tokens is None else tokens[rows], nbytes)


_ABSENT = -1
"""In place of the length of a field that a sample does not have."""


def _tokens(opened: _Opened) -> Ints | None:
    """Find the length of each sample's longest field, for all samples of a cache.

    Whether a field's length differs is asked of the whole cache, so that a part of a
    dataset tells the same as the dataset.
    """
    lengths = list(_lengths_by_path(opened).values())
    ragged = [each for each in lengths if len(set(np.unique(each)) - {_ABSENT}) > 1]
    chosen = ragged or lengths
    if not chosen:
        return None
    tokens: Ints = np.max(chosen, axis=0)
    return None if (tokens == _ABSENT).any() else tokens


def _lengths_by_path(opened: _Opened) -> dict[str, Ints]:
    """Find the length of every field that has one, in each sample ``[n]``.

    A field may be kept in several columns: as int64 in some samples, say, and as
    float32 in others.  They share its path.
    """
    count = len(opened.store)
    variants = opened.variants(np.arange(count))
    lengths: dict[str, Ints] = {}
    for number in np.unique(variants).tolist():
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
    """Count the items of lists, which are kept as JSON."""
    lengths: list[int] = []
    for start in range(0, len(rows), _TEXTS_AT_ONCE):
        some = Gathering(opened.store, rows[start : start + _TEXTS_AT_ONCE])
        lengths += [_count_items(leaf.column, text) for text in some.texts(leaf)]
    return np.array(lengths, np.int64)


def _count_items(column: str, text: str) -> int:
    """Count the items of a list, or of a tuple, which is kept as ``{"t": [...]}``.

    >>> [_count_items("x", text) for text in ("[3, 1]", "[]", '{"t": ["a,b"]}')]
    [2, 0, 1]
    """
    flat = text.rfind("[") == 0 and '"' not in text and "{" not in text
    if flat and len(text) > len("[]"):
        return text.count(",") + 1  # five times as fast as reading the numbers
    value = decode_json(column, text)
    if not isinstance(value, list | tuple):
        raise damaged(f"{column!r} holds no list, as its samples say")
    return len(value)


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


def _bytes(gathering: Gathering, part: Leaf | Nest) -> Ints:
    """Sum up the bytes of samples that are built alike."""
    total = np.zeros(len(gathering), np.int64)
    for node in [part] if isinstance(part, Leaf) else part.children:
        if not isinstance(node, Leaf):
            total += _bytes(gathering, node)
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
