"""Law: arguments in each other's place are named, and the fix is a call that works."""

import itertools
from dataclasses import fields

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import loaderkit
from loaderkit import (
    MicroBatcher,
    assert_fits,
    diagnose_oom,
    estimate_step,
    plan_batch,
)
from loaderkit.budget.batch.assertions import FitOptions
from loaderkit.budget.batch.plan import PlanOptions
from loaderkit.errors import LoaderkitError, OptionError

MODEL = torch.nn.Linear(4, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
INPUTS, TARGET = torch.ones(6, 4), torch.ones(6, 2)
PAIRS = TensorDataset(INPUTS, TARGET)
LOSS = torch.nn.functional.mse_loss

VALUES = {
    "model": MODEL,
    "optimizer": OPTIMIZER,
    "class of an optimizer": torch.optim.AdamW,
    "loss": LOSS,
    "loss as a module": torch.nn.MSELoss(),
    "dataset": PAIRS,
    "samples": [torch.ones(4)] * 6,
    "tensor": INPUTS,
    "pair": (INPUTS, TARGET),
    "dict": {"input": INPUTS},
    "loader": DataLoader(PAIRS, 3),
    "device as a text": "cpu",
    "device": torch.device("cpu"),
    "size": "8 GiB",
    "number": 4,
    "dtype": torch.bfloat16,
    "None": None,
}
OF_SAMPLES = {"dataset", "samples", "tensor", "pair", "dict", "loader"}
"""What a place for a dataset or a batch may take, or refuses in its own words."""
OF_BATCHES = {*OF_SAMPLES, "number", "None"}

CALLS = {
    "plan_batch": (plan_batch, ["model", "samples", "device"]),
    "estimate_step": (estimate_step, ["model", "tensor"]),
    "assert_fits": (assert_fits, ["model", "tensor", "size"]),
    "MicroBatcher": (MicroBatcher, ["model", "optimizer", "loss", "number"]),
    "batcher.step": (MicroBatcher(MODEL, OPTIMIZER, LOSS).step, ["pair"]),
}
NEEDED = {"assert_fits": 3, "MicroBatcher": 2}
"""Arguments that cannot be left out, where that is not all of them."""
WORDS = (" was given as ", " was called without ", "assert_fits needs limit=")
MAY_BE = {
    ("plan_batch", 2): {"device as a text"},
    ("assert_fits", 2): {"number"},
    ("MicroBatcher", 1): {"class of an optimizer"},
    ("MicroBatcher", 2): {"model", "loss as a module", "None"},
    ("MicroBatcher", 3): {*OF_BATCHES, "device", "device as a text", "size"},
}
"""What is right there, or is refused as a value of that argument."""


def wrong_calls(name):
    """Exchange two arguments, leave one out, and put everything in the place of one."""
    _, right = CALLS[name]
    for one, other in itertools.combinations(range(len(right)), 2):
        exchanged = list(right)
        exchanged[one], exchanged[other] = right[other], right[one]
        yield exchanged
    for place in range(NEEDED.get(name, len(right))):
        yield right[:place] + right[place + 1 :]
    for place, kind in itertools.product(range(len(right)), VALUES):
        may_be = MAY_BE.get((name, place), set()) | {right[place]}
        if right[place] in OF_SAMPLES:
            may_be |= OF_SAMPLES if name == "plan_batch" else OF_BATCHES
        if kind not in may_be:
            yield [*right[:place], kind, *right[place + 1 :]]


def names_for_fix(fix):
    """Give what the names of a fix stand for, in a program that has a loss or none."""
    has_loss = "loss=" in fix or "atcher" in fix
    batch = (INPUTS, TARGET) if has_loss else INPUTS
    return {
        "model": MODEL,
        "optimizer": OPTIMIZER,
        "loss": LOSS,
        "batch": batch,
        "dataset": PAIRS if has_loss else VALUES["samples"],
        "loader": DataLoader(PAIRS if has_loss else INPUTS, 3),
        "batcher": MicroBatcher(MODEL, OPTIMIZER, LOSS),
        "torch": torch,
        "loaderkit": loaderkit,
        **{name: call for name, (call, _) in CALLS.items()},
    }


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("name", CALLS)
def test_arguments_in_each_others_place_are_named_and_the_fix_works(name):
    call, _ = CALLS[name]
    fixes = set()

    for kinds in wrong_calls(name):
        with pytest.raises(OptionError) as raised:
            call(*(VALUES[kind] for kind in kinds))
        message = raised.value.what
        assert any(words in message for words in WORDS), (kinds, message)
        assert raised.value.fix.startswith(f"{name}("), (kinds, raised.value.fix)
        fixes.add(raised.value.fix)

    assert fixes
    for fix in fixes:
        eval(fix, names_for_fix(fix))


SOME_OPTIONS = {
    "loss": LOSS,
    "optimizer": "sgd",
    "autocast": "bfloat16",
    "collate_fn": torch.stack,
    "epochs": 3,
    "margin": 0.1,
    "name": "linear",
    "rise": 0.1,
}


@pytest.mark.parametrize(
    ("name", "option"),
    [("plan_batch", field.name) for field in fields(PlanOptions)]
    + [("assert_fits", field.name) for field in fields(FitOptions)],
)
def test_they_are_named_beside_any_option_too(name, option):
    call, [_, _, last] = CALLS[name]

    with pytest.raises(OptionError, match=" was given as model"):
        call(INPUTS, MODEL, VALUES[last], **{option: SOME_OPTIONS[option]})


def test_what_was_given_is_kept_in_the_fix():
    with pytest.raises(OptionError) as raised:
        plan_batch("8 GiB", MODEL, torch.nn.MSELoss(), batch_size=64)
    assert raised.value.what.startswith("'8 GiB' was given as model, and a Linear was")
    assert raised.value.fix == (
        "plan_batch(model, dataset, 'cpu', limit='8 GiB', batch_size=64, loss=loss)"
    )


@pytest.mark.slow
def test_an_error_and_a_plan_are_told_apart():
    plan = plan_batch(MODEL, VALUES["samples"], "cpu")
    error = MemoryError("out of memory")

    for given in (VALUES["model"], 3, plan, torch.optim.SGD, VALUES["samples"]):
        with pytest.raises(OptionError) as raised:
            diagnose_oom(given)
        assert raised.value.fix == "diagnose_oom(error)"
    with pytest.raises(OptionError) as raised:
        diagnose_oom(plan, plan=error)
    assert raised.value.fix == "diagnose_oom(error, plan=plan)"
    with pytest.raises(LoaderkitError, match="plan= by name"):
        diagnose_oom(error, plan)
