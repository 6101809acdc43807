"""Misconfigurations: found by reading, and shown to be what torch does."""

import os
import shlex
import subprocess
import sys

import pytest
from torch_settings import clean_environ

from loaderkit import check_environment, configure_allocator
from loaderkit.budget.environment.allocator_settings import (
    FALLBACK,
    HIGH,
    LOW,
    OLD_NAMES,
    UNIFIED,
    EnvironmentFacts,
    judge_environment,
    options_of,
)
from loaderkit.budget.environment.process_settings import (
    KNOWN_NAMES,
    judge_process_settings,
)
from loaderkit.errors import BudgetError, OptionError

CUDA, HIP = OLD_NAMES


def findings_of(environ, **facts):
    usual = {"torch_version": (2, 13), "backend": "cuda", "platform": "linux"}
    setting = EnvironmentFacts(environ, **usual | facts)
    return [(finding.number, finding.level) for finding in judge_environment(setting)]


MAC = {"backend": "mps", "platform": "darwin"}
CASES = {
    "1 high alone, below the default low": ({HIGH: "0.8"}, MAC, [(1, "crash")]),
    "1 low above high": ({HIGH: "1", LOW: "1.2"}, MAC, [(1, "crash")]),
    "2 high above 2": ({HIGH: "2.5"}, MAC, [(2, "crash")]),
    "2 high in percent": ({HIGH: "80%"}, MAC, [(2, "crash")]),
    "2 low below 0": ({LOW: "-1"}, MAC, [(2, "crash")]),
    "3 high no number": ({HIGH: "none"}, MAC, [(3, "danger")]),
    "4 the older name is empty": (
        {UNIFIED: "max_split_size_mb:64", CUDA: ""},
        {},
        [(4, "ignored")],
    ),
    "7 no number": ({CUDA: "max_split_size_mb:abc"}, {}, [(7, "crash")]),
    "14 no such option": ({UNIFIED: "max_split_size:9"}, {}, [(14, "crash")]),
    "15 half a number": ({UNIFIED: "max_split_size_mb:64MB"}, {}, [(15, "ignored")]),
    "15 twice": (
        {UNIFIED: "max_split_size_mb:64,max_split_size_mb:65"},
        {},
        [(15, "ignored")],
    ),
    "3 no limit": ({HIGH: "0.0"}, MAC, [(3, "danger")]),
    "4 both names": (
        {UNIFIED: "max_split_size_mb:64", CUDA: "max_split_size_mb:32"},
        {},
        [(4, "ignored")],
    ),
    "5 lower case": ({UNIFIED: "expandable_segments:true"}, {}, [(5, "crash")]),
    "6 equals sign": ({CUDA: "expandable_segments=True"}, {}, [(6, "crash")]),
    "7 split too small": ({CUDA: "max_split_size_mb:10"}, {}, [(7, "crash")]),
    "7 threshold": ({CUDA: "garbage_collection_threshold:1.5"}, {}, [(7, "crash")]),
    "8 split beside expandable": (
        {CUDA: "expandable_segments:True,max_split_size_mb:64"},
        {},
        [(8, "useless")],
    ),
    "9 expandable on ROCm": (
        {HIP: "expandable_segments:True"},
        {"backend": "hip"},
        [(9, "crash")],
    ),
    "9 expandable and shared tensors": (
        {CUDA: "expandable_segments:True"},
        {"shares_device_tensors": True},
        [(9, "crash")],
    ),
    "10 too late": (
        {UNIFIED: "max_split_size_mb:64"},
        {"effective": ""},
        [(10, "ignored")],
    ),
    "11 new name, 2.9": (
        {UNIFIED: "max_split_size_mb:64"},
        {"torch_version": (2, 9)},
        [(11, "ignored")],
    ),
    "11 new name, 2.5": (
        {UNIFIED: "max_split_size_mb:64"},
        {"torch_version": (2, 5)},
        [(11, "ignored")],
    ),
    "11 new name, 2.9, wrong values": (
        {UNIFIED: "foo:1"},
        {"torch_version": (2, 9)},
        [(11, "ignored")],
    ),
    "11 name of ROCm on CUDA, 2.9": (
        {HIP: "max_split_size_mb:1"},
        {"torch_version": (2, 9)},
        [(11, "ignored")],
    ),
    "7 name of ROCm on CUDA": ({HIP: "max_split_size_mb:1"}, {}, [(7, "crash")]),
    "15 name of ROCm on CUDA": (
        {HIP: "throw_on_cudamalloc_oom:yes"},
        {},
        [(15, "useless")],
    ),
    "12 fallback too late": (
        {FALLBACK: "1"},
        MAC | {"torch_imported": True, "started_with": {}},
        [(12, "ignored")],
    ),
    "12 fallback for memory": ({FALLBACK: "1"}, MAC, [(12, "useless")]),
    "12 MPS on Linux": ({HIGH: "1.5"}, {}, [(12, "useless")]),
    "13 fallback no number": ({FALLBACK: "true"}, MAC, [(13, "crash")]),
    "13 fallback empty": ({FALLBACK: ""}, MAC, [(13, "crash")]),
}
RIGHT = {
    "nothing": ({}, {}),
    "both watermarks": ({HIGH: "0.8", LOW: "0.6"}, MAC),
    "expandable": ({UNIFIED: "expandable_segments:True"}, {}),
    "both names agree": (
        {UNIFIED: "max_split_size_mb:64", CUDA: "max_split_size_mb:64"},
        {},
    ),
    "in effect": (
        {UNIFIED: "max_split_size_mb:64"},
        {"effective": "max_split_size_mb:64"},
    ),
    "divisions": ({CUDA: "roundup_power2_divisions:[256:1,512:2,>:4]"}, {}),
    "fallback off": ({FALLBACK: "0"}, MAC),
}


