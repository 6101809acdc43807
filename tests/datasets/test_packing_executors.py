"""Whoever packs a cache, its bytes are the same; and who is lost costs one span.

The oracle is packing without any process or thread: ``workers=0``.
"""

import itertools
import os
import pickle
import random
import signal
import threading
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from failing_calls import files_of
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderkit import SafeDataset, open_cache, pack
from loaderkit.cache.files import load_manifest
from loaderkit.datasets.pack import PackOptions
from loaderkit.datasets.packing_executors import ExecutorEngine
from loaderkit.datasets.packing_tasks import LookTask
from loaderkit.datasets.shard_plan import ShardPlan, rows_to_look_at
from loaderkit.errors import DatasetError, OptionError
from loaderkit.interrupts import Interrupts


class Drawn(torch.utils.data.Dataset):
    """Samples with random numbers, of which a few are built in ways of their own."""

    def __init__(self, seed, count, rarity):
        self.seed, self.count, self.rarity = seed, count, rarity

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        chance = random.Random(self.seed * 100_003 + row)
        sample = {
            "x": torch.full((chance.randrange(1, 9),), row),
            "noise": torch.rand(2),
            "numpy": np.random.standard_normal(2),
            "python": random.random(),
        }
        way = chance.randrange(self.rarity)
        if way == 0:
            sample["only here"] = torch.ones(2)
        elif way == 1:
            sample["a text"] = f"of sample {row}"
        elif way == 2:
            # Another dtype under the same path: a column with a number in its name.
            sample["x"] = torch.rand(3)
        elif way == 3:
            sample["x"] = [row, None]
        return sample


@contextmanager
def processes(count):
    with ProcessPoolExecutor(count) as executor:
        yield executor


@contextmanager
def threads(count):
    with ThreadPoolExecutor(count) as executor:
        yield executor


class Backwards(Executor):
    """Runs tasks here when they are asked for, the last that was given first, twice."""

    def submit(self, function, /, *arguments):
        future = Future()
        function(*arguments)
        future.set_result(function(*arguments))
        return future


@contextmanager
def twice(_):
    yield Backwards()


def packed_files(source, path, **options):
    torch.manual_seed(3)
    pack(source, path, **options)
    assert not (path / ".building").exists()
    return files_of(path)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 150),
    rarity=st.sampled_from([4, 20, 70]),
    shard_bytes=st.sampled_from([1, 300, 3_000, 1 << 20]),
    make=st.sampled_from([processes, threads, twice]),
    workers=st.integers(1, 3),
)
@pytest.mark.slow
def test_the_bytes_are_the_same_whoever_packs(
    tmp_path_factory, seed, count, rarity, shard_bytes, make, workers
):
    path = tmp_path_factory.mktemp("packed")
    if shard_bytes == 1:
        count = min(count, 40)
    source = Drawn(seed, count, rarity)
    wanted = packed_files(source, path / "here", workers=0, shard_bytes=shard_bytes)

    with make(workers) as executor:
        packed = packed_files(
            source, path / "there", executor=executor, shard_bytes=shard_bytes
        )

    assert packed == wanted


@pytest.mark.slow
def test_shards_that_numbered_their_variants_too_low_are_written_again(
    tmp_path, caplog
):
    """Twin: without that, the law above would hold of nothing.

    There are so many shards that a task reads and writes a whole one.
    """
    source = Drawn(seed=1, count=400, rarity=40)
    wanted = packed_files(source, tmp_path / "here", workers=0, shard_bytes=300)

    with caplog.at_level("INFO", "loaderkit"), threads(2) as executor:
        packed = packed_files(
            source, tmp_path / "there", executor=executor, shard_bytes=300
        )

    assert "shards again" in caplog.text
    assert packed == wanted
    assert [str(sample) for sample in open_cache(tmp_path / "there")] == [
        str(sample) for sample in open_cache(tmp_path / "here")
    ]


