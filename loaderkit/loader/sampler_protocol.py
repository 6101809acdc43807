"""What a sampler that the caller gave may have beside rows; the only place that asks.

torch promises nothing but ``__iter__``.  What is asked for here its own samplers have,
and those of others that follow them: the sampler within a ``BatchSampler``, the dataset
a sampler was made for, the rank it is of, and the epoch that its order follows from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Iterator


class EpochSampler(Protocol):
    """A sampler whose order follows from an epoch, as torch's DistributedSampler."""

    def set_epoch(self, epoch: int, /) -> Any:
        """Choose the epoch that comes next."""


class SharedRank(NamedTuple):
    """The rank that a sampler gives rows of, as torch's DistributedSampler does."""

    rank: int
    world_size: int


def takes_epochs(sampler: object) -> TypeGuard[EpochSampler]:
    """Return whether a sampler has ``set_epoch``."""
    return callable(getattr(sampler, "set_epoch", None))


def inner_sampler(sampler: object) -> object | None:
    """Give the sampler that a ``BatchSampler`` takes its rows from; None of others."""
    inner: object | None = getattr(sampler, "sampler", None)
    return inner


def sampler_and_inner(sampler: object) -> Iterator[object]:
    """Give a sampler, and the one that it takes its rows from if there is one."""
    yield sampler
    inner = inner_sampler(sampler)
    if inner is not None:
        yield inner


def source_of(sampler: object) -> object | None:
    """Give what a sampler was made for, mostly a dataset; None if it does not tell."""
    # RandomSampler and SequentialSampler say "data_source", the distributed one
    # "dataset".
    for attribute in ("data_source", "dataset"):
        source: object | None = getattr(sampler, attribute, None)
        if source is not None:
            return source
    return None


def rank_of(sampler: object) -> SharedRank | None:
    """Say which rank's rows a sampler gives; None of one that gives all."""
    rank = getattr(sampler, "rank", None)
    world_size = getattr(sampler, "num_replicas", None)
    if isinstance(rank, int) and isinstance(world_size, int):
        return SharedRank(rank, world_size)
    return None
