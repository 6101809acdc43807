"""The law of allocator settings: what is said of one is what a torch process does."""

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
from generated_settings import COMMON_NAMES, OPTION_NAMES, generated
from torch_settings import ask_torch, is_accepted

from loaderkit.budget.environment.allocator_conf import (
    read_allocator_settings,
    split_tokens,
)
from loaderkit.budget.environment.allocator_options import (
    ALLOCATOR_OPTIONS,
    NEWEST_KNOWN,
    OLDEST_KNOWN,
    options_read_by,
)
from loaderkit.budget.environment.allocator_settings import (
    OLD_NAMES,
    UNIFIED,
    EnvironmentFacts,
    judge_environment,
    options_of,
    settings_variable,
)
from loaderkit.budget.environment.mend_settings import mended_settings, nearest_option

torch = pytest.importorskip("torch")
needs_torch_that_tells = pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings")
    or torch.version.cuda is not None
    or torch.version.hip is not None,
    reason="needs a CPU build of a torch that tells its settings",
)


TORCH_VERSION = tuple(
    int(number) for number in re.findall(r"\d+", torch.__version__)[:2]
)
TABLE = json.loads(
    (Path(__file__).parents[1] / "corpora" / "allocator_settings.json").read_text()
)
RECORDED_VERSIONS = [
    tuple(int(number) for number in version.split(".")[:2])
    for version in TABLE["versions"]
]


def judged(settings, backend="cpu", torch_version=NEWEST_KNOWN):
    setting = EnvironmentFacts(
        {OLD_NAMES[0]: settings}, torch_version, backend, "linux"
    )
    return judge_environment(setting)


def judged_here(settings):
    return judged(settings, "cpu", TORCH_VERSION)


def exported_fixes(findings):
    return [
        shlex.split(finding.fix.removeprefix("export "))[0].split("=", 1)[1]
        for finding in findings
        if finding.fix.startswith("export ")
    ]


def disagreements(settings, accepts):
    """Settings about which a reader and torch disagree."""
    answers = ask_torch([{UNIFIED: setting} for setting in settings])
    return [
        (setting, answer)
        for setting, answer in zip(settings, answers, strict=True)
        if accepts(setting) != is_accepted(answer)
    ]


def accepts(settings):
    return read_allocator_settings(settings, "cpu", TORCH_VERSION).rejected is None


@needs_torch_that_tells
@pytest.mark.slow
def test_what_is_said_of_a_setting_is_what_torch_does():
    settings = generated(120, seed=13)

    assert disagreements(settings, accepts) == []


@needs_torch_that_tells
@pytest.mark.slow
def test_a_reader_that_knows_less_than_torch_is_found_out():
    def naive(settings):
        return all(name in COMMON_NAMES for name in options_of(settings))

    assert disagreements(generated(40, seed=13), naive)


@needs_torch_that_tells
@pytest.mark.slow
def test_every_finding_agrees_with_torch_and_every_fix_is_accepted():
    settings = generated(60, seed=29)
    fixes = [
        fix for setting in settings for fix in exported_fixes(judged_here(setting))
    ]

    answers = ask_torch([{UNIFIED: setting} for setting in settings])
    fixed = ask_torch([{UNIFIED: fix} for fix in sorted(set(fixes))])

    for setting, answer in zip(settings, answers, strict=True):
        crashes = any(finding.level == "crash" for finding in judged_here(setting))
        assert crashes is not is_accepted(answer), setting
    assert len(fixed) > 10
    assert all(is_accepted(answer) for answer in fixed)
    left = {finding.number for fix in set(fixes) for finding in judged_here(fix)}
    assert left <= {8}  # two options that torch accepts and that do not go together


@pytest.mark.slow
@needs_torch_that_tells
def test_known_options_are_those_whose_values_torch_looks_at():
    names = [*OPTION_NAMES, "foo", "max_split_size"]

    answers = ask_torch([{UNIFIED: f"{name}:@"} for name in names])

    looked_at = {
        name
        for name, answer in zip(names, answers, strict=True)
        if not is_accepted(answer)
    }
    assert looked_at == set(options_read_by("cpu", TORCH_VERSION))


@needs_torch_that_tells
def test_the_variable_that_counts_is_the_one_torch_takes():
    values = dict(zip((*OLD_NAMES, UNIFIED), ("20", "21", "22"), strict=True))
    choices = [
        {
            name: "" if empty == name else f"max_split_size_mb:{value}"
            for name, value in values.items()
            if mask >> list(values).index(name) & 1
        }
        for mask in range(1, 8)
        for empty in (None, *values)
    ]

    answers = ask_torch(choices)

    for environ, answer in zip(choices, answers, strict=True):
        name = settings_variable(
            EnvironmentFacts(environ, TORCH_VERSION, "cpu", "linux")
        )
        assert answer == f"in effect: {environ[name]}", environ


@pytest.mark.parametrize("torch_version", RECORDED_VERSIONS, ids=str)
def test_what_is_said_of_a_setting_is_what_that_torch_for_cuda_did(torch_version):
    column = RECORDED_VERSIONS.index(torch_version)
    wrong = []

    for setting, answers in TABLE["answers"]:
        reading = read_allocator_settings(setting, "cuda", torch_version)
        mark = "+"
        if reading.rejected is not None:
            mark = "!" if reading.rejected.cause == "load" else "-"
        if mark != answers[column]:
            wrong.append((setting, answers, reading.rejected))

    assert wrong == []


