"""Sentences that begin as programs begin them, made of pieces, and their mirror."""

import itertools
import random

import pytest

from loaderkit.budget.diagnosis.judge import judge
from loaderkit.budget.diagnosis.messages import read_message

LABELS = (
    "",
    "ERROR: ",
    "RuntimeError: ",
    "[worker 3] ",
    "core.cc:211] ",
    "2025-02-11T08:30:00Z ERROR core: ",
    "terminate called after throwing an instance of 'Error'\n  what():  ",
)
TAILS = (
    "",
    "!",
    " for weights",
    " for the result",
    " in read_table",
    " while building the index",
    " (error 12)",
)
CANNOT = ("Failed to", "failed to", "Unable to", "Could not", "cannot", "Not able to")
MEMORY = (
    "memory",
    "GPU memory",
    "enough memory",
    "the memory",
    "4096 bytes",
    "512 MB of RAM",
    "a block of 4096 bytes",
)
CLAUSES = {
    "what cannot be had": (
        CANNOT,
        (" allocate ", " alloc ", " malloc ", " reserve ", " acquire ", " obtain "),
        MEMORY,
    ),
    "what could not be had": (
        ("Memory", "GPU memory", "4096 bytes", "A block of 4096 bytes"),
        (" could not be ", " cannot be ", " couldn't be "),
        ("allocated", "acquired", "reserved"),
    ),
    "an allocation and what became of it": (
        (
            "Memory allocation",
            "allocation of 4096 bytes",
            "cudaMalloc",
            "GPU memory allocation",
            "calloc of 8 MiB",
        ),
        (
            " failed",
            " has failed",
            " did not succeed",
            " was refused",
            " returned NULL",
            " returned a null pointer",
        ),
    ),
    "an error in what was done": (
        ("Error", "error", "Failure", "Trouble"),
        (" in ", " while ", " during "),
        ("allocating memory", "allocation of 4096 bytes", "malloc", "calloc"),
    ),
    "what there was too little of": (
        ("Not enough ", "insufficient ", "ran out of ", "Lack of ", "no more "),
        ("memory", "GPU memory", "heap space", "RAM"),
    ),
    "what was gone beyond": (
        ("Memory usage ", "process memory ", "RSS "),
        ("exceeded ", "has exceeded ", "went over "),
        ("the limit", "its memory limit", "the configured limit of 4 GiB"),
    ),
}
MADE = {
    name: ["".join(parts) for parts in itertools.product(LABELS, *pieces, TAILS)]
    for name, pieces in CLAUSES.items()
}


def drawn(texts, count=80):
    return random.Random(20).sample(texts, min(count, len(texts)))


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("name", CLAUSES)
def test_a_sentence_that_begins_with_what_failed_is_a_report(name):
    lost = [text for text in drawn(MADE[name]) if read_message(text).is_oom is not True]

    assert lost == []


FREE = ("Free memory", "available GPU memory", "Remaining memory")
LESS = (" is less than ", " smaller than ", " < ", " is below ", " is not enough for ")
NEEDED = ("the required ", "the requested ", "required buffer size ")


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("colon", [" ", ": ", " of "])
def test_what_is_free_is_compared_with_what_is_needed(colon):
    for free, less, needed in itertools.product(FREE, LESS, NEEDED):
        message = read_message(f"{free}{colon}300 MiB{less}{needed}712 MiB")

        assert (message.is_oom, message.free, message.requested) == (
            True,
            300 << 20,
            712 << 20,
        )


OTHER_THINGS = (
    "a port",
    "the lock",
    "a license",
    "a job id",
    "memory statistics",
    "memory attributes",
    "memory usage",
    "GPU memory info",
)


@pytest.mark.slow
def test_what_else_cannot_be_had_is_no_lack_of_memory():
    texts = [
        "".join(parts)
        for parts in itertools.product(
            LABELS, CANNOT, (" obtain ", " get ", " acquire "), OTHER_THINGS, TAILS
        )
    ]

    assert [text for text in drawn(texts, 250) if read_message(text).is_oom] == []


