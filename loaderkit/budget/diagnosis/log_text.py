"""A message as its system wrote it, out of what a log made of it.  Pure.

A log colours a message, puts a time and a rank in front of its lines, draws progress
bars through it, quotes it in JSON and breaks it at the width of a terminal.  Nothing of
that is part of the message, so all of it is taken away before anything is read.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import TYPE_CHECKING

from loaderkit.budget.diagnosis.folded_tracebacks import unfold_tracebacks
from loaderkit.budget.diagnosis.joined_lines import Line, join_lines
from loaderkit.budget.diagnosis.json_records import (
    MOST_NESTED,
    MOST_REPETITIONS,
    without_json,
)
from loaderkit.budget.diagnosis.line_prefixes import (
    BEGINS_ANEW,
    COLUMN,
    MARKS,
    MOST_PREFIXES,
    NOT_COUNTED,
    kinds_of_prefixes,
    states_an_error,
    without_prefixes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ESCAPED = re.compile(
    r"\\{1,4}(?:u([0-9a-fA-F]{4})|x1b|033|([nrt\"'/]))", re.IGNORECASE
)
_BREAK_THAT_OPENS = re.compile(r"(\b[A-Za-z_]\w{0,40}\([fr]?[\"'])(?:\\[nrt]){1,4}")
"""What a program prints begins with a break: its line still has the call before it."""
_WHITESPACE = {"n": "\n", "r": "\r", "t": " "}
_BREAK = re.compile(r"\r{1,3}\n")
"""Behind a progress bar the cursor has gone back once already."""
_COLOUR = re.compile(
    r"\x1b\[[0-9;?]{0,20}[A-Za-z]"  # as a terminal gets it
    r"|\x1b\][^\x07\n]{0,200}\x07"
    r"|\^\[\[[0-9;]{0,20}m"  # as an editor shows it
    r"|\[(?:\d{1,2};){0,3}\d{0,2}m\b"  # where the escape character was lost in copying
)
_ESCAPED_COLOUR = re.compile(
    r"(?:\x1b|\\{1,4}(?:x1b|u001b|033))\[[0-9;]{0,20}m", re.IGNORECASE
)
"""As it is, and in a quotation: there it would be no JSON, or a part of a word."""
_PARTED_SCOPE = re.compile(r"(?<=\bstd): :(?=\w)")
"""What a translator of pages makes of "std::bad_alloc"."""
_REPRESENTATIONS = (
    # gRPC, in C++ and Python, and in Go
    (
        re.compile(r"\bstatus = StatusCode\.(\w{1,40})\s{1,40}details = \""),
        r"\1\nerror: ",
    ),
    (re.compile(r"\brpc error: code = (\w{1,40}) desc = "), r"rpc error \1: "),
    # structures with a message, as Rust, Elixir and Go print them
    (re.compile(r"\bcalled .Result::\w{1,20}\(\). on an .Err. value: "), "error: "),
    (
        re.compile(
            r"(?:(?<=[Ee]rror: )|^%)[A-Z][\w.]{1,40} ?\{ ?"
            r"(?:\w{1,20}: [^\"{}\n]{1,60}, ){0,4}(?:message|msg|reason|detail): "
            r"\"([^\n]{0,1000}?)\"(?:, [^\n]{0,200})? ?\}$",
            re.MULTILINE,
        ),
        r"\1",
    ),
    (
        re.compile(
            r"&\{Severity:(?:\w{1,40}:?[\w.]{0,40} ){1,4}Message:([^\n]{1,1000}?)"
            r"(?: (?:Detail|Hint|Position):[^\n]{0,400})?\}$",
            re.MULTILINE,
        ),
        r"error: \1",
    ),
    # exceptions of OCaml and Ruby
    (re.compile(r"(?<=Fatal error: )exception \w{1,40}\(\""), ""),
    (
        re.compile(
            r"#<((?:\w{1,40}::){0,4}\w{1,40}(?:Error|Exception)): ([^\n]{1,1000}?)>$",
            re.MULTILINE,
        ),
        r"\1: \2",
    ),
    # JavaScript's abort, with the place it was called from
    (re.compile(r"\babort\([\"']([^\"'\n]{1,400})[\"']\)(?= at )"), r"Aborted(\1)"),
    # what fills its line in a post, in bold letters or as a paragraph: a sentence, or
    # the last line behind a colon, and no heading
    (
        re.compile(
            r"^[ \t]{0,20}(\*\*|<(?:p|b|strong)>)(?![ *])([^\n]{20,1000}?[.!])"
            r"(?:\*\*|</\w{1,6}>)[ \t]{0,20}$",
            re.MULTILINE,
        ),
        r"\2",
    ),
    (
        re.compile(
            r"(\A|:\n{1,2})[ \t]{0,20}(?:\*\*|<(?:p|b|strong)>)(?![ *])"
            r"([^\n]{20,1000}?)(?:\*\*|</\w{1,6}>)(?=\s{0,20}\Z)"
        ),
        r"\1\2",
    ),
    # node calls what nobody caught a warning, and Shiny every error
    (re.compile(r"\bUnhandledPromiseRejectionWarning: "), "UnhandledRejection: "),
    (
        re.compile(
            r"(?<![^\W_])_?Warning: (Error in [^:\n]{0,80}: [^\n]{0,300}?)_?(?=\.?$)",
            re.MULTILINE,
        ),
        r"\1",
    ),
)
"""What runtimes put around an error's text where they show the error as a value."""
_JOINED_LITERALS = re.compile(r"(?<![\"'])([\"']) ?\+\s{1,40}\1")
"""Where node breaks a long string that it prints."""
_BOXES = "━╸╺╴─█▉▊▋▌▍▎▏░▒▓"
_MARK_OF_A_BAR = re.compile(rf"%\||\[|[{_BOXES}]")
"""What every progress bar has."""
_PROGRESS = re.compile(
    # tqdm: "Epoch 1:  6%|###    | 3787/62565 [04:47<1:10:53, 13.82it/s, loss=0.1]",
    # with any part cut off; the part before the bar only at the start of a line
    r"(?:^[^\n|%]{0,60}?:)?[ \t]{0,80}\d{1,3}%\|[^|\n]{0,300}\|?"
    r"(?: ?[\d.]{1,12}[kMG]?/[\d.?]{1,12}[kMG]?)?"
    r"(?: ?\[[^\]\n]{0,120}(?:it|s|B|batch)(?:/s|/it)?"
    r"[^\]\n]{0,120}\])?"
    r"|[ \t]{0,80}\|? ?\b\d{1,12}/[\d?]{1,12} \[\d\d:\d\d<[^\]\n]{0,120}\]"
    r"|\b\d{1,12}it \[\d\d:\d\d, [^\]\n]{0,80}\]"
    # keras and rich: "12/100 [==>.....] - ETA: 1s", bars of box characters
    r"|\b\d{1,12}/\d{1,12} \[[=>.]{3,200}\](?: - [^\n]{0,120})?"
    rf"|(?:^[\w ]{{0,40}} )?[{_BOXES}]{{3,300}}(?: \d{{1,3}}%)?(?: \d+:\d\d:\d\d)?",
    re.MULTILINE,
)
_OPENING = re.compile(
    r"(?<!\breturn )(?<!\breturn \{)\{? ?\"(?P<key>[\w.]{1,40})\" ?: ?\""
    r"|(?<!\braise )(?<!\bthrow )(?<!\bnew )"
    r"(?<!\bt\.)(?<!\blog\.)(?<!\blogger\.)(?<!\bfmt\.)"
    r"\b(?P<name>(?!(?:Set|Get|New|Is|As|Assert|Throw|Raise|Log|Handle|Report|Print"
    r"|Write|Add|On|With|Wrap)[A-Z])(?:[A-Z_]\w{0,60})?(?:Error|Exception))"
    r"\((?:b|r)?[\"']|^b['\"]"
    r"|(?<=[Ee]rror: )(?:[A-Z]\w{1,40}\(){1,4}\"",
    re.MULTILINE,
)
"""Where a quotation begins: a field of JSON, the repr of an exception or of bytes, an
error of Rust inside of others."""
_RAW_STRING = re.compile(r"[:=,(] *`\{[^`\n]{1,1000}`[,);]{1,3}\s*$")
"""JSON in a program of Go or JavaScript."""


