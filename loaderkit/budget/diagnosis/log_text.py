"""A message as its system wrote it, out of what a log made of it.  Pure.

A log colours a message, puts a time and a rank in front of its lines, draws progress
bars through it, quotes it in JSON and breaks it at the width of a terminal.  Nothing of
that is part of the message, so all of it is taken away before anything is read.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.diagnosis.message_words import is_word

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
_LEVEL = r"(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|NOTICE|TRACE)"
_CLOCK = r"\d{1,2}:\d\d:\d\d(?:[.,:]\d{1,9})?"
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


_PROCESS = r"\((?:[\w.:-]{1,60} ){0,3}(?:pid|ip|rank|node)=[^()\n]{1,120}\)"
_PREFIX = re.compile(
    r"[ \t]*(?:"
    # times
    rf"(?P<time>[\[(]?\d{{4}}[-/]\d\d[-/]\d\d[T _]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?[\])]?,?"
    rf"|[\[(]?{_CLOCK}[\])]?:?(?=[ \t]))"
    r"|(?:time|ts)=\"?\d{4}-\d\d-\d\d[T ][\d:.,]{5,20}(?:Z|[+-]\d\d:?\d\d)?\"?(?=[ \t])"
    # syslog and journalctl, in any language; who logged is a part of the message
    rf"|[^\W\d_]{{3,9}}\.? {{1,2}}\d{{1,2}} {_CLOCK} "
    r"(?:[\w.-]{1,60} )?(?:kernel:|(?=[\w.@-]{1,60}\[\d{1,9}\]:))"
    r"|\[ {0,6}\d{1,9}\.\d{3,6}\]"
    # Redis: process and role, time, and a mark for the level
    r"|(?:\d{1,8}:[A-Z]|\[\d{1,8}\]) \d{1,2} [A-Z][a-z]{2} (?:\d{4} )?"
    rf"{_CLOCK} [#*.-](?=[ \t])"
    rf"|[IWEF]\d{{4}} {_CLOCK} +\d+ [\w./:-]{{1,200}}\]"
    # levels, and what logging.basicConfig and vLLM put around them
    rf"|{_LEVEL}:[\w.]{{1,60}}:"
    rf"|-? ?[\w.]{{1,60}} - {_LEVEL} -"
    rf"|[|-]? ?\[?{_LEVEL}\]?(?: \d\d-\d\d {_CLOCK}(?: \[[\w./-]{{1,80}}:\d+\])?"
    r"|(?: \[[\w./-]{1,80}:\d+\])?(?::(?=\s)|[ \t]*[|-](?=\s|$)))"
    rf"|\[[\w.]{{1,60}}\]\[{_LEVEL}\](?: -)?"
    # processes
    r"|\[(?:rank|default|worker)[ _-]?\d{1,6}\]:?"
    r"|\[\d{1,5}\]:"
    r"|\[\d{1,5},\d{1,5}\](?:<std(?:err|out)>)?:?"
    rf"|(?P<process>{_PROCESS})"
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
_LONG_INDENT = re.compile(r"[ \t]{40,}")
_UNBROKEN = re.compile(r"\S{1000,}")
"""Data, not words: tensors printed without blanks, encoded files.  The longest word of
the messages in the tests, a path, has 160 characters."""
_KEPT_OF_DATA = 300
_DIGITS = re.compile(r"\d+")
_MOST_REPETITIONS = 8
_BLANKS = re.compile(r"[ \t\xa0]{2,}")
_NEW_RECORD = re.compile(
    r"Traceback|File \"|[\w.]{1,80}(?:Error|Exception|Warning)\b(?!\))"
    r"|Killed\b|Bus error\b|(?:[a-z]{0,3}make(?:\[\d{1,3}\])?: )?\*{3} ?[A-Z\[]"
    r"|[a-z][\w-]{2,20}: (?:[A-Z]|(?:error|fatal|warning)\b)"
    r"|(?:How|Why|What) (?:can|do|does|to|is|should)\b"
    # What stands in capitals in the midst of a sentence is a name.
    r"|(?:An?|The|This|That|These|Those|If|When|While|In|I|We|You|It|And|But|So|By|For"
    r"|As|On|Or|To|There|Here|Is|Are|Do|Does|Did|Can|Could|Will|Would|Should|My|Our"
    r"|Your|After|Before|Because|Since|Also|Then|Now|Please|Both|Some|Any|All"
    r"|One) [a-z]"
    r"|Any (?:help|ideas?|suggestions?)\b|Thanks\b"
    rf"|(?:\d[\d.:]{{0,20}}[mu]?s? )?\[ ?{_LEVEL} ?\]|\|? ?:?-{{3,200}}:? ?\|"
)
"""How a line begins that goes on with no other."""
_ENDS_UNFINISHED = re.compile(
    r"\w error:$|\s[:-]$|\.\w{1,4}:\d{1,6}:$"
    r"|\b(?:catch|class|except|exception|raises?|throws?)$"
    r"|\s(?:a|an|and|as|at|by|for|from|in|is|of|on|or|plus|than|the|to|was|with)$"
)
"""A line that announces what the next begins with: "but got error:", "(92) -",
"alloc.cpp:73:", "was killed by"."""
_LONGEST_END = 20
"""Characters of what a line can announce something with, such as ".cpp:123456:"."""
_TABLE_ROW = re.compile(r"[A-Za-z][\w ()/-]{0,40}: ?[\d.,]{1,24}(?: ?[KMGT]?i?B)?")
"""A label and its number: rows of a table are equally wide without being wrapped."""
_RULE_OF_A_TABLE = re.compile(r"^[ \t|]{0,8}:?-{3,200}:? ?\| ?:?-{3}", re.MULTILINE)
_BEGINS_ANEW = "\u2063"
"""Stands before what is quoted while lines are joined: it goes on no other line."""
_COLUMN = "\u2062"
"""Stands before what is quoted once for each column that the log has before it."""
_NOT_COUNTED = "\u2064"
"""Stands before the marks that close a quotation of lines that were already broken."""
_MARKS = _BEGINS_ANEW + _COLUMN
_CLOSING = re.compile(r"[\"')}\]]{1,8}[ \t]*\Z")
_MOST_PREFIXES = 6
"""A line of ray about vLLM on a rank has five."""
_BANNER = re.compile(
    r"(?P<mark>[#=~*!>+-])(?P=mark){1,80} {1,4}"
    r"(?P<words>(?!(?P=mark))\S(?:[^\n]{0,240}?\S)?) {1,4}"
    r"(?:(?P=mark){2,80}|(?<=[^<])<{2,80})"
)
"""A line between marks, as programs draw it: "=== exited with 137 ===".  A heading has
its marks in front only, and bold type none with a blank beside it."""


class _Line(NamedTuple):
    """A line of a log."""

    width: int
    """Columns, with its prefixes and its indentation."""
    words: str
    """What is left of it."""
    begins_anew: bool = False
    """Whether it is known to go on with no line before it."""
    indentation: int = 0
    """Blanks before its first word, without those of prefixes that have words."""
    begins_paragraph: bool = False
    """Whether a blank line, or the fence of a block of Markdown, stands before it."""


_PATH_TO_A_CLASS = re.compile(r"\b[a-z]\w{0,40}\.[A-Z][a-z]\w{0,40}$")
_END_OF_A_CLASS = re.compile(r"[A-Z]\w{0,60}(?:Error|Exception)\b")
"""The two halves of "cupy.cuda.memory.Out|OfMemoryError"."""
_CONTRACTION = re.compile(r"n?['\u2019]t\b")
_CONSTANT = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+){2,}")
_HYPHEN_OF_A_WORD = re.compile(r"\w-$")
_LONGEST_PART = 40
"""Characters of a part of a word at the end of a line."""
_LAST_WORD = re.compile(r"[A-Za-z0-9_.,]{1,40}$")
_FULL_STOP = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\b(?:vs|cf))(?<!\betc)[.!?]$")
_ENDS_SENTENCE = re.compile(r"[A-Za-z]+\.{1,3}")
_FIRST_WORD = re.compile(r"[A-Za-z0-9_.,]{1,40}")
_AMOUNT = re.compile(r"\d+(?:\.\d+)?[KMGT]?i?B?\b")
_HUMP = re.compile(r"[a-z][A-Z]")
"""In a name such as "HeapDumpOn", which can go on with a capital."""
_DATE_OR_TIME = re.compile(r"\d{1,4}[-/:]")
_PART_OF_NUMBER = re.compile(r"\d[.,]?$|[.,]?\d")


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
    text = _without_json(text)
    text = _PARTED_SCOPE.sub("::", text)
    for represented, words in _REPRESENTATIONS:
        text = represented.sub(words, text)
    text = _LONG_INDENT.sub(" " * 40, text)
    text = _UNBROKEN.sub(_shorten_data, text)
    raw_lines = _BREAK.sub("\n", text).split("\n")
    text = "\n".join(map(_begin_lines_at_quotations, raw_lines))
    joined = _join_lines(list(_without_repetitions(_clean_lines(text))))
    openings = [match for line in raw_lines for match in _openings(line)]
    return _JOINED_LITERALS.sub("", _without_closing_marks(joined, openings))


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
    for opening in openings[:_MOST_NESTED]:
        inside = text.rstrip(" )}]")
        if not inside.endswith(opening.group()[-1]):
            break
        text = inside[:-1]
    return text


_RECORD_OPENING = re.compile(
    r"^[^\n{]{0,200}?(?P<record>\{(?=\"|[ \t]*\n))", re.MULTILINE
)
"""A brace before a name, or before names on lines of their own."""
_END_OF_RECORD = re.compile(r"[ \t\r,'\")]*(?=\n|\Z)")
_MOST_FAILURES = 20
"""Openings that turn out to be none before the rest is left as it is: each is read up
to its first fault, so that the time stays linear."""
_LONGEST_RECORD = 20_000
"""Characters read as one record of JSON; the longest of the corpora has 2,000."""
_MOST_NESTED = 8
"""Levels of a record; a pod's status, the deepest of the corpora, has six."""
_KEY_OF_A_MESSAGE = re.compile(
    r"(?:\w*(?:message|msg|text|trace|traceback|exception|log)|std(?:err|out)|output"
    r"|stack|what|body|detail)\Z",
    re.IGNORECASE,
)
"""What stands under such a key is what a program printed, and says so itself."""
_KEY_OF_A_LEVEL = re.compile(
    r"(?:log)?(?:level|lvl|severity)(?:name)?\Z", re.IGNORECASE
)
_KEY_OF_AN_ERROR = re.compile(r"err(?:or)?\Z", re.IGNORECASE)


