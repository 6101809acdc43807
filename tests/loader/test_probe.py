"""What reading costs is measured without leaving anything open here."""

import os
import sys
import time

import pytest
import torch
from ended_children import pages_of_ended_children

from loaderkit import build_loader
from loaderkit.errors import LoaderError
from loaderkit.loader import probe

forks = pytest.mark.skipif(sys.platform in {"darwin", "win32"}, reason="no safe fork")


class KeepsItsFile(torch.utils.data.Dataset):
    """Opens a file with the first sample, and keeps it: one position to seek from."""

    def __init__(self, folder, wait_s=0.002):
        self.folder, self.wait_s = folder, wait_s
        self.opened = None

    def __len__(self):
        return 400

    def __getitem__(self, row):
        if self.opened is None:
            (self.folder / f"opened by {os.getpid()}").touch()
            self.opened = (self.folder / "raw").open("rb", buffering=0)
        time.sleep(self.wait_s)
        self.opened.seek(8 * row)
        return torch.frombuffer(bytearray(self.opened.read(8)), dtype=torch.int64)

    def __del__(self):
        if self.opened is not None:
            self.opened.close()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "raw").write_bytes(torch.arange(400).numpy().tobytes())
    return tmp_path


def readers(folder):
    return {int(file.name.split()[-1]) for file in folder.glob("opened by *")}


@pytest.mark.slow
@forks
def test_building_a_loader_opens_nothing_here(folder):
    before = pages_of_ended_children()

    loader = build_loader(KeepsItsFile(folder), batch_size=10, seed=0)

    # What the test below would see: a child was there.
    assert pages_of_ended_children() > before
    assert "a batch takes" in loader.plan.num_workers.reason
    assert readers(folder)
    assert os.getpid() not in readers(folder)
    if loader.num_workers:
        assert torch.equal(torch.cat(list(loader)).ravel(), torch.arange(400))
        loader.close()


@forks
def test_a_dataset_in_memory_is_measured_here():
    before = pages_of_ended_children()

    loader = build_loader(list(torch.arange(100.0)), batch_size=10)

    assert pages_of_ended_children() == before
    assert loader.plan.num_workers.reason.startswith("a whole epoch takes")


class Ends(torch.utils.data.Dataset):
    """Ends the process that reads it."""

    def __len__(self):
        return 10

    def __getitem__(self, row):
        os._exit(3)


class Fails(Ends):
    def __getitem__(self, row):
        raise KeyError(row)


@forks
@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Ends(), r"the process that read them died \(exit status 3\)"),
        (Fails(), "reading failed: Sample"),
    ],
)
def test_what_cannot_be_read_is_said(dataset, why):
    with pytest.raises(LoaderError, match=why):
        probe.probe(dataset, [0, 1], torch.utils.data.default_collate)
    assert build_loader(dataset).plan.num_workers.reason


class SlowSets(Ends):
    """Its samples take as long as a probe may, and cannot be joined."""

    def __getitem__(self, row):
        time.sleep(probe.PROBE_S)
        return {"x": {row}}


def test_slow_samples_that_cannot_be_joined_are_told_as_quick_ones_are():
    collate = build_loader([1]).collate_fn

    with pytest.raises(LoaderError, match="reading failed: The samples"):
        probe._measure_here(SlowSets(), range(4), collate)


@pytest.mark.slow
@forks
def test_a_sample_that_takes_too_long_is_given_up(folder, monkeypatch):
    # The limit itself is 10 s, of waiting.
    monkeypatch.setattr(probe, "_LONGEST_S", 0.3)

    loader = build_loader(KeepsItsFile(folder, wait_s=3600))

    reason = loader.plan.num_workers.reason
    assert "not measured: no sample was read within 300 ms" in reason


def test_a_copy_is_measured_where_processes_are_spawned(folder):
    dataset = KeepsItsFile(folder)

    copying = probe._measure_a_copy(
        dataset, range(10), torch.utils.data.default_collate
    )

    assert copying.samples
    assert dataset.opened is None


