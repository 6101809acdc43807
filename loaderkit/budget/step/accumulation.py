"""Tells where autograd would work in place, if no dispatch mode were active.

While a mode sees every operator, autograd's own formulas use operators that leave their
operands alone (``areAnyTensorSubclassLike`` in torch's ``FunctionsManual.cpp`` and
``input_buffer.cpp``): a new buffer where a training has none.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._ops import OpOverload

    from loaderkit.budget.step.call_arguments import Args, Kwargs

_aten = torch.ops.aten
_IN_PLACE = {
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.index_add.default: _aten.index_add_.default,
    _aten.index_put.default: _aten.index_put_.default,
    _aten.put.default: _aten.put_.default,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter.value: _aten.scatter_.value,
    _aten.scatter_add.default: _aten.scatter_add_.default,
}
"""Operators that stand for their in-place twins in formulas of the backward pass."""
_IN_PLACE_IN_FORMULA = {
    "BinaryCrossEntropyWithLogitsBackward": {
        _aten.mul.Tensor: _aten.mul_.Tensor,
        _aten.sub.Tensor: _aten.sub_.Tensor,
    },
}
"""The same in some formulas only, by what their names begin with: others multiply into
new tensors, with a mode or without."""
_TWINS_IN_A_ROW = 2
"""Before the last one in these formulas, at most."""
_CLEARING = (
    "IndexPutBackward",
    "PutBackward",
    "ScatterBackward",
    "ScatterReduceBackward",
)
"""Formulas that clear places of the gradient that came in: in a new buffer, always."""


def in_place_of(func: OpOverload) -> Any:
    """Give the twin of an operator that writes into its first operand."""
    return _in_place_twins()[func]


def _in_place_twins() -> dict[Any, Any]:
    """Give the operators that stand for their twins in the formula that runs."""
    node = node_name()
    for name, twins in _IN_PLACE_IN_FORMULA.items():
        if node.startswith(name):
            return _IN_PLACE | twins
    return _IN_PLACE


def reused_operand(
    func: OpOverload, args: Args, *, real: bool = False
) -> torch.Tensor | None:
    """Find the buffer that autograd, without a mode, would write into.

    Args:
        func: An operator that runs in the backward pass.
        args: Its arguments.
        real: Whether real tensors are asked about, and not fake ones.

    Returns:
        The first operand, if autograd alone holds it; None if the result is a new one.
    """
    # Gradients are enabled where a checkpointed block is computed again, which is no
    # formula.
    if torch.is_grad_enabled() or func not in _in_place_twins():
        return None
    if func is not _aten.add.Tensor and node_name().startswith(_CLEARING):
        return None
    operand = args[0]
    if isinstance(operand, FakeTensor) is real or not _is_dense(operand):
        return None

    references, alone = _count_references(operand), references_alone()
    handles = references.handles
    if func is _aten.index_put.default:
        # Converting its list of optional indices holds the operand too.
        handles -= 1
    if real and func not in _IN_PLACE:
        # Of a.sub(b).mul(c).sub(d), the twins before the last gave a back, and each of
        # them is held until all are done.
        handles -= _TWINS_IN_A_ROW
    is_alone = handles <= alone.handles and references.storages == alone.storages
    return operand if is_alone else None


def node_name() -> str:
    """Name the node of autograd that runs; empty outside of a backward pass."""
    node: Any = torch._C._current_autograd_node()  # noqa: SLF001 -- no public way to ask
    return "" if node is None else str(node.name())


class RunningNode:
    """Knows which storages the node of autograd that runs has made itself.

    Autograd adds gradients that meet at a tensor while the node runs that gave the last
    one.  Formulas add terms of their own meanwhile, to new tensors, with a mode or
    without: ``pinv`` has four.
    """

    def __init__(self) -> None:
        self._sequence_number: int | None = None
        self._first_event = 0

    def note_operator(self, event_count: int) -> None:
        """Note that an operator of the backward pass begins.

        Args:
            event_count: Storages that were made or freed until now.
        """
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001 -- no public way to ask
        sequence_number = None if node is None else int(node._sequence_nr())  # noqa: SLF001
        if sequence_number != self._sequence_number:
            self._sequence_number = sequence_number
            self._first_event = event_count

    def adds_own_term(self, func: OpOverload, number: int) -> bool:
        """Tell whether a formula writes to nothing, though autograd might.

        Args:
            func: The operator, one that :func:`reused_operand` has a buffer for.
            number: Of that buffer's storage, which is the event that made it.

        Returns:
            Whether the formula asks for a new tensor.
        """
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001
        if func is not _aten.add.Tensor:
            # What users write in Python asks for no mode.
            return isinstance(node, BackwardCFunction)
        if node is None or number < self._first_event:
            # What another node gave is a gradient, and no term.
            return False
        # Where two gradients of one node meet, such as those of x * x, they are added
        # as autograd does it.
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        return len(set(edges)) == len(edges)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether elements fill the storage without gaps, in any order of the axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class References(NamedTuple):
    """Who holds a tensor, in C++."""

    handles: int
    """Of the tensor."""
    storages: int
    """Of its storage; each view of it is one."""


def _count_references(tensor: torch.Tensor) -> References:
    storage = tensor.untyped_storage()._cdata  # noqa: SLF001 -- see references_alone
    return References(
        tensor._use_count(),  # type: ignore[attr-defined]  # noqa: SLF001
        torch._C._storage_Use_Count(storage),  # noqa: SLF001
    )


@functools.cache
def references_alone() -> References:
    """Count the references to a gradient that autograd alone holds, seen by a mode.

    The number depends on torch's version, so it is looked up; outside of any mode.
    """
    seen: list[References] = []

    class CountAtAdds(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self,
            func: OpOverload,
            types: Sequence[type],
            args: Args = (),
            kwargs: Kwargs | None = None,
        ) -> Any:
            if func is _aten.add.Tensor:
                seen.append(_count_references(args[0]))
            with fake:
                return func(*args, **(kwargs or {}))

    fake = FakeTensorMode()
    x = fake.from_tensor(torch.ones(2)).requires_grad_()
    hidden = x.exp()
    # Three gradients meet at ``hidden``: they are added twice, and the second time to a
    # buffer that autograd alone holds.
    total = hidden.relu().sum() + hidden.sigmoid().sum() + hidden.tanh().sum()
    with CountAtAdds():  # type: ignore[no-untyped-call]
        total.backward()  # type: ignore[no-untyped-call]
    return min(seen)
