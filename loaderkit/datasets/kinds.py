"""The kinds of values that a sample is made of: one table, a row for each kind.

Everything that is done to a value follows from the row of its kind: how it is written
into a column and read again, how values of it are joined in a batch, and what is shown
of it.  So a new kind is a member of ``Kind``, whose text is what a cache says on disk,
and a row of ``LEAF_KINDS`` or of ``NEST_KINDS``.

    leaf      one value, in a column of its own: a tensor, a number, a text
    nest      a container: its parts are leaves and nests; no column of its own
    counter   a number that loaderkit keeps beside the values, such as a node count
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from loaderkit.cache.layout import DTYPES
from loaderkit.datasets import composites
from loaderkit.datasets.containers import (
    UnstorableValueError,
    is_dataclass_value,
    is_mapping_class,
    is_storable_named_tuple,
    make_dataclass,
    make_named_tuple,
    stored_class_name,
    stored_mapping_name,
)
from loaderkit.datasets.dtypes import (
    as_array,
    as_tensor,
    disk_dtype,
    dtype_name,
    torch_dtype,
)
from loaderkit.datasets.plain import (
    CONTRADICTIONS,
    damaged,
    decode_text,
    encode_text,
    from_bytes,
    from_json,
    is_plain,
    is_storable_key,
    to_bytes,
    to_json,
)
from loaderkit.errors import DatasetError
from loaderkit.nests import attribute_names
from loaderkit.pyg import import_pyg

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from _typeshed import DataclassInstance
    from numpy.typing import NDArray
    from torch_geometric.data.data import BaseData
    from torch_geometric.data.storage import BaseStorage

MOST_AXES = 31
"""HDF5 has 32, and one of them may be the samples'."""
_DTYPE_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Kind(str, Enum):
    """What a value is.  The texts are those in caches on disk, and never change."""

    # A StrEnum, which Python 3.10 has not.
    __str__ = str.__str__
    # Kinds are in the keys of every sample's values: Enum's own hash is a call of
    # Python code, and took a fifth of the time of taking a dict apart.
    __hash__ = str.__hash__

    TENSOR = "tensor"
    ARRAY = "array"
    SCALAR = "scalar"
    """A number of numpy's, such as ``np.float32(1)``."""
    INT = "int"
    FLOAT = "float"
    COMPLEX = "complex"
    BOOL = "bool"
    STR = "str"
    BYTES = "bytes"
    BIGINT = "bigint"
    """An integer beyond 64 bits."""
    JSON = "json"
    """A list or tuple of plain Python values."""

    NONE = "none"
    DICT = "dict"
    LIST = "list"
    TUPLE = "tuple"
    NAMED = "named"
    """A namedtuple."""
    DATACLASS = "dataclass"
    GRAPH = "graph"
    STORE = "store"
    """The fields of a node type, an edge type or a whole graph."""
    EDGE_INDEX = "edge_index"
    INDEX = "index"
    SPARSE_TENSOR = "sparse_tensor"
    SPARSE_COO = "sparse_coo"
    SPARSE_CSR = "sparse_csr"
    SPARSE_CSC = "sparse_csc"
    SPARSE_BSR = "sparse_bsr"
    SPARSE_BSC = "sparse_bsc"

    NODES = "nodes"
    """How many nodes a store has."""
    INCREMENT = "inc"
    """What PyG adds to the indices behind a sample."""
    VARIANT = "variant"
    """Which of the structure's variants a sample is."""


class ColumnSpec(NamedTuple):
    """What a column holds of a sample.

    A tuple, since one is made, hashed and compared for each value that is packed.
    """

    path: str
    """Where in the sample the values are: keys, with dots between."""
    kind: Kind
    dtype: str
    """torch's name of it for tensors, such as "float32"; numpy's for arrays and
    numbers, such as "<f4"; "" where there is none."""
    ndim: int
    axis: int | None
    """Axis along which samples are joined in a batch; None when they are stacked.  The
    column keeps this axis first."""
    name: str
    """The column's name: its path, and a number where several have that path."""

    @property
    def row(self) -> LeafKind:
        """What is done to values of the column; not for counters."""
        return LEAF_KINDS[self.kind]


