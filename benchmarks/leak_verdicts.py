"""How often a leak in noise is called one, and what only looks so: a table.

Run it with ``python -m benchmarks.leak_verdicts [--runs 300] [--save]``; the series are
those of ``tests/leaks/series.py``.  It takes some minutes, and is written in Markdown
for docs/leaks.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from loaderkit.leaks.trend import LEAKING, NEEDS_MORE, STEADY, fit_trend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from loaderkit.leaks.trend import Verdict

HERE = Path(__file__).parent
SAVED = HERE / "results" / "soak-leak-series.txt"
FLOOR_BYTES = 16 << 10
EPOCHS = 30
MOST_LOOKS = 6
"""How often a run is continued for as long as the verdict asks for."""


class Leak(Protocol):
    """What ``tests/leaks/series.py`` calls one."""

    def readings(self, seed: int, epochs: int) -> Sequence[float]: ...


class LeakKind(NamedTuple):
    """A row of the table."""

    name: str
    draw: Callable[[int], Leak]
    """Gives the leak of a seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300, help="series a row")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    table = make_table(options.runs)
    print(table)
    if options.save:
        SAVED.write_text(f"{make_heading()}\n\n{table}\n")


def make_heading() -> str:
    """Say when and where the figures were made."""
    day = datetime.now(timezone.utc).date()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{day}, 2 cores, 24 GiB, {versions}"


def make_table(runs: int) -> str:
    """Make the table.

    Args:
        runs: Series a row, with the seeds from 0.

    Returns:
        Markdown.
    """
    series = _load_series()
    columns = "leaking | needs more | steady | leaking after the epochs asked for"
    lines = [
        f"| {runs} series each, {EPOCHS} epochs | {columns} |",
        "|---|---|---|---|---|",
    ]
    lines += [_row_of_leak(kind, runs) for kind in _leak_kinds(series)]
    lines += [_row_of_lookalike(series, name, runs) for name in series.LOOKALIKES]
    return "\n".join(lines)


def _row_of_leak(kind: LeakKind, runs: int) -> str:
    first_verdicts: Counter[Verdict] = Counter()
    last_verdicts: Counter[Verdict] = Counter()
    for seed in range(runs):
        verdicts = _judge_until_decided(kind.draw(seed), seed)
        first_verdicts[verdicts[0]] += 1
        last_verdicts[verdicts[-1]] += 1

    counts = [
        first_verdicts[LEAKING],
        first_verdicts[NEEDS_MORE],
        first_verdicts[STEADY],
        last_verdicts[LEAKING],
    ]
    cells = " | ".join(f"{100 * count / runs:.0f} %" for count in counts)
    return f"| {kind.name} | {cells} |"


def _row_of_lookalike(series: Any, name: str, runs: int) -> str:
    """Count verdicts: a false alarm is so rare that percents would hide it."""
    verdicts: Counter[Verdict] = Counter()
    for seed in range(runs):
        readings = series.lookalike(name, seed)
        verdicts[fit_trend(readings, floor=FLOOR_BYTES).verdict] += 1
    cells = f"**{verdicts[LEAKING]}** | {verdicts[NEEDS_MORE]} | {verdicts[STEADY]} | "
    return f"| look-alike: {name.replace('_', ' ')} (count) | {cells} |"


def _leak_kinds(series: Any) -> list[LeakKind]:
    """List the leaks: lines in noise, steps, falls, and any of them."""
    rate = 80 << 10
    kinds = []
    for noise in ("normal", "heavy"):
        for signal in (3, 5, 8, 12, 20):
            leak = series.Leak(rate, signal=signal, noise=noise)
            name = f"a line, {signal} standard errors, {noise} noise"
            kinds.append(_fixed_kind(name, leak))
    for period in (2, 5, 6, 8, 10):
        leak = series.Leak(rate, period=period)
        kinds.append(_fixed_kind(f"kept every {period} epochs, no noise", leak))

    fall = series.Leak(rate, fall=0.33, fall_at=20)
    kinds.append(_fixed_kind("one fall by a third, no noise", fall))
    noisy_fall = series.Leak(rate, fall=0.33, fall_at=20, signal=12)
    kinds.append(_fixed_kind("the same, 12 standard errors", noisy_fall))

    kinds.append(LeakKind("any of these, from 5 standard errors", series.any_leak))
    return kinds


def _fixed_kind(name: str, leak: Leak) -> LeakKind:
    """Make the row of one leak, of which each seed draws other noise."""
    return LeakKind(name, lambda _seed: leak)


def _judge_until_decided(leak: Leak, seed: int) -> list[Verdict]:
    """Judge a run, and go on for as long as the verdict asks for."""
    verdicts: list[Verdict] = []
    epochs = EPOCHS
    while len(verdicts) < MOST_LOOKS:
        trend = fit_trend(leak.readings(seed, epochs), floor=FLOOR_BYTES)
        verdicts.append(trend.verdict)
        if trend.verdict != NEEDS_MORE:
            break
        epochs += trend.more_epochs
    return verdicts


def _load_series() -> ModuleType:
    """Import the series that the tests use; the tests are no package."""
    file = HERE.parent / "tests" / "leaks" / "series.py"
    spec = importlib.util.spec_from_file_location("series", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their own module up there.
    sys.modules["series"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
