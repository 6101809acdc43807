"""Read samples and take them apart."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
import warnings
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from loaderkit.cache.columns import Block
from loaderkit.cache.durable import remove, writing
from loaderkit.datasets.compiled_encoding import SampleEncoder
from loaderkit.datasets.own_samples import making_samples_for
from loaderkit.datasets.reading_turns import turn_to_read
from loaderkit.datasets.source_files import FileTracker, FileVersion, TrackFiles
from loaderkit.datasets.streams import StreamSource
from loaderkit.error_texts import error_in_words, is_out_of_memory
from loaderkit.errors import DatasetError, LoaderkitError
from loaderkit.library_files import where_raised
from loaderkit.randomness import mix_seed, preserve_random_states, seed_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from loaderkit.datasets.compiled_encoding import EncodedSample, SampleLayout
    from loaderkit.datasets.sources import Source
    from loaderkit.datasets.structure import Node

_LOG = logging.getLogger("loaderkit")
_DIGEST_BYTES = 16
"""Of an xxh3-128."""


@dataclass
class EncodedSpan:
    """Some consecutive samples: their columns, and how each sample was built."""

    start: int
    """First row."""
    block: Block = field(default_factory=Block)
    """The columns by what ``encode`` says of them, and the samples' keys."""
    trees: list[Node] = field(default_factory=list)
    first_keys: list[str] = field(default_factory=list)
    """Key of the first sample that is built like each tree."""
    tree_of_sample: array[int] = field(default_factory=lambda: array("q"))
    digests: bytearray = field(default_factory=bytearray)
    """Hash of each sample's key, tree and values, end to end."""
    files: dict[str, FileVersion] = field(default_factory=dict)
    """Files opened for the first time while they were read, by absolute path."""

    _numbers: dict[SampleLayout, int] = field(default_factory=dict)
    """Which of the trees each layout is of."""

    def append(self, key: str, sample: EncodedSample) -> None:
        """Add a sample that was taken apart.

        Args:
            key: What it is called.
            sample: Its values; its key is added to them.
        """
        # Layouts are one object for each tree (``SampleEncoder``), hashed by identity:
        # a tree would be hashed whole, for each sample.
        layout = sample.layout
        number = self._numbers.get(layout)
        if number is None:
            number = self._numbers[layout] = len(self.trees)
            self.trees.append(layout.tree)
            self.first_keys.append(key)
        # A key may be the name of a file that is not UTF-8: a lone surrogate in Python.
        key_bytes = key.encode("utf-8", "surrogatepass")
        values = [*sample.values, key_bytes]
        shapes = layout.pack_shapes(*sample.shapes, len(key_bytes))
        self.digests += layout.digest(shapes, values)
        self.block.append_alike(layout.columns, shapes, values)
        self.tree_of_sample.append(number)

    def __getstate__(self) -> dict[str, Any]:
        # Layouts are the encoder's, and say nothing to another process.
        return {**vars(self), "_numbers": {}}

    def spill_beyond(self, limit: int, scratch: Path) -> None:
        """Move the values to a file where more than ``limit`` bytes are in memory.

        Raises:
            CacheError: The file cannot be written.
        """
        if self.block.bytes_in_memory >= limit:
            with writing(scratch):
                self.block.spill(scratch)

    def digest_of_sample(self, index: int) -> bytes:
        """Give the hash of one sample, counted from the first."""
        start = index * _DIGEST_BYTES
        return bytes(self.digests[start : start + _DIGEST_BYTES])


@dataclass(frozen=True)
class PackJob:
    """What all packing workers do."""

    source: Source | StreamSource
    limit: int
    """Bytes of samples that wait in memory; then they go to a file."""
    folder: Path
    """Where what is not finished lies."""
    track_files: TrackFiles = "stat"
    seed: int | None = None
    """What the random numbers that samples draw follow from; see ``seed_of``."""
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """In the names of blocks: a worker of a killed run may still write its own."""

    @property
    def numbered_source(self) -> Source:
        """The source, known to hold samples that are read by number."""
        if isinstance(self.source, StreamSource):
            msg = "samples of a stream are read in order, by span"
            raise TypeError(msg)
        return self.source

    def block(self, name: str) -> Path:
        """Name a file in which something waits for another process, or for later."""
        return self.folder / f"{self.run}-{name}.block"

    def clear(self) -> None:
        """Remove blocks that nobody took, after an error.

        The next run removes what cannot be removed now: what went wrong counts.
        """
        with contextlib.suppress(OSError):
            for file in self.folder.glob("*.block"):
                remove(file)

    def making_samples(self) -> contextlib.AbstractContextManager[None]:
        """Have code of the source's run, which must not wait for this run to end."""
        return making_samples_for(self.folder.parent)

    @contextlib.contextmanager
    def turn_to_read(self) -> Iterator[None]:
        """Have code of the source's run here, while no other thread reads samples.

        The random numbers of the process go on behind it as if none had been drawn.
        """
        with (
            turn_to_read(self.folder.parent),
            preserve_random_states(),
            self.making_samples(),
        ):
            yield

    def tracker(self, *, all_threads: bool) -> FileTracker:
        """Make what notes the files that the source opens."""
        cache = os.path.abspath(self.folder.parent)
        return FileTracker([cache], self.track_files, all_threads=all_threads)


