"""What torch makes of an allocator's setting: accepts, rejects or ignores it.  Pure.

Follows the reader of torch 2.13 (``c10/core/AllocatorConfig.h``, and for CUDA
``c10/cuda/CUDAAllocatorConfig.cpp``) token by token, since it is more lenient than it
looks: any token may stand where a colon or a comma is meant, white space is dropped
anywhere, and a number ends where its digits do.  The tests compare it with a torch
process over generated settings.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

_LARGEST = 2**64 - 1
"""Of ``size_t``."""
_LARGEST_MB = _LARGEST >> 20
_DEFAULT_SEGMENT_MB = 20
"""Of torch's large segments, where no option says another size."""
MOST_REGISTER_THREADS = 128
"""What torch takes for ``pinned_num_register_threads``, at most."""


class OptionKind(Enum):
    """What a value has to be."""

    FLAG = "True or False, written so"
    MEGABYTES = "a number of MiB"
    SEGMENT = "a number of MiB above 10"
    SPLIT = "a number of MiB, from the size of a large segment (20) on"
    RATIO = "a number between 0 and 1"
    DIVISIONS = "a power of two, or a list such as [256:1,512:2,>:4]"
    THREADS = f"a power of two up to {MOST_REGISTER_THREADS}"
    POSITIVE = "a number of MiB above 0"
    BACKEND = "native or cudaMallocAsync"


COMMON_OPTIONS = {
    "large_segment_size_mb": OptionKind.SEGMENT,
    "max_split_size_mb": OptionKind.SPLIT,
    "max_non_split_rounding_mb": OptionKind.SPLIT,
    "garbage_collection_threshold": OptionKind.RATIO,
    "roundup_power2_divisions": OptionKind.DIVISIONS,
    "expandable_segments": OptionKind.FLAG,
    "pinned_use_background_threads": OptionKind.FLAG,
    "pinned_max_round_threshold_mb": OptionKind.MEGABYTES,
    "pinned_max_cached_size_mb": OptionKind.MEGABYTES,
}
"""Options of every build."""
CUDA_OPTIONS = {
    "backend": OptionKind.BACKEND,
    "release_lock_on_cudamalloc": OptionKind.FLAG,
    "release_lock_on_hipmalloc": OptionKind.FLAG,
    "pinned_use_cuda_host_register": OptionKind.FLAG,
    "pinned_use_hip_host_register": OptionKind.FLAG,
    "pinned_num_register_threads": OptionKind.THREADS,
    "pinned_reserve_segment_size_mb": OptionKind.POSITIVE,
    "graph_capture_record_stream_reuse": OptionKind.FLAG,
}
"""Options that builds for CUDA and ROCm read; others skip them."""
_WORDS = {
    OptionKind.FLAG: {"True", "False"},
    OptionKind.BACKEND: {"native", "cudaMallocAsync", "hipMallocAsync"},
}

RejectionCause = Literal["name", "flag", "number", "structure"]
"""What torch cannot read: the name of an option, a flag, a number, or the order of the
tokens."""


class RejectedSettingError(ValueError):
    """The reader of torch raises; the text says what it misses."""

    def __init__(self, why: str, *, cause: RejectionCause) -> None:
        super().__init__(why)
        self.cause = cause


@dataclass(frozen=True)
class Option:
    """One option as torch reads it."""

    name: str
    """As it was written, without white space."""
    value: str
    """As it was written, without white space."""
    is_known: bool
    """False: torch skips it, whatever its value."""
    taken: str | None = None
    """What torch takes the value for, where that is not what was written."""


@dataclass(frozen=True)
class SettingsReading:
    """What torch makes of one setting."""

    options: tuple[Option, ...] = ()
    """Those before the first that it rejects."""
    rejected: RejectedSettingError | None = None
    """Why torch raises at the first use of the allocator; None: it does not."""
    warnings: tuple[str, ...] = ()
    """What it accepts and does not do."""


