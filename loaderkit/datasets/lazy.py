"""The samples of a batch, read from the cache only when somebody looks at them."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from loaderkit.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from loaderkit.array_types import Ints
    from loaderkit.datasets.batch_joining import BatchJoining
    from loaderkit.memory.page_locked import PageLockedBatch

_NO_ROWS: Ints = np.empty(0, np.int64)
_NO_ROWS.flags.writeable = False


class LazySamples(list[Any]):
    """A list of samples that is filled when it is first looked into.

    torch hands what ``__getitems__`` returns straight to ``collate_fn``, and does not
    say to the dataset which function that is.  Most need a list: they sort it, stack
    it, or ask ``isinstance(samples, list)``, as Hugging Face's tokenizers do.  Only the
    dataset's own ``collate`` does better without the samples.  So this is a list, and
    ``collate`` asks for its ``rows`` instead of looking inside.

    Every method of a list fills it first.  C code may read a list's memory without
    calling any (``pyarrow.array``, ``orjson.dumps``, ``heapq``, torch's C++), so it is
    given out only where the batch before went to ``collate`` (``LastGiven``).  What
    such code sees then are objects that refuse all use, and not an empty list.

    Args:
        samples: What is in it already, as for any list: trainers copy a list by
            ``type(samples)(...)``.
    """

    def __init__(self, samples: Iterable[Any] = ()) -> None:
        super().__init__(samples)
        self.dataset: BatchJoining[Any] | None = None
        """Reads the samples; None when they were read, and may have been changed."""
        self.rows: Ints = _NO_ROWS
        """The rows that are read from it ``[B]``."""
        self.page_locked: PageLockedBatch | None = None
        """Where ``collate`` makes the batch; None for ordinary memory."""

    @classmethod
    def of(
        cls,
        dataset: BatchJoining[Any],
        rows: Ints,
        page_locked: PageLockedBatch | None = None,
    ) -> LazySamples:
        """Make a list of samples that are not read yet.

        Args:
            dataset: Reads them.
            rows: Their rows in it ``[B]``.
            page_locked: Where ``collate`` makes the batch; None for ordinary memory.
        """
        samples = cls([_UNREAD] * len(rows))
        samples.dataset, samples.rows = dataset, rows
        samples.page_locked = page_locked
        return samples

    def fill(self) -> None:
        """Read the samples, unless they were read."""
        dataset = self.dataset
        if dataset is None:
            return
        super().__setitem__(slice(None), dataset.read_together(self.rows.tolist()))
        self.dataset = None
        dataset.gives_unread = False

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


class UnreadSample:
    """Stands where a sample was not read; refuses all that could be done with it."""

    def _refuse(self, *_: object) -> NoReturn:
        message = "A batch's samples were looked at past the list that holds them."
        why = "this list is filled by its methods, and C code read it without calling "
        why += "one; so it is where collate of this dataset joined the batch before"
        fix = "collate_fn=lambda samples: f(list(samples))"
        raise DatasetError(message, why=why, fix=fix)

    __getattr__ = __getitem__ = __iter__ = __len__ = __contains__ = __call__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = _refuse
    __int__ = __float__ = __index__ = __str__ = __hash__ = __reduce_ex__ = _refuse

    def __repr__(self) -> str:  # debuggers show it
        return "<a sample that was not read>"


_UNREAD = UnreadSample()


class LastGiven:
    """Which dataset gave the last list of samples, and which list that was.

    A plain list does not say where it comes from.  The ``collate`` that gets it asks
    here, so that the dataset need not read the samples of its next batch.
    """

    def __init__(self) -> None:
        self._list_id = 0
        self._giver: Callable[[], BatchJoining[Any] | None] = lambda: None

    def note(self, samples: list[Any], giver: BatchJoining[Any]) -> None:
        """Keep who gave a list; neither is kept alive."""
        self._list_id, self._giver = id(samples), weakref.ref(giver)

    def giver_of(self, samples: list[Any]) -> BatchJoining[Any] | None:
        """Tell who gave a list, if it is the last one.

        Another list may lie where that one did.  Then a dataset gives one list unread
        that ``collate`` does not get, which is filled when it is looked into.
        """
        return self._giver() if id(samples) == self._list_id else None


LAST_GIVEN = LastGiven()
"""Of this process; threads may disturb each other, which costs time alone."""
