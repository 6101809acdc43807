"""Paths that a caller gave, taken or refused.  Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from loaderkit.arguments import refuse_value
from loaderkit.errors import OptionError
from loaderkit.fixes import Either
from loaderkit.value_words import kind_of, show_value


def check_order(
    call: str, other: object, path: object, example: str, *, where: str = "second"
) -> None:
    """Refuse a path in the place of samples and samples in the place of a path.

    Args:
        call: What was called.
        other: What was given beside the path.
        path: What was given in the place of the path.
        example: The call as it should be, with ``{path}`` for what is the path then.
        where: The place of the path.

    Raises:
        OptionError: The two were exchanged.
    """
    is_exchanged = isinstance(other, str | os.PathLike) and not (
        path is None or isinstance(path, str | os.PathLike)
    )
    if is_exchanged:
        message = f"{call} takes the path {where}, and got {show_value(path)} there."
        # Only here: samples may be too many to write, or raise an error of their own.
        fix = example.replace("{path}", repr(other))
        raise OptionError(message, why="the two were exchanged", fix=fix)


def refuse_odd_path(path: object) -> None:
    """Refuse a path that no system has, and one that only a shell can read.

    A shell reads "~/..." as the home folder, and "$NAME" as what a variable says, and
    Python does not.

    Args:
        path: What was given as a path.

    Raises:
        OptionError: It begins with "~", or a part of it is "$NAME" or "${NAME}", of
            which a folder would be made, or it holds a zero byte.
    """
    if isinstance(path, str) and "\0" in path:
        message = f"A path holds a zero byte: {show_value(path)}."
        why = "systems end a path there; it was probably read from a file of bytes"
        raise OptionError(message, why=why, fix=repr(path.replace("\0", "")))
    if isinstance(path, str) and re.match(r"~[\w.-]*([/\\]|$)", path):
        message = f"A path begins with the home folder: {path!r}."
        why = "only a shell reads ~ so; Python would make a folder of that name"
        fix = Either(f"os.path.expanduser({path!r})", f"without quotes: {path}")
        raise OptionError(message, why=why, fix=fix)
    variable = _variable_in(path) if isinstance(path, str) else None
    if variable is not None:
        message = f"A path names the variable {variable}: {path!r}."
        why = "only a shell reads it so; Python would make a folder of that name"
        in_shell = f"without single quotes: {path}"
        fix = Either(f"os.path.expandvars({path!r})", in_shell)
        raise OptionError(message, why=why, fix=fix)


def _variable_in(path: str) -> str | None:
    """Give the first part of a path that a shell would put a variable's value for.

    >>> _variable_in("/data/${USER}/rows.lk"), _variable_in("C:/$Recycle.Bin/rows.lk")
    ('${USER}', None)
    """
    parts = re.split(r"[/\\]", path)
    is_variable = re.compile(r"\$([A-Za-z_]\w*|\{[A-Za-z_]\w*\})").fullmatch
    return next(filter(is_variable, parts), None)


def check_path(name: str, value: object, example: str) -> Path:
    """Take the path of a file or a folder.

    Args:
        name: The option.
        value: What was given.
        example: What could be given.

    Returns:
        The path.

    Raises:
        OptionError: It is no path, an empty one, or one that only a shell can read.
    """
    # "" is the current folder to Python, and mostly a variable that was not set.
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise refuse_value(name, value, "a path", example)
    refuse_odd_path(os.fspath(value))
    return Path(value)


def check_cache_path(path: object) -> None:
    """Refuse what names no single cache.

    Args:
        path: What was given as a cache's folder or URL.

    Raises:
        OptionError: It is no path: several, a dataset, samples ...
    """
    if isinstance(path, str | os.PathLike):
        refuse_odd_path(os.fspath(path))
        if not os.fspath(path):
            message = "The path of the cache is empty."
            why = "to Python that is the current folder; mostly, a variable was not set"
            raise OptionError(message, why=why, fix="'.' for the current folder")
        return
    message = f"A cache is named by a path or a URL, got {show_value(path)}."
    why = f"it is {kind_of(path)}"
    fix = "open_cache('molecules.lk')"
    if isinstance(path, bytes):
        fix = f"os.fsdecode({path!r})"
    elif isinstance(path, Mapping):
        fix = "{name: open_cache(path) for name, path in paths.items()}"
    elif isinstance(path, list | tuple) and all(
        isinstance(item, str | os.PathLike) for item in path
    ):
        why = "each cache has a path"
        fix = "concat(paths, path) to make one cache of them, or open each by itself"
    elif isinstance(path, list | tuple):
        fix = "pack(samples, path), then open_cache(path)"
    elif hasattr(path, "cache"):
        why = "it is a dataset"
        fix = "dataset.cache is its path"
        if getattr(path, "has_whole_cache", True) is False:
            # Its cache has other samples: its path would be read without a word.
            why = "it is a dataset that has not all samples of its cache as they are"
            fix = "pack(dataset, path), and give that path"
    raise OptionError(message, why=why, fix=fix)
