"""What a name that is not at the front door is told: ``loaderkit.NAME``."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from loaderkit.errors import NoSuchAttributeError
from loaderkit.habits import DOOR

if TYPE_CHECKING:
    from collections.abc import Iterable

_PACKAGE = Path(__file__).parent


def no_such_name(name: str, public_names: Iterable[str]) -> NoSuchAttributeError:
    """Make the error for a name that the front door does not have.

    Args:
        name: What was asked for.
        public_names: What the front door has.

    Returns:
        The error, to be raised by the caller.

    >>> print(no_such_name("LeakReport", ["LeakDetector"]))
    module 'loaderkit' has no attribute 'LeakReport'.
      why: errors, results and options are in the rooms, not at the door
      fix: from loaderkit.leaks.report import LeakReport
    """
    message = f"module 'loaderkit' has no attribute {name!r}."
    why = "it is none of the names at the front door"
    fix = "help(loaderkit) lists what there is"
    # What other libraries call it comes first: ``Dataset`` is near many names of ours.
    if name in DOOR:
        why, fix = DOOR[name].why or "it has another name here", DOOR[name].fix
    elif _is_room(name):
        why = "it is a room, and what is in it is imported from its files"
        fix = f"from loaderkit.{name}.FILE import NAME; this error names the file "
        fix += "where loaderkit.NAME is asked for"
    elif (module := defining_module(name)) is not None:
        why = "errors, results and options are in the rooms, not at the door"
        fix = f"from {module} import {name}"
    elif nearest := difflib.get_close_matches(name, public_names, 1):
        fix = f"did you mean {nearest[0]!r}?"
    error = NoSuchAttributeError(message, why=why, fix=fix)
    error.name = name
    return error


def _is_room(name: str) -> bool:
    return name.isidentifier() and (_PACKAGE / name / "__init__.py").is_file()


def defining_module(name: str) -> str | None:
    """Find the module of ours that defines a class or a function.

    It is looked for in the text of the files: to import them would take seconds.

    Args:
        name: Of a public class or function.

    Returns:
        The module's name; None where there is none.

    >>> defining_module("Holder"), defining_module("Nothing")
    ('loaderkit.memory.holder', None)
    """
    if name.startswith("_"):  # what tools ask of any module, or private to ours
        return None
    definition = re.compile(rf"^(?:class|def) {re.escape(name)}\b", re.MULTILINE)
    for file in sorted(_PACKAGE.rglob("*.py")):
        if definition.search(file.read_text(encoding="utf-8")):
            parts = file.relative_to(_PACKAGE).with_suffix("").parts
            return ".".join(["loaderkit", *parts])
    return None
