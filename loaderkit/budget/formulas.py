"""Tells which formulas of autograd take other storages while a dispatch mode is active.

Some formulas ask whether any mode is active and then avoid working in place or looking
at values.  A tracked step is under a mode, a training is not.  So the backward pass of
each kind of call is made twice for real, on small operands, under torch's profiler:
with a mode that changes nothing, and without.  Where both take the same, so does
the tracked step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from loaderkit.budget.accumulation import in_place_of, references_alone, reused_operand
from loaderkit.budget.kernel_calls import KernelCall, TensorSpec, smaller_calls
from loaderkit.budget.kernels import invented_arguments, memory_by_marker
from loaderkit.budget.memory_profile import memory_profile

if TYPE_CHECKING:
    from collections.abc import Iterable

_MARKER = "loaderkit formula "
_ROUNDING_BYTES = 64
"""Numbers turned into tensors: the two ways may differ by some of them."""


class DifferentiatedCall(NamedTuple):
    """A call of the forward pass, and which of its operands get a gradient."""

    call: KernelCall
    with_grad: tuple[bool, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """What a formula may depend on: which sizes are equal, not what they are."""
        names: dict[int, int] = {1: 1}  # a size of one is expanded to others

        def pattern(spec: TensorSpec) -> tuple[int, ...]:
            return tuple(names.setdefault(size, -len(names)) for size in spec.shape)

        leaves = tuple(
            (pattern(leaf), leaf.dtype)
            if isinstance(leaf, TensorSpec)
            else leaf
            if isinstance(leaf, (bool, type(None)))
            else None
            for leaf in self.call.leaves
        )
        return (self.call.func, leaves, self.with_grad)


class Formula(NamedTuple):
    """How the backward pass of a call compares without a mode."""

    node: str
    """Autograd's name for it, such as "MulBackward0"."""
    times: float
    """What it takes at its highest without a mode, for one byte with one."""


class FormulaProbe:
    """Learns which formulas differ, and remembers it."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], Formula | None] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._seen.clear()

    def different(self, calls: Iterable[DifferentiatedCall]) -> dict[str, float]:
        """Find formulas that differ.

        Args:
            calls: Of the forward pass.

        Returns:
            How many times more (or less) they take without a mode, by autograd's name.
        """
        by_key = {each.key: each for each in calls}
        new = [each for key, each in by_key.items() if key not in self._seen]
        if len(self._seen) > 5_000:
            self._seen.clear()
        if new:
            for each, formula in zip(new, _compared(new), strict=True):
                self._seen[each.key] = formula
        formulas = [self._seen.get(key) for key in by_key]
        return {f.node: f.times for f in formulas if f is not None and f.times != 1.0}


class _AsTracked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes nothing, but that what a tracker takes for in place is so."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if reused_operand(func, args, real=True) is not None:
            func = in_place_of(func)
        return func(*args, **(kwargs or {}))


def _compared(calls: list[DifferentiatedCall]) -> list[Formula | None]:
    """Make the backward passes under one profile."""
    nodes: dict[int, str] = {}
    references_alone()  # looked up outside of any mode
    with (
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        memory_profile() as profiled,
    ):
        for number, each in enumerate(calls):
            node = _backward_twice(each, number)
            if node is not None:
                nodes[number] = node
    taken = memory_by_marker(profiled, _MARKER)
    formulas: list[Formula | None] = [None] * len(calls)
    for number, node in nodes.items():
        plain = taken.get(2 * number, (0, 0))[0]
        under_mode = taken.get(2 * number + 1, (0, 0))[0]
        same = abs(plain - under_mode) <= _ROUNDING_BYTES
        formulas[number] = Formula(node, 1.0 if same else plain / max(under_mode, 1))
    return formulas


def _backward_twice(each: DifferentiatedCall, number: int) -> str | None:
    """Name the formula; None if the call or its backward pass cannot be made."""
    ways = smaller_calls(each.call)
    if not ways[0]:
        return None
    if each.call.crashes_without_gradient and not each.with_grad[0]:
        return None
    try:
        node = _backward(ways[0][0], each.with_grad, 2 * number, under_mode=False)
        _backward(ways[0][0], each.with_grad, 2 * number + 1, under_mode=True)
    except Exception:  # noqa: BLE001 -- values were invented: any operator may refuse
        return None
    return node


def _backward(
    call: KernelCall, with_grad: tuple[bool, ...], number: int, *, under_mode: bool
) -> str | None:
    values, tree = tree_flatten(invented_arguments(call))
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    chosen = [t for t, wanted in zip(tensors, with_grad, strict=True) if wanted]
    operands = [t.requires_grad_() for t in chosen]
    # an operator may work in place, which a leaf refuses; cloning takes nothing
    twins = {id(t): t.clone() for t in operands}
    args, kwargs = tree_unflatten([twins.get(id(v), v) for v in values], tree)
    outputs = [
        t
        for t in tree_iter(call.func(*args, **kwargs))
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    if not outputs or outputs[0].grad_fn is None:
        return None
    grads = [torch.ones_like(output) for output in outputs]
    node = str(outputs[0].grad_fn.name())
    del args, kwargs, twins
    if not under_mode:
        with record_function(f"{_MARKER}{number}"):
            torch.autograd.grad(outputs, operands, grads, allow_unused=True)
        return node
    with record_function(f"{_MARKER}{number}"), _AsTracked():  # type: ignore[no-untyped-call]
        torch.autograd.grad(outputs, operands, grads, allow_unused=True)
    return node


FORMULAS = FormulaProbe()
"""What this process has learnt so far."""
