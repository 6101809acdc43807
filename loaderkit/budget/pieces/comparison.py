"""Says whether pieces equal the whole, and what an update that ran out left behind.

Whole and pieces are compared on parts of a batch that fit.  What makes them differ may
be in few samples (a class with a weight, a text with more tokens), so each part is
spread over the batch and there are several; and it may be there in training only (a
norm of its own), so layers stay in training wherever that draws no random numbers.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from loaderkit.budget.cutting import count_samples, in_float64, take, weight_of
from loaderkit.budget.diagnosis.diagnose import diagnose_oom
from loaderkit.budget.pieces.ranks import unwrapped
from loaderkit.budget.pieces.step_state import (
    StepState,
    put_grads,
    random_state,
    take_grads,
)
from loaderkit.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Backward = Callable[[Any, Any, float], object]

_PART_SAMPLES = 8
"""Samples of one part at most: more make single ones that differ harder to see."""
_PARTS = 8
"""Parts at most.  With three passes for each, the first step takes as long as a few."""
_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
"""They draw random numbers in training, and do nothing else there."""
_TOLERANCE = 2e-3
"""Share of the gradient by which whole and pieces may differ.  Sums of some thousand
terms of float32 stay well below; the smallest deviation seen to matter is 1.3 %."""
_LOCAL = 0.05
"""Of the whole gradient: a parameter with so little of it must agree less closely, such
as a bias before a norm, whose gradient is nothing but rounding."""
_ROUNDINGS = 4
"""Roundings of a short type that a gradient may be off by: 3 % of what was summed up
for bfloat16.  Measured on perceptrons of 2 to 8 layers: at most 1."""
_ROUNDINGS_OF_SUMS = 100
"""The same for float32 and float64.  It counts where the gradients of samples cancel
each other, as they do once a model has converged."""


class _Gradient(NamedTuple):
    """A sum of gradients of pieces, in float64."""

    values: list[torch.Tensor]
    """By parameter; empty where it has none."""
    summed_norms: list[float]
    """By parameter: the norms of the pieces' gradients, added up."""

    @property
    def is_finite(self) -> bool:
        """Whether no value overflowed."""
        return all(bool(value.isfinite().all()) for value in self.values)


class Comparison:
    """Compares the gradients of a few samples with those of pieces of them."""

    def __init__(
        self,
        model: torch.nn.Module,
        backward: Backward,
        loss_mean_over: str | Callable[[Any], float],
        autocast: torch.dtype | None = None,
    ) -> None:
        """Remember how gradients are made.

        Args:
            model: The module.
            backward: Called as ``backward(model, piece, share)``: computes the
                gradients of the piece's mean loss, times ``share``.
            loss_mean_over: What the loss is a mean over.
            autocast: The type that ``backward`` rounds to, if any.
        """
        self.model, self.backward, self.loss_mean_over = model, backward, loss_mean_over
        self.autocast = autocast
        self._state = StepState(model)
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def run(self, batch: object, most: int) -> bool:
        """Compare parts of a batch.  Gradients, buffers and modes stay as they were.

        Args:
            batch: Some of its samples are compared.
            most: Samples that fit.

        Returns:
            Whether they could be compared: not if memory runs out, or if the gradient
            of the whole is not finite.

        Raises:
            BudgetError: They differ, or pieces of one sample cannot be computed.
        """
        grads_before = take_grads(self.parameters)
        modes = {module: module.training for module in self.model.modules()}
        try:
            were_compared = [
                self._compare_part(take(batch, rows))
                for rows in _rows_of_parts(batch, most)
            ]
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, BudgetError) or not diagnose_oom(error).is_oom:
                raise
            return False
        finally:
            for module, mode in modes.items():
                module.training = mode
            self._state.restore()
            put_grads(self.parameters, grads_before)
        return all(were_compared)

    def _compare_part(self, part: object) -> bool:
        """Compare one part; False if the gradient of the whole is not finite."""
        _stop_dropout(self.model)
        numbers_before = random_state(self._state.device)
        whole = self._gradient_of([part])
        numbers_after = random_state(self._state.device)
        if not all(map(torch.equal, numbers_before, numbers_after)):
            # Pieces would draw other numbers.  What is left is the same in evaluation,
            # but for what a module does in training only.
            self.model.eval()
            whole = self._gradient_of([part])
        if not (whole.is_finite and any(whole.summed_norms)):
            return False
        pieces = self._gradient_of_pieces(part)
        if not pieces.is_finite:
            raise _infinite_error()
        share = self._relative_deviation(whole, pieces)
        if share and not self._is_rounding(part):
            raise _deviation_error(share, self.loss_mean_over)
        return True

    def _is_rounding(self, part: object) -> bool:
        """Tell whether whole and pieces are equal in float64.

        A loss that is nearly 0 is a difference of nearly equal numbers, whose rounding
        can be any share of the gradient.  That takes a copy of the model, and not all
        models and losses can be computed so: then they are taken to differ.
        """
        if next(iter(self.parameters)).dtype is torch.float64:
            return False
        try:
            twin = copy.deepcopy(unwrapped(self.model)).double()
            exact = Comparison(twin, self.backward, self.loss_mean_over)
            return exact._compare_part(in_float64(part))
        except Exception:  # noqa: BLE001 -- such as weights of float32 in the loss
            return False

    def _relative_deviation(self, whole: _Gradient, pieces: _Gradient) -> float:
        """Give the share by which the gradients differ; 0 if rounding explains it."""
        norm = math.hypot(*(float(value.norm()) for value in whole.values))
        largest = 0.0
        for number, parameter in enumerate(self.parameters):
            of_whole, of_pieces = whole.values[number], pieces.values[number]
            if not (of_whole.numel() or of_pieces.numel()):
                continue
            if of_whole.shape == of_pieces.shape:
                difference = float((of_whole - of_pieces).norm())
            else:
                # In a piece alone, or in the whole alone, a part of the model may be
                # unused.
                difference = norm
            size = float(of_whole.norm()) + _LOCAL * norm
            summed = max(whole.summed_norms[number], pieces.summed_norms[number])
            tolerance = _TOLERANCE * size + self._rounding_error(parameter) * summed
            if difference > tolerance:
                largest = max(largest, difference / size)
        return largest

    def _rounding_error(self, parameter: torch.Tensor) -> float:
        """Give the share of what is summed up that rounding may take or add."""
        dtype = self.autocast or parameter.dtype
        is_short = torch.finfo(dtype).bits < 32
        roundings = _ROUNDINGS if is_short else _ROUNDINGS_OF_SUMS
        return roundings * torch.finfo(dtype).eps

    def _gradient_of_pieces(self, part: object) -> _Gradient:
        """Cut off a sample: pieces of unequal sizes show wrong weights.

        Two samples, where a single one is an error: a model that squeezes.
        """
        count = count_samples(part)
        try:
            with warnings.catch_warnings():
                # Torch warns of a statistic of one sample.
                warnings.simplefilter("ignore")
                return self._gradient_of(_cut_off(part, 1, count))
        except Exception as error:
            if isinstance(error, MemoryError) or diagnose_oom(error).is_oom:
                raise
            if count < 4:
                raise _single_error(error) from error
        return self._gradient_of(_cut_off(part, 2, count))

    def _gradient_of(self, pieces: list[Any]) -> _Gradient:
        weights = [weight_of(piece, self.loss_mean_over) for piece in pieces]
        total = sum(weights)
        sums = [torch.zeros(0, dtype=torch.float64)] * len(self.parameters)
        norms = [0.0] * len(self.parameters)
        for piece, weight in zip(pieces, weights, strict=True):
            take_grads(self.parameters)
            # A forward pass changes some, such as the vectors of a spectral norm.
            self._state.restore_buffers()
            share = weight / total if total else 0.0
            self.backward(self.model, piece, share)
            for number, parameter in enumerate(self.parameters):
                if parameter.grad is None:
                    continue
                grad = _as_dense(parameter.grad)
                sum_before = sums[number]
                sums[number] = sum_before + grad if sum_before.numel() else grad
                norms[number] += float(grad.norm())
        return _Gradient(sums, norms)


