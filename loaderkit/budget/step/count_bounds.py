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

from loaderkit.budget.step.call_arguments import (
    arguments_by_name,
    tensors_in,
    written_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._ops import OpOverload

    from loaderkit.budget.step.call_arguments import Args, Kwargs

_POSITIONS = {"argmax", "argmin", "argsort", "multinomial"}
"""Operators whose integers are positions along an axis, or among all elements."""
_VALUES_AND_POSITIONS = {
    *("sort", "topk", "max", "min", "mode", "median", "nanmedian", "kthvalue"),
    *("cummax", "cummin"),
}
"""Operators that give some of the values, and their positions after these."""
_PLACES_IN_A_TABLE = {"searchsorted": "sorted_sequence", "bucketize": "boundaries"}
"""Operators whose integers are positions in one of their arguments."""
_COUNTS = {"count_nonzero", "bincount", "histc"}
_SUMS = {"sum", "cumsum", "nansum"}
_KEEPING = {
    *("_to_copy", "mean", "amax", "amin", "maximum", "minimum", "clamp", "ceil"),
    *("floor", "round", "trunc", "clone", "detach", "cat", "stack", "where", "sub"),
    *("abs", "copy_", "index", "index_select", "gather", "take", "scatter"),
    *("scatter_", "index_put", "index_put_", "masked_select"),
}
"""Operators whose results are no larger than what they are given."""
_NO_VALUES = ("index", "indices", "mask", "condition")
"""Arguments that say which values are given, and are none of them."""


class CountBounds:
    """Follows the most that fake counts and positions can be."""

    def __init__(self) -> None:
        self._most: Any = WeakTensorKeyDictionary()
        self._overwritten_of: Any = WeakTensorKeyDictionary()
        """Fakes of real tensors that counts were written to: each use makes a new one,
        of the same key."""
        self._most_overwritten: dict[int, int] = {}

    def most(self, tensor: torch.Tensor) -> int | None:
        """Give the most that a count can be.

        Args:
            tensor: A fake tensor.

        Returns:
            The bound; None where it is no count.
        """
        most: int | None = self._most.get(tensor)
        return most

    def name_overwritten(self, fake: torch.Tensor, key: int) -> None:
        """Name a fake of a real tensor that fakes are written to.

        Args:
            fake: One of its fakes.
            key: Of the real tensor's storage.
        """
        self._overwritten_of[fake] = key
        if key in self._most_overwritten:
            self._most[fake] = self._most_overwritten[key]

    def forget_overwritten(self, key: int) -> None:
        """Forget a storage that is freed."""
        self._most_overwritten.pop(key, None)

    def note(
        self,
        func: OpOverload,
        args: Args,
        kwargs: Kwargs,
        operands: Sequence[torch.Tensor],
        out: Any,
    ) -> None:
        """Bound the counts that an operator made.

        Args:
            func: The operator.
            args: Its positional arguments.
            kwargs: Its named ones.
            operands: The tensors among them.
            out: What it gave for them.
        """
        outputs = [t for t in tensors_in(out) if isinstance(t, FakeTensor)]
        if not operands:
            return
        # Asked of each operator, and most have floats alone.
        if not self._most and all(
            tensor.dtype.is_floating_point for tensor in (*outputs, *operands)
        ):
            return
        is_about_counts = any(map(_is_integer, outputs))
        if not (is_about_counts or any(map(self._is_count, operands))):
            return
        named = arguments_by_name(func, args, kwargs)
        name = str(func._schema.name).removeprefix("aten::")  # noqa: SLF001 -- the way to ask
        for position, output in enumerate(outputs):
            # A mask needs no bound of its own: each of its elements counts for one.
            if output.dtype == torch.bool:
                continue
            most = self._most_of_output(func, name, named, position)
            if most is not None:
                self._most[output] = most
        # An operator in place gives what it has written to: the first of its outputs.
        for written in written_tensors(func, args, kwargs):
            if written in self._overwritten_of and outputs[0] in self._most:
                key = self._overwritten_of[written]
                self._most_overwritten[key] = self._most[outputs[0]]

    def _most_of_output(
        self, func: OpOverload, name: str, named: Kwargs, position: int
    ) -> int | None:
        """Bound one of the results of a call.

        Args:
            func: The operator.
            name: Its name.
            named: Its arguments.
            position: Of the result.
        """
        read = {
            argument: v for argument, v in named.items() if argument not in _NO_VALUES
        }
        operands = tensors_in(read)
        # Not one less: a number beyond the last of the table has that place.
        if name in _PLACES_IN_A_TABLE:
            return int(named[_PLACES_IN_A_TABLE[name]].shape[-1])
        if name in _COUNTS:
            return _size_along(operands[0], named)
        if name in _VALUES_AND_POSITIONS and position == 0:
            return self._bound_of(operands[0])
        if name in _POSITIONS | _VALUES_AND_POSITIONS:
            # The last position: one more is none, and an index that raises.
            return max(_size_along(operands[0], named) - 1, 0)
        bounds = [self._bound_of(tensor) for tensor in operands]
        if name in _SUMS and bounds[0] is not None:
            return bounds[0] * _size_along(operands[0], named)
        known = [bound for bound in bounds if bound is not None]
        if name in {"mul", "add"}:
            both = (named["self"], named["other"])
            numbers = [value for value in both if isinstance(value, (int, float))]
            known += map(_size_of_number, numbers)
        if not known:
            # What floats are rounded to has no bound; as many as there are is a guess.
            return max(tensor.numel() for tensor in operands)
        if name == "mean" and max(known) == 1:
            return None  # of a mask: a share, which may be 0
        if name == "mul":
            return math.prod(known)
        if name == "add":
            return sum(known)
        # Of integers an operator that is not named here is taken to keep them in range,
        # as most do; of floats (exp, div by a share) it is not.
        is_integer = any(map(_is_integer, operands))
        if is_integer or func.is_view or name in _KEEPING:
            return max(known)
        return None

    def _is_count(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.bool or tensor in self._most

    def _bound_of(self, tensor: torch.Tensor) -> int | None:
        """Bound any operand: those that are real have their values."""
        if tensor.dtype == torch.bool:
            return 1
        if isinstance(tensor, FakeTensor):
            return self.most(tensor)
        is_known = tensor.numel() == 1 or _is_integer(tensor)
        if not is_known or not tensor.numel() or tensor.is_complex():
            return None
        return _size_of_number(float(tensor.max()))


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
