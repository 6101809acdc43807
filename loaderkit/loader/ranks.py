"""Which rank this process is, and which part of the data that rank reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from loaderkit.errors import LoaderError
from loaderkit.loader.options import MOST_RANKS
from loaderkit.units import count_of
from loaderkit.value_words import show_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class _LauncherVariables(NamedTuple):
    """The environment variables by which a launcher tells a process its rank."""

    launcher: str
    """The command that sets them."""
    rank: str
    """Name of the variable that holds the rank."""
    world_size: str
    """Name of the variable that holds the number of ranks."""

    def __str__(self) -> str:
        return f"{self.rank} and {self.world_size} ({self.launcher})"


_LAUNCHERS = (
    # What starts the processes that train comes before what may have started that:
    # srun starts torchrun, and the daemons of mpirun, which hand its variables on.
    # Kubeflow, SageMaker, DeepSpeed, Ray Train and accelerate set those of torchrun.
    _LauncherVariables("torchrun", "RANK", "WORLD_SIZE"),
    _LauncherVariables("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
    # Open MPI and Spectrum MPI; MVAPICH to version 2, and from 3 on; Platform MPI;
    # MPICH's Hydra, with Intel MPI, Microsoft MPI and Cray's PALS, and srun with PMI-2.
    _LauncherVariables("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    _LauncherVariables("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    _LauncherVariables("mpirun", "MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE"),
    _LauncherVariables("mpirun", "MPI_RANKID", "MPI_NRANKS"),
    _LauncherVariables("mpirun", "PMI_RANK", "PMI_SIZE"),
    _LauncherVariables("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    _LauncherVariables("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    _LauncherVariables("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    _LauncherVariables("srun", "SLURM_PROCID", "SLURM_NTASKS"),
)
"""Where to look for a rank, the innermost launcher first.

What these launchers set was seen on 2026-11-27 with torchrun, Open MPI 4.1, MPICH 4.0
and Slurm 22.05 (``tests/loader/launched_processes.py``).  Of the others it was looked
up: in the sources of Horovod, Flux, MVAPICH 2 and libfabric (of Platform MPI), and for
jsrun, PALS and MVAPICH 3 in programs that read them, such as DeepSpeed."""

_LOCAL_RANKS = (
    "LOCAL_RANK",
    "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_NODE_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MVP_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "JSM_NAMESPACE_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
)
"""Variables that say which process of a node this is.  Lightning leaves
``LOCAL_RANK=0`` behind, which says nothing."""

_NODE_RANKS = (
    "NODE_RANK",
    "GROUP_RANK",
    "PET_NODE_RANK",
    "HOROVOD_CROSS_RANK",
    "PALS_NODEID",
    "SLURM_NODEID",
)
"""Variables that say which node this is.  Lightning sets the first, torchrun the second
beside ``RANK``; Kubeflow the third, for a torchrun that it starts."""

_RANKS_WITHOUT_SIZE = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE")
"""Which process of all this is, where no variable says how many there are: that of
PMIx, which tells that when it is asked, and Cray's."""

_SIZES_WITHIN = (
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MVP_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PMI_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
)
"""Variables that say how many processes a node has, or how many nodes there are.  Those
of an allocation, such as ``SLURM_NNODES``, say nothing of this process."""

_VARIABLES = frozenset(
    (
        *(names.rank for names in _LAUNCHERS),
        *(names.world_size for names in _LAUNCHERS),
        *_LOCAL_RANKS,
        *_NODE_RANKS,
        *_RANKS_WITHOUT_SIZE,
        *_SIZES_WITHIN,
    )
)
"""All that say something of this process's rank."""

GIVEN_BY_CALLER = "you asked for it"
"""The ``source`` of ranks that the caller passed to ``build_loader``."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and the number of ranks that share the data."""

    rank: int = 0
    """Rank of this process, from 0."""
    world_size: int = 1
    """Number of ranks that share the data."""
    source: str = ""
    """Where the rank was found, for messages; empty if this process trains alone."""
    launched: int = 1
    """Number of processes that run.  It differs from ``world_size`` where something
    else than the loader shares the data among them."""

    @property
    def is_distributed(self) -> bool:
        """Whether several processes must agree on the order of the samples."""
        return max(self.world_size, self.launched) > 1


