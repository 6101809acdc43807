"""A Lightning callback that watches memory: ``Trainer(callbacks=[LeakCallback()])``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from loaderkit.answers import answer_wrong_names
from loaderkit.leaks.detector import LeakDetector, check_detector

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from loaderkit.leaks.report import LeakReport


@answer_wrong_names()
class LeakCallback(Callback):  # type: ignore[misc]
    """Judges memory over the epochs of training, or over every N batches.

    Args:
        detector: One with your settings, such as ``LeakDetector("cuda",
            on_leak="warn", every=100)``; with ``every`` batches are counted, else
            epochs.  A new one that raises if None.
    """

    def __init__(self, detector: LeakDetector | None = None) -> None:
        check_detector(detector)
        self.detector = detector or LeakDetector()

    @property
    def report(self) -> LeakReport:
        """The verdict so far."""
        return self.detector.report()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Take the first reading."""
        self.detector.start()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Count a batch."""
        if self.detector.every is not None:
            self.detector.step()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Take the reading of an epoch."""
        if self.detector.every is None:
            self.detector.end_epoch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Judge."""
        self.detector.finish()