class TellsSeed(Drawn):
    """Tells when its first sample is read, takes its time, and notes the seed then."""

    def __init__(self, seed, count, rarity):
        super().__init__(seed, count, rarity)
        self.is_read = threading.Event()
        self.seeds_seen = []

    def __getitem__(self, row):
        if not self.is_read.is_set():
            self.seeds_seen.append(torch.initial_seed())
            self.is_read.set()
            time.sleep(0.2)
        return super().__getitem__(row)


def packs_at_once(first, second, folder, *executors):
    """Pack one source while a thread packs another, and give the files of both."""
    torch.manual_seed(3)
    options = [
        {"workers": 0} if executor is None else {"executor": executor}
        for executor in executors
    ]
    thread = threading.Thread(
        target=pack, args=(first, folder / "first.lk"), kwargs=options[0]
    )
    thread.start()
    assert first.is_read.wait(60)
    pack(second, folder / "second.lk", **options[1])
    thread.join()
    return shards_of(folder / "first.lk"), shards_of(folder / "second.lk")


def shards_of(cache):
    return {file.name: file.read_bytes() for file in cache.glob("*.h5")}


@pytest.mark.parametrize("way", ["one pool", "no pool", "one of each"])
def test_packs_at_once_in_threads_follow_from_the_seed_that_the_user_set(tmp_path, way):
    """The process has another seed while samples of the one pack are read."""
    second = Drawn(2, 30, 4)
    wanted = []
    for number, source in enumerate((Drawn(1, 30, 4), second)):
        packed_files(source, tmp_path / f"wanted {number}", workers=0)
        wanted.append(shards_of(tmp_path / f"wanted {number}"))
    first = TellsSeed(1, 30, 4)
    with threads(2) as pool:
        executors = {
            "one pool": (pool, pool),
            "no pool": (None, None),
            "one of each": (pool, None),
        }[way]
        files = packs_at_once(first, second, tmp_path, *executors)

    assert list(files) == wanted
    assert first.seeds_seen != [3]  # or nothing is shown
    assert torch.initial_seed() == 3


# Errors and deaths


class Fails(SafeDataset):
    """Fails at some samples; they are mended by a file."""

    def __init__(self, folder, failing=(), deaths=None, **options):
        super().__init__(**options)
        self.folder, self.failing, self.deaths = folder, failing, deaths or {}

    def keys(self):
        return [f"molecule {number}" for number in range(400)]

    def load(self, key):
        number = int(key.split()[1])
        if number in self.failing and not (self.folder / "mended").exists():
            msg = f"{key} has no atoms"
            raise ValueError(msg)
        return {"x": torch.full((20,), number)}


@pytest.mark.slow
@pytest.mark.parametrize("make", [processes, threads])
def test_an_error_reaches_the_caller_with_its_key_and_the_others_are_packed(
    tmp_path, make
):
    with make(2) as executor:
        packing = PackOptions(executor=executor, shard_bytes=2_000)
        dataset = Fails(tmp_path, (130, 250), cache=tmp_path / "c.lk", packing=packing)

        with pytest.raises(DatasetError, match=r"molecule 130.*has no atoms") as caught:
            len(dataset)
        finished = {file.name for file in (tmp_path / "c.lk").glob("*.h5")}
        (tmp_path / "mended").touch()
        assert [int(sample["x"][0]) for sample in dataset] == list(range(400))

    shards = {file.name for file in (tmp_path / "c.lk").glob("*.h5")}
    assert finished < shards
    assert len(finished) == len(shards) - 2
    assert "ValueError" in str(caught.value)
    if hasattr(caught.value, "__notes__"):
        assert "1 more shard could not be packed" in "".join(caught.value.__notes__)


class Kills(Fails):
    """Kills the process that reads some sample, so many times."""

    def load(self, key):
        number = int(key.split()[1])
        if number in self.deaths:
            with (self.folder / f"died at {number}").open("a") as file:
                file.write("x")
            if (self.folder / f"died at {number}").stat().st_size <= self.deaths[
                number
            ]:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().load(key)


