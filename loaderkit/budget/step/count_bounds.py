"""Bounds counts and positions that a step computes from floats nobody knows.

``h[: int((h[:, 0] > 0).sum())]`` takes as many rows as there are at most, and
``int(scores.argmax())`` is below the number of scores.  Nothing is changed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from loaderkit.budget.step.call_arguments import arguments_by_name, tensors_in

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from loaderkit.budget.step.call_arguments import Args, Kwargs

_POSITIONS = {
    *("argmax", "argmin", "argsort", "sort", "topk", "max", "min", "mode", "median"),
    *("nanmedian", "kthvalue", "cummax", "cummin", "multinomial"),
}
"""Operators whose integers are positions along an axis, or among all elements."""
_PLACES_IN_A_TABLE = {"searchsorted": "sorted_sequence", "bucketize": "boundaries"}
"""Operators whose integers are positions in one of their arguments."""
_COUNTS = {"count_nonzero", "bincount", "histc"}
_SUMS = {"sum", "cumsum", "nansum"}
_KEEPING = {
    *("_to_copy", "mean", "max", "min", "amax", "amin", "maximum", "minimum", "clamp"),
    *("ceil", "floor", "round", "trunc", "clone", "detach", "index", "index_select"),
    *("gather", "cat", "stack", "where", "sort", "topk", "sub", "abs", "copy_"),
}
"""Operators whose results are no larger than what they are given."""


class CountBounds:
    """Follows the most that fake counts and positions can be."""

    def __init__(self) -> None:
        self._most: Any = WeakTensorKeyDictionary()

    def most(self, tensor: torch.Tensor) -> int | None:
        """Give the most that a count can be.

        Args:
            tensor: A fake tensor.

        Returns:
            The bound; None where it is no count.
        """
        most: int | None = self._most.get(tensor)
        return most

    def note(self, func: OpOverload, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Bound the counts that an operator made.

        Args:
            func: The operator.
            args: Its positional arguments.
            kwargs: Its named ones.
            out: What it gave for them.
        """
        outputs = [t for t in tensors_in(out) if isinstance(t, FakeTensor)]
        integers = [t for t in outputs if _is_integer(t)]
        operands = tensors_in((args, kwargs))
        if not operands or not (integers or any(map(self._is_count, operands))):
            return
        most = self._most_of_call(func, args, kwargs, operands)
        if most is None:
            return
        for output in integers or outputs:
            self._most[output] = most

    def _most_of_call(
        self,
        func: OpOverload,
        args: Args,
        kwargs: Kwargs,
        operands: list[torch.Tensor],
    ) -> int | None:
        name = str(func._schema.name).removeprefix("aten::")  # noqa: SLF001 -- the way to ask
        named = arguments_by_name(func, args, kwargs)
        if name in _PLACES_IN_A_TABLE:
            return int(named[_PLACES_IN_A_TABLE[name]].shape[-1])
        if name in _COUNTS:
            return _size_along(operands[0], named)
        # The integers of floats are positions; the largest of integers is one of them.
        if name in _POSITIONS and operands[0].is_floating_point():
            return _size_along(operands[0], named)
        bounds = [self._bound_of(tensor) for tensor in operands]
        if name in _SUMS and bounds[0] is not None:
            return bounds[0] * _size_along(operands[0], named)
        known = [bound for bound in bounds if bound is not None]
        if name in {"mul", "add"}:
            known += [_size_of_number(x) for x in args if isinstance(x, (int, float))]
        if not known:
            # What floats are rounded to has no bound; as many as there are is a guess.
            return max(tensor.numel() for tensor in operands)
        if name == "mean" and max(known) == 1:
            return None  # of a mask: a share, which may be 0
        if name == "mul":
            return math.prod(known)
        if name == "add":
            return sum(known)
        is_integer = any(map(_is_integer, operands))
        return max(known) if is_integer or func.is_view or name in _KEEPING else None

    def _is_count(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.bool or tensor in self._most

    def _bound_of(self, tensor: torch.Tensor) -> int | None:
        """Bound any operand: those that are real have their values."""
        if tensor.dtype == torch.bool:
            return 1
        if isinstance(tensor, FakeTensor):
            return self.most(tensor)
        is_number = tensor.numel() == 1 and not tensor.is_complex()
        return _size_of_number(float(tensor)) if is_number else None


def _size_of_number(number: float) -> int:
    """Give the next integer, without a sign; 1 for what is none."""
    return math.ceil(abs(number)) if math.isfinite(number) else 1


def _is_integer(tensor: torch.Tensor) -> bool:
    dtype = tensor.dtype
    is_number = not (dtype.is_floating_point or dtype.is_complex)
    return is_number and dtype != torch.bool


def _size_along(tensor: torch.Tensor, named: Kwargs) -> int:
    """Count the elements along the axes that a call names; all where it names none."""
    axes = named.get("dim")
    if axes is None or axes == [] or not tensor.dim():
        return int(tensor.numel())
    along = axes if isinstance(axes, (list, tuple)) else [axes]
    return math.prod(int(tensor.shape[axis]) for axis in along)
