"""Write down what a mistyped setting of torch's allocators was meant to be.  Pure."""

from __future__ import annotations

import difflib
import math
import re
from typing import TYPE_CHECKING

from loaderkit.budget.environment.allocator_conf import (
    COMMON_OPTIONS,
    CUDA_OPTIONS,
    MOST_REGISTER_THREADS,
    OptionKind,
    read_allocator_settings,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_EXAMPLES = {
    OptionKind.FLAG: "True",
    OptionKind.MEGABYTES: "64",
    OptionKind.SEGMENT: "20",
    OptionKind.SPLIT: "128",
    OptionKind.RATIO: "0.8",
    OptionKind.DIVISIONS: "4",
    OptionKind.THREADS: "8",
    OptionKind.POSITIVE: "64",
    OptionKind.BACKEND: "native",
}
"""A value that torch takes, where nothing of what was written can be kept."""
_LEAST = {OptionKind.SPLIT: 20, OptionKind.SEGMENT: 20, OptionKind.POSITIVE: 1}
"""The least number that torch takes, where it is not 0: 20 MiB are its segment."""
_LIKE = 0.7
"""Likeness of names from which one is taken for the other misspelt; chosen: options are
long, and only torch's own stand to choose from."""


def nearest_option(name: str) -> str | None:
    """Give the option that a misspelt name was probably meant to be.

    >>> nearest_option("max_split_size"), nearest_option("colour")
    ('max_split_size_mb', None)
    """
    names = [*COMMON_OPTIONS, *CUDA_OPTIONS]
    near = difflib.get_close_matches(name.lower().strip("'\""), names, 1, _LIKE)
    return near[0] if near else None


def mended_settings(settings: str, backend: str = "cuda") -> str | None:
    """Write down what was probably meant, so that torch accepts all of it.

    Args:
        settings: Any text.
        backend: As in :func:`read_allocator_settings`.

    Returns:
        A setting that torch accepts whole; None where nothing of it can be read.

    >>> mended_settings("expandable_segments=true;max_split_size:128")
    'expandable_segments:True,max_split_size_mb:128'
    """
    known = dict(COMMON_OPTIONS)
    if backend in {"cuda", "hip"}:
        known |= CUDA_OPTIONS
    options: dict[str, str] = {}
    for name, value in _split_leniently(settings):
        near = name if name in known else nearest_option(name)
        # ``nearest_option`` looks among CUDA's too, which another build does not read.
        if near is not None and near in known:
            options[near] = _mended_value(known[near], value)
    candidate = ",".join(f"{name}:{value}" for name, value in options.items())
    # What is told to be pasted was read by the same rules that refused the original.
    if candidate and read_allocator_settings(candidate, backend).rejected is None:
        return candidate
    # One option cannot go with another, such as a split below the size of a segment.
    options.pop("large_segment_size_mb", None)
    candidate = ",".join(f"{name}:{value}" for name, value in options.items())
    if candidate and read_allocator_settings(candidate, backend).rejected is None:
        return candidate
    return None


def _split_leniently(settings: str) -> Iterator[tuple[str, str]]:
    """Split by any of the separators that people write."""
    # Quotes of a shell's line that was copied into a file: to torch they are letters.
    plain = re.sub(r"[\s'\"]", "", settings)
    for option in re.split(r"[,;&|](?![^\[]*\])", plain):
        match = re.match(r"([A-Za-z_]\w*)[:=]+(.+)", option)
        if match is not None:
            yield match[1], match[2]


def _mended_value(kind: OptionKind, value: str) -> str:
    if kind is OptionKind.FLAG:
        text = value.strip("'\"").lower()
        return str(
            text not in {"false", "0", "no", "off", "none", "disable", "disabled"}
        )
    if kind is OptionKind.BACKEND:
        near = difflib.get_close_matches(value, ("native", "cudaMallocAsync"), 1)
        return near[0] if near else "native"
    if kind is OptionKind.RATIO:
        return _mended_ratio(value)
    # Cut off at nine digits: of twenty torch says that they are too large.
    number = re.match(r"\d{1,9}", value)
    if kind is OptionKind.DIVISIONS and value.startswith("["):
        attempt = f"roundup_power2_divisions:{value}"
        accepted = read_allocator_settings(attempt).rejected is None
        return value if accepted else _EXAMPLES[kind]
    if number is None:
        return _EXAMPLES[kind]
    mended = max(int(number[0]), _LEAST.get(kind, 0))
    # torch takes powers of two alone for these.
    if kind in {OptionKind.DIVISIONS, OptionKind.THREADS}:
        nearest_exponent = round(math.log2(max(1, mended)))
        mended = 2**nearest_exponent
    if kind is OptionKind.THREADS:
        mended = min(mended, MOST_REGISTER_THREADS)
    return str(mended)


def _mended_ratio(value: str) -> str:
    percent = re.match(r"(\d{1,3}(?:\.\d+)?)%?", value)
    if percent is None:
        return _EXAMPLES[OptionKind.RATIO]
    number = float(percent[1])
    # 80 and "80%" are 0.8; 1 is a share already, and one that torch refuses.
    if 1 < number < 100:
        number /= 100
    return f"{number:g}" if 0 < number < 1 else _EXAMPLES[OptionKind.RATIO]
