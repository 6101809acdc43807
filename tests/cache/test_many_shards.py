"""A batch from many shards is the samples end to end, however few files may be open."""

import faulthandler
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderkit.cache import column_parts as column_parts_module
from loaderkit.cache import column_reader as column_reader_module
from loaderkit.cache import shards as shards_module
from loaderkit.cache.address_space import is_available
from loaderkit.cache.build import ShardElsewhere, open_build
from loaderkit.cache.column_parts import JoinedPart
from loaderkit.cache.columns import Block, ShardBuffer
from loaderkit.cache.gather import RowRanges
from loaderkit.cache.store import Store
from loaderkit.datasets.gathering import BatchGather
from loaderkit.datasets.kinds import ColumnSpec, Kind
from loaderkit.errors import CacheError, DamagedCacheError

BYTES = ColumnSpec("t", Kind.STR, "|u1", 1, axis=0, name="t")


def write_cache(path, shards, compression=None):
    """Write a cache with these samples in its shards."""
    with open_build(path, overwrite=False) as build:
        build.resume({"compression": compression})
        for samples in shards:
            block, buffer = Block(), ShardBuffer()
            for sample in samples:
                block.append(sample)
            buffer.append(block)
            build.add(buffer, state={}, evidence={})
        build.commit(structure={}, fingerprint={}, made_with={})
    return path


def gather_column(store, name, rows, dtype, trailing_shape=()):
    """Gather one column of a batch."""
    column = store.column(name)
    ranges = store.select(np.asarray(rows, np.int64)).row_ranges(column)
    out = np.empty((ranges.total, *trailing_shape), dtype)
    column.gather(ranges, out)
    return out, ranges.lengths.tolist()


DTYPES = st.sampled_from(["<f4", "<i8", "|u1", "<f2"])


@st.composite
def caches(draw):
    """Draw shards of samples: columns ragged, of one length, narrow in some, shared."""
    generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    width, dtype = draw(st.integers(1, 30)), draw(DTYPES)
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=9))
    shards = []
    for size in sizes:
        longest = draw(st.sampled_from([0, 1, 3, 40]))
        even = draw(st.booleans())
        largest = draw(st.sampled_from([9, 300, 70_000]))
        samples = []
        for _ in range(size):
            length = longest if even else int(generator.integers(0, longest + 1))
            wide = generator.integers(0, 99, (length, width)).astype(dtype)
            narrow = generator.integers(0, largest, length)
            samples.append({"wide": wide, "narrow": narrow})
        shards.append(samples)
    count = sum(sizes)
    rows = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=40))
    return shards, rows, width, dtype


@st.composite
def half_noise(draw):
    """Draw shards of which compression makes some smaller, and others hardly."""
    generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    shards = []
    for is_noise in draw(st.lists(st.booleans(), min_size=1, max_size=6)):
        samples = []
        for _ in range(draw(st.integers(1, 4))):
            length = int(generator.integers(100, 400))
            wide = generator.standard_normal((length, 3)).astype("<f4")
            samples.append(
                {
                    "wide": wide if is_noise else wide.round(),
                    "narrow": generator.integers(0, 256 if is_noise else 3, length),
                }
            )
        shards.append(samples)
    count = sum(map(len, shards))
    rows = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20))
    return shards, rows, 3, "<f4"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return lambda: tmp_path_factory.mktemp("cache") / "c"


def assert_batches_are_the_samples(folder, case, compression=None, **options):
    shards, rows, width, dtype = case
    samples = [sample for shard in shards for sample in shard]
    store = Store(write_cache(folder, shards, compression), **options)
    for name, kind, trailing_shape in (
        ("wide", dtype, (width,)),
        ("narrow", "<i8", ()),
    ):
        values, lengths = gather_column(store, name, rows, kind, trailing_shape)
        wanted = [samples[row][name] for row in rows]
        assert lengths == [len(column) for column in wanted]
        assert np.array_equal(values, np.concatenate(wanted))


@pytest.mark.slow
@given(caches())
@settings(max_examples=60, deadline=None)
def test_a_batch_from_any_shards_is_the_samples_end_to_end(folders, case):
    assert_batches_are_the_samples(folders(), case)


@pytest.mark.slow
@given(half_noise(), st.sampled_from(["gzip", "lzf"]))
@settings(max_examples=12, deadline=None)
def test_it_is_so_where_a_column_is_compressed_in_some_shards(
    folders, case, compression
):
    assert_batches_are_the_samples(folders(), case, compression)


@pytest.mark.slow
@given(caches())
@settings(max_examples=15, deadline=None)
def test_it_is_so_where_files_cannot_lie_side_by_side(folders, case):
    with pytest.MonkeyPatch.context() as patch:
        # As on macOS, which cannot map files side by side.
        patch.setattr(shards_module, "is_available", lambda: False)
        assert_batches_are_the_samples(folders(), case)


