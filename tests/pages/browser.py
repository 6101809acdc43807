"""A page in a browser: what it shows, and what its script does.

The browser is Chromium without a window; Firefox or WebKit where PAGE_BROWSER says so.
"""

import html
import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


OUTER = """<!doctype html><meta charset="utf-8"><title></title><body>
<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{page}" {sandbox}>
</iframe>
<script>
addEventListener("load", () => {{
  const frame = document.querySelector("iframe");
  const answer = ((window, document) => {question})(
    frame.contentWindow, frame.contentDocument);
  window.document.title = JSON.stringify(answer);
}});
</script></body>"""
"""A window of Chromium is never narrower than 500 pixels; a frame in it can be."""


FAULTS = (Path(__file__).parent / "faults.js").read_text("utf-8")
MANY = """<!doctype html><meta charset="utf-8"><title></title><body>{frames}
<script>
{faults}
addEventListener("load", () => {{
  const answers = [...document.querySelectorAll("iframe")].map((frame) => faultsOf(
    frame.contentWindow, frame.contentDocument));
  document.title = JSON.stringify(answers);
}});
</script></body>"""


def find_faults(pages, folder, *, widths, dark=False, letter_px=16):
    """Lay pages out at some widths, and list what a strict reader would complain of.

    Args:
        pages: HTML by name.
        folder: For the browser's files.
        widths: Of the window, in pixels.
        dark: Whether the system is.
        letter_px: Size of the type that the reader has chosen in Chromium.

    Returns:
        Sentences, each with the name of its page and the width.
    """
    shown = list(itertools.product(pages, widths))
    frames = "".join(
        f'<iframe style="width: {width}px; height: 900px; border: 0" '
        f'srcdoc="{html.escape(pages[name], quote=True)}"></iframe>'
        for name, width in shown
    )
    document = MANY.format(frames=frames, faults=FAULTS)
    text = run_browser(document, folder, dark=dark, letter_px=letter_px)
    return [
        f"{name} at {width}: {fault}"
        for (name, width), faults in zip(shown, json.loads(text), strict=True)
        for fault in faults
    ]


def ask_browser(page, folder, question, *, width=800, dark=False, scripts=True):
    """Open a page and run a function's body in it; what it returns as plain values.

    Without ``scripts`` those of the page itself do not run.

    What the window shows then is kept in the folder that PAGE_SCREENSHOTS names, if
    it is set, under the name of the test.
    """
    escaped = html.escape(page, quote=True)
    sandbox = "" if scripts else 'sandbox="allow-same-origin"'
    outer = OUTER.format(width=width, page=escaped, question=question, sandbox=sandbox)
    return json.loads(run_browser(outer, folder, dark=dark, width=width))


def run_browser(document, folder, *, dark, width="all", letter_px=16):
    """Load a document, and give the title that its script has set."""
    file = folder / "asked.html"
    file.write_text(document, encoding="utf-8")
    picture = _picture(dark=dark, width=width)
    if os.environ.get("PAGE_BROWSER") == "firefox":
        from firefox import title_in_firefox

        return title_in_firefox(file.as_uri(), picture, dark=dark)
    if os.environ.get("PAGE_BROWSER") == "webkit":
        from webkit import title_in_webkit

        return title_in_webkit(file.as_uri(), picture, dark=dark)
    scheme = 0 if dark else 1
    command = [
        shutil.which("chromium"),
        *QUIET,
        "--dump-dom",
        f"--blink-settings=preferredColorScheme={scheme},defaultFontSize={letter_px}",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1600,900",
    ]
    if picture is not None:
        command.append(f"--screenshot={picture}")
    command.append(file.as_uri())
    shown = subprocess.run(command, capture_output=True, text=True)
    title = re.search(r"<title>(.*?)</title>", shown.stdout, re.DOTALL)[1]
    return html.unescape(title)


def _picture(*, dark, width):
    """Say where the picture of a window goes; None where none is asked for."""
    screenshots = os.environ.get("PAGE_SCREENSHOTS")
    if not screenshots:
        return None
    kept = Path(screenshots).absolute()
    kept.mkdir(parents=True, exist_ok=True)
    # tmp_path has a number of its own in each process of xdist, so not its name
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].partition(" ")[0]
    scheme = "dark" if dark else "light"
    return kept / re.sub(r"[^\w.]+", "-", f"{test}-{width}-{scheme}.png")