def _without_json(text: str) -> str:
    """Write records of JSON as lines: their messages, and labels with their values."""
    pieces: list[str] = []
    position = failures = 0
    for opening in _RECORD_OPENING.finditer(text):
        start = opening.end() - len(opening["record"])
        if start < position or failures == _MOST_FAILURES:
            continue
        record, length = _decode_record(
            text[start : start + _LONGEST_RECORD], before=text[opening.start() : start]
        )
        if record is None:
            failures += 1
            continue
        pieces.append(text[position:start])
        pieces += [
            f"\n{_BEGINS_ANEW}{field}" for field in _fields_of_record(record, ())
        ]
        position = start + length
    return "".join([*pieces, text[position:]])


def _decode_record(text: str, before: str = "") -> tuple[object, int]:
    r"""Read the record that a text begins with, up to the end of its last line.

    Args:
        text: What begins with the record.
        before: What stands before it in its line.

    >>> _decode_record('{"code": 137}\nkilled'), _decode_record('{"code": 137} died')
    (({'code': 137}, 13), (None, 0))
    >>> _decode_record('{"msg": "out of\nmemory"}')
    ({'msg': 'out of memory'}, 24)
    """
    try:
        record, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0
    rest = _END_OF_RECORD.match(text, end)
    if rest is None:
        return None, 0
    lines = f"{before}{text[:end]}".split("\n")
    if len(lines) > 1 and not _is_strict_json(text[:end]):
        # A break inside of a string is none of the record's, which would be escaped.
        joint = "" if _were_broken_by_terminal(lines) else " "
        first, *others = text[:end].split("\n")
        kinds = _kinds_of_prefixes(lines)
        parts = [_without_prefixes(line, kinds) for line in others]
        try:
            record, _ = _DECODER.raw_decode(joint.join([first, *parts]))
        except ValueError:
            return None, 0
    return record, rest.end()


