"""Put a sample together again from the arrays of its leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loaderkit.datasets.kinds import LEAF_KINDS, NEST_KINDS, Container
from loaderkit.datasets.structure import Leaf

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from loaderkit.datasets.kinds import Classes
    from loaderkit.datasets.structure import Nest, Node

    ReadLeaf = Callable[[Leaf], NDArray[Any]]


def decode(node: Node, read: ReadLeaf, classes: Classes) -> Any:
    """Put one sample together.

    Args:
        node: How it is built.
        read: Gives a leaf's value as a new, writable array.
        classes: Where its classes are.

    Returns:
        A sample equal to the one that was packed; its memory is its own.

    Raises:
        DatasetError: A class it is made of is not known.
        DamagedCacheError: Its bytes are no such sample.
    """
    if isinstance(node, Leaf):
        column = node.column
        return LEAF_KINDS[column.kind].decode(column, read(node))
    values = [decode(child, read, classes) for child in node.children]
    return make_nest(node, values, classes)


def make_nest(nest: Nest, values: list[Any], classes: Classes) -> Any:
    """Fill a container with its children.

    Args:
        nest: What container it is.
        values: The children's values; a list may be given out.
        classes: Where its class is.

    Returns:
        The container.
    """
    container = Container(nest.keys, values, nest.cls)
    return NEST_KINDS[nest.kind].make(container, classes)
