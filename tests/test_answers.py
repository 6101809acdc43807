"""Over all public names: a wrong attribute or argument is answered with a right one.

The public names are those of the reference, which another test holds against the front
door.
"""

import copy
import importlib
import inspect
import pickle
import re
from pathlib import Path

import pytest
import torch

import loaderkit
from loaderkit.answers import answer_wrong_names
from loaderkit.datasets.ragged import Padded
from loaderkit.errors import NoSuchAttributeError, OptionError
from loaderkit.habits import ATTRIBUTES

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"


def public_names(directive):
    for page in sorted(REFERENCE.glob("*.md")):
        yield from re.findall(rf"auto{directive}:: (\S+)", page.read_text("utf-8"))


def find(dotted_name):
    module, _, name = dotted_name.rpartition(".")
    return getattr(importlib.import_module(module), name)


def is_ours_to_answer(name):
    # Base classes of users' test suites, and callbacks that another library calls.
    return not name.startswith(("loaderkit.testing", "loaderkit.integrations"))


CLASSES = sorted(filter(is_ours_to_answer, public_names("class")))
FUNCTIONS = sorted(filter(is_ours_to_answer, public_names("function")))
NO_ADVICE_NEEDED = {"units", "fit_trend", "shares_memory"}
"""What is called with a value or two by position."""


def is_named_tuple(kind):
    return issubclass(kind, tuple)


def public_methods(kind):
    for name in dir(kind):
        if name.startswith("_"):
            continue
        member = inspect.getattr_static(kind, name)
        if inspect.isfunction(member) and member.__module__.startswith("loaderkit"):
            yield name


def unmade(kind):
    """Make an object without its constructor: it has names, and no values."""
    return (
        kind(*[None] * len(kind._fields))
        if is_named_tuple(kind)
        else object.__new__(kind)
    )


def all_calls():
    """Give each public function, constructor and method, as it is called."""
    for dotted in FUNCTIONS:
        if not NO_ADVICE_NEEDED & set(dotted.split(".")):
            yield pytest.param(find(dotted), id=dotted.rpartition(".")[2])
    for dotted in CLASSES:
        kind = find(dotted)
        short = dotted.rpartition(".")[2]
        if not is_named_tuple(kind):
            yield pytest.param(kind, id=short)
        for name in public_methods(kind):
            yield pytest.param(getattr(unmade(kind), name), id=f"{short}.{name}")


def parameters_of(call):
    return [
        parameter
        for parameter in inspect.signature(call).parameters.values()
        if parameter.name != "self"
    ]


def long_keywords(call):
    kinds = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    for parameter in parameters_of(call):
        # Of shorter ones a letter less leaves too little to be recognised.
        if parameter.kind in kinds and len(parameter.name) >= 5:
            yield parameter.name


def takes_any(call, kind):
    return any(parameter.kind is kind for parameter in parameters_of(call))


def required_of(call):
    free = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return [
        parameter.name
        for parameter in parameters_of(call)
        if parameter.default is parameter.empty and parameter.kind not in free
    ]


def calls_where(condition):
    return [case for case in ALL_CALLS if condition(case.values[0])]


ALL_CALLS = list(all_calls())
# Options are checked when they are read: tests/test_habits.py calls those functions.
WITHOUT_OPTIONS = calls_where(lambda c: not takes_any(c, inspect.Parameter.VAR_KEYWORD))
COUNTING = calls_where(lambda c: not takes_any(c, inspect.Parameter.VAR_POSITIONAL))
NEEDING = calls_where(required_of)


@pytest.mark.many_cases
@pytest.mark.parametrize("call", WITHOUT_OPTIONS)
def test_a_wrong_keyword_is_answered_with_the_nearest(call):
    for keyword in long_keywords(call):
        with pytest.raises(OptionError, match="has no option") as raised:
            call(**{keyword[:2] + keyword[3:]: 1})
        assert repr(keyword) in raised.value.fix
    with pytest.raises(OptionError, match="has no option 'xyzzy'") as raised:
        call(xyzzy=1)
    assert raised.value.fix


@pytest.mark.many_cases
@pytest.mark.parametrize("call", COUNTING)
def test_too_many_arguments_are_answered(call):
    with pytest.raises(OptionError, match="too many positional") as raised:
        call(*[None] * 200)

    assert "BatchJoining" not in raised.value.what, "a base that no user has heard of"
    assert raised.value.why
    assert raised.value.fix


