"""``loaderkit pack``: make a cache of a folder of files, or of a dataset."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderkit.cache.storage import is_url
from loaderkit.cli.command import (
    Command,
    add_storage_options,
    byte_size,
    complete_files,
    refuse_memory_of_command,
    storage_options,
)
from loaderkit.cli.named_objects import HOW_TO_NAME, named_dataset
from loaderkit.errors import LoaderkitError

if TYPE_CHECKING:
    from loaderkit.datasets.inspect import CacheSummary


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument(
        "source",
        help="a folder of .pt files, or module:name or file.py:name of a dataset",
    )
    complete_files(source)
    cache = parser.add_argument("cache", help="the cache's folder, or a URL")
    complete_files(cache)
    add_storage_options(parser)
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that read samples (default: one a CPU, at most 4)",
    )
    parser.add_argument(
        "--compression",
        metavar="NAME",
        help="gzip, lzf, or a filter of hdf5plugin (default: none)",
    )
    parser.add_argument(
        "--shard-size",
        dest="shard_bytes",
        type=byte_size,
        default=argparse.SUPPRESS,
        metavar="SIZE",
        help="bytes after which a file is finished (default: 256MiB)",
    )
    parser.add_argument(
        "--pattern",
        default="*.pt",
        metavar="GLOB",
        help="which files of the folder (default: %(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a cache")
    parser.add_argument(
        "--unsafe-pickle", action="store_true", help="let the .pt files run code"
    )


def _run_pack(options: argparse.Namespace) -> CacheSummary:
    from loaderkit.datasets.inspect import inspect_cache
    from loaderkit.datasets.pack import PackOptions, pack

    fix = f"loaderkit pack {options.source} data.lk"
    refuse_memory_of_command(options.cache, fix)
    # What the command line does not say has the default that PackOptions gives it.
    names = {field.name for field in dataclasses.fields(PackOptions)}
    chosen = {name: value for name, value in vars(options).items() if name in names}
    pack(
        _open_source(options),
        options.cache,
        storage_options=storage_options(options),
        **chosen,
    )
    return inspect_cache(options.cache, storage_options=storage_options(options))


def _open_source(options: argparse.Namespace) -> Any:
    """Give the dataset of that name, or the files of that folder."""
    from loaderkit.datasets.pt_folder import PtFolder

    if is_url(options.source):
        message = f"{options.source} is a URL, and no dataset."
        why = "samples are read from a folder or made by code; in a store is a cache"
        fix = f"loaderkit pull {options.source} {options.cache}"
        raise LoaderkitError(message, why=why, fix=fix)
    # A colon may stand in a folder's name too.
    if ":" in options.source and not Path(options.source).exists():
        return named_dataset(options.source)
    if options.source.endswith(".py") and Path(options.source).is_file():
        message = f"{options.source} is a program, and no dataset."
        fix = f"loaderkit pack {options.source}:NAME {options.cache}, of what it is "
        raise LoaderkitError(message, why=HOW_TO_NAME, fix=f"{fix}called there")
    return PtFolder(
        options.source,
        pattern=options.pattern,
        weights_only=not options.unsafe_pickle,
    )


COMMAND = Command(
    "pack",
    "make a cache",
    _add_arguments,
    _run_pack,
    flags={("weights_only", False): "--unsafe-pickle"},
)
