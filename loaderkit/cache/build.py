"""Make a cache that exists whole or not at all, and go on where a killed run stopped.

While it is built, everything waits in ``.building`` inside the cache's folder: each
finished shard, and beside it a note (``00000.json``) that describes it.  The last
step moves the shards out and renames the manifest into place.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import filelock

from loaderkit.cache.files import check_digest, check_size
from loaderkit.cache.hdf5 import write_shard
from loaderkit.cache.layout import (
    BUILDING,
    MANIFEST,
    Manifest,
    Shard,
    shard_from,
    write_manifest,
)
from loaderkit.errors import CacheError, DamagedCacheError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from loaderkit.cache.columns import ShardBuffer

_LOG = logging.getLogger("loaderkit")
_PLAN = "plan.json"


@dataclass
class Build:
    """A cache being built; made by ``building``."""

    path: Path
    plan: Mapping[str, Any]
    """What decides the bytes: samples and settings.  Another plan starts anew."""
    shards: list[Shard] = field(default_factory=list)
    """Finished shards, those of an earlier run first."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """What the builder had learned when the last shard was finished."""

    @property
    def folder(self) -> Path:
        """Where unfinished work waits."""
        return self.path / BUILDING

    @property
    def samples(self) -> int:
        """Samples in the finished shards: where to go on."""
        return sum(shard.samples for shard in self.shards)

    def add(self, buffer: ShardBuffer, state: Mapping[str, Any]) -> Shard:
        """Write the next shard, durably.

        Args:
            buffer: Its samples.
            state: What a later run must know to go on behind it; JSON.

        Returns:
            The shard's description.

        Raises:
            CacheError: The disk is full; the shards before it stay.
        """
        file = self.folder / f"{len(self.shards):05}.h5"
        shard = write_shard(buffer, file, compression=self.plan.get("compression"))
        note = {"shard": asdict(shard), "state": state}
        write_text(file.with_suffix(".json"), json.dumps(note))
        self.shards.append(shard)
        self.state = state
        return shard

    def commit(
        self,
        *,
        structure: Mapping[str, Any],
        fingerprint: Mapping[str, Any],
        made_with: Mapping[str, str],
    ) -> Manifest:
        """Make the finished shards a cache.

        Args:
            structure: How columns make up a sample.
            fingerprint: What the samples were made from.
            made_with: Versions of the libraries that did it.

        Returns:
            The manifest that now stands in the folder.
        """
        compression = self.plan.get("compression")
        shards = tuple(self.shards)
        manifest = Manifest(shards, structure, fingerprint, made_with, compression)
        text = write_manifest(manifest)
        (self.path / MANIFEST).unlink(missing_ok=True)
        for shard in shards:
            if (self.folder / shard.file).exists():
                (self.folder / shard.file).replace(self.path / shard.file)
        write_text(self.path / MANIFEST, text)
        self._clear(keep={shard.file for shard in shards})
        return manifest

    def resume(self) -> None:
        """Take over what an earlier run of the same plan finished; drop the rest."""
        plan = self.folder / _PLAN
        with contextlib.suppress(OSError, ValueError):
            if json.loads(plan.read_text()) == json.loads(json.dumps(self.plan)):
                self._take_over()
        if not self.shards:
            _empty(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(plan, json.dumps(self.plan))

    def _take_over(self) -> None:
        for number in range(1 << 30):
            note = self.folder / f"{number:05}.json"
            try:
                found = json.loads(note.read_text())
                shard = shard_from(found["shard"])
                waits = (self.folder / shard.file).exists()
                check_size(self.folder if waits else self.path, shard)
                check_digest(self.folder if waits else self.path, shard)
            except (OSError, ValueError, KeyError, TypeError, DamagedCacheError):
                return
            self.shards.append(shard)
            self.state = found["state"]

    def _clear(self, *, keep: set[str]) -> None:
        _empty(self.folder)
        self.folder.rmdir()
        for file in self.path.glob("*.h5"):
            if file.name not in keep:
                file.unlink()


@contextlib.contextmanager
def building(
    path: Path, plan: Mapping[str, Any], *, anew: bool
) -> Iterator[Build | None]:
    """Hold a cache's folder while building it; one process at a time.

    Args:
        path: The cache's folder; made if it is not there.
        plan: What decides the bytes of the cache, as JSON.
        anew: Build even though there is a cache; it stays until the new one is whole.

    Yields:
        The build, with what an earlier run finished; None when another process has
        built the cache while this one waited.

    Raises:
        CacheError: The folder cannot be written, or holds something else.
    """
    _claim(path)
    with _locked(path):
        if (path / MANIFEST).exists() and not anew:
            yield None
            return
        build = Build(path, plan)
        build.resume()
        yield build


def write_text(file: Path, text: str) -> None:
    """Write a small file that appears whole or not at all, even after a power cut."""
    partial = file.with_name(file.name + ".partial")
    try:
        with partial.open("wb") as raw:
            raw.write(text.encode("utf-8", "surrogatepass"))
            raw.flush()
            os.fsync(raw.fileno())
        partial.replace(file)
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        what = f"{file} could not be written: {error.strerror or error}."
        fix = "free the space, or choose another folder, and run the same again"
        raise CacheError(what, why="finished shards are kept", fix=fix) from error


def _claim(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        what = f"A cache cannot be packed into {path}: {error.strerror or error}."
        fix = "choose a cache folder that you may write to"
        raise CacheError(what, why="the folder is not writable", fix=fix) from error
    ours = {MANIFEST, BUILDING, ".lock"}
    strange = [
        each.name
        for each in path.iterdir()
        if each.name not in ours and each.suffix not in {".h5", ".partial"}
    ]
    if strange and not ours & {each.name for each in path.iterdir()}:
        what = f"{path} holds {strange[0]!r}, which is not a cache's."
        why = "packing into it would mix your files with the cache's"
        raise CacheError(what, why=why, fix="name a folder that is new or empty")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = filelock.FileLock(path / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        _LOG.warning("waiting for another process that is packing %s", path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _empty(folder: Path) -> None:
    for file in folder.glob("*"):
        file.unlink()
