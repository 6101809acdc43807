"""Errors of the user's code, told with the sample's name, their type kept."""

from __future__ import annotations

import traceback
from typing import Any

from loaderkit.errors import LoaderError


def error_about(what: str, error: Exception, fix: str) -> LoaderError:
    """Tell an error of the user's code.

    Args:
        what: What could not be done, to be followed by the error.
        error: As the user's code raised it.
        fix: What to do.

    Returns:
        A LoaderError to be raised from it, which is also of its type, and has what it
        held.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f"raised at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    what += f"{type(error).__name__}: {_text_of(error)}"
    try:
        told = loader_error_like(type(error))(what, why=where, fix=fix)
    except Exception:  # noqa: BLE001 -- the user's class takes part in making it
        told = LoaderError(what, why=where, fix=fix)
    for name, value in vars(error).items():
        vars(told).setdefault(name, value)
    return told


def _text_of(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 -- a faulty __str__ must not hide its error
        return "<str() of it failed>"


def loader_error_like(users: type[Exception]) -> type[LoaderError]:
    """Make a LoaderError that ``except`` catches as an error of the user's type, too.

    A loop that catches the errors of its own dataset does so with torch's DataLoader,
    and goes on doing so with ours.

    Args:
        users: The type of what the user's code raised.

    Returns:
        LoaderError itself where Python cannot make such a type, and for StopIteration,
        which would end the loop in silence.
    """
    unwanted: tuple[type[Exception], ...] = (StopIteration, StopAsyncIteration)
    if issubclass(users, (LoaderError, *unwanted)):
        return LoaderError
    body = {
        "__module__": LoaderError.__module__,
        "__doc__": LoaderError.__doc__,
        # Some types show their own attributes, which only their own __init__ sets.
        "__str__": Exception.__str__,
        "__repr__": Exception.__repr__,
        "__reduce__": _reduce_loader_error,
        "users_type": users,
        # The user's class may have properties of these names, or forbid to set any.
        "__setattr__": Exception.__setattr__,
        "what": "",
        "why": "",
        "fix": "",
    }
    try:
        return type("LoaderError", (LoaderError, users), body)
    except Exception:  # noqa: BLE001 -- its __init_subclass__ may raise anything
        return LoaderError


def _reduce_loader_error(error: Any) -> tuple[Any, ...]:
    """Pickle by the user's type: the class that was made for it has no name."""
    return _loader_error, (error.users_type, error.what, error.why, error.fix)


def _loader_error(users: type[Exception], what: str, why: str, fix: str) -> LoaderError:
    return loader_error_like(users)(what, why=why, fix=fix)
