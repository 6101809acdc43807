"""Callbacks for Lightning, given as ``Trainer(callbacks=[LeakCallback()])``.

``LeakCallback`` watches memory; ``WholeEpochs`` sees to it that every epoch is read to
its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from loaderkit.answers import answer_wrong_names
from loaderkit.errors import LoaderError, OptionError
from loaderkit.leaks.detector import LeakDetector, check_detector
from loaderkit.loader.planned import PlannedLoader
from loaderkit.loader.resumable import EpochBatches
from loaderkit.units import count_of
from loaderkit.value_words import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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


@answer_wrong_names()
class WholeEpochs(Callback):  # type: ignore[misc]
    """Has Lightning read every epoch to its end, or refuses to train.

    Lightning (2.6) asks a loader for its length before it loads the state of a
    checkpoint, and trains on as many batches in that epoch and in all later ones.
    Epochs differ where batches are limited by size, and where a run goes on with
    another number of ranks.  So this callback gives the loaders their states before
    Lightning counts, and compares what it counted as each epoch begins.  Lightning
    counts anew with ``Trainer(reload_dataloaders_every_n_epochs=1)``.

    Args:
        *loaders: Those given to ``Trainer.fit``, in that order.  None where
            ``train_dataloader`` of a module builds them: it calls ``resume``.
    """

    def __init__(self, *loaders: PlannedLoader) -> None:
        for loader in loaders:
            _check_loader(loader)
        self.loaders = loaders
        # Of the checkpoint, until loaders have them.
        self._states: list[Any] = []
        self._epoch = 0
        # Batches of the epoch in whose middle training goes on.
        self._resumed_lengths: list[int] = []

    def resume(self, *loaders: PlannedLoader) -> Any:
        """Bring new loaders to where training stands: for ``train_dataloader``.

        Args:
            *loaders: All that are trained on, in the order in which Lightning gets
                them.

        Returns:
            The loader, or a list of them if there are several.

        Raises:
            LoaderError: The checkpoint is that of another number of loaders, or one of
                them cannot go on from its state.
        """
        for loader in loaders:
            _check_loader(loader)
            loader.set_epoch(self._epoch)
        if self._states:
            self._load_states(loaders)
        return loaders[0] if len(loaders) == 1 else list(loaders)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Note at which epoch training begins."""
        self._epoch = trainer.current_epoch

    def on_load_checkpoint(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        checkpoint: Mapping[str, Any],
    ) -> None:
        """Load the states of the loaders, before Lightning asks for lengths."""
        if not trainer.training:
            return
        self._states = _loader_states(checkpoint)
        self._epoch = int(checkpoint.get("epoch", 0))
        if self.loaders and self._states:
            self._load_states(self.loaders)

    def _load_states(self, loaders: tuple[PlannedLoader, ...]) -> None:
        states, self._states = self._states, []
        if len(states) != len(loaders):
            message = f"The checkpoint has states of {count_of(len(states), 'loaders')}"
            message += (
                f", and WholeEpochs was given {count_of(len(loaders), 'loaders')}."
            )
            why = "it must know all that are trained on, in the order of Trainer.fit"
            raise LoaderError(message, why=why, fix="WholeEpochs(loader, other_loader)")
        for loader, state in zip(loaders, states, strict=True):
            # Others have no length, or one that no state changes: Lightning loads them.
            if not isinstance(loader.batches, EpochBatches):
                continue
            loader.load_state_dict(state)
            if len(loader) == state["batches"]:
                # Lightning does not load a state from the end of an epoch.
                loader.set_epoch(state["epoch"] + 1)
        # Now: once the epoch has begun, a loader may tell how long the next one is.
        self._resumed_lengths = _lengths(loaders)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Compare what Lightning counted in an epoch that goes on.

        Raises:
            LoaderError: The epoch has another number of batches, or the loader is not
                known here.
        """
        states, self._states = self._states, []
        if states and any(_planned_loaders(trainer.train_dataloader)):
            message = "WholeEpochs was not given the loader that training goes on with."
            why = "it loads its state before Lightning asks it for its length"
            raise LoaderError(message, why=why, fix=_FIX)
        lengths, self._resumed_lengths = self._resumed_lengths, []
        _check_counted(trainer, lengths)
        # Where training goes on behind an epoch, Lightning asks for loaders once more.
        self._epoch = trainer.current_epoch
        for loader in _planned_loaders(trainer.train_dataloader):
            if isinstance(loader.batches, EpochBatches):
                # As Lightning does next: not loader.set_epoch, which would forget the
                # iteration that has begun.
                loader.batches.set_epoch(self._epoch)

    def on_train_epoch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
    ) -> None:
        """Compare what Lightning counted with the batches of this epoch.

        Raises:
            LoaderError: The epoch has another number of batches.
        """
        _check_counted(trainer, _lengths(_planned_loaders(trainer.train_dataloader)))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Have loaders tell the length of the next epoch, also those built from now on.

        Lightning sets the epoch after it has asked for the length.
        """
        self._epoch = trainer.current_epoch + 1
        for loader in _planned_loaders(trainer.train_dataloader):
            loader.set_epoch(self._epoch)


_FIX = (
    "Trainer(reload_dataloaders_every_n_epochs=1, callbacks=[WholeEpochs(loader)]); "
    "where a train_dataloader builds it: return whole_epochs.resume(loader)"
)


def _lengths(loaders: Iterable[PlannedLoader]) -> list[int]:
    """Count the batches of the next epoch, of loaders whose epochs may differ."""
    return [
        len(loader) for loader in loaders if isinstance(loader.batches, EpochBatches)
    ]


def _check_counted(trainer: Trainer, lengths: list[int]) -> None:
    """Refuse to train on another number of batches than the epoch has.

    Args:
        trainer: The trainer, which may have been told to train on fewer.
        lengths: Of each loader.  Of several Lightning may be told to end with the
            shortest, or to begin those anew that end before the longest.
    """
    is_limited = trainer.limit_train_batches != 1.0 or trainer.overfit_batches
    if is_limited or not lengths:
        return
    counted = trainer.num_training_batches
    if min(lengths) <= counted <= max(lengths):
        return
    message = f"Lightning counted {count_of(int(counted), 'batches')} for epoch "
    message += f"{trainer.current_epoch}, which has {min(lengths):,}."
    why = "it counted those of another epoch, or before it loaded the loader's state; "
    why += "with too few samples are left out, with too many it does not validate"
    raise LoaderError(message, why=why, fix=_FIX)


def _check_loader(loader: object) -> None:
    if isinstance(loader, PlannedLoader):
        return
    message = f"WholeEpochs takes loaders of build_loader, got {kind_of(loader)}."
    why = "it compares their lengths, and loads their states"
    raise OptionError(message, why=why, fix="WholeEpochs(build_loader(dataset, ...))")


def _loader_states(checkpoint: Mapping[str, Any]) -> list[Any]:
    """Find what Lightning saved of the loaders: nothing, if they had no state."""
    part: Any = checkpoint
    for name in ("loops", "fit_loop", "state_dict"):
        part = part.get(name) or {}
    return list(part.get("combined_loader", []))


def _planned_loaders(loaders: Any) -> Iterator[PlannedLoader]:
    """Find the loaders of ours in what was given to ``Trainer.fit``."""
    if isinstance(loaders, PlannedLoader):
        yield loaders
    elif isinstance(loaders, Mapping):
        for loader in loaders.values():
            yield from _planned_loaders(loader)
    elif isinstance(loaders, list | tuple):
        for loader in loaders:
            yield from _planned_loaders(loader)
