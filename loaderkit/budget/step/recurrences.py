"""What recurrent kernels over packed sequences take, without each of their time steps.

Torch's kernel goes through the time steps one by one, with some fifty operators for
each of a layer and direction.  To track them all takes seconds for a step of training,
and a plan tracks dozens of steps.  But time steps are alike: what one makes and frees
depends on how many sequences it and its neighbours have, and on nothing else.  So a
short recurrence is tracked once, by itself, with the same layers and with numbers of
sequences that are told apart in the shape of each tensor.  The time steps of any
other sequences are then written into the log from that.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
import weakref
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from loaderkit.budget.step.accumulation import (
    References,
    count_references,
    references_alone,
)
from loaderkit.budget.step.allocation_log import Bounds, Log
from loaderkit.budget.step.formulas import FORMULAS, DifferentiatedCall
from loaderkit.budget.step.kernel_calls import KernelCall, TensorSpec
from loaderkit.budget.step.kernels import KERNELS, SizedCall
from loaderkit.budget.step.tracker import TrackedCall, Tracker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._ops import OpOverload

    from loaderkit.budget.step.allocation_log import LogPhase, Part
    from loaderkit.budget.step.call_arguments import Args, Kwargs

_aten = torch.ops.aten
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_ARGUMENTS_OF_PACKED = 9
"""Data, batch sizes, state, parameters, and five settings; those of padded sequences
have nine too, but a state in the second place."""
_FEWEST_STEPS = 10
"""Of recurrences that are not tracked whole; chosen: a short recurrence has about as
many."""
_MARKER = 1_000_003
"""The smallest number of sequences of a short recurrence; chosen: no width of a layer
is as large.  Nothing is computed, so that it costs nothing."""
_SPREAD = 7919
"""By which falls of the number of sequences are told apart; chosen: a prime."""
_ROWS_TRIED = (1, 2, 5, 33, 400)
"""Numbers of sequences for which kernels are asked what they hold inside.  Chosen:
vectors, small products, and more rows than a block of any library has."""
_NEAR = 2
"""Time steps at either end of a recurrence that are like no other: the first ones read
the state that was given, the last ones make what is given back."""

Rows = Literal[
    "one",
    "own",
    "previous",
    "next",
    "change",
    "next change",
    "two before",
    "two behind",
    "other before",
    "other behind",
    "all",
    "samples",
    "fewest",
]
"""What bytes are in proportion to: nothing, the sequences of the time step itself, of
the one before or behind it in the order in which the kernel goes through them, the
difference to these, the ones beyond them, the last one before or the first one behind
it that has another number; or the rows of all time steps, the samples of the batch, or
the sequences of the last time step."""


class NotRepeatable(BaseException):
    """A step does with a recurrence what can only be tracked time step by time step.

    It is no error, and goes through the user's code: no ``except Exception`` may end
    it.  Whoever tracks the step begins anew.
    """


class NotLearnt(BaseException):
    """A step has a recurrence of which too little was learnt; the same holds of it."""

    def __init__(
        self, recurrence: _Recurrence, sizes: list[int], pattern: tuple[bool, ...]
    ) -> None:
        super().__init__()
        self.recurrence, self.sizes, self.pattern = recurrence, sizes, pattern

    def learn(self) -> None:
        """Learn it: where no mode is active."""
        RECORDINGS.learn(self.recurrence, self.sizes, self.pattern)


class _Described(NamedTuple):
    """An input."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    """Whether it gets a gradient."""


class _Recurrence(NamedTuple):
    """A call of a recurrent kernel, but for its sequences."""

    func: Any
    tensors: tuple[_Described, ...]
    """Data, without its rows; states, without the samples; parameters."""
    states: int
    """How many of these tensors are states."""
    settings: tuple[Any, ...]
    """Whether there are biases, layers, dropout, training, both directions."""
    autocast: torch.dtype | None
    threads: int

    @property
    def passes(self) -> int:
        """How often the kernel goes through the time steps: layers times directions."""
        _biases, layers, _dropout, _train, both_ways = self.settings
        return int(layers) * (2 if both_ways else 1)


class _Context(NamedTuple):
    """What the memory of a time step depends on, besides sizes."""

    number: int
    """Of the pass through all time steps that it is in."""
    from_start: int
    """Time steps before it in this pass, at most :data:`_NEAR`."""
    from_end: int
    """Time steps after it in this pass, at most :data:`_NEAR`."""
    changes: tuple[bool, ...]
    """Whether the number of sequences changes before the one before it, before it,
    behind it, and behind the one behind it."""
    others: tuple[bool, bool]
    """Whether it changes anywhere before it, and anywhere behind it."""


class _Change(NamedTuple):
    """A storage is made or freed."""

    is_made: bool
    row_bytes: int
    """Bytes for one row."""
    rows: Rows
    external: tuple[str, int] | None = None
    """What it is to the caller, and its number: an "output", the "gradient" of an
    input, the "output gradient" that is taken, an "input" that is read for the last
    time; or "kept": the end of all storages that are kept with this group."""
    kept: int | None = None
    """With which group it is kept until the end of a pass, if it is kept by more than
    the next steps: the state before each change is, by the list of all states."""

    @property
    def frees_kept(self) -> bool:
        """Whether it is the end of a group."""
        return self.external is not None and self.external[0] == "kept"


class _SizedOperator(NamedTuple):
    """An operator whose kernel holds something inside."""

    place: int
    """How many changes of its time step come before it returns."""
    noted: _NotedCall
    sizes: dict[int, Rows]
    """What numbers in shapes stand for."""


class _Shaped(NamedTuple):
    """An operand or output of a call."""

    shape: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shaped:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.itemsize)

    def nbytes(self, replaced: dict[int, int]) -> int:
        """Count its bytes, with other sizes in place of some."""
        count = self.itemsize
        for size in self.shape:
            count *= replaced.get(size, size)
        return count


class _NotedCall(NamedTuple):
    """A call of an operator in a short recurrence."""

    call: KernelCall
    name: str
    operands: tuple[_Shaped, ...]
    outputs: tuple[_Shaped, ...]
    made: tuple[_Shaped, ...]
    """Storages that it made, by the tensors with which it did."""
    with_grad: tuple[bool, ...]

    def with_sizes(self, replaced: dict[int, int]) -> SizedCall:
        """Give the same call with other sizes in place of some."""
        outputs = tuple(output.nbytes(replaced) for output in self.outputs)
        return SizedCall(_with_sizes(self.call, replaced), outputs)


@dataclass
class _Template:
    """What a time step of some context makes and frees, in order."""

    changes: list[_Change] = field(default_factory=list)
    operators: list[_SizedOperator] = field(default_factory=list)


class _Given(NamedTuple):
    """A tensor that the kernel gives: an output, or the gradient of an input."""

    shape: tuple[int | Rows, ...]
    stride: tuple[int, ...] | None
    """None where it is contiguous."""
    dtype: torch.dtype

    def made_like(self, tensor: torch.Tensor, values: dict[Rows, int]) -> torch.Tensor:
        """Make one of the kind of a tensor, with so many rows."""
        shape = [values[axis] if isinstance(axis, str) else axis for axis in self.shape]
        if self.stride is None:
            return tensor.new_empty(shape, dtype=self.dtype)
        return tensor.new_empty_strided(shape, self.stride, dtype=self.dtype)


@dataclass
class _Recording:
    """What was learnt of a recurrence so far, with some of its outputs' gradients."""

    forward: dict[_Context | None, _Template] = field(default_factory=dict)
    """By context; None is what comes before the first time step."""
    backward: dict[_Context | None, _Template] = field(default_factory=dict)
    outputs: list[_Given] = field(default_factory=list)
    gradients: dict[int, _Given] = field(default_factory=dict)
    """By the number of the input."""
    saved: list[int] = field(default_factory=list)
    """Inputs that are kept for the backward pass."""


