"""Batches gathered straight into page-locked memory, from which a GPU copies."""

import dataclasses

import pytest
import torch
from replayed_page_locking import dense_tensors
from strategies import FIELDS
from test_card_delivery import drawn_graphs, queue_work
from torch.utils.data._utils.pin_memory import pin_memory
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import DataLoader as GraphLoader

from loaderkit import build_loader, open_cache, owned_copy, pack, read_memory
from loaderkit.loader.device_prefetch import DevicePrefetcher
from loaderkit.loader.planned import PlannedLoader
from loaderkit.memory.page_locked import PageLockedMemory, make_page_locked
from loaderkit.nests import map_tensors
from loaderkit.testing import assert_same

MIB = 2**20
OPTIONS = {"batch_size": 32, "num_workers": 0}


def noting(loader):
    """The same loader, and a list of the tensors' addresses that are made for it."""
    made = []

    def make(shape, dtype):
        tensor = make_page_locked(shape, dtype)
        made.append(tensor.data_ptr())
        return tensor

    assert loader._setup.page_locked is not None
    setup = dataclasses.replace(loader._setup, page_locked=PageLockedMemory(make))
    noted = PlannedLoader(
        loader.dataset,
        setup=setup,
        batch_sampler=loader.batch_sampler,
        collate_fn=loader.collate_fn,
        num_workers=0,
        pin_memory=True,
    )
    return noted, made


def pockets(count):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(200, 601, (count,), generator=generator).tolist()
    return [
        Data(
            x=torch.randn(n, 64, generator=generator),
            edge_index=torch.randint(n, (2, 20 * n), generator=generator),
            y=torch.randn(1, 512, generator=generator),
        )
        for n in sizes
    ]


def hetero(count):
    samples = []
    for number in range(count):
        data = HeteroData()
        data["atom"].x = torch.randn(number % 9 + 1, 4)
        data["bond"].x = torch.randn(number % 5 + 1, 2)
        data["atom", "in", "bond"].edge_index = torch.zeros(2, 3, dtype=torch.int64)
        data.y = torch.tensor([float(number)])
        samples.append(data)
    return samples


GRAPHS = {"small": drawn_graphs, "large": pockets, "hetero": hetero}


def assert_all_pinned(batch):
    assert dense_tensors(batch)
    assert all(tensor.is_pinned() for tensor in dense_tensors(batch))


@pytest.mark.parametrize("kind", sorted(GRAPHS))
def test_graphs_are_made_there_and_never_copied(card, tmp_path, kind):
    samples = GRAPHS[kind](96)
    cache = pack(samples, tmp_path / "c.lk", workers=0)
    loader, made = noting(build_loader(cache, card, **OPTIONS))

    for _ in range(2):
        made.clear()
        batches = list(loader)
        tensors = [tensor for batch in batches for tensor in dense_tensors(batch)]
        assert sorted(tensor.data_ptr() for tensor in tensors) == sorted(made)
        for batch, whole in zip(batches, GraphLoader(samples, 32), strict=True):
            assert_same(batch, whole)
            assert_all_pinned(batch)
            pointers = [tensor.data_ptr() for tensor in dense_tensors(batch)]
            pinned = pin_memory(batch)
            assert [t.data_ptr() for t in dense_tensors(pinned)] == pointers
            for tensor in dense_tensors(batch):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_field_of_graphs_arrives(card, tmp_path, name):
    torch.manual_seed(0)
    samples = [Data(pos=torch.randn(n, 3), num_nodes=n) for n in (3, 1, 4, 2)]
    for number, sample in enumerate(samples):
        sample[name] = FIELDS[name](number, sample.num_nodes, torch.float32)
    samples = owned_copy(samples)
    cache = pack(samples, tmp_path / "c.lk", workers=0)
    try:
        wanted = list(GraphLoader(samples, 2))
        # PyG page-locks a batch where it is, and makes lists of its tuples.
        by_torch = [pin_memory(batch) for batch in GraphLoader(samples, 2)]
    except Exception as error:  # noqa: BLE001 -- PyG or torch cannot have it
        pytest.skip(f"{type(error).__name__}: {error}")

    batches = list(build_loader(cache, card, batch_size=2, num_workers=0))

    assert_same(batches, wanted)
    for batch, expected in zip(batches, by_torch, strict=True):
        pairs = zip(dense_tensors(batch), dense_tensors(expected), strict=True)
        assert all(ours.is_pinned() >= torchs.is_pinned() for ours, torchs in pairs)


@pytest.mark.parametrize("ragged", ["padded", "packed", "jagged"])
def test_dicts_are_made_there(card, tmp_path, ragged):
    samples = [
        {
            "ids": torch.arange(n % 7),
            "image": torch.full((3, 32, 32), n, dtype=torch.uint8),
            "half": torch.full((n % 3 + 1, 2), n, dtype=torch.bfloat16),
            "text": f"t{n}",
            "n": n,
        }
        for n in range(64)
    ]
    path = pack(samples, tmp_path / "c.lk", workers=0).cache
    dataset = open_cache(path, ragged=ragged)
    loader, _ = noting(build_loader(dataset, card, **OPTIONS))

    for number, batch in enumerate(loader):
        wanted = dataset.batch(range(32 * number, 32 * number + 32))
        assert list(batch) == list(wanted)
        for name, value in batch.items():
            if ragged == "jagged" and name in {"ids", "half"}:
                assert_same(value.values(), wanted[name].values())
                assert_all_pinned([value.values(), value.offsets()])
            else:
                assert_same(value, wanted[name])
        assert_all_pinned({name: batch[name] for name in ("image", "n")})
        if ragged != "jagged":
            assert_all_pinned(batch)
        moved = DevicePrefetcher([batch], card)
        assert next(iter(moved))["image"].device == card


