"""A training step in pieces that equals the whole and survives running out of memory.

Each piece's gradients are made apart and added only when it is finished.  A piece that
runs out of memory leaves nothing behind: gradients, random numbers and buffers are put
back, its frames let go, and it is tried again in halves.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from loaderkit.answers import answer_wrong_names
from loaderkit.arguments import check_integer, check_truth
from loaderkit.budget.cutting import (
    count_samples,
    cut,
    name_of_batch_norm,
    weight_of,
)
from loaderkit.budget.diagnosis.diagnose import attach, diagnose_oom
from loaderkit.budget.pieces.comparison import Comparison
from loaderkit.budget.pieces.options import (
    check_gradients,
    check_has_gradient,
    check_model_and_optimizer,
    check_pieces,
    check_step_options,
)
from loaderkit.budget.pieces.ranks import (
    agreed,
    average_gradients,
    broadcast_buffers,
    check_wrapper,
    unwrapped,
)
from loaderkit.budget.pieces.step_state import (
    SpectralVectors,
    StepState,
    add_grads,
    copied_grads,
    device_of,
    put_grads,
    take_grads,
)
from loaderkit.budget.pieces.update import Update
from loaderkit.budget.step.misplaced import Call, answer_misplaced, refuse_misplaced
from loaderkit.budget.step.train_step import call_model, loss_of
from loaderkit.call_keywords import suggest_keywords
from loaderkit.errors import BudgetError, OptionError
from loaderkit.fixes import Setting
from loaderkit.function_arguments import check_callable, refusal_of_call
from loaderkit.memory.release import release
from loaderkit.mistaken import mistaken_for_batch, mistaken_for_model
from loaderkit.notebook import HasCard
from loaderkit.operations import refuse_new_attributes
from loaderkit.units import count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from loaderkit.budget.diagnosis.diagnose import Diagnosis
    from loaderkit.budget.keywords import Loss

_NOT_OF_A_PIECE = frozenset(
    {"killed", "shm", "fds", "map count", "pagefile", "fork", "pinned", "garbage size"}
)
"""Verdicts of a diagnosis that a smaller piece does not help against."""


@answer_wrong_names()
@dataclass(frozen=True)
class StepResult(HasCard):
    """What one step did."""

    loss: torch.Tensor
    """Mean loss of the whole batch, without a graph."""
    pieces: int
    """Pieces that were computed."""
    micro_batch: int
    """Samples of the largest of them."""
    retries: int
    """Pieces that ran out of memory and were tried again in halves."""
    weight: float
    """What the loss is a mean over: samples, nodes or tokens."""

    def __str__(self) -> str:
        again = f", {self.retries} tried again" if self.retries else ""
        return f"loss {float(self.loss):.4g}, {count_of(self.pieces, 'pieces')}{again}"


@answer_wrong_names("optimizer", "model")
@refuse_new_attributes
@dataclass
class MicroBatcher:
    """Trains in pieces; a piece that does not fit is halved and tried again.

    Gradients equal the whole batch's: each piece's mean loss is weighted by what the
    loss is a mean over.  Dropout draws other random numbers than the whole would.

    >>> model = torch.nn.Linear(3, 1)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = MicroBatcher(model, sgd, torch.nn.functional.mse_loss, micro_batch=4)
    >>> print(trainer.step((torch.zeros(10, 3), torch.zeros(10, 1))).pieces)
    3
    """

    model: torch.nn.Module
    """The module, also wrapped in ``DistributedDataParallel``."""
    optimizer: torch.optim.Optimizer
    """Updates it once a step."""
    loss: Loss | None = None
    """As for ``estimate_step``; a mean over samples, nodes or tokens."""
    micro_batch: int | None = None
    """Samples of a piece; None tries the whole batch first.  Halved when memory runs
    out, and kept so."""
    loss_mean_over: str | Callable[[Any], float] = "samples"
    """What the loss is a mean over: "samples", "nodes", "tokens", or a callable."""
    clip_norm: float | None = None
    """Clip the norm of the whole gradient, once a step."""
    scaler: Any = None
    """A ``torch.amp.GradScaler``."""
    autocast: torch.dtype | None = None
    """Type of autocast in the forward pass."""
    independent: bool = True
    """Whether one sample's loss does not depend on the others: False for contrastive
    losses, which no pieces can equal."""
    verify: bool = True
    """Whether the first step in pieces, and the 2nd, 4th, 8th ..., is compared with the
    whole, on parts of the batch that fit: it tells losses whose mean is over something
    else, and layers that mix samples."""
    retries: int = field(default=0, init=False)
    """Pieces tried again so far."""
    _steps_in_pieces: int = field(default=0, init=False, repr=False)
    _compare_at: int = field(default=1, init=False, repr=False)
    _checked_model: Any = field(default=None, init=False, repr=False)
    _checked_optimizer: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        arguments = [getattr(self, name) for name in _CALL.by_position()]
        refuse_misplaced(_CALL, tuple(arguments), {})
        check_model_and_optimizer(self.model, self.optimizer, self.loss)
        check_pieces(self.micro_batch, self.loss_mean_over)
        check_step_options(
            self.clip_norm,
            self.scaler,
            self.autocast,
            device=device_of(self.model),
            independent=self.independent,
            verify=self.verify,
        )

    @answer_misplaced(owner="batcher")
    def step(self, batch: object) -> StepResult:
        """Train on one batch.

        Args:
            batch: As for ``estimate_step``, on the model's device.

        Returns:
            Loss, pieces and retries.

        Raises:
            BudgetError: It has to be cut, and pieces would not equal the whole; or the
                optimizer's update ran out of memory; or another rank failed.
            OptionError: Of several ranks, the model is inside of its wrapper, or the
                wrapper inside of the model.
            RuntimeError: A single sample runs out of memory: the original error, with
                the diagnosis as a note; gradients are as before the step.
        """
        # PyG's own wrapper for several devices is called with lists of graphs.
        mistake = None if isinstance(batch, list) else mistaken_for_batch(batch)
        if mistake is not None:
            fix = mistake.fix("batcher.step({})")
            raise OptionError(mistake.message, why=mistake.why, fix=fix)
        return self._run_steps([batch])

    def windows(self, batches: Iterable[Any], size: int) -> Iterator[StepResult]:
        """Train on several batches a step; the last window counts, however short.

        Args:
            batches: Such as a loader.
            size: Batches of one step.

        Yields:
            One result a step.

        Raises:
            ValueError: The size is not positive.
        """
        check_integer("size", size, least=1)
        window: list[Any] = []
        for batch in batches:
            window.append(batch)
            if len(window) == size:
                yield self._run_steps(window)
                window = []
        if window:
            yield self._run_steps(window)

    def _run_steps(self, window: list[Any]) -> StepResult:
        """Make one step of all batches of a window."""
        if self._checked_model is not self.model:
            # Now: it may have been wrapped since this was made.
            check_wrapper(self.model)
            self._checked_model = self.model
        self.optimizer.zero_grad(set_to_none=True)
        pieces = _Pieces(
            self.model,
            self._backward_of_piece,
            self.micro_batch,
            self.loss_mean_over,
            self.independent,
        )
        # What the wrapper of DistributedDataParallel sends is sent here, once a step,
        # in an order that all ranks keep however often one of them tries again.
        broadcast_buffers(self.model)
        result = agreed(self.model, lambda: self._run_pieces(pieces, window))
        average_gradients(self.model)
        if self._checked_optimizer is not self.optimizer:
            text = check_gradients(self.model, self.optimizer)
            self._checked_optimizer = self.optimizer
            if text:
                warnings.warn(text, RuntimeWarning, stacklevel=4)
        if result.retries:
            self.micro_batch = pieces.size
            self.retries += result.retries
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        agreed(self.model, self._update_parameters)
        return result

    def _run_pieces(self, pieces: _Pieces, window: list[Any]) -> StepResult:
        """Compute the gradients; now and then, compare pieces with the whole."""
        result = pieces.run(window)
        if self.verify and result.pieces > 1:
            self._steps_in_pieces += 1
            if self._steps_in_pieces >= self._compare_at:
                # What deviates may be rare: a class with a weight, a text that is cut.
                # So the 1st, 2nd, 4th, 8th ... step in pieces is compared; where memory
                # ran out over it, the next one.
                was_compared = self._compare_with_whole(window, pieces.size)
                factor = 2 if was_compared else 1
                self._compare_at = factor * self._steps_in_pieces
        return result

    def _compare_with_whole(self, window: list[Any], size: int | None) -> bool:
        """Compare pieces with the whole; tell whether that could be done.

        Raises:
            BudgetError: They differ.
        """
        batch = window[0]
        most = size or count_samples(batch)
        is_uncut_norm = size is None and name_of_batch_norm(self.model) is not None
        if not self.independent or is_uncut_norm:
            # Whole batches of a window, each for itself, as the user says.
            return True
        precisely = functools.partial(self._backward_of, precisely=True)
        try:
            return Comparison(self.model, precisely, self.loss_mean_over).run(
                batch, most
            )
        except BudgetError:
            raise
        except Exception:
            if self.autocast is None:
                raise
        # Some models run under autocast only.
        rounded = Comparison(
            self.model, self._backward_of, self.loss_mean_over, self.autocast
        )
        return rounded.run(batch, most)

    def _update_parameters(self) -> None:
        """Let the optimizer update; undo that, or say what it changed, if it fails."""
        update = Update(self.optimizer)
        try:
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        except (RuntimeError, MemoryError) as error:
            if not diagnose_oom(error).is_oom:
                raise
            raise update.failed() from error

    def _backward_of_piece(self, piece: object, share: float) -> torch.Tensor:
        return self._backward_of(self.model, piece, share)

    def _backward_of(
        self,
        model: torch.nn.Module,
        piece: object,
        share: float,
        *,
        precisely: bool = False,
    ) -> torch.Tensor:
        """Compute a piece; precisely without autocast, and without scaling."""
        autocast: Any = nullcontext()
        if self.autocast is not None and not precisely:
            autocast = torch.autocast(device_of(self.model).type, self.autocast)
        with autocast:
            # Not through the wrapper: its forward pass waits for the other ranks.
            inner = unwrapped(model)
            output = call_model(inner, piece, paired=self.loss is not None)
            value = loss_of(output, piece, self.loss) * share
        check_has_gradient(value, model)
        if self.scaler is not None and not precisely:
            self.scaler.scale(value).backward()
        else:
            value.backward()
        detached: torch.Tensor = value.detach()
        return detached


@suggest_keywords
def transactional_step(
    model: torch.nn.Module,
    batch: object,
    backward: Callable[[Any, float], torch.Tensor],
    *,
    micro_batch: int | None = None,
    loss_mean_over: str | Callable[[Any], float] = "samples",
    independent: bool = True,
) -> StepResult:
    """Compute the gradients of one batch, in pieces where need be.

    Nothing but ``.grad`` is changed: the update stays the caller's.

    Args:
        model: The module.
        batch: As for ``estimate_step``.
        backward: Called as ``backward(piece, share)``: computes the piece's mean loss,
            multiplies it by ``share``, calls ``.backward()`` and returns it detached.
        micro_batch: Samples of a piece; None tries the whole batch first.
        loss_mean_over: See :class:`MicroBatcher`.
        independent: See :class:`MicroBatcher`.

    Returns:
        Loss, pieces and retries; the gradients are added to those there were.

    Raises:
        BudgetError: It has to be cut, and pieces would not equal the whole.
        RuntimeError: A single sample runs out of memory; gradients are as before.
    """
    mistake = mistaken_for_model(model, "transactional_step(model, batch, backward)")
    if mistake is not None:
        raise OptionError(mistake.message, why=mistake.why, fix=mistake.instead)
    example = "lambda piece, share: ..."
    check_callable("backward", backward, example)
    refused = refusal_of_call(backward, "piece", "share")
    if refused is not None:
        message = f"backward cannot be called: {refused}."
        why = "it is called with two arguments, the piece and its share"
        raise OptionError(message, why=why, fix=Setting("backward", code=example))
    check_truth("independent", independent)
    pieces = _Pieces(model, backward, micro_batch, loss_mean_over, independent)
    return pieces.run([batch])


_CALL = Call.of_class(MicroBatcher)
"""What its arguments are, to tell those in each other's place."""


