"""The options of ``build_loader`` as an editor and a type checker see them.

``LoaderOptions`` checks values when a program runs; these types tell of a wrong name or
a wrong type before.  A test holds the two to the same names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.context import BaseContext
    from typing import TypeAlias

    import torch

    Auto: TypeAlias = Literal["auto"]
    """Leaves an option to the plan, as None does."""


class LoaderKeywords(TypedDict, total=False):
    """Fields of ``LoaderOptions``, where what each one means is told."""

    batch_size: int | Auto | None
    max_nodes: int | None
    max_edges: int | None
    max_bytes: int | str | None
    max_tokens: int | None
    oversized: Literal["raise", "alone", "skip"]
    bucket_by: str | None
    buckets: int
    shuffle: bool | Literal["block", "batches"] | None
    seed: int | None
    generator: torch.Generator | None
    drop_last: bool
    sampler: Iterable[Any] | None
    batch_sampler: Iterable[Sequence[Any]] | None
    rank: int | None
    world_size: int | None
    timeout: float
    collate_fn: Callable[[Any], Any] | None
    batch_transform: Callable[[Any], Any] | None
    worker_init_fn: Callable[[int], None] | None
    follow_batch: Sequence[str] | None
    exclude_keys: Sequence[str] | None
    lookahead: bool
    probe: bool
    num_workers: int | Auto | None
    pin_memory: bool | Auto | None
    persistent_workers: bool | Auto | None
    prefetch_factor: int | Auto | None
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | BaseContext | None
    in_order: bool | None
    read_ahead: int | Auto | None
