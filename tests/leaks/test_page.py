"""The report as a page: whole, escaped, and readable in a real browser."""

import html.parser
import re
import shutil
import subprocess

import pytest

from loaderkit import Growth, LeakDetector, LeakReport
from loaderkit.leaks.page import page_of
from loaderkit.leaks.verdict import judge_counters

MIB = 1 << 20
EPOCHS = list(range(31))
SERIES = {
    "malloc": (EPOCHS, [100 * MIB + 3 * MIB * e for e in EPOCHS]),
    "anonymous": (EPOCHS, [200 * MIB + (e % 4) * MIB for e in EPOCHS]),
    "files": (EPOCHS, [7.0] * 31),
}


def planted(**more):
    growth = Growth("graph", "list", "Tensor <128> & more", 10, 3 * MIB)
    settings = {
        "growths": (growth,),
        "limit_bytes": 230 * MIB,
        "epochs_left": 12,
    } | more
    return LeakReport("leaking", 30, 12.3, "cuda:0", judge_counters(SERIES), **settings)


VOID = {"meta", "line", "rect", "polyline", "br"}


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_network():
    page = page_of(planted())

    tags = Tags()
    tags.feed(page)

    assert tags.open == []
    names = [tag for tag, _ in tags.seen]
    assert names.count("svg") == 2  # what never moved has no plot
    assert not {"script", "link", "img"} & set(names)
    assert "http" not in page
    assert "The same in all epochs: files." in page


def test_what_came_from_the_run_is_escaped():
    page = page_of(planted())

    assert "Tensor &lt;128&gt; &amp; more" in page
    assert "<128>" not in page


def test_a_limit_that_is_near_is_drawn():
    assert "var(--leak)" in page_of(planted()).split("<figure>")[1]


def test_a_steady_report_has_no_list_of_holders(tmp_path):
    report = LeakDetector("cpu").run(lambda: None, epochs=8)

    file = report.to_html(tmp_path / "report.html")

    assert "who holds it" not in file.read_text()
    assert 'class="steady"' in file.read_text()
    assert report.save_json(tmp_path / "report.json").stat().st_size > 1000


def test_the_text_has_at_most_25_lines():
    text = str(planted(notes=("a note",) * 40))

    assert len(text.splitlines()) == 25


@pytest.mark.needs("chromium")
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_it_without_a_horizontal_scroll_bar(tmp_path, width, dark):
    asked = (
        "<script>const b = document.body, s = getComputedStyle(b);"
        "document.title = [document.documentElement.scrollWidth, innerWidth,"
        "s.color, s.backgroundColor, document.querySelectorAll('svg').length]"
        ".join(';')</script></body>"
    )
    file = tmp_path / "page.html"
    file.write_text(page_of(planted()).replace("</body>", asked))
    command = [
        shutil.which("chromium"),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--dump-dom",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900",
        file.as_uri(),
    ]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    title = re.search(r"<title>(.*?)</title>", done.stdout)[1]
    needed, shown, ink, paper, plots = title.split(";")
    assert int(needed) <= int(shown)
    assert plots == "2"
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
    assert (light[0] > light[1]) == dark
    assert abs(light[0] - light[1]) > 450  # readable