class PackedRecurrences(TorchFunctionMode):
    """Writes recurrences over packed sequences into a log, from what was learnt."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker
        self._cast_weights: set[int] = set()
        """Parameters that a recurrence has read under autocast, which keeps their short
        copies for the next one."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Run a function: a recurrence over packed sequences as one operator."""
        if func in _RECURRENT and len(args) == _ARGUMENTS_OF_PACKED and not kwargs:
            outputs = self._repeat(func, args)
            if outputs is not None:
                return outputs
        return func(*args, **(kwargs or {}))

    def _repeat(self, func: Any, args: Args) -> Any:
        """Play a recurrence; None where its time steps must be tracked one by one."""
        data, batch_sizes, state, parameters, *settings = args
        states = list(state) if isinstance(state, (tuple, list)) else [state]
        if not isinstance(batch_sizes, torch.Tensor) or batch_sizes.is_floating_point():
            return None
        inputs = [data, *states, *parameters]
        is_known = self._can_be_repeated(inputs, states, parameters)
        if not is_known or isinstance(batch_sizes, FakeTensor):
            return None
        sizes = batch_sizes.tolist()
        is_even = sizes[0] == sizes[-1]
        if len(sizes) < _FEWEST_STEPS or (func is torch.lstm and is_even):
            # Torch hands an LSTM over sequences of one length to oneDNN, whole.
            return None
        autocast = None
        if torch.is_autocast_enabled("cpu"):
            autocast = torch.get_autocast_dtype("cpu")
            keys = {id(parameter) for parameter in parameters}
            if keys & self._cast_weights:
                return None
            self._cast_weights |= keys
        tensors = [(data, data.shape[1:])]
        tensors += [(tensor, (tensor.shape[0], tensor.shape[2])) for tensor in states]
        tensors += [(tensor, tensor.shape) for tensor in parameters]
        recurrence = _Recurrence(
            func,
            tuple(itertools.starmap(_described, tensors)),
            len(states),
            tuple(settings),
            autocast,
            torch.get_num_threads(),
        )
        recording = RECORDINGS.forward(recurrence, sizes)
        if recording is None:
            return None
        player = _Player(self.tracker, recurrence, sizes)
        outputs = _Repeated.apply(player, recording, *inputs)  # type: ignore[no-untyped-call]
        return outputs[0], *outputs[1:]

    def _can_be_repeated(
        self,
        inputs: list[Any],
        states: list[torch.Tensor],
        parameters: list[torch.Tensor],
    ) -> bool:
        """Tell whether a recurrence is trained as most are."""
        # A small state of zeros is real.
        is_plain = all(
            type(tensor) in {FakeTensor, torch.Tensor} and tensor.is_contiguous()
            for tensor in inputs
        )
        return (
            _CAN_ASK_AUTOGRAD
            and is_plain
            and all(parameter.is_leaf for parameter in parameters)
            and len({id(parameter) for parameter in parameters}) == len(parameters)
            and all(state.dim() == 3 for state in states)
            and self.tracker.phase in {"forward", "loss"}
            and self.tracker.values is None
            and torch.is_grad_enabled()
            and any(tensor.requires_grad for tensor in inputs)
            and not _has_saved_tensor_hooks()
            # No public way to ask whether vmap, grad or jvp calls.
            and torch._C._functorch.peek_interpreter_stack() is None
            and torch.autograd.forward_ad._current_level < 0
        )


