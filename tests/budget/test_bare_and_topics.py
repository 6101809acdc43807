"""Laws of messages that say little, and of lines that only have the subject.

What says nothing but that an allocation failed, what was not allocated and why, an
error that states in the present that a limit is exceeded, and a traceback in one line
are reports; a heading, a question, a line of a changelog, a setting, and a log that
says that memory did suffice are none.  Each class is drawn from products of its words,
which were written for the class and not taken from any text.
"""

import itertools
import random
import traceback

import pytest

from loaderkit.budget.diagnosis.folded_tracebacks import unfold_tracebacks
from loaderkit.budget.diagnosis.messages import as_fields, read_message

DRAWN = 120
"""Texts of a class, of up to 2,000: reading them takes 0.1 s."""


def products(*parts):
    texts = ["".join(words) for words in itertools.product(*parts)]
    return random.Random(1).sample(texts, min(DRAWN, len(texts)))


LABELS = (
    *("", "FATAL: ", "error: ", "RuntimeError: ", "[E] ", "ERROR - ", "panic: "),
    *("worker.cc:41: ", "2026-01-03 12:00:00 ERROR ", "[rank0]: "),
    "E0103 12:00:00.1 77 pool.cc:12] ",
)
BARE_FAILURES = (
    *("Allocation failed", "allocation failed", "memory allocation failure"),
    *("alloc failed", "malloc failed", "Buffer allocation failed", "Allocation error"),
)
REPORTS = {
    "a bare failure": products(LABELS, BARE_FAILURES, ("", ".", "!", " (code 3)")),
    "what was not allocated, and why": products(
        ("", "error: ", "RuntimeError: ", "[E] "),
        ("the buffer", "output tensor", "workspace", "GPU memory", "scratch memory"),
        (" was not", " could not be", " is not", " has not been"),
        (" allocated",),
        (
            *(": out of memory", " (insufficient memory)", ", not enough memory"),
            *(" because memory is exhausted", " due to lack of memory"),
        ),
    ),
    "an error in the present": products(
        ("RuntimeError: ", "error: ", "acme: fatal: ", "[E] ", "query failed: "),
        ("memory usage", "heap usage", "requested memory", "GPU memory usage"),
        (" exceeds ", " is above ", " is over ", " is larger than "),
        ("the limit", "its limit", "available memory", "the quota", "the budget"),
    ),
    "memory that ran out in the midst of something": products(
        ("", "worker 3: ", "error: "),
        ("device memory", "the memory pool", "heap space"),
        (" exhausted", " is full", " was used up"),
        (" while growing the cache", " when allocating a buffer", " during loading w"),
    ),
    "heaps in the plural": products(
        ("", "ERROR x::heaps: ", "fatal: "),
        ("All suitable heaps", "memory pools", "allocation pools"),
        (" are exhausted", " are full.", " were exhausted"),
    ),
    "the last of the causes that Rust prints": products(
        (
            "thread 'main' panicked at '\n\nCaused by:\n    In x\n      y = `z`\n    ",
            "Error: upload failed\n\nCaused by:\n    0: in `pipeline`\n    1: ",
        ),
        ("Not enough memory left", "Out of memory", "not enough memory for the buffer"),
    ),
    "a label that has a word of headings": products(
        (
            *("guide.py:3: ", "Job section3 failed: ", "docs build: killed: "),
            *("handling request 12: ", "part-00012: ", "fix-perms: ", "test: "),
            *("ERROR in post 12: ", "Exit reason for worker: ", "lesson-3.ipynb: "),
        ),
        (
            "CUDA out of memory. Tried to allocate 2.00 GiB",
            "RuntimeError: CUDA error: out of memory",
            *("MemoryError", "std::bad_alloc", "failed to allocate 2147483648 bytes"),
            "Cannot allocate memory (errno 12)",
        ),
    ),
}