class GraphJoin(Enum):
    """How the values of a graph's field are joined, as PyG does it."""

    CONCATENATE = auto()
    """Along the axis that ``__cat_dim__`` says, with increments added."""
    TENSOR_OF_NUMBERS = auto()
    """One number a sample, with increments added."""
    LIST = auto()
    BY_PYG = auto()
    """PyG's own collate is given the values."""


class DictJoin(Enum):
    """How the values of a dict's field are joined, as torch's default_collate does."""

    TENSOR = auto()
    """Stacked, or ragged where the samples' first axes differ."""
    TEXTS = auto()
    BY_TORCH = auto()
    """torch's own default_collate is given the values."""


class Length(Enum):
    """What the length of a value is."""

    NONE = auto()
    FIRST_AXIS = auto()
    ITEMS = auto()
    """The items of a list, counted in its bytes."""


@dataclass(frozen=True)
class LeafKind:
    """What is done to the values of one kind of leaf."""

    kind: Kind
    types: tuple[type, ...]
    """Classes whose objects, and not those of a subclass, are such values."""
    dtype_of: Callable[[Any], str]
    """Says a value's dtype, as a column's spec has it."""
    encode: Callable[[Any], NDArray[Any]]
    """Writes a value as an array; UnstorableValueError if it cannot be written.  The
    array may share the value's memory."""
    decode: Callable[[ColumnSpec, NDArray[Any]], Any]
    """Makes the value of an array of its own, which may become the value's memory."""
    fits: Callable[[ColumnSpec], bool]
    """Tells whether a column can be as a manifest, which may be anyone's, says."""
    disk_dtype: Callable[[str], np.dtype[Any]]
    """Says how a dtype is kept, before integers are narrowed.  ValueError or KeyError
    for a dtype of tensors that this torch does not have."""
    in_graphs: GraphJoin
    in_dicts: DictJoin
    holds: Callable[[Any], bool] | None = None
    """Tells whether a value of one of the types is of this kind; None: each is."""
    from_bytes: Callable[[str, bytes], Any] | None = None
    """For columns of bytes, ``[length]`` a sample: makes a value of the column's name
    (for the error) and its bytes.  None for other columns."""
    torch_dtype: Callable[[str], torch.dtype] | None = None
    """Says which dtype a batch has; None where it is no tensor."""
    length: Length = Length.NONE
    stays_in_a_tuple: bool = False
    """torch's default_collate joins the items of lists by ``zip``, and leaves texts in
    the tuple that they come in."""
    joined_by_pyg: frozenset[str] = frozenset()
    """dtypes that PyG's own collate is given whatever ``in_graphs`` says."""

    def graph_join(self, dtype: str) -> GraphJoin:
        """Say how values of a dtype are joined in a batch of graphs."""
        return GraphJoin.BY_PYG if dtype in self.joined_by_pyg else self.in_graphs

    @property
    def is_text(self) -> bool:
        """Whether the column holds bytes, ``[length]`` a sample."""
        return self.from_bytes is not None


class Classes(Protocol):
    """Where the classes of containers are looked up; see ``ClassRegistry``."""

    def __getitem__(self, name: str) -> Any:
        """Give a class by name."""
        ...

    def mapping(self, name: str, pairs: Mapping[Any, Any]) -> Any:
        """Make a mapping of a class, by name, that holds these pairs."""
        ...

    def blank(self, name: str) -> Any:
        """Make an empty graph of a class, by name."""
        ...


class Container(NamedTuple):
    """A container, taken apart or about to be made."""

    keys: tuple[Any, ...]
    """Keys, names of fields, or positions."""
    values: Sequence[Any]
    cls: str | None = None
    """Its class's name, where the kind alone does not say it."""


class ClassUse(Enum):
    """Whether containers of a kind have a class that is looked up by name."""

    NEVER = auto()
    MAYBE = auto()
    ALWAYS = auto()


