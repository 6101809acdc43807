"""Batches on their way to a GPU: the same values, beside the step, in bounded memory."""

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader

from loaderkit import build_loader, pack, read_memory
from loaderkit.loader.device_prefetch import DevicePrefetcher
from loaderkit.nests import flatten_tensors, map_tensors
from loaderkit.testing import assert_same

MIB = 2**20


def drawn_graphs(count):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 60, (count,), generator=generator).tolist()
    return [
        Data(
            x=torch.randn(n, 16, generator=generator),
            edge_index=torch.randint(n, (2, 3 * n), generator=generator),
            y=torch.tensor([float(number)]),
        )
        for number, n in enumerate(sizes)
    ]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return pack(drawn_graphs(600), tmp_path_factory.mktemp("caches") / "graphs")


def to_host(batch):
    return map_tensors(lambda tensor: tensor.cpu(), batch)


def busy(card):
    """Queue some milliseconds of work, so that copies and steps overlap."""
    matrix = torch.randn(4096, 4096, device=card)
    for _ in range(4):
        matrix = matrix @ matrix * 1e-4
    return matrix


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetched", [False, True])
def test_batches_on_the_gpu_are_those_of_pygs_loader(card, cache, workers, prefetched):
    graphs = drawn_graphs(600)
    loader = build_loader(cache, "cuda", batch_size=32, num_workers=workers)
    received = DevicePrefetcher(loader, "cuda") if prefetched else loader

    for _ in range(2):
        kept = []
        for batch in received:
            busy(card)
            if not prefetched:
                assert batch.x.is_pinned()
                batch = map_tensors(lambda t: t.to(card, non_blocking=True), batch)
            assert batch.x.device == card
            kept.append(map_tensors(lambda tensor: tensor * 1, batch))

        expected = list(GraphLoader(graphs, 32))
        assert len(kept) == len(expected)
        for batch, whole in zip(kept, expected, strict=True):
            for name in ("x", "edge_index", "y", "batch", "ptr"):
                assert torch.equal(batch[name].cpu(), whole[name]), name


def test_a_batch_that_is_changed_in_place_leaves_the_next_alone(card):
    """The step writes into its batch while the next one is copied."""
    host = [torch.full((MIB,), float(number)) for number in range(60)]
    sums = []
    for batch in DevicePrefetcher(host, "cuda"):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            busy(card)
            batch.mul_(2)
            sums.append(batch.mean())
        batch.record_stream(stream)
        torch.cuda.current_stream().wait_stream(stream)

    assert [value.item() for value in sums] == [2.0 * n for n in range(60)]
    assert [tensor[0].item() for tensor in host] == list(range(60))


def test_no_more_than_three_batches_are_on_the_gpu(card):
    size = 32 * MIB
    host = [torch.empty(size, dtype=torch.uint8) for _ in range(20)]
    taken = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    for batch in DevicePrefetcher(host, "cuda"):
        assert batch.numel() == size
        torch.cuda.synchronize()

    assert torch.cuda.max_memory_allocated() - taken <= 3 * size


@pytest.mark.parametrize("workers", [0, 2])
def test_page_locked_memory_stays_flat_over_epochs(card, cache, workers):
    loader = build_loader(
        cache, "cuda", batch_size=32, shuffle=True, num_workers=workers
    )
    pinned = []
    for _ in range(8):
        for batch in DevicePrefetcher(loader, "cuda"):
            batch.x.sum()
        pinned.append(read_memory("cuda").values["pinned"])

    assert pinned[-1] <= pinned[2] + 8 * MIB


def test_nests_of_all_kinds_arrive(card):
    batch = {
        "dense": torch.randn(5, 3),
        "empty": torch.empty(0, 7),
        "bytes": torch.arange(9, dtype=torch.uint8)[::2],
        "half": torch.randn(4).half(),
        "sparse": torch.eye(4).to_sparse(),
        "texts": ["a", "b"],
        "nested": (torch.tensor(3), [torch.ones(2, 2).T, None]),
    }

    [moved] = list(DevicePrefetcher([batch], "cuda"))

    assert all(tensor.device == card for tensor in flatten_tensors(moved))
    assert_same(to_host(moved), batch)


def test_workers_that_start_after_the_gpu_was_used_read_the_same(card, cache):
    torch.ones(3, device=card).sum().item()
    loader = build_loader(cache, "cuda", batch_size=64, num_workers=2)

    labels = [value for batch in loader for value in batch.y.tolist()]

    assert labels == list(map(float, range(600)))
    print(loader.plan)


def test_tensors_of_the_gpu_in_a_dataset_are_told_in_words(card):
    samples = [{"x": torch.ones(3, device=card)} for _ in range(8)]

    loader = build_loader(samples, "cuda", batch_size=4, num_workers=0)
    assert next(iter(loader))["x"].shape == (4, 3)
    try:
        batches = list(build_loader(samples, "cuda", batch_size=4, num_workers=2))
    except Exception as error:  # noqa: BLE001 -- its words are what is tested
        print(type(error), error)
        assert "fix:" in str(error)
    else:
        assert [tuple(batch["x"].shape) for batch in batches] == [(4, 3)] * 2
