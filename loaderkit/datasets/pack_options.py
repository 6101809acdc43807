"""How a cache is packed: the one list of options, their defaults and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from loaderkit.arguments import check_choice, check_integer, check_truth
from loaderkit.cache.hdf5 import filters
from loaderkit.datasets.source_files import TrackFiles

_MOST_WORKERS = 4096
"""More packing workers are a mistake: the first thousand of a million took minutes to
start, and the machine with them."""


@dataclass(frozen=True)
class PackOptions:
    """How a cache is packed."""

    workers: int | None = None
    """Processes that read samples; 0 reads in this one; None: up to 4, one a CPU."""
    compression: str | None = None
    """"gzip", "lzf", a filter of hdf5plugin such as "Zstd", or None to map values."""
    shard_bytes: int = 256 << 20
    """Bytes after which a file is finished: what a killed run loses at most."""
    overwrite: bool = False
    """Pack again though there is a cache."""
    track_files: TrackFiles = "stat"
    """How the files that samples are made from are known again when the cache is
    opened: "stat" by size and time of change, "hash" by their content too (for data
    that is copied without its times), "none" not at all."""

    def __post_init__(self) -> None:
        filters(self.compression)
        check_choice("track_files", self.track_files, get_args(TrackFiles))
        check_truth("overwrite", self.overwrite)
        check_integer("shard_bytes", self.shard_bytes, least=1)
        if self.workers is not None:
            check_integer("workers", self.workers, least=0, most=_MOST_WORKERS)
