"""Cuts a batch into pieces of whole samples, and counts what is in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from loaderkit.errors import OptionError
from loaderkit.nests import flatten, is_named_tuple, map_leaves
from loaderkit.pyg import import_pyg, is_pyg_data, is_temporal_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

T = TypeVar("T")

WEIGHTS = ("samples", "nodes", "tokens")
"""What a loss may be a mean over, by name."""
_MASK_NAMES = ("attention_mask", "mask")
"""Fields that are true where a sample has a token: Hugging Face's, and ``Padded``'s."""


def count_samples(batch: object) -> int:
    """Count the samples of a batch.

    Args:
        batch: A tensor, a PyG batch, or a nest of them; samples along dimension 0.
            Arrays beside a tensor are cut as it is.

    Returns:
        Graphs of the first batch of graphs, events of a stream, else the length of the
        first tensor.

    Raises:
        ValueError: There is neither.
    """
    for leaf in flatten(batch, _is_cut_whole):
        if is_temporal_data(leaf):
            return len(leaf)
        if is_pyg_data(leaf):
            return int(leaf.num_graphs) if _is_pyg_batch(leaf) else 1
        if isinstance(leaf, PackedSequence):
            # The first step of a packed sequence has one element of every sample.
            return int(leaf.batch_sizes[0])
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return len(leaf)
    message = "a batch needs a tensor or a graph to be cut, got "
    message += f"{type(batch).__name__}."
    why = "nothing in it has one part for each sample"
    raise OptionError(message, why=why, fix="give a batch as the model gets it")


def cut(batch: T, start: int, stop: int) -> T:
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
    return _select_samples(batch, slice(start, stop), total)


def take(batch: T, rows: list[int]) -> T:
    """Take some samples of a batch, from wherever they are.

    Args:
        batch: As for :func:`count_samples`.
        rows: Which.

    Returns:
        As :func:`cut` does, but a copy.
    """
    return _select_samples(batch, rows, count_samples(batch))


def take_events(events: Any, rows: NDArray[np.intp], *, with_nodes: bool) -> Any:
    """Take some events of a stream, as PyG's ``TemporalDataLoader`` does.

    Args:
        events: Of PyG, in the order of time; nodes keep their numbers.
        rows: Which.
        with_nodes: Whether ``n_id`` tells which nodes take part.

    Returns:
        A copy.
    """
    batch = events[torch.from_numpy(rows)]
    if with_nodes:
        # Of the whole it would be cut, where it happens to be as long as the events.
        ends = [batch[name] for name in ("src", "dst", "neg_dst") if name in batch]
        batch.n_id = torch.unique(torch.cat(ends))
    return batch


def name_of_batch_norm(model: torch.nn.Module) -> str | None:
    """Name a module that normalises by its batch: pieces have other statistics.

    Args:
        model: Any module.

    Returns:
        A name of ``named_modules``; None where there is no such module in training.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            return str(name)
    return None


def _select_samples(batch: T, rows: slice | list[int], total: int) -> T:
    row_numbers = np.arange(total)[rows]

    def is_leaf(value: object) -> bool:
        return _is_cut_whole(value) or _has_one_value_per_sample(value, total)

    def select(leaf: object) -> Any:
        if isinstance(leaf, (torch.Tensor, np.ndarray)) and not _is_nested(leaf):
            # A slice gives views, so that pieces cost no memory; a list, copies.
            return leaf[rows] if leaf.ndim and len(leaf) == total else leaf
        return _select_one_by_one(leaf, row_numbers)

    return map_leaves(select, batch, is_leaf)


