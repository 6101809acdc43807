"""Every kind of tensor that a batch may hold."""

import warnings

import torch
from torch_geometric import EdgeIndex, Index


def tensors_of_all_kinds():
    """Make one of each kind, by name."""
    pair = [torch.ones(2), torch.ones(3)]
    with warnings.catch_warnings():
        # of torch, which calls some of these beta or prototypes
        warnings.simplefilter("ignore")
        edges = EdgeIndex([[0, 1, 1], [1, 0, 2]], sort_order="row", sparse_size=(2, 3))
        return {
            "dense": torch.ones(3, 5)[:, ::2],
            "empty": torch.empty(0, 7),
            "parameter": torch.nn.Parameter(torch.ones(7)),
            "COO": torch.eye(3).to_sparse(),
            "CSR": torch.eye(4).to_sparse_csr(),
            "CSC": torch.eye(4).to_sparse_csc(),
            "BSR": torch.eye(4).to_sparse_bsr((2, 2)),
            "BSC": torch.eye(4).to_sparse_bsc((2, 2)),
            "nested": torch.nested.nested_tensor(pair),
            "jagged": torch.nested.nested_tensor(pair, layout=torch.jagged),
            "EdgeIndex": edges.fill_cache_(),
            "Index": Index([0, 1, 1], dim_size=2),
        }


KINDS = tuple(tensors_of_all_kinds())
