"""What is no dataset is named by every function that takes one, with what to give."""

import collections
import collections.abc
import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader as GraphLoader

import loaderkit
from loaderkit import (
    LeakDetector,
    SafeDataset,
    assert_fits,
    assert_no_leak,
    build_loader,
    estimate_step,
    extend,
    pack,
    plan_batch,
)
from loaderkit.datasets.concat import reworded_for_extend
from loaderkit.errors import DatasetError, LoaderkitError, OptionError, StepError
from loaderkit.fixes import Fix, Pack
from loaderkit.mistaken import mistaken_for_batch, mistaken_for_dataset

GRAPH = Data(x=torch.ones(2, 3), edge_index=torch.zeros(2, 1, dtype=torch.long))
MODEL = torch.nn.Linear(3, 2)


async def _awaited():
    yield 1
    yield 2


class _Coroutine(collections.abc.Coroutine):
    """One that nobody needs to await: Python warns of its own."""

    def send(self, _):
        raise StopIteration([1, 2])

    def throw(self, *error):
        raise NotImplementedError(error)

    def close(self):
        pass

    def __await__(self):
        return self


MISTAKES = {
    "one graph": (lambda: GRAPH, "it is one graph", "[graph]"),
    "typed graph": (HeteroData, "it is one graph", "[graph]"),
    "batch": (lambda: Batch.from_data_list([GRAPH]), "one batch", "to_data_list()"),
    "loader": (lambda: DataLoader([1, 2]), "batches, not samples", "loader.dataset"),
    "PyG's loader": (lambda: GraphLoader([GRAPH]), "batches, not", "loader.dataset"),
    "our loader": (lambda: build_loader([1, 2], probe=False), "batches", ".dataset"),
    "class": (lambda: SafeDataset, "it was not called", "SafeDataset(...)"),
    "model": (lambda: MODEL, "it is a model", "dataset"),
    "set": (lambda: {1, 2}, "its order is not fixed", "sorted(samples)"),
    "iterator": (lambda: iter([GRAPH]), "only once", "list(samples)"),
    "generator": (lambda: (sample for sample in [1]), "only once", "list(samples)"),
    "awaited generator": (lambda: _awaited(), "awaited", "run(read_all(samples))"),
    "coroutine": (lambda: _Coroutine(), "not awaited", "asyncio.run(coroutine)"),
    "column": (lambda: pd.Series([1, 2]), "a label", "column.tolist()"),
    "table": (lambda: pd.DataFrame({"a": [1]}), "its rows are not", 'dict("records")'),
}


def _cache_beside(path):
    return pack([0, 3], path.with_suffix(".first.lk"), workers=0, overwrite=True)


CALLS = {
    "pack": lambda given, path: pack(given, path, workers=0),
    "extend": lambda given, path: extend(_cache_beside(path), given, workers=0),
    "build_loader": lambda given, _: build_loader(given, probe=False),
    "plan_batch": lambda given, _: plan_batch(MODEL, given, "cpu", limit="1GiB"),
}

READ_ONCE = ("iterator", "generator")
"""Which ``pack`` takes: it reads samples once, in order."""


@pytest.mark.parametrize(
    ("name", "call"),
    [
        (name, call)
        for name, call in itertools.product(MISTAKES, CALLS)
        if not (call in {"pack", "extend"} and name in READ_ONCE)
        # Exchanged with the model, see tests/budget/test_misplaced.py.
        if (call, name) != ("plan_batch", "model")
    ],
)
def test_what_is_no_dataset_is_named_with_what_to_give(tmp_path, name, call):
    make, why, instead = MISTAKES[name]

    with pytest.raises(LoaderkitError) as caught:
        CALLS[call](make(), tmp_path / "c.lk")

    assert why in caught.value.why
    assert instead in caught.value.fix
    assert caught.value.fix.splitlines()[-1].startswith(f"{call}(")
    if call != "pack":
        assert "pack(" not in caught.value.fix


@pytest.mark.parametrize("given", [_awaited, _Coroutine])
@pytest.mark.parametrize("call", ["pack", "extend", "build_loader"])
def test_what_is_awaited_is_packed_as_the_fix_says(tmp_path, given, call):
    with pytest.raises(LoaderkitError) as caught:
        CALLS[call](given(), tmp_path / "c.lk")

    *preparation, wanted = caught.value.fix.splitlines()
    names = {"samples": given(), "coroutine": given(), "path": tmp_path / "c.lk"}
    names |= {"pack": pack, "build_loader": build_loader, "extend": extend}
    names["cache"] = _cache_beside(tmp_path / "c.lk")
    exec("\n".join(preparation), names)

    samples_before = 2 if call == "extend" else 0
    assert len(eval(wanted, names)) - samples_before == 2


class _FilesError(DatasetError):
    """One of a user's own, below ours."""


