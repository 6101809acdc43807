"""Completion in shells, which shtab writes from the parser."""

from __future__ import annotations

import argparse
import importlib.util

from loaderkit.cli.output import print_text


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Offer to print what completes commands in a shell."""
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print what completes commands in a shell; needs shtab",
    )


class _PrintCompletion(argparse.Action):
    """Prints a script for a shell, or says what that needs."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002
        values: object,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        if importlib.util.find_spec("shtab") is None:
            parser.error("shells are completed by shtab: pip install shtab")
        import shtab

        print_text(shtab.complete(parser, values))
        parser.exit()