def _openings(line: str) -> Iterator[re.Match[str]]:
    """Give where quotations begin in a line: nowhere without a quotation mark."""
    if _RAW_STRING.search(line):
        return
    if '"' in line or "'" in line:
        yield from _OPENING.finditer(line)


_CAUSES = re.compile(
    r"(?<=\bCaused by:\n)(?:[ \t]{2,40}\S[^\n]{0,1000}(?:\n|\Z)){1,20}"
)
"""The chain of causes that programs in Rust print, each on a line of its own."""
_LONG_INDENT = re.compile(r"[ \t]{40,}")
_UNBROKEN = re.compile(r"\S{1000,}")
"""Data, not words: tensors printed without blanks, encoded files.  The longest word of
the messages in the tests, a path, has 160 characters."""
_KEPT_OF_DATA = 300
_DIGITS = re.compile(r"\d+")
_BLANKS = re.compile(r"[ \t\xa0]{2,}")
_RULE_OF_A_TABLE = re.compile(r"^[ \t|]{0,8}:?-{3,200}:? ?\| ?:?-{3}", re.MULTILINE)
_CLOSING = re.compile(r"[\"')}\]]{1,8}[ \t]*\Z")
_BANNER = re.compile(
    r"(?P<mark>[#=~*!>+-])(?P=mark){1,80} {1,4}"
    r"(?P<words>(?!(?P=mark))\S(?:[^\n]{0,240}?\S)?) {1,4}"
    r"(?:(?P=mark){2,80}|(?<=[^<])<{2,80})"
)
"""A line between marks, as programs draw it: "=== exited with 137 ===".  A heading has
its marks in front only, and bold type none with a blank beside it."""


