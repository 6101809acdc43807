"""Which tests of a quick run are not quick: told at its end, and never failed.

A test that failed for its time would fail on a busy machine.
"""

import collections
import os
import time

MOST_CPU_S = 0.1
"""Of a quick test on an idle machine.  Chosen: on two processors 10,000 tests have a
minute, 12 ms each.  Of those up to a quarter of a second, which were quick before, the
600 dearest took a third of the time of all."""
MOST_LAW_CPU_S = 0.2
"""Of the quick cases of a law together.  Chosen: twice what one test may take."""
BUSY = 2
"""Tests are told from this many times the bound on: beside other jobs the same work was
seen to take up to 1.6 times as much time of a processor."""
MOST_LINES = 30


def read_cpu_s():
    """Read what this process and its ended children have used of processors."""
    times = os.times()
    # the clock of this process is finer than the hundredths of os.times
    return time.process_time() + times.children_user + times.children_system


def law_of(name):
    """Name the test function of a case."""
    return name.partition("[")[0]


def tell_what_is_not_quick(cpu_s):
    """Write a line for each test and each law that takes too long.

    Args:
        cpu_s: Seconds of processors by the name of a test.
    """
    laws = collections.defaultdict(list)
    for name, seconds in cpu_s.items():
        laws[law_of(name)].append(seconds)
    lines = {
        f"{seconds:6.2f} s  {name}": seconds
        for name, seconds in cpu_s.items()
        if seconds > BUSY * MOST_CPU_S
    }
    for law, seconds in laws.items():
        if len(seconds) > 1 and sum(seconds) > BUSY * MOST_LAW_CPU_S:
            line = f"{sum(seconds):6.2f} s  {law}, {len(seconds)} cases"
            lines[line] = sum(seconds)
    return sorted(lines, key=lines.__getitem__, reverse=True)[:MOST_LINES]