@pytest.mark.many_cases
@pytest.mark.parametrize("call", NEEDING)
def test_too_few_arguments_are_answered(call):
    words = r"missing a required|was called without"
    with pytest.raises(OptionError, match=words) as raised:
        call()

    assert raised.value.fix


# ---- attributes

ANSWERING = [name for name in CLASSES if hasattr(find(name), "__getattr__")]
FORMS = ["is_{}", "num_{}", "{}_bytes", "get_{}", "total_{}", "{}_memory"]
"""How people write a name that they half remember."""


def words_of(name):
    return {word.rstrip("s") for word in name.split("_")}


def names_of(kind):
    fields = set(getattr(kind, "__dataclass_fields__", {}))
    public = {name for name in dir(kind) if not name.startswith("_")}
    return sorted(name for name in fields | public if not name.startswith("_"))


def test_all_results_answer_attributes():
    silent = set(CLASSES) - set(ANSWERING)

    # A device's cache cleaner and a prefetcher are no results; the latter passes
    # attributes on to its loader.
    assert silent <= {"loaderkit.memory.cache_cleaner.EpochCacheCleaner"} | {
        f"loaderkit.{name}" for name in ("PtFolder", "loader.options.LoaderOptions")
    }


@pytest.mark.parametrize(
    "dotted",
    [
        name
        for name in ANSWERING
        if "Prefetcher" not in name and "Dataset" not in name and "Loader" not in name
    ],
)
def test_a_misspelt_attribute_is_answered_with_a_right_one(dotted):
    owner = unmade(find(dotted))
    names = names_of(type(owner))
    told = ATTRIBUTES.get(type(owner).__name__, {})

    for name in names:
        for form in FORMS:
            wrong = form.format(name)
            if wrong in names or wrong in told:
                continue
            with pytest.raises(NoSuchAttributeError) as raised:
                getattr(owner, wrong)
            advised = re.search(r"'(\w+)'", raised.value.fix)
            assert advised, (wrong, raised.value.fix)
            assert words_of(advised[1]) & words_of(name), wrong


# There are two callbacks of one name, each with what the other has: see test_habits.py.
@pytest.mark.parametrize("kind", sorted(set(ATTRIBUTES) - {"HasPage", "LeakCallback"}))
def test_a_hint_is_for_a_name_that_is_not_there_and_names_one_that_is(kind):
    [dotted] = [name for name in CLASSES if name.rpartition(".")[2] == kind]
    owner = unmade(find(dotted))

    for name, hint in ATTRIBUTES[kind].items():
        assert name not in names_of(type(owner)), "a hint that nobody would ever read"
        with pytest.raises(NoSuchAttributeError, match=re.escape(hint.fix)):
            getattr(owner, name)
        advised = re.match(r"[a-z]+\.(\w+)", hint.fix)
        if advised:
            assert advised[1] in names_of(type(owner)), hint.fix


def test_a_tensors_attribute_of_a_padded_field_is_its_values():
    field = Padded(torch.zeros(2, 3), torch.tensor([1, 3]), torch.ones(2, 3).bool())

    for called in ("shape", "cumsum()", "float()", "size()", "numpy()", "dtype"):
        name = called.removesuffix("()")
        assert not hasattr(field, name)
        fix = re.escape(f"fix: padded.values.{called}")
        # What a model may have asked is told for a model, too.
        of_model = r"(, or where a model asks: model\([a-z_.=, ]+\))?"
        with pytest.raises(AttributeError, match=f"{fix}{of_model}$"):
            getattr(field, name)


def test_what_answers_is_copied_and_pickled_and_has_its_own_errors():
    part = loaderkit.verify("never.lk")

    assert copy.deepcopy(part) == pickle.loads(pickle.dumps(part)) == part

    @answer_wrong_names()
    class Broken:
        @property
        def value(self):
            return self.missing_of_the_property

    with pytest.raises(NoSuchAttributeError, match="missing_of_the_property"):
        _ = Broken().value


@pytest.mark.slow
def test_a_type_error_of_the_users_own_code_is_not_taken_for_a_wrong_call():
    def one_epoch():
        return len(3)

    with pytest.raises(TypeError, match="no len") as raised:
        loaderkit.assert_no_leak(one_epoch, epochs=8)
    assert not isinstance(raised.value, OptionError)
