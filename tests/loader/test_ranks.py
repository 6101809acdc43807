"""Several processes train on one dataset: each sample once, equal steps everywhere."""

import collections
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from data import Noisy
from hypothesis import given, settings
from hypothesis import strategies as st
from launched_processes import PROCESSES
from process_groups import NOT_CONNECTED, connected, launched, rank_variables
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from loaderkit import build_loader, pack
from loaderkit.errors import LoaderError
from loaderkit.loader.ranks import launched_ranks

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, os, random, sys
import numpy, torch
import torch.distributed as dist
import loaderkit
from torch.utils.data import RandomSampler

rank = int(os.environ["RANK"])
for seed in (torch.manual_seed, numpy.random.seed, random.seed):
    seed(100 + rank)  # as many do, so that dropout differs between ranks
WAYS = [{"batch_size": 7}, {"batch_size": 7, "drop_last": True}]
cache = loaderkit.open_cache(sys.argv[1])
if isinstance(cache, loaderkit.SafeGraphDataset):
    WAYS += [{"max_nodes": 13}]
    WAYS += [{"batch_size": 4, "bucket_by": "nodes", "shuffle": True}]
early = loaderkit.build_loader(cache, batch_size=3, shuffle=True)
dist.init_process_group("gloo")
loaders = [early]
loaders += [loaderkit.build_loader(cache, **{"shuffle": True} | way) for way in WAYS]
loaders += [loaderkit.build_loader(cache, batch_size=4, sampler=RandomSampler(cache))]
for loader in loaders:
    rows = [batch["y"].tolist() for batch in loader]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, rows)
    if rank == 0:
        print(json.dumps(every))
if rank == 0:
    print(json.dumps([*os.environ]))
dist.destroy_process_group()
"""


def run_ranks(script, *arguments, ranks=2):
    """Run a script on several ranks; gives what the first printed, line by line."""

    def start(_attempt):
        return launched(script, arguments, ranks, script.parent)

    return lists_in(connected(start))


def lists_in(text):
    return [json.loads(line) for line in text.splitlines() if line[:1] == "["]


def run_by_torchrun(script, *arguments):
    """Run a script on two ranks under torchrun itself; gives the same."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command = [
        *run,
        "--master_port=0",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=localhost:0",
        str(script),
        *map(str, arguments),
    ]

    def start(_attempt):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return lists_in(connected(start))


@pytest.mark.parametrize(
    ("errors", "outcome"),
    [
        ([], "gave"),
        ([NOT_CONNECTED], "gave"),
        ([NOT_CONNECTED] * 2, "gave"),
        ([NOT_CONNECTED] * 3, "raised"),
        (["ranks differ"], "raised"),
        ([NOT_CONNECTED, "ranks differ"], "raised"),
    ],
)
def test_only_processes_that_gloo_could_not_connect_begin_anew(errors, outcome):
    attempts = []

    def start(attempt):
        attempts.append(attempt)
        if attempt < len(errors):
            raise AssertionError(errors[attempt])
        return "gave"

    if outcome == "gave":
        assert connected(start) == outcome
        assert attempts == list(range(len(errors) + 1))
    else:
        with pytest.raises(AssertionError, match=errors[-1]):
            connected(start)
        assert attempts == list(range(len(errors)))


@pytest.mark.slow
def test_torchrun_gives_every_rank_its_share(tmp_path):
    # No graphs: here each rank imports what it needs, and PyG takes twice as long as
    # torch.
    samples = [{"y": torch.tensor(number)} for number in range(40)]
    cache = pack(samples, tmp_path / "c.lk", workers=0)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    *ranks_read, variables = run_by_torchrun(script, cache.cache)

    # The other tests set what torchrun sets, but for what is its own affair: signals,
    # where a failed rank writes, the size of the terminal, and threads where nobody
    # has said how many.
    others = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    others |= {"COLUMNS", "LINES", "OMP_NUM_THREADS"}
    new = set(variables) - set(os.environ)
    assert new - others == set(rank_variables(0, 2, 0))
    assert len(ranks_read) == 4
    assert_each_has_its_share(ranks_read)


