"""Pack samples into a cache: in parallel, in order, resumable after any kill.

Worker processes read samples and take them apart; this process puts the columns
together and writes the shards.  What goes into which shard depends on the samples
alone, so the bytes on disk are the same whatever the number of workers, and also after
a run that was killed and started again.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from loaderkit.cache.build import Build, building
from loaderkit.cache.columns import ShardBuffer
from loaderkit.cache.hdf5 import filters
from loaderkit.cache.layout import MANIFEST, VERSION
from loaderkit.datasets.readers import BLOCK_BYTES, Encoded, Job, encode_all, encode_one
from loaderkit.datasets.sources import as_source
from loaderkit.datasets.structure import KEY, VARIANT, Structure
from loaderkit.errors import CacheError

if TYPE_CHECKING:
    import os
    from collections.abc import Hashable, Iterator

    from numpy.typing import NDArray

    from loaderkit.datasets.sources import Source

_KEY_COLUMN: tuple[Any, ...] = (KEY, "str", "", 1, 0)
_VARIANT_COLUMN: tuple[Any, ...] = (VARIANT, "variant", "int64", 0, None)


@dataclass(frozen=True)
class PackOptions:
    """How a cache is packed."""

    workers: int | None = None
    """Processes that read samples; 0 reads in this one; None: up to 4, one a CPU."""
    compression: str | None = None
    """"gzip", "lzf", a filter of hdf5plugin such as "Zstd", or None to map values."""
    shard_bytes: int = 256 << 20
    """Bytes after which a file is finished: what a killed run loses at most."""
    overwrite: bool = False
    """Pack again though there is a cache."""

    def __post_init__(self) -> None:
        filters(self.compression)
        if self.shard_bytes < 1 or (self.workers is not None and self.workers < 0):
            msg = f"workers and shard_bytes cannot be negative, got {self}"
            raise ValueError(msg)


def pack(
    source: object,
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    compression: str | None = None,
    shard_bytes: int = 256 << 20,
    overwrite: bool = False,
) -> Any:
    """Pack a dataset into a cache, and open it.

    Args:
        source: A list of samples, any map-style dataset, a PyG dataset, or a folder
            of ``.pt`` files (a path, or ``PtFolder`` to say more).
        path: The cache's folder; new, or with an unfinished build to go on with.
        workers: Processes that read samples; 0 reads in this one; None: up to 4, one
            for each CPU.
        compression: "gzip", "lzf", a filter of hdf5plugin, or None to map values.
        shard_bytes: Bytes after which a file is finished.
        overwrite: Pack again though there is a cache; it stays until the new one is
            whole.

    Returns:
        A ``SafeGraphDataset`` over the cache, or a ``SafeDataset`` for other samples.

    Raises:
        CacheError: There is a cache already, or the folder cannot be written.
        DatasetError: A sample cannot be read or stored; the message names it.
        ValueError: An option is out of range.
    """
    from loaderkit.datasets.open import open_cache

    options = PackOptions(workers, compression, shard_bytes, overwrite)
    path = Path(path)
    if (path / MANIFEST).exists() and not overwrite:
        what = f"There is a cache at {path} already."
        fix = f"open_cache({str(path)!r}), or pack(..., overwrite=True) to replace it"
        raise CacheError(what, why="packing again would replace it", fix=fix)
    pack_source(as_source(source), path, options)
    return open_cache(path)


def pack_source(source: Source, path: Path, options: PackOptions) -> None:
    """Pack a source unless another process does so first.

    Args:
        source: What to read.
        path: The cache's folder.
        options: How.

    Raises:
        DatasetError: A sample cannot be read or stored.
        CacheError: The folder cannot be written.
    """
    fingerprint = source.fingerprint()
    first = Encoded()
    encode_one(source, 0, first, {})
    block_samples = _block_samples(first, len(source), options)
    plan = {
        "format": VERSION,
        "fingerprint": fingerprint.to_json(),
        "samples": len(source),
        "block_samples": block_samples,
        "compression": options.compression,
        "shard_bytes": options.shard_bytes,
    }
    with building(path, plan, anew=options.overwrite) as build:
        if build is None:
            return
        packing = _Packing(source, build, options, block_samples)
        structure = packing.run(first)
        build.commit(
            structure=structure,
            fingerprint=fingerprint.to_json(),
            made_with={name: _version(name) for name in _LIBRARIES},
        )


class _Packing:
    """One run of packing: where it stands between two shards."""

    def __init__(
        self, source: Source, build: Build, options: PackOptions, block_samples: int
    ) -> None:
        self.source, self.build, self.options = source, build, options
        self.block_samples = block_samples
        self.structure = (
            Structure.from_json(build.state) if build.state else Structure()
        )
        self.buffer = ShardBuffer()

    def run(self, first: Encoded) -> dict[str, Any]:
        """Pack what is not packed yet, behind the first sample, which is read."""
        if not self.build.samples:
            self._add(first)
        start = self.build.samples + self.buffer.samples
        total = len(self.source)
        spans = _spans(start, total, self.block_samples)
        limit = min(BLOCK_BYTES, self.options.shard_bytes)
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(_bar(start, total, self.build.path))
            job = Job(self.source, limit, self.build.folder)
            stack.callback(job.clear)
            results = encode_all(job, spans, self.options.workers)
            for batch in stack.enter_context(contextlib.closing(results)):
                for encoded in batch:
                    self._add(encoded)
                    bar.update(len(encoded.which))
                    bar.set_postfix_str(f"{_size(self._bytes())}", refresh=False)
            if self.buffer.samples:
                self._finish_shard()
        return self.structure.to_json()

    def _bytes(self) -> int:
        return self.buffer.nbytes + sum(shard.bytes for shard in self.build.shards)

    def _add(self, encoded: Encoded) -> None:
        first: dict[int, str] = {}
        for at, tree in enumerate(encoded.which):
            first.setdefault(tree, encoded.keys[at])
        numbers = [
            self.structure.number(tree, first[at])
            for at, tree in enumerate(encoded.trees)
        ]
        block = encoded.block
        for row, tree in enumerate(encoded.which):
            values: dict[Hashable, NDArray[Any]] = {}
            values[_VARIANT_COLUMN] = np.array(numbers[tree], "<i8")
            values[_KEY_COLUMN] = np.frombuffer(encoded.keys[row].encode(), np.uint8)
            block.annotate(row, values)
        names = {raw: self.structure.name(raw) for raw in block.runs}
        self.buffer.append(block.renamed(names))
        if self.buffer.nbytes >= self.options.shard_bytes:
            self._finish_shard()

    def _finish_shard(self) -> None:
        self.build.add(self.buffer, self.structure.to_json())
        self.buffer = ShardBuffer()


def _block_samples(first: Encoded, count: int, options: PackOptions) -> int:
    """Choose how many samples a worker takes at a time, from the first one's size."""
    fitting = min(BLOCK_BYTES, options.shard_bytes) // max(1, first.block.nbytes)
    return max(1, min(fitting, 512, -(-count // 16)))


def _spans(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut rows into spans whose ends do not depend on where a run goes on."""
    while start < stop:
        end = min(stop, (start // step + 1) * step)
        yield start, end
        start = end


class _Bar(tqdm):  # type: ignore[misc]
    """A progress bar that no other process can hold up.

    tqdm's own lock is shared with forked processes: one that is killed while it holds
    the lock would hang every other that packs.
    """

    _lock = threading.RLock()
    monitor_interval = 0


def _bar(done: int, total: int, path: Path) -> Any:
    return _Bar(
        total=total, initial=done, desc=f"packing {path.name}", unit=" samples",
        disable=None, smoothing=0.1,
    )  # fmt: skip


def _size(nbytes: int) -> str:
    from loaderkit.units import format_bytes

    return format_bytes(nbytes)


_LIBRARIES = ("loaderkit", "torch", "torch-geometric", "numpy", "h5py")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
