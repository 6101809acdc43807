"""What a function's own code says: its source, its names, its literals, its values.

Nothing here is followed: whose values those are, and what they hold, is asked by
``fingerprint``.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import sys
import textwrap
import types
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import PurePath


def source_text(function: types.FunctionType) -> str:
    """Dump a function's syntax tree, without its docstrings.

    Comments and formatting are not in a syntax tree.
    """
    try:
        source = inspect.getsource(function)
        tree = ast.parse(textwrap.dedent(source))
    except (OSError, TypeError, SyntaxError):
        # Typed at a prompt, so there is no source.
        return _versioned_bytecode_text(function)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_docstring(body[0]):
            body[:1] = [ast.Pass()] if len(body) == 1 else []
    text = ast.dump(tree)
    if _is_lambda_of_other_source(function, source, tree):
        text += _versioned_bytecode_text(function)
    return text


def _is_lambda_of_other_source(
    function: types.FunctionType, source: str, tree: ast.Module
) -> bool:
    """Tell whether a lambda's source is not that of this lambda alone and as a whole.

    ``inspect`` cuts source by lines.  So it gives one text for all lambdas of a line,
    and leaves out what stands on the lines below where a bracket before the lambda is
    what joins them.
    """
    code = function.__code__
    if code.co_name != "<lambda>":
        return False
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    if len(lambdas) != 1:
        return True
    # A text that goes on below is one constant, of which Python 3.10 and 3.12 tell the
    # first line alone.
    compiled = compile(
        ast.Expression(lambdas[0]), "<lambda>", "eval", dont_inherit=True
    )
    # Beside the lambda there are the defaults of its arguments.
    inner = [const for const in compiled.co_consts if isinstance(const, types.CodeType)]
    of_source = [candidate for candidate in inner if candidate.co_name == code.co_name]
    if [_constants_in(candidate) for candidate in of_source] != [_constants_in(code)]:
        return True
    lines = [line for _, _, line in code.co_lines() if line is not None]
    # The end of each expression, which Python 3.10 does not tell.
    for _, end, _, _ in getattr(code, "co_positions", tuple)():
        lines += [] if end is None else [end]
    return max(lines) >= code.co_firstlineno + len(source.splitlines())


def _constants_in(code: types.CodeType) -> set[str]:
    """Write the constants of a function and of functions inside it."""
    constants: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            constants |= _constants_in(constant)
        elif isinstance(constant, frozenset):
            constants.add(f"frozenset({sorted(map(repr, constant))})")
        elif not (isinstance(constant, str) and constant.endswith(">")):
            # Not the names of functions inside it, "<lambda>.<locals>.<listcomp>",
            # which Python 3.10 keeps among them: they begin with where it stands.
            constants.add(repr(constant))
    # Whether there is a None depends on how a function returns.
    return constants - {"None"}


def _versioned_bytecode_text(function: types.FunctionType) -> str:
    """Convert bytecode to text; it differs between versions of Python."""
    return f"{sys.version_info[:2]}{_bytecode_text(function.__code__)}"


def _bytecode_text(code: types.CodeType) -> str:
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            constants.append(_bytecode_text(constant))
        elif isinstance(constant, frozenset):
            # The order of a set of constants differs from process to process.
            constants.append(f"frozenset({sorted(map(repr, constant))})")
        else:
            constants.append(repr(constant))
    return f"{code.co_code!r}{constants!r}{code.co_names!r}"


def _is_docstring(node: ast.AST) -> bool:
    plain = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return plain and isinstance(node.value.value, str)  # type: ignore[attr-defined]


def globals_read_in(code: types.CodeType) -> set[str]:
    """Name the globals that a function and functions inside it read."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in {"LOAD_GLOBAL", "LOAD_NAME"}
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= globals_read_in(constant)
    return names


def strings_in(code: types.CodeType) -> list[str | PurePath]:
    """List the string literals of a function and of functions inside it."""
    strings: list[str | PurePath] = []
    for constant in code.co_consts:
        if isinstance(constant, str):
            strings.append(constant)
        elif isinstance(constant, types.CodeType):
            strings += strings_in(constant)
    return strings


class Changed(NamedTuple):
    """What code changes: a variable's value, or an attribute of it."""

    variable: str
    attribute: str | None


_CHANGING_METHODS = frozenset(
    {"append", "add", "clear", "discard", "extend", "insert", "move_to_end", "pop"}
    | {"popitem", "remove", "setdefault", "sort", "update"}
)
"""Methods that change a container and may stand anywhere in an expression."""


def changes_in(function: types.FunctionType) -> set[Changed]:
    """List what a function's own code changes of the values of its variables.

    Such a container is a cache that fills while samples are loaded, and its value says
    nothing of the samples.
    """
    node = _own_node(function)
    changed: list[ast.expr] = []
    for inner in () if node is None else ast.walk(node):
        match inner:
            case ast.Attribute(attr=name) if name in _CHANGING_METHODS:
                changed.append(inner.value)
            case ast.Attribute(ctx=ast.Store() | ast.Del()):
                changed.append(inner)
            case ast.Subscript(ctx=ast.Store() | ast.Del()):
                changed.append(inner.value)
    changes = set()
    for target in changed:
        attribute = None
        while isinstance(target, ast.Subscript | ast.Attribute):
            attribute = target.attr if isinstance(target, ast.Attribute) else None
            target = target.value
        if isinstance(target, ast.Name):
            changes.add(Changed(target.id, attribute))
    return changes


