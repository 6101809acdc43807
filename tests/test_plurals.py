"""What results print of one thing is in the singular: a law over all their texts."""

import itertools
import re

import pytest
import torch

import loaderkit
from loaderkit import (
    LeakDetector,
    MemoryMeter,
    MicroBatcher,
    build_loader,
    estimate_step,
    inspect_cache,
    pack,
    plan_batch,
    release,
    verify,
)
from loaderkit.units import count_of

# "1 s" is a second, and "in 1 less" or "1 axis" no plurals.
PLURAL_OF_ONE = re.compile(
    r"(?<![\w.,:-])1 (?:more )?(?!axis|less|is|was|as|us|ms|process\b)\w{2,}s\b"
)
OF_SEVERAL = re.compile(
    r"(?<![\w.,])(?:[2-9]|[1-9][\d,]*\d) (?:sample|batch|epoch|shard)\b"
)


def mistakes(text):
    return PLURAL_OF_ONE.findall(text) + OF_SEVERAL.findall(text)


def test_the_law_finds_what_is_planted():
    assert mistakes("1 samples, at most")
    assert mistakes("in 1 batches of")
    assert mistakes("21 samples, 1.1 batches, 1 s, 1 batch a epoch") == []
    assert mistakes("5 batch")


@pytest.mark.parametrize("number", [0, 1, 2, 1000])
@pytest.mark.parametrize(
    "plural", ["samples", "batches", "processes", "entries", "boxes", "more modules"]
)
def test_a_count_agrees_with_its_noun(number, plural):
    text = count_of(number, plural)

    assert text.endswith(plural) == (number != 1)
    assert not mistakes(text)


OPTIONS = [
    {"batch_size": size, "shuffle": shuffle, "num_workers": workers, **ranks}
    for size, shuffle, workers, ranks in itertools.product(
        (1, 2), (False, True), (0, 1), ({}, {"rank": 0, "world_size": 1})
    )
] + [
    {"max_tokens": 1},
    {"max_bytes": 1, "oversized": "alone"},
    {"max_tokens": 3, "bucket_by": "tokens", "buckets": 1},
    {"batch_size": 1, "shuffle": "block"},
    {"batch_size": 1, "drop_last": True, "rank": 0, "world_size": 2},
]


@pytest.mark.many_cases
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_plans_of_loaders_say_one_batch(tmp_path, samples, options):
    rows = pack([{"x": torch.ones(1)}] * samples, tmp_path / "a.lk", workers=0)
    if samples == 1 and options.get("world_size") == 2:
        samples = 2  # a rank would have nothing
        rows = pack([{"x": torch.ones(1)}] * 2, tmp_path / "b.lk", workers=0)

    plan = build_loader(rows, probe=False, **options).plan

    assert not mistakes(str(plan)), str(plan)
    assert not mistakes(plan._repr_html_())


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2])
def test_plans_of_batches_say_one_sample(batch_size):
    model = torch.nn.Linear(4, 1)
    samples = [torch.ones(4)] * batch_size

    for limit in ("1 GiB", "1 KB"):
        plan = plan_batch(
            model, samples, "cuda", limit=limit, batch_size=batch_size, epochs=1
        )
        assert not mistakes(str(plan)), str(plan)
        assert not mistakes(plan._repr_html_())


@pytest.mark.slow
def test_results_of_one_say_so(tmp_path):
    rows = pack([{"x": torch.ones(1)}], tmp_path / "a.lk", workers=0)
    model = torch.nn.Linear(1, 1)
    trainer = MicroBatcher(model, torch.optim.SGD(model.parameters(), lr=0.1))
    detector = LeakDetector("cpu", on_leak=id)
    detector.start()
    detector.end_epoch()
    with MemoryMeter("cpu", log=None) as meter:
        meter.mark("one")

    results = [
        rows,
        rows.sizes(),
        inspect_cache(rows.cache),
        verify(rows.cache),
        trainer.step(torch.ones(1, 1)),
        detector.report(),
        estimate_step(model, torch.ones(1, 1)),
        meter.timeline,
        release(),
        loaderkit.read_memory("cpu"),
    ]

    for result in results:
        assert not mistakes(str(result)), str(result)
