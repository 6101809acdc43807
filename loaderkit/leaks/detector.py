"""``LeakDetector``: watches a training loop, epoch by epoch."""

from __future__ import annotations

import functools
import gc
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from loaderkit.answers import answer_wrong_names
from loaderkit.arguments import (
    check_callable,
    check_choice,
    check_integer,
    check_takes_nothing,
    kind_of,
    show_value,
    suggest_keywords,
)
from loaderkit.errors import LeakError, LeakWarning, NotStartedError, OptionError
from loaderkit.leaks.counter_trend import TOLERANCE
from loaderkit.leaks.investigate import build_report
from loaderkit.leaks.trace import allocation_sites
from loaderkit.leaks.verdict import judge_counters
from loaderkit.leaks.watch import EpochRecorder
from loaderkit.memory.counters import is_judged, unit_of, words_of
from loaderkit.memory.reading import present_device_of
from loaderkit.notebook import card
from loaderkit.operations import refuse_new_attributes
from loaderkit.units import count_of, format_amount, format_bytes, size_in_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from typing_extensions import Self

    from loaderkit.leaks.report import LeakReport

    OnLeak = Literal["raise", "warn"] | Callable[[LeakReport], object]

T = TypeVar("T")
P = ParamSpec("P")
JUDGED_AFTER = 30
"""Epochs after which a longer run is judged while it runs."""
_CHECK_GROWTH = 1.2
"""A long run is judged again when it is so much longer; that takes some 20 ms."""


