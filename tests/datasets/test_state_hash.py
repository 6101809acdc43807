"""The hash of attributes: equal for equal values, whatever memory they lie in."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from loaderkit.datasets import state_hash
from loaderkit.datasets.state_hash import hash_state

BASE = torch.arange(12, dtype=torch.float32)
TENSORS = {
    "floats": BASE,
    "other shape": BASE.reshape(3, 4),
    "transposed": BASE.reshape(3, 4).t(),
    "one number differs": torch.cat([BASE[:11], torch.tensor([12.0])]),
    "part": BASE[2:7],
    "every second": BASE[::2],
    "other dtype": BASE.to(torch.float64),
    "same bits": BASE.view(torch.int32),
    "bfloat16": BASE.to(torch.bfloat16),
    "complex": torch.complex(BASE, BASE),
    "conjugated": torch.complex(BASE, BASE).conj(),
    "negative": torch.complex(BASE, BASE).conj().imag,
    "with a gradient": BASE.clone().requires_grad_(),
    "empty": BASE[:0],
    "empty rows": BASE.new_empty(0, 3),
    "scalar": BASE[3],
    "expanded": BASE[3].expand(4),
    "sparse": BASE.to_sparse(),
    "parameter": torch.nn.Parameter(BASE),
    "numpy": BASE.numpy(),
    # From 64 KiB on pickle writes an array without a frame around it.
    "large array": np.zeros(20_000),
    "one number of it differs": np.eye(1, 20_000)[0],
    "large array of Fortran": np.zeros((10_000, 2), order="F"),
    "list": BASE.tolist(),
    "graph": Data(x=BASE.reshape(3, 4)),
    "another graph": Data(x=BASE.reshape(3, 4), y=BASE[:1]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_copy_has_the_same_hash(name):
    value = {"attribute": TENSORS[name]}
    twin = pickle.loads(pickle.dumps(copy.deepcopy(value)))

    assert hash_state(value) is not None
    assert hash_state(value) == hash_state(twin)


def test_no_two_of_them_have_one_hash():
    hashes = {name: hash_state([value]) for name, value in TENSORS.items()}

    same = [
        pair
        for pair in itertools.combinations(hashes, 2)
        if hashes[pair[0]] == hashes[pair[1]]
    ]
    assert same == []


def test_where_a_tensor_lies_does_not_count():
    rows = torch.arange(20).reshape(5, 4)

    assert hash_state(rows[1:3]) == hash_state(rows[1:3].clone())
    assert hash_state(rows.t()) == hash_state(rows.t().contiguous())
    assert hash_state(rows[1:3]) != hash_state(rows[2:4])


def test_what_a_tensor_carries_counts():
    plain, labelled = torch.ones(3), torch.ones(3)
    labelled.unit = "m"

    assert hash_state(plain) != hash_state(labelled)


def test_bytes_of_tensors_count_for_the_limit(monkeypatch):
    # The limit itself is 256 MiB, made and hashed for each assert.
    monkeypatch.setattr(state_hash, "_MOST_STATE_BYTES", 10_000)

    assert hash_state([torch.zeros(100)] * 2) is not None
    assert hash_state([torch.zeros(3_000)]) is None
    assert hash_state([np.zeros(3_000)]) is None
    assert hash_state([torch.zeros(600), torch.zeros(600), np.zeros(900)]) is None
