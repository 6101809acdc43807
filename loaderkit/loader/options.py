"""What can be asked of ``build_loader``, by option or by variable.  Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from loaderkit.answers import answer_wrong_calls
from loaderkit.arguments import (
    check_choice,
    check_integer,
    check_names,
    check_number,
    check_truth,
    check_variable,
    read_truth,
)
from loaderkit.errors import OptionError, VariableError
from loaderkit.fixes import Fix, Setting
from loaderkit.function_arguments import check_callable
from loaderkit.nearest_names import nearest_name
from loaderkit.units import size_in_bytes
from loaderkit.value_words import kind_of, show_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Check: TypeAlias = Callable[[str, Any], Any]
    """Takes the name of an option and its value, and returns the value as it is used;
    raises an OptionError."""

Shuffle: TypeAlias = bool | Literal["block", "batches"]
"""Shuffle the samples, or not, or blocks of neighbours, or whole batches."""
Oversized: TypeAlias = Literal["raise", "alone", "skip"]
"""What is done about a sample above a limit: an error, a batch of its own, or it is
left out."""

SIZES = ("nodes", "edges", "bytes", "tokens")
"""What the batches of a loader can be limited by."""
_START_METHODS = ("fork", "spawn", "forkserver")
_DEFAULT_BUCKETS = 8
"""Chosen: few enough shapes for what compiles a kernel for each, and with lengths that
spread evenly an eighth of the range is the most that a sample is padded by."""
MOST_RANKS = 2**20
"""More than any cluster has.  An epoch repeats samples until each rank has one, so that
a mistyped number would fill the memory."""
_LONGEST_TIMEOUT_S = 2_147_483
"""24 days: ``poll`` of the kernel, by which torch waits for a worker, takes 2**31 - 1
milliseconds, and torch ends with an ``OverflowError`` from there on."""
_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1
"""The range of ``torch.manual_seed``."""


@answer_wrong_calls
@dataclass(frozen=True)
class SettingOverrides:
    """What the caller asked for; None leaves it to the plan."""

    num_workers: int | None = None
    """Processes that make batches."""
    pin_memory: bool | None = None
    """Copy batches to page-locked memory."""
    persistent_workers: bool | None = None
    """Keep the workers from epoch to epoch."""
    prefetch_factor: int | None = None
    """Batches asked of each worker ahead of time."""
    multiprocessing_context: str | BaseContext | None = None
    """How workers start: "fork", "spawn" or "forkserver", or a context of these."""
    in_order: bool | None = None
    """Give batches in the order of their numbers."""
    read_ahead: int | None = None
    """Batches a thread makes ahead of time where there are no workers."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value, check = getattr(self, option.name), _CHECKS.get(option.name)
            may_be_none = option.default is None or option.name in _NONE_MEANS_SOMETHING
            if check is None or (value is None and may_be_none):
                continue
            # A checked value replaces the given one, such as numpy's 3 by Python's.
            # The options are frozen for everybody else.
            object.__setattr__(self, option.name, check(option.name, value))
        if self.num_workers == 0:
            self.refuse_without_workers("num_workers=0")

    @property
    def needs_workers(self) -> str:
        """Name an option that means nothing without workers; empty if none is given."""
        need = _find_need_of_workers(self)
        return "" if need is None else need.option

    def refuse_without_workers(self, why_none: str) -> None:
        """Refuse options that would have no effect where there are no workers.

        Args:
            why_none: Why there are none.

        Raises:
            OptionError: One of these options was given.
        """
        need = _find_need_of_workers(self)
        if need is not None:
            message = f"{need.option} was given without workers ({why_none})."
            fix = f"num_workers=1, or drop {need.option}"
            raise OptionError(message, why=need.reason, fix=fix)


