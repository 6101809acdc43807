"""What a user's sampler gave that the dataset cannot read, in words.

A sampler that was made for another dataset gives rows that are not there: of a longer
one, of one before it was filtered, the rows of a split.  Whether a row is there is for
the dataset to say, which may take other numbers than those of its length; so this is
asked once reading has failed.  Others give what are no rows: a mask, weights, samples.
"""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from loaderkit.dataset_protocol import as_cached
from loaderkit.errors import LoaderError, LoaderkitError, OptionError
from loaderkit.loader.sampler_protocol import inner_sampler, source_of
from loaderkit.loader.stateful import length_of
from loaderkit.loader.users_errors import error_about
from loaderkit.units import count_of
from loaderkit.value_words import kind_of, show_value, with_small_article

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class RowChooser:
    """A user's sampler, as an error about its rows names it."""

    option: str
    """The option that it was given as: "sampler" or "batch_sampler"."""
    name: str
    """Its class, and that of a sampler within it."""
    origin: str
    """For which samples it was made, or how many rows it gives; empty if unknown."""
    for_dataset: str = ""
    """How it is made for the dataset, as code; empty where it takes no dataset."""

    @classmethod
    def of(cls, sampler: object, option: str) -> RowChooser:
        """Describe a sampler by what it shows; nothing is drawn from it.

        Args:
            sampler: The user's.
            option: What it was given as.
        """
        name = type(sampler).__name__
        inner = inner_sampler(sampler)
        chooser = sampler if inner is None else inner
        within = "" if inner is None else f" of {kind_of(inner)}"
        origin = _samples_it_was_made_for(chooser)
        if origin is not None:
            code = f"{type(chooser).__name__}(dataset)"
            code = code if inner is None else f"{name}({code}, ...)"
            return cls(option, name + within, origin, f"{option}={code}")
        return cls(option, name + within, _rows_it_has(chooser, option))


def _samples_it_was_made_for(sampler: object) -> str | None:
    samples = length_of(source_of(sampler))
    if samples is None:
        return None
    return f"it was made for a dataset of {count_of(samples, 'samples')}"


def _rows_it_has(sampler: object, option: str) -> str:
    weights = length_of(getattr(sampler, "weights", None))
    if weights is not None:
        return f"it has {count_of(weights, 'weights')}, one for each sample"
    indices = length_of(getattr(sampler, "indices", None))
    if indices is not None:
        return f"it was made of {count_of(indices, 'rows')}"
    count = length_of(sampler)
    unit = "batches" if option == "batch_sampler" else "rows"
    return "" if count is None else f"it gives {count_of(count, unit)} an epoch"


def error_of_missing_rows(
    chooser: RowChooser | None, dataset: object, rows: Sequence[Any], error: Exception
) -> Exception | None:
    """Tell an error of reading by what gave a row which is not there.

    Args:
        chooser: The user's sampler that gave the rows; None where there was none.
        dataset: What was read.
        rows: The rows of the batch.
        error: What reading them raised: one of ours, with the user's as its cause.

    Returns:
        The error to raise in its place, from it; of the same type to those who catch
        it.  None where it is about something else.
    """
    # What the dataset raised, where ours has wrapped it to name the sample.
    users_error = error
    if isinstance(error, LoaderError) and isinstance(error.__cause__, Exception):
        users_error = error.__cause__
    if isinstance(users_error, TypeError) and chooser is not None:
        return error_of_no_row(chooser, dataset, rows)
    if not isinstance(users_error, LookupError):
        return None
    # The sampler first: it was made last, and a subset's own rows may be right.
    explanation = _explain_by_sampler(chooser, dataset, rows)
    if explanation is None:
        explanation = _explain_by_subset(dataset, rows)
    if explanation is None:
        return None
    if isinstance(users_error, LoaderkitError):
        return type(users_error)(
            f"{explanation.message}.", why=explanation.why, fix=explanation.fix
        )
    return error_about(
        f"{explanation.message}: ", users_error, explanation.fix, why=explanation.why
    )


