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
    from loaderkit.budget.assertions import assert_fits
    from loaderkit.budget.batch import BatchConfiguration, BatchPlan, plan_batch
    from loaderkit.budget.environment import EnvironmentFinding
    from loaderkit.budget.estimate import StepEstimate, estimate_step
    from loaderkit.budget.micro_batch import (
        MicroBatcher,
        StepResult,
        transactional_step,
    )
    from loaderkit.budget.oom import Diagnosis, OomAdvice, diagnose_oom, oom_guard
    from loaderkit.budget.settings import check_environment, configure_allocator
    from loaderkit.budget.train_step import DeviceSpec
    from loaderkit.cache.transfer import pull, push
    from loaderkit.cache.verify import Verification, verify
    from loaderkit.datasets.base import SafeDataset
    from loaderkit.datasets.graphs import SafeGraphDataset
    from loaderkit.datasets.inspect import CacheSummary, inspect_cache
    from loaderkit.datasets.open import open_cache
    from loaderkit.datasets.owned_copy import owned_copy, shares_memory
    from loaderkit.datasets.pack import PackOptions, pack
    from loaderkit.datasets.ragged import Packed, Padded
    from loaderkit.datasets.sizes import GraphSizes, SampleSizes
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
        NoSuchAttributeError,
        OptionError,
        StaleCacheError,
    )
    from loaderkit.leaks.checks import assert_no_leak
    from loaderkit.leaks.counter_trend import CounterTrend
    from loaderkit.leaks.detector import LeakDetector
    from loaderkit.leaks.growth import Growth
    from loaderkit.leaks.report import LeakReport
    from loaderkit.leaks.trend import Trend, fit_trend
    from loaderkit.loader.build import build_loader
    from loaderkit.loader.options import LoaderOptions
    from loaderkit.loader.plan import LoaderPlan
    from loaderkit.loader.prefetch import DevicePrefetcher
    from loaderkit.memory.cache_cleaner import EpochCacheCleaner
    from loaderkit.memory.holder import Holder
    from loaderkit.memory.holders import holders_of
    from loaderkit.memory.meter import MemoryMeter, Timeline
    from loaderkit.memory.reading import MemorySample, read_memory
    from loaderkit.memory.release import Released, release
    from loaderkit.memory.staged import StageReceipt, staged
    from loaderkit.units import format_bytes, parse_bytes

__version__ = "0.1.0"

_HOME = {
    "BatchConfiguration": "budget.batch",
    "BatchPlan": "budget.batch",
    "BudgetError": "errors",
    "CacheError": "errors",
    "CacheSummary": "datasets.inspect",
    "CacheVersionError": "errors",
    "CounterTrend": "leaks.counter_trend",
    "DamagedCacheError": "errors",
    "DatasetError": "errors",
    "DevicePrefetcher": "loader.prefetch",
    "DeviceSpec": "budget.train_step",
    "Diagnosis": "budget.oom",
    "DoesNotFitError": "errors",
    "EnvironmentFinding": "budget.environment",
    "EpochCacheCleaner": "memory.cache_cleaner",
    "GraphSizes": "datasets.sizes",
    "Growth": "leaks.growth",
    "Holder": "memory.holder",
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
    "NoSuchAttributeError": "errors",
    "OomAdvice": "budget.oom",
    "OptionError": "errors",
    "PackOptions": "datasets.pack",
    "Packed": "datasets.ragged",
    "Padded": "datasets.ragged",
    "PtFolder": "datasets.sources",
    "Released": "memory.release",
    "SafeDataset": "datasets.base",
    "SafeGraphDataset": "datasets.graphs",
    "SampleSizes": "datasets.sizes",
    "StageReceipt": "memory.staged",
    "StaleCacheError": "errors",
    "StepEstimate": "budget.estimate",
    "StepResult": "budget.micro_batch",
    "Timeline": "memory.meter",
    "Trend": "leaks.trend",
    "Verification": "cache.verify",
    "assert_fits": "budget.assertions",
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
    "owned_copy": "datasets.owned_copy",
    "pack": "datasets.pack",
    "parse_bytes": "units",
    "plan_batch": "budget.batch",
    "pull": "cache.transfer",
    "push": "cache.transfer",
    "read_memory": "memory.reading",
    "release": "memory.release",
    "shares_memory": "datasets.owned_copy",
    "staged": "memory.staged",
    "transactional_step": "budget.micro_batch",
    "verify": "cache.verify",
}

__all__ = [  # noqa: RUF022 -- as _HOME, then the version
    "BatchConfiguration",
    "BatchPlan",
    "BudgetError",
    "CacheError",
    "CacheSummary",
    "CacheVersionError",
    "CounterTrend",
    "DamagedCacheError",
    "DatasetError",
    "DevicePrefetcher",
    "DeviceSpec",
    "Diagnosis",
    "DoesNotFitError",
    "EnvironmentFinding",
    "EpochCacheCleaner",
    "GraphSizes",
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
    "NoSuchAttributeError",
    "OomAdvice",
    "OptionError",
    "PackOptions",
    "Packed",
    "Padded",
    "PtFolder",
    "Released",
    "SafeDataset",
    "SafeGraphDataset",
    "SampleSizes",
    "StageReceipt",
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
    "owned_copy",
    "pack",
    "parse_bytes",
    "plan_batch",
    "pull",
    "push",
    "read_memory",
    "release",
    "shares_memory",
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
