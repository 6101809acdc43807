"""Variables of other libraries that change what memory and threads do.  Pure.

CUDA's runtime, OpenMP, glibc and the allocators that replace glibc's read them once,
when the process starts or loads them.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from loaderkit.budget.environment import (
    ALLOCATOR_NAMES,
    FALLBACK,
    HIGH,
    LOW,
    EnvironmentFinding,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loaderkit.budget.environment import Setting

NO_CACHING = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
BLOCKING = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
BINDING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "OMP_PLACES")
GLIBC = (
    "MALLOC_ARENA_MAX",
    "MALLOC_ARENA_TEST",
    "MALLOC_CHECK_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_PERTURB_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)
"""Settings of glibc's malloc; most names end with an underscore."""
OTHER_ALLOCATORS = {"MALLOC_CONF": "jemalloc", "MIMALLOC_VERBOSE": "mimalloc"}
"""Settings of allocators that have to be preloaded, and which."""
_JUDGED = (*ALLOCATOR_NAMES, HIGH, LOW, FALLBACK, *NO_CACHING, *BLOCKING)
_JUDGED_ELSEWHERE = (*THREADS, *BINDING, *GLIBC, *OTHER_ALLOCATORS)
_REAL_BUT_NEAR = frozenset(
    {
        "PYTORCH_NPU_ALLOC_CONF",
        "PYTORCH_XPU_ALLOC_CONF",
        "PYTORCH_MUSA_ALLOC_CONF",
        "PYTORCH_MLU_ALLOC_CONF",
        "PYTORCH_HPU_ALLOC_CONF",
        "PYTORCH_DEBUG_MPS_ALLOCATOR",
        "OMP_THREAD_LIMIT",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
    }
)
"""Names that others read, and that only look like misspelt ones."""
_CLOSE = 0.85
"""Chosen between PYTORCH_CUDA_ALLOC_CONFIG (0.96), PYTORCH_ALLOCATOR_CONF (0.90) and
PYTORCH_NVML_BASED_CUDA_CHECK (0.6)."""


def judge_process_settings(setting: Setting) -> list[EnvironmentFinding]:
    """Find variables that are misspelt, without effect, or cost more than they look.

    Args:
        setting: As read.

    Returns:
        Findings in the order of their variables.

    >>> from loaderkit.budget.environment import Setting
    >>> environ = {"MALLOC_TRIM_THRESHOLD": "0"}
    >>> print(judge_process_settings(Setting(environ, (2, 13), "cpu", "linux"))[0])
    ignored: MALLOC_TRIM_THRESHOLD=0
      why: nothing reads this name: probably MALLOC_TRIM_THRESHOLD_ is meant
      fix: unset MALLOC_TRIM_THRESHOLD; export MALLOC_TRIM_THRESHOLD_=0
    """
    return [
        *_misspelt(setting),
        *_no_caching(setting),
        *_blocking(setting),
        *_threads(setting),
        *_binding(setting),
        *_malloc(setting),
    ]


def _misspelt(setting: Setting) -> Iterator[EnvironmentFinding]:
    names = [*_JUDGED, *_JUDGED_ELSEWHERE]
    for name, value in setting.environ.items():
        if name in names or name in _REAL_BUT_NEAR:
            continue
        if not re.match(
            r"(?:PY)?TORCH_|OMP_|MALLOC_|CUDA_LAUNCH|HIP_LAUNCH|MKL_", name.upper()
        ):
            continue
        near = difflib.get_close_matches(name.upper(), names, 1, cutoff=_CLOSE)
        if near:
            why = f"nothing reads this name: probably {near[0]} is meant"
            fix = f"unset {name}; export {near[0]}={value}"
            yield EnvironmentFinding(17, "ignored", name, value, why, fix)


def _no_caching(setting: Setting) -> Iterator[EnvironmentFinding]:
    for name in NO_CACHING:
        value = setting.environ.get(name)
        if value is None:
            continue
        if setting.backend not in {"cuda", "hip"}:
            why = f"this torch is built for {setting.backend}: nothing reads it"
            yield EnvironmentFinding(18, "useless", name, value, why, f"unset {name}")
            continue
        why = (
            "every tensor asks the driver for its memory and gives it back: steps are "
        )
        why += "many times slower, and no other setting of the allocator has an effect"
        if value.lower() in {"0", "false", "no", "off", ""}:
            why = f"torch looks only whether it is set, {value!r} turns it on: {why}"
        yield EnvironmentFinding(18, "slow", name, value, why, f"unset {name}")


