"""Batches of rows, epoch after epoch, that can begin anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    Sampler,
    SequentialSampler,
)

from loaderkit.arguments import check_integer
from loaderkit.errors import LoaderError
from loaderkit.loader.description import sizes_of
from loaderkit.loader.samplers import (
    BatchRule,
    Epoch,
    bucket_bounds,
    can_be_cut_anywhere,
    count_ordered_samples,
    left_out_rows,
    make_epoch,
)
from loaderkit.loader.stateful import digest_of_plain
from loaderkit.randomness import mix_seed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


class SeededRows(list[Any]):
    """The rows of a batch, and what making it follows from.

    Args:
        rows: Of the dataset.
        number: Which batch of this rank's epoch it is.
        seed: What the random numbers drawn while reading follow from.
        bound: The length that ragged fields are padded to; None for the longest.
    """

    __slots__ = ("bound", "number", "seed")

    def __init__(
        self, rows: Sequence[Any], number: int, seed: int, bound: int | None = None
    ) -> None:
        super().__init__(rows)
        self.number, self.seed, self.bound = number, seed, bound

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededRows, (list(self), self.number, self.seed, self.bound)


def check_epoch(name: str, value: Any) -> int:
    """Take the number of an epoch, or of a batch: int64 goes to workers and numpy."""
    return check_integer(name, value, least=0, most=2**63 - 1)


@dataclass
class Position:
    """Where the next iteration begins.  A loader and its samplers share one."""

    epoch: int = 0
    """Which epoch it gives."""
    batches: int = 0
    """How many of its batches each rank was given, so also the first one to give."""
    samples: int = 0
    """How many samples of the epoch's global order all ranks were given with them;
    counted for orders of our own only."""
    ahead: frozenset[int] = frozenset()
    """Batches behind that which were given already, out of order."""
    moves: int = field(default=0, compare=False)
    """How often it was moved, also to where it stood."""

    def go_to(self, at: Position) -> None:
        """Stand where another position stands."""
        self.epoch, self.ahead = at.epoch, at.ahead
        self.batches, self.samples = at.batches, at.samples
        self.moves += 1

    @property
    def is_in_epoch(self) -> bool:
        """Whether some batches of the epoch were given already."""
        return self.batches > 0 or bool(self.ahead)

    def set_epoch(self, epoch: int) -> None:
        """Choose an epoch; the one that stands here goes on where it stood.

        A loop that was resumed says ``set_epoch`` before each epoch, the one in whose
        middle it was stopped included.

        Raises:
            OptionError: It is no integer from 0 that int64 holds.
        """
        number = check_epoch("epoch", epoch)
        self.go_to(replace(self) if number == self.epoch else Position(number))

    def advance(self) -> Position:
        """Move on to the next epoch, and give where this one begins."""
        here = replace(self)
        self.go_to(Position(self.epoch + 1))
        return here


class Passes:
    """Counts the passes over a sampler that a loader shows.

    A trainer that loops over the sampler gets a new epoch each time, as of torch's
    samplers, beginning where the loader stands.  The loader itself is not moved by
    that: ``list(loader.sampler)`` is a look.

    Args:
        loader: Where the loader stands.
    """

    def __init__(self, loader: Position) -> None:
        self._loader, self._next = loader, replace(loader)

    def upcoming(self) -> Position:
        """Say where the next pass begins."""
        if self._next.moves != self._loader.moves:
            self._next = replace(self._loader)
        return self._next

    def begin(self) -> Position:
        """Say where this pass begins, and move on to the next."""
        here = self.upcoming()
        self._next = Position(here.epoch + 1, moves=here.moves)
        return here


class LoaderBatches(Protocol):
    """What gives the rows of each batch of a loader."""

    def __len__(self) -> int:
        """Count the batches of the epoch that comes next."""

    def batches_of(self, at: Position) -> Iterator[SeededRows]:
        """Give the batches of an epoch that are missing from a position on."""

    def reseed(self, seed: int) -> None:
        """Follow another seed from now on."""


class EpochBatches(Sampler[list[int]]):
    """Batches that follow from a rule: a new order every epoch, resumable anywhere.

    Args:
        rule: How samples become batches.
        position: Where it stands; a new one if None.
        dataset: What the rows are of; it may have more of them in the next epoch.  None
            if only their number is known.
    """

    def __init__(
        self, rule: BatchRule, position: Position | None = None, dataset: Any = None
    ) -> None:
        self.rule, self.position = rule, position or Position()
        self._dataset = dataset
        self._passes = Passes(self.position)
        self._cached: tuple[tuple[int, int, int], Epoch] | None = None
        self._bounds: Ints | None = None
        self._facts: dict[str, Any] | None = None
        self._followers: list[EpochBatches] = []

    def __len__(self) -> int:
        self.follow_dataset()
        return len(self.epoch_from(self._passes.upcoming()))

    def __iter__(self) -> Iterator[list[int]]:
        self.follow_dataset()
        # It counts the batches of a rank's loader.  Those here may be others, so that
        # only the samples count, and none is out of turn.
        here = replace(self._passes.begin(), ahead=frozenset())
        yield from self.batches_of(here)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next, as for torch's DistributedSampler."""
        self.position.set_epoch(epoch)

    def reseed(self, seed: int) -> None:
        """Follow another seed from now on."""
        self.rule, self._cached = replace(self.rule, seed=seed % 2**63), None
        for follower in self._followers:
            follower.reseed(seed)

    def lend_seed_to(self, follower: EpochBatches) -> None:
        """Have other batches, such as those that a loader shows, follow the seed."""
        self._followers.append(follower)

    def follow_dataset(self) -> None:
        """Take over how many samples the dataset has by now, as torch's samplers do.

        An epoch that has begun goes on as it was.
        """
        if self._dataset is None or len(self._dataset) == self.rule.samples:
            return
        sizes = {name: sizes_of(self._dataset, name) for name in self.rule.sizes}
        self.rule = replace(self.rule, samples=len(self._dataset), sizes=sizes)
        self._cached = self._bounds = self._facts = None

    def order_facts(self) -> dict[str, Any]:
        """Say what the global order follows from, besides seed and epoch.

        How it is shared out and cut into batches is no part of that, unless whole
        batches are what is shuffled.
        """
        self.follow_dataset()
        if self._facts is None:
            rule = self.rule
            order_words = {True: "shuffled", False: "in order", "block": "in blocks"}
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
        """Count the samples of the global order, which is as long in every epoch."""
        self.follow_dataset()
        return count_ordered_samples(self.rule)

    def check_position(self, position: Position, seed: int) -> None:
        """Refuse a place from which no batches of this rule follow.

        Args:
            position: Of another run.
            seed: What its order followed from.

        Raises:
            LoaderError: No batch begins there, or the batches that it has out of turn
                are not there.
        """
        is_anywhere = can_be_cut_anywhere(self.rule) and not position.ahead
        if is_anywhere or not position.is_in_epoch:
            return
        epoch = make_epoch(
            replace(self.rule, seed=seed % 2**63),
            position.epoch,
            given_samples=position.samples,
            given_batches=position.batches,
        )
        if max(position.ahead, default=0) >= max(len(epoch), 1):
            message = f"The state has batch {max(position.ahead):,} of epoch "
            message += f"{position.epoch}, which has {len(epoch):,}."
            why = "it is not that of this dataset and this batch size"
            fix = "load_state_dict(loader.state_dict())"
            raise LoaderError(message, why=why, fix=fix)

    def samples_given(self, start: Position, batches: int) -> int:
        """Count the samples of the global order that all ranks were given.

        Args:
            start: Where the iteration began.
            batches: How many of the epoch's batches each rank was given by now.
        """
        return self.epoch_from(start).samples_given(batches)

    def current(self) -> Epoch:
        """Work out the epoch that comes next, or the rest of it."""
        self.follow_dataset()
        return self.epoch_from(self.position)

    def epoch_from(self, at: Position) -> Epoch:
        """Work out an epoch, or what is left of it; the last one is kept."""
        key = (at.epoch, at.samples, at.batches)
        if self._cached is None or self._cached[0] != key:
            self._cached = None  # before the next is made: 80 MB for 10^7 samples
            epoch = make_epoch(
                self.rule,
                at.epoch,
                given_samples=at.samples,
                given_batches=at.batches,
            )
            self._cached = (key, epoch)
        return self._cached[1]

    def batches_of(self, at: Position) -> Iterator[SeededRows]:
        """Give the batches of an epoch.

        Args:
            at: Which epoch, the batch it begins with, and those to leave out.

        Returns:
            The rows of each; which they are is settled now.
        """
        self.follow_dataset()
        return self._batches_of(at, self.epoch_from(at))

    def _batches_of(self, at: Position, epoch: Epoch) -> Iterator[SeededRows]:
        for number in epoch.numbers:
            if number in at.ahead:
                continue
            rows = epoch.batch(number)
            # The place in the global order is another one for each batch of each rank,
            # also where other ranks, or other batch sizes, began the epoch.
            seed = mix_seed(self.rule.seed, at.epoch, epoch.place(number))
            yield SeededRows(rows, number, seed, self._bound(rows))

    def _bound(self, rows: list[int]) -> int | None:
        """Give the length that a batch of ragged samples is padded to."""
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
        batches: Whose rows.
    """

    def __init__(self, batches: EpochBatches) -> None:
        self._batches, self._passes = batches, Passes(batches.position)

    def __len__(self) -> int:
        self._batches.follow_dataset()
        return len(self._batches.epoch_from(self._passes.upcoming()).order)

    def __iter__(self) -> Iterator[int]:
        self._batches.follow_dataset()
        yield from self._batches.epoch_from(self._passes.begin()).order.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next, as for torch's DistributedSampler."""
        self._batches.set_epoch(epoch)


