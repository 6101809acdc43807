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
import itertools
import json
import logging
import shutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import filelock
import xxhash

from loaderkit.cache.build_folder import (
    LOCK,
    OBSOLETE,
    PACKER,
    PLAN,
    folder_lock,
    make_build_folder,
    make_or_check_folder,
)
from loaderkit.cache.build_notes import (
    FinishedShard,
    is_note,
    note_as_json,
    note_file,
    note_numbers,
    read_build_json,
    read_note,
)
from loaderkit.cache.durable import (
    is_folder,
    link_or_copy,
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
)
from loaderkit.cache.hdf5 import write_shard
from loaderkit.cache.layout import (
    BUILDING,
    MANIFEST,
    WRITTEN_SUFFIX,
    Shard,
    is_cache_file_name,
    shard_name,
    sources_name,
    written_marker_name,
)
from loaderkit.cache.lock_files import write_holder
from loaderkit.cache.manifest import (
    Manifest,
    SourceFiles,
    generation_of,
    write_manifest,
)
from loaderkit.cache.shard_table import ShardTableBuilder
from loaderkit.errors import CacheError, CacheVersionError, DamagedCacheError
from loaderkit.units import count_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from loaderkit.cache.columns import ShardBuffer

_LOG = logging.getLogger("loaderkit")
_VALUES = "values"
"""Name of what the file of a plan has besides the plan."""
_MOST_VALUES_NAMED = 8
"""In a message of one line: chosen."""
_ADOPTED_AT_ONCE = 1024
"""Notes that wait for the disk together; chosen: 10,000 links wait ten times."""


class ShardElsewhere(NamedTuple):
    """A shard of another cache."""

    shard: Shard
    """Its description there."""
    folder: Path
    """The folder of its cache."""


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
            return note_as_json(FinishedShard(shard, state, evidence))

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
        return read_note(self.path / BUILDING, number)


