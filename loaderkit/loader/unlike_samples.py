"""Why samples could not be joined: in what they are unlike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderkit.arguments import kind_of
from loaderkit.unlike_keys import find_none, find_only_none

if TYPE_CHECKING:
    from collections.abc import Callable


def difference_of(samples: Sequence[Any], path: str = "") -> str:
    """Say in what samples are unlike that cannot be joined.

    Args:
        samples: At least one.
        path: The keys that lead to them, as code; empty for the samples themselves.

    Returns:
        In words; empty where nothing is found that torch would refuse.

    >>> difference_of([{"x": [1, 2]}, {"x": [1]}])
    "['x'] has 2 items in one sample and 1 in another"
    >>> difference_of([{"x": 1, "y": 2}, {"x": 1}]), difference_of([{"x": 1}, [3]])
    ("['y'] is not in all samples", 'some samples are a dict, others a list')
    >>> difference_of([{"x": 1}, {"x": 2}])
    ''
    """
    first = samples[0]
    if path and isinstance(first, str | bytes):
        return ""  # torch leaves a list that begins with a text as it is
    for sample in samples:
        if type(sample) is not type(first) and not _are_numbers(sample, first):
            kinds = kind_of(first), kind_of(sample)
            if path:
                return f"{path} is {kinds[0]} in one sample and {kinds[1]} in another"
            return f"some samples are {kinds[0]}, others {kinds[1]}"
    if hasattr(first, "shape"):
        return _difference_of_shapes([tuple(sample.shape) for sample in samples], path)
    if isinstance(first, Mapping):
        return _difference_of_mappings(samples, path)
    if isinstance(first, list | tuple):
        return _difference_of_sequences(samples, path)
    return ""


class Unjoined(NamedTuple):
    """Why samples could not be joined, and what to do."""

    why: str | None
    """In what they are unlike; None where that is not known."""
    fix: str


ONE_SHAPE = (
    "give the samples one shape; or collate_fn=... that joins them; or "
    "loaderkit.pack(dataset, path), whose batches are padded"
)
"""What to do where nothing more is known."""


def explain_difference(samples: Sequence[Any]) -> Unjoined | None:
    """Say in what samples are unlike; None where nothing is found."""
    difference = difference_of(samples)
    if len(set(map(type, samples))) > 1:
        fix = "read each kind of samples by a loader of its own; or collate_fn=... "
        return Unjoined(difference or None, f"{fix}that joins them")
    return Unjoined(difference, ONE_SHAPE) if difference else None


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
    beside = find_none(samples)
    if beside is None:
        field = find_only_none(samples)
        if field is None:
            return None
        why = f"{field or 'each'} is None in all samples of the batch; torch and PyG "
        why += "join tensors and numbers"
        fix = f"leave {field} out of the samples, or put a value in its place"
        return Unjoined(why, fix if field else "return the sample in __getitem__")

    field = beside.field
    why = f"{field or 'the sample'} is None in {name_sample(beside.none_in)}, and "
    why += f"{kind_of(beside.value)} in {name_sample(beside.beside)}; torch and PyG "
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
    return Unjoined(why, f"{fix}; or put a value in its place, such as nan")


def _are_numbers(one: object, other: object) -> bool:
    return isinstance(one, int | float) and isinstance(other, int | float)


def _difference_of_shapes(shapes: Sequence[tuple[int, ...]], path: str) -> str:
    other = next((shape for shape in shapes if shape != shapes[0]), None)
    if other is None:
        return ""
    subject = f"{path} has" if path else "the samples have"
    return f"{subject} shapes {list(shapes[0])} and {list(other)}"


def _difference_of_mappings(samples: Sequence[Mapping[Any, Any]], path: str) -> str:
    for key in samples[0]:
        if any(key not in sample for sample in samples):
            return f"{path}[{key!r}] is not in all samples"
        values = [sample[key] for sample in samples]
        difference = difference_of(values, f"{path}[{key!r}]")
        if difference:
            return difference
    return ""


def _difference_of_sequences(samples: Sequence[Sequence[Any]], path: str) -> str:
    lengths = [len(sample) for sample in samples]
    other = next((length for length in lengths if length != lengths[0]), None)
    if other is not None:
        subject = f"{path} has" if path else "the samples have"
        return f"{subject} {lengths[0]} items in one sample and {other} in another"
    for number in range(lengths[0]):
        values = [sample[number] for sample in samples]
        difference = difference_of(values, f"{path}[{number}]")
        if difference:
            return difference
    return ""
