"""Ragged samples, in the three ways a batch can hold them."""

import tempfile

import torch

import loaderkit

clips = [{"text": torch.ones(n, 4), "label": n % 2} for n in (2, 5, 3, 4)]

with tempfile.TemporaryDirectory() as folder:
    path = f"{folder}/clips.lk"
    loaderkit.pack(clips, path)
    for ragged in ("padded", "packed", "jagged"):
        batch = loaderkit.open_cache(path, ragged=ragged).batch([0, 1, 3])
        text = batch["text"]
        shape = text.shape if ragged == "jagged" else text.values.shape
        print(f"{ragged}: {type(text).__name__} of {list(shape)}, {batch['label']}")
