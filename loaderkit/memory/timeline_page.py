"""A meter's marks as a page: memory over time, with the stages named.  Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.memory.counters import COUNTERS
from loaderkit.pages.charts import COLOURS, Band, Curves, Series
from loaderkit.pages.document import Section, Table
from loaderkit.units import count_of, format_amount, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loaderkit.memory.counters import CounterName, Unit
    from loaderkit.memory.meter import Mark
    from loaderkit.pages.document import Block

_MOST_POINTS = 500
"""Chosen: two pixels a point.  Of a longer run each stretch shows its highest and its
lowest point."""
_MOST_STAGES = 30
"""Chosen: what has room below a picture.  One in every step of a training is thousands,
and their edges would be all that is seen."""
_MOST_ROWS = 60
"""Chosen: a screen or two.  Of more marks the first and the last are listed."""


def few_readings_lead(marks: Sequence[Mark]) -> tuple[str, ...]:
    """Say what so few readings cannot show, and how there are more.

    Args:
        marks: In their order.

    Returns:
        Sentences; none where there are three or more.
    """
    if len(marks) > 2:
        return ()
    read_more = "`MemoryMeter(every_s=0.05)` reads more often."
    if len(marks) == 2:
        unseen = "What was taken and given back between the two readings is not seen"
        return (f"{unseen}: {read_more}",)
    read = (
        "`with meter:` reads at the start and the end of a block, `meter.mark(name)` "
        f"now. {read_more}"
    )
    if marks:
        return (f"One reading has no curve. {read}",)
    return (f"There are no readings. {read}",)


def single_reading_sections(marks: Sequence[Mark]) -> tuple[Section, ...]:
    """List what the only reading has; no section where there are others."""
    if len(marks) != 1:
        return ()
    rows = tuple(
        (name, format_amount(value, COUNTERS[name].unit), COUNTERS[name].words)
        for name, value in marks[0].sample.values.items()
    )
    table = Table(("counter", "reading", "of"), rows, frozenset({1}))
    return (Section("The reading", (table,)),)


def timeline_sections(
    marks: Sequence[Mark], main_counters: Sequence[CounterName]
) -> tuple[Section, ...]:
    """Draw the counters over time.

    Args:
        marks: In their order.
        main_counters: Those of bytes that share one picture; the others that moved
            have one each.

    Returns:
        Sections; none where there are fewer than two marks.
    """
    if len(marks) < 2:
        return ()
    # A counter that was not read every time has no curve: a line would invent readings.
    read = [
        name for name in COUNTERS if all(name in mark.sample.values for mark in marks)
    ]
    # One picture has as many curves as there are colours that can be told apart.
    together = [name for name in main_counters if name in read][: len(COLOURS)]
    moving = [
        name
        for name in read
        if name not in together and len({m.sample.values[name] for m in marks}) > 1
    ]
    stages = _bands_of_stages(marks)
    bands = stages if len(stages) <= _MOST_STAGES else []
    caption = _caption_of(marks)
    if len(stages) > len(bands):
        caption += f" {count_of(len(stages), 'stages')} are not drawn."
    sections = []
    if together:
        sections.append(
            Section(
                "Memory over time",
                (_curves_of_counters(marks, together, "bytes", bands),),
                caption=caption,
            )
        )
    if moving:
        charts = [
            _curves_of_counters(marks, [name], COUNTERS[name].unit, ())
            for name in moving
        ]
        sections.append(Section("What else moved", tuple(charts), side_by_side=True))
    return tuple(sections)


def _curves_of_counters(
    marks: Sequence[Mark],
    names: Sequence[CounterName],
    unit: Unit,
    bands: Sequence[Band],
) -> Curves:
    shown = _thinned_marks(marks, names[0])
    series = tuple(
        Series(
            name,
            tuple(float(mark.sample.values[name]) for mark in shown),
            colour,
        )
        for name, colour in zip(names, COLOURS, strict=False)
    )
    highest = max(
        range(len(shown)), key=lambda index: shown[index].sample.values[names[0]]
    )
    words = "; ".join(f"`{name}`: {COUNTERS[name].words}" for name in names)
    return Curves(
        label=words,
        x=tuple(mark.since_s for mark in shown),
        x_name="time since the meter was made",
        x_unit="s",
        series=series,
        unit=unit,
        readouts=tuple(_text_of_mark(mark, names) for mark in shown),
        first_readout=highest,
        bands=tuple(bands),
    )


def _thinned_marks(marks: Sequence[Mark], name: CounterName) -> list[Mark]:
    """Keep both ends of each stretch's readings, and labelled marks if they are few."""
    if len(marks) <= _MOST_POINTS:
        return list(marks)
    labelled = [mark for mark in marks if mark.label]
    keeps_labels = len(labelled) <= _MOST_POINTS
    # Two points a stretch, so half as many stretches as points; rounded up.
    marks_a_stretch = -(-2 * len(marks) // _MOST_POINTS)
    shown = []
    for start in range(0, len(marks), marks_a_stretch):
        stretch = marks[start : start + marks_a_stretch]
        highest = max(stretch, key=lambda mark: mark.sample.values[name])
        lowest = min(stretch, key=lambda mark: mark.sample.values[name])
        for mark in stretch:  # in the order of time
            is_end = mark is highest or mark is lowest
            if is_end or (keeps_labels and mark.label):
                shown.append(mark)
    return shown


def _caption_of(marks: Sequence[Mark]) -> str:
    """Say how to read the picture."""
    caption = "An axis begins where the readings do, not at 0."
    if len(marks) <= _MOST_POINTS:
        return caption
    stretches = count_of(_MOST_POINTS // 2, "stretches")
    return f"{caption} The highest and the lowest reading of each of {stretches}."


def named_marks_sections(
    marks: Sequence[Mark], counters: Sequence[CounterName]
) -> tuple[Section, ...]:
    """List the marks that have a name.

    Args:
        marks: In their order.
        counters: The columns; one that none of them read is left out.

    Returns:
        One section; none where no mark has a name.
    """
    named = [mark for mark in marks if mark.label]
    if not named:
        return ()
    columns = [
        name for name in counters if any(name in mark.sample.values for mark in named)
    ]
    blocks: list[Block] = []
    listed = named
    if len(named) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        listed = [*named[:half], *named[-half:]]
        blocks.append(
            f"The first {half} and the last {half} of {len(named):,}: "
            f"`timeline.rows()` has all."
        )
    rows = []
    for mark in listed:
        amounts = [
            format_amount(mark.sample.values[name], COUNTERS[name].unit)
            if name in mark.sample.values
            else ""
            for name in columns
        ]
        rows.append((mark.label, format_seconds(mark.since_s), *amounts))
    numbers = frozenset(range(1, 2 + len(columns)))
    blocks.append(Table(("mark", "after", *columns), tuple(rows), numbers))
    return (Section("Marks with a name", tuple(blocks)),)


def _bands_of_stages(marks: Sequence[Mark]) -> list[Band]:
    """Find the stages: what lies between "before x" and the next "after x"."""
    begun: dict[str, float] = {}
    bands = []
    for mark in marks:
        moment, _, stage = mark.label.partition(" ")
        if moment == "before":
            begun[stage] = mark.since_s
        elif moment == "after" and stage in begun:
            bands.append(Band(begun.pop(stage), mark.since_s, stage))
    return bands


def _text_of_mark(mark: Mark, names: Sequence[CounterName]) -> str:
    amounts = ", ".join(
        f"{name} "
        f"{format_amount(mark.sample.values[name], COUNTERS[name].unit, short=True)}"
        for name in names
    )
    label = f"{mark.label}, " if mark.label else ""
    return f"{label}{format_seconds(mark.since_s)}\n{amounts}"
