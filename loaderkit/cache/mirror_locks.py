"""The locks of a mirror, how long their holders are waited for, and who is stuck.

Two kinds of locks, always taken in this order: one for each shard, held while it is
downloaded; and one for the whole folder, held for moments, under which room is made,
and shards appear, are taken into use, and are deleted.  Nobody waits for ever: where
the holder of a shard's lock does not get on, the shard is downloaded beside it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING

from loaderkit.cache.lock_files import (
    STOPPED,
    LockHolder,
    LockPatience,
    StuckHolderError,
    hold_lock_file,
)
from loaderkit.cache.mirror_folder import LOCK
from loaderkit.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from loaderkit.cache.layout import ShardFile
    from loaderkit.cache.mirror_folder import GenerationFolder
    from loaderkit.cache.remote import RemoteCache
    from loaderkit.cache.storage import Patience

_LOG = logging.getLogger("loaderkit")
_STOPPED_S = 2.0
"""Who is stopped while it downloads a shard is not waited for any longer.  Chosen: to
download beside it costs nothing but the bytes."""
_TURNS = 3
"""So many locks a shard has: who finds that the holder of one does not get on takes the
next, and has a partial file of its own."""


class MirrorLock:
    """The lock of a whole mirror, held for moments.

    Args:
        root: The folder of the mirror.
        patience: How long a store is waited for: who holds the lock may be asking it.
    """

    def __init__(self, root: Path, patience: Patience) -> None:
        self._root = root
        self._patience = LockPatience(patience.longest_s, patience.request_s)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold it.

        Raises:
            CacheError: Its holder does not get on, or there are no locks.
        """
        file = self._root / LOCK
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(_hold_lock(self._root, file, self._patience))
            except StuckHolderError as error:
                message = f"The mirror {self._root} is locked."
                raise _stuck_error(
                    message, error, "holds a lock that is needed for moments"
                ) from error
            yield


class ShardLocks:
    """A lock for each shard of a generation, held while it is downloaded.

    Args:
        root: The folder of the mirror.
        remote: The cache.
        folder: Where its shards are mirrored.
    """

    def __init__(
        self, root: Path, remote: RemoteCache, folder: GenerationFolder
    ) -> None:
        self._root, self._remote, self._folder = root, remote, folder
        self._patience = patience_with_downloads(remote.patience)

    @contextlib.contextmanager
    def hold(self, shard: ShardFile) -> Iterator[Path]:
        """Be the one who downloads a shard, as far as others get on.

        Entered, it gives the file that the shard is written to.

        Raises:
            CacheError: Several processes before do not get on, or there are no locks.
        """
        for turn in range(_TURNS):
            partial = self._folder.partial(shard, turn)
            with contextlib.ExitStack() as held:
                try:
                    held.enter_context(
                        _hold_lock(
                            self._root,
                            partial.lock,
                            self._patience,
                            functools.partial(size_and_time, partial.path),
                        )
                    )
                except StuckHolderError as error:
                    stuck = error
                    _LOG.warning(
                        "%s downloads %s and has not got on for %.0f s%s; it is "
                        "downloaded beside it",
                        *(_name_of(error.holder), shard.file, error.waited_s),
                        ", since it is stopped" if _is_stopped(error.holder) else "",
                    )
                    continue
                yield partial.path
                return
        message = f"{shard.file} of {self._remote.storage.url} is not on local disk."
        raise _stuck_error(
            message, stuck, f"downloads it, as {_TURNS - 1} others do"
        ) from stuck


def patience_with_downloads(patience: Patience) -> LockPatience:
    """Say how long a process that downloads a shard is waited for.

    A request of it brings some bytes in ``longest_s``, or ends; the rest is for hashing
    and flushing.

    Args:
        patience: How long that process waits for the store.
    """
    return LockPatience(patience.longest_s + patience.request_s, _STOPPED_S)


def size_and_time(file: Path) -> tuple[int, int]:
    """Give what changes while a file is written; zeros where there is none."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def _hold_lock(
    root: Path,
    file: Path,
    patience: LockPatience,
    sign_of_life: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Hold a lock of the mirror in a folder.

    Raises:
        StuckHolderError: Its holder does not get on.
        CacheError: There are no locks in that folder.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(hold_lock_file(file, patience, sign_of_life))
        except (OSError, NotImplementedError) as error:
            message = f"The mirror {root} cannot be locked: {error}."
            why = "its file system has no locks, or it is not yours to write to"
            fix = "mirror='/a/folder/on/local/disk'"
            raise CacheError(message, why=why, fix=fix) from error
        yield


def _stuck_error(message: str, error: StuckHolderError, doing: str) -> CacheError:
    """Say who is waited for, and why no longer.

    Args:
        message: What cannot be had.
        error: Who has not got on, for how long.
        doing: What it does.
    """
    holder = error.holder
    why = f"{_name_of(holder)} {doing}, and has not got on for {error.waited_s:.0f} s"
    if holder is None:
        return CacheError(message, why=why, fix="end the processes that use the mirror")
    if holder.is_stopped:
        why += f": {STOPPED}"
    return CacheError(message, why=why, fix=holder.how_to_free)


def _name_of(holder: LockHolder | None) -> str:
    return "another process" if holder is None else str(holder)


def _is_stopped(holder: LockHolder | None) -> bool:
    return holder is not None and holder.is_stopped
