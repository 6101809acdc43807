"""How columns make up a sample: a tree of nests and leaves, and its JSON.  Pure.

Most datasets have one tree for all samples.  Where samples differ (a key is missing,
None here and a tensor there, another dtype) each way of being built is a *variant*,
and the column ``@variant`` says which one a sample is; so nothing is ever coerced.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from loaderkit.cache.layout import DTYPES
from loaderkit.errors import DamagedCacheError, DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

VARIANT = "@variant"
KEY = "@key"
MOST_VARIANTS = 4096

LOOSE = "?"
"""In place of an increment's column: PyG must work it out sample by sample."""

NUMBER_KINDS = {"int": "<i8", "float": "<f8", "complex": "<c16", "bool": "|b1"}
"""Kinds of single Python numbers, and the dtype of their columns."""
TEXT_KINDS = {"str", "bytes", "json", "bigint"}
"""Kinds whose column holds bytes of text ``[L]``."""
COUNTER_KINDS = {"nodes", "inc", "variant"}
"""Kinds of columns that loaderkit counts with; int64."""
_LEAF_KINDS = {"tensor", "array", "scalar", *NUMBER_KINDS, *TEXT_KINDS}
_CONTAINERS = {"none", "dict", "list", "tuple", "named", "dataclass", "graph", "store"}
COMPOSITE_PARTS: Mapping[str, frozenset[str]] = {
    "edge_index": frozenset({"data", "sparse_size", "sort_order", "is_undirected"}),
    "index": frozenset({"data", "dim_size", "is_sorted"}),
    "sparse_tensor": frozenset({"row", "col", "value", "sizes"}),
    "sparse_coo": frozenset({"indices", "values", "size", "coalesced"}),
    **{
        f"sparse_{layout}": frozenset({"compressed", "plain", "values", "size"})
        for layout in ("csr", "csc", "bsr", "bsc")
    },
}
"""Kinds of tensors made of tensors, and what each is made of."""
_MOST_NDIM = 32
_DTYPE_NAME = re.compile(r"[a-z][a-z0-9_]*")


class LiteralKey(NamedTuple):
    """A dict's key as it is written in Python, in a tree."""

    text: str


