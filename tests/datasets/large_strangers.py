"""What reading a mutant of a large cache takes, held against the size of a shard.

The mutants of ``strangers.py`` are so small that Python's own heap hides what a batch
takes.  These have shards of megabytes, and each question to one is asked under a limit
of its own (RLIMIT_DATA: private memory, without the maps of files).
"""

import dataclasses
import functools
import gc
import multiprocessing
import os
import resource
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import strangers
import torch
from torch_geometric.data import Data, HeteroData

from loaderkit import open_cache
from loaderkit.errors import LoaderkitError
from loaderkit.testing import assert_same

NUMBERS = 60_000
SHARD_BYTES = 40 << 20
"""More than all samples of a seed: one shard has them."""
HEAP_BYTES = 1 << 20
"""For the objects of Python's own that a question makes."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""What makes glibc give back what is freed, so that one question does not live on what
the one before it took."""


def _make_graph(i):
    nodes = NUMBERS + 1000 * (i % 3)
    return Data(
        x=torch.rand(nodes, 3),
        edge_index=torch.randint(nodes, (2, nodes)),
        edge_attr=torch.rand(nodes, 2).half(),
        name=f"graph {i}" * 50,
        nested={"a": torch.ones(nodes)},
    )


def _sparse_graph(i):
    nodes = NUMBERS + i
    diagonal = torch.arange(nodes).repeat(2, 1)
    square = torch.sparse_coo_tensor(diagonal, torch.ones(nodes), (nodes, nodes))
    return Data(x=torch.rand(nodes, 2), adj=square, csr=square.to_sparse_csr())


def _make_typed_graph(i):
    data = HeteroData()
    data["atom"].x = torch.rand(NUMBERS + i, 2)
    data["bond"].num_nodes = 3
    ends = torch.zeros(2, NUMBERS + i, dtype=torch.long)
    data["atom", "in", "bond"].edge_index = ends
    return data


def _make_tensors(i):
    return {
        "tokens": torch.arange(NUMBERS + i % 4),
        "image": torch.rand(200, 300),
        "ragged": torch.rand(20, 100 + i % 3, 20 + i % 2),
        "bfloat": torch.ones(NUMBERS, dtype=torch.bfloat16),
    }