_DECODER = json.JSONDecoder(strict=False)


def _were_broken_by_terminal(lines: list[str]) -> bool:
    """Whether all lines but the last are full, and one of them ends inside a word."""
    *full_lines, _ = lines
    if {len(line) for line in full_lines} != {max(map(len, lines))}:
        return False
    return any(itertools.starmap(_is_surely_broken, itertools.pairwise(lines)))


def _is_strict_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _fields_of_record(value: object, path: tuple[str, ...]) -> Iterator[str]:
    """Give what the fields of a record say, a line each.

    >>> list(_fields_of_record({"exit": {"code": 137}, "msg": "died"}, ()))
    ['exit code: 137', 'died']
    """
    if len(path) > _MOST_NESTED:
        return
    if isinstance(value, dict):
        for key, member in value.items():
            # A level is left out as it is in front of a line.
            if _KEY_OF_A_LEVEL.match(key) and isinstance(member, str):
                continue
            yield from _fields_of_record(member, (*path, str(key)))
    elif isinstance(value, list):
        for member in value[:_MOST_REPETITIONS]:
            yield from _fields_of_record(member, path)
    elif isinstance(value, str):
        # A line of a log can be one of another program's log.
        words = _without_json(value)
        key = path[-1] if path and words == value else "message"
        yield _words_of_field(key, words, path)
    else:
        yield f"{' '.join(path)}: {json.dumps(value)}"


