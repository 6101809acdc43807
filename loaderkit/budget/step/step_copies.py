"""Copies of what a step uses, so that nothing of the user's is changed.

Of the model, of the batch, and of the loss with all that it reaches: a loss may have
parameters (ArcFace), a teacher or a running mean, or be a function that uses the model.
What cannot be copied, such as a global that ``forward`` reads, is put back as it was
(``users_state``).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import Dataset

from loaderkit.library_files import is_library_file, names_used_in
from loaderkit.nests import flatten_tensors, map_tensors
from loaderkit.pyg import is_pyg_data

if TYPE_CHECKING:
    from collections.abc import Callable

    from loaderkit.budget.step.train_step import Step

_CONTAINERS = (list, tuple, dict)
_MOST_ELEMENTS = 1000
"""Of a list or dict that is copied; chosen: no loss computes with more, and a list of
graphs that an object keeps beside has more."""


class StepCopies(NamedTuple):
    """What a step is run on."""

    model: Any
    batch: Any
    step: Step
    """With a copy of its loss."""
    loss_parameters: dict[int, torch.nn.Parameter]
    """Copies of parameters that the loss has and the model has not, by the ``id`` of
    the user's."""

    def all_parameters(self) -> list[torch.nn.Parameter]:
        """List the parameters of model and loss."""
        return [*self.model.parameters(), *self.loss_parameters.values()]


def step_copies(
    model: torch.nn.Module,
    batch: object,
    step: Step,
    *,
    copy_model: Callable[[torch.nn.Module, dict[int, Any]], Any],
    copy_batch: Callable[[object], Any],
    copy_tensor: Callable[[torch.Tensor], torch.Tensor],
) -> StepCopies:
    """Copy a model, a batch and a loss.

    Args:
        model: A module; not changed.
        batch: Not changed.
        step: How a step is made.
        copy_model: Copies a model, and notes by ``id`` what it has copied.
        copy_batch: Copies a batch.
        copy_tensor: Copies a tensor that the loss reads.

    Returns:
        The copies.
    """
    copies: dict[int, Any] = {}
    twin, own_batch = copy_model(model, copies), copy_batch(batch)
    # The loss may read the batch's tensors by itself.
    tensors, own_tensors = flatten_tensors(batch), flatten_tensors(own_batch)
    copies.update(zip(map(id, tensors), own_tensors, strict=True))
    copier = LossCopier(copy_tensor, copies)
    own_step = step.replace(loss=copier.copy(step.loss))
    return StepCopies(twin, own_batch, own_step, copier.parameters)


def copy_of_model(model: torch.nn.Module, memo: dict[int, Any]) -> Any:
    """Copy a module; the copy shares what refuses to be copied, such as a lock.

    What it shares is the user's own, and is put back as it was (``users_state``).

    Args:
        model: A module; not changed.
        memo: What is copied already, by the ``id`` of the user's, as ``copy.deepcopy``
            keeps it; gets what is copied here.

    Returns:
        The copy.

    Raises:
        Exception: A module of it refuses.
    """
    given = dict(memo)
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # noqa: BLE001 -- a lock, a file, a class of the user's
        # It may hold copies that are half made.
        memo.clear()
        memo.update(given)
        refusing = _RefusingParts(memo)
        refusing.find_in(vars(model))
        memo.update(refusing.found)
        return copy.deepcopy(model, memo)


