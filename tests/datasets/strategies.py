"""Lists of samples that are alike in schema and differ in everything else."""

import torch
from hypothesis import strategies as st
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Data, HeteroData

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


class Paired(Data):
    """A pair of graphs with increments of its own, as PyG's documentation shows."""

    def __inc__(self, key, value, *args, **kwargs):
        if key == "edge_index_s":
            return self.x_s.size(0)
        if key == "edge_index_t":
            return self.x_t.size(0)
        return super().__inc__(key, value, *args, **kwargs)

    def __cat_dim__(self, key, value, *args, **kwargs):
        return None if key == "graph_level" else super().__cat_dim__(key, value, *args)


def values(dtype, *shape):
    """Random numbers of any dtype, from torch's own generator."""
    return torch.randint(-3, 9, shape).to(dtype)


def edges(nodes, count, target_nodes=None):
    """Random edges; from nodes of one type to those of another where it is given."""
    if nodes == 0:
        return torch.empty(2, 0, dtype=torch.long)
    sources = torch.randint(nodes, (count,))
    targets = torch.randint(target_nodes or nodes, (count,))
    return torch.stack([sources, targets])


# What a field of a graph may be, by name: a function of (number, nodes, dtype).
FIELDS = {
    "x": lambda i, n, d: values(d, n, 3),
    "pos": lambda i, n, d: torch.randn(n, 2),
    "z": lambda i, n, d: values(torch.int64, n),
    "edge_attr": lambda i, n, d: values(d, 2 * i % 7, 2),
    "edge_weight": lambda i, n, d: torch.randn(i % 3).requires_grad_(),
    "y": lambda i, n, d: values(d, 1, 4),
    "scalar": lambda i, n, d: values(d),
    "stride": lambda i, n, d: torch.randn(4, n).t(),
    "expanded": lambda i, n, d: torch.ones(1, 3).expand(n, 3),
    "face": lambda i, n, d: torch.randint(max(n, 1), (3, i % 3)),
    "my_index": lambda i, n, d: i,
    "index_mask": lambda i, n, d: torch.ones(n, dtype=torch.bool),
    "small_index": lambda i, n, d: torch.zeros(n, dtype=torch.int32),
    "float_index": lambda i, n, d: torch.randn(n),
    "x_batch": lambda i, n, d: torch.zeros(n + 1, dtype=torch.long),
    "name": lambda i, n, d: f"graph {i} é",
    "ascii": lambda i, n, d: "abc"[: i % 4],
    "k": lambda i, n, d: i * 1000,
    "real": lambda i, n, d: i / 7,
    "flag": lambda i, n, d: i % 2 == 0,
    "words": lambda i, n, d: ["a", "b"][: i % 3],
    "nested": lambda i, n, d: {"a": values(d, n), "b": [torch.ones(2 + i % 3), "s"]},
    "tensors": lambda i, n, d: [values(d, n, 1), torch.zeros(1)],
    "pair": lambda i, n, d: (1, i),
    "array": lambda i, n, d: torch.randn(n).numpy(),
    "adj": lambda i, n, d: torch.eye(n).to_sparse(),
    "csr": lambda i, n, d: torch.eye(n + 1).to_sparse_csr(),
    "edges_index": lambda i, n, d: EdgeIndex(edges(n, 4), sparse_size=(n, n)),
    "cluster_index": lambda i, n, d: Index(
        torch.zeros(n, dtype=torch.long), dim_size=1
    ),
    "optional": lambda i, n, d: {"optional": torch.ones(1)} if i % 2 else {},
    "sometimes": lambda i, n, d: torch.ones(n) if i % 3 else torch.ones(n).double(),
}


@st.composite
def graphs(draw):
    """A list of ``Data`` with the same fields."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=7))
    dtype = draw(st.sampled_from(DTYPES))
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))
    torch.manual_seed(draw(st.integers(0, 99)))
    explicit_num_nodes = draw(st.booleans())
    with_edges = draw(st.booleans())
    graphs = []
    for i, nodes in enumerate(sizes):
        data = Data()
        # PyG infers the number of nodes from x or pos; without them it must be said.
        if explicit_num_nodes or not {"x", "pos"} & set(names):
            data.num_nodes = nodes
        if with_edges:
            data.edge_index = edges(nodes, 5 + i)
        for name in names:
            data[name] = FIELDS[name](i, nodes, dtype)
        graphs.append(data)
    return graphs


@st.composite
def hetero_graphs(draw):
    """A list of ``HeteroData`` with the same stores and fields."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=7))
    dtype = draw(st.sampled_from(DTYPES))
    bonds_have_fields = draw(st.booleans())
    int32_edges = draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 99)))
    graphs = []
    for i, nodes in enumerate(sizes):
        data = HeteroData()
        bonds = nodes % 3 + 1
        data["atom"].x = values(dtype, nodes, 2)
        data["atom"].node_index = torch.arange(nodes)
        if bonds_have_fields:
            data["bond"].x = torch.randn(bonds, 1)
            data["bond"].tag = f"t{i}"
        else:
            data["bond"].num_nodes = bonds
        atoms_in_bonds = edges(nodes, 4 + i, bonds)
        if int32_edges:
            atoms_in_bonds = atoms_in_bonds.int()
        data["atom", "in", "bond"].edge_index = atoms_in_bonds
        data["bond", "of", "atom"].edge_index = edges(bonds, i, nodes)
        data["bond", "of", "atom"].edge_attr = torch.randn(i if nodes else 0, 2)
        data.y = torch.tensor([float(i)])
        data.k = i
        graphs.append(data)
    return graphs


@st.composite
def paired_graphs(draw):
    """A list of ``Paired``."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=7))
    return [
        Paired(
            x_s=torch.randn(nodes, 2),
            edge_index_s=edges(nodes, 3),
            x_t=torch.randn(nodes + 1, 2),
            edge_index_t=edges(nodes + 1, nodes),
            graph_level=torch.randn(3),
            num_nodes=nodes,
        )
        for nodes in sizes
    ]
