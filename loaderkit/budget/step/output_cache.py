"""Remembers what operators give for fake operands: shapes, types, layouts.

Torch's mode remembers too, but asks for twenty facts of each operand, takes no real
operands (edges, labels) and nothing that gives a list, and takes each new size for
another call: 54 us of CPU for a product that was seen before, 450 for one that was not,
where this takes 12.  A step has hundreds of calls, packed sequences ten thousands, and
the steps of a plan are of the same operators with other sizes.  So what was given is
remembered by the operands, and of operators that do not look at sizes by which sizes
are equal.  Views are made as "meta" tensors make them.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from loaderkit.budget.step.call_arguments import flatten_call
from loaderkit.budget.step.layouts import strides_of_axes
from loaderkit.budget.step.newest import newest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensorMode

    from loaderkit.budget.step.call_arguments import Args, CallStructure, Kwargs

_aten = torch.ops.aten
_CPU = torch.device("cpu")
_MOST_REMEMBERED = 50_000
"""Calls; some 50 MB.  Chosen: a step over packed sequences has 10,000."""
_MOST_KEPT = 500
"""Calls without their sizes that are kept from one estimate to the next; half a MB.
With them a second estimate takes 1.2 times of what it takes if all is kept, and 1.6
times without (measured on eight models)."""
_REAL_TYPES = (torch.Tensor, torch.nn.Parameter)
_VALUE_TYPES = frozenset(
    {bool, int, float, complex, str, type(None)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types of arguments that are no tensors, and are compared by their value."""
_NEVER = frozenset(
    {"aten::lift", "aten::lift_fresh", "aten::lift_fresh_copy", "aten::to"}
    # Lengths among its operands decide what it gives.
    | {"aten::_pack_padded_sequence"}
)
"""Operators that depend on more than the shapes of what they are given."""
_LIKE_VIEWS = (_aten._unsafe_view.default, _aten.unsafe_split.Tensor)  # noqa: SLF001 -- operators
"""They give parts of their operand's storage, and are not called views."""

_BY_ELEMENT = frozenset(
    {
        *("_prelu_kernel", "_prelu_kernel_backward", "copy_", "elu_backward", "fill"),
        *("fill_", "hardsigmoid_backward", "hardswish_backward", "hardtanh_backward"),
        *("leaky_relu_backward", "masked_fill_", "mish_backward", "rsub"),
        *("softplus_backward",),
    }
)
"""Operators that work element by element, and do not have torch's tag of these."""
_BLIND_TO_SIZES = frozenset(
    {
        *("_log_softmax", "_log_softmax_backward_data", "_softmax"),
        *("_softmax_backward_data", "_to_copy", "addmm", "all", "amax", "amin"),
        *("any", "argmax", "argmin", "baddbmm", "binary_cross_entropy"),
        *("binary_cross_entropy_backward", "bmm", "cumprod", "cumsum", "embedding"),
        *("embedding_dense_backward", "empty_like", "flip", "full_like", "gather"),
        *("huber_loss", "huber_loss_backward", "index", "index_add", "index_add_"),
        *("index_put", "index_put_", "index_select", "linalg_vector_norm"),
        *("logsumexp", "max", "mean", "min", "mm", "mse_loss", "mse_loss_backward"),
        *("native_batch_norm", "native_batch_norm_backward", "native_dropout"),
        *("native_layer_norm", "native_layer_norm_backward", "new_empty"),
        *("new_full", "new_ones", "new_zeros", "nll_loss_backward"),
        *("nll_loss_forward", "norm", "ones_like", "prod", "roll", "scatter"),
        *("scatter_", "scatter_add", "scatter_add_", "scatter_reduce"),
        *("scatter_reduce_", "select_backward", "slice_backward", "smooth_l1_loss"),
        *("smooth_l1_loss_backward", "sort", "std", "sum", "tril", "triu", "var"),
        *("var_mean", "zeros_like"),
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    }
)
"""Operators each of whose sizes they give is one of those they are given, whichever
that is: so it is of all that work element by element."""
_SIZES = ("size", "input_sizes", "num_weights")
"""Arguments that are sizes of what is given."""
_WITHOUT_EFFECT = {
    "slice_backward": ("start", "end", "step"),
    "select_backward": ("index",),
}
"""Whole numbers on which the shape of what these operators give does not depend."""
_IMAGE_ORDERS = ((0, 2, 3, 1), (0, 2, 3, 4, 1))
"""Axes of images in channels-last order: what kernels give for them is learnt call by
call (``layouts``)."""


