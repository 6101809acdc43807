"""Estimates of many steps against the profiler, at several sizes and thread counts.

``pytest tests/soak/estimates.py -s`` prints a line a step, and a summary at the end.
"""

import statistics

import pytest
import torch
from generated import NAMES, make_step

from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.measure import measure_step

ERRORS: dict[str, float] = {}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scale", [1, 3, 16])
@pytest.mark.parametrize("name", NAMES)
def test_the_profilers_peak_is_in_the_interval(name, scale, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model, batch, step = make_step(name, scale)
        found = estimate(model, batch, step)
        truth = max(measure_step(model, batch, step).values())
    finally:
        torch.set_num_threads(before)

    error = found.peak / truth - 1
    ERRORS[f"{name} x {scale}, {threads} threads"] = error
    low, high = found.low / truth - 1, found.high / truth - 1
    print(
        f"\n{name} x {scale}, {threads} threads: {error:+.4%} [{low:+.2%}, {high:+.2%}]"
    )
    assert found.low <= truth <= found.high


def test_the_median_error_is_below_a_thousandth():
    sizes = [abs(error) for error in ERRORS.values()]
    print(
        f"\n{len(sizes)} steps, median {statistics.median(sizes):.5%}, {max(sizes):.1%}"
    )
    assert statistics.median(sizes) < 0.001
