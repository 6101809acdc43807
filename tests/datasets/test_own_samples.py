"""Code that makes the samples of a cache does not wait for that cache."""

import asyncio
import functools
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from held_locks import call_when_logged

from loaderkit import SafeDataset, open_cache, pack
from loaderkit.datasets.pack import PackOptions
from loaderkit.errors import DatasetError

ASKS = {
    "len": len,
    "sample": lambda dataset: dataset[0],
    "rows": lambda dataset: dataset[:2],
    "batch": lambda dataset: dataset.batch([0, 1]),
    "sizes": lambda dataset: dataset.sizes(),
    "column": lambda dataset: dataset.column("x"),
    "loop": list,
    "same cache": lambda dataset: len(Asking("len", dataset.cache)),
    "another one's": lambda dataset: dataset.other[0],
    "pack": lambda dataset: pack([1], dataset.cache, workers=0, overwrite=True),
}
"""What ``load`` asks of its own dataset, or of the cache that it is packed to."""


class Asking(SafeDataset):
    """Asks itself for something in ``load``."""

    def __init__(self, question, cache, **options):
        self.question = question
        super().__init__(cache=cache, packing=PackOptions(**options))

    def keys(self):
        return range(4)

    def load(self, number):
        ASKS[self.question](self)
        return {"x": torch.full((2,), float(number))}

    @property
    def other(self):
        """A dataset that is made of this one's samples."""
        return MadeOf(self, cache=f"{self.cache}-other")


class MadeOf(SafeDataset):
    """Has the samples of another dataset."""

    def __init__(self, source, cache):
        self.source = source
        super().__init__(cache=cache, packing=PackOptions(workers=0))

    def keys(self):
        return range(4)

    def load(self, number):
        return self.source[number]


WAYS = ["this process", "workers", "threads", "store"]


def refuses_itself(way, folder, make):
    """Have a dataset packed in a way whose samples ask for it: that is told."""
    cache, options = folder / "c", {"workers": 0}
    if way == "store":
        cache = (folder / "store").as_uri()
    if way == "workers":
        options = {"workers": 1}
    with ThreadPoolExecutor(1) as threads:
        if way == "threads":
            options = {"executor": threads}
        dataset = make(cache, **options)

        with pytest.raises(DatasetError, match="by the code that makes its samples"):
            len(dataset)


@pytest.mark.long_cases
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("question", ASKS)
def test_load_that_asks_for_its_own_samples_is_told_so(tmp_path, question, way):
    refuses_itself(way, tmp_path, functools.partial(Asking, question))


def _in_a_thread(ask):
    error = []

    def run():
        try:
            ask()
        except DatasetError as raised:
            error.append(raised)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if error:
        raise error[0]


def _in_a_pool(ask):
    with ThreadPoolExecutor(2) as pool:
        pool.submit(ask).result()


def _in_an_event_loop(ask):
    async def wait():
        await asyncio.to_thread(ask)

    asyncio.run(wait())


def _in_a_thread_of_a_thread(ask):
    _in_a_thread(lambda: _in_a_pool(ask))


THREADS = [_in_a_thread, _in_a_pool, _in_an_event_loop, _in_a_thread_of_a_thread]


class AskingInAThread(Asking):
    """Asks itself for something in ``load``, from a thread that it starts."""

    def __init__(self, run, question, cache, **options):
        self.run = run
        super().__init__(question, cache, **options)

    def load(self, number):
        self.run(lambda: ASKS[self.question](self))
        return {"x": torch.full((2,), float(number))}


HAS_EVENTS_OF_THREADS = sys.version_info >= (3, 12)
"""Whether Python tells who starts a thread."""


@pytest.mark.many_cases(quick=8)
@pytest.mark.long_cases
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("question", ["len", "sample", "column", "another one's"])
@pytest.mark.parametrize("run", THREADS)
def test_a_thread_that_load_starts_is_told_so_too(tmp_path, run, question, way):
    is_known = way == "workers" or run is _in_an_event_loop  # which has the context
    if not is_known and not HAS_EVENTS_OF_THREADS:
        pytest.skip("before 3.12 a log line tells; see the next test")
    refuses_itself(way, tmp_path, functools.partial(AskingInAThread, run, question))


