"""Tells an error of a training step itself from a limit of tensors without memory.

A batch of the wrong width, type or form fails under fake tensors as it would for real,
and so does much that runs for real: what reads values, scripted code, operators without
a rule for shapes.  The first is the user's to know, the second is ours to work around.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from loaderkit.budget.step.allocation_log import Log
from loaderkit.budget.step.fake_tensors import (
    attention_of,
    fake_copies,
    without_torch_logging,
)
from loaderkit.budget.step.step_copies import StepCopies, copy_of_model, step_copies
from loaderkit.budget.step.train_step import make_optimizer, run_step
from loaderkit.budget.step.users_state import preserve_users_state
from loaderkit.error_texts import error_in_words, text_of_error
from loaderkit.errors import LoaderkitError, StepError
from loaderkit.nests import map_tensors
from loaderkit.randomness import preserve_random_states

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from loaderkit.budget.step.train_step import Step

_LIMITS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
    MemoryError,
)
"""Errors with which torch says that a fake tensor cannot do something."""
_WORDS_OF_LIMITS = (
    "faketensor",
    "fake tensor",
    "fake mode",
    "fake_mode",
    "meta tensor",
    "data pointer",
    "storage",
    "subclass",
    "data-dependent",
    "sparse",
    "same nnz",
    "symint",
)
"""The same in messages of other types; of those seen with torch 2.13."""
_WORDS_OF_TYPES = (
    "same dtype",
    "same datatype",
    "scalar type",
    "target dtype",
    "dtypes match",
    "should be the same",
)
"""In messages of kernels that refuse the types of their operands, whatever values and
sizes are.  Rules for fake tensors do not look at all types."""


def error_of_step(error: Exception) -> StepError:
    """Wrap an error of the user's model, batch or loss.

    Args:
        error: As it was raised; to be named as the cause too.

    Returns:
        What to raise.
    """
    if isinstance(error, StepError):
        return error
    if isinstance(error, LoaderkitError) and error.why:
        # It says why itself, and what to do.
        message = f"this step does not run: {type(error).__name__}: {error.what}"
        return StepError(message, why=error.why, fix=error.advice)
    message = f"this step does not run: {error_in_words(error)}"
    why = "the model, the batch and the loss do not go together; training would fail so"
    fix = "see that loss(model(batch)).backward() runs on one small batch"
    return StepError(message, why=why, fix=fix)


def refuses_types(error: Exception) -> bool:
    """Tell whether a kernel refuses the types of its operands.

    >>> refuses_types(RuntimeError("mat1 and mat2 must have the same dtype"))
    True
    >>> refuses_types(RuntimeError("index out of range"))
    False
    """
    text = text_of_error(error).lower()
    return isinstance(error, RuntimeError) and any(w in text for w in _WORDS_OF_TYPES)


def is_limit_of_fakes(error: Exception) -> bool:
    """Tell whether torch says that a tensor without memory cannot do something."""
    if isinstance(error, _LIMITS):
        return True
    text = text_of_error(error).lower()
    return any(word in text for word in _WORDS_OF_LIMITS)


def is_refusal_of_subclass(error: Exception) -> bool:
    """Tell whether torch refuses to make a tensor of a subclass under a mode.

    Where ``torch.Tensor`` itself makes it, as with torch's ``causal_lower_right``; it
    does so without a mode.
    """
    return "creating a new tensor subclass" in text_of_error(error).lower()


def find_error_without_memory(
    model: torch.nn.Module, batch: object, step: Step
) -> Exception | None:
    """Run a step with fake tensors alone, to see whether the user's code raises.

    Args:
        model: A module; it is not changed.
        batch: What it is called with; not changed.
        step: How a step is made.

    Returns:
        The error of the step itself; None where there is none, or where it is not known
        because fake tensors cannot do what the step asks for.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        # Compiled code fails with errors of its own on anything but real tensors.
        return None
    # Before the copies are made, so that they use empty caches too.
    with preserve_users_state(model, step.loss, with_values=True):
        return _find_error_of_copies(model, batch, step)


def _find_error_of_copies(
    model: torch.nn.Module, batch: object, step: Step
) -> Exception | None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        of_fakes = fake_copies(fake, model, batch, step)
        on_meta = step_copies(
            model,
            batch,
            step,
            copy_model=_model_on_meta,
            copy_batch=functools.partial(map_tensors, _on_meta),
            copy_tensor=_on_meta,
        )
    except Exception:  # noqa: BLE001 -- a copy that fails says nothing of the step
        return None

    error = _run_and_catch(model, of_fakes, fake)
    if error is None or is_limit_of_fakes(error):
        return None
    # Tensors on "meta" are plain ones, without values: what runs with them did not fail
    # for its shapes or types, but because a fake is no plain tensor.
    if _run_and_catch(model, on_meta, nullcontext()) is None:
        return None
    return error


def _model_on_meta(model: torch.nn.Module, copies: dict[int, Any]) -> Any:
    """Copy a module without memory; notes what is a copy of what."""
    for parameter in model.parameters():
        copies[id(parameter)] = torch.nn.Parameter(
            torch.empty_like(parameter, device="meta"),
            requires_grad=parameter.requires_grad,
        )
    for buffer in model.buffers():
        copies[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy_of_model(model, copies)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _run_and_catch(
    model: torch.nn.Module,
    copies: StepCopies,
    mode: AbstractContextManager[object],
) -> Exception | None:
    """Run a step of copies; give its error, if it has one."""
    with (
        warnings.catch_warnings(),
        preserve_random_states(),
        attention_of(copies.step, Log()),
        without_torch_logging(),
        mode,
    ):
        warnings.simplefilter("ignore")
        try:
            optimizer = make_optimizer(model, copies)
            run_step(copies.model, copies.batch, optimizer, copies.step)
        except Exception as error:  # noqa: BLE001 -- any error of the user's own
            return error
    return None
