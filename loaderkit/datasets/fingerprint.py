"""Fingerprints: hashes of the code of ``load``, of the keys and of a version.

A cache is stale if its fingerprint differs from that of the dataset that opens it.  So
a fingerprint must change when the samples would, and in no other case.  Comments,
docstrings, formatting, the folder of the raw files and versions of libraries are left
out.

The code is read as a sequence of *texts*, which are hashed one after the other:

    _code_texts          a function: its source, and the values and code that it names
    _bound_texts         a value that a function has with it: a closure's, a default
    _global_texts        a global variable that code names
    _attribute_texts     an attribute of ``self`` that code names
    _written_texts       a list, dict or object that may change while samples are
                         loaded: the source that assigns it, not its value

``function_source`` reads one function, ``value_texts`` one value, ``written`` finds the
source that assigns one, and ``key_texts`` writes keys.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Sized
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xxhash

from loaderkit.datasets.function_source import (
    names_changed_in,
    names_used_in,
    source_text,
    strings_in,
    values_bound_to,
)
from loaderkit.datasets.key_texts import hash_keys, typed_key_text
from loaderkit.datasets.value_texts import (
    StateWriter,
    constant_text,
    is_absolute_path,
)
from loaderkit.datasets.written import find_written
from loaderkit.errors import DamagedCacheError
from loaderkit.library_files import is_users_code, is_users_module
from loaderkit.units import count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet
    from typing import TypeGuard


_CODE_TYPES = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    functools.partial,
    property,
    functools.cached_property,
    types.MemberDescriptorType,
)
"""Types of what is code itself: its source is hashed, not the code that assigns it."""
_FOLLOWED_IN_SOURCE = (
    types.FunctionType,
    type,
    types.ModuleType,
    functools.partial,
    list,
    dict,
    set,
    tuple,
    frozenset,
    np.ndarray,
    torch.Tensor,
)
"""Types of values that are followed where the source that assigns another value names
them.  Results of calls are not: each default of a parser of arguments would count."""


@dataclass(frozen=True)
class Fingerprint:
    """What a cache was made from."""

    load: str
    """Hash of the code that makes a sample, and of the code and values that it uses."""
    keys: str
    """Hash of the keys in order."""
    count: int
    """Number of keys."""
    version: str = ""
    """The dataset class's ``version``, which its author raises by hand."""

    def to_json(self) -> dict[str, Any]:
        """Convert it to JSON for the manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Fingerprint:
        """Read it from a manifest.

        Args:
            content: What ``to_json`` wrote.

        Returns:
            The fingerprint.

        Raises:
            DamagedCacheError: ``content`` is not a fingerprint.
        """
        try:
            fingerprint = cls(**content)
        except TypeError as error:
            message = f"The manifest's fingerprint makes no sense: {error}."
            why = "the manifest was changed, or another program wrote it"
            raise DamagedCacheError(message, why=why, fix="pack it again") from None
        if [type(v) for v in asdict(fingerprint).values()] != [str, str, int, str]:
            message = f"The manifest's fingerprint makes no sense: {fingerprint}."
            why = "the manifest was changed, or another program wrote it"
            raise DamagedCacheError(message, why=why, fix="pack it again")
        return fingerprint


def fingerprint_of(
    load: Callable[..., Any], keys: Iterable[object], *, version: str = ""
) -> Fingerprint:
    """Take the fingerprint of a function that makes samples, and of its keys.

    Args:
        load: The function or bound method that makes a sample of a key.
        keys: The keys in order.
        version: The version that the author of ``load`` gave it.

    Returns:
        The same value in every process, as long as code, keys and version are the same.
    """
    return read_code(load).fingerprint(keys, version=version)


class CodeOfLoad(NamedTuple):
    """What was seen in the code of a function that makes samples."""

    xxh3: str
    """Hash of it, and of the code and values that it uses."""
    paths: list[str | PurePath]
    """Literals, and constants of modules, classes and closures, in order.  Some are
    paths of raw data, whose times and sizes a cache keeps."""

    def fingerprint(self, keys: Iterable[object], *, version: str) -> Fingerprint:
        """Take the fingerprint of the function with the keys of its samples.

        Args:
            keys: The keys in order.
            version: The version that the author gave the function.
        """
        key_texts = [typed_key_text(key) for key in keys]
        return Fingerprint(self.xxh3, hash_keys(key_texts), len(key_texts), version)


def read_code(load: Callable[..., Any]) -> CodeOfLoad:
    """Read the code of a function that makes samples, and what it uses.

    Args:
        load: The function or bound method that makes a sample of a key.
    """
    digest, visited = xxhash.xxh3_128(), _Visited()
    # Of a library's function there is nothing to follow, but what a partial binds.
    if is_users_code(load) or isinstance(load, functools.partial):
        for text in _code_texts(load, visited):
            digest.update(text.encode("utf-8", "backslashreplace"))
    return CodeOfLoad(digest.hexdigest(), visited.paths)


def fingerprint_value(value: object) -> str:
    """Hash a function with the code that it uses, or an object with its attributes.

    Args:
        value: A function, a user's or a library's, or an object that can be called.

    Returns:
        The same hash in every process, as long as code and values are the same.
    """
    digest = xxhash.xxh3_128()
    kind = value if hasattr(value, "__qualname__") else type(value)
    # A method of a type written in C has no module.
    module = getattr(kind, "__module__", "")
    digest.update(f"{module}:{kind.__qualname__}".encode())
    for text in _state_texts(value, "", _Visited()):
        digest.update(text.encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def differences(packed: Fingerprint, now: Fingerprint) -> tuple[str, ...]:
    """Describe how two fingerprints differ, one sentence part for each difference.

    >>> packed = Fingerprint("a", "k", 3)
    >>> differences(packed, Fingerprint("b", "m", 4))
    ('load() has changed', '4 keys now, 3 when packed')
    """
    changes = []
    if packed.version != now.version:
        changes.append(f"version {now.version!r} now, {packed.version!r} when packed")
    if packed.load != now.load:
        changes.append("load() has changed")
    if packed.count != now.count:
        changes.append(
            f"{count_of(now.count, 'keys')} now, {packed.count:,} when packed"
        )
    elif packed.keys != now.keys:
        changes.append("as many keys as when packed, but others or in another order")
    return tuple(changes)


class _Visited(set[object]):
    """The ids of code that was followed, so that each function is hashed once.

    Assignments are in it too, each as its scope's id and its source.  Ids, since a
    scope may be a class whose metaclass defines ``==``.  What code names is alive as
    long as the code, so that no id comes twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str | PurePath] = []
        """Strings and paths that were met on the way, in order."""


