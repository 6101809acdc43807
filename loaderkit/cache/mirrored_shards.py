"""Which shards of a mirror this process has mapped, and which it lets go of.

Where the whole cache has room in the mirror, shards stay mapped.  Where it has not, a
process lets go of what its last batches have not read; never of what a batch is being
read from.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

from loaderkit.errors import NoRoomError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loaderkit.cache.mirror import Mirror

_LOOK_AGAIN_S = 0.05
"""How often it is looked whether another process has made room.  Chosen: beside a
download of seconds it adds nothing."""
KEPT_BATCHES = 4
"""Where the mirror is too small, what the last so many batches read stays mapped: to
map a shard again takes 1 ms.  Not more, since a process that has no more to read lets
go of nothing."""
KEPT_SHARDS = 8
"""So many shards at most stay mapped for that, those of the last batch among them,
which may be more by themselves.  Chosen: two mixes of ``shuffle="block"``; batches of
rows from anywhere hardly read a shard again."""


class BatchReading:
    """A batch that is being read: who reads it holds this as long as it does.

    Args:
        shards: What it is read from.
    """

    __slots__ = ("__weakref__", "process", "shards")

    def __init__(self, shards: frozenset[int]) -> None:
        self.shards = shards
        self.process = os.getpid()
        """A forked process has its parent's, and reads nothing of it."""


class MirroredShards:
    """The shards that this process reads from a mirror.

    Args:
        mirror: Where they are kept.
    """

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._lock = threading.RLock()
        self._in_use: set[int] = set()
        self._last_batches: deque[frozenset[int]] = deque(maxlen=KEPT_BATCHES)
        self._read_by_threads: dict[int, weakref.ref[BatchReading]] = {}
        """The batch that each thread reads.  Weak, since a thread that has read its
        last batch does not say so: the loop's own, once batches are made ahead by
        another, would hold what it read for as long as it lives."""

    def prepare(
        self, shards: Sequence[int], close: Callable[[int], None]
    ) -> BatchReading | None:
        """Have the shards of a batch on local disk.

        Args:
            shards: Their numbers.
            close: Unmaps a shard that is to be let go of.

        Returns:
            Their shards stay mapped for as long as it is held, and this thread prepares
            no other batch; None where all shards stay.

        Raises:
            CacheError: One cannot be mirrored.
        """
        mirror = self._mirror
        reading = None
        if mirror.is_capped:
            mirror.check_room_for(shards)
            reading = BatchReading(frozenset(shards))
            with self._lock:
                self._last_batches.append(reading.shards)
                self._read_by_threads[threading.get_ident()] = weakref.ref(reading)
                self._let_go_of_others(close, self._kept_shards())
        for shard in shards:
            self.bring(shard, close)
        return reading

    def _kept_shards(self) -> frozenset[int]:
        """Choose what stays mapped of what the last batches read, the newest first."""
        newest, *older = reversed(self._last_batches)
        kept = newest
        for batch in older:
            if len(kept | batch) > KEPT_SHARDS:
                break
            kept |= batch
        return kept

    def bring(self, shard: int, close: Callable[[int], None]) -> None:
        """Have one shard on local disk.

        Args:
            shard: Its number.
            close: Unmaps a shard that is to be let go of.

        Raises:
            CacheError: It cannot be mirrored.
        """
        if self._mirror.uses(shard):
            return
        deadline = time.monotonic() + self._mirror.patience_s
        while True:
            try:
                self._mirror.use(shard)
            except NoRoomError:
                with self._lock:
                    did_let_go = self._let_go_of_others(close)
                if did_let_go:
                    continue
                if time.monotonic() > deadline:
                    raise
                # Others let go of some when they read their next batch, and of what
                # they hold for later at once.
                self._mirror.ask_for_room()
                time.sleep(_LOOK_AGAIN_S)
            else:
                with self._lock:
                    self._in_use.add(shard)
                return

    def bring_again(self, shard: int, close: Callable[[int], None]) -> None:
        """Download a shard anew whose bytes were changed on local disk.

        Args:
            shard: Its number.
            close: Unmaps a shard that is to be let go of.

        Raises:
            CacheError: It cannot be mirrored.
        """
        self._mirror.discard(shard)
        self._mirror.let_go(shard)
        self.bring(shard, close)

    def let_go(self, close: Callable[[int], None]) -> None:
        """Let go of all shards: nothing is being read, and others may need the room.

        Args:
            close: Unmaps a shard.
        """
        with self._lock:
            self._last_batches.clear()
            self._read_by_threads.pop(threading.get_ident(), None)
            self._let_go_of_others(close)

    def _let_go_of_others(
        self, close: Callable[[int], None], *kept: frozenset[int]
    ) -> bool:
        """Let go of all shards but some, and those that a batch is being read from.

        Returns:
            True if anything was let go of.
        """
        read: list[frozenset[int]] = []
        for thread, reference in list(self._read_by_threads.items()):
            reading = reference()
            if reading is not None and reading.process == os.getpid():
                read.append(reading.shards)
            else:
                del self._read_by_threads[thread]
        idle = self._in_use.difference(*kept, *read)
        for shard in idle:
            close(shard)
            self._mirror.let_go(shard)
        self._in_use -= idle
        return bool(idle)
