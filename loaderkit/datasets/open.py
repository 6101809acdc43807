"""Open a cache as a ready dataset, without a class of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loaderkit.cache.store import Store
from loaderkit.datasets.base import SafeDataset, _Opened
from loaderkit.datasets.decode import Classes
from loaderkit.datasets.graphs import SafeGraphDataset

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable


def open_cache(
    path: str | os.PathLike[str],
    *,
    transform: Callable[[Any], Any] | None = None,
    classes: Iterable[type] = (),
    **options: Any,
) -> Any:
    """Open a cache that was packed before.

    Args:
        path: The cache's folder.
        transform: Called with each sample after it is read.
        classes: Classes of the samples that are not loaded otherwise.
        options: ``follow_batch`` and ``exclude_keys`` for graphs, ``ragged`` for
            others; see ``SafeGraphDataset`` and ``SafeDataset``.

    Returns:
        A ``SafeGraphDataset`` when the samples are graphs, else a ``SafeDataset``.

    Raises:
        CacheError: There is no whole cache, or a newer loaderkit wrote it.
    """
    opened = _Opened(Store(path))
    graphs = any(
        getattr(each, "kind", None) == "graph" for each in opened.structure.variants
    )
    made = (SafeGraphDataset if graphs else SafeDataset)(
        cache=path, transform=transform, **options
    )
    made.classes = Classes(classes)
    made._opened = opened
    return made
