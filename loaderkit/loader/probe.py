"""What reading a batch costs, measured before a loader is planned.

Code of the user's is measured in a process of its own.  Here it would leave open what
it opens and keeps: workers forked later share one position in such a file, and read
each other's bytes; to workers that are spawned it cannot be sent.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import statistics
import sys
import time
import warnings
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from loaderkit.errors import LoaderError, LoaderkitError
from loaderkit.loader.collating import Join, is_gathering
from loaderkit.loader.description import reading_draws_nothing
from loaderkit.loader.facts import PROBE_S, Measured
from loaderkit.loader.fetching import fetch
from loaderkit.memory.shm_batch import SegmentRing, SharedBatch, forget
from loaderkit.randomness import quiet
from loaderkit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

_SLOW_S = 1.0
"""A first sample that took less is not believed: a second one is timed."""
_ROUNDS = 9
"""Batches that it gathers at most, after a first one."""
_CPU_CACHE_BYTES = 8 << 20
"""Several times a core's own cache, a part of the one that cores share.  Measured on
W1 and W2 with caches of 1 and 32 MiB: what an epoch takes lies between 4 and 16 MiB."""
_USER_ROUNDS = 2
"""Batches that it makes at most where code of the user's runs, which may count its
calls or be slow.  The first call often imports; the second tells."""


_LONGEST_S = 10.0
"""A process that measures is given up after so long: samples may be slow, or wait for
something that only a worker has."""
_MOST_COPIED_BYTES = 64 << 20
"""A larger dataset is not copied to be measured."""


def probe(dataset: Any, rows: Sequence[int], collate: Callable[[Any], Any]) -> Measured:
    """Measure what a batch costs, and leave dataset and random numbers as they were.

    Args:
        dataset: Indexed, not iterated.
        rows: Rows of a typical batch, at least one.
        collate: How samples are joined.

    Returns:
        What a batch costs.

    Raises:
        LoaderkitError: It could not be measured.
    """
    # A daemon may not have children: none to measure in, and no workers either.
    alone = multiprocessing.current_process().daemon
    if reading_draws_nothing(dataset) or alone:
        return _measure_here(dataset, rows, collate)
    # macOS can fork, but its own libraries may end a process that did.
    if "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin":
        return _measure_in_a_fork(dataset, rows, collate)
    return _measure_a_copy(dataset, rows, collate)


def _measure_in_a_fork(
    dataset: Any, rows: Sequence[int], collate: Callable[[Any], Any]
) -> Measured:
    """Measure in a process that ends behind it, with one thread, as in a worker."""
    begun = time.perf_counter()
    context: Any = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_measure_and_send, args=(sender, dataset, rows, collate), daemon=True
    )
    try:
        with warnings.catch_warnings():
            # Of threads in this process, from Python 3.12 on, as with torch's workers.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        sender.close()
        answer = _wait_for_answer(process, receiver)
    except OSError as error:
        what = f"no process could be started to measure in: {error}"
        raise _not_measured(what) from error
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        receiver.close()
    if isinstance(answer, str):
        raise _not_measured(f"reading failed: {answer}")
    return replace(answer, probe_s=time.perf_counter() - begun)


def _wait_for_answer(process: Any, receiver: Connection[Any, Any]) -> Measured | str:
    """Wait for what was measured, or the text of an error."""
    if not receiver.poll(_LONGEST_S):
        what = f"no sample was read within {format_seconds(_LONGEST_S)}"
        raise _not_measured(what)
    try:
        answer: Measured | str = receiver.recv()
    except EOFError:
        process.join()
        what = f"the process that read them died (exit status {process.exitcode})"
        raise _not_measured(what) from None
    return answer


def _measure_and_send(
    sender: Connection[Any, Any],
    dataset: Any,
    rows: Sequence[int],
    collate: Callable[[Any], Any],
) -> None:
    """Measure; runs in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)  # those of OpenMP do not survive a fork
    try:
        answer: Measured | str = measure(dataset, rows, collate)
    except LoaderkitError as error:
        answer = error.what
    except Exception as error:  # noqa: BLE001 -- the loop raises it, if it comes again
        answer = f"{type(error).__name__}: {error}"
    sender.send(answer)


