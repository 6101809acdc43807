"""Shards in an object store, or any other file system that fsspec knows.

Requests break: each is tried again after what may pass, its tries are bounded in time
together (``Retries``), and it ends in an error that names the URL and what to do.  Of
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

from loaderkit.cache.storage import (
    NoAnswerError,
    Patience,
    Retries,
    without_password,
)
from loaderkit.errors import CacheError, DamagedCacheError, OptionError
from loaderkit.fixes import Fix, Setting
from loaderkit.library_files import where_raised

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

T = TypeVar("T")

_STORAGE_OPTIONS = Setting("storage_options", code="{...}")
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
_WITHOUT_FOLDERS = frozenset(_EXTRAS) - {"adl"}
"""Files there have long names.  To make a folder makes the bucket: one that nobody
asked for where its name is mistyped."""
_READING_AHEAD = frozenset({"hf"})
"""File systems that read one part after the other, and 5 MiB more for each, in case
that they come next: of a file of 40 MiB 60 MiB came."""
_NEVER_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _PRECONDITION = 401, 403, 404, 412
_NO_SUCH_RANGE = 416
_GONE = {_NOT_FOUND, 410}
_WORTH_ANOTHER_TRY = {408, 409, 425, 429}
"""Statuses below 500 that pass: timeouts, conflicts, too many requests."""
_NOT_IMPLEMENTED = {501, 505}
"""A server that cannot do this now cannot do it a moment later."""
_CREDENTIAL_ERRORS = {
    # botocore
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "SSOTokenLoadError",
    "ProfileNotFound",
    # google.auth
    "DefaultCredentialsError",
    "RefreshError",
    # azure
    "ClientAuthenticationError",
    # huggingface_hub
    "GatedRepoError",
    "LocalTokenNotFoundError",
}
"""Errors by name: their libraries are not imported to find out."""
_BUGS = (
    *(TypeError, AttributeError, NameError, ImportError, SyntaxError, AssertionError),
    *(ArithmeticError, BufferError, RecursionError, StopIteration, StopAsyncIteration),
)
"""What code that is wrong raises, and raises again.  No ValueError and no LookupError:
an answer that cannot be parsed, or lacks something, may come whole the next time.  A
list of S3 that goes on, and does not say where, is a KeyError of s3fs."""
_NO_REPOSITORY = {"RepositoryNotFoundError", "BucketNotFoundError"}
"""The Hub's answer to who may not see one, too."""
_WRONG_URL = {"HfUriError", "HFValidationError"}
_OF_CLOCKS = re.compile(
    r"RequestTimeTooSkewed|request time and the current time"
    r"|signature (not yet current|expired)|date header too old",
    re.IGNORECASE,
)
"""What S3, its likes and Azure say to requests whose time is not theirs."""
_NOT_SUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
"""What file systems answer that know no ``mode="create"``."""
_MOST_PARTS = 9_000
"""S3 takes 10,000 parts of a file."""
_PARTS_AT_ONCE = 4
"""Chosen: 32 MiB, one step of the mirror, are asked for together."""
_MAX_ERROR_LETTERS = 300
"""Of an error's text in a message: some hold a whole page of HTML.  Chosen: four lines
of a terminal."""
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
        self.url = without_password(url.rstrip("/"))
        self._full_url = url.rstrip("/")
        self._options = dict(options or {})
        self._patience = patience or Patience()
        self._opened: _FileSystem | None = None
        self._part_bytes = _PART_BYTES
        self._may_stream = True
        self._verbs_let_in: frozenset[str] = frozenset()
        """What the store has let us do: read, write, remove."""
        self._file_system_of_process()  # what is wrong with the URL is said at once

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
            if _status_of(error.__cause__ or error) == _NO_SUCH_RANGE:
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
                system = _Try(self._file_system_of_process(), retries)
                return system.download(system.path(name), file)
        except CacheError:
            raise
        except Exception as error:  # noqa: BLE001 -- any library's
            _LOG.info("%s/%s did not come whole: %s", self.url, name, _text_of(error))
            if _is_timeout(_what_happened(error)):
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
        tries = 0

        def write(system: _Try) -> None:
            nonlocal tries
            tries += 1
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
                    self._create_file(system, path, content)
            except FileExistsError:
                # The answer to an earlier try may have been lost on its way here.
                if tries == 1 or system.call("cat_file", path) != content:
                    raise

        self._with_retries(write, name, verb="written")

    def remove(self, name: str) -> None:
        """Remove a file, if it is there; see ``Storage``."""

        def remove(system: _Try) -> None:
            system.call("rm_file", system.path(name))

        with contextlib.suppress(FileNotFoundError):
            self._with_retries(remove, name, verb="removed")

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
            if _status_of(error) == _PRECONDITION or "PreconditionFailed" in str(error):
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
        parts = system.read_parts(system.path(name), starts, stops)
        for part, first, last in zip(parts, starts, stops, strict=True):
            if len(part) != last - first:
                raise _cut_short(len(part), last - first)
        return b"".join(parts)

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
        while True:
            retries.begin_try()
            try:
                with _NO_FORK_MEANWHILE:
                    answer = request(_Try(self._file_system_of_process(), retries))
            except CacheError:
                raise
            except (FileExistsError, MemoryError):
                raise
            except Exception as raised:  # noqa: BLE001 -- any library's
                error = _what_happened(raised)
                if isinstance(error, _NEVER_THERE):
                    # Who is told that a file is not there has been let in.
                    self._verbs_let_in |= {verb}
                    raise _not_there(where, verb, error) from error
                let_in = self._verbs_let_in
                # Credentials that worked may have expired, and be renewed by now: they
                # are read anew with each try.
                if not (_is_refusal(error) and verb in let_in):
                    _check_worth_another_try(where, verb, error, let_in)
                last_error = error
            else:
                self._verbs_let_in |= {verb}
                return answer
            is_silent = _is_timeout(last_error)
            if is_silent and on_timeout is not None:
                on_timeout()
            pause = retries.pause_s(is_silent=is_silent)
            if pause is None:
                raise _gave_up(where, verb, last_error, retries.tries) from last_error
            _LOG.warning(
                "%s was not %s (%s); trying again in %.1f s",
                *(where, verb, _text_of(last_error), pause),
            )
            time.sleep(pause)
            # Connections of a server that went away, or credentials of an hour ago.
            self._opened = None

    def _file_system_of_process(self) -> _FileSystem:
        opened = self._opened
        if opened is None or opened.process != os.getpid():
            opened = self._opened = _FileSystem(self._full_url, self._options)
        return opened


