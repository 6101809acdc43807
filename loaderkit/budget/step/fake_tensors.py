"""Copies of modules and batches whose floats are fake: shapes without memory."""

from __future__ import annotations

import functools
import inspect
import logging
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode

from loaderkit.budget.step.measure import has_one_storage, holds_more_than_it_shows
from loaderkit.budget.step.step_copies import StepCopies, copy_of_model, step_copies
from loaderkit.errors import StepError
from loaderkit.nests import flatten_tensors, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from loaderkit.budget.step.allocation_log import Log
    from loaderkit.budget.step.call_arguments import Args, Kwargs
    from loaderkit.budget.step.train_step import Step


SMALL_BYTES = 1 << 18
"""Real floats made of integers stay real up to here: pooling computes sizes so.
Chosen: thousands of graphs, and a small part of what an estimate may take for real."""


class _AttentionFunction(NamedTuple):
    func: Any
    names: tuple[str, ...]
    """Of its first arguments."""
    masks: tuple[str, ...]
    """Arguments with which a device's flash kernel is not taken."""


_ATTENTIONS = (
    _AttentionFunction(
        functional.scaled_dot_product_attention,
        ("query", "key", "value", "attn_mask", "dropout_p"),
        ("attn_mask",),
    ),
    _AttentionFunction(
        functional.multi_head_attention_forward,
        tuple(inspect.signature(functional.multi_head_attention_forward).parameters),
        ("attn_mask", "key_padding_mask", "need_weights"),
    ),
)


def is_fake(leaf: object) -> bool:
    """Tell a tensor without memory."""
    return isinstance(leaf, FakeTensor)


def is_real(tensor: torch.Tensor) -> bool:
    """Tell a tensor with memory, of one storage, from fakes and sparse ones."""
    return not isinstance(tensor, FakeTensor) and tensor.layout is torch.strided


def is_inexact(dtype: torch.dtype) -> bool:
    """Tell floats and complex numbers, which are fake, from what decides shapes."""
    return dtype.is_floating_point or dtype.is_complex


def make_fake_mode() -> FakeTensorMode:
    """Make a mode for fakes beside real tensors, without torch's cache of outputs.

    That one remembers what operators gave for the whole life of a process, and makes
    two tensors of one that an operator gives twice (a recurrent layer's bias).
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # As torch's disable_fake_tensor_cache does, which torch 2.5 does not have.
    fake.cache_enabled = False
    return fake


def fake_model(
    fake: FakeTensorMode,
    target_kind: str,
    model: torch.nn.Module,
    copies: dict[int, Any],
) -> Any:
    """Copy a module with fake floats; integers are copied.

    Args:
        fake: Makes the fakes.
        target_kind: The kind of device that the step is for.
        model: The module.
        copies: Gets the copy of each object in it by the ``id`` of the user's, as
            ``copy.deepcopy`` keeps them.

    Returns:
        The copy, which shares nothing with it.

    Raises:
        StepError: A lazy module has no parameters yet.
        NotImplementedError: It is compiled, or a part of it is.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        message = "a compiled module takes real tensors alone"
        raise NotImplementedError(message)
    memo = copies
    storages = _StorageCopies(fake, target_kind)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, UninitializedParameter):
            message = f"parameter {name} has no shape yet."
            why = "a lazy module makes its parameters when it is first called"
            raise StepError(message, why=why, fix="model(batch) once, before")
        if id(parameter) not in memo:
            values = storages.copy(parameter.detach())
            memo[id(parameter)] = torch.nn.Parameter(
                values, requires_grad=parameter.requires_grad
            )
    for module in model.modules():
        # A tensor that is a plain attribute is no buffer, and is used all the same.
        held = flatten_tensors(list(vars(module).values()))
        for value in [*module.buffers(recurse=False), *held]:
            if id(value) not in memo:
                memo[id(value)] = storages.copy(value)
    return copy_of_model(model, memo)


class _StorageCopies:
    """Copies tensors of a model, with the storages that they keep in memory.

    A buffer may be a row of a table, the half of one, or one number that is expanded.
    On the device where it is, it keeps what it is a part of, once for all parts.  Moved
    to another, each has a storage of its own, without gaps (``Module.to``).
    """

    def __init__(self, fake: FakeTensorMode, target_kind: str) -> None:
        self._fake, self._target_kind = fake, target_kind
        self._copies: dict[tuple[int, bool], torch.UntypedStorage] = {}
        """By torch's address of the user's storage, and whether the copy is fake."""

    def copy(self, tensor: torch.Tensor) -> Any:
        """Copy a tensor: a fake of floats, real integers."""
        is_plain = type(tensor) in {torch.Tensor, torch.nn.Parameter}
        if not is_plain or tensor.is_nested or not has_one_storage(tensor):
            return fake_floats(self._fake, tensor, copy_integers=True)
        if tensor.is_conj() or tensor.is_neg() or tensor.device.type == "meta":
            return fake_floats(self._fake, tensor, copy_integers=True)
        is_fake = tensor.is_floating_point() or tensor.is_complex()
        if tensor.device.type != self._target_kind:
            moved = torch.empty_like(tensor.detach(), device="meta")
            return fake_like(self._fake, moved) if is_fake else tensor.cpu().clone()

        storage = tensor.untyped_storage()
        key = storage._cdata, is_fake  # noqa: SLF001 -- an identity, never read
        device = torch.device("meta" if is_fake else "cpu")
        if key not in self._copies:
            like = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
            if not is_fake:
                like.untyped_storage().copy_(storage)
            self._copies[key] = like.untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device=device)
        with torch.no_grad():
            view.set_(
                self._copies[key],
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
            )
        return _fake_of_meta(self._fake, view) if is_fake else view


