"""An error of a packing worker reaches the packing process, however it is made."""

import multiprocessing
import os
import pickle
import sys
import time

import pytest
import torch
from ended_children import pages_of_ended_children
from torch_geometric.data import Data

from loaderkit import open_cache, pack
from loaderkit.datasets import packing_workers
from loaderkit.datasets.block_readers import PackJob
from loaderkit.datasets.packing_failures import TaskFailure, pickle_or_nothing
from loaderkit.datasets.packing_workers import (
    _MOST_MESSAGE_BYTES,
    _answer_with,
    _open_answer,
)
from loaderkit.errors import DatasetError

needs_notes = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="errors have no notes before Python 3.11"
)


@pytest.fixture
def job(tmp_path):
    """What a worker does; its errors need no source."""
    folder = tmp_path / ".building"
    folder.mkdir()
    return PackJob(source=None, limit=1 << 20, folder=folder)


class TwoArgumentsError(Exception):
    """Pickles, and cannot be made again: its constructor wants more than its text."""

    def __init__(self, file, line):
        super().__init__(f"{file}:{line}")


class OpenFileError(Exception):
    """Holds what cannot be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.opened = (piece for piece in text)


class ExitingError(Exception):
    """Becomes something else than an error when it is made again."""

    def __reduce__(self):
        return str, ("no error",)


def answer_to(error, job):
    """Answer as a worker does that caught an error."""
    try:
        raise error
    except Exception as caught:  # noqa: BLE001 -- as a worker does
        return _answer_with(caught, job)


def raised_by(answer):
    """Take an answer as the packing process does."""
    return _open_answer(answer).rebuild()


def test_a_short_error_is_sent_in_one_message(job):
    error = ValueError("sample 7 is no molecule")

    answer = answer_to(error, job)

    assert 0 < len(answer.pickled) <= _MOST_MESSAGE_BYTES
    assert list(job.folder.iterdir()) == []
    again = raised_by(answer)
    assert type(again) is ValueError
    assert again.args == error.args


@needs_notes
def test_an_error_brings_its_traceback_as_a_note(job):
    again = raised_by(answer_to(ValueError("x"), job))

    [note] = again.__notes__
    assert note.startswith("In a packing worker:\nTraceback")
    assert "raise error" in note


def test_a_long_error_waits_in_a_file_and_arrives_whole(job):
    text = "sample 7: " + "x" * 100_000

    answer = answer_to(ValueError(text), job)

    assert answer.pickled == b""
    [file] = job.folder.iterdir()
    assert answer.file == str(file)
    # The name by which the next run finds and removes it.
    assert file.suffix == ".block"
    again = raised_by(answer)
    assert type(again) is ValueError
    assert str(again) == text


def test_an_error_of_ours_keeps_its_reason_and_its_fix(job):
    error = DatasetError("Sample 7 is empty.", why="its file is", fix="leave it out")

    again = raised_by(answer_to(error, job))

    assert (again.what, again.why, again.fix) == (error.what, error.why, error.fix)


@pytest.mark.parametrize(
    "error", [TwoArgumentsError("a.csv", 3), OpenFileError("a.csv:3"), ExitingError()]
)
def test_an_error_that_cannot_be_sent_is_told_by_its_traceback(job, error):
    again = raised_by(answer_to(error, job))

    assert type(again) is DatasetError
    assert type(error).__name__ in again.what
    assert again.what.startswith("A packing worker failed.\nTraceback")
    assert "raise error" in again.what
    assert again.why == "the error itself could not be sent to this process"
    assert "workers=0" in again.fix


# Where there is no room for the file


@pytest.fixture
def full(job):
    """A job whose folder takes no file, as on a full disk."""
    job.folder.rmdir()
    return job


@needs_notes
def test_without_room_an_error_is_sent_without_its_traceback(full):
    # Alone it fits into a message; its traceback, which repeats its text, does not.
    error = ValueError("y" * (_MOST_MESSAGE_BYTES // 2))

    answer = answer_to(error, full)

    assert len(answer.pickled) <= _MOST_MESSAGE_BYTES
    again = raised_by(answer)
    assert type(again) is ValueError
    assert str(again) == str(error)
    assert not hasattr(again, "__notes__")


@pytest.mark.parametrize("kind", [ValueError, OpenFileError])
def test_without_room_a_long_error_is_told_by_the_end_of_its_traceback(full, kind):
    error = kind("x" * 100_000 + " in row 7")

    answer = answer_to(error, full)

    assert len(answer.pickled) <= _MOST_MESSAGE_BYTES
    again = raised_by(answer)
    assert type(again) is DatasetError
    assert again.what.startswith("A packing worker failed.\n... xxx")
    assert again.what.endswith(" in row 7\n")


def test_a_text_of_four_bytes_a_letter_still_fits_one_message(full):
    answer = answer_to(ValueError("\N{GRINNING FACE}" * 100_000), full)

    assert len(answer.pickled) <= _MOST_MESSAGE_BYTES


# What is sent


def test_what_can_be_pickled_and_made_again_is_sent():
    again = pickle.loads(pickle_or_nothing(KeyError("a")))

    assert type(again) is KeyError
    assert again.args == ("a",)


@pytest.mark.parametrize("error", [TwoArgumentsError("a.csv", 3), OpenFileError("a")])
def test_what_would_fail_on_arrival_is_not_sent(error):
    assert pickle_or_nothing(error) == b""


@pytest.mark.parametrize("pickled", [b"", b"damaged", pickle.dumps("no error")])
def test_a_failure_that_holds_no_error_is_rebuilt_from_its_text(pickled):
    rebuilt = TaskFailure("Traceback: x", pickled).rebuild()

    assert type(rebuilt) is DatasetError
    assert "Traceback: x" in str(rebuilt)


def test_a_few_samples_in_memory_are_packed_without_processes(tmp_path):
    samples = [{"x": torch.full((3,), n)} for n in range(50)]
    before = pages_of_ended_children()

    pack(samples, tmp_path / "c")

    assert pages_of_ended_children() == before
    assert len(open_cache(tmp_path / "c")) == 50


def test_its_twin_with_a_worker_has_a_child(tmp_path):
    before = pages_of_ended_children()

    pack(CountsTo(50), tmp_path / "c", workers=1)

    assert pages_of_ended_children() > before


@pytest.mark.parametrize("workers", [None, 2])
def test_many_samples_in_memory_are_read_by_workers_too(tmp_path, workers):
    """With no time alone, the first span is read by a worker already."""
    samples = [{"x": torch.full((3,), n)} for n in range(200)]
    with pytest.MonkeyPatch.context() as patch:
        # Samples that take half a second to read would do, and take it.
        patch.setattr(packing_workers, "_ALONE_S", 0.0)
        pack(samples, tmp_path / "c", workers=workers)

    last = open_cache(tmp_path / "c")[199]
    assert last["x"].tolist() == [199] * 3


class AskedAboutSlowly(Data):
    """A graph of which one takes a second to be asked how it is joined."""

    folder, slow_number = None, None

    def __cat_dim__(self, key, value, *args, **kwargs):
        (self.folder / f"asked by {os.getpid()}").touch()
        if value[0, 0] == self.slow_number:
            time.sleep(1)
        return super().__cat_dim__(key, value, *args, **kwargs)


@pytest.mark.slow
@pytest.mark.skipif(
    multiprocessing.get_start_method() != "fork",
    reason="what lies in memory is sent to no worker that is started anew",
)
@pytest.mark.parametrize(
    ("slow_row", "numbers", "shard_bytes"),
    [(5, 3, 1 << 20), (60, 3, 1 << 20), (130, 3, 2_000), (70, 20_000, 1 << 24)],
    ids=["first span", "middle", "several shards", "spans with files"],
)
def test_what_was_read_before_workers_start_is_packed_as_by_one_process(
    tmp_path, slow_row, numbers, shard_bytes
):
    """Whatever waits in this process by then: nothing, spans, shards, large spans."""
    AskedAboutSlowly.folder, AskedAboutSlowly.slow_number = tmp_path, slow_row
    samples = [
        AskedAboutSlowly(x=torch.full((numbers, 1), float(n))) for n in range(160)
    ]

    pack(samples, tmp_path / "c", shard_bytes=shard_bytes)
    AskedAboutSlowly.slow_number = None
    processes = len(list(tmp_path.glob("asked by *")))
    pack(samples, tmp_path / "wanted", workers=0, shard_bytes=shard_bytes)

    assert names_of_shards(tmp_path / "c") == names_of_shards(tmp_path / "wanted")
    assert processes > 1


def names_of_shards(cache):
    """Name the files, which are called by what is in them."""
    return sorted(file.name for file in cache.glob("*.h5"))


class KeepsItsFile(torch.utils.data.Dataset):
    """Opens a file with the first sample, and keeps it: one position to seek from."""

    def __init__(self, folder, fails_at=None):
        self.folder, self.fails_at = folder, fails_at
        self.opened = None

    def __len__(self):
        return 3000

    def __getitem__(self, row):
        if row == self.fails_at:
            raise ValueError(row)
        if self.opened is None:
            (self.folder / f"opened by {os.getpid()}").touch()
            self.opened = (self.folder / "raw").open("rb", buffering=0)
        self.opened.seek(8 * row)
        return torch.frombuffer(bytearray(self.opened.read(8)), dtype=torch.int64)


def readers(folder):
    return {int(file.name.split()[-1]) for file in folder.glob("opened by *")}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [None, 1, 3])
def test_the_users_code_runs_in_workers_alone(tmp_path, workers):
    wanted = torch.arange(3000)
    (tmp_path / "raw").write_bytes(wanted.numpy().tobytes())
    path = tmp_path / "cache"
    options = {"workers": workers, "shard_bytes": 4000}

    with pytest.raises(DatasetError, match="2,500"):
        pack(KeepsItsFile(tmp_path, fails_at=2500), path, **options)
    cache = pack(KeepsItsFile(tmp_path), path, **options)  # goes on with what is there

    assert torch.equal(torch.stack(list(cache)).ravel(), wanted)
    assert os.getpid() not in readers(tmp_path)


def test_without_workers_it_runs_here(tmp_path):
    (tmp_path / "raw").write_bytes(bytes(24000))

    data = KeepsItsFile(tmp_path)
    pack(data, tmp_path / "cache", workers=0)
    data.opened.close()

    assert readers(tmp_path) == {os.getpid()}


MODULE_OF_A_SAMPLE = """
import typing

