"""Streams are packed in order, whoever reads their spans.

The oracles are Python's own iteration, and packing without any process: ``workers=0``.
"""

import contextlib
import fcntl
import itertools
import multiprocessing
import os
import random
import signal
import struct
import subprocess
import sys
import termios
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from failing_calls import files_of, finished_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

import loaderkit
from loaderkit import extend, open_cache, pack
from loaderkit.datasets.shared_iterators import are_held_elsewhere, iterators_behind
from loaderkit.datasets.streams import SpanSource
from loaderkit.errors import CacheError, DatasetError, OptionError

FORK = multiprocessing.get_context("fork")


def equal(sample, other):
    return repr(sample) == repr(other)


class DrawnSpans:
    """Spans of drawn lengths, some of them empty, with rare ways of being built."""

    def __init__(self, seed, lengths, rarity):
        self.seed, self.lengths, self.rarity = seed, lengths, rarity

    def __call__(self, span, spans):
        assert spans == len(self.lengths)
        for index in range(self.lengths[span]):
            chance = random.Random(hash((self.seed, span, index)))
            sample = {
                "x": torch.full((chance.randrange(1, 9),), 100 * span + index),
                "place": (span, index),
            }
            way = chance.randrange(self.rarity)
            if way == 0:
                sample["only here"] = torch.ones(2)
            elif way == 1:
                sample["a text"] = f"of span {span}"
            elif way == 2:
                sample["x"] = torch.ones(3)
            yield sample


class WithRandomNumbers(DrawnSpans):
    """Each sample draws numbers, and so does the beginning of a span."""

    def __call__(self, span, spans):
        first = torch.rand(1)
        for sample in super().__call__(span, spans):
            numbers = (torch.rand(2), np.random.standard_normal(2), random.random())
            yield {**sample, "first": first, "drawn": numbers}


def packed_files(source, path, **options):
    torch.manual_seed(3)
    pack(source, path, **options)
    assert not (path / ".building").exists()
    return files_of(path)


MAKERS = {
    "workers": lambda workers: contextlib.nullcontext(None),
    "threads": ThreadPoolExecutor,
    "processes": ProcessPoolExecutor,
}


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=7).filter(any),
    rarity=st.sampled_from([3, 20, 200]),
    shard_bytes=st.sampled_from([300, 3_000, 1 << 20]),
    who=st.sampled_from(sorted(MAKERS)),
    workers=st.integers(1, 3),
)
@pytest.mark.slow
def test_spans_are_packed_in_order_and_the_bytes_are_the_same_whoever_packs(
    tmp_path_factory, seed, lengths, rarity, shard_bytes, who, workers
):
    path = tmp_path_factory.mktemp("packed")
    spans = len(lengths)
    source = WithRandomNumbers(seed, lengths, rarity)
    options = {"spans": spans, "shard_bytes": shard_bytes}
    wanted = packed_files(source, path / "here", workers=0, **options)

    with MAKERS[who](workers) as executor:
        if executor is None:
            options["workers"] = workers
        packed = packed_files(source, path / "there", executor=executor, **options)

    assert packed == wanted
    plain = DrawnSpans(seed, lengths, rarity)
    in_order = [sample for span in range(spans) for sample in plain(span, spans)]
    cached = list(open_cache(path / "there"))
    for sample in cached:
        del sample["first"], sample["drawn"]
    assert list(map(repr, cached)) == list(map(repr, in_order))


@pytest.mark.slow
def test_shards_of_spans_that_are_built_otherwise_are_numbered_again(tmp_path, caplog):
    """Twin: without that, the law above would hold of nothing."""
    source = DrawnSpans(seed=1, lengths=[40] * 6, rarity=10)

    with caplog.at_level("INFO", "loaderkit"):
        cache = pack(source, tmp_path / "c.lk", spans=6, shard_bytes=300)

    assert "shards again" in caplog.text
    assert cache.key(41) == "1/1"


