"""What is alive because we watch: it grows with the run, and is nobody's leak.

What a detector keeps is subtracted from the readings, so it never explains a growth;
where nothing else does, it would be the nearest thing to blame.
"""

from __future__ import annotations

import array
from collections import Counter, deque
from typing import Any

import numpy as np

from loaderkit.memory.tensors import TypeTest, is_a, objects_of, referents_of

_CONTAINERS = (list, dict, tuple, set, frozenset, deque, Counter)
_ARRAYS = (np.ndarray, array.array)
OWN_ROOMS = ("loaderkit.leaks.", "loaderkit.memory.")
"""Beginnings of the names of the detector's modules, and of those it searches with."""


class KeptByDetector:
    """Base of what a detector keeps for as long as it watches.

    What a search for causes makes is none of it: that refers to what is the user's.
    """


def ids_of_own_objects(objects: list[Any]) -> set[int]:
    """Look for everything that detectors keep, of this run and of others.

    They keep it in plain containers, arrays and readings.  What else is in those, such
    as functions of the user's, is not entered.

    Args:
        objects: What Python's collector lists.

    Returns:
        The ``id`` of each: of objects, containers and arrays.
    """
    is_own, is_part = TypeTest(_is_kept), TypeTest(_is_part)
    level = objects_of(objects, is_own)
    own_ids = set(map(id, level))
    while level:
        parts = objects_of(referents_of(level), is_part)
        new = {id(item): item for item in parts if id(item) not in own_ids}
        own_ids.update(new)
        level = [item for item in new.values() if not is_a(item, _ARRAYS)]
    return own_ids


def _is_kept(kind: type) -> bool:
    return issubclass(kind, KeptByDetector)


def _is_part(kind: type) -> bool:
    # By identity: a metaclass may define what is equal to its classes.
    if any(kind is plain for plain in (*_CONTAINERS, *_ARRAYS)):
        return True
    return is_own_type(kind)


def is_own_type(kind: type) -> bool:
    """Whether a type is the detector's own.

    What it made may outlive it, as a report does that a test runner keeps.
    """
    module = kind.__module__
    # A class of the user's may have anything at all there.
    return type(module) is str and module.startswith(OWN_ROOMS)
