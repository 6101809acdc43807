"""What this machine allows, what torch was told, and what a loader would do."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from loaderkit.budget.environment.settings import Environment, check_environment
from loaderkit.cli.examination_page import (
    device_sections,
    findings_section,
    host_section,
    versions_section,
)
from loaderkit.errors import BudgetError
from loaderkit.library_files import installed_version
from loaderkit.loader.page import settings_section
from loaderkit.memory.host import read_host
from loaderkit.notebook import mood_of, repr_in_a_line
from loaderkit.pages.document import HasPage, Page
from loaderkit.units import format_amount, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from loaderkit.loader.plan import LoaderPlan
    from loaderkit.memory.counters import CounterName
    from loaderkit.memory.machine import Host

_PACKAGES = ("torch", "torch-geometric", "h5py", "numpy", "loaderkit")


@dataclass(frozen=True)
class Examination(HasPage):
    """Everything a person would ask first."""

    host: Host
    """Limits of this process."""
    versions: Mapping[str, str]
    """Versions by package; "absent" where it is not installed."""
    devices: Mapping[str, Mapping[CounterName, int | str]]
    """Readings by device; a text says why there is none."""
    environment: Environment
    """Settings, judged."""
    plan: LoaderPlan
    """What ``build_loader`` decides here for a plain dataset."""

    @property
    def ok(self) -> bool:
        """Whether every setting does what it says."""
        return self.environment.ok

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        return "\n".join(_report_lines(self))

    def page(self) -> Page:
        """Show the settings, the limits, the devices and what a loader would do."""
        title = "Every setting does what it says"
        if not self.ok:
            count = len(self.environment.findings)
            title = f"{count} settings do not do what they look like"
            if count == 1:
                title = "A setting does not do what it looks like"
        return Page(
            title,
            mood=mood_of(ok=self.ok),
            sections=(
                findings_section(self.environment.findings),
                host_section(self.host),
                *device_sections(self.devices),
                versions_section(self.versions),
                settings_section(
                    self.plan.settings_in_words(),
                    heading="What build_loader decides for 64 samples of 3.91 KiB, "
                    "8 a batch",
                ),
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Give everything as plain values."""
        return {
            "host": asdict(self.host),
            "versions": dict(self.versions),
            "devices": {name: dict(values) for name, values in self.devices.items()},
            "environment": self.environment.to_json(),
            "plan": str(self.plan),
        }


def examine() -> Examination:
    """Look at the machine, the devices, the settings and the plan.

    Returns:
        The findings; nothing is changed.

    Raises:
        BudgetError: A setting keeps torch from being imported at all.
    """
    # Before the first import of torch in this process, which may never return.
    _refuse_impossible_import()
    import torch

    from loaderkit.loader.build import build_loader
    from loaderkit.memory.probes import present_devices, read_device

    # Asking makes torch read its settings for good.  Elsewhere that is left to the
    # user's program; this process ends behind the answer.
    environment = check_environment(ask_torch=True)
    devices: dict[str, Mapping[CounterName, int | str]] = {}
    for device in present_devices():
        values, missing = read_device(device, full=True)
        devices[str(device)] = {**values, **missing}
    # Samples in memory, of a size that everybody can picture: what differs from machine
    # to machine are the limits, and those are what the plan is shown for.
    samples = [torch.zeros(1000) for _ in range(64)]
    first_device = next(iter(devices), "cpu")
    plan: LoaderPlan = build_loader(samples, first_device, batch_size=8, seed=0).plan
    return Examination(read_host(), _package_versions(), devices, environment, plan)


def _refuse_impossible_import() -> None:
    """Say what would have kept us waiting or ended us, while that can still be said."""
    for finding in check_environment(ask_torch=False).findings:
        # A "danger" is one of a torch whose reader is not known: it may well import.
        if finding.prevents_import and finding.level == "crash":
            message = (
                f"{finding.variable}={finding.value} keeps torch from being imported."
            )
            raise BudgetError(message, why=finding.problem, fix=finding.fix)


def _package_versions() -> dict[str, str]:
    python = {"python": sys.version.split()[0]}
    return python | {name: installed_version(name) or "absent" for name in _PACKAGES}


def _report_lines(examination: Examination) -> Iterator[str]:
    host = examination.host
    yield "Versions: " + ", ".join(
        f"{package} {version}" for package, version in examination.versions.items()
    )
    limit = "none" if host.limit_bytes is None else format_bytes(host.limit_bytes)
    yield f"Processors: {host.cpus} ({host.cpus_from})"
    kills = _amount_or_unknown(host.oom_kills, "processes")
    pressure = "unknown" if host.pressure is None else f"{host.pressure:g} %"
    yield (
        f"Memory: {format_bytes(host.available_bytes)} to use ({host.available_from}), "
        f"cgroup limit {limit}, {kills} killed so far, "
        f"pressure {pressure}"
    )
    yield (
        f"Shared memory: {_amount_or_unknown(host.shm_free_bytes, 'bytes')} free of "
        f"{_amount_or_unknown(host.shm_bytes, 'bytes')}"
    )
    limit_of_files = (
        ", without a limit" if host.files is None else f" of {host.files:,}"
    )
    yield f"Open files: {host.files_open:,}{limit_of_files}"
    yield f"Mappings: {_amount_or_unknown(host.mappings, 'allowed')}"
    if not examination.devices:
        yield "Devices: none but the CPU"
    for device, values in examination.devices.items():
        readings = [f"{name} {_reading_text(value)}" for name, value in values.items()]
        yield f"Device {device}: " + ", ".join(readings)
    facts = examination.environment.facts
    in_effect = facts.effective or "none, the defaults"
    if facts.torch_error is not None:
        in_effect = f"none: torch raises {facts.torch_error}"
    yield f"Allocator settings in effect: {in_effect}"
    yield str(examination.environment)
    yield "A loader of 64 samples of 3.91 KiB, 8 a batch:"
    yield str(examination.plan)


def _amount_or_unknown(value: int | None, unit: str) -> str:
    return "unknown" if value is None else format_amount(value, unit)


def _reading_text(value: int | str) -> str:
    return value if isinstance(value, str) else format_bytes(value)
