"""SafeDataset and SafeGraphDataset, as users subclass them.

Both are in one file because ``SafeDataset.map`` may make a dataset of graphs.
What they do is in base.py and graphs.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from typing_extensions import TypeVar

from loaderkit.answers import answer_wrong_calls
from loaderkit.datasets.base import BaseDataset
from loaderkit.datasets.graphs import GraphDataset
from loaderkit.datasets.mapping import map_samples

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection

    from loaderkit.datasets.opened import OpenedCache

T = TypeVar("T", default=Any)


@answer_wrong_calls
class SafeDataset(BaseDataset[T]):
    """A dataset whose every sample is a copy that its reader owns.

    Subclass it, and write ``keys()`` and ``load(key)``.  With ``cache=`` every sample
    is loaded once, packed, and read from mapped columns ever after; without, it is
    loaded each time.  Either way, changing a sample in place, keeping it, or sending
    it to another process never touches the cache or another sample.

    ``SafeDataset[dict[str, Tensor]]`` tells a type checker what a sample is.

    Args:
        raw: Where the samples come from, for ``keys`` and ``load`` to use as
            ``self.raw``.
        cache: Folder of the cache, or a URL that fsspec knows ("s3://bucket/name");
            packed on first use.  None to load each time.
        transform: Called with each sample after it is read; may change it in place.
        ragged: What a batch holds for tensors whose first axes differ: "padded",
            "packed" or "jagged" (see ``loaderkit.datasets.dict_batches``).
        pad_value: What padded batches hold behind a sample's end: a number, or numbers
            by field, such as ``{"labels": -100}``, or by the path of one, such as
            ``{"answer.ids": -100}``; 0 (False) for the others.
        packing: How the cache is packed.
        classes: Classes that samples are made of, beyond PyG's and those that the
            subclass's own module knows.
        checksums: When the cache's files are hashed: "once" a machine before their
            first use, "always" in each process, or "never".
        storage_options: What fsspec makes the file system of a URL with.
        mirror: Folder on local disk in which the shards of a URL are kept.
        mirror_bytes: The most it may take, such as "200 GB"; None for all there is.

    Raises:
        ValueError: ``ragged`` or ``checksums`` is none of the three.
        OptionError: An option of URLs was given without one; or ``pad_value`` is no
            number, or nothing is padded.
    """

    @overload
    def map(
        self,
        function: Callable[[T], Any],
        with_indices: Literal[False] = False,  # noqa: FBT002 -- as below
        *,
        remove_columns: str | Collection[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        workers: int | None = None,
        overwrite: bool = False,
        version: str | int = "",
    ) -> SafeDataset[Any]: ...
    @overload
    def map(
        self,
        function: Callable[[T, int], Any],
        with_indices: Literal[True],
        *,
        remove_columns: str | Collection[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        workers: int | None = None,
        overwrite: bool = False,
        version: str | int = "",
    ) -> SafeDataset[Any]: ...
    def map(
        self,
        function: Callable[..., Any],
        with_indices: bool = False,  # noqa: FBT001, FBT002 -- as Hugging Face has it
        *,
        remove_columns: str | Collection[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        workers: int | None = None,
        overwrite: bool = False,
        version: str | int = "",
        **others: Any,
    ) -> Any:
        """Make new samples of these, and pack them into a cache of their own.

        What was packed of the same samples by the same code is opened, and the
        function not called again.  The values that the code reads count: of its
        globals, closure, defaults and ``self``, with weights of models.  What cannot be
        known (an environment variable, a file that C code reads, the time) is yours to
        tell, by ``version`` or ``overwrite``.  To call a function each time a sample is
        read, use ``transform=`` instead.

        Args:
            function: Called with a sample, which it may change; returns the new one.
                Of dicts it may return some fields, which are put beside the others, as
                in Hugging Face's datasets.
            with_indices: Call it with the sample and its row.
            remove_columns: Fields of dicts to leave out.
            cache: The new cache's folder; beside this one, under a name that follows
                from the function, if None.
            workers: Processes that call the function; as for ``pack``.
            overwrite: Pack again though there is such a cache; as for ``pack``.
            version: Yours; another one packs another cache.
            others: None; arguments of Hugging Face's method are refused by name.

        Returns:
            A dataset over the new cache.

        Raises:
            OptionError: An argument is not what it should be.
            StaleCacheError: In the folder is a cache of other samples or other code.
        """
        new = map_samples(
            self,
            function,
            with_indices=with_indices,
            remove_columns=remove_columns,
            cache=cache,
            workers=workers,
            overwrite=overwrite,
            version=version,
            others=others,
        )
        # Graphs are joined as PyG joins them.
        ragged = {} if new.opened.holds_graphs else new.ragged
        return dataset_over(
            new.opened,
            cache=new.location,
            classes=new.classes,
            checksums=self.checksums,
            **ragged,
        )


@answer_wrong_calls
class SafeGraphDataset(GraphDataset[T], SafeDataset[T]):
    """A dataset of graphs whose every sample and batch is a copy.

    Subclass it and write ``keys()`` and ``load(key)``, which returns PyG's ``Data`` or
    ``HeteroData``, or a subclass with its own ``__inc__`` and ``__cat_dim__``.

    Args:
        raw: Where the samples come from, for ``keys`` and ``load`` to use as
            ``self.raw``.
        cache: Folder of the cache, or a URL; as in ``SafeDataset``.
        transform: Called with each graph after it is read, as in PyG.
        follow_batch: Fields that get a ``_batch`` vector of their own, as in PyG.
        exclude_keys: Fields left out of batches, as in PyG.
        packing: How the cache is packed.
        classes: Classes that samples are made of, beyond PyG's and those that the
            subclass's own module knows.
        checksums: When the cache's files are hashed; as in ``SafeDataset``.
        storage_options: What fsspec makes the file system of a URL with.
        mirror: Folder on local disk in which the shards of a URL are kept.
        mirror_bytes: The most it may take, such as "200 GB"; None for all there is.
    """


def dataset_over(
    opened: OpenedCache, *, plain: bool = False, **options: Any
) -> SafeDataset[Any]:
    """Make the dataset of a cache that is open.

    Args:
        opened: The cache.
        plain: As it was opened.
        options: The constructor's own.

    Returns:
        A ``SafeGraphDataset`` when the samples are graphs, else a ``SafeDataset``.
    """
    dataset_type = SafeGraphDataset if opened.holds_graphs else SafeDataset
    return dataset_type._of_opened(opened, plain=plain, **options)
