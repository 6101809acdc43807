"""Trainings that stop and go on, with one trainer, on one of several ranks.

    python trainer_runs.py FOLDER RUNS

RUNS is the name of a file with a dict in JSON; what each of them saw is in
``FOLDER/NAME.RANK.json``.
"""

import functools
import json
import logging
import os
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from quiet_trainer import quiet_lightning, quiet_settings

import loaderkit
from loaderkit.errors import LoaderError

EPOCHS = 3
COUNT = 96
RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
TOLD = ["not read", "unread", "leaves out", "nobody has set an epoch"]
"""What a warning says that tells of samples left out, or read in another order."""


class Sized(list):
    def sizes(self):
        return {"nodes": np.array([sample["nodes"] for sample in self])}


def join(samples):
    return {name: torch.stack([s[name] for s in samples]) for name in ("x", "labels")}


def make_rows():
    chance = random.Random(1)
    return Sized(
        {
            "x": torch.zeros(1),
            "labels": torch.tensor(float(row)),
            "nodes": chance.randint(1, 60),
        }
        for row in range(COUNT)
    )


def build(kind, **ranks):
    """Make the loader of a run: of samples by number, by size, or in fixed batches."""
    options = {"batch_size": 4} if kind == "count" else {"max_nodes": 130}
    shuffle = "batches" if kind == "batches" else True
    options |= {"collate_fn": join, "num_workers": 0, "seed": 1, "probe": False}
    return loaderkit.build_loader(make_rows(), shuffle=shuffle, **options, **ranks)


class Seen:
    """The rows that each epoch was trained on, and those when a state was saved."""

    def __init__(self):
        self.rows, self.saved = {}, None

    def add(self, epoch, labels):
        rows = self.rows.setdefault(int(epoch), [])
        rows.extend(int(label) for label in labels.tolist())

    def save(self):
        self.saved = {epoch: list(rows) for epoch, rows in self.rows.items()}


def train_lightning(folder, seen, *, kind, accumulate, way, save_after, save, load):
    import lightning

    from loaderkit.integrations.lightning import WholeEpochs

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, _):
            seen.add(self.current_epoch, batch["labels"])
            return self.layer(batch["x"]).mean()

        def on_train_batch_end(self, *_):
            if save and seen.saved is None and self.global_step == save_after:
                self.trainer.save_checkpoint(folder / f"{save}.ckpt")
                seen.save()

        def on_train_epoch_end(self):
            if save and seen.saved is None and save_after == "epoch":
                self.trainer.save_checkpoint(folder / f"{save}.ckpt")
                seen.save()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    loader = build(kind)
    trainer = quiet_lightning(
        folder,
        max_epochs=EPOCHS,
        devices=RANKS,
        strategy="ddp" if RANKS > 1 else "auto",
        callbacks=[WholeEpochs(loader)] if way == "callback" else [],
        reload_dataloaders_every_n_epochs=int(way == "callback"),
        accumulate_grad_batches=accumulate,
    )
    path = folder / f"{load}.ckpt" if load else None
    trainer.fit(Module(), loader, ckpt_path=path, weights_only=False)


def train_transformers(folder, seen, *, kind, accumulate, way, save_after, save, load):
    import transformers

    from loaderkit.integrations.transformers import WholeEpochs

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x, labels):
            seen.add(trainer.state.epoch + 1e-6, labels)
            return {"loss": (self.layer(x).squeeze(1) - labels).pow(2).mean()}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            loader = build(kind)
            if way == "callback":
                self.add_callback(WholeEpochs(loader))
            return self.accelerator.prepare(loader)

    class SaveOnce(transformers.TrainerCallback):
        def on_step_end(self, _, state, control, **__):
            control.should_save |= bool(save) and state.global_step == save_after

        def on_epoch_end(self, _, __, control, **___):
            is_first = seen.saved is None and save_after == "epoch"
            control.should_save |= bool(save) and is_first

        def on_save(self, _, state, *__, **___):
            if seen.saved is None:
                seen.save()
                (folder / f"{save}.step").write_text(str(state.global_step))

    settings = quiet_settings(
        folder / (save or "rest"),
        num_train_epochs=EPOCHS,
        gradient_accumulation_steps=accumulate,
        save_strategy="no",
        remove_unused_columns=False,
        ddp_backend="gloo",
    )
    trainer = Trainer(
        Model(), settings, train_dataset=make_rows(), callbacks=[SaveOnce()]
    )
    path = None
    if load:
        path = folder / load / f"checkpoint-{(folder / f'{load}.step').read_text()}"
    trainer.train(resume_from_checkpoint=path)


def train_own_loop(folder, seen, *, kind, accumulate, way, save_after, save, load):
    """Train in a loop of one's own, whose model accelerate prepares.

    "plain" leaves the loader as it is, "callback" gives the rank by hand.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = build(
        kind, **({"rank": RANK, "world_size": RANKS} if way == "callback" else {})
    )
    if load:
        loader.load_state_dict(json.loads((folder / f"{load}.state").read_text()))
    steps, first = 0, loader.state_dict()["epoch"]
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                seen.add(epoch, batch["labels"])
                accelerator.backward(model(batch["x"]).mean())
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
            if save and seen.saved is None and steps == save_after:
                _save_state(loader, folder / f"{save}.state", seen)
        if save and seen.saved is None and save_after == "epoch":
            _save_state(loader, folder / f"{save}.state", seen)


def _save_state(loader, file, seen):
    if RANK == 0:
        file.write_text(json.dumps(loader.state_dict()))
    seen.save()


TRAINERS = {
    "lightning": train_lightning,
    "transformers": train_transformers,
    "own loop": train_own_loop,
}


def main():
    folder, runs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    for name, run in runs.items():
        seen, error = Seen(), None
        train = functools.partial(TRAINERS[run.pop("trainer")], folder, seen)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                train(**run)
            except LoaderError as refusal:
                error = str(refusal)
        texts = [str(warning.message) for warning in caught]
        told = [text for text in texts if any(words in text for words in TOLD)]
        answer = {"seen": seen.rows, "saved": seen.saved, "told": told, "error": error}
        (folder / f"{name}.{RANK}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
