"""Page-locked memory: what it gives, and what happens when there is none."""

import logging

import pytest
import torch
from replayed_page_locking import ReplayedMemory

from loaderkit.memory.page_locked import PageLockedBatch, PageLockedMemory


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (4, 0, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.bool])
def test_tensors_are_made_as_they_were_asked_for(shape, dtype):
    replay = ReplayedMemory()

    tensor = PageLockedMemory(replay.make).empty(shape, dtype)

    assert tensor.shape == shape
    assert tensor.dtype is dtype
    assert replay.has(tensor)


@pytest.mark.parametrize("blocks", range(5))
def test_a_refusal_is_told_once_and_gives_ordinary_memory(blocks, caplog):
    replay = ReplayedMemory(blocks)
    memory = PageLockedMemory(replay.make)

    with caplog.at_level(logging.WARNING, "loaderkit"):
        tensors = [memory.empty((2, 3), torch.int16) for _ in range(6)]

    assert [(t.shape, t.dtype) for t in tensors] == [((2, 3), torch.int16)] * 6
    assert [replay.has(t) for t in tensors] == [True] * blocks + [False] * (6 - blocks)
    assert memory.refusal == "CUDA error: out of memory"
    assert replay.refused == len(caplog.records) == 1
    assert "the system refused more: CUDA error: out of memory" in caplog.text


def test_its_twin_with_another_error_is_raised():
    def fails(*_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        PageLockedMemory(fails).empty((1,), torch.int8)


def test_a_batch_lacks_locking_where_others_made_a_part_of_it():
    batch = ReplayedMemory().batch()
    assert not batch.lacks_locking

    batch.note_others()

    assert batch.lacks_locking
    refused = PageLockedMemory(ReplayedMemory(blocks=0).make)
    refused.empty((1,), torch.int8)
    batch = PageLockedBatch(refused)
    batch.note_others()
    assert not batch.lacks_locking
