"""Rows are copied into memory that held something else before."""

import numpy as np
import pytest

from loaderkit.cache.gather import PartRanges, RowRanges, gather, gather_padded


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


class ChunkedRows:
    """Rows in chunks of 10, of which the last one that was undone is kept."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.undone_chunks = []

    def __getitem__(self, span):
        for chunk in range(span.start // 10, (span.stop - 1) // 10 + 1):
            if self.undone_chunks[-1:] != [chunk]:
                self.undone_chunks.append(chunk)
        return self.values[span]


def test_a_batch_undoes_each_compressed_chunk_once_whatever_its_order():
    values = np.arange(100)[:, None]
    starts = np.random.default_rng(0).permutation(np.arange(0, 100, 2))
    lengths = np.full(50, 2)
    part = PartRanges(
        0,
        starts,
        lengths,
        None,
        shards=np.zeros(50, np.int64),
        unique_shards=[0],
        has_single_rows=False,
    )
    rows = ChunkedRows(values)
    out = np.empty((100, 1), np.int64)

    gather({0: rows}, RowRanges((part,), lengths), out)

    assert out.reshape(50, 2).tolist() == [[start, start + 1] for start in starts]
    assert rows.undone_chunks == list(range(10))
