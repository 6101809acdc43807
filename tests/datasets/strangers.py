"""Caches as a stranger could hand them over: mutated anywhere, read to the end.

A *seed* is a small cache of one kind.  A *mutant* is the seed with a few values of its
manifest, or a few bytes of its shards, changed; the checksums are made to fit again, or
not.  Reading a mutant must give an error of loaderkit's own, or samples, within a
memory that is stated, and in time.
"""

import collections
import contextlib
import dataclasses
import faulthandler
import json
import os
import random
import resource
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from fresh_process import CONTEXT
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Data, HeteroData

from loaderkit import inspect_cache, open_cache, pack, verify
from loaderkit.cache.files import load_manifest
from loaderkit.cache.layout import Array, Column, Shard
from loaderkit.cache.shard_table import ShardGroup, ShardTable
from loaderkit.errors import LoaderkitError
from loaderkit.testing import assert_same

ROOM_BYTES = 512 << 20
"""Address space that reading a mutant may take beyond what the process has: twice what
a batch may take unasked (``room.UNASKED_BYTES``), beside which a shard of 30 KB is
nothing."""
HANG_S = 600
"""Seconds that WATCHED mutants may take: one is read in 5 ms, but a process that gives
way to all others (nice 19, beside other soaks) had to wait for a minute."""
WATCHED = 50
"""Mutants between two starts of the watchdog, which takes a millisecond to start."""


class Point(NamedTuple):
    x: object
    tag: object


@dataclasses.dataclass
class Record:
    values: object
    name: object


CLASSES = (Point, Record)


def _make_graph(i):
    nodes = 2 + i % 3
    return Data(
        x=torch.rand(nodes, 3),
        edge_index=torch.randint(nodes, (2, 4 + i % 4)),
        edge_attr=torch.rand(4 + i % 4, 2).half(),
        y=torch.tensor([i]),
        name=f"graph {i}",
        k=i,
        nested={"a": torch.ones(nodes), "words": ["a", "b"][: i % 3]},
    )


def _sparse_graph(i):
    nodes = 3 + i % 2
    edges = torch.tensor([[0, 0, 1], [1, 2, 0]])
    return Data(
        x=torch.rand(nodes, 2),
        adj=torch.eye(nodes).to_sparse(),
        csr=torch.eye(nodes).to_sparse_csr(),
        csc=torch.eye(nodes).to_sparse_csc(),
        edge_index=EdgeIndex(edges, sparse_size=(nodes, nodes), sort_order="row"),
        group_index=Index(torch.zeros(nodes, dtype=torch.long), dim_size=1),
    )


def _make_typed_graph(i):
    data = HeteroData()
    data["atom"].x = torch.rand(2 + i % 2, 2)
    data["bond"].num_nodes = 3
    data["atom", "in", "bond"].edge_index = torch.zeros(2, i % 3, dtype=torch.long)
    data["bond", "of", "atom"].edge_index = torch.zeros(2, 2, dtype=torch.long)
    data["bond", "of", "atom"].edge_attr = torch.rand(2, 1)
    data.y = torch.tensor([float(i)])
    return data


def _make_tensors(i):
    return {
        "tokens": torch.arange(1 + i % 4),
        "image": torch.rand(2, 3),
        "ragged": torch.rand(2, 1 + i % 3, 2 + i % 2),
        "bfloat": torch.ones(2, dtype=torch.bfloat16),
        "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
        "flag": i % 2 == 0,
    }


def _make_even_tensors(i):
    """Numbers that Blosc2 makes smaller, though they are few."""
    return {"even": torch.full((40,), float(i)), "ragged": torch.ones(30 + i)}


def _make_texts(i):
    return {
        "name": f"é {i}",
        "raw": bytes(range(i % 5)),
        "big": 10 ** (20 + i),
        "atoms": ["C", "N", "é"] * (i + 1) + ["O"] * (80 * (i % 2)),
        "json": {"a": [1, {2, 3}] if i < 0 else [1, (2, None)], 3: b"x"},
        "point": Point(torch.ones(1 + i % 2), "p"),
        "record": Record(torch.zeros(2), ("a", i)),
    }


def _make_numbers(i):
    return {
        "array": np.arange(3 + i % 2, dtype=">i4"),
        "scalar": np.float32(i),
        "complex": complex(i, 1),
        "ordered": collections.OrderedDict(a=1.5, b=None),
        "tokens": torch.arange(1 + i % 4),
    }


