"""Columns are the same wherever their values waited: in memory, or piece by piece."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from loaderkit.cache.build import ShardWriter
from loaderkit.cache.columns import Block, ShardArray, ShardBuffer
from loaderkit.cache.layout import LEAST_SAVED_SHARE

FIELDS = {"a": "<i8", "b": "<f4", "c@inc": "<i8", "d": "<u2", "e": "|b1"}


@st.composite
def drawn_samples(draw):
    """Samples that lack some fields, of shapes that differ or not."""
    fields = draw(st.sets(st.sampled_from(sorted(FIELDS)), min_size=1))
    ndim = {field: draw(st.integers(0, 2)) for field in fields}
    samples = []
    for number in range(draw(st.integers(1, 12))):
        present = draw(st.sets(st.sampled_from(sorted(fields))))
        sample = {
            field: draw(
                npst.arrays(
                    FIELDS[field], draw(st.tuples(*[st.integers(0, 3)] * ndim[field]))
                )
            )
            for field in sorted(fields if number == 0 else present)
        }
        samples.append(sample)
    return samples


def written(folder, samples, cuts, spills, compression):
    """Write samples as a shard, in blocks, of which some wait in files."""
    buffer, start = ShardBuffer(), 0
    for number, stop in enumerate([*sorted(cuts), len(samples)]):
        block = Block()
        for row, sample in enumerate(samples[start:stop], start):
            block.append(sample)
            if row in spills:
                block.spill(folder / f"{number}.block")
        start = max(start, stop)
        buffer.append(block)
    writer = ShardWriter(folder, compression)
    (folder / ".building").mkdir()
    shard = writer.write(0, buffer, state={}, evidence={})
    return shard, (folder / shard.file).read_bytes()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)  # each writes two shards to the disk itself
@given(
    samples=drawn_samples(),
    cuts=st.sets(st.integers(0, 12)),
    spills=st.sets(st.integers(0, 11)),
    compression=st.sampled_from([None, "gzip"]),
)
def test_the_bytes_do_not_tell_how_samples_were_cut_or_where_they_waited(
    tmp_path_factory, samples, cuts, spills, compression
):
    wanted = written(tmp_path_factory.mktemp("a"), samples, [], [], compression)

    cuts = {cut for cut in cuts if cut <= len(samples)}
    folder = tmp_path_factory.mktemp("b")
    assert written(folder, samples, cuts, spills, compression) == wanted


@pytest.mark.parametrize("compression", ["gzip", "lzf", "LZ4", "Zstd"])
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 99),
    samples=st.integers(1, 60),
    noise_share=st.floats(0, 1),
    cuts=st.sets(st.integers(0, 60), max_size=3),
)
def test_an_array_is_compressed_where_that_saves_an_eighth(
    tmp_path_factory, compression, seed, samples, noise_share, cuts
):
    if compression in {"LZ4", "Zstd"}:
        pytest.importorskip("hdf5plugin")
    generator = np.random.default_rng(seed)
    values = generator.integers(0, 256, (samples, 32, 256), np.uint8)
    is_noise = generator.random((samples, 32)) < noise_share
    values[~is_noise] = 7
    # What does not repeat cannot become smaller, and the rest nearly vanishes.
    saved_share = 1 - is_noise.mean()
    assume(abs(saved_share - LEAST_SAVED_SHARE) > 0.09)

    shard, _ = written(
        tmp_path_factory.mktemp("a"),
        [{"x": rows} for rows in values],
        {cut for cut in cuts if cut <= samples},
        [],
        compression,
    )

    is_compressed = shard.arrays["x/values"].chunk_index is not None
    assert is_compressed == (saved_share > LEAST_SAVED_SHARE)


@given(
    lengths=st.lists(st.integers(0, 7), max_size=6),
    rows=st.integers(1, 9),
    width=st.integers(1, 3),
)
def test_slices_of_an_array_are_those_of_its_pieces_joined(lengths, rows, width):
    pieces = [
        np.arange(width * length) + number for number, length in enumerate(lengths)
    ]
    wanted = np.concatenate([*pieces, np.arange(0)]).reshape(-1, width)
    array = ShardArray(wanted.dtype, wanted.shape, lambda: iter(pieces))

    slices = list(array.slices(rows))

    assert all(len(part) == rows for part in slices[:-1])
    assert np.array_equal(np.concatenate([*slices, wanted[:0]]), wanted)
    assert array.digest() == ShardArray.of(wanted).digest()


def test_a_spilled_block_whose_file_was_cut_short_is_an_error(tmp_path):
    block = Block()
    block.append({"x": np.arange(100)})
    block.spill(tmp_path / "values")
    (tmp_path / "values").write_bytes(b"short")

    with pytest.raises(OSError, match="cut short"):
        list(block.columns["x"].pieces(block.file))