@pytest.mark.slow
def test_numbers_that_samples_draw_follow_from_the_seed_and_the_place(tmp_path):
    source = WithRandomNumbers(0, [5, 5, 5], rarity=100)

    torch.manual_seed(3)
    cache = pack(source, tmp_path / "a.lk", spans=3, workers=2)
    torch.manual_seed(4)
    other = pack(source, tmp_path / "b.lk", spans=3, workers=0)

    drawn = [sample["drawn"][2] for sample in cache]
    assert len(set(drawn)) == 15
    assert not set(drawn) & {sample["drawn"][2] for sample in other}


# What can be iterated over


class Numbers(IterableDataset):
    def __iter__(self):
        return ({"x": torch.tensor([n])} for n in range(20))


class NumbersWithLength(Numbers):
    def __len__(self):
        return 20


def numbers():
    yield from Numbers()


def text_file(folder):
    (folder / "lines.txt").write_text("a\nb\n")
    return (folder / "lines.txt").open()


def in_memory(folder):  # noqa: ARG001
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [[n] for n in range(20)]})
    return rows.to_iterable_dataset(num_shards=2).with_format("torch")


def streaming_files(folder):
    datasets = pytest.importorskip("datasets")
    (folder / "data.jsonl").write_text('{"x": [0]}\n{"x": [1]}\n')
    cache = str(folder / "hf")
    return datasets.load_dataset(
        "json",
        data_files=str(folder / "data.jsonl"),
        split="train",
        streaming=True,
        cache_dir=cache,
    )


def tar_of_numbers(file, rows):
    import io
    import tarfile

    with tarfile.open(file, "w") as archive:
        for row in rows:
            member = tarfile.TarInfo(f"{row:04}.txt")
            content = str(row).encode()
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def tars(folder):
    webdataset = pytest.importorskip("webdataset")
    tar_of_numbers(folder / "0.tar", range(10))
    tar_of_numbers(folder / "1.tar", range(10, 20))
    files = [str(folder / "0.tar"), str(folder / "1.tar")]
    return webdataset.WebDataset(files, shardshuffle=False).decode()


ITERABLES = {
    "a generator": lambda folder: numbers(),
    "an IterableDataset": lambda folder: Numbers(),
    "one that says its length": lambda folder: NumbersWithLength(),
    "zip": lambda folder: zip(range(5), "abcde", strict=True),
    "a view of a dict": lambda folder: {1: "a", 2: "b"}.values(),
    "an open file": text_file,
    "Hugging Face's, in memory": in_memory,
    "Hugging Face's, streamed": streaming_files,
    "WebDataset": tars,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("kind", sorted(ITERABLES))
def test_whatever_can_be_iterated_over_is_packed_in_order(tmp_path, kind):
    (tmp_path / "twice").mkdir()
    wanted = list(ITERABLES[kind](tmp_path / "twice"))

    cache = pack(ITERABLES[kind](tmp_path), tmp_path / "c.lk", shard_bytes=100)

    assert wanted
    if kind == "WebDataset":  # samples have the archive's path in them
        wanted = [sample["txt"] for sample in wanted]
        assert cache["txt"] == wanted
    else:
        assert list(map(repr, cache)) == list(map(repr, wanted))
    assert cache.key(len(wanted) - 1) == str(len(wanted) - 1)


def test_a_span_of_tars_is_read_by_each_worker(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    files = [str(tmp_path / f"{number}.tar") for number in range(4)]
    for number, file in enumerate(files):
        tar_of_numbers(file, range(10 * number, 10 * number + 10))

    def span_of_tars(span, spans):
        return webdataset.WebDataset(files[span::spans], shardshuffle=False).decode()

    cache = pack(span_of_tars, tmp_path / "c.lk", spans=2, workers=2)

    even, odd = [*range(10), *range(20, 30)], [*range(10, 20), *range(30, 40)]
    assert [int(text) for text in cache["txt"]] == even + odd


def test_a_span_of_a_streamed_dataset_is_read_by_each_worker(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [[n] for n in range(20)]})
    stream = rows.to_iterable_dataset(num_shards=4).with_format("torch")

    def shard(span, spans):
        return stream.shard(num_shards=spans, index=span)

    cache = pack(shard, tmp_path / "c.lk", spans=4, workers=0)

    assert sorted(cache["x"].flatten().tolist()) == list(range(20))


WHAT_SPANS_MAY_BE = {
    "a list": lambda span, spans: [{"x": span}] * 2,
    "a map-style dataset": lambda span, spans: TensorDataset(torch.full((2,), span)),
    "an iterator": lambda span, spans: iter([{"x": span}] * 2),
    "a partial": partial(lambda value, span, spans: [{"x": span + value}] * 2, 0),
}


@pytest.mark.parametrize("kind", sorted(WHAT_SPANS_MAY_BE))
def test_a_span_is_whatever_holds_samples(tmp_path, kind):
    cache = pack(WHAT_SPANS_MAY_BE[kind], tmp_path / "c.lk", spans=3, workers=0)

    values = [int(next(iter(torch.utils._pytree.tree_leaves(s)))) for s in cache]
    assert values == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "gave None, which cannot be iterated over"),
        (3, "gave 3, which cannot"),
        ("abc", "A path is no dataset"),
        (torch.nn.Linear(1, 1), "it is a model"),
    ],
)
def test_a_span_that_holds_no_samples_is_named(tmp_path, given, words):
    def source(span, spans):  # noqa: ARG001
        return given if span == 1 else [{"x": 1}]

    with pytest.raises(DatasetError, match="Span 1 of 3") as caught:
        pack(source, tmp_path / "c.lk", spans=3, workers=0)

    assert words in str(caught.value)


