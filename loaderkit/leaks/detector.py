"""``LeakDetector``: watches a training loop, epoch by epoch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, TypeVar

from loaderkit.answers import answer_wrong_names
from loaderkit.arguments import check_choice, check_integer, check_truth
from loaderkit.call_keywords import suggest_keywords
from loaderkit.errors import LeakWarning, NotJudgedWarning, OptionError
from loaderkit.function_arguments import check_callable
from loaderkit.habits import ON_LEAK
from loaderkit.leaks.counter_trend import TOLERANCE
from loaderkit.leaks.epoch_functions import (
    check_epoch_function,
    check_has_run,
    refuse_class,
)
from loaderkit.leaks.run import JUDGED_AFTER, RunSettings, WatchedRun
from loaderkit.memory.counters import is_judged, unit_of, words_of
from loaderkit.memory.reading import present_device_of
from loaderkit.notebook import card
from loaderkit.operations import refuse_new_attributes
from loaderkit.units import count_of, format_amount, format_bytes, size_in_bytes
from loaderkit.value_words import kind_of, show_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from typing_extensions import Self

    from loaderkit.leaks.report import LeakReport
    from loaderkit.leaks.run import OnLeak

T = TypeVar("T")
P = ParamSpec("P")
WATCHED_BY = "_loaderkit_detector"
"""Attribute of a watched function: its detector."""
_USER = 3
"""Frames up to the caller of a method, which ``answer_wrong_names`` wraps."""
_LEFT_EARLY = (
    "The loop was left early, where Python drops what is raised. To have a leak raise, "
    "put\nthe loop into `with LeakDetector() as detector:`, or call detector.finish() "
    "after it."
)


@answer_wrong_names()
@refuse_new_attributes
class LeakDetector:
    """Tells whether memory grows from epoch to epoch, and who holds it.

    Around a loop over epochs::

        for epoch in LeakDetector("cuda").epochs(range(100)):
            train(epoch)

    or ``run(train_one_epoch, epochs=30)``. A run is judged when it ends, and from its
    30th epoch on whenever it is a fifth longer: what fills up slowly and then stays
    must have the time to.

    A loop that may be left early (``break``, ``return``) goes into a block, at whose
    end the run is judged as well, and a leak raised::

        with LeakDetector("cuda") as detector:
            for epoch in detector.epochs(range(100)):
                if train(epoch) < 0.01:
                    break

    Without the block Python lets nothing be raised there, and a leak is told by a
    :class:`LeakWarning`. Where a trainer owns the loop: ``end_epoch()`` after each
    epoch, or ``step()`` where ``every`` steps make one, and ``finish()`` at the end; as
    a decorator of the function that trains one epoch it needs a ``finish()``, too.

    A run that could not be judged, or of which nobody asked the verdict, is told by a
    :class:`NotJudgedWarning`.

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
        OptionError: The device is not here, or an argument is none of these.
    """

    _is_judged_by_owner: ClassVar[bool] = False

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
        if callable(on_leak):
            check_callable("on_leak", on_leak, "print", "report")
        else:
            _check_reaction(on_leak)
        if every is not None:
            check_integer("every", every, least=1)
        given: object = device
        if inspect.isroutine(given):
            name = given.__name__
            message = f"A LeakDetector takes a device first, got the function {name}."
            why = "as a decorator it is called before"
            raise OptionError(message, why=why, fix=f"@LeakDetector() above {name}")
        self.device = present_device_of(device)
        self.warmup = _warmup_epochs(warmup)
        self.limit = None if limit is None else _limit_bytes(limit)
        self.on_leak = on_leak
        self.every = every
        self.tolerance = size_in_bytes("tolerance", tolerance)
        self._run: WatchedRun | None = None

    def __repr__(self) -> str:
        watched = "not started"
        if self._run is not None:
            watched = count_of(self._run.epoch, "epochs")
        return f"LeakDetector(device {self.device}, {watched})"

    def _repr_html_(self) -> str:
        """Show what was read so far; nothing is read, and nothing judged, for it."""
        run = self._run
        if run is None:
            note = "`for epoch in detector.epochs(range(30)):` watches a loop"
            return card(
                repr(self),
                heads=("setting", "value"),
                rows=self._settings(),
                notes=[note],
            )
        if run.last_report is not None:
            return run.last_report._repr_html_()
        rows = [
            (
                name,
                format_amount(values[0], unit_of(name)),
                format_amount(values[-1], unit_of(name)),
                words_of(name),
            )
            for name, (_, values) in run.recorder.series().items()
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

        A loop that is left early is judged too, but nothing can be raised there: a leak
        is told by a :class:`LeakWarning`, unless a block ``with detector:`` is around
        the loop, which raises.

        Args:
            iterable: Such as ``range(100)``.

        Returns:
            An iterator over what the iterable gives.

        Raises:
            LeakError: Memory grows, and ``on_leak`` is "raise".
            OptionError: It cannot be looped over, or is a text.
        """
        # Here and not in the generator, whose code runs when it is looped over.
        _check_epochs(iterable)
        return self._watched_epochs(iterable)

    def _watched_epochs(self, iterable: Iterable[T]) -> Iterator[T]:
        # pytest shows no frames that set this: a leak is at the user's line.
        __tracebackhide__ = True
        run = self._started_run()
        run.begin_loop()
        try:
            for item in iterable:
                yield item
                run.end_epoch(stacklevel=2)
        except GeneratorExit:
            run.leave_early(_LEFT_EARLY, stacklevel=2)
            raise
        run.finish(stacklevel=2)

    def start(self) -> None:
        """Take the first reading; everything else does that by itself.

        Raises:
            OptionError: More memory is used already than the limit allows.
        """
        self._started_run()

    def end_epoch(self) -> None:
        """Say that an epoch has ended, where a trainer owns the loop.

        Raises:
            LeakError: Memory grows, and ``on_leak`` is "raise".
        """
        __tracebackhide__ = True
        self._started_run().end_epoch(stacklevel=_USER)

    def step(self) -> None:
        """Say that a step has ended; ``every`` of them make an epoch.

        Raises:
            LeakError: Memory grows, and ``on_leak`` is "raise".
            OptionError: The detector was not given ``every``.
        """
        __tracebackhide__ = True
        if self.every is None:
            message = "step() counts steps, and this detector was not told how many"
            raise OptionError(
                f"{message} make an epoch.",
                why="memory is read where epochs end",
                fix="LeakDetector(every=100), or end_epoch() after each epoch",
            )
        run = self._started_run()
        if run.count_step():
            run.end_epoch(stacklevel=_USER)

    @property
    def steps(self) -> int:
        """How many steps were counted."""
        return 0 if self._run is None else self._run.steps

    def finish(self) -> LeakReport:
        """Judge the run at its end.

        Returns:
            The report.

        Raises:
            LeakError: Memory grows, and ``on_leak`` is "raise".
        """
        __tracebackhide__ = True
        return self._started_run().finish(stacklevel=_USER)

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
            OptionError: It is no such function, or its call runs none of its code.
        """
        __tracebackhide__ = True
        check_epoch_function("function", function)
        check_integer("epochs", epochs, least=1)
        check_truth("trace", trace)
        run = self._started_run()
        run.enter_block()
        try:
            for _ in range(epochs):
                check_has_run(function())
                run.end_epoch(stacklevel=_USER)
            if trace:
                run.trace(function)
        except BaseException:
            run.leave_block()
            _tell_beside_an_error(run, stacklevel=_USER)
            raise
        run.leave_block()
        return run.finish(stacklevel=_USER)

    def report(self) -> LeakReport:
        """Judge what was read so far.

        Returns:
            The report; with holders when something leaks, which takes a second.
        """
        return self._started_run().ask()

    def __enter__(self) -> Self:
        self._started_run().enter_block()
        return self

    def __exit__(
        self,
        kind: object,
        error: object,
        traceback: object,
    ) -> None:
        __tracebackhide__ = True
        run = self._started_run()
        run.leave_block()
        if kind is None:
            run.finish(stacklevel=2)
        else:
            _tell_beside_an_error(run, stacklevel=2)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Watch a function whose every call is an epoch; ``finish()`` judges.

        Args:
            function: Trains one epoch.

        Returns:
            It, watched.

        Raises:
            OptionError: It cannot be called, is a class, or a call of it runs none of
                its code.
        """
        check_callable("function", function, "train_one_epoch")
        if isinstance(function, type):
            refuse_class(function)

        @functools.wraps(function)
        def watched(*args: P.args, **kwargs: P.kwargs) -> T:
            __tracebackhide__ = True
            run = self._started_run()
            result = function(*args, **kwargs)
            check_has_run(result)
            run.end_epoch(stacklevel=2)
            return result

        # A test is called once, and nobody would ask for its verdict: the plugin for
        # pytest knows it by this.
        setattr(watched, WATCHED_BY, self)
        return watched

    @property
    def has_started(self) -> bool:
        """Whether the first reading was taken."""
        return self._run is not None

    def _started_run(self) -> WatchedRun:
        """Take the first reading, unless it was taken."""
        if self._run is None:
            settings = RunSettings(
                device=self.device,
                warmup=self.warmup,
                limit=self.limit,
                tolerance=self.tolerance,
                on_leak=self.on_leak,
                every=self.every,
                is_judged_by_owner=self._is_judged_by_owner,
            )
            run = WatchedRun(settings)
            run.start()
            self._run = run
            # Also called when the process ends, by its exit handlers: variables of
            # modules, and ``warnings``, are still there then.
            weakref.finalize(self, run.end_unasked)
        return self._run