@dataclass(frozen=True)
class NestKind:
    """What is done to one kind of container."""

    kind: Kind
    make: Callable[[Container, Classes], Any]
    """Makes the container of its parts' values."""
    holds: Callable[[Any], bool] = lambda _: False
    """Tells whether a value is such a container."""
    flatten: Callable[[Any], Container] | None = None
    """Takes a container apart; None where ``encode`` knows how.  UnstorableValueError
    if it cannot be made again."""
    make_batch: Callable[[Container, Classes], Any] | None = None
    """Makes a batch's container of batches of its parts; None where ``make`` does."""
    class_use: ClassUse = ClassUse.NEVER
    class_fits: Callable[[Any, str, tuple[Any, ...]], bool] = lambda *_: False
    """Tells whether a class, of a name, can be such a container, with such keys."""
    part_names: frozenset[str] | None = None
    """The parts, where all such containers have the same."""
    is_container: bool = False
    """One of Python's containers: each part is joined with its like."""
    is_sequence: bool = False
    """Its parts have an order: a list is joined item by item."""
    has_named_parts: bool = False
    """Its parts are asked for by name."""
    names_are_text: bool = False
    """Names of its parts are Python's: fields of a class."""
    is_composite: bool = False
    """A tensor made of tensors; ``flatten`` and ``unflatten_composite`` are inverse."""
    unflatten: Callable[..., Any] | None = None
    """Makes a composite of its parts; ``checked=True`` sees that they fit."""


@dataclass(frozen=True)
class CounterKind:
    """What is known of one kind of number that loaderkit keeps beside the values."""

    kind: Kind
    is_bounded: bool = False
    """The shards say how large the numbers are: they decide what is read, or how much
    memory a batch takes."""


def _plain_tensor(value: torch.Tensor) -> bool:
    return value.layout is torch.strided


def _decode_tensor(spec: ColumnSpec, array: NDArray[Any]) -> torch.Tensor:
    tensor = as_tensor(array, spec.dtype)
    if not spec.axis:
        return tensor
    # A clone keeps no more than its own bytes, laid out as torch would.
    return tensor.movedim(0, spec.axis).contiguous()


def _tensor_fits(spec: ColumnSpec) -> bool:
    return _DTYPE_NAME.fullmatch(spec.dtype) is not None


def _encode_array(value: NDArray[Any] | np.generic) -> NDArray[Any]:
    check_axes(value.ndim)
    is_number = value.dtype.kind in "biufc" and value.dtype.itemsize <= 16
    little_endian = value.dtype.newbyteorder("<")
    if not is_number or little_endian.str not in DTYPES:
        raise UnstorableValueError(f"its dtype is {value.dtype}")
    stored = np.ascontiguousarray(value, little_endian)
    # ascontiguousarray makes [] into [1].
    reshaped: NDArray[Any] = stored.reshape(value.shape)
    return reshaped


def check_axes(axes: int) -> None:
    """See that HDF5 can hold a tensor or array of so many axes.

    Raises:
        UnstorableValueError: It cannot.
    """
    if axes > MOST_AXES:
        why = f"it has {axes} axes, and a cache holds {MOST_AXES}"
        raise UnstorableValueError(why, "store it flat, and its shape as a tuple")


def _decode_array(spec: ColumnSpec, array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.dtype(spec.dtype), copy=False)


def _decode_scalar(spec: ColumnSpec, array: NDArray[Any]) -> Any:
    return _decode_array(spec, array)[()]


def _array_fits(spec: ColumnSpec) -> bool:
    return spec.dtype.replace(">", "<") in DTYPES


def _scalar_fits(spec: ColumnSpec) -> bool:
    return _array_fits(spec) and spec.ndim == 0


def _little_endian(dtype: str) -> np.dtype[Any]:
    little_endian: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
    return little_endian


def _torch_dtype_of_array(dtype: str) -> torch.dtype:
    return torch.from_numpy(np.empty(0, np.dtype(dtype).newbyteorder("="))).dtype


