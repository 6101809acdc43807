"""Puts a report together: judges the counters, asks the collector, finds who holds."""

from __future__ import annotations

import gc
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.leaks.blame import explains, find_growth
from loaderkit.leaks.growth import RESOURCES, Growth
from loaderkit.leaks.report import LeakReport
from loaderkit.leaks.resources import resource_growth, worker_words
from loaderkit.leaks.trace import device_sites
from loaderkit.leaks.trend import LEAKING, LEAST, NEEDS_MORE, STEADY
from loaderkit.leaks.unrooted import count_outside
from loaderkit.leaks.verdict import (
    WORKER,
    effects,
    epochs_until,
    floor_of,
    judge,
    overall,
    read_too_seldom,
)
from loaderkit.leaks.watch import collector_paused
from loaderkit.memory.host import read_host
from loaderkit.memory.probes import read_device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loaderkit.leaks.trace import Site
    from loaderkit.leaks.trend import Trend
    from loaderkit.leaks.verdict import CounterTrend, Series
    from loaderkit.leaks.watch import Watch

_HOST = ("malloc", "anonymous", "python_blocks")
"""Counters of memory that Python objects may hold."""
_LEFT_OVER = (
    ("allocated", "device", "device memory"),
    ("reserved", "reserved", "the cache of torch's allocator"),
    ("driver", "driver", "device memory outside of tensors"),
    ("pinned", "pinned", "page-locked memory"),
    ("malloc", "native", "native memory"),
    ("shared", "shared", "shared memory"),
    ("anonymous", "outside malloc", "memory"),
    ("resident", "native", "native memory"),
)
_ON_DEVICE = {"device", "reserved", "driver"}
_SMALL = 1 << 20
"""Bytes an epoch of plain numbers that are no leak."""
_LEAST_PAUSE_S = 0.25
_MOST_LEFT = 0.4
"""Of what grew, where it was garbage: something comes up between two collections."""
_KINDS_NAMED = 3
_METRICS = 10_000
"""Of them a second: ten for each step of a millisecond."""


