"""What can be changed when memory is short, cheapest first.  Pure; one catalogue.

The diagnosis of an error reads it for what may help against a verdict, the planner for
what to estimate again.  Nothing here says how much a change brings: that is computed
for the model or the message at hand, or said to be unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Cost = Literal["free", "equal results", "numerics", "quality", "device"]
"""What a remedy costs: nothing about the training changes; results are equal; they are
rounded otherwise; the model learns something else; it trains elsewhere."""
COSTS: tuple[Cost, ...] = ("free", "equal results", "numerics", "quality", "device")
"""Cheapest first."""

# Verdicts of a diagnosis against which several remedies help.
_DEVICE = frozenset({"true shortage", "held by others", "fragmentation", "unclear"})
_SHORT = frozenset({"true shortage", "unclear"})
_IMPOSSIBLE = frozenset({"request exceeds device"})


@dataclass(frozen=True)
class StepChange:
    """A training step with one thing changed; the others stay as they are."""

    half_batch: bool = False
    """Take half of the batch."""
    optimizer: Literal["loop", "fused"] | None = None
    """Another implementation of the optimizer."""
    autocast: Literal["bfloat16"] | None = None
    """Type of autocast."""
    checkpoint: bool = False
    """Compute the activations of repeated blocks again."""
    target: Literal["cpu"] | None = None
    """Another kind of device."""


@dataclass(frozen=True)
class Remedy:
    """One change."""

    name: str
    """Short, stable."""
    cost: Cost
    """What it costs."""
    says: str
    """What to do."""
    code: str
    """What to paste, on any device."""
    against: frozenset[str]
    """Verdicts it can help against."""
    backends: frozenset[str] = frozenset()
    """Where it exists; everywhere if empty."""
    change: StepChange | None = field(default=None, repr=False)
    """With what the planner estimates the step again; None if no estimate shows it."""
    code_of_backend: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What to paste instead on devices that have a tool or a name of their own."""

    def on(self, backend: str | None) -> Remedy:
        """Give the same with what is to be pasted on a device."""
        code = self.code_of_backend.get(backend or "")
        return self if code is None else replace(self, code=code)


def _any_of(*names: str) -> frozenset[str]:
    return frozenset(names)


# Backends that have memory of their own.
_CARDS = _any_of("cuda", "hip", "xpu", "npu", "mps")
_MPS = _any_of("mps")
_DEVICE_OF_BACKEND = {
    "cuda": "cuda",
    "hip": "cuda",  # as torch calls AMD's GPUs
    "xpu": "xpu",
    "npu": "npu",
    "mps": "mps",
    "cpu": "cpu",
    "host": "cpu",
}
"""Torch's name of the device, where a message names one that is known.  Of others it is
the user's own ``device``."""

PIECES_WITH_OWN_STATISTICS = Remedy(
    "micro-batches",
    "numerics",
    "add gradients up; layers that normalise by their batch see one piece at a time",
    "for piece in pieces: (loss(model(piece)) / len(pieces)).backward()",
    _DEVICE | _IMPOSSIBLE,
    change=StepChange(half_batch=True),
)
"""Instead of that of the same name, where the model has such layers in training:
``MicroBatcher`` refuses it, since results are not equal."""

