"""``MemoryMeter``: memory over time, by named stage, by thread, or when asked."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from loaderkit.answers import answer_wrong_names
from loaderkit.arguments import check_positive
from loaderkit.errors import OptionError
from loaderkit.function_arguments import check_callable
from loaderkit.memory.reading import MemorySample, present_device_of, quick_sample
from loaderkit.memory.timeline_page import (
    few_readings_lead,
    named_marks_sections,
    single_reading_sections,
    timeline_sections,
)
from loaderkit.named_files import write_named_file
from loaderkit.notebook import HasCard, repr_in_a_line
from loaderkit.operations import refuse_new_attributes
from loaderkit.pages.document import HasPage, Page
from loaderkit.units import count_of, format_bytes, format_seconds

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    import torch
    from typing_extensions import Self

    from loaderkit.memory.counters import CounterName

_COUNTERS_SHOWN: tuple[CounterName, ...] = (
    "allocated",
    "reserved",
    "driver",
    "anonymous",
    "shared",
    "resident",
)
_MOST_MARKS = 100_000
"""Samples kept; then every second one is dropped, and half as many are taken.

A meter that runs for weeks beside a training must not look like its leak.  Chosen: at
ten samples a second the first thinning comes after three hours, and a sample takes
0.8 kB (measured with tracemalloc, no device)."""

_MOST_LINES = 40
"""Chosen: a screen.  A stage in every step of a training leaves thousands of marks."""


@answer_wrong_names()
@dataclass(frozen=True)
class Mark(HasCard):
    """One sample and why it was taken."""

    label: str
    """Name of the stage; empty for a sample of the thread."""
    since_s: float
    """Since the meter was made."""
    sample: MemorySample
    """What was read."""

    def __str__(self) -> str:
        values = self.sample.values
        amounts = [
            f"{name} {format_bytes(values[name])}"
            for name in _COUNTERS_SHOWN
            if name in values
        ]
        label = self.label or "sample"
        return f"{label}: {', '.join(amounts)} ({format_seconds(self.since_s)})"


@answer_wrong_names()
@dataclass(frozen=True)
class Timeline(HasPage):
    """Samples in the order in which they were taken."""

    marks: tuple[Mark, ...]
    """All of them."""

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        named = [str(mark) for mark in self.marks if mark.label]
        if len(named) > _MOST_LINES:
            half = _MOST_LINES // 2
            hidden = count_of(len(named) - 2 * half, "marks")
            named = [*named[:half], f"... {hidden}, see rows()", *named[-half:]]
        return "\n".join([self._headline(), *(f"  {line}" for line in named)])

    def _headline(self) -> str:
        """Say how long was read, how often, and the most that was taken."""
        if not self.marks:
            return "Memory was not read yet"
        duration_s = self.marks[-1].since_s - self.marks[0].since_s
        readings = count_of(len(self.marks), "readings")
        headline = f"Memory over {format_seconds(duration_s)}, {readings}"
        for name in _COUNTERS_SHOWN:
            highest = self.peak(name)
            if highest:
                headline += f", {name} at most {format_bytes(highest)}"
        return headline

    def peak(self, name: CounterName) -> int | None:
        """Give a counter's highest reading.

        Args:
            name: One of :data:`loaderkit.memory.counters.COUNTERS`.

        Returns:
            The value; None if it was never read.
        """
        readings = [mark.sample.get(name) for mark in self.marks]
        return max((value for value in readings if value is not None), default=None)

    def page(self) -> Page:
        """Show memory over time, with the stages named."""
        return Page(
            self._headline(),
            lead=few_readings_lead(self.marks),
            sections=(
                *timeline_sections(self.marks, _COUNTERS_SHOWN),
                *single_reading_sections(self.marks),
                *named_marks_sections(self.marks, _COUNTERS_SHOWN),
            ),
        )

    def rows(self) -> list[dict[str, Any]]:
        """Give a row a sample: label, seconds and every counter.

        Returns:
            Plain values, for ``pandas.DataFrame`` or ``csv.DictWriter``; a counter that
            was not read is missing.
        """
        rows: list[dict[str, Any]] = []
        for mark in self.marks:
            readings = {str(name): value for name, value in mark.sample.values.items()}
            rows.append({"label": mark.label, "seconds": mark.since_s} | readings)
        return rows

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Write it as JSON.

        Args:
            path: Of a file to write too.

        Returns:
            The text.

        Raises:
            NotWrittenError: The file cannot be written; also an ``OSError``.
        """
        text = json.dumps(self.rows())
        if path is not None:
            write_named_file(path, text + "\n")
        return text


