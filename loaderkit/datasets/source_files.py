"""The files that samples are made from: which they are, and whether they are the same.

A raw file that is replaced under its name makes other samples, with the code and the
keys as they were.  So packing notes each file that ``load`` opens, by its size and the
time it was changed (or by its hash), and opening the cache looks again.

Python tells of files through an audit hook (PEP 578), which sees ``open`` and what is
built on it, databases of sqlite3, and what other programs are called with.  A library
in C opens files without a word; of those are known: ``raw=``, paths among the keys, the
dataset's attributes and the constants of ``load``'s code, and what is still open after
a sample was read (an h5py file that is kept).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import site
import stat
import sys
import sysconfig
import threading
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import xxhash

from loaderkit.cache.layout import BUILDING, is_cache_file_name
from loaderkit.cache.verified import is_record
from loaderkit.errors import DamagedCacheError
from loaderkit.fixes import PACK_AGAIN

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from typing_extensions import Self  # torch installs it

TrackFiles = Literal["stat", "hash", "none"]
"""How files are known again: by size and time of change, by their hash, or not."""

_ACCESS_MODES = os.O_WRONLY | os.O_RDWR
_MAKES_OR_ADDS = os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CODE = {".py", ".pyc", ".pyi", ".so", ".pyd", ".dll", ".dylib"}
_PACKAGE_RECORDS = {".egg-info", ".dist-info", ".egg"}
"""What Python keeps of an installed package, also beside the sources of one that is
installed to be edited: ``importlib.metadata`` reads these, often during an import."""
_SYSTEM_FOLDERS = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/share/zoneinfo/")
"""Pandas opens a time zone as it is imported, which the first ``load`` may do: PyG
imports it."""
_MEMORY_DISK = "/dev/shm/"
"""Below a system's folder, and people keep raw data there."""
_HASH_BYTES = 1 << 20
"""Bytes of a file that are hashed at a time.  Chosen: they fit the cache of a core."""
_LONGEST_PATH = 4096
"""Longer texts are not looked at as paths: Linux's PATH_MAX."""


class FileVersion(NamedTuple):
    """What a file was like when a sample was made from it."""

    bytes: int
    mtime_ns: int
    xxh3: str = ""
    """Its hash; "" where only size and time were taken."""


