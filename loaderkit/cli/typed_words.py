"""Fixes of errors as a user of the command line would type them."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from loaderkit.cli.command import Command
    from loaderkit.fixes import Either, Open, Pack, Setting, Without

_NAMES = {"storage_options": "storage_option"}
"""Options that are given one by one here, by their name in Python."""


class TypedWords:
    """The dialect of one run of a command.

    Args:
        parsers: What reads the words of each command.
        command: The one that was run.
        options: What the words mean.
        words: As they were typed, behind ``loaderkit``.
    """

    def __init__(
        self,
        parsers: Mapping[str, argparse.ArgumentParser],
        command: Command,
        options: argparse.Namespace,
        words: Sequence[str],
    ) -> None:
        self._command = command
        self._options = options
        self._words = list(words)
        self._actions = {name: _actions_of(parser) for name, parser in parsers.items()}

    def setting(self, setting: Setting) -> str:
        """Write an option of this command; as Python does where it has none."""
        flag = self._command.flags.get((setting.name, setting.value))
        return flag or self._option(setting, self._command.name)

    def without(self, option: Without) -> str:
        """Name the option to leave out, as it was typed."""
        action = self._find_action(option.name, self._command.name)
        return f"leave out {action.option_strings[-1]}" if action else str(option)

    def _option(self, setting: Setting, command: str) -> str:
        action = self._find_action(setting.name, command)
        # An option that only Python has: told so, the user may at least look it up.
        if action is None:
            return str(setting)
        if not action.option_strings:
            return shlex.quote(str(setting.value))
        name = action.option_strings[-1]
        if setting.code:
            return f"{name} {action.metavar or action.dest.upper()}"
        if action.nargs == 0 and setting.value:  # it is there, or it is not
            return name
        if action.nargs == 0 or setting.value is None:
            return f"leave out {name}"
        return f"{name} {shlex.quote(str(setting.value))}"

    def _find_action(self, keyword: str, command: str) -> argparse.Action | None:
        return self._actions[command].get(_NAMES.get(keyword, keyword))

    def pack(self, call: Pack) -> str:
        """Write ``loaderkit pack``."""
        source = self._source_as_typed()
        path = call.path or self._cache_as_typed()
        before = ""
        if call.source:
            # Samples that code makes have a name in a file here.
            file, _, _ = source.rpartition(":")
            if not file.endswith(".py"):
                file = "data.py"
            before = f"samples = {call.source} in {file}, and "
            source = f"{file}:samples"
        quoted = [*map(_quote, (source, path))]
        quoted += [self._option(option, "pack") for option in call.options]
        return f"{before}loaderkit pack {' '.join(quoted)}"

    def open(self, call: Open) -> str:
        """Write this command with another cache; or else one that shows a cache."""
        if not call.instead or self._command.cache is None:
            return f"loaderkit inspect {shlex.quote(call.path)}"
        cache = self._cache_as_typed()
        words = [call.path if word == cache else word for word in self._words]
        return f"loaderkit {shlex.join(words)}"

    def either(self, both: Either) -> str:
        """Choose the command."""
        return both.command

    def _source_as_typed(self) -> str:
        return getattr(self._options, "source", None) or "SOURCE"

    def _cache_as_typed(self) -> str:
        argument = self._command.cache or "cache"
        return getattr(self._options, argument, None) or "CACHE"


def _actions_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    # argparse has no public list of them.
    return {action.dest: action for action in parser._actions}  # noqa: SLF001


def _quote(word: str) -> str:
    """Quote a word for a shell; a name in capitals is to be filled in."""
    return word if word.isupper() else shlex.quote(word)
