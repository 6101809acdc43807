"""Laws of reading: what a log, a unit or a length does to a text changes nothing."""

import itertools
import json
import random
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from log_styles import (
    FORMS,
    FRAMES,
    ROUNDING,
    draw_style,
    frame,
    hard_wrap,
    prefix,
    quote,
    with_amounts_in,
    wrap,
)
from reported_messages import LATER, LATER_LOOK_ALIKES, LOOK_ALIKES, RAN_OUT

from loaderkit import diagnose_oom
from loaderkit.budget.diagnosis.amounts import find_amounts, parse_size
from loaderkit.budget.diagnosis.grammar import find_exhaustion
from loaderkit.budget.diagnosis.lexicon import phrase_texts
from loaderkit.budget.diagnosis.log_text import clean_log
from loaderkit.budget.diagnosis.messages import SIZES, as_fields, read_message
from loaderkit.budget.diagnosis.moods import Span
from loaderkit.budget.diagnosis.oom_patterns import message_patterns
from loaderkit.budget.diagnosis.sentences import sentence_around

REPORTS = [report.text for report in (*RAN_OUT, *LATER)]
TEXTS = REPORTS + LOOK_ALIKES + LATER_LOOK_ALIKES
TORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 1 has "
    "a total capacity of 6.00 GiB of which 41.56 MiB is free. Process 4711 has 1.50 "
    "GiB memory in use. Including non-PyTorch memory, this process has 4.40 GiB memory "
    "in use. Of the allocated memory 2.93 GiB is allocated by PyTorch, with 46.00 MiB "
    "allocated in private pools (e.g., CUDA Graphs), and 1.30 GiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
QUICK = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,  # the soak tries other ones
    suppress_health_check=[HealthCheck.too_slow],
)


def stated(text):
    """Every field that a text states, and the verdict on them."""
    fields = as_fields(read_message(text))
    fields["verdict"] = diagnose_oom(text).verdict
    return {name: fields[name] for name in fields if name not in {"raw", "unread"}}


def draw_logged(chance, count, *, terminal=True):
    """Draw texts, and what a log does to each."""
    for _ in range(count):
        text = chance.choice(TEXTS)
        is_error = text in REPORTS
        yield text, draw_style(chance, is_error=is_error, terminal=terminal)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_what_logs_do_to_a_text_changes_nothing_that_is_read(seed):
    """The soak tries more, and counts the few that change."""
    for text, style in draw_logged(random.Random(seed), 50, terminal=False):
        assert stated(style(text)) == stated(text), style


@pytest.mark.parametrize("width", [40, 60, 72, 79, 80, 100, 120, 132])
def test_neither_a_terminal_nor_an_editor_changes_torchs_text(width):
    expected = stated(TORCH)

    assert stated(wrap(TORCH, width)) == expected
    assert stated(hard_wrap(TORCH, width)) == expected
    assert stated(prefix(hard_wrap(TORCH, width), "[rank3]: ")) == expected
    assert stated(quote(hard_wrap(TORCH, width), "json")) == expected


@pytest.mark.many_cases(quick=9)
@pytest.mark.parametrize("seed", range(20))
def test_torchs_text_broken_by_hand_is_read(seed):
    """In a mail, at no width: a line may end with "(GPU 0;" as a program's does."""
    chance = random.Random(seed)
    texts = [text for text in REPORTS if "CUDA out of memory. Tried" in text]
    for text in [TORCH, *chance.sample(texts, 4)]:
        words = text.split(" ")
        breaks = [chance.choice([" ", " ", " ", "\n"]) for _ in words]
        broken = "".join(map("".join, zip(words, breaks, strict=True)))

        message = read_message(broken)

        assert message.is_oom is True, broken
        assert message.requested == read_message(text).requested, broken


TOLD = (
    TORCH,
    "CUDA out of memory. Tried to allocate 20.00 MiB.",
    "Unable to allocate 7.45 GiB for an array with shape (1000000000,).",
    "Failed to allocate 33554432 bytes on device 1: out of memory.",
)
TALKED_OF = (
    "If CUDA runs out of memory, reduce the batch size to 16.",
    "The memory limit was set to 16 GiB.",
    "Retrying after out of memory succeeded with batch size 8.",
)


