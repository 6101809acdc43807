"""Reads the peak of a step, its parts, phases and modules out of a log.  Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loaderkit.budget.log import Log

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


def phases_of(log: Log) -> list[str]:
    """Name the phase of every event; "base" before the first mark."""
    phases = ["base"] * len(log.events)
    for at, phase in log.marks:
        phases[at:] = [phase] * (len(phases) - at)
    return phases


def peaks_of(log: Log) -> tuple[list[tuple[int, int, str]], dict[str, int]]:
    """Find the highest sum of each phase as (bytes, event, phase)."""
    best: dict[str, tuple[int, int, str]] = {}
    now, begins = 0, {at: phase for at, phase in log.marks if phase in PHASES}
    for position, ((_, size), phase) in enumerate(
        zip(log.events, phases_of(log), strict=True)
    ):
        if position in begins:  # what is there counts, if nothing more is made
            _raise(best, now, position - 1, begins[position])
        now += size
        _raise(best, now, position, phase)
    found = {name: best[name] for name in PHASES if name in best}
    return list(found.values()), {name: each[0] for name, each in found.items()}


def _raise(best: dict[str, Any], now: int, position: int, phase: str) -> None:
    if phase not in best or now > best[phase][0]:
        best[phase] = (now, position, phase)


def fates_of(log: Log) -> dict[int, str]:
    """Say what each storage was, from when it was made and freed."""
    ahead = {"forward", "loss"}
    made: dict[int, str] = {}
    for (number, size), phase in zip(log.events, phases_of(log), strict=True):
        if size > 0:
            made[number] = "activations" if phase in ahead else "temporaries"
        elif phase in ahead:  # it did not live until the backward pass
            made[number] = "temporaries"
    return made | log.owners


def parts_at(log: Log, until: int, fate: dict[int, str]) -> dict[str, int]:
    """Sum what is live after an event, by :data:`PARTS`."""
    parts = dict.fromkeys(PARTS, 0)
    for number, size in log.events[: until + 1]:
        parts[fate[number]] += size
    return parts


def kept_by_module(log: Log, fate: dict[int, str]) -> dict[str, int]:
    """Sum the activations of the second step by module."""
    starts = [at for at, phase in log.marks if phase == "forward"]
    sums: dict[str, int] = {}
    for number, size in log.events[starts[-1] :] if starts else ():
        if size > 0 and fate[number] == "activations":
            name = log.modules.get(number) or "(the model itself)"
            sums[name] = sums.get(name, 0) + size
    return dict(sorted(sums.items(), key=lambda each: -each[1]))
