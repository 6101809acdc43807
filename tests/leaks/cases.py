"""Ways to leak, and look-alikes that do not, as people met them: a step of a loop each.

A case is a function that returns ``step``; calling it for ever is the training loop.
The label says what grows, and what a good report names; ``run_cases.py`` proves each by
measurement.  leaks_corpus.py has more of them.  Only those about graphs import PyG:
it doubles the heap, and with it what each of the others would take.
"""

import asyncio
import atexit
import collections
import concurrent.futures
import ctypes
import functools
import io
import logging
import mmap
import multiprocessing
import pickle
import re
import tempfile
import threading
import types
import typing
import weakref
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader


@dataclass(frozen=True)
class Case:
    make: object
    leaks: bool
    names: tuple
    """Words of which a good report has one: the variable, or the resource."""
    source: str


CASES = {}


WITH_PYG = (
    "graphs_cached_by_a_dataset",
    "transform_keeps_graphs",
    "graphs_of_any_size",
)
"""Cases that import PyG, which takes 2 s of CPU; run_cases.py does so once for all."""


def leak(*names, source):
    return lambda make: _register(make, True, names, source)


def calm(source):
    return lambda make: _register(make, False, (), source)


def _register(make, leaks, names, source):
    CASES[make.__name__] = Case(make, leaks, names, source)
    return make


def scratch():
    return Path(tempfile.mkdtemp())


def endless(loader):
    """Batches of one epoch after the other."""
    while True:
        yield from loader


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows=40, keep=False):
        self.rows, self.keep, self.cache = rows, keep, []

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        item = torch.full((4000,), float(row))
        if self.keep:
            self.cache.append(item.clone())
        return item


# ---- leaks


@leak("of the DataLoader over Rows", source="pytorch#62066, pytorch#13246")
def persistent_worker_keeps_items():
    loader = DataLoader(
        Rows(keep=True), batch_size=4, num_workers=2, persistent_workers=True
    )
    batches = endless(loader)
    return lambda: next(batches)


@leak("kept", source="pytorch#11201, pytorch#973")
def worker_batches_kept():
    loader = DataLoader(Rows(), batch_size=4, num_workers=1, persistent_workers=True)
    batches, kept = endless(loader), []
    return lambda: kept.append(next(batches))


@leak("child process", source="NVIDIA/sentiment-discovery#60, pytorch#91252")
def a_loader_with_workers_every_epoch():
    kept, state = [], {"step": 0}

    def step():
        state["step"] += 1
        if state["step"] % 10 == 0:
            loader = DataLoader(Rows(), 4, num_workers=1, persistent_workers=True)
            next(iter(loader))
            kept.append(loader)

    return step


@leak("native", "graph", source="pytorch#7343, pytorch#4661")
def backward_with_create_graph():
    import warnings

    warnings.simplefilter("ignore")

    def step():
        x = torch.randn(5000, requires_grad=True)
        x.tanh().backward(torch.ones_like(x), create_graph=True)

    return step


@leak("meter", "total", source="rabbityl/lepard#12, BatsResearch/labelmodels#4")
def average_meter_keeps_the_graph():
    class Meter:
        total = 0.0

        def update(self, value):
            self.total = self.total + value

    meter, model = Meter(), net()
    return lambda: meter.update(model(torch.randn(64, 64)).mean())


@leak("preds", source="NRCan/geo-deep-learning#582, Lightning-AI/torchmetrics#1949")
def metric_never_reset():
    class Metric:
        def __init__(self):
            self.preds, self.target = [], []

        def update(self, preds, target):
            self.preds.append(preds.detach())
            self.target.append(target)

    metric, model = Metric(), net()
    return lambda: metric.update(model(torch.randn(4096, 64)), torch.ones(8))