def clean_log(text: str) -> str:
    r"""Take away what a log, a terminal or a quotation added to a message.

    Args:
        text: As it was pasted.

    Returns:
        The same words, with the breaks between lines that are left; a blank line
        stands between paragraphs.

    >>> clean_log("[rank0]: \x1b[31mCUDA out of\n[rank0]: memory.\x1b[0m")
    'CUDA out of memory.'
    >>> clean_log('{"msg": "CUDA out of memory.\\nTried to"}')
    'CUDA out of memory. Tried to'
    >>> clean_log('{"exit": {"code": 137, "oom": true}, "msg": "task exited"}')
    'exit code: 137\nexit oom: true\ntask exited'
    """
    # Colours first: their letters stand between a break and what it breaks.
    text = _ESCAPED_COLOUR.sub("", text)
    text = _BREAK.sub("\n", text)
    text = without_json(text)
    text = _PARTED_SCOPE.sub("::", text)
    for represented, words in _REPRESENTATIONS:
        text = represented.sub(words, text)
    text = _LONG_INDENT.sub(" " * 40, text)
    text = _UNBROKEN.sub(_shorten_data, text)
    raw_lines = _BREAK.sub("\n", text).split("\n")
    text = "\n".join(map(_begin_lines_at_quotations, raw_lines))
    text = unfold_tracebacks(text, BEGINS_ANEW)
    text = _CAUSES.sub(_begin_each_cause_anew, text)
    joined = join_lines(list(_without_repetitions(_clean_lines(text))))
    openings = [match for line in raw_lines for match in _openings(line)]
    return _JOINED_LITERALS.sub("", _without_closing_marks(joined, openings))