def _number_kind(
    kind: Kind,
    python_type: type,
    dtype: str,
    *,
    holds: Callable[[Any], bool] | None = None,
    in_graphs: GraphJoin = GraphJoin.TENSOR_OF_NUMBERS,
    in_dicts: DictJoin = DictJoin.TENSOR,
) -> LeafKind:
    """Make the row of single numbers of Python's, which numpy has a dtype for."""

    def decode(_: ColumnSpec, array: NDArray[Any]) -> Any:
        # An int, and not numpy's: the sample is to have what it had.
        return python_type(array[()])

    return LeafKind(
        kind=kind,
        types=(python_type,),
        dtype_of=lambda _: dtype,
        encode=lambda value: np.array(value, dtype),
        decode=decode,
        fits=lambda spec: spec.dtype == dtype and spec.ndim == 0,
        disk_dtype=lambda _: np.dtype(dtype),
        in_graphs=in_graphs,
        in_dicts=in_dicts,
        holds=holds,
        torch_dtype=_torch_dtype_of_array,
    )


def _text_kind(
    kind: Kind,
    types: tuple[type, ...],
    to_raw: Callable[[Any], bytes],
    from_raw: Callable[[str, bytes], Any],
    *,
    holds: Callable[[Any], bool] | None = None,
    in_graphs: GraphJoin = GraphJoin.LIST,
    in_dicts: DictJoin = DictJoin.BY_TORCH,
    length: Length = Length.NONE,
    stays_in_a_tuple: bool = False,
) -> LeafKind:
    """Make the row of values that are kept as bytes ``[length]``."""

    def encode(value: object) -> NDArray[Any]:
        return np.frombuffer(to_raw(value), np.uint8)

    def decode(spec: ColumnSpec, array: NDArray[Any]) -> Any:
        return from_raw(spec.name, array.tobytes())

    def fits(spec: ColumnSpec) -> bool:
        return spec.dtype == "" and spec.ndim == 1 and spec.axis == 0

    return LeafKind(
        kind=kind,
        types=types,
        dtype_of=lambda _: "",
        encode=encode,
        decode=decode,
        fits=fits,
        disk_dtype=lambda _: np.dtype("|u1"),
        in_graphs=in_graphs,
        in_dicts=in_dicts,
        holds=holds,
        from_bytes=from_raw,
        length=length,
        stays_in_a_tuple=stays_in_a_tuple,
    )


def _fits_int64(value: int) -> bool:
    return -(1 << 63) <= value < 1 << 63


def _plain_to_bytes(value: int | list[Any] | tuple[Any, ...]) -> bytes:
    """Write a list of plain values, or an integer of more than 64 bits."""
    try:
        if isinstance(value, int):
            return encode_text(to_json(value))
        return to_bytes(value)
    except ValueError as error:  # an integer of more digits than Python writes
        raise UnstorableValueError(str(error), "store a text: hex(x)") from None


def _read_bigint(column: str, raw: bytes) -> Any:
    return from_json(column, decode_text(column, raw))


def _same_bytes(column: str, raw: bytes) -> bytes:
    del column
    return raw


