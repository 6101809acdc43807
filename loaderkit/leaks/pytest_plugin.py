"""The pytest plugin: ``@pytest.mark.leak_free`` repeats a test and watches memory.

Importing it imports neither torch nor h5py: what judges is loaded by the first test
that asks for it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import re
import unittest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from loaderkit.units import count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from loaderkit.leaks.detector import LeakDetector
    from loaderkit.leaks.report import LeakReport

MARK = "leak_free"
PROPERTY = "loaderkit_leak"
"""Under this name a test's verdict travels to the summary, xdist and JUnit."""
_OPTIONS = {"epochs", "device", "limit", "tolerance"}
_DEFAULT_EPOCHS = 8
_FEWEST_EPOCHS = 6
"""As for ``assert_no_leak``, which this file must not import: it would load torch."""


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
        "again and again, and fail if memory grows with each call (loaderkit)",
    )


@pytest.fixture
def leak_epoch() -> int:
    """The number of the call of a leak_free test, from 0."""
    return 0


@pytest.fixture
def leak_detector(request: pytest.FixtureRequest) -> Iterator[LeakDetector]:
    """A detector for a test that loops over epochs by itself; it raises at the end.

    A test that takes it and counts no epoch has looked at nothing: that is an error.
    """
    _, settings = _read_settings(request.node)
    detector = _make_detector(settings, on_leak="raise")
    failed_before = request.session.testsfailed
    yield detector
    if not detector.has_started and request.session.testsfailed == failed_before:
        _fail(
            "leak_detector has counted no epoch, so nothing was looked at.",
            why="it takes its readings where epochs begin and end",
            fix="for epoch in leak_detector.epochs(range(12)): ...",
        )


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
        _read_settings(pyfuncitem)  # wrong ones fail here too
        function(**arguments)
        _keep_verdict(pyfuncitem, arguments["leak_detector"].report())
        return True

    def call(epoch: int) -> None:
        if "leak_epoch" in arguments:
            arguments["leak_epoch"] = epoch
        function(**arguments)

    _judge_calls_of(pyfuncitem, call)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Have a marked method of a ``unittest.TestCase`` repeat itself.

    Such a method is called by unittest and not through ``pytest_pyfunc_call``.  What is
    repeated is the method alone: setUp and tearDown run once around all its calls, as
    fixtures do around those of a function.
    """
    if not isinstance(item, pytest.Function) or not item.get_closest_marker(MARK):
        return
    if item.cls is None or not issubclass(item.cls, unittest.TestCase):
        return
    method = item.obj
    _refuse_async(method)

    @functools.wraps(method)
    def repeated() -> None:
        _judge_calls_of(item, lambda _: method())

    item.obj = repeated


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


def _judge_calls_of(item: pytest.Function, call: Callable[[int], object]) -> None:
    """Call a test once an epoch; fail it if memory grows."""
    epochs, settings = _read_settings(item)
    detector = _make_detector(settings, on_leak=lambda _: None)
    detector.start()
    failed_before = item.session.testsfailed
    for epoch in range(epochs):
        try:
            call(epoch)
        except Exception:
            if epoch:
                text = (
                    f"{MARK} calls a test {epochs} times with the same fixtures: "
                    f"{epoch} passed before this one.  What a call leaves behind, such "
                    "as files in tmp_path, is there in the next.\n"
                )
                item.add_report_section("call", MARK, text)
            raise
        if item.session.testsfailed > failed_before:
            # Of a subtest, which is reported at once and lets the test go on: there is
            # no use in failing it again in each epoch.
            return
        detector.end_epoch()
    report = detector.report()
    _keep_verdict(item, report)
    if report.leaking:
        pytest.fail(str(report), pytrace=False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a line for each leak_free test, wherever it ran."""
    rows = []
    for results in terminalreporter.stats.values():
        for result in results:
            # Setup and teardown are reported with the same properties.
            if getattr(result, "when", "") != "call":
                continue
            for name, value in result.user_properties:
                if name == PROPERTY:
                    rows.append((result.nodeid, json.loads(value)))
    if not rows:
        return
    terminalreporter.section("memory leaks (loaderkit)")
    for nodeid, row in sorted(rows):
        page = f"  [{row['page']}]" if row["page"] else ""
        terminalreporter.line(f"{nodeid}: {row['headline']}{page}")


