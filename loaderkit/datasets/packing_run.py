"""One run of packing: blocks of samples become shards, or are known from before.

A run that was killed is gone on with where its samples are shown to be the same: the
files they were made from are as they were, and so are code, keys and settings; or else
the samples, read again, have the same hash.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from typing import (
    TYPE_CHECKING,
    Any,
)

import numpy as np
from tqdm import auto, std

from loaderkit.cache.columns import ShardBuffer
from loaderkit.cache.layout import SHARD_FORMAT
from loaderkit.datasets.block_readers import (
    BLOCK_BYTES,
    EncodedBlock,
    PackJob,
    content_digest,
)
from loaderkit.datasets.classes import import_classes
from loaderkit.datasets.source_files import (
    FileVersion,
    SourceFileList,
    files_below,
    hashed,
    version_of,
)
from loaderkit.datasets.structure import KEY_COLUMN, VARIANT_COLUMN, Structure
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from loaderkit.cache.build import Build, FinishedShard
    from loaderkit.datasets.pack_options import PackOptions
    from loaderkit.datasets.packing_workers import SpanReader

_MOST_LOOKED_AT = 100_000
"""Raw files that are looked at before they are read; 200 bytes each."""
_LOG = logging.getLogger("loaderkit")


class PackingRun:
    """One run of packing: where it stands between two shards."""

    def __init__(
        self, job: PackJob, reader: SpanReader, build: Build, options: PackOptions
    ) -> None:
        self.source, self.reader = job.source, reader
        self.build, self.options = build, options
        self.block_samples = 1
        """Samples that a worker reads at a time."""
        self.structure = Structure()
        self.buffer = ShardBuffer()
        self._versions = self._look_at_files()
        root = self.source.root()
        self.sources = SourceFileList("" if root is None else os.path.abspath(root))
        self._state = self.source.state()
        self._digests: list[bytes] = []
        self._files: dict[str, FileVersion] = {}
        """Files noted since the last shard was finished."""
        if self.sources.root in self._versions:
            # A single raw file, whatever library reads it.
            self._files[self.sources.root] = self._versions[self.sources.root]

    def _look_at_files(self) -> dict[str, FileVersion]:
        """Look at raw files before they are read: one may be replaced meanwhile."""
        if self.options.track_files == "none":
            return {}
        root = self.source.root()
        ours = [os.path.abspath(self.build.path)]
        below_root = [] if root is None else files_below(root, ours)
        paths = itertools.chain(self.source.named_files(), below_root)
        versions = ((path, version_of(path)) for path in paths)
        looked_at = itertools.islice(versions, _MOST_LOOKED_AT)
        return {path: version for path, version in looked_at if version is not None}

    def pack(self, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
        """Pack what an earlier run has not packed.

        Args:
            fingerprint: What the samples are made from.

        Returns:
            How columns make up a sample.
        """
        first = self._first_sample()
        self.block_samples = _block_samples(first, len(self.source), self.options)
        plan = {
            "format": SHARD_FORMAT,
            "fingerprint": fingerprint,
            "samples": len(self.source),
            "block_samples": self.block_samples,
            "compression": self.options.compression,
            "shard_bytes": self.options.shard_bytes,
        }
        self.build.resume(plan)
        self._keep_shards_of_unchanged_samples()
        if not self.build.shards.samples:
            self._add(first)
        start = self.build.shards.samples + self.buffer.samples
        total = len(self.source)
        with _bar(start, total, self.build.path) as bar:
            for encoded in self._read(start, total):
                self._add(encoded)
                bar.update(len(encoded.which))
                bar.set_postfix_str(format_bytes(self._bytes()), refresh=False)
        if self.buffer.samples:
            self._finish_shard()
        return self.structure.to_json()

    def _first_sample(self) -> EncodedBlock:
        """Read the first sample, and import what the user's code imported for it."""
        [first] = self._read(0, 1)
        structure = Structure()
        for tree in first.trees:
            structure.number(tree, first.keys[0])
        import_classes(structure)
        return first

    def _keep_shards_of_unchanged_samples(self) -> None:
        """Go on with a killed run's shards whose samples are still the source's."""
        start = 0
        for number, finished in enumerate(self.build.finished()):
            reason = self._difference(finished, start)
            if reason:
                _LOG.warning(
                    "packing %s: finished shards (%d) are packed anew, since %s",
                    self.build.path,
                    len(self.build.shards) - number,
                    reason,
                )
                self.build.discard_from(number)
                break
            self.sources.update(_files_of(finished))
            start += finished.shard.samples
        if len(self.build.shards):
            self.structure = Structure.from_json(self.build.state)

    def list_sources(self) -> str | None:
        """Write down which files samples were made from; None where none is known."""
        if self.options.track_files == "none":
            return None
        by_hash = self.options.track_files == "hash"
        root = self.source.root()
        paths = list(self.source.named_files())
        if root is not None and not paths and not self.sources.any_below_root():
            # A library in C has read them, and told nobody which.
            paths = list(files_below(root, [os.path.abspath(self.build.path)]))
        for path in paths:
            version = self._versions.get(path) or version_of(path)
            if version is not None:
                known = hashed(path, version) if by_hash else version
                self.sources.add(path, known)
        return self.sources.to_json() if self.sources.files else None

    def _read(
        self, start: int, stop: int, *, digests_only: bool = False
    ) -> Iterator[EncodedBlock]:
        """Read samples, noting the files that are opened for them."""
        spans = _spans(start, stop, self.block_samples)
        for span in self.reader.read(spans, digests_only=digests_only):
            self._files.update(span.files)
            yield from span.blocks

    def _difference(self, finished: FinishedShard, start: int) -> str:
        """Say how the source differs from what a shard was made of; "" if it does not.

        Args:
            finished: The shard.
            start: Its first row.
        """
        for path, packed in _files_of(finished).items():
            if version_of(path, hashed=bool(packed.xxh3)) != packed:
                return f"{path} has changed"
        evidence, stop = finished.evidence, start + finished.shard.samples
        known = bool(self.sources.files) or bool(_files_of(finished))
        if known and self._state is not None and evidence.get("state") == self._state:
            # Files, code, keys and settings are the same.  Two samples are read again
            # all the same, for what none of these shows (a database, a clock).
            for row, wanted in ((start, "first"), (stop - 1, "last")):
                if self._digests_of(row, row + 1)[0].hex() != evidence.get(wanted):
                    return f"sample {self.source.key(row)!r} is another one now"
            return ""
        if content_digest(self._digests_of(start, stop)) != evidence.get("content"):
            return f"samples {start:,} to {stop - 1:,} are not the same as before"
        return ""

    def _digests_of(self, start: int, stop: int) -> list[bytes]:
        """Read samples again for their hashes alone."""
        blocks = self._read(start, stop, digests_only=True)
        return [digest for encoded in blocks for digest in encoded.digests]

    def _bytes(self) -> int:
        return self.buffer.nbytes + self.build.shards.nbytes

    def _add(self, encoded: EncodedBlock) -> None:
        first_keys: dict[int, str] = {}
        for row, tree in enumerate(encoded.which):
            first_keys.setdefault(tree, encoded.keys[row])
        numbers = [
            self.structure.number(tree, first_keys[at])
            for at, tree in enumerate(encoded.trees)
        ]
        block = encoded.block
        for row, tree in enumerate(encoded.which):
            values: dict[Hashable, NDArray[Any]] = {}
            values[VARIANT_COLUMN] = np.array(numbers[tree], "<i8")
            key = encoded.keys[row].encode("utf-8", "surrogatepass")
            values[KEY_COLUMN] = np.frombuffer(key, np.uint8)
            block.annotate(row, values)
        names = {column: self.structure.name(column) for column in block.columns}
        self.buffer.append(block.renamed(names))
        self._digests += encoded.digests
        if self.buffer.nbytes >= self.options.shard_bytes:
            self._finish_shard()

    def _finish_shard(self) -> None:
        evidence = {
            "content": content_digest(self._digests),
            "first": self._digests[0].hex(),
            "last": self._digests[-1].hex(),
            "state": self._state,
            "files": self._files,
        }
        self.build.add(self.buffer, state=self.structure.to_json(), evidence=evidence)
        self.sources.update(self._files)
        self.buffer = ShardBuffer()
        self._digests, self._files = [], {}