@dataclass
class Build:
    """A cache being built; made by ``open_build``."""

    path: Path
    plan: Mapping[str, Any] = field(default_factory=dict)
    """What decides the bytes: samples and settings; given to ``resume``."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Hashes of values that samples may be made from, by names that a user knows: only
    for saying what differs from an earlier run."""
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

    def read_note(self, number: int) -> FinishedShard:
        """Read what is noted of a finished shard.

        Args:
            number: Which shard of the cache it is, from 0.

        Returns:
            The shard and what was known when it was finished.

        Raises:
            CacheError: The note cannot be read, or is not the one that was written.
        """
        finished = read_note(self.folder, number)
        if finished is None:
            message = f"{note_file(self.folder, number)} is gone, or was changed."
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

    def unfinished_plan(self) -> dict[str, Any] | None:
        """Give the plan of an earlier run that did not end; None where there is none.

        It may not be this version's, or a file of somebody else.
        """
        plan = read_build_json(self.folder / PLAN)
        return plan if isinstance(plan, dict) else None

    def resume_in_any_order(
        self, plan: Mapping[str, Any], values: Mapping[str, str] | None = None
    ) -> list[int]:
        """Take over every shard that an earlier run of the same plan finished.

        Shards that are written in any order are read back by ``read_note`` and become
        the cache's by ``take_in``.

        Args:
            plan: What decides the bytes of the cache, as JSON.
            values: Hashes of values that samples may be made from, by their names.

        Returns:
            Their numbers, in order; the others' files are deleted.

        Raises:
            CacheError: A file cannot be read, written or deleted.
        """
        self.plan, self.values = plan, values or {}
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
        return shard

    def adopt(self, elsewhere: Iterable[ShardElsewhere]) -> None:
        """Take shards of other caches for the next ones of this, as they are.

        On one file system both caches then name the same file, by a hard link: files of
        a cache are never written to, only replaced under their names.

        Args:
            elsewhere: The shards.

        Raises:
            CacheError: One cannot be linked or copied; the shards before it stay.
        """
        shards = iter(elsewhere)
        # Waiting for the disk behind each of 10,000 links took minutes.
        while some := list(itertools.islice(shards, _ADOPTED_AT_ONCE)):
            self._adopt_some(some)

    def _adopt_some(self, elsewhere: Sequence[ShardElsewhere]) -> None:
        to_name = []
        adopted = []
        for number, (shard, folder) in enumerate(elsewhere, start=len(self.shards)):
            named = replace(shard, file=shard_name(number, shard.xxh3))
            source = folder / shard.file
            adopted.append(named)
            if not exists(source):
                raise _replaced_meanwhile(source)
            # A cache that is extended names the file as the new one will: nothing to
            # do, and nothing for a later run to find.
            if source != self.path / named.file:
                to_name.append((number, named, source))

        for number, named, _ in to_name:
            with writing(self.path / named.file):
                self.note_written(named.file)
                self._write_note(number, named)
        if to_name:
            # The names appear behind the notes, which a later run holds against the
            # files, also after a power cut.  ``put_in_place`` waits for the names.
            with writing(self.folder):
                sync_folder(self.folder)
        for number, named, source in to_name:
            self._name_adopted(number, named, source)
        for named in adopted:
            self.shards.add(named)

    def _write_note(self, number: int, adopted: Shard) -> None:
        """Write a note that is whole or not there, unless the power is cut.

        One that is damaged then is none: the file is linked once more.
        """
        note = note_file(self.folder, number)
        partial = self.folder / "note.partial"
        text = _note_of_adopted(adopted)
        partial.write_text(text, encoding="utf-8", errors="surrogatepass")
        partial.replace(note)

    def _name_adopted(self, number: int, adopted: Shard, source: Path) -> None:
        """Give a file of another cache its name in this one."""
        target = self.path / adopted.file
        with writing(target):
            if not exists(source):
                raise _replaced_meanwhile(source)
            if exists(target) and target.samefile(source):
                return
            partial = self.folder / f"{number:05}.partial"
            is_copy = link_or_copy(source, partial)
            partial.replace(target)
        if is_copy:
            # It took a while: a power cut shall not lose it.
            with writing(target):
                sync_folder(self.path)
            write_text(
                note_file(self.folder, number),
                _note_of_adopted(adopted),
                partial=self.folder / "note.partial",
            )

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
        source_files = None
        if sources is not None:
            source_files = self._write_sources(sources)
        manifest = Manifest(
            shards=self.shards.table(),
            structure=structure,
            fingerprint=fingerprint,
            made_with=made_with,
            compression=self.plan.get("compression"),
            sources=source_files,
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
        with writing(self.path):
            obsolete = _files_of_manifest(self.path) | _written_shards(self.folder)
        obsolete -= set(manifest.files)
        write_text(
            self.folder / OBSOLETE,
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
    make_or_check_folder(path)
    with folder_lock(path):
        if exists(path / MANIFEST) and not overwrite:
            _try_to_finish_commit(path)
            yield None
            return
        build = Build(path)
        with writing(path):
            finish_commit(path)
            make_build_folder(build.folder)
            _remove_unfinished_files(build.folder)
        write_holder(build.folder / PACKER)
        try:
            yield build
        finally:
            # Before the lock goes: behind it, the note would be the next packer's.
            with contextlib.suppress(OSError):
                (build.folder / PACKER).unlink()
            _remove_build_of_nothing(build.folder)


def _note_of_adopted(adopted: Shard) -> str:
    """Write what is noted of a shard that was finished elsewhere."""
    return note_as_json(FinishedShard(adopted, state={}, evidence={}))


def _replaced_meanwhile(shard: Path) -> DamagedCacheError:
    message = f"{shard} is not there any more."
    why = "another process has packed that cache again, or deleted it, meanwhile"
    return DamagedCacheError(message, why=why, fix="run the same again")


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
    obsolete = read_build_json(folder / OBSOLETE)
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
            with filelock.FileLock(path / LOCK, timeout=0):
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
    numbers = note_numbers(build.folder)
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
    for number in note_numbers(folder):
        finished = read_note(folder, number)
        if finished is not None:
            named.add(finished.shard.file)
    for name in _written_shards(folder) - named:
        if is_cache_file_name(name):
            remove(path / name)
        remove(folder / written_marker_name(name))


def _has_plan_of(build: Build) -> bool:
    """Tell whether the shards that lie there are of the same plan; warn if not."""
    earlier_plan = build.unfinished_plan()
    earlier_values: object = None
    if earlier_plan is not None:
        earlier_values = earlier_plan.pop(_VALUES, None)
    # Compared as it comes back from JSON, which has no tuples.
    if earlier_plan == json.loads(json.dumps(build.plan)):
        return True
    numbers = note_numbers(build.folder)
    finished = sum(read_note(build.folder, number) is not None for number in numbers)
    if finished:
        _LOG.warning(
            "packing %s starts anew, and %s of an unfinished run; changed since: %s",
            build.path,
            f"deletes {count_of(finished, 'finished shards')}",
            _difference_of_plans(earlier_plan, earlier_values, build),
        )
    return False


def _difference_of_plans(earlier: object, earlier_values: object, build: Build) -> str:
    """Say what has changed since an unfinished run."""
    if not isinstance(earlier, dict):
        return "samples or settings"
    then, now = {**earlier}, {**build.plan}
    code_then, code_now = then.pop("fingerprint", None), now.pop("fingerprint", None)
    if not isinstance(code_then, dict) or not isinstance(code_now, dict):
        return "samples or settings"

    differences = []
    if code_then.get("load") != code_now.get("load"):
        differences.append(_difference_of_code(earlier_values, build.values))
    if code_then.get("keys") != code_now.get("keys"):
        counts = f"{code_then.get('count')}, now {code_now.get('count')}"
        differences.append(f"the keys ({counts})")
    for name in ("version", "compression", "shard_bytes", "spans", "format"):
        source_then, source_now = (
            (code_then, code_now) if name == "version" else (then, now)
        )
        before, after = source_then.get(name), source_now.get(name)
        if before != after:
            differences.append(f"{name} ({before!r}, now {after!r})")
    # What else is in a plan follows from the samples.
    return "; ".join(differences) or "the sizes of samples"


def _difference_of_code(then: object, now: Mapping[str, str]) -> str:
    """Name the values that have changed, among those that code may read."""
    what = "the code of load, or what it reads"
    if not isinstance(then, dict):
        return what
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    if not names:
        return what
    shown = ", ".join(names[:_MOST_VALUES_NAMED])
    more = len(names) - _MOST_VALUES_NAMED
    shown += f" and {more:,} more" if more > 0 else ""
    return f"{what} ({shown})"


def _write_plan(build: Build) -> None:
    """Write the plan, where no shard is left that belongs to the one before."""
    _remove_notes(build.folder)
    write_text(
        build.folder / PLAN,
        json.dumps({**build.plan, _VALUES: dict(build.values)}),
        partial=build.folder / "note.partial",
    )


def _is_intact(build: Build, number: int) -> bool:
    """Tell whether a shard's file is as it was written.

    Raises:
        CacheError: It cannot be read, which says nothing of what it holds.
    """
    finished = read_note(build.folder, number)
    if finished is None:
        return False
    try:
        check_size(build.path, finished.shard)
        check_digest(build.path, finished.shard)
    except DamagedCacheError:
        return False
    return True


def _delete_finished_shards(path: Path, *, start: int) -> None:
    """Delete finished shards and their notes, from one on.

    Args:
        path: The cache's folder.
        start: The first to delete.

    Raises:
        CacheError: The manifest that stands there, if any, cannot be read.
        OSError: A file cannot be deleted.
    """
    numbers = note_numbers(path / BUILDING)
    _delete_shards(path, (number for number in numbers if number >= start))


def _delete_shards(path: Path, numbers: Iterable[int]) -> None:
    in_use = _files_of_manifest(path)
    for number in numbers:
        # A note behind a damaged one is read too, since its shard has to be deleted.
        finished = read_note(path / BUILDING, number)
        if finished is None:
            continue
        # A shard of the same bytes has the same name, and may be the cache's.
        if finished.shard.file not in in_use:
            remove(path / finished.shard.file)
        remove(note_file(path / BUILDING, number))


def _remove_unfinished_files(folder: Path) -> None:
    """Delete what a killed run was writing."""
    for file in folder.iterdir():
        if file.suffix in {".partial", ".block"}:
            remove(file)


def _remove_build_of_nothing(folder: Path) -> None:
    """Delete a build that no shard was begun of, such as that of an empty source.

    Nothing of it could be gone on with, and the folder would be called half packed.
    """
    with contextlib.suppress(OSError):
        if {file.name for file in folder.iterdir()} <= {PLAN}:
            remove(folder / PLAN)
            folder.rmdir()


def _remove_notes(folder: Path) -> None:
    """Delete the notes of a build, by the names that only it gives.

    The list of obsolete files goes last: a run that is killed on the way finds it, and
    goes on deleting.  The plan goes behind the notes, which are worth nothing without.
    """
    for file in folder.iterdir():
        if is_note(file) or file.suffix == WRITTEN_SUFFIX:
            remove(file)
    remove(folder / PLAN)
    remove(folder / OBSOLETE)


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
