"""Batches moved to the device ahead of time."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from loaderkit.answers import answer_wrong_calls
from loaderkit.errors import LoaderError
from loaderkit.loader.delivery import Resumption
from loaderkit.loader.epochs import LoaderEpoch, TakenBatch
from loaderkit.loader.loader_state import Standing
from loaderkit.loader.page_locking import answers_operators
from loaderkit.loader.planned import PlannedLoader
from loaderkit.loader.resumable import Position
from loaderkit.memory.probes import read_capability
from loaderkit.nests import dense_parts, flatten, map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from loaderkit.loader.loader_state import Progress


class StreamModule(Protocol):
    """torch's module of a kind of device that has streams, such as ``torch.cuda``."""

    def Stream(self, device: torch.device, /) -> Any:  # noqa: N802 -- torch's name
        """Make a stream."""

    def stream(self, stream: Any, /) -> AbstractContextManager[Any]:
        """Give a block whose work is queued on a stream."""

    def current_stream(self, device: torch.device, /) -> Any:
        """Return the stream that work is queued on now."""


@answer_wrong_calls
class DevicePrefetcher:
    """Gives a loader's batches on the device, the next one copied while one computes.

    On devices with streams (CUDA, ROCm, XPU) the copy runs beside the computing, from
    page-locked memory; elsewhere each batch is moved when it is asked for.  A loop that
    never waits for the device, not even for a loss, is kept at most two steps ahead of
    it: four batches are on the device, however long the loop.

    An object of another library is moved by its own ``to``.  Where it also has
    ``record_stream(stream)``, as tensors have, its memory is known to be in use; else
    the copy of the next batch waits until the step before is done.

    Args:
        loader: Any iterable of batches: tensors of any layout, PyG data, objects with
            ``to``, or nests of these.
        device: Where they go.

    Raises:
        ValueError: There is no such device.
    """

    def __init__(self, loader: Iterable[Any], device: str | torch.device) -> None:
        self.loader = loader
        self.capability = read_capability(device)
        self.device = torch.device(device)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError if it has none

    def __getattr__(self, name: str) -> Any:
        # Reached for missing attributes only.  These three are missing while a copy is
        # made or unpickled; looking for them on self.loader would come back here.
        if name in {"loader", "device", "capability"}:
            raise AttributeError(name)
        value = getattr(self.loader, name)
        counts_given = isinstance(self.loader, PlannedLoader)
        if name == "state_dict" and self.capability.asynchronous and not counts_given:
            return functools.partial(_refuse_state, self.loader)
        return value

    def __iter__(self) -> Iterator[Any]:
        host_batches = iter(self.loader)
        if not self.capability.asynchronous:
            return MovedBatches(host_batches, self.device)
        device_module = torch.get_device_module(self.device.type)
        return CopiedBatches(host_batches, self.device, device_module)


def _refuse_state(loader: object) -> NoReturn:
    """Refuse the state of a loader that counts the batch that is copied ahead as given.

    Who went on from it would lose that batch.
    """
    message = f"DevicePrefetcher cannot tell the state of a {type(loader).__name__}."
    why = "it counts the batch that is copied ahead as given to the loop"
    fix = "DevicePrefetcher(loaderkit.build_loader(dataset), device)"
    raise LoaderError(message, why=why, fix=fix)


def _two_fetch_ahead() -> LoaderError:
    """Refuse to copy ahead for a loop that fetches ahead itself.

    The end of the epoch is found here while the loop still has two batches to use, and
    a state that it saves then would leave out the last one.
    """
    message = "DevicePrefetcher takes no batches of a loader with lookahead=True."
    why = "both fetch a batch ahead, and a state saved near the end would lose one"
    fix = "give Lightning the loader itself, whose batches it moves; in a loop of your "
    fix += "own, build it without lookahead=True"
    return LoaderError(message, why=why, fix=fix)


