"""One run of packing: its shards are written, in any order, or known from before.

A run that was killed is gone on with where its samples are shown to be the same: the
files they were made from are as they were, and so are code, keys and settings; or else
the samples, read again, have the same hash.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from typing import (
    TYPE_CHECKING,
    Any,
)

from loaderkit.cache.layout import SHARD_FORMAT
from loaderkit.datasets.block_readers import PackJob, content_digest
from loaderkit.datasets.classes import import_classes
from loaderkit.datasets.packing_stream_tasks import files_behind
from loaderkit.datasets.packing_tasks import Look, ReadSpan
from loaderkit.datasets.progress import progress_bar
from loaderkit.datasets.shard_filling import take_over_shards
from loaderkit.datasets.shard_plan import ShardPlan, rows_to_look_at
from loaderkit.datasets.source_files import (
    FileVersion,
    SourceFileList,
    files_below,
    hashed,
    version_of,
)
from loaderkit.datasets.structure import KEY_COLUMN, VARIANT_COLUMN, Structure
from loaderkit.errors import CacheError, DatasetError
from loaderkit.fixes import Fix, Setting
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loaderkit.cache.build import Build
    from loaderkit.cache.build_notes import FinishedShard
    from loaderkit.datasets.pack_options import PackOptions
    from loaderkit.datasets.packing_team import PackingTeam
    from loaderkit.datasets.progress import ProgressBar
    from loaderkit.datasets.sources import Source

_MOST_LOOKED_AT = 100_000
"""Raw files that are looked at before they are read.  Chosen: 200 bytes each, 20 MB."""
_BLOCKS_AGAIN = 16
"""Blocks of samples that are read in one task for their hashes alone.  Chosen, as the
blocks of a span (shard_plan.py)."""
_UNREAD = "unread"
"""In a plan: how many of the samples that were to be looked at could not be read."""
_LOG = logging.getLogger("loaderkit")


class PackingRun:
    """One run of packing: what is known of its shards.

    Args:
        job: What is read.
        team: Has the samples read and the shards written.
        build: The cache's folder.
        options: How.
    """

    def __init__(
        self,
        job: PackJob,
        team: PackingTeam,
        build: Build,
        options: PackOptions,
    ) -> None:
        self.source, self.team = job.numbered_source, team
        self.build, self.options = build, options
        self.structure = Structure()
        self._versions = self._look_at_files()
        root = self.source.root()
        self.sources = SourceFileList("" if root is None else os.path.abspath(root))
        self._state = self.source.state()
        self._xxh3: dict[int, str] = {}
        """Of each finished shard, by its number."""
        self._files: dict[str, FileVersion] = {}
        """Files noted while samples were read again; the next shard has note of them.
        One may stay open, and is not noted with the samples that are read from it."""
        self._looked_at_files: Mapping[int, Mapping[str, FileVersion]] = {}
        """Files that were opened for a look at a sample, by its row."""

    def _look_at_files(self) -> dict[str, FileVersion]:
        """Look at raw files before they are read: one may be replaced meanwhile."""
        if self.options.track_files == "none":
            return {}
        root = self.source.root()
        ours = [os.path.abspath(self.build.path)]
        below_root = [] if root is None else files_below(root, ours)
        paths = itertools.chain(self.source.named_files(), below_root)
        versions = ((path, version_of(path)) for path in paths)
        looked_at = itertools.islice(versions, _MOST_LOOKED_AT)
        return {path: version for path, version in looked_at if version is not None}

    def pack(self, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
        """Pack what an earlier run has not packed.

        Args:
            fingerprint: What the samples are made from.

        Returns:
            How columns make up a sample.
        """
        total = len(self.source)
        rows = rows_to_look_at(total)
        look = self._look_at_samples(rows)
        import_classes(look.structure)
        sizes = look.sizes
        unread = len(rows) - len(sizes)
        if unread:
            # Which part each size is of does not matter: the run will fail at them.
            sizes = [-(-sum(sizes) // len(sizes))]
        description = {
            "format": SHARD_FORMAT,
            "fingerprint": fingerprint,
            "samples": total,
            "compression": self.options.compression,
            "shard_bytes": self.options.most_shard_bytes,
        }
        sizes, unread = self._sizes_to_plan_with(sizes, unread, description)
        self.plan = ShardPlan.of(total, sizes, self.options.most_shard_bytes)
        description["part_bytes"] = list(self.plan.part_bytes)
        if unread:
            description[_UNREAD] = unread
        intact = self.build.resume_in_any_order(description, self.source.values())
        self._keep_shards_of_unchanged_samples(intact)
        missing = [
            number
            for number in range(self.plan.shard_count)
            if number not in self._xxh3
        ]
        done = total - sum(len(self.plan.rows_of(number)) for number in missing)
        with progress_bar(total, self.build.path, done) as bar:
            learned = Structure.from_json(look.structure.to_json())
            self._write_shards(missing, learned, bar)
            self._write_misnumbered(look.structure, bar)
        return self.structure.to_json()

    def _sizes_to_plan_with(
        self, sizes: list[int], unread: int, description: Mapping[str, Any]
    ) -> tuple[list[int], int]:
        """Keep to an unfinished run's sizes where a sample could not be looked at.

        Once such a sample is mended it has a size, and by another cut the shards that
        were finished could not be kept.

        Args:
            sizes: As they were looked at now.
            unread: Samples that could not be looked at.
            description: What decides the bytes of the cache, beside sizes.

        Returns:
            The sizes, and how many samples they lack.
        """
        earlier = self.build.unfinished_plan() or {}
        earlier_sizes = earlier.get("part_bytes")
        earlier_unread = earlier.get(_UNREAD, 0)
        # Compared as it comes back from JSON, which has no tuples.
        wanted = json.loads(json.dumps(description))
        is_same_but_sizes = all(earlier.get(name) == wanted[name] for name in wanted)
        if earlier_sizes and is_same_but_sizes and (unread or earlier_unread):
            return earlier_sizes, earlier_unread
        return sizes, unread

    def _look_at_samples(self, rows: list[int]) -> Look:
        """Look at the sizes of some samples, and at how they are built."""
        look = self.team.look(rows)
        self._looked_at_files = look.files
        # Every shard has these two columns, whoever meets its other columns first.
        look.structure.name(VARIANT_COLUMN)
        look.structure.name(KEY_COLUMN)
        return look

    def _keep_shards_of_unchanged_samples(self, intact: list[int]) -> None:
        """Go on with a killed run's shards whose samples are still the source's."""
        for position, number in enumerate(intact):
            finished = self.build.read_note(number)
            reason = self._difference_from_source(
                finished, self.plan.rows_of(number).start
            )
            if reason:
                _LOG.warning(
                    "packing %s: finished shards (%d) are packed anew, since %s",
                    self.build.path,
                    len(intact) - position,
                    reason,
                )
                # A file that one shard's samples were read from may have stayed open
                # for those behind it, which have no note of it.
                self.build.discard(intact[position:])
                return
            self.sources.update(files_behind(finished))
            self._xxh3[number] = finished.shard.xxh3

    def _write_shards(
        self, numbers: list[int], structure: Structure, bar: ProgressBar
    ) -> None:
        """Have shards written.

        Args:
            numbers: Which ones, in order.
            structure: What is known of how their samples are built; it may learn.
            bar: Told of samples.
        """
        samples_on_bar: dict[int, int] = {}
        """Samples of each shard of which the bar was told."""
        nbytes = 0
        files = self._files_of_shards(numbers)
        for result in self.team.write(
            self.plan, numbers, structure, files, self._learned_with
        ):
            if isinstance(result, ReadSpan):
                number = self.plan.shard_of(result.start)
                samples_on_bar[number] = samples_on_bar.get(number, 0) + result.samples
                bar.update(result.samples)
                nbytes += result.nbytes
            else:
                self._xxh3[result.number] = result.xxh3
                bar.update(result.samples - samples_on_bar.get(result.number, 0))
            bar.set_postfix_str(format_bytes(nbytes), refresh=False)

    def _files_of_shards(self, numbers: list[int]) -> dict[int, dict[str, FileVersion]]:
        """Say which files are known to be opened for shards, by their numbers."""
        files: dict[int, dict[str, FileVersion]] = {number: {} for number in numbers}
        for row, versions in self._looked_at_files.items():
            number = self.plan.shard_of(row)
            if number in files:
                files[number].update(versions)
        if 0 in files:
            files[0].update(root_file(self.source, self.options))
        if numbers:
            files[numbers[0]].update(self._files)
        return {number: versions for number, versions in files.items() if versions}

    def _learned_with(self, number: int) -> Mapping[str, Any]:
        return self.build.read_note(number).state

    def _write_misnumbered(self, look: Structure, bar: ProgressBar) -> None:
        """Make all shards those of one cache; write some again where that takes it.

        Whoever writes a shard does not know what those in front of it add to the
        structure.  Where two of them add different variants, or columns of one path,
        the later has numbered its own too low, and is written once more: with the
        numbers of the whole, which a single process would have given them.

        Args:
            look: What was known when the first shard was begun.
            bar: Told of samples.
        """
        misnumbered = self._merge_structures(look)
        if misnumbered:
            _LOG.info("packing %s: %d shards again", self.build.path, len(misnumbered))
            self.build.discard(misnumbered)
            bar.update(-sum(len(self.plan.rows_of(number)) for number in misnumbered))
            self._write_shards(misnumbered, self.structure, bar)
            misnumbered = self._merge_structures(look)
        if misnumbered:
            first = self.plan.rows_of(misnumbered[0])
            message = (
                f"Samples {first.start:,} to {first.stop - 1:,} were not the same "
                "when they were read again."
            )
            why = "load() builds a sample in another way each time"
            raise DatasetError(
                message,
                why=why,
                fix=Fix.of("pack in one process: ", Setting("workers", 0)),
            )
        for number in range(self.plan.shard_count):
            finished = self.build.read_note(number)
            if finished.shard.xxh3 != self._xxh3[number]:
                message = (
                    f"Shard {number} in {self.build.path} is not the one of this run."
                )
                why = "a task of a run that was killed has ended only now"
                raise CacheError(message, why=why, fix="run the same again")
            self.sources.update(files_behind(finished))
            self.build.take_in(finished)

    def _merge_structures(self, look: Structure) -> list[int]:
        """Number what all shards know of how samples are built.

        Returns:
            The shards that have other numbers, or names.
        """
        self.structure = Structure.from_json(look.to_json())
        numbers = range(self.plan.shard_count)
        notes = ((number, self.build.read_note(number).state) for number in numbers)
        return take_over_shards(self.structure, notes)

    def list_sources(self) -> str | None:
        """Write down which files samples were made from; None where none is known."""
        if self.options.track_files == "none":
            return None
        by_hash = self.options.track_files == "hash"
        root = self.source.root()
        paths = list(self.source.named_files())
        if root is not None and not paths and not self.sources.any_below_root():
            # A library in C has read them, and told nobody which.
            paths = list(files_below(root, [os.path.abspath(self.build.path)]))
        for path in paths:
            version = self._versions.get(path) or version_of(path)
            if version is not None:
                known = hashed(path, version) if by_hash else version
                self.sources.add(path, known)
        return self.sources.to_json() if self.sources.files else None

    def _difference_from_source(self, finished: FinishedShard, start: int) -> str:
        """Say how the source differs from what a shard was made of; "" if it does not.

        Args:
            finished: The shard.
            start: Its first row.
        """
        for path, packed in files_behind(finished).items():
            if version_of(path, hashed=bool(packed.xxh3)) != packed:
                return f"{path} has changed"
        evidence, stop = finished.evidence, start + finished.shard.samples
        known = bool(self.sources.files) or bool(files_behind(finished))
        if known and self._state is not None and evidence.get("state") == self._state:
            # Files, code, keys and settings are the same.  Two samples are read again
            # all the same, for what none of these shows (a database, a clock).
            for row, wanted in ((start, "first"), (stop - 1, "last")):
                if self._digests_of(row, row + 1).hex() != evidence.get(wanted):
                    return f"sample {self.source.key(row)!r} is another one now"
            return ""
        if content_digest(self._digests_of(start, stop)) != evidence.get("content"):
            return f"samples {start:,} to {stop - 1:,} are not the same as before"
        return ""

    def _digests_of(self, start: int, stop: int) -> bytes:
        """Read samples again for their hashes alone, 16 bytes each."""
        step = _BLOCKS_AGAIN * self.plan.block_samples
        rows = range(start, stop)
        spans = [range(first, min(stop, first + step)) for first in rows[::step]]
        content = bytearray()
        for digests in self.team.digests(spans):
            content += digests.digests
            self._files.update(digests.files)
        return bytes(content)


def root_file(source: Source, options: PackOptions) -> dict[str, FileVersion]:
    """Look at the raw data where it is a single file, whatever library reads it."""
    root = source.root()
    if options.track_files == "none" or root is None or not root.is_file():
        return {}
    path = os.path.abspath(root)
    version = version_of(path)
    return {} if version is None else {path: version}