@dataclass
class _AllocatorConfigParser:
    """Goes over the tokens of a setting as torch's ``ConfigTokenizer`` is gone over.

    It changes while it reads: the options before the first rejected one stay in
    ``options``, and the size of a segment read earlier bounds the sizes read later.
    Each method takes the position of a token and gives that of the last one it read.
    """

    tokens: list[str]
    known_options: dict[str, OptionKind]
    strict: bool
    """Whether an unknown option is an error, as in builds for CUDA."""
    segment_mb: int = _DEFAULT_SEGMENT_MB
    options: list[Option] = field(default_factory=list)

    def token_at(self, position: int) -> str:
        if position >= len(self.tokens):
            why = 'an INTERNAL ASSERT "please report a bug": a value is missing'
            _reject_setting(why, "structure")
        return self.tokens[position]

    def read_segment_size(self) -> None:
        """Look at every token for the size of a segment, the least of other options."""
        position = 0
        while position < len(self.tokens):
            name = self.tokens[position]
            if name == "large_segment_size_mb":
                position = self.read_option(name, position)
            position += 1
        # They are read again, in their order, with all others.
        self.options.clear()

    def read_options(self) -> None:
        """Go over all options, as ``parseArgs`` does."""
        position = 0
        while position < len(self.tokens):
            name = self.tokens[position]
            if name in self.known_options:
                position = self.read_option(name, position)
            elif self.strict:
                why = f"Unrecognized key {name!r} in CUDA allocator config"
                _reject_setting(why, "name")
            else:
                position = self.skip_option(name, position)
            position += 2  # the value, and whatever stands where a comma is meant

    def skip_option(self, name: str, position: int) -> int:
        """Note an option that this build does not read."""
        # torch checks neither the colon nor, for these, the value.
        first_of_value = position + 2
        end = first_of_value
        if self.token_at(end) == "[":
            while end < len(self.tokens) and self.tokens[end] != "]":
                end += 1
            self.token_at(end)
        value = "".join(self.tokens[first_of_value : end + 1])
        self.options.append(Option(name, value, is_known=False))
        return end

    def read_option(self, name: str, position: int) -> int:
        """Read an option that this build knows."""
        kind = self.known_options[name]
        value_position = position + 2
        value = self.token_at(value_position)
        if kind is OptionKind.DIVISIONS and value == "[":
            return self.read_divisions(name, value_position)
        taken = self.check_value(name, kind, value)
        self.options.append(Option(name, value, is_known=True, taken=taken))
        return value_position

    def check_value(self, name: str, kind: OptionKind, value: str) -> str | None:
        """Raise if torch would; give what it takes the value for."""
        words = _WORDS.get(kind)
        if words is not None:
            if value not in words:
                cause: RejectionCause = "flag" if kind is OptionKind.FLAG else "number"
                _reject_setting(f"{name} wants {kind.value}", cause)
            return None
        if kind is OptionKind.RATIO:
            return self.check_ratio(name, value)

        number = _read_unsigned(name, value)
        if kind in {OptionKind.DIVISIONS, OptionKind.THREADS} and not _is_power_of_two(
            number
        ):
            _reject_setting(f"{name} must be a power of two", "number")
        least, most = self.allowed_range(kind)
        if number < least:
            _reject_setting(f"{name} must be at least {least}", "number")
        if number > most:
            _reject_setting(f"{name} must be at most {most}", "number")
        if kind is OptionKind.SEGMENT:
            self.segment_mb = min(number, _LARGEST_MB)
        return _value_if_changed(str(number), value)

    def allowed_range(self, kind: OptionKind) -> tuple[int, int]:
        """Give the smallest and the largest number that torch takes."""
        if kind is OptionKind.SPLIT:
            return self.segment_mb, _LARGEST
        if kind is OptionKind.SEGMENT:
            return 11, _LARGEST  # larger than a small segment, 10 MiB
        if kind is OptionKind.POSITIVE:
            return 1, _LARGEST
        if kind is OptionKind.THREADS:
            return 0, MOST_REGISTER_THREADS
        return 0, _LARGEST

    def check_ratio(self, name: str, value: str) -> str | None:
        """Check a number between 0 and 1, both excluded."""
        number, text_read = _read_double(name, value)
        if not 0 < number < 1:
            _reject_setting(f"{name} lies between 0 and 1", "number")
        return None if text_read == value else text_read

    def read_divisions(self, name: str, position: int) -> int:
        """Read ``[256:1,512:2,>:4]``."""
        begin = position
        position += 1
        while position < len(self.tokens) and self.tokens[position] != "]":
            boundary = self.tokens[position]
            divisions = _read_unsigned(name, self.token_at(position + 2))
            if divisions != 0 and not _is_power_of_two(divisions):
                why = f"the divisions of {name} must be powers of two, or 0"
                _reject_setting(why, "number")
            if boundary != ">" and not _is_power_of_two(_read_unsigned(name, boundary)):
                why = f"the intervals of {name} must be powers of two"
                _reject_setting(why, "number")
            position += 2
            # Behind a value stands the end of the list or, unchecked, a comma.
            if self.token_at(position + 1) != "]":
                position += 1
            position += 1
        self.token_at(position)
        value = "".join(self.tokens[begin : position + 1])
        self.options.append(Option(name, value, is_known=True))
        return position