@answer_wrong_calls
@dataclass(frozen=True)
class LoaderOptions(SettingOverrides):
    """Everything that can be asked of ``build_loader``."""

    batch_size: int | Literal["auto"] | None = "auto"
    """Samples of a batch; "auto" is 1, or as many as the other limits allow.  None
    gives the samples themselves, without batches, as torch's DataLoader does."""
    max_nodes: int | None = None
    """Nodes of a batch at most."""
    max_edges: int | None = None
    """Edges of a batch at most."""
    max_bytes: int | str | None = None
    """Bytes of a batch at most, or a text such as "64 MiB"."""
    max_tokens: int | None = None
    """Tokens of a batch at most: rows of the longest ragged field of each sample, added
    up.  Padding is not counted: where samples are padded to the longest of the batch,
    it holds more, and ``bucket_by="tokens"`` keeps that little."""
    oversized: Oversized = "raise"
    """A sample beyond a limit: "raise", "alone" (a batch of its own) or "skip"."""
    bucket_by: str | None = None
    """Batch samples of similar "nodes", "edges", "bytes" or "tokens"."""
    buckets: int = _DEFAULT_BUCKETS
    """Distinct shapes that padded batches can have then."""
    shuffle: Shuffle | None = None
    """True, False, or "block": blocks of 1,024 neighbours, 8 blocks mixed at a time.
    Of a cache in a store, the blocks of 4 shards at a time.  Or "batches": batches
    limited by size are the same in every epoch, and as many, in another order.
    None is False; only the shufflers of a data pipe are left on then, as in torch."""
    seed: int | None = None
    """What order and random numbers follow from, the same on every rank.  None draws
    one from torch, or is 0 among several ranks, as in torch's DistributedSampler."""
    generator: Any = None
    """A ``torch.Generator`` that the seed is drawn from instead."""
    drop_last: bool = False
    """Leave out a last batch that is not full; among ranks, what is uneven."""
    sampler: Iterable[Any] | None = None
    """Chooses rows instead: any of torch's, weighted ones too."""
    batch_sampler: Iterable[Sequence[Any]] | None = None
    """Chooses whole batches instead."""
    rank: int | None = None
    """Which process this is; asked of torch.distributed or the launcher if None."""
    world_size: int | None = None
    """How many train together; asked of torch.distributed or the launcher if None."""
    timeout: float = 0
    """Seconds to wait for a worker; 0 waits for ever."""
    collate_fn: Callable[[Any], Any] | None = None
    """How samples are joined; the dataset's own way, PyG's or torch's if None."""
    batch_transform: Callable[[Any], Any] | None = None
    """Called with each batch once it is joined, where it is joined; may change it in
    place; what it returns is the batch."""
    worker_init_fn: Callable[[int], None] | None = None
    """Called in every worker as it starts."""
    follow_batch: Sequence[str] | None = None
    """Fields that get a ``_batch`` vector of their own, as in PyG."""
    exclude_keys: Sequence[str] | None = None
    """Fields left out of batches, as in PyG."""
    lookahead: bool = False
    """Whoever takes the batches fetches each before it uses the one before, as
    Lightning does of a stream without a length: a state leaves out the last one."""
    probe: bool = True
    """Read a few samples to measure what they cost, where that decides something."""

    def __post_init__(self) -> None:
        if _is_zero(self.shuffle):
            # torch takes shuffle=0.
            object.__setattr__(self, "shuffle", False)
        if self.batch_size is None and (self.limits or self.batch_sampler is not None):
            # What says where batches end is given: None asks for no further limit.
            object.__setattr__(self, "batch_size", "auto")
        super().__post_init__()
        self._check_values()
        self._check_contradictions()

    @property
    def limits(self) -> Mapping[str, int]:
        """The most a batch may hold, by what is counted."""
        limits = {name: getattr(self, f"max_{name}") for name in SIZES}
        return {name: limit for name, limit in limits.items() if limit is not None}

    @property
    def most_samples(self) -> int | None:
        """The most samples of a batch; None where only other limits count."""
        if isinstance(self.batch_size, int):
            return self.batch_size
        limited = self.batch_sampler is not None or self.limits
        return None if limited else 1

    @property
    def batched(self) -> bool:
        """Whether samples are joined into batches at all."""
        return self.batch_size is not None

    def given(self) -> list[str]:
        """Name the options that ask for something else than the default."""
        names = []
        for option in fields(self):
            value = getattr(self, option.name)
            if value is option.default:
                continue
            # Nothing equals None; an array would compare its elements.
            if option.default is None or value != option.default:
                names.append(option.name)
        if self.shuffle is False:
            names.remove("shuffle")  # the order of a sampler, or a stream, as it is
        return names

    def _check_values(self) -> None:
        for name in ("sampler", "batch_sampler"):
            _check_iterable(name, getattr(self, name))
        kinds = [kind.__name__ for kind in type(self.sampler).__mro__]
        gives_batches = any("BatchSampler" in kind for kind in kinds)
        # Where nothing is joined (batch_size=None), torch gives the dataset whatever
        # the sampler gives: whole batches as keys, too.
        if gives_batches and self.batched:  # torch's, PyG's, users'
            message = f"sampler must give single rows, got {kind_of(self.sampler)}."
            fix = "batch_sampler=sampler"
            raise OptionError(message, why="it gives whole batches", fix=fix)
        _check_generator(self.generator)
        if (self.rank is None) != (self.world_size is None):
            message = f"rank and world_size belong together, got rank={self.rank} and "
            message += f"world_size={self.world_size}."
            rank, size = self.rank or 0, self.world_size
            fix = f"rank={rank}, world_size={size or rank + 1}, or leave both out: "
            fix += "torch.distributed and launchers tell them"
            raise OptionError(
                message, why="one says nothing without the other", fix=fix
            )
        if self.rank is not None and self.world_size is not None:
            check_integer("rank", self.rank, least=0, most=self.world_size - 1)

    def _check_contradictions(self) -> None:
        if self.batch_sampler is not None:
            why = "it chooses the samples of whole batches"
            others = {"sampler", "batch_size", "drop_last", *_ORDER_OPTIONS}
            self._refuse_beside("batch_sampler", why, others)
        if self.sampler is not None:
            why = "it chooses the samples, in its own order"
            self._refuse_beside("sampler", why, set(_ORDER_OPTIONS))
        if self.collate_fn is not None:
            why = "it joins the samples in its own way"
            self._refuse_beside("collate_fn", why, {"follow_batch", "exclude_keys"})
        if not self.batched:
            why = "samples are given one by one, and nothing is joined"
            self._refuse_beside("batch_size=None", why, _BATCH_OPTIONS)
        if self.seed is not None:
            self._refuse_beside("seed", "both would choose the seed", {"generator"})
        if self.oversized != "raise" and not self.limits:
            message = f"oversized={self.oversized!r} was given without a limit."
            fix = "max_nodes=..., max_edges=..., max_bytes=... or max_tokens=..."
            raise OptionError(message, why="no sample is too large for none", fix=fix)
        if self.buckets != _DEFAULT_BUCKETS and self.bucket_by is None:
            message = f"buckets={self.buckets} was given without bucket_by."
            why = "it counts the buckets that samples are sorted into by size"
            raise OptionError(
                message, why=why, fix='bucket_by="nodes", or drop buckets'
            )
        if self.shuffle == "batches":
            self._check_shuffled_batches()

    def _check_shuffled_batches(self) -> None:
        if not self.limits and self.bucket_by is None:
            message = "shuffle='batches' was given without a limit or bucket_by."
            why = "batches of batch_size samples are as many in every epoch anyway"
            fix = "shuffle=True; or max_nodes=..., max_bytes=... or max_tokens=..."
            raise OptionError(message, why=why, fix=fix)
        if self.drop_last:
            message = "shuffle='batches' was given with drop_last."
            why = "the batches are the same in every epoch, so that the samples of one "
            why += "that is not full would be left out of all of them"
            raise OptionError(message, why=why, fix="drop_last=False")

    def _refuse_beside(self, name: str, why: str, others: set[str]) -> None:
        for other in self.given():
            if other in others:
                another = ", another rule for batches" if "sampler" in name else ""
                if other == "batch_size" and not self.batched:
                    other = "batch_size=None"
                message = f"{name} was given with {other}{another}."
                raise OptionError(message, why=why, fix=f"drop {other}, or {name}")