def _make_variants(i):
    if i % 3 == 0:
        return {"x": torch.ones(2), "y": None}
    if i % 3 == 1:
        return {"x": torch.ones(1 + i, 2), "extra": torch.tensor(i)}
    return [torch.zeros(3), "text"]


def _mixed_graphs(i):
    data = Data(x=torch.rand(2, 2), num_nodes=2 + i)
    if i % 2:
        data.edge_index = torch.zeros(2, 3, dtype=torch.long)
    return data


SEEDS = {
    "graphs": (_make_graph, None),
    "graphs gzip": (_make_graph, "gzip"),
    "sparse": (_sparse_graph, None),
    "hetero": (_make_typed_graph, None),
    "tensors": (_make_tensors, None),
    "texts": (_make_texts, None),
    "numbers": (_make_numbers, None),
    "numbers gzip": (_make_numbers, "gzip"),
    "numbers lzf": (_make_numbers, "lzf"),
    "numbers zstd": (_make_numbers, "zstd"),
    "even tensors blosc2": (_make_even_tensors, "blosc2"),
    "variants": (_make_variants, None),
    "mixed graphs": (_mixed_graphs, None),
}
"""Samples, and how they are compressed.  Two shards each."""


SHARD_BYTES = 1200


@dataclasses.dataclass(frozen=True)
class Seed:
    """A small sound cache, held in memory."""

    name: str
    text: str
    files: dict

    @property
    def content(self):
        """What its manifest says, anew: an object for each shard, as in version 2."""
        return json.loads(self.text)

    @classmethod
    def make(cls, name, folder, kinds=None, shard_bytes=SHARD_BYTES):
        make, compression = (kinds or SEEDS)[name]
        torch.manual_seed(0)
        samples = [make(i) for i in range(5)]
        path = path_of(folder, name)
        pack(samples, path, workers=0, compression=compression, shard_bytes=shard_bytes)
        files = {file.name: file.read_bytes() for file in path.glob("*.h5")}
        return cls(name, json.dumps(content_with_objects(path)), files)


def path_of(folder, name):
    """Say where the cache of a seed of some name is packed."""
    return folder / name.replace(" ", "-")


def content_with_objects(path):
    """Say what the manifest of a cache says with an object for each shard."""
    content = json.loads((path / "manifest.json").read_text())["content"]
    shards = load_manifest(path).shards
    content["shards"] = [
        json.loads(json.dumps(dataclasses.asdict(shard))) for shard in shards
    ]
    return content


def content_with_table(content):
    """Say the same with the shards as a table of numbers, as in version 3."""
    shards = ShardTable.of(_shard_of_json(**shard) for shard in content["shards"])
    return {**content, "shards": shards.to_json()}


def _shard_of_json(arrays, columns, **fields):
    """Make a shard of what is said of it, true or not."""
    shard_arrays = {
        name: Array(**{**array, "shape": tuple(array["shape"])})
        for name, array in arrays.items()
    }
    shard_columns = {name: Column(**column) for name, column in columns.items()}
    return Shard(**fields, arrays=shard_arrays, columns=shard_columns)


def manifest_text(content, *, checksum=True, version=2):
    """Write a manifest as any program could, with the checksum that belongs to it.

    Shards stand in it as objects, unless it has version 3 or 4.
    """
    inside = json.dumps(content, separators=(",", ":"))
    # What ``json`` reads back is what the checksum is taken of.
    digest = xxhash.xxh3_128_hexdigest(inside.encode("utf-8", "surrogatepass"))
    head = {"format": "loaderkit-cache", "version": version}
    head["checksum"] = digest if checksum else "0" * 32
    return json.dumps(head)[:-1] + f', "content": {inside}}}\n'


