"""Choosing samples as users of PyG, torch and Hugging Face do: rows, and no copies.

What is chosen is a dataset over the same cache that keeps a list of rows.  Only ``map``
makes new samples; it packs them into a cache of their own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, overload

import numpy as np
import torch
from typing_extensions import Self, TypeVar

from loaderkit.answers import answer_wrong_calls
from loaderkit.arguments import check_integer, check_truth, refuse_value
from loaderkit.datasets.absent import refuse_options
from loaderkit.datasets.rows import normalize_indices
from loaderkit.errors import NoSuchKeyError, OptionError
from loaderkit.function_arguments import check_function_of_samples
from loaderkit.units import count_of
from loaderkit.value_words import kind_of, show_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loaderkit.array_types import Ints

T = TypeVar("T", default=Any)

_READ_TOGETHER = 256
"""Samples that ``filter`` holds at once.  Chosen: what a batch of a loader may have."""


@answer_wrong_calls
class RowSelection(Generic[T]):
    """What a dataset can do that knows how to give some of its rows as a dataset."""

    def __len__(self) -> int:
        raise NotImplementedError

    def subset(self, rows: Ints) -> Self:
        """Give some rows as a dataset.

        Args:
            rows: Rows ``[n]`` from 0 to ``len(self) - 1``, repeats allowed.

        Returns:
            A dataset of these, over the same cache.
        """
        raise NotImplementedError

    def read_together(self, rows: Sequence[int]) -> list[T]:
        """Read samples."""
        raise NotImplementedError

    def index_select(self, idx: object) -> Self:
        """Choose rows, as PyG's datasets do.

        Args:
            idx: A slice, also of shares such as ``slice(0.8)``; a list, a tensor or an
                array of rows; or a mask.

        Returns:
            A dataset of these rows, over the same cache.

        Raises:
            IndexError: A row is not there, or a mask has another length.
            TypeError: It is no index.
        """
        return self.subset(normalize_indices(idx, len(self)))

    def select(self, indices: object) -> Self:
        """Choose rows, as Hugging Face's datasets do; the same as ``index_select``."""
        return self.index_select(indices)

    def take(self, n: int) -> Self:
        """Choose the first ``n`` rows, or all where there are fewer."""
        return self.index_select(slice(check_integer("n", n, least=0)))

    def skip(self, n: int) -> Self:
        """Choose all rows but the first ``n``."""
        return self.index_select(slice(check_integer("n", n, least=0), None))

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> Self:  # noqa: FBT001, FBT002 -- as Hugging Face has it
        """Choose one of several parts that are about equally long.

        Args:
            num_shards: How many parts there are.
            index: Which one, from 0.
            contiguous: Rows that follow each other; else every ``num_shards``-th.

        Returns:
            A dataset of these rows, over the same cache.

        Raises:
            OptionError: There is no such part.
        """
        count = check_integer("num_shards", num_shards, least=1)
        number = check_integer("index", index, least=0, most=count - 1)
        if not check_truth("contiguous", contiguous):
            return self.index_select(slice(number, None, count))
        # The first parts have one row more where the rows do not divide.
        rows_of_shard, left_over = divmod(len(self), count)
        start = rows_of_shard * number + min(number, left_over)
        if number < left_over:
            # The first shards have a row more, as in Hugging Face's datasets.
            rows_of_shard += 1
        return self.index_select(slice(start, start + rows_of_shard))

    @overload
    def shuffle(
        self,
        return_perm: Literal[False] = False,  # noqa: FBT002 -- as below
        *,
        seed: int | None = None,
        generator: np.random.Generator | torch.Generator | None = None,
    ) -> Self: ...
    @overload
    def shuffle(
        self,
        return_perm: Literal[True],
        *,
        seed: int | None = None,
        generator: np.random.Generator | torch.Generator | None = None,
    ) -> tuple[Self, torch.Tensor]: ...
    def shuffle(
        self,
        return_perm: bool = False,  # noqa: FBT001, FBT002 -- as PyG has it
        *,
        seed: int | None = None,
        generator: np.random.Generator | torch.Generator | None = None,
        **others: Any,
    ) -> Any:
        """Put the rows in random order, once; a loader's shuffles each epoch anew.

        Args:
            return_perm: Give the order too, as PyG's datasets do.
            seed: What the order follows from, as in Hugging Face's datasets, with the
                same order as theirs.
            generator: Gives the random numbers instead: numpy's or torch's.
            others: None; arguments of Hugging Face's method are refused by name.

        Returns:
            A dataset over the same cache; with ``return_perm`` a pair of it and the
            rows ``[n]`` int64.  Without seed and generator ``torch.randperm`` gives
            the order, as in PyG.

        Raises:
            OptionError: An argument is not what it should be.
        """
        refuse_options("shuffle", others, ("return_perm", "seed", "generator"))
        if type(return_perm) is int:
            message = (
                f"shuffle's first argument is return_perm, as in PyG: {return_perm}."
            )
            why = "Hugging Face's first argument is the seed"
            raise OptionError(message, why=why, fix=f"shuffle(seed={return_perm})")
        check_truth("return_perm", return_perm)
        order = _random_rows(len(self), seed, generator)
        shuffled = self.subset(order)
        return (shuffled, torch.from_numpy(order)) if return_perm else shuffled

    def train_test_split(
        self,
        test_size: float | None = None,
        train_size: float | None = None,
        shuffle: bool = True,  # noqa: FBT001, FBT002 -- as Hugging Face has it
        *,
        seed: int | None = None,
        generator: np.random.Generator | torch.Generator | None = None,
        **others: Any,
    ) -> dict[str, Self]:
        """Divide the rows in two, as Hugging Face's datasets do.

        Args:
            test_size: Rows of the second part, or their share; what is left if None,
                a quarter if both are.
            train_size: Rows of the first part, or their share; what is left if None.
            shuffle: Choose at random; else the first rows and those that follow.
            seed: What the choice follows from; the same as theirs.
            generator: Gives the random numbers instead: numpy's or torch's.
            others: None; arguments of Hugging Face's method are refused by name.

        Returns:
            The two datasets, as "train" and "test", over the same cache.

        Raises:
            OptionError: There are not so many rows, or one part has none.
        """
        known = ("test_size", "train_size", "shuffle", "seed", "generator")
        refuse_options("train_test_split", others, known)
        train, test = _split_sizes(len(self), train_size, test_size)
        if not check_truth("shuffle", shuffle):
            order = np.arange(len(self))
            chosen = order[train : train + test]
            return Split(train=self.subset(order[:train]), test=self.subset(chosen))
        order = _random_rows(len(self), seed, generator)
        remaining = order[test : test + train]
        return Split(train=self.subset(remaining), test=self.subset(order[:test]))

    @overload
    def filter(
        self,
        function: Callable[[T], object],
        with_indices: Literal[False] = False,  # noqa: FBT002 -- as below
    ) -> Self: ...
    @overload
    def filter(
        self, function: Callable[[T, int], object], with_indices: Literal[True]
    ) -> Self: ...
    def filter(
        self,
        function: Callable[..., Any],
        with_indices: bool = False,  # noqa: FBT001, FBT002 -- as Hugging Face has it
        **others: Any,
    ) -> Self:
        """Choose the samples that a function says yes to; it reads each of them once.

        Args:
            function: Called with a sample; true for those to keep.
            with_indices: Call it with the sample and its row.
            others: None; arguments of Hugging Face's method are refused by name.

        Returns:
            A dataset of these rows, over the same cache.

        Raises:
            OptionError: An argument is not what it should be, or the function answers
                neither yes nor no.
        """
        refuse_options("filter", others, ("function", "with_indices"))
        check_truth("with_indices", with_indices)
        check_function_of_samples(function, with_indices=with_indices)
        chosen_rows: list[int] = []
        for start in range(0, len(self), _READ_TOGETHER):
            rows = range(start, min(start + _READ_TOGETHER, len(self)))
            for row, sample in zip(rows, self.read_together(rows), strict=True):
                answer = function(sample, row) if with_indices else function(sample)
                if _is_yes(answer, row):
                    chosen_rows.append(row)
        return self.subset(np.array(chosen_rows, np.int64))