def _described(tensor: torch.Tensor, shape: Sequence[int]) -> _Described:
    return _Described(tuple(shape), tensor.dtype, tensor.requires_grad)


_CAN_ASK_AUTOGRAD = all(
    hasattr(torch._C._autograd, name)
    for name in (
        "_top_saved_tensors_default_hooks",
        "_get_current_graph_task_keep_graph",
    )
)
"""Whether this torch has what is asked below; neither has a public name."""


def _has_saved_tensor_hooks() -> bool:
    """Tell whether what is saved for a backward pass goes elsewhere, or is dropped."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _Repeated(torch.autograd.Function):
    """A recurrence as one operator, that writes its time steps into the log."""

    @staticmethod
    def forward(ctx: Any, player: _Player, recording: _Recording, *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.player = player
        ctx.input_count = len(inputs)
        # Held here, and not by autograd, which would not give them up one by one.
        player.saved = {number: inputs[number] for number in recording.saved}
        ctx.leaves = [
            weakref.ref(tensor)
            for tensor in inputs
            if tensor.is_leaf and tensor.requires_grad
        ]
        return tuple(player.play_forward(recording, inputs[0]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        has_sums = any(map(_has_gradient, ctx.leaves))
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        is_cast = torch.is_autocast_enabled("cpu")
        if torch.is_grad_enabled() or keeps_graph or has_sums or is_cast:
            raise NotRepeatable
        given = ctx.player.play_backward(gradients, ctx.input_count)
        return None, None, *given


def _has_gradient(reference: weakref.ref[torch.Tensor]) -> bool:
    leaf = reference()
    return leaf is not None and leaf.grad is not None


class _Player:
    """Writes the time steps of a recurrence into a log."""

    def __init__(
        self, tracker: Tracker, recurrence: _Recurrence, sizes: list[int]
    ) -> None:
        self.tracker, self.recurrence, self.sizes = tracker, recurrence, sizes
        self._live: dict[int, list[int]] = defaultdict(list)
        """Numbers of storages that live, by their bytes."""
        self._kept: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """Numbers and bytes of those that are kept until the end of a pass."""
        self.saved: dict[int, torch.Tensor] = {}
        """Inputs that the backward pass reads, by their numbers."""
        # A backward pass may never come.
        live = self._live
        weakref.finalize(self, _free_all, tracker, live).atexit = False

    def play_forward(
        self, recording: _Recording, data: torch.Tensor
    ) -> list[torch.Tensor]:
        """Write the forward pass, and make its outputs."""
        given: dict[tuple[str, int], torch.Tensor] = {}
        made = {("output", n): output for n, output in enumerate(recording.outputs)}
        self._play(recording.forward, 1, data, made, given, {})
        return [given["output", number] for number in range(len(recording.outputs))]

    def play_backward(
        self, gradients: Sequence[torch.Tensor | None], input_count: int
    ) -> list[torch.Tensor | None]:
        """Write the backward pass, and make the gradients of inputs.

        Raises:
            NotRepeatable: It is not known what it takes.
        """
        pattern = tuple(gradient is not None for gradient in gradients)
        recording = RECORDINGS.backward(self.recurrence, self.sizes, pattern)
        if recording is None:
            raise NotRepeatable
        taken = {
            ("output gradient", number): gradient
            for number, gradient in enumerate(gradients)
            if gradient is not None and _is_alone(gradient)
        }
        like = next(gradient for gradient in gradients if gradient is not None)
        given: dict[tuple[str, int], torch.Tensor] = {}
        made = {("gradient", n): g for n, g in recording.gradients.items()}
        self._play(recording.backward, -1, like, made, given, taken)
        return [given.get(("gradient", number)) for number in range(input_count)]

    def _play(
        self,
        templates: dict[_Context | None, _Template],
        direction: int,
        like: torch.Tensor,
        made: dict[tuple[str, int], _Given],
        given: dict[tuple[str, int], torch.Tensor],
        taken: dict[tuple[str, int], torch.Tensor],
    ) -> None:
        """Write templates into the log, one for each time step.

        Args:
            templates: By context.
            direction: 1 forward, -1 from the last time step to the first.
            like: A tensor of the kind to make.
            made: What to make for the caller.
            given: Gets it.
            taken: What is the caller's, and is freed on the way.
        """
        tracker, live = self.tracker, self._live
        steps = _time_steps(self.recurrence, self.sizes)
        for context, values in steps[::direction]:
            template = templates[context]
            sized_operators = iter((*template.operators, None))
            sized_operator = next(sized_operators)
            for index, change in enumerate((*template.changes, None)):
                while sized_operator is not None and sized_operator.place <= index:
                    self._note(sized_operator, values)
                    sized_operator = next(sized_operators)
                if change is None:
                    break
                if change.external is not None:
                    kind, number = change.external
                    if kind == "input":
                        self.saved.pop(number, None)
                        continue
                    if kind == "kept":
                        for storage, nbytes in self._kept.pop(number, []):
                            tracker.log_freed(storage, nbytes)
                        continue
                    if not change.is_made:
                        if change.external in taken:
                            tracker.log_given_up(taken[change.external])
                        continue
                    tensor = made[change.external].made_like(like, values)
                    given[change.external] = tensor
                    continue
                nbytes = change.row_bytes * values[change.rows]
                if change.kept is not None:
                    kept = (tracker.log_made(nbytes), nbytes)
                    self._kept[change.kept].append(kept)
                elif change.is_made:
                    live[nbytes].append(tracker.log_made(nbytes))
                elif live[nbytes]:
                    # Which of those that are as large it is makes no difference.
                    tracker.log_freed(live[nbytes].pop(), nbytes)
                else:
                    raise NotRepeatable

    def _note(self, sized_operator: _SizedOperator, values: dict[Rows, int]) -> None:
        """Note a kernel that holds something inside."""
        replaced = {
            marker: values[rows] for marker, rows in sized_operator.sizes.items()
        }
        noted = sized_operator.noted
        sized = noted.with_sizes(replaced)
        touched = (*noted.operands, *noted.outputs)
        self.tracker.calls.append(
            TrackedCall(
                position=max(len(self.tracker.log.events) - 1, 0),
                numbers=(),
                made_bytes=0,
                touched_bytes=sum(shaped.nbytes(replaced) for shaped in touched),
                outputs=sized.outputs,
                name=noted.name,
                call=sized.call,
                fake=True,
                with_grad=(),
            )
        )


def _free_all(tracker: Tracker, live: dict[int, list[int]]) -> None:
    """Log that what a recurrence has saved is freed."""
    for nbytes, numbers in live.items():
        for number in numbers:
            tracker.log_freed(number, nbytes)
    live.clear()


def _with_sizes(call: KernelCall, replaced: dict[int, int]) -> KernelCall:
    """Give a call with other sizes in place of some."""

    def resize(leaf: object) -> Any:
        if isinstance(leaf, TensorSpec):
            shape = tuple(replaced.get(size, size) for size in leaf.shape)
            stride = tuple(replaced.get(step, step) for step in leaf.stride)
            return leaf._replace(shape=shape, stride=stride)
        return replaced.get(leaf, leaf) if type(leaf) is int else leaf

    return call._replace(leaves=tuple(map(resize, call.leaves)))


class _TimeStep(NamedTuple):
    """A time step of a pass."""

    context: _Context | None
    """None of what comes before the first one."""
    values: dict[Rows, int]
    """How many rows of each kind there are."""


def _time_steps(recurrence: _Recurrence, sizes: list[int]) -> list[_TimeStep]:
    """List the time steps of all passes, in the order of the kernel.

    Args:
        recurrence: It says which passes there are.
        sizes: Sequences that have each time step.
    """
    whole: dict[Rows, int] = {
        "one": 1,
        "all": sum(sizes),
        "samples": sizes[0],
        "fewest": sizes[-1],
    }
    steps = [_TimeStep(None, whole)]
    both_ways = recurrence.settings[-1]
    last = len(sizes) - 1
    for number in range(recurrence.passes):
        in_order = sizes[::-1] if both_ways and number % 2 else sizes
        padded = [in_order[0]] * 2 + in_order + [in_order[-1]] * 2
        others_before = _last_others(in_order)
        others_behind = _last_others(in_order[::-1])[::-1]
        for position, own in enumerate(in_order):
            before, previous, _, behind, beyond = padded[position : position + 5]
            context = _Context(
                number,
                min(position, _NEAR),
                min(last - position, _NEAR),
                (before != previous, previous != own, own != behind, behind != beyond),
                (others_before[position] != own, others_behind[position] != own),
            )
            near: dict[Rows, int] = {
                "own": own,
                "previous": previous,
                "next": behind,
                "change": abs(own - previous),
                "next change": abs(behind - own),
                "two before": before,
                "two behind": beyond,
                "other before": others_before[position],
                "other behind": others_behind[position],
            }
            steps.append(_TimeStep(context, near | whole))
    return steps


def _last_others(sizes: list[int]) -> list[int]:
    """Give the last number before each that is another one; itself where all are it.

    >>> _last_others([7, 7, 5, 5, 3])
    [7, 7, 7, 7, 5]
    """
    others = sizes[:1]
    for before, size in itertools.pairwise(sizes):
        others.append(others[-1] if before == size else before)
    return others


@functools.cache
def _references_of_gradient() -> References:
    """Count the references to a gradient that autograd alone holds, in a function."""
    seen: list[References] = []

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.new_empty(x.shape)

        @staticmethod
        def backward(_ctx: Any, *gradients: Any) -> Any:
            seen.append(count_references(gradients[0]))
            return gradients[0].new_empty(gradients[0].shape)

    x = FakeTensorMode().from_tensor(torch.ones(2)).requires_grad_()
    Counting.apply(x).exp().sum().backward()  # type: ignore[no-untyped-call]
    return seen[0]


def _is_alone(gradient: torch.Tensor) -> bool:
    """Tell whether autograd alone holds a gradient that a function was given."""
    references, alone = count_references(gradient), _references_of_gradient()
    return references.handles <= alone.handles and references.storages <= alone.storages


class Recordings:
    """Learns what time steps take, and remembers it."""

    def __init__(self) -> None:
        self._known: dict[tuple[_Recurrence, tuple[bool, ...]], _Recording | None] = {}
        self._patterns: dict[_Recurrence, tuple[bool, ...]] = {}
        """Which outputs had gradients when it was last asked."""

    def forward(self, recurrence: _Recurrence, sizes: list[int]) -> _Recording | None:
        """Give what is known, whichever outputs will have gradients.

        Args:
            recurrence: What is called.
            sizes: Sequences that have each time step.

        Returns:
            It has every time step; None where they must be tracked one by one.

        Raises:
            NotLearnt: Something is missing.
        """
        only_data = (True, *[False] * recurrence.states)
        pattern = self._patterns.get(recurrence, only_data)
        return self._recording(recurrence, sizes, pattern)

    def backward(
        self, recurrence: _Recurrence, sizes: list[int], pattern: tuple[bool, ...]
    ) -> _Recording | None:
        """Give what is known where some outputs have a gradient; see ``forward``."""
        self._patterns[recurrence] = pattern
        return self._recording(recurrence, sizes, pattern)

    def _recording(
        self, recurrence: _Recurrence, sizes: list[int], pattern: tuple[bool, ...]
    ) -> _Recording | None:
        key = (recurrence, pattern)
        if key not in self._known:
            raise NotLearnt(recurrence, sizes, pattern)
        recording = self._known[key]
        if recording is not None and _misses_step(recording, recurrence, sizes):
            raise NotLearnt(recurrence, sizes, pattern)
        return recording

    def learn(
        self, recurrence: _Recurrence, sizes: list[int], pattern: tuple[bool, ...]
    ) -> None:
        """Track a short recurrence with all kinds of time steps of a long one."""
        if len(self._known) > _MOST_REMEMBERED:
            self._known.clear()
        self._patterns[recurrence] = pattern
        # Looked up here, since they cannot be under a mode.
        references_alone()
        _references_of_gradient()
        try:
            learnt = _record(recurrence, _shortened(sizes), pattern)
        except Exception:  # noqa: BLE001 -- then each time step is tracked
            learnt = None
        known = self._known.get((recurrence, pattern))
        if learnt is not None and known is not None:
            learnt.forward = known.forward | learnt.forward
            learnt.backward = known.backward | learnt.backward
        if learnt is not None and _misses_step(learnt, recurrence, sizes):
            learnt = None
        self._known[recurrence, pattern] = learnt

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
        self._patterns.clear()


RECORDINGS = Recordings()
"""Of this process."""
_MOST_REMEMBERED = 500
"""Recurrences; chosen."""


def _misses_step(
    recording: _Recording, recurrence: _Recurrence, sizes: list[int]
) -> bool:
    """Tell whether there is a time step whose like was not recorded."""
    return any(
        step.context not in recording.forward or step.context not in recording.backward
        for step in _time_steps(recurrence, sizes)
    )


def _shortened(sizes: list[int]) -> list[int]:
    """Leave out time steps whose like is there, and mark each number of sequences.

    Args:
        sizes: Sequences that have each time step; they only fall.

    Returns:
        Fewer of them, large and all different where the given ones are: sums and
        differences too are told apart.

    >>> len(_shortened([7] * 50 + [3] * 50)) < 20
    True
    """
    falls = [False, *(a != b for a, b in itertools.pairwise(sizes))]
    windows = [
        (*falls[max(k - 2, 0) : k + 3], size != sizes[0], size != sizes[-1])
        for k, size in enumerate(sizes)
    ]
    first, last = _NEAR + 2, len(sizes) - _NEAR - 3
    kept: list[int] = []
    for step in range(len(sizes)):
        kept.append(step)
        alike = [k for k in kept[:-1] if first <= k and windows[k] == windows[step]]
        if not alike or step > last:
            continue
        until = kept.index(alike[-1]) + 1
        before = {windows[k] for k in kept[:until]}
        if all(windows[k] in before for k in kept[until:]):
            kept = kept[:until]

    marked = [_MARKER]
    fall_count = 0
    for step in kept[:0:-1]:
        fall_count += falls[step]
        # Squares are at different distances, so that no two differences are the same.
        fall = _MARKER + _SPREAD * fall_count**2
        marked.append(marked[-1] + fall * falls[step])
    return marked[::-1]


class _Segment(NamedTuple):
    """Events from one operator on."""

    position: int
    """Of the first event."""
    step: int
    """Number of the time step, 0 of what comes before the first one."""
    is_inside: bool
    """Whether it is the recurrence's, and nothing around it."""