# Spans that would read one iterator


def samples_of_iterator():
    return ({"x": torch.tensor([row])} for row in range(12))


class GivesItsOwn:
    """Every span reads the iterator that it holds, in one way or another."""

    def __init__(self, wrap=lambda rows, span, spans: rows):
        self.rows, self.wrap = samples_of_iterator(), wrap

    def __call__(self, span, spans):
        return self.wrap(self.rows, span, spans)


class GivesWhatItBegan(GivesItsOwn):
    rows = None

    def __init__(self):
        pass

    def __call__(self, span, spans):  # noqa: ARG002
        self.rows = self.rows or samples_of_iterator()
        return self.rows


class IteratesOverItsOwn(GivesItsOwn):
    def __call__(self, span, spans):  # noqa: ARG002
        return self

    def __iter__(self):
        return self.rows


def every_nth(rows, span, spans):
    for number, row in enumerate(rows):
        if number % spans == span:
            yield row


SHARED = {
    "itself": GivesItsOwn,
    "begun late": GivesWhatItBegan,
    "of an iterable": IteratesOverItsOwn,
    "islice": lambda: GivesItsOwn(
        lambda rows, n, of: itertools.islice(rows, n, None, of)
    ),
    "map": lambda: GivesItsOwn(lambda rows, n, of: map(dict, rows)),
    "zip": lambda: GivesItsOwn(
        lambda rows, n, of: (row for _, row in zip(range(9), rows, strict=False))
    ),
    "a generator": lambda: GivesItsOwn(every_nth),
    "partial": lambda: partial(lambda rows, n, of: rows, samples_of_iterator()),
}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", sorted(SHARED))
def test_spans_that_would_read_one_iterator_are_told(tmp_path, kind, workers):
    """Without workers the first would take all samples; each worker has a copy."""
    with pytest.raises(DatasetError, match="read the same iterator") as caught:
        pack(SHARED[kind](), tmp_path / "c.lk", spans=4, workers=workers)

    assert "without spans" in caught.value.fix
    again = pack(itertools.islice(samples_of_iterator(), 8), tmp_path / "c.lk")
    assert len(again) == 8


def test_spans_of_one_iterator_are_refused_each_time_they_are_asked_for():
    source = SpanSource(GivesItsOwn(), 4)

    for _ in range(2):
        with pytest.raises(DatasetError, match="read the same iterator"):
            source.iterate(0)


FRESH = {
    "generator": lambda rows: (row for row in rows),
    "map": lambda rows: map(str, rows),
    "zip": lambda rows: zip(rows, range(3), strict=False),
    "islice of enumerate": lambda rows: itertools.islice(enumerate(rows), 2),
}


