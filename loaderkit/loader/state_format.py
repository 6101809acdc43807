"""What ``state_dict`` of a loader gives: written, checked and read again.  Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from loaderkit.arguments import check_integer
from loaderkit.errors import LoaderError
from loaderkit.loader.delivery import Resumption, WorkerState
from loaderkit.loader.resumable import Position, check_epoch
from loaderkit.units import count_of
from loaderkit.value_words import kind_of

STATE_VERSION = 8
"""Of what ``state_dict`` gives."""
_VERSION_WITHOUT_DATASET = 7
"""The version before, which did not say of which cache the samples are.  It is read
too: whether they are the same is not checked then, as with samples without a cache."""
_ALWAYS_THERE = {"version", "seed", "epoch", "batches", "samples", "batching", "order"}
"""Names that every state has."""
_RULES_OF_ORDER = ("order", "batches")
"""Parts of an order that do not follow from the samples: its rule, and how batches are
cut where they are shuffled as a whole."""
_TAKE_OWN_STATE = "load_state_dict(loader.state_dict())"


class RankOfState(NamedTuple):
    """Whose state it is, where ranks were not given the same batches by number."""

    rank: int
    """From 0."""
    ranks: int
    """How many train together."""


@dataclass(frozen=True)
class ExpectedState:
    """What a state must say so that a loader can go on from it."""

    batching: str
    """How samples become batches, in words."""
    counts_samples: bool
    """The order is one of our own: its rest can be read by other ranks, in batches of
    another size."""
    rank: RankOfState | None
    """The rank whose own order of batches this is; None where a state of one rank is
    every rank's."""
    order: Mapping[str, Any]
    """What the order follows from that the words do not name."""
    dataset: str | None
    """What tells the samples from those of another cache; None where nothing does."""
    seed: int | None
    """The seed that was asked for; None takes over another run's."""
    has_sampler: bool
    """A sampler of the user's chooses the batches, and its state belongs to it."""
    num_workers: int | None
    """How many workers go their own ways; None where none has a state of its own."""

    @property
    def required(self) -> set[str]:
        """Names that a state must have."""
        return _ALWAYS_THERE | {"sampler"} if self.has_sampler else _ALWAYS_THERE

    def rank_in_state(self, state: Mapping[str, Any]) -> list[int] | None:
        """Say what a state must have as its rank; nothing if an epoch begins there."""
        if self.rank is None or not (state["batches"] or "rank" in state):
            return None
        return list(self.rank)


def check_state(state: Mapping[str, Any], expected: ExpectedState) -> None:
    """Refuse a state from which a loader cannot go on.

    Args:
        state: As it was given to ``load_state_dict``.
        expected: What the loader is like.

    Raises:
        LoaderError: It is no state of a loader, or that of another kind of loader.
        OptionError: One of its numbers is none.
    """
    given_names: set[str] = set(state) if hasattr(state, "keys") else set()
    missing = expected.required - given_names
    if missing:
        message = (
            f"This is no state of a loader: it lacks {', '.join(sorted(missing))}."
        )
        why = f"got {kind_of(state)}"
        raise LoaderError(message, why=why, fix=_state_meant_by(state, expected))

    if state["version"] not in {STATE_VERSION, _VERSION_WITHOUT_DATASET}:
        raise _wrong_version(state["version"])
    if not expected.counts_samples or "ahead" in state or "rank" in state:
        # Batches are counted, and those out of turn have the numbers of this division.
        _check_same("batching", state["batching"], expected.batching)
    if _has_grown(state["order"], expected.order):
        raise _grown_since(state, expected)
    _check_same_order(state["order"], expected.order)
    _check_same_dataset(state.get("dataset"), expected.dataset)
    _check_same("rank", state.get("rank"), expected.rank_in_state(state))
    if expected.seed is not None:
        _check_same("seed", state["seed"], expected.seed)

    # Behind what must be equal: who loads the state of another run should hear of that,
    # and not of a number.
    for name in ("epoch", "batches", "samples"):
        check_epoch(f"the state's {name}", state[name])
    check_integer("the state's seed", state["seed"])
    _check_no_other_names(state, expected)

    ahead = state.get("ahead", ())
    if not isinstance(ahead, list | tuple):
        raise _wrong_part(ahead, "ahead", "a list of numbers of batches")
    for number in ahead:
        least = int(state["batches"]) + 1
        check_integer("each of the state's ahead", number, least=least)


def check_consumed_samples(state: Mapping[str, Any], count: int) -> None:
    """Refuse samples and batches that the epoch does not have.

    Args:
        state: That ``check_state`` let pass.
        count: Samples of the epoch's order.

    Raises:
        LoaderError: It has more than the epoch, or batches without samples.
    """
    # A batch has a sample at least, so neither can be more than the epoch's samples.
    batches, samples = int(state["batches"]), int(state["samples"])
    most_batches = max([batches, *state.get("ahead", ())])
    if samples <= count and most_batches <= count and batches <= samples:
        return
    message = (
        f"The state has {count_of(samples, 'samples')} in "
        f"{count_of(most_batches, 'batches')} of epoch "
    )
    message += f"{state['epoch']}, which has {count_of(count, 'samples')}."
    raise LoaderError(message, why="there is no rest to give", fix=_TAKE_OWN_STATE)


