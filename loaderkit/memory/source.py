"""The line of a program that makes a variable grow."""

from __future__ import annotations

import ast
import functools
import linecache
import tokenize
from pathlib import Path
from typing import NamedTuple

_GROWING_METHODS = {
    "__setitem__",
    "add",
    "add_param_group",
    "append",
    "appendleft",
    "extend",
    "insert",
    "frombytes",
    "fromlist",
    "put",
    "register_backward_hook",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_hook",
    "register_module",
    "register_parameter",
    "setdefault",
    "update",
    "write",
    "writelines",
}
"""Methods that make what they are called on hold more: containers, and modules, tensors
and optimizers of torch."""
_GROWING_FUNCTIONS = {"heappush", "insort", "insort_left", "insort_right"}
"""Functions that make their first argument hold more."""
_CONTAINER_CLASSES = {"deque", "dict", "list", "set", "OrderedDict"}
"""Whose methods do that too when they are called as functions, as subclasses do."""


class _MutationLines(NamedTuple):
    """Line numbers of a file, by the name of a variable or (``.name``) an attribute.

    Where a variable has the attribute, also by both: ``Registry.items`` of a class.
    """

    growing: dict[str, list[int]]
    """Where a container is made to hold more."""
    setting: dict[str, list[int]]
    """Where a variable is set."""
    functions: list[range]
    """Lines of each function."""
    classes: dict[str, list[range]]
    """Lines of the classes of a name."""
    parameters: dict[str, list[int]]
    """Where a function takes an argument of a name."""
    globals: dict[str, list[int]]
    """Where a function says that a name is the module's."""


def mutation_line(
    file: str,
    name: str,
    near: int = 0,
    *,
    is_local: bool = False,
    class_name: str = "",
    must_grow: bool = False,
) -> str:
    """Find where a file's code makes a container grow, or a variable is set.

    Args:
        file: Path of a source file; one without source gives nothing.
        name: A variable such as "history", an attribute such as ".history", or the
            attribute of a variable or class, such as "Registry.history".
        near: A line of the function that has the variable.
        is_local: Only lines count of the function that ``near`` is in, or of one
            around it: another function may call something of its own the same.
        class_name: Only lines of a class count.
        must_grow: Lines that set a variable do not count where none makes it grow.

    Returns:
        "train.py:42", or "train.py:42 or train.py:57" where the source does not tell
        which of them adds most; empty when there is no such line.

    >>> mutation_line("", "history")
    ''
    """
    mutations = _mutation_lines(file)
    # A container grows where something is added; a tensor or number where it is set.
    growing = mutations.growing.get(name, [])
    setting = [] if must_grow else mutations.setting.get(name, [])
    numbers = _outside_of_locals(growing, name, mutations) or setting
    if is_local or class_name:
        ranges = mutations.classes.get(class_name, [])
        if is_local:
            ranges = [lines for lines in mutations.functions if near in lines]
        numbers = _inside_first(sorted(ranges, key=len), growing, setting)
    return _name_lines(Path(file).name, sorted(set(numbers)))


def _name_lines(file: str, numbers: list[int]) -> str:
    """Name lines of which any may be the one.

    >>> _name_lines("train.py", [2, 5]), _name_lines("train.py", [2, 5, 7, 9])
    ('train.py:2 or train.py:5', 'one of 4 lines from train.py:2 to train.py:9')
    """
    if len(numbers) > _MOST_LINES_NAMED:
        first, *_, last = numbers
        return f"one of {len(numbers)} lines from {file}:{first} to {file}:{last}"
    return " or ".join(f"{file}:{number}" for number in numbers)


_MOST_LINES_NAMED = 3