def build_report(
    watch: Watch, *, warmup: int | None, tolerance: int, limit: int | None
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
    is_on = gc.isenabled()
    with collector_paused():
        counters, left_out = _judge(watch, warmup=warmup, tolerance=tolerance)
        is_leaking = overall(counters)[0] == LEAKING
        collected = (
            _left_after_collecting(watch, counters) if is_on and is_leaking else {}
        )
    finding = _find_causes(watch, counters, tolerance, collected)
    verdict, notes = finding.verdict, [*finding.notes, *left_out]
    bound, bound_from = _limit(watch, limit)
    rates = [
        c.trend.per_epoch for c in counters if c.trend.rising and c.unit == "bytes"
    ]
    left = None
    if verdict == LEAKING and bound is not None:
        left = epochs_until(bound - watch.used_bytes(), max(rates, default=0))
    if limit is not None and watch.used_bytes() > limit:
        verdict, left = LEAKING, 0
        notes.append("the limit that was set has been passed")
    seconds = time.monotonic() - watch.begun
    return LeakReport(
        verdict, watch.epoch, seconds, str(watch.device), counters, finding.growths,
        _recorded_sites(watch) if verdict == LEAKING else (), notes=tuple(notes),
        more_epochs=finding.more_epochs, limit_bytes=bound, limit_from=bound_from,
        epochs_left=left,
    )  # fmt: skip


@dataclass(frozen=True)
class _Finding:
    """A verdict with what grew."""

    verdict: str
    more_epochs: int = 0
    growths: tuple[Growth, ...] = ()
    notes: tuple[str, ...] = ()


def _find_causes(
    watch: Watch, counters: tuple[CounterTrend, ...], tolerance: int,
    collected: Mapping[str, _Collected],
) -> _Finding:  # fmt: skip
    """Look who holds what grew; some growth turns out to be no leak then."""
    verdict, more = overall(counters)
    if verdict != LEAKING:
        return _Finding(verdict, more)
    growths = _growths(watch, counters)
    if _is_garbage(counters, collected):
        # Beneath much garbage there may be a leak: then more is left than nobody minds,
        # and somebody holds it.  A holder alone proves nothing: something else grew
        # once meanwhile, and is named for want of anything larger.
        held = list(filter(_is_held, growths))
        is_held = bool(held) and explains(held, _host_rate(counters))
        if not (is_held and _exceeds_floors(collected, tolerance)):
            note = "what had grown was garbage, and is collected now"
            return _Finding(STEADY, notes=(note,))
    verdict, more, notes = _acquit_bounded_or_small(watch, counters, growths)
    if verdict == LEAKING:
        growths = list(map(_not_small, growths))
    if not growths and watch.census() is None:
        notes.append("objects were not counted in time: more epochs tell who holds it")
    return _Finding(verdict, more, tuple(growths), tuple(notes))


def _judge(
    watch: Watch, *, warmup: int | None, tolerance: int
) -> tuple[tuple[CounterTrend, ...], list[str]]:
    """Judge the counters, without files in /dev/shm that another process makes.

    Returns:
        The counters, and notes on what was left out of them.
    """
    shared_files = watch.shared_files

    def trend_of(kind_series: Series) -> Trend:
        kind_only = {"shm_files": kind_series}
        (counter,) = judge(kind_only, tolerance=tolerance, warmup=warmup)
        return counter.trend

    def trends_of_kinds() -> dict[str, Trend]:
        by_kind = shared_files.series_by_kind()
        return {kind: trend_of(series) for kind, series in by_kind.items()}

    series = watch.series()

    def judged() -> tuple[CounterTrend, ...]:
        return judge(
            series, tolerance=tolerance, warmup=warmup,
            starting_until=watch.starting_until,
        )  # fmt: skip

    counters = judged()
    if any(trend.verdict != STEADY for trend in trends_of_kinds().values()):
        pause = min(max(4 * watch.seconds_per_epoch(), _LEAST_PAUSE_S), 1.0)
        shared_files.wait_for_others(pause)
        # What another process leaves there once may hide what this one leaves each
        # epoch.  So where a kind leaks, the others are not counted.
        leaking = [kind for kind, trend in trends_of_kinds().items() if trend.rising]
        series["shm_files"] = shared_files.series(leaking or None)
        counters = judged()

    notes = []
    foreign = sorted(shared_files.foreign_kinds_seen())
    if foreign:
        names = ", ".join(foreign[:_KINDS_NAMED])
        if len(foreign) > _KINDS_NAMED:
            names += f" and {len(foreign) - _KINDS_NAMED} more kinds"
        notes.append(f"files {names} are made by another process: left out")
    for name, count in read_too_seldom(series).items():
        if not name.startswith(WORKER):
            notes.append(
                f"{name} was read after {count} of {watch.epoch} epochs only: too "
                "seldom to be judged"
            )
    return counters, notes


def _growths(watch: Watch, counters: Sequence[CounterTrend]) -> list[Growth]:
    """Name what grew: objects, then resources, workers and what is left over."""
    leaking = {each.name: each.trend for each in counters if each.trend.rising}
    objects: list[Growth] = []
    census = watch.census()
    if census is not None and not all(name.startswith(WORKER) for name in leaking):
        rate = _host_rate(counters)
        handlers = count_outside().exit_handlers - watch.outside_counts.exit_handlers
        objects = find_growth(
            census, watch.epoch, ignore=watch.own_objects(), rate=rate,
            more_exit_handlers=handlers / watch.epoch,
        )  # fmt: skip
        is_off = not gc.isenabled()
        if is_off and _is_garbage(counters, _left_after_collecting(watch, counters)):
            objects = list(map(_as_cycles, objects))
    found = _resources(leaking, objects, watch.files)
    found += [
        each for each in objects if each.pattern not in {f.pattern for f in found}
    ]
    if "shm_files" in leaking:
        found.append(watch.shared_files.growth(leaking["shm_files"].per_epoch))
    found += [_worker(n, t) for n, t in leaking.items() if n.startswith(WORKER)]
    # Of memory that did not come from malloc it is certain without a census.
    counted = census is not None or not {"malloc", "python_blocks"} & set(leaking)
    if counted and not _explained(leaking, found):
        found += _left_over(leaking)
    return [_if_frozen(watch, each) for each in found[:5]]


def _if_frozen(watch: Watch, growth: Growth) -> Growth:
    """Say so where what is held cannot be seen because gc.freeze() hides it."""
    more = count_outside().frozen_objects - watch.outside_counts.frozen_objects
    hidden = growth.pattern in {"native", "unknown holder", "outside malloc"}
    if hidden and more >= watch.epoch:
        return replace(growth, pattern="frozen")
    return growth


def _recorded_sites(watch: Watch) -> tuple[Site, ...]:
    """Name who asked for what stays on the device, if somebody records that anyway."""
    census = watch.census()
    if census is None or not census.blocks:
        return ()
    blocks = [census.blocks, watch.recorded_blocks()]
    return device_sites(blocks, watch.device, epochs=watch.epoch - census.epoch)


def _host_rate(counters: Sequence[CounterTrend]) -> float:
    """Give how fast memory of the host grows: by malloc, which is exact, if it does."""
    rates = [
        each.trend.per_epoch
        for each in counters
        if each.trend.rising and each.name in _HOST[:2]
    ]
    return min(rates, default=0.0)


def _resources(
    leaking: Mapping[str, Trend], objects: list[Growth], files: Counter[str]
) -> list[Growth]:
    """Name files, threads and their like, and who keeps them if an object does."""
    found: list[Growth] = []
    for name in RESOURCES:
        if name not in leaking or (name == "mappings" and (objects or found)):
            continue
        before: Counter[str] = files if name == "files" else Counter()
        growth = resource_growth(name, leaking[name].per_epoch, before)
        keeper = [each.holder for each in objects if each.pattern == growth.pattern]
        found.append(replace(growth, holder=keeper[0] if keeper else None))
    return found


def _as_cycles(growth: Growth) -> Growth:
    """Call it cycles where no variable leads to it, and collecting has freed it."""
    if growth.holder is not None and growth.holder.held:
        return growth
    return replace(growth, pattern="cycles", what="a cycle", holder=None)


def _worker(name: str, trend: Trend) -> Growth:
    what = f"child process {name.removeprefix(WORKER)}"
    words = worker_words(int(name.removeprefix(WORKER)))
    return Growth("worker", f"{what} ({words})", "", 0, round(trend.per_epoch))


def _explained(leaking: Mapping[str, Trend], found: Sequence[Growth]) -> bool:
    """Tell whether what was named makes up a tenth of the growth, or is no memory."""
    if any(each.pattern in {*RESOURCES, "worker", "shm"} for each in found):
        return True
    names = [name for name in ("malloc", "anonymous", "shared") if name in leaking]
    return bool(names) and explains(found, leaking[names[0]].per_epoch)


def _left_over(leaking: Mapping[str, Trend]) -> list[Growth]:
    """Name memory without Python objects, by the first counters that see it.

    On a device that may be two: tensors, and what the driver holds beside them.
    """
    rates = {name: trend.per_epoch for name, trend in leaking.items()}
    secondary = effects(rates)
    seen = [
        Growth(pattern, what, "", 0, round(rates[name]))
        for name, pattern, what in _LEFT_OVER
        if name in rates and name not in secondary
    ]
    on_device = [each for each in seen if each.pattern in _ON_DEVICE]
    return on_device or seen[:1]


class _Collected(NamedTuple):
    """What collecting garbage left of the growth of a counter."""

    grown: float
    """How much it had grown."""
    left: float
    """How much of that is there still."""
    epochs: float
    """In how many epochs."""


_FEWEST_SINCE = 4
"""Epochs since the first collection from which on they alone are looked at; chosen
between one reading, which noise decides, and the fewest of a judged run."""


def _left_after_collecting(
    watch: Watch, counters: Sequence[CounterTrend]
) -> dict[str, _Collected]:
    """Collect garbage, and tell what is left of what had grown on the host.

    The first census has collected what there was by then, from before the run and
    from its first epochs, which nobody can tell apart: so only what grew after it shows
    whether the growth is garbage.

    Returns:
        For each counter of the host that rises.
    """
    rising = {each.name: each for each in counters if each.trend.rising}
    of_host = [name for name in _HOST if name in rising]
    if len(of_host) > 1 and "anonymous" in of_host:
        of_host.remove("anonymous")  # pages stay with malloc
    series, before = watch.series(), watch.quick()
    gc.collect()
    now = watch.quick()
    since = watch.collected_epoch
    found = {}
    for name in of_host:
        counter = rising[name]
        grown, epochs = counter.growth, counter.judged_epochs
        if since is not None and _FEWEST_SINCE <= watch.epoch - since < epochs:
            readings = dict(zip(*series[name], strict=True))
            grown = readings[watch.epoch] - readings[since]
            epochs = watch.epoch - since
        # not what is there now: judging has taken memory, too
        found[name] = _Collected(grown, grown - (before[name] - now[name]), epochs)
    return found


def _is_garbage(
    counters: Sequence[CounterTrend], collected: Mapping[str, _Collected]
) -> bool:
    """Tell whether collecting has freed most of everything that grew."""
    rising = [each for each in counters if each.trend.rising]
    if not collected or any(each.name not in _HOST for each in rising):
        return False
    return all(each.left <= _MOST_LEFT * each.grown for each in collected.values())


def _exceeds_floors(collected: Mapping[str, _Collected], tolerance: int) -> bool:
    """Tell whether what is left would count as a leak by itself."""
    return any(
        each.left > floor_of(name, tolerance) * each.epochs
        for name, each in collected.items()
    )


def _is_held(growth: Growth) -> bool:
    """Tell whether something that Python can reach keeps it."""
    return growth.holder is not None and growth.holder.held


def _not_small(growth: Growth) -> Growth:
    many = growth.pattern == "numbers"
    return replace(growth, pattern="many numbers") if many else growth


def _acquit_bounded_or_small(
    watch: Watch, counters: Sequence[CounterTrend], growths: list[Growth]
) -> tuple[str, int, list[str]]:
    """Ask whether what grew has a bound, or is a training's history of numbers."""
    names = {each.name for each in counters if each.trend.rising}
    main = growths[0] if growths else None
    if main is None or not names.issubset(_HOST):
        return LEAKING, 0, []
    if main.epochs_left is not None and main.holder is not None:
        note = f"{main.what} `{main.holder.path}` has a bound, which it nears"
        return NEEDS_MORE, main.epochs_left + LEAST, [note]
    small = sum(each.bytes_per_epoch for each in growths) < _SMALL
    small &= sum(e.per_epoch for e in growths) <= _METRICS * watch.seconds_per_epoch()
    if small and all(each.pattern == "numbers" for each in growths):
        return STEADY, 0, [str(main)]
    return LEAKING, 0, []


def _limit(watch: Watch, limit: int | None) -> tuple[int | None, str]:
    if limit is not None:
        return limit, "the limit that was set"
    if watch.last("allocated") is not None:
        values, _ = read_device(watch.device)
        return values.get("device_limit"), "memory of the device"
    host = read_host()
    used = watch.used_bytes()
    bound = host.available_bytes + round(used)
    return bound, f"free on {host.available_from}, and used"
