"""How much memory a loader will take, against each limit of this process.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loaderkit.loader.facts import Facts

PROBE_S = 0.1
"""The probe stops after so long, but reads one sample at least."""
FORKED_BYTES = 30 << 20
"""Private memory of an idle forked worker: pages that counting references copies."""
SPAWNED_BYTES = 250 << 20
"""Private memory of an idle spawned worker: torch and PyG imported again."""
_FILES_PER_WORKER = 8
_TENSORS = 24
"""Tensors of a batch of graphs, its bookkeeping included."""
_TIGHT = 0.5


@dataclass(frozen=True)
class Line:
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


@dataclass(frozen=True)
class Forecast:
    """Memory against each limit."""

    lines: tuple[Line, ...]
    """One for each limit."""
    parts: Mapping[str, int]
    """Bytes by where they are: parent, workers, in flight, pinned."""
    batch_known: bool = True
    """False where the bytes of a batch are not known, and so not counted."""

    @property
    def first(self) -> Line | None:
        """The limit that would break first; None when nothing is known."""
        known = [line for line in self.lines if line.limit]
        return max(known, key=lambda line: line.need / (line.limit or 1), default=None)

    def warnings(self) -> tuple[str, ...]:
        """Say what may break, and what to do."""
        found = []
        for line in self.lines:
            if line.limit is not None and line.need > _TIGHT * line.limit:
                text = f"{line.amount(line.need)} of {line.amount(line.limit)} "
                found.append(
                    f"{text}{line.name} may be needed ({line.why}): {line.fix}"
                )
        return tuple(found)

    def __str__(self) -> str:
        parts = ", ".join(f"{k} {format_bytes(v)}" for k, v in self.parts.items())
        lines = [f"{'memory, at most':<24}{parts}"]
        if not self.batch_known:
            lines[0] += ", and the batches, whose bytes are not known"
        if self.first is not None:
            first = self.first
            share = f"{first.amount(first.need)} of {first.amount(first.limit or 0)}"
            lines.append(f"{'first limit to break':<24}{first.name}: {share}")
        return "\n".join(lines)


def forecast(facts: Facts, chosen: Mapping[str, Any]) -> Forecast:
    """Add up what a loader takes.

    Args:
        facts: What is known; bytes of a batch are the largest there can be, or the
            measured ones.
        chosen: The settings.

    Returns:
        Needs against limits.
    """
    batch, workers = facts.batch_bytes or 0, chosen["num_workers"]
    flight = workers * (chosen["prefetch_factor"] or 0)
    forked = chosen["multiprocessing_context"] == "fork"
    parts = {
        "this process": batch * (1 + chosen["read_ahead"]),
        "workers": workers * ((FORKED_BYTES if forked else SPAWNED_BYTES) + batch),
        "in flight": flight * batch,
        "page-locked": pinned_bytes(batch, chosen) if chosen["pin_memory"] else 0,
    }
    lines = tuple(_lines(facts, chosen, parts, flight))
    return Forecast(lines, parts, batch_known=facts.batch_bytes is not None)


def pinned_bytes(batch_bytes: int, chosen: Mapping[str, Any]) -> int:
    """Count page-locked bytes: torch rounds each block up to a power of two.

    >>> pinned_bytes(5, {"num_workers": 2, "prefetch_factor": 2})
    40
    """
    rounded = 1 << max(0, batch_bytes - 1).bit_length() if batch_bytes else 0
    waiting = chosen["num_workers"] * (chosen["prefetch_factor"] or 0)
    return int(rounded * (waiting + 1))


def _lines(
    facts: Facts, chosen: Mapping[str, Any], parts: Mapping[str, int], flight: int
) -> list[Line]:
    host, workers = facts.host, chosen["num_workers"]
    fix = "fewer workers, a smaller prefetch_factor or a smaller batch"
    need = sum(parts.values())
    left = host.available_bytes // host.local_ranks
    found = [
        Line(
            f"memory ({host.available_from})", need, left, f"{workers} workers", fix,
            certain=need > 2 * left,
        )
    ]  # fmt: skip
    if not workers:
        return found
    parcels = chosen["sharing"] == "parcel"
    files = workers * _FILES_PER_WORKER + flight * (1 if parcels else _TENSORS)
    room = None if host.files is None else host.files - host.files_open
    text = "open files (RLIMIT_NOFILE)"
    why = f"{workers} workers, {flight} batches in flight"
    found.append(
        Line(text, files, room, why, "ulimit -n 4096", in_bytes=False, certain=True)
    )
    if not parcels and host.shm_free_bytes is not None:
        fix = "docker run --shm-size=2g, or fewer workers"
        found.append(
            Line("/dev/shm", parts["in flight"], host.shm_free_bytes, why, fix,
                 certain=True)
        )  # fmt: skip
    maps = flight * (0 if parcels else _TENSORS)
    fix = "sysctl vm.max_map_count=262144"
    found.append(Line("mappings", maps, host.mappings, why, fix, in_bytes=False))
    return found
