"""The sizes of a dataset's samples, and what batches of them are described by."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from loaderkit.budget.cutting import take_events
from loaderkit.budget.step.train_step import DTYPES_ELSEWHERE
from loaderkit.composed_joining import own_collate
from loaderkit.error_texts import error_in_words, is_out_of_memory
from loaderkit.errors import OptionError, StepError
from loaderkit.fixes import Either, Fix, Setting
from loaderkit.joining import join
from loaderkit.mistaken import mistaken_for_dataset
from loaderkit.nests import flatten
from loaderkit.pyg import import_pyg, is_pyg_data, is_temporal_data
from loaderkit.randomness import preserve_random_states
from loaderkit.sample_sizes import lies_in_memory
from loaderkit.value_words import show_value, with_article

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike

    from loaderkit.array_types import Floats, Ints
    from loaderkit.budget.batch.peak_model import PeakModel

SampleKind = Literal[
    "graphs",
    "graphs with self-loops",
    "typed graphs",
    "padded graphs",
    "paired graphs",
    "sequences",
    "paired sequences",
    "samples",
    "paired samples",
]
"""What a dataset holds.  "graphs with self-loops" are graphs for a model that replaces
these, such as GCN; "padded graphs" are graphs for a model that pads each to the largest
of its batch; "samples" are all of one size.  What is "paired" is for a model
in which everything in a batch meets everything else: every node every other node, or
every sample every other sample, as in a contrastive loss."""

NAMES: dict[SampleKind, tuple[str, ...]] = {
    "graphs": ("graphs", "nodes", "edges"),
    "graphs with self-loops": ("graphs", "nodes", "edges", "self-loops"),
    "padded graphs": ("graphs", "nodes", "edges", "padded", "padded squared"),
    "paired graphs": ("graphs", "nodes", "edges", "graphs squared", "nodes squared"),
    "sequences": ("samples", "tokens", "padded", "padded squared"),
    "paired sequences": (
        *("samples", "tokens", "padded", "padded squared"),
        *("samples squared", "tokens squared"),
    ),
    "samples": ("samples",),
    "paired samples": ("samples", "samples squared"),
}
"""What a batch is described by, for each kind of dataset but "typed graphs", which have
columns of their own: the nodes of each type, the edges of each relation."""
_OTHERWISE: dict[SampleKind, tuple[SampleKind, ...]] = {
    "graphs": ("padded graphs", "paired graphs"),
    "sequences": ("paired sequences",),
    "samples": ("paired samples",),
}
"""What else samples may be described by, the likeliest first."""
_GRAPH_COLUMNS = len(NAMES["graphs"])
_NODES_COLUMN = 1
SELF_LOOPS_COLUMN = 3
"""Of graphs with self-loops: where their number is in the sizes."""
_TOKENS_COLUMN = 1

_SQUARED_COLUMNS: dict[SampleKind, list[int]] = {
    "paired graphs": [0, _NODES_COLUMN],
    "paired sequences": [0, _TOKENS_COLUMN],
    "paired samples": [0],
}
"""Which columns of a batch are squared in its last ones."""

_MOST_SAMPLES_READ = 10_000
"""Of datasets that do not tell sizes; chosen: reading takes some 10 s at 1 ms each, and
a plan says that it saw no more."""
_MOST_GRAPHS_COUNTED = 10_000
"""Of which self-loops are counted, whose number no dataset tells; chosen as above.  In
a larger dataset what they make of a peak stays in the error."""
_GRAPHS_LOOKED_AT = 512
"""Of a dataset, evenly spaced: where none has a self-loop, the others are not read.
Chosen: if one graph in a hundred has some, all of them are missed in 1 of 170 plans."""
_MOST_COLUMNS = 24
"""Of typed graphs; chosen.  Each takes one more tracked step; with more types than
that, their nodes and edges are added up, and what that does not explain is in the
error."""


@dataclass(frozen=True)
class Samples:
    """The sizes of all samples, and how they become batches."""

    dataset: Any
    """Where they come from."""
    kind: SampleKind
    """What a batch is described by."""
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

    def loader_counts_tokens(self) -> bool:
        """Tell whether a loader takes ``max_tokens`` for these samples."""
        return _sizes_told(self.dataset, "tokens") is not None

    def loader_counts_nodes(self) -> bool:
        """Tell whether a loader takes ``max_nodes`` and ``max_edges`` for them.

        It asks the dataset, or looks at graphs that lie in memory.
        """
        told = (_sizes_told(self.dataset, name) for name in ("nodes", "edges"))
        return all(size is not None for size in told) or lies_in_memory(self.dataset)

    def as_one_stream(self) -> str:
        """Write how parts of a stream of events become one; empty if they are none."""
        if self.kind != "graphs" or not is_temporal_data(self.dataset[0]):
            return ""
        joined = "torch.cat([part[name] for part in dataset])"
        fields = f"{{name: {joined} for name in dataset[0].keys()}}"
        events = f"torch_geometric.data.TemporalData(**{fields})"
        return f"plan_batch(model, {events}, 'cpu')"

    def otherwise_described(self) -> list[Samples]:
        """Give the same samples for models that do with a batch what few models do.

        That is to pad graphs to the largest, or to let everything in a batch meet
        everything else: sizes alone do not tell, the bytes of tracked steps do.
        """
        return [replace(self, kind=kind) for kind in _OTHERWISE.get(self.kind, ())]

    def with_self_loops(self) -> Samples | None:
        """Count the self-loops of graphs, which some convolutions replace.

        GCN and GAT leave out those that are there and add one for each node: of two
        batches of as many nodes and edges, that with more self-loops takes less.

        Returns:
            None where there are none, or too many graphs to read.
        """
        if self.kind != "graphs" or not 0 < len(self) <= _MOST_GRAPHS_COUNTED:
            return None
        spaced = np.linspace(0, len(self) - 1, _GRAPHS_LOOKED_AT).astype(int)
        if not any(_count_self_loops(self.dataset[int(row)]) for row in set(spaced)):
            return None
        graphs = map(self.dataset.__getitem__, range(len(self)))
        self_loops = np.array([_count_self_loops(graph) for graph in graphs], float)
        sizes = np.column_stack([self.sizes, self_loops])
        return replace(self, kind="graphs with self-loops", sizes=sizes)

    @property
    def is_sequences(self) -> bool:
        """Whether they are of different lengths, and padded to the longest."""
        return self.kind in {"sequences", "paired sequences"}

    def with_padding(self, sizes: ArrayLike) -> Floats:
        """Add the padding that sizes leave out, at its most.

        Args:
            sizes: Sizes of batches ``[batches, names]``; also without what is padded or
                squared.

        Returns:
            Sizes ``[batches, names]``; each padded graph as long as the largest of all.

        Raises:
            ValueError: There are too many or too few columns.
        """
        size_rows = np.atleast_2d(np.asarray(sizes, np.float64))
        if size_rows.shape[-1] == len(self.names):
            return size_rows
        squared = _SQUARED_COLUMNS.get(self.kind)
        if squared and size_rows.shape[-1] == len(self.names) - len(squared):
            return np.column_stack([size_rows, size_rows[:, squared] ** 2])
        if (
            self.kind == "graphs with self-loops"
            and size_rows.shape[-1] == _GRAPH_COLUMNS
        ):
            # A model leaves those out that there are: without any it takes the most.
            return np.column_stack([size_rows, np.zeros(len(size_rows))])
        if self.kind != "padded graphs" or size_rows.shape[-1] != _GRAPH_COLUMNS:
            message = f"sizes must be [batches, ({', '.join(self.names)})], got "
            message += f"{list(size_rows.shape)}."
            why = f"what batches of {self.kind} take follows from these numbers"
            fix = f"[[{', '.join('1' for _ in self.names)}]]"
            raise StepError(message, why=why, fix=fix)
        graphs, nodes = size_rows[:, 0], size_rows[:, _NODES_COLUMN]
        longest = np.minimum(self.sizes[:, _NODES_COLUMN].max(), nodes)
        padded = graphs * longest
        return np.column_stack([size_rows, padded, padded * longest])

    def batch_sizes(self, rows: ArrayLike) -> Floats:
        """Give the sizes of batches.

        Args:
            rows: Rows of the samples ``[batches, samples]``.

        Returns:
            Sizes ``[batches, names]``.
        """
        chosen = self.sizes[np.asarray(rows)]
        count = chosen.shape[-2]
        if self.kind == "padded graphs":
            of_graphs = chosen[..., :_GRAPH_COLUMNS]
            totals = np.asarray(of_graphs.sum(axis=-2), np.float64)
            longest = chosen[..., _NODES_COLUMN].max(axis=-1)
            padding = np.stack([count * longest, count * longest**2], axis=-1)
            return np.concatenate([totals, padding], axis=-1)

        if self.is_sequences:
            tokens = chosen[..., _TOKENS_COLUMN].sum(axis=-1)
            longest = chosen[..., _TOKENS_COLUMN].max(axis=-1)
            counts = np.full(longest.shape, count, np.float64)
            padded = count * longest
            totals = np.stack([counts, tokens, padded, padded * longest], axis=-1)
        else:
            totals = np.asarray(chosen.sum(axis=-2), np.float64)
        squared = _SQUARED_COLUMNS.get(self.kind, [])
        return np.concatenate([totals, totals[..., squared] ** 2], axis=-1)

    def worst_peaks(self, peak_model: PeakModel) -> Floats:
        """Predict the peak of the worst batch of every size.

        Args:
            peak_model: What a batch takes.

        Returns:
            Bytes for 1 to ``n`` samples ``[n]``.
        """
        if self.is_sequences:
            return peak_model.predict(self._sizes_of_longest())
        peaks = np.full(len(self), -np.inf)
        for line in peak_model.lines:
            np.maximum(peaks, self._worst_totals(line), out=peaks)
        return peaks

    def _sizes_of_longest(self) -> Floats:
        """Give the sizes of the batches of the 1 to ``n`` longest sequences."""
        counts = np.arange(1, len(self) + 1, dtype=np.float64)
        lengths = np.sort(self.sizes[:, _TOKENS_COLUMN])[::-1]
        longest = lengths[0]
        padded = counts * longest
        columns = [counts, np.cumsum(lengths), padded, padded * longest]
        for column in _SQUARED_COLUMNS.get(self.kind, []):
            columns.append(columns[column] ** 2)
        return np.stack(columns, axis=1)

    def _worst_totals(self, line: Floats) -> Floats:
        """Give the most that one line predicts for any 1 to ``n`` samples.

        The largest sum of a line over k samples is that of its k largest samples: one
        sort gives the worst batch of every size.
        """
        summed = self.sizes.shape[1]
        bytes_of_samples = self.sizes @ line[1 : 1 + summed]
        totals: Floats = line[0] + np.cumsum(np.sort(bytes_of_samples)[::-1])
        if self.kind == "padded graphs":
            # As if all were as long as the largest: some batch has that one.
            longest = self.sizes[:, _NODES_COLUMN].max()
            padding = line[4] * longest + line[5] * longest**2
            totals += np.arange(1, len(self) + 1) * max(padding, 0.0)

        squared = _SQUARED_COLUMNS.get(self.kind, [])
        for bytes_of_pair, column in zip(line[1 + summed :], squared, strict=False):
            # As if the samples with the most of it were also those that take the most
            # otherwise.
            most = np.cumsum(np.sort(self.sizes[:, column])[::-1])
            totals += max(bytes_of_pair, 0.0) * most**2
        return totals

    def worst_rows(self, peak_model: PeakModel, count: int) -> list[int]:
        """Name the samples of the worst batch of so many, by what is predicted."""
        if is_temporal_data(self.dataset):
            first = _window_of_most_nodes(self.dataset, count)
            return list(range(first, first + count))
        summed = self.sizes.shape[1]
        if self.is_sequences:
            weights = [self.sizes[:, _TOKENS_COLUMN]]
        else:
            weights = [self.sizes @ line[1 : 1 + summed] for line in peak_model.lines]
        if self.kind == "paired graphs":
            # Around a batch of the mean size, squares grow by twice that size.
            squared = _SQUARED_COLUMNS[self.kind]
            twice_mean = 2 * count * self.sizes[:, squared].mean(axis=0)
            weights.append(self.sizes[:, _NODES_COLUMN])
            weights += [
                weight + self.sizes[:, squared] @ (twice_mean * line[1 + summed :])
                for weight, line in zip(weights, peak_model.lines, strict=False)
            ]
        if self.kind == "padded graphs":
            nodes = self.sizes[:, _NODES_COLUMN]
            weights.append(nodes.copy())
            # The largest is in every candidate: the others are padded to it.
            for weight in weights:
                weight[nodes.argmax()] = np.inf
        heaviest = [np.argpartition(-weight, count - 1)[:count] for weight in weights]
        batches = np.stack(heaviest)
        peaks = peak_model.predict(self.batch_sizes(batches))
        return [int(row) for row in batches[int(peaks.argmax())]]


@preserve_random_states()
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
    if is_temporal_data(dataset):
        return _read_events(dataset)
    count = _count_checked(dataset)
    # A function of its own could not be pickled, and a plan holds it.
    join_rows = functools.partial(_join_rows, dataset, collate=collate)

    first = dataset[0]
    if is_pyg_data(first):
        if isinstance(first, import_pyg().hetero_data):
            return _read_typed_graphs(dataset, count, join_rows)
        return _read_graphs(dataset, count, join_rows)

    lengths = _read_lengths(dataset, count)
    if lengths.values is None or len(set(lengths.values.tolist())) == 1:
        return Samples(dataset, "samples", np.ones((count, 1)), join_rows)
    tokens = lengths.values.astype(np.float64)
    sizes = np.stack([np.ones(len(tokens)), tokens, tokens, tokens**2], axis=1)
    return Samples(dataset, "sequences", sizes, join_rows, lengths.partly)


def _read_events(events: Any) -> Samples:
    """Take each event of a stream as a sample, as PyG's ``TemporalDataLoader`` does."""
    count = len(events)
    if not count:
        message = "the dataset has no events to plan with."
        why = "a plan follows from the number of events in a batch"
        raise StepError(message, why=why, fix="plan_batch(model, events, device)")
    join_events = functools.partial(_join_events, events)
    return Samples(events, "samples", np.ones((count, 1)), join_events)


