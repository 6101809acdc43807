"""Put blocks of samples together to one shard, and note what shows that it is valid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.cache.columns import ShardBuffer
from loaderkit.datasets.block_readers import EncodedBlock, content_digest
from loaderkit.datasets.structure import KEY_COLUMN, VARIANT_COLUMN, Structure

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from numpy.typing import NDArray

    from loaderkit.cache.build import ShardWriter
    from loaderkit.cache.layout import Shard
    from loaderkit.datasets.source_files import FileVersion


class ShardFiller:
    """Collects the samples of one shard.

    Args:
        structure: What is known of how samples are built; it learns what they add.
    """

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.files: dict[str, FileVersion] = {}
        """Files that were opened for the samples, by absolute path."""
        self._buffer = ShardBuffer()
        self._digests: list[bytes] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the samples so far."""
        return self._buffer.nbytes

    def add(self, encoded: EncodedBlock) -> None:
        """Add samples behind those that are there.

        Raises:
            DatasetError: There are too many ways in which samples are built.
        """
        first_keys: dict[int, str] = {}
        for row, tree in enumerate(encoded.which):
            first_keys.setdefault(tree, encoded.keys[row])
        numbers = [
            self.structure.number(tree, first_keys[at])
            for at, tree in enumerate(encoded.trees)
        ]
        block = encoded.block
        for row, tree in enumerate(encoded.which):
            values: dict[Hashable, NDArray[Any]] = {}
            values[VARIANT_COLUMN] = np.array(numbers[tree], "<i8")
            key = encoded.keys[row].encode("utf-8", "surrogatepass")
            values[KEY_COLUMN] = np.frombuffer(key, np.uint8)
            block.annotate(row, values)
        names = {column: self.structure.name(column) for column in block.columns}
        self._buffer.append(block.renamed(names))
        self._digests += encoded.digests

    def write(self, number: int, writer: ShardWriter, state: str | None) -> Shard:
        """Write the shard, with a note for a run that goes on from it.

        Args:
            number: Which shard of the cache it is.
            writer: What writes it.
            state: What the source says that its samples are made from.

        Returns:
            The shard's description.

        Raises:
            CacheError: It cannot be written.
        """
        evidence: Mapping[str, Any] = {
            "content": content_digest(self._digests),
            "first": self._digests[0].hex(),
            "last": self._digests[-1].hex(),
            "state": state,
            "files": self.files,
        }
        learned = self.structure.to_json()
        return writer.write(number, self._buffer, state=learned, evidence=evidence)


def take_over(structure: Structure, part: Structure, of_what: str) -> bool:
    """Add what is in one part of a cache to what is known of the whole.

    Args:
        structure: Of the whole; it learns the part's columns and variants.
        part: Of some shards.
        of_what: What the part is, for messages.

    Returns:
        Whether both call the part's columns and variants the same.

    Raises:
        DatasetError: There are too many variants.
    """
    same_numbers = [
        structure.number(variant, of_what) == number
        for number, variant in enumerate(part.variants)
    ]
    same_names = [
        structure.name(column) == name for name, column in part.columns.items()
    ]
    return all(same_numbers) and all(same_names)
