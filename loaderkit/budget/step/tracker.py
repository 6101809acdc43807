"""The mode under which a training step's floats are fake and every byte is logged."""

from __future__ import annotations

import functools
import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nested._internal.nested_tensor import NestedTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from loaderkit.budget.step.accumulation import RunningNode, node_name, reused_operand
from loaderkit.budget.step.allocation_log import Event, PhaseStart, UncertainBytes
from loaderkit.budget.step.assumed_scalars import MOST, Assumed, AssumedScalars
from loaderkit.budget.step.call_arguments import (
    arguments_by_name,
    tensors_in,
    written_tensors,
)
from loaderkit.budget.step.count_bounds import CountBounds
from loaderkit.budget.step.index_ranges import index_error_of, mask_error_of
from loaderkit.budget.step.kernel_calls import call_of, operator_name
from loaderkit.budget.step.layouts import LAYOUTS
from loaderkit.budget.step.measure import (
    has_one_storage,
    optimizer_state,
    parts_of_nested,
    parts_of_sparse,
)
from loaderkit.budget.step.optimizer_copies import is_torchs
from loaderkit.budget.step.output_cache import OUTPUTS
from loaderkit.budget.step.shape_rules import (
    shape_rule,
    values_decide_shapes,
    without_unasked_gradients,
)
from loaderkit.budget.step.sparse_fakes import SparseFakes
from loaderkit.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch._ops import OpOverload

    from loaderkit.budget.step.allocation_log import Log, LogPhase, Part
    from loaderkit.budget.step.call_arguments import Args, Kwargs
    from loaderkit.budget.step.kernel_calls import KernelCall
    from loaderkit.budget.step.real_values import RealValues, Value
    from loaderkit.budget.step.state_snapshots import Snapshots

_aten = torch.ops.aten
_SMALL_BYTES = 1 << 18
"""Real floats made of integers stay real up to here: pooling computes sizes so.
Chosen: thousands of graphs, and a small part of what an estimate may take for real."""
_INDEXED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
"""They take masks, whose values decide the shape of the result."""
_MASK_TYPES = (torch.bool, torch.uint8)
_CTC_LOSSES = (_aten._ctc_loss.default, _aten._ctc_loss.Tensor)
_MAXIMUM_OF_BAG = 2
"""The number of the mode "max" among the arguments of torch's bags."""
_LIKE_VIEWS = (_aten._unsafe_view.default, _aten.detach.default, _aten.alias.default)
"""Operators that give their operand's storage, and are not called views."""
_PARTS_BEFORE: tuple[Part, ...] = ("parameters", "captured")
"""What a step may read that neither its model nor its batch has."""
_COMPARISONS = (_aten.equal.default, _aten.allclose.default)
"""Operators that give no tensor but a condition."""
_VALUES = ("arange", "scalar_tensor", "linspace")
"""Operators that make floats of their arguments alone; they are real, since a shape may
be computed from them."""

_CONSTANTS = (_aten.ones.default, _aten.zeros.default, _aten.full.default)
"""Operators that make floats of one value; small ones are real.  Hugging Face's models
make a mask of ones where none is given, and ask whether it is a fake: if so, they make
another mask than in a training (Blenderbot was 0.6 % too high)."""

# Assumptions, as they are told.
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


