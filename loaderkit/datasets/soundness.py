"""Hold what a manifest says of samples against what it says of their columns.

Both come from a file that anybody may have written.  A leaf that claims another dtype,
or other axes, than its column would read past its values, or ask for memory that no
byte on disk stands for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.datasets.dtypes import carrier, torch_dtype
from loaderkit.datasets.structure import (
    COUNTER_KINDS,
    KEY,
    MOST_VARIANTS,
    NUMBER_KINDS,
    TEXT_KINDS,
    VARIANT,
    Nest,
)
from loaderkit.errors import CacheVersionError, DamagedCacheError

if TYPE_CHECKING:
    from loaderkit.cache.layout import Column, Manifest, Shard
    from loaderkit.datasets.structure import Leaf, Structure

_MOST = {"nodes": 1 << 40, "variant": MOST_VARIANTS}
"""Kinds of counts that decide what is read or made room for, and the largest.  A graph
of 2**40 nodes takes terabytes; a sum over a batch of these stays below 2**63."""
_WIDENED = ("<i4", "<i8")
"""Stored in the fewest bytes that hold them (see ``columns.narrowed``)."""


def check_columns(structure: Structure, manifest: Manifest) -> None:
    """See that every column can be what the structure takes it for.

    Args:
        structure: How columns make up a sample.
        manifest: What the columns are on disk.

    Raises:
        DamagedCacheError: A column is missing, or of another dtype or shape.
        CacheVersionError: A dtype is not one of this torch's.
    """
    dtypes = {name: _stored_dtype(raw) for name, raw in structure.columns.items()}
    for name, wanted in ((KEY, "str"), (VARIANT, "variant")):
        if name in structure.columns and structure.columns[name][1] != wanted:
            raise _damaged(f"column {name!r} is not what it is always for")
    for shard in manifest.shards:
        if KEY not in shard.columns or shard.columns[KEY].rows is not None:
            raise _damaged(f"{shard.file} holds no keys, or not of all samples")
        # A shard without samples takes 2 KB, and every sample at least a key.
        if shard.samples > shard.bytes:
            raise _damaged(f"{shard.file} has fewer bytes than samples")
        for name, column in shard.columns.items():
            if name not in structure.columns:
                raise _damaged(f"nothing says what column {name!r} is for")
            _check_column(shard, name, column, structure.columns[name], dtypes[name])
            if structure.columns[name][1] in _MOST:
                _check_bounds(shard, name, structure)
    stored = {name for shard in manifest.shards for name in shard.columns}
    for variant in structure.variants:
        for leaf in _leaves(variant):
            if leaf.column not in stored:
                raise _damaged(f"column {leaf.column!r} is in no shard")


def _check_column(
    shard: Shard, name: str, column: Column, raw: tuple[Any, ...], dtype: np.dtype[Any]
) -> None:
    _, kind, _, ndim, _ = raw
    array = shard.arrays[column.values]
    stored = np.dtype(array.dtype)
    narrowed = dtype.str in _WIDENED and kind not in COUNTER_KINDS
    narrowed = narrowed and stored.kind in "iu" and stored.itemsize <= dtype.itemsize
    if stored != dtype and not narrowed:
        raise _damaged(f"column {name!r} holds {stored} for {dtype}")
    if column.shapes is not None:
        axes = shard.arrays[column.shapes].shape[1]
    elif column.offsets is not None:
        axes = len(array.shape)
    else:
        axes = len(array.shape) - 1
    if axes != ndim:
        raise _damaged(f"column {name!r} has values of {axes} axes, not {ndim}")
    if kind in COUNTER_KINDS:
        whole = {(): 0, (2,): 1}.get(array.shape[1:]) == ndim
        if column.offsets is not None or not whole or array.offset is None:
            raise _damaged(f"column {name!r} is no column of counts")
    # Rows without any number can be as many as one likes, without a byte on disk.
    if not array.nbytes and array.shape[0] > shard.held(column):
        raise _damaged(f"column {name!r} has {array.shape[0]:,} rows without numbers")
    if math.prod(array.shape[1:]) > 1 << 40:
        raise _damaged(f"a row of column {name!r} has the shape {array.shape[1:]}")


def _check_bounds(shard: Shard, name: str, structure: Structure) -> None:
    """See that counts lie between bounds, and that the bounds can be.

    A batch makes room for as many numbers as ``@nodes`` says, and ``@variant`` says by
    which variant a sample is read, so both are held against their bounds when read.
    """
    kind, column = structure.columns[name][1], shard.columns[name]
    if not shard.arrays[column.values].nbytes:
        return
    most = len(structure.variants) - 1 if kind == "variant" else _MOST[kind]
    if column.low is None or column.high is None:
        raise _damaged(f"nothing says how large the numbers of column {name!r} are")
    if not 0 <= column.low <= column.high <= most:
        bounds = f"{column.low:,} to {column.high:,}"
        raise _damaged(f"the numbers of column {name!r} are from {bounds}")


def _stored_dtype(raw: tuple[Any, ...]) -> np.dtype[Any]:
    """Say in which dtype the values of a column are kept, before they are narrowed."""
    _, kind, name, _, _ = raw
    if kind in TEXT_KINDS:
        return np.dtype("|u1")
    if kind in NUMBER_KINDS:
        return np.dtype(NUMBER_KINDS[kind])
    if kind in COUNTER_KINDS:
        return np.dtype("<i8")
    if kind != "tensor":
        little_endian: np.dtype[Any] = np.dtype(name).newbyteorder("<")
        return little_endian
    try:
        dtype = carrier(torch_dtype(name))
    except (ValueError, KeyError):
        what = f"The samples hold tensors of dtype {name!r}."
        why = f"torch {torch.__version__} has none of that name"
        raise CacheVersionError(what, why=why, fix="pip install -U torch") from None
    return torch.empty(0, dtype=dtype).numpy().dtype


def _leaves(node: Leaf | Nest) -> list[Leaf]:
    if not isinstance(node, Nest):
        return [node]
    return [leaf for child in node.children for leaf in _leaves(child)]


def _damaged(why: str) -> DamagedCacheError:
    what = "The manifest contradicts itself."
    return DamagedCacheError(what, why=why, fix="pack(source, path, overwrite=True)")
