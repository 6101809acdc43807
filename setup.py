"""What setup.cfg cannot say: where the project lives, which is known when it is built.

``PROJECT_URL=https://host/owner/loaderkit python -m build`` makes the links of the
README absolute, as an index shows them, and adds the project's addresses; so does
``PROJECT_EMAIL`` with that of its developers.
"""

import os
import re
from pathlib import Path

from setuptools import setup

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
url = os.environ.get("PROJECT_URL", "").rstrip("/")
addresses = {}
if url:
    files = f"{url}/blob/main"
    readme = re.sub(r"\]\((?!\w+:|#)", f"]({files}/", readme)
    addresses = {
        "Source": url,
        "Issues": f"{url}/issues",
        "Changelog": f"{files}/CHANGELOG.md",
        "Documentation": f"{url}/tree/main/docs",
    }

setup(
    long_description=readme,
    long_description_content_type="text/markdown",
    project_urls=addresses,
    author_email=os.environ.get("PROJECT_EMAIL") or None,
)