@pytest.mark.parametrize("name", CASES)
def test_a_misconfiguration_is_found(name):
    environ, facts, expected = CASES[name]

    assert findings_of(environ, **facts) == expected


@pytest.mark.parametrize("value", ["0", "0.8", "5", "-1", "true", ""])
def test_of_a_variable_of_another_system_only_that_nothing_reads_it_is_said(value):
    for name in (HIGH, LOW, FALLBACK):
        assert findings_of({name: value}) == [(12, "useless")]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_setting_is_let_be(name):
    environ, facts = RIGHT[name]

    assert findings_of(environ, **facts) == []


def test_every_fix_is_right():
    usual = {"torch_version": (2, 13), "backend": "cuda", "platform": "linux"}
    for environ, facts, _ in CASES.values():
        for finding in judge_environment(EnvironmentFacts(environ, **usual | facts)):
            command = finding.fix.split(", or ")[0]
            if command.startswith("export "):
                words = shlex.split(command.removeprefix("export "))
                fixed = dict(word.split("=", 1) for word in words)
                assert not [
                    finding
                    for finding in findings_of(fixed, **facts)
                    if finding[1] == "crash"
                ]


@pytest.mark.parametrize("platform", ["linux", "win32"])
@pytest.mark.parametrize("value", ["0.0", "0.8", "3", "-1", "x", "", "1.4", "1"])
def test_where_there_is_no_mps_its_variables_do_nothing_at_all(value, platform):
    for name in (HIGH, LOW, FALLBACK):
        [finding] = judge_environment(
            EnvironmentFacts(
                {name: value}, (2, 13), "cuda", platform, torch_imported=True
            )
        )
        assert (finding.level, finding.fix) == ("useless", f"unset {name}")


def test_what_torch_raised_counts_before_what_was_read():
    environ = {UNIFIED: "expandable_segments:Yes"}

    refused = findings_of(
        environ, asked_torch=True, torch_error="ValueError: Expected 'True'"
    )
    newer = findings_of(
        {UNIFIED: "x:1"}, backend="cpu", asked_torch=True, torch_error="E: no"
    )
    allowed = findings_of(environ, asked_torch=True)

    assert refused == [(5, "crash")]
    assert newer == [(16, "crash"), (14, "ignored")]
    assert allowed == []


def test_what_a_build_for_cuda_tells_before_its_own_reader_has_read_is_no_proof():
    wrong = "throw_on_cudamalloc_oom:yes"
    asked = {"asked_torch": True, "effective": wrong}

    assert findings_of({UNIFIED: wrong}, **asked) == [(5, "crash")]
    assert findings_of({UNIFIED: wrong}, backend="cpu", **asked) == [(15, "useless")]


