"""Finds what keeps a process that is started anew from doing the work of this one.

``fork`` copies this process.  ``spawn`` (macOS, Windows) and ``forkserver`` (Linux from
Python 3.14 on) start Python again, import the main module under another name, and then
unpickle what they were sent; pickle names classes and functions by their module.  So
what was typed into a notebook is not there, and a script without a main guard is run
again from its first line.  Either ends the new process before it runs a line of ours,
with a traceback on its own stderr alone; here it is known beforehand.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAIN_NAMES = frozenset({"__main__", "__mp_main__"})
"""The main module, here and in a process that was started anew."""
_TYPED_FILES = ("<stdin", "<python-input", "<ipython-input", "<console")
"""How names of files begin, of code that was typed at a prompt.  Not "<string>", which
is also what dataclasses make."""
_NOTEBOOK_FILES = "ipykernel_"
"""A part of them, of code that was typed into a notebook."""
_NAMES_OF_PROCESSES = frozenset({"current_process", "MainProcess"})
"""Names by which a script tells that it is run again, other than ``__name__``.  Not
``parent_process``: that is set behind the import of the main module."""


GUARD_MAIN = 'put what the script does behind if __name__ == "__main__":'
"""What to do about a script that a new process would run from its first line."""


def why_no_new_process(method: str) -> str:
    """Say why no process can be started anew from this one, whatever it is sent.

    Args:
        method: How it would be started: "spawn" or "forkserver".

    Returns:
        The reason; empty where one can.
    """
    main_file = _main_file()
    if main_file is None:
        return ""
    if not main_file.exists():
        return f"a new process would run {main_file.name} again, which is no file"
    source = _read_source(main_file)
    if source is None or source.asks_for_its_name:
        return ""
    reason = f"a new process would run {main_file.name} again from its first line: "
    reason += 'it has no line if __name__ == "__main__"'
    if not source.asks_for_its_process:
        return reason
    is_run_by_server = method == "forkserver" and fork_server_runs_scripts()
    if not is_run_by_server or _is_run_as_module():
        return ""
    return f"{reason}, and the fork server's process is called MainProcess too"


def fork_server_runs_scripts(version: tuple[int, ...] | None = None) -> bool:
    """Tell whether the fork server imports the main script, before it forks.

    It was always meant to, and did not until CPython's issue 126631 was mended, in
    3.13.8 and 3.14.1.  Of ``python -m module`` it still does not know.

    Args:
        version: Of Python; None for this one.

    >>> fork_server_runs_scripts((3, 11, 7)), fork_server_runs_scripts((3, 13, 8))
    (False, True)
    >>> fork_server_runs_scripts((3, 14, 0)), fork_server_runs_scripts((3, 15, 0))
    (False, True)
    """
    version = version or sys.version_info[:3]
    return version >= (3, 14, 1) or (3, 13, 8) <= version < (3, 14, 0)


def is_run_again() -> bool:
    """Tell whether this is a new process that still runs the main script.

    That is before it does what it was started for.  ``multiprocessing`` runs the script
    under another name, and calls the result ``__main__`` when it is through.
    """
    run_again = sys.modules.get("__mp_main__")
    return run_again is not None and sys.modules.get("__main__") is not run_again


def _is_run_as_module() -> bool:
    """Tell whether the main module was found by its name, not by its file."""
    return getattr(sys.modules.get("__main__"), "__spec__", None) is not None


def why_not_importable(thing: type | types.FunctionType) -> str:
    """Say why a new process would not find a class or function by its name.

    Args:
        thing: As pickle would name it.

    Returns:
        The reason; empty where it is found, or nothing tells that it is not.

    >>> import json
    >>> why_not_importable(json.JSONEncoder)
    ''
    """
    name, module = thing.__qualname__, thing.__module__
    main_file = _main_file()
    if module not in _MAIN_NAMES:
        # A main module that is run again may make a module, as it did here.
        if main_file is not None or _is_findable(module.partition(".")[0]):
            return ""
        return f"{name} is of {module}, a module without a file that can be imported"
    if main_file is None or _is_typed(thing):
        return f"{name} was typed in, and is in no file that a new process imports"
    source = _read_source(main_file)
    if source is None or source.names is None:
        return ""
    if name.partition(".")[0] in source.names:
        return ""
    return f"{name} is not in {main_file.name} as a new process imports it"


@dataclass(frozen=True)
class _Source:
    """A main module as a new process would find it, under another name."""

    names: frozenset[str] | None
    """All that it may bind, outside of what is run for the main process alone; None
    where its text does not tell."""
    asks_for_its_name: bool
    """A statement of it depends on ``__name__``."""
    asks_for_its_process: bool
    """It looks at the name of the process, which is set before it is run again; but
    not in the fork server, which keeps the name of a main process."""


def _main_file() -> Path | None:
    """Give the file that a new process runs first; None where it runs none.

    The same rules as ``multiprocessing.spawn.get_preparation_data``.
    """
    main = sys.modules.get("__main__")
    spec: ModuleSpec | None = getattr(main, "__spec__", None)
    if spec is not None:
        # "python -m package", a folder or a zip archive: their __main__ is left alone.
        if spec.name.rpartition(".")[2] == "__main__" or spec.origin is None:
            return None
        return Path(spec.origin)
    file = getattr(main, "__file__", None)
    if file is None or Path(file).stem == "ipython":  # which Python itself leaves out
        return None
    return Path(os.path.abspath(file))  # noqa: PTH100 -- resolve() follows links


def _read_source(file: Path) -> _Source | None:
    """Read what a main module does; None where it has no text."""
    try:
        changed_ns = file.stat().st_mtime_ns
    except OSError:
        return None
    return _parse_source(file, changed_ns)


@functools.lru_cache(maxsize=8)
def _parse_source(file: Path, changed_ns: int) -> _Source | None:  # noqa: ARG001 -- a key
    try:
        module = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # compiled, say
        return None
    asks_for_its_name = False
    names: set[str] = set()
    for statement in module.body:
        asks_for_its_name |= _is_guard(statement)
        not_run: list[ast.stmt] = []
        if isinstance(statement, ast.If) and _is_for_main_alone(statement.test):
            not_run = statement.body
        for node in _walk_outside(statement, not_run):
            names |= _names_bound_by(node)
    mentioned = {_name_of(node) for node in ast.walk(module)}
    asks_for_its_process = not _NAMES_OF_PROCESSES.isdisjoint(mentioned)
    known_names = None if "*" in names else frozenset(names)
    return _Source(known_names, asks_for_its_name, asks_for_its_process)


def _is_guard(statement: ast.stmt) -> bool:
    """Tell whether a statement depends on the name under which its module is run."""
    if not isinstance(statement, ast.If | ast.Match):
        return False
    asked = statement.test if isinstance(statement, ast.If) else statement.subject
    return any(_name_of(node) == "__name__" for node in ast.walk(asked))


def _is_for_main_alone(test: ast.expr) -> bool:
    """Tell whether a test is the usual one, which fails in a new process."""
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
        return False
    compared = (test.left, *test.comparators)
    texts = [operand.value for operand in compared if isinstance(operand, ast.Constant)]
    return texts == ["__main__"]


def _walk_outside(node: ast.AST, left_out: list[ast.stmt]) -> Iterator[ast.AST]:
    """Walk over a statement and all in it, but for some statements."""
    yield node
    for child in ast.iter_child_nodes(node):
        if child not in left_out:
            yield from _walk_outside(child, left_out)


def _names_bound_by(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    # What these bind, its text does not tell; "exec(text, names)" binds elsewhere.
    if isinstance(node, ast.Call):
        called = _name_of(node.func)
        if called == "globals" or (called == "exec" and len(node.args) == 1):
            return {"*"}
    return set()


def _name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _is_typed(thing: type | types.FunctionType) -> bool:
    """Tell whether code of a class or function was typed at a prompt."""
    is_function = isinstance(thing, types.FunctionType)
    functions = [thing] if is_function else list(vars(thing).values())
    for function in functions:
        if isinstance(function, types.FunctionType):
            file = function.__code__.co_filename
            if file.startswith(_TYPED_FILES) or _NOTEBOOK_FILES in file:
                return True
    return False


def _is_findable(top_module: str) -> bool:
    """Tell whether a module or package could be imported if it were not yet."""
    if top_module in sys.builtin_module_names or top_module in sys.stdlib_module_names:
        return True
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is not None and find_spec(top_module, None) is not None:
            return True
    return PathFinder.find_spec(top_module) is not None