class _Attempt(NamedTuple):
    """What became of one piece."""

    loss: torch.Tensor | None
    """Times its share of the batch; None when it ran out of memory."""
    error: BaseException | None = None
    """With which it did; its frames are gone."""


class _Pieces:
    """Runs the pieces of one step."""

    def __init__(
        self,
        model: torch.nn.Module,
        backward: Callable[[Any, float], torch.Tensor],
        size: int | None,
        loss_mean_over: str | Callable[[Any], float],
        independent: bool,  # noqa: FBT001 -- the last of a private list
    ) -> None:
        check_pieces(size, loss_mean_over)
        self.model, self.backward, self.size = model, backward, size
        self.loss_mean_over, self.independent = loss_mean_over, independent
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.pieces = self.largest = self.retries = 0

    def run(self, window: list[Any]) -> StepResult:
        """Compute every piece of every batch."""
        weight = sum(weight_of(batch, self.loss_mean_over) for batch in window)
        grads_before = copied_grads(self.parameters)
        loss: Any = 0.0
        try:
            for batch in window:
                loss = loss + self._run_batch(batch, weight)
        except BaseException:
            put_grads(self.parameters, grads_before)
            raise
        return StepResult(loss, self.pieces, self.largest, self.retries, weight)

    def _run_batch(self, batch: object, weight: float) -> Any:
        """Compute the pieces of a batch, and halve those that run out of memory.

        Args:
            batch: Of the window.
            weight: Of the whole window: what the loss of the step is a mean over.

        Returns:
            Its part of the loss.
        """
        loss: Any = 0.0
        start, count = 0, count_samples(batch)
        vectors = SpectralVectors(self.model)
        last_error: BaseException | None = None
        while start < count:
            stop = min(start + (self.size or count), count)
            samples = stop - start
            if samples < count:
                _check_pieces_can_equal_whole(
                    self.model, independent=self.independent, cause=last_error
                )
            piece = cut(batch, start, stop)
            share = weight_of(piece, self.loss_mean_over) / weight if weight else 0.0
            vectors.restore()
            attempt = self._attempt_step(piece, share)
            if attempt.error is not None:
                if samples == 1:
                    raise attempt.error
                # In halves, the first the larger of them.
                self.size = (samples + 1) // 2
                self.retries += 1
                last_error = attempt.error
                # Outside of the except block, so that its frames are gone; the piece
                # and what failed must be gone too before memory is given back.
                del piece, attempt
                release()
                continue
            loss = loss + attempt.loss
            self.pieces += 1
            self.largest = max(self.largest, samples)
            start = stop
        return loss

    def _attempt_step(self, piece: object, share: float) -> _Attempt:
        """Compute one piece; leave nothing behind if it runs out of memory."""
        grads_so_far = take_grads(self.parameters)
        state = StepState(self.model)
        try:
            loss = self.backward(piece, share)
        except (RuntimeError, MemoryError) as error:
            put_grads(self.parameters, grads_so_far)
            diagnosis = diagnose_oom(error)
            if not diagnosis.is_oom or diagnosis.verdict in _NOT_OF_A_PIECE:
                raise
            state.restore()
            return _Attempt(None, _without_frames(error, diagnosis))
        add_grads(self.parameters, grads_so_far)
        return _Attempt(loss)


def _without_frames(error: BaseException, diagnosis: Diagnosis) -> BaseException:
    """Let go of what an error's frames hold, and attach the diagnosis."""
    attach(error, diagnosis)
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def _check_pieces_can_equal_whole(
    model: torch.nn.Module, *, independent: bool, cause: BaseException | None
) -> None:
    """Refuse pieces that cannot equal the whole.

    Args:
        model: Batch statistics make every sample depend on all others.
        independent: As the user said.
        cause: Why there must be pieces; None where the user asked for them.

    Raises:
        BudgetError: They cannot.
    """
    if not independent:
        message = "This batch does not fit, and its loss cannot be computed in pieces."
        why = (
            "you said that one sample's loss depends on the others (independent=False)"
        )
        fix = "a smaller batch, or loaderkit.plan_batch"
        raise BudgetError(message, why=why, fix=fix) from cause
    name = name_of_batch_norm(model)
    if name is not None:
        message = "This batch cannot be computed in pieces with equal results."
        why = f"{name} normalises by the statistics of its batch, in training"
        fix = f"model.get_submodule({name!r}).eval(), or GroupNorm, or LayerNorm"
        raise BudgetError(message, why=why, fix=fix) from cause
