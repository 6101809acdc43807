"""The verdict over a run: what leaks, what only looks so, and why.  Pure.

Counters are judged one by one (:func:`judge_counters`); where one leaks, evidence is
gathered elsewhere (what grew and who holds it, what collecting garbage left, whose
files came meanwhile), and :func:`decide` says the verdict once, from all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from loaderkit.leaks.counter_trend import (
    ENOUGH_READINGS,
    TOLERANCE,
    CounterTrend,
    Doubt,
    floor_of,
    read_too_seldom,
    thin_out,
)
from loaderkit.leaks.growth import explains
from loaderkit.leaks.noise import FEWEST_READINGS
from loaderkit.leaks.trend import (
    LEAKING,
    NEEDS_MORE,
    STEADY,
    Verdict,
    fit_trend,
)
from loaderkit.memory.counters import AnyCounter, WorkerName, is_judged
from loaderkit.units import count_of, format_bytes, is_known

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from loaderkit.leaks.counter_trend import Series, SeriesByCounter
    from loaderkit.leaks.growth import Growth
    from loaderkit.leaks.trend import Trend
    from loaderkit.memory.counters import CounterName

CAUSES: Mapping[CounterName, CounterName] = {
    "anonymous": "malloc",
    "mappings": "threads",
    "reserved": "allocated",
    "driver": "allocated",
    "device_used": "reserved",
}
"""Counters that grow with another one: pages with what malloc gives out, the stacks of
threads, what torch's allocator takes for tensors, what the driver gives to it."""
_MOST_EXPLAINED = 4.0
"""A counter grows with another one if it grows by no more than so many times as much:
chosen above what rounding to segments and pieces that are lost between them add."""
HELD_BY_OBJECTS: tuple[CounterName, ...] = ("malloc", "anonymous", "python_blocks")
"""Counters of memory that Python objects may hold."""
_BIG_BYTES = 16 << 20
"""Growth of private memory that a few readings prove.  Chosen: some times an arena of
Python's or a thread's stack, which are touched little by little."""
_BIG_TIMES_FREE = 4.0
"""And so many times what malloc keeps: in the first epochs it may still take more."""
_MOST_LONGER = 10
"""Times as long a run as now is the most that is asked for."""
_MOST_LEFT_SHARE = 0.4
"""Of what grew, where it was garbage: something comes up between two collections."""
_SMALL_BYTES = 1 << 20
"""Bytes an epoch of plain numbers that are no leak."""
_MOST_NUMBERS_PER_S = 10_000
"""Of a training's metrics: ten for each step of a millisecond."""
_KINDS_NAMED = 3
"""Chosen: a note is one line."""
_MOST_BLOCK_BYTES = 512
"""Of a small object: Python leaves what is larger to malloc."""


@dataclass(frozen=True)
class Collected:
    """What collecting garbage left of the growth of a counter."""

    grown: float
    """How much it had grown."""
    left: float
    """How much of that is there still."""
    epochs: float
    """In how many epochs."""


@dataclass(frozen=True)
class RunEvidence:
    """All that a verdict follows from."""

    counters: tuple[CounterTrend, ...]
    """From :func:`judge_counters`."""
    epochs: int
    """That were watched."""
    seconds_per_epoch: float
    """Without the readings."""
    tolerance: float = TOLERANCE
    """Bytes an epoch that do not count."""
    growths: tuple[Growth, ...] = ()
    """What grew, the heaviest first; looked for only where a counter leaks."""
    objects_counted: bool = True
    """A census was there to tell what came since."""
    collected: Mapping[AnyCounter, Collected] = field(default_factory=dict)
    """What collecting garbage left; empty where the collector is off."""
    foreign_kinds: tuple[str, ...] = ()
    """Kinds of files in /dev/shm that other processes made."""
    rarely_read: Mapping[AnyCounter, int] = field(default_factory=dict)
    """How often counters were read that cannot be judged."""
    is_over_limit: bool = False
    """More memory is used than the limit that was set."""
    free_bytes: float | None = None
    """Of the host's memory that may still be used."""


@dataclass(frozen=True)
class Conclusion:
    """A verdict, and what is to be said with it."""

    verdict: Verdict
    more_epochs: int = 0
    """That would decide it, when it needs more."""
    growths: tuple[Growth, ...] = ()
    """What grew, where that is worth a word."""
    notes: tuple[str, ...] = ()
    """What else decided."""


