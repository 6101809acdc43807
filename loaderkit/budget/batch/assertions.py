"""Tests that a step fits, and that its peak does not rise, without the device."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loaderkit.arguments import (
    check_number,
    check_text,
    check_truth,
    check_variable,
    read_truth,
)
from loaderkit.budget.step.estimate import StepEstimate, estimate_step
from loaderkit.budget.step.misplaced import answer_misplaced
from loaderkit.budget.step.train_step import device_spec
from loaderkit.call_keywords import parse_arguments, suggest_keywords
from loaderkit.errors import BudgetError, DoesNotFitError, OptionError
from loaderkit.mistaken import mistaken_for_batch
from loaderkit.named_files import write_named_file
from loaderkit.path_arguments import check_path
from loaderkit.units import format_bytes, size_in_bytes
from loaderkit.value_words import kind_of, show_value

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from typing_extensions import Unpack

    from loaderkit.budget.keywords import FitKeywords, Loss
    from loaderkit.budget.step.devices import DeviceSpec

UPDATE = "LOADERKIT_UPDATE_SNAPSHOTS"
"""Environment variable: when true, snapshots are written anew instead of compared."""


@dataclass(frozen=True)
class FitOptions:
    """Everything else that can be told to ``assert_fits``."""

    loss: Loss | None = None
    """As for ``estimate_step``."""
    optimizer: Any = "adam"
    """As for ``estimate_step``."""
    autocast: Any = None
    """As for ``estimate_step``."""
    name: str | None = None
    """The entry in the snapshot file; class of the model and device if None."""
    rise: float = 0.01
    """Share by which the peak may rise over the snapshot."""


@suggest_keywords
@answer_misplaced(either=("limit", "snapshot"))
def assert_fits(
    model: torch.nn.Module,
    batch: object,
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
        BudgetError: What is in the snapshot's file is something else.
        NotWrittenError: It cannot be written.
        DoesNotFitError: It takes more than the limit, or more than the snapshot by more
            than ``rise``; also an ``AssertionError``.
        ValueError: Neither a limit nor a snapshot was given.
        TypeError: There is no such option.
    """
    chosen = parse_arguments(FitOptions, options, assert_fits)
    if limit is None and snapshot is None:
        message = "assert_fits needs limit=, snapshot=, or both."
        why = "it holds a step against one of them"
        fix = 'assert_fits(model, batch, limit="8 GiB")'
        raise OptionError(message, why=why, fix=fix)
    # Before the limit, which is given in the place of the batch, too.
    mistake = mistaken_for_batch(batch)
    if mistake is not None:
        limit_argument = "" if limit is None else f", limit={limit!r}"
        fix = mistake.fix(f"assert_fits(model, {{}}{limit_argument})")
        raise OptionError(mistake.message, why=mistake.why, fix=fix)
    limit_bytes = None if limit is None else size_in_bytes("limit", limit, least=1)
    file = None
    if snapshot is not None:
        file = check_path("snapshot", snapshot, "peaks.json")
    if chosen.name is not None:
        check_text("name", chosen.name, "encoder on cuda")
    check_number("rise", chosen.rise, least=0)
    target = device_spec(device, "device")
    step_estimate = estimate_step(
        model,
        batch,
        loss=chosen.loss,
        optimizer=chosen.optimizer,
        autocast=chosen.autocast,
        target=target,
    )
    if limit_bytes is not None:
        _check_limit(step_estimate, limit_bytes)
    if file is not None:
        name = chosen.name or f"{type(model).__name__} on {step_estimate.target.kind}"
        _check_snapshot(step_estimate, file, name, chosen.rise)
    return step_estimate