REMEDIES = (
    # free: nothing about the training changes
    Remedy(
        "drop the failed step",
        "free",
        "leave the except block before trying again: its frames keep the tensors",
        "error.__traceback__ = None; gc.collect()",
        _DEVICE,
    ),
    Remedy(
        "other processes",
        "free",
        "end the other processes on this device, or choose another one",
        "the tool of the device's vendor, which lists its processes",
        _any_of("held by others"),
        code_of_backend={
            "cuda": "nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
            "hip": "rocm-smi --showpids",
            "xpu": "xpu-smi ps",
            "npu": "npu-smi info",
            "mps": "top -o mem",
        },
    ),
    Remedy(
        "expandable segments",
        "free",
        "let the allocator join its free pieces",
        "PYTORCH_ALLOC_CONF=expandable_segments:True python train.py",
        _any_of("fragmentation"),
        _any_of("cuda"),
    ),
    Remedy(
        "fewer sizes",
        "free",
        "make batches of similar sizes, so that freed blocks fit again",
        'build_loader(dataset, device, max_nodes=..., bucket_by="nodes")',
        _any_of("fragmentation", "held by others"),
        _any_of("hip", "xpu", "npu", "mps", "cuda"),
    ),
    Remedy(
        "wrong size",
        "free",
        "look for the tensor this is: a wrong dimension order or a broadcast [N, N]",
        "with loaderkit.MemoryMeter(device): ...",
        _IMPOSSIBLE | _any_of("garbage size"),
        code_of_backend={
            backend: f'with loaderkit.MemoryMeter("{device}"): ...'
            for backend, device in _DEVICE_OF_BACKEND.items()
        },
    ),
    Remedy(
        "driver",
        "free",
        "there is memory: look at the driver's or the platform's limit on one block",
        "loaderkit doctor",
        _any_of("platform limit"),
    ),
    Remedy(
        "software limit",
        "free",
        "a limit was set below the device's capacity: raise it",
        "torch.get_device_module(device).set_per_process_memory_fraction(1.0)",
        _any_of("software limit"),
        code_of_backend={
            backend: f"torch.{device}.set_per_process_memory_fraction(1.0)"
            for backend, device in _DEVICE_OF_BACKEND.items()
            if device != "cpu"
        },
    ),
    Remedy(
        "graph cache",
        "free",
        "cap the number of distinct shapes: each keeps a compiled graph on MPS",
        'build_loader(dataset, "mps", max_nodes=..., bucket_by="nodes")',
        _any_of("held by others"),
        _MPS,
    ),
    Remedy(
        "shared memory",
        "free",
        "give the container more /dev/shm, or keep fewer batches in flight",
        "docker run --shm-size=8g ...; build_loader(..., prefetch_factor=1)",
        _any_of("shm"),
    ),
    Remedy(
        "mappings",
        "free",
        "send a batch as one block instead of one mapping a tensor, or allow more",
        "build_loader(dataset, device); sudo sysctl vm.max_map_count=1048576",
        _any_of("map count"),
    ),
    Remedy(
        "file descriptors",
        "free",
        "send a batch as one block instead of one descriptor a tensor, or allow more",
        "build_loader(dataset, device); ulimit -n 65536",
        _any_of("fds"),
    ),
    Remedy(
        "page file",
        "free",
        "use fewer workers (each loads the DLLs again), or enlarge the page file",
        "build_loader(dataset, device, num_workers=0)",
        _any_of("pagefile"),
    ),
    Remedy(
        "fork",
        "free",
        "start workers before the process is large, or use fewer",
        "build_loader(dataset, device, num_workers=0)",
        _any_of("fork"),
    ),
    Remedy(
        "the kernel's reason",
        "free",
        "make sure that it was the out-of-memory killer",
        "dmesg | grep -i 'killed process'; loaderkit watch train.py",
        _any_of("killed"),
    ),
    Remedy(
        "fewer workers",
        "free",
        "each worker holds its own batches and copies of the dataset's objects",
        "build_loader(dataset, device); print(loader.plan)",
        _any_of("killed", "host shortage"),
    ),
    Remedy(
        "cache the dataset",
        "free",
        "read samples from mapped files instead of holding them in memory",
        "loaderkit.pack(dataset, 'data.lk'); dataset = loaderkit.open_cache('data.lk')",
        _any_of("killed", "host shortage", "fork"),
    ),
    Remedy(
        "do not pin",
        "free",
        "pinned memory is host memory; without it copies are only slower",
        "build_loader(dataset, device, pin_memory=False)",
        _any_of("pinned"),
    ),
    Remedy(
        "ask again with the cause",
        "free",
        "the text does not say: read free memory right before it fails",
        "print(loaderkit.read_memory(device))",
        _any_of("unclear"),
        code_of_backend={
            backend: f"print(loaderkit.read_memory({device!r}))"
            for backend, device in _DEVICE_OF_BACKEND.items()
        },
    ),
    # equal results
    Remedy(
        "micro-batches",
        "equal results",
        "split the batch and add gradients up, weighted",
        "loaderkit.MicroBatcher(model, optimizer, loss).step(batch)",
        _DEVICE | _IMPOSSIBLE,
        change=StepChange(half_batch=True),
    ),
    Remedy(
        "batches by size",
        "equal results",
        "bound the nodes of a batch: its largest one decides, not the usual one",
        "build_loader(dataset, device, max_nodes=...)",
        _DEVICE | _any_of("killed", "host shortage"),
    ),
    Remedy(
        "checkpointing",
        "equal results",
        "compute activations again in the backward pass instead of keeping them",
        "torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)",
        _SHORT,
        change=StepChange(checkpoint=True),
    ),
    Remedy(
        "fused optimizer",
        "equal results",
        "update in one kernel, without copies of every parameter",
        "torch.optim.AdamW(model.parameters(), fused=True)",
        _SHORT,
        _CARDS | _any_of("cpu"),
        StepChange(optimizer="fused"),
    ),
    Remedy(
        "loop optimizer",
        "equal results",
        "update parameter by parameter, without copies of them all",
        "torch.optim.AdamW(model.parameters(), foreach=False)",
        _SHORT,
        _CARDS,
        StepChange(optimizer="loop"),
    ),
    # numerics
    Remedy(
        "bfloat16 autocast",
        "numerics",
        "keep activations in half the bytes; parameters and optimizer stay as they are",
        "with torch.autocast(device, torch.bfloat16): ...",
        _SHORT,
        change=StepChange(autocast="bfloat16"),
    ),
    # quality
    Remedy(
        "shorter sequences",
        "quality",
        "attention's memory grows with the square of the length",
        "x = x[:, -length:]",
        _SHORT | _IMPOSSIBLE,
    ),
    # device
    Remedy(
        "CPU",
        "device",
        "train where there is more memory, slower",
        'model.to("cpu")',
        _SHORT | _IMPOSSIBLE,
        _CARDS,
        StepChange(target="cpu"),
    ),
)
"""Every remedy; within one cost the likeliest to be enough stands first."""


def remedies_for(verdict: str, backend: str | None) -> list[Remedy]:
    """Give what may help, cheapest first.

    Args:
        verdict: As a diagnosis names it.
        backend: Where it happened.

    Returns:
        Remedies that exist there and work against it.

    >>> [remedy.name for remedy in remedies_for("shm", "host")]
    ['shared memory']
    """
    return [
        remedy.on(backend)
        for remedy in REMEDIES
        if verdict in remedy.against
        and (not remedy.backends or backend in remedy.backends)
    ]
