"""Tests that a step fits, and that its peak does not rise, without the device."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderkit.arguments import parse_arguments
from loaderkit.budget.estimate import StepEstimate, estimate_step
from loaderkit.errors import DoesNotFitError
from loaderkit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from typing_extensions import Unpack

    from loaderkit.budget.keywords import FitKeywords
    from loaderkit.budget.train_step import DeviceSpec

UPDATE = "LOADERKIT_UPDATE_SNAPSHOTS"
"""Environment variable: when set, snapshots are written anew instead of compared."""


@dataclass(frozen=True)
class FitOptions:
    """Everything else that can be told to ``assert_fits``."""

    loss: Callable[..., Any] | None = None
    """As for ``estimate_step``."""
    optimizer: Any = "adam"
    """As for ``estimate_step``."""
    autocast: Any = None
    """As for ``estimate_step``."""
    name: str | None = None
    """The entry in the snapshot file; class of the model and device if None."""
    rise: float = 0.01
    """Share by which the peak may rise over the snapshot."""


def assert_fits(
    model: torch.nn.Module,
    batch: Any,
    limit: int | str | None = None,
    *,
    device: str | DeviceSpec | torch.device = "cpu",
    snapshot: str | os.PathLike[str] | None = None,
    **options: Unpack[FitKeywords],
) -> StepEstimate:
    """Fail when a training step would not fit, or takes more than it did.

    Args:
        model: A module on the CPU.
        batch: The largest one that shall fit, on the CPU.
        limit: Bytes, or a size such as "8 GiB"; None compares with the snapshot only.
        device: Where it shall fit; it need not be here.
        snapshot: A JSON file to keep with the tests; an entry that is missing is
            written.  Set ``LOADERKIT_UPDATE_SNAPSHOTS=1`` to accept new peaks.
        **options: Fields of :class:`FitOptions`.

    Returns:
        The estimate.

    Raises:
        DoesNotFitError: It takes more than the limit, or more than the snapshot by more
            than ``rise``; also an ``AssertionError``.
        ValueError: Neither a limit nor a snapshot was given.
        TypeError: There is no such option.
    """
    if limit is None and snapshot is None:
        msg = "assert_fits needs limit=, snapshot=, or both"
        raise ValueError(msg)
    chosen = parse_arguments(FitOptions, options, "assert_fits")
    found = estimate_step(
        model, batch, loss=chosen.loss, optimizer=chosen.optimizer,
        autocast=chosen.autocast, target=device,
    )  # fmt: skip
    if limit is not None:
        _compare_limit(found, parse_bytes(limit) if isinstance(limit, str) else limit)
    if snapshot is not None:
        name = chosen.name or f"{type(model).__name__} on {found.target.kind}"
        _compare_snapshot(found, Path(snapshot), name, chosen.rise)
    return found


def _compare_limit(found: StepEstimate, limit: int) -> None:
    if found.high <= limit:
        return
    what = (
        f"A step takes {format_bytes(found.high)}, "
        f"{format_bytes(found.high - limit)} more than {format_bytes(limit)}."
    )
    largest = max(found.parts, key=lambda part: found.parts[part])
    why = f"the peak is in {found.phase}, mostly {largest}"
    fix = "loaderkit.plan_batch(model, dataset, device) computes what each remedy saves"
    raise DoesNotFitError(what, why=why, fix=fix)


def _compare_snapshot(found: StepEstimate, file: Path, name: str, rise: float) -> None:
    kept = json.loads(file.read_text()) if file.exists() else {}
    before = kept.get(name)
    if before is None or os.environ.get(UPDATE):
        entry = {"peak": found.peak, "phase": found.phase, "parts": found.parts}
        whole = dict(sorted({**kept, name: entry}.items()))
        draft = file.with_name(f"{file.name}.{os.getpid()}")  # whole or not at all
        draft.write_text(json.dumps(whole, indent=2) + "\n")
        draft.replace(file)
        return
    grown = found.peak / before["peak"] - 1
    if grown <= rise:
        return
    what = (
        f"The peak of {name} rose by {grown:.1%}, from {format_bytes(before['peak'])} "
        f"to {format_bytes(found.peak)}; {rise:.1%} is allowed."
    )
    parts = {k: found.parts[k] - before["parts"].get(k, 0) for k in found.parts}
    most = max(parts, key=lambda part: parts[part])
    why = f"{most} grew by {format_bytes(parts[most])}; the peak is in {found.phase}"
    raise DoesNotFitError(what, why=why, fix=f"{UPDATE}=1 pytest, if that is meant")