class _FileSystem:
    """fsspec's file system of a URL, opened by this process."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.process = os.getpid()
        self.system, self.root = _open_file_system(url, options)
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
        parts: list[Any] = self.call(
            "cat_ranges", paths, starts, stops, on_error="return"
        )
        for part in parts:
            if isinstance(part, BaseException):
                raise part
        return parts

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
        """
        from fsspec.callbacks import Callback

        retries = self._retries
        nbytes = file.stat().st_size
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
        _result_within(
            retries, self._start_call("put_file", os.fspath(file), path, **options)
        )

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


def _protocol_of(url: str) -> str:
    return url.split("://", 1)[0].rsplit("::", 1)[-1].lower()


def _open_file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    import fsspec

    protocol = _protocol_of(url)
    # Kept instances share a listing of files that may be of an hour ago.
    own_options: dict[str, Any] = {
        "use_listings_cache": False,
        "skip_instance_cache": True,
    }
    try:
        if protocol in _S3 and "::" not in url and "session" not in options:
            from loaderkit.cache.s3_session import make_session

            own_options["session"] = make_session(options.get("profile"))
        system, root = fsspec.url_to_fs(url, **{**own_options, **options})
    except ImportError as error:
        message = f"{url} cannot be read: {error}."
        extra = _EXTRAS.get(protocol)
        fix = f"pip install 'loaderkit[{extra}]'" if extra else "install that library"
        raise CacheError(
            message, why="its library is not installed", fix=fix
        ) from error
    except (ValueError, TypeError) as error:
        message = f"{url} cannot be opened: {error}."
        why = "fsspec knows no such file system, or it does not take these options"
        such_as = "a URL such as 's3://bucket/cache', and "
        manual = " as in the file system's manual"
        url_and_options = Fix.of(such_as, _STORAGE_OPTIONS, manual)
        raise OptionError(message, why=why, fix=url_and_options) from error
    return system, root


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


