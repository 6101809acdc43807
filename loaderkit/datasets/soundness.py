"""Hold what a manifest says of samples against what it says of their columns.

Both come from a file that anybody may have written.  A leaf that claims another dtype,
or other axes, than its column would read past its values, or ask for memory that no
byte on disk stands for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.datasets.kinds import COUNTER_KINDS, LEAF_KINDS, Kind
from loaderkit.datasets.structure import KEY, VARIANT, leaves_of
from loaderkit.errors import CacheVersionError, DamagedCacheError
from loaderkit.fixes import PACK_AGAIN

if TYPE_CHECKING:
    from loaderkit.cache.manifest import Manifest
    from loaderkit.cache.shard_table import ColumnSchema, ShardGroup
    from loaderkit.datasets.kinds import ColumnSpec
    from loaderkit.datasets.structure import Structure

_MOST_NODES = 1 << 40
"""A graph of so many nodes takes terabytes; a sum over a batch of these stays below
2**63."""
_MOST_IN_A_ROW = 1 << 40
"""Numbers of a sample in one row.  Chosen: so many take a terabyte, at a byte each."""
_WIDENED = ("<i4", "<i8")
"""Stored in the fewest bytes that hold them (see ``columns.narrowest_dtype``)."""


def check_columns(structure: Structure, manifest: Manifest) -> None:
    """See that every column can be what the structure takes it for.

    Args:
        structure: How columns make up a sample.
        manifest: What the columns are on disk.

    Raises:
        DamagedCacheError: A column is missing, or of another dtype or shape.
        CacheVersionError: A dtype is not one of this torch's.
    """
    dtypes = {name: _stored_dtype(spec) for name, spec in structure.columns.items()}
    for name, kind in ((KEY, Kind.STR), (VARIANT, Kind.VARIANT)):
        if name in structure.columns and structure.columns[name].kind is not kind:
            raise _damaged_manifest(f"column {name!r} is not what it is always for")
    for group in manifest.shards.groups:
        _check_samples(group)
        for name, column in group.schema.columns:
            if name not in structure.columns:
                raise _damaged_manifest(f"nothing says what column {name!r} is for")
            spec = structure.columns[name]
            _check_column(group, column, spec, dtypes[name])
            counter = COUNTER_KINDS.get(spec.kind)
            if counter is not None and counter.is_bounded:
                _check_bounds(group, column, spec, structure)
    stored = manifest.shards.column_names
    for variant in structure.variants:
        for leaf in leaves_of(variant):
            if leaf.column.name not in stored:
                raise _damaged_manifest(f"column {leaf.column.name!r} is in no shard")


def _check_samples(group: ShardGroup) -> None:
    key = group.schema.column.get(KEY)
    if key is None or key.rows is not None:
        raise _damaged_manifest(
            f"{group.files[0]} holds no keys, or not of all samples"
        )
    # A shard without samples takes 2 KB, and every sample at least a key.
    wrong = group.samples > group.bytes
    if wrong.any():
        file = group.files[int(wrong.argmax())]
        raise _damaged_manifest(f"{file} has fewer bytes than samples")


def _check_column(
    group: ShardGroup, column: ColumnSchema, spec: ColumnSpec, dtype: np.dtype[Any]
) -> None:
    is_counter = spec.kind in COUNTER_KINDS
    array = group.schema.array[column.values]
    stored = np.dtype(array.dtype)
    # Wider than the column would be cut off when it is read; counters are never
    # narrowed (``ShardBuffer``), since a batch sums them up as they are.
    is_narrowed = (
        dtype.str in _WIDENED
        and not is_counter
        and stored.kind in "iu"
        and stored.itemsize <= dtype.itemsize
    )
    if stored != dtype and not is_narrowed:
        raise _damaged_manifest(f"column {spec.name!r} holds {stored} for {dtype}")
    for axes in _axes_of_samples(group, column):
        if axes != spec.ndim:
            raise _damaged_manifest(
                f"column {spec.name!r} has values of {axes} axes, not {spec.ndim}"
            )
    if is_counter and not _holds_counts(group, column, spec):
        raise _damaged_manifest(f"column {spec.name!r} is no column of counts")
    if array.axes > 1:
        _check_row_sizes(group, column, spec.name)


def _holds_counts(group: ShardGroup, column: ColumnSchema, spec: ColumnSpec) -> bool:
    """Tell whether each sample has one number, or a pair of them."""
    array = group.schema.array[column.values]
    sizes = group.shape(column.values)
    if column.offsets is not None or array.chunk_index is not None:
        return False
    if spec.ndim != array.axes - 1:
        return False
    # What PyG adds to an edge_index between two types of nodes is a pair.
    is_pair = array.axes == 2 and bool((sizes[1] == 2).all())
    return array.axes == 1 or is_pair


def _check_row_sizes(group: ShardGroup, column: ColumnSchema, name: str) -> None:
    """Refuse rows that would take memory without taking bytes on disk, or too much.

    Rows without any number can be as many as one likes.
    """
    sizes, row_size = group.shape(column.values), group.row_size(column.values)
    is_wrong = (row_size == 0) & (sizes[0] > group.samples_with(name))
    is_wrong |= row_size > _MOST_IN_A_ROW
    if not is_wrong.any():
        return
    shard = int(is_wrong.argmax())
    rows, *shape = (int(size[shard]) for size in sizes)
    if row_size[shard]:
        raise _damaged_manifest(
            f"a row of column {name!r} has the shape {tuple(shape)}"
        )
    raise _damaged_manifest(f"column {name!r} has {rows:,} rows without numbers")


def _axes_of_samples(group: ShardGroup, column: ColumnSchema) -> set[int]:
    """Say how many axes the values of samples have, in all shards of a group."""
    if column.shapes is not None:
        # A row of [m, d] for each sample: d is the number of its axes.
        return set(np.unique(group.shape(column.shapes)[1]).tolist())
    axes = group.schema.array[column.values].axes
    # With offsets the first axis of the values is the samples' own first axis; without,
    # it counts the samples.
    return {axes if column.offsets is not None else axes - 1}


def _check_bounds(
    group: ShardGroup, column: ColumnSchema, spec: ColumnSpec, structure: Structure
) -> None:
    """See that counts lie between bounds, and that the bounds can be.

    A batch makes room for as many numbers as ``@nodes`` says, and ``@variant`` says by
    which variant a sample is read, so both are held against their bounds when read.
    """
    name = spec.name
    # A shard of which no sample has the column has no least value of it either.
    is_used = group.nbytes(column.values) > 0
    if not is_used.any():
        return
    most = _MOST_NODES
    if spec.kind is Kind.VARIANT:
        most = len(structure.variants) - 1
    if not column.bounded:
        raise _damaged_manifest(
            f"nothing says how large the numbers of column {name!r} are"
        )
    low, high = group.low(name), group.high(name)
    wrong = is_used & ~((low >= 0) & (low <= high) & (high <= most))
    if wrong.any():
        at = int(wrong.argmax())
        bounds = f"{int(low[at]):,} to {int(high[at]):,}"
        raise _damaged_manifest(f"the numbers of column {name!r} are from {bounds}")


def _stored_dtype(spec: ColumnSpec) -> np.dtype[Any]:
    """Say in which dtype the values of a column are kept, before they are narrowed."""
    if spec.kind in COUNTER_KINDS:
        return np.dtype("<i8")
    try:
        return LEAF_KINDS[spec.kind].disk_dtype(spec.dtype)
    except (ValueError, KeyError):
        message = f"The samples hold tensors of dtype {spec.dtype!r}."
        why = f"torch {torch.__version__} has none of that name"
        raise CacheVersionError(message, why=why, fix="pip install -U torch") from None


def _damaged_manifest(why: str) -> DamagedCacheError:
    message = "The manifest contradicts itself."
    return DamagedCacheError(message, why=why, fix=PACK_AGAIN)
