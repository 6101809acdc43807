"""Batches of rows by a rule, epoch after epoch, which can begin in the middle of one.

``Position`` says where an iteration begins, ``EpochBatches`` gives the batches from
there on, and the samplers at the end are those that a loader shows to trainers.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch.distributed
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    Sampler,
    SequentialSampler,
)

from loaderkit.arguments import check_integer
from loaderkit.errors import LoaderError
from loaderkit.loader.description import sizes_of
from loaderkit.loader.digests import digest_of_plain
from loaderkit.loader.lengths_told import LengthsTold
from loaderkit.loader.samplers import (
    BatchRule,
    Epoch,
    bucket_bounds,
    can_be_cut_anywhere,
    count_ordered_samples,
    left_out_rows,
    make_epoch,
)
from loaderkit.randomness import mix_seed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence, Sized

    from loaderkit.array_types import Ints


class SeededRows(list[Any]):
    """The rows of a batch, with its number and its seed.

    It is a list because torch sends it to a worker in the place of a list of rows.

    Args:
        rows: Rows of the dataset.
        number: Number of the batch in this rank's epoch.
        seed: Seed of the random numbers that are drawn while the batch is read.
        bound: Length that ragged fields are padded to; None pads to the longest sample.
    """

    __slots__ = ("bound", "number", "seed")

    def __init__(
        self, rows: Sequence[Any], number: int, seed: int, bound: int | None = None
    ) -> None:
        super().__init__(rows)
        self.number, self.seed, self.bound = number, seed, bound

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededRows, (list(self), self.number, self.seed, self.bound)


def check_epoch(name: str, value: object) -> int:
    """Check the number of an epoch or a batch, which must fit int64.

    Workers read it in a tensor, and numpy's generator is seeded with it.
    """
    return check_integer(name, value, least=0, most=2**63 - 1)


@dataclass
class Position:
    """Where the next iteration begins.  A loader and its samplers share one object."""

    epoch: int = 0
    """Number of the epoch."""
    batches: int = 0
    """How many batches of the epoch each rank has consumed, which is also the number of
    the first batch to give."""
    samples: int = 0
    """How many samples of the epoch's global order all ranks have consumed with these
    batches.  Only ``EpochBatches`` count them."""
    ahead: frozenset[int] = frozenset()
    """Numbers of later batches that were given before their turn."""
    moves: int = field(default=0, compare=False)
    """How often it was moved, also if it was moved to where it stood."""

    def after(self, batches: int, ahead: frozenset[int]) -> Position:
        """Return where the same epoch stands once other batches of it were given.

        Made for each batch, so not by ``dataclasses.replace``, which takes four times
        as long.
        """
        return Position(self.epoch, batches, self.samples, ahead, self.moves)

    def go_to(self, at: Position) -> None:
        """Move to another position."""
        self.epoch, self.ahead = at.epoch, at.ahead
        self.batches, self.samples = at.batches, at.samples
        self.moves += 1

    @property
    def is_in_epoch(self) -> bool:
        """Whether batches of the epoch were given already."""
        return self.batches > 0 or bool(self.ahead)

    def set_epoch(self, epoch: int) -> None:
        """Choose an epoch; the current one keeps its place.

        A training loop calls ``set_epoch`` before every epoch, also before the one in
        whose middle it resumes.

        Raises:
            OptionError: It is no integer from 0 that int64 holds.
        """
        number = check_epoch("epoch", epoch)
        is_this_one = number == self.epoch
        self.go_to(replace(self) if is_this_one else Position(number))

    def advance(self) -> Position:
        """Move on to the next epoch, and return where this one begins."""
        here = replace(self)
        self.go_to(Position(self.epoch + 1))
        return here


class Passes:
    """Counts the passes over a sampler that a loader shows.

    A trainer that loops over the sampler gets a new epoch each time, as with torch's
    samplers, beginning with the loader's epoch.  The loader does not move with it, so
    ``list(loader.sampler)`` has no effect on the next iteration.

    Args:
        position: Where the loader stands.
        asks_for_epoch: Warn where a pass begins and nobody has set an epoch.
    """

    def __init__(self, position: Position, *, asks_for_epoch: bool = False) -> None:
        self._loader_position = position
        self._next = replace(position)
        self._asks_for_epoch = asks_for_epoch

    def upcoming(self) -> Position:
        """Return where the next pass begins."""
        # The loader has moved since the last pass, so passes follow it again.
        if self._next.moves != self._loader_position.moves:
            self._next = replace(self._loader_position)
        return self._next

    def begin(self) -> Position:
        """Return where this pass begins, and move on to the next."""
        here = self.upcoming()
        if self._asks_for_epoch and not here.moves:
            warnings.warn(_EPOCH_NOT_SET, UserWarning, stacklevel=3)
            self._asks_for_epoch = False
        self._next = Position(here.epoch + 1, moves=here.moves)
        return here


_EPOCH_NOT_SET = (
    "the batches of all ranks are given in the order of epoch 0, since nobody has set "
    "an epoch, as accelerate does before each epoch but not where it skips the first "
    "batches of one that goes on; in a later epoch: loader.set_epoch(epoch) before "
    "(Hugging Face's Trainer: in on_epoch_begin of a callback)"
)


class LoaderBatches(Protocol):
    """Gives the rows of each batch of a loader: by a rule, or by a user's sampler."""

    def __len__(self) -> int:
        """Count the batches of the epoch that comes next."""

    def batches_of(self, at: Position) -> Iterator[SeededRows]:
        """Give the batches of an epoch from a position on, without those given."""

    def reseed(self, seed: int) -> None:
        """Follow another seed from now on."""


