"""Where whole shards live when they are not on this machine: one protocol.

Pure but for the clock of ``Retries``.

A cache in a store is the same files as in a folder: ``manifest.json`` beside shards
whose names end in their checksum.  Shards are read whole, into a mirror on local disk
(mirror.py), and mapped from there; so a storage needs no more than what is below.

object_store.py is the implementation for every file system of fsspec.  Another one is a
class with these methods and a line in ``STORAGES`` of remote.py;
``loaderkit.testing.StorageContract`` tests that it keeps what is promised here.
"""

from __future__ import annotations

import random
import re
import shlex
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from loaderkit.answers import answer_wrong_names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

# The underscore is no letter of a scheme, but one of fsspec's, as in "arrow_hdfs".
_SCHEME = re.compile(r"([a-z][a-z0-9+._-]*::)*[a-z][a-z0-9+._-]+://", re.IGNORECASE)
_USER_AND_PASSWORD = re.compile(r"//[^/@:]*:[^/@]*@")
MOST_JITTER = 1.5
"""Pauses are lengthened at random by up to this factor, so that ranks which failed
together do not come back together."""


def is_url(path: object) -> bool:
    r"""Tell a URL from a path.

    >>> is_url("s3://bucket/molecules"), is_url("arrow_hdfs://host/data.lk")
    (True, True)
    >>> is_url("data.lk"), is_url("C:\\data.lk")
    (False, False)
    """
    return isinstance(path, str) and _SCHEME.match(path) is not None


def how_to_push(url: str, *, overwrite: bool = True) -> str:
    """Write the command that copies a cache to a store.

    Args:
        url: Of the store; of one that is a folder, its path.
        overwrite: A cache there is to be replaced.

    >>> how_to_push("/data/a b"), how_to_push("s3://bucket/a", overwrite=False)
    ("loaderkit push CACHE 'file:///data/a b' --overwrite", 'loaderkit push CACHE s3://bucket/a')
    """
    url = url if is_url(url) else f"file://{url}"
    command = f"loaderkit push CACHE {shlex.quote(url)}"
    return f"{command} --overwrite" if overwrite else command


def without_password(url: str) -> str:
    """Leave out what is secret in a URL, for messages.

    >>> without_password("ftp://me:secret@host/data"), without_password("az://c@a/data")
    ('ftp://host/data', 'az://c@a/data')
    """
    return _USER_AND_PASSWORD.sub("//", url)


def _draw_jitter() -> float:
    return random.uniform(1, MOST_JITTER)


@answer_wrong_names()
@dataclass(frozen=True)
class Patience:
    """How long a storage is waited for."""

    request_s: float = 60.0
    """One try may take so long; what takes longer is asked for again, in smaller
    pieces."""
    waits_s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    """Pauses between the tries of one request, each lengthened at random by up to a
    half.  These outlast a server that is gone for 30 s."""
    silent_tries: int = 3
    """So many tries may end without an answer in time: fewer than those that fail at
    once, since each takes ``request_s``.  Chosen: the third asks for the smallest
    pieces, so that a network of 9 kB/s is slow and not silent."""

    @property
    def tries(self) -> int:
        """How often a request is made before it has failed."""
        return len(self.waits_s) + 1

    @property
    def longest_s(self) -> float:
        """How long a request takes at most, whatever breaks.

        It has failed then, or brought some bytes, from which on it is counted anew.

        >>> Patience(request_s=10, waits_s=(1, 2)).longest_s
        34.5
        """
        return self.silent_tries * self.request_s + MOST_JITTER * sum(self.waits_s)


