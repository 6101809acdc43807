"""Take a sample apart: a tree that says how it is built, and one array per leaf.

Refuses what a cache cannot hold by naming it; nothing is ever pickled.  How values of
each kind are recognised and written stands in ``kinds.py``.
"""

from __future__ import annotations

import enum
import functools
import types
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from loaderkit.datasets.classes import private_names
from loaderkit.datasets.column_names import distinct_names, join_path
from loaderkit.datasets.containers import UnstorableValueError, stored_class_name
from loaderkit.datasets.kinds import (
    LEAF_KINDS,
    MOST_AXES,
    PYTHON_SCALARS,
    ColumnSpec,
    GraphJoin,
    Kind,
    check_axes,
    find_leaf_kind,
    find_nest_kind,
)
from loaderkit.datasets.plain import MOST_DEPTH
from loaderkit.datasets.structure import (
    INCREMENT_BY_PYG,
    Leaf,
    Nest,
    written_keys_of,
)
from loaderkit.errors import DatasetError
from loaderkit.fixes import Fix
from loaderkit.pyg import import_pyg, is_pyg_data
from loaderkit.stand_ins import FORMATTED, stand_in_for
from loaderkit.value_words import kind_of, with_small_article

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch_geometric.data.data import BaseData
    from torch_geometric.data.storage import BaseStorage

    from loaderkit.datasets.kinds import LeafKind, NestKind
    from loaderkit.datasets.structure import Node

    Increment: TypeAlias = ColumnSpec | Literal["?"] | None

_NONE = Nest(Kind.NONE)
_TENSOR = LEAF_KINDS[Kind.TENSOR]
_ARRAYS = (np.ndarray, np.generic)


class Encoding(NamedTuple):
    """A sample, taken apart."""

    tree: Node
    """How it is built; columns are called by their paths."""
    values: dict[ColumnSpec, NDArray[Any]]
    """Its values by column: C-contiguous, the axis along which samples are joined
    first.  They may share the sample's memory."""


def encode(sample: object) -> Encoding:
    """Take a sample apart.

    Args:
        sample: PyG data, or any nest of dicts, lists, tuples and dataclasses of
            tensors, arrays, numbers, strings and None.

    Returns:
        How it is built, and its values.

    Raises:
        DatasetError: It is None, or holds something that a cache cannot, named by its
            path.
    """
    if sample is None:
        message = "The sample is None."
        raise none_for_a_sample(message)
    encoder = Encoder()
    tree = encoder.graph(sample) if is_pyg_data(sample) else encoder.node("", sample)
    return Encoding(tree, encoder.values)


def none_for_a_sample(message: str) -> DatasetError:
    """Make the error for None in the place of a sample.

    Args:
        message: What gave it.
    """
    why = "a function without return gives None, and no batch can be made of it"
    fix = "return the sample; leave out the keys of those that are not there; or "
    fix += 'return {"value": None} where None is what is known'
    return DatasetError(message, why=why, fix=fix)


class _Join(NamedTuple):
    """How PyG joins values of one name in a batch."""

    axis: Any
    """What ``__cat_dim__`` says: None for values that are stacked."""
    increment: Any
    """What ``__inc__`` says is added to the samples behind this one."""


class FieldRule:
    """Asks a graph how the values of one of its fields are joined.

    Args:
        graph: The graph.
        store: The store that the field is in.
        name: What PyG is asked about: the field's name, or the key of a dict in it.
    """

    __slots__ = ("graph", "name", "store")

    def __init__(self, graph: BaseData, store: BaseStorage, name: object) -> None:
        self.graph, self.store, self.name = graph, store, name

    def of_part(self, key: object) -> FieldRule:
        """Give the rule for a part of the field that has a name of its own."""
        return FieldRule(self.graph, self.store, key)

    def join_of_tensor(self, value: torch.Tensor) -> _Join:
        """Say how a tensor is joined."""
        name = str(self.name)
        axis = self.graph.__cat_dim__(name, value, self.store)
        if axis is None or value.dim() == 0:
            # PyG asks about the tensor as it is when it lies in a batch.
            return _Join(None, self._increment_of(name, value.unsqueeze(0)))
        return _Join(axis, self._increment_of(name, value))

    def increment_of_number(self, value: object) -> Any:
        """Say what a number is incremented by."""
        return self._increment_of(self.name, value)

    def _increment_of(self, name: object, value: object) -> Any:
        """Ask the graph; where its own ``__inc__`` fails, leave it to PyG."""
        try:
            return self.graph.__inc__(name, value, self.store)
        except Exception:  # noqa: BLE001 -- the user's; PyG will raise it in a batch
            return INCREMENT_BY_PYG


