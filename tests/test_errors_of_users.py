"""An error that a user's own code raises reaches the user, whatever class it is of."""

import traceback
import warnings

import pytest
import torch

from loaderkit import (
    LeakDetector,
    MicroBatcher,
    SafeDataset,
    build_loader,
    estimate_step,
    oom_guard,
    open_cache,
    pack,
    plan_batch,
)
from loaderkit.errors import DatasetError, LoaderkitError


class FailingTextError(Exception):
    def __str__(self):
        message = "the user's str() fails"
        raise ValueError(message)

    __repr__ = __str__


class NumberAsTextError(TypeError):
    def __str__(self):
        return 5


class TwoArgumentsError(Exception):
    """It cannot be unpickled: exceptions keep only what ``super().__init__`` got."""

    def __init__(self, _first, _second):
        super().__init__()


class NoArgumentsError(RuntimeError):
    @property
    def args(self):
        message = "the user's args fail"
        raise RuntimeError(message)


class IncomparableError(Exception):
    def __eq__(self, other):
        message = "the user's == fails"
        raise RuntimeError(message)

    __hash__ = None


class FailingAttributesError(Exception):
    def __getattribute__(self, name):
        if name.startswith("_"):
            return super().__getattribute__(name)
        message = "the user's attributes fail"
        raise RuntimeError(message)


def cause_of_itself():
    error, other = ValueError("one"), KeyError("other")
    error.__cause__, other.__cause__ = other, error
    return error


ODD_ERRORS = {
    "its text fails": lambda: FailingTextError("x"),
    "its text is a number": NumberAsTextError,
    "it cannot be unpickled": lambda: TwoArgumentsError(1, 2),
    "its arguments fail": lambda: NoArgumentsError("x"),
    "it cannot be compared": lambda: IncomparableError("x"),
    "its attributes fail": lambda: FailingAttributesError("x"),
    "it is its cause's cause": cause_of_itself,
    "a ValueError without a text": ValueError,
    "a TypeError without a text": TypeError,
    "a RuntimeError without a text": RuntimeError,
    "an IndexError": IndexError,
    "an AttributeError": AttributeError,
    "a KeyError": KeyError,
    "a StopIteration": StopIteration,
    "a NotImplementedError": NotImplementedError,
    "an OSError": OSError,
    "its text begins with empty lines": lambda: ValueError("\n\nline\n"),
    "its text is a template": lambda: ValueError("%s {name} [red]"),
    "its text is no Unicode": lambda: ValueError("\udcff"),
    "its argument is bytes": lambda: ValueError(b"\xff"),
}


class Model(torch.nn.Module):
    def __init__(self, fail=None):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.fail = fail

    def forward(self, x):
        if self.fail:
            self.fail()
        return self.linear(x)


class Failing(torch.utils.data.Dataset):
    def __init__(self, fail):
        self.fail = fail

    def __len__(self):
        return 6

    def __getitem__(self, row):
        if row == 5:
            self.fail()
        return torch.zeros(3)


class Loaded(SafeDataset):
    def __init__(self, path, fail):
        self.fail = fail
        super().__init__(cache=path)

    def keys(self):
        return range(6)

    def load(self, key):
        if key == 5:
            self.fail()
        return {"x": torch.zeros(3)}


BATCH = torch.ones(4, 3)
SAMPLES = [torch.ones(3) for _ in range(6)]


def total(output, _batch):
    return output.sum()


def estimate_model(fail, _path):
    estimate_step(Model(fail), BATCH, loss=total)


def estimate_loss(fail, _path):
    estimate_step(Model(), BATCH, loss=lambda _output, _batch: fail())


def estimate_optimizer(fail, _path):
    estimate_step(Model(), BATCH, loss=total, optimizer=lambda _parameters: fail())


def plan_model(fail, _path):
    plan_batch(Model(fail), SAMPLES, "cpu", limit="1GB", loss=total)


def plan_dataset(fail, _path):
    plan_batch(Model(), Failing(fail), "cpu", limit="1GB", loss=total)