def page_locked(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to page-locked memory, from which a device copies by itself.

    torch takes that memory from blocks that it keeps, and gives none out again before
    the copy from it is done (its caching host allocator records an event for each copy
    with ``non_blocking=True``).  So nothing has to be kept here until then, and after
    a few batches nothing is page-locked anew.

    Args:
        tensor: Given back as it is where it is page-locked already, as from a loader
            with ``pin_memory=True``, has no values, or lies on a device.
    """
    if tensor.device.type != "cpu" or not tensor.numel() or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()


_MOST_STEPS_QUEUED = 2
"""Steps that a loop may be ahead of the device: one that is computed while the next
batch is made, and one more for a batch that takes longer."""
_NO_BATCH = object()
"""Stands for the end; a batch may be None."""


class _HostBatches:
    """Takes batches of a loader, and says which of them the loop was given.

    Args:
        batches: An iterator over batches on the host.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.progress: Progress | _NoProgress = _NoProgress()
        """Its ``standing`` is set as a batch is given: the last thing that is done, and
        no call, as in ``LoaderEpoch``."""
        if isinstance(batches, LoaderEpoch):
            self.progress = batches.progress

    def take(self) -> TakenBatch | None:
        """Take the next batch; None at the end."""
        if isinstance(self._batches, LoaderEpoch):
            try:
                return self._batches.take()
            except StopIteration:
                return None
        batch = next(self._batches, _NO_BATCH)
        return None if batch is _NO_BATCH else TakenBatch(batch, _NOWHERE)


_NOWHERE = Standing(Position(), Resumption())
"""Where a loader stands that does not count its batches for us."""


class _NoProgress:
    """Stands for what counts the batches of a loader, where nothing does."""

    standing = _NOWHERE


class MovedBatches(Iterator[Any]):
    """The batches of a loader, each moved to a device as it is asked for.

    Args:
        host_batches: On the host.
        device: Where they go.
    """

    def __init__(self, host_batches: Iterator[Any], device: torch.device) -> None:
        self._host_batches, self._device = _HostBatches(host_batches), device

    def __next__(self) -> Any:
        taken = self._host_batches.take()
        if taken is None:
            raise StopIteration
        batch = move(taken.batch, self._device)
        self._host_batches.progress.standing = taken.standing
        return batch


class CopiedBatches(Iterator[Any]):
    """The batches of a loader, copied on a stream of its own, one ahead.

    The current stream waits for each.  The loop waits for the device only where it is
    two steps ahead: each batch of a step that is queued keeps its memory.  An error of
    the loader, or of a copy, is raised where its batch would have come, and the batch
    before it is given first.

    Args:
        host_batches: On the host.
        device: Where they go.
        device_module: torch's module of that kind of device, such as ``torch.cuda``.
        page_lock: Copies a tensor to page-locked memory.

    Raises:
        LoaderError: The loop, too, fetches a batch ahead (``lookahead=True``).
    """

    def __init__(
        self,
        host_batches: Iterator[Any],
        device: torch.device,
        device_module: StreamModule,
        page_lock: Callable[[torch.Tensor], torch.Tensor] = page_locked,
    ) -> None:
        if isinstance(host_batches, LoaderEpoch) and host_batches.lookahead:
            host_batches.close()
            raise _two_fetch_ahead()
        self._host_batches = _HostBatches(host_batches)
        self._device, self._device_module = device, device_module
        self._page_lock = page_lock
        self._copy_stream = device_module.Stream(device)
        self._copies_must_wait = False
        self._ends_of_steps: deque[Any] = deque()
        """Events of the device, of steps that may not be done."""
        self._next: TakenBatch | Exception | None = None
        self._has_begun = False

    def __next__(self) -> Any:
        if not self._has_begun:
            self._has_begun = True
            self._next = self._copy_next()
        copied = self._next
        if copied is None:
            raise StopIteration
        if isinstance(copied, Exception):
            # Whoever catches it may read on, as from the loader itself.
            self._next, self._has_begun = None, False
            raise copied

        # Asked for each time: the training may have changed streams meanwhile.
        compute_stream = self._device_module.current_stream(self._device)
        self._keep_close(compute_stream)
        self._wait_for_copy(copied.batch, compute_stream)
        # The next copy starts before this batch is given, so that it runs beside the
        # step.
        self._next = self._copy_next()
        self._host_batches.progress.standing = copied.standing
        return copied.batch

    def _copy_next(self) -> TakenBatch | Exception | None:
        try:
            taken = self._host_batches.take()
            if taken is None:
                return None
            with self._device_module.stream(self._copy_stream):
                batch = move(taken.batch, self._device, page_lock=self._page_lock)
        except Exception as error:  # noqa: BLE001 -- raised in its turn
            return error
        return TakenBatch(batch, taken.standing)

    def _keep_close(self, compute_stream: Any) -> None:
        """Wait until the device is at most two steps behind.

        Args:
            compute_stream: What the loop has queued its steps on.
        """
        self._ends_of_steps.append(compute_stream.record_event())
        while len(self._ends_of_steps) > _MOST_STEPS_QUEUED:
            self._ends_of_steps.popleft().synchronize()

    def _wait_for_copy(self, batch: object, compute_stream: Any) -> None:
        """Have the step that reads a batch wait for its copy, and the next copy for it.

        Args:
            batch: On the device.
            compute_stream: What the step will be queued on.
        """
        compute_stream.wait_stream(self._copy_stream)
        # Not all() of a generator, which would stop at the first that is not recorded.
        recorded = [
            _record_use(leaf, compute_stream, self._device) for leaf in flatten(batch)
        ]
        self._copies_must_wait = self._copies_must_wait or not all(recorded)
        if self._copies_must_wait:
            # Memory whose use was not recorded may be given to the next copy as soon as
            # the batch is let go, while the step that reads it is still queued.
            self._copy_stream.wait_stream(compute_stream)


def _record_use(leaf: Any, stream: Any, device: torch.device) -> bool:
    """Have the allocator keep the memory of a leaf until a stream is done with it.

    It was allocated on the stream that copies, to whose next copies the allocator would
    give it otherwise.

    Args:
        leaf: Of a batch that was moved.
        stream: The one that will read it.
        device: Where the batch is.

    Returns:
        Whether all its memory on the device is kept so.
    """
    if isinstance(leaf, torch.Tensor):
        try:
            for component in dense_parts(leaf):
                if component.device.type == device.type:
                    component.record_stream(stream)
        except (NotImplementedError, TypeError):
            # Quantized tensors, and subclasses with a dispatch of their own.
            return False
        return True
    if not callable(getattr(leaf, "to", None)):
        return True
    if not callable(getattr(leaf, "record_stream", None)):
        return False
    leaf.record_stream(stream)
    return True


def move(
    batch: object,
    device: torch.device,
    *,
    page_lock: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Any:
    """Move every tensor of a batch to a device.

    Args:
        batch: A nest of tensors, or of objects with ``to``; it is not changed.
        device: Where they go.
        page_lock: Copies a tensor to page-locked memory; then the host does not wait
            for the copy to the device.  None copies from where the tensors are.

    Returns:
        The same nest, its tensors on the device.
    """

    def move_leaf(leaf: Any) -> Any:
        if not callable(getattr(leaf, "to", None)):
            return leaf
        # What is no tensor, such as a SparseTensor, knows how to move itself; a sparse
        # tensor is several tensors, which cannot be page-locked as one.
        if page_lock is None or not _is_dense(leaf):
            return leaf.to(device)
        return page_lock(leaf).to(device, non_blocking=True)

    return map_leaves(move_leaf, batch)


def _is_dense(leaf: object) -> bool:
    """Tell whether torch page-locks a leaf as one piece of memory."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return False
    if leaf.is_nested or leaf.is_quantized:
        return False
    # A subclass that answers torch's operators itself need not know this one; those
    # that tell their parts, such as PyG's EdgeIndex, do.
    return not answers_operators(leaf) or hasattr(leaf, "__tensor_flatten__")