def _window_of_most_nodes(events: Any, count: int) -> int:
    """Find where so many events in a row have the most nodes.

    Of batches of as many events, that is the one that takes the most: models compute
    something for each node that takes part.
    """
    ends = [events[name] for name in ("src", "dst") if name in events]
    if not ends:
        return 0
    nodes = torch.stack(ends, dim=1).flatten().cpu().numpy()
    times = np.repeat(np.arange(len(events)), len(ends))

    # When each node took part before: sorted by node, that is the entry above.
    order = np.argsort(nodes, kind="stable")
    above, entry = order[:-1], order[1:]
    is_same_node = nodes[entry] == nodes[above]
    previous_time = np.full(len(nodes), -1)
    previous_time[entry[is_same_node]] = times[above[is_same_node]]

    # A node counts in each window that has its event and not the one before.  A window
    # is known by its first event.
    first_window = np.maximum(previous_time + 1, times - count + 1)
    is_counted = first_window <= times
    change_of_count = np.zeros(len(events) + 1, np.int64)
    np.add.at(change_of_count, first_window[is_counted], 1)
    np.add.at(change_of_count, times[is_counted] + 1, -1)
    node_counts = np.cumsum(change_of_count)[: len(events) - count + 1]
    return int(node_counts.argmax())


def _join_events(events: Any, rows: list[int]) -> Any:
    """Make a batch of events as ``TemporalDataLoader`` does."""
    return take_events(events, np.sort(np.array(rows)), with_nodes=True)


