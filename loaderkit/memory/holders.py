"""Who keeps an object alive: the way from a variable, module or traceback to it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import inspect
import re
import sys
import types
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderkit.memory.source import mutation_line
from loaderkit.memory.tensors import is_a

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_Variables = dict[int, list[tuple[str, types.CodeType, int]]]
_DEPTH = 12
_WIDTH = 200
"""Objects followed a level; those that thousands of others hold are no leak's cause."""
_TRANSPARENT = (types.CellType, types.FrameType, types.TracebackType, types.MethodType)
"""What stands between a variable and its value without a name of its own."""
_ROOTS = (
    type, types.FrameType, types.CellType, types.ModuleType, contextvars.Context,
)  # fmt: skip
_OURS = str(Path(__file__).parent.parent)


@dataclass(frozen=True)
class Holder:
    """One way by which an object is kept."""

    kind: str
    """"local variable", "closure", "global", "class", "traceback", "context variable",
    "cycle" or "native code"."""
    path: str
    """How to write the object from there, such as ``history["loss"][3]``."""
    where: str
    """File, line and function of the variable; empty when unknown."""
    line: str
    """File and line that put it there, probably; empty when unknown."""

    @property
    def held(self) -> bool:
        """Whether a variable leads to it: neither a cycle nor native code does."""
        return self.kind not in {"cycle", "native code"}

    def __str__(self) -> str:
        place = f", {self.where}" if self.where else ""
        change = f"; change {self.line}" if self.line else ""
        return f"{self.kind} `{self.path}`{place}{change}"


def holders_of(
    target: object, *, most: int = 5, ignore: Sequence[object] = ()
) -> list[Holder]:
    """Find who keeps an object, the shortest ways first.

    Args:
        target: Any object that Python's collector knows, or that one of those holds.
        most: Ways to look for.
        ignore: Containers that are known to hold it and do not count.

    Returns:
        Holders with different roots; "native code" when Python knows of none.
    """
    search = _Search(ignore)
    found: list[Holder] = []
    for holder in search.run(target):
        if holder not in found:
            found.append(holder)
        if len(found) == most:
            break
    return found or [Holder("native code", type(target).__name__, "", "")]


