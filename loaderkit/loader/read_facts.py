"""Read what a loader's plan follows from: the machine, the device, the dataset."""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loaderkit.errors import LoaderkitError, OptionError
from loaderkit.forking import ForkHazard, tells_of_forked_device
from loaderkit.loader.facts import Facts
from loaderkit.loader.probe import probe
from loaderkit.memory.host import read_host
from loaderkit.memory.probes import read_capability
from loaderkit.nearest_names import suggest_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from loaderkit.loader.description import DatasetDescription
    from loaderkit.loader.facts import ReadCost
    from loaderkit.loader.options import LoaderOptions


@dataclass(frozen=True)
class TypicalBatch:
    """Rows of a batch to measure."""

    rows: Sequence[int] | None
    """None measures nothing."""
    why_none: str = ""
    """Why there are none, for the plan."""


def read_facts(
    description: DatasetDescription,
    device: str | torch.device,
    *,
    collate: Callable[[Any], Any],
    typical: TypicalBatch,
    largest_bytes: int | None = None,
    options: LoaderOptions,
) -> Facts:
    """Read everything a plan follows from.

    Args:
        description: Of what will be loaded.
        device: Where batches go.
        collate: How samples are joined.
        typical: What is measured.
        largest_bytes: Bound of a batch's bytes, where the samples' sizes are known.
        options: What was asked for.

    Returns:
        The facts.

    Raises:
        OptionError: There is no such device.
    """
    try:
        capability = read_capability(device)
    except ValueError as error:
        message = f"device cannot be {str(device)!r}."
        nearest = suggest_device(device)
        # A rightly named kind of device, of which there is none: no better name helps.
        if nearest.partition(":")[0] == str(device).partition(":")[0]:
            nearest = "cpu"
        fix = f"device={nearest!r}"
        raise OptionError(message, why=str(error), fix=fix) from error
    measurement = _measure_typical_batch(description, collate, typical, options)
    hazard = description.fork_hazard or measurement.fork_hazard
    obstacle = description.obstacle
    return Facts(
        host=read_host(),
        device=capability,
        samples=description.samples,
        iterable=description.iterable,
        gathering=description.gathering,
        draws_no_random_numbers=description.draws_no_random_numbers,
        largest_bytes=largest_bytes,
        measured=measurement.measured,
        later_epoch_bytes=description.later_epoch_bytes,
        unmeasured=measurement.why_none,
        start_method=multiprocessing.get_start_method(),
        start_methods=tuple(multiprocessing.get_all_start_methods()),
        unsendable="" if obstacle is None else obstacle.why,
        sending_fix="" if obstacle is None else obstacle.fix,
        fork_is_sound=sys.platform != "darwin",
        fork_hazard=hazard,
        batch_device=_batch_device(description, measurement),
        parcels=sys.platform == "linux" and hasattr(os, "memfd_create"),
        daemonic=bool(multiprocessing.current_process().daemon),
        lockless=_why_no_locks(),
        notebook=_in_notebook(),
        under_pytest="PYTEST_CURRENT_TEST" in os.environ,
        environment={
            name: text
            for name, text in os.environ.items()
            if name.startswith("LOADERKIT_")
        },
    )


def _why_no_locks() -> str:
    """Say why Python cannot make a lock that processes share; empty where it can.

    torch's queues need some.  On Linux they lie in /dev/shm, which containers and
    services that run functions may lack, or have read-only or full.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return ""  # Windows, whose locks are in no file
    try:
        # That of "spawn" would start a process that cleans up behind it.
        multiprocessing.get_context("fork").Lock()
    except (OSError, ImportError) as error:
        folder = " in /dev/shm" if sys.platform == "linux" else ""
        reason = getattr(error, "strerror", None) or str(error)
        return f"they need locks, and none can be made{folder}: {reason}"
    return ""


@dataclass(frozen=True)
class _Measurement:
    """What reading costs, or why that is not known."""

    measured: ReadCost | None
    why_none: str = ""
    fork_hazard: ForkHazard | None = None
    """What was found by measuring that does not survive a fork."""


def _batch_device(description: DatasetDescription, measurement: _Measurement) -> str:
    """Name the device that batches are made on; empty for the host, or if unknown."""
    hazard = measurement.fork_hazard
    # Without code of the user's, batches lie where the samples do.  A dataset's own
    # code may give something else than what it holds.
    if hazard is None and description.draws_no_random_numbers:
        hazard = description.fork_hazard
    if hazard is None or hazard.kind != "device":
        return ""
    return hazard.device or "a device"


def _measure_typical_batch(
    description: DatasetDescription,
    collate: Callable[[Any], Any],
    typical: TypicalBatch,
    options: LoaderOptions,
) -> _Measurement:
    if not typical.rows:
        return _Measurement(None, typical.why_none)
    hazard = description.fork_hazard
    if hazard is not None:
        why = f"reading was not measured in a forked process: {hazard.reason}"
        return _Measurement(None, why)
    if not _is_worth_probing(description, options):
        return _Measurement(None)
    try:
        measured = probe(description.dataset, typical.rows, collate)
    except LoaderkitError as error:
        # The loop tells it, should it read that sample; reading on may go well.
        if tells_of_forked_device(error.what):
            return _Measurement(None, error.what, ForkHazard("a batch", "device"))
        return _Measurement(None, error.what)
    if measured.device:
        # In workers that are forked later the driver may be in use already.
        return _Measurement(
            measured, fork_hazard=ForkHazard("a batch", "device", measured.device)
        )
    return _Measurement(measured)


def _is_worth_probing(description: DatasetDescription, options: LoaderOptions) -> bool:
    """Tell whether the plan depends on what reading costs, and reading is harmless."""
    if not options.probe:
        return False
    if description.gathering:
        return True
    # The user's code runs in this process only where the number of workers depends on
    # it: a dataset may wait for workers, count its calls, or be made for them alone.
    asked = options.num_workers is not None or os.environ.get("LOADERKIT_NUM_WORKERS")
    return not asked and not description.stateful


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    getter = getattr(shell, "get_ipython", None)
    return getter is not None and getter() is not None
