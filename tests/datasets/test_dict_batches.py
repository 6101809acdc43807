"""Batches of dicts are torch's own where shapes agree, and ragged by choice."""

import dataclasses
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, default_collate

from loaderkit import SafeDataset, open_cache, pack
from loaderkit.datasets.dict_batches import collate_samples
from loaderkit.datasets.owned_copy import shares_memory
from loaderkit.datasets.ragged import Packed, Padded
from loaderkit.errors import DatasetError
from loaderkit.testing import assert_same


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Item:
    x: torch.Tensor
    n: int


FIELDS = {
    "tensor": lambda i: torch.randn(2, 3),
    "number": lambda i: torch.tensor(float(i)),
    "half": lambda i: torch.ones(3, dtype=torch.bfloat16) * i,
    "mask": lambda i: torch.tensor([True, i % 2 == 0]),
    "array": lambda i: np.arange(3.0) + i,
    "scalar": lambda i: np.float32(i),
    "int": lambda i: i,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 2 == 0,
    "text": lambda i: f"n{i} ü",
    "bytes": lambda i: b"x" * i,
    "tuple": lambda i: (torch.ones(1) * i, f"t{i}"),
    "named": lambda i: Pair(i, torch.zeros(2)),
    "ordered": lambda i: OrderedDict(b=i, a=torch.ones(1)),
    "list": lambda i: [torch.ones(2), torch.ones(3)],
    "plain": lambda i: [1, i],
    "empty": lambda i: torch.empty(0, 4),
}


@pytest.mark.slow
@given(
    names=st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, unique=True),
    rows=st.lists(st.integers(0, 6), min_size=1, max_size=9),
    small=st.sampled_from([100, 1 << 20]),
)
@settings(max_examples=60)
def test_samples_of_one_shape_batch_as_with_torch(tmp_path_factory, names, rows, small):
    samples = [{name: FIELDS[name](i) for name in names} for i in range(7)]
    path = tmp_path_factory.mktemp("d") / "c.lk"

    dataset = pack(samples, path, workers=0, shard_bytes=small)

    assert_same(dataset.batch(rows), default_collate([samples[row] for row in rows]))


@pytest.mark.parametrize("sample", [(torch.ones(2), 3), Pair(1, "a"), torch.ones(4), 7])
def test_samples_that_are_no_dict_batch_as_with_torch(tmp_path, sample):
    dataset = pack([sample, sample], tmp_path / "c.lk")

    assert_same(dataset.batch([0, 1]), default_collate([sample, sample]))


def test_none_stays_a_list_and_a_dataclass_a_dataclass(tmp_path):
    samples = [{"a": None, "item": Item(torch.ones(2), i)} for i in range(3)]

    batch = pack(samples, tmp_path / "c.lk").batch([0, 2])

    assert batch["a"] == [None, None]
    assert_same(batch["item"], Item(torch.ones(2, 2), torch.tensor([0, 2])))


RAGGED = [{"t": torch.full((n, 2), float(n)), "y": n} for n in (1, 3, 0, 2)]


def test_ragged_samples_are_padded_with_their_lengths_and_mask(tmp_path):
    batch = pack(RAGGED, tmp_path / "c.lk").batch([1, 2, 0])["t"]

    assert isinstance(batch, Padded)
    assert batch.values.shape == (3, 3, 2)
    assert batch.lengths.tolist() == [3, 0, 1]
    assert batch.mask.sum(1).tolist() == [3, 0, 1]
    assert not batch.values[~batch.mask].any()
    assert_same(batch.to_list(), [RAGGED[1]["t"], RAGGED[2]["t"], RAGGED[0]["t"]])


def test_fields_that_are_equally_long_share_no_lengths(tmp_path):
    samples = [{"a": torch.ones(n), "b": torch.zeros(n, 2)} for n in (1, 3, 2)]

    batch = pack(samples, tmp_path / "c.lk").batch([0, 1])

    assert not shares_memory(batch["a"], batch["b"])


def test_ragged_samples_can_be_packed_end_to_end(tmp_path):
    pack(RAGGED, tmp_path / "c.lk")

    batch = open_cache(tmp_path / "c.lk", ragged="packed").batch([1, 3])["t"]

    assert isinstance(batch, Packed)
    assert batch.offsets.tolist() == [0, 3, 5]
    assert_same(batch.to_list(), [RAGGED[1]["t"], RAGGED[3]["t"]])


