"""Puts back what a step changes where no copy of the model reaches.

Code of the user's may keep things outside of the model: a table of rotary embeddings on
a class, a cache in a file, a list that a hook fills.  A step with fake floats would
leave fakes there, and the training would find them.  So all that such code names is
noted before a step, and put back after it (``state_snapshots``).

Tensors that code of a library holds are not found so.  The tracker, which sees each
operator, adds those that it comes across to the same snapshots.  A step that is run for
real has no tracker (it would count among what its profile shows): there the values of
all tensors that are found are copied before, up to a bound.
"""

from __future__ import annotations

import collections
import dis
import functools
import threading
import types
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from loaderkit.budget.step.state_snapshots import (
    ARRAYS,
    CONTAINERS,
    GENERATORS,
    Snapshots,
)
from loaderkit.budget.step.step_copies import is_of_library
from loaderkit.library_files import is_library_file, is_own_file, names_used_in
from loaderkit.pyg import is_pyg_data

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MOST_ELEMENTS = 1000
"""Of a container whose elements are looked at in turn; chosen, as for copies of losses:
what is longer holds samples, and no code."""
_MOST_VALUES = 50_000
"""That are looked at; chosen: a model of 1,000 modules has some 30,000."""
_OBJECTS_OF_LIBRARIES = (
    *(types.SimpleNamespace, threading.local, torch.optim.Optimizer),
    *(collections.UserDict, collections.UserList, torch.nn.Module),
)
"""Classes of libraries that hold what the user puts there.  Others are not looked into:
threads of their own may use them meanwhile, as those of a logger that sends."""
_WITHOUT_STATE = frozenset({bool, int, float, str, type(None)})
"""Most of what is reached."""
_CACHED_FUNCTION = type(functools.cache(abs))
"""The class has no public name."""
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]


@contextmanager
def preserve_users_state(
    *roots: object, with_values: bool = False
) -> Iterator[Snapshots]:
    """Put back what code of the user's keeps outside of what was copied.

    Args:
        roots: The user's own model and loss.
        with_values: Copy the values of tensors beforehand: the step is run for real,
            and nobody tells which are about to be written to.

    Yields:
        What is put back, to which more may be added.
    """
    snapshots = Snapshots()
    try:
        UsersState(snapshots, with_values=with_values).note(roots)
        yield snapshots
    finally:
        snapshots.restore()


class UsersState:
    """Finds what code of the user's can reach and change.

    A cache of ``functools`` cannot be put back, so an empty one stands in its place
    until then.
    """

    def __init__(self, snapshots: Snapshots, *, with_values: bool = False) -> None:
        """Find nothing yet.

        Args:
            snapshots: Gets the state of all that is found.
            with_values: Copy the values of tensors too.
        """
        self._snapshots, self._with_values = snapshots, with_values
        self._seen: dict[int, Any] = {}
        self._empty_caches: dict[int, Any] = {}
        """By the ``id`` of the user's."""

    def note(self, root: object) -> None:
        """Note a value and all that is reached from it."""
        waiting = [root]
        while waiting and len(self._seen) < _MOST_VALUES:
            value = waiting.pop()
            if type(value) not in _WITHOUT_STATE and id(value) not in self._seen:
                self._seen[id(value)] = value
                waiting.extend(self._note_one(value))

    def _note_one(self, value: Any) -> Iterable[Any]:
        """Note one value, and give what is reached from it."""
        if isinstance(value, torch.Tensor):
            return self._note_tensor(value)
        if isinstance(value, types.FunctionType):
            return self._note_function(value)
        if isinstance(value, types.MethodType):
            return value.__func__, value.__self__
        if isinstance(value, functools.partial):
            return value.func, *value.args, *value.keywords.values(), vars(value)
        if isinstance(value, property):
            return value.fget, value.fset
        if isinstance(value, (classmethod, staticmethod)):
            return (value.__func__,)
        if isinstance(value, functools.cached_property):
            return (value.func,)
        if isinstance(value, type):
            return self._note_class(value)
        if isinstance(value, (tuple, *CONTAINERS)):
            return self._note_container(value)
        if isinstance(value, ARRAYS):
            self._snapshots.note_array(value)
            return ()
        if isinstance(value, GENERATORS):
            self._snapshots.note_generator(value)
            return ()
        # Of what a library wraps (a cache of ``functools``), that is the user's.
        wrapped = _attribute_or_none(value, "__wrapped__")
        if isinstance(wrapped, types.FunctionType):
            return (wrapped,)
        return self._note_object(value)

    def _note_tensor(self, tensor: torch.Tensor) -> Iterable[Any]:
        self._snapshots.note_tensor(tensor)
        gradient = tensor.grad if tensor.is_leaf else None
        if self._with_values:
            self._snapshots.note_values_within_bound(tensor)
        return [part for part in (gradient, vars(tensor)) if part is not None]

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
        for name in made:
            self._snapshots.note_name(own_globals, name)
        for name in names & own_globals.keys():
            value = self._snapshots.note_name(own_globals, name)
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
                self._snapshots.note_name(vars(module), name)
                if _is_cache(value):
                    setattr(module, name, self._empty_cache(value))
                yield value

    def _note_class(self, kind: type) -> Iterable[Any]:
        """Note the attributes of a class of the user's, and of those it inherits."""
        reached: list[Any] = []
        for base in kind.__mro__:
            if id(base) in self._seen and base is not kind:
                continue
            self._seen[id(base)] = base
            if is_of_library(base) or base.__module__.startswith("loaderkit."):
                continue
            attributes = self._snapshots.note_class(base)
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
        if isinstance(container, tuple):
            inside = list(container)
        else:
            inside = self._snapshots.note_container(container)
        if isinstance(container, types.CellType) and inside and _is_cache(inside[0]):
            container.cell_contents = self._empty_cache(inside[0])
        return inside if len(inside) <= _MOST_ELEMENTS else ()

    def _note_object(self, value: Any) -> Iterable[Any]:
        attributes = _attribute_or_none(value, "__dict__")
        has_attributes = attributes is not None or hasattr(type(value), "__slots__")
        if not has_attributes or isinstance(value, (types.ModuleType, Dataset)):
            return ()
        if not isinstance(value, _OBJECTS_OF_LIBRARIES) and is_of_library(type(value)):
            is_graph = is_pyg_data(value)
            return [attributes, *map(vars, value.stores)] if is_graph else ()
        return attributes, type(value), *self._snapshots.note_slots(value)


def _assigned_globals(code: types.CodeType) -> set[str]:
    """Name the globals that a function assigns."""
    if _STORE_GLOBAL not in code.co_code[::2]:
        return set()
    instructions = dis.get_instructions(code)
    return {step.argval for step in instructions if step.opcode == _STORE_GLOBAL}


def _attribute_or_none(value: object, name: str) -> Any:
    """Look an attribute up where the user's ``__getattr__`` may raise any error.

    Such as the proxy of a request or a connection, outside of which it has none.
    """
    try:
        return getattr(value, name, None)
    except Exception:  # noqa: BLE001 -- it runs code of the user's objects
        return None


def _is_cache(value: object) -> bool:
    """Tell whether something is a function with a cache of ``functools``."""
    function = value.__func__ if isinstance(value, staticmethod) else value
    return isinstance(function, _CACHED_FUNCTION)


def _is_not_users(file: str) -> bool:
    return is_library_file(file) or is_own_file(file)
