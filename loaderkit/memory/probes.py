"""What a device can do and holds, asked of torch: the one place that knows devices.

A new kind of device is a row of ``PROBES``, and one of ``TRAITS`` in
``budget/step/devices.py``.  Its library need not be on the machine, so a probe asks
torch for it with each question, and not when it is made.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch

from loaderkit.error_texts import error_in_words
from loaderkit.memory.host import available_memory
from loaderkit.memory.machine import Capability

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from types import ModuleType
    from typing import Literal

    from loaderkit.memory.counters import CounterName, Readings

    Readers: TypeAlias = dict[CounterName, Callable[[], int]]

FAILURES = (RuntimeError, AssertionError, AttributeError, NotImplementedError)
"""What torch raises when a device, or a way to ask it, is not there."""
_NO_ANSWER = (*FAILURES, KeyError, TypeError)
"""The same for a counter: a statistic that this version of torch does not keep is a
missing key, and an argument that it does not know a TypeError."""


@dataclass(frozen=True)
class DeviceBlock:
    """A piece of a device's memory that is in use."""

    size: int
    """Bytes."""
    frames: tuple[tuple[str, int], ...]
    """File and line of the Python functions that asked for it, the innermost last;
    empty if it was asked for without any, as backward() does, or not recorded."""


class DeviceReading(NamedTuple):
    """What a device holds."""

    values: Readings
    """The counters that could be read."""
    missing: Mapping[CounterName, str]
    """For the others the reason."""


class FreeBytes(NamedTuple):
    """What can still be taken on a device."""

    amount: int
    """Bytes that tensors of this process can still take."""
    known_from: str
    """Who told, such as "the driver of cuda:0, started to ask it"."""


class Probe(Protocol):
    """What has to be known of a kind of device."""

    def available(self, device: torch.device) -> bool:
        """Tell whether this device is here."""

    def devices(self) -> list[torch.device]:
        """List the devices of this kind that are here, each with its index."""

    def current_index(self) -> int | None:
        """Give the index of the current device; None before this process used one."""

    def capability(self, device: torch.device) -> Capability:
        """Say what it can do."""

    def cheap_counters(self, device: torch.device) -> Readers:
        """Name the counters that cost microseconds, and how each is read."""

    def driver_counters(self, device: torch.device) -> Readers:
        """Name the counters that ask the driver, or walk the allocator's blocks."""

    def free_bytes(self, device: torch.device) -> FreeBytes:
        """Ask what tensors of this process can still take; it may start the driver."""

    def answers_unused(self) -> bool:
        """Tell whether asking a device that this process has not used is harmless."""

    def empty(self) -> None:
        """Give back what torch's allocators keep for later, host memory too."""

    def recording(self) -> AbstractContextManager[None]:
        """Have the allocator remember, within, who asks for memory."""

    def blocks(self, device: torch.device) -> list[DeviceBlock]:
        """List the memory in use; empty where torch does not tell."""


