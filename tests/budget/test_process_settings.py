"""Variables of other libraries: what is said of them is what those libraries do."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from torch_settings import clean_environ

from loaderkit.budget.environment.allocator_settings import EnvironmentFacts
from loaderkit.budget.environment.native_readers import (
    GLIBC_RANGES,
    MALLOC_TUNABLES,
    OPENMP_FORMS,
    glibc_setting,
    hangs_libgomp,
    is_read_by_libgomp,
    mkl_follows_processors,
    mkl_threads,
    openmp_binding,
    openmp_threads,
    split_tunables,
)
from loaderkit.budget.environment.openmp_places import read_places
from loaderkit.budget.environment.process_settings import judge_process_settings

SET_INSIDE = """
import os, sys
if sys.argv[2] == "before":
    os.environ["OMP_NUM_THREADS"] = sys.argv[1]
import torch
os.environ["OMP_NUM_THREADS"] = sys.argv[1]
import loaderkit
found = [f for f in loaderkit.check_environment().findings if "OMP_" in f.variable]
print(torch.get_num_threads(), any("was set inside" in f.problem for f in found))
"""

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
    findings = judge_process_settings(EnvironmentFacts(environ, **usual | facts))
    for finding in findings:
        assert len(finding.problem) > 20, finding
        assert finding.fix, finding
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
        ({"OMP_NUM_THREADS": "64"}, {"has_mkl": False}, [(20, "slow")]),
        ({"OMP_NUM_THREADS": "64"}, {}, [(20, "useless")]),
        ({"OMP_NUM_THREADS": "64"}, {"machine_cpus": 4}, [(20, "useless")]),
        ({"OMP_NUM_THREADS": "64"}, {"machine_cpus": 8}, [(20, "slow")]),
        ({"OMP_NUM_THREADS": "64", "MKL_DYNAMIC": "FALSE"}, {}, [(20, "slow")]),
        ({"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "2"}, {}, [(20, "ignored")]),
        ({"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}, {}, []),
        ({"MKL_NUM_THREADS": "all"}, {}, [(20, "slow")]),
        ({"MKL_NUM_THREADS": " 4"}, {}, [(20, "slow")]),
        ({"MKL_NUM_THREADS": "0"}, {}, [(20, "ignored")]),
        ({"MKL_NUM_THREADS": "4"}, {"has_mkl": False}, [(20, "useless")]),
        ({"OMP_NUM_THREADS": "many"}, {}, [(20, "ignored")]),
        (
            {"OMP_NUM_THREADS": "2"},
            {"torch_imported": True, "started_with": {}, "torch_threads": 8},
            [(20, "ignored")],
        ),
        # before torch was imported
        ({"OMP_NUM_THREADS": "2"}, {"started_with": {}}, []),
        ({"OMP_NUM_THREADS": "2"}, {"started_with": {}, "torch_threads": 2}, []),
        ({"OMP_PROC_BIND": "true"}, {}, [(20, "slow")]),
        ({"OMP_PROC_BIND": "false"}, {}, []),
        ({"OMP_PROC_BIND": "yes"}, {}, [(20, "ignored")]),
        ({"OMP_PROC_BIND": "false", "OMP_PLACES": "cores"}, {}, []),
        ({"OMP_PLACES": "cores"}, {}, [(20, "slow")]),
        ({"OMP_PLACES": "{0:4}"}, {}, []),
        ({"OMP_PLACES": "core"}, {}, [(20, "ignored")]),
        ({"OMP_PLACES": "{7}"}, {}, [(20, "ignored")]),
        ({"OMP_PLACES": "{7}"}, {"cpu_ids": frozenset({6, 7})}, [(20, "slow")]),
        ({"OMP_PLACES": "core"}, {"openmp": "libiomp5"}, []),
        (
            {"OMP_PLACES": "cores", "GOMP_CPU_AFFINITY": "1"},
            {},
            [(20, "ignored"), (20, "slow")],
        ),
        ({"OMP_THREAD_LIMIT": "2", "OMP_NUM_THREADS": "4"}, {}, [(20, "slow")]),
        ({"OMP_THREAD_LIMIT": "2", "OMP_NUM_THREADS": "2"}, {}, []),
        ({"OMP_THREAD_LIMIT": "0"}, {}, [(20, "ignored")]),
        ({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10k"}, {}, []),
        ({"OMP_WAIT_POLICY": "sleep"}, {}, [(20, "ignored")]),
        ({"OMP_WAIT_POLCY": "passive"}, {}, [(17, "ignored")]),
        ({"KMP_BLOCKTIME": "1"}, {}, [(20, "useless")]),
        # what scikit-learn sets when it is imported, nobody has asked for
        ({"KMP_INIT_AT_FORK": "FALSE"}, {"started_with": {}}, []),
        ({"KMP_DUPLICATE_LIB_OK": "True"}, {"started_with": {}}, []),
        ({"KMP_DUPLICATE_LIB_OK": "1"}, {"started_with": {}}, [(20, "useless")]),
        (
            {"KMP_DUPLICATE_LIB_OK": "True"},
            {"started_with": {"KMP_DUPLICATE_LIB_OK": "True"}},
            [(20, "useless")],
        ),
        ({"KMP_AFFINITY": "granularity=fine"}, {"openmp": "libiomp5"}, []),
        ({"GOMP_CPU_AFFINITY": "0-1"}, {}, [(20, "slow")]),
        ({"GOMP_CPU_AFFINITY": ""}, {}, [(20, "slow")]),
        ({"GOMP_CPU_AFFINITY": "1-0"}, {}, [(20, "ignored")]),
        ({"GOMP_CPU_AFFINITY": "all"}, {}, [(20, "crash")]),
        ({"MALLOC_ARENA_MAX": "2"}, {}, []),
        ({"MALLOC_ARENA_MAX": "two"}, {}, [(20, "ignored")]),
        ({"MALLOC_ARENA_MAX": "0"}, {}, [(20, "ignored")]),
        ({"MALLOC_PERTURB_": "256"}, {}, [(20, "ignored")]),
        ({"MALLOC_TRIM_THRESHOLD_": "128M"}, {}, [(20, "ignored")]),
        ({"MALLOC_ARENA_MAX": "010"}, {}, [(20, "ignored")]),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, {}, []),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_maxx=2"}, {}, [(20, "ignored")]),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=0"}, {}, [(20, "ignored")]),
        ({"GLIBC_TUNABLES": "glibc.malloc.xyzzy=3"}, {}, [(20, "ignored")]),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2,glibc.malloc.perturb=1"},
            {},
            [(20, "ignored")],
        ),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2", "MALLOC_ARENA_MAX": "4"},
            {},
            [(20, "ignored")],
        ),
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

    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    if not libraries:
        pytest.skip("this torch has no OpenMP library of its own")
    return libraries[0]


def _ask_openmp(libgomp, **environ):
    done = subprocess.run(
        [sys.executable, "-c", AFFINITY_LEFT, str(libgomp)],
        env=clean_environ(**environ),
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(number) for number in done.stdout.split()], done.stderr


ASKED = """
import ctypes, json, os, sys
for line in sys.stdin:
    # A child for each: the library reads its variables while it is loaded.
    read, write = os.pipe()
    if os.fork() == 0:
        os.environ.update(json.loads(line))
        os.dup2(write, 2)
        library = ctypes.CDLL(sys.argv[1])
        number = getattr(library, sys.argv[2])()
        left = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        os.write(2, f"\\n{number} {left}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print(json.dumps(pipe.read()), flush=True)
    os.wait()
"""


class Answer(NamedTuple):
    complaint: str
    """What the library wrote to stderr."""
    number: int
    """What its function gave."""
    processors_left: int
    """For the thread that loaded it, and what is forked from it."""


def ask_library(library, function, environs):
    """Load a library with variables, and call a function that gives a number.

    Returns:
        For each what was written to stderr, and the number.
    """
    answers = answers_of_library(library, function, environs)
    return [(answer.complaint, answer.number) for answer in answers]


def answers_of_library(library, function, environs):
    """Load a library with each set of variables, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", ASKED, str(library), function],
        input="".join(json.dumps(environ) + "\n" for environ in environs),
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=True,
    )
    written = [json.loads(line).rpartition("\n") for line in done.stdout.splitlines()]
    return [
        Answer(complaint, *map(int, numbers.split()))
        for complaint, _, numbers in written
    ]


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

    answers = ask_library(
        libgomp,
        "omp_get_max_threads",
        [{"OMP_NUM_THREADS": value} for value in values],
    )

    wrong = []
    for value, (complaint, threads) in zip(values, answers, strict=True):
        is_ignored = "Invalid value" in complaint
        threads_by_rule = openmp_threads(value)
        # It keeps an int of 32 bits, whatever it has read.
        agrees = threads_by_rule is None or (threads_by_rule - threads) % 2**32 == 0
        if (threads_by_rule is None) != is_ignored or not agrees:
            wrong.append((value, threads_by_rule, complaint, threads))
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_what_a_script_sets_is_ignored_where_torch_has_more_threads(moment):
    done = subprocess.run(
        [sys.executable, "-c", SET_INSIDE, "1", moment],
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=True,
    )

    threads, is_called_ignored = done.stdout.split()
    assert (is_called_ignored == "True") == (threads != "1")


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two processors",
)
def test_openmp_ties_the_thread_that_workers_are_forked_from(libgomp):
    (_, before, after), _ = _ask_openmp(libgomp, OMP_PROC_BIND="true")
    (_, _, free), _ = _ask_openmp(libgomp, OMP_PROC_BIND="false")

    assert (before, after, free) == (before, 1, before)


