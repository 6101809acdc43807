"""What a client of S3 is made from is what botocore itself reads."""

import json

import pytest

from loaderkit.cache.object_store import ObjectStore
from loaderkit.cache.storage import Patience
from loaderkit.errors import CacheError

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

    assert as_json(make_session(None), read) == as_json(Session(), read)


def test_descriptions_of_the_users_own_are_read(monkeypatch, tmp_path):
    from loaderkit.cache.s3_session import make_session

    (tmp_path / "endpoints.json").write_text('{"of": "the user"}')
    monkeypatch.setenv("AWS_DATA_PATH", str(tmp_path))

    loader = make_session(None).get_component("data_loader")

    assert loader.load_data("endpoints") == {"of": "the user"}


def test_a_profile_that_is_missing_is_said_by_the_first_request(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    store = ObjectStore(
        "s3://bucket/cache", {"profile": "nobody"}, Patience(waits_s=())
    )
    with pytest.raises(CacheError, match="nobody") as raised:
        store.read_file("manifest.json", 100)
    assert "s3://bucket/cache" in str(raised.value)