class CudaLikeProbe:
    """CUDA, ROCm and XPU: memory of their own, streams, copies from pinned memory.

    Args:
        kind: Such as "cuda"; torch has a module of that name for it.
        module: Answers as that module does, which it is if None.
    """

    def __init__(self, kind: str, module: ModuleType | None = None) -> None:
        self._kind, self._module = kind, module

    @property
    def module(self) -> ModuleType:
        """The module of torch's for this kind.

        Raises:
            RuntimeError: The library that brings it is not imported.
        """
        if self._module is not None:
            return self._module
        module: ModuleType = torch.get_device_module(self._kind)
        return module

    def available(self, device: torch.device) -> bool:
        """Tell whether this device is here; asking starts no driver."""
        if not self.module.is_available():
            return False
        # mypy takes the index for an int; it is None for "the current device"
        index: int | None = device.index
        return index is None or index < int(self.module.device_count())

    def devices(self) -> list[torch.device]:
        """List the devices of this kind that are here; asking starts no driver."""
        count = int(self.module.device_count()) if self.module.is_available() else 0
        return [torch.device(self._kind, index) for index in range(count)]

    def current_index(self) -> int | None:
        """Give the index of the current device.

        The first question would start the driver, and a program that has not used a
        device yet may choose another one before it does.
        """
        if not self._is_driver_started():
            return None
        return int(self.module.current_device())

    def capability(self, device: torch.device) -> Capability:
        """Say what it can do."""
        try:
            properties = self.module.get_device_properties(device)
        except (RuntimeError, AssertionError):
            # No such index, or a driver that does not start: told when it is used.
            properties = None
        unified = bool(getattr(properties, "is_integrated", False))
        return Capability(
            device=str(device),
            pins=not unified,
            asynchronous=True,
            unified=unified,
            started=self._is_driver_started(),
        )

    def cheap_counters(self, device: torch.device) -> Readers:
        """Name the counters that cost microseconds, and how each is read."""
        module = self.module
        return {
            "allocated": lambda: module.memory_allocated(device),
            "reserved": lambda: module.memory_reserved(device),
            "peak": lambda: module.max_memory_allocated(device),
            "inactive_split": lambda: self._allocator_statistic(
                device, "inactive_split_bytes"
            ),
            "pinned": lambda: module.host_memory_stats()["allocated_bytes.current"],
        }

    def driver_counters(self, device: torch.device) -> Readers:
        """Name the counters that ask the driver, or walk the allocator's blocks."""
        module = self.module
        return {
            "device_free": lambda: module.mem_get_info(device)[0],
            "device_limit": lambda: module.mem_get_info(device)[1],
            "largest_free": lambda: self._largest_free_block(device),
        }

    def free_bytes(self, device: torch.device) -> FreeBytes:
        """Ask what tensors of this process can still take; it may start the driver.

        What the driver has left, at most up to the share of the device that this
        process may take, and what torch's allocator keeps but does not use.
        """
        was_started = self._is_driver_started()
        free_bytes, total_bytes = self.module.mem_get_info(device)
        reserved_bytes = int(self.module.memory_reserved(device))
        allocated_bytes = int(self.module.memory_allocated(device))
        known_from = f"the driver of {device}"
        share = self._share_of_process(device)
        allowed_bytes = max(0, int(share * total_bytes) - reserved_bytes)
        if share < 1 and allowed_bytes < free_bytes:
            free_bytes = allowed_bytes
            known_from = (
                f"the share of {device} that this process may take, {share:.0%}"
            )
        if not was_started:
            known_from += ", started to ask it"
        return FreeBytes(free_bytes + reserved_bytes - allocated_bytes, known_from)

    def answers_unused(self) -> bool:
        """The first question would start the driver: some 0.5 GB, and no more forks."""
        return False

    def empty(self) -> None:
        """Give back what torch's allocators keep for later, host memory too."""
        self.module.empty_cache()
        with contextlib.suppress(*FAILURES):
            torch.accelerator.empty_host_cache()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Have the allocator remember, within, who asks for memory.

        A recording of the user's goes on; XPU does not tell of one, so there it ends.
        """
        is_here = _is_available(self, torch.device(self._kind))
        begins_here = (
            is_here
            and self._is_driver_started()
            and not _is_history_recorded(self._kind)
            and self._switch_history("state")
        )
        try:
            yield
        finally:
            if begins_here:
                self._switch_history(None)

    def blocks(self, device: torch.device) -> list[DeviceBlock]:
        """List the memory in use."""
        return [
            DeviceBlock(block["size"], _frames_of(block))
            for block in self._allocator_blocks(device)
            if block["state"] == "active_allocated"
        ]

    def _is_driver_started(self) -> bool:
        is_initialized = getattr(self.module, "is_initialized", None)
        return is_initialized is not None and bool(is_initialized())

    def _share_of_process(self, device: torch.device) -> float:
        """Read what ``set_per_process_memory_fraction``, or a setting, has left it."""
        try:
            # Unlike the other questions, this one is refused for a plain "cuda".
            index = self._index_of(device)
            return float(self.module.get_per_process_memory_fraction(index))
        except FAILURES:  # older torch does not tell
            return 1.0

    def _index_of(self, device: torch.device) -> int:
        """Give the index of a device; without one it is the current device."""
        # mypy takes the index for an int; it is None for "the current device"
        index: int | None = device.index
        return int(self.module.current_device()) if index is None else index

    def _allocator_statistic(self, device: torch.device, name: str) -> int:
        return int(self.module.memory_stats(device)[f"{name}.all.current"])

    def _switch_history(self, enabled: Literal["state"] | None) -> bool:
        """Switch the allocator's history on or off; tell whether it has one."""
        with contextlib.suppress(*FAILURES, TypeError):
            # "state" remembers the blocks alive now, and one entry is the least trace
            # of those that are gone: a whole trace would grow without a bound.
            self.module.memory._record_memory_history(  # noqa: SLF001 -- documented
                enabled, context=enabled, stacks="python", max_entries=1
            )
            return True
        return False

    def _largest_free_block(self, device: torch.device) -> int:
        blocks = self._allocator_blocks(device)
        free = [block["size"] for block in blocks if block["state"] == "inactive"]
        return max(free, default=0)

    def _allocator_blocks(self, device: torch.device) -> list[dict[str, Any]]:
        """List the allocator's blocks, without the history that may be recorded."""
        index = self._index_of(device)
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


