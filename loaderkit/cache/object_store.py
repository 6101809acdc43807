"""Shards in an object store, or any other file system that fsspec knows.

Requests break: each is tried again after what may pass, its tries are bounded in time
together (``Retries``), and it ends in an error that names the URL and what to do.  To
open the file system is such a request: FTP's and SFTP's connect when they are made.  Of
what a request returns nothing is believed but its length; whole shards are hashed by
the mirror.

fsspec's asynchronous file systems have one thread for all requests, which a forked
process does not have.  So no file system is used across a fork: each process opens its
own, and a process is not forked while a request of ours is under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import inspect
import logging
import os
import re
import threading
import time
import weakref
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from loaderkit.cache.files import check_readable, unreadable
from loaderkit.cache.storage import (
    Patience,
    Retries,
    without_password,
)
from loaderkit.cache.store_answers import (
    BUGS,
    NEVER_THERE,
    STORAGE_OPTIONS,
    TRIES_OF_LAPSED_CREDENTIALS,
    check_worth_another_try,
    gave_up,
    is_timeout,
    may_have_lapsed,
    may_pass,
    not_there,
    status_of,
    text_of,
    what_happened,
)
from loaderkit.errors import CacheError, DamagedCacheError, OptionError
from loaderkit.fixes import Fix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path


T = TypeVar("T")

_LOG = logging.getLogger("loaderkit")
_PART_BYTES = 8 << 20
"""A range is read in parts of this size, at once where the file system can: a single
stream of S3 carries some 80 MB/s, a network more, and AWS advises ranges of 8 to 16 MB.
Measured on moto's server: 4 MiB take a quarter more of the processor."""
_LEAST_PART_BYTES = 128 << 10
"""Parts get smaller after a request that took too long, down to this in two steps."""
_EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "abfs": "azure",
    "abfss": "azure",
    "az": "azure",
    "adl": "azure",
    "hf": "hf",
}
"""Which extra of loaderkit brings the file system of a protocol."""
_S3 = frozenset({"s3", "s3a"})
_OF_FSSPEC = frozenset(
    {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache"}
)
"""Options that fsspec itself takes, of any file system."""
_WITHOUT_FOLDERS = frozenset(_EXTRAS) - {"adl"}
"""Files there have long names.  To make a folder makes the bucket: one that nobody
asked for where its name is mistyped."""
_OF_HOSTS = frozenset({"http", "https", "ftp", "sftp", "ssh", "smb", "webhdfs"})
"""URLs of these name a host."""
_READING_AHEAD = frozenset({"hf"})
"""File systems that read one part after the other, and 5 MiB more for each, in case
that they come next: of a file of 40 MiB 60 MiB came."""
_PRECONDITION, _NO_SUCH_RANGE = 412, 416
_NOT_SUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
"""What file systems answer that know no ``mode="create"``."""
_MOST_PARTS = 9_000
"""S3 takes 10,000 parts of a file."""
_PARTS_AT_ONCE = 4
"""Chosen: 32 MiB, one step of the mirror, are asked for together."""
_ONE_COMMIT_AT_A_TIME = threading.Lock()
"""fsspec's memory:// looks whether a file is there and then writes it, so that of two
threads both could succeed; other processes cannot see its files."""


class ObjectStore:
    """The files of one cache below a URL; see ``storage.Storage``.

    Args:
        url: Of the folder that is the cache, such as "s3://bucket/molecules".
        options: What fsspec's file system is made with: credentials, endpoint ...
        patience: How long it is waited for.

    Raises:
        OptionError: fsspec does not know such URLs, or does not take the options.
        CacheError: The library that reads them is not installed.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        patience: Patience | None = None,
    ) -> None:
        _check_url(url)
        self.url = without_password(url.rstrip("/"))
        self._full_url = url.rstrip("/")
        self._options = dict(options or {})
        self._patience = patience or Patience()
        self._opened: _FileSystem | None = None
        self._part_bytes = _PART_BYTES
        self._may_stream = True
        self._verbs_let_in: frozenset[str] = frozenset()
        """What the store has let us do: read, write, remove."""
        # What is wrong with the URL is said at once.  Some file systems connect when
        # they are opened, as that of FTP: that may pass when it is tried again.
        self._with_retries(_no_request, "", verb="opened")

    @property
    def keeps_history(self) -> bool:
        """Whether every write makes a commit; see ``KeepsHistory``."""
        return _protocol_of(self._full_url) == "hf"

    def __getstate__(self) -> dict[str, Any]:
        """Travel as URL and options, never with an open connection."""
        return {**self.__dict__, "_opened": None}

    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Read a small file whole; see ``Storage``."""

        def read(system: _Try) -> bytes:
            system.forget_listings()
            # Not asked for its size before, which would be a second request: opening
            # waits for each, on moto's server 30 ms.
            content: bytes = system.call(
                "cat_file", system.path(name), start=0, end=most_bytes + 1
            )
            return content

        try:
            content = self._with_retries(read, name)
        except CacheError as error:
            if status_of(error.__cause__ or error) == _NO_SUCH_RANGE:
                return b""  # an empty file has not even the first byte
            raise
        if len(content) > most_bytes:
            message = f"{self.url}/{name} has more than {most_bytes:,} bytes."
            why = "it is larger than such a file of a cache can be"
            raise DamagedCacheError(message, why=why, fix="push the cache again")
        return content

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Read some bytes of a file; see ``Storage``."""
        contents = []
        position = start
        while position < stop:
            # Cut by the size of parts as it is now, since what cannot pass in
            # ``request_s`` makes parts smaller, and so what is asked for again.
            step_stop = min(stop, position + _PARTS_AT_ONCE * self._part_bytes)
            read = functools.partial(self._read_parts, name, position, step_stop)
            content = self._with_retries(
                read, name, on_timeout=self._ask_for_smaller_parts
            )
            contents.append(content)
            position += len(content)
            # A store that was silent for a moment is no slow network.
            self._part_bytes = min(_PART_BYTES, 2 * self._part_bytes)
        return b"".join(contents)

    def stream_file(self, name: str, file: Path) -> bool:
        """Write a file to local disk as its bytes come; see ``StreamsFiles``."""
        if not self._may_stream:
            return False
        retries = Retries(self._patience)
        retries.begin_try()
        try:
            with _NO_FORK_MEANWHILE:
                system = _Try(self._file_system_of_process(retries), retries)
                return system.download(system.path(name), file)
        except CacheError:
            raise
        except Exception as error:  # noqa: BLE001 -- any library's
            _LOG.info("%s/%s did not come whole: %s", self.url, name, text_of(error))
            if is_timeout(what_happened(error)):
                # Such a network needs smaller pieces.  Files that follow shall not take
                # a try longer than what is promised.
                self._may_stream = False
                # It may still be written to by what was given up.
                file.unlink(missing_ok=True)
                file.touch()
            return False

    def sizes(self) -> Mapping[str, int]:
        """List the files with their bytes; see ``Storage``."""

        def list_files(system: _Try) -> dict[str, int]:
            try:
                entries = system.call("ls", system.root, detail=True, refresh=True)
            except FileNotFoundError:
                return {}
            return {
                str(entry["name"]).rsplit("/", 1)[-1]: int(entry["size"])
                for entry in entries
                if entry["type"] == "file"
            }

        return self._with_retries(list_files, "")

    def write_file(self, name: str, file: Path) -> None:
        """Write a file from local disk; see ``Storage``."""

        def write(system: _Try) -> None:
            system.make_folder()
            system.upload(file, system.path(name))

        self._with_retries(write, name, verb="written")

    def commit(self, name: str, content: bytes, *, replace: bool) -> None:
        """Write the file that makes all others visible; see ``Storage``."""
        may_be_ours = False

        def write(system: _Try) -> None:
            nonlocal may_be_ours
            path = system.path(name)
            system.make_folder()
            if replace:
                system.call("pipe_file", path, content)
                return
            try:
                with _ONE_COMMIT_AT_A_TIME:
                    # Not every file system knows ``mode``; this is asked of all.
                    system.forget_listings()
                    if system.call("exists", path):
                        raise FileExistsError(path)
                    may_be_ours = True
                    self._create_file(system, path, content)
            except FileExistsError:
                # The answer to an earlier try, or to one of the client's own, may have
                # been lost on its way here.
                if not may_be_ours or system.call("cat_file", path) != content:
                    raise

        self._with_retries(write, name, verb="written")

    def remove(self, name: str) -> None:
        """Remove a file, if it is there; see ``Storage``."""

        def remove(system: _Try) -> None:
            system.call("rm_file", system.path(name))

        with contextlib.suppress(FileNotFoundError):
            self._with_retries(remove, name, verb="removed")

    def unfinished_uploads(self) -> Mapping[str, list[str]]:
        """List the uploads that have not ended; see ``KeepsParts``."""

        def list_uploads(system: _Try) -> dict[str, list[str]]:
            names: dict[str, list[str]] = {}
            for key, upload in system.list_uploads():
                names.setdefault(key, []).append(upload)
            return names

        # Who may list files may not be allowed to list these.
        return self._with_retries(list_uploads, "", verb="listed")

    def give_up_upload(self, name: str, upload: str) -> None:
        """Remove the parts of an upload; see ``KeepsParts``."""

        def give_up(system: _Try) -> None:
            system.give_up_upload(name, upload)

        with contextlib.suppress(FileNotFoundError):
            self._with_retries(give_up, name, verb="removed")

    @staticmethod
    def _create_file(system: _Try, path: str, content: bytes) -> None:
        """Write a file that must not be there, as surely as the file system can.

        S3, GCS and Azure refuse to replace one in the same request; others are asked
        before, and two writers at the same moment could both succeed.

        Raises:
            FileExistsError: It is there.
        """
        try:
            system.call("pipe_file", path, content, mode="create")
        except FileExistsError:
            raise
        except TypeError as error:
            # Only where it does not know ``mode``: written without it, after any other
            # mistake in there, the file would replace what another writer has put.
            if "mode" not in str(error):
                raise
            system.call("pipe_file", path, content)
        except Exception as error:
            if status_of(error) == _PRECONDITION or "PreconditionFailed" in str(error):
                raise FileExistsError(path) from error
            if getattr(error, "errno", None) in _NOT_SUPPORTED:
                if system.call("exists", path):
                    raise FileExistsError(path) from error
                system.call("pipe_file", path, content)
                return
            raise

    def _read_parts(self, name: str, start: int, stop: int, system: _Try) -> bytes:
        starts = list(range(start, stop, self._part_bytes))
        stops = [*starts[1:], stop]
        contents = system.read_parts(system.path(name), starts, stops)
        for content, first, last in zip(contents, starts, stops, strict=True):
            if len(content) != last - first:
                raise _cut_short(len(content), last - first)
        return b"".join(contents)

    def _ask_for_smaller_parts(self) -> None:
        self._part_bytes = max(_LEAST_PART_BYTES, self._part_bytes // 8)

    def _with_retries(
        self,
        request: Callable[[_Try], T],
        name: str,
        *,
        verb: str = "read",
        on_timeout: Callable[[], None] | None = None,
    ) -> T:
        """Make a request until it is answered, or has been tried often enough."""
        where = f"{self.url}/{name}" if name else self.url
        retries = Retries(self._patience)
        refusals = 0
        while True:
            retries.begin_try()
            try:
                with _NO_FORK_MEANWHILE:
                    opened = self._file_system_of_process(retries)
                    answer = request(_Try(opened, retries))
            except (CacheError, OptionError):
                raise
            except (FileExistsError, MemoryError):
                raise
            except Exception as raised:  # noqa: BLE001 -- any library's
                error = what_happened(raised)
                if isinstance(error, NEVER_THERE) and not may_pass(error):
                    # Who is told that a file is not there has been let in.
                    self._verbs_let_in |= {verb}
                    raise not_there(where, verb, error) from error
                let_in = self._verbs_let_in
                if verb in let_in and may_have_lapsed(error):
                    refusals += 1
                    if refusals == TRIES_OF_LAPSED_CREDENTIALS:
                        # What is asked next, such as to take back a claim, is told at
                        # the first try.
                        self._verbs_let_in = frozenset()
                        raise gave_up(where, verb, error, retries.tries) from error
                else:
                    check_worth_another_try(where, verb, error, let_in, retries.tries)
                last_error = error
            else:
                self._verbs_let_in |= {verb}
                return answer
            is_silent = is_timeout(last_error)
            if is_silent and on_timeout is not None:
                on_timeout()
            pause = retries.pause_s(is_silent=is_silent)
            if pause is None:
                raise gave_up(where, verb, last_error, retries.tries) from last_error
            _LOG.warning(
                "%s was not %s (%s); trying again in %.1f s",
                *(where, verb, text_of(last_error), pause),
            )
            time.sleep(pause)
            # Connections of a server that went away, or credentials of an hour ago.
            self._opened = None

    def _file_system_of_process(self, retries: Retries) -> _FileSystem:
        """Give the file system, opened for as long as a try may take.

        Raises:
            TimeoutError: It took longer.
        """
        opened = self._opened
        if opened is None or opened.process != os.getpid():
            opening = _Opening(self._full_url, self._options)
            # On a thread of its own, since its library may wait without an end.
            opened = _result_within(retries, _call_on_thread(opening.run))
            self._opened = opened
        return opened


def _no_request(_: _Try) -> None:
    """Ask a file system for nothing: it is opened."""


class _FileSystem:
    """fsspec's file system of a URL, opened by this process."""

    def __init__(self, system: Any, root: str) -> None:
        self.process = os.getpid()
        self.system, self.root = system, root
        _FILE_SYSTEMS.add(self)


class _FileSystems:
    """Keeps in a forked process what its parent had opened, unused and never closed.

    A file system that goes closes its connections, and takes them out of what its event
    loop watches.  A forked process shares that with its parent (epoll does): the
    parent's next request on such a connection would get no answer, for a minute.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakSet[_FileSystem] = weakref.WeakSet()
        self._inherited: list[_FileSystem] = []
        self._is_registered = False

    def add(self, opened: _FileSystem) -> None:
        """Note a file system that this process has opened."""
        if not self._is_registered and hasattr(os, "register_at_fork"):
            self._is_registered = True
            os.register_at_fork(after_in_child=self._keep_inherited)
        self._open.add(opened)

    def _keep_inherited(self) -> None:
        self._inherited += self._open
        self._open.clear()


_FILE_SYSTEMS = _FileSystems()


class _Try:
    """Calls of a file system that belong to one try of a request, bounded in time.

    Args:
        opened: The file system.
        retries: How long the calls may take together.
    """

    def __init__(self, opened: _FileSystem, retries: Retries) -> None:
        self._system = opened.system
        self._retries = retries
        self.root = opened.root

    def path(self, name: str) -> str:
        """Name a file of the cache as the file system does."""
        return f"{self.root.rstrip('/')}/{name}"

    def forget_listings(self) -> None:
        """Look anew for what others have written: the Hub's file system keeps lists."""
        self._system.invalidate_cache()

    def make_folder(self) -> None:
        """Make the folder of the cache, where the store has folders."""
        if not self._protocols & _WITHOUT_FOLDERS:
            self.call("makedirs", self.root, exist_ok=True)

    def call(self, method: str, *args: Any, **kw: Any) -> Any:
        """Call a method of the file system, for as long as a try may take.

        Args:
            method: Its name.
            args: Its arguments.
            kw: Its arguments by name.

        Returns:
            What it returns.

        Raises:
            TimeoutError: It took longer.
        """
        return _result_within(self._retries, self._start_call(method, *args, **kw))

    def read_parts(self, path: str, starts: list[int], stops: list[int]) -> list[bytes]:
        """Read parts of a file, at once where the file system can.

        Args:
            path: As the file system names it.
            starts: First byte of each part.
            stops: Behind the last byte of each.

        Raises:
            TimeoutError: It took longer than a try may take.
        """
        if self._protocols & _READING_AHEAD:
            calls = [
                self._start_call("cat_file", path, start, stop, cache_type="none")
                for start, stop in zip(starts, stops, strict=True)
            ]
            return [_result_within(self._retries, call) for call in calls]
        paths = [path] * len(starts)
        results: list[Any] = self.call(
            "cat_ranges", paths, starts, stops, on_error="return"
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    @property
    def _protocols(self) -> set[str]:
        protocol = self._system.protocol
        return {protocol} if isinstance(protocol, str) else set(protocol)

    def upload(self, file: Path, path: str) -> None:
        """Copy a file, in parts where the file system can, each bounded in time.

        Args:
            file: On local disk.
            path: As the file system names it.

        Raises:
            TimeoutError: No part got through for longer than a try may take.
            CacheError: The file on local disk cannot be read.
        """
        from fsspec.callbacks import Callback

        retries = self._retries
        try:
            nbytes = file.stat().st_size
        except OSError as error:
            raise unreadable(file, error) from error
        options: dict[str, Any] = {}
        method = getattr(self._system, "_put_file", self._system.put_file)
        if "chunksize" in inspect.signature(method).parameters:
            options["chunksize"] = max(_PART_BYTES, nbytes // _MOST_PARTS)
        else:
            # Some tell of no progress: as long as the parts would take one by one.
            retries.lengthen_try(1 + nbytes // _PART_BYTES)

        class Progress(Callback):  # type: ignore[misc]  # fsspec has no types
            def call(self, *_: object, **__: object) -> None:
                retries.note_progress()

        options["callback"] = Progress()
        call = self._start_call("put_file", os.fspath(file), path, **options)
        try:
            _result_within(retries, call)
        except Exception as error:
            # The client reads the file while it sends it, and what the disk says then
            # has no name of a file, or comes as a broken connection.
            if not is_timeout(error):
                check_readable(file)
            raise

    def list_uploads(self) -> list[tuple[str, str]]:
        """List the uploads in parts that have not ended; none where there are no such.

        Returns:
            Name of the file and of its upload, of the first thousand.
        """
        if not hasattr(self._system, "call_s3"):
            return []
        bucket, folder = self._bucket_and_folder
        found = self.call(
            "call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=folder
        )
        return [
            (upload["Key"].removeprefix(folder), upload["UploadId"])
            for upload in found.get("Uploads", [])
        ]

    def give_up_upload(self, name: str, upload: str) -> None:
        """Remove the parts of an upload that ``list_uploads`` has found."""
        bucket, folder = self._bucket_and_folder
        self.call(
            "call_s3",
            "abort_multipart_upload",
            Bucket=bucket,
            Key=folder + name,
            UploadId=upload,
        )

    @property
    def _bucket_and_folder(self) -> tuple[str, str]:
        bucket, _, folder = self.root.strip("/").partition("/")
        return bucket, f"{folder}/" if folder else ""

    def download(self, path: str, file: Path) -> bool:
        """Copy a file to local disk piece by piece, where the file system can.

        Args:
            path: As the file system names it.
            file: On local disk; it is replaced.

        Returns:
            False where the file system holds whole parts in memory.

        Raises:
            TimeoutError: It took longer than a try may take.
        """
        method = getattr(self._system, "_get_file", None)
        if method is None or not self._system.async_impl:
            return False
        # As s3fs names them.  Others write in the order they like, or do not say.
        if not {"chunksize", "max_concurrency"} <= set(
            inspect.signature(method).parameters
        ):
            return False
        # A file that is not cut into parts is written from beginning to end.
        self.call("get_file", path, os.fspath(file), max_concurrency=1)
        return True

    def _start_call(self, method: str, *args: Any, **kw: Any) -> Future[Any]:
        """Begin a call on another thread: of fsspec, or of its own."""
        if self._system.async_impl:
            coroutine = getattr(self._system, f"_{method}", None)
            if coroutine is not None:
                return asyncio.run_coroutine_threadsafe(
                    coroutine(*args, **kw), self._system.loop
                )
        return _call_on_thread(
            functools.partial(getattr(self._system, method), *args, **kw)
        )


def _check_url(url: str) -> None:
    """Refuse a URL that names no bucket, no host, or a port that is none.

    fsspec takes "s3://" for a folder here, and clients ask for what cannot be as often
    as for what may come.

    Raises:
        OptionError: It does.
    """
    for inner_url in url.split("::"):
        protocol, separator, location = inner_url.partition("://")
        protocol = protocol.lower()
        bucket = "host" if protocol in _OF_HOSTS else "bucket"
        fault = ""
        if protocol in _OF_HOSTS | _WITHOUT_FOLDERS and separator:
            fault = "" if location.partition("/")[0] else f"it names no {bucket}"
        if protocol in _OF_HOSTS and not fault:
            try:
                parts = urlsplit(inner_url)
                (parts.hostname or "").encode("idna")
                _ = parts.port
            except ValueError as error:
                fault = text_of(error)
            else:
                if not parts.hostname or re.search(r"\s", parts.hostname):
                    fault = "it names no host"
        if fault:
            message = f"{without_password(url)} is no URL of a cache."
            example = f"'{protocol}://{bucket}/cache'"
            raise OptionError(message, why=fault, fix=f"a URL such as {example}")


def _protocol_of(url: str) -> str:
    return url.split("://", 1)[0].rsplit("::", 1)[-1].lower()


class _Opening:
    """A file system that is about to be opened.

    Its libraries are imported here, by the thread that asks.  One that waits for
    another thread's import may itself be importing what that thread needs.

    Args:
        url: Of the folder that is the cache.
        options: What the file system is made with.

    Raises:
        OptionError: fsspec does not know such URLs.
        CacheError: The library that reads them is not installed.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        import fsspec

        self._url = url
        # Kept instances share a listing of files that may be of an hour ago.
        self._options: dict[str, Any] = {
            "use_listings_cache": False,
            "skip_instance_cache": True,
        }
        protocol = _protocol_of(url)
        with _told_in_our_words(url):
            for inner_url in url.split("::"):
                name = inner_url.split("://", 1)[0].lower()
                filesystem = fsspec.get_filesystem_class(name)
            if protocol in _S3 and "::" not in url and "session" not in options:
                from loaderkit.cache.s3_session import make_session

                # s3fs makes a session of the options that it does not take itself.  It
                # would drop them beside ours, a misspelt "endpiont_url" among them.
                names = inspect.signature(filesystem.__init__).parameters
                of_session = {
                    name: value
                    for name, value in options.items()
                    if name not in names and name not in _OF_FSSPEC
                }
                self._options["session"] = make_session(**of_session)
        self._options.update(options)
        if protocol in _S3 and "::" not in url:
            from loaderkit.cache.s3_session import FEW_TRIES

            users_config = options.get("config_kwargs") or {}
            self._options["config_kwargs"] = {**FEW_TRIES, **users_config}

    def run(self) -> _FileSystem:
        """Open it.

        Raises:
            OptionError: It does not take the options.
            CacheError: A library that it needs is not installed.
        """
        import fsspec

        with _told_in_our_words(self._url):
            system, root = fsspec.url_to_fs(self._url, **self._options)
        if _protocol_of(self._url) in _S3:
            # Tries of its own around those of its client.
            system.retries = 1
        return _FileSystem(system, root)


@contextlib.contextmanager
def _told_in_our_words(url: str) -> Iterator[None]:
    """Turn what fsspec says of a URL or of options into an error of ours.

    Raises:
        OptionError: fsspec knows no such file system, or it does not take the options.
        CacheError: Its library is not installed.
    """
    try:
        yield
    except ImportError as error:
        message = f"{without_password(url)} cannot be read: {error}."
        extra = _EXTRAS.get(_protocol_of(url))
        fix = f"pip install 'loaderkit[{extra}]'" if extra else "install that library"
        raise CacheError(
            message, why="its library is not installed", fix=fix
        ) from error
    except (*BUGS, ValueError, LookupError) as error:
        message = f"{without_password(url)} cannot be opened: {text_of(error)}."
        why = "fsspec knows no such file system, or it does not take these options"
        such_as = "a URL such as 's3://bucket/cache', and "
        manual = " as in the file system's manual"
        fix_of_both: Fix | str = Fix.of(such_as, STORAGE_OPTIONS, manual)
        scheme = url.partition("://")[0]
        if "::" not in scheme and scheme.lower() != scheme:
            why = f"fsspec writes {scheme.lower()!r}, and knows no {scheme!r}"
            fix_of_both = (
                f"{without_password(url).replace(scheme, scheme.lower(), 1)!r}"
            )
        raise OptionError(message, why=why, fix=fix_of_both) from error


def _result_within(retries: Retries, call: Future[T]) -> T:
    """Wait for a call, which is cancelled when its time is over.

    Raises:
        TimeoutError: Its time is over.
    """
    try:
        while not call.done():
            wait([call], retries.seconds_left)
    except BaseException:
        # One that runs on a thread of its own stays: there is no way to end a thread,
        # and a request is given up after a few.
        call.cancel()
        raise
    return call.result()


def _call_on_thread(function: Callable[[], T]) -> Future[T]:
    """Call a function on a thread that nobody needs to wait for."""
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001 -- raised again by the caller
            outcome.set_exception(error)

    outcome.set_running_or_notify_cancel()
    # Not an executor's: Python waits for the threads of those when it ends.
    threading.Thread(target=call, name="loaderkit-storage", daemon=True).start()
    return outcome


class _ForkGate:
    """Keeps a process from being forked while a request is under way.

    A fork copies locks as they are; the thread that would let go of one is not copied.
    Several threads may have requests under way at once.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._requests = 0
        self._is_registered = False

    def __enter__(self) -> None:
        if not self._is_registered and hasattr(os, "register_at_fork"):
            self._is_registered = True
            os.register_at_fork(
                before=self._wait_and_close,
                after_in_parent=self._open_again,
                after_in_child=self._open_in_child,
            )
        with self._condition:
            self._requests += 1

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._requests -= 1
            self._condition.notify_all()

    def _wait_and_close(self) -> None:
        # Held until the process is forked, so that no request begins.
        self._condition.acquire()
        while self._requests:
            self._condition.wait()

    def _open_again(self) -> None:
        self._condition.release()

    def _open_in_child(self) -> None:
        self._condition = threading.Condition()
        self._requests = 0


_NO_FORK_MEANWHILE = _ForkGate()


def _cut_short(count: int, wanted: int) -> OSError:
    return OSError(errno.EIO, f"{count:,} bytes came, not {wanted:,}")
