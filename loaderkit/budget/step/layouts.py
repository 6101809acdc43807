"""The order of axes that kernels give, where torch's rules for fakes say another.

Images in channels-last order stay so in some kernels and not in others, and a fake
follows rules written apart from the kernels: ``log_sigmoid`` of a channels-last image
is contiguous for real and channels-last as a fake, ``upsample_bilinear2d`` of one
channel the other way round.  Every kernel after it then runs another algorithm than the
one that is tracked: peaks were 10 % too low, and 40 % too high.  So where an operand is
channels-last, the call is made once for real with small operands, and its outputs tell.

A view of an axis of one element may have any stride there, and a fake has another than
the kernels give.  A convolution reads from the strides of a batch of one how its axes
are ordered: tokens seen as an image had peaks 51 % too low, and 45 % too high.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_iter, tree_map

from loaderkit.budget.step.fake_tensors import is_fake
from loaderkit.budget.step.kernel_calls import TensorSpec, call_of, smaller_calls
from loaderkit.budget.step.kernels import invent_arguments, is_safe_to_run
from loaderkit.budget.step.newest import newest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from torch._ops import OpOverload

    from loaderkit.budget.step.call_arguments import Args, Kwargs
    from loaderkit.budget.step.kernel_calls import KernelCall

_FORMATS = {
    4: (torch.contiguous_format, torch.channels_last),
    5: (torch.contiguous_format, torch.channels_last_3d),
}
_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)  # noqa: SLF001 -- an operator
_MOST_REMEMBERED = 10_000
"""Calls; chosen."""
_MOST_KEPT = 500
"""Calls that are kept from one estimate to the next; chosen: those of a few models."""
_FOLLOWED = (
    *(_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm),
    *(_aten.clone, _aten._to_copy),  # noqa: SLF001 -- an operator
)
"""Operators whose fakes have the order of axes that kernels give, and that models call
most.  So have all that torch tags as pointwise."""


class OutputLayouts:
    """Learns the layouts of outputs from small real calls, and remembers them."""

    def __init__(self) -> None:
        self._seen: dict[KernelCall, tuple[torch.memory_format | None, ...]] = {}
        self._orders: dict[object, tuple[_Order | None, ...]] = {}
        """By a call without its sizes."""

    def clear(self) -> None:
        """Forget everything."""
        self._seen.clear()
        self._orders.clear()

    def trim(self) -> None:
        """Forget all but the newest calls."""
        self._seen = newest(self._seen, _MOST_KEPT)
        self._orders = newest(self._orders, _MOST_KEPT)

    def corrected(
        self,
        func: OpOverload,
        args: Args,
        kwargs: Kwargs,
        operands: Sequence[Any],
        out: Any,
    ) -> Any:
        """Give the outputs of a fake call in the layout that the kernel gives them.

        Args:
            func: An operator overload of aten.
            args: Its positional arguments.
            kwargs: Its named ones.
            operands: The tensors among them.
            out: What the call with fakes gave.

        Returns:
            The same where all operands are contiguous, or nothing else was seen; else
            fakes with other strides.
        """
        if func in _VIEWS:
            return _with_strides_of_kernels(args[0], out)
        returns = func._schema.returns  # noqa: SLF001 -- the way to ask
        if any(returned.alias_info is not None for returned in returns):
            # A view, or an operand that was written to.
            return out
        if not any(map(is_channels_last, operands)):
            if all(operand.is_contiguous() for operand in operands):
                return out
            return self._in_order_of_axes(func, args, kwargs, out)
        fakes = [leaf for leaf in tree_iter(out) if is_fake(leaf)]
        if not any(fake.dim() in _FORMATS for fake in fakes):
            return out
        call = call_of(func, args, kwargs)
        if call is None:
            return out
        formats = iter(self._formats_of(call))

        def restride(leaf: object) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            seen_format = next(formats, None)
            if seen_format is None or not is_fake(leaf):
                return leaf
            strides = strides_of(leaf.shape, seen_format)
            if leaf.stride() == strides:
                return leaf
            return leaf.new_empty_strided(leaf.shape, strides)

        return tree_map(restride, out)

    def _in_order_of_axes(
        self, func: OpOverload, args: Args, kwargs: Kwargs, out: Any
    ) -> Any:
        """Give the outputs of a call with their axes in the order of the kernel's."""
        if torch.Tag.pointwise in func.tags or func.overloadpacket in _FOLLOWED:
            return out
        if not any(is_fake(leaf) and leaf.dim() > 1 for leaf in tree_iter(out)):
            return out
        call = call_of(func, args, kwargs)
        if call is None or call.sparse_tensors:
            return out
        orders = iter(self._orders_of(call))

        def restride(leaf: object) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            order = next(orders, None)
            if order is None or not is_fake(leaf) or order == _order_of(leaf):
                return leaf
            if set(order) != {
                axis for axis in range(leaf.dim()) if leaf.shape[axis] != 1
            }:
                # The small call had one element where this has several.
                return leaf
            strides = _strides_in_order(leaf.shape, order)
            return leaf.new_empty_strided(leaf.shape, strides)

        return tree_map(restride, out)

    def _orders_of(self, call: KernelCall) -> tuple[_Order | None, ...]:
        # In a tuple of its own, since a name is equal to no number.
        leaves = tuple(
            _layout_of(leaf) if isinstance(leaf, TensorSpec) else (type(leaf), leaf)
            for leaf in call.leaves
        )
        key = call.func, call.structure, leaves
        if key not in self._orders:
            if len(self._orders) > _MOST_REMEMBERED:
                self._orders.clear()
            outputs = _outputs_of_small_call(call)
            self._orders[key] = tuple(map(_order_of, outputs))
        return self._orders[key]

    def _formats_of(self, call: KernelCall) -> tuple[torch.memory_format | None, ...]:
        if call not in self._seen:
            # All at once: which of them a later step makes again nobody knows.
            if len(self._seen) > _MOST_REMEMBERED:
                self._seen.clear()
            outputs = _outputs_of_small_call(call)
            self._seen[call] = tuple(map(_format_of, outputs))
        return self._seen[call]