@leak("training_step_outputs", source="Lightning-AI/pytorch-lightning#4556")
def outputs_of_a_module_never_cleared():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.training_step_outputs = net(), []

        def training_step(self, batch):
            loss = self.net(batch).mean()
            self.training_step_outputs.append({"loss": loss, "log": {"n": 1}})
            return loss

    module = Module()
    return lambda: module.training_step(torch.randn(64, 64)).backward()


@leak("_data_list", "cache", source="pyg-team/pytorch_geometric#10356")
def graphs_cached_by_a_dataset():
    from torch_geometric.data import Batch, Data

    class Graphs:
        def __init__(self):
            self._data_list = {}

        def get(self, row):
            data = Data(x=torch.randn(200, 16), edge_index=torch.zeros(2, 400).long())
            self._data_list[row] = data
            return data

    graphs, state = Graphs(), {"row": 0}

    def step():
        state["row"] += 1
        Batch.from_data_list([graphs.get(state["row"])])

    return step


@leak("seen", source="pyg-team/pytorch_geometric#1702")
def transform_keeps_graphs():
    from torch_geometric.data import Data

    class Transform:
        seen: typing.ClassVar = collections.deque()

        def __call__(self, data):
            self.seen.append(data.x)
            return data

    transform = Transform()
    return lambda: transform(Data(x=torch.randn(300, 16)))


@leak("handles", "file", source="h5py/h5py#763, h5py/h5py#2553")
def h5py_files_kept_open():
    folder, handles = scratch(), {}

    def step():
        name = f"{len(handles)}.h5"
        handles[name] = h5py.File(folder / name, "w")
        handles[name]["x"] = np.ones(1000)

    return step


@leak("arrays", source="numpy/numpy#13172: np.load(mmap_mode) keeps the file open")
def memory_maps_kept():
    file = scratch() / "a.npy"
    np.save(file, np.ones(100_000))
    arrays = []
    return lambda: arrays.append(np.load(file, mmap_mode="r"))


@leak("checkpoints", "mapping", source="pytorch torch.load(mmap=True) documentation")
def mapped_checkpoints_kept():
    file = scratch() / "a.pt"
    torch.save({"w": torch.ones(50_000)}, file)
    checkpoints = []
    return lambda: checkpoints.append(torch.load(file, mmap=True))


@leak("handlers", "file", source="ludwig-ai/ludwig#269: writers never closed")
def log_handlers_added_every_step():
    logger, folder = logging.getLogger("leaky"), scratch()

    def step():
        logger.addHandler(logging.FileHandler(folder / "a.log", delay=False))

    return step


@leak("thread", source="pytorch#61186: SummaryWriter and its thread stay")
def writers_with_a_thread():
    class Writer:
        def __init__(self):
            self.ended = threading.Event()
            self.thread = threading.Thread(target=self.work, daemon=True)
            self.thread.start()

        def work(self):
            self.ended.wait()

    return lambda: Writer() and None


@leak("pad", source="pytorch#91252: atexit.register")
def callbacks_at_exit():
    def step():
        pad = torch.randn(10_000)
        atexit.register(lambda: pad.sum())

    return step


@leak("finalize", "registry", source="python/cpython weakref.finalize documentation")
def finalizers_keep_their_arguments():
    class Handle:
        pass

    forever = []

    def step():
        handle = Handle()
        forever.append(handle)
        weakref.finalize(handle, print, torch.randn(10_000))

    return step


@leak("kept", "generator", source="suspended generators keep their frames")
def generators_never_finished():
    def work():
        big = np.ones(10_000)
        yield 1
        yield big

    kept = []

    def step():
        generator = work()
        next(generator)
        kept.append(generator)

    return step


@leak("history", source="discuss.pytorch.org 19363: predictions joined by torch.cat")
def one_tensor_gets_longer():
    state = {"history": torch.zeros(0)}

    def step():
        state["history"] = torch.cat([state["history"], torch.randn(5000)])

    return step


@leak("joined", source="metrics joined by np.concatenate in evaluation loops")
def one_array_gets_longer():
    state = {"joined": np.zeros(0)}

    def step():
        state["joined"] = np.concatenate([state["joined"], np.random.rand(5000)])

    return step


