"""Each example runs as it stands."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted(Path(__file__).parents[1].glob("examples/*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda f: f.stem)
def test_an_example_runs_and_prints(file, capsys):
    runpy.run_path(str(file), run_name="__main__")

    assert len(capsys.readouterr().out.splitlines()) >= 2
    assert len(file.read_text().splitlines()) <= 40
