"""How the samples of a batch are joined, and what is done with a batch once joined."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from loaderkit.composed_joining import own_collate
from loaderkit.dataset_protocol import gathers_batches, innermost
from loaderkit.joining import join
from loaderkit.memory.shm_batch import default_collate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    Collate: TypeAlias = Callable[[Any], Any]


def is_gathering(dataset: object, collate: Collate | None = None) -> bool:
    """Tell whether batches come from a cache, without running code of a user.

    Args:
        dataset: What is read.
        collate: How its samples are joined; the dataset's own way if None.  Any other
            is a user's, and gets samples.
    """
    if not gathers_batches(dataset):
        return False
    # ``collate_of`` binds follow_batch and exclude_keys to the dataset's own method.
    if isinstance(collate, functools.partial):
        collate = collate.func
    # ==, since a bound method is a new object each time that it is asked for.
    return collate is None or collate == innermost(dataset).collate


def collate_of(
    dataset: object,
    follow_batch: Sequence[str] | None,
    exclude_keys: Sequence[str] | None,
) -> Collate:
    """Choose how samples are joined.

    Args:
        dataset: One of ours joins its own samples.
        follow_batch: As in PyG.
        exclude_keys: As in PyG.

    Returns:
        A function of a list of samples, that can be pickled.
    """
    collate = own_collate(dataset)
    if collate is None:
        return DefaultCollate(list(follow_batch or ()), list(exclude_keys or ()))
    for_graphs = {"follow_batch": follow_batch, "exclude_keys": exclude_keys}
    chosen = {name: keys for name, keys in for_graphs.items() if keys is not None}
    return functools.partial(collate, **chosen) if chosen else collate


class DefaultCollate:
    """Joins graphs as PyG does, and anything else as torch does.

    Args:
        follow_batch: Fields that get a ``_batch`` vector of their own.
        exclude_keys: Fields that are left out.
    """

    def __init__(self, follow_batch: list[str], exclude_keys: list[str]) -> None:
        self.follow_batch, self.exclude_keys = follow_batch, exclude_keys

    def __call__(self, samples: Any) -> Any:
        """Join a list of samples; what is joined already passes.

        ``__getitems__`` may give samples in any sequence: torch joins a tuple, too.
        One with named fields is a batch.
        """
        if type(samples) is tuple or isinstance(samples, Iterator):
            samples = list(samples)
        if not isinstance(samples, list):
            return samples
        return join(samples, default_collate, self.follow_batch, self.exclude_keys)


class OneByOne:
    """Gives the one sample of a list as it is: there are no batches.

    Args:
        convert: The loader's ``collate_fn``, which gets a single sample then, as torch
            has it.
    """

    def __init__(self, convert: Collate) -> None:
        self.convert = convert

    def __call__(self, samples: list[Any]) -> Any:
        """Convert the only sample."""
        [sample] = samples
        return self.convert(sample)


class JoinThenTransform:
    """Joins samples, and calls the user's ``batch_transform`` with the batch.

    Args:
        join: Joins a list of samples.
        transform: Called with each batch; may change it in place; returns a batch.
    """

    def __init__(self, join: Collate, transform: Collate) -> None:
        self.join, self.transform = join, transform

    def __call__(self, samples: Any) -> Any:
        """Join a list of samples, and transform the batch."""
        return self.transform(self.join(samples))


def split_transform(collate: Collate) -> tuple[Collate, Collate | None]:
    """Tell what joins the samples from what is done with the batch.

    Args:
        collate: As a loader has it.

    Returns:
        What joins them, and the user's ``batch_transform``; None where there is none.
    """
    if isinstance(collate, JoinThenTransform):
        return collate.join, collate.transform
    return collate, None
