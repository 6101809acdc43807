"""Tell what is in a cache: schema, sizes, histograms, without reading samples."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from loaderkit.answers import answer_wrong_names
from loaderkit.cache.folder_storage import FolderStorage
from loaderkit.cache.remote import RemoteCache, locate_cache
from loaderkit.cache.remote_manifest import load_remote_manifest
from loaderkit.cache.store import Store
from loaderkit.cache.unfinished import unfinished_files, unfinished_in_words
from loaderkit.call_keywords import suggest_keywords
from loaderkit.datasets.columns import dtype_in_words
from loaderkit.datasets.open import open_cache
from loaderkit.datasets.page import field_sections, histogram_of
from loaderkit.datasets.structure import Nest, Structure, is_graph
from loaderkit.notebook import HasCard, card, repr_in_a_line
from loaderkit.pages import charts
from loaderkit.pages.document import HasPage, Page, Section
from loaderkit.units import count_of, format_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from pathlib import Path

    from loaderkit.array_types import Ints
    from loaderkit.cache.shard_table import ShardTable
    from loaderkit.datasets.kinds import ColumnSpec
    from loaderkit.datasets.structure import Node

_BINS = 8
"""Chosen: lines of a histogram that leave the fields above it on a screen of 24."""
_BAR = 40
"""Characters of the longest bar, so that a line fits a terminal of 80."""
_WIDEST_NAME = 36
"""Letters of the column of names.  Chosen: the other columns take 62 of 100."""


@answer_wrong_names()
@dataclass(frozen=True)
class Field:
    """One field of the samples."""

    name: str
    kind: str
    """tensor, array, int, float, str ... as it was when packed."""
    dtype: str
    """torch's or numpy's name; "" for text."""
    shape: str
    """Shape of one sample's value; "?" where samples differ."""
    bytes: int
    """Bytes in all shards, uncompressed, without what other fields share."""
    samples: int
    """Samples that have it."""


@answer_wrong_names()
@dataclass(frozen=True)
class Histogram(HasCard):
    """How a size is spread over the samples."""

    name: str
    counts: tuple[int, ...]
    """Samples in each bin."""
    edges: tuple[int, ...]
    """Where the bins begin, and the first size behind the last."""
    mean: float

    def __str__(self) -> str:
        most = max(self.counts) or 1
        lines = [f"{self.name} a sample, mean {self.mean:,.1f}"]
        for count, low, high in zip(
            self.counts, self.edges, self.edges[1:], strict=False
        ):
            bar = "#" * round(_BAR * count / most)
            lines.append(f"  {low:>9,} to {high - 1:>9,}  {count:>9,}  {bar}".rstrip())
        return "\n".join(lines)


@answer_wrong_names()
@dataclass(frozen=True)
class CacheSummary(HasPage):
    """What is in a cache."""

    path: str
    samples: int
    kind: str
    """The class of its samples."""
    variants: int
    """Ways in which its samples are built; 1 when all have the same fields."""
    shards: int
    bytes: int
    """Bytes on disk."""
    compression: str | None
    fields: tuple[Field, ...]
    histograms: tuple[Histogram, ...]
    made_with: dict[str, str]
    unfinished: tuple[str, ...] = ()
    """Files that a writer is at, or left when it was killed; not of the cache."""

    def to_json(self) -> dict[str, Any]:
        """Write it for programs."""
        return asdict(self)

    def page(self) -> Page:
        """Show the fields and how sizes are spread."""
        head, *_ = str(self).splitlines()
        made_with = ", ".join(f"{k} {v}" for k, v in self.made_with.items())
        lead = [f"packed with {made_with}"]
        if self.variants > 1:
            lead.append(f"samples are built in {self.variants} different ways")
        if self.unfinished:
            lead.append(unfinished_in_words(self.unfinished))
        sizes = tuple(
            Section(
                f"{histogram.name.capitalize()} of a sample",
                (
                    f"{histogram.mean:,.1f} on average",
                    charts.HistogramChart(
                        f"Samples by their {histogram.name}.",
                        tuple(map(float, histogram.edges)),
                        histogram.counts,
                        histogram.name,
                        histogram.name,
                    ),
                ),
            )
            for histogram in self.histograms
        )
        rows = [
            (f.name, f.kind, f.dtype, f.shape, f.bytes, f.samples) for f in self.fields
        ]
        return Page(head, lead=tuple(lead), sections=(*field_sections(rows), *sizes))

    __repr__ = repr_in_a_line

    @property
    def _first_lines(self) -> str:
        """The cache in a few lines."""
        stored = f"compressed with {self.compression}" if self.compression else "mapped"
        libraries = ", ".join(
            f"{name} {version}" for name, version in self.made_with.items()
        )
        head = (
            f"{self.path}: {count_of(self.samples, 'samples')} of {self.kind}, "
            f"{format_bytes(self.bytes)} in {count_of(self.shards, 'shards')}, "
            f"{stored}\npacked with {libraries}"
        )
        if self.variants > 1:
            head += f"\nsamples are built in {self.variants} different ways"
        if self.unfinished:
            head += f"\n{unfinished_in_words(self.unfinished)}"
        return head

    def _repr_html_(self) -> str:
        title, *notes = self._first_lines.splitlines()
        rows = [
            (
                field.name,
                field.kind,
                field.dtype,
                field.shape,
                format_bytes(field.bytes),
                f"{field.samples:,}",
            )
            for field in self.fields
        ]
        heads = ("field", "kind", "dtype", "shape", "bytes", "samples")
        return card(title, heads=heads, rows=rows, notes=notes, text=str(self))

    def __str__(self) -> str:
        longest = max([len(field.name) for field in self.fields], default=5)
        width = min(longest, _WIDEST_NAME)
        lines = [_field_line(field, width) for field in self.fields]
        return "\n".join(
            [
                self._first_lines,
                "",
                *lines,
                *(f"\n{histogram}" for histogram in self.histograms),
            ]
        )


