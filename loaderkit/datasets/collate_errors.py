"""What torch and PyG say of samples that they cannot join, as one error of ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderkit.datasets.gathering import UnlikeShapesError
from loaderkit.error_texts import is_out_of_memory
from loaderkit.errors import DatasetError, LoaderkitError
from loaderkit.library_files import is_library_file
from loaderkit.stand_ins import value_in_place_of_none
from loaderkit.unlike_graphs import find_unlike_field
from loaderkit.unlike_keys import find_none
from loaderkit.value_words import kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from loaderkit.unlike_graphs import UnlikeField
    from loaderkit.unlike_keys import NoneBeside

_PACKAGE = Path(__file__).parents[1]

_COLLATE_ERRORS = (
    *(AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError),
    *(RuntimeError, NotImplementedError, AssertionError),
)
"""What torch and PyG say of samples that they cannot join."""


class Collating:
    """A block that turns what torch or PyG say of unlike samples into our error.

    What an allocator raises passes through: trainers that try a smaller batch know
    torch's errors, and samples of another form would take as much.

    A class, because every batch is made in one: a generator takes 2 us more.

    Args:
        samples: What is joined, where it is in memory.
        field: What leads to them, as code writes it; empty for whole samples.

    Raises:
        DatasetError: They could not be joined; it names their error.
    """

    __slots__ = ("_field", "_samples")

    def __init__(self, samples: Sequence[Any] = (), field: str = "") -> None:
        self._samples, self._field = samples, field

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
        if is_out_of_memory(error):
            return
        message = f"The samples of this batch cannot be joined: {error!r:.300}."
        why = "torch or PyG cannot join what they hold, or they are built differently"
        fix = "give them one form in load() or transform, or use a batch size of 1"
        if _is_raised_by_joining(traceback):
            if _says_of_none(error):
                none = _find_none(self._samples, self._field)
                message = "The samples of this batch cannot be joined: "
                message += _where_none_is(none)
                why = f"tensors and numbers can be joined, not None: {error!r:.200}"
                wanted = "f"
                if none is not None and none.field:
                    wanted = f"lambda sample: sample{none.field} is not None"
                value = value_in_place_of_none(None if none is None else none.value)
                fix = (
                    f"put {value} in its place in load() or transform, or "
                    f"leave these samples out: dataset.filter({wanted})"
                )
            elif isinstance(error, AttributeError) and error.obj is None:
                message = "The samples of this batch cannot be joined: one is None."
                why = "each is asked for its fields"
                fix = "dataset.filter(lambda sample: sample is not None)"
            else:
                field = _find_unlike_field(self._samples)
                if field is not None:
                    message = "The samples of this batch cannot be joined: "
                    message += f"{error!r:.200}."
                    why, fix = field
        raise DatasetError(message, why=why, fix=fix) from error


def _find_none(samples: Sequence[Any], field: str) -> NoneBeside | None:
    try:
        return find_none(samples, field)
    except Exception:  # noqa: BLE001 -- samples may be of any class
        return None


def _find_unlike_field(samples: Sequence[Any]) -> UnlikeField | None:
    try:
        return find_unlike_field(samples) if samples else None
    except Exception:  # noqa: BLE001 -- samples may be of any class
        return None


def _where_none_is(none: NoneBeside | None) -> str:
    """Say which field is None in which sample of a batch, and what it is elsewhere."""
    if none is None:
        return "a field of some is None."
    name = f"sample{none.field}" if none.field else "a sample"
    return (
        f"{name} is None in sample {none.none_in} of the batch, and "
        f"{kind_of(none.value)} in sample {none.beside}."
    )


def _says_of_none(error: BaseException) -> bool:
    """Tell whether torch met None where it had begun to join tensors or numbers."""
    return isinstance(error, TypeError | RuntimeError) and "NoneType" in str(error)


def _is_raised_by_joining(traceback: TracebackType | None) -> bool:
    """Tell whether code of a library or ours raised an error.

    What code of the user's raises, such as an ``__inc__``, may mean anything.
    """
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    file = traceback.tb_frame.f_code.co_filename
    return is_library_file(file) or Path(file).is_relative_to(_PACKAGE)
