"""Limits of batches, where a user's code changes the samples that were measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loaderkit.dataset_protocol import ask_size_counter
from loaderkit.errors import LoaderError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loaderkit.dataset_protocol import SizeCounter
    from loaderkit.loader.options import Oversized


@dataclass(frozen=True)
class LimitCheck:
    """Compares the samples of a batch with its limits, before they are joined.

    Batches follow from the sizes of the samples in the cache, which cost nothing to
    read; a transform runs later and may add nodes, edges or tokens.  Reading every
    sample to measure it, as PyG's DynamicBatchSampler does, would take an epoch.
    """

    counter: SizeCounter
    """Counts what the samples of a batch hold, by name."""
    limits: Mapping[str, int]
    """The most a batch may hold."""
    oversized: Oversized
    """What happens to a sample beyond a limit: "raise", "alone" or "skip"."""

    def check(self, samples: object, names: str) -> None:
        """Refuse a batch that grew beyond a limit.

        Args:
            samples: Those that were read; what is no list cannot be counted.
            names: What they are called.

        Raises:
            LoaderError: They hold more than a batch may.
        """
        if not isinstance(samples, list):
            return
        if len(samples) == 1 and self.oversized == "alone":
            return
        totals = self.counter.totals(samples)
        for name, limit in self.limits.items():
            if totals.get(name, 0) <= limit:
                continue
            message = (
                f"A batch has {totals[name]:,} {name}, above max_{name}={limit:,}: "
                f"{names}."
            )
            why = "batches follow from the sizes in the cache, and a transform or a "
            why += "__getitem__ made these samples larger"
            fix = "do that in load() or before pack(), or give the dataset sizes() -> "
            fix += f"{{{name!r}: array}} of what it returns"
            raise LoaderError(message, why=why, fix=fix)


def limit_check_of(
    dataset: object, limits: Mapping[str, int], oversized: Oversized
) -> LimitCheck | None:
    """Find out whether batches must be compared with their limits.

    Args:
        dataset: What is read.
        limits: The most a batch may hold, by what is counted.
        oversized: As it was asked for.

    Returns:
        None where samples are read as they were measured, or whoever wrote the dataset
        says their sizes.
    """
    counter = ask_size_counter(dataset) if limits else None
    return None if counter is None else LimitCheck(counter, limits, oversized)
