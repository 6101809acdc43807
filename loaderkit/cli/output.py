"""Where an answer leaves: as text, or as one JSON object."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from typing import TYPE_CHECKING

from loaderkit.errors import LoaderkitError, NotWrittenError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loaderkit.cli.command import Answer
    from loaderkit.fixes import Dialect
    from loaderkit.pages.document import HasPage

_STDOUT, _STDERR = 1, 2
"""Numbers of the descriptors, on every system."""


def print_answer(answer: Answer, *, as_json: bool) -> None:
    """Print what a command returns."""
    print_text(json.dumps(answer.to_json()) if as_json else str(answer))


def print_error(error: LoaderkitError, dialect: Dialect, *, as_json: bool) -> None:
    """Print why a command could not do it.

    A program reads it where it reads answers, a person from standard error.

    Args:
        error: Why.
        dialect: How its fix is written.
        as_json: For a program.
    """
    name, fix = type(error).__name__, error.fix_in(dialect)
    if as_json:
        parts = {"what": error.what, "why": error.why, "fix": fix}
        print_text(json.dumps({"error": name, **parts}))
        return
    # An error that shows more than its parts, as a report does, is shown whole.
    rewritten = LoaderkitError(error.what, why=error.why, fix=fix)
    text = error if fix == error.fix else rewritten
    print(f"{name}: {text}", file=sys.stderr)


@contextlib.contextmanager
def answer_alone_on_stdout(*, as_json: bool) -> Iterator[None]:
    """Let whatever else prints meanwhile print to standard error.

    The user's own code does: a script that is watched, a module that a dataset comes
    from.  A program that reads an answer could not tell the two apart.

    Args:
        as_json: For a program; else nothing is changed.
    """
    # One of them is None where it was closed before Python began, as by >&-.
    if not as_json or sys.stdout is None or sys.stderr is None:
        yield
        return
    flush_output()
    # The process's own, for what it starts; and Python's, which a caller may replace.
    own_stdout = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(own_stdout, _STDOUT)
        os.close(own_stdout)


def write_page_of(answer: HasPage, file: str) -> None:
    """Write the page of an answer, and say where it is.

    Raises:
        NotWrittenError: The file cannot be written.
    """
    page = answer.to_html(file)
    # Standard output is the answer's alone: programs read it.
    print(f"page: {page}", file=sys.stderr)


def print_text(text: str) -> None:
    """Print to standard output, whose reader may have gone."""
    try:
        print(text)
    except OSError as error:
        _ignore_closed_pipe(error)
    flush_output()


def flush_output() -> None:
    """Write what is still buffered, to a reader who may have gone.

    ``loaderkit inspect data.lk | head -1`` closes the pipe before everything is
    written.  That is no failure: the exit status stays the command's own, so that
    ``set -o pipefail`` fails where a cache is damaged, and nowhere else.
    """
    if sys.stdout is None:  # it was closed before Python began, as by >&-
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        _ignore_closed_pipe(error)


def show_progress(text: str) -> None:
    """Show a line that the next one replaces; nothing where nobody looks."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _ignore_closed_pipe(error: OSError) -> None:
    """Drop what nobody reads any more; tell what is another failure, and end."""
    # Windows says EINVAL where the reader of a pipe has gone.
    closed = error.errno == errno.EPIPE
    closed_on_windows = os.name == "nt" and error.errno == errno.EINVAL
    is_failure = not closed and not closed_on_windows
    if is_failure:
        what = f"The answer cannot be written: {error.strerror}."
        why = "standard output leads to a file or device that takes no more"
        fix = "free some space, or name another file"
        told = NotWrittenError(what, why=why, fix=fix)
        print(f"{type(told).__name__}: {told}", file=sys.stderr)
    # Python flushes standard output once more when it ends, and would complain.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    if is_failure:
        raise SystemExit(1) from error
