"""Pages are whole, escaped, need nothing else, and work at every width."""

import html.parser
import os
import re
from datetime import datetime, timezone

import pytest
from browser import ask_browser

from loaderkit.pages.charts import (
    Band,
    Bar,
    Bars,
    Curves,
    HistogramChart,
    Limit,
    Segment,
)
from loaderkit.pages.charts import Series as Layer
from loaderkit.pages.document import Listing, Page, Section, Table, page_html
from loaderkit.pages.provenance import Provenance, read_provenance

EVIL = "<b>&\"'</b></script><script>alert(1)</script>"
MADE = Provenance(
    datetime(2026, 1, 2, 3, 4, tzinfo=timezone.utc),
    "box",
    "Linux",
    (("torch", "2.13"),),
)
VOID = {"meta", "wbr", "br", "polyline", "polygon", "rect"}


def every_kind(text="plain words"):
    """A page with every kind of block, in which all words are ``text``."""
    curves = Curves(
        label=text,
        x=(0.0, 1.0, 2.0),
        x_name=text,
        series=(
            Layer(text, (1.0, 2.0, 4.0), "blue"),
            Layer("b", (1.0, 1.0, 1.0), "red"),
        ),
        unit="bytes",
        readouts=("first", text, "last"),
        first_readout=1,
        bands=(Band(0, 1, text, shaded=True),),
        limits=(Limit(9.0, text),),
        trend=Segment((0, 1), (2, 4)),
    )
    return Page(
        title=text,
        mood="bad",
        lead=(text,),
        sections=(
            Section(text, (curves, text), caption=text, side_by_side=True),
            Section(
                "Sizes",
                (
                    HistogramChart(
                        text, (0, 1, 2), (3, 5), text, limits=(Limit(4, text),)
                    ),
                    Bars(text, (Bar(text, 3, text), Bar("no", 0, "0"))),
                    Table((text, "amount"), ((text, "1"),), frozenset({1})),
                    Listing(text, folded=text),
                ),
            ),
        ),
    )


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.names, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += [(tag, *attribute) for attribute in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def tags_of(page):
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


def test_a_page_is_whole_and_asks_for_no_other_file():
    tags = tags_of(page_html(every_kind(), MADE))

    assert not {"link", "img", "iframe", "object"} & set(tags.names)
    named = {(tag, name) for tag, name, _ in tags.attributes}
    assert not {name for _, name in named} & {"src", "href", "onclick", "onload"}


def test_no_text_of_a_run_becomes_markup_or_script():
    harmless = re.sub(r"[<>&\"'()]", "x", EVIL)
    plain = tags_of(page_html(every_kind(harmless), MADE))
    evil = tags_of(page_html(every_kind(EVIL), MADE))

    assert evil.names == plain.names


def test_words_in_backticks_are_set_as_code_without_the_backticks():
    page = page_html(Page("t", lead=("call `release()` first",)), MADE)

    assert "call <code>release()</code> first" in page


def test_a_page_says_when_where_and_with_what_it_was_made():
    page = page_html(Page("t"), MADE)

    assert "Made 2026-01-02 03:04 UTC on box (Linux), with torch 2.13." in page
    assert read_provenance().versions[0][0] == "Python"


@pytest.mark.slow
@pytest.mark.needs("browser")
def test_what_a_window_shows_is_kept_where_the_environment_says(tmp_path, monkeypatch):
    page = page_html(every_kind(), MADE)
    screenshots = tmp_path / "screenshots"

    monkeypatch.delenv("PAGE_SCREENSHOTS", raising=False)
    ask_browser(page, tmp_path, "{ return 1; }")
    assert not screenshots.exists()

    monkeypatch.setenv("PAGE_SCREENSHOTS", str(screenshots))
    assert ask_browser(page, tmp_path, "{ return 2; }", dark=True) == 2
    [picture] = screenshots.iterdir()
    assert picture.name.endswith("-800-dark.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.needs("browser")
@pytest.mark.parametrize(
    ("width", "dark"), [(400, False), (800, True), (1400, False), (400, True)]
)
def test_a_page_fits_its_window_and_its_ink_stands_out(tmp_path, width, dark):
    long_words = "a_name_without_any_blank_" * 8
    question = """{
      const style = window.getComputedStyle(document.body);
      return {needed: document.documentElement.scrollWidth, shown: window.innerWidth,
              ink: style.color, paper: style.backgroundColor};
    }"""

    shown = ask_browser(
        page_html(every_kind(long_words), MADE),
        tmp_path,
        question,
        width=width,
        dark=dark,
    )

    assert shown["needed"] <= shown["shown"] == width
    brightness = {
        name: sum(map(int, shown[name].removeprefix("rgb(").rstrip(")").split(",")))
        for name in ("ink", "paper")
    }
    assert (brightness["ink"] > brightness["paper"]) == dark
    assert abs(brightness["ink"] - brightness["paper"]) > 450


@pytest.mark.slow
@pytest.mark.needs("browser")
def test_a_chart_answers_the_arrow_keys_and_the_pointer(tmp_path):
    question = """{
      const plot = document.querySelector(".plot");
      const output = plot.parentElement.querySelector("output");
      const said = [output.textContent];
      const press = (key) => {
        const options = {key, cancelable: true};
        plot.dispatchEvent(new window.KeyboardEvent("keydown", options));
        said.push(output.textContent);
      };
      ["ArrowRight", "ArrowRight", "ArrowLeft", "Home", "Escape", "x"].forEach(press);
      const box = plot.getBoundingClientRect();
      const clientX = box.left + 0.95 * box.width;
      plot.dispatchEvent(new window.PointerEvent("pointermove", {clientX}));
      said.push(output.textContent);
      plot.dispatchEvent(new window.PointerEvent("pointerdown", {clientX: box.left}));
      said.push(output.textContent);
      return {said, cursor: plot.querySelector(".cursor").style.left};
    }"""

    shown = ask_browser(page_html(every_kind("middle"), MADE), tmp_path, question)

    middle, last = "middle", "last"
    answers = [middle, last, last, middle, "first", middle, middle, last, "first"]
    assert shown["said"] == answers
    assert shown["cursor"] == "0%"


@pytest.mark.slow
@pytest.mark.needs("browser")
@pytest.mark.skipif(
    os.environ.get("PAGE_BROWSER") == "firefox",
    reason="no window of Firefox without a screen has the focus",
)
def test_a_chart_that_has_the_focus_has_an_outline(tmp_path):
    question = """{
      const plot = document.querySelector(".plot");
      plot.focus();
      return {focused: document.activeElement === plot,
              outline: window.getComputedStyle(plot).outlineStyle};
    }"""

    shown = ask_browser(page_html(every_kind("middle"), MADE), tmp_path, question)

    assert shown == {"focused": True, "outline": "solid"}


@pytest.mark.slow
@pytest.mark.needs("browser")
def test_what_a_plot_draws_is_where_its_numbers_are(tmp_path):
    """The browser's own boxes are the oracle: the line ends at its last value."""
    chart = Curves(
        label="a line",
        x=(0.0, 10.0),
        x_name="epoch",
        series=(Layer("line", (0.0, 50.0), "blue"),),
        unit="things",
        readouts=("at 0", "at 10"),
        limits=(Limit(100.0, "the limit"),),
        stacked=True,
    )
    question = """{
      const box = (name) => document.querySelector(name).getBoundingClientRect();
      const plot = box(".plot"), top = box(".limit");
      const label = [...document.querySelectorAll(".y")].find(
        (each) => each.textContent === "50").getBoundingClientRect();
      return {limit: (plot.bottom - top.top) / plot.height,
              fifty: (plot.bottom - (label.top + label.bottom) / 2) / plot.height};
    }"""

    shown = ask_browser(
        page_html(Page("t", sections=(Section("s", (chart,)),)), MADE),
        tmp_path,
        question,
    )

    assert shown["limit"] == pytest.approx(100 / 104, abs=0.02)
    assert shown["fifty"] == pytest.approx(50 / 104, abs=0.02)


@pytest.mark.slow
@pytest.mark.needs("browser")
@pytest.mark.parametrize("width", [660, 800, 1400])
def test_the_names_of_settings_are_not_broken_to_make_room_for_words(tmp_path, width):
    names = ["multiprocessing_context", "persistent_workers", "anonymous", "x"]
    long_reason = "workers would not be quicker, since copying takes longer " * 4
    table = Table(("setting", "value", "why"), [(n, "1", long_reason) for n in names])
    question = """[...document.querySelectorAll("td:first-child")].map(cell => {
      const words = document.createRange(); words.selectNodeContents(cell);
      return words.getClientRects().length; })"""

    lines = ask_browser(
        page_html(Page("t", sections=(Section("s", (table,)),)), MADE),
        tmp_path,
        question,
        width=width,
        dark=False,
    )

    assert lines == [1] * len(names)


@pytest.mark.slow
@pytest.mark.needs("browser")
@pytest.mark.parametrize("width", [700, 800, 1400])
def test_no_cell_of_short_words_is_broken_inside_a_word(tmp_path, width):
    """The cells of a plan's remedies, and of doctor's settings."""
    code = "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`"
    row = ("equal results", code, "why it is so, in some words " * 6, "device")
    table = Table(("costs", "setting", "why", "numerics"), [row] * 2)
    question = """[...document.querySelectorAll("td.words")].map(cell => {
      const text = cell.firstChild, range = document.createRange();
      return [...text.data.matchAll(/\\S+/g)].map(word => {
        range.setStart(text, word.index);
        range.setEnd(text, word.index + word[0].length);
        return range.getClientRects().length; }); }).flat()"""

    lines = ask_browser(
        page_html(Page("t", sections=(Section("s", (table,)),)), MADE),
        tmp_path,
        question,
        width=width,
        dark=False,
    )

    assert len(lines) == 2 * (2 + 42 + 1)
    assert set(lines) == {1}


@pytest.mark.slow
@pytest.mark.needs("browser")
@pytest.mark.parametrize("width", [400, 800, 1400])
def test_no_line_of_a_text_is_cut(tmp_path, width):
    text = "\n".join(["a word " * 40, "one_long_name_" * 30, "  two   columns"])
    page = Page("t", sections=(Section("s", (Listing(text),)),))
    question = """{
      const shown = document.querySelector("pre");
      return {cut: shown.scrollWidth - shown.clientWidth, text: shown.textContent};
    }"""

    shown = ask_browser(page_html(page, MADE), tmp_path, question, width=width)

    assert shown["cut"] <= 0
    assert shown["text"] == text
