"""Over public objects and operations of Python: they work, or the answer says how.

Some are left to Python's own words: a method would make other libraries believe that
the object can do it.  The last tests hold that.
"""

import copy
import operator
import pickle
from collections import abc
from contextlib import AbstractContextManager
from dataclasses import FrozenInstanceError, dataclass
from decimal import Decimal
from numbers import Number
from typing import SupportsFloat, SupportsIndex, SupportsInt

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, TensorDataset
from torch_geometric.data import Data

import loaderkit
from loaderkit.answers import answer_wrong_names
from loaderkit.errors import LoaderkitError, NotChangeableError, OptionError
from loaderkit.loader.decisions import Decision
from loaderkit.operations import ARITHMETIC, COMPARISONS, SIGNS

pytestmark = pytest.mark.slow  # one object of each kind is made: 2 s, once
MODEL = torch.nn.Linear(2, 1)
RAGGED = [{"x": torch.ones(2 + i % 3), "y": i} for i in range(6)]


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    folder = tmp_path_factory.mktemp("operations")
    ragged = loaderkit.pack(RAGGED, folder / "ragged.lk", workers=0)
    graph = Data(x=torch.ones(2, 1), edge_index=torch.tensor([[0, 1], [1, 0]]))
    graphs = loaderkit.pack([graph] * 3, folder / "graphs.lk", workers=0)
    rows = TensorDataset(torch.zeros(9, 2))
    loader = loaderkit.build_loader(ragged, batch_size=2, num_workers=0)
    packed = loaderkit.open_cache(ragged.cache, ragged="packed")
    detector = loaderkit.LeakDetector("cpu")
    detector.start()
    detector.end_epoch()
    meter = loaderkit.MemoryMeter("cpu", log=None)
    meter.mark("here")
    return {
        "dataset": ragged,
        "graphs": graphs,
        "loader": loader,
        "loader plan": loader.plan,
        "padded": ragged.batch([0, 1])["x"],
        "packed": packed.batch([0, 1])["x"],
        "sizes": ragged.sizes(),
        "summary": loaderkit.inspect_cache(ragged.cache),
        "verification": loaderkit.verify(ragged.cache),
        "estimate": loaderkit.estimate_step(MODEL, torch.ones(3, 2)),
        "batch plan": loaderkit.plan_batch(MODEL, rows, "cpu", limit="64 MiB"),
        "diagnosis": loaderkit.diagnose_oom("CUDA out of memory."),
        "environment": loaderkit.check_environment(),
        "reading": loaderkit.read_memory(),
        "detector": detector,
        "report": detector.report(),
        "meter": meter,
        "timeline": meter.timeline,
    }


NAMES = (
    *("dataset", "graphs", "loader", "loader plan", "padded", "packed", "sizes"),
    *("summary", "verification", "estimate", "batch plan", "diagnosis"),
    *("environment", "reading", "detector", "report", "meter", "timeline"),
)
RESULTS = [
    name
    for name in NAMES
    if name not in {"dataset", "graphs", "loader", "detector", "meter"}
]
"""Values that stay as they are."""


def test_every_object_is_looked_at(objects):
    assert tuple(objects) == NAMES


def attempt(operation, thing):
    """Give what an operation raises; None where it works."""
    try:
        operation(thing)
    except Exception as error:  # noqa: BLE001 -- it is what is looked for
        return error
    return None


def is_answered(error):
    return isinstance(error, LoaderkitError) and bool(error.why and error.fix)


def answers_of(errors):
    """Leave out what worked."""
    return [error for error in errors if error is not None]


# ---- operators


def operators_of(methods):
    return {
        symbol: getattr(operator, f"__{method}__") for method, symbol in methods.items()
    }


