"""Columns that lie in memory as one array: batches of them in as few calls as can be.

``BatchGather`` gathers any column, whatever it is kept as.  That takes a dozen small
functions a column, which are more than the copying where samples are short.  Most
columns need none of them: they are one array, uncompressed, whose offsets were checked
when it was opened.  Of 32 texts from a cache, gathering took 142 us, and takes 114.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.cache.gather import FEWEST_SAMPLES, SLICE_BYTES, pad_runs
from loaderkit.datasets.dtypes import carrier
from loaderkit.datasets.gathering import batch_dtype
from loaderkit.datasets.ragged import Padded, mask_of

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from typing_extensions import Self

    from loaderkit.array_types import Ints
    from loaderkit.cache.column_reader import ColumnReader
    from loaderkit.cache.store import Store
    from loaderkit.datasets.gathering import BatchGather
    from loaderkit.datasets.kinds import ColumnSpec


class PlainColumn:
    """A column of dicts that is stacked, or padded where its first axis varies.

    Args:
        column: Of one row shape, in files that fit memory.
        dtype: What it has in a batch.
        is_stacked: Every sample is one row.
    """

    def __init__(
        self, column: ColumnReader, dtype: torch.dtype, *, is_stacked: bool
    ) -> None:
        assert column.row_shape is not None
        self._column, self._dtype = column, dtype
        self._row_shape = column.row_shape
        self._is_stacked = is_stacked
        self._row_bytes = math.prod(column.row_shape) * dtype.itemsize

    @classmethod
    def of(cls, store: Store, spec: ColumnSpec) -> Self | None:
        """Take a column of a cache; None where it is not as simple as that.

        Args:
            store: The cache.
            spec: A column of tensors, arrays or numbers that all samples have.
        """
        column = store.column(spec.name, stacked=spec.axis is None)
        dtype = batch_dtype(spec)
        is_simple = column.reads_pages_as_they_come and dtype is carrier(dtype)
        if not is_simple or column.row_shape is None:
            return None
        plain = cls(column, dtype, is_stacked=spec.axis is None)
        # Rows without numbers are kept as shapes.
        return plain if plain._row_bytes else None

    def join(self, gather: BatchGather) -> torch.Tensor | Padded | None:
        """Gather the values of a batch.

        Args:
            gather: The batch in the making.

        Returns:
            ``[B, *row_shape]``, or ``Padded``; None where that takes more than this:
            the rows are in several arrays, or compressed, or their offsets are not
            checked.
        """
        column_part = gather.selection.only_part(self._column)
        if column_part is None or column_part.rows is not None:
            return None
        values = column_part.ready_values
        if values is None:
            return None
        starts, lengths = gather.located_rows(column_part)
        if self._is_stacked:
            return self._stack(gather, values, starts)

        longest = int(np.maximum.reduce(lengths)) if len(lengths) else 0
        padded = gather.empty((len(starts), longest, *self._row_shape), self._dtype)
        pad_runs(values, starts, lengths, padded.numpy())
        # A copy: fields whose samples are equally long are located once.
        lengths_of_samples = gather.to_tensor(lengths.copy())
        mask = gather.take_in(mask_of(lengths, longest))
        return Padded(padded, lengths_of_samples, mask)

    def _stack(
        self, gather: BatchGather, values: NDArray[Any], starts: Ints
    ) -> torch.Tensor | None:
        if self._row_bytes >= SLICE_BYTES or len(starts) < FEWEST_SAMPLES:
            return None
        stacked = gather.empty((len(starts), *self._row_shape), self._dtype)
        out = stacked.numpy()
        # "clip": with "raise" numpy gathers into a buffer and copies that.  The rows
        # lie in the column: there is one for each sample of its shards.
        if values.dtype == out.dtype:
            values.take(starts, axis=0, out=out, mode="clip")
        else:
            out[...] = values.take(starts, axis=0, mode="clip")
        return stacked