_ORDER_OPTIONS = ("shuffle", "bucket_by", *(f"max_{name}" for name in SIZES))
"""What decides the order or the ends of batches."""
_BATCH_OPTIONS = {
    "drop_last",
    "bucket_by",
    "follow_batch",
    "exclude_keys",
    "batch_transform",
}
"""What says how samples are joined, and what is done with a batch."""


def _is_zero(value: object) -> bool:
    """Tell whether an option is 0 or numpy's False; not whether it is empty."""
    return isinstance(value, int | np.bool_) and not value


class _NeedOfWorkers(NamedTuple):
    """An option that has no effect without workers."""

    option: str
    reason: str


def _find_need_of_workers(overrides: SettingOverrides) -> _NeedOfWorkers | None:
    """Find an option that was given and has no effect without workers."""
    if overrides.prefetch_factor is not None:
        reason = "it counts batches of a worker; read_ahead is a thread's"
        return _NeedOfWorkers("prefetch_factor", reason)
    if overrides.persistent_workers:
        return _NeedOfWorkers("persistent_workers", "there are no workers to keep")
    if overrides.multiprocessing_context is not None:
        return _NeedOfWorkers("multiprocessing_context", "it says how workers start")
    if overrides.in_order is False:
        reason = "without workers batches can only come in order"
        return _NeedOfWorkers("in_order", reason)
    if isinstance(overrides, LoaderOptions):
        if overrides.timeout:
            return _NeedOfWorkers("timeout", "it bounds the wait for a worker")
        if overrides.worker_init_fn is not None:
            return _NeedOfWorkers("worker_init_fn", "it is called in workers")
    return None


