"""Fingerprints: hashes of the code of ``load``, of the keys and of a version.

A cache is stale if its fingerprint differs from that of the dataset that opens it.  So
a fingerprint must change when the samples would, and in no other case.  Comments,
docstrings, formatting, the folder of the raw files and versions of libraries are left
out.

The code is read as a sequence of *texts*, which are hashed one after the other:

    _code_texts          a function: its source, and the values and code that it names
    _bound_texts         a value that a function has with it: a closure's, a default
    _module_texts        what code names of a module
    _attribute_texts     an attribute of ``self`` that code names
    _variable_texts      a list, dict or object of a module or class

A list, dict or object is hashed by its value, behind all code (``_Held``).  Two kinds
of them change while samples are loaded, and must not make a cache stale:

    The code itself fills it, as a cache (``changes_in``).  Then the source that assigns
    it counts, not its value (``_written_texts``).  Where no error follows, as of
    ``map``, which packs once more, its value counts all the same.
    It remembers something when it is used, as tokenizers do.  Then the value that
    packing left counts as the one that packing found (``note_values_left``).

``function_source`` reads one function, ``value_texts`` one value, ``written`` finds the
source that assigns one, and ``key_texts`` writes keys.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
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
    changes_in,
    globals_read_in,
    paths_behind,
    source_text,
    strings_in,
    uses_in,
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
from loaderkit.library_files import is_users_code, is_users_module, names_used_in
from loaderkit.units import count_of
from loaderkit.value_words import with_small_article

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet
    from typing import TypeGuard

    from loaderkit.datasets.function_source import AttributePaths


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


class CodeRead(NamedTuple):
    """What was seen in the code of a function that makes samples."""

    xxh3: str
    """Hash of it, and of the code and values that it uses."""
    paths: list[str | PurePath]
    """Literals, and constants of modules, classes and closures, in order.  Some are
    paths of raw data, whose times and sizes a cache keeps."""
    values: dict[str, str]
    """Hashes of the values that it reads, by where each is."""
    unread: tuple[str, ...]
    """Values that it reads and that cannot be hashed, in words."""

    def fingerprint(self, keys: Iterable[object], *, version: str) -> Fingerprint:
        """Take the fingerprint of the function with the keys of its samples.

        Args:
            keys: The keys in order.
            version: The version that the author gave the function.
        """
        key_texts = [typed_key_text(key) for key in keys]
        return Fingerprint(self.xxh3, hash_keys(key_texts), len(key_texts), version)


_LEFT_BY_LOADING: dict[tuple[str, str], str] = {}
"""Of values that packing changed in this process: the hash that it found, by where the
value is and the hash that it left.  A few texts a variable and cache packed."""


def note_values_left(before: CodeRead, after: CodeRead) -> None:
    """Let values that packing has changed count as what they were before.

    A tokenizer that remembers its last padding would make the next cache of the same
    script stale otherwise: in the next run nothing is packed before that is opened.

    Args:
        before: The code and its values before samples were read.
        after: The same code right behind.
    """
    for location, xxh3_before in before.values.items():
        xxh3_after = after.values.get(location, xxh3_before)
        if xxh3_after != xxh3_before:
            _LEFT_BY_LOADING[location, xxh3_after] = xxh3_before


def read_code(load: Callable[..., Any]) -> CodeRead:
    """Read the code of a function that makes samples, and what it uses.

    Args:
        load: The function or bound method that makes a sample of a key.
    """
    visited = _Visited(counts_filled=False, loads_for=getattr(load, "__self__", None))
    # Of a library's function there is nothing to follow, but what a partial binds.
    is_followed = is_users_code(load) or isinstance(load, functools.partial)
    return _read(_code_texts(load, visited) if is_followed else (), visited)


def read_value(value: object) -> CodeRead:
    """Read a function with the code that it uses, or an object with its attributes.

    Args:
        value: A function, a user's or a library's, or an object that can be called.
    """
    visited = _Visited(counts_filled=True)
    kind = value if hasattr(value, "__qualname__") else type(value)
    # A method of a type written in C has no module.
    module = getattr(kind, "__module__", "")
    name = f"{module}:{kind.__qualname__}"
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return _read(itertools.chain([name], _code_texts(value, visited)), visited)
    if _is_wrapper(value):
        return _read(itertools.chain([name], _code_texts(value, visited)), visited)
    visited.held.append(_Held(name, value))
    return _read([name], visited)


def fingerprint_value(value: object) -> str:
    """Hash what ``read_value`` reads.

    Args:
        value: A function, a user's or a library's, or an object that can be called.

    Returns:
        The same hash in every process, as long as code and values are the same.
    """
    return read_value(value).xxh3


def _read(texts: Iterable[str], visited: _Visited) -> CodeRead:
    """Hash the texts of code, and then the values that were met in it."""
    digest = xxhash.xxh3_128()
    for text in texts:
        digest.update(text.encode("utf-8", "backslashreplace"))
    values: dict[str, str] = {}
    # A value's class may hold others: the list grows.
    for held in visited.held:
        value_digest = xxhash.xxh3_128()
        for text in _held_texts(held, visited):
            value_digest.update(text.encode("utf-8", "backslashreplace"))
        xxh3 = value_digest.hexdigest()
        values[held.location] = _LEFT_BY_LOADING.get((held.location, xxh3), xxh3)
        digest.update(f"{held.location}={values[held.location]}".encode())
    unread = tuple(visited.unread)
    return CodeRead(digest.hexdigest(), visited.paths, values, unread)


def differences(packed: Fingerprint, now: Fingerprint) -> tuple[str, ...]:
    """Describe how two fingerprints differ, one sentence part for each difference.

    >>> packed = Fingerprint("a", "k", 3)
    >>> differences(packed, Fingerprint("b", "m", 4))
    ('load() has changed, or a value that it reads', '4 keys now, 3 when packed')
    """
    changes = []
    if packed.version != now.version:
        changes.append(f"version {now.version!r} now, {packed.version!r} when packed")
    if packed.load != now.load:
        changes.append("load() has changed, or a value that it reads")
    if packed.count != now.count:
        changes.append(
            f"{count_of(now.count, 'keys')} now, {packed.count:,} when packed"
        )
    elif packed.keys != now.keys:
        changes.append("as many keys as when packed, but others or in another order")
    return tuple(changes)


class _Held(NamedTuple):
    """A value that code reads, to be hashed when all code is read."""

    location: str
    """Where it is: the same in every process."""
    value: object
    scope: type | types.ModuleType | None = None
    """The class or module that has it as a variable; None for others."""
    name: str = ""
    """The variable's name."""
    owner: object = None
    """The object whose attribute ``name`` it is; None for others."""


