"""How samples of datasets of datasets are joined: torch's concatenations and stacks.

Samples of a ``ConcatDataset`` of ours are joined as one cache of them all would: its
parts are asked together which fields are ragged.  Those of a ``StackDataset`` are
tuples or dicts, whose items the parts join, each its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, StackDataset, Subset

from loaderkit.dataset_protocol import as_cached
from loaderkit.errors import LoaderError
from loaderkit.joining import check_no_keys, holds_graphs, join
from loaderkit.memory.shm_batch import default_collate
from loaderkit.value_words import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from typing import TypeAlias

    from loaderkit.dataset_protocol import CachedSamples

    Collate: TypeAlias = Callable[..., Any]

_JOINING = ("ragged", "pad_value", "follow_batch", "exclude_keys")
"""Attributes of our datasets that say how their samples are joined."""


def own_collate(dataset: object) -> Collate | None:
    """Find the ``collate`` of a dataset that joins its samples in its own way.

    Args:
        dataset: Any; a subset's samples are joined like those of what it is a part of.

    Returns:
        A function of a list of samples; None for datasets that are not loaderkit's.
        PyG's InMemoryDataset has a ``collate`` too, which does something else.
    """
    return _collate_of([dataset])


def check_joined_alike(dataset: object) -> None:
    """Refuse a concatenation whose parts join a ragged field in different ways.

    torch would join their samples, which fails for some batches, and gives a tensor in
    the place of ``Padded`` for others.

    Args:
        dataset: Any.

    Raises:
        LoaderError: It is one.
    """
    _check_members([dataset])


def fill_padding(dataset: object, batch: Any) -> None:
    """Have a dataset that pads with values of its own fill what was padded on.

    Args:
        dataset: What the samples are of.
        batch: Padded with zeros; changed in place.
    """
    first, *_ = _members_of([dataset])
    if type(first) is StackDataset:
        for key in _keys_of(first):
            fill_padding(first.datasets[key], batch[key])
    elif own_collate(dataset) is not None:  # all pad alike
        first.fill_padding(batch)


def _members_of(datasets: Iterable[object]) -> Iterator[Any]:
    """Go through what concatenations are made of, and subsets are parts of."""
    for dataset in datasets:
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        if isinstance(dataset, ConcatDataset):
            yield from _members_of(dataset.datasets)
        else:
            yield dataset


def _collate_of(datasets: Iterable[object]) -> Collate | None:
    """Find how samples of datasets are joined that are read one behind the other.

    Returns:
        None where one is of another library, or joins its samples otherwise.
    """
    # A dataset may be there twice, as that of two subsets.
    members = list({id(member): member for member in _members_of(datasets)}.values())
    if all(type(member) is StackDataset for member in members):
        return _collate_of_stacks(members)
    cached = _cached_among(members)
    settings = [_joining_settings(dataset) for dataset in cached]
    if len(cached) < len(members) or any(other != settings[0] for other in settings):
        return None
    first, *others = cached
    return (first.joins_with(others) if others else first).collate


def _cached_among(members: Iterable[object]) -> list[CachedSamples]:
    return [cached for cached in map(as_cached, members) if cached is not None]


def _collate_of_stacks(stacks: Sequence[StackDataset[Any]]) -> Collate | None:
    keys = list(_keys_of(stacks[0]))
    if any(list(_keys_of(stack)) != keys for stack in stacks):
        return None
    collates = {
        key: _collate_of([stack.datasets[key] for stack in stacks]) for key in keys
    }
    # Without a dataset of ours torch or PyG joins the samples, as a whole.
    return _JoinStacked(collates) if any(collates.values()) else None


def _keys_of(stack: StackDataset[Any]) -> Collection[Any]:
    """List the keys, or numbers, of the items of a stack's samples."""
    datasets = stack.datasets
    return datasets.keys() if isinstance(datasets, dict) else range(len(datasets))


def _joining_settings(dataset: CachedSamples) -> tuple[Any, ...]:
    """Give what the joining of samples by a dataset's method depends on."""
    function = getattr(dataset.collate, "__func__", None)
    return (function, *(getattr(dataset, name, None) for name in _JOINING))


class _JoinStacked:
    """Joins samples of a ``StackDataset``, item by item.

    Args:
        collates: What joins each item, by its key or number; None for items of datasets
            that torch joins.
    """

    def __init__(self, collates: dict[Any, Collate | None]) -> None:
        self.collates = collates

    def __call__(
        self,
        samples: Any,
        *,
        follow_batch: Collection[str] | None = None,
        exclude_keys: Collection[str] | None = None,
    ) -> Any:
        """Join a list of samples; a tuple becomes a list, as torch has it."""
        if not isinstance(samples, list):
            return samples
        named = {"follow_batch": follow_batch, "exclude_keys": exclude_keys}
        for_graphs = {name: keys for name, keys in named.items() if keys is not None}
        if not holds_graphs(samples[0]):
            kind = type(samples[0]).__name__
            check_no_keys(follow_batch or (), exclude_keys or (), kind)

        items: dict[Any, Any] = {}
        for key, collate in self.collates.items():
            values = [sample[key] for sample in samples]
            options = for_graphs if holds_graphs(values[0]) else {}
            if collate is None:
                items[key] = join(values, default_collate, **options)
            else:
                items[key] = collate(values, **options)
            if isinstance(samples[0], tuple) and isinstance(values[0], str | bytes):
                # torch leaves texts in the tuple that zip makes of them.
                items[key] = tuple(items[key])
        return items if isinstance(samples[0], dict) else list(items.values())


def _check_members(datasets: Iterable[object]) -> None:
    members = list(_members_of(datasets))
    stacks = [member for member in members if type(member) is StackDataset]
    if len(stacks) == len(members):
        keys = _keys_of(stacks[0])
        if all(list(_keys_of(stack)) == list(keys) for stack in stacks):
            for key in keys:
                _check_members([stack.datasets[key] for stack in stacks])
        return
    cached = _cached_among(members)
    if not cached or _collate_of(members) is not None:
        return
    field = cached[0].ragged_field(cached[1:])
    if field is not None:
        raise _joined_in_two_ways(members, field)


def _joined_in_two_ways(members: Sequence[Any], field: str) -> LoaderError:
    """Say which members join a ragged field otherwise than the first of ours does."""
    for number, member in enumerate(members):
        if as_cached(member) is None:
            message = f"{field} differs in length, and part {number} of the "
            message += f"ConcatDataset, {kind_of(member)}, is not packed."
            why = "torch joins the samples then, which cannot join other lengths"
            fix = "loaderkit.pack(part, path), or loaderkit.extend(cache, part); or "
            return LoaderError(message, why=why, fix=f"{fix}collate_fn=... for all")
    first, *others = members
    for number, other in enumerate(others, start=1):
        for name in _JOINING:
            value = getattr(first, name, None)
            other_value = getattr(other, name, None)
            if value != other_value:
                message = f"Parts 0 and {number} of the ConcatDataset join {field} in "
                message += f"two ways: {name}={value!r} and {name}={other_value!r}."
                why = "a batch may hold samples of both"
                fix = f"the same {name} for all parts; or collate_fn=... for all"
                return LoaderError(message, why=why, fix=fix)
    classes = " and ".join(sorted({type(member).__name__ for member in members}))
    message = f"The parts of the ConcatDataset join {field} in ways of their own."
    why = f"they are of {classes}"
    return LoaderError(message, why=why, fix="collate_fn=... for all")
