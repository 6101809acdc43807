"""Post-mortem 2: settings for MPS.  One crashes, and the levers are computed."""

import torch

import loaderkit
from loaderkit.budget.environment.allocator_settings import (
    HIGH,
    LOW,
    EnvironmentFacts,
    judge_environment,
)

for words, variables in (
    ("before", {HIGH: "0.8"}),
    ("after", {HIGH: "0.8", LOW: "0.6"}),
):
    found = judge_environment(EnvironmentFacts(variables, (2, 13), "mps", "darwin"))
    print(f"{words}: {found[0] if found else 'both watermarks are set: no finding'}")

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
model = torch.nn.Sequential(
    torch.nn.Embedding(8000, 256),
    torch.nn.TransformerEncoder(layer, 2),
    torch.nn.Linear(256, 8000),
)
texts = [torch.zeros(256, dtype=torch.int64)] * 64
plan = loaderkit.plan_batch(model, texts, "mps", limit="2 GiB", batch_size=4)
print(plan)
