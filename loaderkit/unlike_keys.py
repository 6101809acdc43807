"""Samples of a batch that have other keys than each other.

torch and PyG join the fields of the first sample: what only others have would be left
out in silence, and which sample is the first is a matter of the order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from loaderkit.pyg import import_pyg, is_pyg_data

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from collections.abc import Set as AbstractSet

_WITHOUT_KEYS = frozenset(
    {torch.Tensor, np.ndarray, int, float, bool, str, bytes, type(None)}
)
"""What most fields are."""
FIELDS_OF_BATCHES = frozenset({"batch", "ptr", "num_nodes", "_num_nodes"})
"""Fields of graphs that PyG makes anew, or asks each graph for."""


class UnlikeKey(NamedTuple):
    """A field that some samples of a batch have, and others lack."""

    field: str
    """As code writes it, such as "['meta']['label']"."""
    present_in: int
    """A sample that has it, by its place in the batch."""
    absent_in: int
    """One that has not."""
    of_graphs: tuple[str, ...] = ()
    """The names of all such fields, where they are those of a graph."""
    of_other_types: tuple[str, ...] = ()
    """Those of them that a type has, too, whose fields are alike in all graphs."""
    kinds: tuple[str, str] | None = None
    """What the two graphs are, where one is of a kind that has other fields."""

    @property
    def fix(self) -> str:
        """What to do."""
        if self.kinds is not None:
            return (
                f"a loader for each kind: [graph for graph in graphs if type(graph) is "
                f"{self.kinds[0]}]; or give all graphs one class in load() or transform"
            )
        if self.of_other_types:
            # exclude_keys knows names and no types: it would take these from all types.
            fix = "give all graphs the same fields in load() or transform"
            if "edge_index" in self.of_other_types:
                fix += ", an empty one where there are no edges: edge_index = "
                fix += "torch.empty(2, 0, dtype=torch.int64)"
            return fix
        if self.of_graphs:
            fix = f"exclude_keys={list(self.of_graphs)} leaves them out of all batches;"
            return f"{fix} or give all graphs the same fields in load() or transform"
        fix = "give all samples the same keys in load() or transform; or "
        return f"{fix}collate_fn=... that joins them"


def find_unlike_key(
    samples: Sequence[Any], exclude_keys: Collection[str] = ()
) -> UnlikeKey | None:
    """Find a key that is not in all samples, at any depth.

    Args:
        samples: Those of a batch, at least one: nests of mappings, lists, tuples,
            dataclasses and graphs.
        exclude_keys: Fields of graphs that are left out.

    Returns:
        The first; None where all have the same, or differ in their kinds, which is
        told by who joins them.

    >>> find_unlike_key([{"x": 1}, {"x": 1, "y": 2}])[:3]
    ("['y']", 1, 0)
    """
    return _find_in_nests(samples, "", frozenset(exclude_keys))


def _find_in_nests(
    samples: Sequence[Any], path: str, exclude_keys: frozenset[str]
) -> UnlikeKey | None:
    first = samples[0]
    kind = type(first)
    if kind in _WITHOUT_KEYS:
        return None
    # Of kinds that differ nothing is said here: whoever joins them raises, and names
    # the kinds.
    if is_pyg_data(first):
        are_graphs = all(map(is_pyg_data, samples))
        return _find_in_graphs(samples, path, exclude_keys) if are_graphs else None
    if isinstance(first, Mapping):
        kinds = set(map(type, samples))
        # As nearly always they are all dicts: of others an abstract class is asked.
        if kinds != {dict} and not all(issubclass(kind, Mapping) for kind in kinds):
            return None
        unlike = _find_in_mappings(samples, path)
        if unlike is not None:
            return unlike
        pairs = [
            (f"{path}[{key!r}]", key)
            for key, value in first.items()
            if type(value) not in _WITHOUT_KEYS
        ]
        return _find_in_parts(samples, pairs, exclude_keys)
    if isinstance(first, list | tuple):
        # Lists of several lengths are no places with names: which item of the longer
        # one the shorter lacks nobody can tell.
        if any(
            type(sample) is not kind or len(sample) != len(first) for sample in samples
        ):
            return None
        pairs = [
            (f"{path}[{number}]", number)
            for number, item in enumerate(first)
            if type(item) not in _WITHOUT_KEYS
        ]
        return _find_in_parts(samples, pairs, exclude_keys)
    if dataclasses.is_dataclass(first) and all(type(s) is kind for s in samples):
        attributes = [vars(sample) for sample in samples if hasattr(sample, "__dict__")]
        if len(attributes) == len(samples):
            pairs = [(f"{path}.{name}", name) for name in attributes[0]]
            return _find_in_parts(attributes, pairs, exclude_keys)
    return None


def _find_in_parts(
    samples: Sequence[Any],
    paths_and_keys: Sequence[tuple[str, Any]],
    exclude_keys: frozenset[str],
) -> UnlikeKey | None:
    for path, key in paths_and_keys:
        if isinstance(samples[0], dict) and any(key not in s for s in samples):
            continue  # a Counter answers for what it lacks
        unlike = _find_in_nests([sample[key] for sample in samples], path, exclude_keys)
        if unlike is not None:
            return unlike
    return None


def _find_in_mappings(
    samples: Sequence[Mapping[Any, Any]], path: str
) -> UnlikeKey | None:
    first = samples[0].keys()
    # What such a class lacks it answers for, as a Counter does with 0.
    answers_all = hasattr(type(samples[0]), "__missing__")
    for number, sample in enumerate(samples):
        keys = sample.keys()
        if keys == first:
            continue
        if keys - first:
            return UnlikeKey(f"{path}{_key_in_code(keys - first)}", number, 0)
        if not answers_all:
            return UnlikeKey(f"{path}{_key_in_code(first - keys)}", 0, number)
    return None


def _find_in_graphs(
    graphs: Sequence[Any], path: str, exclude_keys: frozenset[str]
) -> UnlikeKey | None:
    kind = _kind_of_graph(graphs[0])
    for number, graph in enumerate(graphs):
        # Before their fields: with a HeteroData first, PyG drops all of a Data.
        if _kind_of_graph(graph) is not kind:
            kinds = (type(graphs[0]).__name__, type(graph).__name__)
            return UnlikeKey(path, 0, number, kinds=kinds)
    first = _fields_of_graph(graphs[0], exclude_keys)
    for number, graph in enumerate(graphs):
        fields = _fields_of_graph(graph, exclude_keys)
        if fields == first:
            continue
        names = tuple(sorted({name for _, name in fields ^ first}))
        names_in_both = {name for _, name in fields & first}
        also_alike = tuple(name for name in names if name in names_in_both)
        added = fields - first
        present, absent = (number, 0) if added else (0, number)
        # By repr: keys of node types are texts and of edge types triples, which cannot
        # be compared with each other; and one message for one fault, run after run.
        of_type, name = min(added or first - fields, key=repr)
        shown = "" if of_type is None else f"[{of_type!r}]"
        return UnlikeKey(f"{path}{shown}[{name!r}]", present, absent, names, also_alike)
    return None


def _kind_of_graph(graph: Any) -> Any:
    """Give the class of PyG's that says where a graph has its fields."""
    pyg = import_pyg()
    kinds = (pyg.hetero_data, pyg.temporal_data)
    return next((kind for kind in kinds if isinstance(graph, kind)), pyg.data)


