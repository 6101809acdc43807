"""The start of a loader's workers, and what is said where the system refuses them."""

from __future__ import annotations

import errno
import multiprocessing
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderkit.loader.users_errors import error_about
from loaderkit.loader.worker_deaths import (
    SERVER_LOST,
    cause_of,
    is_lost_with_its_server,
)
from loaderkit.loader.worker_processes import NotingContext
from loaderkit.memory.host import read_host
from loaderkit.units import count_of

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from torch.utils.data import DataLoader

_FEW_FILES = 256
"""Of a process that may have fewer files open the limit is probably why it ended.
Chosen: what macOS gives, of all systems the fewest."""
_PYTHONS_FOLDER = Path(multiprocessing.__file__).parent
"""Whose code asks the fork server, and writes to new processes."""


class Refusal(NamedTuple):
    """Why workers could not start."""

    why: str
    fix: str
    """What to do."""


_REFUSALS = {
    errno.EAGAIN: Refusal(
        "the system starts no more processes for you",
        "num_workers=0 or fewer workers, or a higher ulimit -u (docker: --pids-limit)",
    ),
    errno.ENOMEM: Refusal(
        "the system has no memory for another process",
        "num_workers=0, or fewer workers",
    ),
    errno.EMFILE: Refusal(
        "each worker takes some files, and the process has as many open as it may",
        "ulimit -n 4096, or fewer workers",
    ),
    errno.ENFILE: Refusal(
        "each worker takes some files, and the system has as many open as it may",
        "num_workers=0, or fewer workers",
    ),
    errno.ENOSPC: Refusal(
        "workers need locks in /dev/shm, which has become full",
        "num_workers=0, or a larger one (docker run --shm-size=1g)",
    ),
}
"""What a system says that starts no more workers, by its number."""


def start_workers(inner_loader: DataLoader[Any]) -> Any:
    """Begin to iterate over an inner loader.

    Raises:
        LoaderError: The system refused a process, or what it needs; or a process ended
            that starts workers, or the worker itself before it was sent all.
    """
    context = inner_loader.multiprocessing_context
    if not isinstance(context, NotingContext):
        return iter(inner_loader)
    try:
        iterator = iter(inner_loader)
        _send_rest(context, iterator)
    except BaseException as error:
        # Those before the one that could not start.
        context.end_processes()
        if not isinstance(error, OSError | EOFError):
            raise  # of what is sent to workers, say
        refusal = _find_refusal(error, context)
        if refusal is None:
            raise
        message = f"{count_of(inner_loader.num_workers, 'workers')} could not start: "
        raise error_about(message, error, refusal.fix, why=refusal.why) from error
    return iterator


def _send_rest(context: NotingContext, iterator: Any) -> None:
    """Send workers the dataset; end the iterator where one of them has ended."""
    try:
        context.send_rest()
    except ConnectionError:
        # torch has no public way; its processes have been ended.
        iterator._shutdown_workers()
        raise


def _find_refusal(error: OSError | EOFError, context: NotingContext) -> Refusal | None:
    """Find what an error means that was raised as workers were started.

    Args:
        error: As it was raised.
        context: Which started them.

    Returns:
        None where it is something else.
    """
    if context.lost_process is not None:
        return _explain_lost(context.lost_process)
    if isinstance(error, EOFError | ConnectionError):
        # The user's __reduce__, say, may raise these as well.
        raising = traceback.extract_tb(error.__traceback__)[-1]
        if Path(raising.filename).parent != _PYTHONS_FOLDER:
            return None
        return explain_lost_starter(context.get_start_method(), read_host().files)
    return _REFUSALS.get(error.errno or 0)


def _explain_lost(process: BaseProcess) -> Refusal:
    """Say why a worker ended before it had read what it was sent."""
    if is_lost_with_its_server(process):
        return Refusal(*SERVER_LOST)
    code = process.exitcode
    if code is not None and code < 0:
        cause = cause_of(code, read_host(), out_of_memory=False)
        return Refusal(
            f"a worker ended before it was sent the dataset: {cause.why}", cause.fix
        )
    why = f"a worker ended with exit code {code} before it was sent the dataset; where "
    why += "an error ended it, its traceback is on stderr"
    fix = "what the traceback says, or look for sys.exit in the main module, which a "
    fix += "worker imports anew; or num_workers=0"
    return Refusal(why, fix)


def explain_lost_starter(method: str, most_files: int | None) -> Refusal:
    r"""Say why the other end of a pipe or socket ended while a worker was started.

    The fork server is a process like others: it has this one's limits, and ends by an
    error where it meets one.  This one sees no more than that nobody answers.

    Args:
        method: How workers start.
        most_files: How many files a process may have open; None where nothing tells.

    >>> print(*explain_lost_starter("spawn", 1024), sep="\n")
    a worker ended before it was sent the dataset; its traceback is on stderr
    what the traceback says (a worker imports the main module anew), or num_workers=0
    >>> print(*explain_lost_starter("forkserver", 20), sep="\n")
    the fork server, which starts workers, ended; probably it has as many files open as it may (20)
    ulimit -n 4096, or fewer workers
    """  # noqa: E501 -- the reason is one line
    if method != "forkserver":
        why = (
            "a worker ended before it was sent the dataset; its traceback is on stderr"
        )
        fix = "what the traceback says (a worker imports the main module anew), "
        return Refusal(why, fix + "or num_workers=0")
    why = "the fork server, which starts workers, ended"
    if most_files is not None and most_files < _FEW_FILES:
        why += f"; probably it has as many files open as it may ({most_files})"
        return Refusal(why, _REFUSALS[errno.EMFILE].fix)
    why += ", or the worker did; its traceback, if it was not killed, is on stderr"
    fix = "what the traceback says (either imports the main module anew; the server "
    fix += "keeps the limits that it was started with), or num_workers=0"
    return Refusal(why, fix)