class _Search:
    """Breadth first, from the object to the roots; one pass over the heap a level."""

    def __init__(self, ignore: Sequence[object]) -> None:
        self.skip = {id(each) for each in ignore}
        self.skip |= {id(self), id(self.__dict__), id(ignore)}
        self.ways: dict[int, tuple[str, Any] | None] = {}
        self.alive: list[Any] = []
        """Keeps what was met, so that no number is given to a new object."""
        self.modules = {
            id(vars(module)): name
            for name, module in reversed(list(sys.modules.items()))
            if hasattr(module, "__dict__")
        }
        self.variables, self.running, scripts = _variables()
        self.modules = scripts | self.modules

    def run(self, target: object) -> Iterator[Holder]:
        """Yield holders, nearest first."""
        self.ways[id(target)] = None
        self.skip |= {id(self.alive), id(self.ways)}
        level, rooted = [target], False
        try:
            for _ in range(_DEPTH):
                for holder in (h for each in level for h in self._local(each)):
                    rooted = True
                    yield holder
                parents = self._parents(level)
                for holder in (h for each in parents for h in self._root(each)):
                    rooted = True
                    yield holder
                level = [each for each in parents if not self._is_root(each)]
                self.skip.add(id(level))
                if not level:
                    break
            if not rooted and len(self.ways) > 1:
                yield Holder("cycle", type(target).__name__, "", "")
        finally:
            self.alive.clear()

    def _parents(self, level: list[Any]) -> list[Any]:
        """Find what refers to any of these objects and was not met before."""
        found: list[Any] = []
        self.alive.append(found)
        self.skip |= {id(level), id(found)}
        for parent in gc.get_referrers(*level):
            number = id(parent)
            if number in self.skip or number in self.ways or number in self.running:
                continue
            if _is_ours(parent):
                continue
            for child in level:
                label = label_of(parent, child)
                if label is not None:
                    self.ways[number] = (label, child)
                    found.append(parent)
                    break
            if len(found) == _WIDTH:
                break
        return found

    def _is_root(self, parent: Any) -> bool:
        return id(parent) in self.modules or is_a(parent, _ROOTS)

    def _local(self, child: Any) -> Iterator[Holder]:
        for name, code, line in self.variables.get(id(child), ()):
            path = name + self._rest(child)
            where = f"{_place(code.co_filename, line)} in {code.co_name}"
            first = code.co_firstlineno
            change = mutation_line(code.co_filename, self._last_name(path), first)
            yield Holder("local variable", path, where, change)

    def _root(self, parent: Any) -> Iterator[Holder]:
        if id(parent) in self.modules:
            module = self.modules[id(parent)]
            path = self._rest(parent)
            name = _as_name(path)
            file = getattr(sys.modules.get(module), "__file__", None) or ""
            change = mutation_line(file, self._last_name(name))
            yield Holder("global", f"{module}.{name}".lstrip("."), "", change)
        elif is_a(parent, type):
            path = f"{parent.__qualname__}{self._rest(parent)}"
            file = getattr(sys.modules.get(parent.__module__), "__file__", None) or ""
            change = mutation_line(file, self._last_name(path))
            yield Holder("class", path, f"module {parent.__module__}", change)
        elif is_a(parent, types.CellType):
            yield from self._closure(parent)
        elif is_a(parent, types.FrameType):
            yield from self._frame(parent)
        elif is_a(parent, contextvars.Context):
            yield from self._context(parent)

    def _closure(self, cell: types.CellType) -> Iterator[Holder]:
        """Name a closure's variable by the function that closes over it."""
        for closure in gc.get_referrers(cell):
            if not is_a(closure, tuple) or id(closure) in self.skip:
                continue
            for function in gc.get_referrers(closure):
                if is_a(function, types.FunctionType):
                    code = function.__code__
                    if code.co_filename.startswith(_OURS):
                        continue
                    index = [each is cell for each in closure].index(True)
                    path = code.co_freevars[index] + self._rest(cell)
                    place = _place(code.co_filename, code.co_firstlineno)
                    where = f"{place} in {function.__qualname__}"
                    change = mutation_line(
                        code.co_filename, self._last_name(path), code.co_firstlineno
                    )
                    yield Holder("closure", path, where, change)
                    return

    def _context(self, context: contextvars.Context) -> Iterator[Holder]:
        """Name the context variable whose value leads to the target."""
        names = {id(value): each.name for each, value in context.items()}
        way = self.ways[id(context)]
        while way is not None and id(way[1]) not in names:
            way = self.ways.get(id(way[1]))
        if way is not None:
            path = names[id(way[1])] + self._rest(way[1])
            yield Holder("context variable", path, "", "")

    def _frame(self, frame: types.FrameType) -> Iterator[Holder]:
        """Name a frame that has ended and that a traceback or generator keeps."""
        way = self.ways[id(frame)]
        if way is None:
            return
        name = _variable_of(frame, way[1]) or "?"
        code = frame.f_code
        where = f"{_place(code.co_filename, frame.f_lineno)} in {code.co_name}"
        path = name + self._rest(way[1])
        yield Holder("traceback", path, f"{where}, kept by a traceback", "")

    def _rest(self, start: Any) -> str:
        """Write the way from a root down to the target."""
        text, way = "", self.ways.get(id(start))
        while way is not None:
            label, child = way
            text += label
            way = self.ways.get(id(child))
        return re.sub(r"\.\['(\w+)'\]", r".\1", text)

    @staticmethod
    def _last_name(path: str) -> str:
        """Pick the last name of a path: the one whose code grows it."""
        plain = path.split("[")[0]
        return plain.rsplit(".", 1)[-1]


def label_of(parent: Any, child: Any) -> str | None:
    """Write how a parent refers to a child.

    Args:
        parent: Any object.
        child: One that it refers to.

    Returns:
        Such as ``['loss']``, ``[3]`` or ``.cache``; None if it does not refer to it.
    """
    if is_a(parent, dict):
        return _key_of(parent, child)
    if is_a(parent, (list, tuple, deque)):
        found = (i for i, each in enumerate(parent) if each is child)
        index = next(found, None)
        return None if index is None else f"[{index}]"
    parts = [] if is_a(parent, types.ModuleType) else gc.get_referents(parent)
    if all(each is not child for each in parts):
        return None
    if is_a(parent, (set, frozenset)):
        return "{...}"
    if is_a(parent, _TRANSPARENT):
        return ""
    return _attribute_of(parent, child)