@pytest.mark.parametrize("kind", sorted(FRESH))
def test_an_iterator_that_was_just_made_is_held_by_none_but_its_own_parts(kind):
    fresh = iterators_behind(FRESH[kind](iter([1, 2, 3])))
    rows = iter([1, 2, 3])
    holder = [rows]
    shared = iterators_behind(FRESH[kind](rows))

    assert len(fresh) > 1
    assert not are_held_elsewhere(fresh)
    assert are_held_elsewhere(shared), holder


class DrawsAndHolds:
    """Draws a number as it is called, and holds what it gave."""

    def __init__(self):
        self.given = []

    def __call__(self, span, spans):  # noqa: ARG002
        self.given.append(iter([random.random()]))
        return self.given[-1]


def test_a_function_that_is_called_again_draws_the_same_numbers():
    random.seed(1)
    expected = random.random()

    random.seed(1)
    source = SpanSource(DrawsAndHolds(), 4)

    assert next(source.iterate(0)) == expected


class HasOneForEach:
    """Iterators that are held, and read by one span each."""

    def __init__(self):
        rows = list(samples_of_iterator())
        self.iterators = [iter(rows[span::4]) for span in range(4)]

    def __call__(self, span, spans):  # noqa: ARG002
        return self.iterators[span]


class ClosesTheLast:
    """An iterator that is held, and of use until the next span begins."""

    last = None

    def __call__(self, span, spans):
        if self.last is not None:
            self.last.close()
        rows = itertools.islice(samples_of_iterator(), span, None, spans)
        self.last = (row for row in rows)
        return self.last


@pytest.mark.parametrize("kind", [HasOneForEach, ClosesTheLast])
def test_iterators_that_are_held_for_one_span_each_are_read(tmp_path, kind):
    cache = pack(kind(), tmp_path / "c.lk", spans=4, workers=0)

    assert sorted(cache["x"].flatten().tolist()) == list(range(12))


# What cannot be packed


def no_samples(span, spans):  # noqa: ARG001
    return []


@pytest.mark.parametrize(
    ("source", "options", "error", "words"),
    [
        ([1, 2], {"spans": 2}, OptionError, "leave spans out"),
        (Numbers(), {"spans": 2}, OptionError, "An IterableDataset|A Numbers"),
        (no_samples, {"spans": 0}, OptionError, "spans"),
        (no_samples, {"spans": 2.5}, OptionError, "spans"),
        (no_samples, {}, DatasetError, "spans=8"),
        (no_samples, {"spans": 3}, DatasetError, "none of 3 spans has a sample"),
        (iter(()), {}, DatasetError, "nothing to pack"),
        (numbers(), {"workers": 2}, DatasetError, "read by one process"),
        (numbers(), {"executor": ThreadPoolExecutor}, DatasetError, "one process"),
        ({1, 2}, {}, DatasetError, "order is not fixed"),
    ],
)
def test_what_cannot_be_packed_says_what_to_do(tmp_path, source, options, error, words):
    with pytest.raises(error, match=words):
        pack(source, tmp_path / "c.lk", **options)

    assert not (tmp_path / "c.lk" / "manifest.json").exists()


# Errors, deaths, going on


class Failing:
    """Fails at some places of spans, until a file is there."""

    def __init__(self, folder, failing=(), deaths=()):
        self.folder, self.failing, self.deaths = folder, failing, deaths

    def __call__(self, span, spans):  # noqa: ARG002
        for index in range(60):
            place = (span, index)
            if place in self.failing and not (self.folder / "mended").exists():
                msg = f"no atoms at {place}"
                raise ValueError(msg)
            if place in self.deaths:
                died = self.folder / f"died at {place}"
                if not died.exists():
                    died.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            yield {"x": torch.full((20,), 100 * span + index)}


def place_of(cache):
    return [int(sample["x"][0]) for sample in cache]


WANTED = [100 * span + index for span in range(6) for index in range(60)]


