"""``WatchedRun``: readings of a run, its report, and what of it was told.

A run that was begun is judged, or it is said that it was not.  Where its owner asks for
the verdict (the end of a loop, of a block, ``finish()``), a leak can be raised.  Where
a loop is left early, Python closes its generator, and drops what is raised there: so a
warning is given.  Where nobody ever asks, :meth:`WatchedRun.end_unasked` warns when
the detector is gone, or the process ends.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.errors import LeakError, LeakWarning, NotJudgedWarning, OptionError
from loaderkit.leaks.investigate import build_report
from loaderkit.leaks.noise import FEWEST_READINGS
from loaderkit.leaks.trace import allocation_sites
from loaderkit.leaks.trend import FEWEST_EPOCHS, NEEDS_MORE, STEADY
from loaderkit.leaks.verdict import judge_counters, overall
from loaderkit.leaks.watch import EpochRecorder
from loaderkit.units import count_of, format_amount, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Literal

    import torch

    from loaderkit.leaks.counter_trend import CounterTrend
    from loaderkit.leaks.report import LeakReport

    OnLeak = Literal["raise", "warn"] | Callable[[LeakReport], object]

JUDGED_AFTER = 30
"""Epochs after which a longer run is judged while it runs."""
_CHECK_GROWTH = 1.2
"""A long run is judged again when it is so much longer; that takes some 20 ms."""
_NOT_TOLD = -1


@dataclass(frozen=True)
class RunSettings:
    """How a run is judged, and what comes of a leak."""

    device: torch.device
    """Watched beside the host."""
    warmup: int | None
    """Epochs to leave out at the start; found from the readings if None."""
    limit: int | None
    """Bytes that may be used; what is free if None, for the forecast only."""
    tolerance: int
    """Bytes an epoch that do not count."""
    on_leak: OnLeak
    """What is done with the report of a leak."""
    every: int | None
    """Steps that make an epoch."""
    is_judged_by_owner: bool = False
    """Its owner asks for the verdict however the loop ends, as the end of a test does:
    then nothing needs to be told before."""


class Undecided(NamedTuple):
    """Why a run could not be judged, and what to do."""

    message: str
    why: str
    fix: str
    needed_epochs: int = FEWEST_EPOCHS
    """With which it could probably be judged."""

    def __str__(self) -> str:
        return f"{self.message}\n  why: {self.why}\n  fix: {self.fix}"


class WatchedRun:
    """A run that is watched: the part of a detector that outlives it.

    Args:
        settings: How it is judged.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.steps = 0
        """That were counted one by one."""
        self.recorder = EpochRecorder(settings.device, settings.tolerance)
        self._pid = os.getpid()
        self._open_blocks = 0
        """``with`` blocks around it, whose end asks for the verdict."""
        self._was_leak_told = False
        """A leak is told once a loop, however long that goes on."""
        self._told_epoch = _NOT_TOLD
        """The last epoch of which the verdict was asked for, or told."""
        self._next_check = JUDGED_AFTER
        self._report: LeakReport | None = None

    @property
    def epoch(self) -> int:
        """How many epochs have ended."""
        return self.recorder.epoch

    @property
    def last_report(self) -> LeakReport | None:
        """The report, if it has all epochs that have ended."""
        report = self._report
        return report if report is not None and report.epochs == self.epoch else None

    def start(self) -> None:
        """Take the reading before the first epoch.

        Raises:
            OptionError: More memory is used already than the limit allows.
        """
        self.recorder.start()
        limit, used = self.settings.limit, round(self.recorder.used_bytes())
        if limit is not None and used > limit:
            message = f"limit={format_bytes(limit)} is less than is used already."
            why = f"{format_bytes(used)} are in use before the first epoch"
            raise OptionError(message, why=why, fix=f"limit={_limit_above(used)!r}")

    def begin_loop(self) -> None:
        """Note that a loop begins: of a notebook's cell that is run again, perhaps."""
        self._was_leak_told = False

    def count_step(self) -> bool:
        """Count a step; tell whether an epoch ends with it."""
        self.steps += 1
        every = self.settings.every
        return every is not None and self.steps % every == 0

    def end_epoch(self, *, stacklevel: int) -> None:
        """Take the reading after an epoch, and judge where that is due.

        Args:
            stacklevel: Of a warning, as the caller would give it.

        Raises:
            LeakError: Memory grows, and ``on_leak`` is "raise".
        """
        __tracebackhide__ = True
        # What we make must not start the collector: what it then frees of the user's
        # would go between two of our readings, and not be known as garbage.
        with self.recorder.collector_paused():
            report = self._report_if_due()
        if report is not None:
            self._tell_leak(report, stacklevel=stacklevel + 1)

    def ask(self) -> LeakReport:
        """Judge what was read so far, for somebody who looks at the report."""
        self._told_epoch = self.epoch
        return self._judge()

    def finish(self, *, stacklevel: int) -> LeakReport:
        """Judge the run at its end, and tell what came of it.

        Args:
            stacklevel: Of a warning, as the caller would give it.

        Raises:
            LeakError: Memory grows, and ``on_leak`` is "raise".
        """
        __tracebackhide__ = True
        has_told_all = self._told_epoch == self.epoch
        report = self.ask()
        if not report.ok:
            self._tell_leak(report, stacklevel=stacklevel + 1)
        elif not has_told_all and not self.settings.is_judged_by_owner:
            self._tell_undecided(report, stacklevel=stacklevel + 1)
        return report

    def trace(self, function: Callable[[], Any]) -> None:
        """If it leaks, add the lines whose allocations stay to the report."""
        report = self._judge()
        if report.leaking:
            sites = allocation_sites(function, device=self.recorder.device)
            self._report = replace(report, sites=sites)

    # Loops and blocks that end early, and detectors that nobody asks.

    def enter_block(self) -> None:
        """Note that the end of a block will ask for the verdict."""
        self._open_blocks += 1

    def leave_block(self) -> None:
        """Note that it has ended."""
        self._open_blocks -= 1

    def leave_early(self, reason: str, *, stacklevel: int) -> None:
        """Judge a run whose loop was left, where nothing can be raised.

        Args:
            reason: Why a leak is told by a warning.
            stacklevel: Of a warning, as the caller would give it.
        """
        is_told_elsewhere = (
            self._open_blocks > 0
            or self.settings.is_judged_by_owner
            or self._told_epoch == self.epoch
            or self._was_leak_told
        )
        # At the end of the process modules are taken apart already, and
        # ``end_unasked`` has spoken; a child process has a copy of its parent's run.
        if is_told_elsewhere or sys.is_finalizing() or os.getpid() != self._pid:
            return
        report = self.ask()
        if report.ok:
            self._tell_undecided(report, stacklevel=stacklevel + 1)
        elif self.settings.on_leak == "raise":
            # A later finish() raises: this is no place where a leak was raised.
            text = f"{report}\n{reason}"
            warnings.warn(text, LeakWarning, stacklevel=stacklevel + 1)
        else:
            self._tell_leak(report, stacklevel=stacklevel + 1)

    def end_unasked(self) -> None:
        """Say what is known, when the detector is gone and nobody asked it.

        Who holds what grew is not looked for: it may be gone as well.
        """
        is_known = self._told_epoch == self.epoch or self._was_leak_told
        if is_known or self.settings.is_judged_by_owner or os.getpid() != self._pid:
            return
        counters = self._judge_counters()
        verdict, _ = overall(counters)
        if verdict == STEADY:
            return
        epochs = count_of(self.epoch, "epochs")
        message = f"A LeakDetector watched {epochs}, and nobody asked for its verdict."
        grown = [counter for counter in counters if counter.trend.rising]
        if grown:
            rate = format_amount(grown[0].trend.per_epoch, grown[0].unit)
            message += f" It saw {rate} more after each, {grown[0].words}."
        why = (
            "it is told at the end of a loop over epochs(), of a block, or by finish()"
        )
        fix = "with LeakDetector() as detector: ..., or detector.finish() at the end"
        warnings.warn(str(Undecided(message, why, fix)), NotJudgedWarning, stacklevel=3)

    # One by one.

    def _judge(self) -> LeakReport:
        if self.last_report is None:
            watch, settings = self.recorder, self.settings
            # Paused first: a collection just before the first reading of what judging
            # takes would hide that what had grown was garbage.
            with watch.collector_paused(), watch.own_memory():
                self._report = build_report(
                    watch,
                    warmup=settings.warmup,
                    tolerance=settings.tolerance,
                    limit=settings.limit,
                )
                has_leak = any(
                    counter.trend.rising for counter in self._report.counters
                )
                if has_leak and watch.collects_by_itself:
                    # The search for holders leaves cycles.  Freed later they would be
                    # taken for garbage of the user's.
                    gc.collect()
        assert self._report is not None
        return self._report

    def _report_if_due(self) -> LeakReport | None:
        """Take an epoch's reading; give a report where there is a leak to tell."""
        watch = self.recorder
        watch.end_epoch()
        if self._was_leak_told:
            return None
        is_due = watch.epoch >= self._next_check
        if is_due:
            longer = round(watch.epoch * _CHECK_GROWTH)
            self._next_check = max(watch.epoch + 1, longer)
        # A glance, then a verdict without holders, and only then the whole report.
        is_suspected = is_due and watch.might_leak() and self._is_suspected()
        if not (is_suspected or self._is_over_limit()):
            return None
        report = self._judge()
        return None if report.ok else report

    def _is_suspected(self) -> bool:
        watch = self.recorder
        # What it keeps is subtracted: the first verdict loads modules.
        with watch.collector_paused(), watch.own_memory():
            counters = self._judge_counters()
        return any(counter.trend.rising for counter in counters)

    def _judge_counters(self) -> tuple[CounterTrend, ...]:
        """Judge the readings alone, without what was seen besides."""
        return judge_counters(
            self.recorder.series(),
            tolerance=self.settings.tolerance,
            warmup=self.settings.warmup,
        )

    def _is_over_limit(self) -> bool:
        limit = self.settings.limit
        return limit is not None and self.recorder.used_bytes() > limit

    def _tell_leak(self, report: LeakReport, *, stacklevel: int) -> None:
        """Raise, warn or call, once a run."""
        __tracebackhide__ = True
        if self._was_leak_told:
            return
        self._was_leak_told = True
        on_leak = self.settings.on_leak
        if on_leak == "warn":
            warnings.warn(str(report), LeakWarning, stacklevel=stacklevel + 1)
        elif callable(on_leak):
            on_leak(report)
        else:
            error = LeakError(str(report))
            error.report = report
            raise error

    def _tell_undecided(self, report: LeakReport, *, stacklevel: int) -> None:
        undecided = why_undecided(report, steps=self.steps, every=self.settings.every)
        if undecided is not None:
            text = str(undecided)
            warnings.warn(text, NotJudgedWarning, stacklevel=stacklevel + 1)


