"""Take samples apart that are built like one that was taken apart before.

``encode`` asks of each value what it is, what its column is called, how PyG joins it.
The next sample nearly always has the same answers.  So of a tree that ``encode`` has
made twice a *compiled tree* is made: a reader for each part, which checks that the part
is what the tree says, and gives its bytes.  A reader that is not sure says so, and the
sample goes to ``encode``; so a compiled tree gives what ``encode`` gives, or nothing.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash

from loaderkit.cache.columns import ColumnLayout
from loaderkit.datasets.classes import private_names, pyg_attributes
from loaderkit.datasets.column_names import distinct_names, join_path
from loaderkit.datasets.containers import is_storable_named_tuple
from loaderkit.datasets.dtypes import as_array, disk_dtype, is_native, torch_dtype
from loaderkit.datasets.encode import Encoder, FieldRule, encode, paths_in_stores
from loaderkit.datasets.kinds import (
    NEST_KINDS,
    ColumnSpec,
    GraphJoin,
    Kind,
)
from loaderkit.datasets.plain import encode_text, is_plain, to_bytes
from loaderkit.datasets.structure import KEY_COLUMN, Leaf, Nest, is_graph
from loaderkit.nests import attribute_names
from loaderkit.pyg import import_pyg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from _typeshed import DataclassInstance
    from numpy.typing import NDArray
    from torch_geometric.data.data import BaseData
    from torch_geometric.data.storage import BaseStorage

    from loaderkit.datasets.encode import StorePaths
    from loaderkit.datasets.structure import Node

_MOST_COMPILED = 16
"""Trees that are compiled at a time.  Chosen: a sample is held against one after the
other, which costs 1 to 3 us each where their keys differ."""
_JOINED_BYTES = 64 << 10
"""Values of a sample are joined to be hashed by one call up to so many bytes."""
_PACK_INT = struct.Struct("<q").pack
_PACK_FLOAT = struct.Struct("<d").pack
_PACK_COMPLEX = struct.Struct("<dd").pack
_ZERO = bytes(8)
_TEXTS = frozenset({str})
_NOT_AS_NUMPY = (RuntimeError, TypeError)
"""What ``Tensor.numpy`` raises of tensors that are sparse, on a device, conjugated, in
need of gradients, or of numbers that numpy does not have."""


class SampleLayout:
    """What all samples that are built like one tree have in common.

    Args:
        tree: The tree.
        columns: Its columns with dtype and axes, in the order in which their values
            come.
    """

    def __init__(self, tree: Node, columns: Iterable[ColumnLayout]) -> None:
        self.tree = tree
        self.columns = (*columns, ColumnLayout(KEY_COLUMN, "|u1", 1))
        """Those of its values, and the samples' keys."""
        axes = sum(column.ndim for column in self.columns)
        self.pack_shapes = struct.Struct(f"<{axes}q").pack
        self._digest = xxhash.xxh3_128_digest(
            repr(tree).encode("utf-8", "backslashreplace")
        )

    @classmethod
    def of(cls, tree: Node, values: Mapping[ColumnSpec, NDArray[Any]]) -> SampleLayout:
        """Make the layout of a tree and values as ``encode`` gives them."""
        columns = [
            ColumnLayout(column, value.dtype.str, value.ndim)
            for column, value in values.items()
        ]
        return cls(tree, columns)

    def digest(self, shapes: bytes, values: Sequence[bytes]) -> bytes:
        """Hash a sample of this layout.

        Part of an unfinished build, which begins anew where this is changed.

        Args:
            shapes: What ``pack_shapes`` gives.
            values: A value for each column.
        """
        if sum(map(len, values)) < _JOINED_BYTES:
            return xxhash.xxh3_128_digest(b"".join((self._digest, shapes, *values)))
        digest = xxhash.xxh3_128(self._digest + shapes)
        for value in values:
            digest.update(value)
        return digest.digest()


