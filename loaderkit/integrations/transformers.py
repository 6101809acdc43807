"""Callbacks for the Hugging Face Trainer: ``Trainer(callbacks=[LeakCallback()])``.

``LeakCallback`` watches memory; ``WholeEpochs`` refuses to train where samples of an
epoch would be left out or read twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from loaderkit.answers import answer_wrong_names
from loaderkit.errors import LoaderError, OptionError
from loaderkit.leaks.detector import LeakDetector, check_detector
from loaderkit.loader.planned import PlannedLoader
from loaderkit.loader.resumable import EpochBatches
from loaderkit.value_words import kind_of

if TYPE_CHECKING:
    from collections.abc import Sized

    from transformers import TrainerState, TrainingArguments

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


@answer_wrong_names()
class WholeEpochs(TrainerCallback):  # type: ignore[misc]
    """Refuses to train where samples of an epoch would be left out or read twice.

    The Trainer (transformers 5.24) counts steps: it trains in each epoch on as many
    batches as the first has, and where it goes on from a checkpoint, it skips as many
    as were trained on then, whatever they have become.  Give it as ``callbacks``, or
    call ``self.add_callback`` in ``get_train_dataloader``.

    Args:
        loader: Of ``build_loader``, which is told of each epoch as it begins; None
            where the Trainer makes its own.
    """

    def __init__(self, loader: PlannedLoader[Any] | None = None) -> None:
        if loader is not None:
            _check_loader(loader)
        self.loader = loader

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: Any,  # noqa: ARG002
        train_dataloader: Sized | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Compare the checkpoint with the batches that there are now.

        Raises:
            LoaderError: Epochs have unlike numbers of batches, or other ones than when
                the checkpoint was saved.
        """
        self._check_that_epochs_are_alike()
        if not state.global_step or state.epoch is None or args.ignore_data_skip:
            return
        try:
            batches = len(train_dataloader or ())
        except TypeError:  # a stream, whose steps the user has counted
            return
        if not batches or args.max_steps > 0:
            return
        steps = -(-batches // args.gradient_accumulation_steps)
        epoch, steps_in_epoch = divmod(state.global_step, steps)
        batches_in_epoch = steps_in_epoch * args.gradient_accumulation_steps
        goes_on_at = epoch + batches_in_epoch / batches
        if abs(goes_on_at - state.epoch) < _SAME_EPOCH:
            return
        message = f"The checkpoint was saved {state.epoch:,.2f} epochs into training, "
        message += f"and would go on at {goes_on_at:,.2f}."
        why = f"the Trainer counts steps: {state.global_step:,} were trained on then, "
        why += f"and an epoch has {steps:,} now"
        fix = "as many processes, samples a batch and gradient_accumulation_steps as "
        fix += "saved it; or a loop of your own with loader.load_state_dict(state)"
        raise LoaderError(message, why=why, fix=fix)

    def _check_that_epochs_are_alike(self) -> None:
        if self.loader is None or not isinstance(self.loader.batches, EpochBatches):
            return
        rule = self.loader.batches.rule
        if rule.plain or rule.shuffle in {False, "batches"}:
            return
        message = (
            f"Epochs of a loader with shuffle={rule.shuffle!r} and batches limited "
            "by size have unlike numbers of batches."
        )
        why = "the Trainer counts those of the first, and leaves out the last ones of "
        why += "epochs that have more"
        raise LoaderError(message, why=why, fix='shuffle="batches"')

    def on_epoch_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Tell the loader which epoch begins.

        accelerate does not, where it skips batches on several ranks.
        """
        if self.loader is not None:
            self.loader.set_epoch(int((state.epoch or 0) + _SAME_EPOCH))


_SAME_EPOCH = 1e-6
"""What is less is rounding: a part of an epoch is a float in the Trainer's state."""


def _check_loader(loader: object) -> None:
    if isinstance(loader, PlannedLoader):
        return
    message = f"WholeEpochs takes a loader of build_loader, got {kind_of(loader)}."
    why = "it looks at its rule for batches, and tells it of each epoch"
    raise OptionError(message, why=why, fix="WholeEpochs(build_loader(dataset, ...))")
