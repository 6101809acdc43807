"""How columns make up a sample: a tree of nests and leaves, and its JSON.  Pure.

Most datasets have one tree for all samples.  Where samples differ (a key is missing,
None here and a tensor there, another dtype) each way of being built is a *variant*,
and the column ``@variant`` says which one a sample is; so nothing is ever coerced.

``encode`` makes a tree in which a column is called by its path.  ``Structure`` gives
columns of one path that differ in kind, dtype or axes names of their own.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NamedTuple,
    NoReturn,
    TypeAlias,
    TypeGuard,
)

from loaderkit.datasets.kinds import (
    COUNTER_KINDS,
    LEAF_KINDS,
    NEST_KINDS,
    ClassUse,
    ColumnSpec,
    Kind,
)
from loaderkit.errors import DamagedCacheError, DatasetError
from loaderkit.fixes import PACK_AGAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


VARIANT = "@variant"
KEY = "@key"
VARIANT_COLUMN = ColumnSpec(VARIANT, Kind.VARIANT, "int64", 0, None, VARIANT)
KEY_COLUMN = ColumnSpec(KEY, Kind.STR, "", 1, 0, KEY)
MOST_VARIANTS = 4096
"""Ways in which the samples of a cache may be built.  Chosen: keys that are missing or
not in twelve places make as many; ids as keys soon make more."""

INCREMENT_BY_PYG: Final = "?"
"""In place of an increment's column: PyG must work it out sample by sample."""
_MOST_NDIM = 32
"""HDF5's limit of axes."""

StoreKey: TypeAlias = "str | tuple[str, ...] | None"
"""A node type, an edge type, or None for what belongs to the graph as a whole."""


class Leaf(NamedTuple):
    """One value of a sample, kept in a column of its own.

    A tuple, as ``Nest`` is: the tree of each sample that is packed is hashed.
    """

    column: ColumnSpec
    increment: ColumnSpec | Literal["?"] | None = None
    """Column of what PyG adds per sample in a batch; None for nothing, or
    INCREMENT_BY_PYG."""


class Nest(NamedTuple):
    """A container and what is in it."""

    kind: Kind
    cls: str | None = None
    """``module:qualname`` of a class to make it from, where a builtin will not do."""
    keys: tuple[Any, ...] = ()
    """Keys, field names or store keys of the children; empty for lists."""
    children: tuple[Leaf | Nest, ...] = ()
    nodes: ColumnSpec | None = None
    """Column of a store's number of nodes, where PyG can tell it."""
    written_keys: tuple[str, ...] | None = None
    """The keys of a dict as Python writes them, where ``==`` does not tell them apart;
    see ``written_keys_of``."""

    def items(self) -> zip[tuple[Any, Node]]:
        """Pair the keys with the children."""
        return zip(self.keys, self.children, strict=True)

    def nests(self) -> Iterator[Nest]:
        """Go through this container and all that are in it."""
        yield self
        for child in self.children:
            if isinstance(child, Nest):
                yield from child.nests()

    def leaves(self) -> Iterator[Leaf]:
        """Go through the leaves, at any depth."""
        for child in self.children:
            yield from leaves_of(child)


Node: TypeAlias = "Leaf | Nest"


def leaves_of(node: Node) -> Iterator[Leaf]:
    """Go through the leaves of a tree: itself, where it is one."""
    if isinstance(node, Leaf):
        yield node
    else:
        yield from node.leaves()


def is_graph(node: Node) -> TypeGuard[Nest]:
    """Tell whether a sample is a graph, rather than a nest that may hold some."""
    return isinstance(node, Nest) and node.kind is Kind.GRAPH


def fields_of_variant(
    variant: Leaf | Nest, key: StoreKey = None
) -> Mapping[str, Leaf | Nest]:
    """Give the parts of a sample, or of one type in it, that have names.

    Args:
        variant: What the sample is made of.
        key: A type of nodes or edges; None for fields of whole samples.
    """
    if isinstance(variant, Leaf):
        return {}
    if is_graph(variant):
        store = dict(variant.items()).get(key)
        if not isinstance(store, Nest):
            return {}
        return {str(name): node for name, node in store.items()}
    if key is not None:
        return {}
    if not NEST_KINDS[variant.kind].has_named_parts:
        return {}
    return {name: node for name, node in variant.items() if isinstance(name, str)}


def written_keys_of(kind: Kind, keys: tuple[Any, ...]) -> tuple[str, ...] | None:
    """Write the keys of a dict such that two of different types are never equal.

    Trees are compared, and Python has ``1 == True == 1.0`` and ``0.0 == -0.0``.

    Returns:
        What makes trees of such dicts differ; None where the keys themselves do.

    >>> written_keys_of(Kind.DICT, ("x", 1, True)), written_keys_of(Kind.DICT, ("x",))
    (("'x'", '1', 'True'), None)
    """
    if kind is not Kind.DICT or all(type(key) is str for key in keys):
        return None
    return tuple(repr(key) for key in keys)


