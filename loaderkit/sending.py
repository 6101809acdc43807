"""Whether workers that are started anew can be sent what they need, and if not, why.

And whether they may be forked in place of that.
"""

from __future__ import annotations

import io
import multiprocessing
import pickle
import re
import sys
import types
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from loaderkit.error_texts import error_in_words
from loaderkit.forking import find_fork_hazard
from loaderkit.memory.tensorless_pickles import named_in_pickle
from loaderkit.spawning import GUARD_MAIN, why_no_new_process, why_not_importable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

_SMALL_BYTES = 1 << 20
"""Storages of fewer bytes may travel by value.  Chosen: to copy as many takes 50 us,
about what it takes to make a segment, and nobody has thousands of larger ones."""
_MOST_SHARED = 64
"""So many small storages travel as shared memory all the same, as torch has it: what a
dataset writes to one of them, every process sees.  Chosen: a sixteenth of the files
that a process may usually have open, and more tensors than a dataset has names for."""

_MOST_SENT_BY_PYTHON = 4096
"""Bytes that travel with a process as it is started.  Derived: macOS's pipes hold 16
KiB, the smallest of the systems, and what Python and torch send beside these takes some
3."""


class Obstacle(NamedTuple):
    """What keeps objects from travelling to a process that is started anew."""

    why: str
    """The part that cannot be pickled, or made again from its pickle, and why; or why
    no process can be started anew."""
    fix: str


def find_obstacle(parts: Mapping[str, Any], method: str) -> Obstacle | None:
    """Find what keeps objects from travelling to a worker that is started anew.

    Args:
        parts: Objects by name.
        method: How the worker would be started.

    Returns:
        The first obstacle; None where there is none.
    """
    reason = why_no_new_process(method)
    return Obstacle(reason, GUARD_MAIN) if reason else _obstacle_in_parts(parts)


def can_fork(**parts: object) -> bool:
    """Tell whether forked processes would find all as it is in this one.

    Args:
        parts: What they would use, by name.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return False
    # macOS can fork, but its own libraries may end a process that did.
    if sys.platform == "darwin":
        return False
    drivers: tuple[Any, ...] = (torch.cuda, torch.xpu)
    if any(driver.is_initialized() for driver in drivers):
        return False  # what has begun with either does not survive a fork
    return find_fork_hazard(**parts) is None


def _obstacle_in_parts(parts: Mapping[str, Any]) -> Obstacle | None:
    for name, value in parts.items():
        obstacle = _obstacle_in_part(name, value)
        if obstacle is not None:
            return obstacle
    return None


def _obstacle_in_part(name: str, part: Any) -> Obstacle | None:
    try:
        named_objects = named_in_pickle(part)
    except Exception as error:  # noqa: BLE001 - any class may refuse in any way
        inside = {f"{name}.{key}": value for key, value in _sent_state(part).items()}
        why = f"{name}: {error_in_words(error)}"
        return _obstacle_in_parts(inside) or Obstacle(why, _fix_of_pickling(part))
    for named in named_objects:
        reason = why_not_importable(named)
        if reason:
            return Obstacle(f"{name}: {reason}", _WRITE_INTO_FILE)
    return None


_WRITE_INTO_FILE = "write it into a file beside, such as data.py, and import it"


def _fix_of_pickling(part: Any) -> str:
    """Say what to do about an object that pickle refuses."""
    named = part if isinstance(part, type | types.FunctionType) else type(part)
    name = named.__qualname__
    if name.endswith("<lambda>"):
        return "def a function at the top of a module in place of the lambda"
    if "<locals>" in name:
        return f"define {name.rpartition('.')[2]} at the top of a module"
    return "make it when a sample is first read, and leave it out in __getstate__"


def _sent_state(part: Any) -> Mapping[str, Any]:
    """Give the attributes of an object that its pickle has, by name.

    Not its ``__dict__``: an object may leave out of its pickle what cannot be sent.  Of
    one whose class cannot be named there is none, since no attribute is to blame.
    """
    try:
        ForkingPickler.dumps(type(part))
        reduced = part.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - it runs code of the user's objects
        return {}
    state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
    if isinstance(state, Sent):
        state = state.value
    if isinstance(state, tuple) and len(state) == 2:  # of a class with slots
        state = state[1]
    return state if isinstance(state, dict) else {}


class NotReceived:
    """Stands in a new process for what could not be unpickled there.

    Args:
        error: What the code of the user's objects raised.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


class Sent:
    """What a new process is sent, however many tensors it holds.

    torch sends each storage as shared memory, whose file stays open in both processes
    for as long as it lives: some hundred graphs take all the files that a process may
    have open.  So of many small storages all but the first travel by value.

    Args:
        value: What is sent; tensors that share memory still do so there.  Where it is
            received it may be a ``NotReceived``: raised there, its error would end the
            process before anybody could send it back.
        outbox: Sends what is large, behind the start of the process; None sends all of
            it as Python does.
    """

    def __init__(self, value: Any, outbox: Outbox | None = None) -> None:
        self.value, self._outbox = value, outbox

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        stream = io.BytesIO()
        _SendingPickler(stream, pickle.HIGHEST_PROTOCOL).dump(self.value)
        content = stream.getvalue()
        if self._outbox is None or len(content) <= _MOST_SENT_BY_PYTHON:
            return _receive, (content,)
        return _receive_later, (self._outbox.put(content),)


