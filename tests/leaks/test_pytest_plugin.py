"""The plugin in a pytest of its own: planted leaks fail, their twins pass."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

# pytester lets go of the modules that its tests import, and torch cannot be imported
# twice into a process: so everything is here before.
import loaderkit.leaks.detector  # noqa: F401
from loaderkit.leaks.pytest_plugin import _is_spelt_alike as is_spelt_alike

TESTS = """
    import pytest, torch
    retained = []

    @pytest.mark.leak_free(epochs=8)
    def test_planted(leak_epoch):
        retained.append(torch.randn(30_000) + leak_epoch)

    @pytest.mark.leak_free
    def test_flat(tmp_path):
        torch.save(torch.randn(1000), tmp_path / "a.pt")

    seen = []

    @pytest.mark.leak_free(epochs=6)
    @pytest.mark.parametrize("size", [3])
    def test_numbered(leak_epoch, size):
        seen.append(leak_epoch)
        assert seen == list(range(len(seen)))

    def test_own_loop(leak_detector):
        for _ in leak_detector.epochs(range(8)):
            torch.randn(1000)

    def test_own_loop_not_told(leak_detector):
        for _ in range(8):
            torch.randn(1000)

    def test_own_loop_planted(leak_detector):
        for _ in leak_detector.epochs(range(8)):
            retained.append(torch.randn(30_000))
"""
WRONG = """
    import pytest

    @pytest.mark.leak_free(epochs=3)
    def test_too_few(): pass

    @pytest.mark.leak_free(8)
    def test_by_position(): pass

    @pytest.mark.leak_free(epoch=8)
    def test_misspelt(): pass

    @pytest.mark.leak_free
    async def test_async(): pass

    @pytest.mark.leak_free
    def test_fails_by_itself():
        assert 1 == 2

    @pytest.mark.leak_free(limit="1 KiB")
    def test_above_its_limit(): pass

    @pytest.mark.leak_free(tolerance="64 kittens")
    def test_no_size(): pass

    @pytest.mark.leak_free(epochs="many")
    def test_no_number(): pass

    @pytest.mark.leak_free(threshold="1 MiB")
    def test_of_another_tool(): pass
