"""Why did it run out of memory?  Reads a message or an exception, and advises."""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from loaderkit.budget.environment import ALLOCATOR_NAMES
from loaderkit.budget.judge import (
    UNLIMITED,
    VERDICTS,
    foreign_bytes,
    judge,
    unallocated_bytes,
)
from loaderkit.budget.messages import (
    SIZES,
    Message,
    as_fields,
    read_message,
    request_of,
)
from loaderkit.budget.remedies import COSTS, Remedy, remedies_for
from loaderkit.notebook import card
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from loaderkit.budget.batch import BatchPlan


_HALF_UPDATED = (
    "an optimizer's update was running: parameters and its state may be changed in "
    "part; load both from the last checkpoint before you go on"
)


@dataclass(frozen=True)
class OomAdvice:
    """One remedy and what it brings for this message."""

    remedy: Remedy
    """What to do."""
    brings: int | None
    """Bytes at most; None where the message does not say."""
    enough: bool | None
    """Whether that covers the shortfall; None: not known."""

    @property
    def rank(self) -> tuple[int, int]:
        """Cheapest first; of the same cost, what is surely enough first."""
        known = {True: 0, None: 1, False: 2}
        return COSTS.index(self.remedy.cost), known[self.enough]

    def __str__(self) -> str:
        gain = "unknown how much"
        if self.brings is not None:
            gain = f"up to {format_bytes(self.brings)}"
            if self.enough is not None:
                gain += ", enough" if self.enough else ", not enough"
        return f"{self.remedy.says} ({gain})\n       {self.remedy.code}"


@dataclass(frozen=True)
class Diagnosis(Message):
    """Why memory ran out, the numbers, and what to do.  Amounts in bytes."""

    verdict: str = "not memory"
    """A key of :data:`VERDICTS`."""
    shortfall: int | None = None
    """What was missing; None where the text does not say."""
    advice: list[OomAdvice] = field(default_factory=list)
    """Cheapest first."""
    notes: list[str] = field(default_factory=list)
    """What else the numbers tell."""

    @property
    def ok(self) -> bool:
        """Whether memory was not the problem."""
        return self.is_oom is False

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        title, *_ = _lines(self)
        numbers = [tuple(text.rsplit(" ", 2)) for text in _numbers(self)]
        rows = [(name, f"{amount} {unit}") for name, amount, unit in numbers]
        if self.shortfall is not None:
            rows.append(("short of", format_bytes(self.shortfall)))
        return card(
            title,
            mood="good" if self.ok else "bad",
            rows=rows,
            notes=[*self.notes, *map(str, self.advice)],
            text=str(self),
        )

    def to_json(self) -> dict[str, Any]:
        """Give every field, with the advice as plain values."""
        advice = [
            {
                "name": each.remedy.name,
                "cost": each.remedy.cost,
                "says": each.remedy.says,
                "code": each.remedy.code,
                "brings": each.brings,
                "enough": each.enough,
            }
            for each in self.advice
        ]
        rest = {"shortfall": self.shortfall, "advice": advice, "notes": self.notes}
        return {**as_fields(self), "verdict": self.verdict, **rest}


def diagnose_oom(
    error: BaseException | str, *, plan: BatchPlan | None = None
) -> Diagnosis:
    """Say why memory ran out, from an exception or any text that reports it.

    Args:
        error: An exception, whose causes and worker tracebacks are read too, or a
            text: a message, a traceback, a line of torchrun, Slurm, Docker or the
            kernel.
        plan: Of the model that failed; says what each remedy saves for it.

    Returns:
        Numbers, verdict and advice; ``is_oom`` is False for anything else.

    >>> print(
    ...     diagnose_oom(
    ...         "RuntimeError: DataLoader worker (pid 7) is killed by "
    ...         "signal: Bus error."
    ...     )
    ... )
    Out of memory: /dev/shm is full: batches of workers travel through it.
      where: host, process 7
      1. give the container more /dev/shm, or keep fewer batches in flight (...)
           docker run --shm-size=8g ...; build_loader(..., prefetch_factor=1)
    """
    saves = {gain.remedy.name: gain.saves for gain in plan.savings} if plan else {}
    if isinstance(error, str):
        return diagnose(read_message(error), saves=saves)
    settings = ",".join(os.environ.get(name, "") for name in ALLOCATOR_NAMES)
    found = diagnose(_best(error), settings=settings, saves=saves)
    if found.is_oom and _in_update(error):
        return replace(found, notes=[*found.notes, _HALF_UPDATED])
    return found


def diagnose(
    message: Message, *, settings: str = "", saves: Mapping[str, int] | None = None
) -> Diagnosis:
    """Judge a message and attach advice.  Pure.

    Args:
        message: What the text stated.
        settings: The allocator's settings; what is on already is not advised.
        saves: Bytes by remedy's name, where a plan computed them.

    Returns:
        The whole diagnosis.
    """
    verdict, shortfall = judge(message)
    advice = [
        _weighed(remedy, message, shortfall, saves or {})
        for remedy in remedies_for(verdict, message.backend)
        if not _useless(remedy, settings)
    ]
    advice.sort(key=lambda each: each.rank)
    return Diagnosis(
        **asdict(message),
        verdict=verdict,
        shortfall=shortfall,
        advice=advice,
        notes=_notes(message, verdict),
    )


def _weighed(
    remedy: Remedy, message: Message, shortfall: int | None, saves: Mapping[str, int]
) -> OomAdvice:
    brings = saves.get(remedy.name)
    if remedy.name == "expandable segments":
        brings = unallocated_bytes(message)
    elif remedy.name == "other processes":
        brings = foreign_bytes(message)
    elif remedy.name == "graph cache":
        brings = message.other
    enough = None if brings is None or shortfall is None else brings >= shortfall
    return OomAdvice(remedy, brings, enough)


