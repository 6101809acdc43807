"""The pytest plugin: ``@pytest.mark.leak_free`` repeats a test and watches memory.

Importing it imports neither torch nor h5py: what judges is loaded by the first test
that asks for it.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import json
import logging
import re
import sys
import unittest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import pytest

from loaderkit.habits import KEYWORDS

if TYPE_CHECKING:
    import warnings
    from collections.abc import Callable, Iterator, Mapping

    from loaderkit.leaks.detector import LeakDetector
    from loaderkit.leaks.report import LeakReport

T = TypeVar("T")
MARK = "leak_free"
PROPERTY = "loaderkit_leak"
"""Under this name a test's verdict travels to the summary, xdist and JUnit."""
_OPTIONS = ("device", "epochs", "limit", "tolerance")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--leak-report`` and the ini options."""
    group = parser.getgroup("loaderkit", "memory leaks (loaderkit)")
    group.addoption(
        "--leak-report",
        choices=["html", "json"],
        help="write a report of each leak_free test into --leak-report-dir",
    )
    group.addoption(
        "--leak-report-dir", metavar="DIR", help="default: leak-reports in the rootdir"
    )
    parser.addini("leak_epochs", "calls of a leak_free test, default 8", default="")
    parser.addini("leak_limit", "memory a leak_free test may use, such as 2GiB")
    parser.addini("leak_tolerance", "bytes an epoch that are no leak, default 16KiB")
    parser.addini("leak_device", "device watched beside the host, such as cuda")


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers",
        f"{MARK}(epochs=8, device=None, limit=None, tolerance='16KiB'): call the test "
        "again and again, up to three times as often where that decides, and fail if "
        "memory grows with each call (loaderkit)",
    )

    config.pluginmanager.register(_UnknownSettings(config))


_UNKNOWN_SETTINGS = pytest.StashKey[set[str]]()


class _UnknownSettings:
    """Collects settings of the ini file that are probably meant for this plugin.

    pytest warns of each that nobody has registered, and goes on: a test with a
    misspelt ``leak_limit`` would pass.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._names = config.stash.setdefault(_UNKNOWN_SETTINGS, set())

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        """Keep the name that a warning is about; pytest tells earlier ones, too."""
        if issubclass(warning_message.category, pytest.PytestConfigWarning):
            text = str(warning_message.message)
            self._names.update(re.findall(r"Unknown config option: (leak_\w+)", text))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test with a mark that is probably a misspelt ``leak_free``.

    pytest warns of marks that nobody has registered, and calls the test once: it would
    pass, whatever it keeps.
    """
    registered: list[str] | None = None
    for mark in item.iter_markers():
        if mark.name == MARK or not _is_spelt_alike(mark.name):
            continue
        if registered is None:
            lines = item.config.getini("markers")
            registered = [re.split(r"[:(]", line)[0].strip() for line in lines]
        if mark.name not in registered:
            _fail(
                f"{mark.name} is no mark.",
                why="a test without the right one is called once, and not watched",
                fix=_write_mark(mark.args, mark.kwargs),
            )


def _is_spelt_alike(name: str) -> bool:
    """Whether a mark is ``leak_free`` but for a letter or two, or how it is joined.

    >>> _is_spelt_alike("LeakFree"), _is_spelt_alike("leak_fre")
    (True, True)
    >>> _is_spelt_alike("leak"), _is_spelt_alike("data_leak"), _is_spelt_alike("leaky")
    (False, False, False)
    """
    letters = name.lower().replace("_", "")
    own_letters = MARK.replace("_", "")
    # One letter of eight that is missing, too many, another one or exchanged with the
    # next gives 0.87 or more, "break_free" 0.82.
    return difflib.SequenceMatcher(None, letters, own_letters).ratio() > 0.85


def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> None:
    """Refuse a report that stands where a test should be: nobody would call it.

    ``@loaderkit.assert_no_leak`` above a test calls it while the file is imported, and
    leaves its report in the test's place, which pytest passes over, as does ``run`` of
    a detector.
    """
    # Where no report was made, none is loaded.
    reports = sys.modules.get("loaderkit.leaks.report")
    if reports is None:
        return
    # A mark above what is no function keeps it as an argument.
    arguments = obj.args if isinstance(obj, pytest.MarkDecorator) else ()
    if not any(type(value) is reports.LeakReport for value in (obj, *arguments)):
        return
    if collector.funcnamefilter(name) or collector.classnamefilter(name):
        message = f"{name} is the report of a check, and no test."
        why = "assert_no_leak is no decorator: it has called the function already"
        fix = f"@pytest.mark.{MARK} above {name}, or assert_no_leak(f) inside of it"
        raise collector.CollectError(f"{message}\n  why: {why}\n  fix: {fix}")


@pytest.fixture
def leak_epoch(request: pytest.FixtureRequest) -> int:
    """The number of the call of a test marked leak_free: 0 in the first, then 1, 2 ...

    For what is to differ from call to call, such as the name of a file.
    """
    if request.node.get_closest_marker(MARK) is None:
        _fail(
            "leak_epoch was taken by a test that is called once.",
            why=f"it numbers the calls of a test that is marked {MARK}",
            fix=f"@pytest.mark.{MARK}, or leak_detector to loop over epochs yourself",
        )
    return 0


@pytest.fixture
def leak_detector(request: pytest.FixtureRequest) -> Iterator[LeakDetector]:
    """A LeakDetector for a test that loops over epochs by itself.

    As in ``for epoch in leak_detector.epochs(range(12)): ...``. Its verdict fails the
    test: at the end of the loop, or when the test ends, if the loop was left early. A
    test that counts no epoch, or too few to tell, fails as well.
    """
    item = request.node
    detector = _make_detector(_read_settings(item), on_leak="raise")
    failed_before = request.session.testsfailed
    caplog = _caplog_of(request)
    yield detector
    has_failed = request.session.testsfailed > failed_before
    if not detector.has_started:
        if not has_failed:
            _fail(
                "leak_detector has counted no epoch, so nothing was looked at.",
                why="it takes its readings where epochs begin and end",
                fix="for epoch in leak_detector.epochs(range(12)): ...",
            )
        return
    report = detector.report()
    records = caplog.get_records("call") if caplog else ()
    _keep_verdict(item, report, _what_pytest_keeps(0, len(records)))
    if not has_failed:
        _judge(item, report, "leak_detector.epochs(range({}))")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a marked test once an epoch, and judge."""
    if pyfuncitem.get_closest_marker(MARK) is None:
        return None
    function = pyfuncitem.obj
    _refuse_async(function)
    names = pyfuncitem._fixtureinfo.argnames  # noqa: SLF001 -- as pytest's own call
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names}
    if "leak_detector" in arguments:
        # It loops by itself, and is judged where the fixture ends.
        _read_epochs(_read_settings(pyfuncitem))  # a wrong number fails here too
        function(**arguments)
        return True

    def call(epoch: int) -> object:
        if "leak_epoch" in arguments:
            arguments["leak_epoch"] = epoch
        if epoch == 1 and "subtests" in arguments:
            arguments["subtests"] = _FailingSubtests(arguments["subtests"])
        return function(**arguments)

    _judge_calls_of(pyfuncitem, call)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Have a marked method of a ``unittest.TestCase`` repeat itself; refuse a watched.

    Such a method is called by unittest and not through ``pytest_pyfunc_call``.  What is
    repeated is the method alone: setUp and tearDown run once around all its calls, as
    fixtures do around those of a function.
    """
    if not isinstance(item, pytest.Function):
        return
    if hasattr(item.obj, "_loaderkit_detector"):
        _refuse_watched(item)
    if not item.get_closest_marker(MARK):
        return
    if item.cls is None or not issubclass(item.cls, unittest.TestCase):
        return
    method = item.obj
    _refuse_async(method)

    @functools.wraps(method)
    def repeated() -> None:
        _judge_calls_of(item, lambda _: method())

    item.obj = repeated


def _refuse_watched(item: pytest.Function) -> None:
    """Fail a test that a LeakDetector decorates: it would pass, whatever it keeps."""
    name = item.originalname or item.name
    _fail(
        f"{name} is watched by a LeakDetector, and not judged.",
        why="each of its calls is an epoch, and pytest calls a test once",
        fix=f"@pytest.mark.{MARK} in place of @LeakDetector()",
    )


def _refuse_async(function: object) -> None:
    if inspect.iscoroutinefunction(function):
        name = function.__name__
        parameters = list(inspect.signature(function).parameters)
        call = f"_{name}({', '.join(parameters)})"
        if inspect.ismethod(function):
            call, parameters = f"self.{call}", ["self", *parameters]
        test = f"def {name}({', '.join(parameters)}): asyncio.run({call})"
        _fail(
            f"{MARK} cannot repeat an async test.",
            why="each call of it makes a coroutine, which nobody awaits here",
            fix=f"call it _{name}, and have it run by {test}",
        )


def _refuse_result_to_run(result: object) -> None:
    """Fail a test whose call runs none of its code, as a wrapper of an async one."""
    from loaderkit.errors import OptionError
    from loaderkit.leaks.epoch_functions import check_has_run

    try:
        check_has_run(result)
    except OptionError as error:
        problem = error
    else:
        return
    _fail(problem.what, why=problem.why, fix="have the test run it: asyncio.run(...)")


def _judge_calls_of(item: pytest.Function, call: Callable[[int], object]) -> None:
    """Call a test once an epoch; fail it if memory grows."""
    from loaderkit.leaks.checks import MOST_TIMES_LONGER, judge_calls
    from loaderkit.memory.frames import naming_arguments

    settings = _read_settings(item)
    epochs = _read_epochs(settings)
    # What the number stands for in the test may have an end.
    is_numbered = "leak_epoch" in item.fixturenames
    most = epochs if is_numbered else MOST_TIMES_LONGER * epochs
    detector = _make_detector(settings, on_leak=lambda _: None)
    _unless_refused(settings, detector.start)
    failed_before = item.session.testsfailed

    subtests = _SubtestCounter(item.nodeid)

    def call_once(epoch: int) -> None:
        if epoch:
            _forget_earlier_calls(item)
        try:
            result = call(epoch)
        except Exception:
            _keep_row(item, _Row("not judged", f"not judged: call {epoch + 1} failed"))
            if epoch:
                text = (
                    f"{MARK} calls a test {epochs} times with the same fixtures: "
                    f"{epoch} passed before this one.  What a call leaves behind, such "
                    "as files in tmp_path, is there in the next.\n"
                )
                item.add_report_section("call", MARK, text)
            raise
        if item.session.testsfailed > failed_before:
            raise _SubtestFailedError
        _refuse_result_to_run(result)

    plugins = item.config.pluginmanager
    plugins.register(subtests)
    try:
        with naming_arguments(item.function, _values_by_name(item)):
            report = judge_calls(detector, call_once, epochs, most=most)
    except _SubtestFailedError:
        # It is reported at once, and lets the test go on: there is no use in failing it
        # again in each epoch.
        return
    finally:
        plugins.unregister(subtests)
    # What was logged went with each call.
    _keep_verdict(item, report, _what_pytest_keeps(subtests.count, 0))
    _judge(item, report, f"@pytest.mark.{MARK}(epochs={{}})")


def _values_by_name(item: pytest.Function) -> dict[str, object]:
    """Give what pytest keeps from call to call, by the names that a test has for it."""
    return {**item.funcargs, "self": item.instance, "request.node": item}


class _SubtestFailedError(Exception):
    """A subtest of a call failed."""


class _FailingSubtests:
    """Stands for pytest's ``subtests`` in further calls, and reports failures alone.

    pytest keeps each report to its end: a test with subtests would leak.

    Args:
        subtests: pytest's.
    """

    def __init__(self, subtests: Any) -> None:
        self._subtests = subtests

    @contextlib.contextmanager
    def test(self, msg: str | None = None, **kwargs: Any) -> Iterator[None]:
        """Run a subtest."""
        try:
            yield
        except (Exception, pytest.skip.Exception, pytest.fail.Exception):
            with self._subtests.test(msg, **kwargs):
                raise


class _SubtestCounter:
    """Counts the reports of subtests, each of which pytest keeps to its end."""

    def __init__(self, nodeid: str) -> None:
        self._nodeid = nodeid
        self.count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a report that comes while the test runs: its own come behind it."""
        self.count += report.nodeid == self._nodeid


