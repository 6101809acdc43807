"""What tests of your own datasets may use: exact comparison, and the store contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from loaderkit.cache.store import Store
from loaderkit.datasets.composites import take_apart
from loaderkit.datasets.lazy import LazySamples
from loaderkit.pyg import import_pyg, is_pyg_data


def assert_same(a: Any, b: Any, path: str = "it") -> None:
    """Fail unless two samples or batches are equal in every attribute.

    Types, key order, dtypes, shapes, bits (NaN equals NaN), metadata of sparse tensors
    and of ``EdgeIndex``, and PyG's private bookkeeping all count.

    Args:
        a: A sample or batch.
        b: What it should equal.
        path: What to call them in the message.

    Raises:
        AssertionError: They differ; the message names the first place.
    """
    a, b = _without_laziness(a), _without_laziness(b)
    assert type(a) is type(b), f"{path}: {type(a)} is not {type(b)}"
    if is_pyg_data(a):
        return _assert_same_graph(a, b, path)
    for kinds, compare in _COMPARERS:
        if isinstance(a, kinds):
            return compare(a, b, path)
    if dataclasses.is_dataclass(a):
        return assert_same(vars(a), vars(b), path)
    nan = a != a and b != b
    assert a == b or nan, f"{path}: {a!r} is not {b!r}"
    return None


def _without_laziness(value: Any) -> Any:
    """Give the list that a lazy list of samples stands for."""
    return list(value) if isinstance(value, LazySamples) else value


def _assert_same_array(a: Any, b: Any, path: str) -> None:
    assert a.dtype == b.dtype, f"{path}: {a.dtype} is not {b.dtype}"
    assert a.shape == b.shape, f"{path}: {a.shape} is not {b.shape}"
    assert a.tobytes() == b.tobytes(), f"{path}: values differ"


def _assert_same_mapping(a: Any, b: Any, path: str) -> None:
    assert list(a) == list(b), f"{path}: keys {list(a)} are not {list(b)}"
    for key in a:
        assert_same(a[key], b[key], f"{path}[{key!r}]")


def _assert_same_sequence(a: Any, b: Any, path: str) -> None:
    assert len(a) == len(b), f"{path}: {len(a)} items are not {len(b)}"
    for at, (x, y) in enumerate(zip(a, b, strict=True)):
        assert_same(x, y, f"{path}[{at}]")


def _assert_same_tensor(a: Any, b: Any, path: str) -> None:
    assert a.dtype is b.dtype, f"{path}: {a.dtype} is not {b.dtype}"
    assert a.shape == b.shape, f"{path}: {list(a.shape)} is not {list(b.shape)}"
    assert a.layout is b.layout, f"{path}: {a.layout} is not {b.layout}"
    if a.is_nested:
        return assert_same((a.values(), a.offsets()), (b.values(), b.offsets()), path)
    parts = None if _is_plain(a) else take_apart(a)
    if parts is not None:
        return assert_same(parts, take_apart(b), path)
    if a.numel():
        assert torch.equal(_bits(a), _bits(b)), f"{path}: values differ"
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) is torch.Tensor


def _assert_same_graph(a: Any, b: Any, path: str) -> None:
    for one, other in zip(a.stores, b.stores, strict=True):
        where = path if one._key is None else f"{path}[{one._key!r}]"
        assert one._key == other._key, f"{where}: store {other._key!r}"
        assert_same(dict(one.items()), dict(other.items()), where)
        private = {k: v for k, v in one.__dict__.items() if k not in _PARTS}
        theirs = {k: v for k, v in other.__dict__.items() if k not in _PARTS}
        assert set(private) == set(theirs), f"{where}: {set(private) ^ set(theirs)}"
        for key, value in private.items():
            assert_same(value, theirs[key], f"{where}.{key}")


_PARTS = {"_mapping", "_parent", "_key"}
_COMPARERS: tuple[tuple[Any, Callable[[Any, Any, str], None]], ...] = (
    (torch.Tensor, _assert_same_tensor),
    (np.ndarray, _assert_same_array),
    (Mapping, _assert_same_mapping),
    ((list, tuple), _assert_same_sequence),
)


def assert_batch_parity(
    dataset: Any, *, batches: int = 20, batch_size: int = 8, seed: int = 0
) -> None:
    """Fail unless a dataset's batches are those that PyG would make of its samples.

    Args:
        dataset: A ``SafeGraphDataset``.
        batches: How many random batches to compare.
        batch_size: Graphs a batch, drawn with repeats.
        seed: Which batches.

    Raises:
        AssertionError: A batch differs; the message names the first place.
    """
    join = import_pyg().batch.from_data_list
    generator = np.random.default_rng(seed)
    for _ in range(batches):
        rows = generator.integers(0, len(dataset), batch_size).tolist()
        wanted = join([dataset[row] for row in rows])
        assert_same(dataset.batch(rows), wanted, f"batch {rows}")


class StoreContract:
    """What every way of storing columns must do.  Subclass it, and write ``write``.

    Each test writes samples by column and reads them back through a ``Store``.
    """

    def write(self, path: Any, samples: list[dict[str, np.ndarray[Any, Any]]]) -> None:
        """Write a cache of these samples to ``path``.

        Raises:
            NotImplementedError: The subclass does not say how.
        """
        raise NotImplementedError

    def test_values_come_back_with_their_shape(self, tmp_path: Any) -> None:
        """Reading one sample gives what was written, bit for bit."""
        samples = _samples()

        self.write(tmp_path / "c", samples)

        store = Store(tmp_path / "c")
        for row, sample in enumerate(samples):
            for name, value in sample.items():
                read = store.column(name).read(*store.locate(row))
                # integers may be kept narrower; whoever reads them knows their dtype
                assert_same(read.astype(value.dtype), value, f"{name} of {row}")

    def test_a_gathered_batch_is_the_samples_end_to_end(self, tmp_path: Any) -> None:
        """Rows of a batch come in the order asked, repeats included."""
        samples, rows = _samples(), np.array([3, 0, 3, 7, 5])

        self.write(tmp_path / "c", samples)

        store = Store(tmp_path / "c")
        column = store.column("ragged")
        runs = store.pick(rows).runs(column)
        out = np.empty((runs.total, 2), np.float32)
        column.gather(runs, out)
        wanted = np.concatenate([samples[row]["ragged"] for row in rows])
        assert_same(out, wanted)

    def test_what_was_read_is_not_the_store(self, tmp_path: Any) -> None:
        """Writing to a value that was read changes no later read."""
        samples = _samples()
        self.write(tmp_path / "c", samples)
        store = Store(tmp_path / "c")

        store.column("dense").read(0, 1)[:] = 99

        assert_same(store.column("dense").read(0, 1), samples[1]["dense"])


def _samples() -> list[dict[str, np.ndarray[Any, Any]]]:
    generator = np.random.default_rng(0)
    return [
        {
            "dense": generator.random(3),
            "ragged": generator.random((row % 4, 2)).astype(np.float32),
            "shaped": generator.random((row % 3, row % 2 + 1)),
            "number": np.array(row * 1000 - 3),
            "empty": np.empty((0, 4), np.float16),
            "flag": np.array([row % 2 == 0, True]),
        }
        for row in range(9)
    ]
