"""Each setting of a loader, chosen from facts and what was asked for.  Pure.

A function here takes all that its setting follows from, and gives the setting with its
reason.  What depends on another setting takes that one's value, so the order of the
calls in ``plan`` is the only one there is.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from loaderkit.answers import answer_wrong_names
from loaderkit.errors import LoaderError, OptionError
from loaderkit.loader.forecast import FORKED_BYTES, SPAWNED_BYTES, pinned_bytes
from loaderkit.loader.options import START_METHOD_VARIABLE, parse_variable
from loaderkit.operations import ARITHMETIC, SIGNS
from loaderkit.units import count_of, format_bytes, format_seconds

if TYPE_CHECKING:
    from loaderkit.loader.facts import Facts, ReadCost
    from loaderkit.loader.forecast import Sharing
    from loaderkit.loader.options import SettingOverrides

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

QUEUE_S = 0.0003
"""What a message between processes costs besides its bytes: locks, wake-ups.  Measured,
through torch's queues."""

_FORKED_GAIN = 1.3
"""Times the rate without workers that the first one must promise.  Measured on 2 cores:
a promise of 1.9 came to 1.6, and one of 1.5 to 1.1, so that less may be a loss."""
_SPAWNED_GAIN = 1.6
"""The same for workers that are spawned.  Chosen above the other, because each of them
imports torch again."""
_GAIN_OF_ONE_MORE = 1.1
"""Times the rate that each further worker must bring.  Chosen: less is not worth its
memory."""
_COPYING_BYTES_PER_S = 2e9
"""From this rate on, making a batch is copying memory, which workers would only repeat.
Chosen below what was measured: W2 in memory is made at 5.7 GB/s, and two workers took
it to 0.6 times that."""
_MOST_UNMEASURED = 2
"""Workers at most where nothing was measured.  Chosen: one hides the time of reading,
and a second rarely harms."""
_MEMORY_SHARE = 2
"""Workers take at most one part in so many of the memory that is left.  Chosen: the
training has the other half."""
_MOST_PRESSURE = 10.0
"""Percent of the time that tasks wait for memory, from which on there is one worker at
most.  Chosen: a machine that waits for a tenth of the time is short of memory."""

_FORK_S = 0.05
"""To start a forked worker.  Measured: to its first batch it takes 0.08 to 0.18 s on a
machine of 2 cores at a load of 15."""
_SPAWN_S = 4.0
"""To start a spawned worker, which imports torch again (3.0 s of CPU).  Measured: 4.7
to 6.6 s on the same machine."""
_FASTEST_BYTES_PER_S = 2e9
"""Where only the bytes of an epoch are known, it is taken to be read no faster.
Measured: 2 workers on 2 cores give 1.5 GB/s in batches of 6 MiB, and less in smaller
ones."""
_STARTING_SHARE = 0.01
"""Workers are kept where starting them takes more than this share of an epoch.  Chosen:
less is not noticed, and fresh workers give back what they held."""

_BATCHES_AHEAD = 2
"""Batches asked of a worker, or of a thread, ahead of time; torch's default."""
_AHEAD_SHARE = 0.05
"""Batches made ahead take at most this part of the memory that is left.  Chosen: it is
no more than a disturbance to the training."""
_MOST_AHEAD_BYTES = 1 << 30
"""And at most so many bytes, also where there is much memory.  Chosen: batches so large
take so long to make that more of them would not be ready sooner."""
_PINNED_SHARE = 0.1
"""Page-locked batches take at most this part of the memory that is left.  Chosen: no
other process can have it back."""


