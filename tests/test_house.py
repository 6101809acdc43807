"""The rules of the house that no linter knows."""

import ast
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parents[1].glob("loaderkit/**/*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: "/".join(f.parts[-2:]))
def test_a_file_says_what_it_is_for(file):
    assert ast.get_docstring(ast.parse(file.read_text()))