class StorePaths(NamedTuple):
    """What the columns of a graph's store are called."""

    prefix: str
    fields: Sequence[str]
    """Of each field, in the order of the store."""


def paths_in_stores(
    keys: Sequence[Any], fields: Iterable[Sequence[str]]
) -> list[StorePaths]:
    """Name the columns of a graph.

    Args:
        keys: Of its stores.
        fields: Names of the fields of each.

    >>> paths_in_stores([None, "atom"], [["y"], ["x"]])
    [StorePaths(prefix='', fields=['y']), StorePaths(prefix='atom.', fields=['atom.x'])]
    """
    names_by_store = list(zip(keys, fields, strict=True))
    # The fields of the graph itself and the names of its stores share one level.
    level: list[Any] = []
    for key, names in names_by_store:
        level += names if key is None else [key]
    columns = iter(distinct_names(level))
    paths = []
    for key, names in names_by_store:
        if key is None:
            paths.append(StorePaths("", [next(columns) for _ in names]))
        else:
            prefix = next(columns) + "."
            fields_of_type = [prefix + name for name in distinct_names(names)]
            paths.append(StorePaths(prefix, fields_of_type))
    return paths


class Encoder:
    """Takes one sample, or a part of one, apart."""

    def __init__(self) -> None:
        self.values: dict[ColumnSpec, NDArray[Any]] = {}
        """Values by column, as ``Encoding`` has them."""
        self._depth = 0

    def graph(self, graph: object) -> Nest:
        """Take PyG data apart.

        Raises:
            DatasetError: It is a batch, or holds something that a cache cannot.
        """
        if isinstance(graph, import_pyg().batch) or not hasattr(graph, "stores"):
            message = f"The sample is {kind_of(graph)}, which is not one graph."
            fix = "pack batch.to_data_list(), or Data and HeteroData objects"
            raise DatasetError(message, why="a cache holds samples", fix=fix)
        stores = graph.stores
        _check_private("", graph, vars(graph))
        # PyG's own name for them; there is no public one that all graphs share.
        keys = tuple(store._key for store in stores)
        fields = [tuple(store.keys()) for store in stores]
        children = []
        for store, paths in zip(stores, paths_in_stores(keys, fields), strict=True):
            children.append(self._encode_store(graph, store, paths))
        path = ""  # of the sample itself
        try:
            cls = stored_class_name(graph)
        except UnstorableValueError as error:
            raise _cannot_store_error(path, graph, error.why, error.fix) from None
        return Nest(Kind.GRAPH, cls, keys, tuple(children))

    def _encode_store(
        self, graph: BaseData, store: BaseStorage, paths: StorePaths
    ) -> Nest:
        _check_private(paths.prefix, graph, vars(store))
        keys, children = [], []
        for path, (key, value) in zip(paths.fields, store.items(), strict=True):
            keys.append(key)
            rule = FieldRule(graph, store, key)
            children.append(self.node(path, value, rule))
        nodes = None
        if isinstance(store, import_pyg().node_storage) and store.can_infer_num_nodes:
            path = paths.prefix + "@nodes"
            nodes = ColumnSpec(path, Kind.NODES, "int64", 0, None, path)
            self.values[nodes] = np.array(int(store.num_nodes or 0), "<i8")
        return Nest(Kind.STORE, None, tuple(keys), tuple(children), nodes)

    def node(self, path: str, value: object, rule: FieldRule | None = None) -> Node:
        """Take a part of a sample apart.

        Args:
            path: Where in the sample it is.
            value: The part.
            rule: How PyG joins it; None outside of graphs.
        """
        if value is None:
            return _NONE
        if isinstance(value, torch.Tensor):
            _check_tensor(path, value)
            if type(value) in _TENSOR.types and value.layout is torch.strided:
                # Most fields are such tensors: they need not be looked up below.
                return self._encode_tensor(path, value, rule)
        row = find_leaf_kind(value)
        # A sample that is a list of plain values has a column for each, and no path.
        if row is not None and (path or type(value) not in {list, tuple}):
            return self._encode_leaf(path, row, value, rule)
        _refuse_subclass(path, value)
        if self._depth >= MOST_DEPTH:
            why = f"it is {MOST_DEPTH} containers deep, or contains itself"
            raise _cannot_store_error(
                path[:40], value, why, "flatten it: a list of its values"
            )
        # Not put back after an error, which ends the whole sample.
        self._depth += 1
        nest = self._encode_nest(path, value, rule)
        self._depth -= 1
        return nest

    def _encode_leaf(
        self, path: str, row: LeafKind, value: object, rule: FieldRule | None
    ) -> Leaf:
        try:
            array = row.encode(value)
        except UnstorableValueError as error:
            raise _cannot_store_error(path, value, error.why, error.fix) from None
        axis = 0 if array.ndim else None
        column = ColumnSpec(path, row.kind, row.dtype_of(value), array.ndim, axis, path)
        self.values[column] = array
        increment: Increment = None
        if rule is not None and row.in_graphs is GraphJoin.TENSOR_OF_NUMBERS:
            asked = rule.increment_of_number(value)
            if asked is not None:
                increment = self.store_increment(path, asked, None, None)
        return Leaf(column, increment)

    def _encode_tensor(
        self, path: str, value: torch.Tensor, rule: FieldRule | None
    ) -> Leaf:
        value = value.detach()
        join = _Join(0 if value.dim() else None, 0)
        if rule is not None:
            join = rule.join_of_tensor(value)
        # An axis of the user's making, such as a pair of them (PyG's adj_t): the values
        # are kept by their first axis, and PyG joins them.
        if join.axis is not None and not isinstance(join.axis, int):
            join = _Join(0, INCREMENT_BY_PYG)
        axis = None if join.axis is None else join.axis % value.dim()
        # Rows of a column lie end to end, so the axis that is joined comes first; an
        # edge_index [2, n] is kept as [n, 2].
        rows_first = value.movedim(axis, 0) if axis else value
        column = ColumnSpec(
            path, _TENSOR.kind, _TENSOR.dtype_of(value), value.dim(), axis, path
        )
        self.values[column] = _TENSOR.encode(rows_first)
        increment = self.store_increment(path, join.increment, value, axis)
        return Leaf(column, increment)

    def store_increment(
        self, path: str, asked: object, value: torch.Tensor | None, axis: int | None
    ) -> Increment:
        """Keep what a value is incremented by, where it is a number or a pair.

        Args:
            path: Of the value.
            asked: What ``__inc__`` gave, which may be anything.
            value: The tensor; None for a number.
            axis: Along which it is joined.
        """
        if isinstance(asked, torch.Tensor):
            # [2, 1] is PyG's pair (sources, targets) for an edge_index of two types.
            is_pair = asked.shape == (2, 1) and axis == 1
            is_pair = is_pair and value is not None and value.dim() == 2
            if asked.dtype != torch.int64 or not (asked.dim() == 0 or is_pair):
                return INCREMENT_BY_PYG
            asked = asked.numpy().reshape(-1) if asked.dim() else int(asked)
        if not isinstance(asked, int | np.ndarray):
            return INCREMENT_BY_PYG
        # A bool passes as the number that PyG adds it as; more than 64 bits do not fit.
        if isinstance(asked, int) and not -(1 << 63) <= asked < 1 << 63:
            return INCREMENT_BY_PYG
        array = np.asarray(asked, "<i8")
        path += "@inc"
        column = ColumnSpec(path, Kind.INCREMENT, "int64", array.ndim, None, path)
        self.values[column] = array
        return column

    def _encode_nest(self, path: str, value: object, rule: FieldRule | None) -> Nest:
        row = find_nest_kind(value)
        if row is None or row.flatten is None:
            why = (
                "it is neither tensor, array, number, string, None nor a nest of these"
            )
            raise _cannot_store_error(path, value, why)
        try:
            keys, child_values, cls = row.flatten(value)
        except UnstorableValueError as error:
            raise _cannot_store_error(path, value, error.why, error.fix) from None
        if row.is_composite:
            by_key = dict(zip(keys, child_values, strict=True))
            _check_composite(path, value, row, by_key)
        children = []
        names = distinct_names(keys)
        for name, key, child_value in zip(names, keys, child_values, strict=True):
            child_rule = _rule_of(row, key, rule)
            children.append(self.node(join_path(path, name), child_value, child_rule))
        written_keys = written_keys_of(row.kind, keys)
        return Nest(row.kind, cls, keys, tuple(children), None, written_keys)


