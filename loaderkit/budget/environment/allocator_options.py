"""Options of torch's allocators: what values are, and since which torch.  Pure.

From the headers and libraries in the wheels for CUDA of torch 2.5.1 to 2.13.0, one of
each minor version.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

TorchVersion = tuple[int, int]
"""Major and minor."""
OLDEST_KNOWN: TorchVersion = (2, 5)
NEWEST_KNOWN: TorchVersion = (2, 13)
"""The first and the last torch whose readers were compared with ours."""
CUDA_BACKENDS = frozenset({"cuda", "hip"})
"""Builds that have a reader of their own, with more options."""
ASYNC_BACKENDS = {
    "cuda": frozenset({"cudaMallocAsync"}),
    "hip": frozenset({"cudaMallocAsync", "hipMallocAsync"}),
}
"""Names of the other allocator that a build has beside torch's own."""
NATIVE_OPTIONS = (
    "max_split_size_mb",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
    "expandable_segments",
    "max_non_split_rounding_mb",
    "large_segment_size_mb",
)
"""What only torch's own allocator of device memory does."""
MOST_REGISTER_THREADS = 128
"""What torch takes for ``pinned_num_register_threads``, at most."""


class OptionKind(Enum):
    """What a value has to be."""

    FLAG = "True or False, written so"
    MEGABYTES = "a number of MiB"
    SEGMENT = "a number of MiB above 10"
    SPLIT = "a number of MiB, from the size of a large segment (20) on"
    RATIO = "a number between 0 and 1"
    SHARE = "a number from 0 to 1"
    DIVISIONS = "a power of two, or a list such as [256:1,512:2,>:4]"
    THREADS = f"a power of two up to {MOST_REGISTER_THREADS}"
    POSITIVE = "a number of MiB above 0"
    BACKEND = "native or cudaMallocAsync"


@dataclass(frozen=True)
class AllocatorOption:
    """One option that torch has."""

    name: str
    """As it is written in a setting."""
    kind: OptionKind
    """What its value has to be."""
    builds: Literal["every", "CUDA"]
    """"CUDA": only builds for CUDA and ROCm read it."""
    since: TorchVersion
    """The first torch that reads it, or the oldest known here."""

    def is_read_by(self, backend: str, torch_version: TorchVersion) -> bool:
        """Tell whether a build of torch reads it."""
        if self.builds == "CUDA" and backend not in CUDA_BACKENDS:
            return False
        return torch_version >= self.since


_FLAG, _MEGABYTES = OptionKind.FLAG, OptionKind.MEGABYTES
ALLOCATOR_OPTIONS = (
    AllocatorOption("max_split_size_mb", OptionKind.SPLIT, "every", (2, 5)),
    AllocatorOption("garbage_collection_threshold", OptionKind.RATIO, "every", (2, 5)),
    AllocatorOption("roundup_power2_divisions", OptionKind.DIVISIONS, "every", (2, 5)),
    AllocatorOption("expandable_segments", _FLAG, "every", (2, 5)),
    AllocatorOption("max_non_split_rounding_mb", OptionKind.SPLIT, "every", (2, 6)),
    AllocatorOption("pinned_use_background_threads", _FLAG, "every", (2, 6)),
    AllocatorOption("large_segment_size_mb", OptionKind.SEGMENT, "every", (2, 11)),
    AllocatorOption("pinned_max_round_threshold_mb", _MEGABYTES, "every", (2, 13)),
    AllocatorOption("pinned_max_cached_size_mb", _MEGABYTES, "every", (2, 13)),
    AllocatorOption("backend", OptionKind.BACKEND, "CUDA", (2, 5)),
    AllocatorOption("release_lock_on_cudamalloc", _FLAG, "CUDA", (2, 5)),
    AllocatorOption("release_lock_on_hipmalloc", _FLAG, "CUDA", (2, 5)),
    AllocatorOption("pinned_use_cuda_host_register", _FLAG, "CUDA", (2, 5)),
    AllocatorOption("pinned_use_hip_host_register", _FLAG, "CUDA", (2, 5)),
    AllocatorOption("pinned_num_register_threads", OptionKind.THREADS, "CUDA", (2, 5)),
    AllocatorOption("graph_capture_record_stream_reuse", _FLAG, "CUDA", (2, 9)),
    AllocatorOption(
        "pinned_reserve_segment_size_mb", OptionKind.POSITIVE, "CUDA", (2, 10)
    ),
    AllocatorOption("per_process_memory_fraction", OptionKind.SHARE, "CUDA", (2, 10)),
    AllocatorOption("pinned_free_catch_all", _FLAG, "CUDA", (2, 12)),
    AllocatorOption("throw_on_cudamalloc_oom", _FLAG, "CUDA", (2, 12)),
)
"""All of them; to add one, add its row."""
_BY_NAME = {option.name: option for option in ALLOCATOR_OPTIONS}


def option_named(name: str) -> AllocatorOption | None:
    """Give the option of a name, of whatever torch and build.

    >>> option_named("large_segment_size_mb").since
    (2, 11)
    """
    return _BY_NAME.get(name)


def nearest_known(torch_version: TorchVersion) -> TorchVersion:
    """Give the version whose reader is known here, nearest to a version.

    >>> nearest_known((2, 11)), nearest_known((3, 0))
    ((2, 11), (2, 13))
    """
    return min(max(torch_version, OLDEST_KNOWN), NEWEST_KNOWN)


def options_read_by(backend: str, torch_version: TorchVersion) -> dict[str, OptionKind]:
    """Give the options that a build of torch reads, by name.

    >>> "throw_on_cudamalloc_oom" in options_read_by("cuda", (2, 11))
    False
    """
    return {
        option.name: option.kind
        for option in ALLOCATOR_OPTIONS
        if option.is_read_by(backend, nearest_known(torch_version))
    }


def is_async_backend(value: str) -> bool:
    """Tell whether a value of ``backend`` names the driver's allocator."""
    return any(value in names for names in ASYNC_BACKENDS.values())
