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
from loaderkit.budget.native_readers import (
    GLIBC_RANGES,
    MALLOC_TUNABLES,
    glibc_number,
    glibc_setting,
    hangs_libgomp,
    mkl_follows_processors,
    mkl_threads,
    openmp_binding,
    openmp_threads,
    split_tunables,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loaderkit.budget.environment import Setting

NO_CACHING = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
BLOCKING = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
BINDING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "OMP_PLACES")
OTHER_ALLOCATORS = {"MALLOC_CONF": "jemalloc", "MIMALLOC_VERBOSE": "mimalloc"}
"""Settings of allocators that have to be preloaded, and which."""
_JUDGED = (*ALLOCATOR_NAMES, HIGH, LOW, FALLBACK, *NO_CACHING, *BLOCKING)
_JUDGED_ELSEWHERE = (*THREADS, *BINDING, *GLIBC_RANGES, *OTHER_ALLOCATORS)
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
    yield from _openmp_threads(setting)
    yield from _mkl_threads(setting)


def _openmp_threads(setting: Setting) -> Iterator[EnvironmentFinding]:
    name = "OMP_NUM_THREADS"
    value = setting.environ.get(name)
    if value is None:
        return
    count, by_mkl = openmp_threads(value), _threads_of_mkl(setting)
    if count is None:
        why = "it is no number of threads: OpenMP reports it and takes its default"
        fix = f"export {name}={setting.cpus or 1}"
        yield EnvironmentFinding(20, "ignored", name, value, why, fix)
    elif setting.torch_imported and _set_after_start(setting, name):
        why = "OpenMP reads it while it is loaded, before or with torch; it was set "
        why += "inside this process"
        fix = f"{name}={value} python train.py, or torch.set_num_threads({count})"
        yield EnvironmentFinding(20, "ignored", name, value, why, fix)
    elif by_mkl is not None and by_mkl != count:
        why = f"MKL_NUM_THREADS is set too, and torch takes what MKL says: {by_mkl}"
        yield EnvironmentFinding(
            20, "ignored", name, value, why, "unset MKL_NUM_THREADS"
        )
    elif by_mkl is None and setting.cpus is not None and count > setting.cpus:
        yield _more_than_processors(setting, name, value)


def _threads_of_mkl(setting: Setting) -> int | None:
    """Give the number of threads that MKL is told by a variable of its own."""
    value = setting.environ.get("MKL_NUM_THREADS")
    return None if value is None or not setting.has_mkl else mkl_threads(value)


def _mkl_threads(setting: Setting) -> Iterator[EnvironmentFinding]:
    name = "MKL_NUM_THREADS"
    value = setting.environ.get(name)
    if value is None:
        return
    fix = f"export {name}={setting.cpus or 1}"
    if not setting.has_mkl:
        why = "this torch is built without MKL: nothing in it reads it"
        yield EnvironmentFinding(20, "useless", name, value, why, f"unset {name}")
        return
    count = mkl_threads(value)
    if count is None:
        why = "it is no number above 0: MKL takes its default"
        yield EnvironmentFinding(20, "ignored", name, value, why, fix)
    elif str(count) != value.lstrip("0"):
        why = f"MKL reads it as {count}: it knows digits and nothing else, and torch "
        why += "takes as many threads as MKL (measured)"
        yield EnvironmentFinding(20, "slow", name, value, why, fix)
    elif setting.cpus is not None and count > setting.cpus:
        yield _more_than_processors(setting, name, value)


def _more_than_processors(
    setting: Setting, name: str, value: str
) -> EnvironmentFinding:
    """Say what more threads than processors do."""
    fix = f"export {name}={setting.cpus}"
    dynamic = setting.environ.get("MKL_DYNAMIC")
    if setting.has_mkl and mkl_follows_processors(dynamic):
        why = f"torch keeps to the {setting.cpus} processors of this process, as MKL "
        why += "does (measured); other libraries may start all, which wait for each "
        why += "other"
        return EnvironmentFinding(20, "useless", name, value, why, fix)
    why = f"this process has {setting.cpus} processors: threads wait for each "
    why += "other, in each worker of a loader too"
    return EnvironmentFinding(20, "slow", name, value, why, fix)


def _binding(setting: Setting) -> Iterator[EnvironmentFinding]:
    yield from _endless_affinity(setting)
    wanted = setting.environ.get("OMP_PROC_BIND")
    is_bound = None if wanted is None else openmp_binding(wanted)
    if wanted is not None and is_bound is None:
        why = "it is neither true, false, nor a list of master, close and spread: "
        why += "OpenMP reports it and drops it"
        yield EnvironmentFinding(
            20, "ignored", "OMP_PROC_BIND", wanted, why, "unset OMP_PROC_BIND"
        )
    for name in BINDING:
        value = setting.environ.get(name)
        if value is None or not value.strip(" \t\n\v\f\r"):
            continue
        if is_bound is False or (name == "OMP_PROC_BIND" and is_bound is None):
            continue  # threads are free, whatever the places are
        if name == "GOMP_CPU_AFFINITY" and hangs_libgomp(value):
            continue
        why = "it ties threads to processors; workers of a loader are forked from a "
        why += "thread that is tied to one of these places, and all run there"
        fix = f"unset {name}, or build_loader(..., num_workers=0)"
        yield EnvironmentFinding(20, "slow", name, value, why, fix)