def _count_checked(dataset: object) -> int:
    """Count the samples; refuse what is no dataset, or an empty one."""
    mistake = mistaken_for_dataset(dataset)
    if mistake is not None:
        code = mistake.fix("plan_batch(model, {}, device)")
        instead = _samples_by_name(code, mistake.instead)
        raise OptionError(mistake.message, why=mistake.why, fix=instead)
    count = len(dataset) if hasattr(dataset, "__len__") else 0
    if not count:
        message = "the dataset is empty, or has no length to plan with."
        why = "a plan follows from the sizes of samples"
        fix = "give some of its samples as a list: [dataset[0], dataset[1]]"
        raise StepError(message, why=why, fix=fix)
    if isinstance(dataset, Mapping) and set(dataset) != set(range(count)):
        message = f"{with_article(type(dataset).__name__)} is no dataset."
        why = "its keys are not the numbers from 0 on"
        values = "list(samples.values())"
        code = f"plan_batch(model, {values}, device)"
        raise OptionError(message, why=why, fix=_samples_by_name(code, values))
    return count


def _samples_by_name(code: str, samples: str) -> Either:
    """Write a call with other samples, which a command line names by a file's name."""
    return Either(code, f"samples = {samples} in data.py, and data.py:samples")


def samples_of_shape(text: str, count: int) -> list[Any]:
    """Make samples of zeros.

    Args:
        text: Shape of each argument of the model for one sample, such as
            ``"80x7"`` or ``"3x32x32,20:int64"``.
        count: How many.

    Returns:
        Tensors, or tuples of them for several arguments; they share one memory.

    Raises:
        OptionError: There is no such type of tensor, or these are too many.

    >>> [tuple(t.shape) for t in samples_of_shape("3x8,5:int64", 2)[0]]
    [(3, 8), (5,)]
    """
    tensors = []
    for argument in text.split(","):
        shape, _, dtype_name = argument.partition(":")
        dtype = getattr(torch, dtype_name or "float32", None)
        if not isinstance(dtype, torch.dtype):
            message = f"{dtype_name!r} is no type of tensor."
            meant = DTYPES_ELSEWHERE.get(dtype_name)
            example = "80x7:int64" if meant is None else f"{shape}:{meant}"
            raise OptionError(message, why="torch has no such type", fix=example)
        try:
            sizes = [int(size) for size in shape.split("x")]
            tensors.append(torch.zeros(sizes, dtype=dtype))
        except (RuntimeError, TypeError, ValueError) as error:
            message = f"A sample of shape {show_value(argument)} cannot be made."
            why = error_in_words(error)
            raise OptionError(message, why=why, fix="80x7, of one sample") from error
    sample = tensors[0] if len(tensors) == 1 else tuple(tensors)
    try:
        return [sample] * count
    except (MemoryError, OverflowError) as error:
        message = f"{count:,} samples cannot be made."
        why = "they are more than a list can hold here"
        fix = Setting("batch_size", 32)
        raise OptionError(message, why=why, fix=fix) from error