_LEAF_ROWS = (
    LeafKind(
        kind=Kind.TENSOR,
        types=(torch.Tensor, torch.nn.Parameter),
        dtype_of=lambda tensor: dtype_name(tensor.dtype),
        encode=as_array,
        decode=_decode_tensor,
        fits=_tensor_fits,
        disk_dtype=disk_dtype,
        in_graphs=GraphJoin.CONCATENATE,
        in_dicts=DictJoin.TENSOR,
        holds=_plain_tensor,
        torch_dtype=torch_dtype,
        length=Length.FIRST_AXIS,
    ),
    LeafKind(
        kind=Kind.ARRAY,
        types=(np.ndarray, np.memmap),  # of a memmap only where it lies is lost
        dtype_of=lambda array: str(array.dtype.str),
        encode=_encode_array,
        decode=_decode_array,
        fits=_array_fits,
        disk_dtype=_little_endian,
        in_graphs=GraphJoin.LIST,
        in_dicts=DictJoin.TENSOR,
        torch_dtype=_torch_dtype_of_array,
        length=Length.FIRST_AXIS,
    ),
    LeafKind(
        kind=Kind.SCALAR,
        types=tuple(np.dtype(dtype).type for dtype in sorted(DTYPES)),
        dtype_of=lambda number: str(number.dtype.str),
        encode=_encode_array,
        decode=_decode_scalar,
        fits=_scalar_fits,
        disk_dtype=_little_endian,
        in_graphs=GraphJoin.LIST,
        in_dicts=DictJoin.TENSOR,
        torch_dtype=_torch_dtype_of_array,
        # np.float64 is a float of Python's, which PyG makes a tensor of.
        joined_by_pyg=frozenset({"<f8"}),
    ),
    _number_kind(Kind.INT, int, "<i8", holds=_fits_int64),
    _number_kind(Kind.FLOAT, float, "<f8"),
    _number_kind(Kind.BOOL, bool, "|b1"),
    _number_kind(
        Kind.COMPLEX,
        complex,
        "<c16",
        in_graphs=GraphJoin.LIST,
        in_dicts=DictJoin.BY_TORCH,
    ),
    _text_kind(
        Kind.STR,
        (str,),
        encode_text,
        decode_text,
        in_dicts=DictJoin.TEXTS,
        stays_in_a_tuple=True,
    ),
    _text_kind(Kind.BYTES, (bytes,), bytes, _same_bytes, stays_in_a_tuple=True),
    # Behind INT: what that row does not hold.
    _text_kind(
        Kind.BIGINT, (int,), _plain_to_bytes, _read_bigint, in_graphs=GraphJoin.BY_PYG
    ),
    _text_kind(
        Kind.JSON,
        (list, tuple),
        _plain_to_bytes,
        from_bytes,
        holds=is_plain,
        length=Length.ITEMS,
    ),
)


def _make_none(container: Container, classes: Classes) -> None:
    del container, classes


def _make_dict(container: Container, classes: Classes) -> Any:
    pairs = dict(zip(container.keys, container.values, strict=True))
    return pairs if container.cls is None else classes.mapping(container.cls, pairs)


def _flatten_mapping(value: Mapping[Any, Any]) -> Container:
    keys = tuple(value)
    if not all(is_storable_key(key) for key in keys):
        why = "its keys are no strings or finite numbers"
        raise UnstorableValueError(why, "make its keys texts: str(key)")
    cls = stored_mapping_name(value)
    return Container(keys, list(value.values()), cls)


def _flatten_sequence(value: Sequence[Any]) -> Container:
    return Container(tuple(range(len(value))), value)


def _make_list(container: Container, classes: Classes) -> list[Any]:
    del classes
    return list(container.values)


def _make_tuple(container: Container, classes: Classes) -> tuple[Any, ...]:
    del classes
    return tuple(container.values)


def _flatten_named_tuple(value: NamedTuple) -> Container:
    return Container(value._fields, value, stored_class_name(value))


def _make_named_tuple(container: Container, classes: Classes) -> Any:
    return make_named_tuple(classes[str(container.cls)], container.values)


def _named_tuple_fits(cls: type, name: str, keys: tuple[Any, ...]) -> bool:
    del name
    return issubclass(cls, tuple) and getattr(cls, "_fields", None) == keys


def _flatten_dataclass(value: DataclassInstance) -> Container:
    names = attribute_names(value)
    values = [getattr(value, name) for name in names]
    return Container(names, values, stored_class_name(value))


def _make_dataclass(container: Container, classes: Classes) -> Any:
    attributes = dict(zip(container.keys, container.values, strict=True))
    return make_dataclass(classes[str(container.cls)], attributes)


def _dataclass_fits(cls: type, name: str, keys: tuple[Any, ...]) -> bool:
    del name, keys
    return dataclasses.is_dataclass(cls)


def _make_graph(container: Container, classes: Classes) -> Any:
    graph = classes.blank(str(container.cls))
    for key, fields in zip(container.keys, container.values, strict=True):
        store = store_of(graph, key)
        for name, value in fields.items():
            store[name] = value
    return graph