def _check_limit(step_estimate: StepEstimate, limit_bytes: int) -> None:
    """Fail if the upper end of an estimate is above a limit."""
    # The upper end: a test that passes must mean that it fits.
    over_bytes = step_estimate.high - limit_bytes
    if over_bytes <= 0:
        return
    message = (
        f"A step takes {format_bytes(step_estimate.high)}, "
        f"{format_bytes(over_bytes)} more than {format_bytes(limit_bytes)}."
    )
    parts = step_estimate.parts
    largest = max(parts, key=lambda part: parts[part])
    why = f"the peak is in {step_estimate.phase}, mostly {largest}"
    fix = "loaderkit.plan_batch(model, dataset, device) computes what each remedy saves"
    raise DoesNotFitError(message, why=why, fix=fix)


def _check_snapshot(
    step_estimate: StepEstimate, file: Path, name: str, rise: float
) -> None:
    """Fail if a peak rose over the one in the file; write it where there is none."""
    snapshots = _read_snapshots(file)
    accepts_peaks = _is_to_be_written()
    if name not in snapshots or accepts_peaks:
        snapshots[name] = {
            "peak": step_estimate.peak,
            "phase": step_estimate.phase,
            "parts": step_estimate.parts,
        }
        _write_sorted(snapshots, file)
        return

    before = snapshots[name]
    if not _is_snapshot(before):
        raise _no_snapshots(file, f"under {name!r} is {show_value(before)}")
    # The likely peak here, and no end of it: the same estimate was written down, and
    # what it does not know is in both.
    share_more = step_estimate.peak / before["peak"] - 1
    if share_more <= rise:
        return
    message = (
        f"The peak of {name} rose by {share_more:.1%}, from "
        f"{format_bytes(before['peak'])} to {format_bytes(step_estimate.peak)}; "
        f"{rise:.1%} is allowed."
    )
    grown_bytes = {
        part: size - before["parts"].get(part, 0)
        for part, size in step_estimate.parts.items()
    }
    most = max(grown_bytes, key=lambda part: grown_bytes[part])
    why = (
        f"{most} grew by {format_bytes(grown_bytes[most])}; "
        f"the peak is in {step_estimate.phase}"
    )
    raise DoesNotFitError(message, why=why, fix=f"{UPDATE}=1 pytest, if that is meant")


def _read_snapshots(file: Path) -> dict[str, Any]:
    """Read the peaks that were written down; none where there is no file.

    Raises:
        BudgetError: The file cannot be read, or holds something else.
    """
    if not file.exists():
        return {}
    try:
        snapshots = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _no_snapshots(file, error.strerror or str(error)) from error
    except ValueError as error:  # neither text nor JSON
        raise _no_snapshots(file, str(error)) from error
    if not isinstance(snapshots, dict):
        raise _no_snapshots(file, f"it is {kind_of(snapshots)}")
    return snapshots


def _is_snapshot(entry: object) -> bool:
    """Tell whether an entry of the file is one that was written here."""
    if not isinstance(entry, dict) or not isinstance(entry.get("parts"), dict):
        return False
    amounts = [*entry["parts"].values(), entry.get("peak")]
    are_bytes = all(type(amount) is int and amount >= 0 for amount in amounts)
    return are_bytes and bool(entry["peak"])


def _no_snapshots(file: Path, reason: str) -> BudgetError:
    message = f"{file} holds no snapshots of peaks."
    fix = "name another file; or restore it, or delete it to have it written anew"
    return BudgetError(message, why=reason, fix=fix)


def _is_to_be_written() -> bool:
    """Tell whether the environment says that new peaks are accepted.

    Raises:
        VariableError: It says something else than true or false.
    """
    text = os.environ.get(UPDATE, "")
    return bool(text and check_variable(UPDATE, text, read_truth, check_truth))


def _write_sorted(snapshots: dict[str, Any], file: Path) -> None:
    # Under another name first: a reader sees the old file or the new one, never half,
    # and of two tests at once the last one's is whole.
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    by_name = dict(sorted(snapshots.items()))
    write_named_file(draft, json.dumps(by_name, indent=2) + "\n")
    draft.replace(file)