class _Output(NamedTuple):
    """One output of a call."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    viewed: int | None = None
    """Which leaf of the call has its storage; None if it is a new one."""


class _Outputs(NamedTuple):
    """All that a call gives."""

    container: type | None
    """The tuple or list that they are in; None of an operator that gives one."""
    outputs: tuple[_Output | int | None, ...]
    """A number stands for that leaf of the call, which is given back as it is."""


class _SizedOutput(NamedTuple):
    """An output whose sizes are named."""

    sizes: tuple[int, ...]
    """0, 1, or a name: a number below 0."""
    order: tuple[int, ...]
    """Axes from the outermost to the innermost."""
    dtype: torch.dtype


class _SizedOutputs(NamedTuple):
    """All that a call gives whose sizes are named."""

    container: type | None
    outputs: tuple[_SizedOutput | int | None, ...]


class OutputCache:
    """Remembers what operators gave for fakes."""

    def __init__(self) -> None:
        self._by_call: dict[Any, _Outputs | None] = {}
        """None where it cannot be made again by its shapes."""
        self._by_pattern: dict[Any, _SizedOutputs | None] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._by_call.clear()
        self._by_pattern.clear()

    def trim(self) -> None:
        """Forget calls of certain sizes, and all but the newest of the others."""
        self._by_call = {}
        self._by_pattern = newest(self._by_pattern, _MOST_KEPT)

    def run(
        self,
        fake: FakeTensorMode,
        func: OpOverload,
        args: Args,
        kwargs: Kwargs,
        dispatch: Callable[[], Any],
    ) -> Any:
        """Give the outputs of a call with fake operands.

        Args:
            fake: Makes the fakes.
            func: The operator.
            args: Its positional arguments; a tensor among them is a fake.
            kwargs: Its named ones.
            dispatch: Runs it, where its outputs are not known.

        Returns:
            What ``dispatch`` gives, or its like.
        """
        if not _depends_on_shapes(func) or torch.is_inference_mode_enabled():
            return dispatch()
        leaves, structure = flatten_call(args, kwargs)
        facts = _facts_of(leaves, fake, with_offset=_is_view(func))
        if facts is None:
            return dispatch()
        key = (func, torch.get_default_dtype(), structure, facts)
        if key in self._by_call:
            known = self._by_call[key]
            return dispatch() if known is None else _make(fake, leaves, known)

        if len(self._by_call) > _MOST_REMEMBERED:
            self._by_call.clear()
        if _is_view(func):
            known = _view_as_meta(func, args, kwargs, leaves)
            if known is not None:
                self._by_call[key] = known
                return _make(fake, leaves, known)
        pattern = _pattern_of(func, leaves, structure, facts)
        if pattern is not None and pattern.key in self._by_pattern:
            sized = self._by_pattern[pattern.key]
            if sized is not None:
                known = _with_sizes(sized, pattern.size_of_name)
                self._by_call[key] = known
                return _make(fake, leaves, known)

        out = dispatch()
        known = _outputs_of(out, leaves)
        if _facts_of(leaves, fake, with_offset=_is_view(func)) != facts:
            # It has changed the shape of an operand.
            known = None
        self._by_call[key] = known
        if pattern is not None:
            if len(self._by_pattern) > _MOST_REMEMBERED:
                self._by_pattern.clear()
            self._by_pattern[pattern.key] = (
                None if known is None else _with_names(known, pattern.size_of_name)
            )
        return out


@functools.cache
def _depends_on_shapes(func: OpOverload) -> bool:
    """Tell whether an operator gives the same shapes for the same shapes, always."""
    schema = func._schema  # noqa: SLF001 -- the way to ask
    if func.namespace != "aten" or schema.name in _NEVER:
        return False
    tags = func.tags
    if torch.Tag.data_dependent_output in tags or torch.Tag.inplace_view in tags:
        return False
    if torch.Tag.dynamic_output_shape in tags and func is not _aten.index.Tensor:
        # Masks among its indices are positions by now.
        return False
    # ``out=`` gives another size to what is written to.
    return not any(
        argument.kwarg_only
        and argument.alias_info is not None
        and argument.alias_info.is_write
        for argument in schema.arguments
    )


@functools.cache
def _is_view(func: OpOverload) -> bool:
    return func.is_view or func in _LIKE_VIEWS


def _facts_of(
    leaves: Sequence[Any], fake: FakeTensorMode, *, with_offset: bool
) -> tuple[Any, ...] | None:
    """List all that the outputs of a call may depend on.

    Args:
        leaves: Its arguments.
        fake: The mode that its fakes are of.
        with_offset: Whether it matters where in its storage an operand begins.

    Returns:
        The facts; None of a call that has other arguments than dense tensors, numbers
        and the like.
    """
    facts: list[Any] = []
    for leaf in leaves:
        kind = type(leaf)
        if kind is FakeTensor:
            if leaf.fake_mode is not fake or leaf.constant is not None:
                return None
            # Torch asks what operands without a derivative would give as "meta" ones.
            if leaf.fake_device != _CPU:
                return None
        elif kind not in _REAL_TYPES:
            if kind not in _VALUE_TYPES:
                return None
            # 1, 1.0 and True are equal, and may give other types.
            facts.append((kind, leaf))
            continue
        if leaf.layout is not torch.strided or not _is_read_as_it_is(leaf):
            return None
        offset = leaf.storage_offset() if with_offset else kind is FakeTensor
        facts.append((leaf.shape, leaf.stride(), leaf.dtype, offset))
    return tuple(facts)


def _is_read_as_it_is(tensor: torch.Tensor) -> bool:
    """Tell whether nothing but shape and type says how a tensor is read.

    Some are to be read conjugated or negated, and a derivative that goes forward has
    tangents of zeros, of which there is no storage.
    """
    return not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())  # noqa: SLF001 -- the way to ask


def _make(fake: FakeTensorMode, leaves: Sequence[Any], known: _Outputs) -> Any:
    """Make the outputs of a call."""
    container, outputs = known
    made: list[Any] = []
    for output in outputs:
        if output is None:
            made.append(None)
            continue
        if isinstance(output, int):
            made.append(leaves[output])
            continue
        shape, stride, dtype, offset, viewed = output
        if viewed is None:
            shapes_only = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            shapes_only = torch.empty(0, dtype=dtype, device="meta")
            shapes_only.set_(leaves[viewed].untyped_storage(), offset, shape, stride)
        made.append(FakeTensor(fake, shapes_only, _CPU))
    return made[0] if container is None else container(made)


def _view_as_meta(
    func: OpOverload, args: Args, kwargs: Kwargs, leaves: Sequence[Any]
) -> _Outputs | None:
    """Find what a view is like, by that of a "meta" tensor with the same storage.

    Returns:
        It; None where torch's mode is to be asked, which also tells what is wrong.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    viewed = args[0]
    if len(tensors) != 1 or type(viewed) is not FakeTensor:
        return None
    if any(type(leaf) is torch.device for leaf in leaves):
        # ``to`` gives the same tensor where it is there already, and this one is not.
        return None
    storage = viewed.untyped_storage()
    shapes_only = torch.empty(0, dtype=viewed.dtype, device="meta")
    shapes_only.set_(storage, viewed.storage_offset(), viewed.shape, viewed.stride())
    try:
        out = func(shapes_only, *args[1:], **kwargs)
    except Exception:  # noqa: BLE001 -- torch's mode says what is wrong, in its words
        return None
    views = [out] if isinstance(out, torch.Tensor) else out
    if not isinstance(views, (list, tuple)):
        return None
    outputs = []
    for view in views:
        if view.untyped_storage()._cdata != storage._cdata:  # noqa: SLF001 -- an identity
            return None
        if view.layout is not torch.strided or not _is_read_as_it_is(view):
            return None
        outputs.append(
            _Output(
                shape=tuple(view.shape),
                stride=view.stride(),
                dtype=view.dtype,
                offset=view.storage_offset(),
                viewed=0,
            )
        )
    return _Outputs(None if views is not out else type(out), tuple(outputs))