def _status_of(error: BaseException) -> int | None:
    """Find the HTTP status that an error of any library carries."""
    if type(error.__cause__).__module__.startswith("aiohttp.http"):
        return None  # aiohttp makes 400 of an answer that is no HTTP
    # s3fs raises Python's errors from botocore's, which carry the response.
    for raised in (error, error.__cause__):
        response = getattr(raised, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status if isinstance(status, int) else None
    response = getattr(error, "response", None)
    candidates = [
        getattr(error, "status", None),  # aiohttp
        getattr(error, "status_code", None),  # azure
        getattr(response, "status_code", None),  # requests, huggingface_hub
    ]
    if type(error).__module__.startswith("gcsfs"):
        candidates.append(getattr(error, "code", None))
    for status in candidates:
        if isinstance(status, int) and 400 <= status < 600:
            return status
    return None


def _what_happened(error: Exception) -> Exception:
    """Give what happened, where a file system says of any failure "not found".

    fsspec's file system of HTTP does, of a server that does not answer too.
    """
    cause = error.__cause__
    if not isinstance(error, _NEVER_THERE) or not isinstance(cause, Exception):
        return error
    if isinstance(cause, _NEVER_THERE):
        return error
    if _kinds_of(cause) & _NO_REPOSITORY:
        return cause
    status = _status_of(cause)
    is_of_network = isinstance(cause, OSError | TimeoutError) or type(
        cause
    ).__module__.startswith("aiohttp")
    if status is None:
        return cause if is_of_network else error
    return error if status in _GONE else cause


def _check_worth_another_try(
    where: str, verb: str, error: Exception, verbs_let_in: frozenset[str]
) -> None:
    """Raise what trying again cannot help.

    Args:
        where: The URL.
        verb: What was to be done: "read", "written" or "removed".
        error: The answer.
        verbs_let_in: What the store has let us do before.

    Raises:
        CacheError: We are not let in, or there is no bucket to write to.
        FileNotFoundError: It is not there.
    """
    status = _status_of(error)
    if _kinds_of(error) & _NO_REPOSITORY:
        message = f"{where} could not be {verb}: {_text_of(error)}."
        why = "there is no such repository, or it is private and not yours to read"
        fix = "hf auth login, hf repos create, or correct the URL"
        raise CacheError(message, why=why, fix=fix) from error
    if _is_refusal(error):
        raise _refused_by_store(where, verb, error, verbs_let_in) from error
    if status in _GONE:
        raise _not_there(where, verb, error) from error
    may_pass = (
        status is None
        or (status >= 500 and status not in _NOT_IMPLEMENTED)
        or status in _WORTH_ANOTHER_TRY
    )
    # A file system that lacks a method lacks it the next time too.
    is_lacking = isinstance(error, NotImplementedError)
    if isinstance(error, _BUGS) and status is None:
        raise _failed_by_itself(where, verb, error) from error
    if not may_pass or is_lacking or _kinds_of(error) & _WRONG_URL:
        message = f"{where} could not be {verb}: {_text_of(error)}."
        why = "the store refuses the request, or its file system cannot do this"
        check = Fix.of("check the URL and ", _STORAGE_OPTIONS)
        raise CacheError(message, why=why, fix=check) from error


def _failed_by_itself(where: str, verb: str, error: Exception) -> CacheError:
    """Say that it is the code of a client that failed, and not a request."""
    message = f"{where} could not be {verb}: {_text_of(error)}."
    why = f"code failed, and would fail again: {where_raised(error) or 'a client'}"
    fix = "another release of the library that this file is of, or report it there"
    return CacheError(message, why=why, fix=fix)


def _refused_by_store(
    where: str, verb: str, error: Exception, verbs_let_in: frozenset[str]
) -> CacheError:
    """Say that the store does not let us do something."""
    message = f"{where} could not be {verb}: {_text_of(error)}."
    if verb == "written" and "read" in verbs_let_in:
        why = "these credentials may read there, and not write"
        may_write = " with credentials that may write, or another URL"
        fix = Fix.of(_STORAGE_OPTIONS, may_write)
        return CacheError(message, why=why, fix=fix)
    if _OF_CLOCKS.search(message):
        why = "requests are signed with the time, and the clock of this machine, or "
        why += "that of the store, is wrong"
        clock = time.strftime("%Y-%m-%d %H:%M %Z")
        return CacheError(message, why=why, fix=f"set the clock, which says {clock}")
    why = (
        "the store does not let you in: credentials are missing, expired, or not "
        "allowed to do this"
    )
    fix = Fix.of("log in again, or ", _STORAGE_OPTIONS, " with credentials that may")
    return CacheError(message, why=why, fix=fix)


def _not_there(where: str, verb: str, error: Exception) -> Exception:
    """Say what is not there: what is to be read, or where it is to be written."""
    if verb != "written":
        return FileNotFoundError(errno.ENOENT, _text_of(error), where)
    message = f"{where} could not be written: {_text_of(error)}."
    why = "there is no such bucket, container or repository, and none is made"
    return CacheError(message, why=why, fix="make it, or correct the URL")


def _kinds_of(error: Exception) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _is_refusal(error: Exception) -> bool:
    """Tell whether the store does not let us in."""
    is_refused = isinstance(error, PermissionError) or bool(
        _kinds_of(error) & _CREDENTIAL_ERRORS
    )
    return is_refused or _status_of(error) in {_UNAUTHORIZED, _FORBIDDEN}


def _gave_up(where: str, verb: str, error: Exception, tries: int) -> CacheError:
    message = f"{where} could not be {verb}: {_text_of(error)}."
    if _is_refusal(error):
        why = (
            "the store let you in before: credentials have expired or were withdrawn, "
        )
        why += f"and {tries} tries found no others; what was read is kept"
        fix = "log in again, and run the same again: it goes on there"
        return CacheError(message, why=why, fix=fix)
    failed = "gave no answer" if _is_timeout(error) else "failed"
    why = f"the store {failed} {tries} times in a row; what was read is kept"
    fix = "check the network and the store, and run the same again: it goes on there"
    return NoAnswerError(message, why=why, fix=fix)


def _cut_short(count: int, wanted: int) -> OSError:
    return OSError(errno.EIO, f"{count:,} bytes came, not {wanted:,}")


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or "Timeout" in type(error).__name__


def _text_of(error: BaseException) -> str:
    """Say what an error is, on one line; some have no text."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text[:_MAX_ERROR_LETTERS]}" if text else name
