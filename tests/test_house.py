"""The rules of the house that no linter knows."""

import ast
import functools
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parents[1].glob("loaderkit/**/*.py"))


@functools.cache
def tree_of(file):
    return ast.parse(file.read_text())


@pytest.mark.parametrize("file", FILES, ids=lambda f: "/".join(f.parts[-2:]))
def test_a_file_says_what_it_is_for(file):
    assert ast.get_docstring(tree_of(file))


def test_pyg_is_imported_by_one_module_and_the_demo_alone():
    importing = {
        file.name
        for file in FILES
        if "torch_geometric" in imported_at_run_time(tree_of(file))
    }

    assert importing == {"pyg.py", "molecule_demo.py", "molecules.py"}


def test_imports_for_types_alone_are_told_from_others():
    text = """
if TYPE_CHECKING:
    from a.b import C
else:
    import d.e
def load():
    from f import g
"""

    assert imported_at_run_time(ast.parse(text)) == {"d", "f"}


def imported_at_run_time(tree):
    """Name the libraries that code imports, at its top or inside functions."""
    if isinstance(tree, ast.Import):
        return {alias.name.partition(".")[0] for alias in tree.names}
    if isinstance(tree, ast.ImportFrom):
        return {tree.module.partition(".")[0]}
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        children = tree.orelse
    else:
        children = ast.iter_child_nodes(tree)
    return set().union(*map(imported_at_run_time, children))