def test_openmp_binds_threads_as_is_said(libgomp):
    values = ["true", "TRUE", " false ", "close", "close,spread", "master", "primary"]
    values += [
        "yes",
        "1",
        "0",
        "",
        "false,true",
        "close,",
        "\uff54rue",
        "spread, close",
    ]

    answers = ask_library(
        libgomp, "omp_get_proc_bind", [{"OMP_PROC_BIND": value} for value in values]
    )

    for value, (complaint, kind) in zip(values, answers, strict=True):
        is_ignored = "Invalid value" in complaint
        assert openmp_binding(value) == (None if is_ignored else kind > 0), value


def places_as_people_write_them(count, seed):
    """Values of OMP_PLACES, right ones and mistyped ones."""
    r = random.Random(seed)
    numbers = ["0", "1", "0", "1", "2", "9", "+1", "", "63", "64", "-1", " 0 ", "a"]
    names = ["cores", "threads", "CORES", "core", "all", "numa_domains", ""]
    counts = ["", "", "(1)", "( 2 )", "(0)", "()", "(a)", "(-1)", "x", " "]
    intervals = ["", "", "", "", ":2", ":2:1", ":2:-1", ":0", ":4", " ", ":2:"]
    for _ in range(count):
        if r.random() < 0.3:
            yield r.choice(names) + r.choice(counts)
            continue
        places = []
        for _ in range(r.choice([1, 1, 2, 3])):
            items = [
                r.choice(["", "", "", "!"]) + r.choice(numbers) + r.choice(intervals)
                for _ in range(r.choice([1, 1, 2]))
            ]
            before = r.choice(["", "", "", "", "!", " "])
            places.append(f"{before}{{{','.join(items)}}}{r.choice(intervals)}")
        yield r.choice([",", ",", ",", ";", " "]).join(places)


