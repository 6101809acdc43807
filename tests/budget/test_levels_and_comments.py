"""Laws of levels of logs, commented code, titles, soft limits and unread figures.

The level of a log stands for the label of an error.  An error in a comment above code
that is commented out was not printed now.  What a person says of an error, that memory
was free for example, is a title and no output.  Memory that goes beyond a soft limit or
a water mark was not refused.  A figure about memory that cannot be read is no memory,
and the shared memory of a GPU's kernel is not the host's.  Each class is drawn from
products of words that were written for it, and has a mirror of the same words where
they report.
"""

import itertools
import random
import textwrap

import pytest

from loaderkit.budget.diagnosis.messages import read_message

DRAWN = 120
"""Texts of a class, of up to 2,000: reading them takes 0.1 s."""


def products(*parts):
    texts = ["".join(words) for words in itertools.product(*parts)]
    return random.Random(1).sample(texts, min(DRAWN, len(texts)))


IN_THE_PRESENT = products(
    ("memory usage", "heap usage", "GPU memory usage", "requested memory", "the RSS"),
    (" exceeds ", " is above ", " is over ", " is larger than "),
    ("the limit", "its limit", "available memory", "the quota", "the budget"),
)
BODIES = [
    *IN_THE_PRESENT,
    *("the index does not fit in memory", "the model can't fit on the GPU"),
    *("a batch of 64 did not fit into device memory", "port 80 is in use"),
    "password authentication failed",
    *("task allocation failed", "memory module 2 has errors", "CUDA out of memory"),
]
ERROR_LEVELS = (
    *("FATAL: ", "CRITICAL: ", "ERROR: ", "ERROR - ", "[ERROR] ", "FATAL | "),
    *("2026-01-03 12:00:00 CRITICAL: ", "E0103 12:00:00.1 77 pool.cc:12] "),
    *("2026-01-03 12:00:00,123 - acme.pool - ERROR - ", "ERROR:acme.pool:"),
)


@pytest.mark.slow
@pytest.mark.parametrize("level", ERROR_LEVELS)
def test_the_level_of_an_error_reads_as_its_label(level):
    changed = [
        body
        for body in BODIES
        if read_message(level + body).is_oom != read_message(f"error: {body}").is_oom
    ]

    assert changed == []


@pytest.mark.parametrize("level", ["FATAL: ", "ERROR - ", "12:00:00 CRITICAL: "])
def test_an_error_whose_level_is_on_each_of_its_lines_reads_as_one_line(level):
    whole = "memory usage of the parameter server exceeds the configured limit"
    for width in range(30, 60):
        text = "\n".join(level + line for line in textwrap.wrap(whole, width))

        assert read_message(text).is_oom is True


@pytest.mark.parametrize("level", ["WARNING: ", "INFO: ", "[WARN] ", "DEBUG - ", ""])
def test_other_levels_make_no_error(level):
    taken = [body for body in IN_THE_PRESENT if read_message(level + body).is_oom]

    assert taken == []


ERRORS = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
    "CUDA error: out of memory",
    "numpy: Unable to allocate 7.28 TiB for an array with shape (1000000, 1000000)",
    "RuntimeError: MPS backend out of memory",
)
CODE = (
    *("model = load(path)", "x = x.to(device)", "train(model, loader)", "return x"),
    *("loader = DataLoader(data, batch_size=512)", "size = 32", "del batch;"),
)
COMMENTED_OUT = [
    f"{mark} {error}\n{mark} {code}"
    for mark in ("#", "//", "--")
    for error in ERRORS
    for code in CODE
]


def test_an_error_above_code_that_is_commented_out_is_none():
    taken = [text for text in COMMENTED_OUT if read_message(text).is_oom is not False]

    assert taken == []


@pytest.mark.parametrize("below", ["epoch 3 ended", "exiting now", "Killed", ""])
def test_an_error_that_a_program_prints_behind_a_mark_is_one(below):
    lost = [
        error
        for error in ERRORS
        if read_message(f"# {error}\n# {below}").is_oom is not True
    ]

    assert lost == []


SUBJECTS = (
    *("CUDA out of memory", "GPU out of memory", "MPS backend out of memory"),
    *("Out of memory", "NPU out of memory error", "CUDA OOM"),
)
ARGUED = (
    *(" even though I have 40 GB free?", " even though 40 GB are free"),
    *(" despite having a lot of free GPU memory", " despite plenty of VRAM"),
    *(" although nvidia-smi shows 20 GB available", " in spite of free memory"),
    *(" but nvidia-smi shows 20 GB free", ", but there is enough memory"),
    *(" with plenty of memory left", " while lots of memory is unused"),
    *(" even with batch size 1", " even on an A100", " even for a tiny batch"),
)
TITLES = {
    "what argues with an error": products(
        ("", "[Bug] ", "[Question]: "), SUBJECTS, ARGUED
    ),
    "what a person meets": products(
        ("", "[Bug]: ", "Still ", "Keep "),
        ("getting", "seeing", "hitting"),
        (" ", " a "),
        SUBJECTS,
        ("", " on Colab", " after an hour"),
    ),
    "what goes on": products(
        ("", "[Bug]: "),
        ("Running out of memory", "running out of GPU memory"),
        (" during validation", " on a 3090", " when training", " with 8 workers"),
    ),
}
TOLD_BY_PROGRAMS = [
    *("CUDA out of memory: 2.00 GiB requested but only 1.00 GiB available",),
    *("GPU out of memory even after freeing cached blocks",),
    *("out of memory: 712 MiB requested, 300 MiB free",),
    *("CUDA out of memory. Tried to allocate 2.00 GiB with 1.00 GiB free",),
    *("error: out of memory with 12 workers", "ran out of memory on device 0"),
]


