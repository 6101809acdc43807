"""Runs a script unchanged, with a thread beside it that watches its memory.

``loaderkit watch`` starts this as ``python -m loaderkit.leaks.watch_child``.  Nothing
of ours imports torch before the script does.
"""

from __future__ import annotations

import json
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderkit.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loaderkit.leaks.report import LeakReport
    from loaderkit.leaks.watch import EpochRecorder

WINDOW_S = 0.5
"""A window of time stands for an epoch, which cannot be seen from beside."""
_JUDGED_AFTER = 30
_JUDGED_EVERY = 10
"""Windows: 15 s after torch was imported, and then every 5 s."""
_DOUBLED_EVERY = 600
"""Windows after which they become twice as long: what grows in hours is seen as well,
and the page has no more points than a screen."""


def main(arguments: Sequence[str]) -> None:
    """Run a script.

    Args:
        arguments: The folder for the report, the script, and its own arguments.
    """
    folder, script, *script_arguments = arguments
    sampler = Sampler(Path(folder))
    sampler.start()
    # A __main__ of its own, so that what the script pickles is found again there.
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    sys.argv = [script, *script_arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        code = compile(Path(script).read_bytes(), script, "exec")
        exec(code, vars(module))
    finally:
        sampler.stop()


class Sampler(threading.Thread):
    """Reads the counters of its own process window by window, and judges.

    Args:
        folder: For the report, which is written again with each verdict: the script may
            be killed at any moment.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(name="loaderkit watch", daemon=True)
        self.folder = folder
        self.window_s = WINDOW_S
        self._ended = threading.Event()
        self._leak_report: LeakReport | None = None
        """The last one of a leak, with holders."""

    def run(self) -> None:
        """Wait for torch, then take a reading each window."""
        # Imports take memory that is no leak; and nothing of ours may be what first
        # imports torch, since a script may set variables before it does.
        while "torch" not in sys.modules:
            if self._ended.wait(WINDOW_S / 5):
                # Nothing was read: the readings from outside are all there are.
                return
        from loaderkit.leaks.counter_trend import TOLERANCE
        from loaderkit.leaks.watch import EpochRecorder
        from loaderkit.memory.reading import device_of

        watch = EpochRecorder(device_of(None), TOLERANCE)
        watch.start()
        while not self._ended.wait(self.window_s):
            watch.end_epoch()
            if watch.epoch % _DOUBLED_EVERY == 0:
                self.window_s *= 2
            if watch.epoch >= _JUDGED_AFTER and watch.epoch % _JUDGED_EVERY == 0:
                self._judge_while_running(watch)
        self._write_report(self._build_report(watch))

    def stop(self) -> None:
        """End, with a last judgement while the script's variables are still there."""
        self._ended.set()
        self.join()

    def _judge_while_running(self, watch: EpochRecorder) -> None:
        """Look for holders while the script runs: afterwards its frames are gone."""
        last = self._leak_report
        if last is None or watch.epoch >= 2 * last.epochs:
            report = self._build_report(watch)
            if report.leaking:
                self._leak_report = report
                self._write_report(report)

    def _build_report(self, watch: EpochRecorder) -> LeakReport:
        from loaderkit.leaks.counter_trend import TOLERANCE
        from loaderkit.leaks.investigate import build_report

        report = build_report(watch, warmup=None, tolerance=TOLERANCE, limit=None)
        if report.leaking and not report.growths and self._leak_report is not None:
            report = replace(report, growths=self._leak_report.growths)
        return replace(report, period=f"window of {format_seconds(self.window_s)}")

    def _write_report(self, report: LeakReport) -> None:
        values: dict[str, Any] = report.to_json()
        report.to_html(self.folder / "report.html")
        # Who reads it meanwhile must not find half of it.
        file = self.folder / "report.json"
        file.with_suffix(".part").write_text(json.dumps(values), encoding="utf-8")
        file.with_suffix(".part").replace(file)


if __name__ == "__main__":
    main(sys.argv[1:])
