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
    _StateWriter         an attribute's value: what pickle would store of it
"""

from __future__ import annotations

import ast
import copyreg
import enum
import functools
import inspect
import random
import sys
import textwrap
import types
from collections.abc import Sized
from dataclasses import asdict, dataclass
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xxhash

from loaderkit.datasets.written import find_written
from loaderkit.errors import DamagedCacheError
from loaderkit.library_files import is_library_file
from loaderkit.nests import tensor_bytes
from loaderkit.units import count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet
    from typing import TypeGuard

    from numpy.typing import NDArray

_CONSTANTS = (int, float, complex, str, bytes, bool, type(None))
_USUAL_CONSTANTS = frozenset(_CONSTANTS)
_USUAL_CONTENT = frozenset({list, dict, set, torch.Tensor, np.ndarray})
"""What is known to be no constant by its type alone."""
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
_RANDOM_GENERATORS = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    torch.Generator,
)
"""Left out: their states differ from process to process."""
_MAX_DEPTH = 20
"""Levels of nesting of an attribute's value that are followed.  Chosen."""
_MAX_ITEMS = 100_000
"""Of a longer container on ``self`` only the length is hashed.  Chosen."""
_MAX_NESTED_ITEMS = 500_000
"""If an attribute holds more items, in containers in containers, only its length is
hashed.  Measured: a million items take 10 s."""
_MAX_HASHED_BYTES = 256 << 20
"""Of a larger array on ``self`` only dtype and shape are hashed.  Chosen: 256 MiB take
some 0.1 s."""


_KEYS_PER_BLOCK = 1 << 16
"""Keys that are hashed at once.  Part of what a fingerprint is: never change it."""


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
        key_texts = [_typed_key_text(key) for key in keys]
        return Fingerprint(self.xxh3, _hash_keys(key_texts), len(key_texts), version)


def read_code(load: Callable[..., Any]) -> CodeOfLoad:
    """Read the code of a function that makes samples, and what it uses.

    Args:
        load: The function or bound method that makes a sample of a key.
    """
    digest, visited = xxhash.xxh3_128(), _Visited()
    # Of a library's function there is nothing to follow, but what a partial binds.
    if _is_users(load) or isinstance(load, functools.partial):
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


def key_text(key: object) -> str:
    """Convert a key to text, as Python writes the plain value that it stands for.

    Numbers of numpy and torch are written as Python's, so that a cache whose keys are
    an ``arange`` is not told stale by another release of numpy, which writes them
    otherwise.

    >>> key_text("a.pt"), key_text(PurePath("x") / "a.pt"), key_text(3)
    ('a.pt', 'x/a.pt', '3')
    >>> key_text(np.int64(3)), key_text((np.float32(0.5), torch.tensor(2), "a"))
    ('3', "(0.5, 2, 'a')")
    """
    if isinstance(key, str):
        return str.__str__(key)  # of an enum or of numpy too
    return key.as_posix() if isinstance(key, PurePath) else key_in_code(key)


def _typed_key_text(key: object) -> str:
    """Convert a key to text so that 1 and "1" differ."""
    if isinstance(key, str | PurePath):
        return key_text(key)
    return f"\1{key_text(key)}"


def key_in_code(key: object) -> str:
    """Write a key as Python writes the plain value that it stands for.

    >>> key_in_code(np.str_("a")), key_in_code((np.int8(3),)), key_in_code(b"a")
    ("'a'", '(3,)', "b'a'")
    """
    if isinstance(key, str) and type(key) is not str:
        return repr(str.__str__(key))
    if isinstance(key, np.datetime64 | np.timedelta64):
        # Python has no type for nanoseconds: item() gives an integer.
        return repr(str(key))
    if isinstance(key, np.generic):
        return repr(key.item())
    if isinstance(key, np.ndarray | torch.Tensor):
        return repr(key.tolist())
    if isinstance(key, tuple | list | frozenset):
        return _nest_in_code(key)
    return repr(key)