def _key_of(parent: dict[Any, Any], child: Any) -> str | None:
    for key, value in list(parent.items()):
        if value is child:
            return f"[{_short(key)}]"
        if key is child:
            return "[a key]"
    return None


def _attribute_of(parent: Any, child: Any) -> str:
    """Name the attribute of an object; its instance dictionary counts as itself."""
    if is_a(parent, type):
        return "."  # the next label is a key of its dictionary
    with contextlib.suppress(Exception):
        fields = object.__getattribute__(parent, "__dict__")
        if fields is child:
            return "."
        for name, value in list(fields.items()):
            if value is child:
                return f".{name}"
    if is_a(parent, functools._lru_cache_wrapper):
        return " (its lru_cache)"
    for name in getattr(type(parent), "__slots__", ()) or ():
        with contextlib.suppress(Exception):
            if object.__getattribute__(parent, name) is child:
                return f".{name}"
    return f".<{type(parent).__name__}>"


def _variables() -> tuple[_Variables, set[int], dict[int, str]]:
    """List the local variables of every thread's frames, by the number of their value.

    A frame that runs is not among the collector's objects until it ends.  Code that was
    handed to ``exec`` has globals of its own, which are no module's.
    """
    found: _Variables = {}
    running: set[int] = set()
    scripts: dict[int, str] = {}
    for frame in list(sys._current_frames().values()):
        each: types.FrameType | None = frame
        while each is not None:
            running.add(id(each))
            scripts[id(each.f_globals)] = str(each.f_globals.get("__name__", ""))
            code = each.f_code
            if not code.co_filename.startswith(_OURS) and code.co_name != "<module>":
                for name, number in local_ids(each).items():
                    found.setdefault(number, []).append((name, code, each.f_lineno))
            each = each.f_back
    del frame  # it may be this function's own: a cycle that would keep all callers
    return found, running, scripts


def running_locals() -> list[Any]:
    """List the values of the local variables of all functions that run, but ours.

    Returns:
        The values; the list keeps them.
    """
    found: list[Any] = []
    for frame in list(sys._current_frames().values()):
        each: types.FrameType | None = frame
        while each is not None:
            if not each.f_code.co_filename.startswith(_OURS):
                values = each.f_locals
                found += values.values()
                _forget(each, values)
            each = each.f_back
    del frame
    return found


def local_ids(frame: types.FrameType) -> dict[str, int]:
    """List a frame's variables without keeping their values.

    Before Python 3.13 ``f_locals`` leaves a copy of all variables with the frame, which
    would keep what the frame lets go of; it is emptied again.

    Args:
        frame: Of a function that runs.

    Returns:
        The ``id`` of each variable's value.
    """
    values = frame.f_locals
    found = {name: id(value) for name, value in list(values.items())}
    _forget(frame, values)
    return found


def _forget(frame: types.FrameType, values: Any) -> None:
    """Empty a copy of a frame's variables; of a module they are no copy."""
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and is_a(values, dict):
        values.clear()


def _variable_of(frame: types.FrameType, child: Any) -> str | None:
    for name, number in local_ids(frame).items():
        if number == id(child):
            return name
    return None


def _is_ours(parent: Any) -> bool:
    """Tell whether it is a frame of this search, or a variable of it."""
    if is_a(parent, types.FrameType):
        return bool(parent.f_code.co_filename.startswith(_OURS))
    return is_a(parent, (_Search, Holder))


def _as_name(path: str) -> str:
    """Write a module's entry as a name: ``['history'][0]`` is ``history[0]``."""
    if path.startswith("['"):
        name, _, rest = path[2:].partition("']")
        return name + rest
    return path.lstrip(".")


def _short(key: Any) -> str:
    if is_a(key, (str, int, float, bool, bytes, type(None))):
        text = repr(key)
        return text if len(text) <= 40 else text[:37] + "..."
    return f"a {type(key).__name__}"


def _place(file: str, line: int) -> str:
    return f"{Path(file).name}:{line}"
