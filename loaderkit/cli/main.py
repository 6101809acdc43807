"""Build the parser of the command line, and run the command that was asked for."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from loaderkit import __version__
from loaderkit.cli import (
    demo,
    doctor,
    explain,
    inspect,
    pack,
    plan,
    pull,
    push,
    verify,
    watch,
)
from loaderkit.cli.command import HasFixes, SuggestingParser, add_html_argument
from loaderkit.cli.completion import add_completion
from loaderkit.cli.output import (
    answer_alone_on_stdout,
    flush_output,
    print_answer,
    print_error,
    write_page_of,
)
from loaderkit.cli.typed_words import TypedWords
from loaderkit.errors import LoaderkitError, OptionError, VariableError
from loaderkit.pages.document import HasPage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loaderkit.cli.command import Command

COMMANDS: tuple[Command, ...] = (
    pack.COMMAND,
    inspect.COMMAND,
    verify.COMMAND,
    push.COMMAND,
    pull.COMMAND,
    demo.COMMAND,
    watch.COMMAND,
    explain.COMMAND,
    plan.COMMAND,
    doctor.COMMAND,
)
"""In the order of ``loaderkit --help``."""

_STATUSES = """\
exit status:
  0  done, and all is well; explain: the text was read, whatever it says
  1  bad news: damaged, leaking, does not fit, a setting that does not work; or it
     could not be done, and the message says why
  2  wrong arguments
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program name; the process's own if None.

    Returns:
        The exit status, as ``--help`` lists them.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        options = build_parser().parse_args(words)
        return _run_command(options.command, options, words)
    finally:
        # Also behind --help and --version, which end by SystemExit.
        flush_output()


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = SuggestingParser(
        prog="loaderkit",
        description="Data loading whose memory stays flat.",
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"loaderkit {__version__}"
    )
    add_completion(parser)

    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            epilog=f"exit status: {_statuses_of(command)}",
        )
        subparser.add_argument(
            "--json", action="store_true", help="print one JSON object"
        )
        if command.has_page:
            add_html_argument(subparser)
        command.add_arguments(subparser)
        subparser.set_defaults(command=command, parsers=subparsers.choices)
    return parser


def _statuses_of(command: Command) -> str:
    failure = "an error"
    if command.bad_news is not None:
        failure = f"{command.bad_news}, or an error"
    return f"0 done; 1 {failure}; 2 wrong arguments"


def _run_command(
    command: Command, options: argparse.Namespace, words: Sequence[str]
) -> int:
    dialect = TypedWords(options.parsers, command, options, words)
    try:
        with answer_alone_on_stdout(as_json=options.json):
            answer = command.run(options)
        wants_page = command.has_page and options.html is not None
        if wants_page and isinstance(answer, HasPage):
            write_page_of(answer, options.html)
    except LoaderkitError as error:
        print_error(error, dialect, as_json=options.json)
        # A variable of the environment was not typed here.
        is_wrong_argument = isinstance(error, OptionError)
        return 2 if is_wrong_argument and not isinstance(error, VariableError) else 1
    # What is printed is for whoever typed this: fixes are commands, and not calls.
    if isinstance(answer, HasFixes):
        answer = answer.in_dialect(dialect)
    print_answer(answer, as_json=options.json)
    if command.bad_news is None:
        return 0
    return 0 if getattr(answer, "ok", True) else 1
