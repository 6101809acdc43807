"""Read one span of a stream, and write its shards as they fill up.

Where a shard ends follows from the samples alone: it is full when it has so many bytes,
and another sample follows.  So the shards of a span are the same whoever reads it.  How
many there will be nobody knows; the numbers of the spans' shards take turns.
"""

from __future__ import annotations

import itertools
import time
import uuid
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderkit.cache.durable import remove
from loaderkit.datasets.block_readers import EncodedSpan, about_sample, note_end
from loaderkit.datasets.packing_tasks import WrittenShard, run_of
from loaderkit.datasets.renaming import Renaming, columns_of_shard, read_renamed
from loaderkit.datasets.shard_filling import ShardFiller
from loaderkit.datasets.source_files import FileVersion, version_of
from loaderkit.datasets.streams import SpanReader, StreamSource
from loaderkit.datasets.structure import KEY_COLUMN, VARIANT_COLUMN, Structure
from loaderkit.errors import CacheError, DatasetError
from loaderkit.fixes import Fix, Setting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from loaderkit.cache.build_notes import FinishedShard
    from loaderkit.datasets.packing_tasks import CommonRun
    from loaderkit.datasets.source_files import FileTracker

_BLOCK_SAMPLES = 512
"""Samples that are read while other threads wait (see shard_plan.py)."""
_BLOCK_S = 0.5
"""After so long others get their turn, and the bar moves.  Chosen: a person sees it."""
_MOST_SHARD_NUMBER = 10**9 - 1
"""The name of a shard has nine digits."""


def shard_number(span: int, position: int, span_count: int) -> int:
    """Number a shard of a span, of which nobody knows how many there will be.

    Args:
        span: The span.
        position: Which of its shards.
        span_count: How many spans there are.

    >>> [shard_number(span, position, 3) for span in (0, 2) for position in (0, 1)]
    [0, 3, 2, 5]
    """
    return position * span_count + span


def starting_structure() -> Structure:
    """Give what is known of samples before the first of a span is read."""
    structure = Structure()
    # Every shard has these two columns, whoever meets its other columns first.
    structure.name(VARIANT_COLUMN)
    structure.name(KEY_COLUMN)
    return structure


class WrittenSpan(NamedTuple):
    """What a task tells of its span; the rest is in the shards' notes on disk."""

    span: int
    samples: int
    nbytes: int
    xxh3: Sequence[str]
    """Of each shard of the span, in order; of a span without samples none."""


class StreamedBlock(NamedTuple):
    """What was read since the last one."""

    samples: int
    nbytes: int


