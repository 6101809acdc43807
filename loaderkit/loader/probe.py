"""What reading a batch costs, measured before a loader is planned.

Code of the user's is measured in a process of its own.  Here it would leave open what
it opens and keeps: workers forked later share one position in such a file, and read
each other's bytes; to workers that are spawned it cannot be sent.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import statistics
import sys
import time
import warnings
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from loaderkit.error_texts import error_in_words
from loaderkit.errors import LoaderError, LoaderkitError
from loaderkit.interrupts import Interrupts
from loaderkit.loader.collating import DefaultCollate, is_gathering
from loaderkit.loader.description import reading_draws_no_random_numbers
from loaderkit.loader.facts import PROBE_S, ReadCost
from loaderkit.loader.fetching import fetch
from loaderkit.loader.page_locking import device_of_batch
from loaderkit.memory.shm_batch import SharedBatch
from loaderkit.memory.shm_segments import SegmentRing, forget
from loaderkit.memory.tensorless_pickles import why_unsendable
from loaderkit.nests import flatten_tensors
from loaderkit.randomness import preserve_random_states
from loaderkit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from typing_extensions import Buffer

    from loaderkit.dataset_protocol import IndexedSamples
    from loaderkit.loader.collating import Collate

_SLOW_SAMPLE_S = 1.0
"""A first sample that took less is not believed, because reading it may also import
modules and open files: a second one is timed.  Chosen: importing and opening take less,
and a second sample that takes longer would make ``build_loader`` slow."""
_MOST_GATHERED = 9
"""Times that a batch is gathered from a cache, at most.  Chosen: their median holds
against four slow ones."""
_CPU_CACHE_BYTES = 8 << 20
"""Several times a core's own cache, a part of the one that cores share.  Measured on
W1 and W2 with caches of 1 and 32 MiB: what an epoch takes lies between 4 and 16 MiB."""
_MOST_USER_BATCHES = 2
"""Batches that are made at most where code of the user's runs, which may count its
calls or be slow.  The first call often imports; the second tells."""
_MOST_TRANSFERS = 4
"""Times that a batch is sent, at most.  Chosen: the first ones allocate the memory that
the later ones fill again, as in an epoch, and the quickest counts."""
_LONGEST_S = 10.0
"""A process that measures is given up after so long: samples may be slow, or wait for
something that only a worker has.  Chosen: importing what a dataset needs, such as PyG,
takes less."""
_MOST_COPIED_BYTES = 64 << 20
"""A larger dataset is not copied to be measured.  Chosen: pickling and unpickling so
much takes about as long as the probe may."""


def probe(dataset: IndexedSamples, rows: Sequence[Any], collate: Collate) -> ReadCost:
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
    # A user's ``collate_fn`` may count its calls, also where samples lie in memory.
    if reading_draws_no_random_numbers(dataset) and _joins_as_library(dataset, collate):
        return _measure_here(dataset, rows, collate)
    # A daemon may not have children: none to measure in, and no workers either.
    alone = multiprocessing.current_process().daemon
    # macOS can fork, but its own libraries may end a process that did.
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    if can_fork and sys.platform != "darwin" and not alone:
        return _measure_in_a_fork(dataset, rows, collate)
    return _measure_a_copy(dataset, rows, collate)


def _joins_as_library(dataset: IndexedSamples, collate: Collate) -> bool:
    """Tell whether no code of the user's joins samples, nor changes a batch."""
    return isinstance(collate, DefaultCollate) or is_gathering(dataset, collate)


def _measure_in_a_fork(
    dataset: IndexedSamples, rows: Sequence[Any], collate: Collate
) -> ReadCost:
    """Measure in a process that ends behind it, with one thread, as in a worker."""
    begun = time.perf_counter()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_measure_and_send, args=(sender, dataset, rows, collate), daemon=True
    )
    try:
        # A Ctrl-C that comes in a hook of fork is dropped there.
        with Interrupts(), warnings.catch_warnings():
            # Of threads in this process, from Python 3.12 on, as with torch's workers.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        sender.close()
        answer = _wait_for_answer(process, receiver)
    except OSError as error:
        reason = f"no process could be started to measure in: {error}"
        raise _not_measured(reason) from error
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        receiver.close()
    if isinstance(answer, str):
        raise _not_measured(f"reading failed: {answer}")
    return replace(answer, probe_s=time.perf_counter() - begun)


def _wait_for_answer(
    process: BaseProcess, receiver: Connection[Any, Any]
) -> ReadCost | str:
    """Wait for what was measured, or the text of an error."""
    if not receiver.poll(_LONGEST_S):
        reason = f"no sample was read within {format_seconds(_LONGEST_S)}"
        raise _not_measured(reason)
    try:
        answer: ReadCost | str = receiver.recv()
    except EOFError:
        process.join()
        reason = f"the process that read them died (exit status {process.exitcode})"
        raise _not_measured(reason) from None
    return answer