def _files_of(finished: FinishedShard) -> dict[str, FileVersion]:
    """Read the files noted with a shard."""
    files = finished.evidence.get("files") or {}
    return {path: FileVersion(*version) for path, version in files.items()}


def _block_samples(first: EncodedBlock, count: int, options: PackOptions) -> int:
    """Choose how many samples a worker takes at a time, from the first one's size."""
    fitting = min(BLOCK_BYTES, options.shard_bytes) // max(1, first.block.nbytes)
    return max(1, min(fitting, 512, -(-count // 16)))


def _spans(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut rows into spans whose ends do not depend on where a run goes on."""
    while start < stop:
        end = min(stop, (start // step + 1) * step)
        yield start, end
        start = end


_IN_TERMINAL = auto.notebook_tqdm is std.tqdm
"""Where a bar is drawn for people alone; in a notebook stderr is no terminal either."""


class _Bar(auto.tqdm):  # type: ignore[misc]
    """A progress bar that no other process can hold up.

    tqdm's own lock is shared with forked processes: one that is killed while it holds
    the lock would hang every other that packs.
    """

    _lock = threading.RLock()
    monitor_interval = 0


def _bar(done: int, total: int, path: Path) -> _Bar:
    return _Bar(
        total=total,
        initial=done,
        desc=f"packing {path.name}",
        unit=" samples",
        disable=None if _IN_TERMINAL else False,
        smoothing=0.1,
    )