@leak("features", source="numpy features cached by sample: a dict the collector skips")
def arrays_in_a_dict():
    features = {}
    return lambda: features.setdefault(len(features), np.random.rand(2000))


@leak("texts", source="prompts and captions kept by step")
def long_texts_kept():
    texts = {}
    return lambda: texts.setdefault(len(texts), "x" * 5000 + str(len(texts)))


@leak("outputs", source="outputs = outputs + [batch]: a new list every time")
def a_new_list_every_step():
    state = {"outputs": []}

    def step():
        state["outputs"] = [*state["outputs"], torch.randn(10_000)]

    return step


@leak("did not come from malloc", source="allocators that map memory by themselves")
def private_maps_of_native_code():
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        *[ctypes.c_int] * 3,
        ctypes.c_long,
    ]
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

    def step():
        address = libc.mmap(None, 65_536, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
        ctypes.memset(address, 1, 65_536)

    return step


@leak("native memory", source="Pickler.clear_memo in the standard library's manual")
def one_pickler_remembers_all_it_wrote():
    file = io.BytesIO()
    pickler = pickle.Pickler(file)

    def step():
        file.seek(0)
        pickler.dump({"loss": np.zeros(1500)})

    return step


@leak("objects", source="xml.etree.ElementTree.iterparse: clear() the root")
def elements_of_one_tree():
    root = ElementTree.Element("run")

    def step():
        for _ in range(40):
            ElementTree.SubElement(root, "step", {"loss": "x" * 100})

    return step


@leak("queues", "pipe", source="pytorch#65198: queues and their pipes")
def queues_never_closed():
    queues = []
    return lambda: queues.append(multiprocessing.SimpleQueue())


@leak("futures", source="futures keep their results")
def futures_kept():
    pool, futures = concurrent.futures.ThreadPoolExecutor(1), []

    def step():
        futures.append(pool.submit(np.ones, 10_000))
        return futures[-1].result().sum()

    return step


@leak("tasks", source="asyncio tasks that wait for ever")
def tasks_never_awaited():
    loop, tasks = asyncio.new_event_loop(), set()

    async def wait():
        pad = np.ones(10_000)
        await asyncio.Event().wait()
        return pad

    def step():
        tasks.add(loop.create_task(wait()))
        loop.run_until_complete(asyncio.sleep(0))

    return step


@leak("cache", source="functools.cache on a method keeps every self")
def cached_method_keeps_self():
    class Sample:
        def __init__(self):
            self.x = torch.randn(10_000)

        @functools.cache  # noqa: B019 -- the leak
        def total(self):
            return float(self.x.sum())

    return lambda: Sample().total()


@leak("buffer", source="a BytesIO or StringIO that is written to and never emptied")
def a_buffer_of_text_grows():
    buffer = io.StringIO()
    return lambda: buffer.write("loss 0.125\n" * 800)


@leak("table", source="pandas and numpy columns of dtype=object")
def an_array_of_objects_fills():
    table, state = np.empty(10_000, dtype=object), {"row": 0}

    def step():
        table[state["row"]] = torch.randn(1500)
        state["row"] += 1

    return step


@leak("infos", source="sys.exc_info() kept: the frame leads back to the list")
def tracebacks_kept():
    infos = []

    def step():
        try:
            pad = torch.randn(1500)
            raise KeyError(len(pad))
        except KeyError as error:
            infos.append(error.__traceback__)

    return step


# ---- look-alikes


@calm("few objects with much memory: the collector runs once in 70 epochs")
def garbage_that_the_collector_has_not_reached():
    def step():
        node = types.SimpleNamespace(load=np.ones(500))
        node.me = node

    return step


@calm("pytorch#25340, pytorch#5569: cycles that the collector frees, now and then")
def output_kept_on_ctx():
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.out = x.clone()
            return ctx.out

        @staticmethod
        def backward(_, grad):
            return grad

    return lambda: Copy.apply(torch.randn(10_000, requires_grad=True))


@calm("a list that is emptied at the end of each epoch")
def list_cleared_every_epoch():
    outputs = []

    def step():
        outputs.append(torch.randn(50_000))
        if len(outputs) == 10:
            outputs.clear()

    return step


@calm("pytorch#13246: reference counts copy pages of forked workers, until all are")
def workers_read_a_python_list():
    words = [f"sample {i}" for i in range(20_000)]

    class Words(torch.utils.data.Dataset):
        def __len__(self):
            return 200

        def __getitem__(self, row):
            return sum(map(len, words[row * 100 : row * 100 + 100]))

    loader = DataLoader(Words(), 20, num_workers=2, persistent_workers=True)
    batches = endless(loader)
    return lambda: next(batches)


@calm("workers that are started anew every epoch")
def workers_started_every_epoch():
    loader = DataLoader(Rows(), batch_size=4, num_workers=1)
    batches = endless(loader)
    return lambda: next(batches)


@calm("h5py files opened and closed")
def h5py_files_closed():
    file = scratch() / "a.h5"
    with h5py.File(file, "w") as out:
        out["x"] = np.ones(1000)

    def step():
        with h5py.File(file, "r") as found:
            return found["x"][0]

    return step


@calm("a replay buffer that fills for half of the run, then goes round")
def replay_buffer():
    buffer, state = [None] * 160, {"step": 0}

    def step():
        buffer[state["step"] % 160] = torch.randn(5000)
        state["step"] += 1

    return step


@calm("batch-size warm-up in three stages")
def batch_grows_in_stages():
    model, state = net(), {"step": 0}

    def step():
        state["step"] += 1
        size = 500 * min(4, 1 + state["step"] // 60)
        model(torch.randn(size, 64)).sum().backward()

    return step


@calm("an exponential moving average is replaced, not added")
def moving_average():
    model, state = net(), {}

    def step():
        mine = {name: value.clone() for name, value in model.state_dict().items()}
        old = state.get("ema", mine)
        state["ema"] = {name: 0.9 * old[name] + 0.1 * mine[name] for name in mine}

    return step


@calm("graphs of any size, batched and let go")
def graphs_of_any_size():
    from torch_geometric.data import Batch, Data

    rng = np.random.default_rng(0)

    def step():
        graphs = [Data(x=torch.randn(int(rng.integers(1, 400)), 8)) for _ in range(8)]
        return Batch.from_data_list(graphs)

    return step


@calm("three metrics a step, as Python floats")
def metrics_as_floats():
    history, model = collections.defaultdict(list), net()

    def step():
        loss = model(torch.randn(32, 64)).mean().item()
        for name in ("loss", "mae", "acc"):
            history[name].append(loss)

    return step


@calm("arrays mapped and let go")
def memory_maps_dropped():
    file = scratch() / "a.npy"
    np.save(file, np.ones(100_000))
    return lambda: float(np.load(file, mmap_mode="r")[::100].sum())


@calm("the cache of re, which holds at most 512 patterns")
def patterns_compiled():
    state = {"step": 0}

    def step():
        state["step"] += 1
        re.compile(f"(a|b)*c{state['step']}[a-z]+(?P<name>x{{3,7}})")

    return step


@calm("an lru_cache with a bound, filling for two thirds of the run")
def bounded_cache_fills_slowly():
    @functools.lru_cache(maxsize=200)
    def make(key):
        return torch.full((5000,), float(key))

    state = {"step": 0}

    def step():
        state["step"] += 1
        make(state["step"] % 230)

    return step


@calm("checkpoints written over each other, gradients accumulated over four steps")
def checkpoints_and_accumulation():
    model, file, state = net(), scratch() / "a.pt", {"step": 0}
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        state["step"] += 1
        model(torch.randn(64, 64)).mean().backward()
        if state["step"] % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            torch.save(model.state_dict(), file)

    return step
