"""Post-mortem 3: out of memory in the 5th epoch, though nothing leaks."""

import tempfile

import torch
from torch_geometric.data import Data
from torch_geometric.nn import GATConv

import loaderkit
from loaderkit.units import format_bytes


def pocket(nodes: int) -> Data:
    """A random graph with 8 edges a node."""
    edges = torch.randint(0, nodes, (2, 8 * nodes))
    return Data(x=torch.zeros(nodes, 32), edge_index=edges)


torch.manual_seed(0)
sizes = torch.randn(800).mul(0.9).exp().mul(100).long().clamp(10, 8000) + 10
model = GATConv(32, 64, heads=4)

with tempfile.TemporaryDirectory() as folder:
    pockets = loaderkit.pack([pocket(n) for n in sizes.tolist()], f"{folder}/p.lk")
    plan = loaderkit.plan_batch(
        model, pockets, "cuda", limit="420 MiB", batch_size=32, epochs=20, margin=0.0
    )
    chances = ", ".join(f"{k}: {p.likely:.0%}" for k, p in plan.chances.items())
    print(f"before: 32 a batch; out of memory within so many epochs: {chances}")

    budget = plan.configurations[0].budget
    loader = loaderkit.build_loader(
        pockets, "cpu", shuffle=True, seed=0, **budget.loader_options()
    )
    batches = [(b.num_graphs, b.num_nodes, b.num_edges) for b in loader]
    worst = format_bytes(int(plan.predict_peaks(batches).max()))
    limit = f"max_nodes={budget.max_nodes:,}"
    print(f"after:  {limit}: {len(batches)} batches, the largest takes {worst}: never")
