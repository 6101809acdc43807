"""``loaderkit push``: copy a cache to an object store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.cli.command import (
    Command,
    add_storage_options,
    complete_files,
    refuse_memory_of_command,
    storage_options,
)

if TYPE_CHECKING:
    import argparse

    from loaderkit.cache.transfer import Transfer


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    cache = parser.add_argument("cache", help="the cache's folder")
    complete_files(cache)
    parser.add_argument("url", help="where it goes, such as s3://bucket/molecules")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a cache there"
    )
    add_storage_options(parser)


def _run_push(options: argparse.Namespace) -> Transfer:
    from loaderkit.cache.transfer import push

    fix = f"loaderkit push {options.cache} file:///a/folder/of/this/machine"
    refuse_memory_of_command(options.url, fix)
    return push(
        options.cache,
        options.url,
        storage_options=storage_options(options),
        overwrite=options.overwrite,
    )


COMMAND = Command(
    "push", "copy a cache to a store", _add_arguments, _run_push, cache="cache"
)