class HostMemoryProbe:
    """A device whose memory is the host's: nothing to pin, and no driver to start.

    Its allocator does not tell who asked for memory.
    """

    def capability(self, device: torch.device) -> Capability:
        """Say what it can do."""
        return Capability(
            device=str(device),
            pins=False,
            asynchronous=False,
            unified=True,
            started=False,
        )

    def recording(self) -> AbstractContextManager[None]:
        """Its allocator remembers nothing."""
        return contextlib.nullcontext()

    def blocks(self, device: torch.device) -> list[DeviceBlock]:  # noqa: ARG002
        """Its allocator does not tell."""
        return []

    def answers_unused(self) -> bool:
        """It has no driver that a question would start."""
        return True


class MpsProbe(HostMemoryProbe):
    """Apple's MPS: one memory for all, and no pinning.

    Args:
        module: Answers as ``torch.mps`` does, which it is if None.
    """

    def __init__(self, module: ModuleType | None = None) -> None:
        self.module = module or torch.mps

    def available(self, device: torch.device) -> bool:
        """Tell whether this device is here; a Mac has one."""
        return torch.backends.mps.is_available() and not device.index

    def devices(self) -> list[torch.device]:
        """A Mac has one."""
        return [torch.device("mps", 0)]

    def current_index(self) -> int:
        """It is the only one."""
        return 0

    def cheap_counters(self, device: torch.device) -> Readers:  # noqa: ARG002
        """Name the counters that cost microseconds, and how each is read."""
        return {
            "allocated": self.module.current_allocated_memory,
            "driver": self.module.driver_allocated_memory,
            "device_limit": self.module.recommended_max_memory,
        }

    def driver_counters(self, device: torch.device) -> Readers:  # noqa: ARG002
        """It has no more."""
        return {}

    def free_bytes(self, device: torch.device) -> FreeBytes:  # noqa: ARG002
        """Ask what tensors of this process can still take.

        Metal recommends a limit for the process; torch's cache is free for tensors.
        """
        limit_bytes = int(self.module.recommended_max_memory())
        allocated_bytes = int(self.module.current_allocated_memory())
        free_bytes = max(0, limit_bytes - allocated_bytes)
        return FreeBytes(free_bytes, "what Metal recommends")

    def empty(self) -> None:
        """Give back what torch's allocator keeps for later."""
        self.module.empty_cache()


class CpuProbe(HostMemoryProbe):
    """The CPU itself: its memory is the process's."""

    def available(self, device: torch.device) -> bool:  # noqa: ARG002
        """There is always one; torch gives it any index."""
        return True

    def devices(self) -> list[torch.device]:
        """It is the host, not one of several devices."""
        return []

    def current_index(self) -> None:
        """It goes by its name alone."""

    def cheap_counters(self, device: torch.device) -> Readers:  # noqa: ARG002
        """It has no counters of its own."""
        return {}

    def driver_counters(self, device: torch.device) -> Readers:  # noqa: ARG002
        """It has no counters of its own."""
        return {}

    def free_bytes(self, device: torch.device) -> FreeBytes:
        """Ask the host; of a kind that nobody tried here, nothing is known.

        Raises:
            NotImplementedError: It is no CPU.
        """
        if device.type != "cpu":
            raise NotImplementedError(device.type)
        available_bytes, limit_name = available_memory()
        return FreeBytes(available_bytes, limit_name)

    def empty(self) -> None:
        """It keeps nothing that torch could give back."""


