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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.harness import rates, report, scale_and_save
from loaderkit import build_loader, open_cache, pack, push

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ROWS, _COLUMNS, _BATCH = 64, 16, 64
_SHARD_BYTES = 8 << 20
_BUCKET = "benchmark"


def main() -> None:
    """Run the benchmark."""
    options = scale_and_save(__doc__)
    count = max(_BATCH, int(20_000 * options.scale))
    with _s3_server() as url, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url,
            "S3_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
            "XDG_CACHE_HOME": str(folder / "home"),
        }
        contestants = dict(_contestants(folder, count, url))
        cold = {n: functools.partial(r, cold=True) for n, r in contestants.items()}
        warm = {n: functools.partial(r, cold=False) for n, r in contestants.items()}
        for title, runs in (("cold", cold), ("warm", warm)):
            rows = rates(runs, rounds=3)
            report(
                f"{count:,} samples of 4 KiB from S3, {title}",
                rows,
                save=f"object_store_{title}" if options.save else None,
            )


def _contestants(
    folder: Path, count: int, url: str
) -> Iterator[tuple[str, Callable[..., int]]]:
    yield "loaderkit", _loaderkit(folder, count, url)
    for name, make in (("litdata", _litdata), ("streaming", _streaming)):
        try:
            yield name, make(folder, count, url)
        except ImportError as error:
            print(f"{name} is not installed here: {error}")


def _sample(number: int) -> dict[str, Any]:
    generator = np.random.default_rng(number)
    x = generator.standard_normal((_ROWS, _COLUMNS)).astype(np.float32)
    return {"x": x, "y": number}


def _count(loader: Any) -> int:
    return sum(len(batch["y"]) for batch in loader)


def _loaderkit(folder: Path, count: int, url: str) -> Callable[..., int]:
    samples = [_sample(number) for number in range(count)]
    as_tensors = [{"x": torch.from_numpy(s["x"]), "y": s["y"]} for s in samples]
    pack(as_tensors, folder / "lk", workers=0, shard_bytes=_SHARD_BYTES)
    options = {"endpoint_url": url}
    push(folder / "lk", f"s3://{_BUCKET}/lk", storage_options=options)

    def read(*, cold: bool) -> int:
        if cold:
            shutil.rmtree(folder / "mirror", ignore_errors=True)
        dataset = open_cache(
            f"s3://{_BUCKET}/lk", storage_options=options, mirror=folder / "mirror"
        )
        loader = build_loader(
            dataset, batch_size=_BATCH, shuffle="block", num_workers=0, seed=0
        )
        return _count(loader)

    return read


def _litdata(folder: Path, count: int, url: str) -> Callable[..., int]:
    import litdata

    litdata.optimize(
        fn=_sample,
        inputs=list(range(count)),
        output_dir=str(folder / "litdata"),
        chunk_bytes=_SHARD_BYTES,
        num_workers=1,
    )
    _upload(folder / "litdata", "litdata", url)

    def read(*, cold: bool) -> int:
        cache = folder / "litdata-cache"
        if cold:
            shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir(exist_ok=True)
        dataset = litdata.StreamingDataset(
            f"s3://{_BUCKET}/litdata",
            cache_dir=str(cache),
            shuffle=True,
            storage_options={"endpoint_url": url},
        )
        return _count(litdata.StreamingDataLoader(dataset, batch_size=_BATCH))

    return read


def _streaming(folder: Path, count: int, url: str) -> Callable[..., int]:
    import streaming

    shape = f"ndarray:float32:{_ROWS},{_COLUMNS}"
    columns = {"x": shape, "y": "int"}
    with streaming.MDSWriter(
        out=str(folder / "mds"), columns=columns, size_limit=_SHARD_BYTES
    ) as writer:
        for number in range(count):
            writer.write(_sample(number))
    _upload(folder / "mds", "mds", url)

    def read(*, cold: bool) -> int:
        if cold:
            shutil.rmtree(folder / "mds-cache", ignore_errors=True)
        streaming.base.util.clean_stale_shared_memory()
        dataset = streaming.StreamingDataset(
            remote=f"s3://{_BUCKET}/mds",
            local=str(folder / "mds-cache"),
            shuffle=True,
            batch_size=_BATCH,
        )
        return _count(DataLoader(dataset, batch_size=_BATCH))

    return read


def _upload(folder: Path, name: str, url: str) -> None:
    import s3fs

    store = s3fs.S3FileSystem(endpoint_url=url)
    store.put(f"{folder}/", f"{_BUCKET}/{name}/", recursive=True)


@contextlib.contextmanager
def _s3_server() -> Iterator[str]:
    """Run moto's S3 server in a process of its own, with one bucket."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        request = urllib.request.Request(f"{url}/{_BUCKET}", method="PUT")
        while process.poll() is None:
            try:
                urllib.request.urlopen(request, timeout=5).close()
            except OSError:
                time.sleep(0.1)
            else:
                break
        yield url
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
