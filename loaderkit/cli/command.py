"""What a command is, and the arguments that several commands share."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from loaderkit.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable


class Answer(Protocol):
    """What a command returns: text for people, plain values for programs.

    ``ok``, where it has one, is False when the news is bad.
    """

    def to_json(self) -> dict[str, Any]:
        """Give it as plain values."""
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
    bad_news: str | None = None
    """What an answer means that is not ``ok``: it ends with status 1.  None where every
    answer ends with status 0."""


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
        help="for the file system of a URL; VALUE may be JSON; may be repeated",
    )


def storage_options(options: argparse.Namespace) -> dict[str, Any] | None:
    """Give the options of a URL's file system; None where there are none."""
    return None if options.storage_option is None else dict(options.storage_option)


def add_html_argument(parser: argparse.ArgumentParser) -> None:
    """Add where a page is written."""
    file = parser.add_argument(
        "--html", metavar="FILE", help="write a page with pictures too"
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


def size_in_bytes(text: str) -> int:
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
