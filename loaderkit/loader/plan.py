"""Facts and overrides in, the settings of a loader and their reasons out.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from loaderkit.answers import answer_wrong_names
from loaderkit.errors import LoaderError
from loaderkit.loader.decisions import (
    Decision,
    batches_per_s,
    choose_in_order,
    choose_num_workers,
    choose_persistent_workers,
    choose_pin_memory,
    choose_prefetch_factor,
    choose_read_ahead,
    choose_sharing,
    choose_start_method,
)
from loaderkit.loader.forecast import Forecast, forecast
from loaderkit.loader.page import memory_section, settings_section, waiting_sections
from loaderkit.notebook import card, repr_in_a_line
from loaderkit.pages.document import HasPage, Page
from loaderkit.wrapping import wrap_lines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loaderkit.loader.downloads import DownloadPlan
    from loaderkit.loader.facts import Facts
    from loaderkit.loader.forecast import Sharing
    from loaderkit.loader.options import SettingOverrides
    from loaderkit.loader.reading import ReadingForecast


@answer_wrong_names("forecast")
@dataclass(frozen=True)
class LoaderPlan(HasPage):
    """The settings of a loader, each with its reason.

    ``plan.num_workers.value`` is what the loader does, ``plan.num_workers.reason`` why.
    """

    num_workers: Decision[int]
    """Processes that make batches; 0 makes them in the training process."""
    read_ahead: Decision[int]
    """Without workers: batches a thread makes ahead, once steps take long enough."""
    pin_memory: Decision[bool]
    """Batches are copied to page-locked memory."""
    persistent_workers: Decision[bool]
    """Workers live from epoch to epoch."""
    prefetch_factor: Decision[int | None]
    """Batches asked of each worker ahead of time; None without workers."""
    multiprocessing_context: Decision[str | None]
    """How workers start; None without workers."""
    in_order: Decision[bool]
    """Batches come in the order of their numbers."""
    sharing: Decision[Sharing]
    """How batches leave a worker: "parcel", "torch" or "none"."""
    seed: Decision[int]
    """What order and random numbers follow from."""
    batching: str
    """How samples become batches, in words."""
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
    loading: str = ""
    """Whose samples are made at each read, and how to have a cache; empty with one."""
    downloads: DownloadPlan | None = None
    """What epochs take from a store; None where the samples are on local disk."""
    rates: Mapping[int, float] = field(default_factory=dict)
    """Batches a second by number of workers; empty where reading was not measured."""

    def settings(self) -> dict[str, Decision[object]]:
        """Give the decisions by the names of their settings, in the order above."""
        # By their type: a new setting is a field, and is printed without another line.
        values = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        return {
            name: value for name, value in values.items() if isinstance(value, Decision)
        }

    def settings_in_words(self) -> list[tuple[str, str, str]]:
        """Give the name, the value and the reason of each decision."""
        return [
            (name, str(decision.value), decision.reason)
            for name, decision in self.settings().items()
        ]

    def _repr_html_(self) -> str:
        reading = [f"reading: {self.reading}"] if self.reading else []
        if self.loading:
            reading.append(f"reading: {self.loading}")
        return card(
            self.batching,
            mood="unsure" if self.warnings else "plain",
            heads=("setting", "value", "why"),
            rows=self.settings_in_words(),
            notes=[
                *(f"warning: {warning}" for warning in self.warnings),
                *reading,
                *str(self.forecast).splitlines(),
            ],
        )

    def page(self) -> Page:
        """Show the account of memory, how long steps wait, and the settings."""
        lead = [f"warning: {warning}" for warning in self.warnings]
        if self.reading is not None:
            lead.append(f"reading: {self.reading}")
        if self.loading:
            lead.append(f"reading: {self.loading}")
        if self.downloads is not None:
            lead.append(f"store: {self.downloads}")
        return Page(
            self.batching,
            mood="unsure" if self.warnings else "plain",
            lead=tuple(lead),
            sections=(
                memory_section(self.forecast),
                *waiting_sections(self.rates, self.num_workers.value),
                settings_section(self.settings_in_words()),
            ),
        )

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        lines = [f"{'batches':<24}{self.batching}"]
        values = {
            name: str(decision.value) for name, decision in self.settings().items()
        }
        # A seed may have 19 digits, and the reasons stay below each other, two spaces
        # behind: a reason that is too long for a line goes on below itself.
        width = max(11, *(len(value) + 1 for value in values.values()))
        for name, decision in self.settings().items():
            lines.append(f"{name:<24}{values[name]:<{width}} {decision.reason}")
        if self.probe:
            lines.append(f"{'probe':<24}{self.probe}")
        if self.reading is not None:
            lines.append(f"{'reading':<24}{self.reading}")
        if self.loading:
            lines.append(f"{'reading':<24}{self.loading}")
        if self.downloads is not None:
            lines.append(f"{'store':<24}{self.downloads}")
        lines += [f"warning: {warning}" for warning in self.warnings]
        return wrap_lines("\n".join([*lines, str(self.forecast)]))


_ANY_SEED = Decision(0, "order and random numbers follow from it alone")


def decide(
    facts: Facts,
    overrides: SettingOverrides,
    *,
    batching: str = "",
    batches: int | None = None,
    seed: Decision[int] = _ANY_SEED,
) -> LoaderPlan:
    """Choose every setting.

    Args:
        facts: What is known.
        overrides: What the caller asked for; it wins and is shown so.
        batching: How samples become batches, in words.
        batches: Batches of an epoch; None if unknown.
        seed: What the order follows from.

    Returns:
        The plan.

    Raises:
        LoaderError: What was asked for cannot work here.
        OptionError: An option was given that has no effect without workers.
    """
    workers = choose_num_workers(facts, overrides, batches=batches)
    if not workers.value:
        overrides.refuse_without_workers(workers.reason)
    num_workers = workers.value
    read_ahead = choose_read_ahead(facts, overrides, num_workers=num_workers)
    prefetch = choose_prefetch_factor(facts, overrides, num_workers=num_workers)
    start_method = choose_start_method(facts, overrides, num_workers=num_workers)
    persistent = choose_persistent_workers(
        facts,
        overrides,
        num_workers=num_workers,
        start_method=start_method.value,
        batches=batches,
    )
    pin_memory = choose_pin_memory(
        facts,
        overrides,
        num_workers=num_workers,
        prefetch_factor=prefetch.value,
        read_ahead=read_ahead.value,
    )
    sharing = choose_sharing(facts, num_workers=num_workers)

    outlook = forecast(
        facts,
        num_workers=num_workers,
        read_ahead=read_ahead.value,
        prefetch_factor=prefetch.value,
        start_method=start_method.value,
        pin_memory=pin_memory.value,
        sharing=sharing.value,
        batches=batches,
    )
    _refuse_certain_failure(outlook)
    decision_warnings = (workers.warning, read_ahead.warning, pin_memory.warning)
    return LoaderPlan(
        num_workers=workers,
        read_ahead=read_ahead,
        pin_memory=pin_memory,
        persistent_workers=persistent,
        prefetch_factor=prefetch,
        multiprocessing_context=start_method,
        in_order=choose_in_order(facts, overrides),
        sharing=sharing,
        seed=seed,
        batching=batching,
        forecast=outlook,
        warnings=(*filter(None, decision_warnings), *outlook.warnings()),
        environment=facts.environment,
        probe=facts.measured.cost_in_words() if facts.measured else "",
        rates=_rates(facts, num_workers),
    )


def _rates(facts: Facts, num_workers: int) -> dict[int, float]:
    """Give batches a second without workers, with those chosen, and with up to two."""
    if facts.measured is None:
        return {}
    return {
        count: batches_per_s(facts, count) for count in sorted({0, 1, 2, num_workers})
    }


def _refuse_certain_failure(outlook: Forecast) -> None:
    """Refuse what is certain to fail: the limit breaks before the first step."""
    for entry in outlook.limits:
        if entry.certain and entry.limit is not None and entry.need > entry.limit:
            message = f"This loader needs {entry.amount(entry.need)} of {entry.name}; "
            message += f"there are {entry.amount(entry.limit)}."
            raise LoaderError(message, why=entry.why, fix=entry.fix)
