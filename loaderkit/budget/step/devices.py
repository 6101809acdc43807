"""What an estimate has to know of a kind of device: a row for each.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from loaderkit.answers import answer_wrong_names

Kernels: TypeAlias = Literal["of this CPU", "of CUDA", "unknown"]


@dataclass(frozen=True)
class DeviceTraits:
    """How torch trains on a kind of device, where it differs between them."""

    foreach_optimizers: bool
    """Whether torch's optimizers update all parameters at once by default, and so need
    room for all.  Source: ``torch/utils/_foreach_utils.py`` of torch 2.13."""
    attention: Literal["as here", "flash", "math"]
    """The kernel of ``scaled_dot_product_attention``: the one that this machine would
    take, one that needs no length x length matrix, also with dropout, or the plain
    formula."""
    caching_allocator: bool
    """Whether memory is handed out in blocks of segments that stay reserved; see
    ``allocator``."""
    kernels: Kernels = "unknown"
    """Whose kernels compute: those of this CPU, whose workspaces are measured here;
    CUDA's, of which ``cuda_kernels`` knows what an H100 was seen to take; or some of
    which nothing is known, and which are assumed to hold as much as the CPU's."""


TRAITS: dict[str, DeviceTraits] = {
    "cpu": DeviceTraits(
        foreach_optimizers=False,
        attention="as here",
        caching_allocator=False,
        kernels="of this CPU",
    ),
    "cuda": DeviceTraits(
        foreach_optimizers=True,
        attention="flash",
        caching_allocator=True,
        kernels="of CUDA",
    ),
    "xpu": DeviceTraits(
        foreach_optimizers=True, attention="flash", caching_allocator=True
    ),
    "mps": DeviceTraits(
        foreach_optimizers=False, attention="math", caching_allocator=False
    ),
}
"""By the type of torch.device; ROCm's is called cuda."""


@answer_wrong_names()
@dataclass(frozen=True)
class DeviceSpec:
    """A device that need not be here."""

    kind: str = "cpu"
    """A key of ``TRAITS``: "cpu", "cuda", "xpu" or "mps"; ROCm counts as cuda."""
    memory_bytes: int | None = None
    """What it has; None if unknown."""

    @property
    def traits(self) -> DeviceTraits:
        """How torch trains on it.

        >>> DeviceSpec("cuda").traits.foreach_optimizers
        True
        """
        return TRAITS[self.kind]
