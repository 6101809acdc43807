"""What s3fs makes its clients with: told at once what no try helps, and smaller.

A client tries again by itself, five times, and s3fs that five times, also where a
certificate is refused or an address is none; ``ObjectStore`` does that seven times.  So
such errors end the client's own tries, and of others it makes ``FEW_TRIES``.

A client of S3 reads three descriptions of AWS, as JSON.  botocore makes
``OrderedDict``s of their objects, which were once the only dicts in order: 148,000
objects, 11.3 MiB.  As plain dicts they take 7.7, and a client is there in 0.19 s
instead of 0.26.  Most of them are the addresses of 300 other services, and what nobody
asks of a file system, such as to analyse a bucket: without these they take 2.6.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiobotocore.session import AioSession
from botocore.exceptions import HTTPClientError, ProfileNotFound
from botocore.loaders import JSONFileLoader, Loader

from loaderkit.cache.store_answers import may_connect_soon

if TYPE_CHECKING:
    from collections.abc import Callable

FEW_TRIES = {"retries": {"total_max_attempts": 3}}
"""What a client is configured with, where the user does not say.  Chosen: a part of a
large file is sent again without those before it, and a request whose every try fails
takes 3 s at most, behind which ``ObjectStore`` waits longer.  With its own five, and
s3fs's, a store that asks to slow down got 61 requests in a minute, and was then told as
one that gives no answer."""


_ADDRESSES = ("s3", "sts", "sso", "portal.sso", "oidc", "signin")
"""What names of services begin with whose addresses are kept: S3, and those that give
credentials.  botocore makes up the address of another one by its rule."""
_OPERATIONS = (
    *("Get", "Put", "Head", "Copy", "Delete"),
    *("UploadPart", "Create", "Complete", "Abort", "List"),
)
"""What names of operations begin with that may be kept."""
_OF_BUCKETS = (
    *("CreateBucket", "DeleteBucket", "HeadBucket", "ListBuckets"),
    *("GetBucketLocation", "GetBucketVersioning", "PutBucketVersioning"),
    *("GetBucketAcl", "PutBucketAcl"),
)
"""Of those about buckets, and not about objects, what s3fs calls, and its like."""


class _SmallDescriptions(JSONFileLoader):  # type: ignore[misc]  # botocore has no types
    """Reads a description, and leaves out what no file system on S3 needs."""

    def load_file(self, file_path: str) -> Any:
        """Read one; see ``JSONFileLoader``.

        Args:
            file_path: Without its suffix.

        Returns:
            What the file holds; None if there is none.
        """
        path = Path(file_path)
        shorten: Callable[[Any], Any] | None = None
        if path.name == "endpoints":
            shorten = _keep_addresses
        elif path.name == "service-2" and path.parent.parent.name == "s3":
            shorten = _keep_operations
        for suffix, open_file in ((".json", open), (".json.gz", gzip.open)):
            try:
                with open_file(f"{file_path}{suffix}", "rb") as file:
                    description = json.load(file)
            except FileNotFoundError:
                continue
            return description if shorten is None else shorten(description)
        return super().load_file(file_path)  # with suffixes of later releases


def _keep_addresses(endpoints: dict[str, Any]) -> dict[str, Any]:
    """Leave out addresses of services that no file system on S3 asks.

    >>> aws = {"partition": "aws", "services": {"s3": {}, "sqs": {}, "sts": {}}}
    >>> _keep_addresses({"partitions": [aws]})["partitions"][0]["services"]
    {'s3': {}, 'sts': {}}
    """
    for partition in endpoints.get("partitions", []):
        services = partition.get("services", {})
        for name in list(services):
            if not name.startswith(_ADDRESSES):
                del services[name]
    return endpoints


def _keep_operations(service: dict[str, Any]) -> dict[str, Any]:
    """Leave out operations on buckets' settings, and the shapes that only they have.

    Args:
        service: botocore's description of S3.
    """
    operations, shapes = service.get("operations", {}), service.get("shapes", {})
    for name in list(operations):
        is_kept = name in _OF_BUCKETS or (
            name.startswith(_OPERATIONS) and "Bucket" not in name
        )
        if not is_kept:
            del operations[name]
    needed: set[str] = set()
    _note_shapes(list(operations.values()), shapes, needed)
    for name in list(shapes):
        if name not in needed:
            del shapes[name]
    return service


def _note_shapes(part: Any, shapes: dict[str, Any], needed: set[str]) -> None:
    """Note all shapes that a part of a description names, and those that they name."""
    if isinstance(part, list):
        for member in part:
            _note_shapes(member, shapes, needed)
    elif isinstance(part, dict):
        name = part.get("shape")
        if isinstance(name, str) and name in shapes and name not in needed:
            needed.add(name)
            _note_shapes(shapes[name], shapes, needed)
        for member in part.values():
            _note_shapes(member, shapes, needed)


def _end_hopeless_tries(
    caught_exception: BaseException | None = None, **_: object
) -> None:
    """Raise what a client would try again in vain.

    A handler of botocore's event ``needs-retry``; its own raise what they caught, too,
    where the tries are used up.
    """
    if caught_exception is None or may_connect_soon(caught_exception):
        return
    cause = caught_exception.__context__
    if isinstance(caught_exception, HTTPClientError) and cause is not None:
        # s3fs, too, tries these again, five times at two levels.
        raise cause
    raise caught_exception


def make_session(**options: Any) -> AioSession:
    """Make what s3fs makes its clients with.

    Args:
        **options: Of ``AioSession``, such as ``profile``: the name of one in the user's
            AWS configuration.

    Returns:
        The session.

    Raises:
        TypeError: There is no such option.
    """
    session = AioSession(**options)
    session.register("needs-retry.s3", _end_hopeless_tries)
    try:
        paths = session.get_config_variable("data_path") or ""
    except ProfileNotFound:
        return session  # the first request says so
    search_paths = [
        os.fspath(Path(os.path.expandvars(path)).expanduser())
        for path in paths.split(os.pathsep)
        if path
    ]
    loader = Loader(search_paths, file_loader=_SmallDescriptions())
    session.register_component("data_loader", loader)
    return session