TWO_OPERANDS = operators_of(ARITHMETIC | COMPARISONS)
ONE_OPERAND = operators_of(SIGNS)
OPERANDS = {"number": 2, "none": None, "text": "a", "list": [1], "decimal": Decimal(3)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("operand", OPERANDS)
def test_an_operator_works_or_is_answered(objects, name, operand):
    pairs = [(objects[name], other) for other in (OPERANDS[operand], objects[name])]
    for symbol, operate in TWO_OPERANDS.items():
        for first, second in pairs:
            errors = [attempt(lambda it, use=operate, o=second: use(it, o), first)]
            # A text with % formats anything, and says so itself.
            if (symbol, operand) != ("%", "text"):
                errors += [attempt(lambda it, use=operate, o=first: use(o, it), second)]
            for error in answers_of(errors):
                assert is_answered(error), (symbol, error)
                assert isinstance(error, TypeError), symbol
    for symbol, operate in ONE_OPERAND.items():
        assert is_answered(attempt(operate, objects[name])), symbol


class Answering:
    """What another library's object does with ours."""

    def __rmul__(self, other):
        return "theirs"

    def __gt__(self, other):
        return "theirs"


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"padded", "packed"}))
def test_an_object_of_another_library_may_answer_first(objects, name):
    assert objects[name] * Answering() == "theirs"
    assert (objects[name] < Answering()) == "theirs"


def test_the_number_that_was_meant_is_in_the_fix_as_code(objects):
    scope = {"estimate": objects["estimate"], "report": objects["report"]}
    scope |= {"plan": objects["batch plan"], "loader": objects["loader"]}
    scope |= {"sizes": objects["sizes"]}

    for name in scope:
        thing = scope[name]
        for use in (lambda it: it * 2, lambda it: it >= it, lambda it: f"{it:.2f}"):
            error = attempt(use, thing)
            if "for epoch" in error.fix or (name == "sizes" and "f" in error.what[-6:]):
                continue  # a loop, and a column of numbers, which has no one format
            eval(error.fix, {}, scope)


def test_datasets_are_joined_as_torch_joins_them(objects):
    dataset = objects["dataset"]

    assert isinstance(dataset + RAGGED, ConcatDataset)
    assert [row["y"] for row in RAGGED[:2] + dataset][:3] == [0, 1, 0]
    for use in (lambda it: it + 1, lambda it: sum([it, it])):
        with pytest.raises(OptionError, match="ConcatDataset"):
            use(dataset)
    assert len(
        eval(
            attempt(lambda it: it * 2, dataset).fix,
            {"torch": torch},
            {"dataset": dataset},
        )
    ) == 2 * len(dataset)


SPECS = [">12", "<3", "^40", "12", "s", ".2f", ",", "d", "%Y", ".3", "e", "08b"]


@pytest.mark.parametrize("spec", SPECS)
def test_a_format_of_texts_or_numbers_is_answered_with_one_that_works(objects, spec):
    for name, thing in objects.items():
        assert format(thing) == str(thing) == f"{thing}"
        error = attempt(lambda it: format(it, spec), thing)
        assert is_answered(error), name
        # What is asked for is possible, or the fix is the text alone.
        assert {f":{spec}}}" in error.fix, "str(" in error.fix} & {True}


# ---- what stays as it is


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_cannot_be_changed_and_says_how_another_is_made(objects, name):
    thing = objects[name]
    fields = getattr(thing, "_fields", None) or list(thing.__dataclass_fields__)

    for field in [*fields, "xyzzy"]:
        with pytest.raises(NotChangeableError) as raised:
            setattr(thing, field, 1)
        assert raised.value.why
        assert field in raised.value.fix
        with pytest.raises(NotChangeableError):
            delattr(thing, field)
    for use in (
        lambda it: operator.setitem(it, 0, 1),
        lambda it: operator.delitem(it, 0),
    ):
        with pytest.raises(TypeError) as raised:
            use(thing)
        assert is_answered(raised.value)
    assert issubclass(NotChangeableError, FrozenInstanceError)


