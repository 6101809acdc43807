"""Tensors made of tensors: sparse layouts, EdgeIndex, Index, SparseTensor.

Each is taken apart into plain tensors and numbers and put together again, exactly.
In a batch they go through PyG's own collate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from loaderkit.datasets.structure import COMPOSITE_PARTS
from loaderkit.pyg import import_pyg, loaded_pyg

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_geometric import EdgeIndex, Index

_COMPRESSED = {
    "sparse_csr": torch.sparse_csr,
    "sparse_csc": torch.sparse_csc,
    "sparse_bsr": torch.sparse_bsr,
    "sparse_bsc": torch.sparse_bsc,
}
_BY_ROW = {"sparse_csr", "sparse_bsr"}
KINDS = frozenset(COMPOSITE_PARTS)


def take_apart(value: Any) -> dict[str, Any] | None:
    """Split a composite tensor into plain parts.

    Args:
        value: Any object.

    Returns:
        Its parts by name, and under "kind" what it is; None for other objects.
    """
    if type(value) in {torch.Tensor, torch.nn.Parameter}:
        return _sparse_parts(value.detach())
    pyg = loaded_pyg()
    if pyg is None:
        return None
    if type(value) is pyg.edge_index:
        return _edge_index_parts(value)
    if type(value) is pyg.index:
        size, ordered = value.dim_size, value.is_sorted
        data = value.as_tensor()
        return {"kind": "index", "data": data, "dim_size": size, "is_sorted": ordered}
    if isinstance(value, pyg.sparse_tensor):
        row, col, entries = value.coo()
        sizes = tuple(value.sizes())
        parts = {"row": row, "col": col, "value": entries, "sizes": sizes}
        return {"kind": "sparse_tensor", **parts}
    return None


def put_together(kind: str, parts: Mapping[str, Any], *, checked: bool = False) -> Any:
    """Make the composite tensor that ``take_apart`` split.

    Args:
        kind: One of ``KINDS``.
        parts: Its parts by name; tensors are used, not copied.
        checked: See that indices lie inside the sizes, some 30 us: torch's kernels
            read where an index says, outside of the memory too.

    Returns:
        The composite tensor.

    Raises:
        RuntimeError: The parts contradict each other.
        ValueError: The same.
        TypeError: A part is of another type.
    """
    if kind in {"edge_index", "index"}:
        made = _edge_index(parts) if kind == "edge_index" else _index(parts)
        return made.validate() if checked else made
    if kind == "sparse_tensor":
        row, col, value = parts["row"], parts["col"], parts["value"]
        if checked:
            _check_inside(row, parts["sizes"][0])
            _check_inside(col, parts["sizes"][1])
        return import_pyg().sparse_tensor(
            row=row, col=col, value=value, sparse_sizes=parts["sizes"][:2]
        )
    if kind == "sparse_coo":
        return torch.sparse_coo_tensor(
            parts["indices"],
            parts["values"],
            parts["size"],
            is_coalesced=parts["coalesced"],
            check_invariants=checked,
        )
    return torch.sparse_compressed_tensor(
        parts["compressed"],
        parts["plain"],
        parts["values"],
        parts["size"],
        layout=_COMPRESSED[kind],
        check_invariants=checked,
    )


def _sparse_parts(value: torch.Tensor) -> dict[str, Any] | None:
    size = tuple(value.shape)
    if value.layout is torch.sparse_coo:
        indices, values, ordered = (
            value._indices(),
            value._values(),
            value.is_coalesced(),
        )
        return {
            "kind": "sparse_coo", "indices": indices, "values": values, "size": size,
            "coalesced": ordered,
        }  # fmt: skip
    for kind, layout in _COMPRESSED.items():
        if value.layout is layout:
            row = kind in _BY_ROW
            compressed = value.crow_indices() if row else value.ccol_indices()
            plain = value.col_indices() if row else value.row_indices()
            return {
                "kind": kind, "compressed": compressed, "plain": plain,
                "values": value.values(), "size": size,
            }  # fmt: skip
    return None


def _edge_index_parts(value: EdgeIndex) -> dict[str, Any]:
    order = value.sort_order
    return {
        "kind": "edge_index",
        "data": value.as_tensor(),
        "sparse_size": tuple(value.sparse_size()),
        "sort_order": order and str(getattr(order, "value", order)),
        "is_undirected": value.is_undirected,
    }


def _check_inside(indices: torch.Tensor, size: int) -> None:
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        msg = f"an index lies outside of {size}"
        raise ValueError(msg)


def _index(parts: Mapping[str, Any]) -> Index:
    return import_pyg().index(
        parts["data"], dim_size=parts["dim_size"], is_sorted=parts["is_sorted"]
    )


def _edge_index(parts: Mapping[str, Any]) -> EdgeIndex:
    return import_pyg().edge_index(
        parts["data"],
        sparse_size=parts["sparse_size"],
        sort_order=parts["sort_order"],
        is_undirected=parts["is_undirected"],
    )