class RankOrder(DistributedSampler[int]):
    """The rows that one rank reads: ``loader.sampler`` where several train together.

    It is a ``DistributedSampler`` because trainers look for one: they leave a loader
    alone that has it, and would share its rows out once more otherwise.

    Args:
        dataset: Whose rows.
        batches: This rank's.
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


@dataclass(frozen=True)
class PublicSamplers:
    """What a loader shows as its ``sampler`` and ``batch_sampler``.

    ``sampler`` gives the rows of this rank.  ``batch_sampler`` gives the batches of all
    ranks, because trainers that share batches out themselves (accelerate) take it.
    """

    sampler: Any
    """Rows, one by one."""
    batch_sampler: Any
    """Rows, batch by batch."""

    @classmethod
    def of_rule(
        cls, dataset: Any, batches: EpochBatches, *, batched: bool = True
    ) -> PublicSamplers:
        """Show the batches of a rule as torch would show them, where it could.

        Args:
            dataset: What the rows are of.
            batches: This rank's.
            batched: Samples are joined; else there is no ``batch_sampler``.
        """
        rule = batches.rule
        shown = rule.all_ranks()
        if shown.plain:  # torch's samplers give every row; the BatchSampler drops some
            shown = replace(shown, drop_last=False)
        everything = EpochBatches(shown, batches.position, dataset)
        batches.lend_seed_to(everything)
        in_order = SequentialSampler(dataset)
        sampler: Any = in_order
        if rule.ranks > 1:
            sampler = RankOrder(dataset, batches)
        elif rule.shuffle:
            sampler = EpochOrder(everything if rule.plain else batches)
        if not batched:
            return cls(sampler, None)
        if not rule.plain:
            return cls(sampler, everything)
        rows = EpochOrder(everything) if rule.shuffle else in_order
        return cls(sampler, BatchSampler(rows, rule.batch_size or 1, rule.drop_last))


class IterationBatches:
    """The batches of one iteration, however often torch asks for them.

    torch calls ``iter`` on a sampler once or twice for one iteration, which must not
    move the epoch on.

    Args:
        batches: Where they come from.
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