def _read_settings(item: pytest.Item) -> tuple[int, dict[str, Any]]:
    """Join the marker's arguments with the ini file's; wrong ones fail the test."""
    config = item.config
    settings: dict[str, Any] = {}
    for name in _OPTIONS:
        value = config.getini(f"leak_{name}")
        if value:
            settings[name] = value
    # The marker that is closest to the test comes first: its class may have one, too.
    mark = next(item.iter_markers(MARK), None)
    if mark is not None:
        _check_arguments(mark)
        settings |= mark.kwargs
    epochs = _read_epochs(settings.pop("epochs", _DEFAULT_EPOCHS), mark)
    if epochs < _FEWEST_EPOCHS:
        least = count_of(_FEWEST_EPOCHS, "epochs")
        _fail(
            f"{MARK} needs at least {least}, got {epochs}.",
            why="the first are warm-up, and growth must go on behind them",
            fix=f"{_where_set(mark, 'epochs')}={_DEFAULT_EPOCHS}",
        )
    return epochs, settings


def _check_arguments(mark: pytest.Mark) -> None:
    """Fail a test whose marker has arguments that it does not take."""
    unknown = set(mark.kwargs) - _OPTIONS
    if not mark.args and not unknown:
        return
    unwanted = ", ".join(sorted(unknown)) or "a positional argument"
    near = [difflib.get_close_matches(name, _OPTIONS, 1) for name in unknown]
    meant = sorted(name for matches in near for name in matches)
    fix = f"@pytest.mark.{MARK}(epochs=12), or without brackets"
    if meant:
        fix = f"did you mean {', '.join(meant)}?"
    elif mark.args:
        fix = f"@pytest.mark.{MARK}(epochs={mark.args[0]!r})"
    why = f"it takes {', '.join(sorted(_OPTIONS))}, by name"
    _fail(f"{MARK} got {unwanted}.", why=why, fix=fix)


def _where_set(mark: pytest.Mark | None, name: str) -> str:
    """Name a setting as it was given: in the marker, or in the ini file."""
    return name if mark is not None and name in mark.kwargs else f"leak_{name}"


def _fail(what: str, *, why: str, fix: str) -> NoReturn:
    """Fail a test for how it is marked; no line of its code is at fault."""
    pytest.fail(f"{what}\n  why: {why}\n  fix: {fix}", pytrace=False)


def _read_epochs(value: Any, mark: pytest.Mark | None) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        pass
    # Outside of the handler: its traceback would be in the report.
    _fail(
        f"{MARK} needs a whole number of epochs, got {value!r}.",
        why="the test is called so many times",
        fix=f"{_where_set(mark, 'epochs')}={_DEFAULT_EPOCHS}",
    )


def _make_detector(settings: dict[str, Any], on_leak: Any) -> LeakDetector:
    from loaderkit.leaks.detector import LeakDetector

    device = settings.get("device")
    sizes = {key: settings[key] for key in ("limit", "tolerance") if key in settings}
    try:
        return LeakDetector(device, on_leak=on_leak, **sizes)
    except (TypeError, ValueError) as error:
        problem = str(error)
    # The test is not at fault: what is wrong is a setting, not a line of code.  Failing
    # outside of the handler keeps the error's own traceback out of the report.
    # What was given wrong is in the message, which has its why and its fix.
    pytest.fail(f"{MARK} has a setting that cannot be. {problem}", pytrace=False)


def _keep_verdict(item: pytest.Item, report: LeakReport) -> None:
    """Keep the verdict for the summary and JUnit, and write the page asked for."""
    row = {
        "verdict": report.verdict,
        "headline": report.headline,
        "bytes_per_epoch": report.bytes_per_epoch,
        "page": _write_report(item, report),
    }
    item.user_properties.append((PROPERTY, json.dumps(row)))


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