def _measure_and_send(
    sender: Connection[Any, Any],
    dataset: IndexedSamples,
    rows: Sequence[Any],
    collate: Collate,
) -> None:
    """Measure; runs in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)  # those of OpenMP do not survive a fork
    try:
        answer: ReadCost | str = measure_reading(dataset, rows, collate)
    except LoaderkitError as error:
        answer = error.what
    except Exception as error:  # noqa: BLE001 -- the loop raises it, if it comes again
        answer = error_in_words(error)
    sender.send(answer)


def _measure_a_copy(
    dataset: IndexedSamples, rows: Sequence[Any], collate: Collate
) -> ReadCost:
    """Measure on a copy, as a spawned worker would get it, if it is not large."""
    try:
        with _BoundedBuffer(_MOST_COPIED_BYTES) as buffer:
            pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump((dataset, collate))
            dataset, collate = pickle.loads(buffer.getvalue())
    except _BufferFullError as error:
        raise _not_measured(f"the dataset is {error} to send") from error
    except Exception:  # noqa: BLE001 -- pickling runs code of the user's
        pass  # What cannot be sent gets no workers, and nothing is to be kept for them.
    return _measure_here(dataset, rows, collate)


def _measure_here(
    dataset: IndexedSamples, rows: Sequence[Any], collate: Collate
) -> ReadCost:
    try:
        with preserve_random_states():
            return measure_reading(dataset, rows, collate)
    except LoaderkitError as error:
        raise _not_measured(f"reading failed: {error.what}") from error


class _BufferFullError(Exception):
    """More was written than allowed."""


class _BoundedBuffer(io.BytesIO):
    """Takes so many bytes and no more, so that a large dataset is not copied whole."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most_bytes = most_bytes

    def write(self, content: Buffer) -> int:
        if self.tell() + memoryview(content).nbytes > self._most_bytes:
            msg = f"over {format_bytes(self._most_bytes)}"
            raise _BufferFullError(msg)
        return super().write(content)


def _not_measured(reason: str) -> LoaderError:
    fix = "probe=False, and num_workers=... as you know better"
    return LoaderError(reason, why="the number of workers depends on it", fix=fix)


def measure_reading(
    dataset: IndexedSamples, rows: Sequence[Any], collate: Collate
) -> ReadCost:
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
        first = _time_first_samples(dataset, rows[:1])
        fetched = _gather_repeatedly(dataset, rows, collate, deadline)
    else:
        # The second sample is timed as well: the first one also imports and opens.
        first = _time_first_samples(dataset, rows[:2])
        fetched = _fetch_with_users_code(dataset, rows, collate, first, deadline)

    transfer = _time_transfer(fetched.batch, deadline)
    scale = len(rows) / fetched.samples
    return ReadCost(
        samples=fetched.samples,
        sample_bytes=transfer.nbytes // fetched.samples,
        batch_bytes=int(transfer.nbytes * scale),
        fetch_s=fetched.seconds * scale,
        sample_s=first.seconds_each,
        send_s=transfer.send_s * scale,
        receive_s=transfer.receive_s * scale,
        device=device_of_batch(fetched.batch),
        unsendable=transfer.unsendable if fetched.is_joined else fetched.unsendable,
        probe_s=time.perf_counter() - begun,
    )


@dataclass(frozen=True)
class _FirstSamples:
    """The first samples of a batch, read one by one."""

    samples: list[Any]
    """As the dataset gave them."""
    seconds_each: float
    """The time of the quickest."""


class _Fetched(NamedTuple):
    """A batch, or the samples of as much of one as there was time for."""

    batch: Any
    samples: int
    """How many samples are in it."""
    seconds: float
    """The time to read and join them."""
    is_joined: bool = True
    """It is what the loop gets.  A user's ``collate_fn`` was not called with a part."""
    unsendable: str = ""
    """Why a whole batch cannot be pickled, where these samples are a part of one."""


class _TransferCost(NamedTuple):
    """What it takes to send a batch from one process to another."""

    nbytes: int
    """Bytes of its tensors."""
    send_s: float
    """To put it into shared memory."""
    receive_s: float
    """To take it out."""
    unsendable: str = ""
    """Why it cannot be pickled; empty if it can."""


def _time_first_samples(dataset: IndexedSamples, rows: Sequence[Any]) -> _FirstSamples:
    samples: list[Any] = []
    quickest_s = float("inf")
    for row in rows:
        start = time.perf_counter()
        samples += _as_list(fetch(dataset, [row], _as_list))
        quickest_s = min(quickest_s, time.perf_counter() - start)
        if quickest_s >= _SLOW_SAMPLE_S:
            break
    return _FirstSamples(samples, quickest_s)


def _as_list(samples: object) -> list[Any]:
    return samples if isinstance(samples, list) else [samples]


def _time_fetch(
    dataset: IndexedSamples, rows: Sequence[Any], collate: Collate
) -> _Fetched:
    start = time.perf_counter()
    batch = fetch(dataset, rows, collate)
    return _Fetched(batch, len(rows), time.perf_counter() - start)


