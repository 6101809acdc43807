"""Training steps of the attention of ``torch.nn``, drawn by a number.

Encoders, encoders with decoders and single attentions; masks for padding and for what
comes later, dropout, weights that are asked for, widths that no kernel is made for, and
mixed precision.
"""

import random
from typing import NamedTuple

import torch
from torch import nn

from loaderkit.budget.step.train_step import Step


class DrawnAttention(NamedTuple):
    """A step, and what it is in words."""

    words: str
    model: nn.Module
    batch: torch.Tensor
    """``[samples, length, features]``."""
    step: Step


class Encoder(nn.Module):
    """Layers that look at all of a sequence, or at what came before."""

    def __init__(self, layer, count, *, padded, causal):
        super().__init__()
        self.layers = nn.TransformerEncoder(layer, count, enable_nested_tensor=False)
        self.padded, self.causal = padded, causal

    def forward(self, x):
        samples, length, _ = x.shape
        padding = causal = None
        if self.padded:
            positions = torch.arange(length, device=x.device)
            lengths = torch.arange(samples, device=x.device) + length - 9
            padding = positions[None] > lengths[:, None]
        if self.causal:
            causal = nn.Transformer.generate_square_subsequent_mask(
                length, device=x.device
            )
        hidden = self.layers(
            x, mask=causal, src_key_padding_mask=padding, is_causal=self.causal
        )
        return hidden.square().mean()


class Translator(nn.Module):
    """An encoder and a decoder, which looks at what the encoder made."""

    def __init__(self, features, heads, dropout, *, padded):
        super().__init__()
        self.inner = nn.Transformer(
            features, heads, 2, 2, 2 * features, dropout, batch_first=True
        )
        self.padded = padded

    def forward(self, x):
        target = x[:, : x.shape[1] // 2]
        padding = None
        if self.padded:
            padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        causal = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1], device=x.device
        )
        hidden = self.inner(
            x,
            target,
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return hidden.square().mean()


class Single(nn.Module):
    """One attention behind a layer norm; of half of the sequence to all of it."""

    def __init__(self, features, heads, dropout, *, padded, weights, cross):
        super().__init__()
        self.inner = nn.MultiheadAttention(features, heads, dropout, batch_first=True)
        self.norm = nn.LayerNorm(features)
        self.padded, self.weights, self.cross = padded, weights, cross

    def forward(self, x):
        padding = None
        if self.padded:
            padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        query = self.norm(x[:, : x.shape[1] // 2] if self.cross else x)
        key = self.norm(x) if self.cross else query
        output, weights = self.inner(
            query, key, key, key_padding_mask=padding, need_weights=self.weights
        )
        loss = output.square().mean()
        return loss if weights is None else loss + weights.mean()


def draw_attention(seed):
    """Draw a step; the same seed always gives the same."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    heads = rng.choice([1, 2, 4, 8])
    features = heads * rng.choice([16, 32, 64, 96, 10])
    samples, length = rng.choice([32, 64]), rng.choice([64, 100, 256, 300])
    dropout = rng.choice([0.0, 0.1, 0.1, 0.3])
    kind = rng.choice(["encoder", "encoder", "translator", "single", "single"])
    padded = rng.random() < 0.6
    if kind == "encoder":
        causal, count = rng.random() < 0.3, rng.choice([1, 3])
        layer = nn.TransformerEncoderLayer(
            features,
            heads,
            4 * features,
            dropout,
            batch_first=True,
            norm_first=rng.random() < 0.5,
        )
        model = Encoder(layer, count, padded=padded, causal=causal)
        kind = f"{count} layers" + (", causal" if causal else "")
    elif kind == "translator":
        model = Translator(features, heads, dropout, padded=padded)
    else:
        weights, cross = rng.random() < 0.6, rng.random() < 0.4
        model = Single(
            features, heads, dropout, padded=padded, weights=weights, cross=cross
        )
        kind += (", with weights" if weights else "") + (", crossed" if cross else "")
    autocast = rng.choice([None, None, torch.bfloat16])
    words = (
        f"{kind}, {heads} heads of {features // heads}, {samples} x {length}, dropout "
        f"{dropout}{', padded' if padded else ''}{', bfloat16' if autocast else ''}"
    )
    batch = torch.randn(samples, length, features)
    return DrawnAttention(words, model, batch, Step(autocast=autocast))
