"""Join graphs that lie in memory: equal to ``Batch.from_data_list`` in every attribute.

PyG asks each graph about each of its fields: along which axis it is joined, what is
added to it, how many nodes there are.  Its own class ``Data`` answers by the field's
name.  So for graphs of that class with fields of the usual kinds this is asked once for
all of a batch; all other graphs are joined by PyG.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from loaderkit.pyg import import_pyg
from loaderkit.unlike_keys import FIELDS_OF_BATCHES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from loaderkit.array_types import Ints

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_OF_BATCHES = ("ptr", "_num_nodes")
"""Fields that a graph has which was a batch; PyG leaves them out, or goes by them."""
_USUAL_TYPES = {torch.Tensor, str, int, float, bool}
"""Of values; tensors of other classes, dicts and lists have rules of their own."""


def join_graphs(graphs: Sequence[Any], exclude_keys: Collection[str] = ()) -> Any:
    """Join graphs, where they are of the usual kind.

    Args:
        graphs: At least one.
        exclude_keys: Fields left out, as in PyG.

    Returns:
        The batch, whose tensors are new; None where PyG must join the graphs, which may
        be of any kind, or must say why they cannot be joined.
    """
    pyg = import_pyg()
    if set(map(type, graphs)) != {pyg.data}:
        return None
    batch = pyg.batch(_base_cls=pyg.data).stores_as(graphs[0])
    try:
        _Joining(graphs).fill(batch, exclude_keys)
    except _UNJOINED:
        return None
    return batch


class _JoinedByPygError(Exception):
    """PyG has rules of its own for a field."""


_UNJOINED = (_JoinedByPygError, RuntimeError, TypeError, ValueError, LookupError)
"""And what torch raises of values that cannot be joined: PyG says then which."""


class _JoinedField(NamedTuple):
    value: Any
    slices: torch.Tensor
    """Where each graph begins in it ``[B + 1]``."""
    increments: torch.Tensor | None
    """What was added to each graph ``[B]``; None where nothing can be."""


class _Joining:
    """Some graphs of class ``Data`` that are being joined.

    What is small is summed up and repeated by numpy: torch takes 57 us to make a tensor
    of 128 of Python's integers, and 240 us to repeat 128 numbers.
    """

    def __init__(self, graphs: Sequence[Any]) -> None:
        self.graphs = graphs
        self.stores = [graph.stores[0] for graph in graphs]
        self.fields: list[dict[str, Any]] = [store.to_dict() for store in self.stores]
        self._numbers = np.arange(len(graphs) + 1)
        # On torch's default device, if there is another than the CPU.
        self._zeros = torch.zeros(len(graphs), dtype=torch.int64)
        self._node_counts: Ints | None = None

    def fill(self, batch: Any, exclude_keys: Collection[str]) -> None:
        """Fill an empty batch of one store.

        Raises:
            Exception: One of ``_UNJOINED``.
        """
        names = [name for name in self.fields[0] if name not in exclude_keys]
        keys = self.fields[0].keys()
        for fields in self.fields:
            if fields.keys() != keys:
                unlike = fields.keys() ^ keys
                if not unlike <= FIELDS_OF_BATCHES.union(exclude_keys):
                    raise _JoinedByPygError
        if not self._zeros.is_cpu or not all(map(self._is_usual, names)):
            raise _JoinedByPygError

        [store] = batch.stores
        slices: dict[str, torch.Tensor] = {}
        increments: dict[str, torch.Tensor | None] = {}
        for name in names:
            if name == "num_nodes":
                store._num_nodes = [fields[name] for fields in self.fields]
                store.num_nodes = sum(store._num_nodes)
            else:
                field = self._join_field(name)
                store[name] = field.value
                slices[name] = field.slices
                increments[name] = field.increments
        if self.stores[0].can_infer_num_nodes:
            counts = self._count_nodes()
            store.batch = torch.from_numpy(self._numbers[:-1].repeat(counts))
            store.ptr = torch.from_numpy(_cumsum_from_zero(counts))
        batch._num_graphs = len(self.graphs)
        batch._slice_dict = slices
        batch._inc_dict = increments

    def _is_usual(self, name: str) -> bool:
        """Tell whether a field of the first graph is one that is joined here."""
        # What is called a batch is increased by what PyG finds in the values.
        has_usual_name = "batch" not in name and name not in _OF_BATCHES
        return has_usual_name and type(self.fields[0][name]) in _USUAL_TYPES

    def _join_field(self, name: str) -> _JoinedField:
        values = [fields[name] for fields in self.fields]
        types = set(map(type, values))
        if len(types) > 1:
            raise _JoinedByPygError
        if types == {torch.Tensor}:
            return self._join_tensors(name, values)
        if types == {str}:
            return _JoinedField(values, torch.from_numpy(self._numbers), None)
        return self._join_numbers(name, values)

    def _join_tensors(self, name: str, values: list[torch.Tensor]) -> _JoinedField:
        first = values[0]
        if first.layout is not torch.strided or first.is_nested or not first.is_cpu:
            raise _JoinedByPygError
        if first.dim() == 0:
            value = torch.stack(values)
            slices = self._numbers
        else:
            axis = self.graphs[0].__cat_dim__(name, first, self.stores[0])
            value = torch.cat(values, axis)
            slices = _cumsum_from_zero([tensor.size(axis) for tensor in values])
        steps = self._node_steps(name)
        if steps is None:
            return _JoinedField(value, torch.from_numpy(slices), self._zeros)
        if steps[-1]:
            has_one_dtype = all(tensor.dtype is first.dtype for tensor in values)
            if not has_one_dtype or first.dtype not in _INTEGERS:
                raise _JoinedByPygError
            # Fields to which something is added are joined along their last axis.
            value.add_(torch.from_numpy(steps.repeat(np.diff(slices))))
        return _JoinedField(value, torch.from_numpy(slices), torch.from_numpy(steps))

    def _join_numbers(self, name: str, values: list[Any]) -> _JoinedField:
        value, slices = torch.tensor(values), torch.from_numpy(self._numbers)
        steps = self._node_steps(name)
        if steps is None:
            return _JoinedField(value, slices, self._zeros)
        if steps[-1]:
            value.add_(torch.from_numpy(steps))
        return _JoinedField(value, slices, torch.from_numpy(steps))

    def _node_steps(self, name: str) -> Ints | None:
        """Sum up what is added to each graph's values ``[B]``; None for nothing.

        That is the number of nodes where the name of the field tells of indices.
        """
        if "index" in name or name == "face":
            return _cumsum_from_zero(self._count_nodes()[:-1])
        return None

    def _count_nodes(self) -> Ints:
        """Count the nodes of each graph ``[B]``, once for all that need it."""
        if self._node_counts is None:
            if all(map(_begins_with_x, self.fields)):
                counts = [fields["x"].size(0) for fields in self.fields]
            else:
                counts = [store.num_nodes for store in self.stores]
            if set(map(type, counts)) != {int}:
                raise _JoinedByPygError
            self._node_counts = np.array(counts, np.int64)
        return self._node_counts


def _begins_with_x(fields: dict[str, Any]) -> bool:
    """Tell whether PyG counts the rows of ``x``, and nothing else, as nodes.

    It goes through the fields in their order, a third of the time that joining took,
    and counts the first of some, of which this is one, unless there is a "num_nodes".
    """
    is_first = next(iter(fields)) == "x" and type(fields["x"]) is torch.Tensor
    return is_first and "num_nodes" not in fields


def _cumsum_from_zero(numbers: Ints | list[int]) -> Ints:
    """Sum up numbers ``[n]``: before the first, and after each ``[n + 1]``."""
    cumsum = np.zeros(len(numbers) + 1, np.int64)
    np.cumsum(numbers, out=cumsum[1:])
    return cumsum
