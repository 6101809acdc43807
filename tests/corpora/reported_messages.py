"""What users of many systems pasted when memory ran out, and what only looks like it.

``reported_messages.json`` was collected from public reports after the wordings were
written, and read by hand.  A row states what its text states; a field that it does not
name is not checked.  While the grammar was written, every other row of "ran out" and
"look-alike" was not looked at; the other groups, "later" and "third" to the last, and
their look-alikes, were gathered after that, each when the one before was mended.  From
"seventh" on, a part is written down from memory of what systems print (docs/budget.md).
From "twentyfifth" on, rows say where their text was found; those without an address,
lines of code among them, were read for ``moods.txt`` and are not kept.  Those of
"thirtysecond" are from public threads too; their addresses were not written down.
"thirtythird" has seven sets, about half of them written down from memory; of their
look-alikes, those with an address are public and the others are ours.
"thirtyfourth" has two sets, their messages from public threads or written down from
memory, their look-alikes sentences, code and tables of the same threads.
"thirtyfifth" and "thirtysixth" are from public threads, with other numbers and names;
their look-alikes are from the same threads and from manuals, some of them shortened,
and lines of code with names of ours.
"thirtyseventh" and "thirtyeighth" are from public threads and pages, near-copies of
older texts left out; some are shortened, and paths and machines have other names.
"thirtyninth" has two sets of the same kind; its messages without an address are written
down from memory, and so is a third of its look-alikes.
"fortieth" is read off public source files: what their strings print, with numbers of
ours, and as look-alikes the lines, comments and pages that these strings stand in.
"fortyfirst" and "fortysecond" have both: texts of public threads, and strings of public
source files with numbers and names of ours; "fortythird" is from public threads.  A
third of the messages of those two is written down from memory.
"fortyfourth" is from public repositories, their files and threads; "fortyfifth" and
"fortysixth" are from public threads and pages.  Near-copies of older texts are left
out, and so are the two texts that the reader still gets wrong (docs/budget.md).
"fortyseventh" to "fiftieth" are from public threads, pages and source files, without
near-copies and what is still read wrong; nine messages of "fortyninth" are from memory.
"fiftyfirst" to "fiftyfourth" are every other new text of four sets (docs/budget.md): of
public threads, and what strings of public files print, with the lines around them.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Report:
    """One text and what it states."""

    group: str
    text: str
    kind: str | list[str] | None = None  # of several any is right
    backend: str | None = None
    is_oom: bool | str = False
    states: dict[str, Any] = field(default_factory=dict)
    source: str = ""


_ROWS = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
REPORTS = [Report(**row) for row in _ROWS]
RAN_OUT = [report for report in REPORTS if report.group == "ran out"]
_LATER_GROUPS = {
    "later",
    *("third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"),
    *("eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth"),
    *("sixteenth", "seventeenth", "eighteenth", "nineteenth"),
    *("twentieth", "twentyfirst", "twentysecond", "twentythird"),
    *("twentyfourth", "twentyfifth", "twentysixth", "twentyseventh", "twentyeighth"),
    *("twentyninth", "thirtieth", "thirtyfirst", "thirtysecond"),
    *("thirtythird", "thirtyfourth", "thirtyfifth", "thirtysixth"),
    *("thirtyseventh", "thirtyeighth", "thirtyninth", "fortieth"),
    *("fortyfirst", "fortysecond", "fortythird", "fortyfourth", "fortyfifth"),
    *("fortysixth", "fortyseventh", "fortyeighth", "fortyninth", "fiftieth", "pages"),
    *("fiftyfirst", "fiftysecond", "fiftythird", "fiftyfourth"),
}
LATER = [report for report in REPORTS if report.group in _LATER_GROUPS]
LOOK_ALIKES = [report.text for report in REPORTS if report.group == "look-alike"]
LATER_LOOK_ALIKES = [
    report.text
    for report in REPORTS
    if report.group.removesuffix(" look-alike") in _LATER_GROUPS - {report.group}
]
