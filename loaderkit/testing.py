"""What tests of your own may use: exact comparison of samples, and two contracts.

A contract is a class of tests.  Subclass it in a file of yours, say how the thing under
test is made, and pytest runs all its tests on that: ``StorageContract`` for a place
where whole shards live, ``ColumnContract`` for a way to keep columns.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import pickle
import threading
import time
import unittest
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.cache.build import open_build
from loaderkit.cache.columns import Block, ShardBuffer
from loaderkit.cache.files import load_manifest
from loaderkit.cache.remote import RemoteCache
from loaderkit.cache.storage import StreamsFiles
from loaderkit.cache.store import Store
from loaderkit.cache.transfer import copy_from_store, copy_to_store
from loaderkit.datasets.kinds import flatten_composite
from loaderkit.datasets.lazy import LazySamples
from loaderkit.errors import (
    CacheError,
    DamagedCacheError,
    OtherWriterError,
    StaleCacheError,
)
from loaderkit.nests import tensor_bytes
from loaderkit.pyg import import_pyg, is_pyg_data

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event
    from pathlib import Path

    import numpy.typing as npt
    from torch_geometric.data.data import BaseData
    from torch_geometric.data.storage import BaseStorage

    from loaderkit.cache.storage import Storage
    from loaderkit.datasets.safe import SafeGraphDataset

_expect = unittest.TestCase()
"""Its ``assertRaises``: ``assert_same`` is of use where pytest is not installed."""


def assert_same(a: object, b: object, path: str = "it") -> None:
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
    # Before mappings, of which a graph has the methods.
    if is_pyg_data(a):
        return _assert_same_graph(a, b, path)
    for kinds, compare in _COMPARERS:
        if isinstance(a, kinds):
            return compare(a, b, path)
    if dataclasses.is_dataclass(a):
        return assert_same(vars(a), vars(b), path)
    # NaN alone differs from itself.
    are_both_nan = a != a and b != b
    assert a == b or are_both_nan, f"{path}: {a!r} is not {b!r}"
    return None


def _without_laziness(value: object) -> Any:
    """Give the list that a lazy list of samples stands for."""
    return list(value) if isinstance(value, LazySamples) else value


def _assert_same_array(a: npt.NDArray[Any], b: npt.NDArray[Any], path: str) -> None:
    assert a.dtype == b.dtype, f"{path}: {a.dtype} is not {b.dtype}"
    assert a.shape == b.shape, f"{path}: {a.shape} is not {b.shape}"
    # Bytes, and not ==: NaN is itself then, and 0.0 is not -0.0.
    assert a.tobytes() == b.tobytes(), f"{path}: values differ"


def _assert_same_mapping(a: Mapping[Any, Any], b: Mapping[Any, Any], path: str) -> None:
    # As lists: whoever unpacks a batch by position sees the order.
    assert list(a) == list(b), f"{path}: keys {list(a)} are not {list(b)}"
    for key in a:
        assert_same(a[key], b[key], f"{path}[{key!r}]")


def _assert_same_sequence(a: Sequence[Any], b: Sequence[Any], path: str) -> None:
    assert len(a) == len(b), f"{path}: {len(a)} items are not {len(b)}"
    for number, (item, wanted) in enumerate(zip(a, b, strict=True)):
        assert_same(item, wanted, f"{path}[{number}]")


def _assert_same_tensor(a: Any, b: Any, path: str) -> None:
    # Any: torch's hints do not know the methods of a jagged tensor.
    assert a.dtype is b.dtype, f"{path}: {a.dtype} is not {b.dtype}"
    assert a.shape == b.shape, f"{path}: {list(a.shape)} is not {list(b.shape)}"
    assert a.layout is b.layout, f"{path}: {a.layout} is not {b.layout}"
    if a.is_nested:
        return assert_same((a.values(), a.offsets()), (b.values(), b.offsets()), path)
    composite = None if _is_plain(a) else flatten_composite(a)
    if composite is not None:
        return assert_same(composite, flatten_composite(b), path)
    if a.numel():
        assert torch.equal(tensor_bytes(a), tensor_bytes(b)), f"{path}: values differ"
    return None


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) is torch.Tensor


def _assert_same_graph(a: BaseData, b: BaseData, path: str) -> None:
    for store, wanted in zip(a.stores, b.stores, strict=True):
        where = path if store._key is None else f"{path}[{store._key!r}]"
        assert store._key == wanted._key, f"{where}: store {wanted._key!r}"
        assert_same(dict(store.items()), dict(wanted.items()), where)

        bookkeeping = _bookkeeping_of(store)
        wanted_bookkeeping = _bookkeeping_of(wanted)
        differing = set(bookkeeping) ^ set(wanted_bookkeeping)
        assert not differing, f"{where}: {differing}"
        for key, value in bookkeeping.items():
            assert_same(value, wanted_bookkeeping[key], f"{where}.{key}")


def _bookkeeping_of(store: BaseStorage) -> dict[str, Any]:
    """Give what PyG notes of a store beside its values, such as ``_num_nodes``."""
    return {
        key: value
        for key, value in store.__dict__.items()
        if key not in _PARTS_OF_EVERY_STORE
    }


_PARTS_OF_EVERY_STORE = {"_mapping", "_parent", "_key"}
"""Its values, which are compared by themselves, and what it belongs to."""

_COMPARERS: tuple[tuple[Any, Callable[[Any, Any, str], None]], ...] = (
    (torch.Tensor, _assert_same_tensor),
    (np.ndarray, _assert_same_array),
    (Mapping, _assert_same_mapping),
    ((list, tuple), _assert_same_sequence),
)


def assert_batch_parity(
    dataset: SafeGraphDataset[Any],
    *,
    batches: int = 20,
    batch_size: int = 8,
    seed: int = 0,
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


class StorageContract:
    """What every ``Storage`` must do.  Subclass it with a fixture ``storage``.

    The fixture gives a storage at a place where there is nothing yet, another place for
    each test, and makes it with little ``Patience``: some requests are to fail::

        class TestMyStorage(StorageContract):
            @pytest.fixture
            def storage(self, tmp_path):
                return MyStorage(f"mine://tests/{tmp_path.name}", patience=SHORT)

    It need not be registered for that.  Files are of 5 MiB at most.
    """

    def test_where_nothing_was_written_nothing_is_there(self, storage: Storage) -> None:
        """A missing file is an error that says where; removing it is none."""
        assert dict(storage.sizes()) == {}
        with _expect.assertRaises(FileNotFoundError) as raised:
            storage.read_file("a.h5", 100)
        assert storage.url in str(raised.exception)
        with _expect.assertRaises(FileNotFoundError) as raised:
            storage.read_range("a.h5", 0, 10)
        assert storage.url in str(raised.exception)
        storage.remove("a.h5")

    def test_what_was_written_is_read_whole_and_in_ranges(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        """Every byte comes back, in whatever ranges it is asked for."""
        content = _bytes_of(seed=0, count=5 << 20)

        storage.write_file("a.h5", _local_file(tmp_path, content))
        storage.write_file("empty.h5", _local_file(tmp_path, b""))

        assert storage.read_file("a.h5", len(content)) == content
        for start, stop in [(0, len(content)), (3, 777), (5, 5), (4 << 20, 5 << 20)]:
            assert storage.read_range("a.h5", start, stop) == content[start:stop]
        assert storage.read_file("empty.h5", 10) == b""
        assert dict(storage.sizes()) == {"a.h5": len(content), "empty.h5": 0}

    def test_what_comes_as_a_stream_is_the_file_or_its_beginning(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        """A storage need not be able to; what it says came whole is whole."""
        content = _bytes_of(seed=1, count=5 << 20)
        storage.write_file("a.h5", _local_file(tmp_path, content))
        target = tmp_path / "streamed"
        target.touch()

        if isinstance(storage, StreamsFiles):
            is_whole = storage.stream_file("a.h5", target)
            came = target.read_bytes()
            assert came == content if is_whole else content.startswith(came)
            target.write_bytes(b"")
            assert not storage.stream_file("missing.h5", target)

        assert target.read_bytes() == b""

    def test_a_range_that_is_not_there_is_an_error(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        """Fewer bytes than were asked for are never given."""
        storage.write_file("a.h5", _local_file(tmp_path, b"0123456789"))

        with _expect.assertRaises(CacheError) as raised:
            storage.read_range("a.h5", 5, 11)

        assert storage.url in str(raised.exception)

    def test_a_file_that_is_too_large_is_not_read(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        """What should be a manifest and has gigabytes would fill the memory."""
        storage.write_file("a.h5", _local_file(tmp_path, b"0123456789"))

        with _expect.assertRaises(DamagedCacheError) as raised:
            storage.read_file("a.h5", 9)

        assert "a.h5" in str(raised.exception)
        assert "bytes" in str(raised.exception)

    def test_a_file_that_is_written_again_is_replaced(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        """Nothing of the file before is left, a longer one either."""
        storage.write_file("a.h5", _local_file(tmp_path, b"before" * 1000))

        storage.write_file("a.h5", _local_file(tmp_path, b"after"))

        assert storage.read_file("a.h5", 100) == b"after"
        assert dict(storage.sizes()) == {"a.h5": 5}

    def test_a_commit_replaces_only_where_it_is_told_to(self, storage: Storage) -> None:
        """A manifest that is there stays, unless it is to be replaced."""
        storage.commit("manifest.json", b"first", replace=False)
        with _expect.assertRaises(FileExistsError):
            storage.commit("manifest.json", b"second", replace=False)
        assert storage.read_file("manifest.json", 10) == b"first"

        storage.commit("manifest.json", b"third", replace=True)

        assert storage.read_file("manifest.json", 10) == b"third"

    def test_what_was_removed_is_gone(self, storage: Storage, tmp_path: Path) -> None:
        """The other files stay."""
        storage.write_file("a.h5", _local_file(tmp_path, b"a"))
        storage.write_file("b.h5", _local_file(tmp_path, b"b"))

        storage.remove("a.h5")

        with _expect.assertRaises(FileNotFoundError):
            storage.read_file("a.h5", 10)
        assert dict(storage.sizes()) == {"b.h5": 1}

    def test_it_travels_to_other_processes(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        """Workers of a loader get it by pickle, before or after its first request."""
        storage.write_file("a.h5", _local_file(tmp_path, b"0123456789"))

        assert _copy_for_another_process(storage).read_range("a.h5", 2, 4) == b"23"

    def test_a_forked_process_and_threads_read_at_once(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        """Connections are shared by threads, and never with a forked process."""
        content = _bytes_of(seed=0, count=64 << 10)
        storage.write_file("a.h5", _local_file(tmp_path, content))
        ranges = [(start, start + 5000) for start in range(0, 60_000, 4000)]

        # Forked after a first request, whose connection both now have: two that read
        # answers from one socket get each other's.
        if "fork" in multiprocessing.get_all_start_methods():
            process = multiprocessing.get_context("fork").Process(
                target=_check_ranges, args=(storage, content, ranges)
            )
            process.start()
            _check_ranges(storage, content, ranges)
            process.join()
            assert process.exitcode == 0
        with ThreadPoolExecutor(4) as threads:
            futures = [
                threads.submit(_check_ranges, storage, content, ranges[number::4])
                for number in range(4)
            ]
            for future in futures:
                future.result()

    def test_of_several_commits_at_once_one_succeeds(self, storage: Storage) -> None:
        """The others get FileExistsError, and the file is the winner's, whole."""
        contents = [letter * 1000 for letter in (b"a", b"b", b"c")]
        writers = [_copy_for_another_process(storage) for _ in contents]
        # Five times: of two that come one after the other a storage without a lock
        # passes, too.
        for number in range(5):
            name = f"commit-{number}"
            all_ready = threading.Barrier(len(contents))

            # Names of the loop as defaults: a closure would see the last ones.
            def commit(
                writer: Storage,
                content: bytes,
                name: str = name,
                all_ready: threading.Barrier = all_ready,
            ) -> bytes | None:
                all_ready.wait()
                try:
                    writer.commit(name, content, replace=False)
                except FileExistsError:
                    return None
                return content

            with ThreadPoolExecutor(len(contents)) as threads:
                outcomes = list(threads.map(commit, writers, contents))

            [winner] = [content for content in outcomes if content is not None]
            assert storage.read_file(name, 1000) == winner

    def test_a_writer_that_is_killed_leaves_whole_files(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        """A file is there whole, as before or as after, whenever its writer dies."""
        contents = [_bytes_of(seed=0, count=1 << 20), _bytes_of(seed=1, count=900_000)]
        files = []
        for number, content in enumerate(contents):
            files.append(tmp_path / f"{number}.h5")
            files[-1].write_bytes(content)

        # Chosen: as it begins, within the first MiB, and some files later.
        for delay_s in (0.0, 0.005, 0.02):
            _kill_a_writer(storage, files, delay_s)

            sizes = storage.sizes()
            for name in ("a.h5", "manifest.json"):
                if name in sizes:
                    assert storage.read_file(name, sizes[name]) in contents
        storage.write_file("a.h5", files[0])
        storage.commit("manifest.json", contents[1], replace=True)
        assert storage.read_file("a.h5", 1 << 20) == contents[0]
        assert storage.read_file("manifest.json", 1 << 20) == contents[1]

    def test_its_shards_are_mapped_from_a_mirror(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        """A cache that is copied there opens from there, and comes back as it was."""
        folder = _small_cache(tmp_path / "packed", first=0)
        copy_to_store(folder, storage, overwrite=False)

        store = _open_mirrored(storage, tmp_path / "mirror")

        assert _rows_of(store) == list(range(_SAMPLES))
        values = store.column("x").shard_part(0).values
        assert isinstance(values, np.ndarray)
        assert not values.flags.writeable

        copy_from_store(storage, tmp_path / "copy")
        for name in load_manifest(folder).files:
            copied = (tmp_path / "copy" / name).read_bytes()
            assert copied == (folder / name).read_bytes()

    def test_a_shard_that_is_wrong_or_missing_is_named(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        """Bytes that were not packed are never mapped; the error says which file."""
        folder = _small_cache(tmp_path / "packed", first=0)
        copy_to_store(folder, storage, overwrite=False)
        wrong, missing = load_manifest(folder).shards.files[:2]
        size = storage.sizes()[wrong]
        # Of the same size, so that the checksum alone can tell.
        storage.write_file(wrong, _local_file(tmp_path, bytes(size)))
        storage.remove(missing)

        store = _open_mirrored(storage, tmp_path / "mirror")

        for sample, name in [(0, wrong), (_SAMPLES // 2, missing)]:
            with _expect.assertRaises(DamagedCacheError) as raised:
                _read_number(store, sample)
            assert f"{storage.url}/{name}" in str(raised.exception)

    def test_a_writer_that_died_has_left_no_cache(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        """Shards without a manifest are nothing, and are not copied again."""
        folder = _small_cache(tmp_path / "packed", first=0)
        names = load_manifest(folder).shards.files
        for name in names:
            storage.write_file(name, folder / name)

        with _expect.assertRaises(CacheError) as raised:
            _open_mirrored(storage, tmp_path / "mirror")
        assert f"There is no cache at {storage.url}" in str(raised.exception)
        transfer = copy_to_store(folder, storage, overwrite=False)

        assert transfer.files == 1  # the manifest
        store = _open_mirrored(storage, tmp_path / "mirror")
        assert _rows_of(store) == list(range(_SAMPLES))

    def test_of_two_writers_one_cache_is_there_whole(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        """The other writer gets an error, and takes no file of the winner's along."""
        folders = [
            _small_cache(tmp_path / "first", first=0),
            _small_cache(tmp_path / "second", first=100),
        ]
        writers = [_copy_for_another_process(storage) for _ in folders]
        both_ready = threading.Barrier(len(folders))

        def write(writer: Storage, folder: Path) -> str:
            both_ready.wait()
            try:
                copy_to_store(folder, writer, overwrite=False)
            except OtherWriterError as error:
                return str(error)
            return "written"

        with ThreadPoolExecutor(len(folders)) as threads:
            outcomes = list(threads.map(write, writers, folders))

        [refusal] = [outcome for outcome in outcomes if outcome != "written"]
        assert storage.url in refusal
        first = 100 * outcomes.index("written")
        store = _open_mirrored(storage, tmp_path / "mirror")
        assert _rows_of(store) == list(range(first, first + _SAMPLES))

    def test_a_cache_that_is_replaced_is_old_or_new_and_never_mixed(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        """Who has the old one open is told; who opens it now reads the new one."""
        old = _small_cache(tmp_path / "old", first=0)
        copy_to_store(old, storage, overwrite=False)
        opened_before = _open_mirrored(storage, tmp_path / "mirror")
        assert _read_number(opened_before, 0) == 0

        new = _small_cache(tmp_path / "new", first=100)
        copy_to_store(new, storage, overwrite=True)

        with _expect.assertRaises(StaleCacheError):
            _read_number(opened_before, _SAMPLES - 1)
        opened_after = _open_mirrored(storage, tmp_path / "mirror")
        assert _rows_of(opened_after) == list(range(100, 100 + _SAMPLES))
        names = {"manifest.json", *load_manifest(new).shards.files}
        assert set(storage.sizes()) == names


_SAMPLES = 6
"""Of a small cache, three in each of two shards."""


@dataclasses.dataclass(frozen=True)
class _CacheIn(RemoteCache):
    """A cache in a storage that ``open_storage`` need not know."""

    opened: Storage | None = None

    @functools.cached_property
    def storage(self) -> Storage:
        """Give the storage."""
        assert self.opened is not None
        return self.opened


def _open_mirrored(storage: Storage, mirror: Path) -> Store:
    return Store(_CacheIn(storage.url, mirror=mirror, opened=storage))


def _small_cache(folder: Path, *, first: int) -> Path:
    """Write a cache whose numbers count up, a row of each sample, from a first one."""
    with open_build(folder, overwrite=True) as build:
        assert build is not None
        build.resume({"compression": None})
        for start in range(0, _SAMPLES, 3):
            block = Block()
            for sample in range(start, start + 3):
                block.append({"x": np.array([first + sample], np.int32)})
            buffer = ShardBuffer()
            buffer.append(block)
            build.add(buffer, state={}, evidence={})
        build.commit(structure={}, fingerprint={}, made_with={})
    return folder


def _read_number(store: Store, sample: int) -> int:
    shard, sample_in_shard = store.locate(sample)
    return int(store.column("x").read(shard, sample_in_shard)[0])


def _rows_of(store: Store) -> list[int]:
    return [_read_number(store, sample) for sample in range(len(store))]


def _copy_for_another_process(storage: Storage) -> Storage:
    copy: Storage = pickle.loads(pickle.dumps(storage))
    return copy


def _check_ranges(
    storage: Storage, content: bytes, ranges: list[tuple[int, int]]
) -> None:
    for start, stop in ranges:
        assert storage.read_range("a.h5", start, stop) == content[start:stop]


def _kill_a_writer(storage: Storage, files: list[Path], delay_s: float) -> None:
    """Have another process write, and kill it some time after it has begun."""
    has_begun = multiprocessing.Event()
    process = multiprocessing.Process(
        target=_write_until_killed, args=(storage, files, has_begun)
    )
    process.start()
    # Where it is spawned it takes seconds to start, and one that failed never begins.
    while not has_begun.wait(0.05):
        assert process.is_alive(), "the writer failed; its traceback is above"
    time.sleep(delay_s)
    process.kill()
    process.join()


def _write_until_killed(storage: Storage, files: list[Path], has_begun: Event) -> None:
    while True:
        for file in files:
            has_begun.set()
            storage.write_file("a.h5", file)
            storage.commit("manifest.json", file.read_bytes(), replace=True)


def _bytes_of(*, seed: int, count: int) -> bytes:
    return np.random.default_rng(seed).bytes(count)


def _local_file(folder: Path, content: bytes) -> Path:
    """Write a file that a storage is to copy."""
    file = folder / "local-file"
    file.write_bytes(content)
    return file


class ColumnContract:
    """What every way of keeping columns must do.  Subclass it, and write ``write``.

    Each test writes samples by column and reads them back through a ``Store``.
    """

    def write(self, path: Path, samples: list[dict[str, npt.NDArray[Any]]]) -> None:
        """Write a cache of these samples to ``path``.

        Raises:
            NotImplementedError: The subclass does not say how.
        """
        raise NotImplementedError

    def test_values_come_back_with_their_shape(self, tmp_path: Path) -> None:
        """Reading one sample gives what was written, bit for bit."""
        samples = _contract_samples()

        self.write(tmp_path / "c", samples)

        store = Store(tmp_path / "c")
        for row, sample in enumerate(samples):
            for name, value in sample.items():
                read = store.column(name).read(*store.locate(row))
                # Integers may be kept narrower; whoever reads them knows their dtype.
                assert_same(read.astype(value.dtype), value, f"{name} of {row}")

    def test_a_gathered_batch_is_the_samples_end_to_end(self, tmp_path: Path) -> None:
        """Rows of a batch come in the order asked, repeats included."""
        samples, rows = _contract_samples(), np.array([3, 0, 3, 7, 5])

        self.write(tmp_path / "c", samples)

        store = Store(tmp_path / "c")
        column = store.column("ragged")
        ranges = store.select(rows).row_ranges(column)
        out = np.empty((ranges.total, 2), np.float32)
        column.gather(ranges, out)
        wanted = np.concatenate([samples[row]["ragged"] for row in rows])
        assert_same(out, wanted)

    def test_what_was_read_is_not_the_store(self, tmp_path: Path) -> None:
        """Writing to a value that was read changes no later read."""
        samples = _contract_samples()
        self.write(tmp_path / "c", samples)
        store = Store(tmp_path / "c")

        store.column("dense").read(0, 1)[:] = 99

        assert_same(store.column("dense").read(0, 1), samples[1]["dense"])


def _contract_samples() -> list[dict[str, npt.NDArray[Any]]]:
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