class Retries:
    """Says of one request how long a try may take, and whether another one follows.

    All tries and the pauses between them take ``patience.longest_s`` at most.

    Args:
        patience: What they may take.
        clock: Gives seconds.
        jitter: Gives what a pause is lengthened by, from 1 to ``MOST_JITTER``.
    """

    def __init__(
        self,
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = _draw_jitter,
    ) -> None:
        self._patience = patience
        self._clock = clock
        self._jitter = jitter
        # Two ends: of all tries together, which progress moves, and of this try.
        self._end_s = clock() + patience.longest_s
        self._try_end_s = self._end_s
        self.tries = 0
        """So many have begun."""
        self._silent_tries = 0

    def begin_try(self) -> None:
        """Say that a try begins."""
        self.tries += 1
        self._try_end_s = min(self._clock() + self._patience.request_s, self._end_s)

    def lengthen_try(self, times: int) -> None:
        """Say that the try may take as long as so many."""
        more_s = (times - 1) * self._patience.request_s
        self._end_s += more_s
        self._try_end_s += more_s

    def note_progress(self) -> None:
        """Count anew: some bytes got through."""
        now = self._clock()
        self._end_s = max(self._end_s, now + self._patience.longest_s)
        self._try_end_s = max(self._try_end_s, now + self._patience.request_s)

    @property
    def seconds_left(self) -> float:
        """What the try may still take.

        Raises:
            TimeoutError: Nothing.
        """
        seconds = self._try_end_s - self._clock()
        if seconds <= 0:
            msg = f"no answer within {self._patience.request_s:g} s"
            raise TimeoutError(msg)
        return seconds

    def pause_s(self, *, is_silent: bool) -> float | None:
        """Say how long to wait after a try that failed.

        Args:
            is_silent: There was no answer in time.

        Returns:
            Seconds; None when the request has failed for good.
        """
        if is_silent:
            self._silent_tries += 1
        if self._silent_tries >= self._patience.silent_tries:
            return None
        if self.tries >= self._patience.tries:
            return None
        pause = self._patience.waits_s[self.tries - 1] * self._jitter()
        # A try behind the end would have no time to be made in.
        has_time_left = self._clock() + pause < self._end_s
        return pause if has_time_left else None


class Storage(Protocol):
    """The files of one cache, somewhere.

    All methods may be called from any thread, and in a process forked since.  What
    passes is tried again inside, as ``Patience`` says.  Every method raises CacheError,
    with what to do, when the storage does not answer or does not let us in.  Every
    error has ``url`` in its text.
    """

    url: str
    """Where it is, for people; without secrets."""

    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Read a small file whole; who reads it can tell whether it was cut short.

        Raises:
            FileNotFoundError: There is no such file, or nothing at the URL at all.
            DamagedCacheError: It has more than ``most_bytes``.
        """
        ...

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Read bytes ``[start, stop)`` of a file; all of them, or an error.

        Raises:
            FileNotFoundError: There is no such file.
            CacheError: It ends before ``stop``.
        """
        ...

    def sizes(self) -> Mapping[str, int]:
        """List the files by name, with their bytes; empty where there is nothing."""
        ...

    def write_file(self, name: str, file: Path) -> None:
        """Write a file from one on local disk; an older one is replaced."""
        ...

    def commit(self, name: str, content: bytes, *, replace: bool) -> None:
        """Write the small file that makes all others visible, whole or not at all.

        Args:
            name: Its name.
            content: Its bytes.
            replace: Replace one that is there.

        Raises:
            FileExistsError: One is there, and it was not to be replaced; of two
                processes at once, one gets this.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...


@runtime_checkable
class StreamsFiles(Protocol):
    """What a storage may offer beside: a file goes to local disk as its bytes come.

    A range is in memory twice at the end, as the pieces that came and as a whole.
    """

    def stream_file(self, name: str, file: Path) -> bool:
        """Write a file to one on local disk, which is replaced.

        One try, bounded in time as those of every request.  Nobody writes to the file
        any more when this has returned.

        Args:
            name: Its name.
            file: Where to; what came before something broke is its beginning.

        Returns:
            False where it did not come whole: ranges say why, and bring the rest.
        """
        ...


@runtime_checkable
class KeepsParts(Protocol):
    """What a storage may offer beside, where it keeps parts of files out of sight.

    Those of a file whose upload was killed stay there, and are paid for.
    """

    def unfinished_uploads(self) -> Mapping[str, list[str]]:
        """List the uploads that have not ended, by the name of the file."""
        ...

    def give_up_upload(self, name: str, upload: str) -> None:
        """Remove the parts of an upload; who is at it uploads the file anew."""
        ...


@runtime_checkable
class KeepsHistory(Protocol):
    """What a storage may say beside: whether every write stays in it, as a commit."""

    keeps_history: bool