def test_ragged_samples_can_be_one_jagged_tensor(tmp_path):
    pack(RAGGED, tmp_path / "c.lk")

    batch = open_cache(tmp_path / "c.lk", ragged="jagged").batch([1, 3])["t"]

    assert batch.layout is torch.jagged
    assert_same(list(batch.unbind()), [RAGGED[1]["t"], RAGGED[3]["t"]])


def test_a_field_that_varies_is_ragged_in_every_batch(tmp_path):
    dataset = pack(RAGGED, tmp_path / "c.lk")

    assert isinstance(dataset.batch([1, 1])["t"], Padded)  # one shape in this batch


NESTS = {
    "dict": lambda t: {"t": t, "n": len(t)},
    "dict of numbers": lambda t: {1: t},
    "tuple": lambda t: (t, "text"),
    "list": lambda t: [torch.ones(2), t],
    "named": lambda t: Pair(t, torch.zeros(2)),
    "dataclass": lambda t: Item(t, 3),
    "deep": lambda t: {"a": [{"t": t}], "t": torch.ones(3)},
    "alone": lambda t: t,
    "array": lambda t: {"t": t.numpy()},
    "in two ways": lambda t: {"t": t, **({"rare": 1} if len(t) == 5 else {})},
}
LENGTHS = [1, 3, 3, 5, 1, 3]


@pytest.mark.slow
@given(
    nest=st.sampled_from(sorted(NESTS)),
    rows=st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=3),
    ragged=st.sampled_from(["padded", "packed"]),
)
@settings(max_examples=40)
def test_how_a_field_is_joined_follows_from_the_dataset_and_not_from_the_draw(
    tmp_path_factory, nest, rows, ragged
):
    samples = [NESTS[nest](torch.full((n, 2), float(n))) for n in LENGTHS]
    path = tmp_path_factory.mktemp("d") / "c.lk"
    dataset = pack(samples, path, workers=0)
    dataset = open_cache(path, ragged=ragged, classes=[Pair, Item])

    [by_torch] = DataLoader(dataset[rows], len(rows), collate_fn=dataset.collate)
    by_hand = dataset.collate([dataset[row] for row in rows])
    gathered = dataset.batch(rows)

    assert_same(by_torch, gathered)
    assert_same(by_hand, gathered)
    field = {"padded": Padded, "packed": Packed}[ragged]
    assert sum(isinstance(part, field) for part in parts_of(gathered)) == 1


def parts_of(batch: Any) -> list[Any]:
    """List a batch and all that it holds, down to its ragged fields."""
    inside: Any = ()
    if dataclasses.is_dataclass(batch):
        inside = vars(batch).values()
    elif isinstance(batch, dict):
        inside = batch.values()
    elif isinstance(batch, list | tuple) and not isinstance(batch, Padded | Packed):
        inside = batch
    return [batch, *(part for item in inside for part in parts_of(item))]


def test_a_column_of_samples_built_differently_is_ragged_as_their_batches_are(tmp_path):
    samples = [{"t": torch.ones(n, 2), "rare": 1} for n in (3, 5, 5)]
    samples[1]["rare"] = 1.5

    dataset = pack(samples, tmp_path / "c.lk")[[1, 2]]

    assert isinstance(dataset["t"], Padded)
    assert isinstance(dataset.batch([0, 1])["t"], Padded)


def test_what_a_transform_makes_is_ragged_where_a_pad_value_names_it(tmp_path):
    pack(RAGGED, tmp_path / "c.lk")

    def first_row(sample):
        return {"t": sample["t"], "first": sample["t"][:1]}

    named = open_cache(tmp_path / "c.lk", transform=first_row, pad_value={"t": -1})
    batch = named.batch([1, 1])

    assert isinstance(batch["t"], Padded)
    assert batch["first"].shape == (2, 1, 2)  # one size, as the transform makes it


@pytest.mark.parametrize("ragged", ["padded", "packed", "jagged"])
def test_without_a_cache_the_choice_is_the_same(ragged):
    class Bare(SafeDataset):
        def keys(self):
            return range(4)

        def load(self, key):
            return RAGGED[key]

    kinds = {"padded": Padded, "packed": Packed, "jagged": torch.Tensor}

    assert isinstance(Bare(ragged=ragged).batch([0, 1])["t"], kinds[ragged])


def test_another_word_for_ragged_is_refused():
    with pytest.raises(ValueError, match="'padded', 'packed' or 'jagged', got 'flat'"):
        SafeDataset(ragged="flat")


