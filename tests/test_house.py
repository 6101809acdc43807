"""The rules of the house that no linter knows."""

import ast
import functools
import graphlib
import itertools
import re
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1] / "loaderkit"
FILES = sorted(HOUSE.glob("**/*.py"))
ROOMS = [file.parent for file in FILES if file.name == "__init__.py"]
TESTS = sorted(Path(__file__).parent.glob("**/*.py"))
WAITS = {"communicate", "get", "join", "result", "run", "wait", "wait_procs"}
"""Calls that take a deadline: of processes, threads, events, queues and futures."""


@functools.cache
def tree_of(file):
    return ast.parse(file.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda f: "/".join(f.parts[-2:]))
def test_a_file_says_what_it_is_for(file):
    assert ast.get_docstring(tree_of(file))


@pytest.mark.slow
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
    return {name.partition(".")[0] for name in modules_imported(tree)}


def modules_imported(tree):
    """Name what code imports when it runs: modules, and what it takes from them."""
    if isinstance(tree, ast.Import):
        return {alias.name for alias in tree.names}
    if isinstance(tree, ast.ImportFrom):
        return {tree.module, *(f"{tree.module}.{alias.name}" for alias in tree.names)}
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        children = tree.orelse
    else:
        children = ast.iter_child_nodes(tree)
    return set().union(*map(modules_imported, children))


def refuse_circles(trees):
    """Raise CycleError where files import each other, at the top or inside functions.

    Args:
        trees: By the name of the module.
    """
    graph = {
        name: modules_imported(tree) & trees.keys() - {name}
        for name, tree in trees.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.slow
def test_files_can_be_read_from_the_bottom_up():
    parts = {
        file: file.relative_to(HOUSE.parent).with_suffix("").parts for file in FILES
    }
    names = {file: ".".join(parts[file]).removesuffix(".__init__") for file in FILES}

    refuse_circles({names[file]: tree_of(file) for file in FILES})


def test_a_circle_through_functions_is_seen():
    one = "def open():\n    from a.pack import pack\n"
    other = "if TYPE_CHECKING:\n    import a.open\nelse:\n    from a import open\n"

    with pytest.raises(graphlib.CycleError):
        refuse_circles({"a.open": ast.parse(one), "a.pack": ast.parse(other)})
    refuse_circles({"a.open": ast.parse(one), "a.pack": ast.parse("import a")})


@pytest.mark.slow
@pytest.mark.parametrize("file", TESTS, ids=lambda f: "/".join(f.parts[-2:]))
def test_no_assert_of_the_tests_has_an_escape_and_no_wait_a_deadline(file):
    assert escapes_and_deadlines(tree_of(file)) == []


def test_an_escape_and_a_deadline_are_seen():
    text = """
assert found == 3 or not found
assert found in (x or y)
assert all(part or other for part in parts)
assert found == 3, name or "no name"
child.join(120)
child.join()
child.join(0.01)
", ".join(names)
subprocess.run(command, timeout=60)
done.wait(timeout=limit_s)
"""

    assert escapes_and_deadlines(ast.parse(text)) == [
        "line 2: an assert with `or`",
        "line 3: an assert with `or`",
        "line 4: an assert with `or`",
        "line 6: join() with a deadline",
        "line 10: run() with a deadline",
        "line 11: wait() with a deadline",
    ]


def escapes_and_deadlines(tree):
    """Say where a test could pass though its point fails, or fail on a busy machine.

    The runner's own deadline, ``faulthandler_timeout``, ends what hangs.
    """
    complaints = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and has_or(node.test):
            complaints.append((node.lineno, "an assert with `or`"))
        if isinstance(node, ast.Call) and has_deadline(node):
            complaints.append((node.lineno, f"{node.func.attr}() with a deadline"))
    return [f"line {line}: {complaint}" for line, complaint in sorted(complaints)]


def has_or(expression):
    """Whether one of several conditions would do."""
    return any(isinstance(node, ast.Or) for node in ast.walk(expression))


def has_deadline(call):
    """Whether a call that waits gives up after some seconds.

    ``join(0.01)`` does not: it is a look, in a loop that goes on.
    """
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in WAITS:
        return False
    if any(keyword.arg == "timeout" for keyword in call.keywords):
        return True
    match call.args:
        case [ast.Constant(value=int() | float() as seconds)]:
            return call.func.attr == "join" and seconds >= 1
    return False


def is_text(node):
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def texts_about_nothing(tree):
    """List the lines of texts that stand behind no assignment, and begin no body."""
    lines = []
    for node in ast.walk(tree):
        body = getattr(node, "body", [])
        for before, after in itertools.pairwise(body if isinstance(body, list) else []):
            is_about_it = isinstance(before, ast.Assign | ast.AnnAssign)
            if is_text(after) and not is_about_it:
                lines.append(after.lineno)
    return lines


def texts_cut_by_a_condition(tree):
    """List the lines of texts of several lines that a condition takes as a whole.

    ``"a" "b" if c else ""`` is "" where c is not, and looks as if it were "a".
    """
    return [
        part.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.IfExp)
        for part in (node.body, node.orelse)
        if isinstance(part, ast.JoinedStr | ast.Constant)
        and part.lineno != part.end_lineno
    ]


