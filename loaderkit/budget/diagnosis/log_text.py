"""A message as its system wrote it, out of what a log made of it.  Pure.

A log colours a message, puts a time and a rank in front of its lines, draws progress
bars through it, quotes it in JSON and breaks it at the width of a terminal.  Nothing of
that is part of the message, so all of it is taken away before anything is read.
"""

from __future__ import annotations

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
_WHITESPACE = {"n": "\n", "r": "\n", "t": " "}
_COLOUR = re.compile(
    r"\x1b\[[0-9;?]{0,20}[A-Za-z]"  # as a terminal gets it
    r"|\x1b\][^\x07\n]{0,200}\x07"
    r"|\^\[\[[0-9;]{0,20}m"  # as an editor shows it
    r"|\[(?:\d{1,2};){0,3}\d{0,2}m\b"  # where the escape character was lost in copying
)
_JOINED_LITERALS = re.compile(r"(?<![\"'])([\"']) ?\+\s{1,40}\1")
"""Where node breaks a long string that it prints."""
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
    r"|(?:^[\w ]{0,40} )?[━╸╺╴─█▉▊▋▌▍▎▏░▒▓]{3,300}(?: \d{1,3}%)?(?: \d+:\d\d:\d\d)?",
    re.MULTILINE,
)
_LEVEL = r"(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|NOTICE|TRACE)"
_CLOCK = r"\d{1,2}:\d\d:\d\d(?:[.,:]\d{1,9})?"
_OPENING = re.compile(
    r"\{? ?\"(?P<key>[\w.]{1,40})\" ?: ?\""
    r"|(?<!\braise )(?<!\bthrow )(?<!\bnew )\b(?P<name>\w{0,60}(?:Error|Exception))"
    r"\((?:b|r)?[\"']|^b['\"]",
    re.MULTILINE,
)
"""Where a quotation begins: a field of JSON, the repr of an exception or of bytes."""
_PROCESS = r"\((?:[\w.:-]{1,60} ){0,3}(?:pid|ip|rank|node)=[^()\n]{1,120}\)"
_PREFIX = re.compile(
    r"[ \t]*(?:"
    # times
    rf"[\[(]?\d{{4}}[-/]\d\d[-/]\d\d[T _]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?[\])]?,?"
    rf"|[\[(]?{_CLOCK}[\])]?:?(?=[ \t])"
    r"|(?:time|ts)=\"?\d{4}-\d\d-\d\d[T ][\d:.,]{5,20}(?:Z|[+-]\d\d:?\d\d)?\"?(?=[ \t])"
    # syslog and journalctl, in any language; who logged is a part of the message
    rf"|[^\W\d_]{{3,9}}\.? {{1,2}}\d{{1,2}} {_CLOCK} "
    r"(?:[\w.-]{1,60} )?(?:kernel:|(?=[\w.@-]{1,60}\[\d{1,9}\]:))"
    r"|\[ {0,6}\d{1,9}\.\d{3,6}\]"
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
    rf"|{_PROCESS}"
    r"|\(raylet\)|spid\d{1,5}s?(?=[ \t])"
    r"|\d{1,5}:(?=[ \t])"
    r"|[\w.-]{1,60}[ \t]{1,20}\|(?=[ \t]|$)"
    # quoted in a reply, by pytest, by a box of rich
    r"|>(?=[ \t])|E(?=[ \t]{2,})|[│┃╎]|std(?:err|out):(?=[ \t])"
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
    r"Traceback|File \"|[\w.]{1,80}(?:Error|Exception|Warning)\b|Killed\b|Bus error\b"
    rf"|\[ ?{_LEVEL} ?\]|\|? ?:?-{{3,200}}:? ?\|"
)
"""How a line begins that goes on with no other."""
_ENDS_UNFINISHED = re.compile(
    r"\w error:$|\s[:-]$|\.\w{1,4}:\d{1,6}:$"
    r"|\s(?:a|an|and|as|at|by|for|from|in|is|of|on|or|plus|than|the|to|was|with)$"
)
"""A line that announces what the next begins with: "but got error:", "(92) -",
"alloc.cpp:73:", "was killed by"."""
_LONGEST_END = 20
"""Characters of what a line can announce something with, such as ".cpp:123456:"."""
_TABLE_ROW = re.compile(r"[A-Za-z][\w ()/-]{0,40}: ?[\d.,]{1,24}(?: ?[KMGT]?i?B)?")
"""A label and its number: rows of a table are equally wide without being wrapped."""
_PROCESS_AT_START = re.compile(rf"(?:^|(?<=[\])Z,.\d] )){_PROCESS}", re.MULTILINE)
_RANK_AT_START = re.compile(
    r"(?:^|(?<=[\])Z,.\d] )|(?<=[A-Za-z]:))\d{1,5}:(?=[ \t])", re.MULTILINE
)
_QUOTED_LINE = re.compile(
    r"(?:^[ \t]{0,80}|(?<=[\])Z,.\d:-] )|(?<=\w:))>(?=[ \t])", re.MULTILINE
)
_RULE_OF_A_TABLE = re.compile(r"^[ \t|]{0,8}:?-{3,200}:? ?\| ?:?-{3}", re.MULTILINE)
_CELL_AT_START = re.compile(r"^[\w.-]{1,60}[ \t]{1,20}\|(?=[ \t])", re.MULTILINE)
"""In a table a first cell, and else the name of a container that logged the line."""
_BEGINS_ANEW = "\u2063"
"""Stands before what is quoted while lines are joined: it goes on no other line."""
_KEPT = "\u2060"
"""Stands before what is no prefix while prefixes are taken away: no log has it."""
_MOST_PREFIXES = 6
"""A line of ray about vLLM on a rank has five."""


