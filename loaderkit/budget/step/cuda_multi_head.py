"""``torch.nn.MultiheadAttention`` of the operators that a CUDA GPU would run.

``torch.nn.functional.multi_head_attention_forward`` hides what it calls from a mode for
functions of torch, and so its attention and its dropout would be those of the CPU: with
dropout and a mask for padding, as ``TransformerEncoderLayer`` trains by default, twice
the memory of a layer.  The calls that people make are made here of the same parts, one
by one; what is left out (trained or zero keys that are appended, keys from elsewhere)
stays with torch's function.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from loaderkit.budget.step.call_arguments import Args, Kwargs

_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)
_LEFT_TO_TORCH = ("bias_k", "bias_v", "static_k", "static_v", "add_zero_attn")


class _HeadSizes(NamedTuple):
    """Of queries that were projected."""

    length: int
    batch: int
    heads: int
    width: int
    """Of one head."""


def run_multi_head_attention(args: Args, kwargs: Kwargs) -> Any:
    """Attend as ``multi_head_attention_forward``, through functions a mode can see.

    Args:
        args: Of that function, by position.
        kwargs: By name.

    Returns:
        Its output and its weights, of its shapes; None for a call that torch's own
        function is to make: of a kind that is not here, or one that it refuses.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if not _is_made_here(given):
        return None
    query, key, value = given["query"], given["key"], given["value"]
    padding, mask = given["key_padding_mask"], given["attn_mask"]
    is_batched = query.dim() == 3  # [length, batch, features], else without the batch
    if not is_batched:
        # One tensor that is asked of itself stays one: its projection is one product.
        batched = {id(tensor): tensor.unsqueeze(1) for tensor in (query, key, value)}
        query, key, value = (batched[id(tensor)] for tensor in (query, key, value))
        padding = None if padding is None else padding.unsqueeze(0)

    padding = _added_to_weights(padding, query)
    is_causal = given["is_causal"] and padding is None
    if is_causal and not given["need_weights"]:
        mask = None  # the kernel is told that it is causal, and reads none
    mask = _added_to_weights(mask, query)
    queries, keys, values = _project(query, key, value, given)
    heads = given["num_heads"]
    length, batch, features = queries.shape
    sizes = _HeadSizes(length, batch, heads, features // heads)
    mask = _merge_masks(mask, padding, sizes)
    dropout_p = given["dropout_p"] if given["training"] else 0.0

    by_head = [_by_head(tensor, sizes) for tensor in (queries, keys, values)]
    del queries, keys, values
    weights = None
    if given["need_weights"]:
        output, weights = _attend_and_keep_weights(by_head, mask, dropout_p)
        output = output.transpose(0, 1)
    else:
        output = _attend(by_head, mask, sizes, dropout_p, is_causal=is_causal)
    output = output.reshape(length * batch, features)
    del by_head
    output = functional.linear(output, given["out_proj_weight"], given["out_proj_bias"])
    output = output.view(length, batch, -1)

    if weights is not None:
        weights = weights.view(batch, heads, length, -1)
        if given["average_attn_weights"]:
            weights = weights.mean(dim=1)
    if not is_batched:
        output = output.squeeze(1)
        weights = None if weights is None else weights.squeeze(0)
    return output, weights


def _is_made_here(given: dict[str, Any]) -> bool:
    """Tell whether a call is a usual one; torch raises where shapes do not go together.

    What torch refuses must be refused by it, in its words.
    """
    query, key, value = given["query"], given["key"], given["value"]
    tensors = (query, key, value)
    if any(
        given[name] is not None and given[name] is not False for name in _LEFT_TO_TORCH
    ):
        return False
    if query.dim() not in {2, 3} or {key.dim(), value.dim()} != {query.dim()}:
        return False
    if any(tensor.is_nested for tensor in tensors):
        return False
    # Nothing is computed, and torch refuses some of these for want of a size.
    if any(tensor.numel() == 0 for tensor in tensors):
        return False
    features, heads = query.shape[-1], given["num_heads"]
    if features != given["embed_dim_to_check"] or features % heads:
        return False
    if key.shape[:-1] != value.shape[:-1]:
        return False
    if not given["use_separate_proj_weight"] and key.shape != value.shape:
        return False
    batch = query.shape[1:-1]
    if key.shape[1:-1] != batch:
        return False
    padding, mask = given["key_padding_mask"], given["attn_mask"]
    if given["is_causal"] and mask is None:
        return False
    if not (_is_mask_or_none(padding) and _is_mask_or_none(mask)):
        return False
    length, keys = query.shape[0], key.shape[0]
    if padding is not None and tuple(padding.shape) != (*batch, keys):
        return False
    count = batch[0] if batch else 1
    shapes = {(length, keys), (count * heads, length, keys)}
    return mask is None or tuple(mask.shape) in shapes


def _is_mask_or_none(mask: torch.Tensor | None) -> bool:
    return mask is None or mask.dtype is torch.bool or mask.is_floating_point()


def _added_to_weights(
    mask: torch.Tensor | None, query: torch.Tensor
) -> torch.Tensor | None:
    """Make floats of a mask, minus infinity where it is true."""
    if mask is None or mask.is_floating_point():
        return mask
    added = torch.zeros_like(mask, dtype=query.dtype)
    return added.masked_fill_(mask, -math.inf)


def _project(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]
) -> list[torch.Tensor]:
    """Make queries, keys and values; ``[length, batch, features]`` each.

    Where one tensor is all of them, or is keys and values, one product makes them, and
    a copy lays them one behind the other.
    """
    weight, bias = given["in_proj_weight"], given["in_proj_bias"]
    biases = [None] * 3 if bias is None else list(bias.chunk(3))
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    elif query is key and key is value:
        return _project_at_once(query, weight, bias, 3)
    elif key is value:
        features = query.shape[-1]
        of_query, of_both = weight.split([features, 2 * features])
        bias_of_query = bias_of_both = None
        if bias is not None:
            bias_of_query, bias_of_both = bias.split([features, 2 * features])
        queries = functional.linear(query, of_query, bias_of_query)
        return [queries, *_project_at_once(key, of_both, bias_of_both, 2)]
    else:
        weights = list(weight.chunk(3))
    return [
        functional.linear(tensor, own_weight, own_bias)
        for tensor, own_weight, own_bias in zip(
            (query, key, value), weights, biases, strict=True
        )
    ]


