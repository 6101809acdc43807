"""What a user sees on ``import loaderkit``."""

import ast
import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

import loaderkit
from loaderkit import pack
from loaderkit.budget.batch.assertions import FitOptions
from loaderkit.budget.batch.plan import PlanOptions
from loaderkit.budget.keywords import FitKeywords, PlanKeywords
from loaderkit.datasets.pack import PackKeywords, PackOptions
from loaderkit.loader.keywords import LoaderKeywords
from loaderkit.loader.options import LoaderOptions


def test_every_exported_name_can_be_loaded():
    assert all(getattr(loaderkit, name) is not None for name in loaderkit.__all__)
    assert dir(loaderkit) == sorted(loaderkit.__all__)


def test_a_type_checker_reads_the_names_that_a_program_finds():
    stub = Path(loaderkit.__file__).with_suffix(".pyi")
    statements = ast.parse(stub.read_text(encoding="utf-8")).body

    imports = [line for line in statements if isinstance(line, ast.ImportFrom)]
    assert sorted(name.name for line in imports for name in line.names) == dir(
        loaderkit
    )


def test_the_door_is_narrow():
    """Results, options and errors are reached through their rooms."""
    names = [getattr(loaderkit, name) for name in loaderkit.__all__]

    functions_and_classes = [item for item in names if not inspect.ismodule(item)]
    assert len(functions_and_classes) <= 30
    assert "LeakReport" not in loaderkit.__all__


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'") as raised:
        _ = loaderkit.nothing

    assert "help(loaderkit) lists what there is" in str(raised.value)


@pytest.mark.slow
def test_importing_loaderkit_imports_neither_torch_nor_h5py():
    code = (
        "import sys, loaderkit, loaderkit.cli.main; "
        "print({'torch', 'h5py'} & set(sys.modules))"
    )

    printed = subprocess.check_output([sys.executable, "-c", code], text=True)

    assert printed.strip() == "set()"


@pytest.mark.slow
def test_pyg_is_imported_once_a_sample_is_of_it_and_not_before(tmp_path):
    graphs = [
        Data(x=torch.ones(i + 1, 2), edge_index=torch.zeros(2, i, dtype=torch.long))
        for i in range(4)
    ]
    pack(graphs, tmp_path / "graphs.lk", workers=0)
    (tmp_path / "graphs").mkdir()
    for number, graph in enumerate(graphs):
        torch.save(graph, tmp_path / "graphs" / f"{number}.pt")
    code = "import sys, start_up; print(start_up.main(sys.argv[1]))"

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).parent / "datasets",
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout == "PyG came with the graphs\n", done.stderr[-2000:]


@pytest.mark.parametrize(
    ("checked", "typed"),
    [
        (LoaderOptions, LoaderKeywords),
        (PlanOptions, PlanKeywords),
        (FitOptions, FitKeywords),
    ],
)
def test_type_checkers_know_the_options_that_are_checked(checked, typed):
    assert {field.name for field in fields(checked)} == set(typed.__annotations__)


def test_type_checkers_know_the_options_of_pack():
    _, _, *options = inspect.signature(loaderkit.pack).parameters

    assert options == list(PackKeywords.__annotations__)


def test_pack_has_each_of_its_options_with_the_same_default_and_type():
    parameters = inspect.signature(loaderkit.pack).parameters

    for option in fields(PackOptions):
        assert parameters[option.name].default == option.default
        assert parameters[option.name].annotation == option.type
        assert PackKeywords.__annotations__[option.name].__forward_arg__ == option.type
