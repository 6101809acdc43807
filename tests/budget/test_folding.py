"""Laws of the two steps: what each pattern alone finds, in the same places."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.budget.diagnosis.evidence import signs
from loaderkit.budget.diagnosis.folding import FoldedText, fold_case, fold_pattern
from loaderkit.budget.diagnosis.lexicon import compile_words, phrase_texts, phrases
from loaderkit.budget.diagnosis.log_text import clean_log
from loaderkit.budget.diagnosis.moods import mood_patterns
from loaderkit.budget.diagnosis.oom_patterns import message_patterns
from loaderkit.budget.diagnosis.statements import meanings

CORPUS = Path(__file__).parents[1] / "corpora" / "reported_messages.json"
EVERY = 40
"""Of the texts of the corpus; each is tried with each pattern of each table."""
TABLES = {
    "wordings": lambda: [wording.pattern for wording in message_patterns()],
    "meanings": lambda: list(meanings().values()),
    "moods": lambda: [row.pattern for row in mood_patterns()],
    "evidence": lambda: [sign.pattern for sign in signs()],
}


def texts_of_corpus(every):
    rows = json.loads(CORPUS.read_text("utf-8"))[::every]
    return [clean_log(row["text"]) for row in rows]


def lost_or_invented(pattern, text):
    """Compare both steps with the pattern alone, at any place and at the start."""
    where = FoldedText.of(text)
    expected = [match.span() for match in pattern.written.finditer(text)]
    stretches = list(pattern.spans(where)) if pattern.can_match(where.small) else []
    starts = pattern.written.match(text) is not None
    if stretches != expected or pattern.matches_start(where) != starts:
        return [(pattern.written.pattern[:80], text[:80])]
    return []


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_two_steps_find_what_one_finds(table):
    texts = texts_of_corpus(EVERY)

    differences = [
        difference
        for pattern in TABLES[table]()
        for text in texts
        for difference in lost_or_invented(pattern, text)
    ]

    assert differences == []


@pytest.mark.slow
def test_alternatives_apart_find_what_they_find_together():
    texts = texts_of_corpus(4)
    differences = [
        (phrase, text[:80])
        for phrase, pattern in phrase_texts().items()
        for text in texts
        if list(phrases()[phrase].spans(FoldedText.of(text)))
        != [match.span() for match in compile_words(pattern).finditer(text)]
    ]

    assert differences == []


PIECES = st.sampled_from(
    [
        *("ab", "A?b", "[A-C]b", "(?-i:aB)", "(?-i:(?<!A)b)", "(?!(?-i:A))\\w"),
        *(
            "(?<!a)B",
            "\\bA",
            "(?:a|Bc)",
            "(?P<name>A+)",
            "[^(?!A]",
            "(?=\\S)a",
            "\\(",
            "[^\\SA]",
        ),
    ]
)
PATTERNS = st.lists(PIECES, min_size=1, max_size=4).flatmap(
    lambda pieces: st.sampled_from(["", "|"]).map(lambda joint: joint.join(pieces))
)
DRAWN = st.text("abcABC( \u0130\u0131\u017f\u212a\n", max_size=12)


@pytest.mark.slow
@given(PATTERNS, DRAWN)
def test_two_steps_find_what_any_pattern_finds(pattern, text):
    pattern = re.sub(r"\?P<name>", "?:", pattern, count=pattern.count("name") - 1)

    assert lost_or_invented(fold_pattern(pattern), text) == []


@given(st.text(max_size=20))
def test_folding_keeps_every_letter_in_its_place(text):
    assert len(fold_case(text)) == len(text)
    assert fold_case(fold_case(text)) == fold_case(text)


def test_a_finder_that_forbids_too_much_is_found_out():
    pattern = fold_pattern("(?!(?-i:A))a")
    strict = re.compile("(?!a)a")

    broken = type(pattern)(pattern.written, strict, is_exact=False, words=())

    assert lost_or_invented(broken, "a") != []
    assert lost_or_invented(pattern, "a") == []