def _fields_of_graph(graph: Any, exclude_keys: frozenset[str]) -> set[tuple[Any, str]]:
    """Name the fields of a graph, each with its node or edge type, if there are any."""
    stores: list[tuple[Any, Any]] = [(None, graph)]
    if hasattr(graph, "node_items"):  # HeteroData, whose keys() are those of any type
        stores = [*graph.node_items(), *graph.edge_items()]
    left_out = exclude_keys | FIELDS_OF_BATCHES
    return {
        (of_type, name)
        for of_type, store in stores
        for name in map(str, store.keys())
        if name not in left_out
    }


def _key_in_code(keys: AbstractSet[Any]) -> str:
    return f"[{min(keys, key=repr)!r}]"


class NoneBeside(NamedTuple):
    """A field that is None in one sample of a batch, and something in another."""

    field: str
    """As code writes it, such as "['meta']['label']"; empty for whole samples."""
    none_in: int
    """The first sample in which it is None, by its place in the batch."""
    beside: int
    """The first in which it is not."""
    value: Any
    """What it is there."""


def find_none(samples: Sequence[Any], field: str = "") -> NoneBeside | None:
    """Find a field that is None in some samples of a batch, and not in all.

    Args:
        samples: Those of a batch: nests of mappings, lists, tuples and others.
        field: What leads to them, as code writes it.

    Returns:
        The first that stands beside what is joined; one beside numbers or texts, which
        make a list, where there is no other.

    >>> find_none([{"x": 1, "y": {"z": [2]}}, {"x": 1, "y": {"z": None}}])[:3]
    ("['y']['z']", 1, 0)
    """
    nones = [position for position, sample in enumerate(samples) if sample is None]
    others = [position for position, sample in enumerate(samples) if sample is not None]
    if not others:
        return None
    first = samples[others[0]]
    if nones:
        return NoneBeside(field, nones[0], others[0], first)
    in_fields: list[NoneBeside] = []
    for name, values in _values_by_field(samples):
        none = find_none(values, f"{field}[{name!r}]")
        if none is not None:
            in_fields.append(none)
    for none in in_fields:
        if not isinstance(none.value, int | float | str | bytes):
            return none
    return in_fields[0] if in_fields else None


def _values_by_field(samples: Sequence[Any]) -> Iterator[tuple[object, Sequence[Any]]]:
    """Give the fields that all samples have, with the value of each sample."""
    first = samples[0]
    if all(isinstance(sample, Mapping) for sample in samples):
        for key in first:
            if all(key in sample for sample in samples):
                yield key, [sample[key] for sample in samples]
        return
    if not all(isinstance(sample, list | tuple) for sample in samples):
        return
    if all(len(sample) == len(first) for sample in samples):
        yield from enumerate(zip(*samples, strict=True))


def find_only_none(samples: Sequence[Any], field: str = "") -> str | None:
    """Find a field that is None in all samples of a batch.

    Args:
        samples: Those of a batch: nests of mappings, lists, tuples and others.
        field: What leads to them, as code writes it.

    Returns:
        The first, as code writes it, empty for whole samples; None if there is none.

    >>> find_only_none([{"x": 1, "y": [2, None]}, {"x": 1, "y": [3, None]}])
    "['y'][1]"
    """
    first = samples[0]
    if all(sample is None for sample in samples):
        return field
    keys: list[Any] = []
    if isinstance(first, Mapping) and all(isinstance(s, Mapping) for s in samples):
        keys = [key for key in first if all(key in sample for sample in samples)]
    elif isinstance(first, list | tuple) and all(
        isinstance(sample, list | tuple) and len(sample) == len(first)
        for sample in samples
    ):
        keys = list(range(len(first)))
    for key in keys:
        values = [sample[key] for sample in samples]
        only_none = find_only_none(values, f"{field}[{key!r}]")
        if only_none is not None:
            return only_none
    return None
