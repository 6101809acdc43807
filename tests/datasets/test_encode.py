"""What a cache cannot hold is refused with the reason; what PyG cannot add is left."""

import array
import collections
import dataclasses
import datetime
import decimal
import http
import re
import signal
import uuid
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data

from loaderkit import open_cache, pack
from loaderkit.datasets.encode import encode
from loaderkit.datasets.kinds import Kind, unflatten_composite
from loaderkit.errors import DatasetError
from loaderkit.testing import assert_same


def crossed_csr():
    """A sparse tensor whose one row ends before it begins."""
    return torch.sparse_csr_tensor(
        torch.tensor([0, 5]),
        torch.tensor([0]),
        torch.ones(1),
        (1, 1),
        check_invariants=False,
    )


@pytest.mark.parametrize(
    "sparse",
    [
        crossed_csr,
        lambda: torch.sparse_coo_tensor(
            torch.tensor([[9]]), torch.ones(1), (2,), check_invariants=False
        ),
    ],
    ids=["csr", "coo"],
)
def test_a_sparse_tensor_that_points_outside_itself_is_never_stored(sparse):
    # torch's kernels read where an index says, so it would read beyond its memory.
    with pytest.raises(DatasetError, match="cannot hold 'adj', a Tensor") as caught:
        encode({"adj": sparse()})

    assert caught.value.why
    assert caught.value.fix == "correct its indices, or leave it out"


@pytest.mark.parametrize("kind", ["row", "col"])
@pytest.mark.parametrize("wrong", [-1, 3])
def test_a_sparse_tensor_of_torch_sparse_is_not_made_of_indices_outside(kind, wrong):
    index = torch.tensor([0, 1])
    parts = {"row": index, "col": index, "value": None, "sizes": (3, 3)}
    parts[kind] = torch.tensor([0, wrong])

    with pytest.raises(ValueError, match="an index lies outside of 3"):
        unflatten_composite(Kind.SPARSE_TENSOR, parts, checked=True)


def test_a_nested_tensor_is_refused_with_what_to_store():
    value = torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    )

    with pytest.raises(DatasetError, match="'v', a NestedTensor") as caught:
        encode({"v": value})

    assert caught.value.why == "it is nested"
    assert ".values() and .offsets()" in caught.value.fix


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_refused_with_what_to_store():
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)

    with pytest.raises(DatasetError, match="'v', a Tensor") as caught:
        encode({"v": quantized})

    assert caught.value.why == "it is quantized"
    for advice in re.split(r",? or ", caught.value.fix.removeprefix("store ")):
        stored = eval(advice.partition(" where ")[0], {"x": quantized})
        encode({"v": stored})


@pytest.mark.parametrize("value", [http.HTTPStatus.OK, signal.SIGINT])
def test_a_number_of_a_class_of_its_own_has_articles_that_fit(value):
    with pytest.raises(DatasetError) as caught:
        encode({"v": value})

    for article, letter in re.findall(r"\b(an?) (\w)", caught.value.why):
        assert (article == "an") == (letter in "AEIOaeio")


def test_a_tensor_elsewhere_is_refused_with_how_to_load_it_here():
    with pytest.raises(DatasetError, match="'v', a Tensor") as caught:
        encode({"v": torch.ones(2, device="meta")})

    assert caught.value.why.startswith("it is on meta;")
    assert caught.value.fix == 'torch.load(..., map_location="cpu")'


def test_a_class_that_no_other_process_finds_is_refused_with_where_to_move_it():
    @dataclasses.dataclass
    class Molecule:
        x: torch.Tensor

    with pytest.raises(DatasetError, match="'m', a Molecule") as caught:
        encode({"m": Molecule(torch.ones(1))})

    assert "inside a function" in caught.value.why
    assert "move `class Molecule` to the top of a module" in caught.value.fix


def test_a_sample_that_has_no_name_is_refused_as_the_sample():
    with pytest.raises(DatasetError, match="'the sample', an object"):
        encode(object())


class Odd(Data):
    """A graph whose increments are of a kind that its key names."""

    def __inc__(self, key, value, *args, **kwargs):
        odd = {
            "text": "none",
            "huge": 1 << 70,
            "floating": torch.tensor(1.5),
            "triple": torch.ones(3, dtype=torch.long),
        }
        return odd.get(key, super().__inc__(key, value, *args, **kwargs))


