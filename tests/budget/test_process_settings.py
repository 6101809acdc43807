"""Variables of other libraries: what is said of them is what those libraries do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch_settings import clean_environ

from loaderkit.budget.environment import Setting
from loaderkit.budget.process_settings import judge_process_settings, openmp_threads

AFFINITY_LEFT = """
import ctypes, os, sys
before = len(os.sched_getaffinity(0))
library = ctypes.CDLL(sys.argv[1])
print(library.omp_get_max_threads(), before, len(os.sched_getaffinity(0)))
"""


def judged(environ, **facts):
    usual = {
        "torch_version": (2, 13),
        "backend": "cuda",
        "platform": "linux",
        "cpus": 4,
    }
    findings = judge_process_settings(Setting(environ, **usual | facts))
    return [(finding.number, finding.level) for finding in findings]


@pytest.mark.parametrize(
    ("environ", "facts", "expected"),
    [
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, {}, [(18, "slow")]),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}, {}, [(18, "slow")]),
        (
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            {"backend": "cpu"},
            [(18, "useless")],
        ),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, {}, [(19, "slow")]),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, {}, []),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, {"backend": "cpu"}, [(19, "useless")]),
        ({"OMP_NUM_THREADS": "4"}, {}, []),
        ({"OMP_NUM_THREADS": "64"}, {}, [(20, "slow")]),
        ({"OMP_NUM_THREADS": "many"}, {}, [(20, "ignored")]),
        (
            {"OMP_NUM_THREADS": "2"},
            {"torch_imported": True, "started_with": {}},
            [(20, "ignored")],
        ),
        ({"OMP_PROC_BIND": "true"}, {}, [(20, "slow")]),
        ({"OMP_PROC_BIND": "false"}, {}, []),
        ({"MALLOC_ARENA_MAX": "2"}, {}, []),
        ({"MALLOC_ARENA_MAX": "two"}, {}, [(20, "ignored")]),
        ({"MALLOC_ARENA_MAX": "2"}, {"started_with": {}}, [(20, "ignored")]),
        ({"MALLOC_ARENA_MAX": "2"}, {"platform": "darwin"}, [(20, "useless")]),
        (
            {"MALLOC_ARENA_MAX": "2", "LD_PRELOAD": "/usr/lib/libjemalloc.so.2"},
            {},
            [(20, "useless")],
        ),
        ({"MALLOC_CONF": "background_thread:true"}, {}, [(20, "useless")]),
        ({"MALLOC_TRIM_THRESHOLD": "0"}, {}, [(17, "ignored")]),
        ({"PYTORCH_CUDA_ALLOC_CONFIG": "x:1"}, {}, [(17, "ignored")]),
        ({"PYTORCH_CUDA_ALLOCATOR_CONF": "x:1"}, {}, [(17, "ignored")]),
        ({"PYTORCH_MPS_HIGH_WATERMARK_RATO": "1"}, {}, [(17, "ignored")]),
        ({"pytorch_cuda_alloc_conf": "x:1"}, {}, [(17, "ignored")]),
        ({"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTORCH_NPU_ALLOC_CONF": ""}, {}, []),
        ({"OMP_DYNAMIC": "true", "MKL_THREADING_LAYER": "GNU", "HOME": "/"}, {}, []),
    ],
)
def test_a_variable_is_judged(environ, facts, expected):
    assert judged(environ, **facts) == expected


@pytest.fixture(scope="module")
def libgomp():
    import torch

    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    if not found:
        pytest.skip("this torch has no OpenMP library of its own")
    return found[0]


def _ask_openmp(libgomp, **environ):
    done = subprocess.run(
        [sys.executable, "-c", AFFINITY_LEFT, str(libgomp)],
        env=clean_environ(**environ),
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(number) for number in done.stdout.split()], done.stderr


@pytest.mark.slow
def test_openmp_reads_a_number_of_threads_as_is_said(libgomp):
    for value in (
        "4",
        " 3 ",
        "5,2",
        "+3",
        "0",
        "many",
        "-1",
        "1.5",
        "",
        "3,",
        "0x4",
        "4 2",
    ):
        (threads, *_), complaint = _ask_openmp(libgomp, OMP_NUM_THREADS=value)

        expected = openmp_threads(value)
        assert (expected is None) == ("Invalid value" in complaint), value
        assert expected is None or expected == threads


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two processors",
)
def test_openmp_ties_the_thread_that_workers_are_forked_from(libgomp):
    (_, before, after), _ = _ask_openmp(libgomp, OMP_PROC_BIND="true")
    (_, _, free), _ = _ask_openmp(libgomp, OMP_PROC_BIND="false")

    assert (before, after, free) == (before, 1, before)
