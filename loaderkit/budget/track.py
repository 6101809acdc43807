"""Runs a training step whose floats are fake, and logs every byte it would hold.

Only integers and booleans decide shapes; they are small and stay real, so that what
depends on their values runs truly.  Floats are fake: no memory, no arithmetic.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from loaderkit.budget.fakes import attention_of, fake_batch, fake_model
from loaderkit.budget.log import Log
from loaderkit.budget.measure import state_of, tensors_of
from loaderkit.budget.steps import (
    Step,
    checkpoint_blocks,
    make_optimizer,
    run_step,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_aten = torch.ops.aten
_SMALL_BYTES = 1 << 18
"""Real floats made of integers stay real up to here: pooling computes sizes so."""
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default})
_RECURRENT = ("_rnn", "_lstm", "_gru")
_RESERVE = 20
"""Bytes a recurrent kernel keeps for one of its output (17 measured on oneDNN)."""
_SHORT = frozenset({torch.bfloat16, torch.float16})
_IN_PLACE = frozenset({_aten.add.Tensor, _aten.index_add.default})
"""What autograd's own code does in place, but not while a mode is active."""
_VALUES = ("arange", "scalar_tensor", "linspace")
_OPAQUE = ("mkldnn_rnn", "fused_lstm", "fused_gru", "convolution", "_fft", "linalg",
           "miopen", "cudnn", "svd", "_embedding_bag")  # fmt: skip


def track_step(model: Any, batch: Any, step: Step, *, chosen: float = 1.0) -> Log:
    """Run a training step with fake floats, as it is once the training runs.

    Args:
        model: A module; it is not changed.
        batch: What it is called with, on the CPU; not changed.
        step: How a step is made.
        chosen: Share of elements that a mask of unknown values is taken to choose.

    Returns:
        The log; the optimizer has its state from the beginning.

    Raises:
        ValueError: A lazy module has no parameters yet.
    """
    log, unused = _tracked(model, batch, step, chosen, give_state=True)
    if unused:  # a parameter without a gradient has no state, which was given to it
        log, _ = _tracked(model, batch, step, chosen, give_state=False)
    return log


def _tracked(
    model: Any, batch: Any, step: Step, chosen: float, *, give_state: bool
) -> tuple[Log, bool]:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    log = Log()
    twin, held = fake_model(fake, model), fake_batch(fake, batch)
    if step.checkpoint:
        checkpoint_blocks(twin)
    tracker = _Tracker(fake, log, cpu=step.target.kind == "cpu", chosen=chosen)
    for part, tensors in (
        ("parameters", twin.parameters()),
        ("buffers", twin.buffers()),
        ("batch", tensors_of(held)),
    ):
        for tensor in tensors:
            tracker.add(tensor, part)
    optimizer = make_optimizer(twin.parameters(), step)
    for tensor in state_of(optimizer):  # Adagrad makes it at once
        tracker.add(tensor, "optimizer state")
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(attention_of(step, log))
        stack.enter_context(_named(twin, tracker))
        _alone()  # looked up outside of any mode
        stack.enter_context(tracker)
        given = give_state and _give_state(twin, optimizer, tracker)
        if not given:
            run_step(twin, held, optimizer, step, mark=tracker.mark)
        run_step(twin, held, optimizer, step, mark=tracker.mark)
        tracker.label_gradients(twin)
        tracker.label_state(optimizer)
    return log, given and any(p.grad is None for p in twin.parameters())


def _give_state(model: Any, optimizer: Any, tracker: _Tracker) -> bool:
    """Let the optimizer make its state, as the first step of a training does."""
    parameters = list(model.parameters())
    if optimizer is None:
        return True
    if not all(p.requires_grad for p in parameters):
        return False
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tracker.label_state(optimizer)
    return True


