"""One iteration over a loader: what was given, what failed, and a tidy end."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from loaderkit.answers import no_such_attribute
from loaderkit.cache.download_ahead import DownloadAhead
from loaderkit.dataset_protocol import ask_stored_rows
from loaderkit.errors import CacheError, NoSuchAttributeError
from loaderkit.loader.delivery import SKIPPED, Delivery, open_delivery
from loaderkit.loader.downloads import shard_uses
from loaderkit.loader.failures import FAILURES, Failure, NotRebuilt
from loaderkit.loader.iterables import EqualBatches
from loaderkit.loader.read_ahead import ReadAhead
from loaderkit.loader.resumable import EpochBatches
from loaderkit.loader.sample_names import names_of
from loaderkit.loader.worker_deaths import WorkerDeaths

if TYPE_CHECKING:
    from loaderkit.loader.lengths_told import LengthsTold
    from loaderkit.loader.loader_state import Progress, Standing
    from loaderkit.loader.plan import LoaderPlan
    from loaderkit.loader.resumable import Position
    from loaderkit.loader.user_batches import UserBatches

_LOG = logging.getLogger("loaderkit")


class IteratedLoader(Protocol):
    """What an iteration asks of its loader."""

    @property
    def dataset(self) -> Any:
        """What is read."""

    @property
    def batches(self) -> EpochBatches | UserBatches | None:
        """What gives the rows of each batch; None for iterable datasets."""

    @property
    def plan(self) -> LoaderPlan:
        """The settings."""

    @property
    def num_workers(self) -> int:
        """Number of workers."""

    def __len__(self) -> int:
        """Count the batches of an epoch."""

    @property
    def lengths_told(self) -> LengthsTold:
        """What ``len`` told of epochs."""

    def check_length(self, batches: int) -> None:
        """Warn if there are more batches than ``len`` said."""


def announce_downloads(loader: IteratedLoader, start: Position) -> DownloadAhead | None:
    """Get ready to download what an epoch reads from a store, if it reads from one.

    Args:
        loader: The loader.
        start: Where the epoch begins.

    Returns:
        What downloads it once it is started; its workers should be started before, and
        know from here on what to wait for.  None where there is nothing to download.
    """
    plan, batches = loader.plan.downloads, loader.batches
    if plan is None or not plan.ahead_bytes or not isinstance(batches, EpochBatches):
        return None
    stored = ask_stored_rows(loader.dataset)
    if stored is None or not stored.is_missing.any():
        return None
    uses = shard_uses(stored.shard_of_row, batches.epoch_from(start), start.batches)
    try:
        return DownloadAhead(stored, uses)
    except CacheError as error:
        # Whoever reads a shard gets the error.
        _LOG.warning("nothing is downloaded ahead: %s", error)
        return None


class TakenBatch(NamedTuple):
    """A batch that the loop was not given yet."""

    batch: Any
    standing: Standing
    """Where the iteration stands once it is given: behind it, or with ``lookahead``
    before it, since the loop is then still to use it."""


class LoaderEpoch(Iterator[Any]):
    """Batches of one epoch: counted, and ended tidily whatever happens.

    Args:
        loader: The loader.
        torch_iterator: torch's own iterator, over deliveries.
        progress: Where it begins; counted up here.
        ends_workers: ``close`` ends the workers; otherwise the loader or torch does.
        lookahead: The loop fetches each batch before it uses the one before.
        oom_kills: How often the kernel had killed for memory before; None if unknown.
        downloads: What downloads shards of the epoch before they are read; started
            here, after the start of the workers, since it starts threads.
    """

    def __init__(
        self,
        loader: IteratedLoader,
        torch_iterator: Any,
        progress: Progress,
        *,
        ends_workers: bool,
        lookahead: bool,
        oom_kills: int | None,
        downloads: DownloadAhead | None,
    ) -> None:
        self.progress = progress
        self._last_taken = progress.standing
        self._torch_iterator = torch_iterator
        self._ends_workers = ends_workers
        self.lookahead = lookahead
        """Whether the loop fetches each batch before it uses the one before."""
        self._batches, self._dataset = loader.batches, loader.dataset
        self._start = progress.start
        self._loader_length = loader.__len__
        self._check_length = loader.check_length
        is_stream, workers = loader.batches is None, loader.num_workers
        # Of an epoch from its beginning, whose batches come from worker after worker.
        has_order = bool(loader.plan.in_order.value) and not progress.start.batches
        self._equal_batches: EqualBatches | None = None
        if is_stream and workers > 1 and has_order:
            self._equal_batches = EqualBatches(workers)

        self._download_ahead = downloads
        if downloads is not None:
            downloads.start()
            # A loop that is left early lets go of its iterator, and says no more.
            weakref.finalize(self, downloads.close)
        self._deaths = WorkerDeaths(
            torch_iterator, loader.dataset, loader.batches, progress, oom_kills
        )
        if isinstance(loader.batches, EpochBatches):
            # When a loop lets go of it: of the last epoch there is no other moment.
            weakref.finalize(
                self, _check_left, loader.batches, progress, loader.lengths_told
            )
        if loader.num_workers:
            # As soon as it can tell of a death: workers are at work already.
            self._deaths.watch()

        self._deliveries: Iterator[Delivery] = torch_iterator
        if loader.num_workers:
            # At once: a worker may fill the segment again when the next one is asked
            # for.
            self._deliveries = map(open_delivery, torch_iterator)
        depth = loader.plan.read_ahead.value
        if depth:
            self._deliveries = ReadAhead(self._deliveries, depth)

    def __iter__(self) -> LoaderEpoch:
        return self

    def __len__(self) -> int:
        if isinstance(self._batches, EpochBatches):
            # The loader itself tells the length of the epoch that comes next.
            return len(self._batches.epoch_from(self._start))
        return self._loader_length()

    if not TYPE_CHECKING:  # a type checker shall go on to find misspelt names

        def __getattr__(self, name: str) -> Any:
            """Answer ``dataiter.next()``, which old tutorials of PyTorch have."""
            if name == "next":
                message = "The batches of a loader have no attribute 'next'."
                why = "it is the way of Python 2"
                raise NoSuchAttributeError(message, why=why, fix="next(dataiter)")
            if name.startswith("_"):
                # Python and libraries look for names such as __deepcopy__: they get the
                # usual AttributeError.
                return object.__getattribute__(self, name)
            raise no_such_attribute(self, name)

    def __next__(self) -> Any:
        batch, standing = self.take()
        # The last that is done, and no call between it and the return, where Python
        # looks for signals: a batch that an exception (Ctrl-C, a worker's death) keeps
        # from the loop is not counted, so that a state saved then goes on with it.
        self.progress.standing = standing
        return batch

    def take(self) -> TakenBatch:
        """Take the next batch without counting it as given to the loop.

        For whoever takes one before the loop gets the last; ``progress.standing`` is to
        be set when it does.
        """
        delivery = self._next_delivery()
        self._raise_if_failed(delivery)
        is_stream = self._batches is None
        standing = self._last_taken.after(delivery, numbered=not is_stream)
        taken = standing.position.batches
        if self._download_ahead is not None:
            self._download_ahead.advance(taken)
        if is_stream:
            self._check_length(taken)
        if self._equal_batches is not None:
            # The loop calls __next__, which calls this.
            has_more = self._equal_batches.note(delivery.batch, stacklevel=3)
            self._equal_batches = self._equal_batches if has_more else None
        if self.lookahead:
            # Whoever asks for this batch uses the one before it next; whoever is told
            # that there are no more uses the last, and ``progress`` has ended.
            last_used, self._last_taken = self._last_taken, standing
            return TakenBatch(delivery.batch, last_used)
        self._last_taken = standing
        return TakenBatch(delivery.batch, standing)

    def _raise_if_failed(self, delivery: Delivery) -> None:
        """Raise the error that came in the place of a batch."""
        failure = delivery.batch
        if not isinstance(failure, FAILURES):
            return
        if isinstance(failure, NotRebuilt):
            raise failure.about(self._name_batch_of(delivery)) from failure.error
        if isinstance(failure, Failure) and failure.is_of_start:
            self.progress.lose_worker()
        raise failure.rebuilt()

    def _name_batch_of(self, delivery: Delivery) -> str:
        """Name a batch by its samples, where they are known, to begin a message."""
        if isinstance(self._batches, EpochBatches):
            rows = self._batches.epoch_from(self._start).batch(delivery.number)
            return f"The batch of {names_of(self._dataset, rows)}"
        if self._batches is None:
            return f"Batch {delivery.number:,} of worker {delivery.worker}"
        return f"Batch {delivery.number + 1:,}"

    def _next_delivery(self) -> Delivery:
        """Wait for the next delivery with a batch, or explain why none will come."""
        try:
            delivery = next(self._deliveries)
            while delivery.number == SKIPPED:
                delivery = next(self._deliveries)
        except StopIteration:
            self.progress.end()
            self.close()
            self._warn_of_iterator_read_before()
            raise
        except RuntimeError as error:
            death = self._deaths.explain_torchs_error(error)
            if death is None:
                raise
            self._end_after_death()
            # torch's wait raises another error from the one that the signal raised.
            raise death from (death.__cause__ or error)
        except (EOFError, ConnectionError, FileNotFoundError) as error:
            death = self._deaths.explain_lost_message()
            if death is None:
                raise
            self._end_after_death()
            raise death from error
        return delivery

    def _warn_of_iterator_read_before(self) -> None:
        """Warn of a stream that had samples in its first epoch alone."""
        is_stream = self._batches is None
        taken = self._last_taken.position.batches
        if not is_stream or taken or not self._start.epoch:
            return
        text = f"epoch {self._start.epoch} has no batches: probably the dataset's "
        text += "__iter__ returns an iterator that was read before; make a new one in "
        text += "__iter__, such as iter(self.samples)"
        # The loop calls __next__, which calls take, _next_delivery and this.
        warnings.warn(text, RuntimeWarning, stacklevel=5)

    def _end_after_death(self) -> None:
        self.close()
        self._torch_iterator._shutdown_workers()

    def close(self) -> None:
        """Let go of threads and workers, but for those the loader keeps."""
        if self._download_ahead is not None:
            self._download_ahead.close()
        if isinstance(self._deliveries, ReadAhead):
            self._deliveries.close()
        if self._ends_workers:
            self._end_workers()

    def abandon(self) -> None:
        """End the workers too, though somebody may still hold this iterator."""
        self.close()
        self._end_workers()

    def _end_workers(self) -> None:
        # torch's iterator without workers has none to shut down.
        if hasattr(self._torch_iterator, "_shutdown_workers"):
            self._torch_iterator._shutdown_workers()


def _check_left(batches: EpochBatches, progress: Progress, told: LengthsTold) -> None:
    """Warn where an iteration was left behind as many batches as another epoch has.

    Args:
        batches: Those of the loader.
        progress: How far the iteration came.
        told: What ``len`` told of epochs.
    """
    if progress.has_stopped or told.has_warned or not progress.has_given:
        return
    start, position = progress.start, progress.standing.position
    if position.ahead:
        return  # given out of turn: who reads so does not count
    if not told.has_told(position.batches):
        return  # without working out an epoch: of 10^7 samples that takes a second
    # The dataset may have grown since, and then this tells what it has now.
    epoch = batches.epoch_from(start)
    length = len(epoch)
    if not told.is_read_by_another(position.batches, start.epoch, length):
        return
    first_unread = position.batches - epoch.first_batch
    told.warn_of_left_epoch(
        position.batches,
        start.epoch,
        length,
        int(epoch.bounds[-1] - epoch.bounds[first_unread]),
        sizes_vary=batches.lengths_vary,
        # weakref's own call of this is between it and the line that let go.
        stacklevel=3,
    )
