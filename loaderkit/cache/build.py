"""Make a cache that exists whole or not at all, and go on where a killed run stopped.

Finished shards lie in the cache's folder under names that no other cache has, since
they end in their checksum.  Nobody reads them until the manifest names them, and
putting the manifest in place is one rename: whoever opens the folder, at whatever
moment, finds the old cache or the new one.

Everything else of a build waits in ``.building``: its plan, a note for each finished
shard, and what is not finished.  Only files that a manifest or a note names are ever
deleted, so that what a user keeps in the folder stays.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import xxhash

from loaderkit.cache.durable import (
    NOT_ALLOWED,
    is_folder,
    link_or_copy,
    make_folders,
    not_written,
    publish,
    remove,
    sync_folder,
    write_all,
    write_file,
    write_text,
    writing,
)
from loaderkit.cache.files import (
    check_digest,
    check_size,
    exists,
    find_manifest,
    opened,
    read_bounded,
    unreadable,
)
from loaderkit.cache.hdf5 import write_shard
from loaderkit.cache.layout import (
    BUILDING,
    MANIFEST,
    WRITTEN_SUFFIX,
    Shard,
    is_cache_file_name,
    note_name,
    shard_from,
    shard_name,
    sources_name,
    written_marker_name,
)
from loaderkit.cache.lock_files import take_lock, write_holder
from loaderkit.cache.manifest import (
    FORMAT,
    Manifest,
    SourceFiles,
    generation_of,
    write_manifest,
)
from loaderkit.cache.shard_table import ShardTableBuilder
from loaderkit.errors import CacheError, CacheVersionError, DamagedCacheError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from loaderkit.cache.columns import ShardBuffer

_LOG = logging.getLogger("loaderkit")
_PLAN = "plan.json"
_OBSOLETE = "obsolete.json"
"""Which files the manifest that comes next makes needless, and its generation."""
_MAX_NOTE_BYTES = 1 << 30
"""What is larger was not written by a build, and would fill the memory.  Chosen."""
_LOCK = ".lock"
_SOFT_LOCK = ".lock-soft"
_PACKER = "packer.partial"
"""Says who holds the lock.  Where its packer is killed, it goes with the parts of files
that lie there too."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
"""What file systems without locks answer when they are asked for one."""
_SYSTEM_NAMES = {".DS_Store", "Thumbs.db", "desktop.ini", "lost+found"}
"""What file systems and desktops put into folders that a person finds empty."""


@dataclass(frozen=True)
class FinishedShard:
    """A shard that is written, and what must hold for a later run to keep it."""

    shard: Shard
    state: Mapping[str, Any]
    """What the builder had learned when it was finished; JSON."""
    evidence: Mapping[str, Any]
    """What shows that the source still holds its samples; JSON, for the builder."""


@dataclass(frozen=True)
class ShardWriter:
    """Writes single shards of a build, from any process that sees its folder.

    Two that write the same samples under one number leave the same file and note: each
    file gets its name when it is whole, by one rename.  Where the samples differ, the
    later note counts, and the other file is deleted at the commit.
    """

    path: Path
    """The cache's folder."""
    compression: str | None

    def write(
        self,
        number: int,
        buffer: ShardBuffer,
        *,
        state: Mapping[str, Any],
        evidence: Mapping[str, Any],
    ) -> Shard:
        """Write a shard and its note, durably.

        Args:
            number: Which shard of the cache it is, from 0.
            buffer: Its samples.
            state: What the builder had learned when it was finished; JSON.
            evidence: What a later run holds against the source, to see that the shard
                is still one of its; JSON.

        Returns:
            The shard's description.

        Raises:
            CacheError: The disk is full or failed; nothing is left of the shard.
        """

        def make_note(shard: Shard) -> str:
            return _note_as_json(FinishedShard(shard, state, evidence))

        return write_shard(
            buffer,
            self.path,
            number=number,
            compression=self.compression,
            scratch=self.path / BUILDING,
            make_note=make_note,
        )

    def read_note(self, number: int) -> FinishedShard | None:
        """Read what is noted of a finished shard.

        Returns:
            The shard; None where there is no note, or a damaged one.

        Raises:
            CacheError: The note cannot be read.
        """
        return _read_note(self.path / BUILDING, number)