def test_shapes_that_differ_in_two_axes_are_named(tmp_path):
    samples = [{"image": torch.ones(2, 3)}, {"image": torch.ones(3, 2)}]
    dataset = pack(samples, tmp_path / "c.lk")

    assert_same(dataset[1], samples[1])
    told = r"'image' has shapes in these samples .*: \[2, 3\] and \[3, 2\]"
    for read in (lambda: dataset.batch([0, 1]), lambda: dataset["image"]):
        with pytest.raises(DatasetError, match=told):
            read()


def test_samples_that_differ_in_their_keys_are_kept_and_not_joined(tmp_path):
    samples = [{"a": 1}, {"a": 2, "b": torch.ones(1)}]
    dataset = pack(samples, tmp_path / "c.lk")

    assert_same([dataset[0], dataset[1]], samples)
    for rows in ([0, 1], [1, 0]):
        with pytest.raises(DatasetError, match=r"lacks \['b'\]"):
            dataset.batch(rows)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_plain_loader_of_torch_works_on_our_dataset(tmp_path, workers):
    samples = [{"x": torch.ones(3) * i, "y": i} for i in range(6)]
    dataset = pack(samples, tmp_path / "c.lk")

    plain = list(DataLoader(dataset, batch_size=3, num_workers=workers))
    ours = DataLoader(
        dataset, batch_size=3, num_workers=workers, collate_fn=dataset.collate
    )

    wanted = [default_collate(samples[:3]), default_collate(samples[3:])]
    assert_same(plain, wanted)
    assert_same(list(ours), wanted)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=25, deadline=None)
def test_ragged_fields_are_padded_as_with_pad_sequence(tmp_path_factory, data):
    """Of any size, dtype and layout on disk; zeros behind what was in memory before."""
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=2, max_size=12))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    trailing_shape = data.draw(
        st.sampled_from([(), (3,), (2, 3), (900,), (20_000,), (0,)])
    )
    samples = [
        {"x": torch.randint(1, 99, (n, *trailing_shape)).to(dtype)} for n in lengths
    ]
    cache = pack(
        samples,
        tmp_path_factory.mktemp("c") / "c.lk",
        workers=0,
        shard_bytes=data.draw(st.sampled_from([1, 100_000, 1 << 28])),
        compression=data.draw(st.sampled_from([None, "gzip"])),
    )
    rows = st.integers(0, len(samples) - 1)
    rows = data.draw(st.lists(rows, min_size=1, max_size=9))

    batch = cache.batch(rows)["x"]

    if len(set(lengths)) == 1:  # one shape in the whole cache
        assert_same(batch, torch.stack([samples[row]["x"] for row in rows]))
        return
    chosen = [samples[row]["x"] for row in rows]
    assert_same(batch.values, pad_sequence(chosen, batch_first=True))
    assert batch.lengths.tolist() == [len(sample) for sample in chosen]
    assert batch.mask.sum(1).tolist() == batch.lengths.tolist()
    assert_same(batch.to_list(), chosen)


def test_a_batch_of_counters_has_the_counts_of_each(tmp_path):
    """And not those that ``default_collate`` makes of them: ``Counter.update`` adds."""
    samples = [Counter(a=i, b=2 * i) for i in range(1, 4)]
    packed = pack(samples, tmp_path / "c.lk", workers=0)

    batch = packed.batch([0, 1, 2])

    assert type(batch) is Counter
    assert_same(dict(batch), default_collate(list(map(dict, samples))))


# None is told by its field, wherever it stands: tests/test_wrong_values.py.
@pytest.mark.parametrize("other", [torch.ones(2), 3, "text", [1], (1, 2)])
@pytest.mark.parametrize("key", [None, "field"])
def test_a_dict_and_something_else_are_refused_with_both_kinds(other, key):
    samples = [{"x": 1}, {"x": 2}, other]
    if key is not None:
        samples = [{key: sample} for sample in samples]

    with pytest.raises(DatasetError, match="0 and 2 of a batch") as raised:
        collate_samples(samples, "padded", lambda *_: None)

    assert "a dict and" in str(raised.value)


def test_dicts_of_two_classes_are_joined():
    samples = [{"x": 1}, OrderedDict(x=2)]

    joined = collate_samples(samples, "padded", lambda *_: None)

    assert joined["x"].tolist() == [1, 2]