def version_of(path: str, *, hashed: bool = False) -> FileVersion | None:
    """Look at a file.

    Args:
        path: Its path.
        hashed: Read it all, too.

    Returns:
        What it is like now; None where there is no regular file of that name.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return None
        digest = _hash_file(path) if hashed else ""
    except (OSError, ValueError):  # a null byte in a name is a ValueError
        return None
    return FileVersion(status.st_size, status.st_mtime_ns, digest)


@dataclass
class SourceFileList:
    """Files that samples were made from, as a cache keeps them."""

    root: str = ""
    """The folder (or file) of ``raw=``: files below it are named from there, so that
    the raw data may move."""
    files: dict[str, FileVersion] = field(default_factory=dict)
    """By name: below the root with "./" in front, else absolute."""

    def add(self, path: str, version: FileVersion) -> None:
        """Note a file; the first look at it counts."""
        if _is_of_caches(path):
            return
        self.files.setdefault(self._stored_name(path), version)

    def update(self, found: Mapping[str, FileVersion]) -> None:
        """Note several files, by path."""
        for path, version in found.items():
            self.add(path, version)

    def any_below_root(self) -> bool:
        """Tell whether a file of the raw data is known."""
        return any(name.startswith("./") for name in self.files)

    def changed(self, root: str) -> Iterator[str]:
        """Name the files that are here and not what they were.

        A file that is not here is passed over: raw data may be deleted once it is
        packed, and a cache may be read where it never was.

        Args:
            root: Where the raw data lies now.

        Yields:
            A sentence for each changed file; one if the folder holds other files only.
        """
        if self._holds_others_only(root):
            yield f"{root} holds none of the files that were packed, and others"
        for name, packed in self.files.items():
            if _is_of_caches(name):
                continue  # noted by an earlier version
            path = root if name == "./." else name
            if name.startswith("./") and name != "./.":
                path = os.path.join(root, name[2:])
            now = version_of(path)
            if now is None or now == (packed.bytes, packed.mtime_ns, ""):
                continue
            # A time that differs may be that of a copy, or of a checkout: a hash tells,
            # where one was taken, and is worth its time only for files of one size.
            if packed.xxh3 and now.bytes == packed.bytes:
                if _hash_file(path) == packed.xxh3:
                    continue
                yield f"{path} has another content than when it was packed"
            elif now.bytes != packed.bytes:
                yield f"{path} has {now.bytes:,} bytes, {packed.bytes:,} when packed"
            else:
                yield f"{path} was written to after it was packed"

    def to_json(self) -> str:
        """Write it as JSON text, sorted, so that equal lists are equal files."""
        files = {name: list(self.files[name]) for name in sorted(self.files)}
        return json.dumps({"files": files}, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str) -> SourceFileList:
        """Read what ``to_json`` wrote.

        Args:
            text: The JSON text.
            where: What to call it in a message.

        Returns:
            The list.

        Raises:
            DamagedCacheError: It is something else.
        """
        try:
            files = json.loads(text)["files"]
            versions = {
                str(name): _version_from_json(raw) for name, raw in files.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            message = f"{where} is not a list of the files that a cache was made from."
            fix = PACK_AGAIN
            raise DamagedCacheError(message, why="it was changed", fix=fix) from None
        return cls(files=versions)

    def _holds_others_only(self, root: str) -> bool:
        """Tell whether a folder is that of other raw data, and not just emptied."""
        below = [name[2:] for name in self.files if name.startswith("./")]
        # "./." is the root itself, where ``raw=`` names one file.
        if not below or below == ["."] or not os.path.isdir(root):
            return False
        if any(os.path.exists(os.path.join(root, name)) for name in below):
            return False
        return next(files_below(Path(root), ()), None) is not None

    def _stored_name(self, path: str) -> str:
        if self.root and path == self.root:
            return "./."
        if self.root and path.startswith(self.root + os.sep):
            return "./" + path[len(self.root) + 1 :]
        return path


class FileTracker:
    """Notes the files that one process opens for reading while samples are read.

    Args:
        ignored: Folders whose files do not count, such as the cache's own.
        mode: How the files are to be known again.
        all_threads: Note what any thread opens, as in a process that only reads
            samples.  Else threads that ran before, and those that they start, do not
            count: they do other work, such as writing another cache.  Only what a
            library in C opens there meanwhile cannot be told from what ``load`` opens.
    """

    def __init__(
        self, ignored: Iterable[str], mode: TrackFiles, *, all_threads: bool
    ) -> None:
        if mode != "none":
            _install_hook()
        self._ignored = tuple(_with_separator(folder) for folder in ignored)
        self._mode = mode
        self._all_threads = all_threads
        self._other_threads: set[threading.Thread] = set()
        self._opened: dict[str, FileVersion | None] = {}
        self._written: set[str] = set()
        self._updatable: set[str] = set()
        self._reported: set[str] = set()
        self._of_others: set[str] = set()
        """Files that are open, or were opened, for other work than reading samples."""
        self._look_around()

    def __enter__(self) -> Self:
        if self._mode != "none":
            _TRACKERS.append(self)
            # Again, now that the hook tells of all that begins from here on.
            self._look_around()
        return self

    def __exit__(self, *_: object) -> None:
        if self in _TRACKERS:
            _TRACKERS.remove(self)

    def note(self, path: object, flags: object) -> None:
        """Take in one call of ``open``; called by the audit hook."""
        name = _absolute(path)
        if name is None:
            return
        if self._is_other_work():
            self._of_others.add(name)
            return
        how = flags if isinstance(flags, int) else os.O_RDONLY
        # O_RDONLY is 0: a file that is opened for reading alone has none of these bits.
        mode = how & _ACCESS_MODES
        if mode == os.O_WRONLY or (mode and how & _MAKES_OR_ADDS):
            self._written.add(name)
        elif name not in self._opened and self._is_raw_data(name):
            # Looked at before it is read: a change while it is read must show later.
            self._opened[name] = version_of(name)
            if mode:  # "r+", as numpy maps files: it is read, and may be written to
                self._updatable.add(name)

    def note_rename(self, new_path: object) -> None:
        """Take in that a file, maybe an open one, is renamed; called by the hook."""
        name = _absolute(new_path)
        if name is not None and self._is_other_work():
            self._of_others.add(name)

    def note_thread(self, thread: threading.Thread) -> None:
        """Take in that a thread is started; called by the audit hook in its parent."""
        if self._is_other_work():
            self._other_threads.add(thread)

    def new_files(self) -> dict[str, FileVersion]:
        """Give the files noted since the last call.

        Returns:
            What each was like before it was read, by absolute path.
        """
        if self._mode == "none":
            return {}
        # What a library in C has opened and keeps open, of which no hook tells.
        for path in _open_descriptors():
            if path not in self._of_others and self._is_raw_data(path):
                self._opened.setdefault(path, version_of(path))
        fresh: dict[str, FileVersion] = {}
        for path, version in list(self._opened.items()):
            if path in self._reported or path in self._written or version is None:
                continue
            self._reported.add(path)
            if path in self._updatable and version_of(path) != version:
                continue  # what load writes itself is no raw data
            fresh[path] = hashed(path, version) if self._mode == "hash" else version
        # Names alone, so that ``note`` passes over them; their versions were given.
        self._opened = dict.fromkeys(self._reported)
        return fresh

    def _look_around(self) -> None:
        """Leave out the threads that run, and the files that are open."""
        if not self._all_threads:
            # Threads that ``load`` starts from now on are new, and count.
            running = set(threading.enumerate()) - {threading.current_thread()}
            self._other_threads.update(running)
        # What is being opened right now is in no list of open files yet.
        own = threading.get_ident()
        for thread, path in list(_LAST_OPENED.items()):
            name = _absolute(path)
            if thread != own and name is not None:
                self._of_others.add(name)
        self._of_others.update(_open_descriptors())

    def _is_other_work(self) -> bool:
        """Tell whether this thread does other work than reading samples."""
        own = threading.get_ident()
        # The number of a thread that has ended may be that of one that load starts.
        return any(
            thread.ident == own and thread.is_alive()
            for thread in list(self._other_threads)
        )

    def _is_raw_data(self, path: str) -> bool:
        """Tell raw data from code and from the system's own files."""
        others = (*_library_folders(), *self._ignored)
        is_system = path.startswith(_SYSTEM_FOLDERS)
        if path.startswith(others) or (is_system and not path.startswith(_MEMORY_DISK)):
            return False
        return not _is_code(path)


