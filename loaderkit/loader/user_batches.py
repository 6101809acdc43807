"""Batches that a sampler of the user's chooses: seeded, shared out, resumable."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from loaderkit.errors import LoaderError, OptionError
from loaderkit.loader.randomness import Seeded
from loaderkit.loader.ranks import Deal, share_length
from loaderkit.loader.resumable import Position, SeededRows, mix_seed
from loaderkit.loader.stateful import SamplerState, read_sampler, restore_sampler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from loaderkit.loader.ranks import Ranks


class UserBatches:
    """Batches that a sampler of the user's chooses.

    Args:
        sampler: Gives rows, or whole batches of them.
        batch_size: Samples of a batch; None where it gives whole batches.
        drop_last: Leave out a last batch that is not full.
        seed: What random numbers follow from: those that the sampler draws from the
            global generators, and those of reading.
        ranks: Who this process is; samples, or whole batches, are dealt out in turn.
    """

    def __init__(
        self, sampler: Iterable[Any], batch_size: int | None, *, drop_last: bool,
        seed: int, ranks: Ranks,
    ) -> None:  # fmt: skip
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self.seed, self.ranks = seed, ranks
        self.name = type(sampler).__name__
        self.shares_itself = _shares_rows(sampler, ranks)
        self._epoch_start: SamplerState | None = None
        self._drawn_epoch = -1
        self._snapshots: dict[int, SamplerState] = {}
        self._prepared: tuple[Position, _Draws] | None = None

    def __len__(self) -> int:
        count = len(self.sampler)  # type: ignore[arg-type]
        if not self.shares_itself:
            count = share_length(count, self.ranks.world_size, drop_last=self.drop_last)
        if self.batch_size is None:
            return count
        return share_length(count, self.batch_size, drop_last=self.drop_last)

    def reseed(self, seed: int) -> None:
        """Follow another seed from now on."""
        self.seed = seed

    def batches_of(self, at: Position) -> Iterator[SeededRows]:
        """Give the batches of an epoch.

        Args:
            at: Which epoch, told to samplers that have ``set_epoch``, and the batch it
                begins with; those before it are drawn and dropped.

        Yields:
            The rows of each.
        """
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == at:
            draws = prepared[1]
        else:
            draws = self._draws(at.epoch)
            draws.drop(at.start)
        if at.start:
            self._snapshots[at.start - 1] = draws.snapshot()
        for rows in draws:
            number = draws.number - 1
            self._snapshots[number] = draws.snapshot()
            if number in at.ahead:
                continue
            ranks, rank = self.ranks.world_size, self.ranks.rank
            yield SeededRows(
                rows, number, mix_seed(self.seed, at.epoch, number * ranks + rank)
            )

    def state_after(self, at: Position, *, running: bool) -> dict[str, Any]:
        """Say how the sampler stood where an iteration stands.

        Args:
            at: The epoch, and its batches that were given; workers may have been
                asked for more.
            running: Its iteration has begun, and not ended.
        """
        batches = at.start
        if self._prepared is not None:
            return self._prepared[1].snapshot().to_dict()
        drawn = running and self._drawn_epoch == at.epoch
        if self._epoch_start is None or not drawn:
            # The sampler that takes this state over is told the epoch first, too.
            set_sampler_epoch(self.sampler, at.epoch)
            return read_sampler(self.sampler).to_dict()
        if not batches:
            return self._epoch_start.to_dict()
        for number in [n for n in self._snapshots if n < batches - 1]:
            del self._snapshots[number]
        return self._snapshots[batches - 1].to_dict()

    def restore(self, state: dict[str, Any], at: Position) -> None:
        """Bring the sampler to where another one stood.

        Args:
            state: What ``state_after`` gave.
            at: The epoch, and the batches that were given.

        Raises:
            LoaderError: It cannot be brought there.
        """
        set_sampler_epoch(self.sampler, at.epoch)
        saved = SamplerState.from_dict(state)
        restore_sampler(self.sampler, saved)
        draws = _Draws(self, at.epoch)
        if saved.own is not None:
            draws.number = at.start
        else:
            draws.drop(at.start)
            if at.start and saved.digest != draws.digest:
                what = f"The {self.name} gives other batches than those before it."
                why = "it draws from something that it does not show"
                fix = "give it state_dict() and load_state_dict(), or a generator"
                raise LoaderError(what, why=why, fix=fix)
        self._prepared = (replace(at), draws)

    def _draws(self, epoch: int) -> _Draws:
        set_sampler_epoch(self.sampler, epoch)
        return _Draws(self, epoch)

    def rows_of_rank(self) -> Iterator[Any]:
        """Iterate over the sampler, as far as it concerns this rank."""
        if self.shares_itself:
            return iter(self.sampler)
        return Deal(iter(self.sampler), self.ranks, drop_last=self.drop_last)

    def note_epoch_start(self, epoch: int) -> None:
        """Keep how the sampler stands before anything is drawn from it."""
        self._drawn_epoch = epoch
        self._epoch_start, self._snapshots = read_sampler(self.sampler), {}

    @property
    def epoch_start(self) -> SamplerState:
        """How the sampler stood when the epoch began."""
        return self._epoch_start or read_sampler(self.sampler)


class _Draws:
    """One pass over a user's sampler, batch by batch.

    What the sampler draws from the global generators follows from the seed, the epoch
    and the batch alone, so that every rank and every resumed run draws the same.
    """

    def __init__(self, batches: UserBatches, epoch: int) -> None:
        self._batches, self._epoch = batches, epoch
        self._iterator: Iterator[Any] | None = None
        self._hash = hashlib.blake2b(digest_size=8)
        self.number = 0
        batches.note_epoch_start(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        while (rows := self._next()) is not None:
            yield rows

    def drop(self, count: int) -> None:
        """Draw batches that were given already."""
        for _ in islice(self, count):
            pass

    @property
    def digest(self) -> str:
        """Tell one series of batches from another; empty before the first."""
        return self._hash.hexdigest() if self.number else ""

    def snapshot(self) -> SamplerState:
        """Say how the sampler stands, and what it has given."""
        state = read_sampler(self._batches.sampler)
        if state.own is not None:
            return state
        return replace(self._batches.epoch_start, digest=self.digest)

    def _next(self) -> list[Any] | None:
        with Seeded(mix_seed(self._batches.seed, self._epoch, -1 - self.number)):
            if self._iterator is None:
                self._iterator = self._batches.rows_of_rank()
            rows = self._next_rows(self._iterator)
        if rows is None:
            return None
        self._hash.update(repr(rows).encode())
        self.number += 1
        return rows

    def _next_rows(self, iterator: Iterator[Any]) -> list[Any] | None:
        size = self._batches.batch_size
        if size is None:
            batch = next(iterator, None)
            return None if batch is None else list(batch)
        rows = list(islice(iterator, size))
        too_few = len(rows) < size and self._batches.drop_last
        return rows if rows and not too_few else None


def set_sampler_epoch(sampler: Any, epoch: int) -> None:
    """Tell a sampler, and the one within it, which epoch comes next."""
    each: Any
    for each in (sampler, getattr(sampler, "sampler", None)):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)


def _shares_rows(sampler: Any, ranks: Ranks) -> bool:
    """Tell whether a sampler gives the rows of one rank only, as torch's own does."""
    for each in (sampler, getattr(sampler, "sampler", None)):
        size, rank = getattr(each, "num_replicas", None), getattr(each, "rank", None)
        if not isinstance(size, int) or not isinstance(rank, int):
            continue
        if (rank, size) != (ranks.rank, ranks.world_size) and ranks.world_size > 1:
            what = f"The {type(each).__name__} is for rank {rank} of {size}, this is "
            what += f"rank {ranks.rank} of {ranks.world_size}."
            fix = "drop the sampler (ranks are shared out), or rank and world_size"
            raise OptionError(what, why=ranks.told_by, fix=fix)
        return True
    return ranks.world_size == 1
