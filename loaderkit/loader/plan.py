"""Facts and overrides in, the settings of a loader and their reasons out.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loaderkit.errors import LoaderError
from loaderkit.loader.forecast import (
    FORKED_BYTES,
    SPAWNED_BYTES,
    Forecast,
    forecast,
    pinned_bytes,
)
from loaderkit.loader.options import parse_variable
from loaderkit.notebook import card
from loaderkit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loaderkit.loader.downloads import DownloadPlan
    from loaderkit.loader.facts import Facts
    from loaderkit.loader.options import SettingOverrides
    from loaderkit.loader.reading import ReadingForecast

QUEUE_S = 0.0003
"""What a message between processes costs besides its bytes: locks, wake-ups."""
_GAIN = 1.3
"""Workers must promise so much: on 2 cores, 1.9 came to 1.6, and 1.5 to 1.1."""
_SPAWN_GAIN = 1.6
"""Spawned ones so much, since each imports torch again."""
_MORE = 1.1
"""A worker more must bring so much, or it is not worth its memory."""
_COPYING = 2e9
"""Bytes a second from which on making a batch is copying memory, which workers would
only repeat: W2 in memory is made at 5.7 GB/s, and two workers took it to 0.6 times."""
_FORK_S, _SPAWN_S = 0.05, 4.0
"""To start a worker: forked, or spawned (it imports torch again)."""
_AHEAD_SHARE, _AHEAD_MOST = 0.05, 1 << 30
"""Batches made ahead take at most this part of the memory that is left, and so much."""
_PINNED_SHARE = 0.1
"""Page-locked batches take at most this part of it."""
_PREFETCH = 2
_PRESSED = 10.0
"""Percent of the time waiting for memory from which on there is one worker at most."""


SETTINGS = (
    "num_workers", "read_ahead", "pin_memory", "persistent_workers", "prefetch_factor",
    "multiprocessing_context", "in_order", "sharing", "seed",
)  # fmt: skip
"""Of a plan, in the order in which it prints them."""


@dataclass(frozen=True)
class LoaderPlan:
    """The settings of a loader, with the reason of each."""

    num_workers: int
    """Processes that make batches; 0 makes them in the training process."""
    read_ahead: int
    """Without workers: batches a thread makes ahead, once steps take long enough."""
    pin_memory: bool
    """Batches are copied to page-locked memory."""
    persistent_workers: bool
    """Workers live from epoch to epoch."""
    prefetch_factor: int | None
    """Batches asked of each worker ahead of time; None without workers."""
    multiprocessing_context: str | None
    """How workers start; None without workers."""
    in_order: bool
    """Batches come in the order of their numbers."""
    sharing: str
    """How batches leave a worker: "parcel", "torch" or "none"."""
    seed: int
    """What order and random numbers follow from."""
    batching: str
    """How samples become batches, in words."""
    reasons: Mapping[str, str]
    """Why, by the name of the setting."""
    forecast: Forecast
    """Memory against each limit."""
    warnings: tuple[str, ...] = ()
    """What may break, with the fix."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the environment that were followed."""
    probe: str = ""
    """What measuring took, where that was long; empty otherwise."""
    reading: ReadingForecast | None = None
    """What epochs read from disk, and how fast; None without a cache on local disk."""
    downloads: DownloadPlan | None = None
    """What epochs take from a store; None where the samples are on local disk."""

    def _repr_html_(self) -> str:
        return card(
            self.batching,
            mood="unsure" if self.warnings else "plain",
            heads=("setting", "value", "why"),
            rows=[
                (name, str(getattr(self, name)), self.reasons[name])
                for name in SETTINGS
            ],
            notes=[
                *(f"warning: {each}" for each in self.warnings),
                *([f"reading: {self.reading}"] if self.reading else []),
                *str(self.forecast).splitlines(),
            ],
        )

    def __str__(self) -> str:
        lines = [f"{'batches':<24}{self.batching}"]
        for name in SETTINGS:
            value = str(getattr(self, name))
            lines.append(f"{name:<24}{value:<11} {self.reasons[name]}")
        if self.probe:
            lines.append(f"{'probe':<24}{self.probe}")
        if self.reading is not None:
            lines.append(f"{'reading':<24}{self.reading}")
        if self.downloads is not None:
            lines.append(f"{'store':<24}{self.downloads}")
        lines += [f"warning: {each}" for each in self.warnings]
        return "\n".join([*lines, str(self.forecast)])