@pytest.mark.slow
@pytest.mark.needs("proc")
def test_openmp_ties_threads_to_places_as_is_said(libgomp):
    usable = frozenset(os.sched_getaffinity(0))
    values = list(places_as_people_write_them(250, seed=5))

    answers = answers_of_library(
        libgomp, "omp_get_num_places", [{"OMP_PLACES": value} for value in values]
    )

    wrong = []
    for value, answer in zip(values, answers, strict=True):
        places = read_places(value, usable)
        is_tied = answer.processors_left < len(usable)
        is_judged_right = (places is not None) == (answer.number > 0)
        if places is not None and places.first is not None:
            is_judged_right &= places.holds_back(usable) == is_tied
        if not is_judged_right:
            wrong.append((value, places, answer))
    assert wrong == []
    # both kinds are among them
    assert 20 < sum(answer.number > 0 for answer in answers) < 230


@pytest.mark.needs("proc")
def test_openmp_ties_threads_to_an_affinity_as_doctor_says(libgomp):
    usable = frozenset(os.sched_getaffinity(0))
    values = ["", " ", "0", "1", "9", "0-1", "1-0", "0-", "0-9:2", "0-1:0", "+0", "-1"]
    values += ["1 0", "9 0", "0,1", "0-1:", "0x1", "1,9"]
    environs = [{"GOMP_CPU_AFFINITY": value} for value in values]

    answers = answers_of_library(libgomp, "omp_get_num_places", environs)

    for environ, answer in zip(environs, answers, strict=True):
        levels = judged(environ, cpus=len(usable), cpu_ids=usable)
        is_tied = answer.processors_left < len(usable)
        assert ((20, "slow") in levels) == is_tied, environ