class _EpochKey(NamedTuple):
    """What the batches of an epoch follow from, besides the rule."""

    epoch: int
    consumed_samples: int
    consumed_batches: int


class _CachedEpoch(NamedTuple):
    """The epoch that was worked out last."""

    key: _EpochKey
    epoch: Epoch


class EpochBatches(Sampler[list[int]]):
    """Batches that follow from a rule: a new order every epoch, resumable anywhere.

    Args:
        rule: How samples become batches.
        position: Where the next epoch begins; None begins with epoch 0.
        dataset: The dataset, whose length may change from one epoch to the next.  None
            if only its length is known.
        shared_out: They are those of several ranks, which somebody shares out: whoever
            does sets the epoch.
    """

    def __init__(
        self,
        rule: BatchRule,
        position: Position | None = None,
        dataset: Sized | None = None,
        *,
        shared_out: bool = False,
    ) -> None:
        self.rule, self.position = rule, position or Position()
        self._dataset = dataset
        self.asks_for_epoch = shared_out and bool(rule.shuffle)
        self._passes = Passes(self.position, asks_for_epoch=self.asks_for_epoch)
        self._cached: _CachedEpoch | None = None
        self._bounds: Ints | None = None
        self._facts: dict[str, Any] | None = None
        self._followers: list[EpochBatches] = []
        self._lengths_told = LengthsTold()

    def __len__(self) -> int:
        self.follow_dataset()
        upcoming = self._passes.upcoming()
        length = len(self.epoch_from(upcoming))
        self._lengths_told.tell(length, upcoming.epoch)
        return length

    def __iter__(self) -> Iterator[list[int]]:
        self.follow_dataset()
        # The numbers in ``ahead`` are those of one rank's batches, and this object may
        # give the batches of all ranks.
        here = replace(self._passes.begin(), ahead=frozenset())
        self._check_lengths_told(here)
        yield from self.batches_of(here)

    def _check_lengths_told(self, start: Position) -> None:
        """Warn where this pass is longer than was told, and nobody has asked anew.

        Workers ask for rows ahead of the loop, so where it ends is not seen here, as it
        is in a loader.
        """
        told = self._lengths_told
        if told.has_warned or not self.lengths_vary:
            return
        length = len(self.epoch_from(start))
        longest_told = told.longest_below(length)
        if longest_told is not None:
            told.warn_of_longer_epoch(
                start.epoch,
                length,
                longest_told,
                sizes_vary=self.lengths_vary,
                stacklevel=3,
            )

    @property
    def lengths_vary(self) -> bool:
        """Whether epochs of the same samples may have unlike numbers of batches."""
        return bool(self.rule.limits) and self.rule.shuffle in {True, "block"}

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next, as for torch's DistributedSampler."""
        self.position.set_epoch(epoch)

    def reseed(self, seed: int) -> None:
        """Follow another seed from now on."""
        self.rule, self._cached = replace(self.rule, seed=seed % 2**63), None
        for follower in self._followers:
            follower.reseed(seed)

    def lend_seed_to(self, follower: EpochBatches) -> None:
        """Let other batches, such as those that a loader shows, follow the seed."""
        self._followers.append(follower)

    def follow_dataset(self) -> None:
        """Take over the current length of the dataset, as torch's samplers do.

        An epoch that has begun is not affected.
        """
        if self._dataset is None or len(self._dataset) == self.rule.samples:
            return
        sizes = {name: sizes_of(self._dataset, name) for name in self.rule.sizes}
        self.rule = replace(self.rule, samples=len(self._dataset), sizes=sizes)
        self._cached = self._bounds = self._facts = None

    def order_facts(self) -> dict[str, Any]:
        """Return what the global order follows from, besides seed and epoch.

        The number of ranks and the rule for batches are no part of that, unless whole
        batches are shuffled.
        """
        self.follow_dataset()
        if self._facts is None:
            rule = self.rule
            order_words = {
                True: "shuffled",
                False: "in order",
                "block": "in blocks",
                "batches": "batches shuffled",
            }
            facts: dict[str, Any] = {
                "samples": rule.samples,
                "order": order_words[rule.shuffle],
            }
            if rule.shard_of_row is not None:
                facts["shards"] = digest_of_plain(rule.shard_of_row)
            left_out = left_out_rows(rule)
            if len(left_out):
                facts["samples left out"] = digest_of_plain(left_out)
            for name, sizes in rule.sizes.items():
                facts[f"sizes of {name}"] = digest_of_plain(sizes)
            if not can_be_cut_anywhere(rule):
                facts["batches"] = {
                    "batch_size": rule.batch_size,
                    "limits": dict(rule.limits),
                    "drop_last": rule.drop_last,
                    "bucket_by": rule.bucket_by,
                    "buckets": rule.buckets,
                }
            self._facts = facts
        return dict(self._facts)

    def count_samples(self) -> int:
        """Count the samples of the global order, which are as many in every epoch."""
        self.follow_dataset()
        return count_ordered_samples(self.rule)

    def check_position(self, position: Position, seed: int) -> None:
        """Refuse the position of another run if this rule cannot continue from it.

        Args:
            position: Where the other run stood.
            seed: Seed of the other run.

        Raises:
            LoaderError: No batch begins there, or the epoch does not have the batches
                that were given before their turn.
        """
        is_anywhere = can_be_cut_anywhere(self.rule) and not position.ahead
        if is_anywhere or not position.is_in_epoch:
            return
        epoch = make_epoch(
            replace(self.rule, seed=seed % 2**63),
            position.epoch,
            consumed_samples=position.samples,
            consumed_batches=position.batches,
        )
        if max(position.ahead, default=0) >= max(len(epoch), 1):
            message = f"The state has batch {max(position.ahead):,} of epoch "
            message += f"{position.epoch}, which has {len(epoch):,}."
            why = "it is not that of this dataset and this batch size"
            fix = "load_state_dict(loader.state_dict())"
            raise LoaderError(message, why=why, fix=fix)

    def consumed_samples(self, start: Position, batches: int) -> int:
        """Count the samples of the global order that all ranks have consumed.

        Args:
            start: Where the iteration began.
            batches: How many batches of the epoch each rank has consumed.
        """
        return self.epoch_from(start).consumed_samples(batches)

    def current(self) -> Epoch:
        """Work out the epoch that comes next, or what is left of it."""
        self.follow_dataset()
        return self.epoch_from(self.position)

    def epoch_from(self, at: Position) -> Epoch:
        """Work out an epoch, or what is left of it; the last result is cached."""
        key = _EpochKey(at.epoch, at.samples, at.batches)
        if self._cached is not None and self._cached.key == key:
            return self._cached.epoch
        # Free the old one first: an epoch of 10^7 samples takes 80 MB.
        self._cached = None
        epoch = make_epoch(
            self.rule,
            at.epoch,
            consumed_samples=at.samples,
            consumed_batches=at.batches,
        )
        self._cached = _CachedEpoch(key, epoch)
        return epoch

    def batches_of(self, at: Position) -> Iterator[SeededRows]:
        """Give the batches of an epoch.

        Args:
            at: The epoch, the first batch to give, and the batches to leave out.

        Returns:
            The rows of each batch.  They are worked out now, so that a dataset that
            grows later does not change them.
        """
        self.follow_dataset()
        return self._batches_of(at, self.epoch_from(at))

    def _batches_of(self, at: Position, epoch: Epoch) -> Iterator[SeededRows]:
        seed_of_epoch = self.rule.seed  # another may be chosen while it runs
        for number in epoch.numbers:
            if number in at.ahead:
                continue
            rows = epoch.batch(number)
            # No two batches of all ranks have the same offset, also if earlier runs
            # began the epoch with other ranks or batch sizes.  Batch numbers would
            # repeat between ranks.
            seed = mix_seed(seed_of_epoch, at.epoch, epoch.offset(number))
            yield SeededRows(rows, number, seed, self._padded_length(rows))

    def _padded_length(self, rows: list[int]) -> int | None:
        """Return the length that the ragged fields of a batch are padded to."""
        if self.rule.bucket_by != "tokens":
            return None
        sizes = self.rule.sizes["tokens"]
        if self._bounds is None:
            self._bounds = bucket_bounds(sizes, self.rule.buckets)
        longest = int(sizes[rows].max())
        return int(self._bounds[np.searchsorted(self._bounds, longest)])