def _measure_a_copy(
    dataset: Any, rows: Sequence[int], collate: Callable[[Any], Any]
) -> Measured:
    """Measure on a copy, as a spawned worker would get it, if it is not large."""
    try:
        with _BoundedBuffer(_MOST_COPIED_BYTES) as file:
            pickle.Pickler(file, pickle.HIGHEST_PROTOCOL).dump((dataset, collate))
            dataset, collate = pickle.loads(file.getvalue())
    except _TooLargeError as error:
        raise _not_measured(f"the dataset is {error} to send") from error
    except Exception:  # noqa: BLE001 -- pickling runs code of the user's
        pass  # What cannot be sent gets no workers, and nothing is to be kept for them.
    return _measure_here(dataset, rows, collate)


def _measure_here(
    dataset: Any, rows: Sequence[int], collate: Callable[[Any], Any]
) -> Measured:
    try:
        with quiet():
            return measure(dataset, rows, collate)
    except LoaderkitError as error:
        raise _not_measured(f"reading failed: {error.what}") from error


class _TooLargeError(Exception):
    """More was written than allowed."""


class _BoundedBuffer(io.BytesIO):
    """Takes so many bytes and no more."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def write(self, text: Any) -> int:
        if self.tell() + len(text) > self._most:
            msg = f"over {format_bytes(self._most)}"
            raise _TooLargeError(msg)
        return super().write(text)


def _not_measured(what: str) -> LoaderError:
    fix = "probe=False, and num_workers=... as you know better"
    return LoaderError(what, why="the number of workers depends on it", fix=fix)


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
    if is_gathering(dataset, collate):
        sample_s, _ = _read_first(dataset, rows, gathering=True)
        batch, fetched_s = _gather_several(dataset, rows, collate, deadline)
        read = len(rows)
    else:
        sample_s, samples = _read_first(dataset, rows, gathering=False)
        batch, fetched_s, read = _read_batches(
            dataset, rows, collate, samples, sample_s, deadline
        )
    scale = len(rows) / read
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


def _gather_several(
    dataset: Any, rows: Sequence[int], collate: Callable[[Any], Any], deadline: float
) -> tuple[Any, float]:
    """Gather a batch again and again, and not from the CPU's cache.

    In an epoch each batch is another one, and the CPU's own cache holds the batch
    before.  The same batch once more would take half the time, and another batch might
    wait for the disk.  So it is the same one, with the CPU's cache filled in between.

    Returns:
        The batch, and what it takes, in seconds.
    """
    batch, first_s = _time_fetch(dataset, rows, collate)  # may wait for the disk
    other = np.ones(_CPU_CACHE_BYTES // 8)
    deadline = max(deadline, time.perf_counter() + PROBE_S / 2)
    times: list[float] = []
    while len(times) < _ROUNDS and time.perf_counter() < deadline:
        other.sum()
        batch, seconds = _time_fetch(dataset, rows, collate)
        times.append(seconds)
    return batch, statistics.median(times or [first_s])


class _Fetched(NamedTuple):
    batch: Any
    seconds: float


def _time_fetch(
    dataset: Any, rows: Sequence[int], collate: Callable[[Any], Any]
) -> _Fetched:
    start = time.perf_counter()
    batch = fetch(dataset, rows, collate)
    return _Fetched(batch, time.perf_counter() - start)


def _read_batches(
    dataset: Any,
    rows: Sequence[int],
    collate: Callable[[Any], Any],
    samples: list[Any],
    sample_s: float,
    deadline: float,
) -> tuple[Any, float, int]:
    """Read a batch by a user's code, or as much of one as there is time for.

    Returns:
        A batch, what it takes in seconds, and how many samples it has.
    """
    times: list[float] = []
    batch: Any = None
    for _ in range(_USER_ROUNDS):
        expected_s = times[-1] if times else sample_s * len(rows)
        if time.perf_counter() + expected_s > deadline:
            break
        batch, seconds = _time_fetch(dataset, rows, collate)
        times.append(seconds)
    if times:
        return batch, min(times), len(rows)
    samples, times, read = _read_some(dataset, rows, samples, sample_s, deadline)
    batch = collate(samples) if isinstance(collate, Join) else samples
    return batch, min(times), read


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
    dataset: Any,
    rows: Sequence[int],
    samples: list[Any],
    sample_s: float,
    deadline: float,
) -> tuple[list[Any], list[float], int]:
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
    with contextlib.closing(SegmentRing(1)) as segments:
        for attempt in range(4):
            start = time.perf_counter()
            if attempt and start > deadline:
                break
            try:
                parcel = SharedBatch(batch, segments)
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