def _graph_fits(cls: type, name: str, keys: tuple[Any, ...]) -> bool:
    del name, keys
    return issubclass(cls, import_pyg().base_data)


def store_of(graph: BaseData, key: str | tuple[str, ...] | None) -> BaseStorage:
    """Give one of a graph's stores, new where the graph has none of that key.

    Not ``graph[key]``: a field of the whole graph may be called as a node type is, and
    would be given instead.

    Args:
        graph: A graph.
        key: A node type, an edge type, or None for what belongs to all of it.
    """
    if isinstance(key, tuple):
        return graph.get_edge_store(*key)
    if key is not None:
        return graph.get_node_store(key)
    # Private names of PyG: a field may hide any public way to this store.
    return graph._store if hasattr(graph, "_store") else graph._global_store


def _composite_kind(
    kind: Kind,
    part_names: frozenset[str],
    holds: Callable[[Any], bool],
    parts_of: Callable[[Any], dict[str, Any]],
    unflatten: Callable[..., Any],
) -> NestKind:
    """Make the row of tensors that are made of tensors."""

    def flatten(value: object) -> Container:
        parts = parts_of(value)
        return Container(tuple(parts), list(parts.values()))

    def make(container: Container, classes: Classes) -> Any:
        del classes
        parts = dict(zip(container.keys, container.values, strict=True))
        try:
            return unflatten(parts, checked=True)
        except ImportError as error:
            message = f"The sample holds a {kind}, which cannot be made here."
            fix = "install what it names, or pack the samples without it"
            raise DatasetError(message, why=str(error), fix=fix) from None
        except CONTRADICTIONS as error:
            raise damaged(f"its parts make no {kind}: {error}") from None

    return NestKind(
        kind=kind,
        make=make,
        holds=holds,
        flatten=flatten,
        part_names=part_names,
        is_composite=True,
        unflatten=unflatten,
    )


def _compressed_kind(kind: Kind, layout: torch.layout) -> NestKind:
    return _composite_kind(
        kind,
        composites.COMPRESSED_PARTS,
        composites.has_layout(layout),
        composites.compressed_parts,
        functools.partial(composites.make_compressed, layout=layout),
    )


_NEST_ROWS = (
    # In the order in which a value is held against them.
    NestKind(kind=Kind.NONE, make=_make_none, holds=lambda value: value is None),
    NestKind(
        kind=Kind.DICT,
        make=_make_dict,
        holds=lambda value: isinstance(value, Mapping),
        flatten=_flatten_mapping,
        class_use=ClassUse.MAYBE,
        class_fits=lambda cls, name, _: is_mapping_class(cls, name),
        is_container=True,
        has_named_parts=True,
    ),
    NestKind(
        kind=Kind.NAMED,
        make=_make_named_tuple,
        holds=is_storable_named_tuple,
        flatten=_flatten_named_tuple,
        class_use=ClassUse.ALWAYS,
        class_fits=_named_tuple_fits,
        is_container=True,
        is_sequence=True,
        has_named_parts=True,
        names_are_text=True,
    ),
    NestKind(
        kind=Kind.LIST,
        make=_make_list,
        holds=lambda value: type(value) is list,
        flatten=_flatten_sequence,
        is_container=True,
        is_sequence=True,
    ),
    NestKind(
        kind=Kind.TUPLE,
        make=_make_tuple,
        holds=lambda value: type(value) is tuple,
        flatten=_flatten_sequence,
        make_batch=_make_list,  # as default_collate does
        is_container=True,
        is_sequence=True,
    ),
    NestKind(
        kind=Kind.DATACLASS,
        make=_make_dataclass,
        holds=is_dataclass_value,
        flatten=_flatten_dataclass,
        class_use=ClassUse.ALWAYS,
        class_fits=_dataclass_fits,
        is_container=True,
        has_named_parts=True,
        names_are_text=True,
    ),
    # Taken apart by ``encode``, since PyG is asked how each field is joined.
    NestKind(
        kind=Kind.GRAPH,
        make=_make_graph,
        class_use=ClassUse.ALWAYS,
        class_fits=_graph_fits,
    ),
    NestKind(kind=Kind.STORE, make=_make_dict),
    _composite_kind(
        Kind.EDGE_INDEX,
        composites.EDGE_INDEX_PARTS,
        composites.is_edge_index,
        composites.edge_index_parts,
        composites.make_edge_index,
    ),
    _composite_kind(
        Kind.INDEX,
        composites.INDEX_PARTS,
        composites.is_index,
        composites.index_parts,
        composites.make_index,
    ),
    _composite_kind(
        Kind.SPARSE_TENSOR,
        composites.SPARSE_TENSOR_PARTS,
        composites.is_sparse_tensor,
        composites.sparse_tensor_parts,
        composites.make_sparse_tensor,
    ),
    _composite_kind(
        Kind.SPARSE_COO,
        composites.COO_PARTS,
        composites.has_layout(torch.sparse_coo),
        composites.coo_parts,
        composites.make_coo,
    ),
    _compressed_kind(Kind.SPARSE_CSR, torch.sparse_csr),
    _compressed_kind(Kind.SPARSE_CSC, torch.sparse_csc),
    _compressed_kind(Kind.SPARSE_BSR, torch.sparse_bsr),
    _compressed_kind(Kind.SPARSE_BSC, torch.sparse_bsc),
)