@preserve_random_states()
def _join_rows(
    dataset: Any, rows: list[int], collate: Callable[[list[Any]], Any] | None
) -> Any:
    """Make a batch as the loader does."""
    read_many = getattr(dataset, "__getitems__", None)
    samples = [dataset[row] for row in rows] if read_many is None else read_many(rows)
    collate = collate or own_collate(dataset)
    if collate is not None:
        return collate(samples)
    if not isinstance(samples, list):
        return samples
    try:
        return join(samples, default_collate)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        message = "The samples of a batch cannot be joined: "
        message += error_in_words(error)
        why = "torch joins fields of one shape, and they were not packed"
        packed = Either(
            "plan_batch(model, loaderkit.pack(dataset, path), device)",
            "loaderkit pack DATA CACHE, and loaderkit plan MODEL CACHE",
        )
        fix = Fix.of(packed, ", whose batches are padded")
        raise StepError(message, why=why, fix=fix) from error


def _read_graphs(
    dataset: Any, count: int, join_rows: Callable[[list[int]], Any]
) -> Samples:
    nodes, edges = _sizes_told(dataset, "nodes"), _sizes_told(dataset, "edges")
    if nodes is not None and edges is not None:
        table = np.stack([np.ones(count), nodes, edges], axis=1)
        return Samples(dataset, "graphs", table.astype(np.float64), join_rows)

    read_count = min(count, _MOST_SAMPLES_READ)
    graphs = map(dataset.__getitem__, range(read_count))
    rows = [(1, graph.num_nodes or 0, graph.num_edges) for graph in graphs]
    table = np.array(rows, np.float64)
    return Samples(dataset, "graphs", table, join_rows, read_count < count)