def _code_texts(item: object, visited: _Visited) -> Iterator[str]:
    """Give the source of a function, and the texts of what it uses.

    Args:
        item: A function, a method or a ``functools.partial``.
        visited: What is not followed again.

    Yields:
        Texts to be hashed.
    """
    owner = getattr(item, "__self__", None)
    function = getattr(item, "__func__", item)
    if isinstance(function, functools.partial):
        yield from _code_texts(function.func, visited)
        for position, value in enumerate(function.args):
            yield from _bound_texts(value, f"argument {position}", visited)
        for name, value in function.keywords.items():
            yield from _bound_texts(value, name, visited)
        return

    if _is_wrapper(function):
        function = function.__wrapped__

    if id(function) in visited or not isinstance(function, types.FunctionType):
        return
    visited.add(id(function))
    if not is_users_code(function):
        # A library's decorator: only the function inside it can be the user's.
        yield from _code_texts(_as_method(inspect.unwrap(function), owner), visited)
        return

    wrapped = getattr(function, "__wrapped__", None)
    if isinstance(wrapped, types.FunctionType):
        yield from _code_texts(_as_method(wrapped, owner), visited)
    yield source_text(function)
    visited.paths += strings_in(function.__code__)
    for name, value in values_bound_to(function):
        if name not in names_changed_in(function):
            yield from _bound_texts(value, name, visited)

    # The names of attributes are among these too, and not told apart from globals.
    names = names_used_in(function.__code__)
    module = sys.modules.get(function.__module__ or "")
    for name in sorted(names):
        if name in function.__globals__:
            value = function.__globals__[name]
            yield from _global_texts(value, name, names, visited, module)
        if owner is not None:
            yield from _attribute_texts(owner, name, visited)


