"""No page has a fault that a strict reader would name, whatever it is about.

What is cut, upon each other, pale, without a unit or not comparable is read from what
the browser has laid out, over results that are drawn by a seed.
"""

from datetime import datetime, timezone

import pytest
from browser import ask_browser, find_faults
from drawn_pages import (
    Draw,
    drawn_diagnosis,
    drawn_estimate,
    drawn_report,
    drawn_results,
    drawn_timeline,
)

from loaderkit.pages.charts import Bar, Bars, Curves, HistogramChart, Limit, Series
from loaderkit.pages.document import Page, Section, page_html
from loaderkit.pages.provenance import Provenance

pytestmark = [pytest.mark.slow, pytest.mark.needs("browser")]

WIDTHS = (400, 700, 1000, 1400)
MADE = Provenance(datetime(2026, 1, 2, tzinfo=timezone.utc), "box", "Linux", ())


def html_of(result):
    page = result if isinstance(result, Page) else result.page()
    return page_html(page, MADE)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pages_of_drawn_results_have_no_fault(tmp_path, seed, dark):
    pages = {kind: html_of(result) for kind, result in drawn_results(seed).items()}

    assert find_faults(pages, tmp_path, widths=WIDTHS, dark=dark) == []


def test_pages_of_extremes_have_no_fault(tmp_path):
    results = {
        "500 epochs": drawn_report(Draw.of(1), epochs=500, growths=12),
        "6 epochs, nothing grows": drawn_report(Draw.of(2), epochs=6, growths=0),
        "200 modules": drawn_estimate(Draw.of(3), modules=200),
        "30 stages of 3,000 readings": drawn_timeline(
            Draw.of(4), readings=3000, stages=30
        ),
        "3 stages of 40": drawn_timeline(Draw.of(5), readings=40, stages=3),
    }

    pages = {name: html_of(result) for name, result in results.items()}

    assert find_faults(pages, tmp_path, widths=WIDTHS) == []


NOTEBOOK = """<!doctype html><meta charset="utf-8"><style>
:root {{ color-scheme: light dark; }} body {{ font: 14px sans-serif; }}
body {{ color: CanvasText; background: Canvas; }}
/* JupyterLab's own rules for tables and code in what a cell shows */
:not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon :is(td, th) {{ text-align: right; }}
.jp-RenderedHTMLCommon tbody tr:nth-child(odd) {{ background: #777; }}
.jp-RenderedHTMLCommon :not(pre) > code {{ background: #777; padding: 1px 5px; }}
</style><body><div class="jp-RenderedHTMLCommon">{card}</div></body>"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_cards_of_drawn_results_have_no_fault_in_a_notebook(tmp_path, dark):
    cards = {
        f"{kind} {seed}": NOTEBOOK.format(card=result._repr_html_())
        for seed in (3, 4, 5)
        for kind, result in drawn_results(seed).items()
        if not isinstance(result, Page)
    }

    assert find_faults(cards, tmp_path, widths=(400, 640, 900), dark=dark) == []


def test_a_notebook_does_not_set_the_tables_of_a_card_its_own_way(tmp_path):
    card = drawn_diagnosis(Draw.of(3))._repr_html_()
    question = """{
      const clear = (element) => window.getComputedStyle(element).backgroundColor;
      const cells = [...document.querySelectorAll("td, th")];
      const drawn = [...document.querySelectorAll("tr, td, th, code")];
      return {sides: [...new Set(cells.map((cell) =>
                window.getComputedStyle(cell).textAlign))],
              papers: [...new Set(drawn.map(clear))]};
    }"""

    shown = ask_browser(NOTEBOOK.format(card=card), tmp_path, question)

    assert shown == {"sides": ["left"], "papers": ["rgba(0, 0, 0, 0)"]}


# ---- each kind of fault is seen where it is planted


def plain_page():
    curve = Curves(
        label="a curve",
        x=(0.0, 1.0, 2.0),
        x_name="epochs",
        series=(Series("line", (1.0, 2.0, 4.0), "blue"),),
        unit="threads",
        readouts=("first", "middle", "last"),
    )
    sizes = HistogramChart(
        "sizes", (1, 2, 3), (3, 5), "nodes", limits=(Limit(4, "a batch"),)
    )
    bars = Bars("bars", (Bar("one", 3, "3 B"), Bar("two", 4, "4 B and some more")))
    return html_of(
        Page("title", sections=(Section("s", (curve, sizes, bars, "words")),))
    )


PLANTED = {
    "scrolls sideways": "section p { width: 2000px; }",
    "outside of the page": ".plot > .y { transform: translateX(-900px) !important; }",
    "cut": ".name { overflow: hidden; text-indent: -1em; }",
    "a broken word": "section p { width: 1.5em; }",
    "upon each other": ".plot > .x { left: 0 !important; }",
    "contrast": ".axis { color: #9a9a9a !important; }",
    "contrast of a shape": ".fill { background: #ddd !important; }",
    "y axis without a unit": "",
    "x axis without a name": "",
    "bars that cannot be compared": ".bars li { display: flex; } .track { flex: 1; }",
    "not to be reached by the keyboard": "",
    "a bar that is not seen": "rect.area { stroke: none !important; width: 0.1px; }",
}
REMOVED = {
    "y axis without a unit": 'class="axis y-name"',
    "x axis without a name": 'class="axis x-name"',
    "not to be reached by the keyboard": "plot.tabIndex = 0;",
}


def planted_page(fault):
    page = plain_page().replace("</style>", f"{PLANTED[fault]}</style>")
    return page.replace(REMOVED.get(fault, "nothing to remove"), "")


@pytest.fixture(scope="module")
def seen_faults(tmp_path_factory):
    """What is found in the page with each fault: all are laid out by one browser."""
    pages = {fault: planted_page(fault) for fault in PLANTED}
    return find_faults(pages, tmp_path_factory.mktemp("planted"), widths=(400,))


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(seen_faults, fault):
    expected = f"{fault} at 400: {fault}"
    assert [line for line in seen_faults if line.startswith(expected)] != []


def test_the_page_without_planted_faults_has_none(tmp_path):
    assert find_faults({"page": plain_page()}, tmp_path, widths=WIDTHS) == []
