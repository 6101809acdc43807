"""What ``build_loader`` decided about a loader, besides torch's own settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderkit.loader.decisions import Decision

if TYPE_CHECKING:
    from collections.abc import Iterable

    from loaderkit.loader.agreement import OrderAgreement
    from loaderkit.loader.iterables import IterableRule
    from loaderkit.loader.limits import LimitCheck
    from loaderkit.loader.options import LoaderOptions
    from loaderkit.loader.plan import LoaderPlan
    from loaderkit.loader.resumable import EpochBatches, Position
    from loaderkit.loader.user_batches import UserBatches
    from loaderkit.memory.page_locked import PageLockedMemory


class ShownBatching(NamedTuple):
    """What a loader shows of its batches, under torch's names."""

    batch_size: int | None
    """As it was asked for."""
    drop_last: bool
    """As it was asked for."""
    sampler: Iterable[Any] | None
    """Gives the rows of this rank, one by one."""


@dataclass(frozen=True)
class LoaderSetup:
    """What a loader is built of, and goes on referring to while it lives."""

    asked: LoaderOptions
    """What the caller asked for."""
    plan: LoaderPlan
    """The settings, each with its reason."""
    batches: EpochBatches | UserBatches | None
    """The batches of this rank; None for iterable datasets."""
    iterable: IterableRule | None
    """How the samples of an iterable dataset become batches; None for others."""
    position: Position
    """Where the first iteration begins.  The loader moves it, and the samplers that it
    shows follow, because they hold the same object."""
    shown: ShownBatching | None
    """What is shown of the batches; None shows what torch makes of the settings."""
    batched: bool
    """Samples are joined into batches; otherwise each is given by itself."""
    batching: str
    """How samples become batches, the same on every rank: states must agree on it."""
    seeded: bool
    """Random numbers drawn while reading follow from each batch alone."""
    seed_asked: bool
    """The caller gave the seed, so a state with another one is a mistake."""
    agreement: OrderAgreement
    """Compares the order with that of the other ranks."""
    must_pin: bool = False
    """The caller asked for page-locked memory; a batch that cannot be is an error."""
    limit_check: LimitCheck | None = None
    """What the samples of a batch are compared with; None if their sizes are known."""
    stream_length: int | None = None
    """The length that an iterable dataset reported; None if ranks may have parts of
    different lengths."""
    page_locked: PageLockedMemory | None = None
    """Where this process makes its batches of a cache; None where they are made in
    ordinary memory, and torch copies them if they are to be page-locked."""

    def current_plan(self, seed: Decision[int]) -> LoaderPlan:
        """Return the plan as it is followed by now.

        Args:
            seed: That of a state that was loaded since, if one was.
        """
        plan = self.plan if seed == self.plan.seed else replace(self.plan, seed=seed)
        refusal = None if self.page_locked is None else self.page_locked.refusal
        if refusal is None:
            return plan
        reason = f"the system refused more page-locked memory: {refusal}"
        return replace(plan, pin_memory=Decision(False, reason))
