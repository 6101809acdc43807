"""Why samples were not joined, and what to do.

They are unlike (``sample_differences``), have a value that torch joins in no batch
(``refused_values``), or None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from loaderkit.loader.refused_values import find_refused_value
from loaderkit.loader.sample_differences import difference_of
from loaderkit.stand_ins import value_in_place_of_none
from loaderkit.unlike_graphs import find_unlike_field
from loaderkit.unlike_keys import find_none, find_only_none
from loaderkit.value_words import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

_MOST_COLUMNS = 8
"""More arrays of one length are taken for samples.  Chosen: (X, y) has two."""


class Unjoined(NamedTuple):
    """Why samples could not be joined, and what to do."""

    why: str | None
    """In what they are unlike; None where that is not known."""
    fix: str
    """What to do."""


_OWN_FUNCTION = "collate_fn=... that joins them"
ONE_SHAPE = (
    f"give the samples one shape; or {_OWN_FUNCTION}; or "
    "loaderkit.pack(dataset, path), whose batches are padded"
)
"""What to do where nothing more is known."""


def explain_difference(
    samples: Sequence[Any], dataset: object = None, exclude_keys: Collection[str] = ()
) -> Unjoined | None:
    """Say in what samples are unlike, or what torch joins in no batch.

    Args:
        samples: Those of the batch, at least one.
        dataset: That they are of; None for a stream.
        exclude_keys: Fields of graphs that are left out.

    Returns:
        None where nothing is found.
    """
    field = find_unlike_field(samples, exclude_keys)
    if field is not None:
        return Unjoined(field.words, field.fix)
    difference = difference_of(samples)
    are_of_one_class = len(set(map(type, samples))) == 1
    if not are_of_one_class:
        # No difference is found between int and float, which torch joins.
        why = None if difference is None else difference.words
        fix = f"read each kind of samples by a loader of its own; or {_OWN_FUNCTION}"
        return Unjoined(why, fix)
    if difference is None:
        return _explain_refused_value(samples)
    if _holds_columns(dataset):
        why = f"{difference.words}: the dataset is a {type(dataset).__name__} of "
        why += "columns, and the loader reads its items as samples"
        return Unjoined(why, "torch.utils.data.TensorDataset(*dataset)")
    if difference.is_length:
        return Unjoined(difference.words, ONE_SHAPE)
    fix = f"give the samples one shape, kind and length; or {_OWN_FUNCTION}"
    return Unjoined(difference.words, fix)


def _holds_columns(dataset: object) -> bool:
    """Tell whether a list or tuple holds arrays of one length, as (X, y) does."""
    if not isinstance(dataset, list | tuple) or not 1 < len(dataset) <= _MOST_COLUMNS:
        return False
    if not all(isinstance(item, torch.Tensor) and item.dim() for item in dataset):
        return False
    return len({len(column) for column in dataset}) == 1


def _explain_refused_value(samples: Sequence[Any]) -> Unjoined | None:
    refused = find_refused_value(samples)
    if refused is None:
        return None
    why = f"{refused}, and torch joins tensors, arrays of its own dtypes, numbers of "
    why += "64 bits, texts, and nests of these"
    stand_in = refused.stand_in
    if not stand_in:
        return Unjoined(why, f"leave it out; or {_OWN_FUNCTION}")
    return Unjoined(why, f"give {stand_in} in place of it, x; or {_OWN_FUNCTION}")


def explain_none(
    samples: Sequence[Any], name_sample: Callable[[int], str], dataset: object = None
) -> Unjoined | None:
    """Say where None is among samples that torch or PyG could not join.

    Args:
        samples: Those of the batch, at least one.
        name_sample: Names one by its place in the batch.
        dataset: That they are of; None for a stream.

    Returns:
        None where there is no None.
    """
    none = find_none(samples)
    if none is None:
        field = find_only_none(samples)
        if field is None:
            return None
        why = f"{field or 'each'} is None in all samples of the batch; torch and PyG "
        why += "join tensors and numbers"
        fix = f"leave {field} out of the samples, or put a value in its place"
        return Unjoined(why, fix if field else "return the sample in __getitem__")

    field = none.field
    why = f"{field or 'the sample'} is None in {name_sample(none.none_in)}, and "
    why += f"{kind_of(none.value)} in {name_sample(none.beside)}; torch and PyG "
    why += "join tensors and numbers"
    is_there = f"sample{field} is not None"
    if isinstance(dataset, list | tuple):
        fix = f"dataset = [sample for sample in dataset if {is_there}]"
    elif dataset is not None:
        is_there = f"dataset[row]{field} is not None"
        fix = f"rows = [row for row in range(len(dataset)) if {is_there}]; dataset = "
        fix += "torch.utils.data.Subset(dataset, rows)"
    else:
        fix = f"leave out in __iter__ what has None: if {is_there}: yield sample"
    value = value_in_place_of_none(none.value)
    return Unjoined(why, f"{fix}; or put {value} in its place")
