"""What a cache was made from: the code of ``load``, the keys, a version.

Only what a person wrote counts: comments, docstrings and formatting do not, nor where
the raw files lie, nor the libraries' versions.
"""

from __future__ import annotations

import ast
import inspect
import sys
import sysconfig
import textwrap
import types
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import xxhash

from loaderkit.errors import DamagedCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_CONSTANTS = (int, float, complex, str, bytes, bool, type(None))
_LIBRARIES = tuple(
    Path(sysconfig.get_paths()[name])
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


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
            made = cls(**content)
        except TypeError as error:
            what = f"The manifest's fingerprint makes no sense: {error}."
            raise DamagedCacheError(what, fix="pack it again") from None
        if [type(v) for v in asdict(made).values()] != [str, str, int, str]:
            what = f"The manifest's fingerprint makes no sense: {made}."
            raise DamagedCacheError(what, fix="pack it again")
        return made


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
    for text in _code(load, set()) if _is_users(load) else ():
        digest.update(text.encode("utf-8", "backslashreplace"))
    names = [_typed(key) for key in keys]
    return Fingerprint(digest.hexdigest(), _hash_keys(names), len(names), version)


def differences(packed: Fingerprint, now: Fingerprint) -> tuple[str, ...]:
    """Say in words how two fingerprints differ.

    >>> packed = Fingerprint("a", "k", 3)
    >>> differences(packed, Fingerprint("b", "m", 4))
    ('load() has changed', '4 keys now, 3 when packed')
    """
    found = []
    if packed.version != now.version:
        found.append(f"version {now.version!r} now, {packed.version!r} when packed")
    if packed.load != now.load:
        found.append("load() has changed")
    if packed.count != now.count:
        found.append(f"{now.count:,} keys now, {packed.count:,} when packed")
    elif packed.keys != now.keys:
        found.append("as many keys as when packed, but others or in another order")
    return tuple(found)


def key_text(key: object) -> str:
    """Write a key as text.

    >>> key_text("a.pt"), key_text(PurePath("x") / "a.pt"), key_text(3)
    ('a.pt', 'x/a.pt', '3')
    """
    if isinstance(key, str):
        return key
    return key.as_posix() if isinstance(key, PurePath) else repr(key)


def _typed(key: object) -> str:
    """Write a key so that 1 and "1" differ."""
    return key_text(key) if isinstance(key, str | PurePath) else f"\1{key!r}"


def _hash_keys(names: list[str]) -> str:
    digest = xxhash.xxh3_128()
    for start in range(0, len(names), 1 << 16):
        slab = names[start : start + (1 << 16)]
        digest.update("\0".join(map(str, map(len, slab))).encode())
        digest.update("\0".join(slab).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _code(item: Any, seen: set[int]) -> Iterator[str]:
    """Go through a function's code and, each once, what it uses of the user's."""
    owner = getattr(item, "__self__", None)
    function = inspect.unwrap(getattr(item, "__func__", item))
    if id(function) in seen or not isinstance(function, types.FunctionType):
        return
    seen.add(id(function))
    yield _text(function)
    yield from _values(function.__defaults__ or (), seen)
    yield from _values((function.__kwdefaults__ or {}).values(), seen)
    yield from _values([_cell(cell) for cell in function.__closure__ or ()], seen)
    for name in sorted(names := _names(function.__code__)):
        if name in function.__globals__:
            yield from _global(function.__globals__[name], name, names, seen)
        if owner is not None:
            yield from _attribute(owner, name, seen)


def _global(item: Any, name: str, names: set[str], seen: set[int]) -> Iterator[str]:
    """Follow a global; of a module of the user's, what is named beside it."""
    if isinstance(item, types.ModuleType):
        if _is_users_module(item):
            used = [value for key, value in vars(item).items() if key in names]
            yield from _values(used, seen, name)
    else:
        yield from _values([item], seen, name)


def _attribute(owner: Any, name: str, seen: set[int]) -> Iterator[str]:
    """Follow ``self.name``: methods and constants of all classes, numbers of self.

    All classes, since ``super()`` may ask for any of them.
    """
    kind = owner if isinstance(owner, type) else type(owner)
    for each in kind.__mro__:
        member = vars(each).get(name)
        if isinstance(member, property):
            member = member.fget
        member = getattr(member, "__func__", member)
        if isinstance(member, types.FunctionType):
            if _is_users(member):
                yield from _code(types.MethodType(member, owner), seen)
        elif isinstance(member, _CONSTANTS) and _is_users(each):
            yield f"{each.__name__}.{name}={member!r}"
    value = getattr(owner, "__dict__", {}).get(name)
    if isinstance(value, int | float | bool) or (
        isinstance(value, str) and not {"/", "\\"} & set(value)
    ):
        yield f"self.{name}={value!r}"


def _values(items: Iterable[Any], seen: set[int], name: str = "") -> Iterator[str]:
    for item in items:
        if isinstance(item, _CONSTANTS):
            yield f"{name}={item!r}"
        elif isinstance(item, tuple):
            yield from _values(item, seen, name)
        elif isinstance(item, frozenset):
            yield from _values(sorted(item, key=repr), seen, name)
        elif isinstance(item, type) and _is_users(item):
            yield from _class(item, seen)
        elif _is_users(item):
            yield from _code(item, seen)


def _class(item: type, seen: set[int]) -> Iterator[str]:
    if id(item) not in seen:
        seen.add(id(item))
        for name, member in sorted(vars(item).items()):
            if isinstance(member, types.FunctionType):
                yield from _code(member, seen)
            elif isinstance(member, _CONSTANTS) and not name.startswith("__"):
                yield f"{name}={member!r}"


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
    return file is None or not any(map(Path(file).is_relative_to, _LIBRARIES))


def _text(function: types.FunctionType) -> str:
    """Write a function's code without comments, docstring and formatting."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        # Typed at a prompt: its bytecode, which differs between versions of Python.
        return f"{sys.version_info[:2]}{_bytecode(function.__code__)}"
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_docstring(body[0]):
            body[:1] = [ast.Pass()] if len(body) == 1 else []
    return ast.dump(tree)


def _bytecode(code: types.CodeType) -> str:
    consts = [
        _bytecode(each) if isinstance(each, types.CodeType) else repr(each)
        for each in code.co_consts
        if not isinstance(each, frozenset)
    ]
    return f"{code.co_code!r}{consts!r}{code.co_names!r}"


def _is_docstring(node: ast.AST) -> bool:
    plain = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return plain and isinstance(node.value.value, str)  # type: ignore[attr-defined]


def _names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _names(const)
    return found


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
