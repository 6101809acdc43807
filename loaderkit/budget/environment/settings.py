"""Reads the settings of this process, and changes them while that still counts.

Nothing here imports torch unless it is imported already, so that it can come first.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from loaderkit.answers import answer_wrong_names
from loaderkit.arguments import check_positive, check_truth, refuse_value
from loaderkit.budget.environment.allocator_settings import (
    HIGH,
    LOW,
    MAX_RATIO,
    OLD_NAMES,
    UNIFIED,
    EnvironmentFacts,
    EnvironmentFinding,
    judge_environment,
    options_of,
    rank,
)
from loaderkit.budget.environment.process_settings import judge_process_settings
from loaderkit.call_keywords import suggest_keywords
from loaderkit.errors import BudgetError, OptionError
from loaderkit.library_files import installed_version
from loaderkit.notebook import HasCard, repr_in_a_line

if TYPE_CHECKING:
    from types import ModuleType

_LOW_SHARE = 0.75
"""Of the high watermark, for the low one; chosen: the defaults are 1.4 and 1.7, and it
must be below."""
_OPENMP_LIBRARIES = ("libiomp5", "libomp", "libgomp")
"""Intel's, LLVM's and GNU's: the first there is serves all."""


@answer_wrong_names()
@dataclass(frozen=True)
class Environment(HasCard):
    """The settings of this process, judged."""

    facts: EnvironmentFacts
    """What was read."""
    findings: list[EnvironmentFinding]
    """What does not do what it looks like, the worst first."""

    @property
    def ok(self) -> bool:
        """Whether every setting does what it says."""
        return not self.findings

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        if self.ok:
            return "Environment: every setting does what it says."
        return "\n".join(map(str, self.findings))

    def to_json(self) -> dict[str, Any]:
        """Give the findings as plain values."""
        findings = [asdict(finding) for finding in self.findings]
        return {"findings": findings, "effective": self.facts.effective}


@answer_wrong_names()
@dataclass(frozen=True)
class Configured(HasCard):
    """What was set, and when it takes effect."""

    how: Literal["environment", "run time"]
    """Read from the environment at torch's first use, or in effect now."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables set here, which child processes get too."""
    effective: str | None = None
    """The settings torch confirmed; None before its first use."""

    def __str__(self) -> str:
        assignments = [f"{name}={value}" for name, value in self.variables.items()]
        settings = " ".join(assignments) or self.effective
        is_now = self.how == "run time"
        since = "from now on" if is_now else "from torch's first use on"
        return f"{settings} ({since})"


@suggest_keywords
def check_environment(
    *, ask_torch: bool | None = None, shares_device_tensors: bool = False
) -> Environment:
    """Look for settings that crash, are ignored, or do not help.

    Args:
        ask_torch: Ask torch what it has read, which makes it read now if it has not.
            By default only once an accelerator is in use.
        shares_device_tensors: Whether tensors on a device go to other processes.

    Returns:
        The findings, each with its fix; nothing is changed, and torch not imported.
    """
    if ask_torch is not None:
        check_truth("ask_torch", ask_torch)
    check_truth("shares_device_tensors", shares_device_tensors)
    facts = read_facts(ask_torch=ask_torch, shares_device_tensors=shares_device_tensors)
    findings = [*judge_environment(facts), *judge_process_settings(facts)]
    return Environment(facts, sorted(findings, key=rank))


def read_facts(
    *, ask_torch: bool | None = None, shares_device_tensors: bool = False
) -> EnvironmentFacts:
    """Read variables, versions and what torch has in effect.

    Args:
        ask_torch: See :func:`check_environment`.
        shares_device_tensors: As told.

    Returns:
        What the settings are judged against.
    """
    torch = sys.modules.get("torch")
    # Asking makes torch read its settings for good: only where it has already.
    is_asked = _has_used_accelerator(torch) if ask_torch is None else ask_torch
    answer = _ask_torch(torch) if is_asked else _TorchAnswer()
    return EnvironmentFacts(
        environ=dict(os.environ),
        torch_version=_torch_version(),
        backend=_current_backend(torch),
        platform=sys.platform,
        started_with=_started_with(),
        torch_imported=torch is not None,
        torch_threads=None if torch is None else torch.get_num_threads(),
        effective=answer.effective,
        torch_error=answer.error,
        asked_torch=answer.is_given,
        cpus=_usable_cpus(),
        machine_cpus=os.cpu_count(),
        cpu_ids=_usable_cpu_ids(),
        openmp=_openmp_of_torch(),
        has_mkl=_has_mkl(torch),
        shares_device_tensors=shares_device_tensors,
    )


