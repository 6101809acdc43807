"""What CPU kernels hold inside while they run, learnt from small real calls.

An operator with fake operands shows its outputs, never the buffers that its kernel takes
and gives back: the unreduced loss of ``mse_loss``, a mask turned into numbers, packed
weights.  So each distinct call of a step is made once for real, on operands shrunk to
some 100 kB, under torch's profiler; what the profiler sees is scaled up to the real
sizes.  No parameter of the model is touched or copied.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.profiler import profile, record_function
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_WHOLE_BYTES = 256 << 10
"""Calls up to this size are made as they are; chosen so that a step's calls fit in the
bound that the documentation states (16 MB) many times over."""
_WHOLE_OPAQUE_BYTES = 2 << 20
"""The same for kernels that choose their algorithm by size: shrinking changes it."""
_MOST_BYTES = 3 << 20
"""What the operands of a call that is made take at most."""
_CHECKED_BYTES = 64 << 10
"""Operands above which the outputs are looked at before a call is made: a product of two
vectors is large."""
_FREE_NUMBER = 104
"""What stands for a number that is no operand's size, such as the rows of a table."""
_SMALLEST_SHRUNK = 17
"""Sizes below stay: they are kernel widths, heads, or axes of three."""
_SHRUNK_SIZES = {
    2: ((88, 56), (104, 72), (72, 88)),
    3: ((56, 40, 24), (72, 24, 40), (40, 56, 32)),
    4: ((28, 20, 24, 18), (20, 28, 18, 24), (36, 24, 20, 26)),
}
"""Three ways to replace the sizes of a call, largest first, by how many it has.  They are
even, as heads and groups ask for, and differ in each place, so that what is in
proportion to one operand is not to another; all make some 100 kB."""
_SHRUNK_SPATIAL = (
    ((24, 16, 12), (16, 24, 10), (32, 12, 16)),
    ((8, 6, 4), (6, 8, 4), (10, 4, 6)),
    ((4, 4, 2), (6, 2, 4), (2, 6, 4)),
)
"""The same for samples and channels of images, whose width and height stay: the first
of the three rows that is small enough."""
_OPAQUE = ("convolution", "_fft", "mkldnn")
"""Kernels whose buffers depend on the algorithm that a library picks by size."""
_SPATIAL = (
    "conv",
    "pool",
    "upsample",
    "im2col",
    "col2im",
    "grid_sampl",
    "_pad",
    "shuffle",
)
"""Kernels whose outputs have a width that follows from their operands'."""
_FREE_NUMBERS = ("new_", "embedding", "scalar", "arange", "full", "fill", "add", "mul")
"""Kernels with numbers that are no operand's size: any number does."""
_PLAIN = (
    "slice_backward", "select_backward", "diagonal_backward", "unfold_backward",
    "constant_pad_nd", "aten::new_", "aten::zeros", "aten::ones", "aten::full",
    "aten::empty", "aten::cat", "aten::fill_", "aten::zero_", "expand", "aten::cumsum",
    "_local_scalar_dense",
)  # fmt: skip
"""Kernels that hold nothing beside their outputs, whatever the operands (read in torch's
source): they need not be made."""
_SHORT = (torch.bfloat16, torch.float16)
"""Types of which products pack their operands, in blocks that depend on the size."""
_UNSAFE = (
    "lu_factor", "lu_solve", "lu_unpack", "ldl_", "_qr", "geqrf", "orgqr", "ormqr",
    "cholesky", "svd", "eig", "triangular", "solve", "_ctc_loss", "_thnn", "segment",
    "quantize", "sparse", "nested", "_pack", "multinomial",
)  # fmt: skip
"""Kernels that read positions or sizes out of their operands' values and do not check
them: with invented values they would fail or read elsewhere."""
_FACTORS = (1.0, 2.0, 0.5, 0.25, 0.125, 3.0, 4.0, 8.0)
_MARKER = "loaderkit kernel "