class _Visited(set[object]):
    """The ids of code that was followed, so that each function is hashed once.

    Assignments are in it too, each as its scope's id and its source.  Ids, since a
    scope may be a class whose metaclass defines ``==``.  What code names is alive as
    long as the code, so that no id comes twice.

    Args:
        counts_filled: Values that the code itself changes count too.
        loads_for: The object whose method makes the samples.  Its attributes count as
            they are when its cache is opened, also those that the method changes.
    """

    def __init__(self, *, counts_filled: bool, loads_for: object = None) -> None:
        super().__init__()
        self.counts_filled = counts_filled
        self.loads_for = loads_for
        self.paths: list[str | PurePath] = []
        """Strings and paths that were met on the way, in order."""
        self.held: list[_Held] = []
        """Values that were met on the way, in order."""
        self.changed: set[tuple[int, str | None]] = set()
        """What the code changes: ids of values, each with the attribute or None."""
        self.unread: dict[str, None] = {}
        """Places of values that cannot be read, with their types, in order."""

    def note_change(self, value: object, attribute: str | None) -> None:
        """Note that code changes a value, or what an attribute of it is or holds."""
        self.changed.add((id(value), attribute))
        if attribute is not None:
            attribute_value = inspect.getattr_static(value, attribute, None)
            # Not of a number: many variables may be the same one.
            if constant_text(attribute_value) is None:
                self.changed.add((id(attribute_value), None))

    def is_changed(self, held: _Held) -> bool:
        """Tell whether the code that was read changes a value."""
        if self.counts_filled:
            return False
        if (id(held.value), None) in self.changed:
            return True
        return held.owner is not None and (id(held.owner), held.name) in self.changed


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
        location = _location_of(function.func)
        for position, value in enumerate(function.args):
            yield from _bound_texts(value, f"{location} argument {position}", visited)
        for name, value in function.keywords.items():
            yield from _bound_texts(value, f"{location} {name}", visited)
        return

    if _is_wrapper(function):
        function = function.__wrapped__

    if not isinstance(function, types.FunctionType):
        return
    # A method is followed for each object that it is called of.
    is_of_object = owner is not None and not isinstance(owner, type)
    mark = (id(function), id(owner)) if is_of_object else id(function)
    if mark in visited:
        return
    is_new = id(function) not in visited
    visited.update((mark, id(function)))
    if not is_users_code(function):
        # A library's decorator: only the function inside it can be the user's.
        yield from _code_texts(_as_method(inspect.unwrap(function), owner), visited)
        return

    if is_new:
        yield from _function_texts(function, owner, visited)
    if owner is not None:
        yield from _owner_texts(function, owner, visited)


