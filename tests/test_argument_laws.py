"""Every argument of every public function, given what it cannot be.

The message names the argument as its caller wrote it, says why, and its fix is
followed: the call with it is not refused for that argument.
"""

import concurrent.futures
import contextlib
import inspect
import math
import re
from dataclasses import fields

import pytest
import torch

import loaderkit
from loaderkit.budget.batch.assertions import FitOptions
from loaderkit.budget.batch.plan import PlanOptions
from loaderkit.datasets.pack_options import PackOptions
from loaderkit.errors import CacheError, LoaderkitError, OptionError


class Strange:
    def __repr__(self):
        return "<Strange>"


MODEL = torch.nn.Linear(3, 1)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)
BATCH = torch.zeros(2, 3)
SAMPLES = [torch.zeros(3)] * 8
OPTIONS = {
    "pack": PackOptions,
    "extend": PackOptions,
    "plan_batch": PlanOptions,
    "assert_fits": FitOptions,
}
WRONG_VALUES = [Strange(), "nonsense word", -1.5, [3], math.nan, b"x", Strange]


def backward(piece, share):
    loss = MODEL(piece).mean() * share
    loss.backward()
    return loss.detach()


def do_nothing(*_):
    """Stand for a training epoch, a batch ..."""


CALLS = {
    "pack": ((SAMPLES, "packed.lk"), {"overwrite": True}),
    "open_cache": (("rows.lk",), {}),
    "extend": (("longer.lk", SAMPLES), {}),
    "concat": ((["rows.lk"], "both.lk"), {"overwrite": True}),
    "push": (("rows.lk", "memory://calls"), {}),
    "pull": (("memory://calls", "pulled.lk"), {}),
    "verify": (("rows.lk",), {}),
    "inspect_cache": (("rows.lk",), {}),
    "build_loader": ((SAMPLES,), {"probe": False}),
    "estimate_step": ((MODEL, BATCH), {}),
    "plan_batch": ((MODEL, SAMPLES, "cpu"), {"limit": "1 GiB"}),
    "assert_fits": ((MODEL, BATCH, "1 GiB"), {}),
    "assert_no_leak": ((do_nothing,), {"device": "cpu", "epochs": 6}),
    "LeakDetector": (("cpu",), {}),
    "MemoryMeter": (("cpu",), {}),
    "MicroBatcher": ((MODEL, SGD), {}),
    "transactional_step": ((MODEL, BATCH, backward), {}),
    "check_environment": ((), {}),
    "diagnose_oom": (("CUDA out of memory",), {}),
    "holders_of": ((BATCH,), {}),
    "PtFolder": (("files",), {}),
    "SafeDataset": ((), {"cache": "rows.lk"}),
    "SafeGraphDataset": ((), {"cache": "rows.lk"}),
    "read_memory": (("cpu",), {}),
    "staged": (("model",), {}),
}
"""A call of each public function that works, or needs the network."""
CALLED_OTHERWISE = {
    "what is told by its kind": {
        ("pack", "source"),
        ("pack", "spans"),
        ("extend", "more"),
        ("extend", "spans"),
        ("extend", "cache"),
        ("concat", "caches"),
        ("build_loader", "dataset"),
        ("plan_batch", "dataset"),
        ("assert_fits", "batch"),
        ("estimate_step", "batch"),
        ("transactional_step", "batch"),
    },
    "a model": {
        (name, "model")
        for name in ("estimate_step", "plan_batch", "assert_fits", "MicroBatcher")
    }
    | {("transactional_step", "model"), ("MicroBatcher", "optimizer")},
    "paths and URLs": {
        (name, argument)
        for name in CALLS
        for argument in ("path", "cache", "url", "raw", "mirror", "pattern")
    },
    "anything will do": {
        ("holders_of", "target"),
        ("staged", "objects"),
        ("diagnose_oom", "error"),
    },
}
"""Arguments whose messages say what was given ("A list of graphs is no ..."), and not
the argument's name."""
EXEMPT = set().union(*CALLED_OTHERWISE.values())


def arguments():
    pairs = []
    kinds = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    for name in CALLS:
        parameters = inspect.signature(getattr(loaderkit, name)).parameters.values()
        names = [part.name for part in parameters if part.kind not in kinds]
        if name in OPTIONS:
            names += [option.name for option in fields(OPTIONS[name])]
        pairs += [(name, part) for part in names if (name, part) not in EXEMPT]
    return pairs


