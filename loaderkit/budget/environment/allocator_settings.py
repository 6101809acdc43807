"""Settings that do not do what they look like: those of torch's allocators.  Pure.

What torch makes of an allocator's setting is in ``allocator_conf.py``, its options in
``allocator_options.py``, the variables of other libraries in ``process_settings.py``.
Sources: torch 2.5 to 2.13 (``AllocatorConfig.h``, ``CUDAAllocatorConfig.h``), torch
2.13 (``MPSAllocator.mm``, ``MPSFallback.mm``) and the measurements in
``docs/environment.md``.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from loaderkit.answers import answer_wrong_names
from loaderkit.budget.environment.allocator_conf import read_allocator_settings
from loaderkit.budget.environment.allocator_options import (
    CUDA_BACKENDS,
    nearest_known,
    option_named,
    options_read_by,
)
from loaderkit.budget.environment.mend_settings import mended_settings, nearest_option
from loaderkit.notebook import HasCard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from loaderkit.budget.environment.allocator_conf import (
        Option,
        RejectedSettingError,
        SettingsReading,
    )

HIGH = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
LOW = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
UNIFIED = "PYTORCH_ALLOC_CONF"
OLD_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ALLOCATOR_NAMES = (*OLD_NAMES, UNIFIED)
DEFAULT_HIGH, DEFAULT_LOW, MAX_RATIO = 1.7, 1.4, 2.0
"""Of the watermarks, as shares of Metal's recommended working set (torch 2.13,
``MPSAllocator.h``)."""
_LOW_ABOVE_HIGH = 1
_WATERMARK_OUT_OF_RANGE = 2
_NO_LIMIT = 3
_OVERRIDDEN_NAME = 4
_RULE_OF_CAUSE = {"flag": 5, "structure": 6, "load": 6, "value": 7, "name": 14}
"""The number of the rule, by what the reader of torch misses."""
_SPLIT_BESIDE_SEGMENTS = 8
_SEGMENTS_THAT_CRASH = 9
_TOO_LATE = 10
_UNKNOWN_NAME = 11
_FALLBACK_WITHOUT_EFFECT = 12
_FALLBACK_NO_NUMBER = 13
_NO_SUCH_OPTION = 14
_READ_IN_PART = 15
_OTHER_REFUSAL = 16
"""Numbers of the rules, which are the rows of ``docs/environment.md``; those from 17 on
are in ``process_settings.py``."""
Level = Literal["crash", "ignored", "danger", "slow", "useless"]
"""What a misconfiguration does."""
LEVELS: tuple[Level, ...] = ("crash", "ignored", "danger", "slow", "useless")
"""Worst first."""


@answer_wrong_names()
@dataclass(frozen=True)
class EnvironmentFacts:
    """What the settings are judged against."""

    environ: Mapping[str, str] = field(repr=False)
    """Variables as they are now.  Not shown: a notebook that is sent on, or a log, must
    not hold the keys and tokens that are among them."""
    torch_version: tuple[int, int]
    """Major and minor."""
    backend: str
    """"cuda", "hip", "xpu", "mps" or "cpu"."""
    platform: str
    """As ``sys.platform`` writes it."""
    started_with: Mapping[str, str] | None = field(default=None, repr=False)
    """Variables when the process began; None where they cannot be read."""
    torch_imported: bool = False
    """Whether torch was imported already."""
    torch_threads: int | None = None
    """Threads that torch computes with now; None where it is not imported."""
    effective: str | None = None
    """The allocator settings torch has read; None if it has read none yet."""
    torch_error: str | None = None
    """What torch raised when it was asked to read them; None: nothing, or not asked."""
    asked_torch: bool = False
    """Whether torch was asked."""
    cpus: int | None = None
    """Processors that this process may use."""
    machine_cpus: int | None = None
    """Processors of the machine, which taskset, a container or Slurm may keep from this
    process; None where it may use all of them."""
    cpu_ids: frozenset[int] | None = None
    """Their numbers, where the system tells them."""
    openmp: str | None = "libgomp"
    """The OpenMP that torch brings along: "libgomp" (GNU's), "libomp" (LLVM's),
    "libiomp5" (Intel's); None where it is not known."""
    has_mkl: bool = True
    """Whether torch is built with MKL, whose number of threads it takes."""
    shares_device_tensors: bool = False
    """Whether device tensors go to other processes (CUDA IPC)."""


@answer_wrong_names()
@dataclass(frozen=True)
class EnvironmentFinding(HasCard):
    """One setting that does not do what it looks like."""

    number: int
    """1 to 20, in the order of ``docs/environment.md``."""
    level: Level
    """What it does."""
    variable: str
    """Its name."""
    value: str
    """Its value."""
    problem: str
    """What happens, and why."""
    fix: str
    """What to set instead."""
    prevents_import: bool = False
    """Whether `import torch` raises, ends the process or never returns."""

    def __str__(self) -> str:
        head = f"{self.level}: {self.variable}={self.value}"
        return f"{head}\n  why: {self.problem}\n  fix: {self.fix}"


def judge_environment(facts: EnvironmentFacts) -> list[EnvironmentFinding]:
    """Find the misconfigurations.

    Args:
        facts: Variables, versions and what torch has read.

    Returns:
        Findings, the worst first.

    >>> alone = EnvironmentFacts({HIGH: "0.8"}, (2, 13), "mps", "darwin")
    >>> print(judge_environment(alone)[0])
    crash: PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.8
      why: it is below the low watermark, 1.4: the first use of MPS raises "invalid ...
      fix: export PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.8 PYTORCH_MPS_LOW_WATERMARK_RATI...
    """
    findings = [
        *_mps_variables(facts),
        *_overridden_names(facts),
        *_allocator_options(facts),
        *_too_late(facts),
    ]
    return sorted(findings, key=rank)


def rank(finding: EnvironmentFinding) -> tuple[int, int]:
    """Give the order of findings, the worst first."""
    return LEVELS.index(finding.level), finding.number


def options_of(settings: str) -> dict[str, str]:
    """Split an allocator setting into its options.

    >>> options_of("expandable_segments:True,roundup_power2_divisions:[256:1,>:4]")
    {'expandable_segments': 'True', 'roundup_power2_divisions': '[256:1,>:4]'}
    """
    # Commas in brackets are of a list: the look-ahead refuses one that a "]" follows
    # before any "[".
    options = re.split(r",(?![^\[]*\])", settings)
    pairs = [option.partition(":") for option in options if option.strip()]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _mps_variables(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    """Judge the variables of MPS, each once.

    Builds for other systems have none of the code that reads them, so that no value is
    wrong there: torch 2.13 on Linux imports with a fall-back of "abc" (measured).
    """
    if facts.platform == "darwin":
        yield from _invalid_watermarks(facts)
        yield from _judge_fallback(facts)
        return
    for name in (HIGH, LOW, FALLBACK):
        value = facts.environ.get(name)
        if value is None:
            continue
        why = f"there is no MPS on {facts.platform}: nothing reads it"
        yield EnvironmentFinding(
            _FALLBACK_WITHOUT_EFFECT, "useless", name, value, why, f"unset {name}"
        )


def _invalid_watermarks(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    # In the order in which torch looks: it raises for the high one first.
    high, low = _read_ratio(facts, HIGH), _read_ratio(facts, LOW)
    value = facts.environ.get(HIGH, "")
    top = DEFAULT_HIGH if high is None else high
    if not 0 <= top <= MAX_RATIO:
        why = f'the range is 0 to {MAX_RATIO}: the first use of MPS raises "invalid '
        why += 'high watermark ratio"'
        fix = f"export {HIGH}=1 {LOW}=0.75"
        yield EnvironmentFinding(
            _WATERMARK_OUT_OF_RANGE, "crash", HIGH, value, why, fix
        )
        return
    if high == 0:
        why = "0 takes the limit away: macOS swaps, then freezes or kills the process"
        if not re.match(r"\s*[+-]?\.?0", value):
            why = f"torch reads a text that is no number as 0: {why}"
        fix = f"unset {HIGH} (the default, {DEFAULT_HIGH}, is above the RAM already)"
        yield EnvironmentFinding(_NO_LIMIT, "danger", HIGH, value, why, fix)
    yield from _low_watermark(facts, low, top)


def _low_watermark(
    facts: EnvironmentFacts, low: float | None, top: float
) -> Iterator[EnvironmentFinding]:
    bottom = DEFAULT_LOW if low is None else low
    if low is not None and low < 0:
        why = 'it must not be below 0: the first use of MPS raises "invalid low '
        why += 'watermark ratio"'
        yield EnvironmentFinding(
            _WATERMARK_OUT_OF_RANGE,
            "crash",
            LOW,
            facts.environ[LOW],
            why,
            f"unset {LOW}",
        )
    # 0 takes the high watermark away, and torch then holds the low one against its
    # greatest value.
    elif bottom > (top or MAX_RATIO):
        # Whoever set one of them alone has to hear of that one.
        name = LOW if low is not None else HIGH
        value = facts.environ.get(name, "")
        where = "" if low is not None else f", {DEFAULT_LOW}"
        why = f"it is below the low watermark{where}: the first use of MPS raises "
        why += '"invalid low watermark ratio"'
        if name == LOW:
            why = (
                f'it is above {HIGH}, {top}: the first use of MPS raises "invalid low '
            )
            why += 'watermark ratio"'
        # As ``configure_allocator`` sets it; the defaults are 1.4 of 1.7.
        less = f"{round(top * 0.75, 2):g}"
        fix = f"export {HIGH}={top:g} {LOW}={less}, or at run time "
        fix += f"torch.mps.set_per_process_memory_fraction({top:g})"
        yield EnvironmentFinding(_LOW_ABOVE_HIGH, "crash", name, value, why, fix)


def _read_ratio(facts: EnvironmentFacts, name: str) -> float | None:
    """Read a ratio as ``strtod`` does: what begins with no number is 0."""
    if name not in facts.environ:
        return None
    number = re.match(
        r"\s*[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", facts.environ[name]
    )
    return float(number[0]) if number else 0.0


def _judge_fallback(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    value = facts.environ.get(FALLBACK)
    if value is None:
        return
    # std::stoi reads "1abc" as 1, and throws where no digit comes first.
    if not re.match(r"\s*[+-]?\d", value):
        why = "torch reads it with std::stoi while it loads: no number, no import"
        fix = f"export {FALLBACK}=1"
        yield EnvironmentFinding(
            _FALLBACK_NO_NUMBER,
            "crash",
            FALLBACK,
            value,
            why,
            fix,
            prevents_import=True,
        )
    elif facts.torch_imported and was_set_after_start(facts, FALLBACK):
        why = "torch reads it while it is imported; it was set inside this process, "
        why += "which counts only if that was before `import torch`"
        fix = f"{FALLBACK}={value} python train.py"
        yield EnvironmentFinding(
            _FALLBACK_WITHOUT_EFFECT, "ignored", FALLBACK, value, why, fix
        )
    elif value.strip() != "0":
        why = "it sends operators that MPS lacks to the CPU; it frees no memory and "
        why += "moves nothing there when memory is short"
        fix = "keep it for missing operators; for memory see loaderkit.plan_batch"
        yield EnvironmentFinding(
            _FALLBACK_WITHOUT_EFFECT, "useless", FALLBACK, value, why, fix
        )


def settings_variable(facts: EnvironmentFacts) -> str | None:
    """Give the variable that torch takes its allocator's settings from.

    The older names come first, and count even where they are empty (measured).
    """
    names = _variables_read(facts)
    return next((name for name in names if name in facts.environ), None)


def _variables_read(facts: EnvironmentFacts) -> tuple[str, ...]:
    """Name the variables that a build of torch reads, the first that is set counts."""
    if facts.torch_version < (2, 10) and facts.backend == "cuda":
        return OLD_NAMES[:1]
    is_before_unified = facts.torch_version < (2, 9) or (
        facts.torch_version == (2, 9) and facts.backend in CUDA_BACKENDS
    )
    return OLD_NAMES if is_before_unified else ALLOCATOR_NAMES


def _overridden_names(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    chosen = settings_variable(facts)
    names_read = _variables_read(facts)
    for name in ALLOCATOR_NAMES:
        value = facts.environ.get(name)
        if value is None or name == chosen:
            continue
        # The same options under two names are how one writes for several torches.
        other = facts.environ.get(chosen or "")
        is_same = other is not None and options_of(value) == options_of(other)
        if other is not None and not is_same:
            why = f"{chosen}={other} is set too and wins (measured)"
            yield EnvironmentFinding(
                _OVERRIDDEN_NAME, "ignored", name, value, why, f"unset {chosen}"
            )
        if name not in names_read and not is_same:
            yield _variable_not_read(name, value, facts)


def _variable_not_read(
    name: str, value: str, facts: EnvironmentFacts
) -> EnvironmentFinding:
    version = _version_text(facts.torch_version)
    why = f"torch {version} built for {facts.backend} does not read this name"
    mended = mended_settings(value, facts.backend, facts.torch_version)
    fix = f"unset {name}"
    if mended is not None:
        fix = f"export {_old_name(facts)}={shlex.quote(mended)}"
    return EnvironmentFinding(_UNKNOWN_NAME, "ignored", name, value, why, fix)


def _old_name(facts: EnvironmentFacts) -> str:
    """Give the variable that every version of torch reads, of this build."""
    cuda_name, hip_name = OLD_NAMES
    return hip_name if facts.backend == "hip" else cuda_name


def _allocator_options(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    name = settings_variable(facts)
    value = facts.environ.get(name or "")
    if name is None or not value:
        return
    reading = read_allocator_settings(
        value,
        facts.backend,
        facts.torch_version,
        # Of this name, a build for CUDA reads what every build does (measured).
        common_only=facts.backend == "cuda" and name == OLD_NAMES[1],
    )
    yield from _rejected_by_torch(name, value, reading, facts)
    yield from _without_effect(name, value, reading, facts)
    yield from _conflicting_options(name, value, facts)


def _rejected_by_torch(
    name: str, value: str, reading: SettingsReading, facts: EnvironmentFacts
) -> Iterator[EnvironmentFinding]:
    """Say that torch raises; where torch was asked, its answer counts."""
    rejected = reading.rejected
    # Torch may refuse what our reading of its rules would let pass.
    number = _OTHER_REFUSAL if rejected is None else _RULE_OF_CAUSE[rejected.cause]
    fix = _mending_command(name, value, facts)
    if facts.torch_error is not None:
        why = f"the first use of the allocator raises {facts.torch_error}"
        if rejected is not None:
            why += f" ({_why_rejected(rejected, facts)})"
        yield EnvironmentFinding(number, "crash", name, value, why, fix)
    elif rejected is not None and not _torch_accepted(value, reading, facts):
        why = _why_rejected(rejected, facts)
        prevents_import = rejected.cause == "load"
        if not prevents_import:
            when = "the first use of the allocator"
            if reading.is_read_at_page_locking:
                when = "the first page-locked tensor, such as of pin_memory=True,"
            why = f"{when} raises: {why}"
        level: Level = "crash"
        if not reading.is_certain:
            level = "danger"
            known, here = _nearest_known_and_own(facts)
            why += f" (so it is in torch {known}; of torch {here} it is not known)"
        yield EnvironmentFinding(number, level, name, value, why, fix, prevents_import)


def _torch_accepted(
    value: str, reading: SettingsReading, facts: EnvironmentFacts
) -> bool:
    """Tell whether torch was asked, and took a setting that our reading rejects."""
    if not facts.asked_torch:
        return False
    if facts.backend not in CUDA_BACKENDS or not reading.is_certain:
        return True
    # Asked, a build for CUDA answers by the reader that every build has.  Its own, for
    # the values of CUDA's options, comes at the first use of the device: until then,
    # torch 2.13 tells "backend:x" to be in effect (measured).
    return options_of(value) != options_of(facts.effective or "")


def _why_rejected(rejected: RejectedSettingError, facts: EnvironmentFacts) -> str:
    """Say why, and of an option of another torch, of which."""
    option = option_named(rejected.option or "")
    if rejected.cause != "name" or option is None:
        return str(rejected)
    here = _version_text(facts.torch_version)
    since = _version_text(option.since)
    return f"torch {here} has no {option.name}, which came with torch {since}"


def _mending_command(name: str, value: str, facts: EnvironmentFacts) -> str:
    mended = mended_settings(value, facts.backend, facts.torch_version)
    if mended is not None and name in OLD_NAMES:
        name = _old_name(facts)  # all of it is read under this one, which wins
    return f"unset {name}" if mended is None else f"export {name}={shlex.quote(mended)}"


def _without_effect(
    name: str, value: str, reading: SettingsReading, facts: EnvironmentFacts
) -> Iterator[EnvironmentFinding]:
    fix = _mending_command(name, value, facts)
    for option in reading.options:
        if option.is_known and option.taken_for is not None:
            why = f"torch takes {option.name}:{option.value} for {option.taken_for}"
            yield EnvironmentFinding(_READ_IN_PART, "ignored", name, value, why, fix)
        elif not option.is_known:
            yield _skipped_option(name, value, option, fix, facts)
    for warning in reading.warnings:
        yield EnvironmentFinding(_READ_IN_PART, "ignored", name, value, warning, fix)


def _skipped_option(
    name: str, value: str, option: Option, fix: str, facts: EnvironmentFacts
) -> EnvironmentFinding:
    """Say why torch skips an option: of another build, another torch, or of none."""
    other = option_named(option.name)
    if other is not None and other.builds == "CUDA":
        why = f"only builds for CUDA and ROCm read {option.name}"
        if facts.backend in CUDA_BACKENDS:
            why = f"builds for CUDA read {option.name} from other variables only"
        return EnvironmentFinding(_READ_IN_PART, "useless", name, value, why, fix)
    known_version, here = _nearest_known_and_own(facts)
    why = f"torch {known_version} has no option {option.name!r} and skips it"
    if known_version != here:
        why += f"; of torch {here} it is not known"
    known = options_read_by(facts.backend, facts.torch_version)
    near = nearest_option(option.name, known)
    if other is not None:
        why += f": it came with torch {_version_text(other.since)}"
    elif near is not None:
        why += f": probably {near} is meant"
    else:
        why += f"; it knows {', '.join(known)}"
    return EnvironmentFinding(_NO_SUCH_OPTION, "ignored", name, value, why, fix)


def _nearest_known_and_own(facts: EnvironmentFacts) -> tuple[str, str]:
    """Write the torch whose reader is known, nearest to ours, and ours."""
    nearest = nearest_known(facts.torch_version)
    return _version_text(nearest), _version_text(facts.torch_version)


def _version_text(version: tuple[int, int]) -> str:
    major, minor = version
    return f"{major}.{minor}"


def _conflicting_options(
    name: str, value: str, facts: EnvironmentFacts
) -> Iterator[EnvironmentFinding]:
    options = options_of(value)
    # All that is said below is of options that do not go with this one.
    if options.get("expandable_segments", "").lower() != "true":
        return
    del options["expandable_segments"]
    others = ",".join(f"{option}:{given}" for option, given in options.items())
    mended = mended_settings(others, facts.backend, facts.torch_version)
    plain = f"export {name}={shlex.quote(mended)}" if mended else f"unset {name}"
    if "max_split_size_mb" in options:
        why = "expandable segments are never split by size: max_split_size_mb does "
        why += "nothing beside them"
        fix = f"export {name}=expandable_segments:True"
        yield EnvironmentFinding(
            _SPLIT_BESIDE_SEGMENTS, "useless", name, value, why, fix
        )
    if facts.backend == "hip":
        why = "expandable segments crash on ROCm (pytorch issue 187343)"
        yield EnvironmentFinding(_SEGMENTS_THAT_CRASH, "crash", name, value, why, plain)
    elif facts.shares_device_tensors:
        why = "tensors in expandable segments cannot be shared with other processes"
        yield EnvironmentFinding(_SEGMENTS_THAT_CRASH, "crash", name, value, why, plain)


def _too_late(facts: EnvironmentFacts) -> Iterator[EnvironmentFinding]:
    """Compare what torch has read with what the variables say now."""
    if facts.effective is None:
        return
    name = settings_variable(facts)
    now = facts.environ.get(name or "", "")
    # By their options: their order and the white space between them say nothing.
    if name is None or options_of(now) == options_of(facts.effective):
        return
    in_effect = facts.effective or "none"
    why = f"torch has read its settings already: {in_effect} are in effect"
    fix = f"{name}={now} python train.py, or loaderkit.configure_allocator(...)"
    yield EnvironmentFinding(_TOO_LATE, "ignored", name, now, why, fix)


def was_set_after_start(facts: EnvironmentFacts, name: str) -> bool:
    """Tell a variable set inside this process from one it was started with."""
    if facts.started_with is None:
        return False
    return facts.started_with.get(name) != facts.environ.get(name)