@pytest.mark.slow
def test_openmp_drops_the_values_that_are_said_to_be_dropped(libgomp):
    values = [
        "",
        "0",
        "1",
        "-1",
        "+2",
        " 3 ",
        "1,2",
        "many",
        "10k",
        "10 K",
        "1e3",
        "1t",
    ]
    values += [
        "infinite",
        "Infinity",
        "infinite0",
        "true",
        "FALSE",
        "yes",
        "true0",
        "true ",
    ]
    values += [
        "active",
        "PASSIVE",
        "spin",
        "4M",
        "4MB",
        "4 m",
        "1b",
        "1g",
        "0x10",
        "2.",
    ]
    values += ["99999999999999999999", "4294967296", "18446744073709551615", "\uff11"]
    asked = [(name, value) for name in OPENMP_FORMS for value in values]

    answers = ask_library(
        libgomp, "omp_get_max_threads", [{name: value} for name, value in asked]
    )

    wrong = [
        (name, value, complaint)
        for (name, value), (complaint, _) in zip(asked, answers, strict=True)
        if is_read_by_libgomp(name, value) == (f"variable {name}" in complaint)
    ]
    assert wrong == []


THREADS_THAT_RUN = """
import os
import torch
(torch.ones(2_000_000) * 2).sum()
print(torch.get_num_threads(), len(os.listdir("/proc/self/task")))
"""


