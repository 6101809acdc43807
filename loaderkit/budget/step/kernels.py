"""What CPU kernels hold inside while they run, learnt from small real calls.

An operator with fake operands shows its outputs, never the buffers that its kernel
takes and gives back: the unreduced loss of ``mse_loss``, a mask turned into numbers,
packed weights.  So each distinct call of a step is made once for real, on operands
shrunk to 3 MB at most, under torch's profiler; what the profiler sees is scaled up to
the real sizes.  Where that leaves a doubt and the call is small enough, it is made at
its own size.  No parameter of the model is touched or copied.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.autograd.profiler import record_function

from loaderkit.budget.step.allocation_log import UncertainBytes
from loaderkit.budget.step.call_arguments import rebuild_call, tensors_in
from loaderkit.budget.step.kernel_calls import (
    OF_PIVOTS,
    KernelCall,
    SparseSpec,
    TensorSpec,
    best_smaller_calls,
    gives_little,
    operator_name,
    output_bytes,
    smaller_calls,
    with_choices_of_values,
)
from loaderkit.budget.step.measure import parts_of_sparse
from loaderkit.budget.step.memory_profile import memory_profile
from loaderkit.budget.step.newest import newest
from loaderkit.budget.step.shape_rules import (
    values_decide_shapes,
    without_unasked_gradients,
)
from loaderkit.budget.step.step_errors import refuses_types

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TypeAlias

    _Rule: TypeAlias = tuple[tuple[int, float], ...]
    """Columns of a table of sizes, each with a factor: their sum is proportional."""

_CHECKED_BYTES = 64 << 10
"""Operands above which the outputs are looked at before a call is made: a product of
two vectors of 32 KB is 256 MB (derived)."""
_FACTORS = (1.0, 2.0, 0.5, 0.25, 0.125, 3.0, 4.0, 8.0)
"""What a buffer may be of an operand, likeliest first: a copy, a copy in another dtype,
a mask of a byte for an element, a few of either."""
_FACTORS_OF_PAIRS = _FACTORS[:4]
"""The same where a buffer is a sum of two operands' shares."""
_MOST_REMEMBERED = 20_000
"""Calls; some 20 MB."""
_MOST_KEPT = 1_000
"""Calls that are kept from one estimate to the next; a MB.  Chosen: some times as many
as a model has, since each takes a real call to learn."""
_LINE_SHARE = 0.02
"""Of the largest amount, by which amounts may miss a line; chosen, since libraries pad
rows."""
_LINE_BYTES = 1024
"""The same where amounts are small; chosen: a cache line of each of several buffers."""
_PLANE_SHARE = 0.1
"""The same for recurrent kernels, whose rows are padded to cache lines."""
_MARKER = "loaderkit kernel "


@dataclass(frozen=True)
class Workspace:
    """What a kernel takes beside its operands and outputs.  Bytes."""

    held: UncertainBytes
    """At its highest, while it runs."""
    output: UncertainBytes | None
    """What its outputs take; None for what they were tracked with."""
    exact: bool
    """Whether it was measured at this size, or is proportional to what it touches in
    every size that was measured."""


class SizedCall(NamedTuple):
    """A call as it was tracked."""

    call: KernelCall
    outputs: tuple[int, ...]
    """Bytes of each output, as a fake."""


class _CallMemory(NamedTuple):
    """What the profiler saw of one call that was made.  Bytes."""

    operands: tuple[int, ...]
    """Of each operand."""
    outputs: tuple[int, ...]
    """Of each output."""
    highest: int
    """Taken at the highest, while it ran."""
    retained: int
    """Still taken when it returned: its outputs, and what it keeps for itself."""

    @property
    def held(self) -> int:
        """Taken inside, and given back."""
        return max(self.highest - self.retained, 0)


