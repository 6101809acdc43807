"""Settings that do not do what they look like: thirteen misconfigurations.  Pure.

Sources: torch 2.13 (``AllocatorConfig.h``, ``MPSAllocator.mm``, ``MPSFallback.mm``) and
the measurements in ``docs/environment.md``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HIGH = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
LOW = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
UNIFIED = "PYTORCH_ALLOC_CONF"
OLD_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ALLOCATOR_NAMES = (*OLD_NAMES, UNIFIED)
DEFAULT_HIGH, DEFAULT_LOW, MAX_RATIO = 1.7, 1.4, 2.0
LEVELS = ("crash", "ignored", "danger", "useless")
"""What a misconfiguration does, worst first."""


@dataclass(frozen=True)
class Setting:
    """What the settings are judged against."""

    environ: Mapping[str, str]
    """Variables as they are now."""
    torch_version: tuple[int, int]
    """Major and minor."""
    backend: str
    """"cuda", "hip", "xpu", "mps" or "cpu"."""
    platform: str
    """As ``sys.platform`` writes it."""
    started_with: Mapping[str, str] | None = None
    """Variables when the process began; None where they cannot be read."""
    torch_imported: bool = False
    """Whether torch was imported already."""
    effective: str | None = None
    """The allocator settings torch has read; None if it has read none yet."""
    shares_device_tensors: bool = False
    """Whether device tensors go to other processes (CUDA IPC)."""


@dataclass(frozen=True)
class Finding:
    """One setting that does not do what it looks like."""

    number: int
    """1 to 13, in the order of ``docs/environment.md``."""
    level: str
    """One of :data:`LEVELS`."""
    variable: str
    """Its name."""
    value: str
    """Its value."""
    problem: str
    """What happens, and why."""
    fix: str
    """What to set instead."""

    def __str__(self) -> str:
        head = f"{self.level}: {self.variable}={self.value}"
        return f"{head}\n  why: {self.problem}\n  fix: {self.fix}"


def judge_environment(setting: Setting) -> list[Finding]:
    """Find the misconfigurations.

    Args:
        setting: Variables, versions and what torch has read.

    Returns:
        Findings, the worst first.

    >>> alone = Setting({HIGH: "0.8"}, (2, 13), "mps", "darwin")
    >>> print(judge_environment(alone)[0])
    crash: PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.8
      why: it is below the low watermark, 1.4: the first use of MPS raises "invalid ...
      fix: export PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.8 PYTORCH_MPS_LOW_WATERMARK_RATI...
    """
    found = [
        *_watermarks(setting),
        *_fallback(setting),
        *_wrong_place(setting),
        *_names(setting),
        *_allocator(setting),
        *_too_late(setting),
    ]
    return sorted(found, key=lambda each: (LEVELS.index(each.level), each.number))


def options_of(settings: str) -> dict[str, str]:
    """Split an allocator setting into its options.

    >>> options_of("expandable_segments:True,roundup_power2_divisions:[256:1,>:4]")
    {'expandable_segments': 'True', 'roundup_power2_divisions': '[256:1,>:4]'}
    """
    parts = re.split(r",(?![^\[]*\])", settings)
    pairs = [part.partition(":") for part in parts if part.strip()]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _watermarks(setting: Setting) -> Iterator[Finding]:
    high, low = _ratio(setting, HIGH), _ratio(setting, LOW)
    said = setting.environ.get(HIGH, "")
    if HIGH in setting.environ and high is None:
        why = "it is no number: torch raises while it builds its MPS allocator"
        yield Finding(2, "crash", HIGH, said, why, f"unset {HIGH}")
        return
    top = DEFAULT_HIGH if high is None else high
    bottom = DEFAULT_LOW if low is None else low
    if not 0 <= top <= MAX_RATIO:
        why = f'the range is 0 to {MAX_RATIO}: the first use of MPS raises "invalid '
        why += 'high watermark ratio"'
        yield Finding(2, "crash", HIGH, said, why, f"unset {HIGH}, or export {HIGH}=1")
        return
    if high == 0:
        why = "0 takes the limit away: macOS swaps, then freezes or kills the process"
        fix = f"unset {HIGH} (the default, {DEFAULT_HIGH}, is above the RAM already)"
        yield Finding(3, "danger", HIGH, said, why, fix)
    if bottom > (top or MAX_RATIO):
        name = LOW if low is not None else HIGH
        value = setting.environ.get(name, "")
        where = "" if low is not None else f", {DEFAULT_LOW}"
        why = f"it is below the low watermark{where}: the first use of MPS raises "
        why += '"invalid low watermark ratio"'
        if name == LOW:
            why = (
                f'it is above {HIGH}, {top}: the first use of MPS raises "invalid low '
            )
            why += 'watermark ratio"'
        less = f"{round(top * 0.75, 2):g}"
        fix = f"export {HIGH}={top:g} {LOW}={less}, or at run time "
        fix += f"torch.mps.set_per_process_memory_fraction({top:g})"
        yield Finding(1, "crash", name, value, why, fix)


def _ratio(setting: Setting, name: str) -> float | None:
    try:
        return float(setting.environ[name])
    except (KeyError, ValueError):
        return None


def _fallback(setting: Setting) -> Iterator[Finding]:
    value = setting.environ.get(FALLBACK)
    if value is None:
        return
    if not re.match(r"\s*[+-]?\d", value):
        why = "torch reads it with std::stoi while it loads: no number, no import"
        yield Finding(13, "crash", FALLBACK, value, why, f"export {FALLBACK}=1")
    elif setting.torch_imported and _set_here(setting, FALLBACK):
        why = "torch reads it while it is imported; it was set inside this process, "
        why += "which counts only if that was before `import torch`"
        fix = f"{FALLBACK}={value} python train.py"
        yield Finding(12, "ignored", FALLBACK, value, why, fix)
    elif setting.platform == "darwin" and value.strip() != "0":
        why = "it sends operators that MPS lacks to the CPU; it frees no memory and "
        why += "moves nothing there when memory is short"
        fix = "keep it for missing operators; for memory see loaderkit.plan_batch"
        yield Finding(12, "useless", FALLBACK, value, why, fix)


def _wrong_place(setting: Setting) -> Iterator[Finding]:
    if setting.platform == "darwin":
        return
    for name in (HIGH, LOW, FALLBACK):
        if name in setting.environ:
            why = f"there is no MPS on {setting.platform}: nothing reads it"
            value = setting.environ[name]
            yield Finding(12, "useless", name, value, why, f"unset {name}")


def _names(setting: Setting) -> Iterator[Finding]:
    new = setting.environ.get(UNIFIED)
    if new is None:
        return
    for old in OLD_NAMES:
        value = setting.environ.get(old)
        if value is not None and options_of(value) != options_of(new):
            why = f"{old}={value} is set too and wins (measured on torch 2.13)"
            yield Finding(4, "ignored", UNIFIED, new, why, f"unset {old}")
    version = ".".join(map(str, setting.torch_version))
    old = OLD_NAMES[setting.backend == "hip"]
    if setting.torch_version < (2, 9):
        why = f"torch {version} does not know this name"
    elif setting.torch_version == (2, 9) and setting.backend == "cuda":
        why = "torch 2.9 ignores this name on CUDA (pytorch issue 183387)"
    else:
        return
    yield Finding(11, "ignored", UNIFIED, new, why, f"export {old}={new}")


def _allocator(setting: Setting) -> Iterator[Finding]:
    for name in ALLOCATOR_NAMES:
        value = setting.environ.get(name)
        if value:
            yield from _syntax(name, value)
            yield from _combinations(name, value, setting)


def _syntax(name: str, value: str) -> Iterator[Finding]:
    first = "the first use of the allocator raises"
    for option, said in options_of(value).items():
        if "=" in option:
            why = f'{first} an INTERNAL ASSERT "please report a bug": it wants a colon'
            fixed = value.replace("=", ":")
            yield Finding(6, "crash", name, value, why, f"export {name}={fixed}")
        elif said.lower() in {"true", "false"} and said not in {"True", "False"}:
            why = f"{first}: it wants True or False, written so"
            fixed = value.replace(f":{said}", f":{said.capitalize()}")
            yield Finding(5, "crash", name, value, why, f"export {name}={fixed}")
        elif option == "max_split_size_mb" and _number(said, 20) < 20:
            why = f"{first}: max_split_size_mb must be at least 20"
            fixed = value.replace(f"{option}:{said}", f"{option}:20")
            yield Finding(7, "crash", name, value, why, f"export {name}={fixed}")
        elif option == "garbage_collection_threshold" and not 0 < _number(said) < 1:
            why = f"{first}: garbage_collection_threshold lies between 0 and 1"
            fixed = value.replace(f"{option}:{said}", f"{option}:0.8")
            yield Finding(7, "crash", name, value, why, f"export {name}={fixed}")


def _number(text: str, otherwise: float = 0.5) -> float:
    try:
        return float(text)
    except ValueError:
        return otherwise


def _combinations(name: str, value: str, setting: Setting) -> Iterator[Finding]:
    options = options_of(value)
    if options.get("expandable_segments", "").lower() != "true":
        return
    without = ",".join(f"{k}:{v}" for k, v in options.items() if "expand" not in k)
    plain = f"export {name}={without}" if without else f"unset {name}"
    if "max_split_size_mb" in options:
        why = "expandable segments are never split by size: max_split_size_mb does "
        why += "nothing beside them"
        fix = f"export {name}=expandable_segments:True"
        yield Finding(8, "useless", name, value, why, fix)
    if setting.backend == "hip":
        why = "expandable segments crash on ROCm (pytorch issue 187343)"
        yield Finding(9, "crash", name, value, why, plain)
    elif setting.shares_device_tensors:
        why = "tensors in expandable segments cannot be shared with other processes"
        yield Finding(9, "crash", name, value, why, plain)


def _too_late(setting: Setting) -> Iterator[Finding]:
    """Compare what torch has read with what the variables say now."""
    if setting.effective is None:
        return
    name = next((each for each in ALLOCATOR_NAMES if each in setting.environ), None)
    said = setting.environ.get(name or "", "")
    if name is None or options_of(said) == options_of(setting.effective):
        return
    has = setting.effective or "none"
    why = f"torch has read its settings already: {has} are in effect"
    fix = f"{name}={said} python train.py, or loaderkit.configure_allocator(...)"
    yield Finding(10, "ignored", name, said, why, fix)


def _set_here(setting: Setting, name: str) -> bool:
    """Tell a variable set inside this process from one it was started with."""
    if setting.started_with is None:
        return False
    return setting.started_with.get(name) != setting.environ.get(name)
