"""Post-mortem 1: models one after another.  `del` frees nothing a trainer holds."""

import torch

import loaderkit
from loaderkit.memory.staged import StageReceipt
from loaderkit.units import format_bytes


class Trainer:
    """Keeps its model and optimizer, as trainers do."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.optimizer = model, torch.optim.Adam(model.parameters())
        model(torch.zeros(8, 1000)).sum().backward()
        self.optimizer.step()


def run(letters: str, trainers: list[Trainer]) -> list[StageReceipt]:
    """Train some models in stages."""
    receipts: list[StageReceipt] = []
    for letter in letters:
        with (stage := loaderkit.staged(f"model {letter}")):
            model = stage.add(torch.nn.Linear(1000, 1000))
            trainers.append(Trainer(model))
            stage.add(trainers[-1].optimizer)
            if letters == "DEF":
                trainers.clear()  # the cure: let go of the trainer too
            del model
        receipts.append(stage.receipt)
    return receipts


kept: list[Trainer] = []
for name, receipts in (("before", run("ABC", kept)), ("after", run("DEF", []))):
    back = max(0, sum(receipt.returned_bytes["host"] for receipt in receipts))
    expected = sum(receipt.expected_bytes["host"] for receipt in receipts)
    print(f"{name}: {format_bytes(back)} of {format_bytes(expected)} came back")
    for survivor in receipts[0].survivors[:1]:
        print(f"  still there: {str(survivor).splitlines()[1].strip()}")
