"""The mode under which a training step's floats are fake and every byte is logged."""

from __future__ import annotations

import functools
import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nested._internal.nested_tensor import NestedTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from loaderkit.budget.accumulation import node_name, reused_operand
from loaderkit.budget.allocation_log import Bounds
from loaderkit.budget.kernel_calls import call_of
from loaderkit.budget.layouts import LAYOUTS
from loaderkit.budget.measure import parts_of_nested, state_of

if TYPE_CHECKING:
    from loaderkit.budget.allocation_log import Log
    from loaderkit.budget.kernel_calls import KernelCall
    from loaderkit.budget.values import RealValues, Value

_aten = torch.ops.aten
_SMALL_BYTES = 1 << 18
"""Real floats made of integers stay real up to here: pooling computes sizes so."""
_INDEXED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_LIKE_VIEWS = (_aten._unsafe_view.default, _aten.detach.default, _aten.alias.default)
_VALUES = ("arange", "scalar_tensor", "linspace")
ALL_CHOSEN = "every element is chosen"
CHOSEN_NOW = "as many elements as are chosen with the present parameters"
SCALAR = "a scalar's value"
SCALAR_NOW = "a scalar's value, with the present parameters"


@dataclass(frozen=True)
class TrackedCall:
    """One call of an operator, and where it stands in the log."""

    position: int
    """Of the last event when it returned."""
    numbers: tuple[int, ...]
    """Storages that it made."""
    made: int
    """Bytes of these."""
    touched: int
    """Bytes of all operands and outputs."""
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


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fakes floats and logs the storages that operators make."""

    def __init__(
        self, fake: FakeTensorMode, log: Log, *, chosen: float = 1.0,
        values: RealValues | None = None,
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake, self.log, self.chosen, self.values = fake, log, chosen, values
        self.live: dict[int, tuple[int, int, Any]] = {}
        self.calls: list[TrackedCall] = []
        self.by_formula: list[tuple[str, tuple[int, ...]]] = []
        self.module, self.phase = "", "base"
        self._real_sizes: dict[int, int] = {}
        self.real_now = 0

    def mark(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self.log.marks.append((len(self.log.events), phase))

    def add(self, tensor: Any, owner: str = "") -> list[int]:
        """Log the storages of a tensor, each once; give the numbers of new ones."""
        if tensor.layout is torch.jagged:
            parts = parts_of_nested([tensor])
            return [number for part in parts for number in self.add(part, owner)]
        if tensor.layout is not torch.strided:
            parts = _parts_of_sparse(tensor, self.fake)
            return [number for part in parts for number in self.add(part, owner)]
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.live:
            return []
        number = len(self.log.events)
        gone = functools.partial(self._gone, key, number)
        self.live[key] = (number, size, weakref.ref(storage, gone))
        self.log.events.append((number, size))
        if owner:
            self.log.owners[number] = owner
        self.log.modules[number] = self.module
        if not isinstance(tensor, FakeTensor):
            self._real_sizes[number] = size
            self.real_now += size
        values = self.values.bytes if self.values is not None else 0
        self.log.real_bytes = max(self.log.real_bytes, self.real_now + values)
        return [number]

    def _gone(self, key: int, number: int, _ref: Any = None) -> None:
        held = self.live.get(key)
        if held is not None and held[0] == number:
            del self.live[key]
            self.log.events.append((number, -held[1]))
            self.real_now -= self._real_sizes.pop(number, 0)

    def kept_bytes(self) -> int:
        """Sum what lives and is nothing of the step's own, once all is labelled."""
        return sum(
            size
            for number, size, _ in self.live.values()
            if number not in self.log.owners
        )

    def label_gradients(self, model: Any) -> None:
        """Name the storages of gradients."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                self._label(parameter.grad, "gradients")

    def label_state(self, optimizer: Any) -> None:
        """Name the storages of the optimizer's state."""
        for tensor in state_of(optimizer):
            self._label(tensor, "optimizer state")

    def _label(self, tensor: Any, owner: str) -> None:
        if tensor.layout is not torch.strided:
            for part in _parts_of_sparse(tensor, self.fake):
                self._label(part, owner)
            return
        held = self.live.get(tensor.untyped_storage()._cdata)
        if held is not None:
            self.log.owners.setdefault(held[0], owner)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operator, faked where floats are in it."""
        if func is torch.ops.prim.device.default:  # two of three calls: keep it short
            asked = args[0]
            return asked.fake_device if isinstance(asked, FakeTensor) else asked.device
        if any(kind is NestedTensor for kind in types):
            # The class of torch's jagged tensors, which has no public name, then does
            # the operator with the tensors that it is made of, and these we see.
            return NotImplemented
        kwargs = kwargs or {}
        backward = self.phase == "backward"
        reused = reused_operand(func, args) if backward else None
        listed_bytes = 0
        if func in _INDEXED:
            positions, listed_bytes = self._positions(args[1], func)
            args = (args[0], positions, *args[2:])
        # listed once: what is done at each operator decides how long an estimate takes
        operands = _tensors_in((args, kwargs))
        out = _asked_for(func, args, self._run(func, args, kwargs, operands))
        if reused is not None:
            self._take_over(reused)
        outputs = _tensors_in(out)
        numbers = [number for tensor in outputs for number in self.add(tensor)]
        if listed_bytes:
            self.log.holds_inside(
                len(self.log.events) - 1, Bounds.exactly(listed_bytes)
            )
        if operands and not (func.is_view or func in _LIKE_VIEWS):
            made = call_of(func, args, kwargs)
            self._note_call(func, made, operands, outputs, numbers)
        if backward and numbers:
            self.by_formula.append((node_name(), tuple(numbers)))
        return out

    def _take_over(self, tensor: torch.Tensor) -> None:
        """Log that a storage is used for what comes next."""
        key = tensor.untyped_storage()._cdata
        if key in self.live:
            self._gone(key, self.live[key][0])

    def _run(
        self, func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor]
    ) -> Any:
        real = [t for t in operands if not isinstance(t, FakeTensor)]
        for tensor in real:  # numbers turned into tensors are made by no operator
            if not tensor.dim():
                self.add(tensor)
        if len(real) < len(operands):
            out = self._faked(func, args, kwargs)
            out = LAYOUTS.corrected(func, args, kwargs, operands, out)
        elif not operands and _makes_floats(func, kwargs):
            with self.fake:
                out = func(*args, **kwargs)
        else:
            return tree_map(self._small, func(*args, **kwargs))
        follows = self.phase in {"forward", "loss"} or torch.is_grad_enabled()
        if self.values is not None and follows:
            self.values.compute(func, args, kwargs, out)
        return out

    def _note_call(
        self, func: Any, call: KernelCall | None, operands: list[torch.Tensor],
        outputs: list[torch.Tensor], numbers: list[int],
    ) -> None:  # fmt: skip
        sizes = tuple(t.numel() * t.itemsize for t in outputs)
        with_grad: tuple[bool, ...] = ()
        if self.phase in {"forward", "loss"} and torch.is_grad_enabled():
            with_grad = tuple(t.requires_grad for t in operands)
        self.calls.append(
            TrackedCall(
                position=max(len(self.log.events) - 1, 0),
                numbers=tuple(numbers),
                made=sum(self.log.events[number][1] for number in numbers),
                touched=sum(sizes) + sum(t.numel() * t.itemsize for t in operands),
                outputs=sizes,
                name=func.name(),
                call=call,
                fake=any(isinstance(t, FakeTensor) for t in outputs),
                with_grad=with_grad,
            )
        )

    def _small(self, leaf: Any) -> Any:
        """Fake a real float that is large: its values decide no shape."""
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        large = leaf.untyped_storage().nbytes() > _SMALL_BYTES
        return self.fake.from_tensor(leaf) if large else leaf

    def _faked(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.data_dependent_output in func.tags or (
            torch.Tag.dynamic_output_shape in func.tags
            and func is not _aten.index.Tensor
        ):
            return self._from_values(func, args, kwargs)
        with self.fake:
            return func(*args, **kwargs)

    def _from_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator whose result depends on values, or assume some."""
        scalar = func is _aten._local_scalar_dense.default
        known = [
            self.value_of(t)
            for t in tree_iter((args, kwargs))
            if isinstance(t, FakeTensor)
        ]
        if all(each is not None for each in known):
            if any(each is not None and each.trained for each in known):
                self._assume(SCALAR_NOW if scalar else CHOSEN_NOW, func)
            made = func(*tree_map(self._real, args), **tree_map(self._real, kwargs))
            return tree_map(functools.partial(self._as_fake, known), made)
        if scalar:
            self._assume(SCALAR, func)
            if args[0].dtype == torch.bool:
                return True
            return self.chosen if args[0].is_floating_point() else 1
        return self._with_share_chosen(func, args, kwargs)

    def _as_fake(self, known: list[Value | None], leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        fake = self.fake.from_tensor(leaf)
        if self.values is not None:
            trained = any(each is not None and each.trained for each in known)
            self.values.give(fake, leaf, trained=trained)
        return fake

    def _with_share_chosen(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Assume how many elements a mask of unknown values chooses."""
        if func is _aten.nonzero.default:
            self._assume(ALL_CHOSEN, func)
            return self._chosen_positions(args[0].shape)
        if func is _aten.masked_select.default:
            shape = np.broadcast_shapes(args[0].shape, args[1].shape)
            if isinstance(args[1], FakeTensor):
                self._assume(ALL_CHOSEN, func)
                count = self._chosen_of(shape)
            else:
                count = int(args[1].expand(shape).sum())
            with self.fake:
                return args[0].new_empty((count,))
        if func is _aten._unique2.default:
            self._assume(ALL_CHOSEN, func)
            count = self._chosen_of(args[0].shape)
            positions = torch.arange(args[0].numel()).clamp_(max=count - 1)
            with self.fake:
                distinct = args[0].new_empty((count,))
            return distinct, positions.view(args[0].shape), positions.new_ones(count)
        with self.fake:
            return func(*args, **kwargs)

    def _positions(self, indices: Any, func: Any) -> tuple[list[Any], int]:
        """Turn masks into positions, so that shapes are known; give their bytes too.

        The kernel makes the same list of positions, and gives it back.
        """
        positions: list[Any] = []
        listed_bytes = 0
        for index in indices:
            if index is None or index.dtype not in {torch.bool, torch.uint8}:
                positions.append(index)
                continue
            value = self.value_of(index) if isinstance(index, FakeTensor) else None
            if value is not None and value.trained:
                self._assume(CHOSEN_NOW, func)
            if isinstance(index, FakeTensor) and value is None:
                self._assume(ALL_CHOSEN, func)
                found = self._chosen_positions(index.shape)
            else:
                found = torch.nonzero(index if value is None else value.real)
            listed_bytes += found.numel() * 8
            positions.extend(found.unbind(1))
        return positions, listed_bytes

    def _chosen_of(self, shape: Any) -> int:
        """Count the assumed share of the elements, one at least."""
        total = int(math.prod(shape))
        return min(total, max(1, round(self.chosen * total)))

    def _chosen_positions(self, shape: Any) -> torch.Tensor:
        """List the first of the elements; fake where the list is large itself."""
        count = self._chosen_of(shape)
        if count * len(shape) * 8 > _SMALL_BYTES:
            with self.fake:
                return torch.empty((count, len(shape)), dtype=torch.int64)
        places = np.unravel_index(np.arange(count), tuple(shape)) if shape else ()
        columns = [torch.from_numpy(np.ascontiguousarray(place)) for place in places]
        return torch.stack(columns, 1) if columns else torch.zeros(count, 0).long()

    def value_of(self, tensor: Any) -> Value | None:
        """Give what a tensor stands for; None if it is not known."""
        return None if self.values is None else self.values.of(tensor)

    def _real(self, leaf: Any) -> Any:
        value = self.value_of(leaf) if isinstance(leaf, FakeTensor) else None
        return leaf if value is None else value.real

    def _assume(self, what: str, func: Any) -> None:
        self.log.assumptions[what, func.name()] += 1


class ReadsValues(TorchFunctionMode):
    """Answers ``tolist`` and ``numpy``, which read memory that a fake tensor lacks."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function, with the real tensor where one is read."""
        reads = func in {
            torch.Tensor.tolist,
            torch.Tensor.numpy,
            torch.Tensor.__array__,
        }
        if reads and isinstance(args[0], FakeTensor):
            value = self.tracker.value_of(args[0])
            if value is not None:
                if value.trained:
                    self.tracker.log.assumptions[CHOSEN_NOW, func.__name__] += 1
                args = (value.real, *args[1:])
        return func(*args, **(kwargs or {}))


def _tensors_in(nest: Any) -> list[torch.Tensor]:
    """List tensors of an operator's arguments or outputs; torch's trees take longer."""
    if isinstance(nest, torch.Tensor):
        return [nest]
    if isinstance(nest, dict):
        nest = nest.values()
    elif not isinstance(nest, (tuple, list)):
        return []
    return [tensor for each in nest for tensor in _tensors_in(each)]


def _makes_floats(func: Any, kwargs: Any) -> bool:
    kind = kwargs.get("dtype") or torch.get_default_dtype()
    return kind.is_floating_point and not any(n in func.name() for n in _VALUES)


def _parts_of_sparse(tensor: Any, fake: FakeTensorMode) -> list[Any]:
    """List the dense tensors of a sparse one."""
    with fake:
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _asked_for(func: Any, args: Any, out: Any) -> Any:
    """Leave out gradients that a backward operator was not asked for.

    Its rule for tensors without memory may make them all the same (that of batch
    normalisation does), where the kernel makes none.
    """
    arguments = func._schema.arguments
    if not isinstance(out, tuple) or not arguments:
        return out
    if arguments[-1].name != "output_mask" or len(args) < len(arguments):
        return out
    wanted = zip(out, args[-1], strict=True)
    return tuple(each if is_asked else None for each, is_asked in wanted)
