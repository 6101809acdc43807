"""Padded batches of dicts whose fields have lengths of their own, without workers.

Run it with ``python -m benchmarks.ragged [--scale 0.1] [--save]``.  A cache takes
turns, run by run, with a list in memory whose samples ``pad_sequence`` pads.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import loaderkit
from benchmarks.harness import duels, report, scale_and_save

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES = 2_000
BATCH = 32
PAIRS = 40

FIELDS: dict[str, Callable[[], torch.Tensor]] = {
    "tokens": lambda: torch.randint(30_000, (_length(5, 100),)),
    "features": lambda: torch.randn(_length(20, 200), 80),
    "sound": lambda: torch.randn(_length(4_000, 16_000)),
    "short features": lambda: torch.randn(_length(5, 30), 80),
    "short sound": lambda: torch.randn(_length(200, 1_000)),
}
CASES = (
    ("tokens",),
    ("features",),
    ("sound",),
    ("tokens", "features", "sound"),
    ("tokens", "short features", "short sound"),
)


def main() -> None:
    options = scale_and_save(__doc__)
    # With two, torch's threads wait for each other on a busy machine: the list takes
    # up to six times as long.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for fields in CASES:
        samples: Any = [_sample(fields, row) for row in range(SAMPLES)]
        with tempfile.TemporaryDirectory() as folder:
            cache = loaderkit.pack(samples, Path(folder, "cache.lk"))
            ours = loaderkit.build_loader(
                cache, batch_size=BATCH, shuffle=True, num_workers=0
            )
            theirs: DataLoader[Any] = DataLoader(
                samples, batch_size=BATCH, shuffle=True, collate_fn=_pad
            )
            name = ", ".join(fields)
            entrants = {name: _epoch(ours), "list": _epoch(theirs)}
            rows += duels(entrants, rounds=max(4, round(PAIRS * options.scale)))
    report("ragged dicts, 0 workers", rows, save="ragged" if options.save else None)


def _length(low: int, high: int) -> int:
    return int(torch.randint(low, high, ()))


def _sample(fields: tuple[str, ...], row: int) -> dict[str, Any]:
    return {**{name: FIELDS[name]() for name in fields}, "label": row % 10}


def _pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = {"label": torch.tensor([sample["label"] for sample in samples])}
    for name in samples[0].keys() - {"label"}:
        values = [sample[name] for sample in samples]
        batch[name] = pad_sequence(values, batch_first=True)
        batch[f"{name} lengths"] = torch.tensor([len(value) for value in values])
    return batch


def _epoch(loader: Any) -> Callable[[], int]:
    return lambda: sum(len(batch["label"]) for batch in loader)


if __name__ == "__main__":
    main()