PROBES: dict[str, Callable[[], Probe]] = {
    "cuda": lambda: CudaLikeProbe("cuda"),
    "xpu": lambda: CudaLikeProbe("xpu"),
    "mps": MpsProbe,
}
"""Devices that have memory of torch's to look at; ROCm's is called cuda."""


def probe_of(device: torch.device) -> Probe:
    """Find the probe of a device.

    Args:
        device: Any device of torch.

    Returns:
        Its probe; kinds that nobody tried here are taken for plain processors, which
        pin nothing and copy when asked.
    """
    make_probe = PROBES.get(device.type, CpuProbe)
    return make_probe()


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
        torch_device = torch.device(device)
    except RuntimeError as error:
        msg = f"device must be one of torch's, such as 'cuda' or 'cpu', got {device!r}"
        raise ValueError(msg) from error
    if not is_present(torch_device):
        msg = f"there is no device {str(device)!r} here; "
        if is_present(torch.device(torch_device.type)):
            msg += f"pass device={torch_device.type!r} for the current one of its kind"
        else:
            msg += f"pass device='cpu', or {_missing_for(torch_device.type)}"
        raise ValueError(msg)
    return probe_of(torch_device).capability(torch_device)


def _missing_for(kind: str) -> str:
    """Say what it takes to have a device that is not here: a driver, or a build."""
    is_built = {
        "cuda": torch.backends.cuda.is_built,
        "mps": torch.backends.mps.is_built,
    }.get(kind)
    if is_built is not None and is_built():
        return (
            f"see that the system shows it and has its driver: this torch "
            f"({torch.__version__}) is built for {kind}"
        )
    return f"install the build of torch for it (this one is {torch.__version__})"


def is_present(device: torch.device) -> bool:
    """Tell whether a device is here: its kind, and one with its index."""
    return _is_available(probe_of(device), device) and _makes_tensors(device)


def _makes_tensors(device: torch.device) -> bool:
    """Tell whether this build of torch has tensors on a kind of device.

    torch names many kinds ("hip", "vulkan", "fpga") for which a build has no code.
    Only a tensor tells them apart; the kinds with a probe are not asked, since a first
    tensor would start a driver.
    """
    if device.type in PROBES:
        return True
    try:
        torch.empty(0, device=device)
    except (NotImplementedError, RuntimeError, AssertionError, ImportError):
        return False
    return True


def present_kinds() -> list[torch.device]:
    """List the kinds of devices with memory of torch's that are here.

    Returns:
        One a kind, without an index: for torch that is the current one; empty on a
        machine without any.
    """
    kinds = []
    for name in PROBES:
        # Some names, such as "npu", torch knows once another library is imported.
        with contextlib.suppress(RuntimeError):
            kinds.append(torch.device(name))
    return [kind for kind in kinds if _is_available(probe_of(kind), kind)]


def present_devices() -> list[torch.device]:
    """List the devices with memory of torch's that are here.

    Returns:
        Each with its index, as the tensors on it have; empty on a machine without any.
    """
    return [device for kind in present_kinds() for device in probe_of(kind).devices()]


def with_index(device: torch.device) -> torch.device:
    """Give a device the index that its tensors have.

    Args:
        device: Such as ``torch.device("cuda")``, which is the current one of its kind.

    Returns:
        Such as ``torch.device("cuda", 1)``; the device as it is where it has an index,
        is the CPU, or no device of its kind was used yet in this process.
    """
    # mypy takes the index for an int; it is None for "the current device"
    if getattr(device, "index", None) is not None:
        return device
    with contextlib.suppress(*FAILURES):
        index = probe_of(device).current_index()
        if index is not None:
            return torch.device(device.type, index)
    return device


