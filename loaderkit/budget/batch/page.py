"""A batch plan as a page: what fits, what remedies save, how likely it runs out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.pages.charts import Bar, Bars, Curves, Limit, Series
from loaderkit.pages.document import Section, Table
from loaderkit.units import count_of, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from loaderkit.budget.batch.cost_model import Chance
    from loaderkit.budget.batch.savings import RemedySaving

_MOST_SIZES = 40
"""Batch sizes that are priced for the curve."""


def batch_size_sections(
    worst_bytes: Callable[[int], int], batch_size: int, limit: Limit, *, samples: int
) -> tuple[Section, ...]:
    """Draw what the dearest batch of each size takes.

    Args:
        worst_bytes: Prices the dearest batch of a number of samples.
        batch_size: What was asked for.
        limit: What a step may take.
        samples: How many there are.

    Returns:
        A section with one curve, up to twice the batch size that was asked for; none
        where there is only one size.
    """
    # Twice the size: who sees that it fits wants to know how much farther it goes.
    largest = min(2 * batch_size, samples)
    if largest < 2:
        return ()
    stride = max(1, largest // _MOST_SIZES)
    sizes = {1, *range(stride, largest + 1, stride), min(batch_size, samples)}
    prices = {size: worst_bytes(size) for size in sizes}
    # The curve's points lie apart; the two between which it crosses the limit are the
    # answer that people look for, and are priced by halving.
    for size in _sizes_at_the_limit(prices, limit, worst_bytes):
        prices[size] = worst_bytes(size)
    readouts = []
    largest_fitting = 0
    for index, (size, price) in enumerate(sorted(prices.items())):
        verdict = "does not fit"
        if price <= limit.value:
            verdict = "fits"
            largest_fitting = index
        readouts.append(
            f"{count_of(size, 'samples')}: {format_bytes(price)}, {verdict}"
        )
    chart = Curves(
        label="What the dearest batch of each size takes at the peak of its step.",
        x=tuple(map(float, sorted(prices))),
        x_name="samples of a batch",
        x_unit="samples",
        series=(
            Series(
                "dearest batch",
                tuple(float(prices[size]) for size in sorted(prices)),
                "blue",
            ),
        ),
        unit="bytes",
        readouts=tuple(readouts),
        first_readout=largest_fitting,
        limits=(limit,),
    )
    return (Section("Batch size against memory", (chart,)),)


def _sizes_at_the_limit(
    prices: Mapping[int, int], limit: Limit, worst_bytes: Callable[[int], int]
) -> tuple[int, ...]:
    """Find the largest size that fits, and the next one, between those with a price.

    Returns:
        Both; none where all sizes fit, or not even the first does.
    """
    fitting = [size for size, price in prices.items() if price <= limit.value]
    larger = [size for size in prices if fitting and size > max(fitting)]
    if not larger:
        return ()
    low, high = max(fitting), min(larger)
    # A larger batch takes no less, so one of these is the last that fits.
    while high - low > 1:
        middle = (low + high) // 2
        if worst_bytes(middle) <= limit.value:
            low = middle
        else:
            high = middle
    return low, high


def remedies_sections(
    savings: Sequence[RemedySaving], peak: int, limit: Limit
) -> tuple[Section, ...]:
    """Draw the peak with each remedy, beside the peak without any.

    Args:
        savings: What each remedy saves for the dearest batch.
        peak: Without any.
        limit: What a step may take.

    Returns:
        One section; none where no remedy applies.
    """
    if not savings:
        return ()
    bars = [Bar("as it is", peak, format_bytes(peak), "grey")]
    for saving in sorted(savings, key=lambda saving: saving.peak):
        if saving.remedy.cost == "device":
            continue  # another device has another limit
        change = f"saves {format_bytes(saving.saves)}"
        if saving.saves < 0:
            change = f"costs {format_bytes(-saving.saves)}"
        bars.append(
            Bar(
                saving.remedy.name,
                saving.peak,
                f"{format_bytes(saving.peak)}, {change}",
                "green" if saving.peak <= limit.value else "orange",
            )
        )
    chart = Bars(
        "The peak of the dearest batch with each remedy alone.", tuple(bars), limit
    )
    rows = tuple(
        (
            saving.remedy.name,
            saving.remedy.cost,
            saving.remedy.says,
            f"`{saving.remedy.code}`",
        )
        for saving in savings
    )
    table = Table(("remedy", "costs", "what to do", "to paste"), rows)
    caption = "Green fits the limit, orange does not."
    return (Section("What if", (chart, table), caption=caption),)


def chances_section(chances: Mapping[int, Chance]) -> Section:
    """List how likely some batch exceeds the limit.

    Args:
        chances: By epochs.

    Returns:
        A section with a table.
    """
    rows = tuple(
        (
            f"{epochs:,}",
            f"{chance.likely:.1%}" if chance.is_known else "not known",
            f"{chance.low:.1%} to {chance.high:.1%}",
        )
        for epochs, chance in chances.items()
    )
    heads = ("epochs", "out of memory", "interval")
    return Section(
        "How likely it runs out of memory",
        (Table(heads, rows, frozenset({0, 1, 2})),),
    )