@pytest.mark.parametrize("name", [*RESULTS, "dataset", "graphs", "loader", "detector"])
def test_an_object_is_hashed_copied_and_pickled(objects, name):
    thing = objects[name]

    again = pickle.loads(pickle.dumps(thing))
    for other in (copy.copy(thing), copy.deepcopy(thing), again):
        assert type(other) is type(thing)
        assert repr(other) == repr(thing)
    assert hash(thing) == hash(thing)
    assert {thing: 1}[thing] == 1


def test_results_that_are_equal_have_one_hash():
    @answer_wrong_names()
    @dataclass(frozen=True)
    class Result:
        number: int
        names: object

    for names in ({"a": 1}, [1, 2], (1, {}), frozenset({1}), "a"):
        first, second = Result(1, names), Result(1, copy.deepcopy(names))
        assert (first == second, hash(first) == hash(second)) == (True, True)
    assert hash(Result(1, {})) != hash(Result(2, {}))


def test_a_meter_that_reads_in_a_thread_is_not_pickled_but_its_timeline_is(objects):
    for use in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(OptionError) as raised:
            use(objects["meter"])
        assert raised.value.fix.startswith("meter.timeline")


SETTINGS = {
    "detector": (lambda: loaderkit.LeakDetector("cpu"), "tolerances", "tolerance"),
    "meter": (lambda: loaderkit.MemoryMeter("cpu"), "every_seconds", "every_s"),
    "batcher": (
        lambda: loaderkit.MicroBatcher(MODEL, torch.optim.SGD(MODEL.parameters())),
        "microbatch",
        "micro_batch",
    ),
}


