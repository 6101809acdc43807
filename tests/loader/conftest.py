"""What the tests of loaders share."""

import pytest
from data import Graphs

from loaderkit.datasets.pack import PackOptions


@pytest.fixture(name="cache")
def packed(tmp_path):
    return Graphs(cache=tmp_path / "g.lk", packing=PackOptions(workers=0))