def _field_line(field: Field, width: int) -> str:
    """Write a field as a row; a name that is too long stands above its row."""
    columns = (
        f"{field.kind:<8}{field.dtype:<10}{field.shape:<16}"
        f"{format_bytes(field.bytes):>10}  {count_of(field.samples, 'samples')}"
    )
    if len(field.name) > width:
        return f"  {field.name}\n  {'':<{width}}  {columns}"
    return f"  {field.name:<{width}}  {columns}"


@suggest_keywords
def inspect_cache(
    path: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> CacheSummary:
    """Summarise a cache.

    Args:
        path: The cache's folder, or a URL, of which only the manifest is read.
        storage_options: What fsspec makes the file system of a URL with.

    Returns:
        Its schema, its sizes, and for graphs in a folder the spread of nodes and edges,
        which only the shards know.

    Raises:
        CacheError: There is no whole cache in the folder.
    """
    location = locate_cache(path, storage_options)
    if isinstance(location, RemoteCache):
        storage = location.storage
        manifest = load_remote_manifest(storage)
    else:
        # Perhaps somebody has copied to it by its file:// URL.
        storage = FolderStorage(location)
        manifest = Store(location).manifest
    structure = Structure.from_json(manifest.structure)
    first = structure.variants[0]
    if isinstance(first, Nest):
        name = first.cls or str(first.kind)
    else:
        name = str(first.column.kind)
    # Sizes are read from the shards, and of a store no shard is downloaded for a look.
    histograms: tuple[Histogram, ...] = ()
    if not isinstance(location, RemoteCache):
        histograms = _histograms_of_sizes(location, first)
    return CacheSummary(
        path=str(location),
        samples=manifest.samples,
        kind=name.rpartition(":")[2],
        variants=len(structure.variants),
        shards=len(manifest.shards),
        bytes=manifest.bytes,
        compression=manifest.compression,
        fields=_fields_of_cache(manifest.shards, structure),
        histograms=histograms,
        made_with=dict(manifest.made_with),
        unfinished=unfinished_files(storage),
    )


def _fields_of_cache(shards: ShardTable, structure: Structure) -> tuple[Field, ...]:
    sizes: dict[str, int] = defaultdict(int)
    samples: dict[str, int] = defaultdict(int)
    shapes: dict[str, set[tuple[int | None, ...]]] = defaultdict(set)
    for group in shards.groups:
        # Equal arrays of a shard are kept once (``ArrayDeduplicator``): they count for
        # the first field that has them, so that the fields add up to the bytes.
        counted: set[str] = set()
        for name, column in group.schema.columns:
            named = {column.values, column.offsets, column.shapes, column.rows}
            fresh = {array for array in named if array is not None} - counted
            # Python's integers: the sum over all shards may exceed 64 bits.
            for array in fresh:
                sizes[name] += sum(group.nbytes(array).tolist())
            counted |= fresh
            samples[name] += sum(group.samples_with(name).tolist())
            for shape, _ in group.by_row_shape(column.values, 0):
                shapes[name].add(shape if column.offsets is None else (None, *shape))
    return tuple(
        Field(
            name,
            str(column.kind),
            dtype_in_words(column.dtype),
            _shape_of_column(shapes[name], column),
            sizes[name],
            samples[name],
        )
        for name, column in structure.columns.items()
        if name in samples and "@" not in name
    )


def _shape_of_column(shapes: set[tuple[int | None, ...]], column: ColumnSpec) -> str:
    """Write the shape of a sample's value, "?" where samples differ."""
    if column.row.is_text:
        return ""
    axes = column.ndim
    # Values that differ in several axes are kept flat, with their shapes beside them
    # (layout.py): the shards' table does not say which axes those are.
    if {len(shape) for shape in shapes} != {axes}:
        return f"[{', '.join('?' * axes)}]"
    lengths = []
    for axis in range(axes):
        axis_lengths = {shape[axis] for shape in shapes}
        is_known = len(axis_lengths) == 1 and None not in axis_lengths
        lengths.append(str(axis_lengths.pop()) if is_known else "?")
    if column.axis:  # the axis along which samples are joined is kept first
        lengths.insert(column.axis, lengths.pop(0))
    return f"[{', '.join(lengths)}]"


def _histograms_of_sizes(path: Path, first: Node) -> tuple[Histogram, ...]:
    if not is_graph(first):
        return ()
    # Sizes need no class of the samples' own, and nobody passes one here.
    sizes = open_cache(path, unknown_classes="plain").sizes()
    return (
        _make_histogram("nodes", sizes.nodes),
        _make_histogram("edges", sizes.edges),
    )


def _make_histogram(name: str, sizes: Ints) -> Histogram:
    counts, edges = histogram_of(sizes, most_bins=_BINS)
    return Histogram(name, counts, tuple(map(int, edges)), float(sizes.mean()))
