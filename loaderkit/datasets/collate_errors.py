"""What torch and PyG say of samples that they cannot join, as one error of ours."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from loaderkit.datasets.gathering import UnlikeShapesError
from loaderkit.errors import DatasetError, LoaderkitError

if TYPE_CHECKING:
    from collections.abc import Iterator

_COLLATE_ERRORS = (
    *(AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError),
    *(RuntimeError, NotImplementedError, AssertionError, MemoryError),
)
"""What torch and PyG say of samples that they cannot join."""


@contextlib.contextmanager
def collating() -> Iterator[None]:
    """Turn what torch or PyG say of samples that cannot be joined into our error.

    Raises:
        DatasetError: They could not be joined; it names their error.
    """
    try:
        yield
    except (LoaderkitError, UnlikeShapesError):
        raise
    except _COLLATE_ERRORS as error:
        message = f"The samples of this batch cannot be joined: {error!r:.300}."
        why = "torch or PyG cannot join what they hold, or they are built differently"
        fix = "give them one form in load() or transform, or use a batch size of 1"
        raise DatasetError(message, why=why, fix=fix) from error
