"""Columns that are one array in memory: joined as torch joins the samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import loaderkit
from loaderkit.datasets.gathering import BatchGather
from loaderkit.datasets.owned_copy import shares_memory
from loaderkit.datasets.plain_columns import PlainColumn
from loaderkit.datasets.ragged import Padded

if TYPE_CHECKING:
    from pathlib import Path

COUNT = 12
BATCHES = ([0], [5, 3, 3, 7], [5, 4, 9, 2, 10, 0, 5, 8], list(range(COUNT)))
"""One sample; repeats; of several shards in any order; all."""
DTYPES = (torch.int64, torch.int16, torch.bool, torch.float32, torch.complex64)
ROW_SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (2, 2))
LENGTHS = (4, 0, 7, 7, *range(1, COUNT - 3))
"""A sample without rows, and two of one length."""


@pytest.fixture(params=[1 << 30, 1 << 11], ids=["one shard", "several shards"])
def cache(tmp_path: Path, request: pytest.FixtureRequest) -> Cache:
    """A cache with a stacked and a ragged field of each dtype and row shape."""
    samples = []
    for number, length in enumerate(LENGTHS):
        sample = {}
        for dtype in DTYPES:
            for row_shape in ROW_SHAPES:
                name = f"{dtype}_{len(row_shape)}".removeprefix("torch.")
                sample[f"ragged_{name}"] = _tensor(number, length, row_shape, dtype)
                sample[f"stacked_{name}"] = _tensor(number, 2, row_shape, dtype)
        samples.append(sample)
    dataset = loaderkit.pack(
        samples, tmp_path / "cache.lk", workers=0, shard_bytes=request.param
    )
    return Cache(samples, dataset)


class Cache(NamedTuple):
    samples: list[dict[str, torch.Tensor]]
    dataset: Any


def _tensor(number: int, length: int, row_shape: tuple[int, ...], dtype: Any) -> Any:
    generator = torch.Generator().manual_seed(number)
    numbers = torch.randint(-9, 300, (length, *row_shape), generator=generator)
    return numbers.to(dtype)


def _plain_column(dataset: Any, name: str, *, stacked: bool) -> PlainColumn | None:
    opened = dataset._open_cache()
    spec = opened.structure.columns[name]
    if stacked:
        spec = spec._replace(axis=None)
    return PlainColumn.of(opened.store, spec)


def _gather(dataset: Any, rows: list[int]) -> BatchGather:
    return BatchGather(dataset._open_cache().store, np.array(rows))


def test_fields_are_padded_and_stacked_as_by_torch(cache: Cache) -> None:
    for rows in BATCHES:
        batch = cache.dataset.batch(rows)

        for name, joined in batch.items():
            chosen = [cache.samples[row][name] for row in rows]
            if isinstance(joined, Padded):
                lengths = [LENGTHS[row] for row in rows]
                assert torch.equal(
                    joined.values, pad_sequence(chosen, batch_first=True)
                )
                assert joined.values.dtype is chosen[0].dtype
                assert joined.lengths.tolist() == lengths
                assert joined.mask.sum(dim=1).tolist() == lengths
            else:
                assert name.startswith("stacked")
                assert torch.equal(joined, torch.stack(chosen))
                assert joined.dtype is chosen[0].dtype


@pytest.mark.parametrize("shard_bytes", [1 << 30, 1 << 16], ids=["one shard", "four"])
def test_plain_columns_join_what_lies_in_one_array(
    tmp_path: Path, shard_bytes: int
) -> None:
    samples = [
        {"ragged": torch.randn(2_000 + number, 3), "stacked": torch.randn(1_000)}
        for number in range(COUNT)
    ]
    dataset = loaderkit.pack(
        samples, tmp_path / "cache.lk", workers=0, shard_bytes=shard_bytes
    )
    ragged = _plain_column(dataset, "ragged", stacked=False)
    stacked = _plain_column(dataset, "stacked", stacked=True)
    assert ragged is not None
    assert stacked is not None

    # Of four files and not the last, whose end may be too short to be mapped.
    rows = [5, 0, 3, 3, 7, 1]
    padded = ragged.join(_gather(dataset, rows))
    joined = stacked.join(_gather(dataset, rows))

    assert isinstance(padded, Padded)
    assert isinstance(joined, torch.Tensor)
    chosen = [samples[row] for row in rows]
    ragged_samples = [sample["ragged"] for sample in chosen]
    assert torch.equal(padded.values, pad_sequence(ragged_samples, batch_first=True))
    assert torch.equal(joined, torch.stack([sample["stacked"] for sample in chosen]))


def test_a_batch_shares_no_memory_with_another_or_between_fields(
    tmp_path: Path,
) -> None:
    samples = [
        {"x": torch.ones(1 + number), "y": torch.ones(1 + number)}
        for number in range(COUNT)
    ]
    dataset = loaderkit.pack(samples, tmp_path / "cache.lk", workers=0)
    before: Any = dataset.batch([3, 1, 2, 0])

    changed: Any = dataset.batch([3, 1, 2, 0])
    for part in (*changed["x"], *changed["y"]):
        assert not shares_memory(part, [*before["x"], *before["y"]])
    changed["x"].lengths.zero_()
    changed["x"].values.zero_()

    assert changed["y"].lengths.tolist() == [4, 2, 3, 1]
    again: Any = dataset.batch([3, 1, 2, 0])
    assert torch.equal(again["x"].values, before["x"].values)
    assert torch.equal(again["x"].lengths, before["x"].lengths)


@pytest.mark.slow
def test_what_is_no_plain_array_is_left_to_the_general_way(tmp_path: Path) -> None:
    torch.manual_seed(0)
    samples = [
        {
            "compressed": torch.zeros(2_000 + number),
            "bfloat16": torch.ones(1 + number, dtype=torch.bfloat16),
            "empty rows": torch.ones(1 + number, 0),
            "two axes": torch.ones(1 + number, 1 + number),
        }
        for number in range(COUNT)
    ]
    dataset = loaderkit.pack(
        samples, tmp_path / "cache.lk", workers=0, compression="gzip"
    )

    compressed = _plain_column(dataset, "compressed", stacked=False)
    others = ("bfloat16", "empty rows", "two axes")

    assert compressed is not None
    assert compressed.join(_gather(dataset, [1, 2, 3, 4])) is None
    for name in others:
        assert _plain_column(dataset, name, stacked=False) is None
