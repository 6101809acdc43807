"""Why did it run out of memory?  Reads a message or an exception, and advises."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import shlex
import sys
import traceback
from contextlib import ContextDecorator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar, cast

from loaderkit.answers import answer_wrong_names
from loaderkit.budget.diagnosis.judge import (
    UNLIMITED,
    VERDICTS,
    foreign_bytes,
    judge,
    unallocated_bytes,
)
from loaderkit.budget.diagnosis.messages import (
    SIZES,
    Message,
    as_fields,
    read_message,
    request_of,
)
from loaderkit.budget.diagnosis.page import advice_sections, amounts_sections
from loaderkit.budget.environment.allocator_settings import (
    ALLOCATOR_NAMES,
    DEFAULT_HIGH,
)
from loaderkit.budget.remedies import COSTS, Remedy, remedies_for
from loaderkit.call_keywords import suggest_keywords
from loaderkit.error_texts import text_of_error
from loaderkit.errors import OptionError
from loaderkit.fixes import Either
from loaderkit.notebook import HasCard, card, mood_of, repr_in_a_line
from loaderkit.pages.document import HasPage, Listing, Page, Section
from loaderkit.units import format_bytes
from loaderkit.value_words import kind_of, show_value
from loaderkit.wrapping import wrap_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping
    from types import TracebackType

    from loaderkit.budget.batch.plan import BatchPlan


_HALF_UPDATED = (
    "an optimizer's update was running: parameters and its state may be changed in "
    "part; load both from the last checkpoint before you go on"
)


@answer_wrong_names("remedy")
@dataclass(frozen=True)
class OomAdvice(HasCard):
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

    @property
    def gain(self) -> str:
        """What it brings, in words."""
        if self.brings is None:
            return "unknown how much"
        text = f"up to {format_bytes(self.brings)}"
        if self.enough is None:
            return text
        return f"{text}, enough" if self.enough else f"{text}, not enough"

    def __str__(self) -> str:
        return f"{self.remedy.says} ({self.gain})\n       {self.remedy.code}"


@answer_wrong_names()
@dataclass(frozen=True)
class Diagnosis(HasPage, Message):
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

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        return wrap_lines("\n".join(_lines_of_diagnosis(self)))

    def _repr_html_(self) -> str:
        title, *_ = _lines_of_diagnosis(self)
        amounts = _amounts_in_words(self)
        if self.shortfall is not None:
            amounts.append(f"short of {format_bytes(self.shortfall)}")
        rows = [
            (advice.remedy.says, advice.gain, f"`{advice.remedy.code}`")
            for advice in self.advice
        ]
        notes = list(self.notes)
        if amounts:
            notes.insert(0, ", ".join(amounts))
        return card(
            title,
            mood=mood_of(ok=self.ok),
            heads=("what to do, the cheapest first", "brings", "to paste"),
            rows=rows,
            notes=notes,
            text=str(self),
        )

    def page(self) -> Page:
        """Show the amounts of the message side by side, and what to do."""
        title, *_ = _lines_of_diagnosis(self)
        amounts = {
            name.replace("_", " "): getattr(self, name)
            for name in SIZES
            if getattr(self, name) is not None
        }
        if self.shortfall is not None:
            amounts["short of"] = self.shortfall
        where = ", ".join(
            filter(None, [self.backend or "", *_device_and_process(self)])
        )
        lead = list(self.notes)
        if where:
            lead.insert(0, f"where: {where}")
        return Page(
            title,
            mood=mood_of(ok=self.ok),
            lead=tuple(lead),
            sections=(
                *amounts_sections(amounts),
                *advice_sections(
                    [(advice.remedy, advice.gain) for advice in self.advice]
                ),
                Section("As text", (Listing(str(self), folded="what print shows"),)),
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Give every field, with the advice as plain values."""
        advice = [
            {
                "name": entry.remedy.name,
                "cost": entry.remedy.cost,
                "says": entry.remedy.says,
                "code": entry.remedy.code,
                "brings": entry.brings,
                "enough": entry.enough,
            }
            for entry in self.advice
        ]
        return {
            **as_fields(self),
            "verdict": self.verdict,
            "shortfall": self.shortfall,
            "advice": advice,
            "notes": self.notes,
        }


