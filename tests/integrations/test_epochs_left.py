"""Trainers that leave samples of an epoch unread do not do so in silence."""

import collections
import itertools
import random
import warnings

import numpy as np
import pytest
import torch
from quiet_trainer import quiet_lightning, quiet_settings

import loaderkit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]
EPOCHS = 4
COUNT = 60


class Sized(list):
    def sizes(self):
        return {"nodes": np.array([sample["nodes"] for sample in self])}


def join(samples):
    """Join samples to what the models below take."""
    return {name: torch.stack([s[name] for s in samples]) for name in ("x", "labels")}


def make_loader(seed, shuffle, workers=0):
    chance = random.Random(seed)
    rows = Sized(
        {
            "x": torch.zeros(1),
            "labels": torch.tensor(float(n)),
            "nodes": chance.randint(1, 40),
        }
        for n in range(COUNT)
    )
    return loaderkit.build_loader(
        rows,
        max_nodes=90,
        shuffle=shuffle,
        seed=seed,
        num_workers=workers,
        collate_fn=join,
    )


def samples_read_by_lightning(loader, tmp_path, **options):
    """Train, and count the samples of each epoch."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen = collections.Counter()

        def training_step(self, batch, _):
            self.seen[self.current_epoch] += len(batch["labels"])
            return self.layer(batch["x"]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    module = Module()
    trainer = quiet_lightning(
        tmp_path,
        max_epochs=EPOCHS,
        **options,
    )
    trainer.fit(module, loader)
    return sum(module.seen.values())


def samples_read_by_transformers(loader, tmp_path, *, prepared):
    """Train, and count all samples."""
    import transformers

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(1, 1), []

        def forward(self, x, labels):
            self.seen.append(labels.tolist())
            return {"loss": (self.layer(x).squeeze(1) - labels).pow(2).mean()}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return self.accelerator.prepare(loader) if prepared else loader

    model = Model()
    settings = quiet_settings(tmp_path, num_train_epochs=EPOCHS, save_strategy="no")
    Trainer(model, settings, train_dataset=loader.dataset).train()
    return len(list(itertools.chain(*model.seen)))


def samples_read_by_accelerate(loader, tmp_path):  # noqa: ARG001
    """Read whole epochs, each with its length in view."""
    from accelerate import Accelerator

    prepared = Accelerator(cpu=True).prepare(loader)
    samples = 0
    for _ in range(EPOCHS):
        assert len(prepared)
        samples += sum(len(batch["labels"]) for batch in prepared)
    return samples


def train(trainer, loader, tmp_path):
    if trainer == "accelerate":
        return samples_read_by_accelerate(loader, tmp_path)
    if trainer == "lightning":
        return samples_read_by_lightning(loader, tmp_path)
    is_prepared = trainer == "prepared"
    return samples_read_by_transformers(loader, tmp_path, prepared=is_prepared)


@pytest.mark.long_cases
@pytest.mark.parametrize("shuffle", [True, "batches"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param("lightning", marks=pytest.mark.needs("lightning")),
        pytest.param("prepared", marks=pytest.mark.needs("transformers")),
        pytest.param("as it is", marks=pytest.mark.needs("transformers")),
        pytest.param("accelerate", marks=pytest.mark.needs("accelerate")),
    ],
)
def test_one_line_tells_of_samples_that_a_trainer_leaves_out(
    trainer, seed, workers, shuffle, tmp_path
):
    loader = make_loader(seed, shuffle, workers)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        samples = train(trainer, loader, tmp_path)

    texts = [str(warning.message) for warning in caught]
    told = [text for text in texts if "not read" in text or "unread" in text]
    assert len(told) == (samples < EPOCHS * COUNT), told


@pytest.mark.needs("lightning")
@pytest.mark.parametrize(
    "limit",
    [
        {"limit_train_batches": 7},
        {"limit_train_batches": 0.5},
        {"max_steps": 40},
        {"fast_dev_run": 2},
    ],
)
def test_what_lightning_was_told_to_leave_out_is_not_warned_of(limit, tmp_path):
    loader = make_loader(1, True)  # epochs of 17 batches, and of fewer

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        samples = samples_read_by_lightning(loader, tmp_path, **limit)

    texts = [str(warning.message) for warning in caught]
    assert not [text for text in texts if "not read" in text]
    assert samples < EPOCHS * COUNT