def _is_wrapper(value: object) -> TypeGuard[functools._lru_cache_wrapper[Any]]:
    """Tell whether a value is what ``functools.lru_cache`` makes around a function."""
    return isinstance(value, functools._lru_cache_wrapper)


def _bound_texts(value: object, name: str, visited: _Visited) -> Iterator[str]:
    """Follow a value that a function has with it: code as code, others by content."""
    is_constant = constant_text(value) is not None
    is_path = isinstance(value, str | PurePath)
    if isinstance(value, _CODE_TYPES) or is_constant or is_path:
        yield from _value_texts([value], visited)
    elif id(value) not in visited:
        visited.add(id(value))
        yield from _state_texts(value, name, visited)


def _as_method(function: types.FunctionType, owner: object) -> object:
    """Bind a function to the object whose method it is, if it is one's."""
    return function if owner is None else types.MethodType(function, owner)


def _global_texts(
    value: object,
    name: str,
    names: AbstractSet[str],
    visited: _Visited,
    scope: type | types.ModuleType | None,
) -> Iterator[str]:
    """Follow the value of a global variable.

    Args:
        value: The value.
        name: The variable.
        names: All names that occur in the same code.  If the value is a module of the
            user's, its members among them are followed: ``module.function`` in code is
            the names ``module`` and ``function``.
        visited: What is not followed again.
        scope: The class or module that the variable belongs to.

    Yields:
        Texts to be hashed.
    """
    if not isinstance(value, types.ModuleType):
        yield from _value_texts([value], visited, name)
        yield from _written_texts(value, scope, name, visited)
        return
    if is_users_module(value):
        for member_name in sorted(names & vars(value).keys()):
            member = vars(value)[member_name]
            yield from _value_texts([member], visited, name)
            yield from _written_texts(member, value, member_name, visited)


def _written_texts(
    value: object,
    scope: type | types.ModuleType | None,
    name: str,
    visited: _Visited,
) -> Iterator[str]:
    """Give the source that assigns a value which may change, and follow its names.

    Many lists and dicts of modules are caches that fill while samples are loaded.  With
    their values in the fingerprint, a cache would be stale after each epoch.

    Args:
        value: The value; code and constants have texts of their own, and none here.
        scope: The class or module that the variable belongs to.
        name: The variable.
        visited: What is not followed again.

    Yields:
        Texts to be hashed.
    """
    if isinstance(value, _CODE_TYPES) or constant_text(value) is not None:
        return
    written = find_written(scope, name, is_users_module)
    if written is None or (id(written.scope), written.text) in visited:
        return
    visited.add((id(written.scope), written.text))
    yield f"{name}: {written.text}"

    module = sys.modules.get(getattr(written.scope, "__module__", ""), written.scope)
    for used_name in sorted(written.names):
        # As Python looks a name up: in the class's body, then in its module.
        if used_name in vars(written.scope):
            used_scope = written.scope
        elif used_name in vars(module):
            used_scope = module
        else:
            continue
        used_value = vars(used_scope)[used_name]
        is_constant = constant_text(used_value) is not None
        if is_constant or isinstance(used_value, _FOLLOWED_IN_SOURCE):
            yield from _global_texts(
                used_value, used_name, written.names, visited, used_scope
            )


