"""Files in /dev/shm that came since the start: memory, though no process's.

Many processes make files there, and leave them.  So a look must not cost more where
there are hundreds of old files, and what another process makes beside this one must not
hide what this one makes: bytes are counted by kind of name.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from array import array
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.leaks.throttle import Throttle

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from loaderkit.leaks.counter_trend import Series

SHM = "/dev/shm"
_MOST_FILES = 20_000
"""Chosen: a job that never cleans up must not make each look take seconds."""
_MOST_KINDS = 16
"""Kinds of names that are counted one by one: 8 bytes an epoch for each.  Chosen; the
processes of a training make three or four."""
_OTHER_KINDS = "other names"
_FREE_S = 0.001
"""What a look at the files may take every epoch."""
_CLOCK_ERROR_S = 0.01
"""A file's time can be so much behind."""
_RANDOM_PART = re.compile(
    r"(?<=^psm_)[0-9a-f]{8}"  # multiprocessing.shared_memory
    r"|(?<=^sem\.mp-)[a-z0-9_]{8}"  # multiprocessing's locks
    r"|(?<=^tmp)[a-z0-9_]{8}"  # tempfile
    r"|[0-9a-f]{12,}"  # hashes, uuids
    r"|\d+"
)


class _File(NamedTuple):
    path: str
    inode: int
    size_bytes: int


class SharedFiles:
    """Files in /dev/shm that this user has made since.

    The file system tells in a microsecond whether anything changed; only then names are
    listed.  A name that was old once is not asked for its size again, and folders that
    are as they were are not entered.

    Args:
        scan: Lists a folder.
    """

    def __init__(
        self, scan: Callable[[str], Iterable[os.DirEntry[str]]] = os.scandir
    ) -> None:
        self.since = time.time() - _CLOCK_ERROR_S
        self.foreign_kinds: set[str] = set()
        """Kinds of names that came while this process waited."""
        self._scan = scan
        self._old: set[tuple[str, int]] = set()
        """Path and inode of files that are not ours to count."""
        self._free_state: tuple[int, int] | None = None
        """Blocks and files free at the last look."""
        self._bytes_now: Counter[str] = Counter()
        """Of the new files, by kind."""
        self._throttle = Throttle(free_s=_FREE_S)
        self._epochs = array("d")
        self._bytes_by_kind: dict[str, array[float]] = {}
        self._update_bytes()  # the first look asks each file for its time

    def note(self, epoch: int, *, always: bool) -> None:
        """Note how many bytes the files of each kind take.

        Args:
            epoch: That has ended.
            always: Look even where that is too slow for every epoch.
        """
        if not (always or self._throttle.due):
            return
        with self._throttle:
            is_there = self._update_bytes()
        if not is_there:
            return
        known = self._bytes_by_kind
        for series in known.values():
            series.append(0.0)
        self._epochs.append(epoch)
        for kind, size_bytes in self._bytes_now.items():
            column = kind
            if kind not in known and len(known) >= _MOST_KINDS:
                column = _OTHER_KINDS
            if column not in known:
                known[column] = array("d", bytes(8 * len(self._epochs)))
            known[column][-1] += size_bytes

    def series_by_kind(self) -> dict[str, Series]:
        """Give what was noted by kind, without kinds that another process makes."""
        return {
            kind: (self._epochs, values)
            for kind, values in self._bytes_by_kind.items()
            if kind not in self.foreign_kinds
        }

    def series(self, kinds: Collection[str] | None = None) -> Series:
        """Give the sum of what was noted, without what another process makes.

        Args:
            kinds: Sum up these only; all if None.
        """
        columns = [
            values
            for kind, (_, values) in self.series_by_kind().items()
            if kinds is None or kind in kinds
        ]
        if not columns:
            return self._epochs, array("d", bytes(8 * len(self._epochs)))
        return self._epochs, array("d", map(sum, zip(*columns, strict=True)))

    def wait_for_others(self, seconds: float) -> None:
        """Wait; kinds of files that come or go meanwhile are another process's."""
        before = set(self._list_new_files())
        time.sleep(seconds)
        changed = before.symmetric_difference(self._list_new_files())
        kinds = {kind_of_file(file.path) for file in changed}
        if not kinds.issubset(self._bytes_by_kind):
            kinds.add(_OTHER_KINDS)  # where kinds that are not counted are summed up
        self.foreign_kinds |= kinds

    def foreign_kinds_seen(self) -> set[str]:
        """Give those of the foreign kinds that were seen during the run."""
        return self.foreign_kinds.intersection(self._bytes_by_kind)

    def grown_late(self) -> Counter[str]:
        """Give by how many bytes each kind grew in the second half."""
        grown: Counter[str] = Counter()
        for kind, (_, values) in self.series_by_kind().items():
            middle = (len(values) - 1) // 2
            grown[kind] = round(values[-1] - values[middle])
        return grown

    def _update_bytes(self) -> bool:
        """Bring the bytes by kind up to date; False where there is no such folder."""
        try:
            space = os.statvfs(SHM)
        except (OSError, AttributeError):
            return False
        free_state = space.f_bfree, space.f_ffree
        if free_state != self._free_state:
            self._free_state = free_state
            self._bytes_now = self._count_bytes()
        return True

    def _count_bytes(self) -> Counter[str]:
        kinds: Counter[str] = Counter()
        for file in self._list_new_files():
            kinds[kind_of_file(file.path)] += file.size_bytes
        return kinds

    def _list_new_files(self) -> Iterator[_File]:
        """List the new files, and remember which of the others are old."""
        still_old: set[tuple[str, int]] = set()
        yield from itertools.islice(self._new_files_below(SHM, still_old), _MOST_FILES)
        self._old = still_old

    def _new_files_below(
        self, folder: str, still_old: set[tuple[str, int]]
    ) -> Iterator[_File]:
        """List this user's new files below a folder."""
        try:
            entries = list(self._scan(folder))
        except OSError:
            return
        user = os.getuid()
        for entry in entries:
            # A name that is used again has another inode.
            key = entry.path, entry.inode()
            # First, since other programs may have left hundreds: 570 took 0.47 ms, and
            # take 0.29.
            if key in self._old:
                still_old.add(key)
                continue
            with contextlib.suppress(OSError):  # it is gone already
                status = entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    if status.st_mtime >= self.since:
                        yield from self._new_files_below(entry.path, still_old)
                elif status.st_uid == user and status.st_ctime >= self.since:
                    yield _File(entry.path, entry.inode(), status.st_blocks * 512)
                else:
                    still_old.add(key)


def kind_of_file(path: str) -> str:
    """Leave out what differs between files that one piece of code makes.

    >>> kind_of_file("/dev/shm/psm_6f0a91be"), kind_of_file("/dev/shm/torch_17_9_3")
    ('/dev/shm/psm_*', '/dev/shm/torch_*_*_*')
    """
    folder, slash, name = path.rpartition("/")
    if folder != SHM:
        folder = kind_of_file(folder) if folder.startswith(SHM) else folder
    return folder + slash + _RANDOM_PART.sub("*", name)