def _project_at_once(
    tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, count: int
) -> list[torch.Tensor]:
    projected = functional.linear(tensor, weight, bias)
    length, batch, _ = projected.shape
    parts = projected.view(length, batch, count, -1).permute(2, 0, 1, 3)
    return list(parts.contiguous())


def _merge_masks(
    mask: torch.Tensor | None, padding: torch.Tensor | None, sizes: _HeadSizes
) -> torch.Tensor | None:
    """Add the mask for padding, a copy for each head; ``[_, length, keys]``."""
    if mask is not None and mask.dim() == 2:
        mask = mask[None]
    if padding is None:
        return mask
    of_heads = padding.view(sizes.batch, 1, 1, -1).expand(-1, sizes.heads, -1, -1)
    of_heads = of_heads.reshape(sizes.batch * sizes.heads, 1, -1)
    return of_heads if mask is None else mask + of_heads


def _by_head(tensor: torch.Tensor, sizes: _HeadSizes) -> torch.Tensor:
    """View ``[length, batch, features]`` as ``[batch * heads, length, width]``."""
    shape = (tensor.shape[0], sizes.batch * sizes.heads, sizes.width)
    return tensor.view(shape).transpose(0, 1)


def _attend_and_keep_weights(
    by_head: list[torch.Tensor], mask: torch.Tensor | None, dropout_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    queries, keys, values = by_head
    scaled = queries * math.sqrt(1.0 / queries.shape[-1])
    if mask is None:
        weights = torch.bmm(scaled, keys.transpose(-2, -1))
    else:
        weights = torch.baddbmm(mask, scaled, keys.transpose(-2, -1))
    weights = functional.softmax(weights, dim=-1)
    if dropout_p > 0:
        weights = functional.dropout(weights, dropout_p)
    return torch.bmm(weights, values), weights


def _attend(
    by_head: list[torch.Tensor],
    mask: torch.Tensor | None,
    sizes: _HeadSizes,
    dropout_p: float,
    *,
    is_causal: bool,
) -> torch.Tensor:
    """Attend by the kernel that is chosen; ``[length, batch, heads, width]``."""
    batch, heads = sizes.batch, sizes.heads
    queries, keys, values = (
        tensor.view(batch, heads, -1, sizes.width) for tensor in by_head
    )
    if mask is not None:
        is_shared = mask.shape[0] == 1
        mask = mask[None] if is_shared else mask.view(batch, heads, -1, keys.shape[2])
    output = functional.scaled_dot_product_attention(
        queries, keys, values, mask, dropout_p=dropout_p, is_causal=is_causal
    )
    return output.permute(2, 0, 1, 3)
