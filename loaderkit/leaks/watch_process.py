"""Watches a process from outside: ``loaderkit watch`` and ``loaderkit watch --pid``."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderkit.errors import LoaderkitError
from loaderkit.leaks.counter_trend import TOLERANCE
from loaderkit.leaks.recorded_series import RecordedSeries
from loaderkit.leaks.report import LeakReport
from loaderkit.leaks.trend import LEAKING, NEEDS_MORE
from loaderkit.leaks.verdict import judge_counters, overall
from loaderkit.memory import process
from loaderkit.memory.host import read_host, signal_name
from loaderkit.units import count_of, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loaderkit.memory.counters import Readings

_WINDOW_S = 1.0
"""Between two readings, and two lines that are shown."""
_MOST_ENDING_S = 30.0
"""A script may save its state when Ctrl-C stops it."""
_SEEN_FROM_OUTSIDE = (
    "read from outside, once a second: the script imported torch late or never; "
    "who holds memory is seen from inside alone"
)


@dataclass(frozen=True)
class WatchResult:
    """How a watched process went."""

    returncode: int | None
    """Of the script; None of a process that was only looked at."""
    report: dict[str, Any]
    """A :class:`loaderkit.leaks.report.LeakReport` as plain values."""
    page: str
    """Path of the page with plots; empty when there is none."""
    note: str
    """Why it ended, where that is known, and who looked at it, if only from outside."""

    @property
    def ok(self) -> bool:
        """Whether it ended well and nothing leaks."""
        return not self.returncode and self.report["verdict"] != LEAKING

    def to_json(self) -> dict[str, Any]:
        """Give it as plain values.

        Returns:
            Ready for :func:`json.dumps`.
        """
        return dict(vars(self))

    def __str__(self) -> str:
        lines = [self.note, self.report["text"]]
        if self.page:
            lines.append(f"plots: {self.page}")
        return "\n".join(filter(None, lines))


class ProcessMonitor:
    """The readings of another process, once a second.

    Args:
        pid: Its number.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.begun = time.monotonic()
        self.windows = 0
        self._recorded = RecordedSeries()

    def read(self) -> Readings:
        """Take a reading; empty when the process is gone."""
        readings = process.counters_of(self.pid)
        for name, value in readings.items():
            self._recorded.record(name, epoch=self.windows, value=value)
        self.windows += 1
        return readings

    def report(self) -> LeakReport:
        """Judge what was read: from outside nobody can tell who holds it."""
        counters = judge_counters(self._recorded.by_name(), tolerance=TOLERANCE)
        verdict, more_epochs = overall(counters)
        return LeakReport(
            verdict=verdict,
            epochs=self.windows,
            seconds=time.monotonic() - self.begun,
            device=f"process {self.pid}",
            counters=counters,
            more_epochs=more_epochs,
            period="second",
        )


class _Ending(NamedTuple):
    """How a script ended, and where its report goes."""

    returncode: int
    note: str
    """Why it ended, where that is known."""
    page: str | None
    """Path of the HTML report; None for none."""


def watch_script(
    script: str,
    arguments: Sequence[str],
    *,
    page: str | None = None,
    live: Callable[[str], object],
) -> WatchResult:
    """Run a script and watch it, from inside and outside.

    Args:
        script: Path of a Python file; it runs unchanged, as ``__main__``.
        arguments: Its own.
        page: Where to write the HTML report; None for none.
        live: Called once a second with a line to show.

    Returns:
        Its exit status and the report.

    Raises:
        LoaderkitError: There is no such file.
    """
    if not Path(script).is_file():
        message = f"There is no script {script!r}."
        why = f"it is no file below {Path.cwd()}"
        fix = "loaderkit watch train.py --epochs 10"
        raise LoaderkitError(message, why=why, fix=fix)
    kills_before = read_host().oom_kills
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "loaderkit.leaks.watch_child", folder, script]
        child = subprocess.Popen([*command, *arguments])
        monitor = ProcessMonitor(child.pid)
        # Ctrl-C reaches the child too, which then ends by itself and writes its report.
        with contextlib.suppress(KeyboardInterrupt):
            _follow_child(monitor, live, child)
        try:
            returncode = child.wait(timeout=_MOST_ENDING_S)
        except subprocess.TimeoutExpired:
            child.kill()
            returncode = child.wait()
        note = _why_ended(returncode, kills_before)
        return _result_of(Path(folder), monitor, _Ending(returncode, note, page))