def error_of_no_row(
    chooser: RowChooser, dataset: object, rows: Sequence[Any]
) -> OptionError | None:
    """Tell what is no row of a dataset whose rows are known to be numbers.

    Args:
        chooser: The user's sampler that gave the rows.
        dataset: What was to be read.
        rows: The rows of a batch.

    Returns:
        The error to raise; None where all are numbers, or may be rows all the same.
    """
    # Any other dataset may well be read by texts, tuples or masks.
    has_numbers = isinstance(dataset, list | tuple | TensorDataset)
    if not has_numbers and as_cached(dataset) is None:
        return None
    not_numbers = [row for row in rows if not _is_number(row)]
    if not not_numbers:
        return None
    wrong = not_numbers[0]
    name = with_small_article(chooser.name)
    message = f"The {chooser.option}, {name}, gave {show_value(wrong)} as a row."
    fix = f"{chooser.option}=range(len(dataset)), or other numbers of rows"
    if _is_truth(wrong):
        rows_of_mask = "[row for row, wanted in enumerate(mask) if wanted]"
        if chooser.option == "batch_sampler":
            rows_of_mask = f"[{rows_of_mask} for mask in masks]"
        fix = f"{chooser.option}={rows_of_mask}"
    elif isinstance(wrong, float | np.floating) or _dtype_kind(wrong) == "f":
        fix = f"{chooser.option}=WeightedRandomSampler(weights, len(dataset))"
    elif isinstance(wrong, list | tuple | range) and chooser.option == "sampler":
        fix = "batch_sampler=... if it gives whole batches, and no batch_size"
    why = f"it is {kind_of(wrong)}, and rows are numbers of samples, from 0 on"
    return OptionError(message, why=why, fix=fix)


def gives_truths(rows: Sequence[Any]) -> bool:
    """Tell whether rows are truths, as a mask has them, by the first.

    As rows True would be 1, and a cache would take them for a mask of the dataset.
    """
    return bool(rows) and _is_truth(rows[0])


def _is_number(row: object) -> bool:
    # A bool is an index to Python: samples[True] is the second.
    if _is_truth(row):
        return False
    try:
        operator.index(row)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _is_truth(row: object) -> bool:
    return isinstance(row, bool) or _dtype_kind(row) == "b"


def _dtype_kind(row: object) -> str:
    """Give numpy's letter for the kind of a scalar of numpy or torch; "" for others."""
    if isinstance(row, torch.Tensor):
        if row.dtype is torch.bool:
            return "b"
        return "f" if row.is_floating_point() else ""
    return row.dtype.kind if isinstance(row, np.generic) else ""


class _Explanation(NamedTuple):
    """What an error says, in parts."""

    message: str
    why: str
    fix: str


def _explain_by_sampler(
    chooser: RowChooser | None, dataset: object, rows: Sequence[Any]
) -> _Explanation | None:
    samples = length_of(dataset)
    missing = _first_missing(rows, samples)
    if chooser is None or samples is None or missing is None:
        return None
    name = with_small_article(chooser.name)
    message = f"The {chooser.option}, {name}, gave row {missing:,} of a dataset of "
    message += count_of(samples, "samples")
    why = chooser.origin or "it was probably made for another dataset"
    fix = chooser.for_dataset
    if not fix:
        fix = f"make it anew for this dataset, with rows from 0 to {samples - 1:,}"
    return _Explanation(message, why, fix)


def _explain_by_subset(dataset: object, rows: Sequence[Any]) -> _Explanation | None:
    """Tell of indices that a subset, or one within it, has from another dataset."""
    while isinstance(dataset, Subset):
        subset, dataset = dataset, dataset.dataset
        try:
            rows = [subset.indices[row] for row in rows]
        except (LookupError, TypeError):
            return None  # they are not the subset's own rows
        samples = length_of(dataset)
        missing = _first_missing(rows, samples)
        if samples is not None and missing is not None:
            message = f"A Subset names row {missing:,} of a dataset of "
            message += count_of(samples, "samples")
            why = f"it has {count_of(len(subset), 'indices')}, probably of another one"
            fix = f"Subset(dataset, indices) with indices from 0 to {samples - 1}"
            return _Explanation(message, why, fix)
    return None


def _first_missing(rows: Sequence[Any], samples: int | None) -> int | None:
    """Find a number that is outside of a dataset; keys are not looked at."""
    for row in rows:
        with contextlib.suppress(TypeError):
            number = operator.index(row)
            if samples is not None and not -samples <= number < samples:
                return number
    return None