class KernelProbe:
    """Learns what kernels take, and remembers it."""

    def __init__(self) -> None:
        # By the number of threads too: each may have a buffer of its own.
        self._measured: dict[tuple[int, KernelCall], _CallMemory | None] = {}

        self._type_errors: dict[KernelCall, Exception] = {}
        """Of calls that refuse the types of their operands."""

    def clear(self) -> None:
        """Forget everything."""
        self._measured.clear()
        self._type_errors.clear()

    def trim(self) -> None:
        """Forget all but the newest calls."""
        self._measured = newest(self._measured, _MOST_KEPT)
        self._type_errors = newest(self._type_errors, _MOST_KEPT)
        smaller_calls.cache_clear()
        best_smaller_calls.cache_clear()
        output_bytes.cache_clear()

    def type_error(self, sized: SizedCall) -> Exception | None:
        """Give the error with which a kernel refused the types of its operands.

        Args:
            sized: A call that was asked about.

        Returns:
            What a small call of the same types raised; None where types are not what it
            was refused for.
        """
        for calls in smaller_calls(sized.call, sized.outputs):
            for call in calls:
                if call in self._type_errors:
                    return self._type_errors[call]
        return None

    def workspaces(
        self, calls: Iterable[SizedCall], probe_limit_bytes: int = 0
    ) -> dict[SizedCall, Workspace | None]:
        """Find what calls take.

        Args:
            calls: Each with the bytes of the outputs it was tracked with.
            probe_limit_bytes: What a call may take that is made at its own size, where
                smaller ones leave a doubt.

        Returns:
            For each what its kernel takes; None where it could not be made for real.
        """
        workspaces: dict[SizedCall, Workspace | None] = {}
        unknown: list[SizedCall] = []
        for sized in calls:
            workspaces[sized] = None
            if sized.call.plain:
                held = UncertainBytes.exactly(sized.call.held_bytes)
                workspaces[sized] = Workspace(held, None, exact=True)
            else:
                unknown.append(sized)
        workspaces |= self._workspaces_by_smaller_calls(unknown)

        doubtful = [
            sized
            for sized, workspace in workspaces.items()
            if _can_run_whole(sized, workspace, probe_limit_bytes)
        ]
        self._measure_new_calls(sized.call for sized in doubtful)
        for sized in doubtful:
            whole = self._workspace_from(sized, [sized.call])
            workspaces[sized] = whole or workspaces[sized]
        return workspaces

    def _workspaces_by_smaller_calls(
        self, calls: list[SizedCall]
    ) -> dict[SizedCall, Workspace | None]:
        """Find what calls take by others of their kind, of sizes that go together."""
        workspaces: dict[SizedCall, Workspace | None] = {}
        ways_left = {
            sized: [best_smaller_calls(sized.call, sized.outputs)] for sized in calls
        }
        # The first ways to shrink of all calls under one profile, then the second ways
        # of those that failed: operators refuse sizes that do not go together, and a
        # profile has a cost of its own, however many calls are in it.
        is_first = True
        while ways_left:
            first_ways = [ways[0] for ways in ways_left.values()]
            self._measure_new_calls(itertools.chain.from_iterable(first_ways))
            ways_of_failed = {}
            for sized, (first_way, *other_ways) in ways_left.items():
                workspaces[sized] = self._workspace_from(sized, first_way)
                if workspaces[sized] is not None:
                    continue
                if is_first and first_way:
                    # They are found only now: few are asked for.
                    other_ways = smaller_calls(sized.call, sized.outputs)[1:]
                if other_ways:
                    ways_of_failed[sized] = other_ways
            ways_left = ways_of_failed
            is_first = False
        return workspaces

    def _workspace_from(
        self, sized: SizedCall, finished_calls: list[KernelCall]
    ) -> Workspace | None:
        """Scale up what calls took that were made; None where one failed."""
        threads = torch.get_num_threads()
        is_whole = finished_calls == [sized.call]
        # Once for each choice of values: all of a kind belong to one line.
        workspaces = []
        for calls in zip(*map(with_choices_of_values, finished_calls), strict=True):
            measured = [self._measured[threads, call] for call in calls]
            succeeded = [memory for memory in measured if memory is not None]
            if succeeded and len(succeeded) == len(measured):
                if is_whole:
                    workspaces.append(_workspace_of_whole(sized, succeeded[0]))
                else:
                    workspaces.append(_scale_up(sized, succeeded))
        if not workspaces:
            return None
        if sized.call.depends_on_values:
            return _join_floats(workspaces, sized.call.most_bytes_by_norms)
        return _join_masks(workspaces)

    def _measure_new_calls(self, calls: Iterable[KernelCall]) -> None:
        """Make calls that were not made before, with each choice of masks."""
        threads = torch.get_num_threads()
        variants = [
            variant for call in calls for variant in with_choices_of_values(call)
        ]
        new_calls = [
            call
            for call in dict.fromkeys(variants)
            if (threads, call) not in self._measured
        ]
        if not new_calls:
            return
        if len(self._measured) > _MOST_REMEMBERED:
            # What this estimate has measured so far it may still ask for.
            known = {
                (threads, call): self._measured[threads, call]
                for call in dict.fromkeys(variants)
                if (threads, call) in self._measured
            }
            self._measured.clear()
            self._measured.update(known)
        results = _run_and_profile(new_calls)
        for call, result in zip(new_calls, results, strict=True):
            if isinstance(result, Exception):
                self._measured[threads, call] = None
                if refuses_types(result):
                    # Its frames would keep the operands alive.
                    self._type_errors[call] = result.with_traceback(None)
            else:
                self._measured[threads, call] = result


