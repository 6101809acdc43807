"""Samples a second from an S3 server on this machine, against litdata and streaming.

Each contestant writes the same samples to the server in its own format, in files of
about one size, and reads shuffled epochs through a DataLoader without workers: cold,
with an empty folder on local disk, and warm, with what the epoch before left there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

import loaderkit
from benchmarks.harness import measure_rates, parse_scale_and_save, report

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    class ReadEpoch(Protocol):
        """Reads an epoch, and gives the number of its samples."""

        def __call__(self, *, cold: bool) -> int: ...


SAMPLES = 20_000
SAMPLE_SHAPE = (64, 16)
"""Of float32: 4 KiB a sample."""
BATCH = 64
SHARD_BYTES = 8 << 20
BUCKET = "benchmark"
ROUNDS = 3


def main() -> None:
    """Run the benchmark."""
    options = parse_scale_and_save(__doc__)
    count = max(BATCH, int(SAMPLES * options.scale))
    with _run_s3_server() as url, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # litdata, streaming and s3fs each read other ones of these.
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url,
            "S3_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
            "XDG_CACHE_HOME": str(folder / "home"),
        }
        contestants = _make_contestants(folder, count, url)
        for title, cold in (("cold", True), ("warm", False)):
            rows = measure_rates(
                {
                    name: functools.partial(read_epoch, cold=cold)
                    for name, read_epoch in contestants.items()
                },
                rounds=ROUNDS,
            )
            report(
                f"{count:,} samples of 4 KiB from S3, {title}",
                rows,
                save=f"object_store_{title}" if options.save else None,
            )


def _make_contestants(folder: Path, count: int, url: str) -> dict[str, ReadEpoch]:
    contestants = {"loaderkit": _write_with_loaderkit(folder, count, url)}
    for name, write_samples in (
        ("litdata", _write_with_litdata),
        ("streaming", _write_with_streaming),
    ):
        try:
            contestants[name] = write_samples(folder, count, url)
        except ImportError as error:
            print(f"{name} is not installed here: {error}")
    return contestants


def _make_sample(number: int) -> dict[str, Any]:
    generator = np.random.default_rng(number)
    x = generator.standard_normal(SAMPLE_SHAPE).astype(np.float32)
    return {"x": x, "y": number}


def _make_tensors(number: int) -> dict[str, Any]:
    sample = _make_sample(number)
    return {"x": torch.from_numpy(sample["x"]), "y": number}


def _count_samples(loader: Iterable[dict[str, Any]]) -> int:
    return sum(len(batch["y"]) for batch in loader)


def _write_with_loaderkit(folder: Path, count: int, url: str) -> ReadEpoch:
    samples = [_make_tensors(number) for number in range(count)]
    loaderkit.pack(samples, folder / "lk", workers=0, shard_bytes=SHARD_BYTES)
    remote = f"s3://{BUCKET}/lk"
    storage_options = {"endpoint_url": url}
    loaderkit.push(folder / "lk", remote, storage_options=storage_options)
    mirror = folder / "mirror"

    def read_epoch(*, cold: bool) -> int:
        if cold:
            shutil.rmtree(mirror, ignore_errors=True)
        dataset = loaderkit.open_cache(
            remote, storage_options=storage_options, mirror=mirror
        )
        loader = loaderkit.build_loader(
            dataset, batch_size=BATCH, shuffle="block", num_workers=0, seed=0
        )
        return _count_samples(loader)

    return read_epoch


def _write_with_litdata(folder: Path, count: int, url: str) -> ReadEpoch:
    import litdata

    litdata.optimize(
        fn=_make_sample,
        inputs=list(range(count)),
        output_dir=str(folder / "litdata"),
        chunk_bytes=SHARD_BYTES,
        num_workers=1,
    )
    _upload_folder(folder / "litdata", "litdata", url)
    cache = folder / "litdata-cache"

    def read_epoch(*, cold: bool) -> int:
        if cold:
            shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir(exist_ok=True)
        dataset = litdata.StreamingDataset(
            f"s3://{BUCKET}/litdata",
            cache_dir=str(cache),
            shuffle=True,
            storage_options={"endpoint_url": url},
        )
        return _count_samples(litdata.StreamingDataLoader(dataset, batch_size=BATCH))

    return read_epoch


def _write_with_streaming(folder: Path, count: int, url: str) -> ReadEpoch:
    import streaming

    rows, columns = SAMPLE_SHAPE
    with streaming.MDSWriter(
        out=str(folder / "mds"),
        columns={"x": f"ndarray:float32:{rows},{columns}", "y": "int"},
        size_limit=SHARD_BYTES,
    ) as writer:
        for number in range(count):
            writer.write(_make_sample(number))
    _upload_folder(folder / "mds", "mds", url)
    cache = folder / "mds-cache"

    def read_epoch(*, cold: bool) -> int:
        if cold:
            shutil.rmtree(cache, ignore_errors=True)
        # It refuses to open the same remote again in one process otherwise.
        streaming.base.util.clean_stale_shared_memory()
        dataset = streaming.StreamingDataset(
            remote=f"s3://{BUCKET}/mds",
            local=str(cache),
            shuffle=True,
            batch_size=BATCH,
        )
        return _count_samples(DataLoader(dataset, batch_size=BATCH))

    return read_epoch


def _upload_folder(folder: Path, name: str, url: str) -> None:
    import s3fs

    store = s3fs.S3FileSystem(endpoint_url=url)
    store.put(f"{folder}/", f"{BUCKET}/{name}/", recursive=True)


@contextlib.contextmanager
def _run_s3_server() -> Iterator[str]:
    """Run moto's S3 server in a process of its own, with one bucket."""
    # Port 0 is one that is free; moto cannot say which one it would have got.
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _create_bucket(url, process)
        yield url
    finally:
        process.kill()
        process.wait()


def _create_bucket(url: str, server: subprocess.Popen[bytes]) -> None:
    """Make the bucket as soon as the server answers.

    Raises:
        RuntimeError: The server ended instead.
    """
    request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
    while server.poll() is None:
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    msg = f"moto's server ended with {server.returncode}: pip install 'moto[server]'"
    raise RuntimeError(msg)


if __name__ == "__main__":
    main()
