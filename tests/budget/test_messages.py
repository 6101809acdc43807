"""Each wording is recognised, with its numbers; what only looks like one is not."""

import json
from pathlib import Path

import pytest
from reported_messages import LATER, LATER_LOOK_ALIKES, RAN_OUT
from reported_messages import LOOK_ALIKES as REPORTED_LOOK_ALIKES

from loaderkit.budget.diagnosis.messages import (
    Message,
    as_fields,
    read_message,
    request_of,
)

KNOWN = Path(__file__).parents[1] / "corpora" / "oom_messages.json"
MIB, GIB = 2**20, 2**30

SAID = {
    "torch's text with a software limit": (
        (
            "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 3; 11.00 GiB total "
            "capacity; 10.00 GiB already allocated; 8.00 MiB free; 5.00 GiB allowed; "
            "10.50 GiB reserved in total by PyTorch)"
        ),
        Message(
            is_oom=True,
            backend="cuda",
            kind="device_oom",
            device=3,
            requested=2 * GIB,
            capacity=11 * GIB,
            free=8 * MIB,
            allocated=10 * GIB,
            limit=5 * GIB,
            reserved=10 * GIB + GIB // 2,
        ),
    ),
    "cudaMallocAsync": (
        (
            "Allocation on device 1 would exceed allowed memory. (out of memory)\n"
            "torch.OutOfMemoryError\nCurrently allocated     : 6.00 GiB\n"
            "Requested               : 128.00 MiB\nDevice limit            : 8.00 GiB\n"
            "Free (according to CUDA): 0 bytes"
        ),
        None,
    ),
    "the kernel": (
        (
            "Memory cgroup out of memory: Killed process 42 (python) total-vm:4096kB, "
            "anon-rss:2048kB, file-rss:4kB"
        ),
        Message(
            is_oom=True,
            backend="host",
            kind="killed",
            pid=42,
            total_vm=4 * MIB,
            anon_rss=2 * MIB,
        ),
    ),
    "one file of many mappings": (
        (
            "unable to mmap 280 bytes from file </torch_7_39_63350>: Cannot allocate "
            "memory (12)"
        ),
        Message(
            is_oom=True,
            backend="host",
            kind="map_count",
            pid=7,
            requested=280,
            errno=12,
        ),
    ),
    "one large file": (
        (
            "unable to mmap 9976578928 bytes from file <model.bin>: Cannot allocate "
            "memory (12)"
        ),
        Message(
            is_oom=True,
            backend="cpu",
            kind="host_alloc",
            requested=9976578928,
            errno=12,
        ),
    ),
    "another Metal text": (
        "Buffer Validation newBufferWith*:length 0x100000 must not exceed 256 MB",
        Message(
            is_oom=True,
            backend="mps",
            kind="buffer_too_large",
            requested=MIB,
            limit=256 * MIB,
        ),
    ),
}

KINDS = {
    "CUDA error: out of memory": "device_oom_async",
    "cuda runtime error (2) : out of memory at THC/THCGeneral.cpp:50": (
        "device_oom_async"
    ),
    "cuda runtime error (2) : out of memory at THCCachingHostAllocator.cpp:278": (
        "pinned"
    ),
    "Caught RuntimeError in pin memory thread\nCUDA error: out of memory": "pinned",
    "HIP error: out of memory": "device_oom_async",
    "UR backend failed. UR backend returns:39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)": (
        "device_oom_async"
    ),
    "(null)\n\tInsufficient Memory (00000008:kIOGPUCommandBufferCallbackError"
    "OutOfMemory)": "device_oom_async",
    "CUDNN_STATUS_ALLOC_FAILED": "library_alloc",
    "Last error:\nncclUnhandledCudaError\nCuda failure 2 'out of memory'": "comm_oom",
    "n:1:2 [0] include/shm.h:48 NCCL WARN Call to posix_fallocate failed : No space "
    "left on device": "shm",
    "Storage size calculation overflowed with sizes=[99999999, 99999999]": "bogus_size",
    "std::bad_alloc: out_of_memory: CUDA error at: rmm.hpp:70": "device_oom",
    "MemoryError": "host_alloc",
    "posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0": "host_alloc",
    "os.fork()\nOSError: [Errno 12] Cannot allocate memory": "fork",
    "unable to resize file </torch_4_35> to the right size: No space left on device "
    "(28)": "shm",
    "OSError: [WinError 1455] Le fichier de pagination est insuffisant": "pagefile",
    "Last State: Terminated Reason: OOMKilled Exit Code: 137": "killed",
    "slurmstepd: error: Exceeded job memory limit at some point.": "killed",
}
MAYBE = {
    "Process finished with exit code 137 (interrupted by signal 9: SIGKILL)": "killed",
    "exitcode  : -9 (pid: 4242)": "killed",
    "CUDNN_STATUS_NOT_INITIALIZED": "masked_oom",
}
LOOK_ALIKES = {
    "CUDA error: an illegal memory access was encountered": "illegal_access",
    "CUDA error: device-side assert triggered": "device_assert",
    "CUDA error: no kernel image is available for execution": "no_kernel",
    "CUDA error: too many resources requested for launch": "kernel_resource",
    "unsupported memory format option Preserve": "memory_format",
    "UserWarning: 'pin_memory' argument is set as true but not supported on MPS now": (
        "warning"
    ),
    "cannot allocate memory in static TLS block": "library_error",
    "OSError: [Errno 28] No space left on device: '/data/x.pt'": "disk_full",
    "RuntimeError: can't start new thread": "thread_limit",
    "received 0 items of ancdata": "fd_limit",
    "DataLoader worker (pid(s) 15876, 2756) exited unexpectedly": "worker_crash",
    "Watchdog caught collective operation timeout": "comm_error",
    "To avoid CUDA out of memory errors, lower the batch size.": None,
    "KeyError: 'memory'": None,
    "": None,
}


