"""Finds immutable values that are rebuilt longer: ``x = (x, item)``, ``x += (item,)``.

Python's collector lists neither a tuple of arrays nor what changed since a census: a
value that is rebuilt is another object each time.  So all tuples, frozen sets, records
and chains of pairs are weighed that something refers to now.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from loaderkit.leaks.finders.array_holder import holder_of_array
from loaderkit.leaks.finders.items import LEAST_SHARE, MOST_SHARE, describe_items
from loaderkit.leaks.growth import Growth
from loaderkit.leaks.retained import pieces_of
from loaderkit.memory.frames import running_locals
from loaderkit.memory.root_search import chunks_of_referents
from loaderkit.memory.tensors import TypeTest, is_a, objects_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from loaderkit.leaks.finders.evidence import HeapEvidence
    from loaderkit.memory.holder import Holder

_LEAST_GROWN_BYTES = 512 << 10
"""What weighs less could be any constant: with torch, PyG, pandas, sklearn,
transformers and torch's compiler in a process, 176 values weigh 64 KiB or more, one
256 KiB, and none 512."""
_FEWEST_ITEMS = 3
"""A value with fewer is looked at as a link of a chain alone."""
_FEWEST_PLAIN_ITEMS = 1_000
"""Of numbers and short texts, of which many constants consist."""
_FEWEST_OBJECTS, _MOST_OBJECTS = 200, 50_000
"""Below a value: nearly all are told by the first, and few are weighed to the second.
Chosen: 50,000 take 0.1 s."""
_MOST_WEIGHED = 30
"""Values that are weighed to the end, the heaviest."""
_MOST_SEARCHED_FOR = 3
"""Values whose holders are looked for: a look at the whole heap each, some 0.1 s."""
_LONG_TEXT = 200
_VALUES = (tuple, frozenset)
_NESTED = (list, dict)


def find_rebuilt_values(evidence: HeapEvidence) -> list[Growth]:
    """Look for an immutable value, or a chain, that holds all that grew.

    Args:
        evidence: What is alive now, and was then.

    Returns:
        The one that a variable leads to, and that comes nearest to what grew; else
        nothing.
    """
    grown_bytes = evidence.grown_bytes
    if grown_bytes < _LEAST_GROWN_BYTES:
        return []
    nearest = _nearest_to(grown_bytes, evidence)
    for rebuilt in nearest:
        value, items = rebuilt
        if _was_there(items, evidence):
            return []
        ignore = [nearest, rebuilt, items]
        # A dictionary that holds a tuple of texts and no other container is in no list
        # of the collector's, either.
        holder = holder_of_array(value, evidence.heap, ignore)
        # A tuple that a call leaves behind may hold the value too, and no variable it.
        if holder.held:
            return [_describe(rebuilt, holder, evidence)]
    return []


def _describe(rebuilt: _Rebuilt, holder: Holder, evidence: HeapEvidence) -> Growth:
    return Growth(
        pattern="rebuilt",
        what=type(rebuilt.value).__name__,
        items=describe_items(rebuilt.items),
        per_epoch=len(rebuilt.items) / evidence.run_epochs,
        bytes_per_epoch=round(evidence.bytes_per_epoch),
        # The path to the variables of an object ends with the dot before their names.
        holder=replace(holder, path=holder.path.removesuffix(".")),
    )


def _was_there(items: list[Any], evidence: HeapEvidence) -> bool:
    """Whether all tensors of a value were alive at the census: nothing came to it."""
    tensor_ids = [id(item) for item in items if is_a(item, torch.Tensor)]
    older_ids = set(evidence.before.tensor_ids.tolist())
    return bool(tensor_ids) and older_ids.issuperset(tensor_ids)


class _Rebuilt(NamedTuple):
    value: Any
    items: list[Any]
    """What it holds that is no container."""


class _Contents(NamedTuple):
    size_bytes: int
    items: list[Any]
    is_whole: bool
    """Whether all below it was weighed."""


class _Weighed(NamedTuple):
    """A value, and what is in it."""

    value: Any
    contents: _Contents


def _nearest_to(grown_bytes: float, evidence: HeapEvidence) -> list[_Rebuilt]:
    """Give the values that weigh what grew, the nearest first."""
    most_bytes, ignored_ids = grown_bytes * MOST_SHARE, evidence.ignored_ids
    weighed: list[_Weighed] = []
    too_large: list[_Weighed] = []
    for value in _rebuilt_values(evidence):
        contents = _measure_contents(value, _FEWEST_OBJECTS, most_bytes, ignored_ids)
        (weighed if contents.is_whole else too_large).append(_Weighed(value, contents))
    # Of those that were not gone through to the end, the heaviest are worth more time.
    too_large.sort(key=lambda row: -row.contents.size_bytes)
    for value, _ in too_large[:_MOST_WEIGHED]:
        contents = _measure_contents(value, _MOST_OBJECTS, most_bytes, ignored_ids)
        if contents.is_whole:
            weighed.append(_Weighed(value, contents))

    fitting = [
        row
        for row in weighed
        if row.contents.size_bytes >= grown_bytes * LEAST_SHARE
        and len(row.contents.items) >= _FEWEST_ITEMS
    ]
    fitting.sort(key=lambda row: abs(row.contents.size_bytes - grown_bytes))
    return [
        _Rebuilt(row.value, row.contents.items) for row in fitting[:_MOST_SEARCHED_FOR]
    ]


def _measure_contents(
    value: object, most_objects: int, most_bytes: float, ignored_ids: AbstractSet[int]
) -> _Contents:
    """Weigh a value with all that its containers hold, but for what is ignored."""
    objects: list[Any] = [value]
    seen_ids = {id(value)}
    items: list[Any] = []
    size_bytes = 0
    # The list grows while it is gone through.
    for current in objects:
        if len(objects) > most_objects or size_bytes > most_bytes:
            return _Contents(size_bytes, items, is_whole=len(objects) <= most_objects)
        for key, size in pieces_of(current):
            if key == id(current) or key not in seen_ids:
                seen_ids.add(key)
                size_bytes += size
        referents = _referents_of(current)
        if referents is None:
            items.append(current)
            continue
        for referent in referents:
            if id(referent) not in seen_ids and id(referent) not in ignored_ids:
                seen_ids.add(id(referent))
                objects.append(referent)
    items = [item for item in items if _is_kept(item)] or items
    return _Contents(size_bytes, items, is_whole=size_bytes <= most_bytes)


def _is_kept(item: object) -> bool:
    """Whether an item is more than a number, a key or None."""
    if is_a(item, str) or is_a(item, bytes):
        return len(item) >= _LONG_TEXT
    return not is_a(item, (int, float, complex, type(None)))


def _referents_of(value: object) -> Sequence[Any] | None:
    """Give what a container holds; None of what is none."""
    if type(value) is dict:
        return [*value, *value.values()]
    if is_a(value, (tuple, frozenset, list)):
        return list(_builtin_items(value))
    if _is_record(type(value)):
        return _fields_of(value)
    return None


def _builtin_items(value: Any) -> Iterator[Any]:
    """Go through a container without the code of a subclass of the user's."""
    if is_a(value, tuple):
        return tuple.__iter__(value)
    if is_a(value, frozenset):
        return frozenset.__iter__(value)
    return list.__iter__(value)