def test_torches_differ_over_the_recorded_settings():
    """A reader that took all of them for one would be found out."""
    columns = list(zip(*(answers for _, answers in TABLE["answers"]), strict=True))

    assert min(column.count("+") for column in columns) > 20
    # 2.6 to 2.8 read the same options by the same rules.
    assert len(set(columns)) == len(columns) - 2


def test_every_option_is_recorded_as_unknown_before_and_as_known_since_its_torch():
    recorded = dict(TABLE["answers"])

    for option in ALLOCATOR_OPTIONS:
        answers = recorded[f"{option.name}:{TABLE['right_values'][option.name]}"]
        expected = ["+" if option.since <= v else "-" for v in RECORDED_VERSIONS]
        assert answers == "".join(expected), option.name


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("backend", ["cuda", "hip", "cpu"])
def test_every_fix_is_a_setting_of_that_torch_and_changes_something(backend):
    settings = [setting for setting, _ in TABLE["answers"][::3]]

    for setting, torch_version in itertools.product(
        settings, [OLDEST_KNOWN, (2, 9), (2, 10), NEWEST_KNOWN]
    ):
        for fix in exported_fixes(judged(setting, backend, torch_version)):
            after = judged(fix, backend, torch_version)
            numbers = {finding.number for finding in after}
            # Two options that torch accepts and that do not go together.
            assert numbers <= {8, 9}, (setting, torch_version, fix, after)


def test_a_setting_that_ends_the_import_of_torch_is_told_from_one_that_raises_later():
    [ends_import] = judged("expandable_segments", "cuda", (2, 10))
    [raises] = judged("expandable_segments", "cuda", (2, 9))

    assert ends_import.prevents_import
    assert "`import torch` ends the process" in ends_import.problem
    assert not raises.prevents_import
    assert "the first use of the allocator raises" in raises.problem


def test_beside_cudas_own_allocator_a_wrong_value_raises_where_memory_is_page_locked():
    """Measured on an H200 with torch 2.11: tensors on the GPU are made all the same."""
    [raises] = judged("backend:cudaMallocAsync,max_split_size_mb:1", "cuda", (2, 11))

    assert raises.level == "crash"
    assert raises.problem.startswith("the first page-locked tensor")


def test_of_an_option_of_another_torch_it_is_said_which_torch_has_it():
    [finding] = judged("pinned_max_round_threshold_mb:8", "cuda", (2, 11))
    [skipped] = judged("pinned_max_round_threshold_mb:8", "cpu", (2, 11))

    assert (finding.level, finding.fix) == ("crash", f"unset {OLD_NAMES[0]}")
    assert "torch 2.11 has no pinned_max_round_threshold_mb" in finding.problem
    assert "came with torch 2.13" in finding.problem
    assert skipped.level == "ignored"
    assert "came with torch 2.13" in skipped.problem


def test_of_a_torch_newer_than_the_known_ones_nothing_is_said_for_sure():
    newer = (NEWEST_KNOWN[0], NEWEST_KNOWN[1] + 1)

    [unknown] = judged("option_of_tomorrow:1", "cuda", newer)
    [skipped] = judged("option_of_tomorrow:1", "cpu", newer)

    assert unknown.level == "danger"
    assert "it is not known" in unknown.problem
    assert "it is not known" in skipped.problem
    assert judged("expandable_segments:True", "cuda", newer) == []


def test_a_misspelt_option_is_named_with_the_nearest():
    finding = judged("max_split_sizemb:128")[0]

    assert finding.level == "ignored"
    assert "max_split_size_mb" in finding.problem
    assert finding.fix == f"export {OLD_NAMES[0]}=max_split_size_mb:128"
    assert nearest_option("expandable_segment", OPTION_NAMES) == "expandable_segments"
    assert judged("max_split_size:128", "cuda")[0].level == "crash"


def test_of_two_options_that_do_not_go_together_the_size_of_a_segment_is_left_out():
    both = "large_segment_size_mb:64,max_split_size_mb:32"

    assert read_allocator_settings(both).rejected is not None
    assert mended_settings(both) == "max_split_size_mb:32"


def test_options_of_cuda_are_read_by_builds_for_cuda_only():
    wrong = "backend:fast,pinned_num_register_threads:3"

    assert read_allocator_settings(wrong, "cuda").rejected is not None
    assert read_allocator_settings("pinned_num_register_threads:8").rejected is None
    assert [finding.level for finding in judged(wrong)] == ["useless", "useless"]


def test_half_read_values_are_told():
    problems = [finding.problem for finding in judged("max_split_size_mb:64.5")]

    assert problems == ["torch takes max_split_size_mb:64.5 for 64"]


def test_what_was_meant_is_mended():
    assert mended_settings("expandable_segments:1 ; max_split_size=10") == (
        "expandable_segments:True,max_split_size_mb:20"
    )
    assert mended_settings("garbage_collection_threshold:80%") == (
        "garbage_collection_threshold:0.8"
    )
    assert mended_settings("nothing to read") is None
    assert split_tokens("a : b,[") == ["a", ":", "b", ",", "["]
