"""The folder that a cache is built in: made or refused, and locked while it is built.

Packing replaces and deletes files by their names.  So a folder that holds anything else
is refused before a file is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from loaderkit.cache.build_notes import read_build_json
from loaderkit.cache.durable import (
    NOT_ALLOWED,
    is_folder,
    make_folders,
    not_written,
    sync_folder,
    writing,
)
from loaderkit.cache.files import exists, opened
from loaderkit.cache.layout import (
    BUILDING,
    MANIFEST,
    WRITTEN_SUFFIX,
    is_cache_file_name,
)
from loaderkit.cache.lock_files import (
    release_lock,
    soft_lock_name,
    take_lock_of_any_kind,
)
from loaderkit.cache.manifest import FORMAT
from loaderkit.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK = ".lock"
PACKER = "packer.partial"
"""The note of who holds the lock.  It ends as parts of files do, so that after a packer
was killed the next build deletes it with them."""
_SYSTEM_NAMES = {".DS_Store", "Thumbs.db", "desktop.ini", "lost+found"}
"""What file systems and desktops put into folders that a person finds empty."""
_MOST_LOOKS = 10
"""Chosen: a run that packs moves its last files in a moment."""
PLAN = "plan.json"
OBSOLETE = "obsolete.json"
"""Which files the manifest that comes next makes needless, and its generation."""


def make_or_check_folder(path: Path) -> None:
    """Make the cache's folder, or see that it is one to pack into.

    Names are listed one by one, and another process may pack here meanwhile: its shards
    may then be seen without the manifest, which came behind.  So a folder is refused
    that was seen twice as it is, or that others go on writing to.

    Raises:
        CacheError: It cannot be written to, or holds files that are not a cache's.
    """
    seen_before: set[str] | None = None
    for looks_left in reversed(range(_MOST_LOOKS)):
        try:
            _make_folder_and_parents(path)
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            names = _names_in(path)
        except OSError as error:
            raise _cannot_pack_into(path, error) from error

        refusal = _refusal_of(path, names)
        if refusal is None:
            return
        if names == seen_before or not looks_left:
            raise refusal
        seen_before = names


def _names_in(path: Path) -> set[str]:
    """List what is in a folder, and in that of its build: ``.building/plan.json``."""
    names = {entry.name for entry in path.iterdir()}
    if BUILDING in names:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names |= {
                f"{BUILDING}/{entry.name}" for entry in (path / BUILDING).iterdir()
            }
    return names


def _refusal_of(path: Path, names: set[str]) -> CacheError | None:
    """Say why a folder is none to pack into; None of one that is."""
    fix = "name a folder that is new or empty"
    if MANIFEST in names:
        _check_manifest_is_ours(path)
        return None
    if BUILDING in names:
        with contextlib.suppress(FileNotFoundError):
            if _is_own_build(path / BUILDING):
                return None
        message = f"{path / BUILDING} holds files that no packing run has written."
        why = "packing would delete those that are named like its own"
        return CacheError(message, why=why, fix=fix)
    foreign_names = names - {LOCK, soft_lock_name(LOCK)} - _SYSTEM_NAMES
    if not foreign_names:
        return None
    message = f"{path} holds {min(foreign_names)!r}, which is not a cache's."
    why = "packing into it would mix your files with the cache's"
    return CacheError(message, why=why, fix=fix)


def _make_folder_and_parents(path: Path) -> None:
    """Make the cache's folder and those above it, and see that their names last."""
    any_made = make_folders(path)
    if not any_made and not exists(path / MANIFEST):
        # A run that was killed between the two steps has left that for this one.  A
        # folder above that may not be read cannot be synced, nor was it made here.
        with contextlib.suppress(PermissionError):
            sync_folder(path.parent)


def _cannot_pack_into(path: Path, error: OSError) -> CacheError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        why, fix = "a file has that name", "choose another name for the folder"
        taken = next((p for p in (path, *path.parents) if os.path.lexists(p)), path)
        if taken.is_symlink():
            why = f"{taken} is a link to {taken.readlink()}, which is not there"
            fix = "make the folder that it leads to, or remove the link"
        elif taken != path:
            why = f"{taken} is a file, and no folder"
    elif error.errno == errno.ENOENT:
        # Of /proc and the like, in which the system alone makes what there is.
        folder = next(p for p in path.absolute().parents if p.exists())
        why = f"no folder can be made in {folder}"
        fix = "choose a cache folder that you may write to"
    elif error.errno in NOT_ALLOWED:
        why = "the folder is not writable"
        fix = "choose a cache folder that you may write to"
    else:
        return not_written(path, error)
    message = f"A cache cannot be packed into {path}: {error.strerror or error}."
    return CacheError(message, why=why, fix=fix)


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


def _is_own_build(folder: Path) -> bool:
    """Tell whether what lies in a build's folder was left by a build.

    A build writes its plan first, and deletes the plan, or the list of obsolete files,
    last: so one of them is there, or nothing but parts of files.
    """
    if not is_folder(folder):
        return True  # a link or a file, which is refused where it is opened
    keys_by_file = {PLAN: {"fingerprint", "samples"}, OBSOLETE: {"generation"}}
    for name, keys in keys_by_file.items():
        content = read_build_json(folder / name)
        if isinstance(content, dict) and keys <= set(content):
            return True
    own_suffixes = {".partial", ".block", WRITTEN_SUFFIX}
    return all(file.suffix in own_suffixes for file in folder.iterdir())


def make_build_folder(folder: Path) -> None:
    """Make the folder of a build; refuse a link to somewhere else."""
    if not is_folder(folder):
        try:
            folder.mkdir()
        except FileExistsError:
            message = f"{folder} is not a folder."
            why = "packing keeps its unfinished work there, and follows no link"
            raise CacheError(message, why=why, fix=f"rm {folder}") from None
        sync_folder(folder.parent)


@contextlib.contextmanager
def folder_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a cache's folder, as long as it takes to build in it.

    Raises:
        CacheError: The lock's file cannot be made.
    """
    # Who holds it says so in the build's folder, once that is there.
    note = path / BUILDING / PACKER
    lock = take_lock_of_any_kind(path / LOCK, note, f"packs {path}")
    try:
        yield
    finally:
        release_lock(lock)
