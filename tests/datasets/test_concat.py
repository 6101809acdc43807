"""One cache of several is what packing all their samples would be."""

import dataclasses
import multiprocessing
import os
import pathlib
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import graphs
from torch_geometric.data import Batch, Data

import loaderkit
from loaderkit import SafeDataset, concat, extend, open_cache, pack
from loaderkit.cache.layout import MANIFEST
from loaderkit.errors import CacheError, DatasetError, OptionError
from loaderkit.testing import assert_same

SHARED_MEMORY = Path("/dev/shm")
FORK = multiprocessing.get_context("fork")

# Samples that no two caches need to build alike: other fields, dtypes, shapes, kinds.
SAMPLES = st.dictionaries(
    st.sampled_from(["x", "y", "text", "deep"]),
    st.sampled_from(
        [
            torch.arange(3),
            torch.ones(2, 2),
            torch.ones(4).double(),
            torch.ones(0),
            1,
            2.5,
            "text",
            ["a", "bc"],
            {"x": torch.ones(3, 1), "k": None},
            [torch.ones(1), torch.zeros(2, 3)],
        ]
    ),
    min_size=1,
)
PARTS = st.lists(st.lists(SAMPLES, min_size=1, max_size=4), min_size=1, max_size=4)


def molecules(count, seed=0):
    torch.manual_seed(seed)
    return [
        Data(
            x=torch.randn(3 + row, 2),
            edge_index=torch.randint(0, 3, (2, 4)),
            y=torch.tensor([row]),
        )
        for row in range(count)
    ]


@pytest.mark.slow
@given(PARTS, st.sampled_from([None, "gzip"]), st.sampled_from([100, 1 << 20]))
@settings(max_examples=60, deadline=None)
def test_any_caches_give_their_samples_one_after_the_other(
    tmp_path_factory, parts, compression, shard_bytes
):
    folder = tmp_path_factory.mktemp("caches")
    for number, samples in enumerate(parts):
        pack(
            samples,
            folder / str(number),
            workers=0,
            # The first is mapped, and the ones behind it may not be.
            compression=compression if number else None,
            shard_bytes=shard_bytes,
        )

    whole = concat([folder / str(n) for n in range(len(parts))], folder / "whole")

    expected = [sample for samples in parts for sample in samples]
    assert len(whole) == len(expected)
    for sample, other in zip(whole, expected, strict=True):
        assert_same(sample, other)
    assert loaderkit.verify(folder / "whole").ok


@pytest.mark.slow
@given(graphs(), graphs())
@settings(max_examples=40, deadline=None)
def test_batches_of_any_graphs_are_those_of_one_packed_list(
    tmp_path_factory, first, second
):
    folder = tmp_path_factory.mktemp("caches")
    pack(first, folder / "a", workers=0)
    pack(second, folder / "b", workers=0)

    whole = concat([folder / "a", folder / "b"], folder / "whole")

    for sample, other in zip(whole, [*first, *second], strict=True):
        assert_same(sample, other)
    packed = pack([*first, *second], folder / "packed", workers=0)
    for rows in (range(len(first)), range(len(first), len(whole))):
        assert_same(batch_or_error(whole, rows), batch_or_error(packed, rows))


def batch_or_error(dataset, rows):
    """Not every list of graphs can be joined, and then both say why."""
    try:
        return dataset.batch(rows)
    except DatasetError as error:
        return str(error)


def test_a_batch_across_caches_is_pygs_own(tmp_path):
    pack(molecules(5), tmp_path / "a", workers=0)
    pack(molecules(4, seed=1), tmp_path / "b", workers=0)

    whole = concat([tmp_path / "a", tmp_path / "b"], tmp_path / "whole")

    samples = [*molecules(5), *molecules(4, seed=1)]
    rows = [8, 0, 4, 5, 5]
    expected = Batch.from_data_list([samples[row] for row in rows])
    assert_same(whole.batch(rows), expected)


def test_no_sample_is_copied_on_one_file_system(tmp_path):
    for seed, name in enumerate("ab"):
        pack(molecules(5, seed), tmp_path / name, workers=0)

    concat([tmp_path / "a", tmp_path / "b"], tmp_path / "whole")

    shards = (tmp_path / "whole").glob("*.h5")
    assert [shard.stat().st_nlink for shard in shards] == [2, 2]


