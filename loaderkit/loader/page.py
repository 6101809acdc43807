"""A loader plan as a page: settings, memory, and how long steps wait.  Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.pages.charts import COLOURS, Bar, Bars, Curves, Series
from loaderkit.pages.document import Section, Table
from loaderkit.units import count_of, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loaderkit.loader.forecast import Forecast
    from loaderkit.pages.document import Block

_STEPS_DRAWN = 60
"""Lengths of a step on the x axis.  Chosen: more make the curve no smoother."""
_MOST_CURVES = 5
"""Numbers of workers that are drawn; more lines than that cannot be told apart."""


def settings_section(
    rows: Sequence[tuple[str, str, str]], *, heading: str = "Settings"
) -> Section:
    """List the settings with their reasons.

    Args:
        rows: Name, value and reason of each.
        heading: Above them.

    Returns:
        A section with a table.
    """
    return Section(heading, (Table(("setting", "value", "why"), tuple(rows)),))


def memory_section(forecast: Forecast) -> Section:
    """Draw what the loader takes, and how near that is to each limit.

    Args:
        forecast: Memory against each limit.

    Returns:
        A section with bars and a table.
    """
    total = sum(forecast.parts.values())
    bars = [
        Bar(name, size, format_bytes(size), colour)
        for (name, size), colour in zip(forecast.parts.items(), COLOURS, strict=False)
    ]
    bars.append(Bar("together", total, format_bytes(total), "grey"))
    rows = []
    for entry in forecast.limits:
        limit = "unknown" if entry.limit is None else entry.amount(entry.limit)
        share = f"{entry.need / entry.limit:.1%}" if entry.limit else ""
        rows.append((entry.name, entry.amount(entry.need), limit, share, entry.fix))
    table = Table(
        ("limit", "taken at most", "left", "share", "where it is too much"),
        tuple(rows),
        frozenset({1, 2, 3}),
    )
    blocks: list[Block] = [
        Bars("What the loader takes at most, by where it is.", tuple(bars)),
        table,
    ]
    if not forecast.batch_known:
        blocks.insert(0, "The bytes of a batch are not known, and not counted.")
    return Section("Account of memory", tuple(blocks))


def waiting_sections(
    batches_per_s: Mapping[int, float], num_workers: int
) -> tuple[Section, ...]:
    """Draw which share of the time training waits for batches, by length of a step.

    Args:
        batches_per_s: What was measured, or follows from it, by number of workers.
        num_workers: The number that was chosen.

    Returns:
        One section; none where reading was not measured.
    """
    if num_workers not in batches_per_s:
        return ()
    # Up to half as long again as the slowest way takes for a batch: there every curve
    # is at 0, and where each comes down to it is seen.
    slowest_s = 1 / min(batches_per_s.values())
    steps_s = [slowest_s * 1.5 * i / _STEPS_DRAWN for i in range(_STEPS_DRAWN + 1)]
    others = [count for count in batches_per_s if count != num_workers]
    drawn = sorted([num_workers, *others[: _MOST_CURVES - 1]])
    series = []
    for count, colour in zip(drawn, COLOURS, strict=False):
        name = count_of(count, "workers")
        if count == num_workers:
            name += " (chosen)"
        shares = [waiting_share(step_s, batches_per_s[count]) for step_s in steps_s]
        percents = tuple(100 * share for share in shares)
        series.append(Series(name, percents, colour))
    readouts = []
    for step_s in steps_s:
        waits = []
        for count in drawn:
            share = waiting_share(step_s, batches_per_s[count])
            waits.append(f"{count_of(count, 'workers')} {share:.0%}")
        readouts.append(f"A step of {format_seconds(step_s)}: {', '.join(waits)}")
    ready_s = 1 / batches_per_s[num_workers]
    chart = Curves(
        label=(
            f"Percent of the time that training waits.  A batch is ready every "
            f"{format_seconds(ready_s)}: longer steps do not wait."
        ),
        x=tuple(steps_s),
        x_name="length of a step without waiting",
        x_unit="s",
        series=tuple(series),
        unit="percent",
        readouts=tuple(readouts),
        first_readout=min(
            range(len(steps_s)), key=lambda index: abs(steps_s[index] - ready_s)
        ),
    )
    caption = "Follows from what making and sending a batch took in the probe."
    return (Section("Waiting for batches", (chart,), caption=caption),)


def waiting_share(step_s: float, batches_per_s: float) -> float:
    """Give the share of the time that training waits for its next batch.

    Args:
        step_s: Seconds of a step, from 0.
        batches_per_s: How fast batches come.

    Returns:
        From 0 to 1.

    >>> waiting_share(0.3, 2.0), waiting_share(1.0, 2.0)
    (0.4, 0.0)
    """
    ready_s = 1 / batches_per_s
    return max(0.0, ready_s - step_s) / max(ready_s, step_s)
