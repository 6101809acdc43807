"""Batches that a sampler of the user's chooses: seeded, shared out, resumable."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from loaderkit.errors import LoaderError, OptionError
from loaderkit.loader.ranks import Deal, share_length
from loaderkit.loader.resumable import Position, SeededRows
from loaderkit.loader.sampler_epochs import SamplerEpochs
from loaderkit.loader.stateful import (
    SamplerState,
    length_of,
    read_sampler,
    restore_sampler,
    stateful_part,
)
from loaderkit.randomness import Seeded, mix_seed

if TYPE_CHECKING:
    from collections.abc import Iterable

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
        dataset: What the rows are of.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        batch_size: int | None,
        *,
        drop_last: bool,
        seed: int,
        ranks: Ranks,
        dataset: Any = None,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.epochs = SamplerEpochs(sampler)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.seed = seed
        self.ranks = ranks
        self.name = type(sampler).__name__
        self.shares_itself = _shares_rows(sampler, ranks)
        self._epoch_start: SamplerState | None = None
        self._drawn_epoch = -1
        self._snapshots: dict[int, SamplerState] = {}
        self._prepared: tuple[Position, _SamplerPass] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Travel without a pass that has begun: iterators cannot be sent."""
        no_pass = {"_prepared": None, "_epoch_start": None, "_drawn_epoch": -1}
        return {**vars(self), **no_pass, "_snapshots": {}}

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
        # A sampler may be told another epoch after a state was loaded.
        if prepared is not None and self.epochs.look():
            if at.batches and prepared[0] == at:
                raise self._epoch_changed_error(at)
            prepared = None

        if prepared is not None and prepared[0] == at:
            sampler_pass = prepared[1]
        else:
            sampler_pass = self._begin_pass(at.epoch)
            sampler_pass.drop(at.batches)
        if at.batches:
            self._snapshots[at.batches - 1] = sampler_pass.snapshot()

        # Ranks draw other random numbers, although their batches have equal numbers.
        ranks, rank = self.ranks.world_size, self.ranks.rank
        for rows in sampler_pass:
            number = sampler_pass.number - 1
            self._snapshots[number] = sampler_pass.snapshot()
            if number in at.ahead:
                continue
            seed = mix_seed(self.seed, at.epoch, number * ranks + rank)
            yield SeededRows(rows, number, seed)

        if not sampler_pass.number and _is_iterator(self.sampler):
            text = f"epoch {at.epoch} has no batches: the {self.name} that chooses the "
            text += "samples is an iterator, which can be read only once; sampler=list("
            text += "...), or an object whose __iter__ begins anew"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def state_after(self, at: Position, *, running: bool) -> dict[str, Any]:
        """Say how the sampler stood where an iteration stands.

        Args:
            at: The epoch, and its batches that were given; workers may have been
                asked for more.
            running: Its iteration has begun, and not ended.
        """
        batches = at.batches
        if self._prepared is not None:
            return self._prepared[1].snapshot().to_dict()

        has_begun = running and self._drawn_epoch == at.epoch
        if self._epoch_start is None or not has_begun:
            # The sampler that takes this state over is told the epoch first, too.
            self.epochs.tell(at.epoch)
            return self.read().to_dict()
        if not batches:
            return self._epoch_start.to_dict()

        # A position only moves forward: earlier states are not asked for again.
        outdated = [number for number in self._snapshots if number < batches - 1]
        for number in outdated:
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
        saved = SamplerState.from_dict(state)
        self.epochs.adopt(dict(saved.values), at.epoch, by_hand=saved.epoch_by_hand)
        sampler_state = restore_sampler(self.sampler, saved, self.dataset)
        sampler_pass = _SamplerPass(self, at.epoch, sampler_state)
        if saved.own is not None:
            sampler_pass.number = at.batches
        else:
            sampler_pass.drop(at.batches)
            if sampler_pass.number < at.batches:
                message = (
                    f"The state has {at.batches:,} batches of the {self.name}, which "
                )
                message += f"gives {sampler_pass.number:,} in an epoch."
                fix = "give the loader the same sampler"
                raise LoaderError(message, why="there is no rest to give", fix=fix)
            comparable = saved.rank in {None, self.digest_rank}
            if at.batches and comparable and saved.digest != sampler_pass.digest:
                message = f"The {self.name} gives other batches than those before it."
                why = "it draws from something that it does not show"
                fix = "give it state_dict() and load_state_dict(), or a generator"
                raise LoaderError(message, why=why, fix=fix)
        self._prepared = (replace(at), sampler_pass)

    @property
    def digest_rank(self) -> int | None:
        """Whose rows are compared: those of all ranks, where they are dealt out."""
        alone = self.ranks.world_size == 1 or not self.shares_itself
        return None if alone else self.ranks.rank

    def _epoch_changed_error(self, at: Position) -> LoaderError:
        message = (
            f"The {self.name} was told another epoch after a state was loaded that "
        )
        message += (
            f"stands in the middle of epoch {at.epoch}, behind {at.batches:,} batches."
        )
        why = "the rest of that epoch would be that of another order"
        fix = "set the sampler's epoch before load_state_dict, or loader.set_epoch() "
        return LoaderError(message, why=why, fix=f"{fix}to leave the rest out")

    def read(self) -> SamplerState:
        """Read how the sampler stands."""
        return self._with_loader_facts(read_sampler(self.sampler, self.dataset))

    def _with_loader_facts(self, state: SamplerState) -> SamplerState:
        """Add what only the loader knows."""
        by_hand = self.epochs.by_hand
        return replace(state, epoch_by_hand=by_hand, rank=self.digest_rank)

    def _begin_pass(self, epoch: int) -> _SamplerPass:
        self.epochs.tell(epoch)
        return _SamplerPass(self, epoch)

    def rows_of_rank(self, hashed: _RowsHash) -> Iterator[Any]:
        """Iterate over the sampler, as far as it concerns this rank.

        Args:
            hashed: Takes in what the sampler gives.  That is the same on all ranks
                before it is dealt out, so that a state of one is every rank's.
        """
        hashed_rows = _HashedRows(iter(self.sampler), hashed, self)
        if self.shares_itself:
            return hashed_rows
        return Deal(hashed_rows, self.ranks, drop_last=self.drop_last)

    def note_epoch_start(self, epoch: int, sampler_state: SamplerState | None) -> None:
        """Keep how the sampler stands before anything is drawn from it.

        Args:
            epoch: That begins.
            sampler_state: As it was read just now; None reads it.
        """
        self._drawn_epoch, self._snapshots = epoch, {}
        if sampler_state is None:
            self._epoch_start = self.read()
        else:
            self._epoch_start = self._with_loader_facts(sampler_state)

    @property
    def epoch_start(self) -> SamplerState:
        """How the sampler stood when the epoch began."""
        return self._epoch_start or self.read()