class _RefusingParts:
    """Finds what ``copy.deepcopy`` cannot copy.

    Args:
        memo: What is copied already, by the ``id`` of the user's.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._seen: set[int] = set()
        self.found: dict[int, Any] = {}
        """The smallest such parts, by ``id``."""

    def find_in(self, parts: dict[Any, Any]) -> None:
        """Look at the parts of a container, an object or a module, by name."""
        for name, part in parts.items():
            if id(part) in self._seen or self._can_be_copied(part):
                continue
            self._seen.add(id(part))
            self.find_in(_parts_of(part))
            # A step of the user's own modules is none of a copy.
            may_be_shared = name != "_modules" and not isinstance(part, torch.nn.Module)
            if may_be_shared and not self._can_be_copied(part):
                self.found[id(part)] = part

    def _can_be_copied(self, part: object) -> bool:
        try:
            copy.deepcopy(part, self._memo | self.found)
        except Exception:  # noqa: BLE001 -- it runs code of the user's objects
            return False
        return True


def _parts_of(value: Any) -> dict[Any, Any]:
    """Give what a container, a module or an object of the user's own class holds."""
    if type(value) is dict:
        return value
    if type(value) in _CONTAINERS:
        return dict(enumerate(value))
    # Threads of a library's object, such as a logger's, would find half of a copy.
    if is_of_library(type(value)) and not isinstance(value, torch.nn.Module):
        return {}
    try:
        return dict(vars(value))
    except Exception:  # noqa: BLE001 -- it has no attributes, or refuses
        return {}


def bytes_of_loss(model: torch.nn.Module, batch: object, step: Step) -> int:
    """Sum what a loss reaches that is neither its model's nor its batch's.

    Args:
        model: A module.
        batch: What it is called with.
        step: How a step is made.

    Returns:
        Bytes that a copy of the loss takes.
    """
    reached_bytes = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal reached_bytes
        reached_bytes += tensor.nbytes
        return torch.empty_like(tensor, device="meta")

    known: list[Any] = [model, *model.parameters(), *model.buffers()]
    known += flatten_tensors(batch)
    LossCopier(count, {id(value): value for value in known}).copy(step.loss)
    return reached_bytes