def test_an_error_of_what_is_added_stays_what_it_is(tmp_path):
    error = _FilesError("not here", why="it is listed", fix=Pack("[sample]"))

    class Reads:
        def __len__(self):
            return 2

        def __getitem__(self, row):
            raise error

    with pytest.raises(DatasetError, match="not here") as packed:
        pack(Reads(), tmp_path / "a.lk", workers=0)
    with pytest.raises(type(packed.value), match="not here") as extended:
        extend(_cache_beside(tmp_path / "c.lk"), Reads(), workers=0)

    assert packed.value.fix == "pack([sample], path)"
    assert extended.value.fix == "extend(cache, [sample])"
    assert type(extended.value.__cause__) is type(packed.value.__cause__) is _FilesError


def test_a_fix_is_said_for_extend_by_an_error_of_the_same_class():
    error = _FilesError("not here", why="x", fix=Fix.of("or ", Pack("[1]"), ", or ask"))
    error.__cause__ = ValueError("first")
    notes = ["one", "two"] if hasattr(error, "add_note") else []  # Python 3.11
    for note in notes:
        error.add_note(note)

    said = reworded_for_extend(error)

    assert type(said) is _FilesError
    assert said.fix == "or extend(cache, [1]), or ask"
    assert said.__cause__ is error.__cause__
    assert getattr(said, "__notes__", []) == notes
    assert reworded_for_extend(DatasetError("x", why="y", fix="pack(a, b)")).fix == (
        "pack(a, b)"
    )


@pytest.mark.parametrize("name", READ_ONCE)
def test_what_is_read_once_is_packed(tmp_path, name):
    make, *_ = MISTAKES[name]

    assert len(CALLS["pack"](make(), tmp_path / "c.lk")) == 1


@pytest.mark.parametrize("call", ["build_loader", "plan_batch"])
@pytest.mark.parametrize("path", ["data.lk", b"data.lk"])
def test_a_path_is_no_dataset(tmp_path, path, call):
    with pytest.raises(OptionError, match="A path is no dataset") as caught:
        CALLS[call](path, tmp_path)

    assert "open_cache('data.lk')" in caught.value.fix


def test_a_cache_that_is_packed_again_is_opened_instead(tmp_path):
    pack([1, 2], tmp_path / "c.lk", workers=0)

    with pytest.raises(LoaderkitError, match="packed already") as caught:
        pack(tmp_path / "c.lk", tmp_path / "d.lk")

    assert caught.value.fix == f"open_cache({str(tmp_path / 'c.lk')!r})"


def test_a_file_and_a_folder_that_is_not_there_are_told_apart(tmp_path):
    (tmp_path / "all.pt").touch()

    with pytest.raises(LoaderkitError, match="is a file, no folder"):
        pack(tmp_path / "all.pt", tmp_path / "c.lk")
    with pytest.raises(LoaderkitError, match="There is no folder"):
        pack(tmp_path / "nowhere", tmp_path / "c.lk")


@pytest.mark.parametrize(
    "given",
    [
        [1],
        (1,),
        range(3),
        collections.deque([1]),
        {0: 1},
        np.ones(3),
        torch.ones(3),
        TensorDataset(torch.ones(3)),
        Subset([1, 2], [0]),
        None,
        3,
    ],
)
def test_what_may_be_a_dataset_is_no_mistake(given):
    assert mistaken_for_dataset(given) is None


NO_BATCHES = {
    "loader": (lambda: DataLoader(TensorDataset(torch.ones(2, 3))), "next(iter("),
    "our loader": (lambda: build_loader([1, 2], probe=False), "next(iter(loader))"),
    "loader under way": (lambda: iter(DataLoader([1])), "next(batches)"),
    "dataset": (lambda: TensorDataset(torch.ones(2, 3)), "build_loader(dataset"),
    "class": (lambda: TensorDataset, "TensorDataset(...)"),
    "path": (lambda: "data.lk", "open_cache('data.lk').batch("),
    "nothing": (lambda: None, "next(iter(loader))"),
}


@pytest.mark.parametrize("name", NO_BATCHES)
@pytest.mark.parametrize(
    "call",
    [
        lambda given: estimate_step(MODEL, given),
        lambda given: assert_fits(MODEL, given, "1GiB"),
    ],
)
def test_what_is_no_batch_is_named_with_what_to_give(name, call):
    make, instead = NO_BATCHES[name]

    with pytest.raises(OptionError, match=r"no batch|not a batch") as caught:
        call(make())

    assert instead in caught.value.fix


@pytest.mark.parametrize(
    "given", [torch.ones(3), (torch.ones(1), 2), {"x": torch.ones(1)}, [1], GRAPH]
)
def test_what_may_be_a_batch_is_no_mistake(given):
    assert mistaken_for_batch(given) is None


