"""Datasets, loaders and tests whose memory stays flat.

The rooms, in reading order; each one's docstring says what is inside:

    cache     write once, map many
    memory    read_memory, MemoryMeter, release, staged
    datasets  SafeDataset, SafeGraphDataset, pack, open_cache
    loader    build_loader, LoaderPlan
    leaks     LeakDetector, LeakReport, the pytest plugin
    budget    estimate_step, plan_batch, diagnose_oom, MicroBatcher, check_environment
    cli       the ``loaderkit`` command

Names load on first use: importing loaderkit does not import torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loaderkit.budget.batch import BatchPlan, Configuration, plan_batch
    from loaderkit.budget.environment import Finding
    from loaderkit.budget.estimate import StepEstimate, estimate_step
    from loaderkit.budget.gate import assert_fits
    from loaderkit.budget.micro_batch import (
        MicroBatcher,
        StepResult,
        transactional_step,
    )
    from loaderkit.budget.oom import Advice, Diagnosis, diagnose_oom, oom_guard
    from loaderkit.budget.settings import check_environment, configure_allocator
    from loaderkit.budget.steps import DeviceSpec
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
        BudgetError,
        CacheError,
        CacheVersionError,
        DamagedCacheError,
        DatasetError,
        DoesNotFitError,
        LeakError,
        LeakWarning,
        LoaderError,
        LoaderkitError,
        OptionError,
        StaleCacheError,
    )
    from loaderkit.leaks.checks import assert_no_leak
    from loaderkit.leaks.detector import LeakDetector
    from loaderkit.leaks.growth import Growth
    from loaderkit.leaks.report import LeakReport
    from loaderkit.leaks.trend import Trend, fit_trend
    from loaderkit.leaks.verdict import CounterTrend
    from loaderkit.loader.build import build_loader
    from loaderkit.loader.options import LoaderOptions
    from loaderkit.loader.plan import LoaderPlan
    from loaderkit.loader.prefetch import DevicePrefetcher
    from loaderkit.memory.holders import Holder, holders_of
    from loaderkit.memory.hygiene import EpochHygiene
    from loaderkit.memory.meter import MemoryMeter, Timeline
    from loaderkit.memory.reading import MemorySample, read_memory
    from loaderkit.memory.release import Released, release
    from loaderkit.memory.staged import Receipt, staged
    from loaderkit.units import format_bytes, parse_bytes

__version__ = "0.1.0"

_HOME = {
    "Advice": "budget.oom",
    "BatchPlan": "budget.batch",
    "BudgetError": "errors",
    "CacheError": "errors",
    "CacheSummary": "datasets.inspect",
    "CacheVersionError": "errors",
    "Configuration": "budget.batch",
    "CounterTrend": "leaks.verdict",
    "DamagedCacheError": "errors",
    "DatasetError": "errors",
    "DevicePrefetcher": "loader.prefetch",
    "DeviceSpec": "budget.steps",
    "Diagnosis": "budget.oom",
    "DoesNotFitError": "errors",
    "EpochHygiene": "memory.hygiene",
    "Finding": "budget.environment",
    "Growth": "leaks.growth",
    "Holder": "memory.holders",
    "LeakDetector": "leaks.detector",
    "LeakError": "errors",
    "LeakReport": "leaks.report",
    "LeakWarning": "errors",
    "LoaderError": "errors",
    "LoaderOptions": "loader.options",
    "LoaderPlan": "loader.plan",
    "LoaderkitError": "errors",
    "MemoryMeter": "memory.meter",
    "MemorySample": "memory.reading",
    "MicroBatcher": "budget.micro_batch",
    "OptionError": "errors",
    "PackOptions": "datasets.pack",
    "Packed": "datasets.ragged",
    "Padded": "datasets.ragged",
    "PtFolder": "datasets.sources",
    "Receipt": "memory.staged",
    "Released": "memory.release",
    "SafeDataset": "datasets.base",
    "SafeGraphDataset": "datasets.graphs",
    "SampleSizes": "datasets.sizes",
    "Sizes": "datasets.sizes",
    "StaleCacheError": "errors",
    "StepEstimate": "budget.estimate",
    "StepResult": "budget.micro_batch",
    "Timeline": "memory.meter",
    "Trend": "leaks.trend",
    "Verification": "cache.verify",
    "assert_fits": "budget.gate",
    "assert_no_leak": "leaks.checks",
    "build_loader": "loader.build",
    "check_environment": "budget.settings",
    "configure_allocator": "budget.settings",
    "diagnose_oom": "budget.oom",
    "estimate_step": "budget.estimate",
    "fit_trend": "leaks.trend",
    "format_bytes": "units",
    "holders_of": "memory.holders",
    "inspect_cache": "datasets.inspect",
    "oom_guard": "budget.oom",
    "open_cache": "datasets.open",
    "own": "datasets.own",
    "pack": "datasets.pack",
    "parse_bytes": "units",
    "plan_batch": "budget.batch",
    "read_memory": "memory.reading",
    "release": "memory.release",
    "shares": "datasets.own",
    "staged": "memory.staged",
    "transactional_step": "budget.micro_batch",
    "verify": "cache.verify",
}

__all__ = [  # noqa: RUF022 -- as _HOME, then the version
    "Advice",
    "BatchPlan",
    "BudgetError",
    "CacheError",
    "CacheSummary",
    "CacheVersionError",
    "Configuration",
    "CounterTrend",
    "DamagedCacheError",
    "DatasetError",
    "DevicePrefetcher",
    "DeviceSpec",
    "Diagnosis",
    "DoesNotFitError",
    "EpochHygiene",
    "Finding",
    "Growth",
    "Holder",
    "LeakDetector",
    "LeakError",
    "LeakReport",
    "LeakWarning",
    "LoaderError",
    "LoaderOptions",
    "LoaderPlan",
    "LoaderkitError",
    "MemoryMeter",
    "MemorySample",
    "MicroBatcher",
    "OptionError",
    "PackOptions",
    "Packed",
    "Padded",
    "PtFolder",
    "Receipt",
    "Released",
    "SafeDataset",
    "SafeGraphDataset",
    "SampleSizes",
    "Sizes",
    "StaleCacheError",
    "StepEstimate",
    "StepResult",
    "Timeline",
    "Trend",
    "Verification",
    "assert_fits",
    "assert_no_leak",
    "build_loader",
    "check_environment",
    "configure_allocator",
    "diagnose_oom",
    "estimate_step",
    "fit_trend",
    "format_bytes",
    "holders_of",
    "inspect_cache",
    "oom_guard",
    "open_cache",
    "own",
    "pack",
    "parse_bytes",
    "plan_batch",
    "read_memory",
    "release",
    "shares",
    "staged",
    "transactional_step",
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
