"""Threads that download the shards that are read next.

They belong to the training process.  Its workers see what they are about to download,
and wait for it: a client of S3 of their own would take each 0.4 s and 26 MiB.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loaderkit.cache.mirror import Mirror
from loaderkit.errors import CacheError, NoRoomError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from loaderkit.array_types import Ints
    from loaderkit.cache.remote import RemoteCache

_LOG = logging.getLogger("loaderkit")
_LOOK_AGAIN_S = 0.2
"""Batches wake the thread; that another process wants room, it looks for.  Chosen."""
_SHARDS_AT_ONCE = 3
"""While one shard is hashed and flushed to the disk, others come.  Chosen: each holds
some parts of its shard in memory.  Four, which are mixed in a batch of
``shuffle="block"``, make a cold epoch no quicker, and take 51 to 61 MiB where three
take 47 to 52: benchmarks/object_store.py, W2."""


@dataclass(frozen=True, eq=False)
class StoredRows:
    """In which shards of a store the samples of a dataset are."""

    remote: RemoteCache
    generation: str
    shard_of_row: Ints
    """Number of the shard of each sample ``[n]``."""
    shard_bytes: Ints
    """Bytes of each shard of the cache ``[shards]``."""
    is_missing: NDArray[np.bool_]
    """Which shards are not on local disk ``[shards]``."""


@dataclass(frozen=True)
class ShardUse:
    """When a shard is read in an epoch."""

    shard: int
    first_batch: int
    last_batch: int


class DownloadAhead:
    """Downloads shards in the order in which they are read, within a bound in bytes.

    What was downloaded stays on local disk until the last batch that reads it is given,
    or until who reads a batch now finds no room: nothing is downloaded ahead then.
    Until ``start`` nothing is downloaded, but other processes see what will be: workers
    that are forked in between wait for it from their first batch on.

    Args:
        rows: The samples.
        uses: Shards in the order of their first batch.

    Raises:
        CacheError: The mirror cannot be written, or the cache was replaced.
    """

    def __init__(self, rows: StoredRows, uses: Sequence[ShardUse]) -> None:
        self._rows = rows
        self._mirror = Mirror(rows.remote, rows.generation)
        self._changed = threading.Condition()
        self._batch = 0
        self._is_closed = False
        self._threads = 0
        self._shards_held: dict[int, ShardUse] = {}
        """What is on local disk for later, or is being downloaded."""
        self._uses = iter(uses)
        self._next_turn = threading.Lock()
        """Shards are taken one after the other, by one thread at a time."""
        self._announce_first(uses)

    def start(self) -> None:
        """Begin to download."""
        self._threads = _SHARDS_AT_ONCE
        for _ in range(_SHARDS_AT_ONCE):
            threading.Thread(
                target=self._download_in_order, name="loaderkit-ahead", daemon=True
            ).start()

    def advance(self, batch: int) -> None:
        """Say which batch is given next."""
        with self._changed:
            self._batch = batch
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads, after the requests that are under way."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            is_started = self._threads > 0
        if not is_started:
            self._mirror.close()

    def _announce_first(self, uses: Sequence[ShardUse]) -> None:
        """Announce what is downloaded without waiting for room."""
        coming_bytes = 0
        for use in uses:
            coming_bytes += int(self._rows.shard_bytes[use.shard])
            if coming_bytes > self._rows.remote.ahead_bytes:
                break
            self._mirror.announce(use.shard)

    def _download_in_order(self) -> None:
        try:
            for use in self._uses_in_turn():
                if not self._download_shard(use):
                    break
        except CacheError as error:
            # Whoever reads the shard gets the error; here it only cost time.
            with self._changed:
                is_first, self._is_closed = not self._is_closed, True
            if is_first:  # of several threads, which all find the store gone
                _LOG.warning("downloading ahead has ended: %s", error)
        finally:
            self._end_thread()

    def _end_thread(self) -> None:
        """End; the last thread keeps what was downloaded until it was read."""
        with self._changed:
            is_last = self._threads == 1
            if not is_last:
                self._threads -= 1
        if is_last:
            try:
                while self._shards_held and self._wait_for_batch():
                    pass
            finally:
                self._mirror.close()
                self._threads = 0

    def _uses_in_turn(self) -> Iterator[ShardUse]:
        """Take the shards that come next, each as soon as it is within the bound."""
        while True:
            with self._next_turn:
                use = next(self._uses, None)
                if use is None or not self._wait_for_room(use):
                    return
                is_read = use.last_batch < self._batch  # its last batch came before
                if not is_read:
                    with self._changed:
                        self._shards_held[use.shard] = use
                    self._mirror.announce(use.shard)
            if not is_read:
                yield use

    def _wait_for_room(self, use: ShardUse) -> bool:
        """Wait until a shard is within the bound; False when the epoch has ended."""
        sizes = self._rows.shard_bytes
        while True:
            if self._is_room_wanted():
                if not self._wait_for_batch():
                    return False
                continue
            with self._changed:
                held_shards = list(self._shards_held)
            held_bytes = sum(int(sizes[shard]) for shard in held_shards)
            limit_bytes = self._rows.remote.ahead_bytes
            if not held_shards or held_bytes + int(sizes[use.shard]) <= limit_bytes:
                return not self._is_closed
            if not self._wait_for_batch():
                return False

    def _download_shard(self, use: ShardUse) -> bool:
        """Download a shard and keep it; False when the epoch has ended."""
        while True:
            if self._was_read_meanwhile(use):
                self._mirror.withdraw(use.shard)
                return True
            has_come = not self._is_room_wanted() and self._use_if_room(use.shard)
            # Who needs it meanwhile can make room, by letting go of what it has mapped.
            self._mirror.withdraw(use.shard)
            if has_come:
                return True
            if not self._wait_for_batch():
                return False

    def _use_if_room(self, shard: int) -> bool:
        """Have a shard on local disk; False when there is no room for it."""
        try:
            self._mirror.use(shard)
        except NoRoomError:
            return False
        return True

    def _is_room_wanted(self) -> bool:
        """Tell whether a reader waits for room.

        Then no shard is taken: what these threads let go of, they would take again for
        the next shards before the reader looks, who reads nothing meanwhile.
        """
        with self._changed:
            return self._mirror.is_room_wanted()

    def _was_read_meanwhile(self, use: ShardUse) -> bool:
        """Drop a shard whose last batch was given while this thread came to its turn.

        Its reader has downloaded it, and a small mirror has deleted it again.
        """
        with self._changed:
            was_read = use.last_batch < self._batch
            if was_read:
                self._shards_held.pop(use.shard, None)
            return was_read

    def _wait_for_batch(self) -> bool:
        """Wait for the next batch, and let go of what was read.

        Returns:
            False when the epoch has ended.
        """
        with self._changed:
            self._changed.wait(_LOOK_AGAIN_S)
            if self._is_closed:
                # Closing the mirror lets go of all.  One by one it takes longer, and a
                # program that ends meanwhile may close the lease under this thread.
                return False
            is_room_wanted = self._mirror.is_room_wanted()
            # What is being read is kept by its reader; what is not here yet, by nobody.
            unneeded_shards = [
                use.shard
                for use in self._shards_held.values()
                if (use.last_batch < self._batch or is_room_wanted)
                and self._mirror.uses(use.shard)
            ]
            for shard in unneeded_shards:
                self._mirror.let_go(shard)
                del self._shards_held[shard]
            return True
