"""What the numbers of a message mean: a verdict and the bytes missing.  Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.budget.allocator import segment_of

if TYPE_CHECKING:
    from loaderkit.budget.messages import Message

UNLIMITED = 1 << 60
_RESOURCES = {
    "shm": "shm",
    "fd_limit": "fds",
    "map_count": "map count",
    "pagefile": "pagefile",
    "fork": "fork",
    "killed": "killed",
    "pinned": "pinned",
    "host_alloc": "host shortage",
    "bogus_size": "garbage size",
    "buffer_too_large": "request exceeds device",
}
VERDICTS = {
    "request exceeds device": "one request is larger than the device allows",
    "platform limit": "enough is free: the driver or platform refused, not the memory",
    "software limit": "a limit set by software is reached, the device is not full",
    "fragmentation": "enough is free, in pieces too small: fragmentation decides",
    "held by others": "others hold what is missing",
    "true shortage": "the device is full of this process's own live memory",
    "host shortage": "the host's memory, or this process's share of it, is used up",
    "garbage size": "the size asked for is no size: a shape was never initialised",
    "shm": "/dev/shm is full: batches of workers travel through it",
    "fds": "the limit of open files is reached; memory is not the problem",
    "map count": "vm.max_map_count is reached: one mapping a tensor; memory is free",
    "pagefile": "Windows cannot commit more: the page file is too small",
    "fork": "the kernel would not promise the memory of another process",
    "killed": "the kernel killed a process to get memory back",
    "pinned": "page-locked host memory ran out; the device is not the problem",
    "unclear": "probably memory; the text does not say how much",
    "not memory": "nothing in it says that memory ran out",
}


def judge(message: Message) -> tuple[str, int | None]:
    """Find the verdict and the bytes that were missing.  Pure.

    Args:
        message: What the text stated.

    Returns:
        A key of :data:`VERDICTS`; bytes, or None where the text does not say.

    >>> from loaderkit.budget.messages import Message
    >>> judge(
    ...     Message(
    ...         is_oom=True,
    ...         kind="device_oom",
    ...         requested=4 << 30,
    ...         free=3 << 30,
    ...         reserved_unallocated=2 << 30,
    ...         capacity=40 << 30,
    ...     )
    ... )
    ('fragmentation', 1073741824)
    """
    if message.kind in _RESOURCES and (message.requested or 0) < UNLIMITED:
        return _RESOURCES[message.kind], None
    if message.is_oom is False:
        return "not memory", None
    if (message.requested or 0) >= UNLIMITED:
        return "garbage size", None
    if message.kind == "device_limit":
        is_metal = message.backend == "mps"
        return _judge_limit(message) if is_metal else _judge_budget(message)
    if message.requested is None or message.free is None:
        return _judge_little(message)
    return _judge_device(message, message.requested, message.free)


def _judge_budget(message: Message) -> tuple[str, int | None]:
    """A server's share of the device: what is asked for, and what is left of it."""
    left = message.free if message.free is not None else message.limit
    if message.requested is None or left is None or message.requested <= left:
        return "software limit", None
    return "software limit", message.requested - left


def _judge_limit(message: Message) -> tuple[str, int | None]:
    """MPS: heaps, what Metal holds besides, and one cap over both."""
    need, limit = message.requested or 0, message.limit or 0
    held, other = message.reserved or 0, message.other or 0
    if limit and need > limit:
        return "request exceeds device", need - limit
    missing = held + other + need - limit
    shortfall = missing if message.requested and missing > 0 else None
    return ("held by others" if other > held else "true shortage"), shortfall


def _judge_little(message: Message) -> tuple[str, int | None]:
    """Without the free bytes: only what capacity and request tell."""
    need, capacity = message.requested, message.capacity
    if need is None or message.kind != "device_oom":
        return "unclear", None
    if capacity is not None and need > capacity:
        return "request exceeds device", need - capacity
    held = held_bytes(message)
    if capacity is None or held is None:
        return "unclear", None
    missing = held + need - capacity
    if missing <= 0:
        return "platform limit", None
    cached = unallocated_bytes(message)
    return ("fragmentation" if cached >= missing else "true shortage"), missing


def _judge_device(message: Message, need: int, free: int) -> tuple[str, int | None]:
    capacity = message.capacity
    if capacity is not None and need > capacity:
        return "request exceeds device", need - capacity
    held = held_bytes(message)
    limit = message.limit
    if limit is not None and held is not None and limit < (capacity or UNLIMITED):
        return "software limit", max(held + need - limit, 0) or None
    if free >= segment_of(need):
        return "platform limit", None
    missing = need - free
    if missing <= 0:
        return "true shortage", segment_of(need) - free
    foreign = foreign_bytes(message) or 0
    # Where others have more of the device than this process, its own cache cannot be
    # what decides, though joining its pieces would have served this one request.
    if foreign >= missing and foreign > (held or 0):
        return "held by others", missing
    if unallocated_bytes(message) >= missing:
        return "fragmentation", missing
    if capacity and foreign >= max(missing, capacity // 20):
        return "held by others", missing
    return "true shortage", missing


def unallocated_bytes(message: Message) -> int:
    """Give what the allocator held and nobody used."""
    if message.reserved_unallocated is not None:
        return message.reserved_unallocated
    if message.reserved is None or message.allocated is None:
        return 0
    if message.reserved < message.allocated:  # torch < 1.2 prints the difference
        return message.reserved
    return message.reserved - message.allocated


def held_bytes(message: Message) -> int | None:
    """Give what this process held on the device, None where the text does not say."""
    if message.in_use is not None and message.in_use < UNLIMITED:
        return message.in_use
    if message.allocated is None:
        return message.reserved
    return message.allocated + unallocated_bytes(message)


def foreign_bytes(message: Message) -> int | None:
    """Give what neither this process's tensors nor its cache hold."""
    held = held_bytes(message)
    if message.capacity is None or message.free is None or held is None:
        return None
    return max(0, message.capacity - message.free - held)
