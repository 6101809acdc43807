"""Commands of one step of the checks run at once, and no failure of one is lost."""

import subprocess
import sys

import side_by_side
from side_by_side import main

# Each writes its own file, and waits for that of the other.
MEETING = """
import pathlib, sys, time
own, other = map(pathlib.Path, sys.argv[1:])
own.touch()
while not other.exists():
    time.sleep(0.01)
print("met", other.name)
"""


def python(code, *arguments):
    return [sys.executable, "-S", "-c", code, *map(str, arguments)]


WAITING = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


def test_commands_run_at_once_and_the_last_one_prints_first(tmp_path, capfd):
    a, b = tmp_path / "a", tmp_path / "b"

    status = main([*python(MEETING, a, b), "--", *python(MEETING, b, a)])

    assert status == 0
    printed = capfd.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("met")] == [
        "met a",
        "met b",
    ]


def test_what_the_last_one_prints_is_shown_while_others_run(tmp_path):
    other, last = python(WAITING, tmp_path / "seen"), python("print('last')")
    command = [sys.executable, "-S", side_by_side.__file__, *other, "--", *last]

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as both:
        shown = [both.stdout.readline() for _ in range(2)]
        (tmp_path / "seen").touch()
        both.communicate()

    assert shown[1] == "last\n"
    assert both.returncode == 0


def test_the_failure_of_any_command_is_the_status_and_the_others_run(capfd):
    codes = ("print(1)", "raise SystemExit(3)", "print(2)")
    commands = [python(code) for code in codes]

    status = main([*commands[0], "--", *commands[1], "--", *commands[2]])

    assert status == 3
    printed = capfd.readouterr().out.splitlines()
    assert [line for line in printed if line in {"1", "2"}] == ["2", "1"]


def test_a_command_that_is_killed_has_failed():
    assert main(python("import os; os.kill(os.getpid(), 9)")) != 0