LATE = """
import os, sys
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:32"
os.environ["PYTORCH_ALLOC_CONF"] = "max_split_size_mb:64"
import loaderkit
assert not {"torch", "h5py"} & set(sys.modules)
print([f.number for f in loaderkit.check_environment().findings])
assert "torch" not in sys.modules
import torch
print(torch._C._accelerator_getAllocatorSettings())
del os.environ["PYTORCH_CUDA_ALLOC_CONF"]
print([f.number for f in loaderkit.check_environment(ask_torch=True).findings])
print(loaderkit.configure_allocator(max_split_size_mb=64))
print([f.number for f in loaderkit.check_environment(ask_torch=True).findings])
print(loaderkit.configure_allocator(garbage_collection_threshold=0.8))
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.slow
def test_the_old_name_wins_a_late_change_is_proven_and_made_at_run_time():
    lines = _run_python(LATE).splitlines()

    assert lines[0] == "[4]"
    assert lines[1] == "max_split_size_mb:32"
    assert lines[2] == "[10]"
    assert lines[3] == "PYTORCH_ALLOC_CONF=max_split_size_mb:64 (from now on)"
    assert lines[4] == "[]"
    assert lines[6] == "max_split_size_mb:64,garbage_collection_threshold:0.8"


FIRST = """
import loaderkit, os, sys
print(loaderkit.configure_allocator(expandable_segments=True, mps_fraction=0.8))
assert "torch" not in sys.modules
import torch
print(torch._C._accelerator_getAllocatorSettings())
print(os.environ["PYTORCH_MPS_LOW_WATERMARK_RATIO"])
"""


@pytest.mark.slow
def test_configuring_first_reaches_torch():
    lines = _run_python(FIRST).splitlines()

    assert lines[0].endswith("(from torch's first use on)")
    assert lines[1:] == ["expandable_segments:True", "0.6"]


def _run_python(code, *args):
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_values_torch_would_refuse_are_refused_first():
    for wrong in (
        {"max_split_size_mb": 4},
        {"garbage_collection_threshold": 2.0},
        {"mps_fraction": 3.0},
        {},
    ):
        with pytest.raises(ValueError, match=r"must|between|nothing"):
            configure_allocator(**wrong)


def test_a_torch_that_cannot_change_says_too_late(monkeypatch):
    import torch

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")

    with pytest.raises(BudgetError, match="too late"):
        configure_allocator(max_split_size_mb=64)


def test_a_clean_process_has_no_misconfiguration(monkeypatch):
    monkeypatch.setattr(os, "environ", clean_environ())

    environment = check_environment()

    assert environment.ok
    assert "every setting does what it says" in str(environment)


def test_a_misspelt_argument_is_answered_with_the_nearest():
    with pytest.raises(OptionError, match="did you mean 'expandable_segments'"):
        configure_allocator(expandable=True)


def test_brackets_hold_an_option_together():
    assert options_of("a:[1:2,>:4],b:3") == {"a": "[1:2,>:4]", "b": "3"}


OTHERS = [
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "TBB_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "MIMALLOC_PAGE_RESET",
    "MIMALLOC_SHOW_STATS",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "GOMP_DEBUG",
    "LD_LIBRARY_PATH",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_DOMAIN_NUM_THREADS",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_VERBOSE",
    "MKL_NUM_STRIPES",
    "MKL_SERVICE_FORCE_INTEL",
    "OMP_AFFINITY_FORMAT",
    "OMP_ALLOCATOR",
    "OMP_SCHEDULE",
    "OMP_CANCELLATION",
    "OMP_DEFAULT_DEVICE",
    "OMP_DISPLAY_AFFINITY",
    "OMP_DISPLAY_ENV",
    "OMP_NUM_TEAMS",
    "OMP_MAX_ACTIVE_LEVELS",
    "OMP_MAX_TASK_PRIORITY",
    "OMP_TARGET_OFFLOAD",
    "OMP_TEAMS_THREAD_LIMIT",
    "PYTORCH_DEBUG_MPS_ALLOCATOR",
    "PYTORCH_JIT",
    "PYTORCH_MIOPEN_SUGGEST_NHWC",
    "PYTORCH_ROCM_ARCH",
    "PYTORCH_MPS_FAST_MATH",
    "PYTORCH_MPS_LOG_PROFILE_INFO",
    "PYTORCH_MPS_PREFER_METAL",
    "PYTORCH_MPS_TRACE_SIGNPOSTS",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCH_CUDA_ARCH_LIST",
    "TORCH_HOME",
    "TORCH_LOGS",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TORCH_USE_CUDA_DSA",
]
"""Names that torch, MKL, OpenMP and others read, of which doctor says nothing."""


def near_misses(name):
    """Write a name as people get it wrong: a letter, a word, the order, the case."""
    for at in range(len(name)):
        yield name[:at] + name[at + 1 :]
        yield name[:at] + name[at] + name[at:]
        yield name[:at] + name[at + 1 : at + 2] + name[at] + name[at + 2 :]
    yield name.lower()
    words = name.rstrip("_").split("_")
    for at in range(len(words)):
        if len(words) > 3:
            yield "_".join(words[:at] + words[at + 1 :])
        for other in range(at if len(words) > 2 else 0):
            exchanged = list(words)
            exchanged[at], exchanged[other] = words[other], words[at]
            yield "_".join(exchanged)


def findings_on_name(name):
    setting = EnvironmentFacts({name: "1"}, (2, 13), "mps", "darwin")
    return [
        finding for finding in judge_process_settings(setting) if finding.number == 17
    ]


@pytest.mark.slow
@pytest.mark.parametrize("known", KNOWN_NAMES)
def test_a_near_miss_of_any_variable_is_found(known):
    missed = [
        name
        for name in near_misses(known)
        if name not in {*KNOWN_NAMES, *OTHERS} and not findings_on_name(name)
    ]

    assert missed == []


@pytest.mark.parametrize("name", [*OTHERS, *KNOWN_NAMES])
def test_no_other_variable_is_taken_for_a_near_miss(name):
    assert findings_on_name(name) == []
