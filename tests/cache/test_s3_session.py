"""What a client of S3 is made from is a part of what botocore itself reads."""

import json
import re
from pathlib import Path

import pytest

from loaderkit.cache.object_store import ObjectStore
from loaderkit.cache.storage import Patience
from loaderkit.errors import CacheError, OptionError

pytestmark = pytest.mark.needs("s3")


def read_rules(loader):
    return loader.load_service_model("s3", "endpoint-rule-set-1")


def read_service(loader):
    return loader.load_service_model("s3", "service-2")


def read_endpoints(loader):
    return loader.load_data("endpoints")


def assert_is_part(part, whole):
    """See that dicts lack keys at most, and have the others in the same order."""
    if isinstance(whole, dict):
        assert list(part) == [name for name in whole if name in part]
        for name, value in part.items():
            assert_is_part(value, whole[name])
    elif isinstance(whole, list):
        assert len(part) == len(whole)
        for value, of_whole in zip(part, whole, strict=True):
            assert_is_part(value, of_whole)
    else:
        assert part == whole


@pytest.mark.slow
@pytest.mark.parametrize("read", [read_endpoints, read_service, read_rules])
def test_descriptions_are_a_part_of_those_of_botocore(read):
    from botocore.session import Session

    from loaderkit.cache.s3_session import make_session

    whole = read(Session().get_component("data_loader"))
    part = read(make_session().get_component("data_loader"))

    assert_is_part(part, whole)
    assert len(json.dumps(part)) > 20_000
    assert (len(json.dumps(part)) == len(json.dumps(whole))) == (read is read_rules)


@pytest.mark.slow
def test_no_description_that_is_kept_names_one_that_is_not():
    """By botocore's own classes, which look up each shape that they walk to."""
    from botocore.model import ServiceModel
    from botocore.session import Session

    from loaderkit.cache.s3_session import make_session

    def seen(session, names):
        loader = session.get_component("data_loader")
        model = ServiceModel(read_service(loader), "s3")
        shapes = {}
        todo = []
        for name in names or model.operation_names:
            operation = model.operation_model(name)
            todo += [operation.input_shape, operation.output_shape]
            todo += operation.error_shapes
        while todo:
            shape = todo.pop()
            if shape is None or shape.name in shapes:
                continue
            shapes[shape.name] = shape.documentation
            todo += getattr(shape, "members", {}).values()
            todo += [getattr(shape, name, None) for name in ("member", "key", "value")]
        return model.operation_names, shapes

    kept, shapes = seen(make_session(), None)

    assert seen(Session(), kept)[1] == shapes
    assert {"GetObject", "PutObject", "ListObjectsV2", "UploadPart"} <= set(kept)


@pytest.mark.slow
def test_what_s3fs_asks_of_s3_is_kept():
    """Every word of s3fs's source that is the name of an operation of S3."""
    import s3fs.core
    from botocore import xform_name
    from botocore.session import Session

    from loaderkit.cache.s3_session import make_session

    source = Path(s3fs.core.__file__).read_text()
    words = set(re.findall(r"[a-z0-9_]+", source))

    def operations(session):
        service = read_service(session.get_component("data_loader"))
        return {xform_name(name) for name in service["operations"]}

    asked = operations(Session()) & words
    assert len(asked) > 15
    assert asked <= operations(make_session())


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("service", ["s3", "sts", "sso", "sso-oidc"])
def test_clients_have_the_addresses_that_botocore_gives_them(service):
    from botocore.session import Session

    from loaderkit.cache.s3_session import make_session

    ours, botocores = Session(), Session()
    ours.register_component("data_loader", make_session().get_component("data_loader"))

    for region in ("us-east-1", "eu-central-1", "cn-north-1"):
        found = [
            session.create_client(
                service, region, aws_access_key_id="k", aws_secret_access_key="s"
            ).meta.endpoint_url
            for session in (ours, botocores)
        ]
        assert found[0] == found[1]


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


@pytest.mark.slow
def test_options_of_fsspec_itself_are_taken():
    options = {"use_listings_cache": True, "listings_expiry_time": 1, "max_paths": 2}
    store = ObjectStore(
        "s3://bucket/cache",
        {**options, "endpoint_url": "http://127.0.0.1:1", "key": "k", "secret": "s"},
        Patience(waits_s=()),
    )
    with pytest.raises(CacheError, match=r"127\.0\.0\.1:1"):
        store.read_file("manifest.json", 100)
