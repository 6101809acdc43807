"""Open a cache as a ready dataset, without a class of one's own."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from loaderkit.arguments import check_choice
from loaderkit.cache.remote import RemoteCache, locate_cache
from loaderkit.cache.store import Store
from loaderkit.call_keywords import refuse_keyword, suggest_keywords
from loaderkit.datasets.classes import ClassRegistry, check_classes
from loaderkit.datasets.opened import OpenedCache
from loaderkit.datasets.pad_names import check_names_in_cache
from loaderkit.datasets.room import page_cache_bytes
from loaderkit.datasets.safe import dataset_over
from loaderkit.path_arguments import check_cache_path

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Mapping

    from typing_extensions import Unpack

    from loaderkit.cache.shards import Checksums
    from loaderkit.datasets.padding import PadValue
    from loaderkit.datasets.ragged import RaggedLayout
    from loaderkit.datasets.safe import SafeDataset


class BatchKeywords(TypedDict, total=False):
    """How graphs are joined, and how samples of other kinds are."""

    follow_batch: Collection[str]
    exclude_keys: Collection[str]
    ragged: RaggedLayout
    pad_value: PadValue


@suggest_keywords
def open_cache(
    path: str | os.PathLike[str] | RemoteCache,
    *,
    transform: Callable[[Any], Any] | None = None,
    classes: Iterable[type] = (),
    unknown_classes: Literal["refuse", "plain"] = "refuse",
    checksums: Checksums = "once",
    storage_options: Mapping[str, Any] | None = None,
    mirror: str | os.PathLike[str] | None = None,
    mirror_bytes: int | str | None = None,
    **options: Unpack[BatchKeywords],
) -> SafeDataset[Any]:
    """Open a cache that was packed before.

    Args:
        path: The cache's folder, or a URL that fsspec knows ("s3://bucket/name").  Of a
            URL only the manifest is read now, and each shard when it is first needed.
        transform: Called with each sample after it is read.
        classes: Classes that samples are made of, beyond PyG's own.
        unknown_classes: What to do with others: "refuse" them, or read "plain" dicts,
            ``Data`` and ``HeteroData`` in their place.
        checksums: When the cache's files are hashed: "once" a machine before their
            first use, "always" in each process, or "never".
        storage_options: What fsspec makes the file system of a URL with: credentials,
            an endpoint ...
        mirror: Folder on local disk in which the shards of a URL are kept, for all
            processes; None for one in the user's cache folder.
        mirror_bytes: The most it may take, such as "200 GB"; None for all there is.
        options: ``follow_batch`` and ``exclude_keys`` for graphs, ``ragged`` and
            ``pad_value`` for others; see ``SafeGraphDataset`` and ``SafeDataset``.

    Returns:
        A ``SafeGraphDataset`` when the samples are graphs, else a ``SafeDataset``.

    Raises:
        CacheError: There is no whole cache, or a newer loaderkit wrote it, or the store
            does not answer.
        DatasetError: The samples are made of classes that are not known, or
            ``pad_value`` names a field that is never padded.
        ValueError: An option is none of its words.
    """
    check_choice("unknown_classes", unknown_classes, ("refuse", "plain"))
    names_of_kinds = BatchKeywords.__annotations__
    for name, value in options.items():
        if name not in names_of_kinds:
            caller, parameters = "open_cache", inspect.signature(open_cache).parameters
            own = [parameter for parameter in parameters if parameter != "options"]
            raise refuse_keyword(caller, name, [*own, *names_of_kinds], value=value)
    if not isinstance(path, RemoteCache):
        check_cache_path(path)
    known, plain = check_classes(classes), unknown_classes == "plain"
    location = locate_cache(path, storage_options, mirror, mirror_bytes)
    store = Store(location, checksums=checksums, free_bytes=page_cache_bytes)
    opened = OpenedCache(store, ClassRegistry(known), plain=plain)
    dataset = dataset_over(
        opened,
        plain=plain,
        cache=location,
        transform=transform,
        classes=known,
        checksums=checksums,
        **options,
    )
    # Now, and not in the first batch; a transform may make other fields.
    if transform is None:
        check_names_in_cache(opened, dataset.pad_value)
    return dataset