def _can_run_whole(
    sized: SizedCall, workspace: Workspace | None, probe_limit_bytes: int
) -> bool:
    """Tell whether a call in doubt can be made at its own size."""
    if workspace is None or workspace.exact:
        return False
    output_bytes = workspace.output
    taken = sum(sized.outputs) if output_bytes is None else output_bytes.high
    return sized.call.nbytes + taken + workspace.held.high <= probe_limit_bytes


def _join_masks(workspaces: list[Workspace]) -> Workspace:
    """Join what a kernel takes with masks that choose all, and some.

    The first is with all: what a kernel gives is tracked with the same one.
    """
    with_all = workspaces[0]
    if all(workspace.held == with_all.held for workspace in workspaces):
        return with_all
    likely = max(workspace.held.likely for workspace in workspaces)
    high = max(workspace.held.high for workspace in workspaces)
    # The lower end is for masks that choose another share than these.
    return Workspace(UncertainBytes(0, likely, high), with_all.output, exact=False)


def _join_floats(workspaces: list[Workspace], more_by_norms: int) -> Workspace:
    """Join what a kernel takes with floats as they come, and next to 0.

    Args:
        workspaces: With these, in this order; each of floats that are alike.
        more_by_norms: What it takes more where floats are unlike, at most.

    Returns:
        What it takes with any.
    """
    as_they_come = workspaces[0]
    low = min(workspace.held.low for workspace in workspaces)
    high = max(workspace.held.high for workspace in workspaces) + more_by_norms
    is_exact = low == high and all(workspace.exact for workspace in workspaces)
    held = UncertainBytes(low, as_they_come.held.likely, high)
    return Workspace(held, as_they_come.output, exact=is_exact)


class _FinishedCall(NamedTuple):
    """What a call has, now that it was made.  Bytes."""

    operands: tuple[int, ...]
    outputs: tuple[int, ...]


def _run_and_profile(
    calls: Sequence[KernelCall],
) -> list[_CallMemory | Exception | None]:
    """Make calls under one profile and read what each took.

    Returns:
        For each call its memory, or its error; None where it was not made.
    """
    results: list[_CallMemory | Exception | None] = [None] * len(calls)
    finished_calls: dict[int, _FinishedCall] = {}
    with (
        # Without gradients, recurrent kernels keep nothing for a backward pass.
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        memory_profile() as profiled,
    ):
        for number, call in enumerate(calls):
            result = _run_call(call, number)
            if isinstance(result, _FinishedCall):
                finished_calls[number] = result
            else:
                results[number] = result

    memory_of_ranges = memory_by_marker(profiled, _MARKER)
    for number, finished_call in finished_calls.items():
        taken = memory_of_ranges.get(number, RangeMemory(0, 0))
        if calls[number].writes_to_sparse:
            # The old elements are freed within the range, but were made before it.
            taken = taken._replace(last=sum(finished_call.outputs))
        results[number] = _CallMemory(
            finished_call.operands, finished_call.outputs, taken.highest, taken.last
        )
    return results


class RangeMemory(NamedTuple):
    """What was taken within a range of a profile.  Bytes."""

    highest: int
    """At the highest."""
    last: int
    """At its end; negative where more was given back."""


def memory_by_marker(profiled: Any, marker: str) -> dict[int, RangeMemory]:
    """Add up the allocator's events within each numbered range of a profile.

    Args:
        profiled: A profile with memory, when it has ended.
        marker: What the names of the ranges begin with; then comes the number.

    Returns:
        What was taken in each range, by number.
    """
    memory: dict[int, RangeMemory] = {}
    number, end_ns = -1, -1
    live = highest = 0
    # Of thousands of events few are ours, or memory; the rest are not asked further.
    events = [
        (event.start_ns(), name, event)
        for event in profiled.kineto_results.events()
        if (name := event.name()) == "[memory]" or name.startswith(marker)
    ]
    events.sort(key=lambda started: started[0])
    for start_ns, name, event in events:
        if name.startswith(marker):
            number = int(name.removeprefix(marker))
            end_ns = start_ns + event.duration_ns()
            live = highest = 0
        elif start_ns <= end_ns:
            live += event.nbytes()
            highest = max(highest, live)
        memory[number] = RangeMemory(highest, live)
    return memory


