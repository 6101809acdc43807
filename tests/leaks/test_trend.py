"""Pure: which series of readings are leaks.  A clean family and a leaking twin each."""

import itertools
import math
import random
import statistics

import pytest

from loaderkit.leaks.noise import theil_sen
from loaderkit.leaks.report import LeakReport
from loaderkit.leaks.trend import LEAKING, NEEDS_MORE, STEADY, fit_trend
from loaderkit.leaks.verdict import epochs_until, judge_counters, overall
from loaderkit.memory.counters import WorkerName

FLOOR = 16 << 10
BASE = 10**8
MIB = 1 << 20


def verdict_of(values):
    return fit_trend(values, floor=FLOOR).verdict


def test_growth_that_goes_on_is_a_leak():
    trend = fit_trend([50, 90, 100, 108, 116, 124, 132, 140])

    assert trend.rising
    assert trend.per_epoch == 8
    assert trend.warmup == 1


def test_warm_up_alone_is_none():
    assert fit_trend([50, 90, 100, 100, 100, 100, 100, 100]).verdict == STEADY


def test_a_few_readings_say_nothing():
    trend = fit_trend([1, 2, 3])

    assert trend.verdict == NEEDS_MORE
    assert trend.more_epochs > 0


def test_memory_that_is_given_back_is_no_leak():
    assert verdict_of([BASE - i * MIB for i in range(20)]) == STEADY


def test_growth_below_the_floor_is_not_worth_a_word():
    trend = fit_trend([BASE + i * 2000 for i in range(20)], floor=FLOOR)

    assert trend.verdict == STEADY
    assert "too little" in trend.why


def test_the_warm_up_can_be_said():
    values = [BASE] * 10 + [BASE + i * MIB for i in range(10)]

    assert fit_trend(values, floor=FLOOR, warmup=10).rising


def test_readings_may_be_missing():
    epochs = [0, 1, 2, 5, 9, 10, 14, 20]

    trend = fit_trend([BASE + MIB * e for e in epochs], floor=FLOOR, at=epochs)

    assert trend.rising
    assert trend.per_epoch == MIB


CLEAN = {
    "a ring that fills for two thirds of the run": lambda r, n: [
        BASE + MIB * min(i, n * 2 // 3) for i in range(n)
    ],
    "a late jump": lambda r, n: [
        BASE + (i > n * 0.6) * 20 * MIB + r.gauss(0, 4096) for i in range(n)
    ],
    "two jumps": lambda r, n: [
        BASE + ((i > n * 0.3) + (i > n * 0.7)) * 20 * MIB for i in range(n)
    ],
    "a saw": lambda r, n: [BASE + (i % 5) * MIB + r.gauss(0, 4096) for i in range(n)],
    "noise": lambda r, n: [BASE + r.gauss(0, MIB) for i in range(n)],
    "saturation": lambda r, n: [
        BASE + 50 * MIB * (1 - math.exp(-i / (n / 6))) for i in range(n)
    ],
    "pages": lambda r, n: [BASE + 4096 * r.randrange(3) for i in range(n)],
    "records": lambda r, n: high_water_marks(r, n),
    "spikes": lambda r, n: [
        BASE + (r.random() < 0.15) * r.expovariate(1) * 10 * MIB for i in range(n)
    ],
    "echoing noise": lambda r, n: correlated_noise(r, n),
}


def high_water_marks(r, n):
    """The largest batch so far, as a high-water mark shows it."""
    highest, readings = 0.0, []
    for _ in range(n):
        highest = max(highest, r.random() ** 2)
        readings.append(BASE + highest * 30 * MIB)
    return readings


def correlated_noise(r, n):
    level, readings = 0.0, []
    for _ in range(n):
        level = 0.6 * level + r.gauss(0, MIB)
        readings.append(BASE + level)
    return readings


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN)
def test_no_alarm_in_a_hundred_clean_runs_of_each_kind(name):
    wrong = []
    for seed in range(100):
        r = random.Random(seed)
        values = CLEAN[name](r, r.choice([20, 31, 45, 90]))
        if verdict_of(values) == LEAKING:
            wrong.append(seed)

    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN)
def test_a_leak_planted_in_the_same_runs_is_found(name):
    missed = []
    for seed in range(30):
        r = random.Random(seed)
        values = CLEAN[name](r, 90)
        grown = [value + 4 * MIB * i for i, value in enumerate(values)]
        if verdict_of(grown) != LEAKING:
            missed.append(seed)

    assert not missed


@pytest.mark.slow
def test_a_walk_without_direction_is_hardly_ever_called_a_leak():
    alarms = 0
    for seed in range(300, 500):
        r = random.Random(seed)
        level, values = BASE, []
        for _ in range(31):
            level += r.gauss(0, MIB)
            values.append(level)
        alarms += verdict_of(values) == LEAKING

    # About 1 in 200: a walk of 30 steps can be as straight as a line.
    assert alarms <= 2