def check_worker_states(state: Mapping[str, Any], num_workers: int) -> None:
    """Refuse states of workers that cannot be read, or are of other workers.

    Args:
        state: That ``check_state`` let pass.
        num_workers: How many this loader has.

    Raises:
        LoaderError: They are not there, are malformed, or of another number of workers.
    """
    if "workers" in state:
        _check_each_worker(state)
    elif state["batches"]:
        raise _wrong_part(None, "workers", "a list of how each worker stands")

    theirs = state.get("num_workers")
    # No worker and one read the same samples; more split them among themselves.
    if theirs == num_workers or {theirs, num_workers} == {0, 1}:
        return
    message = f"The state is that of {theirs} workers, this loader has {num_workers}."
    why = "each worker reads a part of its own, so what is missing cannot be told"
    raise LoaderError(message, why=why, fix=f"num_workers={theirs}")


def position_of(state: Mapping[str, Any]) -> Position:
    """Read where a state's loader stood."""
    ahead = frozenset(state.get("ahead", ()))
    return Position(
        epoch=int(state["epoch"]),
        batches=int(state["batches"]),
        samples=int(state["samples"]),
        ahead=ahead,
    )


def write_workers(resumption: Resumption) -> dict[str, Any]:
    """Write how workers stand, as plain values but for their datasets' own states."""
    workers = [
        {"worker": worker, **state._asdict()}
        for worker, state in sorted(resumption.workers.items())
    ]
    return {"workers": workers, "last_worker": resumption.last_worker}


def read_workers(state: Mapping[str, Any]) -> Resumption:
    """Read what ``write_workers`` wrote."""
    workers = {}
    for saved in state["workers"]:
        values = {name: saved[name] for name in WorkerState._fields}
        workers[int(saved["worker"])] = WorkerState(**values)
    return Resumption(workers, int(state["last_worker"]))


def changed_since_loading(
    order_then: Mapping[str, Any], order_now: Mapping[str, Any]
) -> LoaderError:
    """Say that the dataset changed between loading a state and going on from it.

    Args:
        order_then: What the order followed from as the state was loaded.
        order_now: What it follows from now.

    Returns:
        The error to raise.
    """
    then, now = _differing_parts(order_then, order_now)
    message = (
        "A state was loaded in the middle of an epoch, and the dataset has changed "
        f"since: from {then} to {now}."
    )
    why = "the rest of that epoch would be that of another order"
    fix = "load_state_dict of the dataset as it was, or loader.set_epoch() of another "
    return LoaderError(message, why=why, fix=f"{fix}epoch")


def _state_meant_by(given: object, expected: ExpectedState) -> str:
    """Write how the state is got out of what was given in its place."""
    if isinstance(given, str) and given.lstrip().startswith("{"):
        return "load_state_dict(json.loads(text))"
    if isinstance(given, str | os.PathLike):
        return f"load_state_dict(torch.load({os.fspath(given)!r}))"
    if isinstance(given, Mapping):
        for name, value in given.items():
            if isinstance(value, Mapping) and expected.required <= set(value):
                return f"load_state_dict(state[{name!r}])"
    return _TAKE_OWN_STATE


def _wrong_version(version: object) -> LoaderError:
    message = f"The state has version {version!r}, this loader reads {STATE_VERSION} "
    message += f"and {_VERSION_WITHOUT_DATASET}."
    why = "other releases count what was given in another way"
    fix = "end the epoch with the release that wrote it; or begin the next: "
    return LoaderError(
        message, why=why, fix=f"{fix}loader.set_epoch(state['epoch'] + 1)"
    )


def _has_grown(theirs: object, ours: Mapping[str, Any]) -> bool:
    """Tell whether two orders are alike, but that there are more samples now.

    Args:
        theirs: What the order followed from as a state was saved.
        ours: What it follows from now.

    >>> then = {"samples": 20, "order": "shuffled"}
    >>> _has_grown(then, {**then, "samples": 26}), _has_grown(then, then)
    (True, False)
    >>> _has_grown(then, {"samples": 26, "order": "in order"})
    False
    >>> _has_grown(then, {**then, "samples": 26, "batches": {"batch_size": 4}})
    False
    """
    if not isinstance(theirs, dict) or "order" not in theirs:
        return False
    count_then, count_now = theirs.get("samples"), ours.get("samples")
    if not (isinstance(count_then, int) and isinstance(count_now, int)):
        return False
    is_alike = all(theirs.get(name) == ours.get(name) for name in _RULES_OF_ORDER)
    return is_alike and count_then < count_now


