"""What a device can do and holds, asked of torch: the one place that knows devices."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

FAILURES = (RuntimeError, AssertionError, AttributeError, NotImplementedError)
"""What torch raises when a device, or a way to ask it, is not there."""
KINDS = ("cuda", "xpu", "mps")
"""Kinds of devices that have memory of torch's to look at; ROCm's is called cuda."""


@dataclass(frozen=True)
class Capability:
    """What a device can do for a loader."""

    device: str
    """As torch writes it, such as "cuda:0"."""
    pins: bool
    """Copies from page-locked memory are faster."""
    asynchronous: bool
    """Copies can run beside the computing, on a stream of their own."""
    unified: bool
    """Its memory is the host's: what a batch takes there is missing here."""
    started: bool
    """Its driver is in use by this process, which a forked child must not touch."""


class Probe(Protocol):
    """What has to be known of a kind of device."""

    def available(self) -> bool:
        """Tell whether there is such a device here."""

    def capability(self, device: torch.device) -> Capability:
        """Say what it can do."""

    def quick(self, device: torch.device) -> dict[str, Callable[[], int]]:
        """Name the counters that cost microseconds, and how each is read."""

    def full(self, device: torch.device) -> dict[str, Callable[[], int]]:
        """Name the counters that ask the driver, or walk the allocator's blocks."""

    def empty(self) -> None:
        """Give back what torch's allocators keep for later, host memory too."""


class Accelerator:
    """CUDA, ROCm and XPU: memory of their own, streams, copies from pinned memory."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def quick(self, device: torch.device) -> dict[str, Callable[[], int]]:
        """Name the counters that cost microseconds, and how each is read."""
        module = self.module
        return {
            "allocated": lambda: module.memory_allocated(device),
            "reserved": lambda: module.memory_reserved(device),
            "peak": lambda: module.max_memory_allocated(device),
            "inactive_split": lambda: self._stat(device, "inactive_split_bytes"),
            "pinned": lambda: module.host_memory_stats()["allocated_bytes.current"],
        }

    def full(self, device: torch.device) -> dict[str, Callable[[], int]]:
        """Name the counters that ask the driver, or walk the allocator's blocks."""
        module = self.module
        return {
            "device_free": lambda: module.mem_get_info(device)[0],
            "device_limit": lambda: module.mem_get_info(device)[1],
            "largest_free": lambda: self._largest_free(device),
        }

    def empty(self) -> None:
        """Give back what torch's allocators keep for later, host memory too."""
        self.module.empty_cache()
        with contextlib.suppress(*FAILURES):
            torch.accelerator.empty_host_cache()

    def _stat(self, device: torch.device, name: str) -> int:
        return int(self.module.memory_stats(device)[f"{name}.all.current"])

    def _largest_free(self, device: torch.device) -> int:
        index = getattr(device, "index", None)
        if index is None:
            index = self.module.current_device()
        sizes = [
            block["size"]
            for segment in self.module.memory_snapshot()
            if segment["device"] == index
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ]
        return max(sizes, default=0)

    def available(self) -> bool:
        """Tell whether there is such a device here."""
        return bool(self.module.is_available())

    def capability(self, device: torch.device) -> Capability:
        """Say what it can do."""
        try:
            properties = self.module.get_device_properties(device)
        except (RuntimeError, AssertionError):
            properties = None
        unified = bool(getattr(properties, "is_integrated", False))
        started = bool(getattr(self.module, "is_initialized", lambda: False)())
        return Capability(
            str(device), pins=not unified, asynchronous=True, unified=unified,
            started=started,
        )  # fmt: skip


class Unified:
    """Apple's MPS: one memory for all, and no pinning."""

    def __init__(self, module: Any = None) -> None:
        self.module = module or torch.mps

    def quick(self, device: torch.device) -> dict[str, Callable[[], int]]:  # noqa: ARG002
        """Name the counters that cost microseconds, and how each is read."""
        return {
            "allocated": self.module.current_allocated_memory,
            "driver": self.module.driver_allocated_memory,
            "device_limit": self.module.recommended_max_memory,
        }

    def full(self, device: torch.device) -> dict[str, Callable[[], int]]:  # noqa: ARG002
        """It has no more."""
        return {}

    def empty(self) -> None:
        """Give back what torch's allocator keeps for later."""
        self.module.empty_cache()

    def available(self) -> bool:
        """Tell whether there is such a device here."""
        return bool(torch.backends.mps.is_available())

    def capability(self, device: torch.device) -> Capability:
        """Say what it can do."""
        return Capability(
            str(device), pins=False, asynchronous=False, unified=True, started=False
        )