class _SamplerPass:
    """One pass over a user's sampler, batch by batch.

    What the sampler draws from the global generators follows from the seed, the epoch
    and the batch alone, so that every rank and every resumed run draws the same.
    """

    def __init__(
        self,
        batches: UserBatches,
        epoch: int,
        sampler_state: SamplerState | None = None,
    ) -> None:
        self._batches = batches
        self._epoch = epoch
        self._iterator: Iterator[Any] | None = None
        self._hash = _RowsHash()
        self.number = 0
        batches.note_epoch_start(epoch, sampler_state)

    def __iter__(self) -> Iterator[list[Any]]:
        while (rows := self._draw_batch()) is not None:
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
        # Of others nothing is read here: their rows and weights may be millions.
        if stateful_part(self._batches.sampler) is not None:
            return self._batches.read()
        return replace(self._batches.epoch_start, digest=self.digest)

    def _draw_batch(self) -> list[Any] | None:
        self._batches.epochs.look()
        with Seeded(mix_seed(self._batches.seed, self._epoch, -1 - self.number)):
            if self._iterator is None:
                self._iterator = self._batches.rows_of_rank(self._hash)
            rows = self._take_rows(self._iterator)
        self._batches.epochs.note()
        if rows is None:
            return None
        self.number += 1
        return rows

    def _take_rows(self, iterator: Iterator[Any]) -> list[Any] | None:
        size = self._batches.batch_size
        if size is None:
            batch: list[Any] | None = next(iterator, None)
            return batch  # never None itself: _Given has made a list of it
        rows = list(islice(iterator, size))
        too_few = len(rows) < size and self._batches.drop_last
        return rows if rows and not too_few else None


class _RowsHash:
    """The hash of what a sampler gives, row by row or batch by batch.

    Rows are hashed many at a time: one by one takes 0.5 us each, which is 60 us more
    for a batch of 128.
    """

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)
        self._rows: list[Any] = []

    def add(self, item: Any) -> None:
        """Take in a row, or a batch of rows, which its taker may change afterwards."""
        self._rows.append(item)
        if isinstance(item, list) or len(self._rows) == _ROWS_HASHED_AT_ONCE:
            self._hash_pending_rows()

    def hexdigest(self) -> str:
        """Give the hash of all so far, however they were taken in."""
        self._hash_pending_rows()
        return self._digest.hexdigest()

    def _hash_pending_rows(self) -> None:
        if self._rows:
            self._digest.update(f"{repr(self._rows)[1:-1]}, ".encode())
            self._rows.clear()


