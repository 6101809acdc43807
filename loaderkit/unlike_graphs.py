"""In which field graphs of a batch are unlike, so that PyG cannot join them.

PyG raises what torch says of the tensors, which names no field.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from loaderkit.pyg import import_pyg, is_pyg_data
from loaderkit.value_words import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

_FORMS = ((torch.Tensor,), (Mapping,), (list, tuple), (int, float))
"""Classes of values; PyG joins those of one form alike."""


class UnlikeField(NamedTuple):
    """A field of graphs that PyG does not join."""

    words: str
    """In what it is unlike."""
    fix: str
    """What to do."""


def find_unlike_field(
    samples: Sequence[Any], exclude_keys: Collection[str] = ()
) -> UnlikeField | None:
    """Find the first field of graphs that PyG cannot join.

    Args:
        samples: Those of a batch, at least one: graphs, or nests with graphs.
        exclude_keys: Fields that are left out.

    Returns:
        None where there is no graph, or where PyG joins each field by itself.
    """
    for path, graphs in _graphs_at_places(samples, ""):
        names = {str(name) for graph in graphs for name in graph.keys()}  # noqa: SIM118 -- no dict
        asked = [
            name for name in map(str, graphs[0].keys()) if name not in exclude_keys
        ]
        # PyG is asked, as classes of graphs may have rules of their own.
        unjoined = [name for name in asked if not _are_joined(graphs, names - {name})]
        if not unjoined:
            continue
        # What is added to indices depends on other fields: where these are unlike, they
        # are at fault.
        for name in [*unjoined, *asked]:
            words = _difference_of_field(graphs, name, path)
            if words is not None:
                return _to_unlike(words, name, graphs)
        name = unjoined[0]
        words = f"{path}[{name!r}] is such that PyG does not join it"
        return _to_unlike(words, name, graphs)
    return None


def _to_unlike(words: str, name: str, graphs: Sequence[Any]) -> UnlikeField:
    fix = "give all graphs one form of it in load() or transform"
    # exclude_keys knows names and no types: it would take those of other types, too.
    stores = getattr(graphs[0], "stores", [graphs[0]])
    if sum(name in store for store in stores) > 1:
        return UnlikeField(words, fix)
    fix = f"{fix}; or exclude_keys=[{name!r}] leaves it out of batches"
    return UnlikeField(words, fix)


def _graphs_at_places(
    samples: Sequence[Any], path: str
) -> Iterator[tuple[str, Sequence[Any]]]:
    """Find graphs that stand at one place of all samples."""
    first = samples[0]
    keys: Collection[Any] = ()
    if is_pyg_data(first):
        if all(map(is_pyg_data, samples)):
            yield path, samples
    elif isinstance(first, Mapping) and all(isinstance(s, Mapping) for s in samples):
        keys = [key for key in first if all(key in sample for sample in samples)]
    elif isinstance(first, list | tuple) and all(
        isinstance(sample, list | tuple) for sample in samples
    ):
        keys = range(min(map(len, samples)))
    for key in keys:
        values = [sample[key] for sample in samples]
        yield from _graphs_at_places(values, f"{path}[{key!r}]")


def _are_joined(graphs: Sequence[Any], exclude_keys: set[str]) -> bool:
    try:
        # Of nodes that it cannot count without the other fields.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_pyg().collater(None, [], sorted(exclude_keys))(list(graphs))
    except Exception:  # noqa: BLE001 -- __inc__ and __cat_dim__ may be the user's
        return False
    return True


def _difference_of_field(graphs: Sequence[Any], name: str, path: str) -> str | None:
    """Say in what a field is unlike; in graphs of several types, which one's."""
    stores: list[tuple[Any, Any]] = [(None, graphs[0])]
    if hasattr(graphs[0], "node_items"):  # HeteroData
        stores = [*graphs[0].node_items(), *graphs[0].edge_items()]
    for of_type, store in stores:
        shown = path if of_type is None else f"{path}[{of_type!r}]"
        parts = [graph if of_type is None else graph[of_type] for graph in graphs]
        if all(name in part for part in parts):
            values = [part[name] for part in parts]
            axis_of = functools.partial(_joined_axis, graphs[0], store)
            difference = _difference_of(values, f"{shown}[{name!r}]", name, axis_of)
            if difference is not None:
                return difference
    return None


def _joined_axis(graph: Any, store: Any, name: str, value: torch.Tensor) -> int | None:
    axis: int | None = graph.__cat_dim__(name, value, store)
    return axis


def _difference_of(
    values: Sequence[Any],
    path: str,
    name: str,
    axis_of: Callable[[str, torch.Tensor], int | None],
) -> str | None:
    """Say in what the values of a field are unlike.

    Args:
        values: Of each graph.
        path: What leads to them, as code writes it.
        name: By which PyG decides along which axis they are joined.
        axis_of: Gives that axis of a tensor; None where they are stacked.
    """
    first = values[0]
    for value in values:
        if _form_of(value) is not _form_of(first):
            kinds = f"{kind_of(first)} in one graph and {kind_of(value)} in another"
            return f"{path} is {kinds}"
    if isinstance(first, torch.Tensor):
        axis = axis_of(name, first) if first.dim() else None
        return _difference_of_shapes(
            [list(value.shape) for value in values], path, axis
        )
    keys: Collection[Any] = ()
    if isinstance(first, Mapping):
        keys = list(first)
        if any(value.keys() != first.keys() for value in values):
            return f"{path} has not the same keys in all graphs"
    elif isinstance(first, list | tuple):
        keys = range(len(first))
        if any(len(value) != len(first) for value in values):
            return f"{path} has not the same number of items in all graphs"
    for key in keys:
        # PyG goes by the key of an inner dict, and by the name above an inner list.
        inner_name = str(key) if isinstance(first, Mapping) else name
        inner = [value[key] for value in values]
        difference = _difference_of(inner, f"{path}[{key!r}]", inner_name, axis_of)
        if difference is not None:
            return difference
    return None


def _form_of(value: object) -> Any:
    """Give the classes by which PyG decides how values are joined."""
    return next((form for form in _FORMS if isinstance(value, form)), type(value))


def _difference_of_shapes(
    shapes: Sequence[list[int]], path: str, axis: int | None
) -> str | None:
    """Say in which axes shapes differ that must be equal.

    >>> _difference_of_shapes([[3, 2], [5, 2]], "['x']", 0)
    >>> _difference_of_shapes([[3, 2], [3, 4]], "x", 0)
    'x has shapes [3, 2] and [3, 4], and is joined along axis 0, equal in all others'
    >>> _difference_of_shapes([[], [1]], "['y']", None)
    "['y'] has shapes [] and [1], and is stacked, which takes one shape"
    """
    first = shapes[0]
    for shape in shapes:
        text = f"{path} has shapes {first} and {shape}, and is "
        if axis is None and shape != first:
            return f"{text}stacked, which takes one shape"
        if axis is None:
            continue
        if len(shape) != len(first):
            return f"{text}joined, which takes one number of axes"
        joined = axis % len(first)
        pairs = enumerate(zip(first, shape, strict=True))
        if any(one != other for number, (one, other) in pairs if number != joined):
            return f"{text}joined along axis {joined}, equal in all others"
    return None