@dataclass
class Build:
    """A cache being built; made by ``open_build``."""

    path: Path
    plan: Mapping[str, Any] = field(default_factory=dict)
    """What decides the bytes: samples and settings; given to ``resume``."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """What the builder had learned when the last shard was finished."""
    shards: ShardTableBuilder = field(default_factory=ShardTableBuilder)
    """The finished shards, those of an earlier run first.  What else is known of each
    is in its note on disk: 10,000 of them would take more memory than a shard."""

    @property
    def folder(self) -> Path:
        """Where unfinished work waits."""
        return self.path / BUILDING

    @property
    def writer(self) -> ShardWriter:
        """What writes its shards; it may be sent to another process."""
        return ShardWriter(self.path, self.plan.get("compression"))

    def finished(self) -> Iterator[FinishedShard]:
        """Read what is noted of the finished shards, one after the other.

        Yields:
            The shards in order.

        Raises:
            CacheError: A note cannot be read, or is not the one that was written.
        """
        for number in range(len(self.shards)):
            yield self.read_note(number)

    def read_note(self, number: int) -> FinishedShard:
        """Read what is noted of a finished shard.

        Args:
            number: Which shard of the cache it is, from 0.

        Returns:
            The shard and what was known when it was finished.

        Raises:
            CacheError: The note cannot be read, or is not the one that was written.
        """
        finished = _read_note(self.folder, number)
        if finished is None:
            message = f"{_note_file(self.folder, number)} is gone, or was changed."
            why = "something else than this run has written to the folder"
            raise CacheError(message, why=why, fix="run the same again")
        return finished

    def resume(self, plan: Mapping[str, Any]) -> None:
        """Take over what an earlier run of the same plan finished; drop the rest.

        Args:
            plan: What decides the bytes of the cache, as JSON.

        Raises:
            CacheError: A file cannot be read, written or deleted.
        """
        self.plan = plan
        with writing(self.path):
            _adopt_or_drop_finished_shards(self)

    def resume_in_any_order(self, plan: Mapping[str, Any]) -> list[int]:
        """Take over every shard that an earlier run of the same plan finished.

        Shards that are written in any order are read back by ``read_note`` and become
        the cache's by ``take_in``.

        Args:
            plan: What decides the bytes of the cache, as JSON.

        Returns:
            Their numbers, in order; the others' files are deleted.

        Raises:
            CacheError: A file cannot be read, written or deleted.
        """
        self.plan = plan
        with writing(self.path):
            return _keep_intact_or_drop(self)

    def discard(self, numbers: Iterable[int]) -> None:
        """Delete finished shards and what is noted of them.

        Args:
            numbers: Which ones; none that ``take_in`` was given.

        Raises:
            CacheError: A file cannot be deleted.
        """
        with writing(self.path):
            _delete_shards(self.path, numbers)

    def take_in(self, finished: FinishedShard) -> None:
        """Make a finished shard the next one of the cache."""
        self.shards.add(finished.shard)
        self.state = finished.state

    def add(
        self,
        buffer: ShardBuffer,
        *,
        state: Mapping[str, Any],
        evidence: Mapping[str, Any],
    ) -> Shard:
        """Write the next shard, durably.

        Args:
            buffer: Its samples.
            state: What a later run must know to go on behind it; JSON.
            evidence: What a later run holds against the source, to see that the shard
                is still one of its; JSON.

        Returns:
            The shard's description.

        Raises:
            CacheError: The disk is full or failed; the shards before it stay.
        """
        number = len(self.shards)
        shard = self.writer.write(number, buffer, state=state, evidence=evidence)
        self.shards.add(shard)
        self.state = state
        return shard

    def adopt(self, shard: Shard, folder: Path) -> Shard:
        """Take a shard of another cache for the next one of this, as it is.

        On one file system both caches then name the same file, by a hard link: files of
        a cache are never written to, only replaced under their names.

        Args:
            shard: Its description.
            folder: The folder of its cache.

        Returns:
            The description under its new name.

        Raises:
            CacheError: It cannot be linked or copied; the shards before it stay.
        """
        number = len(self.shards)
        adopted = replace(shard, file=shard_name(number, shard.xxh3))
        source, target = folder / shard.file, self.path / adopted.file
        with writing(target):
            self.note_written(adopted.file)
        # Its name appears behind the note, which a later run holds against the file.
        write_text(
            _note_file(self.folder, number),
            _note_as_json(FinishedShard(adopted, state={}, evidence={})),
            partial=self.folder / "note.partial",
        )
        with writing(target):
            if not (exists(target) and target.samefile(source)):
                partial = self.folder / f"{number:05}.partial"
                link_or_copy(source, partial)
                publish(partial, target)
        self.shards.add(adopted)
        return adopted

    def discard_from(self, number: int) -> None:
        """Forget the finished shards from one on; their files are deleted.

        Args:
            number: The first shard to forget.

        Raises:
            CacheError: A file cannot be deleted.
        """
        shards = ShardTableBuilder()
        state: Mapping[str, Any] = {}
        for finished in itertools.islice(self.finished(), number):
            shards.add(finished.shard)
            state = finished.state
        with writing(self.path):
            _delete_finished_shards(self.path, start=number)
        self.shards, self.state = shards, state

    def keep_intact(self) -> None:
        """Take over the shards of an earlier run whose files are as they were written.

        Raises:
            CacheError: A file cannot be read, which says nothing of what it holds.
        """
        for number in itertools.count():
            if not _is_intact(self, number):
                return
            self.take_in(self.read_note(number))

    def commit(
        self,
        *,
        structure: Mapping[str, Any],
        fingerprint: Mapping[str, Any],
        made_with: Mapping[str, str],
        sources: str | None = None,
    ) -> Manifest:
        """Make the finished shards a cache: the one moment at which it appears.

        Args:
            structure: How columns make up a sample.
            fingerprint: What the samples were made from.
            made_with: Versions of the libraries that did it.
            sources: The list of the files they were made from, as text; None where
                none is known.

        Returns:
            The manifest that now stands in the folder.

        Raises:
            CacheError: A system call failed; the cache before, if any, still stands.
        """
        manifest = Manifest(
            shards=self.shards.table(),
            structure=structure,
            fingerprint=fingerprint,
            made_with=made_with,
            compression=self.plan.get("compression"),
            sources=None if sources is None else self._write_sources(sources),
        )
        generation = generation_of(manifest)
        manifest = replace(manifest, generation=generation)
        self.put_in_place(manifest, write_manifest(manifest))
        return manifest

    def note_written(self, name: str) -> None:
        """Note a file of a cache before it gets its name, which no other note tells.

        Where the cache never comes to be, or is another one, it is found and deleted.

        Args:
            name: The file's.

        Raises:
            OSError: It cannot be noted.
        """
        (self.folder / written_marker_name(name)).touch()

    def put_in_place(self, manifest: Manifest, text: str) -> None:
        """Have the manifest appear, and delete what it makes needless.

        Args:
            manifest: Of files that are all there.
            text: The same, as it is written.

        Raises:
            CacheError: A system call failed; the cache before, if any, still stands.
        """
        obsolete = _files_of_manifest(self.path) | _written_shards(self.folder)
        obsolete -= set(manifest.files)
        write_text(
            self.folder / _OBSOLETE,
            json.dumps({"generation": manifest.generation, "files": sorted(obsolete)}),
            partial=self.folder / "note.partial",
        )
        with writing(self.path):
            # The shards' names reach the disk before the manifest that needs them.
            sync_folder(self.path)
            self._publish_manifest(text)
        _try_to_finish_commit(self.path)

    def _publish_manifest(self, text: str) -> None:
        partial = self.folder / "manifest.partial"
        write_file(partial, lambda raw: write_all(raw, text))
        partial.replace(self.path / MANIFEST)
        try:
            sync_folder(self.path)
        except OSError as error:
            # The cache is whole and everybody sees it: too late to say it failed.
            _LOG.warning(
                "%s is packed, but the disk did not confirm its name (%s): after a "
                "power cut it may be the cache before",
                self.path,
                error,
            )

    def _write_sources(self, text: str) -> SourceFiles:
        content = text.encode("utf-8", "surrogatepass")
        digest = xxhash.xxh3_128_hexdigest(content)
        name = sources_name(digest)
        write_text(self.path / name, text, partial=self.folder / "sources.partial")
        return SourceFiles(name, len(content), digest)


@contextlib.contextmanager
def open_build(path: Path, *, overwrite: bool) -> Iterator[Build | None]:
    """Hold a cache's folder while building it; one process at a time.

    Args:
        path: The cache's folder; made if it is not there.
        overwrite: Build even though there is a cache; it stays until the new one is
            whole.

    Yields:
        The build, to be resumed; None when another process has built the cache while
        this one waited.

    Raises:
        CacheError: The folder cannot be written, or holds something else.
    """
    _make_or_check_folder(path)
    with _folder_lock(path):
        if exists(path / MANIFEST) and not overwrite:
            _try_to_finish_commit(path)
            yield None
            return
        build = Build(path)
        with writing(path):
            finish_commit(path)
            _make_build_folder(build.folder)
            _remove_unfinished_files(build.folder)
        write_holder(build.folder / _PACKER)
        try:
            yield build
        finally:
            # Before the lock goes: behind it, the note would be the next packer's.
            with contextlib.suppress(OSError):
                (build.folder / _PACKER).unlink()


def finish_commit(path: Path) -> None:
    """Delete what a finished build, or one killed behind its last step, leaves.

    A build that has not put its manifest in place is left as it is.

    Args:
        path: The cache's folder; its lock is held.

    Raises:
        CacheError: A file cannot be read.
        OSError: A file cannot be deleted.
    """
    folder = path / BUILDING
    if not is_folder(folder):
        return
    obsolete = _read_json(folder / _OBSOLETE)
    manifest = find_manifest(path) if isinstance(obsolete, dict) else None
    if manifest is None or manifest.generation != obsolete.get("generation"):
        if not any(folder.iterdir()):  # killed right before the last step
            folder.rmdir()
        return
    in_use = set(manifest.files)
    for name in obsolete.get("files", ()):
        if is_cache_file_name(str(name)) and name not in in_use:
            remove(path / name)
    _remove_unfinished_files(folder)
    _remove_notes(folder)
    folder.rmdir()


def finish_killed_commit(path: Path) -> None:
    """Clean up after a build that was killed behind its last step, if nobody packs.

    Args:
        path: The cache's folder.
    """
    # Where the folder is not ours to write to, has no locks, or somebody packs, it can
    # wait.
    reasons_to_wait = (OSError, CacheError, NotImplementedError, filelock.Timeout)
    with contextlib.suppress(*reasons_to_wait):
        if is_folder(path / BUILDING) and exists(path / MANIFEST):
            with filelock.FileLock(path / _LOCK, timeout=0):
                finish_commit(path)


def remove_cache(folder: Path) -> None:
    """Delete the folder of a cache, its manifest last.

    By the manifest whoever comes next knows what it is that a killed process has left
    there; with it goes the last of it.

    Raises:
        OSError: A file cannot be deleted.
    """
    for entry in folder.iterdir():
        if entry.name == MANIFEST:
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    (folder / MANIFEST).unlink()
    folder.rmdir()


def _try_to_finish_commit(path: Path) -> None:
    """Clean up behind a cache that stands; what is left takes room and does no harm."""
    try:
        finish_commit(path)
    except (OSError, CacheError) as error:
        _LOG.warning("%s: leftovers of packing stay there (%s)", path, error)


def _adopt_or_drop_finished_shards(build: Build) -> None:
    """Take over what an earlier run of the same plan finished; drop the others."""
    if _has_plan_of(build):
        build.keep_intact()
    _delete_finished_shards(build.path, start=len(build.shards))
    _delete_unnamed_shards(build.path)
    if not len(build.shards):
        _write_plan(build)


def _keep_intact_or_drop(build: Build) -> list[int]:
    """Keep what an earlier run of the same plan finished, in any order."""
    numbers = _note_numbers(build.folder)
    intact: list[int] = []
    if _has_plan_of(build):
        intact = [number for number in numbers if _is_intact(build, number)]
    _delete_shards(build.path, set(numbers) - set(intact))
    _delete_unnamed_shards(build.path)
    if not intact:
        _write_plan(build)
    return intact


def _written_shards(folder: Path) -> set[str]:
    """Name every shard that a build has written, also those that no note names now."""
    return {file.stem for file in folder.iterdir() if file.suffix == WRITTEN_SUFFIX}


def _delete_unnamed_shards(path: Path) -> None:
    """Delete shards that a task wrote, and whose note a later task has replaced."""
    folder = path / BUILDING
    named = _files_of_manifest(path)
    for number in _note_numbers(folder):
        finished = _read_note(folder, number)
        if finished is not None:
            named.add(finished.shard.file)
    for name in _written_shards(folder) - named:
        if is_cache_file_name(name):
            remove(path / name)
        remove(folder / written_marker_name(name))


def _has_plan_of(build: Build) -> bool:
    """Tell whether the shards that lie there are of the same plan; warn if not."""
    earlier_plan = _read_json(build.folder / _PLAN)
    # Compared as it comes back from JSON, which has no tuples.
    if earlier_plan == json.loads(json.dumps(build.plan)):
        return True
    numbers = _note_numbers(build.folder)
    if any(_read_note(build.folder, number) for number in numbers):
        _LOG.warning(
            "packing %s starts anew: an unfinished run of other samples or "
            "settings lay there",
            build.path,
        )
    return False


def _write_plan(build: Build) -> None:
    """Write the plan, where no shard is left that belongs to the one before."""
    _remove_notes(build.folder)
    write_text(
        build.folder / _PLAN,
        json.dumps(build.plan),
        partial=build.folder / "note.partial",
    )


def _is_intact(build: Build, number: int) -> bool:
    """Tell whether a shard's file is as it was written.

    Raises:
        CacheError: It cannot be read, which says nothing of what it holds.
    """
    finished = _read_note(build.folder, number)
    if finished is None:
        return False
    try:
        check_size(build.path, finished.shard)
        check_digest(build.path, finished.shard)
    except DamagedCacheError:
        return False
    return True


def _note_file(folder: Path, number: int) -> Path:
    return folder / note_name(number)


def _note_numbers(folder: Path) -> list[int]:
    """List the numbers of the shards that a note was made of."""
    return sorted(int(file.stem) for file in folder.iterdir() if _is_note(file))


def _read_note(folder: Path, number: int) -> FinishedShard | None:
    """Read the note of a finished shard.

    Args:
        folder: The build's.
        number: The shard's.

    Returns:
        What is noted; None where there is no note, or a damaged one.
    """
    content = _read_json(_note_file(folder, number))
    # What is written there otherwise is not a note of ours.
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return FinishedShard(
            shard_from(content["shard"]),
            dict(content["state"]),
            dict(content["evidence"]),
        )
    return None


def _delete_finished_shards(path: Path, *, start: int) -> None:
    """Delete finished shards and their notes, from one on.

    Args:
        path: The cache's folder.
        start: The first to delete.

    Raises:
        CacheError: The manifest that stands there, if any, cannot be read.
        OSError: A file cannot be deleted.
    """
    numbers = _note_numbers(path / BUILDING)
    _delete_shards(path, (number for number in numbers if number >= start))


def _delete_shards(path: Path, numbers: Iterable[int]) -> None:
    in_use = _files_of_manifest(path)
    for number in numbers:
        # A note behind a damaged one is read too, since its shard has to be deleted.
        finished = _read_note(path / BUILDING, number)
        if finished is None:
            continue
        # A shard of the same bytes has the same name, and may be the cache's.
        if finished.shard.file not in in_use:
            remove(path / finished.shard.file)
        remove(_note_file(path / BUILDING, number))


def _is_note(file: Path) -> bool:
    return file.suffix == ".json" and file.stem.isdecimal()


def _note_as_json(finished: FinishedShard) -> str:
    return json.dumps(asdict(finished))


def _read_json(file: Path) -> Any:
    """Read a small file of a build.

    Args:
        file: Its path.

    Returns:
        Its content; None where it is not there, or no JSON.

    Raises:
        CacheError: It cannot be read, which says nothing of what it holds: taking it
            for nothing would throw away what was finished.
    """
    try:
        return json.loads(read_bounded(file, _MAX_NOTE_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(file, error) from error
    except (ValueError, RecursionError):  # DamagedCacheError, too, is a ValueError
        return None


def _remove_unfinished_files(folder: Path) -> None:
    """Delete what a killed run was writing."""
    for file in folder.iterdir():
        if file.suffix in {".partial", ".block"}:
            remove(file)


def _remove_notes(folder: Path) -> None:
    """Delete the notes of a build, by the names that only it gives.

    The list of obsolete files goes last: a run that is killed on the way finds it, and
    goes on deleting.  The plan goes behind the notes, which are worth nothing without.
    """
    for file in folder.iterdir():
        if _is_note(file) or file.suffix == WRITTEN_SUFFIX:
            remove(file)
    remove(folder / _PLAN)
    remove(folder / _OBSOLETE)


def _files_of_manifest(path: Path) -> set[str]:
    """Name the files of the cache that stands in a folder; none if it is damaged.

    Raises:
        CacheError: The manifest cannot be read: nothing may be deleted then.
    """
    try:
        manifest = find_manifest(path)
    except (DamagedCacheError, CacheVersionError):
        return set()
    return set() if manifest is None else set(manifest.files)


def _make_build_folder(folder: Path) -> None:
    """Make the folder of a build; refuse a link to somewhere else."""
    if not is_folder(folder):
        try:
            folder.mkdir()
        except FileExistsError:
            message = f"{folder} is not a folder."
            why = "packing keeps its unfinished work there, and follows no link"
            raise CacheError(message, why=why, fix=f"rm {folder}") from None
        sync_folder(folder.parent)


def _make_or_check_folder(path: Path) -> None:
    """Make the cache's folder, or see that it is one to pack into.

    Raises:
        CacheError: It cannot be written to, or holds files that are not a cache's.
    """
    try:
        _make_folder_and_parents(path)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise _cannot_pack_into(path, error) from error

    if MANIFEST in names:
        _check_manifest_is_ours(path)
        return
    foreign_names = names - {BUILDING, _LOCK, _SOFT_LOCK} - _SYSTEM_NAMES
    if BUILDING in names and not _is_own_build(path / BUILDING):
        message = f"{path / BUILDING} holds files that no packing run has written."
        why = "packing would delete those that are named like its own"
        raise CacheError(message, why=why, fix="name a folder that is new or empty")
    if foreign_names and BUILDING not in names:
        message = f"{path} holds {min(foreign_names)!r}, which is not a cache's."
        why = "packing into it would mix your files with the cache's"
        raise CacheError(message, why=why, fix="name a folder that is new or empty")


def _cannot_pack_into(path: Path, error: OSError) -> CacheError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        why, fix = "a file has that name", "choose another name for the folder"
        taken = next((p for p in (path, *path.parents) if os.path.lexists(p)), path)
        if taken.is_symlink():
            why = f"{taken} is a link to {taken.readlink()}, which is not there"
            fix = "make the folder that it leads to, or remove the link"
        elif taken != path:
            why = f"{taken} is a file, and no folder"
    elif error.errno in NOT_ALLOWED:
        why = "the folder is not writable"
        fix = "choose a cache folder that you may write to"
    else:
        return not_written(path, error)
    message = f"A cache cannot be packed into {path}: {error.strerror or error}."
    return CacheError(message, why=why, fix=fix)


def _is_own_build(folder: Path) -> bool:
    """Tell whether what lies in a build's folder was left by a build.

    A build writes its plan first, and deletes the plan, or the list of obsolete files,
    last: so one of them is there, or nothing but parts of files.
    """
    if not is_folder(folder):
        return True  # a link or a file, which is refused where it is opened
    keys_by_file = {_PLAN: {"fingerprint", "samples"}, _OBSOLETE: {"generation"}}
    for name, keys in keys_by_file.items():
        content = _read_json(folder / name)
        if isinstance(content, dict) and keys <= set(content):
            return True
    own_suffixes = {".partial", ".block", WRITTEN_SUFFIX}
    return all(file.suffix in own_suffixes for file in folder.iterdir())


def _check_manifest_is_ours(path: Path) -> None:
    """Refuse to replace a ``manifest.json`` that no cache ever had."""
    file = path / MANIFEST
    with (
        writing(file),
        opened(file) as descriptor,
        open(descriptor, "rb", closefd=False) as raw,
    ):
        start = raw.read(64)
    # A damaged one is known by the shards beside it, and may be replaced.
    has_shards = any(is_cache_file_name(entry.name) for entry in path.iterdir())
    if FORMAT.encode() in start or has_shards:
        return
    message = f"{file} is not the manifest of a loaderkit cache."
    why = "packing would replace it, and it may be a file of yours"
    fix = f"name another folder, or delete {file} yourself"
    raise CacheError(message, why=why, fix=fix)


def _make_folder_and_parents(path: Path) -> None:
    """Make the cache's folder and those above it, and see that their names last."""
    any_made = make_folders(path)
    if not any_made and not exists(path / MANIFEST):
        # A run that was killed between the two steps has left that for this one.  A
        # folder above that may not be read cannot be synced, nor was it made here.
        with contextlib.suppress(PermissionError):
            sync_folder(path.parent)


