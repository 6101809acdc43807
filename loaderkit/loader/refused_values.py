"""Which values of samples torch joins in no batch, and what to give in their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from loaderkit.pyg import is_pyg_data
from loaderkit.stand_ins import stand_in_for
from loaderkit.value_words import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class RefusedValue(NamedTuple):
    """A value of which torch joins no samples, however alike they are."""

    path: str
    """The keys that lead to it, as code; empty for a sample itself."""
    value: object
    """That of the first sample."""

    def __str__(self) -> str:
        return f"{self.path or 'a sample'} is {_describe(self.value)}"

    @property
    def stand_in(self) -> str:
        """What torch joins in its place, as code in which it is ``x``; "" for none."""
        return _joinable_stand_in(self.value)


def find_refused_value(samples: Sequence[Any], path: str = "") -> RefusedValue | None:
    """Find the first field that torch does not join, by asking torch.

    Args:
        samples: Those of a batch, at least one, which differ in nothing that
            ``difference_of`` finds.
        path: The keys that lead to them, as code; empty for the samples themselves.

    Returns:
        None where torch joins them all.

    >>> str(find_refused_value([{"label": {1, 2}}, {"label": {3}}]))
    "['label'] is a set"
    """
    first = samples[0]
    if isinstance(first, Mapping):
        keys: Iterable[Any] = first
    elif isinstance(first, list | tuple):
        keys = range(len(first))
    elif is_pyg_data(first):
        return None  # PyG joins these; ``find_unlike_field`` looks into them
    else:
        try:
            default_collate(list(samples))
        except Exception:  # noqa: BLE001 -- a class's own function may be registered
            return RefusedValue(path, first)
        return None
    for key in keys:
        values = [sample[key] for sample in samples]
        refused = find_refused_value(values, f"{path}[{key!r}]")
        if refused is not None:
            return refused
    return None


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        layout = "nested" if value.is_nested else str(value.layout)
        return f"a tensor ({layout})"
    if not isinstance(value, np.ndarray | np.generic):
        return kind_of(value)
    order = ", backwards" if _is_read_backwards(value) else ""
    return f"{kind_of(value)} of {value.dtype}{order}"


def _is_read_backwards(value: object) -> bool:
    """Tell whether it is an array like ``x[::-1]``: torch has no negative strides."""
    return isinstance(value, np.ndarray) and min(value.strides, default=0) < 0


def _joinable_stand_in(value: object) -> str:
    """Say what torch joins in place of a value, as code in which that is ``x``."""
    if isinstance(value, torch.Tensor):
        return "" if value.is_nested else "x.to_dense()"
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        if not value.dtype.isnative:
            return 'x.astype(x.dtype.newbyteorder("="))'
        if _is_read_backwards(value):
            return "x.copy()"
    # Of Python's numbers torch joins float, and int if it has at most 64 bits.
    if isinstance(value, complex):
        return "torch.tensor(x)"
    if isinstance(value, int):
        return "float(x), or str(x)"
    if dataclasses.is_dataclass(value):
        return "dataclasses.asdict(x)"
    return str(stand_in_for(value))
