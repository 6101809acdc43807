"""The command line, called as a user calls it."""

import argparse
import importlib.util
import io
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from torch_geometric.data import Data

import loaderkit
from loaderkit.cache.layout import BUILDING
from loaderkit.cli.main import COMMANDS, build_parser, main
from loaderkit.cli.molecules import read_molecules
from loaderkit.habits import COMMANDS as HABITS_OF_COMMANDS


@pytest.fixture(autouse=True)
def own_module_path(monkeypatch):
    """The folder of a user's file is put in front, as Python does with a script's."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pt").mkdir()
    for i in range(9):
        sample = Data(
            x=torch.ones(i + 1, 2), edge_index=torch.zeros(2, i).long(), s="a"
        )
        torch.save(sample, tmp_path / "pt" / f"{i}.pt")
    return tmp_path / "pt"


def test_a_folder_is_packed_inspected_and_verified(folder, tmp_path, capsys):
    cache = str(tmp_path / "c.lk")

    assert (
        main(["pack", str(folder), cache, "--compression", "gzip", "--workers", "0"])
        == 0
    )
    packed = capsys.readouterr().out
    assert main(["inspect", cache, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert main(["verify", cache]) == 0

    assert "9 samples of Data" in packed
    assert "compressed with gzip" in packed
    assert "nodes a sample, mean 5.0" in packed
    assert [field["name"] for field in summary["fields"]] == ["x", "edge_index", "s"]
    assert summary["fields"][1]["shape"] == "[2, ?]"
    assert "sound; 9 samples" in capsys.readouterr().out


@pytest.mark.slow
def test_damage_is_status_1(folder, tmp_path, capsys):
    main(["pack", str(folder), str(tmp_path / "c.lk")])
    [shard] = (tmp_path / "c.lk").glob("*.h5")
    shard.write_bytes(shard.read_bytes()[:-9])
    capsys.readouterr()

    assert main(["verify", str(tmp_path / "c.lk"), "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["ok"]
    assert main(["inspect", str(tmp_path / "c.lk")]) == 1
    assert "fix: copy the cache again" in capsys.readouterr().err


def test_an_error_can_be_read_by_a_program(tmp_path, capsys):
    assert main(["inspect", str(tmp_path), "--json"]) == 1

    printed = json.loads(capsys.readouterr().out)

    assert printed["error"] == "CacheError"
    assert printed["fix"] == f"loaderkit pack SOURCE {tmp_path}"


def test_a_dataset_is_packed_by_its_name(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("SAMPLES = [{'a': 1}, {'a': 2}]\ndef make(): return SAMPLES\n")

    assert main(["pack", f"{file}:make", str(tmp_path / "a.lk")]) == 0
    assert main(["pack", f"{file}:SAMPLES", str(tmp_path / "b.lk")]) == 0
    assert main(["pack", "keyword:kwlist", str(tmp_path / "c.lk"), "--json"]) == 0
    assert "2 samples of dict" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["nothing:here", "string:nothing", "none.py:x"])
def test_a_dataset_that_is_not_there_is_named(tmp_path, capsys, name):
    assert main(["pack", name, str(tmp_path / "c.lk")]) == 1
    assert f"There is nothing called '{name}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [[], ["fly"], ["pack", "a", "b", "--shard-size", "big"], ["demo", "--epochs", "0"]],
)
def test_wrong_words_are_status_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
    assert "usage: loaderkit" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out == f"loaderkit {loaderkit.__version__}\n"


def commands():
    [choices] = [
        a.choices for a in build_parser()._actions if a.choices and "pack" in a.choices
    ]
    return choices


@pytest.mark.parametrize("name", commands())
def test_every_argument_has_help_and_every_command_json(name):
    actions = commands()[name]._actions

    assert [action.dest for action in actions if not action.help] == []
    assert "--json" in {word for action in actions for word in action.option_strings}


@pytest.mark.parametrize("name", commands())
def test_the_help_of_an_option_says_what_holds_without_it(name):
    options = [
        action
        for action in commands()[name]._actions
        if action.option_strings and action.nargs != 0
    ]

    assert [o.dest for o in options if "(default: " not in o.help] == []
    for option in options:
        if option.default is not None and option.default is not argparse.SUPPRESS:
            assert "(default: %(default)s)" in option.help


def test_the_exit_statuses_are_in_the_help(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])

    printed = capsys.readouterr().out
    for status in ("  0  done", "  1  bad news", "  2  wrong arguments"):
        assert status in printed


def test_completion_is_printed_or_says_what_it_needs(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "bash"])

    printed = capsys.readouterr()
    if importlib.util.find_spec("shtab") is None:
        assert ended.value.code == 2
        assert "pip install shtab" in printed.err
    else:
        assert ended.value.code == 0
        assert "explain" in printed.out


@pytest.mark.slow
def test_it_runs_as_a_module():
    printed = subprocess.check_output(
        [sys.executable, "-m", "loaderkit", "--help"], text=True
    )

    assert "demo" in printed


@pytest.mark.slow
def test_the_molecules_are_real():
    molecules = read_molecules()

    pentane = molecules[0]
    assert len(molecules) == 1282
    assert pentane.smiles == "CCCCC"
    assert pentane.x.shape == (5, 14)
    assert pentane.edge_index.shape == (2, 8)
    assert pentane.y.item() == pytest.approx(-3.18)


@pytest.mark.slow
def test_the_demo_packs_trains_and_compares(tmp_path, capsys, monkeypatch):
    molecules = read_molecules()
    assert len(molecules) == 1282
    # An eighth of the molecules: the demo is the same, and shorter.
    monkeypatch.setattr(
        "loaderkit.cli.molecule_demo.read_molecules", lambda: molecules[::8]
    )

    assert main(["demo", "--epochs", "3", "--keep", str(tmp_path / "demo")]) == 0

    printed = capsys.readouterr().out
    assert "161 molecules" in printed
    assert "loaderkit cache" in printed
    assert (tmp_path / "demo" / "molecules.lk" / "manifest.json").exists()


@pytest.mark.slow
def test_reading_in_each_way_gives_a_rate(tmp_path):
    from loaderkit.cli.molecule_demo import WAYS, Demo, Reading, measure_way, run_demo
    from loaderkit.datasets.pack import pack

    (tmp_path / "raw").mkdir()
    for number, molecule in enumerate(read_molecules()[:70]):
        torch.save(molecule, tmp_path / "raw" / f"{number}.pt")
    pack(tmp_path / "raw", tmp_path / "c.lk", workers=0)

    rates = [
        measure_way(way, str(tmp_path / "raw"), str(tmp_path / "c.lk"))[0]
        for way in WAYS
    ]

    assert min(rates) > 0
    demo = Demo(1, 1, 1, 1.0, 1.0, 1, 1.0, 1.0, (Reading("a", 1.0, 1),))
    assert demo.to_json()["readings"][0]["way"] == "a"
    with pytest.raises(ValueError, match="epochs must be at least 1"):
        run_demo(epochs=0)


def test_explain_reads_a_file_and_succeeds_whatever_it_says(tmp_path, capsys):
    log = tmp_path / "log.txt"
    log.write_text("RuntimeError: Invalid buffer size: 9.75 GB")

    assert main(["explain", str(log)]) == 0
    assert "requested 9.75 GiB" in capsys.readouterr().out
    log.write_text("KeyError: 7")
    assert main(["explain", "--json", str(log)]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "not memory"
    assert main(["explain", str(tmp_path / "gone")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_explain_reads_standard_input(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Killed"))

    assert main(["explain"]) == 0

    assert "Perhaps out of memory" in capsys.readouterr().out


def test_doctor_shows_limits_settings_and_the_plan(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for line in ("Processors: ", "Memory: ", "Mappings: ", "num_workers "):
        assert line in printed


@pytest.mark.slow
def test_doctor_finds_a_setting_that_torch_rejects():
    # In a process of its own: where torch has read its settings, as it may have here, a
    # variable that is changed is found to be changed too late, and no more.
    child = subprocess.run(
        [sys.executable, "-m", "loaderkit", "doctor", "--json"],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:8"},
        capture_output=True,
        check=False,
    )

    findings = json.loads(child.stdout)["environment"]["findings"]
    assert child.returncode == 1
    assert 7 in [finding["number"] for finding in findings]


MODEL = """
import torch
class Small(torch.nn.Sequential):
    def __init__(self):
        layers = torch.nn.Linear(7, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        super().__init__(*layers)
ready = Small()
data = [torch.zeros(7)] * 40
class Graphs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 4)
    def forward(self, data):
        return self.inner(data.x)
