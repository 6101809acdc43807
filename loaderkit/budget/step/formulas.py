"""Tells which formulas of autograd take other storages while a dispatch mode is active.

Some formulas ask whether any mode is active and then avoid working in place or looking
at values.  A tracked step is under a mode, a training is not.  So the backward pass of
each kind of call is made twice for real, on small operands, under torch's profiler:
with a mode that changes nothing, and without.  Where both take the same, so does
the tracked step.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from loaderkit.budget.step.accumulation import (
    in_place_of,
    references_alone,
    reused_operand,
)
from loaderkit.budget.step.call_arguments import (
    flatten_call,
    rebuild_call,
    tensors_in,
)
from loaderkit.budget.step.kernel_calls import (
    KernelCall,
    SparseSpec,
    TensorSpec,
    operator_name,
    smaller_calls,
)
from loaderkit.budget.step.kernels import (
    RangeMemory,
    invent_arguments,
    is_safe_to_run,
    memory_by_marker,
)
from loaderkit.budget.step.memory_profile import memory_profile
from loaderkit.budget.step.newest import newest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch._ops import OpOverload

    from loaderkit.budget.step.call_arguments import Args, Kwargs

_MARKER = "loaderkit formula "
_ROUNDING_BYTES = 64
"""Numbers turned into tensors: the two ways may differ by some of them.  Chosen: eight
of 8 bytes."""
_MOST_REMEMBERED = 5_000
"""Calls; chosen."""
_MOST_KEPT = 500
"""Those that are kept from one estimate to the next; chosen: those of a few models."""


class DifferentiatedCall(NamedTuple):
    """A call of the forward pass, and which of its operands get a gradient."""

    call: KernelCall
    with_grad: tuple[bool, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """What a formula may depend on: which sizes are equal, not what they are."""
        # A size of one is expanded to others, so it is told apart from them.
        names: dict[int, int] = {1: 1}

        def pattern(spec: TensorSpec | SparseSpec) -> tuple[int, ...]:
            return tuple(names.setdefault(size, -len(names)) for size in spec.shape)

        def key_of(leaf: object) -> Any:
            if isinstance(leaf, TensorSpec):
                return (pattern(leaf), leaf.dtype)
            if isinstance(leaf, SparseSpec):
                return (pattern(leaf), leaf.dtype, leaf.sparse_dim, leaf.is_coalesced)
            # A switch may choose another formula; a number is a size, or a factor.
            return leaf if isinstance(leaf, bool) else None

        leaves = tuple(key_of(leaf) for leaf in self.call.leaves)
        return (self.call.func, leaves, self.with_grad)


class Formula(NamedTuple):
    """How the backward pass of a call compares without a mode."""

    node: str
    """Autograd's name for it, such as "MulBackward0", or what it begins with."""
    times: float | None
    """What it takes at its highest without a mode, for one byte with one; None where no
    small call like it could be made."""


class FormulaProbe:
    """Learns which formulas differ, and remembers it."""

    def __init__(self) -> None:
        self._formulas: dict[tuple[Any, ...], Formula | None] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._formulas.clear()

    def trim(self) -> None:
        """Forget all but the newest formulas."""
        self._formulas = newest(self._formulas, _MOST_KEPT)

    def different(self, calls: Iterable[DifferentiatedCall]) -> list[Formula]:
        """Find formulas that differ, or of which it is not known.

        Args:
            calls: Of the forward pass.

        Returns:
            These, each once.
        """
        by_key = {
            differentiated.key: differentiated
            for differentiated in calls
            if not differentiated.call.has_plain_formula
        }
        if len(self._formulas) + len(by_key) > _MOST_REMEMBERED:
            self._formulas.clear()
        new_calls = [call for key, call in by_key.items() if key not in self._formulas]
        if new_calls:
            formulas = _compare_backward_passes(new_calls)
            for differentiated, formula in zip(new_calls, formulas, strict=True):
                self._formulas[differentiated.key] = formula
        known = dict.fromkeys(self._formulas[key] for key in by_key)
        return [f for f in known if f is not None and f.times != 1.0]


