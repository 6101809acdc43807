"""What a notebook shows of a result: short, escaped, readable on light and on dark."""

import html.parser
import importlib
import re
from pathlib import Path

import pytest
import torch
from drawn_pages import drawn_results

from loaderkit import (
    LeakDetector,
    MemoryMeter,
    SafeDataset,
    build_loader,
    check_environment,
    diagnose_oom,
    estimate_step,
    inspect_cache,
    open_cache,
    pack,
    plan_batch,
    read_memory,
    release,
    staged,
    verify,
)
from loaderkit.notebook import COLOURS, ShareBar, card, repr_in_a_line
from loaderkit.pages.document import Page

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
NASTY = "<script>alert('x')</script> & \"quoted\""


class Reading(html.parser.HTMLParser):
    """Reads a page as a browser does, and notes what is not closed."""

    void = frozenset({"br", "hr", "img", "meta", "wbr"})

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.shown = [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):  # noqa: ARG002
        self.tags.append(tag)
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.shown += data


def leaking_report():
    retained = []
    detector = LeakDetector("cpu", on_leak=id)
    return detector.run(lambda: retained.append(torch.zeros(50_000)), epochs=10)


SHOWN_RESULTS = [
    "report",
    "loader",
    "plan",
    "estimate",
    "batch plan",
    "diagnosis",
    "dataset",
    "part",
]
CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "8.00 GiB of which 1.00 GiB is free."
)


