"""Batches of datasets of datasets are those of one cache of all their samples.

The oracle is one cache that was packed of the same samples in the same order.
"""

import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset
from torch_geometric.data import Data

from loaderkit import build_loader, open_cache, pack
from loaderkit.datasets.ragged import Packed, Padded
from loaderkit.errors import DatasetError, LoaderError, LoaderkitError
from loaderkit.loader.description import sizes_of
from loaderkit.testing import assert_same

# What a field may be, by name: a function of (length, number of the part, row in it).
# Of "even" parts all samples have one length.
FIELDS = {
    "tensor": lambda n, part, i: torch.arange(n * 2.0).reshape(n, 2) + i,
    "array": lambda n, part, i: np.arange(n * 1.0) + i,
    "big endian": lambda n, part, i: np.arange(n, dtype=">i4"),
    "list": lambda n, part, i: list(range(n)),
    "text": lambda n, part, i: "a" * n,
    "number": lambda n, part, i: i / 3,
    "int or float": lambda n, part, i: i if part % 2 else i / 2,
    "bytes": lambda n, part, i: b"x" * n,
    "none": lambda n, part, i: None,
    "scalar": lambda n, part, i: torch.tensor(float(i)),
    "bfloat16": lambda n, part, i: torch.ones(n, dtype=torch.bfloat16),
    "nest": lambda n, part, i: {"a": torch.ones(n), "b": torch.zeros(3), "s": "x"},
    "list of dicts": lambda n, part, i: [{"t": torch.ones(n)}, torch.ones(2)],
    "tuple": lambda n, part, i: (torch.ones(n), i),
    "last axis": lambda n, part, i: torch.ones(2, n),
    "no numbers": lambda n, part, i: torch.ones(n, 0),
    "shapes": lambda n, part, i: torch.ones(n, 2 + part % 2),
    "axes": lambda n, part, i: torch.ones((n,) * (1 + part % 2)),
    "dtypes": lambda n, part, i: torch.ones(
        n, dtype=[torch.float, torch.int][part % 2]
    ),
    "optional": lambda n, part, i: torch.ones(n) if part % 2 else None,
    "missing": lambda n, part, i: torch.ones(n) if part % 2 else ...,
}


def draw_part(chance, names, number, count):
    """Draw samples; each field is even in them, or ragged."""
    lengths = {name: chance.choice([None, 2, 2, 3]) for name in names}
    samples = []
    for row in range(count):
        fields = {}
        for name in names:
            length = lengths[name]
            if length is None:
                length = chance.randint(0, 4)
            value = FIELDS[name](length, number, row)
            if value is not ...:
                fields[name] = value
        samples.append(fields)
    return samples


def draw_parts(chance, count=None):
    """Draw lists of samples that may be read one behind the other, or side by side."""
    names = chance.sample(sorted(FIELDS), chance.randint(1, 3))
    form = chance.choice(["dict", "graph", "alone"])
    parts = []
    for number in range(chance.randint(1, 3)):
        samples = draw_part(chance, names, number, count or chance.randint(1, 4))
        if form == "graph":
            samples = [
                Data(num_nodes=2, e=torch.ones(2), **fields) for fields in samples
            ]
        elif form == "alone":
            # None is no sample, and is refused when it is packed.
            samples = [fields.get(names[0]) for fields in samples]
            samples = [0.5 if sample is None else sample for sample in samples]
        parts.append(samples)
    return parts


def batches_of(dataset):
    """Load a dataset; None where it is refused, as unlike samples are."""
    try:
        return list(build_loader(dataset, batch_size=2, num_workers=0, probe=False))
    except LoaderkitError as error:
        # "correct F" is said of functions of the user's: there are none here.
        return f"fails in {error.fix}" if error.fix.startswith("correct") else None


def pack_all(parts, folder, **options):
    packed = []
    for number, samples in enumerate(parts):
        pack(samples, folder / f"{number}.lk", workers=0)
        packed.append(open_cache(folder / f"{number}.lk", **options))
    return packed


def compose(datasets, chance):
    """Read datasets one behind the other, and some of their rows."""
    if chance.random() < 0.3 and len(datasets) > 1:
        composed = datasets[0]
        for dataset in datasets[1:]:
            composed = composed + dataset
    else:
        composed = ConcatDataset(datasets)
    if chance.random() < 0.3:
        composed = ConcatDataset([Subset(composed, range(len(composed)))])
    rows = list(range(len(composed)))
    if chance.random() < 0.3:
        rows = [chance.choice(rows) for _ in range(5)]
        composed = Subset(composed, rows)
    return composed, rows