def read_span(
    job: PackJob,
    rows: range,
    tracker: FileTracker,
    *,
    encoder: SampleEncoder | None = None,
    into: EncodedSpan | None = None,
    scratch: Path | None = None,
) -> EncodedSpan:
    """Read and take apart some samples.

    Args:
        job: Where they come from, and how many bytes of them wait in memory.
        rows: Which ones.
        tracker: What notes the files that are opened meanwhile.
        encoder: What takes samples apart, and remembers how such are built; None for a
            new one.
        into: Samples that these come behind; taken apart by the same encoder.
        scratch: A file to which values go when there are too many; None keeps all in
            memory.

    Returns:
        The samples in order.

    Raises:
        DatasetError: A sample cannot be read or stored.
        CacheError: The file cannot be written.
    """
    span = EncodedSpan(rows.start) if into is None else into
    source = job.numbered_source
    encoder = encoder or SampleEncoder()
    with warnings.catch_warnings():
        # PyG's, where it has to guess a graph's number of nodes.  ``encode`` asks each
        # store for it, and keeps what PyG answers; the user has asked nothing.
        warnings.filterwarnings("ignore", message="Unable to accurately infer")
        for row in rows:
            _encode_one(job, source, row, encoder, span)
            if scratch is not None:
                span.spill_beyond(job.limit, scratch)
    span.files.update(tracker.new_files())
    return span


def digests_of_rows(job: PackJob, rows: range, tracker: FileTracker) -> EncodedSpan:
    """Read samples for their hashes alone.

    Raises:
        DatasetError: A sample cannot be read or stored.
    """
    span, encoder = EncodedSpan(rows.start), SampleEncoder()
    for row in rows:
        read_span(job, range(row, row + 1), tracker, encoder=encoder, into=span)
        # The hash is taken: no more than one sample's values are in memory.
        span.block = Block()
    return span


def seed_of(source: Source | StreamSource, cache: Path) -> int | None:
    """Say what the random numbers of a source's samples follow from; None: of nothing.

    Ask in the process that packs: ``torch.manual_seed`` there is what the user sets.

    Args:
        source: Where samples come from.
        cache: What is packed of them, for messages.
    """
    if not source.runs_user_code():
        return None
    with turn_to_read(cache):
        return torch.initial_seed()


def read_sample(source: Source, row: int, seed: int | None) -> Any:
    """Read one sample.

    The random numbers it draws follow from its row, so that samples are the same for
    every number of workers, and when an unfinished build goes on.  Whoever goes on
    drawing behind it puts back the states (``randomness.preserve_random_states``).

    Args:
        source: Where it comes from.
        row: Which one.
        seed: What ``seed_of`` says of the source.

    Returns:
        What the source gives.
    """
    if seed is not None:
        seed_all(mix_seed(seed, 0, row))
    return source.read(row)


def _encode_one(
    job: PackJob, source: Source, row: int, encoder: SampleEncoder, into: EncodedSpan
) -> None:
    """Read one sample, take it apart and add it to others.

    Raises:
        DatasetError: The sample cannot be read or stored; the message names it.
    """
    key = source.key(row)
    try:
        encoded = encoder.encode(read_sample(source, row, job.seed))
    except BaseException as error:
        sample_name = f"Sample {key!r} (row {row:,} of {len(source):,})"
        if isinstance(error, Exception):
            raise about_sample(sample_name, error) from error
        note_end(sample_name, error)
        raise
    into.append(key, encoded)


def content_digest(digests: bytes | bytearray) -> str:
    """Hash many samples by their hashes, which lie end to end."""
    return xxhash.xxh3_128_hexdigest(digests)


def note_end(sample_name: str, error: BaseException) -> None:
    """Note what was read when the program was told to end, which it goes on to do.

    ``sys.exit`` of the user's code, or of a handler of signals that ran meanwhile, is
    no error of a sample.  But whoever looks for what ended a run of hours may ask.

    Args:
        sample_name: The sample, as a message begins.
        error: What is no ``Exception``; it is raised again by the caller.
    """
    text = f"{sample_name} was being read at {error!r}."
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
    if isinstance(error, SystemExit):  # Python prints no notes of it
        _LOG.warning("%s Finished shards are kept.", text)


def about_sample(
    sample_name: str, error: Exception, *, is_span: bool = False
) -> LoaderkitError:
    """Say with which sample something went wrong.

    Args:
        sample_name: The sample, as a message begins.
        error: What its source raised, or what cannot be stored of it.
        is_span: It is a span that could not begin, before any of its samples.
    """
    if isinstance(error, DatasetError):
        return DatasetError(
            f"{sample_name}: {error.what}", why=error.why, fix=error.advice
        )
    # A disk that is full, a cache that is damaged: that is about no sample.
    if isinstance(error, LoaderkitError):
        return error
    message = f"{sample_name} could not be loaded: {error_in_words(error)}"
    fix = "correct or leave out this sample and run again; finished shards are kept"
    if is_out_of_memory(error):
        fix = "fewer workers=, or free memory of other programs, and run again; "
        fix += "finished shards are kept"
    elif is_span:
        fix = "correct the function that gives the samples of a span, or say as many "
        fix += "spans= as it has parts, and run again; finished shards are kept"
    return DatasetError(message, why=where_raised(error), fix=fix)