def _useless(remedy: Remedy, settings: str) -> bool:
    on = "expandable_segments:true" in settings.lower()
    return on and remedy.name == "expandable segments"


def _notes(message: Message, verdict: str) -> list[str]:
    """Say what else the numbers tell."""
    notes = []
    if message.backend == "mps" and message.limit and message.kind == "device_limit":
        notes.append(_which_mac(message.limit))
    if verdict == "held by others":
        notes += _who(message)
    if message.kind in {"device_oom", "device_limit"} and request_of(message) is None:
        notes.append("the text is cut off: paste all of it for a surer verdict")
    notes += [f"not understood: {part}" for part in message.unread]
    if any(taken > UNLIMITED for _, taken in message.procs or ()):
        notes.append("a process inside a container is counted as 16 EiB: ignore that")
    return notes


def _who(message: Message) -> list[str]:
    if message.backend == "mps":
        return ["Metal holds more outside torch's heaps than inside: graphs and others"]
    listed = [
        f"process {pid} holds {format_bytes(taken)}"
        for pid, taken in message.procs or ()
        if taken < UNLIMITED
    ]
    return listed or ["this process's own context and libraries count as others"]


def _which_mac(limit: int) -> str:
    """Read the machine from the cap: 1.7 x a working set of 2/3 to 3/4 of its RAM.

    Large machines give Metal 84 %.  Measured by users: 5.33 of 8, 10.67 of 16, 11.84 of
    16, 107.52 of 128 GiB.

    >>> _which_mac(int(9.07 * 2**30))
    'the cap is 1.7 x 5.34 GiB by default: probably a machine of 8 GiB'
    """
    working = limit / 1.7
    sizes = (4, 6, 8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
    share = {size: working / (size << 30) for size in sizes}
    likely = [
        size
        for size, part in share.items()
        if 0.655 <= part <= 0.76 or (size >= 64 and 0.82 <= part <= 0.86)
    ]
    named = " or ".join(str(size) for size in likely) or "an unusual number of"
    machine = f"probably a machine of {named} GiB"
    return f"the cap is 1.7 x {format_bytes(round(working))} by default: {machine}"


def _lines(found: Diagnosis) -> Iterator[str]:
    word = {True: "Out of memory", "maybe": "Perhaps out of memory"}
    head = word.get(found.is_oom, "Not out of memory")
    yield f"{head}: {VERDICTS[found.verdict]}."
    place = [found.backend or "", *_named(found)]
    if any(place):
        yield "  where: " + ", ".join(filter(None, place))
    if numbers := _numbers(found):
        yield "  numbers: " + ", ".join(numbers)
    if found.shortfall is not None:
        yield f"  short of: {format_bytes(found.shortfall)}"
    for note in found.notes:
        yield f"  note: {note}"
    for number, advice in enumerate(found.advice, 1):
        yield f"  {number}. {advice}"


def _named(found: Diagnosis) -> list[str]:
    device = "" if found.device is None else f"device {found.device}"
    process = "" if found.pid is None else f"process {found.pid}"
    return [device, process, "" if found.errno is None else f"errno {found.errno}"]


def _numbers(found: Diagnosis) -> list[str]:
    said = [(name.replace("_", " "), getattr(found, name)) for name in SIZES]
    return [f"{name} {format_bytes(n)}" for name, n in said if n is not None]


def _best(error: BaseException) -> Message:
    """Read an exception and everything it came from; the surest one counts."""
    read = [read_message(_text(each)) for each in _causes(error)]
    sure = [m for m in read if m.is_oom is True] or [m for m in read if m.is_oom]
    named = sure or [m for m in read if m.kind is not None]
    return (named or read)[0]


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        group = getattr(each, "exceptions", ())
        waiting += [each.__cause__, each.__context__, *group]


def _in_update(error: BaseException) -> bool:
    """Tell whether an optimizer's update was running: torch wraps every ``step``."""
    for each in _causes(error):
        calls = traceback.extract_tb(each.__traceback__)
        for caller, called in itertools.pairwise(calls):
            wrapper = PurePath(caller.filename).parts[-3:]
            if wrapper == ("torch", "optim", "optimizer.py") and called.name == "step":
                return True
    return False


def _text(error: BaseException) -> str:
    kind = type(error)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    text = f"{name}: {error}".rstrip(": ")
    if isinstance(error, OSError):  # who called decides what errno 12 and 28 mean
        calls = traceback.extract_tb(error.__traceback__)
        text = " ".join(call.name for call in calls) + "\n" + text
    return text


@contextmanager
def oom_guard() -> Iterator[None]:
    """Add the diagnosis to whatever out-of-memory error leaves the block.

    The error itself is raised, with the diagnosis as its note (Python 3.11) and as its
    attribute ``diagnosis``.  The frames it went through inside the block let go of
    their tensors, so that what handles it has the memory back.

    Raises:
        BaseException: What the block raised.
    """
    try:
        yield
    except BaseException as error:
        found = diagnose_oom(error)
        if found.is_oom:
            attach(error, found)
        raise


def attach(error: BaseException, found: Diagnosis) -> None:
    """Give an error its diagnosis, and let go of what its frames hold.

    Args:
        error: Gets it as its attribute ``diagnosis`` and, from Python 3.11, as a note;
            every finished frame of it and its causes is cleared.
        found: What was diagnosed.
    """
    for each in _causes(error):
        traceback.clear_frames(each.__traceback__)
    error.diagnosis = found  # type: ignore[attr-defined]
    if sys.version_info >= (3, 11):
        error.add_note(str(found))
