"""``loaderkit explain``: why a process ran out of memory, from what it printed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from loaderkit.cli.command import Command, complete_files
from loaderkit.errors import LoaderkitError

if TYPE_CHECKING:
    import argparse

    from loaderkit.budget.diagnosis.diagnose import Diagnosis


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    file = parser.add_argument(
        "file",
        nargs="?",
        default="-",
        help="a text or log (default: standard input, as -)",
    )
    complete_files(file)


def _run_explain(options: argparse.Namespace) -> Diagnosis:
    from loaderkit.budget.diagnosis.diagnose import diagnose_oom

    return diagnose_oom(_read_text(options.file))


def _read_text(file: str) -> str:
    """Read a log.

    Raises:
        LoaderkitError: It cannot be read, or there is nothing in it.
    """
    try:
        if file == "-":
            text = sys.stdin.read()
        else:
            text = Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        message = f"{file} cannot be read."
        why = error.strerror or str(error)
        fix = "loaderkit explain error.txt, or python train.py 2>&1 | loaderkit explain"
        raise LoaderkitError(message, why=why, fix=fix) from error
    if not text.strip():
        name = "Standard input" if file == "-" else file
        message = f"{name} is empty: there is nothing to explain."
        why = (
            "programs write errors to standard error, which a | alone does not pass on"
        )
        fix = "python train.py 2>&1 | loaderkit explain, or the job's own log"
        raise LoaderkitError(message, why=why, fix=fix)
    return text


COMMAND = Command(
    "explain",
    "why it ran out of memory, from its message",
    _add_arguments,
    _run_explain,
    has_page=True,
    # It answers what it was asked also where memory ran out.
    bad_news=None,
)