NO_MODELS = {
    "class": (lambda: torch.nn.Linear, "Linear(...)"),
    "nothing": (lambda: None, "(model, "),
    "function": (lambda: torch.sin, "loss=loss"),
    "weights": (lambda: MODEL.state_dict(), "load_state_dict"),
    "batch": (lambda: torch.ones(1, 3), "(model, "),
    "dataset": (lambda: TensorDataset(torch.ones(2, 3)), "(model, "),
    "optimizer": (lambda: torch.optim.SGD(MODEL.parameters()), "optimizer="),
}


@pytest.mark.parametrize("name", NO_MODELS)
@pytest.mark.parametrize(
    "call",
    [
        lambda given: estimate_step(given, torch.ones(1, 3)),
        lambda given: assert_fits(given, torch.ones(1, 3), "1GiB"),
        lambda given: plan_batch(given, [torch.ones(3)] * 4, "cpu", limit="1GiB"),
    ],
)
def test_what_is_no_model_is_named_with_what_to_give(name, call):
    make, instead = NO_MODELS[name]

    named = r"no model|not a model|was given as model"
    with pytest.raises(OptionError, match=named) as caught:
        call(make())

    assert instead in caught.value.fix


mse = torch.nn.functional.mse_loss


def first_embeds():
    return torch.nn.Sequential(torch.nn.Embedding(9, 3), torch.nn.Linear(3, 1))


SHAPES = {
    "a shape": (lambda: MODEL, (5, 3)),
    "a list": (lambda: MODEL, [5, 3]),
    "a size": (lambda: MODEL, torch.Size([5, 3])),
    "of doubles": (lambda: torch.nn.Linear(3, 1).double(), (5, 3)),
    "of words": (first_embeds, (5, 7)),
    "of two inputs": (lambda: torch.nn.Bilinear(3, 3, 1), ((5, 3), (5, 3))),
    "of an image": (lambda: torch.nn.Conv2d(3, 4, 3), (1, 3, 8, 8)),
    "an array": (lambda: MODEL, np.ones((5, 3), np.float32)),
    "an array of doubles": (lambda: MODEL, np.ones((5, 3))),
    "arrays": (lambda: torch.nn.Bilinear(3, 3, 1), [np.ones((5, 3), np.float32)] * 2),
}


@pytest.mark.many_cases(quick=6)
@pytest.mark.parametrize("name", SHAPES)
def test_what_describes_a_batch_is_answered_with_a_line_that_makes_one(name):
    make, given = SHAPES[name]
    model, names = make(), {"batch": given, "torch": torch}

    with pytest.raises(StepError, match=r"no batch|no tensors?\.") as caught:
        estimate_step(model, given)

    exec(caught.value.fix, names)
    assert estimate_step(model, names["batch"]).peak > 0


def test_a_number_of_samples_is_answered_with_a_batch_of_so_many():
    names = {"dataset": [torch.ones(3)] * 9, "loaderkit": loaderkit}
    with pytest.raises(StepError, match="5 is no batch") as caught:
        estimate_step(MODEL, 5)

    exec(caught.value.fix, names)

    assert names["batch"].shape == (5, 3)


def test_a_model_that_takes_numbers_is_given_them():
    class Sized(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(3, 1)

        def forward(self, rows, columns):
            return self.inner(torch.ones(rows, columns)).mean()

    assert estimate_step(Sized(), (5, 3)).peak > 0


@pytest.mark.many_cases(quick=4)
@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (estimate_step, lambda m, b: ((b, m), {})),
        (estimate_step, lambda m, b: ((m, b, b), {})),
        (estimate_step, lambda m, _: ((m,), {})),
        (plan_batch, lambda m, b: (([b], m, "cpu"), {})),
        (plan_batch, lambda m, b: (([b], m, mse), {})),
        (plan_batch, lambda m, b: ((m, [b]), {})),
        (plan_batch, lambda m, b: ((m, [b], "cpu", mse), {})),
        (plan_batch, lambda m, b: (("cpu", m, [b]), {})),
    ],
)
def test_arguments_in_another_order_are_answered_with_a_call_that_works(call, wrong):
    batch = (torch.ones(2, 3), torch.ones(2, 1))
    samples = [(torch.ones(3), torch.ones(1))] * 4
    args, options = wrong(MODEL, batch)
    with pytest.raises(OptionError) as caught:
        call(*args, loss=mse, **options)

    names = {"model": MODEL, "batch": batch, "dataset": samples, "loss": mse}
    names |= {"inputs": batch[0], "target": batch[1]}
    eval(caught.value.fix, {call.__name__: call, **names})


@pytest.mark.parametrize("given", [None, 3, "train", [print]])
def test_what_is_no_function_of_an_epoch_is_told(given):
    for call in (assert_no_leak, LeakDetector("cpu").run):
        with pytest.raises(OptionError, match="function must be a function"):
            call(given)