_CAPTURE_FIXTURES = ("capsys", "capfd", "capsysbinary", "capfdbinary", "capteesys")


def _forget_earlier_calls(item: pytest.Function) -> None:
    """Empty what pytest itself keeps of a call: its log, and its output.

    Else each test that logs would leak, and one that looks at its log would find that
    of all calls.  What is shown of a test that fails is then that of its last call.

    Not the warnings of ``recwarn``: Python tells each of them once, in the first call.
    """
    # One is caplog's, and one is for the report.
    for handler in _capturing_handlers():
        handler.clear()
    for name in _CAPTURE_FIXTURES:
        if name in item.funcargs:
            capture: Any = item.funcargs[name]
            capture.readouterr()


def _capturing_handlers() -> list[Any]:
    """Find pytest's handlers that keep what is logged; none with other pytests.

    Their class is that of ``caplog.handler``, which only a test that takes ``caplog``
    has.
    """
    try:
        from _pytest.logging import LogCaptureHandler
    except ImportError:
        return []
    handlers = logging.getLogger().handlers
    return [handler for handler in handlers if isinstance(handler, LogCaptureHandler)]


def _caplog_of(request: pytest.FixtureRequest) -> pytest.LogCaptureFixture | None:
    """Give what knows the records of a test; None with ``-p no:logging``."""
    try:
        caplog: pytest.LogCaptureFixture = request.getfixturevalue("caplog")
    except pytest.FixtureLookupError:
        return None
    return caplog


