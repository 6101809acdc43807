"""What operators give whose results depend on values that fake tensors do not have.

Where the values were computed (``real_values``) the operator runs with them; else they
are assumed (``assumed_scalars``, ``count_bounds``), and the log says so.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter, tree_map

from loaderkit.budget.step.assumed_scalars import AssumedScalars
from loaderkit.budget.step.call_arguments import arguments_by_name
from loaderkit.budget.step.count_bounds import CountBounds
from loaderkit.budget.step.fake_tensors import SMALL_BYTES, is_fake, is_inexact
from loaderkit.budget.step.kernel_calls import operator_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensorMode

    from loaderkit.budget.step.allocation_log import Log
    from loaderkit.budget.step.assumed_scalars import Assumed
    from loaderkit.budget.step.call_arguments import Args, Kwargs
    from loaderkit.budget.step.real_values import RealValues, Value

_aten = torch.ops.aten
MASK_TYPES = (torch.bool, torch.uint8)
"""What an index may be that chooses elements, and does not number them."""
_COMPARISONS = (_aten.equal.default, _aten.allclose.default)
"""Operators that give no tensor but a condition."""

# Assumptions, as they are told.
ALL_CHOSEN = "every element is chosen"
CHOSEN_NOW = "as many elements as are chosen with the present parameters"
SCALAR = "a scalar's value"
SCALAR_NOW = "a scalar's value, with the present parameters"


class ValueAnswers:
    """Answers operators that read values, and notes what it assumed."""

    def __init__(
        self,
        log: Log,
        *,
        fake: FakeTensorMode,
        assumed: Assumed,
        values: RealValues | None,
    ) -> None:
        """Begin a step.

        Args:
            log: Gets the assumptions.
            fake: Makes the fakes of the step.
            assumed: What masks and scalars of unknown values are taken for.
            values: Those that are computed beside the fakes.
        """
        self.log, self.values = log, values
        self._fake = fake
        self._share_chosen = assumed.share
        self._scalars = AssumedScalars(assumed)
        self.counts = CountBounds()

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """Give what a tensor stands for; None if it is not known."""
        return None if self.values is None else self.values.of(tensor)

    def note_assumption(self, what: str, operator: str) -> None:
        """Count an assumption, by the operator that asked."""
        self.log.assumptions[what, operator] += 1

    def run(
        self, func: OpOverload, args: Args, kwargs: Kwargs, *, is_torchs_update: bool
    ) -> Any:
        """Run an operator whose result depends on values, or assume some.

        Args:
            func: The operator.
            args: Its positional arguments.
            kwargs: Its named ones.
            is_torchs_update: Whether an optimizer of torch's asks, which takes no other
                branch for what it reads.
        """
        is_scalar = func is _aten._local_scalar_dense.default
        fakes = [leaf for leaf in tree_iter((args, kwargs)) if is_fake(leaf)]
        values = [self.value_of(fake) for fake in fakes]
        known = [value for value in values if value is not None]
        if len(known) == len(fakes):
            is_trained = any(value.trained for value in known)
            if is_trained:
                assumption = SCALAR_NOW if is_scalar else CHOSEN_NOW
                self.note_assumption(assumption, operator_name(func))
            real_args = tree_map(self._real_value, args)
            real_kwargs = tree_map(self._real_value, kwargs)
            real = func(*real_args, **real_kwargs)
            as_fake = functools.partial(self._as_fake, is_trained=is_trained)
            return tree_map(as_fake, real)
        if is_scalar or func in _COMPARISONS:
            dtype, most = torch.bool, None
            if is_scalar:
                dtype, most = args[0].dtype, self.counts.most(args[0])
            if not is_torchs_update:
                self._note_scalar(func, dtype, most)
            return self._scalars.read(dtype, most)
        return self._with_share_chosen(func, args, kwargs)

    def _note_scalar(
        self, func: OpOverload, dtype: torch.dtype, most: int | None
    ) -> None:
        self.note_assumption(SCALAR, operator_name(func))
        if dtype == torch.bool:
            self.log.assumed_conditions += 1
        elif dtype.is_floating_point and most is None:
            self.log.assumed_numbers += 1

    def _real_value(self, leaf: object) -> Any:
        value = self.value_of(leaf) if isinstance(leaf, FakeTensor) else None
        return leaf if value is None else value.real

    def _as_fake(self, leaf: object, *, is_trained: bool) -> Any:
        """Fake a float that was computed for real, and remember its value."""
        if not isinstance(leaf, torch.Tensor) or not is_inexact(leaf.dtype):
            return leaf
        fake = self._fake.from_tensor(leaf)
        if self.values is not None:
            self.values.name_value(fake, leaf, trained=is_trained)
        return fake

    def _with_share_chosen(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Assume how many elements a mask of unknown values chooses."""
        if func is _aten.nonzero.default:
            self._note_all_chosen(func)
            return self._chosen_positions(args[0].shape)
        if func is _aten.masked_select.default:
            return self._selected_by_mask(func, *args)
        if func is _aten.bincount.default:
            # The largest value decides, of which nothing is known; who names a length
            # names the one that is asked for.
            self._note_all_chosen(func)
            count = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
            with self._fake:
                return args[0].new_empty(count or self._chosen_of(args[0].shape))
        if func is _aten._unique2.default:
            return self._distinct_values(func, arguments_by_name(func, args, kwargs))
        with self._fake:
            return func(*args, **kwargs)

    def _note_all_chosen(self, func: OpOverload) -> None:
        self.note_assumption(ALL_CHOSEN, operator_name(func))

    def _selected_by_mask(
        self, func: OpOverload, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Give as many elements as a mask chooses, or is assumed to."""
        shape = np.broadcast_shapes(values.shape, mask.shape)
        if isinstance(mask, FakeTensor):
            self._note_all_chosen(func)
            count = self._chosen_of(shape)
        else:
            count = int(mask.expand(shape).sum())
        with self._fake:
            return values.new_empty((count,))

    def _distinct_values(
        self, func: OpOverload, named: Kwargs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Assume how many values are distinct; where the others are, and how many."""
        self._note_all_chosen(func)
        values = named["self"]
        count = self._chosen_of(values.shape)
        positions = counts = torch.empty(0, dtype=torch.int64)
        if named["return_inverse"]:
            positions = torch.arange(values.numel()).clamp_(max=count - 1)
            positions = positions.view(values.shape)
        if named["return_counts"]:
            counts = torch.ones(count, dtype=torch.int64)
        with self._fake:
            distinct = values.new_empty((count,))
        return distinct, positions, counts

    def positions_of_masks(
        self, indices: Sequence[torch.Tensor | None], func: OpOverload
    ) -> tuple[list[Any], int]:
        """Turn masks into positions, so that shapes are known; give their bytes too.

        The kernel makes the same list of positions, and gives it back.

        Args:
            indices: Of an operator that indexes, an axis each or a mask of several.
            func: The operator.
        """
        positions: list[torch.Tensor | None] = []
        listed_bytes = 0
        for index in indices:
            if index is None or index.dtype not in MASK_TYPES:
                positions.append(index)
                continue
            value = self.value_of(index) if isinstance(index, FakeTensor) else None
            if value is not None and value.trained:
                self.note_assumption(CHOSEN_NOW, operator_name(func))
            if isinstance(index, FakeTensor) and value is None:
                self._note_all_chosen(func)
                chosen = self._chosen_positions(index.shape)
            else:
                chosen = torch.nonzero(index if value is None else value.real)
            listed_bytes += chosen.numel() * chosen.itemsize
            positions.extend(chosen.unbind(1))
        return positions, listed_bytes

    def _chosen_of(self, shape: Sequence[int]) -> int:
        """Count the assumed share of the elements, one at least."""
        total = int(math.prod(shape))
        return min(total, max(1, round(self._share_chosen * total)))

    def _chosen_positions(self, shape: Sequence[int]) -> torch.Tensor:
        """List the first of the elements; fake where the list is large itself."""
        count = self._chosen_of(shape)
        nbytes = count * len(shape) * torch.int64.itemsize
        if nbytes > SMALL_BYTES:
            with self._fake:
                return torch.empty((count, len(shape)), dtype=torch.int64)
        if not shape:
            return torch.zeros((count, 0), dtype=torch.int64)
        axes = np.unravel_index(np.arange(count), tuple(shape))
        columns = [torch.from_numpy(np.ascontiguousarray(axis)) for axis in axes]
        return torch.stack(columns, 1)
