"""Every kind of URL that fsspec knows works, or ends in an error of ours.

Nothing listens at the hosts of these URLs, and most libraries are not installed.
"""

import functools
from pathlib import Path

import fsspec
import pytest

from loaderkit import inspect_cache, open_cache, pack, verify
from loaderkit.cache.object_store import ObjectStore
from loaderkit.cache.remote import STORAGES, open_storage
from loaderkit.cache.storage import Patience
from loaderkit.cache.transfer import pull, push
from loaderkit.errors import LoaderkitError, OptionError

QUICK = Patience(request_s=5.0, waits_s=(0.01,), silent_tries=1)
PROTOCOLS = sorted(set(fsspec.available_protocols()) - {"file", "local"})
CHAINS = ["zip::ftp", "simplecache::http", "filecache::memory", "nosuch", "zip::nosuch"]
WORK = {"memory", "filecache::memory"}
WITHOUT_PASSWORDS = {"github", "hf"}
"""What looks like one there is the name of a repository."""


def open_quickly(url, options, _patience):
    return ObjectStore(url, options, QUICK)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return pack([1, 2, 3], tmp_path_factory.mktemp("c") / "a.lk", workers=0).cache


@pytest.fixture(autouse=True)
def no_cloud(monkeypatch):
    """Have S3's client neither look for credentials nor leave this machine."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:1")


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [*PROTOCOLS, *CHAINS])
def test_every_protocol_works_or_is_refused_in_our_words(
    protocol, packed, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(STORAGES, protocol, open_quickly)
    user = "" if protocol in WITHOUT_PASSWORDS else "me:secret@"
    url = f"{protocol}://{user}localhost:1/folder/{tmp_path.name}.lk"
    calls = {
        "push": functools.partial(push, packed, url),
        "open_cache": lambda: open_cache(url, mirror=tmp_path / "mirror")[0],
        "pull": functools.partial(pull, url, "pulled.lk"),
        "inspect_cache": functools.partial(inspect_cache, url),
        "pack": lambda: pack([1, 2, 3], url, workers=0, overwrite=True),
        "verify": functools.partial(verify, url),
    }

    answers = {name: answer_of(call) for name, call in calls.items()}

    found = answers["verify"]
    if protocol in WORK:
        assert not [error for error in answers.values() if is_error(error)]
        assert found.ok
        return
    if not is_error(found):  # it says what is damaged, or not there
        assert not found.ok
        assert "secret" not in str(answers.pop("verify"))
    for name, error in answers.items():
        assert isinstance(error, LoaderkitError), (name, error)
        assert f"{protocol}://" in error.what, (name, error)
        assert error.why, (name, error)
        assert error.fix, (name, error)
        assert "secret" not in str(error), (name, error)
    assert not any(tmp_path.glob(f"{protocol}*"))  # taken for a folder


def answer_of(call):
    try:
        return call()
    except Exception as error:  # noqa: BLE001 -- none but ours should come
        return error


def is_error(answer):
    return isinstance(answer, Exception)


BROKEN = ["{}:/bucket/a.lk", "{}//bucket/a.lk", "{}:bucket/a.lk"]


@pytest.mark.parametrize("scheme", ["s3", "gs", "abfs", "hf", "memory", "sftp"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_url_with_other_slashes_is_answered_with_the_url(scheme, broken):
    with pytest.raises(OptionError) as caught:
        open_storage(broken.format(scheme))

    assert caught.value.fix == f"url='{scheme}://bucket/a.lk'"


@pytest.mark.parametrize("path", ["a.lk", "./a.lk", "/data/a.lk", "s3/a.lk", "~/a.lk"])
def test_a_path_where_a_url_is_wanted_is_answered_with_its_url(path):
    with pytest.raises(OptionError) as caught:
        open_storage(path)

    meant = Path(path).expanduser().absolute()
    assert caught.value.fix == f"url='file://{meant}'"


def test_a_cache_is_pushed_to_the_url_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pack([{"x": 1}], "a.lk", workers=0)
    with pytest.raises(OptionError) as caught:
        push("a.lk", "copy of a.lk")

    push("a.lk", caught.value.fix.removeprefix("url=").strip("'"))

    assert list(open_cache("copy of a.lk")) == [{"x": 1}]