@pytest.mark.slow
def test_every_rank_has_its_share_of_graphs(cache, tmp_path):
    len(cache)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    *ranks_read, _ = run_ranks(script, cache.cache)

    assert len(ranks_read) == 6
    assert_each_has_its_share(ranks_read)


def assert_each_has_its_share(ranks_read):
    for number, every in enumerate(ranks_read):
        rows = [row for rank in every for batch in rank for row in batch]
        assert len({len(rank) for rank in every}) == 1
        if number == 2:  # drop_last
            assert len(rows) == len(set(rows))
        else:
            assert set(rows) == set(range(40))
            assert len(rows) <= 40 + 13


DIFFERING = """
import json, os, sys
import torch
import torch.distributed as dist
import loaderkit
from torch.utils.data import RandomSampler, SubsetRandomSampler

rank = int(os.environ["RANK"])
data = list(range(20))

def generator(seed):
    return torch.Generator().manual_seed(seed)

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(data)

def make(way, number):
    options = {
        "seed": {"shuffle": True, "seed": number},
        "generator": {"shuffle": True, "generator": generator(number)},
        "sampler": {"sampler": RandomSampler(data, generator=generator(number))},
        "rows": {"sampler": data[number:] + data[:number]},
        "subset": {"sampler": SubsetRandomSampler(data[number:], generator(1))},
        "stream": {"seed": number, "rank": rank, "world_size": 2},
        "size": {"batch_size": 1 + number, "seed": 1},
        "alone": {"shuffle": True, "seed": number, "rank": 0, "world_size": 1},
        "same rank": {"seed": 1, "rank": 0, "world_size": 2},
        "ranks exchanged": {"seed": 1, "rank": 1 - rank, "world_size": 2},
    }[way]
    return loaderkit.build_loader(
        Stream() if way == "stream" else data, num_workers=0, probe=False, **options
    )

WAYS = ["seed", "generator", "sampler", "rows", "subset", "stream", "size", "alone"]
early = make("seed", rank)
dist.init_process_group("gloo")
loaders = [("early", early)]
loaders += [(way, make(way, rank)) for way in WAYS]
loaders += [("equal " + way, make(way, 1)) for way in WAYS]
loaders += [(way, make(way, 1)) for way in ("same rank", "ranks exchanged")]
for way, loader in loaders:
    try:
        rows = [row for _ in range(2) for batch in loader for row in batch.tolist()]
        outcome = "read"
    except loaderkit.errors.LoaderError as error:
        outcome = error.what
    every = [None] * 2
    dist.all_gather_object(every, outcome)
    if rank == 0:
        print(json.dumps([way, every]))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_orders_that_differ_between_ranks_are_refused_on_all_of_them(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DIFFERING)

    ranks_read = dict(run_ranks(script))

    for way, (first, second) in ranks_read.items():
        assert first == second, way
        if way.startswith("equal") or way in {"alone", "ranks exchanged"}:
            assert first == "read"
        elif way == "same rank":
            assert "each of them" in first
        else:
            assert first.startswith("The ranks have different ")
    assert "different seed: 0 on rank 0, 1 on rank 1" in ranks_read["seed"][0]
    assert ranks_read["early"] == ranks_read["seed"]


ACCELERATED = """
import json, os, sys, warnings
import torch
warnings.simplefilter("ignore")
import loaderkit
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import gather_object

