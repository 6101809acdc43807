"""The mode under which a training step's floats are fake and every byte is logged.

It sees each operator once, and asks in turn: ``overwritten_values`` which real tensors
are stale, ``value_answers`` what depends on values, ``shape_rules`` and ``layouts``
what a fake result looks like; then ``storage_ledger`` logs what was made, and
``tracked_calls`` how, for what is learnt when the step has ended.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nested._internal.nested_tensor import NestedTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from loaderkit.budget.step.accumulation import RunningNode, reused_operand
from loaderkit.budget.step.allocation_log import PhaseStart, UncertainBytes
from loaderkit.budget.step.assumed_scalars import MOST, Assumed
from loaderkit.budget.step.call_arguments import (
    arguments_by_name,
    tensors_in,
    written_tensors,
)
from loaderkit.budget.step.checkpoint_count import CheckpointCount
from loaderkit.budget.step.fake_tensors import (
    SMALL_BYTES,
    is_fake,
    is_inexact,
    is_real,
)
from loaderkit.budget.step.held_by_values import bytes_of_bags, bytes_of_packed_copies
from loaderkit.budget.step.index_ranges import index_error_of, mask_error_of
from loaderkit.budget.step.kernel_calls import operator_name
from loaderkit.budget.step.layouts import LAYOUTS
from loaderkit.budget.step.optimizer_copies import is_torchs
from loaderkit.budget.step.output_cache import OUTPUTS
from loaderkit.budget.step.overwritten_values import OverwrittenValues
from loaderkit.budget.step.shape_rules import (
    shape_rule,
    values_decide_shapes,
    without_unasked_gradients,
)
from loaderkit.budget.step.sparse_fakes import SparseFakes
from loaderkit.budget.step.storage_ledger import StorageLedger
from loaderkit.budget.step.tracked_calls import TrackedCalls
from loaderkit.budget.step.value_answers import CHOSEN_NOW, MASK_TYPES, ValueAnswers
from loaderkit.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._ops import OpOverload

    from loaderkit.budget.step.allocation_log import Log, LogPhase
    from loaderkit.budget.step.call_arguments import Args, Kwargs
    from loaderkit.budget.step.real_values import RealValues
    from loaderkit.budget.step.state_snapshots import Snapshots

_aten = torch.ops.aten
_INDEXED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
"""They take masks, whose values decide the shape of the result."""
_CTC_LOSSES = (_aten._ctc_loss.default, _aten._ctc_loss.Tensor)
_VALUES = ("arange", "scalar_tensor", "linspace")
"""Operators that make floats of their arguments alone; they are real, since a shape may
be computed from them."""

_CONSTANTS = (_aten.ones.default, _aten.zeros.default, _aten.full.default)
"""Operators that make floats of one value; small ones are real.  Hugging Face's models
make a mask of ones where none is given, and ask whether it is a fake: if so, they make
another mask than in a training (Blenderbot was 0.6 % too high)."""


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
        """Gets the tensors of the user's that the step writes to."""
        self.sparse = SparseFakes(fake)
        self.ledger = StorageLedger(
            log, fake=fake, sparse=self.sparse, snapshots=snapshots, values=values
        )
        self.answers = ValueAnswers(log, fake=fake, assumed=assumed, values=values)
        self._overwritten = OverwrittenValues(
            fake=fake, ledger=self.ledger, answers=self.answers
        )
        self.tracked = TrackedCalls(log, self.sparse)
        self.checkpoints = CheckpointCount(log)
        self.function: object = None
        """Of torch's, that the user's code calls now."""
        self.phase: LogPhase = "base"
        self._held_bytes = 0
        """What the operator that runs holds inside, as far as it is computed here."""
        self._running_node = RunningNode()
        self._has_nested = False
        self._is_update_torchs = False

    def mark(self, phase: LogPhase) -> None:
        """Begin a phase."""
        self.phase = phase
        if phase == "zero_grad":
            self.tracked.begin_step()
            self.checkpoints.begin_step()
        self.log.marks.append(PhaseStart(len(self.log.events), phase))

    def note_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Note whose optimizer it is, before it makes its first update.

        Adafactor reads a norm and a mean of each parameter, and hands them on as
        numbers: no optimizer of torch's that updates once a step takes another branch
        for what it reads.
        """
        self._is_update_torchs = is_torchs(optimizer)

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
        self.ledger.modules.note_node()
        is_backward = self.phase == "backward"
        if func is not _aten.detach.default:
            # A block that is computed again detaches each tensor that it saves, with
            # gradients disabled (unless its checkpoint is reentrant): it goes on.
            self.checkpoints.note_operator(is_backward=is_backward)
        reused = self._operand_to_reuse(func, args)

        # Listed once, unless some are replaced: what is done at each operator decides
        # how long an estimate takes.
        operands = tensors_in((args, kwargs))
        self.ledger.note_captured(operands)
        given_args, given_kwargs = args, kwargs
        args, kwargs = self._overwritten.replace_stale(func, args, kwargs)
        written = written_tensors(func, args, kwargs)
        self._note_users_written(written, args, kwargs)
        self._held_bytes = bytes_of_bags(func, args, kwargs)
        if func in _INDEXED:
            self._raise_if_refused(mask_error_of(*args[:2]))
            if not _fills_masked(func, args, kwargs):
                positions, self._held_bytes = self.answers.positions_of_masks(
                    args[1], func
                )
                args = (args[0], positions, *args[2:])
        if not is_backward:
            self._raise_if_refused(index_error_of(func, args, kwargs))

        if args is not given_args or kwargs is not given_kwargs:
            operands = tensors_in((args, kwargs))
        out = self._run_operator(func, types, args, kwargs, operands)
        out = without_unasked_gradients(func, args, out)

        self._overwritten.note_written(func, args, kwargs)
        self.ledger.note_written(written)
        if reused is not None:
            # The result that takes its place is a new one.
            self.ledger.free(reused)
        outputs = tensors_in(out)
        self.tracked.note_unknown_sparse(func, operands, outputs)
        numbers = [number for tensor in outputs for number in self.ledger.add(tensor)]
        position = self.ledger.position()
        self.sparse.release_replaced()
        if self._held_bytes:
            self.log.holds_inside(position, UncertainBytes.exactly(self._held_bytes))
        is_forward = self.phase in {"forward", "loss"}
        self.tracked.note(
            func,
            args,
            kwargs,
            operands=operands,
            outputs=outputs,
            position=position,
            numbers=numbers,
            is_differentiated=is_forward and torch.is_grad_enabled(),
        )
        if is_backward:
            self.tracked.note_formula(numbers)
        return out

    def _note_users_written(
        self, written: list[torch.Tensor], args: Args, kwargs: Kwargs
    ) -> None:
        """Note tensors of the user's that an operator is about to write to for real."""
        if all(map(is_fake, written)) or any(map(is_fake, tensors_in((args, kwargs)))):
            return
        if self.phase == "base" and self._is_update_torchs:
            # A state that torch's optimizer makes to be looked at has counters of its
            # own, which a copy would keep alive.
            return
        for tensor in written:
            if self.ledger.is_users(tensor):
                self._snapshots.note_values(tensor)

    def _raise_if_refused(self, index_error: str | None) -> None:
        """Raise where a kernel would, though a rule for fake tensors does not.

        Only ahead of the backward pass, which reads by the same indices.
        """
        if index_error is not None:
            module = self.ledger.modules.name
            where = f" in {module}" if module else ""
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
        number = self.ledger.number_of(reused)
        if number is None or self._running_node.adds_own_term(func, number):
            return None
        return reused

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
            self.answers.counts.note(func, args, kwargs, operands, out)
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

    def _fake_if_large(self, leaf: object) -> Any:
        """Fake a real float that is large, such as a mask made of integers."""
        if not isinstance(leaf, torch.Tensor) or not is_inexact(leaf.dtype):
            return leaf
        if leaf.untyped_storage().nbytes() <= SMALL_BYTES:
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
            if func in _CTC_LOSSES and not is_fake(args[3]):
                return self._lose_by_alignment(args)
            is_update = self.phase not in {"forward", "loss", "backward"}
            is_torchs_update = is_update and self._is_update_torchs
            return self.answers.run(
                func, args, kwargs, is_torchs_update=is_torchs_update
            )
        if func is _aten._pack_padded_sequence.default and not is_fake(args[1]):
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
        self._held_bytes += bytes_of_packed_copies(padded, batch_sizes, time_axis)
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
            answers = self.tracker.answers
            value = answers.value_of(args[0])
            if value is not None:
                if value.trained:
                    answers.note_assumption(CHOSEN_NOW, func.__name__)
                args = (value.real, *args[1:])
        outer, self.tracker.function = self.tracker.function, func
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.tracker.function = outer


def _view_of_real(leaf: object) -> Any:
    if isinstance(leaf, torch.Tensor) and is_real(leaf):
        return leaf.detach()
    return leaf


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
    return is_number and len(indices) == 1 and indices[0].dtype in MASK_TYPES


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
    if not is_inexact(dtype) or any(word in name for word in _VALUES):
        return False
    if func in _CONSTANTS:
        return bool(math.prod(args[0]) * dtype.itemsize > SMALL_BYTES)
    return True
