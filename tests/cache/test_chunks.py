"""Compressed values are what was packed, whatever undoes their chunks."""

import sys
import threading
import uuid

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderkit.cache.chunks import ChunkDecoder, ChunkedValues, ChunkFormat
from loaderkit.cache.hdf5 import filters
from loaderkit.cache.layout import Array

hdf5plugin = pytest.importorskip("hdf5plugin")

COMPRESSIONS = ["gzip", "lzf", "lz4", "zstd", "bzip2", "blosc", "blosc2", "bitshuffle"]
SHAPES = [(70,), (70, 3), (23, 3, 2)]


@pytest.mark.many_cases(quick=5)
@pytest.mark.parametrize("compression", COMPRESSIONS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_spans_of_compressed_rows_are_the_rows_that_were_written(compression, data):
    rows = data.draw(arrays())
    joined = rows.ndim == 3
    values = open_chunks(rows, data.draw(st.integers(1, 80)), compression, joined)
    expected = rows.reshape(-1, *rows.shape[2:]) if joined else rows
    spans = data.draw(st.lists(spans_of(len(expected), step=3 if joined else 1)))
    starts = np.array([start for start, _ in spans], np.int64)
    lengths = np.array([stop - start for start, stop in spans], np.int64)

    decompressed, moved = values.decompress(starts, lengths)

    for (start, stop), first in zip(spans, moved.tolist(), strict=True):
        assert equal(values[start:stop], expected[start:stop])
        assert equal(decompressed[first : first + stop - start], expected[start:stop])


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_libhdf5_undoes_what_no_library_is_installed_for(compression, monkeypatch):
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    rows = np.arange(50, dtype=np.float32)

    values = open_chunks(rows, 8, compression, joined=False)

    assert equal(values[5:50], rows[5:])


def test_lz4_chunks_of_several_blocks_are_undone():
    pytest.importorskip("lz4")
    content = np.repeat(np.arange(1000, dtype=np.int32), 5)
    noise = np.random.default_rng(0).integers(0, 2**31, 5000, dtype=np.int32)
    chunk = ChunkFormat(np.dtype("<i4"), (5000,), "lz4")
    for values in (content, noise):
        for block_bytes in (100, 6000, 19_999, 20_000, 1 << 20):
            filter_options = hdf5plugin.LZ4(nbytes=block_bytes)
            compressed = compress(values, filter_options)

            decoded = ChunkDecoder(chunk).decode(memoryview(compressed), 0)

            assert bytes(decoded) == values.tobytes()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_threads_do_not_read_each_others_chunks(compression):
    rows = np.arange(40_000, dtype=np.int32)
    values = open_chunks(rows, 100, compression, joined=False)
    wrong = []

    def read(first):
        spans = [slice(start, start + 300) for start in range(first, 39_000, 1600)]
        wrong.extend(span for span in spans if not equal(values[span], rows[span]))

    threads = [threading.Thread(target=read, args=(n * 100,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


@pytest.mark.many_cases(quick=3)
@pytest.mark.parametrize("compression", ["gzip", "bzip2", "lz4", "zstd"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_damaged_chunk_is_refused_or_has_its_size(compression, data):
    values = np.repeat(np.arange(100, dtype=np.int32), 3)
    chunk = ChunkFormat(np.dtype("<i4"), (300,), compression)
    compressed = bytearray(compress(values, filters(compression)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(compressed) - 1))
        compressed[place] = data.draw(st.integers(0, 255))
    compressed = compressed[: data.draw(st.integers(0, len(compressed)))]

    try:
        decoded = ChunkDecoder(chunk).decode(memoryview(compressed), 0)
    except ValueError:
        return
    assert len(decoded) == values.nbytes


def arrays():
    return st.builds(
        draw_array,
        st.sampled_from(SHAPES),
        st.sampled_from(["<f4", "<i8", "|u1", "<f2", "|b1", "<c8"]),
        st.integers(0, 99),
    )


def draw_array(shape, dtype, seed):
    generator = np.random.default_rng(seed)
    numbers = generator.standard_normal(shape) * 3
    # Half of them repeat, so that compressing brings something.
    numbers[len(numbers) // 2 :] = 1
    return numbers.astype(dtype) if dtype[1] != "u" else abs(numbers).astype(dtype)


def spans_of(count, step):
    """Spans that begin and end with a sample, some without a row."""
    sample = st.integers(0, count // step)
    return st.tuples(sample, sample).map(
        lambda pair: (min(pair) * step, max(pair) * step)
    )


def open_chunks(rows, chunk_rows, compression, joined):
    chunk_rows = min(chunk_rows, len(rows))
    with file_in_memory() as file:
        chunks = (chunk_rows, *rows.shape[1:])
        options = filters(compression)
        dataset = file.create_dataset("rows", data=rows, chunks=chunks, **options)
        file.flush()
        count = dataset.id.get_num_chunks()
        stored = [dataset.id.get_chunk_info(number) for number in range(count)]
        chunk_places = [
            (info.chunk_offset[0], info.byte_offset, info.size, info.filter_mask)
            for info in stored
        ]
        index = np.array(sorted(chunk_places), np.int64)[:, 1:]
        content = np.frombuffer(file.id.get_file_image(), np.uint8)
    array = Array(
        rows.dtype.str, rows.shape, None, chunk_rows=chunk_rows, chunk_index="i"
    )
    return ChunkedValues(
        content, array, index, compression, joined=joined, damaged=ValueError
    )


def file_in_memory():
    return h5py.File(uuid.uuid4().hex, "w", driver="core", backing_store=False)


def compress(values, options):
    with file_in_memory() as file:
        dataset = file.create_dataset("x", data=values, chunks=values.shape, **options)
        file.flush()
        _, compressed = dataset.id.read_direct_chunk((0,) * values.ndim)
        return bytes(compressed)


def equal(left, right):
    return left.shape == right.shape and left.tobytes() == right.tobytes()