class _Line(NamedTuple):
    """A line of a log."""

    width: int
    """Columns, with its prefixes and its indentation."""
    words: str
    """What is left of it."""
    begins_anew: bool = False
    """Whether it is known to go on with no line before it."""
    begins_paragraph: bool = False
    """Whether a blank line, or the fence of a block of Markdown, stands before it."""


_PATH_TO_A_CLASS = re.compile(r"\b[a-z]\w{0,40}\.[A-Z][a-z]\w{0,40}$")
_END_OF_A_CLASS = re.compile(r"[A-Z]\w{0,60}(?:Error|Exception)\b")
"""The two halves of "cupy.cuda.memory.Out|OfMemoryError"."""
_CONTRACTION = re.compile("n?['\u2019]t\b")
_CONSTANT = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+){2,}")
_HYPHEN_OF_A_WORD = re.compile(r"\w-$")
_LONGEST_PART = 40
"""Characters of a part of a word at the end of a line."""
_LAST_WORD = re.compile(r"[A-Za-z0-9_.,]{1,40}$")
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
    text = _without_json(text)
    text = _UNBROKEN.sub(_shorten_data, _LONG_INDENT.sub(" " * 40, text))
    text = (
        _ESCAPED.sub(_unescape_sequence, text).replace("\r\n", "\n").replace("\r", "\n")
    )
    text = _COLOUR.sub("", text)
    text = _OPENING.sub(_start_line_of_quotation, text)
    if _RULE_OF_A_TABLE.search(text):
        text = _CELL_AT_START.sub(_mark_as_message, text)
    for ambiguous in (_PROCESS_AT_START, _RANK_AT_START, _QUOTED_LINE):
        # A single "(pid=129)", "2:" or ">" is a part of the message, which wrapping put
        # there; a prefix is on all lines, and of one line it does no harm.
        if len(ambiguous.findall(text)) == 1:
            text = ambiguous.sub(_mark_as_message, text)
    joined = _join_lines(list(_without_repetitions(_clean_lines(text))))
    return _JOINED_LITERALS.sub("", joined)


_RECORD_OPENING = re.compile(
    r"^[^\n{]{0,200}?(?P<record>\{(?=\"|[ \t]*\n))", re.MULTILINE
)
"""A brace before a name, or before names on lines of their own."""
_END_OF_RECORD = re.compile(r"[ \t\r,'\"]*(?=\n|\Z)")
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
_KEY_OF_AN_ERROR = re.compile(r"err(?:or)?\Z", re.IGNORECASE)


