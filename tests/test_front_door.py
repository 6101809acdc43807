"""What a user sees on ``import loaderkit``."""

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
from loaderkit.budget.assertions import FitOptions
from loaderkit.budget.batch import PlanOptions
from loaderkit.budget.keywords import FitKeywords, PlanKeywords
from loaderkit.datasets.pack import PackKeywords
from loaderkit.loader.keywords import LoaderKeywords
from loaderkit.loader.options import LoaderOptions


def test_every_exported_name_can_be_loaded():
    assert all(getattr(loaderkit, name) is not None for name in loaderkit.__all__)
    assert dir(loaderkit) == sorted(loaderkit.__all__)


def test_the_table_of_homes_and_the_exports_agree():
    assert [*sorted(loaderkit._HOME), "__version__"] == loaderkit.__all__


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = loaderkit.nothing


def test_importing_loaderkit_imports_neither_torch_nor_h5py():
    code = (
        "import sys, loaderkit, loaderkit.cli.main; "
        "print({'torch', 'h5py'} & set(sys.modules))"
    )

    said = subprocess.check_output([sys.executable, "-c", code], text=True)

    assert said.strip() == "set()"


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
    assert {each.name for each in fields(checked)} == set(typed.__annotations__)


def test_type_checkers_know_the_options_of_pack():
    _, _, *options = inspect.signature(loaderkit.pack).parameters

    assert options == list(PackKeywords.__annotations__)
