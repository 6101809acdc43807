"""Batches that the user's sampler chooses: seeded, shared out to ranks, resumable."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

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
from loaderkit.loader.missing_rows import RowChooser
from loaderkit.loader.ranks import RankShare, count_groups
from loaderkit.loader.resumable import Position, SeededRows
from loaderkit.loader.sampler_epochs import SamplerEpochs
from loaderkit.loader.sampler_protocol import (
    rank_of,
    sampler_and_inner,
    source_of,
)
from loaderkit.loader.stateful import (
    SamplerState,
    length_of,
    read_sampler,
    restore_sampler,
    stateful_part,
)
from loaderkit.randomness import Seeded, mix_seed
from loaderkit.units import count_of
from loaderkit.value_words import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from loaderkit.loader.ranks import Ranks


class UserBatches:
    """Batches that the user's sampler chooses.

    Args:
        sampler: Gives rows, or whole batches of rows.
        batch_size: Samples of a batch; None if the sampler gives whole batches.
        drop_last: Leave out a last batch that is not full.
        seed: Seed of the random numbers that the sampler draws from the global
            generators, and of those that are drawn while reading.
        ranks: The ranks that share the rows, or the whole batches, in turn.
        dataset: The dataset that the rows are of.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        batch_size: int | None,
        *,
        drop_last: bool,
        seed: int,
        ranks: Ranks,
        dataset: object = None,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.epochs = SamplerEpochs(sampler)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.seed = seed
        self.ranks = ranks
        self.name = type(sampler).__name__
        option = "batch_sampler" if batch_size is None else "sampler"
        self.chooser = RowChooser.of(sampler, option)
        self.shares_itself = _shares_rows(sampler, ranks)
        # The epoch that was begun last, and the state of the sampler before it.
        self._drawn_epoch = -1
        self._epoch_start: SamplerState | None = None
        # The state of the sampler after each batch, by its number: workers are asked
        # for batches long before the loop gets them.
        self._snapshots: dict[int, SamplerState] = {}
        # The pass that a loaded state has begun, for the next iteration.
        self._prepared: _PreparedPass | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without a pass that has begun, since iterators cannot be pickled."""
        no_pass = {"_prepared": None, "_epoch_start": None, "_drawn_epoch": -1}
        return {**vars(self), **no_pass, "_snapshots": {}}

    def __len__(self) -> int:
        count = len(self.sampler)  # type: ignore[arg-type]
        if not self.shares_itself:
            count = count_groups(count, self.ranks.world_size, drop_last=self.drop_last)
        if self.batch_size is None:
            return count
        return count_groups(count, self.batch_size, drop_last=self.drop_last)

    def reseed(self, seed: int) -> None:
        """Follow another seed from now on."""
        self.seed = seed

    def batches_of(self, at: Position) -> Iterator[SeededRows]:
        """Give the batches of an epoch.

        Args:
            at: The epoch, which samplers with ``set_epoch`` are told, and the first
                batch to give; those before it are drawn and dropped.

        Yields:
            The rows of each batch.
        """
        sampler_pass = self._take_prepared_pass(at)
        if sampler_pass is None:
            sampler_pass = self._begin_pass(at.epoch)
            sampler_pass.drop(at.batches)
        if at.batches:
            self._snapshots[at.batches - 1] = sampler_pass.snapshot()

        seed_of_epoch = self.seed  # another may be chosen while it runs
        # Batches of different ranks have equal numbers, and need different seeds.
        ranks, rank = self.ranks.world_size, self.ranks.rank
        for rows in sampler_pass:
            number = sampler_pass.number - 1
            self._snapshots[number] = sampler_pass.snapshot()
            if number in at.ahead:
                continue
            seed = mix_seed(seed_of_epoch, at.epoch, number * ranks + rank)
            yield SeededRows(rows, number, seed)

        if not sampler_pass.number and _is_iterator(self.sampler):
            text = f"epoch {at.epoch} has no batches: the {self.name} that chooses the "
            text += "samples is an iterator, which can be read only once; sampler=list("
            text += "...), or an object whose __iter__ begins anew"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _take_prepared_pass(self, at: Position) -> _SamplerPass | None:
        """Return the pass that a loaded state has begun; None if it is not this one.

        Raises:
            LoaderError: The user has called ``set_epoch`` of the sampler since, and the
                state is in the middle of an epoch.
        """
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return None
        is_this = prepared.position == at
        if self.epochs.detect_user_call():
            if at.batches and is_this:
                raise self._epoch_changed_error(at)
            return None
        return prepared.sampler_pass if is_this else None

    def state_after(self, at: Position, *, running: bool) -> dict[str, Any]:
        """Return the state of the sampler after the batches that the loop was given.

        The sampler itself is ahead of that, since workers were asked for more batches.

        Args:
            at: The epoch, and how many of its batches were given.
            running: An iteration of that epoch has begun, and not ended.
        """
        batches = at.batches
        if self._prepared is not None:
            return self._prepared.sampler_pass.snapshot().to_dict()

        has_begun = running and self._drawn_epoch == at.epoch
        if self._epoch_start is None or not has_begun:
            # A sampler that this state is loaded into is told the epoch first, too.
            self.epochs.set_epoch(at.epoch)
            return self.read().to_dict()
        if not batches:
            return self._epoch_start.to_dict()

        # Positions only move forward, so earlier snapshots are not needed again.
        outdated = [number for number in self._snapshots if number < batches - 1]
        for number in outdated:
            del self._snapshots[number]
        return self._snapshots[batches - 1].to_dict()

    def restore(self, state: dict[str, Any], at: Position) -> None:
        """Bring the sampler to a saved state.

        Args:
            state: What ``state_after`` returned.
            at: The epoch, and how many of its batches were given.

        Raises:
            LoaderError: It cannot be brought there.
        """
        saved = SamplerState.from_dict(state)
        self.epochs.restore(
            dict(saved.values), at.epoch, set_by_user=saved.epoch_by_hand
        )
        sampler_state = restore_sampler(self.sampler, saved, self.dataset)
        if saved.own is not None:
            # It stands after these batches already, so none are drawn again.
            sampler_pass = _SamplerPass(self, at.epoch, sampler_state, at.batches)
        else:
            sampler_pass = _SamplerPass(self, at.epoch, sampler_state)
            sampler_pass.drop(at.batches)
            self._check_redrawn_batches(sampler_pass, saved, at)
        self._prepared = _PreparedPass(replace(at), sampler_pass)

    def _check_redrawn_batches(
        self, sampler_pass: _SamplerPass, saved: SamplerState, at: Position
    ) -> None:
        """Refuse a sampler that gave other batches than those before the state."""
        if sampler_pass.number < at.batches:
            message = f"The state has {at.batches:,} batches of the {self.name}, which "
            message += f"gives {sampler_pass.number:,} in an epoch."
            fix = "give the loader the same sampler"
            raise LoaderError(message, why="there is no rest to give", fix=fix)
        is_comparable = saved.rank in {None, self.digest_rank}
        if at.batches and is_comparable and saved.digest != sampler_pass.digest:
            message = f"The {self.name} gives other batches than those before it."
            why = "it draws from something that it does not show"
            fix = "give it state_dict() and load_state_dict(), or a generator"
            raise LoaderError(message, why=why, fix=fix)

    @property
    def digest_rank(self) -> int | None:
        """The rank whose rows are compared; None if they are the rows of all ranks."""
        gives_all_rows = self.ranks.world_size == 1 or not self.shares_itself
        return None if gives_all_rows else self.ranks.rank

    def _epoch_changed_error(self, at: Position) -> LoaderError:
        message = (
            f"The {self.name} was told another epoch after a state was loaded that "
            f"stands in the middle of epoch {at.epoch}, behind "
            f"{count_of(at.batches, 'batches')}."
        )
        why = "the rest of that epoch would be that of another order"
        fix = "set the sampler's epoch before load_state_dict, or loader.set_epoch() "
        return LoaderError(message, why=why, fix=f"{fix}to leave the rest out")

    def read(self) -> SamplerState:
        """Read the current state of the sampler."""
        return self._with_loader_facts(read_sampler(self.sampler, self.dataset))

    def _with_loader_facts(self, state: SamplerState) -> SamplerState:
        """Add what only the loader knows."""
        set_by_user = self.epochs.set_by_user
        return replace(state, epoch_by_hand=set_by_user, rank=self.digest_rank)

    def _begin_pass(self, epoch: int) -> _SamplerPass:
        self.epochs.set_epoch(epoch)
        return _SamplerPass(self, epoch)

    def rows_of_rank(self, hashed: _RowsHash) -> Iterator[Any]:
        """Iterate over the rows, or batches, of this rank.

        Args:
            hashed: Hashes what the sampler gives.  This is done before ranks take their
                shares, so that the digest is equal on all ranks.
        """
        hashed_rows = _HashedRows(iter(self.sampler), hashed, self)
        if self.shares_itself:
            return hashed_rows
        return RankShare(hashed_rows, self.ranks, drop_last=self.drop_last)

    def note_epoch_start(self, epoch: int, sampler_state: SamplerState | None) -> None:
        """Keep the state of the sampler before anything is drawn from it.

        Args:
            epoch: The epoch that begins.
            sampler_state: The current state, if it is known; None reads it.
        """
        self._drawn_epoch, self._snapshots = epoch, {}
        if sampler_state is None:
            self._epoch_start = self.read()
        else:
            self._epoch_start = self._with_loader_facts(sampler_state)

    @property
    def epoch_start(self) -> SamplerState:
        """The state of the sampler when the epoch began."""
        return self._epoch_start or self.read()


class _SamplerPass:
    """One pass over a user's sampler, batch by batch.

    Each batch is drawn with global random numbers that follow from the seed, the epoch
    and the number of the batch.  So every rank and every resumed run draws the same.

    Args:
        batches: Has the sampler.
        epoch: Number of the epoch.
        sampler_state: State of the sampler as the epoch begins; None reads it.
        number: How many batches the sampler has given already.
    """

    def __init__(
        self,
        batches: UserBatches,
        epoch: int,
        sampler_state: SamplerState | None = None,
        number: int = 0,
    ) -> None:
        self._batches = batches
        self._epoch = epoch
        self._iterator: Iterator[Any] | None = None
        self._hash = _RowsHash()
        self.number = number
        batches.note_epoch_start(epoch, sampler_state)

    def __iter__(self) -> Iterator[list[Any]]:
        while (rows := self._draw_batch()) is not None:
            yield rows

    def drop(self, count: int) -> None:
        """Draw batches that earlier runs consumed, and drop them."""
        for _ in islice(self, count):
            pass

    @property
    def digest(self) -> str:
        """Digest of the batches drawn so far; empty before the first."""
        return self._hash.hexdigest() if self.number else ""

    def snapshot(self) -> SamplerState:
        """Return the state of the sampler, with a digest of what it has given."""
        # A sampler without a state_dict is not read again for each batch: it may hold
        # millions of rows.  Its state at the beginning of the epoch serves.
        if stateful_part(self._batches.sampler) is not None:
            return self._batches.read()
        return replace(self._batches.epoch_start, digest=self.digest)

    def _draw_batch(self) -> list[Any] | None:
        self._batches.epochs.detect_user_call()
        with Seeded(mix_seed(self._batches.seed, self._epoch, -1 - self.number)):
            if self._iterator is None:
                self._iterator = self._batches.rows_of_rank(self._hash)
            rows = self._take_rows(self._iterator)
        self._batches.epochs.remember_values()
        if rows is None:
            return None
        self.number += 1
        return rows

    def _take_rows(self, iterator: Iterator[Any]) -> list[Any] | None:
        size = self._batches.batch_size
        if size is None:
            batch: list[Any] | None = next(iterator, None)
            return batch  # None means the end: _HashedRows makes lists of all batches
        rows = list(islice(iterator, size))
        too_few = len(rows) < size and self._batches.drop_last
        return rows if rows and not too_few else None


class _PreparedPass(NamedTuple):
    """A pass that stands where a loaded state says."""

    position: Position
    sampler_pass: _SamplerPass


class _RowsHash:
    """A hash of what a sampler gives, row by row or batch by batch.

    Rows are hashed many at a time.  Measured: one by one they take 0.5 us each, which
    adds 60 us to a batch of 128.
    """

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)
        self._rows: list[Any] = []

    def add(self, item: object) -> None:
        """Add a row, or a batch of rows."""
        self._rows.append(item)
        # A batch is hashed at once, since whoever gets the list may change it.
        if isinstance(item, list) or len(self._rows) == _ROWS_HASHED_AT_ONCE:
            self._hash_pending_rows()

    def hexdigest(self) -> str:
        """Return the hash of everything added so far."""
        self._hash_pending_rows()
        return self._digest.hexdigest()

    def _hash_pending_rows(self) -> None:
        if self._rows:
            self._digest.update(f"{repr(self._rows)[1:-1]}, ".encode())
            self._rows.clear()


_ROWS_HASHED_AT_ONCE = 1024
"""Chosen: several batches, so that the cost of a call is shared by many rows."""


class _HashedRows(Iterator[Any]):
    """Iterator over what a sampler gives, which also hashes it.

    Whole batches are given as lists.

    Args:
        items: Rows, or batches of rows.
        hashed: The hash that they are added to.
        batches: The batches whose sampler gives the items.
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
            # torch would take the letters of a string for rows.
            if not isinstance(batch, str | bytes):
                return list(batch)
        except TypeError:
            pass
        message = (
            f"The batch_sampler ({self._batches.name}) gave {batch!r:.80} as a batch."
        )
        why = f"{kind_of(batch)} is no list of rows"
        fix = "sampler=... if it gives rows one by one, or let it give lists of rows"
        raise OptionError(message, why=why, fix=fix)


