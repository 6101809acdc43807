"""What a log puts before each line, and the marks of lines that are quoted.  Pure."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

BEGINS_ANEW = "\u2063"
"""Stands before what is quoted while lines are joined: it goes on no other line."""
COLUMN = "\u2062"
"""Stands before what is quoted once for each column that the log has before it."""
NOT_COUNTED = "\u2064"
"""Stands before the marks that close a quotation of lines that were already broken."""
MARKS = BEGINS_ANEW + COLUMN
CLOCK = r"\d{1,2}:\d\d:\d\d(?:[.,:]\d{1,9})?"
PROCESS = r"\((?:[\w.:-]{1,60} ){0,3}(?:pid|ip|rank|node)=[^()\n]{1,120}\)"
LEVEL = r"(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|NOTICE|TRACE)"
_LEVEL_OF_AN_ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b|[EF]\d{4} ")
"""In a prefix, with glog's letter before the day."""
_PREFIX = re.compile(
    r"[ \t]*(?:"
    # times
    rf"(?P<time>[\[(]?\d{{4}}[-/]\d\d[-/]\d\d[T _]{CLOCK}(?:Z|[+-]\d\d:?\d\d)?[\])]?,?"
    rf"|[\[(]?{CLOCK}[\])]?:?(?=[ \t]))"
    r"|(?:time|ts)=\"?\d{4}-\d\d-\d\d[T ][\d:.,]{5,20}(?:Z|[+-]\d\d:?\d\d)?\"?(?=[ \t])"
    # syslog and journalctl, in any language; who logged is a part of the message
    rf"|[^\W\d_]{{3,9}}\.? {{1,2}}\d{{1,2}} {CLOCK} "
    r"(?:[\w.-]{1,60} )?(?:kernel:|(?=[\w.@-]{1,60}\[\d{1,9}\]:))"
    r"|\[ {0,6}\d{1,9}\.\d{3,6}\]"
    # Redis: process and role, time, and a mark for the level
    r"|(?:\d{1,8}:[A-Z]|\[\d{1,8}\]) \d{1,2} [A-Z][a-z]{2} (?:\d{4} )?"
    rf"{CLOCK} [#*.-](?=[ \t])"
    rf"|[IWEF]\d{{4}} {CLOCK} +\d+ [\w./:-]{{1,200}}\]"
    # levels, and what logging.basicConfig and vLLM put around them
    rf"|{LEVEL}:[\w.]{{1,60}}:"
    rf"|-? ?[\w.]{{1,60}} - {LEVEL} -"
    rf"|[|-]? ?\[?{LEVEL}\]?(?: \d\d-\d\d {CLOCK}(?: \[[\w./-]{{1,80}}:\d+\])?"
    r"|(?: \[[\w./-]{1,80}:\d+\])?(?::(?=\s)|[ \t]*[|-](?=\s|$)))"
    rf"|\[[\w.]{{1,60}}\]\[{LEVEL}\](?: -)?"
    # processes
    r"|\[(?:rank|default|worker)[ _-]?\d{1,6}\]:?"
    r"|\[\d{1,5}\]:"
    r"|\[\d{1,5},\d{1,5}\](?:<std(?:err|out)>)?:?"
    rf"|(?P<process>{PROCESS})"
    r"|\(raylet\)|spid\d{1,5}s?(?=[ \t])"
    r"|(?P<rank>\d{1,5}:)(?=[ \t])"
    r"|(?P<cell>[\w.-]{1,60}[ \t]{1,20}\|)(?=[ \t]|$)"
    # an event of Kubernetes, whose reason is a part of the message
    r"|Warning[ \t]{1,12}(?=[A-Z]\w{1,40}[ \t]{1,20}\d{1,4}[smhd])"
    # quoted in a reply, by pytest, by a box of rich
    r"|(?:FAILED|ERROR) [\w./-]{1,120}\.py::[\w.:\[\]-]{1,160} - "
    r"|(?P<quoted>>)(?=[ \t]|$)|E(?=[ \t]{2,})|[│┃╎]|std(?:err|out):(?=[ \t])"
    r")[ \t]*"
)
MOST_PREFIXES = 6
"""A line of ray about vLLM on a rank has five."""


def kinds_of_prefixes(lines: list[str]) -> frozenset[tuple[str, int]]:
    """Give the ambiguous kinds of prefixes that are some, each with its ordinal.

    A single "(pid=129)", "2:", "10:00:00" or ">" is a part of the message, which
    wrapping put at the start of a line; a prefix is on all lines.
    """
    counts: Counter[tuple[str, int]] = Counter()
    for line in lines:
        ordinals: Counter[str] = Counter()
        for prefix in _prefixes(line.lstrip(MARKS)):
            kind = prefix.lastgroup
            if kind is not None:
                counts[kind, ordinals[kind]] += 1
                ordinals[kind] += 1
    # Of two on the same, single line both are the log's.
    doubled = {kind for kind, ordinal in counts if ordinal and counts[kind, 0] == 1}
    prefixes = {key for key, count in counts.items() if count > 1 or key[0] in doubled}
    return _CELLS.union(prefixes)


_CELLS = frozenset({("cell", 0)})
"""The name of a container that logged the line, also of a single one."""


def _prefixes(line: str) -> Iterator[re.Match[str]]:
    """Give what stands before a line, one behind the other."""
    start = 0
    for _ in range(MOST_PREFIXES):
        match = _PREFIX.match(line, start)
        if match is None:
            return
        yield match
        start = match.end()


def states_an_error(line: str) -> bool:
    """Whether what a log put before a line has the level of an error.

    >>> [states_an_error(f"{level}: full") for level in ("FATAL", "WARNING")]
    [True, False]
    """
    return any(_LEVEL_OF_AN_ERROR.search(prefix[0]) for prefix in _prefixes(line))


def without_prefixes(line: str, kinds: frozenset[tuple[str, int]]) -> str:
    """Take prefixes away.

    Args:
        line: Without the marks of this file.
        kinds: The ambiguous ones that are prefixes here.
    """
    ordinals: Counter[str] = Counter()
    end = 0
    for prefix in _prefixes(line):
        kind = prefix.lastgroup
        # Before another prefix each is one.
        end = prefix.start()
        if kind is None or (kind, ordinals[kind]) in kinds:
            end = prefix.end()
        if kind is not None:
            ordinals[kind] += 1
    return line[end:]
