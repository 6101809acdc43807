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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.profiler import record_function
from torch.utils._pytree import tree_iter, tree_unflatten

from loaderkit.budget.allocation_log import Bounds
from loaderkit.budget.kernel_calls import (
    MOST_BYTES,
    KernelCall,
    TensorSpec,
    output_bytes,
    smaller_calls,
    with_masks,
)
from loaderkit.budget.memory_profile import memory_profile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_CHECKED_BYTES = 64 << 10
"""Operands above which the outputs are looked at before a call is made: a product of
two vectors is large."""
_FACTORS = (1.0, 2.0, 0.5, 0.25, 0.125, 3.0, 4.0, 8.0)
_MARKER = "loaderkit kernel "


@dataclass(frozen=True)
class Workspace:
    """What a kernel takes beside its operands and outputs.  Bytes."""

    held: Bounds
    """At its highest, while it runs."""
    output: Bounds | None
    """What its outputs take; None for what they were tracked with."""
    exact: bool
    """Whether it was measured at this size, or is proportional to what it touches in
    every size that was measured."""


class _Measured(NamedTuple):
    """What the profiler saw of one call.  Bytes."""

    operands: tuple[int, ...]
    outputs: tuple[int, ...]
    highest: int
    retained: int

    @property
    def held(self) -> int:
        return max(self.highest - self.retained, 0)


class KernelProbe:
    """Learns what kernels take, and remembers it."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, KernelCall], _Measured | None] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._seen.clear()

    def workspaces(
        self, calls: Iterable[tuple[KernelCall, tuple[int, ...]]], room: int = 0
    ) -> dict[tuple[KernelCall, tuple[int, ...]], Workspace | None]:
        """Find what calls take.

        Args:
            calls: Each with the bytes of the outputs it was tracked with.
            room: Bytes that a call may take which is made at its own size, where
                smaller ones leave a doubt.

        Returns:
            For each what its kernel takes; None where it could not be made for real.
        """
        found: dict[tuple[KernelCall, tuple[int, ...]], Workspace | None] = {}
        open_calls = []
        for pair in calls:
            if pair[0].plain:
                found[pair] = Workspace(Bounds.exactly(0), None, exact=True)
            else:
                found[pair] = None
                open_calls.append((pair, smaller_calls(*pair)))
        # the first ways to shrink of all calls under one profile, then the second ways
        # of those that failed: operators refuse sizes that do not go together
        while open_calls:
            self._measure(
                variant
                for _, ways in open_calls
                for call in ways[0]
                for variant in with_masks(call)
            )
            remaining = []
            for pair, ways in open_calls:
                found[pair] = self._of_small(pair, ways[0])
                if found[pair] is None and len(ways) > 1:
                    remaining.append((pair, ways[1:]))
            open_calls = remaining
        doubtful = [pair for pair, held in found.items() if _fits(pair, held, room)]
        self._measure(v for call, _ in doubtful for v in with_masks(call))
        for pair in doubtful:
            found[pair] = self._of_small(pair, [pair[0]]) or found[pair]
        return found

    def _of_small(
        self, pair: tuple[KernelCall, tuple[int, ...]], small: list[KernelCall]
    ) -> Workspace | None:
        threads = torch.get_num_threads()
        workspaces = []
        whole = small == [pair[0]]
        for variants in zip(*map(with_masks, small), strict=True):
            seen = [self._seen[threads, each] for each in variants]
            measured = [each for each in seen if each is not None]
            if len(measured) == len(seen) and measured:
                workspaces.append(_scaled(*pair, measured, whole=whole))
        if not workspaces:
            return None
        found = _spanning(workspaces)
        if pair[0].depends_on_values:
            _, likely, high = found.held
            found = Workspace(Bounds(0, likely, 2 * high), found.output, exact=False)
        return found

    def _measure(self, calls: Iterable[KernelCall]) -> None:
        threads = torch.get_num_threads()
        new = [
            call for call in dict.fromkeys(calls) if (threads, call) not in self._seen
        ]
        if len(self._seen) > 20_000:  # some 20 MB
            self._seen.clear()
        if new:
            for call, measured in zip(new, _profiled(new), strict=True):
                self._seen[threads, call] = measured


def _fits(
    pair: tuple[KernelCall, tuple[int, ...]], workspace: Workspace | None, room: int
) -> bool:
    """Tell whether a call in doubt can be made at its own size."""
    if workspace is None or workspace.exact:
        return False
    call, outputs = pair
    taken = sum(outputs) if workspace.output is None else workspace.output.high
    return call.nbytes + taken + workspace.held.high <= room


def _spanning(workspaces: list[Workspace]) -> Workspace:
    """Join what a kernel takes with masks that choose all, and some.

    The first is with all: what a kernel gives is tracked with the same one.
    """
    first = workspaces[0]
    if all(each.held == first.held for each in workspaces):
        return first
    likely = max(each.held.likely for each in workspaces)
    high = max(each.held.high for each in workspaces)
    # the lower end is for masks that choose another share than these
    return Workspace(Bounds(0, likely, high), first.output, exact=False)


def _profiled(calls: Sequence[KernelCall]) -> list[_Measured | None]:
    """Make calls under one profile and read what each took."""
    bytes_of: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    with (
        torch.enable_grad(),  # recurrent kernels keep nothing for a backward pass else
        torch.random.fork_rng(devices=[]),
        memory_profile() as profiled,
    ):
        for number, call in enumerate(calls):
            made = _make(call, number)
            if made is not None:
                bytes_of[number] = made
    taken = memory_by_marker(profiled, _MARKER)
    return [
        _Measured(*bytes_of[number], *taken.get(number, (0, 0)))
        if number in bytes_of
        else None
        for number in range(len(calls))
    ]


def memory_by_marker(profiled: Any, marker: str) -> dict[int, tuple[int, int]]:
    """Add up the allocator's events within each numbered range of a profile.

    Args:
        profiled: A profile with memory, when it has ended.
        marker: What the names of the ranges begin with; then comes the number.

    Returns:
        The highest sum and the last one, in bytes, by number.
    """
    taken: dict[int, tuple[int, int]] = {}
    number, until, now, highest = -1, -1, 0, 0
    events = profiled.kineto_results.events()
    for event in sorted(events, key=lambda event: int(event.start_ns())):
        name, start = event.name(), event.start_ns()
        if name.startswith(marker):
            number, until = int(name.removeprefix(marker)), start + event.duration_ns()
            now = highest = 0
        elif name == "[memory]" and start <= until:
            now += event.nbytes()
            highest = max(highest, now)
        taken[number] = (highest, now)
    return taken


def _make(
    call: KernelCall, number: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Make one call; give the bytes of its operands and outputs, None if it failed."""
    try:
        if not is_safe_to_make(call):
            return None
        args, kwargs = invented_arguments(call)
        with record_function(f"{_MARKER}{number}"):
            made = call.func(*args, **kwargs)
    except Exception:  # noqa: BLE001 -- values were invented: any operator may refuse
        return None
    outputs = [t for t in tree_iter(made) if isinstance(t, torch.Tensor)]
    return call.operand_bytes, tuple(t.numel() * t.itemsize for t in outputs)