@pytest.mark.many_cases(quick=6)
@pytest.mark.parametrize("name", FRAMES)
def test_what_a_runtime_puts_around_an_error_changes_nothing(name):
    for text in TOLD:
        assert stated(frame(name, text)) == stated(text), text

    for text in TALKED_OF:
        assert read_message(frame(name, text)).is_oom is False, text


@pytest.mark.parametrize("half", range(3, 16))
def test_a_class_that_is_broken_behind_its_path_stays_whole(half):
    path, name = "cupy.cuda.memory.", "OutOfMemoryError"
    text = "{}: out of memory to allocate 411041792 bytes (total 11456471040 bytes)"

    broken = wrap(text.format(path + name), len(path) + half)

    assert stated(broken) == stated(text.format(path + name))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_another_unit_states_the_same_amounts(form):
    rounding = ROUNDING.get(form, 2**11)

    for report in RAN_OUT:
        before, after = (
            as_fields(read_message(text))
            for text in (report.text, with_amounts_in(form, report.text))
        )

        for name, value in before.items():
            if name in SIZES and value is not None:
                assert abs(after[name] - value) <= rounding + 2**12, report.text
            elif name not in {"raw", "unread", "procs"}:
                assert after[name] == value, report.text


def test_a_style_that_hides_a_part_is_found_out():
    def forgets(text):
        return text.replace("is free", "")

    assert stated(forgets(TORCH)) != stated(TORCH)


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize(
    "word", ["x", "0", "a.", "1,", "_", "=", "(", "OutOf", "%|", "[0]:"]
)
def test_text_without_blanks_is_not_read_word_by_word(word):
    data = word * (128_000 // len(word))

    assert len(clean_log(data)) < 1000
    assert stated(f"{data} {TORCH}") == stated(TORCH)


@pytest.mark.slow
def test_a_log_that_repeats_itself_is_read_once():
    rows = [
        f"2026-11-21 10:00:{n % 60:02} INFO step {n} loss 0.{n}" for n in range(1600)
    ]
    bars = [
        f"Epoch 1: {n % 100}%|##  | {n}/1600 [00:01<02:33, 31.2it/s]"
        for n in range(1600)
    ]

    assert len(clean_log("\n".join([*rows, TORCH]))) < 2000
    assert stated("\n".join([*rows, TORCH])) == stated(TORCH)
    assert stated("\r".join([*bars, ""]) + "\n" + TORCH) == stated(TORCH)


def test_no_pattern_looks_ahead_without_a_bound():
    """So that the time a text takes grows with its length and no faster."""
    unbounded = re.compile(r"(?<!\\)\.[*+]|\\[SwWD][*+]|\[\^[^\]]*\][*+]")
    patterns = [row.pattern.written.pattern for row in message_patterns()]
    patterns += phrase_texts().values()

    assert unbounded.search(r"killed.*by")
    assert [pattern for pattern in patterns if unbounded.search(pattern)] == []


def test_words_make_a_message_that_no_wording_knows():
    finding = find_exhaustion(
        "acme: could not allocate 3 GiB of VRAM (1 GiB available)"
    )

    assert (finding.kind, finding.backend) == ("device_oom", "cuda")


WAYS_OF_RUNNING_OUT = (
    *("out of {}", "ran out of {}", "out-of-{}", "OutOfMemory: {}", "oom: {}"),
    *("insufficient {}", "not enough {}", "too little {}", "lack of {}", "low on {}"),
    *("{} exhausted", "{} was exhausted", "exhausted {}", "{} depleted", "{} full"),
    *("no {} left", "no more {}", "no {} remaining", "no free {}", "{} is full"),
    *("{} not available to allocate buffer", "{} unavailable for allocation"),
    *("failed to allocate {}", "unable to reserve {}", "couldn't get {}"),
    *("error while allocating {}", "not able to allocate {}", "failed to map {}"),
    *("{} allocation error", "allocator returned null for {}", "alloc failed: {}"),
    *("{} request denied", "unable to satisfy request for {}", "all {} is in use"),
    *("{} limit exceeded", "exceeded {} limit", "{} budget exceeded", "{} too low"),
    *("does not fit in {}", "too large for {}", "larger than available {}"),
    *("more {} needed", "requires more {} than available", "{} pool is empty"),
)
KINDS_OF_MEMORY = ("GPU memory", "device memory", "host memory", "RAM", "HBM")
OTHER_RESOURCES = ("disk space", "file descriptors", "licences", "sockets")
ENVELOPES = (
    "RuntimeError: {}",
    "[ERROR] engine: {}",
    "acme.AllocError: {}: 35 GB asked",
)


@pytest.mark.many_cases(quick=10)
@pytest.mark.parametrize("way", WAYS_OF_RUNNING_OUT)
def test_any_memory_can_run_out_in_any_words(way):
    for memory, envelope in itertools.product(KINDS_OF_MEMORY, ENVELOPES):
        text = envelope.format(way.format(memory))
        assert read_message(text).is_oom is True, text


@pytest.mark.parametrize(
    "way", ["out of {}", "no {} left", "not enough {}", "no more {}"]
)
def test_what_is_no_memory_runs_out_without_a_report(way):
    for thing in OTHER_RESOURCES:
        text = f"RuntimeError: {way.format(thing)}"
        assert read_message(text).is_oom is False, text


OVERSTEPPING = (
    *("exceeded", "went over", "blew past", "overshot", "surpassed", "broke through"),
    *("topped", "outgrew", "ran past", "overran", "reached", "violated", "crossed"),
)
SHARES = ("limit", "cap", "quota", "budget", "allowance", "ceiling", "reservation")


@pytest.mark.parametrize("verb", OVERSTEPPING)
def test_a_share_of_memory_can_be_overstepped_in_any_words(verb):
    for share, memory in itertools.product(SHARES, ("GPU memory", "RAM")):
        assert read_message(f"worker 7 {verb} its {memory} {share}").is_oom is True
    assert read_message(f"worker 7 {verb} its time {SHARES[0]}").is_oom is False


ALLOCATING = (
    *("allocate", "reserve", "grab", "claim", "secure", "commit", "map", "carve out"),
    *("acquire", "obtain", "get"),
)


@pytest.mark.many_cases(quick=22)
@pytest.mark.parametrize("verb", ALLOCATING)
@pytest.mark.parametrize("failure", ["failed", "was unable", "could not manage"])
def test_memory_is_asked_for_in_vain_in_any_words(verb, failure):
    text = f"fatal: {failure} to {verb} 3.5 GiB of {{}}"

    for memory in KINDS_OF_MEMORY:
        message = read_message(text.format(memory))
        assert message.is_oom is True
        assert message.requested == 3.5 * 2**30
    assert read_message(text.format("disk space")).is_oom is False


@pytest.mark.parametrize(
    "form",
    [
        "{} has been consumed",
        "{} overcommitted",
        "{} drained",
        "no room in {}",
        "nothing left of {}",
        "zero {} left",
        "0 bytes of {} left",
        "model (41 GiB) will not fit in {}",
        "41 GiB needed but 24 GiB of {} available",
        "needs 41 GiB of {}, has 24 GiB",
        "allocation rejected: 3.5 GiB of {}",
        "worker 7 shot down for using too much {}",
    ],
)
def test_what_is_spent_refused_or_too_small_is_exhaustion(form):
    for memory, envelope in itertools.product(KINDS_OF_MEMORY[:4], ENVELOPES[:2]):
        assert read_message(envelope.format(form.format(memory))).is_oom is True


STATUSES = {
    "hipErrorMemoryAllocation": (True, "hip"),
    "HIPSPARSE_STATUS_ALLOC_FAILED": (True, "hip"),
    "NVJPEG_STATUS_ALLOCATOR_FAILURE": (True, "cuda"),
    "NPP_MEMORY_ALLOCATION_ERR": (True, "cuda"),
    "ACL_ERROR_RT_MEMORY_ALLOCATION": (True, "npu"),
    "QNN_COMMON_ERROR_MEM_ALLOC": (True, None),
    "SNPE_ERRORCODE_ALLOCATION": (True, None),
    "MFX_ERR_MEMORY_ALLOC": (True, None),
    "cnrtErrorNoMem": (True, "mlu"),
    "kIOReturnNoMemory": (True, None),
    "NSMallocException": (True, None),
    "ORA-04030": (True, None),
    "UR_RESULT_ERROR_OUT_OF_RESOURCES": ("maybe", "xpu"),
    "NVML_ERROR_MEMORY": ("maybe", "cuda"),
    "STATUS_COMMITMENT_LIMIT": ("maybe", "host"),
    "EFI_OUT_OF_RESOURCES": ("maybe", None),
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": (False, None),
    "CUDA_ERROR_INVALID_VALUE": (False, None),
    "ACL_ERROR_RT_PARAM_INVALID": (False, None),
}
"""Of each runtime, as its headers name them."""


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize(
    "line",
    ["acme: step 3 failed: {}", "RuntimeError: acme.cc:41: launch returned {}"],
)
def test_the_status_of_a_runtime_is_enough(line, status):
    is_oom, backend = STATUSES[status]
    message = read_message(line.format(status))

    assert (message.is_oom, message.backend) == (is_oom, backend)


@pytest.mark.parametrize("sign", ["ret ", "rc=", "error: ", "status "])
def test_a_driver_that_returns_enomem_has_no_memory(sign):
    text = f"nvme-tcp: failed to alloc ctrl->tag_set, {sign}{{}}"

    assert read_message(text.format(-12)).is_oom is True
    assert read_message(text.format(-22)).is_oom is False


@pytest.mark.parametrize(
    "reason", ["Out of memory", "Cannot allocate memory", "Insufficient memory"]
)
@pytest.mark.parametrize("thing", ["port 0 Rx queue", "socket 3 ring", "disk index"])
def test_the_last_reason_counts_whatever_failed(thing, reason):
    assert read_message(f"{thing} allocation failed: {reason}").is_oom is True
    assert read_message(f"{thing} allocation failed: busy").is_oom is False


@pytest.mark.parametrize("short", ["max.", "min.", "approx.", "vs.", "avg."])
def test_an_abbreviation_ends_no_sentence(short):
    text = f"error: {short} memory limit exceeded"

    assert sentence_around(text, Span(len(text) - 8, len(text))).start == 0


@pytest.mark.parametrize("share", ["allowed", "requested", "reserved", "permitted"])
@pytest.mark.parametrize("verb", ["used", "consumed", "occupied", "held"])
def test_more_than_the_share_is_too_much(verb, share):
    for memory in ("memory", "RAM"):
        told = f"job 71 {verb} more {memory} than was {share}"
        assert read_message(told).is_oom is True
    assert read_message(f"job 71 {verb} more time than was {share}").is_oom is False


@pytest.mark.parametrize("asked", [9, 64])
@pytest.mark.parametrize("verb", ["requires", "needs"])
def test_more_is_needed_than_there_is(verb, asked):
    text = f"Error: model {verb} {asked} GiB of memory, but only {{}} GiB is available"

    assert read_message(text.format(8)).is_oom is True
    assert read_message(text.format(8).replace("memory", "disk")).is_oom is False


@pytest.mark.parametrize("device", [0, 1, 7])
@pytest.mark.parametrize(
    "status", ["CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"]
)
def test_a_librarys_failure_has_its_device(status, device):
    text = f"failure 3: {status} ; GPU={device} ; hostname=node ; expr=create(&h);"

    assert read_message(text).device == device


def test_what_is_available_to_be_allocated_was_asked_for():
    text = (
        "RuntimeError: allocate_gpu: Memory not available to allocate buffer: 41943040"
    )
    message = read_message(text)

    assert (message.requested, message.free) == (41943040, None)


@pytest.mark.parametrize("program", ["LLVM ERROR", "ld", "ptxas fatal", "cc1plus"])
def test_a_compiler_that_runs_out_is_not_the_device_that_it_compiles_for(program):
    above = "[Info] Compiling OpenCL Kernel with 64 bins...\n"

    assert read_message(f"{above}{program}: out of memory").backend != "opencl"


@pytest.mark.parametrize("limit", ["MEMLOCK", "AS", "DATA", "RSS"])
def test_the_kernels_limits_of_memory_are_known_by_name(limit):
    text = f"[ 36.1] vfio_pin_pages_remote: RLIMIT_{limit} (4194304) exceeded"

    assert (read_message(text).is_oom, read_message(text).limit) == (True, 4194304)
    assert read_message(text.replace(limit, "NOFILE")).is_oom is False


@pytest.mark.parametrize("sign", [":", "=", ": "])
def test_how_a_task_ended_can_be_a_field(sign):
    record = f"TaskHandler[id{sign}15; status{sign}COMPLETED; exit{sign}{{}}; error: -]"

    assert read_message(record.format(137)).is_oom == "maybe"
    assert read_message(record.format(1)).is_oom is False


ERRORS = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "Killed",
    "MemoryError",
    "OSError: [Errno 12] Cannot allocate memory",
    "RuntimeError: Unable to allocate 3 GiB",
    "torch.OutOfMemoryError: CUDA out of memory.",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=71.0.",
    "RuntimeError: CUDA error: out of memory",
)
LINES_ABOVE = (
    "Epoch 3/10:  45%|####5     | 450/1000 [02:11<02:40,  3.43it/s, loss=0.231]",
    (
        "[W1121 10:00:00.123 ProcessGroupNCCL.cpp:1250] Warning: process group has NOT "
        "been destroyed before we destruct ProcessGroupNCCL. (function operator())"
    ),
    (
        "/opt/torch/utils/checkpoint.py:429: UserWarning: please pass in "
        "use_reentrant=True or use_reentrant=False explicitly.\n  warnings.warn("
    ),
    (
        "train.py:10: FutureWarning: `GradScaler(args...)` is deprecated.\n"
        "  scaler = GradScaler()"
    ),
    "train.py:52: UserWarning: Implicit choice is deprecated.\n  out = model(x, y)",
    (
        "tokenizers: The current process just got forked, after parallelism has "
        "already been used. Disabling parallelism to avoid deadlocks..."
    ),
    "Setting `pad_token_id` to `eos_token_id`:2 for open-end generation.",
    "run: Data is saved in run-1\nrun: Use `run offline` to turn off syncing.",
    "WARNING:root:no accelerator found",
    "{'loss': 0.231, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.12}",
    "GPU available: True (cuda), used: True\nTPU available: False, using: 0 cores",
    "max memory allocated: 9.8 GB, reserved: 10.4 GB",
    "$ python train.py --batch-size 32",
    "I ran the training script and got this:",
)
LINES_BELOW = (
    "Exception in thread Thread-3",
    "srun: error: node7: task 0: Exited with exit code 1",
    "[W1121 10:00:00.1 ProcessGroupNCCL.cpp:1250] Warning: process group is alive",
    "run: You can sync this run to the cloud",
    "See https://pytorch.org/docs for more information.",
    (
        "resource_tracker.py:224: UserWarning: There appear to be 1 leaked semaphore "
        "objects to clean up at shutdown\n  warnings.warn("
    ),
)