@dataclass
class Structure:
    """The variants of a cache's samples, in the order they were met."""

    variants: list[Leaf | Nest] = field(default_factory=list)
    columns: dict[str, ColumnSpec] = field(default_factory=dict)
    """What each column is for, by name."""
    list_forms: dict[str, tuple[str, ...] | None] = field(default_factory=dict)
    """Of each column of plain lists, by name: the least and the greatest of its lists'
    forms (list_forms.py), one where they are equal; None where they are not known."""
    _names: dict[ColumnSpec, str] = field(default_factory=dict)
    """Names by what ``encode`` says of a column, which is called by its path there."""
    _numbers: dict[Node, int] = field(default_factory=dict)
    """Numbers of the variants by the trees that ``encode`` makes."""

    def name(self, column: ColumnSpec) -> str:
        """Name a column: its path, and a number where several have that path.

        Args:
            column: What is in it, under any name.

        Returns:
            The same name for columns that are alike but for their names.
        """
        column = column._replace(name=column.path)
        name = self._names.get(column)
        if name is None:
            # A path may be taken although this column is new: "x" is an int in one
            # sample and a float in another, and nothing is ever coerced.
            name, number = column.path, 2
            while name in self.columns:
                name = f"{column.path}~{number}"
                number += 1
            self._names[column] = name
            self.columns[name] = column._replace(name=name)
        return name

    def number(self, tree: Node, key: str) -> int:
        """Number the variant that a sample is built like.

        Args:
            tree: How it is built, whatever its columns are called.
            key: The sample's key, for the message.

        Returns:
            Its number, from 0.

        Raises:
            DatasetError: There are too many variants to be anything but a mistake.
        """
        # Trees of a shard's note, or of another cache, call their columns by the names
        # that these have there.
        tree = _map_columns(tree, _called_by_path)
        number = self._numbers.get(tree)
        if number is None:
            number = self._numbers[tree] = len(self.variants)
            if number >= MOST_VARIANTS:
                message = (
                    f"Sample {key!r} is the {number + 1:,}th that is built differently."
                )
                why = "probably a dict has ids for keys, so that no two samples agree"
                fix = "make such a dict a list of keys and a list (or tensor) of values"
                raise DatasetError(message, why=why, fix=fix)
            self.variants.append(_map_columns(tree, self._column_of))
        return number

    def learn_list_forms(self, name: str, forms: Iterable[str] | None) -> None:
        """Learn in which forms the lists of a column are.

        Args:
            name: Of the column.
            forms: Of some of its lists; None where they are not known, which they are
                not in a cache that was packed before they were noted.
        """
        known = self.list_forms.get(name, ())
        if forms is None or known is None:
            self.list_forms[name] = None
            return
        both = {*known, *forms}
        if both:
            ends = dict.fromkeys((min(both), max(both)))
            self.list_forms[name] = tuple(ends)

    def learn_list_forms_of(self, part: Structure) -> None:
        """Learn the forms that the lists have in a part, whatever it calls columns."""
        for name, forms in part.list_forms.items():
            self.learn_list_forms(self.name(part.columns[name]), forms)

    def to_json(self) -> dict[str, Any]:
        """Write it so that ``from_json`` reads the same."""
        columns = {}
        for name, column in self.columns.items():
            path, kind, dtype, ndim, axis, _ = column
            columns[name] = [path, kind.value, dtype, ndim, axis]
        content: dict[str, Any] = {
            "variants": [_to_json(variant) for variant in self.variants],
            "columns": columns,
        }
        # Left out where there are no lists, as it always was.
        if any(column.kind is Kind.JSON for column in self.columns.values()):
            # Lists, as JSON has them: what is read again must be equal.
            content["lists"] = {
                name: None if forms is None else list(forms)
                for name, forms in self.list_forms.items()
            }
        return content

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
                _checked_text(name): _column_from_json(_checked_text(name), row)
                for name, row in content["columns"].items()
            }
            variants = [
                _from_json(variant, columns)
                for variant in _checked_list(content["variants"])
            ]
            forms = _list_forms_from_json(content, columns)
            if not 0 < len(variants) <= MOST_VARIANTS:
                _refuse_json(f"it has {len(variants):,} variants")
        # What a checked reading would look for one by one: whatever is raised while
        # JSON of another shape is taken apart means that it is not ours.
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
            message = f"The manifest's structure makes no sense: {error!r:.200}."
            fix = PACK_AGAIN
            raise DamagedCacheError(message, why="it was changed", fix=fix) from None
        names = {_called_by_path(column): name for name, column in columns.items()}
        numbers = {
            _map_columns(variant, _called_by_path): number
            for number, variant in enumerate(variants)
        }
        return cls(variants, columns, forms, names, numbers)

    def class_names(self) -> set[str]:
        """Name the classes that samples are made of, ``module:qualname``."""
        return {nest.cls for nest in self.nests() if nest.cls is not None}

    def without_classes(self, known: Callable[[Nest], bool]) -> Structure:
        """Put plain containers in the place of classes that are not known.

        Args:
            known: Tells whether a container's class is there.

        Returns:
            The same variants, where an unknown graph is PyG's ``Data`` or
            ``HeteroData`` and any other unknown class is a dict.
        """
        variants = [_without_classes(variant, known) for variant in self.variants]
        return Structure(variants, self.columns, self.list_forms)

    def nests(self) -> Iterator[Nest]:
        """Go through the containers of all variants."""
        for variant in self.variants:
            if isinstance(variant, Nest):
                yield from variant.nests()

    def _column_of(self, column: ColumnSpec) -> ColumnSpec:
        return self.columns[self.name(column)]