class EpochOrder(Sampler[int]):
    """The rows of an epoch, one by one: ``loader.sampler`` of a shuffled loader.

    Args:
        batches: The batches that the rows are of.
    """

    def __init__(self, batches: EpochBatches) -> None:
        self._batches = batches
        self._passes = Passes(batches.position, asks_for_epoch=batches.asks_for_epoch)

    def __len__(self) -> int:
        self._batches.follow_dataset()
        return len(self._batches.epoch_from(self._passes.upcoming()).order)

    def __iter__(self) -> Iterator[int]:
        self._batches.follow_dataset()
        yield from self._batches.epoch_from(self._passes.begin()).order.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next, as for torch's DistributedSampler."""
        self._batches.set_epoch(epoch)


class BatchesOfOrder(BatchSampler):
    """torch's batches of rows, of the epoch that is set.

    Trainers set it where they find ``set_epoch``.  Hugging Face's looks for it on the
    batch sampler whose first batches it skips, to go on in the middle of an epoch.

    Args:
        order: The rows of an epoch.
        batch_size: Rows a batch.
        drop_last: Whether a last batch with fewer is left out.
    """

    def __init__(self, order: EpochOrder, batch_size: int, *, drop_last: bool) -> None:
        super().__init__(order, batch_size, drop_last)
        self._order = order

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next."""
        self._order.set_epoch(epoch)


class RankOrder(DistributedSampler[int]):
    """The rows that one rank reads: ``loader.sampler`` with several ranks.

    It is a ``DistributedSampler`` because trainers look for one.  They leave a loader
    that has one unchanged, and would otherwise share its rows out once more.

    Args:
        dataset: The dataset that the rows are of.
        batches: The batches of this rank.
    """

    def __init__(self, dataset: Any, batches: EpochBatches) -> None:
        rule = batches.rule
        super().__init__(
            dataset,
            num_replicas=rule.ranks,
            rank=rule.rank,
            seed=rule.seed,
            shuffle=bool(rule.shuffle),
            drop_last=rule.drop_last,
        )
        self._order = EpochOrder(batches)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next."""
        super().set_epoch(epoch)
        self._order.set_epoch(epoch)


