"""How columns make up a sample: a tree of nests and leaves, and its JSON.  Pure.

Most datasets have one tree for all samples.  Where samples differ (a key is missing,
None here and a tensor there, another dtype) each way of being built is a *variant*,
and the column ``@variant`` says which one a sample is; so nothing is ever coerced.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loaderkit.errors import DamagedCacheError, DatasetError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

VARIANT = "@variant"
KEY = "@key"
MOST_VARIANTS = 4096

LOOSE = "?"
"""In place of an increment's column: PyG must work it out sample by sample."""


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
            columns = {str(k): _tuple(v) for k, v in content["columns"].items()}
            variants = [_from_json(each) for each in content["variants"]]
        except (KeyError, TypeError, ValueError, AttributeError, SyntaxError) as error:
            what = f"The manifest's structure makes no sense: {error!r}."
            fix = "pack(source, path, overwrite=True)"
            raise DamagedCacheError(what, why="it was changed", fix=fix) from None
        made = cls(variants, columns, {raw: name for name, raw in columns.items()})
        made._numbers = {made._raw(each): n for n, each in enumerate(variants)}
        return made

    def _tree(self, tree: tuple[Any, ...]) -> Leaf | Nest:
        if tree[0] == "leaf":
            _, raw, inc = tree
            named = inc if inc is None or inc == LOOSE else self.name(inc)
            kind, dtype, ndim, axis = raw[1:]
            return Leaf(self.name(raw), kind, dtype, ndim, axis, named)
        kind, cls, keys, children, nodes = tree
        inside = tuple(self._tree(child) for child in children)
        return Nest(
            kind, cls, keys, inside, None if nodes is None else self.name(nodes)
        )

    def _raw(self, node: Leaf | Nest) -> tuple[Any, ...]:
        if isinstance(node, Leaf):
            inc = node.inc if node.inc in {None, LOOSE} else self.columns[str(node.inc)]
            return "leaf", self.columns[node.column], inc
        inside = tuple(self._raw(child) for child in node.children)
        nodes = None if node.nodes is None else self.columns[node.nodes]
        return node.kind, node.cls, node.keys, inside, nodes


def _to_json(node: Leaf | Nest) -> list[Any]:
    if isinstance(node, Leaf):
        return [
            "leaf", node.column, node.kind, node.dtype, node.ndim, node.axis, node.inc
        ]  # fmt: skip
    keys = [repr(key) for key in node.keys]
    inside = [_to_json(child) for child in node.children]
    return ["nest", node.kind, node.cls, keys, inside, node.nodes]


def _from_json(content: list[Any]) -> Leaf | Nest:
    if content[0] == "leaf":
        _, column, kind, dtype, ndim, axis, inc = content
        return Leaf(column, kind, dtype, ndim, axis, inc)
    _, kind, cls, keys, inside, nodes = content
    keys = tuple(ast.literal_eval(key) for key in keys)
    return Nest(kind, cls, keys, tuple(_from_json(each) for each in inside), nodes)


def _tuple(value: Any) -> Any:
    return tuple(_tuple(each) for each in value) if isinstance(value, list) else value
