"""What a device can do, asked of torch: the one place that knows devices by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


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


class Accelerator:
    """CUDA, ROCm and XPU: memory of their own, streams, copies from pinned memory."""

    def __init__(self, module: Any) -> None:
        self.module = module

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

    def available(self) -> bool:
        """Tell whether there is such a device here."""
        return bool(torch.backends.mps.is_available())

    def capability(self, device: torch.device) -> Capability:
        """Say what it can do."""
        return Capability(
            str(device), pins=False, asynchronous=False, unified=True, started=False
        )


class Processor:
    """The CPU itself."""

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