@pytest.fixture(autouse=True)
def among_caches(rows, monkeypatch):
    monkeypatch.chdir(rows)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    for name in ("rows.lk", "longer.lk"):
        loaderkit.pack(SAMPLES, folder / name, workers=0)
    (folder / "files").mkdir()
    torch.save({"x": torch.ones(2)}, folder / "files" / "a.pt")
    return folder


def call(name, argument, value):
    function = getattr(loaderkit, name)
    args, kwargs = CALLS[name]
    names = list(inspect.signature(function).parameters)
    by_position = dict(zip(names, args, strict=False))
    return function(**{**by_position, **kwargs, argument: value})


def test_every_public_function_has_a_call():
    modules = {"errors", "testing", "units"}
    no_arguments = {"oom_guard", "release", "configure_allocator", "owned_copy"}

    assert set(loaderkit.__all__) == {*CALLS, *modules, *no_arguments}


def refusal_of(name, argument, value):
    try:
        call(name, argument, value)
    except LoaderkitError as error:
        # A function that fails when it is called, or a cache that is not there.
        is_called = "does not run" in error.what or isinstance(error, CacheError)
        return None if is_called else error
    return None


@pytest.mark.many_cases(quick=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "argument"), arguments())
def test_a_value_that_an_argument_cannot_have_is_refused_by_its_name(name, argument):
    refusals = [refusal_of(name, argument, value) for value in WRONG_VALUES]

    refusals = [refusal for refusal in refusals if refusal is not None]
    for refusal in refusals:
        assert re.search(rf"\b{argument}\b", refusal.what), refusal
        assert refusal.why
        assert refusal.fix
    for fix in {refusal.fix for refusal in refusals}:
        code = re.match(rf"{argument}=(.*?)(, or .*|, which .*)?$", fix)
        if code is None or "..." in code[1]:
            continue  # in words, or left to the user
        with contextlib.suppress(NameError):  # a name of the user's
            again = refusal_of(name, argument, eval(code[1], NAMES))
            assert f"{argument} must" not in ("" if again is None else again.what), fix


NAMES = {"torch": torch, "concurrent": concurrent, "PackOptions": PackOptions}


def test_its_twin_an_argument_that_nobody_checks_is_found(monkeypatch):
    def unchecked(*, every):
        return every + 1

    monkeypatch.setattr(loaderkit, "unchecked", unchecked, raising=False)
    monkeypatch.setitem(CALLS, "unchecked", ((), {"every": 1}))

    with pytest.raises(TypeError, match="unsupported operand"):
        test_a_value_that_an_argument_cannot_have_is_refused_by_its_name(
            "unchecked", "every"
        )


@pytest.mark.many_cases(quick=3)
@pytest.mark.parametrize("device", ["m1", "gpu", "H100", "cdua:1", "", 3, None])
@pytest.mark.parametrize("name", ["plan_batch", "assert_fits"])
def test_a_device_that_is_none_is_answered_under_the_name_it_has(name, device):
    with pytest.raises(OptionError, match=r"^device must be") as caught:
        call(name, "device", device)

    call(
        name,
        argument="device",
        value=eval(caught.value.fix.partition("=")[2]),
    )


DEVICES = {
    "a batch size": (32, "build_loader(dataset, batch_size=32)"),
    "a number of a card": (0, "device='cuda:0'"),
    "nothing": (None, "device='cpu'"),
    "a model": (MODEL, "device='cpu'"),
    "the dataset": (SAMPLES, "build_loader(dataset, 'cpu')"),
    "a class": (torch.device, "device='cpu'"),
}


@pytest.mark.parametrize("name", DEVICES)
def test_what_stands_in_the_place_of_a_loaders_device_is_told_by_its_kind(name):
    given, fix = DEVICES[name]

    with pytest.raises(OptionError, match=r"^device must be") as caught:
        call("build_loader", "device", given)

    assert caught.value.fix == fix


@pytest.mark.parametrize(
    ("margin", "meant"), [("10%", 0.1), (20, 0.2), ("0.3", 0.3), (5.0, 0.05)]
)
def test_a_margin_in_per_cent_is_answered_with_its_share(margin, meant):
    with pytest.raises(OptionError) as caught:
        call("plan_batch", "margin", margin)

    assert caught.value.fix == f"margin={meant}"


def test_the_memory_of_accelerate_is_answered_with_the_limit():
    with pytest.raises(OptionError, match="no option 'max_memory'") as caught:
        loaderkit.assert_fits(MODEL, BATCH, max_memory="8 GiB")

    assert caught.value.fix == "limit='8 GiB'"