class _Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fakes floats and logs the storages that operators make."""

    def __init__(
        self, fake: FakeTensorMode, log: Log, *, cpu: bool, chosen: float
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake, self.log, self.cpu, self.chosen = fake, log, cpu, chosen
        self.live: dict[int, tuple[int, int, Any]] = {}
        self.module, self.phase = "", "base"
        self.now = self.real = self.reserve = 0

    def mark(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self.log.marks.append((len(self.log.events), phase))

    def add(self, tensor: Any, owner: str = "") -> None:
        """Log the storage of a tensor, once."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.live or not size:
            return
        number = len(self.log.events)
        real = 0 if isinstance(tensor, FakeTensor) else size
        gone = functools.partial(self._gone, key, number)
        self.live[key] = (number, size, weakref.ref(storage, gone))
        self.log.events.append((number, size))
        self.now += size
        if owner:
            self.log.owners[number] = owner
        self.log.modules[number] = self.module
        self.real += real
        self.log.real_bytes = max(self.log.real_bytes, self.real)

    def _gone(self, key: int, number: int, _ref: Any = None) -> None:
        held = self.live.get(key)
        if held is not None and held[0] == number:
            del self.live[key]
            self.log.events.append((number, -held[1]))
            self.now -= held[1]

    def label_gradients(self, model: Any) -> None:
        """Name the storages of gradients."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                self._label(parameter.grad, "gradients")

    def label_state(self, optimizer: Any) -> None:
        """Name the storages of the optimizer's state."""
        for tensor in state_of(optimizer):
            self._label(tensor, "optimizer state")

    def _label(self, tensor: Any, owner: str) -> None:
        held = self.live.get(tensor.untyped_storage()._cdata)
        if held is not None:
            self.log.owners.setdefault(held[0], owner)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operator, faked where floats are in it."""
        if func is torch.ops.prim.device.default:  # two of three calls: keep it short
            asked = args[0]
            return asked.fake_device if isinstance(asked, FakeTensor) else asked.device
        kwargs = kwargs or {}
        held = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        replaced = self._accumulates(func, args)
        if any(isinstance(t, FakeTensor) for t in held):
            out = self._faked(func, args, kwargs)
        elif not held and _makes_floats(func, kwargs):
            with self.fake:
                out = func(*args, **kwargs)
        else:
            out = tree_map(self._small, func(*args, **kwargs))
        if replaced is not None:
            self._gone(replaced, self.live[replaced][0])
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        self._look_inside(func, held, out)
        return out

    def _look_inside(self, func: Any, operands: list[Any], out: Any) -> None:
        """Log or note what a kernel takes inside, which no fake shows."""
        if any(word in func.name() for word in _OPAQUE):
            self._assume("no workspace inside the kernel", func)
            self._widen(func, [*operands, *tree_iter(out)])
        elif self.cpu and func in _PRODUCTS and operands[0].dtype in _SHORT:
            self._assume("no weights packed inside the kernel", func)
        if self.cpu and torch.Tag.pointwise in func.tags:
            self._promote([t for t in operands if t.dim()])

    def _widen(self, func: Any, tensors: list[Any]) -> None:
        """Raise the upper end: a kernel may copy twice what it reads and writes."""
        sizes = [t.numel() * t.itemsize for t in tensors if isinstance(t, torch.Tensor)]
        if any(word in func.name() for word in _RECURRENT):
            self.reserve += _RESERVE * max(sizes, default=0)
        highest = self.now + self.reserve + 2 * sum(sizes)
        self.log.workspace = max(self.log.workspace, highest)

    def _promote(self, operands: list[Any]) -> None:
        """Log the copies by which the CPU brings operands to one type, inside."""
        kinds = {t.dtype for t in operands}
        if len(kinds) < 2:
            return
        common = functools.reduce(torch.promote_types, kinds)
        for tensor in operands:
            if tensor.dtype != common:
                number = len(self.log.events)
                size = tensor.numel() * common.itemsize
                self.log.events += [(number, size), (number, -size)]

    def _small(self, value: Any) -> Any:
        """Fake a real float that is large: its values decide no shape."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        large = value.untyped_storage().nbytes() > _SMALL_BYTES
        return self.fake.from_tensor(value) if large else value

    def _accumulates(self, func: Any, args: Any) -> int | None:
        """Find the buffer that autograd, without a mode, would add into in place."""
        if self.phase != "backward" or func not in _IN_PLACE:
            return None
        if torch.is_grad_enabled():  # a checkpointed block, computed again
            return None
        old = args[0]
        if not isinstance(old, FakeTensor) or not old.is_contiguous():
            return None
        key = old.untyped_storage()._cdata
        alone = key in self.live and _references(old, key) == _alone()
        return key if alone else None

    def _faked(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _aten._local_scalar_dense.default:
            self._assume("a scalar's value", func)
            value = args[0]
            return 1.0 if value.is_floating_point() else value.dtype != torch.bool or 1
        if func is _aten.nonzero.default:
            self._assume("every element is chosen", func)
            return torch.nonzero(self._mask(args[0].shape))
        if func is _aten.masked_select.default:
            self._assume("every element is chosen", func)
            shape = np.broadcast_shapes(args[0].shape, args[1].shape)
            with self.fake:
                return args[0].new_empty(int(self._mask(shape).sum()))
        if func is _aten.index.Tensor:
            args = (args[0], self._indices(args[1], func), *args[2:])
        with self.fake:
            return func(*args, **kwargs)

    def _indices(self, indices: Any, func: Any) -> list[Any]:
        """Turn masks into positions, so that shapes are known."""
        found: list[Any] = []
        for index in indices:
            if index is None or index.dtype not in {torch.bool, torch.uint8}:
                found.append(index)
                continue
            mask = index
            if isinstance(mask, FakeTensor):
                self._assume("every element is chosen", func)
                mask = self._mask(index.shape)
            found.extend(torch.nonzero(mask).unbind(1))
        return found

    def _mask(self, shape: Any) -> torch.Tensor:
        """Choose the assumed share of the elements, one at least."""
        mask = torch.zeros(shape, dtype=torch.bool)
        mask.view(-1)[: max(1, round(self.chosen * mask.numel()))] = True
        return mask

    def _assume(self, what: str, func: Any) -> None:
        self.log.assumptions[what, func.name()] += 1


def _makes_floats(func: Any, kwargs: Any) -> bool:
    kind = kwargs.get("dtype") or torch.get_default_dtype()
    return kind.is_floating_point and not any(n in func.name() for n in _VALUES)


def _references(tensor: Any, storage: int) -> tuple[int, int]:
    return tensor._use_count(), torch._C._storage_Use_Count(storage)


@functools.cache
def _alone() -> tuple[int, int]:
    """References to a gradient that autograd alone holds, as a mode sees them.

    Autograd adds into such a buffer in place, but not while a mode is active (torch's
    ``input_buffer.cpp``).  The number depends on the version, so it is looked up.
    """
    seen: list[tuple[int, int]] = []

    class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is _aten.add.Tensor:
                seen.append(_references(args[0], args[0].untyped_storage()._cdata))
            with fake:
                return func(*args, **(kwargs or {}))

    fake = FakeTensorMode()
    x = fake.from_tensor(torch.ones(2)).requires_grad_()
    hidden = x.exp()
    whole = hidden.relu().sum() + hidden.sigmoid().sum() + hidden.tanh().sum()
    with Look():  # type: ignore[no-untyped-call]
        whole.backward()  # type: ignore[no-untyped-call]
    return min(seen)


@contextmanager
def _named(model: Any, tracker: _Tracker) -> Iterator[None]:
    """Tell the tracker which module computes."""
    path: list[str] = []
    hooks = []

    def enter(name: str, module: Any, _args: Any) -> None:
        path.append(f"{name} {type(module).__name__}".strip())
        tracker.module = path[-1]

    def leave(_module: Any, _args: Any, _out: Any) -> None:
        path.pop()
        tracker.module = path[-1] if path else ""

    for name, module in model.named_modules():
        hooks += [
            module.register_forward_pre_hook(functools.partial(enter, name)),
            module.register_forward_hook(leave),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
