"""Who tells a sampler its epoch: the loader, until somebody else does."""

from __future__ import annotations

from typing import Any


class SamplerEpochs:
    """Tells a user's sampler, and the one within it, which epoch comes next.

    ``sampler.set_epoch(epoch)`` before each epoch is how torch's DistributedSampler is
    used.  Whoever does so chooses another epoch than the loader counts: after a resume
    from a checkpoint without our state, or in stages of a curriculum.  From then on the
    loader tells it no more.  It sees that by the sampler's values, since nothing else
    tells of a call.

    Args:
        sampler: Of the user's; most have no ``set_epoch``.
    """

    def __init__(self, sampler: Any) -> None:
        inner_sampler = getattr(sampler, "sampler", None)
        parts = {"": sampler, "sampler.": inner_sampler}
        self._parts = {
            prefix: part
            for prefix, part in parts.items()
            if callable(getattr(part, "set_epoch", None))
        }
        epochs = [getattr(part, "epoch", None) for part in self._parts.values()]
        # A sampler begins with 0, or some other value that is no epoch.
        self.by_hand = any(isinstance(epoch, int) and epoch > 0 for epoch in epochs)
        self._last_values = self._read_epoch_values()

    def tell(self, epoch: int) -> None:
        """Tell the epoch, unless somebody else does."""
        self.look()
        if self.by_hand:
            return
        for part in self._parts.values():
            part.set_epoch(epoch)
        self.note()

    def look(self) -> bool:
        """Look whether somebody else has set an epoch since, and give that."""
        changed = bool(self._parts) and self._read_epoch_values() != self._last_values
        self.by_hand = self.by_hand or changed
        self.note()
        return changed

    def note(self) -> None:
        """Take the values as they are: drawing rows, or we ourselves, changed them."""
        if self._parts:
            self._last_values = self._read_epoch_values()

    def adopt(self, saved: dict[str, Any], epoch: int, *, by_hand: bool) -> None:
        """Take over what another run's sampler was told.

        A sampler whose epoch was set by hand here keeps it; that it is the saved one
        is compared with its other values.

        Args:
            saved: Plain values of the other run's sampler, by attribute.
            epoch: The epoch of its loader.
            by_hand: There, too, somebody else set the epoch.
        """
        self.look()
        if not self.by_hand:
            for prefix, part in self._parts.items():
                if not by_hand:
                    part.set_epoch(epoch)
                elif isinstance(saved.get(f"{prefix}epoch"), int):
                    part.set_epoch(saved[f"{prefix}epoch"])
        self.by_hand = by_hand
        self.note()

    def _read_epoch_values(self) -> list[dict[str, Any]]:
        return [_epoch_values(part) for part in self._parts.values()]


def _epoch_values(part: Any) -> dict[str, Any]:
    """Read what ``set_epoch`` sets: ``epoch`` as in torch, or an integer elsewhere."""
    if hasattr(part, "epoch"):
        return {"epoch": part.epoch}
    values = getattr(part, "__dict__", {})
    return {name: values[name] for name in values if type(values[name]) is int}


def set_sampler_epoch(sampler: Any, epoch: int) -> None:
    """Tell a sampler, and the one within it, which epoch comes next."""
    part: Any
    for part in (sampler, getattr(sampler, "sampler", None)):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
