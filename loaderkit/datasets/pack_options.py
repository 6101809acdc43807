"""How a cache is packed: the one list of options, their defaults and their checks."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from loaderkit.answers import answer_wrong_names
from loaderkit.arguments import check_choice, check_integer, check_truth
from loaderkit.cache.hdf5 import filters
from loaderkit.datasets.source_files import TrackFiles
from loaderkit.errors import OptionError
from loaderkit.units import size_in_bytes
from loaderkit.value_words import show_value

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

_MOST_WORKERS = 4096
"""More packing workers are a mistake: the first thousand of a million took minutes to
start, and the machine with them."""


def _can_be_called_alone(value: object) -> bool:
    """Tell whether something can be called without arguments, as far as is known."""
    if not callable(value):
        return False
    try:
        inspect.signature(value).bind()
    except TypeError:
        return False
    except ValueError:  # of C, without a signature
        return True
    return True


@answer_wrong_names()
@dataclass(frozen=True)
class PackOptions:
    """How a cache is packed."""

    workers: int | None = None
    """Processes that read samples; 0 reads in this one; None: up to 4, one a CPU."""
    compression: str | None = None
    """"gzip", "lzf", a filter of hdf5plugin such as "Zstd", or None to map values."""
    shard_bytes: int | str = 256 << 20
    """Bytes after which a file is finished, or a text such as "1 GB": what a killed run
    loses at most.  They wait on disk, not in memory."""
    overwrite: bool = False
    """Pack again though there is a cache."""
    track_files: TrackFiles = "stat"
    """How the files that samples are made from are known again when the cache is
    opened: "stat" by size and time of change, "hash" by their content too (for data
    that is copied without its times), "none" not at all."""
    executor: Executor | Callable[[], Executor] | None = None
    """Who packs the shards, in place of workers on this machine; or what makes it, so
    that a pool that broke is replaced."""

    def __post_init__(self) -> None:
        filters(self.compression)
        check_choice("track_files", self.track_files, get_args(TrackFiles))
        check_truth("overwrite", self.overwrite)
        check_integer("shard_bytes", self.most_shard_bytes, least=1)
        if self.workers is not None:
            check_integer("workers", self.workers, least=0, most=_MOST_WORKERS)
        self._check_executor()

    @property
    def most_shard_bytes(self) -> int:
        """Bytes after which a file is finished, also of a text."""
        return size_in_bytes("shard_bytes", self.shard_bytes)

    def _check_executor(self) -> None:
        executor: Any = self.executor
        if executor is None:
            return
        if not hasattr(executor, "submit") and not _can_be_called_alone(executor):
            message = "executor must be an executor, or a function that makes one, got "
            message += f"{show_value(executor)}."
            why = f"its type, {type(executor).__name__}, has no submit()"
            if callable(executor):  # joblib.Parallel, say
                why += ", and it cannot be called without arguments"
            fix = "executor=concurrent.futures.ProcessPoolExecutor(8)"
            if isinstance(executor, int):
                fix = f"workers={int(executor)}"
            raise OptionError(message, why=why, fix=fix)
        if self.workers is not None:
            message = f"workers={self.workers} and an executor were given."
            why = "workers are processes of this machine; an executor has its own"
            fix = "leave workers out, and say it where the executor is made"
            raise OptionError(message, why=why, fix=fix)

    def __getstate__(self) -> dict[str, Any]:
        """Travel without the executor, which is this process's: its workers pack."""
        return {**self.__dict__, "executor": None}