TOPICS = (
    "{} errors are common on small cards.",
    "{} usually happens in the first step.",
    "{} is returned when the heap is full.",
    "{} may occur.",
    "{} if the batch is too large.",
    'printf("{}\\n");',
    "// {}",
    'raise MemoryError("{}")',
    "If you see: {}",
    "| 12 | {} |",
    "What does {} mean?",
    "WARNING: {}, falling back to the CPU",
)
SAID = (
    "Failed to allocate memory",
    "Unable to allocate GPU memory",
    "Memory allocation failed",
    "Error allocating memory",
    "could not allocate a buffer",
)


@pytest.mark.parametrize("topic", TOPICS)
def test_the_same_words_as_a_topic_report_nothing(topic):
    taken = [said for said in SAID if read_message(topic.format(said)).is_oom]

    assert taken == []


@pytest.mark.parametrize(
    "text",
    [
        "Memory usage 3.2 GiB exceeds its limit of 3 GiB, spilling to disk",
        "Memory usage 3.2 GiB is over the limit of 3 GiB, evicting old entries",
        "test_large: skipping due to insufficient device memory",
        "Cannot grow the vector when external memory is used.",
        "Cannot add a reference before allocating any shared memory.",
        "Failed to open shared memory stats",
        "Cannot read pages in in-memory database",
        "job 3 lacks memory allocation details",
        "Could not create memory manager",
        "Failed to release the shared memory",
        "Error allocating aligned memory: invalid alignment",
        "Kernel needs too much parameter memory",
    ],
)
def test_what_goes_on_or_is_about_something_else_reports_nothing(text):
    assert read_message(text).is_oom is False


def test_a_comparison_says_how_much_is_missing():
    text = "Free memory 300 MiB on device 1 is less than the required 712 MiB"

    assert judge(read_message(text)).shortfall_bytes == 412 << 20


HEADLINES = (
    "CUDA out of memory",
    "GPU memory allocation failed",
    "Insufficient GPU memory",
)
AMOUNTS = {
    "requested": (
        "requested 712 MiB",
        "needs 712 MiB",
        "size: 712 MiB",
        "want 712 MiB",
        "tried to allocate 712 MiB",
    ),
    "free": (
        "free: 300 MiB",
        "300 MiB free",
        "avail=300MiB",
        "only 300 MiB available",
        "available 300 MiB",
    ),
    "limit": ("limit 4 GiB", "max 4 GiB", "quota 4 GiB", "allowed 4 GiB"),
}
SIZES = {"requested": 712 << 20, "free": 300 << 20, "limit": 4 << 30}


@pytest.mark.slow
def test_amounts_behind_a_headline_are_told_in_any_order():
    rows = list(itertools.product(HEADLINES, *AMOUNTS.values()))
    orders = list(itertools.permutations(range(len(AMOUNTS))))
    wrong = []
    for number, (headline, *amounts) in enumerate(drawn(rows, 150)):
        order = orders[number % len(orders)]
        text = f"{headline}: {', '.join(amounts[place] for place in order)}"
        message = read_message(text)
        if any(getattr(message, role) != size for role, size in SIZES.items()):
            wrong.append(text)

    assert wrong == []


ENDED = (
    "was killed",
    "has been terminated",
    "exited",
    "was restarted",
    "died",
)
REASONS = (
    "due to memory pressure",
    "for exceeding its memory limit of 4 GiB",
    "because it used too much memory",
    "(out of memory)",
    "due to low memory",
)


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("label", [*LABELS, "WARN executor: "])
def test_what_was_ended_for_its_memory_is_told_at_any_level_of_a_log(label):
    texts = [
        f"{label}{subject} {end} {reason}"
        for subject in ("Worker 3", "Job 12", "process 4411")
        for end in ENDED
        for reason in REASONS
    ]

    assert [text for text in texts if read_message(text).kind is None] == []


@pytest.mark.parametrize("label", LABELS)
def test_running_out_in_the_midst_of_an_allocation_is_a_report(label):
    texts = [
        f"{label}{said}"
        for said in (
            "Out of memory when allocating a buffer for the text",
            "out of memory while growing the table",
            "Out of memory when gamma is acquired in LayerNorm",
            "A row needs 8213 bytes, which exceeds the largest buffer of 6875 bytes",
        )
    ]

    assert [text for text in texts if read_message(text).is_oom is not True] == []
