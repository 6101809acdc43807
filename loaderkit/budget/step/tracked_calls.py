"""The calls of operators in a tracked step, for what is learnt when it has ended.

``unseen_memory`` reads them: what kernels hold inside, and formulas of autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from loaderkit.budget.step.accumulation import node_name
from loaderkit.budget.step.fake_tensors import is_fake
from loaderkit.budget.step.kernel_calls import call_of, operator_name
from loaderkit.budget.step.measure import has_one_storage

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from loaderkit.budget.step.allocation_log import Log
    from loaderkit.budget.step.call_arguments import Args, Kwargs
    from loaderkit.budget.step.kernel_calls import KernelCall
    from loaderkit.budget.step.sparse_fakes import SparseFakes

_LIKE_VIEWS = (
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
)
"""Operators that give their operand's storage, and are not called views."""


@dataclass(frozen=True)
class TrackedCall:
    """One call of an operator, and where it stands in the log."""

    position: int
    """Of the last event when it returned."""
    numbers: tuple[int, ...]
    """Storages that it made."""
    made_bytes: int
    """Bytes of these."""
    touched_bytes: int
    """Bytes of all operands and outputs that are not sparse."""
    outputs: tuple[int, ...]
    """Bytes of each output."""
    name: str
    """Of the operator."""
    call: KernelCall | None
    """How to make it again; None if that cannot be."""
    fake: bool
    """Whether its outputs were faked, and may take other bytes than the real ones."""
    with_grad: tuple[bool, ...]
    """Which operands get a gradient; empty where no backward pass follows."""


class MadeByFormula(NamedTuple):
    """Storages that a formula of autograd made in the backward pass."""

    node: str
    """Autograd's name of the formula."""
    numbers: tuple[int, ...]
    """Of the storages."""


class TrackedCalls:
    """Remembers calls that make something."""

    def __init__(self, log: Log, sparse: SparseFakes) -> None:
        """Begin a step.

        Args:
            log: That the storages are in.
            sparse: Knows what fake sparse tensors are made of.
        """
        self.calls: list[TrackedCall] = []
        self.made_by_formulas: list[MadeByFormula] = []
        self._log, self._sparse = log, sparse
        self._sparse_bytes_of_step = 0
        self._most_sparse_bytes_of_a_step = 0

    def begin_step(self) -> None:
        """Begin another step of the same training."""
        self._sparse_bytes_of_step = 0

    def note_formula(self, numbers: list[int]) -> None:
        """Note what the formula of autograd that runs now has made, if anything."""
        if numbers:
            self.made_by_formulas.append(MadeByFormula(node_name(), tuple(numbers)))

    def note(
        self,
        func: OpOverload,
        args: Args,
        kwargs: Kwargs,
        *,
        operands: list[torch.Tensor],
        outputs: list[torch.Tensor],
        position: int,
        numbers: list[int],
        is_differentiated: bool,
    ) -> None:
        """Remember a call, unless it makes nothing.

        Args:
            func: The operator.
            args: Its positional arguments.
            kwargs: Its named ones.
            operands: The tensors among them.
            outputs: The tensors that it gave.
            position: Of the last event when it returned.
            numbers: Of the storages that it made.
            is_differentiated: Whether a backward pass follows.
        """
        if not operands or _is_view(func, operands):
            return
        call = call_of(func, args, kwargs, describe_sparse=self._sparse.spec_of)
        if call is None:
            is_dense = all(has_one_storage(t) for t in (*operands, *outputs))
            self._log.has_unknown_sparse_calls |= not is_dense
        with_grad: tuple[bool, ...] = ()
        if is_differentiated:
            with_grad = tuple(t.requires_grad for t in operands)
        self.calls.append(
            TrackedCall(
                position=position,
                numbers=tuple(numbers),
                made_bytes=sum(self._log.events[number].change for number in numbers),
                touched_bytes=_touched_bytes(operands, outputs)
                + self._bytes_of_known_sparse([*operands, *outputs]),
                outputs=tuple(self._bytes_of(output) for output in outputs),
                name=operator_name(func),
                call=call,
                # What a sparse output takes is known from its indices.
                fake=any(is_fake(t) and has_one_storage(t) for t in outputs),
                with_grad=with_grad,
            )
        )

    def note_unknown_sparse(
        self,
        func: OpOverload,
        operands: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        """Add what sparse tensors take whose elements are not known, at most.

        Args:
            func: The operator that made them.
            operands: The tensors among its arguments.
            outputs: The tensors that it gave.
        """
        if all(map(self._has_known_elements, outputs)):
            return
        self._sparse_bytes_of_step += _sparse_bytes(func, operands)
        # A later step of the same training makes the same ones again.
        more = max(0, self._sparse_bytes_of_step - self._most_sparse_bytes_of_a_step)
        self._most_sparse_bytes_of_a_step += more
        self._log.sparse_bytes += more

    def _has_known_elements(self, tensor: torch.Tensor) -> bool:
        return has_one_storage(tensor) or self._sparse.parts_of(tensor) is not None

    def _bytes_of(self, tensor: torch.Tensor) -> int:
        components = self._sparse.parts_of(tensor)
        if components is None:
            return tensor.numel() * tensor.itemsize
        return sum(component.untyped_storage().nbytes() for component in components)

    def _bytes_of_known_sparse(self, tensors: list[torch.Tensor]) -> int:
        return sum(
            component.nbytes
            for tensor in tensors
            for component in self._sparse.parts_of(tensor) or ()
        )


def _is_view(func: OpOverload, operands: list[torch.Tensor]) -> bool:
    """Tell whether an operator makes nothing: of sparse tensors, most views are copies.

    Such as the transpose, which also sorts the indices.
    """
    if func in _LIKE_VIEWS:
        return True
    return func.is_view and all(has_one_storage(operand) for operand in operands)


def _sparse_bytes(func: OpOverload, operands: list[torch.Tensor]) -> int:
    """Tell what sparse tensors that a call makes take, at most.

    Args:
        func: The operator.
        operands: The tensors among all arguments.

    Returns:
        Bytes: of what is made of indices and values theirs, of what is made of a dense
        operand an index for each axis of each element.
    """
    if not all(has_one_storage(operand) for operand in operands):
        # What a sparse operand makes has its elements, which were counted with it.
        return 0
    if "sparse" in operator_name(func) and len(operands) > 1:
        # Made of indices and values, which are no more than they are.
        return sum(operand.nbytes for operand in operands)
    return sum(
        operand.numel() * (operand.itemsize + operand.dim() * torch.int64.itemsize)
        for operand in operands
        if has_one_storage(operand)
    )


def _touched_bytes(operands: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """Add up the bytes of dense operands and outputs.

    A sparse operand is not as large as its shape says; see ``_sparse_bytes``.  What it
    is added to in place, such as a table, is only written where it has elements.
    """
    dense_operands = [tensor for tensor in operands if has_one_storage(tensor)]
    dense_outputs = [tensor for tensor in outputs if has_one_storage(tensor)]
    touched = [*dense_operands, *dense_outputs]
    if len(dense_operands) < len(operands):
        read = {tensor.untyped_storage()._cdata for tensor in dense_operands}
        written = {tensor.untyped_storage()._cdata for tensor in dense_outputs}
        touched = [
            tensor
            for tensor in touched
            if tensor.untyped_storage()._cdata not in read & written
        ]
    return sum(tensor.numel() * tensor.itemsize for tensor in touched)
