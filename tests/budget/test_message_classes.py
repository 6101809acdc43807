"""Laws of classes of messages: each is read in all of its words, and so is its mirror.

The words were written for the class and not taken from any text: what something failed
for, what it was refused for, what its user is asked to do, where a program logs from;
and as mirrors what says the same words and reports nothing.
"""

import gettext
import itertools
import random
from pathlib import Path

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
    "a process that was killed, in any words": _joined(
        ("The command '/bin/sh -c make all' ", "step 3 "),
        ("returned a ", "exited with ", "finished with ", "died with a "),
        ("non-zero code", "exit status", "return code", "status"),
        (": ", " ", " = "),
        ("137", "-9"),
    ),
    "a program of a build that was killed": [
        "make: *** [Makefile:12: all] Error 137",
        "make[1]: *** [all] Killed",
        "make: *** [obj/a.o] Signal 9",
        "gmake: *** [x] Killed: 9",
        "ninja: build stopped: subcommand failed: Killed",
        "error: Recipe `build` was terminated on line 3 by signal 9",
        "npm ERR! signal SIGKILL",
    ],
    "a piece that is too large": _joined(
        ("RangeError: createBuffer failed, ", "Error: createTexture failed: "),
        ("size is", "size (4294967296) is", "allocation of 4 GiB is"),
        (" too large for the ",),
        ("implementation", "device", "GPU"),
    ),
    "what Python shows of an error": _joined(
        ("RuntimeError(", "torch.OutOfMemoryError(", "raised MemoryError("),
        ("'CUDA out of memory. Tried to allocate 2.00 GiB')",),
    ),
    "trouble that it had": _joined(
        ("init_array: ", "error: "),
        ("trouble ", "difficulty ", "had trouble "),
        ("allocating memory", "allocating 64 MB", "reserving 2 GiB of memory"),
        ("\nsize = 12345678", " for the buffer"),
    ),
    "an array that is too large": _joined(
        ("Requested 90816x90816 (61.4GB) array ",),
        ("exceeds ", "exceeded "),
        ("the ", "the preset ", "preset ", ""),
        ("maximum array size preference.", "maximum array size (31.9GB)."),
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
    "trouble that somebody has": _joined(
        ("If you have trouble ", "Users who had difficulty ", "He has trouble "),
        ("allocating memory", "allocating 64 MB"),
        (", lower the limit.", "."),
    ),
    "what an error is": _joined(
        ("OOMKilled is ", "CUDA out of memory is ", "An out of memory error is "),
        ("the kernel killing a container", "what happens with large batches"),
        (".", " that used too much memory."),
    ),
    "what a status is likely due to": _joined(
        ("The exit code 137 is ", "Exit code `137` is "),
        ("likely due to ", "nearly always ", "most likely caused by "),
        ("an out-of-memory error.", "the system running out of memory."),
    ),
    "a process that ended otherwise": _joined(
        ("The command '/bin/sh -c make all' ", "make: *** [all] "),
        ("returned a code: ", "exit status ", "Error "),
        ("1", "139", "-11", "1370"),
    ),
    "a program of a build that was stopped": [
        "make[1]: *** [all] Terminated",
        "make: *** [obj/a.o] Signal 11",
        "ninja: build stopped: subcommand failed.",
        "npm ERR! signal SIGTERM",
    ],
    "what else is too large": _joined(
        ("RangeError: parse failed, ", "Error: upload failed: "),
        ("file is", "value is", "the body is"),
        (" too large for the ",),
        ("request", "column", "index"),
    ),
    "hedges in another language": _joined(
        ("如果 CUDA ", "可能会触发 ", "为了避免 ", "显存不足时会"),
        ("out of memory", "OOM"),
        ("\uff0c请减小 batch size", ""),
    ),
    "a field of a literal": _joined(
        ('\t\t\tmessage:   "', '\t\tline: "', '\t\t"'),
        (
            "Out of memory: Killed process 9876 (nginx).",
            "cudaMalloc failed: out of memory",
        ),
        ('",',),
    ),
    "a call in Go": _joined(
        ('\terr := errors.New("', '\tt.Fatalf("', '\tfmt.Fprintf(w, "'),
        ("cudaMalloc failed: out of memory", "out of memory"),
        ('")', '")\n\treturn nil'),
    ),
    "a call whose text begins with a break": _joined(
        ("    void* const p = malloc(size);\n", "    char *p = get(size, 1);\n"),
        ('    if (!p) { DISPLAY("', '    if (p == NULL) LOG("'),
        (r"\nError: not enough memory!", r"\n\nError: out of memory"),
        (
            '\\n"); return 12; }\n\n    /* next */',
            '\\n");\n    free(p);\n    return 12;',
        ),
    ),
    "a call whose text stands below it": _joined(
        ("\tif (addr == NULL) {\n\t\twrite_log(\n\t\t    ",),
        (
            '"<lib>: Cannot allocate memory for "',
            '"<lib>: Memory allocation failure in "',
        ),
        ('\n\t\t    "the check\\n");', '\n\t\t    "epoch\\n");\n\t\treturn;'),
    ),
    "a constant": _joined(
        ("  ", "/// - "),
        ("VK_ERROR_OUT_OF_DEVICE_MEMORY", "hipErrorOutOfMemory"),
        (" = 2", " = hipError_t.define('x', 2)", " = -2,"),
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


@pytest.mark.parametrize("rest", ["left ", "available ", "remaining ", ""])
@pytest.mark.parametrize("aim", ["to map", "to create a", "for", "to hold"])
def test_what_memory_is_left_for_was_requested(rest, aim):
    message = read_message(f"Error: not enough memory {rest}{aim} 64 MiB")

    assert message.requested == 64 << 20


CATALOGUES = sorted(Path("/usr/share/locale").glob("*/LC_MESSAGES/libc.mo"))
"""The C library's own words, where the machine has other languages."""
OTHER_LANGUAGES = {
    "ja": ("強制終了", "メモリを確保できません"),
    "zh_CN": ("已杀死", "无法分配内存"),
    "de": ("Getötet", "Nicht genügend Hauptspeicher verfügbar"),
    "fr": ("Processus arrêté", "Ne peut allouer de la mémoire"),
}


def _said_by_the_library():
    words = dict(OTHER_LANGUAGES)
    for path in CATALOGUES:
        with path.open("rb") as catalogue:
            say = gettext.GNUTranslations(catalogue).gettext
        words[path.parts[-3]] = (say("Killed"), say("Cannot allocate memory"))
    return words.values()


def test_what_a_system_says_in_its_language_is_read():
    for killed, no_memory in _said_by_the_library():
        for text in (
            f"[1]+  {killed}                  python t.py",
            f"loss 1\n{killed}",
        ):
            assert read_message(text).kind == "killed", text
        for text in (f"fork: {no_memory}", f"OSError: [Errno 12] {no_memory}"):
            assert read_message(text).is_oom is True, text


BEGINNINGS = (
    *("If", "Whenever", "Every time", "Suppose that", "To understand why"),
    *("A common reason is that", "Users report that", "I wonder whether"),
    *("In theory", "Sometimes", "For large batches", "On a small card", "Under load"),
)
EVENTS = (
    "runs out of GPU memory after 12 epochs",
    "exceeds its memory limit of 12 GiB",
    "needs more than 12 GiB of memory",
    "raises CUDA out of memory",
)
ENDINGS = (".", ", so use a smaller batch.", ", which takes 4 GiB.")
PROSE = _joined(BEGINNINGS, (" the trainer ", " a worker "), EVENTS, ENDINGS)


def test_prose_about_exhaustion_reports_nothing():
    taken = [text for text in PROSE if read_message(text).is_oom is not False]

    assert taken == []


def test_a_page_of_prose_about_exhaustion_reports_nothing():
    chance = random.Random(1)
    page = " ".join(chance.choice(PROSE) for _ in range(800))

    assert read_message(page).is_oom is False
    assert read_message(f"{page}\n\nMemoryError: Unable to allocate 3 GiB").is_oom