@dataclass(frozen=True)
class StreamTask:
    """One span of a stream to read and write."""

    common: Path
    span: int
    span_count: int
    shard_bytes: int
    trusts_notes: bool
    """Keep what an earlier run has finished of a span whose first sample is the same
    now; else all samples are read, and what is the same is not written again."""

    @property
    def name(self) -> str:
        """Its span."""
        return f"stream-{self.span}"

    @property
    def rows(self) -> range:
        """The span, where other tasks have samples."""
        return range(self.span, self.span + 1)

    def run(self) -> WrittenSpan:
        """Read the span and write its shards.

        Raises:
            DatasetError: A sample cannot be read or stored.
            CacheError: A shard cannot be written.
        """
        steps = iter(self.steps())
        return next(step for step in steps if isinstance(step, WrittenSpan))

    def steps(self) -> Iterator[StreamedBlock | WrittenSpan]:
        """Do the same, and tell how far it is.

        Yields:
            What was read, now and then; at last what became of the span.
        """
        run = run_of(self.common)
        finished = self._notes_of_ended_span(run)
        # A span of which nothing was written is read again: it has no first sample to
        # compare, and costs little.
        if finished and self._begins_as(finished[0], run):
            shards = [note.shard for note in finished]
            yield WrittenSpan(
                self.span,
                sum(shard.samples for shard in shards),
                sum(shard.bytes for shard in shards),
                [shard.xxh3 for shard in shards],
            )
            return
        yield from self._read_and_write(run)

    def _read_and_write(self, run: CommonRun) -> Iterator[StreamedBlock | WrittenSpan]:
        structure = starting_structure()
        xxh3: list[str] = []
        samples = nbytes = 0
        filling = _FillingSpan(run, self.span, self.shard_bytes)
        try:
            while not filling.is_read:
                yield filling.read_block()
                shard_span = filling.take_full_shard()
                if shard_span is None:
                    continue
                filler = ShardFiller(structure)
                filler.add(shard_span)
                # The structure is one for the span, and each shard's note has all that
                # was met up to it: a later run goes on from any of them.
                shard = self._write(run, len(xxh3), filler, ends=filling.is_read)
                xxh3.append(shard.shard.xxh3)
                samples += shard.shard.samples
                nbytes += shard.shard.bytes
                if shard_span.block.file is not None:
                    remove(shard_span.block.file)
        finally:
            filling.remove_files()
        yield WrittenSpan(self.span, samples, nbytes, xxh3)

    def _write(
        self, run: CommonRun, position: int, filler: ShardFiller, *, ends: bool
    ) -> FinishedShard:
        """Write a shard, unless it stands there already."""
        writer, number = run.common.writer, self._number(position)
        evidence = filler.evidence(run.common.state)
        evidence["ends span"] = ends
        known = writer.read_note(number)
        if known is not None and _is_same(known, filler, evidence):
            return known
        filler.write(number, writer, evidence)
        # The note, as the run that takes the shard in will read it.
        written = writer.read_note(number)
        if written is None:
            raise _note_is_gone(number, writer.path)
        return written

    def _number(self, position: int) -> int:
        number = shard_number(self.span, position, self.span_count)
        if number > _MOST_SHARD_NUMBER:
            message = f"Span {self.span} has more than {position:,} shards."
            why = f"with {self.span_count:,} spans a cache has no more numbers"
            larger = Setting("shard_bytes", "1 GB")
            fix = Fix.of(larger, ", or spans of about the same length")
            raise DatasetError(message, why=why, fix=fix)
        return number

    def _notes_of_ended_span(self, run: CommonRun) -> list[FinishedShard]:
        """Read the notes of the span where an earlier run came to its end."""
        if not self.trusts_notes:
            return []
        notes: list[FinishedShard] = []
        for position in itertools.count():
            note = run.common.writer.read_note(self._number(position))
            # A gap: the span had not ended.  What was renumbered has note of variants
            # that other spans had then.
            if note is None or note.evidence.get("renumbered"):
                return []
            notes.append(note)
            if note.evidence.get("ends span"):
                return notes
        raise AssertionError

    def _begins_as(self, finished: FinishedShard, run: CommonRun) -> bool:
        """Read the first sample again: what no file and no code shows, it may show."""
        state = run.common.state
        if state is None or finished.evidence.get("state") != state:
            return False
        first = _FillingSpan(run, self.span, self.shard_bytes)
        try:
            first.read_block(most_samples=1)
            return first.digest_of_first() == finished.evidence.get("first")
        finally:
            first.remove_files()


class _FillingSpan:
    """Samples of one span on their way to a shard.

    Args:
        run: Where they come from.
        span: Which span.
        shard_bytes: Bytes after which a shard is full.
    """

    def __init__(self, run: CommonRun, span: int, shard_bytes: int) -> None:
        source: Any = run.common.job.source
        if not isinstance(source, StreamSource):
            msg = "this source is read by number"
            raise TypeError(msg)
        self._run, self._job = run, run.common.job
        self._shard_bytes = shard_bytes
        self._reader = SpanReader(source, span, self._job.seed)
        self._name = f"stream-{span}-{uuid.uuid4().hex}"
        self._scratch_files: list[Path] = []
        self._filling = self._empty_span()
        self._full: EncodedSpan | None = None
        self.is_read = False
        """Whether the last sample of the span was read."""

    def read_block(self, most_samples: int = _BLOCK_SAMPLES) -> StreamedBlock:
        """Read samples until it is somebody else's turn, or a shard is full.

        Raises:
            DatasetError: A sample cannot be read or stored.
        """
        samples = nbytes = 0
        started_at = time.monotonic()
        with self._run.reading() as tracker, warnings.catch_warnings():
            # PyG's, where it has to guess a graph's number of nodes: see ``read_span``.
            warnings.filterwarnings("ignore", message="Unable to accurately infer")
            while samples < most_samples and time.monotonic() < started_at + _BLOCK_S:
                before = self._filling.block.nbytes
                if not self._read_one(tracker):
                    self.is_read = True
                    break
                samples += 1
                if self._full is not None:
                    # The sample began a new block, which holds it alone.
                    nbytes += self._filling.block.nbytes
                    break
                nbytes += self._filling.block.nbytes - before
            self._filling.files.update(tracker.new_files())
        return StreamedBlock(samples, nbytes)

    def take_full_shard(self) -> EncodedSpan | None:
        """Give the samples of a shard, where it is full or nothing follows."""
        full, self._full = self._full, None
        if full is None and self.is_read and self._filling.block.samples:
            full, self._filling = self._filling, self._empty_span()
        return full

    def digest_of_first(self) -> str | None:
        """Give the hash of the first sample; None where there is none."""
        if not self._filling.block.samples:
            return None
        return self._filling.digest_of_sample(0).hex()

    def remove_files(self) -> None:
        """Remove what waits in files."""
        for file in self._scratch_files:
            remove(file)

    def _empty_span(self) -> EncodedSpan:
        return EncodedSpan(0)

    def _read_one(self, tracker: FileTracker) -> bool:
        """Read one sample; False behind the last.

        A shard is known to be full, and not the last one, when a sample follows.
        """
        try:
            streamed = self._reader.read_next()
            if streamed is None:
                return False
            encoded = self._run.encoder.encode(streamed.sample)
        except BaseException as error:
            sample_name = self._reader.name_last()
            if isinstance(error, Exception):
                is_span = not self._reader.has_begun
                raise about_sample(sample_name, error, is_span=is_span) from error
            note_end(sample_name, error)
            raise
        if self._filling.block.nbytes >= self._shard_bytes:
            # The file of this very sample may be among them.  It counts for the full
            # shard, which is then read again once too often, and never once too few.
            self._filling.files.update(tracker.new_files())
            self._full, self._filling = self._filling, self._empty_span()
        self._filling.append(streamed.key, encoded)
        if self._filling.block.file is None:
            scratch = self._job.block(f"{self._name}-{len(self._scratch_files)}")
        else:
            scratch = self._filling.block.file
        self._filling.spill_beyond(self._job.limit, scratch)
        if self._filling.block.file is not None and scratch not in self._scratch_files:
            self._scratch_files.append(scratch)
        return True