def _outputs_of(out: Any, leaves: Sequence[Any]) -> _Outputs | None:
    """Describe what a call gave; None if that cannot be made again by its shapes."""
    container = None if out is None or isinstance(out, torch.Tensor) else type(out)
    if container not in {None, tuple, list}:
        return None
    outputs: list[_Output | int | None] = []
    storages = {
        leaf.untyped_storage()._cdata  # noqa: SLF001 -- an identity
        for leaf in leaves
        if type(leaf) is FakeTensor
    }
    for output in [out] if container is None else out:
        if output is None:
            outputs.append(None)
            continue
        given_back = [i for i, leaf in enumerate(leaves) if leaf is output]
        if given_back:
            outputs.append(given_back[0])
            continue
        described = _new_output(output, storages)
        if described is None:
            return None
        outputs.append(described)
    return _Outputs(container, tuple(outputs))


def _new_output(output: object, storages: set[int]) -> _Output | None:
    """Describe a new fake; None if it has more, or less, than a storage of its own.

    Args:
        output: What an operator gave.
        storages: That exist, by torch's address of each; it is added.
    """
    if type(output) is not FakeTensor or output.constant is not None:
        return None
    is_plain = output.layout is torch.strided and output.fake_device == _CPU
    if not is_plain or not _is_read_as_it_is(output) or output.requires_grad:
        return None
    storage = output.untyped_storage()
    if storage._cdata in storages:  # noqa: SLF001 -- an identity
        return None
    storages.add(storage._cdata)  # noqa: SLF001 -- an identity
    shape, stride, dtype = tuple(output.shape), output.stride(), output.dtype
    like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    is_whole = like.untyped_storage().nbytes() == storage.nbytes()
    if output.storage_offset() or not is_whole:
        return None
    return _Output(shape, stride, dtype)