def _run_call(call: KernelCall, number: int) -> _FinishedCall | Exception | None:
    """Make one call; give its error if it failed, None if it is not safe to try."""
    try:
        if not is_safe_to_run(call):
            return None
        args, kwargs = invent_arguments(call)
        with record_function(f"{_MARKER}{number}"):
            # Within the range: what autograd would drop is given back.
            result = without_unasked_gradients(
                call.func, args, call.func(*args, **kwargs)
            )
    except Exception as error:  # noqa: BLE001 -- values were invented
        return error
    output_sizes = tuple(bytes_of_output(output) for output in tensors_in(result))
    return _FinishedCall(call.operand_bytes, output_sizes)


def bytes_of_output(output: torch.Tensor) -> int:
    """Count the bytes of an output; of a sparse one, of its indices and values."""
    if output.layout is not torch.sparse_coo:
        return output.numel() * output.itemsize
    # Some kernels make room for as many elements as there may be, and use a part of it.
    storages = [inner.untyped_storage() for inner in parts_of_sparse(output)]
    return sum(storage.nbytes() for storage in storages)


def is_safe_to_run(call: KernelCall) -> bool:
    """Tell whether a call goes together and its outputs are small enough."""
    if not call.resized and call.nbytes <= _CHECKED_BYTES:
        return True
    return gives_little(call)


def invent_arguments(call: KernelCall) -> Any:
    """Make the arguments of a call, positional and named, with invented values."""
    leaves: list[Any] = []
    name = operator_name(call.func)
    is_of_matrices = any(word in name for word in _OF_MATRICES)
    has_pivots = name.startswith(OF_PIVOTS)
    for leaf in call.leaves:
        if isinstance(leaf, TensorSpec):
            tensor = _invent_tensor(leaf, call.masks)
            if call.has_small_floats:
                tensor.mul_(_NEXT_TO_ZERO)
            elif is_of_matrices:
                _make_regular(tensor)
            if has_pivots and tensor.dtype == torch.int32:
                _keep_rows(tensor)
            tensor = tensor.conj() if leaf.is_conjugate else tensor
            # Torch has no public way to ask for a view that is read negated.
            tensor = torch._neg_view(tensor) if leaf.is_negative else tensor  # noqa: SLF001
            leaves.append(tensor)
        elif isinstance(leaf, SparseSpec):
            leaves.append(_invent_sparse(leaf))
        else:
            leaves.append(leaf)
    if "mkldnn_rnn_layer_backward" in name:
        leaves[-1] = _packed_by_forward(leaves)
    return rebuild_call(leaves, call.structure)


_NEXT_TO_ZERO = 1e-20
"""Below the norm up to which ``matrix_exp`` needs one term only, for float64 too."""
_OF_MATRICES = ("linalg_", "cholesky", "lu_", "triangular", "ormqr", "orgqr", "geqrf")
"""Words in the names of kernels that refuse matrices of invented values: singular ones,
or ones that are not positive definite."""


def _make_regular(tensor: torch.Tensor) -> None:
    """Turn square matrices into symmetric, positive definite ones."""
    has_numbers = tensor.is_floating_point() or tensor.is_complex()
    if has_numbers and tensor.ndim >= 2 and tensor.shape[-1] == tensor.shape[-2]:
        size = tensor.shape[-1]
        # Not below the largest row, so that the diagonal is more than all beside it.
        diagonal = size * torch.eye(size, dtype=tensor.dtype)
        tensor.copy_((tensor + tensor.mH) / 2 + diagonal)


def _keep_rows(pivots: torch.Tensor) -> None:
    """Write pivots, which LAPACK counts from 1, that leave each row where it is."""
    rows = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype)
    pivots.copy_(rows.expand(pivots.shape))


