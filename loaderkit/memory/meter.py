"""``MemoryMeter``: memory over time, by named stage, by thread, or when asked."""

from __future__ import annotations

import contextlib
import csv
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderkit.memory.counters import COUNTERS
from loaderkit.memory.reading import MemorySample, device_of, quick_sample
from loaderkit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    import torch
    from typing_extensions import Self

_LINE = ("allocated", "reserved", "driver", "anonymous", "shared", "resident")
_MOST = 100_000
"""Samples kept; then every second one is dropped, and half as many are taken."""


@dataclass(frozen=True)
class Mark:
    """One sample and why it was taken."""

    label: str
    """Name of the stage; empty for a sample of the thread."""
    since_s: float
    """Since the meter was made."""
    sample: MemorySample
    """What was read."""

    def __str__(self) -> str:
        values = self.sample.values
        parts = [
            f"{name} {format_bytes(values[name])}" for name in _LINE if name in values
        ]
        label = self.label or "sample"
        return f"{label}: {', '.join(parts)} ({format_seconds(self.since_s)})"


@dataclass(frozen=True)
class Timeline:
    """Samples in the order in which they were taken."""

    marks: tuple[Mark, ...]
    """All of them."""

    def __str__(self) -> str:
        return "\n".join(str(mark) for mark in self.marks if mark.label)

    def peak(self, name: str) -> int | None:
        """Give a counter's highest reading.

        Args:
            name: One of :data:`loaderkit.memory.counters.COUNTERS`.

        Returns:
            The value; None if it was never read.
        """
        found = [m.sample.values[name] for m in self.marks if name in m.sample.values]
        return max(found, default=None)

    def rows(self) -> list[dict[str, Any]]:
        """Give a row a sample: label, seconds and every counter.

        Returns:
            Plain values; a counter that was not read is missing.
        """
        return [
            {"label": mark.label, "seconds": mark.since_s, **mark.sample.values}
            for mark in self.marks
        ]

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Write it as JSON.

        Args:
            path: Of a file to write too.

        Returns:
            The text.
        """
        text = json.dumps(self.rows())
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write a table with a column a counter.

        Args:
            path: Of the file; replaced if it is there.

        Returns:
            The path.
        """
        rows = self.rows()
        used = [name for name in COUNTERS if any(name in row for row in rows)]
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, ["label", "seconds", *used], restval="")
            table.writeheader()
            table.writerows(rows)
        return Path(path)

    def to_pandas(self) -> Any:
        """Make a ``DataFrame``, a row a sample.

        Returns:
            The frame.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas as pd

        return pd.DataFrame(self.rows())


class MemoryMeter:
    """Reads memory at marks, around stages, and from a thread.

    >>> meter = MemoryMeter("cpu", log=None)
    >>> with meter.stage("model A"):
    ...     weights = [0.0] * 1000
    >>> [mark.label for mark in meter.timeline.marks]
    ['before model A', 'after model A']

    Args:
        device: Read beside the host; the first that is here if None.
        every_s: Seconds between samples of a thread, inside ``with meter:``.
        log: Called with each mark, such as ``print`` or a logger's method; None for
            silence.  Samples of the thread are not logged.
        on_sample: Called with every mark, the thread's too: for TensorBoard or any
            other logger.

    Raises:
        ValueError: ``every_s`` is not above 0.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        every_s: float | None = None,
        log: Callable[[Mark], object] | None = print,
        on_sample: Callable[[Mark], object] | None = None,
    ) -> None:
        if every_s is not None and not every_s > 0:
            msg = f"every_s must be seconds above 0, got {every_s!r}"
            raise ValueError(msg)
        self.device = device_of(device)
        self.every_s, self.log, self.on_sample = every_s, log, on_sample
        self._begun = time.monotonic()
        self._marks: list[Mark] = []
        self._lock = threading.Lock()
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    @property
    def timeline(self) -> Timeline:
        """All marks so far."""
        with self._lock:
            return Timeline(tuple(self._marks))

    def mark(self, label: str = "") -> Mark:
        """Read now.

        Args:
            label: Such as "after model A"; one without a label is not logged.

        Returns:
            The mark.
        """
        sample = quick_sample(self.device)
        mark = Mark(label, sample.seconds - self._begun, sample)
        with self._lock:
            self._marks.append(mark)
            if len(self._marks) > _MOST:
                self._thin()
        if label and self.log is not None:
            self.log(mark)
        if self.on_sample is not None:
            self.on_sample(mark)
        return mark

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Read before and after a block.

        Args:
            name: Of the stage.
        """
        self.mark(f"before {name}")
        try:
            yield
        finally:
            self.mark(f"after {name}")

    def postfix(self) -> dict[str, str]:
        """Read for a progress bar: ``bar.set_postfix(meter.postfix())``.

        Returns:
            Memory of host and device, as texts.
        """
        values = quick_sample(self.device).values
        host = values.get("anonymous", values.get("resident", 0))
        found = {"host": format_bytes(host)}
        if "allocated" in values:
            found[self.device.type] = format_bytes(values["allocated"])
        return found

    def __enter__(self) -> Self:
        if self.every_s is not None and self._thread is None:
            self._stop = threading.Event()
            self._thread = threading.Thread(
                target=self._sample, args=(self._stop,), name="loaderkit meter",
                daemon=True,
            )  # fmt: skip
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None and self._stop is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _sample(self, stop: threading.Event) -> None:
        while not stop.wait(self.every_s):
            self.mark()

    def _thin(self) -> None:
        """Drop every second sample of the thread, and take half as many from now on."""
        kept = [m for i, m in enumerate(self._marks) if m.label or i % 2]
        self._marks = kept
        if self.every_s is not None:
            self.every_s *= 2
