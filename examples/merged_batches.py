"""Post-mortem 0: 64 graphs of 25 nodes, a series of 80 steps each, in 4 GiB of MPS."""

import torch
from torch_geometric.data import Data

import loaderkit
from loaderkit.units import format_bytes


class Series(torch.nn.Module):
    """A transformer whose batch is every node of every graph."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(128, 8, 512, batch_first=True)
        self.first = torch.nn.Linear(7, 128)
        self.encoder = torch.nn.TransformerEncoder(layer, 2)

    def forward(self, graph: Data) -> torch.Tensor:
        """Describe each node by its last step."""
        out: torch.Tensor = self.encoder(self.first(graph.x))[:, -1]
        return out


torch.manual_seed(0)
days = [Data(x=torch.zeros(n, 80, 7)) for n in torch.randint(20, 31, (200,)).tolist()]
plan = loaderkit.plan_batch(Series(), days, "mps", limit="4 GiB", batch_size=64)
largest = max(plan.estimate.parts.items(), key=lambda part: part[1])
needs = format_bytes(plan.estimate.peak)
print(f"before: 64 graphs need {needs}, mostly {largest[0]}: out of memory")
print(f"after:  {plan.configurations[0]}")
for gain in plan.savings:
    if gain.saves > plan.estimate.peak // 10:
        print(f"  {str(gain).splitlines()[0]}")
