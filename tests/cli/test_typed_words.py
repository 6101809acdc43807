"""What to do about an error of a command is what can be typed, not code."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

import loaderkit
from loaderkit.cli.main import COMMANDS, build_parser, main

if TYPE_CHECKING:
    from pathlib import Path

_DATA = """
import pathlib, torch, numpy as np
SAMPLE = {"x": torch.ones(2), "n": 3}
NAMED = {"a": {"x": torch.ones(2)}, "b": {"x": torch.ones(2)}}
SAMPLES = [{"x": torch.ones(2)}] * 3
RAGGED = [{"x": torch.ones(length, 2)} for length in (2, 3)]
PATHS = [{"p": pathlib.Path("a")}]
NUMBER = 3
MODEL = torch.nn.Linear(2, 2)
LOADER = torch.utils.data.DataLoader(SAMPLES)
"""

_WRONG_USES = {
    "a cache is there": ("pack pts ok.lk", "loaderkit inspect {here}/ok.lk, or"),
    "replace it": ("pack pts ok.lk", "or --overwrite to replace it"),
    "too few workers": ("pack pts new.lk --workers -1", "--workers 0"),
    "too many workers": ("pack pts new.lk --workers 100000", "--workers 4096"),
    "no such filter": ("pack pts new.lk --compression gzpi", "--compression gzip"),
    "no bytes": ("pack pts new.lk --shard-size 0", "--shard-size 1"),
    "no match": ("pack pts new.lk --pattern '*.npz'", "--pattern '**/*.pt'"),
    "files run code": ("pack unsafe new.lk --workers 0", "--unsafe-pickle"),
    "a cache again": ("pack ok.lk new.lk", "loaderkit inspect ok.lk"),
    "one file": ("pack one.pt new.lk", "loaderkit pack data.py:samples new.lk"),
    "one sample": (
        "pack mine.py:SAMPLE new.lk",
        "samples = [sample] in mine.py, and loaderkit pack mine.py:samples new.lk",
    ),
    "samples by name": ("pack mine.py:NAMED new.lk", "pack mine.py:samples new.lk"),
    "no samples": ("pack mine.py:NUMBER new.lk", "pack mine.py:samples new.lk"),
    "a model": ("pack mine.py:MODEL new.lk", "pack mine.py:samples new.lk"),
    "a loader": ("pack mine.py:LOADER new.lk", "samples = loader.dataset in mine.py"),
    "a path in a sample": ("pack mine.py:PATHS new.lk --workers 0", "store str(x)"),
    "a store as source": (
        "pack s3://bucket/x new.lk",
        "loaderkit pull s3://bucket/x new.lk",
    ),
    "nothing to explain": ("explain empty.txt", "2>&1 | loaderkit explain"),
    "one slash": ("pack pts s3:/bucket/x", "loaderkit pack pts s3://bucket/x"),
    "home": ("pack pts '~/x'", "without quotes: ~/x"),
    "nowhere": ("inspect nowhere.lk", "loaderkit pack SOURCE {here}/nowhere.lk"),
    "a file of a cache": (
        "inspect ok.lk/manifest.json --json",
        "loaderkit inspect {here}/ok.lk --json",
    ),
    "caches in a folder": ("inspect .", "loaderkit inspect {here}/cut.lk"),
    "cut": ("inspect cut.lk", "or loaderkit pack SOURCE cut.lk --overwrite"),
    "no manifest": ("inspect torn.lk", "loaderkit pack SOURCE torn.lk --overwrite"),
    "verified nowhere": ("verify nowhere.lk", "loaderkit pack SOURCE nowhere.lk"),
    "verified": ("verify cut.lk", "loaderkit pack SOURCE cut.lk --overwrite"),
    "no URL": ("inspect ok.lk --storage-option a=1", "leave out --storage-option"),
    "no such store": ("inspect foo://a/b", "--storage-option NAME=VALUE"),
    "nothing in a store": (
        "inspect file://{here}/none",
        "loaderkit push CACHE file://",
    ),
    "pushed from nowhere": ("push nowhere.lk file://{here}/r", "loaderkit pack SOURCE"),
    "exchanged": (
        "push file://{here}/r ok.lk",
        "loaderkit push ok.lk file://{here}/r",
    ),
    "from store to store": (
        "pull file://{here}/r memory://r",
        "loaderkit pull file://{here}/r r && loaderkit push r memory://r",
    ),
    "pulled by another": (
        "pull ok.lk file://{here}/r",
        "loaderkit pull file://{here}/r ok.lk",
    ),
    "no device": ("plan mine.py:MODEL 2 --device cuda:x", "cuda"),
    "no optimizer": ("plan mine.py:MODEL 2 --optimizer adma", "--optimizer adam"),
    "gone with the command": ("push ok.lk memory://r", "loaderkit push ok.lk file://"),
    "packed to be gone": ("pack pts memory://r", "loaderkit pack pts data.lk"),
    "half precision": ("plan mine.py:MODEL 2 --autocast fp16", "--autocast float16"),
    "of halves": ("plan mine.py:MODEL 2:fp16", "2:float16"),
    "loss alone": (
        "plan mine.py:MODEL 2 --loss mse_loss",
        "--loss torch.nn.functional:mse_loss",
    ),
    "class of losses": ("plan mine.py:MODEL 2 --loss torch.nn:L1Loss", "--loss NAME"),
    "no dtype": ("plan mine.py:MODEL 2 --autocast half8", "--autocast bfloat16"),
    "no loss": ("plan mine.py:MODEL 2 --loss mine.py:NUMBER", "--loss NAME"),
    "planned samples": ("plan mine.py:MODEL mine.py:SAMPLE", "data.py:samples"),
    "planned cache": ("plan mine.py:MODEL cut.lk", "pack SOURCE cut.lk --overwrite"),
    "planned sequences": (
        "plan mine.py:MODEL mine.py:RAGGED",
        "loaderkit pack DATA CACHE, and loaderkit plan MODEL CACHE",
    ),
    "the name of a log": ("explain name.txt", "loaderkit explain train.log"),
    "no folder for a page": ("inspect ok.lk --html no/x.html", "mkdir -p no"),
    "nothing to watch": ("watch", "loaderkit watch train.py"),
    "no text": ("explain nowhere.txt", "loaderkit explain error.txt"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed")
    (folder / "mine.py").write_text(_DATA)
    for name in ("pts", "unsafe"):
        (folder / name).mkdir()
    torch.save({"x": torch.ones(2)}, folder / "pts/0.pt")
    torch.save(_Own(), folder / "unsafe/0.pt")
    torch.save([1, 2], folder / "one.pt")
    (folder / "name.txt").write_text("train.log\n")
    (folder / "empty.txt").write_text("\n")
    loaderkit.pack(folder / "pts", folder / "ok.lk", workers=0)
    for name in ("cut", "torn"):
        shutil.copytree(folder / "ok.lk", folder / f"{name}.lk")
    [shard] = (folder / "cut.lk").glob("*.h5")
    shard.write_bytes(shard.read_bytes()[:100])
    (folder / "torn.lk/manifest.json").write_text("{}")
    return folder


class _Own:
    """A class that torch does not load without trust."""


def _words_of(use: str, folder: Path) -> list[str]:
    return shlex.split(use.replace("{here}", str(folder)))


def _calls_of_ours() -> re.Pattern[str]:
    """Match what Python calls of ours, and options of commands, look like."""
    functions = [name for name in loaderkit.__all__ if name.islower()]
    functions += ["PtFolder", "PackOptions", "push", "pull"]
    options: set[str] = set()
    for parser in build_parser()._subparsers._group_actions[0].choices.values():  # type: ignore[union-attr]
        options |= {action.dest for action in parser._actions if action.option_strings}
    calls = rf"(?<![\w.])(loaderkit\.)?({'|'.join(functions)})\("
    return re.compile(rf"{calls}|(?<![\w-])({'|'.join(sorted(options))})=")


_SLOW = {
    *("files run code", "no device"),
    *("no text", "the name of a log", "nothing to explain"),
}
"""Those that import PyG, or what reads messages."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in _SLOW else [])
        for name in _WRONG_USES
    ],
)
def test_a_fix_of_a_command_can_be_typed(
    folder: Path,
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    use, wanted = _WRONG_USES[name]

    status = main(_words_of(use, folder))
    told = capsys.readouterr()

    text = told.out + told.err
    if "--json" in use:
        answer: dict[str, Any] = json.loads(told.out)
        text = f"fix: {answer['fix']}"
    _, _, fix = text.partition("fix: ")
    assert status in {1, 2}
    assert wanted.replace("{here}", str(folder)) in fix
    assert not _calls_of_ours().search(fix)


def test_code_in_a_fix_would_be_seen() -> None:
    calls = _calls_of_ours()
    for fix in (
        "pack(source, path, overwrite=True)",
        "loaderkit.open_cache('a.lk')",
        "compression='gzip'",
        "pack(PtFolder(path), path)",
    ):
        assert calls.search(fix)
    assert not calls.search("loaderkit pack SOURCE a.lk --overwrite")
    assert not calls.search("torch.load('a.pt')")


def test_wrong_uses_are_of_every_command_that_can_fail() -> None:
    used = {use.split()[0] for use, _ in _WRONG_USES.values()}
    fail_never = {"demo", "doctor"}

    assert used | fail_never >= {command.name for command in COMMANDS}
