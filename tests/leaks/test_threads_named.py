"""Threads that stay are named by what they run, their own name, and their line."""

import concurrent.futures
import functools
import threading
import tracemalloc
from pathlib import Path

import pytest

from loaderkit.leaks.finders.resources import kinds_of

HERE = Path(__file__).name
stop = threading.Event()


def wait():
    stop.wait()


class Waiting(threading.Thread):
    def run(self):
        stop.wait()


class Loader:
    """Starts a thread of a method, as a data loader of a user's may."""

    def fill(self):
        stop.wait()

    def __call__(self):
        stop.wait()


def thread_of(target, **options):
    return threading.Thread(target=target, daemon=True, **options)


def line_of(function):
    return function.__code__.co_firstlineno


KINDS = {
    "function": (lambda: thread_of(wait), f"wait ({HERE}:{line_of(wait)})"),
    "partial": (
        lambda: thread_of(functools.partial(functools.partial(wait))),
        f"wait ({HERE}:{line_of(wait)})",
    ),
    "method": (
        lambda: thread_of(Loader().fill),
        f"Loader.fill ({HERE}:{line_of(Loader.fill)})",
    ),
    "callable object": (
        lambda: thread_of(Loader()),
        f"Loader ({HERE}:{line_of(Loader.__call__)})",
    ),
    "subclass": (
        lambda: Waiting(daemon=True),
        f"Waiting.run ({HERE}:{line_of(Waiting.run)})",
    ),
    "timer": (
        lambda: threading.Timer(1_000, wait),
        f"wait ({HERE}:{line_of(wait)})",
    ),
}


@pytest.fixture(autouse=True)
def ended():
    """Let the threads of a test end."""
    stop.clear()
    before = set(threading.enumerate())
    yield
    stop.set()
    for thread in set(threading.enumerate()) - before:
        getattr(thread, "cancel", bool)()
        thread.join()


@pytest.mark.parametrize("name", [None, "prefetch", "reader 7"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_is_named_by_what_it_runs_and_by_its_name(kind, name):
    make, runs = KINDS[kind]
    before = kinds_of("threads")
    for _ in range(2):
        thread = make()
        thread.name = thread.name if name is None else name
        thread.start()

    [(text, count)] = (kinds_of("threads") - before).items()

    called = "" if name is None else f" {name.replace('7', 'N')!r}"
    assert text.split(", made in")[0] == f"thread{called} of {runs}"
    assert count == 2


def test_a_function_without_a_line_is_named_alone():
    lock = threading.Lock()
    with lock:
        thread = threading.Thread(target=lock.acquire, daemon=True)
        thread.start()

        assert any(
            text.startswith("thread of lock.acq") for text in kinds_of("threads")
        )
    thread.join()


def test_threads_of_a_pool_are_called_so():
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        pool.submit(stop.wait)

        assert any("ThreadPoolExecutor-N_N" in text for text in kinds_of("threads"))
        stop.set()


def test_the_line_that_made_a_thread_is_named_where_it_is_traced():
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start(5)
    before = kinds_of("threads")
    line = line_of(lambda: 0) + 1
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()

    [text] = kinds_of("threads") - before

    # Python 3.11 does not tell of any object.
    can_tell = tracemalloc.get_object_traceback(Loader()) is not None
    if not was_tracing:
        tracemalloc.stop()
    assert text.endswith(f", made in {HERE}:{line}" if can_tell else ")")