def _blocking(setting: Setting) -> Iterator[EnvironmentFinding]:
    for name in BLOCKING:
        value = setting.environ.get(name)
        if value is None or re.fullmatch(r"\s*0*\s*", value, re.ASCII):
            continue
        if setting.backend not in {"cuda", "hip"}:
            why = f"this torch is built for {setting.backend}: nothing reads it"
            yield EnvironmentFinding(19, "useless", name, value, why, f"unset {name}")
            continue
        why = "every kernel waits for the one before: right for finding an error, slow "
        why += "for training; it frees no memory"
        yield EnvironmentFinding(19, "slow", name, value, why, f"unset {name}")


def _threads(setting: Setting) -> Iterator[EnvironmentFinding]:
    for name in THREADS:
        value = setting.environ.get(name)
        if value is None:
            continue
        count = openmp_threads(value)
        if count is None:
            why = "it is no number of threads: OpenMP reports it and takes its default"
            fix = f"export {name}={setting.cpus or 1}"
            yield EnvironmentFinding(20, "ignored", name, value, why, fix)
        elif setting.torch_imported and _set_after_start(setting, name):
            why = (
                "OpenMP reads it while it is loaded, before or with torch; it was set "
            )
            why += "inside this process"
            fix = f"{name}={value} python train.py, or torch.set_num_threads({count})"
            yield EnvironmentFinding(20, "ignored", name, value, why, fix)
        elif setting.cpus is not None and count > setting.cpus:
            why = f"this process has {setting.cpus} processors: threads wait for each "
            why += "other, in each worker of a loader too"
            fix = f"export {name}={setting.cpus}"
            yield EnvironmentFinding(20, "slow", name, value, why, fix)


def openmp_threads(value: str) -> int | None:
    """Read a number of threads as libgomp does; None: it ignores the value.

    >>> [openmp_threads(value) for value in ("4", " 2 ", "4,2", "0", "many", "-1")]
    [4, 2, 4, None, None, None]
    """
    # A C library: ASCII digits and blanks only.
    match = re.fullmatch(r"\s*\+?(\d+)\s*(?:,\s*\+?(\d+)\s*)*", value, re.ASCII)
    if match is None:
        return None
    counts = [int(number) for number in re.findall(r"\d+", value)]
    return counts[0] if all(counts) and max(counts) < 2**63 else None


def _binding(setting: Setting) -> Iterator[EnvironmentFinding]:
    for name in BINDING:
        value = setting.environ.get(name)
        if value is None or value.strip(" \t\n\v\f\r").lower() in {"", "false"}:
            continue
        why = "it ties threads to processors; workers of a loader are forked from a "
        why += "thread that is tied to one, and all run there"
        fix = f"unset {name}, or build_loader(..., num_workers=0)"
        yield EnvironmentFinding(20, "slow", name, value, why, fix)


def _malloc(setting: Setting) -> Iterator[EnvironmentFinding]:
    preloaded = setting.environ.get("LD_PRELOAD", "")
    yield from _glibc(setting, preloaded)
    for name, allocator in OTHER_ALLOCATORS.items():
        if name in setting.environ and allocator not in preloaded:
            value = setting.environ[name]
            why = f"{allocator} reads it, and is not preloaded"
            fix = f"LD_PRELOAD=.../lib{allocator}.so {name}={value} python train.py"
            yield EnvironmentFinding(20, "useless", name, value, why, fix)


def _glibc(setting: Setting, preloaded: str) -> Iterator[EnvironmentFinding]:
    replaced = re.search(r"jemalloc|tcmalloc|mimalloc", preloaded)
    for name in GLIBC:
        value = setting.environ.get(name)
        if value is None:
            continue
        if setting.platform != "linux":
            why = f"only glibc reads it, not {setting.platform}"
            yield EnvironmentFinding(20, "useless", name, value, why, f"unset {name}")
        elif replaced is not None:
            why = f"{replaced[0]} is preloaded and serves malloc: only glibc reads it"
            yield EnvironmentFinding(20, "useless", name, value, why, f"unset {name}")
        elif not re.fullmatch(r"\s*(?:0[xX][0-9a-fA-F]+|-?\d+)\s*", value, re.ASCII):
            why = "it is no number: glibc ignores it"
            yield EnvironmentFinding(20, "ignored", name, value, why, f"unset {name}")
        elif _set_after_start(setting, name):
            why = "glibc reads it when the process starts; it was set inside this one"
            fix = f"{name}={value} python train.py"
            yield EnvironmentFinding(20, "ignored", name, value, why, fix)


def _set_after_start(setting: Setting, name: str) -> bool:
    """Tell a variable set inside this process from one it was started with."""
    if setting.started_with is None:
        return False
    return setting.started_with.get(name) != setting.environ.get(name)