def with_levels_as_labels(cleaned: str, text: str) -> str:
    r"""Write the level of an error, which a log had before a line, as its label.

    Args:
        cleaned: What :func:`clean_log` left of the text.
        text: As it was pasted.

    Returns:
        The cleaned text with "error: " before the lines that such a level stood before;
        not where one went on in the next line.

    >>> text = "FATAL: heap limit exceeded\nINFO: 3 workers ended, none is left"
    >>> with_levels_as_labels(clean_log(text), text)
    'error: heap limit exceeded\n3 workers ended, none is left'
    """
    lines = _COLOUR.sub("", _ESCAPED_COLOUR.sub("", text)).split("\n")
    kinds = kinds_of_prefixes(lines) | _ALONE
    labelled = []
    position = 0
    error_lines = itertools.islice(filter(states_an_error, lines), _MOST_LABELLED)
    for line in error_lines:
        words = _BLANKS.sub(" ", without_prefixes(line, kinds)).strip()
        start = cleaned.find(words[:_RECOGNISED_BY], position) if words else -1
        is_line = start == 0 or (start > 0 and cleaned[start - 1] == "\n")
        if is_line:
            labelled += [cleaned[position:start], "error: "]
            position = start
    return "".join([*labelled, cleaned[position:]])


_RECOGNISED_BY = 40
"""Characters by which a line is found again; what is behind them can be joined."""
_MOST_LABELLED = 200
"""Lines that are looked for in the whole text: so the time stays linear in it."""


def _without_closing_marks(text: str, openings: list[re.Match[str]]) -> str:
    r"""Take away the marks that end quotations at the end of a text.

    Args:
        text: A text in which quotations began.
        openings: Where, the outermost first.

    >>> quoted = "RuntimeError('{\"msg\": \"no memory for 'x'\"}')"
    >>> openings = list(_OPENING.finditer(quoted))
    >>> _without_closing_marks("no memory for 'x'\"}')", openings)
    "no memory for 'x'"
    """
    for opening in openings[:MOST_NESTED]:
        inside = text.rstrip(" )}]")
        if not inside.endswith(opening.group()[-1]):
            break
        text = inside[:-1]
    return text


_PARAGRAPH_BREAK = re.compile(r"[ \t]*(?:>[ \t]*)?(?:(?:```|~~~)[\w-]{0,20})?\s*")
"""A blank line or a fence of Markdown, quoted or not."""


def _clean_lines(text: str) -> Iterator[Line]:
    """Give the lines that say something, and where paragraphs begin."""
    raw_lines = text.split("\n")
    kinds = kinds_of_prefixes(raw_lines)
    if _RULE_OF_A_TABLE.search(text):
        kinds -= {("cell", 0)}
    begins_paragraph = False
    is_first = True
    for raw_line in raw_lines:
        if _PARAGRAPH_BREAK.fullmatch(raw_line):
            begins_paragraph = True
            continue
        begins_text = is_first or raw_line.startswith(tuple(MARKS))
        kinds_here = kinds | _ALONE if begins_text else kinds
        line = _clean_line(raw_line.rstrip(), kinds_here)
        # A line that held nothing but a progress bar was drawn through the text; one
        # with nothing behind its prefix is blank.
        if _PARAGRAPH_BREAK.fullmatch(line.words) and line.words:
            begins_paragraph = True
        elif line.words:
            yield line._replace(begins_paragraph=begins_paragraph)
            begins_paragraph = is_first = False
        elif not _PROGRESS.search(raw_line):
            begins_paragraph = True


_ALONE = frozenset(
    itertools.product(("time", "quoted", "process", "rank"), range(MOST_PREFIXES))
)
"""What is a prefix of the first line also where no other has it: wrapping puts nothing
there."""


