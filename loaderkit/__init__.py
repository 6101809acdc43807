"""Datasets, loaders and tests whose memory stays flat.

The rooms, in reading order; each one's docstring says what is inside:

    cache     write once, map many
    datasets  SafeDataset, SafeGraphDataset, pack, open_cache
    cli       the ``loaderkit`` command

Names load on first use: importing loaderkit does not import torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loaderkit.cache.verify import Verification, verify
    from loaderkit.datasets.base import SafeDataset
    from loaderkit.datasets.graphs import SafeGraphDataset
    from loaderkit.datasets.inspect import CacheSummary, inspect_cache
    from loaderkit.datasets.open import open_cache
    from loaderkit.datasets.own import own, shares
    from loaderkit.datasets.pack import PackOptions, pack
    from loaderkit.datasets.ragged import Packed, Padded
    from loaderkit.datasets.sizes import SampleSizes, Sizes
    from loaderkit.datasets.sources import PtFolder
    from loaderkit.errors import (
        CacheError,
        CacheVersionError,
        DamagedCacheError,
        DatasetError,
        LoaderError,
        LoaderkitError,
        StaleCacheError,
    )
    from loaderkit.loader.build import build_loader
    from loaderkit.loader.options import LoaderOptions
    from loaderkit.loader.plan import LoaderPlan
    from loaderkit.loader.prefetch import DevicePrefetcher
    from loaderkit.units import format_bytes, parse_bytes

__version__ = "0.1.0"

_HOME = {
    "CacheError": "errors",
    "CacheSummary": "datasets.inspect",
    "CacheVersionError": "errors",
    "DamagedCacheError": "errors",
    "DatasetError": "errors",
    "DevicePrefetcher": "loader.prefetch",
    "LoaderError": "errors",
    "LoaderOptions": "loader.options",
    "LoaderPlan": "loader.plan",
    "LoaderkitError": "errors",
    "PackOptions": "datasets.pack",
    "Packed": "datasets.ragged",
    "Padded": "datasets.ragged",
    "PtFolder": "datasets.sources",
    "SafeDataset": "datasets.base",
    "SafeGraphDataset": "datasets.graphs",
    "SampleSizes": "datasets.sizes",
    "Sizes": "datasets.sizes",
    "StaleCacheError": "errors",
    "Verification": "cache.verify",
    "build_loader": "loader.build",
    "format_bytes": "units",
    "inspect_cache": "datasets.inspect",
    "open_cache": "datasets.open",
    "own": "datasets.own",
    "pack": "datasets.pack",
    "parse_bytes": "units",
    "shares": "datasets.own",
    "verify": "cache.verify",
}

__all__ = [  # noqa: RUF022 -- as _HOME, then the version
    "CacheError",
    "CacheSummary",
    "CacheVersionError",
    "DamagedCacheError",
    "DatasetError",
    "DevicePrefetcher",
    "LoaderError",
    "LoaderOptions",
    "LoaderPlan",
    "LoaderkitError",
    "PackOptions",
    "Packed",
    "Padded",
    "PtFolder",
    "SafeDataset",
    "SafeGraphDataset",
    "SampleSizes",
    "Sizes",
    "StaleCacheError",
    "Verification",
    "build_loader",
    "format_bytes",
    "inspect_cache",
    "open_cache",
    "own",
    "pack",
    "parse_bytes",
    "shares",
    "verify",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        msg = f"module 'loaderkit' has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(f"loaderkit.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