AttributePaths: TypeAlias = frozenset[tuple[str, ...]]
"""Attributes of a value, and attributes of these: ``args.model.dim`` reads
``("model", "dim")`` of ``args``, and whatever ``dim`` holds."""


class Uses(NamedTuple):
    """How a function's own code uses variables."""

    attributes: dict[str, AttributePaths]
    """What it reads of each, where it reads attributes and nothing else: a function
    with ``args.root`` does not depend on ``args.epochs``."""
    whole: frozenset[str]
    """Variables that it uses otherwise: what it calls may read all that they hold."""


def uses_in(function: types.FunctionType) -> Uses:
    """Say how a function's own code uses variables.

    Without source nothing is known but that its first argument, which is ``self`` of
    methods, may be used as a whole.
    """
    node = _own_node(function)
    if node is None:
        return Uses({}, frozenset(function.__code__.co_varnames[:1]))
    attributes: dict[str, set[tuple[str, ...]]] = {}
    whole = set()
    for parent in ast.walk(node):
        if isinstance(parent, ast.Attribute):
            continue  # a part of what was looked at as a whole, or has no variable
        for child in ast.iter_child_nodes(parent):
            name, path = _path_of(child)
            if path:
                attributes.setdefault(name, set()).add(path)
            elif name and not _asks_for_type(parent):
                whole.add(name)
    only_attributes = {
        name: frozenset(paths)
        for name, paths in attributes.items()
        if name not in whole
    }
    return Uses(only_attributes, frozenset(whole))


def _path_of(node: ast.AST) -> tuple[str, tuple[str, ...]]:
    """Take ``args.model.dim`` apart: the variable, and the attributes behind it.

    Returns:
        An empty name where it is no variable with attributes.
    """
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return "", ()
    path = tuple(reversed(names))
    # Whoever asks for all attributes at once reads all that the object holds.
    if "__dict__" in path:
        path = path[: path.index("__dict__")]
    return node.id, path


def paths_behind(paths: AttributePaths | None, name: str) -> AttributePaths | None:
    """Say what is read of an attribute, where it is known what is read of its owner.

    Args:
        paths: What is read of the owner; None for all that it holds.
        name: The attribute.

    Returns:
        None for all that the attribute holds.

    >>> paths_behind(frozenset({("model", "dim"), ("lr",)}), "model")
    frozenset({('dim',)})
    >>> paths_behind(frozenset({("model", "dim"), ("lr",)}), "lr")
    """
    behind = frozenset(path[1:] for path in paths or () if path[0] == name)
    return None if () in behind else behind or None


_TYPE_QUESTIONS = frozenset({"type", "isinstance", "super", "id", "hasattr"})


def _asks_for_type(parent: ast.AST) -> bool:
    """Tell whether a node is a call that asks what an object is, not what it holds."""
    return (
        isinstance(parent, ast.Call)
        and isinstance(parent.func, ast.Name)
        and parent.func.id in _TYPE_QUESTIONS
    )


def _own_node(function: types.FunctionType) -> ast.AST | None:
    """Find a function in its source; None where there is no source.

    Of several lambdas on a line it is the innermost that has all that the lambda's
    bytecode was made of.  Python 3.10 does not tell that: there it is all of them.
    """
    return _node_of_code(function.__code__)


@functools.lru_cache(maxsize=1024)
def _node_of_code(code: types.CodeType) -> ast.AST | None:
    try:
        source = inspect.getsource(code)
        dedented = textwrap.dedent(source)
        tree = ast.parse(dedented)
    except (OSError, TypeError, SyntaxError):
        return None
    if code.co_name != "<lambda>":
        return tree
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    if not hasattr(code, "co_positions"):
        return ast.Tuple(list(lambdas), ast.Load())
    # Positions in the file's lines, from 0 where the source was cut out.
    indent = len(source.splitlines()[0]) - len(dedented.splitlines()[0])
    first = code.co_firstlineno - 1
    positions = [
        (line - first, column - indent)
        for line, _, column, _ in code.co_positions()
        # What Python adds at the start of a function has column 0, or none.
        if line is not None and column
    ]
    enclosing = [node for node in lambdas if _encloses(node, positions)]
    return enclosing[-1] if enclosing else tree


def _encloses(node: ast.Lambda, positions: list[tuple[int, int]]) -> bool:
    """Tell whether all positions, as line and column, are in the body of a lambda."""
    begin = (node.body.lineno, node.body.col_offset)
    end = (node.body.end_lineno or 0, node.body.end_col_offset or 0)
    return all(begin <= position <= end for position in positions)


def values_bound_to(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Give the defaults of a function and the variables of its closure, by name."""
    code = function.__code__
    defaults = function.__defaults__ or ()
    parameters = code.co_varnames[: code.co_argcount]
    yield from zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield name, _cell_contents(cell)


def _cell_contents(cell: types.CellType) -> object:
    """Give the value of a closure's variable; None if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