INTEGERS = [0, 1, -1, 2, 3, 7, 8, 63, 64, 255, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 40]
INTEGERS += [(1 << 53) + 1, (1 << 61) - 1, 1 << 61, (1 << 62) - 1, (1 << 63) - 1]
INTEGERS += [1 << 63, -(1 << 63), 1 << 64, 10**30, -64]
TEXTS = ["", "0", "x", "@key", "@variant", "leaf", "nest", "tensor", "array", "scalar"]
TEXTS += ["int", "float", "bool", "complex", "str", "bytes", "json", "bigint", "nodes"]
TEXTS += ["inc", "variant", "none", "dict", "list", "tuple", "named", "dataclass"]
TEXTS += ["graph", "store", "edge_index", "index", "sparse_coo", "sparse_csr", "?"]
TEXTS += ["sparse_tensor", "sparse_bsr", "float32", "int64", "uint8", "bfloat16"]
TEXTS += ["complex32", "float8_e5m2", "qint8", "bits8", "uint4", "|u1", "<i8", "<f4"]
TEXTS += ["<f8", "|b1", "<c16", "V2000000000", "|O", "<U9", "gzip", "lzf", "zstd"]
TEXTS += ["bitshuffle", "sz3", "torch_geometric.data.data:Data", "builtins:dict"]
TEXTS += ["collections:OrderedDict", "collections:Counter", "collections:defaultdict"]
TEXTS += ["torch_geometric.data.hetero_data:HeteroData", "builtins:print", "os:system"]
TEXTS += ["torch_geometric.data.temporal:TemporalData", "\ud800", "\x00", "../../etc"]
TEXTS += ["9" * 5000, "(" * 300, "{}", "[]", "()", "None", "'x'", "1e999", "__class__"]
TEXTS += ["('a','b','c')", "-1", "x/values", "num_nodes", "batch", "ptr", "_store"]


