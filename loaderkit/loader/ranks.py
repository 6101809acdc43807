"""Which part of the data this process reads, when several train together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from loaderkit.errors import LoaderError

if TYPE_CHECKING:
    from collections.abc import Mapping

_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE"),
    ("mpirun", "PMIX_RANK", "PMIX_SIZE"),
    ("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)
"""Variables by which launchers tell a process who it is, the surest first: torchrun
can itself be started by srun, and then its ranks are the ones that train."""

ASKED = "you asked for it"
"""Says that the caller told who this process is."""


@dataclass(frozen=True)
class Ranks:
    """Who this process is among those that train together."""

    rank: int = 0
    """Which of them it is, from 0."""
    world_size: int = 1
    """How many share the data."""
    told_by: str = ""
    """Where that comes from; empty when it trains alone."""
    launched: int = 1
    """How many processes run, whether or not they share the data through us."""

    @property
    def several(self) -> bool:
        """Whether the order must be the same in several processes."""
        return max(self.world_size, self.launched) > 1


def read_ranks(
    rank: int | None, world_size: int | None, environment: Mapping[str, str]
) -> Ranks:
    """Find out who this process is.

    Args:
        rank: What the caller says; it wins.
        world_size: The same, of how many.
        environment: Variables of the environment.

    Returns:
        What the caller says, else torch.distributed, else the launcher's variables.

    Raises:
        LoaderError: The variables contradict each other, or do not say whether this
            is one process of several.
    """
    if rank is not None and world_size is not None:
        # Whoever asks for everything on each process may still be one of several,
        # as under accelerate, which shares out the batches itself.
        launched = _count_launched(environment)
        return Ranks(rank, world_size, ASKED, launched)
    ranks = _initialized_ranks() or launched_ranks(environment)
    return ranks or Ranks()


def _initialized_ranks() -> Ranks | None:
    group = torch.distributed
    if not (group.is_available() and group.is_initialized()):
        return None
    size = group.get_world_size()
    return Ranks(group.get_rank(), size, "torch.distributed", size)


def _count_launched(environment: Mapping[str, str]) -> int:
    try:
        ranks = _initialized_ranks() or launched_ranks(environment)
    except LoaderError:  # unclear, but then the caller has said it
        return 2
    return 1 if ranks is None else ranks.launched


def launched_ranks(environment: Mapping[str, str]) -> Ranks | None:
    """Read the variables of torchrun, srun and mpirun.

    Args:
        environment: Variables of the environment.

    Returns:
        Who this process is; None if no launcher has started it.

    Raises:
        LoaderError: The variables make no sense, or sbatch has set them without srun.

    >>> launched_ranks({"RANK": "1", "WORLD_SIZE": "4"}).rank
    1
    """
    for launcher, rank_name, size_name in _LAUNCHERS:
        if not environment.get(rank_name) or not environment.get(size_name):
            continue
        told_by = f"{rank_name} and {size_name} ({launcher})"
        try:
            rank, size = int(environment[rank_name]), int(environment[size_name])
        except ValueError:
            rank, size = -1, 0
        if not 0 <= rank < size:
            values = f"{environment[rank_name]!r} and {environment[size_name]!r}"
            message = f"{rank_name} and {size_name} are {values}."
            why = "a rank is from 0 to the number of processes less one"
            fix = f"unset {rank_name}, or rank=0, world_size=1"
            raise LoaderError(message, why=why, fix=fix)
        if size_name == "SLURM_NTASKS" and rank == 0 and size > 1:
            # sbatch sets both for its script, which runs once; srun sets the number
            # of tasks of its step besides.
            message = (
                f"Slurm has {size} tasks for this job, but srun did not start this."
            )
            why = "one process may train alone here, or be the first of several"
            fix = "srun python train.py, or rank=0, world_size=1 to train alone"
            raise LoaderError(message, why=why, fix=fix)
        return Ranks(rank, size, told_by, size)
    return None


class Deal(Iterator[Any]):
    """Takes every n-th item, as many on every rank.

    A generator would end with the first error of the items; this goes on with them, and
    keeps what it had of the round, so that all ranks still agree on the rounds.

    Args:
        items: Those of all ranks, in the same order on each.
        ranks: Who takes them.
        drop_last: Leave out a last round that does not reach every rank; else those
            it does not reach repeat items of it.
    """

    def __init__(self, items: Iterator[Any], ranks: Ranks, *, drop_last: bool) -> None:
        self._items, self._ranks, self._drop_last = items, ranks, drop_last
        self._round: list[Any] = []
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        size, rank = self._ranks.world_size, self._ranks.rank
        # What came before an error stays in the list.
        self._round.extend(islice(self._items, size - len(self._round)))
        items, self._round = self._round, []
        if len(items) == size:
            return items[rank]
        self._ended = True
        if not items or self._drop_last:
            raise StopIteration
        return items[rank % len(items)]


def share_length(count: int, size: int, *, drop_last: bool) -> int:
    """Count rounds of a size.

    >>> share_length(7, 2, drop_last=False), share_length(7, 2, drop_last=True)
    (4, 3)
    """
    return count // size if drop_last else -(-count // size)
