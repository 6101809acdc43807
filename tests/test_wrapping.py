"""Printed results fit a terminal, and lose no word."""

import pytest
import torch
from drawn_pages import Draw, drawn_report
from hypothesis import given
from hypothesis import strategies as st

from loaderkit import build_loader, diagnose_oom, pack, plan_batch
from loaderkit.wrapping import WIDTH, wrap_lines

WORDS = st.text("abc.,:-=_", min_size=1, max_size=12)
LINES = st.builds(
    lambda indent, words, gaps: (
        " " * indent
        + "".join(
            word + " " * gap for word, gap in zip(words, gaps, strict=False)
        ).rstrip()
    ),
    st.integers(0, 9),
    st.lists(WORDS, min_size=1, max_size=40),
    st.lists(st.sampled_from([1, 1, 1, 2, 12]), min_size=40, max_size=40),
)


def lines_too_long(text):
    """Name the lines that are too wide, but not for code or for one long word."""
    return [
        line
        for line in text.splitlines()
        if len(line) > WIDTH
        and not line.startswith(" " * 7)
        and max(map(len, line.split())) < WIDTH // 2
    ]


@pytest.mark.slow
@given(st.lists(LINES, max_size=6).map("\n".join))
def test_lines_are_wrapped_between_words_and_none_is_lost(text):
    wrapped = wrap_lines(text)

    assert wrapped.split() == text.split()
    too_long = {line for line in wrapped.splitlines() if len(line) > WIDTH}
    assert too_long <= set(text.splitlines())  # code, which stays as it was


@pytest.mark.slow
@given(st.lists(LINES, max_size=6).map("\n".join))
def test_what_fits_stays_as_it_is(text):
    fitting = "\n".join(line for line in text.splitlines() if len(line) <= WIDTH)

    assert wrap_lines(fitting) == fitting


def test_code_stays_in_one_line():
    code = " " * 7 + "loaderkit.build_loader(" + "dataset, " * 20 + ")"

    assert wrap_lines(code) == code


MESSAGE = (
    "CUDA out of memory. Tried to allocate 4.15 GiB. GPU 0 has a total capacity of "
    "23.69 GiB of which 3.84 GiB is free. Including non-PyTorch memory, this process "
    "has 19.85 GiB memory in use. Of the allocated memory 15.97 GiB is allocated by "
    "PyTorch, and 3.56 GiB is reserved by PyTorch but unallocated."
)


def loader_plan(dataset):
    return build_loader(dataset, batch_size=16, shuffle=True).plan


def batch_plan(dataset):
    model = torch.nn.Linear(8, 1)
    return plan_batch(model, dataset, "cpu", limit="900 KiB", batch_size=200_000)


RESULTS = {
    "loader": loader_plan,
    "batch": batch_plan,
    "diagnosis": lambda _: diagnose_oom(MESSAGE),
}


def parts_in_one_line(report):
    holders = [growth.holder for growth in report.growths if growth.holder is not None]
    lines = [line for site in report.sites for line in site.lines]
    for holder in holders:
        lines += [f"`{holder.path}`", holder.line, holder.where]
    return sorted(set(filter(None, lines)))


@pytest.mark.many_cases
@pytest.mark.parametrize("seed", range(40))
def test_a_leak_report_is_wrapped_and_its_paths_stay_whole(seed):
    report = drawn_report(Draw.of(seed))
    lines = str(report).splitlines()
    in_one_line = parts_in_one_line(report)

    joined = " ".join(str(report).split())
    for part in in_one_line:
        assert joined.count(part) == sum(line.count(part) for line in lines)
    for wide in [line for line in lines if len(line) > WIDTH]:
        for part in sorted(in_one_line, key=len, reverse=True):
            wide = wide.replace(part, "*")
        assert len(wide.split()) == 1


def test_a_path_with_spaces_is_not_broken():
    path = "/home/a person/my data/train.py:12 in one epoch"
    text = f"1. list grows {'word ' * 12}, in {path}: drop it"

    assert path in wrap_lines(text, unbroken=[path])
    assert path not in wrap_lines(text)


@pytest.mark.slow
@pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS)
def test_plans_and_diagnoses_print_no_line_that_is_too_long(make, tmp_path):
    dataset = pack(torch.utils.data.TensorDataset(torch.zeros(300, 8)), tmp_path / "c")

    assert lines_too_long(str(make(dataset))) == []


def test_a_line_that_is_too_long_would_be_seen():
    assert lines_too_long("word " * 30) == ["word " * 30]
