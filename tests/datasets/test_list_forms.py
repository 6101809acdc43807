"""Law: lists of a field have one form in all batches, whoever meets in one.

torch's ``default_collate`` is the oracle.  Where it joins all samples of a dataset in
one batch, in whatever order, each batch has what it gives for that batch; where it
refuses them, each batch has the samples' own lists.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, default_collate

import loaderkit
from loaderkit.datasets.list_forms import form_of_bytes
from loaderkit.datasets.plain import to_bytes
from loaderkit.datasets.structure import Structure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_ITEMS: dict[str, Callable[[random.Random], Any]] = {
    "number": lambda draw: draw.choice([draw.randrange(9), draw.random(), True]),
    "text": lambda draw: draw.choice(["C", "H", "a,b", "[", ""]),
    "bytes": lambda draw: draw.choice([b"x", b"[1]"]),
    "pair": lambda draw: [draw.randrange(9), draw.choice("ab")],
    "dict": lambda draw: {"n": draw.randrange(9), "t": [draw.random()]},
    "tensor": lambda draw: torch.full((2,), draw.random()),
    "mix": lambda draw: {"t": torch.ones(1), "l": [draw.choice("ab")]},
}
_LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "equal": lambda _: 2,
    "one empty": lambda draw: draw.choice([2, 2, 2, 0]),
    "any": lambda draw: draw.randrange(4),
    "none": lambda _: 0,
}


def _values(item: str, length: str, wrap: str, draw: random.Random) -> list[Any]:
    """Make the values of a field for 12 samples; the first two differ if any do."""
    values = []
    for _ in range(12):
        row = [_ITEMS[item](draw) for _ in range(_LENGTHS[length](draw))]
        values.append({"plain": row, "tuple": tuple(row), "inner": [row, [1]]}[wrap])
    return values


def _torch_joins(values: Sequence[Any]) -> bool:
    """Tell whether torch joins them, whichever comes first."""
    try:
        for first in range(len(values)):
            default_collate([values[first], *values])
    except (RuntimeError, TypeError, KeyError):
        return False
    return True


def _holds_tensors_in_first(value: Any) -> bool:
    """Tell a list of lists whose first has tensors, in itself or in dicts."""
    inner = value[0] if len(value) == 2 else None
    return isinstance(inner, list) and any(
        isinstance(part, torch.Tensor) or (isinstance(part, dict) and "n" not in part)
        for part in inner
    )


def _equal(value: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        # Which dtype torch gives whole numbers beside others depends on their order.
        is_tensor = isinstance(value, torch.Tensor) and value.shape == expected.shape
        return is_tensor and torch.equal(value.double(), expected.double())
    if isinstance(expected, dict):
        alike = isinstance(value, dict) and value.keys() == expected.keys()
        return alike and all(_equal(value[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        alike = type(value) is type(expected) and len(value) == len(expected)
        return alike and all(map(_equal, value, expected))
    return type(value) is type(expected) and value == expected


def _batches_of(values: Sequence[Any], draw: random.Random) -> list[list[int]]:
    """Choose batches: any, and those of equal lengths, which may look joined."""
    numbers = range(len(values))
    of_length: dict[str, list[int]] = {}
    for number in numbers:
        of_length.setdefault(repr(list(map(type, values[number]))), []).append(number)
    batches = [[draw.randrange(len(values)) for _ in range(3)] for _ in range(3)]
    return [*batches, *(group[:3] for group in of_length.values()), [0], [*numbers]]


_CASES = list(itertools.product(_ITEMS, _LENGTHS, ("plain", "tuple", "inner")))


def _check(dataset: Any, values: Sequence[Any], batches: list[list[int]]) -> int:
    joins = _torch_joins(values)
    loader = loaderkit.build_loader(dataset, batch_sampler=batches, num_workers=0)
    count = 0
    for rows, batch in zip(batches, loader, strict=True):
        of_batch = [values[row] for row in rows]
        expected = default_collate(of_batch) if joins else of_batch
        if not joins and all(map(_holds_tensors_in_first, values)):
            # A list with tensors is joined item by item: each is a field of its own.
            inner = [value[0] for value in of_batch]
            expected = [inner, default_collate([value[1] for value in of_batch])]
        assert _equal(batch["field"], expected), (rows, batch["field"], expected)
        count += 1
    return count


@pytest.mark.many_cases(quick=5)
@pytest.mark.parametrize(("item", "length", "wrap"), _CASES)
def test_a_field_of_lists_has_one_form_in_all_batches(
    tmp_path: Path, item: str, length: str, wrap: str
) -> None:
    draw = random.Random(f"{item} {length} {wrap}")
    values = _values(item, length, wrap, draw)
    samples = [{"id": i, "field": value} for i, value in enumerate(values)]

    dataset = loaderkit.pack(samples, tmp_path / "a.lk", workers=0, shard_bytes=200)

    assert _check(dataset, values, _batches_of(values, draw)) > 4
    whole = dataset.batch(range(len(dataset)))["field"]
    assert _equal(dataset.column("field"), whole)


def _ragged_last() -> list[dict[str, Any]]:
    """Lists of one length, but for the last of all samples."""
    return [{"id": i, "field": ["C"] * (2 + i // 9)} for i in range(10)]


def _stream(span: int, spans: int) -> Any:
    return iter(_ragged_last()[10 * span // spans : 10 * (span + 1) // spans])


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize(
    "how", ["alone", "workers", "stream", "spans", "extend", "map"]
)
def test_one_list_of_another_length_counts_whoever_packs(
    tmp_path: Path, how: str
) -> None:
    samples, path = _ragged_last(), tmp_path / "a.lk"

    if how == "alone":
        dataset = loaderkit.pack(samples, path, workers=0, shard_bytes=50)
    elif how == "workers":
        dataset = loaderkit.pack(samples, path, workers=2, shard_bytes=50)
    elif how == "stream":
        dataset = loaderkit.pack(iter(samples), path, shard_bytes=50)
    elif how == "spans":
        dataset = loaderkit.pack(_stream, path, spans=3, workers=0, shard_bytes=50)
    elif how == "extend":
        loaderkit.pack(samples[:9], path, workers=0)
        dataset = loaderkit.extend(path, samples[9:], workers=0)
    else:
        first = loaderkit.pack(samples, tmp_path / "first.lk", workers=0)
        dataset = first.map(dict, cache=path)

    values = [sample["field"] for sample in samples]
    _check(dataset, values, [[0, 1], [8], [8, 9]])
    _check(dataset[:9], values, [[0, 1], [8]])
    _check(Subset(dataset, range(9)), values, [[0, 1], [8]])
    reopened = loaderkit.open_cache(path)
    _check(reopened, values, [[0, 1], [8], [8, 9]])


def test_lists_of_parts_are_joined_as_those_of_one_cache(tmp_path: Path) -> None:
    samples = _ragged_last()
    values = [sample["field"] for sample in samples]
    parts = [
        loaderkit.pack(part, tmp_path / f"{len(part)}.lk", workers=0)
        for part in (samples[:9], samples[9:])
    ]

    joined = loaderkit.concat(parts, tmp_path / "both.lk")

    _check(joined, values, [[0, 1], [8], [8, 9]])
    _check(ConcatDataset(parts), values, [[0, 1], [8], [8, 9]])
    # Each part has one form, and torch's is kept where it stands alone.
    _check(parts[0], values[:9], [[0, 1], [8]])


def test_without_what_is_known_of_the_cache_the_form_would_follow_the_batch(
    tmp_path: Path,
) -> None:
    """The twin: torch joins the lists of a batch that happen to be equally long."""
    samples = _ragged_last()
    dataset = loaderkit.pack(samples, tmp_path / "a.lk", workers=0)
    values = [sample["field"] for sample in samples]

    joined_by_torch = default_collate(values[:2])

    assert joined_by_torch == [("C", "C"), ("C", "C")]
    assert not _equal(dataset.batch([0, 1])["field"], joined_by_torch)


def test_a_transform_that_leaves_lists_alone_has_them_in_the_cache_s_form(
    tmp_path: Path,
) -> None:
    samples = _ragged_last()
    values = [sample["field"] for sample in samples]
    loaderkit.pack(samples, tmp_path / "a.lk", workers=0)

    dataset = loaderkit.open_cache(tmp_path / "a.lk", transform=dict)

    _check(dataset, values, [[0, 1], [8], [8, 9]])


def test_lists_whose_forms_no_cache_knows_are_told_once(tmp_path: Path) -> None:
    path = tmp_path / "a.lk"
    loaderkit.pack([{"n": n} for n in (2, 2, 0, 3)], path, workers=0)
    dataset = loaderkit.open_cache(path, transform=lambda d: {"field": ["C"] * d["n"]})
    assert dataset.batch([0, 1])["field"] == [("C", "C"), ("C", "C")]

    with pytest.warns(UserWarning, match="'field' holds lists of 0 and of 3 items"):
        batch = dataset.batch([2, 3])

    assert batch["field"] == [[], ["C"] * 3]
    assert dataset.batch([0, 2])["field"] == [["C", "C"], []]  # and no warning


def test_a_cache_that_was_packed_before_forms_were_noted_is_read_as_before(
    tmp_path: Path,
) -> None:
    samples = _ragged_last()
    structure = loaderkit.pack(samples, tmp_path / "a.lk", workers=0)._open_cache()
    content = structure.structure.to_json()
    del content["lists"]

    known = Structure.from_json(content)
    known.learn_list_forms("field", ["[2*s]"])

    assert known.list_forms == {"field": None}
    assert Structure.from_json(known.to_json()).list_forms == {"field": None}


@pytest.mark.parametrize("seed", range(6))
def test_forms_are_equal_where_torch_joins_two_lists_in_both_orders(seed: int) -> None:
    draw = random.Random(seed)
    plain = [name for name in _ITEMS if name not in {"tensor", "mix"}]

    def value() -> list[Any]:
        rows = [_ITEMS[draw.choice(plain)](draw) for _ in range(draw.randrange(3))]
        return [rows, 1] if draw.random() < 0.3 else rows

    for _ in range(60):
        one, other = value(), value()
        forms = [form_of_bytes("x", to_bytes(each)) for each in (one, other)]
        assert (forms[0] == forms[1]) == _joins_alike(one, other), (one, other)


def _joins_alike(one: list[Any], other: list[Any]) -> bool:
    """Ask torch in both orders, and whether nothing of either is left out."""
    try:
        both = default_collate([one, other]), default_collate([other, one])
    except (RuntimeError, TypeError, KeyError):
        return False
    return str(_kinds(both[0])) == str(_kinds(both[1])) and _has_no_mixture(both[0])


def _kinds(batch: Any) -> Any:
    if isinstance(batch, list | tuple):
        return [_kinds(part) for part in batch]
    if isinstance(batch, dict):
        return {key: _kinds(part) for key, part in batch.items()}
    return "tensor" if isinstance(batch, torch.Tensor) else type(batch).__name__


def _has_no_mixture(batch: Any) -> bool:
    """Tell a tuple of a text and something else, which torch lets pass."""
    if isinstance(batch, dict):
        return all(map(_has_no_mixture, batch.values()))
    if isinstance(batch, tuple):
        return len({type(part) for part in batch}) == 1
    return not isinstance(batch, list) or all(map(_has_no_mixture, batch))