def _with_strides_of_kernels(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Give a fake view the strides that kernels give one, which "meta" tensors have.

    Args:
        tensor: What is viewed.
        view: The fake view of it.

    Returns:
        The same, or another view of that shape.
    """
    if 1 not in view.shape:
        return view
    like_kernels = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    strides = like_kernels.view(view.shape).stride()
    if strides == view.stride():
        return view
    return view.as_strided(view.shape, strides)


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Tell an image whose strides are those of channels-last, and not contiguous.

    >>> is_channels_last(torch.empty(2, 1, 4, 4).to(memory_format=torch.channels_last))
    True
    >>> is_channels_last(torch.empty(2, 1, 4, 4))
    False
    """
    if tensor.dim() not in _FORMATS or tensor.layout is not torch.strided:
        return False
    plain, last = _FORMATS[tensor.dim()]
    strides: tuple[int, ...] = tuple(tensor.stride())
    return strides == strides_of(tensor.shape, last) != strides_of(tensor.shape, plain)


def strides_of(
    shape: Sequence[int], memory_format: torch.memory_format
) -> tuple[int, ...]:
    """Give the strides of a tensor in a layout.

    Args:
        shape: Sizes ``[N, C, ...]``.
        memory_format: Contiguous or channels-last.

    Returns:
        Elements from one to the next, of each axis.

    >>> strides_of((2, 3, 4, 5), torch.channels_last)
    (60, 1, 15, 3)
    """
    axes = [*range(len(shape))]
    if memory_format is not torch.contiguous_format:
        axes = [0, *range(2, len(shape)), 1]
    return strides_of_axes(shape, axes)


def _outputs_of_small_call(call: KernelCall) -> list[torch.Tensor]:
    """Make a call once with small operands; nothing where that cannot be done."""
    # The first of the first way to shrink it that there is.
    ways = [calls for calls in smaller_calls(call) if calls]
    if not ways:
        return []
    small = ways[0][0]
    if not is_safe_to_run(small):
        return []
    try:
        args, kwargs = invent_arguments(small)
        result = small.func(*args, **kwargs)
    except Exception:  # noqa: BLE001 -- values were invented: any operator may refuse
        return []
    return [leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor)]


_Order: TypeAlias = "tuple[int, ...]"
"""Axes of more than one element, from the outermost to the innermost."""


def _order_of(tensor: torch.Tensor) -> _Order | None:
    """Tell in which order the axes of a tensor are; None of one that has gaps.

    >>> _order_of(torch.empty(2, 1, 3, 4).transpose(2, 3))
    (0, 3, 2)
    """
    strides, shape = tensor.stride(), tensor.shape
    axes = [axis for axis in range(tensor.dim()) if shape[axis] != 1]
    order = tuple(sorted(axes, key=lambda axis: -strides[axis]))
    dense = _strides_in_order(shape, order)
    has_gaps = any(strides[axis] != dense[axis] for axis in order)
    return None if has_gaps or tensor.numel() == 0 else order


def _strides_in_order(shape: Sequence[int], order: _Order) -> tuple[int, ...]:
    """Give the strides of a tensor without gaps, whose axes are in an order.

    >>> _strides_in_order((2, 1, 4, 3), (0, 3, 2))
    (12, 4, 1, 4)
    """
    strides = list(strides_of_axes(shape, order))
    # That of an axis of one element reads nothing: it is what the axes behind it take.
    behind = 1
    for axis in reversed(range(len(shape))):
        if axis in order:
            behind = strides[axis] * shape[axis]
        else:
            strides[axis] = behind
    return tuple(strides)


def strides_of_axes(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Give the strides of a tensor without gaps whose axes lie in an order.

    Args:
        shape: Sizes.
        order: Axes from the outermost to the innermost; the stride of others is 0.

    >>> strides_of_axes((2, 1, 4, 3), (0, 3, 2)), strides_of_axes((2, 0), (0, 1))
    ((12, 0, 1, 4), (1, 1))
    """
    strides, stride = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = stride
        stride *= max(int(shape[axis]), 1)
    return tuple(strides)


def _layout_of(spec: TensorSpec) -> tuple[object, ...]:
    """Describe how an operand lies, without its sizes."""
    axes = [axis for axis, size in enumerate(spec.shape) if size != 1]
    order = tuple(sorted(axes, key=lambda axis: -spec.stride[axis]))
    is_expanded = tuple(spec.stride[axis] == 0 for axis in axes)
    stride, has_gaps = 1, []
    for axis in reversed(order):
        has_gaps.append(spec.stride[axis] > stride)
        stride = spec.stride[axis] * spec.shape[axis]
    return len(spec.shape), order, is_expanded, tuple(has_gaps), spec.dtype


def _format_of(tensor: torch.Tensor) -> torch.memory_format | None:
    """Name the layout of an image; None of anything else, or where it is not told."""
    if tensor.dim() not in _FORMATS or not math.prod(tensor.shape):
        return None
    strides = tuple(tensor.stride())
    fitting = [
        memory_format
        for memory_format in _FORMATS[tensor.dim()]
        if strides == strides_of(tensor.shape, memory_format)
    ]
    # An image of one channel or one pixel fits both.
    return fitting[0] if len(fitting) == 1 else None


LAYOUTS = OutputLayouts()
"""Of this process: what a kernel gives does not change."""
