"""What torch makes of an allocator's setting: accepts, rejects or ignores it.  Pure.

Torch has had two readers.  That of today (``c10/core/AllocatorConfig.h``, and for CUDA
``c10/cuda/CUDAAllocatorConfig.cpp``, since torch 2.10) is more lenient than it looks:
any token may stand where a colon or a comma is meant, and white space is dropped
anywhere.  That of CUDA up to torch 2.9 looks at colons and commas, and drops blanks
alone.  For both, a number ends where its digits do.  The tests compare each with the
libraries of torch over generated settings.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn

from loaderkit.budget.environment.allocator_options import (
    ASYNC_BACKENDS,
    CUDA_BACKENDS,
    MOST_REGISTER_THREADS,
    NATIVE_OPTIONS,
    NEWEST_KNOWN,
    OptionKind,
    TorchVersion,
    is_async_backend,
    nearest_known,
    options_read_by,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_LARGEST = 2**64 - 1
"""Of ``size_t``."""
_LARGEST_INT = 2**31 - 1
_LARGEST_MB = _LARGEST >> 20
_DEFAULT_SEGMENT_MB = 20
"""Of torch's large segments, where no option says another size."""
_FIRST_WITH_COMMON_READER: TorchVersion = (2, 9)
"""The first torch whose builds without CUDA read settings at all."""
_FIRST_WITH_TOKENIZER: TorchVersion = (2, 10)
"""The first torch whose builds for CUDA read by the rules of all others."""


class _Grammar(NamedTuple):
    """In what the two readers of torch differ."""

    name_of_error: str
    """What torch says of tokens in another order."""
    blanks: str
    """What is dropped, as a class of a regular expression."""
    checks_separators: bool
    """Whether it raises where a colon or a comma is meant and another token stands."""
    numbers_are_ints: bool
    """Whether numbers are read with ``std::stoi``, and not ``std::stoull``."""
    may_split_at_segment_size: bool
    """Whether a split may be as small as a large segment, or must be larger."""


_TOKENIZER = _Grammar(
    'an INTERNAL ASSERT "please report a bug"',
    r"[ \t\n\v\f\r]",
    checks_separators=False,
    numbers_are_ints=False,
    may_split_at_segment_size=True,
)
_UNTIL_2_9 = _Grammar(
    "Error parsing CachingAllocator settings",
    " ",
    checks_separators=True,
    numbers_are_ints=True,
    may_split_at_segment_size=False,
)

RejectionCause = Literal["name", "flag", "value", "structure", "load"]
"""What torch cannot read: the name of an option, a flag, another value, or the order of
the tokens; "load": the order, so that torch cannot even be imported."""


class RejectedSettingError(ValueError):
    """The reader of torch raises; the text says what it misses."""

    def __init__(
        self, why: str, *, cause: RejectionCause, option: str | None = None
    ) -> None:
        super().__init__(why)
        self.cause = cause
        self.option = option
        """The name that this torch does not know, where that is the cause."""


@dataclass(frozen=True)
class Option:
    """One option as torch reads it."""

    name: str
    """As it was written, without white space."""
    value: str
    """As it was written, without white space."""
    is_known: bool
    """False: torch skips it, whatever its value."""
    taken_for: str | None = None
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
    is_certain: bool = True
    """False: this torch is newer, or older, than those whose readers are known here."""
    is_read_at_page_locking: bool = False
    """Torch raises at the first page-locked tensor, and not before: the allocator of
    ``backend:cudaMallocAsync`` asks for no option itself (an H200, torch 2.11)."""


