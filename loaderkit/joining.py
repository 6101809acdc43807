"""How the samples of a dataset are joined unless the user says otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loaderkit.errors import DatasetError, OptionError, UnlikeKeysError
from loaderkit.graph_joining import join_graphs
from loaderkit.nearest_names import suggest_name
from loaderkit.pyg import is_pyg_data, loaded_pyg
from loaderkit.unlike_keys import find_unlike_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from torch_geometric.data.data import BaseData

    from loaderkit.unlike_keys import UnlikeKey


def holds_graphs(sample: object) -> bool:
    """Tell whether a sample is for PyG to join: a graph, or a nest with one inside.

    Args:
        sample: Of any kind.

    Returns:
        True for ``Data``, ``HeteroData``, their like, and ``TensorFrame``; for dicts,
        lists and tuples that hold one at any depth.
    """
    pyg = loaded_pyg()
    if pyg is None:
        return False
    if isinstance(sample, pyg.joinable):
        return True
    if isinstance(sample, Mapping):
        return any(holds_graphs(value) for value in sample.values())
    return isinstance(sample, list | tuple) and any(map(holds_graphs, sample))


def graphs_in(sample: object) -> Iterator[BaseData]:
    """Find the graphs in a sample: itself, or those in a pair, a dict ..."""
    if loaded_pyg() is None:
        return
    if is_pyg_data(sample):
        yield sample
    elif isinstance(sample, Mapping):
        for value in sample.values():
            yield from graphs_in(value)
    elif isinstance(sample, list | tuple):
        for value in sample:
            yield from graphs_in(value)


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
        DatasetError: Fields of graphs are named, and there is no graph; or a sample
            lacks a key that another one has.
        TypeError: There are graphs beside what PyG does not join, such as None.
    """
    pyg = loaded_pyg()
    # By the first sample, as PyG's own collater decides.
    if pyg is not None and holds_graphs(samples[0]):
        if follow_batch or exclude_keys:
            _warn_of_unknown_keys(samples, follow_batch, exclude_keys)
        # Ours is quicker, and leaves to PyG what it is not sure of.
        batch = None if follow_batch else join_graphs(samples, exclude_keys)
        if batch is not None:
            return batch
        # Only now: what was joined above was seen to have the same keys.
        _refuse_unlike_keys(samples, exclude_keys)
        return pyg.collater(None, list(follow_batch), list(exclude_keys))(samples)
    check_no_keys(follow_batch, exclude_keys, type(samples[0]).__name__)
    _refuse_unlike_keys(samples)
    return others(samples)


def _refuse_unlike_keys(
    samples: Sequence[Any], exclude_keys: Collection[str] = ()
) -> None:
    """Refuse samples with other keys than each other.

    Raises:
        UnlikeKeysError: There are some.
    """
    unlike = find_unlike_key(samples, exclude_keys)
    if unlike is not None:
        absent = f"Sample {unlike.absent_in} of the batch"
        raise unlike_keys_error(unlike, absent, f"sample {unlike.present_in}")


def unlike_keys_error(
    unlike: UnlikeKey, absent_in: str, present_in: str
) -> UnlikeKeysError:
    """Say which sample lacks a field that another one of its batch has.

    Args:
        unlike: The field.
        absent_in: Names the sample that lacks it.
        present_in: Names the one that has it.
    """
    if unlike.kinds is not None:
        where = f" in {unlike.field}" if unlike.field else ""
        present, absent = unlike.kinds
        message = f"{absent_in} has a {absent}{where}, and {present_in} a {present}: "
        message += "they cannot be joined."
        why = (
            "PyG joins all graphs as it does the first, and leaves out what that lacks"
        )
        error = UnlikeKeysError(message, why=why, fix=unlike.fix)
        error.unlike = unlike
        return error
    message = f"{absent_in} lacks {unlike.field}, which {present_in} has: they cannot "
    message += "be joined."
    why = "torch and PyG join the fields of the first sample of a batch, and leave out "
    why += "what only others have"
    error = UnlikeKeysError(message, why=why, fix=unlike.fix)
    error.unlike = unlike
    return error


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
    if not follow_batch and not exclude_keys:
        return
    chosen = {"follow_batch": follow_batch, "exclude_keys": exclude_keys}
    for name, keys in chosen.items():
        if keys:
            message = (
                f"{name}={list(keys)} was given for samples without a graph: {kind}."
            )
            why = "both name fields of PyG's graphs; nothing else is joined by them"
            raise DatasetError(message, why=why, fix=f"drop {name}")


def check_known_keys(
    follow_batch: Collection[str],
    exclude_keys: Collection[str],
    known: Collection[str] | None,
) -> None:
    """Refuse names of fields that no graph has; PyG would ignore them.

    Args:
        follow_batch: As the caller gave it.
        exclude_keys: As the caller gave it.
        known: Names of the fields that the graphs have; None where that is not known.

    Raises:
        OptionError: A name is not among them.
    """
    if known is None:
        return
    for option, name in _unknown_key_error(follow_batch, exclude_keys, known):
        message = f"{option} names {name!r}, a field that no graph of the dataset has."
        fix = suggest_name(name, sorted(known)) if known else f"drop {option}"
        raise OptionError(message, why="it would do nothing", fix=fix)


def known_keys(samples: Iterable[Any], wanted: Collection[str]) -> set[str]:
    """Name the fields of graphs.

    Args:
        samples: What the graphs are in; no more are looked at than is needed.
        wanted: Where these are found, others do not matter.

    Returns:
        The names found so far: of ``wanted`` all that any graph has.
    """
    names: set[str] = set()
    for sample in samples:
        for graph in graphs_in(sample):
            names.update(map(str, graph.keys()))
        if names.issuperset(wanted):
            break
    return names


def _warn_of_unknown_keys(
    samples: list[Any], follow_batch: Collection[str], exclude_keys: Collection[str]
) -> None:
    """Warn of names that do nothing in this batch; another may have such a field."""
    known = known_keys(samples, {*follow_batch, *exclude_keys})
    for option, name in _unknown_key_error(follow_batch, exclude_keys, known):
        text = f"{option} names {name!r}, a field that no graph of this batch has: "
        # Told from this line, whoever joins: Python then shows each text once.
        warnings.warn(text + suggest_name(name, sorted(known)), stacklevel=1)


def _unknown_key_error(
    follow_batch: Collection[str], exclude_keys: Collection[str], known: Collection[str]
) -> Iterator[tuple[str, str]]:
    chosen = {"follow_batch": follow_batch, "exclude_keys": exclude_keys}
    for option, names in chosen.items():
        for name in names:
            if name not in known:
                yield option, name
