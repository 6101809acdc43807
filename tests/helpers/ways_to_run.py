"""Programs that ask whether a new process finds their classes, and then try it.

The program is one text, run in every way in which Python runs a program.  Behind each
class and function stands what was said of it, and whether a process that was started
anew, by Python itself, could unpickle it.
"""

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

DEFINITIONS = """
import collections, dataclasses, json, multiprocessing, os, sys, types
from loaderkit.spawning import why_no_new_process, why_not_importable

class Plain: pass
class Outer:
    class Inner: pass
@dataclasses.dataclass
class Data:
    number: int = 0
def function(): pass
"""
MADE = """
Pair = collections.namedtuple("Pair", "a b")
if sys.platform:
    def branched(): pass
made = types.ModuleType("made")
exec("class Made: pass", made.__dict__)
sys.modules["made"] = made
"""
ASKING = """
CHECK = "assert getattr(thing, 'version', 1) == version"

def succeeds(thing):
    names = {"thing": thing, "version": getattr(thing, "version", 1)}
    context = multiprocessing.get_context(METHOD)
    process = context.Process(target=exec, args=(CHECK, names))
    try:
        process.start()
    except OSError:
        # From Python 3.14 on the fork server runs the file too, and may end by it.
        return False
    process.join()
    return process.exitcode == 0

def ask(names):
    for name in names:
        thing = eval(name)
        reason = why_no_new_process(METHOD) or why_not_importable(thing)
        print(json.dumps([name, reason, succeeds(thing)]), flush=True)
"""
DEFINED = ("Plain", "Outer.Inner", "Data", "function")
NAMES = (*DEFINED, "Pair", "branched")
ELSEWHERE = ("collections.OrderedDict", "made.Made")
GUARDED = """
if __name__ == "__main__":
    class Late: pass
    ask(NAMES + ("Late",))
"""
GUARDED_OTHERWISE = """
if multiprocessing.current_process().name == "MainProcess":
    ask(NAMES)
"""
PROMPT_GUARDED = """
if __name__ == "__main__":
    import code
    code.interact(local=globals(), exitmsg="")
    ask(NAMES)
"""
UNGUARDED = """
ask(NAMES)
"""


def program(end, method, names=NAMES + ELSEWHERE):
    return f"METHOD, NAMES = {method!r}, {names!r}\n{DEFINITIONS}{MADE}{ASKING}{end}"


class Answer(NamedTuple):
    name: str
    reason: str
    """Empty where it was said that a new process finds it."""
    is_found: bool
    """Whether one did."""


class Command(NamedTuple):
    words: list[str]
    typed: str = ""
    """What comes on standard input."""


def as_script(folder, end, method):
    (folder / "train.py").write_text(program(end, method))
    return Command(["train.py"])


def as_module(folder, end, method):
    (folder / "package").mkdir()
    (folder / "package/train.py").write_text(program(end, method))
    return Command(["-m", "package.train"])


def as_package(folder, end, method):
    (folder / "package").mkdir()
    (folder / "package/__init__.py").touch()
    (folder / "package/__main__.py").write_text(program(end, method))
    return Command(["-m", "package"])


def as_folder(folder, end, method):
    (folder / "program").mkdir()
    (folder / "program/__main__.py").write_text(program(end, method))
    return Command(["program"])


def as_archive(folder, end, method):
    with zipfile.ZipFile(folder / "program.zip", "w") as file:
        file.writestr("__main__.py", program(end, method))
    return Command(["program.zip"])


def as_argument(_folder, end, method):
    return Command(["-c", program(end, method)])


def as_input(_folder, end, method):
    return Command(["-"], program(end, method))


def as_redirected_input(_folder, end, method):
    return Command([], program(end, method))


def as_link(folder, end, method):
    (folder / "real").mkdir()
    (folder / "real/train.py").write_text(program(end, method))
    (folder / "run.py").symlink_to("real/train.py")
    return Command(["run.py"])


def as_script_that_is_gone(folder, end, method):
    gone = f"\nos.remove(__file__)\n{end}"
    (folder / "train.py").write_text(program(gone, method))
    return Command(["train.py"])


def as_prompt_in_a_script(folder, end, method):
    """What is typed anew there has a name of the script's, and is not the script's."""
    typed = "class Plain:\n  version = 2\n  def f(self): pass\n\ndef typed(): pass\n\n"
    names = (*NAMES, "typed")
    (folder / "train.py").write_text(program(end, method, names))
    return Command(["train.py"], typed)


def as_notebook_cell(folder, end, method):
    (folder / "cell.txt").write_text(program(end, method))
    code = "from IPython.core.interactiveshell import InteractiveShell as Shell\n"
    code += "shell = Shell.instance()\n"
    code += "shell.run_cell(open('cell.txt').read()).raise_error()"
    return Command(["-c", code])


class Way(NamedTuple):
    command: Callable
    end: str = UNGUARDED
    expected: set = frozenset()
    """What a new process finds; checked, so that not all answers are "no"."""


IMPORTED = {"collections.OrderedDict"}
WAYS = {
    "script": Way(as_script, GUARDED, {*NAMES, *ELSEWHERE}),
    "script, guarded otherwise": Way(
        as_script, GUARDED_OTHERWISE, {*NAMES, *ELSEWHERE}
    ),
    "script without a guard": Way(as_script),
    "linked script": Way(as_link, GUARDED, {*NAMES, *ELSEWHERE}),
    "module": Way(as_module, GUARDED, {*NAMES, *ELSEWHERE}),
    "module without a guard": Way(as_module),
    "package": Way(as_package, UNGUARDED, IMPORTED),
    "folder": Way(as_folder, UNGUARDED, IMPORTED),
    "archive": Way(as_archive, UNGUARDED, IMPORTED),
    "argument": Way(as_argument, UNGUARDED, IMPORTED),
    "input": Way(as_input),
    "redirected input": Way(as_redirected_input),
    "deleted script": Way(as_script_that_is_gone),
    "notebook cell": Way(as_notebook_cell, UNGUARDED, IMPORTED),
    "prompt in a script": Way(
        as_prompt_in_a_script, PROMPT_GUARDED, {*NAMES} - {"Plain"}
    ),
}


def run(way, folder, method):
    """Run the program, and read what it printed."""
    command = way.command(Path(folder), way.end, method)
    done = subprocess.run(
        [sys.executable, *command.words],
        cwd=folder,
        input=command.typed,
        capture_output=True,
        text=True,
        check=False,
    )
    # At a prompt the first line stands behind what the prompt prints.
    lines = [line.lstrip(">. ") for line in done.stdout.splitlines()]
    answers = [Answer(*json.loads(line)) for line in lines if line.startswith('["')]
    assert answers, done.stderr[-2000:]
    return answers
