"""Variables of other libraries that change what memory and threads do.  Pure.

CUDA's runtime, OpenMP, glibc and the allocators that replace glibc's read them once,
when the process starts or loads them.
"""

from __future__ import annotations

import collections
import difflib
import itertools
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from loaderkit.budget.environment.allocator_settings import (
    ALLOCATOR_NAMES,
    FALLBACK,
    HIGH,
    LOW,
    EnvironmentFinding,
    was_set_after_start,
)
from loaderkit.budget.environment.native_readers import (
    GLIBC_RANGES,
    MALLOC_TUNABLES,
    OPENMP_FORMS,
    glibc_number,
    glibc_setting,
    hangs_libgomp,
    is_read_by_libgomp,
    mkl_follows_processors,
    mkl_threads,
    openmp_binding,
    openmp_threads,
    split_tunables,
)
from loaderkit.budget.environment.openmp_places import read_affinity, read_places

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loaderkit.budget.environment.allocator_settings import EnvironmentFacts, Level

NO_CACHING = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
BLOCKING = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
BINDING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "OMP_PLACES")
OTHER_ALLOCATORS = {"MALLOC_CONF": "jemalloc", "MIMALLOC_VERBOSE": "mimalloc"}
"""Settings of allocators that have to be preloaded, and which."""
KNOWN_NAMES = (
    *ALLOCATOR_NAMES,
    *(HIGH, LOW, FALLBACK),
    *NO_CACHING,
    *BLOCKING,
    *THREADS,
    *BINDING,
    *OPENMP_FORMS,
    *GLIBC_RANGES,
    *OTHER_ALLOCATORS,
    "GLIBC_TUNABLES",
)
"""Variables that are judged; a name that is nearly one of them is probably misspelt."""
_REAL_BUT_NEAR = frozenset(
    {
        "PYTORCH_NPU_ALLOC_CONF",
        "PYTORCH_XPU_ALLOC_CONF",
        "PYTORCH_MUSA_ALLOC_CONF",
        "PYTORCH_MLU_ALLOC_CONF",
        "PYTORCH_HPU_ALLOC_CONF",
        "PYTORCH_DEBUG_MPS_ALLOCATOR",
        "OMP_NUM_TEAMS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
    }
)
"""Names that other libraries read, although they look like misspelt ones."""
_FAMILIES = re.compile(r"(?:PY)?TORCH_|G?OMP_|MALLOC_|CUDA_LAUNCH|HIP_LAUNCH|MKL_")
"""How names begin that may be misspelt by more than a letter: others are alike too, as
TBB_NUM_THREADS is."""
_FEWEST_WORDS = 3
"""Words that a name must have in common with a variable; chosen: MALLOC_ARENA is the
beginning of two of them."""
_MISSPELT = 17
_CACHING_OFF = 18
_BLOCKING_LAUNCHES = 19
_THREADS_AND_MALLOC = 20
"""Numbers of the rules, which are the rows of ``docs/environment.md``."""
_SET_BY_SKLEARN = {"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}
"""What ``import sklearn`` sets, in ``sklearn/__init__.py``, unless it is set."""
_CLOSE = 0.85
"""Similarity from which a name counts as misspelt.  Chosen between
PYTORCH_CUDA_ALLOC_CONFIG (0.96), PYTORCH_ALLOCATOR_CONF (0.90) and
PYTORCH_NVML_BASED_CUDA_CHECK (0.6)."""


def judge_process_settings(facts: EnvironmentFacts) -> list[EnvironmentFinding]:
    """Find variables that are misspelt, without effect, or cost more than they look.

    Args:
        facts: As read.

    Returns:
        Findings in the order of their variables.

    >>> from loaderkit.budget.environment.allocator_settings import EnvironmentFacts
    >>> environ = {"MALLOC_TRIM_THRESHOLD": "0"}
    >>> facts = EnvironmentFacts(environ, (2, 13), "cpu", "linux")
    >>> print(judge_process_settings(facts)[0])
    ignored: MALLOC_TRIM_THRESHOLD=0
      why: nothing reads this name: probably MALLOC_TRIM_THRESHOLD_ is meant
      fix: unset MALLOC_TRIM_THRESHOLD; export MALLOC_TRIM_THRESHOLD_=0
    """
    return [
        *_misspelt_names(facts),
        *_no_caching(facts),
        *_blocking_launches(facts),
        *_thread_counts(facts),
        *_thread_binding(facts),
        *_malloc_settings(facts),
    ]


def _misspelt_names(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    for name, value in facts.environ.items():
        near = _name_meant_by(name)
        if near is not None:
            why = f"nothing reads this name: probably {near} is meant"
            fix = f"unset {name}; export {near}={value}"
            yield EnvironmentFinding(_MISSPELT, "ignored", name, value, why, fix)


def _name_meant_by(name: str) -> str | None:
    """Give the variable that a name was probably meant to be; None where it is one.

    >>> _name_meant_by("PYTORCH_MPS_FALLBACK"), _name_meant_by("PYTORHC_ALLOC_CONF")
    ('PYTORCH_ENABLE_MPS_FALLBACK', 'PYTORCH_ALLOC_CONF')
    """
    if name in KNOWN_NAMES or name in _REAL_BUT_NEAR:
        return None
    # From the surest reading to the vaguest: another case, a slip of the fingers, words
    # that were misremembered, and at last a name that is merely alike.
    upper = name.upper()
    if upper in KNOWN_NAMES:
        return upper
    one_edit = [known for known in KNOWN_NAMES if _is_one_edit(upper, known)]
    if one_edit:
        return one_edit[0]
    # Long names are misremembered by the word: one is left out, or two are exchanged.
    words = list(filter(None, upper.split("_")))
    for known in KNOWN_NAMES:
        known_words = list(filter(None, known.split("_")))
        if len(words) >= _FEWEST_WORDS and _lacks_at_most_one(words, known_words):
            return known
    if not _FAMILIES.match(upper):
        return None
    near = difflib.get_close_matches(upper, KNOWN_NAMES, 1, cutoff=_CLOSE)
    return near[0] if near else None


def _is_one_edit(name: str, known: str) -> bool:
    """Tell whether one letter is missing, added or another, or two are exchanged."""
    if name == known or abs(len(name) - len(known)) > 1:
        return False
    # What is left between the letters that both begin and end with is the edit.
    start = _common_start(name, known)
    end = _common_start(name[start:][::-1], known[start:][::-1])
    edited = name[start : len(name) - end]
    known_edited = known[start : len(known) - end]
    is_exchange = len(edited) == 2 and edited == known_edited[::-1]
    return is_exchange or max(len(edited), len(known_edited)) == 1


def _common_start(text: str, other: str) -> int:
    """Count the letters with which both begin."""
    pairs = zip(text, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _lacks_at_most_one(words: list[str], known_words: list[str]) -> bool:
    """Tell whether words are the known ones in any order, or all but one of them."""
    missing = collections.Counter(known_words) - collections.Counter(words)
    added = collections.Counter(words) - collections.Counter(known_words)
    return not added and missing.total() <= 1


def _no_caching(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    for name in NO_CACHING:
        value = facts.environ.get(name)
        if value is None:
            continue
        if facts.backend not in {"cuda", "hip"}:
            why = f"this torch is built for {facts.backend}: nothing reads it"
            yield EnvironmentFinding(
                _CACHING_OFF, "useless", name, value, why, f"unset {name}"
            )
            continue
        why = (
            "every tensor asks the driver for its memory and gives it back: steps are "
            "many times slower, and no other setting of the allocator has an effect"
        )
        if value.lower() in {"0", "false", "no", "off", ""}:
            why = f"torch looks only whether it is set, {value!r} turns it on: {why}"
        yield EnvironmentFinding(
            _CACHING_OFF, "slow", name, value, why, f"unset {name}"
        )


def _blocking_launches(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    for name in BLOCKING:
        value = facts.environ.get(name)
        # 0, and nothing at all, is how one turns it off: that costs nobody anything.
        if value is None or re.fullmatch(r"\s*0*\s*", value, re.ASCII):
            continue
        if facts.backend not in {"cuda", "hip"}:
            why = f"this torch is built for {facts.backend}: nothing reads it"
            yield EnvironmentFinding(
                _BLOCKING_LAUNCHES, "useless", name, value, why, f"unset {name}"
            )
            continue
        why = (
            "every kernel waits for the one before: right for finding an error, slow "
            "for training; it frees no memory"
        )
        yield EnvironmentFinding(
            _BLOCKING_LAUNCHES, "slow", name, value, why, f"unset {name}"
        )


def _thread_or_malloc_finding(
    level: Level, name: str, value: str, why: str, fix: str = ""
) -> EnvironmentFinding:
    """Make a finding on threads or malloc; without a fix, the variable is unset."""
    fix = fix or f"unset {name}"
    return EnvironmentFinding(_THREADS_AND_MALLOC, level, name, value, why, fix)


def _thread_counts(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    yield from _openmp_threads(facts)
    yield from _mkl_threads(facts)
    yield from _openmp_limit(facts)
    yield from _openmp_values(facts)


def _openmp_threads(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    name = "OMP_NUM_THREADS"
    value = facts.environ.get(name)
    if value is None:
        return
    # One finding a variable, of what hides the others: a number that is not read, read
    # too late, or overruled, cannot be too high as well.
    count = openmp_threads(value)
    mkl_count = _threads_of_mkl(facts)
    if count is None:
        why = "it is no number of threads: OpenMP reports it and takes its default"
        fix = f"export {name}={facts.cpus or 1}"
        yield _thread_or_malloc_finding("ignored", name, value, why, fix)
    elif was_set_after_start(facts, name) and not _is_in_effect(facts, count):
        why = (
            "OpenMP reads it while it is loaded, before or with torch; it was set "
            f"inside this process, and torch computes with {facts.torch_threads} "
            "threads"
        )
        fix = f"{name}={value} python train.py, or torch.set_num_threads({count})"
        yield _thread_or_malloc_finding("ignored", name, value, why, fix)
    elif mkl_count is not None and mkl_count != count:
        why = f"MKL_NUM_THREADS is set too, and torch takes what MKL says: {mkl_count}"
        yield _thread_or_malloc_finding(
            "ignored", name, value, why, "unset MKL_NUM_THREADS"
        )
    elif mkl_count is None and facts.cpus is not None and count > facts.cpus:
        yield _more_than_processors(facts, name, value)


def _is_in_effect(facts: EnvironmentFacts, count: int) -> bool:
    """Tell by torch's threads whether a number was set before OpenMP was loaded."""
    if facts.torch_threads is None:
        return True  # torch has yet to read it
    # MKL's own number wins, and MKL keeps to the processors.
    allowed = {count, _threads_of_mkl(facts), min(count, facts.cpus or count)}
    return facts.torch_threads in allowed


def _threads_of_mkl(facts: EnvironmentFacts) -> int | None:
    """Give the number of threads that MKL is told by a variable of its own."""
    value = facts.environ.get("MKL_NUM_THREADS")
    return None if value is None or not facts.has_mkl else mkl_threads(value)


def _mkl_threads(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    name = "MKL_NUM_THREADS"
    value = facts.environ.get(name)
    if value is None:
        return
    fix = f"export {name}={facts.cpus or 1}"
    if not facts.has_mkl:
        why = "this torch is built without MKL: nothing in it reads it"
        yield _thread_or_malloc_finding("useless", name, value, why)
        return
    count = mkl_threads(value)
    if count is None:
        why = "it is no number above 0: MKL takes its default"
        yield _thread_or_malloc_finding("ignored", name, value, why, fix)
    elif str(count) != value.lstrip("0"):
        why = (
            f"MKL reads it as {count}: it knows digits and nothing else, and torch "
            "takes as many threads as MKL (measured)"
        )
        yield _thread_or_malloc_finding("slow", name, value, why, fix)
    elif facts.cpus is not None and count > facts.cpus:
        yield _more_than_processors(facts, name, value)


def _more_than_processors(
    facts: EnvironmentFacts, name: str, value: str
) -> EnvironmentFinding:
    """Say what more threads than processors do."""
    fix = f"export {name}={facts.cpus}"
    dynamic = facts.environ.get("MKL_DYNAMIC")
    machine_cpus = facts.machine_cpus or facts.cpus
    if facts.has_mkl and mkl_follows_processors(dynamic):
        if machine_cpus != facts.cpus:
            why = (
                f"torch keeps to the {machine_cpus} processors of the machine, as MKL "
                f"does (measured), and this process may use {facts.cpus} of them: "
                "threads wait for each other, in each worker of a loader too"
            )
            return _thread_or_malloc_finding("slow", name, value, why, fix)
        why = (
            f"torch keeps to the {facts.cpus} processors of this process, as MKL "
            "does (measured); other libraries may start all, which wait for each "
            "other"
        )
        return _thread_or_malloc_finding("useless", name, value, why, fix)
    why = (
        f"this process has {facts.cpus} processors: threads wait for each "
        "other, in each worker of a loader too"
    )
    return _thread_or_malloc_finding("slow", name, value, why, fix)


def _thread_binding(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    """Report variables that bind threads to processors, and those that are dropped."""
    yield from _endless_affinity(facts)
    if facts.openmp != "libgomp":
        # Other OpenMP libraries follow rules that were not measured.
        return

    binding = facts.environ.get("OMP_PROC_BIND")
    is_bound = None if binding is None else openmp_binding(binding)
    if binding is not None and is_bound is None:
        why = "it is neither true, false, nor a list of master, close and spread"
        yield _dropped_by_openmp("OMP_PROC_BIND", binding, why)

    usable = facts.cpu_ids or frozenset(range(facts.cpus or 1))
    places_value = facts.environ.get("OMP_PLACES")
    places = None if places_value is None else read_places(places_value, usable)
    if places_value is not None and places is None:
        why = (
            "it is neither threads, cores, sockets, nor a list such as {0},{1} "
            "of processors that this process may use"
        )
        yield _dropped_by_openmp("OMP_PLACES", places_value, why)

    if is_bound is False:
        # Threads are not bound, whatever the places are.
        return
    yield from _judge_affinity(facts, usable, has_places=places is not None)
    if places_value is not None and places is not None and places.holds_back(usable):
        yield _binds_threads("OMP_PLACES", places_value)
    if binding is not None and is_bound and places is None:
        # Without OMP_PLACES, each processor is a place of its own.
        yield _binds_threads("OMP_PROC_BIND", binding)


def _judge_affinity(
    facts: EnvironmentFacts, usable: frozenset[int], *, has_places: bool
) -> Iterator[EnvironmentFinding]:
    name = "GOMP_CPU_AFFINITY"
    value = facts.environ.get(name)
    if value is None or hangs_libgomp(value):
        return
    places = read_affinity(value, usable)
    if places is None:
        why = "it is no list such as 0-3 whose first processor this process may use"
        yield _dropped_by_openmp(name, value, why)
    elif has_places:
        why = "OMP_PLACES is set too and wins"
        yield _thread_or_malloc_finding("ignored", name, value, why)
    elif places.holds_back(usable):
        yield _binds_threads(name, value)


def _dropped_by_openmp(name: str, value: str, why: str) -> EnvironmentFinding:
    why += ": OpenMP reports it and drops it"
    return _thread_or_malloc_finding("ignored", name, value, why)


def _binds_threads(name: str, value: str) -> EnvironmentFinding:
    why = (
        "it ties threads to processors; workers of a loader are forked from a "
        "thread that is tied to one of these places, and all run there"
    )
    fix = f"unset {name}, or build_loader(..., num_workers=0)"
    return _thread_or_malloc_finding("slow", name, value, why, fix)


def _endless_affinity(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    name = "GOMP_CPU_AFFINITY"
    value = facts.environ.get(name)
    if value is not None and facts.platform == "linux" and hangs_libgomp(value):
        why = (
            "libgomp goes on reading what is no number for ever: `import torch` "
            "does not return (measured)"
        )
        finding = _thread_or_malloc_finding("crash", name, value, why)
        yield replace(finding, prevents_import=True)


def _openmp_values(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    """Say which other variables of OpenMP are dropped, or are of another one."""
    if facts.openmp != "libgomp":
        return
    for name, form in OPENMP_FORMS.items():
        value = facts.environ.get(name)
        if value is not None and not is_read_by_libgomp(name, value):
            why = f"it is not {form.description}"
            yield _dropped_by_openmp(name, value, why)
    # By the name's beginning: there are dozens of them, and none has an effect here.
    for name in sorted(facts.environ):
        value = facts.environ[name]
        if name.startswith("KMP_") and not _is_set_by_sklearn(facts, name):
            why = (
                "only the OpenMP of Intel and LLVM reads it, and this torch brings "
                "GNU's along (measured: nothing changes)"
            )
            yield _thread_or_malloc_finding("useless", name, value, why)


def _is_set_by_sklearn(facts: EnvironmentFacts, name: str) -> bool:
    """Whether importing scikit-learn set a variable, and nobody asked for it."""
    value = facts.environ[name]
    return value == _SET_BY_SKLEARN.get(name) and was_set_after_start(facts, name)


def _openmp_limit(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    """Say where fewer threads run than ``torch.get_num_threads()`` tells."""
    name = "OMP_THREAD_LIMIT"
    value = facts.environ.get(name)
    if value is None or not is_read_by_libgomp(name, value):
        return
    limit = int(value)
    requested = openmp_threads(facts.environ.get("OMP_NUM_THREADS", ""))
    threads = facts.cpus if requested is None else requested
    if threads is not None and limit < threads:
        why = (
            f"at most {limit} threads run at a time, whatever torch.get_num_threads() "
            f"tells, which is {threads} (measured)"
        )
        yield _thread_or_malloc_finding("slow", name, value, why)


def _malloc_settings(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    preloaded = facts.environ.get("LD_PRELOAD", "")
    yield from _glibc_settings(facts, preloaded)
    for name, allocator in OTHER_ALLOCATORS.items():
        if name in facts.environ and allocator not in preloaded:
            value = facts.environ[name]
            why = f"{allocator} reads it, and is not preloaded"
            fix = f"LD_PRELOAD=.../lib{allocator}.so {name}={value} python train.py"
            yield _thread_or_malloc_finding("useless", name, value, why, fix)


def _glibc_settings(
    facts: EnvironmentFacts, preloaded: str
) -> Iterator[EnvironmentFinding]:
    replaced = re.search(r"jemalloc|tcmalloc|mimalloc", preloaded)
    tunables = facts.environ.get("GLIBC_TUNABLES", "")
    tunables_set = {
        tunable.name
        for tunable in split_tunables(tunables)
        if tunable.value is not None
    }
    for name in (*GLIBC_RANGES, "GLIBC_TUNABLES"):
        value = facts.environ.get(name)
        if value is None:
            continue
        if facts.platform != "linux":
            why = f"only glibc reads it, not {facts.platform}"
            yield _thread_or_malloc_finding("useless", name, value, why)
        elif replaced is not None:
            why = f"{replaced[0]} is preloaded and serves malloc: only glibc reads it"
            yield _thread_or_malloc_finding("useless", name, value, why)
        elif was_set_after_start(facts, name):
            why = "glibc reads it when the process starts; it was set inside this one"
            fix = f"{name}={value} python train.py"
            yield _thread_or_malloc_finding("ignored", name, value, why, fix)
        elif name == "GLIBC_TUNABLES":
            yield from _glibc_tunables(value)
        elif GLIBC_RANGES[name].tunable in tunables_set:
            tunable = GLIBC_RANGES[name].tunable
            why = f"GLIBC_TUNABLES sets {tunable} too and wins (measured)"
            yield _thread_or_malloc_finding("ignored", name, value, why)
        else:
            yield from _glibc_value(name, value)


def _glibc_value(name: str, value: str) -> Iterator[EnvironmentFinding]:
    """Compare what glibc reads with what was written."""
    taken = glibc_setting(name, value)
    if glibc_number(value) is None:
        why = "it is no number: glibc ignores it"
        yield _thread_or_malloc_finding("ignored", name, value, why)
    elif taken is None:
        limits = GLIBC_RANGES[name]
        why = f"glibc takes {limits.least} to {limits.most}, and ignores anything else"
        yield _thread_or_malloc_finding("ignored", name, value, why)
    elif not re.fullmatch(r"[ \t]*(?:0[xX][0-9a-fA-F]+|-?\d+)[ \t]*", value, re.ASCII):
        intended = _with_suffix(value)
        why = f"glibc knows no suffixes: it reads {taken} (measured on glibc 2.36)"
        fix = f"export {name}={taken if intended is None else intended}"
        yield _thread_or_malloc_finding("ignored", name, value, why, fix)
    elif re.fullmatch(r"[ \t]*0\d+[ \t]*", value, re.ASCII):
        why = f"a number that begins with 0 is octal to glibc: it reads {taken}"
        fix = f"export {name}={value.strip().lstrip('0') or 0}"
        yield _thread_or_malloc_finding("ignored", name, value, why, fix)


def _with_suffix(value: str) -> int | None:
    """Read a size such as 128M; None where it is none.

    >>> _with_suffix("128M"), _with_suffix("2x")
    (134217728, None)
    """
    match = re.fullmatch(r"\s*(\d+)\s*([kKmMgG])(?:i?[bB])?\s*", value, re.ASCII)
    if match is None:
        return None
    power_of_1024 = 1 + "kmg".index(match[2].lower())
    return int(match[1]) << 10 * power_of_1024


def _glibc_tunables(value: str) -> Iterator[EnvironmentFinding]:
    """Say which parts of ``GLIBC_TUNABLES`` about malloc are not read."""
    variables = {limits.tunable: name for name, limits in GLIBC_RANGES.items()}
    for name, number in split_tunables(value):
        variable = variables.get(name)
        near = difflib.get_close_matches(name, MALLOC_TUNABLES, 1, cutoff=_CLOSE)
        is_about_malloc = "malloc" in name or bool(near)
        if not is_about_malloc:
            # Of the loader, the processor, ...: not about memory.
            continue
        if name not in MALLOC_TUNABLES:
            why = f"glibc has no tunable {name!r} and skips it"
            if near:
                why += f": probably {near[0]} is meant"
        elif number is None:
            why = f"{name} has no value: write {name}=..."
        elif variable is not None and glibc_setting(variable, number) is None:
            limits = GLIBC_RANGES[variable]
            why = (
                f"{name} takes {limits.least} to {limits.most}: "
                f"glibc ignores {number!r}"
            )
        elif variable is not None and not re.fullmatch(
            r"[ \t]*(?:0[xX][0-9a-fA-F]+|-?\d+)", number, re.ASCII
        ):
            why = (
                f"glibc reads {glibc_number(number)} of {name}={number}; options are "
                "parted by colons"
            )
        else:
            continue
        fix = "GLIBC_TUNABLES=NAME=NUMBER:NAME=NUMBER python train.py"
        yield _thread_or_malloc_finding("ignored", "GLIBC_TUNABLES", value, why, fix)