@pytest.mark.slow
@pytest.mark.parametrize("who", sorted(MAKERS))
def test_an_error_names_the_span_and_the_others_are_packed(tmp_path, who):
    source, path = Failing(tmp_path, [(1, 30), (4, 7)]), tmp_path / "c.lk"
    with MAKERS[who](2) as executor:
        options = {"spans": 6, "shard_bytes": 2_000, "executor": executor}
        if executor is None:
            options["workers"] = 2
        failing = pytest.raises(DatasetError, match="Sample 30 of span 1 of 6")
        with failing as caught:
            pack(source, path, **options)
        finished = {file.name for file in path.glob("*.h5")}
        (tmp_path / "mended").touch()
        cache = pack(source, path, **options)

    assert "ValueError: no atoms" in str(caught.value)
    assert place_of(cache) == WANTED
    assert finished <= {file.name for file in path.glob("*.h5")}
    assert len(finished) > 0


def test_an_error_of_an_iterable_names_the_sample(tmp_path):
    def samples():
        yield {"x": 1}
        yield {"x": 1 / 0}

    with pytest.raises(DatasetError, match="Sample 1 of the generator") as caught:
        pack(samples(), tmp_path / "c.lk")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

    with pytest.raises(DatasetError, match="Sample 0 of the list_iterator"):
        pack(iter([object()]), tmp_path / "c.lk")


@pytest.mark.slow
@pytest.mark.parametrize("who", ["workers", "processes"])
def test_a_worker_that_dies_is_replaced(tmp_path, who):
    source = Failing(tmp_path, deaths=[(1, 30), (1, 50), (5, 1)])
    options = {"workers": 2}
    if who == "processes":
        options = {"executor": lambda: ProcessPoolExecutor(2)}

    cache = pack(source, tmp_path / "c.lk", spans=6, shard_bytes=2_000, **options)

    assert place_of(cache) == WANTED
    assert len(list(tmp_path.glob("died*"))) == 3


class DiesBesideAnother(Failing):
    """Span 1 waits, begun, until span 5 has died; then it dies twice by itself."""

    def __call__(self, span, spans):
        for sample in super().__call__(span, spans):
            place = int(sample["x"][0])
            deadline = time.monotonic() + 60
            while place == 110 and not (self.folder / "died at (5, 1)").exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield sample


@pytest.mark.slow
def test_what_another_task_has_lost_is_not_counted_against_a_task(tmp_path):
    source = DiesBesideAnother(tmp_path, deaths=[(1, 30), (1, 50), (5, 1)])
    options = {"spans": 6, "shard_bytes": 2_000}

    cache = pack(
        source, tmp_path / "c.lk", executor=lambda: ProcessPoolExecutor(2), **options
    )

    assert place_of(cache) == WANTED
    assert len(list(tmp_path.glob("died*"))) == 3


class DiesAlways(Failing):
    def __call__(self, span, spans):
        for sample in super().__call__(span, spans):
            if int(sample["x"][0]) == 220:
                os.kill(os.getpid(), signal.SIGKILL)
            yield sample


@pytest.mark.slow
@pytest.mark.parametrize("who", ["workers", "processes"])
def test_a_span_that_costs_each_worker_is_named(tmp_path, who):
    options = {"workers": 2}
    if who == "processes":
        options = {"executor": lambda: ProcessPoolExecutor(2)}

    with pytest.raises(DatasetError, match=r"while it .* span 2 of 6") as caught:
        pack(DiesAlways(tmp_path), tmp_path / "c.lk", spans=6, **options)

    assert "out of memory" in caught.value.why


