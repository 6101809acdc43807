"""Whether a line ends inside of a word, and the next one goes on with it.  Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.diagnosis.message_words import is_word

if TYPE_CHECKING:
    from collections.abc import Callable


class _Seam(NamedTuple):
    """Where one line ends and the next one begins."""

    line: str
    following: str
    left: str
    """The last word of the line; empty where it ends with something else."""
    right: str
    """The first word of the next."""
    by_terminal: bool
    """A terminal broke other lines as long as this one."""

    @classmethod
    def between(cls, line: str, following: str, *, by_terminal: bool = False) -> _Seam:
        """Look at the last word of a line and the first of the next."""
        # Searched from where it can begin: from the start of a line it takes as long as
        # all the rest together.
        last = _LAST_WORD.search(line, max(0, len(line) - _LONGEST_PART))
        first = _FIRST_WORD.match(following)
        left = last.group() if last is not None else ""
        right = first.group() if first is not None else ""
        return cls(line, following, left, right, by_terminal)

    @property
    def halves(self) -> str:
        """Both words with the break between them."""
        return f"{self.left}|{self.right}"


def is_broken_word(line: str, following: str, *, by_terminal: bool = False) -> bool:
    """Whether the last word of a line goes on in the next.

    Args:
        line: What it ends with counts.
        following: What it begins with counts.
        by_terminal: A terminal broke other lines as long as this one: half a word is
            enough, known or not.

    >>> is_broken_word("out of mem", "ory. 1.6"), is_broken_word("of", "memory")
    (True, False)
    """
    seam = _Seam.between(line, following, by_terminal=by_terminal)
    answers = (question(seam) for question in _QUESTIONS)
    return next((answer for answer in answers if answer is not None), False)


def _has_marks_that_belong_together(seam: _Seam) -> bool | None:
    if seam.line[-1] in "([<" or seam.following[0] in ")]>,;:":
        return True
    # "doesn|'t", and the words of the kernel's messages before their hyphen.
    if _CONTRACTION.match(seam.following):
        return True
    ends = f"{seam.line[-LONGEST_END:]}|{seam.following[:LONGEST_END]}"
    return True if _HYPHENATED.search(ends) else None


def _is_one_long_token(seam: _Seam) -> bool | None:
    if _goes_on_with_path(seam.line, seam.following):
        return True
    return True if _is_part_of_long_word(seam.line, seam.following) else None


def _has_no_words(seam: _Seam) -> bool | None:
    has_words = seam.left.strip(".,") and seam.right
    return None if has_words else False


def _ends_a_sentence(seam: _Seam) -> bool | None:
    left, right = seam.left, seam.right
    if not seam.by_terminal:
        # "is -2.31GiB.|Not enough"
        if left[0].isdigit() and left[-1] == "." and right[0].isupper():
            return False
        # "to avoid deadlocks...|Killed"
        if _ENDS_SENTENCE.fullmatch(left) and " " in seam.line:
            return False
    # The ending of "context's" is no half of a word.
    is_ending = seam.line.removesuffix(left).endswith(("'", "\u2019"))
    return False if is_ending else None


def _is_in_a_number(seam: _Seam) -> bool | None:
    left, right = seam.left, seam.right
    if not _PART_OF_NUMBER.search(left) or not _PART_OF_NUMBER.match(right):
        return None
    # "3,221,|225,472" has no blank anywhere, and a list has one behind each comma.
    is_list = left.endswith(",") and "," not in left[:-1] + right.rstrip(".,")
    if is_list and not seam.by_terminal:
        return None
    if left[-1] != "." and _DATE_OR_TIME.match(seam.following):
        return None
    # No message has two numbers next to each other, but with a comma.
    return left[-1] != "," or _is_number(left + right)


def _is_a_known_token(seam: _Seam) -> bool | None:
    if _SINGLE_LETTER.match(seam.following) or _UNSPACED.fullmatch(seam.halves):
        return True
    if _PATH_TO_A_CLASS.search(seam.line) and _END_OF_A_CLASS.match(seam.following):
        return True
    whole = (seam.left + seam.right).strip(".,")
    is_constant = _CONSTANT.fullmatch(whole) and not seam.right[0].isdigit()
    return True if is_constant else None


def _begins_another_word(seam: _Seam) -> bool | None:
    # A terminal breaks anywhere, also inside of names that nobody lists.
    if seam.by_terminal:
        return None
    # textwrap breaks no word that fits, and a name begins anew.
    is_whole_name = is_word(seam.left) and not _HUMP.search(seam.left)
    if seam.right[0].isupper() and is_whole_name:
        return False
    return None if is_word(seam.left + seam.right) else False


def _is_half_a_word(seam: _Seam) -> bool | None:
    left, right = seam.left, seam.right
    if left[-1] == "_" or right[0] == "_" or left + right == "cannot":
        return True
    # "allocate" before "2.00G": an amount begins no other token than its own.
    is_left_whole = is_word(left) or _AMOUNT.fullmatch(left) is not None
    return not (is_left_whole and (is_word(right) or _AMOUNT.match(right)))


_QUESTIONS: tuple[Callable[[_Seam], bool | None], ...] = (
    _has_marks_that_belong_together,
    _is_one_long_token,
    _has_no_words,
    _ends_a_sentence,
    _is_in_a_number,
    _is_a_known_token,
    _begins_another_word,
    _is_half_a_word,
)
"""Asked in this order; the first that knows decides, the last one always does.  Those
behind ``_has_no_words`` have two words."""


LONGEST_END = 20
"""Characters of what a line can announce something with, such as ".cpp:123456:"."""
_HYPHENATED = re.compile(r"(?:(?:anon|file|shmem)\|-rss|total\|-vm|oom\|-kill)")
"""Words of the kernel's messages, broken before their hyphen."""
_UNSPACED = re.compile(r"(?:u?int|b?float|complex)\|\d{1,3}|0\|?x[0-9a-f]*\|?[0-9a-f]*")
"""The halves of an element type and of a hexadecimal number."""
_PATH_TO_A_CLASS = re.compile(r"\b[a-z]\w{0,40}\.[A-Z][a-z]\w{0,40}$")
_END_OF_A_CLASS = re.compile(r"[A-Z]\w{0,60}(?:Error|Exception)\b")
"""The two halves of "cupy.cuda.memory.Out|OfMemoryError"."""
_CONSTANT = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+){2,}")
_CONTRACTION = re.compile(r"n?['\u2019]t\b")
_SINGLE_LETTER = re.compile(r"[b-hj-z](?=[ .,:;)]|$)")
"""What no text begins a line with as a word of its own: require|s more."""
_LONGEST_PART = 40
"""Characters of a part of a word at the end of a line."""
_LAST_WORD = re.compile(r"[A-Za-z0-9_.,]{1,40}$")
_FIRST_WORD = re.compile(r"[A-Za-z0-9_.,]{1,40}")
_ENDS_SENTENCE = re.compile(r"[A-Za-z]+\.{1,3}")
_PART_OF_NUMBER = re.compile(r"\d[.,]?$|[.,]?\d")
_DATE_OR_TIME = re.compile(r"\d{1,4}[-/:]")
_AMOUNT = re.compile(r"\d+(?:\.\d+)?[KMGT]?i?B?\b")
_HUMP = re.compile(r"[a-z][A-Z]")
"""In a name such as "HeapDumpOn", which can go on with a capital."""


def _is_number(text: str) -> bool:
    """Whether commas and dots of a number stand where thousands are told apart.

    >>> _is_number("16,384"), _is_number("0.9,14.04")
    (True, False)
    """
    return _THOUSANDS.fullmatch(text.strip(".,")) is not None


_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{2,3})*(?:,\d{3})(?:\.\d+)?|\d+,\d+")
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


def is_surely_broken(line: str, following: str) -> bool:
    """Whether two lines hold the halves of a word, and neither half is one.

    >>> is_surely_broken("out of memo", "ry"), is_surely_broken("can", "not")
    (True, False)
    """
    if _is_part_of_long_word(line, following):
        return False
    seam = _Seam.between(line, following)
    left, right = seam.left, seam.right
    if not left or not right:
        return False
    if not left[-1].isalnum() or not right[0].isalnum():
        return False
    if _SINGLE_LETTER.match(following) or _CONTRACTION.match(following):
        return True
    if left[-1].isdigit() and right[0].isdigit():
        return not _DATE_OR_TIME.match(following)
    return is_word(left + right) and not (is_word(left) and is_word(right))
