"""Samples a second from an S3 server on this machine, against litdata and streaming.

Run it with ``python -m benchmarks.object_store [--scale 0.1] [--workload w2]``.
Each contestant writes the same samples to moto's server in its own format, in files of
about one size, and reads shuffled epochs of them in a process of its own: one that is
cold, from opening to the last batch with an empty folder on local disk, and three that
are warm, with what the first one left there.  The server shares the processors with
them.  Their memory is watched from outside.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch_geometric.data import Batch, Data

import loaderkit
from benchmarks.harness import (
    MIB,
    PeakSampler,
    Row,
    make_scale_and_save_parser,
    process_tree_bytes,
    report,
)
from benchmarks.workloads import BATCH, COUNTS, count_samples, make_graphs
from loaderkit.memory.process import children_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator

BUCKET = "benchmark"
WORKLOADS = ("w1", "w2", "images")
CAPTIONED_IMAGES = 10_000
IMAGE_SHAPE = (3, 64, 64)
SHARD_BYTES = 8 << 20
TURNS = 3
WARM_EPOCHS = 3


@dataclass(frozen=True)
class Speed:
    """What one process measured itself."""

    cold: float
    """Samples a second of the first epoch, opening the dataset included."""
    warm: float
    """Samples a second of the epochs after it, the median."""
    cold_cpu_s: float
    """Time of the processor that the cold epoch took in the process and its workers."""


@dataclass(frozen=True)
class Reading:
    """What was measured of one process."""

    speed: Speed
    peak_bytes: int
    """Anonymous and shared memory of the process and its workers, at most, above what
    the process had once everything was imported."""


@dataclass(frozen=True)
class Format:
    """A library that keeps samples in a bucket."""

    write: Callable[[list[Any], Path], None]
    """Writes samples to a folder, whose files are then uploaded."""
    open_loader: Callable[[str, Path, int, int], Iterable[Any]]
    """Makes a loader of URL, folder on local disk, batch size and number of workers."""


def main() -> None:
    options = _parse_options()
    formats = dict(_installed_formats())
    with _run_s3_server() as endpoint_url, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # litdata, streaming and s3fs each read other ones of these.
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint_url,
            "S3_ENDPOINT_URL": endpoint_url,
            "AWS_ALLOW_HTTP": "true",
            "XDG_CACHE_HOME": str(folder / "home"),
        }
        for workload in options.workload or WORKLOADS:
            samples = _make_samples(workload, options.scale)
            for format_name, data_format in formats.items():
                written = folder / workload / format_name
                data_format.write(samples, written)
                _upload_folder(written, f"{workload}/{format_name}", endpoint_url)
            for workers in (0, 2):
                readings = _measure_in_turn(formats, workload, workers)
                _report_readings(
                    readings, workload, len(samples), workers, save=options.save
                )


def _parse_options() -> argparse.Namespace:
    parser = make_scale_and_save_parser(__doc__)
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    return parser.parse_args()


def _make_samples(workload: str, scale: float) -> list[Any]:
    if workload in COUNTS:
        count = max(2 * BATCH[workload], round(COUNTS[workload] * scale))
        return make_graphs(workload, count)
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "image": torch.randint(
                256, IMAGE_SHAPE, dtype=torch.uint8, generator=generator
            ),
            "text": f"a picture of the number {number} among others of its kind",
            "label": number,
        }
        for number in range(max(128, round(CAPTIONED_IMAGES * scale)))
    ]


def _measure_in_turn(
    formats: dict[str, Format], workload: str, workers: int
) -> dict[str, list[Reading]]:
    """Let each library read in new processes, turn about."""
    readings: dict[str, list[Reading]] = {name: [] for name in formats}
    for turn in range(TURNS):
        names = list(formats)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with tempfile.TemporaryDirectory() as local_folder:
                try:
                    reading = _measure_process(name, workload, local_folder, workers)
                except EOFError:
                    print(f"{name} failed in turn {turn + 1}, which it has not read")
                else:
                    readings[name].append(reading)
    return readings


def _measure_process(
    name: str, workload: str, local_folder: str, workers: int
) -> Reading:
    """Let a library read in a new process, and watch its memory.

    Raises:
        EOFError: It failed.
    """
    # A pool's workers may not have children; this process may.
    spawn = multiprocessing.get_context("spawn")
    connection, its_connection = spawn.Pipe()
    process = spawn.Process(
        target=_read_epochs,
        args=(its_connection, name, workload, local_folder, workers),
    )
    process.start()
    its_connection.close()
    try:
        connection.recv()
        assert process.pid is not None  # it was started
        bytes_before = process_tree_bytes(process.pid)
        with PeakSampler(process.pid) as sampler:
            connection.send("begin")
            speed = connection.recv()
        connection.send("end")
    finally:
        process.join()
    return Reading(speed, sampler.peak_bytes - bytes_before)


def _read_epochs(
    connection: Any, name: str, workload: str, local_folder: str, workers: int
) -> None:
    """Read one cold epoch and some warm ones, and send the Speed."""
    torch.set_num_threads(1)
    # A process that was spawned would spawn its workers too.
    multiprocessing.set_start_method("fork", force=True)
    formats = dict(_installed_formats())
    connection.send("imported")
    connection.recv()
    epoch_s = []
    cold_cpu_s = 0.0
    cpu_before_s = _cpu_s_of_tree()
    start = time.perf_counter()
    loader = formats[name].open_loader(
        f"s3://{BUCKET}/{workload}/{name}",
        Path(local_folder, "mirror"),
        BATCH.get(workload, 64),
        workers,
    )
    for epoch in range(1 + WARM_EPOCHS):
        samples = sum(count_samples(batch) for batch in loader)
        end = time.perf_counter()
        epoch_s.append(end - start)
        if epoch == 0:
            cold_cpu_s = _cpu_s_of_tree() - cpu_before_s
        start = end
    connection.send(
        Speed(
            cold=samples / epoch_s[0],
            warm=samples / statistics.median(epoch_s[1:]),
            cold_cpu_s=cold_cpu_s,
        )
    )
    # While workers end, a page that was one third of three processes' becomes half of
    # two, and who has read the first one's share already would count too much.
    connection.recv()


def _cpu_s_of_tree() -> float:
    """Say what this process, its workers and those that ended took of the processor."""
    ticks = 0
    for pid in children_of(os.getpid()):
        with contextlib.suppress(OSError):
            # The program's name, in brackets, may hold any letter.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    own = os.times()
    ended_s = own.children_user + own.children_system
    return own.user + own.system + ended_s + ticks / os.sysconf("SC_CLK_TCK")


def _report_readings(
    readings: dict[str, list[Reading]],
    workload: str,
    count: int,
    workers: int,
    *,
    save: bool,
) -> None:
    measures: dict[str, tuple[str, Callable[[Reading], float]]] = {
        "cold": ("samples/s", lambda reading: reading.speed.cold),
        "cold, processor": ("s", lambda reading: reading.speed.cold_cpu_s),
        "warm": ("samples/s", lambda reading: reading.speed.warm),
        "memory": ("MiB", lambda reading: reading.peak_bytes / MIB),
    }
    for measure, (unit, value_of) in measures.items():
        values = {
            name: [value_of(reading) for reading in turns]
            for name, turns in readings.items()
        }
        baseline = statistics.median(values["loaderkit"])
        rows = [
            Row.of_values(name, turns, unit, baseline=baseline)
            for name, turns in values.items()
            if turns
        ]
        title = f"{workload}, {count:,} samples from S3, {workers} workers, {measure}"
        name = measure.replace(", ", "_")
        result = f"object_store_{workload}_{name}_{workers}_workers"
        report(title, rows, save=result if save else None)


def _installed_formats() -> Iterator[tuple[str, Format]]:
    # What each library imports when it is first used would be measured with it.
    import s3fs  # noqa: F401

    for name in ("open_cache", "build_loader"):
        getattr(loaderkit, name)
    with contextlib.suppress(ImportError):
        importlib.import_module("boto3")
    yield "loaderkit", Format(_pack, _open_loaderkit)
    for name, data_format in (
        ("litdata", Format(_write_litdata, _open_litdata)),
        ("streaming", Format(_write_mds, _open_mds)),
    ):
        try:
            __import__(name)
        except ImportError as error:
            print(f"{name} takes no part: {error}")
        else:
            yield name, data_format


def _pack(samples: list[Any], folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    loaderkit.pack(samples, folder, workers=0, shard_bytes=SHARD_BYTES)


def _open_loaderkit(
    url: str, local_folder: Path, batch_size: int, workers: int
) -> Iterable[Any]:
    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    dataset = loaderkit.open_cache(url, storage_options=options, mirror=local_folder)
    return loaderkit.build_loader(
        dataset, batch_size=batch_size, shuffle="block", num_workers=workers, seed=0
    )


def _write_litdata(samples: list[Any], folder: Path) -> None:
    import litdata

    litdata.optimize(
        fn=_as_dict,
        inputs=samples,
        output_dir=str(folder),
        chunk_bytes=SHARD_BYTES,
        num_workers=1,
        verbose=False,
    )


def _as_dict(sample: Data | dict[str, Any]) -> dict[str, Any]:
    # Whole graphs are taken apart field by field, and read at a third of this speed.
    fields: dict[str, Any] = sample if isinstance(sample, dict) else sample.to_dict()
    return fields


def _open_litdata(
    url: str, local_folder: Path, batch_size: int, workers: int
) -> Iterable[Any]:
    import litdata

    local_folder.mkdir()
    dataset = litdata.StreamingDataset(
        url,
        cache_dir=str(local_folder),
        shuffle=True,
        storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
    )
    loader: Iterable[Any] = litdata.StreamingDataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=_join_dicts,
    )
    return loader


def _write_mds(samples: list[Any], folder: Path) -> None:
    import streaming

    encodings = {torch.Tensor: "ndarray", str: "str", int: "int"}
    columns = {
        name: encodings[type(value)] for name, value in _as_dict(samples[0]).items()
    }
    with streaming.MDSWriter(
        out=str(folder), columns=columns, size_limit=SHARD_BYTES
    ) as writer:
        for sample in samples:
            writer.write(
                {
                    name: value.numpy() if isinstance(value, torch.Tensor) else value
                    for name, value in _as_dict(sample).items()
                }
            )


def _open_mds(
    url: str, local_folder: Path, batch_size: int, workers: int
) -> Iterable[Any]:
    import streaming

    # It keeps names in shared memory that a process before may have left.
    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(
        remote=url, local=str(local_folder), shuffle=True, batch_size=batch_size
    )
    return DataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=_join_arrays,
    )


def _join_arrays(samples: list[dict[str, Any]]) -> Any:
    """Join what streaming gives: arrays, which may not be writable."""
    return _join_dicts(
        [
            {
                name: torch.from_numpy(value.copy())
                if isinstance(value, np.ndarray)
                else value
                for name, value in sample.items()
            }
            for sample in samples
        ]
    )


def _join_dicts(samples: list[dict[str, Any]]) -> Any:
    """Join graphs as PyG does, and images with their texts as torch does."""
    if "edge_index" in samples[0]:
        return Batch.from_data_list([Data.from_dict(sample) for sample in samples])
    return torch.utils.data.default_collate(samples)


def _upload_folder(folder: Path, key: str, endpoint_url: str) -> None:
    import s3fs

    store = s3fs.S3FileSystem(endpoint_url=endpoint_url)
    store.put(f"{folder}/", f"{BUCKET}/{key}/", recursive=True)


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