class FromFiles:
    """Each span is a file; notes which spans are read to their end."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, span, spans):  # noqa: ARG002
        values = np.load(self.folder / f"{span}.npy")
        for value in values:
            time.sleep(float(os.environ.get("PAUSE_S", "0")))
            yield {"x": np.full(30, value)}
        with (self.folder / "log").open("a") as file:
            file.write(f"{span} ")


def files_with_numbers(folder):
    folder.mkdir()
    for span in range(6):
        np.save(folder / f"{span}.npy", np.arange(10) + 100 * span)
    return folder


def pack_until_killed(source, path, workers, shards):
    """Pack in another process, which is killed when so many shards are written."""

    def run():
        os.setsid()
        os.environ["PAUSE_S"] = "0.005"
        torch.manual_seed(3)
        pack(source, path, spans=6, shard_bytes=1_000, workers=workers)

    process = FORK.Process(target=run)
    process.start()
    # A shard is finished when its note stands, behind its file.
    notes = path / ".building"
    while len(list(notes.glob("[0-9]*.json"))) < shards and process.is_alive():
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode


@pytest.mark.long_cases
@pytest.mark.parametrize("shards", [1, 4, 8, 11])
@pytest.mark.parametrize(("workers", "again"), [(0, 0), (2, 0), (2, 2), (1, 2)])
@pytest.mark.slow
def test_a_killed_run_is_gone_on_with(tmp_path, workers, shards, again):
    source = FromFiles(files_with_numbers(tmp_path / "data"))
    options = {"spans": 6, "shard_bytes": 1_000}
    wanted = packed_files(source, tmp_path / "a", **options)

    killed = pack_until_killed(source, tmp_path / "b", workers, shards)
    packed = packed_files(source, tmp_path / "b", workers=again, **options)

    assert killed == -signal.SIGKILL
    assert packed == wanted


@pytest.mark.slow
def test_a_span_that_had_ended_is_not_read_again_where_its_file_is_known(tmp_path):
    data, path = files_with_numbers(tmp_path / "data"), tmp_path / "c.lk"
    source = FromFiles(data)
    killed = pack_until_killed(source, path, workers=0, shards=9)
    assert killed == -signal.SIGKILL
    ended = (data / "log").read_text().split()
    shards = finished_shards(path)

    pack(source, path, spans=6, shard_bytes=1_000, workers=0)

    assert ended
    assert len(shards) >= 9
    assert (data / "log").read_text().split() == [str(span) for span in range(6)]
    # What was written of the span that had not ended is found again too.
    kept = {file.name: file.stat().st_ino for file in path.glob("*.h5")}
    assert kept.items() >= shards.items()


@pytest.mark.slow
def test_where_a_file_has_changed_all_spans_are_read_again(tmp_path, caplog):
    data, path = files_with_numbers(tmp_path / "data"), tmp_path / "c.lk"
    source = FromFiles(data)
    pack_until_killed(source, path, workers=0, shards=9)
    np.save(data / "0.npy", np.arange(7))

    cache = pack(source, path, spans=6, shard_bytes=1_000, workers=0)

    assert [int(sample["x"][0]) for sample in cache][:8] == [*range(7), 100]
    assert len(cache) == 57
    assert "files have changed" in caplog.text
    assert files_of(path).keys() == {file.name for file in path.iterdir()} - {".lock"}


class Restless:
    """Gives other samples each time that it is called."""

    calls = itertools.count(1)

    def __call__(self, span, spans):  # noqa: ARG002
        call = next(self.calls)
        for _ in range(10 * call):
            yield {"x": np.full(30, call)}
        if call == 1:
            msg = "not yet"
            raise ValueError(msg)


def test_samples_that_nothing_shows_to_be_the_same_are_read_again(tmp_path):
    with pytest.raises(DatasetError, match="not yet"):
        pack(Restless(), tmp_path / "c.lk", spans=1, workers=0, shard_bytes=1_000)
    assert list((tmp_path / "c.lk").glob("*.h5"))

    cache = pack(Restless(), tmp_path / "c.lk", spans=1, workers=0, shard_bytes=1_000)

    assert {int(sample["x"][0]) for sample in cache} == {2}
    assert len(list((tmp_path / "c.lk").glob("*.h5"))) == len(
        cache._loaderkit.opened.store.manifest.shards
    )


def test_a_generator_that_was_killed_is_read_again_and_written_once(tmp_path):
    def samples(stop):
        for number in range(stop):
            yield {"x": np.full(30, number)}
        if stop < 40:
            msg = "the connection broke"
            raise ConnectionError(msg)

    path = tmp_path / "c.lk"
    with pytest.raises(DatasetError, match="connection broke"):
        pack(samples(25), path, shard_bytes=1_000)
    shards = {file.name: file.stat().st_ino for file in path.glob("*.h5")}

    pack(samples(40), path, shard_bytes=1_000)

    kept = {file.name: file.stat().st_ino for file in path.glob("*.h5")}
    assert len(shards) > 3
    assert kept.items() >= shards.items()


# What else packs


@pytest.mark.slow
def test_spans_are_added_to_a_cache_and_packed_into_a_store(tmp_path):
    source = DrawnSpans(seed=1, lengths=[4, 0, 3], rarity=100)
    pack(source, tmp_path / "c.lk", spans=3)

    grown = extend(tmp_path / "c.lk", source, spans=3)
    grown = extend(grown, source(0, 3))

    place = [tuple(sample["place"]) for sample in grown]
    once = [(0, 0), (0, 1), (0, 2), (0, 3), (2, 0), (2, 1), (2, 2)]
    assert place == [*once, *once, *once[:4]]

    url = f"file://{tmp_path}/store"
    stored = pack(source, url, spans=3, mirror=tmp_path / "mirror")
    assert [tuple(sample["place"]) for sample in stored] == once


@pytest.mark.slow
def test_the_bar_says_that_the_length_is_not_known():
    script = """