def _rows_of_parts(batch: object, most: int) -> Iterator[list[int]]:
    """Choose the rows of parts, each spread over the whole batch."""
    count = count_samples(batch)
    size = min(most, count, _PART_SAMPLES)
    if size < 2:
        return
    parts = min(count // size, _PARTS)
    chosen = [at * count // (parts * size) for at in range(parts * size)]
    for first in range(parts):
        yield chosen[first::parts]


def _cut_off(part: object, first: int, count: int) -> list[Any]:
    return [take(part, list(range(first))), take(part, list(range(first, count)))]


def _stop_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.eval()


def _as_dense(grad: torch.Tensor) -> torch.Tensor:
    grad = grad.detach()
    grad = grad.to_dense() if grad.layout is not torch.strided else grad
    return grad.to("cpu").double()


def _deviation_error(
    share: float, loss_mean_over: str | Callable[[Any], float]
) -> BudgetError:
    """Say by how much pieces differ from the whole, and what may be the cause."""
    message = f"Pieces do not equal the whole: their gradients differ by {share:.1%}."
    why = (
        f"the loss is no mean over {loss_mean_over!r} (a sum, a class weight, "
        "ignore_index), or a layer or loss mixes samples (a norm without batch=, "
        "contrastive losses)"
    )
    fix = (
        "loss_mean_over=lambda piece: ... counts what the loss is a mean over; "
        "independent=False where samples are mixed; verify=False where the difference "
        "is meant"
    )
    return BudgetError(message, why=why, fix=fix)


def _infinite_error() -> BudgetError:
    message = "Pieces do not equal the whole: their gradients are not finite."
    why = (
        "a small piece has nothing that the loss can be a mean over (all is ignored), "
        "or the loss compares samples (a standard deviation of one)"
    )
    fix = (
        "a loss that is 0 for such a piece; independent=False where samples are "
        "compared; verify=False if your pieces are never so small"
    )
    return BudgetError(message, why=why, fix=fix)


def _single_error(error: Exception) -> BudgetError:
    message = f"A piece of one sample cannot be computed: {type(error).__name__}."
    why = "pieces are compared with the whole, and the last of a batch may be so small"
    fix = "a model that takes one sample, or micro_batch=4 or more, or verify=False"
    return BudgetError(message, why=why, fix=fix)
