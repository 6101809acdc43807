"""``read_memory``: everything that can be counted, once; never raises."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from loaderkit.answers import answer_wrong_names
from loaderkit.call_keywords import suggest_keywords
from loaderkit.errors import OptionError
from loaderkit.fixes import Setting
from loaderkit.habits import DEVICES
from loaderkit.memory import process
from loaderkit.memory.counters import COUNTERS
from loaderkit.memory.host import read_host
from loaderkit.memory.probes import (
    is_present,
    present_kinds,
    read_device,
    with_index,
)
from loaderkit.memory.tensors import TensorGroup, live_tensors
from loaderkit.nearest_names import suggest_device
from loaderkit.notebook import HasCard, repr_in_a_line
from loaderkit.units import format_amount, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loaderkit.memory.counters import CounterName, Readings
    from loaderkit.memory.machine import Host

_FIRST_SHOWN: tuple[CounterName, ...] = ("malloc", "anonymous", "allocated")
"""In a line: what this process holds on the host, and on the device."""
_GROUPS_SHOWN = 5
"""Kinds of tensors in the text.  Chosen: a reading fits a screen; all of them are in
``tensors``."""
_WHY_ABSENT: Mapping[CounterName, str] = {
    "malloc": "only glibc tells (mallinfo2, from 2.33)",
    "anonymous": "only Linux tells it apart from file pages",
    "mappings": "only Linux lists them",
    "private": "only Linux gives smaps_rollup",
    "group_limit": "no cgroup limits this process",
    "oom_kills": "the cgroup does not say",
    "shm_used": "there is no /dev/shm",
}
"""Why one of the host's counters could not be read."""


@answer_wrong_names("values")
@dataclass(frozen=True)
class MemorySample(HasCard):
    """What was held at one moment: each counter a number, or a reason for none."""

    seconds: float
    """``time.monotonic()`` when it was read."""
    device: str
    """The device that was read beside the host, such as "cuda:0" or "cpu"."""
    values: Readings
    """Counters by their names in :data:`loaderkit.memory.counters.COUNTERS`."""
    missing: Mapping[CounterName, str] = field(default_factory=dict)
    """Why a counter could not be read."""
    tensors: tuple[TensorGroup, ...] = ()
    """Live tensors that look alike, the largest first."""
    pressure: float | None = None
    """Percent of the last 10 s that tasks waited for memory (PSI)."""

    def get(self, name: CounterName) -> int | None:
        """Look a counter up.

        Args:
            name: One of :data:`loaderkit.memory.counters.COUNTERS`.

        Returns:
            Its value; None where it could not be read.
        """
        return self.values.get(name)

    def to_json(self) -> dict[str, Any]:
        """Give it as plain values.

        Returns:
            Ready for :func:`json.dumps`.
        """
        return {
            "seconds": self.seconds,
            "device": self.device,
            "values": dict(self.values),
            "missing": dict(self.missing),
            "pressure": self.pressure,
            "tensors": [vars(group) for group in self.tensors],
        }

    __repr__ = repr_in_a_line

    def _headline(self) -> str:
        """Say what was read, and the amounts that people ask for first."""
        amounts = [
            f"{name} {format_bytes(self.values[name])}"
            for name in _FIRST_SHOWN
            if name in self.values
        ]
        return ", ".join(
            [f"memory of process {os.getpid()}, device {self.device}", *amounts]
        )

    def __str__(self) -> str:
        amounts = {
            name: format_amount(self.values[name], info.unit)
            for name, info in COUNTERS.items()
            if name in self.values
        }
        lines = [self._headline()]
        width = max(map(len, amounts.values()), default=1)
        for name, amount in amounts.items():
            lines.append(f"{name:<18}{amount:>{width}}  {COUNTERS[name].words}")
        for name, why in self.missing.items():
            lines.append(f"{name:<18}{'?':>{width}}  {why}")
        lines += [f"  {group}" for group in self.tensors[:_GROUPS_SHOWN]]
        return "\n".join(lines)