import loaderkit, tempfile
folder = tempfile.mkdtemp()
loaderkit.pack(({"x": n} for n in range(2_000)), folder + "/a.lk")
loaderkit.pack(lambda span, spans: [{"x": 1}] * 5, folder + "/b.lk", spans=3, workers=0)
"""
    # A bar is drawn where stderr is a terminal.
    terminal, ours = os.openpty()
    # A bar is as wide as the terminal, which has no width before it is told one.
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    run = subprocess.run([sys.executable, "-c", script], stderr=ours, check=False)
    os.close(ours)
    drawn = b""
    with contextlib.suppress(OSError):  # the other side is closed
        while part := os.read(terminal, 1 << 16):
            drawn += part
    os.close(terminal)

    assert run.returncode == 0
    text = drawn.decode()
    assert "2000 samples" in text
    assert "length unknown" in text
    assert "3 of 3 spans" in text
    assert "15 samples" in text


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_a_stream_that_another_process_packs_meanwhile_is_compared(tmp_path, same):
    path, begun = tmp_path / "c.lk", FORK.Event()

    def slow_numbers():
        for sample in Numbers():
            begun.set()
            time.sleep(0.02)
            yield sample

    other = FORK.Process(target=pack, args=(slow_numbers(), path))
    other.start()
    begun.wait()

    if same:
        assert len(pack(numbers(), path)) == 20
    else:
        with pytest.raises(CacheError, match="other samples"):
            pack(itertools.islice(numbers(), 19), path)
    other.join()


@pytest.mark.slow
def test_a_cache_of_a_stream_is_verified_and_joined_like_any_other(tmp_path):
    source = DrawnSpans(seed=5, lengths=[30, 20], rarity=8)
    streamed = pack(source, tmp_path / "a.lk", spans=2, shard_bytes=300)

    both = loaderkit.concat([tmp_path / "a.lk", tmp_path / "a.lk"], tmp_path / "b.lk")

    assert list(map(repr, both)) == 2 * list(map(repr, streamed))
    assert loaderkit.verify(tmp_path / "a.lk") is not None


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_stream_that_gives_nothing_leaves_no_half_packed_cache(
    tmp_path, error, overwrite
):
    path = tmp_path / "c.lk"
    if overwrite:
        loaderkit.pack([{"x": 1}], path, workers=0)

    def stream():
        if error is not None:
            raise error
        yield from ()

    with pytest.raises(error or DatasetError):
        loaderkit.pack(stream(), path, overwrite=overwrite)

    assert not (path / ".building").exists()
    if overwrite:
        assert len(loaderkit.open_cache(path)) == 1
    else:
        with pytest.raises(CacheError, match="There is no cache at"):
            loaderkit.open_cache(path)
    cache = loaderkit.pack(iter([{"x": 1}] * 2), path, overwrite=True)
    assert len(cache) == 2
