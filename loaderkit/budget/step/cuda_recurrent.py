"""Recurrent layers and their cells, as cuDNN and torch's own kernels run them on CUDA.

All layers are one call of cuDNN with a workspace, and a reserve that is kept for the
backward pass.  A cell is two products, and one kernel for all gates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from loaderkit.budget.step.allocation_log import UncertainBytes
from loaderkit.budget.step.cuda_kernels import copy_if_strided

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loaderkit.budget.step.call_arguments import Args
    from loaderkit.budget.step.storage_ledger import StorageLedger

_KEPT_OUTPUTS = {torch.lstm: 5, torch.gru: 6, torch.rnn_tanh: 1, torch.rnn_relu: 1}
"""Recurrent layers; how many times its output each of their layers keeps for the
backward pass, both directions apart (measured: equal to the byte in 7 steps)."""
_RESERVE_BYTES = 256
"""What is kept in any case (measured)."""

_WORKSPACE_OF_LAYER = 8 << 20
"""Of each layer and direction, forward and backward (measured)."""
_WORKSPACE_OUTPUTS = UncertainBytes(low=2, likely=20, high=26)
"""And so many times the output of one layer, by the algorithm that cuDNN chooses: 18 to
25 were measured in small layers, 5 to 7 in layers of 512 numbers."""
_WIDE = 256
"""Numbers of a state from which on a layer counts as wide; chosen between the two."""
_WORKSPACE_OUTPUTS_OF_WIDE = UncertainBytes(low=2, likely=7, high=26)
_ASSUMPTION = "the workspace of cuDNN's algorithm"


class _CellSizes(NamedTuple):
    """Numbers for each number of the state."""

    gates: int
    """Of each of the two products."""
    kept: int
    """What the kernel keeps for the backward pass (measured)."""


_CELLS: dict[Any, _CellSizes] = {
    torch.gru_cell: _CellSizes(gates=3, kept=5),
    torch.lstm_cell: _CellSizes(gates=4, kept=4),
}


def is_recurrent_layer(func: object) -> bool:
    """Tell whether a function of torch runs recurrent layers."""
    return func in _KEPT_OUTPUTS


def is_recurrent_cell(func: object) -> bool:
    """Tell whether a function of torch runs a cell of several gates for one step."""
    return func in _CELLS


def run_recurrent_layers(
    func: Callable[..., Any], args: Args, ledger: StorageLedger
) -> tuple[Any, ...] | None:
    """Run recurrent layers as cuDNN does.

    Args:
        func: One for which ``is_recurrent_layer`` is true.
        args: As it was called.
        ledger: It logs how much the workspace may differ.

    Returns:
        The output and the last states; None where torch would not ask cuDNN.
    """
    layers = _RecurrentLayers.of_call(func, args)
    return None if layers is None else _run_layers(layers, ledger)


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
    def workspace_bytes(self) -> UncertainBytes:
        """What the kernels take while they run, forward and backward."""
        fixed = _WORKSPACE_OF_LAYER * self.layers * self.directions
        is_wide = self.width >= _WIDE
        outputs = _WORKSPACE_OUTPUTS_OF_WIDE if is_wide else _WORKSPACE_OUTPUTS
        output_bytes = self.output_numbers * self.directions * self.values.itemsize
        weights = sum(weight.numel() * weight.itemsize for weight in self.weights)
        low, likely, high = (times * output_bytes for times in outputs)
        return UncertainBytes(
            fixed // 2 + low, fixed + likely, 2 * fixed + high + 2 * weights
        )


def _run_layers(layers: _RecurrentLayers, ledger: StorageLedger) -> tuple[Any, ...]:
    ledger.log.assumptions[_ASSUMPTION, "recurrent layers"] += 1
    apply: Any = _Recurrent.apply
    outputs = apply(layers, ledger, layers.values, *layers.states, *layers.weights)
    return tuple(outputs)


class _Recurrent(torch.autograd.Function):
    """All layers as one operator."""

    @staticmethod
    def forward(
        ctx: Any,
        layers: _RecurrentLayers,
        ledger: StorageLedger,
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
        workspace = _make_workspace(layers, ledger, values)
        del workspace, copied
        ctx.layers, ctx.ledger = layers._replace(values=values.detach()), ledger
        ctx.save_for_backward(values, *states_and_weights, output, reserve)
        return (output, *states)

    @staticmethod
    @once_differentiable  # nor is the kernel's
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Make the gradients; those of the weights lie in one block."""
        layers: _RecurrentLayers = ctx.layers
        values = ctx.saved_tensors[0]
        copies = [_copy_if_transposed(layers, values), copy_if_strided(gradients[0])]
        of_values = values.new_empty(values.shape)
        of_states = [state.new_empty(state.shape) for state in layers.states]
        workspace = _make_workspace(layers, ctx.ledger, values)
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


def _make_workspace(
    layers: _RecurrentLayers, ledger: StorageLedger, like: torch.Tensor
) -> torch.Tensor:
    """Make the workspace, and note how much less or more it may be."""
    low, likely, high = layers.workspace_bytes
    workspace = like.new_empty(likely, dtype=torch.uint8)
    ledger.note_uncertain(workspace, UncertainBytes(low - likely, 0, high - likely))
    return workspace


def run_recurrent_cell(
    func: Callable[..., Any],
    values: torch.Tensor,
    state: Any,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> Any:
    """Run a cell as two products, and one kernel for all gates."""
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
        sizes = _CELLS[func]
        width = of_values.shape[-1] // sizes.gates
        rows = of_values.shape[:-1]
        outputs = [of_values.new_empty((*rows, width))]
        if func is torch.lstm_cell:
            outputs.append(of_values.new_empty((*rows, width)))
        workspace = of_values.new_empty((*rows, sizes.kept * width))
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