def read_allocator_settings(settings: str, backend: str = "cuda") -> SettingsReading:
    """Say what torch makes of a setting.

    Args:
        settings: Such as ``PYTORCH_ALLOC_CONF`` holds.
        backend: "cuda" or "hip" read more options and reject unknown ones; every other
            build skips what it does not know.

    Returns:
        The options, or why torch raises.

    >>> read_allocator_settings("expandable_segments:yes").rejected
    RejectedSettingError('expandable_segments wants True or False, written so')
    >>> read_allocator_settings("max_split_size_mb:64abc").options[0].taken
    '64'
    """
    tokens = split_tokens(settings)
    parser = _AllocatorConfigParser(tokens, COMMON_OPTIONS, strict=False)
    try:
        parser.read_segment_size()
        parser.read_options()
        if backend in {"cuda", "hip"}:  # their own reader goes over it again
            known = COMMON_OPTIONS | CUDA_OPTIONS
            parser = _AllocatorConfigParser(
                tokens, known, strict=True, segment_mb=parser.segment_mb
            )
            parser.read_options()
    except RejectedSettingError as error:
        return SettingsReading(tuple(parser.options), error)
    return SettingsReading(
        tuple(parser.options), None, tuple(_warnings_of_options(parser.options))
    )


def split_tokens(settings: str) -> list[str]:
    """Split a setting as torch does: white space counts nowhere.

    >>> split_tokens("a: 1, b:[2,3]")
    ['a', ':', '1', ',', 'b', ':', '[', '2', ',', '3', ']']
    """
    without_blanks = re.sub(r"[ \t\n\v\f\r]", "", settings)
    return re.findall(r"[,:\[\]]|[^,:\[\]]+", without_blanks)


def _reject_setting(why: str, cause: RejectionCause) -> NoReturn:
    raise RejectedSettingError(why, cause=cause)


def _read_unsigned(name: str, value: str) -> int:
    """Read as ``std::stoull`` does: a sign, digits, and nothing of what follows."""
    # C++ knows ASCII digits only; int() and \d would take those of any script.
    match = re.match(r"([+-]?)(\d+)", value, re.ASCII)
    if match is None:
        _reject_setting(f"{name} wants a number, got {value!r}", "number")
    number = int(match[2])
    if number > _LARGEST:
        _reject_setting(f"{name}: {value} is too large", "number")
    return number if match[1] != "-" else (-number) % (_LARGEST + 1)


def _read_double(name: str, value: str) -> tuple[float, str]:
    """Read as ``std::stod`` does; give the number and what was read of the text."""
    match = re.match(
        r"[+-]?(?:0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)(?:[pP][+-]?\d+)?"
        r"|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
        r"|[iI][nN][fF](?:[iI][nN][iI][tT][yY])?|[nN][aA][nN](?:\(\w*\))?)",
        value,
        re.ASCII,
    )
    if match is None:
        _reject_setting(f"{name} wants a number, got {value!r}", "number")
    text = match[0]
    if "x" in text.lower():
        number = float.fromhex(text)
    else:
        number = float(re.sub(r"\(\w*\)", "", text))
    digits = re.sub(r"[eEpP].*", "", text)
    # strtod reports a denormal number as out of range too (glibc), but no zero.
    is_tiny = abs(number) < sys.float_info.min and re.search(r"[1-9]", digits)
    if is_tiny or (math.isinf(number) and "n" not in text.lower()):
        _reject_setting(f"{name}: {value} is out of range", "number")
    return number, text


def _value_if_changed(number: str, value: str) -> str | None:
    return None if number == value.lstrip("+0") or number == value else number


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _warnings_of_options(options: list[Option]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for option in options:
        if option.name in seen and seen[option.name] != option.value:
            yield f"{option.name} is set twice: {option.value} counts"
        seen[option.name] = option.value
    if seen.get("backend") == "cudaMallocAsync" and len(seen) > 1:
        yield "backend:cudaMallocAsync ignores the options of torch's own allocator"
