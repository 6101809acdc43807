"""Of which memory a report tells: of a device, of the host, a limit, a pool.  Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.diagnosis.lexicon import (
    ANY_DEVICE,
    BUDGET,
    COMPILER,
    HOST_PLACE,
    ONE_BLOCK,
    PINNED,
    SHARED,
    Phrase,
    backend_named,
    compile_words,
    names_any_gpu,
)
from loaderkit.budget.diagnosis.reports import has_request, process_was_ended

if TYPE_CHECKING:
    from loaderkit.budget.diagnosis.amounts import Amount
    from loaderkit.budget.diagnosis.clues import Clue

UNPLACED = "oom"
"""The kind of a report that does not say which memory ran out."""


class WhichMemory(NamedTuple):
    """The memory that a report tells of."""

    kind: str
    """As :attr:`loaderkit.budget.diagnosis.messages.Message.kind`."""
    backend: str | None
    """As :attr:`loaderkit.budget.diagnosis.messages.Message.backend`."""


def which_memory(clue: Clue, sentence: str, amounts: list[Amount]) -> WhichMemory:
    """Decide of which memory a report tells.

    What names a limit counts before what names a device, since drivers print the limits
    of the host too; and the sentence counts before its surroundings.

    Args:
        clue: Words of exhaustion that are a report.
        sentence: The sentence around them.
        amounts: Those that the sentence, and what is stated behind it, have.
    """
    limit = _limit_of_the_host(clue, sentence, amounts)
    if limit is not None:
        return limit
    # "Host ran out of memory" is printed by drivers of devices, whose names stand
    # beside it ("[gfx/vulkan]", "CL_OUT_OF_HOST_MEMORY").
    if _HOSTS_MEMORY.search(clue.text, max(0, clue.start - _SUBJECT_OF_HOST), clue.end):
        return _MEMORY_OF_THE_HOST
    if COMPILER.search(clue.text, clue.sentence()[0], clue.start):
        return WhichMemory(UNPLACED, None)  # not the device that it compiles for

    backend = backend_named(sentence) or _host_backend(sentence)
    if backend == "cuda" and names_any_gpu(sentence):
        backend = backend_named(clue.surroundings()) or backend
    if backend == "cpu" and _DEVICE_MEMORY.search(sentence):
        backend = None  # "malloc" is a word of devices too
    if _killed_its_process(clue, backend):
        return WhichMemory("killed", "host")
    if _exceeds_a_budget(clue):
        return _budget_of_a_device(clue, sentence)
    return _allocation(clue, sentence, backend, amounts)


def _killed_its_process(clue: Clue, backend: str | None) -> bool:
    """Whether a process was ended because of what a sentence says of its backend."""
    # An allocation of the host can fail, and its process end: that is no limit.
    is_watched = backend is None or (
        backend == "cpu" and clue.phrase is Phrase.EXCEEDED
    )
    is_limit = is_watched and clue.phrase is not Phrase.FAILED
    return is_limit and process_was_ended(clue)


def _exceeds_a_budget(clue: Clue) -> bool:
    """Whether words around it are of a part of a device's memory that is given out."""
    if BUDGET.search(clue.surroundings()) is None:
        return False
    # The host has such budgets as well: its word must not stand before the phrase, but
    # in the same words as the budget.
    subject = clue.text[clue.sentence()[0] : clue.end]
    return _host_backend(subject) is None or BUDGET.search(subject) is not None


def _budget_of_a_device(clue: Clue, sentence: str) -> WhichMemory:
    is_allocator = _ALLOCATOR_WORDING.search(sentence) is not None
    kind = "device_oom" if is_allocator else "device_limit"
    backend = backend_named(sentence) or backend_named(clue.surroundings()) or "cuda"
    return WhichMemory(kind, backend)


def _allocation(
    clue: Clue, sentence: str, backend: str | None, amounts: list[Amount]
) -> WhichMemory:
    """Tell whose allocation failed: of a device at once, or some time before."""
    if backend is None:
        around = clue.surroundings()
        host = None if _DEVICE_MEMORY.search(sentence) else _host_backend(around)
        backend = backend_named(around) or host
    if backend == "cpu":
        return _MEMORY_OF_THE_HOST
    if ONE_BLOCK.search(sentence):
        return WhichMemory("buffer_too_large", backend)
    if backend is None and ANY_DEVICE.search(sentence) is None:
        return WhichMemory(UNPLACED, None)
    # An allocator says what it was asked for; "CUDA error: out of memory" alone may be
    # of any call before.
    is_allocators = has_request(amounts) or _ALLOCATOR_WORDING.search(
        clue.text[clue.start - len("CUDA  ") : clue.end + 1]
    )
    kind = "device_oom" if is_allocators else "device_oom_async"
    return WhichMemory(kind, backend)


_MEMORY_OF_THE_HOST = WhichMemory("host_alloc", "cpu")


_SUBJECT_OF_HOST = 10
"""Characters before "out of memory" in which "host ran" stands."""
_ALLOCATOR_WORDING = re.compile(
    r"\b(?:CUDA|HIP|XPU|NPU|MLU|MUSA|HPU|DCU)\s+out\s+of\s+memory", re.IGNORECASE
)
_DEVICE_MEMORY = compile_words(
    r"device[ _-]+mem|OutOfDeviceMem|\bdevice ?\d{1,3} out of memory|\bw(?:eb)?gpu\b"
)
_HOSTS_MEMORY = re.compile(
    r"of[ _]?host[ _]?mem|host_mem|\bhost (?:has )?(?:is|r[au]n|was|went) out of mem",
    re.IGNORECASE,
)


def _limit_of_the_host(
    clue: Clue, sentence: str, amounts: list[Amount]
) -> WhichMemory | None:
    """Give what it is where it is no allocation but a limit of the host."""
    if clue.phrase is Phrase.KILLED and not _is_refusal(clue, amounts):
        return WhichMemory("killed", "host")
    if PINNED.search(sentence):
        return WhichMemory("pinned", "host")
    return WhichMemory("shm", "host") if SHARED.search(sentence) else None


def _is_refusal(clue: Clue, amounts: list[Amount]) -> bool:
    """Whether a limit was told to what asked for too much, which goes on living."""
    is_limit = "limit" in clue.words.lower()
    return is_limit and has_request(amounts) and not process_was_ended(clue)


def _host_backend(text: str) -> str | None:
    return "cpu" if HOST_PLACE.search(text) else None