class Mutator:
    """Makes mutants of seeds, from one number each."""

    def __init__(self, seeds):
        self._seeds = seeds
        self.texts = list(TEXTS)
        for seed in seeds:
            self.texts += sorted(_texts_in(seed.content))

    def mutant(self, number):
        """Make the mutant of a number: always the same one."""
        rng = random.Random(number)
        seed = self._seeds[rng.randrange(len(self._seeds))]
        content, files = seed.content, seed.files
        version = rng.choice([2, 3, 4])
        checksums_fit = rng.random() < 0.85
        checksums = rng.choice(["never", "always", "once"])
        draw = rng.random()
        changes_manifest, changes_shards = draw < 0.62, draw > 0.55

        if rng.random() < 0.05:
            # As it is: what is read must be what was packed.
            if version >= 3:
                content = content_with_table(content)
            return Mutant(number, seed, content, files, False, "always", version)

        if version >= 3:
            # Shards first: in the table they can no longer be found by their names.
            if changes_shards:
                content, files = _mutated_shards(rng, content, files, checksums_fit)
            content = content_with_table(content)
            if changes_manifest and rng.random() < 0.5:
                _mutate_numbers(rng, content["shards"])
            elif changes_manifest:
                content = self._mutated_json(rng, content)
        else:
            if changes_manifest:
                content = self._mutated_json(rng, content)
            if changes_shards:
                content, files = _mutated_shards(rng, content, files, checksums_fit)
        return Mutant(number, seed, content, files, checksums_fit, checksums, version)

    def _mutated_json(self, rng, content):
        for _ in range(rng.choice([1, 1, 1, 2, 3, 5])):
            parent, key = _choose_entry(rng, content)
            other_parent, other_key = _choose_entry(rng, content)
            action = rng.random()
            if action < 0.08:
                del parent[key]
            elif action < 0.18:
                parent[key] = json.loads(json.dumps(other_parent[other_key]))
            elif action < 0.24 and isinstance(parent, list):
                parent.insert(key, json.loads(json.dumps(rng.choice(parent))))
            elif action < 0.32 and isinstance(parent, dict):
                name = rng.choice([*parent, *self.texts])
                parent[name] = parent[key]
            elif action < 0.42:
                value = parent[key]
                parent[key] = other_parent[other_key]
                other_parent[other_key] = value
                # One may have been inside the other.
                if _is_cyclic(content):
                    return {"shards": []}
            else:
                parent[key] = self._mutated_value(rng, parent[key])
        return content

    def _mutated_value(self, rng, value):
        if rng.random() < 0.12:
            return rng.choice([None, True, False, [], {}, [[]], 0.5, float("nan"), "x"])
        if isinstance(value, bool) or value is None:
            return rng.choice([None, True, False, 0, 1, "x", [0], *self.texts[:5]])
        if isinstance(value, int):
            if rng.random() < 0.5:
                return rng.choice(INTEGERS)
            nearby = [value + 1, value - 1, value * 2, -value, value ^ 64, value + 64]
            return rng.choice([*nearby, value // 2, value ^ 1 << rng.randrange(63)])
        if isinstance(value, str):
            if rng.random() < 0.6 or not value:
                return rng.choice(self.texts)
            position = rng.randrange(len(value))
            letter = rng.choice("x0@/~:.'\x00<>|\ud800")
            return value[:position] + letter + value[position + rng.randrange(2) :]
        if isinstance(value, list):
            if rng.random() < 0.4:
                return value[: rng.randrange(len(value) + 1)]
            return rng.choice([value * 2, value[::-1], [value], {}, [*value, 1 << 40]])
        if isinstance(value, dict):
            return rng.choice([{}, [], list(value), {"x": value}])
        return rng.choice([0, 1, -1, "x"])


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A cache with changes, not yet on disk."""

    number: int
    seed: Seed
    content: object
    files: dict
    checksums_fit: bool
    """Whether checksums were made to fit what was changed."""
    checksums: str
    """How the reader is asked to check them."""
    version: int
    """Of the manifest's format."""

    def write(self, path, before=()):
        """Put it into a folder; give the names of its files."""
        for name in before:
            if name not in self.files:
                (path / name).unlink()
        for name, content in self.files.items():
            # A mutant changes one file at most: the others lie there already.
            if not before or before.get(name) is not content:
                (path / name).write_bytes(content)
        sound = self.seed.content
        if self.version >= 3:
            sound = content_with_table(sound)
        checksum = self.checksums_fit or self.content == sound
        text = manifest_text(self.content, checksum=checksum, version=self.version)
        (path / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        return self.files

    @property
    def harmless(self):
        """Whether it must be refused or give what the seed gives."""
        return not self.checksums_fit and self.checksums != "never"


def _mutate_numbers(rng, groups):
    """Change some numbers of shards, and write them down as any numbers are."""
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(groups))
        group = ShardGroup.from_json(groups[at])
        vectors = [np.array(vector) for vector in group.numbers]
        vector = rng.choice(vectors)
        row = rng.randrange(len(vector))
        old = int(vector[row])
        nearby = [old + 1, old - 1, old * 2, -old, old ^ 64, old + 64, old // 2]
        new = rng.choice(INTEGERS if rng.random() < 0.5 else nearby)
        vector[row] = np.uint64(new % (1 << 64)).astype(np.int64)
        groups[at] = ShardGroup(group.schema, vectors).to_json()


def _mutated_shards(rng, content, files, checksums_fit):
    files = dict(files)
    name = rng.choice(sorted(files))
    data = bytearray(files[name])
    for _ in range(rng.choice([1, 1, 2, 8])):
        action, at = rng.random(), rng.randrange(len(data))
        if action < 0.3:
            data[at] ^= 1 << rng.randrange(8)
        elif action < 0.6:
            word = rng.choice(INTEGERS) % (1 << 64)
            at -= at % 8
            data[at : at + 8] = word.to_bytes(8, "little")[: len(data) - at]
        elif action < 0.7:
            length = rng.randrange(1, 200)
            other = rng.randrange(len(data))
            piece = data[other : other + length]
            data[at : at + len(piece)] = piece
            del data[len(files[name]) :]
        elif action < 0.78:
            length = min(rng.randrange(1, 64), len(data) - at)
            data[at : at + length] = bytes([rng.choice([0, 1, 127, 255])]) * length
        else:
            # Where it hurts: offsets, counts, rows, the index of the chunks.
            arrays = _index_arrays(content, name, len(data))
            if arrays:
                array = rng.choice(arrays)
                element = rng.randrange(int(np.prod(array["shape"])))
                start = array["offset"] + 8 * element
                old = int.from_bytes(data[start : start + 8], "little", signed=True)
                new = rng.choice([*INTEGERS, old + 1, old - 1, -old, old * 2])
                data[start : start + 8] = (new % (1 << 64)).to_bytes(8, "little")
    if rng.random() < 0.1:
        cut = rng.randrange(len(data))
        data = data[:cut] if rng.random() < 0.5 else data + data[cut:]
    if not checksums_fit:
        files[name] = bytes(data)
        return content, files
    digest = xxhash.xxh3_128_hexdigest(bytes(data))
    renamed = f"{name.partition('-')[0]}-{digest[:16]}.h5"
    del files[name]
    files[renamed] = bytes(data)
    for shard in _shards_of(content):
        if _is_shard_of_file(shard, name):
            shard |= {"file": renamed, "xxh3": digest, "bytes": len(data)}
    return content, files


def _index_arrays(content, name, size):
    """List the arrays of a file that hold numbers of 64 bits."""
    for shard in _shards_of(content):
        if _is_shard_of_file(shard, name):
            arrays = shard["arrays"].values()
            return [array for array in arrays if _is_index(array, size)]
    return []


def _shards_of(content):
    shards = content.get("shards")
    return shards if isinstance(shards, list) else []


def _is_shard_of_file(shard, name):
    """Whether it still is a shard: its JSON may have been changed before."""
    return (
        isinstance(shard, dict)
        and shard.get("file") == name
        and isinstance(shard.get("arrays"), dict)
    )


def _is_index(array, size):
    try:
        stop = array["offset"] + 8 * int(np.prod(array["shape"]))
    except (TypeError, KeyError, ValueError, OverflowError):
        return False
    return array.get("dtype") == "<i8" and 0 < array["offset"] < stop <= size


def _choose_entry(rng, content):
    """Choose a value by walking down from the top; give its parent and its key there.

    Rarely it is one that nothing reads: "shards" and "structure" have most chances.
    """
    parent = content
    key = rng.choice(["shards", "structure", *content])
    if key not in parent:
        key = next(iter(parent))
    while isinstance(parent[key], dict | list) and parent[key] and rng.random() < 0.92:
        parent = parent[key]
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        key = rng.choice(keys)
    return parent, key


def _texts_in(value):
    if isinstance(value, str):
        return {value}
    if isinstance(value, list):
        return set().union(*map(_texts_in, value)) if value else set()
    if isinstance(value, dict):
        return set(value) | _texts_in(list(value.values()))
    return set()


def _is_cyclic(value):
    try:
        json.dumps(value)
    except (ValueError, RecursionError):
        return True
    return False


def read_everything(path, checksums, *, plain=False):
    """Ask a cache for all it can give.

    Returns:
        Rows, their samples, batches (or why there is none), keys and sizes.
    """
    options = {"unknown_classes": "plain"} if plain else {"classes": CLASSES}
    dataset = open_cache(path, checksums=checksums, **options)
    count = len(dataset)
    rows = sorted({0, count - 1} - {-1})
    samples = [dataset[row] for row in rows]
    keys = [dataset.key(row) for row in rows]
    few = [[*rows, rows[0]]] if rows else []
    many = [range(count)] if 0 < count < 100 else []
    batches = [_batch_or_error(dataset, chosen) for chosen in [*few, *many]]
    return rows, samples, batches, keys, dataset.sizes()


def _batch_or_error(dataset, rows):
    try:
        return dataset.batch(rows)
    except LoaderkitError as error:
        return type(error).__name__


def ask_apart(path, checksums):
    """Do what ``read_everything`` does, but go on after an error of loaderkit's."""
    for ask in (
        lambda d: d[0],
        lambda d: d.batch([0, 1]),
        lambda d: d.sizes(),
        lambda d: d.key(0),
        lambda d: d[len(d) - 1],
    ):
        try:
            dataset = open_cache(path, checksums=checksums, classes=CLASSES)
        except LoaderkitError:
            return
        with contextlib.suppress(LoaderkitError):
            if len(dataset) > 1:
                ask(dataset)


@dataclasses.dataclass
class Figures:
    """What came of some mutants."""

    mutants: int = 0
    refused: int = 0
    read: int = 0
    peak_bytes: int = 0
    """Most that was resident, with torch and all."""
    failures: list = dataclasses.field(default_factory=list)

    def __add__(self, other):
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in FIGURES)
        total = Figures(*(mine + theirs for mine, theirs in pairs))
        return dataclasses.replace(
            total, peak_bytes=max(self.peak_bytes, other.peak_bytes)
        )

    def __str__(self):
        return (
            f"{self.mutants:,} mutants: {self.refused:,} refused, {self.read:,} read, "
            f"{len(self.failures):,} failures"
        )


def try_in_child(folder, numbers, **options):
    """Read mutants in a process of its own, which a mutant may hang or kill.

    Raises:
        AssertionError: It ended before its time.
    """
    # torch's threads do not survive a fork of this process
    answers, theirs = CONTEXT.Pipe(duplex=False)
    arguments = (folder, numbers, options, theirs)
    child = CONTEXT.Process(target=_send_figures, args=arguments)
    child.start()
    theirs.close()
    try:
        figures = answers.recv()
    except EOFError:  # it hung, or was killed; faulthandler has said where
        child.join()
        msg = f"{numbers}: the process ended with {child.exitcode}"
        raise AssertionError(msg) from None
    child.join()
    return figures


def _send_figures(folder, numbers, options, answers):
    os.environ["XDG_CACHE_HOME"] = str(folder / "home")
    figures = try_mutants(folder, numbers, **options)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    answers.send(dataclasses.replace(figures, peak_bytes=peak))


FIGURES = dataclasses.fields(Figures)


def wanted_of(path):
    """Read a sound cache, to compare with."""
    return read_everything(path, "never")


def _raw_error(path, checksums, *, plain=False):
    rows, *_ = read_everything(path, checksums, plain=plain)
    raise KeyError(rows)


def _wrong_data(path, checksums, *, plain=False):
    rows, samples, *rest = read_everything(path, checksums, plain=plain)
    return rows, samples[::-1], *rest


def _too_much_memory(path, checksums, *, plain=False):
    answers = read_everything(path, checksums, plain=plain)
    # What was mapped when the room was measured may be free by now, and count as room.
    np.ones(2 * ROOM_BYTES, np.uint8)
    return answers


PLANTED = {
    "raw error": _raw_error,
    "wrong data": _wrong_data,
    "memory": _too_much_memory,
}
"""Readers with a fault, to see that it is found."""


def try_mutants(folder, numbers, names=tuple(SEEDS), most_failures=50, planted=None):
    """Read mutants one after the other.

    Args:
        folder: Where they may be written.
        numbers: Which mutants.
        names: Seeds to make them of.
        most_failures: Stop after so many.
        planted: A fault to read with.

    Returns:
        Figures: a failure is anything but samples, or an error of loaderkit's.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seeds = [Seed.make(name, folder) for name in names]
    wanted = {s.name: wanted_of(path_of(folder, s.name)) for s in seeds}
    mutator, figures, path, before = Mutator(seeds), Figures(), folder / "mutant", {}
    path.mkdir()
    read, limited = PLANTED.get(planted, read_everything), _limit_memory()
    for number in numbers:
        mutant = mutator.mutant(number)
        before = mutant.write(path, before)
        if figures.mutants % WATCHED == 0:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
        figures.mutants += 1
        try:
            _try_mutant(mutant, path, wanted[mutant.seed.name], figures, read)
        except LoaderkitError:
            figures.refused += 1
        except BaseException as error:  # noqa: BLE001
            figures.failures.append(Failure.of(mutant, error))
        if len(figures.failures) >= most_failures:
            break
    faulthandler.cancel_dump_traceback_later()
    if limited:
        resource.setrlimit(resource.RLIMIT_AS, limited)
    return figures


def _try_mutant(mutant, path, wanted, figures, read):
    # Five more readings take five times as long as one.
    if mutant.number % 25 == 0:
        ask_apart(path, mutant.checksums)
        verify(path)
        inspect_cache(path)
    rows, samples, batches, _, _ = read(
        path, mutant.checksums, plain=mutant.number % 5 == 0 and not mutant.harmless
    )
    figures.read += 1
    if mutant.harmless:
        assert rows == wanted[0]
        assert_same(samples, wanted[1])
        assert_same(batches, wanted[2])


@dataclasses.dataclass(frozen=True)
class Failure:
    """A mutant that was neither read nor refused as it should."""

    number: int
    seed: str
    checksums: str
    checksums_fit: bool
    error: str
    frames: str
    """The innermost four of loaderkit's."""

    @classmethod
    def of(cls, mutant, error):
        our_frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if "/loaderkit/" in frame.filename
        ]
        frames = " < ".join(
            f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
            for frame in reversed(our_frames[-4:])
        )
        return cls(
            mutant.number,
            mutant.seed.name,
            mutant.checksums,
            mutant.checksums_fit,
            f"{type(error).__name__}: {str(error)[:200]}",
            frames,
        )


def _limit_memory():
    """Let this process have a stated room and no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    return before
