"""The line of a program that makes a variable grow."""

from __future__ import annotations

import ast
import functools
import linecache
from pathlib import Path
from typing import NamedTuple

_GROWING_METHODS = {
    "add",
    "add_param_group",
    "append",
    "appendleft",
    "extend",
    "insert",
    "put",
    "register_backward_hook",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_hook",
    "setdefault",
    "update",
}
"""Methods that make what they are called on hold more: containers, and modules, tensors
and optimizers of torch."""


class _MutationLines(NamedTuple):
    """Line numbers of a file, by the name of a variable or attribute."""

    growing: dict[str, list[int]]
    """Where a container is made to hold more."""
    setting: dict[str, list[int]]
    """Where a variable is set."""
    functions: list[range]
    """Lines of each function."""


def mutation_line(
    file: str,
    name: str,
    near: int = 0,
    *,
    is_local: bool = False,
) -> str:
    """Find where a file's code makes a container grow, or a variable is set.

    Args:
        file: Path of a source file; one without source gives nothing.
        name: A variable or attribute, such as "history".
        near: Of several such lines the nearest to this one is taken.
        is_local: It is a variable of the function that this line is in, or of one
            around it: another function may call a variable of its own the same.

    Returns:
        "train.py:42"; empty when there is no such line.

    >>> mutation_line("", "history")
    ''
    """
    mutations = _mutation_lines(file)
    # A container grows where something is added; a tensor or number where it is set.
    growing, setting = mutations.growing.get(name, []), mutations.setting.get(name, [])
    numbers = growing or setting
    if is_local:
        around = [lines for lines in mutations.functions if near in lines]
        for lines in sorted(around, key=len):
            inside = [number for number in growing if number in lines]
            inside = inside or [number for number in setting if number in lines]
            if inside:
                numbers = inside
                break
    if not numbers:
        return ""
    nearest = numbers[0]
    if near:
        nearest = min(numbers, key=lambda number: abs(number - near))
    return f"{Path(file).name}:{nearest}"


# Holders of one report lie in a few files, which are then parsed once.
@functools.lru_cache(maxsize=8)
def _mutation_lines(file: str) -> _MutationLines:
    """Map names to the lines that grow them, and to those that set them."""
    mutations = _MutationLines({}, {}, [])
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return mutations
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            _note_assignment(node, mutations)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # A function's code begins where its decorators do.
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            last = node.end_lineno or node.lineno
            mutations.functions.append(range(first, last + 1))
        grown = _grown_by(node)
        if grown is not None:
            number = getattr(node, "lineno", 0)
            mutations.growing.setdefault(_base_name(grown), []).append(number)
    return mutations


def _grown_by(node: ast.AST) -> ast.AST | None:
    """Give what a call or ``+=`` makes grow; None of any other code."""
    if isinstance(node, ast.AugAssign):
        return node.target
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.value if node.func.attr in _GROWING_METHODS else None
    return None


def _note_assignment(
    node: ast.Assign | ast.AnnAssign, mutations: _MutationLines
) -> None:
    """Note what is set; ``a[key] = value`` makes ``a`` grow."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        is_item = isinstance(target, ast.Subscript)
        lines = mutations.growing if is_item else mutations.setting
        lines.setdefault(_base_name(target), []).append(node.lineno)


def _base_name(node: ast.AST) -> str:
    """Name what is grown: ``self.a["b"]`` is "a"."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