@pytest.mark.slow
@given(caches())
@settings(max_examples=15, deadline=None)
def test_it_is_so_where_the_files_are_larger_than_memory(folders, case):
    with pytest.MonkeyPatch.context() as patch:
        # Files that are larger than the memory would have to be written.
        patch.setattr(shards_module, "_SMALL_BYTES", 0)
        assert_batches_are_the_samples(folders(), case, free_bytes=lambda: 0)


@pytest.mark.slow
@given(caches())
@settings(max_examples=10, deadline=None)
def test_it_is_so_where_shards_have_too_many_offsets_to_check_at_once(folders, case):
    with pytest.MonkeyPatch.context() as patch:
        # The limit itself is a million samples.
        patch.setattr(column_parts_module, "_MAX_OFFSETS_CHECKED_ON_OPENING", 0)
        assert_batches_are_the_samples(folders(), case)


@pytest.mark.parametrize("at_once", [0, 1 << 20])
@pytest.mark.parametrize("wrong", [-3, 1 << 40, 59])
def test_offsets_that_lead_outside_their_shard_are_refused(
    tmp_path, monkeypatch, at_once, wrong
):
    monkeypatch.setattr(column_parts_module, "_MAX_OFFSETS_CHECKED_ON_OPENING", at_once)
    generator = np.random.default_rng(0)
    path = write_cache(
        tmp_path / "c", [list(random_molecules(80, generator)) for _ in range(3)]
    )
    store = Store(path, checksums="never")
    [array] = [
        array
        for name, array in store.manifest.shards[1].arrays.items()
        if name.endswith("/offsets")
    ]
    with (path / store.manifest.shards[1].file).open("r+b") as file:
        file.seek(array.offset + 8 * 5)
        file.write(np.int64(wrong).tobytes())

    with pytest.raises(DamagedCacheError, match="its offsets point outside it"):
        gather_column(store, "x", list(range(70, 100)), "<f4", (11,))


def test_a_planted_wrong_place_is_found(folders, monkeypatch):
    """The law above finds a part that puts its rows elsewhere."""
    locate_rows = JoinedPart.locate_rows

    def one_too_far(self, samples, shards):
        starts, lengths = locate_rows(self, samples, shards)
        return starts + (shards > 0), lengths

    # No file does this: a wrong place is a fault of ours.
    monkeypatch.setattr(JoinedPart, "locate_rows", one_too_far)
    samples = [
        {"wide": np.full((3, 2), n, "<f4"), "narrow": np.arange(3)} for n in range(9)
    ]
    case = [samples[:4], samples[4:]], [5, 1], 2, "<f4"

    with pytest.raises(AssertionError):
        assert_batches_are_the_samples(folders(), case)


def random_molecules(count, generator):
    for _ in range(count):
        nodes = int(generator.integers(5, 30))
        x = generator.random((nodes, 11)).astype("<f4")
        yield {"x": x, "pos": x[:, :3].copy(), "y": np.ones((1, 19), "<f4")}


@pytest.mark.skipif(not is_available(), reason="files cannot lie side by side here")
def test_columns_with_the_same_offsets_are_looked_up_once_whatever_the_shards(tmp_path):
    generator = np.random.default_rng(0)
    shards = [list(random_molecules(60, generator)) for _ in range(8)]
    store = Store(write_cache(tmp_path / "c", shards))
    selection = store.select(np.array([470, 3, 120, 121, 3]))

    ranges = [selection.row_ranges(store.column(name)) for name in ("x", "pos")]

    assert ranges[0] is ranges[1]
    assert isinstance(ranges[0], RowRanges)
    assert len(ranges[0].parts) == 1


def features_and_masks(sizes, generator):
    """Draw shards of so many samples: x begins at pages, z only in large shards."""
    shards = []
    for size in sizes:
        nodes = generator.integers(15, 30, size)
        x = [generator.random((count, 11)).astype("<f4") for count in nodes]
        shards.append([{"x": rows, "z": rows[:, 0] > 0.5} for rows in x])
    return shards


@pytest.mark.skipif(not is_available(), reason="files cannot lie side by side here")
@pytest.mark.parametrize("large_shards", [2, 6, 8])
@pytest.mark.parametrize(("most_copied", "parts_of_six"), [(256, 1), (1, 2)])
def test_few_shards_that_begin_elsewhere_in_their_pages_are_no_part_of_their_own(
    tmp_path, monkeypatch, large_shards, most_copied, parts_of_six
):
    monkeypatch.setattr(column_reader_module, "MAX_COPIED_SHARDS", most_copied)
    sizes = [60] * large_shards + [10] * (8 - large_shards)
    shards = features_and_masks(sizes, np.random.default_rng(0))
    store = Store(write_cache(tmp_path / "c", shards))

    column = store.column("x")

    parts = parts_of_six if large_shards == 6 else 1
    assert len(column.grouping.first_shards) == parts
    rows = [0, 9, len(store) - 1, 10]
    gathered, _ = gather_column(store, "x", rows, "<f4", (11,))
    samples = [sample for shard in shards for sample in shard]
    assert np.array_equal(gathered, np.concatenate([samples[row]["x"] for row in rows]))


