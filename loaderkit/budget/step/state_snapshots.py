"""States of objects of the user's, read before a step and put back after it.

``users_state`` finds what code of the user's names, and has it noted ahead of a step;
``tracker`` adds the tensors that operators come across, which a library may hold.  Both
write into one ``Snapshots``.  Each kind of object has its own way to be read and put
back; nothing is written where nothing has changed, except to generators and sparse
tensors.

Three things are not put back: an iterator, which Python does not set back; a hook that
was given to a tensor, which no public name lists; and what is written through numpy to
a tensor, where the tracker sees no operator (a step that is run for real has copies).
"""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import operator
import random
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_VALUE_BYTES = 1 << 24
"""Of arrays, and of tensors ahead of a step that is run for real, whose values are
copied; chosen: as much as a tensor has that a loss reads, and is copied."""
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Those of other classes have memory of their own kind, if any."""
_ABSENT = object()


class Snapshots:
    """What objects of the user's held when they were first noted."""

    def __init__(self) -> None:
        """Note nothing yet."""
        self._tensors: dict[int, _TensorState] = {}
        """By the ``id`` of the tensor, which no other has while it is held here."""
        self._values: dict[int, _TensorValues] = {}
        """The same, in the order in which they were copied."""
        self._containers: list[_ContainerState] = []
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._restorers: list[Callable[[], object]] = []
        self._value_bytes = 0

    def note_tensor(self, tensor: torch.Tensor) -> None:
        """Note which memory a tensor stands for, and its gradient."""
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = _TensorState(tensor)

    def note_values(self, tensor: torch.Tensor) -> None:
        """Copy the values of a tensor that is about to be written to."""
        has_values = not tensor.is_meta and not tensor.is_nested
        if has_values and not tensor.is_inference() and id(tensor) not in self._values:
            self.note_tensor(tensor)
            memory = self._tensors[id(tensor)].memory
            values = _TensorValues(
                tensor if memory is None else memory, tensor.detach().clone()
            )
            self._values[id(tensor)] = values

    def note_values_within_bound(self, tensor: torch.Tensor) -> None:
        """Copy the values of a tensor that may be written to, if there are few."""
        # Sparse ones do not tell their bytes: as if they were dense.
        if self._has_room_for(tensor.numel() * tensor.element_size()):
            self.note_values(tensor)

    def note_array(self, values: np.ndarray | bytearray | array.array[Any]) -> None:
        """Copy the values of an array, if there are few."""
        if isinstance(values, np.ndarray):
            if values.flags.writeable and self._has_room_for(values.nbytes):
                restore = functools.partial(_restore_array, values, values.copy())
                self._restorers.append(restore)
        elif self._has_room_for(memoryview(values).nbytes):
            restore = functools.partial(_restore_buffer, values, values[:])
            self._restorers.append(restore)

    def note_generator(self, generator: Any) -> None:
        """Note the state of a generator of random numbers, one of ``GENERATORS``."""
        set_back: Callable[[Any], object]
        state: Any
        if isinstance(generator, torch.Generator):
            set_back, state = generator.set_state, generator.get_state()
        elif isinstance(generator, np.random.RandomState):
            set_back, state = generator.set_state, generator.get_state(legacy=False)
        elif isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            set_back, state = functools.partial(setattr, bits, "state"), bits.state
        elif isinstance(generator, random.SystemRandom):
            return  # it has no state
        else:
            set_back, state = generator.setstate, generator.getstate()
        self._restorers.append(functools.partial(set_back, state))

    def note_container(self, container: Any) -> list[Any]:
        """Note what is in one of ``CONTAINERS``, and list it: of dicts the values."""
        read, write = _WAYS.get(type(container)) or _way_of_subclass(container)
        before = read(container)
        self._containers.append(_ContainerState(container, read, before, write))
        return before[1::2] if isinstance(container, _DICTS) else before

    def note_slots(self, value: object) -> list[Any]:
        """Note the attributes of an object that are in slots, and list them."""
        slots = _slots_of(type(value))
        if not slots:
            return []
        read = functools.partial(_read_slots, slots)
        write = functools.partial(_write_slots, slots)
        before = read(value)
        self._containers.append(_ContainerState(value, read, before, write))
        return before

    def note_name(self, namespace: dict[str, Any], name: str) -> Any:
        """Note what a name stands for; None where it stands for nothing yet."""
        value = namespace.get(name, _ABSENT)
        self._names.append((namespace, name, value))
        return None if value is _ABSENT else value

    def note_class(self, kind: type) -> dict[str, Any]:
        """Note what a class has itself, and list it by name."""
        attributes = _own_attributes(kind)
        self._classes.append((kind, attributes))
        return attributes

    def restore(self) -> None:
        """Put everything back that is not as it was."""
        for container in self._containers:
            container.restore()
        for namespace, name, value in self._names:
            if value is _ABSENT:
                namespace.pop(name, None)
            elif namespace.get(name, _ABSENT) is not value:
                namespace[name] = value
        for kind, attributes in self._classes:
            _restore_class(kind, attributes)
        for restore in self._restorers:
            restore()
        for state in self._tensors.values():
            state.restore()
        # Of two views of the same memory the first was copied before any change.
        for values in reversed(self._values.values()):
            values.restore()

    def _has_room_for(self, nbytes: int) -> bool:
        has_room = self._value_bytes + nbytes <= _MOST_VALUE_BYTES
        self._value_bytes += nbytes if has_room else 0
        return has_room