def _called_by_path(column: ColumnSpec) -> ColumnSpec:
    return column._replace(name=column.path)


def _map_columns(node: Node, new: Callable[[ColumnSpec], ColumnSpec]) -> Node:
    """Put other columns in the place of a tree's."""
    if isinstance(node, Leaf):
        increment = node.increment
        if isinstance(increment, ColumnSpec):
            increment = new(increment)
        return Leaf(new(node.column), increment)
    children = tuple(_map_columns(child, new) for child in node.children)
    nodes = None if node.nodes is None else new(node.nodes)
    return node._replace(children=children, nodes=nodes)


def _to_json(node: Node) -> list[Any]:
    if isinstance(node, Leaf):
        _, kind, dtype, ndim, axis, name = node.column
        increment = node.increment
        increment_name = (
            increment.name if isinstance(increment, ColumnSpec) else increment
        )
        return ["leaf", name, kind.value, dtype, ndim, axis, increment_name]
    # JSON has no tuple, and an int for a key becomes a text: Python's own writing of
    # keys comes back as it was, through ast.literal_eval.
    keys = [repr(key) for key in node.keys]
    children = [_to_json(child) for child in node.children]
    nodes = None if node.nodes is None else node.nodes.name
    return ["nest", node.kind.value, node.cls, keys, children, nodes]


def _from_json(content: object, columns: Mapping[str, ColumnSpec]) -> Node:
    """Read a node, trusting nothing: every name is looked up, every number bounded."""
    fields = _checked_list(content)
    if fields[0] == "leaf":
        return _leaf_from_json(fields, columns)
    _, kind, cls, keys, children, nodes = fields
    if _checked_text(kind) not in NEST_KINDS:
        _refuse_json(f"{kind!r} is no kind of container")
    kind = Kind(kind)
    keys = tuple(ast.literal_eval(_checked_text(key)) for key in _checked_list(keys))
    nest = Nest(
        kind,
        None if cls is None else _checked_text(cls),
        keys,
        tuple(_from_json(child, columns) for child in _checked_list(children)),
        None if nodes is None else columns[_checked_text(nodes)],
        written_keys_of(kind, keys),
    )
    _check_nest(nest)
    return nest


def _leaf_from_json(content: list[Any], columns: Mapping[str, ColumnSpec]) -> Leaf:
    _, name, kind, dtype, ndim, axis, increment_name = content
    column = columns[_checked_text(name)]
    # Written twice, here and with the column.  Only the column's is used, and was
    # checked; where the two differ somebody has changed one of them.
    of_column = (column.kind, column.dtype, column.ndim, column.axis)
    is_same = of_column == (kind, dtype, ndim, axis)
    if _checked_text(kind) not in LEAF_KINDS or not is_same:
        _refuse_json(f"column {name!r} is described in two ways")
    if increment_name is None or increment_name == INCREMENT_BY_PYG:
        return Leaf(column, increment_name)
    increment = columns[_checked_text(increment_name)]
    if increment.kind is not Kind.INCREMENT:
        _refuse_json(f"{increment_name!r} is no column of increments")
    return Leaf(column, increment)