def _check_generator(generator: object) -> None:
    # By what it can do, since options are checked without importing torch.
    has_seed = hasattr(generator, "manual_seed") and not isinstance(generator, type)
    if generator is not None and not has_seed:
        message = f"generator must be a torch.Generator, got {show_value(generator)}."
        fix = "generator=torch.Generator().manual_seed(0), or seed=0"
        why = f"it is {kind_of(generator)}"
        raise OptionError(message, why=why, fix=fix)


def _check_iterable(name: str, value: object) -> None:
    gives_rows = isinstance(value, Iterable) or hasattr(value, "__getitem__")
    gives_rows &= getattr(value, "ndim", 1) != 0  # numbers of numpy have __getitem__
    if value is None or (gives_rows and not isinstance(value, str | bytes)):
        return
    message = f"{name} must give rows when it is iterated over, got "
    message += f"{show_value(value)}."
    why = f"its type is {type(value).__name__}"
    fix = f"{name}=a torch Sampler, or a list of rows"
    if isinstance(value, type):
        why = "it is a class, and was not called"
        fix = f"{name}={value.__name__}(...)"
    raise OptionError(message, why=why, fix=fix)


def _check_size_name(name: str, value: object) -> str:
    # A dataset may say sizes of its own, so any name will do.
    if isinstance(value, str) and value:
        return value
    # All samples have bytes; nodes are of graphs alone.
    message = f"{name} must be the name of a size, got {show_value(value)}."
    why = f"samples have {', '.join(SIZES)}, or what sizes() of the dataset says"
    fix = Fix.of(
        Setting(name, "bytes"),
        "; of graphs 'nodes', of texts 'tokens'; for a size of your own, give the "
        "dataset sizes() -> {name: array}",
    )
    raise OptionError(message, why=why, fix=fix)


def _integer_from(least: int) -> Check:
    """Take an integer from a smallest one; above ``sys.maxsize`` all are alike.

    What so many workers or batches take is calculated with floats, which end earlier
    than integers do.
    """
    return lambda name, value: min(check_integer(name, value, least=least), sys.maxsize)


def _integer_within(least: int, most: int) -> Check:
    return lambda name, value: check_integer(name, value, least=least, most=most)


def _one_of(*choices: object) -> Check:
    return lambda name, value: check_choice(name, value, choices)


_OVERSIZED = ("raise", "alone", "skip")
_OVERSIZED_ELSEWHERE = {
    **dict.fromkeys(("drop", "ignore", "filter", "remove", "discard"), "skip"),
    **dict.fromkeys(("single", "own", "allow", "keep", "separate"), "alone"),
    **dict.fromkeys(("error", "fail", "refuse", "strict"), "raise"),
}
"""What other libraries call these."""


def _check_oversized(name: str, value: object) -> str:
    if isinstance(value, str) and value.lower() in _OVERSIZED_ELSEWHERE:
        wanted = "'raise', 'alone' or 'skip'"
        message = f"{name} must be {wanted}, got {value!r}."
        fix = Setting(name, _OVERSIZED_ELSEWHERE[value.lower()])
        raise OptionError(message, why="it has another name here", fix=fix)
    chosen: str = check_choice(name, value, _OVERSIZED)
    return chosen


def _callable_like(example: str, takes: str) -> Check:
    return lambda name, value: check_callable(name, value, example, takes)


def _check_batch_size(name: str, value: object) -> int | str:
    if isinstance(value, str) and value == "auto":
        return value
    return _check_amount(name, value)


def _check_amount(name: str, value: object) -> int:
    """Take a number of samples, or of what they hold: any from 1.

    More than ``sys.maxsize`` no dataset has.  Numbers above it fit neither int64 nor
    ``islice``, and ask for the same batch.
    """
    amount: int = _integer_from(1)(name, value)
    return amount


def _check_bytes(name: str, value: object) -> int:
    """Take bytes, as a number or as a text such as "64 MiB"."""
    if isinstance(value, str):
        value = size_in_bytes(name, value)
    return _check_amount(name, value)


def _check_seed(name: str, value: object) -> int:
    if hasattr(value, "manual_seed"):
        message = f"{name} must be an integer, got a generator."
        why = "another option takes it"
        raise OptionError(message, why=why, fix="generator=generator")
    return check_integer(name, value, least=_MIN_SEED, most=_MAX_SEED)


