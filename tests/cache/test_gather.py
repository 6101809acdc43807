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


def drawn_batch(rng, parts, mean_rows, values_of_parts):
    """Draw samples of some parts, in any order, and say where their rows lie."""
    part_of_sample = rng.integers(parts, size=30)
    lengths = rng.integers(0, 2 * mean_rows, size=30)
    starts = np.array(
        [
            rng.integers(len(values_of_parts[part]) - length + 1)
            for part, length in zip(part_of_sample, lengths, strict=True)
        ]
    )
    ranges_of_parts = []
    for number in range(parts):
        [positions] = (part_of_sample == number).nonzero()
        ranges_of_parts.append(
            PartRanges(
                number,
                starts[positions],
                lengths[positions],
                positions if parts > 1 else None,
                shards=part_of_sample[positions],
                unique_shards=[number],
                has_single_rows=False,
            )
        )
    samples = [
        values_of_parts[part][start : start + length]
        for part, start, length in zip(part_of_sample, starts, lengths, strict=True)
    ]
    return RowRanges(tuple(ranges_of_parts), lengths), samples


@pytest.mark.parametrize("row_shape", [(), (2,), (11,)])
@pytest.mark.parametrize("mean_rows", [3, 60, 350])
@pytest.mark.parametrize("parts", [1, 3])
def test_rows_are_those_that_slices_give_whichever_way_they_are_taken(
    parts, mean_rows, row_shape
):
    rng = np.random.default_rng(mean_rows + parts)
    for kept, wanted in (("u1", "u1"), ("u1", "i8"), ("f4", "f4"), ("i4", "i8")):
        values = {
            number: rng.integers(100, size=(2_000, *row_shape)).astype(kept)
            for number in range(parts)
        }
        ranges, samples = drawn_batch(rng, parts, mean_rows, values)
        expected = np.concatenate(samples).astype(wanted)
        increments = rng.integers(50, size=30)
        addends = increments.repeat(ranges.lengths)
        shape = (ranges.total, *row_shape)

        for out in (np.empty(shape, wanted), np.empty(shape[::-1], wanted).T):
            gather(values, ranges, out)
            assert np.array_equal(out, expected)

            gather(values, ranges, out, increments)
            assert np.array_equal(out.T, expected.T + addends)
