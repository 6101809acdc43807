"""Cuts a batch into pieces of whole samples, and counts what is in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.pyg import import_pyg, is_pyg_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WEIGHTS = ("samples", "nodes", "tokens")
_MASKS = ("attention_mask", "mask")


def count_samples(batch: Any) -> int:
    """Count the samples of a batch.

    Args:
        batch: A tensor, a PyG batch, or a nest of them; samples along dimension 0.
            Arrays beside a tensor are cut as it is.

    Returns:
        Graphs of the first batch of graphs, else the length of the first tensor.

    Raises:
        ValueError: There is neither.
    """
    for leaf in _leaves(batch):
        if is_pyg_data(leaf):
            return int(leaf.num_graphs) if _is_pyg_batch(leaf) else 1
        if leaf.dim():
            return len(leaf)
    msg = f"a batch needs a tensor or a graph to be cut, got {type(batch).__name__}"
    raise ValueError(msg)


def cut(batch: Any, start: int, stop: int) -> Any:
    """Take some samples of a batch.

    Args:
        batch: As for :func:`count_samples`.
        start: First sample.
        stop: The one after the last.

    Returns:
        The same kind of batch; tensors of another length are shared by all pieces.
    """
    total = count_samples(batch)
    if start == 0 and stop >= total:
        return batch
    return _cut(batch, slice(start, stop), total)


def take(batch: Any, rows: list[int]) -> Any:
    """Take some samples of a batch, from wherever they are.

    Args:
        batch: As for :func:`count_samples`.
        rows: Which.

    Returns:
        As :func:`cut` does, but a copy.
    """
    return _cut(batch, rows, count_samples(batch))


def _cut(value: Any, rows: slice | list[int], total: int) -> Any:
    if _is_pyg_batch(value):
        graphs = [value.get_example(int(i)) for i in np.arange(total)[rows]]
        return type(value).from_data_list(graphs)
    if isinstance(value, torch.Tensor) and value.is_nested:
        samples = value.unbind()  # a jagged tensor refuses to be sliced by samples
        chosen = [samples[int(i)] for i in np.arange(total)[rows]]
        return torch.nested.as_nested_tensor(chosen, layout=value.layout)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value[rows] if value.ndim and len(value) == total else value
    if isinstance(value, dict):
        return {key: _cut(each, rows, total) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(each, rows, total) for each in value))
    if isinstance(value, (tuple, list)):
        if len(value) == total and not any(map(_holds, value)):  # one text a sample
            chosen = [value[i] for i in np.arange(total)[rows]]
            return type(value)(chosen)
        return type(value)(_cut(each, rows, total) for each in value)
    return value


def in_float64(value: Any) -> Any:
    """Copy a batch with all its floats in float64."""
    if is_pyg_data(value):
        return value.clone().apply(in_float64)
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, np.ndarray):
        return value.astype(np.float64) if value.dtype.kind == "f" else value
    if isinstance(value, dict):
        return {key: in_float64(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(in_float64, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(in_float64, value))
    return value


def _is_pyg_batch(value: Any) -> bool:
    return is_pyg_data(value) and isinstance(value, import_pyg().batch)


def _holds(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, dict, tuple, list)) or is_pyg_data(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor) or is_pyg_data(value):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _leaves(each)


def weight_of(batch: Any, weigh: str | Callable[[Any], float]) -> float:
    """Count what the loss is a mean over.

    Args:
        batch: A batch or a piece of one.
        weigh: "samples", "nodes" (of graphs), "tokens" (of a mask, else the first two
            dimensions), or a callable of the piece.

    Returns:
        How many.

    Raises:
        ValueError: The batch has none of them.
    """
    if callable(weigh):
        return float(weigh(batch))
    if weigh == "samples":
        return float(count_samples(batch))
    for leaf in _leaves(batch):
        if weigh == "nodes" and is_pyg_data(leaf):
            return float(leaf.num_nodes or 0)
    if weigh == "tokens":
        return _tokens(batch)
    msg = f"weigh must be one of {', '.join(WEIGHTS)} or a callable, and the batch "
    msg += f"must have them, got {weigh!r} for {type(batch).__name__}"
    raise ValueError(msg)


def _tokens(batch: Any) -> float:
    mapping = next((v for v in _nests(batch) if isinstance(v, dict)), {})
    for name in _MASKS:
        if name in mapping:
            return float(mapping[name].sum())
    if "lengths" in mapping:
        return float(mapping["lengths"].sum())
    for leaf in _leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1:
            return float(leaf.size(0) * leaf.size(1))
    msg = "a batch needs a mask, lengths, or a tensor [samples, tokens, ...]"
    raise ValueError(msg)


def _nests(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _nests(each)
