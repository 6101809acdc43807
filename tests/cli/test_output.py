"""What a command prints, to readers who stay and to readers who go."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loaderkit import pack
from loaderkit.cli.main import COMMANDS, main

LOADERKIT = [sys.executable, "-m", "loaderkit"]


@pytest.fixture
def cache(tmp_path):
    pack([{"a": 1}] * 3, tmp_path / "c.lk", workers=0)
    return tmp_path / "c.lk"


@pytest.fixture
def log(tmp_path):
    (tmp_path / "train.log").write_text("RuntimeError: CUDA error: out of memory\n")
    return tmp_path / "train.log"


def run_with_closed_pipe(arguments):
    """Run a command whose standard output is closed before it prints its first line."""
    with subprocess.Popen(
        [*LOADERKIT, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as child:
        child.stdout.close()
        stderr = child.stderr.read()
    return child.returncode, stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--help"], ["--version"], ["inspect", "--help"]])
def test_a_closed_pipe_ends_a_command_quietly(options):
    assert run_with_closed_pipe(options) == (0, "")


@pytest.mark.slow
def test_a_closed_pipe_ends_an_explanation_quietly(log):
    assert run_with_closed_pipe(["explain", log]) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", ["verify {cache}", "inspect none.lk --json"])
def test_an_answer_that_cannot_be_written_is_told(cache, words):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*LOADERKIT, *words.format(cache=cache).split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )

    assert done.returncode == 1
    assert done.stderr.startswith("NotWrittenError: The answer cannot be written: No s")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_closed_pipe_leaves_the_exit_status_to_the_answer(cache, form):
    assert run_with_closed_pipe(["verify", cache, *form]) == (0, "")

    [shard] = cache.glob("*.h5")
    shard.write_bytes(shard.read_bytes()[:-9])

    assert run_with_closed_pipe(["verify", cache, *form]) == (1, "")


@pytest.mark.slow
def test_what_is_written_before_a_pipe_is_closed_arrives(cache):
    command = " ".join([*LOADERKIT, "inspect", str(cache)])

    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -n 1"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert "3 samples of dict" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_full_disk_is_no_closed_pipe(log):
    with Path("/dev/full").open("w") as full_disk:
        done = subprocess.run(
            [*LOADERKIT, "explain", str(log)],
            stdout=full_disk,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert done.returncode != 0
    assert "No space left" in done.stderr


@pytest.mark.slow
def test_a_command_without_standard_output_does_its_work(cache):
    command = " ".join([*LOADERKIT, "verify", str(cache)])

    done = subprocess.run(
        ["bash", "-c", f"{command} >&-"], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


BAD_NEWS = {
    "verify": "the cache is damaged",
    "watch": "it leaks, or the script failed",
    "plan": "nothing fits",
    "doctor": "a setting does not do what it says",
}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_help_of_a_command_lists_its_exit_statuses(command, capsys):
    with pytest.raises(SystemExit):
        main([command.name, "--help"])

    printed = " ".join(capsys.readouterr().out.split())
    failure = "an error"
    if command.name in BAD_NEWS:
        failure = f"{BAD_NEWS[command.name]}, or an error"
    assert f"exit status: 0 done; 1 {failure}; 2 wrong arguments" in printed


@pytest.mark.parametrize("arguments", [["doctor"], ["inspect", "{cache}"]])
def test_json_is_read_by_a_strict_parser(cache, capsys, arguments):
    main([argument.format(cache=cache) for argument in [*arguments, "--json"]])

    def refuse_constant(name):
        raise ValueError(name)

    text = capsys.readouterr().out
    assert isinstance(json.loads(text, parse_constant=refuse_constant), dict)


NOISY = """
import os
import torch

print("of the user's own code", flush=True)
os.write(1, b"of a library in C")
DATA = [{"x": torch.ones(4)} for _ in range(9)]
"""
RUNS_OF_USERS_CODE = {
    "pack": ["{noisy}:DATA", "{cache}2"],
    "watch": ["{noisy}"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS_OF_USERS_CODE)
def test_what_the_users_code_prints_is_not_in_the_json(cache, tmp_path, capfd, command):
    noisy = tmp_path / "noisy.py"
    noisy.write_text(NOISY)
    arguments = [
        argument.format(noisy=noisy, cache=cache)
        for argument in RUNS_OF_USERS_CODE[command]
    ]

    status = main([command, "--json", *arguments])

    printed = capfd.readouterr()
    assert isinstance(json.loads(printed.out), dict)
    for noise in ("of the user's own code", "of a library in C"):
        assert noise in printed.err
    assert status == 0


@pytest.mark.slow
def test_what_the_users_code_prints_stays_where_a_person_reads(cache, tmp_path, capfd):
    noisy = tmp_path / "noisy.py"
    noisy.write_text(NOISY)

    main(["pack", f"{noisy}:DATA", f"{cache}2"])

    assert "of the user's own code" in capfd.readouterr().out


def test_a_page_is_written_beside_the_answer(cache, tmp_path, capsys):
    page = tmp_path / "page.html"

    assert main(["inspect", str(cache), "--json", "--html", str(page)]) == 0

    printed = capsys.readouterr()
    assert json.loads(printed.out)["samples"] == 3
    assert printed.err == f"page: {page}\n"
    assert "Bytes of each field" in page.read_text()


def test_a_page_that_cannot_be_written_is_an_error_with_a_fix(cache, tmp_path, capsys):
    page = tmp_path / "no" / "page.html"

    assert main(["inspect", str(cache), "--html", str(page)]) == 1

    message = capsys.readouterr().err
    assert f"{page} cannot be written" in message
    assert "fix:" in message


def test_every_command_that_offers_a_page_has_one():
    offering = [command.name for command in COMMANDS if command.has_page]

    assert offering == ["inspect", "explain", "plan", "doctor"]