def test_a_staircase_that_goes_on_is_a_leak():
    assert verdict_of([BASE + MIB * 4 * (i // 4) for i in range(31)]) == LEAKING


def sawtooth(epochs, leak, period=7, tooth=2_000.0):
    return [tooth * (epoch % period) + leak * epoch for epoch in range(epochs)]


def test_a_saw_that_falls_to_more_each_time_needs_more_epochs_and_then_leaks():
    early = fit_trend(sawtooth(30, leak=80.0), floor=16)
    later = fit_trend(sawtooth(30 + early.more_epochs + 5, leak=80.0), floor=16)

    assert early.verdict == NEEDS_MORE
    assert 30 < early.more_epochs < 45
    assert later.verdict == LEAKING
    assert later.per_epoch == pytest.approx(80)


def test_teeth_that_rise_unevenly_are_no_saw_but_noise_to_be_watched_for_longer():
    def rising(rises):
        levels = list(itertools.accumulate(rises, initial=0))
        return [2_000.0 * (e % 7) + levels[e // 7] for e in range(30)]

    even = fit_trend(rising([560, 560, 560, 560]), floor=16)
    by_half = fit_trend(rising([560, 800, 560, 800]), floor=16)
    by_double = fit_trend(rising([560, 1120, 560, 1120]), floor=16)

    assert even.more_epochs == by_half.more_epochs < 45
    assert by_double.verdict == NEEDS_MORE
    assert by_double.more_epochs > 100


@pytest.mark.parametrize("epochs", [30, 64, 200])
def test_its_twin_that_falls_to_the_same_is_steady(epochs):
    assert fit_trend(sawtooth(epochs, leak=0.0), floor=16).verdict == STEADY


def test_a_leak_that_the_collector_interrupts_once_is_a_leak():
    values = [BASE + MIB * i - 9 * MIB * (i > 9) for i in range(31)]

    assert verdict_of(values) == LEAKING


def test_the_slope_is_given_with_its_doubt():
    r = random.Random(0)

    trend = fit_trend([i * 100 + r.gauss(0, 50) for i in range(40)])

    assert trend.low < 100 < 2 * trend.per_epoch - trend.low
    assert 30 < trend.noise < 80


def test_the_median_slope_does_not_mind_an_outlier():
    assert theil_sen([0, 1, 2, 3], [0, 10, 500, 30]) == 10
    assert theil_sen([0], [1]) == 0


def test_the_worst_counter_decides():
    epochs = list(range(12))
    series = {
        "malloc": (epochs, [BASE + MIB * e for e in epochs]),
        "files": (epochs, [5.0] * 12),
        "file_backed": (epochs, [BASE + MIB * e for e in epochs]),
        WorkerName.of(7): (epochs[:3], [1.0, 2.0, 3.0]),
    }

    trends = judge_counters(series)

    assert [counter.name for counter in trends] == ["malloc", "files"]
    assert overall(trends) == (LEAKING, 0)
    assert trends[0].growth == pytest.approx(10 * MIB)


def test_pages_that_cannot_decide_do_not_count_where_malloc_can():
    epochs = list(range(31))
    noisy = [BASE + 30_000 * e + (e * 7919 % 13) * MIB for e in epochs]
    series = {"malloc": (epochs, [1.0] * 31), "anonymous": (epochs, noisy)}

    assert overall(judge_counters(series))[0] == STEADY


GROWING = [BASE + MIB * e for e in range(31)]
FLAT = [float(BASE)] * 31


@pytest.mark.parametrize(
    ("series", "verdict", "grew"),
    [
        ({"allocated": FLAT, "driver": GROWING}, LEAKING, "driver"),
        ({"allocated": FLAT, "reserved": GROWING}, LEAKING, "reserved"),
        ({"allocated": GROWING, "reserved": GROWING}, LEAKING, "allocated"),
        ({"allocated": FLAT, "reserved": FLAT, "device_used": GROWING}, NEEDS_MORE, ""),
        ({"allocated": FLAT, "reserved": FLAT, "driver": FLAT}, STEADY, ""),
    ],
)
def test_each_figure_of_a_device_is_judged_and_the_one_that_grew_is_said(
    series, verdict, grew
):
    trends = judge_counters(
        {name: (range(31), values) for name, values in series.items()}
    )

    summed_up, more = overall(trends)
    report = LeakReport(summed_up, 30, 1.0, "mps", trends, more_epochs=more)

    assert summed_up == verdict
    assert [counter.name for counter in report.leaks][:1] == ([grew] if grew else [])
    if verdict == NEEDS_MORE:
        assert "or by another process" in str(report)


def test_a_long_run_is_thinned_and_keeps_its_slope():
    epochs = list(range(5000))

    (trend,) = judge_counters(
        {"malloc": (epochs, [BASE + 20_000.0 * e for e in epochs])}
    )

    assert len(trend.values) == 64
    assert trend.trend.per_epoch == pytest.approx(20_000, rel=0.01)


def test_the_epochs_that_are_left():
    assert epochs_until(10 * MIB, MIB) == 10
    assert epochs_until(-5, MIB) == 0
    assert epochs_until(MIB, 0) is None


def test_the_tail_of_students_distribution():
    from loaderkit.leaks.students_t import quantile

    assert quantile(4, 1e-5) == pytest.approx(23.33, rel=1e-3)
    assert quantile(30, 0.01) == pytest.approx(2.457, rel=1e-3)
    assert statistics.NormalDist().inv_cdf(1 - 1e-5) < quantile(200, 1e-5) < 4.5


def test_growth_that_may_be_below_the_tolerance_is_no_growth_of_nothing():
    draw = random.Random(6)
    drawn = [BASE + 4096 * call + 3000 * draw.gauss(0, 1) for call in range(8)]
    trends = judge_counters({"malloc": (range(8), drawn)})
    verdict, more = overall(trends)

    report = LeakReport(verdict, 8, 1.0, "cpu", trends, more_epochs=more, period="call")

    assert report.may_be_tolerated
    assert report.headline.startswith("steady within the tolerance: perhaps ")
    assert "more epochs would tell" in str(report)
    # The twin: the same noise, and nothing that grows.
    flat = [value - 4096 * call for call, value in enumerate(drawn)]
    trends = judge_counters({"malloc": (range(8), flat)})
    report = LeakReport(STEADY, 8, 1.0, "cpu", trends, period="call")
    assert report.headline == "steady: nothing grows from call to call"
