"""What is named module:name or file.py:name."""

import subprocess
import sys

import pytest

from loaderkit.cli.main import main
from loaderkit.cli.named_objects import named_object
from loaderkit.errors import LoaderkitError


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder in which somebody works: my_data.py imports helpers_of_data.py."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "helpers_of_data.py").write_text("SAMPLES = [{'a': 1}, {'a': 2}]\n")
    (folder / "my_data.py").write_text("from helpers_of_data import SAMPLES\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield folder
    for name in ("helpers_of_data", "my_data"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["my_data:SAMPLES", "my_data.py:SAMPLES"])
def test_code_of_the_current_folder_is_found_with_what_it_imports(
    project, monkeypatch, name
):
    monkeypatch.chdir(project)

    assert named_object(name) == [{"a": 1}, {"a": 2}]


def test_a_file_elsewhere_finds_what_lies_beside_it(project):
    assert named_object(f"{project / 'my_data.py'}:SAMPLES") == [{"a": 1}, {"a": 2}]


@pytest.mark.slow
def test_the_installed_command_finds_modules_of_the_current_folder(project):
    # An installed command has its own folder in sys.path, and not the current one.
    code = "import sys; sys.path.pop(0); from loaderkit.cli.main import main; main()"

    done = subprocess.run(
        [sys.executable, "-c", code, "pack", "my_data:SAMPLES", "data.lk"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )

    assert "2 samples of dict" in done.stdout


def test_the_nearest_name_is_offered(project):
    with pytest.raises(LoaderkitError) as raised:
        named_object(f"{project / 'my_data.py'}:SAMPLE")

    assert raised.value.fix == "did you mean 'SAMPLES'?"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("[].nothing", AttributeError),
        ("import nothing_of_that_name", ModuleNotFoundError),
        ("open('nothing.txt')", FileNotFoundError),
        ("from json import nothing", ImportError),
    ],
)
@pytest.mark.parametrize("name", ["my_data:SAMPLES", "{folder}/my_data.py:SAMPLES"])
def test_an_error_of_the_users_own_code_reaches_its_user_whole(
    project, monkeypatch, code, error, name
):
    monkeypatch.chdir(project)
    (project / "my_data.py").write_text(code)

    with pytest.raises(error) as raised:
        main(["pack", name.format(folder=project), str(project / "c.lk")])

    assert not isinstance(raised.value, LoaderkitError)


@pytest.mark.parametrize("name", [":x", "nothing:x", "json.nothing:x", "none.py:x"])
def test_what_is_not_there_is_named(name):
    with pytest.raises(LoaderkitError, match="There is nothing called"):
        named_object(name)