class _Recorder(Tracker):  # type: ignore[no-untyped-call]
    """Tracks a short recurrence, and remembers which time step each event is of."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(FakeTensorMode(allow_non_fake_inputs=True), Log())
        self._rows_of_all = sum(sizes)
        self.shapes: dict[int, _Shaped] = {}
        """Of the tensor with which a storage was made, by the storage's number."""
        self.segments: list[_Segment] = []
        self.noted: list[tuple[int, int, LogPhase, _NotedCall]] = []
        """Calls, with their time steps, the events after which they returned, and
        whether they were of the forward pass."""
        self.has_unknown_calls = False
        self.first_nodes: list[int] = []
        """Of each time step, as autograd numbers its nodes."""
        self.first_node = self.end_node = 0
        """Of the recurrence, and behind it."""

    def add(self, tensor: torch.Tensor, owner: Part | None = None) -> list[int]:
        """Log the storages of a tensor, and remember its shape."""
        numbers = super().add(tensor, owner)
        for number in numbers:
            self.shapes[number] = _Shaped.of(tensor)
        return numbers

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Run one operator of a time step."""
        if func is not torch.ops.prim.device.default:
            self.segments.append(self._begin(func, args))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _begin(self, func: OpOverload, args: Args) -> _Segment:
        position = len(self.log.events)
        if self.phase == "forward":
            # Each time step begins by taking its rows out of those of all.
            if func is _aten.slice.Tensor and args[0].shape[0] == self._rows_of_all:
                last_node = torch._C._autograd._get_sequence_nr() - 1
                self.first_nodes.append(last_node)
            return _Segment(position, len(self.first_nodes), is_inside=True)
        node: Any = torch._C._current_autograd_node()
        number = -1 if node is None else int(node._sequence_nr())
        if self.first_node <= number < self.end_node:
            step = bisect.bisect_right(self.first_nodes, number)
            return _Segment(position, step, is_inside=True)
        # What frees the gradients of leaves is still of the time step before.
        step = self.segments[-1].step if self.segments else 0
        return _Segment(position, step, is_inside=False)

    def _note_call(
        self,
        func: OpOverload,
        call: KernelCall | None,
        position: int,
        operands: list[torch.Tensor],
        outputs: list[torch.Tensor],
        numbers: list[int],
    ) -> None:
        super()._note_call(func, call, position, operands, outputs, numbers)
        segment = self.segments[-1]
        if not segment.is_inside:
            return
        if call is None:
            self.has_unknown_calls = True
        elif not call.plain or call.held_bytes:
            tracked = self.calls[-1]
            noted = _NotedCall(
                call,
                tracked.name,
                tuple(map(_Shaped.of, operands)),
                tuple(map(_Shaped.of, outputs)),
                tuple(self.shapes[number] for number in numbers),
                tracked.with_grad,
            )
            self.noted.append((segment.step, position, self.phase, noted))


class _Gate(torch.autograd.Function):
    """Gives new gradients to some outputs, as what comes after a recurrence does."""

    @staticmethod
    def forward(
        ctx: Any, recorder: _Recorder, asked: dict[int, int], *outputs: Any
    ) -> Any:
        ctx.recorder, ctx.asked = recorder, asked
        ctx.shapes = [(tuple(output.shape), output.dtype) for output in outputs]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        given: list[torch.Tensor | None] = [None] * len(ctx.shapes)
        for number in list(ctx.asked):
            shape, dtype = ctx.shapes[number]
            gradient = gradients[0].new_empty(shape, dtype=dtype)
            ctx.asked[number] = ctx.recorder.number_of(gradient)
            given[number] = gradient
            del gradient
        return None, None, *given


def _record(
    recurrence: _Recurrence, sizes: list[int], pattern: tuple[bool, ...]
) -> _Recording | None:
    """Track a recurrence, forward and backward; None where it cannot be repeated.

    Args:
        recurrence: What is called.
        sizes: Sequences that have each time step, told apart by their numbers.
        pattern: Which outputs have a gradient.
    """
    recorder = _Recorder(sizes)
    inputs = _invent_inputs(recorder, recurrence, sizes)
    recording = _Recording()
    external: dict[int, tuple[str, int] | None] = {}
    """What a storage is to the caller, by its number."""
    refused: list[int] = []

    def note_gradient(number: int, gradient: torch.Tensor) -> None:
        storage = recorder.number_of(gradient)
        size = gradient.untyped_storage().nbytes()
        if storage is None or storage in external or size != gradient.nbytes:
            refused.append(number)
            return
        external[storage] = ("gradient", number)
        recording.gradients[number] = _describe_given(gradient, sizes)

    for number, tensor in enumerate(inputs):
        if tensor.requires_grad:
            tensor.register_hook(functools.partial(note_gradient, number))
    data, *others = inputs
    states = others[: recurrence.states]
    batch_sizes = torch.tensor(sizes)
    recorder.add_all([*inputs, batch_sizes], "batch")
    held_before = [count_references(tensor) for tensor in inputs]
    autocast: Any = nullcontext()
    if recurrence.autocast is not None:
        autocast = torch.autocast("cpu", recurrence.autocast)

    forward_start = len(recorder.log.events)
    with torch.enable_grad(), recorder:
        recorder.mark("forward")
        recorder.first_node = torch._C._autograd._get_sequence_nr()
        with autocast:
            outputs = recurrence.func(
                data,
                batch_sizes,
                tuple(states) if recurrence.func is torch.lstm else states[0],
                others[recurrence.states :],
                *recurrence.settings,
            )
            recorder.end_node = torch._C._autograd._get_sequence_nr()
            # Before autocast gives up its short copies: a step keeps them until its
            # whole forward pass has ended.
            forward_end = len(recorder.log.events)
        for number, output in enumerate(outputs):
            storage = recorder.number_of(output)
            if storage is None or storage in external:
                return None
            external[storage] = ("output", number)
            recording.outputs.append(_describe_given(output, sizes))
        for number, tensor in enumerate(inputs):
            # Either the tensor itself is kept, or a view of it.
            if any(map(operator.gt, count_references(tensor), held_before[number])):
                recording.saved.append(number)
        for number, tensor in enumerate(inputs[: 1 + recurrence.states]):
            storage = recorder.number_of(tensor)
            if storage is not None:
                external[storage] = ("input", number)
        # From here on the recurrence alone holds what it has saved of them.
        del data, states, others, tensor, inputs[: 1 + recurrence.states]
        asked = {number: -1 for number, is_asked in enumerate(pattern) if is_asked}
        recorder.mark("backward")
        gate: Any = _Gate.apply(recorder, asked, *outputs)  # type: ignore[no-untyped-call]
        backward_start = len(recorder.log.events)
        gate.backward()

    log = recorder.log
    is_certain = not (log.corrections or log.inside or log.assumptions)
    if refused or recorder.has_unknown_calls or not is_certain:
        return None
    external |= {n: ("output gradient", number) for number, n in asked.items()}
    steps = _time_steps(recurrence, sizes)
    if len(recorder.first_nodes) != len(steps) - 1:
        return None
    holding = _hold_something(recorder, steps)
    if holding is None:
        return None
    passes: tuple[tuple[Any, range, LogPhase], ...] = (
        (recording.forward, range(forward_start, forward_end), "forward"),
        (recording.backward, range(backward_start, len(log.events)), "backward"),
    )
    for templates, positions, phase in passes:
        operators = [
            (step, position, noted)
            for step, position, noted_in, noted in recorder.noted
            if noted_in == phase and noted.call in holding
        ]
        if not _read_templates(
            recorder, steps, external, templates, positions, operators
        ):
            return None
    return recording


def _invent_inputs(
    recorder: _Recorder, recurrence: _Recurrence, sizes: list[int]
) -> list[Any]:
    """Make fake inputs of a short recurrence."""
    inputs: list[Any] = []
    with recorder.fake:
        for number, described in enumerate(recurrence.tensors):
            shape = described.shape
            if number == 0:
                shape = (sum(sizes), *shape)
            elif number <= recurrence.states:
                shape = (shape[0], sizes[0], *shape[1:])
            tensor: Any = torch.empty(
                shape, dtype=described.dtype, requires_grad=described.is_trained
            )
            if number <= recurrence.states and described.is_trained:
                # Autocast keeps short copies of leaves, which only parameters are.
                tensor = tensor * 1
            inputs.append(tensor)
    return inputs


def _describe_given(tensor: torch.Tensor, sizes: list[int]) -> _Given:
    """Describe what a short recurrence gave, with names in place of its rows."""
    names: dict[int, Rows] = {sizes[0]: "samples", sum(sizes): "all"}
    shape = tuple(names.get(size, size) for size in tensor.shape)
    stride = None if tensor.is_contiguous() else tuple(tensor.stride())
    return _Given(shape, stride, tensor.dtype)


def _read_templates(
    recorder: _Recorder,
    steps: list[_TimeStep],
    external: dict[int, tuple[str, int] | None],
    templates: dict[_Context | None, _Template],
    positions: range,
    operators: list[tuple[int, int, _NotedCall]],
) -> bool:
    """Read what each time step makes and frees out of the log of a short recurrence.

    Args:
        recorder: It has tracked it.
        steps: Its time steps.
        external: What storages are to the caller; those of others are added as None.
        templates: Gets what is read, by context.
        positions: Of the events to read.
        operators: Calls that hold something inside, with their time steps and the
            events after which they returned.

    Returns:
        Whether time steps are alike where their contexts are.
    """
    log = recorder.log
    of_steps: dict[int, _Template] = defaultdict(_Template)
    positions_of_steps: dict[int, list[int]] = defaultdict(list)
    made_at: dict[int, tuple[int, int]] = {}
    """Time step in which a storage was made here, and its place among the changes."""
    starts = [segment.position for segment in recorder.segments]
    for position in positions:
        number, _ = log.events[position]
        is_made = number == position
        # Several operators may begin at one position: the last one made what is there.
        segment = recorder.segments[bisect.bisect_right(starts, position) - 1]
        if is_made and not segment.is_inside:
            external.setdefault(number, None)
        role = external.get(number, "")
        if role is None:
            continue
        values = steps[segment.step].values
        changes = of_steps[segment.step].changes
        if number in made_at and segment.step - made_at[number][0] > _NEAR:
            # Forward only: backward, time steps go the other way.
            step, place = made_at[number]
            is_next_of_group = bool(changes) and changes[-1].frees_kept
            until = _new_group(steps[segment.step], changes)
            if is_next_of_group:
                _, until = changes[-1].external or ("", until)
            of_kept = of_steps[step].changes
            of_kept[place] = of_kept[place]._replace(kept=until)
            if is_next_of_group:
                continue
            change = _Change(is_made, 0, "one", ("kept", until))
        elif role:
            if is_made is (role[0] in _TAKEN):
                continue
            change = _Change(is_made, 0, "one", (role[0], int(role[1])))
        else:
            rows = _rows_of(recorder.shapes[number], values)
            nbytes = log.events[number].change
            if rows is None or recorder.shapes[number].nbytes({}) != nbytes:
                return False
            change = _Change(is_made, nbytes // values[rows], rows)
            if is_made:
                made_at[number] = (segment.step, len(changes))
        changes.append(change)
        positions_of_steps[segment.step].append(position)

    for step, position, noted in operators:
        index = bisect.bisect_right(positions_of_steps[step], position)
        sizes = _sizes_in(noted, steps[step].values)
        if sizes is None:
            return False
        of_steps[step].operators.append(_SizedOperator(index, noted, sizes))
    for number, time_step in enumerate(steps):
        template = templates.setdefault(time_step.context, of_steps[number])
        if not _are_alike(template, of_steps[number]):
            return False
    return True


_MOST_GROUPS = 16
"""That are kept until the end of one pass; chosen."""


def _new_group(step: _TimeStep, changes: list[_Change]) -> int:
    """Number another group of storages that are kept until a time step."""
    number = -1 if step.context is None else step.context.number
    return _MOST_GROUPS * number + sum(change.frees_kept for change in changes)


_TAKEN = ("input", "output gradient")
"""Storages of others, which a recurrence only frees."""


def _rows_of(shaped: _Shaped, values: dict[Rows, int]) -> Rows | None:
    """Name what the rows of a tensor are; None if it is none of a time step's."""
    large = [size for size in shaped.shape if size >= _MARKER]
    if not large:
        return "one"
    if len(large) > 1:
        return None
    return next((rows for rows, value in values.items() if value == large[0]), None)


