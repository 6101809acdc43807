"""What ``loaderkit doctor`` found, as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.memory.counters import COUNTERS
from loaderkit.pages.charts import Bar, Bars, Limit
from loaderkit.pages.document import Section, Table
from loaderkit.units import format_amount, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loaderkit.budget.environment.allocator_settings import EnvironmentFinding
    from loaderkit.memory.counters import CounterName
    from loaderkit.memory.machine import Host
    from loaderkit.pages.document import Block


def findings_section(findings: Sequence[EnvironmentFinding]) -> Section:
    """List the settings that do not do what they look like.

    Args:
        findings: The worst first.

    Returns:
        A section.
    """
    heading = "Settings"
    if not findings:
        return Section(heading, ("Every setting does what it says.",))
    rows = tuple(
        (
            finding.level,
            f"`{finding.variable}={finding.value}`",
            finding.problem,
            f"`{finding.fix}`",
        )
        for finding in findings
    )
    return Section(heading, (Table(("level", "setting", "why", "fix"), rows),))


def host_section(host: Host) -> Section:
    """Draw what this process may use.

    Args:
        host: The limits of this process.

    Returns:
        A section with bars of memory, and a table of what is counted.
    """
    bars = [
        Bar(
            f"memory to use ({host.available_from})",
            host.available_bytes,
            format_bytes(host.available_bytes),
            "green",
        )
    ]
    if host.used_bytes is not None:
        used = format_bytes(host.used_bytes)
        bars.append(Bar("used by the cgroup", host.used_bytes, used))
    if host.shm_bytes is not None and host.shm_free_bytes is not None:
        free = format_bytes(host.shm_free_bytes)
        text = f"{free} of {format_bytes(host.shm_bytes)}"
        bars.append(Bar("free in /dev/shm", host.shm_free_bytes, text, "green"))
    limit = None
    if host.limit_bytes is not None:
        words = f"limit of the cgroup: {format_bytes(host.limit_bytes)}"
        limit = Limit(host.limit_bytes, words)
    open_files = f"{host.files_open:,}, without a limit"
    if host.files is not None:
        open_files = f"{host.files_open:,} of {host.files:,}"
    mappings = "unknown" if host.mappings is None else f"{host.mappings:,}"
    kills = "unknown" if host.oom_kills is None else f"{host.oom_kills:,}"
    pressure = "unknown" if host.pressure is None else f"{host.pressure:g} %"
    table = Table(
        ("what", "value"),
        (
            ("processors", f"{host.cpus} ({host.cpus_from})"),
            ("open files", open_files),
            ("mappings allowed", mappings),
            ("processes killed for memory so far", kills),
            ("time that tasks waited for memory, last 10 s", pressure),
        ),
    )
    blocks: tuple[Block, ...] = (
        Bars("Memory of this machine.", tuple(bars), limit),
        table,
    )
    return Section("What this process may use", blocks)


def device_sections(
    devices: Mapping[str, Mapping[CounterName, int | str]],
) -> tuple[Section, ...]:
    """Draw what is read of each device.

    Args:
        devices: Readings by device; a text says why there is none.

    Returns:
        A section a device.
    """
    sections = []
    for device, readings in devices.items():
        bars = tuple(
            Bar(name, value, format_bytes(value))
            for name, value in readings.items()
            # A text is the reason why there is no reading.
            if isinstance(value, int) and COUNTERS[name].unit == "bytes"
        )
        drawn = {bar.name for bar in bars}
        rows = tuple(
            (name, _value_text(name, value))
            for name, value in readings.items()
            if name not in drawn
        )
        blocks: list[Block] = []
        if bars:
            blocks.append(
                Bars("Memory of the device, as torch and the driver count.", bars)
            )
        if rows:
            blocks.append(Table(("counter", "value"), rows))
        sections.append(Section(f"Device {device}", tuple(blocks)))
    return tuple(sections)


def versions_section(versions: Mapping[str, str]) -> Section:
    """List the versions.

    Args:
        versions: By package.

    Returns:
        A section with a table.
    """
    return Section(
        "Versions", (Table(("package", "version"), tuple(versions.items())),)
    )


def _value_text(name: CounterName, value: int | str) -> str:
    if isinstance(value, str):
        return value
    return format_amount(value, COUNTERS[name].unit)
