"""What stands in public threads is read: errors among their writers' sentences."""

import itertools
import re
from dataclasses import replace

import pytest
from reported_messages import LATER, RAN_OUT

from loaderkit.budget.diagnosis.messages import read_message


def _with_class_and_figures():
    """Messages in one line that begin with a class and have figures of their own."""
    figures = re.compile(r"(?<![\w.,])\d{5,}(?![\w-])|\d ?[KMGT]i?B\b")
    for report in (*RAN_OUT, *LATER):
        text = report.text
        is_short = 30 < len(text) < 400 and "\n" not in text
        if report.is_oom is not True or not is_short or set(text) & set('`"\u201c'):
            continue
        if re.match(r"[\w.]*(?:Error|Exception|error): ", text) and figures.search(
            text
        ):
            yield text


ERRORS = list(itertools.islice(_with_class_and_figures(), 0, None, 6))

CAME_UP = (
    "When I train with batch size 64, I get this error `{}` Any idea how to fix it?",
    "I would like to fit a model but get this error: `{}`\n\nCan I avoid it?",
    "Training works at first, but then it crashes with `{}` and I don't know why.",
    'When I increase the size, it fails due to memory problems: "{}". It comes late.',
    'Hi all! I decided to test models and encountered the error "{}"\n\nWhat is it?',
    'I am getting this error "{}" after running it and do not know how to solve it.',
    "The script stops after 3 epochs with \u201c{}\u201d, even though memory is free.",
    "If I use more than 4 workers, it throws `{}` on my machine.",
)
IS_SPOKEN_OF = (
    "If you get the error `{}`, reduce the batch size.",
    "You may see `{}` when the batch is too large.",
    "This should not fail with `{}` any more.",
    "Handle `{}` by halving the batch.",
    "To avoid `{}`, lower the resolution.",
    "The test checks that it raises `{}` for huge shapes.",
    "Users often get `{}` on small cards.",
    "Instead of `{}` it now prints a hint.",
    "Improve the message `{}` so that it names the shape.",
)


UNMARKED = (
    "I am training on two cards, but I always encounter the {}",
    "When I train with batch size 64 I get {}",
    "After an update the script stops with {}\n\nWhat can I do?",
    "Sometimes it fails with {}",
)
"""Before an error without marks around it, as far as its line goes."""
UNMARKED_AND_SPOKEN_OF = (
    "If you encounter the {}",
    "You may get {}",
    "To avoid {}",
    "This should not raise {}",
    "The docs say that it raises {}",
    "This PR handles {}",
    "we no longer get {}",
    "The test expects that it throws {}",
)


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("frame", UNMARKED)
def test_an_error_behind_a_persons_clause_is_one(frame):
    lost = [text for text in ERRORS if not read_message(frame.format(text)).is_oom]

    assert lost == []


@pytest.mark.parametrize("frame", UNMARKED_AND_SPOKEN_OF)
def test_an_error_behind_a_clause_that_hedges_is_none(frame):
    taken = [text for text in ERRORS if read_message(frame.format(text)).is_oom]

    assert taken == []


@pytest.mark.parametrize("line_end", ["\n", " \n", "\r\n"])
def test_the_sentences_of_an_allocator_can_stand_on_lines(line_end):
    message = (
        "HIP out of memory. Tried to allocate 66.54 GiB.",
        "GPU 0 has a total capacity of 96.00 GiB of which 10.75 GiB is free.",
        "Of the allocated memory 84.36 GiB is allocated by PyTorch,",
        "and 360.11 MiB is reserved by PyTorch but unallocated.",
    )

    read = read_message(line_end.join(message))
    assert replace(read, raw="") == replace(read_message(" ".join(message)), raw="")
    assert read.allocated == round(84.36 * 2**30)


def test_an_error_that_is_cut_behind_a_bracket_is_one():
    error = "Error: unable to mmap 4965799096 bytes from m.bin: Cannot allocate memory"

    assert read_message(f"I get this:\n\nIt failed with {error} (").is_oom is True


def test_a_job_that_is_sometimes_killed_was_killed():
    log = "slurmstepd: Step 4717680.0 exceeded memory limit (8414616 > 8388608)"
    intro = "but sometimes it gets killed with the following message:\n```\n"

    assert read_message(f"It works, {intro}{log}, being killed").is_oom is True
    hedged = f"Your job, {intro}{log}, being killed"
    assert read_message(hedged.replace("it gets", "it can get")).is_oom is False