def _sizes_in(noted: _NotedCall, values: dict[Rows, int]) -> dict[int, Rows] | None:
    """Name the rows that are in a call; None if one is none of a time step's."""
    numbers = {leaf for leaf in noted.call.leaves if type(leaf) is int}
    for spec in noted.call.tensors:
        numbers |= {*spec.shape, *spec.stride}
    sizes: dict[int, Rows] = {}
    for number in numbers:
        if number >= _MARKER:
            names = [rows for rows, value in values.items() if value == number]
            if not names:
                return None
            sizes[number] = names[0]
    return sizes


def _are_alike(template: _Template, other: _Template) -> bool:
    """Tell whether two time steps make and free the same."""
    named = [
        [(o.place, o.noted.name, sorted(o.sizes.values())) for o in side.operators]
        for side in (template, other)
    ]
    return template.changes == other.changes and named[0] == named[1]


def _hold_something(
    recorder: _Recorder, steps: list[_TimeStep]
) -> set[KernelCall] | None:
    """Tell which calls hold something inside, for some number of rows.

    Returns:
        These; None where a kernel or a formula of autograd makes something else than
        was tracked.
    """
    made_bytes: dict[SizedCall, int] = {}
    calls: dict[SizedCall, set[KernelCall]] = defaultdict(set)
    differentiated = []
    for step, _, _, noted in recorder.noted:
        sizes = _sizes_in(noted, steps[step].values)
        if sizes is None:
            return None
        for count in _ROWS_TRIED:
            rows_tried = _rows_tried(count)
            replaced = {marker: rows_tried[rows] for marker, rows in sizes.items()}
            sized = noted.with_sizes(replaced)
            made_bytes[sized] = sum(shaped.nbytes(replaced) for shaped in noted.made)
            calls[sized].add(noted.call)
        if any(noted.with_grad):
            differentiated.append(DifferentiatedCall(sized.call, noted.with_grad))
    if FORMULAS.different(dict.fromkeys(differentiated)):
        return None
    holding: set[KernelCall] = set()
    for sized, workspace in KERNELS.workspaces(calls).items():
        if workspace is None:
            holding |= calls[sized]
            continue
        made = made_bytes[sized]
        if made and workspace.output not in {None, Bounds.exactly(made)}:
            return None
        if not workspace.exact or workspace.held.high:
            holding |= calls[sized]
    return holding


def _rows_tried(count: int) -> dict[Rows, int]:
    """Give numbers of rows for time steps of so many sequences."""
    return {
        "one": 1,
        "own": count,
        "previous": count,
        "next": count,
        "change": max(count // 2, 1),
        "next change": max(count // 2, 1),
        "two before": count,
        "two behind": count,
        "other before": count,
        "other behind": count,
        "all": 7 * count,
        "samples": count,
        "fewest": count,
    }