def _begin_lines_at_quotations(raw_line: str) -> str:
    r"""Begin lines with what is quoted, and break them where a quotation says so.

    >>> _begin_lines_at_quotations(r"ValueError('out of\nmemory')")
    "ValueError:\nout of\nmemory\u2064')"
    """
    if "\\n" in raw_line:
        raw_line = _BREAK_THAT_OPENS.sub(r"\1", raw_line)
    line = _BREAK.sub("\n", _ESCAPED.sub(_unescape_sequence, raw_line))
    # Escaped breaks are those of the text that was quoted.  Without any it is the
    # quotation that was broken, with all that stands before it.
    was_wrapped_before = "\n" in line
    line = _COLOUR.sub("", line.replace("\r", "\n"))
    pieces = []
    position = 0
    for opening in _openings(line):
        columns = 0 if was_wrapped_before else opening.end()
        pieces += [
            line[position : opening.start()],
            _start_line_of_quotation(opening, columns),
        ]
        position = opening.end()
    quoted = line[position:]
    if position and was_wrapped_before:
        quoted = _CLOSING.sub(lambda marks: NOT_COUNTED + marks.group(), quoted)
    return "".join([*pieces, quoted])


def _start_line_of_quotation(match: re.Match[str], columns: int) -> str:
    """Begin a line with what is quoted; that it is an error stays before it.

    Args:
        match: Where the quotation begins.
        columns: What the line has before it; counted in the line's width.
    """
    before = COLUMN * columns
    if match["name"]:
        return f"{match['name']}:\n{before}"
    if (match["key"] or "").lower() == "error":
        before = before[len("error: ") :]
        return f"\n{BEGINS_ANEW}{before}error: "
    return f"\n{BEGINS_ANEW}{before}"


def _clean_line(line: str, kinds: frozenset[tuple[str, int]]) -> Line:
    begins_anew = line.startswith(BEGINS_ANEW)
    line = line.removeprefix(BEGINS_ANEW)
    counted, *_ = line.split(NOT_COUNTED)
    line = line.lstrip(COLUMN).replace(NOT_COUNTED, "")
    # A bar can stand behind a prefix, and a prefix behind a bar.  Behind a prefix there
    # is a blank, which an empty line has lost.
    line = f"{line} "
    words = without_prefixes(line, kinds)
    without_bar = words
    if _MARK_OF_A_BAR.search(words):
        without_bar = _PROGRESS.sub(" ", words)
    if without_bar != words:
        words = without_prefixes(without_bar, kinds)
    before = line[: len(line) - len(words.lstrip(" \t"))]
    indentation = len(before) - len(before.rstrip(" \t"))
    words = _BLANKS.sub(" ", words).strip()
    banner = _BANNER.fullmatch(words)
    if banner is not None:
        words = banner["words"]
    return Line(len(counted), words, begins_anew, indentation)


def _begin_each_cause_anew(match: re.Match[str]) -> str:
    lines = match.group().split("\n")
    return "\n".join(f"{BEGINS_ANEW}{line.lstrip()}" if line else "" for line in lines)


def _shorten_data(match: re.Match[str]) -> str:
    data = match.group()
    return f"{data[:_KEPT_OF_DATA]} {data[-_KEPT_OF_DATA:]}"


def _without_repetitions(lines: Iterable[Line]) -> Iterator[Line]:
    """Leave out lines that differ from earlier ones in their numbers only.

    The messages of eight ranks stay whole; thousands of lines of a training log do not.
    """
    seen: Counter[str] = Counter()
    for line in lines:
        shape = _DIGITS.sub("0", line.words)
        seen[shape] += 1
        if seen[shape] <= MOST_REPETITIONS:
            yield line


def _unescape_sequence(match: re.Match[str]) -> str:
    code, letter = match.groups()
    if code is not None:
        return chr(int(code, 16))
    if letter is None:
        return "\x1b"
    return _WHITESPACE.get(letter.lower(), letter)