def test_a_thread_of_which_nothing_is_known_is_told_what_may_be_wrong(tmp_path):
    """Such as one of a pool that is older than the call of ``load``."""
    told = threading.Event()
    asking = []

    class OfAnOldPool(Asking):
        def load(self, number):
            if not asking:
                asking.append(pool.submit(len, self))
                told.wait()  # as a load that waits for the thread, but not for ever
            return {"x": number}

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        dataset = OfAnOldPool("len", tmp_path / "c", workers=0)
        with call_when_logged("waits for this thread", told.set) as lines:
            assert len(dataset) == 4
        assert asking[0].result() == 4
    assert "in load(), self.load(key) in place of self[row]" in lines[0]


def test_a_thread_that_load_has_left_running_reads_the_cache_afterwards(tmp_path):
    with ThreadPoolExecutor(1) as pool:

        class Computing(Asking):
            def load(self, number):
                return {"x": pool.submit(lambda: number).result()}

        dataset = Computing("len", tmp_path / "c", workers=0)
        assert len(dataset) == 4
        assert pool.submit(lambda: dataset[3]["x"]).result() == 3
        # It is packed again, by that thread.
        shutil.rmtree(dataset.cache)
        pool.submit(lambda: pack([7], dataset.cache, workers=0)).result()
        assert open_cache(tmp_path / "c")[0] == 7


def test_a_thread_of_others_waits_while_load_runs(tmp_path):
    """One that is started meanwhile, and not by ``load``, gets the samples."""
    loads, may_go_on = threading.Event(), threading.Event()

    class Slow(Asking):
        def load(self, number):
            loads.set()
            may_go_on.wait()
            return {"x": number}

    with ThreadPoolExecutor(2) as threads:
        packing = threads.submit(lambda: len(Slow("len", tmp_path / "c", workers=0)))
        loads.wait()
        reading = threads.submit(lambda: Slow("len", tmp_path / "c", workers=0)[3])
        may_go_on.set()

        assert (packing.result(), reading.result()) == (4, {"x": 3})


def test_an_iterable_that_packs_itself_is_told_so(tmp_path):
    def samples():
        yield len(pack(samples(), tmp_path / "c"))

    with pytest.raises(DatasetError, match="by the code that makes its samples"):
        pack(samples(), tmp_path / "c")


def test_load_may_have_another_cache_packed(tmp_path):
    first = pack([{"x": n} for n in range(4)], tmp_path / "first", workers=0)
    second = MadeOf(MadeOf(first, tmp_path / "second"), tmp_path / "third")

    assert [sample["x"] for sample in second] == [0, 1, 2, 3]


def test_a_thread_that_makes_no_samples_waits_for_the_one_that_does(tmp_path):
    first = pack([{"x": n} for n in range(4)], tmp_path / "first", workers=0)

    with ThreadPoolExecutor(3) as threads:
        lengths = threads.map(lambda _: len(MadeOf(first, tmp_path / "c")), range(3))

        assert list(lengths) == [4, 4, 4]
    assert open_cache(tmp_path / "c")[3]["x"] == 3


class Circular(Asking):
    """Asks itself for something in ``keys``."""

    def keys(self):
        ASKS[self.question](self)
        return range(4)


@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("question", ["len", "sample", "rows", "batch", "loop"])
def test_keys_that_ask_for_the_samples_are_told_so(tmp_path, question, has_cache):
    dataset = Circular(question, tmp_path / "c" if has_cache else None)

    for _ in range(2):
        with pytest.raises(DatasetError, match=r"Circular.keys\(\) asked Circular"):
            len(dataset)


def test_keys_may_be_those_of_another_dataset(tmp_path):
    class Same(MadeOf):
        def keys(self):
            return range(len(self.source))

    first = pack([{"x": n} for n in range(5)], tmp_path / "first", workers=0)

    assert len(Same(Same(first, tmp_path / "second"), tmp_path / "third")) == 5
