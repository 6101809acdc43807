"""What the numbers of a message mean: a verdict and the bytes missing.  Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.step.allocator import segment_of

if TYPE_CHECKING:
    from loaderkit.budget.diagnosis.messages import Message

UNLIMITED = 1 << 60
"""Bytes from which on a number is no amount but the sign of a mistake: 1 EiB, chosen
far above any device and below the 16 EiB of a negative size without its sign."""
_NOTABLE_PART_OF_DEVICE = 20
"""What others hold decides from this part of the device on.  Chosen: a twentieth, so
that contexts and rounding, which nobody can avoid, are not taken for others' use."""
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
    "unclear": "probably memory; the text does not say how much is missing",
    "not memory": "nothing in it says that memory ran out",
}


class Judgement(NamedTuple):
    """What the numbers of a message mean."""

    verdict: str
    """A key of :data:`VERDICTS`."""
    shortfall_bytes: int | None = None
    """What was missing; None where the text does not say."""


def judge(message: Message) -> Judgement:
    """Find the verdict and the bytes that were missing.  Pure.

    Args:
        message: What the text stated.

    Returns:
        The verdict; bytes, or None where the text does not say.

    >>> from loaderkit.budget.diagnosis.messages import Message
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
    Judgement(verdict='fragmentation', shortfall_bytes=1073741824)
    """
    requested_bytes = message.requested or 0
    if message.kind in _RESOURCES and requested_bytes < UNLIMITED:
        return Judgement(_RESOURCES[message.kind])

    if message.is_oom is False:
        return Judgement("not memory")

    if requested_bytes >= UNLIMITED:
        return Judgement("garbage size")

    if message.kind == "device_limit":
        if message.backend == "mps":
            return _judge_metal_limit(message)
        return _judge_budget_of_server(message)

    if message.requested is None or message.free is None:
        return _judge_without_free_bytes(message)
    return _judge_by_free_bytes(message, message.requested, message.free)


def _if_positive(nbytes: int) -> int | None:
    return nbytes if nbytes > 0 else None


def _judge_budget_of_server(message: Message) -> Judgement:
    """A server's share of the device: what is asked for, and what is left of it."""
    left_bytes = message.free if message.free is not None else message.limit
    if message.requested is None or left_bytes is None:
        return Judgement("software limit")

    missing_bytes = message.requested - left_bytes
    # Where numbers do not add up to a lack, what is lacking is not known.
    return Judgement("software limit", _if_positive(missing_bytes))


def _judge_metal_limit(message: Message) -> Judgement:
    """MPS: heaps, what Metal holds besides, and one cap over both."""
    requested_bytes = message.requested or 0
    limit_bytes = message.limit or 0
    heap_bytes = message.reserved or 0
    other_bytes = message.other or 0

    if limit_bytes and requested_bytes > limit_bytes:
        return Judgement("request exceeds device", requested_bytes - limit_bytes)

    verdict = "held by others" if other_bytes > heap_bytes else "true shortage"
    missing_bytes = heap_bytes + other_bytes + requested_bytes - limit_bytes
    # Without the request the sum is no shortfall: the heaps alone are below the cap.
    if requested_bytes == 0 or missing_bytes <= 0:
        return Judgement(verdict)
    return Judgement(verdict, missing_bytes)


def _judge_without_free_bytes(message: Message) -> Judgement:
    """Without the free bytes: only what capacity and request tell."""
    requested_bytes = message.requested
    capacity_bytes = message.capacity
    if requested_bytes is None or message.kind != "device_oom":
        return Judgement("unclear")

    if capacity_bytes is not None and requested_bytes > capacity_bytes:
        return Judgement("request exceeds device", requested_bytes - capacity_bytes)

    over_limit_bytes = _bytes_over_limit(message, requested_bytes)
    if over_limit_bytes is not None and over_limit_bytes > 0:
        return Judgement("software limit", over_limit_bytes)

    process_bytes = held_bytes(message)
    if capacity_bytes is None or process_bytes is None:
        return Judgement("unclear")

    missing_bytes = process_bytes + requested_bytes - capacity_bytes
    if missing_bytes <= 0:
        return Judgement("platform limit")

    if unallocated_bytes(message) >= missing_bytes:
        return Judgement("fragmentation", missing_bytes)
    return Judgement("true shortage", missing_bytes)


def _judge_by_free_bytes(
    message: Message, requested_bytes: int, free_bytes: int
) -> Judgement:
    """With request and free bytes: who holds what is missing, others or the cache."""
    capacity_bytes = message.capacity
    if capacity_bytes is not None and requested_bytes > capacity_bytes:
        return Judgement("request exceeds device", requested_bytes - capacity_bytes)

    process_bytes = held_bytes(message)
    over_limit_bytes = _bytes_over_limit(message, requested_bytes)
    if over_limit_bytes is not None:
        return Judgement("software limit", _if_positive(over_limit_bytes))

    # The driver is asked for whole segments, which are larger than the request.
    segment_bytes = segment_of(requested_bytes)
    if free_bytes >= segment_bytes:
        return Judgement("platform limit")

    missing_bytes = requested_bytes - free_bytes
    if missing_bytes <= 0:
        return Judgement("true shortage", segment_bytes - free_bytes)

    # Where others have more of the device than this process, its own cache cannot be
    # what decides, though joining its pieces would have served this one request.
    others_bytes = foreign_bytes(message) or 0
    if others_bytes >= missing_bytes and others_bytes > (process_bytes or 0):
        return Judgement("held by others", missing_bytes)

    if unallocated_bytes(message) >= missing_bytes:
        return Judgement("fragmentation", missing_bytes)

    if capacity_bytes:
        notable_bytes = capacity_bytes // _NOTABLE_PART_OF_DEVICE
        if others_bytes >= max(missing_bytes, notable_bytes):
            return Judgement("held by others", missing_bytes)
    return Judgement("true shortage", missing_bytes)


def _bytes_over_limit(message: Message, requested_bytes: int) -> int | None:
    """Give by how much a request goes beyond what software allows this process.

    Returns:
        Bytes, below zero where it fits; None where the text states no such limit.
    """
    process_bytes = held_bytes(message)
    if message.limit is None or process_bytes is None:
        return None
    # A limit as large as the device is none.
    if message.limit >= (message.capacity or UNLIMITED):
        return None
    return process_bytes + requested_bytes - message.limit


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
