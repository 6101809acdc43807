"""Padded batches of dicts whose fields have lengths of their own, without workers.

Run it with ``python -m benchmarks.ragged [--scale 0.1] [--save]``.  A cache takes
turns, run by run and in CPU time, with a list in memory whose samples ``pad_sequence``
pads: with their lengths, and with the mask too, which each batch from a cache has.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import loaderkit
from benchmarks.harness import compare_in_pairs, parse_scale_and_save, report
from benchmarks.workloads import epoch_reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.harness import Row

SAMPLES = 2_000
BATCH = 32
PAIRS = 40

FIELDS: dict[str, Callable[[], torch.Tensor]] = {
    "tokens": lambda: torch.randint(30_000, (_draw_length(5, 100),)),
    "features": lambda: torch.randn(_draw_length(20, 200), 80),
    "sound": lambda: torch.randn(_draw_length(4_000, 16_000)),
    "short features": lambda: torch.randn(_draw_length(5, 30), 80),
    "short sound": lambda: torch.randn(_draw_length(200, 1_000)),
}
CASES = (
    ("tokens",),
    ("features",),
    ("sound",),
    ("tokens", "features", "sound"),
    ("tokens", "short features", "short sound"),
)


def main() -> None:
    options = parse_scale_and_save(__doc__)
    # With two, torch's threads wait for each other on a busy machine: the list takes
    # up to six times as long.
    torch.set_num_threads(1)
    torch.manual_seed(0)

    rounds = max(4, round(PAIRS * options.scale))
    rows: list[Row] = []
    for fields in CASES:
        rows += _compare_with_list(fields, rounds)
    title = "ragged dicts, 0 workers, CPU time"
    report(title, rows, save="ragged" if options.save else None)


def _compare_with_list(fields: tuple[str, ...], rounds: int) -> list[Row]:
    samples: Any = [_make_sample(fields, number) for number in range(SAMPLES)]
    with tempfile.TemporaryDirectory() as folder:
        cache = loaderkit.pack(samples, Path(folder, "cache.lk"))
        from_cache = loaderkit.build_loader(
            cache, batch_size=BATCH, shuffle=True, num_workers=0
        )
        contestants = {", ".join(fields): epoch_reader(from_cache)}
        for name, pad in (("list", _pad), ("list with masks", _pad_and_mask)):
            from_list: DataLoader[Any] = DataLoader(
                samples, batch_size=BATCH, shuffle=True, collate_fn=pad
            )
            contestants[name] = epoch_reader(from_list)
        return compare_in_pairs(contestants, rounds=rounds, clock=time.process_time)


def _draw_length(low: int, high: int) -> int:
    return int(torch.randint(low, high, ()))


def _make_sample(fields: tuple[str, ...], number: int) -> dict[str, Any]:
    sample: dict[str, Any] = {name: FIELDS[name]() for name in fields}
    sample["label"] = number % 10
    return sample


def _pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Join samples as people do, with the lengths that a model makes its mask of."""
    batch = {"label": torch.tensor([sample["label"] for sample in samples])}
    for name in samples[0].keys() - {"label"}:
        values = [sample[name] for sample in samples]
        batch[name] = pad_sequence(values, batch_first=True)
        batch[f"{name} lengths"] = torch.tensor([len(value) for value in values])
    return batch


def _pad_and_mask(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Join samples with all that a batch from a cache has."""
    batch = _pad(samples)
    for name in samples[0].keys() - {"label"}:
        ends = batch[f"{name} lengths"][:, None]
        batch[f"{name} mask"] = torch.arange(batch[name].shape[1]) < ends
    return batch


if __name__ == "__main__":
    main()
