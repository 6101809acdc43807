"""Ranks that share a dataset must choose the same order: compared, in words."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch

from loaderkit.errors import LoaderError
from loaderkit.loader.ranks import GIVEN_BY_CALLER, read_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loaderkit.loader.ranks import Ranks


_RANK = "rank"
"""Word for the rank that the caller passed, among what the ranks tell each other."""


class OrderAgreement:
    """Compares what an epoch follows from with the other ranks, before it begins.

    Seeds and samplers may differ from the start; later one rank may be told another
    epoch, load another state, or have a dataset that grew.  Asking is a collective, as
    in torch's own loader of datapipes: every rank must begin an epoch of the loader, as
    it must to share the dataset.

    Args:
        ranks: Who shares the dataset.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.is_first = True
        """Nothing was compared yet."""

    def check_ranks(self, environment: Mapping[str, str]) -> None:
        """Refuse to give the part of another rank than this process is by now.

        Args:
            environment: Variables of the environment.

        Raises:
            LoaderError: The loader was built before this process became a rank, or was
                sent here from another one.
        """
        if self.ranks.source == GIVEN_BY_CALLER:
            return
        here = read_ranks(None, None, environment)
        if (here.rank, here.world_size) == (self.ranks.rank, self.ranks.world_size):
            return
        message = f"The loader was built for rank {self.ranks.rank} of "
        message += f"{self.ranks.world_size}, and this is rank {here.rank} of "
        message += f"{here.world_size}."
        why = "it was built before torch.distributed was initialized, or in another "
        why += "process: some samples would come twice, others never"
        fix = "build_loader() in each process, after init_process_group; or "
        fix += f"rank={self.ranks.rank}, world_size={self.ranks.world_size} to mean it"
        raise LoaderError(message, why=why, fix=fix)

    def check(self, order: Mapping[str, Any]) -> None:
        """Compare with the other ranks.

        Args:
            order: What the order follows from, by the words for it.

        Raises:
            LoaderError: A rank has something else.  All ranks raise it.
        """
        self.is_first = False
        texts = {name: json.dumps(value) for name, value in order.items()}
        gathered = _gather_texts({_RANK: str(self.ranks.rank), **texts})
        ranks = [int(text) for text in gathered.pop(_RANK)]
        if len(set(ranks)) < len(ranks):
            raise _same_rank_twice(ranks)
        for name, values in gathered.items():
            if len(set(values)) > 1:
                raise _differing_ranks(name, values)

    @property
    def can_ask(self) -> bool:
        """Tell whether the processes of torch.distributed are those that share."""
        group = torch.distributed
        if self.ranks.world_size == 1 or not group.is_available():
            return False
        if not group.is_initialized():
            return False
        # Not whether the rank is the same too: where a caller passed a wrong one, some
        # processes would ask and wait for others that do not.
        return bool(group.get_world_size() == self.ranks.world_size)


def _gather_texts(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Ask every rank for its texts; gives those of each name, by rank."""
    group = torch.distributed
    # NCCL needs a device of its own in every process, which may not be chosen yet.
    needs_gloo = group.get_backend() != "gloo" and group.is_gloo_available()
    through = group.new_group(backend="gloo") if needs_gloo else None
    texts_by_rank: list[Any] = [None] * group.get_world_size()
    try:
        group.all_gather_object(texts_by_rank, texts, group=through)
    finally:
        if through is not None:
            group.destroy_process_group(through)
    return {name: [own.get(name, "") for own in texts_by_rank] for name in texts}


def _same_rank_twice(ranks: list[int]) -> LoaderError:
    """Say that processes were given the same part; ``ranks`` are those they passed."""
    twice = next(rank for rank in ranks if ranks.count(rank) > 1)
    processes = [str(position) for position, rank in enumerate(ranks) if rank == twice]
    message = f"Processes {' and '.join(processes)} of torch.distributed read as rank "
    message += f"{twice} of {len(ranks)}, each of them."
    why = f"the samples of that rank would come {len(processes)} times, others never"
    fix = "rank=torch.distributed.get_rank(); or leave rank and world_size out"
    return LoaderError(message, why=why, fix=fix)


def _differing_ranks(name: str, values: list[str]) -> LoaderError:
    first = values[0]
    other = next(rank for rank, value in enumerate(values) if value != first)
    shown = [_shortened(value) for value in (first, values[other])]
    message = (
        f"The ranks have different {name}: {shown[0]} on rank 0, {shown[1]} on rank "
        f"{other}."
    )
    why = "each would take its part of another order: some samples twice, others never"
    fix = f"the same {name} on every rank; random numbers drawn while reading differ "
    return LoaderError(message, why=why, fix=f"{fix}between ranks anyway")


def _shortened(value: str) -> str:
    if len(value) <= 60:
        return value
    digest = hashlib.blake2b(value.encode(), digest_size=4).hexdigest()
    return f"{value[:40]}... ({digest})"
