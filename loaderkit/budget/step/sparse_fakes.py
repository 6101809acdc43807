"""Sparse tensors of fakes, with the elements that torch's own fakes forget.

A fake sparse tensor has no elements, whatever it was made of.  But its indices are
whole numbers, which are real here, and they alone decide how many elements each
operator gives.  So beside each fake stands a real sparse tensor with the same indices
and one number for each element, whatever an element is: a row of a table with 64
columns, say.  Operators run on these for real, and how many elements they give is known
exactly.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from loaderkit.budget.step.accumulation import node_name
from loaderkit.budget.step.call_arguments import arguments_by_name
from loaderkit.budget.step.kernel_calls import SparseSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensorMode

    from loaderkit.budget.step.call_arguments import Args, Kwargs

_aten = torch.ops.aten
_MAKERS = (_aten._sparse_coo_tensor_with_dims_and_tensors.default,)
"""Operators that make a sparse tensor of indices and values."""
_FOLLOWED = (
    _aten._coalesce.default,
    _aten._to_copy.default,
    _aten.add.Tensor,
    _aten.add_.Tensor,
    _aten.clone.default,
    _aten.detach.default,
    _aten.div.Scalar,
    _aten.div.Tensor,
    _aten.div_.Scalar,
    _aten.div_.Tensor,
    _aten.mul.Scalar,
    _aten.mul.Tensor,
    _aten.mul_.Scalar,
    _aten.mul_.Tensor,
    _aten.neg.default,
    _aten.sparse_mask.default,
    _aten.sub.Tensor,
    _aten.t.default,
    _aten.transpose.int,
)
"""Operators whose indices do not depend on values: they are followed."""
_MOST_BYTES = 4 << 20
"""What one real stand-in may take; chosen: 300,000 words, and a few of them stay within
the 16 MB of the documentation."""


class _Elements(NamedTuple):
    """The elements of a fake sparse tensor."""

    stand_in: torch.Tensor
    """A real sparse tensor with the same indices, and a number for each element."""
    indices: torch.Tensor
    """Of the stand-in ``[axes, elements]``: to ask for them is an operator."""
    values: torch.Tensor
    """The fake values ``[elements, ...]``."""


class SparseFakes:
    """Remembers what fake sparse tensors are made of, and runs operators on them."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._elements: Any = WeakTensorKeyDictionary()
        """By the fake, as long as it lives."""
        self._replaced: list[_Elements] = []
        """What was written over by the operator that ran last."""

    def release_replaced(self) -> None:
        """Free what was written over: a kernel does so when it has what is new."""
        self._replaced.clear()

    def name_elements(self, fake: torch.Tensor, real: torch.Tensor) -> bool:
        """Name the elements of a sparse tensor of the model or the batch.

        Args:
            fake: Without elements.
            real: With them; only its indices are used.

        Returns:
            Whether they are followed: those of compressed layouts are not.
        """
        if real.layout is not torch.sparse_coo or real.device.type != "cpu":
            return False
        if not isinstance(fake, FakeTensor):
            return False
        indices, real_values = real._indices(), real._values()
        if not _is_small(indices):
            return False
        with self._fake:
            values = torch.empty_like(real_values, device="cpu")
        stand_in = _make_stand_in(
            indices, values, real.shape, is_coalesced=real.is_coalesced()
        )
        self._elements[fake] = _Elements(stand_in, stand_in._indices(), values)
        return True

    def parts_of(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """List indices and values of a fake sparse tensor; None if not known."""
        elements = self._elements_of(tensor)
        if elements is None:
            return None
        return [elements.indices, elements.values]

    def spec_of(self, tensor: torch.Tensor) -> SparseSpec | None:
        """Describe a fake sparse tensor without its elements; None if not known."""
        elements = self._elements_of(tensor)
        if elements is None:
            return None
        return SparseSpec(
            shape=tuple(tensor.shape),
            sparse_dim=elements.stand_in.sparse_dim(),
            elements=elements.values.shape[0],
            dtype=tensor.dtype,
            is_coalesced=elements.stand_in.is_coalesced(),
            has_dense_values=elements.values.is_contiguous(),
        )

    def run(
        self,
        func: OpOverload,
        args: Args,
        kwargs: Kwargs,
        operands: Sequence[torch.Tensor],
    ) -> Any:
        """Run an operator on fakes of which some are sparse.

        Args:
            func: The operator.
            args: Its arguments, fakes among them.
            kwargs: Its named ones.
            operands: The tensors among both.

        Returns:
            What it gives; ``NotImplemented`` where that is not followed.
        """
        if func in _MAKERS:
            return self._make_sparse(args, kwargs)
        if func is _aten._embedding_bag_backward.default:
            return self._make_bag_gradient(arguments_by_name(func, args, kwargs))
        sparse = [operand for operand in operands if _is_sparse_fake(operand)]
        elements = [self._elements_of(tensor) for tensor in sparse]
        known = [e for e in elements if e is not None]
        if not known or len(known) < len(elements):
            return NotImplemented
        if func in _QUERIES:
            return _QUERIES[func](known[0])
        if func not in _FOLLOWED:
            return NotImplemented
        is_kept = func is _aten.clone.default and "AccumulateGrad" in node_name()
        if is_kept and known[0].values.is_contiguous():
            # While a mode is active, autograd copies a sparse gradient that it would
            # keep as it is in a training, if its values lie without gaps.
            return self._register_fake(tuple(sparse[0].shape), known[0])
        return self._follow_elements(func, args, kwargs, known)

    def _elements_of(self, tensor: object) -> _Elements | None:
        if not _is_sparse_fake(tensor):
            return None
        elements: _Elements | None = self._elements.get(tensor)
        return elements

    def _make_sparse(self, args: Args, kwargs: Kwargs) -> Any:
        """Make a sparse fake of real indices and fake values."""
        _, _, shape, indices, values = args[:5]
        if isinstance(indices, FakeTensor) or not isinstance(values, FakeTensor):
            return NotImplemented
        if not _is_small(indices):
            return NotImplemented
        stand_in = _make_stand_in(
            indices,
            values,
            tuple(shape),
            is_coalesced=bool(kwargs.get("is_coalesced")),
        )
        return self._register_fake(
            tuple(shape), _Elements(stand_in, stand_in._indices(), values)
        )

    def _make_bag_gradient(self, named: dict[str, Any]) -> Any:
        """Make the sparse gradient of a table that is read in bags.

        Args:
            named: Arguments of the operator by their names.
        """
        grad, indices, padding = (
            named[name] for name in ("grad", "indices", "padding_idx")
        )
        if not named["sparse"] or isinstance(indices, FakeTensor):
            return NotImplemented
        if padding >= 0:
            indices = indices[indices != padding]
        shape = (int(named["num_weights"]), grad.shape[1])
        with self._fake:
            values = grad.new_empty((len(indices), grad.shape[1]))
        return self._make_sparse((1, 1, shape, indices.reshape(1, -1), values), {})

    def _register_fake(
        self, shape: tuple[int, ...], elements: _Elements
    ) -> torch.Tensor:
        sparse_dim = elements.stand_in.sparse_dim()
        with self._fake:
            fake: torch.Tensor = _aten._sparse_coo_tensor_with_dims.default(
                sparse_dim,
                len(shape) - sparse_dim,
                shape,
                dtype=elements.values.dtype,
                layout=torch.sparse_coo,
                device=torch.device("cpu"),
            )
        self._elements[fake] = elements
        return fake

    def _follow_elements(
        self, func: OpOverload, args: Args, kwargs: Kwargs, known: list[_Elements]
    ) -> Any:
        """Run an operator on stand-ins, and give as many elements as that gives."""
        axes = tuple(known[0].stand_in.shape)
        is_in_place = func._schema.is_mutable
        written = args[0]
        if is_in_place and not _is_sparse_fake(written):
            # A sparse tensor is added to a dense one: it stays what it is.
            return written

        def stand_in_for(leaf: object) -> Any:
            elements = self._elements_of(leaf)
            if elements is not None:
                # In place, the elements that are written over must live until then.
                stand_in = elements.stand_in
                is_written = is_in_place and leaf is written
                return stand_in.detach() if is_written else stand_in
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
                # Of a table only the axes count that have indices.
                return torch.zeros(()).expand(axes)
            if isinstance(leaf, FakeTensor):
                return torch.ones(())
            return leaf

        real_args, real_kwargs = tree_map(stand_in_for, (args, kwargs))
        before = known[0].stand_in._values().untyped_storage()._cdata
        result = func(*real_args, **real_kwargs)
        if (
            not isinstance(result, torch.Tensor)
            or result.layout is not torch.sparse_coo
        ):
            with self._fake:
                return func(*args, **kwargs)

        real_values = result._values()
        keeps_values = real_values.untyped_storage()._cdata == before
        if keeps_values and len(real_values) == len(known[0].values):
            values = known[0].values
        else:
            dtype = kwargs.get("dtype") or known[0].values.dtype
            values = self._values_like(real_values, known[0].values.shape[1:], dtype)
        elements = _Elements(result, result._indices(), values)
        if is_in_place:
            self._replaced.append(known[0])
            self._elements[written] = elements
            return written
        shape = _shape_of(func, args, kwargs)
        return self._register_fake(shape, elements)

    def _values_like(
        self, real_values: torch.Tensor, row_shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Make fake values, in as large a storage as the kernel's: some narrow it."""
        stored = real_values.untyped_storage().nbytes() // real_values.itemsize
        with self._fake:
            whole = torch.empty((stored, *row_shape), dtype=dtype)
            return whole.narrow(0, 0, len(real_values))


def _shape_of(func: OpOverload, args: Args, kwargs: Kwargs) -> tuple[int, ...]:
    """Give the shape of what an operator makes of sparse tensors."""
    shape = list(args[0].shape)
    if func is _aten.t.default:
        return tuple(reversed(shape))
    if func is _aten.transpose.int:
        first, second = args[1:3] if len(args) > 2 else (kwargs["dim0"], kwargs["dim1"])
        shape[first], shape[second] = shape[second], shape[first]
    return tuple(shape)


def _make_stand_in(
    indices: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    *,
    is_coalesced: bool,
) -> torch.Tensor:
    """Make a real sparse tensor with a number for each element; it shares the indices.

    Its values lie without gaps if those of the fake do: kernels ask for that.  Its
    first axis is longer by as much as an element is large: kernels also compare the
    number of elements with that of all places, and coalesce where there are more.
    """
    sparse_dim, count = indices.shape
    first, *others = shape[:sparse_dim]
    axes = (first * max(math.prod(shape[sparse_dim:]), 1), *others)
    numbers = (
        torch.zeros(count) if values.is_contiguous() else torch.zeros(1).expand(count)
    )
    stand_in: torch.Tensor = _aten._sparse_coo_tensor_with_dims_and_tensors.default(
        sparse_dim,
        0,
        axes,
        indices,
        numbers,
        dtype=torch.float32,
        layout=torch.sparse_coo,
        device=torch.device("cpu"),
        is_coalesced=is_coalesced,
    )
    return stand_in


def _is_small(indices: torch.Tensor) -> bool:
    number_bytes = torch.float32.itemsize * indices.shape[1]
    return indices.numel() * indices.itemsize + number_bytes <= _MOST_BYTES


def _is_sparse_fake(leaf: object) -> bool:
    return isinstance(leaf, FakeTensor) and leaf.layout is torch.sparse_coo


_QUERIES: dict[Any, Any] = {
    _aten._indices.default: lambda e: e.indices,
    _aten._values.default: lambda e: e.values.detach(),
    _aten.indices.default: lambda e: e.indices,
    _aten.values.default: lambda e: e.values.detach(),
    _aten._nnz.default: lambda e: e.values.shape[0],
    _aten.is_coalesced.default: lambda e: e.stand_in.is_coalesced(),
}
"""Operators that ask for a part, by what answers them."""