def _attribute_texts(owner: object, name: str, visited: _Visited) -> Iterator[str]:
    """Follow ``self.name``: methods, constants of classes, and the value on ``self``.

    Members of all base classes are followed, since ``super()`` may reach any of them.

    Args:
        owner: The object, or the class of a class method.
        name: Name of the attribute.
        visited: What is not followed again.

    Yields:
        Texts to be hashed.
    """
    kind = owner if isinstance(owner, type) else type(owner)
    for base in kind.__mro__:
        member = vars(base).get(name)
        if isinstance(member, property):
            member = member.fget
        elif isinstance(member, functools.cached_property):
            member = member.func
        member = getattr(member, "__func__", member)
        if _is_wrapper(member):
            member = member.__wrapped__
        if isinstance(member, types.FunctionType):
            if is_users_code(member):
                yield from _code_texts(types.MethodType(member, owner), visited)
        elif is_users_code(base) and name in vars(base):
            if (text := constant_text(member)) is not None:
                yield f"{base.__name__}.{name}={text}"
            if isinstance(member, str | PurePath):
                visited.paths.append(member)
            yield from _written_texts(member, base, name, visited)

    if name not in getattr(kind, "_PACKED_WITHOUT", ()):
        value = getattr(owner, "__dict__", {}).get(name)
        yield from _state_texts(value, name, visited)


def _state_texts(value: object, name: str, visited: _Visited) -> Iterator[str]:
    """Follow an attribute's value and the classes of the objects that it holds.

    Args:
        value: The value.
        name: Name of the attribute.
        visited: What is not followed again.

    Yields:
        Texts to be hashed; none for what cannot be pickled, such as open files, and for
        attributes that say nothing of the samples: None, which ``load`` may replace by
        something it opens, and absolute paths, since the raw data may move.
    """
    is_function = isinstance(
        value, functools.partial | types.FunctionType | types.MethodType
    )
    if is_function or _is_wrapper(value):
        yield from _code_texts(value, visited)
        return
    if value is None or (
        isinstance(value, str | PurePath) and is_absolute_path(str(value))
    ):
        return

    writer = StateWriter()
    try:
        text = writer.write(value)
    except OverflowError:
        size = len(value) if isinstance(value, Sized) else 0
        text = f"{type(value).__qualname__} of {size}"
    if text is not None:
        yield f"self.{name}={text}"
        for kind in writer.classes:
            yield from _value_texts(kind.__mro__, visited)


def _value_texts(
    values: Iterable[object], visited: _Visited, name: str = ""
) -> Iterator[str]:
    """Give the texts of constants, and follow functions and classes of the user's.

    Args:
        values: Values that code names.
        visited: What is not followed again.
        name: The variable that they are the values of, if there is one.

    Yields:
        Texts to be hashed; none for other values.
    """
    for value in values:
        if isinstance(value, str | PurePath):
            visited.paths.append(value)
        if (text := constant_text(value)) is not None:
            yield f"{name}={text}"
        elif isinstance(value, tuple):
            yield from _value_texts(value, visited, name)
        elif isinstance(value, frozenset):
            yield from _value_texts(sorted(value, key=repr), visited, name)
        elif isinstance(value, functools.partial):
            yield from _code_texts(value, visited)
        elif isinstance(value, type) and is_users_code(value):
            yield from _class_texts(value, visited)
        elif is_users_code(value):
            yield from _code_texts(value, visited)


def _class_texts(cls: type, visited: _Visited) -> Iterator[str]:
    """Follow the methods, the constants and the assignments of a class."""
    if id(cls) in visited:
        return
    visited.add(id(cls))
    for name, member in sorted(vars(cls).items()):
        if isinstance(member, types.FunctionType):
            yield from _code_texts(member, visited)
        elif not name.startswith("__"):
            if (text := constant_text(member)) is not None:
                yield f"{name}={text}"
            yield from _written_texts(member, cls, name, visited)
