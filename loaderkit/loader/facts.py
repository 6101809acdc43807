"""What a loader's plan follows from: the machine, the device, the dataset, all read."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from loaderkit.loader.fetching import draws_nothing, fetch, is_gathering
from loaderkit.loader.randomness import quiet
from loaderkit.memory.host import Host, read_host
from loaderkit.memory.parcel import Parcel, Segments, check_pickles, forget
from loaderkit.memory.probes import Capability, read_capability

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

_PROBE_S = 0.1
"""The probe stops reading after so long, but reads one sample at least."""
_SLOW_S = 1.0
"""A first sample that took less is not believed: a second one is timed."""
_ROUNDS = 16
"""Batches it reads at most: the first few wait for memory and for mapped pages."""


@dataclass(frozen=True)
class Measured:
    """What reading costs here, measured on this machine."""

    samples: int
    """Samples that were read for it."""
    sample_bytes: int
    """Bytes of one sample in a batch, on average."""
    batch_bytes: int
    """Bytes of one batch."""
    fetch_s: float
    """To read and join one batch."""
    sample_s: float
    """To read the very first sample, opening what it needs."""
    send_s: float
    """To put a batch into shared memory, in a worker."""
    receive_s: float
    """To take it out, in the training process."""


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
    start_method: str = "fork"
    """How workers start unless told otherwise."""
    start_methods: tuple[str, ...] = ("fork", "spawn", "forkserver")
    """How they can start here."""
    unpicklable: str = ""
    """Why the dataset cannot be sent to a spawned worker; empty when it can."""
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
    largest_bytes: int | None = None,
    context: str | None = None,
) -> Facts:
    """Read everything a plan follows from.

    Args:
        dataset: What will be loaded.
        device: Where batches go.
        collate: How samples are joined.
        rows: Rows of a typical batch to measure; None measures nothing.
        largest_bytes: Bound of a batch's bytes, where the samples' sizes are known.
        context: How workers shall start; this Python's default if None.

    Returns:
        The facts.

    Raises:
        ValueError: There is no such device.
    """
    iterable = isinstance(dataset, IterableDataset)
    capability = read_capability(device)
    samples, measured = _length(dataset), None
    method = context or multiprocessing.get_start_method()
    if rows is not None and not iterable and samples:
        with quiet():
            measured = measure(dataset, rows, collate)
    return Facts(
        host=read_host(),
        device=capability,
        samples=samples,
        iterable=iterable,
        gathering=is_gathering(dataset, collate),
        quiet=draws_nothing(dataset),
        largest_bytes=largest_bytes,
        measured=measured,
        start_method=multiprocessing.get_start_method(),
        start_methods=tuple(multiprocessing.get_all_start_methods()),
        unpicklable=""
        if method == "fork"
        else why_unpicklable({"dataset": dataset, "collate_fn": collate}),
        parcels=sys.platform == "linux" and hasattr(os, "memfd_create"),
        daemonic=bool(multiprocessing.current_process().daemon),
        notebook=_in_notebook(),
        under_pytest="PYTEST_CURRENT_TEST" in os.environ,
        environment={k: v for k, v in os.environ.items() if k.startswith("LOADERKIT_")},
    )


def measure(
    dataset: Any, rows: Sequence[int], collate: Callable[[Any], Any]
) -> Measured:
    """Read a few batches, for at most about a tenth of a second.

    Args:
        dataset: Indexed, not iterated.
        rows: Rows of a typical batch, at least one.
        collate: How samples are joined.

    Returns:
        What a batch costs; scaled up when fewer samples were read than one has.
    """
    begun = time.perf_counter()
    few = rows[:1]
    batch = fetch(dataset, few, collate)
    first_s = time.perf_counter() - begun
    if first_s < _SLOW_S and len(rows) > 1:  # the first also imports, opens, fills
        start = time.perf_counter()
        batch = fetch(dataset, rows[1:2], collate)
        first_s = min(first_s, time.perf_counter() - start)
    begun = time.perf_counter()
    fits = int(max(1, min(len(rows), _PROBE_S / max(first_s, 1e-9))))
    times = []
    if first_s < _PROBE_S:
        few = rows[: len(rows) if is_gathering(dataset) else fits]
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            batch = fetch(dataset, few, collate)
            times.append(time.perf_counter() - start)
            if time.perf_counter() - begun > _PROBE_S:
                break
    fetched = min(times or [first_s])
    scale = len(rows) / len(few)
    nbytes, send_s, receive_s = _transfer(batch)
    return Measured(
        samples=len(few),
        sample_bytes=nbytes // len(few),
        batch_bytes=int(nbytes * scale),
        fetch_s=fetched * scale,
        sample_s=first_s,
        send_s=send_s * scale,
        receive_s=receive_s * scale,
    )


def _transfer(batch: Any) -> tuple[int, float, float]:
    """Send a batch to ourselves: its bytes, and the time of either end."""
    best = [float("inf"), float("inf")]
    nbytes = 0
    with contextlib.closing(Segments(1)) as segments:
        for _ in range(4):
            start = time.perf_counter()
            try:
                parcel = Parcel(batch, segments)
                text = bytes(ForkingPickler.dumps(parcel))
            except (OSError, AttributeError, TypeError, pickle.PicklingError):
                return nbytes, 0.0, 0.0
            middle = time.perf_counter()
            pickle.loads(text)
            end = time.perf_counter()
            best = [min(best[0], middle - start), min(best[1], end - middle)]
            nbytes = parcel.nbytes
    forget([os.getpid()])
    return nbytes, best[0], best[1]


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
