"""Errors of the processes that pack, on their way to the one that asked them to."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass

from loaderkit.errors import DatasetError
from loaderkit.fixes import Fix, Setting


@dataclass(frozen=True)
class TaskFailure:
    """An error of a worker, on its way."""

    text: str
    """Its traceback."""
    pickled: bytes = b""
    """The error itself; empty where it cannot be pickled."""

    @classmethod
    def of(cls, error: BaseException, where: str) -> TaskFailure:
        """Take up an error that is being handled, with the traceback as its note."""
        text = traceback.format_exc()
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"{where}:\n{text}")
        return cls(text, pickle_or_nothing(error))

    def rebuild(self) -> BaseException:
        """Make the error anew, or one that holds its traceback."""
        try:
            error: object = pickle.loads(self.pickled)
        except Exception:  # noqa: BLE001 -- unpickling runs code of the user's error
            error = None
        if isinstance(error, BaseException):
            return error
        why = "the error itself could not be sent to this process"
        raised_here = " to have it raised here; finished shards are kept"
        fix = Fix.of("pack with ", Setting("workers", 0), raised_here)
        message = f"A packing worker failed.\n{self.text}"
        return DatasetError(message, why=why, fix=fix)


def pickle_or_nothing(error: BaseException) -> bytes:
    """Pickle an error; b"" where that cannot be done, or not be undone."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 -- pickling runs code of the user's error
        return b""
    return pickled
