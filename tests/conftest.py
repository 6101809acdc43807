"""Skips by capability, said aloud; and the profile for hypothesis."""

import collections
import functools
import gc
import importlib.util
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path

# Before torch is imported.  With several threads in each process of pytest-xdist, or
# beside other jobs, threads wait for each other and use a processor meanwhile: tests of
# budget took 4 times as much CPU.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some steps are run with two or four threads.  One that waits for the others spins, by
# default, on a processor that the others want: seven families of models took 9.8 s of
# CPU on a busy machine, and 4.3 with threads that sleep meanwhile.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from case_shares import choose_cases
from huge_pages import collapse_pages
from hypothesis import HealthCheck, settings
from quick_run import MOST_CPU_S, MOST_LAW_CPU_S, read_cpu_s, tell_what_is_not_quick

# Importing all tests makes 1.3 million objects, and nearly all of them stay: without
# looks at them in between it takes 11 s of CPU in each process of xdist instead of 15.
gc.disable()

settings.register_profile(
    "house",
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    max_examples=60,
)
settings.load_profile("house")

# Python 3.14 starts workers by forkserver, which takes seconds each time.  What workers
# that are started anew need has tests of its own; TEST_START_METHOD=forkserver runs
# all tests so ("python -m pytest": workers import test files by name).
if "fork" in multiprocessing.get_all_start_methods():
    start_method = os.environ.get("TEST_START_METHOD", "fork")
    multiprocessing.set_start_method(start_method, force=True)

# What needs a process that has run nothing else is forked from a server that has
# imported these, and nothing else: 6 s of CPU once, not for each.
if "forkserver" in multiprocessing.get_all_start_methods():
    multiprocessing.set_forkserver_preload(["__main__", "torch", "torch_geometric"])

# Which files were hashed is remembered in the user's home; tests have one of their own.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="loaderkit-tests-")


def has_cuda():
    import torch

    return torch.cuda.is_available()


def has_two_cpus():
    from loaderkit.memory.host import read_host

    return read_host().cpus > 1


def is_installed(library):
    return importlib.util.find_spec(library) is not None


LIBRARIES = (
    *("IPython", "accelerate", "datasets", "hdf5plugin", "lightning", "sklearn"),
    *("torch_sparse", "transformers", "xdist"),
)
"""Those that tests need by the name that they are imported by."""
CAPABILITIES = {
    **{library: functools.partial(is_installed, library) for library in LIBRARIES},
    "cuda": has_cuda,
    # With one CPU the plan chooses no workers.
    "two CPUs": has_two_cpus,
    "s3": lambda: all(map(is_installed, ("s3fs", "moto", "flask"))),
    "hf": lambda: is_installed("huggingface_hub"),
    "xet": lambda: is_installed("hf_xet"),
    "chromium": lambda: shutil.which("chromium") is not None,
    # of a run that names another browser, that one is there, or the run fails
    "browser": lambda: bool(shutil.which("chromium") or os.environ.get("PAGE_BROWSER")),
    "proc": lambda: Path("/proc/self/status").exists(),
    "cc": lambda: sys.platform == "linux" and shutil.which("cc") is not None,
    "mounts": lambda: os.geteuid() == 0 and os.path.exists("/proc/self/ns/mnt"),  # noqa: PTH110
}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Keep what coverage has seen: xdist kills a worker that takes 10 s to end."""
    # What is garbage is told now.  pytest collects five times more, which took 2 s of
    # CPU among 1.3 million objects that are none.
    gc.collect()
    gc.freeze()
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    coverage = sys.modules.get("coverage")
    running = coverage.Coverage.current() if coverage else None
    if running is not None and hasattr(session.config, "workerinput"):
        running.save()


ROOMS_THAT_SEARCH = {"leaks", "memory"}
"""Folders whose tests look for who holds an object, in all that the collector sees."""
FILES_THAT_SEARCH = ("integrations/test_trainers.py",)
"""The same, by the ends of their paths.  The other trainings of that folder look for
nobody, and trainers collect whenever they begin: a third of their time."""


@pytest.fixture(scope="module", autouse=True)
def _collections_pass_over_what_stays(request):
    """Take what importing all tests, and the tests before, have left out of their way.

    These are 1.3 million objects, and 300,000 more once steps were estimated.  Each
    collection took 0.6 s, and each forked worker that collected copied their pages:
    tests with workers take a third of the time now.
    """
    searches = request.path.parent.name in ROOMS_THAT_SEARCH
    if searches or str(request.path).endswith(FILES_THAT_SEARCH):
        gc.unfreeze()
    else:
        gc.collect()
        gc.freeze()
        if hasattr(request.config, "workerinput"):
            # A process of xdist runs hundreds of tests that fork.
            _collapse_pages_once()


@pytest.fixture(scope="module", autouse=True)
def _environment_as_it_was():
    """Take back what libraries leave in the environment: Lightning's NVML check, say.

    Processes of later tests would read it as if a user had set it.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def own_folder_of_temporary_files(tmp_path_factory, monkeypatch):
    """Have temporary files apart from those of other processes of the machine."""
    # A short name: workers make sockets in it, whose paths may have 107 bytes.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))


@functools.cache
def _collapse_pages_once():
    collapse_pages()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    # In xdist's controller too, which collects no tests.
    gc.enable()


LONG_FILES = (
    "cli/test_watch.py",
    "leaks/test_cases.py",
    "tests/test_examples.py",
    "tests/test_platforms.py",
)
"""Ends of the paths of files with tests that take 10 s or longer."""