def _rule_of(row: NestKind, key: object, rule: FieldRule | None) -> FieldRule | None:
    """Say how PyG joins a part of a container."""
    if rule is None or row.is_composite:
        return None
    # PyG asks about a dict's parts by their keys, and about a list's by its own name.
    return rule if row.is_sequence or key is None else rule.of_part(key)


def _check_tensor(path: str, value: torch.Tensor) -> None:
    if value.device.type != "cpu":
        why = f"it is on {value.device}; a cache holds what is in host memory"
        raise _cannot_store_error(
            path, value, why, 'torch.load(..., map_location="cpu")'
        )
    if value.is_nested:
        fix = "store its parts: .values() and .offsets()"
        raise _cannot_store_error(path, value, "it is nested", fix)
    if value.is_quantized:
        fix = "store x.dequantize(), or x.int_repr() where its scale is stored too"
        raise _cannot_store_error(path, value, "it is quantized", fix)
    if value.dim() > MOST_AXES:
        # Raised and caught, for the words that arrays are refused with.
        try:
            check_axes(value.dim())
        except UnstorableValueError as error:
            raise _cannot_store_error(path, value, error.why, error.fix) from None


def _check_composite(
    path: str, value: object, row: NestKind, parts: Mapping[str, Any]
) -> None:
    """Refuse a sparse tensor that points outside of itself."""
    assert row.unflatten is not None
    try:
        row.unflatten(parts, checked=True)
    except (RuntimeError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise _cannot_store_error(
            path, value, why, "correct its indices, or leave it out"
        ) from None


def _refuse_subclass(path: str, value: object) -> None:
    """Refuse arrays, numbers, texts, lists that are more than their class would be."""
    if not isinstance(value, (*_ARRAYS, *PYTHON_SCALARS, list, tuple)):
        return
    if isinstance(value, _ARRAYS):
        raise _refused_array(path, value)
    for scalar_type in PYTHON_SCALARS:
        if isinstance(value, scalar_type):
            raise _refused_subclass(path, value, scalar_type)
    if isinstance(value, list | tuple) and find_nest_kind(value) is None:
        base = list if isinstance(value, list) else tuple
        raise _refused_subclass(path, value, base)


def _refused_array(path: str, value: NDArray[Any] | np.generic) -> DatasetError:
    """Say what an array, or a number of numpy's, is beyond its values."""
    if isinstance(value, np.ma.MaskedArray):
        why = "a cache holds arrays, and its mask would be lost"
        fix = "store x.filled(0) and np.ma.getmaskarray(x)"
        return _cannot_store_error(path, value, why, fix)
    if isinstance(value, np.ndarray):
        return _refused_subclass(path, value, np.ndarray, "np.asarray")
    if value.dtype.kind in "biufc":
        plain = np.dtype(value.dtype.str).type
        if type(value) is not plain:
            return _refused_subclass(path, value, plain, f"np.{plain.__name__}")
    is_text = value.dtype.kind in "US"
    as_list = Fix.of("store x.tolist()", FORMATTED) if is_text else ""
    return _cannot_store_error(path, value, f"its dtype is {value.dtype}", as_list)


def _refused_subclass(
    path: str, value: object, base: type, call: str = ""
) -> DatasetError:
    plain = with_small_article(base.__name__)
    why = f"{plain} would come back, and not {kind_of(value)}"
    fix = f"store {call or base.__name__}(x)"
    if isinstance(value, enum.Enum):
        fix = "store x.value"
    return _cannot_store_error(path, value, why, fix)


def _check_private(path: str, graph: object, attributes: dict[str, Any]) -> None:
    """Refuse what PyG keeps beside the fields of a graph, where names begin with _."""
    lost = private_names(type(graph), attributes)
    if lost:
        why = "PyG keeps names that begin with _ out of a graph's fields"
        fix = (
            f"store it as {lost[0].strip('_')!r}, or leave it out: "
            "type(data).from_dict(data.to_dict())"
        )
        raise _cannot_store_error(f"{path}{lost[0]}", attributes[lost[0]], why, fix)


def _cannot_store_error(
    path: str, value: object, why: str, fix: str | Fix = ""
) -> DatasetError:
    message = f"A cache cannot hold {path or 'the sample'!r}, {kind_of(value)}."
    return DatasetError(message, why=why, fix=fix or _advice_on(value))


_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    type,
)


def _advice_on(value: object) -> str | Fix:
    """Say what to store in the place of something that a cache cannot hold."""
    if is_pyg_data(value):
        return (
            "one graph a sample: what belongs to it as its attributes (graph.label), a "
            "series of graphs as samples with a number each (graph.run, graph.step)"
        )
    code = stand_in_for(value)
    if code:
        return Fix.of("store ", code)
    if isinstance(value, _FUNCTIONS):
        return "leave it out, and call it in load() or transform"
    return "return it as tensors, or leave it out"
