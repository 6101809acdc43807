"""``assert_no_leak``: the detector as one line of a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loaderkit.arguments import check_callable, check_integer, suggest_keywords
from loaderkit.errors import LeakError
from loaderkit.leaks.counter_trend import TOLERANCE
from loaderkit.leaks.detector import LeakDetector
from loaderkit.leaks.trend import FEWEST_EPOCHS

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from loaderkit.leaks.report import LeakReport

DEFAULT_EPOCHS = 8
"""Of a test.  Chosen: two more than the fewest, as first calls fill caches."""


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
            What still fills up after 8 needs more: it does not fail, and is told by a
            :class:`~loaderkit.errors.NotJudgedWarning`.
        device: Watched beside the host; the first that is here if None.
        limit: Memory that may be used, such as "2 GiB".
        tolerance: Bytes an epoch that do not count.

    Returns:
        The report.

    Raises:
        LeakError: Memory grows; the message says what and who holds it.
        OptionError: It is no function, but perhaps what one returned; or fewer than 6
            epochs, which cannot tell.
    """
    __tracebackhide__ = True
    check_callable("function", function, "lambda: train_one_epoch()")
    # Fewer cannot tell growth from warm-up.
    check_integer("epochs", epochs, least=FEWEST_EPOCHS)
    detector = LeakDetector(
        device, limit=limit, on_leak=_let_it_end, tolerance=tolerance
    )
    report = detector.run(function, epochs=epochs)
    if report.leaking:
        error = LeakError(str(report))
        error.report = report
        raise error
    return report


def _let_it_end(_: LeakReport) -> None:
    """Let the run end before it is judged."""