@pytest.mark.skipif(
    not pathlib.Path("/dev/shm").is_dir(), reason="one file system only"
)
def test_another_file_system_gets_copies(tmp_path):
    pack(molecules(5), tmp_path / "a", workers=0)

    # Under tox the folders of tests are in memory, and then the disk is the other one.
    is_in_memory = tmp_path.is_relative_to(SHARED_MEMORY)
    other = None if is_in_memory else SHARED_MEMORY
    with tempfile.TemporaryDirectory(dir=other) as other_disk:
        whole = concat([tmp_path / "a"] * 2, f"{other_disk}/whole")
        assert_same(whole[7], molecules(5)[2])
        [shard] = (tmp_path / "a").glob("*.h5")
        assert shard.stat().st_nlink == 1


def test_caches_may_be_deleted_once_they_are_concatenated(tmp_path):
    pack(molecules(5), tmp_path / "a", workers=0)
    whole = concat([tmp_path / "a", tmp_path / "a"], tmp_path / "whole")

    shutil.rmtree(tmp_path / "a")

    assert_same(whole[9], molecules(5)[4])


def test_a_cache_grows_and_what_is_open_reads_what_it_had(tmp_path):
    cache = pack(molecules(5), tmp_path / "c", workers=0)

    grown = extend(cache, molecules(3, seed=1), workers=0)

    assert len(cache) == 5
    assert_same(cache[4], molecules(5)[4])
    assert len(grown) == 8
    assert_same(grown[7], molecules(3, seed=1)[2])
    assert len(open_cache(tmp_path / "c")) == 8


def test_the_same_samples_may_be_added_twice(tmp_path):
    pack(molecules(2), tmp_path / "c", workers=0)

    extend(tmp_path / "c", molecules(2), workers=0)
    grown = extend(tmp_path / "c", molecules(2), workers=0)

    assert [int(sample.y) for sample in grown] == [0, 1, 0, 1, 0, 1]


def test_added_samples_may_be_built_in_other_ways(tmp_path):
    pack([{"x": torch.ones(3)}], tmp_path / "c", workers=0)

    grown = extend(tmp_path / "c", [{"x": torch.ones(2).int(), "name": "b"}], workers=0)

    assert_same(grown[0], {"x": torch.ones(3)})
    assert_same(grown[1], {"x": torch.ones(2).int(), "name": "b"})


def test_a_sample_that_cannot_be_read_adds_nothing(tmp_path):
    pack(molecules(2), tmp_path / "c", workers=0)

    with pytest.raises(DatasetError, match="object"):
        extend(tmp_path / "c", [*molecules(1), object()], workers=0)

    assert len(open_cache(tmp_path / "c")) == 2


def extend_slowly(path, pause_s):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    extend(path, Slow(molecules(6, seed=1), pause_s), workers=0, shard_bytes=500)


class Slow:
    """Samples that take a moment each."""

    def __init__(self, samples, pause_s):
        self.samples, self._pause_s = samples, pause_s

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, row):
        time.sleep(self._pause_s)
        return self.samples[row]


@pytest.mark.slow
def test_a_call_that_is_killed_at_any_moment_is_called_again_and_adds_once(tmp_path):
    expected = [*molecules(4), *molecules(6, seed=1)]
    interrupted = 0
    for number in range(20):
        path = tmp_path / str(number)
        pack(molecules(4), path, workers=0)
        run = FORK.Process(target=extend_slowly, args=(path, 0.002))
        run.start()
        time.sleep(number / 150)
        if run.is_alive():
            os.kill(run.pid, signal.SIGKILL)
        run.join()
        was_done = not (path / ".extending" / MANIFEST).exists()
        if run.exitcode == 0 or (was_done and len(open_cache(path)) == 10):
            continue
        interrupted += 1
        assert len(open_cache(path)) in {4, 10}  # none of the samples, or all

        grown = extend(path, Slow(molecules(6, seed=1), 0), workers=0, shard_bytes=500)

        for sample, other in zip(grown, expected, strict=True):
            assert_same(sample, other)
        assert not (path / ".extending").exists()
    assert interrupted, "every kill came too late"