@suggest_keywords
def configure_allocator(
    *,
    expandable_segments: bool | None = None,
    max_split_size_mb: int | None = None,
    garbage_collection_threshold: float | None = None,
    mps_fraction: float | None = None,
) -> Configured:
    """Set torch's allocators, before their first use or, where that is past, at once.

    Args:
        expandable_segments: CUDA: join free pieces, against fragmentation.
        max_split_size_mb: Never split free blocks larger than this many MiB; from 20,
            and from 21 up to torch 2.9 on CUDA.
        garbage_collection_threshold: Free unused blocks above this share, 0 to 1.
        mps_fraction: MPS: limit as a share of Metal's recommended working set, up to
            2.  Both watermarks are set, since one alone can crash.

    Returns:
        What was set and from when it counts.

    Raises:
        ValueError: A value torch would refuse.
        BudgetError: Too late, and this torch cannot change it at run time.
    """
    arguments = {
        "expandable_segments": expandable_segments,
        "max_split_size_mb": max_split_size_mb,
        "garbage_collection_threshold": garbage_collection_threshold,
    }
    options = {
        name: str(value) for name, value in arguments.items() if value is not None
    }
    if not options and mps_fraction is None:
        message = "nothing to configure: name at least one setting"
        why = "every setting was left out, and the allocator stays as it is"
        fix = "configure_allocator(expandable_segments=True)"
        raise OptionError(message, why=why, fix=fix)
    _refuse_invalid(options, mps_fraction)

    torch = sys.modules.get("torch")
    variables: dict[str, str] = {}
    if mps_fraction is not None:
        variables |= _set_watermarks(torch, mps_fraction)
    if options:
        variables |= _set_variable(options)
    if torch is None:
        return Configured("environment", variables)
    effective = _set_at_run_time(torch, options) if options else None
    return Configured("run time", variables, effective)


def _refuse_invalid(options: dict[str, str], fraction: float | None) -> None:
    """Refuse before anything is set what torch would refuse at its first use."""
    settings = _join_options(options)
    facts = EnvironmentFacts(
        {UNIFIED: settings}, _torch_version(), _current_backend(None), sys.platform
    )
    for finding in judge_environment(facts):
        if finding.level == "crash":
            message = f"{settings} would end the process."
            raise OptionError(message, why=finding.problem, fix=finding.fix)
    if fraction is None:
        return
    if check_positive("mps_fraction", fraction) > MAX_RATIO:
        name, wanted = "mps_fraction", f"a number above 0 and up to {MAX_RATIO}"
        raise refuse_value(name, fraction, wanted, 0.8)


def _set_watermarks(torch: ModuleType | None, fraction: float) -> dict[str, str]:
    variables = {HIGH: f"{fraction:g}", LOW: f"{fraction * _LOW_SHARE:g}"}
    os.environ.update(variables)
    if torch is not None and torch.backends.mps.is_available():
        torch.mps.set_per_process_memory_fraction(fraction)
    return variables


def _set_variable(options: dict[str, str]) -> dict[str, str]:
    """Put all options under one name, the one this torch reads."""
    # The old names last, since they win where several are set: what counted goes on to
    # count.  All are taken away, or an old name would win over what is set here.
    options_before: dict[str, str] = {}
    for name in (UNIFIED, *OLD_NAMES):
        options_before |= options_of(os.environ.pop(name, ""))
    settings = _join_options(options_before | options)
    name = UNIFIED if _torch_version() >= (2, 10) else OLD_NAMES[0]
    os.environ[name] = settings
    return {name: settings}


