"""Functions of torch that are made of other operators on a CUDA GPU.

A step for CUDA is tracked with fake tensors of the CPU, which torch takes apart as it
does there.  Where the parts differ, they stand here: dropout keeps a mask of a byte for
each element, recurrent layers are one call of cuDNN with a workspace and a reserve,
and their cells one kernel.  Sizes are those that the allocator of an H100 recorded
(torch 2.11, cuDNN 9); ``docs/budget.md`` says of which steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from loaderkit.budget.step.allocation_log import Bounds
from loaderkit.budget.step.cuda_autocast import (
    NARROW_FLOATS,
    cast_policy_of,
    cast_to_autocast,
    run_by_policy,
)
from loaderkit.budget.step.cuda_kernels import attention_workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loaderkit.budget.step.call_arguments import Args, Kwargs
    from loaderkit.budget.step.tracker import Tracker

_DROPOUTS = {functional.dropout, torch.dropout}

_KEPT_OUTPUTS = {torch.lstm: 5, torch.gru: 6, torch.rnn_tanh: 1, torch.rnn_relu: 1}
"""Recurrent layers; how many times its output each of their layers keeps for the
backward pass, both directions apart (measured: equal to the byte in 7 steps)."""
_RESERVE_BYTES = 256
"""What is kept in any case (measured)."""

_WORKSPACE_OF_LAYER = 8 << 20
"""Of each layer and direction, forward and backward (measured)."""
_WORKSPACE_OUTPUTS = Bounds(low=2, likely=20, high=26)
"""And so many times the output of one layer, by the algorithm that cuDNN chooses: 18 to
25 were measured in small layers, 5 to 7 in layers of 512 numbers."""
_WIDE = 256
"""Numbers of a state from which on a layer counts as wide; chosen between the two."""
_WORKSPACE_OUTPUTS_OF_WIDE = Bounds(low=2, likely=7, high=26)
_ASSUMPTION = "the workspace of cuDNN's algorithm"

_CELLS: dict[Any, tuple[int, int]] = {torch.gru_cell: (3, 5), torch.lstm_cell: (4, 4)}
"""Gates of a cell, and what its kernel keeps: numbers for each number of the state."""


class CudaFunctions(TorchFunctionMode):
    """Makes the operators of a function that CUDA would.

    Args:
        tracker: It logs what they make.
    """

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Run a function as CUDA does, or as it is."""
        kwargs = kwargs or {}
        policy = cast_policy_of(func, kwargs)
        if policy is not None:
            return run_by_policy(func, policy, args, kwargs)
        if func in _DROPOUTS:
            return _drop_out(func, *args, **kwargs)
        if torch._C._are_functorch_transforms_active():  # noqa: SLF001 -- no other way
            # In grad, vmap and their like, functions such as those below cannot be.
            return func(*args, **kwargs)
        if func in _KEPT_OUTPUTS and not kwargs:
            layers = _RecurrentLayers.of_call(func, args)
            if layers is not None:
                return _run_recurrent(layers, self.tracker)
        if func in _CELLS and not kwargs:
            return _run_cell(func, *args)
        if func is functional.scaled_dot_product_attention:
            return _run_attention(self.tracker, func, *args, **kwargs)
        return func(*args, **kwargs)


def _drop_out(
    func: Callable[..., Any],
    input: torch.Tensor,  # noqa: A002 -- torch's name
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002 -- torch's
    inplace: bool = False,  # noqa: FBT001, FBT002 -- torch's
    **named: Any,
) -> Any:
    """Keep a mask of bytes, as the fused kernel does; in place there is none."""
    is_fused = training and not inplace and 0 < p < 1 and not named
    if is_fused and input.requires_grad and input.numel():
        return torch.native_dropout(input, p, train=True)[0]
    if func is torch.dropout:
        return func(input, p, training)
    return func(input, p, training, inplace, **named)


