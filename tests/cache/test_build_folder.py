"""A folder is looked at while another process packs in it, and finishes."""

import json
import shutil
from pathlib import Path

import pytest

from loaderkit import pack
from loaderkit.cache.build_folder import PLAN, make_or_check_folder
from loaderkit.cache.layout import BUILDING, MANIFEST
from loaderkit.errors import CacheError


class ListedMeanwhile(type(Path())):
    """A folder in which something happens after so many names were listed.

    What is gone by then is not listed any more, and what came may not be.
    """

    happens = None
    after = 0
    is_reversed = False

    def iterdir(self):
        names = sorted(entry.name for entry in super().iterdir())
        if type(self).is_reversed:
            names.reverse()
        for count, name in enumerate([*names, None]):
            if count == type(self).after and type(self).happens is not None:
                happens, type(self).happens = type(self).happens, None
                happens()
            if name is not None and (Path(self) / name).exists():
                yield self / name


@pytest.fixture
def finish(tmp_path):
    """Give what ends a build in a folder that has its shards already."""
    pack([{"x": number} for number in range(4)], tmp_path / "c", workers=0)
    folder = tmp_path / "c"
    manifest = (folder / MANIFEST).rename(tmp_path / "manifest")
    (folder / BUILDING).mkdir()
    plan = {"fingerprint": {}, "samples": 4}
    (folder / BUILDING / PLAN).write_text(json.dumps(plan))

    def end_build():
        manifest.rename(folder / MANIFEST)
        shutil.rmtree(folder / BUILDING)

    return end_build


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("after", range(5))
def test_a_cache_that_is_finished_meanwhile_is_one(
    after, is_reversed, finish, tmp_path, monkeypatch
):
    for name, value in {"after": after, "is_reversed": is_reversed}.items():
        monkeypatch.setattr(ListedMeanwhile, name, value)
    monkeypatch.setattr(ListedMeanwhile, "happens", staticmethod(finish))

    make_or_check_folder(ListedMeanwhile(tmp_path / "c"))

    assert (tmp_path / "c" / MANIFEST).exists() == (ListedMeanwhile.happens is None)


@pytest.mark.parametrize("is_written_to", [False, True])
def test_a_folder_of_others_is_refused_also_while_they_write_to_it(
    is_written_to, tmp_path, monkeypatch
):
    (tmp_path / "photo.jpg").touch()
    count = iter(range(1000))

    def write():
        (tmp_path / f"photo {next(count)}.jpg").touch()
        ListedMeanwhile.happens = staticmethod(write)

    if is_written_to:
        monkeypatch.setattr(ListedMeanwhile, "happens", staticmethod(write))

    with pytest.raises(CacheError, match="which is not a cache's"):
        make_or_check_folder(ListedMeanwhile(tmp_path))
