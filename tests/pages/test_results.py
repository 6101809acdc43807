"""The page of each result shows the result's own numbers."""

import numpy as np
import pytest
import torch

from loaderkit import (
    MemoryMeter,
    build_loader,
    diagnose_oom,
    inspect_cache,
    pack,
    plan_batch,
)
from loaderkit.cli.examination import examine
from loaderkit.datasets.page import histogram_of, size_section
from loaderkit.datasets.sizes import GraphSizes, SampleSizes
from loaderkit.errors import DatasetError
from loaderkit.memory.meter import Mark, Timeline
from loaderkit.memory.reading import MemorySample
from loaderkit.pages.charts import Bars, Curves, HistogramChart, chart_html
from loaderkit.pages.document import Table
from loaderkit.units import format_bytes

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has "
    "a total capacity of 23.69 GiB of which 1.03 GiB is free."
)


def blocks_of(page, kind):
    return [
        block
        for section in page.sections
        for block in section.blocks
        if isinstance(block, kind)
    ]


@pytest.fixture(scope="module")
def plan():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 1))
    samples = torch.utils.data.TensorDataset(torch.zeros(200, 64))
    return plan_batch(model, samples, "cpu", limit="600 KiB", batch_size=100)


@pytest.mark.slow
def test_a_plans_page_draws_the_price_of_each_batch_size(plan):
    chart = blocks_of(plan.page(), Curves)[0]

    sizes = [int(size) for size in chart.x]
    assert sizes[0] == 1
    assert sizes[-1] == 200
    assert 100 in sizes
    assert list(chart.series[0].values) == [
        plan.cost_model.worst_peak(size) for size in sizes
    ]
    assert chart.limits[0].value == plan.limit
    shown = chart.readouts[chart.first_readout]
    largest_fitting = sizes[chart.first_readout]
    assert sizes[chart.first_readout + 1] == largest_fitting + 1
    assert plan.cost_model.worst_peak(largest_fitting) <= plan.limit
    assert "fits" in shown
    assert "does not fit" in chart.readouts[chart.first_readout + 1]


@pytest.mark.slow
def test_a_plans_page_draws_the_peak_with_each_remedy(plan):
    chart = blocks_of(plan.page(), Bars)[0]

    peaks = {bar.name: bar.value for bar in chart.bars}
    assert peaks.pop("as it is") == plan.estimate.peak
    expected = {
        saving.remedy.name: saving.peak
        for saving in plan.savings
        if saving.remedy.cost != "device"
    }
    assert peaks == expected


@pytest.mark.slow
def test_a_diagnosis_draws_the_amounts_of_the_message():
    page = diagnose_oom(MESSAGE).page()

    amounts = {bar.name: bar.text for bar in blocks_of(page, Bars)[0].bars}
    assert amounts == {
        "requested": "2.00 GiB",
        "free": "1.03 GiB",
        "capacity": "23.7 GiB",
        "short of": format_bytes(round(0.97 * 2**30)),
    }
    assert page.mood == "bad"


def test_a_cache_shows_every_field_and_the_spread_of_sizes(tmp_path):
    samples = [{"tokens": torch.arange(n), "label": 1} for n in range(1, 9)]
    pack(samples, tmp_path / "c.lk")

    summary = inspect_cache(tmp_path / "c.lk")

    [table] = blocks_of(summary.page(), Table)
    assert [row[0] for row in table.rows] == [field.name for field in summary.fields]


def test_histograms_count_every_sample_once():
    rng = np.random.default_rng(1)
    for most in (1, 7, 40):
        sizes = rng.integers(3, 90, 500)

        counts, edges = histogram_of(sizes, most)

        assert sum(counts) == 500
        assert len(counts) <= most
        assert all(edge == round(edge) for edge in edges)
        assert edges[0] == sizes.min()
        assert edges[-1] == sizes.max() + 1


def test_sizes_show_what_a_batch_may_hold(tmp_path):
    ten = np.arange(1, 11)
    sizes = GraphSizes(nodes=ten, edges=3 * ten, bytes=100 * ten)

    page = sizes.page(max_nodes=8)

    nodes = page.sections[0]
    assert "A batch of at most 8 nodes holds 1 sample of" in nodes.blocks[1]
    assert "2 samples are larger than that alone" in nodes.blocks[1]
    assert blocks_of(page, HistogramChart)[0].limits[0].value == 8
    assert sizes.to_html(tmp_path / "s.html", max_edges=30).exists()


def test_a_picture_of_sizes_is_of_the_samples_and_not_of_a_tail_or_a_limit():
    sizes = np.append(np.arange(1, 1001) % 50 + 1, 9000)

    section = size_section(sizes, "nodes", most=20_000)

    [chart] = [block for block in section.blocks if isinstance(block, HistogramChart)]
    assert chart.edges[-1] == 51
    assert chart.limits == ()
    assert "1 larger" in chart.label
    assert "the largest 9,000 nodes" in section.blocks[0]
    assert "at most 20,000 nodes holds" in section.blocks[1]
    assert size_section(sizes, "nodes", most=60).blocks[-1].limits[0].value == 60