_ROWS_HASHED_AT_ONCE = 1024


class _HashedRows(Iterator[Any]):
    """What a sampler gives, hashed on the way; whole batches as lists.

    Args:
        items: Rows, or batches of them.
        hashed: Takes them in.
        batches: Whose sampler gives them.
    """

    def __init__(
        self, items: Iterator[Any], hashed: _RowsHash, batches: UserBatches
    ) -> None:
        self._items = items
        self._hash = hashed
        self._batches = batches

    def __next__(self) -> Any:
        item = next(self._items)
        if self._batches.batch_size is None:
            item = self._as_list(item)
        self._hash.add(item)
        return item

    def _as_list(self, batch: Any) -> list[Any]:
        try:
            # Letters are no rows, although torch would read them as such.
            if not isinstance(batch, str | bytes):
                return list(batch)
        except TypeError:
            pass
        message = (
            f"The batch_sampler ({self._batches.name}) gave {batch!r:.80} as a batch."
        )
        why = f"a {type(batch).__name__} is no list of rows"
        fix = "sampler=... if it gives rows one by one, or let it give lists of rows"
        raise OptionError(message, why=why, fix=fix)


def _is_iterator(sampler: Any) -> bool:
    inner_sampler = getattr(sampler, "sampler", None)  # of a BatchSampler
    return isinstance(sampler, Iterator) or isinstance(inner_sampler, Iterator)


def _shares_rows(sampler: Any, ranks: Ranks) -> bool:
    """Tell whether a sampler gives the rows of one rank only, as torch's own does."""
    for part in (sampler, getattr(sampler, "sampler", None)):
        size = getattr(part, "num_replicas", None)
        rank = getattr(part, "rank", None)
        if not isinstance(size, int) or not isinstance(rank, int):
            continue
        if (rank, size) != (ranks.rank, ranks.world_size) and ranks.world_size > 1:
            message = (
                f"The {type(part).__name__} is for rank {rank} of {size}, this is "
            )
            message += f"rank {ranks.rank} of {ranks.world_size}."
            fix = "drop the sampler (ranks are shared out), or rank and world_size"
            raise OptionError(message, why=ranks.told_by, fix=fix)
        return True
    return ranks.world_size == 1


def rows_without_drawing(
    sampler: Any, dataset: Any, count: int | None
) -> list[Any] | None:
    """Tell rows that a sampler gives, without moving it.

    Args:
        sampler: Of the user's; its rows may be keys, or a few good ones of many.
        dataset: What they are of.
        count: How many; None where it gives whole batches.

    Returns:
        Some of its rows, or of the rows that it chooses from; None if it would have to
        be asked for them.
    """
    if isinstance(sampler, _ROW_SEQUENCES):
        rows = list(islice(sampler, count or 1))
        if count is None:
            batch = rows[0] if rows else ()
            has_rows = (
                isinstance(batch, _ROW_SEQUENCES) and length_of(batch) is not None
            )
            return list(batch) if has_rows else None
        return rows
    if type(sampler) is BatchSampler:
        return rows_without_drawing(sampler.sampler, dataset, sampler.batch_size)
    if type(sampler) is SubsetRandomSampler:
        return list(islice(sampler.indices, count or 1))
    length = length_of(dataset)
    if type(sampler) in _SAMPLERS_OF_ALL_ROWS and length is not None:
        # RandomSampler and SequentialSampler say "data_source", the distributed one
        # "dataset".
        data_source: Any = getattr(sampler, "data_source", None)
        if data_source is None:
            data_source = getattr(sampler, "dataset", None)
        num_rows = length_of(data_source)
        if num_rows is not None and not isinstance(dataset, dict):
            return list(range(min(count or 1, num_rows, length)))
    if isinstance(sampler, WeightedRandomSampler):
        drawable = torch.as_tensor(sampler.weights).nonzero().flatten()
        return drawable[: count or 1].tolist()
    return None


_ROW_SEQUENCES = (list, tuple, range, np.ndarray, torch.Tensor)
_SAMPLERS_OF_ALL_ROWS = (SequentialSampler, RandomSampler, DistributedSampler)
"""Samplers of torch that choose from all rows of what they were given."""
