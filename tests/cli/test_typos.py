"""Misspelt commands and options are answered with what was probably meant."""

import argparse

import pytest

from loaderkit.cli.main import COMMANDS, build_parser

ROOT = build_parser()
[SUBPARSERS] = [
    action for action in ROOT._actions if isinstance(action, argparse._SubParsersAction)
]
PARSERS = {"": ROOT, **SUBPARSERS.choices}
NAMES = [command.name for command in COMMANDS]


def misspelt(name):
    """All that a slip of two letters, one too few or one too many makes of a name."""
    start = len(name) - len(name.lstrip("-"))
    for at in range(start, len(name) - 1):
        yield f"{name[:at]}{name[at + 1]}{name[at]}{name[at + 2 :]}"
        yield f"{name[:at]}{name[at + 1 :]}"
        yield f"{name[:at]}{name[at]}{name[at:]}"


def told(words, capsys):
    with pytest.raises(SystemExit) as ended:
        ROOT.parse_args(words)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", PARSERS)
def test_a_misspelt_option_is_answered_with_the_option(command, capsys):
    """Also where arguments are missing, which argparse tells first, and alone."""
    options = [
        name for name in PARSERS[command]._option_string_actions if len(name) > 3
    ]
    places = [a for a in PARSERS[command]._actions if not a.option_strings]
    if any(action.nargs == argparse.REMAINDER for action in places):
        places = []  # what stands behind a script is the script's
    for option in options:
        for number, typo in enumerate(misspelt(option)):
            # The beginning of an option is one.
            if any(name.startswith(typo) for name in options):
                continue
            given = ["x"] * len(places) if number % 2 else []

            line = told([command, *given, typo] if command else [typo], capsys)

            assert typo in line
            assert f"did you mean {option!r}?" in line, line


@pytest.mark.parametrize("command", NAMES)
def test_a_misspelt_command_is_answered_with_the_command(command, capsys):
    for typo in misspelt(command):
        if typo not in NAMES:
            assert f"did you mean {command!r}?" in told([typo], capsys)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["-V"], "--version"),
        (["-version"], "--version"),
        (["doctor", "-j"], "--json"),
        (["pack", "x", "y", "-w", "3"], "--workers"),
    ],
)
def test_a_letter_of_other_programs_is_answered_with_the_option(words, option, capsys):
    assert f"did you mean {option!r}?" in told(words, capsys)


def test_an_option_of_commands_is_known_before_them(capsys):
    assert "--json is an option of commands" in told(["--jsn"], capsys)


def test_an_argument_without_a_name_is_told_as_such(capsys):
    line = told(["explain", "--file", "log.txt"], capsys)

    assert "file is given without its name" in line


def test_arguments_that_are_missing_alone_are_told_alone(capsys):
    assert told(["push", "a.lk"], capsys).endswith("arguments are required: url")
