"""What a device can do and holds, asked of torch: the one place that knows devices."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

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


@dataclass(frozen=True)
class Block:
    """A piece of a device's memory that is in use."""

    size: int
    """Bytes."""
    frames: tuple[tuple[str, int], ...]
    """File and line of the Python functions that asked for it, the innermost last;
    empty if it was asked for without any, as backward() does, or not recorded."""


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

    def free_bytes(self, device: torch.device) -> int | None:
        """Ask what tensors of this process can still take; it may start the driver."""

    def empty(self) -> None:
        """Give back what torch's allocators keep for later, host memory too."""

    def recording(self) -> AbstractContextManager[None]:
        """Have the allocator remember, within, who asks for memory."""

    def blocks(self, device: torch.device) -> list[Block]:
        """List the memory in use; empty where torch does not tell."""


class CudaLikeProbe:
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

    def free_bytes(self, device: torch.device) -> int:
        """Ask what tensors of this process can still take; it may start the driver.

        What the driver has left, and what torch's allocator keeps but does not use.
        """
        free = int(self.module.mem_get_info(device)[0])
        reserved = int(self.module.memory_reserved(device))
        return free + reserved - int(self.module.memory_allocated(device))

    def empty(self) -> None:
        """Give back what torch's allocators keep for later, host memory too."""
        self.module.empty_cache()
        with contextlib.suppress(*FAILURES):
            torch.accelerator.empty_host_cache()

    def _stat(self, device: torch.device, name: str) -> int:
        return int(self.module.memory_stats(device)[f"{name}.all.current"])

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Have the allocator remember, within, who asks for memory.

        A recording of the user's goes on; XPU does not tell of one, so there it ends.
        """
        started = self.module.is_available() and self.module.is_initialized()
        on = started and not _is_recorded(self.module) and self._record("state")
        try:
            yield
        finally:
            if on:
                self._record(None)

    def _record(self, what: str | None) -> bool:
        """Switch the allocator's history on or off; tell whether it has one."""
        with contextlib.suppress(*FAILURES, TypeError):
            self.module.memory._record_memory_history(  # noqa: SLF001 -- documented
                what, context=what, stacks="python", max_entries=1
            )
            return True
        return False

    def blocks(self, device: torch.device) -> list[Block]:
        """List the memory in use."""
        return [
            Block(block["size"], _frames(block))
            for block in self._pieces(device)
            if block["state"] == "active_allocated"
        ]

    def _largest_free(self, device: torch.device) -> int:
        pieces = self._pieces(device)
        free = [each["size"] for each in pieces if each["state"] == "inactive"]
        return max(free, default=0)

    def _pieces(self, device: torch.device) -> list[dict[str, Any]]:
        """List the allocator's blocks, without the history that may be recorded."""
        index = getattr(device, "index", None)
        if index is None:
            index = self.module.current_device()
        try:
            segments = self.module.memory_snapshot(include_traces=False)
        except TypeError:  # XPU, and older torch
            segments = self.module.memory_snapshot()
        return [
            block
            for segment in segments
            if segment["device"] == index
            for block in segment["blocks"]
        ]

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


class NoBlockHistory:
    """An allocator that does not tell who asked for memory."""

    def recording(self) -> AbstractContextManager[None]:
        """Its allocator remembers nothing."""
        return contextlib.nullcontext()

    def blocks(self, device: torch.device) -> list[Block]:  # noqa: ARG002
        """Its allocator does not tell."""
        return []


class MpsProbe(NoBlockHistory):
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

    def free_bytes(self, device: torch.device) -> int:  # noqa: ARG002
        """Ask what tensors of this process can still take.

        Metal recommends a limit for the process; torch's cache is free for tensors.
        """
        limit = int(self.module.recommended_max_memory())
        return max(0, limit - int(self.module.current_allocated_memory()))

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


class CpuProbe(NoBlockHistory):
    """The CPU itself: its memory is the process's."""

    def quick(self, device: torch.device) -> dict[str, Callable[[], int]]:  # noqa: ARG002
        """It has no counters of its own."""
        return {}

    def full(self, device: torch.device) -> dict[str, Callable[[], int]]:  # noqa: ARG002
        """It has no counters of its own."""
        return {}

    def free_bytes(self, device: torch.device) -> None:
        """It has no memory of its own: ask the host."""

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
        return MpsProbe()
    if device.type in {"cuda", "xpu"}:
        return CudaLikeProbe(torch.get_device_module(device.type))
    return CpuProbe()


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


def free_bytes(device: torch.device, *, probe: Probe | None = None) -> int | None:
    """Ask what tensors of this process can still take on a device.  Never raises.

    Args:
        device: Such as ``torch.device("cuda")``; its driver is started if need be.
        probe: How it is asked; as its kind is if None.

    Returns:
        Bytes; None where there is no such device, or it does not tell.
    """
    probe = probe_of(device) if probe is None else probe
    if not _is_there(probe):
        return None
    with contextlib.suppress(*FAILURES, KeyError, TypeError):
        return probe.free_bytes(device)
    return None


def _is_recorded(module: Any) -> bool:
    """Ask torch whether somebody has an allocator's history recorded."""
    kind = module.__name__.rpartition(".")[2]
    asked = getattr(torch._C, f"_{kind}_isHistoryEnabled", None)  # noqa: SLF001
    return asked is not None and bool(asked())


def _frames(block: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    """Give who asked for a block; torch lists the innermost first."""
    frames = reversed(block.get("frames", ()))
    return tuple((each["filename"], each["line"]) for each in frames)


def read_device_used(device: torch.device, *, probe: Probe | None = None) -> int | None:
    """Ask the driver how much of a device is taken, by any process.  Never raises.

    Args:
        device: Such as ``torch.device("cuda")``.
        probe: How it is asked; as its kind is if None.

    Returns:
        Bytes; None where the driver is not told apart from torch's allocator, or this
        process has not used the device yet.
    """
    probe = probe_of(device) if probe is None else probe
    readers = probe.full(device)
    if "device_free" not in readers or not _is_there(probe):
        return None
    if not _started(probe, device):
        return None
    limit, free = _asked(readers["device_limit"]), _asked(readers["device_free"])
    if isinstance(limit, str) or isinstance(free, str):
        return None
    return limit - free


def read_blocks(device: torch.device, *, probe: Probe | None = None) -> list[Block]:
    """List the memory of a device that is in use.  Never raises.

    Args:
        device: Such as ``torch.device("cuda")``.
        probe: How it is asked; as its kind is if None.

    Returns:
        Its blocks; empty where torch does not tell.
    """
    probe = probe_of(device) if probe is None else probe
    with contextlib.suppress(*FAILURES, KeyError, TypeError):
        if _is_there(probe) and _started(probe, device):
            return probe.blocks(device)
    return []


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