def _count_self_loops(graph: Any) -> int:
    edge_index = graph.edge_index
    if not isinstance(edge_index, torch.Tensor):
        return 0
    return int((edge_index[0] == edge_index[1]).sum())


def _read_typed_graphs(
    dataset: Any, count: int, join_rows: Callable[[list[int]], Any]
) -> Samples:
    """Count the nodes of each type and the edges of each relation."""
    read_count = min(count, _MOST_SAMPLES_READ)
    nodes: dict[str, Floats] = {}
    edges: dict[str, Floats] = {}
    for row in range(read_count):
        graph = dataset[row]
        for node_type in graph.node_types:
            name = f"nodes of {node_type}"
            nodes_of_type = nodes.setdefault(name, np.zeros(read_count))
            nodes_of_type[row] = graph[node_type].num_nodes or 0
        for edge_type in graph.edge_types:
            name = f"edges {' '.join(edge_type)}"
            edges_of_type = edges.setdefault(name, np.zeros(read_count))
            edges_of_type[row] = graph[edge_type].num_edges or 0

    # A relation and its reverse have as many edges: one column tells of both.
    names_by_values: dict[tuple[float, ...], str] = {}
    for name, values in (nodes | edges).items():
        names_by_values.setdefault(tuple(values), name)

    graph_counts = np.ones(read_count)
    is_partial = read_count < count
    if len(names_by_values) > _MOST_COLUMNS:
        # Too many to fit a line to: the types are counted together.  Zeros first, for
        # graphs without any type of edges.
        all_nodes = np.sum([np.zeros(read_count), *nodes.values()], axis=0)
        all_edges = np.sum([np.zeros(read_count), *edges.values()], axis=0)
        sizes = np.stack([graph_counts, all_nodes, all_edges], axis=1)
        return Samples(dataset, "graphs", sizes, join_rows, is_partial)

    sizes = np.stack([graph_counts, *map(np.array, names_by_values)], axis=1)
    names = ("graphs", *names_by_values.values())
    return Samples(dataset, "typed graphs", sizes, join_rows, is_partial, names)