@pytest.mark.many_cases(quick=4)
@pytest.mark.parametrize("seed", range(24))
def test_parts_read_one_behind_the_other_are_joined_as_one_cache(tmp_path, seed):
    chance = random.Random(seed)
    parts = draw_parts(chance)
    ragged = chance.choice(["padded", "padded", "packed"])
    samples = [sample for part in parts for sample in part]
    options = {} if isinstance(samples[0], Data) else {"ragged": ragged}

    composed, rows = compose(pack_all(parts, tmp_path, **options), chance)
    [one] = pack_all([samples], tmp_path / "one", **options)

    assert_same(batches_of(composed), batches_of(Subset(one, rows)))


@pytest.mark.many_cases
@pytest.mark.parametrize("seed", range(8))
def test_parts_read_side_by_side_are_joined_as_one_cache(tmp_path, seed):
    chance = random.Random(seed)
    parts = draw_parts(chance, count=4)
    while isinstance(parts[0][0], Data):  # a cache has no graphs inside of tuples
        parts = draw_parts(chance, count=4)
    names = [f"part {number}" for number in range(len(parts))]
    packed = pack_all(parts, tmp_path)

    tuples = [[tuple(row) for row in zip(*parts, strict=True)]]
    [one] = pack_all(tuples, tmp_path / "tuples")
    assert_same(batches_of(StackDataset(*packed)), batches_of(one))

    dicts = [[dict(zip(names, row, strict=True)) for row in tuples[0]]]
    [one] = pack_all(dicts, tmp_path / "dicts")
    stacked = StackDataset(**dict(zip(names, packed, strict=True)))
    assert_same(batches_of(stacked), batches_of(one))


def texts(lengths, **more):
    return [{"ids": torch.arange(n), **more} for n in lengths]


def test_a_field_that_is_even_in_each_part_is_ragged_in_all(tmp_path):
    two, three = pack_all([texts([2, 2]), texts([3, 3])], tmp_path)

    for dataset in (two + three, ConcatDataset([three, two])):
        for batch in batches_of(dataset):
            assert isinstance(batch["ids"], Padded)


def test_a_sum_joins_its_samples_in_any_loader(tmp_path):
    two, three = pack_all([texts([2, 2, 2]), texts([3, 3])], tmp_path)
    both = pickle.loads(pickle.dumps(two + three + two))

    loader = DataLoader(both, batch_size=2, collate_fn=both.collate)

    assert_same(list(loader), batches_of(both))
    assert all(isinstance(batch["ids"], Padded) for batch in loader)
    unpacked = two + texts([2])
    assert unpacked.collate([two[0], two[1]])["ids"].shape == (2, 2)
    with pytest.raises(LoaderError, match="not packed"):
        _ = (two + three + texts([2])).collate


def test_stacks_one_behind_the_other_are_joined_item_by_item(tmp_path):
    two, three = pack_all([texts([2, 2]), texts([3, 3])], tmp_path)
    packed = open_cache(three.cache, ragged="packed")

    both = ConcatDataset([StackDataset(two, packed), StackDataset(three, packed)])
    [first, _] = batches_of(both)

    assert isinstance(first[0]["ids"], Padded)
    assert first[1]["ids"].shape == (2, 3)
    ragged = open_cache(pack(texts([1, 2]), tmp_path / "r.lk").cache, ragged="packed")
    [batch] = batches_of(StackDataset(text=two, more=ragged, label=[0, 1]))
    assert isinstance(batch["more"]["ids"], Packed)
    assert batch["label"].tolist() == [0, 1]


def test_fields_of_graphs_in_a_stack_can_be_named(tmp_path):
    graphs = pack([Data(x=torch.ones(n, 1)) for n in (1, 2)], tmp_path / "g.lk")
    stack = StackDataset(graphs, [0, 1])

    options = {"batch_size": 2, "num_workers": 0, "probe": False}
    [[batch, labels]] = build_loader(stack, follow_batch=["x"], **options)

    assert batch.x_batch.tolist() == [0, 1, 1]
    assert labels.tolist() == [0, 1]
    with pytest.raises(DatasetError, match="follow_batch"):
        next(iter(build_loader(StackDataset([0, 1]), follow_batch=["x"], **options)))