def is_safe_to_make(call: KernelCall) -> bool:
    """Tell whether a call goes together and its outputs are small enough."""
    if not call.resized and call.nbytes <= _CHECKED_BYTES:
        return True
    outputs_bytes = output_bytes(call)
    # Sizes of ours that do not go together would have some kernels read beyond their
    # operands: torch's own rules must accept them first.
    if outputs_bytes is None and call.resized:
        return False
    return (outputs_bytes or 0) <= 2 * MOST_BYTES


def invented_arguments(call: KernelCall) -> Any:
    """Make the arguments of a call, positional and named, with invented values."""
    leaves = [
        _invented(leaf, call.masks) if isinstance(leaf, TensorSpec) else leaf
        for leaf in call.leaves
    ]
    if "mkldnn_rnn_layer_backward" in call.func.name():
        leaves[-1] = _packed_by_forward(leaves)
    return tree_unflatten(leaves, call.tree)


def _packed_by_forward(leaves: list[Any]) -> Any:
    """Make what a recurrent kernel keeps for its backward pass, which reads it."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    # after the tensors: reverse, mode, hidden, layers, biases, train, bidirectional,
    # sizes of batches (a list, so none or several leaves), batch_first, workspace
    plain = [leaf for leaf in leaves[:-1] if type(leaf) in {bool, int}]
    reverse, mode, hidden, layers, biases, _train, both, *sizes, first = plain
    forward = torch.ops.aten.mkldnn_rnn_layer.default
    made = forward(
        *tensors[:7], reverse, sizes, mode, hidden, layers, biases, both, first, True
    )
    return made[3]


def _invented(spec: TensorSpec, masks: str) -> torch.Tensor:
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
        flat = torch.rand(span, dtype=torch.float32).to(spec.dtype)
    else:
        flat = torch.zeros(span, dtype=spec.dtype)
    return flat.as_strided(spec.shape, spec.stride)


def _scaled(
    call: KernelCall, outputs: tuple[int, ...], measured: list[_Measured], *,
    whole: bool,
) -> Workspace:  # fmt: skip
    """Scale what small calls took to a call's own sizes."""
    if whole:
        one = measured[0]
        made_now = one.retained
        if torch.Tag.dynamic_output_shape in call.func.tags:
            # as many as were chosen when it was tracked, not as with an invented mask
            made_now += sum(outputs) - sum(one.outputs)
        held_now, output_now = Bounds.exactly(one.held), Bounds.exactly(made_now)
        return Workspace(held_now, output_now, exact=True)
    sizes = (*call.operand_bytes, *outputs)
    tables = [(*each.operands, *each.outputs) for each in measured]
    if any(len(table) != len(sizes) for table in tables):
        tables, sizes = [(sum(table),) for table in tables], (sum(sizes),)
    # what a recurrent kernel keeps for itself has a size for real, and none as a fake
    columns = enumerate(sizes)
    seen = [i for i, size in columns if size or not any(t[i] for t in tables)]
    tables = [tuple(table[i] for i in seen) for table in tables]
    sizes = tuple(sizes[i] for i in seen)
    totals = [sum(each.operands) or 1 for each in measured]
    total = sum(call.operand_bytes)
    output = _output(outputs, measured)
    if output is None:
        kept = [each.retained for each in measured]
        retained = _proportional(tables, kept, sizes)
        output = _bounded(_extended(tables, kept, sizes, totals, total))
        if retained is not None and not call.opaque:
            output = Bounds.exactly(retained)
    amounts = [each.held for each in measured]
    held = _proportional(tables, amounts, sizes)
    if held is not None and output is not None and not call.opaque:
        exact = output.low == output.high
        return Workspace(Bounds.exactly(held), output, exact=exact)
    bounds = _bounded(_extended(tables, amounts, sizes, totals, total))
    more = call.by_thread_bytes * torch.get_num_threads()
    if bounds is not None and output is not None:
        bounds = bounds._replace(high=bounds.high + more)
        return Workspace(bounds, output, exact=False)
    shares = [amount / size for amount, size in zip(amounts, totals, strict=True)]
    # The largest call is the most like; a small one may take what is once for all.
    likely = round(max(zip(totals, shares, strict=True))[1] * total)
    high = round(2 * max(shares) * total) + more
    high += sum(sizes) if output is None else 0
    return Workspace(Bounds(0, likely, high), output, exact=False)


