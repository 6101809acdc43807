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
    from loaderkit.leaks.watch import Watch

WINDOW_S = 0.5
"""A window of time stands for an epoch, which cannot be seen from beside."""
_JUDGED_AFTER, _EVERY = 30, 10
_SLOWER_AFTER = 600
"""Windows after which they become twice as long."""


def main(arguments: Sequence[str]) -> None:
    """Run a script.

    Args:
        arguments: The folder for the report, the script, and its own arguments.
    """
    folder, script, *rest = arguments
    sampler = Sampler(Path(folder))
    sampler.start()
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    sys.argv = [script, *rest]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        code = compile(Path(script).read_bytes(), script, "exec")
        exec(code, vars(module))
    finally:
        sampler.stop()


class Sampler(threading.Thread):
    """Reads the counters of its own process window by window, and judges."""

    def __init__(self, folder: Path) -> None:
        super().__init__(name="loaderkit watch", daemon=True)
        self.folder = folder
        self._ended = threading.Event()
        self._found: LeakReport | None = None
        self.window_s = WINDOW_S

    def run(self) -> None:
        """Wait for torch, then take a reading each window."""
        while "torch" not in sys.modules:
            if self._ended.wait(WINDOW_S / 5):
                break
        from loaderkit.leaks.verdict import TOLERANCE
        from loaderkit.leaks.watch import Watch
        from loaderkit.memory.reading import device_of

        watch = Watch(device_of(None), TOLERANCE)
        watch.start()
        while not self._ended.wait(self.window_s):
            watch.end_epoch()
            if watch.epoch % _SLOWER_AFTER == 0:
                self.window_s *= 2
            if watch.epoch >= _JUDGED_AFTER and watch.epoch % _EVERY == 0:
                self._judge(watch)
        self._write(self._judged(watch))

    def stop(self) -> None:
        """End, with a last judgement while the script's variables are still there."""
        self._ended.set()
        self.join()

    def _judge(self, watch: Watch) -> None:
        """Look for holders while the script runs: afterwards its frames are gone."""
        if self._found is None or watch.epoch >= 2 * self._found.epochs:
            report = self._judged(watch)
            if report.leaking:
                self._found = report
                self._write(report)

    def _judged(self, watch: Watch) -> LeakReport:
        from loaderkit.leaks.investigate import build_report
        from loaderkit.leaks.verdict import TOLERANCE

        report = build_report(watch, warmup=None, tolerance=TOLERANCE, limit=None)
        if report.leaking and self._found is not None and not report.growths:
            report = replace(report, growths=self._found.growths)
        return replace(report, each=f"window of {format_seconds(self.window_s)}")

    def _write(self, report: LeakReport) -> None:
        found: dict[str, Any] = report.to_json()
        report.to_html(self.folder / "report.html")
        file = self.folder / "report.json"
        file.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
        file.with_suffix(".part").replace(file)


if __name__ == "__main__":
    main(sys.argv[1:])
