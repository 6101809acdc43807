"""Write shards again, with the column names and variant numbers of another cache.

A column says of each sample, by number, which structure it has (its *variant*, see
structure.py).  Shards that were written without knowing each other may number their
variants, or name their columns, differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loaderkit.cache.column_reader import ColumnReader
from loaderkit.cache.columns import Block, ShardBuffer
from loaderkit.cache.durable import writing
from loaderkit.cache.manifest import Manifest
from loaderkit.cache.shard_table import ShardTableBuilder
from loaderkit.cache.shards import Shards
from loaderkit.datasets.room import page_cache_bytes
from loaderkit.datasets.structure import VARIANT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from loaderkit.cache.layout import Shard
    from loaderkit.datasets.structure import Structure

_MOST_BYTES_IN_MEMORY = 4 << 20
"""More values than these wait in a file, where there is one; as while packing."""


class Renaming(NamedTuple):
    """What the columns and variants of one cache, or shard, are called in another."""

    column_names: Mapping[str, str]
    """New name of each column, by its old one."""
    variant_numbers: Sequence[int]
    """New number of each variant, in the order of the old ones."""

    @classmethod
    def between(cls, part: Structure, whole: Structure, of_what: str) -> Renaming:
        """Look up what is in one structure in another, which learns what it lacks.

        Args:
            part: The structure of a cache or shard.
            whole: The structure of the other cache.
            of_what: What the part is, for messages.

        Raises:
            DatasetError: There are too many variants.
        """
        column_names = {
            name: whole.name(column) for name, column in part.columns.items()
        }
        variant_numbers = [
            whole.number(variant, key=of_what) for variant in part.variants
        ]
        whole.learn_list_forms_of(part)
        return cls(column_names, variant_numbers)

    @property
    def changes_nothing(self) -> bool:
        """Whether shards can be used as they are."""
        same_names = all(old == new for old, new in self.column_names.items())
        same_numbers = list(self.variant_numbers) == [*range(len(self.variant_numbers))]
        return same_names and same_numbers


def columns_of_shard(path: Path, shard: Shard) -> Callable[[str], ColumnReader]:
    """Open one shard that no manifest names yet.

    Args:
        path: The folder that it is in.
        shard: Its description; it is known to be intact.

    Returns:
        What gives the reader of a column by its name; the shard is number 0.
    """
    table = ShardTableBuilder()
    table.add(shard)
    manifest = Manifest(table.table(), structure={}, fingerprint={}, made_with={})
    shards = Shards(path, manifest, "never", page_cache_bytes)
    return lambda name: ColumnReader(shards, name, stacked=True)


def read_renamed(
    column: Callable[[str], ColumnReader],
    number: int,
    shard: Shard,
    renaming: Renaming,
    scratch: Path | None = None,
) -> ShardBuffer:
    """Read the samples of a shard, under other names and numbers.

    Args:
        column: Gives the reader of a column.
        number: Number of the shard, as the readers count.
        shard: Its description.
        renaming: New names of columns and numbers of variants.
        scratch: A file to which values go when there are too many; None keeps the
            shard in memory.

    Returns:
        The samples, ready to be written.

    Raises:
        CacheError: The shard cannot be read, or the file cannot be written.
    """
    block = Block(shard.samples)
    # Variant 0 unless the shard says otherwise: a column of zeros is not written.
    variants = np.zeros(shard.samples, np.int64)
    for name in shard.columns:
        reader = column(name)
        rows = reader.shard_part(number).rows
        if rows is None:  # every sample has the column
            rows = np.arange(shard.samples)
        for row in rows.tolist():
            value = reader.read(number, row)
            if name == VARIANT:
                variants[row] = value
                continue
            block.annotate(row, {renaming.column_names[name]: value})
            if scratch is not None and block.bytes_in_memory >= _MOST_BYTES_IN_MEMORY:
                with writing(scratch):
                    block.spill(scratch)

    new_numbers = np.array(renaming.variant_numbers, np.int64)
    block.add_numbers(VARIANT, new_numbers[variants])
    buffer = ShardBuffer()
    buffer.append(block)
    return buffer
