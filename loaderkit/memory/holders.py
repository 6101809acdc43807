"""Who keeps an object alive: the way from a variable, module or traceback to it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import re
import sys
import types
from collections import UserDict, UserList, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderkit.arguments import check_integer, refuse_value
from loaderkit.call_keywords import suggest_keywords
from loaderkit.library_files import is_library_file, is_own_file
from loaderkit.memory.frames import local_ids, named_arguments, running_frames
from loaderkit.memory.holder import Holder
from loaderkit.memory.source import mutation_line
from loaderkit.memory.tensors import is_a, referents_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from loaderkit.memory.holder import HolderKind

_MOST_LEVELS = 12
"""References that are followed from an object upwards.  Chosen: a batch in a list of an
attribute of a variable is 4 away; what is further is a chain, see ``root_search``."""
_MOST_PARENTS = 200
"""Objects followed a level.  Chosen: what thousands hold is no cause of a leak."""
_TRANSPARENT = (types.CellType, types.FrameType, types.TracebackType, types.MethodType)
"""What stands between a variable and its value without a name of its own."""
_ROOTS = (
    type,
    types.FrameType,
    types.CellType,
    types.ModuleType,
    contextvars.Context,
)
"""Where a way ends: what holds these is no news."""
_GROWING = (list, dict, set, deque)
_WRAPPERS = (UserDict, UserList)
_KEY_LENGTH = 40
"""Characters of a key, as a path shows it.  Chosen: a path of two fits a line."""


@suggest_keywords
def holders_of(
    target: object,
    *,
    most: int = 5,
    ignore: Sequence[object] = (),
) -> list[Holder]:
    """Find who keeps an object, the shortest ways first.

    Args:
        target: Any object that Python's collector knows, or that one of those holds.
        most: Ways to look for.
        ignore: Containers that are known to hold it and do not count.

    Returns:
        Holders with different roots; "native code" when Python knows of none.
    """
    check_integer("most", most, least=1)
    if not isinstance(ignore, list | tuple):
        name = "ignore"
        raise refuse_value(name, ignore, "a list of containers", [])
    search = _Search(ignore)
    holders: list[Holder] = []
    for holder in search.run(target):
        if holder not in holders:
            holders.append(holder)
        if len(holders) == most:
            break
    return holders or [Holder("native code", type(target).__name__, "", "")]


class _Variable(NamedTuple):
    """A local variable of a function that runs, or will be called again."""

    name: str
    code: types.CodeType
    line: int
    kind: HolderKind = "local variable"


class _Step(NamedTuple):
    """One reference on the way from a root down to the target."""

    label: str
    """How the child is written from its parent, such as ``[3]`` or ``.cache``."""
    child: object


class _Search:
    """Breadth first, from the object to the roots; one pass over the heap a level.

    Objects are told apart by ``id``: comparing them would run code of the user's.
    """

    def __init__(self, ignore: Sequence[object]) -> None:
        self.skipped_ids = {id(container) for container in ignore}
        self.skipped_ids |= {id(self), id(self.__dict__), id(ignore)}
        self.steps: dict[int, _Step | None] = {}
        """The reference by which each object that was met leads to the target."""
        self.alive: list[Any] = []
        """Keeps what was met, so that no number is given to a new object."""
        self.variables: dict[int, list[_Variable]] = {}
        """Local variables by the ``id`` of their value."""
        self.running_ids: set[int] = set()
        """Frames that run: their variables are looked up by value, see above."""
        self.modules: dict[int, str] = {}
        """Names of modules by the ``id`` of their globals."""
        self.container_class: type | None = None
        """The target's, if it is a container: its own methods may make it grow."""
        self._note_named_arguments()
        self._note_running_frames()
        self._note_modules()

    def run(self, target: object) -> Iterator[Holder]:
        """Yield holders, nearest first."""
        self.steps[id(target)] = None
        self.container_class = type(target) if is_a(target, _GROWING) else None
        self.skipped_ids |= {id(self.alive), id(self.steps)}
        level, has_root = [target], False
        try:
            for _ in range(_MOST_LEVELS):
                for child in level:
                    for holder in self._variables_of(child):
                        has_root = True
                        yield holder
                parents = self._parents_of(level)
                for parent in parents:
                    for holder in self._holders_at(parent):
                        has_root = True
                        yield holder
                level = [parent for parent in parents if not self._is_root(parent)]
                self.skipped_ids.add(id(level))
                if not level:
                    break
            # Something refers to the target, and no variable leads to any of that.
            if not has_root and len(self.steps) > 1:
                yield Holder("cycle", type(target).__name__, "", "")
        finally:
            self.alive.clear()

    def _note_named_arguments(self) -> None:
        # Before the variables of whoever calls the function: those lead to the same
        # values, by names that the user has never seen.
        for code, ids in ((each.code, each.ids) for each in named_arguments()):
            for name, number in ids.items():
                variable = _Variable(name, code, code.co_firstlineno, "fixture")
                self.variables.setdefault(number, []).append(variable)

    def _note_running_frames(self) -> None:
        for frame in running_frames():
            self.running_ids.add(id(frame))
            # Code that was handed to exec has globals of its own, which are no
            # module's.
            name = str(frame.f_globals.get("__name__", ""))
            self.modules[id(frame.f_globals)] = name
            code = frame.f_code
            if is_own_file(code.co_filename) or code.co_name == "<module>":
                continue
            for name, number in local_ids(frame).items():
                variable = _Variable(name, code, frame.f_lineno)
                self.variables.setdefault(number, []).append(variable)

    def _note_modules(self) -> None:
        # Of a module with several names the one that was imported first counts.
        for name, module in reversed(list(sys.modules.items())):
            if hasattr(module, "__dict__"):
                self.modules[id(vars(module))] = name

    def _parents_of(self, level: list[Any]) -> list[Any]:
        """Find what refers to any of these objects and was not met before."""
        parents: list[Any] = []
        self.alive.append(parents)
        # From Python 3.14 on the tuple of the call's arguments is among the referrers.
        arguments = tuple(level)
        # These refer to the objects too, and so do the lists of the search itself.
        self.skipped_ids |= {id(level), id(parents), id(arguments)}
        self.alive.append(arguments)
        for parent in gc.get_referrers(*arguments):
            if self._is_known(parent) or _belongs_to_search(parent):
                continue
            for child in level:
                label = label_of(parent, child)
                if label is not None:
                    self.steps[id(parent)] = _Step(label, child)
                    parents.append(parent)
                    break
            if len(parents) == _MOST_PARENTS:
                break
        return parents

    def _is_known(self, parent: object) -> bool:
        number = id(parent)
        return (
            number in self.skipped_ids
            or number in self.steps
            or number in self.running_ids
        )

    def _is_root(self, parent: object) -> bool:
        return id(parent) in self.modules or is_a(parent, _ROOTS)

    def _variables_of(self, child: object) -> Iterator[Holder]:
        """Name the local variables whose value an object is."""
        for name, code, line, kind in self.variables.get(id(child), ()):
            path = name + self._path_below(child)
            where = f"{_place_in(code.co_filename, line)} in {code.co_name}"
            line_of_growth = self._line_in(code, child, path)
            yield Holder(kind, path, where, line_of_growth)

    def _holders_at(self, parent: object) -> Iterator[Holder]:
        """Name the holders that a root is, if it is one."""
        if id(parent) in self.modules:
            yield self._global_of(parent, self.modules[id(parent)])
            return
        for kind, name_holders in self._ROOT_KINDS:
            if issubclass(type(parent), kind):
                yield from name_holders(self, parent)
                return

    def _global_of(self, module_globals: object, module: str) -> Holder:
        name = _as_name(self._path_below(module_globals))
        file = _file_of_module(module)
        change = ""
        if "." in name:
            change = self._line_of_attribute(module_globals)
            if file and not change:
                # Code of the module that has the variable: ``variable.attribute``.
                change = mutation_line(file, name.partition("[")[0])
        elif file:
            find = functools.partial(mutation_line, file, _grown_name(name))
            change = self._grown_or_set(find)
        return Holder("global", f"{module}.{name}".lstrip("."), "", change)

    def _class_of(self, owner: type) -> Iterator[Holder]:
        path = f"{owner.__qualname__}{self._path_below(owner)}"
        change = self._line_of_attribute(owner)
        yield Holder("class", path, f"module {owner.__module__}", change)

    def _closure_of(self, cell: types.CellType) -> Iterator[Holder]:
        """Name a closure's variable by the function that closes over it."""
        for closure in gc.get_referrers(cell):
            if not is_a(closure, tuple) or id(closure) in self.skipped_ids:
                continue
            for function in gc.get_referrers(closure):
                if not is_a(function, types.FunctionType):
                    continue
                code = function.__code__
                if is_own_file(code.co_filename):
                    continue
                # By identity: cells with equal contents are equal.
                index = next(i for i, other in enumerate(closure) if other is cell)
                name = code.co_freevars[index]
                if name == "__classdict__":
                    # From Python 3.14 on annotations are computed when they are asked
                    # for, of the names that the class's body had: the class has them.
                    return
                path = name + self._path_below(cell)
                location = _place_in(code.co_filename, code.co_firstlineno)
                where = f"{location} in {function.__qualname__}"
                yield Holder("closure", path, where, self._line_in(code, cell, path))
                return

    def _context_of(self, context: contextvars.Context) -> Iterator[Holder]:
        """Name the context variable whose value leads to the target."""
        names = {id(value): variable.name for variable, value in context.items()}
        # A context keeps its values in a tree of C nodes: the first object on the way
        # that is a variable's value is the one to name.
        step = self.steps[id(context)]
        while step is not None and id(step.child) not in names:
            step = self.steps.get(id(step.child))
        if step is not None:
            path = names[id(step.child)] + self._path_below(step.child)
            yield Holder("context variable", path, "", "")

    def _traceback_of(self, frame: types.FrameType) -> Iterator[Holder]:
        """Name a frame that has ended and that a traceback or generator keeps."""
        step = self.steps[id(frame)]
        if step is None:
            return
        name = _variable_of(frame, step.child) or "?"
        code = frame.f_code
        where = f"{_place_in(code.co_filename, frame.f_lineno)} in {code.co_name}"
        path = name + self._path_below(step.child)
        yield Holder("traceback", path, f"{where}, kept by a traceback", "")

    _ROOT_KINDS: tuple[tuple[type, Callable[[_Search, Any], Iterator[Holder]]], ...] = (
        (type, _class_of),
        (types.CellType, _closure_of),
        (types.FrameType, _traceback_of),
        (contextvars.Context, _context_of),
    )

    def _line_in(self, code: types.CodeType, start: object, path: str) -> str:
        """Find where a variable of a function, or an attribute of one, grows."""
        find = functools.partial(
            mutation_line,
            code.co_filename,
            _grown_name(path),
            code.co_firstlineno,
            is_local=True,
        )
        return self._grown_or_set(find) or self._line_of_attribute(start)

    def _grown_or_set(self, find: Callable[..., str]) -> str:
        """Find where something grows, by users or its own class; or where it is set.

        Args:
            find: ``mutation_line`` with the file and name to look for.
        """
        if self.container_class is None:
            return find()
        return find(must_grow=True) or _line_of_class(self.container_class) or find()

    def _line_of_attribute(self, start: object) -> str:
        """Find where the class of the user's that has an attribute makes it grow."""
        owner, name = self._last_attribute_below(start)
        if owner is None:
            return ""
        for kind, file in _users_classes(owner if is_a(owner, type) else type(owner)):
            # Code of the class itself, else what is written as ``Class.name``.
            in_class = functools.partial(
                mutation_line, file, f".{name}", class_name=kind.__name__
            )
            line = self._grown_or_set(in_class)
            line = line or mutation_line(file, f"{kind.__name__}.{name}")
            if line:
                return line
        # A ``UserDict`` or ``UserList`` keeps its items in an attribute.
        is_wrapper = name == "data" and is_a(owner, _WRAPPERS)
        return _line_of_class(type(owner)) if is_wrapper else ""

    def _last_attribute_below(self, start: object) -> tuple[Any, str]:
        """Give the last attribute on the way, before any index, and whose it is."""
        owner: Any = None
        last: tuple[Any, str] = (None, "")
        current, step = start, self.steps.get(id(start))
        while step is not None:
            in_dictionary = re.fullmatch(r"\['(\w+)'\]", step.label)
            if owner is not None and in_dictionary:
                last = owner, in_dictionary[1]
            elif step.label.startswith("[") and current is not start:
                break
            elif step.label.startswith(".") and len(step.label) > 1:
                last = current, step.label[1:]
            # An attribute comes as two steps, as below.
            owner = current if step.label == "." else None
            current, step = step.child, self.steps.get(id(step.child))
        return last

    def _path_below(self, start: object) -> str:
        """Write the way from a root down to the target."""
        path, step = "", self.steps.get(id(start))
        while step is not None:
            path += step.label
            step = self.steps.get(id(step.child))
        # An attribute comes as two steps, "." to a dictionary and "['name']" in it.
        return re.sub(r"\.\['(\w+)'\]", r".\1", path)


