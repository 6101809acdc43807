"""A thread that downloads the shards that are read next."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loaderkit.cache.mirror import Mirror, NoRoomError
from loaderkit.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from loaderkit.cache.remote import RemoteCache

    Ints = NDArray[np.int64]

_LOG = logging.getLogger("loaderkit")
_LOOK_AGAIN_S = 0.2
"""Batches wake the thread; that another process wants room, it looks for.  Chosen."""


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

    What was downloaded stays on local disk until the last batch that reads it is given.

    Args:
        rows: The samples.
        uses: Shards in the order of their first batch.
    """

    def __init__(self, rows: StoredRows, uses: Sequence[ShardUse]) -> None:
        self._rows, self._uses = rows, uses
        self._changed = threading.Condition()
        self._batch = 0
        self._is_closed = False
        self._shards_held: dict[int, ShardUse] = {}
        threading.Thread(
            target=self._download_in_order, name="loaderkit-ahead", daemon=True
        ).start()

    def advance(self, batch: int) -> None:
        """Say which batch is given next."""
        with self._changed:
            self._batch = batch
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread, after the request that is under way."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _download_in_order(self) -> None:
        try:
            mirror = Mirror(self._rows.remote, self._rows.generation)
        except CacheError as error:
            _LOG.warning("nothing is downloaded ahead: %s", error)
            return
        try:
            for use in self._uses:
                if not self._wait_for_room(mirror, use):
                    return
                if use.last_batch < self._batch:
                    continue  # its last batch came before it did
                if not self._download_shard(mirror, use):
                    return
            # What was downloaded is held until it was read.
            while self._shards_held and self._wait_for_batch(mirror):
                pass
        except CacheError as error:
            # Whoever reads the shard gets the error; here it only cost time.
            _LOG.warning("downloading ahead has ended: %s", error)
        finally:
            mirror.close()

    def _wait_for_room(self, mirror: Mirror, use: ShardUse) -> bool:
        """Wait until a shard is within the bound; False when the epoch has ended."""
        sizes = self._rows.shard_bytes
        while self._shards_held:
            held_bytes = sum(int(sizes[shard]) for shard in self._shards_held)
            if held_bytes + int(sizes[use.shard]) <= self._rows.remote.ahead_bytes:
                break
            if not self._wait_for_batch(mirror):
                return False
        return not self._is_closed

    def _download_shard(self, mirror: Mirror, use: ShardUse) -> bool:
        """Download a shard and keep it; False when the epoch has ended."""
        while True:
            try:
                mirror.use(use.shard)
            except NoRoomError:
                if not self._wait_for_batch(mirror):
                    return False
            else:
                self._shards_held[use.shard] = use
                return True

    def _wait_for_batch(self, mirror: Mirror) -> bool:
        """Wait for the next batch, and let go of what was read.

        Returns:
            False when the epoch has ended.
        """
        with self._changed:
            self._changed.wait(_LOOK_AGAIN_S)
            batch, is_closed = self._batch, self._is_closed
        # What is being read is kept by its reader.
        is_room_wanted = bool(self._shards_held) and mirror.is_room_wanted()
        for use in list(self._shards_held.values()):
            if use.last_batch < batch or is_room_wanted:
                mirror.let_go(use.shard)
                del self._shards_held[use.shard]
        return not is_closed