@pytest.mark.parametrize(("make", "wrong", "right"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_under_a_wrong_name_is_not_set_silently(make, wrong, right):
    thing = make()

    with pytest.raises(NotChangeableError) as raised:
        setattr(thing, wrong, 3)
    assert f".{right} = 3" in raised.value.fix
    setattr(thing, right, 3)
    assert getattr(thing, right) == 3


@pytest.mark.parametrize("make", [row[0] for row in SETTINGS.values()], ids=SETTINGS)
def test_every_value_that_an_object_or_its_class_has_can_be_set(make):
    thing = make()
    kind = type(thing)
    of_class = [
        name
        for base in kind.__mro__
        for name, value in vars(base).items()
        if not callable(value) and not hasattr(value, "__get__")
    ]
    values = {name for name in (*vars(thing), *of_class) if not name.startswith("_")}

    for name in values:
        setattr(thing, name, getattr(thing, name))

    assert len(values) >= 3
    with pytest.raises(NotChangeableError):
        thing.no_such_value = 3


def test_a_users_subclass_has_attributes_of_its_own():
    class Named(loaderkit.LeakDetector):
        def __init__(self, name):
            super().__init__("cpu")
            self.name = name

    named = Named("a")
    named.comment = "b"
    assert (named.name, named.comment) == ("a", "b")


def test_a_value_under_the_name_of_a_method_is_refused_where_it_is_set(objects):
    class Named(loaderkit.SafeDataset):
        def __init__(self):
            super().__init__()
            self.keys = ["a", "b"]

    with pytest.raises(NotChangeableError, match="keys is a method") as raised:
        Named()
    assert "def keys(self" in raised.value.fix
    with pytest.raises(NotChangeableError, match="batch is a method"):
        objects["dataset"].batch = 3


def test_a_field_of_graphs_is_not_hidden_by_an_attribute(objects):
    graphs = objects["graphs"]

    assert len(graphs) == 3
    with pytest.raises(NotChangeableError, match="cannot be changed: x = "):
        graphs.x = torch.zeros(6, 1)
    # Before the cache is open no name is looked up in it: that would open it.
    closed = loaderkit.SafeGraphDataset(cache=graphs.cache)
    closed.y = 3
    assert vars(closed)["_loaderkit"].opened is None
    graphs.comment = "kept beside"
    assert graphs.comment == "kept beside"


def test_what_a_detector_decorates_can_be_called():
    for wrong in (3, None, "train"):
        with pytest.raises(OptionError, match="must be a function"):
            loaderkit.LeakDetector("cpu")(wrong)
    with pytest.raises(OptionError, match="missing a required argument"):
        loaderkit.LeakDetector("cpu")()


def test_the_keys_of_a_dataset_that_was_opened_are_its_rows(objects):
    for use in (lambda it: dict(it), lambda it: dict(**it), lambda it: it.keys()):
        error = attempt(use, objects["dataset"])
        assert is_answered(error)
        assert "cannot be called" not in str(error)
        assert "no cache" not in error.why
        assert error.fix.startswith("range(len(dataset))")


# ---- a decision is as its value


VALUES = [0, 3, True, False, None, "fork", 2.5]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_decision_does_what_its_value_does(value):
    decision = Decision(value, "for a reason")
    operations = {
        **{s: lambda it, use=use: use(it, 2) for s, use in TWO_OPERANDS.items()},
        **{f"r{s}": lambda it, use=use: use(2, it) for s, use in TWO_OPERANDS.items()},
        **ONE_OPERAND,
        "abs": abs,
        "round": round,
        "bool": bool,
        "hash": hash,
        "equals": lambda it: it == value,
        "format": lambda it: format(it, ">9"),
        "in": lambda it: "o" in it,
    }

    for name, operation in operations.items():
        expected, actual = attempt(operation, value), attempt(operation, decision)
        assert type(actual) is type(expected), name
        if expected is None:
            assert operation(decision) == operation(value), name


# ---- no protocol is faked

CHECKS = {
    "call": (lambda it: it(), callable),
    "next": (next, lambda it: isinstance(it, abc.Iterator) or hasattr(it, "__next__")),
    "len": (len, lambda it: isinstance(it, abc.Sized)),
    "iter": (iter, lambda it: isinstance(it, abc.Iterable)),
    "float": (float, lambda it: isinstance(it, SupportsFloat | Number)),
    "int": (int, lambda it: isinstance(it, SupportsInt)),
    "index": (operator.index, lambda it: isinstance(it, SupportsIndex)),
    "unpack": (lambda it: dict(**it), lambda it: isinstance(it, abc.Mapping)),
    "bytes": (memoryview, lambda it: hasattr(it, "__buffer__")),
    "numpy": (np.asarray, lambda it: hasattr(it, "__array_interface__")),
}
WITH_HINT = {
    # numpy asks padded batches for an array, and tensors ask them before they compute.
    ("numpy", "padded"),
    ("numpy", "packed"),
    # These are collections, and keys() is what ** asks for first.
    ("unpack", "dataset"),
    ("unpack", "graphs"),
    # A detector decorates a function.
    ("call", "detector"),
}


@pytest.mark.parametrize("check", CHECKS)
def test_what_an_object_claims_to_do_it_does(objects, check):
    operation, claims = CHECKS[check]
    for name, thing in objects.items():
        if (check, name) in WITH_HINT or check == "numpy":
            continue
        if claims(thing):
            assert attempt(operation, thing) is None, name
        elif check != "iter":
            assert not isinstance(attempt(operation, thing), LoaderkitError), name


def test_a_claim_that_is_not_met_would_be_seen():
    @answer_wrong_names()
    class Faked:
        def __next__(self):
            msg = "no"
            raise OptionError(msg, why="no", fix="no")

    operation, claims = CHECKS["next"]
    assert claims(Faked())
    assert attempt(operation, Faked()) is not None


@pytest.mark.parametrize("name", RESULTS)
def test_what_looks_for_items_in_a_result_is_told_of_its_attributes(objects, name):
    if name in {"padded", "packed"}:
        assert len(list(objects[name])) in {2, 3}
        return
    for use in (list, dict, lambda it: 3 in it, lambda it: [*it], lambda it: it[0]):
        errors = answers_of([attempt(use, objects[name])])
        assert all(map(is_answered, errors))
    assert not isinstance(objects[name], abc.Iterable | AbstractContextManager)