def why_undecided(
    report: LeakReport, *, steps: int = 0, every: int | None = None
) -> Undecided | None:
    """Say why a run could not be judged.

    Args:
        report: Of the run.
        steps: That were counted one by one.
        every: Steps that make an epoch.

    Returns:
        None where it was: it leaks, or is steady.
    """
    if report.verdict != NEEDS_MORE:
        return None
    if report.epochs == 0 and every is not None:
        message = f"No epoch has ended: {count_of(steps, 'steps')} were counted."
        why = f"every={every} steps make an epoch"
        return Undecided(message, why, f"every={max(1, steps // FEWEST_EPOCHS)}")
    if report.epochs == 0:
        message = "No epoch has ended, so nothing was looked at."
        why = "memory is read where epochs begin and end"
        fix = "for epoch in detector.epochs(range(100)), or end_epoch() after each"
        return Undecided(message, why, fix)
    needed = max(FEWEST_EPOCHS, report.epochs + report.more_epochs)
    if is_too_short(report):
        verb = "is" if report.epochs == 1 else "are"
        epochs = f"{count_of(report.epochs, 'epochs')} {verb}"
        message = f"Whether memory grows is not known: {epochs} too few to tell."
        why = "the first are warm-up, and growth must go on behind them"
        fix = f"at least {needed} epochs, or LeakDetector(every=100) and its step()"
        return Undecided(message, why, fix, needed)
    message = f"{report.headline[0].upper()}{report.headline[1:]}."
    return Undecided(message, _why_undecided(report), f"{needed} epochs", needed)


def _why_undecided(report: LeakReport) -> str:
    """Give the reason of the counter that needs most, else of the whole run."""
    undecided = [
        counter.trend
        for counter in report.counters
        if counter.trend.verdict == NEEDS_MORE
    ]
    if report.notes or not undecided:
        return "; ".join(report.notes)
    return max(undecided, key=lambda trend: trend.more_epochs).why


def is_too_short(report: LeakReport) -> bool:
    """Tell whether a run has too few epochs for any verdict."""
    return all(counter.judged_readings < FEWEST_READINGS for counter in report.counters)


def _limit_above(used_bytes: int) -> str:
    """Give a limit that leaves room: the next power of two in MiB, twice as much."""
    mebibytes = 1
    while (mebibytes << 20) < 2 * used_bytes:
        mebibytes *= 2
    return f"{mebibytes} MiB" if mebibytes < 1024 else f"{mebibytes // 1024} GiB"