class _Pattern(NamedTuple):
    """A call without its sizes."""

    key: Any
    size_of_name: dict[int, int]
    """The sizes by the names that they have in it: 0 and 1 are their own."""


@functools.cache
def _is_by_element(func: OpOverload) -> bool:
    return torch.Tag.pointwise in func.tags or _name_of(func) in _BY_ELEMENT


@functools.cache
def _is_blind_to_sizes(func: OpOverload) -> bool:
    is_blind = _is_by_element(func) or _name_of(func) in _BLIND_TO_SIZES
    return is_blind and not _is_view(func)


@functools.cache
def _name_of(func: OpOverload) -> str:
    return str(func._schema.name).removeprefix("aten::")  # noqa: SLF001 -- the way to ask


def _pattern_of(
    func: OpOverload,
    leaves: Sequence[Any],
    structure: CallStructure,
    facts: tuple[Any, ...],
) -> _Pattern | None:
    """Name the sizes of a call in the order in which they come.

    Args:
        func: An operator.
        leaves: Its arguments.
        structure: Where they stand.
        facts: Of each of them.

    Returns:
        The call; None of operators that look at sizes, and where an operand does not
        lie without gaps.
    """
    if not _is_blind_to_sizes(func):
        return None
    names = {0: 0, 1: 1}

    def name_of(size: int) -> int:
        return names.setdefault(size, 1 - len(names))

    parts: list[Any] = []
    for argument, leaf, fact in zip(
        _argument_names(func, structure), leaves, facts, strict=True
    ):
        if isinstance(leaf, torch.Tensor):
            shape, stride, dtype, is_fake = fact
            order: Any = _order_of(tuple(shape), stride)
            if order is None and _is_by_element(func):
                order = _order_with_gaps(shape, stride)
            if order is None:
                return None
            parts.append((tuple(map(name_of, shape)), order, dtype, is_fake))
        elif argument in _WITHOUT_EFFECT.get(_name_of(func), ()):
            parts.append(argument)
        elif argument in _SIZES and type(leaf) is int:
            if leaf < 0:
                return None
            parts.append(name_of(leaf))
        else:
            parts.append(fact)
    key = (func, torch.get_default_dtype(), structure, tuple(parts))
    return _Pattern(key, {name: size for size, name in names.items()})


