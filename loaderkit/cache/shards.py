"""The files of an open cache: hashed and mapped at their first use, then checked.

Nothing on disk is trusted.  A shard is hashed before its first use (once per machine,
see verified.py).  Its size is checked before each batch: to read a mapped file behind
its end would kill the process (SIGBUS), and so is turned into an error.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

from loaderkit.arguments import check_choice, refuse_value
from loaderkit.cache.address_space import free_mappings, is_available
from loaderkit.cache.chunks import ChunkedValues
from loaderkit.cache.files import (
    FileIdentity,
    check_open_digest,
    exists,
    folder_is_gone,
    identity_of,
    load_manifest,
    map_open_file,
    missing,
    opened,
    unreadable,
    wrong_size,
)
from loaderkit.cache.hdf5 import joined_shape
from loaderkit.cache.mirrored_shards import MirroredShards
from loaderkit.cache.verified import VerifiedFiles, record_path
from loaderkit.errors import CacheError, DamagedCacheError, StaleCacheError
from loaderkit.fixes import Fix, Open

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from loaderkit.array_types import Ints
    from loaderkit.cache.gather import Values
    from loaderkit.cache.layout import Array, ShardFile
    from loaderkit.cache.manifest import Manifest
    from loaderkit.cache.mirror import Mirror
    from loaderkit.cache.mirrored_shards import BatchReading

Checksums = Literal["once", "always", "never"]
"""When a shard is hashed, and the hash compared with the manifest.

"once": before its first use, unless this machine has done so before.
"always": before its first use in each process.
"never": not at all.  Flipped bits are then returned as data.
"""


def check_checksums(checksums: object) -> None:
    """Refuse a value that is none of the three.

    Raises:
        OptionError: It is something else.
    """
    if isinstance(checksums, bool):
        name, wanted = "checksums", "'once', 'always' or 'never'"
        meant = "once" if checksums else "never"
        raise refuse_value(name, checksums, wanted, meant)
    check_choice("checksums", checksums, get_args(Checksums))


_MAX_TIMES_PER_BATCH = 4
"""Shards of a batch whose time of change is checked, in turn.  All sizes are checked.