@pytest.mark.slow
@pytest.mark.parametrize("find", [texts_about_nothing, texts_cut_by_a_condition])
def test_no_text_stands_where_it_is_not_read_or_not_whole(find):
    assert {str(file): lines for file in FILES if (lines := find(tree_of(file)))} == {}


def test_a_text_that_is_about_nothing_or_not_whole_is_seen():
    text = '''
"""What the file is for."""
LIMIT = 3
"""Chosen."""
"""About something that was removed."""
why = "known"
why = (
    f"{name} is skipped"
    f": probably {near} is meant"
    if near
    else ""
)
'''

    assert texts_about_nothing(ast.parse(text)) == [5]
    assert texts_cut_by_a_condition(ast.parse(text)) == [8]


ONE_CLASS_OF_SEVERAL_LIBRARIES = {"LeakCallback", "WholeEpochs"}
"""The same things for each trainer, under the names that their users look for."""


def names_of_several_classes(trees):
    """List the names that classes of different files share."""
    names = [
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    ]
    return {name for name in names if names.count(name) > 1}


@pytest.mark.slow
def test_no_two_classes_have_one_name():
    shared_names = names_of_several_classes(map(tree_of, FILES))

    assert shared_names == ONE_CLASS_OF_SEVERAL_LIBRARIES


def test_a_name_of_two_classes_is_seen():
    one, other = (
        ast.parse("class Row: ...\nclass Table: ..."),
        ast.parse("class Row: ..."),
    )

    assert names_of_several_classes([one, other]) == {"Row"}


def reading_order_of(room):
    """Give the text that says which files a room has, in reading order."""
    if room == HOUSE:
        contributing = (HOUSE.parent / "CONTRIBUTING.md").read_text()
        return contributing.partition("```\n")[2].partition("```")[0]
    return ast.get_docstring(tree_of(room / "__init__.py"))


def unnamed_in(text, room):
    """List the files and rooms of a room that a text about it does not name."""
    words = set(re.findall(r"\w+", text))
    modules = [
        file.stem for file in room.glob("*.py") if not file.stem.startswith("__")
    ]
    rooms = [inner.parent.name for inner in room.glob("*/__init__.py")]
    return sorted({*modules, *rooms} - words)


def strangers_in(text, room):
    """List the files that a text names, by their ending, and the room lacks."""
    named = re.findall(r"(?<![\w/])(\w+)\.py\b", text)
    return sorted(name for name in named if not (room / f"{name}.py").exists())


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_says_which_files_it_has(room):
    text = reading_order_of(room)

    assert unnamed_in(text, room) == []
    assert strangers_in(text, room) == []


def test_a_file_that_its_room_does_not_name_is_seen(tmp_path):
    for name in ("__init__.py", "store.py", "hdf5.py", "inner/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    assert unnamed_in("Read store.py first.", tmp_path) == ["hdf5", "inner"]
    assert strangers_in("Read store.py first, then layout.py.", tmp_path) == ["layout"]