def _words_of_field(key: str, words: str, path: tuple[str, ...]) -> str:
    if _KEY_OF_A_MESSAGE.match(key):
        return words
    if _KEY_OF_AN_ERROR.match(key):
        return f"error: {words}"
    return f"{' '.join(path)}: {words}"


_PARAGRAPH_BREAK = re.compile(r"[ \t]*(?:>[ \t]*)?(?:(?:```|~~~)[\w-]{0,20})?\s*")
"""A blank line or a fence of Markdown, quoted or not."""


def _clean_lines(text: str) -> Iterator[_Line]:
    """Give the lines that say something, and where paragraphs begin."""
    raw_lines = text.split("\n")
    kinds = _kinds_of_prefixes(raw_lines)
    if _RULE_OF_A_TABLE.search(text):
        kinds -= {("cell", 0)}
    begins_paragraph = False
    is_first = True
    for raw_line in raw_lines:
        if _PARAGRAPH_BREAK.fullmatch(raw_line):
            begins_paragraph = True
            continue
        begins_text = is_first or raw_line.startswith(tuple(_MARKS))
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


def _kinds_of_prefixes(lines: list[str]) -> frozenset[tuple[str, int]]:
    """Give the ambiguous kinds of prefixes that are some, each with its ordinal.

    A single "(pid=129)", "2:", "10:00:00" or ">" is a part of the message, which
    wrapping put at the start of a line; a prefix is on all lines.
    """
    counts: Counter[tuple[str, int]] = Counter()
    for line in lines:
        ordinals: Counter[str] = Counter()
        for prefix in _prefixes(line.lstrip(_MARKS)):
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
_ALONE = frozenset(
    itertools.product(("time", "quoted", "process", "rank"), range(_MOST_PREFIXES))
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
        quoted = _CLOSING.sub(lambda marks: _NOT_COUNTED + marks.group(), quoted)
    return "".join([*pieces, quoted])


def _start_line_of_quotation(match: re.Match[str], columns: int) -> str:
    """Begin a line with what is quoted; that it is an error stays before it.

    Args:
        match: Where the quotation begins.
        columns: What the line has before it; counted in the line's width.
    """
    before = _COLUMN * columns
    if match["name"]:
        return f"{match['name']}:\n{before}"
    if (match["key"] or "").lower() == "error":
        before = before[len("error: ") :]
        return f"\n{_BEGINS_ANEW}{before}error: "
    return f"\n{_BEGINS_ANEW}{before}"


def _clean_line(line: str, kinds: frozenset[tuple[str, int]]) -> _Line:
    begins_anew = line.startswith(_BEGINS_ANEW)
    line = line.removeprefix(_BEGINS_ANEW)
    counted, *_ = line.split(_NOT_COUNTED)
    line = line.lstrip(_COLUMN).replace(_NOT_COUNTED, "")
    # A bar can stand behind a prefix, and a prefix behind a bar.  Behind a prefix there
    # is a blank, which an empty line has lost.
    line = f"{line} "
    words = _without_prefixes(line, kinds)
    without_bar = words
    if _MARK_OF_A_BAR.search(words):
        without_bar = _PROGRESS.sub(" ", words)
    if without_bar != words:
        words = _without_prefixes(without_bar, kinds)
    before = line[: len(line) - len(words.lstrip(" \t"))]
    indentation = len(before) - len(before.rstrip(" \t"))
    words = _BLANKS.sub(" ", words).strip()
    banner = _BANNER.fullmatch(words)
    if banner is not None:
        words = banner["words"]
    return _Line(len(counted), words, begins_anew, indentation)


def _shorten_data(match: re.Match[str]) -> str:
    data = match.group()
    return f"{data[:_KEPT_OF_DATA]} {data[-_KEPT_OF_DATA:]}"


def _without_repetitions(lines: Iterable[_Line]) -> Iterator[_Line]:
    """Leave out lines that differ from earlier ones in their numbers only.

    The messages of eight ranks stay whole; thousands of lines of a training log do not.
    """
    seen: Counter[str] = Counter()
    for line in lines:
        shape = _DIGITS.sub("0", line.words)
        seen[shape] += 1
        if seen[shape] <= _MOST_REPETITIONS:
            yield line


def _unescape_sequence(match: re.Match[str]) -> str:
    code, letter = match.groups()
    if code is not None:
        return chr(int(code, 16))
    if letter is None:
        return "\x1b"
    return _WHITESPACE.get(letter.lower(), letter)


def _prefixes(line: str) -> Iterator[re.Match[str]]:
    """Give what stands before a line, one behind the other."""
    start = 0
    for _ in range(_MOST_PREFIXES):
        match = _PREFIX.match(line, start)
        if match is None:
            return
        yield match
        start = match.end()


def _without_prefixes(line: str, kinds: frozenset[tuple[str, int]]) -> str:
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


def _join_lines(lines: list[_Line]) -> str:
    """Join lines: broken words without anything, wrapped lines with a blank.

    A terminal breaks at its last column, whatever stands there, and ``textwrap`` does
    so to a word that is longer than a line: only at the end of a full line, one that no
    neighbour is longer than.  Any other wrapped line ends where the next word would not
    have fitted any more.
    """
    terminals = _widths_of_terminals(lines)
    indentation = _usual_indentation(lines) if lines else 0
    pieces = []
    for number, line in enumerate(lines):
        pieces.append(line.words)
        if number + 1 == len(lines):
            break
        following = lines[number + 1]
        is_row = _TABLE_ROW.fullmatch(following.words) is not None
        if is_row and not _TABLE_ROW.fullmatch(line.words):
            # "failed with exit|code: 137": a table neither begins so nor has one row.
            is_first = any(
                _TABLE_ROW.fullmatch(below.words)
                for below in lines[number + 2 : number + 3]
            )
            is_row = is_first and not following.words[0].islower()
        if following.begins_paragraph:
            pieces.append("\n\n")
            continue
        is_anew = following.begins_anew or _is_statement_below(line, following)
        if is_anew or (is_row and not _goes_on(line)):
            pieces.append("\n")
            continue
        width = _width_around(lines, number)
        # A terminal leaves a blank at which it breaks at the start of the next line.
        if following.indentation == indentation + 1 and line.width == width:
            pieces.append(" " if _is_wrapped(line, following, width) else "\n")
            continue
        if _HYPHEN_OF_A_WORD.search(line.words) and following.words[0].isalnum():
            continue  # textwrap breaks "non-PyTorch" behind its hyphen
        if line.width == width and _is_broken_word(
            line.words, following.words, by_terminal=width in terminals
        ):
            continue
        goes_on = _is_wrapped(line, following, width) or _is_midst_of_sentence(
            line, following
        )
        pieces.append(" " if goes_on else "\n")
    return "".join(pieces)


_ENDS_IN_MIDST = re.compile(r" [^ ]*[\w,(]$")
_BEGINS_IN_MIDST = re.compile(
    r"(?!(?:out of|killed|cannot|could not|can't|fail\w*|error|oom|terminat\w*|fatal"
    r"|abort\w*|insufficient|not enough|unable)\b)[a-z][\w'-]* "
)
"""A word in small letters with others behind it, but for those with which a program
begins to say that something failed."""


def _is_midst_of_sentence(line: _Line, following: _Line) -> bool:
    """Whether somebody broke a sentence by hand, at a width of their own.

    >>> _is_midst_of_sentence(_Line(20, "unable to"), _Line(20, "allocate a buffer"))
    True
    >>> _is_midst_of_sentence(_Line(20, "epoch 3 ended"), _Line(20, "out of memory"))
    False
    """
    if line.indentation != following.indentation:
        return False
    if _ENDS_IN_MIDST.search(line.words) is None:
        return False
    if _BEGINS_IN_MIDST.match(following.words) is None:
        return False
    return not any(row.match(following.words) for row in (_ITEM, _FIELD, _LITERAL))


_COMMENT = re.compile(r"(?:#|//|--|%)[ ]\w")
_END_OF_STATEMENT = re.compile(r"[\w\"'`)]\)$|[;{}]$")
_ASSIGNMENT = re.compile(r"[a-z][\w.]{0,40} :?= \w[\w.]{0,40}\(")
_JUMP = re.compile(
    r"(?:return|raise|throw|break|continue|goto)\b(?! (?:code|value|status))"
)
_STATEMENT = re.compile(
    r"[\w.]{1,60}\([^\n]{0,160}\)[;,]?$|[^\n]{0,160}[;{}]$"
    r"|(?:return|break|continue|pass|raise|throw|yield)\b"
)


_LABEL_OF_AN_ERROR = re.compile(r"(?:[A-Z][\w.]{0,60})?(?:Error|Exception): \S")


def _is_statement_below(line: _Line, following: _Line) -> bool:
    """Whether a line of a program follows another one, or the comment on it.

    So does an error the words that announce it.

    >>> _is_statement_below(_Line(14, "# out of memory"), _Line(8, "evict(n)"))
    True
    >>> _is_statement_below(_Line(14, 'log("out of memory")'), _Line(8, "return nil"))
    True
    """
    if _COMMENT.match(line.words):
        return _STATEMENT.match(following.words) is not None
    if line.words.endswith(":") and _LABEL_OF_AN_ERROR.match(following.words):
        return True
    if _END_OF_STATEMENT.search(line.words) is None:
        return False
    is_assignment = _ASSIGNMENT.match(following.words) is not None
    return is_assignment or _JUMP.match(following.words) is not None


def _width_around(lines: list[_Line], number: int) -> int:
    """Give the width of the widest line beside one."""
    return max(neighbour.width for neighbour in lines[max(0, number - 1) : number + 3])


def _usual_indentation(lines: list[_Line]) -> int:
    """Give the indentation that most lines have, the smallest of several."""
    counts = Counter(line.indentation for line in lines)
    return min(counts, key=lambda indentation: (-counts[indentation], indentation))


def _widths_of_terminals(lines: list[_Line]) -> frozenset[int]:
    """Give the widths of the lines that a terminal broke, in the midst of a word.

    Where it broke one word for certain, it did so wherever a line is full.
    """
    widths: set[int] = set()
    indentation = _usual_indentation(lines) if lines else 0
    for number, (line, following) in enumerate(itertools.pairwise(lines)):
        if following.begins_anew or following.begins_paragraph:
            continue
        if line.width != _width_around(lines, number):
            continue
        begins_with_blank = following.indentation == indentation + 1
        if begins_with_blank or _is_surely_broken(line.words, following.words):
            widths.add(line.width)
    return frozenset(widths)


def _is_surely_broken(line: str, following: str) -> bool:
    """Whether two lines hold the halves of a word, and neither half is one.

    >>> _is_surely_broken("out of memo", "ry"), _is_surely_broken("can", "not")
    (True, False)
    """
    if _is_part_of_long_word(line, following):
        return False
    last = _LAST_WORD.search(line, max(0, len(line) - _LONGEST_PART))
    first = _FIRST_WORD.match(following)
    if last is None or first is None:
        return False
    left, right = last.group(), first.group()
    if not left[-1].isalnum() or not right[0].isalnum():
        return False
    if _SINGLE_LETTER.match(following) or _CONTRACTION.match(following):
        return True
    if left[-1].isdigit() and right[0].isdigit():
        return not _DATE_OR_TIME.match(following)
    return is_word(left + right) and not (is_word(left) and is_word(right))


def _goes_on(line: _Line) -> bool:
    """Whether a line announces what the next begins with."""
    end = max(0, len(line.words) - _LONGEST_END)
    return _ENDS_UNFINISHED.search(line.words, end) is not None


_ITEM = re.compile(
    r"(?:[-*\u2022|]|\d{1,6}[.)])[ \t]|\d{1,6}[ \t](?!(?:[KMGT]?i?B|bytes)\b)[A-Za-z]"
)
"""How a row of a list or of a table begins."""
_FIELD = re.compile(
    r"(?![\w.-]{0,60}:\d{1,6}(?:\]| ?:))"  # "cc:1753]": a place in source code
    r"(?![^:]{0,60}:[^:]{0,60}:.{0,200},$)"  # "python: page allocation failure: 4,"
    r"(?:(?-i:[a-z])[\w.-]{0,30}: ?[^\s\[]|[\w\"']{2,60} ?[=:] ?\S{1,40},$)"
)
"""A field of YAML, or a member of an enumeration."""


_MOST_WORDS_OF_FIELD = 6
"""Blanks of a line that is a field; of the corpora's fields none has more, and
"allocator: failed to map a workspace of 2048|bytes: no space" is a sentence."""
_LITERAL = re.compile(r"[rbf]?([\"'])(?:(?!\1).){1,400}\1,?$")
"""A row of a list of strings, or of strings that a program joins."""
_RULE = re.compile(r"[-=~]{4,200}")
"""What is drawn below a heading."""


def _is_wrapped(line: _Line, following: _Line, width: int) -> bool:
    """Whether a line was broken only because the next word did not fit."""
    if _RULE.fullmatch(line.words) or _RULE.fullmatch(following.words):
        return False
    if not _goes_on(line):
        if _NEW_RECORD.match(following.words):
            return False
        # Behind a full stop a sentence begins, with a capital letter.
        if _FULL_STOP.search(line.words) and following.words[0].islower():
            return False
        for row in (_ITEM, _FIELD, _LITERAL):
            is_prose = row is _FIELD and line.words.count(" ") > _MOST_WORDS_OF_FIELD
            if is_prose:
                continue
            if row.match(line.words) and row.match(following.words):
                return False
    next_word = following.words.split(" ", 1)[0]
    return line.width + 1 + len(next_word) > width


_IN_A_PATH = re.compile(r"[\w.-]*\w/[\w.-]+")


def _goes_on_with_path(line: str, following: str) -> bool:
    """Whether a path that a line ends with goes on in the next.

    >>> _goes_on_with_path("float on /job:localhost/replica:0", "/task:0/device:GPU:0")
    True
    """
    token = line[line.rfind(" ") + 1 :]
    next_token, *_ = following.split(" ", 1)
    if _IN_A_PATH.search(token) and _IN_A_PATH.match(next_token):
        return True
    last = token.lstrip("<([\"'`")
    if not last.startswith("/") or token == "/":
        return False
    if last[-1] == "/":
        return following[0].isalnum()
    return following[0] == "/" or (last[-1] == ":" and following[0].isdigit())


def _is_part_of_long_word(line: str, following: str) -> bool:
    """Whether a line was filled with the first part of a word that is longer than it.

    ``textwrap`` breaks such words at the last column, wherever that is.

    >>> line = "thrown by org.acme.storage.MapM"
    >>> _is_part_of_long_word(line, "emoryExhaustedException: out of memory")
    True
    """
    left = line[line.rfind(" ") + 1 :]
    right, *_ = following.split(" ", 1)
    if len(left) + len(right) <= len(line):
        return False
    if not left[-1].isalnum() and left[-1] != "=":
        return False
    if not right[0].isalnum() and left[-1] != "=":
        return False
    if _WHOLE_PATH.search(left) or _KEY_OF_A_VALUE.match(right):
        return False
    if right[0].isupper() and is_word(right):
        return False
    return _JOINS_NAMES.search(left) is not None


_JOINS_NAMES = re.compile(r"\w(?:[./\\_]|::)\w")
"""In a path, or in the name of a class with its module."""
_KEY_OF_A_VALUE = re.compile(r"[a-z]\w{1,30}=")
_WHOLE_PATH = re.compile(r"(?:Error|Exception|\.[a-z]{1,4})$")


def _is_number(text: str) -> bool:
    """Whether commas and dots of a number stand where thousands are told apart.

    >>> _is_number("16,384"), _is_number("0.9,14.04")
    (True, False)
    """
    return _THOUSANDS.fullmatch(text.strip(".,")) is not None


_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{2,3})*(?:,\d{3})(?:\.\d+)?|\d+,\d+")
_SINGLE_LETTER = re.compile(r"[b-hj-z](?=[ .,:;)]|$)")
"""What no text begins a line with as a word of its own: require|s more."""
_UNSPACED = re.compile(r"(?:u?int|b?float|complex)\|\d{1,3}|0\|?x[0-9a-f]*\|?[0-9a-f]*")
"""The halves of an element type and of a hexadecimal number."""
_HYPHENATED = re.compile(r"(?:(?:anon|file|shmem)\|-rss|total\|-vm|oom\|-kill)")
"""Words of the kernel's messages, broken before their hyphen."""