class _Lengths(NamedTuple):
    """How long samples are."""

    values: Ints | None
    """Tokens of each ``[n]``; None where samples have none."""
    partly: bool
    """Whether only the first samples were looked at."""


def _read_lengths(dataset: Any, count: int) -> _Lengths:
    """Find the tokens of each sample: the length of its longest tensor."""
    tokens = _sizes_told(dataset, "tokens")
    if tokens is not None:
        values = np.asarray(tokens, np.int64) if np.any(tokens) else None
        return _Lengths(values, partly=False)
    read_count = min(count, _MOST_SAMPLES_READ)
    lengths = [_longest_length(dataset[row]) for row in range(read_count)]
    return _Lengths(np.array(lengths, np.int64), read_count < count)


def _sizes_told(dataset: Any, name: str) -> Any:
    """Ask a dataset for the sizes of all samples, as a loader does; None if unknown."""
    can_tell = hasattr(dataset, "sizes") and getattr(dataset, "cache", True) is not None
    sizes: Any = dataset.sizes() if can_tell else None
    return sizes.get(name) if hasattr(sizes, "get") else getattr(sizes, name, None)


def _longest_length(sample: object) -> int:
    lengths = [
        len(leaf)
        for leaf in flatten(sample)
        if isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim
    ]
    return max(lengths, default=0)