def decide(
    facts: Facts,
    overrides: SettingOverrides,
    *,
    batching: str = "",
    batches: int | None = None,
    seed: int = 0,
    seed_reason: str = "order and random numbers follow from it alone",
) -> LoaderPlan:
    """Choose every setting.

    Args:
        facts: What is known.
        overrides: What the caller asked for; it wins and is shown so.
        batching: How samples become batches, in words.
        batches: Batches of an epoch; None if unknown.
        seed: What the order follows from.
        seed_reason: Why this one.

    Returns:
        The plan.

    Raises:
        LoaderError: What was asked for cannot work here.
    """
    draft = _Draft(facts, overrides, batches)
    draft.workers()
    draft.prefetch()
    draft.context()
    draft.persistence()
    draft.pinning()
    draft.the_rest()
    draft.note("seed", seed, seed_reason)
    outlook = forecast(facts, draft.value)
    _refuse(outlook)
    return LoaderPlan(
        **draft.value,
        batching=batching,
        reasons=draft.reasons,
        forecast=outlook,
        warnings=(*draft.warnings, *outlook.warnings()),
        environment=facts.environment,
        probe=facts.measured.cost_in_words() if facts.measured else "",
    )


def rate(facts: Facts, workers: int) -> float:
    """Predict batches a second, from what was measured.

    Args:
        facts: With ``measured``.
        workers: Processes that make batches.

    Returns:
        The rate that the slowest of three allows: the workers, the training process
        that unpacks, and the processors all of them share.
    """
    found = facts.measured
    assert found is not None
    if not workers:
        return 1 / max(found.fetch_s, 1e-9)
    make, take = found.fetch_s + found.send_s, found.receive_s + QUEUE_S
    cpus = max(1, facts.host.cpus // facts.host.local_ranks)
    return 1 / max(take, make / workers, (make + take) / cpus)


class _Draft:
    """Settings chosen so far, each noted with its reason."""

    def __init__(
        self, facts: Facts, overrides: SettingOverrides, batches: int | None
    ) -> None:
        self.facts, self.overrides, self.batches = facts, overrides, batches
        self.value: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}
        self.warnings: list[str] = []

    def note(self, name: str, value: Any, reason: str) -> None:
        self.value[name], self.reasons[name] = value, reason

    def asked(self, name: str) -> bool:
        """Note what the caller, or the environment, asked for."""
        value = getattr(self.overrides, name)
        if value is not None:
            self.note(name, value, "you asked for it")
            return True
        variable = f"LOADERKIT_{name.upper()}"
        text = self.facts.environment.get(variable, "")
        if text:
            self.note(name, parse_variable(variable, text), f"{variable} asks for it")
        return bool(text)

    def workers(self) -> None:
        if self.asked("num_workers"):
            self._check_workers()
        else:
            self._choose_workers()
        if not self.value["num_workers"]:
            self.overrides.refuse_without_workers(self.reasons["num_workers"])

    def _choose_workers(self) -> None:
        facts, needed = self.facts, self.overrides.needs_workers
        if facts.daemonic:
            reason = "this process is a daemon, which may not have children"
            self.note("num_workers", 0, reason)
        elif self._unsendable():
            reason = f"workers cannot start: {facts.unpicklable}"
            self.note("num_workers", 0, reason)
        elif facts.fork_hazard and self._start_method() == "fork":
            reason = f"{facts.fork_hazard.reason}; {facts.fork_hazard.fix}"
            self.note("num_workers", 0, reason)
        elif facts.iterable:
            reason = "each worker would iterate over everything again; ask for workers "
            reason += "if the dataset splits itself by get_worker_info()"
            self.note("num_workers", 0, reason)
        elif facts.measured is None:
            self._unmeasured()
        else:
            self._measured()
        if needed and not self.value["num_workers"] and self._can_start():
            self.note("num_workers", 1, f"{needed} needs one")

    def _can_start(self) -> bool:
        """Tell whether there can be workers at all, be they worth it or not."""
        return not (self.facts.daemonic or self._unsendable()) and self._most() > 0

    def _check_workers(self) -> None:
        count, cpus = self.value["num_workers"], self.facts.host.cpus
        if count and self.facts.daemonic:
            what = f"{count} workers were asked for in a daemonic process."
            why = "daemonic processes may not have children"
            raise LoaderError(what, why=why, fix="num_workers=0")
        if count > cpus:
            text = f"{count} workers share {cpus} CPUs ({self.facts.host.cpus_from}); "
            self.warnings.append(text + f"num_workers={cpus} or fewer wastes less")

    def _start_method(self) -> str:
        return str(self.overrides.multiprocessing_context or self.facts.start_method)

    def _unsendable(self) -> bool:
        facts, method = self.facts, self._start_method()
        forks = "fork" in facts.start_methods and not facts.device.started
        return bool(facts.unpicklable) and method != "fork" and not forks

    def _unmeasured(self) -> None:
        if self.facts.gathering:
            reason = "gathering is usually quicker than sending batches (not measured)"
            self.note("num_workers", 0, reason)
            return
        count = min(2, max(0, self.facts.host.cpus - 1) or 1, self._most())
        because = f": {self.facts.unmeasured}" if self.facts.unmeasured else ""
        reason = f"more than 2 only when measured to help (not measured{because})"
        self.note("num_workers", count, reason)

    def _measured(self) -> None:
        facts, most = self.facts, self._most()
        found = facts.measured
        assert found is not None
        copying = found.batch_bytes / max(found.fetch_s, 1e-9)
        best = 0 if copying > _COPYING else self._quickest(most)
        fetch = format_seconds(found.fetch_s)
        send = format_seconds(found.send_s + found.receive_s + QUEUE_S)
        costs = f"a batch takes {fetch} to make and {send} to send"
        if not best:
            text = f"{costs}: workers would not be quicker"
            if copying > _COPYING:
                text = f"{costs}: it is copying memory, at {copying / 1e9:.1f} GB/s, "
                text += "which workers would only do again"
            if most < facts.host.cpus:
                text += f" (at most {most} of them: {self._most_because()})"
            self.note("num_workers", 0, text)
            return
        times = rate(facts, best) / rate(facts, 0)
        cpus = f"{facts.host.cpus} CPUs by {facts.host.cpus_from}"
        reason = f"{costs}: {times:.1f} times the rate of none, on {cpus}"
        self.note("num_workers", best, reason)

    def _quickest(self, most: int) -> int:
        """Add workers while each brings enough."""
        best = 0
        first = _GAIN if self.facts.start_method == "fork" else _SPAWN_GAIN
        for count in range(1, most + 1):
            gain = _MORE if best else first
            if rate(self.facts, count) >= gain * rate(self.facts, best):
                best = count
        return best

    def _most(self) -> int:
        return min(count for count, _ in self._caps())

    def _most_because(self) -> str:
        return min(self._caps())[1]

    def _caps(self) -> list[tuple[int, str]]:
        facts = self.facts
        caps = [(max(1, facts.host.cpus // facts.host.local_ranks), "CPUs")]
        each = _worker_bytes(facts) + (1 + _PREFETCH) * (self.facts.batch_bytes or 0)
        caps.append((int(facts.host.available_bytes // 2 // each), "memory"))
        pressure = facts.host.pressure or 0.0
        if pressure > _PRESSED:
            caps.append((1, f"tasks wait for memory {pressure:.0f} % of the time"))
        cap = facts.environment.get("LOADERKIT_MAX_WORKERS", "")
        if cap:
            count = parse_variable("LOADERKIT_MAX_WORKERS", cap)
            caps.append((count, "LOADERKIT_MAX_WORKERS"))
        return caps

    def prefetch(self) -> None:
        workers = self.value["num_workers"]
        nbytes = self.facts.batch_bytes
        budget = min(_AHEAD_MOST, int(self.facts.host.available_bytes * _AHEAD_SHARE))
        fitting = budget // (nbytes * max(1, workers)) if nbytes else _PREFETCH
        depth = int(max(1, min(_PREFETCH, fitting)))
        size = "" if nbytes is None else f" of {format_bytes(nbytes)} at most"
        self._read_ahead(workers, depth, size)
        if not workers:
            self.note("prefetch_factor", None, "there are no workers")
        elif not self.asked("prefetch_factor"):
            reason = f"{depth * workers} batches{size} wait, of {format_bytes(budget)}"
            self.note("prefetch_factor", depth, reason)

    def _read_ahead(self, workers: int, depth: int, size: str) -> None:
        if self.asked("read_ahead"):
            if self.value["read_ahead"] and not workers and not self.facts.quiet:
                text = "read_ahead runs your code in a thread: random numbers that it "
                text += "draws mix with those of the training; num_workers=1, or drop "
                self.warnings.append(f"{text}read_ahead")
            return
        if workers:
            self.note("read_ahead", 0, "the workers read ahead")
        elif self.facts.quiet:
            reason = f"{depth} batches{size} from a thread, once steps take half as "
            self.note("read_ahead", depth, reason + "long as gathering")
        else:
            reason = "a thread's random numbers would mix with those of the training"
            self.note("read_ahead", 0, reason)

    def context(self) -> None:
        facts, workers = self.facts, self.value["num_workers"]
        name = "multiprocessing_context"
        if not workers:
            self.note(name, None, "there are no workers")
            return
        if self.asked(name):
            if self.value[name] not in facts.start_methods:
                msg = f"multiprocessing_context must be one of {facts.start_methods}, "
                raise ValueError(msg + f"got {self.value[name]!r}")
        elif facts.start_method != "fork" and facts.unpicklable:
            self.note(name, "fork", f"cannot be sent: {facts.unpicklable}")
        else:
            self.note(name, facts.start_method, "this Python's default")
        if self.value[name] != "fork" and facts.unpicklable:
            what = f"The dataset cannot be sent to {self.value[name]}ed workers."
            fix = "define it in a module rather than in a function or a notebook, or "
            fix += "num_workers=0"
            raise LoaderError(what, why=facts.unpicklable, fix=fix)

    def persistence(self) -> None:
        name, workers = "persistent_workers", self.value["num_workers"]
        if not workers:
            self.note(name, False, "there are no workers")
            return
        if self.asked(name):
            return
        forked = self.value["multiprocessing_context"] == "fork"
        start_s = workers * (_FORK_S if forked else _SPAWN_S)
        if self.facts.measured is None or self.batches is None:
            self.note(name, not forked, f"starting takes {format_seconds(start_s)}")
            return
        epoch_s = self.batches / rate(self.facts, workers)
        short = start_s > 0.01 * epoch_s
        text = f"an epoch takes {format_seconds(epoch_s)}, starting workers "
        text += format_seconds(start_s)
        more = "" if short else "; fresh workers give back what they held"
        self.note(name, short, text + more)

    def pinning(self) -> None:
        facts, device = self.facts, self.facts.device
        asked = self.asked("pin_memory")
        if not device.pins:
            if asked and self.value["pin_memory"]:
                text = f"pin_memory=True is not followed: {device.device} copies from "
                self.warnings.append(text + "any memory as fast; pin_memory=False")
            reason = f"{device.device} copies from any memory as fast"
            self.note("pin_memory", False, reason)
            return
        if asked:
            return
        need = pinned_bytes(self.facts.batch_bytes or 0, self.value)
        room = int(facts.host.available_bytes * _PINNED_SHARE)
        text = f"{format_bytes(need)} page-locked of {format_bytes(room)}"
        fits = need <= room
        more = ", copies run beside the computing" if fits else ": too much"
        self.note("pin_memory", fits, text + more)

    def the_rest(self) -> None:
        if not self.asked("in_order"):
            self.note("in_order", True, "the order is the same for any worker count")
        if not self.value["num_workers"]:
            self.note("sharing", "none", "batches do not leave this process")
        elif self.facts.parcels:
            reason = "one anonymous segment a batch: no /dev/shm, no file a tensor"
            self.note("sharing", "parcel", reason)
        else:
            self.note("sharing", "torch", "this system has no anonymous segments")


def _worker_bytes(facts: Facts) -> int:
    return FORKED_BYTES if facts.start_method == "fork" else SPAWNED_BYTES


def _refuse(outlook: Forecast) -> None:
    """Refuse what is certain to fail: the limit breaks before the first step."""
    for line in outlook.lines:
        if line.certain and line.limit is not None and line.need > line.limit:
            what = f"This loader needs {line.amount(line.need)} of {line.name}; "
            what += f"there are {line.amount(line.limit)}."
            raise LoaderError(what, why=line.why, fix=line.fix)
