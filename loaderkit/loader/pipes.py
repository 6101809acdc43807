"""Data pipes of torch: what its DataLoader does for them, and for no other dataset.

Their shufflers take seeds, and their ``sharding_filter`` takes the part of a worker.
Without these each worker would give everything, in an order of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import (
    apply_random_seed,
    apply_sharding,
    apply_shuffle_settings,
    get_all_graph_pipes,
)

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch.utils.data._utils.worker import WorkerInfo


def is_pipe(dataset: object) -> TypeGuard[IterDataPipe[Any]]:
    """Tell whether a dataset is an iterable data pipe.

    Those of map style need nothing: a loader's sampler shuffles and shares them out.
    """
    return isinstance(dataset, IterDataPipe)


def shares_out(dataset: object) -> bool:
    """Tell whether a dataset is a pipe with a ``sharding_filter``.

    A pipe with one gives its parts to whoever asks for them, so that it need not be
    asked whether every rank reads the same.
    """
    if not is_pipe(dataset):
        return False
    pipes = get_all_graph_pipes(traverse_dps(dataset))
    return any(callable(getattr(pipe, "apply_sharding", None)) for pipe in pipes)


def with_shuffle(dataset: object, *, shuffle: bool) -> Any:
    """Turn the shufflers of a pipe on or off, as torch's DataLoader does.

    Args:
        dataset: A pipe; anything else is given back.
        shuffle: What they are turned to.

    Returns:
        The pipe; with a shuffler behind it if it is to be shuffled and has none.
    """
    return apply_shuffle_settings(dataset, shuffle) if is_pipe(dataset) else dataset


def prepare_pipe(dataset: object, worker: WorkerInfo | None, seed: int) -> None:
    """Make a pipe ready for an epoch; any other dataset is left alone.

    Args:
        dataset: What is read.
        worker: Who reads it; None for the training process.
        seed: What shuffling follows from.  It is the same in all workers, since each
            keeps every n-th sample of what must be the same order.
    """
    if not is_pipe(dataset):
        return
    number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
    apply_sharding(dataset, workers, number)
    apply_random_seed(dataset, torch.Generator().manual_seed(seed))


def as_sent(dataset: object) -> object:
    """Give what workers get, which can be pickled where the dataset cannot.

    torch's DataLoader wraps a pipe, so that its lambdas are sent by dill if that is
    installed.
    """
    return DataLoader(dataset).dataset if is_pipe(dataset) else dataset
