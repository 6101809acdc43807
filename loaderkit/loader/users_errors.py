"""Errors of the user's code as LoaderErrors that keep the type of the original.

The message names the sample.  ``except`` with the user's type catches such an error, as
it does with torch's DataLoader without workers.
"""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import pickle
import types
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from loaderkit.error_texts import error_in_words, is_out_of_memory, text_of_error
from loaderkit.errors import LoaderError
from loaderkit.fixes import Fix
from loaderkit.forking import tells_of_forked_device
from loaderkit.library_files import where_raised

if TYPE_CHECKING:
    from collections.abc import Mapping

_ARGS = vars(BaseException)["args"]
"""Reads and writes what Python takes as an error's ``args``: the user's class may have
others of that name, which fail or cannot be set."""


def error_about(
    message: str, error: Exception, fix: str, *, why: str | None = None
) -> LoaderError:
    """Make a LoaderError of an error of the user's code.

    Args:
        message: What could not be done; the text of the error is appended.
        error: The error that the user's code raised.
        fix: What the user can do.
        why: The reason, where it is known; None says where the error was raised.

    Returns:
        A LoaderError to be raised from ``error``.  It is also of the type of ``error``
        and has its attributes.
    """
    is_users_code = why is None
    if why is None:
        why = where_raised(error)
    if tells_of_forked_device(text_of_error(error)):
        why = f"the device was used before the workers were forked; {why}"
        fix = "num_workers=0, or keep samples on the host"
    elif is_out_of_memory(error):
        # Whatever the caller found that samples are not alike in is not the reason.
        why = f"no memory was left for it; {where_raised(error)}"
        less = "a smaller batch_size, fewer workers or smaller samples "
        less += "(loaderkit.diagnose_oom(error) says more)"
        # But code that asks for too much may be at fault.
        fix = f"{less}; or {fix}" if is_users_code else less
    message += error_in_words(error)
    return _build_error(ErrorContent.of(error), message, why, fix)


def to_correct(code: str) -> str:
    """Say that the user's code is to be corrected, and from a worker how to look at it.

    Args:
        code: What is to be corrected, and what else helps.
    """
    text = f"correct {code}"
    in_worker = get_worker_info() is not None
    return f"{text}; num_workers=0 to step through" if in_worker else text


@dataclass(frozen=True)
class ErrorContent:
    """What an error of the user's code holds."""

    users_type: type[Exception]
    """Its type."""
    args: tuple[Any, ...]
    """Its ``args``."""
    fields: Mapping[str, Any]
    """Values of its slots, of C types (``errno``, ``filename``) or the user's class."""
    attributes: Mapping[str, Any]
    """Its ``__dict__``."""

    @classmethod
    def of(cls, error: Exception) -> ErrorContent:
        """Read what an error holds."""
        fields = {}
        for name in _slots_of(type(error)):
            with contextlib.suppress(
                Exception
            ):  # an unset slot, or a getter that raises
                fields[name] = getattr(error, name)
        args = _ARGS.__get__(error)
        return cls(type(error), args, fields, dict(vars(error)))

    def sendable(self) -> ErrorContent:
        """Leave out what cannot be pickled, so that the rest arrives."""
        args = self.args if _is_picklable(self.args) else ()
        return ErrorContent(
            self.users_type,
            args,
            _drop_unpicklable(self.fields),
            _drop_unpicklable(self.attributes),
        )


def _slots_of(users: type[Exception]) -> list[str]:
    """Return the names of the slots that instances of a type have."""
    kinds = (types.MemberDescriptorType, types.GetSetDescriptorType)
    names: list[str] = []
    for base in users.__mro__:
        if issubclass(Exception, base):
            continue  # Exception and its bases have only args, which are read apart
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