@contextlib.contextmanager
def _folder_lock(path: Path) -> Iterator[None]:
    lock: filelock.BaseFileLock = filelock.FileLock(path / _LOCK)
    try:
        if not _acquire_system_lock(lock, path):
            lock = filelock.SoftFileLock(path / _SOFT_LOCK)
            take_lock(lock, path / BUILDING / _PACKER, f"packs {path}")
    except OSError as error:
        raise not_written(Path(lock.lock_file), error) from error
    try:
        yield
    finally:
        try:
            lock.release()
        except OSError as error:
            # The process lets go of it when it ends, if not before.
            _LOG.warning("the lock of %s could not be let go of: %s", path, error)


def _acquire_system_lock(lock: filelock.BaseFileLock, path: Path) -> bool:
    """Take a lock of the system's.

    NFS without a lock daemon (ENOLCK), FUSE and object stores (EOPNOTSUPP) know none; a
    file that must not exist yet serves as the lock there.  Two processes of which each
    takes the other kind would both pack, so a failure is not believed at once, and one
    of another kind (a full disk, too many open files) is an error.

    Args:
        lock: The lock.
        path: What it locks.

    Returns:
        False where the file system has no locks.

    Raises:
        OSError: The lock's file cannot be made.
    """
    for pause_s in (0.0, 0.01, 0.1):
        time.sleep(pause_s)
        try:
            take_lock(lock, path / BUILDING / _PACKER, f"packs {path}")
        except NotImplementedError as error:
            refusal: Exception = error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            refusal = error
        else:
            return True
    _LOG.info("%s cannot be locked (%s); %s is used", path, refusal, _SOFT_LOCK)
    return False
