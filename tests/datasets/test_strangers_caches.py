"""Nothing in a cache runs code, reads elsewhere, or takes more than it says."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import NamedTuple

import h5py
import large_strangers
import numpy as np
import pytest
import strangers
import torch
import xxhash
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from loaderkit import SafeDataset, inspect_cache, open_cache, pack, verify
from loaderkit.cache.files import FileIdentity, check_digest, load_manifest
from loaderkit.cache.verified import VerifiedFiles, record_path
from loaderkit.errors import CacheError, DamagedCacheError, DatasetError, LoaderkitError
from loaderkit.testing import assert_same

FORK = multiprocessing.get_context("fork")


@dataclasses.dataclass
class Own:
    values: object


class Pair(NamedTuple):
    first: object
    second: object


class Box(dict):
    pass


class Molecule(Data):
    pass


def packed(tmp_path, sample=None, count=4, **options):
    """A small cache on disk."""
    sample = {"x": torch.arange(6.0)} if sample is None else sample
    pack([sample] * count, tmp_path / "c.lk", workers=0, **options)
    return tmp_path / "c.lk"


def content_of(path):
    return strangers.content_with_objects(path)


def rewrite(path, content):
    (path / "manifest.json").write_text(strangers.manifest_text(content))


def assert_it_ends(ask, path):
    """Ask in a process of its own; the test runner has a deadline where it hangs."""
    child = FORK.Process(target=ask, args=(path,))
    child.start()
    child.join()
    assert child.exitcode == 0


def age(path):
    """Let files look older than the two seconds in which a hash is not remembered."""
    time.sleep(2.1)
    return path


@pytest.mark.slow
@pytest.mark.needs("hdf5plugin")
def test_mutated_caches_are_read_or_refused(tmp_path):
    figures = strangers.try_in_child(tmp_path, range(1_000))

    assert not figures.failures, "\n".join(map(str, figures.failures))
    assert figures.refused > 500
    assert figures.read > 200


@pytest.mark.slow
@pytest.mark.parametrize("fault", strangers.PLANTED)
def test_a_planted_fault_is_found_among_mutants(tmp_path, fault):
    names = ("numbers", "variants")
    figures = strangers.try_in_child(tmp_path, range(60), names=names, planted=fault)

    assert figures.failures


@pytest.fixture
def allocator(monkeypatch):
    for name, value in large_strangers.ALLOCATOR.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
@pytest.mark.needs("proc")
@pytest.mark.usefixtures("allocator")
def test_a_batch_takes_at_most_twice_its_shard_and_is_whole_or_none(tmp_path):
    law = large_strangers.Trial(range(40), times=2)
    # Some ask torch for more than the heap has free, whatever was there before.
    planted = large_strangers.Trial(range(21), times=0)

    names = ("graphs", "sparse", "texts", "numbers zstd")
    in_one_form = large_strangers.LimitTrial(names, large_strangers.whole_batch)
    swallowed = large_strangers.LimitTrial(names, large_strangers.whole_batch_or_list)

    figures, of_planted, of_form, of_swallowed = large_strangers.try_in_child(
        tmp_path, [law, planted, in_one_form, swallowed]
    )

    assert not figures.failures, "\n".join(map(str, figures.failures))
    assert figures.answered > 40
    assert of_planted.failures
    assert not of_form.failures, "\n".join(map(str, of_form.failures))
    assert of_form.refused > 10
    assert of_form.answered > 4
    assert of_swallowed.failures


@pytest.mark.slow
@pytest.mark.parametrize("name", ["name", "json.a", "record.name", "big", "@key"])
def test_bytes_of_texts_that_are_none_are_told_by_whatever_reads_them(
    tmp_path, name, every_case
):
    seed = strangers.Seed.make("texts", tmp_path)
    (shard,) = seed.content["shards"]
    values = shard["arrays"][f"{name}/values"]
    asks = {
        "sample": lambda dataset: dataset[0],
        "batch": lambda dataset: dataset.batch([0, 1, 2]),
        "sizes": lambda dataset: dataset.sizes(),
        "key": lambda dataset: dataset.key(0),
    }
    path, refused, read = tmp_path / "texts", 0, 0
    file = path / shard["file"]
    sound = file.read_bytes()

    start = values["offset"]
    end = start + min(20, values["shape"][-1])
    # Every third place too is now at the begin of a value, now within it.
    for at in range(start, end, 1 if every_case else 3):
        for byte in b'\xff"[9':
            file.write_bytes(sound[:at] + bytes([byte]) + sound[at + 1 :])
            for ask in asks.values():
                dataset = open_cache(path, checksums="never", classes=strangers.CLASSES)
                try:
                    ask(dataset)
                except CacheError:
                    refused += 1
                else:
                    read += 1

    assert refused > 0
    assert read > 0


# Classes


def renamed(path, ours, theirs):
    """Put another class in the place of ours in a manifest."""
    text = json.dumps(content_of(path))
    name = f"{ours.__module__}:{ours.__qualname__}"
    assert name in text
    rewrite(path, json.loads(text.replace(name, theirs)))
    return path


SAMPLES = {
    Own: Own(torch.ones(2)),
    Pair: Pair(torch.ones(2), 1),
    Box: Box(a=torch.ones(2)),
    Molecule: Molecule(x=torch.ones(2, 1)),
}
GADGETS = [
    "evil:Thing",
    "evil.inner:Thing",
    "os:system",
    "builtins:print",
    "builtins:type",
    "subprocess:Popen",
    "torch._dynamo.package:SystemInfo",
    "torch._dynamo.aot_compile:AOTCompiledFunction",
    "urllib.parse:SplitResult",
    "collections:Counter.__init__",
    "collections:namedtuple",
    "http.cookies:SimpleCookie",
    "email.message:Message",
    ":",
    "torch_geometric.data.data:DataTensorAttr",
    "torch_geometric.data.batch:Batch",
    "__main__:Thing",
]


@pytest.mark.many_cases(quick=12)
@pytest.mark.parametrize("ours", SAMPLES)
@pytest.mark.parametrize("theirs", GADGETS)
def test_a_class_beyond_the_known_ones_is_refused_and_not_imported(
    tmp_path, monkeypatch, ours, theirs
):
    (tmp_path / "evil.py").write_text("raise SystemExit('evil ran')")
    monkeypatch.syspath_prepend(tmp_path)
    path = renamed(packed(tmp_path, SAMPLES[ours]), ours, theirs)
    before = set(sys.modules)

    with pytest.raises(LoaderkitError) as caught:
        open_cache(path, classes=[Own])[0]

    assert set(sys.modules) == before
    if ":" in theirs.strip(":"):
        assert theirs.rpartition(":")[2] in str(caught.value)
        assert "classes=[" in str(caught.value)


@pytest.mark.parametrize("ours", SAMPLES)
def test_unknown_classes_are_read_as_plain_containers_on_request(tmp_path, ours):
    path = renamed(packed(tmp_path, SAMPLES[ours]), ours, "evil:Thing")

    sample = open_cache(path, unknown_classes="plain")[0]

    assert type(sample) is (Data if ours is Molecule else dict)
    assert "evil" not in sys.modules


@pytest.mark.parametrize("ours", SAMPLES)
def test_classes_that_are_passed_are_made(tmp_path, ours):
    path = packed(tmp_path, SAMPLES[ours])

    sample = open_cache(path, classes=[ours])[0]

    assert type(sample) is ours
    with pytest.raises(DatasetError, match=r"classes=\[" + ours.__name__):
        open_cache(path)[0]


class OwnDataset(SafeDataset):
    def keys(self):
        return ["a", "b"]

    def load(self, key):
        return Own(torch.ones(2)) if key else None


@pytest.mark.parametrize("key", ["'atom'", "('atom', 'in', 'bond')"])
def test_node_and_edge_types_of_a_graph_that_has_none_are_refused(tmp_path, key):
    path = packed(tmp_path, Data(x=torch.ones(2, 1)))
    content = content_of(path)
    content["structure"]["variants"][0][3] = [key]
    rewrite(path, content)

    with pytest.raises(DamagedCacheError, match="node and edge types"):
        open_cache(path)


@pytest.mark.slow
def test_the_module_of_ones_own_subclass_is_known(tmp_path):
    OwnDataset(cache=tmp_path / "c.lk")[0]

    assert type(OwnDataset(cache=tmp_path / "c.lk")[0]) is Own


def test_a_module_that_makes_names_when_asked_is_not_asked(tmp_path, monkeypatch):
    asked = []
    module = types.ModuleType("lazy_module")
    module.__getattr__ = lambda name: asked.append(name) or Own
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    dataset_class = type("D", (SafeDataset,), {"__module__": "lazy_module"})
    path = renamed(packed(tmp_path, SAMPLES[Own]), Own, "lazy_module:Thing")

    with pytest.raises(DatasetError, match="Thing"):
        dataset_class(cache=path)[0]

    assert asked == []


def test_a_class_that_is_no_such_container_is_refused(tmp_path):
    path = renamed(packed(tmp_path, SAMPLES[Pair]), Pair, f"{__name__}:Own")

    with pytest.raises(DatasetError, match="Own"):
        open_cache(path, classes=[Own])[0]


# Files


def fifo(file):
    os.mkfifo(file)


def device(file):
    file.symlink_to("/dev/zero")


def link(file):
    other = file.with_name("elsewhere")
    other.write_bytes(b"secret")
    file.symlink_to(other)


def dangling(file):
    file.symlink_to(file.with_name("nowhere"))


def folder(file):
    file.mkdir()


def unix_socket(file):
    with socket.socket(socket.AF_UNIX) as server:
        back = Path.cwd()
        os.chdir(file.parent)  # the name of a socket has at most 108 bytes
        server.bind(file.name)
        os.chdir(back)


KINDS = [fifo, device, link, dangling, folder, unix_socket]


def ask_all(path):
    """Ask everything of a cache; an error of ours is an answer."""
    again = [{"x": torch.zeros(3)}] * 3
    for ask in (
        lambda: open_cache(path)[0],
        lambda: open_cache(path).batch([0, 1]),
        lambda: inspect_cache(path),
        lambda: str(verify(path)),
        lambda: pack(again, path, workers=0),
        lambda: pack(again, path, workers=0, overwrite=True),
    ):
        with contextlib.suppress(LoaderkitError):
            ask()


@pytest.mark.long_cases
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["manifest.json", "shard", "sources", ".lock", ".lock-soft", ".building"]
)
def test_what_is_no_regular_file_is_never_waited_for(tmp_path, name, kind):
    (tmp_path / "raw").write_text("1")
    path = packed(tmp_path)
    file = path / name
    if name == "shard":
        [file] = path.glob("*.h5")
    elif name == "sources":
        file = next(path.glob("sources-*.json"), path / "sources-0123456789abcdef.json")
    if file.is_dir():
        file.rmdir()
    file.unlink(missing_ok=True)
    kind(file)

    assert_it_ends(ask_all, path)
    for elsewhere in path.glob("elsewhere"):
        assert elsewhere.read_bytes() == b"secret"


def huge(text):
    return lambda file: (file.write_text(text), os.truncate(file, 1 << 42))


def write(text):
    return lambda file: file.write_bytes(text.encode("utf-8", "surrogatepass"))


HEAD = '{"format": "loaderkit-cache", "version": 2, "checksum": "0", "content": '
MANIFESTS = {
    "huge": huge(HEAD),
    "empty": write(""),
    "deep": write(HEAD + "[" * 200_000),
    "deep objects": write('{"a":' * 100_000),
    "closed": write(HEAD + "[" * 900 + "]" * 900 + "}"),
    "huge integer": write(
        '{"format": "loaderkit-cache", "version": ' + "9" * 9000 + "}"
    ),
    "large version": write('{"format": "loaderkit-cache", "version": 9e999}'),
    "nan": write(HEAD + "NaN}"),
    "true version": write('{"format": "loaderkit-cache", "version": true}'),
    "duplicates": write(HEAD + '1, "content": 2, "checksum": 3}'),
    "surrogates": write(HEAD + '"\\ud800"}'),
    "raw surrogates": write(HEAD + '"\ud800"}'),
    "null bytes": write("\x00" * 100),
    "list": write("[]"),
    "number": write("1"),
    "bom": write("\ufeff{}"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_is_none_is_refused(tmp_path, name):
    path = packed(tmp_path)
    MANIFESTS[name](path / "manifest.json")

    for ask in (open_cache, inspect_cache):
        with pytest.raises(CacheError):
            ask(path)
    assert not verify(path).ok


# What HDF5 could be made to read


def with_shard(path, change):
    """Change a shard as a stranger with h5py would, and make the manifest fit."""
    content = content_of(path)
    [shard] = content["shards"]
    file = path / shard["file"]
    change(file)
    data = file.read_bytes()
    digest = xxhash.xxh3_128_hexdigest(data)
    shard.update(file=f"00000-{digest[:16]}.h5", xxh3=digest, bytes=len(data))
    file.rename(path / shard["file"])
    rewrite(path, content)
    return path


def replace_dataset(make):
    def change(file):
        with h5py.File(file, "r+") as opened:
            name = next(n for n in ("x/values", "/x/values") if n in opened)
            shape, dtype = opened[name].shape, opened[name].dtype
            del opened[name]
            make(opened, name, file.parent.parent / "secret.h5", shape, dtype)

    return change


def external_link(opened, name, secret, *_):
    opened[name] = h5py.ExternalLink(str(secret), "/secret")


def external_storage(opened, name, secret, shape, dtype):
    opened.create_dataset(name, shape, dtype, external=[(str(secret), 0, 1 << 20)])


def virtual_dataset(opened, name, secret, shape, dtype):
    layout = h5py.VirtualLayout(shape, dtype)
    layout[...] = h5py.VirtualSource(str(secret), "secret", shape)
    opened.create_virtual_dataset(name, layout)


def soft_link(opened, name, *_):
    opened[name] = h5py.SoftLink("/nowhere")


@pytest.mark.many_cases(quick=9)
@pytest.mark.parametrize("compression", [None, "gzip", "lzf"])
@pytest.mark.parametrize(
    "make", [external_link, external_storage, virtual_dataset, soft_link]
)
def test_hdf5_is_never_led_to_another_file(tmp_path, make, compression):
    path = packed(tmp_path, {"x": torch.arange(6.0)}, compression=compression)
    with h5py.File(tmp_path / "secret.h5", "w") as secret:
        secret["secret"] = np.full((4, 6), 42, "f4")
    os.utime(tmp_path / "secret.h5", ns=(1, 1))  # any read would change this
    with_shard(path, replace_dataset(make))

    try:
        samples = [open_cache(path)[0], open_cache(path).batch([0, 1])]
    except LoaderkitError:
        samples = []

    assert not any((sample["x"] == 42).any() for sample in samples)
    assert (tmp_path / "secret.h5").stat().st_atime_ns == 1


def swollen(shard, rows):
    """Say that a chunk, of which few bytes are stored, holds so many rows."""
    array = shard["arrays"]["x/values"]
    array["shape"] = [shard["samples"], rows]
    array["chunk_rows"] = 1
    index = shard["arrays"][array["chunk_index"]]
    index["shape"] = [shard["samples"], 3]


@pytest.mark.parametrize("rows", [1 << 22, 1 << 28, (1 << 30) - 1, 1 << 40])
@pytest.mark.parametrize("compression", ["gzip", "lzf", "zstd", "blosc2"])
def test_a_chunk_that_says_it_swells_is_refused(tmp_path, compression, rows):
    if compression in {"zstd", "blosc2"}:
        pytest.importorskip("hdf5plugin")
    # Blosc2 makes no smaller a chunk of a few numbers.
    zeros = {"x": torch.zeros(600)}
    path = packed(tmp_path, zeros, count=1, compression=compression)
    content = content_of(path)
    swollen(content["shards"][0], rows)
    rewrite(path, content)

    with pytest.raises(LoaderkitError):
        open_cache(path)[0]


def test_a_filter_that_is_not_here_is_named(tmp_path):
    path = packed(tmp_path, compression="gzip")
    content = content_of(path)
    content["compression"] = "unknown"
    rewrite(path, content)

    with pytest.raises(LoaderkitError, match="unknown"):
        open_cache(path)[0]


# Indices of sparse layouts

LAYOUTS = {
    "coo": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wrong", [200, 4, 255])
def test_sparse_indices_outside_the_tensor_are_refused(tmp_path, layout, wrong):
    path = packed(tmp_path, {"a": LAYOUTS[layout]()})
    content = content_of(path)
    arrays = content["shards"][0]["arrays"]
    changed = 0
    for part in ("indices", "compressed", "plain"):
        name = next((n for n in arrays if f"{part}/values" in n), None)
        if name is None:
            continue
        offset = arrays[name]["offset"]

        def change(file, offset=offset):
            data = bytearray(file.read_bytes())
            data[offset] = wrong
            file.write_bytes(data)

        other = tmp_path / f"{part}.lk"
        subprocess.run(["cp", "-r", path, other], check=True)
        with_shard(other, change)
        with pytest.raises(DamagedCacheError, match="make no sparse"):
            open_cache(other)[0]
        changed += 1
    assert changed


# Changed while it is open


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def written_over(file):
    with file.open("r+b") as opened:
        opened.seek(-8, os.SEEK_END)
        opened.write(b"\xff" * 8)


def written_over_with_its_old_times(file):
    times = file.stat()
    written_over(file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


READS = {
    "batch": lambda d: d.batch([1, 2]),
    "sample": lambda d: d[2],
    "key": lambda d: d.key(2),
    "sizes": lambda d: d.sizes(),
}


@pytest.mark.parametrize("change", [cut, written_over, written_over_with_its_old_times])
@pytest.mark.parametrize("read", READS)
def test_a_file_that_changes_while_it_is_open_is_told(tmp_path, change, read):
    path = packed(tmp_path, {"x": torch.rand(2000)})
    [file] = path.glob("*.h5")
    dataset = open_cache(path)
    dataset.batch([0])
    time.sleep(0.02)  # more than a tick of the file system's clock

    change(file)

    with pytest.raises(DamagedCacheError):
        READS[read](dataset)


def test_a_file_that_is_only_touched_is_read_on(tmp_path):
    path = packed(tmp_path)
    dataset = open_cache(path)
    wanted = dataset.batch([0, 1])
    [file] = path.glob("*.h5")

    os.utime(file)
    file.chmod(0o444)

    assert_same(dataset.batch([0, 1]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("change", [cut, written_over])
def test_a_file_that_changes_under_a_worker_is_told(tmp_path, change):
    path = packed(tmp_path, {"x": torch.rand(2000)}, count=64)
    [file] = path.glob("*.h5")
    dataset = open_cache(path)
    loader = DataLoader(
        dataset, 2, num_workers=1, collate_fn=dataset.collate, prefetch_factor=1
    )
    batches = iter(loader)
    next(batches)

    change(file)

    with pytest.raises(DamagedCacheError):
        list(batches)


# Which files were hashed


def damaged_copy(path):
    """Replace a shard with a copy that is damaged, as ``cp -p`` over a bad line."""
    [file] = path.glob("*.h5")
    times, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    with file.open("r+b") as opened:  # the inode stays: the worst case
        opened.write(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.slow
def test_a_damaged_copy_with_the_old_times_is_hashed_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    path = age(packed(tmp_path))
    open_cache(path)[0]
    assert record_path().exists()

    damaged_copy(path)

    with pytest.raises(DamagedCacheError, match="checksum"):
        open_cache(path)[0]


@pytest.mark.slow
def test_a_file_is_hashed_once_a_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    path = age(packed(tmp_path))
    shard = load_manifest(path).shards[0]
    open_cache(path)[0]

    identity = check_digest(path, shard)

    assert (identity, shard.xxh3) in VerifiedFiles(record_path())


def unwritable(home):
    home.write_text("a file, where a folder should be")


def record_is(kind):
    def make(home):
        (home / "loaderkit").mkdir(parents=True)
        kind(home / "loaderkit" / "verified.txt")

    return make


HOMES = {
    "a file": unwritable,
    "null": lambda home: home.symlink_to("/dev/null"),
    "damaged": record_is(lambda file: file.write_bytes(os.urandom(5000))),
    "cut": record_is(lambda file: file.write_bytes(b"1 2 3")),
    "huge": record_is(lambda file: (file.touch(), os.truncate(file, 1 << 40))),
    **{kind.__name__: record_is(kind) for kind in KINDS},
}


def open_twice(path):
    for _ in range(2):
        open_cache(path)[0]


@pytest.mark.many_cases
@pytest.mark.parametrize("name", HOMES)
def test_a_home_that_is_none_only_costs_time(tmp_path, monkeypatch, name):
    home = tmp_path / "home"
    HOMES[name](home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    path = packed(tmp_path)
    long_ago = [(path / file.name) for file in path.glob("*.h5")]
    for file in long_ago:
        os.utime(file, ns=(1, 1))

    assert_it_ends(open_twice, path)


@pytest.mark.slow
def test_a_record_that_was_cut_is_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    record_is(lambda file: file.write_bytes(b"1 2 3"))(tmp_path / "home")
    path = age(packed(tmp_path))
    shard = load_manifest(path).shards[0]

    open_cache(path)[0]

    identity = check_digest(path, shard)
    assert (identity, shard.xxh3) in VerifiedFiles(record_path())


def remember(record, number):
    known = VerifiedFiles(record)
    for i in range(200):
        known.add(_identity_with(number * 1000 + i), "0" * 32)


def _identity_with(inode):
    return FileIdentity(1, inode, 1, 1, 1)


@pytest.mark.slow
def test_processes_that_remember_at_once_lose_nothing(tmp_path):
    record = tmp_path / "verified.txt"
    children = [FORK.Process(target=remember, args=(record, n)) for n in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()

    known = VerifiedFiles(record)
    assert all(
        (_identity_with(number * 1000 + i), "0" * 32) in known
        for number in range(4)
        for i in range(200)
    )


# What a batch takes


def nodes_of(path, nodes, bound):
    """Say that every graph has so many nodes."""
    content = content_of(path)
    [shard] = content["shards"]
    name = next(name for name in shard["columns"] if name.endswith("@nodes"))
    column = shard["columns"][name]
    column["low"], column["high"] = 0, bound
    array = shard["arrays"][column["values"]]

    def change(file):
        data = bytearray(file.read_bytes())
        new = np.full(array["shape"], nodes, "<i8").tobytes()
        data[array["offset"] : array["offset"] + len(new)] = new
        file.write_bytes(data)

    rewrite(path, content)
    return with_shard(path, change)


@pytest.mark.parametrize("nodes", [1 << 36, 1 << 40])
def test_a_batch_of_more_nodes_than_memory_is_refused_before_it_is_made(
    tmp_path, nodes
):
    path = packed(tmp_path, Data(x=torch.ones(3, 1)))
    dataset = open_cache(nodes_of(path, nodes, nodes))

    with pytest.raises(DatasetError, match="are free") as caught:
        dataset.batch([0, 1])

    assert "batch_size" in str(caught.value)


@pytest.mark.parametrize("nodes", [-1, (1 << 40) + 1, 1 << 62])
def test_numbers_of_nodes_that_cannot_be_are_refused_at_open(tmp_path, nodes):
    path = packed(tmp_path, Data(x=torch.ones(3, 1)))
    content = content_of(path)
    for column in content["shards"][0]["columns"].values():
        if column["low"] is not None:
            column["low"], column["high"] = min(nodes, 0), nodes
    rewrite(path, content)

    with pytest.raises(DamagedCacheError, match="nodes"):
        open_cache(path)


def test_a_flipped_bit_in_a_number_of_nodes_is_told(tmp_path):
    path = nodes_of(packed(tmp_path, Data(x=torch.ones(3, 1))), 3 | 1 << 29, 3)

    with pytest.raises(DamagedCacheError, match="536,870,915"):
        open_cache(path, checksums="never").batch([0, 1])


def test_a_graph_that_only_says_how_many_nodes_it_has_is_read(tmp_path):
    path = packed(tmp_path, Data(num_nodes=1_000_000, y=torch.zeros(1)))

    assert open_cache(path).batch([0, 1]).num_nodes == 2_000_000
