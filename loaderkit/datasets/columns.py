"""One field of all samples, gathered whole: ``dataset.y``, ``dataset["label"]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loaderkit.arguments import suggest_name
from loaderkit.datasets.decode import decode
from loaderkit.datasets.dict_batches import DictRecipe, collate_samples
from loaderkit.datasets.gathering import Gathering, reader
from loaderkit.datasets.sizes import occurring, stored_bytes
from loaderkit.datasets.structure import COUNTER_KINDS, Leaf, Nest, is_graph
from loaderkit.errors import DatasetError
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from loaderkit.datasets.base import _Opened
    from loaderkit.datasets.classes import ClassRegistry

    Ints = NDArray[np.int64]

_NAMED = {"dict", "dataclass", "named"}
"""Kinds of nests whose parts have names."""


def column_names(opened: _Opened) -> frozenset[str]:
    """Name the fields that some sample of a cache has.

    Args:
        opened: The cache.

    Returns:
        Names of a graph's fields, or of a dict's keys, a dataclass's or a named
        tuple's fields; none of ``HeteroData``, whose fields belong to a type.
    """
    return frozenset(
        name for variant in opened.structure.variants for name in _fields(variant)
    )


def field_names(opened: _Opened) -> frozenset[str]:
    """Name all fields that some sample of a cache has, at any depth."""
    nests = (
        nest
        for variant in opened.structure.variants
        if isinstance(variant, Nest)
        for nest in variant.nests()
    )
    return frozenset(str(key) for nest in nests for key in nest.keys)


def column_rows(opened: _Opened) -> list[tuple[str, str, str]]:
    """Name the columns of a cache with their kinds and dtypes, for people.

    Args:
        opened: The cache.

    Returns:
        Path, kind and dtype of each column that holds values of samples.
    """
    return [
        (str(path), str(kind), str(dtype))
        for path, kind, dtype, *_ in opened.structure.columns.values()
        if kind not in COUNTER_KINDS and "@" not in str(path)
    ]


def check_column(opened: _Opened, rows: Ints, name: str, most_bytes: int) -> None:
    """See that all samples have a field, and that all of it may lie in memory at once.

    Args:
        opened: The cache they are in.
        rows: Their numbers in it ``[n]``.
        name: The field.
        most_bytes: What may be gathered.

    Raises:
        DatasetError: A sample has no such field, or they take more together.
    """
    variants = opened.variants(rows)
    nbytes = 0
    for number in occurring(variants):
        held = rows[variants == number]
        node = _fields(opened.structure.variants[number]).get(name)
        if node is None:
            raise _no_column(opened, number, name, int(held[0]))
        nbytes += _joined_bytes(Gathering(opened.store, held), node)
    if nbytes > most_bytes:
        what = f"Field {name!r} takes {format_bytes(nbytes)} in {len(rows):,} samples."
        why = f"largest_column_bytes is {format_bytes(most_bytes)}: a column is "
        why += "gathered whole"
        fix = "dataset[:1000].column(name), or dataset.largest_column_bytes = "
        raise DatasetError(what, why=why, fix=f"{fix}{nbytes}")


def join_column(
    opened: _Opened, rows: Ints, name: str, classes: ClassRegistry, ragged: str
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
        n: _fields(opened.structure.variants[n])[name] for n in occurring(numbers)
    }
    if len(fields) == 1:
        [node] = fields.values()
        return DictRecipe(opened.store, node, classes, ragged).batch(rows)
    values = [
        decode(fields[number], reader(opened.store, row), classes)
        for row, number in zip(rows.tolist(), numbers.tolist(), strict=True)
    ]
    return collate_samples(values, ragged)


def _fields(variant: Leaf | Nest) -> Mapping[str, Leaf | Nest]:
    """Give the parts of a sample that have names."""
    if isinstance(variant, Leaf):
        return {}
    if is_graph(variant):
        if variant.keys != (None,):
            return {}
        [store] = variant.children
        assert isinstance(store, Nest)
        return {str(name): node for name, node in store.items()}
    if variant.kind not in _NAMED:
        return {}
    return {name: node for name, node in variant.items() if isinstance(name, str)}


def _joined_bytes(gathering: Gathering, node: Leaf | Nest) -> int:
    """Count the bytes of a field of all samples; padded, each takes the longest's."""
    each = stored_bytes(gathering, node)
    if isinstance(node, Leaf) and node.axis is not None:
        return int(each.max()) * len(each)
    return int(each.sum())


def _no_column(opened: _Opened, number: int, name: str, row: int) -> DatasetError:
    variant = opened.structure.variants[number]
    what = f"Sample {row} of {opened.store.path} has no field {name!r}."
    names = sorted(_fields(variant))
    if names:
        why = f"its fields are {', '.join(names)}"
        return DatasetError(what, why=why, fix=suggest_name(name, names))
    if is_graph(variant):
        fix = f"dataset.batch(range(len(dataset)))[node_type].{name}"
        why = f"fields of its graphs belong to a type: {list(variant.keys)}"
        return DatasetError(what, why=why, fix=fix)
    why = "its samples are no dicts, and have no fields with names"
    return DatasetError(what, why=why, fix="dataset.batch(range(len(dataset)))")