class Split(dict[str, T]):
    """The parts of a dataset by name, as Hugging Face's ``DatasetDict`` has them."""

    def __missing__(self, name: object) -> NoReturn:
        message = f"There is no part {show_value(name)} of this split."
        why = f"its parts are {' and '.join(map(repr, self))}"
        fix = "split['test']; split['train'].train_test_split(0.1) makes another part"
        raise NoSuchKeyError(message, why=why, fix=fix)


def _is_yes(answer: object, row: int) -> bool:
    """Take what a function of ``filter`` says of a sample.

    Raises:
        OptionError: It is neither yes nor no: None, or several truths.
    """
    if answer is None:
        message = f"The function of filter returned None for row {row}."
        why = "it says which samples to keep"
        fix = "return True or False at the end of the function"
        raise OptionError(message, why=why, fix=fix)
    try:
        return bool(answer)
    except (RuntimeError, ValueError) as error:
        message = f"The function of filter returned {kind_of(answer)} for row {row}, "
        message += "which is neither true nor false."
        why = "it has several values, and a sample is kept or not"
        fix = "lambda sample: bool(f(sample).all()), or .any()"
        raise OptionError(message, why=why, fix=fix) from error


def _random_rows(count: int, seed: int | None, generator: object) -> Ints:
    """Draw an order of rows, as the library whose arguments were given draws it."""
    if seed is not None and generator is not None:
        message = "seed and generator were both given."
        raise OptionError(message, why="one of them gives the order", fix="drop one")
    if seed is not None:
        generator = np.random.default_rng(check_integer("seed", seed, least=0))
    if generator is None or isinstance(generator, torch.Generator):
        return torch.randperm(count, generator=generator).numpy()
    if isinstance(generator, np.random.Generator):
        return generator.permutation(count)
    message = f"generator must be numpy's or torch's, got {show_value(generator)}."
    why = f"it is {kind_of(generator)}"
    raise OptionError(message, why=why, fix="generator=np.random.default_rng(0)")


