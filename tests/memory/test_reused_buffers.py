"""Memory of large tensors is used again when they are gone, and not before."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from collections import deque

import numpy as np
import pytest
import torch

from loaderkit.memory.release import release
from loaderkit.memory.reused_buffers import (
    REUSED_BUFFERS,
    ReusedBuffers,
    empty_tensor,
)

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs private mappings")

KIB, MIB = 1 << 10, 1 << 20
DTYPES = (torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.bool)


def churn(seed: int, turns: int) -> None:
    """Make and drop tensors at random, and see that each keeps its numbers."""
    rng = random.Random(seed)
    alive: list[tuple[torch.Tensor, torch.Tensor]] = []
    for turn in range(turns):
        dtype = rng.choice(DTYPES)
        rows = rng.choice([0, 1, 300, 2_000, 40_000]) + rng.randrange(50)
        tensor = empty_tensor((rows, 5), dtype)
        tensor.copy_(torch.full((), turn % 100))
        expected = torch.full((rows, 5), turn % 100).to(dtype)
        # What is kept may be a view of a part.
        start = rng.randrange(rows + 1)
        alive.append((tensor[start:], expected[start:]))
        del tensor
        rng.shuffle(alive)
        del alive[rng.randrange(1, 8) :]
    for tensor, expected in alive:
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_alive_keeps_its_numbers_whatever_is_dropped(seed: int) -> None:
    churn(seed, 40)


def test_threads_share_the_buffers_and_all_come_back() -> None:
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            churn(seed, 40)
        except BaseException as error:  # noqa: BLE001 -- raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_tensor_is_what_torch_makes(dtype: torch.dtype) -> None:
    tensor = empty_tensor((700, 300), dtype)
    expected = torch.empty((700, 300), dtype=dtype)
    assert (tensor.shape, tensor.stride()) == (expected.shape, expected.stride())
    assert (tensor.dtype, tensor.device) == (expected.dtype, expected.device)
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0
    # torch.save writes whole storages.
    assert tensor.untyped_storage().nbytes() == expected.untyped_storage().nbytes()


def test_the_memory_of_a_dropped_tensor_serves_the_next_of_about_its_size() -> None:
    buffers = ReusedBuffers()
    first = buffers.take(1_000 * KIB)
    assert first is not None
    address = first.ctypes.data
    del first
    second = buffers.take(990 * KIB)
    assert second is not None
    assert second.ctypes.data == address


@pytest.mark.parametrize("keep", [np.ndarray.view, lambda array: array[5:7]])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_memory_that_a_view_refers_to_is_not_given_out(
    keep: object, as_tensor: bool
) -> None:
    buffers = ReusedBuffers()
    first = buffers.take(MIB)
    assert first is not None
    assert callable(keep)
    view = torch.from_numpy(first)[3:9] if as_tensor else keep(first)
    address = first.ctypes.data
    del first
    second = buffers.take(MIB)
    assert second is not None
    assert second.ctypes.data != address
    del view
    third = buffers.take(MIB)
    assert third is not None
    assert third.ctypes.data == address


@pytest.mark.parametrize("seed", range(3))
def test_batches_of_about_one_size_need_two_and_what_waits_is_one(seed: int) -> None:
    rng = random.Random(seed)
    buffers = ReusedBuffers()
    # As a loop over batches: the last one is there while the next one is made.
    last_batch: deque[list[object]] = deque(maxlen=1)
    largest = 0
    for _ in range(60):
        sizes = [int(mean * rng.uniform(0.8, 1.2)) for mean in (MIB, 2 * MIB, 5 * MIB)]
        last_batch.append([buffers.take(size) for size in sizes])
        largest = max(largest, sum(sizes))
        assert buffers.unused_bytes <= 1.25 * largest


def test_the_bound_of_what_waits_is_kept_when_much_is_dropped_at_once() -> None:
    buffers = ReusedBuffers()
    kept = [buffers.take(8 * MIB) for _ in range(30)]
    assert all(array is not None for array in kept)
    del kept
    assert 0 < buffers.unused_bytes <= 64 * MIB
    buffers.clear()
    assert buffers.unused_bytes == 0


def test_small_and_huge_tensors_and_the_thousandth_are_mallocs() -> None:
    buffers = ReusedBuffers()
    assert buffers.take(100 * KIB) is None
    assert buffers.take(33 * MIB) is None
    kept = [buffers.take(128 * KIB) for _ in range(1_100)]
    assert sum(array is None for array in kept) == 1_100 - 1_024


@pytest.mark.slow
def test_release_returns_what_waits() -> None:
    tensor = empty_tensor((3 * MIB,), torch.uint8)
    gone = weakref.ref(tensor)
    del tensor
    assert gone() is None
    assert REUSED_BUFFERS.unused_bytes >= 3 * MIB
    release()
    assert REUSED_BUFFERS.unused_bytes == 0


def test_a_tensor_that_the_collector_ends_gives_its_memory_back() -> None:
    buffers = ReusedBuffers()
    cycle: list[object] = [buffers.take(MIB)]
    cycle.append(cycle)
    del cycle
    assert buffers.unused_bytes == 0
    gc.collect()
    assert buffers.unused_bytes == MIB


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_writes_to_pages_of_its_own() -> None:
    kept = empty_tensor((MIB,), torch.uint8).fill_(1)
    empty_tensor((MIB,), torch.uint8).fill_(2)
    process = os.fork()
    if process == 0:
        empty_tensor((MIB,), torch.uint8).fill_(3)
        kept.fill_(4)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
    assert bool((kept == 1).all())
