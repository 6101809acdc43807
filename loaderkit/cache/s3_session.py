"""What s3fs makes its clients with: told at once what no try helps, and smaller.

A client tries again by itself, five times, and s3fs that five times, also where a
certificate is refused or an address is none; ``ObjectStore`` does that seven times.  So
such errors end the client's own tries, and of others it makes ``FEW_TRIES``.

A client of S3 reads three descriptions of AWS, as JSON.  botocore makes
``OrderedDict``s of their objects, which were once the only dicts in order: 148,000
objects, 11.3 MiB.  As plain dicts they take 7.7, and a client is there in 0.19 s
instead of 0.26.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

from aiobotocore.session import AioSession
from botocore.exceptions import HTTPClientError, ProfileNotFound
from botocore.loaders import JSONFileLoader, Loader

from loaderkit.cache.store_answers import may_connect_soon

FEW_TRIES = {"retries": {"total_max_attempts": 3}}
"""What a client is configured with, where the user does not say.  Chosen: a part of a
large file is sent again without those before it, and a request whose every try fails
takes 3 s at most, behind which ``ObjectStore`` waits longer.  With its own five, and
s3fs's, a store that asks to slow down got 61 requests in a minute, and was then told as
one that gives no answer."""


class _PlainDictLoader(JSONFileLoader):  # type: ignore[misc]  # botocore has no types
    """Reads a description of a service."""

    def load_file(self, file_path: str) -> Any:
        """Read one; see ``JSONFileLoader``.

        Args:
            file_path: Without its suffix.

        Returns:
            What the file holds; None if there is none.
        """
        for suffix, open_file in ((".json", open), (".json.gz", gzip.open)):
            try:
                with open_file(f"{file_path}{suffix}", "rb") as file:
                    return json.load(file)
            except FileNotFoundError:
                continue
        return super().load_file(file_path)  # with suffixes of later releases


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
    loader = Loader(search_paths, file_loader=_PlainDictLoader())
    session.register_component("data_loader", loader)
    return session