def plan_collate(fail, _path):
    def collate(_samples):
        fail()

    plan_batch(Model(), SAMPLES, "cpu", limit="1GB", loss=total, collate_fn=collate)


def load_samples(fail, _path):
    list(build_loader(Failing(fail), batch_size=2, num_workers=0))


def collate_samples(fail, _path):
    def collate(_samples):
        fail()

    list(build_loader(SAMPLES, batch_size=2, num_workers=0, collate_fn=collate))


def pack_samples(fail, path):
    pack(Failing(fail), path, workers=0)


def pack_stream(fail, path):
    def samples():
        yield {"x": torch.ones(2)}
        fail()

    pack(samples(), path)


def pack_loaded(fail, path):
    Loaded(path, fail)[0]


def transform_samples(fail, path):
    pack(SAMPLES, path, workers=0)
    open_cache(path, transform=lambda _sample: fail())[0]


def train_in_pieces(fail, _path):
    model = Model(fail)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    MicroBatcher(model, optimizer, loss=total).step(BATCH)


def train_guarded(fail, _path):
    with oom_guard():
        fail()


def train_watched(fail, _path):
    with LeakDetector():
        fail()


IN_THIS_PROCESS = [
    estimate_model,
    estimate_loss,
    estimate_optimizer,
    plan_model,
    plan_dataset,
    plan_collate,
    load_samples,
    collate_samples,
    pack_samples,
    pack_stream,
    transform_samples,
    train_in_pieces,
    train_guarded,
    train_watched,
]


def with_causes(error):
    """List an error with its causes and contexts, each once."""
    errors, left = [], [error]
    while left:
        nearest = left.pop()
        if nearest is None or any(nearest is known for known in errors):
            continue
        errors.append(nearest)
        left += [nearest.__cause__, nearest.__context__]
    return errors


def is_raised_here(error):
    """Tell whether an error was raised by the user's code, the function ``fail``."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].name == "fail"


@pytest.mark.many_cases(quick=8)
@pytest.mark.parametrize("kind", ODD_ERRORS)
@pytest.mark.parametrize("call", IN_THIS_PROCESS, ids=lambda call: call.__name__)
def test_an_odd_error_of_the_user_reaches_the_user(call, kind, tmp_path):
    own_class = type(ODD_ERRORS[kind]())

    def fail():
        raise ODD_ERRORS[kind]()

    with warnings.catch_warnings():
        # A plan over few samples says so; that is not looked at here.
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as caught:  # noqa: PT011 -- any is looked at
            call(fail, tmp_path / "cache")

    error = caught.value
    # A step is tried in more than one way, so that its error may be there twice.
    own = [cause for cause in with_causes(error) if is_raised_here(cause)]
    assert {type(cause) for cause in own} == {own_class}
    if isinstance(error, LoaderkitError):
        assert own_class.__name__ in str(error)
    elif own_class is not StopIteration:  # Python makes another of it in a generator
        assert any(error is cause for cause in own)


@pytest.mark.parametrize(
    "call", [*IN_THIS_PROCESS, pack_loaded], ids=lambda call: call.__name__
)
def test_an_error_of_ours_in_code_of_the_user_has_one_reason_and_one_fix(
    call, tmp_path
):
    def fail():
        message, why, fix = "The text is cut.", "the disk was full", "write it again"
        raise DatasetError(message, why=why, fix=fix)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(LoaderkitError, match="The text is cut") as caught:
            call(fail, tmp_path / "cache")

    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert [line for line in lines if line.startswith("why:")] == [
        "why: the disk was full"
    ]
    [fix] = [line for line in lines if line.startswith("fix:")]
    assert "write it again" in fix


@pytest.mark.parametrize(
    "kind", ["its text fails", "it cannot be unpickled", "a StopIteration"]
)
def test_an_odd_error_of_a_packing_worker_is_named(kind, tmp_path):
    def fail():
        raise ODD_ERRORS[kind]()

    with pytest.raises(LoaderkitError) as caught:
        pack_loaded(fail, tmp_path / "cache")

    assert type(ODD_ERRORS[kind]()).__name__ in str(caught.value)