class Processor:
    """The CPU itself: its memory is the process's."""

    def quick(self, device: torch.device) -> dict[str, Callable[[], int]]:  # noqa: ARG002
        """It has no counters of its own."""
        return {}

    def full(self, device: torch.device) -> dict[str, Callable[[], int]]:  # noqa: ARG002
        """It has no counters of its own."""
        return {}

    def empty(self) -> None:
        """It keeps nothing that torch could give back."""

    def available(self) -> bool:
        """There is always one."""
        return True

    def capability(self, device: torch.device) -> Capability:
        """Say what it can do."""
        return Capability(
            str(device), pins=False, asynchronous=False, unified=True, started=False
        )


def probe_of(device: torch.device) -> Probe:
    """Find the probe of a device.

    Args:
        device: Any device of torch.

    Returns:
        Its probe; kinds that nobody tried here are taken for plain processors, which
        pin nothing and copy when asked.
    """
    if device.type == "mps":
        return Unified()
    if device.type in {"cuda", "xpu"}:
        return Accelerator(torch.get_device_module(device.type))
    return Processor()


def read_capability(device: str | torch.device) -> Capability:
    """Ask what a device can do.

    Args:
        device: Such as "cuda", "mps", "xpu:1" or "cpu".

    Returns:
        Its capabilities.

    Raises:
        ValueError: torch knows no such device, or it is not there.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        msg = f"device must be one of torch's, such as 'cuda' or 'cpu', got {device!r}"
        raise ValueError(msg) from error
    probe = probe_of(found)
    if not probe.available():
        msg = f"there is no device {device!r} here; pass device='cpu', or install the "
        msg += f"build of torch for it (this one is {torch.__version__})"
        raise ValueError(msg)
    return probe.capability(found)


def present_devices() -> list[torch.device]:
    """List the kinds of devices with memory of torch's that are here.

    Returns:
        The current device of each kind; empty on a machine without any.
    """
    found = [torch.device(kind) for kind in KINDS]
    return [device for device in found if _is_there(probe_of(device))]


def read_device(
    device: torch.device, *, full: bool = True, probe: Probe | None = None
) -> tuple[dict[str, int], dict[str, str]]:
    """Read what a device holds.  Never raises.

    Args:
        device: Such as ``torch.device("cuda")``.
        full: Ask the driver too; it may take milliseconds.
        probe: How it is asked; as its kind is if None.

    Returns:
        The counters that could be read, and for the others the reason.
    """
    probe = probe_of(device) if probe is None else probe
    if not _is_there(probe):
        return {}, {"allocated": f"there is no device {str(device)!r} here"}
    readers = probe.quick(device) | (probe.full(device) if full else {})
    if readers and not _started(probe, device):
        reason = f"this process has not used {str(device)!r} yet"
        return {}, dict.fromkeys(readers, reason)
    answers = {name: _asked(read) for name, read in readers.items()}
    found = {name: each for name, each in answers.items() if isinstance(each, int)}
    missing = {name: each for name, each in answers.items() if isinstance(each, str)}
    return found, missing


def _asked(read: Callable[[], int]) -> int | str:
    """Give what a reader answers, or why it cannot."""
    try:
        return int(read())
    except (*FAILURES, KeyError, TypeError) as error:
        return f"torch cannot tell: {type(error).__name__}: {error}"


def _is_there(probe: Probe) -> bool:
    with contextlib.suppress(*FAILURES):
        return probe.available()
    return False


def _started(probe: Probe, device: torch.device) -> bool:
    """Tell whether asking is harmless: the first question would start a driver."""
    return device.type == "mps" or probe.capability(device).started