def results_with_words(folder):
    """Return each result with words that its card must show."""
    path = folder / "a <b>&.lk"
    samples = [{"<i>x": torch.ones(n % 3 + 1, 4), "y": n} for n in range(9)]
    dataset = pack(samples, path, workers=0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    loader = build_loader(dataset, batch_size=4, probe=False)
    rows = [torch.ones(4) for _ in range(20)]
    return {
        "report": (leaking_report(), "leaking:", "retained"),
        "loader": (loader, "9 samples", "num_workers"),
        "plan": (loader.plan, "9 samples", "num_workers"),
        "estimate": (estimate_step(model, torch.ones(2, 4)), "Peak:", "parameters"),
        "batch plan": (
            plan_batch(model, rows, "cpu", limit="1 GiB", batch_size=4, epochs=2),
            "The worst batch of 4",
            "A (balanced)",
        ),
        "diagnosis": (
            diagnose_oom(CUDA_MESSAGE),
            "Out of memory",
            "2.00 GiB",
        ),
        "dataset": (dataset, "9 samples", "<i>x"),
        "part": (open_cache(path)[:4], "4 samples", "<i>x"),
    }


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    return results_with_words(tmp_path_factory.mktemp("notebook"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN_RESULTS)
def test_a_result_shows_its_answer_and_its_numbers_as_whole_html(shown, name):
    result, *words = shown[name]

    page = result._repr_html_()
    read = Reading(page)

    assert all(word in read.shown for word in words)
    assert read.open == []
    assert not {"script", "i", "b", "img", "link"} & set(read.tags)
    assert "http" not in page
    assert len(page) < 20_000


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN_RESULTS)
def test_a_result_in_a_terminal_takes_two_lines_and_says_its_answer(shown, name):
    result, *_ = shown[name]

    text = repr(result)

    assert len(text) < 160
    assert "\n" not in text
    assert text.startswith(f"{type(result).__name__}(")
    # Bytes are told with their unit.
    assert not re.search(r"\d{6}", text.partition(str(result))[0])


@pytest.mark.parametrize("seed", range(3))
def test_drawn_results_take_two_lines_of_a_terminal(seed):
    for result in drawn_results(seed).values():
        if not isinstance(result, Page):
            assert len(repr(result)) < 160
            assert repr(result).startswith(f"{type(result).__name__}(")


def test_a_line_of_a_result_is_cut_where_it_is_too_long_and_says_so():
    class Wordy:
        def __str__(self):
            return "word " * 100 + "\nmore"

    text = repr_in_a_line(Wordy())

    assert len(text) == 158
    assert text.endswith("...)")


def test_words_in_backticks_are_code_in_a_card():
    page = card("it", rows=[["`a[0]`"]], notes=["held by `<b>`"])

    assert "<code>a[0]</code>" in page
    assert "held by <code>&lt;b&gt;</code>" in page


def test_a_dataset_is_not_packed_to_be_shown_in_a_terminal(tmp_path):
    class Mine(SafeDataset):
        def keys(self):
            raise AssertionError

        def load(self, key):
            return key

    text = repr(Mine(cache=tmp_path / "c.lk"))

    assert text.startswith("Mine(samples are counted when it is first read, ")
    assert not (tmp_path / "c.lk").exists()


def test_all_that_is_given_is_escaped():
    page = card(NASTY, heads=[NASTY], rows=[[NASTY]], notes=[NASTY], text=NASTY)

    read = Reading(page)

    assert read.shown.count(NASTY) == 5
    assert "script" not in read.tags


def test_a_long_table_says_how_much_is_left_out():
    read = Reading(card("it", rows=[[f"row {n}"] for n in range(1_025)]))

    assert "row 19" in read.shown
    assert "row 20" not in read.shown
    assert "and 1,005 more" in read.shown


def test_a_bar_says_its_share_and_stays_in_its_place():
    page = card("it", rows=[[ShareBar(0.25)], [ShareBar(3.0)], [ShareBar(-1.0)]])

    assert re.findall(r"width: (\d+)px", page) == ["30", "120", "0"]
    assert "25.0%" in Reading(page).shown
    assert "300.0%" in Reading(page).shown


def relative_luminance(colour):
    """The relative luminance that WCAG defines."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast_ratio(colour, other_colour):
    low, high = sorted([relative_luminance(colour), relative_luminance(other_colour)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("paper", ["#ffffff", "#111111"])
def test_colours_stand_out_on_light_and_on_dark(paper):
    assert contrast_ratio("#000000", "#ffffff") == 21
    assert min(contrast_ratio(colour, paper) for colour in COLOURS.values()) >= 3


def test_text_takes_the_notebooks_own_colour():
    style = card("it", rows=[["a"]], text="b")

    assert set(re.findall(r"[^-\w]color: (\w+)", style)) == {"inherit"}


def test_a_dataset_that_was_not_packed_is_not_packed_to_be_shown(tmp_path):
    class Mine(SafeDataset):
        def keys(self):
            raise AssertionError

        def load(self, key):
            return key

    page = Mine(cache=tmp_path / "c.lk")._repr_html_()

    assert "Mine(samples are counted when it is first read, " in Reading(page).shown
    assert not (tmp_path / "c.lk").exists()


@pytest.mark.needs("IPython")
def test_ipython_shows_the_card(tmp_path):
    from IPython.core.formatters import DisplayFormatter

    dataset = pack([{"a": 1}], tmp_path / "c.lk", workers=0)

    shown, _ = DisplayFormatter().format(dataset)

    assert shown["text/html"] == dataset._repr_html_()
    assert shown["text/plain"] == repr(dataset)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_sizes_are_shown_in_a_notebook(tmp_path, count):
    graphs = [{"x": torch.ones(1 + n, 2)} for n in range(max(count, 1))]
    sizes = pack(graphs, tmp_path / "s.lk", workers=0)[:count].sizes()

    shown = Reading(sizes._repr_html_())

    assert not shown.open
    assert f"Sizes of {count} sample" in shown.shown
    assert ("median" in shown.shown) == bool(count)


def test_what_a_notebook_shows_of_settings_holds_no_secrets(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "a-secret-value")

    assert "a-secret-value" not in repr(check_environment())


# ---- every public result has one

OPTIONS_AND_TOOLS = {
    *("MicroBatcher", "EpochCacheCleaner", "PtFolder"),
    *("DevicePrefetcher", "LeakCallback", "ColumnContract", "StorageContract"),
    *("PackOptions", "RemoteCache", "Patience", "DeviceSpec", "LoaderOptions"),
    # Parts of a batch, which are tensors.
    *("Padded", "Packed"),
}
"""What is given to functions or is called, and is not what they return."""


def public_classes():
    for page in sorted(REFERENCE.glob("*.md")):
        for dotted in re.findall(r"autoclass:: (\S+)", page.read_text("utf-8")):
            module, _, name = dotted.rpartition(".")
            is_callback = module.startswith("loaderkit.integrations")
            if name not in OPTIONS_AND_TOOLS and not is_callback:
                yield getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("kind", list(public_classes()), ids=lambda k: k.__name__)
def test_every_public_result_has_a_card(kind):
    assert callable(getattr(kind, "_repr_html_", None))


@pytest.mark.slow
def test_what_small_results_print_is_what_their_card_shows(tmp_path):
    rows = pack([{"x": torch.ones(2)}] * 3, tmp_path / "a.lk", workers=0)
    with staged("model") as stage:
        stage.add(torch.nn.Linear(2, 2))
    detector = LeakDetector("cpu", on_leak=id)
    report = detector.run(list, epochs=6)
    results = [
        verify(rows.cache),
        verify(tmp_path / NASTY.replace("/", "")),
        inspect_cache(rows.cache),
        stage.receipt,
        release(),
        read_memory("cpu"),
        check_environment(),
        report.counters[0],
        report.counters[0].trend,
    ]

    for result in results:
        card_html = result._repr_html_()
        reading = Reading(card_html)
        assert not reading.open
        assert "script" not in reading.tags
        shown = "".join(reading.shown.split())
        for line in str(result).splitlines():
            assert "".join(line.split()) in shown, line
    assert COLOURS["good"] in results[0]._repr_html_()
    assert COLOURS["bad"] in results[1]._repr_html_()


@pytest.mark.slow
def test_a_detector_shows_what_it_read_and_reads_nothing_for_it():
    detector = LeakDetector("cpu", on_leak=id, limit="8 GiB", every=2)
    before = Reading(detector._repr_html_())
    assert "8.00 GiB" in before.shown
    assert not detector.has_started

    for _ in range(6):
        detector.step()
    running = Reading(detector._repr_html_())
    assert "3 epochs" in running.shown
    assert "python_blocks" in running.shown
    assert "not judged yet" in running.shown
    assert detector._run.epoch == 3

    report = detector.report()
    assert detector._repr_html_() == report._repr_html_()


def test_a_meter_shows_what_its_readings_are():
    meter = MemoryMeter("cpu", log=None)
    assert "not read yet" in Reading(meter._repr_html_()).shown

    with meter.stage("model"):
        pass
    assert "after model" in Reading(meter._repr_html_()).shown


def test_a_loader_shows_what_it_gives_in_a_terminal(tmp_path):
    rows = pack([{"x": torch.ones(2)}] * 3, tmp_path / "a.lk", workers=0)

    loader = build_loader(rows, batch_size=2)

    assert (
        repr(loader)
        == "PlannedLoader(3 samples, 2 samples each, in order, 2 batches an epoch)"
    )
    assert not loader.plan.pin_memory, "a decision is as true as its value"