Measured: of an open file the size takes 0.2 us and the times 1 us, of a closed file
2 us.  With all times, a batch of 128 samples from 500 shards would wait as long for the
checks as for its bytes."""

_SMALL_BYTES = 256 << 20
"""A cache up to this size is assumed to fit in memory.  Measured: to find out how much
memory is free takes 17 ms where there are many cgroups; opening a cache takes 1 ms."""


class ClosesShards(Protocol):
    """A reader of shards that can be told to close one."""

    def close_shard(self, shard: int) -> None:
        """Unmap a shard.  It is opened again when it is read again."""
        ...


class Shards:
    """The files of a cache, each hashed and mapped at its first use.

    Columns refer to this object and not to the ``Store``, which refers to the columns.
    Without that cycle, a dataset that is deleted unmaps its files at once, and not when
    the garbage collector runs.

    Args:
        path: Folder of the cache, or of the local copies of an object store's shards.
        manifest: The manifest of the cache.
        checksums: When shards are hashed.
        free_bytes: Returns the memory in bytes that pages of the files may take.
        mirror: Downloads shards of an object store; None for a local cache.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        checksums: Checksums,
        free_bytes: Callable[[], int],
        mirror: Mirror | None = None,
    ) -> None:
        self.path, self.manifest, self._checksums = path, manifest, checksums
        self._mirrored = None if mirror is None else MirroredShards(mirror)
        self._readers: weakref.WeakSet[ClosesShards] = weakref.WeakSet()
        is_large = is_available() and manifest.bytes > _SMALL_BYTES
        self.larger_than_memory = is_large and manifest.bytes > free_bytes()
        """True if pages are evicted before an epoch ends."""
        self._folder = os.fspath(path)
        record = record_path() if checksums == "once" else None
        self._verified = VerifiedFiles(record)
        self._maps: dict[int, NDArray[np.uint8]] = {}
        self._identities: dict[int, FileIdentity] = {}
        self._kept_open = KeptOpen(max_kept_open())
        self._checks = 0
        self._numbers: dict[object, int] = {}

    def add_reader(self, reader: ClosesShards) -> None:
        """Register a reader, which is told when a shard is closed."""
        self._readers.add(reader)

    def prepare(self, shards: Sequence[int]) -> BatchReading | None:
        """Download shards that are not here yet, and check those that are open.

        Args:
            shards: Numbers of the shards that a batch is read from, each once.

        Returns:
            They stay mapped for as long as it is held, and this thread prepares no
            other batch; None where all shards stay.

        Raises:
            DamagedCacheError: One was cut short, or its bytes were changed.
            CacheError: One cannot be downloaded from its object store.
        """
        reading = None
        if self._mirrored is not None:
            reading = self._mirrored.prepare(shards, self._close_shard)
        self.check_unchanged(shards)
        return reading

    def let_go(self) -> None:
        """Unmap shards of an object store, if local disk space for them is limited.

        No batch may be read meanwhile.
        """
        if self._mirrored is not None:
            self._mirrored.let_go(self._close_shard)

    def _close_shard(self, shard: int) -> None:
        """Unmap a shard that no batch is being read from."""
        for reader in self._readers:
            reader.close_shard(shard)
        self._maps.pop(shard, None)
        # Its identity is kept, so that it is not hashed again when it is opened again.
        self._kept_open.drop(shard)

    def number_of(self, value: object) -> int:
        """Give equal values equal numbers, which are quicker to compare and hash.

        Used for tuples of hundreds of shard numbers that are keys of dicts.
        """
        return self._numbers.setdefault(value, len(self._numbers))

    @functools.cached_property
    def can_be_joined(self) -> bool:
        """Whether the arrays of all shards can be mapped at adjacent addresses."""
        groups = self.manifest.shards.groups
        arrays = sum(len(group) * len(group.schema.arrays) for group in groups)
        # An array takes two mappings, its own and the gap behind it, until its
        # neighbour is mapped too.
        return is_available() and 2 * arrays <= free_mappings()

    def index_array(self, shard: int, name: str) -> Ints:
        """Map an array of offsets, shapes or rows of a shard."""
        return self._map_array(shard, self.manifest.shards[shard].arrays[name])

    def values(self, shard: int, name: str, *, joined: bool) -> Values:
        """Open the values of a column in one shard.

        Args:
            shard: Number of the shard.
            name: Name of the array in it.
            joined: Reshape ``[m, k, *rest]`` to ``[m * k, *rest]``.

        Returns:
            A read-only mapped array, or an object that decompresses what is read.
        """
        array = self.manifest.shards[shard].arrays[name]
        if array.offset is not None:
            mapped = self._map_array(shard, array)
            return mapped.reshape(joined_shape(array.shape)) if joined else mapped
        return ChunkedValues(
            self._whole_file(shard),
            array,
            self.index_array(shard, str(array.chunk_index)),
            str(self.manifest.compression),
            joined=joined,
            damaged=lambda why: self.damaged(shard, name, why),
        )

    @contextlib.contextmanager
    def opened(self, shard: int) -> Iterator[int]:
        """Open the file of a shard, and hash it if ``checksums`` says so.

        Args:
            shard: Number of the shard.

        Yields:
            The file descriptor; do not close it.

        Raises:
            DamagedCacheError: It is not the file that was packed.
            CacheError: It is gone, or cannot be read.
        """
        descriptor = self._kept_open.get(shard)
        if descriptor is not None and shard in self._identities:
            yield descriptor
            return
        described = self.manifest.shards.file(shard)
        file = self.path / described.file
        if self._mirrored is not None:
            # Another process may have deleted it since ``prepare`` was called.
            self._mirrored.bring(shard, self._close_shard)
            self._bring_again_if_changed(shard, file, described)
        try:
            with opened(file) as descriptor:
                self._verify_if_unknown(shard, descriptor, file, described)
                self._kept_open.keep(shard, descriptor, described.bytes)
                yield descriptor
        except FileNotFoundError:
            raise self._file_is_gone(file) from None
        except OSError as error:
            raise unreadable(file, error) from error

    def _bring_again_if_changed(
        self, shard: int, file: Path, described: ShardFile
    ) -> None:
        """Download a shard again if its local copy was changed or deleted."""
        assert self._mirrored is not None
        try:
            with opened(file) as descriptor:
                self._verify_if_unknown(shard, descriptor, file, described)
        except (DamagedCacheError, FileNotFoundError):
            self._mirrored.bring_again(shard, self._close_shard)

    def check_unchanged(self, shards: Sequence[int]) -> None:
        """Check that files are still the ones that were hashed and mapped.

        A file that is cut short while a batch is copied still kills the process.

        Args:
            shards: Numbers of the shards that a batch is read from.  Those that are not
                open yet are not checked.

        Raises:
            DamagedCacheError: One was cut short, or its bytes were changed.
        """
        if len(shards) == 1:
            # It is always its turn, and its times are read together with its size.
            known = self._identities.get(shards[0])
            if known is not None:
                self._check_identity(shards[0], known)
            return
        # Rounded up, and at least 1: a batch may have no samples, and so no shards.
        stride = max(1, -(-len(shards) // _MAX_TIMES_PER_BATCH))
        self._checks += 1
        # Every ``stride``-th shard, beginning one further at each call.
        shards_in_turn = shards[self._checks % stride :: stride]
        changed_shards = self._kept_open.changed_in_size(shards)
        for shard in {*shards_in_turn, *changed_shards}:
            known = self._identities.get(shard)
            if known is not None:
                self._check_identity(shard, known)

    def damaged(self, shard: int, column: str, why: str) -> DamagedCacheError:
        """Make the error for a column whose bytes contradict each other."""
        file = self.path / self.manifest.shards.file(shard).file
        message = f"Column {column!r} of {file} is damaged: {why}."
        fix = "loaderkit verify CACHE, then pack it again"
        return DamagedCacheError(message, why="the file was changed on disk", fix=fix)

    def _check_identity(self, shard: int, known: FileIdentity) -> None:
        """Compare the size and times of a shard's file with those that are known."""
        descriptor = self._kept_open.get(shard)
        try:
            if descriptor is None:
                status = os.stat(self._path_of(shard))  # noqa: PTH116
            else:
                status = os.fstat(descriptor)
        except OSError:
            # It was deleted.  What is mapped stays readable, and nobody can shorten a
            # file that has no name.
            return
        now = identity_of(status)
        # Another file of the same name does not touch the one that is mapped.
        if now == known or (now.device, now.inode) != (known.device, known.inode):
            return
        if now.bytes != known.bytes:
            raise wrong_size(Path(self._path_of(shard)), now.bytes, known.bytes)
        if not status.st_nlink:
            # Deleting it set its time.  The cache was packed again, and whoever has
            # read the old one goes on with it.
            return
        # It was written to, or only its time was set: hashing it again shows which.
        del self._identities[shard]
        self._maps.pop(shard, None)
        if descriptor is not None:
            # Not by its name, which another file may have by now: a link to this one,
            # as concat makes them, outlives it.
            described = self.manifest.shards.file(shard)
            file = self.path / described.file
            self._verify_if_unknown(shard, descriptor, file, described)
            return
        with self.opened(shard):
            pass

    def _path_of(self, shard: int) -> str:
        # os.path, since pathlib takes ten times as long.
        return os.path.join(self._folder, self.manifest.shards.files[shard])  # noqa: PTH118

    def _map_array(self, shard: int, array: Array) -> NDArray[Any]:
        if not array.nbytes:
            return np.empty(array.shape, array.dtype)
        start = array.offset or 0
        content = self._whole_file(shard)[start : start + array.nbytes]
        return content.view(array.dtype).reshape(array.shape)

    def _whole_file(self, shard: int) -> NDArray[np.uint8]:
        """Map a whole shard, or return the bytes mapped before ``[bytes]``."""
        mapped = self._maps.get(shard)
        if mapped is None:
            with self.opened(shard) as descriptor:
                mapped = map_open_file(descriptor, self.manifest.shards.file(shard))
            self._maps[shard] = mapped
        return mapped

    def _verify_if_unknown(
        self, shard: int, descriptor: int, file: Path, described: ShardFile
    ) -> None:
        """Verify an open file, unless it is the one that was verified before."""
        known = self._identities.get(shard)
        if known is None or identity_of(os.fstat(descriptor)) != known:
            self._identities[shard] = self._verify_open_file(
                descriptor, file, described
            )

    def _verify_open_file(
        self, descriptor: int, file: Path, shard: ShardFile
    ) -> FileIdentity:
        """Check the size of an open file, and hash it if ``checksums`` says so."""
        identity = identity_of(os.fstat(descriptor))
        if identity.bytes != shard.bytes:
            raise wrong_size(file, identity.bytes, shard.bytes)
        if self._checksums == "never":
            return identity
        if (identity, shard.xxh3) not in self._verified:
            identity = check_open_digest(descriptor, file, shard)
            self._verified.add(identity, shard.xxh3)
        return identity

    def _file_is_gone(self, file: Path) -> CacheError:
        """Make the error for a file that is missing.

        Either the cache was packed again, or it is damaged.
        """
        try:
            generation = load_manifest(self.path).generation
        except CacheError:
            return missing(file) if exists(self.path) else folder_is_gone(self.path)
        if generation == self.manifest.generation:
            return missing(file)
        return replaced(self.path)


class _OpenFile(NamedTuple):
    """A file that is kept open."""

    descriptor: int
    bytes: int


class KeptOpen:
    """Files of shards that stay open, since the size of an open file is quick to read.

    Args:
        max_files: The most files that are kept open.
    """

    def __init__(self, max_files: int) -> None:
        self._max_files = max_files
        self._files: dict[int, _OpenFile] = {}
        """By the number of the shard."""
        # For ``__del__``: ``os`` may be empty when the interpreter shuts down.
        self._close = os.close

    def get(self, shard: int) -> int | None:
        """Return the descriptor of a shard's file; None if it is not kept open."""
        file = self._files.get(shard)
        return None if file is None else file.descriptor

    def keep(self, shard: int, descriptor: int, nbytes: int) -> None:
        """Keep a file open, unless there are too many already.

        Args:
            shard: Number of the shard.
            descriptor: Descriptor of its file.  It is duplicated; the caller closes
                this one.
            nbytes: Size of the file in bytes.
        """
        if shard not in self._files and len(self._files) < self._max_files:
            # An optimisation: if the process has no descriptors left, do without.
            with contextlib.suppress(OSError):
                self._files[shard] = _OpenFile(os.dup(descriptor), nbytes)

    def changed_in_size(self, shards: Sequence[int]) -> list[int]:
        """List the shards whose files changed in size or are not kept open."""
        # This runs before each batch: 115 shards take 40 us.  So it is one
        # comprehension that calls no Python code: fields of the named tuple are read by
        # position, and lseek gives the size where fstat would create an object.
        files, seek, end = self._files, os.lseek, os.SEEK_END
        return [
            shard
            for shard in shards
            if (file := files.get(shard)) is None or seek(file[0], 0, end) != file[1]
        ]

    def drop(self, shard: int) -> None:
        """Close the file of a shard, if it is kept."""
        file = self._files.pop(shard, None)
        if file is not None:
            self._close(file.descriptor)

    def __del__(self) -> None:
        for file in self._files.values():
            self._close(file.descriptor)


_MAX_KEPT_OPEN = 1024
"""Chosen, for systems with hardly a limit: files beyond it are looked at by name."""


def max_kept_open() -> int:
    """Say how many files of a cache may stay open: half of what a process may have."""
    try:
        import resource
    except ImportError:  # Windows: its C library allows 512
        return 256
    soft_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft_limit == resource.RLIM_INFINITY:
        return _MAX_KEPT_OPEN
    return min(soft_limit // 2, _MAX_KEPT_OPEN)


def replaced(path: Path) -> StaleCacheError:
    """Say that a cache was packed again under an open dataset."""
    message = f"The cache {path} was packed again while this dataset was open."
    why = "a dataset reads one cache from beginning to end, never old and new together"
    return StaleCacheError(
        message, why=why, fix=Fix.of("open it again: ", Open(str(path)))
    )
