"""The laws of messages and settings, long: ``pytest tests/soak/messages.py``.

Prints what ``benchmarks/results/soak-messages.txt`` keeps.
"""

import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "corpora"))
sys.path.insert(0, str(Path(__file__).parents[1] / "budget"))

from generated_settings import generated
from log_styles import (
    FORMS,
    ROUNDING,
    Style,
    hard_wrap,
    with_amounts_in,
    wrap,
)
from test_message_laws import REPORTS, draw_logged
from test_message_neighbours import (
    MOST_CHANGED as MOST_OTHER_VERDICTS,
)
from test_message_neighbours import (
    MOST_LOST,
    MOST_TAKEN,
    count_taken,
    draw_between,
    draw_paragraphs,
)
from torch_settings import ask_torch, is_accepted

from loaderkit.budget.diagnosis.judge import judge
from loaderkit.budget.diagnosis.messages import SIZES, as_fields, read_message
from loaderkit.budget.environment.allocator_conf import read_allocator_settings
from loaderkit.budget.environment.allocator_settings import UNIFIED
from loaderkit.budget.environment.mend_settings import mended_settings

SEEDS = tuple(range(1, 11))
EXAMPLES = 1000
MOST_CHANGED = {"wrapped and prefixed": 0.005, "terminal": 0.02}
"""Shares of 1,000 draws.  Most of what changes is a text with breaks of its own, or a
word that two lines could share: docs/budget.md has the figures and the reasons."""


def stated(text):
    fields = as_fields(read_message(text))
    return {name: fields[name] for name in fields if name not in {"raw", "unread"}}


def is_another_text_too(text, style):
    """Whether a terminal's lines are also those of another text, wrapped at blanks.

    Where a terminal breaks "can|not" at its last column, an editor that wraps "can not"
    shows the same lines: which text it was, no reader can know.  Left out is only what
    ``textwrap`` makes the very same lines of, and what is read as that other text.
    """
    how, _, width = style.names[0].partition(" ") if style.names else ("", "", "")
    if how != "terminal":
        return False
    break_lines, *later_steps = style.steps
    lines = [line.rstrip() for line in break_lines(text).split("\n")]
    other = re.sub(r"\n(?=[^\s])", " ", "\n".join(lines))
    if wrap(other, int(width)).split("\n") != lines:
        return False
    for step in later_steps:
        other = step(other)
    return stated(other) == stated(style(text))


TWO_TEXTS = "RuntimeError: cannot allocate memory (os error 12), in a worker"


@pytest.mark.parametrize(("width", "is_another"), [(17, True), (16, False)])
def test_only_what_two_texts_look_like_is_left_out(width, is_another):
    style = Style((f"terminal {width}",), (lambda text: hard_wrap(text, width),))

    assert is_another_text_too(TWO_TEXTS, style) is is_another


def count_changes(seed):
    tried, changed = Counter(), Counter()
    chance = random.Random(seed)
    for text, style in draw_logged(chance, EXAMPLES):
        kind = "terminal" if "terminal" in repr(style) else "wrapped and prefixed"
        tried[kind] += 1
        if stated(style(text)) != stated(text):
            is_left_out = is_another_text_too(text, style)
            changed["two texts" if is_left_out else kind] += 1
    return tried, changed


@pytest.mark.parametrize("seed", SEEDS)
def test_what_logs_do_to_a_text_changes_hardly_anything_that_is_read(seed, capsys):
    tried, changed = count_changes(seed)

    with capsys.disabled():
        print(f"\nseed {seed}: tried {dict(tried)}, changed {dict(changed)}")
    for kind, share in MOST_CHANGED.items():
        assert changed[kind] <= share * EXAMPLES


@pytest.mark.parametrize("form", FORMS)
def test_another_unit_states_the_same_amounts(form, capsys):
    rounding = ROUNDING.get(form, 2**11) + 2**12
    changed = []
    for text in REPORTS:
        before, after = stated(text), stated(with_amounts_in(form, text))
        sizes = [name for name in SIZES if before.get(name) is not None]
        if any(abs((after[name] or 0) - before[name]) > rounding for name in sizes):
            changed.append(text)

    with capsys.disabled():
        print(f"\n{form}: {len(REPORTS)} texts, {len(changed)} changed")
    # Amounts of 5 MB are "0.0 GiB", and two wordings know GB alone.
    assert len(changed) <= MOST_CHANGED["wrapped and prefixed"] * len(REPORTS)


@pytest.mark.parametrize("seed", SEEDS)
def test_look_alikes_side_by_side_report_nothing(seed, capsys):
    taken = count_taken(draw_paragraphs(seed, EXAMPLES))

    with capsys.disabled():
        print(f"\nseed {seed}: {EXAMPLES} paragraphs of look-alikes, {taken} taken")
    assert taken <= 2 * MOST_TAKEN * EXAMPLES


@pytest.mark.parametrize("seed", SEEDS)
def test_a_report_between_look_alikes_stays_one(seed, capsys):
    lost = changed = 0
    for report, text in draw_between(seed, EXAMPLES):
        alone, beside = read_message(report), read_message(text)
        lost += alone.is_oom is True and beside.is_oom is False
        changed += judge(beside).verdict != judge(alone).verdict

    with capsys.disabled():
        print(f"\nseed {seed}: {EXAMPLES} between look-alikes, {lost} lost, ", end="")
        print(f"{changed} with another verdict")
    assert lost <= MOST_LOST * EXAMPLES
    assert changed <= MOST_OTHER_VERDICTS * EXAMPLES


@pytest.mark.parametrize("number", SEEDS)
def test_settings_do_what_is_said_of_them(number, capsys):
    tried = generated(EXAMPLES // 2, seed=number)
    mended = [fix for each in tried if (fix := mended_settings(each, "cpu"))]

    answers = ask_torch([{UNIFIED: each} for each in tried])
    wrong = [
        each
        for each, answer in zip(tried, answers, strict=True)
        if (read_allocator_settings(each, "cpu").rejected is None)
        is not is_accepted(answer)
    ]

    rejected = sum(not is_accepted(answer) for answer in answers)
    with capsys.disabled():
        print(
            f"\nseed {number}: {len(tried)} settings, {rejected} rejected, "
            f"{len(wrong)} judged wrongly, {len(mended)} mended"
        )
    assert wrong == []
    assert all(map(is_accepted, ask_torch([{UNIFIED: fix} for fix in set(mended)])))