def _grown_since(state: Mapping[str, Any], expected: ExpectedState) -> LoaderError:
    """Refuse a state of fewer samples, and say at which epoch to go on with all.

    Whether they are the same samples with more behind them nobody can tell here.
    """
    count_then, count_now = state["order"]["samples"], expected.order["samples"]
    message = (
        f"The state is of {count_of(count_then, 'samples')}, and this loader has "
        f"{count_now:,}."
    )
    if state["batches"] or state.get("ahead"):
        why = "it stands in the middle of an epoch, whose order is that of all its "
        why += "samples; probably some were added since, as by extend(), or this is "
        why += "another choice of rows"
        epoch = "state['epoch'] + 1"
    else:
        why = "probably some were added since, as by extend(), or this is another "
        why += "choice of rows; it stands between two epochs, "
        why += "and the next one can have all of them"
        epoch = "state['epoch']"
    fix = f"begin an epoch of all: loader.set_epoch({epoch}), in a loader built with "
    fix += f"seed={state['seed']}; or load it with the rows, or the copy of the cache, "
    fix += "from before"
    return LoaderError(message, why=why, fix=fix)


def _check_same_order(theirs: object, ours: Mapping[str, Any]) -> None:
    """Refuse the state of another order.

    Sizes matter to what cuts batches by them, so those that only one of the two loaders
    looks at are not compared.
    """
    if isinstance(theirs, dict):
        unshared = set(theirs) ^ set(ours)
        ignored = {name for name in unshared if str(name).startswith("sizes of ")}
        theirs = {name: value for name, value in theirs.items() if name not in ignored}
        ours = {name: value for name, value in ours.items() if name not in ignored}
    _check_same("order", theirs, ours)


def _check_same_dataset(theirs: object, ours: str | None) -> None:
    """Refuse the state of another cache, although it has as many samples.

    Samples without a cache have no name that lasts: then nothing is compared.
    """
    if theirs is None or ours is None or theirs == ours:
        return
    if not isinstance(theirs, str):
        raise _wrong_part(theirs, "dataset", "a text")
    message = "The state is that of a loader over another cache, or over other rows."
    why = f"its samples are {theirs:.40}, those of this loader {ours:.40}: packed from "
    why += "other samples or with other settings, or another part was selected"
    fix = "open the cache that the state is of; with another, begin an epoch: "
    fix += "loader.set_epoch(state['epoch'] + 1)"
    raise LoaderError(message, why=why, fix=fix)


def _check_same(name: str, theirs: object, ours: object) -> None:
    if theirs == ours:
        return
    their_part, our_part = _differing_parts(theirs, ours)
    message = f"The state has {name} {their_part!r}, this loader {our_part!r}."
    why = "the batches that are missing cannot be told"
    fix = "build the loader with the same dataset, options, seed and ranks; with "
    fix += "others, begin an epoch: loader.set_epoch(state['epoch'] + 1)"
    raise LoaderError(message, why=why, fix=fix)


def _check_no_other_names(state: Mapping[str, Any], expected: ExpectedState) -> None:
    """Refuse what this loader would not look at."""
    known = {*expected.required, "ahead", "rank", "dataset"}
    if expected.num_workers is not None:
        known |= {"num_workers", "workers", "last_worker", "main"}
    unknown = sorted(map(str, set(state) - known))
    if unknown:
        message = (
            f"The state has {', '.join(unknown)}, for which this loader has no use."
        )
        why = "it is that of another kind of dataset or sampler, or was added to"
        fix = "load_state_dict(loader.state_dict()) of a loader built alike"
        raise LoaderError(message, why=why, fix=fix)


def _check_each_worker(state: Mapping[str, Any]) -> None:
    workers = state["workers"]
    if not isinstance(workers, list | tuple):
        raise _wrong_part(workers, "workers", "a list of states")
    names = {"worker", *WorkerState._fields}
    for worker in workers:
        if not isinstance(worker, dict) or set(worker) != names:
            wanted = f"a list of tables of {', '.join(sorted(names))}"
            raise _wrong_part(worker, "workers", wanted)
        for name in ("worker", "batches"):
            check_integer(f"the state's {name} of a worker", worker[name], least=0)
    last = state.get("last_worker")
    check_integer("the state's last_worker", last, least=-1)


def _differing_parts(theirs: object, ours: object) -> tuple[object, object]:
    """Leave out of two tables what is equal in them."""
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        return theirs, ours
    their_part, our_part = {}, {}
    for name in {**theirs, **ours}:
        if theirs.get(name) != ours.get(name):
            their_part[name] = theirs.get(name)
            our_part[name] = ours.get(name)
    return their_part, our_part


def _wrong_part(value: object, name: str, wanted: str) -> LoaderError:
    message = f"The state's {name} must be {wanted}, got {value!s:.80}."
    why = f"its type is {type(value).__name__}"
    return LoaderError(message, why=why, fix=_TAKE_OWN_STATE)