def _line_of_class(container_class: type) -> str:
    """Find where a container's class, if it is the user's, makes its objects grow."""
    for kind, file in _users_classes(container_class):
        line = mutation_line(file, "self", class_name=kind.__name__, must_grow=True)
        if line:
            return line
    return ""


def _users_classes(kind: type) -> Iterator[tuple[type, str]]:
    """Go through a class and its bases, as far as they are the user's, with files."""
    for base in kind.__mro__:
        file = _file_of_module(base.__module__)
        if file and not is_library_file(file):
            yield base, file


def label_of(parent: object, child: object) -> str | None:
    """Write how a parent refers to a child.

    Args:
        parent: Any object.
        child: One that it refers to.

    Returns:
        Such as ``['loss']``, ``[3]`` or ``.cache``; None if it does not refer to it.
    """
    if is_a(parent, dict):
        return _key_label(parent, child)
    if is_a(parent, list) or is_a(parent, tuple) or is_a(parent, deque):
        for index, item in enumerate(parent):
            if item is child:
                return f"[{index}]"
        return None
    if is_a(parent, types.ModuleType):
        return None  # it refers to its variables' dict alone, which leads on itself
    if all(referent is not child for referent in referents_of([parent])):
        return None
    if is_a(parent, (set, frozenset)):
        return "{...}"
    if is_a(parent, _TRANSPARENT):
        return ""
    return _attribute_label(parent, child)


