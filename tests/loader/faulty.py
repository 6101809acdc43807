"""Users' mistakes: every kind of error, in every place where a user's code runs."""

import os
import signal
from multiprocessing import current_process

import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
)

from loaderkit import SafeDataset

BAD = 5
"""The row that fails."""


class TwoPartsError(Exception):
    """Cannot be built from one text, nor from its pickle."""

    def __init__(self, part, other):
        super().__init__(f"{part} and {other}")
        self.part, self.other = part, other


class HoldingError(Exception):
    """Holds what cannot be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.held = lambda: None


class WithMessageError(Exception):
    """Has an attribute that torch takes for the name of an argument."""

    message = "some message"


class StrictError(Exception):
    """Requires parts when it is made, and guards them then."""

    message = "of the class"
    what = fix = property(lambda self: "of the class")

    def __new__(cls, part, other):
        return super().__new__(cls, part, other)

    def __init__(self, part, other):
        super().__init__(part, other)

    def __setattr__(self, name, value):
        raise AttributeError(name)


class SilentError(Exception):
    """Cannot be shown."""

    def __str__(self):
        raise NotImplementedError


def undecodable():
    return b"\xff".decode("utf-8")


def chained():
    try:
        int("no number")
    except ValueError as error:
        msg = "the file of labels is empty"
        raise RuntimeError(msg) from error


def raising(error):
    def explode():
        raise error()

    return explode


ERRORS = {
    "key": raising(lambda: KeyError("label")),
    "size": raising(lambda: RuntimeError("size mismatch, m1: [3 x 4]")),
    "worker": raising(lambda: RuntimeError("DataLoader worker is my own word")),
    "missing": raising(lambda: FileNotFoundError(2, "No such file", "a.pt")),
    "assertion": raising(AssertionError),
    "two parts": raising(lambda: TwoPartsError("left", "right")),
    "holding": raising(lambda: HoldingError("held")),
    "message": raising(lambda: WithMessageError("a text")),
    "strict": raising(lambda: StrictError("left", 2)),
    "stop": raising(lambda: StopIteration("early")),
    "two lines": raising(lambda: ValueError("one\ntwo")),
    "text": undecodable,
    "chained": chained,
    "memory": raising(lambda: MemoryError("no more")),
}


class Failing(Dataset):
    """Fails at one row."""

    def __init__(self, explode):
        self.explode = explode

    def __len__(self):
        return 8

    def __getitem__(self, row):
        if row == BAD:
            self.explode()
        return torch.tensor([row])


class Named(Failing):
    def key(self, row):
        return f"sample-{row}"


class Together(Failing):
    def __getitems__(self, rows):
        return [self[row] for row in rows]


class Loaded(SafeDataset):
    """Fails as it loads a sample."""

    def __init__(self, explode):
        super().__init__()
        self.explode = explode

    def keys(self):
        return [f"key-{row}" for row in range(8)]

    def load(self, key):
        if key == f"key-{BAD}":
            self.explode()
        return torch.tensor([1])


class FailingStream(IterableDataset):
    """Fails after some samples."""

    def __init__(self, explode):
        self.explode = explode

    def __iter__(self):
        yield from map(torch.tensor, range(3))
        self.explode()


class Resuming:
    """An iterator that goes on after each error."""

    def __init__(self, explode):
        self.explode = explode
        self.number = -1

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        if self.number == BAD:
            self.explode()
        if self.number == 2 * BAD:
            raise StopIteration
        return torch.tensor(self.number)


class ResumingStream(FailingStream):
    """Goes on after an error, as iterators that are no generators can."""

    def __iter__(self):
        return Resuming(self.explode)


class UnbegunStream(FailingStream):
    """Fails before its first sample."""

    def __iter__(self):
        self.explode()


class FailingCall:
    """A collate function, or a worker_init_fn, that fails."""

    def __init__(self, explode):
        self.explode = explode

    def __call__(self, _):
        self.explode()


class FailingTransform:
    """Fails at the sample that says so."""

    def __init__(self, explode):
        self.explode = explode

    def __call__(self, sample):
        if sample["row"] == BAD:
            self.explode()
        return sample


def some(data):
    return Subset(data, [0, BAD, 1])


def concatenated(data):
    return ConcatDataset([[torch.tensor([0])] * 3, data])


def stacked(data):
    return StackDataset(part=data, number=range(8))


SAMPLES = {
    "plain": (Failing, f"row {BAD}"),
    "named": (Named, f"'sample-{BAD}' (row {BAD})"),
    "loaded": (Loaded, f"'key-{BAD}' (row {BAD})"),
    "subset": (lambda e: some(Named(e)), f"'sample-{BAD}' (row {BAD})"),
    "subset of loaded": (lambda e: some(Loaded(e)), f"'key-{BAD}' (row {BAD})"),
    "concatenated": (lambda e: concatenated(Named(e)), f"'sample-{BAD}' (row {BAD})"),
    "stacked": (lambda e: stacked(Named(e)), f"row {BAD}"),
}
"""Datasets in which one sample fails, and how it is named."""


class OnlyHere:
    """Can be unpickled in the process that trains, where it is tried, and no worker."""

    def __call__(self, rows):
        return rows

    def __setstate__(self, state):
        if current_process().name == "MainProcess":
            return
        msg = "this machine's licence is in use"
        raise PermissionError(msg)

    def __getstate__(self):
        return {"a": 1}


class RowsOnlyHere(OnlyHere, Dataset):
    """Eight rows, the samples of which are their numbers."""

    def __len__(self):
        return 8

    def __getitem__(self, row):
        return row


class KilledAsItIsUnpickled(RowsOnlyHere):
    """Ends the new process that it is sent to, as the kernel does where memory ends."""

    def __setstate__(self, state):
        if current_process().name != "MainProcess":
            os.kill(os.getpid(), signal.SIGKILL)