def decide(evidence: RunEvidence) -> Conclusion:
    """Give the verdict over a run.

    Args:
        evidence: Everything that was seen.

    Returns:
        The verdict, with its reasons.
    """
    conclusion = _decide_growth(evidence)
    conclusion = _with_notes(conclusion, _notes_on_left_out(evidence))
    if evidence.is_over_limit:
        note = "the limit that was set has been passed"
        conclusion = _with_notes(replace(conclusion, verdict=LEAKING), [note])
    return conclusion


def judge_counters(
    series: SeriesByCounter,
    *,
    tolerance: float = TOLERANCE,
    warmup: int | None = None,
    starting_until: Mapping[WorkerName, int] | None = None,
) -> tuple[CounterTrend, ...]:
    """Judge every counter that should be flat.

    Args:
        series: Epochs and readings by counter.
        tolerance: Bytes an epoch that nobody minds.
        warmup: Readings to leave out at the start; found counter by counter if None.
        starting_until: The last epoch in which a child process was still starting up,
            by counter: growth until then is what it imports.

    Returns:
        A trend a counter, in the order given; those not judged are left out.
    """
    counters = []
    series = {name: _readings_known(readings) for name, readings in series.items()}
    rarely_read = read_too_seldom(series)
    for name, readings in series.items():
        if name in rarely_read or not is_judged(name) or not readings[0]:
            continue
        floor = floor_of(name, tolerance)
        if isinstance(name, WorkerName):
            end_of_start = (starting_until or {}).get(name, -1)
            counter = _judge_worker(name, readings, floor, warmup, end_of_start)
        else:
            counter = _judge_counter(name, readings, floor, warmup)
        counters.append(counter)
    return tuple(_held_back(counters, series, tolerance))


def overall(counters: Iterable[CounterTrend]) -> tuple[Verdict, int]:
    """Sum the verdicts up.

    Args:
        counters: All that were judged.

    Returns:
        "leaking" if one leaks, else "needs more epochs" if one does and how many, else
        "steady".
    """
    counting = list(counters)
    by_name = {counter.name: counter.trend for counter in counting}
    if "malloc" in by_name and by_name["malloc"].verdict == STEADY:
        # malloc is exact, while pages come and go with what is free in between: where
        # only their noise leaves a question, malloc has answered it.
        counting = [
            counter
            for counter in counting
            if counter.name != "anonymous"
            or counter.trend.verdict == LEAKING
            or counter.doubt is not None
        ]
    verdicts = {counter.trend.verdict for counter in counting}
    if LEAKING in verdicts:
        return LEAKING, 0
    if NEEDS_MORE in verdicts:
        return NEEDS_MORE, max(counter.trend.more_epochs for counter in counting)
    return STEADY, 0


def effects_among(rates: Mapping[AnyCounter, float]) -> set[AnyCounter]:
    """Find the counters that grow only because another one does.

    Args:
        rates: Growth an epoch of all counters that leak.

    Returns:
        Those of :data:`CAUSES` whose cause leaks too, and explains as much.

    >>> effects_among({"allocated": 1e6, "driver": 1.5e6})
    {'driver'}
    >>> effects_among({"allocated": 1e6, "driver": 9e6})
    set()
    """
    return {
        effect
        for effect, cause in CAUSES.items()
        if effect in rates and rates[effect] <= _MOST_EXPLAINED * rates.get(cause, 0.0)
    }


