"""``loaderkit watch``: run a script, or look at a running one, and judge its memory."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from loaderkit.cli.command import (
    Command,
    complete_files,
    positive_integer,
    positive_seconds,
)
from loaderkit.cli.output import show_progress
from loaderkit.errors import OptionError

if TYPE_CHECKING:
    from loaderkit.leaks.watch_process import WatchResult


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pid",
        type=positive_integer,
        help="a running process to look at (default: none, but a script)",
    )
    parser.add_argument(
        "--seconds",
        type=positive_seconds,
        metavar="S",
        help="how long to look at --pid (default: until it ends)",
    )
    # Not by ``has_page``: a script's page is written in the process that ran it.
    page = parser.add_argument(
        "--html", metavar="FILE", help="write a page with pictures too (default: no)"
    )
    complete_files(page)
    script = parser.add_argument("script", nargs="?", help="a Python file")
    complete_files(script)
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its own arguments")


_OWN_OPTIONS = ("--html", "--json", "--pid", "--seconds")


def _tell_options_of_script(script: str, arguments: list[str]) -> None:
    """Say which options behind the script's name are given to it, and not to us."""
    names = [argument.partition("=")[0] for argument in arguments]
    ours = [name for name in _OWN_OPTIONS if name in names]
    if ours:
        print(
            f"{', '.join(ours)} behind {script} is given to the script; "
            f"loaderkit watch {ours[0]} ... {script} keeps it here",
            file=sys.stderr,
        )


def _run_watch(options: argparse.Namespace) -> WatchResult:
    from loaderkit.leaks.watch_process import watch_process, watch_script

    if options.pid is not None:
        if options.script is not None:
            message = (
                f"Either {options.script} is run, or process {options.pid} watched."
            )
            why = "one process is watched at a time"
            raise OptionError(message, why=why, fix="leave one of the two out")
        return watch_process(
            options.pid,
            seconds=options.seconds,
            page=options.html,
            live=show_progress,
        )
    if options.script is None:
        message = "There is nothing to watch."
        why = "neither a script nor a process was named"
        fix = "loaderkit watch train.py, or --pid 1234"
        raise OptionError(message, why=why, fix=fix)
    if options.seconds is not None:
        message = "--seconds is for --pid."
        why = "a script is watched until it ends"
        raise OptionError(message, why=why, fix="leave --seconds out")
    _tell_options_of_script(options.script, options.args)
    result = watch_script(
        options.script, options.args, page=options.html, live=show_progress
    )
    # What stands there is wiped off, before the answer is printed.
    show_progress("")
    return result


COMMAND = Command(
    "watch",
    "run a script, or look at one, and judge it",
    _add_arguments,
    _run_watch,
    bad_news="it leaks, or the script failed",
)
