"""Calls to ``set_epoch`` of the user's sampler: by the loader, or by the user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loaderkit.loader.sampler_protocol import (
    inner_sampler,
    sampler_and_inner,
    takes_epochs,
)

if TYPE_CHECKING:
    from loaderkit.loader.sampler_protocol import EpochSampler


class SamplerEpochs:
    """Calls ``set_epoch`` of a user's sampler, until the user does so.

    torch's DistributedSampler is used by calling ``sampler.set_epoch(epoch)`` before
    each epoch.  A user who does that may choose another epoch than the loader counts,
    for example after resuming from a checkpoint that has no state of the loader.  From
    then on the loader no longer calls ``set_epoch``.

    Nothing reports such a call, so it is noticed by the sampler's attributes: they have
    changed since the loader last looked at them.

    Args:
        sampler: The user's sampler.  It and the sampler that it wraps are looked at;
            most have no ``set_epoch``.
    """

    def __init__(self, sampler: object) -> None:
        # By the beginning of the paths under which a state names their attributes.
        self._samplers: dict[str, EpochSampler] = {}
        if takes_epochs(sampler):
            self._samplers[""] = sampler
        inner = inner_sampler(sampler)
        if takes_epochs(inner):
            self._samplers["sampler."] = inner

        values = self._samplers.values()
        epochs = [getattr(epoch_sampler, "epoch", None) for epoch_sampler in values]
        # The initial value is 0, or something that is no epoch, such as None.
        self.set_by_user = any(isinstance(epoch, int) and epoch > 0 for epoch in epochs)
        self._last_values = self._read_epoch_values()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, unless the user does."""
        self.detect_user_call()
        if self.set_by_user:
            return
        for sampler in self._samplers.values():
            sampler.set_epoch(epoch)
        self.remember_values()

    def detect_user_call(self) -> bool:
        """Return whether the user has set an epoch since the last look."""
        changed = (
            bool(self._samplers) and self._read_epoch_values() != self._last_values
        )
        self.set_by_user = self.set_by_user or changed
        self.remember_values()
        return changed

    def remember_values(self) -> None:
        """Take the attributes as they are.

        Called after something that is no call of the user's may have changed them:
        drawing rows, or the loader itself.
        """
        if self._samplers:
            self._last_values = self._read_epoch_values()

    def restore(
        self, saved_values: dict[str, Any], epoch: int, *, set_by_user: bool
    ) -> None:
        """Set the epoch that the sampler of a saved state had.

        If the user has set an epoch on this sampler, it keeps that epoch.  Whether it
        is the saved one is checked with the sampler's other values, by the caller.

        Args:
            saved_values: Plain attributes of the saved sampler, by path.
            epoch: The epoch of the saved loader.
            set_by_user: The saved sampler's epoch was set by its user.
        """
        self.detect_user_call()
        if not self.set_by_user:
            for prefix, sampler in self._samplers.items():
                if not set_by_user:
                    sampler.set_epoch(epoch)
                elif isinstance(saved_values.get(f"{prefix}epoch"), int):
                    sampler.set_epoch(saved_values[f"{prefix}epoch"])
        self.set_by_user = set_by_user
        self.remember_values()

    def _read_epoch_values(self) -> list[dict[str, Any]]:
        return [_epoch_values(sampler) for sampler in self._samplers.values()]


def _epoch_values(sampler: object) -> dict[str, Any]:
    """Read the attributes that ``set_epoch`` may change.

    torch's samplers call theirs ``epoch``.  Of other samplers all integers are taken,
    since any of them may hold the epoch.
    """
    if hasattr(sampler, "epoch"):
        return {"epoch": sampler.epoch}
    attributes = getattr(sampler, "__dict__", {})
    return {name: attributes[name] for name in attributes if _is_int(attributes[name])}


def _is_int(value: object) -> bool:
    return type(value) is int  # a bool is no epoch


def set_sampler_epoch(sampler: object, epoch: int) -> None:
    """Call ``set_epoch`` of a sampler and of the sampler that it wraps.

    Args:
        sampler: Any sampler; without ``set_epoch`` nothing is called.
        epoch: The epoch that comes next.
    """
    for candidate in sampler_and_inner(sampler):
        if takes_epochs(candidate):
            candidate.set_epoch(epoch)