cache = loaderkit.open_cache(sys.argv[1])[:39]
WAYS = [
    {"batch_size": 4}, {"batch_size": 4, "shuffle": True},
    {"batch_size": 4, "shuffle": True, "rank": 0, "world_size": 1},
    {"batch_size": 4, "shuffle": True, "drop_last": True},
    {"max_nodes": 13, "shuffle": True},
]
torch.manual_seed(100 + int(os.environ["RANK"]))
# The first is built before the processes know of each other.
loaders = [loaderkit.build_loader(cache, batch_size=4, shuffle=True)]
accelerator = Accelerator(cpu=True)
loaders += [loaderkit.build_loader(cache, **way) for way in WAYS]
for loader in loaders:
    rows = [batch.y.tolist() for batch in accelerator.prepare(loader)]
    every = gather_object([rows])
    if accelerator.is_main_process:
        print(json.dumps(every))

# As Hugging Face's Trainer does where it goes on in the middle of an epoch.
for way in WAYS[0], WAYS[4]:
    for prepare in accelerator.prepare, lambda loader: loader:
        loader = prepare(loaderkit.build_loader(cache, **way, seed=0))
        try:
            skipping = skip_first_batches(loader, 2)
            rest = [batch.y.tolist() for batch in skipping]
        except loaderkit.errors.LoaderError as error:
            rest = str(error)
        whole = [batch.y.tolist() for batch in loader]
        every = gather_object([[whole, rest]])
        if accelerator.is_main_process:
            print(json.dumps(every))
accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.needs("accelerate")
def test_accelerate_deals_out_each_sample_once(cache, tmp_path):
    len(cache)
    script = tmp_path / "train.py"
    script.write_text(ACCELERATED)

    ranks_read = run_ranks(script, cache.cache)

    assert len(ranks_read) == 6 + 4
    *every_way, prepared, bare, prepared_by_size, bare_by_size = ranks_read
    for number, every in enumerate(every_way):
        count = collections.Counter(row for rank in every for b in rank for row in b)
        assert len({len(rank) for rank in every}) == 1
        if number == 4:
            assert len(count) == sum(count.values()) == 32
        else:  # accelerate fills the last round up from the first
            assert set(count) == set(range(39))
            assert sum(count.values()) <= 39 + 13

    for whole, rest in prepared:
        assert rest == whole[2:]
    for whole, rest in prepared_by_size:  # shuffled: the epoch after that is another
        assert len(rest) == len(whole) - 2
    for _, [_, refusal] in (bare, bare_by_size):
        assert "Rank 1 of 2 reads the batches of all ranks" in refusal
        assert "accelerator.prepare(loader)" in refusal


LIGHTNING = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import lightning, torch
import torch.distributed as dist
import loaderkit

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def training_step(self, rows, _):
        self.seen.append(rows.flatten().int().tolist())
        return self.layer(rows).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        data = [torch.tensor([float(row)]) for row in range(39)]
        return loaderkit.build_loader(
            data, batch_size=4, shuffle=True, num_workers=0, probe=False
        )

    def on_train_end(self):
        every = [None] * 2
        dist.all_gather_object(every, self.seen)
        if self.global_rank == 0:
            print(json.dumps(every))

trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", logger=False,
    enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
)
trainer.fit(Model())
# Lightning leaves the group open.  torch asks for this before a process ends: threads
# of gloo may still run, which ended one of some ten runs with "terminate called".
dist.destroy_process_group()
"""

HUGGING_FACE = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import torch, transformers
import torch.distributed as dist
import loaderkit

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def forward(self, row):
        self.seen.append(row.flatten().int().tolist())
        return {"loss": self.layer(row).mean()}

class Trainer(transformers.Trainer):
    def get_train_dataloader(self):
        return self.accelerator.prepare(loaderkit.build_loader(
            self.train_dataset, batch_size=4, shuffle=True, num_workers=0, probe=False
        ))

data = [{"row": torch.tensor([float(row)])} for row in range(39)]
model = Model()
settings = transformers.TrainingArguments(
    output_dir=sys.argv[1], num_train_epochs=2, use_cpu=True, report_to=[],
    save_strategy="no", disable_tqdm=True, logging_strategy="no", ddp_backend="gloo",
)
Trainer(model, settings, train_dataset=data).train()
every = [None] * 2
dist.all_gather_object(every, model.seen)
if dist.get_rank() == 0:
    print(json.dumps(every))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(LIGHTNING, marks=pytest.mark.needs("lightning"), id="lightning"),
        pytest.param(
            HUGGING_FACE, marks=pytest.mark.needs("transformers"), id="transformers"
        ),
    ],
)
def test_a_trainer_of_two_processes_loses_no_sample(script, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(script)

    [ranks_read] = run_ranks(file, tmp_path)

    steps = len(ranks_read[0]) // 2
    for epoch in range(2):
        first, last = epoch * steps, (epoch + 1) * steps
        count = collections.Counter(
            row
            for batches in ranks_read
            for rows in batches[first:last]
            for row in rows
        )
        assert len(ranks_read[0]) == len(ranks_read[1])
        assert set(count) == set(range(39))
        # 39 samples are no multiple of 2 ranks: rounds are filled up from the first.
        assert sum(count.values()) <= 40


SHARDED = """
import json
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import loaderkit

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
data = mesh["data"]
samples = [torch.tensor([float(row)]) for row in range(39)]

def make(**ranks):
    return loaderkit.build_loader(
        samples, batch_size=4, shuffle=True, num_workers=0, probe=False, **ranks
    )

layer = torch.nn.Linear(1, 2)
fully_shard(layer)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for loader in make(), make(rank=data.get_local_rank(), world_size=data.size()):
    seen = []
    for batch in loader:
        layer(batch).mean().backward()
        optimizer.step()
        seen.append(batch.flatten().int().tolist())
    every = [None] * 2
    dist.all_gather_object(every, seen)
    if dist.get_rank() == 0:
        print(json.dumps(every))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_fsdp_share_the_data_and_those_of_one_model_are_given_all(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SHARDED)

    shared, same = run_ranks(file)

    rows = [row for batches in shared for rows in batches for row in rows]
    assert set(rows) == set(range(39))
    assert len(rows) == 40
    assert len(shared[0]) == len(shared[1])
    assert same[0] == same[1]
    assert sorted(row for rows in same[0] for row in rows) == list(range(39))


def sizes_for(count, seed):
    return np.random.default_rng(seed).integers(1, 9, count)


class Sized(list):
    """Numbers that say how large they are."""

    def sizes(self):
        return {"nodes": sizes_for(len(self), len(self))}


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


OPTIONS = st.fixed_dictionaries(
    {"shuffle": st.sampled_from([False, True, "block"])},
    optional={
        "batch_size": st.integers(1, 9),
        "max_nodes": st.integers(9, 30),
        "bucket_by": st.just("nodes"),
        "drop_last": st.booleans(),
    },
)


def rows_of_ranks(make, ranks):
    """Read an epoch on every rank, each with random numbers of its own."""
    ranks_read = []
    for rank in range(ranks):
        torch.manual_seed(100 + rank)
        loader = make(rank)
        steps, epoch = len(loader), iter(loader)
        assert len(epoch) == steps
        ranks_read.append([batch.tolist() for batch in epoch])
        assert len(ranks_read[-1]) == steps
    return ranks_read


def check_union(ranks_read, samples, *, whole, repeats):
    rows = collections.Counter(row for rank in ranks_read for b in rank for row in b)
    assert len({len(rank) for rank in ranks_read}) == 1
    assert set(rows) <= set(range(samples))
    if whole:
        assert set(rows) == set(range(samples))
        assert sum(rows.values()) - samples <= repeats
    else:
        assert max(rows.values(), default=1) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:an epoch has no batches")