def test_a_large_dataset_is_not_copied(folder, monkeypatch):
    # The limit itself: so much would be made, pickled and read.
    monkeypatch.setattr(probe, "_MOST_COPIED_BYTES", 1000)
    dataset = KeepsItsFile(folder)
    dataset.table = torch.zeros(1000)

    with pytest.raises(LoaderError, match=r"over 0\.98 KiB"):
        probe._measure_a_copy(dataset, range(10), torch.utils.data.default_collate)


def test_what_cannot_be_sent_is_measured_itself(folder):
    dataset = KeepsItsFile(folder)
    dataset.function = lambda: None

    probe._measure_a_copy(dataset, range(10), torch.utils.data.default_collate)

    assert dataset.opened is not None


class OnADevice(torch.Tensor):
    """A tensor of a device that no other process, and not this one, can be sent."""

    def __reduce_ex__(self, protocol):
        pytest.fail("a batch that lies on a device was sent")


def test_a_batch_that_lies_on_a_device_is_not_sent():
    on_device = torch.ones(4, device="meta").as_subclass(OnADevice)

    measured = probe.probe([1, 2, 3, 4], range(4), lambda _: [on_device, torch.ones(6)])

    assert measured.device == "meta"
    assert measured.batch_bytes == 6 * 4
    assert measured.send_s == measured.receive_s == 0


class RefusesToTravel:
    def __reduce__(self):
        message = "it is bound to this process"
        raise ValueError(message)

    def __eq__(self, other):
        return type(other) is RefusesToTravel

    __hash__ = None


class TakesItsTime(torch.utils.data.Dataset):
    """Slow enough for workers to pay."""

    def __len__(self):
        return 2000

    def __getitem__(self, row):
        time.sleep(0.003)
        return row


@pytest.mark.many_cases(quick=6)
@forks
@pytest.mark.parametrize("batch_size", [4, 40], ids=["quick", "slow"])
@pytest.mark.parametrize(
    "make_batch",
    [
        pytest.param(lambda _: torch.ones(2, requires_grad=True) * 2, id="autograd"),
        pytest.param(lambda _: torch.ones(2).to_mkldnn(), id="opaque memory"),
        pytest.param(lambda rows: lambda: rows, id="function"),
        pytest.param(lambda rows: (row for row in rows), id="generator"),
        pytest.param(lambda _: RefusesToTravel(), id="class of the user's"),
    ],
)
def test_batches_that_cannot_leave_a_worker_are_made_here_as_by_torch(
    make_batch, batch_size
):
    """A batch of 40 takes longer to read than the probe may take."""
    options = {"batch_size": batch_size, "collate_fn": make_batch}
    loader = build_loader(TakesItsTime(), **options)

    batch = next(iter(loader))

    as_torch = torch.utils.data.DataLoader(TakesItsTime(), **options)
    assert type(batch) is type(next(iter(as_torch)))
    assert loader.plan.num_workers.value == 0
    assert "a batch cannot leave a worker" in loader.plan.num_workers.reason


class SlowDicts(TakesItsTime):
    def __getitem__(self, row):
        return {"x": super().__getitem__(row)}


def test_a_function_is_given_whole_batches_of_samples_that_are_slow():
    """One that takes its fields out, and counts on the size of the batch."""
    sizes = []

    def join(samples):
        sizes.append(len(samples))
        return [sample.pop("x") for sample in samples], lambda: None

    measured = probe.measure_reading(SlowDicts(), range(64), join)

    assert sizes == [64]
    assert "local object" in measured.unsendable
    assert 2 <= measured.samples < 64
    assert measured.fetch_s > 64 * 0.003


@forks
@pytest.mark.needs("two CPUs")
@pytest.mark.parametrize("batch_size", [4, 40], ids=["quick", "slow"])
def test_batches_that_can_leave_a_worker_are_made_by_workers(batch_size):
    def make_batch(rows):
        return os.getpid(), rows

    loader = build_loader(TakesItsTime(), batch_size=batch_size, collate_fn=make_batch)

    pid, rows = next(iter(loader))

    assert loader.plan.num_workers.value > 0
    assert pid != os.getpid()
    assert rows == list(range(batch_size))
