"""The files of the room can be read from the bottom up: no two import each other."""

import ast
import graphlib
from pathlib import Path

import loaderkit.datasets

ROOM = Path(loaderkit.datasets.__file__).parent


class Imports(ast.NodeVisitor):
    """Finds the files of the room that a file imports when it runs, at any depth."""

    def __init__(self):
        self.names = set()

    def visit_If(self, node):
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_ImportFrom(self, node):
        room = "loaderkit.datasets"
        if node.module == room:
            self.names.update(alias.name for alias in node.names)
        elif node.module and node.module.startswith(room + "."):
            self.names.add(node.module.removeprefix(room + "."))


def imports_of(text):
    imports = Imports()
    imports.visit(ast.parse(text))
    return imports.names


def test_imports_of_files_make_no_circle_within_functions_either():
    graph = {
        file.stem: imports_of(file.read_text(encoding="utf-8"))
        for file in ROOM.glob("*.py")
    }

    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_an_import_within_a_function_is_found():
    text = "def f():\n    from loaderkit.datasets.open import open_cache\n"
    typing = "if TYPE_CHECKING:\n    from loaderkit.datasets.safe import SafeDataset\n"

    assert imports_of(text + typing) == {"open"}