def tree_keys(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make the keys of a dict such that two of different types are never equal.

    Trees are compared, and Python has ``1 == True == 1.0`` and ``0.0 == -0.0``.

    >>> tree_keys(("x", 1, True))
    ('x', 1, LiteralKey(text='True'))
    """
    for key in keys:
        if type(key) is not str:
            break
    else:
        return keys
    plain = {str, int, type(None)}
    return tuple(key if type(key) in plain else LiteralKey(repr(key)) for key in keys)


@dataclass(frozen=True)
class Leaf:
    """One value of a sample, kept in a column of its own."""

    column: str
    kind: str
    """tensor, array, scalar (numpy's), int, bigint, float, complex, bool, str,
    bytes, json."""
    dtype: str
    """torch's or numpy's name of it, such as "float32"; "" where there is none."""
    ndim: int
    axis: int | None = 0
    """Axis along which samples are joined in a batch; None when they are stacked.
    The column keeps this axis first."""
    inc: str | None = None
    """Column of what PyG adds per sample in a batch; None for nothing, or LOOSE."""


@dataclass(frozen=True)
class Nest:
    """A container and what is in it."""

    kind: str
    """none, dict, list, tuple, named, dataclass, graph, store, or the name of a
    composite tensor (sparse_coo, edge_index ...)."""
    cls: str | None = None
    """``module:qualname`` of a class to make it from, where a builtin will not do."""
    keys: tuple[Any, ...] = ()
    """Keys, field names or store keys of the children; empty for lists."""
    children: tuple[Leaf | Nest, ...] = ()
    nodes: str | None = None
    """Column of a store's number of nodes, where PyG can tell it."""

    def items(self) -> zip[tuple[Any, Any]]:
        """Pair the keys with the children."""
        return zip(self.keys, self.children, strict=True)

    def nests(self) -> Iterator[Nest]:
        """Go through this container and all that are in it."""
        yield self
        for child in self.children:
            if isinstance(child, Nest):
                yield from child.nests()


@dataclass
class Structure:
    """The variants of a cache's samples, in the order they were met."""

    variants: list[Leaf | Nest] = field(default_factory=list)
    columns: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """What each column is for, by name: path, kind, dtype, ndim, axis."""
    _names: dict[Hashable, str] = field(default_factory=dict)
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    def name(self, raw: tuple[Any, ...]) -> str:
        """Name a column: its path, and a number where several have that path.

        Args:
            raw: The path, then whatever tells the column from others of that path.

        Returns:
            The same name for the same ``raw``.
        """
        name = self._names.get(raw)
        if name is None:
            name, number = raw[0], 2
            while name in self.columns:
                name, number = f"{raw[0]}~{number}", number + 1
            self._names[raw] = name
            self.columns[name] = raw
        return name

    def number(self, tree: tuple[Any, ...], key: str) -> int:
        """Number the variant that a sample is built like.

        Args:
            tree: The tree as ``encode`` returns it.
            key: The sample's key, for the message.

        Returns:
            Its number, from 0.

        Raises:
            DatasetError: There are too many variants to be anything but a mistake.
        """
        number = self._numbers.get(tree)
        if number is None:
            number = self._numbers[tree] = len(self.variants)
            if number >= MOST_VARIANTS:
                what = (
                    f"Sample {key!r} is the {number + 1:,}th that is built differently."
                )
                why = "probably a dict has ids for keys, so that no two samples agree"
                fix = "make such a dict a list of keys and a list (or tensor) of values"
                raise DatasetError(what, why=why, fix=fix)
            self.variants.append(self._tree(tree))
        return number

    def to_json(self) -> dict[str, Any]:
        """Write it so that ``from_json`` reads the same."""
        return {
            "variants": [_to_json(variant) for variant in self.variants],
            "columns": {name: list(raw) for name, raw in self.columns.items()},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Structure:
        """Read what ``to_json`` wrote.

        Args:
            content: Parsed JSON.

        Returns:
            A structure that goes on naming and numbering where the other stopped.

        Raises:
            DamagedCacheError: It is not what ``to_json`` writes.
        """
        try:
            columns = {
                _text(name): _column(raw) for name, raw in content["columns"].items()
            }
            variants = [
                _from_json(each, columns) for each in _list(content["variants"])
            ]
            if not 0 < len(variants) <= MOST_VARIANTS:
                _refuse(f"it has {len(variants):,} variants")
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            IndexError,
            SyntaxError,
            MemoryError,  # what ast.literal_eval says of a nest too deep for it
            RecursionError,
        ) as error:
            what = f"The manifest's structure makes no sense: {error!r:.200}."
            fix = "pack(source, path, overwrite=True)"
            raise DamagedCacheError(what, why="it was changed", fix=fix) from None
        made = cls(variants, columns, {raw: name for name, raw in columns.items()})
        made._numbers = {made._raw(each): n for n, each in enumerate(variants)}
        return made

    def class_names(self) -> set[str]:
        """Name the classes that samples are made of, ``module:qualname``."""
        return {nest.cls for nest in self._nests() if nest.cls is not None}

    def without_classes(self, known: Callable[[Nest], bool]) -> Structure:
        """Put plain containers in the place of classes that are not known.

        Args:
            known: Tells whether a container's class is there.

        Returns:
            The same variants, where an unknown graph is PyG's ``Data`` or
            ``HeteroData`` and any other unknown class is a dict.
        """
        variants = [_without_classes(variant, known) for variant in self.variants]
        return Structure(variants, self.columns)

    def _nests(self) -> Iterator[Nest]:
        for variant in self.variants:
            if isinstance(variant, Nest):
                yield from variant.nests()

    def _tree(self, tree: tuple[Any, ...]) -> Leaf | Nest:
        if tree[0] == "leaf":
            _, raw, inc = tree
            named = inc if inc is None or inc == LOOSE else self.name(inc)
            kind, dtype, ndim, axis = raw[1:]
            return Leaf(self.name(raw), kind, dtype, ndim, axis, named)
        kind, cls, keys, children, nodes = tree
        inside = tuple(self._tree(child) for child in children)
        keys = tuple(
            ast.literal_eval(key.text) if isinstance(key, LiteralKey) else key
            for key in keys
        )
        return Nest(
            kind, cls, keys, inside, None if nodes is None else self.name(nodes)
        )

    def _raw(self, node: Leaf | Nest) -> tuple[Any, ...]:
        if isinstance(node, Leaf):
            inc = node.inc if node.inc in {None, LOOSE} else self.columns[str(node.inc)]
            return "leaf", self.columns[node.column], inc
        inside = tuple(self._raw(child) for child in node.children)
        nodes = None if node.nodes is None else self.columns[node.nodes]
        keys = tree_keys(node.keys) if node.kind == "dict" else node.keys
        return node.kind, node.cls, keys, inside, nodes


def _to_json(node: Leaf | Nest) -> list[Any]:
    if isinstance(node, Leaf):
        return [
            "leaf", node.column, node.kind, node.dtype, node.ndim, node.axis, node.inc
        ]  # fmt: skip
    keys = [repr(key) for key in node.keys]
    inside = [_to_json(child) for child in node.children]
    return ["nest", node.kind, node.cls, keys, inside, node.nodes]


def _from_json(content: Any, columns: Mapping[str, tuple[Any, ...]]) -> Leaf | Nest:
    """Read a node, trusting nothing: every name is looked up, every number bounded."""
    if _list(content)[0] == "leaf":
        _, column, kind, dtype, ndim, axis, inc = content
        leaf = Leaf(_text(column), _text(kind), _text(dtype), ndim, axis, inc)
        if kind not in _LEAF_KINDS or columns[column][1:] != (kind, dtype, ndim, axis):
            _refuse(f"column {column!r} is described in two ways")
        if inc is not None and inc != LOOSE and columns[_text(inc)][1] != "inc":
            _refuse(f"{inc!r} is no column of increments")
        return leaf
    _, kind, cls, keys, inside, nodes = content
    nest = Nest(
        _text(kind),
        None if cls is None else _text(cls),
        tuple(ast.literal_eval(_text(key)) for key in _list(keys)),
        tuple(_from_json(each, columns) for each in _list(inside)),
        None if nodes is None else _text(nodes),
    )
    _check_nest(nest, columns)
    return nest


def is_graph(node: Leaf | Nest) -> TypeGuard[Nest]:
    """Tell whether a sample is a graph, rather than a nest that may hold some."""
    return isinstance(node, Nest) and node.kind == "graph"


def _check_nest(nest: Nest, columns: Mapping[str, tuple[Any, ...]]) -> None:
    if nest.kind not in _CONTAINERS and nest.kind not in COMPOSITE_PARTS:
        _refuse(f"{nest.kind!r} is no kind of container")
    if len(nest.keys) != len(nest.children) or len(set(nest.keys)) < len(nest.keys):
        _refuse(f"a {nest.kind} has {len(nest.children)} parts, keys {nest.keys}")
    if nest.kind in COMPOSITE_PARTS and set(nest.keys) != COMPOSITE_PARTS[nest.kind]:
        _refuse(f"a {nest.kind} has parts {nest.keys}")
    if (nest.kind in {"named", "dataclass", "graph"}) != (
        nest.cls is not None and nest.kind != "dict"
    ):
        _refuse(f"a {nest.kind} has the class {nest.cls!r}")
    if nest.cls is not None and ":" not in nest.cls:
        _refuse(f"{nest.cls!r} is no class")
    if nest.nodes is not None and (
        nest.kind != "store" or columns[nest.nodes][1] != "nodes"
    ):
        _refuse(f"{nest.nodes!r} is no column of node counts")
    if nest.kind in {"named", "dataclass"} and not all(
        isinstance(key, str) for key in nest.keys
    ):
        _refuse(f"the fields of a {nest.kind} are {nest.keys}")
    for child in nest.children:
        is_store = isinstance(child, Nest) and child.kind == "store"
        if is_store != (nest.kind == "graph"):
            _refuse("a store is outside of a graph, or a graph has another part")
    if nest.kind == "graph" and not all(_is_store_key(key) for key in nest.keys):
        _refuse(f"a graph has the stores {nest.keys}")


def _is_store_key(key: object) -> bool:
    """Tell whether a graph may have a store of that key: None, a type, or a triple."""
    if isinstance(key, tuple):
        return len(key) == 3 and all(isinstance(part, str) for part in key)
    return key is None or isinstance(key, str)


def _column(raw: Any) -> tuple[Any, ...]:
    """Read what a column is for: path, kind, dtype, ndim, axis."""
    path, kind, dtype, ndim, axis = _list(raw)
    if _text(kind) not in _LEAF_KINDS | COUNTER_KINDS:
        _refuse(f"{kind!r} is no kind of value")
    if type(ndim) is not int or not 0 <= ndim <= _MOST_NDIM:
        _refuse(f"a column has {ndim!r} axes")
    if axis is not None and (
        type(axis) is not int or not 0 <= axis <= max(ndim - 1, 0)
    ):
        _refuse(f"a column of {ndim} axes is joined along axis {axis!r}")
    fits = {
        "tensor": _DTYPE_NAME.fullmatch(_text(dtype)) is not None,
        "array": _text(dtype).replace(">", "<") in DTYPES,
        "scalar": _text(dtype).replace(">", "<") in DTYPES and ndim == 0,
        **{number: dtype == own for number, own in NUMBER_KINDS.items()},
        **dict.fromkeys(TEXT_KINDS, dtype == "" and ndim == 1 and axis == 0),
        **dict.fromkeys(COUNTER_KINDS, dtype == "int64" and ndim <= 1),
    }
    if not fits[kind] or (kind in NUMBER_KINDS and ndim):
        _refuse(f"a column of kind {kind!r} has the dtype {dtype!r} and {ndim} axes")
    return (_text(path), kind, dtype, ndim, axis)


def _without_classes(node: Leaf | Nest, known: Callable[[Nest], bool]) -> Leaf | Nest:
    if isinstance(node, Leaf):
        return node
    inside = tuple(_without_classes(child, known) for child in node.children)
    node = replace(node, children=inside)
    if node.cls is None or known(node):
        return node
    if node.kind == "graph":
        name = "data:Data" if node.keys == (None,) else "hetero_data:HeteroData"
        return replace(node, cls=f"torch_geometric.data.{name}")
    return replace(node, kind="dict", cls=None)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        _refuse(f"{value!r:.40} stands where a list should")
    return list(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        _refuse(f"{value!r:.40} stands where a text should")
    return str(value)


def _refuse(why: str) -> None:
    raise ValueError(why)