class _LiveStorage(NamedTuple):
    """A storage in the log that is not freed yet."""

    number: int
    nbytes: int
    reference: weakref.ref[Any]
    """Logs that it is freed."""


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fakes floats and logs the storages that operators make."""

    def __init__(
        self,
        fake: FakeTensorMode,
        log: Log,
        *,
        snapshots: Snapshots,
        assumed: Assumed = MOST,
        values: RealValues | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake, self.log, self.values = fake, log, values
        self._snapshots = snapshots
        """Gets the tensors of the user's that the step comes across."""
        self._share_chosen = assumed.share
        self._scalars = AssumedScalars(assumed)
        self._counts = CountBounds()
        self.sparse = SparseFakes(fake)
        self.live: dict[int, _LiveStorage] = {}
        """By torch's own address of the storage object, which no other one has while it
        lives."""
        self.calls: list[TrackedCall] = []
        self.made_by_formulas: list[MadeByFormula] = []
        self.module = ""
        self.function: object = None
        """Of torch's, that the user's code calls now."""
        self.phase: LogPhase = "base"
        self._module_of_node: dict[int, str] = {}
        self._real_sizes: dict[int, int] = {}
        self._overwritten: dict[int, bool | None] = {}
        """Storages of real tensors that fakes were written to: whether what they hold
        now depends on parameters; None where it is not known."""
        self.real_bytes_live = 0
        self._held_bytes = 0
        """What the operator that runs holds inside, as far as it is computed here."""
        self._running_node = RunningNode()
        self._has_resized = False
        self._has_nested = False
        self._is_computing_again = False
        self._is_update_torchs = False
        self._checkpoints_of_step = 0
        self._sparse_bytes_of_step = 0
        self._most_sparse_bytes_of_a_step = 0
        self._captured: set[int] = set()
        """Numbers of storages that were there before, but nobody named."""
        self._parameters_of_others: list[torch.nn.Parameter] = []
        """Parameters that are read, and are not the model's."""
        self._before = {part: self._begin(part) for part in _PARTS_BEFORE}
        """Numbers of the events that stand for what was there before."""

    def _begin(self, part: Part) -> int:
        number = len(self.log.events)
        self.log.events.append(Event(number, 0))
        self.log.owners[number] = part
        return number

    def mark(self, phase: LogPhase) -> None:
        """Begin a phase."""
        self.phase = phase
        if phase == "zero_grad":
            self._sparse_bytes_of_step = 0
            self._checkpoints_of_step = 0
        self.log.marks.append(PhaseStart(len(self.log.events), phase))

    def end(self) -> None:
        """Log no more: what is freed from now on is freed whenever Python likes."""
        self.live.clear()
        self.log.order_frees()

    def note_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Note whose optimizer it is, before it makes its first update.

        Adafactor reads a norm and a mean of each parameter, and hands them on as
        numbers: no optimizer of torch's that updates once a step takes another branch
        for what it reads.
        """
        self._is_update_torchs = is_torchs(optimizer)

    def _add_sparse_bytes(self, nbytes: int) -> None:
        """Add what sparse tensors of this step take, where no step before took it."""
        self._sparse_bytes_of_step += nbytes
        more = max(0, self._sparse_bytes_of_step - self._most_sparse_bytes_of_a_step)
        self._most_sparse_bytes_of_a_step += more
        self.log.sparse_bytes += more

    def _count_checkpoints(self) -> None:
        """Count the blocks that are computed again in the backward pass of a step.

        Whoever asked for it: the step, the model, or a layer of a library.  Gradients
        are enabled there, while a node of autograd runs, and in no formula; between two
        blocks come formulas of the second.
        """
        is_computing_again = (
            self.phase == "backward" and torch.is_grad_enabled() and bool(node_name())
        )
        if is_computing_again:
            self.note_computing_again()
        self._is_computing_again = is_computing_again

    def note_computing_again(self) -> None:
        """Note that the backward pass computes a block again.

        A module that begins tells too: a block of a single operator, such as a table of
        words, ends before its operator is called, when all that is asked for is saved.
        """
        if not self._is_computing_again:
            self._checkpoints_of_step += 1
            most = max(self.log.checkpoints, self._checkpoints_of_step)
            self.log.checkpoints = most
        self._is_computing_again = True

    def note_uncertain(self, tensor: torch.Tensor, more: UncertainBytes) -> None:
        """Note how much less or more than its size a storage may take."""
        storage = self.live.get(tensor.untyped_storage()._cdata)
        if storage is not None:
            self.log.corrections[storage.number] = more

    def add_all(self, tensors: Iterable[torch.Tensor], owner: Part) -> None:
        """Log the storages of tensors and what they are."""
        for tensor in tensors:
            self.add(tensor, owner)

    def add(self, tensor: torch.Tensor, owner: Part | None = None) -> list[int]:
        """Log the storages of a tensor, each once; give the numbers of new ones."""
        if tensor.layout is torch.jagged:
            return self._add_all(parts_of_nested([tensor]), owner)
        if not has_one_storage(tensor):
            return self._add_all(self._parts_of_sparse(tensor), owner)
        if tensor._is_zerotensor():
            # The tangent of what has none, in forward mode: nobody makes its storage.
            return []
        storage = tensor.untyped_storage()
        if storage._cdata in self.live:
            return []
        number = self._log_made(storage, owner)
        if not isinstance(tensor, FakeTensor):
            size = storage.nbytes()
            self._real_sizes[number] = size
            self.real_bytes_live += size
        values = self.values.bytes if self.values is not None else 0
        self.log.real_bytes = max(self.log.real_bytes, self.real_bytes_live + values)
        return [number]

    def _add_all(self, components: list[Any], owner: Part | None) -> list[int]:
        numbers: list[int] = []
        for component in components:
            numbers += self.add(component, owner)
        return numbers

    def _log_made(self, storage: torch.UntypedStorage, owner: Part | None) -> int:
        """Log that a storage lives, and see to it that its end is logged."""
        key, size = storage._cdata, storage.nbytes()
        number = len(self.log.events)
        when_freed = functools.partial(self._log_freed, key, number)
        self.live[key] = _LiveStorage(number, size, weakref.ref(storage, when_freed))
        self.log.events.append(Event(number, size))
        if owner is not None:
            self.log.owners[number] = owner
        self.log.modules[number] = self.module or self._module_differentiated()
        return number

    def _parts_of_sparse(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        known_parts = self.sparse.parts_of(tensor)
        if known_parts is not None:
            return known_parts
        return parts_of_sparse(tensor, self.fake if _is_fake(tensor) else None)

    def _note_captured(self, operands: Iterable[torch.Tensor]) -> None:
        """Log what an operator reads that no operator made, and nobody named."""
        for tensor in operands:
            if tensor.layout is torch.jagged or tensor._is_zerotensor():
                continue
            if has_one_storage(tensor):
                components = [tensor]
            elif isinstance(tensor, FakeTensor) or self.sparse.parts_of(tensor):
                continue
            else:
                components = parts_of_sparse(tensor, None)
            for component in components:
                storage = component.untyped_storage()
                if storage._cdata in self.live:
                    continue
                part: Part = "captured"
                if isinstance(component, torch.nn.Parameter):
                    part = "parameters"
                    self._parameters_of_others.append(component)
                self._captured.add(self._log_made(storage, part))
                is_real = not isinstance(component, FakeTensor)
                if is_real and component.requires_grad and component.is_leaf:
                    # Others may have been made in the step, and end in it.
                    self._snapshots.note_tensor(component)

    def move_captured_to_beginning(self) -> None:
        """Log what was there before the step as it was: from the beginning on."""
        for number in self._captured:
            before = self._before[self.log.owners[number]]
            size = self.log.events[before].change + self.log.events[number].change
            self.log.events[before] = Event(before, size)
            self.log.events[number] = Event(number, 0)

    def note_resized(self, tensors: Iterable[torch.Tensor]) -> None:
        """Log storages that were resized without an operator.

        Invertible layers free their inputs so, and in the backward pass their outputs.
        The first time it is an argument of a module; from then on all are looked at.
        """
        for tensor in tensors:
            if not has_one_storage(tensor) or tensor.layout is torch.jagged:
                continue
            try:
                storage = tensor.untyped_storage()
            except NotImplementedError:
                # In a module that vmap, grad or jvp calls, tensors are wrapped.
                continue
            self._has_resized |= self._log_if_resized(storage)
        if self._has_resized:
            for live in list(self.live.values()):
                live_storage = live.reference()
                if live_storage is not None:
                    self._log_if_resized(live_storage)

    def _log_if_resized(self, storage: torch.UntypedStorage) -> bool:
        """Log the new size of a storage, if it has one; tell whether it has."""
        before = self.live.get(storage._cdata)
        if before is None or before.nbytes == storage.nbytes():
            return False
        if before.nbytes != self.log.events[before.number].change:
            # It is an alias of a real storage, and takes nothing here.
            return False
        self._log_freed(storage._cdata, before.number)
        self._log_made(storage, self.log.owners.get(before.number))
        return True

    def _has_known_elements(self, tensor: torch.Tensor) -> bool:
        """Tell whether it is known what a tensor takes: of sparse ones it may not."""
        return has_one_storage(tensor) or self.sparse.parts_of(tensor) is not None

    def _log_freed(self, key: int, number: int, _ref: object = None) -> None:
        storage = self.live.get(key)
        # Another storage may have the address by now.
        if storage is not None and storage.number == number:
            del self.live[key]
            if number in self._captured:
                # It was made in the step, by no operator, such as torch.from_numpy.
                self._captured.discard(number)
                del self.log.owners[number]
            self._overwritten.pop(key, None)
            self._counts.forget_overwritten(key)
            self.log.events.append(Event(number, -storage.nbytes))
            self.real_bytes_live -= self._real_sizes.pop(number, 0)

    def _note_module_of_node(self) -> None:
        """Remember which module's operator a node of autograd belongs to.

        Autograd numbers its nodes, and makes that of an operator before it calls the
        operator: the last number given is that of the node.
        """
        if self.module and torch.is_grad_enabled():
            last_number = torch._C._autograd._get_sequence_nr() - 1
            self._module_of_node[last_number] = self.module

    def _module_differentiated(self) -> str:
        """Name the module whose operator autograd differentiates now, if it does."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        return self._module_of_node.get(node._sequence_nr(), "")

    def unowned_bytes(self) -> int:
        """Sum what lives and is nothing of the step's own, once all is labelled."""
        return sum(
            storage.nbytes
            for storage in self.live.values()
            if storage.number not in self.log.owners
        )

    def label_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Name the storages of gradients."""
        for parameter in [*parameters, *self._parameters_of_others]:
            if parameter.grad is not None:
                self._label_storage(parameter.grad, "gradients")

    def label_state(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Name the storages of the optimizer's state."""
        for tensor in optimizer_state(optimizer):
            self._label_storage(tensor, "optimizer state")

    def _label_storage(self, tensor: torch.Tensor, owner: Part) -> None:
        if not has_one_storage(tensor):
            for component in self._parts_of_sparse(tensor):
                self._label_storage(component, owner)
            return
        storage = self.live.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return
        if storage.number in self._captured:
            # An optimizer makes its counts of steps before they are read.
            self._captured.discard(storage.number)
            self.log.owners[storage.number] = owner
        self.log.owners.setdefault(storage.number, owner)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Run one operator, faked where floats are in it."""
        # Two of three calls ask for a device: they are answered first.
        if func is torch.ops.prim.device.default:
            asked = args[0]
            return asked.fake_device if isinstance(asked, FakeTensor) else asked.device
        if any(kind is NestedTensor for kind in types):
            self._has_nested = True
            # The class of torch's jagged tensors, which has no public name, then does
            # the operator with the tensors that it is made of, and these we see.
            return NotImplemented
        kwargs = kwargs or {}
        self._note_module_of_node()
        if func is not _aten.detach.default:
            # A block that is computed again detaches each tensor that it saves, with
            # gradients disabled (unless its checkpoint is reentrant): it goes on.
            self._count_checkpoints()
        is_backward = self.phase == "backward"
        reused = self._operand_to_reuse(func, args)

        # Listed once, unless some are replaced: what is done at each operator decides
        # how long an estimate takes.
        operands = tensors_in((args, kwargs))
        self._note_captured(operands)
        given_args, given_kwargs = args, kwargs
        args, kwargs = self._without_stale_values(func, args, kwargs)
        self._held_bytes = _bytes_of_bags(func, args, kwargs)
        if func in _INDEXED:
            self._raise_if_refused(mask_error_of(*args[:2]))
            if not _fills_masked(func, args, kwargs):
                positions, self._held_bytes = self._positions_of_masks(args[1], func)
                args = (args[0], positions, *args[2:])
        if not is_backward:
            self._raise_if_refused(index_error_of(func, args, kwargs))

        if args is not given_args or kwargs is not given_kwargs:
            operands = tensors_in((args, kwargs))
        out = self._run_operator(func, types, args, kwargs, operands)
        out = without_unasked_gradients(func, args, out)

        self._note_written(func, args, kwargs)
        for written in written_tensors(func, args, kwargs):
            # ``resize_`` and ``out=`` write to what was perhaps empty until now.
            if has_one_storage(written):
                self._log_if_resized(written.untyped_storage())
        if reused is not None:
            self._log_reused(reused)
        outputs = tensors_in(out)
        if not all(self._has_known_elements(output) for output in outputs):
            self._add_sparse_bytes(_sparse_bytes(func, operands, outputs))
        numbers = [number for tensor in outputs for number in self.add(tensor)]
        position = max(len(self.log.events) - 1, 0)
        self.sparse.release_replaced()
        if self._held_bytes:
            self.log.holds_inside(position, UncertainBytes.exactly(self._held_bytes))
        if operands and not _is_view(func, operands):
            call = call_of(func, args, kwargs, describe_sparse=self.sparse.spec_of)
            self._note_call(func, call, position, operands, outputs, numbers)
        if is_backward and numbers:
            self.made_by_formulas.append(MadeByFormula(node_name(), tuple(numbers)))
        return out

    def _without_stale_values(
        self, func: OpOverload, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs]:
        """Fake real tensors that fakes were written to, or are written to by this call.

        Such as the batch vector of a pool, which PyG fills by ``arange().scatter_()``:
        a real tensor would keep the values it had before.
        """
        if self._overwritten:
            args, kwargs = tree_map(self._fake_if_overwritten, (args, kwargs))
        written = written_tensors(func, args, kwargs)
        if all(map(_is_fake, written)):
            return args, kwargs
        if not any(map(_is_fake, tree_iter((args, kwargs)))):
            # A state that torch's optimizer makes to be looked at has counters of its
            # own, which a copy would keep alive.
            is_state_made = self.phase == "base" and self._is_update_torchs
            for tensor in written:
                if not is_state_made and self._is_users(tensor):
                    self._snapshots.note_values(tensor)
            return args, kwargs
        fakes = {
            id(tensor): self._fake_in_place_of(tensor, is_trained=False)
            for tensor in written
            if _is_real(tensor)
        }
        for tensor in written:
            if id(tensor) in fakes:
                self._overwritten[tensor.untyped_storage()._cdata] = None
        args, kwargs = tree_map(lambda leaf: fakes.get(id(leaf), leaf), (args, kwargs))
        return args, kwargs

    def _is_users(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor was there before the step: the batch's, or captured."""
        is_dense = has_one_storage(tensor)
        component = tensor if is_dense else self._parts_of_sparse(tensor)[-1]
        storage = self.live.get(component.untyped_storage()._cdata)
        owner = None if storage is None else self.log.owners.get(storage.number)
        return owner in {"batch", "captured", "parameters"}

    def _fake_if_overwritten(self, leaf: object) -> Any:
        if not isinstance(leaf, torch.Tensor) or not _is_real(leaf):
            return leaf
        key = leaf.untyped_storage()._cdata
        if key not in self._overwritten:
            return leaf
        return self._fake_in_place_of(leaf, is_trained=self._overwritten[key])

    def _fake_in_place_of(self, real: torch.Tensor, *, is_trained: bool | None) -> Any:
        """Make the fake of a real tensor, without another storage in the log."""
        real_key = real.untyped_storage()._cdata
        owner = self.live.get(real_key)
        fake = self.fake.from_tensor(real)
        self._counts.name_overwritten(fake, real_key)
        storage = fake.untyped_storage()
        key = storage._cdata
        if key not in self.live and owner is not None:
            when_freed = functools.partial(self._forget_alias, key)
            reference = weakref.ref(storage, when_freed)
            self.live[key] = _LiveStorage(owner.number, 0, reference)
        is_new = self.values is not None and self.values.of(fake) is None
        if self.values is not None and is_new and is_trained is not None:
            self.values.name_own_value(fake, real, trained=is_trained)
        return fake

    def _forget_alias(self, key: int, ref: object) -> None:
        alias = self.live.get(key)
        # Another storage may have the address by now.
        if alias is not None and alias.reference is ref:
            del self.live[key]

    def _note_written(self, func: OpOverload, args: Args, kwargs: Kwargs) -> None:
        """Remember whether the values of what was written to are known."""
        if not self._overwritten or self.values is None:
            return
        for tensor in written_tensors(func, args, kwargs):
            value = self.values.of(tensor) if _is_fake(tensor) else None
            if value is not None:
                key = value.real.untyped_storage()._cdata
                if key in self._overwritten:
                    self._overwritten[key] = value.trained

    def _raise_if_refused(self, index_error: str | None) -> None:
        """Raise where a kernel would, though a rule for fake tensors does not.

        Only ahead of the backward pass, which reads by the same indices.
        """
        if index_error is not None:
            where = f" in {self.module}" if self.module else ""
            message = f"this step does not run: IndexError{where}: {index_error}"
            why = "a number in the batch stands for none of what it is looked up in"
            fix = "number the classes or words from 0, or make the table larger"
            raise StepError(message, why=why, fix=fix)

    def _operand_to_reuse(self, func: OpOverload, args: Args) -> torch.Tensor | None:
        """Find an operand whose memory the result takes, if there is one."""
        reused = self._reused_operand(func, args) if self.phase == "backward" else None
        if self.function not in _ADDING_IN_PLACE or func is not _aten.add.Tensor:
            return reused
        first, second = args[:2]
        # Where a derivative goes forward, ``linear`` adds the terms of that to new
        # tensors, and its bias in place.
        is_bias = isinstance(second, torch.Tensor) and second.ndim == 1
        is_attention = self.function == torch.nn.functional.scaled_dot_product_attention
        return first if is_bias or is_attention else reused

    def _reused_operand(self, func: OpOverload, args: Args) -> torch.Tensor | None:
        """Find the buffer that an operator of the backward pass would write into."""
        self._running_node.note_operator(len(self.log.events))
        reused = reused_operand(func, args)
        if reused is None:
            return None
        storage = self.live.get(reused.untyped_storage()._cdata)
        if storage is None or self._running_node.adds_own_term(func, storage.number):
            return None
        return reused

    def _log_reused(self, tensor: torch.Tensor) -> None:
        """Log that a storage is freed: the result that takes its place is a new one."""
        key = tensor.untyped_storage()._cdata
        if key in self.live:
            self._log_freed(key, self.live[key].number)

    def _run_operator(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Args,
        kwargs: Kwargs,
        operands: list[torch.Tensor],
    ) -> Any:
        real = [tensor for tensor in operands if not isinstance(tensor, FakeTensor)]
        out = self.sparse.run(func, args, kwargs, operands)
        if out is not NotImplemented:
            return out
        if len(real) < len(operands):

            def dispatch() -> Any:
                out = self._run_with_fakes(func, types, args, kwargs)
                return LAYOUTS.corrected(func, args, kwargs, operands, out)

            if self._has_nested:
                out = dispatch()
            else:
                out = OUTPUTS.run(self.fake, func, args, kwargs, dispatch)
            self._counts.note(func, args, kwargs, operands, out)
        elif not operands and _makes_fake_floats(func, args, kwargs):
            with self.fake:
                out = func(*args, **kwargs)
        else:
            return tree_map(self._fake_if_large, func(*args, **kwargs))

        # A checkpoint computes its blocks again with gradients enabled; nothing else of
        # the backward pass decides a shape.
        is_forward = self.phase in {"forward", "loss"} or torch.is_grad_enabled()
        if self.values is not None and is_forward:
            self.values.compute(func, args, kwargs, out)
        return out

    def _note_call(
        self,
        func: OpOverload,
        call: KernelCall | None,
        position: int,
        operands: list[torch.Tensor],
        outputs: list[torch.Tensor],
        numbers: list[int],
    ) -> None:
        """Remember a call, so that what its kernel holds inside can be learnt later."""
        if call is None:
            is_dense = all(has_one_storage(t) for t in (*operands, *outputs))
            self.log.has_unknown_sparse_calls |= not is_dense
        sizes = tuple(self._bytes_of(output) for output in outputs)
        with_grad: tuple[bool, ...] = ()
        if self.phase in {"forward", "loss"} and torch.is_grad_enabled():
            with_grad = tuple(t.requires_grad for t in operands)
        self.calls.append(
            TrackedCall(
                position=position,
                numbers=tuple(numbers),
                made_bytes=sum(self.log.events[number].change for number in numbers),
                touched_bytes=_touched_bytes(operands, outputs)
                + self._bytes_of_known_sparse([*operands, *outputs]),
                outputs=sizes,
                name=operator_name(func),
                call=call,
                # What a sparse output takes is known from its indices.
                fake=any(_is_fake(t) and has_one_storage(t) for t in outputs),
                with_grad=with_grad,
            )
        )

    def _bytes_of(self, tensor: torch.Tensor) -> int:
        components = self.sparse.parts_of(tensor)
        if components is None:
            return tensor.numel() * tensor.itemsize
        return sum(component.untyped_storage().nbytes() for component in components)

    def _bytes_of_known_sparse(self, tensors: list[torch.Tensor]) -> int:
        size = 0
        for tensor in tensors:
            for component in self.sparse.parts_of(tensor) or ():
                size += component.nbytes
        return size

    def _fake_if_large(self, leaf: object) -> Any:
        """Fake a real float that is large, such as a mask made of integers."""
        if not isinstance(leaf, torch.Tensor) or not _is_inexact(leaf.dtype):
            return leaf
        if leaf.untyped_storage().nbytes() <= _SMALL_BYTES:
            return leaf
        fake = self.fake.from_tensor(leaf)
        if self.values is not None:
            self.values.name_value_if_small(fake, leaf)
        return fake

    def _run_with_fakes(
        self, func: OpOverload, types: Sequence[type], args: Args, kwargs: Kwargs
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags or (
            values_decide_shapes(func) and func is not _aten.index.Tensor
        ):
            if func in _CTC_LOSSES and not _is_fake(args[3]):
                return self._lose_by_alignment(args)
            return self._from_values(func, args, kwargs)
        if func is _aten._pack_padded_sequence.default and not _is_fake(args[1]):
            return self._pack_sequences(func, args)
        if self._has_nested:
            # torch remembers that an offset's tensor stands for ragged sizes, of which
            # it could only make a fake with symbols in place of sizes.  A view is
            # another tensor.
            args, kwargs = tree_map(_view_of_real, (args, kwargs))
        rule = shape_rule(func)
        if rule is func:
            # What torch does once the mode is active.  To enter it first, and to call
            # the operator anew, takes 112 us of CPU where this takes 81.
            return self.fake.__torch_dispatch__(func, types, args, kwargs)
        with self.fake:
            return rule(*args, **kwargs)

    def _pack_sequences(self, func: OpOverload, args: Args) -> Any:
        """Pack sequences of known lengths, for which torch has no rule of shapes."""
        padded, lengths, batch_first = args
        stand_in = torch.empty(padded.shape[:2], dtype=torch.uint8)
        packed, batch_sizes = func(stand_in, lengths, batch_first)
        time_axis = 1 if batch_first else 0
        self._held_bytes += _bytes_of_packed_copies(padded, batch_sizes, time_axis)
        with self.fake:
            return padded.new_empty((len(packed), *padded.shape[2:])), batch_sizes

    def _lose_by_alignment(self, args: Args) -> Any:
        """Compute a CTC loss: the lengths of the targets alone say what it keeps."""
        log_probs, _targets, _input_lengths, target_lengths = args[:4]
        if isinstance(target_lengths, torch.Tensor):
            target_lengths = target_lengths.tolist()
        steps, samples, _classes = log_probs.shape
        # A blank before, between and behind the labels of each target.
        states = 2 * max(target_lengths, default=0) + 1
        with self.fake:
            losses = log_probs.new_empty((samples,))
            return losses, log_probs.new_empty((samples, steps, states))

    def _from_values(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator whose result depends on values, or assume some."""
        is_scalar = func is _aten._local_scalar_dense.default
        fakes = [leaf for leaf in tree_iter((args, kwargs)) if _is_fake(leaf)]
        values = [self.value_of(fake) for fake in fakes]
        known = [value for value in values if value is not None]
        if len(known) == len(fakes):
            is_trained = any(value.trained for value in known)
            if is_trained:
                self._note_assumption(SCALAR_NOW if is_scalar else CHOSEN_NOW, func)
            real_args = tree_map(self._real_value, args)
            real_kwargs = tree_map(self._real_value, kwargs)
            real = func(*real_args, **real_kwargs)
            as_fake = functools.partial(self._as_fake, is_trained=is_trained)
            return tree_map(as_fake, real)
        if is_scalar:
            return self._assume_scalar(func, args[0].dtype, self._counts.most(args[0]))
        if func in _COMPARISONS:
            return self._assume_scalar(func, torch.bool)
        return self._with_share_chosen(func, args, kwargs)

    def _assume_scalar(
        self, func: OpOverload, dtype: torch.dtype, most: int | None = None
    ) -> bool | int | float:
        is_of_update = self.phase not in {"forward", "loss", "backward"}
        if is_of_update and self._is_update_torchs:
            return self._scalars.read(dtype, most)
        self._note_assumption(SCALAR, func)
        if dtype == torch.bool:
            self.log.assumed_conditions += 1
        elif dtype.is_floating_point and most is None:
            self.log.assumed_numbers += 1
        return self._scalars.read(dtype, most)

    def _as_fake(self, leaf: object, *, is_trained: bool) -> Any:
        """Fake a float that was computed for real, and remember its value."""
        if not isinstance(leaf, torch.Tensor) or not _is_inexact(leaf.dtype):
            return leaf
        fake = self.fake.from_tensor(leaf)
        if self.values is not None:
            self.values.name_value(fake, leaf, trained=is_trained)
        return fake

    def _with_share_chosen(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Assume how many elements a mask of unknown values chooses."""
        if func is _aten.nonzero.default:
            self._note_assumption(ALL_CHOSEN, func)
            return self._chosen_positions(args[0].shape)
        if func is _aten.masked_select.default:
            return self._selected_by_mask(func, *args)
        if func is _aten.bincount.default:
            # The largest value decides, of which nothing is known; who names a length
            # names the one that is asked for.
            self._note_assumption(ALL_CHOSEN, func)
            count = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
            with self.fake:
                return args[0].new_empty(count or self._chosen_of(args[0].shape))
        if func is _aten._unique2.default:
            return self._distinct_values(func, arguments_by_name(func, args, kwargs))
        with self.fake:
            return func(*args, **kwargs)

    def _selected_by_mask(
        self, func: OpOverload, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Give as many elements as a mask chooses, or is assumed to."""
        shape = np.broadcast_shapes(values.shape, mask.shape)
        if isinstance(mask, FakeTensor):
            self._note_assumption(ALL_CHOSEN, func)
            count = self._chosen_of(shape)
        else:
            count = int(mask.expand(shape).sum())
        with self.fake:
            return values.new_empty((count,))

    def _distinct_values(
        self, func: OpOverload, named: Kwargs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Assume how many values are distinct; where the others are, and how many."""
        self._note_assumption(ALL_CHOSEN, func)
        values = named["self"]
        count = self._chosen_of(values.shape)
        positions = counts = torch.empty(0, dtype=torch.int64)
        if named["return_inverse"]:
            positions = torch.arange(values.numel()).clamp_(max=count - 1)
            positions = positions.view(values.shape)
        if named["return_counts"]:
            counts = torch.ones(count, dtype=torch.int64)
        with self.fake:
            distinct = values.new_empty((count,))
        return distinct, positions, counts

    def _positions_of_masks(
        self, indices: Sequence[torch.Tensor | None], func: OpOverload
    ) -> tuple[list[Any], int]:
        """Turn masks into positions, so that shapes are known; give their bytes too.

        The kernel makes the same list of positions, and gives it back.
        """
        positions: list[torch.Tensor | None] = []
        listed_bytes = 0
        for index in indices:
            if index is None or index.dtype not in _MASK_TYPES:
                positions.append(index)
                continue
            value = self.value_of(index) if isinstance(index, FakeTensor) else None
            if value is not None and value.trained:
                self._note_assumption(CHOSEN_NOW, func)
            if isinstance(index, FakeTensor) and value is None:
                self._note_assumption(ALL_CHOSEN, func)
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
        if nbytes > _SMALL_BYTES:
            with self.fake:
                return torch.empty((count, len(shape)), dtype=torch.int64)
        if not shape:
            return torch.zeros((count, 0), dtype=torch.int64)
        axes = np.unravel_index(np.arange(count), tuple(shape))
        columns = [torch.from_numpy(np.ascontiguousarray(axis)) for axis in axes]
        return torch.stack(columns, 1)

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """Give what a tensor stands for; None if it is not known."""
        return None if self.values is None else self.values.of(tensor)

    def _real_value(self, leaf: object) -> Any:
        value = self.value_of(leaf) if isinstance(leaf, FakeTensor) else None
        return leaf if value is None else value.real

    def _note_assumption(self, what: str, func: OpOverload) -> None:
        self.log.assumptions[what, operator_name(func)] += 1


_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
"""Methods that read memory without calling an operator."""


_ADDING_IN_PLACE = {
    torch.nn.functional.linear,
    torch.nn.functional.scaled_dot_product_attention,
}
"""Functions that add to a product of their own: in place, except to what is no plain
tensor (``isTensorSubclassLike`` in torch's ``Linear.cpp`` and ``attention.cpp``).  The
bias of rows that do not lie one after the other (others are a single product with the
bias), and a mask of floats."""


class ReadsValues(TorchFunctionMode):
    """Answers ``tolist`` and ``numpy``, which read memory that a fake tensor lacks.

    It also tells the tracker which function of torch's runs.
    """

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Run a function, with the real tensor where one is read."""
        if func in _READS and isinstance(args[0], FakeTensor):
            value = self.tracker.value_of(args[0])
            if value is not None:
                if value.trained:
                    self.tracker.log.assumptions[CHOSEN_NOW, func.__name__] += 1
                args = (value.real, *args[1:])
        outer, self.tracker.function = self.tracker.function, func
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.tracker.function = outer


def _is_view(func: OpOverload, operands: list[torch.Tensor]) -> bool:
    """Tell whether an operator makes nothing: of sparse tensors, most views are copies.

    Such as the transpose, which also sorts the indices.
    """
    if func in _LIKE_VIEWS:
        return True
    return func.is_view and all(has_one_storage(operand) for operand in operands)


def _view_of_real(leaf: object) -> Any:
    if isinstance(leaf, torch.Tensor) and _is_real(leaf):
        return leaf.detach()
    return leaf


def _is_fake(leaf: object) -> bool:
    return isinstance(leaf, FakeTensor)


def _is_real(tensor: torch.Tensor) -> bool:
    """Tell a tensor with memory, of one storage, from fakes and sparse ones."""
    return not isinstance(tensor, FakeTensor) and tensor.layout is torch.strided


def _fills_masked(func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    """Tell whether one number is written where a mask holds, as ``x[mask] = 0`` does.

    The kernel then fills by the mask, and lists no positions
    (``canDispatchToMaskedFill`` in torch's ``TensorAdvancedIndexing.cpp``).
    """
    if func is _aten.index.Tensor:
        return False
    named = arguments_by_name(func, args, kwargs)
    indices = [index for index in named["indices"] if index is not None]
    is_number = named["values"].numel() == 1 and not named["accumulate"]
    return is_number and len(indices) == 1 and indices[0].dtype in _MASK_TYPES


def _bytes_of_bags(func: OpOverload, args: Args, kwargs: Kwargs) -> int:
    """Count what the backward pass of bags holds by the words that are in them.

    Small calls, with words and bags of zeros, cannot show it (``EmbeddingBag.cpp``).

    Returns:
        Bytes; 0 of other operators, and where words do not decide.
    """
    if func is not _aten._embedding_bag_backward.default:
        return 0
    named = arguments_by_name(func, args, kwargs)
    if named["mode"] == _MAXIMUM_OF_BAG:
        return _bytes_of_full_bags(named)
    gradient, words, padding = named["grad"], named["indices"], named["padding_idx"]
    if not named["sparse"] or padding < 0:
        return 0
    # A gradient and a mask of all words, and a list of those that are no padding.
    words_listed = len(words)
    if not _is_fake(words):
        words_listed = int(torch.count_nonzero(words != padding))
    row_bytes = gradient.shape[-1] * gradient.itemsize + torch.bool.itemsize
    return int(len(words) * row_bytes + words_listed * torch.int64.itemsize)


def _bytes_of_full_bags(named: Kwargs) -> int:
    """Count what the backward pass of bags' maxima takes out of those not empty.

    A position of each such bag, its gradient, and which rows had the maxima.
    """
    gradient, rows_of_maxima = named["grad"], named["maximum_indices"]
    words, offsets, padding = named["indices"], named["offsets"], named["padding_idx"]
    full_bags = len(gradient)
    if not _is_fake(words) and not _is_fake(offsets):
        counted = (words != padding).cumsum(0)
        counted = torch.nn.functional.pad(counted, (1, 0))
        ends = torch.nn.functional.pad(offsets[1:], (0, 1), value=len(words))
        full_bags = int(torch.count_nonzero(counted[ends] > counted[offsets]))
    row_bytes = gradient.itemsize + rows_of_maxima.itemsize
    width = gradient.shape[-1]
    return int(full_bags * (torch.int64.itemsize + width * row_bytes))


def _bytes_of_packed_copies(
    padded: torch.Tensor, batch_sizes: torch.Tensor, time_axis: int
) -> int:
    """Count what is copied while sequences are packed, beside the result.

    Steps that as many sequences have are taken out together, and copied if they do not
    lie one after the other (``PackedSequence.cpp``).

    Args:
        padded: What is packed, ``[T, B, ...]`` or ``[B, T, ...]``.
        batch_sizes: How many sequences have each step.
        time_axis: That of the steps.

    Returns:
        Bytes.
    """
    # A "meta" tensor: a fake takes 50 times as long for a part of it.
    shape, stride, dtype = padded.shape, padded.stride(), padded.dtype
    padded = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    padded = padded.transpose(0, time_axis)
    sizes, step_counts = torch.unique_consecutive(batch_sizes, return_counts=True)
    start = copied_bytes = 0
    for size, step_count in zip(sizes.tolist(), step_counts.tolist(), strict=True):
        block = padded[start : start + step_count, :size]
        start += step_count
        if not block.is_contiguous():
            copied_bytes += block.numel() * block.itemsize
    return copied_bytes


def _is_inexact(dtype: torch.dtype) -> bool:
    """Tell floats and complex numbers, which are fake, from what decides shapes."""
    return dtype.is_floating_point or dtype.is_complex


@functools.cache
def _takes_tensors(func: OpOverload) -> bool:
    arguments = func._schema.arguments
    return any(isinstance(a.type, torch.TensorType) for a in arguments)


def _makes_fake_floats(func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    """Tell whether an operator without operands makes floats that need no values.

    One that takes tensors was given numbers in their place, as ``torch.div(length, 8,
    rounding_mode="trunc")`` is: what it makes is a number too, perhaps a size.
    """
    if _takes_tensors(func):
        return False
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    name = operator_name(func)
    if not _is_inexact(dtype) or any(word in name for word in _VALUES):
        return False
    if func in _CONSTANTS:
        return bool(math.prod(args[0]) * dtype.itemsize > _SMALL_BYTES)
    return True


def _sparse_bytes(
    func: OpOverload, operands: list[torch.Tensor], outputs: list[torch.Tensor]
) -> int:
    """Tell what sparse tensors that a call makes take, at most.

    Args:
        func: The operator.
        operands: The tensors among all arguments.
        outputs: What it gave; of some the elements are not known.

    Returns:
        Bytes: of what is made of indices and values theirs, of what is made of a dense
        operand an index for each axis of each element.
    """
    if all(has_one_storage(output) for output in outputs):
        return 0
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
