"""Write down what a mistyped setting of torch's allocators was meant to be.  Pure."""

from __future__ import annotations

import difflib
import math
import re
from typing import TYPE_CHECKING

from loaderkit.budget.environment.allocator_conf import (
    least_split_mb,
    read_allocator_settings,
)
from loaderkit.budget.environment.allocator_options import (
    MOST_REGISTER_THREADS,
    NATIVE_OPTIONS,
    NEWEST_KNOWN,
    OptionKind,
    TorchVersion,
    is_async_backend,
    option_named,
    options_read_by,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_EXAMPLES = {
    OptionKind.FLAG: "True",
    OptionKind.MEGABYTES: "64",
    OptionKind.SEGMENT: "20",
    OptionKind.SPLIT: "128",
    OptionKind.RATIO: "0.8",
    OptionKind.SHARE: "0.8",
    OptionKind.DIVISIONS: "4",
    OptionKind.THREADS: "8",
    OptionKind.POSITIVE: "64",
    OptionKind.BACKEND: "native",
}
"""A value that torch takes, where nothing of what was written can be kept."""
_LEAST_MEANT = {OptionKind.SEGMENT: 20, OptionKind.POSITIVE: 1}
"""The least number that is meant, where it is not 0: 20 MiB are torch's segment."""
_MEAN_FALSE = {"false", "0", "no", "off", "none", "disable", "disabled"}
"""Values of a flag that are meant as False; who names an option mostly wants it."""
_LEAST_LIKENESS = 0.7
"""Likeness of names from which one is taken for the other misspelt; chosen: options are
long, and only torch's own stand to choose from."""


def nearest_option(name: str, known: Iterable[str]) -> str | None:
    """Give the option that a misspelt name was probably meant to be.

    >>> known = options_read_by("cuda", NEWEST_KNOWN)
    >>> nearest_option("max_split_size", known), nearest_option("colour", known)
    ('max_split_size_mb', None)
    """
    plain = name.lower().strip("'\"")
    near = difflib.get_close_matches(plain, list(known), 1, _LEAST_LIKENESS)
    return near[0] if near else None


def mended_settings(
    settings: str, backend: str = "cuda", torch_version: TorchVersion = NEWEST_KNOWN
) -> str | None:
    """Write down what was probably meant, so that torch accepts all of it.

    Args:
        settings: Any text.
        backend: As in :func:`read_allocator_settings`.
        torch_version: As there; no option is kept that this torch does not read.

    Returns:
        A setting that torch accepts whole; None where nothing of it can be read.

    >>> mended_settings("expandable_segments=true;max_split_size:128")
    'expandable_segments:True,max_split_size_mb:128'
    """
    options = _options_meant(settings, backend, torch_version)
    candidate = _joined_if_read(options, backend, torch_version)
    if candidate is None:
        # A split may be smaller than the size of a segment that is set beside it.
        options.pop("large_segment_size_mb", None)
        candidate = _joined_if_read(options, backend, torch_version)
    return candidate


def _options_meant(
    settings: str, backend: str, torch_version: TorchVersion
) -> dict[str, str]:
    """Read the options of a text, each with a value that torch takes."""
    known = options_read_by(backend, torch_version)
    options: dict[str, str] = {}
    for name, value in _split_leniently(settings):
        # An option of another torch or build is no misspelt one of this.
        near = name if option_named(name) else nearest_option(name, known)
        if near is None or near not in known:
            continue
        if not _is_read_whole(near, value, backend, torch_version):
            value = _mended_value(known[near], value)
        options[near] = value
    least_mb = least_split_mb(backend, torch_version)
    for name, value in options.items():
        if known[name] is OptionKind.SPLIT and value.isdecimal():
            options[name] = str(max(int(value), least_mb))
    if is_async_backend(options.get("backend", "")):
        for name in NATIVE_OPTIONS:
            options.pop(name, None)
    return options


def _is_read_whole(
    name: str, value: str, backend: str, torch_version: TorchVersion
) -> bool:
    """Tell whether torch takes a value as it is written."""
    reading = read_allocator_settings(f"{name}:{value}", backend, torch_version)
    if reading.rejected is not None:
        return False
    # A value with a comma or a colon in it may be read as several options.
    return [option.taken_for for option in reading.options] == [None]


def _joined_if_read(
    options: dict[str, str], backend: str, torch_version: TorchVersion
) -> str | None:
    """Join them, if torch accepts what comes of it."""
    settings = ",".join(f"{name}:{value}" for name, value in options.items())
    # What is told to be pasted was read by the same rules that refused the original.
    reading = read_allocator_settings(settings, backend, torch_version)
    return settings if settings and reading.rejected is None else None


def _split_leniently(settings: str) -> Iterator[tuple[str, str]]:
    """Split by any of the separators that people write."""
    # Quotes of a shell's line that was copied into a file: to torch they are letters.
    plain = re.sub(r"[\s'\"]", "", settings)
    for option in re.split(r"[,;&|](?![^\[]*\])", plain):
        match = re.match(r"([A-Za-z_]\w*)[:=]+(.+)", option)
        if match is not None:
            yield match[1], match[2]


def _mended_value(kind: OptionKind, value: str) -> str:
    """Write a value that torch takes, as near to what was written as can be."""
    if kind is OptionKind.FLAG:
        return str(value.lower() not in _MEAN_FALSE)
    if kind is OptionKind.BACKEND:
        near = difflib.get_close_matches(value, ("native", "cudaMallocAsync"), 1)
        return near[0] if near else "native"
    if kind in {OptionKind.RATIO, OptionKind.SHARE}:
        return _mended_ratio(value)
    # No more than nine digits: with ten a number may be too large for torch's int.
    number = re.match(r"\d{1,9}", value, re.ASCII)
    if number is None:
        return _EXAMPLES[kind]
    mended = max(int(number[0]), _LEAST_MEANT.get(kind, 0))
    # torch takes powers of two alone for these.
    if kind in {OptionKind.DIVISIONS, OptionKind.THREADS}:
        nearest_exponent = round(math.log2(max(1, mended)))
        mended = 2**nearest_exponent
    if kind is OptionKind.THREADS:
        mended = min(mended, MOST_REGISTER_THREADS)
    return str(mended)


def _mended_ratio(value: str) -> str:
    percent = re.match(r"(\d{1,3}(?:\.\d+)?)%?", value, re.ASCII)
    if percent is None:
        return _EXAMPLES[OptionKind.RATIO]
    number = float(percent[1])
    # 80 and "80%" are 0.8; 1 is a share already, and one that torch refuses.
    if 1 < number < 100:
        number /= 100
    return f"{number:g}" if 0 < number < 1 else _EXAMPLES[OptionKind.RATIO]
