"""States of samplers and datasets that are not ours: read, kept, put back.

torchdata's protocol is followed: what has ``state_dict`` and ``load_state_dict`` is
asked for its state.  Of other samplers the generators are kept, and the plain values
are compared.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.errors import LoaderError

if TYPE_CHECKING:
    from collections.abc import Mapping


def is_stateful(value: object) -> bool:
    """Tell whether something says its state, and takes one, by torchdata's protocol."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def read_state(value: Any) -> Any:
    """Ask something for its state; None if it has none to tell.

    The state is copied, since the owner may go on changing what it gave.
    """
    return copy.deepcopy(value.state_dict()) if is_stateful(value) else None


def is_own_iterator(dataset: object) -> bool:
    """Tell whether an iterable dataset gives its samples itself.

    Its state is restored once it was begun: there may be none before, and ``__iter__``
    may begin anew.
    """
    return isinstance(dataset, Iterator)


@dataclass(frozen=True)
class SamplerState:
    """How a sampler stood."""

    own: Any = None
    """What its ``state_dict`` says; None if it has none."""
    generators: Mapping[str, Any] = field(default_factory=dict)
    """States of its random generators when the epoch began, by attribute."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Its plain values then, by attribute."""
    digest: str = ""
    """Of the batches that it has given since."""

    def to_dict(self) -> dict[str, Any]:
        """Make plain values of it; JSON takes all but ``own``."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> SamplerState:
        """Read what ``to_dict`` gave."""
        return cls(**state)


def read_sampler(sampler: Any) -> SamplerState:
    """Read how a sampler, and those within it, stand.

    Args:
        sampler: Of the user's.

    Returns:
        Its own state, or else its generators and plain values.
    """
    if (own := _stateful_part(sampler)) is not None:
        return SamplerState(own=read_state(own))
    generators, values = {}, {}
    for path, value in _attributes(sampler):
        if (state := _generator_state(value)) is not None:
            generators[path] = state
        elif isinstance(value, bool | int | float | str):
            values[path] = value
    return SamplerState(generators=generators, values=values)


def digest_of(sampler: Any) -> str:
    """Tell one sampler from another, by what its rows follow from.

    Args:
        sampler: Of the user's, or a list of rows.

    Returns:
        Equal for samplers with equal generators, plain values, rows and weights.
    """
    state = read_sampler(sampler)
    parts: list[Any] = [type(sampler).__qualname__, state.generators, state.values]
    rows = [("", sampler), *_attributes(sampler)]
    for path, value in rows:
        if isinstance(value, torch.Tensor):
            parts.append((path, value.tolist()))
        elif isinstance(value, list | tuple | range | np.ndarray):
            parts.append((path, list(value)))
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def restore_sampler(sampler: Any, state: SamplerState) -> None:
    """Bring a sampler to where another one stood.

    Args:
        sampler: Of the user's.
        state: The other's.

    Raises:
        LoaderError: It stands elsewhere, and says no way to bring it there.
    """
    if state.own is not None:
        part = _stateful_part(sampler)
        if part is None:
            what = "The state is that of a sampler with a state_dict of its own; "
            what += f"this {type(sampler).__name__} has none."
            raise LoaderError(what, fix="give the loader the same sampler")
        part.load_state_dict(copy.deepcopy(state.own))
        return
    ours = dict(_attributes(sampler))
    for path, saved in state.generators.items():
        if not _restore_generator(ours.get(path), saved):
            what = f"The state is of a random generator at {path}; this sampler has "
            what += "none there, or one of another kind."
            raise LoaderError(what, fix="give the loader the same sampler")
    for path, saved in state.values.items():
        if path not in ours or ours[path] != saved:
            what = (
                f"The sampler's {path} is {ours.get(path)!r}, the state has {saved!r}."
            )
            why = "other rows would follow"
            fix = "set it before, or give the sampler state_dict() and "
            raise LoaderError(what, why=why, fix=f"{fix}load_state_dict()")


def _stateful_part(sampler: Any) -> Any:
    """Find the sampler that says its state: this one, or the one it draws from."""
    for part in (sampler, getattr(sampler, "sampler", None)):
        if is_stateful(part):
            return part
    return None


def _attributes(sampler: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Give the attributes of a sampler, and of the one that it draws from."""
    for name, value in getattr(sampler, "__dict__", {}).items():
        if name in {"sampler", "batch_sampler"}:
            yield from _attributes(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _generator_state(value: object) -> Any:
    """Read a random generator, in values that JSON takes; None if it is none."""
    if isinstance(value, torch.Generator):
        return base64.b64encode(value.get_state().numpy().tobytes()).decode()
    if isinstance(value, random.Random):
        version, words, gauss = value.getstate()
        return [version, list(words), gauss]
    if isinstance(value, np.random.Generator):
        return _plain(value.bit_generator.state)
    return None


def _restore_generator(value: object, state: Any) -> bool:
    """Bring a random generator to a state; False if it is none of that state's kind."""
    try:
        if isinstance(value, torch.Generator) and isinstance(state, str):
            raw = np.frombuffer(base64.b64decode(state), np.uint8)
            value.set_state(torch.from_numpy(raw.copy()))
        elif isinstance(value, random.Random) and isinstance(state, list | tuple):
            version, words, gauss = state
            value.setstate((version, tuple(words), gauss))
        elif isinstance(value, np.random.Generator) and isinstance(state, dict):
            value.bit_generator.state = _like(value.bit_generator.state, state)
        else:
            return False
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError):
        return False  # each library says in its own way that the state is not its own
    return True


def _plain(state: Any) -> Any:
    """Make lists of the arrays in a state of numpy's."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


def _like(pattern: Any, state: Any) -> Any:
    """Make arrays of lists again, where a state of numpy's has them."""
    if isinstance(pattern, dict):
        return {name: _like(pattern[name], value) for name, value in state.items()}
    if isinstance(pattern, np.ndarray):
        return np.asarray(state, pattern.dtype)
    return state
