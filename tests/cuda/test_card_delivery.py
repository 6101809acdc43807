"""Batches on their way to a GPU: the same values, beside the step, in little memory."""

import pytest
import torch
from tensor_kinds import KINDS, tensors_of_all_kinds
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader

from loaderkit import build_loader, pack, read_memory
from loaderkit.errors import LoaderError
from loaderkit.loader.device_prefetch import DevicePrefetcher
from loaderkit.loader.page_locking import page_lock_batch
from loaderkit.nests import dense_parts, flatten_tensors, map_tensors
from loaderkit.testing import assert_same

MIB = 2**20
GRAPHS = 600
FIELDS = ("x", "edge_index", "y", "batch", "ptr")


def drawn_graphs(count):
    generator = torch.Generator().manual_seed(0)
    node_counts = torch.randint(1, 60, (count,), generator=generator).tolist()
    return [
        Data(
            x=torch.randn(nodes, 16, generator=generator),
            edge_index=torch.randint(nodes, (2, 3 * nodes), generator=generator),
            y=torch.tensor([float(number)]),
        )
        for number, nodes in enumerate(node_counts)
    ]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return pack(drawn_graphs(GRAPHS), tmp_path_factory.mktemp("caches") / "graphs")


def queue_work(card):
    """Queue some milliseconds of work, so that copies and steps overlap."""
    matrix = torch.randn(4096, 4096, device=card)
    for _ in range(4):
        matrix = matrix @ matrix * 1e-4


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetched", [False, True])
def test_batches_on_the_gpu_are_those_of_pygs_loader(card, cache, workers, prefetched):
    expected_batches = list(GraphLoader(drawn_graphs(GRAPHS), 32))
    loader = build_loader(cache, "cuda", batch_size=32, num_workers=workers)
    batches = DevicePrefetcher(loader, "cuda") if prefetched else loader

    for _ in range(2):
        results = []
        for batch in batches:
            queue_work(card)
            if not prefetched:
                assert batch.x.is_pinned()
                batch = map_tensors(lambda t: t.to(card, non_blocking=True), batch)
            assert batch.x.device == card
            # Computed behind the work, and the batch is let go before that is done.
            results.append(map_tensors(lambda tensor: tensor * 1, batch))

        assert len(results) == len(expected_batches)
        for result, expected in zip(results, expected_batches, strict=True):
            for name in FIELDS:
                assert torch.equal(result[name].cpu(), expected[name]), name


def test_a_batch_that_is_changed_in_place_leaves_the_next_alone(card):
    """The step writes into its batch, on a stream of its own, while one is copied."""
    host_batches = [torch.full((MIB,), float(number)) for number in range(60)]
    means = []
    for batch in DevicePrefetcher(host_batches, "cuda"):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            queue_work(card)
            batch.mul_(2)
            means.append(batch.mean())
        batch.record_stream(stream)
        torch.cuda.current_stream().wait_stream(stream)

    assert [mean.item() for mean in means] == [2.0 * n for n in range(60)]
    assert [tensor[0].item() for tensor in host_batches] == list(range(60))


