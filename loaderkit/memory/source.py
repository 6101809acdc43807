"""The line of a program that makes a variable grow."""

from __future__ import annotations

import ast
import functools
import linecache
from pathlib import Path

_GROWS = {
    "add", "add_param_group", "append", "appendleft", "extend", "insert", "put",
    "register_backward_hook", "register_forward_hook", "register_forward_pre_hook",
    "register_full_backward_hook", "register_hook", "setdefault", "update",
}  # fmt: skip


def mutation_line(file: str, name: str, near: int = 0) -> str:
    """Find where a file's code makes a container grow, or a variable is set.

    Args:
        file: Path of a source file; one without source gives nothing.
        name: A variable or attribute, such as "history".
        near: Of several such lines the nearest to this one is taken.

    Returns:
        "train.py:42"; empty when there is no such line.

    >>> mutation_line("", "history")
    ''
    """
    lines = _mutations(file)
    places = lines.get(name) or lines.get(f"{name}=") or []
    if not places:
        return ""
    nearest = min(places, key=lambda place: abs(place - near)) if near else places[0]
    return f"{Path(file).name}:{nearest}"


@functools.lru_cache(maxsize=8)
def _mutations(file: str) -> dict[str, list[int]]:
    """Map names to the lines that grow them, and "name=" to those that set them."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, list[int]] = {}
    for node in ast.walk(tree):
        for name in _grown_by(node):
            found.setdefault(name, []).append(getattr(node, "lineno", 0))
    return found


def _grown_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        grows = node.func.attr in _GROWS
        return [_name_of(node.func.value)] if grows else []
    if isinstance(node, ast.AugAssign):
        return [_name_of(node.target)]
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [
            _name_of(each) + ("" if isinstance(each, ast.Subscript) else "=")
            for each in targets
        ]
    return []


def _name_of(node: ast.AST) -> str:
    """Name what is grown: ``self.a["b"]`` is "a"."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