@answer_wrong_names("value")
@dataclass(frozen=True, eq=False)
class Decision(Generic[T_co]):
    """A setting, and why it is as it is.

    It compares with its value (``plan.num_workers == 0``), and counts as it does
    (``range(plan.num_workers)``).  Only ``is`` tells them apart.

    >>> two_workers = Decision(2, "for so many batches")
    >>> two_workers == 2, two_workers > 0, list(range(two_workers)), f"{two_workers:>3}"
    (True, True, [0, 1], '  2')
    """

    value: T_co
    """What the loader does."""
    reason: str
    """Why."""
    warning: str = ""
    """What may break by it, with the fix; empty when nothing does."""

    def __bool__(self) -> bool:
        """``if plan.pin_memory:`` asks for the value, also where it is 0 or False."""
        return bool(self.value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Decision):
            return (self.value, self.reason, self.warning) == (
                other.value,
                other.reason,
                other.warning,
            )
        return bool(self.value == other)

    def __hash__(self) -> int:
        return hash(self.value)  # as what it is equal to

    def __lt__(self, other: object) -> bool:
        return bool(self.value < _value_of(other))

    def __le__(self, other: object) -> bool:
        return bool(self.value <= _value_of(other))

    def __gt__(self, other: object) -> bool:
        return bool(self.value > _value_of(other))

    def __ge__(self, other: object) -> bool:
        return bool(self.value >= _value_of(other))

    def __contains__(self, item: object) -> bool:
        """``"fork" in plan.start_method`` looks into the value."""
        return item in self.value  # type: ignore[operator]

    def __index__(self) -> int:
        return operator.index(self.value)  # type: ignore[arg-type]

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.value, digits)  # type: ignore[call-overload]

    def __float__(self) -> float:
        return float(self.value)  # type: ignore[arg-type]

    if TYPE_CHECKING:
        # For checkers: all operators are set below the class.
        def __add__(self, other: object) -> Any: ...
        def __radd__(self, other: object) -> Any: ...
        def __sub__(self, other: object) -> Any: ...
        def __rsub__(self, other: object) -> Any: ...
        def __mul__(self, other: object) -> Any: ...
        def __rmul__(self, other: object) -> Any: ...
        def __truediv__(self, other: object) -> Any: ...
        def __rtruediv__(self, other: object) -> Any: ...
        def __floordiv__(self, other: object) -> Any: ...
        def __rfloordiv__(self, other: object) -> Any: ...
        def __mod__(self, other: object) -> Any: ...
        def __rmod__(self, other: object) -> Any: ...

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else str(self)

    def __str__(self) -> str:
        return f"{self.value}: {self.reason}"


def _compute_with_value(method: str) -> None:
    """Have decisions add, multiply ... as their values do."""
    operate = getattr(operator, f"__{method}__")

    def of_value(self: Decision[Any], other: object) -> Any:
        return operate(self.value, _value_of(other))

    def reflected(self: Decision[Any], other: object) -> Any:
        return operate(other, self.value)

    setattr(Decision, f"__{method}__", of_value)
    setattr(Decision, f"__r{method}__", reflected)


def _change_sign_of_value(method: str) -> None:
    """Have ``-decision`` and its like be those of the value."""
    operate = getattr(operator, method)

    def of_value(self: Decision[Any]) -> Any:
        return operate(self.value)

    setattr(Decision, f"__{method}__", of_value)


for _method in (*ARITHMETIC,):
    _compute_with_value(_method)
for _method in (*SIGNS, "abs"):
    _change_sign_of_value(_method)


def _value_of(compared: object) -> Any:
    """Take what a decision is compared with, which may be another."""
    return compared.value if isinstance(compared, Decision) else compared


def choose_num_workers(
    facts: Facts, overrides: SettingOverrides, *, batches: int | None = None
) -> Decision[int]:
    """Choose how many processes make batches; 0 makes them in this one.

    Args:
        facts: What is known.
        overrides: What the caller asked for.
        batches: Batches of an epoch; None if unknown.

    Returns:
        The number; where an option is given that means nothing without workers, at
        least one if that can start.

    Raises:
        LoaderError: Workers were asked for in a process that may not have children, or
            would be forked with samples on a device.
    """
    requested = _requested(overrides.num_workers, "LOADERKIT_NUM_WORKERS", facts)
    if requested is not None:
        return _check_requested_workers(requested, facts, overrides)
    decision = _number_that_pays(facts, overrides, batches)
    if decision.value or not overrides.needs_workers:
        return decision
    may_start = not facts.daemonic and not facts.lockless
    may_start = may_start and not _why_none_can_start(facts, overrides)
    start_method = _start_method_of_any(facts, overrides).value
    if may_start and _lowest_cap(facts, start_method).workers > 0:
        return Decision(1, f"{overrides.needs_workers} needs one")
    return decision


