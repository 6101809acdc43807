"""Laws of classes of messages: each is read in all of its words, and so is its mirror.

The words were written for the class and not taken from any text: what something failed
for, what it was refused for, what its user is asked to do, where a program logs from;
and as mirrors what says the same words and reports nothing.
"""

import itertools

import pytest

from loaderkit.budget.diagnosis.messages import read_message

PHRASES = (
    "out of memory",
    "insufficient memory",
    "not enough memory",
    "memory limit exceeded",
    "memory quota exhausted",
)
CALLS = ("ngx_slab_alloc()", "kmalloc", "alloc_skb()", "pcap_open", "create_queue")


def _joined(*parts):
    return ["".join(words) for words in itertools.product(*parts)]


CLASSES = {
    "no memory as a reason": _joined(
        ("", "[crit] 771#771: ", "error: "),
        CALLS,
        (" failed: ", " failed - ", " error: "),
        ("no memory", "no memory for 64 bytes", "no memory available"),
    ),
    "what the user is asked to do behind it": _joined(
        ("", "error: "),
        PHRASES,
        (
            ", please allocate more resources",
            "; please increase the limit",
            ". Please reduce the batch size.",
            " (please close other programs)",
        ),
    ),
    "refused for it": _joined(
        ("load denied", "query cancelled", "launch failed", "allocation denied"),
        (": ", " - "),
        PHRASES,
    ),
    "a log that names its source": _joined(
        (
            "[E 04/13/20 22:57:47.637] [cuda_driver.h:operator()@66] ",
            "[mem.cc:alloc()@12] ",
            "(core.rs:114) ",
            "main.cpp(212): ",
        ),
        (
            "CUDA Error CUDA_ERROR_OUT_OF_MEMORY: out of memory while calling malloc",
            "RuntimeError: out of memory while loading weights",
            "failed to allocate 2048 MB",
            "Not enough memory to load model",
        ),
    ),
    "a heap that cannot grow": _joined(
        ("cannot", "could not", "unable to", "failed to"),
        (" extend", " grow", " expand", " enlarge"),
        (" the heap", " the memory pool", " its arena"),
        (" any further", " by 4096 bytes", ": Cannot allocate memory"),
    ),
}
MIRRORS = {
    "no memory in other senses": _joined(
        CALLS, (" needs no memory", " takes no memory", " failed: no such file")
    ),
    "settings of memory": _joined(
        ("import refused", "query cancelled", "job cancelled", "build stopped"),
        (": memory_limit is not set", ": memory limit must be a number"),
    ),
    "a comment above a statement": _joined(
        ("    # ", "    // "),
        ("Not enough VRAM", "out of memory", "Pool memory exhausted"),
        (", wait and retry\n    ", ": evict and loop\n    ", "\n    "),
        ("stop_event.wait(1.0)", "return False", "evict(n)"),
    ),
    "an arm of a switch": _joined(
        ("Level.NotCompatible", "Error::Memory", "137"),
        (' => "Not enough VRAM"', ' => "Process was killed: memory limit exceeded"'),
        (',\n_ => "Unknown"',),
    ),
    "a choice between texts": _joined(
        ("const e = s.oomKilled ? ", "const e = s.oomKilled\n    ? "),
        ("'Process was killed: memory limit exceeded'", "'CUDA out of memory'"),
        (" : null;", " : state.error;"),
    ),
    "titles about wordings": _joined(
        ("Add ",),
        ('"failed to allocate memory"', '"out of memory"'),
        (" to the list of strings that signify not enough ram", " to the patterns"),
    ),
}


@pytest.mark.parametrize("name", CLASSES)
def test_every_message_of_a_class_is_read(name):
    unread = [text for text in CLASSES[name] if read_message(text).is_oom is False]

    assert unread == []


@pytest.mark.parametrize("name", MIRRORS)
def test_what_has_the_same_words_reports_nothing(name):
    taken = [text for text in MIRRORS[name] if read_message(text).is_oom is not False]

    assert taken == []


@pytest.mark.parametrize("words", ["insufficient", "not enough", "too little"])
@pytest.mark.parametrize("thing", ["", "a ", "another "])
def test_what_memory_is_insufficient_for_was_requested(words, thing):
    message = read_message(f"fatal: {words} memory for {thing}64 MiB buffer")

    assert message.requested == (64 << 20 if thing != "another " else None)


def test_the_parameters_of_a_model_are_no_amount():
    text = "InsufficientVRAMError: model 'llama-70b' requires 42 GiB, 23 GiB available"

    message = read_message(text)

    assert (message.requested, message.free) == (42 << 30, 23 << 30)
