"""Puts back what a step changes where no copy of the model reaches.

Code of the user's may keep things outside of the model: a table of rotary embeddings on
a class, a cache in a file, a list that a hook fills.  A step with fake floats would
leave fakes there, and the training would find them.  So all that such code names is
noted before a step, and put back after it.
"""

from __future__ import annotations

import collections
import dis
import functools
import operator
import types
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import Dataset

from loaderkit.budget.step.step_copies import is_of_library
from loaderkit.library_files import is_library_file, is_own_file, names_used_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_MOST_ELEMENTS = 1000
"""Of a container whose elements are looked at in turn; chosen, as for copies of losses:
what is longer holds samples, and no code."""
_MOST_VALUES = 50_000
"""That are looked at; chosen: a model of 1,000 modules has some 30,000."""
_MOST_KEPT_BYTES = 1 << 24
"""Of tensors whose values are kept where a step is run for real; chosen: as much as a
tensor has that a loss reads, and is copied."""
_CACHED_FUNCTION = type(functools.cache(abs))
"""The class has no public name."""
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_ABSENT = object()


@contextmanager
def users_state_kept(*roots: object, with_values: bool = False) -> Iterator[None]:
    """Put back what code of the user's keeps outside of what was copied.

    Args:
        roots: The user's own model and loss.
        with_values: Keep values of tensors too: the step is run for real.
    """
    state = UsersState(with_values=with_values)
    state.note(roots)
    try:
        yield
    finally:
        state.restore()


class _NotedContents(NamedTuple):
    """What a container held."""

    container: Any
    read: Callable[[Any], list[Any]]
    """Lists what is in it now."""
    before: list[Any]
    write: Callable[[Any, list[Any]], None]
    """Puts a list in the place of what is in it."""


class UsersState:
    """What code of the user's can reach and change.

    A cache of ``functools`` cannot be put back, so an empty one stands in its place
    until then.
    """

    def __init__(self, *, with_values: bool = False) -> None:
        """Note nothing yet.

        Args:
            with_values: Keep values of tensors too.
        """
        self._with_values = with_values
        self._seen: dict[int, Any] = {}
        self._empty_caches: dict[int, Any] = {}
        """By the ``id`` of the user's."""
        self._contents: list[_NotedContents] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._gradients: list[tuple[torch.Tensor, Any]] = []
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._kept_bytes = 0

    def note(self, root: object) -> None:
        """Note a value and all that is reached from it."""
        waiting = [root]
        while waiting and len(self._seen) < _MOST_VALUES:
            value = waiting.pop()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                waiting.extend(self._note_one(value))

    def restore(self) -> None:
        """Put everything back that is not as it was."""
        for noted in self._contents:
            now = noted.read(noted.container)
            is_same = len(now) == len(noted.before)
            if not (is_same and all(map(operator.is_, now, noted.before))):
                noted.write(noted.container, noted.before)
        for own_globals, name, value in self._globals:
            if value is _ABSENT:
                own_globals.pop(name, None)
            elif own_globals.get(name, _ABSENT) is not value:
                own_globals[name] = value
        for kind, attributes in self._classes:
            _restore_class(kind, attributes)
        for tensor, gradient in self._gradients:
            if tensor.grad is not gradient:
                tensor.grad = gradient
        with torch.no_grad():
            for tensor, values in self._values:
                if not torch.equal(tensor, values):
                    tensor.copy_(values)

    def _note_one(self, value: Any) -> Iterable[Any]:
        """Note one value, and give what is reached from it."""
        if isinstance(value, torch.Tensor):
            self._note_tensor(value)
            return ()
        if isinstance(value, types.FunctionType):
            return self._note_function(value)
        if isinstance(value, types.MethodType):
            return value.__func__, value.__self__
        if isinstance(value, functools.partial):
            return value.func, *value.args, *value.keywords.values()
        if isinstance(value, property):
            return value.fget, value.fset
        if isinstance(value, (classmethod, staticmethod)):
            return (value.__func__,)
        if isinstance(value, functools.cached_property):
            return (value.func,)
        if isinstance(value, types.CellType):
            return self._note_cell(value)
        if isinstance(value, type):
            return self._note_class(value)
        if isinstance(value, (tuple, list, set, dict, collections.deque)):
            return self._note_container(value)
        # Of what a library wraps (a cache of ``functools``), that is the user's.
        wrapped = getattr(value, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType):
            return (wrapped,)
        return self._note_object(value)

    def _note_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.is_leaf and tensor.requires_grad:
            self._gradients.append((tensor, tensor.grad))
        has_values = tensor.layout is torch.strided and not tensor.is_meta
        if not self._with_values or not has_values or tensor.is_inference():
            return
        if self._kept_bytes + tensor.nbytes <= _MOST_KEPT_BYTES:
            self._values.append((tensor, tensor.detach().clone()))
            self._kept_bytes += tensor.nbytes

    def _note_function(self, function: types.FunctionType) -> Iterable[Any]:
        reached = [
            *(function.__closure__ or ()),
            getattr(function, "__wrapped__", None),
        ]
        if _is_not_users(function.__code__.co_filename):
            # Such as the wrapper of ``torch.no_grad()``: the closure has the user's.
            return reached
        reached += [function.__defaults__, function.__kwdefaults__, vars(function)]
        return [*reached, *self._note_globals(function)]

    def _note_globals(self, function: types.FunctionType) -> Iterator[Any]:
        """Note the globals that a function reads or assigns, and what is in modules."""
        names = names_used_in(function.__code__)
        own_globals = function.__globals__
        # Of names that are none yet, most are of attributes.
        made = _assigned_globals(function.__code__) - own_globals.keys()
        self._globals += [(own_globals, name, _ABSENT) for name in made]
        for name in names & own_globals.keys():
            value = own_globals[name]
            self._globals.append((own_globals, name, value))
            if _is_cache(value):
                own_globals[name] = self._empty_cache(value)
            if isinstance(value, types.ModuleType):
                # Names of attributes are among the names: ``tables.get(n)``.
                yield from self._note_in_module(value, names)
            else:
                yield value

    def _note_in_module(
        self, module: types.ModuleType, names: set[str]
    ) -> Iterator[Any]:
        file = getattr(module, "__file__", None)
        if file is None or _is_not_users(file):
            return
        for name in names & vars(module).keys():
            value = vars(module)[name]
            if not isinstance(value, types.ModuleType):
                self._globals.append((vars(module), name, value))
                if _is_cache(value):
                    setattr(module, name, self._empty_cache(value))
                yield value

    def _note_cell(self, cell: types.CellType) -> Iterable[Any]:
        contents = _read_cell(cell)
        self._contents.append(_NotedContents(cell, _read_cell, contents, _write_cell))
        if contents and _is_cache(contents[0]):
            cell.cell_contents = self._empty_cache(contents[0])
        return contents

    def _note_class(self, kind: type) -> Iterable[Any]:
        """Note the attributes of a class of the user's, and of those it inherits."""
        reached: list[Any] = []
        for base in kind.__mro__:
            if id(base) in self._seen and base is not kind:
                continue
            self._seen[id(base)] = base
            if is_of_library(base) or base.__module__.startswith("loaderkit."):
                continue
            attributes = _own_attributes(base)
            self._classes.append((base, attributes))
            for name, value in attributes.items():
                if _is_cache(value):
                    setattr(base, name, self._empty_cache(value))
            reached += attributes.values()
        return reached

    def _empty_cache(self, cache: Any) -> Any:
        """Make an empty cache of the same function, once."""
        if isinstance(cache, staticmethod):
            return staticmethod(self._empty_cache(cache.__func__))
        if id(cache) not in self._empty_caches:
            make = functools.lru_cache(**cache.cache_parameters())
            self._empty_caches[id(cache)] = make(cache.__wrapped__)
        return self._empty_caches[id(cache)]

    def _note_container(self, container: Any) -> Iterable[Any]:
        if isinstance(container, dict):
            noted = _NotedContents(
                container, _read_dict, _read_dict(container), _write_dict
            )
            self._contents.append(noted)
            inside = list(container.values())
        else:
            inside = list(container)
            if not isinstance(container, tuple):
                write = _write_set if isinstance(container, set) else _write_list
                # A set has an order too, as long as nothing is added to it.
                self._contents.append(_NotedContents(container, list, inside, write))
        return inside if len(inside) <= _MOST_ELEMENTS else ()

    def _note_object(self, value: Any) -> Iterable[Any]:
        attributes = getattr(value, "__dict__", None)
        if attributes is None or isinstance(value, (types.ModuleType, Dataset)):
            return ()
        if not isinstance(value, torch.nn.Module) and is_of_library(type(value)):
            return ()
        return attributes, type(value)