def _is_iterator(sampler: object) -> bool:
    candidates = sampler_and_inner(sampler)
    return any(isinstance(candidate, Iterator) for candidate in candidates)


def _shares_rows(sampler: object, ranks: Ranks) -> bool:
    """Return whether a sampler gives the rows of one rank, as DistributedSampler does.

    Raises:
        OptionError: It gives the rows of another rank than this process is.
    """
    for candidate in sampler_and_inner(sampler):
        shared = rank_of(candidate)
        if shared is None:
            continue
        if shared != (ranks.rank, ranks.world_size) and ranks.world_size > 1:
            message = f"The {type(candidate).__name__} is for rank {shared.rank} of "
            message += (
                f"{shared.world_size}, this is rank {ranks.rank} of {ranks.world_size}."
            )
            fix = "drop the sampler (ranks are shared out), or rank and world_size"
            raise OptionError(message, why=ranks.source, fix=fix)
        return True
    return ranks.world_size == 1


def rows_without_drawing(
    sampler: object, dataset: object, count: int | None
) -> list[Any] | None:
    """Return rows that a sampler may give, without iterating over it.

    Iterating would change the state of its generators.  Row 0 alone will not do: the
    rows may be keys, or the sampler may choose a few readable rows of many.

    Args:
        sampler: The user's sampler.
        dataset: The dataset that its rows are of.
        count: Number of rows; None if the sampler gives whole batches.

    Returns:
        Some of its rows, or of the rows that it chooses from; None if they are not
        known without iterating over it.
    """
    if isinstance(sampler, _ROW_SEQUENCES):
        items: list[Any] = list(islice(sampler, count or 1))
        if count is not None:
            return items
        first_batch = items[0] if items else ()
        # An array or tensor of no dimensions has no length, and is no batch.
        has_rows = isinstance(first_batch, _ROW_SEQUENCES)
        has_rows = has_rows and length_of(first_batch) is not None
        return list(first_batch) if has_rows else None
    if type(sampler) is BatchSampler:
        return rows_without_drawing(sampler.sampler, dataset, sampler.batch_size)
    if type(sampler) is SubsetRandomSampler:
        return list(islice(sampler.indices, count or 1))

    length = length_of(dataset)
    if type(sampler) in _SAMPLERS_OF_ALL_ROWS and length is not None:
        num_rows = length_of(source_of(sampler))
        # The keys of a table need not be the numbers of its rows.
        if num_rows is not None and not isinstance(dataset, dict):
            return list(range(min(count or 1, num_rows, length)))
    if isinstance(sampler, WeightedRandomSampler):
        drawable = torch.as_tensor(sampler.weights).nonzero().flatten()
        return drawable[: count or 1].tolist()
    return None


_ROW_SEQUENCES = (list, tuple, range, np.ndarray, torch.Tensor)
_SAMPLERS_OF_ALL_ROWS = (SequentialSampler, RandomSampler, DistributedSampler)
"""Samplers of torch that choose from all rows of what they were given."""
