"""A callback for the Hugging Face Trainer: ``Trainer(callbacks=[LeakCallback()])``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from loaderkit.answers import answer_wrong_names
from loaderkit.leaks.detector import LeakDetector, check_detector

if TYPE_CHECKING:
    from loaderkit.leaks.report import LeakReport


@answer_wrong_names()
class LeakCallback(TrainerCallback):  # type: ignore[misc]
    """Judges memory over the epochs of training, or over every N steps.

    Args:
        detector: One with your settings, such as ``LeakDetector("cuda",
            on_leak="warn", every=100)``; with ``every`` steps are counted, else epochs.
            A new one that raises if None.
    """

    def __init__(self, detector: LeakDetector | None = None) -> None:
        check_detector(detector)
        self.detector = detector or LeakDetector()

    @property
    def report(self) -> LeakReport:
        """The verdict so far."""
        return self.detector.report()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Take the first reading."""
        self.detector.start()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Count a step."""
        if self.detector.every is not None:
            self.detector.step()

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Take the reading of an epoch."""
        if self.detector.every is None:
            self.detector.end_epoch()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Judge."""
        self.detector.finish()
