"""Where whole shards live when they are not on this machine: one protocol.  Pure.

A cache in a store is the same files as in a folder: ``manifest.json`` beside shards
whose names end in their checksum.  Shards are read whole, into a mirror on local disk
(mirror.py), and mapped from there; so a storage needs no more than what is below.

object_store.py is the implementation for every file system of fsspec.  Another one is a
class with these methods and a line in ``STORAGES`` of remote.py;
``loaderkit.testing.StorageContract`` tests that it keeps what is promised here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from loaderkit.answers import answer_wrong_names

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_USER_AND_PASSWORD = re.compile(r"//[^/@:]*:[^/@]*@")


def is_url(path: object) -> bool:
    r"""Tell a URL from a path.

    >>> is_url("s3://bucket/molecules"), is_url("data.lk"), is_url("C:\\data.lk")
    (True, False, False)
    """
    return isinstance(path, str) and _SCHEME.match(path) is not None


def without_password(url: str) -> str:
    """Leave out what is secret in a URL, for messages.

    >>> without_password("ftp://me:secret@host/data"), without_password("az://c@a/data")
    ('ftp://host/data', 'az://c@a/data')
    """
    return _USER_AND_PASSWORD.sub("//", url)


@answer_wrong_names()
@dataclass(frozen=True)
class Patience:
    """How long a storage is waited for."""

    request_s: float = 60.0
    """One request may take so long; what takes longer is asked for again, in smaller
    pieces."""
    waits_s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    """Pauses between the tries of one request, each lengthened at random by up to a
    half.  These outlast a server that is gone for 30 s."""

    @property
    def tries(self) -> int:
        """How often a request is made before it has failed."""
        return len(self.waits_s) + 1


class Storage(Protocol):
    """The files of one cache, somewhere.

    All methods may be called from any thread, and in a process forked since.  What
    passes is tried again inside, as ``Patience`` says.  Every method raises CacheError,
    with the URL and what to do, when the storage does not answer or does not let us in.
    """

    url: str
    """Where it is, for people; without secrets."""

    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Read a small file whole.

        Raises:
            FileNotFoundError: There is no such file, or nothing at the URL at all.
            DamagedCacheError: It has more than ``most_bytes``.
        """
        ...

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Read bytes ``[start, stop)`` of a file; all of them, or an error.

        Raises:
            FileNotFoundError: There is no such file.
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
