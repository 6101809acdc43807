"""The rules of the house that no linter knows."""

import ast
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parents[1].glob("loaderkit/**/*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: "/".join(f.parts[-2:]))
def test_a_file_fits_in_the_head(file):
    source = file.read_text()
    tree = ast.parse(source)

    assert len(source.splitlines()) <= 400
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= 40, f"{node.name} has {lines} lines"