def _is_record(kind: type) -> bool:
    return "__dataclass_fields__" in vars(kind)


def _fields_of(record: Any) -> list[Any]:
    """Give the fields of a dataclass as they are stored: no code of its own runs."""
    values = []
    for field in dataclasses.fields(record):
        try:
            values.append(object.__getattribute__(record, field.name))
        except AttributeError:  # it was never set
            continue
    return values


def _rebuilt_values(evidence: HeapEvidence) -> list[Any]:
    """List what may have been rebuilt, without what stands inside of another one."""
    heap = evidence.heap
    is_value = TypeTest(_is_value)
    values: dict[int, Any] = {}
    chunks = itertools.chain(
        [running_locals()], chunks_of_referents([*heap.objects, *heap.dicts])
    )
    for chunk in chunks:
        for value in objects_of(chunk, is_value):
            # What a census has counted was not rebuilt since: variables are in such.
            is_new = id(value) not in values and id(value) not in evidence.older_ids
            if is_new and _may_have_grown(value):
                values[id(value)] = value
    own_ids = evidence.ignored_ids
    inner_ids = {
        id(referent)
        for value in values.values()
        for referent in (_referents_of(value) or ())
    }
    return [
        value
        for number, value in values.items()
        if number not in inner_ids and number not in own_ids
    ]


def _is_value(kind: type) -> bool:
    if issubclass(kind, _VALUES):
        return True
    return kind in _NESTED or _is_record(kind)


def _may_have_grown(value: Any) -> bool:
    """Whether a value has as many items as grow in a run, or is a link of a chain."""
    if is_a(value, _NESTED):
        # Lists and dicts that get longer have finders of their own.
        return 0 < len(value) <= _FEWEST_ITEMS and _is_link(value)
    if _is_record(type(value)) and not is_a(value, _VALUES):
        return _is_link(value)
    length = len(value)
    if length < _FEWEST_ITEMS:
        return length > 0 and _is_link(value)
    if length >= _FEWEST_PLAIN_ITEMS:
        return True
    first = next(_builtin_items(value))
    last = value[-1] if is_a(value, tuple) else first
    return _is_heavy(first) or _is_heavy(last)


def _is_link(value: object) -> bool:
    """Whether a value holds another one that may lead on."""
    return any(
        is_a(referent, (*_VALUES, *_NESTED)) or _is_record(type(referent))
        for referent in (_referents_of(value) or ())
    )


def _is_heavy(item: object) -> bool:
    if is_a(item, str) or is_a(item, bytes):
        return len(item) >= _LONG_TEXT
    kinds = (np.ndarray, torch.Tensor, *_VALUES, *_NESTED)
    return is_a(item, kinds) or _is_record(type(item))