class EncodedSample(NamedTuple):
    """A sample, taken apart and copied."""

    layout: SampleLayout
    shapes: list[int]
    """Shapes of its values end to end, without the key's."""
    values: list[bytes]
    """A value for each column, without the key."""


class SampleEncoder:
    """Takes samples apart, those of a kind quicker than the first of it."""

    def __init__(self) -> None:
        self._layouts: dict[Node, SampleLayout] = {}
        self._compiled: list[_CompiledTree] = []
        """The last used first."""

    def encode(self, sample: object) -> EncodedSample:
        """Take a sample apart; what is given shares no memory with it.

        Raises:
            DatasetError: It holds something that a cache cannot, named by its path.
        """
        for position, compiled in enumerate(self._compiled):
            encoded = compiled.encode(sample)
            if encoded is not None:
                # Samples of a file, or of a class, come together: the next is alike.
                if position:
                    self._compiled.insert(0, self._compiled.pop(position))
                return encoded

        tree, values = encode(sample)
        layout = self._layouts.get(tree)
        if layout is None:
            layout = self._layouts[tree] = SampleLayout.of(tree, values)
        elif not any(compiled.layout is layout for compiled in self._compiled):
            # Not at the first: there may be thousands of trees with a sample each.
            self._compiled.insert(0, _CompiledTree(layout, sample, values))
            del self._compiled[_MOST_COMPILED:]
        arrays = values.values()
        shapes = [length for array in arrays for length in array.shape]
        return EncodedSample(layout, shapes, [array.tobytes() for array in arrays])


class _Graph(NamedTuple):
    """The graph that a field is in, and its store there."""

    graph: BaseData
    store: BaseStorage
    nodes: int
    """How many the store has; 0 where it has none."""


class _Reader(Protocol):
    """Reads one part of samples."""

    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        """Add what is in a part to what was read of the sample.

        Args:
            value: The part.
            into: What was read before it.
            graph: Where it is; None outside of graphs.

        Returns:
            False where the part is not certainly built as it should be; what was read
            of the sample is of no use then.
        """


class _CompiledTree:
    """A tree that further samples are held against.

    Args:
        layout: The tree and its columns.
        sample: A sample that is built so.
        values: Its values.
    """

    def __init__(
        self,
        layout: SampleLayout,
        sample: object,
        values: Mapping[ColumnSpec, NDArray[Any]],
    ) -> None:
        self.layout = layout
        tree = layout.tree
        if is_graph(tree):
            self._reader: _Reader = _GraphReader(tree, sample, values)
        else:
            self._reader = _reader_of("", tree, sample, None)

    def encode(self, sample: object) -> EncodedSample | None:
        """Take a sample apart; None where it may be built otherwise."""
        encoded = EncodedSample(self.layout, [], [])
        return encoded if self._reader.read(sample, encoded, None) else None


class _Rules(NamedTuple):
    """By what the fields of a graph are joined."""

    are_own: bool
    """Its class has rules of its own, not those of PyG."""
    add_nodes: bool
    """They add the graph's number of nodes to indices."""

    @classmethod
    def of(cls, graph_class: type[BaseData]) -> _Rules:
        """Look up those of a class."""
        pyg = import_pyg()
        rules = graph_class.__inc__, graph_class.__cat_dim__
        if rules == (pyg.hetero_data.__inc__, pyg.hetero_data.__cat_dim__):
            return cls(are_own=False, add_nodes=False)
        if rules == (pyg.data.__inc__, pyg.data.__cat_dim__):
            counts_as_pyg = graph_class.num_nodes is pyg.data.num_nodes
            return cls(are_own=False, add_nodes=counts_as_pyg)
        return cls(are_own=True, add_nodes=False)