@suggest_keywords
def read_memory(device: str | torch.device | None = None) -> MemorySample:
    """Read the memory of this process, its children and a device.

    Args:
        device: The device to read beside the host; the first that is here if None.

    Returns:
        A sample; takes some 0.1 s, since tensors and pages are counted one by one.
    """
    # First, before the readings below make objects of their own.
    quick = quick_sample(device_of(device), full=True)
    pid = os.getpid()
    page_shares, missing_shares = process.full_counters(
        [pid, *process.children_of(pid)]
    )
    groups = live_tensors()
    host = read_host()

    values: dict[CounterName, int] = dict(quick.values)
    values |= page_shares
    values |= process.open_files()
    values |= _machine_counters(host)
    mapping_count = process.mappings()
    if mapping_count is not None:
        values["mappings"] = mapping_count
    values["tensors"] = sum(group.count for group in groups)
    values["tensor_bytes"] = sum(group.bytes for group in groups)

    # What was learnt while reading; and of what is absent without a word, the usual
    # reason for that.
    missing = dict(quick.missing)
    missing |= missing_shares
    missing |= {name: why for name, why in _WHY_ABSENT.items() if name not in values}
    return MemorySample(
        seconds=quick.seconds,
        device=quick.device,
        values=values,
        missing=missing,
        tensors=tuple(groups),
        pressure=host.pressure,
    )


def quick_sample(device: torch.device, *, full: bool = False) -> MemorySample:
    """Read what costs about 0.1 ms.

    Args:
        device: The device to read beside the host.
        full: Ask the device's driver too.

    Returns:
        A sample without tensors, shares of pages and the machine's counters.
    """
    device = with_index(device)
    of_device = read_device(device, full=full)
    values = process.quick_counters()
    values |= of_device.values
    return MemorySample(
        seconds=time.monotonic(),
        device=str(device),
        values=values,
        missing=of_device.missing,
    )


def device_of(device: str | torch.device | None) -> torch.device:
    """Take the device asked for, or the current one of the first kind that is here.

    Args:
        device: Such as "cuda:1"; None to choose.

    Returns:
        The device; the CPU on a machine without another.

    Raises:
        OptionError: torch knows no such device.
    """
    if device is None:
        return next(iter(present_kinds()), torch.device("cpu"))
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _no_such_device(device) from error
    # torch takes "hip", which is ROCm's old name, and has nothing behind it.
    if chosen.type in DEVICES:
        raise _no_such_device(device)
    return chosen


def present_device_of(device: str | torch.device | None) -> torch.device:
    """Take the device asked for, which must be here, or the first that is.

    Args:
        device: Such as "cuda:1"; None to choose.

    Returns:
        The device; the CPU on a machine without another.

    Raises:
        OptionError: torch knows no such device, or none is here.
    """
    chosen = device_of(device)
    if is_present(chosen):
        return chosen
    message = f"device cannot be {str(device)!r}: there is no such device here."
    why = f"none is there, or this torch ({torch.__version__}) was built without it"
    fix = "device=None, which takes the first device that is here"
    raise OptionError(message, why=why, fix=fix)


def _no_such_device(device: str | torch.device) -> OptionError:
    message = f"device cannot be {str(device)!r}: torch has no device of that name."
    why = "torch names devices by their kind, and a number"
    return OptionError(message, why=why, fix=Setting("device", suggest_device(device)))


def _machine_counters(host: Host) -> Readings:
    """Give what counts for the whole machine or container, as far as it is known."""
    values: dict[CounterName, int | None] = {
        "group_limit": host.limit_bytes,
        "oom_kills": host.oom_kills,
        "group_used": host.used_bytes,
        "mappings_limit": host.mappings,
    }
    if Path("/dev/shm").exists():
        values["shm_used"] = int(psutil.disk_usage("/dev/shm").used)
    return {name: value for name, value in values.items() if value is not None}