def _key_label(parent: dict[Any, Any], child: object) -> str | None:
    # A copy: another thread may change the dictionary meanwhile.
    for key, value in list(parent.items()):
        if value is child:
            return f"[{_short_key(key)}]"
        if key is child:
            return "[a key]"
    return None


def _attribute_label(parent: object, child: object) -> str:
    """Name the attribute of an object; its instance dictionary counts as itself."""
    if is_a(parent, type):
        return "."  # the next label is a key of its dictionary
    # object's own way: a class may answer for attributes by running any code.
    with contextlib.suppress(Exception):
        attributes = object.__getattribute__(parent, "__dict__")
        if attributes is child:
            return "."
        for name, value in list(attributes.items()):
            if value is child:
                return f".{name}"
    if is_a(parent, functools._lru_cache_wrapper):
        return " (its lru_cache)"
    for name in _slots_of(type(parent)):
        with contextlib.suppress(Exception):
            if object.__getattribute__(parent, name) is child:
                return f".{name}"
    return f".<{type(parent).__name__}>"


def _slots_of(kind: type) -> Iterator[str]:
    """Name the attributes that objects of a class keep outside a dictionary.

    Those of its bases too: ``__slots__`` of a class lists its own.  They are members
    of the class, by the names that attributes have (``_Owner__cache``).

    >>> class Base:
    ...     __slots__ = "cache"
    >>> class Owner(Base):
    ...     __slots__ = ("__rows",)
    >>> list(_slots_of(Owner))
    ['_Owner__rows', 'cache']
    """
    for base in type.__dict__["__mro__"].__get__(kind):
        for name, value in list(type.__dict__["__dict__"].__get__(base).items()):
            if is_a(value, types.MemberDescriptorType):
                yield name


