"""States saved anywhere and loaded into another loader; and runs that are killed.

``SOAK_CASES`` says how many (2000 states, a tenth as many kills), ``SOAK_SEED`` from
which seed (0).  The figures go to benchmarks/results/soak-resume.txt.
"""

import collections
import json
import os
import platform
import random
import signal
import time
from pathlib import Path

import clients
import pytest
import test_resume
import torch

from loaderkit import build_loader, pack
from loaderkit.errors import LoaderError
from loaderkit.testing import assert_same

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "soak-resume.txt"
SEED = int(os.environ.get("SOAK_SEED", "0"))
CASES = int(os.environ.get("SOAK_CASES", "2000"))
OURS = sorted(name for name in clients.LOADERS if name.startswith("build_loader"))
WITH_WORKERS = 0.1
"""Share of the cases that are read by two workers: they take forty times as long."""


def row_loader(row, data, workers):
    """Make the loader of a row of the table of clients."""
    composed = clients.COMPOSITIONS[row.composition](data)
    options = clients.SAMPLERS[row.sampler](composed)
    return clients.LOADERS[row.loader](composed, num_workers=workers, **options)


def outcome_of(make, epoch, given):
    """Save a state after some batches, load it elsewhere, and compare what follows.

    Returns:
        What came of it, in words.
    """
    torch.manual_seed(11)
    try:
        stopped = make()
        for _ in range(epoch):
            list(stopped)
        iterator = iter(stopped)
        for _ in range(given):
            next(iterator)
        state = json.loads(json.dumps(stopped.state_dict()))
        rest, after = list(iterator), list(stopped)
    except StopIteration:
        return "fewer batches than were to be given"
    except Exception:  # noqa: BLE001 -- whatever samplers and collate functions raise
        return "refused without a state too"
    torch.manual_seed(given)
    again = make()
    try:
        again.load_state_dict(state)
    except LoaderError as error:
        return f"the state is refused: {error.what[:40]} ..."
    if state["epoch"] == epoch:
        assert_same(list(again), rest, "the rest")
    else:  # all had been given
        assert not rest
    assert_same(list(again), after, "the next epoch")
    return "equal"


@pytest.mark.filterwarnings("ignore")
def test_the_rest_of_any_row_of_the_table_is_equal_or_refused(tmp_path):
    chance, start = random.Random(SEED), time.monotonic()
    figures, broken = collections.Counter(), []
    packed = {
        kind: pack(clients.samples_of(kind), tmp_path / kind, workers=0)
        for kind in clients.SAMPLES
    }

    for case in range(CASES):
        names_of_fields = (
            clients.SAMPLES,
            clients.COMPOSITIONS,
            OURS,
            clients.SAMPLERS,
        )
        row = clients.Row(*(chance.choice(sorted(names)) for names in names_of_fields))
        workers = 2 if chance.random() < WITH_WORKERS else 0
        epoch, given = chance.randrange(3), chance.randrange(5)

        def make(row=row, workers=workers):
            return row_loader(row, packed[row.samples], workers)

        try:
            figures[outcome_of(make, epoch, given)] += 1
        except Exception as error:  # noqa: BLE001 -- all are listed, none ends the run
            place = f"{row}, {workers} workers, epoch {epoch}, {given} given"
            first = str(error).partition("\n")[0]
            broken.append(f"{place}: {type(error).__name__}: {first}")
        if case % 50 == 49:
            write_figures("states", figures, broken, time.monotonic() - start)
    write_figures("states", figures, broken, time.monotonic() - start)

    assert broken == []


def test_runs_killed_again_and_again_give_each_batch_once(tmp_path):
    chance, start = random.Random(SEED), time.monotonic()
    figures, broken = collections.Counter(), []
    cache = pack(clients.samples_of("graphs") * 6, tmp_path / "cache", workers=0)
    plain = build_loader(cache, batch_size=3, shuffle=True, seed=7, num_workers=0)
    wanted = [str(batch.y.tolist()) for batch in plain]

    while figures["kills"] < CASES // 10:
        folder = tmp_path / f"run-{figures['runs']}"
        folder.mkdir()
        ended, workers = None, chance.choice([0, 1, 2])
        while ended is None:
            child = test_resume.FORK.Process(
                target=test_resume.train,
                args=(cache, workers, folder, folder / "state.json"),
            )
            child.start()
            ended = wait_for_batches(child, folder, chance.randint(0, 5))
            if ended is None:
                child.join(chance.uniform(0, 0.1))
                ended = child.exitcode
            if ended is None:
                os.kill(child.pid, signal.SIGKILL)
                figures["kills"] += 1
                child.join()
        names = (folder / str(number + 1) for number in range(len(wanted)))
        found = [name.read_text() if name.exists() else "none" for name in names]
        figures["runs"] += 1
        if ended != 0 or found != wanted:
            broken.append(f"{workers} workers, exit {ended}: {found}")
        write_figures("kills", figures, broken, time.monotonic() - start)

    assert broken == []


def wait_for_batches(child, folder, batches):
    """Wait until a run has written so many more batches, however slow the machine is.

    Returns:
        Its exit code if it ended before, else None.
    """
    wanted = len(os.listdir(folder)) + batches
    while child.exitcode is None and len(os.listdir(folder)) < wanted:
        child.join(0.01)
    return child.exitcode


def write_figures(part, figures, broken, seconds):
    """Keep what was tried as text, one paragraph for each law."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    lines = [
        f"{part}: {time.strftime('%Y-%m-%d')}, 2 cores, 24 GiB; {versions}",
        f"seed {SEED}, {seconds:.0f} s",
        *(f"{name}: {count}" for name, count in sorted(figures.items())),
        f"laws broken: {len(broken)}",
        *broken,
    ]
    kept = RESULTS.read_text().split("\n\n") if RESULTS.exists() else []
    kept = [each.strip() for each in kept if not each.startswith(f"{part}: ")]
    RESULTS.write_text("\n\n".join([*kept, "\n".join(lines)]) + "\n")
