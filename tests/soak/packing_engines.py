"""Packing on real engines; ``tox -e engines`` installs them."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "datasets"))
from failing_calls import files_of
from test_packing_executors import Drawn

from loaderkit import pack

SHARD_BYTES = 3_000
_TESTS = Path(__file__).parents[1]
IMPORTED_FROM = os.pathsep.join(
    str(folder)
    for folder in (
        _TESTS.parent,
        *(_TESTS / name for name in ("datasets", "helpers", "soak")),
    )
)
"""Where workers find the classes of this file, and what it imports."""


class WithoutPythonsRandom(Drawn):
    """Threads of dask draw from Python's ``random`` too, more so when workers die."""

    def __getitem__(self, row):
        sample = super().__getitem__(row)
        del sample["python"]
        return sample


SOURCE = WithoutPythonsRandom(seed=1, count=2_000, rarity=400)


def pack_drawn(path, **options):
    torch.manual_seed(3)
    pack(SOURCE, path, shard_bytes=SHARD_BYTES, **options)
    return files_of(path)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    return pack_drawn(tmp_path_factory.mktemp("wanted") / "c.lk", workers=0)


@pytest.mark.filterwarnings("ignore")
def test_dask_whose_worker_processes_are_killed(tmp_path, wanted):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=3, threads_per_worker=2, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        assert pack_drawn(tmp_path / "a.lk", executor=client.get_executor()) == wanted

        kills, ended = [], threading.Event()

        def kill_workers():
            chance = random.Random(0)
            while not ended.wait(chance.uniform(0.2, 1.0)) and len(kills) < 10:
                workers = [
                    process
                    for process in psutil.Process().children(recursive=True)
                    if "spawn_main" in " ".join(process.cmdline())
                ]
                with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                    victim = chance.choice(workers)
                    victim.kill()
                    kills.append(victim.pid)

        killer = threading.Thread(target=kill_workers)
        killer.start()
        try:
            packed = pack_drawn(tmp_path / "b.lk", executor=client.get_executor())
        finally:
            ended.set()
            killer.join()
    print(f"{len(kills)} worker processes were killed")
    assert packed == wanted
    assert kills


def test_loky_packs_the_same_bytes(tmp_path, wanted):
    loky = pytest.importorskip("loky")

    def make():
        return loky.get_reusable_executor(2)

    assert pack_drawn(tmp_path / "a.lk", executor=make()) == wanted
    assert pack_drawn(tmp_path / "b.lk", executor=make) == wanted


def samples_of_span(span, spans):
    for row in range(span, len(SOURCE), spans):
        sample = SOURCE[row]
        del sample["noise"], sample["numpy"]  # drawn by row, and not by span
        yield sample


@contextlib.contextmanager
def killing(name, chance, most):
    """Kill processes whose command line begins with a name, now and then."""
    kills, ended = [], threading.Event()

    def kill_workers():
        while not ended.wait(chance.uniform(0.1, 0.5)) and len(kills) < most:
            # A process may end while it is looked at.
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                workers = [
                    process
                    for process in psutil.Process().children(recursive=True)
                    if " ".join(process.cmdline()).startswith(name)
                ]
                victim = chance.choice(workers)
                victim.kill()
                kills.append(victim.pid)

    killer = threading.Thread(target=kill_workers)
    killer.start()
    try:
        yield kills
    finally:
        ended.set()
        killer.join()


@pytest.fixture(scope="module")
def ray_executor():
    pytest.importorskip("ray")
    import ray

    from loaderkit.integrations.ray import RayExecutor

    environment = {"PYTHONPATH": IMPORTED_FROM, "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,
        runtime_env={"env_vars": environment},
    )
    yield RayExecutor()
    ray.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_ray_whose_worker_processes_are_killed(tmp_path, wanted, ray_executor):
    assert pack_drawn(tmp_path / "a.lk", executor=ray_executor) == wanted

    with killing("ray::_call", random.Random(0), most=4) as kills:
        packed = pack_drawn(tmp_path / "b.lk", executor=ray_executor)

    print(f"{len(kills)} worker processes were killed")
    assert packed == wanted
    assert kills


@pytest.mark.filterwarnings("ignore")
def test_spans_on_ray_whose_worker_processes_are_killed(tmp_path, ray_executor):
    options = {"spans": 8, "shard_bytes": SHARD_BYTES}
    torch.manual_seed(3)
    pack(samples_of_span, tmp_path / "a.lk", workers=0, **options)

    with killing("ray::_call", random.Random(0), most=2) as kills:
        pack(samples_of_span, tmp_path / "b.lk", executor=ray_executor, **options)

    print(f"{len(kills)} worker processes were killed")
    assert files_of(tmp_path / "b.lk") == files_of(tmp_path / "a.lk")


@pytest.mark.filterwarnings("ignore")
def test_what_is_cancelled_is_not_begun_on_ray(tmp_path, ray_executor):
    futures = [
        ray_executor.submit(lambda n: (tmp_path / str(n)).touch(), number)
        for number in range(200)
    ]
    cancelled = [future.cancel() for future in futures]

    assert ray_executor.submit(abs, -1).result() == 1
    assert any(cancelled)
    assert len(list(tmp_path.iterdir())) < len(futures)


@pytest.mark.filterwarnings("ignore")
def test_a_ray_that_was_shut_down_takes_no_task_and_is_not_started_again(ray_executor):
    """The last of Ray's tests: they share one."""
    import ray

    ray.shutdown()

    with pytest.raises(ConnectionError, match="shutdown"):
        ray_executor.submit(abs, -1)
    assert not ray.is_initialized()


MPI = """
import sys

import torch
from failing_calls import files_of
from mpi4py.futures import MPIPoolExecutor
from packing_engines import SOURCE

from loaderkit import pack

if __name__ == "__main__":
    torch.manual_seed(3)
    with MPIPoolExecutor() as executor:
        pack(SOURCE, sys.argv[1], shard_bytes=3_000, executor=executor)
"""


def run_mpi(tmp_path):
    """Start the packing script on three processes of OpenMPI."""
    script = tmp_path / "script.py"
    script.write_text(MPI)
    mpiexec = ["mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", "3"]
    command = [*mpiexec, sys.executable, "-m", "mpi4py.futures", script]
    variables = {**os.environ, "PYTHONPATH": IMPORTED_FROM}
    return subprocess.Popen([*command, tmp_path / "c.lk"], env=variables)


needs_mpi = pytest.mark.skipif(
    shutil.which("mpiexec") is None, reason="needs mpiexec, of openmpi-bin"
)


@needs_mpi
def test_processes_of_mpi_pack_the_same_bytes(tmp_path, wanted):
    pytest.importorskip("mpi4py")

    assert run_mpi(tmp_path).wait() == 0

    assert files_of(tmp_path / "c.lk") == wanted


@needs_mpi
def test_mpi_whose_process_is_killed_goes_on_when_it_is_started_again(tmp_path, wanted):
    pytest.importorskip("mpi4py")
    run = run_mpi(tmp_path)
    while len(list((tmp_path / "c.lk").glob("*.h5"))) < 3 and run.poll() is None:
        time.sleep(0.01)
    workers = [
        process
        for process in psutil.Process(run.pid).children(recursive=True)
        if "mpi4py.futures" in " ".join(process.cmdline())
    ]
    os.kill(workers[-1].pid, signal.SIGKILL)
    assert run.wait() != 0

    assert run_mpi(tmp_path).wait() == 0

    assert files_of(tmp_path / "c.lk") == wanted
