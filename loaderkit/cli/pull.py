"""``loaderkit pull``: copy a cache from an object store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.cli.command import (
    Command,
    add_storage_options,
    complete_files,
    storage_options,
)

if TYPE_CHECKING:
    import argparse

    from loaderkit.cache.transfer import Transfer


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="where it is, such as s3://bucket/molecules")
    cache = parser.add_argument("cache", help="the new cache's folder")
    complete_files(cache)
    add_storage_options(parser)


def _run_pull(options: argparse.Namespace) -> Transfer:
    from loaderkit.cache.transfer import pull

    return pull(options.url, options.cache, storage_options=storage_options(options))


COMMAND = Command(
    "pull", "copy a cache from a store", _add_arguments, _run_pull, cache="url"
)
