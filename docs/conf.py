"""How Sphinx makes the site of these pages: ``tox -e docs``."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "loaderkit"
author = "The loaderkit developers"
release = metadata.version("loaderkit")
html_title = f"loaderkit {release}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
html_theme = "furo"
# Who has the rights is in LICENSE; the footer would say "Copyright ©" and nobody.
html_show_copyright = False
# The theme's page source and edit links need a host, which is not known here.
html_copy_source = False
exclude_patterns = ["_build"]

# Links to headings of other pages are checked too: cache.md#stale-caches
myst_heading_anchors = 3

# Names of torch and Python stay text: their inventories would have to be downloaded,
# and a build without a network would fail.
nitpicky = False

autodoc_member_order = "bysource"
# Ray takes half a gigabyte, for one class of thirty lines.
autodoc_mock_imports = ["ray"]
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True


def setup(app: Sphinx) -> None:
    """Have the docstrings of fields read as text."""
    app.connect("autodoc-process-docstring", keep_colons_of_fields, priority=400)


def keep_colons_of_fields(
    app: Sphinx,  # noqa: ARG001
    what: str,
    name: str,  # noqa: ARG001
    obj: Any,  # noqa: ARG001
    options: Any,  # noqa: ARG001
    lines: list[str],
) -> None:
    """Keep napoleon from taking "How batches leave: as files" for a type and a text.

    It looks for a type in the first line of a field's docstring, so that is left empty.
    """
    if what in {"attribute", "property", "data"}:
        lines.insert(0, "")