def _location_of(function: object) -> str:
    """Name a function by what is the same in every process."""
    module = getattr(function, "__module__", "")
    return f"{module}:{getattr(function, '__qualname__', type(function).__name__)}"


def _function_texts(
    function: types.FunctionType, owner: object, visited: _Visited
) -> Iterator[str]:
    """Give the source of a function, and follow its closure, defaults and globals."""
    wrapped = getattr(function, "__wrapped__", None)
    if isinstance(wrapped, types.FunctionType):
        yield from _code_texts(_as_method(wrapped, owner), visited)
    registry = vars(function).get("registry")
    if isinstance(registry, types.MappingProxyType):
        # The functions that functools.singledispatch has for types of an argument.
        yield from _value_texts(registry.values(), visited)
    yield source_text(function)
    code, scope = function.__code__, function.__globals__
    visited.paths += strings_in(code)
    changes = changes_in(function)
    changed_names = {change.variable for change in changes}
    location = _location_of(function)
    uses = uses_in(function)
    for name, value in values_bound_to(function):
        if visited.counts_filled or name not in changed_names:
            read = uses.attributes.get(name)
            yield from _bound_texts(value, f"{location} {name}", visited, read)

    for change in changes:
        if change.variable in scope:
            visited.note_change(scope[change.variable], change.attribute)

    # Of globals and attributes, which bytecode has in one list.
    names = names_used_in(code)
    module = sys.modules.get(function.__module__ or "")
    for name in sorted(names & vars(function).keys() - {"__wrapped__"}):
        yield from _bound_texts(vars(function)[name], f"{location}.{name}", visited)
    # Not an attribute that has the name of a global: ``ones(3).mean()`` reads no
    # variable of the script's that is called ``mean``.
    for name in sorted(globals_read_in(code) & scope.keys()):
        value, read = scope[name], uses.attributes.get(name)
        if _is_environment(value, names):
            visited.unread["the environment variables that it reads"] = None
        if isinstance(value, types.ModuleType):
            yield from _module_texts(value, name, names, visited, read)
            continue
        yield from _value_texts([value], visited, name)
        where = f"{function.__module__}.{name}"
        yield from _variable_texts(value, module, name, where, visited, read)


def _is_environment(value: object, names: AbstractSet[str]) -> bool:
    """Tell whether code with these names reads variables of the environment by a value.

    Which ones is known when it runs.
    """
    by_module = value is os and not names.isdisjoint({"environ", "getenv"})
    return by_module or value is os.environ or value is os.getenv


def _owner_texts(
    method: types.FunctionType, owner: object, visited: _Visited
) -> Iterator[str]:
    """Follow what a method reads of the object that it is called of."""
    own_name = next(iter(method.__code__.co_varnames), "")
    for change in changes_in(method):
        if change.variable == own_name:
            visited.note_change(owner, change.attribute)
    names = names_used_in(method.__code__)
    uses = uses_in(method)
    is_whole = own_name in uses.whole
    read = None if is_whole else uses.attributes.get(own_name, frozenset())
    if isinstance(owner, type):
        is_whole = False
    elif owner is not visited.loads_for:
        is_whole = is_whole or "super" in names
        # A class of a library may keep what it holds anywhere.
        is_all_known = is_whole and _is_users_alone(type(owner))
        if not is_all_known and (is_whole or _attributes_alone(owner, read) is None):
            held = _Held(_location_of(type(owner)), owner)
            yield from _held_or_attribute_texts(held, visited, None)
            return
    if is_whole:
        names |= _stored_names(owner)
    for name in sorted(names):
        yield from _attribute_texts(owner, name, visited, paths_behind(read, name))