def choose_read_ahead(
    facts: Facts, overrides: SettingOverrides, *, num_workers: int
) -> Decision[int]:
    """Choose how many batches a thread makes ahead where there are no workers.

    Args:
        facts: What is known.
        overrides: What the caller asked for.
        num_workers: As it was chosen.
    """
    requested = _requested(overrides.read_ahead, "LOADERKIT_READ_AHEAD", facts)
    if requested is not None:
        if not requested.value or num_workers or facts.draws_no_random_numbers:
            return requested
        warning = "read_ahead runs your code in a thread: random numbers that it draws "
        warning += "mix with those of the training; num_workers=1, or drop read_ahead"
        return Decision(requested.value, requested.reason, warning)
    if num_workers:
        return Decision(0, "the workers read ahead")
    if not facts.draws_no_random_numbers:
        reason = "a thread's random numbers would mix with those of the training"
        return Decision(0, reason)
    batches = _batches_ahead(facts, num_workers)
    reason = (
        f"{count_of(batches, 'batches')}{_largest_batch_in_words(facts)} from a "
        "thread, once "
    )
    return Decision(batches, f"{reason}steps take half as long as gathering")


def choose_prefetch_factor(
    facts: Facts, overrides: SettingOverrides, *, num_workers: int
) -> Decision[int | None]:
    """Choose how many batches are asked of each worker ahead of time.

    Args:
        facts: What is known.
        overrides: What the caller asked for.
        num_workers: As it was chosen.
    """
    if not num_workers:
        return Decision(None, "there are no workers")
    variable = "LOADERKIT_PREFETCH_FACTOR"
    requested = _requested(overrides.prefetch_factor, variable, facts)
    if requested is not None:
        return requested
    batches = _batches_ahead(facts, num_workers)
    size = _largest_batch_in_words(facts)
    ahead = format_bytes(_bytes_ahead(facts))
    return Decision(
        batches, f"{count_of(batches * num_workers, 'batches')}{size} wait, of {ahead}"
    )


def choose_start_method(
    facts: Facts, overrides: SettingOverrides, *, num_workers: int
) -> Decision[str | None]:
    """Choose how workers start: torch's ``multiprocessing_context``.

    Args:
        facts: What is known.
        overrides: What the caller asked for.
        num_workers: As it was chosen.

    Raises:
        LoaderError: The dataset cannot be sent to workers that start so.
        OptionError: This system has no such method.
    """
    if not num_workers:
        return Decision(None, "there are no workers")
    decision = _start_method_of_any(facts, overrides)
    if decision.value not in facts.start_methods:
        message = f"multiprocessing_context cannot be {decision.value!r} here."
        methods = ", ".join(map(repr, facts.start_methods))
        why = f"Python starts processes on this system by {methods}"
        fix = f"multiprocessing_context={facts.start_methods[0]!r}, or leave it out"
        raise OptionError(message, why=why, fix=fix)
    why = _why_none_can_start(facts, overrides)
    if why:
        message = f"No worker can start by {decision.value!r}."
        fix = "num_workers=0"
        if facts.sending_fix:
            fix = f"{facts.sending_fix}; or {fix}"
        raise LoaderError(message, why=why, fix=fix)
    return decision


def choose_persistent_workers(
    facts: Facts,
    overrides: SettingOverrides,
    *,
    num_workers: int,
    start_method: str | None,
    batches: int | None,
) -> Decision[bool]:
    """Choose whether workers live from epoch to epoch.

    Args:
        facts: What is known.
        overrides: What the caller asked for.
        num_workers: As it was chosen.
        start_method: As it was chosen.
        batches: Batches of an epoch; None if unknown.
    """
    if not num_workers:
        return Decision(False, "there are no workers")
    variable = "LOADERKIT_PERSISTENT_WORKERS"
    requested = _requested(overrides.persistent_workers, variable, facts)
    if requested is not None:
        return requested
    is_forked = start_method == "fork"
    start_of_worker_s = _FORK_S if is_forked else _SPAWN_S
    starting_s = num_workers * start_of_worker_s
    if facts.measured is not None and batches is not None:
        epoch_s = batches / batches_per_s(facts, num_workers)
        reason = f"an epoch takes {format_seconds(epoch_s)}"
    elif facts.later_epoch_bytes is not None:
        # Shards that are missing are not downloaded to measure.  Later epochs are read
        # from local disk, and the next run of the same program measures them.
        epoch_s = facts.later_epoch_bytes / _FASTEST_BYTES_PER_S
        size = format_bytes(facts.later_epoch_bytes)
        reason = f"a later epoch reads {size} in {format_seconds(epoch_s)} or longer"
    else:
        reason = f"starting takes {format_seconds(starting_s)}"
        return Decision(not is_forked, reason)
    reason += f", starting workers {format_seconds(starting_s)}"
    if starting_s > _STARTING_SHARE * epoch_s:
        return Decision(True, reason)
    return Decision(False, f"{reason}; fresh workers give back what they held")


