"""What a cache was made from: the code of ``load``, the keys, a version.

Only what a person wrote counts: comments, docstrings and formatting do not, nor where
the raw files lie, nor the libraries' versions.
"""

from __future__ import annotations

import ast
import collections
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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from loaderkit.datasets.written import find_written
from loaderkit.errors import DamagedCacheError
from loaderkit.library_files import is_library_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet

_CONSTANTS = (int, float, complex, str, bytes, bool, type(None))
_FOLLOWED = (
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
"""What is code, and followed as such."""
_FOLLOWED_FROM_WRITTEN = (
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
"""What is followed where what was written for something names it."""
_GENERATORS = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    torch.Generator,
)
"""They differ in every process, and say nothing of what a sample is made from."""
_MOST_DEPTH = 20
_MOST_ITEMS = 100_000
"""Of a container on ``self``: of a longer one only the length counts."""
_MOST_IN_ALL = 500_000
"""Items of containers in containers: of a value that holds more (10 s to write down a
million) only its length counts."""
_MOST_HASHED_BYTES = 256 << 20
"""Of an array on ``self``: of a larger one only dtype and shape count."""


@dataclass(frozen=True)
class Fingerprint:
    """What a cache was made from."""

    load: str
    """Hash of the code that makes a sample, and of what it calls."""
    keys: str
    """Hash of the keys in order."""
    count: int
    """Number of keys."""
    version: str = ""
    """The dataset class's own ``version``, which its author raises."""

    def to_json(self) -> dict[str, Any]:
        """Write it for the manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Fingerprint:
        """Read it from a manifest.

        Args:
            content: What ``to_json`` wrote.

        Returns:
            The fingerprint.

        Raises:
            DamagedCacheError: It is something else.
        """
        try:
            fingerprint = cls(**content)
        except TypeError as error:
            message = f"The manifest's fingerprint makes no sense: {error}."
            raise DamagedCacheError(message, fix="pack it again") from None
        if [type(v) for v in asdict(fingerprint).values()] != [str, str, int, str]:
            message = f"The manifest's fingerprint makes no sense: {fingerprint}."
            raise DamagedCacheError(message, fix="pack it again")
        return fingerprint


def fingerprint_of(
    load: Callable[..., Any], keys: Iterable[object], *, version: str = ""
) -> Fingerprint:
    """Take the fingerprint of a way to make samples.

    Args:
        load: The function or bound method that makes one.
        keys: What it is called with, in order.
        version: The author's own version of it.

    Returns:
        A value that is equal in every process while the code and keys are the same.
    """
    digest = xxhash.xxh3_128()
    for text in _code_texts(load, _Followed()) if _is_users(load) else ():
        digest.update(text.encode("utf-8", "backslashreplace"))
    names = [_typed_key_text(key) for key in keys]
    return Fingerprint(digest.hexdigest(), _hash_keys(names), len(names), version)


def fingerprint_value(value: object) -> str:
    """Hash a function with what it calls, or an object with what it holds.

    Args:
        value: A user's function, a library's, or an object that can be called.

    Returns:
        A hash that is equal in every process while code and values are the same.
    """
    digest = xxhash.xxh3_128()
    kind = value if hasattr(value, "__qualname__") else type(value)
    digest.update(f"{kind.__module__}:{kind.__qualname__}".encode())
    for text in _held_texts(value, "", _Followed()):
        digest.update(text.encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def differences(packed: Fingerprint, now: Fingerprint) -> tuple[str, ...]:
    """Say in words how two fingerprints differ.

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
        changes.append(f"{now.count:,} keys now, {packed.count:,} when packed")
    elif packed.keys != now.keys:
        changes.append("as many keys as when packed, but others or in another order")
    return tuple(changes)


def key_text(key: object) -> str:
    """Write a key as text.

    >>> key_text("a.pt"), key_text(PurePath("x") / "a.pt"), key_text(3)
    ('a.pt', 'x/a.pt', '3')
    """
    if isinstance(key, str):
        return key
    return key.as_posix() if isinstance(key, PurePath) else repr(key)


def _typed_key_text(key: object) -> str:
    """Write a key so that 1 and "1" differ."""
    return key_text(key) if isinstance(key, str | PurePath) else f"\1{key!r}"


def _hash_keys(names: list[str]) -> str:
    digest = xxhash.xxh3_128()
    for start in range(0, len(names), 1 << 16):
        slab = names[start : start + (1 << 16)]
        digest.update("\0".join(map(str, map(len, slab))).encode())
        digest.update("\0".join(slab).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def paths_named_by(load: Callable[..., Any]) -> list[str | PurePath]:
    """Give the texts and paths that the code of ``load`` names: some are raw data.

    Args:
        load: The function or bound method that makes a sample.

    Returns:
        Literals and constants, of modules, classes and closures, in order.
    """
    followed = _Followed()
    if _is_users(load):
        collections.deque(_code_texts(load, followed), maxlen=0)
    return followed.paths


class _Followed(set[object]):
    """What was followed already: code and written values, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str | PurePath] = []
        """Texts and paths met on the way."""


def _code_texts(item: Any, seen: _Followed) -> Iterator[str]:
    """Go through a function's code and, each once, what it uses of the user's."""
    owner = getattr(item, "__self__", None)
    function = getattr(item, "__func__", item)
    if isinstance(function, functools.partial):
        yield from _code_texts(function.func, seen)
        yield from _value_texts(function.args, seen)
        yield from _value_texts(function.keywords.values(), seen)
        return
    if id(function) in seen or not isinstance(function, types.FunctionType):
        return
    seen.add(id(function))
    if not _is_users(function):
        # Of a library's decorator only what it calls is the user's.
        yield from _code_texts(_as_method(inspect.unwrap(function), owner), seen)
        return
    wrapped = getattr(function, "__wrapped__", None)
    if isinstance(wrapped, types.FunctionType):
        yield from _code_texts(_as_method(wrapped, owner), seen)
    yield _source_text(function)
    seen.paths += _texts_in(function.__code__)
    yield from _value_texts(function.__defaults__ or (), seen)
    yield from _value_texts((function.__kwdefaults__ or {}).values(), seen)
    yield from _value_texts(
        [_cell_contents(cell) for cell in function.__closure__ or ()], seen
    )
    module = sys.modules.get(function.__module__ or "")
    for name in sorted(names := _names_used_in(function.__code__)):
        if name in function.__globals__:
            yield from _global_texts(
                function.__globals__[name], name, names, seen, module
            )
        if owner is not None:
            yield from _attribute_texts(owner, name, seen)


def _as_method(function: Any, owner: Any) -> Any:
    """Give a function as a method of its owner, if it has one."""
    return function if owner is None else types.MethodType(function, owner)


def _global_texts(
    item: Any, name: str, names: AbstractSet[str], seen: _Followed, module: Any
) -> Iterator[str]:
    """Follow a global of a module; of a module of the user's, what is named beside."""
    if isinstance(item, types.ModuleType):
        if _is_users_module(item):
            for key in sorted(names & vars(item).keys()):
                yield from _value_texts([vars(item)[key]], seen, name)
                yield from _initial_value_texts(vars(item)[key], item, key, seen)
    else:
        yield from _value_texts([item], seen, name)
        yield from _initial_value_texts(item, module, name, seen)


def _initial_value_texts(
    item: Any, scope: Any, name: str, seen: _Followed
) -> Iterator[str]:
    """Follow what was written for a value that may change, and what that names."""
    if isinstance(item, _FOLLOWED) or _constant_text(item) is not None:
        return
    written = find_written(scope, name, _is_users_module)
    if written is None or (id(written.scope), written.text) in seen:
        return
    seen.add((id(written.scope), written.text))
    yield f"{name}: {written.text}"
    scope_names = vars(written.scope)
    module = sys.modules.get(getattr(written.scope, "__module__", ""), written.scope)
    for used in sorted(written.names):
        # As Python looks a name up: in the class's body, then in its module.
        if used in scope_names:
            value, where = scope_names[used], written.scope
        elif used in vars(module):
            value, where = vars(module)[used], module
        else:
            continue
        # Of what a parser of arguments gives, each argument's default would count.
        if (
            isinstance(value, _FOLLOWED_FROM_WRITTEN)
            or _constant_text(value) is not None
        ):
            yield from _global_texts(value, used, written.names, seen, where)


def _attribute_texts(owner: Any, name: str, seen: _Followed) -> Iterator[str]:
    """Follow ``self.name``: methods and constants of all classes, values of self.

    All classes, since ``super()`` may ask for any of them.
    """
    kind = owner if isinstance(owner, type) else type(owner)
    for base in kind.__mro__:
        member = vars(base).get(name)
        if isinstance(member, property):
            member = member.fget
        elif isinstance(member, functools.cached_property):
            member = member.func
        member = getattr(member, "__func__", member)
        if isinstance(member, types.FunctionType):
            if _is_users(member):
                yield from _code_texts(types.MethodType(member, owner), seen)
        elif _is_users(base) and name in vars(base):
            if (text := _constant_text(member)) is not None:
                yield f"{base.__name__}.{name}={text}"
            if isinstance(member, str | PurePath):
                seen.paths.append(member)
            yield from _initial_value_texts(member, base, name, seen)
    if name not in getattr(kind, "_PACKED_WITHOUT", ()):
        yield from _held_texts(getattr(owner, "__dict__", {}).get(name), name, seen)


def _held_texts(value: Any, name: str, seen: _Followed) -> Iterator[str]:
    """Follow a value of ``self``; those that load opens or fills are none of these."""
    if isinstance(value, functools.partial | types.FunctionType | types.MethodType):
        yield from _code_texts(value, seen)
        return
    if value is None or (isinstance(value, str | PurePath) and _is_path(str(value))):
        return  # it is opened later; or the raw data may move
    writer = _OwnText()
    try:
        text = writer.write(value)
    except OverflowError:
        size = len(value) if isinstance(value, Sized) else 0
        text = f"{type(value).__qualname__} of {size}"
    if text is not None:
        yield f"self.{name}={text}"
        for kind in writer.classes:
            yield from _value_texts(kind.__mro__, seen)


def _is_path(text: str) -> bool:
    """Tell whether a text says where something lies on this machine."""
    if text[:1] not in {"/", "\\"} and text[1:2] != ":":
        return False  # most texts, of which there may be many: pathlib takes 7 us
    return PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()


def _constant_text(value: Any) -> str | None:
    """Write what cannot change while the process runs; None for anything else.

    Of lists and dicts of modules and classes only what was written counts: many are
    filled while samples are loaded, and would make a cache stale that is not.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}={_constant_text(value.value)}"
    if type(value) in {tuple, frozenset}:
        texts = [
            text for element in value if (text := _constant_text(element)) is not None
        ]
        if len(texts) < len(value):
            return None
        texts = sorted(texts) if type(value) is frozenset else texts
        return f"{type(value).__name__}{texts}"
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSUmM":
        return f"{value.dtype.str}{value.tobytes()!r}"
    if isinstance(value, torch.dtype | np.dtype | torch.device):
        return repr(value)
    return repr(value) if isinstance(value, _CONSTANTS) else None


class _OwnText:
    """Writes values of an object: what they hold, however deep, each once."""

    def __init__(self) -> None:
        self.classes: dict[type, None] = {}
        """Of the objects met, each once and in order: their code makes samples too."""
        self._texts: dict[int, str | None] = {}
        self._items = 0
        self._met_objects: list[Any] = []
        """What was made while writing: nothing else may get the number of one."""

    def write(self, value: Any, depth: int = 0) -> str | None:
        """Write a value; None where it is not plain all through.

        Raises:
            OverflowError: It holds more than _MOST_IN_ALL items.
        """
        if value is None:
            return "None" if depth else None
        if isinstance(value, PurePath) or (isinstance(value, str) and _is_path(value)):
            # Where it lies may change; which file it is may not.
            path = PurePath(value)
            return f"path {path.name if path.is_absolute() else path.as_posix()!r}"
        if (text := _constant_text(value)) is not None:
            return text
        if depth > _MOST_DEPTH or isinstance(value, _GENERATORS):
            return None
        if id(value) not in self._texts:
            self._met_objects.append(value)
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
            return _array_text(value) or self._container_text(
                name, value.tolist(), depth
            )
        if type(value) in {list, tuple}:
            return self._container_text(name, value, depth)
        if type(value) in {set, frozenset}:
            return self._container_text(name, value, depth, ordered=False)
        if type(value) in {dict, types.MappingProxyType}:
            return self._container_text(name, value.items(), depth, ordered=False)
        return self._state_text(value, depth)

    def _state_text(self, value: Any, depth: int) -> str | None:
        """Write any other object by what pickle would make it again from.

        Of an object of the user's that cannot be pickled, each attribute by itself: a
        lock or an open file beside a vocabulary says nothing of the vocabulary.
        """
        self.classes[type(value)] = None
        text = self._reduced_text(value, depth)
        if text is not None or not _is_users(type(value)):
            return text
        held = getattr(value, "__dict__", {})
        texts = [
            (name, self.write(attribute, depth)) for name, attribute in held.items()
        ]
        plain = sorted(f"{name}={text}" for name, text in texts if text is not None)
        return f"{type(value).__qualname__}({','.join(plain)})"

    def _reduced_text(self, value: Any, depth: int) -> str | None:
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced: Any = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 -- the object's own code; files and locks
            return None
        if isinstance(reduced, str):
            return reduced
        # Behind function, arguments and state come iterators over items, or None.
        parts = [list(part) if hasattr(part, "__next__") else part for part in reduced]
        return self._container_text(type(value).__qualname__, parts, depth)

    def _container_text(
        self, name: str, parts: Collection[Any], depth: int, *, ordered: bool = True
    ) -> str | None:
        """Write what a container holds; a dict's order says nothing of it."""
        if len(parts) > _MOST_ITEMS:
            return f"{name} of {len(parts)}"
        self._items += len(parts)
        if self._items > _MOST_IN_ALL:
            raise OverflowError
        texts = []
        for part in parts:
            text = self.write(part, depth)
            if text is None:
                return None
            texts.append(text)
        return f"{name}({','.join(texts if ordered else sorted(texts))})"


def _array_text(value: Any) -> str | None:
    """Write an array's or tensor's dtype, shape and the hash of its numbers."""
    look = f"{value.dtype}{tuple(value.shape)}"
    if value.nbytes > _MOST_HASHED_BYTES:
        return look
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return None
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif value.dtype.hasobject:
        return None
    content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return f"{look}{xxhash.xxh3_128_hexdigest(content.data)}"


def _value_texts(
    items: Iterable[Any], seen: _Followed, name: str = ""
) -> Iterator[str]:
    """Go through values that code names: constants as they are, code followed."""
    for item in items:
        if isinstance(item, str | PurePath):
            seen.paths.append(item)
        if (text := _constant_text(item)) is not None:
            yield f"{name}={text}"
        elif isinstance(item, tuple):
            yield from _value_texts(item, seen, name)
        elif isinstance(item, frozenset):
            yield from _value_texts(sorted(item, key=repr), seen, name)
        elif isinstance(item, functools.partial):
            yield from _code_texts(item, seen)
        elif isinstance(item, type) and _is_users(item):
            yield from _class_texts(item, seen)
        elif _is_users(item):
            yield from _code_texts(item, seen)


def _class_texts(item: type, seen: _Followed) -> Iterator[str]:
    """Go through a class: its methods, its constants, and values written in it."""
    if id(item) not in seen:
        seen.add(id(item))
        for name, member in sorted(vars(item).items()):
            if isinstance(member, types.FunctionType):
                yield from _code_texts(member, seen)
            elif not name.startswith("__"):
                if (text := _constant_text(member)) is not None:
                    yield f"{name}={text}"
                yield from _initial_value_texts(member, item, name, seen)


def _is_users(item: Any) -> bool:
    """Tell whether code is the user's own rather than a library's."""
    module = sys.modules.get(getattr(item, "__module__", None) or "")
    if module is None or not callable(item):
        return callable(item) and isinstance(item, types.FunctionType)
    return _is_users_module(module)


def _is_users_module(module: types.ModuleType) -> bool:
    if module.__name__.partition(".")[0] in {"loaderkit", *sys.builtin_module_names}:
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        return True
    return not is_library_file(file)


def _source_text(function: types.FunctionType) -> str:
    """Write a function's code without comments, docstring and formatting."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        # Typed at a prompt: its bytecode, which differs between versions of Python.
        return f"{sys.version_info[:2]}{_bytecode_text(function.__code__)}"
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_docstring(body[0]):
            body[:1] = [ast.Pass()] if len(body) == 1 else []
    return ast.dump(tree)


def _bytecode_text(code: types.CodeType) -> str:
    consts = [
        _bytecode_text(constant)
        if isinstance(constant, types.CodeType)
        else repr(constant)
        for constant in code.co_consts
        # The order of a set of constants differs from process to process.
        if not isinstance(constant, frozenset)
    ]
    return f"{code.co_code!r}{consts!r}{code.co_names!r}"


def _is_docstring(node: ast.AST) -> bool:
    plain = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return plain and isinstance(node.value.value, str)  # type: ignore[attr-defined]


def _names_used_in(code: types.CodeType) -> set[str]:
    """Name the globals and attributes that a function uses, and those within it."""
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _names_used_in(const)
    return names


def _texts_in(code: types.CodeType) -> list[str | PurePath]:
    """List the texts in a function, and in those defined within."""
    texts: list[str | PurePath] = []
    for const in code.co_consts:
        if isinstance(const, str):
            texts.append(const)
        elif isinstance(const, types.CodeType):
            texts += _texts_in(const)
    return texts


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