@suggest_keywords
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

    Raises:
        OptionError: It is neither an error nor a text, or names a file.

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
    saves = {}
    if plan is not None:
        saves = {gain.remedy.name: gain.saves for gain in _savings_of(plan, error)}
    if isinstance(error, str):
        if _names_a_file(error):
            raise _neither_error_nor_text(error)
        return diagnose(read_message(error), saves=saves)
    if not isinstance(error, BaseException):
        raise _neither_error_nor_text(error)

    # Only an exception was raised here, under the settings of this process: a text can
    # come from any other.
    settings = ",".join(os.environ.get(name, "") for name in ALLOCATOR_NAMES)
    diagnosis = diagnose(_surest_message(error), settings=settings, saves=saves)

    if diagnosis.is_oom and _was_in_optimizer_update(error):
        return replace(diagnosis, notes=[*diagnosis.notes, _HALF_UPDATED])
    return diagnosis


_LOG_SUFFIXES = frozenset({".err", ".json", ".log", ".out", ".stderr", ".txt"})
"""Ends of names under which logs are saved."""
_LONGEST_PATH = 4096
"""Characters of a path; ``PATH_MAX`` of Linux."""


def _names_a_file(text: str) -> bool:
    """Tell whether a text is the path of a log rather than what stands in it."""
    if not text.strip() or len(text) > _LONGEST_PATH or "\n" in text.strip():
        return False
    path = Path(text.strip())
    if len(text.split()) == 1 and path.suffix.lower() in _LOG_SUFFIXES:
        return True
    try:
        return path.is_file()
    except (OSError, ValueError):  # as of a name that is too long, or with a NUL
        return False


def _savings_of(plan: object, error: object) -> Any:
    """Give what the remedies of a plan save.

    Args:
        plan: What was given as the plan.
        error: What was given as the error: the plan, where the two were exchanged.

    Raises:
        OptionError: It is no plan of a batch.
    """
    savings = getattr(plan, "savings", None)
    if savings is None:
        message = f"plan must be what plan_batch returned, got {show_value(plan)}."
        why = f"it is {kind_of(plan)}"
        fix = "diagnose_oom(error, plan=plan_batch(model, dataset, 'cpu'))"
        if hasattr(error, "savings"):
            why += f", and error is {kind_of(error)}"
            fix = "diagnose_oom(error, plan=plan)"
        raise OptionError(message, why=why, fix=fix)
    return savings


def _neither_error_nor_text(given: object) -> OptionError:
    """Say what to give in place of what is often at hand where an error was caught."""
    message = f"diagnose_oom takes an error or a text, got {show_value(given)}."
    why = f"its type is {type(given).__name__}"
    fix: str | Either = "diagnose_oom(error)"
    if isinstance(given, str):
        why = "it names a file; what stands in it is the text"
        file = given.strip()
        code = f"diagnose_oom(pathlib.Path({file!r}).read_text(errors='replace'))"
        fix = Either(code, f"loaderkit explain {shlex.quote(file)}")
    elif given is None:
        why = "it is None: no error is being handled here, or this one has no cause"
        fix = "except Exception as error: print(diagnose_oom(error))"
    elif isinstance(given, type) and issubclass(given, BaseException):
        why = "it is a class of errors, not the error that was raised"
        fix = "except Exception as error: print(diagnose_oom(error))"
    elif isinstance(given, bytes | bytearray):
        fix = "diagnose_oom(text.decode(errors='replace'))"
    elif isinstance(given, os.PathLike):
        fix = "diagnose_oom(path.read_text(errors='replace'))"
    elif isinstance(given, tuple) and any(
        isinstance(item, BaseException) for item in given
    ):
        fix = "diagnose_oom(sys.exc_info()[1])"
    elif isinstance(given, list | tuple) and all(isinstance(g, str) for g in given):
        fix = "diagnose_oom('\\n'.join(lines))"
    return OptionError(message, why=why, fix=fix)


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
        _advice_for_message(remedy, message, shortfall, saves or {})
        for remedy in remedies_for(verdict, message.backend)
        if not _is_already_on(remedy, settings)
    ]
    advice.sort(key=lambda entry: entry.rank)

    return Diagnosis(
        **asdict(message),
        verdict=verdict,
        shortfall=shortfall,
        advice=advice,
        notes=_notes_on_message(message, verdict),
    )


