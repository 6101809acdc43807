"""What the tests of loaders share."""

import pytest
from data import Graphs

import loaderkit


@pytest.fixture(name="cache")
def packed(tmp_path):
    return Graphs(cache=tmp_path / "g.lk", packing=loaderkit.PackOptions(workers=0))