def _wrongly_read(text, states, *, whole=False):
    """Fields that differ; a text whose fields are all listed states nothing else."""
    return _differing(as_fields(read_message(text)), states, whole=whole)


def _differing(got, states, *, whole=False):
    expected = dict.fromkeys(got) | states if whole else states
    names = set(expected) - {"raw", "unread"}
    return {name: got[name] for name in names if got[name] != expected[name]}


@pytest.mark.slow
def test_every_number_of_the_known_messages_is_read():
    rows = json.loads(KNOWN.read_text("utf-8"))

    wrong = [
        (row["text"][:80], fields)
        for row in rows
        if (fields := _wrongly_read(row["text"], row["states"], whole=row["whole"]))
    ]

    assert len(rows) > 100  # the corpus is there, and may grow
    assert wrong == []


@pytest.mark.slow
def test_reported_messages_are_read():
    wrong = []
    for report in (*RAN_OUT, *LATER):
        got = as_fields(read_message(report.text))
        states = report.states | {"is_oom": report.is_oom}
        if isinstance(report.kind, str):
            states["kind"] = report.kind
        elif got["kind"] not in report.kind:
            wrong.append((report.text[:80], got["kind"]))
        if report.backend is not None:
            states["backend"] = report.backend
        if fields := _differing(got, states):
            wrong.append((report.text[:80], fields))

    assert len(RAN_OUT) + len(LATER) > 140
    assert wrong == []


@pytest.mark.slow
def test_nothing_that_only_looks_like_it_is_taken_for_it():
    texts = [*REPORTED_LOOK_ALIKES, *LATER_LOOK_ALIKES]

    wrong = [text for text in texts if read_message(text).is_oom is not False]

    assert len(texts) > 130
    assert wrong == []


@pytest.mark.parametrize("name", SAID)
def test_every_number_is_read(name):
    text, expected = SAID[name]

    message = read_message(text)

    if expected is None:
        got = (message.kind, message.device, message.requested, message.capacity)
        assert got == ("device_oom", 1, 128 * MIB, 8 * GIB)
    else:
        fields = as_fields(expected) | {"raw": text}
        assert as_fields(message) == fields


@pytest.mark.parametrize("text", KINDS)
def test_running_out_is_recognised(text):
    message = read_message(text)

    assert (message.is_oom, message.kind) == (True, KINDS[text])


@pytest.mark.parametrize("text", MAYBE)
def test_what_only_may_be_memory_is_called_maybe(text):
    message = read_message(text)

    assert (message.is_oom, message.kind) == ("maybe", MAYBE[text])


@pytest.mark.parametrize("text", LOOK_ALIKES)
def test_what_only_looks_like_it_is_not(text):
    message = read_message(text)

    assert (message.is_oom, message.kind) == (False, LOOK_ALIKES[text])


def test_of_a_long_log_the_surest_line_counts():
    log = (
        "[W1 Utils.hpp:106] Warning: NCCL_X is deprecated\n"
        "step 7: KeyError\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 2"
        " has a total capacity of 8.00 GiB of which 0 bytes is free.\n"
        "failed (exitcode: 1) local_rank: 0 (pid: 9) of binary: python\n"
        "CUDA out of memory. Tried to allocate 3.00 GiB (GPU 1; 4.00 GiB total "
        "capacity; 1.00 GiB allowed;)"
    )

    message = read_message(log)

    assert (message.kind, message.device, message.requested) == ("device_oom", 2, GIB)
    assert message.limit is None  # the second message's


def test_a_request_is_computed_from_its_shape():
    text = "Unable to allocate array with shape (1000, 1000) and data type complex128"

    assert request_of(read_message(text)) == 16_000_000