class _Field(NamedTuple):
    """By what a graph is asked how a part of a field is joined."""

    name: object
    """Of the field, or of a part of it that has a name of its own."""
    has_own_rules: bool
    """The class of the graph has rules of its own."""
    values: Mapping[ColumnSpec, NDArray[Any]]
    """Of a graph that is built so."""
    nodes: int | None
    """How many that has, where that is what PyG adds to indices; else None."""

    @property
    def is_asked(self) -> bool:
        """Whether a graph must be asked about each value.

        PyG's rules look at the name, and at the value where the name tells of indices.
        What they answered for one graph without such a name they answer for all.
        """
        return self.has_own_rules or self._is_index or "batch" in str(self.name)

    @property
    def adds_nodes(self) -> bool:
        """Whether PyG's rules add the number of nodes, which the known graph has."""
        is_asked_for_values = self.has_own_rules or "batch" in str(self.name)
        return self._is_index and bool(self.nodes) and not is_asked_for_values

    @property
    def _is_index(self) -> bool:
        name = str(self.name)
        return "index" in name or name == "face"


def _reader_of(path: str, node: Node, part: object, field: _Field | None) -> _Reader:
    """Make the reader of a part.

    Args:
        path: Where in the sample it is.
        node: How it is built.
        part: A part that is built so.
        field: The field that it is in; None outside of graphs.
    """
    if isinstance(node, Leaf):
        return _leaf_reader(path, node, part, field)
    if node.kind is Kind.NONE:
        return _NoneReader()
    row = NEST_KINDS[node.kind]
    # A dict's reader compares keys by ==, which says enough of texts alone; a mapping
    # of another class is made again to see whether that loses anything.
    is_plain_dict = node.kind is Kind.DICT and node.cls is None
    is_dict_of_texts = is_plain_dict and node.written_keys is None
    is_other_container = row.is_container and node.kind is not Kind.DICT
    can_be_read = is_dict_of_texts or is_other_container
    if not can_be_read or row.flatten is None:
        return _SlowReader(path, node, field)
    names, container = distinct_names(node.keys), row.flatten(part)
    readers = []
    for name, key, child, value in zip(
        names, node.keys, node.children, container.values, strict=True
    ):
        child_field = field
        # PyG asks ``__inc__`` for the key where a field is a dict; the items of a list
        # go by the name of the field.
        if field is not None and not row.is_sequence:
            child_field = field._replace(name=key)
        readers.append(_reader_of(join_path(path, name), child, value, child_field))
    return _NEST_READERS[node.kind](node, type(part), readers)


def _leaf_reader(path: str, leaf: Leaf, part: Any, field: _Field | None) -> _Reader:
    column = leaf.column
    if column.kind is Kind.TENSOR:
        return _tensor_reader(path, leaf, field)
    asks = field is not None and field.is_asked
    if asks and column.row.in_graphs is GraphJoin.TENSOR_OF_NUMBERS:
        return _SlowReader(path, leaf, field)
    increment = leaf.increment
    if increment is not None and not _is_zero(increment, field):
        return _SlowReader(path, leaf, field)
    if column.kind in {Kind.ARRAY, Kind.SCALAR}:
        if np.dtype(column.dtype) != column.row.disk_dtype(column.dtype):
            return _SlowReader(path, leaf, field)  # its bytes are turned around
        reader: _Reader = _ArrayReader(column, type(part))
    elif column.kind in _READERS:
        reader = _READERS[column.kind]()
    else:
        return _SlowReader(path, leaf, field)
    return reader if increment is None else _IncrementedByZero(reader)


def _tensor_reader(path: str, leaf: Leaf, field: _Field | None) -> _Reader:
    increment = leaf.increment
    if not isinstance(increment, ColumnSpec):
        return _SlowReader(path, leaf, field)
    if field is None:
        return _TensorReader(leaf)
    if not field.is_asked and _is_zero(increment, field):
        return _TensorReader(leaf)
    if field.adds_nodes and _is_nodes(increment, field):
        return _IndexReader(leaf)
    return _AskingReader(path, leaf, field)


def _is_nodes(increment: ColumnSpec, field: _Field) -> bool:
    """Tell whether nodes were added to a field of the graph that is known."""
    return increment.ndim == 0 and field.values[increment] == field.nodes