def _join_options(options: dict[str, str]) -> str:
    return ",".join(f"{name}:{value}" for name, value in options.items())


def _set_at_run_time(torch: ModuleType, options: dict[str, str]) -> str:
    """Change the settings in effect; the call resets every option it is not told."""
    effective = _ask_torch(torch).effective
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is None or effective is None:
        message = "It is too late to change the allocator's settings."
        why = f"torch {torch.__version__} reads them once; in effect: {effective}"
        raise BudgetError(
            message, why=why, fix="configure before anything imports torch"
        )
    change(_join_options(options_of(effective) | options))
    return _ask_torch(torch).effective or ""


class _TorchAnswer(NamedTuple):
    """What torch says of its allocator's settings."""

    effective: str | None = None
    """As it has read them."""
    error: str | None = None
    """What it raised instead."""

    @property
    def is_given(self) -> bool:
        """Whether torch was asked, and can answer."""
        return self.effective is not None or self.error is not None


def _ask_torch(torch: ModuleType | None) -> _TorchAnswer:
    """Let torch read its settings; give them, or what it raised."""
    # There is no public way to ask; older versions have none at all.
    internals = getattr(torch, "_C", None)
    read = getattr(internals, "_accelerator_getAllocatorSettings", None)
    if read is None:
        return _TorchAnswer()
    try:
        return _TorchAnswer(effective=str(read()))
    except (RuntimeError, ValueError, IndexError) as error:
        first_line = str(error).partition("\n")[0]
        return _TorchAnswer(error=f"{type(error).__name__}: {first_line}")


def _usable_cpus() -> int | None:
    # macOS has no affinity: a process may use all.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _usable_cpu_ids() -> frozenset[int] | None:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return None


def _openmp_of_torch() -> str | None:
    """Name the OpenMP among the libraries beside torch, without importing torch."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    torch_package = importlib.util.find_spec("torch")
    if torch_package is None or not torch_package.submodule_search_locations:
        return None
    libraries = Path(torch_package.submodule_search_locations[0]) / "lib"
    for name in _OPENMP_LIBRARIES:
        # What is preloaded serves everybody, whatever torch brings along.
        if name in preloaded:
            return name
    for name in _OPENMP_LIBRARIES:
        if any(libraries.glob(f"{name}*")):
            return name
    return None


def _has_mkl(torch: ModuleType | None) -> bool:
    """Say whether torch is built with MKL; its builds for x86 are, but macOS's."""
    if torch is not None:
        return bool(torch.backends.mkl.is_available())
    return sys.platform != "darwin" and platform.machine() in {"x86_64", "AMD64"}


def _has_used_accelerator(torch: ModuleType | None) -> bool:
    """Tell whether torch has used an accelerator, and so read its settings."""
    if torch is None:
        return False

    return bool(torch.cuda.is_initialized())


def _current_backend(torch: ModuleType | None) -> str:
    """Say for which kind of device this torch was built, without importing it."""
    if torch is not None:
        if torch.version.hip:
            return "hip"
        if torch.version.cuda:
            return "cuda"
    version = _version_text()
    # Wheels say it behind the version: "2.13.0+cpu".  One from PyPI says nothing, and
    # is CUDA's on Linux.
    for word, backend in (("rocm", "hip"), ("xpu", "xpu"), ("cpu", "cpu")):
        if word in version:
            return backend
    return "mps" if sys.platform == "darwin" else "cuda"


def _version_text() -> str:
    return installed_version("torch") or "0.0"


def _torch_version() -> tuple[int, int]:
    major, minor, *_ = _version_text().split(".")
    return int(major), int(minor)


def _started_with() -> dict[str, str] | None:
    """Read the variables the process began with, where the system keeps them."""
    import psutil

    try:
        return dict(psutil.Process().environ())
    except (psutil.Error, OSError):
        return None
