"""``loaderkit demo``: real molecules, packed, trained on, and read in three ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.cli.command import Command, complete_files, positive_integer

if TYPE_CHECKING:
    import argparse

    from loaderkit.cli.molecule_demo import Demo


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--epochs",
        type=positive_integer,
        default=40,
        metavar="N",
        help="epochs to train (default: %(default)s)",
    )
    folder = parser.add_argument(
        "--keep",
        metavar="FOLDER",
        help="where the files and the cache are kept (default: nowhere)",
    )
    complete_files(folder)


def _run_demo(options: argparse.Namespace) -> Demo:
    from loaderkit.cli.molecule_demo import run_demo

    return run_demo(epochs=options.epochs, keep=options.keep)


COMMAND = Command("demo", "real molecules, end to end", _add_arguments, _run_demo)
