"""A field that ``pad_value`` names is padded with it, or the name is refused."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset
from torch_geometric.data import Data

import loaderkit
from loaderkit.datasets.ragged import Padded
from loaderkit.datasets.safe import SafeDataset
from loaderkit.errors import DatasetError


@dataclasses.dataclass
class Item:
    y: object


def graph(n):
    return Data(x=torch.ones(n, 2), y=torch.tensor([1]))


def coo(_):
    return torch.eye(2).to_sparse()


# What each is of a sample of n rows, and what becomes of the name "y".
FIELDS = {
    "int": (lambda n: n, "refused"),
    "float": (float, "refused"),
    "bool": (bool, "refused"),
    "complex": (complex, "refused"),
    "big int": (lambda n: 2**70 + n, "refused"),
    "numpy number": (np.float32, "refused"),
    "0-d tensor": (torch.tensor, "refused"),
    "0-d array": (np.array, "refused"),
    "str": (lambda n: "a" * n, "refused"),
    "bytes": (lambda n: b"a" * n, "refused"),
    "list": (lambda n: list(range(n)), "refused"),
    "even list": (lambda _: [1, 2, 3], "refused"),
    "list of texts": (lambda n: ["a"] * n, "refused"),
    "sparse": (coo, "refused"),
    "empty dict": (lambda _: {}, "refused"),
    "dict of numbers": (lambda n: {"a": n, "b": "text"}, "refused"),
    "even tensor": (lambda _: torch.ones(3), "no place to fill"),
    "even array": (lambda _: np.ones((3, 2)), "no place to fill"),
    "None": (lambda _: None, "refused where all samples are known"),
    "int or None": (lambda n: n if n > 2 else None, "refused"),
    "float or None": (lambda n: n / 2 if n > 2 else None, "refused"),
    "text or None": (lambda n: "a" * n if n > 2 else None, "refused"),
    "list or None": (lambda n: [n, 2] if n > 2 else None, "refused"),
    "numbers or None": (lambda n: {"a": n} if n > 2 else None, "refused"),
    "tensor": (lambda n: torch.ones(n), "padded"),
    "matrix": (lambda n: torch.ones(n, 2), "padded"),
    "array": (lambda n: np.ones(n), "padded"),
    "dict": (lambda n: {"a": torch.ones(n), "b": 1}, "padded"),
    "tuple": (lambda n: (torch.ones(n), "text"), "padded"),
    "list of tensors": (lambda n: [torch.ones(n), torch.ones(n)], "padded"),
    "missing in some": (lambda n: torch.ones(n) if n > 1 else None, "no place to fill"),
}
NESTS = {
    "dict": lambda value: {"y": value, "x": 1},
    "nested": lambda value: {"in": {"y": value}, "x": 1},
    "dataclass": Item,
    "in a tuple": lambda value: (1, {"y": value}),
}
LENGTHS = (1, 3, 2, 2)


class Loaded(SafeDataset):
    def __init__(self, samples, cache=None, **options):
        super().__init__(cache=cache, **options)
        self.samples = samples

    def keys(self):
        return range(len(self.samples))

    def load(self, key):
        return self.samples[key]


def first_batch(dataset):
    return next(iter(loaderkit.build_loader(dataset, batch_size=2, num_workers=0)))


DATASETS = {
    "cache": lambda _, opened: opened().batch([1, 2]),
    "loaded": lambda samples, _: Loaded(samples, pad_value={"y": 5}).batch([1, 2]),
    "loader": lambda _, opened: first_batch(Subset(opened(), [1, 2])),
    "parts": lambda _, opened: first_batch(
        ConcatDataset([Subset(opened(), [1]), Subset(opened(), [2])])
    ),
    "stack": lambda _, opened: first_batch(
        StackDataset(Subset(opened(), [1, 2]), Subset(opened(), [3, 1]))
    ),
    "rows": lambda _, opened: opened()[[1, 2]].batch([0, 1]),
}


def padded_in(batch):
    if isinstance(batch, Padded):
        return [batch]
    if dataclasses.is_dataclass(batch):
        batch = vars(batch)
    if isinstance(batch, dict):
        batch = list(batch.values())
    if not isinstance(batch, list | tuple):
        return []
    return [field for part in batch for field in padded_in(part)]


def open_cache(path, transforms):
    """Open a cache, with a transform or not; of what one makes nothing is known."""
    transform = (lambda sample: sample) if transforms else None
    return loaderkit.open_cache(
        path, pad_value={"y": 5}, classes=[Item], transform=transform
    )


# Lists that no cache knows are told of, too.
@pytest.mark.filterwarnings("ignore:.* lists of 2 and of 3 items:UserWarning")
@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_named_is_padded_with_its_number_or_refused(tmp_path, field):
    make, wanted = FIELDS[field]
    ways = itertools.product(DATASETS, [False, True])
    for number, (dataset, transforms) in enumerate(ways):
        nest = list(NESTS.values())[number % len(NESTS)]
        samples = [nest(make(n)) for n in LENGTHS]
        path = tmp_path / f"{number % len(NESTS)}.lk"
        if not path.exists():
            loaderkit.pack(samples, path, workers=0)
        opened = functools.partial(open_cache, path, transforms)
        are_all_known = dataset != "loaded" and not transforms
        if wanted == "refused" or (wanted.startswith("refused") and are_all_known):
            # Sparse tensors in memory are joined by nobody, named or not.
            with pytest.raises(DatasetError, match=r"names 'y'|cannot be joined"):
                DATASETS[dataset](samples, opened)
            continue
        fields = padded_in(DATASETS[dataset](samples, opened))
        if wanted == "padded":
            assert fields
        assert all((field.values[~field.mask] == 5).all() for field in fields)


def test_a_field_of_graphs_is_refused_too():
    samples = [{"graph": graph(n), "words": torch.ones(2)} for n in (1, 2)]

    for name in ("graph", "y", "graph.y"):
        dataset = Loaded(samples, pad_value={name: 5})
        with pytest.raises(DatasetError, match="graph"):
            dataset.batch([0, 1])


def test_what_can_be_padded_is_told_when_the_cache_is_opened(tmp_path):
    samples = [{"y": n, "words": {"ids": torch.ones(n)}, "z": "a"} for n in (1, 2)]
    loaderkit.pack(samples, tmp_path / "a.lk", workers=0)

    with pytest.raises(DatasetError, match="one number in each sample") as caught:
        loaderkit.open_cache(tmp_path / "a.lk", pad_value={"y": 5})

    assert caught.value.fix == "leave 'y' out; what can be padded is 'words.ids'"


def test_one_name_of_two_fields_is_right_where_one_of_them_is_padded(tmp_path):
    samples = [{"a": {"y": n}, "b": {"y": torch.ones(n)}} for n in (1, 2)]
    loaderkit.pack(samples, tmp_path / "a.lk", workers=0)

    batch = loaderkit.open_cache(tmp_path / "a.lk", pad_value={"y": 5}).batch([0, 1])

    assert batch["b"]["y"].values.tolist() == [[1, 5], [1, 1]]
    with pytest.raises(DatasetError, match=r"'a\.y', which is one number"):
        loaderkit.open_cache(tmp_path / "a.lk", pad_value={"a.y": 5})


def test_a_list_of_numbers_is_refused_with_what_makes_a_tensor_of_it(tmp_path):
    loaderkit.pack([{"tokens": [1] * n} for n in (1, 3)], tmp_path / "a.lk", workers=0)

    with pytest.raises(DatasetError, match="a list of numbers stays a list") as caught:
        loaderkit.open_cache(tmp_path / "a.lk", pad_value={"tokens": -1})

    assert 'with_format("torch")' in caught.value.fix


def test_a_name_that_is_a_number_in_some_samples_and_a_tensor_in_others_is_right(
    tmp_path,
):
    samples = [{"y": 1}, {"y": 2}, {"y": torch.ones(1)}, {"y": torch.ones(2)}]
    loaderkit.pack(samples, tmp_path / "a.lk", workers=0)

    dataset = loaderkit.open_cache(tmp_path / "a.lk", pad_value={"y": 5})

    assert dataset.batch([0, 1])["y"].tolist() == [1, 2]
    assert dataset.batch([2, 3])["y"].values.tolist() == [[1, 5], [1, 1]]


@pytest.mark.parametrize("number", [1, 0.5])
def test_the_fix_for_a_number_or_none_gives_a_number_for_none(tmp_path, number):
    samples = [{"x": torch.ones(2), "opt": value} for value in (None, number)]
    loaderkit.pack(samples, tmp_path / "a.lk", workers=0)
    with pytest.raises(DatasetError, match="number in each sample, or None") as caught:
        loaderkit.open_cache(tmp_path / "a.lk", pad_value={"opt": 3})

    given = {"transform": eval(caught.value.fix.removeprefix("transform="))}

    batch = loaderkit.open_cache(tmp_path / "a.lk", **given).batch([0, 1])
    filled = [sample | {"opt": sample["opt"] or type(number)(3)} for sample in samples]
    expected = torch.utils.data.default_collate(filled)
    assert torch.equal(batch["opt"], expected["opt"])
    assert batch["opt"].dtype == expected["opt"].dtype


@pytest.mark.parametrize("value", [1, 0.5, "a"])
def test_a_name_that_is_none_in_the_first_batch_is_decided_by_a_later_one(value):
    dataset = Loaded([{"y": None}, {"y": None}, {"y": value}], pad_value={"y": 5})

    assert dataset.batch([0, 1])["y"] == [None, None]

    with pytest.raises(DatasetError, match="in each sample, or None"):
        dataset.batch([1, 2])


def test_a_name_that_is_none_in_the_first_batch_is_padded_in_a_later_one():
    samples = [{"y": None}, {"y": None}, {"y": torch.ones(1)}, {"y": torch.ones(2)}]
    dataset = Loaded(samples, pad_value={"y": 5})

    dataset.batch([0, 1])

    assert dataset.batch([2, 3])["y"].values.tolist() == [[1, 5], [1, 1]]