class BatchesOfAllRanks(BatchSampler):
    """The batches of all ranks, for whoever shares them out among the ranks.

    accelerate shares them out where a loader is prepared, and asks for ``batch_size``
    and ``drop_last`` before it does.  Where a loader was not prepared, and accelerate
    skips the first batches of an epoch, nobody asks: all ranks would be given the same.

    Args:
        batches: A sampler of all these batches.
        rule: That of the batches of this rank.
    """

    def __init__(self, batches: Any, rule: BatchRule) -> None:
        # Not torch's own constructor: it would set the attributes that are asked for.
        self._batches, self._rank, self._ranks = batches, rule.rank, rule.ranks
        self._is_shared_out = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # looked for while a copy is made
            raise AttributeError(name)
        if name in {"batch_size", "drop_last"}:
            self._is_shared_out = True
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        # Where batches are sent from rank 0 to the others, it alone reads all of them.
        if self._rank and not self._is_shared_out and _trains_with_accelerate():
            message = f"Rank {self._rank} of {self._ranks} reads the batches of all "
            message += "ranks, as each of the others."
            why = "accelerate skips the first batches of a loader that was not prepared"
            why += ", probably where a Trainer goes on in the middle of an epoch"
            fix = "accelerator.prepare(loader); Hugging Face's Trainer: return "
            fix += "self.accelerator.prepare(loader) in get_train_dataloader"
            raise LoaderError(message, why=why, fix=fix)
        return iter(self._batches)


