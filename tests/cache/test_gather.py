"""Rows are copied into memory that held something else before."""

import numpy as np
import pytest

from loaderkit.cache.gather import PartRanges, RowRanges, gather_padded


@pytest.mark.parametrize("width", [3, 40_000])  # in the processor's cache, and beyond
def test_behind_each_sample_of_a_padded_batch_are_zeros(width):
    values = np.arange(12, dtype=np.float32)[:, None].repeat(width, axis=1)
    starts, lengths = np.array([7, 0, 2]), np.array([2, 0, 5])
    zeros = np.zeros(3, np.int64)
    part = PartRanges(
        0,
        starts,
        lengths,
        None,
        shards=zeros,
        unique_shards=[0],
        has_single_rows=False,
    )
    out = np.full((3, 6, width), 7, np.float32)

    gather_padded({0: values}, RowRanges((part,), lengths), out)

    assert out[:, :, 0].tolist() == [
        [7, 8, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [2, 3, 4, 5, 6, 0],
    ]
    assert (out == out[:, :, :1]).all()