@answer_wrong_names()
@refuse_new_attributes
class LeakDetector:
    """Tells whether memory grows from epoch to epoch, and who holds it.

    Around a loop over epochs::

        for epoch in LeakDetector("cuda").epochs(range(100)):
            train(epoch)

    as a block with ``step()``, where ``every`` steps make an epoch; as a decorator of
    the function that trains one epoch; or ``run(train_one_epoch, epochs=30)``.

    A run is judged when it ends, and from its 30th epoch on whenever it is a fifth
    longer: what fills up slowly and then stays must have the time to.

    Args:
        device: Watched beside the host, such as "cuda:1"; it must be here.  None
            takes the first kind that is.  Of several devices of a kind, one is watched:
            "cuda" is the one that is current when the first epoch begins.
        warmup: Epochs to leave out at the start; "auto" finds them.
        limit: Memory that may be used, such as "8 GiB"; passing it counts as a leak.
            What is free now if None, for the forecast only.
        on_leak: "raise" a :class:`LeakError`, "warn" with a :class:`LeakWarning`, or
            a function that is given the :class:`LeakReport`.
        every: Steps that make an epoch, for :meth:`step`.
        tolerance: Bytes an epoch that do not count as a leak.

    Raises:
        OptionError: The device is not here.
        ValueError: An argument is none of these.
    """

    @suggest_keywords
    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        warmup: int | Literal["auto"] = "auto",
        limit: int | str | None = None,
        on_leak: OnLeak = "raise",
        every: int | None = None,
        tolerance: int | str = TOLERANCE,
    ) -> None:
        if not callable(on_leak):
            check_choice("on_leak", on_leak, ("raise", "warn"), "a function")
        if every is not None:
            check_integer("every", every, least=1)
        self.device = present_device_of(device)
        self.warmup = _warmup_epochs(warmup)
        self.limit = None if limit is None else size_in_bytes("limit", limit)
        self.on_leak = on_leak
        self.every = every
        self.tolerance = size_in_bytes("tolerance", tolerance)
        self.steps = 0
        self._watch: EpochRecorder | None = None
        self._has_reported = False
        """A leak is told once, however long the run goes on."""
        self._next_check = JUDGED_AFTER
        self._report: LeakReport | None = None

    def __repr__(self) -> str:
        watched = "not started"
        if self._watch is not None:
            watched = count_of(self._watch.epoch, "epochs")
        return f"LeakDetector(device {self.device}, {watched})"

    def _repr_html_(self) -> str:
        """Show what was read so far; nothing is read, and nothing judged, for it."""
        watch = self._watch
        if watch is None:
            note = "`for epoch in detector.epochs(range(30)):` watches a loop"
            return card(
                repr(self),
                heads=("setting", "value"),
                rows=self._settings(),
                notes=[note],
            )
        if self._report is not None and self._report.epochs == watch.epoch:
            return self._report._repr_html_()
        rows = [
            (
                name,
                format_amount(values[0], unit_of(name)),
                format_amount(values[-1], unit_of(name)),
                words_of(name),
            )
            for name, (_, values) in watch.series().items()
            if is_judged(name)
        ]
        return card(
            repr(self),
            heads=("counter", "at first", "at last", "of"),
            rows=rows,
            notes=["not judged yet: `detector.report()` does so now"],
        )

    def _settings(self) -> list[tuple[str, str]]:
        warmup = "auto" if self.warmup is None else str(self.warmup)
        limit = "what is free" if self.limit is None else format_bytes(self.limit)
        on_leak = self.on_leak if isinstance(self.on_leak, str) else "a function"
        settings = [
            ("warmup", warmup),
            ("limit", limit),
            ("on_leak", on_leak),
            ("tolerance", f"{format_bytes(self.tolerance)} an epoch"),
        ]
        if self.every is not None:
            settings.append(("every", count_of(self.every, "steps")))
        return settings

    def epochs(self, iterable: Iterable[T]) -> Iterator[T]:
        """Loop over epochs and watch them.

        Args:
            iterable: Such as ``range(100)``.

        Yields:
            What the iterable gives.

        Raises:
            LeakError: Memory grows, and ``on_leak`` is "raise".
        """
        if not hasattr(iterable, "__iter__"):
            message = f"epochs takes what to loop over, got {show_value(iterable)}."
            why = f"it is {kind_of(iterable)}"
            fix = f"epochs(range({show_value(iterable)}))"
            raise OptionError(message, why=why, fix=fix)
        self.start()
        for item in iterable:
            yield item
            self.end_epoch()
        self.finish()

    def start(self) -> None:
        """Take the first reading; everything else does that by itself."""
        if self._watch is None:
            self._watch = EpochRecorder(self.device, self.tolerance)
            self._watch.start()

    def end_epoch(self) -> None:
        """Say that an epoch has ended, where a trainer owns the loop.

        Raises:
            LeakError: Memory grows, and ``on_leak`` is "raise".
        """
        self.start()
        # What we make must not start the collector: what it then frees of the user's
        # would go between two of our readings, and not be known as garbage.
        with self._started_recorder().collector_paused():
            report = self._report_if_due()
        if report is not None:
            self._raise_or_warn(report)

    def step(self) -> None:
        """Say that a step has ended; ``every`` of them make an epoch.

        Raises:
            LeakError: Memory grows, and ``on_leak`` is "raise".
        """
        if self._watch is None:
            self.start()
        self.steps += 1
        if self.every is not None and self.steps % self.every == 0:
            self.end_epoch()

    def finish(self) -> LeakReport:
        """Judge the run at its end.

        Returns:
            The report.

        Raises:
            LeakError: Memory grows, and ``on_leak`` is "raise".
        """
        report = self.report()
        if not self._has_reported:
            self._raise_or_warn(report)
        return report

    def run(
        self,
        function: Callable[[], Any],
        *,
        epochs: int = JUDGED_AFTER,
        trace: bool = False,
    ) -> LeakReport:
        """Call a function that trains one epoch, again and again.

        Args:
            function: Takes nothing; what it returns is let go.
            epochs: How often.
            trace: If it leaks, call it six times more under tracemalloc and with the
                device's allocation history, and add the lines whose allocations stay
                to the report.

        Returns:
            The report.

        Raises:
            LeakError: Memory grows, and ``on_leak`` is "raise".
        """
        check_callable("function", function, "lambda: train_one_epoch()")
        check_takes_nothing("function", function)
        epochs = check_integer("epochs", epochs, least=0)
        self.start()
        for _ in range(epochs):
            function()
            self.end_epoch()
        report = self.report()
        if trace and report.leaking:
            device = self._started_recorder().device
            sites = allocation_sites(function, device=device)
            self._report = replace(report, sites=sites)
        return self.finish()

    def report(self) -> LeakReport:
        """Judge what was read so far.

        Returns:
            The report; with holders when something leaks, which takes a second.
        """
        self.start()
        watch = self._started_recorder()
        if self._report is None or self._report.epochs < watch.epoch:
            # Paused first: a collection just before the first reading of what judging
            # takes would hide that what had grown was garbage.
            with watch.collector_paused(), watch.own_memory():
                self._report = build_report(
                    watch,
                    warmup=self.warmup,
                    tolerance=self.tolerance,
                    limit=self.limit,
                )
                has_leak = any(
                    counter.trend.rising for counter in self._report.counters
                )
                if has_leak and watch.collects_by_itself:
                    # The search for holders leaves cycles.  Freed later they would be
                    # taken for garbage of the user's.
                    gc.collect()
        return self._report

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: object,
        error: object,
        traceback: object,
    ) -> None:
        if kind is None:
            self.finish()

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Watch a function whose every call is an epoch.

        Args:
            function: Trains one epoch.

        Returns:
            It, watched.

        Raises:
            OptionError: It cannot be called.
        """
        check_callable("function", function, "train_one_epoch")

        @functools.wraps(function)
        def watched(*args: P.args, **kwargs: P.kwargs) -> T:
            self.start()
            result = function(*args, **kwargs)
            self.end_epoch()
            return result

        return watched

    @property
    def has_started(self) -> bool:
        """Whether the first reading was taken."""
        return self._watch is not None

    def _started_recorder(self) -> EpochRecorder:
        if self._watch is None:
            message = "call start() first: the detector does not watch yet."
            why = "epochs are counted from there"
            fix = "detector.start(), or for epoch in detector.epochs(range(10))"
            raise NotStartedError(message, why=why, fix=fix)
        return self._watch

    def _report_if_due(self) -> LeakReport | None:
        """Take an epoch's reading; give a report where there may be a leak to tell."""
        watch = self._started_recorder()
        watch.end_epoch()
        if self._has_reported:
            return None
        is_due = watch.epoch >= self._next_check
        if is_due:
            longer = round(watch.epoch * _CHECK_GROWTH)
            self._next_check = max(watch.epoch + 1, longer)
        # A glance, then a verdict without holders, and only then the whole report.
        is_suspected = is_due and watch.might_leak() and self._is_suspected()
        return self.report() if self._is_over_limit() or is_suspected else None

    def _is_suspected(self) -> bool:
        watch = self._started_recorder()
        # What it keeps is subtracted: the first verdict loads modules.
        with watch.collector_paused(), watch.own_memory():
            counters = judge_counters(
                watch.series(), tolerance=self.tolerance, warmup=self.warmup
            )
        return any(counter.trend.rising for counter in counters)

    def _is_over_limit(self) -> bool:
        if self.limit is None:
            return False
        return self._started_recorder().used_bytes() > self.limit

    def _raise_or_warn(self, report: LeakReport) -> None:
        if report.ok:
            return
        self._has_reported = True
        if self.on_leak == "warn":
            # From here up: end_epoch or finish, and their caller, who sees the line.
            warnings.warn(str(report), LeakWarning, stacklevel=4)
        elif callable(self.on_leak):
            self.on_leak(report)
        else:
            error = LeakError(str(report))
            error.report = report
            raise error


def _warmup_epochs(warmup: object) -> int | None:
    if warmup == "auto":
        return None
    return check_integer("warmup", warmup, least=0)


def check_detector(detector: object) -> None:
    """Refuse what is no detector where one is given.

    Args:
        detector: What a trainer's callback was given; None for a new one.

    Raises:
        OptionError: It is something else, such as a device.
    """
    if detector is None or isinstance(detector, LeakDetector):
        return
    message = f"A callback takes a LeakDetector, got {show_value(detector)}."
    why = f"it is {kind_of(detector)}; the detector has the settings"
    fix = "LeakCallback(LeakDetector())"
    if isinstance(detector, str):
        fix = f"LeakCallback(LeakDetector({detector!r}))"
    raise OptionError(message, why=why, fix=fix)
