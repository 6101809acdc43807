"""What is alive because we watch: it grows with the run, and is nobody's leak.

What a detector keeps is subtracted from the readings, so it never explains a growth;
where nothing else does, it would be the nearest thing to blame.
"""

from __future__ import annotations

import array
import gc
from collections import Counter, deque
from typing import Any

import numpy as np

from loaderkit.memory.tensors import TypeTest, is_a, objects_of

_OWN_ROOM = "loaderkit.leaks"
_CONTAINERS = (list, dict, tuple, set, frozenset, deque, Counter)
_ARRAYS = (np.ndarray, array.array)


def ids_of_own_objects(objects: list[Any]) -> set[int]:
    """Look for everything that detectors keep, of this run and of others.

    They keep it in objects of their own classes, and there in plain containers and
    arrays.  What else is in those, such as functions of the user's, is not entered.

    Args:
        objects: What Python's collector lists.

    Returns:
        The ``id`` of each: of objects, containers and arrays.
    """
    is_own, is_kept = TypeTest(_is_own), TypeTest(_is_kept)
    level = objects_of(objects, is_own)
    own_ids = set(map(id, level))
    while level:
        kept = objects_of(gc.get_referents(*level), is_kept)
        new = {id(item): item for item in kept if id(item) not in own_ids}
        own_ids.update(new)
        level = [item for item in new.values() if is_a(item, _CONTAINERS)]
    return own_ids


def _is_own(kind: type) -> bool:
    module = kind.__module__
    # A class of the user's may have anything at all there.
    return type(module) is str and f"{module}.".startswith(f"{_OWN_ROOM}.")


def _is_kept(kind: type) -> bool:
    # By identity: a metaclass may define what is equal to its classes.
    return any(kind is kept for kept in (*_CONTAINERS, *_ARRAYS))