@pytest.mark.parametrize(
    ("form", "line"),
    [
        *(("{line}\n{error}", line) for line in LINES_ABOVE),
        *(("{error}\n{line}", line) for line in LINES_BELOW),
    ],
)
def test_what_a_log_says_beside_an_error_hides_nothing(form, line):
    for error in ERRORS:
        text = form.format(line=line, error=error)
        assert read_message(text).is_oom == read_message(error).is_oom, text
    assert read_message(line).is_oom is False


def test_a_warning_that_speaks_of_memory_is_none_itself():
    text = "alloc.py:9: UserWarning: insufficient memory, the cache is off"

    assert read_message(text).is_oom is False
    assert read_message(f"{text}\nMemoryError").is_oom is True


@pytest.mark.parametrize("code", ["-9", "137", "12"])
def test_a_code_that_a_sentence_explains_is_no_report(code):
    assert read_message(f"{code} is system out of memory.").is_oom is False
    assert read_message(f"error {code}: system out of memory").is_oom is True


def test_nobody_logs_a_kill_that_goes_on():
    text = "The process {} killed because it is consuming too much CPU memory"

    assert read_message(text.format("is being")).is_oom is False
    assert read_message("Process 71 was killed: out of memory").is_oom is True


def test_amounts_have_the_same_role_in_any_order():
    for text in (
        "free: 1 GiB, requested 2 GiB, limit 4 GiB",
        "requested: 2 GiB; limit: 4 GiB; 1 GiB free",
        "1 GiB is available, tried to allocate 2 GiB, at most 4 GiB",
    ):
        roles = {amount.role: amount.size_bytes >> 30 for amount in find_amounts(text)}
        assert roles == {"free": 1, "requested": 2, "limit": 4}, text