def _assigned_globals(code: types.CodeType) -> set[str]:
    """Name the globals that a function assigns."""
    if _STORE_GLOBAL not in code.co_code[::2]:
        return set()
    instructions = dis.get_instructions(code)
    return {step.argval for step in instructions if step.opcode == _STORE_GLOBAL}


def _is_cache(value: object) -> bool:
    """Tell whether something is a function with a cache of ``functools``."""
    function = value.__func__ if isinstance(value, staticmethod) else value
    return isinstance(function, _CACHED_FUNCTION)


def _own_attributes(kind: type) -> dict[str, Any]:
    """List what a class has itself, without what Python keeps in it."""
    own = vars(kind).items()
    return {name: value for name, value in own if not _is_of_python(name, value)}


def _is_not_users(file: str) -> bool:
    return is_library_file(file) or is_own_file(file)


def _is_of_python(name: str, value: object) -> bool:
    return name.startswith("__") and not isinstance(value, types.FunctionType)


def _restore_class(kind: type, attributes: dict[str, Any]) -> None:
    now = _own_attributes(kind)
    for name in now.keys() - attributes.keys():
        delattr(kind, name)
    for name, value in attributes.items():
        if now.get(name, _ABSENT) is not value:
            setattr(kind, name, value)


def _read_dict(container: dict[Any, Any]) -> list[Any]:
    # Names and values in turn, so that each is compared by itself.
    return [part for item in dict.items(container) for part in item]


def _write_dict(container: dict[Any, Any], before: list[Any]) -> None:
    # One that keeps an order of its own must be told; other classes may have changed
    # what assigning means.
    is_ordered = isinstance(container, collections.OrderedDict)
    kind: Any = collections.OrderedDict if is_ordered else dict
    kind.clear(container)
    kind.update(container, zip(before[::2], before[1::2], strict=True))


def _write_list(container: Any, before: list[Any]) -> None:
    container.clear()
    container.extend(before)


def _write_set(container: set[Any], before: list[Any]) -> None:
    container.clear()
    container.update(before)


def _read_cell(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []  # nothing was assigned yet


def _write_cell(cell: types.CellType, before: list[Any]) -> None:
    if before:
        cell.cell_contents = before[0]
    else:
        del cell.cell_contents
