"""Batches of every container are cut into whole samples, and estimated alike."""

import collections
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from transformers import BatchEncoding

from loaderkit import estimate_step
from loaderkit.budget.cutting import count_samples, cut, in_float64, take, weight_of
from loaderkit.budget.step.measure import copied, measure_step
from loaderkit.budget.step.train_step import Step
from loaderkit.datasets.ragged import Padded
from loaderkit.nests import flatten, flatten_tensors

SAMPLES = 6


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


def parts():
    return torch.arange(SAMPLES * 2.0).view(SAMPLES, 2), torch.arange(SAMPLES)


CONTAINERS = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "named": Pair,
    "dict": lambda x, y: {"x": x, "y": y},
    "ordered": lambda x, y: collections.OrderedDict(x=x, y=y),
    "user": lambda x, y: collections.UserDict(x=x, y=y),
    "encoding": lambda x, y: BatchEncoding({"x": x, "y": y}),
    "dataclass": Record,
    "inside": lambda x, y: {"deep": [Pair(x, y)], "name": "a"},
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("size", [1, 4, 6])
def test_pieces_put_together_are_the_whole(name, size):
    batch = CONTAINERS[name](*parts())

    assert count_samples(batch) == SAMPLES
    pieces = [cut(batch, at, at + size) for at in range(0, SAMPLES, size)]

    assert all(type(piece) is type(batch) for piece in pieces)
    columns = zip(*map(flatten_tensors, pieces), strict=True)
    for column, whole in zip(columns, parts(), strict=True):
        assert torch.equal(torch.cat(column), whole)


@pytest.mark.parametrize("name", CONTAINERS)
def test_rows_are_taken_as_numpy_takes_them(name):
    rows = [4, 0, 4]

    taken = take(CONTAINERS[name](*parts()), rows)

    for tensor, whole in zip(flatten_tensors(taken), parts(), strict=True):
        assert tensor.numpy().tolist() == whole.numpy()[rows].tolist()


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_a_packed_sequence_is_cut_by_samples(enforce_sorted):
    samples = [torch.rand(length, 2) for length in (5, 3, 3, 1)]
    if not enforce_sorted:
        samples = samples[::-1]
    batch = (pack_sequence(samples, enforce_sorted=enforce_sorted), torch.arange(4))

    packed, numbers = cut(batch, 1, 3)

    assert count_samples(batch) == 4
    assert numbers.tolist() == [1, 2]
    for sample, wanted in zip(unpack_sequence(packed), samples[1:3], strict=True):
        assert torch.equal(sample, wanted)


def test_names_beside_tensors_are_cut_and_other_lists_are_not():
    x = torch.ones(3, 2)
    batch = {"x": x, "names": ["a", "b", "c"], "classes": ["cat", "dog"]}

    piece = cut(batch, 1, 3)

    assert piece["names"] == ["b", "c"]
    assert piece["classes"] == ["cat", "dog"]


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_copy_in_float64_has_the_same_values(name):
    x, y = parts()

    wide = in_float64(CONTAINERS[name](x.numpy(), y))

    values, numbers = [leaf for leaf in flatten(wide) if not isinstance(leaf, str)]
    assert values.dtype == np.float64
    assert values.tolist() == x.tolist()
    assert numbers.dtype is torch.int64


def test_tokens_of_a_padded_batch_are_those_of_its_samples():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    padded = Padded(torch.zeros(2, 3, 8), mask.sum(1), mask)

    assert weight_of(padded, "tokens") == 4
    assert weight_of((padded, torch.zeros(2)), "tokens") == 4
    assert weight_of({"text": padded}, "tokens") == 4
    assert weight_of(BatchEncoding({"attention_mask": mask}), "tokens") == 4


class Summed(nn.Module):
    """Takes its fields by name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x, y):
        return self.layer(x).exp() * self.layer(y).relu()


@pytest.mark.parametrize("name", ["tuple", "named", "dict", "user", "encoding"])
def test_a_step_is_estimated_whatever_its_batch_is_in(name):
    torch.manual_seed(0)
    batch = CONTAINERS[name](torch.rand(2048, 64), torch.rand(2048, 64))
    model = Summed()

    estimated = estimate_step(model, batch)

    truth = max(measure_step(model, batch, Step()).values())
    assert estimated.method == "tracked"
    assert estimated.low <= truth <= estimated.high
    assert estimated.parts["batch"] == 2 * 2048 * 64 * 4


class Recurrent(nn.Module):
    """Takes a packed sequence whole."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(32, 64)

    def forward(self, packed):
        return self.layer(packed)[1]


@pytest.mark.slow
def test_a_step_with_a_packed_sequence_holds_what_the_profiler_sees():
    torch.manual_seed(0)
    batch = pack_sequence([torch.rand(length, 32) for length in (60, 50, 50, 9)])
    model = Recurrent()

    estimated = estimate_step(model, batch)

    truth = max(measure_step(model, batch, Step()).values())
    assert estimated.low <= truth <= estimated.high


def test_a_copied_batch_shares_nothing_and_one_tensor_stays_one():
    tensor = torch.arange(4.0)
    batch = BatchEncoding({"x": tensor, "y": tensor})

    again = copied(batch)

    assert again["x"] is again["y"]
    assert again["x"].data_ptr() != tensor.data_ptr()
