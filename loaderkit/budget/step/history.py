"""Memory over a training step: what lived when, of which part, made by whom.  Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.step.peaks import (
    PARTS,
    PHASES,
    changes_of,
    is_in_step,
    phases_of,
)

if TYPE_CHECKING:
    from loaderkit.budget.step.allocation_log import Log, Part, Phase

MOST_MOMENTS = 400
"""A step of a transformer has 100,000 events.  Chosen: on a picture 1,300 pixels wide a
stair is three pixels."""


class Moment(NamedTuple):
    """What was live at one moment of a step."""

    event: int
    """Which of the step's allocations and releases it is, from 0."""
    phase: Phase
    module: str
    """The module that made what was made last: its name and its class."""
    forward: str
    """File and line of the ``forward`` that calls this module, in the user's own code;
    empty where it has none."""
    total: int
    """Live bytes, including what a kernel held inside."""
    parts: tuple[int, ...]
    """Of these, for each of :data:`PARTS`."""


def history_of(log: Log, part_of: dict[int, Part]) -> tuple[Moment, ...]:
    """Follow the live bytes through the last step of a log.

    Args:
        log: What lived when.
        part_of: The part of each storage, from :func:`peaks.storage_parts`.

    Returns:
        At most some 400 moments in their order.  Of each stretch of a long step the
        highest moment is kept, so that the peak is always among them.
    """
    begin = _start_of_last_step(log)
    events_a_moment = max(1, -(-(len(log.events) - begin) // MOST_MOMENTS))
    phases = phases_of(log)
    live: dict[Part, int] = dict.fromkeys(PARTS, 0)
    live_bytes = 0
    module = ""
    moments: list[Moment] = []
    for position, change in enumerate(changes_of(log)):
        number, size = log.events[position]
        live[part_of[number]] += change
        live_bytes += change
        if size > 0:
            module = log.modules.get(number, "")
        phase = phases[position]
        if position < begin or not is_in_step(phase):
            continue

        held = log.inside.get(position)
        inside = held.likely if held is not None else 0
        total = live_bytes + inside
        stretch = (position - begin) // events_a_moment
        # The phase is compared too: a stretch must not hide where one begins.
        same_stretch = (
            bool(moments)
            and moments[-1].event // events_a_moment == stretch
            and moments[-1].phase == phase
        )
        if same_stretch:
            # Most events of a long step are no new high: nothing is made of them.
            if total <= moments[-1].total:
                continue
            moments.pop()
        parts = dict(live)
        parts["temporaries"] += inside
        moments.append(
            Moment(
                event=position - begin,
                phase=phase,
                module=module,
                forward=log.forwards.get(module, ""),
                total=total,
                parts=tuple(parts[name] for name in PARTS),
            )
        )
    return tuple(moments)


def _start_of_last_step(log: Log) -> int:
    """Find where the last step begins; the first may make the optimizer's state."""
    starts = [position for position, phase in log.marks if phase == PHASES[0]]
    return starts[-1] if starts else 0
