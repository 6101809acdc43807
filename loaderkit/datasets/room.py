"""See that there is room for a batch before it is made.

What a sample takes is written in the cache, and a cache may be damaged or a stranger's:
a number of nodes, or a shape padded to the longest sample, can ask for more than the
machine has, from a few bytes on disk.  Linux promises such memory and ends the process
when it is used; so the promise is held against what is free.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import psutil

from loaderkit.errors import DatasetError
from loaderkit.memory.host import available_memory
from loaderkit.units import count_of, format_bytes

if TYPE_CHECKING:
    from loaderkit.cache.manifest import Manifest

UNASKED_BYTES = 256 << 20
"""Up to here nobody is asked.  Asking takes 17 ms where there are many cgroups, and
copying so many bytes 470 ms (both measured on 2 busy cores); a batch of 128 molecules
has 0.3 MB."""


class Room:
    """What one batch has taken so far, and when to look again at what is free."""

    __slots__ = ("_ask_at", "_bytes", "_samples")

    def __init__(self, samples: int) -> None:
        self._samples, self._bytes, self._ask_at = samples, 0, UNASKED_BYTES

    def take(self, nbytes: int) -> None:
        """Say that the batch is going to take some bytes.

        Args:
            nbytes: Bytes of one tensor.

        Raises:
            DatasetError: They are not free.
        """
        self._bytes += nbytes
        if self._bytes > self._ask_at:
            check_room(nbytes, f"A batch of {count_of(self._samples, 'samples')}")
            self._ask_at = 2 * self._bytes


def check_room(nbytes: int, who: str) -> None:
    """See that so many bytes are free.

    Args:
        nbytes: Bytes that are going to be used.
        who: What takes them, for the message.

    Raises:
        DatasetError: They are not free.
    """
    free_bytes, limit = free_memory()
    if nbytes > free_bytes:
        message = (
            f"{who} takes {format_bytes(nbytes)} more, and {format_bytes(free_bytes)} "
            f"are free ({limit})."
        )
        why = "the samples are too large for one batch, or the cache is damaged"
        fix = "a smaller batch_size; or loaderkit verify CACHE, and pack it again"
        raise DatasetError(message, why=why, fix=fix)


def check_chunks(manifest: Manifest) -> None:
    """See that there is room for the largest chunk of a compressed cache.

    A chunk that holds one row is as large as the row, whatever its compressed bytes.

    Args:
        manifest: The cache.

    Raises:
        DatasetError: A single row takes more than is free.
    """
    largest = 0
    for group in manifest.shards.groups:
        for name, array in group.schema.arrays:
            if array.chunk_index is not None:
                largest = max(largest, int(group.chunk_bytes(name).max()))
    if largest > UNASKED_BYTES:
        # Once compressed with its filters, once in the array of the sample.
        check_room(2 * largest, "A compressed value of this cache")


def free_memory() -> tuple[int, str]:
    """Say how much memory this process may still take, and who says so."""
    limits: list[tuple[int, str]] = [available_memory()]
    with contextlib.suppress(ImportError):  # Windows has no such limits
        import resource

        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        if most != resource.RLIM_INFINITY:
            used = psutil.Process().memory_info().vms
            limits.append((max(0, most - used), "ulimit -v"))
    return min(limits)


def page_cache_bytes() -> int:
    """Say how much memory the system may use to keep pages of a cache's files."""
    return available_memory()[0]
