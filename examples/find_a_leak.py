"""Train with a leak and without: the detector names the list, the line and the fix."""

import torch

import loaderkit

torch.manual_seed(0)
model = torch.nn.Linear(100, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train(losses: list[torch.Tensor | float], *, leak: bool) -> None:
    """Train for an epoch of 20 steps."""
    for _ in range(20):
        loss = model(torch.randn(64, 100)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        output = model(torch.randn(64, 100)).mean()
        losses.append(output if leak else output.item())


for leak in (True, False):
    losses: list[torch.Tensor | float] = []
    detector = loaderkit.LeakDetector("cpu", on_leak=id)
    for _ in detector.epochs(range(12)):
        train(losses, leak=leak)
    report = detector.report()
    print(report.headline)
    if report.growths:
        print(report.growths[0])
