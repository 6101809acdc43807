"""Reads the peak of a step, its parts, phases and modules out of a log.  Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from loaderkit.budget.allocation_log import End, Log

PHASES = ("forward", "loss", "backward", "step")
"""Parts of a step."""
PARTS = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer state",
    "activations",
    "temporaries",
    "batch",
)
"""What memory is for."""


class Peak(NamedTuple):
    """The highest sum of live bytes within a phase."""

    total: int
    """Bytes, what kernels hold inside among them."""
    inside: int
    """Of these, what a kernel held inside."""
    position: int
    """Event after which it was."""
    phase: str


def phases_of(log: Log) -> list[str]:
    """Name the phase of every event; "base" before the first mark."""
    phases = ["base"] * len(log.events)
    for at, phase in log.marks:
        phases[at:] = [phase] * (len(phases) - at)
    return phases


def changes_of(log: Log, end: End = "likely") -> list[int]:
    """Give the bytes that each event adds, corrected.

    Args:
        log: What lived when.
        end: Which end of what is not known exactly.

    Returns:
        Bytes, negative where a storage is freed.
    """
    changes = []
    made: set[int] = set()
    for number, size in log.events:
        correction = log.corrections.get(number)
        more = correction.at(end) if correction is not None else 0
        # the sign does not tell: what is empty as a fake is made and freed with 0 bytes
        changes.append(size - more if number in made else size + more)
        made.add(number)
    return changes


def peaks_of(log: Log, end: End = "likely") -> dict[str, Peak]:
    """Find the highest sum of each phase.

    Args:
        log: What lived when.
        end: Which end of what is not known exactly.

    Returns:
        The peaks by phase, in the order of :data:`PHASES`.
    """
    best: dict[str, Peak] = {}
    now, begins = 0, {at: phase for at, phase in log.marks if phase in PHASES}
    changes = changes_of(log, end)
    for position, (change, phase) in enumerate(
        zip(changes, phases_of(log), strict=True)
    ):
        if position in begins:  # what is there counts, if nothing more is made
            _raise(best, Peak(now, 0, position - 1, begins[position]))
        now += change
        held = log.inside.get(position)
        inside = held.at(end) if held is not None else 0
        _raise(best, Peak(now + inside, inside, position, phase))
    return {name: best[name] for name in PHASES if name in best}


def totals(peaks: dict[str, Peak]) -> dict[str, int]:
    """Give the bytes of peaks by phase."""
    return {name: peak.total for name, peak in peaks.items()}


def _raise(best: dict[str, Peak], peak: Peak) -> None:
    if peak.phase not in best or peak.total > best[peak.phase].total:
        best[peak.phase] = peak


def fates_of(log: Log) -> dict[int, str]:
    """Say what each storage was, from when it was made and freed."""
    ahead = {"forward", "loss"}
    fates: dict[int, str] = {}
    for (number, _), phase in zip(log.events, phases_of(log), strict=True):
        if number not in fates:
            fates[number] = "activations" if phase in ahead else "temporaries"
        elif phase in ahead:  # it did not live until the backward pass
            fates[number] = "temporaries"
    return fates | log.owners


def parts_at(log: Log, peak: Peak, fate: dict[int, str]) -> dict[str, int]:
    """Sum what is live at a peak, by :data:`PARTS`."""
    parts = dict.fromkeys(PARTS, 0)
    changes = changes_of(log)
    for (number, _), change in zip(
        log.events[: peak.position + 1], changes, strict=False
    ):
        parts[fate[number]] += change
    parts["temporaries"] += peak.inside
    return parts


def kept_by_module(log: Log, fate: dict[int, str]) -> dict[str, int]:
    """Sum the activations of the second step by module."""
    starts = [at for at, phase in log.marks if phase == "forward"]
    sums: dict[str, int] = {}
    begin = starts[-1] if starts else len(log.events)
    made = zip(log.events[begin:], changes_of(log)[begin:], strict=True)
    for (number, _), size in made:
        if size > 0 and fate[number] == "activations":
            name = log.modules.get(number) or "(the model itself)"
            sums[name] = sums.get(name, 0) + size
    return dict(sorted(sums.items(), key=lambda each: -each[1]))
