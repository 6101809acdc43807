"""The report as a page: what it draws is what was read."""

import pytest

from loaderkit import LeakDetector
from loaderkit.leaks.growth import Growth
from loaderkit.leaks.report import LeakReport
from loaderkit.leaks.verdict import judge_counters

MIB = 1 << 20
EPOCHS = list(range(31))
SERIES = {
    "malloc": (EPOCHS, [100 * MIB + 3 * MIB * e for e in EPOCHS]),
    "anonymous": (EPOCHS, [200 * MIB + (e % 4) * MIB for e in EPOCHS]),
    "files": (EPOCHS, [7.0] * 31),
}


def leaking_report(**more):
    growth = Growth("graph", "list", "Tensor <128> & more", 10, 3 * MIB)
    settings = {
        "growths": (growth,),
        "limit_bytes": 230 * MIB,
        "epochs_left": 12,
    } | more
    return LeakReport("leaking", 30, 12.3, "cuda:0", judge_counters(SERIES), **settings)


def page_of(report, tmp_path):
    return report.to_html(tmp_path / "page.html").read_text()


def test_only_what_moved_has_a_plot(tmp_path):
    page = page_of(leaking_report(), tmp_path)

    assert page.count("<svg") == 2
    assert "The same all the time, and not drawn: files." in page


def test_what_came_from_the_run_is_escaped(tmp_path):
    page = page_of(leaking_report(), tmp_path)

    assert "Tensor &lt;128&gt; &amp; more" in page
    assert "<128>" not in page


def test_a_limit_is_drawn_where_it_is_near():
    def limits_of(report):
        charts = report.page().sections[1].blocks
        return [len(chart.limits) for chart in charts]

    assert limits_of(leaking_report()) == [1, 0]
    assert limits_of(leaking_report(limit_bytes=230 << 30)) == [0, 0]


def test_the_warm_up_is_grey_and_the_trend_begins_behind_it():
    chart = leaking_report().page().sections[1].blocks[0]
    counter = leaking_report().counters[0]

    begin = counter.epochs[counter.trend.warmup]
    assert [(band.end, band.shaded) for band in chart.bands] == [(begin, True)]
    assert chart.trend.start == pytest.approx((begin, 100 * MIB + 3 * MIB * begin))
    assert chart.trend.end == pytest.approx((30, 190 * MIB))


@pytest.mark.slow
def test_a_steady_report_has_no_list_of_holders(tmp_path):
    report = LeakDetector("cpu").run(lambda: None, epochs=8)

    file = report.to_html(tmp_path / "report.html")

    assert "who holds it" not in file.read_text()
    assert 'header class="good"' in file.read_text()
    assert report.save_json(tmp_path / "report.json").stat().st_size > 1000


def test_the_text_has_at_most_25_lines():
    text = str(leaking_report(notes=("a note",) * 40))

    assert len(text.splitlines()) == 25