def _is_users_alone(kind: type) -> bool:
    """Tell whether all classes that a class is made of are the user's."""
    return all(base is object or is_users_code(base) for base in kind.__mro__)


def _is_wrapper(value: object) -> TypeGuard[functools._lru_cache_wrapper[Any]]:
    """Tell whether a value is what ``functools.lru_cache`` makes around a function."""
    return isinstance(value, functools._lru_cache_wrapper)


def _bound_texts(
    value: object,
    location: str,
    visited: _Visited,
    read: AttributePaths | None = None,
) -> Iterator[str]:
    """Follow a value that a function has with it: code as code, others by content.

    Args:
        value: The value.
        location: Where it is.
        visited: What is not followed again.
        read: What code reads of it; None for all that it holds.

    Yields:
        Texts to be hashed.
    """
    is_constant = constant_text(value) is not None
    is_path = isinstance(value, str | PurePath)
    if isinstance(value, _CODE_TYPES) or is_constant or is_path:
        yield from _value_texts([value], visited)
    else:
        yield from _held_or_attribute_texts(_Held(location, value), visited, read)


def _as_method(function: types.FunctionType, owner: object) -> object:
    """Bind a function to the object whose method it is, if it is one's."""
    return function if owner is None else types.MethodType(function, owner)


def _module_texts(
    module: types.ModuleType,
    name: str,
    names: AbstractSet[str],
    visited: _Visited,
    read: AttributePaths | None = None,
) -> Iterator[str]:
    """Follow the members of a module of the user's that code names.

    Args:
        module: The module.
        name: The variable that holds it.
        names: All names that occur in the same code: ``module.function`` in code is the
            names ``module`` and ``function``.
        visited: What is not followed again.
        read: What the code reads of the module; all of ``names`` if None.

    Yields:
        Texts to be hashed; none for a library's module.
    """
    read_names = names if read is None else {path[0] for path in read}
    members = frozenset(vars(module).keys() & read_names)
    mark = (id(module), members, read)
    # A package has modules that have the package.
    if not is_users_module(module) or mark in visited:
        return
    visited.add(mark)
    for member_name in sorted(members):
        member, behind = vars(module)[member_name], paths_behind(read, member_name)
        if isinstance(member, types.ModuleType):
            yield from _module_texts(member, member_name, names, visited, behind)
            continue
        yield from _value_texts([member], visited, name)
        where = f"{module.__name__}.{member_name}"
        yield from _variable_texts(member, module, member_name, where, visited, behind)


def _variable_texts(
    value: object,
    scope: type | types.ModuleType | None,
    name: str,
    location: str,
    visited: _Visited,
    read: AttributePaths | None = None,
) -> Iterator[str]:
    """Follow a list, dict or object that is a variable of a module or class.

    Args:
        value: The value; code and constants have texts of their own, and none here.
        scope: The class or module that the variable belongs to.
        name: The variable.
        location: Where it is.
        visited: What is not followed again.
        read: What code reads of it; None for all that it holds.

    Yields:
        Texts of the code that it reaches; the value itself is held for later.
    """
    is_code = isinstance(value, _CODE_TYPES)
    if is_code or constant_text(value) is not None:
        return
    held = _Held(location, value, scope, name)
    yield from _held_or_attribute_texts(held, visited, read)


def _held_or_attribute_texts(
    held: _Held, visited: _Visited, read: AttributePaths | None
) -> Iterator[str]:
    """Follow the attributes that code reads of a value, or hold all of it for later.

    Args:
        held: The value, and where it is.
        visited: What is not followed again.
        read: What code reads of it; None for all that it holds.

    Yields:
        Texts to be hashed; none where it is held.
    """
    attributes = _attributes_alone(held.value, read)
    if attributes is not None:
        for name in attributes:
            behind = paths_behind(read, name)
            yield from _attribute_texts(
                held.value, name, visited, behind, held.location
            )
        return
    mark = (id(held.value), held.location)
    if mark not in visited:
        visited.add(mark)
        visited.held.append(held)


