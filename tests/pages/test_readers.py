"""A page says the same to whoever reads it.

Without its script, on paper, in large type, and to a reader of screens.
"""

import os
from datetime import datetime, timezone

import pytest
from browser import ask_browser, find_faults
from drawn_pages import drawn_results

from loaderkit.pages.document import Page, page_html
from loaderkit.pages.provenance import Provenance

pytestmark = [pytest.mark.slow, pytest.mark.needs("browser")]

MADE = Provenance(datetime(2026, 1, 2, tzinfo=timezone.utc), "box", "Linux", ())


def drawn_pages(seed):
    return {
        kind: page_html(result if isinstance(result, Page) else result.page(), MADE)
        for kind, result in drawn_results(seed).items()
    }


def joined(pages, kinds):
    """Put several pages into one, to be read by one browser."""
    return "\n".join(pages[kind] for kind in kinds)


def printed(page):
    """A page as a printer on a dark system is given it: no frame has a printer."""
    dark = "@media screen and (prefers-color-scheme: dark)"
    assert dark in page
    assert "@media print" in page
    return page.replace(dark, "@media not all").replace("@media print", "@media all")


def test_without_its_script_a_page_says_the_same(tmp_path):
    pages = drawn_pages(6)
    question = """{
      const words = document.body.innerText.split(/\\s+/).join(" ");
      const stops = document.querySelectorAll("[tabindex]").length;
      return {words, stops};
    }"""
    page = joined(pages, ["leak", "step", "meter", "graphs"])

    scripted = ask_browser(page, tmp_path, question)
    plain = ask_browser(page, tmp_path, question, scripts=False)

    assert plain["words"] == scripted["words"]
    # What does nothing is not in the way of the tabulator key.
    assert scripted["stops"] > 0
    assert plain["stops"] == 0


def test_on_paper_nothing_is_missing_and_the_paper_is_white(tmp_path):
    pages = {kind: printed(page) for kind, page in drawn_pages(7).items()}
    question = """{
      const shapes = [...document.querySelectorAll(".fill, .track, .key, .mark")];
      const adjusts = shapes.map((shape) =>
        window.getComputedStyle(shape).printColorAdjust);
      const folded = [...document.querySelectorAll("details pre")];
      const style = window.getComputedStyle(document.body);
      return {adjusts: [...new Set(adjusts)], paper: style.backgroundColor,
              shown: folded.map((text) => text.getBoundingClientRect().height > 0)};
    }"""

    # 700 pixels: A4 without its margins
    assert find_faults(pages, tmp_path, widths=(700,), dark=True) == []
    shown = ask_browser(joined(pages, ["step", "plan"]), tmp_path, question, dark=True)
    assert shown["adjusts"] == ["exact"]
    assert shown["paper"] == "rgb(255, 255, 255)"
    assert shown["shown"]
    assert all(shown["shown"])


@pytest.mark.skipif("PAGE_BROWSER" in os.environ, reason="a setting of Chromium")
@pytest.mark.parametrize(("letter_px", "width"), [(20, 400), (24, 800)])
def test_larger_type_cuts_nothing(tmp_path, letter_px, width):
    pages = drawn_pages(8)

    faults = find_faults(pages, tmp_path, widths=(width,), letter_px=letter_px)

    assert faults == []


def test_a_chart_is_a_slider_that_says_what_it_shows(tmp_path):
    question = """[...document.querySelectorAll(".plot")].map((plot) => {
      const press = (key) => plot.dispatchEvent(
        new window.KeyboardEvent("keydown", {key, cancelable: true}));
      const said = () => plot.getAttribute("aria-valuetext");
      const shown = () => plot.parentElement.querySelector("output").textContent;
      const first = [said(), shown()];
      press("End");
      const last = [said(), shown()];
      const at = ["aria-valuenow", "aria-valuemax"].map(
        (name) => plot.getAttribute(name));
      return {role: plot.getAttribute("role"), name: plot.getAttribute("aria-label"),
              caption: plot.closest("figure").querySelector("figcaption").textContent,
              first, last, at};
    })"""
    pages = drawn_pages(9)

    charts = ask_browser(joined(pages, ["leak", "step", "meter"]), tmp_path, question)

    assert len(charts) > 3
    for chart in charts:
        assert chart["role"] == "slider"
        assert chart["name"] == chart["caption"]
        assert chart["first"][0] == chart["first"][1] != ""
        assert chart["last"][0] == chart["last"][1]
        assert chart["at"][0] == chart["at"][1]