def kills(folder, deaths, executor):
    packing = PackOptions(executor=executor, shard_bytes=2_000)
    return Kills(folder, deaths=deaths, cache=folder / "c.lk", packing=packing)


@pytest.mark.slow
def test_a_span_whose_worker_is_lost_is_given_out_again(tmp_path):
    dataset = kills(tmp_path, {130: 2, 250: 1}, lambda: ProcessPoolExecutor(2))

    assert [int(sample["x"][0]) for sample in dataset] == list(range(400))


@pytest.mark.slow
def test_a_worker_of_this_machine_that_dies_is_replaced(tmp_path):
    packing = PackOptions(workers=2, shard_bytes=2_000)
    dataset = Kills(
        tmp_path, deaths={130: 2, 250: 1}, cache=tmp_path / "c.lk", packing=packing
    )

    assert [int(sample["x"][0]) for sample in dataset] == list(range(400))
    assert (tmp_path / "died at 130").read_text() == "xxx"


@pytest.mark.slow
def test_a_span_that_costs_each_worker_is_named_and_the_others_are_packed(tmp_path):
    dataset = kills(tmp_path, {250: 99}, lambda: ProcessPoolExecutor(2))

    with pytest.raises(DatasetError, match="lost a worker") as caught:
        len(dataset)

    assert "from 'molecule 24" in caught.value.what
    shards = len(list((tmp_path / "c.lk").glob("*.h5")))
    dataset.deaths = {}
    len(dataset)
    assert len(list((tmp_path / "c.lk").glob("*.h5"))) == shards + 1


@pytest.mark.slow
def test_a_pool_that_broke_and_cannot_be_replaced_is_told_of(tmp_path):
    lost = pytest.raises(DatasetError, match="lost a worker")
    with processes(2) as executor, lost as caught:
        len(kills(tmp_path, {130: 1}, executor))

    assert "BrokenProcessPool: " in caught.value.what
    assert "executor=lambda" in caught.value.fix
    assert [int(s["x"][0]) for s in kills(tmp_path, {}, None)] == list(range(400))


class TakesSome(Executor):
    """Runs so many tasks here, and refuses those behind, as a pool does that broke."""

    def __init__(self, task_count):
        self.tasks_left = task_count

    def submit(self, function, /, *arguments):
        if not self.tasks_left:
            msg = "a process in the pool was terminated"
            raise BrokenProcessPool(msg)
        self.tasks_left -= 1
        future = Future()
        future.set_result(function(*arguments))
        return future


@settings(max_examples=15, deadline=None)
@given(task_counts=st.lists(st.integers(0, 4), max_size=8), shards=st.integers(1, 12))
@pytest.mark.slow
def test_a_pool_that_is_broken_when_it_is_given_a_task_is_replaced(
    tmp_path_factory, task_counts, shards
):
    path = tmp_path_factory.mktemp("packed")
    source = [{"x": np.full(8, row)} for row in range(24)]
    shard_bytes = 24 * 64 // shards
    wanted = packed_files(source, path / "here", workers=0, shard_bytes=shard_bytes)
    executors = iter([TakesSome(count) for count in task_counts])

    def make():
        return next(executors, None) or TakesSome(10**6)

    made = "".join("-" if count else "0" for count in task_counts)
    if "000" not in made:
        packed = packed_files(
            source, path / "there", executor=make, shard_bytes=shard_bytes
        )
        assert packed == wanted


class RefusesWith(TakesSome):
    """Runs so many tasks here, and raises some error of its own when given another."""

    def __init__(self, task_count, error):
        super().__init__(task_count)
        self.error = error

    def submit(self, function, /, *arguments):
        if not self.tasks_left:
            raise self.error
        return super().submit(function, *arguments)


