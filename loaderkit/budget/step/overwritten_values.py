"""Real tensors that fakes are written to: what they held before is stale.

Such as the batch vector of a pool, which PyG fills by ``arange().scatter_()``: a real
tensor would keep the values it had before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_iter, tree_map

from loaderkit.budget.step.call_arguments import written_tensors
from loaderkit.budget.step.fake_tensors import is_fake, is_real

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensorMode

    from loaderkit.budget.step.call_arguments import Args, Kwargs
    from loaderkit.budget.step.storage_ledger import StorageLedger
    from loaderkit.budget.step.value_answers import ValueAnswers


class OverwrittenValues:
    """Gives operators fakes in place of real tensors whose values are stale."""

    def __init__(
        self, *, fake: FakeTensorMode, ledger: StorageLedger, answers: ValueAnswers
    ) -> None:
        """Begin a step.

        Args:
            fake: Makes the fakes of the step.
            ledger: Logs that a fake has its real tensor's storage.
            answers: Knows values, and the bounds of counts.
        """
        self._fake, self._ledger, self._answers = fake, ledger, answers
        self._depends_on_parameters: dict[int, bool | None] = {}
        """By the storage of what was written to: whether what it holds now does; None
        where it is not known."""
        ledger.when_freed.append(self._forget_storage)

    def _forget_storage(self, key: int) -> None:
        self._depends_on_parameters.pop(key, None)
        self._answers.counts.forget_overwritten(key)

    def replace_stale(
        self, func: OpOverload, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs]:
        """Fake real tensors that fakes were written to, or are written to by this call.

        Args:
            func: The operator that is called.
            args: Its positional arguments.
            kwargs: Its named ones.

        Returns:
            The same arguments where nothing is replaced.
        """
        if self._depends_on_parameters:
            args, kwargs = tree_map(self._fake_if_stale, (args, kwargs))
        written = written_tensors(func, args, kwargs)
        if all(map(is_fake, written)):
            return args, kwargs
        if not any(map(is_fake, tree_iter((args, kwargs)))):
            # All is real, and so is what is written.
            return args, kwargs
        fakes = {
            id(tensor): self._fake_in_place_of(tensor, is_trained=False)
            for tensor in written
            if is_real(tensor)
        }
        for tensor in written:
            if id(tensor) in fakes:
                self._depends_on_parameters[tensor.untyped_storage()._cdata] = None
        args, kwargs = tree_map(lambda leaf: fakes.get(id(leaf), leaf), (args, kwargs))
        return args, kwargs

    def _fake_if_stale(self, leaf: object) -> Any:
        if not isinstance(leaf, torch.Tensor) or not is_real(leaf):
            return leaf
        key = leaf.untyped_storage()._cdata
        if key not in self._depends_on_parameters:
            return leaf
        return self._fake_in_place_of(leaf, is_trained=self._depends_on_parameters[key])

    def _fake_in_place_of(self, real: torch.Tensor, *, is_trained: bool | None) -> Any:
        """Make the fake of a real tensor, without another storage in the log."""
        key = real.untyped_storage()._cdata
        fake = self._fake.from_tensor(real)
        self._answers.counts.name_overwritten(fake, key)
        self._ledger.add_alias(fake, key)
        values = self._answers.values
        is_new = values is not None and values.of(fake) is None
        if values is not None and is_new and is_trained is not None:
            values.name_own_value(fake, real, trained=is_trained)
        return fake

    def note_written(self, func: OpOverload, args: Args, kwargs: Kwargs) -> None:
        """Remember whether the values of what an operator has written to are known.

        Args:
            func: The operator that was called.
            args: Its positional arguments, with fakes in place of what is stale.
            kwargs: Its named ones.
        """
        if not self._depends_on_parameters or self._answers.values is None:
            return
        for tensor in written_tensors(func, args, kwargs):
            value = self._answers.value_of(tensor) if is_fake(tensor) else None
            if value is not None:
                key = value.real.untyped_storage()._cdata
                if key in self._depends_on_parameters:
                    self._depends_on_parameters[key] = value.trained
