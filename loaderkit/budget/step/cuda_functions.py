"""Functions of torch that are made of other operators on a CUDA GPU.

A step for CUDA is tracked with fake tensors of the CPU, so torch takes a function apart
as it does for the CPU.  Where CUDA has other parts, they are made here in their place:
dropout keeps a mask of a byte for each element; cuda_attention.py, cuda_multi_head.py
and cuda_recurrent.py have the rest.  Sizes are those that the allocator of an H100
recorded (torch 2.11, cuDNN 9); ``docs/budget.md`` says of which steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from loaderkit.budget.step.cuda_attention import run_attention
from loaderkit.budget.step.cuda_autocast import cast_policy_of, run_by_policy
from loaderkit.budget.step.cuda_multi_head import run_multi_head_attention
from loaderkit.budget.step.cuda_recurrent import (
    is_recurrent_cell,
    is_recurrent_layer,
    run_recurrent_cell,
    run_recurrent_layers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loaderkit.budget.step.call_arguments import Args, Kwargs
    from loaderkit.budget.step.storage_ledger import StorageLedger

_DROPOUTS = {functional.dropout, torch.dropout}


class CudaFunctions(TorchFunctionMode):
    """Makes the operators of a function that CUDA would.

    Args:
        ledger: It logs what they make.
    """

    def __init__(self, ledger: StorageLedger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Run a function as CUDA does, or as it is."""
        kwargs = kwargs or {}
        # Where a GPU is, a model's own autocast is on, and the fakes lie on the CPU.
        self.ledger.log.lacks_autocast |= torch.is_autocast_enabled("cuda")
        policy = cast_policy_of(func, kwargs)
        if policy is not None:
            return run_by_policy(func, policy, args, kwargs)
        if func in _DROPOUTS:
            return _drop_out(func, *args, **kwargs)
        if torch._C._are_functorch_transforms_active():  # noqa: SLF001 -- no other way
            # An autograd.Function such as those below has no rules for grad, vmap ...
            return func(*args, **kwargs)
        # torch.nn calls these by position; other calls stay as they are.
        if is_recurrent_layer(func) and not kwargs:
            outputs = run_recurrent_layers(func, args, self.ledger)
            if outputs is not None:
                return outputs
        if is_recurrent_cell(func) and not kwargs:
            return run_recurrent_cell(func, *args)
        if func is functional.multi_head_attention_forward:
            with self:  # for the functions that it is made of
                outputs = run_multi_head_attention(args, kwargs)
            if outputs is not None:
                return outputs
        if func is functional.scaled_dot_product_attention:
            return run_attention(self.ledger, *args, **kwargs)
        return func(*args, **kwargs)


def _drop_out(
    func: Callable[..., Any],
    input: torch.Tensor,  # noqa: A002 -- torch's name
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002 -- torch's
    inplace: bool = False,  # noqa: FBT001, FBT002 -- torch's
    **named: Any,
) -> Any:
    """Keep a mask of bytes, as the fused kernel does; in place there is none."""
    is_fused = training and not inplace and 0 < p < 1 and not named
    if is_fused and input.numel():
        return torch.native_dropout(input, p, train=True)[0]
    if func is torch.dropout:
        return func(input, p, training)
    return func(input, p, training, inplace, **named)
