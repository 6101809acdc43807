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
from typing import Any

import torch

from loaderkit import fit_trend

HERE = Path(__file__).parent
SAVED = HERE / "results" / "soak-leak-series.txt"
FLOOR = 16 << 10
LEAKING, STEADY, NEEDS_MORE = "leaking", "steady", "needs more epochs"
MOST_LOOKS = 6
"""How often a run is continued for as long as the verdict asks for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300, help="series a row")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    text = table(options.runs)
    print(text)
    if options.save:
        SAVED.write_text(f"{heading()}\n\n{text}\n")


def heading() -> str:
    """Say when and where the figures were made."""
    day = datetime.now(timezone.utc).date()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{day}, 2 cores, 24 GiB, {versions}"


def table(runs: int) -> str:
    """Make the table.

    Args:
        runs: Series a row, with the seeds from 0.

    Returns:
        Markdown.
    """
    series = load_series()
    columns = "leaking | needs more | steady | leaking after the epochs asked for"
    lines = [f"| {runs} series each, 30 epochs | {columns} |", "|---|---|---|---|---|"]
    for name, leak in rows(series):
        first: Counter[str] = Counter()
        last: Counter[str] = Counter()
        for seed in range(runs):
            verdicts = looks(leak(seed), seed)
            first[verdicts[0]] += 1
            last[verdicts[-1]] += 1
        shares = [first[LEAKING], first[NEEDS_MORE], first[STEADY], last[LEAKING]]
        cells = " | ".join(f"{100 * count / runs:.0f} %" for count in shares)
        lines.append(f"| {name} | {cells} |")
    for name in series.LOOKALIKES:
        found: Counter[str] = Counter(
            fit_trend(series.lookalike(name, seed), floor=FLOOR).verdict
            for seed in range(runs)
        )
        cells = f"**{found[LEAKING]}** | {found[NEEDS_MORE]} | {found[STEADY]} | "
        lines.append(f"| look-alike: {name.replace('_', ' ')} (count) | {cells} |")
    return "\n".join(lines)


def rows(series: Any) -> list[tuple[str, Any]]:
    """Give the leaks by name, each a function of the seed."""
    leak, rate = series.Leak, 80 << 10
    noisy = []
    for noise in ("normal", "heavy"):
        for signal in (3, 5, 8, 12, 20):
            name = f"a line, {signal} standard errors, {noise} noise"
            noisy.append((name, leak(rate, signal=signal, noise=noise)))
    stairs = [
        (f"kept every {period} epochs, no noise", leak(rate, period=period))
        for period in (2, 5, 6, 8, 10)
    ]
    falls = [
        ("one fall by a third, no noise", leak(rate, fall=0.33, fall_at=20)),
        ("the same, 12 standard errors", leak(rate, fall=0.33, fall_at=20, signal=12)),
    ]
    fixed = [
        (name, lambda _, leak=leak: leak) for name, leak in [*noisy, *stairs, *falls]
    ]
    return [*fixed, ("any of these, from 5 standard errors", series.any_leak)]


def looks(leak: Any, seed: int) -> list[str]:
    """Judge a run, and go on for as long as the verdict asks for."""
    verdicts: list[str] = []
    epochs = 30
    while len(verdicts) < MOST_LOOKS:
        trend = fit_trend(leak.readings(seed, epochs), floor=FLOOR)
        verdicts.append(trend.verdict)
        if trend.verdict != NEEDS_MORE:
            break
        epochs += trend.more_epochs
    return verdicts


def load_series() -> Any:
    """Import the series that the tests use."""
    file = HERE.parent / "tests" / "leaks" / "series.py"
    spec = importlib.util.spec_from_file_location("series", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["series"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
