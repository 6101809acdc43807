"""A cache that this process has opened: its store, and how its samples are built."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import TypeVar

from loaderkit.datasets.gathering import BatchGather
from loaderkit.datasets.kinds import Kind
from loaderkit.datasets.list_forms import list_forms
from loaderkit.datasets.ragged_fields import field_shapes
from loaderkit.datasets.room import check_chunks
from loaderkit.datasets.soundness import check_columns
from loaderkit.datasets.structure import VARIANT, Structure, is_graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from loaderkit.array_types import Ints
    from loaderkit.cache.store import Store
    from loaderkit.datasets.classes import ClassRegistry
    from loaderkit.datasets.list_forms import ListForms
    from loaderkit.datasets.ragged_fields import FieldShapes

R = TypeVar("R")


class OpenedCache:
    """A cache opened by this process, and the recipes made for it.

    Args:
        store: Its columns.
        classes: Where the classes of its samples are.
        plain: Classes that are not known are read as plain containers.

    Raises:
        DamagedCacheError: Its manifest contradicts itself.
        DatasetError: Its samples are made of classes that are not known.
    """

    def __init__(
        self, store: Store, classes: ClassRegistry, *, plain: bool = False
    ) -> None:
        self.store = store
        self.structure = Structure.from_json(store.manifest.structure)
        # Before anything is read: what follows trusts the manifest's numbers.
        check_columns(self.structure, store.manifest)
        check_chunks(store.manifest)
        if plain:
            self.structure = self.structure.without_classes(classes.fits)
        classes.check(self.structure)
        self._recipes: dict[tuple[int, str], Any] = {}

    @functools.cached_property
    def graph_fields(self) -> frozenset[str]:
        """Names of the fields that the graphs of some sample have."""
        nests = self.structure.nests()
        stores = [nest for nest in nests if nest.kind is Kind.STORE]
        return frozenset(str(name) for store in stores for name in store.keys)

    @functools.cached_property
    def field_shapes(self) -> FieldShapes:
        """The shapes that each field of tensors has in all samples."""
        return field_shapes(self.store, self.structure.variants)

    @functools.cached_property
    def list_forms(self) -> ListForms:
        """The forms that each field of lists has in all samples."""
        return list_forms(self.structure, self.structure.variants)

    @property
    def holds_graphs(self) -> bool:
        """Whether some of the samples are graphs."""
        return any(is_graph(variant) for variant in self.structure.variants)

    def variant(self, row: int) -> int:
        """Say how one sample is built."""
        return int(self.variants(np.array([row]))[0])

    def variants(self, rows: Ints) -> Ints:
        """Say how each of some samples is built ``[B]``."""
        # As nearly always; the column of variants is not even opened then.
        if len(self.structure.variants) == 1:
            return np.zeros(len(rows), np.int64)
        return BatchGather(self.store, rows).per_sample(VARIANT)

    def one_variant(self, rows: Ints) -> int | None:
        """Say how all of some samples are built; None when they differ."""
        if len(self.structure.variants) == 1:
            return 0
        numbers = self.variants(rows)
        is_one = (numbers == numbers[0]).all()
        return int(numbers[0]) if is_one else None

    def recipe(
        self,
        make: Callable[[OpenedCache, int], R | None],
        variant: int | None,
        layout: str,
    ) -> R | None:
        """Give the recipe of a variant in a layout, made once.

        Args:
            make: Makes it; None where samples of the variant are read one by one.
            variant: The variant's number; None where samples differ.
            layout: What batches hold for fields of several lengths: parts of one
                dataset, which share the cache, may differ in it.
        """
        if variant is None:
            return None
        # Making one looks up columns and classes, which takes longer than a batch.
        key = variant, layout
        if key not in self._recipes:
            self._recipes[key] = make(self, variant)
        recipe: R | None = self._recipes[key]
        return recipe
