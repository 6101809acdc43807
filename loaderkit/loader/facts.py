"""What a loader's plan follows from: the machine, the device, the dataset, all read."""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from loaderkit.errors import LoaderkitError, OptionError
from loaderkit.forking import ForkHazard, find_fork_hazard
from loaderkit.loader.collating import is_gathering, split_transform
from loaderkit.loader.fetching import draws_nothing
from loaderkit.loader.pipes import as_sent
from loaderkit.loader.probe import probe
from loaderkit.loader.stateful import is_stateful
from loaderkit.memory.host import Host, read_host
from loaderkit.memory.probes import Capability, read_capability
from loaderkit.memory.shm_batch import check_pickles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from loaderkit.loader.options import LoaderOptions
    from loaderkit.loader.probe import Measured


@dataclass(frozen=True)
class Facts:
    """All that a plan follows from."""

    host: Host
    """Limits of this process."""
    device: Capability
    """What the device can do."""
    samples: int | None
    """Samples of the dataset; None where it does not say."""
    iterable: bool = False
    """It is iterated rather than indexed."""
    gathering: bool = False
    """Batches come from a cache, finished, and no code of the user's runs."""
    quiet: bool = False
    """Reading draws no random numbers: no code of the user's runs."""
    largest_bytes: int | None = None
    """Bound of a batch's bytes, from the sizes of all samples; None if unknown."""
    measured: Measured | None = None
    """What reading costs; None when it was not measured."""
    unmeasured: str = ""
    """Why it was not, where that was not asked for."""
    start_method: str = "fork"
    """How workers start unless told otherwise."""
    start_methods: tuple[str, ...] = ("fork", "spawn", "forkserver")
    """How they can start here."""
    unpicklable: str = ""
    """Why the dataset cannot be sent to a spawned worker; empty when it can."""
    fork_hazard: ForkHazard | None = None
    """What the dataset holds that does not survive a fork."""
    parcels: bool = True
    """Batches can travel as one anonymous segment (Linux)."""
    daemonic: bool = False
    """This process may not have children."""
    notebook: bool = False
    """Code is typed into a notebook."""
    under_pytest: bool = False
    """A test is running."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that begin with ``LOADERKIT_``."""

    @property
    def batch_bytes(self) -> int | None:
        """Bytes of the largest batch that is known of; None if none is."""
        found = self.measured
        known = [self.largest_bytes, found.batch_bytes if found else None]
        return max((each for each in known if each is not None), default=None)


def read_facts(
    dataset: Any,
    device: str | torch.device,
    *,
    collate: Callable[[Any], Any],
    rows: Sequence[int] | None,
    why_no_rows: str = "",
    largest_bytes: int | None = None,
    options: LoaderOptions,
) -> Facts:
    """Read everything a plan follows from.

    Args:
        dataset: What will be loaded.
        device: Where batches go.
        collate: How samples are joined.
        rows: Rows of a typical batch to measure; None measures nothing.
        why_no_rows: Why there are none, for the plan.
        largest_bytes: Bound of a batch's bytes, where the samples' sizes are known.
        options: What was asked for.

    Returns:
        The facts.

    Raises:
        OptionError: There is no such device.
    """
    iterable = isinstance(dataset, IterableDataset)
    try:
        capability = read_capability(device)
    except ValueError as error:
        what = f"device cannot be {device!r}: {error}."
        raise OptionError(what, fix="device='cpu'") from error
    samples, measured = _length(dataset), None
    unmeasured = "" if rows else why_no_rows
    hazard = find_fork_hazard(dataset=dataset)
    method = options.multiprocessing_context or multiprocessing.get_start_method()
    if rows and hazard is not None:
        unmeasured = f"reading was not measured in a forked process: {hazard.reason}"
    elif rows and _is_worth_probing(dataset, collate, options):
        try:
            measured = probe(dataset, rows, collate)
        except LoaderkitError as error:
            # The loop tells it, should it read that sample; reading on may go well.
            unmeasured = error.what
    return Facts(
        host=read_host(),
        device=capability,
        samples=samples,
        iterable=iterable,
        gathering=is_gathering(dataset, collate),
        quiet=draws_nothing(dataset),
        largest_bytes=largest_bytes,
        measured=measured,
        unmeasured=unmeasured,
        start_method=multiprocessing.get_start_method(),
        start_methods=tuple(multiprocessing.get_all_start_methods()),
        unpicklable=""
        if method == "fork"
        else why_unpicklable(_sent_to_workers(dataset, collate)),
        fork_hazard=hazard,
        parcels=sys.platform == "linux" and hasattr(os, "memfd_create"),
        daemonic=bool(multiprocessing.current_process().daemon),
        notebook=_in_notebook(),
        under_pytest="PYTEST_CURRENT_TEST" in os.environ,
        environment={k: v for k, v in os.environ.items() if k.startswith("LOADERKIT_")},
    )


def _sent_to_workers(dataset: Any, collate: Callable[[Any], Any]) -> Mapping[str, Any]:
    """Name what a spawned worker gets as the caller named it."""
    join, transform = split_transform(collate)
    return {
        "dataset": as_sent(dataset),
        "collate_fn": join,
        "batch_transform": transform,
    }


def _is_worth_probing(
    dataset: Any, collate: Callable[[Any], Any], options: LoaderOptions
) -> bool:
    """Tell whether the plan depends on what reading costs, and reading is harmless."""
    if not options.probe:
        return False
    if is_gathering(dataset, collate):
        return True
    # The user's code runs in this process only where the number of workers depends on
    # it: a dataset may wait for workers, count its calls, or be made for them alone.
    asked = options.num_workers is not None or os.environ.get("LOADERKIT_NUM_WORKERS")
    return not asked and not is_stateful(dataset)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def why_unpicklable(parts: Mapping[str, Any]) -> str:
    """Find what keeps objects from travelling to a spawned worker.

    Args:
        parts: Objects by name.

    Returns:
        The path of the part that cannot be pickled, and why; empty when all can.
    """
    found = (_why_unpicklable(name, part) for name, part in parts.items())
    return next(filter(None, found), "")


def _why_unpicklable(name: str, part: Any) -> str:
    try:
        check_pickles(part)
    except Exception as error:  # noqa: BLE001 - any class may refuse in any way
        inner = getattr(part, "__dict__", {})
        deeper = why_unpicklable({f"{name}.{key}": inner[key] for key in inner})
        return deeper or f"{name}: {type(error).__name__}: {error}"
    return ""


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    getter = getattr(shell, "get_ipython", None)
    return getter is not None and getter() is not None
