"""In which form the lists of a field are: of one length and make, or of several.  Pure.

torch's ``default_collate`` joins lists item by item, and so gives a batch of three
lists ``["C", "H"]`` as two tuples of three.  Where lists differ in length it refuses.
What a batch holds must not depend on which samples met, so a field whose lists have
one form in the whole dataset is joined as torch does, and one of several forms is a
list with one value a sample, in every batch.

A form is a text: equal for lists that torch joins alike, such as "[2*s]" for two texts.
A column keeps the least and the greatest of its lists' forms in the cache's structure.
Two different ones are all that has to be known.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash

from loaderkit.datasets.kinds import NEST_KINDS, Kind
from loaderkit.datasets.plain import count_items, from_bytes
from loaderkit.datasets.structure import Leaf, is_graph

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from loaderkit.datasets.padding import Path
    from loaderkit.datasets.structure import Node, Structure

ListForms: TypeAlias = "Mapping[Path, frozenset[str]]"
"""The forms of lists, by the keys that lead to a field; fields without any are left
out."""

_LONGEST_FORM = 40
"""Letters; a longer one is written as its hash.  Chosen."""
_NUMBERS_ALONE = re.compile(rb'(?:\{"t": )?\[([^\["{n\]]+)\]\}?')
"""A list or tuple that is quickly told from others: "n" is in null, and in Infinity."""
_MAYBE_BEYOND_64_BITS = re.compile(rb"\d{19}")
_TEXT_LISTS = (b"\xff", b"\xfe")
"""What the lists and tuples begin with that have nothing but texts; see plain.py."""


def form_of_bytes(column: str, raw: bytes) -> str:
    """Tell the form of a list without making its items, where that is possible.

    Args:
        column: Name of its column, for the error.
        raw: What ``plain.to_bytes`` wrote of it.

    Raises:
        DamagedCacheError: The bytes are no list or tuple that ``pack`` writes.

    >>> from loaderkit.datasets.plain import to_bytes
    >>> values = ([3, 1.5], (1, 2), ["C", "H"], [], [[1], ["a", None]], [{"a": 1}])
    >>> print(*(form_of_bytes("x", to_bytes(value)) for value in values))
    [2*n] [2*n] [2*s] [] [[1*n],[1*s,1*-]] [{'a':n}]
    """
    if raw.startswith(_TEXT_LISTS):
        return f"[{count_items(column, raw)}*s]"
    # Without another list, a text or a dict in it each comma is between two items.
    numbers = _NUMBERS_ALONE.fullmatch(raw)
    if numbers and not _MAYBE_BEYOND_64_BITS.search(raw):
        return f"[{numbers[1].count(b',') + 1}*n]"
    form = _form_of(from_bytes(column, raw))
    if len(form) > _LONGEST_FORM:
        return xxhash.xxh3_64_hexdigest(form.encode())
    return form


def _form_of(value: object) -> str:
    """Write what torch's ``default_collate`` tells plain values apart by."""
    if isinstance(value, list | tuple):
        runs = itertools.groupby(map(_form_of, value))
        counted = ((form, sum(1 for _ in run)) for form, run in runs)
        parts = (
            form if form[:1] in "[{" and n == 1 else f"{n}*{form}"
            for form, n in counted
        )
        return f"[{','.join(parts)}]"
    if isinstance(value, dict):
        pairs = (f"{key!r}:{_form_of(part)}" for key, part in value.items())
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, int):
        # torch makes no tensor of more bits.
        return "n" if -(1 << 63) <= value < 1 << 63 else "i"
    letters: dict[type, str] = {float: "n", str: "s", bytes: "b", complex: "c"}
    return letters.get(type(value), "-")


def list_forms(structure: Structure, variants: Iterable[Node]) -> ListForms:
    """Find the forms of all lists that samples hold, without reading any.

    Args:
        structure: That of the cache.
        variants: The ways in which its samples are built, or a part of them is.
    """
    forms: dict[Path, frozenset[str]] = {}
    for variant in variants:
        if not is_graph(variant):  # PyG keeps a list a graph
            _add_forms(forms, structure, variant, ())
    return forms


def _add_forms(
    forms: dict[Path, frozenset[str]], structure: Structure, node: Node, path: Path
) -> None:
    if isinstance(node, Leaf):
        if node.column.kind is Kind.JSON:
            of_column = structure.list_forms.get(node.column.name) or ()
            forms[path] = forms.get(path, frozenset()).union(of_column)
        return
    row = NEST_KINDS[node.kind]
    if not row.is_container:
        return
    if node.kind in {Kind.LIST, Kind.TUPLE}:
        # Its items are fields of their own, whatever they are.
        form = f"{len(node.children)} fields"
        forms[path] = forms.get(path, frozenset()) | {form}
    keys: Iterable[Any] = range(len(node.children)) if row.is_sequence else node.keys
    for key, child in zip(keys, node.children, strict=True):
        _add_forms(forms, structure, child, (*path, key))


def are_kept_apart(forms: Iterable[ListForms], path: Path) -> bool:
    """Tell whether the lists of a field stay one a sample in batches.

    Args:
        forms: Those of all parts of a dataset.
        path: The keys that lead to the field.
    """
    of_parts = [of_part.get(path, frozenset()) for of_part in forms]
    return len(frozenset().union(*of_parts)) > 1