def _variable_of(frame: types.FrameType, child: object) -> str | None:
    for name, number in local_ids(frame).items():
        if number == id(child):
            return name
    return None


def _belongs_to_search(parent: object) -> bool:
    """Tell whether it is a frame of this search, or a variable of it."""
    if is_a(parent, types.FrameType):
        return is_own_file(parent.f_code.co_filename)
    return is_a(parent, (_Search, _Step, Holder))


def _grown_name(path: str) -> str:
    """Pick the last name of a path, with its dot: the one whose code grows it."""
    owner, dot, name = path.split("[")[0].rpartition(".")
    return dot + name if owner else name


def _as_name(path: str) -> str:
    """Write a module's entry as a name: ``['history'][0]`` is ``history[0]``."""
    if path.startswith("['"):
        name, _, following = path[2:].partition("']")
        return name + following
    return path.lstrip(".")


def _short_key(key: object) -> str:
    numpy = sys.modules.get("numpy")
    if numpy is not None and is_a(key, numpy.generic):
        key = key.item()  # numpy would write np.int64(3)
    if is_a(key, (str, int, float, bool, bytes, type(None))):
        text = repr(key)
        return text if len(text) <= _KEY_LENGTH else text[: _KEY_LENGTH - 3] + "..."
    return f"a {type(key).__name__}"


def _file_of_module(name: str) -> str:
    return getattr(sys.modules.get(name), "__file__", None) or ""


def _place_in(file: str, line: int) -> str:
    return f"{Path(file).name}:{line}"
