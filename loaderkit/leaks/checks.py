"""``assert_no_leak``: the detector as one line of a test."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from loaderkit.arguments import check_integer
from loaderkit.call_keywords import suggest_keywords
from loaderkit.errors import LeakError, NotJudgedWarning
from loaderkit.leaks.counter_trend import TOLERANCE
from loaderkit.leaks.detector import DetectorOfTest
from loaderkit.leaks.epoch_functions import check_epoch_function, check_has_run
from loaderkit.leaks.run import why_undecided
from loaderkit.leaks.trend import FEWEST_EPOCHS, NEEDS_MORE

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from loaderkit.leaks.detector import LeakDetector
    from loaderkit.leaks.report import LeakReport

DEFAULT_EPOCHS = 8
"""Of a test.  Chosen: two more than the fewest, as first calls fill caches."""
MOST_TIMES_LONGER = 3
"""Times as many calls as were asked for are the most of a test.  Chosen: enough for
growth that began in the last calls, and for pages that malloc has yet to touch."""


@suggest_keywords
def assert_no_leak(
    function: Callable[[], Any],
    *,
    epochs: int = DEFAULT_EPOCHS,
    device: str | torch.device | None = None,
    limit: int | str | None = None,
    tolerance: int | str = TOLERANCE,
) -> LeakReport:
    """Call a function again and again, and fail if memory grows with each call.

    Args:
        function: One epoch; takes nothing.
        epochs: Calls, at least 6: an epoch or two are warm-up, and growth must go on.
            Where they do not decide, it is called up to three times as often.  What
            still fills up then does not fail, and is told by a
            :class:`~loaderkit.errors.NotJudgedWarning`.
        device: Watched beside the host; the first that is here if None.
        limit: Memory that may be used, such as "2 GiB".
        tolerance: Bytes an epoch that do not count.

    Returns:
        The report.

    Raises:
        LeakError: Memory grows; the message says what and who holds it.
        OptionError: It is no function, but perhaps what one returned; or its call runs
            none of its code, as that of an async function; or fewer than 6 epochs,
            which cannot tell.
    """
    __tracebackhide__ = True
    check_epoch_function("function", function)
    # Fewer cannot tell growth from warm-up.
    check_integer("epochs", epochs, least=FEWEST_EPOCHS)
    detector = DetectorOfTest(
        device, limit=limit, on_leak=_let_it_end, tolerance=tolerance
    )
    report = judge_calls(
        detector, lambda _: function(), epochs, most=MOST_TIMES_LONGER * epochs
    )
    if report.leaking:
        error = LeakError(str(report))
        error.report = report
        raise error
    undecided = why_undecided(report)
    if undecided is not None:
        undecided = undecided._replace(fix=f"epochs={undecided.needed_epochs}")
        # suggest_keywords puts a frame between this one and its caller.
        warnings.warn(str(undecided), NotJudgedWarning, stacklevel=3)
    return report


def judge_calls(
    detector: LeakDetector, call: Callable[[int], object], epochs: int, *, most: int
) -> LeakReport:
    """Call a test once an epoch, and more often where that decides it.

    Args:
        detector: Of this test.
        call: The test; it is given the number of the call.
        epochs: Calls after which it is judged.
        most: Calls after which it is not called again, decided or not.

    Returns:
        The report.

    Raises:
        OptionError: A call gave something that has yet to run.
    """
    __tracebackhide__ = True
    detector.start()
    calls = 0
    while True:
        while calls < epochs:
            check_has_run(call(calls))
            detector.end_epoch()
            calls += 1
        report = detector.report()
        if report.verdict != NEEDS_MORE or calls >= most:
            return report
        epochs = min(most, calls + report.more_epochs)


def _let_it_end(_: LeakReport) -> None:
    """Let the run end before it is judged."""