class _TensorState:
    """A tensor as it was, but for its values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._is_leaf = tensor.is_leaf
        self._requires_grad = tensor.requires_grad
        self._gradient = tensor.grad if tensor.is_leaf else None
        self.memory: torch.Tensor | None = None
        """Another tensor of the same memory, which stays with it where the user's is
        given other memory or another shape."""
        self._storage_bytes = 0
        is_plain = type(tensor) in _PLAIN_TENSORS and _has_strides(tensor)
        if is_plain and not tensor.is_inference():
            self.memory = tensor.detach()
            self._storage_bytes = tensor.untyped_storage().nbytes()

    def restore(self) -> None:
        tensor = self._tensor
        if self.memory is not None:
            storage = self.memory.untyped_storage()
            if storage.nbytes() < self._storage_bytes:
                storage.resize_(self._storage_bytes)
            if not _is_same_memory(tensor, self.memory):
                tensor.data = self.memory
        if not self._is_leaf:
            return
        if not tensor.is_leaf:
            # An operator wrote what has a gradient into it; a view follows its base.
            with contextlib.suppress(RuntimeError):
                tensor.detach_()
        if tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        if tensor.grad is not self._gradient:
            tensor.grad = self._gradient


class _TensorValues(NamedTuple):
    """What a tensor held."""

    memory: torch.Tensor
    """The user's, or another one of the same memory."""
    before: torch.Tensor

    @torch.no_grad()
    def restore(self) -> None:
        # Torch does not compare two sparse tensors.
        is_dense = self.memory.layout is torch.strided
        if not is_dense or not torch.equal(self.memory, self.before):
            self.memory.copy_(self.before)