@pytest.mark.parametrize(("free", "requested"), [(0, 2048), (512, 70_000)])
def test_a_label_in_bytes_gives_its_number_the_unit(free, requested):
    text = (
        f"arena.cc: available bytes of {free} are fewer than requested bytes of "
        f"{requested}: out of memory"
    )

    message = read_message(text)

    assert (message.free, message.requested) == (free, requested)


def test_a_total_is_the_whole_only_beside_what_is_used_or_free():
    beside = "CUDA out of memory: 3 GiB requested, total 8 GiB, used 7 GiB"
    alone = "CUDA out of memory: 3 GiB requested (total 8 GiB)"

    assert read_message(beside).capacity == 8 << 30
    assert read_message(alone).capacity is None
    assert read_message(alone).allocated == 8 << 30


def test_a_number_without_a_unit_yields_to_one_that_has_a_unit():
    text = "device out of memory: 90214 allocation failed, size 2147483648 bytes"

    assert read_message(text).requested == 2147483648


@pytest.mark.parametrize("unit", ["MB", "MiB", "Mb", "KB", "GiB", "bytes"])
@pytest.mark.parametrize(
    "label", ["{} ({}): {}", "{} [{}]={}", "{} (in {}): {}", "{}_{}={}", "{}_{}: {}"]
)
def test_a_unit_counts_where_it_stands_in_the_label(label, unit):
    said = {"requested": 4096, "free": 1565, "limit": 8192}
    factor = parse_size(f"1 {unit}")

    text = ", ".join(label.format(name, unit, size) for name, size in said.items())

    amounts = find_amounts(f"out of memory: {text}")
    read = {amount.role: amount.size_bytes for amount in amounts}
    assert read == {name: size * factor for name, size in said.items()}


