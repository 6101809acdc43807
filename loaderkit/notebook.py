"""How results look in a notebook: one card for all of them, light and dark.  Pure.

A notebook sets paper and ink, and says to nobody whether they are light or dark.  So
text inherits its colour, and what has a colour of its own (an edge, a bar) is a middle
tone that stands out from both.  The words say all that the colours say.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from loaderkit.html_words import LONGEST_UNBROKEN, escape_words

if TYPE_CHECKING:
    from collections.abc import Sequence

Mood = Literal["good", "bad", "unsure", "plain"]
COLOURS: dict[Mood, str] = {
    "good": "#2f9e44",
    "bad": "#e5484d",
    "unsure": "#b7791f",
    "plain": "#6b7f99",
}
"""At least 3 to 1 against white and against #111, as WCAG asks of what is no text."""
_MOST_ROWS = 20
"""Rows of a card.  Chosen: one fits a screen beside its cell."""
_SHORT_ROW = 48
"""Letters of all cells of a row that fit a card of 400 pixels: 8 pixels each."""
_LONGEST_BAR_PX = 120
_LETTERS_OF_BAR = 21
"""What the longest bar and the share behind it take."""
_MOST_LETTERS_OF_REPR = 158
"""Two lines of a terminal of 80 columns, with a line break behind each."""
_HANGING_INDENT = 4
"""Letters: as an editor that wraps lines does it."""
_STYLE = """
.loaderkit { border: 1px solid rgba(128,128,128,.35); border-left: 4px solid;
  border-radius: 6px; padding: .5rem .75rem; margin: .25rem 0; max-width: 60rem;
  container-type: inline-size; font: 13px/1.45 system-ui, sans-serif; }
.loaderkit .title { font-weight: 600; overflow-wrap: anywhere; }
.loaderkit .wide { overflow-x: auto; }
.loaderkit table { border-collapse: collapse; margin: .4rem 0; }
/* JupyterLab and nbconvert set tables to the right, striped, by longer selectors. */
.loaderkit tr, .loaderkit tr > * { text-align: left !important;
  background: none !important; color: inherit !important; }
.loaderkit tr > * { padding: .1rem .9rem .1rem 0; max-width: none; border: 0;
  vertical-align: top; white-space: pre-line; unicode-bidi: isolate; }
.loaderkit .long { overflow-wrap: anywhere; }
.loaderkit th { font-weight: 600; opacity: .75; }
.loaderkit .bar { display: inline-block; height: .6em; border-radius: 2px;
  print-color-adjust: exact; forced-color-adjust: none; }
.loaderkit pre { font: 12px/1.4 ui-monospace, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: .3rem 0; background: none; color: inherit; }
.loaderkit code { font: 12px/1.4 ui-monospace, monospace; color: inherit;
  background: none !important; padding: 0 !important; unicode-bidi: isolate;
  overflow-wrap: anywhere; }
.loaderkit ul { margin: .3rem 0; padding-left: 1.1rem; overflow-wrap: anywhere; }
/* A long row becomes a list of its cells, each with the name of its column. */
@container (max-width: 34rem) {
  .loaderkit .rows tr { display: block; padding: .3rem 0; }
  .loaderkit .rows th, .loaderkit .rows td:empty { display: none; }
  .loaderkit .rows td { display: flow-root; padding: 0 0 0 8rem;
    overflow-wrap: anywhere; }
  .loaderkit .rows td::before { content: attr(data-head); float: left; width: 7.4rem;
    margin-left: -8rem; opacity: .75; }
}
"""


def repr_in_a_line(result: object) -> str:
    """Write what a terminal shows of a result that was not assigned to a name.

    A dataclass would show every reading it is made of, with bytes as bare numbers.

    Args:
        result: Whose ``str`` begins with the answer.

    Returns:
        Its class and the first line of its ``str``, in two lines of a terminal at most.
    """
    name = type(result).__name__
    first_line, _, _ = str(result).partition("\n")
    # Columns of a text become words; the class is named by the brackets.
    answer = " ".join(first_line.split())
    answer = answer.removeprefix(f"{name}: ").rstrip(".")
    letters_left = _MOST_LETTERS_OF_REPR - len(name) - len("()")
    if len(answer) > letters_left:
        answer = f"{answer[: letters_left - len('...')]}..."
    return f"{name}({answer})"


class HasCard:
    """A result that notebooks show as a card: what ``print`` shows, if no more is said.

    Where it has a field ``ok``, the edge says whether it is.
    """

    def _repr_html_(self) -> str:
        title, _, lines = str(self).partition("\n")
        mood = mood_of(ok=self.ok) if hasattr(self, "ok") else "plain"
        return card(title, mood=mood, lines=lines)


