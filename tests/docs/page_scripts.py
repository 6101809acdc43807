"""Writes the Python of each page as a script, for type checkers: one a page, joined.

Run as ``python tests/docs/page_scripts.py FOLDER``.  FOLDER becomes a package of
scripts whose line numbers are those of the pages, so an error leads to its page.
"""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path

from page_blocks import read_page

ROOT = Path(__file__).parents[2]
PAGES_THAT_BEGIN_WITH_USE = ("budget", "cache", "loader")
FOLDERS = ("tutorials", "how-to", "reference", "explanation")

REFUSED_BY_HINTS_OF_OTHERS = {
    # It takes any dataset of torch, and its hints name those of PyG only.
    "for batch in DataLoader(ours, batch_size=64):": "reportArgumentType",
}
"""Right lines that pyright refuses, each with the rule; it says which are needless."""

PYRIGHT_COMMENT = (
    "# pyright: basic, reportUnnecessaryTypeIgnoreComment=true, "
    # A page tells a story: a function is written again, a loop's variable is shown.
    "reportRedeclaration=false, reportPossiblyUnboundVariable=false"
)


def scripts_of(file: Path) -> dict[str, str]:
    """Join the Python blocks of a page.

    Args:
        file: The page.

    Returns:
        Scripts by the name of their files: the page's, and one for each block that is a
        file itself.
    """
    stem = re.sub(r"\W", "_", file.stem.lower())
    scripts: dict[str, str] = {}
    lines: list[str] = []
    for block in read_page(file).blocks:
        if block.language != "python":
            continue
        if block.file is not None:
            own_lines: list[str] = []
            _put_at_line(own_lines, block.line, block.text)
            scripts[f"{stem}__{block.file}"] = _script_of_page(own_lines)
        elif block.text.startswith(">>> "):
            for example in doctest.DocTestParser().get_examples(block.text):
                _put_at_line(lines, block.line + example.lineno, example.source)
        else:
            _put_at_line(lines, block.line, block.text)
    if lines:
        scripts[f"{stem}.py"] = _script_of_page(lines)
    return scripts


def _put_at_line(lines: list[str], line: int, text: str) -> None:
    """Put text where the page has it: its first line becomes number ``line``."""
    lines += [""] * (line - 1 - len(lines))
    lines += text.splitlines()


def _script_of_page(lines: list[str]) -> str:
    marked_lines = []
    for line in lines:
        rule = REFUSED_BY_HINTS_OF_OTHERS.get(line)
        marked_lines.append(f"{line}  # pyright: ignore[{rule}]" if rule else line)
    # The first line of a page is its heading.
    return "\n".join([PYRIGHT_COMMENT, *marked_lines[1:]]) + "\n"


def write_scripts(folder: Path) -> None:
    """Write the scripts of README and of every page whose blocks run."""
    folder.mkdir(parents=True, exist_ok=True)
    for old_script in folder.glob("*.py"):
        old_script.unlink()
    (folder / "__init__.py").touch()
    files = [ROOT / "README.md", ROOT / "docs" / "index.md"]
    files += [ROOT / "docs" / f"{name}.md" for name in PAGES_THAT_BEGIN_WITH_USE]
    for name in FOLDERS:
        files += sorted((ROOT / "docs" / name).glob("*.md"))
    for file in files:
        for name, script in scripts_of(file).items():
            (folder / name).write_text(script, encoding="utf-8")


if __name__ == "__main__":
    write_scripts(Path(sys.argv[1]))