class _RecurrentLayers(NamedTuple):
    """A call of a recurrent layer."""

    kept_outputs: int
    values: torch.Tensor
    """``[T, B, I]``, ``[B, T, I]``, or packed ``[sum of lengths, I]``."""
    states: tuple[torch.Tensor, ...]
    """Each ``[layers x directions, B, H]``."""
    weights: list[torch.Tensor]
    layers: int
    directions: int
    dropout: float
    is_batch_first: bool

    @classmethod
    def of_call(
        cls, func: Callable[..., Any], args: Sequence[Any]
    ) -> _RecurrentLayers | None:
        """Read the arguments; None where cuDNN would not be asked."""
        # torch has two calls of one name: of packed sequences the second argument is
        # the batch sizes, of others it is the state, or a pair of states.
        second = args[1]
        is_packed = isinstance(second, torch.Tensor) and not second.is_floating_point()
        if is_packed:
            values, _, states, weights, _, layers, dropout, train, both_ways = args
            is_batch_first = False
        else:
            values, states, weights, _, layers, dropout, train, both_ways = args[:8]
            is_batch_first = bool(args[8])
        states = (states,) if isinstance(states, torch.Tensor) else tuple(states)
        directions = 2 if both_ways else 1
        weights_of_layer = len(weights) // (layers * directions)
        # Two matrices and two biases, or none; a projection is one matrix more.
        has_projection = func is torch.lstm and weights_of_layer in {3, 5}
        if not train or has_projection or not torch.is_grad_enabled():
            return None
        return cls(
            _KEPT_OUTPUTS[func],
            values,
            states,
            list(weights),
            layers,
            directions,
            dropout,
            is_batch_first,
        )

    @property
    def width(self) -> int:
        """Numbers of a state."""
        return int(self.states[0].shape[-1])

    @property
    def output_numbers(self) -> int:
        """Numbers of the output of one layer in one direction."""
        rows = self.values.numel() // max(1, self.values.shape[-1])
        return rows * self.width

    @property
    def reserve_bytes(self) -> int:
        """What is kept for the backward pass beside the output."""
        between = (self.layers - 1) * self.directions
        outputs = self.kept_outputs * self.layers * self.directions + between
        numbers = self.output_numbers
        dropped_bytes = between * numbers // 8 if self.dropout else 0
        kept_bytes = outputs * numbers * self.values.itemsize
        return kept_bytes + dropped_bytes + _RESERVE_BYTES

    @property
    def workspace_bytes(self) -> Bounds:
        """What the kernels take while they run, forward and backward."""
        fixed = _WORKSPACE_OF_LAYER * self.layers * self.directions
        is_wide = self.width >= _WIDE
        outputs = _WORKSPACE_OUTPUTS_OF_WIDE if is_wide else _WORKSPACE_OUTPUTS
        output_bytes = self.output_numbers * self.directions * self.values.itemsize
        weights = sum(weight.numel() * weight.itemsize for weight in self.weights)
        low, likely, high = (times * output_bytes for times in outputs)
        return Bounds(fixed // 2 + low, fixed + likely, 2 * fixed + high + 2 * weights)


def _run_recurrent(layers: _RecurrentLayers, tracker: Tracker) -> tuple[Any, ...]:
    tracker.log.assumptions[_ASSUMPTION, "recurrent layers"] += 1
    apply: Any = _Recurrent.apply
    outputs = apply(layers, tracker, layers.values, *layers.states, *layers.weights)
    return tuple(outputs)


class _Recurrent(torch.autograd.Function):
    """All layers as one operator."""

    @staticmethod
    def forward(
        ctx: Any,
        layers: _RecurrentLayers,
        tracker: Tracker,
        values: torch.Tensor,
        *states_and_weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Make the output and what is kept."""
        copied = _copy_if_transposed(layers, values)
        shape = (*values.shape[:-1], layers.directions * layers.width)
        if layers.is_batch_first:
            output = values.new_empty((shape[1], shape[0], shape[2])).transpose(0, 1)
        else:
            output = values.new_empty(shape)
        states = [state.new_empty(state.shape) for state in layers.states]
        reserve = values.new_empty(layers.reserve_bytes, dtype=torch.uint8)
        workspace = _make_workspace(layers, tracker, values)
        del workspace, copied
        ctx.layers, ctx.tracker = layers._replace(values=values.detach()), tracker
        ctx.save_for_backward(values, *states_and_weights, output, reserve)
        return (output, *states)

    @staticmethod
    @once_differentiable  # nor is the kernel's
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Make the gradients; those of the weights lie in one block."""
        layers: _RecurrentLayers = ctx.layers
        values = ctx.saved_tensors[0]
        copies = [_copy_if_transposed(layers, values), _made_contiguous(gradients[0])]
        of_values = values.new_empty(values.shape)
        of_states = [state.new_empty(state.shape) for state in layers.states]
        workspace = _make_workspace(layers, ctx.tracker, values)
        numbers = [weight.numel() for weight in layers.weights]
        block = layers.weights[0].new_empty(sum(numbers))
        flat_gradients = torch.split(block, numbers)
        of_weights = [
            flat.view(weight.shape)
            for flat, weight in zip(flat_gradients, layers.weights, strict=True)
        ]
        del workspace, copies
        return (None, None, of_values, *of_states, *of_weights)


def _copy_if_transposed(
    layers: _RecurrentLayers, values: torch.Tensor
) -> torch.Tensor | None:
    """Copy what cuDNN wants with the steps first."""
    return values.new_empty(values.shape) if layers.is_batch_first else None


def _made_contiguous(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or gradient.is_contiguous():
        return None
    return gradient.new_empty(gradient.shape)


def _make_workspace(
    layers: _RecurrentLayers, tracker: Tracker, like: torch.Tensor
) -> torch.Tensor:
    """Make the workspace, and note how much less or more it may be."""
    low, likely, high = layers.workspace_bytes
    workspace = like.new_empty(likely, dtype=torch.uint8)
    tracker.note_uncertain(workspace, Bounds(low - likely, 0, high - likely))
    return workspace


_ALIGNED_BYTES = 16
"""The numbers of a head take a multiple of it where the kernel for masks and float32
reads them."""
_ROWS_OF_SUMS = 32
"""Queries are padded to a multiple of it where the sums of the softmax are kept."""
_ALIGNED_NUMBERS = 16
"""A mask whose rows are no multiple of it is copied, with longer rows."""


def _run_attention(
    tracker: Tracker,
    func: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 -- torch's
    **named: Any,
) -> Any:
    """Attend by a fused kernel, with a mask or dropout too, as CUDA does."""
    query, key, value = map(cast_to_autocast, (query, key, value))
    named = {"dropout_p": dropout_p, "is_causal": is_causal, **named}
    is_usual = query.dim() == 4 and query.is_floating_point() and query.numel()
    if not is_usual or not torch.is_grad_enabled():
        return func(query, key, value, attn_mask, **named)
    if not query.requires_grad:
        return func(query, key, value, attn_mask, **named)
    shares_keys = query.shape[1] != key.shape[1]
    if not _has_fused_kernel(query, attn_mask, shares_keys=shares_keys):
        return _attend_plainly(query, key, value, attn_mask, **named)
    if shares_keys and attn_mask is None:
        return func(query, key, value, attn_mask, **named)
    bias = None
    if attn_mask is not None:
        bias = _align_rows(attn_mask, query).expand(*query.shape[:3], key.shape[2])
    apply: Any = _Attention.apply
    output = apply(query, key, value, bias)
    if bias is not None and (bias.requires_grad or shares_keys):
        # torch may take the plain formula instead: a Swin's windows were attended by
        # the fused kernel, T5 was not; an H100 has a kernel of cuDNN for heads that
        # share keys, other GPUs may not.  That keeps weights, dropped ones and a mask.
        weight_bytes = bias.numel() * bias.itemsize
        tracker.note_uncertain(output, Bounds(0, 0, 3 * weight_bytes))
    return output


def _has_fused_kernel(
    query: torch.Tensor, mask: torch.Tensor | None, *, shares_keys: bool
) -> bool:
    """Tell whether CUDA attends without making the weights, as torch chooses.

    Flash attention takes narrow floats without a mask.  The memory-efficient kernel
    takes float32 and masks where rows are aligned, and no heads that share keys; with
    narrow floats cuDNN takes those (on an H100: 12.5 MiB in place of 28.6).
    """
    is_narrow = query.dtype in NARROW_FLOATS
    if is_narrow and mask is None:
        return True
    is_aligned = query.shape[-1] * query.itemsize % _ALIGNED_BYTES == 0
    if query.dtype is torch.float64 or not is_aligned:
        return False
    return is_narrow or not shares_keys


def _attend_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **named: Any,
) -> Any:
    """Make all the weights, and keep them for the backward pass."""
    with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", enabled=False):
        return functional.scaled_dot_product_attention(query, key, value, mask, **named)


def _align_rows(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Make a mask what the kernel adds: floats, in rows that are aligned."""
    bias = query.new_empty(mask.shape) if mask.dtype is torch.bool else mask
    length = bias.shape[-1]
    if length % _ALIGNED_NUMBERS == 0:
        return bias
    padded = functional.pad(bias, (0, -length % _ALIGNED_NUMBERS))
    return padded[..., :length]


class _Attention(torch.autograd.Function):
    """Attention that keeps the sums of the softmax, and no weights."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Make the output, with the heads beside each other, and the sums."""
        batch, heads, length, _ = query.shape
        output = query.new_empty((batch, length, heads, value.shape[-1]))
        rows = -(-length // _ROWS_OF_SUMS) * _ROWS_OF_SUMS
        sums = query.new_empty((batch, heads, rows), dtype=torch.float32)
        output = output.transpose(1, 2)
        ctx.save_for_backward(query, key, value, bias, output, sums)
        return output

    @staticmethod
    @once_differentiable  # nor is the kernel's
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Make the gradients; those of the queries are added up in blocks."""
        query, key, value, bias, _output, _sums = ctx.saved_tensors
        copied = _made_contiguous(gradient.transpose(1, 2))
        gradients = [tensor.new_empty(tensor.shape) for tensor in (query, key, value)]
        batch, heads, length, width = query.shape
        delta = query.new_empty((batch, heads, length), dtype=torch.float32)
        workspace = query.new_empty(
            attention_workspace(batch * heads, length, width), dtype=torch.uint8
        )
        needs_bias = bias is not None and ctx.needs_input_grad[3]
        of_bias = bias.new_empty(bias.shape) if needs_bias else None
        del workspace, delta, copied
        return (*gradients, of_bias)


def _run_cell(
    func: Callable[..., Any],
    values: torch.Tensor,
    state: Any,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> Any:
    """Two products, and one kernel for all gates."""
    hidden = state[0] if isinstance(state, tuple | list) else state
    of_values = functional.linear(values, w_ih)
    of_state = functional.linear(hidden, w_hh)
    biases = [bias for bias in (b_ih, b_hh) if bias is not None]
    # What the kernel reads besides: the cell of an LSTM, the hidden state of a GRU.
    previous = state[1:] if isinstance(state, tuple | list) else (state,)
    apply: Any = _Cell.apply
    outputs = apply(func, of_values, of_state, *previous, *biases)
    return outputs[0] if func is torch.gru_cell else outputs


class _Cell(torch.autograd.Function):
    """The kernel of all gates of a cell."""

    @staticmethod
    def forward(
        ctx: Any,
        func: Callable[..., Any],
        of_values: torch.Tensor,
        of_state: torch.Tensor,
        state: torch.Tensor,
        *biases: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Make the next state and what is kept."""
        gates, kept_gates = _CELLS[func]
        width = of_values.shape[-1] // gates
        rows = of_values.shape[:-1]
        outputs = [of_values.new_empty((*rows, width))]
        if func is torch.lstm_cell:
            outputs.append(of_values.new_empty((*rows, width)))
        workspace = of_values.new_empty((*rows, kept_gates * width))
        ctx.func = func
        ctx.save_for_backward(of_values, of_state, state, *biases, workspace)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> tuple[Any, ...]:
        """Make the gradients of both products, of the state and of the biases."""
        of_values, of_state, state, *biases, _workspace = ctx.saved_tensors
        gradients = [of_values.new_empty(of_values.shape)]
        if ctx.func is torch.gru_cell:
            # Its gates read the two products apart; those of an LSTM read their sum.
            gradients.append(of_state.new_empty(of_state.shape))
        of_previous = state.new_empty(state.shape)
        width = of_values.shape[-1]
        sums = [gradient.reshape(-1, width).sum(0) for gradient in gradients]
        of_biases = [sums[number % len(sums)] for number in range(len(biases))]
        return (None, gradients[0], gradients[-1], of_previous, *of_biases)
