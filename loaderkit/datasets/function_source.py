"""What a function's own code says: its source, its names, its literals, its values.

Nothing here is followed: whose values those are, and what they hold, is asked by
``fingerprint``.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
from typing import TYPE_CHECKING

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
    inner = [part for part in compiled.co_consts if isinstance(part, types.CodeType)]
    of_source = [part for part in inner if part.co_name == code.co_name]
    if [_constants_in(part) for part in of_source] != [_constants_in(code)]:
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


def names_used_in(code: types.CodeType) -> set[str]:
    """Name the globals and attributes used in a function and in functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_used_in(constant)
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


_CHANGING_METHODS = frozenset(
    {"append", "add", "clear", "discard", "extend", "insert", "move_to_end", "pop"}
    | {"popitem", "remove", "setdefault", "sort", "update"}
)
"""Methods that change a container and may stand anywhere in an expression."""


def names_changed_in(function: types.FunctionType) -> set[str]:
    """Name the variables whose values a function's own code changes.

    Such a container is a cache that fills while samples are loaded, and its value says
    nothing of the samples.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return set()
    changed: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _CHANGING_METHODS:
            changed.append(node)
        elif isinstance(node, ast.Subscript | ast.Attribute):
            changed += [] if isinstance(node.ctx, ast.Load) else [node]
    names = set()
    for target in changed:
        while isinstance(target, ast.Subscript | ast.Attribute):
            target = target.value
        if isinstance(target, ast.Name):
            names.add(target.id)
    return names


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
