"""What torch and PyG say of samples that they cannot join, as one error of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.datasets.gathering import UnlikeShapesError
from loaderkit.errors import DatasetError, LoaderkitError

if TYPE_CHECKING:
    from types import TracebackType

_COLLATE_ERRORS = (
    *(AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError),
    *(RuntimeError, NotImplementedError, AssertionError, MemoryError),
)
"""What torch and PyG say of samples that they cannot join."""


class Collating:
    """A block that turns what torch or PyG say of unlike samples into our error.

    A class, because every batch is made in one: a generator takes 2 us more.

    Raises:
        DatasetError: They could not be joined; it names their error.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        is_ours = isinstance(error, LoaderkitError | UnlikeShapesError)
        if is_ours or not isinstance(error, _COLLATE_ERRORS):
            return
        message = f"The samples of this batch cannot be joined: {error!r:.300}."
        why = "torch or PyG cannot join what they hold, or they are built differently"
        fix = "give them one form in load() or transform, or use a batch size of 1"
        raise DatasetError(message, why=why, fix=fix) from error