def files_named_by(values: Iterable[Any], root: Path | None) -> Iterator[str]:
    """Find the files that keys or attributes name.

    Args:
        values: Keys or attributes: paths, lists and dicts of paths, and open files
            (of Python, h5py, zipfile, numpy's memmap); anything else is passed over.
        root: Where relative paths begin; the current folder where it is None.

    Yields:
        Absolute paths of regular files.
    """
    for name in itertools.chain.from_iterable(map(_names_in, values)):
        if 0 < len(str(name)) < _LONGEST_PATH:
            below = [] if root is None else [root / name]
            for candidate in [*below, Path(name)]:
                path = os.path.abspath(candidate)
                if version_of(path) is not None:
                    yield path
                    break


def files_named_in_code(
    names: Collection[str | PurePath], root: Path | None
) -> Iterator[str]:
    """Find the files that texts and paths of a program name, alone or in a folder.

    Args:
        names: Literals and constants, most of which name no file: of texts only those
            with a suffix or a folder are looked for.
        root: Where relative paths begin; the current folder where it is None.

    Yields:
        Absolute paths of regular files that are no code.
    """
    pure_paths = map(PurePath, names)
    likely = [path for path in pure_paths if path.parent.name or path.suffix]
    folders = [Path(name) for name in names if isinstance(name, PurePath)]
    below = [folder / path for folder in folders for path in likely]
    for path in files_named_by([*likely, *below], root):
        if not _is_code(path):
            yield path


def _is_of_caches(path: str) -> bool:
    """Tell whether a file is a cache's, or the record of which of them were hashed.

    Samples that are made of another cache's are known by its generation; its shards
    have their checksums in their names, and may be copied.  The record grows.
    """
    if BUILDING in Path(path).parts:
        return True  # a cache that is being packed
    return is_cache_file_name(os.path.basename(path)) or is_record(path)


def _is_code(path: str) -> bool:
    """Tell whether a file is a program, or what Python keeps of a package."""
    if os.path.splitext(path)[1] in _CODE:
        return True
    return any(
        os.path.splitext(name)[1] in _PACKAGE_RECORDS for name in path.split(os.sep)
    )


def _names_in(value: object) -> Iterator[str | PurePath]:
    """Give what may be a path: a value, what is in it, or the name of an open file."""
    if isinstance(value, str | PurePath):
        yield value
    elif isinstance(value, dict | list | tuple | set | frozenset):
        items = value.values() if isinstance(value, dict) else value
        yield from (item for item in items if isinstance(item, str | PurePath))
    else:
        # Most attributes are no files; some libraries raise for a name they lack.
        for attribute in ("filename", "name"):
            with contextlib.suppress(Exception):
                name = getattr(value, attribute, None)
                if isinstance(name, str | PurePath):
                    yield name


def files_below(folder: Path, ignored: Iterable[str]) -> Iterator[str]:
    """List all files below a folder, or the file itself; links are not followed."""
    if folder.is_file():
        yield os.path.abspath(folder)
    skipped = tuple(map(_with_separator, ignored))
    for parent, _, names in os.walk(folder):
        path = os.path.abspath(parent)
        if _with_separator(path).startswith(skipped):
            continue
        for name in names:
            yield os.path.abspath(os.path.join(path, name))


_TRACKERS: list[FileTracker] = []
"""Who listens.  Python knows no way to take an audit hook out again, so one hook stays
in a process that packs and asks this list, which is empty but for that time."""

