"""``loaderkit watch``: an unmodified script, from inside and outside."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from loaderkit.leaks import watch_process
from loaderkit.leaks.report import LeakReport
from loaderkit.leaks.watch_process import ProcessMonitor

LEAKY = """
    import sys, time
    import torch

    history = []

    def train(seconds):
        net, end = torch.nn.Linear(50, 50), time.time() + seconds
        while time.time() < end:
            history.append(net(torch.randn(64, 50)).mean())
            time.sleep(0.005)

    if __name__ == "__main__":
        print("arguments", sys.argv[1:])
        train(float(sys.argv[1]))
        sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def watch(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(LEAKY))

    def run(*arguments):
        command = [sys.executable, "-m", "loaderkit", "watch", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    return run


@pytest.mark.slow
def test_a_leaking_script_runs_unchanged_and_its_holder_is_named(watch, tmp_path):
    # The script keeps what it makes at the pace that the machine allows: beside others,
    # 20 s may hold too few windows to be sure, and the verdict asks for more.
    for seconds in ("20", "80"):
        done = watch("--html", "page.html", "train.py", seconds, "0")
        if "needs more" not in done.stdout:
            break

    assert f"arguments ['{seconds}', '0']" in done.stdout
    assert "leaking: " in done.stdout
    assert "list `__main__.history` in train.py:10 keeps" in done.stdout
    assert "each window of 500 ms" in done.stdout
    assert "<svg" in (tmp_path / "page.html").read_text()
    assert done.returncode == 1


@pytest.mark.slow
def test_a_short_script_keeps_its_status(watch):
    done = watch("--json", "train.py", "1", "3", "--html", "page.html")

    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["returncode"] == 3
    # On a busy machine most of its time may pass in imports, seen from outside alone.
    assert summary["note"].splitlines()[0] == "the script ended with status 3"
    assert summary["report"]["verdict"] != "leaking"
    assert done.returncode == 1
    assert "--html behind train.py is given to the script" in done.stderr


@pytest.mark.slow
def test_a_script_that_is_killed_is_reported_from_outside(watch, tmp_path):
    (tmp_path / "killed.py").write_text(
        "import os, time, signal\ntime.sleep(3)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )

    done = watch("killed.py")

    assert "somebody killed the script (SIGKILL)" in done.stdout
    assert not list(tmp_path.glob("*.html"))  # nobody asked for a page
    assert "needs more seconds" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["'x' * 200_000", "0"])
def test_a_script_without_torch_is_judged_from_outside(watch, tmp_path, kept):
    """It runs as long as a verdict takes, and nothing is read inside it."""
    (tmp_path / "plain.py").write_text(
        "import sys, time\nkept = []\n"
        "for _ in range(int(sys.argv[1]) * 10):\n"
        f"    kept.append({kept}); time.sleep(.1)\n"
    )
    for seconds in (14, 60):
        done = watch("--json", "plain.py", seconds)
        summary = json.loads(done.stdout)
        if summary["report"]["verdict"] != "needs more epochs":
            break

    is_leak = kept != "0"
    assert summary["report"]["verdict"] == ("leaking" if is_leak else "steady")
    assert done.returncode == is_leak
    assert summary["note"].startswith("read from outside, once a second")


@pytest.mark.parametrize(
    ("inside", "inside_s", "outside_s", "is_inside"),
    [
        ("leaking", 1, 100, True),
        ("steady", 1, 100, True),
        ("needs more epochs", 51, 100, True),
        ("needs more epochs", 49, 100, False),
        ("needs more epochs", 1, 100, False),
    ],
)
def test_of_two_reports_the_one_that_saw_the_run_is_given(
    tmp_path, inside, inside_s, outside_s, is_inside
):
    report = LeakReport(
        verdict=inside, epochs=2, seconds=inside_s, device="cpu", counters=()
    )
    (tmp_path / "report.json").write_text(json.dumps(report.to_json()))
    monitor = ProcessMonitor(os.getpid())
    monitor.begun -= outside_s

    result = watch_process._result_of(
        tmp_path, monitor, watch_process._Ending(0, "", None)
    )

    assert (result.report["device"] == "cpu") == is_inside
    assert bool(result.note) != is_inside


@pytest.mark.slow
def test_a_running_process_is_looked_at(watch, tmp_path):
    code = (
        "import time\nkept = []\nwhile True: kept.append('x' * 200_000); time.sleep(.1)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        for seconds in (14, 60):
            page = ("--html", "pid.html")
            done = watch("--pid", child.pid, "--seconds", seconds, *page)
            if "needs more" not in done.stdout:
                break
        child.kill()

    assert "leaking" in done.stdout
    assert "anonymous" in done.stdout
    assert "epoch" not in done.stdout  # it has seconds
    assert "second by second" in (tmp_path / "pid.html").read_text()


@pytest.mark.slow
def test_what_is_not_there_is_told(watch):
    assert "There is no script 'none.py'" in watch("none.py").stderr
    assert "Process 999999999 cannot be watched" in watch("--pid", 999999999).stderr
    assert "There is nothing to watch" in watch().stderr
    assert "--seconds is for --pid" in watch("--seconds", 3, "train.py").stderr
    assert "leave one of the two out" in watch("--pid", 1, "train.py").stderr
