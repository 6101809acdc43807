"""A diagnosis as a page: the amounts of a message, and what to do.  Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.pages.charts import Bar, Bars
from loaderkit.pages.document import Section, Table
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loaderkit.budget.remedies import Remedy
    from loaderkit.pages.charts import Colour

_COLOURS: Mapping[str, Colour] = {
    "requested": "orange",
    "free": "green",
    "limit": "grey",
    "capacity": "grey",
    "short of": "red",
}
"""Of what somebody holds it is blue."""


def amounts_sections(amounts: Mapping[str, int]) -> tuple[Section, ...]:
    """Draw the amounts that a message states.

    Args:
        amounts: Bytes by what they are of.

    Returns:
        One section; none where the message states none.
    """
    if not amounts:
        return ()
    bars = tuple(
        Bar(name, size, format_bytes(size), _COLOURS.get(name, "blue"))
        for name, size in amounts.items()
    )
    return (
        Section(
            "What the message states", (Bars("The amounts beside each other.", bars),)
        ),
    )


def advice_sections(advice: Sequence[tuple[Remedy, str]]) -> tuple[Section, ...]:
    """List what to do, the cheapest first.

    Args:
        advice: Remedies, and what each brings, in words.

    Returns:
        One section; none where there is nothing to do.
    """
    if not advice:
        return ()
    rows = tuple(
        (remedy.says, gain, remedy.cost, f"`{remedy.code}`") for remedy, gain in advice
    )
    heads = ("what to do", "brings", "costs", "to paste")
    return (Section("What to do, the cheapest first", (Table(heads, rows),)),)
