"""A page in WebKit, the engine of Safari: ``tox -e webkit``.

Debian's ``webkit2gtk-driver`` has the driver and the browser; both need a display, such
as ``xvfb-run`` gives.
"""

import os
import subprocess
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

TIMEOUT_S = 120


def title_in_webkit(address, picture, *, dark):
    """Open an address, and give the title that its script sets in the end.

    Args:
        address: Of the page.
        picture: The file that is to show the window; None for none.
        dark: Whether the system is.
    """
    options = webdriver.WebKitGTKOptions()
    options.binary_location = str(_browser_of_debian())
    options.add_argument("--automation")
    theme = "Adwaita:dark" if dark else "Adwaita"
    service = webdriver.WebKitGTKService(
        log_output=subprocess.DEVNULL, env={**os.environ, "GTK_THEME": theme}
    )
    with webdriver.WebKitGTK(options=options, service=service) as driver:
        driver.get(address)
        WebDriverWait(driver, TIMEOUT_S).until(lambda driver: driver.title)
        if picture is not None:
            driver.save_screenshot(str(picture))
        # As it was written: the driver's own title has blanks joined.
        return driver.execute_script(
            "return document.querySelector('title').textContent"
        )


def _browser_of_debian():
    [browser] = Path("/usr/lib").glob("*/webkit2gtk-4.1/MiniBrowser")
    return browser