def _nest_in_code(key: tuple[Any, ...] | list[Any] | frozenset[Any]) -> str:
    """Write a key that holds others; one of a class of the user's as that says."""
    kind = type(key)
    parts = list(map(key_in_code, key))
    if kind is list:
        return f"[{', '.join(parts)}]"
    if kind is tuple:
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    if kind is frozenset and parts:
        # Its own order differs from process to process.
        return f"frozenset({{{', '.join(sorted(parts))}}})"
    names = getattr(kind, "_fields", None)
    if names is None or kind.__repr__ is tuple.__repr__:
        return repr(key)
    fields = [f"{name}={part}" for name, part in zip(names, parts, strict=True)]
    return f"{kind.__name__}({', '.join(fields)})"


def _hash_keys(key_texts: list[str]) -> str:
    digest = xxhash.xxh3_128()
    # In blocks, since the joined text of ten million keys would double the memory.
    for start in range(0, len(key_texts), _KEYS_PER_BLOCK):
        block = key_texts[start : start + _KEYS_PER_BLOCK]
        # With their lengths, so that ["a\0", "b"] and ["a", "\0b"] differ.
        lengths = [str(len(text)) for text in block]
        digest.update("\0".join(lengths).encode())
        digest.update("\0".join(block).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


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
    if not _is_users(function):
        # A library's decorator: only the function inside it can be the user's.
        yield from _code_texts(_as_method(inspect.unwrap(function), owner), visited)
        return

    wrapped = getattr(function, "__wrapped__", None)
    if isinstance(wrapped, types.FunctionType):
        yield from _code_texts(_as_method(wrapped, owner), visited)
    yield _source_text(function)
    visited.paths += _strings_in(function.__code__)
    for name, value in _values_bound_to(function):
        if name not in _names_changed_in(function):
            yield from _bound_texts(value, name, visited)

    # The names of attributes are among these too, and not told apart from globals.
    names = _names_used_in(function.__code__)
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


def _values_bound_to(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Give the defaults of a function and the variables of its closure, by name."""
    code = function.__code__
    defaults = function.__defaults__ or ()
    parameters = code.co_varnames[: code.co_argcount]
    yield from zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield name, _cell_contents(cell)


def _bound_texts(value: object, name: str, visited: _Visited) -> Iterator[str]:
    """Follow a value that a function has with it: code as code, others by content."""
    is_constant = _constant_text(value) is not None
    is_path = isinstance(value, str | PurePath)
    if isinstance(value, _CODE_TYPES) or is_constant or is_path:
        yield from _value_texts([value], visited)
    elif id(value) not in visited:
        visited.add(id(value))
        yield from _state_texts(value, name, visited)


_CHANGING_METHODS = frozenset(
    {"append", "add", "clear", "discard", "extend", "insert", "move_to_end", "pop"}
    | {"popitem", "remove", "setdefault", "sort", "update"}
)
"""Methods that change a container and may stand anywhere in an expression."""


def _names_changed_in(function: types.FunctionType) -> set[str]:
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
    if _is_users_module(value):
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
    if isinstance(value, _CODE_TYPES) or _constant_text(value) is not None:
        return
    written = find_written(scope, name, _is_users_module)
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
        is_constant = _constant_text(used_value) is not None
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
            if _is_users(member):
                yield from _code_texts(types.MethodType(member, owner), visited)
        elif _is_users(base) and name in vars(base):
            if (text := _constant_text(member)) is not None:
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
    if value is None or (isinstance(value, str | PurePath) and _is_path(str(value))):
        return

    writer = _StateWriter()
    try:
        text = writer.write(value)
    except OverflowError:
        size = len(value) if isinstance(value, Sized) else 0
        text = f"{type(value).__qualname__} of {size}"
    if text is not None:
        yield f"self.{name}={text}"
        for kind in writer.classes:
            yield from _value_texts(kind.__mro__, visited)


def _is_path(text: str) -> bool:
    """Tell whether a string is an absolute path, of any operating system."""
    # There may be many strings, and pathlib takes 7 us for each.
    if text[:1] not in {"/", "\\"} and text[1:2] != ":":
        return False
    return PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()


def _constant_text(value: object) -> str | None:
    """Convert an immutable value to text; None for any other value."""
    # The usual types first: 20,000 graphs on ``self`` are 700,000 values.
    kind = type(value)
    if kind in _USUAL_CONSTANTS:
        return repr(value)
    if kind in _USUAL_CONTENT:
        return None
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}={_constant_text(value.value)}"
    # Not of their subclasses: a named tuple may hold anything else besides.
    if kind is tuple or kind is frozenset:
        texts = []
        elements: Any = value
        for element in elements:
            text = _constant_text(element)
            if text is None:
                return None
            texts.append(text)
        return f"{kind.__name__}{sorted(texts) if kind is frozenset else texts}"
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSUmM":
        return f"{value.dtype.str}{value.tobytes()!r}"
    if isinstance(value, torch.dtype | np.dtype | torch.device):
        return repr(value)
    return repr(value) if isinstance(value, _CONSTANTS) else None


class _StateWriter:
    """Converts an attribute's value to text: all that it holds, each object once."""

    def __init__(self) -> None:
        self.classes: dict[type, None] = {}
        """Classes of the objects that were met, in order: their code makes samples
        too.  A dict serves as an ordered set."""
        self._texts: dict[int, str | None] = {}
        """Text of each object, by its id."""
        self._num_items = 0
        self._written_objects: list[object] = []
        """Keeps objects that ``__reduce__`` made alive, so that no later object gets
        the id of one of them."""

    def write(self, value: object, depth: int = 0) -> str | None:
        """Convert a value to text.

        Args:
            value: Any object.
            depth: Containers around it.

        Returns:
            Its text; None if it holds something that cannot be pickled, or is a random
            generator.

        Raises:
            OverflowError: It holds more than _MAX_NESTED_ITEMS items.
        """
        if value is None:
            return "None" if depth else None
        kind = type(value)
        if kind not in _USUAL_CONTENT:
            if isinstance(value, PurePath) or (
                isinstance(value, str) and _is_path(value)
            ):
                # The raw data may move to another folder, under the same name.
                path = PurePath(value)
                return f"path {path.name if path.is_absolute() else path.as_posix()!r}"
            if (text := _constant_text(value)) is not None:
                return text
            if kind is not tuple and isinstance(value, _RANDOM_GENERATORS):
                return None
        if depth > _MAX_DEPTH:
            return None
        if id(value) not in self._texts:
            self._written_objects.append(value)
            # Read if the object is met again inside of itself.
            self._texts[id(value)] = f"{type(value).__name__} that holds itself"
            self._texts[id(value)] = self._write_once(value, depth + 1)
        return self._texts[id(value)]

    def _write_once(self, value: Any, depth: int) -> str | None:
        name = type(value).__qualname__
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            return _array_text(value)
        if isinstance(value, np.ndarray):
            text = _array_text(value)
            if text is None:  # an array of Python's objects
                text = self._container_text(name, value.tolist(), depth)
            return text
        if type(value) in {list, tuple}:
            return self._container_text(name, value, depth)
        if type(value) in {set, frozenset}:
            return self._container_text(name, value, depth, ordered=False)
        if type(value) in {dict, types.MappingProxyType}:
            return self._container_text(name, value.items(), depth, ordered=False)
        return self._object_text(value, depth)

    def _object_text(self, value: object, depth: int) -> str | None:
        """Convert any other object to text, from what pickle would store of it.

        If an object of a user's class cannot be pickled, those of its attributes that
        can are taken instead: with a lock beside a vocabulary, the vocabulary counts.
        """
        self.classes[type(value)] = None
        text = self._pickled_text(value, depth)
        if text is not None or not _is_users(type(value)):
            return text

        texts = []
        for name, attribute in getattr(value, "__dict__", {}).items():
            attribute_text = self.write(attribute, depth)
            if attribute_text is not None:
                texts.append(f"{name}={attribute_text}")
        return f"{type(value).__qualname__}({','.join(sorted(texts))})"

    def _pickled_text(self, value: object, depth: int) -> str | None:
        """Convert what an object's ``__reduce_ex__`` returns; None if it raises."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced: Any = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 -- user code; files and locks raise anything
            return None
        if isinstance(reduced, str):
            return reduced
        # A function, its arguments and a state, then iterators over items, or None.
        items = [*reduced[:3], *map(_list_of_items, reduced[3:5]), *reduced[5:]]
        return self._container_text(type(value).__qualname__, items, depth)

    def _container_text(
        self, name: str, items: Collection[Any], depth: int, *, ordered: bool = True
    ) -> str | None:
        """Convert a container's items to text; None if one of them has no text.

        Args:
            name: Name of its class.
            items: What is in it; of a dict, pairs.
            depth: Containers around the items.
            ordered: False for sets and dicts: equal ones may differ in their order.
        """
        if len(items) > _MAX_ITEMS:
            return f"{name} of {len(items)}"
        self._num_items += len(items)
        if self._num_items > _MAX_NESTED_ITEMS:
            raise OverflowError
        texts = []
        for item in items:
            text = self.write(item, depth)
            if text is None:
                return None
            texts.append(text)
        return f"{name}({','.join(texts if ordered else sorted(texts))})"


def _list_of_items(items: Iterator[object] | None) -> list[object] | None:
    return None if items is None else list(items)


def _array_text(value: torch.Tensor | NDArray[Any]) -> str | None:
    """Give the dtype, the shape and a hash of the numbers.

    None for arrays of Python's objects, and for tensors on the meta device, which have
    no numbers.
    """
    signature = f"{value.dtype}{tuple(value.shape)}"
    if value.nbytes > _MAX_HASHED_BYTES:
        return signature
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return None
        content = tensor_bytes(value.cpu()).numpy()
    elif value.dtype.hasobject:
        return None
    else:
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return f"{signature}{xxhash.xxh3_128_hexdigest(content.data)}"


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
        if (text := _constant_text(value)) is not None:
            yield f"{name}={text}"
        elif isinstance(value, tuple):
            yield from _value_texts(value, visited, name)
        elif isinstance(value, frozenset):
            yield from _value_texts(sorted(value, key=repr), visited, name)
        elif isinstance(value, functools.partial):
            yield from _code_texts(value, visited)
        elif isinstance(value, type) and _is_users(value):
            yield from _class_texts(value, visited)
        elif _is_users(value):
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
            if (text := _constant_text(member)) is not None:
                yield f"{name}={text}"
            yield from _written_texts(member, cls, name, visited)


def _is_users(value: object) -> bool:
    """Tell whether a function or a class is the user's, and not a library's."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or not callable(value):
        # A function without a module was made by ``exec`` or typed at a prompt.
        return callable(value) and isinstance(value, types.FunctionType)
    return _is_users_module(module)


def _is_users_module(module: types.ModuleType) -> bool:
    """Tell whether a module is neither a library's, nor Python's, nor ours."""
    if module.__name__.partition(".")[0] in {"loaderkit", *sys.builtin_module_names}:
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        return True
    return not is_library_file(file)


def _source_text(function: types.FunctionType) -> str:
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


def _names_used_in(code: types.CodeType) -> set[str]:
    """Name the globals and attributes used in a function and in functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_used_in(constant)
    return names


def _strings_in(code: types.CodeType) -> list[str | PurePath]:
    """List the string literals of a function and of functions inside it."""
    strings: list[str | PurePath] = []
    for constant in code.co_consts:
        if isinstance(constant, str):
            strings.append(constant)
        elif isinstance(constant, types.CodeType):
            strings += _strings_in(constant)
    return strings


def _cell_contents(cell: types.CellType) -> object:
    """Give the value of a closure's variable; None if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