def read_ranks(
    rank: int | None, world_size: int | None, environment: Mapping[str, str]
) -> Ranks:
    """Find the rank of this process.

    Args:
        rank: The rank that the caller passed; it takes precedence.
        world_size: The number of ranks that the caller passed.
        environment: Environment variables by name.

    Returns:
        What the caller passed, else what ``torch.distributed`` says, else what the
        launcher's variables say, else a single rank.

    Raises:
        LoaderError: The variables contradict each other, or do not tell whether this
            is one process of several.
    """
    if rank is not None and world_size is not None:
        # rank=0, world_size=1 gives every process the whole dataset.  There may still
        # be several of them, as under accelerate, which shares out the batches itself.
        launched = _count_launched(environment)
        return Ranks(rank, world_size, GIVEN_BY_CALLER, launched)

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
    except LoaderError:
        # The variables are ambiguous.  That is no error here, because the caller has
        # passed the rank; any number above 1 stands for "probably several".
        return 2
    return 1 if ranks is None else ranks.launched


def launched_ranks(environment: Mapping[str, str]) -> Ranks | None:
    """Read the environment variables of torchrun, mpirun, srun and their like.

    Args:
        environment: Environment variables by name.

    Returns:
        The rank of this process; None if no launcher started it.

    Raises:
        LoaderError: The variables hold no valid rank, were set by sbatch without srun,
            or say only the half of it.

    >>> launched_ranks({"RANK": "1", "WORLD_SIZE": "4"}).rank
    1
    """
    if _VARIABLES.isdisjoint(environment):
        # As nearly always.  Each epoch asks, and looking up one variable after the
        # other took 60 us of the 210 in which it begins.
        return None
    for names in _LAUNCHERS:
        rank_text = environment.get(names.rank)
        size_text = environment.get(names.world_size)
        if not rank_text or not size_text:
            continue

        rank, size = _number_in(rank_text), _number_in(size_text)
        if rank is None or size is None or not 0 <= rank < size <= MOST_RANKS:
            message = f"{names.rank} and {names.world_size} are "
            message += f"{show_value(rank_text)} and {show_value(size_text)}."
            why = "a rank is from 0 to the number of processes less one"
            if size is None or size > MOST_RANKS:
                why = f"the number of processes is one from 1 to {MOST_RANKS:,}"
            fix = f"unset {names.rank}, or rank=0, world_size=1"
            raise LoaderError(message, why=why, fix=fix)

        if names.world_size == "SLURM_NTASKS" and rank == 0 and size > 1:
            # sbatch sets these two variables for its batch script, which runs once.
            # srun also sets SLURM_STEP_NUM_TASKS, which was looked for before.
            raise _not_started_by_srun(size)
        return Ranks(rank, size, str(names), size)
    _check_no_half_is_told(environment)
    return None


def _check_no_half_is_told(environment: Mapping[str, str]) -> None:
    """Refuse variables that say there are several processes, and not which one this is.

    Each of them would read the whole dataset.  torch and accelerate refuse such an
    environment when they connect the processes.  Lightning sets such a one for those
    that it starts, until it has connected them.

    Raises:
        LoaderError: There are some.
    """
    for names in _LAUNCHERS:
        if environment.get(names.rank):
            raise _told_by_half(names.rank, names.world_size, environment)
        size_text = environment.get(names.world_size)
        # A size of 1 says as much as none.
        size = _number_in(size_text or "1")
        if size != 1:
            if names.launcher == "srun" and size is not None and 1 < size <= MOST_RANKS:
                raise _not_started_by_srun(size)
            raise _told_by_half(names.world_size, names.rank, environment)
    # Before torchrun, scripts took -1 for "not distributed".
    numbers_of_one = {
        **dict.fromkeys((*_LOCAL_RANKS, *_NODE_RANKS, *_RANKS_WITHOUT_SIZE), (0, -1)),
        **dict.fromkeys(_SIZES_WITHIN, (0, 1, -1)),
    }
    for name, numbers in numbers_of_one.items():
        text = environment.get(name)
        if text and _number_in(text) not in numbers:
            raise _told_by_half(name, "RANK and WORLD_SIZE", environment)


