"""Laws of the words that a pattern needs: no match is lost for want of them."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.budget.diagnosis.literals import has_all, required_groups
from loaderkit.budget.diagnosis.log_text import clean_log
from loaderkit.budget.diagnosis.oom_patterns import message_patterns

CORPUS = Path(__file__).parents[1] / "corpora" / "reported_messages.json"
EVERY = 25
"""Of the texts of the corpus; each is tried with each wording."""

LETTERS = st.text("abcXY ", min_size=1, max_size=5)


def _grouped(parts):
    return st.one_of(
        st.tuples(parts, parts).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(parts, parts).map("".join),
        parts.map(lambda part: f"(?:{part})?"),
        parts.map(lambda part: f"({part}){{0,2}}"),
        parts.map(lambda part: f"(?:{part})+"),
        parts.map(lambda part: f"[\"'`]{part}[\"']?"),
        parts.map(lambda part: f"{part}=\\|[=|x]*"),
        parts.map(lambda part: f"{part}\\w?[abc]*(?!zz)"),
    )


PATTERNS = st.recursive(LETTERS, _grouped, max_leaves=6)


@pytest.mark.slow
@given(st.data(), PATTERNS)
def test_whatever_a_pattern_matches_has_a_word_that_it_needs(data, pattern):
    text = data.draw(st.from_regex(re.compile(pattern), fullmatch=True))

    assert has_all(text.lower(), required_groups(pattern))


def test_a_letter_that_may_be_missing_is_no_part_of_a_word():
    assert required_groups("errors?") == ({"error"},)
    assert required_groups("(?:warnings )?killed") == ({"killed"},)
    assert required_groups(r"a\d+b") == ()


def test_a_mark_is_needed_where_no_word_is():
    assert required_groups(r"a[\"'`]\d+") == ({'"', "'", "`"},)
    assert required_groups(r"a[\"'`]?\d+") == ()
    assert required_groups(r"a[\"'x]\d+") == ()
    assert required_groups(r"[\u201c`]") == ({"\u201c", "`"},)


@pytest.mark.slow
def test_no_wording_is_lost_in_the_corpus():
    texts = [row["text"] for row in json.loads(CORPUS.read_text("utf-8"))[::EVERY]]
    lost = [
        (text[:80], pattern.written.pattern[:80])
        for text in map(clean_log, texts)
        for pattern in (wording.pattern for wording in message_patterns())
        if not pattern.can_match(text.lower()) and pattern.written.search(text)
    ]

    assert lost == []


def test_most_wordings_need_a_word():
    patterns = message_patterns()
    without = [wording for wording in patterns if not wording.pattern.words]

    assert len(without) < len(patterns) / 20