MENTIONED = (
    "**Expected:** a pod above its limit ends with `reason: OOMKilled`, exit code 137.",
    "Running out of GPU memory is the most common error of beginners.",
    "CUDA out of memory is by far the most frequent failure in this course.",
    "- [Fixing CUDA out of memory](docs/memory.md)\n- [Wrong shapes](docs/shapes.md)",
    "tags: cuda, out of memory, batch size",
    "Related: [CUDA out of memory, OOMKilled, exit code 137]",
    "Related: CUDA out of memory, OOMKilled, exit code 137",
    "graph TD\n  A[Step] --> B{CUDA out of memory?}\n  B -->|yes| C[Halve the batch]",
    "**OOMKilled** \u2014 the kernel ended a container above its memory limit.",
    "- no `CUDA out of memory` in the log\n- loss below 0.3",
    "OOM kills: 0\nrestarts: 0\nuptime: 4d",
    '- [ ] Check dmesg for "Out of memory: Killed process"',
    "Confirm that the pod was OOMKilled with kubectl describe.",
    "# Checking for JavaScript heap out of memory in the build's log",
    "With a batch of 512 it will cause CUDA out of memory on most cards.",
    "MemoryStore: block 7 stored as values in memory, reserving 3.2 GiB",
    "When CUDA is out of memory the batch is halved automatically.",
    "Error writing checkpoint file /ckpt/m.tmp: Resource exhausted: /ckpt/m.tmp",
)


@pytest.mark.parametrize("text", MENTIONED)
def test_guides_lists_and_plans_report_nothing(text):
    assert read_message(text).is_oom is False


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("frame", CAME_UP)
def test_an_error_that_somebody_quotes_as_what_came_up_is_one(frame):
    assert len(ERRORS) > 20
    lost = [text for text in ERRORS if not read_message(frame.format(text)).is_oom]

    assert lost == []


@pytest.mark.parametrize("frame", IS_SPOKEN_OF)
def test_an_error_that_is_only_spoken_of_is_none(frame):
    taken = [text for text in ERRORS if read_message(frame.format(text)).is_oom]

    assert taken == []


ALLOCATIONS = (
    "failed to allocate 41644.01 MiB of pinned memory: {}",
    "cudaMalloc of size 1073741824 failed: {}",
    "ggml_cuda_host_malloc: failed to allocate 0.49 MiB of pinned memory: {}",
    "RuntimeError: failed to allocate GPU memory: {}",
    "CUDA allocation failed: {}",
    "cudaMallocAsync failed ({})",
    "Error allocating 512 MB on device 0: {}",
    "could not allocate 2 GiB of device memory - {}",
    "cudaHostAlloc failed: {}",
    "hipHostMalloc failed ({})",
    "unable to allocate page-locked memory: {}",
    "failed to allocate 512 MiB on host: {}",
    "failed to pin memory: {}",
)
NO_LACK = (
    "no CUDA-capable device is detected",
    "no ROCm-capable device is detected",
    "CUDA driver version is insufficient for CUDA runtime version",
    "initialization error",
    "an illegal memory access was encountered",
    "unspecified launch failure",
    "device-side assert triggered",
    "no kernel image is available for execution on the device",
    "device kernel image is invalid",
    "invalid device ordinal",
    "misaligned address",
    "driver shutting down",
    "Operation not permitted",
    "Permission denied",
    "peer access is not supported between these two devices",
)


@pytest.mark.slow
def test_an_allocation_that_failed_for_another_reason_is_no_lack_of_memory():
    texts = [a.format(reason) for a in ALLOCATIONS for reason in NO_LACK]

    assert [text for text in texts if read_message(text).is_oom is not False] == []


@pytest.mark.parametrize(
    "reason", ["out of memory", "Cannot allocate memory", "ENOMEM"]
)
def test_an_allocation_that_failed_for_want_of_memory_is_one(reason):
    texts = [allocation.format(reason) for allocation in ALLOCATIONS]

    assert [text for text in texts if read_message(text).is_oom is not True] == []


TOPICS = ("OOMKilled", "Out of Memory", "Cannot Allocate Memory", "CUDA out of memory")
GUIDES = (
    "- [{}](../pods/page.md)\n- [Pending](../pods/pending.md)",
    "See also [{}](./page.md) \u00b7\n[Pending](./pending.md)",
    'tags: [pods, "{}", limits]',
    'related: ["{}", "Pod Evicted"]',
    "flowchart TD\n    A[Pod failed] --> B{{exit code?}}\n    B -- 137 --> C[{}]",
    "- A bug or an exception at the start\n- {} on each attempt\n- A missing secret",
    "**Result**: no entries. No `{}`, no warnings.",
    "Events found:\n  - {}:      0\n  - Any event at all:      0",
    "Check whether `{}` is the reason and raise the limit.",
    "Expected: a killed container reports `{}` in its status.",
)


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_that_names_an_error_reports_none(guide):
    texts = [guide.format(topic) for topic in TOPICS]

    assert [text for text in texts if read_message(text).is_oom is True] == []


@pytest.mark.parametrize("word", ["program", "histogram", "diagram", "telegram"])
def test_words_that_end_like_memory_are_none(word):
    text = f"error (200): {word} aborting due to window-CLOSE event"

    assert read_message(text).is_oom is False
