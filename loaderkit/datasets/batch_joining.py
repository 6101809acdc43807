"""Batches of a dataset: gathered from the cache in one go where that can be."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsInt, TypeGuard, cast

from typing_extensions import Self, TypeVar

from loaderkit.answers import answer_wrong_calls
from loaderkit.datasets.collate_errors import Collating
from loaderkit.datasets.dict_batches import DictRecipe, collate_samples
from loaderkit.datasets.gathering import UnlikeShapesError
from loaderkit.datasets.lazy import LAST_GIVEN, LazySamples
from loaderkit.datasets.list_forms import are_kept_apart
from loaderkit.datasets.pad_names import check_names_in_batch, check_names_in_cache
from loaderkit.datasets.padding import PadValue, fill_padding, padding_of, path_text
from loaderkit.datasets.ragged import error_of_shapes
from loaderkit.datasets.ragged_fields import (
    Joining,
    JointShapes,
    joining_of,
    together,
)
from loaderkit.datasets.rows import is_single_index, normalize_indices
from loaderkit.datasets.sample_reading import SampleReading, is_ours
from loaderkit.datasets.structure import is_graph
from loaderkit.errors import DatasetError, NoSuchRowError, OptionError
from loaderkit.joining import check_no_keys, join

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from loaderkit.array_types import Ints
    from loaderkit.cache.store import Store
    from loaderkit.datasets.opened import OpenedCache
    from loaderkit.datasets.padding import Path
    from loaderkit.datasets.ragged_fields import FieldShapes
    from loaderkit.memory.page_locked import PageLockedBatch

T = TypeVar("T", default=Any)


@answer_wrong_calls
class BatchJoining(SampleReading[T]):
    """What a dataset does to give batches."""

    ragged: str
    pad_value: PadValue
    gives_unread: bool = False
    """Batches are given to torch unread: our ``collate`` joined the one before."""

    @property
    def gathers(self) -> bool:
        """Whether batches come from the cache, with no code of yours on the way."""
        return self.reads_cache and is_ours(self.batch) and is_ours(self.collate)

    def __getitems__(self, rows: Sequence[int]) -> list[T]:
        """Give the samples of a batch, as torch's DataLoader asks for them.

        Args:
            rows: Rows of the batch, in order.

        Returns:
            A list of new samples, for any ``collate_fn``.  Where they come straight
            from a cache, and ``collate`` of this dataset joined the batch before, the
            list is filled when it is first looked into: ``collate`` never does so, but
            gathers the batch instead.
        """
        numbers = normalize_indices(rows, len(self))
        # A batch() of a subclass's own needs the rows from the first batch on.
        unread = self.gives_unread or not is_ours(self.batch)
        if unread and self.reads_cache:
            return LazySamples.of(self, numbers)
        samples = self.read_together(numbers.tolist())
        # If it is our ``collate`` that gets this list, it says so, and the next one is
        # given unread: see ``_expect_more_of``.
        if self.reads_cache:
            LAST_GIVEN.note(samples, self)
        return samples

    def unread(
        self, rows: Sequence[int], page_locked: PageLockedBatch | None = None
    ) -> list[Any]:
        """Give the samples of a batch to somebody who joins them with ``collate``.

        Args:
            rows: Rows of the batch, in order.
            page_locked: Where ``collate`` makes all tensors of the batch; None for
                ordinary memory.

        Returns:
            A list that is filled when it is first looked into.
        """
        return LazySamples.of(self, normalize_indices(rows, len(self)), page_locked)

    def batch(self, rows: Sequence[int] | NDArray[Any] | slice | Tensor) -> Any:
        """Gather a batch from the cache in one go.

        Args:
            rows: Rows of the batch, at least one, in any order, repeats allowed; or a
                slice, or a mask ``[len(dataset)]``.

        Returns:
            The samples' nest with a batch at each leaf; every tensor is new.

        Raises:
            DatasetError: The samples cannot be batched.
        """
        return self._batch_of_rows(self._checked_rows(rows))

    def _batch_of_rows(
        self,
        numbers: Ints,
        follow_batch: Collection[str] = (),
        exclude_keys: Collection[str] = (),
        page_locked: PageLockedBatch | None = None,
    ) -> Any:
        """Gather a batch of rows ``[B]`` that were checked, at least one."""
        check_no_keys(follow_batch, exclude_keys, "a cache without one")
        cached = self._rows_in_cache(numbers)
        recipe = self._recipe_for(cached)
        if recipe is None:
            # Through ``self[row]``, which a subclass or ``transform`` may have changed.
            samples = [self[row] for row in numbers.tolist()]
            note_others(page_locked)
            return self._join_samples(samples)
        try:
            with Collating():
                batch = recipe.batch(cached, page_locked=page_locked)
        except UnlikeShapesError as error:
            raise unlike_shapes_error(recipe.store, str(error), cached) from None
        self.fill_padding(batch)
        return batch

    def collate(
        self,
        samples: object,
        *,
        follow_batch: Collection[str] | None = None,
        exclude_keys: Collection[str] | None = None,
    ) -> Any:
        """Join samples; serves as ``collate_fn`` of any DataLoader.

        Args:
            samples: A list of samples.  The one that ``__getitems__`` gave is not
                read: its batch is gathered from the cache.
            follow_batch: Fields of graphs in the samples that get a ``_batch`` vector.
            exclude_keys: Fields of graphs in the samples that are left out.

        Returns:
            A batch; what is no list is taken for one and returned as it is.

        Raises:
            DatasetError: The samples cannot be batched.
        """
        if not isinstance(samples, list):
            return samples
        follow, exclude = follow_batch or (), exclude_keys or ()
        # A list that was filled has forgotten its dataset: whoever filled it may have
        # changed samples, which count then.
        if isinstance(samples, LazySamples) and self._joins_like(samples.dataset):
            if len(samples.rows) and is_ours(samples.dataset.batch):
                return samples.dataset._batch_of_rows(
                    samples.rows, follow, exclude, samples.page_locked
                )
            check_no_keys(follow, exclude, "a cache without one")
            return samples.dataset.batch(samples.rows)
        self._expect_more_of(samples)
        return self._join_samples(samples, follow, exclude)

    def joins_with(self, others: Sequence[BatchJoining[Any]]) -> Self:
        """Give a dataset whose ``collate`` joins samples of this one and of others.

        A field that has one length here, and another there, is ragged in all batches.

        Args:
            others: Datasets whose samples are joined alike, such as the other parts of
                a concatenation.
        """
        joining = copy.copy(self)
        # A state of its own: a shallow copy would share it, and this dataset's own
        # batches would be joined like the concatenation's from then on.
        joining._loaderkit = replace(self._loaderkit, beside=tuple(others))
        return joining

    def ragged_field(self, others: Sequence[BatchJoining[Any]]) -> str | None:
        """Name a field that differs in length among these samples and others'.

        Args:
            others: Datasets beside this one.

        Returns:
            As code writes it; None where caches have none, and for graphs.
        """
        caches = [
            dataset._open_cache()
            for dataset in (self, *others)
            if dataset.cache is not None
        ]
        shapes_of_caches = [opened.field_shapes for opened in caches]
        for path, by_kind in together(shapes_of_caches).items():
            if any(shapes.joining is Joining.RAGGED for shapes in by_kind.values()):
                return "".join(f"[{key!r}]" for key in path) or "a sample"
        return None

    def fill_padding(self, batch: object) -> None:
        """Write ``pad_value`` behind the ends of the samples of a padded batch.

        Args:
            batch: A batch of these samples, whose padding is written in place.

        Raises:
            DatasetError: A field cannot hold its number, or is never padded, or there
                is no such field.
        """
        pad_value = self.pad_value
        if type(pad_value) is int and pad_value == 0:
            return  # as nearly always: a mapping is told by its methods, in 1 us
        if not isinstance(pad_value, Mapping) and pad_value == 0:
            return
        if isinstance(pad_value, Mapping) or self.reads_cache:
            self._check_pad_names(batch, pad_value)
        fill_padding(batch, pad_value)

    def _check_pad_names(self, batch: object, pad_value: PadValue) -> None:
        """Check once what ``pad_value`` pads: by the cache, or by the first batches."""
        state = self._loaderkit
        # By identity: what was set anew is checked anew, and comparing mappings would
        # cost every batch.
        if state.checked_pad_value is pad_value:
            return
        if self.reads_cache:
            check_names_in_cache(self._open_cache(), pad_value)
        elif isinstance(pad_value, Mapping):
            opened = None if self.cache is None else self._open_cache()
            if not check_names_in_batch(batch, pad_value, opened):
                return
        state.checked_pad_value = pad_value

    def _checked_rows(self, rows: object) -> Ints:
        """Check the rows of a batch."""
        if is_single_index(rows):
            message = f"batch takes the rows of one batch, got {rows}."
            number = int(cast("SupportsInt", rows))
            fix = f"build_loader(dataset, batch_size={max(number, 1)})"
            if -len(self) <= number < len(self):
                fix = f"dataset.batch([{number}]), or {fix}"
            raise OptionError(message, why="it is one number", fix=fix)
        numbers = normalize_indices(rows, len(self))

        if not len(numbers):
            message = "a batch needs at least one row, got none."
            why = "nothing says how no samples are joined"
            raise NoSuchRowError(message, why=why, fix="dataset.batch([0])")
        return numbers

    def _recipe_for(self, rows: Ints) -> Any:
        """Say how samples are gathered; None where they must be read one by one.

        Args:
            rows: Numbers of the samples in the cache.
        """
        if not self.reads_cache:
            return None
        opened = self._open_cache()
        variant = opened.one_variant(rows)
        return opened.recipe(self._make_recipe, variant, self.ragged)

    def _make_recipe(self, opened: OpenedCache, variant: int) -> Any:
        node = opened.structure.variants[variant]
        if is_graph(node):
            # PyG joins it, as it does where the same dataset has no cache.  A
            # SafeGraphDataset gathers it.
            return None
        forms = [cache.list_forms for cache in (opened, *self._caches_beside())]
        return DictRecipe(opened.store, node, self.classes, self.ragged, forms)

    def _join_samples(
        self,
        samples: list[Any],
        follow_batch: Collection[str] = (),
        exclude_keys: Collection[str] = (),
    ) -> Any:
        if not samples:
            message = "A batch needs at least one sample, got none."
            why = "nothing says how no samples are joined"
            fix = "leave empty lists out, in what chooses the rows of a batch"
            raise DatasetError(message, why=why, fix=fix)
        if self.transform is not None and all(sample is None for sample in samples):
            message = "The transform returned None for all samples of a batch."
            why = "what it returns is the sample"
            fix = "return the sample, also one that was changed in place"
            raise DatasetError(message, why=why, fix=fix)
        others = functools.partial(
            collate_samples, ragged=self.ragged, joining_of=self._joining_of
        )
        with Collating(samples):
            batch = join(samples, others, follow_batch, exclude_keys)
        self.fill_padding(batch)
        return batch

    def _joining_of(self, path: Path, values: Sequence[Any]) -> Joining | None:
        """Say how the values of a field are joined in all batches.

        A transform may make a field of one size of one that differs in the cache: of
        what it returns only those are known that ``pad_value`` names.

        Args:
            path: The keys that lead to the field.
            values: Tensors and arrays, or lists and tuples.
        """
        if isinstance(values[0], list | tuple):
            return self._joining_of_lists(path, values)
        caches = [self._open_cache()] if self.reads_cache else []
        caches += self._caches_beside()
        # Asked of the caches and not of the batch: a field that happens to have one
        # length in one batch must be joined there as in the others.
        if caches:
            return joining_of(self._shapes_in(caches), path, values)
        is_by_field = isinstance(self.pad_value, Mapping)
        is_named = is_by_field and padding_of(path, self.pad_value) is not None
        return Joining.RAGGED if is_named else None

    def _joining_of_lists(
        self, path: Path, values: Sequence[list[Any] | tuple[Any, ...]]
    ) -> Joining | None:
        """Say how the lists of a field are joined in all batches.

        What a transform returns counts as what the cache has: most leave such fields as
        they are.
        """
        datasets = (self, *self._loaderkit.beside)
        caches = [d._open_cache() for d in datasets if d.cache is not None]
        if are_kept_apart([cache.list_forms for cache in caches], path):
            return Joining.KEPT_APART
        lengths = sorted(set(map(len, values)))
        if len(lengths) > 1 and not self._loaderkit.has_warned_of_lists:
            self._loaderkit.has_warned_of_lists = True
            field = f"Field {path_text(path)!r} holds" if path else "Samples are"
            text = (
                f"{field} lists of {lengths[0]} and of {lengths[-1]} items in a batch, "
                "which keeps one a sample. A batch whose lists happen to be equally "
                "long is joined item by item, as torch does it: no cache says that "
                "they differ. To have one form: pack the samples as they are joined, "
                "store tensors, or give collate_fn=..."
            )
            warnings.warn(text, UserWarning, stacklevel=2)
        return None

    def _caches_beside(self) -> list[OpenedCache]:
        """Open the caches whose samples are joined with this dataset's."""
        beside = self._loaderkit.beside
        return [dataset._open_cache() for dataset in beside if dataset.reads_cache]

    def _shapes_in(self, caches: list[OpenedCache]) -> FieldShapes:
        """Tell the shapes of fields in all of some caches."""
        if len(caches) == 1:
            return caches[0].field_shapes
        known = self._loaderkit.joint_shapes
        # A cache may have been opened anew since, as after unpickling in a worker.
        if known is None or known.caches != caches:
            shapes = together(cache.field_shapes for cache in caches)
            known = JointShapes(caches, shapes)
            self._loaderkit.joint_shapes = known
        return known.shapes

    def _joins_like(
        self, other: BatchJoining[Any] | None
    ) -> TypeGuard[BatchJoining[Any]]:
        """Tell whether another dataset, such as a part of this one, joins as we do."""
        if other is self:
            return True  # as nearly always; also where ``pad_value`` is a NaN
        alike = type(other) is type(self) and other.ragged == self.ragged
        return alike and other is not None and other.pad_value == self.pad_value

    def _expect_more_of(self, samples: list[Any]) -> None:
        """Have the dataset that gave a list give the next one unread."""
        giver = LAST_GIVEN.giver_of(samples)
        if self._joins_like(giver):
            giver.gives_unread = True


def note_others(page_locked: PageLockedBatch | None) -> None:
    """Say that a batch is joined of samples in memory, and not gathered."""
    if page_locked is not None:
        page_locked.note_others()


def unlike_shapes_error(store: Store, column: str, rows: Ints) -> DatasetError:
    """Say which shapes of a field cannot be joined.

    Args:
        store: The cache.
        column: The field.
        rows: The samples of the batch, by their numbers in the cache.
    """
    reader = store.column(column)
    shapes = [reader.read(*store.locate(int(row))).shape for row in rows]
    return error_of_shapes(column, shapes)
