"""Finds a tensor whose autograd graph becomes longer with each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.leaks.finders.items import describe_items
from loaderkit.leaks.growth import Growth
from loaderkit.leaks.retained import MOST_NODES, retained_bytes
from loaderkit.memory.holders import holders_of
from loaderkit.memory.tensors import graph_nodes, tensors_in

if TYPE_CHECKING:
    from loaderkit.leaks.finders.evidence import HeapEvidence

_FEWEST_NODES = 4
_FEWEST_NODES_AN_EPOCH = 2
"""Chosen: a step of a chain adds an addition and what it adds.  A model that is
replaced by a deeper one adds nodes once, fewer than these."""


def find_autograd_chain(evidence: HeapEvidence) -> list[Growth]:
    """Find a tensor whose autograd graph has become longer since.

    Args:
        evidence: What is alive now, and was then.

    Returns:
        The tensor with the longest graph, if it became longer; else nothing.
    """
    tensors = tensors_in(evidence.heap.objects)
    with_graph = [tensor for tensor in tensors if tensor.grad_fn is not None]
    if not with_graph:
        return []
    longest = max(with_graph, key=graph_nodes)
    nodes = graph_nodes(longest)
    more_nodes = nodes - evidence.before.graph_nodes
    fewest = max(_FEWEST_NODES, _FEWEST_NODES_AN_EPOCH * evidence.epochs)
    if more_nodes < fewest:
        return []
    ignore = [tensors, with_graph, *evidence.heap.lists]
    holder = holders_of(longest, most=1, ignore=ignore)[0]
    # Only the first nodes are weighed: what they have saved is alike from step to step.
    node_bytes = retained_bytes([longest]) // min(nodes, MOST_NODES)
    return [
        Growth(
            pattern="graph chain",
            what=describe_items([longest]),
            items="autograd nodes",
            per_epoch=more_nodes / evidence.epochs,
            bytes_per_epoch=node_bytes * more_nodes // evidence.epochs,
            holder=holder,
        )
    ]