def _packed_by_forward(leaves: list[Any]) -> Any:
    """Make what a recurrent kernel keeps for its backward pass, which reads it."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    # After the tensors: reverse, mode, hidden, layers, biases, train, bidirectional,
    # sizes of batches (a list, so none or several leaves), batch_first, workspace.
    plain = [leaf for leaf in leaves[:-1] if type(leaf) in {bool, int}]
    reverse, mode, hidden, layers, biases, _train, both_ways, *sizes, first = plain
    forward = torch.ops.aten.mkldnn_rnn_layer.default
    outputs = forward(
        *tensors[:7],
        *(reverse, sizes, mode, hidden, layers, biases, both_ways, first),
        True,  # train
    )
    return outputs[3]


def _invent_tensor(spec: TensorSpec, masks: str) -> torch.Tensor:
    """Make a tensor: positions are 0, floats in (0, 1), masks choose all or half."""
    span = 1 + sum(
        (size - 1) * stride
        for size, stride in zip(spec.shape, spec.stride, strict=True)
    )
    if not all(spec.shape):
        return torch.empty(spec.shape, dtype=spec.dtype)
    if spec.dtype == torch.bool:
        flat = torch.ones(span, dtype=spec.dtype)
        if masks == "half":
            flat[::2] = False
    elif spec.dtype.is_floating_point or spec.dtype.is_complex:
        flat = _invent_floats(span).to(spec.dtype)
    else:
        flat = torch.zeros(span, dtype=spec.dtype)
    return flat.as_strided(spec.shape, spec.stride)


_DRAWN_FLOATS = 4093
"""How many floats are drawn for an operand.  Chosen: a prime, so that hardly any two
rows of a matrix are the same."""


def _invent_floats(count: int) -> torch.Tensor:
    """Give floats in (0, 1), the same again and again.

    To draw each one takes 3.5 ms for an operand of 3 MB, and a step that is tracked for
    the first time has hundreds of operands; to repeat some takes 1.4 ms.
    """
    drawn = torch.rand(min(count, _DRAWN_FLOATS), dtype=torch.float32)
    return drawn.repeat(-(-count // _DRAWN_FLOATS))[:count]


def _invent_sparse(spec: SparseSpec) -> torch.Tensor:
    """Make a sparse tensor whose elements are spread over its shape."""
    axes = spec.shape[: spec.sparse_dim]
    place_count = math.prod(axes)
    if spec.is_coalesced and spec.elements <= place_count:
        flat = torch.arange(spec.elements) * (place_count // max(spec.elements, 1))
    else:
        # Some twice, some never, in no order.
        flat = torch.randint(max(place_count, 1), (spec.elements,))
    indices = torch.stack(torch.unravel_index(flat, axes))
    rows = (spec.elements, *spec.shape[spec.sparse_dim :])
    # Where only the indices matter, one number stands for all of them.
    shape = rows if spec.has_dense_values else (1,) * len(rows)
    values = torch.rand(shape)
    tensor: torch.Tensor = torch.sparse_coo_tensor(
        indices,
        values.to(spec.dtype).expand(rows),
        spec.shape,
        is_coalesced=spec.is_coalesced,
        check_invariants=False,
    )
    return tensor


def _workspace_of_whole(sized: SizedCall, memory: _CallMemory) -> Workspace:
    """Read what a call takes from one made at its own size."""
    retained = memory.retained
    if values_decide_shapes(sized.call.func):
        # As many as were chosen when it was tracked, not as with an invented mask.
        retained += sum(sized.outputs) - sum(memory.outputs)
    held, output = UncertainBytes.exactly(memory.held), UncertainBytes.exactly(retained)
    return Workspace(held, output, exact=True)


def _scale_up(sized: SizedCall, measured: list[_CallMemory]) -> Workspace:
    """Scale what small calls took to a call's own sizes."""
    call = sized.call
    table = _size_table(sized, measured)
    outputs = _output_bounds(sized, measured, table)
    thread_bytes = call.by_thread_bytes * torch.get_num_threads()
    held_amounts = [memory.held for memory in measured]

    # Libraries that choose their algorithm by size may follow a rule in small calls and
    # another in large ones.
    held = None if call.opaque else table.scale_by_rule(held_amounts)
    if held is not None and outputs is not None:
        is_exact = outputs.low == outputs.high
        return Workspace(UncertainBytes.exactly(held), outputs, exact=is_exact)

    extended = table.extend(held_amounts)
    if extended is not None and outputs is not None:
        is_share = not call.opaque and table.is_share_of_operands(held_amounts)
        bounds = _bounds_around(extended, *(_OF_SHARE if is_share else _OF_LINE))
        bounds = bounds._replace(high=bounds.high + thread_bytes)
        return Workspace(bounds, outputs, exact=False)

    # No rule and no line: in proportion to the operands, and twice the largest share.
    shares = [
        amount / total
        for amount, total in zip(held_amounts, table.operand_totals, strict=True)
    ]
    # The largest call is the most like; a small one may take what is once for all.
    _, share_of_largest = max(zip(table.operand_totals, shares, strict=True))
    likely = round(share_of_largest * table.operand_total)
    high = round(2 * max(shares) * table.operand_total) + thread_bytes
    if outputs is None:
        high += sum(table.sizes)
    return Workspace(UncertainBytes(0, likely, high), outputs, exact=False)


