"""What is read of a GPU, against torch, the driver and what can really be taken."""

import random

import pytest
import torch

from loaderkit import MemoryMeter, read_memory, release, staged
from loaderkit.memory.probes import (
    free_bytes,
    present_devices,
    probe_of,
    read_blocks,
    read_device,
    with_index,
)
from loaderkit.memory.release import cached_bytes

MIB = 2**20


def test_every_counter_is_read(card):
    probe = probe_of(card)
    names = {*probe.cheap_counters(card), *probe.driver_counters(card)}

    reading = read_device(card)

    assert dict(reading.missing) == {}
    assert names <= set(reading.values)


def test_counters_are_what_torch_and_the_driver_say(card):
    generator = random.Random(0)
    tensors = []
    for _ in range(40):
        if tensors and generator.random() < 0.4:
            tensors.pop(generator.randrange(len(tensors)))
        size = int(2 ** generator.uniform(4, 27))
        tensors.append(torch.empty(size, dtype=torch.uint8, device=card))

        values = read_device(card).values

        assert values["allocated"] == torch.cuda.memory_allocated(card)
        assert values["reserved"] == torch.cuda.memory_reserved(card)
        blocks = read_blocks(card)
        assert sum(block.size for block in blocks) == values["allocated"]
        assert values["largest_free"] <= values["reserved"] - values["allocated"]
        free, total = torch.cuda.mem_get_info(card)
        assert values["device_limit"] == total
        assert abs(values["device_free"] - free) < 64 * MIB


def test_a_device_without_an_index_is_the_current_one(card):
    assert card in present_devices()
    assert with_index(torch.device("cuda")) == card
    assert read_memory("cuda").device == str(card)


def test_page_locked_memory_is_counted(card):
    bytes_before = read_device(card).values["pinned"]

    tensor = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)

    assert read_device(card).values["pinned"] - bytes_before >= tensor.nbytes


@pytest.mark.parametrize("share", [None, 0.25])
@pytest.mark.parametrize("cached_mib", [0, 512])
def test_what_is_free_can_be_taken_and_not_much_more(card, share, cached_mib):
    if share is not None:
        torch.cuda.set_per_process_memory_fraction(share)
    # What torch keeps without using it is free too; the allocator gives it back when
    # it would run out.
    torch.empty(cached_mib * MIB, dtype=torch.uint8, device=card)
    free = free_bytes(card)
    # Chosen: above what rounding, and other processes meanwhile, take.
    slack = 512 * MIB

    torch.empty(free.amount - slack, dtype=torch.uint8, device=card)
    torch.cuda.empty_cache()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(free.amount + slack, dtype=torch.uint8, device=card)

    assert "cuda" in free.known_from


def test_what_is_given_back_is_what_the_driver_gets(card):
    torch.empty(300 * MIB, dtype=torch.uint8, device=card)
    assert cached_bytes(card).unused >= 300 * MIB
    free_before = torch.cuda.mem_get_info(card)[0]

    released = release()

    returned = torch.cuda.mem_get_info(card)[0] - free_before
    assert released.returned_bytes[str(card)] == pytest.approx(returned, abs=64 * MIB)
    assert returned >= 300 * MIB


def test_a_stage_gives_its_models_memory_back(card):
    model = torch.nn.Linear(4096, 4096, device=card)

    with staged("training", model) as stage:
        model(torch.randn(64, 4096, device=card)).sum().backward()
        del model

    receipt, name = stage.receipt, str(card)
    assert receipt.ok
    assert receipt.expected_bytes[name] >= 64 * MIB
    assert receipt.returned_bytes[name] >= receipt.expected_bytes[name]


def test_a_stage_whose_model_stays_names_who_holds_it(card):
    held_by_a_name = model = torch.nn.Linear(4096, 4096, device=card)

    with staged("training", model) as stage:
        del model

    assert not stage.receipt.ok
    assert "held_by_a_name" in str(stage.receipt)
    del held_by_a_name


def test_a_meter_sees_the_peak_of_a_block(card):
    meter = MemoryMeter("cuda")

    with meter:
        meter.mark("before")
        tensor = torch.empty(200 * MIB, dtype=torch.uint8, device=card)
        meter.mark("allocated")
        del tensor

    timeline = meter.timeline
    allocated = {mark.label: mark.sample.values["allocated"] for mark in timeline.marks}
    assert allocated["allocated"] - allocated["before"] == 200 * MIB
    assert timeline.peak("allocated") >= 200 * MIB