@dataclass
class _AllocatorConfigParser:
    """Goes over the tokens of a setting as torch does.

    It changes while it reads: the options before the first rejected one stay in
    ``options``, and the size of a segment read earlier bounds the sizes read later.
    Each method takes the position of a token and gives that of the last one it read.
    """

    tokens: list[str]
    known_options: dict[str, OptionKind]
    backend: str
    grammar: _Grammar
    is_async_at_load: bool = False
    """Whether ``backend:cudaMallocAsync`` was found when torch was loaded; the backend
    that is read at the first use must be the same."""
    skipped_options: frozenset[str] = frozenset()
    """Those whose values it leaves to another reader."""
    segment_mb: int = _DEFAULT_SEGMENT_MB
    options: list[Option] = field(default_factory=list)

    def token_at(self, position: int) -> str:
        if position >= len(self.tokens):
            _reject_setting(f"{self.grammar.name_of_error}: a value is missing")
        return self.tokens[position]

    def expect(self, position: int, separator: str) -> None:
        """Raise where the reader looks at a separator and finds another token."""
        if not self.grammar.checks_separators:
            return
        if position >= len(self.tokens) or self.tokens[position] != separator:
            _reject_setting(f"{self.grammar.name_of_error}, expected {separator!r}")

    def read_segment_size(self) -> None:
        """Look at every token for the size of a segment, the least of other options."""
        if "large_segment_size_mb" not in self.known_options:
            return
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
            elif self.backend in CUDA_BACKENDS and name not in self.skipped_options:
                why = f"it has no option {name!r}"
                raise RejectedSettingError(why, cause="name", option=name)
            else:
                position = self.skip_option(name, position)
            position += 1
            if position < len(self.tokens):
                self.expect(position, ",")
            position += 1

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
        self.expect(position + 1, ":")
        value_position = position + 2
        value = self.token_at(value_position)
        if kind is OptionKind.DIVISIONS and value == "[":
            return self.read_divisions(name, value_position)
        taken_for = self.check_value(name, kind, value)
        self.options.append(Option(name, value, is_known=True, taken_for=taken_for))
        return value_position

    def check_value(self, name: str, kind: OptionKind, value: str) -> str | None:
        """Raise if torch would; give what it takes the value for."""
        if kind is OptionKind.FLAG:
            if value not in {"True", "False"}:
                _reject_setting(f"{name} wants {kind.value}", "flag")
            return None
        if kind is OptionKind.BACKEND:
            self.check_backend(value)
            return None
        if kind in {OptionKind.RATIO, OptionKind.SHARE}:
            return self.check_share(name, kind, value)

        number = self.read_number(name, value)
        must_be_power = kind in {OptionKind.DIVISIONS, OptionKind.THREADS}
        if must_be_power and not _is_power_of_two(number):
            _reject_setting(f"{name} must be a power of two", "value")
        least, most = self.allowed_range(kind)
        if number < least:
            _reject_setting(f"{name} must be at least {least}", "value")
        if number > most:
            _reject_setting(f"{name} must be at most {most}", "value")
        if kind is OptionKind.SEGMENT:
            self.segment_mb = min(number, _LARGEST_MB)
        return _value_if_changed(str(number), value)

    def check_backend(self, value: str) -> None:
        """Check the name, and that it is the one found when torch was loaded."""
        asynchronous = ASYNC_BACKENDS[self.backend]
        if value != "native" and value not in asynchronous:
            names = " or ".join(["native", *sorted(asynchronous)])
            _reject_setting(f"backend wants {names}", "value")
        if (value in asynchronous) is not self.is_async_at_load:
            why = f"an INTERNAL ASSERT: backend:{value} is not what was found while "
            why += "torch was loaded, the first that is written whole"
            _reject_setting(why)

    def allowed_range(self, kind: OptionKind) -> tuple[int, int]:
        """Give the smallest and the largest number that torch takes."""
        if kind is OptionKind.SPLIT:
            may_be_equal = self.grammar.may_split_at_segment_size
            return self.segment_mb + (0 if may_be_equal else 1), _LARGEST
        if kind is OptionKind.SEGMENT:
            return 11, _LARGEST  # larger than a small segment, 10 MiB
        if kind is OptionKind.POSITIVE:
            return 1, _LARGEST
        if kind is OptionKind.THREADS:
            return 0, MOST_REGISTER_THREADS
        return 0, _LARGEST

    def check_share(self, name: str, kind: OptionKind, value: str) -> str | None:
        """Check a number between 0 and 1, which a ratio must not be."""
        number, text_read = _read_double(name, value)
        is_inside = 0 < number < 1
        if kind is OptionKind.SHARE:
            is_inside = 0 <= number <= 1
        if not is_inside:
            _reject_setting(f"{name} wants {kind.value}", "value")
        return None if text_read == value else text_read

    def read_divisions(self, name: str, position: int) -> int:
        """Read ``[256:1,512:2,>:4]``."""
        begin = position
        position += 1
        while position < len(self.tokens) and self.tokens[position] != "]":
            boundary = self.tokens[position]
            self.expect(position + 1, ":")
            divisions = self.read_number(name, self.token_at(position + 2))
            if divisions != 0 and not _is_power_of_two(divisions):
                why = f"the divisions of {name} must be powers of two, or 0"
                _reject_setting(why, "value")
            if boundary != ">" and not _is_power_of_two(_read_unsigned(name, boundary)):
                why = f"the intervals of {name} must be powers of two"
                _reject_setting(why, "value")
            position += 2
            # Behind a value stands the end of the list, or a comma.
            if self.token_at(position + 1) != "]":
                position += 1
                self.expect(position, ",")
            position += 1
        # The older reader takes the end of the text for that of the list.
        if not self.grammar.checks_separators:
            self.token_at(position)
        value = "".join(self.tokens[begin : position + 1])
        self.options.append(Option(name, value, is_known=True))
        return position

    def read_number(self, name: str, value: str) -> int:
        """Read as ``std::stoi`` or ``std::stoull`` do, into a ``size_t``."""
        if self.grammar.numbers_are_ints:
            return _read_int(name, value)
        return _read_unsigned(name, value)


