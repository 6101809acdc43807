"""Tells whether a step can be run for real within a bound, without exceeding it.

Small batches are no bound: a difference of all pairs makes 100 MB of 30 kB in one call.
So each operator is asked what it would give before it runs.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import TorchDispatchMode

from loaderkit.budget.step.call_arguments import tensors_in
from loaderkit.budget.step.fake_tensors import (
    make_fake_mode,
    without_torch_logging,
)
from loaderkit.budget.step.measure import has_one_storage, real_copies
from loaderkit.budget.step.train_step import make_optimizer, run_step
from loaderkit.budget.step.users_state import preserve_users_state
from loaderkit.randomness import preserve_random_states

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch._ops import OpOverload

    from loaderkit.budget.step.call_arguments import Args, Kwargs
    from loaderkit.budget.step.train_step import Step


class _BoundReachedError(Exception):
    """The next operator would exceed the bound."""


def runs_within(
    model: torch.nn.Module, batch: object, step: Step, limit_bytes: int
) -> bool:
    """Run a step for real until an operator would take more than a bound.

    Args:
        model: A module on the CPU; a copy is trained.
        batch: What it is called with; a copy is used.
        step: How a step is made.
        limit_bytes: What all operators may take at once; not what is there before.

    Returns:
        Whether the whole step ran.
    """
    copies = real_copies(model, batch, step)
    optimizer = make_optimizer(model, copies)
    try:
        with (
            warnings.catch_warnings(),
            preserve_random_states(),
            preserve_users_state(model, step.loss, with_values=True),
            without_torch_logging(),
            _BoundedMode(limit_bytes),
        ):
            warnings.simplefilter("ignore")
            run_step(copies.model, copies.batch, optimizer, copies.step)
    except _BoundReachedError:
        return False
    return True


class _BoundedMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operators make, and raises before it is too much."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit_bytes = limit_bytes
        self._live: dict[int, weakref.ref[Any]] = {}
        self._live_bytes = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        if any(kind is NestedTensor for kind in types):
            # Its class then does the operator with the tensors it is made of.
            return NotImplemented
        kwargs = kwargs or {}
        if not func.is_view:
            more_bytes = _output_bytes(func, args, kwargs)
            if self._live_bytes + more_bytes > self._limit_bytes:
                raise _BoundReachedError
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            if has_one_storage(tensor):
                self._count_storage(tensor.untyped_storage())
        return out

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001 -- an identity, never read
        if key not in self._live:
            when_freed = functools.partial(self._on_freed, key, size)
            self._live[key] = weakref.ref(storage, when_freed)
            self._live_bytes += size

    def _on_freed(self, key: int, size: int, ref: object) -> None:
        # Another storage may have the address by now.
        if self._live.get(key) is ref:
            del self._live[key]
            self._live_bytes -= size


def _output_bytes(func: OpOverload, args: Args, kwargs: Kwargs) -> int:
    """Ask torch's rules what an operator would give; 0 where there is none."""
    try:
        with make_fake_mode():
            out = func(*args, **kwargs)
    except Exception:  # noqa: BLE001 -- any operator may refuse fake tensors
        return 0
    outputs = [tensor for tensor in tensors_in(out) if has_one_storage(tensor)]
    return sum(tensor.numel() * tensor.itemsize for tensor in outputs)
