"""``manifest.json``: what is known of a cache without reading a sample.  Pure.

Since version 3 the shards are a table of numbers (shard_table.py), and since version 4
lists of texts may be kept as numbered texts (``loaderkit.datasets.plain``).  Version 2,
which has an object for each shard, and version 3 are read as well; version 4 is
written.  The checksum of the content names the *generation* that all files of a cache
belong to.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import xxhash

from loaderkit.cache.layout import is_cache_file_name, shard_from, sources_name
from loaderkit.cache.parsed import (
    integer,
    list_of_values,
    optional_text,
    record,
    text,
)
from loaderkit.cache.shard_table import ShardTable
from loaderkit.errors import CacheVersionError, DamagedCacheError
from loaderkit.fixes import PACK_AGAIN

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = "loaderkit-cache"
VERSION = 4
"""What is written; what each version brought is said at the top."""
_READ_VERSIONS = (2, 3, VERSION)
_VERSION_OF_OBJECTS = 2
"""The last version that has an object for each shard."""
MOST_MANIFEST_BYTES = 256 << 20
"""A larger manifest is not read.  10^6 shards of some 30 fields take about 150 MB, and
in version 2, 10^5 of them took 200 MB."""
_CONTENT = '"content": '


@dataclass(frozen=True)
class SourceFiles:
    """The list of the files that the samples were made from, in a file of its own.

    A million raw files would make a manifest of 100 MB, which every worker would read.
    """

    file: str
    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """Everything that is known of a cache without reading a sample."""

    shards: ShardTable
    structure: Mapping[str, Any]
    """How columns make up a sample; written and read by ``loaderkit.datasets``."""
    fingerprint: Mapping[str, Any]
    """What the samples were made from; compared by ``loaderkit.datasets``."""
    made_with: Mapping[str, str]
    """Versions of the libraries that packed it, for people to read."""
    compression: str | None = None
    sources: SourceFiles | None = None
    """Which files it was made from; None where none is known."""
    generation: str = ""
    """Checksum of everything above: equal for equal caches, other for any other."""

    @property
    def files(self) -> list[str]:
        """Names of all files of the cache but the manifest."""
        names = self.shards.files
        return names if self.sources is None else [*names, self.sources.file]

    @cached_property
    def samples(self) -> int:
        """Samples in all shards together."""
        return sum(self.shards.samples.tolist())

    @property
    def bytes(self) -> int:
        """Bytes of all shards on disk."""
        return sum(self.shards.bytes.tolist())


def write_manifest(manifest: Manifest) -> str:
    """Write a manifest as JSON text that carries its own checksum."""
    content = _content_of(manifest)
    head = {"format": FORMAT, "version": VERSION, "checksum": _checksum_of(content)}
    # The content goes in as the text that the checksum was taken of: it is not written
    # twice, and a reader finds it so (``_has_checksum``).
    head_without_brace = json.dumps(head)[:-1]
    return f"{head_without_brace}, {_CONTENT}{content}}}\n"


def generation_of(manifest: Manifest) -> str:
    """Name the generation that a manifest will have once it is written."""
    return _checksum_of(_content_of(manifest))


def _content_of(manifest: Manifest) -> str:
    fields = {
        "shards": manifest.shards.to_json(),
        "structure": manifest.structure,
        "fingerprint": manifest.fingerprint,
        "made_with": manifest.made_with,
        "compression": manifest.compression,
        "sources": None if manifest.sources is None else asdict(manifest.sources),
    }
    # NaN is no JSON, and other readers of the file would refuse it: better now.
    return json.dumps(fields, separators=(",", ":"), allow_nan=False)


def read_manifest(manifest_text: str, *, where: str) -> Manifest:
    """Read a manifest and check every number in it.

    Args:
        manifest_text: The JSON text of ``manifest.json``.
        where: The file's path, for messages.

    Returns:
        A manifest whose arrays all lie inside their files.

    Raises:
        CacheVersionError: A newer loaderkit wrote it.
        DamagedCacheError: It is not a manifest of ours, or was changed.
    """
    try:
        envelope = json.loads(manifest_text)
    # RecursionError: a file of 100,000 opening brackets.
    except (ValueError, RecursionError) as error:
        raise _damaged_manifest(where, f"it is not JSON ({error})") from None
    if not isinstance(envelope, dict) or envelope.get("format") != FORMAT:
        raise _damaged_manifest(where, f'it has no "format": "{FORMAT}"')
    # The version before the checksum: other versions may compute that otherwise.
    version = envelope.get("version")
    if version == 1:
        message = f"{where} has format version 1; this loaderkit reads 2 to {VERSION}."
        why = "it was packed before shards were named after their content"
        raise CacheVersionError(message, why=why, fix=PACK_AGAIN)
    if isinstance(version, int) and version > VERSION:
        message = (
            f"{where} has format version {version}; this loaderkit reads {VERSION}."
        )
        why = "a newer loaderkit wrote the cache"
        raise CacheVersionError(message, why=why, fix="pip install --upgrade loaderkit")
    if version not in _READ_VERSIONS:
        raise _damaged_manifest(
            where, f"its version is {version!r}, not 2 to {VERSION}"
        )
    content, generation = envelope.get("content"), str(envelope.get("checksum"))
    if not _has_checksum(manifest_text, content, generation):
        raise _damaged_manifest(where, "its checksum is not that of its content")
    manifest = manifest_from(content, where=where, version=version)
    return replace(manifest, generation=generation)


def _has_checksum(manifest_text: str, content: object, checksum: str) -> bool:
    """Tell whether a manifest's content has a checksum.

    The checksum is that of the content as ``write_manifest`` writes it, whatever white
    space a person, or a program, has put into it since.
    """
    # As it was written, it need not be written again: 5 ms for 8,000 shards.
    as_it_stands = manifest_text.partition(_CONTENT)[2].removesuffix("}\n")
    if _checksum_of(as_it_stands) == checksum:
        return True
    return _checksum_of(json.dumps(content, separators=(",", ":"))) == checksum


def manifest_from(content: object, *, where: str, version: int = VERSION) -> Manifest:
    """Build a manifest from parsed JSON, trusting nothing.

    Args:
        content: What ``json.loads`` returned.
        where: The file's path, for messages.
        version: Which version of the format it has, from 2 on.

    Returns:
        The checked manifest.

    Raises:
        DamagedCacheError: A value is missing, of another type, or contradicts another.
    """
    try:
        fields = record(content)
        return Manifest(
            shards=_shards_from_json(fields["shards"], version),
            structure=record(fields["structure"]),
            fingerprint=record(fields["fingerprint"]),
            made_with={
                library: text(library_version)
                for library, library_version in record(fields["made_with"]).items()
            },
            compression=optional_text(fields["compression"]),
            sources=_sources_from_json(fields["sources"]),
        )
    except KeyError as error:
        raise _damaged_manifest(where, f"{error} is missing") from None
    except (TypeError, ValueError) as error:
        raise _damaged_manifest(where, str(error)) from None


def _shards_from_json(content: object, version: int) -> ShardTable:
    if version != _VERSION_OF_OBJECTS:
        return ShardTable.from_json(content)
    table = ShardTable.of(shard_from(shard) for shard in list_of_values(content))
    # What only the shards together can break; ``from_json`` does so by itself.
    table.check()
    return table


def _sources_from_json(content: object) -> SourceFiles | None:
    if content is None:
        return None
    fields = record(content)
    sources = SourceFiles(
        file=text(fields["file"]),
        bytes=integer(fields["bytes"]),
        xxh3=text(fields["xxh3"]),
    )
    # The name is opened below the cache's folder: "../../etc/passwd" is none of ours.
    is_named_after_content = sources.file == sources_name(sources.xxh3)
    if (
        not is_named_after_content
        or not is_cache_file_name(sources.file)
        or sources.bytes < 0
    ):
        msg = f"{sources.file!r} is not the name of a list of sources"
        raise ValueError(msg)
    return sources


def _checksum_of(content: str) -> str:
    # json.dumps writes ASCII.  What another program made of it may hold lone surrogates
    # as they are, which Python takes names of files for that are not UTF-8 (PEP 383).
    return xxhash.xxh3_128_hexdigest(content.encode("utf-8", "surrogatepass"))


def _damaged_manifest(where: str, why: str) -> DamagedCacheError:
    message = f"{where} is not the manifest of a loaderkit cache."
    return DamagedCacheError(message, why=why, fix=PACK_AGAIN)