SUBJECTS = (
    *("out of memory", "CUDA out of memory", "OOM errors", "out-of-memory errors"),
    *("insufficient memory", "memory allocation failures", "the OOM killer"),
    "OutOfMemoryError",
)
HEADINGS = (
    *("An article about {}", "An article about {}: what it is, and why it happens."),
    *("Guide: {}", "How to fix {}", "{} explained", "Chapter 7. {}", "FAQ: {}"),
    *(
        "7.2. {} and what to do",
        "Topic: {}",
        "Tutorial: dealing with {}",
        "See also: {}",
    ),
    *("A survey of {}", "Keywords: {}", "Everything about {}", "A talk on {}"),
    *("This page is about {}.", "Part 2: {} in practice", "Introduction to {}"),
)
QUESTIONS = (
    *("What is {}?", "Why do I see {}", "{}: is it a bug?", "What causes {}"),
    *("Does anybody know why training ends with {}?", "Can {} be caught?"),
)
CHANGES = (
    *("- fix {}", "* Fixed {} when packing", "fix(core): {} on large graphs (#412)"),
    *("## [2.4.0] - Fixed: {} while a dataset was packed", "Bugfix: {}"),
    *("docs: explain {}", "Closes #71: {} with many workers", "Patch: {} gone"),
    *("1.4.1 (2024-02-03): {} no longer hides the cause", "feat: retry on {}"),
    *("Changed: {} is reported with its cause", "Resolved {} (#12)"),
)
DOCUMENTATION = (
    *("Raised on {}.", "Returned in case of {}.", "Use this flag against {}."),
    *("An enum of failures: timeout, {}, cancelled.", "code 12 stands for {}"),
    *("Exit status: 137 means {}.", "throws on {}", "Handles {} for you."),
)


def about(frames):
    return [frame.format(subject) for frame in frames for subject in SUBJECTS]


MENTIONS = {
    "a heading": about(HEADINGS),
    "a question": about(QUESTIONS),
    "a line of a changelog": about(CHANGES),
    "a sentence of a manual": about(DOCUMENTATION),
    "a setting": [
        *(
            "OOM_RETRIES = 3",
            "oom_policy: kill",
            "memory.oom.group 1",
            "on_oom=restart",
        ),
        *("handle_out_of_memory: true", "out_of_memory_policy: retry"),
        *("ExitOnOutOfMemoryError", "-XX:+HeapDumpOnOutOfMemoryError"),
        *("oom_killer: enabled", "skip_oom_batches: true", "OomScoreAdjust=-900"),
        *("memory_limit_exceeded_action: spill", "catch_oom = True"),
        *("vm.panic_on_oom = 1", "--max-oom-retries=5", "alloc_fail_action: log"),
    ],
    "memory that did suffice": products(
        ("", "INFO ", "[health] ", "2026-01-03 12:00:00 INFO "),
        (
            *("no OOM kills since boot", "memory limit not exceeded", "oom_kill 0"),
            *("not out of memory, 12 GiB free", "memory is not exhausted"),
            *("no allocation failures", "allocation failures: 0", "num_ooms=0"),
            *("memory check passed: 12.4 GiB free, nothing exhausted", "oom: 0"),
            *("memory was sufficient", "no process was killed for memory"),
            *("memory usage does not exceed the limit", "out_of_memory: false"),
            *("the process never ran out of memory", "failed allocations: 0"),
            *("allocated 512 MiB on device 0, 11.2 GiB free", "OOMKilled: false"),
        ),
    ),
    "what an abbreviation stands for": [
        "Out of memory (OOM) refers to a state where all memory has been allocated.",
        "The RuntimeError: CUDA out of memory (OOM) is the most common bottleneck.",
        "CUDA out of memory (OOM) means that the GPU is full",
    ],
    "something else that was not allocated": [
        *("Port allocation failed", "Allocation failed: no IP addresses left"),
        *(
            "Task allocation failed.",
            "If allocation failed, retry",
            "allocation failed?",
        ),
        *("Seat allocation failed", "Returns null when allocation failed"),
        *("pointer being freed was not allocated", "the port was not allocated"),
        "If the buffer was not allocated (out of memory), NULL is returned.",
        "the tensor was not allocated on this device",
    ],
    "a warning in the present": products(
        ("WARNING: ", "warning: ", "INFO: ", "note: ", "Alert rule: ", "When "),
        ("memory usage exceeds the limit", "memory usage is above the limit"),
    ),
    "what argues with an error": [
        "# [Issue]: hipMalloc fails even though there is enough memory",
        "[Bug]: CUDA out of memory despite plenty of free memory",
    ],
}


