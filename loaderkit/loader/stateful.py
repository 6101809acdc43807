"""Saves and restores the states of the user's samplers and datasets.

An object with ``state_dict`` and ``load_state_dict`` says its own state, as in
torchdata.  Of other samplers the states of their random generators are saved, and their
plain values, rows and weights are compared.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch

from loaderkit.errors import LoaderError
from loaderkit.loader.digests import PLAIN_NESTS, digest_of_plain
from loaderkit.loader.sampler_protocol import sampler_and_inner


class Stateful(Protocol):
    """An object with a state, by torchdata's protocol."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore a state."""


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Return whether an object has a state, by torchdata's protocol."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def read_state(value: object) -> Any:
    """Return a copy of an object's state; None if it has none.

    It is copied because the object may go on changing what it returned.
    """
    return copy.deepcopy(value.state_dict()) if is_stateful(value) else None


def is_own_iterator(dataset: object) -> bool:
    """Return whether an iterable dataset is its own iterator.

    The state of such a dataset is restored after ``iter()`` was called.  Before that it
    may have no state, and ``__iter__`` may reset what was restored.
    """
    return isinstance(dataset, Iterator)


@dataclass(frozen=True)
class SamplerState:
    """The state of a user's sampler."""

    own: Any = None
    """What its ``state_dict`` returned; None if it has none."""
    generators: Mapping[str, Any] = field(default_factory=dict)
    """States of its random generators when the epoch began, by attribute path."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Its plain values then, by attribute path."""
    arrays: Mapping[str, str] = field(default_factory=dict)
    """Digests of its rows, weights and the like then, by attribute path."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Lengths of datasets it refers to, by attribute path; its own as "sampler"."""
    epoch_by_hand: bool = False
    """The user, and not the loader, calls its ``set_epoch``."""
    rank: int | None = None
    """The rank whose rows ``digest`` is of; None for the rows of all ranks."""
    digest: str = ""
    """Digest of the rows that it has given since."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; all of them but ``own`` can be written as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: object) -> SamplerState:
        """Read what ``to_dict`` returned.

        Raises:
            LoaderError: It is not the state of a sampler.
        """
        names = {state_field.name for state_field in fields(cls)}
        texts = ("digest",)
        tables = ("generators", "values", "arrays", "lengths")
        if (
            not isinstance(state, Mapping)
            or set(state) != names
            or not all(isinstance(state[name], str) for name in texts)
            or not all(isinstance(state[name], Mapping) for name in tables)
        ):
            message = f"This is no state of a sampler: {state!s:.80}."
            why = f"it must have {', '.join(sorted(names))}"
            raise LoaderError(
                message, why=why, fix="load_state_dict(loader.state_dict())"
            )
        return cls(**state)


def read_sampler(sampler: object, dataset: object = None) -> SamplerState:
    """Read the state of a sampler and of the sampler that it wraps.

    Args:
        sampler: The user's sampler.
        dataset: The dataset that its rows are of.  If the sampler refers to it, its
            length is part of the state, and its samples are not.

    Returns:
        The sampler's own state, if it has one; otherwise the states of its generators,
        its plain values, and digests of its rows and weights.
    """
    stateful_sampler = stateful_part(sampler)
    if stateful_sampler is not None:
        return SamplerState(own=read_state(stateful_sampler))

    generators: dict[str, Any] = {}
    values: dict[str, Any] = {}
    arrays: dict[str, str] = {}
    lengths: dict[str, int] = {}
    attributes = dict(_attributes_by_path(sampler))
    for path, value in attributes.items():
        holder, _, name = path.rpartition(".")
        if name == "rank" and _path(holder, "num_replicas") in attributes:
            # The rank of a DistributedSampler differs between ranks, and one state is
            # for all of them.  Whether it fits this rank is checked by UserBatches.
            continue
        if (state := _generator_state(value)) is not None:
            generators[path] = state
        elif isinstance(value, bool | int | float | str):
            values[path] = value
        elif value is dataset or name in _DATASET_NAMES:
            # Samples are not compared, since reading them could take hours.
            if (length := length_of(value)) is not None:
                lengths[path] = length
        elif (digest := digest_of_plain(value)) is not None:
            arrays[path] = digest

    if (length := length_of(sampler)) is not None:
        lengths["sampler"] = length
    return SamplerState(
        generators=generators, values=values, arrays=arrays, lengths=lengths
    )


_DATASET_NAMES = ("data_source", "dataset")
"""Attributes in which torch's samplers keep the dataset, or anything of its length."""


def length_of(value: object) -> int | None:
    """Return the length of an object; None if asking for it raises any error."""
    try:
        return len(value)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 -- torch says TypeError, PyG ValueError
        return None


