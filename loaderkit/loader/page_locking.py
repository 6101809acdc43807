"""Which tensors of a batch can be page-locked, and a batch that is as far as it can be.

torch page-locks memory of the host only: a tensor that lies on a device, as samples do
that were moved there before, makes its ``pin_memory`` fail for the whole batch.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from loaderkit.errors import LoaderError
from loaderkit.loader.users_errors import error_about
from loaderkit.nests import flatten_tensors, map_leaves


def device_of_batch(batch: object) -> str:
    """Name the device that a batch, or a part of it, lies on.

    Args:
        batch: Any nest.

    Returns:
        Such as "cuda:0"; empty where all its tensors lie on the host.
    """
    for tensor in flatten_tensors(batch):
        if tensor.device.type != "cpu":
            return str(tensor.device)
    return ""


def page_lock_batch(batch: object, *, must_lock: bool = False) -> Any:
    """Copy a batch to page-locked memory, but for what cannot be.

    Args:
        batch: Any nest; it is not changed.
        must_lock: The caller asked for it, so that no part may be left out.

    Returns:
        The same nest.  What lies on a device, or what this version of torch cannot
        page-lock, is the same object as before.

    Raises:
        LoaderError: ``must_lock``, and a part cannot be page-locked; or the user's own
            ``pin_memory`` failed.
    """

    def lock_leaf(leaf: object) -> Any:
        try:
            return pin_memory(leaf)  # type: ignore[no-untyped-call]
        except (RuntimeError, TypeError) as error:
            if not isinstance(leaf, torch.Tensor):
                message = f"A {type(leaf).__name__} could not be page-locked: "
                raise error_about(message, error, "pin_memory=False") from error
            if _is_plain(leaf):
                raise  # it is no matter of its kind: memory was short, say
            if must_lock:
                raise _error_about(leaf) from error
            return leaf

    # First whole, in the way of containers that have one; leaf by leaf only where one
    # of them fails, since that has to find out which.
    if not device_of_batch(batch):
        with contextlib.suppress(RuntimeError, TypeError):
            return map_leaves(pin_memory, batch, is_leaf=_locks_itself)
    return map_leaves(lock_leaf, batch)


def _locks_itself(part: object) -> bool:
    """Tell whether a container has a way of its own, as graphs and some users' have."""
    return callable(getattr(part, "pin_memory", None))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether every version of torch can page-lock a kind of tensor."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    is_torchs = is_dense and not answers_operators(tensor)
    return tensor.device.type == "cpu" and is_torchs


def answers_operators(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is of a subclass that answers torch's operators itself.

    Such as MaskedTensor or PyG's EdgeIndex; it need not know all of them.
    """
    # torch.Tensor has one that is switched off: a subclass with another one answers.
    kind: Any = type(tensor)
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _error_about(tensor: torch.Tensor) -> LoaderError:
    shown = f"{type(tensor).__name__} {list(tensor.shape)}"
    if tensor.device.type != "cpu":
        message = f"A batch cannot be page-locked: its {shown} lies on {tensor.device}."
        why = "only memory of the host is page-locked; pin_memory=True was asked for"
        return LoaderError(
            message, why=why, fix="pin_memory=False, or keep samples on the host"
        )
    layout = str(tensor.layout).removeprefix("torch.")
    message = f"A batch cannot be page-locked: its {shown} is {layout}."
    why = f"torch {torch.__version__} page-locks no such tensor, and pin_memory=True "
    why += "was asked for"
    fix = "pin_memory=False; DevicePrefetcher page-locks what can be"
    return LoaderError(message, why=why, fix=fix)