@pytest.mark.parametrize("unit", ["bytes", "KB", "MiB", "GB"])
@pytest.mark.parametrize("joint", [", ", " and ", ", but "])
@pytest.mark.parametrize(("free", "requested"), [(0, 48), (16, 32), (7, 9)])
def test_a_unit_counts_for_the_number_beside_it(joint, unit, free, requested):
    text = f"Heap exhausted: {free} {unit} available{joint}{requested} requested."

    message = read_message(text)

    factor = parse_size(f"1 {unit}")
    assert (message.free, message.requested) == (free * factor, requested * factor)


KILLED_RECORDS = [
    '{{"job": 7, {}, "msg": "task exited"}}',
    '{{{}, "ts": "2026-02-01T10:00:00Z"}}',
    '{{"level": "error", "task": {{"name": "etl-7", "exit": {{{}}}}}, "try": 1}}',
    '2026-02-01 10:00:00 INFO agent {{"containers": [{{"id": "4f", {}}}]}}',
    '{{\n  "id": "4f",\n  {},\n  "try": 1\n}}',
]


@pytest.mark.parametrize("record", KILLED_RECORDS)
def test_a_record_of_json_says_how_a_process_ended(record):
    def verdict(field):
        message = read_message(record.format(field))
        return message.is_oom and (message.is_oom, message.kind)

    for field in ('"oom_killed": true', '"OOMKilled":true', '"reason": "OOMKilled"'):
        assert verdict(field) == (True, "killed"), field
    for field in ('"exit_code": 137', '"exitCode":137', '"ExitStatus": "137"'):
        assert verdict(field) == ("maybe", "killed"), field
    for field in ('"oom_killed": false', '"OOMKilled":false', '"exit_code": 0'):
        assert verdict(field) is False, field