def choose_pin_memory(
    facts: Facts,
    overrides: SettingOverrides,
    *,
    num_workers: int,
    prefetch_factor: int | None,
    read_ahead: int,
) -> Decision[bool]:
    """Choose whether batches are made in page-locked memory, or copied there.

    Args:
        facts: What is known.
        overrides: What the caller asked for; not followed where it has no use.
        num_workers: As it was chosen.
        prefetch_factor: As it was chosen.
        read_ahead: As it was chosen.

    Raises:
        LoaderError: It was asked for, and batches do not lie on the host.
    """
    device = facts.device
    requested = _requested(overrides.pin_memory, "LOADERKIT_PIN_MEMORY", facts)
    if not device.pins:
        reason = f"{device.device} copies from any memory as fast"
        if requested is None or not requested.value:
            return Decision(False, reason)
        return Decision(
            False,
            reason,
            f"pin_memory=True is not followed: {reason}; pin_memory=False",
        )
    if facts.batch_device:
        reason = f"batches are made on {facts.batch_device}, and only memory of the "
        reason += "host is page-locked"
        if requested is not None and requested.value:
            message = "Batches cannot be page-locked here."
            fix = "pin_memory=False, or keep samples on the host"
            raise LoaderError(message, why=reason, fix=fix)
        return Decision(False, reason)
    if requested is not None:
        return requested
    waiting = num_workers * (prefetch_factor or 0) + read_ahead
    needed_bytes = pinned_bytes(facts.batch_bytes or 0, waiting)
    room_bytes = int(facts.host.available_bytes * _PINNED_SHARE)
    reason = f"{format_bytes(needed_bytes)} page-locked of {format_bytes(room_bytes)}"
    if needed_bytes > room_bytes:
        return Decision(False, f"{reason}: too much")
    return Decision(True, f"{reason}, copies run beside the computing")


def choose_in_order(facts: Facts, overrides: SettingOverrides) -> Decision[bool]:
    """Choose whether batches come in the order of their numbers.

    Args:
        facts: What is known.
        overrides: What the caller asked for.
    """
    requested = _requested(overrides.in_order, "LOADERKIT_IN_ORDER", facts)
    if requested is not None:
        return requested
    return Decision(True, "the order is the same for any worker count")


def choose_sharing(facts: Facts, *, num_workers: int) -> Decision[Sharing]:
    """Choose how batches leave a worker.

    Args:
        facts: What is known.
        num_workers: As it was chosen.
    """
    if not num_workers:
        return Decision("none", "batches do not leave this process")
    if facts.parcels:
        reason = "one anonymous segment a batch: no /dev/shm, no file a tensor"
        return Decision("parcel", reason)
    return Decision("torch", "this system has no anonymous segments")


