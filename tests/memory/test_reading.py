"""``read_memory`` never raises; meters and timelines keep what it read."""

import json
import threading
import time

import pandas as pd
import pytest
import torch

import loaderkit
from loaderkit.memory.counters import COUNTERS
from loaderkit.memory.tensors import live_tensors

MIB = 1 << 20


@pytest.mark.parametrize("every_s", [None, 60.0])
def test_a_block_shorter_than_the_readings_is_read_at_both_ends(every_s):
    with loaderkit.MemoryMeter("cpu", every_s=every_s, log=None) as meter:
        pass
    timeline = meter.timeline

    assert len(timeline.marks) == 2
    page = timeline.page()
    assert "between the two readings is not seen" in page.lead[0]
    assert page.sections[0].heading == "Memory over time"


def test_one_reading_is_a_table_and_no_curve():
    meter = loaderkit.MemoryMeter("cpu", log=None)
    mark = meter.mark()

    [section] = meter.timeline.page().sections
    names = [name for name, _, _ in section.blocks[0].rows]
    assert names == list(mark.sample.values)


@pytest.mark.slow
def test_each_counter_is_a_number_or_a_reason():
    sample = loaderkit.read_memory("cpu")

    assert sample.get("malloc") > MIB
    assert sample.get("mappings") > 10
    assert sample.get("proportional") > MIB
    assert not set(sample.values) & set(sample.missing)
    assert set(sample.values) <= set(COUNTERS)
    assert "memory that malloc gave out" in str(sample)
    json.dumps(sample.to_json())


IS_HERE = {
    "cuda": torch.cuda.is_available,
    "xpu": torch.xpu.is_available,
    "mps": torch.backends.mps.is_available,
}


@pytest.mark.slow
@pytest.mark.parametrize("device", IS_HERE)
def test_a_device_that_is_not_here_is_a_reason_and_no_error(device):
    sample = loaderkit.read_memory(device)

    is_here = IS_HERE[device]()
    assert ("allocated" in sample.values) == is_here
    assert ("there is no device" in str(sample)) == (not is_here)


@pytest.mark.slow
def test_live_tensors_are_grouped_and_shared_storages_count_once():
    base = torch.zeros(1000, 77)
    views = [base[i : i + 3] for i in range(4)]

    groups = {group.shape: group for group in live_tensors()}

    assert groups[3, 77].count == 4
    assert groups[1000, 77].bytes + groups[3, 77].bytes == 1000 * 77 * 4
    assert "4 x Tensor [3, 77] float32 on cpu" in str(groups[3, 77])
    assert len(views) == 4


def test_tensors_without_a_storage_can_be_looked_at():
    sparse = torch.eye(3).to_sparse()
    meta = torch.empty(5, 91, device="meta")

    shapes = {group.shape for group in live_tensors([sparse, meta])}

    assert shapes == {(3, 3), (5, 91)}


@pytest.mark.filterwarnings("ignore:Sparse")  # torch calls them beta
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_sparse_tensors_weigh_their_values_and_indices(layout):
    block = {"blocksize": (2, 2)} if layout.startswith("b") else {}
    kind = torch.sparse_coo if layout == "coo" else getattr(torch, f"sparse_{layout}")
    sparse = torch.eye(64).to_sparse(layout=kind, **block)

    (group,) = live_tensors([sparse])

    values = 32 * 4 * 4 if block else 64 * 4
    pointers = {"coo": 0}.get(layout, 33 if block else 65)
    indices = 2 * (32 if block else 64)  # of both axes: torch keeps them in one piece
    assert group.bytes == values + 8 * (pointers + indices)


def test_a_stage_is_read_before_and_after_and_logged():
    lines = []
    meter = loaderkit.MemoryMeter("cpu", log=lambda mark: lines.append(str(mark)))

    with meter.stage("model A"):
        tensor = torch.ones(8 * MIB)

    before, after = meter.timeline.marks
    grown = after.sample.get("malloc") - before.sample.get("malloc")
    assert grown == pytest.approx(tensor.nbytes, abs=MIB)
    assert lines[1].startswith("after model A: anonymous")
    headline, *marks = str(meter.timeline).splitlines()
    assert headline.startswith("Memory over ")
    assert "2 readings, anonymous at most " in headline
    assert [mark.strip() for mark in marks] == lines


def test_a_thread_samples_and_ends_with_the_block():
    seen = []
    with loaderkit.MemoryMeter("cpu", every_s=0.01, on_sample=seen.append) as meter:
        while len(seen) < 3:
            time.sleep(0.01)

    assert "loaderkit meter" not in {thread.name for thread in threading.enumerate()}
    assert len(meter.timeline.marks) >= 3
    assert meter.timeline.peak("malloc") > MIB
    assert meter.timeline.peak("allocated") is None


def test_a_block_within_a_block_does_not_end_the_thread():
    seen = []
    meter = loaderkit.MemoryMeter("cpu", every_s=0.01, log=None, on_sample=seen.append)
    with meter:
        with meter:
            pass
        after_inner = len(seen)
        while len(seen) < after_inner + 3:
            time.sleep(0.01)

    assert "loaderkit meter" not in {thread.name for thread in threading.enumerate()}


def test_a_timeline_is_written_as_json_and_makes_a_table(tmp_path):
    meter = loaderkit.MemoryMeter("cpu", log=None)
    meter.mark("start")
    meter.mark()

    rows = json.loads(meter.timeline.to_json(tmp_path / "a.json"))
    frame = pd.DataFrame(meter.timeline.rows())

    assert json.loads((tmp_path / "a.json").read_text()) == rows
    assert [row["label"] for row in rows] == ["start", ""]
    assert {"label", "seconds", "malloc", "anonymous"} <= set(frame)
    assert frame["malloc"].tolist() == [row["malloc"] for row in rows]


def test_a_meter_without_a_period_is_refused():
    with pytest.raises(ValueError, match="above 0, got 0"):
        loaderkit.MemoryMeter("cpu", every_s=0)
