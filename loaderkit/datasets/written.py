"""What a person wrote for a value that may change while a process runs.

A list or dict of a module is a setting (``CLASSES = ["cat", "dog"]``) or a memory that
fills while samples are loaded (``SEEN = {}``).  Its value does not tell which; what was
written for it does, since only a person changes that.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import sys
import textwrap
import types
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MOST_IMPORTS = 20
"""A name is followed through so many modules that import it from each other."""


class Written(NamedTuple):
    """The statements that make a name what it is."""

    scope: Any
    """The module or class that has them."""
    text: str
    """Their syntax: without comments and formatting."""
    names: frozenset[str]
    """What they name besides."""


def find_written(
    scope: Any, name: str, is_users: Callable[[types.ModuleType], bool]
) -> Written | None:
    """Find what was written for a name of a module or class.

    Args:
        scope: The module or class.
        name: The name; one that is imported is looked for where it comes from.
        is_users: Tells whether a module is the user's; others are not looked into.

    Returns:
        The statements; None where there is no source, as in a notebook, or where the
        name is made by something else than a statement.
    """
    for _ in range(_MOST_IMPORTS):
        body = _body_of(scope)
        statements = list(_statements_that_change(body, name))
        if statements:
            text = "\n".join(map(ast.dump, statements))
            used = {
                n.id for s in statements for n in ast.walk(s) if isinstance(n, ast.Name)
            }
            return Written(scope, text, frozenset(used - {name}))
        origin = _find_import(scope, body, name)
        if origin is None or not is_users(origin[0]):
            return None
        scope, name = origin
    return None


def _body_of(scope: Any) -> list[ast.stmt]:
    try:
        source = inspect.getsource(scope)
    except (OSError, TypeError, SyntaxError, IndexError):
        return []
    body = _parse_source(textwrap.dedent(source))
    if isinstance(scope, type) and body and isinstance(body[0], ast.ClassDef):
        return body[0].body
    return body


@functools.lru_cache(maxsize=64)
def _parse_source(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except SyntaxError:
        return []


def _statements_that_change(body: list[ast.stmt], name: str) -> Iterator[ast.stmt]:
    """List the statements that set or change a name: assignments and method calls."""
    for statement in body:
        if isinstance(statement, ast.For | ast.While):
            if any(_statements_that_change(statement.body, name)):
                yield statement
        elif isinstance(statement, ast.If | ast.With | ast.Try):
            yield from _statements_that_change(_nested_statements(statement), name)
        elif name in _changed_names(statement):
            yield statement


def _nested_statements(statement: Any) -> list[ast.stmt]:
    inside = [*statement.body, *getattr(statement, "orelse", ())]
    for handler in getattr(statement, "handlers", ()):
        inside += handler.body
    return [*inside, *getattr(statement, "finalbody", ())]


def _changed_names(statement: ast.stmt) -> set[str]:
    changed: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        changed = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        changed = [statement.target]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        changed = [function] if isinstance(function, ast.Attribute) else []
    return {
        n.id for target in changed for n in ast.walk(target) if isinstance(n, ast.Name)
    }


def _find_import(scope: Any, body: list[ast.stmt], name: str) -> tuple[Any, str] | None:
    """Say which module a name is imported from, and what it is called there."""
    if not isinstance(scope, types.ModuleType):
        return None
    for node in body:
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if name == (alias.asname or alias.name):
                relative = "." * node.level + (node.module or "")
                try:
                    path = importlib.util.resolve_name(relative, scope.__package__)
                except (ImportError, ValueError):
                    return None
                module = sys.modules.get(path)
                return None if module is None else (module, alias.name)
    return None
