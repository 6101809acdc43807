"""``loaderkit verify``: hash every file of a cache again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.cli.command import Command, add_cache_argument, storage_options

if TYPE_CHECKING:
    import argparse

    from loaderkit.cache.verify import Verification


def _run_verify(options: argparse.Namespace) -> Verification:
    from loaderkit.cache.verify import verify

    return verify(options.cache, storage_options=storage_options(options))


COMMAND = Command(
    "verify",
    "hash a cache again",
    add_cache_argument,
    _run_verify,
    bad_news="the cache is damaged",
    cache="cache",
)