def _build_error(
    content: ErrorContent, message: str, why: str, fix: str
) -> LoaderError:
    """Make the LoaderError, with the content of the user's error.

    Neither ``__new__`` nor ``__init__`` of the user's class is called, since their
    arguments are not known.  The ``__new__`` of a group of exceptions does get its
    arguments, because it sets fields that cannot be set later.
    """
    kind = loader_error_like(content.users_type)
    combined = LoaderError(message, why=why, fix=fix)
    if kind is not LoaderError:
        inner = _builtin_base(kind)
        group = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.11
        try:
            arguments = content.args if issubclass(kind, group) else ()
            combined = inner.__new__(kind, *arguments)
        except Exception:  # noqa: BLE001 -- a C type with other arguments
            return combined
        advice = Fix.of(fix)
        vars(combined).update(what=message, why=why, fix=fix, advice=advice)
        _ARGS.__set__(combined, content.args)

    for name, value in content.fields.items():
        with contextlib.suppress(Exception):  # a field that cannot be written
            setattr(combined, name, value)
    for name, value in content.attributes.items():
        vars(combined).setdefault(name, value)
    return combined


def _builtin_base(kind: type[LoaderError]) -> type[BaseException]:
    """Return the built-in type whose ``__new__`` makes objects of a type.

    It is the one that decides what is in an object: OSError of an OSError.  Python
    refuses the ``__new__`` of another base, such as that of MemoryError.
    """
    base: Any = kind.__base__
    while base.__module__ != "builtins":
        base = base.__base__
    return base  # type: ignore[no-any-return]


def _new_error(kind: type[LoaderError], *_arguments: Any, **_options: Any) -> Any:
    return _builtin_base(kind).__new__(kind)


def _init_error(
    error: Any, what: str = "", *, why: str = "", fix: str = "", message: str = ""
) -> None:
    vars(error).update(what=what or message, why=why, fix=fix, advice=Fix.of(fix))
    _ARGS.__set__(error, (_message_of(error),))


def loader_error_like(users: type[Exception]) -> type[LoaderError]:
    """Make a subclass of LoaderError and of a type of the user's.

    A loop that catches the errors of its own dataset with torch's DataLoader then
    catches them with this one, too.

    Args:
        users: The type of the error that the user's code raised.

    Returns:
        The subclass; LoaderError itself if Python cannot make one, and for
        StopIteration, which would end the loop silently.
    """
    unwanted: tuple[type[Exception], ...] = (StopIteration, StopAsyncIteration)
    if issubclass(users, (LoaderError, *unwanted)):
        return LoaderError
    body = {
        "__module__": LoaderError.__module__,
        "__doc__": LoaderError.__doc__,
        # torch builds the error again from its text alone, in ExceptionWrapper.  It
        # passes the text as ``message=`` if the type has such an attribute.
        "__new__": _new_error,
        "__init__": _init_error,
        # Some user types print their attributes, and ``args`` are the user's.
        "__str__": _message_of,
        "__repr__": _representation,
        "__reduce__": _reduce_loader_error,
        "users_type": users,
        # The user's class may have properties of these names, or may refuse to get or
        # set attributes.
        "__getattribute__": Exception.__getattribute__,
        "__setattr__": Exception.__setattr__,
        "what": "",
        "why": "",
        "fix": "",
    }
    # If the user's type has a metaclass of its own, the subclass must have it too.
    metaclass = _CombinedType if type(users) is type else type
    try:
        return metaclass("LoaderError", (LoaderError, users), body)
    except Exception:  # noqa: BLE001 -- its __init_subclass__ may raise anything
        return LoaderError


class _CombinedType(type):
    """The metaclass of the types that ``loader_error_like`` makes.

    torch and others send an error as its type and its text.  pickle cannot find these
    types by name, so they are pickled as the user's type, from which they are made
    again.  A worker that could not send an error would leave its loop waiting.
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


def _representation(error: object) -> str:
    return f"LoaderError({_message_of(error)!r})"


def _reduce_loader_error(error: Any) -> tuple[Any, ...]:
    """Pickle the user's type: pickle cannot find the type made from it by name."""
    content = replace(ErrorContent.of(error), users_type=error.users_type).sendable()
    return _build_error, (content, error.what, error.why, error.fix)
