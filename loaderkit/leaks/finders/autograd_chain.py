"""Finds a tensor whose autograd graph becomes longer with each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.leaks.census import count_graph_nodes
from loaderkit.leaks.finders.items import describe_items
from loaderkit.leaks.growth import Growth
from loaderkit.leaks.retained import MOST_NODES, retained_bytes
from loaderkit.memory.holders import holders_of
from loaderkit.memory.tensors import tensors_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loaderkit.leaks.census import Census
    from loaderkit.leaks.finders.evidence import HeapEvidence

_FEWEST_NODES = 4
_FEWEST_NODES_AN_EPOCH = 2
"""Chosen: a step of a chain adds an addition and what it adds.  A model that is
replaced by a deeper one adds nodes once, fewer than these."""


def find_autograd_chain(evidence: HeapEvidence) -> list[Growth]:
    """Find a tensor whose autograd graph has become longer since.

    A graph that a census knows, and that is as long now, is not looked at: what was
    kept before the run, however long, has not grown.

    Args:
        evidence: What is alive now, and was then.

    Returns:
        The tensor with the longest graph, if it became longer; else nothing.
    """
    tensors = tensors_in(evidence.heap.objects)
    counts = count_graph_nodes(tensors)
    nodes_now = dict(
        zip(counts.graph_ids.tolist(), counts.graph_nodes.tolist(), strict=True)
    )
    longest_since = _longest_since(evidence.before, nodes_now)
    if longest_since is None:
        return []
    number, more_nodes = longest_since
    if more_nodes < max(_FEWEST_NODES, _FEWEST_NODES_AN_EPOCH * evidence.epochs):
        return []
    # Each step made it longer, so that it was shorter in every other census as well.
    for census in evidence.other_censuses:
        since = _longest_since(census, nodes_now)
        epochs = evidence.run_epochs - census.epoch
        if since is None or since[1] < _FEWEST_NODES_AN_EPOCH * epochs:
            return []
    [longest] = [tensor for tensor in tensors if id(tensor) == number]
    ignore = [tensors, *evidence.heap.lists]
    holder = holders_of(longest, most=1, ignore=ignore)[0]
    # Only the first nodes are weighed: what they have saved is alike from step to step.
    weighed_nodes = min(nodes_now[number], MOST_NODES)
    node_bytes = retained_bytes([longest]) // weighed_nodes
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


def _longest_since(
    census: Census, nodes_now: Mapping[int, int]
) -> tuple[int, int] | None:
    """Compare the longest graph that is new or has changed with the longest of then.

    Args:
        census: Of then.
        nodes_now: Nodes of each graph that is kept now, by the ``id`` of its tensor.

    Returns:
        The tensor's ``id``, and by how many nodes its graph is longer; None if there is
        none, or nobody knows, since not all graphs of then were walked.
    """
    if not census.has_all_graphs:
        return None
    nodes_then = dict(
        zip(census.graph_ids.tolist(), census.graph_nodes.tolist(), strict=True)
    )
    unchanged = nodes_then.items() & nodes_now.items()
    changed_now = dict(nodes_now.items() - unchanged)
    if not changed_now:
        return None
    changed_then = dict(nodes_then.items() - unchanged)
    number = max(changed_now, key=changed_now.__getitem__)
    nodes = changed_now[number]
    # A loss that is kept beside those of before has as many nodes as they, and no
    # predecessor: it is another graph, and none that grew.
    alike = [count for _, count in unchanged if count <= nodes]
    return number, nodes - max([*changed_then.values(), *alike], default=0)
