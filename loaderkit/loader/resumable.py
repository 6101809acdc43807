"""Batches of rows, epoch after epoch, that can begin anywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import BatchSampler, Sampler

from loaderkit.errors import LoaderError
from loaderkit.loader.samplers import BatchRule, Epoch, bucket_bounds, make_epoch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


class Rows(list[int]):
    """The rows of a batch, what randomness follows from, and how far to pad."""

    __slots__ = ("bound", "seed")

    def __init__(
        self, rows: Sequence[int] = (), seed: int = 0, bound: int | None = None
    ) -> None:
        super().__init__(rows)
        self.seed, self.bound = seed, bound

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (list(self), self.seed, self.bound)


class Resumable(Sampler[list[int]]):
    """Batches whose epoch and first batch can be chosen; each iteration moves on."""

    epoch = 0
    """The epoch that the next iteration gives."""
    start = 0
    """The batch it begins with."""

    def batches_of(self, epoch: int, start: int) -> Iterator[list[int]]:
        """Give the batches of an epoch, from a batch on."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[list[int]]:
        epoch, start = self.epoch, self.start
        self.epoch, self.start = epoch + 1, 0
        yield from self.batches_of(epoch, start)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next, as for torch's DistributedSampler."""
        self.epoch, self.start = int(epoch), 0


class EpochBatches(Resumable):
    """The ``batch_sampler`` of a loader: a new order every epoch, resumable anywhere.

    Args:
        rule: How samples become batches.
    """

    def __init__(self, rule: BatchRule) -> None:
        self.rule = rule
        self.batch_size = rule.batch_size
        self.drop_last = rule.drop_last
        self._made: tuple[int, Epoch] | None = None
        self._bounds: Ints | None = None

    def __len__(self) -> int:
        return len(self.current())

    def reseed(self, seed: int) -> None:
        """Follow another seed from now on."""
        self.rule, self._made = replace(self.rule, seed=seed % 2**63), None

    def current(self) -> Epoch:
        """Work out the epoch that comes next."""
        return self.made(self.epoch)

    def made(self, epoch: int) -> Epoch:
        """Work out an epoch; the last one is kept."""
        if self._made is None or self._made[0] != epoch:
            self._made = (epoch, make_epoch(self.rule, epoch))
        return self._made[1]

    def batches_of(self, epoch: int, start: int) -> Iterator[list[int]]:
        """Give the batches of an epoch.

        Args:
            epoch: Which one.
            start: The batch it begins with.

        Yields:
            The rows of each.
        """
        made = self.made(epoch)
        for number in range(start, len(made)):
            rows = made.batch(number)
            yield Rows(rows, mixed(self.rule.seed, epoch, number), self._bound(rows))

    def _bound(self, rows: list[int]) -> int | None:
        """Give the length that a batch of ragged samples is padded to."""
        if self.rule.bucket_by != "tokens":
            return None
        sizes = self.rule.sizes["tokens"]
        if self._bounds is None:
            self._bounds = bucket_bounds(sizes, self.rule.buckets)
        longest = int(sizes[rows].max())
        return int(self._bounds[np.searchsorted(self._bounds, longest)])


class Turn:
    """The batches of one iteration, however often torch asks for them.

    torch calls ``iter`` on a sampler once or twice for one iteration, which must not
    move the epoch on.

    Args:
        batches: Where they come from.
        epoch: Which epoch.
        start: The batch it begins with.
    """

    def __init__(self, batches: Any, epoch: int, start: int) -> None:
        self.batches, self.epoch, self.start = batches, epoch, start

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        found: Iterator[list[int]] = self.batches.batches_of(self.epoch, self.start)
        return found


def mixed(seed: int, epoch: int, number: int) -> int:
    """Make one seed of three numbers (splitmix64's last step)."""
    value = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + number) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return (value ^ (value >> 31)) % 2**63


class GivenBatches(Resumable):
    """Batches that a sampler of the user's chooses, resumable by reading on.

    Args:
        batches: Gives the rows of batch after batch.
        seed: What the random numbers of reading follow from.
        name: The sampler's class.
    """

    def __init__(self, batches: Iterable[Sequence[int]], seed: int, name: str) -> None:
        self.batches, self.seed, self.name = batches, seed, name
        self.batch_size = getattr(batches, "batch_size", None)
        self.drop_last = getattr(batches, "drop_last", False)

    @classmethod
    def of(cls, chosen: Any, limits: Any, seed: int) -> GivenBatches:
        """Take over what the caller gave.

        Args:
            chosen: The options, with a ``sampler`` or a ``batch_sampler``.
            limits: Limits of a batch; there can be none.
            seed: What the random numbers of reading follow from.

        Returns:
            The batches.

        Raises:
            LoaderError: Options contradict each other.
        """
        both = chosen.sampler is not None and chosen.batch_sampler is not None
        sized = chosen.batch_sampler is not None and chosen.batch_size is not None
        if both or sized or limits or chosen.shuffle or chosen.bucket_by:
            name = "batch_sampler" if chosen.batch_sampler is not None else "sampler"
            what = f"{name} was given with another rule for batches."
            why = "both would choose the samples"
            fix = f"drop {name}, or the other: shuffle, batch_size, max_..., bucket_by"
            raise LoaderError(what, why=why, fix=fix)
        if chosen.batch_sampler is not None:
            given = chosen.batch_sampler
            return cls(given, seed, type(given).__name__)
        size = chosen.batch_size or 1
        batches = BatchSampler(chosen.sampler, size, chosen.drop_last)
        return cls(batches, seed, type(chosen.sampler).__name__)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def reseed(self, seed: int) -> None:
        """Follow another seed from now on."""
        self.seed = seed

    def batches_of(self, epoch: int, start: int) -> Iterator[list[int]]:
        """Give the batches of an epoch.

        Args:
            epoch: Which one; told to samplers that have ``set_epoch``.
            start: The batch it begins with; those before it are drawn and dropped.

        Yields:
            The rows of each.
        """
        each: Any
        for each in (self.batches, getattr(self.batches, "sampler", None)):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        for number, rows in enumerate(self.batches):
            if number >= start:
                yield Rows(rows, mixed(self.seed, epoch, number))