def _without_json(text: str) -> str:
    """Write records of JSON as lines: their messages, and labels with their values."""
    pieces: list[str] = []
    position = failures = 0
    for opening in _RECORD_OPENING.finditer(text):
        start = opening.end() - len(opening["record"])
        if start < position or failures == _MOST_FAILURES:
            continue
        record, length = _decode_record(text[start : start + _LONGEST_RECORD])
        if record is None:
            failures += 1
            continue
        pieces.append(text[position:start])
        pieces += [
            f"\n{_BEGINS_ANEW}{field}" for field in _fields_of_record(record, ())
        ]
        position = start + length
    return "".join([*pieces, text[position:]])


def _decode_record(text: str) -> tuple[object, int]:
    r"""Read the record that a text begins with, up to the end of its last line.

    >>> _decode_record('{"code": 137}\nkilled'), _decode_record('{"code": 137} died')
    (({'code': 137}, 13), (None, 0))
    """
    try:
        record, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0
    rest = _END_OF_RECORD.match(text, end)
    return (None, 0) if rest is None else (record, rest.end())


_DECODER = json.JSONDecoder(strict=False)


def _fields_of_record(value: object, path: tuple[str, ...]) -> Iterator[str]:
    """Give what the fields of a record say, a line each.

    >>> list(_fields_of_record({"exit": {"code": 137}, "msg": "died"}, ()))
    ['exit code: 137', 'died']
    """
    if len(path) > _MOST_NESTED:
        return
    if isinstance(value, dict):
        for key, member in value.items():
            yield from _fields_of_record(member, (*path, str(key)))
    elif isinstance(value, list):
        for member in value[:_MOST_REPETITIONS]:
            yield from _fields_of_record(member, path)
    elif isinstance(value, str):
        yield _words_of_field(path[-1] if path else "", value, path)
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
    begins_paragraph = False
    for raw_line in text.split("\n"):
        if _PARAGRAPH_BREAK.fullmatch(raw_line):
            begins_paragraph = True
            continue
        line = _clean_line(raw_line.rstrip())
        # A line that held nothing but a progress bar was drawn through the text.
        if line.words:
            yield line._replace(begins_paragraph=begins_paragraph)
            begins_paragraph = False


def _mark_as_message(match: re.Match[str]) -> str:
    """Mark what is no prefix; before another one it is one, such as a level."""
    is_prefix = _PREFIX.match(match.string, match.end()) is not None
    return match.group() if is_prefix else _KEPT + match.group()


def _start_line_of_quotation(match: re.Match[str]) -> str:
    """Begin a line with what is quoted; that it is an error stays before it."""
    if match["name"]:
        return f"{match['name']}:\n"
    is_error = (match["key"] or "").lower() == "error"
    return f"\n{_BEGINS_ANEW}error: " if is_error else f"\n{_BEGINS_ANEW}"


def _clean_line(line: str) -> _Line:
    begins_anew = line.startswith(_BEGINS_ANEW)
    line = line.removeprefix(_BEGINS_ANEW)
    # A bar can stand behind a prefix, and a prefix behind a bar.
    words = _PROGRESS.sub(" ", _without_prefixes(line))
    words = _without_prefixes(words).replace(_KEPT, "")
    return _Line(len(line), _BLANKS.sub(" ", words).strip(), begins_anew)


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


def _without_prefixes(line: str) -> str:
    start = 0
    for _ in range(_MOST_PREFIXES):
        match = _PREFIX.match(line, start)
        if match is None:
            break
        start = match.end()
    return line[start:]