@pytest.mark.parametrize("task_count", [0, 1, 3])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cannot schedule new futures after shutdown"),
        ConnectionError("the client is closed"),  # as dask's ClosedClientError
        pickle.PicklingError("a lock cannot be pickled"),
        TypeError("submit() takes 2 arguments"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_executor_that_refuses_a_task_is_told_of_whatever_it_raises(
    tmp_path, error, task_count
):
    source = [{"x": np.full(8, row)} for row in range(24)]
    path, shard_bytes = tmp_path / "c.lk", 24 * 64 // 6
    with pytest.raises(DatasetError, match="takes no tasks") as caught:
        pack(
            source,
            path,
            executor=RefusesWith(task_count, error),
            shard_bytes=shard_bytes,
        )
    assert f"{type(error).__name__}: {error}" in caught.value.what
    assert "executor=lambda" in caught.value.fix

    makers = iter([RefusesWith(task_count, error)])
    cache = pack(
        source,
        path,
        executor=lambda: next(makers, None) or TakesSome(10**6),
        shard_bytes=shard_bytes,
    )
    assert len(cache) == 24


class LosesTouch(Executor):
    """Takes tasks and never answers; or answers after it was asked some times more."""

    def __init__(self, error, asked_before_answer=None):
        self.error, self.asked_before_answer = error, asked_before_answer
        self.first = None
        self.asked = 0

    def submit(self, *_):
        if self.first is None:
            self.first = Future()
            return self.first
        self.asked += 1
        if self.asked == self.asked_before_answer:
            self.first.set_result("an answer")
        if self.error is not None:
            raise self.error
        return Future()


def engine_of(executor):
    return ExecutorEngine(executor, None, Interrupts(), quiet_s=0.01)


@pytest.mark.parametrize("error", [ConnectionError("closed"), OSError("gone")])
def test_an_executor_that_has_lost_its_tasks_is_not_waited_for(error):
    """As dask does when its client is closed: its futures stay as they are."""
    engine = engine_of(LosesTouch(error))
    assert engine.submit(LookTask(Path("none"), [0])) is not None

    with pytest.raises(DatasetError, match="takes no tasks") as caught:
        engine.wait()

    assert str(error) in caught.value.what


@pytest.mark.parametrize("error", [None, RuntimeError("after shutdown")])
def test_an_executor_that_is_only_slow_or_was_shut_down_is_waited_for(error):
    """A pool that was shut down ends what it has."""
    engine = engine_of(LosesTouch(error, asked_before_answer=4))
    future = engine.submit(LookTask(Path("none"), [0]))

    assert engine.wait() is future
    assert future.result() == "an answer"


def test_executors_that_never_take_a_task_are_told_of_and_not_made_for_ever(tmp_path):
    with pytest.raises(DatasetError, match="takes no tasks") as caught:
        pack([1], tmp_path / "a.lk", executor=lambda: TakesSome(0))
    assert "3 executors in a row" in caught.value.why

    with pytest.raises(DatasetError, match="takes no tasks") as caught:
        pack([1], tmp_path / "b.lk", executor=TakesSome(0))
    assert "executor=lambda" in caught.value.fix
    assert len(pack([1], tmp_path / "b.lk", workers=0)) == 1


class LosesAll(TakesSome):
    """Takes so many tasks, and then loses those that it is given, not begun."""

    def submit(self, function, /, *arguments):
        if self.tasks_left:
            return super().submit(function, *arguments)
        future = Future()
        future.set_exception(BrokenProcessPool("the initializer failed"))
        return future


@pytest.mark.slow
def test_workers_that_cannot_start_end_the_run(tmp_path):
    task_counts = iter([2])
    source = [{"x": np.full(8, row)} for row in range(80)]

    with pytest.raises(DatasetError, match="end before they begin a task") as caught:
        pack(
            source,
            tmp_path / "c.lk",
            executor=lambda: LosesAll(next(task_counts, 0)),
            shard_bytes=64,
        )

    assert "initializer" in caught.value.why
    assert len(list((tmp_path / "c.lk").glob("*.h5"))) == 1
    assert len(pack(source, tmp_path / "c.lk", workers=0, shard_bytes=64)) == 80


class Here(Executor):
    """Runs tasks where they are given."""

    def submit(self, function, /, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future


class FailsAtRows(torch.utils.data.Dataset):
    """Samples of drawn sizes; some rows raise, until they are mended."""

    def __init__(self, seed, count):
        chance = random.Random(seed)
        self.sizes = [chance.choice([1, 2, 30]) for _ in range(count)]
        self.failing = set()

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, row):
        if row in self.failing:
            msg = f"row {row} has no atoms"
            raise ValueError(msg)
        return {"x": torch.full((self.sizes[row],), row)}


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("seed", range(24))
def test_finished_shards_are_kept_whichever_samples_failed_in_between(tmp_path, seed):
    """Also where one of those failed whose sizes are looked at before all others."""
    chance = random.Random(seed)
    count = chance.choice([30, 90, 150])
    source = FailsAtRows(seed, count)
    options = {"executor": Here(), "shard_bytes": chance.choice([300, 1_000])}
    path = tmp_path / "c.lk"
    looked_at = rows_to_look_at(count)[1:]  # without the first, nothing is packed

    finished = {}
    failed_looks = 0
    for run in range(chance.choice([1, 2, 3])):
        among = looked_at if (seed + run) % 2 else range(1, count)
        source.failing = set(chance.sample(among, chance.choice([1, 2])))
        failed_looks += not source.failing.isdisjoint(looked_at)
        with pytest.raises(DatasetError, match=rf"row {min(source.failing)} has no"):
            pack(source, path, **options)
        files = {file.name: file.stat().st_ino for file in path.glob("*.h5")}
        assert finished.items() <= files.items()
        finished = files
    source.failing = set()
    cache = pack(source, path, **options)

    files = {file.name: file.stat().st_ino for file in path.glob("*.h5")}
    assert finished.items() <= files.items()
    assert [sample["x"].tolist() for sample in cache] == [
        [row] * size for row, size in enumerate(source.sizes)
    ]
    if not failed_looks:
        whole = tmp_path / "whole.lk"
        pack(source, whole, workers=0, shard_bytes=options["shard_bytes"])
        assert files_of(path) == files_of(whole)


class Restless(torch.utils.data.Dataset):
    """Gives another sample each time; fails at one while a file is not there."""

    def __init__(self, mended):
        self.mended, self.reads = mended, itertools.count()

    def __len__(self):
        return 80  # so many shards that a task writes a whole one

    def __getitem__(self, row):
        if row == 30 and not self.mended.exists():
            msg = "not yet"
            raise ValueError(msg)
        return {"x": np.array([row, next(self.reads)])}


@pytest.mark.slow
def test_shards_of_a_task_that_ran_twice_are_deleted_though_its_samples_differ(
    tmp_path,
):
    path, source = tmp_path / "c.lk", Restless(tmp_path / "mended")
    with pytest.raises(DatasetError, match="not yet"):
        pack(source, path, executor=Backwards(), shard_bytes=30)
    unnamed = len(list(path.glob("*.h5"))) - len(list(path.glob(".building/0*.json")))
    assert unnamed > 0  # or nothing is shown

    (tmp_path / "mended").touch()
    pack(source, path, executor=Backwards(), shard_bytes=30)

    files = {file.name for file in path.iterdir() if not file.name.startswith(".")}
    assert files == {"manifest.json", *load_manifest(path).files}


def test_the_users_executor_goes_on_and_one_that_was_made_does_not(tmp_path):
    made = []

    def make():
        made.append(ProcessPoolExecutor(1))
        return made[-1]

    with threads(1) as executor:
        pack(list(range(9)), tmp_path / "a.lk", executor=executor)
        assert executor.submit(abs, -1).result() == 1
    pack(list(range(9)), tmp_path / "b.lk", executor=make)

    with pytest.raises(RuntimeError, match="after shutdown"):
        made[0].submit(abs, -1)


class Unsendable(torch.utils.data.Dataset):
    def __init__(self):
        self.numbers = (number for number in range(3))

    def __len__(self):
        return 3

    def __getitem__(self, row):
        return torch.tensor(row)


def test_a_dataset_that_cannot_be_pickled_is_packed_by_threads_alone(tmp_path):
    with threads(1) as executor:
        assert len(pack(Unsendable(), tmp_path / "a.lk", executor=executor)) == 3
    refused = pytest.raises(DatasetError, match="cannot be sent")
    with processes(1) as executor, refused as caught:
        pack(Unsendable(), tmp_path / "b.lk", executor=executor)

    assert "threads" in caught.value.fix


def test_workers_and_an_executor_exclude_each_other(tmp_path):
    with threads(1) as executor, pytest.raises(OptionError, match="workers=2"):
        pack([1], tmp_path / "c.lk", workers=2, executor=executor)
    with pytest.raises(ValueError, match="executor must be"):
        pack([1], tmp_path / "c.lk", executor="dask")


# What goes into which shard


@given(
    samples=st.integers(1, 10**9),
    sizes=st.lists(st.integers(0, 10**9), min_size=1, max_size=32),
    shard_bytes=st.integers(1, 1 << 40),
)
def test_a_plan_cuts_all_samples_into_shards_and_blocks_without_a_gap(
    samples, sizes, shard_bytes
):
    plan = ShardPlan.of(samples, sizes, shard_bytes)

    assert plan.rows_of(0).start == 0
    assert plan.rows_of(plan.shard_count - 1).stop == samples
    for shard in {0, plan.shard_count // 2, plan.shard_count - 1}:
        rows = plan.rows_of(shard)
        assert rows.stop == plan.rows_of(shard + 1).start
        assert len(rows) > 0
        if len(rows) < 10**5:
            spans = list(plan.spans_of(shard))
            blocks = [block for span in spans for block in plan.blocks_of(span)]
            assert [row for block in blocks for row in block] == list(rows)
            assert {plan.shard_of(row) for row in (rows[0], rows[-1])} == {shard}


@given(
    samples=st.integers(1, 500),
    sizes=st.lists(st.integers(1, 10**4), min_size=1, max_size=32),
    shard_bytes=st.integers(1, 10**6),
)
def test_shards_are_as_large_as_they_may_be_however_a_source_is_sorted(
    samples, sizes, shard_bytes
):
    plan = ShardPlan.of(samples, sizes, shard_bytes)

    parts = len(sizes)
    part_of_row = [
        part
        for part in range(parts)
        for _ in range(samples * part // parts, samples * (part + 1) // parts)
    ]
    expected_bytes = [min(sizes[part], shard_bytes) for part in part_of_row]
    for shard in range(plan.shard_count):
        rows = plan.rows_of(shard)
        total_bytes = sum(expected_bytes[row] for row in rows)
        assert total_bytes <= max(shard_bytes, 2 * max(expected_bytes)) + max(
            expected_bytes
        )


def test_a_source_that_is_sorted_by_size_has_shards_of_one_size(tmp_path):
    """A shard is held in memory until it is written."""
    samples = [{"x": np.zeros(row * row // 16)} for row in range(400)]
    total_bytes = sum(sample["x"].nbytes for sample in samples)

    pack(samples, tmp_path / "c.lk", workers=0, shard_bytes=total_bytes // 10)

    shards = load_manifest(tmp_path / "c.lk").shards
    assert 9 <= len(shards) <= 12
    assert max(shards.bytes) < 1.3 * total_bytes / 10


@given(samples=st.integers(1, 10**12))
def test_the_rows_that_are_looked_at_are_some_of_each_part(samples):
    rows = rows_to_look_at(samples)

    assert rows[0] == 0
    assert rows == sorted(set(rows))
    assert rows[-1] < samples
    assert len(rows) <= max(1, samples // 4)
    assert len(rows) <= max(8, samples // 32)