LEAF_KINDS: Mapping[Kind, LeafKind] = {row.kind: row for row in _LEAF_ROWS}
NEST_KINDS: Mapping[Kind, NestKind] = {row.kind: row for row in _NEST_ROWS}
COUNTER_KINDS: Mapping[Kind, CounterKind] = {
    row.kind: row
    for row in (
        CounterKind(Kind.NODES, is_bounded=True),
        CounterKind(Kind.INCREMENT),
        CounterKind(Kind.VARIANT, is_bounded=True),
    )
}

LEAF_KINDS_OF_TYPE: dict[type, tuple[LeafKind, ...]] = {}
"""Rows by the class of a value, in the order in which they are asked to hold it."""
for _row in _LEAF_ROWS:
    for _type in _row.types:
        LEAF_KINDS_OF_TYPE[_type] = (*LEAF_KINDS_OF_TYPE.get(_type, ()), _row)

PYTHON_SCALARS = (str, int, float, complex, bytes)
"""Classes of values that are leaves; one of a subclass would come back as one of these,
so it is refused."""


def find_leaf_kind(value: object) -> LeafKind | None:
    """Find the row of a value that is kept in one column; None for a container."""
    for row in LEAF_KINDS_OF_TYPE.get(type(value), ()):
        if row.holds is None or row.holds(value):
            return row
    return None


def find_nest_kind(value: object) -> NestKind | None:
    """Find the row of a container; None for what a cache cannot hold."""
    for row in _NEST_ROWS:
        if row.holds(value):
            return row
    return None


class Composite(NamedTuple):
    """A tensor made of tensors, taken apart."""

    kind: Kind
    parts: dict[str, Any]


def flatten_composite(value: object) -> Composite | None:
    """Take a tensor that is made of tensors apart.

    Args:
        value: Any object.

    Returns:
        Its kind, and its parts by name; None for other objects.
    """
    for row in _NEST_ROWS:
        if row.is_composite and row.flatten is not None and row.holds(value):
            container = row.flatten(value)
            parts = dict(zip(container.keys, container.values, strict=True))
            return Composite(row.kind, parts)
    return None


def unflatten_composite(
    kind: Kind, parts: Mapping[str, Any], *, checked: bool = False
) -> Any:
    """Make the composite tensor that ``flatten_composite`` took apart.

    Args:
        kind: Of a composite tensor.
        parts: Its parts by name; tensors are used, not copied.
        checked: See that indices lie inside the sizes, some 30 us: torch's kernels
            read where an index says, outside of the memory too.

    Returns:
        The composite tensor.

    Raises:
        RuntimeError: The parts contradict each other.
        ValueError: The same.
        TypeError: A part is of another type.
    """
    unflatten = NEST_KINDS[kind].unflatten
    assert unflatten is not None, kind
    return unflatten(parts, checked=checked)