class MadeWhenRead(list):
    """Makes its samples as they are read, for all that anybody can tell."""

    def __getitem__(self, row):
        return super().__getitem__(row)


def test_sizes_of_stacked_samples_are_those_of_their_items(tmp_path):
    graphs = pack([Data(x=torch.ones(n, 1)) for n in (1, 2, 3)], tmp_path / "g.lk")
    long, short = pack_all([texts([4, 5, 6]), texts([1, 9, 2])], tmp_path)

    assert sizes_of(StackDataset(graphs, long, [0, 1, 2]), "nodes").tolist() == [
        1,
        2,
        3,
    ]
    assert sizes_of(StackDataset(a=graphs, b=graphs), "nodes").tolist() == [2, 4, 6]
    [one] = pack_all([list(StackDataset(long, short))], tmp_path / "one")
    for name in ("tokens", "bytes"):
        together = sizes_of(StackDataset(long, short), name)
        assert together.tolist() == sizes_of(one, name).tolist()
    in_memory = [Data(x=torch.ones(2, 1))] * 3
    with_graphs = sizes_of(StackDataset(graphs, in_memory), "bytes")
    assert with_graphs.tolist() == [4 + 8, 8 + 8, 12 + 8]
    assert sizes_of(StackDataset(graphs, in_memory), "nodes").tolist() == [3, 4, 5]
    made_when_read = MadeWhenRead(in_memory)
    for name in ("bytes", "nodes"):
        with pytest.raises(LoaderError, match=f"{name} of the samples are not known"):
            sizes_of(StackDataset(graphs, made_when_read), name)


UNLIKE = {
    "of a list": (lambda part: list(part), r"part 1 of the ConcatDataset, a list"),
    "padded otherwise": (
        lambda part: open_cache(part.cache, pad_value=-1),
        "two ways: pad_value=0 and pad_value=-1",
    ),
    "packed": (
        lambda part: open_cache(part.cache, ragged="packed"),
        "two ways: ragged='padded' and ragged='packed'",
    ),
}


@pytest.mark.parametrize("how", sorted(UNLIKE))
def test_parts_that_join_a_ragged_field_otherwise_are_refused_at_the_door(
    tmp_path, how
):
    change, match = UNLIKE[how]
    ragged, other = pack_all([texts([2, 3]), texts([2, 2])], tmp_path)

    unlike = ConcatDataset([ragged, change(other)])
    with pytest.raises(LoaderError, match=match):
        build_loader(unlike, batch_size=2)
    with pytest.raises(LoaderError, match=match):
        build_loader(StackDataset(unlike, range(4)), batch_size=2)

    by_hand = build_loader(unlike, batch_size=2, collate_fn=list, num_workers=0)
    assert len(list(by_hand)) == 2
    even = ConcatDataset([other, change(other)])
    assert [batch["ids"].shape for batch in batches_of(even)] == [(2, 2), (2, 2)]


def test_images_of_several_sizes_are_stacked_where_a_batch_has_one(tmp_path):
    sizes = [(3, 20, 30), (3, 20, 30), (3, 21, 30), (3, 20, 31)]
    images = pack([{"image": torch.ones(size)} for size in sizes], tmp_path / "i.lk")

    assert images.batch([0, 1])["image"].shape == (2, 3, 20, 30)
    assert images.batch([2])["image"].shape == (1, 3, 21, 30)
    assert images[[0, 1]]["image"].shape == (2, 3, 20, 30)
    with pytest.raises(DatasetError, match=r"\[3, 20, 30\] and \[3, 21, 30\]"):
        images.batch([0, 2])


def test_samples_that_differ_in_another_axis_than_the_first_are_told_to_swap_them(
    tmp_path,
):
    sounds = [{"sound": torch.ones(2, n)} for n in (5, 6)]
    pack(sounds, tmp_path / "a.lk")

    with pytest.raises(DatasetError, match=r"movedim\(1, 0\)"):
        open_cache(tmp_path / "a.lk").batch([0, 1])

    def swap(sample):
        return {"sound": sample["sound"].movedim(1, 0)}

    swapped = open_cache(tmp_path / "a.lk", transform=swap)
    assert swapped.batch([0, 1])["sound"].values.shape == (2, 6, 2)
