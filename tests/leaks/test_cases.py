"""Every way to leak that we know, through the public API: found, and its holder named.

Each case runs in a process of its own.  A third of the corpus is searched for among all
objects of the process.  To the others, the 170,000 objects that importing torch makes
are out of sight, as to the other tests of this room: two thirds of their time went into
these.  ``tests/soak/whole_processes.py`` judges all of them among all objects.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import leaks_corpus
import pytest
from cases import CASES, WITH_PYG

HERE = Path(__file__).parent
NAMES = {
    "cycles_with_gc_off": ("the garbage collector is off",),
    "native_malloc": ("native memory",),
    "children_never_joined": ("child processes",),
    "threads_never_end": ("threads",),
    "files_never_closed": ("open files", "`kept`"),
    "sockets_never_closed": ("sockets", "`kept`"),
    "loss_accumulated_with_graph": ("`state['total']`",),
    "hook_keeps_activation": ("`seen`",),
    "hook_registered_every_step": ("_forward_pre_hooks`",),
    "unbounded_cache": ("`make",),
    "closures_kept": ("`callbacks`",),
    "dataset_fills_private_cache": ("`data.cache`",),
    "metric_history_of_tensors": ("`history['y']`", "`history['loss']`"),
    "parameters_added_to_optimizer": ("`opt.param_groups`",),
    "registry_by_id": ("`registry`",),
}
"""What a report on a case of the corpus must say; the others keep a list `kept`."""


MORE_EPOCHS = "120"
"""Four times as many, which is more than the undecided cases have asked for."""


def judge_with_more_epochs(folder, names, table=()):
    """Judge the cases; leaks that "need more epochs" get them, and are judged again.

    On a busy machine pages come and go beside what a case keeps, and the detector then
    asks for more epochs instead of guessing.
    """
    results = run_cases(folder, *table, *names)
    undecided = [r["name"] for r in results if r["leaks"] and asks_for_more(r)]
    if not undecided:
        return results
    more = ["--epochs", MORE_EPOCHS, *undecided]
    again = {r["name"]: r for r in run_cases(folder, *table, *more)}
    return [again.get(result["name"], result) for result in results]


def asks_for_more(result):
    return result["verdict"] == "needs more epochs"


def run_cases(folder, *arguments):
    """Run the cases; into a file, since some leave children that would hold a pipe."""
    command = [sys.executable, str(HERE / "run_cases.py"), *arguments]
    file = folder / "answers"
    plain = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}
    with file.open("w") as out:  # under coverage, counting objects takes four times
        child = subprocess.Popen(command, stdout=out, start_new_session=True, env=plain)
        assert child.wait() == 0
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    return [json.loads(line) for line in file.read_text().splitlines()]


def complaints_about(results, names):
    """List cases with a wrong verdict, and leaks whose cause is not named."""
    complaints = []
    for result in results:
        if (result["verdict"] == "leaking") != result["leaks"]:
            complaints.append((result["name"], result["text"]))
        elif result["leaks"]:
            words = names(result["name"])
            # A cause goes on in indented lines where it is longer than one.
            whole_lines = result["text"].replace("\n  ", " ").splitlines()
            causes = [line for line in whole_lines if line[:1].isdigit()]
            if not any(word in cause for word in words for cause in causes):
                complaints.append((result["name"], words, result["text"]))
    return complaints


def test_there_are_enough_cases():
    leaks = [name for name, case in CASES.items() if case.leaks]

    assert len(leaks) >= 27
    assert len(CASES) - len(leaks) >= 14
    assert all(case.source for case in CASES.values())
    assert set(WITH_PYG) <= set(CASES)


HELD_BY_WHAT_TORCH_MAKES = {"finalizers_keep_their_arguments"}
"""Cases whose holder, such as weakref's registry, is there once torch is imported."""
PARTS = 3
"""In which a table is judged: a whole one can take longer on a busy machine than one
test may; each part imports torch once."""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_our_cases_are_judged_right_and_their_causes_named(part, tmp_path):
    # Those that import PyG are in one part, which imports it once.
    names = [name for name in CASES if name not in WITH_PYG][part::PARTS]
    names += WITH_PYG if part == 0 else ()

    hidden = [name for name in names if name in HELD_BY_WHAT_TORCH_MAKES]
    judge_our_cases([name for name in names if name not in hidden], tmp_path, "new")
    if hidden:
        judge_our_cases(hidden, tmp_path, "all")


def judge_our_cases(names, folder, objects):
    """Check verdicts and causes, with the objects to search: "all", or "new" ones."""
    results = judge_with_more_epochs(folder, names, ["--objects", objects])

    assert {result["name"] for result in results} == set(names)
    assert not complaints_about(results, lambda name: CASES[name].names)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_the_corpus_is_judged_right_and_its_causes_named(part, tmp_path):
    names = list(leaks_corpus.CASES)[part::PARTS]

    judge_corpus(names, tmp_path, "new" if part else "all")

    assert len(leaks_corpus.CASES) >= 33


def judge_corpus(names, folder, objects):
    """Check verdicts and causes, with the objects to search: "all", or "new" ones."""
    table = ["--of", "leaks_corpus", "--objects", objects]
    results = judge_with_more_epochs(folder, names, table)

    assert {result["name"] for result in results} == set(names)
    assert not complaints_about(results, lambda name: NAMES.get(name, ("`kept`",)))