def _told_by_half(
    name: str, missing: str, environment: Mapping[str, str]
) -> LoaderError:
    are = "are" if " and " in missing else "is"
    message = f"{name} is {show_value(environment[name])}, and {missing} {are} not set."
    why = "this seems to be one process of several, and which part of the data it "
    why += "reads is not known; each would read all of it"
    fix = "build_loader() after init_process_group, under Lightning in "
    rank, size = _probable_ranks(environment)
    fix += f"train_dataloader; or rank={rank}, world_size={size}; or unset {name} to "
    fix += "train alone"
    return LoaderError(message, why=why, fix=fix)


def _probable_ranks(environment: Mapping[str, str]) -> tuple[int, int]:
    """Guess the rank and the number of ranks, for a fix that its reader corrects."""

    def first_number(names: Iterable[str], least: int) -> int | None:
        numbers = (_number_in(environment.get(name, "")) for name in names)
        known = (number for number in numbers if number is not None)
        likely = (number for number in known if least <= number <= MOST_RANKS)
        return next(likely, None)

    rank = first_number((names.rank for names in _LAUNCHERS), 0)
    if rank is None and not first_number(_NODE_RANKS, 0):
        # On the first node the rank is the number of the process there.
        rank = first_number(_LOCAL_RANKS, 0)
    rank = rank or 0
    names_of_sizes = [names.world_size for names in _LAUNCHERS]
    size = first_number([*names_of_sizes, *_SIZES_WITHIN], rank + 1)
    return rank, size or max(rank + 1, 2)


def _not_started_by_srun(tasks: int) -> LoaderError:
    message = f"Slurm has {count_of(tasks, 'tasks')} for this job, but this process "
    message += "was not started by srun."
    why = "one process may train alone here, or be the first of several"
    fix = "srun python train.py, or rank=0, world_size=1 to train alone"
    return LoaderError(message, why=why, fix=fix)


def _number_in(text: str) -> int | None:
    """Read a whole number; None where it is none."""
    try:
        return int(text)
    except ValueError:
        return None


class RankShare(Iterator[Any]):
    """Every n-th item of an iterator, equally many on every rank.

    This is a class because a generator ends with the first error of the items.  This
    iterator continues after an error and keeps the items of the current round, so that
    all ranks still agree on where each round begins.

    Args:
        items: The items of all ranks, in the same order on each rank.
        ranks: The rank of this process.
        drop_last: Leave out a last round that has too few items for all ranks.
            Otherwise the ranks without an item repeat one of that round.
    """

    def __init__(self, items: Iterator[Any], ranks: Ranks, *, drop_last: bool) -> None:
        self._items = items
        self._ranks = ranks
        self._drop_last = drop_last
        self._round: list[Any] = []
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration

        # extend() keeps the items that were read before one of them raised, so the
        # next call completes the same round.
        size = self._ranks.world_size
        self._round.extend(islice(self._items, size - len(self._round)))
        round_items, self._round = self._round, []
        if len(round_items) == size:
            return round_items[self._ranks.rank]

        self._ended = True
        if not round_items or self._drop_last:
            raise StopIteration
        return round_items[self._ranks.rank % len(round_items)]


def count_groups(count: int, size: int, *, drop_last: bool) -> int:
    """Count the groups of ``size`` that ``count`` items make.

    Args:
        count: Number of items.
        size: Items of a group.
        drop_last: Leave out a last group that is not full.

    >>> count_groups(7, 2, drop_last=False), count_groups(7, 2, drop_last=True)
    (4, 3)
    """
    return count // size if drop_last else -(-count // size)
