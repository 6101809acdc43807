"""Samples that are read at once are those that are read one by one."""

import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset
from torch_geometric.data import Data

from loaderkit import build_loader, open_cache, pack
from loaderkit.errors import DamagedCacheError, LoaderError
from loaderkit.testing import assert_same
from tests.datasets.strategies import graphs, hetero_graphs, paired_graphs, values

LEAVES = {
    "large": lambda n: torch.randn(300 + n, 20),
    "large [2, n]": lambda n: torch.randint(99, (2, 5_000 + n)),
    "large, one shape": lambda n: torch.randn(70, 70),
    "large bfloat": lambda n: torch.ones(9_000 + n, dtype=torch.bfloat16),
    "two axes": lambda n: torch.randn(n, 1 + n % 3),
    "without rows": lambda n: torch.zeros(n, 0),
    "scalar": lambda n: torch.tensor(n),
    "complex": lambda n: torch.ones(n, dtype=torch.complex64),
    "half": lambda n: torch.ones(2, n, dtype=torch.half),
    "array": lambda n: np.arange(n),
    "numbers": lambda n: (n, n / 7, n % 2 == 0, n * 1j, 10 ** (20 + n)),
    "int": lambda n: n,
    "float": lambda n: n / 7,
    "bool": lambda n: n % 2 == 0,
    "text": lambda n: f"é {n}",
    "none": lambda n: None,
    "nest": lambda n: {"a": [torch.ones(n), {"b": (torch.zeros(1), "x")}]},
    "sparse": lambda n: torch.eye(n + 1).to_sparse(),
}


@st.composite
def dicts(draw):
    """Dicts with the same fields."""
    names = draw(st.lists(st.sampled_from(sorted(LEAVES)), unique=True, max_size=5))
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    return [{name: LEAVES[name](length) for name in names} for length in lengths]


@st.composite
def large_graphs(draw):
    sizes = draw(st.lists(st.integers(0, 900), min_size=1, max_size=4))
    narrow = draw(st.booleans())
    return [
        Data(
            x=torch.randn(n, 9),
            edge_index=values(torch.int32 if narrow else torch.int64, 2, 4 * n),
            y=torch.randn(1, n and 5_000),
        )
        for n in sizes
    ]


def tensors_in(sample):
    if isinstance(sample, torch.Tensor):
        # EdgeIndex and its like hold their numbers in another tensor.
        is_plain = type(sample) is torch.Tensor and sample.layout is torch.strided
        return [sample] if is_plain else []
    if hasattr(sample, "to_dict"):
        sample = sample.to_dict()
    if isinstance(sample, dict):
        sample = list(sample.values())
    if isinstance(sample, list | tuple):
        return [tensor for item in sample for tensor in tensors_in(item)]
    return []


@pytest.mark.slow
@given(
    samples=graphs() | hetero_graphs() | paired_graphs() | dicts() | large_graphs(),
    seed=st.integers(0, 99),
    shard_bytes=st.sampled_from([1, 4_096, 1 << 28]),
)
@settings(max_examples=25)
def test_samples_read_at_once_are_those_read_singly(
    tmp_path_factory, samples, seed, shard_bytes
):
    path = tmp_path_factory.mktemp("m") / "c.lk"
    pack(samples, path, workers=0, shard_bytes=shard_bytes)
    dataset = open_cache(path, classes={type(sample) for sample in samples} - {dict})
    rows = random.Random(seed).choices(range(len(samples)), k=5)

    together = dataset.__getitems__(rows)

    singly = [dataset[row] for row in rows]
    assert_same(list(together), singly)
    tensors = [tensor for sample in together for tensor in tensors_in(sample)]
    alone = [tensor for sample in singly for tensor in tensors_in(sample)]
    for tensor, other in zip(tensors, alone, strict=True):
        assert tensor.is_contiguous() == other.is_contiguous()
        # Its memory is its own, and no more than its own.
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    places = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
    assert len(set(places)) == len(places)


def test_a_changed_sample_changes_no_other_and_not_the_cache(tmp_path):
    samples = [Data(x=torch.ones(n % 3, 2), y=torch.tensor([n])) for n in range(6)]
    dataset = pack(samples, tmp_path / "c.lk", workers=0)

    def spoil(batch):
        for sample in batch:
            sample.x.zero_()
            sample.y.add_(100)
        return batch[:0]

    list(DataLoader(dataset, batch_size=4, collate_fn=spoil))

    assert_same(list(dataset), samples)


def test_a_transform_sees_each_sample_as_it_is_in_the_cache(tmp_path):
    dataset = pack([{"x": torch.ones(n)} for n in range(5)], tmp_path / "c", workers=0)
    seen = []
    dataset.transform = lambda sample: seen.append(len(sample["x"])) or sample

    dataset.__getitems__([3, 1, 3])

    assert seen == [3, 1, 3]


def test_the_sample_that_cannot_be_read_is_known_though_others_are_read_with_it(
    tmp_path,
):
    samples = [{"v": [10**20 + n, None]} for n in range(3)]
    dataset = pack(samples, tmp_path / "c.lk", workers=0, shard_bytes=1)
    [file] = tmp_path.glob("c.lk/00001-*.h5")
    raw = file.read_bytes()
    file.write_bytes(re.sub(rb"\[1000", b"[[000", raw))
    dataset = open_cache(tmp_path / "c.lk", checksums="never")

    with pytest.raises(DamagedCacheError, match="'v' is no value"):
        dataset.__getitems__([0, 1, 2])
    assert dataset.__getitems__([0, 2]) == [samples[0], samples[2]]


class Fails:
    """A transform that fails for one sample."""

    def __init__(self, error):
        self.error = error

    def __call__(self, sample):
        if len(sample["x"]) == 2:
            raise self.error
        return {**sample, "seen": True}


@pytest.mark.parametrize("error", [ValueError, StopIteration, IndexError])
@pytest.mark.parametrize("subset", [False, True])
def test_the_sample_whose_transform_fails_is_named(tmp_path, subset, error):
    samples = [{"x": torch.ones(n)} for n in range(5)]
    pack(samples, tmp_path / "c.lk", workers=0)
    dataset = open_cache(tmp_path / "c.lk", transform=Fails(error))
    rows = [4, 1, 2, 0]
    read = Subset(dataset, rows) if subset else dataset
    order = [0, 1, 2, 3] if subset else rows

    def loop(order):
        return list(
            build_loader(
                read, batch_size=4, sampler=order, num_workers=0, collate_fn=list
            )
        )

    with pytest.raises(LoaderError, match=r"Sample '2' \(row 2\) could not be read"):
        loop(order)
    [batch] = loop([row for row in order if row != order[2]])
    assert_same(batch, [Fails(error)(samples[row]) for row in (4, 1, 0)])
