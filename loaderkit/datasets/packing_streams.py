"""One run of packing a stream: its spans are read, each by one process.

What a killed run has written is found again.  A span that had ended is kept where the
files that its samples were read from, and its first sample, are what they were; any
other is read once more, and only what differs from what stands there is written.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from loaderkit.cache.layout import SHARD_FORMAT
from loaderkit.datasets.classes import import_classes
from loaderkit.datasets.packing_stream_tasks import (
    RenumberTask,
    StreamedBlock,
    StreamTask,
    WrittenSpan,
    files_are_unchanged,
    files_behind,
    shard_number,
    starting_structure,
)
from loaderkit.datasets.progress import progress_bar
from loaderkit.datasets.shard_filling import take_over_shards
from loaderkit.datasets.source_files import SourceFileList
from loaderkit.datasets.structure import Structure
from loaderkit.errors import CacheError, DatasetError
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from loaderkit.cache.build import Build
    from loaderkit.datasets.pack_options import PackOptions
    from loaderkit.datasets.packing_team import PackingTeam
    from loaderkit.datasets.progress import ProgressBar
    from loaderkit.datasets.streams import StreamSource

_LOG = logging.getLogger("loaderkit")


class StreamRun:
    """One run of packing a stream.

    Args:
        source: Its samples.
        team: Has spans read and shards written.
        build: The cache's folder.
        options: How.
        common: The file with what all tasks have in common.
    """

    def __init__(
        self,
        source: StreamSource,
        team: PackingTeam,
        build: Build,
        options: PackOptions,
        common: Path,
    ) -> None:
        self._source, self._team, self._build = source, team, build
        self._options, self._common = options, common
        self.structure = Structure()
        self.sample_count = 0
        """Samples of all spans, once they are packed."""
        self._sources = SourceFileList()

    def pack(self, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
        """Pack what an earlier run has not packed.

        Args:
            fingerprint: What the samples are made from.

        Returns:
            How columns make up a sample.

        Raises:
            DatasetError: A sample cannot be read or stored, or there is none.
            CacheError: The folder cannot be written.
        """
        description = {
            "format": SHARD_FORMAT,
            "fingerprint": fingerprint,
            "samples": None,
            "spans": self._source.span_count,
            "compression": self._options.compression,
            "shard_bytes": self._options.most_shard_bytes,
        }
        intact = self._build.resume_in_any_order(description)
        # Of an iterable nothing but its samples tells what they are made from: all are
        # read again.  A function of spans has code and constants that tell.
        trusts_notes = self._source.takes_workers and self._files_show_no_change(intact)
        with progress_bar(self._source.told_length(), self._build.path) as bar:
            written = self._write_spans(bar, trusts_notes=trusts_notes)
        xxh3_of_shard = self._shards_in_order(written)
        if not xxh3_of_shard:
            message = f"There is nothing to pack: {self._what_is_empty()}."
            fix = "give it at least one sample; a generator is empty once it was read"
            raise DatasetError(message, why="a cache holds at least one", fix=fix)
        # The stream may have become shorter since the run that wrote them.
        self._build.discard(set(intact) - set(xxh3_of_shard))
        self._renumber_shards(xxh3_of_shard)
        self._take_in(xxh3_of_shard)
        import_classes(self.structure)
        return self.structure.to_json()

    def list_sources(self) -> str | None:
        """Write down which files samples were made from; None where none is known."""
        return self._sources.to_json() if self._sources.files else None

    def _what_is_empty(self) -> str:
        if self._source.span_count == 1:
            name = self._source.name_span(0)
            return f"{name[0].lower()}{name[1:]} has no samples"
        return f"none of {self._source.span_count:,} spans has a sample"

    def _files_show_no_change(self, intact: list[int]) -> bool:
        """Tell whether files were noted with an earlier run's shards, all unchanged.

        A file that one span was read from may have stayed open for others, which have
        no note of it: so one that has changed counts for all.
        """
        any_known = False
        for number in intact:
            finished = self._build.read_note(number)
            if not files_are_unchanged(finished):
                _LOG.warning(
                    "packing %s: all samples are read again, since files have changed "
                    "from which an unfinished run has read them",
                    self._build.path,
                )
                return False
            any_known = any_known or bool(files_behind(finished))
        return any_known

    def _write_spans(
        self, bar: ProgressBar, *, trusts_notes: bool
    ) -> dict[int, WrittenSpan]:
        """Have all spans read and written; give what became of each, by number."""
        span_count = self._source.span_count
        tasks = (
            StreamTask(
                self._common,
                span,
                span_count,
                self._options.most_shard_bytes,
                trusts_notes,
            )
            for span in range(span_count)
        )
        written: dict[int, WrittenSpan] = {}
        nbytes = 0
        for result in self._run_tasks(tasks):
            if isinstance(result, StreamedBlock):
                nbytes += result.nbytes
                bar.update(result.samples)
            else:
                written[result.span] = result
                # Read in this process, its blocks were counted one by one; of a worker
                # nothing is heard before the end of its span.
                if not self._reads_here:
                    nbytes += result.nbytes
                    bar.update(result.samples)
            progress = f"{format_bytes(nbytes)}, length unknown"
            if span_count > 1:
                progress = (
                    f"{format_bytes(nbytes)}, {len(written)} of {span_count} spans"
                )
            bar.set_postfix_str(progress, refresh=False)
        return written

    @property
    def _reads_here(self) -> bool:
        return self._options.workers == 0

    def _run_tasks(
        self, tasks: Iterator[StreamTask]
    ) -> Iterator[StreamedBlock | WrittenSpan]:
        if not self._reads_here:
            yield from self._team.do(tasks)
            return
        for task in tasks:
            for result in task.steps():
                # Between two blocks a Ctrl-C finds whole shards, and notes of them.
                self._team.interrupts.check()
                yield result

    def _shards_in_order(self, written: Mapping[int, WrittenSpan]) -> dict[int, str]:
        """List the numbers of all shards, in the order of their samples.

        Returns:
            The checksum of each, by its number.
        """
        span_count = self._source.span_count
        return {
            shard_number(span, position, span_count): xxh3
            for span in range(span_count)
            for position, xxh3 in enumerate(written[span].xxh3)
        }

    def _renumber_shards(self, xxh3_of_shard: dict[int, str]) -> None:
        """Make all shards those of one cache; write some again where that takes it.

        A span's shards number the variants that this span has met.  They are written
        again from their own files: no sample is read twice.

        Args:
            xxh3_of_shard: Checksums by number, in order; those that change are put in.
        """
        misnumbered = self._merge_structures(list(xxh3_of_shard))
        if not misnumbered:
            return
        _LOG.info("packing %s: %d shards again", self._build.path, len(misnumbered))
        whole, span_count = self.structure.to_json(), self._source.span_count
        # ``% span_count``: the span of a shard, as ``shard_number`` has numbered it.
        tasks = (
            RenumberTask(self._common, number % span_count, number, whole)
            for number in misnumbered
        )
        for shard in self._team.do(tasks):
            xxh3_of_shard[shard.number] = shard.xxh3
        # Read back from the notes on disk, which is what the manifest is made of: who
        # writes to the folder beside this run is found out here.
        still_misnumbered = self._merge_structures(list(xxh3_of_shard))
        if still_misnumbered:
            message = f"Shards in {self._build.path} do not fit together."
            why = "something else than this run has written to the folder"
            raise CacheError(message, why=why, fix="run the same again")

    def _merge_structures(self, numbers: list[int]) -> list[int]:
        """Number what all shards know of how samples are built.

        Args:
            numbers: The shards, in order.

        Returns:
            The shards that have other numbers, or names.
        """
        self.structure = starting_structure()
        notes = ((number, self._build.read_note(number).state) for number in numbers)
        return take_over_shards(self.structure, notes)

    def _take_in(self, xxh3_of_shard: Mapping[int, str]) -> None:
        """Make the shards those of the cache, in order."""
        for number, xxh3 in xxh3_of_shard.items():
            finished = self._build.read_note(number)
            if finished.shard.xxh3 != xxh3:
                message = (
                    f"Shard {number} in {self._build.path} is not the one of this run."
                )
                why = "a task of a run that was killed has ended only now"
                raise CacheError(message, why=why, fix="run the same again")
            self._sources.update(files_behind(finished))
            self._build.take_in(finished)
            self.sample_count += finished.shard.samples