def loss(out):
    return out.sum()
"""


@pytest.mark.slow
def test_plan_takes_a_model_and_shapes_a_dataset_or_a_cache(tmp_path, folder, capsys):
    code = tmp_path / "code.py"
    code.write_text(MODEL)
    assert main(["plan", f"{code}:Small", "80x7", "--limit", "1GiB"]) == 0
    assert "A (balanced)  32 samples x 1" in capsys.readouterr().out

    asked = ["--device", "mps", "--limit", "1KiB", "--loss", f"{code}:loss"]
    assert main(["plan", f"{code}:ready", f"{code}:data", *asked]) == 1
    assert "nothing fits" in capsys.readouterr().out

    assert main(["pack", str(folder), str(tmp_path / "c.lk")]) == 0
    capsys.readouterr()
    asked = ["--batch-size", "4", "--limit", "1GiB", "--json"]
    assert main(["plan", f"{code}:Graphs", str(tmp_path / "c.lk"), *asked]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["configurations"][0]["budget"]["max_nodes"] > 4


def test_a_plan_that_cannot_be_made_says_why(tmp_path, capsys):
    code = tmp_path / "code.py"
    code.write_text(MODEL)

    assert main(["plan", f"{code}:Small", "7:int65"]) == 2
    assert "no type of tensor" in capsys.readouterr().err
    assert main(["plan", f"{code}:Large", "7"]) == 1
    assert "nothing called" in capsys.readouterr().err


@pytest.mark.parametrize("word", sorted(HABITS_OF_COMMANDS))
def test_a_command_that_there_is_not_is_answered_with_what_does_it(word, capsys):
    with pytest.raises(SystemExit) as ended:
        main([word, "a.lk"])
    message = capsys.readouterr().err

    assert ended.value.code == 2
    assert HABITS_OF_COMMANDS[word] in message
    command = re.search(r"use '(\w+)'", message)
    function = re.search(r"Python: loaderkit\.(\w+)\(", message)
    if command:
        assert command[1] in {known.name for known in COMMANDS}
    else:
        assert function[1] in loaderkit.__all__


def test_an_unknown_command_is_not_said_to_stand_in_the_wrong_place(capsys):
    with pytest.raises(SystemExit):
        main(["xylophone"])

    assert "behind" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("pack {file} new.lk", "loaderkit pack {file}:NAME new.lk"),
        ("plan {file}:MODEL 1xx3", "such as 80x7"),
        ("plan MODEL 80x7", "check the name"),
        ("pack half.lk new.lk", "run that one again"),
    ],
)
def test_what_names_no_data_is_answered(words, fix, tmp_path, monkeypatch, capsys):
    file = tmp_path / "data_of_main.py"
    file.write_text("import torch\nMODEL = torch.nn.Linear(3, 3)\n")
    (tmp_path / "half.lk").mkdir()
    (tmp_path / "half.lk" / BUILDING).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    status = main(words.format(file=file).split())

    assert status == 1
    assert fix.format(file=file) in capsys.readouterr().err
