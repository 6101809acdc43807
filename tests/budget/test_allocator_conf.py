"""The law of allocator settings: what is said of one is what a torch process does."""

import shlex

import pytest
from generated_settings import generated
from torch_settings import ask_torch, is_accepted

from loaderkit.budget.environment.allocator_conf import (
    COMMON_OPTIONS,
    CUDA_OPTIONS,
    read_allocator_settings,
    split_tokens,
)
from loaderkit.budget.environment.allocator_settings import (
    OLD_NAMES,
    UNIFIED,
    Setting,
    judge_environment,
    options_of,
    settings_variable,
)
from loaderkit.budget.environment.mend_settings import mended_settings, nearest_option

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings")
    or torch.version.cuda is not None
    or torch.version.hip is not None,
    reason="needs a CPU build of a torch that tells its settings",
)


def judged(settings, backend="cpu"):
    setting = Setting({UNIFIED: settings}, (2, 13), backend, "linux")
    return judge_environment(setting)


def disagreements(settings, accepts):
    """Settings about which a reader and torch disagree."""
    answers = ask_torch([{UNIFIED: setting} for setting in settings])
    return [
        (setting, answer)
        for setting, answer in zip(settings, answers, strict=True)
        if accepts(setting) != is_accepted(answer)
    ]


def accepts(settings):
    return read_allocator_settings(settings, "cpu").rejected is None


@pytest.mark.slow
def test_what_is_said_of_a_setting_is_what_torch_does():
    settings = generated(120, seed=13)

    assert disagreements(settings, accepts) == []


@pytest.mark.slow
def test_a_reader_that_knows_less_than_torch_is_found_out():
    def naive(settings):
        return all(name in COMMON_OPTIONS for name in options_of(settings))

    assert disagreements(generated(40, seed=13), naive)


@pytest.mark.slow
def test_every_finding_agrees_with_torch_and_every_fix_is_accepted():
    settings = generated(60, seed=29)
    fixes = [
        shlex.split(finding.fix.removeprefix("export "))[0].split("=", 1)[1]
        for setting in settings
        for finding in judged(setting)
        if finding.fix.startswith("export ")
    ]

    answers = ask_torch([{UNIFIED: setting} for setting in settings])
    fixed = ask_torch([{UNIFIED: fix} for fix in sorted(set(fixes))])

    for setting, answer in zip(settings, answers, strict=True):
        crashes = any(finding.level == "crash" for finding in judged(setting))
        assert crashes is not is_accepted(answer), setting
    assert len(fixed) > 10
    assert all(is_accepted(answer) for answer in fixed)
    left = {finding.number for fix in set(fixes) for finding in judged(fix)}
    assert left <= {8}  # two options that torch accepts and that do not go together


def test_known_options_are_those_whose_values_torch_looks_at():
    names = [*COMMON_OPTIONS, *CUDA_OPTIONS, "foo", "max_split_size"]

    answers = ask_torch([{UNIFIED: f"{name}:@"} for name in names])

    looked_at = {
        name
        for name, answer in zip(names, answers, strict=True)
        if not is_accepted(answer)
    }
    assert looked_at == set(COMMON_OPTIONS)


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
        name = settings_variable(Setting(environ, (2, 13), "cpu", "linux"))
        assert answer == f"in effect: {environ[name]}", environ


def test_a_misspelt_option_is_named_with_the_nearest():
    finding = judged("max_split_sizemb:128")[0]

    assert finding.level == "ignored"
    assert "max_split_size_mb" in finding.problem
    assert finding.fix == f"export {UNIFIED}=max_split_size_mb:128"
    assert nearest_option("expandable_segment") == "expandable_segments"
    assert judged("max_split_size:128", "cuda")[0].level == "crash"


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
