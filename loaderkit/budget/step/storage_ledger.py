"""Which storages live while a step is tracked: when each is made, freed and resized.

It writes the log (``allocation_log``), and knows a storage again by torch's own address
of it, which no other storage has while it lives.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from loaderkit.budget.step.allocation_log import Event
from loaderkit.budget.step.measure import (
    has_one_storage,
    optimizer_state,
    parts_of_nested,
    parts_of_sparse,
)
from loaderkit.budget.step.running_module import RunningModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch._subclasses.fake_tensor import FakeTensorMode

    from loaderkit.budget.step.allocation_log import Log, Part, UncertainBytes
    from loaderkit.budget.step.real_values import RealValues
    from loaderkit.budget.step.sparse_fakes import SparseFakes
    from loaderkit.budget.step.state_snapshots import Snapshots

_PARTS_BEFORE: tuple[Part, ...] = ("parameters", "captured")
"""What a step may read that neither its model nor its batch has."""
_USERS: frozenset[Part] = frozenset({"batch", "captured", "parameters"})
"""What was there before the step, and is not its model's own."""


class _LiveStorage(NamedTuple):
    """A storage in the log that is not freed yet."""

    number: int
    nbytes: int
    reference: weakref.ref[Any]
    """Logs that it is freed."""


class StorageLedger:
    """Logs storages as they come and go, each once."""

    def __init__(
        self,
        log: Log,
        *,
        fake: FakeTensorMode,
        sparse: SparseFakes,
        snapshots: Snapshots,
        values: RealValues | None,
    ) -> None:
        """Begin a log.

        Args:
            log: Gets the events.
            fake: Makes the fakes of the step.
            sparse: Knows what fake sparse tensors are made of.
            snapshots: Gets the tensors of the user's that the step comes across.
            values: Computed beside the fakes; counted as real memory.
        """
        self.log, self.modules = log, RunningModule()
        self._fake, self._sparse, self._values = fake, sparse, values
        self._snapshots = snapshots
        self._live: dict[int, _LiveStorage] = {}
        """By torch's own address of the storage object."""
        self.when_freed: list[Callable[[int], None]] = []
        """Called with this address of each storage that is freed."""
        self._real_sizes: dict[int, int] = {}
        self._real_bytes_live = 0
        self._has_resized = False
        self._captured: set[int] = set()
        """Numbers of storages that were there before, but nobody named."""
        self._parameters_of_others: list[torch.nn.Parameter] = []
        """Parameters that are read, and are not the model's."""
        self._before = {part: self._begin(part) for part in _PARTS_BEFORE}
        """Numbers of the events that stand for what was there before."""

    def _begin(self, part: Part) -> int:
        number = len(self.log.events)
        self.log.events.append(Event(number, 0))
        self.log.owners[number] = part
        return number

    def end(self) -> None:
        """Log no more: what is freed from now on is freed whenever Python likes."""
        self._live.clear()
        self.log.order_frees()

    def position(self) -> int:
        """Give the position of the last event."""
        return max(len(self.log.events) - 1, 0)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Give the number of a dense tensor's storage; None if it is not logged."""
        storage = self._live.get(tensor.untyped_storage()._cdata)
        return None if storage is None else storage.number

    def note_uncertain(self, tensor: torch.Tensor, more: UncertainBytes) -> None:
        """Note how much less or more than its size a storage may take."""
        number = self.number_of(tensor)
        if number is not None:
            self.log.corrections[number] = more

    def add_all(self, tensors: Iterable[torch.Tensor], owner: Part) -> None:
        """Log the storages of tensors and what they are."""
        for tensor in tensors:
            self.add(tensor, owner)

    def add(self, tensor: torch.Tensor, owner: Part | None = None) -> list[int]:
        """Log the storages of a tensor, each once; give the numbers of new ones."""
        if tensor.layout is torch.jagged:
            return self._add_parts(parts_of_nested([tensor]), owner)
        if not has_one_storage(tensor):
            return self._add_parts(self.parts_of_sparse(tensor), owner)
        if tensor._is_zerotensor():
            # The tangent of what has none, in forward mode: nobody makes its storage.
            return []
        storage = tensor.untyped_storage()
        if storage._cdata in self._live:
            return []
        number = self._log_made(storage, owner)
        if not isinstance(tensor, FakeTensor):
            size = storage.nbytes()
            self._real_sizes[number] = size
            self._real_bytes_live += size
        values_bytes = self._values.bytes if self._values is not None else 0
        real_bytes = self._real_bytes_live + values_bytes
        self.log.real_bytes = max(self.log.real_bytes, real_bytes)
        return [number]

    def _add_parts(self, parts: list[Any], owner: Part | None) -> list[int]:
        return [number for part in parts for number in self.add(part, owner)]

    def parts_of_sparse(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """List the dense tensors that a sparse one is made of."""
        known_parts = self._sparse.parts_of(tensor)
        if known_parts is not None:
            return known_parts
        is_fake = isinstance(tensor, FakeTensor)
        return parts_of_sparse(tensor, self._fake if is_fake else None)

    def add_alias(self, fake: torch.Tensor, real_key: int) -> None:
        """Let the fake of a real tensor stand for its storage, without another one.

        Args:
            fake: Made now.
            real_key: Torch's address of the real tensor's storage.
        """
        original = self._live.get(real_key)
        storage = fake.untyped_storage()
        key = storage._cdata
        if key in self._live or original is None:
            return
        when_freed = functools.partial(self._forget_alias, key)
        reference = weakref.ref(storage, when_freed)
        self._live[key] = _LiveStorage(original.number, 0, reference)

    def _forget_alias(self, key: int, ref: object) -> None:
        alias = self._live.get(key)
        # Another storage may have the address by now.
        if alias is not None and alias.reference is ref:
            del self._live[key]

    def _log_made(self, storage: torch.UntypedStorage, owner: Part | None) -> int:
        """Log that a storage lives, and see to it that its end is logged."""
        key, size = storage._cdata, storage.nbytes()
        number = len(self.log.events)
        when_freed = functools.partial(self._log_freed, key, number)
        self._live[key] = _LiveStorage(number, size, weakref.ref(storage, when_freed))
        self.log.events.append(Event(number, size))
        if owner is not None:
            self.log.owners[number] = owner
        self.log.modules[number] = self.modules.name_now()
        return number

    def _log_freed(self, key: int, number: int, _ref: object = None) -> None:
        storage = self._live.get(key)
        # Another storage may have the address by now.
        if storage is None or storage.number != number:
            return
        del self._live[key]
        if number in self._captured:
            # It was made in the step, by no operator, such as torch.from_numpy.
            self._captured.discard(number)
            del self.log.owners[number]
        for forget in self.when_freed:
            forget(key)
        self.log.events.append(Event(number, -storage.nbytes))
        self._real_bytes_live -= self._real_sizes.pop(number, 0)

    def free(self, tensor: torch.Tensor) -> None:
        """Log that a storage ends: a result that takes its place is logged anew."""
        number = self.number_of(tensor)
        if number is not None:
            self._log_freed(tensor.untyped_storage()._cdata, number)

    def note_captured(self, operands: Iterable[torch.Tensor]) -> None:
        """Log what an operator reads that no operator made, and nobody named."""
        for tensor in operands:
            if tensor.layout is torch.jagged or tensor._is_zerotensor():
                continue
            if has_one_storage(tensor):
                components = [tensor]
            elif isinstance(tensor, FakeTensor) or self._sparse.parts_of(tensor):
                continue
            else:
                components = parts_of_sparse(tensor, None)
            for component in components:
                if component.untyped_storage()._cdata not in self._live:
                    self._log_captured(component)

    def _log_captured(self, tensor: torch.Tensor) -> None:
        part: Part = "captured"
        if isinstance(tensor, torch.nn.Parameter):
            part = "parameters"
            self._parameters_of_others.append(tensor)
        self._captured.add(self._log_made(tensor.untyped_storage(), part))
        is_real = not isinstance(tensor, FakeTensor)
        if is_real and tensor.requires_grad and tensor.is_leaf:
            # Others may have been made in the step, and end in it.
            self._snapshots.note_tensor(tensor)

    def move_captured_to_beginning(self) -> None:
        """Log what was there before the step as it was: from the beginning on."""
        for number in self._captured:
            before = self._before[self.log.owners[number]]
            size = self.log.events[before].change + self.log.events[number].change
            self.log.events[before] = Event(before, size)
            self.log.events[number] = Event(number, 0)

    def note_resized(self, tensors: Iterable[torch.Tensor]) -> None:
        """Log storages that were resized without an operator.

        Invertible layers free their inputs so, and in the backward pass their outputs.
        The first time it is an argument of a module; from then on all are looked at.
        """
        for tensor in tensors:
            if not has_one_storage(tensor) or tensor.layout is torch.jagged:
                continue
            try:
                storage = tensor.untyped_storage()
            except NotImplementedError:
                # In a module that vmap, grad or jvp calls, tensors are wrapped.
                continue
            self._has_resized |= self._log_if_resized(storage)
        if self._has_resized:
            for live in list(self._live.values()):
                live_storage = live.reference()
                if live_storage is not None:
                    self._log_if_resized(live_storage)

    def note_written(self, tensors: Iterable[torch.Tensor]) -> None:
        """Log the sizes of what an operator wrote to.

        ``resize_`` and ``out=`` write to what was perhaps empty until now.
        """
        for tensor in tensors:
            if has_one_storage(tensor):
                self._log_if_resized(tensor.untyped_storage())

    def _log_if_resized(self, storage: torch.UntypedStorage) -> bool:
        """Log the new size of a storage, if it has one; tell whether it has."""
        before = self._live.get(storage._cdata)
        if before is None or before.nbytes == storage.nbytes():
            return False
        if before.nbytes != self.log.events[before.number].change:
            # It is an alias of a real storage, and takes nothing here.
            return False
        self._log_freed(storage._cdata, before.number)
        self._log_made(storage, self.log.owners.get(before.number))
        return True

    def is_users(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor was there before the step: the batch's, or captured."""
        if not has_one_storage(tensor):
            tensor = self.parts_of_sparse(tensor)[-1]
        number = self.number_of(tensor)
        return number is not None and self.log.owners.get(number) in _USERS

    def unowned_bytes(self) -> int:
        """Sum what lives and is nothing of the step's own, once all is labelled."""
        return sum(
            storage.nbytes
            for storage in self._live.values()
            if storage.number not in self.log.owners
        )

    def label_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Name the storages of gradients."""
        for parameter in [*parameters, *self._parameters_of_others]:
            if parameter.grad is not None:
                self._label_storage(parameter.grad, "gradients")

    def label_state(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Name the storages of the optimizer's state."""
        for tensor in optimizer_state(optimizer):
            self._label_storage(tensor, "optimizer state")

    def _label_storage(self, tensor: torch.Tensor, owner: Part) -> None:
        if not has_one_storage(tensor):
            for component in self.parts_of_sparse(tensor):
                self._label_storage(component, owner)
            return
        number = self.number_of(tensor)
        if number is None:
            return
        if number in self._captured:
            # An optimizer makes its counts of steps before they are read.
            self._captured.discard(number)
            self.log.owners[number] = owner
        self.log.owners.setdefault(number, owner)
