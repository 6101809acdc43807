"""Words that cannot mean anything end with status 2, as argparse's own errors do.

What is told of the data, the machine or the user's code ends with status 1.
"""

import argparse
import sys

import pytest
import torch

from loaderkit.cli.main import build_parser, main

CODE = """
import torch
from loaderkit.errors import LoaderkitError
data = [torch.zeros(7)] * 8
class Small(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(7, 1))
"""

NUMBERS = ["abc", "-1", "nan", "1.5x", "²", "", " ", "0x4", "1e999"]
"""No count, size or time."""
PER_OPTION = {
    "workers": [*NUMBERS, "1.5", str(10**30)],
    "shard_bytes": [*NUMBERS, "0", "5 parsecs"],
    "compression": ["gzop", "9", "", "None"],
    "pattern": ["/abs*", ""],
    "storage_option": ["key", "=3", ""],
    "epochs": [*NUMBERS, "0", "2.5"],
    "pid": [*NUMBERS, "0", "3.5"],
    "seconds": [*NUMBERS, "0", "inf", "-3"],
    "device": ["gpu7", "cuda:x", "cuda:-1", ""],
    "limit": [*NUMBERS, "0"],
    "batch_size": [*NUMBERS, "0", "2.5", str(10**30)],
    "optimizer": ["adma", "7", ""],
    "autocast": ["bfloat", "int8", "bool", ""],
}
"""Values that no data and no machine makes right, by option."""
NAMES_OF_THINGS = {"html", "keep", "loss", "print_completion"}
"""Options that name a file, or code: whether it is there, is no question of words."""

BEFORE = {
    "pack": "{code}:data new.lk",
    "inspect": "data.lk",
    "verify": "data.lk",
    "push": "data.lk file:///somewhere/data",
    "pull": "memory://somewhere/data new.lk",
    "plan": "{code}:Small 7",
    "watch": "--pid 1",
    "demo": "",
    "explain": "{code}",
    "doctor": "",
}
"""The other words of a right call."""

[SUBPARSERS] = [
    action
    for action in build_parser()._actions
    if isinstance(action, argparse._SubParsersAction)
]
OPTIONS = [
    (command, action)
    for command, parser in SUBPARSERS.choices.items()
    for action in parser._actions
    if action.option_strings
    and action.nargs != 0
    and action.dest not in NAMES_OF_THINGS
]


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A file with a model and data, in the folder in which commands are typed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "code_of_usage.py"
    file.write_text(CODE)
    (tmp_path / "samples").mkdir()
    torch.save(torch.zeros(3), tmp_path / "samples" / "0.pt")
    yield file.name
    sys.modules.pop("code_of_usage", None)


def status_of(words):
    """Call a command; argparse ends by an exit, whatever called it."""
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code


@pytest.mark.many_cases(quick=11)
@pytest.mark.parametrize(
    ("command", "option"),
    OPTIONS,
    ids=[f"{command} {option.option_strings[-1]}" for command, option in OPTIONS],
)
def test_a_value_that_means_nothing_is_status_2(command, option, code, capsys):
    words = BEFORE[command].format(code=code).split()
    if option.dest == "pattern":
        words = ["samples", "new.lk"]
    if option.dest == "pid":
        words = []

    for value in PER_OPTION[option.dest]:
        status = status_of([command, f"{option.option_strings[-1]}={value}", *words])

        told = capsys.readouterr().err
        assert status == 2, (value, told)
        # By the option's name as it was typed, or as Python has it.
        names = {option.option_strings[-1], option.dest}
        assert names & {*told.replace(":", " ").split()}, told


@pytest.mark.parametrize(
    "words",
    [
        "watch",
        "watch --pid 1 train.py",
        "watch --seconds 3 train.py",
        "plan {code}:Small 7:int65",
        "plan {code}:Small 99999999999999999x7",
        "pack {code}:data nosuch://bucket/x",
        "inspect nosuch://bucket/x",
        "push data.lk data2.lk",
        "pull data.lk data2.lk",
        "pull memory://a/b memory://c/d",
        "inspect data.lk --storage-option key=1",
        "push data.lk memory://a/b",
        "push data.lk simplecache::memory://a/b",
        "pack {code}:data memory://a/b",
    ],
)
def test_words_that_do_not_go_together_are_status_2(words, code, capsys):
    assert status_of(words.format(code=code).split()) == 2
    assert "fix: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "inspect nothing.lk",
        "verify samples",
        "pack nothing new.lk",
        "pack {code}:nothing new.lk",
        "plan {code}:Nothing 7",
        "plan {code}:Small nothing.lk",
        "watch nothing.py",
        "watch --pid 99999999",
        "explain nothing.txt",
        "doctor --html nowhere/page.html",
        "push nothing.lk file:///somewhere/x",
    ],
)
def test_what_is_not_there_is_status_1(words, code, capsys):
    assert status_of(words.format(code=code).split()) == 1
    printed = capsys.readouterr()
    assert "fix: " in printed.out + printed.err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SLURM_CPUS_PER_TASK", "abc"),
        ("LOADERKIT_NUM_WORKERS", "many"),
        ("LOADERKIT_WORKERS", "2"),
        ("WORLD_SIZE", "two"),
    ],
)
def test_a_variable_that_nobody_typed_here_is_status_1(name, text, monkeypatch, capsys):
    monkeypatch.setenv(name, text)

    assert status_of(["doctor"]) == 1
    assert name in capsys.readouterr().err


def test_every_option_has_wrong_values():
    known = {option.dest for _, option in OPTIONS}

    assert known == {*PER_OPTION}
    assert {*SUBPARSERS.choices} == {*BEFORE}
