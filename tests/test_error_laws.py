"""Every error that the package makes says what, why and what to do."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WHOLE_IN_ONE_TEXT = {
    # A report that has grown, who holds it and the line to change.
    ("loaderkit/leaks/checks.py", "LeakError"),
    ("loaderkit/leaks/run.py", "LeakError"),
    # The traceback of a user's error that cannot be sent.
    ("loaderkit/loader/failures.py", "LoaderError"),
}


def errors_of_ours(trees):
    """Name LoaderkitError and all classes below it, wherever they are defined."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    ours = {"LoaderkitError"}
    while below := {name for name in bases if bases[name] & ours} - ours:
        ours |= below
    return ours


def errors_without_parts(trees):
    """Say where an error of ours is made without a why or a fix."""
    ours = errors_of_ours(trees)
    complaints = []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            if name not in ours or (file, name) in WHOLE_IN_ONE_TEXT:
                continue
            given = {
                keyword.arg
                for keyword in node.keywords
                if ast.unparse(keyword.value) not in {"''", "None"}
            }
            complaints += [
                f"{file}:{node.lineno}: {name} without {part}"
                for part in sorted({"why", "fix"} - given)
            ]
    return complaints


@pytest.mark.slow
def test_every_error_says_why_and_what_to_do():
    trees = {
        file.relative_to(ROOT).as_posix(): ast.parse(file.read_text())
        for file in sorted(ROOT.glob("loaderkit/**/*.py"))
    }

    assert errors_without_parts(trees) == []


def test_an_error_without_a_part_would_be_seen():
    text = """
class OwnError(errors.DatasetError):
    pass
class DatasetError(LoaderkitError):
    pass
raise OwnError(message, why="x")
raise DatasetError(message, why="", fix="y")
raise DatasetError(message, why=why, fix=fix)
raise ValueError(message)
"""

    assert errors_without_parts({"a.py": ast.parse(text)}) == [
        "a.py:6: OwnError without fix",
        "a.py:7: DatasetError without why",
    ]