def _split_sizes(
    count: int, train_size: float | None, test_size: float | None
) -> tuple[int, int]:
    """Say how many rows each part has.

    >>> _split_sizes(10, None, 0.25), _split_sizes(10, 0.25, None)
    ((7, 3), (2, 8))
    """
    if train_size is None and test_size is None:
        test_size = 0.25
    # Rounded as sklearn does it: the test up, the train down.
    test = _part_size("test_size", test_size, count, math.ceil)
    train = _part_size("train_size", train_size, count, math.floor)
    train = count - (test or 0) if train is None else train
    test = count - train if test is None else test
    shares = [size for size in (train_size, test_size) if isinstance(size, float)]
    # Shares of more than the whole are a mistake, also where rounding makes them fit.
    if min(train, test) < 1 or train + test > count or sum(shares) > 1:
        message = (
            f"{count_of(count, 'samples')} cannot be divided into {train} and {test}."
        )
        why = f"train_size={train_size}, test_size={test_size}"
        raise OptionError(message, why=why, fix="train_test_split(test_size=0.25)")
    return train, test


def _part_size(
    name: str, size: object, count: int, rounded: Callable[[float], int]
) -> int | None:
    if size is None:
        return None
    if isinstance(size, float | np.floating):
        if 0 < size < 1:
            return rounded(size * count)
        raise refuse_value(name, size, "a share between 0 and 1", 0.25)
    if isinstance(size, str) and (share := _share_in(size)) is not None:
        raise refuse_value(name, size, "a share between 0 and 1, or a number", share)
    return check_integer(name, size, least=1, most=max(1, count - 1))


def _share_in(text: str) -> float | None:
    """Read the share that was written as a text, "0.2" or "20%"; None for others."""
    number, percent, _ = text.strip().partition("%")
    try:
        share = float(number)
    except ValueError:
        return None
    if percent:
        share /= 100
    return share if 0 < share < 1 else None
