"""Batches of an iterable dataset: shared out to ranks, seeded, resumable."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from loaderkit.loader.delivery import SKIPPED, Delivery, Resumption, WorkerState
from loaderkit.loader.randomness import Seeded
from loaderkit.loader.ranks import Ranks, deal
from loaderkit.loader.resumable import mix_seed
from loaderkit.loader.stateful import is_stateful, read_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


@dataclass(frozen=True)
class IterableRule:
    """How the samples of an iterable dataset become batches."""

    batch_size: int = 1
    """Samples of a batch."""
    drop_last: bool = False
    """Leave out a last batch that is not full, and a last round of uneven ranks."""
    seed: int = 0
    """What random numbers drawn while reading follow from."""
    ranks: Ranks = field(default_factory=Ranks)
    """Who takes which samples: each rank reads all of them and keeps every n-th."""


class IterableBatches(IterableDataset[Delivery]):
    """Stands in for an iterable dataset where batches are made.

    Args:
        dataset: The user's.
        collate: How samples are joined.
        rule: How they become batches.
        epoch: Which one it gives ``[]`` int64; shared with workers that are kept.
        resumption: Where the workers stand.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        rule: IterableRule,
        epoch: torch.Tensor,
        resumption: Resumption,
    ) -> None:
        self.dataset, self.collate, self.rule = dataset, collate, rule
        self.epoch, self.resumption = epoch, resumption
        self._resumed_epoch = int(epoch)

    def __iter__(self) -> Iterator[Delivery]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch, state = int(self.epoch), WorkerState()
        last_worker = SKIPPED
        if epoch == self._resumed_epoch:
            state = self.resumption.workers.get(worker, state)
            last_worker = self.resumption.last_worker
        if worker <= last_worker:
            # torch asks worker 0 first; those who had their turn pass it on.
            yield Delivery(None, SKIPPED, worker, None)
        yield from self._batches(worker, workers, epoch, state)

    def _batches(
        self, worker: int, workers: int, epoch: int, state: WorkerState
    ) -> Iterator[Delivery]:
        ranks = self.rule.ranks

        def seeded(number: int) -> Seeded:
            """Follow from the batch alone, which no other worker or rank has."""
            unique = (number * workers + worker) * ranks.world_size + ranks.rank
            return Seeded(mix_seed(self.rule.seed, epoch, unique))

        if state.dataset is not None:
            self.dataset.load_state_dict(state.dataset)
        with Seeded(mix_seed(self.rule.seed, epoch, -1 - worker)):
            source: Any = iter(self.dataset)
        if state.iterator is not None:
            source.load_state_dict(state.iterator)
        samples = source
        if ranks.world_size > 1:
            samples = deal(source, ranks, drop_last=self.rule.drop_last)

        restored = state.dataset is not None or state.iterator is not None
        number, size = state.batches if restored else 0, self.rule.batch_size
        while True:
            with seeded(number):
                rows = list(islice(samples, size))
                if not rows or (self.rule.drop_last and len(rows) < size):
                    return
                number += 1
                if number <= state.batches and not restored:
                    continue  # given before the state was saved; only read on
                batch = self.collate(rows)
            yield Delivery(batch, number, worker, self._state(number, source))

    def _state(self, number: int, source: Iterator[Any]) -> WorkerState:
        dataset = read_state(self.dataset)
        # An iterable that is its own iterator has told its state already.
        own = source is not self.dataset and is_stateful(source)
        return WorkerState(number, dataset, read_state(source) if own else None)
