"""What a user sees on ``import loaderkit``."""

import subprocess
import sys

import pytest

import loaderkit


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