def _output(outputs: tuple[int, ...], measured: list[_Measured]) -> Bounds | None:
    """Say what outputs take, where a call gives what it says."""
    said = all(sum(each.outputs) == each.retained for each in measured)
    hidden = any(
        not fake and real
        for each in measured
        for fake, real in zip(outputs, each.outputs, strict=False)
    )
    return Bounds.exactly(sum(outputs)) if said and not hidden else None


def _extended(
    tables: list[tuple[int, ...]], amounts: list[int], sizes: tuple[int, ...],
    totals: list[int], total: int,
) -> int | None:  # fmt: skip
    """Scale amounts by the simplest rule that gives all of them, else along a line."""
    rule = _proportional(tables, amounts, sizes)
    return _on_a_line(totals, amounts, total) if rule is None else rule


def _bounded(amount: int | None) -> Bounds | None:
    """Give an interval around what was scaled up.

    Libraries round up and choose by size.  Chosen: conv1d to conv3d and LSTM at full
    size, as far as they were tried, missed the line by 12 % at most.
    """
    if amount is None:
        return None
    return Bounds(round(0.8 * amount), amount, round(1.25 * amount))


def _on_a_line(totals: list[int], amounts: list[int], whole: int) -> int | None:
    """Extend amounts along a straight line; None if they are not on one."""
    order = sorted(range(len(totals)), key=lambda i: totals[i])
    first, *middle, last = order
    if totals[first] == totals[last]:
        return None
    slope = (amounts[last] - amounts[first]) / (totals[last] - totals[first])
    for i in middle:
        expected = amounts[first] + slope * (totals[i] - totals[first])
        if abs(expected - amounts[i]) > 0.02 * max(amounts) + 1024:
            return None
    return max(0, round(amounts[last] + slope * (whole - totals[last])))


def _proportional(
    tables: list[tuple[int, ...]], amounts: list[int], sizes: tuple[int, ...]
) -> int | None:
    """Find what amounts are proportional to, up to a constant, and scale them.

    Args:
        tables: Bytes of operands and outputs of each small call.
        amounts: What was measured in each.
        sizes: Bytes of operands and outputs of the call asked about.

    Returns:
        The amount there; None where no simple rule gives all that was measured.
    """
    columns = range(len(sizes))
    singles = [((column, factor),) for factor in _FACTORS for column in columns]
    for ((column, factor),) in singles:
        if all(
            amount == table[column] * factor
            for table, amount in zip(tables, amounts, strict=True)
        ):
            return round(sizes[column] * factor)
    if len(set(amounts)) == 1:
        return amounts[0]
    pairs = [
        ((first, one), (second, other))
        for first, second in itertools.combinations(columns, 2)
        for one, other in itertools.product(_FACTORS[:4], repeat=2)
    ]
    for rule in (*singles, *pairs):
        rests = {
            amount - sum(table[column] * factor for column, factor in rule)
            for table, amount in zip(tables, amounts, strict=True)
        }
        if len(rests) == 1:
            rest = rests.pop()
            scaled = sum(sizes[column] * factor for column, factor in rule)
            return max(0, round(scaled + rest))
    return None


KERNELS = KernelProbe()
"""What this process has learnt so far."""