def _attributes_alone(value: object, read: AttributePaths | None) -> list[str] | None:
    """Name the attributes of an object that are known to be all that code reads of it.

    Args:
        value: The object.
        read: What code names of it; None for all that it holds.

    Returns:
        None where code may read more: a method of a library, such as ``dict.get``, may
        read anything.
    """
    is_code = isinstance(value, _CODE_TYPES)
    if read is None or is_code or constant_text(value) is not None:
        return None
    names = sorted({path[0] for path in read})
    own = _stored_names(value)
    for name in names:
        if name in own:
            continue
        owner = next((base for base in type(value).__mro__ if name in vars(base)), None)
        if owner is None or not is_users_code(owner):
            return None
    return names


def _stored_names(value: object) -> AbstractSet[str]:
    """Name the attributes that an object holds, in its ``__dict__`` or in slots."""
    names = set(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and hasattr(value, name):
                names.add(name)
    return names


def _stored_value(value: object, name: str) -> object:
    """Give what an object holds as an attribute; None where it holds none."""
    own = getattr(value, "__dict__", {})
    if name in own:
        return own[name]
    member = inspect.getattr_static(type(value), name, None)
    is_slot = isinstance(member, types.MemberDescriptorType)
    return getattr(value, name, None) if is_slot else None


def _held_texts(held: _Held, visited: _Visited) -> Iterator[str]:
    """Give the texts of a value: of what it holds, or of what was written.

    Yields:
        Texts to be hashed.
    """
    value = held.value
    if isinstance(value, np.memmap) and value.filename is not None:
        visited.paths.append(PurePath(value.filename))
    texts: list[str] = []
    if not visited.is_changed(held):
        filled = frozenset[str]()
        if not visited.counts_filled:
            filled = _attributes_filled_by_use(type(value))
        if filled:
            for name, attribute in sorted(vars(value).items()):
                if name not in filled:
                    texts += _state_texts(attribute, name, visited, held.location)
            texts += _value_texts([type(value)], visited)
        else:
            texts += _state_texts(value, held.name, visited, held.location)
    if not texts:
        yield from _written_texts(value, held.scope, held.name, visited)
    yield from texts


_MADE_BY = frozenset(
    {"__init__", "__new__", "__post_init__", "__setstate__", "__set_name__"}
    | {"__init_subclass__", "__setattr__", "__setitem__", "__delattr__", "__delitem__"}
)
"""Methods that make or change an object; others of their form are called to use it."""


def _attributes_filled_by_use(kind: type) -> frozenset[str]:
    """Name what calls and operators of a user's class change of its objects.

    Such as the dict of a class whose ``__call__`` remembers what it computed.
    """
    names = set()
    for base in kind.__mro__:
        for method in vars(base).values() if is_users_code(base) else ():
            if not isinstance(method, types.FunctionType):
                continue
            name = method.__name__
            if not name.startswith("__") or name in _MADE_BY:
                continue
            own_name = next(iter(method.__code__.co_varnames), "")
            for change in changes_in(method):
                if change.variable == own_name and change.attribute is not None:
                    names.add(change.attribute)
    return frozenset(names)


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
        if isinstance(used_value, types.ModuleType):
            yield from _module_texts(used_value, used_name, written.names, visited)
        elif is_constant or isinstance(used_value, _FOLLOWED_IN_SOURCE):
            yield from _value_texts([used_value], visited, used_name)
            yield from _written_texts(used_value, used_scope, used_name, visited)


def _attribute_texts(
    owner: object,
    name: str,
    visited: _Visited,
    read: AttributePaths | None = None,
    location: str = "",
) -> Iterator[str]:
    """Follow ``self.name``: methods, constants of classes, and the value on ``self``.

    Members of all base classes are followed, since ``super()`` may reach any of them.

    Args:
        owner: The object, or the class of a class method.
        name: Name of the attribute.
        visited: What is not followed again.
        read: What code reads of the attribute; None for all that it holds.
        location: Where the object is.

    Yields:
        Texts to be hashed.
    """
    kind = owner if isinstance(owner, type) else type(owner)
    for base in kind.__mro__:
        if name in vars(base):
            yield from _member_texts(owner, base, name, visited, read)

    is_left_out = name in getattr(kind, "_PACKED_WITHOUT", ())
    if is_left_out or isinstance(owner, type):
        return
    value = _stored_value(owner, name)
    location = f"{location or _location_of(kind)}.{name}"
    held = _Held(location, value, name=name, owner=owner)
    if _attributes_alone(value, read) is not None:
        yield from _held_or_attribute_texts(held, visited, read)
    elif owner is visited.loads_for:
        yield from _state_texts(value, name, visited, f"self.{name}")
    elif value is not None and (id(owner), name) not in visited:
        visited.add((id(owner), name))
        visited.held.append(held)


def _member_texts(
    owner: object,
    base: type,
    name: str,
    visited: _Visited,
    read: AttributePaths | None,
) -> Iterator[str]:
    """Follow what one of the classes of an object has under a name.

    Args:
        owner: The object, or the class of a class method.
        base: The class.
        name: Name of the method, property or variable.
        visited: What is not followed again.
        read: What code reads of the value; None for all that it holds.

    Yields:
        Texts to be hashed; none for what a library's class has.
    """
    member = vars(base)[name]
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, functools.cached_property):
        member = member.func
    member = getattr(member, "__func__", member)  # of a class or static method
    if _is_wrapper(member):
        member = member.__wrapped__
    if isinstance(member, types.FunctionType):
        # A library's class may have a function of the user's.
        if is_users_code(member):
            yield from _code_texts(types.MethodType(member, owner), visited)
        return
    if not is_users_code(base):
        return

    if (text := constant_text(member)) is not None:
        yield f"{base.__name__}.{name}={text}"
    if isinstance(member, str | PurePath):
        visited.paths.append(member)
    where = f"{base.__module__}.{base.__qualname__}.{name}"
    yield from _variable_texts(member, base, name, where, visited, read)