"""


@pytest.mark.slow
def test_planted_leaks_fail_and_their_twins_pass(pytester):
    pytester.makepyfile(TESTS)
    result = pytester.runpytest("--leak-report=html", "--junitxml=results.xml")

    result.assert_outcomes(passed=4, failed=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*test_own_loop_not_told*",
            "leak_detector has counted no epoch*",
            "leaking: * more each epoch*",
            "1. list `*.retained` in*",
            "*.py:6 or *.py:*",
            "*keeps 1 Tensor * more each epoch*",
            "*memory leaks (loaderkit)*",
            "*::test_flat: steady*html]",
            "*::test_planted: leaking*",
        ]
    )
    pages = sorted(file.name for file in (pytester.path / "leak-reports").iterdir())
    assert len(pages) == 5
    assert pages[0].endswith("test_flat.html")
    tree = ElementTree.parse(pytester.path / "results.xml")
    values = [
        json.loads(entry.get("value"))
        for entry in tree.iter("property")
        if entry.get("name") == "loaderkit_leak"
    ]
    verdicts = [value["verdict"] for value in values]
    assert verdicts == ["leaking", "steady", "steady", "steady", "leaking"]


@pytest.mark.slow
def test_wrong_use_is_told(pytester):
    pytester.makepyfile(WRONG)
    result = pytester.runpytest()

    result.assert_outcomes(failed=9)
    result.stdout.no_fnmatch_line("*pytest_plugin.py*")  # no line of ours is at fault
    result.stdout.fnmatch_lines(
        [
            "*epochs must be an integer of at least 6, got 3.",
            "  fix: epochs=6",
            "*leak_free got a positional argument.",
            "  why: it takes*by name",
            "  fix: @pytest.mark.leak_free(epochs=8)",
            "*leak_free got epoch.",
            "  fix: @pytest.mark.leak_free(epochs=8)",
            "*cannot repeat an async test*",
            "  fix: *def test_async(): asyncio.run(_test_async())",
            "*assert 1 == 2*",
            "*limit=1.00 KiB is less than is used already.",
            "  why: * are in use before the first epoch",
            "  fix: limit='* *iB'",
            "*tolerance must be a size such as '256 MiB', got '64 kittens'*",
            "*epochs must be an integer of at least 6, got 'many'.",
            "  why: its type is str",
            "  fix: epochs=6",
            "*leak_free got threshold.",
            "  fix: @pytest.mark.leak_free(tolerance='1 MiB')",
        ]
    )


@pytest.mark.slow
def test_the_ini_file_gives_what_the_marker_does_not(pytester):
    pytester.makeini("[pytest]\nleak_tolerance = 10MiB\nleak_epochs = 7\n")
    pytester.makepyfile(
        """
        import pytest, torch
        retained = []

        @pytest.mark.leak_free
        def test_within_the_tolerance(leak_epoch):  # numbered: called no more often
            retained.append(torch.randn(30_000))

        def test_it_ran_seven_times():
            assert len(retained) == 7
        """
    )
    result = pytester.runpytest("--leak-report=json", "--leak-report-dir=out")

    result.assert_outcomes(passed=2)
    (file,) = (pytester.path / "out").iterdir()
    assert json.loads(file.read_text())["epochs"] == 7


@pytest.mark.slow
@pytest.mark.needs("xdist")
def test_verdicts_come_back_from_the_workers_of_xdist(pytester):
    pytester.makepyfile(
        """
        import pytest

        retained = []

        @pytest.mark.leak_free(epochs=12)
        def test_planted():
            retained.append(bytearray(300_000))
        """
    )
    # In a process of its own: xdist's controller starts workers and lets them go.
    result = pytester.runpytest_subprocess("-n", "1")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*::test_planted: leaking*"])


@pytest.mark.slow
def test_the_plugin_imports_neither_torch_nor_h5py():
    code = (
        "import sys, pytest; import loaderkit.leaks.pytest_plugin;"
        "print('torch' in sys.modules, 'h5py' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["False", "False"]


UNITTEST = """
    import unittest
    import pytest, torch
    retained, calls = [], []

    class TestOfUnittest(unittest.TestCase):
        def setUp(self):
            calls.append("set up")

        @pytest.mark.leak_free
        def test_planted(self):
            retained.append(torch.randn(30_000))

        @pytest.mark.leak_free(epochs=7)
        def test_flat(self):
            calls.append("called")
            torch.randn(30_000)

        def test_later(self):
            assert calls.count("called") >= 7  # more where these do not decide

        def test_without_the_marker(self):
            calls.append("once")

    @pytest.mark.leak_free(epochs=6)
    class TestMarkedAsAWhole(unittest.TestCase):
        def test_fails_by_itself(self):
            self.assertEqual(1, 2)

        async def test_async(self):
            pass

        def test_fails_in_a_subtest(self):
            calls.append("with subtests")
            for number in range(2):
                with self.subTest(number=number):
                    self.assertLess(number, 1)

    def test_what_failed_in_a_subtest_was_called_once():
        assert calls.count("with subtests") == 1
"""


@pytest.mark.slow
def test_a_method_of_a_unittest_test_case_is_repeated_too(pytester):
    pytester.makepyfile(UNITTEST)

    result = pytester.runpytest("-p", "no:cacheprovider")

    # A method whose subtest failed has passed by itself, for pytest 9.
    result.assert_outcomes(passed=5, failed=4)
    # malloc's figure is exact; the headline may name pages, which came with it.
    result.stdout.fnmatch_lines(
        [
            "leaking: * KiB more each epoch*",
            "*malloc *11[78] KiB  leaking: *",
            "1. list `*.retained`*",
        ]
    )
    result.stdout.fnmatch_lines(["*AssertionError: 1 != 2"])
    result.stdout.fnmatch_lines(["*cannot repeat an async test*"])


AGAIN = """
import pytest

