"""Draw how rates go down with more graphs and more files, from saved tables.

``python -m benchmarks.plot_scale`` reads what ``rivals``, ``scale samples`` and
``scale shards`` have saved in results, and writes docs/pictures/scale.svg.  Nothing is
measured here.  Rates of different runs are not compared: on the left each size is one
run, on the right each point is divided by the first of its own run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.harness import RESULTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "scale.svg"
OURS = "loaderkit"
OUR_COLOUR = "#1f6feb"
OTHER_COLOURS = ("#57606a", "#8250df", "#bf3989", "#9a6700", "#1a7f37", "#cf222e")
MARKERS = "osDv^<"
BARS = {"more graphs": 0.7, "more files": 0.8}
"""What a rate should be of the smallest's, at least."""


class Point(NamedTuple):
    """A contestant at one size."""

    size: int
    """Graphs, or files."""
    value: float
    """Samples/s, or the share of the first rate."""


def main() -> None:
    # Only here: a test that imports this file needs no matplotlib.
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": OURS, "font.size": 9}
    figure, (rates, shares) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    _draw_rates(rates)
    _draw_shares(shares)
    figure.savefig(PICTURE, metadata={"Date": None})
    print(f"wrote {PICTURE}")


def read_rates(folder: Path) -> dict[str, list[Point]]:
    """Read the samples/s of each library at each size.

    Args:
        folder: Where rivals_<graphs>.json lie.

    Returns:
        Points by library, the smallest size first.
    """
    rates: dict[str, list[Point]] = {}
    tables = {_number_in(path.stem): path for path in folder.glob("rivals_*.json")}
    for graphs, path in sorted(tables.items()):
        for row in _read_rows(path):
            rates.setdefault(row["name"], []).append(Point(graphs, row["median"]))
    return rates


def read_shares(table: Path) -> list[Point]:
    """Read the rates of one table, each divided by the first.

    Args:
        table: A saved table whose rows are called after a number of graphs or files.

    Returns:
        A point a row.
    """
    return [Point(_number_in(row["name"]), row["ratio"]) for row in _read_rows(table)]


def _draw_rates(axes: Axes) -> None:
    rates = read_rates(RESULTS)
    others = [name for name in rates if name != OURS]
    for name, colour, marker in zip(others, OTHER_COLOURS, MARKERS, strict=False):
        axes.plot(*zip(*rates[name], strict=True), label=name, c=colour, marker=marker)
    axes.plot(
        *zip(*rates[OURS], strict=True), label=OURS, c=OUR_COLOUR, marker="o", lw=3
    )
    axes.set(xscale="log", yscale="log", xlabel="graphs", ylabel="samples/s")
    # Room for the names above the highest rate.
    axes.set_ylim(top=10 * axes.get_ylim()[1])
    axes.set_title("Shuffled batches of 128 molecules, page cache, 0 workers")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=8, ncols=2, loc="upper center")


def _draw_shares(axes: Axes) -> None:
    tables = {"more graphs": "scale_samples", "more files": "scale_shards"}
    for (label, table), style in zip(tables.items(), ("-o", "--s"), strict=True):
        points = read_shares(RESULTS / f"{table}.json")
        axes.plot(*zip(*points, strict=True), style, label=label, c=OUR_COLOUR)
        axes.axhline(BARS[label], ls=style.rstrip("os"), c="#57606a", lw=0.8)
    axes.set(xscale="log", ylim=(0, 1.1), xlabel="graphs, or files of 20,000 graphs")
    axes.set_ylabel("of the rate at the smallest")
    axes.set_title("loaderkit at other sizes (thin lines: what is asked for)")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=8)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def _number_in(text: str) -> int:
    """Find the one number in a name.

    >>> _number_in("rivals_10000"), _number_in("1,000,000 graphs")
    (10000, 1000000)
    """
    [number] = re.findall(r"\d[\d,]*", text)
    return int(number.replace(",", ""))


if __name__ == "__main__":
    main()
