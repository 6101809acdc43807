"""Find the source that gives a variable of a module or class its value.

A list or dict of a module is either a setting (``CLASSES = ["cat", "dog"]``) or a cache
that fills while samples are loaded (``SEEN = {}``).  Its value does not tell which.  So
a fingerprint has the statements that assign it: only a person changes those.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import sys
import textwrap
import types
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Scope: TypeAlias = "type | types.ModuleType"

_MAX_IMPORTS = 20
"""Modules through which an imported name is followed.  Chosen: it ends modules that
import a name from each other in a circle."""


class Written(NamedTuple):
    """The statements that give a variable its value."""

    scope: Scope
    """The module or class that contains them."""
    text: str
    """Their syntax trees: without comments and formatting."""
    names: frozenset[str]
    """Other names that occur in them."""


def find_written(
    scope: Scope | None, name: str, is_users: Callable[[types.ModuleType], bool]
) -> Written | None:
    """Find the statements that give a variable its value.

    Args:
        scope: The module or class that the variable belongs to; None if not known.
        name: The variable.  If it is imported, the module that it comes from is
            searched.
        is_users: Tells whether a module is the user's.  Others are not searched.

    Returns:
        The statements; None if there is no source, as in a notebook, or if no statement
        assigns the variable.
    """
    for _ in range(_MAX_IMPORTS):
        if scope is None:
            return None
        body = _body_of(scope)
        statements = list(_statements_that_change(body, name))
        if statements:
            names = set()
            for statement in statements:
                names |= _names_in(statement)
            # As a tree: a comment that is added packs nothing anew.
            text = "\n".join(map(ast.dump, statements))
            return Written(scope, text, frozenset(names - {name}))
        origin = _find_import(scope, body, name)
        # What a library gives a name, its version tells, which is noted already.
        if origin is None or not is_users(origin.module):
            return None
        scope, name = origin
    return None


def _names_in(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _body_of(scope: Scope) -> list[ast.stmt]:
    try:
        source = inspect.getsource(scope)
    # No source, a builtin, or a file that was edited since: inspect then reads lines
    # of the new file by the numbers of the old one, and may fall off its end.
    except (OSError, TypeError, SyntaxError, IndexError):
        return []
    # A class in a class is indented, which alone is no Python.
    body = _parse_source(textwrap.dedent(source))
    if isinstance(scope, type) and body and isinstance(body[0], ast.ClassDef):
        return body[0].body
    return body


# A fingerprint follows many names of the same few modules, and parsing one of 1,000
# lines takes milliseconds.  Nobody changes the trees.
@functools.lru_cache(maxsize=64)
def _parse_source(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except SyntaxError:
        return []


def _statements_that_change(body: list[ast.stmt], name: str) -> Iterator[ast.stmt]:
    """Find the statements that assign a variable, or call a method of its value.

    A loop is one statement: what it does depends on all of it.
    """
    for statement in body:
        if isinstance(statement, ast.For | ast.While):
            if any(_statements_that_change(statement.body, name)):
                yield statement
        elif isinstance(statement, ast.If | ast.With | ast.Try):
            yield from _statements_that_change(_nested_statements(statement), name)
        elif name in _changed_names(statement):
            yield statement


def _nested_statements(statement: ast.If | ast.With | ast.Try) -> list[ast.stmt]:
    """List the statements in all branches of a statement."""
    nested = [*statement.body, *getattr(statement, "orelse", ())]
    for handler in getattr(statement, "handlers", ()):
        nested += handler.body
    return [*nested, *getattr(statement, "finalbody", ())]


def _changed_names(statement: ast.stmt) -> set[str]:
    """Name the variables that a simple statement assigns or calls a method of."""
    changed: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        changed = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        changed = [statement.target]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        # ``CLASSES.append("cow")``; of a plain call nobody knows what it changes.
        changed = [function] if isinstance(function, ast.Attribute) else []
    names = set()
    for target in changed:
        names |= _names_in(target)
    return names


class _Origin(NamedTuple):
    """Where an imported variable comes from."""

    module: types.ModuleType
    name: str
    """Its name in that module."""


def _find_import(scope: Scope, body: list[ast.stmt], name: str) -> _Origin | None:
    """Find the module that a name is imported from; None if it is not imported."""
    if not isinstance(scope, types.ModuleType):
        return None
    for node in body:
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if name == (alias.asname or alias.name):
                relative = "." * node.level + (node.module or "")
                # Already imported, so it is only looked up: a fingerprint runs no code
                # of the user's that packing would not have run.
                try:
                    path = importlib.util.resolve_name(relative, scope.__package__)
                except (ImportError, ValueError):
                    return None
                module = sys.modules.get(path)
                return None if module is None else _Origin(module, alias.name)
    return None