def _trains_with_accelerate() -> bool:
    """Tell whether several processes train here, and accelerate may be at work."""
    group = torch.distributed
    if "accelerate" not in sys.modules or not group.is_available():
        return False
    return group.is_initialized() and group.get_world_size() > 1


@dataclass(frozen=True)
class PublicSamplers:
    """What a loader shows as its ``sampler`` and ``batch_sampler``.

    ``sampler`` gives the rows of this rank.  ``batch_sampler`` gives the batches of all
    ranks, because trainers that share batches out themselves (accelerate) read it.
    """

    sampler: Iterable[Any] | None
    """Rows, one by one; None for iterable datasets."""
    batch_sampler: Iterable[Sequence[Any]] | None
    """Rows, batch by batch; None if samples are not joined."""

    @classmethod
    def of_rule(
        cls, dataset: Sized, batches: EpochBatches, *, batched: bool = True
    ) -> PublicSamplers:
        """Make samplers of torch's classes for the batches of a rule, if possible.

        Args:
            dataset: The dataset that the rows are of.
            batches: The batches of this rank.
            batched: Samples are joined; otherwise there is no ``batch_sampler``.
        """
        rule = batches.rule
        shown = rule.all_ranks()
        if shown.plain:
            # torch's samplers give every row; its BatchSampler drops the last ones.
            shown = replace(shown, drop_last=False)
        everything = EpochBatches(
            shown, batches.position, dataset, shared_out=rule.ranks > 1
        )
        batches.lend_seed_to(everything)
        in_order = SequentialSampler(dataset)
        sampler: Sampler[int] = in_order
        if rule.ranks > 1:
            sampler = RankOrder(dataset, batches)
        elif rule.shuffle:
            sampler = EpochOrder(everything if rule.plain else batches)
        if not batched:
            return cls(sampler, None)
        batch_sampler: Any = everything
        if rule.plain:
            batch_size, drop_last = rule.batch_size or 1, rule.drop_last
            if rule.shuffle:
                order = EpochOrder(everything)
                batch_sampler = BatchesOfOrder(order, batch_size, drop_last=drop_last)
            else:
                batch_sampler = BatchSampler(in_order, batch_size, drop_last)
        if rule.ranks > 1:
            batch_sampler = BatchesOfAllRanks(batch_sampler, rule)
        return cls(sampler, batch_sampler)


class IterationBatches:
    """The ``batch_sampler`` of the inner loader: the batches of one iteration.

    torch calls ``iter`` on it once or twice for one iteration, and that must not move
    on to the next epoch.

    Args:
        batches: Gives the batches of an epoch.
        position: Where the iteration begins.
    """

    def __init__(self, batches: LoaderBatches, position: Position) -> None:
        self.batches = batches
        self._position = position

    def begin_at(self, position: Position) -> None:
        """Give the batches from another position on, in the next iteration."""
        self._position = position

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[SeededRows]:
        return self.batches.batches_of(self._position)
