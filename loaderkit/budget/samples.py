"""What the samples of a dataset weigh, and what batches of them are described by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_iter
from torch.utils.data import default_collate

from loaderkit.budget.train_step import StepError
from loaderkit.errors import OptionError
from loaderkit.joining import join, own_collate
from loaderkit.mistaken import mistaken_for_dataset
from loaderkit.pyg import import_pyg, is_pyg_data

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from loaderkit.budget.surrogate import Surrogate

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

_READ_AT_MOST = 10_000
NAMES = {
    "graphs": ("graphs", "nodes", "edges"),
    "padded graphs": ("graphs", "nodes", "edges", "padded", "padded squared"),
    "sequences": ("samples", "tokens", "padded", "padded squared"),
    "samples": ("samples",),
}
"""What a batch is described by, for each kind of dataset but "typed graphs", which have
columns of their own: the nodes of each type, the edges of each relation."""
_MOST_COLUMNS = 24
"""Of typed graphs.  Each takes one more tracked step; with more types than that, their
nodes and edges are added up, and what that does not explain is in the error."""


@dataclass(frozen=True)
class Samples:
    """The sizes of all samples, and how they become batches."""

    dataset: Any
    """Where they come from."""
    kind: str
    """A key of :data:`NAMES`."""
    sizes: Floats
    """Sizes ``[n, names]`` of batches of one sample."""
    join: Callable[[list[int]], Any]
    """Makes the batch of some rows."""
    partly: bool = False
    """Whether only the first samples were looked at."""
    columns: tuple[str, ...] = ()
    """Of typed graphs: what is counted in each column of ``sizes``."""

    @property
    def names(self) -> tuple[str, ...]:
        """What a batch is described by."""
        return self.columns or NAMES[self.kind]

    def __len__(self) -> int:
        return len(self.sizes)

    def says(self, *names: str) -> bool:
        """Tell whether a loader can ask the dataset itself for sizes by these names."""
        return all(_told(self.dataset, name) is not None for name in names)

    def padded(self) -> Samples:
        """Give the same samples for a model that pads graphs to the largest."""
        return replace(self, kind="padded graphs")

    def complete(self, sizes: Any) -> Floats:
        """Add to sizes that were given what they leave out, at its most.

        Args:
            sizes: Sizes of batches ``[batches, names]``; of padded graphs also without
                the last two.

        Returns:
            Sizes ``[batches, names]``; each graph as long as the largest of all.
        """
        given = np.atleast_2d(np.asarray(sizes, np.float64))
        if given.shape[-1] == len(self.names):
            return given
        if self.kind != "padded graphs" or given.shape[-1] != 3:
            msg = f"sizes must be [batches, ({', '.join(self.names)})], got "
            msg += f"{list(given.shape)}"
            raise StepError(msg)
        longest = np.minimum(self.sizes[:, 1].max(), given[:, 1])
        padded = given[:, 0] * longest
        return np.column_stack([given, padded, padded * longest])

    def describe(self, rows: Any) -> Floats:
        """Describe batches.

        Args:
            rows: Rows of the samples ``[batches, samples]``.

        Returns:
            Sizes ``[batches, names]``.
        """
        chosen = self.sizes[np.asarray(rows)]
        count = chosen.shape[-2]
        if self.kind == "padded graphs":
            sums = np.asarray(chosen[..., :3].sum(axis=-2), np.float64)
            longest = chosen[..., 1].max(axis=-1)
            padded = [count * longest, count * longest**2]
            return np.concatenate([sums, np.stack(padded, axis=-1)], axis=-1)
        if self.kind != "sequences":
            return np.asarray(chosen.sum(axis=-2), np.float64)
        tokens, longest = chosen[..., 1].sum(axis=-1), chosen[..., 1].max(axis=-1)
        counts = np.full(longest.shape, count, np.float64)
        return np.stack([counts, tokens, count * longest, count * longest**2], axis=-1)

    def worst(self, surrogate: Surrogate) -> Floats:
        """Price the dearest batch of every size.

        Args:
            surrogate: What a batch costs.

        Returns:
            Its price for 1 to ``n`` samples ``[n]``.
        """
        if self.kind == "sequences":
            lengths = np.sort(self.sizes[:, 1])[::-1]
            counts = np.arange(1, len(self) + 1, dtype=np.float64)
            padded = counts * lengths[0]
            each = [counts, np.cumsum(lengths), padded, padded * lengths[0]]
            return surrogate.price(np.stack(each, axis=1))
        best = np.full(len(self), -np.inf)
        counts = np.arange(1, len(self) + 1, dtype=np.float64)
        summed = self.sizes.shape[1]
        for line in surrogate.lines:
            dearest = np.sort(self.sizes @ line[1 : 1 + summed])[::-1]
            total = line[0] + np.cumsum(dearest)
            if self.kind == "padded graphs":  # all as long as the largest of all
                longest = self.sizes[:, 1].max()
                places = line[4] * longest + line[5] * longest**2
                total += counts * max(places, 0.0)
            np.maximum(best, total, out=best)
        return best

    def worst_rows(self, surrogate: Surrogate, count: int) -> list[int]:
        """Name the samples of the dearest batch of so many."""
        if self.kind == "sequences":
            weights = [self.sizes[:, 1]]
        else:
            summed = self.sizes.shape[1]
            weights = [self.sizes @ line[1 : 1 + summed] for line in surrogate.lines]
        if self.kind == "padded graphs":
            weights.append(self.sizes[:, 1].copy())
            for weight in weights:  # the largest is in every one: the others pad to it
                weight[self.sizes[:, 1].argmax()] = np.inf
        batches = np.stack([np.argpartition(-w, count - 1)[:count] for w in weights])
        prices = surrogate.price(self.describe(batches))
        return [int(row) for row in batches[int(prices.argmax())]]


def read_samples(
    dataset: Any, *, collate: Callable[[list[Any]], Any] | None = None
) -> Samples:
    """Learn the sizes of all samples: from a cache's offsets, else by reading them.

    Args:
        dataset: Indexed: ours, PyG's, a list, or any other with a length.
        collate: Joins samples; PyG's or torch's way if None.

    Returns:
        Sizes and the way to make batches.

    Raises:
        OptionError: It is no dataset, but a loader, a path, one graph ...
        ValueError: The dataset is empty or has no length.
    """
    mistake = mistaken_for_dataset(dataset)
    if mistake is not None:
        fix = f"plan_batch(model, {mistake.instead}, device)"
        raise OptionError(mistake.what, why=mistake.why, fix=fix)
    count = len(dataset) if hasattr(dataset, "__len__") else 0
    if not count:
        msg = "the dataset is empty, or has no length to plan with: give some of its "
        msg += "samples as a list"
        raise StepError(msg)
    if isinstance(dataset, Mapping) and set(dataset) != set(range(count)):
        what = f"A {type(dataset).__name__} is no dataset."
        why = "its keys are not the numbers from 0 on"
        raise OptionError(
            what, why=why, fix="plan_batch(model, list(samples.values()), device)"
        )

    def join(rows: list[int]) -> Any:
        return _join(dataset, rows, collate)

    first = dataset[0]
    if is_pyg_data(first):
        if isinstance(first, import_pyg().hetero_data):
            return _typed_graphs(dataset, count, join)
        return Samples(dataset, "graphs", *_graphs(dataset, count, join))
    lengths, partly = _lengths(dataset, count)
    if lengths is None or len(set(lengths.tolist())) == 1:
        return Samples(dataset, "samples", np.ones((count, 1)), join)
    tokens = lengths.astype(np.float64)
    sizes = np.stack([np.ones(len(tokens)), tokens, tokens, tokens**2], axis=1)
    return Samples(dataset, "sequences", sizes, join, partly)


def samples_of_shape(text: str, count: int) -> list[Any]:
    """Make samples of zeros.

    Args:
        text: Shape of each argument of the model for one sample, such as
            ``"80x7"`` or ``"3x32x32,20:int64"``.
        count: How many.

    Returns:
        Tensors, or tuples of them for several arguments; they share one memory.

    Raises:
        ValueError: There is no such type of tensor.

    >>> [tuple(t.shape) for t in samples_of_shape("3x8,5:int64", 2)[0]]
    [(3, 8), (5,)]
    """
    tensors = []
    for part in text.split(","):
        shape, _, kind = part.partition(":")
        dtype = getattr(torch, kind or "float32", None)
        if not isinstance(dtype, torch.dtype):
            msg = f"{kind!r} is no type of tensor; such as 80x7:int64"
            raise StepError(msg)
        tensors.append(torch.zeros([int(n) for n in shape.split("x")], dtype=dtype))
    return [tensors[0] if len(tensors) == 1 else tuple(tensors)] * count


def _join(
    dataset: Any, rows: list[int], collate: Callable[[list[Any]], Any] | None
) -> Any:
    read = getattr(dataset, "__getitems__", None)
    samples = [dataset[row] for row in rows] if read is None else read(rows)
    collate = collate or own_collate(dataset)
    if collate is not None:
        return collate(samples)
    return join(samples, default_collate) if isinstance(samples, list) else samples


def _graphs(dataset: Any, count: int, join: Any) -> tuple[Floats, Any, bool]:
    nodes, edges = _told(dataset, "nodes"), _told(dataset, "edges")
    if nodes is not None and edges is not None:
        table = np.stack([np.ones(count), nodes, edges], axis=1)
        return table.astype(np.float64), join, False
    looked = min(count, _READ_AT_MOST)
    rows = [
        (1, _nodes(each), each.num_edges)
        for each in map(dataset.__getitem__, range(looked))
    ]
    return np.array(rows, np.float64), join, looked < count


def _typed_graphs(dataset: Any, count: int, join: Any) -> Samples:
    """Count the nodes of each type and the edges of each relation."""
    looked = min(count, _READ_AT_MOST)
    counts: dict[str, Floats] = {}
    for row, graph in enumerate(map(dataset.__getitem__, range(looked))):
        told = {f"nodes of {t}": graph[t].num_nodes for t in graph.node_types}
        told |= {f"edges {' '.join(r)}": graph[r].num_edges for r in graph.edge_types}
        for name, number in told.items():
            counts.setdefault(name, np.zeros(looked))[row] = number or 0
    # A relation and its reverse have as many edges: one column tells of both.
    columns: dict[tuple[float, ...], str] = {}
    for name, column in counts.items():
        columns.setdefault(tuple(column), name)
    ones = np.ones(looked)
    if len(columns) > _MOST_COLUMNS:
        nodes, edges = (
            sum((c for n, c in counts.items() if n.startswith(kind)), np.zeros(looked))
            for kind in ("nodes", "edges")
        )
        sizes = np.stack([ones, nodes, edges], axis=1)
        return Samples(dataset, "graphs", sizes, join, looked < count)
    sizes = np.stack([ones, *(counts[name] for name in columns.values())], axis=1)
    names = ("graphs", *columns.values())
    return Samples(dataset, "typed graphs", sizes, join, looked < count, names)


def _nodes(graph: Any) -> int:
    return int(graph.num_nodes or 0)


def _lengths(dataset: Any, count: int) -> tuple[Ints | None, bool]:
    """Find the tokens of each sample: the length of its longest tensor."""
    tokens = _told(dataset, "tokens")
    if tokens is not None and np.any(tokens):
        return np.asarray(tokens, np.int64), False
    if tokens is not None:
        return None, False
    looked = min(count, _READ_AT_MOST)
    lengths = [_length(dataset[row]) for row in range(looked)]
    return np.array(lengths, np.int64), looked < count


def _told(dataset: Any, name: str) -> Any:
    """Ask a dataset for the sizes of all samples, as a loader does; None if unknown."""
    asks = hasattr(dataset, "sizes") and getattr(dataset, "cache", True) is not None
    told: Any = dataset.sizes() if asks else None
    return told.get(name) if hasattr(told, "get") else getattr(told, name, None)


def _length(sample: Any) -> int:
    tensors = [
        t for t in tree_iter(sample) if isinstance(t, (torch.Tensor, np.ndarray))
    ]
    return max((len(t) for t in tensors if t.ndim), default=0)
