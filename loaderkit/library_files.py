"""Whose code is it: a library's, loaderkit's own, or the user's?  Which version?

And what does it name?
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import traceback
import types
from importlib import metadata
from pathlib import Path

_INSTALLED_IN = frozenset({"site-packages", "dist-packages"})
"""Folders of libraries in every environment.  An environment that sees another's
packages (``--system-site-packages``) has some of its libraries in the other's folder,
which its own paths do not name."""
_LIBRARY_FOLDERS = tuple(
    Path(sysconfig.get_paths()[name])
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OWN_FOLDER = Path(__file__).parent
_MOST_REMEMBERED = 4096
"""Files; a process that has imported torch and PyG has some 3,000 modules."""


def installed_version(package: str) -> str | None:
    """Read the version of a library without importing it.

    Args:
        package: As pip names it.

    Returns:
        Its version; None where it is not installed.

    >>> installed_version("no-such-package") is None
    True
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.lru_cache(maxsize=_MOST_REMEMBERED)
def is_library_file(file: str) -> bool:
    """Tell whether code is Python's own or an installed library's.

    Args:
        file: As a module's ``__file__`` or a frame's ``co_filename`` names it.

    Returns:
        False for the user's own, which text typed at a prompt is too.

    >>> import json
    >>> is_library_file(json.__file__), is_library_file("<frozen importlib>")
    (True, True)
    >>> is_library_file("/home/me/env/lib/python3.12/site-packages/torch/nn.py")
    True
    >>> is_library_file("/home/me/train.py"), is_library_file("<stdin>")
    (False, False)
    """
    if file.startswith("<frozen"):
        return True
    path = Path(file)
    if not _INSTALLED_IN.isdisjoint(path.parts):
        return True
    return any(map(path.is_relative_to, _LIBRARY_FOLDERS))


def where_raised(error: BaseException) -> str:
    """Say where an error was raised, and which line of the user's led there.

    Args:
        error: Raised by code of the user's, or by a library that it calls.

    Returns:
        Words without an end; empty where there is no traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    raising = frames[-1]
    where = f"raised at {raising.filename}:{raising.lineno}"
    # From the error outwards: the user's line that is nearest to it can be changed.
    for frame in reversed(frames):
        if not is_library_file(frame.filename) and not is_own_file(frame.filename):
            if frame is not raising:
                where += f", called at {frame.filename}:{frame.lineno}"
            break
    return where


@functools.lru_cache(maxsize=_MOST_REMEMBERED)
def is_own_file(file: str) -> bool:
    """Tell whether code is loaderkit's.

    Args:
        file: As a frame's ``co_filename`` names it.

    Returns:
        Whether it lies in the package.
    """
    return Path(file).is_relative_to(_OWN_FOLDER)


def is_users_code(value: object) -> bool:
    """Tell whether a function or a class is the user's, and not a library's."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or not callable(value):
        # A function without a module was made by ``exec`` or typed at a prompt.
        return callable(value) and isinstance(value, types.FunctionType)
    return is_users_module(module)


def is_users_module(module: types.ModuleType) -> bool:
    """Tell whether a module is neither a library's, nor Python's, nor ours."""
    if module.__name__.partition(".")[0] in {"loaderkit", *sys.builtin_module_names}:
        return False
    file = getattr(module, "__file__", None)
    # Typed at a prompt, in a notebook, or made by ``exec``.
    if file is None:
        return True
    return not is_library_file(file)


def names_used_in(code: types.CodeType) -> set[str]:
    """Name the globals and attributes used in a function and in functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_used_in(constant)
    return names
