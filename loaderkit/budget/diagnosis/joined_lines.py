"""The lines of a log, joined where something broke them: a terminal, a wrap.  Pure."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import NamedTuple

from loaderkit.budget.diagnosis.broken_words import (
    LONGEST_END,
    is_broken_word,
    is_surely_broken,
)
from loaderkit.budget.diagnosis.line_prefixes import LEVEL


class Line(NamedTuple):
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


def join_lines(lines: list[Line]) -> str:
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
        if line.width == width and is_broken_word(
            line.words, following.words, by_terminal=width in terminals
        ):
            continue
        goes_on = (
            _is_wrapped(line, following, width)
            or _is_midst_of_sentence(line, following)
            or _is_next_sentence(line, following)
        )
        pieces.append(" " if goes_on else "\n")
    return "".join(pieces)


_TABLE_ROW = re.compile(r"[A-Za-z][\w ()/-]{0,40}: ?[\d.,]{1,24}(?: ?[KMGT]?i?B)?")
"""A label and its number: rows of a table are equally wide without being wrapped."""
_HYPHEN_OF_A_WORD = re.compile(r"\w-$")


def _is_midst_of_sentence(line: Line, following: Line) -> bool:
    """Whether somebody broke a sentence by hand, at a width of their own.

    >>> _is_midst_of_sentence(Line(20, "unable to"), Line(20, "allocate a buffer"))
    True
    >>> _is_midst_of_sentence(Line(20, "epoch 3 ended"), Line(20, "out of memory"))
    False
    """
    if line.indentation != following.indentation:
        return False
    if _ENDS_IN_MIDST.search(line.words) is None:
        return False
    if _BEGINS_IN_MIDST.match(following.words) is None:
        return False
    return not any(row.match(following.words) for row in (_ITEM, _FIELD, _LITERAL))


def _is_next_sentence(line: Line, following: Line) -> bool:
    """Whether somebody put the sentences of an allocator's message on lines.

    >>> _is_next_sentence(
    ...     Line(20, "Tried to allocate 2.00 GiB."),
    ...     Line(40, "Of the allocated memory 5.00 GiB is allocated by PyTorch"),
    ... )
    True
    """
    if not line.words.endswith((".", ",")):
        return False
    return _SENTENCE_OF_AN_ALLOCATOR.match(following.words) is not None


_SENTENCE_OF_AN_ALLOCATOR = re.compile(
    r"GPU \d{1,3} has a total capac|Of (?:the allocated memory|this total)\b"
    r"|(?:Including non-PyTorch memory, )?[Tt]his process has \d"
    r"|Process \d{1,9} has \d[\d.]* [KMGT]iB memory in use"
    r"|(?:and )?\d[\d.]* [KMGT]iB is (?:free|reserved|allocated)\b"
)
"""As torch's message has them, one behind the other in a line."""
_ENDS_IN_MIDST = re.compile(r" [^ ]*[\w,(]$")
_BEGINS_IN_MIDST = re.compile(
    r"(?!(?:out of|killed|cannot|could not|can't|fail\w*|error|oom|terminat\w*|fatal"
    r"|abort\w*|insufficient|not enough|unable)\b)[a-z][\w'-]* "
)
"""A word in small letters with others behind it, but for those with which a program
begins to say that something failed."""


def _is_statement_below(line: Line, following: Line) -> bool:
    """Whether a line of a program follows another one, or the comment on it.

    So does an error the words that announce it.

    >>> _is_statement_below(Line(14, "# out of memory"), Line(8, "evict(n)"))
    True
    >>> _is_statement_below(Line(14, "# out of memory"), Line(12, "# n = load(x)"))
    True
    >>> _is_statement_below(Line(14, 'log("out of memory")'), Line(8, "return nil"))
    True
    """
    comment = _COMMENT.match(line.words)
    if comment is not None:
        # The statements below an error can be commented out, too.
        statement = following.words.removeprefix(comment["mark"]).lstrip()
        return _STATEMENT.match(statement) is not None
    if line.words.endswith(":") and _LABEL_OF_AN_ERROR.match(following.words):
        return True
    if _END_OF_STATEMENT.search(line.words) is None:
        return False
    is_assignment = _ASSIGNMENT.match(following.words) is not None
    return is_assignment or _JUMP.match(following.words) is not None


_COMMENT = re.compile(r"(?P<mark>#|//|--|%)[ ]\w")
_END_OF_STATEMENT = re.compile(r"[\w\"'`)]\)$|[;{}]$")
_ASSIGNMENT = re.compile(r"[a-z][\w.]{0,40} :?= \w[\w.]{0,40}\(")
_JUMP = re.compile(
    r"(?:return|raise|throw|break|continue|goto)\b(?! (?:code|value|status))"
)
_STATEMENT = re.compile(
    r"[\w.]{1,60}\([^\n]{0,160}\)[;,]?$|[^\n]{0,160}[;{}]$"
    r"|(?:return|break|continue|pass|raise|throw|yield)\b"
    r"|(?:[a-z]{2,8} )?[a-z_][\w.]{0,40}(?:\[[^\]\n]{0,40}\])? ?[:+*/-]?= ?"
    r"(?:[\w.]{1,60}[(\[][^\n]{0,160}[)\]]|[\w.\"'-]{1,60});?$"
)
_LABEL_OF_AN_ERROR = re.compile(r"(?:[A-Z][\w.]{0,60})?(?:Error|Exception): \S")


def _width_around(lines: list[Line], number: int) -> int:
    """Give the width of the widest line beside one."""
    return max(neighbour.width for neighbour in lines[max(0, number - 1) : number + 3])


def _usual_indentation(lines: list[Line]) -> int:
    """Give the indentation that most lines have, the smallest of several."""
    counts = Counter(line.indentation for line in lines)
    return min(counts, key=lambda indentation: (-counts[indentation], indentation))


def _widths_of_terminals(lines: list[Line]) -> frozenset[int]:
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
        if begins_with_blank or is_surely_broken(line.words, following.words):
            widths.add(line.width)
    return frozenset(widths)


def _goes_on(line: Line) -> bool:
    """Whether a line announces what the next begins with."""
    end = max(0, len(line.words) - LONGEST_END)
    return _ENDS_UNFINISHED.search(line.words, end) is not None


_ENDS_UNFINISHED = re.compile(
    r"\w error:$|\s[:-]$|\.\w{1,4}:\d{1,6}:$"
    r"|\b(?:catch|class|except|exception|raises?|throws?)$"
    r"|\s(?:a|an|and|as|at|by|for|from|in|is|of|on|or|plus|than|the|to|was|with)$"
)
"""A line that announces what the next begins with: "but got error:", "(92) -",
"alloc.cpp:73:", "was killed by"."""


def _is_wrapped(line: Line, following: Line, width: int) -> bool:
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


_FULL_STOP = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\b(?:vs|cf))(?<!\betc)[.!?]$")
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
    rf"|(?:\d[\d.:]{{0,20}}[mu]?s? )?\[ ?{LEVEL} ?\]|\|? ?:?-{{3,200}}:? ?\|"
)
"""How a line begins that goes on with no other."""
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
