"""Trainings with Lightning, one after the other, on one of several ranks.

    python lightning_runs.py FOLDER RUNS

RUNS is a list in JSON; what each of them saw is in ``FOLDER/NAME.RANK.json``.
"""

import json
import os
import random
import sys
import warnings
from pathlib import Path

import lightning
import torch
from quiet_trainer import quiet_lightning

import loaderkit
from loaderkit.integrations.lightning import WholeEpochs

EPOCHS = 3
RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(48))

    def __len__(self):
        return 48


def build(folder, kind):
    """Make the loader of a run: of samples by number, by size, or of a stream."""
    if kind == "stream":
        ranks = {"rank": RANK, "world_size": RANKS}
        return loaderkit.build_loader(Stream(), batch_size=4, num_workers=0, **ranks)
    options = {"batch_size": 4} if kind == "count" else {"max_tokens": 130}
    rows = loaderkit.open_cache(folder / "rows.lk")
    return loaderkit.build_loader(rows, shuffle=True, seed=1, num_workers=0, **options)


def pack_rows(folder):
    """Pack rows of different lengths, whose epochs by size differ in their batches."""
    chance = random.Random(1)
    rows = [{"x": torch.zeros(chance.randint(1, 60)), "row": n} for n in range(100)]
    loaderkit.pack(rows, folder / "rows.lk", workers=0)


class Module(lightning.LightningModule):
    """Notes the rows of each epoch, and saves where it is told to."""

    def __init__(self, checkpoint=None, save_after=None):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.checkpoint, self.save_after = checkpoint, save_after
        self.seen, self.saved, self.validated = {}, None, []

    def training_step(self, batch, _):
        rows = batch["row"] if isinstance(batch, dict) else batch
        self.seen.setdefault(self.trainer.current_epoch, []).extend(rows.tolist())
        return self.layer(torch.zeros(1, 1)).sum()

    def on_train_batch_end(self, *_):
        if self.save_after == self.trainer.global_step:
            self.save()

    def on_train_epoch_end(self):
        if self.save_after == "epoch" and self.saved is None:
            self.save()

    def save(self):
        self.trainer.save_checkpoint(self.checkpoint)
        self.saved = {epoch: list(rows) for epoch, rows in self.seen.items()}

    def validation_step(self, *_):
        self.validated.append(self.trainer.current_epoch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Rows(lightning.LightningDataModule):
    def __init__(self, folder, kind, whole_epochs):
        super().__init__()
        self.folder, self.kind, self.whole_epochs = folder, kind, whole_epochs

    def train_dataloader(self):
        return self.whole_epochs.resume(build(self.folder, self.kind))

    def val_dataloader(self):
        return torch.utils.data.DataLoader([0])


def train(
    folder,
    *,
    kind="count",
    way="plain",
    reload=None,
    save_after=None,
    load=None,
    save=None,
):
    """Train, from a checkpoint or anew.

    Args:
        folder: Where the checkpoints are.
        kind: Of loader.
        way: "plain" gives the loader to fit; "loader" gives it to WholeEpochs too;
            "module" builds it in a data module, which asks WholeEpochs.
        reload: Whether Lightning counts anew in each epoch; None where it should.
        save_after: So many steps, or "epoch".
        load: Name of the checkpoint that it goes on from.
        save: Name of the one that it saves.
    """
    loader = build(folder, kind)
    whole_epochs = WholeEpochs(*([loader] if way == "loader" else []))
    reloads = way != "plain" if reload is None else reload
    trainer = quiet_lightning(
        folder,
        max_epochs=EPOCHS,
        devices=RANKS,
        strategy="ddp" if RANKS > 1 else "auto",
        callbacks=[] if way == "plain" else [whole_epochs],
        reload_dataloaders_every_n_epochs=int(reloads),
        num_sanity_val_steps=0,
    )
    module = Module(save and folder / f"{save}.ckpt", save_after)
    path = load and folder / f"{load}.ckpt"
    if way == "module":
        trainer.fit(module, datamodule=Rows(folder, kind, whole_epochs), ckpt_path=path)
    else:
        trainer.fit(module, loader, torch.utils.data.DataLoader([0]), ckpt_path=path)
    return module


def main():
    folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, run in runs.items():
        try:
            module = train(folder, **run)
            answer = {
                "seen": module.seen,
                "saved": module.saved or {},
                "validated": module.validated,
            }
        except loaderkit.errors.LoaderError as error:
            answer = {"error": str(error)}
        (folder / f"{name}.{RANK}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