def _check_nest(nest: Nest) -> None:
    kind, row = nest.kind, NEST_KINDS[nest.kind]
    has_equal_keys = len(set(nest.keys)) < len(nest.keys)
    if len(nest.keys) != len(nest.children) or has_equal_keys:
        _refuse_json(f"a {kind} has {len(nest.children)} parts, keys {nest.keys}")
    if row.part_names is not None and set(nest.keys) != row.part_names:
        _refuse_json(f"a {kind} has parts {nest.keys}")
    unwanted_class = row.class_use is ClassUse.NEVER and nest.cls is not None
    lacks_class = row.class_use is ClassUse.ALWAYS and nest.cls is None
    if unwanted_class or lacks_class:
        _refuse_json(f"a {kind} has the class {nest.cls!r}")
    # That the class is one that samples may be made of is for ``ClassRegistry`` to say.
    if nest.cls is not None and ":" not in nest.cls:
        _refuse_json(f"{nest.cls!r} is no class")
    if nest.nodes is not None:
        counts_nodes = nest.nodes.kind is Kind.NODES
        if kind is not Kind.STORE or not counts_nodes:
            _refuse_json(f"{nest.nodes.name!r} is no column of node counts")
    if row.names_are_text and not all(isinstance(key, str) for key in nest.keys):
        _refuse_json(f"the fields of a {kind} are {nest.keys}")
    for child in nest.children:
        is_store = isinstance(child, Nest) and child.kind is Kind.STORE
        if is_store != (kind is Kind.GRAPH):
            _refuse_json("a store is outside of a graph, or a graph has another part")
    if kind is Kind.GRAPH and not all(_is_store_key(key) for key in nest.keys):
        _refuse_json(f"a graph has the stores {nest.keys}")


def _is_store_key(key: object) -> bool:
    """Tell whether a graph may have a store of that key: None, a type, or a triple."""
    if isinstance(key, tuple):
        return len(key) == 3 and all(isinstance(name, str) for name in key)
    return key is None or isinstance(key, str)


def _column_from_json(name: str, row: object) -> ColumnSpec:
    """Read what a column is for: path, kind, dtype, ndim, axis."""
    path, kind, dtype, ndim, axis = _checked_list(row)
    if _checked_text(kind) not in LEAF_KINDS and kind not in COUNTER_KINDS:
        _refuse_json(f"{kind!r} is no kind of value")
    # ``type``: to isinstance True is an int, and it is no number of axes.
    if type(ndim) is not int or not 0 <= ndim <= _MOST_NDIM:
        _refuse_json(f"a column has {ndim!r} axes")
    if axis is not None:
        is_axis = type(axis) is int and 0 <= axis <= max(ndim - 1, 0)
        if not is_axis:
            _refuse_json(f"a column of {ndim} axes is joined along axis {axis!r}")
    column = ColumnSpec(
        _checked_text(path), Kind(kind), _checked_text(dtype), ndim, axis, name
    )
    if column.kind in COUNTER_KINDS:
        fits = dtype == "int64" and ndim <= 1
    else:
        fits = column.row.fits(column)
    if not fits:
        _refuse_json(
            f"a column of kind {kind!r} has the dtype {dtype!r} and {ndim} axes"
        )
    return column


def _list_forms_from_json(
    content: Mapping[str, Any], columns: Mapping[str, ColumnSpec]
) -> dict[str, tuple[str, ...] | None]:
    """Read in which forms the lists of each column are."""
    if "lists" not in content:  # packed before they were noted
        lists = [name for name, spec in columns.items() if spec.kind is Kind.JSON]
        return dict.fromkeys(lists)
    known: dict[str, tuple[str, ...] | None] = {}
    for name, forms in content["lists"].items():
        if columns[name].kind is not Kind.JSON:
            _refuse_json(f"column {name!r} holds no lists")
        if forms is not None:
            forms = tuple(map(_checked_text, _checked_list(forms)))
        known[name] = forms
    return known


def _without_classes(node: Node, known: Callable[[Nest], bool]) -> Node:
    if isinstance(node, Leaf):
        return node
    children = tuple(_without_classes(child, known) for child in node.children)
    node = node._replace(children=children)
    if node.cls is None or known(node):
        return node
    if node.kind is Kind.GRAPH:
        # PyG keeps all of a homogeneous graph in one store, whose key is None.
        name = "data:Data" if node.keys == (None,) else "hetero_data:HeteroData"
        return node._replace(cls=f"torch_geometric.data.{name}")
    return node._replace(kind=Kind.DICT, cls=None)


def _checked_list(value: object) -> list[Any]:
    if not isinstance(value, list):
        _refuse_json(f"{value!r:.40} stands where a list should")
    return list(value)


def _checked_text(value: object) -> str:
    if not isinstance(value, str):
        _refuse_json(f"{value!r:.40} stands where a text should")
    return str(value)


def _refuse_json(why: str) -> NoReturn:
    raise ValueError(why)
