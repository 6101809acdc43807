"""Real values beside fake tensors, where they decide a shape and are few."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from loaderkit.budget.step.call_arguments import written_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._ops import OpOverload

    from loaderkit.budget.step.call_arguments import Args, Kwargs

LIMIT_BYTES = 14 << 20
"""What the values may take at once; with small integers and the kernels that are tried
an estimate stays below the 16 MB that the documentation states."""
_LARGEST_READ_BYTES = 256 << 20
"""No operator that reads more is computed: it would take long, though no memory.
Chosen."""


class Value(NamedTuple):
    """What a fake tensor stands for."""

    real: torch.Tensor
    trained: bool
    """Whether it depends on parameters or random numbers: the next step has another."""


class RealValues:
    """Computes the values of fake tensors as long as they are few."""

    def __init__(self) -> None:
        self._values: Any = WeakTensorKeyDictionary()
        self._given: set[int] = set()
        self._live: dict[int, Any] = {}
        self.bytes = self.highest_bytes = 0

    def name_value(
        self, fake: torch.Tensor, real: torch.Tensor, *, trained: bool
    ) -> None:
        """Name the value of a tensor of the model or the batch, which is only read."""
        # An estimate computes on the CPU alone, and takes no memory of a device.
        if real.device.type == "cpu" and isinstance(fake, FakeTensor):
            self._given.add(_storage_key(real))
            self._values[fake] = Value(real.detach(), trained)

    def name_own_value(
        self, fake: torch.Tensor, real: torch.Tensor, *, trained: bool
    ) -> None:
        """Name the value of a tensor that the step itself made, and may write to."""
        self._values[fake] = Value(real, trained)

    def of(self, tensor: torch.Tensor) -> Value | None:
        """Give a tensor's value; None if it is not known."""
        if isinstance(tensor, FakeTensor):
            value: Value | None = self._values.get(tensor)
            return value
        return Value(tensor, trained=False)

    def compute(self, func: OpOverload, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Compute an operator's values, if those of its operands are known.

        Args:
            func: The operator.
            args: Its arguments, fake ones among them.
            kwargs: Its named ones.
            out: What it gave for them.
        """
        operands = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in tree_iter(out) if isinstance(t, FakeTensor)]
        if not outputs:
            return
        mutated = written_tensors(func, args, kwargs)
        # The fake was written to, and its real twin was not: what it holds is old.
        if not self._can_compute(func, operands, mutated, outputs):
            self._forget_values(mutated)
            return
        is_trained = any(value.trained for value in self._values_of(operands))
        is_trained = is_trained or _draws_random_numbers(func)
        real_args = tree_map(self._real_value, args)
        real_kwargs = tree_map(self._real_value, kwargs)
        try:
            result = func(*real_args, **real_kwargs)
        except Exception:  # noqa: BLE001 -- then the values are not known
            # It may have failed half way through what it writes to.
            self._forget_values(mutated)
            return
        reals = [leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor)]
        fakes = [leaf for leaf in tree_iter(out) if isinstance(leaf, torch.Tensor)]
        for fake, real in zip(fakes, reals, strict=False):
            # No operator was seen that gives another shape for real; a value that does
            # not fit its fake would be read in the wrong places.
            if isinstance(fake, FakeTensor) and fake.shape == real.shape:
                self._name_computed_value(fake, real, trained=is_trained)

    def name_value_if_small(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Name a value that was computed anyway; keep it if there is room for it."""
        if self.bytes + real.untyped_storage().nbytes() <= LIMIT_BYTES:
            self._name_computed_value(fake, real, trained=False)

    def _name_computed_value(
        self, fake: torch.Tensor, real: torch.Tensor, *, trained: bool
    ) -> None:
        self._values[fake] = Value(real, trained)
        self._count_storage(real)

    def _can_compute(
        self,
        func: OpOverload,
        operands: list[torch.Tensor],
        mutated: list[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> bool:
        """Tell whether all values are known, few, and not the user's to be changed."""
        if len(self._values_of(operands)) < len(operands):
            return False
        read_bytes = sum(t.numel() * t.itemsize for t in operands)
        made_bytes = 0
        if not func.is_view:
            made_bytes = sum(t.numel() * t.itemsize for t in outputs)
        if read_bytes > _LARGEST_READ_BYTES or self.bytes + made_bytes > LIMIT_BYTES:
            return False
        # ``_given`` is memory of the user's model and batch: nothing may write there.
        changed_keys = {_storage_key(v.real) for v in self._values_of(mutated)}
        return changed_keys.isdisjoint(self._given)

    def _values_of(self, tensors: list[torch.Tensor]) -> list[Value]:
        """List the values that are known of some tensors."""
        return [value for value in map(self.of, tensors) if value is not None]

    def _real_value(self, leaf: object) -> Any:
        value = self.of(leaf) if isinstance(leaf, FakeTensor) else None
        return leaf if value is None else value.real

    def _count_storage(self, real: torch.Tensor) -> None:
        storage = real.untyped_storage()
        key, size = _storage_key(real), storage.nbytes()
        # A view of what is counted, or of the user's, takes nothing more.
        if key in self._live or key in self._given:
            return
        self._live[key] = weakref.ref(
            storage, functools.partial(self._on_storage_freed, key, size)
        )
        self.bytes += size
        self.highest_bytes = max(self.highest_bytes, self.bytes)

    def _on_storage_freed(self, key: int, size: int, _ref: object) -> None:
        if self._live.pop(key, None) is not None:
            self.bytes -= size

    def _forget_values(self, tensors: list[torch.Tensor]) -> None:
        """Forget what shares memory with tensors whose change is not known."""
        changed = {_storage_key(value.real) for value in self._values_of(tensors)}
        # A list: the dictionary loses entries while fakes die, and while we delete.
        for fake, value in list(self._values.items()):
            if _storage_key(value.real) in changed:
                del self._values[fake]


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 -- an identity, never read


def _draws_random_numbers(func: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags
