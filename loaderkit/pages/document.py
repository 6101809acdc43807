"""A page: a title, sections, tables, and what made it."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, TypeAlias

from loaderkit.answers import answer_wrong_calls
from loaderkit.html_words import LONGEST_UNBROKEN, escape_words
from loaderkit.named_files import write_named_file
from loaderkit.notebook import HasCard, hanging_lines
from loaderkit.pages.charts import Bars, Curves, HistogramChart, chart_html
from loaderkit.pages.provenance import read_provenance

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from pathlib import Path

    from loaderkit.notebook import Mood
    from loaderkit.pages.charts import Chart
    from loaderkit.pages.provenance import Provenance

_MOOD_WORDS: dict[Mood, str] = {
    "good": "ok",
    "bad": "attention",
    "unsure": "undecided",
    "plain": "",
}
"""What the colour of a title says, for those who do not see it."""


@dataclass(frozen=True)
class Table:
    """Rows of texts; on a narrow screen each row becomes a list of its cells."""

    heads: tuple[str, ...]
    """Names of the columns."""
    rows: tuple[tuple[str, ...], ...]
    """As many cells as there are names."""
    numbers: frozenset[int] = frozenset()
    """Which columns hold amounts, and are aligned on the right."""


@dataclass(frozen=True)
class Listing:
    """Text as it is, in a type of fixed width."""

    text: str
    """Such as what ``print`` shows."""
    folded: str = ""
    """Where it is not shown at first: what to click on."""


Block: TypeAlias = "str | Table | Listing | Chart"
"""What a section is made of; a ``str`` is a paragraph, with `code` in backticks."""


@dataclass(frozen=True)
class Section:
    """A heading and what belongs to it."""

    heading: str
    """A few words."""
    blocks: tuple[Block, ...]
    """From top to bottom."""
    caption: str = ""
    """A sentence below the heading: how to read it."""
    side_by_side: bool = False
    """Blocks stand beside each other where there is room."""


@dataclass(frozen=True)
class Page:
    """What a page says."""

    title: str
    """The answer, in a line."""
    mood: Mood = "plain"
    """What the answer is like; it colours the title."""
    lead: tuple[str, ...] = ()
    """Sentences below the title."""
    sections: tuple[Section, ...] = ()
    """From top to bottom."""


@answer_wrong_calls
class HasPage(HasCard):
    """A result that can be looked at in a browser."""

    def page(self) -> Page:
        """Say what the page shows.

        Returns:
            Its title and sections.
        """
        raise NotImplementedError

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one page with pictures, which needs no network and no other file.

        Args:
            path: Of the file; replaced if it is there.

        Returns:
            The path.

        Raises:
            NotWrittenError: The file cannot be written; also an ``OSError``.
        """
        return write_page(self.page(), path)


def write_page(page: Page, path: str | os.PathLike[str]) -> Path:
    """Write a page to a file, with when, where and by what it was made.

    Args:
        page: What it says.
        path: Of the file; replaced if it is there.

    Returns:
        The path.

    Raises:
        NotWrittenError: The file cannot be written; also an ``OSError``.
    """
    return write_named_file(path, page_html(page, read_provenance()))


def page_html(page: Page, provenance: Provenance) -> str:
    """Write a page.

    Args:
        page: What it says.
        provenance: What made it.

    Returns:
        A whole HTML document; everything in it that came from a run is escaped.
    """
    # Style and script are in the page: it is mailed, and opened where there is no
    # network and nothing beside it.
    title = html.escape(page.title)
    word = _MOOD_WORDS[page.mood]
    badge = f'<span class="badge">{word}</span> ' if word else ""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>",
            f"<style>{_file_text('page.css')}</style></head>",
            f'<body><header class="{page.mood}">',
            f"<h1>{badge}{escape_words(page.title)}</h1>",
            *(_paragraph_html(sentence) for sentence in page.lead),
            "</header><main>",
            *(_section_html(section) for section in page.sections),
            "</main>",
            f'<footer class="soft">{html.escape(str(provenance))}</footer>',
            f"<script>{_file_text('readout.js')}</script>",
            "</body></html>",
            "",
        ]
    )


def _section_html(section: Section) -> str:
    blocks = [_block_html(block) for block in section.blocks]
    layout = "side" if section.side_by_side else "stack"
    caption = ""
    if section.caption:
        caption = f'<p class="soft">{_inline_html(section.caption)}</p>'
    return (
        f"<section><h2>{html.escape(section.heading)}</h2>{caption}"
        f'<div class="{layout}">{"".join(blocks)}</div></section>'
    )


def _block_html(block: Block) -> str:
    if isinstance(block, str):
        return _paragraph_html(block)
    if isinstance(block, Table):
        return _table_html(block)
    if isinstance(block, Listing):
        text = f"<pre>{hanging_lines(block.text)}</pre>"
        if not block.folded:
            return text
        summary = f"<summary>{html.escape(block.folded)}</summary>"
        return f"<details>{summary}{text}</details>"
    return f"<figure>{_caption_html(block)}{chart_html(block)}</figure>"


def _caption_html(chart: Curves | HistogramChart | Bars) -> str:
    return f"<figcaption>{_inline_html(chart.label)}</figcaption>"


def _table_html(table: Table) -> str:
    heads = "".join(
        f"<th{_cell_class(column, head, table)}>{html.escape(head)}</th>"
        for column, head in enumerate(table.heads)
    )
    rows = "".join(_row_html(row, table) for row in table.rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _row_html(row: Sequence[str], table: Table) -> str:
    cells = "".join(
        f'<td{_cell_class(column, text, table)} data-head="{html.escape(head)}">'
        f"{_inline_html(text)}</td>"
        for column, (head, text) in enumerate(zip(table.heads, row, strict=True))
    )
    return f"<tr>{cells}</tr>"


def _cell_class(column: int, text: str, table: Table) -> str:
    if column in table.numbers:
        return ' class="number"'
    # Where all words are short a browser need not break one: it may only between them.
    longest = max(map(len, text.split()), default=0)
    return ' class="words"' if longest <= LONGEST_UNBROKEN else ""


def _paragraph_html(text: str) -> str:
    return f"<p>{_inline_html(text)}</p>"


def _inline_html(text: str) -> str:
    """Escape a text, and set what is in backticks in a type of fixed width."""
    # Escaped first: a backtick is no letter of HTML, and stays as it is.
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape_words(text))


@cache
def _file_text(name: str) -> str:
    """Read a file that comes with this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
