"""Tensors made of tensors: sparse layouts, EdgeIndex, Index, SparseTensor.

Each is flattened into plain tensors and numbers, and made of them again, exactly.
``kinds.py`` has a row for each.  In a batch they go through PyG's own collate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from loaderkit.pyg import import_pyg, loaded_pyg

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_geometric import EdgeIndex, Index
    from torch_geometric.typing import SparseTensor

    Parts = Mapping[str, Any]
    """The parts of a composite tensor, by name."""

EDGE_INDEX_PARTS = frozenset({"data", "sparse_size", "sort_order", "is_undirected"})
INDEX_PARTS = frozenset({"data", "dim_size", "is_sorted"})
SPARSE_TENSOR_PARTS = frozenset({"row", "col", "value", "sizes"})
COO_PARTS = frozenset({"indices", "values", "size", "coalesced"})
COMPRESSED_PARTS = frozenset({"compressed", "plain", "values", "size"})

_COMPRESSED_BY_ROW = {torch.sparse_csr, torch.sparse_bsr}


def is_edge_index(value: object) -> bool:
    """Tell whether a value is PyG's ``EdgeIndex``, and of no subclass."""
    pyg = loaded_pyg()
    return pyg is not None and type(value) is pyg.edge_index


def edge_index_parts(value: EdgeIndex) -> dict[str, Any]:
    """Flatten an ``EdgeIndex``."""
    # An enum or a text, by PyG's release; kept as a text, which both take.
    order = value.sort_order
    return {
        "data": value.as_tensor(),
        "sparse_size": tuple(value.sparse_size()),
        "sort_order": order and str(getattr(order, "value", order)),
        "is_undirected": value.is_undirected,
    }


def make_edge_index(parts: Parts, *, checked: bool) -> EdgeIndex:
    """Make an ``EdgeIndex``; ``checked`` sees that its indices lie inside its size."""
    edge_index = import_pyg().edge_index(
        parts["data"],
        sparse_size=parts["sparse_size"],
        sort_order=parts["sort_order"],
        is_undirected=parts["is_undirected"],
    )
    return edge_index.validate() if checked else edge_index


def is_index(value: object) -> bool:
    """Tell whether a value is PyG's ``Index``, and of no subclass."""
    pyg = loaded_pyg()
    return pyg is not None and type(value) is pyg.index


def index_parts(value: Index) -> dict[str, Any]:
    """Flatten an ``Index``."""
    return {
        "data": value.as_tensor(),
        "dim_size": value.dim_size,
        "is_sorted": value.is_sorted,
    }


def make_index(parts: Parts, *, checked: bool) -> Index:
    """Make an ``Index``; ``checked`` sees that it lies inside its size."""
    index = import_pyg().index(
        parts["data"], dim_size=parts["dim_size"], is_sorted=parts["is_sorted"]
    )
    return index.validate() if checked else index


def is_sparse_tensor(value: object) -> bool:
    """Tell whether a value is a ``SparseTensor`` of torch-sparse, or of PyG."""
    pyg = loaded_pyg()
    return pyg is not None and isinstance(value, pyg.sparse_tensor)


def sparse_tensor_parts(value: SparseTensor) -> dict[str, Any]:
    """Flatten a ``SparseTensor``."""
    row, col, entries = value.coo()
    sizes = tuple(value.sizes())
    return {"row": row, "col": col, "value": entries, "sizes": sizes}


def make_sparse_tensor(parts: Parts, *, checked: bool) -> Any:
    """Make a ``SparseTensor``; ``checked`` sees that its indices lie inside its size.

    torch-sparse does not look, and its kernels read where an index says.
    """
    row, col, value = parts["row"], parts["col"], parts["value"]
    if checked:
        _check_inside(row, parts["sizes"][0])
        _check_inside(col, parts["sizes"][1])
    # Further sizes are those of the values' own axes.
    return import_pyg().sparse_tensor(
        row=row, col=col, value=value, sparse_sizes=parts["sizes"][:2]
    )


def has_layout(layout: torch.layout) -> Callable[[object], bool]:
    """Make the function that knows torch's own tensors of a layout."""

    def is_such_a_tensor(value: object) -> bool:
        # What else a subclass holds is not known.
        if type(value) not in {torch.Tensor, torch.nn.Parameter}:
            return False
        return isinstance(value, torch.Tensor) and value.layout is layout

    return is_such_a_tensor


def coo_parts(value: torch.Tensor) -> dict[str, Any]:
    """Flatten a sparse tensor in COO layout."""
    value = value.detach()
    return {
        # .indices() and .values() refuse tensors that are not coalesced.
        "indices": value._indices(),
        "values": value._values(),
        "size": tuple(value.shape),
        "coalesced": value.is_coalesced(),
    }


def make_coo(parts: Parts, *, checked: bool) -> torch.Tensor:
    """Make a sparse tensor in COO layout."""
    # That it is coalesced is told and not found out: coalescing would sort it.
    return torch.sparse_coo_tensor(
        parts["indices"],
        parts["values"],
        parts["size"],
        is_coalesced=parts["coalesced"],
        check_invariants=checked,
    )


def compressed_parts(value: torch.Tensor) -> dict[str, Any]:
    """Flatten a sparse tensor in CSR, CSC, BSR or BSC layout."""
    value = value.detach()
    if value.layout in _COMPRESSED_BY_ROW:
        compressed, plain = value.crow_indices(), value.col_indices()
    else:
        compressed, plain = value.ccol_indices(), value.row_indices()
    return {
        "compressed": compressed,
        "plain": plain,
        "values": value.values(),
        "size": tuple(value.shape),
    }


def make_compressed(
    parts: Parts, *, checked: bool, layout: torch.layout
) -> torch.Tensor:
    """Make a sparse tensor in a compressed layout."""
    return torch.sparse_compressed_tensor(
        parts["compressed"],
        parts["plain"],
        parts["values"],
        parts["size"],
        layout=layout,
        check_invariants=checked,
    )


def _check_inside(indices: torch.Tensor, size: int) -> None:
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        msg = f"an index lies outside of {size}"
        raise ValueError(msg)
