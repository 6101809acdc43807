"""Put spans of samples together to one shard, and note what shows that it is valid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.cache.columns import ShardBuffer
from loaderkit.datasets.block_readers import content_digest
from loaderkit.datasets.kinds import Kind
from loaderkit.datasets.list_forms import form_of_bytes
from loaderkit.datasets.structure import VARIANT_COLUMN, Leaf, Structure, is_graph
from loaderkit.errors import DatasetError
from loaderkit.value_words import with_small_article

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from loaderkit.cache.build import ShardWriter
    from loaderkit.cache.columns import Block
    from loaderkit.cache.layout import Shard
    from loaderkit.datasets.block_readers import EncodedSpan
    from loaderkit.datasets.source_files import FileVersion
    from loaderkit.datasets.structure import Node


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
        self._digests = bytearray()
        self._first_and_last: list[bytes] = []

    def add(self, span: EncodedSpan) -> None:
        """Add samples behind those that are there.

        Raises:
            DatasetError: There are too many ways in which samples are built, or some
                are graphs and others are not.
        """
        first = [*self.structure.variants, *span.trees][0]
        for tree, key in zip(span.trees, span.first_keys, strict=True):
            check_kind(first, tree, f"Sample {key!r}")
        numbers = learn_trees(self.structure, span.trees, span.first_keys)
        number_of_tree = np.array(numbers, "<i8")
        trees = np.frombuffer(span.tree_of_sample, "<i8")
        span.block.add_numbers(VARIANT_COLUMN, number_of_tree[trees])
        self._learn_list_forms(span.block)
        names = {column: self.structure.name(column) for column in span.block.columns}
        self._buffer.append(span.block.renamed(names))
        self._digests += span.digests
        self._first_and_last += [
            span.digest_of_sample(0),
            span.digest_of_sample(len(trees) - 1),
        ]
        self.files.update(span.files)

    def _learn_list_forms(self, block: Block) -> None:
        """Learn in which forms the block's plain lists are."""
        for spec, column in block.columns.items():
            if spec.kind is not Kind.JSON:
                continue
            name = self.structure.name(spec)
            known = self.structure.list_forms.get(name, ())
            if known is None or len(known) > 1:
                continue  # that they differ is all that has to be known
            values = b"".join(piece.tobytes() for piece in column.pieces(block.file))
            forms, start = set(known), 0
            for length in column.shapes:
                forms.add(form_of_bytes(name, values[start : start + length]))
                if len(forms) > 1:
                    break
                start += length
            self.structure.learn_list_forms(name, forms)

    def evidence(self, state: str | None) -> dict[str, Any]:
        """Say what a later run holds against the source; JSON.

        Args:
            state: What the source says that its samples are made from.
        """
        return {
            "content": content_digest(self._digests),
            "first": self._first_and_last[0].hex(),
            "last": self._first_and_last[-1].hex(),
            "state": state,
            "files": self.files,
        }

    def write(
        self, number: int, writer: ShardWriter, evidence: Mapping[str, Any]
    ) -> Shard:
        """Write the shard, with a note for a run that goes on from it.

        Args:
            number: Which shard of the cache it is.
            writer: What writes it.
            evidence: What a later run holds against the source.

        Returns:
            The shard's description.

        Raises:
            CacheError: It cannot be written.
        """
        learned = self.structure.to_json()
        return writer.write(number, self._buffer, state=learned, evidence=evidence)


def check_kind(first: Node, tree: Node, subject: str) -> None:
    """Refuse a graph among samples that are none, and the other way round.

    A cache that holds a graph is one of graphs, whose batches and sizes are of nodes
    and edges.  One sample that has none would stop whoever asks for the sizes, and the
    batch that it is in, perhaps hours into an epoch.

    Args:
        first: How the first sample is built.
        tree: How some others are built.
        subject: What to call one of these in the message.

    Raises:
        DatasetError: It is of another kind than the first sample.
    """
    if is_graph(tree) == is_graph(first):
        return
    kinds = [
        node.column.kind if isinstance(node, Leaf) else node.kind
        for node in (tree, first)
    ]
    this, other = (with_small_article(str(kind)) for kind in kinds)
    message = f"{subject} is {this}, and the first sample is {other}."
    why = (
        "a cache holds graphs alone or none, since batches and sizes of graphs are of "
    )
    why += "nodes and edges"
    fix = "leave out what is of another kind (a file that lies there by mistake?), or "
    fix += "pack such samples into a cache of their own"
    raise DatasetError(message, why=why, fix=fix)


def learn_trees(
    structure: Structure, trees: Sequence[Node], first_keys: Iterable[str]
) -> list[int]:
    """Add the ways in which some samples are built to what is known.

    Args:
        structure: What is known; it learns.
        trees: The ways, in the order in which they were met.
        first_keys: Key of the first sample that is built like each.

    Returns:
        Their numbers.

    Raises:
        DatasetError: There are too many.
    """
    return [
        structure.number(tree, key) for tree, key in zip(trees, first_keys, strict=True)
    ]


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
    structure.learn_list_forms_of(part)
    return all(same_numbers) and all(same_names)


def take_over_shards(
    structure: Structure, learned_of_shards: Iterable[tuple[int, Mapping[str, Any]]]
) -> list[int]:
    """Add what all shards know of how samples are built to what is known of the whole.

    Args:
        structure: Of the whole; it learns the columns and variants.
        learned_of_shards: Number of each shard, and its structure as JSON, in order.

    Returns:
        The shards that have other numbers, or names.

    Raises:
        DatasetError: There are too many variants, or some samples are graphs and others
            are not.
    """
    misnumbered = []
    known: Mapping[str, Any] = {}
    for number, learned in learned_of_shards:
        # Most shards know what the one before knew.
        if learned == known:
            continue
        part = Structure.from_json(learned)
        first = [*structure.variants, *part.variants][0]
        for variant in part.variants:
            check_kind(first, variant, f"A sample of shard {number}")
        if take_over(structure, part, f"of shard {number}"):
            known = learned
        else:
            misnumbered.append(number)
    return misnumbered