def _is_zero(increment: object, field: _Field | None) -> bool:
    """Tell whether nothing was added to a field of the graph that is known."""
    if not isinstance(increment, ColumnSpec) or field is None:
        return False
    return increment.ndim == 0 and not field.values[increment]


class _SlowReader:
    """Reads a part as ``encode`` does, and compares how it is built."""

    def __init__(self, path: str, node: Node, field: _Field | None) -> None:
        self._path, self._node = path, node
        self._name = None if field is None else field.name

    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        rule = None
        if graph is not None:
            rule = FieldRule(graph.graph, graph.store, self._name)
        encoder = Encoder()
        # Trees hold names of columns, so that equal ones have equal columns, in order.
        if encoder.node(self._path, value, rule) != self._node:
            return False
        for array in encoder.values.values():
            into.shapes.extend(array.shape)
            into.values.append(array.tobytes())
        return True


class _NoneReader:
    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        del into, graph
        return value is None


class _TensorReader:
    """Reads tensors, and what is added to them in a batch: nothing."""

    def __init__(self, leaf: Leaf) -> None:
        column = leaf.column
        self._is_native = is_native(column.dtype)
        """Else numpy has no such dtype, and gets the bits."""
        self._torch_dtype = torch_dtype(column.dtype)
        self._dtype, self._ndim = disk_dtype(column.dtype), column.ndim
        self._rows_first: tuple[int, ...] | None = None
        if column.axis:
            axes = range(column.ndim)
            self._rows_first = (column.axis, *(a for a in axes if a != column.axis))

    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        # This is most of what packing small samples takes: few calls, few lookups.
        if type(value) is not torch.Tensor:
            # A Parameter is such a tensor too, once it is detached.
            if type(value) is not torch.nn.Parameter:
                return False
            value = value.detach()
        try:
            array = value.numpy() if self._is_native else self._bits_of(value)
        except _NOT_AS_NUMPY:
            # Tried first, and detached only then: detach() costs every tensor 0.5 us,
            # and samples' tensors seldom need gradients.
            if not value.requires_grad:
                return False
            return self.read(value.detach(), into, graph)
        if array.dtype != self._dtype or array.ndim != self._ndim:
            return False
        if self._rows_first is not None:
            array = array.transpose(self._rows_first)
        into.shapes.extend(array.shape)
        added = self._increment_of(value, into, graph)
        if added is None:
            return False
        into.values.extend((array.tobytes(), added))
        return True

    def _increment_of(
        self, value: torch.Tensor, into: EncodedSample, graph: _Graph | None
    ) -> bytes | None:
        """Give what is added in a batch; None where it is kept otherwise."""
        del value, into, graph
        return _ZERO

    def _bits_of(self, value: torch.Tensor) -> NDArray[Any]:
        if value.dtype is not self._torch_dtype:
            msg = "another dtype of the same width"
            raise TypeError(msg)
        return as_array(value)


class _IndexReader(_TensorReader):
    """Reads tensors to which the number of nodes is added."""

    def _increment_of(
        self, value: torch.Tensor, into: EncodedSample, graph: _Graph | None
    ) -> bytes:
        del value, into
        assert graph is not None
        return _PACK_INT(graph.nodes)


class _AskingReader(_TensorReader):
    """Reads tensors that a graph is asked about."""

    def __init__(self, path: str, leaf: Leaf, field: _Field) -> None:
        super().__init__(leaf)
        self._path, self._column, self._increment = path, leaf.column, leaf.increment
        self._name = field.name

    def _increment_of(
        self, value: torch.Tensor, into: EncodedSample, graph: _Graph | None
    ) -> bytes | None:
        assert graph is not None
        tensor = value.detach()
        rule = FieldRule(graph.graph, graph.store, self._name)
        join = rule.join_of_tensor(tensor)
        axis, wanted_axis = join.axis, self._column.axis
        if axis is None or wanted_axis is None:
            is_same_axis = axis is wanted_axis
        else:
            is_same_axis = isinstance(axis, int) and axis % self._ndim == wanted_axis
        if not is_same_axis:
            return None
        encoder = Encoder()
        increment = encoder.store_increment(
            self._path, join.increment, tensor, wanted_axis
        )
        if increment != self._increment:
            return None
        [added] = encoder.values.values()
        into.shapes.extend(added.shape)
        return added.tobytes()