class _SizeTable(NamedTuple):
    """Bytes of operands and outputs, of small calls and of the call asked about."""

    rows: list[tuple[int, ...]]
    """Of each small call."""
    sizes: tuple[int, ...]
    """Of the call asked about, in the same columns."""
    operand_totals: list[int]
    """All operands of each small call."""
    operand_total: int
    """All operands of the call asked about."""
    weight_totals: list[int] | None = None
    """Weights of each small call of a recurrent kernel, and at last of the call asked
    about; None for other kernels."""
    factors_of_pairs: tuple[float, ...] = _FACTORS_OF_PAIRS
    """What a buffer may be of each of two columns that it is a sum of."""

    def scale_by_rule(self, amounts: list[int]) -> int | None:
        """Find what amounts are proportional to, up to a constant, and scale them.

        Args:
            amounts: What was measured in each small call.

        Returns:
            The amount in the call asked about; None where no simple rule gives all
            that was measured.
        """
        columns = range(len(self.sizes))
        singles: list[_Rule] = [
            ((column, factor),) for factor in _FACTORS for column in columns
        ]
        for rule in singles:
            if all(
                amount == _apply_rule(rule, row)
                for row, amount in zip(self.rows, amounts, strict=True)
            ):
                return round(_apply_rule(rule, self.sizes))
        if len(set(amounts)) == 1:
            return amounts[0]

        factors = itertools.product(self.factors_of_pairs, repeat=2)
        columns_and_factors = itertools.product(
            itertools.combinations(columns, 2), factors
        )
        pairs: list[_Rule] = [
            tuple(zip(two_columns, two_factors, strict=True))
            for two_columns, two_factors in columns_and_factors
        ]
        for rule in (*singles, *pairs):
            constants = {
                amount - _apply_rule(rule, row)
                for row, amount in zip(self.rows, amounts, strict=True)
            }
            if len(constants) == 1:
                return max(0, round(_apply_rule(rule, self.sizes) + constants.pop()))
        return None

    def is_share_of_operands(self, amounts: list[int]) -> bool:
        """Tell whether amounts are nearly the same share of the operands in each call.

        Such as some copies of all matrices, and some numbers for each.
        """
        shares = [
            amount / total
            for amount, total in zip(amounts, self.operand_totals, strict=True)
        ]
        return max(shares) - min(shares) <= _SAME_SHARE * max(shares)

    def extend(self, amounts: list[int]) -> int | None:
        """Scale amounts by a rule that gives all of them, else along a line."""
        if self.weight_totals is not None:
            return self._extend_with_weights(amounts)
        by_rule = self.scale_by_rule(amounts)
        if by_rule is not None:
            return by_rule
        return _extend_line(self.operand_totals, amounts, self.operand_total)

    def _extend_with_weights(self, amounts: list[int]) -> int | None:
        """Scale what is in part proportional to weights, in part to the other sizes."""
        weights = np.array(self.weight_totals, dtype=float)
        totals = np.array([*map(sum, self.rows), sum(self.sizes)], dtype=float)
        columns = np.stack([totals - weights, weights], axis=1)
        if np.ptp(columns[:-1, 0]) == 0:
            # A single sample of one step: nothing else could be made smaller.
            columns[:, 0] = 0
        factors, *_ = np.linalg.lstsq(columns[:-1], np.array(amounts, dtype=float))
        misses = np.abs(columns[:-1] @ factors - amounts)
        if misses.max() > _PLANE_SHARE * max(amounts) + _LINE_BYTES:
            return None
        return max(0, round(float(columns[-1] @ factors)))


def _apply_rule(rule: _Rule, row: tuple[int, ...]) -> float:
    """Add up columns of a row, each times its factor."""
    return sum(row[column] * factor for column, factor in rule)