@pytest.mark.parametrize("texts", REPORTS.values(), ids=REPORTS)
def test_what_says_little_is_a_report(texts):
    unread = [text for text in texts if read_message(text).is_oom is False]

    assert unread == []


@pytest.mark.parametrize("texts", MENTIONS.values(), ids=MENTIONS)
def test_what_only_has_the_subject_is_none(texts):
    taken = [text for text in texts if read_message(text).is_oom is not False]

    assert taken == []


@pytest.mark.parametrize("failed", ["Failed to allocate ", "could not allocate "])
@pytest.mark.parametrize("size", ["", "16.0 MiB of "])
@pytest.mark.parametrize("memory", ["pinned host memory", "page-locked memory"])
@pytest.mark.parametrize("code", [": cudaErrorMemoryAllocation", ": out of memory"])
def test_memory_that_was_to_be_page_locked_is_the_hosts(failed, size, memory, code):
    message = read_message(f"{failed}{size}{memory}{code}")

    assert (message.kind, message.backend) == ("pinned", "host")
    assert message.requested == (16 << 20 if size else None)


UNDECIDED = products(
    ("", "note: ", "step 3: "),
    ("memory usage", "heap usage", "the requested memory"),
    (" exceeds the limit", " is above the budget", " is larger than the quota"),
)


@pytest.mark.parametrize("text", UNDECIDED)
def test_what_is_not_taken_for_a_report_says_what_it_lacks(text):
    message = read_message(text)

    assert message.is_oom is False
    [note] = message.unread
    words, _, reason = note.partition(" tells of no event here: ")
    assert words.strip('"') in text
    assert reason


class AcmePoolExhausted(Exception):  # noqa: N818 -- no ending by which it is known
    """An error of a library's own."""

    __module__ = "acme.memory"


ERRORS = (
    RuntimeError("CUDA out of memory. Tried to allocate 512.00 MiB."),
    RuntimeError("CUDA error: out of memory"),
    MemoryError(),
    MemoryError(
        "Unable to allocate 7.28 TiB for an array with shape (1000000, 1000000)"
    ),
    OSError(12, "Cannot allocate memory"),
    RuntimeError("failed to allocate 2147483648 bytes"),
    ValueError("No available memory for the cache blocks."),
    RuntimeError("Allocation failed"),
    AcmePoolExhausted("no memory left in the pool"),
)


def formatted(model, *, cause=None):
    # An error that is raised again has the frames of before as well.
    error = type(model)(*model.args)

    def outer():
        if cause is None:
            raise error
        try:
            raise cause
        except KeyError:
            raise error from cause

    try:
        outer()
    except type(error) as caught:
        return "".join(traceback.format_exception(caught))
    raise AssertionError(error)


def stated(text):
    fields = as_fields(read_message(text))
    return {name: fields[name] for name in fields if name not in {"raw", "unread"}}


@pytest.mark.parametrize("cause", [None, KeyError("x")], ids=["alone", "caused"])
@pytest.mark.parametrize("before", ["", "ERROR ", "worker 3 died: "])
def test_a_traceback_in_one_line_is_read_as_on_its_lines(before, cause):
    changed = []
    for error in ERRORS:
        text = before + formatted(error, cause=cause)
        folded = " ".join(line.strip() for line in text.splitlines())
        escaped = text.replace("\n", "\\n")
        changed += [
            other for other in (folded, escaped) if stated(other) != stated(text)
        ]

    assert all(stated(formatted(error))["is_oom"] for error in ERRORS)
    assert changed == []


def test_a_traceback_in_one_line_of_another_error_stays_none():
    errors = [
        KeyError("oom_policy"),
        ValueError("bad input"),
        AssertionError("no out-of-memory events expected"),
    ]
    folded = [" ".join(formatted(error).split()) for error in errors]

    assert [read_message(text).is_oom for text in folded] == [False] * len(errors)


def test_a_traceback_on_its_lines_is_left_alone():
    text = formatted(RuntimeError("Allocation failed"))

    assert unfold_tracebacks(text) == text
