"""What to do about an error, written as the user who reads it would write it.  Pure.

The same fix is ``pack(source, 'a.lk', overwrite=True)`` in a program, and on a command
line ``loaderkit pack SOURCE a.lk --overwrite``.  So a fix that names a call of ours, or
an option of one, holds it as a value; a ``Dialect`` writes it.  Errors are written in
Python, and again by whoever knows that the user called something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Union


@dataclass(frozen=True)
class Setting:
    """An option of a call, with the value that it should have."""

    name: str
    """As Python has it."""
    value: Any = None
    """The value; plain, since errors are sent to other processes."""
    code: str = ""
    """How Python writes a value that is left to the user, such as ``{...}``."""
    within: str = "{}"
    """The call that takes it, as code, with ``{}`` for where it stands."""

    def written_in(self, dialect: Dialect) -> str:
        """Write it as the user of a dialect would."""
        return dialect.setting(self)

    def __str__(self) -> str:
        written = f"{self.name}={self.code or repr(self.value)}"
        # Not str.format: a value may have braces, as a dict has.
        return self.within.replace("{}", written)


@dataclass(frozen=True)
class Pack:
    """A call of ``pack``."""

    source: str = ""
    """What is packed, as code; empty for what was packed before."""
    path: str = ""
    """The cache; empty for the one that the error is about."""
    options: tuple[Setting, ...] = ()

    def written_in(self, dialect: Dialect) -> str:
        """Write it as the user of a dialect would."""
        return dialect.pack(self)

    def __str__(self) -> str:
        path = repr(self.path) if self.path else "path"
        arguments = [self.source or "source", path, *map(str, self.options)]
        return f"pack({', '.join(arguments)})"


@dataclass(frozen=True)
class Open:
    """A call of ``open_cache``."""

    path: str
    """The cache."""
    instead: bool = False
    """Whether a call that reads caches was given another path, and fails for it."""

    def written_in(self, dialect: Dialect) -> str:
        """Write it as the user of a dialect would."""
        return dialect.open(self)

    def __str__(self) -> str:
        return f"open_cache({self.path!r})"


@dataclass(frozen=True)
class Without:
    """An option that is not to be given."""

    name: str
    """As Python has it."""

    def written_in(self, dialect: Dialect) -> str:
        """Write it as the user of a dialect would."""
        return dialect.without(self)

    def __str__(self) -> str:
        return f"leave out {self.name}"


@dataclass(frozen=True)
class Either:
    """Two texts for the same thing."""

    code: str
    """In a program."""
    command: str
    """On a command line."""

    def written_in(self, dialect: Dialect) -> str:
        """Write it as the user of a dialect would."""
        return dialect.either(self)

    def __str__(self) -> str:
        return self.code


OVERWRITE = Setting("overwrite", True)
PACK_AGAIN = Pack(options=(OVERWRITE,))
"""What replaces a cache that is damaged, or stale."""

Part = Union[str, Setting, Without, Pack, Open, Either]  # noqa: UP007 -- evaluated, by Python 3.10 too


class Dialect(Protocol):
    """How a user would write calls and options."""

    def setting(self, setting: Setting) -> str:
        """Write an option."""

    def without(self, option: Without) -> str:
        """Write that an option is not to be given."""

    def pack(self, call: Pack) -> str:
        """Write a call of ``pack``."""

    def open(self, call: Open) -> str:
        """Write a call of ``open_cache``."""

    def either(self, both: Either) -> str:
        """Choose one of two texts."""


# A class with methods of one line, since the parts write themselves in Python: ``str``
# of an error must work where no dialect is known.  The command line's is in
# ``cli/typed_words.py``.
class Python:
    """The dialect of programs."""

    def setting(self, setting: Setting) -> str:
        """Write it as a keyword argument."""
        return str(setting)

    def without(self, option: Without) -> str:
        """Name the keyword argument."""
        return str(option)

    def pack(self, call: Pack) -> str:
        """Write it as it is imported."""
        return str(call)

    def open(self, call: Open) -> str:
        """Write it as it is imported."""
        return str(call)

    def either(self, both: Either) -> str:
        """Choose the code."""
        return both.code


@dataclass(frozen=True)
class Fix:
    """What to do, as parts that follow each other without a space.

    >>> print(Fix.of("copy the cache again, or ", PACK_AGAIN))
    copy the cache again, or pack(source, path, overwrite=True)
    """

    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, *parts: Part | Fix) -> Fix:
        """Join parts, and the parts of other fixes."""
        joined: list[Part] = []
        for part in parts:
            joined += part.parts if isinstance(part, Fix) else [part]
        return cls(tuple(joined))

    def __str__(self) -> str:
        return self.text(Python())

    def text(self, dialect: Dialect) -> str:
        """Write it as the user of a dialect would."""
        return "".join(
            part if isinstance(part, str) else part.written_in(dialect)
            for part in self.parts
        )