class _ArrayReader:
    """Reads arrays and numbers of numpy's."""

    def __init__(self, column: ColumnSpec, cls: type[NDArray[Any]]) -> None:
        self._cls = cls
        self._dtype, self._ndim = np.dtype(column.dtype), column.ndim

    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        del graph
        if type(value) is not self._cls or value.dtype != self._dtype:
            return False
        if value.ndim != self._ndim:
            return False
        into.shapes.extend(value.shape)
        into.values.append(value.tobytes())
        return True


class _IntReader:
    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        del graph
        if type(value) is not int:
            return False
        try:
            into.values.append(_PACK_INT(value))
        except struct.error:  # more than 64 bits
            return False
        return True


class _FloatReader:
    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        del graph
        if type(value) is not float:
            return False
        into.values.append(_PACK_FLOAT(value))
        return True


class _ComplexReader:
    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        del graph
        if type(value) is not complex:
            return False
        into.values.append(_PACK_COMPLEX(value.real, value.imag))
        return True


class _BoolReader:
    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        del graph
        if type(value) is not bool:
            return False
        into.values.append(b"\1" if value else b"\0")
        return True


class _StrReader:
    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        del graph
        if type(value) is not str:
            return False
        content = encode_text(value)
        into.shapes.append(len(content))
        into.values.append(content)
        return True


class _BytesReader:
    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        del graph
        if type(value) is not bytes:
            return False
        into.shapes.append(len(value))
        into.values.append(value)
        return True


class _JsonReader:
    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        del graph
        if (type(value) is not list and type(value) is not tuple) or not is_plain(
            value
        ):
            return False
        try:
            content = to_bytes(value)
        except ValueError:  # ``encode`` says what is wrong with it
            return False
        into.shapes.append(len(content))
        into.values.append(content)
        return True


_READERS: Mapping[Kind, Callable[[], _Reader]] = {
    Kind.INT: _IntReader,
    Kind.FLOAT: _FloatReader,
    Kind.COMPLEX: _ComplexReader,
    Kind.BOOL: _BoolReader,
    Kind.STR: _StrReader,
    Kind.BYTES: _BytesReader,
    Kind.JSON: _JsonReader,
}