@answer_wrong_names("timeline")
@refuse_new_attributes
class MemoryMeter:
    """Reads memory at marks, around stages, around a block, and from a thread.

    >>> meter = MemoryMeter("cpu", log=None)
    >>> with meter.stage("model A"):
    ...     weights = [0.0] * 1000
    >>> [mark.label for mark in meter.timeline.marks]
    ['before model A', 'after model A']

    ``with meter:`` reads when the block begins and when it ends, and in between from a
    thread if ``every_s`` says how often.

    Args:
        device: Read beside the host; the first that is here if None.
        every_s: Seconds between samples of a thread, inside ``with meter:``.
        log: Called with each mark, such as ``print`` or a logger's method; None for
            silence.  Samples of the thread are not logged.
        on_sample: Called with every mark, the thread's too: for TensorBoard, a
            progress bar (``lambda mark: bar.set_postfix_str(str(mark))``) or any other
            logger.

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
        if every_s is not None:
            check_positive("every_s", every_s)
        for name, function in (("log", log), ("on_sample", on_sample)):
            if function is not None:
                check_callable(name, function, "print", "mark")
        self.device = present_device_of(device)
        self.every_s, self.log, self.on_sample = every_s, log, on_sample
        self._begun = time.monotonic()
        self._marks: list[Mark] = []
        self._lock = threading.Lock()
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._open_blocks = 0
        """``with`` blocks that it is in: its thread goes on until the last one ends."""

    def __repr__(self) -> str:
        readings = count_of(len(self._marks), "readings")
        return f"MemoryMeter(device {self.device}, {readings})"

    def _repr_html_(self) -> str:
        return self.timeline._repr_html_()

    def __reduce__(self) -> NoReturn:
        message = "A MemoryMeter cannot be pickled, nor copied with all it has."
        why = "it reads in a thread of this process"
        raise OptionError(message, why=why, fix="meter.timeline, which can be")

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
            if len(self._marks) > _MOST_MARKS:
                self._drop_every_second_sample()
        # Outside of the lock: the user's functions may ask for the timeline.
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

    def __enter__(self) -> Self:
        self.mark()
        self._open_blocks += 1
        # Entered a second time, it has its thread already.
        if self.every_s is not None and self._thread is None:
            self._stop = threading.Event()
            self._thread = threading.Thread(
                target=self._mark_until,
                args=(self._stop,),
                name="loaderkit meter",
                daemon=True,
            )
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._open_blocks -= 1
        is_last = self._open_blocks == 0
        if is_last and self._thread is not None and self._stop is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
        self.mark()

    def _mark_until(self, stop: threading.Event) -> None:
        # Waits for the event rather than sleeps, so that a block ends at once.  The
        # pause is looked up each time, since thinning lengthens it.
        while not stop.wait(self.every_s):
            self.mark()

    def _drop_every_second_sample(self) -> None:
        """Thin the thread's samples, and take half as many from now on."""
        # Every second one of all, and not the older half: the end of a run is compared
        # with its beginning.  Marks with a name stay, as somebody asked for them.
        self._marks = [
            mark
            for index, mark in enumerate(self._marks)
            if mark.label or index % 2 == 1
        ]
        if self.every_s is not None:
            self.every_s *= 2