class TensorSpec(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements; what is expanded counts once."""
        count = 1
        for size, stride in zip(self.shape, self.stride, strict=True):
            count *= size if stride or not size else 1
        return count * self.dtype.itemsize


class KernelCall(NamedTuple):
    """One call of an operator, without values."""

    func: Any
    leaves: tuple[Any, ...]
    tree: TreeSpec

    @property
    def tensors(self) -> list[TensorSpec]:
        """Its operands."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    @property
    def nbytes(self) -> int:
        """Bytes of its operands."""
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def spatial(self) -> bool:
        """Whether width and height of its outputs follow from its operands'."""
        return any(word in self.func.name() for word in _SPATIAL)

    @property
    def plain(self) -> bool:
        """Whether it holds nothing beside its outputs."""
        return any(word in self.func.name() for word in _PLAIN)

    @property
    def opaque(self) -> bool:
        """Whether a library picks its algorithm by size."""
        name = self.func.name()
        short = any(spec.dtype in _SHORT for spec in self.tensors)
        product = name.endswith("mm") or "mm." in name or "addmv" in name
        return any(word in name for word in _OPAQUE) or (short and product)


@dataclass(frozen=True)
class Workspace:
    """What a kernel takes beside its operands and outputs.  Bytes."""

    held: int
    """At its highest, while it runs."""
    low: int
    """Lower end of that."""
    high: int
    """Upper end."""
    output: int | None
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


def call_of(func: Any, args: Any, kwargs: Any) -> KernelCall | None:
    """Describe a call.

    Args:
        func: An operator overload of aten.
        args: Its positional arguments.
        kwargs: Its named ones.

    Returns:
        The description, which keeps no tensor alive; None if it cannot be made again:
        other libraries' operators, sparse tensors, values that decide where is read.
    """
    name = func.name()
    if func.namespace != "aten" or any(word in name for word in _UNSAFE):
        return None
    values, tree = tree_flatten((_plain_scalars(func, args), kwargs))
    leaves: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                return None
            value = TensorSpec(tuple(value.shape), value.stride(), value.dtype)
        elif isinstance(value, torch.Generator):
            return None
        leaves.append(value)
    return KernelCall(func, tuple(leaves), tree)


def _plain_scalars(func: Any, args: Any) -> list[Any]:
    """Turn whole numbers that are no sizes, such as a factor, into floats."""
    floats = all(
        leaf.is_floating_point() for leaf in tree_iter(args) if _is_tensor(leaf)
    )
    plain = []
    for value, argument in zip(args, func._schema.arguments, strict=False):  # noqa: SLF001 -- the way to ask
        is_factor = "number" in str(argument.type) and type(value) is int
        plain.append(float(value) if is_factor and floats else value)
    return plain


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class KernelProbe:
    """Learns what kernels take, and remembers it."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, KernelCall], _Measured | None] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._seen.clear()

    def workspaces(
        self, calls: Iterable[tuple[KernelCall, tuple[int, ...]]]
    ) -> dict[tuple[KernelCall, tuple[int, ...]], Workspace | None]:
        """Find what calls take.

        Args:
            calls: Each with the bytes of the outputs it was tracked with.

        Returns:
            For each what its kernel takes; None where it could not be made for real.
        """
        found: dict[tuple[KernelCall, tuple[int, ...]], Workspace | None] = {}
        open_calls = []
        for pair in calls:
            if pair[0].plain:
                found[pair] = Workspace(0, 0, 0, None, exact=True)
            else:
                found[pair] = None
                open_calls.append((pair, smaller_calls(*pair)))
        # the first ways to shrink of all calls under one profile, then the second ways
        # of those that failed: operators refuse sizes that do not go together
        while open_calls:
            self._measure(call for _, ways in open_calls for call in ways[0])
            remaining = []
            for pair, ways in open_calls:
                found[pair] = self._of_small(pair, ways[0])
                if found[pair] is None and len(ways) > 1:
                    remaining.append((pair, ways[1:]))
            open_calls = remaining
        return found

    def _of_small(
        self, pair: tuple[KernelCall, tuple[int, ...]], small: list[KernelCall]
    ) -> Workspace | None:
        threads = torch.get_num_threads()
        seen = [self._seen[threads, each] for each in small]
        measured = [each for each in seen if each is not None]
        if len(measured) < len(seen) or not measured:
            return None
        return _scaled(*pair, measured, whole=len(small) == 1)

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


def smaller_calls(
    call: KernelCall, outputs: tuple[int, ...] = ()
) -> list[list[KernelCall]]:
    """Give calls like one, small enough to be made.

    Args:
        call: The call.
        outputs: Bytes of its outputs.

    Returns:
        Ways to shrink it, the best first: itself alone where it is small, else three
        calls with other sizes.  One empty way where it is not known which go together.
    """
    limit = _WHOLE_OPAQUE_BYTES if call.opaque else _WHOLE_BYTES
    numbers = [leaf for leaf in call.leaves if type(leaf) is int and leaf < 1 << 31]
    if call.nbytes + sum(outputs) <= limit and max(numbers, default=0) * 4 <= limit:
        return [[call]]
    sizes = {size for spec in call.tensors for size in spec.shape} - _fixed_sizes(call)
    replaced = sorted((s for s in sizes if s >= _SMALLEST_SHRUNK), reverse=True)
    if call.spatial:
        patterns: Sequence[Sequence[tuple[int, ...]]] = _SHRUNK_SPATIAL
    else:
        patterns = [_SHRUNK_SIZES[min(max(len(replaced), 2), 4)]]
    rows = [[_replacements(replaced, each) for each in row] for row in patterns]
    # all sizes by the same share, where one is half of another
    rows += [
        [{s: s // share for s in replaced} for share in (first, 2 * first, 4 * first)]
        for first in (4, 16, 64)
    ]
    ways = _of_fewer_samples(call, replaced, limit) if call.opaque else []
    for row in rows:
        resized = [_resized(call, sizes) for sizes in row]
        whole = [each for each in resized if each is not None]
        if len(whole) == len(row) and all(each.nbytes <= _MOST_BYTES for each in whole):
            ways.append(whole)
    return ways[:3] or [[]]


def _of_fewer_samples(
    call: KernelCall, sizes: list[int], limit: int
) -> list[list[KernelCall]]:
    """Shrink one size only, the first operand's first or the largest, to three others."""
    first = call.tensors[0].shape[:1]
    chosen = (
        first[0]
        if call.spatial and first and first[0] in sizes
        else max(sizes, default=0)
    )
    small = chosen
    while small > 8:
        small //= 2
        resized = [
            _resized(call, {chosen: s}) for s in (small, small * 3 // 4, small // 2)
        ]
        whole = [each for each in resized if each is not None]
        if len(whole) < len(resized):
            return []
        if max(each.nbytes + _output_bytes(each) for each in whole) <= limit:
            return [whole]
    return []


def _fixed_sizes(call: KernelCall) -> set[int]:
    """Name the sizes that must stay, since others follow from them."""
    if "mkldnn_rnn" in call.func.name():  # 4 gates times hidden; read without a check
        weights = call.tensors[1:5]
        return {size for spec in weights for size in spec.shape} | {
            leaf for leaf in call.leaves if type(leaf) is int
        }
    if call.spatial:
        return {size for spec in call.tensors for size in spec.shape[2:]}
    return set()


def _replacements(sizes: list[int], pattern: tuple[int, ...]) -> dict[int, int]:
    """Map the largest size to the first of a pattern, and so on; never to a larger."""
    padded = itertools.chain(pattern, itertools.repeat(pattern[-1]))
    return {size: min(size, other) for size, other in zip(sizes, padded, strict=False)}


def _resized(call: KernelCall, sizes: dict[int, int]) -> KernelCall | None:
    """Replace sizes wherever they stand: in shapes, and in lists of numbers."""
    fixed = _fixed_sizes(call)
    numbers = sizes | _products(call, sizes)
    leaves: list[Any] = []
    for leaf in call.leaves:
        if isinstance(leaf, TensorSpec):
            leaves.append(_resized_spec(leaf, sizes))
        elif (
            type(leaf) is not int
            or not _SMALLEST_SHRUNK <= leaf < 1 << 31
            or leaf in fixed
        ):
            leaves.append(leaf)
        elif leaf in numbers:
            leaves.append(numbers[leaf])
        elif any(word in call.func.name() for word in _FREE_NUMBERS):
            leaves.append(_FREE_NUMBER)
        elif call.spatial:
            leaves.append(leaf)
        else:  # some kernels believe such a number, and would read beyond the operands
            return None
    return KernelCall(call.func, tuple(leaves), call.tree)


def _products(call: KernelCall, sizes: dict[int, int]) -> dict[int, int]:
    """Map products of neighbouring sizes, such as the pixels that group_norm is told."""
    products = {}
    for spec in call.tensors:
        for start, stop in itertools.combinations(range(len(spec.shape) + 1), 2):
            axes = spec.shape[start:stop]
            small = [sizes.get(size, size) for size in axes]
            products.setdefault(math.prod(axes), math.prod(small))
    return products


def _resized_spec(spec: TensorSpec, sizes: dict[int, int]) -> TensorSpec:
    """Keep the order of the axes, and gaps between rows as gaps of one element."""
    shape = tuple(sizes.get(size, size) for size in spec.shape)
    stride = [0] * len(shape)
    dense, dense_before = 1, 1
    for axis in sorted(range(len(shape)), key=lambda a: (spec.stride[a], -a)):
        if not spec.stride[axis]:
            continue
        if spec.stride[axis] > dense_before:
            dense += 1
        dense_before = max(spec.stride[axis], 1) * spec.shape[axis]
        stride[axis] = dense
        dense *= shape[axis]
    return TensorSpec(shape, tuple(stride), spec.dtype)


def _profiled(calls: Sequence[KernelCall]) -> list[_Measured | None]:
    """Make calls under one profile and read what each took."""
    bytes_of: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    with (
        torch.enable_grad(),  # recurrent kernels keep nothing for a backward pass else
        torch.random.fork_rng(devices=[]),
        profile(profile_memory=True) as profiled,
    ):
        for number, call in enumerate(calls):
            made = _make(call, number)
            if made is not None:
                bytes_of[number] = made
    events = sorted(
        profiled.kineto_results.events(), key=lambda event: int(event.start_ns())
    )
    found: list[_Measured | None] = [None] * len(calls)
    number, until, now, highest = -1, -1, 0, 0
    for event in events:
        name, start = event.name(), event.start_ns()
        if name.startswith(_MARKER):
            number, until = int(name.removeprefix(_MARKER)), start + event.duration_ns()
            now = highest = 0
        elif name == "[memory]" and start <= until:
            now += event.nbytes()
            highest = max(highest, now)
        if number in bytes_of:
            found[number] = _Measured(*bytes_of[number], highest, now)
    return found


def _make(
    call: KernelCall, number: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Make one call; give the bytes of its operands and outputs, None if it failed."""
    try:
        if call.nbytes > _CHECKED_BYTES and _output_bytes(call) > 2 * _MOST_BYTES:
            return None
        args, kwargs = _arguments(call)
        with record_function(f"{_MARKER}{number}"):
            made = call.func(*args, **kwargs)
    except Exception:  # noqa: BLE001 -- values were invented: any operator may refuse
        return None
    operands = tuple(spec.nbytes for spec in call.tensors)
    outputs = [t for t in tree_iter(made) if isinstance(t, torch.Tensor)]
    return operands, tuple(t.numel() * t.itemsize for t in outputs)


def _output_bytes(call: KernelCall) -> int:
    """Ask torch's shape rules what a call would give; 0 where there is no rule."""
    leaves = [
        torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")
        if isinstance(leaf, TensorSpec)
        else leaf
        for leaf in call.leaves
    ]
    args, kwargs = tree_unflatten(leaves, call.tree)
    try:
        made = call.func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return 0
    return sum(t.numel() * t.itemsize for t in tree_iter(made) if _is_tensor(t))


def _arguments(call: KernelCall) -> Any:
    leaves = [
        _invented(leaf) if isinstance(leaf, TensorSpec) else leaf
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


def _invented(spec: TensorSpec) -> torch.Tensor:
    """Make a tensor: positions are 0, masks choose everything, floats are in (0, 1)."""
    span = 1 + sum(
        (size - 1) * stride
        for size, stride in zip(spec.shape, spec.stride, strict=True)
    )
    if not all(spec.shape):
        return torch.empty(spec.shape, dtype=spec.dtype)
    if spec.dtype == torch.bool:
        flat = torch.ones(span, dtype=spec.dtype)
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
        return Workspace(one.held, one.held, one.held, one.retained, exact=True)
    sizes = (*(spec.nbytes for spec in call.tensors), *outputs)
    tables = [(*each.operands, *each.outputs) for each in measured]
    if any(len(table) != len(sizes) for table in tables):
        tables, sizes = [(sum(table),) for table in tables], (sum(sizes),)
    held = _proportional(tables, [each.held for each in measured], sizes)
    if all(sum(each.outputs) == each.retained for each in measured):
        output: int | None = sum(outputs)
    else:
        output = _proportional(tables, [each.retained for each in measured], sizes)
    if held is not None and output is not None and not call.opaque:
        return Workspace(held, held, held, output, exact=True)
    totals = [sum(table) or 1 for table in tables]
    amounts = [each.held for each in measured]
    if held is None:
        held = _on_a_line(totals, amounts, sum(sizes))
    if held is not None and output is not None:
        # libraries round up and choose by size: compared with calls of the full size,
        # conv1d to conv3d and LSTM, a line missed by 12 % at most
        return Workspace(
            held, round(0.8 * held), round(1.25 * held), output, exact=False
        )
    shares = [amount / total for amount, total in zip(amounts, totals, strict=True)]
    held = round(max(shares) * sum(sizes))
    high = 2 * held + (sum(sizes) if output is None else 0)
    return Workspace(held, 0, high, output, exact=False)


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