def _advice_for_message(
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


def _is_already_on(remedy: Remedy, settings: str) -> bool:
    if remedy.name != "expandable segments":
        return False
    return "expandable_segments:true" in settings.lower()


def _notes_on_message(message: Message, verdict: str) -> list[str]:
    """Say what else the numbers tell."""
    notes = []
    if message.backend == "mps" and message.limit and message.kind == "device_limit":
        notes.append(_guess_mac_from_limit(message.limit))
    if verdict == "held by others":
        notes += _holders_of_memory(message)
    if message.kind in {"device_oom", "device_limit"} and request_of(message) is None:
        notes.append("the text is cut off: paste all of it for a surer verdict")
    notes += [f"not understood: {passage}" for passage in message.unread]
    if any(taken > UNLIMITED for _, taken in message.procs or ()):
        notes.append("a process inside a container is counted as 16 EiB: ignore that")
    return notes


def _holders_of_memory(message: Message) -> list[str]:
    if message.backend == "mps":
        return ["Metal holds more outside torch's heaps than inside: graphs and others"]
    listed = [
        f"process {pid} holds {format_bytes(taken)}"
        for pid, taken in message.procs or ()
        if taken < UNLIMITED
    ]
    return listed or ["this process's own context and libraries count as others"]


_MAC_SIZES_GIB = (4, 6, 8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
"""With how much memory Apple has sold machines, and telephones."""
_LEAST_SHARE_OF_MAC, _MOST_SHARE_OF_MAC = 0.655, 0.76
"""Of it Metal's working set has; chosen around two thirds and three quarters."""
_LARGE_MAC_GIB = 64
_LEAST_SHARE_OF_LARGE, _MOST_SHARE_OF_LARGE = 0.82, 0.86
"""The same of machines from this size on; chosen around 84 %."""


def _guess_mac_from_limit(limit: int) -> str:
    """Read the machine from the cap: 1.7 x a working set of 2/3 to 3/4 of its RAM.

    Large machines give Metal 84 %.  Measured by users: 5.33 of 8, 10.67 of 16, 11.84 of
    16, 107.52 of 128 GiB.

    >>> _guess_mac_from_limit(int(9.07 * 2**30))
    'the cap is 1.7 x 5.34 GiB by default: probably a machine of 8 GiB'
    """
    working = limit / DEFAULT_HIGH
    likely = []
    for size in _MAC_SIZES_GIB:
        share = working / (size << 30)
        is_usual = _LEAST_SHARE_OF_MAC <= share <= _MOST_SHARE_OF_MAC
        is_of_large = _LEAST_SHARE_OF_LARGE <= share <= _MOST_SHARE_OF_LARGE
        if is_usual or (size >= _LARGE_MAC_GIB and is_of_large):
            likely.append(size)
    named = " or ".join(str(size) for size in likely) or "an unusual number of"
    machine = f"probably a machine of {named} GiB"
    return f"the cap is 1.7 x {format_bytes(round(working))} by default: {machine}"


def _lines_of_diagnosis(diagnosis: Diagnosis) -> Iterator[str]:
    headlines = {True: "Out of memory", "maybe": "Perhaps out of memory"}
    headline = headlines.get(diagnosis.is_oom, "Not out of memory")
    yield f"{headline}: {VERDICTS[diagnosis.verdict]}."

    location = [diagnosis.backend or "", *_device_and_process(diagnosis)]
    if any(location):
        yield "  where: " + ", ".join(filter(None, location))

    amounts = _amounts_in_words(diagnosis)
    if amounts:
        yield "  numbers: " + ", ".join(amounts)
    if diagnosis.shortfall is not None:
        yield f"  short of: {format_bytes(diagnosis.shortfall)}"

    for note in diagnosis.notes:
        yield f"  note: {note}"
    for number, advice in enumerate(diagnosis.advice, 1):
        yield f"  {number}. {advice}"


def _device_and_process(diagnosis: Diagnosis) -> list[str]:
    """Name device, process and error number; empty where the text names none."""
    device = "" if diagnosis.device is None else f"device {diagnosis.device}"
    process = "" if diagnosis.pid is None else f"process {diagnosis.pid}"
    errno = "" if diagnosis.errno is None else f"errno {diagnosis.errno}"
    return [device, process, errno]


def _amounts_in_words(diagnosis: Diagnosis) -> list[str]:
    amounts = []
    for name in SIZES:
        size_bytes = getattr(diagnosis, name)
        # A limit of 2^64 bytes stands for none.
        is_none = size_bytes is None or (name == "limit" and size_bytes >= UNLIMITED)
        if not is_none:
            label = name.replace("_", " ")
            amounts.append(f"{label} {format_bytes(size_bytes)}")
    return amounts


def _surest_message(error: BaseException) -> Message:
    """Read an exception and everything it came from; the surest one counts."""
    messages = [
        read_message(_text_of_error(cause)) for cause in _error_and_causes(error)
    ]

    # is_oom is True, "maybe" or False.  Of equally sure ones the outermost counts, and
    # that is the first.
    certain = [message for message in messages if message.is_oom is True]
    possible = [message for message in messages if message.is_oom]
    recognised = [message for message in messages if message.kind is not None]
    return (certain or possible or recognised or messages)[0]


def _error_and_causes(error: BaseException) -> Iterator[BaseException]:
    """Walk an error, its causes, contexts and groups, nearest first."""
    # Errors are told apart by identity: they need not be hashable, and a cause can lead
    # back to the error itself.
    seen_ids: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        cause = queue.pop(0)
        if cause is None or id(cause) in seen_ids:
            continue
        seen_ids.add(id(cause))
        yield cause

        queue += [cause.__cause__, cause.__context__, *_members_of_group(cause)]


def _members_of_group(error: BaseException) -> list[BaseException]:
    """List the errors of an ``ExceptionGroup``, or of what stands for one in 3.10.

    Errors of other libraries have an attribute of that name too, and a class of the
    user's may fail when it is asked for any.
    """
    try:
        members = list(getattr(error, "exceptions", ()))
    except Exception:  # noqa: BLE001 -- code of the user's class
        return []
    return [member for member in members if isinstance(member, BaseException)]


def _was_in_optimizer_update(error: BaseException) -> bool:
    """Tell whether an optimizer's update was running: torch wraps every ``step``."""
    for cause in _error_and_causes(error):
        calls = traceback.extract_tb(cause.__traceback__)
        for caller, called in itertools.pairwise(calls):
            wrapper = PurePath(caller.filename).parts[-3:]
            if wrapper == ("torch", "optim", "optimizer.py") and called.name == "step":
                return True
    return False


def _text_of_error(error: BaseException) -> str:
    error_type = type(error)
    qualified_name = f"{error_type.__module__}.{error_type.__qualname__}"
    name = qualified_name.removeprefix("builtins.")
    text = f"{name}: {text_of_error(error)}".rstrip(": ")

    if isinstance(error, OSError):
        # Who called decides what errno 12 and 28 mean.
        calls = traceback.extract_tb(error.__traceback__)
        text = " ".join(call.name for call in calls) + "\n" + text
    return text


Guarded = TypeVar("Guarded", bound="Callable[..., Any]")
"""A function above which a guard stands."""


class OomGuard(ContextDecorator):
    """Diagnoses what leaves a block, a function, a coroutine or a generator."""

    def __enter__(self) -> None:
        """Begin: there is nothing to do."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        calls: TracebackType | None,
    ) -> None:
        """Give an error its diagnosis; it is raised all the same."""
        if error is not None:
            diagnosis = diagnose_oom(error)
            if diagnosis.is_oom:
                attach(error, diagnosis)

    def __call__(self, function: Guarded) -> Guarded:
        """Guard every call for as long as its body runs.

        Raises:
            OptionError: It is an asynchronous generator.
        """
        if inspect.isasyncgenfunction(function):
            raise OptionError(
                f"@oom_guard() cannot stand above {show_value(function)}.",
                why="it is an asynchronous generator, and its body runs only while "
                "somebody iterates",
                fix="with oom_guard(): ...  # around the body of the generator",
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return cast("Guarded", awaited)
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def iterated(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
                with self:
                    return (yield from function(*args, **kwargs))

            return cast("Guarded", iterated)
        return super().__call__(function)


@suggest_keywords
def oom_guard() -> OomGuard:
    """Add the diagnosis to whatever out-of-memory error leaves the block.

    The error itself is raised, with the diagnosis as its note (Python 3.11) and as its
    attribute ``diagnosis``.  The frames it went through inside the block let go of
    their tensors, so that what handles it has the memory back.

    ``@oom_guard()`` above a function guards its calls, above a coroutine what is
    awaited, and above a generator what is iterated.

    Returns:
        What ``with`` takes, or a function.
    """
    return OomGuard()


def attach(error: BaseException, diagnosis: Diagnosis) -> None:
    """Give an error its diagnosis, and let go of what its frames hold.

    Args:
        error: Gets it as its attribute ``diagnosis`` and, from Python 3.11, as a note;
            every finished frame of it and its causes is cleared.
        diagnosis: What was diagnosed.
    """
    for cause in _error_and_causes(error):
        traceback.clear_frames(cause.__traceback__)

    error.diagnosis = diagnosis  # type: ignore[attr-defined]
    if sys.version_info >= (3, 11):
        error.add_note(str(diagnosis))