def _gather_repeatedly(
    dataset: IndexedSamples, rows: Sequence[Any], collate: Collate, deadline: float
) -> _Fetched:
    """Gather a batch again and again, and not from the CPU's cache.

    In an epoch each batch is another one, and the CPU's own cache holds the batch
    before.  The same batch once more would take half the time, and another batch might
    wait for the disk.  So it is the same one, with the CPU's cache filled in between.

    Returns:
        The batch, with the median of its times.
    """
    fetched = _time_fetch(dataset, rows, collate)  # may wait for the disk
    cache_filler = np.ones(_CPU_CACHE_BYTES // 8)
    # The first one may have used up all the time; one number alone says little.
    deadline = max(deadline, time.perf_counter() + PROBE_S / 2)
    times_s: list[float] = []
    while len(times_s) < _MOST_GATHERED and time.perf_counter() < deadline:
        cache_filler.sum()
        times_s.append(_time_fetch(dataset, rows, collate).seconds)
    return fetched._replace(seconds=statistics.median(times_s or [fetched.seconds]))


def _fetch_with_users_code(
    dataset: IndexedSamples,
    rows: Sequence[Any],
    collate: Collate,
    first: _FirstSamples,
    deadline: float,
) -> _Fetched:
    """Make a batch, or read as many of its samples as there is time for."""
    fetched: _Fetched | None = None
    for _ in range(_MOST_USER_BATCHES):
        expected_s = first.seconds_each * len(rows)
        if fetched is not None:
            expected_s = fetched.seconds
        if time.perf_counter() + expected_s > deadline:
            break
        again = _time_fetch(dataset, rows, collate)
        # The quicker of the two: the other one also imported.
        if fetched is None or again.seconds < fetched.seconds:
            fetched = again
    return fetched or _read_some_samples(dataset, rows, collate, first, deadline)


def _read_some_samples(
    dataset: IndexedSamples,
    rows: Sequence[Any],
    collate: Collate,
    first: _FirstSamples,
    deadline: float,
) -> _Fetched:
    """Read on from the first samples, one by one, while there is time.

    A user's ``collate_fn`` is not called with parts of a batch, and not timed.
    """
    samples = list(first.samples)
    seconds = first.seconds_each * len(samples)
    start = time.perf_counter()
    for row in rows[len(samples) :]:
        if time.perf_counter() + first.seconds_each > deadline:
            break
        samples += _as_list(fetch(dataset, [row], _as_list))
    if len(samples) > len(first.samples):
        seconds += time.perf_counter() - start
    if isinstance(collate, DefaultCollate):
        # Samples that cannot be joined are told as those of a whole batch are.
        batch = fetch(samples, range(len(samples)), collate)
        return _Fetched(batch, len(samples), seconds)
    unsendable = _why_joined_unsendable(samples, len(rows), collate)
    return _Fetched(samples, len(samples), seconds, False, unsendable)


def _why_joined_unsendable(
    samples: Sequence[Any], batch_size: int, collate: Collate
) -> str:
    """Say why what a user's ``collate_fn`` makes cannot be pickled; empty if it can.

    It is given as many samples as a batch has, some of them again and again, since
    there was no time to read more.
    """
    repeated = itertools.islice(itertools.cycle(samples), batch_size)
    try:
        # Copies: a function may take fields out of the dicts that it is given.
        batch = collate([copy.copy(sample) for sample in repeated])
    except Exception:  # noqa: BLE001 -- the user's code; the loop raises it, if it comes again
        return ""
    return "" if device_of_batch(batch) else why_unsendable(batch)


def _time_transfer(batch: object, deadline: float) -> _TransferCost:
    """Send a batch to this process itself, and take the quickest time of either end.

    Returns:
        Without times if the batch cannot be sent so, which is no error here.
    """
    if device_of_batch(batch):
        # The process that put tensors on a GPU cannot take them out of a message.
        tensors = flatten_tensors(batch)
        host_bytes = sum(tensor.nbytes for tensor in tensors if tensor.is_cpu)
        return _TransferCost(host_bytes, 0.0, 0.0)
    unsendable = why_unsendable(batch)
    if unsendable:
        return _TransferCost(0, 0.0, 0.0, unsendable)
    send_s = receive_s = float("inf")
    nbytes = 0
    with contextlib.closing(SegmentRing(1)) as segments:
        for attempt in range(_MOST_TRANSFERS):
            start = time.perf_counter()
            if attempt and start > deadline:
                break
            try:
                shared_batch = SharedBatch(batch, segments)
                message = bytes(ForkingPickler.dumps(shared_batch))
            except (OSError, AttributeError, TypeError, pickle.PicklingError):
                return _TransferCost(nbytes, 0.0, 0.0)
            sent = time.perf_counter()
            pickle.loads(message).open()
            received = time.perf_counter()

            send_s = min(send_s, sent - start)
            receive_s = min(receive_s, received - sent)
            nbytes = shared_batch.nbytes
    forget([os.getpid()])  # the mappings of the segments that were received here
    return _TransferCost(nbytes, send_s, receive_s)
