"""A sampler of another dataset, given to a loader: the error names it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import loaderkit
from loaderkit.errors import OptionError
from loaderkit.loader.build import build_loader
from loaderkit.loader.missing_rows import (
    RowChooser,
    error_of_missing_rows,
    error_of_no_row,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_OTHER = range(9)
_SAMPLES = 5


class _Own(Dataset[torch.Tensor]):
    """A user's dataset, which reads without looking at its length."""

    def __init__(self) -> None:
        self.values = np.ones((_SAMPLES, 2))

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.from_numpy(self.values[row])


class _OwnSampler(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([0, 12])


def _imbalanced(weights: list[float]) -> Any:
    from torch_geometric.loader import ImbalancedSampler

    return ImbalancedSampler(torch.tensor(weights).long(), num_samples=64)


_SAMPLERS: dict[str, tuple[Callable[[], Any], str]] = {
    "random": (lambda: RandomSampler(_OTHER), "9 samples"),
    "sequential": (lambda: SequentialSampler(_OTHER), "9 samples"),
    "subset": (lambda: SubsetRandomSampler([0, 7, 8]), "3 rows"),
    "weighted": (lambda: WeightedRandomSampler([0.0] * 5 + [1.0] * 4, 4), "9 weights"),
    "imbalanced": (lambda: _imbalanced([0, 1] * 4 + [1]), "9 weights"),
    "distributed": (
        lambda: DistributedSampler(TensorDataset(torch.ones(9)), 1, 0),
        "9 samples",
    ),
    "list": (lambda: [4, 5], "2 rows"),
    "array": (lambda: np.arange(9), "9 rows"),
    "tensor": (lambda: torch.arange(9), "9 rows"),
    "negative": (lambda: [-6], "1 row "),
    "own": (_OwnSampler, "another dataset"),
}
_BATCH_SAMPLERS: dict[str, tuple[Callable[[], Any], str]] = {
    "sequential": (
        lambda: BatchSampler(SequentialSampler(_OTHER), 2, drop_last=False),
        "9 samples",
    ),
    "weighted": (
        lambda: BatchSampler(
            WeightedRandomSampler([0.0] * 5 + [1.0] * 4, 4), 2, drop_last=False
        ),
        "9 weights",
    ),
    "lists": (lambda: [[0, 1], [4, 5]], "2 batches"),
}
_CASES = [
    *(("sampler", name) for name in _SAMPLERS),
    *(("batch_sampler", name) for name in _BATCH_SAMPLERS),
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    samples = [{"x": torch.ones(2)}] * _SAMPLES
    folder: Path = tmp_path_factory.mktemp("missing rows")
    return loaderkit.pack(samples, folder / "data.lk", workers=0)


def _datasets(packed: Any) -> dict[str, Any]:
    return {
        "packed": packed,
        "list": [torch.ones(2)] * _SAMPLES,
        "tensors": TensorDataset(torch.ones(_SAMPLES)),
        "subset": Subset(packed, range(_SAMPLES)),
        "own": _Own(),
    }


def _options(option: str, name: str) -> tuple[dict[str, Any], str]:
    samplers = _SAMPLERS if option == "sampler" else _BATCH_SAMPLERS
    make, origin = samplers[name]
    options: dict[str, Any] = {option: make()}
    if option == "sampler":
        options["batch_size"] = 2
    return options, origin


@pytest.mark.parametrize(("option", "name"), _CASES)
@pytest.mark.parametrize("kind", ["packed", "list", "tensors", "subset", "own"])
def test_a_row_that_is_not_there_is_told_by_its_sampler_and_both_lengths(
    packed: Any, kind: str, option: str, name: str
) -> None:
    options, origin = _options(option, name)
    with pytest.raises(IndexError) as caught:
        list(build_loader(_datasets(packed)[kind], num_workers=0, seed=0, **options))
    error: Any = caught.value
    assert f"The {option}, a" in error.what
    assert type(options[option]).__name__ in error.what
    assert f"of a dataset of {_SAMPLES} samples" in error.what
    assert origin in error.why
    assert error.fix
    if "(dataset)" in error.fix:
        assert type(options[option]).__name__ in error.fix
    assert isinstance(error.__cause__, IndexError)


@pytest.mark.parametrize("kind", ["packed", "own"])
def test_it_is_told_of_a_worker_too(packed: Any, kind: str) -> None:
    sampler = RandomSampler(_OTHER)
    loader = build_loader(
        _datasets(packed)[kind], num_workers=1, batch_size=2, sampler=sampler
    )
    with pytest.raises(IndexError, match="The sampler, a RandomSampler, gave row"):
        list(loader)


@pytest.mark.parametrize("kind", ["packed", "list", "tensors", "subset", "own"])
def test_fewer_rows_than_the_dataset_has_are_read(packed: Any, kind: str) -> None:
    loader = build_loader(
        _datasets(packed)[kind],
        num_workers=0,
        batch_size=2,
        sampler=SequentialSampler(range(3)),
    )
    assert len(list(loader)) == 2


_NO_ROWS: dict[str, tuple[Any, str]] = {
    "mask": (torch.tensor([True, False, True, True, False]), "enumerate(mask)"),
    "mask of Python": ([True, False, True], "enumerate(mask)"),
    "mask of numpy": (np.array([False, True]), "enumerate(mask)"),
    "weights": (torch.tensor([0.1, 0.9]), "WeightedRandomSampler(weights, len"),
    "floats": ([0.0, 1.0], "WeightedRandomSampler(weights, len"),
    "texts": (["a", "b"], "range(len(dataset))"),
    "batches": ([[0, 1], [2]], "batch_sampler="),
    "nothing": ([None], "range(len(dataset))"),
    "samples": ([{"x": 1}], "range(len(dataset))"),
}


@pytest.mark.parametrize("name", _NO_ROWS)
@pytest.mark.parametrize("kind", ["packed", "list"])
def test_what_is_no_row_is_told_by_its_sampler(
    packed: Any, kind: str, name: str
) -> None:
    sampler, fix = _NO_ROWS[name]
    loader = build_loader(
        _datasets(packed)[kind], num_workers=0, batch_size=_SAMPLES, sampler=sampler
    )
    with pytest.raises(OptionError, match="as a row") as caught:
        list(loader)
    assert caught.value.what.startswith("The sampler, a")
    assert type(sampler).__name__ in caught.value.what
    assert fix in caught.value.fix


def test_the_rows_of_a_mask_are_read_as_the_fix_says(packed: Any) -> None:
    mask = [True, False, False, True, True]
    names = {"mask": mask}
    error = error_of_no_row(RowChooser.of(mask, "sampler"), packed, mask)
    assert error is not None
    option, _, code = error.fix.partition("=")
    loader = build_loader(
        packed, num_workers=0, batch_size=5, **{option: eval(code, names)}
    )
    assert len(next(iter(loader))["x"]) == 3


def test_truths_are_rows_of_a_dataset_that_has_them() -> None:
    class Answers(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, row: bool) -> torch.Tensor:
            return torch.tensor({True: 1, False: 0}[row])

    loader = build_loader(Answers(), num_workers=0, batch_size=2, sampler=[True, False])
    assert next(iter(loader)).tolist() == [1, 0]


@pytest.mark.parametrize("depth", [1, 2])
def test_indices_of_another_dataset_are_told_by_their_subset(depth: int) -> None:
    dataset: Any = Subset(_Own(), [0, 7])
    for _ in range(depth - 1):
        dataset = Subset(dataset, [0, 1])
    with pytest.raises(IndexError) as caught:
        list(build_loader(dataset, num_workers=0, batch_size=2))
    error: Any = caught.value
    assert error.what.startswith("A Subset names row 7 of a dataset of 5 samples: ")
    assert error.why.startswith("it has 2 indices")
    assert isinstance(error.__cause__, IndexError)


class _Beyond(_Own):
    """Rows beyond its length are samples too, as of one that repeats them."""

    def __getitem__(self, row: int) -> torch.Tensor:
        return super().__getitem__(row % _SAMPLES)


def test_rows_beyond_a_length_are_read_where_the_dataset_has_them() -> None:
    loader = build_loader(
        _Beyond(), num_workers=0, batch_size=2, sampler=RandomSampler(_OTHER)
    )
    assert len(list(loader)) == 5


def test_an_error_of_a_row_that_is_there_is_left_to_itself() -> None:
    chooser = RowChooser.of([0, 1], "sampler")
    about_a_sample = IndexError("of the sample itself")
    assert error_of_missing_rows(chooser, _Own(), [0, 4, -5], about_a_sample) is None
    assert error_of_missing_rows(None, _Own(), [5], about_a_sample) is None
    assert error_of_missing_rows(chooser, _Own(), [5], OSError("disk")) is None
    assert error_of_missing_rows(chooser, _Own(), ["a key"], KeyError("x")) is None