def test_a_call_that_was_killed_behind_its_last_step_has_added_the_samples(tmp_path):
    pack(molecules(4), tmp_path / "c", workers=0)
    pack(molecules(2, seed=1), tmp_path / "left", workers=0)
    extend(tmp_path / "c", molecules(2, seed=1), workers=0)
    shutil.copytree(tmp_path / "left", tmp_path / "c" / ".extending")

    grown = extend(tmp_path / "c", molecules(2, seed=1), workers=0)

    assert len(grown) == 6


@pytest.mark.slow
def test_a_call_that_was_killed_while_it_tidied_up_has_added_the_samples(
    tmp_path, monkeypatch
):
    more = molecules(6, seed=1)
    pack(more, tmp_path / "left", workers=0, shard_bytes=500)
    pack(molecules(4), tmp_path / "c", workers=0)
    deleted = []
    unlink = Path.unlink

    def note_and_unlink(file, *args, **kwargs):
        if file.parent.name == ".extending":
            deleted.append(file.name)
        unlink(file, *args, **kwargs)

    monkeypatch.setattr(Path, "unlink", note_and_unlink)
    extend(tmp_path / "c", more, workers=0, shard_bytes=500)
    monkeypatch.undo()
    assert len(deleted) > 2
    assert deleted[-1] == MANIFEST

    # what a killed call leaves behind after each of its deletions but the last
    for number in range(len(deleted)):
        left = tmp_path / "c" / ".extending"
        shutil.copytree(tmp_path / "left", left)
        for name in deleted[:number]:
            (left / name).unlink(missing_ok=True)

        assert len(extend(tmp_path / "c", more, workers=0, shard_bytes=500)) == 10


class Chosen(SafeDataset):
    def keys(self):
        return range(3)

    def load(self, key):
        return {"x": torch.tensor(key)}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda cache: cache[:2], "not give the samples of its cache"),
        (lambda cache: open_cache(cache.cache, transform=dict), "has a transform"),
        (lambda cache: Chosen(), "has no cache"),
        (lambda cache: "s3://bucket/cache", "loaderkit.pull"),
    ],
)
def test_what_is_no_whole_cache_on_disk_is_refused_with_what_to_do(
    tmp_path, make, words
):
    cache = pack([{"x": torch.ones(1)}] * 3, tmp_path / "c", workers=0)

    with pytest.raises(OptionError, match=words):
        concat([make(cache)], tmp_path / "whole")
    with pytest.raises(OptionError, match=words):
        extend(make(cache), [{"x": torch.ones(1)}])


def test_nothing_to_concatenate_is_an_error(tmp_path):
    with pytest.raises(DatasetError, match="no caches to concatenate"):
        concat([], tmp_path / "whole")


def test_a_cache_that_is_there_is_replaced_only_where_that_was_said(tmp_path):
    pack(molecules(2), tmp_path / "a", workers=0)
    pack(molecules(3), tmp_path / "whole", workers=0)

    with pytest.raises(CacheError, match="overwrite=True"):
        concat([tmp_path / "a"], tmp_path / "whole")

    assert len(open_cache(tmp_path / "whole")) == 3
    assert len(concat([tmp_path / "a"], tmp_path / "whole", overwrite=True)) == 2


def test_a_cache_may_be_a_part_of_what_replaces_it(tmp_path):
    pack(molecules(2), tmp_path / "a", workers=0)
    pack(molecules(3, seed=1), tmp_path / "b", workers=0)

    whole = concat([tmp_path / "b", tmp_path / "a"], tmp_path / "a", overwrite=True)

    assert [int(sample.y) for sample in whole] == [0, 1, 2, 0, 1]
    assert_same(whole[0], molecules(3, seed=1)[0])


@dataclasses.dataclass
class Point:
    x: torch.Tensor


def test_classes_of_the_datasets_are_known_in_the_new_cache(tmp_path):
    cache = pack([Point(torch.ones(2))], tmp_path / "a", workers=0)

    whole = concat([cache, cache], tmp_path / "whole")

    assert_same(whole[1], Point(torch.ones(2)))