@pytest.mark.leak_free
def test_leaves_a_folder(tmp_path):
    (tmp_path / "out").mkdir()

@pytest.mark.leak_free
def test_fails_at_once():
    raise ValueError
"""


@pytest.mark.slow
def test_what_fails_in_a_later_call_is_told_to_be_one(pytester):
    pytester.makepyfile(AGAIN)

    result = pytester.runpytest()

    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*FileExistsError*", "*calls a test 8*1 passed*"])
    assert result.stdout.str().count("calls a test 8 times") == 1


ENDS_EARLY = """
import unittest
import pytest

retained, calls = [], []

@pytest.fixture(autouse=True)
def _forget_calls():
    calls.clear()

def test_break(leak_detector):
    for epoch in leak_detector.epochs(range(40)):
        retained.append(bytearray(300_000))
        if epoch == 12:
            break

class TestOfUnittest(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def _detector(self, leak_detector):
        self.detector = leak_detector

    def test_return(self):
        for epoch in self.detector.epochs(range(40)):
            retained.append(bytearray(300_000))
            if epoch == 12:
                return

def test_steady_break(leak_detector):
    for epoch in leak_detector.epochs(range(40)):
        if epoch == 12:
            break

def test_error(leak_detector):
    for epoch in leak_detector.epochs(range(40)):
        if epoch == 12:
            raise KeyError

def test_too_few(leak_detector):
    for epoch in leak_detector.epochs(range(3)):
        pass

def test_too_few_by_break(leak_detector):
    for epoch in leak_detector.epochs(range(30)):
        if epoch == 3:
            break

@pytest.mark.leak_free
def test_late():
    calls.append(1)
    if len(calls) > 6:
        retained.append(bytearray(400_000))

@pytest.mark.leak_free
def test_numbered_late(leak_epoch):
    if leak_epoch > 5:
        retained.append(bytearray(400_000))

@pytest.mark.leak_free(epochs=7)
def test_once_in_the_last_call():
    calls.append(1)
    if len(calls) == 7:
        retained.append(bytearray(400_000))

@pytest.mark.leak_free
def test_fails():
    raise KeyError

def test_number_of_no_call(leak_epoch):
    pass
"""


@pytest.mark.slow
def test_no_leak_test_is_green_in_silence(pytester):
    pytester.makepyfile(ENDS_EARLY)
    # As users have it; ours turns warnings into errors.
    shown = "default::loaderkit.errors.NotJudgedWarning"

    result = pytester.runpytest("-p", "no:cacheprovider", "-W", shown)

    # Where the loop was left early, the test has passed, and its fixture fails.
    result.assert_outcomes(passed=7, failed=3, errors=5, warnings=1)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_break*",
            "leaking: 29* KiB more each epoch*",
            "*ERROR at teardown of TestOfUnittest.test_return*",
            "leaking: 29* KiB more each epoch*",
            "*ERROR at teardown of test_too_few *",
            "*3 epochs are too few to tell.",
            "  fix: leak_detector.epochs(range(6))",
            "*ERROR at teardown of test_too_few_by_break*",
            "*ERROR at setup of test_number_of_no_call*",
            "leak_epoch was taken by a test that is called once.",
            "*NotJudgedWarning: Needs more epochs: about * to decide; 39* KiB more*",
            "*why: it has grown for * only, and may go on",
            "*fix: @pytest.mark.leak_free(epochs=1*)",
            "*memory leaks (loaderkit)*",
        ]
    )
    summary = result.stdout.str().rpartition("memory leaks (loaderkit)")[2]
    rows = {
        "TestOfUnittest::test_return": "leaking: ",
        "test_break": "leaking: ",
        "test_error": "steady",
        "test_fails": "not judged: call 1 failed",
        "test_late": "leaking: ",
        "test_numbered_late": "needs more epochs: ",
        "test_once_in_the_last_call": "steady",
        "test_steady_break": "steady",
        "test_too_few": "needs more epochs: about ",
        "test_too_few_by_break": "needs more epochs: about ",
    }
    for name, verdict in rows.items():
        assert f"::{name}: {verdict}" in summary


@pytest.mark.slow
def test_undecided_tests_fail_where_their_warning_is_an_error(pytester):
    pytester.makepyfile(ENDS_EARLY)
    strict = "error::loaderkit.errors.NotJudgedWarning"

    result = pytester.runpytest(
        "-p", "no:cacheprovider", "-k", "numbered", "-W", strict
    )

    result.assert_outcomes(failed=1)


def test_pytest_tells_what_the_fixtures_are_for(pytester):
    result = pytester.runpytest("--fixtures", "-p", "no:cacheprovider")

    # pytest sorts them by where they are written, with line numbers as texts.
    for name, words in {
        "leak_epoch": "number of the call of a test marked leak_free",
        "leak_detector": "LeakDetector for a test that loops over epochs by itself",
    }.items():
        result.stdout.fnmatch_lines([f"{name}*", f"*{words}*"])


UNJUDGED = {
    "assert_no_leak": ("def", "is the report of a check, and no test"),
    "pytest.mark.leak_free\n@assert_no_leak": ("def", "is the report of a check"),
    "assert_no_leak\n@pytest.mark.leak_free": ("def", "is the report of a check"),
    "LeakDetector('cpu').run": ("def", "is the report of a check"),
    "assert_no_leak()": ("def", "was called with other arguments than it takes"),
    "LeakDetector": ("def", "takes a device first, got the function test_it"),
    "LeakDetector('cpu').epochs": ("def", "epochs takes what to loop over"),
    "LeakDetector('cpu')": ("def", "is watched by a LeakDetector, and not judged"),
    "pytest.mark.leak_free\n@wrapped": ("async def", "whose code has not run"),
}
"""Decorators that would leave a test unjudged, what they stand above, and the answer.

Before, pytest passed over five of them, or passed the test, and all was green.
"""


@pytest.mark.slow
def test_a_test_that_would_not_be_judged_is_no_green_one(pytester):
    head = """
import functools, pytest
from loaderkit import LeakDetector, assert_no_leak

def wrapped(function):
    return functools.wraps(function)(lambda: function())

"""
    for number, (decorator, (keyword, _)) in enumerate(UNJUDGED.items()):
        test = f"@{decorator}\n{keyword} test_it(): pass\n"
        pytester.makepyfile(**{f"test_{number}": f"{head}{test}"})
    in_class = "import unittest\nclass TestIt(unittest.TestCase):\n"
    in_class += "    @LeakDetector('cpu')\n    def test_it(self): pass\n"
    pytester.makepyfile(test_unittest=f"{head}{in_class}")
    of_class = "@assert_no_leak\nclass TestIt:\n    def test_it(self): pass\n"
    pytester.makepyfile(test_class=f"{head}{of_class}")

    result = pytester.runpytest("--continue-on-collection-errors")

    counts = result.parseoutcomes()
    assert counts.get("passed", 0) == 0
    assert counts["failed"] + counts["errors"] == len(UNJUDGED) + 2
    shown = result.stdout.str()
    for _, answer in UNJUDGED.values():
        assert answer in shown


@pytest.mark.slow
def test_a_report_without_the_name_of_a_test_is_let_be(pytester):
    pytester.makepyfile(
        """
        import loaderkit

        kept_report = loaderkit.assert_no_leak(lambda: None)

        def test_train():
            assert kept_report.ok
        """
    )

    pytester.runpytest().assert_outcomes(passed=1)


LETTERS = "abcdefghijklmnopqrstuvwxyz_"


def _misspellings(name):
    """A letter missing, too many, exchanged with the next or another; other joins."""
    for place in range(len(name)):
        yield name[:place] + name[place + 1 :]
        yield name[:place] + name[place] * 2 + name[place + 1 :]
        yield name[:place] + name[place : place + 2][::-1] + name[place + 2 :]
        for letter in LETTERS:
            yield name[:place] + letter + name[place + 1 :]
            yield name[:place] + letter + name[place:]
    yield from (
        name.replace("_", ""),
        name.upper(),
        "LeakFree",
        "leakFree",
        "free_leak",
    )


OTHER_MARKS = """
    leak leaks leaky leakage no_leak leak_test limit_leaks limit_memory memory_leak
    data_leakage free freeze network slow asyncio timeout flaky serial thread_free
    lock_free leak_check parametrize usefixtures gpu lake leap_year break_free
"""


def test_marks_that_are_spelt_nearly_right_are_known_from_others():
    missed = {
        word
        for word in _misspellings("leak_free")
        if word != "leak_free" and not is_spelt_alike(word)
    }
    assert missed == {"free_leak"}  # pytest warns of it
    assert [word for word in OTHER_MARKS.split() if is_spelt_alike(word)] == []


@pytest.mark.slow
def test_a_misspelt_mark_fails_unless_somebody_registered_it(pytester):
    pytester.makeini("[pytest]\nmarkers =\n    leakfree(why): of another plugin\n")
    pytester.makepyfile(
        """
        import unittest
        import pytest

        @pytest.mark.leak_fre(epoch=7)
        def test_misspelt(): pass

        @pytest.mark.leakfree
        def test_of_another_plugin(): pass

        @pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.leak_feee), 2])
        def test_one_of_two(n): pass

        class TestMethod(unittest.TestCase):
            @pytest.mark.Leak_Free
            def test_method(self): pass
        """
    )
    result = pytester.runpytest("-W", "ignore::pytest.PytestUnknownMarkWarning")

    result.assert_outcomes(passed=2, errors=3)
    result.stdout.fnmatch_lines(
        ["leak_fre is no mark.", "  fix: @pytest.mark.leak_free(epochs=7)"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("leak_tolerence = 1MiB", "  fix: leak_tolerance in tox.ini"),
        ("leak_threshold = 1MiB", "  fix: leak_tolerance in tox.ini"),
        ("leak_epoch = 9", "  fix: leak_epochs in tox.ini"),
        ("leak_wobble = 9", "  fix: it is one of leak_device, leak_epochs*"),
        ("leak_tolerance = 1", "  fix: leak_tolerance = 1 GB in tox.ini"),
        ("leak_epochs = three", "  fix: leak_epochs = 6 in tox.ini"),
    ],
)
def test_wrong_settings_of_the_ini_file_fail(pytester, setting, told):
    pytester.makefile(".ini", tox=f"[pytest]\n{setting}\n")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.leak_free
        def test_marked(): pass

        def test_other(): pass
        """
    )
    result = pytester.runpytest()

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([told])