def begin_shares_with_long_tests(items, process_count):
    """Order tests so that none which takes long is left for the end of a run.

    pytest-xdist first deals out shares of as many tests, in their order; a process that
    is done takes over what another has not begun.  Where a long test comes last, all
    the others wait for it.
    """
    long_tests = [item for item in items if str(item.path).endswith(LONG_FILES)]
    others = [item for item in items if not str(item.path).endswith(LONG_FILES)]
    ordered = []
    for number in range(process_count):
        begin, end = (
            len(others) * place // process_count for place in (number, number + 1)
        )
        ordered += long_tests[number::process_count] + others[begin:end]
    return ordered


MEMORY_FOLDER = Path("/dev/shm")
ENOUGH_BYTES = 4 << 30
"""Of memory for the folders of tests.  Chosen: tests of datasets, caches and loaders
were seen to fill 60 MB."""


def is_quick(config):
    """Whether this is the quick run, as people write it."""
    return config.option.markexpr == "not slow"


def pytest_configure(config):
    """Put the folders of tests into memory, where that is asked for and there is room.

    A quick run asks for it too.

    On a disk a pack of five samples takes 40 ms, two thirds of which it waits for
    fsync, and in memory 15.
    """
    if (
        (config.getoption("in_memory") or is_quick(config))
        and MEMORY_FOLDER.is_dir()
        and shutil.disk_usage(MEMORY_FOLDER).free > ENOUGH_BYTES
    ):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY_FOLDER))


SHARE_OF_CASES = 4
"""Of a law's many cases one in so many is quick, unless the mark gives a number; of
long cases one in so many runs, or more where not every row of a product of lists would
be among them."""


def pytest_addoption(parser):
    parser.addoption(
        "--in-memory",
        action="store_true",
        help="have the folders of tests in /dev/shm and not on a disk",
    )
    parser.addoption(
        "--every-case",
        action="store_true",
        help="run all cases of the laws whose cases take long, and not a quarter",
    )


@pytest.fixture
def every_case(request):
    """Whether laws that draw their cases in a loop draw all of them, or a part."""
    return request.config.getoption("every_case")


def laws_marked(mark, items):
    """Gather the cases of each law that has a mark."""
    laws = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker(mark):
            laws[item.path, item.originalname].append(item)
    return laws.values()


def leave_out_long_cases(config, items):
    """Take a share of the long cases of each law; pytest counts the others."""
    left_out = set()
    for cases in laws_marked("long_cases", items):
        count = -(-len(cases) // SHARE_OF_CASES)
        left_out.update(set(cases) - set(choose_cases(cases, count)))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def mark_all_but_quick_cases(items):
    """Have so many cases of each law in a quick run as its mark says, or a quarter."""
    for cases in laws_marked("many_cases", items):
        mark = cases[0].get_closest_marker("many_cases")
        count = mark.kwargs.get("quick", -(-len(cases) // SHARE_OF_CASES))
        # Each row of each list is in one of the first, as far as the number goes.
        quick = set(choose_cases(cases, count)[:count])
        for case in cases:
            if case not in quick:
                case.add_marker(pytest.mark.slow)


# before pytest leaves out what -m does not choose
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if not config.getoption("every_case"):
        leave_out_long_cases(config, items)
    if hasattr(config, "workerinput"):
        process_count = config.workerinput["workercount"]
        items[:] = begin_shares_with_long_tests(items, process_count)
    mark_all_but_quick_cases(items)
    addressed = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addressed:
        # Processes of xdist that disagree on a name run nothing.
        msg = f"give these cases ids; an address differs in each process: {addressed}"
        raise pytest.UsageError(msg)
    for item in items:
        for mark in item.iter_markers("needs"):
            capability = mark.args[0]
            if capability not in CAPABILITIES:
                msg = f"{item.nodeid} needs {capability!r}: add a library to "
                msg += "LIBRARIES, or else a row to CAPABILITIES, of tests/conftest.py"
                raise pytest.UsageError(msg)
            if not CAPABILITIES[capability]():
                reason = f"this machine lacks {capability}"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Note what a test uses of processors; it travels with the test's report."""
    before_s, modules_before = read_cpu_s(), len(sys.modules)
    try:
        return (yield)
    finally:
        # Whoever imports a library first pays for all that use it after.
        if len(sys.modules) - modules_before < MANY_MODULES:
            item.user_properties.append(("cpu_s", read_cpu_s() - before_s))


MANY_MODULES = 20
"""Modules that a test imports for the next ones too.  Chosen: a library has hundreds,
and a test of its own modules imports a few."""


def pytest_terminal_summary(terminalreporter, config):
    """Tell which tests of a quick run take too long, and what to do."""
    if not is_quick(config):
        return
    reports = terminalreporter.stats.get("passed", ())
    cpu_s = {
        report.nodeid: seconds
        for report in reports
        for name, seconds in report.user_properties
        if name == "cpu_s"
    }
    lines = tell_what_is_not_quick(cpu_s)
    if lines:
        terminalreporter.section("not quick, by time of processors")
        for line in lines:
            terminalreporter.line(line)
        terminalreporter.line(
            f"On an idle machine a quick test takes {MOST_CPU_S} s and the quick cases "
            f"of a law {MOST_LAW_CPU_S} s: mark it slow, or many_cases(quick=NUMBER)"
        )