def _make_texts(i):
    return {
        "name": f"é {i}" * NUMBERS,
        "raw": bytes(NUMBERS),
        "json": {"a": list(range(NUMBERS // 2))},
        "words": [f"word {at}" for at in range(1000)],
    }


def _make_numbers(i):
    return {"array": np.arange(NUMBERS + i % 2, dtype=">i4"), "f": np.zeros(NUMBERS)}


def _make_variants(i):
    if i % 2:
        return {"x": torch.ones(2), "y": None, "z": torch.rand(NUMBERS)}
    return {"x": torch.ones(1 + i, 2), "extra": torch.rand(NUMBERS)}


SEEDS = {
    "graphs": (_make_graph, None),
    "graphs gzip": (_make_graph, "gzip"),
    "sparse": (_sparse_graph, None),
    "hetero": (_make_typed_graph, None),
    "tensors": (_make_tensors, None),
    "tensors blosc2": (_make_tensors, "blosc2"),
    "texts": (_make_texts, None),
    "numbers": (_make_numbers, None),
    "numbers zstd": (_make_numbers, "zstd"),
    "variants": (_make_variants, None),
}


def whole_batch(dataset):
    """Give a batch of all samples, or what the allocator raises."""
    return dataset.batch(range(len(dataset)))


TWO_SAMPLES = "two samples"
WHOLE_BATCH = "a batch of all samples"
ASKS = {
    "the first sample": lambda dataset: dataset[0],
    "the last sample": lambda dataset: dataset[len(dataset) - 1],
    TWO_SAMPLES: lambda dataset: dataset.batch([0, 1]),
    "sizes": lambda dataset: dataset.sizes(),
    "a key": lambda dataset: dataset.key(0),
    WHOLE_BATCH: whole_batch,
}


@dataclasses.dataclass
class Figures:
    """What came of some mutants, each asked all of ``ASKS``."""

    mutants: int = 0
    answered: int = 0
    refused: int = 0
    failures: list = dataclasses.field(default_factory=list)

    def __str__(self):
        return (
            f"{self.mutants:,} mutants: {self.answered:,} questions answered, "
            f"{self.refused:,} refused, {len(self.failures):,} failures"
        )


class Trial(NamedTuple):
    """Some mutants, and what a question to one may take."""

    numbers: range
    """Which mutants."""
    times: int
    """Private memory, as a multiple of a shard.  Batches may take what that of all
    samples has when it is done and one shard less: PyG's vector ``batch``, its sparse
    blocks, a tensor for each number of a list, and Python's own strings and numbers
    make more than twice a shard of what a shard has."""


def whole_batch_or_list(dataset):
    """Give another form of batch where memory runs out, as no reader should."""
    try:
        return whole_batch(dataset)
    except (MemoryError, RuntimeError):
        return []


class LimitTrial(NamedTuple):
    """Batches of unchanged caches, under growing limits."""

    names: tuple
    """Which seeds."""
    ask: object
    """Gives a batch of a dataset: the same under any limit, or an error."""
    limits_bytes: tuple = tuple(int(1.5**power) for power in range(28, 44))
    """Private memory, 85 KB to 37 MB."""


def try_in_child(folder, trials):
    """Read large mutants in a process with an allocator that keeps nothing.

    Args:
        folder: Where they may be written.
        trials: Of ``Trial`` or ``LimitTrial``, one after the other in the same process,
            which takes 6 s of CPU to begin: it imports PyG and packs what it changes.

    Returns:
        Figures of each: a failure is anything but an answer, or an error of
        loaderkit's.

    Raises:
        EOFError: The process ended before its time.
    """
    spawn = multiprocessing.get_context("spawn")  # glibc reads ALLOCATOR as it starts
    answers, theirs = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_send_figures, args=(folder, trials, theirs))
    child.start()
    theirs.close()
    figures = answers.recv()
    child.join()
    return figures


def _send_figures(folder, trials, answers):
    os.environ["XDG_CACHE_HOME"] = str(folder / "home")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    make = functools.partial(strangers.Seed.make, kinds=SEEDS, shard_bytes=SHARD_BYTES)
    seeds = [make(name, folder) for name in SEEDS]
    # In a process of its own, so that questions find nothing that these left free.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        kept = [pool.apply(_whole_batch_bytes, (seed, folder)) for seed in seeds]
    whole_bytes = {seed.name: nbytes for seed, nbytes in zip(seeds, kept, strict=True)}
    figures = []
    for number, trial in enumerate(trials):
        path = folder / f"mutants {number}"
        path.mkdir()
        # And here, so that one trial does not live on what another has left free.
        with multiprocessing.get_context("fork").Pool(1) as pool:
            if isinstance(trial, LimitTrial):
                figures.append(pool.apply(_try_limits, (folder, trial)))
            else:
                arguments = (seeds, path, trial, whole_bytes)
                figures.append(pool.apply(_try_mutants, arguments))
    answers.send(figures)


def _try_mutants(seeds, path, trial, whole_bytes):
    numbers, times = trial
    gc.freeze()  # What is here by now need not be looked through for each question.
    mutator, figures, before = strangers.Mutator(seeds), Figures(), {}
    for number in numbers:
        mutant = mutator.mutant(number)
        before = mutant.write(path, before)
        figures.mutants += 1
        for question, ask in ASKS.items():
            shard_bytes = largest_shard(mutant.seed)
            room = int(times * shard_bytes)
            if question in {TWO_SAMPLES, WHOLE_BATCH}:
                kept_bytes = whole_bytes[mutant.seed.name]
                room = max(room, kept_bytes + int((times - 1) * shard_bytes))
            room += HEAP_BYTES
            try:
                _ask_within(room, ask, path, mutant.checksums)
                figures.answered += 1
            except LoaderkitError as error:
                figures.refused += 1
                if _ran_out(error):
                    figures.failures.append(
                        (question, strangers.Failure.of(mutant, error))
                    )
            except BaseException as error:  # noqa: BLE001
                figures.failures.append((question, strangers.Failure.of(mutant, error)))
    return figures


def _try_limits(folder, trial):
    figures = Figures()
    gc.freeze()
    for name in trial.names:
        path = strangers.path_of(folder, name)
        unlimited = whole_batch(open_cache(path, classes=strangers.CLASSES))
        for nbytes in trial.limits_bytes:
            try:
                batch = _ask_within(nbytes, trial.ask, path, "once")
            except (MemoryError, RuntimeError, LoaderkitError) as error:
                figures.refused += 1
                if not _ran_out(error) or isinstance(error, LoaderkitError):
                    figures.failures.append((name, nbytes, repr(error)))
                continue
            figures.answered += 1
            try:
                assert_same(batch, unlimited)
            except AssertionError as error:
                figures.failures.append((name, nbytes, str(error)))
    return figures


def _whole_batch_bytes(seed, folder):
    """Say what the batch of all samples of an unchanged cache keeps once made."""
    path = strangers.path_of(folder, seed.name)
    dataset = open_cache(path, classes=strangers.CLASSES)
    before = _private_bytes()
    try:
        batch = ASKS[WHOLE_BATCH](dataset)
    except LoaderkitError:  # its samples cannot be joined
        return 0
    kept = _private_bytes() - before
    del batch
    return kept


def largest_shard(seed):
    """Say how many bytes the largest shard has, uncompressed."""
    return max(
        max(shard["bytes"], sum(map(_array_bytes, shard["arrays"].values())))
        for shard in seed.content["shards"]
    )


def _array_bytes(array):
    return int(np.prod(array["shape"])) * np.dtype(array["dtype"]).itemsize


def _ask_within(nbytes, ask, path, checksums):
    # Else what the questions before left in circles counts as taken, and is room once
    # Python collects it.
    gc.collect()
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (_private_bytes() + nbytes, hard))
    try:
        return ask(open_cache(path, checksums=checksums, classes=strangers.CLASSES))
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _private_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    msg = "the kernel says nothing of VmData"
    raise OSError(msg)


def _ran_out(error):
    """Say whether an error of loaderkit's came of memory that the limit refused.

    torch's allocator says so in a RuntimeError.
    """
    while error is not None:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