def _has_strides(tensor: torch.Tensor) -> bool:
    # A nested tensor may say that it is strided, and has no shape to compare.
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two tensors are the same elements of the same memory."""
    if first.device != second.device or first.dtype != second.dtype:
        return False
    is_same_place = first.data_ptr() == second.data_ptr()
    is_same_form = first.shape == second.shape and first.stride() == second.stride()
    return is_same_place and is_same_form


class _ContainerState(NamedTuple):
    """What a container held."""

    container: Any
    read: Callable[[Any], list[Any]]
    """Lists what is in it now."""
    before: list[Any]
    write: Callable[[Any, list[Any]], None]
    """Puts a list in the place of what is in it."""

    def restore(self) -> None:
        now = self.read(self.container)
        is_same = len(now) == len(self.before)
        if not (is_same and all(map(operator.is_, now, self.before))):
            self.write(self.container, self.before)


def _restore_array(values: np.ndarray, before: np.ndarray) -> None:
    # Memory that is mapped from a file is not written to for nothing.
    if values.dtype.hasobject or not np.array_equal(values, before):
        np.copyto(values, before)


def _restore_buffer(values: Any, before: Any) -> None:
    if values != before:
        values[:] = before


def _own_attributes(kind: type) -> dict[str, Any]:
    """List what a class has itself, without what Python keeps in it."""
    own = vars(kind).items()
    return {name: value for name, value in own if not _is_of_python(name, value)}


def _is_of_python(name: str, value: object) -> bool:
    return name.startswith("__") and not isinstance(value, types.FunctionType)


def _restore_class(kind: type, attributes: dict[str, Any]) -> None:
    now = _own_attributes(kind)
    for name in now.keys() - attributes.keys():
        delattr(kind, name)
    for name, value in attributes.items():
        if now.get(name, _ABSENT) is not value:
            setattr(kind, name, value)


def _read_dict(container: Any) -> list[Any]:
    # Names and values in turn, so that each is compared by itself.
    return [part for item in dict.items(container) for part in item]


def _write_dict(container: Any, before: list[Any]) -> None:
    dict.clear(container)
    dict.update(container, zip(before[::2], before[1::2], strict=True))


def _read_ordered_dict(container: Any) -> list[Any]:
    # It keeps an order of its own, which ``dict`` does not see.
    items = collections.OrderedDict.items(container)
    return [part for item in items for part in item]


def _write_ordered_dict(container: Any, before: list[Any]) -> None:
    collections.OrderedDict.clear(container)
    # ``update`` would assign by the method of the user's class.
    for name, value in zip(before[::2], before[1::2], strict=True):
        collections.OrderedDict.__setitem__(container, name, value)


def _read_weak_dict(container: Any) -> list[Any]:
    return [part for item in container.items() for part in item]


def _write_weak_dict(container: Any, before: list[Any]) -> None:
    container.clear()
    container.update(zip(before[::2], before[1::2], strict=True))


def _write_list(container: Any, before: list[Any]) -> None:
    list.clear(container)
    list.extend(container, before)


def _read_set(container: Any) -> list[Any]:
    return [*set.__iter__(container)]


def _write_set(container: Any, before: list[Any]) -> None:
    set.clear(container)
    set.update(container, before)


def _read_deque(container: Any) -> list[Any]:
    return [*collections.deque.__iter__(container)]


def _write_deque(container: Any, before: list[Any]) -> None:
    collections.deque.clear(container)
    collections.deque.extend(container, before)


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


def _way_of_subclass(container: Any) -> Any:
    return next(way for kind, way in _WAYS.items() if isinstance(container, kind))


def _slots_of(kind: type) -> list[Any]:
    """List the descriptors of a class that find an attribute in its slot."""
    return [
        member
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for member in vars(base).values()
        if isinstance(member, types.MemberDescriptorType)
    ]


def _read_slots(slots: list[Any], value: object) -> list[Any]:
    contents = []
    for slot in slots:
        try:
            contents.append(slot.__get__(value))
        except AttributeError:
            contents.append(_ABSENT)
    return contents


def _write_slots(slots: list[Any], value: object, before: list[Any]) -> None:
    for slot, contents in zip(slots, before, strict=True):
        if contents is not _ABSENT:
            # By the class's descriptor: a frozen dataclass assigns nothing itself.
            slot.__set__(value, contents)
        else:
            with contextlib.suppress(AttributeError):
                slot.__delete__(value)


_WEAK_DICTS = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_DICTS = (dict, *_WEAK_DICTS)
_WAYS: dict[Any, tuple[Callable[[Any], list[Any]], Callable[[Any, list[Any]], None]]]
_WAYS = {
    collections.OrderedDict: (_read_ordered_dict, _write_ordered_dict),
    dict: (_read_dict, _write_dict),
    list: (list.copy, _write_list),
    # A set has an order too, as long as nothing is added to it.
    set: (_read_set, _write_set),
    collections.deque: (_read_deque, _write_deque),
    types.CellType: (_read_cell, _write_cell),
    **dict.fromkeys(_WEAK_DICTS, (_read_weak_dict, _write_weak_dict)),
}
"""How the contents of a container are listed, and how a list is put in their place: by
Python's own methods, since classes of users may have changed what theirs do.  Of two
classes that fit the first holds."""
CONTAINERS = tuple(_WAYS)
ARRAYS = (np.ndarray, bytearray, array.array)
GENERATORS = (
    *(torch.Generator, np.random.Generator, np.random.RandomState),
    random.Random,
)
