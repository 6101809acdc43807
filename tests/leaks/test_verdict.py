"""Pure: the verdict over a run follows from what was seen, rule by rule."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderkit.leaks.growth import Bound, Growth
from loaderkit.leaks.report import LeakReport
from loaderkit.leaks.trend import LEAKING, NEEDS_MORE, STEADY
from loaderkit.leaks.verdict import (
    Collected,
    RunEvidence,
    decide,
    judge_counters,
    overall,
)
from loaderkit.memory.counters import WorkerName
from loaderkit.memory.holder import Holder
from loaderkit.units import format_bytes

MIB = 1 << 20
EPOCHS = range(31)
HOLDER = Holder("local variable", "kept", "train.py:3 in train", "train.py:7")
KEPT = Growth("kept tensors", "list", "Tensor [9] float32", 10, MIB, HOLDER)
NUMBERS = Growth("numbers", "list", "float", 100, 3_200, HOLDER)
RING = Growth(
    *("bounded", "deque", "Tensor [9] float32", 10, MIB, HOLDER),
    bound=Bound(items=300, most_items=700, epochs_left=40),
)
MOST_FREED = Collected(grown=30 * MIB, left=0.01 * MIB, epochs=29)
SOME_LEFT = Collected(grown=30 * MIB, left=5 * MIB, epochs=29)


def rising_series(*names):
    values = [100 * MIB + MIB * epoch for epoch in EPOCHS]
    return dict.fromkeys(names, (EPOCHS, values))


def flat_series(*names):
    return {name: (EPOCHS, [7.0] * len(EPOCHS)) for name in names}


def evidence_of(series, **more):
    counters = judge_counters(series)
    return RunEvidence(counters, epochs=30, seconds_per_epoch=1.0, **more)


def test_what_is_flat_is_steady():
    assert decide(evidence_of(flat_series("malloc", "files"))).verdict == STEADY


def test_what_grows_and_is_held_leaks():
    decision = decide(evidence_of(rising_series("malloc"), growths=(KEPT,)))

    assert decision.verdict == LEAKING
    assert decision.growths == (KEPT,)
    assert decision.notes == ()


def test_garbage_is_steady_unless_somebody_holds_what_is_left():
    evidence = evidence_of(
        rising_series("malloc"), growths=(KEPT,), collected={"malloc": MOST_FREED}
    )

    assert decide(evidence).verdict == STEADY
    assert decide(evidence).notes == (
        "what had grown was garbage, and is collected now",
    )

    with_leak_beneath = replace(evidence, collected={"malloc": SOME_LEFT})
    assert decide(with_leak_beneath).verdict == LEAKING
    assert decide(replace(with_leak_beneath, growths=())).verdict == STEADY


def test_garbage_excuses_no_other_counter():
    series = rising_series("malloc", "shared")

    decision = decide(
        evidence_of(series, collected={"malloc": MOST_FREED}, growths=(KEPT,))
    )

    assert decision.verdict == LEAKING


def test_a_container_with_a_bound_needs_the_epochs_until_it_is_full():
    decision = decide(evidence_of(rising_series("malloc"), growths=(RING,)))

    assert (decision.verdict, decision.more_epochs) == (NEEDS_MORE, 45)
    assert "deque `kept` has a bound" in decision.notes[0]


@pytest.mark.parametrize("items_each_epoch", [0.5, 10, 4_000])
@pytest.mark.parametrize("item_bytes", [2_048, MIB])
@pytest.mark.parametrize("most_items", [5_000, 10**6])
@pytest.mark.parametrize("share_free", [0.5, 2.0])
def test_a_bound_counts_as_one_if_what_it_takes_is_free(
    share_free, most_items, item_bytes, items_each_epoch
):
    items = 600
    epochs_left = math.ceil((most_items - items) / items_each_epoch)
    ring = replace(
        RING,
        per_epoch=items_each_epoch,
        bytes_per_epoch=round(items_each_epoch * item_bytes),
        bound=Bound(items, most_items, epochs_left),
    )
    more_bytes = (most_items - items) * item_bytes

    # By what an epoch adds, so that the container explains it.
    values = [ring.bytes_per_epoch * epoch for epoch in EPOCHS]
    counters = judge_counters({"malloc": (EPOCHS, values)}, tolerance=512)
    conclusion = decide(
        RunEvidence(
            counters,
            epochs=30,
            seconds_per_epoch=1.0,
            growths=(ring,),
            free_bytes=share_free * more_bytes,
        )
    )

    (note,) = conclusion.notes
    fits = share_free > 1
    assert conclusion.verdict == (NEEDS_MORE if fits else LEAKING)
    assert conclusion.growths[0].pattern == ("bounded" if fits else "large bound")
    assert format_bytes(more_bytes) in note
    growth_text = conclusion.growths[0].text("call")
    assert f"600 items of {most_items:,} now" in growth_text
    assert f"of {format_bytes(most_items * item_bytes)})" in growth_text
    assert f"full in {epochs_left:,} call" in growth_text


@pytest.mark.parametrize("other", ["shared", "allocated", WorkerName.of(7)])
def test_its_bound_excuses_nothing_beside_it(other):
    decision = decide(evidence_of(rising_series("malloc", other), growths=(RING,)))

    assert decision.verdict == LEAKING


def test_a_history_of_numbers_is_steady():
    decision = decide(evidence_of(rising_series("malloc"), growths=(NUMBERS,)))

    assert decision.verdict == STEADY
    assert "nothing: it is small" in decision.notes[0]


@pytest.mark.parametrize(
    "growths",
    [
        (replace(NUMBERS, bytes_per_epoch=2 * MIB),),
        (replace(NUMBERS, per_epoch=20_000.0),),
        (NUMBERS, KEPT),
    ],
)
def test_its_twins_are_leaks(growths):
    decision = decide(evidence_of(rising_series("malloc"), growths=growths))

    assert decision.verdict == LEAKING
    assert decision.growths[0].pattern == "many numbers"


def test_passing_the_limit_is_a_leak_whatever_else_was_seen():
    decision = decide(evidence_of(flat_series("malloc"), is_over_limit=True))

    assert decision.verdict == LEAKING
    assert decision.notes == ("the limit that was set has been passed",)


def test_what_was_left_out_is_said():
    evidence = evidence_of(
        flat_series("malloc"),
        foreign_kinds=("d", "a", "c", "b"),
        rarely_read={"mappings": 3, WorkerName.of(7): 2},
    )

    assert decide(evidence).notes == (
        "files a, b, c and 1 more kind are made by another process: left out",
        "mappings was read after 3 of 30 only: too seldom to be judged",
    )


def test_a_leak_whose_objects_were_not_counted_says_so():
    decision = decide(evidence_of(rising_series("malloc"), objects_counted=False))

    assert decision.verdict == LEAKING
    assert "objects were not counted in time" in decision.notes[0]


@pytest.mark.parametrize(
    ("per_epoch", "words"),
    [
        (1, "keeps 1 Tensor more each epoch"),
        (20.0, "keeps 20 Tensor more each epoch"),
        (7 / 6, "keeps 7 Tensor more in 6 epochs"),
        (13 / 12, "keeps 13 Tensor more in 12 epochs"),
        (0.2, "keeps 1 Tensor more in 5 epochs"),
        (1234.001, "keeps 1,234 Tensor more each epoch"),
        (1e-9, "keeps less than 1 Tensor more each epoch"),
    ],
)
def test_what_is_counted_is_said_in_whole_numbers(per_epoch, words):
    growth = Growth("kept tensors", "list", "Tensor", per_epoch, 3 << 20)

    assert words in str(growth)
    assert "3.00 MiB" in str(growth)
    assert "more open file" in str(replace(growth, what="open files"))


@pytest.mark.parametrize(
    ("what", "one"),
    [
        ("child processes", "1 more child process each epoch"),
        ("threads", "1 more thread each epoch"),
        ("open files", "1 more open file each epoch"),
        ("memory mappings", "1 more memory mapping each epoch"),
    ],
)
def test_one_of_a_resource_is_said_as_one(what, one):
    growth = Growth("files", what, "/dev/null", 1.0, 0)

    assert str(growth).startswith(one)
    assert str(replace(growth, per_epoch=2)).startswith(f"2 more {what} each epoch")


@given(per_epoch=st.floats(1e-9, 1e9))
def test_no_count_has_a_point(per_epoch):
    growth = Growth("kept tensors", "list", "Tensor", per_epoch, 0)

    count = str(growth).partition("keeps ")[2].partition(" Tensor")[0]

    assert count
    assert "." not in count


NUMBERS_OF_ANY_KIND = st.one_of(
    st.floats(-1e12, 1e18), st.sampled_from([math.nan, math.inf, -math.inf])
)


@pytest.mark.slow
@given(
    values=st.lists(NUMBERS_OF_ANY_KIND, max_size=12),
    field=st.sampled_from(["per_epoch", "low", "noise", "detectable"]),
    number=NUMBERS_OF_ANY_KIND,
)
@settings(max_examples=60)
def test_a_report_of_any_numbers_is_json(values, field, number):
    counters = judge_counters({"malloc": (range(len(values)), values)})
    verdict, more = overall(counters)
    counters = [
        replace(counter, trend=replace(counter.trend, **{field: number}))
        for counter in counters
    ]
    report = LeakReport(
        verdict, len(values), 1.0, "cpu", tuple(counters), (), more_epochs=more
    )

    text = json.dumps(report.to_json(), allow_nan=False)

    assert json.loads(text)["verdict"] == verdict