class Failing(Data):
    """A graph that cannot say by how much one of its fields is incremented."""

    def __inc__(self, key, value, *args, **kwargs):
        if key == "broken":
            msg = "no increment"
            raise RuntimeError(msg)
        return super().__inc__(key, value, *args, **kwargs)


@pytest.mark.parametrize("key", ["floating", "triple"])
def test_an_increment_that_no_column_holds_is_left_to_pyg(tmp_path, key):
    samples = [Odd(x=torch.ones(2, 1), **{key: torch.ones(3)}) for _ in range(3)]

    dataset = pack(samples, tmp_path / "c.lk", workers=0)

    wanted = Batch.from_data_list(samples)
    assert_same(dataset.batch([0, 1, 2])[key], wanted[key])


@pytest.mark.parametrize("key", ["text", "huge"])
def test_an_increment_that_is_no_number_of_64_bits_keeps_its_sample(tmp_path, key):
    sample = Odd(x=torch.ones(2, 1), **{key: torch.ones(3)})

    pack([sample], tmp_path / "c.lk", workers=0)

    assert_same(open_cache(tmp_path / "c.lk", classes=[Odd])[0], sample)


def test_an_increment_that_raises_does_so_in_a_batch_and_not_in_packing(tmp_path):
    sample = Failing(x=torch.ones(2, 1), broken=torch.ones(2))

    dataset = pack([sample, sample], tmp_path / "c.lk", workers=0)

    assert_same(dataset[0], sample)
    with pytest.raises(DatasetError, match="no increment"):
        dataset.batch([0, 1])
    assert "broken" not in dataset.batch([0, 1], exclude_keys=["broken"])


H5_FILE = h5py.File("of_tests.h5", "w", driver="core", backing_store=False)
for h5_name, h5_value in {"v": np.ones((2, 3)), "t": "text", "n": 3}.items():
    H5_FILE[h5_name] = h5_value
ZONE = datetime.timezone(datetime.timedelta(0))
NOT_STORED = {
    "datetime64": np.array(["2026-01-01"], "datetime64[h]"),
    "timedelta64": np.array([3], "timedelta64[s]"),
    "structured": np.zeros(2, [("a", "i4"), ("b", "f4")]),
    "objects": np.array([1.0, 2.0], object),
    "texts": np.array(["a", "bc"]),
    "bytes": np.array([b"a", b"bc"]),
    "long doubles": np.arange(3, dtype=np.longdouble),
    "long complex": np.arange(3, dtype=np.clongdouble),
    "bytearray": bytearray(b"a"),
    "datetime": datetime.datetime(2026, 1, 1, tzinfo=ZONE),
    "date": datetime.date(2026, 1, 1),
    "timedelta": datetime.timedelta(1),
    "path": Path("a.png"),
    "decimal": decimal.Decimal("1.5"),
    "uuid": uuid.UUID(int=3),
    "set": {1, 2},
    "range": range(3),
    "deque": collections.deque([1]),
    "array": array.array("f", [1.0]),
    "generator": torch.Generator(),
    "dtype": torch.float16,
    "device": torch.device("cpu"),
    "h5": H5_FILE["v"],
    "h5 of a text": H5_FILE["t"],
    "h5 of one number": H5_FILE["n"],
}


@pytest.mark.many_cases(quick=17)
@pytest.mark.parametrize("name", NOT_STORED)
def test_what_cannot_be_stored_is_answered_with_what_can(tmp_path, name):
    value = NOT_STORED[name]
    with pytest.raises(DatasetError, match="A cache cannot hold 'x'") as raised:
        pack([{"x": value}], tmp_path / "a.lk", workers=0)

    for advice in re.split(r",? or ", raised.value.fix.removeprefix("store ")):
        code = advice.partition(" where ")[0]
        stored = eval(code, {"np": np, "torch": torch, "x": value})
        if isinstance(stored, np.ndarray) and stored.dtype.kind == "O":
            continue
        path = tmp_path / f"{abs(hash(advice))}.lk"
        assert len(pack([{"x": stored}], path, workers=0)) == 1