def test_a_record_of_json_is_read_as_its_message_alone():
    record = {"level": "error", "at": {"line": 7, "ok": False}, "message": TORCH}
    text = f"10:00:00 {json.dumps(record)}"

    assert stated(text) == stated(TORCH)
    assert stated(json.dumps({"all": [record, record]})) == stated(TORCH)


def test_what_begins_like_json_and_is_none_stays_as_it_is():
    for text in ('{"a": ', '{"a": 1} and more', '{"a"' * 2000):
        assert stated(f"{text}\n{TORCH}") == stated(TORCH)


@pytest.mark.parametrize(
    "message", ["dim {{ size: 64 }}", "Search for `cudaErrorX' in the manual"]
)
def test_marks_of_code_inside_a_message_hide_nothing(message):
    text = f"torch.AcceleratorError: CUDA error: out of memory, {message}"

    assert read_message(text).is_oom is True
    assert read_message(f"{text}\nand one line more of it").is_oom is True


def test_a_limit_decides_without_the_free_bytes():
    diagnosis = diagnose_oom(
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 3 GiB (allocated "
        "so far: 6 GiB, limit set to: 8 GiB)."
    )

    assert (diagnosis.verdict, diagnosis.shortfall) == ("software limit", 1 << 30)


def test_what_is_not_understood_is_said():
    text = "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB, 4.5 GiB of blue"

    notes = diagnose_oom(text).notes
    story = diagnose_oom("a friend of mine ran out of memory")

    assert any("not understood" in note and "4.50 GiB" in note for note in notes)
    assert any("tells of no event" in note for note in story.notes)


def test_a_size_is_read_in_any_style():
    sizes = (
        "1536 MiB",
        "1.5GB",
        "1,5 GiB",
        "1.50 GiB",
        "1610612736",
        "1,610,612,736 bytes",
    )

    assert {parse_size(text) for text in sizes} == {3 << 29}


def test_a_card_that_others_fill_is_not_fragmented():
    text = (
        "RuntimeError: NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 "
        "GiB total capacity; 10.24 GiB already allocated; 10.24 GiB current active; "
        "19.52 MiB free; 10.65 GiB reserved in total by PyTorch)"
    )

    assert diagnose_oom(text).verdict == "held by others"


def test_a_servers_budget_is_a_limit_of_software():
    diagnosis = diagnose_oom(
        "ValueError: Free memory on device (67.24/79.25 GiB) on startup is less than "
        "desired GPU memory utilization (0.9, 71.33 GiB)."
    )

    assert diagnosis.verdict == "software limit"
    assert diagnosis.shortfall == parse_size("71.33 GiB") - parse_size("67.24 GiB")


NUMBERS = st.from_regex(
    r"[0-9.,]{1,16}( ?([KMGTPE]i?B?|bytes|E)|-byte block)?", fullmatch=True
)
AROUND = [
    "CUDA out of memory. Tried to allocate {}",
    "{} E ggml: cudaMalloc failed: out of memory",
    "MPS backend out of memory (MPS allocated: {}, max allowed: {})",
    "CUDA out of memory. Process 7 has {} memory in use",
    "Failed to allocate memory: used {} of {} total",
    "{}/{} GiB out of memory",
    "size {} out of memory",
]


@pytest.mark.slow
@QUICK
@given(NUMBERS, st.sampled_from(AROUND))
def test_what_stands_in_the_place_of_a_number_never_fails(number, around):
    # Versions and times look like numbers, and are not to end the program that failed.
    read_message(around.replace("{}", number))