def test_a_setting_of_the_command_line_is_told_without_an_ini_file(pytester):
    pytester.makepyfile(
        "import pytest\n@pytest.mark.leak_free\ndef test_marked(): pass"
    )
    result = pytester.runpytest("-o", "leak_epochs=three")
    result.stdout.fnmatch_lines(["  fix: leak_epochs = 6 in the ini file"])


@pytest.mark.slow
def test_what_pytest_keeps_of_the_calls_is_no_leak(pytester):
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture(params=[False, True], ids=["flat", "planted"])
        def keep(request):
            kept = []
            yield kept.append if request.param else lambda _: None
        """
    )
    pytester.makepyfile(
        """
        import logging
        import pytest

        pytestmark = pytest.mark.leak_free

        def test_log(keep):
            for step in range(100):
                logging.getLogger("train").warning("step %s", step)
            keep(bytearray(100_000))

        def test_own_log(keep, caplog):
            with caplog.at_level(logging.INFO):
                logging.getLogger("train").info("one")
            assert len(caplog.records) == 1
            keep(bytearray(100_000))

        def test_output(keep, capsys):
            print("a" * 50_000)
            keep(bytearray(100_000))

        def test_subtests(keep, subtests):
            for n in range(50):
                with subtests.test("one", n=n):
                    assert n < 50
            keep(bytearray(100_000))

        def test_read_output(keep, capfd):
            print("a")
            assert capfd.readouterr().out == "a\\n"
            keep(bytearray(100_000))
        """
    )
    result = pytester.runpytest("-q")

    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"]) == (5, 5)
    result.stdout.no_fnmatch_line("FAILED *flat*")


@pytest.mark.slow
def test_what_pytest_keeps_of_subtests_and_own_loops_is_told_beside_a_leak(pytester):
    pytester.makepyfile(
        """
        import logging
        import unittest
        import pytest

        class TestOfUnittest(unittest.TestCase):
            @pytest.mark.leak_free
            def test_subtests(self):
                for n in range(50):
                    with self.subTest(n=n): pass

        def test_own_loop(leak_detector):
            for _ in leak_detector.epochs(range(12)):
                for step in range(100):
                    logging.getLogger("train").warning("step %s", step)
        """
    )
    result = pytester.runpytest("-q")

    result.stdout.fnmatch_lines(
        [
            "  note: pytest keeps the reports of * subtests, which are in*",
            "  note: pytest keeps 1,200 records that were logged, which are in*",
        ]
    )


@pytest.mark.slow
def test_several_markers_add_up_and_the_closest_wins(pytester):
    pytester.makepyfile(
        """
        import pytest

        calls = []

        @pytest.mark.leak_free(epochs=9, tolerance="10 MiB")
        class TestGroup:
            @pytest.mark.leak_free(epochs=7)
            def test_kept(self, leak_epoch):
                calls.append(bytearray(300_000))

            def test_calls(self):
                pass

        def test_it_ran_seven_times():
            assert len(calls) == 7
        """
    )
    pytester.runpytest().assert_outcomes(passed=3)


@pytest.mark.slow
def test_a_subtest_that_fails_in_a_later_call_fails_the_test(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.leak_free
        def test_later(subtests, leak_epoch):
            for n in range(3):
                with subtests.test("part", n=n):
                    assert leak_epoch < 2 or n != 1, "in call three"
        """
    )
    result = pytester.runpytest("-q")

    assert result.parseoutcomes()["failed"] >= 1
    result.stdout.fnmatch_lines(["*part*n=1*", "*in call three*"])


