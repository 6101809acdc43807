"""Which shards of a mirror are on their way, told by every process to all others.

A process announces a shard before it downloads it ahead, long before it holds the
shard's lock.  Who needs the shard meanwhile waits for it, and makes no client of the
store for it.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from loaderkit.cache.durable import writing
from loaderkit.cache.leases import Lease, shards_in_use
from loaderkit.cache.mirror_locks import patience_with_downloads, size_and_time
from loaderkit.cache.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from pathlib import Path

    from loaderkit.cache.mirror_folder import GenerationFolder
    from loaderkit.cache.storage import Patience

_LOOK_AGAIN_S = 0.01
"""How often it is looked whether another process has downloaded a shard.  Chosen: a
look takes 0.1 ms."""
_LOOK_FOR_SIGNS_S = 1.0
"""How often it is looked whether it gets on."""


class Announcements:
    """What this process and others have announced of one generation.

    Args:
        folder: Where its shards are mirrored.
        patience: How long the store is waited for.
    """

    def __init__(self, folder: GenerationFolder, patience: Patience) -> None:
        self._folder = folder
        self._patience = patience_with_downloads(patience)
        self._own: Lease | None = None
        """None before this process has announced a shard."""
        self._thread_lock = threading.RLock()

    def add(self, shard: int) -> None:
        """Tell other processes that this one is about to download a shard.

        Raises:
            CacheError: The mirror cannot be written.
        """
        folder = self._folder.announcements
        with self._thread_lock, writing(folder):
            if self._own is None:
                folder.mkdir(parents=True, exist_ok=True)
                self._own = Lease(folder)
            self._own.mark(shard, in_use=True)

    def withdraw(self, shard: int) -> None:
        """Tell other processes that a shard is here, or that it is not on its way."""
        with self._thread_lock, writing(self._folder.announcements):
            if self._own is not None:
                self._own.mark(shard, in_use=False)

    def wait_for(self, shard: int, file: Path) -> None:
        """Wait for a shard that another process is about to download.

        Not for one of this process, whose lock for the shard is waited for; and not for
        one that is stopped, or does not get on.

        Args:
            shard: Its number.
            file: Where it is when it is here.
        """
        if self._own is not None:
            # Who has announced a shard waits for nobody, so that no two wait for each
            # other.
            return
        own = ProcessIdentity.of_this_process()
        last_signs: object = None
        silent_s, looked_s = 0.0, time.monotonic()
        while not file.exists():
            coming = shards_in_use(
                self._folder.announcements, but_of=own, but_of_stopped=True
            )
            if shard not in coming:
                return
            now_s = time.monotonic()
            if now_s - looked_s >= _LOOK_FOR_SIGNS_S:
                signs = self._signs_of_downloads()
                silent_s = silent_s + _LOOK_FOR_SIGNS_S if signs == last_signs else 0.0
                last_signs, looked_s = signs, now_s
                if silent_s >= self._patience.silent_s:
                    return
            time.sleep(_LOOK_AGAIN_S)

    def _signs_of_downloads(self) -> dict[str, tuple[int, int]]:
        """Give what changes as long as any process downloads from this store."""
        files = [
            *self._folder.announcements.glob("*"),
            *self._folder.list_unfinished(),
        ]
        return {file.name: size_and_time(file) for file in files}

    def close(self) -> None:
        """Withdraw all of this process."""
        if self._own is not None:
            self._own.close()
            self._own = None