@pytest.mark.parametrize("texts", TITLES.values(), ids=TITLES)
def test_what_a_person_says_of_an_error_is_none(texts):
    taken = [text for text in texts if read_message(text).is_oom is not False]

    assert taken == []


def test_a_title_above_the_error_that_it_tells_of_does_not_hide_it():
    titles = [title for texts in TITLES.values() for title in texts[:20]]
    lost = [
        title
        for title in titles
        if read_message(f"{title}\n\n{ERRORS[0]}").is_oom is not True
    ]

    assert lost == []


@pytest.mark.parametrize("text", TOLD_BY_PROGRAMS)
def test_what_a_program_adds_to_an_error_leaves_it_one(text):
    assert read_message(text).is_oom is True


SOFT_LIMITS = products(
    ("", "WARNING: ", "warn: ", "[cache] ", "ERROR: "),
    ("memory usage", "resident memory 3.1 GiB", "the heap"),
    (" exceeded ", " exceeds ", " is above "),
    ("the ", "its "),
    ("soft limit", "soft memory limit", "high watermark", "warning threshold"),
    (" of 3.0 GiB", " (3.0 GiB)", ""),
)
ENDED = ("; killing worker 3", ", process terminated", " and the job was aborted")


def test_what_exceeds_a_soft_limit_was_not_refused():
    taken = [text for text in SOFT_LIMITS if read_message(text).is_oom is not False]

    assert taken == []


@pytest.mark.parametrize("ended", ENDED)
def test_what_was_ended_for_a_limit_was_refused(ended):
    for limit in ("soft memory limit", "memory limit", "hard memory limit"):
        text = f"worker 3 exceeded its {limit} of 3.0 GiB{ended}"

        assert read_message(text).is_oom is True


STACKS = products(
    ("", "error: ", "fatal error: ", "runtime: "),
    (
        *("goroutine stack exceeds 1000000000-byte limit", "stack overflow"),
        *("thread stack size exceeded (8 MiB)", "stack depth limit exceeded"),
        *("call stack exceeds its limit of 1 MiB", "main has overflowed its stack"),
    ),
)
VERSIONS = products(
    ("v2.3.1: ", "2.3.1: ", "v2.3 (2026-01-03): ", "[2.3.0] - "),
    ("raised the heap to 4 GiB", "increased the pool", "added a limit", "moved w"),
    (", since ", " because "),
    ("builds ran out of memory", "the worker exceeded its memory limit of 2 GiB"),
)
ON_MACHINES = products(
    ("10.0.0.3: ", "worker 2.3: ", "node 12: "),
    ("raised MemoryError", "out of memory", "exceeded its memory limit of 2 GiB"),
)


@pytest.mark.parametrize("texts", [STACKS, VERSIONS], ids=["stacks", "versions"])
def test_a_stack_of_calls_and_a_versions_changes_are_none(texts):
    taken = [text for text in texts if read_message(text).is_oom is not False]

    assert taken == []


def test_what_a_machine_says_is_no_versions_change():
    lost = [text for text in ON_MACHINES if read_message(text).is_oom is not True]

    assert lost == []


FIGURES = (
    *("the job's oom_kill counter", "memory commit limit on this machine"),
    *("memory health indicator", "the shared memory size", "GPU memory usage"),
    *("memory info", "memory.events file", "the memory limit of the cgroup"),
    *("memory statistics", "memory clock", "the size of host memory"),
)
SHARED_BY_A_KERNEL = products(
    ("", "error: ", "Kokkos::ParallelFor< Cuda > ", "kernel launch failed: "),
    (
        *("shared memory request is too large", "too much shared memory requested"),
        *("uses too much shared data (0x10100 bytes, 0xc000 max)",),
        "not enough shared memory for the kernel",
    ),
)
UNREAD = products(
    ("", "error: ", "ERROR: ", "[12] "),
    (
        *("Cannot read ", "Could not determine ", "failed to get ", "cannot open "),
        *("Unable to query ", "error while reading ", "Failed to retrieve "),
    ),
    FIGURES,
)
WHY_UNREAD = products(
    ("", "error: "),
    (
        *("Cannot read the model: ", "could not open part 3: "),
        *("failed to parse the header, ", "Unable to fetch a batch: "),
    ),
    (
        *("out of memory", "cannot allocate memory", "std::bad_alloc"),
        *("not enough memory for 2 GiB", "failed to allocate 2 GiB"),
    ),
)
NOT_OBTAINED = products(
    ("", "error: "),
    ("Cannot get ", "could not obtain ", "failed to reserve ", "Unable to acquire "),
    ("2 GiB of memory", "enough memory", "memory for the result", "memory"),
)


@pytest.mark.parametrize("texts", [UNREAD, SHARED_BY_A_KERNEL], ids=["read", "kernel"])
def test_a_figure_or_a_kernels_shared_memory_is_no_memory_of_ours(texts):
    taken = [text for text in texts if read_message(text).is_oom is not False]

    assert taken == []


@pytest.mark.parametrize("texts", [WHY_UNREAD, NOT_OBTAINED], ids=["why", "memory"])
def test_what_was_not_read_for_want_of_memory_is_a_report(texts):
    lost = [text for text in texts if read_message(text).is_oom is not True]

    assert lost == []