def _check_timeout(name: str, value: object) -> float:
    seconds = check_number(name, value, least=0)
    if seconds > _LONGEST_TIMEOUT_S:
        message = f"{name} must be at most {_LONGEST_TIMEOUT_S:,} s, got "
        message += f"{show_value(value)}."
        why = "the system waits for no longer; without a timeout it does"
        raise OptionError(message, why=why, fix=Setting(name, 0))
    # torch says in its error what it was given: 5 seconds, not 5.0.
    return int(seconds) if seconds.is_integer() else seconds


def _check_start_method(name: str, value: object) -> str:
    if isinstance(value, BaseContext):
        return str(value.get_start_method())
    method: str = check_choice(name, value, _START_METHODS)
    return method


_CHECKS: Mapping[str, Check] = {
    "num_workers": _integer_from(0),
    "pin_memory": check_truth,
    "persistent_workers": check_truth,
    "prefetch_factor": _integer_from(1),
    "multiprocessing_context": _check_start_method,
    "in_order": check_truth,
    "read_ahead": _integer_from(0),
    "batch_size": _check_batch_size,
    **{f"max_{name}": _check_amount for name in SIZES},
    "max_bytes": _check_bytes,
    "oversized": _check_oversized,
    "bucket_by": _check_size_name,
    "buckets": _check_amount,
    "shuffle": _one_of(True, False, "block", "batches"),
    "seed": _check_seed,
    "drop_last": check_truth,
    "world_size": _integer_within(1, MOST_RANKS),
    "rank": _integer_from(0),
    "timeout": _check_timeout,
    "collate_fn": _callable_like("lambda samples: samples", "samples"),
    "batch_transform": _callable_like("lambda batch: batch", "batch"),
    "worker_init_fn": _callable_like("lambda worker: None", "worker"),
    "follow_batch": check_names,
    "exclude_keys": check_names,
    "lookahead": check_truth,
    "probe": check_truth,
}
"""How the value of each option is checked, by its name."""

_NONE_MEANS_SOMETHING = {"batch_size"}
"""Options that may be None, although that is not their default."""

_PREFIX = "LOADERKIT_"
_VARIABLES: Mapping[str, Check] = {
    f"{_PREFIX}{field_.name.upper()}": _CHECKS[field_.name]
    for field_ in fields(SettingOverrides)
} | {f"{_PREFIX}MAX_WORKERS": _integer_from(0)}
"""How the value of each variable of the environment is checked."""
START_METHOD_VARIABLE = f"{_PREFIX}MULTIPROCESSING_CONTEXT"
"""The one that says how workers start."""
_OTHER_VARIABLES = frozenset({"LOADERKIT_UPDATE_SNAPSHOTS"})
"""Variables that other parts of loaderkit read."""


def check_variables(environment: Mapping[str, str]) -> None:
    """Refuse variables of ours that do not exist, or that make no sense.

    Args:
        environment: Variables of the environment, by name.

    Raises:
        VariableError: One begins with ``LOADERKIT_`` and is none of ours, or its value
            cannot be read.
    """
    for name, text in environment.items():
        if not name.startswith(_PREFIX) or name in _OTHER_VARIABLES:
            continue
        if name not in _VARIABLES:
            raise _no_such_variable(name, text)
        if text:
            parse_variable(name, text)


def _no_such_variable(name: str, text: str) -> VariableError:
    message = f"There is no variable {name}."
    why = "a misspelt variable would be ignored"
    # Without what all of them begin with: it makes any two of them alike.
    word = name.removeprefix(_PREFIX).lower()
    option = word if word in _CHECKS else None
    if option is not None:
        why = "variables are settings of a machine, and this is the training's"
        return VariableError(
            message, why=why, fix=f"build_loader(..., {option}={text})"
        )
    settings = [variable.removeprefix(_PREFIX).lower() for variable in _VARIABLES]
    nearest = nearest_name(word, settings)
    fix = f"it is one of {', '.join(_VARIABLES)}; or unset {name}"
    if nearest is not None:
        fix = f"did you mean {_PREFIX + nearest.upper()!r}?"
    return VariableError(message, why=why, fix=fix)


def parse_variable(name: str, text: str) -> Any:
    """Read a variable of the environment.

    Args:
        name: Its name.
        text: What it is set to.

    Returns:
        A number, a truth or a start method, as the option of that name takes it.

    Raises:
        VariableError: It is none of these.
    """
    check = _VARIABLES[name]
    parse: Callable[[str], object] = int
    if check is check_truth:
        parse = read_truth
    elif check is _check_start_method:
        parse = {method: method for method in _START_METHODS}.__getitem__
    return check_variable(name, text, parse, check)
