"""Whether a cache is what its dataset would pack now: by its code, keys and files."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loaderkit.cache.store import Store
from loaderkit.datasets.fingerprint import Fingerprint, differences, fingerprint_of
from loaderkit.datasets.source_files import SourceFileList
from loaderkit.datasets.sources import KeyedSource
from loaderkit.errors import StaleCacheError
from loaderkit.fixes import Fix, Setting

if TYPE_CHECKING:
    from loaderkit.datasets.cached_samples import CachedSamplesMixin

_CHANGES_TOLD = 3
"""Changed files that the error names; chosen: others have mostly the same cause."""


def check_fresh(dataset: CachedSamplesMixin[Any]) -> None:
    """Hold a dataset's cache against its code, its keys and the files that it reads.

    Args:
        dataset: One with a cache, and a ``load`` of its own.

    Raises:
        StaleCacheError: It would make other samples now.
    """
    assert dataset.cache is not None
    store = Store(dataset.cache)
    manifest = store.manifest
    packed = Fingerprint.from_json(manifest.fingerprint)
    # A cache may be read on a machine that the raw data never was on.
    raw_is_here = dataset.raw is None or dataset.raw.exists()
    if raw_is_here:
        now = KeyedSource(dataset).fingerprint()
    else:
        now = _fingerprint_without_raw(dataset, packed)
    changes = list(differences(packed, now))
    tracks_files = raw_is_here and dataset.packing.track_files != "none"
    if not changes and manifest.sources and tracks_files:
        text = store.load_sources() or ""
        sources = SourceFileList.from_json(text, where=manifest.sources.file)
        root = "" if dataset.raw is None else os.path.abspath(dataset.raw)
        changes = list(itertools.islice(sources.changed(root), _CHANGES_TOLD))
    if changes:
        name = type(dataset).__name__
        message = f"The cache {dataset.cache} is stale: {'; '.join(changes)}."
        why = f"{name} would make other samples than those in it"
        within = f"{name}(..., packing=PackOptions({{}}))"
        again = Setting("overwrite", value=True, within=within)
        imported = "from loaderkit.datasets.pack import PackOptions"
        fix = Fix.of(again, f" ({imported}), or delete {dataset.cache}")
        raise StaleCacheError(message, why=why, fix=fix)


def _fingerprint_without_raw(
    dataset: CachedSamplesMixin[Any], packed: Fingerprint
) -> Fingerprint:
    """Take the fingerprint where the raw data is not: it was packed elsewhere.

    Keys that are read from the raw data cannot be told then, and those of the cache
    count.  Others, such as numbers or a fixed list, are there all the same.
    """
    try:
        now = KeyedSource(dataset).fingerprint()
    except Exception:  # noqa: BLE001 -- keys() looks for files that are not here
        now = None
    if now is not None and now.count:
        return now
    code_alone = fingerprint_of(dataset.load, (), version=str(dataset.version))
    return replace(code_alone, keys=packed.keys, count=packed.count)
