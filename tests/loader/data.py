"""Datasets that workers can import."""

import os
import random
import signal
import time

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from loaderkit import SafeGraphDataset


def graph(number):
    # Not above: a spawned worker that reads no graphs need not import PyG, which takes
    # twice as long as torch.
    from torch_geometric.data import Data

    nodes = 2 + number % 5
    return Data(
        x=torch.full((nodes, 3), float(number)),
        edge_index=torch.arange(2 * nodes).view(2, nodes) % nodes,
        y=torch.tensor([number]),
        name=f"g{number}",
    )


class Graphs(SafeGraphDataset):
    """40 graphs."""

    def keys(self):
        return [f"g{number}" for number in range(40)]

    def load(self, key):
        return graph(int(key[1:]))


class Noisy(Dataset):
    """Draws from all three sources of random numbers."""

    def __len__(self):
        return 24

    def __getitem__(self, row):
        drawn = [torch.rand(()).item(), float(np.random.rand()), random.random()]
        return {"row": row, "drawn": torch.tensor(drawn, dtype=torch.float64)}


class Prepared(Dataset):
    """Six rows, each beside the number of the worker that a method has noted."""

    worker = -1

    def __len__(self):
        return 6

    def __getitem__(self, row):
        return torch.tensor([row, self.worker])

    def prepare(self, worker):
        self.worker = worker


class Doomed(Dataset):
    """Ends its process, or fails, at row 13."""

    def __init__(self, way):
        self.way = way

    def __len__(self):
        return 40

    def key(self, row):
        return f"sample-{row}"

    def __getitem__(self, row):
        if row == 13:
            if self.way == "raise":
                raise KeyError(row)
            if self.way == "interrupt":
                raise KeyboardInterrupt(row)
            if self.way == "exit":
                os._exit(3)
            os.kill(os.getpid(), getattr(signal, self.way))
            time.sleep(5)
        return torch.ones(3) * row


class Counting(IterableDataset):
    """Rows one after the other."""

    def __iter__(self):
        return iter(range(10))


class Slow(Dataset):
    """Takes 20 ms a sample."""

    def __len__(self):
        return 64

    def __getitem__(self, row):
        time.sleep(0.02)
        return torch.tensor([row])
