"""Sizes of samples, and what is in a cache, as pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.pages.charts import Bar, Bars, HistogramChart, Limit
from loaderkit.pages.document import Section, Table
from loaderkit.units import count_of, format_amount, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loaderkit.pages.document import Block

_MOST_BINS = 40
"""Chosen: a bin is some 20 pixels wide on a laptop, 8 on a telephone."""
_FARTHEST = 2
"""Chosen: a limit this many times the largest sample leaves them half of the width."""
_MOST_FIELDS = 20
"""Chosen: what fits a screen; the table below has all."""
_LONGEST_TAIL = 3
"""Chosen: the largest may be this many times the size that 99 % keep to."""


def size_section(sizes: NDArray[Any], name: str, *, most: int | None = None) -> Section:
    """Draw how a size is spread over the samples, and what a batch may hold.

    Args:
        sizes: One for each sample ``[n]``.
        name: What is measured: "nodes", "edges", "tokens" or "bytes".
        most: What a batch may hold of it; said, and drawn as a line where that leaves
            the samples half of the picture or more.

    Returns:
        A section with a histogram, and with a sentence where there is a limit.
    """
    amounts = _describe_sizes(sizes, name)
    blocks: list[Block] = [amounts]
    limits: tuple[Limit, ...] = ()
    if most is not None:
        blocks.append(_describe_batches(sizes, name, most))
    if len(sizes):
        drawn = sizes[sizes <= _largest_drawn(sizes)]
        label = f"Samples by their {name}."
        if len(drawn) < len(sizes):
            label += f" {len(sizes) - len(drawn):,} larger ones are not drawn."
        if most is not None and most <= _FARTHEST * int(drawn.max()):
            limits = (Limit(most, f"a batch: {format_amount(most, name)}"),)
        counts, edges = histogram_of(drawn)
        blocks.append(HistogramChart(label, edges, counts, name, name, limits=limits))
    return Section(f"{name.capitalize()} of a sample", tuple(blocks))


def _largest_drawn(sizes: NDArray[Any]) -> int:
    """Choose where a picture of sizes ends: at the largest, or before a long tail.

    One sample of 2,000 nodes among a million of 20 would leave all others one bar.
    """
    # "higher": a size that there is; between the two largest of few samples it would be
    # one that cuts off the largest.
    most_samples = int(np.percentile(sizes, 99, method="higher"))
    largest = int(sizes.max())
    return largest if largest <= _LONGEST_TAIL * most_samples else most_samples


def histogram_of(
    sizes: NDArray[Any], most_bins: int = _MOST_BINS
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Count integers in bins of whole numbers.

    Args:
        sizes: Not empty ``[n]``.
        most_bins: As many bins as that, or fewer.

    Returns:
        Counts ``[bins]``, and the edges ``[bins + 1]``; the last one is not in a bin.

    >>> histogram_of(np.array([1, 2, 2, 3]))
    ((1, 2, 1), (1.0, 2.0, 3.0, 4.0))
    """
    low, high = int(sizes.min()), int(sizes.max()) + 1
    bins = min(most_bins, high - low)
    # Whole numbers for edges, so that each bin is a range of sizes ("20 to 24"); two
    # that round to one number would leave a bin without any.
    edges = np.unique(np.linspace(low, high, bins + 1).round())
    counts, _ = np.histogram(sizes, bins=edges)
    return tuple(counts.tolist()), tuple(edges.tolist())


def field_sections(
    rows: Sequence[tuple[str, str, str, str, int, int]],
) -> tuple[Section, ...]:
    """List the fields of a cache, and draw what each takes.

    Args:
        rows: Name, kind, dtype, shape, bytes and samples of each.

    Returns:
        One section; none where there is no field.
    """
    if not rows:
        return ()
    largest_first = sorted(rows, key=lambda row: -row[4])
    bars = [
        Bar(name, nbytes, format_bytes(nbytes))
        for name, _, _, _, nbytes, _ in largest_first[:_MOST_FIELDS]
    ]
    others = largest_first[_MOST_FIELDS:]
    if others:
        nbytes = sum(row[4] for row in others)
        name = count_of(len(others), "other fields")
        bars.append(Bar(name, nbytes, format_bytes(nbytes), "grey"))
    table = Table(
        ("field", "kind", "dtype", "shape of a sample", "bytes", "samples"),
        tuple(
            (name, kind, dtype, shape, format_bytes(nbytes), f"{samples:,}")
            for name, kind, dtype, shape, nbytes, samples in rows
        ),
        frozenset({4, 5}),
    )
    chart = Bars("Bytes of each field in all shards, uncompressed.", tuple(bars))
    return (Section("Fields", (chart, table)),)


def _describe_sizes(sizes: NDArray[Any], name: str) -> str:
    if not len(sizes):
        return "There is no sample."
    # "higher": one of the sizes, and no number between two of them
    middle, high = np.percentile(sizes, [50, 99], method="higher")
    texts = [
        format_amount(value, name)
        for value in (sizes.min(), middle, high, sizes.max(), sizes.sum())
    ]
    smallest, median, most_samples, largest, total = texts
    if len(sizes) == 1:
        return f"One sample holds {total}."
    return (
        f"{count_of(len(sizes), 'samples')} hold {total}: the smallest "
        f"{smallest}, half of them "
        f"at most {median}, 99 % at most {most_samples}, the largest {largest}."
    )


def _describe_batches(sizes: NDArray[Any], name: str, most: int) -> str:
    too_large = int((sizes > most).sum())
    limit = format_amount(most, name)
    if not len(sizes) or not sizes.mean():
        return f"A batch may hold {limit}."
    average = int(most // sizes.mean())
    samples = count_of(average, "samples")
    if not average:
        samples = "less than one sample"
    text = f"A batch of at most {limit} holds {samples} of average size"
    if too_large:
        are = "is" if too_large == 1 else "are"
        return f"{text}; {count_of(too_large, 'samples')} {are} larger than that alone."
    return f"{text}; no sample is larger than that alone."
