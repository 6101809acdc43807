"""Pack graphs you have in a list, and train on whole batches from the cache."""

import tempfile

import torch
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, global_mean_pool

import loaderkit

torch.manual_seed(0)
graphs = []
for _ in range(500):
    nodes = int(torch.randint(5, 15, ()))
    edges = torch.randint(nodes, (2, 3 * nodes))
    graphs.append(Data(x=torch.randn(nodes, 8), edge_index=edges, y=nodes > 9))

with tempfile.TemporaryDirectory() as folder:
    dataset = loaderkit.pack(graphs, f"{folder}/graphs.lk")
    loader = DataLoader(
        dataset, batch_size=32, shuffle=True, collate_fn=dataset.collate
    )
    layer, head = GCNConv(8, 16), torch.nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.01)
    for epoch in range(3):
        losses = []
        for batch in loader:
            hidden = layer(batch.x, batch.edge_index).relu()
            logits = head(global_mean_pool(hidden, batch.batch)).squeeze(1)
            target = batch.y.float()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}")