class Outbox:
    """Sends to a new process what is too large for the pipe through which it starts.

    Up to Python 3.13 that pipe is open for reading in this process too, so that Python
    waits for ever for one that ended before it had read more than the pipe holds (an
    error in the main module, a signal).  So what is large goes through a pipe of its
    own, once the process has been started, and whoever sends to one that has ended is
    told at once.
    """

    def __init__(self) -> None:
        self._waiting: list[_Parcel] = []

    def put(self, content: bytes) -> Connection[Any, Any]:
        """Keep what is to be sent.

        Args:
            content: Any bytes.

        Returns:
            From which they are read, by the process that is being started.
        """
        reader, writer = multiprocessing.Pipe(duplex=False)
        self._waiting.append(_Parcel(content, reader, writer))
        return reader

    @property
    def waiting(self) -> int:
        """For how many processes something is kept."""
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """What is kept takes so many bytes."""
        return sum(len(parcel.content) for parcel in self._waiting)

    def send(self) -> None:
        """Send all that is kept, to processes that have been started since.

        Raises:
            ConnectionError: One of them has ended before it had read all.
        """
        while self._waiting:
            parcel = self._waiting.pop(0)
            with parcel.writer:
                # Read by that process alone from here on: its end is then noticed.
                parcel.reader.close()
                parcel.writer.send_bytes(parcel.content)

    def clear(self) -> None:
        """Let go of what no process will read."""
        for parcel in self._waiting:
            parcel.reader.close()
            parcel.writer.close()
        self._waiting.clear()


class _Parcel(NamedTuple):
    """What a process is to be sent, and the pipe for it."""

    content: bytes
    reader: Connection[Any, Any]
    writer: Connection[Any, Any]


def how_to_unpickle(error: Exception, otherwise: str) -> str:
    """Say what to do where something could not be unpickled in another process.

    Args:
        error: As it was raised there.
        otherwise: What to do where it is an error of an object's own code.

    >>> text = "Can't get attribute 'Crop' on <module '__main__' (built-in)>"
    >>> how_to_unpickle(AttributeError(text), "")  # doctest: +NORMALIZE_WHITESPACE
    "define Crop at the top of the script, or in a module that it imports: not behind
    if __name__ == '__main__', within a function or in a notebook's cell"
    >>> how_to_unpickle(ModuleNotFoundError("No module named 'a'", name="a"), "")
    'have a where new processes find modules: beside the script, on PYTHONPATH, or installed'
    """  # noqa: E501 -- the advice is one line
    if isinstance(error, ModuleNotFoundError) and error.name:
        where = "beside the script, on PYTHONPATH, or installed"
        return f"have {error.name} where new processes find modules: {where}"
    missing = _MISSING_NAME.match(str(error))
    if not isinstance(error, AttributeError) or missing is None:
        return otherwise
    name, module = missing["name"], missing["module"]
    if module in {"__main__", "__mp_main__"}:
        return (
            f"define {name} at the top of the script, or in a module that it imports: "
            "not behind if __name__ == '__main__', within a function or in a "
            "notebook's cell"
        )
    return f"define {name} at the top of {module}: it is not there after an import"


_MISSING_NAME = re.compile(
    r"Can't (get|resolve) \w+ '(?P<name>[^']+)' on <module '(?P<module>[^']+)'"
)
"""What pickle says of a class or function that a module lacks."""


class SentWhole:
    """A class whose objects travel to a new process as ``Sent`` does.

    Args:
        outbox: See ``Sent``.
    """

    _outbox: Outbox | None = None

    def __init__(self, outbox: Outbox | None) -> None:
        self._outbox = outbox

    def __getstate__(self) -> Sent:
        attributes = {k: v for k, v in vars(self).items() if k != "_outbox"}
        return Sent(attributes, self._outbox)

    def __setstate__(self, sent: Sent) -> None:
        if isinstance(sent.value, NotReceived):
            self.begin_without_state(sent.value.error)
        else:
            vars(self).update(sent.value)

    def begin_without_state(self, error: Exception) -> None:
        """Become an object that tells of an error; it has no attributes yet.

        Args:
            error: Because of which this one could not be unpickled.
        """
        raise NotImplementedError


class _SendingPickler(ForkingPickler):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._small_storages = 0

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.UntypedStorage or value.device.type != "cpu":
            return NotImplemented
        if value.nbytes() >= _SMALL_BYTES:
            return NotImplemented
        self._small_storages += 1
        # What the user has shared stays shared.
        if self._small_storages <= _MOST_SHARED or value.is_shared():
            return NotImplemented
        content = torch.empty(0, dtype=torch.uint8).set_(value)
        return _make_storage, (content.numpy().tobytes(),)


def _make_storage(content: bytes) -> torch.UntypedStorage:
    # Memory of torch's own: what it sees of a buffer of Python's cannot be resized.
    numbers = torch.empty(len(content), dtype=torch.uint8)
    numbers.numpy()[:] = np.frombuffer(content, np.uint8)
    return numbers.untyped_storage()


def _receive_later(reader: Connection[Any, Any]) -> Sent:
    with reader:
        return _receive(reader.recv_bytes())


def _receive(pickled: bytes) -> Sent:
    try:
        return Sent(pickle.loads(pickled))
    except Exception as error:  # noqa: BLE001 -- it runs code of the user's objects
        return Sent(NotReceived(error))
