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
    "runs of things": _joined(
        ("Browser-run execution ", "Test run ", "Job run at node42 "),
        ("exceeded its memory limit.", "exceeded its memory limit of 512 MB."),
    ),
    "weights that leave no memory": _joined(
        ("ValueError: ",),
        ("loaded weights leave no ", "the model left no "),
        ("GPU memory ", "free memory ", "room in GPU memory "),
        ("for the KV cache", "for activations"),
    ),
    "an abort that JavaScript tells": _joined(
        ("Uncaught ", ""),
        ('abort("OOM") at ', "abort('Cannot enlarge memory arrays') at "),
        ("jsStackTrace@https://a.org/b.js:9:22", "Error"),
    ),
    "a constant and where": _joined(
        ("ERROR: ", ""),
        ("CL_OUT_OF_HOST_MEMORY", "VK_ERROR_OUT_OF_DEVICE_MEMORY"),
        ("\nLocation: /home/a/b.cpp:115\nFailed clCreate", "\nFile: /a/b.cpp:12"),
    ),
    "a node that lacks memory": _joined(
        ("", "Pod ", "4m7s  Warning  Evicted  pod/a-7   "),
        ("The node had condition: [",),
        ("MemoryPressure", "DiskPressure, MemoryPressure"),
        ("].", "]. "),
    ),
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
    "no piece that is large enough": _joined(
        ("panicked at pool.rs:156: ", "RuntimeError: ", "error: "),
        ("no memory pool", "no free block", "no contiguous region", "no heap"),
        (" big enough", " large enough"),
        (" to reserve 262144000 bytes", " to hold 4096 bytes of memory"),
    ),
    "no room in what holds memory": _joined(
        ("AssertionError: ", "fatal: "),
        ("insufficient space in ", "not enough room in ", "no more space in "),
        ("device allocation", "the scratch buffer", "the tensor arena", "GPU memory"),
    ),
    "a store that is full": _joined(
        ("PlasmaStoreFull: ", "ObjectStoreFullError: "),
        ("object", "the object", "the batch"),
        (" does not fit in ", " did not fit into ", " cannot fit in "),
        ("the plasma store", "the object store"),
    ),
    "a program in the first person": _joined(
        ("thread 1 panic: ", "fatal: ", "Assertion error: "),
        ("we ran out of ", "We have run out of "),
        ("memory", "scratch memory", "GPU memory", "video memory"),
        (".", "!!!"),
    ),
    "what a program did meanwhile": _joined(
        ("RuntimeError: CUDA out of memory", "fatal: GPU out of memory"),
        (" while ",),
        ("loading", "allocating", "rendering", "compiling", "decoding"),
        (" the model", " a tile buffer for frame 1047", " weights", " shader 3."),
    ),
    "what a driver has encountered": _joined(
        ("The NVIDIA OpenGL driver ", "This application ", "The Acme plugin "),
        ("has encountered ", "encountered ", "has reported ", "failed with "),
        ("an out of memory error.", "an out of memory error. It may fail."),
    ),
    "what the kernel's allocators could not give": _joined(
        ("[drm:vc4_bo_create] *ERROR* ", "[drm] *ERROR* ", "kernel: error: "),
        (
            "Failed to allocate from CMA:",
            "Could not allocate from GTT",
        ),
    ),
    "an assertion in stars": _joined(
        ("*** Assertion failure in -[Wave read:], ", "*** ERROR *** "),
        ("Could not allocate memory for the buffer", "out of memory"),
    ),
    "what something failed to do, in words of advice": _joined(
        ("Failed to ", "Unable to ", "Error: cannot "),
        ("set device: ", "prevent eviction: ", "reduce the tensor: "),
        ("CUDA error at pool.cc:41: ",),
        ("out of memory", "failed to allocate device memory"),
    ),
}
MIRRORS = {
    "an arm of a choice": _joined(
        ("Err(", "case e: ", "catch "),
        ("OutOfMemoryError", "AllocError::OutOfMemory", "CUDA_ERROR_OUT_OF_MEMORY"),
        (" => {\n    return retry();\n}", " => retry(),", ") => None,"),
    ),
    "a tuple of classes": _joined(
        ("OOM_ERRORS = ", "RETRY_ON = "),
        ("(torch.cuda.OutOfMemoryError, MemoryError)", "[MemoryError, OSError]"),
        ("", "\nMIN_BATCH = 1"),
    ),
    "a constant with a text": _joined(
        ("KILLED = (\n    ", "const LOW = [\n    ", "MESSAGE = {\n    "),
        (
            '"This job was killed because it used more memory than allowed."',
            'b"CUDA out of memory while loading"',
        ),
        ("\n)", "\n]"),
    ),
    "bytes that a test writes": _joined(
        ("    stdout.write(", "log.add("),
        ('b"RuntimeError: CUDA out of memory"', "u'MemoryError: std::bad_alloc'"),
        (")",),
    ),
    "a table of codes": _joined(
        ('    139: "Segmentation fault",\n    ',),
        ("137: ", "-9: "),
        ('"Out of memory (process was killed by the OOM killer).",',),
    ),
    "a line of a change": _joined(
        ("+            # ", "-    // "),
        ("Not enough memory available", "CUDA out of memory"),
        ("! Please increase the limit.", ""),
    ),
    "a title of a guide": _joined(
        ("CUDA out of memory", "Kubernetes OOMKilled (Exit Code 137)", "MemoryError"),
        (": ",),
        ("causes and fixes", "what it means", "how to fix it", "the complete guide"),
    ),
    "a heading": _joined(
        ("", "## ", "* "),
        ("Running out of memory", "Running out of GPU memory"),
        ("", "\n\nWith large meshes this can happen."),
    ),
    "an entry below its heading": _joined(
        ("### OOMKilled\n\n", '## "killed"\n\n', "### Out of memory\n\n"),
        ("The container was killed because it used too much memory.",),
        ("\n\nCommands:", ""),
    ),
    "a list of causes": _joined(
        ("Common issues: ", "Typical causes: ", "Known problems:\n"),
        ("- Insufficient GPU memory", "- out of memory"),
        ("\n- Missing dependencies",),
    ),
    "another reason": _joined(
        ("The resource was lost for a reason other than ", "It failed, apart from "),
        ("running out of memory.", "out of memory."),
    ),
    "a program that does without": _joined(
        ("Not enough free memory for a merge", "insufficient GPU memory"),
        (
            " -> skip the merge",
            ". Therefore it is loaded into RAM.",
            "! Clearing caches",
            ". Waiting for others",
        ),
    ),
    "what was caught": _joined(
        ("PASS: 3 std::bad_alloc ", "MemoryError "),
        ("caught and recovered", "handled and ignored"),
    ),
    "what is to be found out": _joined(
        ("Review the logs to ",),
        ("determine which", "find out why the", "see whether the"),
        (" process was killed by the OOM killer.", " job ran out of memory."),
    ),
    "what causes such things": _joined(
        ("Problems like this are ", "Such crashes are usually "),
        ("caused by ", "triggered by "),
        ("insufficient RAM.", "running out of GPU memory."),
    ),
    "what does not follow": _joined(
        ("Wasm growth failure ", "An out of memory error "),
        ("does not result in ", "won't lead to ", "did not cause "),
        ("malloc failure", "CUDA out of memory", "an allocation failure"),
    ),
    "what went on, in parentheses": _joined(
        ("Failed to allocate shared memory segment ", "CUDA out of memory "),
        ("(switching to TCP, may be slower)", "(falling back to the CPU)"),
    ),
    "what would become of one": _joined(
        ("A worker ", "One task ", "Each process "),
        ("killed for memory ", "evicted for high memory "),
        ("takes its group with it.", "loses its cache.", "is started again."),
    ),
    "instructions about such jobs": _joined(
        ("Detect ", "Requeue ", "Identify ", "Resubmit "),
        ("oom-killed jobs", "OOMKilled pods"),
        (" in its output files.", "."),
    ),
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


@pytest.mark.many_cases(quick=5)
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


@pytest.mark.parametrize(
    "call",
    [
        "mmap(NULL, {}, PROT_READ)",
        "cudaMalloc(&buffer, {})",
        "os::commit_memory(0x0000000090000000, {}, 0)",
        "posix_memalign(&p, 64, {})",
        "aligned_alloc(64, {})",
        "zeMemAllocDevice(ctx, {}, 64, dev)",
    ],
)
def test_what_a_call_was_given_was_requested(call):
    asked = 117_440_512
    for reason in ("out of memory", "Cannot allocate memory"):
        text = f"fatal: {call.format(asked)} failed: {reason}"
        assert read_message(text).requested == asked, text


def test_a_call_beside_a_full_page_file_is_read():
    text = (
        "commit_memory(0x90000000, 117440512, 0) failed; error='The paging file is too "
        "small for this operation to complete' (errno=1455)"
    )

    message = read_message(text)

    assert (message.kind, message.requested, message.errno) == (
        "pagefile",
        117_440_512,
        1455,
    )


@pytest.mark.parametrize("lack", ["not enough free memory", "insufficient memory"])
def test_needs_and_has_are_told_apart(lack):
    text = f"FATAL: rank 3: {lack} to resume (needs 41.0 GB, has 12.5 GB)"

    message = read_message(text)

    assert (message.requested, message.free) == (41 << 30, 25 << 29)


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_prose_about_exhaustion_reports_nothing():
    taken = [text for text in PROSE if read_message(text).is_oom is not False]

    assert taken == []


@pytest.mark.slow
def test_a_page_of_prose_about_exhaustion_reports_nothing():
    chance = random.Random(1)
    page = " ".join(chance.choice(PROSE) for _ in range(800))

    assert read_message(page).is_oom is False
    assert read_message(f"{page}\n\nMemoryError: Unable to allocate 3 GiB").is_oom