class DetectorOfTest(LeakDetector):
    """One that a test takes, and that is judged where the test ends."""

    _is_judged_by_owner = True


def _tell_beside_an_error(run: WatchedRun, *, stacklevel: int) -> None:
    """Judge a run that an error of the user's has ended, which must reach the user."""
    # They are raised where warnings are errors.
    with contextlib.suppress(LeakWarning, NotJudgedWarning):
        run.leave_early(
            "An error has ended the run, and reaches you; the leak is told beside it.",
            stacklevel=stacklevel + 1,
        )


def _limit_bytes(limit: int | str) -> int:
    limit_bytes = size_in_bytes("limit", limit)
    if limit_bytes == 0:
        message = "limit must be a size above 0, got 0."
        why = "any process uses more"
        raise OptionError(message, why=why, fix="limit='8 GiB'")
    return limit_bytes


def _check_reaction(on_leak: object) -> None:
    """Refuse what says nothing of what to do about a leak, with what was meant.

    Raises:
        OptionError: It is neither "raise" nor "warn".
    """
    meant = ON_LEAK.get(str(on_leak).lower())
    if meant is None or on_leak == "warn":
        check_choice("on_leak", on_leak, ("raise", "warn"), "a function")
        return
    message = (
        f"on_leak must be 'raise', 'warn' or a function, got {show_value(on_leak)}."
    )
    raise OptionError(message, why="it is none of them", fix=f"on_leak={meant}")


def _warmup_epochs(warmup: object) -> int | None:
    if isinstance(warmup, str):
        check_choice("warmup", warmup, ("auto",), "a number of epochs")
        return None
    return check_integer("warmup", warmup, least=0)


def _check_epochs(iterable: object) -> None:
    """Refuse what is no series of epochs."""
    is_text = isinstance(iterable, str | bytes)
    if hasattr(iterable, "__iter__") and not is_text:
        return
    message = f"epochs takes what to loop over, got {show_value(iterable)}."
    why = "its letters are no epochs" if is_text else f"it is {kind_of(iterable)}"
    raise OptionError(message, why=why, fix=f"epochs(range({_count_meant(iterable)}))")


def _count_meant(value: object) -> int:
    """Give the number of epochs that was meant; 100 where none is to be seen.

    >>> _count_meant(30), _count_meant("12"), _count_meant(None), _count_meant(-1)
    (30, 12, 100, 100)
    """
    try:
        count = int(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return 100
    return count if count > 1 else 100


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
