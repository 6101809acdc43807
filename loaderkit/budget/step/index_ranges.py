"""Tells where a step reads or writes by an index that is out of range.

Rules for fake tensors look at shapes alone.  Indices are real while a step is tracked,
so that their values can be held against the sizes of what they point into, as the
kernels do.  Nothing is changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from loaderkit.budget.step.call_arguments import arguments_by_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch._ops import OpOverload

    from loaderkit.budget.step.call_arguments import Args, Kwargs

_ALONG_AN_AXIS = {
    "aten::gather": False,
    "aten::index_add": False,
    "aten::index_copy": False,
    "aten::index_fill": True,
    "aten::index_reduce": False,
    "aten::index_select": False,
    "aten::scatter": False,
    "aten::scatter_add": False,
    "aten::scatter_reduce": False,
}
"""Operators with the arguments "self", "dim" and "index", and whether they count
negative indices from the end."""
_OF_A_TABLE = ("aten::embedding", "aten::_embedding_bag")
"""Operators that look rows up: a table first, then which rows."""
_OF_ALL_ELEMENTS = ("aten::take", "aten::put")
"""Operators whose "index" counts all elements of "self", from either end."""
_BY_AXES = ("aten::index", "aten::index_put", "aten::_index_put_impl")
"""Operators with an index, or none, for each of the first axes."""
_OF_CLASSES = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")
"""Losses whose "target" chooses one of the scores in "self"."""


class _Lookup(NamedTuple):
    """An index, and what it may be."""

    values: torch.Tensor
    lowest: int
    size: int
    """One more than it may be at most."""
    ignored: int | None = None
    """A value that stands for none."""


def index_error_of(func: OpOverload, args: Args, kwargs: Kwargs) -> str | None:
    """Say which index of a call is out of range, as its kernel would.

    Args:
        func: An operator.
        args: Its positional arguments; an index that is fake is not looked at.
        kwargs: Its named ones.

    Returns:
        What is wrong; None where nothing is, or nothing is known.

    >>> x, index = torch.zeros(3), torch.tensor([0, 3])
    >>> index_error_of(torch.ops.aten.index_select.default, (x, 0, index), {})
    'aten::index_select: index 3 is out of range, it must be from 0 to 2'
    """
    # The same operator in place has an underscore behind its name.
    name = str(func._schema.name).removesuffix("_")  # noqa: SLF001 -- the way to ask
    for lookup in _lookups_of_call(name, func, args, kwargs):
        wrong = _first_out_of_range(lookup)
        if wrong is not None:
            return (
                f"{name}: index {wrong} is out of range, it must be from "
                f"{lookup.lowest} to {lookup.size - 1}"
            )
    return None


def mask_error_of(
    table: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> str | None:
    """Say which mask does not have the shape of what it chooses from.

    Args:
        table: What is read or written.
        indices: An index or a mask, or none, for the next axes of it.

    Returns:
        What is wrong; None where nothing is.

    >>> mask_error_of(torch.zeros(2, 3), [None, torch.ones(4, dtype=torch.bool)])
    'a mask of shape [4] chooses from axes of shape [3]'
    """
    axis = 0
    for index in indices:
        is_mask = index is not None and index.dtype in {torch.bool, torch.uint8}
        if index is None or not is_mask:
            axis += 1
            continue
        chosen_from = table.shape[axis : axis + index.dim()]
        if index.shape != chosen_from:
            shapes = f"{list(index.shape)} chooses from axes of shape"
            return f"a mask of shape {shapes} {list(chosen_from)}"
        axis += index.dim()
    return None


def _lookups_of_call(
    name: str, func: OpOverload, args: Args, kwargs: Kwargs
) -> Iterator[_Lookup]:
    """List the indices of a call whose values are known."""
    if name in _ALONG_AN_AXIS:
        named = arguments_by_name(func, args, kwargs)
        table, index, dim = named["self"], named["index"], named["dim"]
        # A number is a table of one element.
        size = table.shape[dim] if table.dim() else 1
        lowest = -size if _ALONG_AN_AXIS[name] else 0
        if _is_known(index):
            yield _Lookup(index, lowest, size)
    elif name in _OF_A_TABLE:
        table, index = args[:2]
        if _is_known(index):
            yield _Lookup(index, 0, table.shape[0])
    elif name in _OF_ALL_ELEMENTS:
        table, index = args[:2]
        if _is_known(index):
            yield _Lookup(index, -table.numel(), table.numel())
    elif name in _BY_AXES:
        table, indices = args[:2]
        for size, index in zip(table.shape, indices, strict=False):
            if _is_known(index):
                yield _Lookup(index, -size, size)
    elif name in _OF_CLASSES:
        named = arguments_by_name(func, args, kwargs)
        scores, target = named["self"], named["target"]
        classes = scores.shape[1] if scores.dim() > 1 else scores.shape[0]
        if _is_known(target):
            yield _Lookup(target, 0, classes, named["ignore_index"])


def _is_known(index: object) -> bool:
    return (
        isinstance(index, torch.Tensor)
        and not isinstance(index, FakeTensor)
        and index.layout is torch.strided
        and index.dtype in {torch.int64, torch.int32}
        and index.device.type == "cpu"
    )


def _first_out_of_range(lookup: _Lookup) -> int | None:
    """Find an index that is out of range; None if all are within."""
    index = lookup.values
    if not index.numel():
        return None
    # What is expanded, as scatter's index is to the width of its rows, is read once.
    for axis in reversed(range(index.dim())):
        if index.stride(axis) == 0:
            index = index.select(axis, 0)
    # Such as -100, which is out of range and stands for no class.
    if lookup.ignored is not None:
        index = index[index != lookup.ignored]
        if not index.numel():
            return None
    lowest, highest = (int(end) for end in torch.aminmax(index))
    if lowest < lookup.lowest:
        return lowest
    return highest if highest >= lookup.size else None