_LAST_OPENED: dict[int, object] = {}
"""What each thread, by its number, has opened or renamed last.  Python tells of it
before it is done: a tracker that begins in between hears of it no more."""
_PLACE_OF_PATH = {"open": 0, "os.rename": 1}
"""Where the path stands among what an event tells."""


@functools.cache
def _install_hook() -> None:
    sys.addaudithook(_on_audit_event)


def _on_audit_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _PLACE_OF_PATH:
        _LAST_OPENED[threading.get_ident()] = arguments[_PLACE_OF_PATH[event]]
    if not _TRACKERS:
        return
    # Other threads enter and leave trackers meanwhile.
    trackers = tuple(_TRACKERS)
    if event in _EVENTS:
        for path, flags in _EVENTS[event](arguments):
            for tracker in trackers:
                tracker.note(path, flags)
    elif event == "os.rename":
        for tracker in trackers:
            tracker.note_rename(arguments[1])
    elif event in _THREAD_STARTS:
        # ``threading`` has a method of the new thread's object run.
        thread = getattr(arguments[0], "__self__", None)
        if isinstance(thread, threading.Thread):
            for tracker in trackers:
                tracker.note_thread(thread)


_THREAD_STARTS = {"_thread.start_new_thread", "_thread.start_joinable_thread"}
"""The first since Python 3.12, the second since 3.13.  Before, a thread that another
one starts while samples are read counts as one of ``load``'s."""


def _absolute(path: object) -> str | None:
    """Give the absolute name of a file that is opened; None where it has none."""
    if not isinstance(path, str | bytes | os.PathLike):
        return None  # a descriptor: its file was opened by name before
    try:
        return os.path.abspath(os.fsdecode(path))
    except (OSError, ValueError, TypeError):
        return None  # no name of a file: open itself will say so


def _files_opened(arguments: tuple[Any, ...]) -> Iterator[tuple[object, object]]:
    path, _, flags = arguments
    yield path, flags


def _databases_connected(arguments: tuple[Any, ...]) -> Iterator[tuple[object, object]]:
    """Name a database; it may be written to."""
    name = arguments[0]
    if isinstance(name, bytes):
        name = os.fsdecode(name)  # so Python 3.10 tells of it
    if isinstance(name, str) and name.startswith("file:"):
        # A URI of SQLite's: the path is percent-encoded, and may stand behind the name
        # of this machine ("file://localhost/a.db").
        name = unquote(urlsplit(name).path)
    yield name, os.O_RDWR


def _files_of_program_call(
    arguments: tuple[Any, ...],
) -> Iterator[tuple[object, object]]:
    """Name the files among the words that a program is called with."""
    words = arguments[1] if isinstance(arguments[1], list | tuple) else [arguments[1]]
    names = [os.fsdecode(w) for w in words if isinstance(w, str | bytes | os.PathLike)]
    # The first is the program itself.  Of "sh -c 'convert a.png b.png'" the last word
    # is a line of words.
    operands = set(names[1:])
    for line in names[1:]:
        operands.update(line.split())
    for name in operands:
        if version_of(name) is not None:
            # Whether the program reads or writes it nobody says.
            yield name, os.O_RDWR


_EVENTS = {
    "open": _files_opened,
    "sqlite3.connect": _databases_connected,
    "subprocess.Popen": _files_of_program_call,
}
"""What tells of files, and how."""


def _open_descriptors() -> Iterator[str]:
    """List the files that are open, where the system tells (Linux)."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return
    for name in names:
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # closed meanwhile, as the list's own descriptor
            continue
        if path.startswith("/") and not path.endswith(" (deleted)"):
            yield path


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {paths[name] for name in names} | set(site.getsitepackages())
    return tuple(_with_separator(os.path.abspath(folder)) for folder in folders)


def _with_separator(folder: str) -> str:
    return folder.rstrip(os.sep) + os.sep


def hashed(path: str, version: FileVersion) -> FileVersion:
    """Add a file's hash to what it was like before it was read.

    Args:
        path: Its path.
        version: Its size and time then.

    Returns:
        Both; without a hash where the file is another one by now, since nobody knows
        the hash of what was read.
    """
    try:
        digest = _hash_file(path)
    except OSError:
        return version
    return version._replace(xxh3=digest) if version_of(path) == version else version


def _hash_file(path: str) -> str:
    digest = xxhash.xxh3_128()
    with Path(path).open("rb") as file:
        while piece := file.read(_HASH_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _version_from_json(raw: list[Any]) -> FileVersion:
    size, mtime_ns, digest = raw
    if not (isinstance(size, int) and isinstance(mtime_ns, int)):
        raise TypeError(raw)
    return FileVersion(size, mtime_ns, str(digest))