def epochs_until(room_bytes: float, bytes_per_epoch: float) -> int | None:
    """Tell when memory is used up.

    Args:
        room_bytes: What is left.
        bytes_per_epoch: What an epoch adds.

    Returns:
        Epochs; None when it does not grow.

    >>> epochs_until(1000, 300), epochs_until(1000, 0)
    (3, None)
    """
    if bytes_per_epoch <= 0:
        return None
    return max(0, int(room_bytes // bytes_per_epoch))


def rising_trends(counters: Iterable[CounterTrend]) -> dict[AnyCounter, Trend]:
    """Pick the counters that leak.

    Args:
        counters: All that were judged.

    Returns:
        Their trends, by name.
    """
    return {counter.name: counter.trend for counter in counters if counter.trend.rising}


def host_rate(counters: Iterable[CounterTrend]) -> float:
    """Give how fast memory of the host grows: by malloc, which is exact, if it does.

    Args:
        counters: All that were judged.

    Returns:
        Bytes an epoch; 0 when neither malloc nor private memory leaks.
    """
    rising = rising_trends(counters)
    rates = [
        rising[name].per_epoch for name in ("malloc", "anonymous") if name in rising
    ]
    return min(rates, default=0.0)


def device_rate(counters: Iterable[CounterTrend]) -> float:
    """Give how fast tensors on the device grow.

    Args:
        counters: All that were judged.

    Returns:
        Bytes an epoch; 0 when they do not leak.
    """
    rising = rising_trends(counters)
    return rising["allocated"].per_epoch if "allocated" in rising else 0.0


def most_host_bytes(counters: Sequence[CounterTrend]) -> float:
    """Bound by how many bytes an epoch memory grows where only small objects leak.

    Args:
        counters: All that were judged.

    Returns:
        Small objects of the greatest size, and what malloc took beside them;
        infinity where something else leaks.
    """
    trends = {counter.name: counter.trend for counter in counters}
    is_of_small_objects = rising_trends(counters).keys() == {"python_blocks"}
    if not is_of_small_objects or "malloc" not in trends:
        return math.inf
    small_objects = _MOST_BLOCK_BYTES * trends["python_blocks"].per_epoch
    return small_objects + max(0.0, trends["malloc"].per_epoch)


def is_garbage(
    counters: Iterable[CounterTrend], collected: Mapping[AnyCounter, Collected]
) -> bool:
    """Tell whether collecting has freed most of everything that grew.

    Args:
        counters: All that were judged.
        collected: What collecting left; empty where nobody has collected.

    Returns:
        False as well where something else than memory of the host grew.
    """
    names = rising_trends(counters).keys()
    if not collected or not names <= set(HELD_BY_OBJECTS):
        return False
    return all(
        change.left <= _MOST_LEFT_SHARE * change.grown for change in collected.values()
    )


# The verdict over a run, rule by rule.


def _decide_growth(evidence: RunEvidence) -> Conclusion:
    """Ask the rules by which growth may be no leak; the first that applies decides."""
    verdict, more_epochs = overall(evidence.counters)
    if verdict != LEAKING:
        return Conclusion(verdict, more_epochs)
    rules: tuple[Callable[[RunEvidence], Conclusion | None], ...] = (
        _acquit_garbage,
        _judge_bounded_container,
        _acquit_small_numbers,
    )
    for rule in rules:
        conclusion = rule(evidence)
        if conclusion is not None:
            return conclusion
    notes = []
    if not evidence.growths and not evidence.objects_counted:
        notes.append("objects were not counted in time: a longer run tells who has it")
    growths = tuple(map(_many_not_few_numbers, evidence.growths))
    return Conclusion(LEAKING, growths=growths, notes=tuple(notes))


def _acquit_garbage(evidence: RunEvidence) -> Conclusion | None:
    """Call it steady where collecting has freed what had grown."""
    if not is_garbage(evidence.counters, evidence.collected):
        return None
    # Beneath much garbage there may be a leak: then more is left than nobody minds, and
    # somebody holds it.  A holder alone proves nothing: something else grew once
    # meanwhile, and is named for want of anything larger.
    held = [
        growth
        for growth in evidence.growths
        if growth.holder is not None and growth.holder.held
    ]
    is_held = bool(held) and explains(held, host_rate(evidence.counters))
    if is_held and _is_left_above_tolerance(evidence):
        return None
    note = "what had grown was garbage, and is collected now"
    return Conclusion(STEADY, notes=(note,))


def _is_left_above_tolerance(evidence: RunEvidence) -> bool:
    """Tell whether what collecting left would count as a leak by itself."""
    return any(
        change.left > floor_of(name, evidence.tolerance) * change.epochs
        for name, change in evidence.collected.items()
    )


def _judge_bounded_container(evidence: RunEvidence) -> Conclusion | None:
    """Wait until a ``deque(maxlen=...)`` or bounded cache is full, if it will fit."""
    main = _heaviest_on_host(evidence)
    if main is None or main.epochs_left is None or main.holder is None:
        return None
    if not explains([main], host_rate(evidence.counters)):
        return None  # a small cache fills up beside a leak
    note = f"{main.what} `{main.holder.path}` has a bound, which it nears"
    more_bytes, free_bytes = main.bytes_until_full, evidence.free_bytes
    if more_bytes is not None and free_bytes is not None:
        note += f"; it takes {format_bytes(more_bytes)} more until it is full, of "
        note += f"{format_bytes(round(free_bytes))} that are free"
        if more_bytes > free_bytes:
            too_large = replace(main, pattern="large bound")
            growths = (too_large, *evidence.growths[1:])
            return Conclusion(LEAKING, growths=growths, notes=(note,))
    more_epochs = main.epochs_left + FEWEST_READINGS
    return Conclusion(NEEDS_MORE, more_epochs, evidence.growths, (note,))


def _acquit_small_numbers(evidence: RunEvidence) -> Conclusion | None:
    """Call it steady where only a training's history of numbers grows."""
    main = _heaviest_on_host(evidence)
    if main is None:
        return None
    if any(growth.pattern != "numbers" for growth in evidence.growths):
        return None
    bytes_per_epoch = sum(growth.bytes_per_epoch for growth in evidence.growths)
    numbers_per_epoch = sum(growth.per_epoch for growth in evidence.growths)
    most_numbers = _MOST_NUMBERS_PER_S * evidence.seconds_per_epoch
    if bytes_per_epoch >= _SMALL_BYTES or numbers_per_epoch > most_numbers:
        return None
    return Conclusion(STEADY, growths=evidence.growths, notes=(str(main),))


def _heaviest_on_host(evidence: RunEvidence) -> Growth | None:
    """Give what grew most, unless something else than the host's memory grows too."""
    if not rising_trends(evidence.counters).keys() <= set(HELD_BY_OBJECTS):
        return None
    return evidence.growths[0] if evidence.growths else None


def _many_not_few_numbers(growth: Growth) -> Growth:
    """Call numbers by the pattern of a leak, once it is clear that they are one."""
    if growth.pattern == "numbers":
        return replace(growth, pattern="many numbers")
    return growth


def _notes_on_left_out(evidence: RunEvidence) -> list[str]:
    """Say what was seen and did not count."""
    notes = []
    kinds = sorted(evidence.foreign_kinds)
    if kinds:
        names = ", ".join(kinds[:_KINDS_NAMED])
        if len(kinds) > _KINDS_NAMED:
            names += f" and {count_of(len(kinds) - _KINDS_NAMED, 'more kinds')}"
        notes.append(f"files {names} are made by another process: left out")
    for name, count in evidence.rarely_read.items():
        if not isinstance(name, WorkerName):
            notes.append(
                f"{name} was read after {count} of {evidence.epochs} only: too "
                "seldom to be judged"
            )
    return notes


def _with_notes(conclusion: Conclusion, notes: Iterable[str]) -> Conclusion:
    return replace(conclusion, notes=(*conclusion.notes, *notes))


# Counters one by one.


def _readings_known(series: Series) -> Series:
    """Leave out readings that are no finite number, as of a counter that failed."""
    epochs, values = series
    if all(map(is_known, values)):
        return series
    pairs = zip(epochs, values, strict=True)
    known = [(epoch, value) for epoch, value in pairs if is_known(value)]
    return [epoch for epoch, _ in known], [value for _, value in known]


def _judge_counter(
    name: AnyCounter,
    series: Series,
    floor: float,
    warmup: int | None,
) -> CounterTrend:
    epochs, values = map(thin_out, series)
    trend = fit_trend(values, floor=floor, warmup=warmup, at=epochs)
    return CounterTrend(name, trend, tuple(epochs), tuple(values))


def _judge_worker(
    name: WorkerName,
    series: Series,
    floor: float,
    warmup: int | None,
    end_of_start: int,
) -> CounterTrend:
    """Judge a child process by the epochs after it has started up."""
    epochs, values = series
    started_at = sum(epoch <= end_of_start for epoch in epochs)
    has_just_started = started_at > 0 and len(epochs) - started_at < FEWEST_READINGS
    if not has_just_started:
        since_start = epochs[started_at:], values[started_at:]
        return _judge_counter(name, since_start, floor, warmup)
    counter = _judge_counter(name, series, floor, warmup)
    if counter.trend.verdict == STEADY:
        return counter
    return _with_doubt(
        counter,
        "still starting up",
        why="it is still starting up: what it imports is no leak",
        more_epochs=max(len(counter.values), ENOUGH_READINGS),
    )


def _held_back(
    counters: Sequence[CounterTrend],
    series: SeriesByCounter,
    tolerance: float,
) -> list[CounterTrend]:
    """Ask of each counter that leaks whether something else explains it for now."""
    by_name = {counter.name: counter for counter in counters}
    malloc, blocks = by_name.get("malloc"), by_name.get("python_blocks")
    # Python's own allocator maps memory without malloc.
    python_grows = blocks is not None and blocks.trend.rising
    judged = []
    for counter in counters:
        if counter.name == "device_used" and counter.trend.rising:
            doubted = _with_doubt(
                counter,
                "maybe another process",
                why="it grows outside of torch's allocator, or by another process",
                more_epochs=max(ENOUGH_READINGS, len(counter.values)),
            )
            judged.append(doubted)
        elif (
            counter.name == "anonymous"
            and counter.trend.rising
            and malloc is not None
            and not malloc.trend.rising
            and not python_grows
        ):
            most_free = _most_free(series, counter)
            if _stands_still(malloc, tolerance):
                judged.append(_held_back_by_malloc(counter, most_free))
            else:
                judged.append(_held_back_beside_malloc(counter, malloc, most_free))
        else:
            judged.append(counter)
    return judged


def _stands_still(malloc: CounterTrend, tolerance: float) -> bool:
    """Tell whether nothing that came from malloc is kept."""
    is_steady = malloc.trend.verdict == STEADY
    return is_steady and malloc.growth <= tolerance * max(1.0, malloc.judged_epochs)


def _most_free(series: SeriesByCounter, counter: CounterTrend) -> float:
    """Give the most that malloc kept free since a counter's warm-up."""
    epochs, free_bytes = series.get("malloc_free", ((), ()))
    begin = counter.epochs[counter.trend.warmup]
    since_begin = [
        size for epoch, size in zip(epochs, free_bytes, strict=True) if epoch >= begin
    ]
    return max(since_begin, default=0.0)


def _held_back_by_malloc(anonymous: CounterTrend, most_free: float) -> CounterTrend:
    """Doubt growth of private memory that malloc's own free memory may explain.

    A free piece that was never written to is no resident memory.  A loop that keeps
    nothing may be given such pieces for some epochs, one after the other: private
    memory grows then, in even steps, and by no more in all than malloc keeps.  What
    maps memory by itself grows on.
    """
    growth = anonymous.growth
    if growth <= most_free:
        epochs_left = (most_free - growth) / anonymous.trend.per_epoch
        most_epochs = _MOST_LONGER * anonymous.judged_epochs
        return _with_doubt(
            anonymous,
            "fits into what malloc keeps",
            why="malloc stands still, and keeps as much free as pages became more",
            more_epochs=max(
                _missing_readings(anonymous), math.ceil(min(epochs_left, most_epochs))
            ),
        )
    is_big = growth >= _BIG_BYTES and growth > _BIG_TIMES_FREE * most_free
    if anonymous.judged_readings < ENOUGH_READINGS and not is_big:
        return _with_doubt(
            anonymous,
            "too few readings beside malloc",
            why="malloc stands still, and too few readings say that pages do not",
            more_epochs=_missing_readings(anonymous),
        )
    return anonymous


def _held_back_beside_malloc(
    anonymous: CounterTrend, malloc: CounterTrend, most_free: float
) -> CounterTrend:
    """Doubt growth of private memory that malloc's own growth explains.

    A cache that fills up and is full then: malloc, which is exact, says that it has
    grown and may have levelled off.  Pages come later than the pieces that lie in them,
    so private memory still grows when malloc does not.  What maps memory by itself
    grows beyond both, what malloc has taken and what it keeps free.
    """
    taken = malloc.growth_since(anonymous.epochs[anonymous.trend.warmup])
    if anonymous.growth > max(0.0, taken) + most_free:
        return anonymous
    return _with_doubt(
        anonymous,
        "grows with malloc",
        why="malloc took as much, and does not go on",
        more_epochs=max(malloc.trend.more_epochs, _missing_readings(anonymous)),
    )


def _missing_readings(counter: CounterTrend) -> int:
    return max(3, ENOUGH_READINGS - counter.judged_readings)


def _with_doubt(
    counter: CounterTrend,
    doubt: Doubt,
    *,
    why: str,
    more_epochs: int,
) -> CounterTrend:
    """Take a verdict back until there are more epochs."""
    trend = replace(counter.trend, verdict=NEEDS_MORE, why=why, more_epochs=more_epochs)
    return replace(counter, trend=trend, doubt=doubt)
