"""The samples of a batch, read from the cache only when somebody looks at them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from loaderkit.datasets.base import SafeDataset

    Ints = NDArray[np.int64]


class LazySamples(list[Any]):
    """A list of samples that is filled when it is first looked into.

    torch hands what ``__getitems__`` returns straight to ``collate_fn``, and does not
    say to the dataset which function that is.  Most need a list: they sort it, stack
    it, or ask ``isinstance(samples, list)``, as Hugging Face's tokenizers do.  Only the
    dataset's own ``collate`` does better without the samples.  So this is a list, and
    ``collate`` asks for its ``rows`` instead of looking inside.

    Every method of a list fills it first.  What reads a list's memory without calling
    any sees an empty one: that is torch's C++ where it takes a list of tensors, as
    ``torch.stack(samples)`` does.  Samples that are tensors are therefore never given
    in a lazy list (``SafeDataset.__getitems__``).

    Args:
        samples: What is in it already, as for any list: trainers copy a list by
            ``type(samples)(...)``.
    """

    def __init__(self, samples: Iterable[Any] = ()) -> None:
        super().__init__(samples)
        self.dataset: SafeDataset | None = None
        """Reads the samples; None when they were read, and may have been changed."""
        self.rows: Ints = np.empty(0, np.int64)
        """The rows that are read from it ``[B]``."""

    @classmethod
    def of(cls, dataset: SafeDataset, rows: Ints) -> LazySamples:
        """Make a list of samples that are not read yet.

        Args:
            dataset: Reads them.
            rows: Their rows in it ``[B]``.
        """
        samples = cls()
        samples.dataset, samples.rows = dataset, rows
        return samples

    def fill(self) -> None:
        """Read the samples, unless they were read."""
        if self.dataset is not None:
            super().extend([self.dataset[row] for row in self.rows.tolist()])
            self.dataset = None

    def __len__(self) -> int:
        return super().__len__() if self.dataset is None else len(self.rows)

    def __radd__(self, other: list[Any]) -> list[Any]:
        # list's own ``other + self`` would read our memory without calling a method.
        return other + list(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[type[list[Any]], tuple[list[Any]]]:
        """Travel, and be copied, as a plain list."""
        return list, (list(self),)


def _after_filling(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: LazySamples, *args: Any, **kwargs: Any) -> Any:
        self.fill()
        return method(self, *args, **kwargs)

    return call


_METHODS = """
__add__ __contains__ __delitem__ __eq__ __ge__ __getitem__ __gt__ __iadd__ __imul__
__iter__ __le__ __lt__ __mul__ __ne__ __repr__ __reversed__ __rmul__ __setitem__
append clear copy count extend index insert pop remove reverse sort
"""
for _name in _METHODS.split():
    setattr(LazySamples, _name, _after_filling(getattr(list, _name)))