class _IncrementedByZero:
    """Reads numbers of graphs to which nothing is added in a batch."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        is_read = self._reader.read(value, into, graph)
        # Not read, ``into`` is thrown away, whatever is in it.
        into.values.append(_ZERO)
        return is_read


class _DictReader:
    def __init__(self, nest: Nest, cls: type, readers: Sequence[_Reader]) -> None:
        del cls
        self._keys, self._readers = list(nest.keys), readers

    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        if type(value) is not dict or list(value) != self._keys:
            return False
        # A key of a class of its own may be equal to a text, and is refused.
        if not _TEXTS.issuperset(map(type, value)):
            return False
        for item, reader in zip(value.values(), self._readers, strict=True):
            if not reader.read(item, into, graph):
                return False
        return True


class _SequenceReader:
    """Reads lists, tuples and namedtuples."""

    def __init__(
        self, nest: Nest, cls: type[Sequence[Any]], readers: Sequence[_Reader]
    ) -> None:
        self._is_named = nest.kind is Kind.NAMED
        self._cls, self._readers = cls, readers

    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        if type(value) is not self._cls or len(value) != len(self._readers):
            return False
        if self._is_named and not is_storable_named_tuple(value):
            return False
        for item, reader in zip(value, self._readers, strict=True):
            if not reader.read(item, into, graph):
                return False
        return True


class _DataclassReader:
    def __init__(
        self, nest: Nest, cls: type[DataclassInstance], readers: Sequence[_Reader]
    ) -> None:
        self._keys, self._cls, self._readers = nest.keys, cls, readers

    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        if type(value) is not self._cls or attribute_names(value) != self._keys:
            return False
        for key, reader in zip(self._keys, self._readers, strict=True):
            if not reader.read(getattr(value, key), into, graph):
                return False
        return True


_NEST_READERS: Mapping[
    Kind, Callable[[Nest, type[Any], Sequence[_Reader]], _Reader]
] = {
    Kind.DICT: _DictReader,
    Kind.LIST: _SequenceReader,
    Kind.TUPLE: _SequenceReader,
    Kind.NAMED: _SequenceReader,
    Kind.DATACLASS: _DataclassReader,
}


class _GraphReader:
    """Reads whole graphs.

    Args:
        tree: How they are built.
        graph: One of them.
        values: Its values.
    """

    def __init__(
        self, tree: Nest, graph: BaseData, values: Mapping[ColumnSpec, NDArray[Any]]
    ) -> None:
        self._cls, self._keys = type(graph), list(tree.keys)
        self._known_attributes = pyg_attributes()
        rules = _Rules.of(self._cls)
        fields = [list(store.keys()) for store in graph.stores]
        all_paths = paths_in_stores(self._keys, fields)
        self._stores = []
        for paths, nest, store in zip(
            all_paths, tree.children, graph.stores, strict=True
        ):
            assert isinstance(nest, Nest)
            self._stores.append(_StoreReader(paths, nest, store, values, rules))

    def read(self, value: Any, into: EncodedSample, graph: _Graph | None) -> bool:
        del graph
        if type(value) is not self._cls or self._has_private(vars(value)):
            return False
        stores = value.stores
        # ``_key`` is PyG's, which has no public name for it that all graphs share: it
        # is None, a type of nodes, or the triple of a type of edges.
        if [store._key for store in stores] != self._keys:
            return False
        for store, reader in zip(stores, self._stores, strict=True):
            if self._has_private(vars(store)) or not reader.read(value, store, into):
                return False
        return True

    def _has_private(self, attributes: dict[str, Any]) -> bool:
        """Tell whether there is what ``encode`` may have to refuse."""
        if attributes.keys() <= self._known_attributes:
            return False
        return bool(private_names(self._cls, attributes))


class _StoreReader:
    """Reads one store of graphs.

    Args:
        paths: What its columns are called.
        nest: How it is built.
        store: A store that is built so.
        values: What is in the graph that it is of.
        rules: By what that is joined.
    """

    def __init__(
        self,
        paths: StorePaths,
        nest: Nest,
        store: BaseStorage,
        values: Mapping[ColumnSpec, NDArray[Any]],
        rules: _Rules,
    ) -> None:
        self._keys, self._counts_nodes = list(nest.keys), nest.nodes is not None
        nodes = None
        if rules.add_nodes and nest.nodes is not None:
            nodes = int(values[nest.nodes])
        self._readers = []
        for path, (key, child), field_value in zip(
            paths.fields, nest.items(), store.values(), strict=True
        ):
            field = _Field(key, rules.are_own, values, nodes)
            self._readers.append(_reader_of(path, child, field_value, field))

    def read(self, graph: BaseData, store: BaseStorage, into: EncodedSample) -> bool:
        """Add what is in the store of a graph to what was read of the graph."""
        fields = store.to_dict()
        # In order, too: the columns' values come in that of the known sample.
        if list(fields) != self._keys:
            return False
        # Whether PyG can count the nodes, the names of the fields decide.
        nodes = int(store.num_nodes or 0) if self._counts_nodes else 0
        where = _Graph(graph, store, nodes)
        for field_value, reader in zip(fields.values(), self._readers, strict=True):
            if not reader.read(field_value, into, where):
                return False
        if self._counts_nodes:
            into.values.append(_PACK_INT(nodes))
        return True