@dataclass(frozen=True)
class RenumberTask:
    """A shard to write again, with the variants' numbers of the whole cache."""

    common: Path
    span: int
    number: int
    structure: Mapping[str, Any]
    """How columns make up the samples of the cache; JSON."""

    @property
    def name(self) -> str:
        """Its number."""
        return f"renumber-{self.number}"

    @property
    def rows(self) -> range:
        """Its span."""
        return range(self.span, self.span + 1)

    def run(self) -> WrittenShard:
        """Write it again; what is numbered so already stays as it is.

        Raises:
            CacheError: The shard cannot be read or written.
        """
        common = run_of(self.common).common
        known = common.writer.read_note(self.number)
        if known is None:
            raise _note_is_gone(self.number, common.writer.path)
        whole_structure = Structure.from_json(self.structure)
        known_structure = Structure.from_json(known.state)
        # Changes nothing where another worker has done this task, and was killed before
        # it could say so.
        which = f"of shard {self.number}"
        renaming = Renaming.between(known_structure, whole_structure, which)
        shard = known.shard
        if not renaming.changes_nothing:
            scratch = common.job.block(f"{self.name}-{uuid.uuid4().hex}")
            column = columns_of_shard(common.writer.path, shard)
            try:
                buffer = read_renamed(column, 0, shard, renaming, scratch)
                evidence = {**known.evidence, "renumbered": True}
                shard = common.writer.write(
                    self.number, buffer, state=self.structure, evidence=evidence
                )
            finally:
                remove(scratch)
        return WrittenShard(self.number, shard.samples, shard.bytes, shard.xxh3)


def _note_is_gone(number: int, path: Path) -> CacheError:
    message = f"The note of shard {number} in {path} is gone, or was changed."
    why = "something else than this run has written to the folder"
    return CacheError(message, why=why, fix="run the same again")


def _is_same(
    known: FinishedShard, filler: ShardFiller, evidence: Mapping[str, Any]
) -> bool:
    """Tell whether a shard that stands there is the one that would be written."""
    is_same = all(
        known.evidence.get(name) == evidence[name]
        for name in ("content", "state", "ends span")
    )
    return (
        is_same
        and not known.evidence.get("renumbered")
        and known.state == filler.structure.to_json()
        and files_are_unchanged(known)
    )


def files_behind(finished: FinishedShard) -> dict[str, FileVersion]:
    """Read the files noted with a shard."""
    files = finished.evidence.get("files") or {}
    return {path: FileVersion(*version) for path, version in files.items()}


def files_are_unchanged(finished: FinishedShard) -> bool:
    """Tell whether the files noted with a shard are what they were."""
    return all(
        version_of(path, hashed=bool(packed.xxh3)) == packed
        for path, packed in files_behind(finished).items()
    )
