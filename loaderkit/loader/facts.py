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

from loaderkit.errors import LoaderkitError
from loaderkit.loader.fetching import Join, draws_nothing, fetch, is_gathering
from loaderkit.loader.forecast import PROBE_S
from loaderkit.loader.randomness import quiet
from loaderkit.loader.stateful import is_stateful
from loaderkit.memory.host import Host, read_host
from loaderkit.memory.parcel import Parcel, Segments, check_pickles, forget
from loaderkit.memory.probes import Capability, read_capability
from loaderkit.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from loaderkit.loader.options import LoaderOptions

_SLOW_S = 1.0
"""A first sample that took less is not believed: a second one is timed."""
_ROUNDS = 16
"""Batches that it gathers at most: the first few wait for memory and mapped pages."""
_USER_ROUNDS = 2
"""Batches that it makes at most where code of the user's runs, which may count its
calls or be slow.  The first call often imports; the second tells."""


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
    probe_s: float = 0.0
    """What all this measuring took."""

    def cost_in_words(self) -> str:
        """Say what the probe took, if that was longer than it shall take."""
        if self.probe_s < 2 * PROBE_S:
            return ""
        text = f"took {format_seconds(self.probe_s)}: a sample takes "
        return f"{text}{format_seconds(self.sample_s)}; probe=False reads none"


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
        ValueError: There is no such device.
    """
    iterable = isinstance(dataset, IterableDataset)
    capability = read_capability(device)
    samples, measured = _length(dataset), None
    unmeasured = "" if rows else why_no_rows
    method = options.multiprocessing_context or multiprocessing.get_start_method()
    if rows and _is_worth_probing(dataset, collate, options):
        try:
            with quiet():
                measured = measure(dataset, rows, collate)
        except LoaderkitError as error:
            # The loop tells it, should it read that sample; reading on may go well.
            unmeasured = f"reading failed: {error.what}"
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
        else why_unpicklable({"dataset": dataset, "collate_fn": collate}),
        parcels=sys.platform == "linux" and hasattr(os, "memfd_create"),
        daemonic=bool(multiprocessing.current_process().daemon),
        notebook=_in_notebook(),
        under_pytest="PYTEST_CURRENT_TEST" in os.environ,
        environment={k: v for k, v in os.environ.items() if k.startswith("LOADERKIT_")},
    )


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


def measure(
    dataset: Any, rows: Sequence[int], collate: Callable[[Any], Any]
) -> Measured:
    """Read a batch or two, for about a tenth of a second at most.

    A sample that takes longer is read all the same: one, or two if the first took less
    than a second.  ``collate`` is given whole batches only, unless it is ours.

    Args:
        dataset: Indexed, not iterated.
        rows: Rows of a typical batch, at least one.
        collate: How samples are joined.

    Returns:
        What a batch costs; scaled up when fewer samples were read than one has.
    """
    begun = time.perf_counter()
    deadline = begun + PROBE_S
    gathering = is_gathering(dataset, collate)
    sample_s, samples = _read_first(dataset, rows, gathering=gathering)
    times: list[float] = []
    batch: Any = None
    read = len(rows)
    for _ in range(_ROUNDS if gathering else _USER_ROUNDS):
        expected_s = times[-1] if times else sample_s * len(rows)
        start = time.perf_counter()
        if start + expected_s > deadline and not (gathering and not times):
            break
        batch = fetch(dataset, rows, collate)
        times.append(time.perf_counter() - start)
    if not times:  # a whole batch takes too long: as many samples as there is time for
        samples, times, read = _read_some(dataset, rows, samples, sample_s, deadline)
        batch = collate(samples) if isinstance(collate, Join) else samples
    fetched_s, scale = min(times), len(rows) / read
    nbytes, send_s, receive_s = _transfer(batch, deadline)
    return Measured(
        samples=read,
        sample_bytes=nbytes // read,
        batch_bytes=int(nbytes * scale),
        fetch_s=fetched_s * scale,
        sample_s=sample_s,
        send_s=send_s * scale,
        receive_s=receive_s * scale,
        probe_s=time.perf_counter() - begun,
    )


def _read_first(
    dataset: Any, rows: Sequence[int], *, gathering: bool
) -> tuple[float, list[Any]]:
    """Read the first sample, and a second: the first also imports, opens and fills."""
    samples: list[Any] = []
    best_s = float("inf")
    for row in rows[: 1 if gathering else 2]:
        start = time.perf_counter()
        samples += _as_list(fetch(dataset, [row], _as_list))
        best_s = min(best_s, time.perf_counter() - start)
        if best_s >= _SLOW_S:
            break
    return best_s, samples


def _as_list(samples: Any) -> list[Any]:
    return samples if isinstance(samples, list) else [samples]


def _read_some(
    dataset: Any, rows: Sequence[int], samples: list[Any], sample_s: float,
    deadline: float,
) -> tuple[list[Any], list[float], int]:  # fmt: skip
    """Read on, one by one, while there is time.

    Returns:
        The samples, the time of all of them in a list, and how many they are.
    """
    count = len(samples)
    start = time.perf_counter()
    for row in rows[count:]:
        if time.perf_counter() + sample_s > deadline:
            break
        samples = [*samples, *_as_list(fetch(dataset, [row], _as_list))]
    total_s = sample_s * count
    if len(samples) > count:
        total_s += time.perf_counter() - start
    return samples, [total_s], len(samples)


def _transfer(batch: Any, deadline: float) -> tuple[int, float, float]:
    """Send a batch to ourselves: its bytes, and the time of either end."""
    best = [float("inf"), float("inf")]
    nbytes = 0
    with contextlib.closing(Segments(1)) as segments:
        for attempt in range(4):
            start = time.perf_counter()
            if attempt and start > deadline:
                break
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
