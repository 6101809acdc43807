"""Variables of other libraries: what is said of them is what those libraries do."""

import json
import os
import random
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


THREADS_ASKED = """
import ctypes, json, os, sys
for value in json.load(sys.stdin):
    # A child for each: the library reads the variable while it is loaded.
    read, write = os.pipe()
    if os.fork() == 0:
        os.environ["OMP_NUM_THREADS"] = value
        os.dup2(write, 2)
        library = ctypes.CDLL(sys.argv[1])
        os.write(2, f"\\n{library.omp_get_max_threads()}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print(json.dumps(pipe.read()))
"""


def numbers_of_threads(count, seed):
    """Values of OMP_NUM_THREADS as people write and mistype them."""
    r = random.Random(seed)
    parts = ["1", "2", "3", "03", "0", "-1", "+3", "9223372036854775807", "1e1", "0x4"]
    parts += ["2.0", "\uff12", "\u0662", "", "many", "'2'", '"2"', "2;", "1_0", "true"]
    blanks = ["", "", "", " ", "\t", "\n", "\u00a0", "\ufeff"]
    for _ in range(count):
        listed = [r.choice(parts) for _ in range(r.choice([1, 1, 1, 2, 3]))]
        text = r.choice([",", ",", ", ", " ", ";"]).join(listed)
        yield r.choice(blanks) + text + r.choice(blanks)


@pytest.mark.slow
def test_openmp_reads_a_number_of_threads_as_is_said(libgomp):
    values = [*numbers_of_threads(100, seed=1), "3,", "1.5", "4 2", " 3 ", "5,2"]

    done = subprocess.run(
        [sys.executable, "-c", THREADS_ASKED, str(libgomp)],
        input=json.dumps(values),
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=True,
    )

    answers = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = []
    for value, answer in zip(values, answers, strict=True):
        complaint, _, threads = answer.rpartition("\n")
        is_ignored, said = "Invalid value" in complaint, openmp_threads(value)
        # It keeps an int of 32 bits, whatever it has read.
        kept = said is None or (said - int(threads)) % 2**32 == 0
        if (said is None) != is_ignored or not kept:
            wrong.append((value, said, answer))
    assert wrong == []


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two processors",
)
def test_openmp_ties_the_thread_that_workers_are_forked_from(libgomp):
    (_, before, after), _ = _ask_openmp(libgomp, OMP_PROC_BIND="true")
    (_, _, free), _ = _ask_openmp(libgomp, OMP_PROC_BIND="false")

    assert (before, after, free) == (before, 1, before)
