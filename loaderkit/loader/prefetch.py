"""Batches made ahead by a thread, and batches moved to the device ahead of time."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import queue
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from loaderkit.memory.probes import read_capability
from loaderkit.pyg import is_pyg_data

_STEPS = 3
"""Steps that are timed before a thread is started."""
_SHARE = 0.5
"""A thread pays once a step takes this part of the time a batch takes to make."""


class ReadAhead(Iterator[Any]):
    """Makes batches in a thread while the training computes, once that pays.

    The first steps are timed.  A loop that does nothing with its batches would only be
    held up by a thread (the two take turns at the interpreter), so it gets none.

    Args:
        batches: Where they come from; used by one thread at a time.
        depth: Batches that wait at most.
    """

    def __init__(self, batches: Iterator[Any], depth: int) -> None:
        self._batches, self._depth = batches, depth
        self._made_s: deque[float] = deque(maxlen=_STEPS)
        self._step_s: deque[float] = deque(maxlen=_STEPS)
        self._given = 0.0
        self._queue: queue.Queue[tuple[str, Any]] | None = None
        self._close: Callable[[], Any] = lambda: None

    @property
    def threaded(self) -> bool:
        """Whether a thread makes the batches by now."""
        return self._queue is not None

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        if self._given and self._queue is None:
            self._step_s.append(start - self._given)
            if self._pays():
                self._start()
        if self._queue is None:
            batch = next(self._batches)
            self._given = time.perf_counter()
            self._made_s.append(self._given - start)
            return batch
        kind, content = self._queue.get()
        if kind == "batch":
            return content
        self._queue.put((kind, content))  # whoever asks again is told again
        if kind == "end":
            raise StopIteration
        raise content

    def close(self) -> None:
        """End the thread; batches that wait are dropped."""
        self._close()

    def _pays(self) -> bool:
        if len(self._step_s) < _STEPS:
            return False
        step_s = statistics.median(self._step_s)
        return step_s > _SHARE * statistics.median(self._made_s)

    def _start(self) -> None:
        self._queue = queue.Queue(self._depth)
        stop = threading.Event()
        thread = threading.Thread(
            target=_pump, args=(self._batches, self._queue, stop), daemon=True,
            name="loaderkit-read-ahead",
        )  # fmt: skip
        thread.start()
        self._close = weakref.finalize(self, _end, self._queue, stop, thread)


def _pump(
    batches: Iterator[Any], waiting: queue.Queue[tuple[str, Any]], stop: threading.Event
) -> None:
    """Move batches into the queue; runs in the thread, and knows nothing of its owner.

    An owner that is let go must be seen by the garbage collector.
    """
    while not stop.is_set():
        try:
            item = ("batch", next(batches))
        except StopIteration:
            item = ("end", None)
        except BaseException as error:  # noqa: BLE001 - raised where it is asked for
            item = ("error", error)
        while not stop.is_set():
            try:
                waiting.put(item, timeout=0.05)
                break
            except queue.Full:
                continue
        if item[0] != "batch":
            return
        del item


def _end(
    waiting: queue.Queue[tuple[str, Any]], stop: threading.Event,
    thread: threading.Thread,
) -> None:  # fmt: skip
    stop.set()
    with contextlib.suppress(queue.Empty):
        while True:
            waiting.get_nowait()
    if thread is not threading.current_thread():
        thread.join(timeout=10)


class DevicePrefetcher:
    """Gives a loader's batches on the device, the next one copied while one computes.

    On devices with streams (CUDA, ROCm, XPU) the copy runs beside the computing, from
    page-locked memory; elsewhere each batch is moved when it is asked for.

    Args:
        loader: Any iterable of batches: tensors, PyG data, or nests of these.
        device: Where they go.

    Raises:
        ValueError: There is no such device.
    """

    def __init__(self, loader: Any, device: str | torch.device) -> None:
        self.loader, self.capability = loader, read_capability(device)
        self.device = torch.device(device)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in {"loader", "device", "capability"}:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        if not self.capability.asynchronous:
            return (move(batch, self.device) for batch in batches)
        module = torch.get_device_module(self.device.type)
        return beside(batches, self.device, module, pinned_ring(module))


def beside(
    batches: Iterator[Any],
    device: torch.device,
    module: Any,
    ring: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[Any]:
    """Copy each batch on a stream of its own, one ahead.

    Args:
        batches: On the host.
        device: Where they go.
        module: torch's module of that kind of device, such as ``torch.cuda``.
        ring: Copies a tensor to page-locked memory, unless it is there.

    Yields:
        The batches, on the device; the current stream waits for each.
    """
    stream = module.Stream(device)

    def ahead() -> Any:
        for batch in batches:
            with module.stream(stream):
                return (move(batch, device, through=ring),)
        return ()

    coming = ahead()
    while coming:
        [batch] = coming
        current = module.current_stream(device)
        current.wait_stream(stream)
        apply_to_tensors(batch, functools.partial(_recorded, stream=current))
        coming = ahead()
        yield batch
        del batch


def _recorded(tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    """Keep the copy's memory until the computing stream is done with it."""
    tensor.record_stream(stream)
    return tensor


