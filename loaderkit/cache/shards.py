"""The files of an open cache: hashed and mapped when first read, and watched.

Nothing on disk is believed.  A shard is hashed before its first use (once a machine,
see verified.py), and looked at before each batch, so that one cut short is an error
where the system would end the process (SIGBUS).
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

from loaderkit.cache.address_space import free_mappings, is_available
from loaderkit.cache.files import (
    FileIdentity,
    check_open_digest,
    identity_of,
    load_manifest,
    map_open_file,
    missing,
    opened,
    unreadable,
    wrong_size,
)
from loaderkit.cache.hdf5 import ChunkedValues, joined_shape
from loaderkit.cache.mirrored_shards import MirroredShards
from loaderkit.cache.verified import VerifiedFiles, record_path
from loaderkit.errors import CacheError, DamagedCacheError, StaleCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from loaderkit.cache.gather import Values
    from loaderkit.cache.layout import Array, ShardFile
    from loaderkit.cache.manifest import Manifest
    from loaderkit.cache.mirror import Mirror

    Ints = NDArray[np.int64]

Checksums = Literal["once", "always", "never"]
"""When a shard is hashed and compared with the manifest.

once: before its first use, unless this machine has done so before.  always: before its
first use in each process.  never: not at all; flipped bits are served as data.
"""


def check_checksums(checksums: object) -> None:
    """Refuse what is none of the three words.

    >>> check_checksums("sometimes")
    Traceback (most recent call last):
    ValueError: checksums must be one of once, always, never, got 'sometimes'
    """
    known = get_args(Checksums)
    if checksums not in known:
        msg = f"checksums must be one of {', '.join(known)}, got {checksums!r}"
        raise ValueError(msg)


_TIMES_ASKED_A_BATCH = 4
"""So many shards of a batch are asked for their times, in turn; all for their sizes.
Of an open file the size takes 0.2 us and the times 1 us, of one that was closed 2 us:
from 500 shards a batch of 128 samples would wait as long for them as for its bytes."""


_SMALL_BYTES = 256 << 20
"""Up to here a cache is taken to fit: asking how much memory is free takes 17 ms where
there are many cgroups, and opening a cache 1 ms."""


class ClosesShards(Protocol):
    """What reads shards, and can let go of one."""

    def close_shard(self, shard: int) -> None:
        """Unmap a shard; it is opened again when it is read again."""
        ...


class Shards:
    """The files of a cache, each hashed and mapped when first read.

    Columns hold on to this rather than to the store, so that a dataset that is let go
    unmaps its files at once, without waiting for the garbage collector.
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
        """True where pages are pushed out again before an epoch ends."""
        self._folder = os.fspath(path)
        record = record_path() if checksums == "once" else None
        self._verified = VerifiedFiles(record)
        self._maps: dict[int, NDArray[np.uint8]] = {}
        self._identities: dict[int, FileIdentity] = {}
        self._kept_open = KeptOpen(max_kept_open())
        self._checks = 0
        self._numbers: dict[object, int] = {}

    def add_reader(self, reader: ClosesShards) -> None:
        """Have a reader told when a shard is closed."""
        self._readers.add(reader)

    def prepare(self, shards: Sequence[int]) -> None:
        """Make ready for reading a batch from some shards, and see that they are sound.

        Until this thread prepares for another batch, they stay mapped.

        Args:
            shards: Numbers of the shards that the batch touches, each once.

        Raises:
            DamagedCacheError: One was cut short, or its bytes were changed.
            CacheError: One is in a store, and cannot be mirrored.
        """
        if self._mirrored is not None:
            self._mirrored.prepare(shards, self._close_shard)
        self.check_unchanged(shards)

    def let_go(self) -> None:
        """Unmap what is kept in a mirror that is too small: nothing is being read."""
        if self._mirrored is not None:
            self._mirrored.let_go(self._close_shard)

    def _close_shard(self, shard: int) -> None:
        """Unmap a shard that no batch is being read from."""
        for reader in self._readers:
            reader.close_shard(shard)
        self._maps.pop(shard, None)
        # Its identity stays known, so that it need not be hashed when it is opened
        # again.
        self._kept_open.drop(shard)

    def number_of(self, value: object) -> int:
        """Give equal values equal numbers: what has 500 items is compared at once."""
        return self._numbers.setdefault(value, len(self._numbers))

    @functools.cached_property
    def can_be_joined(self) -> bool:
        """Tell whether the arrays of all shards can be mapped side by side."""
        groups = self.manifest.shards.groups
        arrays = sum(len(group) * len(group.schema.arrays) for group in groups)
        # Until its neighbour is mapped too, a piece leaves a gap: two mappings each.
        return is_available() and 2 * arrays <= free_mappings()

    def index_array(self, shard: int, name: str) -> Ints:
        """Map one of a shard's arrays of offsets, shapes or rows."""
        return self._map_array(shard, self.manifest.shards[shard].arrays[name])

    def values(self, shard: int, name: str, *, joined: bool) -> Values:
        """Open the values of a column in one shard.

        Args:
            shard: Number of the shard.
            name: The array's name in it.
            joined: See ``[m, k, *rest]`` as ``[m * k, *rest]``.

        Returns:
            Mapped and read-only, or decompressed as they are read.
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
        """Open the file of a shard, hashed where that is asked.

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
            # It may have gone from the mirror since the batch was prepared for.
            self._mirrored.bring(shard, self._close_shard)
            self._bring_again_if_changed(shard, file, described)
        try:
            with opened(file) as descriptor:
                self._verify_if_unknown(shard, descriptor, file, described)
                self._kept_open.keep(shard, descriptor, described.bytes)
                yield descriptor
        except FileNotFoundError:
            raise self._gone(file) from None
        except OSError as error:
            raise unreadable(file, error) from error

    def _bring_again_if_changed(
        self, shard: int, file: Path, described: ShardFile
    ) -> None:
        """Download a shard anew that was changed, or deleted, in the mirror."""
        assert self._mirrored is not None
        try:
            with opened(file) as descriptor:
                self._verify_if_unknown(shard, descriptor, file, described)
        except (DamagedCacheError, FileNotFoundError):
            self._mirrored.bring_again(shard, self._close_shard)

    def check_unchanged(self, shards: Sequence[int]) -> None:
        """See that files are still those that were hashed and mapped.

        What is cut off while a batch is copied still ends the process.

        Args:
            shards: Numbers of the shards that a batch touches; nothing happens to
                those that are not open yet.

        Raises:
            DamagedCacheError: One was cut short, or its bytes were changed.
        """
        # At least 1, since a batch may have no sample, and so no shard.
        stride = max(1, -(-len(shards) // _TIMES_ASKED_A_BATCH))
        self._checks += 1
        in_turn = shards[self._checks % stride :: stride]
        for shard in {*in_turn, *self._kept_open.changed_in_size(shards)}:
            known = self._identities.get(shard)
            if known is not None:
                self._check_identity(shard, known)

    def damaged(self, shard: int, column: str, why: str) -> DamagedCacheError:
        """Say that a column's bytes contradict each other."""
        file = self.path / self.manifest.shards.file(shard).file
        message = f"Column {column!r} of {file} is damaged: {why}."
        fix = "loaderkit verify CACHE, then pack it again"
        return DamagedCacheError(message, why="the file was changed on disk", fix=fix)

    def _check_identity(self, shard: int, known: FileIdentity) -> None:
        descriptor = self._kept_open.get(shard)
        try:
            if descriptor is None:
                status = os.stat(self._path_of(shard))  # noqa: PTH116
            else:
                status = os.fstat(descriptor)
        except OSError:
            return  # without a name it cannot be cut short; what is mapped stays
        now = identity_of(status)
        if now == known or (now.device, now.inode) != (known.device, known.inode):
            return
        if now.bytes != known.bytes:
            raise wrong_size(Path(self._path_of(shard)), now.bytes, known.bytes)
        # Written to, or only touched: the bytes will tell.
        del self._identities[shard]
        self._maps.pop(shard, None)
        self._kept_open.drop(shard)
        with self.opened(shard):
            pass

    def _path_of(self, shard: int) -> str:
        # Joined as text: a Path takes ten times as long.
        return os.path.join(self._folder, self.manifest.shards.files[shard])  # noqa: PTH118

    def _map_array(self, shard: int, array: Array) -> NDArray[Any]:
        if not array.nbytes:
            return np.empty(array.shape, array.dtype)
        start = array.offset or 0
        content = self._whole_file(shard)[start : start + array.nbytes]
        return content.view(array.dtype).reshape(array.shape)

    def _whole_file(self, shard: int) -> NDArray[np.uint8]:
        """Give all bytes of a shard, mapped."""
        mapped = self._maps.get(shard)
        if mapped is None:
            with self.opened(shard) as descriptor:
                mapped = map_open_file(descriptor, self.manifest.shards.file(shard))
            self._maps[shard] = mapped
        return mapped

    def _verify_if_unknown(
        self, shard: int, descriptor: int, file: Path, described: ShardFile
    ) -> None:
        known = self._identities.get(shard)
        if known is None or identity_of(os.fstat(descriptor)) != known:
            self._identities[shard] = self._verify_open_file(
                descriptor, file, described
            )

    def _verify_open_file(
        self, descriptor: int, file: Path, shard: ShardFile
    ) -> FileIdentity:
        identity = identity_of(os.fstat(descriptor))
        if identity.bytes != shard.bytes:
            raise wrong_size(file, identity.bytes, shard.bytes)
        if self._checksums == "never":
            return identity
        if (identity, shard.xxh3) not in self._verified:
            identity = check_open_digest(descriptor, file, shard)
            self._verified.add(identity, shard.xxh3)
        return identity

    def _gone(self, file: Path) -> CacheError:
        """Tell a cache that was packed again from one that lost a file."""
        try:
            generation = load_manifest(self.path).generation
        except CacheError:
            return missing(file)
        if generation == self.manifest.generation:
            return missing(file)
        return replaced(self.path)


class _OpenFile(NamedTuple):
    """The file of a shard that is kept open."""

    descriptor: int
    bytes: int


class KeptOpen:
    """Files that stay open, so that their sizes can be asked for at no great cost."""

    def __init__(self, max_files: int) -> None:
        self._max_files = max_files
        self._files: dict[int, _OpenFile] = {}
        """By the number of the shard."""
        self._close = os.close  # gone from ``os`` when the interpreter ends

    def get(self, shard: int) -> int | None:
        """Give the descriptor of a shard's file, if it is kept."""
        file = self._files.get(shard)
        return None if file is None else file.descriptor

    def keep(self, shard: int, descriptor: int, nbytes: int) -> None:
        """Keep a file open, if there is room for it.

        Args:
            shard: Number of the shard.
            descriptor: Its file; the caller closes it, and another one is kept.
            nbytes: Bytes of the file.
        """
        if shard not in self._files and len(self._files) < self._max_files:
            # Where no other file can be opened, this one need not stay open.
            with contextlib.suppress(OSError):
                self._files[shard] = _OpenFile(os.dup(descriptor), nbytes)

    def changed_in_size(self, shards: Sequence[int]) -> list[int]:
        """List the shards whose files have another size, or are not kept."""
        # One comprehension, without a call to Python code: 115 shards take 40 us.  So
        # fields are taken by number, and the end of a file is asked for where fstat
        # would make an object.
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
    return StaleCacheError(message, why=why, fix="open it again: open_cache(path)")
