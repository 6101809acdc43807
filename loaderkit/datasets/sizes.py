"""How large samples are, told by the cache's offsets alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.datasets.gathering import Gathering, leaf_dtype
from loaderkit.datasets.structure import Leaf

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loaderkit.datasets.base import _Opened

    Ints = NDArray[np.int64]


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

    tokens: Ints
    """Rows of the longest ragged field of each sample ``[n]``; 0 without one."""
    bytes: Ints
    """Bytes of each sample's values ``[n]``, as they are in a batch."""


def graph_sizes(opened: _Opened, rows: Ints) -> Sizes:
    """Measure graphs without reading them.

    Args:
        opened: The cache they are in.
        rows: Their numbers in it ``[n]``.

    Returns:
        Nodes, edges and bytes of each.
    """
    nodes, edges, nbytes = (np.zeros(len(rows), np.int64) for _ in range(3))
    variants = opened.variants(rows)
    for number in np.unique(variants).tolist():
        at = np.flatnonzero(variants == number)
        gathering = Gathering(opened.store, rows[at])
        for part in opened.structure.variants[number].children:
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
    tokens, nbytes = (np.zeros(len(rows), np.int64) for _ in range(2))
    variants = opened.variants(rows)
    for number in np.unique(variants).tolist():
        at = np.flatnonzero(variants == number)
        gathering = Gathering(opened.store, rows[at])
        node = opened.structure.variants[number]
        tokens[at] = _tokens(gathering, node)
        nbytes[at] = _bytes(gathering, node)
    return SampleSizes(tokens, nbytes)


def _tokens(gathering: Gathering, node: Any) -> Any:
    """Count the rows of the longest ragged field."""
    if not isinstance(node, Leaf):
        counts = [_tokens(gathering, child) for child in node.children]
        return np.max(counts, axis=0) if counts else np.zeros(len(gathering), np.int64)
    if node.kind == "tensor" and node.axis is not None:
        column = gathering.store.column(node.column)
        return gathering.pick.runs(column).lengths
    return np.zeros(len(gathering), np.int64)


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


def _bytes(gathering: Gathering, part: Any) -> Any:
    total: Any = 0
    for node in part.children:
        if not isinstance(node, Leaf):
            total = total + (_bytes(gathering, node) if node.children else 0)
            continue
        column = gathering.store.column(node.column, stacked=node.axis is None)
        text = node.kind in {"str", "bytes", "json", "bigint"}
        row_bytes = 1 if text else leaf_dtype(node).itemsize
        shard = gathering.pick.groups[0][0]
        row_bytes *= int(np.prod(column.part(shard).values.shape[1:]))
        total = total + gathering.pick.runs(column).lengths * row_bytes
    return total
