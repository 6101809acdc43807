"""How the samples of a dataset are joined unless the user says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset
from torch_geometric.data.data import BaseData
from torch_geometric.loader.dataloader import Collater
from torch_geometric.typing import TensorFrame

from loaderkit.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


def own_collate(dataset: Any) -> Callable[[Any], Any] | None:
    """Find the ``collate`` of a dataset that joins its samples in its own way.

    Args:
        dataset: Any; a subset's samples are joined like those of what it is a part of.

    Returns:
        A function of a list of samples; None for datasets that are not loaderkit's.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    # PyG's InMemoryDataset has a ``collate`` too, which does something else.
    return dataset.collate if hasattr(dataset, "gathers") else None


def holds_graphs(sample: object) -> bool:
    """Tell whether a sample is for PyG to join: a graph, or a nest with one inside.

    Args:
        sample: Of any kind.

    Returns:
        True for ``Data``, ``HeteroData``, their like, and ``TensorFrame``; for dicts,
        lists and tuples that hold one at any depth.
    """
    if isinstance(sample, (BaseData, TensorFrame)):
        return True
    if isinstance(sample, Mapping):
        return any(holds_graphs(value) for value in sample.values())
    return isinstance(sample, list | tuple) and any(map(holds_graphs, sample))


def join(
    samples: list[Any],
    others: Callable[[list[Any]], Any],
    follow_batch: Collection[str] = (),
    exclude_keys: Collection[str] = (),
) -> Any:
    """Join samples as PyG does where they hold graphs.

    Args:
        samples: At least one, all built alike.
        others: Joins samples without graphs.
        follow_batch: Fields that get a ``_batch`` vector of their own, as in PyG.
        exclude_keys: Fields left out, as in PyG.

    Returns:
        A ``Batch``, or the samples' nest with a batch at each leaf.

    Raises:
        DatasetError: Fields of graphs are named, and there is no graph.
        TypeError: There are graphs beside what PyG does not join, such as None.
    """
    if holds_graphs(samples[0]):
        return Collater(None, list(follow_batch), list(exclude_keys))(samples)
    check_no_keys(follow_batch, exclude_keys, type(samples[0]).__name__)
    return others(samples)


def check_no_keys(
    follow_batch: Collection[str], exclude_keys: Collection[str], kind: str
) -> None:
    """Refuse options for graphs where the samples hold none.

    Args:
        follow_batch: As the caller gave it.
        exclude_keys: As the caller gave it.
        kind: What a sample is, for the message.

    Raises:
        DatasetError: One of them is not empty.
    """
    given = {"follow_batch": follow_batch, "exclude_keys": exclude_keys}
    for name, keys in given.items():
        if keys:
            what = f"{name}={list(keys)} was given for samples without a graph: {kind}."
            why = "both name fields of PyG's graphs; nothing else is joined by them"
            raise DatasetError(what, why=why, fix=f"drop {name}")
