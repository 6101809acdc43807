"""Puts a report together: gathers the evidence for a verdict, and who holds what grew.

Nothing is decided here: ``verdict`` does that, from what is gathered.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from loaderkit.leaks.blame import find_causes, find_growth
from loaderkit.leaks.counter_trend import read_too_seldom
from loaderkit.leaks.finders.evidence import CounterEvidence
from loaderkit.leaks.report import LeakReport
from loaderkit.leaks.trace import device_sites
from loaderkit.leaks.trend import LEAKING, STEADY
from loaderkit.leaks.unrooted import count_outside
from loaderkit.leaks.verdict import (
    HELD_BY_OBJECTS,
    Collected,
    RunEvidence,
    decide,
    device_rate,
    epochs_until,
    host_rate,
    is_garbage,
    judge_counters,
    most_host_bytes,
    overall,
    rising_trends,
)
from loaderkit.memory.counters import WorkerName
from loaderkit.memory.host import available_memory
from loaderkit.memory.probes import read_device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loaderkit.leaks.census import Census
    from loaderkit.leaks.counter_trend import CounterTrend, Series
    from loaderkit.leaks.finders.evidence import Memory
    from loaderkit.leaks.growth import Growth
    from loaderkit.leaks.patterns import PatternName
    from loaderkit.leaks.trace import Site
    from loaderkit.leaks.trend import Trend
    from loaderkit.leaks.watch import EpochRecorder
    from loaderkit.memory.counters import AnyCounter

_LEAST_PAUSE_S = 0.25
_MOST_PAUSE_S = 1.0
_PAUSE_EPOCHS = 4
"""How long it waits for files of other processes: some epochs, since these may make
theirs as seldom as we do.  Chosen between what a loop of workers takes for a batch, and
what a user bears."""
_FEWEST_EPOCHS_SINCE = 4
"""Epochs since the first collection from which on they alone are looked at; chosen
between one reading, which noise decides, and the fewest of a judged run."""
_HIDES_HOLDER: frozenset[PatternName] = frozenset(
    {"native", "unknown holder", "outside malloc"}
)


def build_report(
    watch: EpochRecorder,
    *,
    warmup: int | None,
    tolerance: int,
    limit: int | None,
) -> LeakReport:
    """Judge a run and find out who holds what grew.

    Args:
        watch: The readings.
        warmup: Epochs to leave out; found if None.
        tolerance: Bytes an epoch that do not count.
        limit: Memory that may be used, in bytes; what is free if None.

    Returns:
        The report.
    """
    evidence = _gather_evidence(watch, warmup, tolerance, limit)
    conclusion = decide(evidence)
    is_leaking = conclusion.verdict == LEAKING
    limit_bytes, limit_from = _memory_limit(watch, limit)
    epochs_left = None
    if evidence.is_over_limit:
        epochs_left = 0
    elif is_leaking and limit_bytes is not None:
        room_bytes = limit_bytes - watch.used_bytes()
        epochs_left = epochs_until(room_bytes, _fastest_growth(evidence.counters))
    return LeakReport(
        verdict=conclusion.verdict,
        epochs=watch.epoch,
        seconds=time.monotonic() - watch.begun,
        device=str(watch.device),
        counters=evidence.counters,
        growths=conclusion.growths,
        sites=_recorded_sites(watch) if is_leaking else (),
        notes=conclusion.notes,
        more_epochs=conclusion.more_epochs,
        limit_bytes=limit_bytes,
        limit_from=limit_from,
        used_bytes=round(watch.used_bytes()),
        epochs_left=epochs_left,
    )


def _gather_evidence(
    watch: EpochRecorder,
    warmup: int | None,
    tolerance: int,
    limit: int | None,
) -> RunEvidence:
    """See what a verdict follows from; what takes long only where a counter leaks."""
    collected: Mapping[AnyCounter, Collected] = {}
    with watch.collector_paused():
        counters = _judge_own_counters(watch, warmup, tolerance)
        is_leaking = overall(counters)[0] == LEAKING
        if watch.collects_by_itself and is_leaking:
            collected = _left_after_collecting(watch, counters)
    growths = _find_growths(watch, counters) if is_leaking else []
    return RunEvidence(
        counters=counters,
        epochs=watch.epoch,
        seconds_per_epoch=watch.seconds_per_epoch(),
        tolerance=tolerance,
        growths=tuple(growths),
        objects_counted=watch.census() is not None,
        collected=collected,
        foreign_kinds=tuple(watch.shared_files.foreign_kinds_seen()),
        rarely_read=read_too_seldom(watch.series()),
        is_over_limit=limit is not None and watch.used_bytes() > limit,
        free_bytes=_free_host_bytes(watch, limit) if is_leaking else None,
    )


def _judge_own_counters(
    watch: EpochRecorder,
    warmup: int | None,
    tolerance: int,
) -> tuple[CounterTrend, ...]:
    """Judge the counters, without files in /dev/shm that another process makes."""
    shared_files = watch.shared_files

    def trend_of(series: Series) -> Trend:
        # As the counter of these files, so that the same rules hold for each kind.
        (counter,) = judge_counters(
            {"shm_files": series}, tolerance=tolerance, warmup=warmup
        )
        return counter.trend

    def trends_by_kind() -> dict[str, Trend]:
        by_kind = shared_files.series_by_kind()
        return {kind: trend_of(series) for kind, series in by_kind.items()}

    series = watch.series()
    if any(trend.verdict != STEADY for trend in trends_by_kind().values()):
        pause_s = _PAUSE_EPOCHS * watch.seconds_per_epoch()
        shared_files.wait_for_others(min(max(pause_s, _LEAST_PAUSE_S), _MOST_PAUSE_S))
        # What another process leaves there once may hide what this one leaves each
        # epoch.  So where a kind leaks, the others are not counted.
        leaking = [kind for kind, trend in trends_by_kind().items() if trend.rising]
        series["shm_files"] = shared_files.series(leaking or None)
    return judge_counters(
        series,
        tolerance=tolerance,
        warmup=warmup,
        starting_until=watch.starting_until,
    )


def _find_growths(
    watch: EpochRecorder, counters: Sequence[CounterTrend]
) -> list[Growth]:
    """Ask the finders what grew."""
    leaking = rising_trends(counters)
    objects: list[Growth] = []
    census = watch.census()
    # What a child process keeps is not among this one's objects.
    in_this_process = any(not isinstance(name, WorkerName) for name in leaking)
    if census is not None and in_this_process:
        objects = _find_objects(watch, census, counters)
        if not watch.collects_by_itself:
            collected = _left_after_collecting(watch, counters)
            if is_garbage(counters, collected):
                objects = [_as_cycle(growth) for growth in objects]
    evidence = CounterEvidence(
        leaking=leaking,
        objects=objects,
        objects_counted=census is not None,
        files_before=watch.files,
        shared_files=watch.shared_files,
    )
    return [_frozen_if_hidden(watch, growth) for growth in find_causes(evidence)]


def _find_objects(
    watch: EpochRecorder, census: Census, counters: Sequence[CounterTrend]
) -> list[Growth]:
    """Ask for the objects that grew, for each memory that they grew in."""
    handlers = count_outside().exit_handlers - watch.outside_counts.exit_handlers
    others = [other for other in watch.censuses if other is not census]
    rates: dict[Memory, float] = {
        "host": host_rate(counters),
        "device": device_rate(counters),
    }
    growing = [memory for memory, rate in rates.items() if rate] or ["host"]
    objects: list[Growth] = []
    for memory in growing:
        growths = find_growth(
            census,
            watch.epoch,
            rate=rates[memory],
            memory=memory,
            most_bytes_per_epoch=most_host_bytes(counters),
            more_exit_handlers=handlers / watch.epoch,
            other_censuses=others,
            collects_by_itself=watch.collects_by_itself,
        )
        # What gets longer and needs no weighing is found for either memory.
        known = {(growth.holder, growth.items) for growth in objects}
        objects += [
            growth for growth in growths if (growth.holder, growth.items) not in known
        ]
    return objects


def _as_cycle(growth: Growth) -> Growth:
    """Call it cycles where no variable leads to it, and collecting has freed it."""
    if growth.holder is not None and growth.holder.held:
        return growth
    return replace(growth, pattern="cycles", what="a cycle", holder=None)


def _frozen_if_hidden(watch: EpochRecorder, growth: Growth) -> Growth:
    """Say so where what is held cannot be seen because gc.freeze() hides it."""
    more_frozen = count_outside().frozen_objects - watch.outside_counts.frozen_objects
    if growth.pattern in _HIDES_HOLDER and more_frozen >= watch.epoch:
        return replace(growth, pattern="frozen")
    return growth


def _left_after_collecting(
    watch: EpochRecorder, counters: Sequence[CounterTrend]
) -> dict[AnyCounter, Collected]:
    """Collect garbage, and tell what is left of what had grown on the host.

    The first census has collected what there was by then, from before the run and
    from its first epochs, which nobody can tell apart: so only what grew after it shows
    whether the growth is garbage.

    Returns:
        For each counter of the host that leaks.
    """
    rising = {counter.name: counter for counter in counters if counter.trend.rising}
    names = [name for name in HELD_BY_OBJECTS if name in rising]
    if len(names) > 1 and "anonymous" in names:
        names.remove("anonymous")  # pages stay with malloc when objects go
    series, before = watch.series(), watch.quick()
    gc.collect()
    after = watch.quick()
    since = watch.collected_epoch
    collected: dict[AnyCounter, Collected] = {}
    for name in names:
        counter = rising[name]
        grown, epochs = counter.growth, counter.judged_epochs
        if since is not None and _FEWEST_EPOCHS_SINCE <= watch.epoch - since < epochs:
            value_after = dict(zip(*series[name], strict=True))
            grown = value_after[watch.epoch] - value_after[since]
            epochs = watch.epoch - since
        # Not what is there now: judging has taken memory, too.
        freed = before[name] - after[name]
        collected[name] = Collected(grown, grown - freed, epochs)
    return collected


def _recorded_sites(watch: EpochRecorder) -> tuple[Site, ...]:
    """Name who asked for what stays on the device, if somebody records that anyway."""
    census = watch.census()
    if census is None or not census.blocks:
        return ()
    blocks = [census.blocks, watch.recorded_blocks()]
    return device_sites(blocks, watch.device, epochs=watch.epoch - census.epoch)


def _fastest_growth(counters: Sequence[CounterTrend]) -> float:
    """Give how many bytes an epoch the fastest counter of bytes takes."""
    rates = [
        counter.trend.per_epoch
        for counter in counters
        if counter.trend.rising and counter.unit == "bytes"
    ]
    return max(rates, default=0.0)


def _free_host_bytes(watch: EpochRecorder, limit: int | None) -> float:
    """Give what of the host's memory may still be used."""
    free_bytes: float = available_memory()[0]
    is_limit_of_device = watch.last("allocated") is not None
    if limit is not None and not is_limit_of_device:
        free_bytes = min(free_bytes, limit - watch.used_bytes())
    return max(free_bytes, 0.0)


def _memory_limit(watch: EpochRecorder, limit: int | None) -> tuple[int | None, str]:
    """Give the memory that there is to be used up, and which limit that is."""
    if limit is not None:
        return limit, "the limit that was set"
    if watch.last("allocated") is not None:
        values = read_device(watch.device).values
        return values.get("device_limit"), "memory of the device"
    available_bytes, available_from = available_memory()
    limit_bytes = available_bytes + round(watch.used_bytes())
    return limit_bytes, f"free on {available_from}, and used"
