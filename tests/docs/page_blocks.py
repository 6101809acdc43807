"""Runs the code blocks of a documentation page, and compares what they print.

A page is a Markdown file.  What its fenced blocks mean here:

    python   runs, all blocks of a page in one module, in a folder of its own
    text     right behind a block that runs: what it prints, compared as doctest does,
             so that ``...`` stands for anything
    console  commands behind ``$``, each with the lines it prints; a line behind ``\\``
             belongs to the command above
    sh       commands that install or build something: not run

A comment above a block or a page says what is special about it:

    <!-- file: train.py -->       the block is a file, which a command below runs
    <!-- needs: lmdb -->          the page is run only where this can be imported
    <!-- run by: tox -e docs -->  the page is too slow for the tests of every day
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_FENCE = re.compile(r"^```(\S*)$")
_COMMENT = re.compile(r"^<!-- (file|needs|run by): (.+) -->$")
_COST_OF_PROBE = re.compile(r"^probe +took .*\n(?: {4,}.*\n)*", re.MULTILINE)
"""The line of a plan that is only there where the probe took long: on a busy one."""
_COMPARED = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_INSTALLS = ("pip install ", "tox", "loaderkit demo", "brew install ")
_PROGRAMS = {
    "python": (),
    "pytest": ("-m", "pytest"),
    "torchrun": ("-m", "torch.distributed.run"),
    "accelerate": ("-m", "accelerate.commands.accelerate_cli"),
}
"""Programs that a console block may start, as modules of this Python."""


class PageError(AssertionError):
    """A block did not do what its page says."""


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    """The word behind the backticks, "" for none."""
    text: str
    """Its lines, each with its end."""
    line: int
    """Number of its first line in the page, from 1."""
    file: str | None = None
    """What the block is the content of; None for a block that runs."""


@dataclass(frozen=True)
class Page:
    """The blocks of a page."""

    path: Path
    blocks: tuple[Block, ...]
    needs: tuple[str, ...]
    """Modules without which the page cannot be run."""
    is_slow: bool
    """Whether only ``tox -e docs`` runs the page."""

    def output_behind(self, number: int) -> str:
        """Give what the page shows as the output of one of its blocks."""
        behind = self.blocks[number + 1 : number + 2]
        return behind[0].text if behind and behind[0].language == "text" else ""

    def missing_modules(self) -> list[str]:
        """Name the modules that the page needs and this Python lacks."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def read_page(path: Path) -> Page:
    """Find the blocks of a page.

    Raises:
        PageError: A block is not closed, or a comment stands above no block.
    """
    blocks: list[Block] = []
    needs: list[str] = []
    is_slow = False
    file: str | None = None
    opened: Block | None = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is not None:
            if line == "```":
                blocks.append(opened)
                opened = None
            else:
                opened = replace(opened, text=f"{opened.text}{line}\n")
        elif fence:
            opened = Block(fence[1], "", number + 1, file)
            file = None
        elif comment := _COMMENT.match(line):
            if comment[1] == "file":
                file = comment[2]
            elif comment[1] == "needs":
                needs += comment[2].split(", ")
            else:
                is_slow = True
    if opened is not None or file is not None:
        msg = f"{path}: a block is not closed, or a file: comment has no block"
        raise PageError(msg)
    return Page(path, tuple(blocks), tuple(needs), is_slow)


def run_page(page: Page, folder: Path) -> None:
    """Run every block of a page.

    Args:
        page: What to run.
        folder: Where the page's files lie, and its commands run.

    Raises:
        PageError: A block printed something else than the page shows.
    """
    with _page_module(page, folder) as module, _working_in(folder):
        for number, block in enumerate(page.blocks):
            expected = page.output_behind(number)
            if block.file is not None:
                (folder / block.file).write_text(block.text)
            elif block.language == "python":
                _compare_output(page, block.line, expected, _run_python(block, module))
            elif block.language == "console":
                _run_console(page, block, folder)
            elif block.language == "sh":
                _check_installs(page, block)


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """Make a folder the current one, as ``contextlib.chdir`` of Python 3.11 does."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _page_module(page: Page, folder: Path) -> Iterator[types.ModuleType]:
    """Make the page's Python a module: its classes can be pickled and their code read.

    The file has the page's line numbers, so tracebacks lead to the page.  It is called
    "my_", since a page about lightning must not hide lightning.
    """
    name = f"my_{re.sub(r'[^a-z0-9]', '_', page.path.stem.lower())}"
    lines: list[str] = []
    for block in page.blocks:
        if block.language == "python" and block.file is None:
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    file = folder / f"{name}.py"
    file.write_text("\n".join(lines) + "\n")
    module = types.ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module
    try:
        yield module
    finally:
        del sys.modules[name]


def _run_python(block: Block, module: types.ModuleType) -> str:
    """Run a block in the page's module, and give what it printed."""
    padded = "\n" * (block.line - 1) + block.text
    code = compile(padded, module.__file__ or "", "exec", dont_inherit=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, vars(module))
    return printed.getvalue()


def _run_console(page: Page, block: Block, folder: Path) -> None:
    """Run each command of a console block, and compare what it prints."""
    if not block.text.startswith("$ "):
        msg = f"{page.path}:{block.line}: a console block begins with a command"
        raise PageError(msg)
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, expected = re.sub(r"\\\n\s*", "", part).partition("\n")
        _compare_output(page, block.line, expected, _run_command(command, folder))


def _run_command(command: str, folder: Path) -> str:
    """Run a command, and give what it printed, whatever its exit status."""
    program, *arguments = shlex.split(command)
    if program == "loaderkit":
        return _run_loaderkit(arguments)
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, *_PROGRAMS[program], *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def _run_loaderkit(arguments: list[str]) -> str:
    """Run our own command here: another process would import torch once more."""
    from loaderkit.cli.main import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(arguments)  # raises SystemExit behind --help
    return printed.getvalue()


def _check_installs(page: Page, block: Block) -> None:
    for line in block.text.splitlines():
        if not line.startswith(_INSTALLS):
            msg = f"{page.path}:{block.line}: use console for a command that runs: "
            raise PageError(msg + line)


def _compare_output(page: Page, line: int, expected: str, printed: str) -> None:
    of_any_machine = _COST_OF_PROBE.sub("", printed)
    checker = doctest.OutputChecker()
    if any(
        checker.check_output(expected, text, _COMPARED)
        for text in (printed, of_any_machine)
    ):
        return
    msg = f"{page.path}:{line}: the page shows\n{expected}\nand the block printed\n"
    raise PageError(msg + printed)