def pinned_ring(module: Any, slots: int = 64) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a few page-locked buffers that are used again and again.

    Args:
        module: torch's module of the device.
        slots: Tensors under way at most; two batches of a graph fit.

    Returns:
        A function that copies a tensor to the next buffer, once the copy that went
        from it last is done.
    """
    buffers: list[torch.Tensor | None] = [None] * slots
    events: list[Any] = [None] * slots
    turn = [0]

    def through(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_pinned() or not tensor.numel():
            return tensor
        at = turn[0] = (turn[0] + 1) % slots
        if events[at] is not None:
            events[at].synchronize()
        nbytes = tensor.numel() * tensor.element_size()
        buffer = buffers[at]
        if buffer is None or buffer.numel() < nbytes:
            buffer = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
            buffers[at] = buffer
        staged = buffer[:nbytes].view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor)
        events[at] = module.Event()
        return staged

    def finished() -> None:
        if events[turn[0]] is not None:
            events[turn[0]].record()

    through.finished = finished  # type: ignore[attr-defined]
    return through


def move(
    batch: Any,
    device: torch.device,
    *,
    through: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Any:
    """Move every tensor of a batch to a device.

    Args:
        batch: Tensors, PyG data, or a nest of these; it is not changed.
        device: Where they go.
        through: Page-locks a tensor first; then the copy does not wait.

    Returns:
        The same nest, its tensors on the device.
    """

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if through is None or tensor.layout is not torch.strided:
            return tensor.to(device)
        moved = through(tensor).to(device, non_blocking=True)
        getattr(through, "finished", lambda: None)()
        return moved

    return apply_to_tensors(batch, one)


def apply_to_tensors(nest: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Make a nest again with every tensor changed.

    Args:
        nest: Tensors, PyG data, dicts, lists, tuples, dataclasses of these.
        change: What is done to each tensor.

    Returns:
        A new nest; other values in it are the same objects.
    """
    if isinstance(nest, torch.Tensor):
        return change(nest)
    if is_pyg_data(nest):
        return copy.copy(nest).apply(change)
    if isinstance(nest, Mapping):
        found = {k: apply_to_tensors(v, change) for k, v in nest.items()}
        return found if type(nest) is dict else _filled(nest, found)
    if isinstance(nest, tuple | list):
        inside = [apply_to_tensors(each, change) for each in nest]
        named = hasattr(nest, "_fields")
        return type(nest)(*inside) if named else type(nest)(inside)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        names = [each.name for each in dataclasses.fields(nest) if each.init]
        changed = {n: apply_to_tensors(getattr(nest, n), change) for n in names}
        return dataclasses.replace(nest, **changed)
    return nest


def _filled(nest: Any, found: Mapping[Any, Any]) -> Any:
    made = copy.copy(nest)
    made.update(found)
    return made
