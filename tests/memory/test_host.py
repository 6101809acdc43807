"""Limits of a process, read from machines made of files."""

import os

import pytest

from loaderkit.memory.host import read_host

GIB = 1 << 30


def fake_machine(root, files):
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "dev/shm").mkdir(parents=True, exist_ok=True)
    return root


def test_version_2_gives_quota_limit_pressure_and_kills(tmp_path):
    root = fake_machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/step/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/memory.max": str(4 << 20),
            "sys/fs/cgroup/job/memory.current": str(3 << 20),
            "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 524288\n",
            "sys/fs/cgroup/job/step/memory.events": "low 0\noom_kill 2\n",
            "sys/fs/cgroup/job/step/memory.pressure": "some avg10=1.50 avg60=0\n",
        },
    )

    host = read_host(root)

    assert (host.cpus, host.cpus_from) == (1, "cgroup quota")
    assert host.limit_bytes == 4 << 20
    assert (host.available_bytes, host.available_from) == (3 << 19, "cgroup")
    assert host.oom_kills == 2
    assert host.pressure == 1.5


def test_version_1_beside_version_2(tmp_path):
    root = fake_machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/api/task\n3:cpu,cpuacct:/api\n0::/\n",
            "sys/fs/cgroup/memory/api/task/memory.limit_in_bytes": str(8 << 20),
            "sys/fs/cgroup/memory/api/task/memory.usage_in_bytes": str(1 << 20),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
            "sys/fs/cgroup/cpu/api/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu/api/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/api/task/memory.oom_control": "oom_kill 1\n",
        },
    )

    host = read_host(root)

    assert host.cpus == 1
    assert host.cpus_from == "cgroup quota"
    assert host.limit_bytes == 8 << 20
    assert host.available_bytes == 7 << 20
    assert host.oom_kills == 1


def test_a_path_that_is_not_mounted_here_is_looked_for_above(tmp_path):
    root = fake_machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/docker/abc\n",
            "sys/fs/cgroup/memory.max": str(1 << 20),
            "sys/fs/cgroup/memory.current": "0",
        },
    )

    assert read_host(root).limit_bytes == 1 << 20


def test_without_cgroups_the_machine_is_the_limit(tmp_path):
    host = read_host(fake_machine(tmp_path, {"proc/sys/vm/max_map_count": "65530\n"}))

    assert host.limit_bytes is None
    assert host.available_from == "the machine"
    assert host.mappings == 65530
    assert host.oom_kills is None
    assert host.pressure is None


def test_what_is_not_there_is_unknown(tmp_path):
    host = read_host(tmp_path)

    assert host.shm_bytes is None
    assert host.mappings is None


def test_this_machine_can_be_read():
    host = read_host()

    assert 1 <= host.cpus <= os.cpu_count()
    assert host.available_bytes > 0
    assert host.files_open > 0


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("LOCAL_WORLD_SIZE", "local_ranks", 4), ("SLURM_CPUS_PER_TASK", "cpus", 1)],
)
def test_a_launcher_says_how_much_is_ours(monkeypatch, tmp_path, name, field, value):
    monkeypatch.setenv(name, str(value))

    assert getattr(read_host(tmp_path), field) == value
