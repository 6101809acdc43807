"""A page in Firefox: ``tox -e firefox``.

Firefox speaks WebDriver BiDi itself, so it needs no driver beside it: Debian has none.
"""

import base64
import contextlib
import itertools
import json
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import websocket

TIMEOUT_S = 120
PREFERENCES = {
    "app.update.disabledForTesting": True,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "toolkit.telemetry.reportingpolicy.firstRun": False,
    # 0 is dark, 1 is light
    "layout.css.prefers-color-scheme.content-override": 1,
}


class Firefox:
    """One window of Firefox that nobody sees.

    Args:
        dark: Whether the system is.
        preferences: Of ``about:config``, by name.
    """

    def __init__(self, *, dark=False, **preferences):
        self._ids = itertools.count(1)
        self._exit = contextlib.ExitStack()
        profile = Path(self._exit.enter_context(tempfile.TemporaryDirectory()))
        scheme = {"layout.css.prefers-color-scheme.content-override": int(not dark)}
        lines = [
            f"user_pref({json.dumps(name)}, {json.dumps(value)});"
            for name, value in {**PREFERENCES, **scheme, **preferences}.items()
        ]
        (profile / "user.js").write_text("\n".join(lines), encoding="utf-8")
        command = [
            shutil.which("firefox-esr") or shutil.which("firefox"),
            "--headless",
            "--no-remote",
            "--profile",
            str(profile),
            "--remote-debugging-port=0",
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._exit.callback(_end, process)
        for line in process.stderr:
            listening = re.search(r"WebDriver BiDi listening on (ws://\S+)", line)
            if listening:
                break
        self._socket = websocket.create_connection(
            f"{listening[1]}/session", timeout=TIMEOUT_S, suppress_origin=True
        )
        self._exit.callback(self._socket.close)
        self.ask("session.new", capabilities={})
        [context] = self.ask("browsingContext.getTree")["contexts"]
        self.context = context["context"]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._exit.close()

    def ask(self, method, **parameters):
        """Send a command, and give what it returns."""
        number = next(self._ids)
        self._socket.send(
            json.dumps({"id": number, "method": method, "params": parameters})
        )
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == number:
                break
        if answer["type"] == "error":
            raise RuntimeError(f"{method}: {answer['error']}: {answer['message']}")
        return answer["result"]

    def open(self, address, *, width=1600, height=900):
        """Load an address in a window of that size."""
        self.ask(
            "browsingContext.setViewport",
            context=self.context,
            viewport={"width": width, "height": height},
        )
        self.ask(
            "browsingContext.navigate",
            context=self.context,
            url=address,
            wait="complete",
        )

    def evaluate(self, expression):
        """Give a string that an expression of JavaScript has."""
        answer = self.ask(
            "script.evaluate",
            expression=expression,
            target={"context": self.context},
            awaitPromise=True,
        )
        return answer["result"].get("value")

    def photograph(self, file, *, whole=False):
        """Write a picture of the window, or of the whole page."""
        answer = self.ask(
            "browsingContext.captureScreenshot",
            context=self.context,
            origin="document" if whole else "viewport",
        )
        Path(file).write_bytes(base64.b64decode(answer["data"]))


def title_in_firefox(address, picture, *, dark):
    """Open an address, and give the title that its script sets in the end.

    Args:
        address: Of the page.
        picture: The file that is to show the window; None for none.
        dark: Whether the system is.
    """
    with Firefox(dark=dark) as firefox:
        firefox.open(address)
        deadline = time.monotonic() + TIMEOUT_S
        while not firefox.evaluate("document.title") and time.monotonic() < deadline:
            time.sleep(0.1)
        if picture is not None:
            firefox.photograph(picture)
        # As it was written: the browser's own title has blanks joined.
        return firefox.evaluate("document.querySelector('title').textContent")


def _end(process):
    process.terminate()
    process.wait()
    process.stderr.close()
