"""Random numbers of a batch follow from its seed; those of the training go on after it.

Asking numpy and random for their states, and giving them back, takes 60 us a batch, and
20 KB of Python numbers.  Both are a Mersenne Twister, whose 2,500 bytes are copied
where they lie instead, and only when some have changed; that they lie there is checked
once, and if they do not, they are asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

_BYTES = 624 * 4 + 4
"""The words of a Mersenne Twister, and how many of them are used up."""
_MARK = 64
"""Of these, enough to tell two states apart: the count, and 15 words."""
_View: Any = ctypes.c_char * _BYTES
_PYTHON: Any = random.getstate.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of ``random``."""
_generator: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]
"""Gives the one behind numpy's functions; another can be put there."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave the random numbers of torch, numpy and random as they were."""
    states = _saved()
    try:
        yield
    finally:
        _put_back(states)


class Seeded:
    """A block that draws random numbers from a seed; then they go on as before.

    A worker has nobody to go on for, so there nothing is put back.  Blocks can be
    nested: a sample may be read through a loader.

    Args:
        seed: What the numbers of torch, numpy and random follow from within.
    """

    __slots__ = ("_seeded", "_states", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        self._states = _saved() if get_worker_info() is None else None
        torch.default_generator.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        if self._states is not None:
            view = _numpy_view(_generator())
            self._seeded = None if view is None else view[-_MARK:]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._states is not None:
            _put_back(self._states, self._seeded)


class _State(NamedTuple):
    """A generator, as it was."""

    mark: bytes | None
    """Some of its bytes; None where they may lie otherwise."""
    bytes: bytes
    """All of them."""
    rest: Any
    """Of numpy all that it tells; of Python the normal number that waits, or all."""


_last_python, _last_numpy = _State(None, b"", None), _State(None, b"", None)
"""Those saved last: a training that draws nothing between batches still has them."""


def _saved() -> tuple[torch.Tensor, _State, _State]:
    """Read the states of torch, random and numpy."""
    return torch.get_rng_state(), _python_state(), _numpy_state()


def _put_back(
    states: tuple[torch.Tensor, _State, _State], seeded: bytes | None = None
) -> None:
    """Restore them; the mark of numpy's seed tells that none was drawn since."""
    torch.set_rng_state(states[0])
    _restore_python(states[1])
    _restore_numpy(states[2], seeded)


def _python_state() -> _State:
    """Read the state, or only the mark if it is the one that was saved last."""
    global _last_python
    view = _python_view()
    if view is None:
        return _State(None, b"", random.getstate())
    mark, rest = view[:_MARK], _PYTHON.gauss_next
    if mark != _last_python.mark or rest != _last_python.rest:
        _last_python = _State(mark, view.raw, rest)
    return _last_python


def _restore_python(state: _State) -> None:
    view = _python_view()
    if view is None or state.mark is None:
        random.setstate(state.rest)
    else:
        view.raw, _PYTHON.gauss_next = state.bytes, state.rest


@functools.cache
def _python_view() -> Any:
    """Look at the bytes; None where they do not lie behind what any object begins with.

    This is found out with another generator, by comparing them with what it tells.
    """
    place = object.__basicsize__
    if random.Random.__basicsize__ < place + _BYTES:
        return None
    generator = random.Random(7)
    *words, used = generator.getstate()[1]
    expected = np.int32(used).tobytes() + np.array(words, np.uint32).tobytes()
    known = _View.from_address(id(generator) + place).raw == expected
    return _View.from_address(id(_PYTHON) + place) if known else None


def _numpy_state() -> _State:
    """Read the state, or only the mark if it is the one that was saved last.

    Normal numbers are made in pairs; one that waits is not among the bytes, so while
    one does, all is read.
    """
    global _last_numpy
    view = _numpy_view(_generator())
    mark = None if view is None else view[-_MARK:]
    if mark is None or mark != _last_numpy.mark or _last_numpy.rest["has_gauss"]:
        found = b"" if view is None else view.raw
        _last_numpy = _State(mark, found, np.random.get_state(legacy=False))
    return _last_numpy


def _restore_numpy(state: _State, seeded: bytes | None) -> None:
    """Put a state back; its bytes are enough where none was drawn since the seed."""
    view = _numpy_view(_generator())
    whole = state.mark is not None and not state.rest["has_gauss"]
    if whole and view is not None and view[-_MARK:] == seeded:
        view.raw = state.bytes
    else:
        np.random.set_state(state.rest)


@functools.lru_cache(maxsize=1)
def _numpy_view(generator: Any) -> Any:
    """Look at a generator's bytes; None where numpy has them otherwise.

    This is found out with another one, by comparing them with what it tells.
    """
    if type(generator) is not np.random.MT19937:
        return None
    other = np.random.MT19937(7)
    told: Any = other.state["state"]
    expected = told["key"].astype(np.uint32).tobytes() + np.int32(told["pos"]).tobytes()
    known = _View.from_address(int(other.ctypes.state_address)).raw == expected
    return _View.from_address(int(generator.ctypes.state_address)) if known else None