def read_allocator_settings(
    settings: str,
    backend: str = "cuda",
    torch_version: TorchVersion = NEWEST_KNOWN,
    *,
    common_only: bool = False,
) -> SettingsReading:
    """Say what torch makes of a setting.

    Args:
        settings: Such as ``PYTORCH_ALLOC_CONF`` holds.
        backend: "cuda" or "hip" read more options and reject unknown ones; every other
            build skips what it does not know.
        torch_version: Major and minor.  One that is not known here is taken to read as
            the nearest that is, and the reading says that it is not certain.
        common_only: Whether only the reader that every build has goes over it, and not
            CUDA's own, as where a variable for ROCm is set.

    Returns:
        The options, or why torch raises.

    >>> read_allocator_settings("expandable_segments:yes").rejected
    RejectedSettingError('expandable_segments wants True or False, written so')
    >>> read_allocator_settings("max_split_size_mb:64abc").options[0].taken_for
    '64'
    >>> read_allocator_settings("max_split_size_mb:20", "cuda", (2, 9)).rejected
    RejectedSettingError('max_split_size_mb must be at least 21')
    """
    is_certain = torch_version == nearest_known(torch_version)
    torch_version = nearest_known(torch_version)
    is_cuda = backend in CUDA_BACKENDS
    if not is_cuda and torch_version < _FIRST_WITH_COMMON_READER:
        return SettingsReading()  # such a build reads no setting
    grammar = _grammar_of(backend, torch_version)
    reads_backend = is_cuda and not common_only
    names = options_read_by(backend, torch_version)
    known = options_read_by("cpu", torch_version) if common_only else names
    tokens = split_tokens(settings, grammar.blanks)
    is_async_at_load = False
    try:
        if reads_backend and grammar.checks_separators:
            is_async_at_load = _words_name_async_at_load(settings, backend)
        elif reads_backend:
            is_async_at_load = _tokens_name_async_at_load(tokens, backend)
    except RejectedSettingError as error:
        return SettingsReading((), error, is_certain=is_certain)
    parser = _AllocatorConfigParser(
        tokens,
        known,
        backend,
        grammar,
        is_async_at_load,
        skipped_options=frozenset(names.keys() - known.keys()),
    )
    try:
        # In this order: a size that stands last bounds the splits before it.
        parser.read_segment_size()
        parser.read_options()
    except RejectedSettingError as error:
        return SettingsReading(
            tuple(parser.options),
            error,
            is_certain=is_certain,
            is_read_at_page_locking=is_async_at_load,
        )
    warnings = tuple(_warnings_of_options(parser.options))
    return SettingsReading(tuple(parser.options), None, warnings, is_certain)


def least_split_mb(backend: str, torch_version: TorchVersion) -> int:
    """Give the smallest split that a torch takes, of its usual segments.

    >>> least_split_mb("cuda", (2, 9)), least_split_mb("cuda", (2, 13))
    (21, 20)
    """
    grammar = _grammar_of(backend, torch_version)
    return _DEFAULT_SEGMENT_MB + (0 if grammar.may_split_at_segment_size else 1)


def _grammar_of(backend: str, torch_version: TorchVersion) -> _Grammar:
    is_older = backend in CUDA_BACKENDS and torch_version < _FIRST_WITH_TOKENIZER
    return _UNTIL_2_9 if is_older else _TOKENIZER


def split_tokens(settings: str, blanks: str = _TOKENIZER.blanks) -> list[str]:
    """Split a setting as torch does: white space counts nowhere.

    >>> split_tokens("a: 1, b:[2,3]")
    ['a', ':', '1', ',', 'b', ':', '[', '2', ',', '3', ']']
    """
    without_blanks = re.sub(blanks, "", settings)
    return re.findall(r"[,:\[\]]|[^,:\[\]]+", without_blanks)


