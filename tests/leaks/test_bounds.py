"""Containers with a bound: which is known, and what is said while they fill up."""

import asyncio
import collections
import functools
import queue
import sys

import pytest
import torch

from loaderkit import LeakDetector
from loaderkit.leaks.finders.bounds import bound_of, bound_of_cached

BEYOND_ANY_MEMORY = 10**10


class Shelf:
    """Has a number by the name of a bound, and nothing that keeps to it."""

    def __init__(self):
        self.maxsize, self.items = 50, []


def filled(kind, bound):
    """Put 20 items in a container; give it, and what Python has inside of it."""
    if kind == "deque":
        inner = collections.deque(range(20), maxlen=bound)
        return inner, inner
    if kind == "shelf":
        shelf = Shelf()
        shelf.items.extend(range(20))
        return shelf, shelf.items
    kinds = {"queue": queue.Queue, "priority": queue.PriorityQueue}
    kinds |= {"last in": queue.LifoQueue, "asyncio": asyncio.Queue}
    outer = kinds[kind](0 if bound is None else bound)
    for item in range(20):
        outer.put_nowait(item)
    return outer, outer._queue if kind == "asyncio" else outer.queue


@pytest.mark.parametrize("bound", [20, 21, 500, BEYOND_ANY_MEMORY])
@pytest.mark.parametrize("kind", ["deque", "queue", "priority", "last in", "asyncio"])
@pytest.mark.parametrize("rate", [0.25, 1, 7.5])
@pytest.mark.parametrize("asked_for_attributes", [False, True])
def test_a_bound_is_known_with_the_epochs_until_it(
    asked_for_attributes, rate, kind, bound
):
    outer, inner = filled(kind, bound)
    if asked_for_attributes and kind != "deque":
        assert vars(outer)

    found = bound_of(inner, rate)

    assert (found.items, found.most_items) == (20, bound)
    assert found.epochs_left >= 1
    assert (found.epochs_left - 1) * rate < max(bound - 20, 1)
    assert found.epochs_left * rate >= bound - 20


@pytest.mark.parametrize("kind", ["deque", "queue", "asyncio", "shelf"])
def test_where_there_is_none_none_is_named(kind):
    outer, inner = filled(kind, None)

    assert bound_of(inner, 1.0) is None
    assert outer is not None


@pytest.mark.parametrize("maxsize", [None, 30])
def test_the_bound_of_a_cache_is_known_by_its_values(maxsize):
    cached = functools.lru_cache(maxsize=maxsize)(lambda number: torch.ones(number))
    values = [cached(number) for number in range(20)]

    found = bound_of_cached(values[3], 2.0)

    if maxsize is None:
        assert found is None
    else:
        assert (found.items, found.most_items, found.epochs_left) == (20, 30, 5)


def test_a_cache_of_cachetools_is_known_also_by_sizes():
    cachetools = pytest.importorskip("cachetools")
    by_count = cachetools.LRUCache(100)
    by_size = cachetools.LRUCache(1000, getsizeof=len)
    for number in range(20):
        by_count[number] = by_size[number] = "four"

    assert bound_of(_table_of(by_count), 1.0).most_items == 100
    assert bound_of(_table_of(by_size), 1.0).most_items == 250


def _table_of(cache):
    (table,) = (
        value
        for name, value in vars(cache).items()
        if type(value) is dict and name.endswith("data")
    )
    return table


def keeping_in_a_deque(bound):
    ring = collections.deque(maxlen=bound)
    return lambda: ring.extend(torch.ones(10_000) for _ in range(10))


def keeping_in_a_cache(bound):
    cached = functools.lru_cache(maxsize=bound)(lambda number: torch.ones(10_000))
    numbers = iter(range(sys.maxsize))

    def epoch():
        for _ in range(10):
            cached(next(numbers))

    return epoch


@pytest.mark.slow
@pytest.mark.parametrize("keep", [keeping_in_a_deque, keeping_in_a_cache])
@pytest.mark.parametrize(
    ("bound", "verdict"),
    [(BEYOND_ANY_MEMORY, "leaking"), (5_000, "needs more epochs"), (5, "steady")],
)
@pytest.mark.filterwarnings("ignore::loaderkit.errors.NotJudgedWarning")
def test_a_bound_that_does_not_fit_is_a_leak_and_a_full_one_is_steady(
    bound, verdict, keep
):
    report = LeakDetector("cpu", on_leak=id).run(keep(bound), epochs=12)

    assert report.verdict == verdict, report
    if verdict != "steady":
        report_text = " ".join(str(report).split())
        assert f"of {bound:,} now" in report_text
        assert "that are free" in report_text
    if verdict == "leaking":
        assert report.growths[0].pattern == "large bound"