def test_one_sample_that_is_too_large_is_told_in_the_singular():
    section = size_section(np.array([5, 900]), "nodes", most=10)

    assert section.blocks[1].endswith("; 1 sample is larger than that alone.")


def test_one_size_is_told_as_one_number():
    chart = chart_html(size_section(np.array([21]), "nodes").blocks[-1])

    assert "21 nodes: 1 sample" in chart
    assert "22 nodes" not in chart


def test_a_limit_of_tokens_is_refused_where_there_are_none():
    sizes = SampleSizes(tokens=None, bytes=np.arange(3))

    with pytest.raises(DatasetError, match="max_tokens=9 cannot be drawn"):
        sizes.page(max_tokens=9)


def test_no_sample_at_all_has_a_page_too():
    none = np.zeros(0, np.int64)

    page = GraphSizes(none, none, none).page(max_nodes=5)

    assert "There is no sample." in page.sections[0].blocks


def reading(label, seconds, **values):
    return Mark(label, seconds, MemorySample(seconds, "cpu", values))


def test_a_timeline_draws_each_counter_that_was_always_read():
    marks = (
        reading("before load", 0.0, anonymous=100, resident=9, files=3),
        reading("", 1.0, anonymous=300, resident=9, files=5),
        reading("after load", 2.0, anonymous=200, resident=9, files=3, threads=1),
    )

    together, files = blocks_of(Timeline(marks).page(), Curves)

    values = {series.name: series.values for series in together.series}
    assert values == {"anonymous": (100, 300, 200), "resident": (9, 9, 9)}
    assert [(band.start, band.end, band.label) for band in together.bands] == [
        (0.0, 2.0, "load")
    ]
    assert together.first_readout == 1
    assert files.series[0].values == (3, 5, 3)


@pytest.mark.slow
def test_a_stage_in_every_step_does_not_hide_the_curve():
    marks = [
        reading(f"{side} step", float(2 * step + after), anonymous=10**9 + step)
        for step in range(5000)
        for after, side in enumerate(("before", "after"))
    ]
    timeline = Timeline(tuple(marks))

    page = timeline.page()

    [chart] = blocks_of(page, Curves)
    assert chart.bands == ()
    assert len(chart.x) <= 500
    assert "5,000 stages are not drawn" in page.sections[0].caption
    [table] = blocks_of(page, Table)
    assert [table.rows[0][1], table.rows[-1][1]] == ["0 s", "2.78 h"]
    assert len(table.rows) == 60
    assert "of 10,000" in page.sections[1].blocks[0]
    lines = str(timeline).splitlines()
    assert len(lines) == 42
    assert "9,960 marks" in lines[21]


@pytest.mark.slow
def test_a_long_timeline_keeps_its_peak_and_its_named_marks():
    marks = [reading("", float(i), anonymous=i % 1000) for i in range(20_000)]
    marks[777] = reading("here", 777.0, anonymous=5)
    marks[12_345] = reading("", 12_345.0, anonymous=99_999)

    [chart] = blocks_of(Timeline(tuple(marks)).page(), Curves)

    assert len(chart.x) < 1000
    assert max(chart.series[0].values) == 99_999
    assert any("here" in text for text in chart.readouts)


def test_a_meter_without_marks_has_a_page():
    never_read = MemoryMeter("cpu", log=None).timeline.page()
    assert never_read.sections == ()
    assert "no readings" in never_read.lead[0]


def test_doctor_shows_limits_versions_and_settings():
    page = examine().page()

    headings = [section.heading for section in page.sections]
    assert headings[:2] == ["Settings", "What this process may use"]
    assert "Versions" in headings


def test_a_loaders_plan_accounts_for_memory_and_says_how_long_steps_wait():
    plan = build_loader([torch.zeros(1000)] * 64, batch_size=8).plan

    page = plan.page()

    memory, waiting, settings = page.sections
    parts = {bar.name: bar.value for bar in memory.blocks[0].bars}
    assert parts.pop("together") == sum(parts.values())
    assert parts == dict(plan.forecast.parts)
    [chart] = waiting.blocks
    chosen = next(line for line in chart.series if "chosen" in line.name)
    assert chosen.values[0] == 100
    assert chosen.values[-1] < 100
    assert [row[0] for row in settings.blocks[0].rows] == list(plan.settings())


def test_nothing_is_drawn_of_what_was_not_measured():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([torch.zeros(3)])

    headings = [
        section.heading for section in build_loader(Endless()).plan.page().sections
    ]

    assert headings == ["Account of memory", "Settings"]
