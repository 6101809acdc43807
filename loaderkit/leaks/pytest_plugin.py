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
from typing import TYPE_CHECKING, Any

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
        pytest.fail(
            "leak_detector has counted no epoch, so nothing was looked at.\n"
            "  why: it takes its readings where epochs begin and end\n"
            "  fix: for epoch in leak_detector.epochs(range(12)): ...",
            pytrace=False,
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


def _refuse_async(function: Any) -> None:
    if inspect.iscoroutinefunction(function):
        pytest.fail(
            f"{MARK} cannot repeat an async test; call asyncio.run() in a plain one",
            pytrace=False,
        )


def _judge_calls_of(item: pytest.Function, call: Callable[[int], object]) -> None:
    """Call a test once an epoch; fail it if memory grows."""
    epochs, settings = _read_settings(item)
    detector = _make_detector(settings, on_leak=lambda _: None)
    detector.start()
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
        unknown = set(mark.kwargs) - _OPTIONS
        if mark.args or unknown:
            wrong = ", ".join(sorted(unknown)) or "a positional argument"
            names = ", ".join(sorted(_OPTIONS))
            message = f"{MARK} got {wrong}; it takes {names}, by name"
            near = [difflib.get_close_matches(name, _OPTIONS, 1) for name in unknown]
            meant = sorted(name for matches in near for name in matches)
            if meant:
                message += f"; did you mean {', '.join(meant)}?"
            pytest.fail(message, pytrace=False)
        settings |= mark.kwargs
    epochs = _read_epochs(settings.pop("epochs", _DEFAULT_EPOCHS))
    if epochs < _FEWEST_EPOCHS:
        pytest.fail(
            f"{MARK} needs at least {count_of(_FEWEST_EPOCHS, 'epochs')}, got "
            f"{epochs}: the first "
            "are warm-up, and growth must go on",
            pytrace=False,
        )
    return epochs, settings


def _read_epochs(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        message = f"{MARK} needs a whole number of epochs, got {value!r}"
        pytest.fail(f"{message}, in the marker or as leak_epochs", pytrace=False)


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
    arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    pytest.fail(f"{MARK} was given {arguments}: {problem}", pytrace=False)


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
        folder = Path(chosen_folder)
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", item.nodeid).strip("_")
    file = folder / f"{name}.{form}"
    if form == "html":
        report.to_html(file)
    else:
        report.save_json(file)
    return str(file)
