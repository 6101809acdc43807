"""System calls of a pack that fail: each one in turn, and drawn at random; and any
process of any job killed at any step.

``SOAK_CASES`` says how many cases are drawn (400), ``SOAK_SEED`` from which seed (0).
The figures go to benchmarks/results/soak-failing-calls.txt, soak-each-call.txt and
soak-killed-steps.txt.
"""

import collections
import errno
import os
import platform
import random
import sys
import time
from pathlib import Path

import pytest
import torch
import torch_geometric

sys.path.insert(0, str(Path(__file__).parents[1] / "datasets"))
from failing_calls import (
    FOREVER,
    Action,
    Fault,
    Runner,
    broken_laws,
    count_calls,
    make_scenarios,
)
from killed_steps import SETTINGS, broken_step_laws, set_up

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ERRORS = [
    errno.ENOSPC,
    errno.EIO,
    errno.EDQUOT,
    errno.EACCES,
    errno.EINTR,
    errno.ENOLCK,
    errno.EOPNOTSUPP,
    errno.EROFS,
    errno.ESTALE,
    errno.ENOMEM,
    errno.EMFILE,
]

_HOW_STEPS_ARE_KILLED = [
    "One process of a job is killed right before each of its steps in turn (rename,",
    "link, unlink, rmdir, mkdir, fsync), and the job is done again.  Pairs: once more",
    "while it is done again.  How the first run ended:",
]

ASKED = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EINTR]
"""What each call in turn fails with, once."""


@pytest.mark.needs("cc")
def test_each_call_of_an_overwriting_pack_fails_once(tmp_path):
    figures, broken, start = collections.Counter(), [], time.monotonic()
    path = tmp_path / "case" / "c.lk"
    path.parent.mkdir()
    (tmp_path / "scenarios").mkdir()

    with Runner(tmp_path) as runner:
        scenarios = make_scenarios(runner, tmp_path / "scenarios", [(None, False)])
        scenario = next(each for each in scenarios if each.name.startswith("overwrite"))
        calls = count_calls(runner, scenario, 0, path)
        for number in range(1, calls + 1):
            for error in ASKED:
                fault = Fault(Action.FAIL, error, number, number)
                outcome, sentences = broken_laws(runner, scenario, fault, 0, path)
                figures[f"{errno.errorcode[error]}: {outcome.status}"] += 1
                broken.extend(f"{fault}: {sentence}" for sentence in sentences)
            lines = [
                machine_line(),
                f"an overwriting pack of {calls} calls",
                f"{time.monotonic() - start:.0f} s on a busy machine",
                f"calls 1 to {number}, each failing once with each of 5 errors",
                *sorted(f"{name}: {n}" for name, n in figures.items()),
                f"laws broken: {len(broken)}",
                *broken,
            ]
            (RESULTS / "soak-each-call.txt").write_text("\n".join(lines) + "\n")

    assert broken == []


def draw_fault(chance, number):
    """Choose what happens at a call."""
    action = chance.choice([Action.FAIL, Action.FAIL, Action.KILL, Action.SHORT])
    error = chance.choice(ERRORS) if action is Action.FAIL else 0
    # A call that is interrupted for ever is tried for ever, by Python itself.
    forever = action is not Action.KILL and error != errno.EINTR
    last = FOREVER if forever and chance.random() < 0.3 else number
    return Fault(action, error, number, last)


@pytest.mark.needs("cc")
def test_any_call_of_a_pack_fails_and_nothing_is_lost(tmp_path):
    seed = int(os.environ.get("SOAK_SEED", "0"))
    cases = int(os.environ.get("SOAK_CASES", "400"))
    chance, calls, broken = random.Random(seed), {}, []
    figures, start = collections.Counter(), time.monotonic()
    path = tmp_path / "case" / "c.lk"
    path.parent.mkdir()
    (tmp_path / "scenarios").mkdir()

    with Runner(tmp_path) as runner:
        scenarios = list(make_scenarios(runner, tmp_path / "scenarios"))
        for _ in range(cases):
            scenario, workers = chance.choice(scenarios), chance.choice([0, 0, 2])
            run = (scenario.name, workers)
            if run not in calls:
                calls[run] = count_calls(runner, scenario, workers, path)
            fault = draw_fault(chance, chance.randint(1, calls[run]))
            outcome, sentences = broken_laws(runner, scenario, fault, workers, path)
            figures["hit"] += outcome.hits > 0
            figures[f"{fault.action.name.lower()}: {outcome.status}"] += 1
            broken.extend(f"{run} {fault}: {sentence}" for sentence in sentences)
            write_figures(seed, figures, calls, broken, time.monotonic() - start)

    assert broken == []


@pytest.mark.needs("cc")
def test_whatever_process_dies_at_whatever_step_a_cache_is_whole_or_absent(tmp_path):
    """Each step of each job in turn; then a second kill while it is done again."""
    seed = int(os.environ.get("SOAK_SEED", "0"))
    pairs = int(os.environ.get("SOAK_CASES", "400")) // len(SETTINGS)
    chance, lines, broken = random.Random(seed), [], []
    for name, setting in SETTINGS.items():
        endings, start = collections.Counter(), time.monotonic()
        # LD_PRELOAD takes a space for the end of a path.
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        with Runner(folder) as runner:
            scenario = set_up(runner, folder, setting)
            steps = scenario.steps
            cases = [[step] for step in range(1, steps + 1)]
            cases += [
                [chance.randint(1, steps), chance.randint(1, steps)]
                for _ in range(pairs)
            ]
            for kills in cases:
                outcome, sentences = broken_step_laws(
                    runner, scenario, kills, folder / "case"
                )
                endings[outcome.status] += 1
                broken += [f"{name} {kills}: {sentence}" for sentence in sentences]
        lines.append(
            f"{name}: {steps} steps, {pairs} pairs, "
            f"{time.monotonic() - start:.0f} s; {dict(sorted(endings.items()))}"
        )
        head = [
            machine_line(),
            f"seed {seed}, on a busy machine",
            *_HOW_STEPS_ARE_KILLED,
        ]
        tail = [f"laws broken: {len(broken)}", *broken]
        text = "\n".join([*head, *lines, *tail])
        (RESULTS / "soak-killed-steps.txt").write_text(text + "\n")

    assert broken == []


def write_figures(seed, figures, calls, broken, seconds):
    """Keep what was tried as text."""
    states = sorted({name.partition(",")[0] for name, _ in calls})
    lines = [
        machine_line(),
        f"seed {seed}, {seconds:.0f} s on a busy machine",
        (
            f"states of the folder: {', '.join(states)}; plain and gzip; "
            "from a list and from files; workers 0 and 2"
        ),
        f"calls of an undisturbed run: {min(calls.values())} to {max(calls.values())}",
        (
            f"cases: {sum(n for name, n in figures.items() if ':' in name)}, "
            f"of which the call was reached in {figures['hit']}"
        ),
        *sorted(f"{name}: {n}" for name, n in figures.items() if ":" in name),
        f"laws broken: {len(broken)}",
        *broken,
    ]
    (RESULTS / "soak-failing-calls.txt").write_text("\n".join(lines) + "\n")


def machine_line():
    """Say when and where figures were taken."""
    return (
        f"{time.strftime('%Y-%m-%d')}, 2 cores, 24 GiB; Python "
        f"{platform.python_version()}, torch {torch.__version__}, "
        f"PyG {torch_geometric.__version__}"
    )