def _what_pytest_keeps(subtests: int, records: int) -> str:
    """Say which part of a leak is pytest's own; nothing where none is.

    Args:
        subtests: Of all calls of a test.
        records: That it has logged, and pytest keeps.

    >>> _what_pytest_keeps(0, 0)
    ''
    """
    if subtests:
        return (
            f"pytest keeps the reports of {subtests:,} subtests, which are in these "
            "figures; a loop without subtests has none"
        )
    if records:
        return (
            f"pytest keeps {records:,} records that were logged, which are in these "
            "figures; caplog.clear() in each epoch drops them, and -p no:logging "
            "keeps none"
        )
    return ""


def _judge(item: pytest.Item, report: LeakReport, fix: str) -> None:
    """Fail a test that leaks, or is too short to tell; warn where it is not known.

    Args:
        item: The test.
        report: Of it.
        fix: How a number of epochs is written in it, with ``{}`` for the number.
    """
    from loaderkit.errors import NotJudgedWarning
    from loaderkit.leaks.run import is_too_short, why_undecided

    if report.leaking:
        pytest.fail(str(report), pytrace=False)
    undecided = why_undecided(report)
    if undecided is None:
        return
    undecided = undecided._replace(fix=fix.format(undecided.needed_epochs))
    if is_too_short(report):
        _fail(undecided.message, why=undecided.why, fix=undecided.fix)
    # No failure: what noise decides would fail every now and then.
    item.warn(NotJudgedWarning(str(undecided)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a line for each leak_free test, wherever it ran."""
    rows: dict[str, _Row] = {}
    for results in terminalreporter.stats.values():
        for result in results:
            # A fixture's verdict comes with the teardown, that of a marked test with
            # its call, and again with its teardown.
            for name, value in getattr(result, "user_properties", ()):
                if name == PROPERTY:
                    rows[result.nodeid] = _Row(**json.loads(value))
    if not rows:
        return
    terminalreporter.section("memory leaks (loaderkit)")
    for nodeid, row in sorted(rows.items()):
        page = f"  [{row.page}]" if row.page else ""
        terminalreporter.line(f"{nodeid}: {row.headline}{page}")
        if row.note:
            terminalreporter.line(f"  note: {row.note}")


class _Settings(NamedTuple):
    """How a test is watched."""

    values: Mapping[str, object]
    """Of the marker, else of the ini file; what neither has is missing."""
    of_ini_file: frozenset[str]
    """Which of them come from the ini file."""
    ini_file: str
    """Its name, for messages."""


def _read_epochs(settings: _Settings) -> int:
    """Give how often a marked test is called; fail it where that is no number."""
    from loaderkit.arguments import check_integer
    from loaderkit.leaks.checks import DEFAULT_EPOCHS
    from loaderkit.leaks.trend import FEWEST_EPOCHS

    value = settings.values.get("epochs", DEFAULT_EPOCHS)
    if "epochs" in settings.of_ini_file and str(value).strip().isdecimal():
        value = int(str(value))
    return _unless_refused(
        settings, lambda: check_integer("epochs", value, least=FEWEST_EPOCHS)
    )


def _read_settings(item: pytest.Item) -> _Settings:
    """Join the marker's arguments with the ini file's; wrong ones fail the test."""
    config = item.config
    ini_values = {name: config.getini(f"leak_{name}") for name in _OPTIONS}
    values: dict[str, object] = {
        name: text for name, text in ini_values.items() if text
    }
    of_ini_file = frozenset(values)
    ini_file = "the ini file" if config.inipath is None else config.inipath.name
    _check_names_of_settings(config.stash[_UNKNOWN_SETTINGS], ini_file)
    # A test may have several markers, and its class another.  The closest one is last
    # here, and wins.
    for mark in reversed(list(item.iter_markers(MARK))):
        _check_arguments(mark)
        values |= mark.kwargs
        of_ini_file -= set(mark.kwargs)
    return _Settings(values, of_ini_file, ini_file)


def _check_names_of_settings(unknown: set[str], ini_file: str) -> None:
    """Fail a test where the ini file has a setting of no such name."""
    from loaderkit.nearest_names import nearest_name

    if not unknown:
        return
    name = min(unknown).removeprefix("leak_")
    meant = nearest_name(name, _OPTIONS)
    if name in _HINTS:
        hinted = _HINTS[name].fix.partition("=")[0]
        meant = hinted if hinted in _OPTIONS else meant
    others = ", ".join(f"leak_{option}" for option in _OPTIONS)
    fix = f"it is one of {others}" if meant is None else f"leak_{meant} in {ini_file}"
    _fail(
        f"leak_{name} is no setting.",
        why=f"pytest passes over names that it does not know; there are {others}",
        fix=fix,
    )


_HINTS = {**KEYWORDS["LeakDetector"], **KEYWORDS["assert_no_leak"]}
"""What is said of keywords of other tools."""


def _check_arguments(mark: pytest.Mark) -> None:
    """Fail a test whose marker has arguments that it does not take."""
    unknown = set(mark.kwargs) - set(_OPTIONS)
    if not mark.args and not unknown:
        return
    unwanted = ", ".join(sorted(unknown)) or "a positional argument"
    why = f"it takes {', '.join(_OPTIONS)}, by name"
    fix = _write_mark(mark.args, mark.kwargs)
    _fail(f"{MARK} got {unwanted}.", why=why, fix=fix)


def _write_mark(args: tuple[object, ...], kwargs: Mapping[str, object]) -> str:
    """Write the marker as it was probably meant, with the values that were given.

    >>> _write_mark((8,), {})
    '@pytest.mark.leak_free(epochs=8)'
    >>> _write_mark((3,), {})  # fewer than six calls judge nothing
    '@pytest.mark.leak_free(epochs=6)'
    >>> _write_mark((), {"threshold": "1 MiB", "epoch": 9, "device": "cpu"})
    "@pytest.mark.leak_free(tolerance='1 MiB', epochs=9, device='cpu')"
    >>> _write_mark((), {"verbose": True})
    '@pytest.mark.leak_free'
    """
    from loaderkit.call_keywords import rename_in_hint
    from loaderkit.nearest_names import nearest_name

    settings: dict[str, str] = {}
    if len(args) == 1:
        # A number is one of calls, and a text an amount.
        name = "tolerance" if isinstance(args[0], str) else "epochs"
        settings[name] = _value_that_can_be(name, args[0])
    for given, value in kwargs.items():
        option = nearest_name(given, _OPTIONS) if given not in _OPTIONS else given
        text = _value_that_can_be(option, value)
        if given in _HINTS and given not in _OPTIONS:
            hint = rename_in_hint(_HINTS[given].fix, value).partition(", or ")[0]
            option, _, text = hint.partition("=")
        if option in _OPTIONS:
            settings.setdefault(option, text)
    arguments = ", ".join(f"{name}={text}" for name, text in settings.items())
    return f"@pytest.mark.{MARK}({arguments})" if settings else f"@pytest.mark.{MARK}"


def _value_that_can_be(option: str | None, value: object) -> str:
    """Write a value that was given, or what is nearest to it and judges anything."""
    from loaderkit.leaks.trend import FEWEST_EPOCHS
    from loaderkit.value_words import show_value

    if option == "epochs" and type(value) is int:
        value = max(value, FEWEST_EPOCHS)
    return show_value(value)


def _fail(what: str, *, why: str, fix: str) -> NoReturn:
    """Fail a test for how it is marked; no line of its code is at fault."""
    pytest.fail(f"{what}\n  why: {why}\n  fix: {fix}", pytrace=False)


def _unless_refused(settings: _Settings, call: Callable[[], T]) -> T:
    """Call what a wrong setting fails: no line of the test's code is at fault."""
    from loaderkit.errors import OptionError

    try:
        return call()
    except OptionError as error:
        problem = error
    # Outside of the handler: its traceback would be in the report.
    fix = problem.fix
    # "tolerance='1 GB', or '1 B'": the first of what it names.
    name, equals, value = fix.partition(", or ")[0].partition("=")
    if equals and name in settings.of_ini_file:
        text = value.strip("'")
        fix = f"leak_{name} = {text} in {settings.ini_file}"
    message = f"{MARK} has a setting that cannot be. {problem.what}"
    _fail(message, why=problem.why, fix=fix)


def _make_detector(settings: _Settings, on_leak: Any) -> LeakDetector:
    from loaderkit.leaks.detector import DetectorOfTest

    options: dict[str, Any] = {
        name: value for name, value in settings.values.items() if name != "epochs"
    }
    return _unless_refused(settings, lambda: DetectorOfTest(on_leak=on_leak, **options))


class _Row(NamedTuple):
    """What the summary, xdist and JUnit are told of a test."""

    verdict: str
    headline: str
    bytes_per_epoch: int = 0
    page: str = ""
    """Path of the report that was asked for."""
    note: str = ""
    """What of a leak is pytest's own."""


def _keep_verdict(item: pytest.Item, report: LeakReport, of_pytest: str) -> None:
    """Keep the verdict for the summary and JUnit, and write the page asked for.

    Args:
        item: The test.
        report: Of it.
        of_pytest: What of a leak is pytest's own.
    """
    page = _write_report(item, report)
    note = of_pytest if report.leaking else ""
    row = _Row(report.verdict, report.headline, report.bytes_per_epoch, page, note)
    _keep_row(item, row)


def _keep_row(item: pytest.Item, row: _Row) -> None:
    item.user_properties.append((PROPERTY, json.dumps(row._asdict())))


def _write_report(item: pytest.Item, report: LeakReport) -> str:
    form = item.config.getoption("--leak-report")
    if form is None:
        return ""
    folder = item.config.rootpath / "leak-reports"
    chosen_folder = item.config.getoption("--leak-report-dir")
    if chosen_folder:
        # As pytest does for --junitxml: shells leave a ~ behind a = as it is.
        folder = Path(chosen_folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", item.nodeid).strip("_")
    file = folder / f"{name}.{form}"
    if form == "html":
        report.to_html(file)
    else:
        report.save_json(file)
    return str(file)