class LossCopier:
    """Copies a loss with all that it reaches: modules, tensors, functions, objects.

    What a library made is left as it is, unless it is a module, a tensor or a graph: an
    optimizer, a dataset or a logger is nothing that a loss computes with.
    """

    def __init__(
        self,
        copy_tensor: Callable[[torch.Tensor], torch.Tensor],
        copies: dict[int, Any],
    ) -> None:
        """Prepare.

        Args:
            copy_tensor: Copies one tensor: with memory, or as a fake.
            copies: Copies that are there already, by the ``id`` of what was copied, as
                ``copy.deepcopy`` keeps them: of the model and its parameters, and of
                the batch's tensors.
        """
        self._copy_tensor = copy_tensor
        self._copies = copies
        self._copied: list[Any] = []
        """What was copied: while it lives, nothing else gets its ``id``."""
        self.parameters: dict[int, torch.nn.Parameter] = {}
        """Copies of parameters that are none of the model's, by the ``id`` of the
        user's."""

    def copy(self, value: Any) -> Any:
        """Copy a value; give the value itself where nothing in it need be copied."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        self._copied.append(value)
        if isinstance(value, torch.Tensor):
            twin: Any = self._copy_of_tensor(value)
        elif isinstance(value, torch.nn.Module):
            twin = self._copy_of_module(value)
        elif isinstance(value, types.FunctionType):
            return self._copy_of_function(value)
        elif isinstance(value, types.MethodType):
            owner = self.copy(value.__self__)
            is_same = owner is value.__self__
            twin = value if is_same else types.MethodType(value.__func__, owner)
        elif isinstance(value, functools.partial):
            twin = self._copy_of_partial(value)
        elif is_pyg_data(value):
            twin = map_tensors(self.copy, value)
        elif type(value) in _CONTAINERS:
            twin = self._copy_of_container(value)
        else:
            return self._copy_of_object(value)
        self._copies[id(value)] = twin
        return twin

    def _copy_of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() and not tensor.is_complex():
            return self._copy_tensor(tensor)
        twin = self._copy_tensor(tensor.detach())
        if isinstance(tensor, torch.nn.Parameter):
            parameter = torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
            self.parameters[id(tensor)] = parameter
            return parameter
        return twin.requires_grad_(tensor.requires_grad)

    def _copy_of_module(self, module: torch.nn.Module) -> Any:
        for inner in module.modules():
            # A tensor that is a plain attribute is no buffer, and is used all the same.
            held = [*inner.parameters(False), *inner.buffers(False)]
            for tensor in [*held, *flatten_tensors(list(vars(inner).values()))]:
                self.copy(tensor)
        try:
            # deepcopy takes what is in the memo for copied already.
            return copy.deepcopy(module, self._copies)
        except Exception:  # noqa: BLE001 -- a lock or a handle: then it is used itself
            return module

    def _copy_of_function(self, function: types.FunctionType) -> Any:
        """Copy a function of the user's with the closure and globals that it reads."""
        if is_library_file(function.__code__.co_filename):
            return function
        cells = function.__closure__ or ()
        twin = types.FunctionType(
            function.__code__,
            dict(function.__globals__),
            function.__name__,
            closure=tuple(types.CellType() for _ in cells),
        )
        # A function may call itself: its twin calls the twin.
        self._copies[id(function)] = twin
        twin.__defaults__ = self.copy(function.__defaults__)
        twin.__kwdefaults__ = self.copy(function.__kwdefaults__)
        is_same = (
            twin.__defaults__ is function.__defaults__
            and twin.__kwdefaults__ is function.__kwdefaults__
        )
        for cell, cell_of_twin in zip(cells, twin.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # nothing was assigned yet
                cell_of_twin.cell_contents = self.copy(cell.cell_contents)
                is_same &= cell_of_twin.cell_contents is cell.cell_contents
        for name in names_used_in(function.__code__) & function.__globals__.keys():
            value = function.__globals__[name]
            twin.__globals__[name] = self.copy(value)
            is_same &= twin.__globals__[name] is value
        if is_same:
            self._copies[id(function)] = function
            return function
        twin.__dict__.update(function.__dict__)
        twin.__module__, twin.__qualname__ = function.__module__, function.__qualname__
        return twin

    def _copy_of_partial(self, partial: functools.partial[Any]) -> Any:
        func = self.copy(partial.func)
        args = self._copy_of_container(partial.args)
        keywords = self._copy_of_container(partial.keywords)
        is_same = func is partial.func and args is partial.args
        if is_same and keywords is partial.keywords:
            return partial
        return functools.partial(func, *args, **keywords)

    def _copy_of_container(self, container: Any) -> Any:
        if len(container) > _MOST_ELEMENTS:
            return container
        # It may hold itself.
        self._copies[id(container)] = container
        if isinstance(container, dict):
            twin = {name: self.copy(value) for name, value in container.items()}
            is_same = all(twin[name] is container[name] for name in twin)
            return container if is_same else twin
        values = list(container)
        copies = [self.copy(value) for value in values]
        if all(map(operator.is_, copies, values)):
            return container
        return type(container)(copies)

    def _copy_of_object(self, value: Any) -> Any:
        """Copy an object of a class of the user's own, if it holds what must be."""
        attributes = getattr(value, "__dict__", None)
        if not attributes or isinstance(value, (type, types.ModuleType, Dataset)):
            return value
        if is_of_library(type(value)):
            return value
        # It may hold itself.
        self._copies[id(value)] = value
        try:
            twin = copy.copy(value)
        except Exception:  # noqa: BLE001 -- any object may refuse
            return value
        self._copies[id(value)] = twin
        twin.__dict__.update(
            {name: self.copy(held) for name, held in attributes.items()}
        )
        return twin


def is_of_library(kind: type) -> bool:
    """Tell whether a class is a library's, and not the user's own."""
    try:
        return is_library_file(inspect.getfile(kind))
    except (TypeError, OSError):
        # Built in, or written at a prompt: classes of "__main__" are the user's.
        return kind.__module__ != "__main__"