@given(st.integers(1, 60), st.integers(1, 4), OPTIONS)
@settings(max_examples=20)
def test_ranks_with_other_random_numbers_share_each_sample(samples, ranks, options):
    def make(rank):
        return build_loader(
            Sized(range(samples)),
            rank=rank,
            world_size=ranks,
            num_workers=0,
            probe=False,
            **options,
        )

    repeats = 0
    if ranks > 1:
        plan = make(0).plan.batching
        repeats = int(plan.split(" repeated")[0].rsplit(" ", 1)[-1])
    check_union(
        rows_of_ranks(make, ranks),
        samples,
        whole=not options.get("drop_last"),
        repeats=repeats,
    )


SAMPLERS = {
    "random": lambda data: RandomSampler(data),
    "list": lambda data: list(data),
    "weighted": lambda data: WeightedRandomSampler(
        [1.0] * len(data), len(data), replacement=False
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:an epoch has no batches")
@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.sampled_from(sorted(SAMPLERS)),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=15)
def test_a_samplers_choice_is_shared_out(samples, ranks, kind, size, batched, drop):
    data = list(range(samples))

    def make(rank):
        sampler = SAMPLERS[kind](data)
        options = {"sampler": sampler, "batch_size": size, "drop_last": drop}
        if batched:
            options = {"batch_sampler": BatchSampler(sampler, size, drop)}
        return build_loader(
            data, rank=rank, world_size=ranks, num_workers=0, probe=False, **options
        )

    ranks_read = rows_of_ranks(make, ranks)

    if batched and drop:  # what the batch sampler leaves out is its own affair
        assert len({len(rank) for rank in ranks_read}) == 1
    else:
        check_union(ranks_read, samples, whole=not drop, repeats=ranks * size)


@pytest.mark.slow
@given(
    st.integers(0, 40),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
)
@settings(max_examples=15)
def test_an_iterable_dataset_is_shared_out(samples, ranks, size, drop):
    def make(rank):
        return build_loader(
            Stream(samples),
            rank=rank,
            world_size=ranks,
            probe=False,
            batch_size=size,
            drop_last=drop,
        )

    ranks_read = [[b.tolist() for b in make(rank)] for rank in range(ranks)]

    check_union(ranks_read, samples, whole=not drop, repeats=ranks - 1)


DRAWN_BY = {
    "torch": lambda count: torch.randperm(count).tolist(),
    "python": lambda count: random.sample(range(count), count),
    "numpy": lambda count: np.random.permutation(count).tolist(),
}


class Shuffled(IterableDataset):
    """A stream in an order that it draws itself, shared out among workers."""

    def __init__(self, kind, count=23):
        self.kind, self.count = kind, count

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(DRAWN_BY[self.kind](self.count)[first::step])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("kind", sorted(DRAWN_BY))
def test_a_stream_draws_the_same_order_on_all_ranks(kind, seed, workers):
    loaders = []
    for rank in range(3):
        torch.manual_seed(100 + rank)
        random.seed(rank)
        np.random.seed(rank)
        loaders.append(
            build_loader(
                Shuffled(kind),
                rank=rank,
                world_size=3,
                batch_size=2,
                seed=seed,
                num_workers=workers,
                probe=False,
            )
        )

    for _ in range(2):
        ranks_read = [[batch.tolist() for batch in loader] for loader in loaders]
        check_union(ranks_read, 23, whole=True, repeats=2)


def test_a_sampler_that_shares_rows_out_itself_is_left_alone():
    data = list(range(10))

    def make(rank):
        sampler = DistributedSampler(data, num_replicas=2, rank=rank)
        return build_loader(data, sampler=sampler, rank=rank, world_size=2)

    rows = [row for rank in rows_of_ranks(make, 2) for b in rank for row in b]
    assert sorted(rows) == data
    other = DistributedSampler(data, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="rank 0 of 2, this is rank 1 of 2"):
        build_loader(data, sampler=other, rank=1, world_size=2)


def test_ranks_draw_other_random_numbers():
    options = {"batch_size": 4, "seed": 3, "num_workers": 0, "world_size": 2}

    left, right = (
        [
            batch["drawn"].tolist()
            for batch in build_loader(Noisy(), rank=rank, **options)
        ]
        for rank in range(2)
    )

    assert not {tuple(row) for b in left for row in b} & {
        tuple(row) for b in right for row in b
    }


LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "Horovod": ("HOROVOD_RANK", "HOROVOD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MVAPICH 2": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "MVAPICH 3": ("MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE"),
    "Platform MPI": ("MPI_RANKID", "MPI_NRANKS"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    "Flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
"""As their documentation, or Lightning, DeepSpeed and Horovod, name them."""
LOCAL_RANKS = [
    "LOCAL_RANK",
    "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MVP_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
    "JSM_NAMESPACE_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
]
LOCAL_SIZES = [
    "LOCAL_WORLD_SIZE",
    "HOROVOD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MVP_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PALS_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
]
"""Which process of its node this is, and how many are there."""
SETS_ITS_OWN = {
    # the launcher of the processes that train, and what it was started by
    "torchrun": ("srun", "Open MPI", "MPICH", "jsrun", "Flux"),
    "Horovod": ("srun", "jsrun", "Flux"),
    "Open MPI": ("srun", "jsrun", "Flux"),
    "MPICH": ("srun", "Flux"),
    "MVAPICH 2": ("srun",),
}


@pytest.fixture(name="alone", autouse=True)
def started_by_no_launcher(monkeypatch):
    for names in LAUNCHERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    others = ("SLURM_NTASKS", "NODE_RANK", "GROUP_RANK")
    for name in (*others, *LOCAL_RANKS, *LOCAL_SIZES):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS))
def test_a_launchers_variables_share_the_data_out(launcher, monkeypatch):
    def make(rank):
        for name, value in zip(LAUNCHERS[launcher], (rank, 3), strict=True):
            monkeypatch.setenv(name, str(value))
        return build_loader(list(range(10)), shuffle=True, batch_size=2)

    ranks_read = rows_of_ranks(make, 3)

    check_union(ranks_read, 10, whole=True, repeats=2)


def test_a_launchers_variables_that_do_not_say_enough_are_refused():
    with pytest.raises(LoaderError, match="was not started by srun") as caught:
        launched_ranks({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    assert "rank=0, world_size=1" in caught.value.fix
    for wrong in ("x", "4", "-1"):
        with pytest.raises(LoaderError, match="RANK and WORLD_SIZE are"):
            launched_ranks({"RANK": wrong, "WORLD_SIZE": "4"})
    assert launched_ranks({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).world_size == 1


@pytest.mark.parametrize("launcher", PROCESSES)
def test_what_launchers_were_seen_to_set_is_read(launcher):
    environment, wanted = PROCESSES[launcher]
    if wanted is None:
        with pytest.raises(LoaderError, match="was not started by srun"):
            launched_ranks(environment)
        return
    ranks = launched_ranks(environment)
    assert (ranks.rank, ranks.world_size) == wanted


TOLD_BY_HALF = [
    {"RANK": "0"},
    {"RANK": "x"},
    {"WORLD_SIZE": "2"},
    {"WORLD_SIZE": "x"},
    {"RANK": "1", "WORLD_SIZE": ""},
    {"LOCAL_RANK": "1"},
    {"LOCAL_RANK": "x"},
    {"NODE_RANK": "1"},
    {"PET_NODE_RANK": "1"},
    {"PALS_RANKID": "1"},
    {"PALS_NODEID": "1"},
    {"PMIX_RANK": "1"},
    {"PMI_LOCAL_RANK": "1"},
    {"PMI_LOCAL_SIZE": "2"},
    {"ALPS_APP_PE": "3"},
    *({rank: "1"} for rank, _ in LAUNCHERS.values()),
    *({size: "3"} for name, (_, size) in LAUNCHERS.items() if name != "srun"),
    *({name: "1"} for name in LOCAL_RANKS[1:]),
    *({name: "2"} for name in LOCAL_SIZES),
    {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    {"SLURM_NODEID": "1", "SLURM_LOCALID": "0"},
    # as Lightning starts processes
    {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "NODE_RANK": "0"},
]
TOLD_OF_ONE = [
    {},
    {"WORLD_SIZE": "1"},
    {"LOCAL_RANK": "0"},
    {"LOCAL_RANK": "-1"},
    {"LOCAL_RANK": "0", "NODE_RANK": "0"},
    {"SLURM_NTASKS": "1"},
    *({name: "0"} for name in LOCAL_RANKS),
    *({name: "1"} for name in LOCAL_SIZES),
    {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"},
]


@pytest.mark.parametrize("environment", TOLD_BY_HALF, ids=str)
def test_the_half_of_a_launchers_variables_is_refused(environment):
    with pytest.raises(LoaderError, match=next(iter(environment))) as caught:
        launched_ranks(environment)
    assert "init_process_group" in caught.value.fix


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS))
def test_the_place_on_a_node_says_nothing_where_the_rank_is_known(launcher):
    rank_name, size_name = LAUNCHERS[launcher]
    places = dict.fromkeys(LOCAL_RANKS, "1") | dict.fromkeys(LOCAL_SIZES, "2")

    ranks = launched_ranks({rank_name: "3", size_name: "4", **places})

    assert (ranks.rank, ranks.world_size) == (3, 4)


@pytest.mark.parametrize("number", [0, 1, 2, 7])
@pytest.mark.parametrize("launcher", sorted(LAUNCHERS))
def test_the_fix_of_such_variables_says_the_number_that_is_there(launcher, number):
    rank_name, size_name = LAUNCHERS[launcher]
    environments = [
        ({rank_name: number}, (number, max(2, number + 1))),
        ({"LOCAL_RANK": number, "WORLD_SIZE": number + 2}, (number, number + 2)),
        ({"LOCAL_RANK": number, "NODE_RANK": 1, "WORLD_SIZE": 9}, (0, 9)),
        # The number of a process on its node is not the rank.
        ({rank_name: number, "LOCAL_RANK": 5}, (number, max(2, number + 1))),
        ({"SLURM_LOCALID": number + 1}, (number + 1, number + 2)),
        ({"LOCAL_RANK": number, "LOCAL_WORLD_SIZE": 9}, (number, 9)),
    ]
    if launcher != "srun":  # where a size alone means that srun is missing
        environments += [({size_name: number + 2}, (0, number + 2))]
    for environment, (rank, size) in environments:
        texts = {name: str(value) for name, value in environment.items()}
        with pytest.raises(LoaderError) as caught:
            launched_ranks(texts)
        assert f"rank={rank}, world_size={size};" in caught.value.fix


@pytest.mark.parametrize("environment", TOLD_BY_HALF, ids=str)
def test_torch_refuses_such_variables_too(environment, monkeypatch):
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in {**address, **environment}.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ValueError, match=r"expected, but not set|invalid literal"):
        torch.distributed.init_process_group("gloo", init_method="env://")


@pytest.mark.parametrize("environment", TOLD_OF_ONE, ids=str)
def test_its_twin_of_a_process_alone_is_not(environment):
    assert launched_ranks(environment) is None


@pytest.mark.parametrize("environment", TOLD_BY_HALF, ids=str)
def test_one_launcher_that_tells_all_is_enough(environment):
    # Scripts of Slurm export WORLD_SIZE, and srun tells each process its number.
    slurm = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}

    ranks = launched_ranks({**environment, **slurm})

    assert (ranks.rank, ranks.world_size) == (1, 2)


@pytest.mark.parametrize("inner", SETS_ITS_OWN)
def test_the_launcher_of_the_processes_counts_and_not_the_one_that_started_it(inner):
    for outer in SETS_ITS_OWN[inner]:
        # A daemon on the second of two nodes, which starts processes 4 to 7.
        environment = dict(zip(LAUNCHERS[outer], ("1", "2"), strict=True))
        environment |= dict(zip(LAUNCHERS[inner], ("6", "8"), strict=True))
        ranks = launched_ranks(environment)
        assert (ranks.rank, ranks.world_size) == (6, 8), outer
    # mpirun in a batch script starts those of the first node itself.
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    ranks = launched_ranks(
        {**batch_script, **dict(zip(LAUNCHERS[inner], ("3", "8"), strict=True))}
    )
    assert (ranks.rank, ranks.world_size) == (3, 8)


def test_an_allocation_of_several_tasks_is_no_rank():
    with pytest.raises(LoaderError, match="Slurm has 4 tasks"):
        launched_ranks({"SLURM_NTASKS": "4"})


def test_an_iterable_dataset_among_ranks_must_say_who_shares_it(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(LoaderError, match="not known whether") as caught:
        build_loader(Stream(5))

    assert "rank=1, world_size=2" in caught.value.fix
    whole = build_loader(Stream(5), rank=0, world_size=1)
    assert len(list(whole)) == 5


@pytest.mark.slow
def test_rank_0s_state_is_every_ranks(cache):
    def loader(rank):
        return build_loader(
            cache, batch_size=3, shuffle=True, seed=1, rank=rank, world_size=2
        )

    whole = [[b.y.tolist() for b in loader(rank)] for rank in range(2)]
    first = loader(0)
    iterator = iter(first)
    next(iterator), next(iterator)

    for rank in range(2):
        again = loader(rank)
        again.load_state_dict(first.state_dict())
        assert [b.y.tolist() for b in again] == whole[rank][2:]


def test_trainers_see_a_distributed_sampler_and_the_batches_of_all_ranks(cache):
    loaders = [
        build_loader(cache, batch_size=3, shuffle=True, rank=rank, world_size=2)
        for rank in range(2)
    ]

    for loader in loaders:
        assert isinstance(loader.sampler, DistributedSampler)
        loader.set_epoch(0)
        rows = [row for batch in loader.batch_sampler for row in batch]
        assert sorted(rows) == list(range(40))
        loader.set_epoch(0)
    own = [list(loader.sampler) for loader in loaders]
    assert sorted(own[0] + own[1]) == list(range(40))


@pytest.mark.parametrize("options", [{"batch_size": 7}, {"max_nodes": 9}])
def test_batches_that_are_shared_out_in_an_epoch_nobody_has_set_are_told(
    cache, options
):
    def make(**ranks):
        return build_loader(cache, shuffle=True, seed=0, **ranks, **options)

    unset = make(rank=0, world_size=2).batch_sampler
    with pytest.warns(UserWarning, match="order of epoch 0, since nobody has set"):
        first_epoch = list(unset)

    # One rank shares nothing out, and a trainer sets the epoch of the sampler's rows.
    assert list(make(rank=0, world_size=1).batch_sampler)
    told = make(rank=0, world_size=2).batch_sampler
    told.set_epoch(1)
    assert list(told) != first_epoch


@pytest.mark.parametrize("options", [{"batch_size": 7}, {"max_nodes": 9}])
def test_ranks_agree_without_a_word(cache, options):
    part = cache[:39]
    loaders = [
        build_loader(part, shuffle=True, rank=rank, world_size=4, **options)
        for rank in range(4)
    ]
    ranks_read = [[batch.y.tolist() for batch in loader] for loader in loaders]

    assert len({len(rank_rows) for rank_rows in ranks_read}) == 1
    assert {
        row for rank_rows in ranks_read for batch in rank_rows for row in batch
    } == set(range(39))
    assert "rank 2 of 4" in loaders[2].plan.batching