HELD_BY_FIXTURES = """
    import pytest

    class Trainer:
        def __init__(self): self.history = {"losses": []}

    @pytest.fixture(scope="session")
    def store(): return []

    @pytest.fixture
    def through_store(store): return Trainer

    @pytest.fixture
    def trainer(): return Trainer()

    @pytest.fixture
    def pair():
        yield {}, []

    @pytest.mark.leak_free(epochs=6)
    def test_of_a_session(store): store.append(bytearray(50_000))

    @pytest.mark.leak_free(epochs=6)
    def test_in_an_attribute(trainer):
        trainer.history["losses"].append(bytearray(50_000))

    @pytest.mark.leak_free(epochs=6)
    def test_in_a_tuple(pair): pair[1].append(bytearray(50_000))

    @pytest.mark.leak_free(epochs=6)
    def test_of_its_environment(monkeypatch):
        monkeypatch.setenv("LARGE", "x" * 50_000)

    class TestInAClass:
        @pytest.fixture(autouse=True)
        def prepare(self): self.kept = []

        @pytest.mark.leak_free(epochs=6)
        def test_on_self(self): self.kept.append(bytearray(50_000))
"""


@pytest.mark.slow
def test_what_fixtures_hold_is_named_by_them(pytester):
    # pytest's own names for it (cached_result) say nothing to who wrote the fixture.
    pytester.makepyfile(HELD_BY_FIXTURES)
    result = pytester.runpytest("-p", "no:randomly")
    output = re.sub(r"\s+", " ", result.stdout.str())
    for path in (
        "list `store` in",
        "list `trainer.history['losses']` in",
        "list `pair[1]` in",
        "list `monkeypatch._setitem` in",
        "list `self.kept` in",
    ):
        assert path in output
    assert "cached_result" not in output
    result.assert_outcomes(failed=5)