def _endless_affinity(setting: Setting) -> Iterator[EnvironmentFinding]:
    name = "GOMP_CPU_AFFINITY"
    value = setting.environ.get(name)
    if value is not None and setting.platform == "linux" and hangs_libgomp(value):
        why = "libgomp goes on reading what is no number for ever: `import torch` "
        why += "does not return (measured)"
        yield EnvironmentFinding(20, "crash", name, value, why, f"unset {name}")


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
    tunables = setting.environ.get("GLIBC_TUNABLES", "")
    told = {name for name, value in split_tunables(tunables) if value is not None}
    for name in (*GLIBC_RANGES, "GLIBC_TUNABLES"):
        value = setting.environ.get(name)
        if value is None:
            continue
        if setting.platform != "linux":
            why = f"only glibc reads it, not {setting.platform}"
            yield EnvironmentFinding(20, "useless", name, value, why, f"unset {name}")
        elif replaced is not None:
            why = f"{replaced[0]} is preloaded and serves malloc: only glibc reads it"
            yield EnvironmentFinding(20, "useless", name, value, why, f"unset {name}")
        elif _set_after_start(setting, name):
            why = "glibc reads it when the process starts; it was set inside this one"
            fix = f"{name}={value} python train.py"
            yield EnvironmentFinding(20, "ignored", name, value, why, fix)
        elif name == "GLIBC_TUNABLES":
            yield from _tunables(value)
        elif GLIBC_RANGES[name][0] in told:
            why = f"GLIBC_TUNABLES sets {GLIBC_RANGES[name][0]} too and wins (measured)"
            yield EnvironmentFinding(20, "ignored", name, value, why, f"unset {name}")
        else:
            yield from _glibc_value(name, value)


def _glibc_value(name: str, value: str) -> Iterator[EnvironmentFinding]:
    """Compare what glibc reads with what was written."""
    number, taken = glibc_number(value), glibc_setting(name, value)
    _, least, most = GLIBC_RANGES[name]
    if number is None:
        why = "it is no number: glibc ignores it"
        yield EnvironmentFinding(20, "ignored", name, value, why, f"unset {name}")
    elif taken is None:
        why = f"glibc takes {least} to {most}, and ignores anything else"
        yield EnvironmentFinding(20, "ignored", name, value, why, f"unset {name}")
    elif not re.fullmatch(r"[ \t]*(?:0[xX][0-9a-fA-F]+|-?\d+)[ \t]*", value, re.ASCII):
        meant = _with_suffix(value)
        why = f"glibc knows no suffixes: it reads {taken} (measured on glibc 2.36)"
        fix = f"export {name}={taken if meant is None else meant}"
        yield EnvironmentFinding(20, "ignored", name, value, why, fix)
    elif re.fullmatch(r"[ \t]*0\d+[ \t]*", value, re.ASCII):
        why = f"a number that begins with 0 is octal to glibc: it reads {taken}"
        fix = f"export {name}={value.strip().lstrip('0') or 0}"
        yield EnvironmentFinding(20, "ignored", name, value, why, fix)


def _with_suffix(value: str) -> int | None:
    """Read a size such as 128M; None where it is none.

    >>> _with_suffix("128M"), _with_suffix("2x")
    (134217728, None)
    """
    match = re.fullmatch(r"\s*(\d+)\s*([kKmMgG])(?:i?[bB])?\s*", value, re.ASCII)
    if match is None:
        return None
    return int(match[1]) << 10 * (1 + "kmg".index(match[2].lower()))


def _tunables(value: str) -> Iterator[EnvironmentFinding]:
    """Say which parts of ``GLIBC_TUNABLES`` about malloc are not read."""
    ranges = {tunable: name for name, (tunable, _, _) in GLIBC_RANGES.items()}
    for name, number in split_tunables(value):
        near = difflib.get_close_matches(name, MALLOC_TUNABLES, 1, cutoff=_CLOSE)
        about_malloc = "malloc" in name or bool(near)
        if not about_malloc:
            continue  # of the loader, the processor ...: not about memory
        if name not in MALLOC_TUNABLES:
            why = f"glibc has no tunable {name!r} and skips it"
            why += f": probably {near[0]} is meant" if near else ""
        elif number is None:
            why = f"{name} has no value: write {name}=..."
        elif name in ranges and glibc_setting(ranges[name], number) is None:
            _, least, most = GLIBC_RANGES[ranges[name]]
            why = f"{name} takes {least} to {most}: glibc ignores {number!r}"
        elif name in ranges and not re.fullmatch(
            r"[ \t]*(?:0[xX][0-9a-fA-F]+|-?\d+)", number, re.ASCII
        ):
            why = f"glibc reads {glibc_number(number)} of {name}={number}; options are "
            why += "parted by colons"
        else:
            continue
        fix = "GLIBC_TUNABLES=NAME=NUMBER:NAME=NUMBER python train.py"
        yield EnvironmentFinding(20, "ignored", "GLIBC_TUNABLES", value, why, fix)


def _set_after_start(setting: Setting, name: str) -> bool:
    """Tell a variable set inside this process from one it was started with."""
    if setting.started_with is None:
        return False
    return setting.started_with.get(name) != setting.environ.get(name)
