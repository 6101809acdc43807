"""Row numbers, however a user writes them.  Pure."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch

from loaderkit.errors import NoSuchRowError, OptionError
from loaderkit.units import count_of
from loaderkit.value_words import kind_of, show_value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loaderkit.array_types import Ints


_BOOLEANS = (torch.bool, np.dtype(bool))


def is_single_index(index: object) -> bool:
    """Tell whether an index names one sample rather than several.

    >>> [is_single_index(index) for index in (3, np.int64(3), [3], slice(3))]
    [True, True, False, False]
    """
    if isinstance(index, slice | list | tuple | range | type):
        return False
    return getattr(index, "ndim", 0) == 0 and hasattr(index, "__index__")


def normalize_index(index: SupportsIndex, count: int) -> int:
    """Turn one index into a row.

    Args:
        index: An integer; negative counts from the end.
        count: Rows there are.

    Returns:
        A row from 0 to ``count - 1``.

    Raises:
        IndexError: There is no such row.
        TypeError: It is no integer, or one truth value.
    """
    if isinstance(index, bool) or getattr(index, "dtype", None) in _BOOLEANS:
        raise _answer_is_no_row(index)
    try:
        row = int(operator.index(index))
    except TypeError:
        raise _is_no_row(index) from None
    if not -count <= row < count:
        raise _no_such_row(row, count)
    return row % count


def normalize_indices(index: object, count: int) -> Ints:
    """Turn a slice, a list, a tensor, an array or a mask into rows.

    Args:
        index: Integers in any order, repeats allowed, negative from the end; or a mask
            of ``count`` booleans; or a slice, also of shares such as ``slice(0.8)``.
            Tensors and arrays of several axes are read in order, as PyG does.
        count: Rows there are.

    Returns:
        Rows ``[B]`` from 0 to ``count - 1``.

    Raises:
        IndexError: A row is not there, or a mask has another length.
        TypeError: It is no index.

    >>> [normalize_indices(index, 5) for index in ([-1, 0], slice(1, 4, 2), slice(0.4))]
    [array([4, 0]), array([1, 3]), array([0, 1])]
    """
    if isinstance(index, slice):
        return _rows_of_slice(index, count)
    rows = _as_array(index)
    kind = rows.dtype.kind
    if kind == "b":
        return _rows_of_mask(rows, count, tuple(getattr(index, "shape", rows.shape)))
    if kind not in "iu":
        raise _not_of_rows(index, rows)
    if not len(rows):
        return np.empty(0, np.int64)
    rows = rows.astype(np.int64, copy=False)
    # Seen without a sign, a negative row is a large one: each batch takes one look
    # instead of two.
    if np.maximum.reduce(rows.view(np.uint64)) < count:
        return rows
    if rows.min() < -count or rows.max() >= count:
        missing = rows[(rows < -count) | (rows >= count)][0]
        raise _no_such_row(int(missing), count)
    return np.where(rows < 0, rows + count, rows)


def _rows_of_slice(index: slice, count: int) -> Ints:
    start = _row_of_border(index.start, count)
    stop = _row_of_border(index.stop, count)
    try:
        borders = slice(start, stop, index.step).indices(count)
    except (TypeError, ValueError) as error:
        raise _not_a_slice(index, error) from None
    return np.arange(*borders, dtype=np.int64)


def _rows_of_mask(mask: NDArray[Any], count: int, shape: Sequence[int]) -> Ints:
    if len(mask) == count:
        return np.flatnonzero(mask)
    message = f"a mask of {len(mask):,} was given to a dataset of "
    message += f"{count_of(count, 'samples')}."
    why = "a mask has one True or False for each sample"
    fix = "the same rows of the dataset that the mask was made of, or a mask made of "
    fix += "this one"
    if len(mask) < count:
        fix = "dataset[[row for row, wanted in enumerate(mask) if wanted]]"
    if len(shape) > 1:
        message = f"a mask of shape {list(shape)} was given to a dataset of "
        message += f"{count_of(count, 'samples')}."
        if shape[0] == count:
            axes = 1 if len(shape) == 2 else tuple(range(1, len(shape)))
            fix = f"dataset[mask.any({axes})], dataset[mask.all({axes})], or one "
            fix += (
                f"column: dataset[mask[{', '.join([':'] + ['0'] * (len(shape) - 1))}]]"
            )
    raise NoSuchRowError(message, why=why, fix=fix)


def _answer_is_no_row(index: object) -> OptionError:
    """Make the error for one truth value, which Python would read as row 0 or 1.

    A list compared with a text, as in ``dataset[dataset["name"] == "a"]``, is one.
    """
    message = f"rows are integers, a mask or a slice, got {show_value(index)}."
    why = "it is one truth value, and no mask of the samples; a list == a text is "
    why += "False, where an array would be compared item by item"
    fix = (
        'dataset[[name == "a" for name in dataset["name"]]]; int(index) for row 0 or 1'
    )
    return OptionError(message, why=why, fix=fix)


def _is_no_row(index: Any) -> OptionError:
    """Make the error for what cannot be one row."""
    message = f"a row is an integer, got {show_value(index)}."
    why, fix = f"it is {kind_of(index)}", "dataset.key(0)"
    if isinstance(index, str):
        fix = f"dataset.row_of({index!r}) is the row of a key"
    elif isinstance(index, list | tuple | range) or np.ndim(index):
        why = "it may be several rows"
        fix = "[dataset.key(row) for row in rows]"
    elif isinstance(index, float | np.floating) or hasattr(index, "ndim"):
        number = np.asarray(index).item()
        if isinstance(number, float):
            why = "rows are counted, and this number is a float"
            is_whole = number.is_integer()
            fix = (
                f"{int(number)}"
                if is_whole
                else "a share of the rows is a slice: [:0.8]"
            )
    return OptionError(message, why=why, fix=fix)


def _not_of_rows(index: object, values: NDArray[Any]) -> OptionError:
    """Make the error for values that are neither integers nor booleans."""
    kind = values.dtype.kind
    dtype = getattr(index, "dtype", values.dtype)
    shown = f"{type(index).__name__} of {str(dtype).removeprefix('torch.')}"
    why, fix = "others name no rows", "dataset[[0, -1]]"
    if kind == "U":
        # As pandas and Hugging Face's select_columns would have it, or keys.
        shown = f"texts: {show_value(index)}"
        why = "texts are keys of samples, or name fields, which are asked for one at a "
        why += "time"
        fix = "dataset[name] for a field, dataset[name][key] for what is within it; of "
        fix += "keys, dataset[[dataset.row_of(k) for k in keys]]"
        if row_and_field := _row_and_field(index):
            row, field = row_and_field
            why = "a row and a field are asked for one after the other"
            fix = f"dataset[{row}][{field!r}]"
    elif kind == "f":
        fix = "a share of the rows is a slice: [:0.8]"
        if np.isfinite(values).all() and (values == np.trunc(values)).all():
            why = "rows are counted, and these numbers are floats"
            fix = f"dataset[{show_value(values.astype(np.int64).tolist())}]"
            if hasattr(index, "dtype"):
                call = "long()" if isinstance(index, torch.Tensor) else "astype(int)"
                fix = f"dataset[rows.{call}]"
    elif kind == "O":
        shown = show_value(index)
        why = "not all of them are numbers of rows"
        if any(isinstance(item, slice) for item in values):
            why, fix = "rows have one axis", "dataset[0:5][2]"
    message = f"rows are integers, booleans or a slice, got {shown}."
    return OptionError(message, why=why, fix=fix)


def _row_and_field(index: object) -> tuple[int, str] | None:
    """Tell the row and the field of ``dataset[3, "x"]`` or ``dataset["x", 3]``."""
    if not isinstance(index, tuple) or len(index) != 2:
        return None
    texts = [item for item in index if isinstance(item, str)]
    numbers = [item for item in index if isinstance(item, int | np.integer)]
    return (int(numbers[0]), texts[0]) if texts and numbers else None


def _row_of_border(border: object, count: int) -> Any:
    """Turn a share of the rows into a row, rounded as PyG rounds it."""
    if not isinstance(border, float | np.floating):
        return border
    if not -1 <= border <= 1:
        message = f"a share of the rows is from -1 to 1, got {border}."
        why = "a border that is no integer is a share"
        raise OptionError(message, why=why, fix="dataset[:0.8], or dataset[:100]")
    return round(float(border) * count)


def _not_a_slice(index: slice, error: Exception) -> OptionError:
    """Make the error for a slice that names no rows."""
    borders = [index.start, index.stop]
    if index.step is not None:
        borders.append(index.step)
    shown = ":".join("" if border is None else show_value(border) for border in borders)
    message = f"a slice of rows has integers or shares as its borders, got [{shown}]."
    fix = "dataset[:100], dataset[:0.8] or dataset[::2]"
    return OptionError(message, why=f"{error}", fix=fix)


def _as_array(index: object) -> NDArray[Any]:
    if isinstance(index, np.ndarray):
        return index.reshape(-1)
    if isinstance(index, list) and index:  # as nearly always
        return _array_of_rows(index)
    if isinstance(index, str | bytes):
        message = f"rows are integers, booleans or a slice, got {index!r}."
        why = "a text names a field, or a sample by its key"
        fix = "range(len(dataset)) for all rows; dataset[name] is a field of them"
        raise OptionError(message, why=why, fix=fix)
    if not hasattr(index, "__len__") and not isinstance(index, Iterable):
        message = f"rows are integers, booleans or a slice, got {show_value(index)}."
        why, fix = f"it is {kind_of(index)}", "dataset[[0, -1]]"
        if isinstance(index, float | np.floating):
            fix = "a share of the rows is a slice: [:0.8]"
            if index.is_integer():
                fix = f"dataset[{int(index)}]"
        elif isinstance(index, int):
            fix = f"of one row: [{index!r}]"
        raise OptionError(message, why=why, fix=fix)
    if isinstance(index, torch.Tensor) and index.dtype == torch.uint8 and index.ndim:
        message = "rows are integers, booleans or a slice, got a Tensor of uint8."
        why = "torch reads such a tensor as a mask, and numpy as rows"
        fix = "dataset[mask.bool()] for a mask, dataset[rows.long()] for rows"
        raise OptionError(message, why=why, fix=fix)
    is_array = hasattr(index, "ndim")
    plain = isinstance(index, list | tuple | Sequence)
    if is_array and not getattr(index, "ndim", 1):
        number = np.asarray(index).item()
        message = f"rows are a list, a slice or one integer, got {show_value(index)}."
        why = "it is an array or tensor of one number, and no list of some"
        raise OptionError(message, why=why, fix=f"dataset[[{int(number)}]]")
    if not plain and isinstance(index, Iterable):
        index = index.tolist() if hasattr(index, "tolist") else list(index)
    if not len(index):
        return np.empty(0, np.int64)
    return np.asarray(index).reshape(-1) if is_array else _array_of_rows(index)


def _array_of_rows(index: Any) -> NDArray[Any]:
    try:
        rows = np.asarray(index)
    except ValueError:  # lists of several lengths
        shape = "lists within it"
    else:
        if rows.ndim == 1:
            return rows
        shape = f"shape {list(rows.shape)}"
    message = f"rows are a list, a slice or one integer, got {shape}."
    why = "lists within a list name no order of rows"
    raise OptionError(message, why=why, fix="dataset[[0, -1]]")


def _no_such_row(row: int, count: int) -> NoSuchRowError:
    message = f"row {row} was asked of a dataset of {count_of(count, 'samples')}."
    why = "rows are counted from 0, or from -1 back"
    fix = f"dataset[{count - 1}] is the last one" if count else "it has no rows"
    return NoSuchRowError(message, why=why, fix=fix)
