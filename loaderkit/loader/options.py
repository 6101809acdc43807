"""What can be asked of ``build_loader``.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Wishes:
    """What the caller asked for; None leaves it to the plan."""

    num_workers: int | None = None
    """Processes that make batches."""
    pin_memory: bool | None = None
    """Copy batches to page-locked memory."""
    persistent_workers: bool | None = None
    """Keep the workers from epoch to epoch."""
    prefetch_factor: int | None = None
    """Batches asked of each worker ahead of time."""
    multiprocessing_context: str | None = None
    """How workers start: "fork", "spawn" or "forkserver"."""
    in_order: bool | None = None
    """Give batches in the order of their numbers."""
    read_ahead: int | None = None
    """Batches a thread makes ahead of time where there are no workers."""


@dataclass(frozen=True)
class LoaderOptions(Wishes):
    """Everything that can be asked of ``build_loader``."""

    batch_size: int | None = None
    """Samples of a batch; 1 when there is no other limit."""
    max_nodes: int | None = None
    """Nodes of a batch at most."""
    max_edges: int | None = None
    """Edges of a batch at most."""
    max_bytes: int | None = None
    """Bytes of a batch at most."""
    max_tokens: int | None = None
    """Tokens of a batch at most: rows of the longest ragged field of each sample."""
    oversized: str = "raise"
    """A sample beyond a limit: "raise", "alone" (a batch of its own) or "skip"."""
    bucket_by: str | None = None
    """Batch samples of similar "nodes", "edges", "bytes" or "tokens"."""
    buckets: int = 8
    """Distinct shapes that padded batches can have then."""
    shuffle: bool | str = False
    """True, False, or "block": blocks of 1,024 neighbours, 8 blocks mixed at a time."""
    seed: int | None = None
    """What order and random numbers follow from; None draws one from torch."""
    drop_last: bool = False
    """Leave out a last batch that is not full."""
    sampler: Any = None
    """Chooses rows instead: any of torch's, weighted ones too."""
    batch_sampler: Any = None
    """Chooses whole batches instead."""
    rank: int | None = None
    """Which process this is; asked of torch.distributed if None."""
    world_size: int | None = None
    """How many train together; asked of torch.distributed if None."""
    timeout: float = 0
    """Seconds to wait for a worker; 0 waits for ever."""
    collate_fn: Callable[[Any], Any] | None = None
    """How samples are joined; the dataset's own way, PyG's or torch's if None."""
    worker_init_fn: Callable[[int], None] | None = None
    """Called in every worker as it starts."""
    follow_batch: Sequence[str] | None = None
    """Fields that get a ``_batch`` vector of their own, as in PyG."""
    exclude_keys: Sequence[str] | None = None
    """Fields left out of batches, as in PyG."""
    probe: bool = True
    """Read a few samples to measure what they cost."""


def parse_variable(name: str, text: str) -> Any:
    """Read a variable of the environment.

    Args:
        name: Its name, for the message.
        text: What it is set to.

    Returns:
        A number, a truth or a start method.

    Raises:
        ValueError: It is none of these.
    """
    lower = text.strip().lower()
    if lower in {"true", "false", "yes", "no", "on", "off"}:
        return lower in {"true", "yes", "on"}
    if lower.isdigit():
        return int(lower)
    if lower in {"fork", "spawn", "forkserver"}:
        return lower
    msg = f"{name} must be a number, true or false, got {text!r}"
    raise ValueError(msg)
