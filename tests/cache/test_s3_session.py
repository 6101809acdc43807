"""What a client of S3 is made from is what botocore itself reads."""

import json

import pytest

from loaderkit.cache.object_store import ObjectStore
from loaderkit.cache.storage import Patience
from loaderkit.errors import CacheError, OptionError

pytestmark = pytest.mark.needs("s3")


def as_json(session, read):
    # With the order of keys, which equality of dicts leaves out.
    return json.dumps(read(session.get_component("data_loader")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "read",
    [
        lambda loader: loader.load_data("endpoints"),
        lambda loader: loader.load_service_model("s3", "service-2"),
        lambda loader: loader.load_service_model("s3", "endpoint-rule-set-1"),
    ],
    ids=["endpoints", "service", "rules"],
)
def test_descriptions_are_those_of_botocore(read):
    from botocore.session import Session

    from loaderkit.cache.s3_session import make_session

    assert as_json(make_session(), read) == as_json(Session(), read)


def test_descriptions_of_the_users_own_are_read(monkeypatch, tmp_path):
    from loaderkit.cache.s3_session import make_session

    (tmp_path / "endpoints.json").write_text('{"of": "the user"}')
    monkeypatch.setenv("AWS_DATA_PATH", str(tmp_path))

    loader = make_session().get_component("data_loader")

    assert loader.load_data("endpoints") == {"of": "the user"}


def test_a_profile_that_is_missing_is_said_by_the_first_request(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    store = ObjectStore(
        "s3://bucket/cache", {"profile": "nobody"}, Patience(waits_s=())
    )
    with pytest.raises(CacheError, match="nobody") as raised:
        store.read_file("manifest.json", 100)
    assert "s3://bucket/cache" in str(raised.value)


@pytest.mark.parametrize("name", ["endpiont_url", "sceret", "max_concurency"])
def test_an_option_that_s3fs_would_refuse_is_refused(name):
    import s3fs

    system = s3fs.S3FileSystem(skip_instance_cache=True, **{name: "x"})
    with pytest.raises(TypeError, match=name):
        system.connect()

    with pytest.raises(OptionError, match=name):
        ObjectStore("s3://bucket/cache", {name: "x"})


def test_options_of_fsspec_itself_are_taken():
    options = {"use_listings_cache": True, "listings_expiry_time": 1, "max_paths": 2}
    store = ObjectStore(
        "s3://bucket/cache",
        {**options, "endpoint_url": "http://127.0.0.1:1", "key": "k", "secret": "s"},
        Patience(waits_s=()),
    )
    with pytest.raises(CacheError, match=r"127\.0\.0\.1:1"):
        store.read_file("manifest.json", 100)