def _state_texts(
    value: object, name: str, visited: _Visited, location: str
) -> Iterator[str]:
    """Follow an attribute's value and the classes of the objects that it holds.

    Args:
        value: The value.
        name: Name of the attribute.
        visited: What is not followed again.
        location: Where it is.

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
    except (OverflowError, RecursionError):
        size = len(value) if isinstance(value, Sized) else 0
        type_name = type(value).__qualname__
        text = f"{type_name} of {size}"
        reason = f"{with_small_article(type_name)} that holds too much"
        visited.unread[f"{location} ({reason})"] = None
    for type_name in writer.unread:
        visited.unread[f"{location} ({with_small_article(type_name)})"] = None
    if text is not None:
        yield f"self.{name}={text}"
        for kind in writer.classes:
            yield from _value_texts([kind], visited)
        yield from _value_texts(writer.functions, visited)


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
        elif isinstance(value, type):
            # A base of a user's class may be a library's, and one of a library's not.
            for kind in filter(is_users_code, value.__mro__):
                yield from _class_texts(kind, visited)
        elif is_users_code(value):
            yield from _code_texts(value, visited)


def _bound_to(
    cls: type, method: classmethod[Any, Any, Any] | staticmethod[Any, Any]
) -> object:
    """Give a method of a class as it is called."""
    is_of_class = isinstance(method, classmethod)
    return _as_method(method.__func__, cls) if is_of_class else method.__func__  # type: ignore[arg-type]


_OF_ABSTRACT_CLASSES = "_abc_impl"
"""What ``abc`` puts into each class, such as a transform of PyG's: which classes were
registered.  It cannot be read."""


def _class_texts(cls: type, visited: _Visited) -> Iterator[str]:
    """Follow the methods, the constants and the assignments of a class."""
    if id(cls) in visited:
        return
    visited.add(id(cls))
    for name, member in sorted(vars(cls).items()):
        if isinstance(member, types.FunctionType):
            yield from _code_texts(member, visited)
        elif isinstance(member, classmethod | staticmethod):
            yield from _code_texts(_bound_to(cls, member), visited)
        elif isinstance(member, property | functools.cached_property):
            getter = getattr(member, "fget", None) or getattr(member, "func", None)
            yield from _code_texts(getter, visited)
        elif not name.startswith("__") and name != _OF_ABSTRACT_CLASSES:
            if (text := constant_text(member)) is not None:
                yield f"{name}={text}"
            where = f"{cls.__module__}.{cls.__qualname__}.{name}"
            yield from _variable_texts(member, cls, name, where, visited)