def _outside_of_locals(
    growing: list[int], name: str, mutations: _MutationLines
) -> list[int]:
    """Leave out lines of functions that have a variable of their own by this name."""
    setting = mutations.setting.get(name, []) + mutations.parameters.get(name, [])
    declared_global = mutations.globals.get(name, [])

    def has_own_variable(function: range) -> bool:
        sets_it = any(number in function for number in setting)
        return sets_it and not any(number in function for number in declared_global)

    with_own = list(filter(has_own_variable, mutations.functions))
    return [number for number in growing if not _is_within(number, with_own)]


def _is_within(number: int, functions: list[range]) -> bool:
    return any(number in function for function in functions)


def _inside_first(
    ranges: list[range], growing: list[int], setting: list[int]
) -> list[int]:
    """Pick the lines within the first range that has any; those that grow first."""
    for lines in ranges:
        for numbers in (growing, setting):
            inside = [number for number in numbers if number in lines]
            if inside:
                return inside
    return []


def _source_of(file: str) -> str:
    """Read a file of Python; also a cell of a notebook, which linecache knows.

    What is on the disk is read from there: linecache keeps all lines that it was asked
    for, which would be a growth of the run in which the next search looks for one.
    """
    try:
        with tokenize.open(file) as opened:
            return opened.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return "".join(linecache.getlines(file))


# Holders of one report lie in a few files, which are then parsed once.
@functools.lru_cache(maxsize=8)
def _mutation_lines(file: str) -> _MutationLines:
    """Map names to the lines that grow them, and to those that set them."""
    mutations = _MutationLines({}, {}, [], {}, {}, {})
    try:
        tree = ast.parse(_source_of(file))
    except (SyntaxError, ValueError):
        return mutations
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            _note_assignment(node, mutations)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            # A function's code begins where its decorators do.
            beginnings = [node, *node.decorator_list]
            first = min(beginning.lineno for beginning in beginnings)
            lines = range(first, (node.end_lineno or node.lineno) + 1)
            if isinstance(node, ast.ClassDef):
                mutations.classes.setdefault(node.name, []).append(lines)
            else:
                mutations.functions.append(lines)
        if isinstance(node, ast.arg):
            mutations.parameters.setdefault(node.arg, []).append(node.lineno)
        if isinstance(node, ast.Global):
            for name in node.names:
                mutations.globals.setdefault(name, []).append(node.lineno)
        grown = _grown_by(node)
        if grown is not None:
            number = getattr(node, "lineno", 0)
            for name in _base_names(grown):
                mutations.growing.setdefault(name, []).append(number)
    return mutations


def _grown_by(node: ast.AST) -> ast.AST | None:
    """Give what a call or ``+=`` makes grow; None of any other code."""
    if isinstance(node, ast.AugAssign):
        return node.target
    if not isinstance(node, ast.Call):
        return None
    called = node.func
    called_name = getattr(called, "attr", getattr(called, "id", ""))
    if called_name in _GROWING_FUNCTIONS and node.args:
        return node.args[0]
    if not isinstance(called, ast.Attribute) or called_name not in _GROWING_METHODS:
        return None
    is_function = getattr(called.value, "id", "") in _CONTAINER_CLASSES
    return node.args[0] if is_function and node.args else called.value


def _note_assignment(
    node: ast.Assign | ast.AnnAssign, mutations: _MutationLines
) -> None:
    """Note what is set; ``a[key] = value`` makes ``a`` grow."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        is_item = isinstance(target, ast.Subscript)
        lines = mutations.growing if is_item else mutations.setting
        for name in _base_names(target):
            lines.setdefault(name, []).append(node.lineno)


def _base_names(node: ast.AST) -> list[str]:
    """Name what is grown: ``C.a["b"]`` is ".a" and "C.a"; ``super()`` is "self"."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "super":
        return ["self"]
    if not isinstance(node, ast.Attribute):
        return [node.id if isinstance(node, ast.Name) else ""]
    names = [f".{node.attr}"]
    if isinstance(node.value, ast.Name):
        names.append(f"{node.value.id}.{node.attr}")
    return names