class Reading(typing.NamedTuple):
    volts: float
"""


class ImportsWithTheSample(torch.utils.data.Dataset):
    """Imports the module of its samples' class when it reads one."""

    def __len__(self):
        return 5

    def __getitem__(self, row):
        from a_module_of_readings import Reading

        return Reading(float(row))


def test_a_class_that_only_workers_have_imported_is_opened(tmp_path, monkeypatch):
    (tmp_path / "a_module_of_readings.py").write_text(MODULE_OF_A_SAMPLE)
    monkeypatch.syspath_prepend(tmp_path)

    cache = pack(ImportsWithTheSample(), tmp_path / "cache", workers=1)

    assert type(cache[3]).__name__ == "Reading"
    assert cache[3].volts == 3.0


class CountsTo(torch.utils.data.Dataset):
    def __init__(self, last):
        self.last = last

    def __len__(self):
        return self.last

    def __getitem__(self, row):
        return torch.tensor(row)


def pack_and_tell(path, workers, sender):
    try:
        sender.send(len(pack(CountsTo(5), path, workers=workers)))
    except DatasetError as error:
        sender.send(error.what)


def answer_of_daemon(path, workers):
    """Pack in a daemonic process, which may have no children; return what it sends."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    daemon = fork.Process(
        target=pack_and_tell, args=(path, workers, sender), daemon=True
    )
    daemon.start()
    answer = receiver.recv()
    daemon.join()
    return answer


@pytest.mark.parametrize("workers", [None, 0])
def test_a_daemon_packs_without_workers(tmp_path, workers):
    assert answer_of_daemon(tmp_path / "cache", workers) == 5


def test_a_daemon_that_is_asked_for_workers_is_an_error(tmp_path):
    assert answer_of_daemon(tmp_path / "cache", 2).startswith("2 packing")


class WaitingForAnother(torch.utils.data.Dataset):
    """Each process reads its first sample when two processes have come to that."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 512  # samples are looked at in two tasks

    def __getitem__(self, row):
        (self.folder / str(os.getpid())).touch()
        while len(list(self.folder.iterdir())) < 2:
            time.sleep(0.001)
        return {"x": row}


@pytest.mark.needs("two CPUs")
@pytest.mark.slow
def test_a_worker_that_takes_its_time_is_not_the_only_one(tmp_path):
    folder = tmp_path / "processes"
    folder.mkdir()

    pack(WaitingForAnother(folder), tmp_path / "c.lk")

    assert len(list(folder.iterdir())) >= 2