def _is_broken_word(line: str, following: str, *, by_terminal: bool = False) -> bool:
    """Whether the last word of a line goes on in the next.

    Args:
        line: What it ends with counts.
        following: What it begins with counts.
        by_terminal: A terminal broke other lines as long as this one: half a word is
            enough, known or not.

    >>> _is_broken_word("out of mem", "ory. 1.6"), _is_broken_word("of", "memory")
    (True, False)
    """
    if line[-1] in "([<" or following[0] in ")]>,;:":
        return True
    if _goes_on_with_path(line, following) or _CONTRACTION.match(following):
        return True
    if _is_part_of_long_word(line, following):
        return True
    if _HYPHENATED.search(f"{line[-_LONGEST_END:]}|{following[:_LONGEST_END]}"):
        return True
    # Searched from where it can begin: from the start of a line it takes as long as
    # all the rest together.
    last = _LAST_WORD.search(line, max(0, len(line) - _LONGEST_PART))
    first = _FIRST_WORD.match(following)
    if last is None or first is None or not last.group().strip(".,"):
        return False
    left, right = last.group(), first.group()
    if not by_terminal and left[0].isdigit() and left[-1] == "." and right[0].isupper():
        return False  # "is -2.31GiB.|Not enough"
    if not by_terminal and _ENDS_SENTENCE.fullmatch(left) and " " in line:
        return False  # "to avoid deadlocks...|Killed"
    if line[: last.start()].endswith(("'", "\u2019")):
        return False  # the ending of "context's"
    # "3,221,|225,472" has no blank anywhere, and a list has one behind each comma.
    is_list = left.endswith(",") and "," not in left[:-1] + right.rstrip(".,")
    ends_clause = is_list and not by_terminal
    if (
        _PART_OF_NUMBER.search(left)
        and _PART_OF_NUMBER.match(right)
        and not ends_clause
        and (left[-1] == "." or not _DATE_OR_TIME.match(following))
    ):
        # No message has two numbers next to each other, but with a comma.
        return left[-1] != "," or _is_number(left + right)
    if _SINGLE_LETTER.match(following) or _UNSPACED.fullmatch(f"{left}|{right}"):
        return True
    if _PATH_TO_A_CLASS.search(line) and _END_OF_A_CLASS.match(following):
        return True
    if (
        "_" in left + right
        and not right[0].isdigit()
        and _CONSTANT.fullmatch((left + right).strip(".,"))
    ):
        return True
    is_whole_name = is_word(left) and not _HUMP.search(left)
    if not by_terminal and right[0].isupper() and is_whole_name:
        return False  # textwrap breaks no word that fits, and a name begins anew
    if not by_terminal and not is_word(left + right):
        return False
    if left[-1] == "_" or right[0] == "_":
        return True
    if left + right == "cannot":
        return True
    # "allocate" before "2.00G": an amount begins no other token than its own.
    is_left_whole = is_word(left) or _AMOUNT.fullmatch(left) is not None
    return not (is_left_whole and (is_word(right) or _AMOUNT.match(right)))
