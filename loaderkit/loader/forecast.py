"""How much memory a loader will take, against each limit of this process.  Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from loaderkit.answers import answer_wrong_names
from loaderkit.notebook import HasCard, repr_in_a_line
from loaderkit.units import count_of, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from loaderkit.loader.facts import Facts
    from loaderkit.memory.machine import Host

Sharing: TypeAlias = Literal["parcel", "torch", "none"]
"""How batches leave a worker: as one segment, as torch sends them, or not at all."""

FORKED_BYTES = 30 << 20
"""Private memory of an idle forked worker: pages that counting references copies."""
SPAWNED_BYTES = 250 << 20
"""Private memory of an idle spawned worker: torch and PyG imported again."""
_FILES_PER_WORKER = 8
"""Descriptors that the training process holds for a worker: pipes and a sentinel."""
_USUAL_FILES = 4096
"""What a hard limit allows on every usual system, so that nobody has to be asked."""
_TENSORS_PER_BATCH = 24
"""Tensors of a batch of graphs, its bookkeeping included.  torch sends each as a file
of its own."""
_TIGHT_SHARE = 0.5
"""A limit is warned of once this part of it may be needed.  Chosen: bytes of a batch
are an estimate, and others need memory too."""
_FAILS_TIMES = 2
"""Memory is certain not to do where so many times what is left is needed.  Chosen: the
need is a bound, which no loader reaches at once."""


@answer_wrong_names()
@dataclass(frozen=True)
class LimitForecast:
    """One limit."""

    name: str
    """What there is a limit of."""
    need: int
    """How much of it the loader takes at most."""
    limit: int | None
    """How much is left; None if unknown."""
    why: str
    """How ``need`` is made up."""
    fix: str
    """What to do when it is too much."""
    in_bytes: bool = True
    """False for counts."""
    certain: bool = False
    """True when exceeding it cannot work, rather than probably not."""

    def amount(self, value: int) -> str:
        """Write an amount with its unit."""
        return format_bytes(value) if self.in_bytes else f"{value:,}"


@answer_wrong_names()
@dataclass(frozen=True)
class Forecast(HasCard):
    """Memory against each limit."""

    limits: tuple[LimitForecast, ...]
    """One for each limit."""
    parts: Mapping[str, int]
    """Bytes by where they are: parent, workers, in flight, pinned."""
    batch_known: bool = True
    """False where the bytes of a batch are not known, and so not counted."""

    @property
    def first(self) -> LimitForecast | None:
        """The limit that would break first; None when nothing is known.

        >>> full = LimitForecast("/dev/shm", 10, 0, why="batches", fix="fewer workers")
        >>> half = LimitForecast("memory", 10, 20, why="batches", fix="a smaller batch")
        >>> Forecast((half, full), {}).first.name
        '/dev/shm'
        """
        known = [entry for entry in self.limits if entry.limit is not None]
        return max(known, key=_share_needed, default=None)

    def warnings(self) -> tuple[str, ...]:
        """Say what may break, and what to do."""
        texts = []
        for entry in self.limits:
            if entry.limit is None or entry.need <= _TIGHT_SHARE * entry.limit:
                continue
            amounts = f"{entry.amount(entry.need)} of {entry.amount(entry.limit)}"
            text = f"{amounts} {entry.name} may be needed ({entry.why}): {entry.fix}"
            texts.append(text)
        return tuple(texts)

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {format_bytes(nbytes)}" for name, nbytes in self.parts.items()
        )
        if not self.batch_known:
            parts += ", and the batches, whose bytes are not known"
        lines = [f"{'memory, at most':<24}{parts}"]
        first = self.first
        if first is not None:
            share = f"{first.amount(first.need)} of {first.amount(first.limit or 0)}"
            lines.append(f"{'first limit to break':<24}{first.name}: {share}")
        return "\n".join(lines)


def _share_needed(entry: LimitForecast) -> float:
    """Say how much of a limit is needed; shares compare bytes with files."""
    if not entry.limit:
        # Nothing is left, and anything is more than that.
        return math.inf if entry.need else 0.0
    return entry.need / entry.limit


def forecast(
    facts: Facts,
    *,
    num_workers: int,
    read_ahead: int,
    prefetch_factor: int | None,
    start_method: str | None,
    pin_memory: bool,
    sharing: Sharing,
    batches: int | None = None,
) -> Forecast:
    """Add up what a loader takes.

    Args:
        facts: What is known; bytes of a batch are the largest there can be, or the
            measured ones.
        num_workers: As it was chosen, and so for the others.
        read_ahead: Batches that a thread makes ahead.
        prefetch_factor: Batches that wait for each worker.
        start_method: How workers start.
        pin_memory: Batches are page-locked.
        sharing: How batches leave a worker.
        batches: Of an epoch, more than which are never asked for ahead; None if
            unknown.

    Returns:
        Needs against limits.
    """
    batch_bytes = facts.batch_bytes or 0
    in_flight = num_workers * (prefetch_factor or 0)
    if batches is not None:
        in_flight = min(in_flight, batches)
    worker_bytes = FORKED_BYTES if start_method == "fork" else SPAWNED_BYTES
    waiting = in_flight + read_ahead
    # At the worst moment: the loop has one batch, each worker makes one, and all that
    # may be asked for ahead is finished and waits.
    parts = {
        "this process": batch_bytes * (1 + read_ahead),
        "workers": num_workers * (worker_bytes + batch_bytes),
        "in flight": in_flight * batch_bytes,
        "page-locked": pinned_bytes(batch_bytes, waiting) if pin_memory else 0,
    }
    limits = [_memory_limit(facts.host, sum(parts.values()), num_workers)]
    if num_workers:
        in_flight_bytes = parts["in flight"]
        limits += _worker_limits(
            facts.host, num_workers, in_flight, in_flight_bytes, sharing
        )
    return Forecast(tuple(limits), parts, batch_known=facts.batch_bytes is not None)


def pinned_bytes(batch_bytes: int, waiting: int) -> int:
    """Count page-locked bytes: torch rounds each block up to a power of two.

    Args:
        batch_bytes: Of the largest batch.
        waiting: Batches that wait at most, of workers or of a thread; one more is with
            the loop.

    >>> pinned_bytes(5, waiting=4)
    40
    """
    if not batch_bytes:
        return 0
    # Counted as one block.  Of many tensors each is rounded up by itself: to less than
    # twice their sum, as this is.
    rounded_up = 1 << (batch_bytes - 1).bit_length()
    return rounded_up * (waiting + 1)


def _memory_limit(host: Host, need: int, num_workers: int) -> LimitForecast:
    # What is free, all ranks of this machine will take at once.
    left = host.available_bytes // host.local_ranks
    return LimitForecast(
        f"memory ({host.available_from})",
        need,
        left,
        f"{count_of(num_workers, 'workers')}",
        "fewer workers, a smaller prefetch_factor or a smaller batch",
        certain=need > _FAILS_TIMES * left,
    )


def _worker_limits(
    host: Host, num_workers: int, in_flight: int, in_flight_bytes: int, sharing: Sharing
) -> Iterator[LimitForecast]:
    """Give the limits that only matter where workers send batches."""
    why = (
        f"{count_of(num_workers, 'workers')}, {count_of(in_flight, 'batches')} in "
        "flight"
    )
    # A segment takes one descriptor, and is not in /dev/shm (memory/shm_batch.py); as
    # torch sends them, each tensor takes a file there, a descriptor and a mapping.
    in_segments = sharing == "parcel"
    files_per_batch = 1 if in_segments else _TENSORS_PER_BATCH
    files = num_workers * _FILES_PER_WORKER + in_flight * files_per_batch
    enough_files = max(_USUAL_FILES, host.files_open + files)
    yield LimitForecast(
        "open files (RLIMIT_NOFILE)",
        files,
        None if host.files is None else host.files - host.files_open,
        why,
        f"fewer workers, a smaller prefetch_factor, or ulimit -n {enough_files}",
        in_bytes=False,
        certain=True,
    )
    if not in_segments and host.shm_free_bytes is not None:
        yield LimitForecast(
            "/dev/shm",
            in_flight_bytes,
            host.shm_free_bytes,
            why,
            "docker run --shm-size=2g, or fewer workers",
            certain=True,
        )
    yield LimitForecast(
        "mappings",
        0 if in_segments else in_flight * _TENSORS_PER_BATCH,
        host.mappings,
        why,
        "sysctl vm.max_map_count=262144",
        in_bytes=False,
    )
