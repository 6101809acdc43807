"""Each option of leak detection refuses what it cannot be, and says what to write."""

import inspect
import math
from functools import partial

import pytest

from loaderkit import LeakDetector, assert_no_leak
from loaderkit.errors import OptionError

WRONG = {
    "a text": "many",
    "a number as a text": "8",
    "a float": 8.0,
    "a truth": True,
    "zero": 0,
    "negative": -1,
    "no number": math.nan,
    "infinity": math.inf,
    "a list": [8],
    "a class": object,
    "bytes": b"8",
}
ALLOWED = {
    ("tolerance", "zero"),
    ("warmup", "zero"),
}
"""A tolerance of nothing, and no warm-up, are what somebody may want."""


def options_of(function, *, without=()):
    names = [*inspect.signature(function).parameters]
    return [name for name in names if name not in {"self", "function", *without}]


CALLS = {
    "LeakDetector": (LeakDetector, options_of(LeakDetector.__init__)),
    "assert_no_leak": (partial(assert_no_leak, list), options_of(assert_no_leak)),
    "run": (lambda **given: LeakDetector("cpu").run(list, **given), ["epochs"]),
}
CASES = [
    (call, option, name)
    for call, (_, options) in CALLS.items()
    for option in options
    for name in WRONG
    if (option, name) not in ALLOWED
]


@pytest.mark.parametrize(("call", "option", "name"), CASES)
def test_a_wrong_value_is_refused_with_what_to_write(call, option, name):
    function, _ = CALLS[call]

    with pytest.raises(OptionError) as refused:
        function(**{option: WRONG[name]})

    assert option in refused.value.what
    assert refused.value.why
    assert refused.value.fix


def test_the_fixes_are_accepted():
    for call, option, name in CASES:
        if option in {"device", "on_leak"}:
            continue
        with pytest.raises(OptionError) as refused:
            CALLS[call][0](**{option: WRONG[name]})
        fix = refused.value.fix.partition("=")[2].partition(", or ")[0]
        if call == "LeakDetector":
            LeakDetector("cpu", **{option: eval(fix)})


@pytest.mark.parametrize("given", ["100", b"100", 100, None, True, 1e3, math.nan])
def test_what_is_no_series_of_epochs_is_refused_with_one(given):
    with pytest.raises(OptionError, match=r"epochs\(range\(\d+\)\)"):
        next(LeakDetector("cpu").epochs(given))


@pytest.mark.slow
def test_the_marker_refuses_the_same(pytester):
    lines = ["import math, pytest", ""]
    expected = []
    for option in ("epochs", "limit", "tolerance", "device"):
        for number, (name, value) in enumerate(WRONG.items()):
            if (option, name) in ALLOWED or name == "a class":
                continue
            text = f"math.{value!r}" if value in (math.inf,) else repr(value)
            text = "math.nan" if text == "nan" else text
            lines += [
                f"@pytest.mark.leak_free({option}={text})",
                f"def test_{option}_{number}(): pass",
                "",
            ]
            expected.append(f"test_{option}_{number}")
    pytester.makepyfile("\n".join(lines))

    result = pytester.runpytest("-p", "no:cacheprovider")

    result.assert_outcomes(failed=len(expected))
    text = result.stdout.str()
    assert text.count("leak_free has a setting that cannot be. ") == len(expected)
    result.stdout.no_fnmatch_line("*pytest_plugin.py*")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("leak_epochs = 8.0", "leak_epochs = 8 in pytest.ini"),
        ("leak_epochs = 3", "leak_epochs = 6 in pytest.ini"),
        ("leak_tolerance = 64 parsec", "leak_tolerance = 64 MB in pytest.ini"),
        ("leak_limit = 0 GiB", "leak_limit = 8 GiB in pytest.ini"),
        ("leak_device = gpu", "leak_device = cuda in pytest.ini"),
    ],
)
def test_a_wrong_line_of_the_ini_file_is_told_as_such(pytester, line, fix):
    pytester.makefile(".ini", pytest=f"[pytest]\n{line}\n")
    pytester.makepyfile(
        "import pytest\n@pytest.mark.leak_free\ndef test_marked(): pass\n"
    )

    result = pytester.runpytest("-p", "no:cacheprovider")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["leak_free has a setting that cannot be.*", f"*{fix}"])


async def trains():
    pass


def trains_when_read():
    yield


async def trains_when_awaited_for():
    yield


@pytest.mark.slow
@pytest.mark.parametrize(
    "deferred", [trains, trains_when_read, trains_when_awaited_for]
)
@pytest.mark.parametrize(
    "watch",
    [
        assert_no_leak,
        lambda function: LeakDetector("cpu").run(function, epochs=6),
        lambda function: LeakDetector("cpu")(function)(),
    ],
    ids=["assert_no_leak", "run", "decorator"],
)
@pytest.mark.filterwarnings("ignore::loaderkit.errors.NotJudgedWarning")
def test_a_call_that_runs_none_of_its_code_is_refused(watch, deferred):
    with pytest.raises(OptionError):
        watch(deferred)  # seen before the call
    with pytest.raises(OptionError, match="whose code has not run"):
        watch(lambda: deferred())


def test_a_class_is_not_watched():
    class Training:
        pass

    with pytest.raises(OptionError, match="got the class Training"):
        LeakDetector("cpu")(Training)


def test_epochs_are_refused_before_the_loop():
    with pytest.raises(OptionError, match="got <function"):
        LeakDetector("cpu").epochs(trains_when_read)
