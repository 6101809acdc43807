"""Write text to a file that the caller named."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from loaderkit.errors import NotWrittenError, OptionError
from loaderkit.fixes import Either
from loaderkit.path_arguments import check_path
from loaderkit.value_words import kind_of, show_value

if TYPE_CHECKING:
    from pathlib import Path


def write_named_file(path: str | os.PathLike[str], text: str) -> Path:
    """Write a text to a file, which is replaced if it is there.

    Args:
        path: Of the file.
        text: Its content.

    Returns:
        The path.

    Raises:
        NotWrittenError: It cannot be written; also an ``OSError``.
        OptionError: It is no path.
    """
    # From the user, whose types nobody has checked: pathlib would say "expected str".
    value: object = path
    if not isinstance(value, str | os.PathLike):
        message = f"A file is named by a path, got {show_value(value)}."
        raise OptionError(message, why=f"it is {kind_of(value)}", fix="'report.html'")
    file = check_path("path", value, "report.html")
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _not_written(file, error) from error
    return file


def _not_written(file: Path, error: OSError) -> NotWrittenError:
    """Say why a file cannot be written, and what would make it so."""
    folder = str(file.parent)
    why = error.strerror or str(error)
    fix: str | Either = "name a file in a folder that you may write to"
    if file.is_dir():
        why, fix = "it is a folder", f"name a file in it: {str(file / 'report.html')!r}"
    elif file.parent.exists() and not file.parent.is_dir():
        why = f"{folder} is a file, and no folder"
    elif not file.parent.exists():
        why = f"there is no folder {folder}"
        code = f"pathlib.Path({folder!r}).mkdir(parents=True)"
        fix = Either(code, f"mkdir -p {shlex.quote(folder)}")
    refusal = NotWrittenError(f"{file} cannot be written.", why=why, fix=fix)
    # Python fills these in for an OSError of two arguments; this one has a text.
    refusal.errno, refusal.strerror = error.errno, error.strerror
    refusal.filename = str(file)
    return refusal