def read_device(
    device: torch.device,
    *,
    full: bool = True,
    probe: Probe | None = None,
) -> DeviceReading:
    """Read what a device holds.  Never raises.

    Args:
        device: Such as ``torch.device("cuda")``.
        full: Ask the driver too; it may take milliseconds.
        probe: How it is asked; as its kind is if None.

    Returns:
        The counters that could be read, and for the others the reason.
    """
    probe = probe_of(device) if probe is None else probe
    if not _is_available(probe, device):
        return DeviceReading(
            {}, {"allocated": f"there is no device {str(device)!r} here"}
        )
    readers = probe.cheap_counters(device)
    if full:
        readers |= probe.driver_counters(device)
    if readers and not _is_harmless_to_ask(probe, device):
        reason = f"this process has not used {str(device)!r} yet"
        return DeviceReading({}, dict.fromkeys(readers, reason))
    values: dict[CounterName, int] = {}
    missing: dict[CounterName, str] = {}
    for name, read in readers.items():
        answer = _value_or_reason(read)
        if isinstance(answer, int):
            values[name] = answer
        else:
            missing[name] = answer
    return DeviceReading(values, missing)


def free_bytes(device: torch.device, *, probe: Probe | None = None) -> FreeBytes | None:
    """Ask what tensors of this process can still take on a device.  Never raises.

    Args:
        device: Such as ``torch.device("cuda")``; its driver is started if need be.
        probe: How it is asked; as its kind is if None.

    Returns:
        Bytes and who told; None where there is no such device, or it does not tell.
    """
    probe = probe_of(device) if probe is None else probe
    if not _is_available(probe, device):
        return None
    with contextlib.suppress(*_NO_ANSWER):
        return probe.free_bytes(device)
    return None


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
    if not _is_available(probe, device):
        return None
    readers = probe.driver_counters(device)
    if "device_free" not in readers or not _is_harmless_to_ask(probe, device):
        return None
    limit = _value_or_reason(readers["device_limit"])
    free = _value_or_reason(readers["device_free"])
    if isinstance(limit, str) or isinstance(free, str):
        return None
    return limit - free


def read_blocks(
    device: torch.device, *, probe: Probe | None = None
) -> list[DeviceBlock]:
    """List the memory of a device that is in use.  Never raises.

    Args:
        device: Such as ``torch.device("cuda")``.
        probe: How it is asked; as its kind is if None.

    Returns:
        Its blocks; empty where torch does not tell.
    """
    probe = probe_of(device) if probe is None else probe
    with contextlib.suppress(*_NO_ANSWER):
        if _is_available(probe, device) and _is_harmless_to_ask(probe, device):
            return probe.blocks(device)
    return []


def _is_history_recorded(kind: str) -> bool:
    """Ask torch whether somebody has an allocator's history recorded."""
    # The public way, memory_snapshot(), would copy all that is recorded.
    is_enabled = getattr(torch._C, f"_{kind}_isHistoryEnabled", None)  # noqa: SLF001
    if is_enabled is None:
        return False
    try:
        return bool(is_enabled())
    except RuntimeError:
        # a build for CUDA where no driver is, or a driver that is too old
        return False


def _frames_of(block: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    """Give who asked for a block; torch lists the innermost first."""
    frames = reversed(block.get("frames", ()))
    return tuple((frame["filename"], frame["line"]) for frame in frames)


def _value_or_reason(read: Callable[[], int]) -> int | str:
    """Give what a reader answers, or why it cannot."""
    try:
        return int(read())
    except _NO_ANSWER as error:
        return f"torch cannot tell: {error_in_words(error)}"


def _is_available(probe: Probe, device: torch.device) -> bool:
    """Ask whether a device is there; a torch without its build raises."""
    with contextlib.suppress(*FAILURES):
        return probe.available(device)
    return False


def _is_harmless_to_ask(probe: Probe, device: torch.device) -> bool:
    """Tell whether a question would start no driver."""
    return probe.answers_unused() or probe.capability(device).started