def _size_table(sized: SizedCall, measured: list[_CallMemory]) -> _SizeTable:
    """Line up the sizes of a call with those of small ones."""
    sizes = (*sized.call.operand_bytes, *sized.outputs)
    rows = [(*memory.operands, *memory.outputs) for memory in measured]
    if any(len(row) != len(sizes) for row in rows):
        # Other outputs for real than as fakes: only the sums can be compared.
        sizes = (sum(sizes),)
        rows = [(sum(row),) for row in rows]

    comparable = []
    for column, size in enumerate(sizes):
        # What a recurrent kernel keeps for itself has a size for real, and none as a
        # fake: nothing can be scaled by it.
        is_unknown_to_fakes = not size and any(row[column] for row in rows)
        if not is_unknown_to_fakes:
            comparable.append(column)
    return _SizeTable(
        rows=[tuple(row[column] for column in comparable) for row in rows],
        sizes=tuple(sizes[column] for column in comparable),
        operand_totals=[sum(memory.operands) or 1 for memory in measured],
        operand_total=sum(sized.call.operand_bytes),
        weight_totals=_weight_totals(sized, measured),
        # To sort the elements of a sparse tensor takes several copies of its indices.
        factors_of_pairs=_FACTORS if sized.call.sparse_tensors else _FACTORS_OF_PAIRS,
    )


def _weight_totals(sized: SizedCall, measured: list[_CallMemory]) -> list[int] | None:
    """Sum the weights of recurrent calls, which are their second to fifth operand."""
    if not sized.call.is_recurrent:
        return None
    operands = [memory.operands for memory in measured] + [sized.call.operand_bytes]
    return [sum(sizes[1:5]) for sizes in operands]


def _has_hidden_output(sized: SizedCall, memory: _CallMemory) -> bool:
    """Tell whether a small call made something that is empty as a fake."""
    outputs = zip(sized.outputs, memory.outputs, strict=False)
    return any(fake_bytes == 0 and real_bytes > 0 for fake_bytes, real_bytes in outputs)


def _output_bounds(
    sized: SizedCall, measured: list[_CallMemory], table: _SizeTable
) -> UncertainBytes | None:
    """Say what the outputs of a call take; None where nothing tells."""
    keeps_its_outputs = all(
        sum(memory.outputs) == memory.retained for memory in measured
    )
    is_hidden = any(_has_hidden_output(sized, memory) for memory in measured)
    if keeps_its_outputs and not is_hidden:
        return UncertainBytes.exactly(sum(sized.outputs))

    retained_amounts = [memory.retained for memory in measured]
    by_rule = table.scale_by_rule(retained_amounts)
    if by_rule is not None and not sized.call.opaque:
        return UncertainBytes.exactly(by_rule)
    extended = table.extend(retained_amounts)
    return None if extended is None else _bounds_around(extended, *_OF_LINE)


_OF_LINE = (0.8, 1.25)
"""Ends around what was extended along a line, for one byte of it.  Libraries round up
and choose by size.  Chosen: conv1d to conv3d and LSTM at full size, as far as they were
tried, missed the line by 12 % at most."""
_OF_SHARE = (0.98, 1.02)
"""The same where nothing is chosen by size, and all calls took the same share of their
operands; chosen: four times :data:`_SAME_SHARE`."""
_SAME_SHARE = 0.005
"""By how much shares may differ that are the same but for some numbers; chosen."""


def _bounds_around(amount: int, lower: float, upper: float) -> UncertainBytes:
    """Give an interval around what was scaled up."""
    return UncertainBytes(round(lower * amount), amount, round(upper * amount))


def _extend_line(totals: list[int], amounts: list[int], total: int) -> int | None:
    """Extend amounts along a straight line; None if they are not on one."""
    by_total = sorted(range(len(totals)), key=lambda number: totals[number])
    first, *middle, last = by_total
    if totals[first] == totals[last]:
        return None
    slope = (amounts[last] - amounts[first]) / (totals[last] - totals[first])
    tolerance = _LINE_SHARE * max(amounts) + _LINE_BYTES
    for number in middle:
        on_line = amounts[first] + slope * (totals[number] - totals[first])
        if abs(on_line - amounts[number]) > tolerance:
            return None
    return max(0, round(amounts[last] + slope * (total - totals[last])))


KERNELS = KernelProbe()
"""What this process has learnt so far."""