def _argument_names(func: OpOverload, structure: CallStructure) -> list[str]:
    """Name the argument that each leaf of a call is, or is in."""
    arguments = func._schema.arguments  # noqa: SLF001 -- the way to ask
    lengths = [
        *zip((a.name for a in arguments), structure.positional, strict=False),
        *structure.named,
    ]
    names: list[str] = []
    for name, length in lengths:
        names += [name] * (1 if length is None else length)
    return names


def _order_of(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Give the axes from the outermost to the innermost, as they lie in memory.

    Args:
        shape: Sizes.
        stride: Elements from one to the next, of each axis.

    Returns:
        The order, with those left out that are expanded; None where there are gaps or
        overlaps, and where the order is not told.

    >>> _order_of((2, 3, 4), (12, 4, 1)), _order_of((2, 3, 4), (3, 1, 6))
    ((0, 1, 2), (2, 0, 1))
    >>> _order_of((2, 3), (0, 1)), _order_of((2, 3), (6, 1))
    ((1,), None)
    """
    axes = tuple(range(len(shape)))
    if 0 in shape:
        return None
    if stride == strides_of_axes(shape, axes):
        return axes
    if 1 in shape:
        return None
    kept = [axis for axis in axes if stride[axis]]
    order = tuple(sorted(kept, key=lambda axis: -stride[axis]))
    if order in _IMAGE_ORDERS or stride != strides_of_axes(shape, order):
        return None
    return order


def _order_with_gaps(
    shape: Sequence[int], stride: Sequence[int]
) -> tuple[str, tuple[int, ...]] | None:
    """Give the order of axes between whose elements there are gaps, and no overlaps.

    What works element by element gives axes in the order of its operands', which it
    reads from which stride is larger, and looks at gaps no further.

    Returns:
        The order, marked; None where there are overlaps, or it is not told.

    >>> _order_with_gaps((2, 3), (6, 1)), _order_with_gaps((2, 3), (2, 1))
    (('gaps', (0, 1)), None)
    """
    if 0 in shape or 1 in shape or 0 in stride:
        return None
    order = tuple(sorted(range(len(shape)), key=lambda axis: -stride[axis]))
    for outer, inner in itertools.pairwise(order):
        if stride[outer] < shape[inner] * stride[inner]:
            return None
    return None if order in _IMAGE_ORDERS else ("gaps", order)


def _with_names(known: _Outputs, size_of_name: dict[int, int]) -> _SizedOutputs | None:
    """Name the sizes of what a call gave; None if one of them is no size of it."""
    names = {size: name for name, size in size_of_name.items()}
    outputs: list[_SizedOutput | int | None] = []
    for output in known.outputs:
        if not isinstance(output, _Output):
            outputs.append(output)
            continue
        sizes = [names.get(size) for size in output.shape]
        order: Any = tuple(range(len(sizes)))
        if 0 not in output.shape:
            order = _order_of(output.shape, output.stride)
        elif output.stride != strides_of_axes(output.shape, order):
            return None
        if order is None or len(order) < len(sizes) or None in sizes:
            return None
        named_sizes = tuple(name for name in sizes if name is not None)
        outputs.append(_SizedOutput(named_sizes, order, output.dtype))
    return _SizedOutputs(known.container, tuple(outputs))


def _with_sizes(sized: _SizedOutputs, size_of_name: dict[int, int]) -> _Outputs:
    """Give the outputs of a call with its own sizes."""
    outputs: list[_Output | int | None] = []
    for output in sized.outputs:
        if not isinstance(output, _SizedOutput):
            outputs.append(output)
            continue
        shape = tuple(size_of_name[name] for name in output.sizes)
        stride = strides_of_axes(shape, output.order)
        outputs.append(_Output(shape, stride, output.dtype))
    return _Outputs(sized.container, tuple(outputs))


OUTPUTS = OutputCache()
"""Of this process."""