def watch_process(
    pid: int,
    *,
    seconds: float | None,
    page: str | None = None,
    live: Callable[[str], object],
) -> WatchResult:
    """Look at a running process until it ends, or for some time, or until Ctrl-C.

    Args:
        pid: Its number.
        seconds: How long; until it ends if None.
        page: Where to write the HTML report; None for none.
        live: Called once a second with a line to show.

    Returns:
        The report, without holders: those are seen only from inside.

    Raises:
        LoaderkitError: There is no such process.
    """
    monitor = ProcessMonitor(pid)
    if not monitor.read():
        message = f"Process {pid} cannot be watched."
        why = "it is not there, or is somebody else's"
        raise LoaderkitError(message, why=why, fix="pgrep -f train.py")
    with contextlib.suppress(KeyboardInterrupt):
        _follow_process(monitor, live, seconds)
    report = monitor.report()
    written = "" if page is None else str(report.to_html(page).resolve())
    return WatchResult(None, report.to_json(), written, "")


def _follow_child(
    monitor: ProcessMonitor,
    live: Callable[[str], object],
    child: subprocess.Popen[bytes],
) -> None:
    """Read a child's counters once a second until it ends."""
    while True:
        # To wait for the child is to sleep until it ends: it ends no zombie, whose
        # counters would be read as zeros.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_WINDOW_S)
            return
        readings = monitor.read()
        if not readings:
            return
        live(_live_line(monitor, readings))


def _follow_process(
    monitor: ProcessMonitor,
    live: Callable[[str], object],
    seconds: float | None,
) -> None:
    """Read a process's counters once a second until it ends, or for some time."""
    while seconds is None or time.monotonic() - monitor.begun < seconds:
        time.sleep(_WINDOW_S)
        readings = monitor.read()
        if not readings:
            return
        live(_live_line(monitor, readings))


def _live_line(monitor: ProcessMonitor, readings: Readings) -> str:
    """Say what a process holds now."""
    seconds = time.monotonic() - monitor.begun
    private_bytes = readings.get("anonymous", readings.get("resident", 0))
    own = format_bytes(private_bytes + readings.get("shared", 0))
    workers = format_bytes(readings.get("tree_anonymous", 0))
    return (
        f"{seconds:.0f} s  {own} private and shared, "
        f"{readings.get('children', 0)} children {workers}, "
        f"{count_of(readings.get('files', 0), 'files')}, "
        f"{count_of(readings.get('threads', 0), 'threads')}"
    )


def _result_of(
    folder: Path,
    monitor: ProcessMonitor,
    ending: _Ending,
) -> WatchResult:
    """Take the report that was written inside the script, else the one from outside."""
    page = "" if ending.page is None else str(Path(ending.page).resolve())
    file = folder / "report.json"
    outside_report = monitor.report()
    if file.exists():
        report = json.loads(file.read_text(encoding="utf-8"))
        # Inside, nothing is read before the script imports torch: where it does so
        # late, most of the run was seen from outside alone.
        is_most_of_run = 2 * report["seconds"] >= outside_report.seconds
        is_decided = report["verdict"] != NEEDS_MORE
        if is_decided or is_most_of_run or outside_report.verdict == NEEDS_MORE:
            if page:
                shutil.copyfile(folder / "report.html", page)
            return WatchResult(ending.returncode, report, page, ending.note)
    # It was killed before its first verdict, or imported torch late or never.
    note = ending.note
    if ending.returncode >= 0:
        note = "\n".join(filter(None, [note, _SEEN_FROM_OUTSIDE]))
    if page:
        outside_report.to_html(page)
    return WatchResult(ending.returncode, outside_report.to_json(), page, note)


def _why_ended(returncode: int, kills_before: int | None) -> str:
    """Say why a script ended badly."""
    if returncode == 0:
        return ""
    if returncode > 0:
        return f"the script ended with status {returncode}"
    name = signal_name(-returncode)
    if name != "SIGKILL":
        return f"the script was ended by {name}"
    kills_after = read_host().oom_kills
    # Either is None where the cgroup does not count what was killed.
    if (kills_after or 0) > (kills_before or 0):
        return f"the kernel killed the script for want of memory ({name})"
    return f"somebody killed the script ({name}); probably not for want of memory"
