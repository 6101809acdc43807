"""What the text of an out-of-memory error says: its kind and its numbers.  Pure.

The wordings come from real reports; ``wordings.txt`` lists them in order of trust.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from loaderkit.budget.wordings import Wording, parts_of, wordings

if TYPE_CHECKING:
    from collections.abc import Mapping

_STEPS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40, "P": 50, "E": 60}
SIZES = (
    "requested",
    "free",
    "allocated",
    "reserved",
    "reserved_unallocated",
    "in_use",
    "private_pools",
    "other",
    "limit",
    "capacity",
    "total_vm",
    "anon_rss",
)
"""Fields of a message that are bytes, in the order in which they are printed."""
_WHOLE = frozenset({"device", "pid", "errno"})
_LARGE_MAP_BYTES = 64 << 20


@dataclass(frozen=True)
class Message:
    """What one error text states.  Amounts in bytes; None where it states nothing."""

    is_oom: bool | str = False
    """True, False, or "maybe" when the text alone cannot tell."""
    backend: str | None = None
    """"cuda", "hip", "xpu", "npu", "mps", "cpu" (an allocation) or "host" (limits)."""
    kind: str | None = None
    """Such as "device_oom", "device_limit", "shm", "killed"; None: not recognised."""
    device: int | None = None
    """Index of the device."""
    pid: int | None = None
    """Process named by the text."""
    requested: int | None = None
    """What was asked for."""
    capacity: int | None = None
    """What the whole device has."""
    free: int | None = None
    """What nobody had taken."""
    allocated: int | None = None
    """In live tensors."""
    reserved: int | None = None
    """Held by the allocator, live tensors included (on MPS: its heaps)."""
    reserved_unallocated: int | None = None
    """Held by the allocator and not in use."""
    in_use: int | None = None
    """Held by this process, its context and other libraries included."""
    private_pools: int | None = None
    """Inside graph-private pools."""
    limit: int | None = None
    """A cap set by software below the capacity."""
    other: int | None = None
    """MPS: held by Metal outside the heaps."""
    pool: str | None = None
    """MPS: "private" or "shared"."""
    procs: list[list[int]] | None = None
    """Processes on the device, each ``[pid, bytes]``."""
    shape: list[int] | None = None
    """Shape of the array that was asked for."""
    dtype: str | None = None
    """Its element type."""
    errno: int | None = None
    """Number of the system's error."""
    total_vm: int | None = None
    """Address space of a killed process."""
    anon_rss: int | None = None
    """Private memory of a killed process."""
    raw: str = field(default="", repr=False)
    """The text itself."""


def read_message(text: str) -> Message:
    """Recognise an error text and take its numbers.

    Args:
        text: A message, a traceback or a piece of a log; of several messages the
            surest counts.

    Returns:
        What it states; ``kind`` is None when nothing is recognised.

    >>> said = read_message("RuntimeError: Invalid buffer size: 19.45 GB")
    >>> said.kind, said.backend, said.requested
    ('buffer_too_large', 'mps', 20884278477)
    >>> read_message("a friend of mine ran out of memory").is_oom
    False
    """
    for wording in wordings():
        match = wording.pattern.search(text)
        if match is not None:
            return _read(text, wording, match)
    return Message(raw=text)


def _read(text: str, wording: Wording, match: re.Match[str]) -> Message:
    said = {k: v for k, v in match.groupdict().items() if v is not None}
    backend = _backend(said.pop("backend", None), wording.backend)
    found: dict[str, Any] = {k: _value(k, v) for k, v in said.items()}
    found.update(_fields(text[match.start() :], wording, skip=found))
    message = Message(
        is_oom=wording.is_oom,
        backend=backend,
        kind=wording.kind,
        raw=text,
        **{k: v for k, v in found.items() if v is not None},
    )
    return _corrected(message)


def _fields(text: str, wording: Wording, *, skip: Mapping[str, Any]) -> dict[str, Any]:
    """Read the parts of an allocator's text, in any order and cut off anywhere."""
    text = _one_message(text, wording)
    found: dict[str, Any] = {}
    parts = parts_of(wording.parts) if wording.parts else {}
    for name, pattern in parts.items():
        match = pattern.search(text)
        if match is not None and match.lastindex and name not in skip:
            found[name] = _value(name, match.group(match.lastindex))
    if wording.parts == "device":
        procs = [[int(p), _size(s)] for p, s in _PROCESS.findall(text)]
        found["procs"] = procs or None
    return found


_DEVICE = re.compile(r"\b(CUDA|HIP|ROCm|XPU|NPU|MPS)\b", re.IGNORECASE)
_PROCESS = re.compile(r"Process (\d+) has ([\d.]+ ?\w+) memory in use")


def _one_message(text: str, wording: Wording) -> str:
    """Cut off what follows the message, so that a second one cannot lend numbers."""
    again = wording.pattern.search(text, 1)
    return text[: again.start()] if again is not None else text


def _backend(said: str | None, usual: str | None) -> str | None:
    if said is None:
        return usual
    return {"gpu": "cuda", "rocm": "hip", "level_zero": "xpu"}.get(
        said.lower(), said.lower()
    )


def _value(name: str, text: str) -> Any:
    if name in SIZES:
        return _size(text)
    if name in _WHOLE:
        return int(text)
    if name == "shape":
        return [int(n) for n in re.findall(r"-?\d+", text)]
    return text.lower() if name == "pool" else text


def _size(text: str) -> int:
    """Read a size as the allocators print it: KB and KiB are both 1024 bytes."""
    if text.startswith("0x"):
        return int(text, 16)
    match = re.match(r"([\d,.]+)\s*([KMGTPE]?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(text)
    number = match.group(1).replace(",", "").rstrip(".")
    power = _STEPS[match.group(2).upper()]
    if "." not in number:
        return int(number) << power
    return round(float(number) * (1 << power))


def _corrected(message: Message) -> Message:
    """Tell apart what one wording is used for."""
    if message.backend is None and (named := _DEVICE.search(message.raw)):
        message = replace(message, backend=_backend(named[1], None))
    if message.kind == "map_count" and (message.requested or 0) >= _LARGE_MAP_BYTES:
        return replace(message, kind="host_alloc", backend="cpu")
    return message


def request_of(message: Message) -> int | None:
    """Give what was asked for, from the shape and element type where need be.

    >>> said = "Unable to allocate array with shape (9681, 9681) and data type float64"
    >>> request_of(read_message("MemoryError: " + said))
    749774088
    """
    if message.requested is not None or message.shape is None:
        return message.requested
    width = _WIDTHS.get((message.dtype or "").removeprefix("torch."))
    return None if width is None else width * math.prod(message.shape)


_WIDTHS = {
    **dict.fromkeys(("float64", "int64", "uint64", "double", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "float"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "half"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    "complex128": 16,
}


def as_fields(message: Message) -> dict[str, Any]:
    """Give every field by its name, for a program."""
    return {f.name: getattr(message, f.name) for f in fields(Message)}