class _AsTracked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes nothing, but that what a tracker takes for in place is so.

    Sums are not: here each operand is one of its own, so that no gradients meet.
    """

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        is_sum = func is torch.ops.aten.add.Tensor
        if not is_sum and reused_operand(func, args, real=True) is not None:
            func = in_place_of(func)
        return func(*args, **(kwargs or {}))


def guess_node(name: str) -> str:
    """Guess what autograd's name of a formula begins with, as its generator makes it.

    >>> guess_node("aten::addmm_.default")
    'AddmmBackward'
    """
    words = name.removeprefix("aten::").partition(".")[0].split("_")
    return "".join(word.capitalize() for word in words) + "Backward"


def _compare_backward_passes(calls: list[DifferentiatedCall]) -> list[Formula | None]:
    """Make the backward passes under one profile.

    Returns:
        For each call its formula; None where no output of it has one.
    """
    tries: list[_RepeatedBackward] = []
    # Looked up here, since it cannot be under a mode.
    references_alone()
    with (
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        memory_profile() as profiled,
    ):
        for call_number, differentiated in enumerate(calls):
            tries += _backward_twice(differentiated, call_number, len(tries))
    taken = memory_by_marker(profiled, _MARKER)

    formulas: list[Formula | None] = [
        Formula(guess_node(operator_name(call.func)), None) for call, _ in calls
    ]
    nothing = RangeMemory(0, 0)
    for number, (call_number, node) in enumerate(tries):
        if node is None:
            formulas[call_number] = None
            continue
        plain = taken.get(2 * number, nothing).highest
        under_mode = taken.get(2 * number + 1, nothing).highest
        is_same = abs(plain - under_mode) <= _ROUNDING_BYTES
        times = 1.0 if is_same else plain / max(under_mode, 1)
        formulas[call_number] = Formula(node, times)
    return formulas


class _RepeatedBackward(NamedTuple):
    """A small call whose backward pass was made twice."""

    call_number: int
    """Of the call it is like."""
    node: str | None
    """Autograd's name of its formula; None where no output has one."""


def _backward_twice(
    differentiated: DifferentiatedCall, call_number: int, number: int
) -> list[_RepeatedBackward]:
    """Make a call small, and its backward pass without a mode and under one.

    Args:
        differentiated: The call.
        call_number: Its number.
        number: Of the try; it numbers the two ranges in the profile.

    Returns:
        What succeeded; nothing if the call or its backward pass cannot be made.
    """
    call, with_grad = differentiated
    if call.crashes_without_gradient and not with_grad[0]:
        return []
    for calls in smaller_calls(call):
        if not calls:
            continue
        try:
            if not is_safe_to_run(calls[0]):
                continue
            node = _run_backward_pass(calls[0], with_grad, 2 * number, under_mode=False)
            _run_backward_pass(calls[0], with_grad, 2 * number + 1, under_mode=True)
        except Exception:  # noqa: BLE001 -- values were invented
            continue
        return [_RepeatedBackward(call_number, node)]
    return []


def _run_backward_pass(
    call: KernelCall, with_grad: tuple[bool, ...], number: int, *, under_mode: bool
) -> str | None:
    """Run a small call and its backward pass, the latter in a numbered range.

    Args:
        call: Small enough to be made.
        with_grad: Which of its operands get a gradient.
        number: Of the range in the profile.
        under_mode: Whether the backward pass runs as it is tracked.

    Returns:
        Autograd's name of the formula; None where no output has a gradient.
    """
    values, structure = flatten_call(*invent_arguments(call))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    operands = [
        tensor.requires_grad_()
        for tensor, has_grad in zip(tensors, with_grad, strict=True)
        if has_grad
    ]
    # An operator may work in place, which a leaf refuses; the backward pass of a clone
    # takes nothing.
    clones = {id(operand): operand.clone() for operand in operands}
    arguments = [clones.get(id(value), value) for value in values]
    args, kwargs = rebuild_call(arguments, structure)

    outputs = [
        output
        for output in tensors_in(call.func(*args, **kwargs))
        if output.requires_grad
    ]
    if not outputs or outputs[0].grad_fn is None:
        return None
    grads = [torch.ones_like(output) for output in outputs]
    node = str(outputs[0].grad_fn.name())

    # As in a training, nobody but autograd holds the operands.
    del args, kwargs, arguments, clones
    mode: AbstractContextManager[object] = nullcontext()
    if under_mode:
        mode = _AsTracked()  # type: ignore[no-untyped-call]
    with record_function(f"{_MARKER}{number}"), mode:
        torch.autograd.grad(outputs, operands, grads, allow_unused=True)
    return node


FORMULAS = FormulaProbe()
"""What this process has learnt so far."""
