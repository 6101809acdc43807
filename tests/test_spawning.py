"""What a process that is started anew would not find is known before one is started."""

import json
import multiprocessing
import subprocess
import sys
import types

import pytest
from ways_to_run import WAYS, run

from loaderkit.spawning import fork_server_runs_scripts, why_no_new_process

METHODS = sorted(set(multiprocessing.get_all_start_methods()) - {"fork"})


@pytest.mark.slow
@pytest.mark.long_cases
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", WAYS)
def test_what_is_said_of_a_class_is_what_a_new_process_finds(tmp_path, name, method):
    if name == "notebook cell":
        pytest.importorskip("IPython")

    answers = run(WAYS[name], tmp_path, method)

    expected = WAYS[name].expected
    if name == "script, guarded otherwise" and method == "forkserver":
        # There the fork server runs it, under the name of a main process.
        expected = set() if fork_server_runs_scripts() else expected
    wrong = [answer for answer in answers if answer.is_found == bool(answer.reason)]
    assert wrong == []
    assert {answer.name for answer in answers if answer.is_found} == expected


_GUARDS = {
    "its name": ('if __name__ == "__main__": main()', "", ""),
    "its process": (
        'if multiprocessing.current_process().name == "MainProcess": main()',
        "",
        "the fork server's process is called MainProcess too",
    ),
    "nothing": ("main()", "from its first line", "from its first line"),
}
"""What a script asks, and what is said of "spawn" and of a fork server that runs it."""


@pytest.mark.parametrize("asked", _GUARDS)
@pytest.mark.parametrize("version", [(3, 11, 7), (3, 14, 1)])
def test_what_a_script_asks_is_enough_where_it_is_run_again(
    tmp_path, monkeypatch, asked, version
):
    """The fork server of a Python that is not here, whose version alone is told."""
    last_line, by_spawn, by_server = _GUARDS[asked]
    script = tmp_path / "train.py"
    script.write_text(f"import multiprocessing\n{last_line}\n")
    main_module = types.ModuleType("__main__")
    main_module.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main_module)
    wanted = by_server if version == (3, 14, 1) else by_spawn
    for method, words in (("spawn", by_spawn), ("forkserver", wanted)):
        with monkeypatch.context() as python:
            python.setattr(sys, "version_info", version)
            reason = why_no_new_process(method)
        assert words in reason
        assert bool(reason) == bool(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "method"),
    [
        ("script", "spawn"),
        ("script", "forkserver"),
        ("unguarded script", "spawn"),
        ("argument", "forkserver"),
        ("input", "spawn"),
    ],
)
def test_a_program_packs_and_loads_in_whatever_way_it_is_run(tmp_path, way, method):
    """Workers start as asked for where they can, and are forked elsewhere."""
    text = f"METHOD = {method!r}\n{PACKING}"
    text += "main()" if way == "unguarded script" else GUARDED_MAIN
    (tmp_path / "train.py").write_text(text)
    words = {"argument": ["-c", text], "input": []}.get(way, ["train.py"])

    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        input=text if way == "input" else "",
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    assert answer["packed"] == answer["loaded"] == [*range(8)]
    assert answer["started by"] == (method if way == "script" else "fork")
    if way == "script":
        assert done.stderr == ""
    else:
        assert "packing by forked workers" in done.stderr
        assert answer["reason"].startswith(f"{method!r} is not possible: ")
        assert answer["refused"].startswith("No worker can start by")


PACKING = """
import json, multiprocessing
import torch, loaderkit

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, row):
        return {"row": torch.tensor(row)}

def join(samples):
    return [int(sample["row"]) for sample in samples]

def main():
    multiprocessing.set_start_method(METHOD)
    packed = loaderkit.pack(Rows(), "rows.lk", workers=1)
    options = {"batch_size": 4, "num_workers": 1, "collate_fn": join}
    loader = loaderkit.build_loader(Rows(), **options)
    decision = loader.plan.multiprocessing_context
    answer = {
        "packed": join(packed),
        "loaded": sum(loader, []),
        "started by": decision.value,
        "reason": decision.reason,
    }
    try:
        loaderkit.build_loader(Rows(), num_workers=1, multiprocessing_context=METHOD)
    except loaderkit.errors.LoaderError as error:
        answer["refused"] = error.what
    print(json.dumps(answer))
"""
GUARDED_MAIN = """
if __name__ == "__main__":
    main()
"""
