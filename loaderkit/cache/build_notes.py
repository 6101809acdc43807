"""What a build notes of each finished shard, for the run that goes on behind it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from loaderkit.cache.files import read_bounded, unreadable
from loaderkit.cache.layout import Shard, note_name, shard_from

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MAX_NOTE_BYTES = 1 << 30
"""What is larger was not written by a build, and would fill the memory.  Chosen."""


@dataclass(frozen=True)
class FinishedShard:
    """A shard that is written, and what must hold for a later run to keep it."""

    shard: Shard
    state: Mapping[str, Any]
    """What the builder had learned when it was finished; JSON."""
    evidence: Mapping[str, Any]
    """What shows that the source still holds its samples; JSON, for the builder."""


def note_file(folder: Path, number: int) -> Path:
    """Give the file of a note in a build's folder."""
    return folder / note_name(number)


def note_numbers(folder: Path) -> list[int]:
    """List the numbers of the shards that a note was made of."""
    return sorted(int(file.stem) for file in folder.iterdir() if is_note(file))


def is_note(file: Path) -> bool:
    """Tell whether a file is a note, by its name."""
    return file.suffix == ".json" and file.stem.isdecimal()


def read_note(folder: Path, number: int) -> FinishedShard | None:
    """Read the note of a finished shard.

    Args:
        folder: The build's.
        number: The shard's.

    Returns:
        What is noted; None where there is no note, or a damaged one.
    """
    content = read_build_json(note_file(folder, number))
    # What is written there otherwise is not a note of ours.
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return FinishedShard(
            shard_from(content["shard"]),
            dict(content["state"]),
            dict(content["evidence"]),
        )
    return None


def note_as_json(finished: FinishedShard) -> str:
    """Write a note, as :func:`read_note` reads it."""
    return json.dumps(asdict(finished))


def read_build_json(file: Path) -> Any:
    """Read a small file of a build.

    Args:
        file: Its path.

    Returns:
        Its content; None where it is not there, or no JSON.

    Raises:
        CacheError: It cannot be read, which says nothing of what it holds: taking it
            for nothing would throw away what was finished.
    """
    try:
        return json.loads(read_bounded(file, _MAX_NOTE_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(file, error) from error
    except (ValueError, RecursionError):  # DamagedCacheError, too, is a ValueError
        return None