def digest_of_sampler(sampler: object) -> str:
    """Return a digest of what the rows of a sampler follow from.

    Args:
        sampler: The user's sampler, or a list of rows.

    Returns:
        Equal digests for samplers with equal generators, plain values, rows and
        weights.
    """
    state = read_sampler(sampler)
    parts = [type(sampler).__qualname__, state.generators, state.values]
    parts += [state.arrays, state.lengths]
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def restore_sampler(
    sampler: object, state: SamplerState, dataset: object = None
) -> SamplerState | None:
    """Bring a sampler to a saved state.

    Args:
        sampler: The user's sampler.
        state: The saved state.
        dataset: The dataset that its rows are of.

    Returns:
        The state that the sampler now has; None if the sampler has a ``state_dict`` of
        its own.

    Raises:
        LoaderError: The sampler differs from the saved one in something that cannot be
            restored.
    """
    if state.own is not None:
        stateful = stateful_part(sampler)
        if stateful is None:
            message = "The state is that of a sampler with a state_dict of its own."
            why = f"this {type(sampler).__name__} has none"
            fix = "give the loader the same sampler"
            raise LoaderError(message, why=why, fix=fix)
        stateful.load_state_dict(copy.deepcopy(state.own))
        return None

    attributes = dict(_attributes_by_path(sampler))
    current = read_sampler(sampler, dataset)
    _check_same_rows(current, state)

    for path, saved in state.generators.items():
        if not _restore_generator(attributes.get(path), saved):
            message = f"The state is of a random generator at {path}."
            why = "this sampler has none there, or one of another kind"
            fix = "give the loader the same sampler"
            raise LoaderError(message, why=why, fix=fix)
    for path, saved in state.values.items():
        if path not in attributes or attributes[path] != saved:
            message = f"The sampler's {path} is {attributes.get(path)!r}, "
            message += f"the state has {saved!r}."
            why = "other rows would follow"
            fix = "set it before, or give the sampler state_dict() and "
            raise LoaderError(message, why=why, fix=f"{fix}load_state_dict()")

    # The digests are taken over: hashing 10^7 rows again would take half a second.
    return replace(current, generators={**current.generators, **state.generators})


def _check_same_rows(current: SamplerState, saved: SamplerState) -> None:
    """Refuse a sampler of other rows, weights or lengths."""
    why = "other rows would follow"
    fix = "give the loader the same sampler, or the sampler state_dict() and "
    fix += "load_state_dict()"
    for path, length in saved.lengths.items():
        if current.lengths.get(path) != length:
            name = "its own" if path == "sampler" else path
            message = (
                f"The sampler's length ({name}) is {current.lengths.get(path)}, the "
            )
            raise LoaderError(f"{message}state has {length}.", why=why, fix=fix)
    for path, digest in saved.arrays.items():
        if current.arrays.get(path) != digest:
            message = f"Of the sampler, {path} is not what it was for the state."
            raise LoaderError(message, why=why, fix=fix)


def stateful_part(sampler: object) -> Stateful | None:
    """Return the sampler with a state: this one, or the one that it wraps."""
    for candidate in sampler_and_inner(sampler):
        if is_stateful(candidate):
            return candidate
    return None


def _attributes_by_path(sampler: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Give the attributes of a sampler, and of the sampler that it wraps."""
    if isinstance(sampler, PLAIN_NESTS):
        yield _path(prefix, "rows"), sampler
        return
    for name, value in getattr(sampler, "__dict__", {}).items():
        path = _path(prefix, name)
        if name in {"sampler", "batch_sampler"}:
            yield from _attributes_by_path(value, path)
        else:
            yield path, value


def _path(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


_GLOBAL_GENERATORS = (
    torch.default_generator,
    getattr(random.getstate, "__self__", None),
    getattr(np.random.get_state, "__self__", None),
)
"""The generator behind the functions of each library: torch shows its own, and those of
``random`` and numpy are what their module's functions are methods of."""


def _generator_state(value: object) -> Any:
    """Return the state of a random generator as JSON values; None of other objects."""
    # The global generators of each library are seeded for every batch, so their states
    # need not be saved.  A random.SystemRandom has no state.
    is_global = any(value is generator for generator in _GLOBAL_GENERATORS)
    if is_global or isinstance(value, random.SystemRandom):
        return None
    if isinstance(value, torch.Generator):
        return base64.b64encode(value.get_state().numpy().tobytes()).decode()
    if isinstance(value, np.random.RandomState):
        return {"legacy": _arrays_to_lists(value.get_state(legacy=False))}
    if isinstance(value, random.Random):
        version, words, gauss = value.getstate()
        return [version, list(words), gauss]
    if isinstance(value, np.random.Generator):
        return _arrays_to_lists(value.bit_generator.state)
    return None


def _restore_generator(value: object, state: Any) -> bool:
    """Restore a random generator; return False if the state is of another kind."""
    try:
        if isinstance(value, torch.Generator) and isinstance(state, str):
            raw = np.frombuffer(base64.b64decode(state), np.uint8)
            value.set_state(torch.from_numpy(raw.copy()))
        elif isinstance(value, random.Random) and isinstance(state, list | tuple):
            version, words, gauss = state
            value.setstate((version, tuple(words), gauss))
        elif isinstance(value, np.random.RandomState) and isinstance(state, dict):
            pattern = value.get_state(legacy=False)
            value.set_state(_lists_to_arrays(pattern, state["legacy"]))
        elif isinstance(value, np.random.Generator) and isinstance(state, dict):
            value.bit_generator.state = _lists_to_arrays(
                value.bit_generator.state, state
            )
        else:
            return False
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError):
        # Each library raises an error of its own for a state that is not one of its.
        return False
    return True


def _arrays_to_lists(state: Any) -> Any:
    """Convert the arrays in a state of numpy's to lists."""
    if isinstance(state, dict):
        return {name: _arrays_to_lists(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


def _lists_to_arrays(pattern: Any, state: Any) -> Any:
    """Convert lists back to arrays, as a state of numpy's has them."""
    if isinstance(pattern, dict):
        return {
            name: _lists_to_arrays(pattern[name], value)
            for name, value in state.items()
        }
    if isinstance(pattern, np.ndarray):
        return np.asarray(state, pattern.dtype)
    return state
