"""Watches a process from outside: ``loaderkit watch`` and ``loaderkit watch --pid``."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderkit.errors import LoaderkitError
from loaderkit.leaks.report import LeakReport
from loaderkit.leaks.verdict import TOLERANCE, judge, overall
from loaderkit.memory import process
from loaderkit.memory.host import read_host, signal_name
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loaderkit.leaks.verdict import Series

_WINDOW_S = 1.0


@dataclass(frozen=True)
class WatchResult:
    """How a watched process went."""

    returncode: int | None
    """Of the script; None of a process that was only looked at."""
    report: dict[str, Any]
    """A :class:`loaderkit.LeakReport` as plain values."""
    page: str
    """Path of the page with plots; empty when there is none."""
    note: str
    """Why it ended, where that is known."""

    @property
    def ok(self) -> bool:
        """Whether it ended well and nothing leaks."""
        return not self.returncode and self.report["verdict"] != "leaking"

    def to_json(self) -> dict[str, Any]:
        """Give it as plain values.

        Returns:
            Ready for :func:`json.dumps`.
        """
        return dict(vars(self))

    def __str__(self) -> str:
        lines = [self.note, self.report["text"], self.page and f"plots: {self.page}"]
        return "\n".join(filter(None, lines))


class ProcessMonitor:
    """The readings of another process, once a second."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.begun = time.monotonic()
        self.windows = 0
        self._epochs: dict[str, array[float]] = {}
        self._values: dict[str, array[float]] = {}

    def read(self) -> dict[str, int]:
        """Take a reading; empty when the process is gone."""
        found = process.outside_counters(self.pid)
        for name, value in found.items():
            times = self._epochs.setdefault(name, array("d"))
            times.append(self.windows)
            self._values.setdefault(name, array("d")).append(value)
        self.windows += 1
        return found

    def report(self) -> LeakReport:
        """Judge what was read: from outside nobody can tell who holds it."""
        series: dict[str, Series] = {
            name: (times, self._values[name]) for name, times in self._epochs.items()
        }
        counters = judge(series, tolerance=TOLERANCE)
        verdict, more = overall(counters)
        seconds = time.monotonic() - self.begun
        return LeakReport(
            verdict, self.windows, seconds, f"process {self.pid}", counters,
            more_epochs=more, each="second",
        )  # fmt: skip


def watch_script(
    script: str, arguments: Sequence[str], *, page: str, live: Callable[[str], object]
) -> WatchResult:
    """Run a script and watch it, from inside and outside.

    Args:
        script: Path of a Python file; it runs unchanged, as ``__main__``.
        arguments: Its own.
        page: Where to write the HTML report.
        live: Called once a second with a line to show.

    Returns:
        Its exit status and the report.

    Raises:
        LoaderkitError: There is no such file.
    """
    if not Path(script).is_file():
        what = f"There is no script {script!r}."
        raise LoaderkitError(what, fix="loaderkit watch train.py --epochs 10")
    kills = read_host().oom_kills
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "loaderkit.leaks.watch_child", folder, script]
        child = subprocess.Popen([*command, *arguments])
        outside = ProcessMonitor(child.pid)
        with contextlib.suppress(KeyboardInterrupt):
            _follow(outside, live, child)
        try:
            code = child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        note = _why_ended(code, kills)
        return _result(code, Path(folder), outside, (page, note))


def watch_process(
    pid: int, *, seconds: float | None, live: Callable[[str], object]
) -> WatchResult:
    """Look at a running process until it ends, or for some time, or until Ctrl-C.

    Args:
        pid: Its number.
        seconds: How long; until it ends if None.
        live: Called once a second with a line to show.

    Returns:
        The report, without holders: those are seen only from inside.

    Raises:
        LoaderkitError: There is no such process.
    """
    outside = ProcessMonitor(pid)
    if not outside.read():
        what = f"Process {pid} is not there, or is somebody else's."
        raise LoaderkitError(what, fix="pgrep -f train.py")
    with contextlib.suppress(KeyboardInterrupt):
        _follow(outside, live, None, seconds)
    report = outside.report()
    return WatchResult(None, report.to_json(), "", "")


def _follow(
    outside: ProcessMonitor,
    live: Callable[[str], object],
    child: subprocess.Popen[bytes] | None,
    seconds: float | None = None,
) -> None:
    while True:
        if child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=_WINDOW_S)
                return
        else:
            time.sleep(_WINDOW_S)
        found = outside.read()
        if not found:
            return
        live(_line(outside, found))
        if seconds is not None and time.monotonic() - outside.begun >= seconds:
            return


def _line(outside: ProcessMonitor, found: dict[str, int]) -> str:
    """Say what a process holds now."""
    host = found.get("anonymous", found.get("resident", 0)) + found.get("shared", 0)
    workers = format_bytes(found.get("tree_anonymous", 0))
    return (
        f"{time.monotonic() - outside.begun:.0f} s  {format_bytes(host)} private and "
        f"shared, {found.get('children', 0)} children {workers}, "
        f"{found.get('files', 0)} files, {found.get('threads', 0)} threads"
    )


def _result(
    code: int, folder: Path, outside: ProcessMonitor, ending: tuple[str, str]
) -> WatchResult:
    page, note = ending
    file = folder / "report.json"
    if file.exists():
        found = json.loads(file.read_text(encoding="utf-8"))
        shutil.copyfile(folder / "report.html", page)
        return WatchResult(code, found, str(Path(page).resolve()), note)
    report = outside.report()
    report.to_html(page)
    return WatchResult(code, report.to_json(), str(Path(page).resolve()), note)


def _why_ended(code: int, kills: int | None) -> str:
    """Say why a script ended badly."""
    if code >= 0:
        return f"the script ended with status {code}" if code else ""
    name = signal_name(-code)
    if name == "SIGKILL":
        now = read_host().oom_kills
        if now is not None and kills is not None and now > kills:
            return f"the kernel killed the script for want of memory ({name})"
        return f"somebody killed the script ({name}); probably not for want of memory"
    return f"the script was ended by {name}"