def _select_one_by_one(leaf: Any, row_numbers: NDArray[np.intp]) -> Any:
    """Take samples out of what cannot be indexed by several rows at once."""
    if is_temporal_data(leaf):
        return take_events(leaf, row_numbers, with_nodes="n_id" in leaf)
    if _is_pyg_batch(leaf):
        graphs = [leaf.get_example(int(row)) for row in row_numbers]
        return type(leaf).from_data_list(graphs)
    if _is_nested(leaf):
        # A jagged tensor refuses to be sliced by samples.
        samples = leaf.unbind()
        chosen = [samples[int(row)] for row in row_numbers]
        return torch.nested.as_nested_tensor(chosen, layout=leaf.layout)
    if isinstance(leaf, PackedSequence):
        samples = unpack_sequence(leaf)
        chosen = [samples[int(row)] for row in row_numbers]
        return pack_sequence(chosen, enforce_sorted=leaf.sorted_indices is None)
    if isinstance(leaf, (list, tuple)):
        return type(leaf)([leaf[int(row)] for row in row_numbers])
    return leaf


def in_float64(batch: T) -> T:
    """Copy a batch with all its floats in float64."""

    def widen(leaf: object) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.double()
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
            return leaf.astype(np.float64)
        return leaf

    return map_leaves(widen, batch)


def _is_cut_whole(value: object) -> bool:
    """Tell whether a container is cut by its own rules, not part by part."""
    return is_pyg_data(value) or isinstance(value, PackedSequence)


def _has_one_value_per_sample(value: Any, total: int) -> bool:
    """Tell whether a list holds a text or number of each sample, such as its name."""
    is_plain_sequence = isinstance(value, (list, tuple)) and not is_named_tuple(value)
    if not is_plain_sequence or len(value) != total:
        return False
    return not any(
        isinstance(item, torch.Tensor) or _is_container(item) for item in value
    )


def _is_container(value: object) -> bool:
    return isinstance(value, (Mapping, tuple, list)) or is_pyg_data(value)


def _is_pyg_batch(value: object) -> bool:
    return is_pyg_data(value) and isinstance(value, import_pyg().batch)


def _is_nested(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_nested


def weight_of(batch: object, loss_mean_over: str | Callable[[Any], float]) -> float:
    """Count what the loss is a mean over.

    Args:
        batch: A batch or a piece of one.
        loss_mean_over: "samples", "nodes" (of graphs), "tokens" (of a mask, else the
            first two dimensions), or a callable of the piece.

    Returns:
        How many.

    Raises:
        ValueError: The batch has none of them.
    """
    if callable(loss_mean_over):
        return float(loss_mean_over(batch))
    if loss_mean_over == "samples":
        return float(count_samples(batch))
    if loss_mean_over == "tokens":
        return _count_tokens(batch)
    if loss_mean_over == "nodes":
        for leaf in flatten(batch, is_pyg_data):
            if is_pyg_data(leaf):
                return float(leaf.num_nodes or 0)
    message = f"loss_mean_over must be one of {', '.join(WEIGHTS)} or a callable, and "
    message += (
        f"the batch must have them, got {loss_mean_over!r} for {type(batch).__name__}."
    )
    why = "pieces are weighed by what they hold of it"
    raise OptionError(message, why=why, fix='loss_mean_over="samples"')


def _count_tokens(batch: object) -> float:
    for fields in _containers_with_names(batch):
        for name in (*_MASK_NAMES, "lengths"):
            if name in fields:
                return float(fields[name].sum())
    for leaf in flatten(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1:
            return float(leaf.size(0) * leaf.size(1))
    message = "a batch needs a mask, lengths, or a tensor [samples, tokens, ...]."
    why = "tokens are counted by them"
    raise OptionError(message, why=why, fix='loss_mean_over="samples"')


def _containers_with_names(batch: object) -> Iterator[Mapping[str, Any]]:
    """Go through the mappings and named tuples, such as ``Padded``, of a batch."""

    def has_names(value: object) -> bool:
        return isinstance(value, Mapping) or is_named_tuple(value)

    for leaf in flatten(batch, has_names):
        if has_names(leaf):
            fields = leaf if isinstance(leaf, Mapping) else leaf._asdict()
            yield fields
            yield from _containers_with_names(list(fields.values()))
