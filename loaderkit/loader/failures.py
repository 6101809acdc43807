"""Errors on their way from where batches are made to the loop."""

from __future__ import annotations

import pickle
import traceback

from torch.utils.data import get_worker_info

from loaderkit.errors import LoaderError, LoaderkitError
from loaderkit.interrupts import is_of_code
from loaderkit.loader.users_errors import error_about
from loaderkit.sending import how_to_unpickle


class WorkerTraceback(Exception):  # noqa: N818 -- a text that stands where errors do
    """The traceback of an error in a worker, shown as the error's cause.

    A traceback cannot be sent between processes; ``multiprocessing.Pool`` and
    ``concurrent.futures`` show theirs in this way too.
    """

    def __str__(self) -> str:
        return f"in a worker of the loader:\n\n{self.args[0]}"


class Failure:
    """An error of a worker, sent in place of the batch that could not be made.

    torch would send its text alone, and raise another error with that text.

    Args:
        error: As it was raised; what caused it goes along.
        is_of_start: The worker could not begin, and makes no batches in later epochs
            either.
    """

    def __init__(self, error: BaseException, *, is_of_start: bool = False) -> None:
        self.is_of_start = is_of_start
        self.traceback = "".join(traceback.format_exception(error))
        self.error = _pickle_error(error)
        if not self.error:
            # A local class, say, cannot be sent.
            self.error = _pickle_error(self._without_its_type(error))
        self.cause = b""
        if error.__cause__ is not None:
            self.cause = _pickle_error(error.__cause__)

    @classmethod
    def of_start(cls, what: str, error: Exception, fix: str) -> Failure:
        """Tell an error of the user's code for which a worker could not begin.

        Args:
            what: What could not be done, to be followed by the error.
            error: As the user's code raised it; one of ours says all that itself.
            fix: What to do.
        """
        if isinstance(error, LoaderkitError):
            return cls(error, is_of_start=True)
        loader_error = error_about(what, error, fix)
        loader_error.__cause__ = error
        return cls(loader_error, is_of_start=True)

    def _without_its_type(self, error: BaseException) -> LoaderError:
        """Say the same in an error that can be sent."""
        if isinstance(error, LoaderkitError):
            return LoaderError(error.what, why=error.why, fix=error.fix)
        return LoaderError(self.traceback)

    def rebuilt(self) -> BaseException:
        """Make the error again, in the process that trains."""
        error: BaseException = pickle.loads(self.error)
        cause: BaseException = WorkerTraceback(self.traceback)
        if self.cause:
            users_error: BaseException = pickle.loads(self.cause)
            # As ``raise ... from`` sets it: the class may guard its attributes.
            BaseException.__setattr__(users_error, "__cause__", cause)
            cause = users_error
        error.__cause__ = cause
        return error


def is_sent(error: BaseException) -> bool:
    """Say whether what ended the reading of a batch is sent in the batch's place.

    In a worker it is, and the worker lives on.  So is what is no ``Exception``, such as
    ``SystemExit`` or a ``KeyboardInterrupt`` that code raises: no error of a sample, it
    would end the worker and be told as its death, while without workers the loop gets
    it as it is.

    Args:
        error: As it was raised.

    Returns:
        False without workers, and for a Ctrl-C: that goes to every process of a
        terminal, and a worker ends by it at once.
    """
    is_ctrl_c = isinstance(error, KeyboardInterrupt) and not is_of_code(error)
    return get_worker_info() is not None and not is_ctrl_c


class LocalFailure:
    """An error of a stream in this process, on its way to the loop.

    A generator that raised it would end with it, but the stream may have more.

    Args:
        error: As it was raised.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def rebuilt(self) -> BaseException:
        """Give the error."""
        return self.error


class NotRebuilt:
    """Stands for a batch that could not be unpickled where it was received.

    Args:
        error: What the code of the user's objects raised.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def about(self, what_it_is: str) -> LoaderError:
        """Make the error that tells of it, to be raised from the user's.

        Args:
            what_it_is: The batch, for the middle of a sentence.
        """
        message = f"{what_it_is} could not be unpickled as it came from its worker: "
        own_code = "correct __setstate__ or __reduce__ of what is in it"
        fix = f"{how_to_unpickle(self.error, own_code)}; num_workers=0 pickles nothing"
        return error_about(message, self.error, fix)


def _pickle_error(error: BaseException) -> bytes:
    """Pickle an error; nothing where it cannot be built again from that."""
    try:
        pickled = pickle.dumps(error)
        rebuilt = pickle.loads(pickled)
    except Exception:  # noqa: BLE001 -- its class is the user's, and may raise anything
        return b""
    if not isinstance(rebuilt, BaseException):
        return b""
    # A __reduce__ of the user's may make something else of it; its traceback does not.
    is_same = type(rebuilt) is type(error) or str(rebuilt) == str(error)
    return pickled if is_same else b""


FAILURES = (Failure, LocalFailure, NotRebuilt)
"""What comes in the place of a batch."""