def batches_per_s(facts: Facts, num_workers: int) -> float:
    """Predict batches a second, from what was measured.

    Args:
        facts: With ``measured``.
        num_workers: Processes that make batches.

    Returns:
        The rate that the slowest of three allows: the workers, the training process
        that unpacks, and the processors all of them share.
    """
    measured = facts.measured
    assert measured is not None
    if not num_workers:
        return 1 / max(measured.fetch_s, 1e-9)
    making_s = measured.fetch_s + measured.send_s
    taking_s = measured.receive_s + QUEUE_S
    cpus = max(1, facts.host.cpus // facts.host.local_ranks)
    return 1 / max(taking_s, making_s / num_workers, (making_s + taking_s) / cpus)


def _requested(asked: T | None, variable: str, facts: Facts) -> Decision[T] | None:
    """Take what the caller, or else the environment, asks for.

    Args:
        asked: By the caller; None leaves it to the variable, and then to the plan.
        variable: Of the environment.
        facts: With the environment.
    """
    if asked is not None:
        return Decision(asked, "you asked for it")
    text = facts.environment.get(variable, "")
    if text:
        return Decision(parse_variable(variable, text), f"{variable} asks for it")
    return None


def _check_requested_workers(
    requested: Decision[int], facts: Facts, overrides: SettingOverrides
) -> Decision[int]:
    count, cpus = requested.value, facts.host.cpus
    if count and facts.daemonic:
        message = f"{count_of(count, 'workers')} were asked for in a daemonic process."
        why = "daemonic processes may not have children"
        raise LoaderError(message, why=why, fix="num_workers=0")
    if count and facts.lockless:
        message = f"{count_of(count, 'workers')} were asked for, and none can start."
        fix = "num_workers=0, or a machine with /dev/shm (docker run --shm-size=1g)"
        raise LoaderError(message, why=facts.lockless, fix=fix)
    hazard = facts.fork_hazard
    is_forked = _start_method_of_any(facts, overrides).value == "fork"
    if count and is_forked and hazard is not None and hazard.kind == "device":
        message = f"{count_of(count, 'workers')} were asked for, which are forked."
        why = f"{hazard.reason}: {hazard.danger}"
        raise LoaderError(message, why=why, fix=f"num_workers=0, or {hazard.fix}")
    if count <= cpus:
        return requested
    warning = (
        f"{count_of(count, 'workers')} share {count_of(cpus, 'CPUs')} "
        f"({facts.host.cpus_from}); "
    )
    warning += f"num_workers={cpus} or fewer wastes less"
    return Decision(count, requested.reason, warning)


def _number_that_pays(
    facts: Facts, overrides: SettingOverrides, batches: int | None
) -> Decision[int]:
    """Choose the number of workers where nobody asks for one."""
    if facts.daemonic:
        return Decision(0, "this process is a daemon, which may not have children")
    why_none = facts.lockless or _why_none_can_start(facts, overrides)
    if why_none:
        return Decision(0, f"workers cannot start: {why_none}")
    start_method = _start_method_of_any(facts, overrides).value
    hazard = facts.fork_hazard
    if hazard is not None and start_method == "fork":
        return Decision(0, f"{hazard.reason}; {hazard.fix}")
    if facts.iterable:
        reason = "each worker would iterate over everything again; ask for workers if "
        return Decision(0, f"{reason}the dataset splits itself by get_worker_info()")
    if facts.measured is None:
        return _number_without_measuring(facts, start_method)
    if facts.measured.unsendable:
        reason = f"a batch cannot leave a worker: {facts.measured.unsendable}"
        return Decision(0, reason)
    if batches is not None and batches * facts.measured.fetch_s < _FORK_S:
        # Which of two so short times is longer depends on what else the machine does.
        epoch = format_seconds(batches * facts.measured.fetch_s)
        starting = format_seconds(_FORK_S)
        reason = f"a whole epoch takes {epoch}, starting one worker {starting}"
        return Decision(0, reason)
    return _number_by_measuring(facts, facts.measured, start_method)


def _number_without_measuring(facts: Facts, start_method: str) -> Decision[int]:
    if facts.gathering:
        reason = "gathering is usually quicker than sending batches (not measured)"
        return Decision(0, reason)
    # One processor is left to the training, unless there is only one.
    beside_training = max(1, facts.host.cpus - 1)
    most = _lowest_cap(facts, start_method).workers
    count = min(_MOST_UNMEASURED, beside_training, most)
    because = f": {facts.unmeasured}" if facts.unmeasured else ""
    reason = f"more than 2 only when measured to help (not measured{because})"
    return Decision(count, reason)


def _number_by_measuring(
    facts: Facts, measured: ReadCost, start_method: str
) -> Decision[int]:
    making = format_seconds(measured.fetch_s)
    sending = format_seconds(measured.send_s + measured.receive_s + QUEUE_S)
    costs = f"a batch takes {making} to make and {sending} to send"

    bytes_per_s = measured.batch_bytes / max(measured.fetch_s, 1e-9)
    is_copying = bytes_per_s > _COPYING_BYTES_PER_S
    cap = _lowest_cap(facts, start_method)
    most = 0 if is_copying else cap.workers
    count = _quickest_number(facts, start_method, most)
    if count:
        gain = batches_per_s(facts, count) / batches_per_s(facts, 0)
        cpus = f"{count_of(facts.host.cpus, 'CPUs')} by {facts.host.cpus_from}"
        reason = f"{costs}: {gain:.1f} times the rate of none, on {cpus}"
        return Decision(count, reason)

    reason = f"{costs}: workers would not be quicker"
    if is_copying:
        reason = f"{costs}: it is copying memory, at {bytes_per_s / 1e9:.1f} GB/s, "
        reason += "which workers would only do again"
    if cap.workers < facts.host.cpus:
        reason += f" (at most {cap.workers} of them: {cap.reason})"
    return Decision(0, reason)


def _quickest_number(facts: Facts, start_method: str, most: int) -> int:
    """Add workers while each brings enough."""
    first_gain = _FORKED_GAIN if start_method == "fork" else _SPAWNED_GAIN
    best = 0
    for count in range(1, most + 1):
        gain = _GAIN_OF_ONE_MORE if best else first_gain
        if batches_per_s(facts, count) >= gain * batches_per_s(facts, best):
            best = count
    return best


class _WorkerCap(NamedTuple):
    """Something of which there is enough for so many workers."""

    workers: int
    reason: str


def _lowest_cap(facts: Facts, start_method: str) -> _WorkerCap:
    """Say how many workers there can be at most, and what runs out first."""
    host = facts.host
    caps = [_WorkerCap(max(1, host.cpus // host.local_ranks), "CPUs")]

    idle_bytes = FORKED_BYTES if start_method == "fork" else SPAWNED_BYTES
    # The batch that is being made, and those that wait.
    batch_bytes = (1 + _BATCHES_AHEAD) * (facts.batch_bytes or 0)
    room_bytes = host.available_bytes // _MEMORY_SHARE
    caps.append(_WorkerCap(int(room_bytes // (idle_bytes + batch_bytes)), "memory"))

    pressure = host.pressure or 0.0
    if pressure > _MOST_PRESSURE:
        reason = f"tasks wait for memory {pressure:.0f} % of the time"
        caps.append(_WorkerCap(1, reason))

    variable = "LOADERKIT_MAX_WORKERS"
    text = facts.environment.get(variable, "")
    if text:
        caps.append(_WorkerCap(parse_variable(variable, text), variable))
    return min(caps)


def _start_method_of_any(facts: Facts, overrides: SettingOverrides) -> Decision[str]:
    """Say how workers start, should there be any."""
    asked = overrides.multiprocessing_context
    asked_name = None if asked is None else str(asked)
    requested = _requested(asked_name, START_METHOD_VARIABLE, facts)
    if requested is not None:
        return requested
    if facts.start_method != "fork" and facts.unsendable and _can_fork(facts):
        reason = f"{facts.start_method!r} is not possible: {facts.unsendable}"
        return Decision("fork", reason)
    return Decision(facts.start_method, "this Python's default")


def _can_fork(facts: Facts) -> bool:
    """Tell whether forked workers, which need no sending, would find all as it is here.

    A device that has been used does not survive a fork, nor does an open database.
    """
    can_begin = "fork" in facts.start_methods and facts.fork_is_sound
    return can_begin and not facts.device.started and facts.fork_hazard is None


def _why_none_can_start(facts: Facts, overrides: SettingOverrides) -> str:
    """Say why workers cannot be sent the dataset; empty where they need not be."""
    is_forked = _start_method_of_any(facts, overrides).value == "fork"
    return "" if is_forked else facts.unsendable


def _batches_ahead(facts: Facts, num_workers: int) -> int:
    """Count the batches that a worker, or a thread, may make ahead: at least one."""
    if not facts.batch_bytes:
        return _BATCHES_AHEAD
    fitting = _bytes_ahead(facts) // (facts.batch_bytes * max(1, num_workers))
    return max(1, min(_BATCHES_AHEAD, fitting))


def _bytes_ahead(facts: Facts) -> int:
    """Say how much memory batches that are made ahead may take."""
    return min(_MOST_AHEAD_BYTES, int(facts.host.available_bytes * _AHEAD_SHARE))


def _largest_batch_in_words(facts: Facts) -> str:
    if facts.batch_bytes is None:
        return ""
    return f" of {format_bytes(facts.batch_bytes)} at most"