@pytest.mark.parametrize("prefetched", [False, True])
def test_no_block_is_used_again_before_its_copy_is_done(card, tmp_path, prefetched):
    """Each batch is let go at once, while the stream has much to do before the copy."""
    samples = pockets(64)
    cache = pack(samples, tmp_path / "c.lk", workers=0)
    loader = build_loader(cache, card, batch_size=4, num_workers=0)
    wanted = [batch.x.double().sum() for batch in GraphLoader(samples, 4)]

    for _ in range(3):
        moved = []
        for batch in DevicePrefetcher(loader, card) if prefetched else loader:
            queue_work(card)
            on_card = map_tensors(lambda t: t.to(card, non_blocking=True), batch)
            moved.append(on_card.x.clone())
            del batch, on_card
        sums = [x.double().sum().item() for x in moved]
        assert sums == pytest.approx([value.item() for value in wanted], rel=1e-9)


LOOPS = {
    "waits for each loss": lambda loader: loader,
    "never waits": lambda loader: DevicePrefetcher(loader, "cuda"),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_memory_stays_flat_over_epochs(card, tmp_path, loop):
    cache = pack(pockets(256), tmp_path / "c.lk", workers=0)
    loader = build_loader(cache, card, batch_size=16, shuffle=True, num_workers=0)
    batch_bytes = max(
        sum(tensor.nbytes for tensor in dense_tensors(batch)) for batch in loader
    )
    pinned, peaks = [], []

    for _ in range(10):
        torch.cuda.reset_peak_memory_stats()
        for batch in LOOPS[loop](loader):
            queue_work(card)
            moved = map_tensors(lambda t: t.to(card, non_blocking=True), batch)
            loss = moved.x.sum()
            if loop == "waits for each loss":
                loss.item()
            del batch, moved
        pinned.append(read_memory("cuda").values["pinned"])
        peaks.append(torch.cuda.max_memory_allocated())

    assert pinned[-1] <= pinned[3] + 2 * batch_bytes, [b // MIB for b in pinned]
    # Waiting for nothing would add the batches of all the steps that are queued.
    queue_work(card)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    queue_work(card)
    of_work = torch.cuda.max_memory_allocated()
    assert max(peaks) <= of_work + 6 * batch_bytes, [b // MIB for b in peaks]


def test_a_loop_that_never_waits_takes_no_more_than_with_torchs_loader(card, tmp_path):
    """Each batch that it is ahead of the GPU stays page-locked, whoever made it."""
    if not hasattr(torch.accelerator, "empty_host_cache"):
        pytest.skip("this torch cannot be asked to give page-locked memory back")
    samples = pockets(256)
    cache = pack(samples, tmp_path / "c.lk", workers=0)
    options = {"batch_size": 16, "shuffle": True, "num_workers": 0}
    loaders = {
        "ours": build_loader(cache, card, **options),
        "torch's": GraphLoader(samples, pin_memory=True, **options),
    }
    taken = {}
    for name, loader in loaders.items():
        before = read_memory("cuda").values["pinned"]
        for _ in range(8):
            for batch in loader:
                queue_work(card)
                map_tensors(lambda tensor: tensor.to(card, non_blocking=True), batch)
        torch.cuda.synchronize()
        taken[name] = read_memory("cuda").values["pinned"] - before
        torch.accelerator.empty_host_cache()

    assert taken["ours"] <= 1.5 * taken["torch's"] + 64 * MIB


def test_labels_that_are_kept_keep_no_batch(card, tmp_path):
    cache = pack(pockets(256), tmp_path / "c.lk", workers=0)
    loader = build_loader(cache, card, batch_size=16, num_workers=0)
    batches = sum(1 for _ in loader)  # page-locks what an epoch needs
    before = read_memory("cuda").values["pinned"]

    labels = [batch.y for batch in loader]

    kept = sum(label.nbytes for label in labels)
    after = read_memory("cuda").values["pinned"]
    assert len(labels) == batches == 16
    assert after - before <= 2 * kept + MIB, (kept, after - before)


def test_what_the_system_refuses_is_a_runtime_error_and_the_next_is_given(card):
    with pytest.raises(RuntimeError):
        make_page_locked((1 << 46,), torch.uint8)

    assert make_page_locked((3,), torch.uint8).is_pinned()
    assert torch.ones(2, device=card).sum().item() == 2


def test_workers_of_another_loader_start_while_batches_are_page_locked(card, tmp_path):
    samples = drawn_graphs(200)
    cache = pack(samples, tmp_path / "c.lk", workers=0)
    here = build_loader(cache, card, **OPTIONS)
    iterator = iter(here)
    kept = [next(iterator), next(iterator)]
    copies = owned_copy(kept)

    sent = list(build_loader(cache, card, batch_size=32, num_workers=2))

    assert_same(sent, list(GraphLoader(samples, 32)))
    assert all(batch.x.is_pinned() for batch in sent)
    kept += iterator
    assert_same(kept[:2], copies)
    assert_same(kept, sent)
