"""Errors of the user's code, told with the sample's name, their type kept."""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import pickle
import traceback
import types
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from loaderkit.errors import LoaderError

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    return _build_error(Held.of(error), what, where, fix)


@dataclass(frozen=True)
class Held:
    """What an error of the user's holds, in a form that can be pickled."""

    users_type: type[Exception]
    """Its type."""
    args: tuple[Any, ...]
    """Its ``args``."""
    fields: Mapping[str, Any]
    """What lies in slots, of C (``errno``, ``filename``, ``object``) or the user's."""
    attributes: Mapping[str, Any]
    """Its ``__dict__``."""

    @classmethod
    def of(cls, error: Exception) -> Held:
        """Read it all."""
        fields = {}
        for name in _slots_of(type(error)):
            with contextlib.suppress(Exception):  # an empty slot, or a failing getter
                fields[name] = getattr(error, name)
        return cls(type(error), error.args, fields, dict(vars(error)))

    def sendable(self) -> Held:
        """Leave out what cannot be pickled: the rest shall arrive all the same."""
        args = self.args if _is_picklable(self.args) else ()
        return Held(
            self.users_type,
            args,
            _drop_unpicklable(self.fields),
            _drop_unpicklable(self.attributes),
        )


def _slots_of(users: type[Exception]) -> list[str]:
    """Name what instances of a type have besides their ``__dict__``."""
    kinds = (types.MemberDescriptorType, types.GetSetDescriptorType)
    names: list[str] = []
    for base in users.__mro__:
        if issubclass(Exception, base):
            continue  # Exception, BaseException, object: args are read apart
        for name, value in vars(base).items():
            if isinstance(value, kinds) and name not in {"__dict__", "__weakref__"}:
                names.append(name)
    return names


def _drop_unpicklable(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if _is_picklable(value)}


def _is_picklable(value: object) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:  # noqa: BLE001 -- any class may refuse in any way
        return False
    return True


def _build_error(held: Held, what: str, why: str, fix: str) -> LoaderError:
    """Make the error, with what the user's held.

    Neither ``__new__`` nor ``__init__`` of the user's class is called: they may want
    other arguments.  Types of C get theirs, since some set fields for good.
    """
    kind = loader_error_like(held.users_type)
    combined = LoaderError(what, why=why, fix=fix)
    if kind is not LoaderError:
        inner = _builtin_base(kind)
        group = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.11
        try:
            arguments = held.args if issubclass(kind, group) else ()
            combined = inner.__new__(kind, *arguments)
        except Exception:  # noqa: BLE001 -- a type of C that wants to be made otherwise
            return combined
        vars(combined).update(what=what, why=why, fix=fix)
        combined.args = held.args

    for name, value in held.fields.items():
        with contextlib.suppress(Exception):  # a field that cannot be written
            setattr(combined, name, value)
    for name, value in held.attributes.items():
        vars(combined).setdefault(name, value)
    return combined


def _builtin_base(kind: type[LoaderError]) -> type[BaseException]:
    """Find the type of C, behind LoaderError and its bases, that makes its objects."""
    return next(base for base in kind.__mro__[4:] if base.__module__ == "builtins")


def _new_error(kind: type[LoaderError], *_arguments: Any, **_options: Any) -> Any:
    return _builtin_base(kind).__new__(kind)


def _init_error(
    error: Any, what: str = "", *, why: str = "", fix: str = "", message: str = ""
) -> None:
    vars(error).update(what=what or message, why=why, fix=fix)
    error.args = (_message_of(error),)


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
        # torch makes it anew of its text alone, by name where there is a "message".
        "__new__": _new_error,
        "__init__": _init_error,
        # Some types show their own attributes; args are the user's.
        "__str__": _message_of,
        "__repr__": _representation,
        "__reduce__": _reduce_loader_error,
        "users_type": users,
        # The user's class may have properties of these names, or forbid to set any.
        "__setattr__": Exception.__setattr__,
        "what": "",
        "why": "",
        "fix": "",
    }
    # A user's type with a metaclass of its own keeps that.
    metaclass = _CombinedType if type(users) is type else type
    try:
        return metaclass("LoaderError", (LoaderError, users), body)
    except Exception:  # noqa: BLE001 -- its __init_subclass__ may raise anything
        return LoaderError


class _CombinedType(type):
    """The type of the types that are made here.

    torch and others send an error as its type and text.  These types are found under
    no name, so they are pickled by the user's: a worker that could not send one would
    leave its loop waiting.
    """


def _reduce_combined_type(kind: Any) -> tuple[Any, ...]:
    return _combined_type_of, (
        kind.users_type if _is_picklable(kind.users_type) else None,
    )


def _combined_type_of(users: type[Exception] | None) -> type[LoaderError]:
    return LoaderError if users is None else loader_error_like(users)


copyreg.pickle(_CombinedType, _reduce_combined_type)


def _message_of(error: Any) -> str:
    return str(LoaderError(error.what, why=error.why, fix=error.fix))


def _representation(error: Any) -> str:
    return f"LoaderError({_message_of(error)!r})"


def _reduce_loader_error(error: Any) -> tuple[Any, ...]:
    """Pickle by the user's type: the class that was made for it has no name."""
    held = replace(Held.of(error), users_type=error.users_type).sendable()
    return _build_error, (held, error.what, error.why, error.fix)
