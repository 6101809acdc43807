"""Examples of README and docstrings run in a folder of their own: they write files."""

import pytest


@pytest.fixture(autouse=True)
def _examples_have_a_folder(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(tmp_path_factory.mktemp("example"))
