"""What a process does to caches in a folder, to be run where system calls fail.

Each job is a frozen dataclass with ``path``, the folder that it writes, and ``run``;
it travels to another process as JSON (``as_json``, ``job_from_json``).
"""

from __future__ import annotations

import gc
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

COUNT = 16
"""Samples of a run: four shards."""
SHARD_BYTES = 300_000


@dataclass(frozen=True)
class Pack:
    """One run of ``pack``."""

    path: str
    workers: int = 0
    compression: str | None = None
    factor: int = 1
    """Decides the values of the samples."""
    count: int = COUNT
    overwrite: bool = True
    raw: str = ""
    """Read the samples from the files of this folder."""
    spans: int = 0
    """Pack a stream of so many spans; 0 packs by number."""
    pool: int = 0
    """So many processes of a pool that a function makes; 0 for ``workers``."""
    reads_around_us: bool = False
    """Open a file below the folder in a way that no error of ours covers: a plant."""

    def run(self) -> None:
        """Pack, in this process."""
        from loaderkit import pack

        if self.reads_around_us:
            planted = Path(self.path).parent / "planted"
            planted.write_text("")
        spans = {"spans": self.spans} if self.spans else {}
        who = {"workers": self.workers}
        if self.pool:
            who = {"executor": lambda: ProcessPoolExecutor(self.pool)}
        pack(
            source_of(self),
            self.path,
            **spans,
            **who,
            compression=self.compression,
            shard_bytes=SHARD_BYTES,
            overwrite=self.overwrite,
        )


@dataclass(frozen=True)
class Extend:
    """One run of ``extend``."""

    path: str
    factor: int = 2
    workers: int = 0
    spans: int = 0
    count: int = COUNT

    def run(self) -> None:
        """Extend, in this process."""
        from loaderkit import extend

        more = Pack("", factor=self.factor, spans=self.spans, count=self.count)
        spans = {"spans": self.spans} if self.spans else {}
        extend(
            self.path,
            source_of(more),
            **spans,
            workers=self.workers,
            shard_bytes=SHARD_BYTES,
        )


@dataclass(frozen=True)
class Concat:
    """One run of ``concat``."""

    path: str
    caches: tuple[str, ...]
    overwrite: bool = True

    def run(self) -> None:
        """Join the caches, in this process."""
        from loaderkit import concat

        concat(self.caches, self.path, overwrite=self.overwrite)


def url_of(store: str) -> str:
    """The URL of a store, which is named by it or by its folder."""
    return store if "://" in store else f"file://{store}"


@dataclass(frozen=True)
class Push:
    """One run of ``push``."""

    path: str
    """The store's folder, or its URL."""
    cache: str
    overwrite: bool = False
    options: dict[str, str] | None = None
    """The ``storage_options``."""

    def run(self) -> None:
        """Push, in this process."""
        from loaderkit import push

        push(
            self.cache,
            url_of(self.path),
            overwrite=self.overwrite,
            storage_options=self.options,
        )


@dataclass(frozen=True)
class PackToStore:
    """One run of ``pack`` to a store."""

    path: str
    """The store's folder, or its URL."""
    mirror: str
    factor: int = 1
    overwrite: bool = False
    options: dict[str, str] | None = None
    count: int = COUNT
    shard_bytes: int = SHARD_BYTES
    times: int = 1
    """Samples are so many times as large as those of other jobs."""

    def run(self) -> None:
        """Pack, in this process."""
        from loaderkit import pack

        pack(
            samples(self.count, self.factor, self.times),
            url_of(self.path),
            workers=0,
            shard_bytes=self.shard_bytes,
            overwrite=self.overwrite,
            mirror=self.mirror,
            storage_options=self.options,
        )


@dataclass(frozen=True)
class Pull:
    """One run of ``pull``."""

    path: str
    store: str
    """Its folder, or its URL."""
    options: dict[str, str] | None = None

    def run(self) -> None:
        """Pull, in this process."""
        from loaderkit import pull

        pull(url_of(self.store), self.path, storage_options=self.options)


@dataclass(frozen=True)
class ReadMirrored:
    """All samples of a cache in a store, read in order through a mirror."""

    path: str
    """The mirror's folder."""
    url: str
    mirror_bytes: int | None = None
    options: dict[str, str] | None = None
    count: int = COUNT
    times: int = 1

    def run(self) -> None:
        """Read, in this process."""
        from loaderkit import open_cache
        from loaderkit.testing import assert_same

        dataset = open_cache(
            self.url,
            mirror=self.path,
            mirror_bytes=self.mirror_bytes,
            storage_options=self.options,
        )
        rows = [dataset[row] for row in range(len(dataset))]
        assert_same(rows, samples(self.count, 1, self.times))
        del dataset
        # Leases end with what holds them; a process that ends by os._exit skips that.
        gc.collect()


Job = Pack | Extend | Concat | Push | PackToStore | Pull | ReadMirrored
_JOBS = {job.__name__: job for job in Job.__args__}


def as_json(job: Job) -> str:
    """Write a job on one line."""
    return json.dumps([type(job).__name__, asdict(job)])


def job_from_json(line: str) -> Job:
    """Read what ``as_json`` has written."""
    name, fields = json.loads(line)
    return _JOBS[name](**fields)


def moved(job: Job, source: os.PathLike[str], target: os.PathLike[str]) -> Job:
    """The same job, with its files below another folder."""
    before, after = f"{os.fspath(source)}/", f"{os.fspath(target)}/"
    return job_from_json(as_json(job).replace(before, after))


def sample_values(row, factor, times=1):
    """What a sample holds: 80 KB, so that the blocks of workers wait in files."""
    import numpy as np

    chance = np.random.default_rng(row * 1000 + factor)
    # Large ones have numbers that a cache keeps in eight bytes.
    high = 50 if times == 1 else 1 << 60
    return {
        "x": chance.integers(0, high, (times * (2500 + 10 * row), 4)) * factor,
        "y": chance.random(row % 3),
        "name": f"sample {row} of run {factor}",
    }


def samples(count, factor, times=1):
    """Samples as they are packed."""
    import torch

    whole = []
    for row in range(count):
        sample = sample_values(row, factor, times)
        arrays = {name: torch.tensor(sample[name]) for name in ("x", "y")}
        whole.append({**arrays, "name": sample["name"]})
    return whole


def source_of(pack):
    """What a run packs."""
    if pack.spans:
        return Spans(pack.count, pack.factor)
    if not pack.raw:
        return samples(pack.count, pack.factor)
    import torch

    from loaderkit import SafeDataset

    class FromFiles(SafeDataset):
        def keys(self):
            return sorted(file.name for file in self.raw.iterdir())

        def load(self, key):
            return torch.load(self.raw / key)

    return FromFiles(pack.raw)


class Spans:
    """The samples of a run as a stream.

    Some of each span are built in a way that no other span has, so that shards are
    numbered again.
    """

    def __init__(self, count, factor):
        self.count, self.factor = count, factor

    def __call__(self, span, spans):
        for row in range(span, self.count, spans):
            [sample] = samples(row + 1, self.factor)[row:]
            if row % 3 == 0:
                sample[f"only in span {span}"] = span
            yield sample


def samples_in_order(pack):
    """The samples of a stream, span by span."""
    source = Spans(pack.count, pack.factor)
    return [sample for n in range(pack.spans) for sample in source(n, pack.spans)]


def write_raw(folder, count, factor):
    """Write the samples to a folder that ``Pack.raw`` names."""
    import torch

    folder.mkdir()
    for row, sample in enumerate(samples(count, factor)):
        torch.save(sample, folder / f"{row:03}.pt")
