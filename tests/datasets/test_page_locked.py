"""Batches gathered into page-locked memory: all of each, once, and the same."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from replayed_page_locking import ReplayedMemory, blocks_of, dense_tensors
from strategies import FIELDS, graphs, hetero_graphs, paired_graphs
from test_dict_batches import FIELDS as DICT_FIELDS
from torch.utils.data import default_collate
from torch_geometric.data import Batch, Data

from loaderkit import open_cache, owned_copy, pack
from loaderkit.testing import assert_same

ROWS = st.lists(st.integers(0, 8), min_size=1, max_size=12)
OF_OTHERS = {"adj", "csr", "edges_index", "cluster_index", "array"}
"""Fields of graphs that PyG joins, or keeps as the values that its samples have."""
OF_OTHERS_IN_DICTS = {"bytes", "plain"}


def packed(samples, folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pack(samples, folder / "c.lk", workers=0, **options)


def made_in(replay, dataset, rows, **options):
    """A batch as the loader has it made, and whether all of it was made there."""
    page_locked = replay.batch()
    batch = dataset.collate(dataset.unread(rows, page_locked), **options)
    assert not replay.refused
    return batch, page_locked.is_whole


def joined_by_pyg(samples, *options):
    try:
        return Batch.from_data_list(samples, *options)
    except Exception:  # noqa: BLE001 -- which errors there are, other tests say
        assume(condition=False)


@pytest.fixture
def folder(tmp_path_factory):
    return lambda: tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@given(st.data())
@settings(max_examples=25)
def test_every_dense_tensor_of_a_batch_of_graphs_is_made_there(folder, data):
    samples = data.draw(st.one_of(graphs(), hetero_graphs(), paired_graphs()))
    rows = [row % len(samples) for row in data.draw(ROWS)]
    stores = [store for sample in samples for store in sample.stores]
    known = {name for store in stores for name in store.keys()}  # noqa: SIM118
    follow = data.draw(st.sets(st.sampled_from(sorted(known) or ["x"]), max_size=2))
    follow &= known
    wanted = joined_by_pyg([owned_copy(samples[row]) for row in rows], list(follow))
    dataset = packed(
        samples, folder(), shard_bytes=data.draw(st.sampled_from([200, 1 << 20]))
    )
    replay = ReplayedMemory()

    batch, is_whole = made_in(replay, dataset, rows, follow_batch=follow)

    assert_same(batch, wanted)
    alike = dataset._open_cache().one_variant(np.array(rows)) is not None
    if alike and not known & OF_OTHERS:
        assert is_whole
    if is_whole:
        assert all(map(replay.has, dense_tensors(batch)))


@pytest.mark.many_cases(quick=10)
@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_field_of_graphs_is_made_there(folder, name):
    """One by one: drawn graphs seldom have a single field that is left out."""
    torch.manual_seed(0)
    samples = [Data(pos=torch.randn(n, 3), num_nodes=n) for n in (3, 1, 4, 2)]
    for number, sample in enumerate(samples):
        sample[name] = FIELDS[name](number, sample.num_nodes, torch.float32)
    wanted = joined_by_pyg(owned_copy([samples[2], samples[0]]))
    dataset = packed(samples, folder())
    replay = ReplayedMemory()

    batch, is_whole = made_in(replay, dataset, [2, 0])

    assert_same(batch, wanted)
    alike = dataset._open_cache().one_variant(np.array([2, 0])) is not None
    assert is_whole == (alike and name not in OF_OTHERS)
    if is_whole:
        assert all(map(replay.has, dense_tensors(batch)))


@pytest.mark.many_cases(quick=10)
@pytest.mark.parametrize("shard_bytes", [100, 1 << 20])
@pytest.mark.parametrize("name", sorted(DICT_FIELDS))
def test_every_field_of_dicts_is_made_there(folder, name, shard_bytes):
    samples = [{name: DICT_FIELDS[name](number), "n": number} for number in range(7)]
    dataset = packed(samples, folder(), shard_bytes=shard_bytes)
    replay = ReplayedMemory()

    batch, is_whole = made_in(replay, dataset, [5, 0, 3, 3, 6])

    assert_same(batch, default_collate([samples[row] for row in (5, 0, 3, 3, 6)]))
    assert is_whole == (name not in OF_OTHERS_IN_DICTS)
    if is_whole:
        assert all(map(replay.has, dense_tensors(batch)))


RAGGED_DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64)
PARTS = {
    "padded": lambda field: list(field),
    "packed": lambda field: list(field),
    "jagged": lambda field: [field.values(), field.offsets()],
}
"""Tensors of a ragged field."""


@pytest.mark.many_cases(quick=9)
@pytest.mark.parametrize("width", [(), (3,), (2, 2500)])
@pytest.mark.parametrize(
    ("ragged", "pad_value"),
    [("padded", 0), ("padded", 1), ("packed", 0), ("jagged", 0)],
)
def test_ragged_fields_are_made_there(folder, ragged, width, pad_value):
    lengths = [4, 0, 7, 7, 2, 9]
    samples = [
        {str(dtype): torch.ones(n, *width).to(dtype) for dtype in RAGGED_DTYPES}
        for n in lengths
    ]
    cache = packed(samples, folder()).cache
    dataset = open_cache(cache, ragged=ragged, pad_value=pad_value)
    rows = [5, 4, 0, 1, 3]
    wanted = dataset.batch(rows)
    replay = ReplayedMemory()

    batch, is_whole = made_in(replay, dataset, rows)

    assert is_whole
    for name, field in batch.items():
        parts, wanted_parts = PARTS[ragged](field), PARTS[ragged](wanted[name])
        assert_same(parts, wanted_parts)
        assert all(map(replay.has, parts))


def test_samples_that_are_built_differently_are_not_made_there(folder):
    samples = [Data(x=torch.ones(2, 2), z=z) for z in (1, torch.ones(1))]
    dataset = packed(samples, folder())
    replay = ReplayedMemory()

    batch, is_whole = made_in(replay, dataset, [0, 1])

    assert_same(batch, dataset.batch([0, 1]))
    assert not is_whole


def test_its_twin_without_it_makes_nothing_there(folder):
    dataset = packed([Data(x=torch.ones(n, 2)) for n in (1, 2, 3)], folder())
    replay = ReplayedMemory()
    made_in(replay, dataset, [0, 1])
    count = len(replay.made)

    dataset.collate(dataset.unread([0, 1]))
    dataset.batch([2, 1])

    assert count == len(replay.made) == 3  # x, batch, ptr


def test_batches_that_are_kept_stay_as_they_were(folder):
    """No tensor is in two batches, and each has memory of its own."""
    samples = [
        Data(x=torch.randn(n, 2), edge_index=torch.zeros(2, n, dtype=torch.int64))
        for n in range(1, 9)
    ]
    dataset = packed(samples, folder())
    replay = ReplayedMemory()
    kept = [made_in(replay, dataset, rows)[0] for rows in ([0, 1], [2, 3], [1, 0], [7])]
    copies = owned_copy(kept)

    for _ in range(3):
        changed, _ = made_in(replay, dataset, [5, 1])
        for tensor in dense_tensors(changed):
            tensor.fill_(9)

    assert_same(kept, copies)
    blocks = [block for batch in kept for block in blocks_of(batch)]
    assert len(set(blocks)) == len(blocks) == sum(len(dense_tensors(b)) for b in kept)
