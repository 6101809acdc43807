"""``loaderkit inspect``: what is in a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.cli.command import Command, add_cache_argument, storage_options

if TYPE_CHECKING:
    import argparse

    from loaderkit.datasets.inspect import CacheSummary


def _run_inspect(options: argparse.Namespace) -> CacheSummary:
    from loaderkit.datasets.inspect import inspect_cache

    return inspect_cache(options.cache, storage_options=storage_options(options))


COMMAND = Command(
    "inspect",
    "what is in a cache",
    add_cache_argument,
    _run_inspect,
    has_page=True,
    cache="cache",
)