def mood_of(*, ok: bool) -> Mood:
    """Say what an answer is like that is good news or bad news."""
    return "good" if ok else "bad"


@dataclass(frozen=True)
class ShareBar:
    """A cell that shows a share as a bar, and says it."""

    share: float
    """From 0 to 1."""


def card(
    title: str,
    *,
    mood: Mood = "plain",
    heads: Sequence[str] = (),
    rows: Sequence[Sequence[str | ShareBar]] = (),
    notes: Sequence[str] = (),
    lines: str = "",
    text: str = "",
) -> str:
    """Write a card for a notebook.

    Args:
        title: What it is, and the answer.
        mood: What the answer is like; it colours the edge.
        heads: Names of the columns of the table, or none.
        rows: The table, the most important row first; some 20 are shown.
        notes: Sentences below it.
        lines: Text whose columns stand below each other, in full.
        text: What ``print`` shows, folded away below.

    Returns:
        HTML; everything given is escaped.
    """
    colour = COLOURS[mood]
    # The style is in each card: a notebook may show one alone, or be cut up.
    parts = [
        f"<style>{_STYLE}</style>",
        f'<div class="loaderkit" style="border-left-color: {colour}">',
        f'<div class="title">{escape_words(title)}</div>',
    ]
    if rows:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
        shown_rows = rows[:_MOST_ROWS]
        # A table whose rows fit a narrow screen stays a table there.
        longest = max(sum(map(_letters_of, row)) for row in (heads, *shown_rows))
        layout = "rows" if longest > _SHORT_ROW else "short-rows"
        parts.append(f'<div class="wide"><table class="{layout}">')
        if head:
            parts.append(f"<tr>{head}</tr>")
        parts += [_html_row(row, heads, colour) for row in shown_rows]
        parts.append("</table></div>")
    if len(rows) > _MOST_ROWS:
        parts.append(f"<div>and {len(rows) - _MOST_ROWS:,} more</div>")
    if lines:
        parts.append(f"<pre>{hanging_lines(lines)}</pre>")
    if notes:
        items = "".join(f"<li>{_html_text(note)}</li>" for note in notes)
        parts.append(f"<ul>{items}</ul>")
    if text:
        folded = f"<pre>{hanging_lines(text)}</pre>"
        parts.append(f"<details><summary>as text</summary>{folded}</details>")
    return "\n".join([*parts, "</div>"])


def _html_row(
    cells: Sequence[str | ShareBar], heads: Sequence[str], colour: str
) -> str:
    heads = heads or ("",) * len(cells)
    row = "".join(
        f'<td class="{_cell_class(cell)}" data-head="{html.escape(head)}">'
        f"{_html_cell(cell, colour)}</td>"
        for head, cell in zip(heads, cells, strict=True)
    )
    return f"<tr>{row}</tr>"


def _letters_of(cell: str | ShareBar) -> int:
    return len(cell) if isinstance(cell, str) else _LETTERS_OF_BAR


def _cell_class(cell: str | ShareBar) -> str:
    words = cell.split() if isinstance(cell, str) else []
    return "long" if max(map(len, words), default=0) > LONGEST_UNBROKEN else "words"


def _html_cell(cell: str | ShareBar, colour: str) -> str:
    if isinstance(cell, str):
        return _html_text(cell)
    width = round(_LONGEST_BAR_PX * min(max(cell.share, 0.0), 1.0))
    bar = f'<span class="bar" style="width: {width}px; background: {colour}"></span>'
    return f"{bar}&nbsp;{cell.share:.1%}"


def _html_text(text: str) -> str:
    """Escape a text, and set what is in backticks in a type of fixed width."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape_words(text))


def hanging_lines(text: str) -> str:
    """Write lines as they are; what is too long goes on below, further in.

    Args:
        text: Lines, for a ``pre`` that wraps.

    Returns:
        HTML; everything given is escaped.
    """
    lines = []
    for line in text.splitlines(keepends=True):
        indent = len(line) - len(line.lstrip(" ")) + _HANGING_INDENT
        # A column far to the right must leave room for words on a narrow screen.
        width = f"min({indent}ch, 40%)"
        style = (
            f"display: block; padding-left: {width}; text-indent: calc(-1 * {width})"
        )
        lines.append(f'<span style="{style}">{html.escape(line)}</span>')
    return "".join(lines)