def _words_name_async_at_load(settings: str, backend: str) -> bool:
    """Tell which allocator torch up to 2.9 takes while it is loaded.

    The reader is one of its own: it splits by white space and commas, and each part by
    colons.  The first backend that is written without white space inside counts.
    """
    for part in re.split(r"[\s,]+", settings, flags=re.ASCII):
        words = re.split(r":+", part)
        if len(words) < 2 or words[0] != "backend":
            continue
        if words[1] in ASYNC_BACKENDS[backend]:
            return True
        if words[1] == "native":
            return False
    return False


def _tokens_name_async_at_load(tokens: list[str], backend: str) -> bool:
    """Tell which allocator torch from 2.10 on takes while it is loaded.

    It goes over the tokens to the first ``backend``.  Nobody catches what is raised on
    the way, so that the process aborts.

    Raises:
        RejectedSettingError: ``import torch`` ends the process.
    """
    position = 0
    while position < len(tokens):
        value_position = position + 2
        if value_position >= len(tokens):
            why = "`import torch` ends the process (SIGABRT): behind the last option a "
            raise RejectedSettingError(why + "value is missing", cause="load")
        if tokens[position] == "backend":
            return tokens[value_position] in ASYNC_BACKENDS[backend]
        if tokens[value_position] == "[":
            if "]" not in tokens[value_position:]:
                why = "`import torch` ends the process (SIGABRT): a list has no end"
                raise RejectedSettingError(why, cause="load")
            value_position = tokens.index("]", value_position)
        position = value_position + 2
    return False


def _reject_setting(why: str, cause: RejectionCause = "structure") -> NoReturn:
    raise RejectedSettingError(why, cause=cause)


def _read_unsigned(name: str, value: str) -> int:
    """Read as ``std::stoull`` does: a sign, digits, and nothing of what follows."""
    number = _read_integer(name, value)
    if abs(number) > _LARGEST:
        _reject_setting(f"{name}: {value} is too large", "value")
    return number % (_LARGEST + 1)


def _read_int(name: str, value: str) -> int:
    """Read as ``std::stoi`` does; a negative number becomes a very large size."""
    number = _read_integer(name, value)
    if not -_LARGEST_INT - 1 <= number <= _LARGEST_INT:
        _reject_setting(f"{name}: {value} is too large", "value")
    return number % (_LARGEST + 1)


def _read_integer(name: str, value: str) -> int:
    # C++ knows ASCII digits only; int() and \d would take those of any script.
    match = re.match(r"[ \t\n\v\f\r]*([+-]?\d+)", value, re.ASCII)
    if match is None:
        _reject_setting(f"{name} wants a number, got {value!r}", "value")
    return int(match[1])


def _read_double(name: str, value: str) -> tuple[float, str]:
    """Read as ``std::stod`` does; give the number and what was read of the text."""
    match = re.match(
        r"[ \t\n\v\f\r]*"
        r"[+-]?(?:0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)(?:[pP][+-]?\d+)?"
        r"|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
        r"|[iI][nN][fF](?:[iI][nN][iI][tT][yY])?|[nN][aA][nN](?:\(\w*\))?)",
        value,
        re.ASCII,
    )
    if match is None:
        _reject_setting(f"{name} wants a number, got {value!r}", "value")
    text = match[0].lstrip(" \t\n\v\f\r")
    if "x" in text.lower():
        number = float.fromhex(text)
    else:
        number = float(re.sub(r"\(\w*\)", "", text))
    digits = re.sub(r"[eEpP].*", "", text)
    # strtod reports a denormal number as out of range too (glibc), but no zero.
    is_tiny = abs(number) < sys.float_info.min and re.search(r"[1-9]", digits)
    if is_tiny or (math.isinf(number) and "n" not in text.lower()):
        _reject_setting(f"{name}: {value} is out of range", "value")
    return number, text


def _value_if_changed(number: str, value: str) -> str | None:
    """Give the number that torch reads; None where the value says the same."""
    # A sign and leading zeros change nothing; of "0" itself nothing would be left.
    is_same = number in {value, value.lstrip("+0")}
    return None if is_same else number


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _warnings_of_options(options: list[Option]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for option in options:
        if option.name in seen and seen[option.name] != option.value:
            yield f"{option.name} is set twice: {option.value} counts"
        seen[option.name] = option.value
    ignored = [name for name in seen if name in NATIVE_OPTIONS]
    if is_async_backend(seen.get("backend", "")) and ignored:
        yield f"backend:{seen['backend']} ignores {', '.join(ignored)}"