class Boxed:
    """A batch of another library: only it knows how it is moved."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        return type(self)(self.tensor.to(device))


def full_sparse(number):
    """A sparse matrix of 1 MiB of values, all of them the number."""
    return torch.full((512, 512), float(number)).to_sparse()


BATCHES = {
    "sparse": (full_sparse, lambda batch: batch._values()),
    "object": (lambda n: Boxed(torch.full((MIB,), float(n))), lambda b: b.tensor),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_no_memory_is_copied_to_while_a_queued_step_reads_it(card, kind):
    make_batch, values_of = BATCHES[kind]
    numbers = range(1, 41)  # a sparse matrix has no zeros
    host_batches = (make_batch(number) for number in numbers)

    means = []
    for batch in DevicePrefetcher(host_batches, "cuda"):
        queue_work(card)
        means.append(values_of(batch).double().mean())

    assert [mean.item() for mean in means] == list(numbers)


def test_no_more_than_three_batches_are_on_the_gpu(card):
    size = 32 * MIB
    host_batches = [torch.empty(size, dtype=torch.uint8) for _ in range(20)]
    allocated_before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    for batch in DevicePrefetcher(host_batches, card):
        assert batch.numel() == size
        torch.cuda.synchronize()

    assert torch.cuda.max_memory_allocated() - allocated_before <= 3 * size


@pytest.mark.parametrize("workers", [0, 2])
def test_page_locked_memory_stays_flat_over_epochs(card, cache, workers):
    loader = build_loader(
        cache, "cuda", batch_size=32, shuffle=True, num_workers=workers
    )
    pinned_bytes = []
    for _ in range(8):
        for batch in DevicePrefetcher(loader, card):
            batch.x.sum()
        pinned_bytes.append(read_memory("cuda").values["pinned"])

    assert pinned_bytes[-1] <= pinned_bytes[2] + 8 * MIB


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # some kinds are beta, torch says
def test_a_tensor_of_any_kind_arrives(card, kind):
    tensor = tensors_of_all_kinds()[kind]

    [[moved]] = list(DevicePrefetcher([[tensor]], "cuda"))

    assert moved.device == card
    if kind != "parameter":  # which is a tensor once it was moved
        assert type(moved) is type(tensor)
    parts, moved_parts = dense_parts(tensor), dense_parts(moved)
    for part, moved_part in zip(parts, moved_parts, strict=True):
        assert torch.equal(moved_part.cpu(), part)


def test_a_nest_of_containers_arrives(card):
    batch = {
        "bytes": torch.arange(9, dtype=torch.uint8)[::2],
        "half": torch.randn(4).half(),
        "texts": ["a", "b"],
        "nested": (torch.tensor(3), [torch.ones(2, 2).T, None]),
        "graph": drawn_graphs(1)[0],
        "there already": torch.ones(3, device=card),
    }

    [moved] = list(DevicePrefetcher([batch], "cuda"))

    assert all(tensor.device == card for tensor in flatten_tensors(moved))
    assert_same(
        map_tensors(lambda tensor: tensor.cpu(), moved),
        map_tensors(lambda tensor: tensor.cpu(), batch),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tensor_of_any_kind_is_page_locked_or_left_alone(card, kind):
    tensor = tensors_of_all_kinds()[kind]
    batch = [tensor, torch.ones(3), torch.ones(2, device=card)]

    locked, dense, on_card = page_lock_batch(batch)

    assert dense.is_pinned()
    assert on_card is batch[2]
    if locked is not tensor:
        parts, locked_parts = dense_parts(tensor), dense_parts(locked)
        for part, locked_part in zip(parts, locked_parts, strict=True):
            assert torch.equal(locked_part, part)
    else:
        assert kind not in {"dense", "parameter"}


def test_workers_that_start_after_the_gpu_was_used_read_the_same(card, cache):
    torch.ones(3, device=card).sum().item()
    loader = build_loader(cache, "cuda", batch_size=64, num_workers=2)

    labels = [value for batch in loader for value in batch.y.tolist()]

    assert labels == list(map(float, range(GRAPHS)))


def test_samples_on_the_gpu_are_given_as_they_are(card):
    samples = [{"x": torch.full((3,), float(n), device=card)} for n in range(8)]

    loader = build_loader(samples, "cuda", batch_size=4)

    assert loader.plan.num_workers == 0
    assert not loader.plan.pin_memory
    assert str(card) in loader.plan.pin_memory.reason
    batches = list(DevicePrefetcher(loader, "cuda"))
    assert [batch["x"][:, 0].tolist() for batch in batches] == [
        [0.0, 1.0, 2.0, 3.0],
        [4.0, 5.0, 6.0, 7.0],
    ]


@pytest.mark.parametrize("asked", [{"num_workers": 2}, {"pin_memory": True}])
def test_what_samples_on_the_gpu_do_not_allow_is_refused_with_the_fix(card, asked):
    samples = [{"x": torch.ones(3, device=card)} for _ in range(8)]

    with pytest.raises(LoaderError) as caught:
        build_loader(samples, "cuda", batch_size=4, **asked)

    assert str(card) in caught.value.why
    assert caught.value.fix.endswith(", or keep samples on the host")


def move_to_gpu(batch):
    return batch.to("cuda")


@pytest.mark.parametrize("asked", [{}, {"num_workers": 0}])
def test_batches_that_a_transform_moves_are_given_as_they_are(card, asked):
    loader = build_loader(
        [torch.ones(3) for _ in range(8)],
        "cuda",
        batch_size=4,
        batch_transform=move_to_gpu,
        **asked,
    )

    for batch in loader:
        assert batch.device == card
        assert batch.sum().item() == 12


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"num_workers": 0, "pin_memory": True}, "cannot be page-locked"),
        ({"num_workers": 1}, "before the workers were forked"),
    ],
)
def test_batches_that_a_transform_moves_where_they_cannot_be_are_refused(
    card, asked, words
):
    torch.ones(3, device=card).sum().item()
    loader = build_loader(
        [torch.ones(3) for _ in range(8)],
        "cuda",
        batch_size=4,
        batch_transform=move_to_gpu,
        **asked,
    )

    with pytest.raises(LoaderError, match=words) as caught:
        list(loader)

    assert caught.value.fix.endswith(", or keep samples on the host")