def shards_of_molecules(sizes, with_edges, generator):
    shards = []
    for size, has_edges in zip(sizes, with_edges, strict=True):
        samples = list(random_molecules(size, generator))
        for sample in samples:
            edges = len(sample["x"]) * has_edges
            sample["z"] = sample["x"][:, 0] > 0.5
            sample["edge_attr"] = generator.random((edges, 3)).astype("<f4")
            sample["edge_type"] = generator.integers(0, 9, edges).astype("|u1")
        shards.append(samples)
    return shards


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="files cannot lie side by side here")
@given(
    st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
@settings(max_examples=25, deadline=None)
def test_a_few_small_shards_do_not_split_a_column(folders, small, random):
    described = [(60, True)] * (len(small) + 1) + small
    random.shuffle(described)
    generator = np.random.default_rng(random.getrandbits(32))
    shards = shards_of_molecules(*zip(*described, strict=True), generator)
    rows = generator.permutation(sum(map(len, shards)))
    samples = [sample for shard in shards for sample in shard]
    store = Store(write_cache(folders(), shards))
    for name, first in samples[0].items():
        column, wanted = store.column(name), [samples[row][name] for row in rows]
        for _ in range(2):
            got, _ = gather_column(store, name, rows, first.dtype, first.shape[1:])

            assert len(column.grouping.first_shards) == 1
            assert np.array_equal(got, np.concatenate(wanted))
            for shard in range(len(shards)):  # they are opened again
                column.close_shard(shard)


def status_in_a_fork(read):
    """Call a function in a child process; 0, or the signal that ended it."""
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        read()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


# The rows of a shard are one page, and the next file is not mapped: what lies behind
# them is no memory.
LENGTHS_OF_A_PAGE = {
    "all alike": [32] * 128,
    "an empty one at the end": [64, *[32] * 126, 0],
    "an empty one at the beginning": [0, *[32] * 126, 64],
}


@pytest.fixture(params=LENGTHS_OF_A_PAGE.values(), ids=LENGTHS_OF_A_PAGE)
def store_of_pages(request, tmp_path):
    samples = [{"t": np.full(length, 97, "|u1")} for length in request.param]
    return Store(write_cache(tmp_path / "c", [samples] * 3))


ROWS_AT_BOTH_ENDS = np.array([0, 1, 125, 126, 127])


@pytest.mark.skipif(not is_available(), reason="files cannot lie side by side here")
@pytest.mark.parametrize(
    "read",
    [
        lambda store: BatchGather(store, ROWS_AT_BOTH_ENDS).texts(BYTES),
        lambda store: gather_column(store, "t", ROWS_AT_BOTH_ENDS, "|u1"),
    ],
    ids=["texts", "rows"],
)
def test_nothing_is_read_behind_the_last_row_of_a_file(store_of_pages, read):
    assert status_in_a_fork(lambda: read(store_of_pages)) == 0


@pytest.mark.skipif(not is_available(), reason="files cannot lie side by side here")
def test_what_would_be_read_there_ends_the_process(store_of_pages):
    def read_one_row_more():
        column = store_of_pages.column("t")
        values, ranges = store_of_pages.select(ROWS_AT_BOTH_ENDS).locate(column)
        values.take(ranges.parts[0].starts + ranges.lengths, mode="clip")

    assert status_in_a_fork(read_one_row_more) in {signal.SIGSEGV, signal.SIGBUS}


@pytest.mark.skipif(not is_available(), reason="files cannot lie side by side here")
def test_of_a_shard_that_is_read_into_memory_changed_bytes_are_an_error(tmp_path):
    shards = features_and_masks([60, 60, 3], np.random.default_rng(0))
    path = write_cache(tmp_path / "c", shards)
    store, rows = Store(path), list(range(123))
    gather_column(store, "z", rows, "?")
    shard = store.manifest.shards[2]

    with (path / shard.file).open("r+b") as file:
        file.seek(shard.arrays[shard.columns["z"].values].offset)
        file.write(b"\x02")

    def read_nine_batches():  # each looks at the times of some of the shards
        for _ in range(9):
            gather_column(store, "z", rows, "?")

    with pytest.raises(DamagedCacheError):
        read_nine_batches()


@pytest.mark.parametrize("cut", [0, 3, 7])
def test_a_shard_cut_short_between_two_batches_is_an_error(tmp_path, cut):
    generator = np.random.default_rng(0)
    path = write_cache(
        tmp_path / "c", [list(random_molecules(60, generator)) for _ in range(8)]
    )
    store, rows = Store(path), list(range(0, 480, 7))
    gather_column(store, "x", rows, "<f4", (11,))
    file = sorted(path.glob("*.h5"))[cut]

    os.truncate(file, 4096)

    with pytest.raises(DamagedCacheError, match="4,096 bytes"):
        gather_column(store, "x", rows, "<f4", (11,))


@pytest.mark.slow
def test_changed_bytes_are_an_error_after_a_few_batches(tmp_path):
    generator = np.random.default_rng(0)
    path = write_cache(
        tmp_path / "c", [list(random_molecules(60, generator)) for _ in range(20)]
    )
    store, rows = Store(path), list(range(0, 1200, 7))
    gather_column(store, "x", rows, "<f4", (11,))
    file = sorted(path.glob("*.h5"))[11]
    content = bytearray(file.read_bytes())
    content[5000] ^= 1

    with file.open("r+b") as stream:
        stream.write(content)

    def read_on():
        # Each batch looks at the times of four files in turn, and at all sizes.
        for _ in range(20):
            gather_column(store, "x", rows, "<f4", (11,))

    with pytest.raises(DamagedCacheError, match="checksum"):
        read_on()


def test_shards_that_lack_the_column_are_an_error(tmp_path):
    samples = [{"x": np.ones(3), "y": np.ones(2)}], [{"x": np.ones(3)}]
    store = Store(write_cache(tmp_path / "c", samples))
    without_y = store.manifest.shards.files[1]
    with pytest.raises(CacheError, match=f"{without_y} holds no column 'y'"):
        store.select(np.array([0, 1])).row_ranges(store.column("y"))


@pytest.mark.parametrize("shards", [1, 3])
def test_no_sample_at_all_is_a_batch_too(tmp_path, shards):
    samples = [[{"x": np.ones(3)}, {"x": np.ones(2), "y": np.ones(1)}]] * shards
    store = Store(write_cache(tmp_path / "c", samples))
    for name in ("x", "y"):
        values, lengths = gather_column(store, name, np.empty(0, np.int64), "<f8")
        assert (len(values), lengths) == (0, [])


@pytest.mark.slow
def test_more_shards_than_files_may_be_open_are_read(tmp_path):
    write_cache(tmp_path / "c", [[{"x": np.full(4, n)}] for n in range(300)])
    script = """if True:
        import resource, sys
        import numpy as np
        from loaderkit.cache.store import Store
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        store = Store(sys.argv[1])
        column, rows = store.column("x"), np.arange(300)
        for _ in range(2):
            ranges = store.select(rows).row_ranges(column)
            out = np.empty(1200, np.int64)
            column.gather(ranges, out)
            assert (out == rows.repeat(4)).all()
        for row in rows.tolist():
            assert (column.read(*store.locate(row)) == row).all()
    """
    subprocess.run([sys.executable, "-c", script, tmp_path / "c"], check=True)


@pytest.mark.slow
def test_where_addresses_are_limited_shards_are_read_one_by_one(tmp_path):
    write_cache(
        tmp_path / "c", [[{"x": np.full((2, 1000), n, "<f8")}] for n in range(8)]
    )
    script = """if True:
        import resource, sys
        import numpy as np
        from loaderkit.cache.store import Store
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
        store = Store(sys.argv[1])
        column = store.column("x")
        ranges = store.select(np.arange(8)).row_ranges(column)
        assert len(ranges.parts) == 8
        out = np.empty((16, 1000))
        column.gather(ranges, out)
        assert (out[:, 0] == np.arange(8).repeat(2)).all()
    """
    subprocess.run([sys.executable, "-c", script, tmp_path / "c"], check=True)


def test_files_that_stay_open_are_half_of_those_allowed():
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert shards_module.max_kept_open() == min(1024, soft // 2)


def test_a_cache_that_is_extended_writes_nothing_of_the_shards_it_has(tmp_path):
    samples = [np.arange(3), np.arange(5)]
    folder = write_cache(tmp_path / "c", [[{"x": values}] for values in samples])
    shards = Store(folder).manifest.shards

    notes = {}
    for path in (folder, tmp_path / "other"):
        with open_build(path, overwrite=True) as build:
            build.resume({"compression": None, "samples": 3})
            build.adopt(ShardElsewhere(shard, folder) for shard in shards)
            notes[path.name] = len(list(build.folder.glob("0*.json")))

    # The twin: another cache has to make links, and notes them.
    assert notes == {"c": 0, "other": 2}