@pytest.mark.slow
@pytest.mark.needs("proc")
@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two processors",
)
@pytest.mark.usefixtures("libgomp")
def test_fewer_threads_run_than_torch_tells_under_a_limit():
    reported, running = zip(
        *(
            subprocess.run(
                [sys.executable, "-c", THREADS_THAT_RUN],
                env=clean_environ(OMP_NUM_THREADS="2", OMP_THREAD_LIMIT=limit),
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()
            for limit in ("1", "2")
        ),
        strict=True,
    )

    assert reported == ("2", "2")
    assert int(running[0]) == int(running[1]) - 1


def test_openmp_of_gnu_reads_nothing_of_intels(libgomp):
    environs = [{"KMP_AFFINITY": "foo"}, {"KMP_BLOCKTIME": "foo"}, {}]

    answers = answers_of_library(libgomp, "omp_get_max_threads", environs)

    assert len(set(answers)) == 1


def test_openmp_ends_reading_affinities_that_are_not_said_to_hang(libgomp):
    values = ["0", "0-", "-1", "0-1:", " 0", "0 ", "0x0", "+0", "0-0:0", ",0", "0,,0"]
    values += ["", "9999", "0-0 0", "0\t0"]

    assert not any(map(hangs_libgomp, values))
    environs = [{"GOMP_CPU_AFFINITY": value} for value in values]
    answers = ask_library(libgomp, "omp_get_max_threads", environs)
    assert len(answers) == len(values)


@pytest.fixture(scope="module")
def torch_library():
    import torch

    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.so"))
    if not libraries or not torch.backends.mkl.is_available():
        pytest.skip("this torch has no MKL")
    return libraries[0]


GET_NUM_THREADS = "_ZN2at15get_num_threadsEv"
"""``at::get_num_threads()``, which asks MKL first."""


@pytest.mark.slow
def test_torch_takes_the_threads_that_mkl_is_said_to_read(torch_library):
    # each takes 0.3 s: the library is large
    values = ["3", " 3", "+3", "0", "", "3abc", "99999999999", "\uff13", "2147483648"]
    environs = [
        {"MKL_NUM_THREADS": value, "MKL_DYNAMIC": "FALSE", "OMP_NUM_THREADS": "5"}
        for value in values
    ]

    answers = ask_library(torch_library, GET_NUM_THREADS, environs)

    default = 5
    for value, (_, threads) in zip(values, answers, strict=True):
        threads_by_rule = mkl_threads(value)
        assert threads == (default if threads_by_rule is None else threads_by_rule), (
            value
        )


@pytest.mark.slow
def test_mkl_keeps_to_the_processors_as_is_said(torch_library):
    # Those of the machine, also where this process may use fewer.
    cpus = os.cpu_count()
    values = ["FALSE", "false", "False", "0", " false"]
    environs = [
        {"MKL_NUM_THREADS": str(4 * cpus), "MKL_DYNAMIC": value} for value in values
    ]

    answers = ask_library(torch_library, GET_NUM_THREADS, environs)

    for value, (_, threads) in zip(values, answers, strict=True):
        assert (threads <= cpus) is mkl_follows_processors(value), value


def loader_of_glibc():
    if not sys.platform.startswith("linux"):
        pytest.skip("no glibc here")
    libraries = sorted(Path("/lib64").glob("ld-linux*.so.2"))
    if not libraries:
        pytest.skip("no loader of glibc here")
    return libraries[0]


def tunables_in_effect(**environ):
    """Ask glibc's loader what it has read."""
    listed = subprocess.run(
        [loader_of_glibc(), "--list-tunables"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    pairs = [line.partition(": ") for line in listed.stdout.splitlines()]
    return {name: value.partition(" ")[0] for name, _, value in pairs}


def glibc_values(count, seed):
    """Numbers as people write and mistype them."""
    r = random.Random(seed)
    texts = ["0", "1", "2", "3", "4", "255", "256", "010", "08", "0x10", "0x", "two"]
    texts += ["-1", "+2", "1e3", "128M", "64k", "2 ", " 2", "\t2", "2,3", "'2'", ""]
    texts += ["99999999999999999999", "4294967297", "2147483647", "2147483648", "1_0"]
    for _ in range(count):
        yield r.choice(texts) + r.choice(["", "", "", "x", " ", "0"])


@pytest.mark.skipif(
    os.confstr("CS_GNU_LIBC_VERSION") != "glibc 2.36"
    if hasattr(os, "confstr") and "CS_GNU_LIBC_VERSION" in os.confstr_names
    else True,
    reason="measured on glibc 2.36: others are stricter",
)
def test_glibc_reads_its_settings_as_is_said():
    defaults = tunables_in_effect()
    for value in glibc_values(60, seed=3):
        seen = tunables_in_effect(**dict.fromkeys(GLIBC_RANGES, value))

        for name, (tunable, _, _) in GLIBC_RANGES.items():
            number = glibc_setting(name, value)
            expected = int(defaults[tunable], 0) if number is None else number
            assert int(seen[tunable], 0) == expected, (name, value)


def test_glibc_knows_the_tunables_that_are_said_and_the_variable_wins():
    assert set(MALLOC_TUNABLES) <= set(tunables_in_effect())

    tunables = "glibc.malloc.arena_max=2:foo:glibc.malloc.perturb=3"
    seen = tunables_in_effect(GLIBC_TUNABLES=tunables, MALLOC_ARENA_MAX="4")

    tunable_values = dict(split_tunables(tunables))
    assert int(seen["glibc.malloc.arena_max"], 0) == 2
    perturb = tunable_values["glibc.malloc.perturb"]
    assert int(seen["glibc.malloc.perturb"], 0) == int(perturb)


@pytest.mark.slow
def test_doctor_says_what_keeps_torch_from_being_imported():
    done = subprocess.run(
        [sys.executable, "-m", "loaderkit", "doctor"],
        env=clean_environ(GOMP_CPU_AFFINITY="all"),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode != 0
    assert "GOMP_CPU_AFFINITY=all keeps torch from being imported" in done.stderr
    assert "unset GOMP_CPU_AFFINITY" in done.stderr
