"""A worker that grows is told by the user's dataset, whatever stands around it."""

import multiprocessing

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset

import loaderkit
from loaderkit.leaks.finders.child_processes import describe_worker


class Pockets(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, row):
        return {"x": torch.ones(2) * row}


class Ligands(Pockets):
    pass


class Augmented(Pockets):
    """Of the user's too, around another one: its own code runs in the worker."""

    def __init__(self):
        self.dataset = Ligands()


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([{"x": torch.ones(2)}] * 8)


class Kept(loaderkit.SafeDataset):
    def keys(self):
        return list(range(8))

    def load(self, key):
        return {"x": torch.ones(2) * key}


DATASETS = {
    "plain": (lambda folder: Pockets(), "Pockets"),
    "a subset of a subset": (
        lambda folder: Subset(Subset(Pockets(), range(6)), range(4)),
        "Pockets",
    ),
    "of two classes": (
        lambda folder: ConcatDataset([Pockets(), Ligands(), Pockets()]),
        "Pockets and Ligands",
    ),
    "side by side": (
        lambda folder: StackDataset(a=Pockets(), b=Ligands()),
        "Pockets and Ligands",
    ),
    "the user's around another": (lambda folder: Augmented(), "Augmented"),
    "a stream": (lambda folder: Stream(), "Stream"),
    "kept": (lambda folder: Kept(cache=folder / "a.lk"), "Kept"),
    "a part of a kept one": (lambda folder: Kept(cache=folder / "a.lk")[:4], "Kept"),
    "filtered": (
        lambda folder: Kept(cache=folder / "a.lk").filter(lambda sample: True),
        "Kept",
    ),
}


CASES = [
    *[(name, loaderkit.build_loader) for name in DATASETS],
    *[(name, DataLoader) for name in ("plain", "of two classes", "a stream")],
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "make_loader"), CASES)
def test_a_worker_is_told_by_the_users_dataset(name, make_loader, tmp_path):
    make_dataset, classes = DATASETS[name]
    loader = make_loader(make_dataset(tmp_path), batch_size=2, num_workers=1)
    batches = iter(loader)
    next(batches)

    told = [
        describe_worker(child.pid)
        for child in multiprocessing.active_children()
        if "DataLoader" in describe_worker(child.pid)
    ]

    assert told == [f"worker 0 of the DataLoader over {classes}"]
    del batches