def _fake_of_meta(fake: FakeTensorMode, shapes_only: torch.Tensor) -> torch.Tensor:
    # Here, since its import takes a second that no other part needs.
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor(fake, shapes_only, torch.device("cpu"))


def fake_copies(
    fake: FakeTensorMode, model: torch.nn.Module, batch: object, step: Step
) -> StepCopies:
    """Copy what a step uses with fake floats.

    Args:
        fake: Makes the fakes.
        model: A module; not changed.
        batch: Not changed.
        step: How a step is made.

    Returns:
        The copies.
    """
    return step_copies(
        model,
        batch,
        step,
        copy_model=functools.partial(fake_model, fake, step.target.kind),
        copy_batch=functools.partial(fake_batch, fake),
        copy_tensor=functools.partial(fake_floats, fake),
    )


def fake_batch(fake: FakeTensorMode, batch: object) -> Any:
    """Copy a batch with fake floats; integers are shared with it.

    Those that are a view of more (rows of a table of tokens, labels of some nodes) are
    copied: the batch is only what is in it.
    """
    copies: dict[int, torch.Tensor] = {}

    def fake_once(tensor: torch.Tensor) -> Any:
        like = fake_floats(fake, tensor)
        if like is not tensor or not holds_more_than_it_shows(tensor):
            return like
        # A tensor that is in a batch twice stays one.
        return copies.setdefault(id(tensor), tensor.clone())

    return map_tensors(fake_once, batch)


def fake_floats(
    fake: FakeTensorMode, tensor: Any, *, copy_integers: bool = False
) -> Any:
    """Make a fake of floats; give integers as they are, on the CPU.

    Integers decide shapes (edges, lengths), so that they must have values.
    """
    if tensor.is_nested and tensor.layout is torch.jagged:
        values = fake_floats(fake, tensor.values(), copy_integers=copy_integers)
        return torch.nested.nested_tensor_from_jagged(values, tensor.offsets())
    if not (tensor.is_floating_point() or tensor.is_complex()):
        if tensor.device.type == "meta":
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        tensor = tensor.cpu()
        return tensor.clone() if copy_integers else tensor
    return fake_like(fake, tensor.detach())


def fake_like(fake: FakeTensorMode, tensor: torch.Tensor) -> Any:
    """Make a fake tensor on the CPU, wherever the real one is.

    Args:
        fake: Makes it.
        tensor: On the CPU, on another device, or on "meta".

    Returns:
        Its like; fakes of devices that a build of torch lacks end the process.
    """
    if tensor.device.type == "cpu" or tensor.layout is not torch.strided:
        return fake.from_tensor(tensor)
    with fake:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


@contextmanager
def without_torch_logging() -> Iterator[None]:
    """Keep torch from writing errors of fakes to stderr.

    Where a step cannot be tracked it is measured: that is no error of the user's.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


class TargetAttention(TorchFunctionMode):
    """Chooses the kernel of attention that the target would."""

    def __init__(self, step: Step, log: Log) -> None:
        super().__init__()
        self.target_kind = step.target.kind
        self.log = log

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Run a function; attention with dropout as the target's flash kernel does."""
        # Both are asked for, since multi_head_attention_forward hides the attention
        # that it calls from a mode.
        for attention in _ATTENTIONS:
            if func is attention.func:
                named = dict(zip(attention.names, args, strict=False)) | (kwargs or {})
                return func(**self._without_dropout(named, attention.masks))
        return func(*args, **(kwargs or {}))

    def _without_dropout(
        self, named: dict[str, Any], masks: tuple[str, ...]
    ) -> dict[str, Any]:
        needs_weights = "need_weights" in masks and named.get("need_weights", True)
        has_mask = any(named.get(mask) is not None for mask in masks[:2])
        if not named.get("dropout_p") or needs_weights or has_mask:
            return named
        assumption = f"the flash kernel, as on {self.target_kind}"
        self.log.assumptions[assumption, "attention"] += 1
        # The CPU's flash kernel takes no dropout; its bytes are equal without.
        return named | {"dropout_p": 0.0}


def attention_of(step: Step, log: Log) -> AbstractContextManager[Any]:
    """Choose the kernel of attention that the target would.

    Args:
        step: It says the target.
        log: Gets the assumption, where another kernel stands for it.

    Returns:
        To be entered around the step.
    """
    attention = step.target.traits.attention
    if attention == "flash":
        return TargetAttention(step, log)
    if attention == "math":
        kernel: AbstractContextManager[Any] = sdpa_kernel(SDPBackend.MATH)
        return kernel
    return nullcontext()
