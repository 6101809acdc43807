"""Attention as CUDA computes it: by a fused kernel, also with a mask or dropout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from loaderkit.budget.step.allocation_log import UncertainBytes
from loaderkit.budget.step.cuda_autocast import NARROW_FLOATS, cast_to_autocast
from loaderkit.budget.step.cuda_kernels import (
    attention_workspace,
    copy_if_strided,
    flash_attention_workspace,
)

if TYPE_CHECKING:
    from loaderkit.budget.step.storage_ledger import StorageLedger

_ALIGNED_BYTES = 16
"""The numbers of a head take a multiple of it where the kernel for masks and float32
reads them."""
_ROWS_OF_SUMS = 32
"""Queries are padded to a multiple of it where the sums of the softmax are kept
(``kAlignLSE`` of torch's ``kernel_forward.h``)."""
_FLASH_NUMBERS = 8
"""The numbers of a head are filled up to a multiple of it for flash attention."""
_ALIGNED_NUMBERS = 16
"""A mask whose rows are no multiple of it is copied, with longer rows (measured on an
H100)."""


def run_attention(
    ledger: StorageLedger,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 -- torch's
    **named: Any,
) -> Any:
    """Attend by a fused kernel where CUDA has one, also with a mask or dropout.

    Args:
        ledger: It logs what is made.
        query: ``[B, heads, L, width]``; of another shape torch does as on the CPU.
        key: ``[B, heads that may be fewer, S, width]``.
        value: The same, of a width of its own.
        attn_mask: As for torch's ``scaled_dot_product_attention``.
        dropout_p: The same.
        is_causal: The same.
        named: Its other arguments.

    Returns:
        ``[B, heads, L, width of value]``.
    """
    attend = functional.scaled_dot_product_attention
    query, key, value = map(cast_to_autocast, (query, key, value))
    if attn_mask is not None:
        attn_mask = cast_to_autocast(attn_mask)
    named = {"dropout_p": dropout_p, "is_causal": is_causal, **named}
    has_backward = torch.is_grad_enabled() and query.requires_grad
    is_usual = query.dim() == 4 and query.is_floating_point() and query.numel()
    if not is_usual or not has_backward:
        return attend(query, key, value, attn_mask, **named)
    shares_keys = query.shape[1] != key.shape[1]
    if not _has_fused_kernel(query, attn_mask, shares_keys=shares_keys):
        return _attend_plainly(query, key, value, attn_mask, **named)
    if shares_keys and attn_mask is None:
        return attend(query, key, value, attn_mask, **named)
    bias = None
    if attn_mask is not None:
        bias = _align_rows(attn_mask, query).expand(*query.shape[:3], key.shape[2])
    width = value.shape[-1]
    if _is_flash(query, bias):
        query, key, value = map(_fill_heads_up, (query, key, value))
    apply: Any = _Attention.apply
    output = apply(ledger, query, key, value, bias)[..., :width]
    ledger.log.assumptions["a fused kernel of attention, as on cuda", "attention"] += 1
    if bias is not None and (bias.requires_grad or shares_keys):
        # torch may take the plain formula instead: a Swin's windows were attended by
        # the fused kernel, T5 was not; an H100 has a kernel of cuDNN for heads that
        # share keys, other GPUs may not.  That keeps weights, dropped ones and a mask.
        weight_bytes = bias.numel() * bias.itemsize
        ledger.note_uncertain(output, UncertainBytes(0, 0, 3 * weight_bytes))
    return output


def _has_fused_kernel(
    query: torch.Tensor, mask: torch.Tensor | None, *, shares_keys: bool
) -> bool:
    """Tell whether CUDA attends without making the weights, as torch chooses.

    Flash attention takes narrow floats without a mask.  The memory-efficient kernel
    takes float32 and masks where rows are aligned, and no heads that share keys; with
    narrow floats cuDNN takes those (on an H100: 12.5 MiB in place of 28.6).
    """
    if _is_flash(query, mask):
        return True
    is_aligned = query.shape[-1] * query.itemsize % _ALIGNED_BYTES == 0
    if query.dtype is torch.float64 or not is_aligned:
        return False
    return query.dtype in NARROW_FLOATS or not shares_keys


def _is_flash(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Tell which fused kernel attends: flash attention, or the memory-efficient one."""
    return query.dtype in NARROW_FLOATS and mask is None


def _attend_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **named: Any,
) -> Any:
    """Make all the weights, and keep them for the backward pass."""
    # Queries and keys have the type of autocast already, as they have on CUDA.
    with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", enabled=False):
        if named["dropout_p"] > 0:
            return _attend_and_drop(query, key, value, mask, **named)
        return functional.scaled_dot_product_attention(query, key, value, mask, **named)


def _attend_and_drop(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend by torch's plain formula, one operator after the other.

    As a whole it would be taken apart for the CPU, where dropout keeps floats in place
    of bytes.
    """
    dtype, length, keys = query.dtype, query.shape[-2], key.shape[-2]
    if dtype in NARROW_FLOATS:
        query, key, value = query.float(), key.float(), value.float()
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(times, dim=-3)
        value = value.repeat_interleave(times, dim=-3)
    if is_causal:
        mask = query.new_ones((length, keys), dtype=torch.bool).tril()
    if mask is not None and mask.dtype is torch.bool:
        added = torch.zeros_like(mask, dtype=query.dtype)
        mask = added.masked_fill_(mask.logical_not(), -math.inf)
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    # The operator of torch's formula, which gives rows without any key zeros.
    weights = torch.ops.aten._safe_softmax(scores, -1)  # noqa: SLF001
    del scores
    dropped = torch.native_dropout(weights, dropout_p, train=True)[0]
    output = (dropped @ value).to(dtype)
    dropped.to(dtype)  # the formula's second output, which nobody takes
    return output


def _fill_heads_up(tensor: torch.Tensor) -> torch.Tensor:
    """Give each head zeros up to what flash attention reads at once."""
    missing = -tensor.shape[-1] % _FLASH_NUMBERS
    return functional.pad(tensor, (0, missing)) if missing else tensor


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
        ledger: StorageLedger,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Make the output and the sums."""
        ctx.ledger = ledger
        batch, heads, length, _ = query.shape
        if _is_flash(query, bias):
            output = torch.empty_like(query)  # in its order, whatever that is
        else:
            output = query.new_empty((batch, length, heads, value.shape[-1]))
            output = output.transpose(1, 2)
        rows = -(-length // _ROWS_OF_SUMS) * _ROWS_OF_SUMS
        sums = query.new_empty((batch, heads, rows), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, bias, output, sums)
        return output

    @staticmethod
    @once_differentiable  # nor is the kernel's
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Make the gradients; those of the queries are added up in blocks."""
        query, key, value, bias, output, _sums = ctx.saved_tensors
        by_query = gradient.transpose(1, 2)
        copied = [copy_if_strided(by_query)]
        gradients = [tensor.new_empty(tensor.shape) for tensor in (query, key, value)]
        batch, heads, length, width = query.shape
        groups = batch * heads
        if _is_flash(query, bias):
            copied.append(copy_if_strided(output.transpose(1, 2)))
            nbytes = flash_attention_workspace(groups, length, width)
        else:
            sums_bytes = groups * length * torch.float32.itemsize
            nbytes = attention_workspace(groups, length, width) + sums_bytes
        workspace = query.new_empty(nbytes, dtype=torch.uint8)
        if query.dtype in NARROW_FLOATS:
            # cuDNN may attend in place of torch's kernels, with less or nothing beside
            # its outputs (an H100, sequences of 12: nothing).
            ctx.ledger.note_uncertain(workspace, UncertainBytes(-nbytes, 0, 0))
        needs_bias = bias is not None and ctx.needs_input_grad[4]
        of_bias = bias.new_empty(bias.shape) if needs_bias else None
        del workspace, copied
        return (None, *gradients, of_bias)
