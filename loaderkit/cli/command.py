"""What a command is, and the arguments that several commands share."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

from loaderkit.cache.storage import is_url
from loaderkit.errors import OptionError
from loaderkit.habits import COMMANDS
from loaderkit.nearest_names import nearest_name
from loaderkit.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from loaderkit.fixes import Dialect


class Answer(Protocol):
    """What a command returns: text for people, plain values for programs.

    ``ok``, where it has one, is False when the news is bad.
    """

    def to_json(self) -> dict[str, Any]:
        """Give it as plain values."""
        ...


@runtime_checkable
class HasFixes(Protocol):
    """An answer that says what to do about something."""

    def in_dialect(self, dialect: Dialect, /) -> Answer:
        """Write that as the users of a dialect would."""
        ...


@dataclass(frozen=True)
class Command:
    """One command: how it is called, and what it does."""

    name: str
    """As it is typed."""
    summary: str
    """Its line in ``loaderkit --help``."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Adds its own arguments; ``--json`` and ``--html`` are there already."""
    run: Callable[[argparse.Namespace], Answer]
    """Does what was asked.  A LoaderkitError that it raises is printed."""
    has_page: bool = False
    """Whether its answer has ``to_html``: then there is ``--html FILE``."""
    cache: str | None = None
    """Which argument names the cache that it reads."""
    flags: Mapping[tuple[str, object], str] = field(default_factory=dict)
    """Options that stand for a keyword of Python with a value, where their name is not
    that of the keyword."""
    bad_news: str | None = None
    """What an answer means that is not ``ok``: it ends with status 1.  None where every
    answer ends with status 0."""


class SuggestingParser(argparse.ArgumentParser):
    """Answers a misspelt command or option with the nearest there is."""

    def error(self, message: str) -> NoReturn:
        """End with status 2 and the message, and what was probably meant."""
        # argparse tells it as a text alone; of other Pythons the rest may differ.
        unknown = re.match(
            r"(?:unrecognized arguments: (-\S+)|argument COMMAND: .*?'(\S+?)')", message
        )
        word = (unknown[1] or unknown[2]) if unknown else ""
        if message.startswith("the following arguments are required"):
            # argparse asks for these first, and a word that it took for an option with
            # a typo may be all there is.
            word = self._first_unknown_option()
            message += f"; unrecognized: {word}" if word else ""
        if word:
            message += self._say_what_was_meant(word)
        super().error(message)

    def _say_what_was_meant(self, word: str) -> str:
        name, _, _ = word.partition("=")
        nearest = nearest_name(name, self._known_words())
        if name in COMMANDS:
            return f"; {COMMANDS[name]}"
        if nearest == name:
            return "; write it behind the command"
        if name.lstrip("-").replace("-", "_") in self._names_of_places():
            return f"; {name.lstrip('-')} is given without its name"
        if nearest is None and name.startswith("-"):
            # As other programs have them: "-version" and "-V".
            beginning = f"--{name.lstrip('-').lower()}"
            meant = [w for w in self._known_words() if w.startswith(beginning)]
            nearest = meant[0] if len(meant) == 1 else None
        if nearest is not None:
            return f"; did you mean {nearest!r}?"
        of_commands = nearest_name(name, self._options_of_commands())
        if of_commands is not None:
            return f"; {of_commands} is an option of commands, and goes behind one"
        return ""

    def _first_unknown_option(self) -> str:
        """Give the first word that looks like an option, and is none; else nothing."""
        known = [word for word in self._known_words() if word.startswith("-")]
        for word in self._words:
            name, _, _ = word.partition("=")
            if word == "--":
                break
            is_option = re.match(r"--?[A-Za-z]", word) is not None
            # argparse takes the beginning of an option for it.
            if is_option and not any(option.startswith(name) for option in known):
                return word
        return ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and keep the words for a message."""
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, so that a command's unknown options are told by the command itself."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = getattr(options, "command", None)
            parser = self if command is None else self._parser_of(command.name)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options

    def _parser_of(self, name: str) -> argparse.ArgumentParser:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 -- argparse has no public name for it
                parser: argparse.ArgumentParser = action.choices[name]
                return parser
        return self

    def _options_of_commands(self) -> list[str]:
        parsers = [
            parser
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001 -- argparse has no public name for it
            for parser in action.choices.values()
        ]
        names = {name for parser in parsers for name in parser._option_string_actions}  # noqa: SLF001 -- nor a list
        return sorted(name for name in names if name.startswith("--"))

    def _names_of_places(self) -> list[str]:
        """Name the arguments that are given by their place."""
        return [action.dest for action in self._actions if not action.option_strings]

    def _known_words(self) -> list[str]:
        """Name the commands and options that this parser takes."""
        words: list[str] = []
        for action in self._actions:
            words += action.option_strings or list(action.choices or ())
        return words


def add_no_arguments(parser: argparse.ArgumentParser) -> None:
    """Leave a command without arguments of its own."""


def add_cache_argument(parser: argparse.ArgumentParser) -> None:
    """Add a cache that is there, wherever it is."""
    cache = parser.add_argument("cache", help="its folder, or a URL")
    complete_files(cache)
    add_storage_options(parser)


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a URL's file system."""
    parser.add_argument(
        "--storage-option",
        type=name_and_value,
        action="append",
        metavar="NAME=VALUE",
        help="for the file system of a URL; VALUE may be JSON; may be repeated "
        "(default: none)",
    )


def refuse_memory_of_command(url: str, fix: str) -> None:
    """Refuse to write a cache to where it is gone when the command ends.

    Args:
        url: Where it is to go: a URL, or a path.
        fix: What can be typed instead.

    Raises:
        OptionError: It is memory, which is this process's own.
    """
    protocol = url.partition("://")[0].rpartition("::")[2]
    if is_url(url) and protocol == "memory":
        message = f"{url} would be gone when this command ends."
        why = "memory:// is the memory of one process"
        raise OptionError(message, why=why, fix=fix)


def storage_options(options: argparse.Namespace) -> dict[str, Any] | None:
    """Give the options of a URL's file system; None where there are none."""
    return None if options.storage_option is None else dict(options.storage_option)


def add_html_argument(parser: argparse.ArgumentParser) -> None:
    """Add where a page is written."""
    file = parser.add_argument(
        "--html", metavar="FILE", help="write a page with pictures too (default: no)"
    )
    complete_files(file)


def complete_files(argument: argparse.Action) -> None:
    """Let shells complete an argument with names of files and folders."""
    # shtab reads this attribute, and the names of these functions are its own
    # (shtab.FILE): it need not be installed where nobody asks for completion.
    argument.complete = {  # type: ignore[attr-defined]
        "bash": "_shtab_compgen_files",
        "zsh": "_files",
        "tcsh": "f",
    }


def byte_size(text: str) -> int:
    """Read a size such as ``8GiB``.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive_integer(text: str) -> int:
    """Read an integer of at least 1.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        msg = f"must be an integer of at least 1, got {text}"
        raise argparse.ArgumentTypeError(msg)
    return number


def positive_seconds(text: str) -> float:
    """Read a time above 0, also a fraction of a second.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        msg = f"must be a number of seconds above 0, got {text}"
        raise argparse.ArgumentTypeError(msg)
    return seconds


def name_and_value(text: str) -> tuple[str, Any]:
    """Read ``NAME=VALUE``, where the value may be JSON.

    Raises:
        argparse.ArgumentTypeError: There is no name, or no equals sign.
    """
    name, equals_sign, value = text.partition("=")
    if not name or not equals_sign:
        msg = f"must be NAME=VALUE, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