def _join_lines(lines: list[_Line]) -> str:
    """Join lines: broken words without anything, wrapped lines with a blank.

    A terminal breaks at its last column, whatever stands there, and ``textwrap`` does
    so to a word that is longer than a line: only at the end of a full line, one that no
    neighbour is longer than.  Any other wrapped line ends where the next word would not
    have fitted any more.
    """
    pieces = []
    for number, line in enumerate(lines):
        pieces.append(line.words)
        if number + 1 == len(lines):
            break
        following = lines[number + 1]
        is_row = _TABLE_ROW.fullmatch(following.words) is not None
        if following.words[0].islower() and not _TABLE_ROW.fullmatch(line.words):
            is_row = False  # "failed with exit|code: 137": a table does not begin so
        if following.begins_paragraph:
            pieces.append("\n\n")
            continue
        if following.begins_anew or (is_row and not _goes_on(line)):
            pieces.append("\n")
            continue
        neighbours = lines[max(0, number - 1) : number + 3]
        width = max(neighbour.width for neighbour in neighbours)
        if _HYPHEN_OF_A_WORD.search(line.words) and following.words[0].isalnum():
            continue  # textwrap breaks "non-PyTorch" behind its hyphen
        full_neighbours = sum(neighbour.width == width for neighbour in neighbours)
        if line.width == width and _is_broken_word(
            line.words, following.words, by_terminal=full_neighbours > 1
        ):
            continue
        pieces.append(" " if _is_wrapped(line, following, width) else "\n")
    return "".join(pieces)


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


_LITERAL = re.compile(r"[rbf]?([\"'])(?:(?!\1).){1,400}\1,$")
"""A row of a list of strings."""


def _is_wrapped(line: _Line, following: _Line, width: int) -> bool:
    """Whether a line was broken only because the next word did not fit."""
    if not _goes_on(line):
        if _NEW_RECORD.match(following.words):
            return False
        for row in (_ITEM, _FIELD, _LITERAL):
            if row.match(line.words) and row.match(following.words):
                return False
    next_word = following.words.split(" ", 1)[0]
    return line.width + 1 + len(next_word) > width


def _goes_on_with_path(line: str, following: str) -> bool:
    """Whether a path that a line ends with goes on in the next.

    >>> _goes_on_with_path("float on /job:localhost/replica:0", "/task:0/device:GPU:0")
    True
    """
    last = line[line.rfind(" ") + 1 :]
    if not last.startswith("/"):
        return False
    if last[-1] == "/":
        return following[0].isalnum()
    return following[0] == "/" or (last[-1] == ":" and following[0].isdigit())


def _is_broken_word(line: str, following: str, *, by_terminal: bool = False) -> bool:
    """Whether the last word of a line goes on in the next.

    Args:
        line: What it ends with counts.
        following: What it begins with counts.
        by_terminal: Several lines are equally long, so that a terminal probably broke
            them: half a word is enough, known or not.

    >>> _is_broken_word("out of mem", "ory. 1.6"), _is_broken_word("of", "memory")
    (True, False)
    """
    if line[-1] in "([<" or following[0] in ")]>,;:":
        return True
    if _goes_on_with_path(line, following):
        return True
    # Searched from where it can begin: from the start of a line it takes as long as
    # all the rest together.
    last = _LAST_WORD.search(line, max(0, len(line) - _LONGEST_PART))
    first = _FIRST_WORD.match(following)
    if last is None or first is None or not last.group().strip(".,"):
        return False
    left, right = last.group(), first.group()
    if line[: last.start()].endswith(("'", "\u2019")):
        return False  # the ending of "context's"
    ends_clause = left.endswith(",") and not by_terminal
    if (
        _PART_OF_NUMBER.search(left)
        and _PART_OF_NUMBER.match(right)
        and not ends_clause
        and not _DATE_OR_TIME.match(following)
    ):
        return True  # no message has two numbers next to each other
    if _CONTRACTION.match(following):
        return True  # does|n't
    if _PATH_TO_A_CLASS.search(line) and _END_OF_A_CLASS.match(following):
        return True
    if "_" in left + right and _CONSTANT.fullmatch((left + right).strip(".,")):
        return True
    is_whole_name = is_word(left) and not _HUMP.search(left)
    if not by_terminal and right[0].isupper() and is_whole_name:
        return False  # textwrap breaks no word that fits, and a name begins anew
    if not by_terminal and not is_word(left + right):
        return False
    if left[-1] == "_" or right[0] == "_":
        return True
    # "allocate" before "2.00G": an amount begins no other token than its own.
    is_left_whole = is_word(left) or _AMOUNT.fullmatch(left) is not None
    return not (is_left_whole and (is_word(right) or _AMOUNT.match(right)))
