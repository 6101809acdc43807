"""A second table, written after what the first had found was mended, and run once.

As in ``leak_cases``; nothing of the detector was changed between writing and running.
"""

import abc
import array
import asyncio
import base64
import collections
import concurrent.futures
import csv
import enum
import functools
import gzip
import io
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import queue
import random
import selectors
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import types
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from leak_cases import CaseTable, mlp, scratch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

CASES = CaseTable()
leak, calm = CASES.leak, CASES.lookalike
METRICS = collections.OrderedDict()
QUEUE = collections.deque()


# ---- leaks


@leak("METRICS")
def metrics_in_an_ordered_dict():
    count = itertools.count()

    def step():
        METRICS[next(count)] = torch.rand(1500)  # grows

    return step


@leak("QUEUE")
def requests_in_a_module_deque():
    return lambda: QUEUE.append(
        {"id": 1, "body": "x" * 6000 + str(len(QUEUE))}
    )  # grows


@leak("outputs")
def outputs_by_extend():
    model, outputs = mlp(), []
    return lambda: outputs.extend(model(torch.randn(200, 64)).unbind())  # grows


@leak("rows", "buffer")
def rows_of_a_csv():
    buffer = io.StringIO()
    rows = csv.writer(buffer)
    return lambda: rows.writerow(range(1500)) and None


@leak("packets")
def packed_structs_in_a_bytearray():
    class Wire:
        def __init__(self):
            self.packets = bytearray()

        def send(self):
            self.packets += struct.pack("1000d", *range(1000))  # grows

    return Wire().send


@leak("signal", "noise")
def two_arrays_at_once():
    signal, noise = array.array("d"), array.array("f")

    def step():
        signal.extend(range(800))  # grows
        noise.extend(range(1600))  # grows

    return step


@leak("archive")
def a_gzip_in_memory():
    archive = io.BytesIO()

    def step():
        with gzip.GzipFile(fileobj=archive, mode="ab") as file:
            file.write(os.urandom(8000))

    return step


@leak("column")
def an_object_column_of_pandas():
    class Frame:
        def __init__(self):
            self.column = np.empty(5000, dtype=object)
            self.used = 0

        def add(self):
            self.column[self.used] = [random.random() for _ in range(300)]  # grows
            self.used += 1

    return Frame().add


@leak("labels")
def an_object_array_appended():
    state = {"labels": np.empty(0, dtype=object)}

    def step():
        more = np.empty(1, dtype=object)
        more[0] = torch.randn(1500)
        state["labels"] = np.concatenate([state["labels"], more])  # grows

    return step


@leak("previous", "state")
def frames_joined_as_views():
    state = {"previous": torch.zeros(1)}

    def step():
        state["previous"] = torch.cat([state["previous"], torch.randn(2000)])  # grows

    return step


@leak("views")
def numpy_views_of_tensors():
    views = []
    return lambda: views.append(torch.randn(1500).numpy())  # grows


@leak("windows")
def small_slices_of_arrays():
    windows = []
    return lambda: windows.append(np.random.rand(2000)[5:8])  # grows


@leak("views")
def memoryviews_kept():
    views = []
    return lambda: views.append(memoryview(bytearray(7000)))  # grows


@leak("pickles")
def pickles_by_key():
    pickles, count = {}, itertools.count()

    def step():
        pickles[f"k{next(count)}"] = pickle.dumps(np.random.rand(900))  # grows

    return step


@leak("tables")
def a_chain_map():
    tables = collections.ChainMap()
    return lambda: tables.maps.insert(0, {"x": np.ones(1200)})  # grows


@leak("user", "data")
def a_user_dict():
    user, count = collections.UserDict(), itertools.count()

    def step():
        user[next(count)] = torch.randn(1500)

    return step


@leak("batches")
def namedtuples_kept():
    class Batch(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    batches = []
    return lambda: batches.append(Batch(torch.randn(1200), torch.zeros(4)))  # grows


@leak("history")
def a_dataclass_with_a_list():
    @dataclass
    class State:
        history: list = field(default_factory=list)

    state = State()
    return lambda: state.history.append(np.random.rand(1200))  # grows


@leak("slots", "items")
def slots_that_keep():
    class Bag:
        __slots__ = ("items",)

        def __init__(self):
            self.items = []

        def put(self):
            self.items.append(torch.randn(1500))  # grows

    return Bag().put


@leak("parent", "children")
def trees_with_parents():
    class Node:
        def __init__(self, parent):
            self.parent, self.children = parent, []
            self.load = np.ones(1200)
            if parent is not None:
                parent.children.append(self)  # grows

    root = Node(None)
    return lambda: Node(root)


@leak("loggers", "records")
def records_of_a_list_handler():
    class Keep(logging.Handler):
        def __init__(self):
            super().__init__()
            self.records = []

        def emit(self, record):
            self.records.append(record)  # grows

    logger = logging.getLogger("blind.records")
    logger.propagate = False
    logger.addHandler(Keep())
    return lambda: logger.warning("batch %s", torch.randn(1500)) and None


@leak("caught", "warnings.")
def warnings_recorded():
    caught = warnings.catch_warnings(record=True)
    caught.__enter__()
    warnings.simplefilter("always")

    def step():
        for number in range(10):
            warnings.warn("x" * 400 + str(number), stacklevel=1)

    return step


@leak("tasks")
def coroutines_that_wait():
    loop, tasks = asyncio.new_event_loop(), []

    async def wait(pad):
        await loop.create_future()
        return pad

    def step():
        tasks.append(loop.create_task(wait(torch.randn(1500))))  # grows
        loop.run_until_complete(asyncio.sleep(0))

    return step


@leak("futures")
def futures_with_results():
    pool = concurrent.futures.ThreadPoolExecutor(1)
    futures = set()

    def step():
        future = pool.submit(np.ones, 1200)
        future.result()
        futures.add(future)  # grows

    return step


@leak("jobs", "kept")
def a_thread_with_a_growing_argument():
    jobs, ready = [], queue.Queue()
    done = queue.Queue()

    def work(kept):
        while True:
            kept.append(ready.get())
            done.put(1)

    threading.Thread(target=work, args=(jobs,), daemon=True).start()

    def step():
        ready.put(np.random.rand(1200))
        done.get()

    return step


@leak("socket", "pairs")
def socket_pairs_open():
    pairs = []
    return lambda: pairs.append(socket.socketpair())  # grows


@leak("open files", "kept")
def selectors_never_closed():
    kept = []
    return lambda: kept.append(selectors.EpollSelector())


@leak("child processes")
def sleeping_children():
    count = itertools.count()

    def step():
        if next(count) % 10 == 0:
            subprocess.Popen(["sleep", "600"])

    return step


@leak("connections", "native")
def sqlite_connections():
    connections = []

    def step():
        connection = sqlite3.connect(":memory:")
        connection.execute("create table t (x)")
        connections.append(connection)  # grows

    return step


@leak("decode", "lru_cache")
def a_cached_method():
    class Reader:
        @functools.lru_cache(maxsize=None)  # noqa: B019, UP033
        def decode(self, number):
            return base64.b64encode(bytes(6000) + bytes([number % 256]))

    reader, count = Reader(), itertools.count()
    return lambda: reader.decode(next(count)) and None


@leak("listeners")
def listeners_never_removed():
    class Bus:
        listeners: dict = collections.defaultdict(list)  # noqa: RUF012

        def on(self, name, call):
            self.listeners[name].append(call)  # grows

    class Screen:
        def __init__(self, bus):
            self.pad = np.ones(1200)
            bus.on("draw", self.draw)

        def draw(self):
            return self.pad

    bus = Bus()
    return lambda: Screen(bus) and None


@leak("_registry", "registry")
def abstract_classes_registered():
    class Base(abc.ABC):  # noqa: B024
        pass

    registry = {}

    def step():
        for _ in range(3):
            kind = type(f"K{len(registry)}", (Base,), {"pad": [0] * 50})
            registry[kind.__name__] = kind  # grows

    return step


@leak("losses")
def losses_by_name_with_graphs():
    model, losses = mlp(), collections.defaultdict(list)

    def step():
        loss = model(torch.randn(64, 64)).mean()
        losses["train"].append(loss)  # grows

    return step


@leak("grads", "history")
def gradients_cloned():
    model, history = mlp(), []

    def step():
        model.zero_grad()
        model(torch.randn(16, 64)).sum().backward()
        history.append([p.grad.clone() for p in model.parameters()])  # grows

    return step


@leak("saved")
def tensor_hooks_that_save():
    model, saved = mlp(), []

    def step():
        y = model(torch.randn(64, 64))
        y.register_hook(lambda grad: saved.append(grad.clone().repeat(30, 1)))  # grows
        y.sum().backward()

    return step


@leak("ema", "memory")
def a_memory_bank_never_detached():
    model, memory = mlp(), {"bank": torch.zeros(64, 1)}

    def step():
        out = model(torch.randn(64, 64))
        memory["bank"] = 0.9 * memory["bank"] + 0.1 * out  # grows

    return step


@leak("scalers", "groups", "param_groups")
def groups_added_to_an_optimizer():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)

    def step():
        optimizer.add_param_group(
            {"params": [nn.Parameter(torch.zeros(1500))]}
        )  # grows

    return step


@leak("buffers", "_buffers")
def buffers_registered():
    model, count = mlp(), itertools.count()

    def step():
        model.register_buffer(f"b{next(count)}", torch.zeros(1500))

    return step


@leak("worker")
def an_iterable_dataset_that_keeps():
    class Stream(IterableDataset):
        def __init__(self):
            self.kept = []

        def __iter__(self):
            for number in range(10):
                self.kept.append(np.random.rand(4000))
                yield number

    loader = DataLoader(Stream(), 1, num_workers=1, persistent_workers=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    return lambda: next(batches)


@leak("frames")
def slices_of_pandas():
    frames, base = {}, pd.DataFrame({"x": np.random.rand(3000)})
    count = itertools.count()

    def step():
        frames[next(count)] = base.sample(800)  # grows

    return step


@leak("series", "state")
def a_series_that_is_extended():
    state = {"series": pd.Series(dtype=float)}

    def step():
        more = pd.Series(np.random.rand(1000))
        state["series"] = pd.concat([state["series"], more], ignore_index=True)  # grows

    return step


@leak("finalizers", "finalize", "_registry", "objects")
def finalizers_of_kept_objects():
    class Handle:
        pass

    objects = []

    def step():
        handle = Handle()
        weakref.finalize(handle, print, np.ones(1200))
        objects.append(handle)  # grows

    return step


# ---- look-alikes


@calm
def a_ring_of_tensors():
    ring, count = [None] * 70, itertools.count()

    def step():
        ring[next(count) % 70] = torch.randn(3000)

    return step


@calm
def an_object_array_as_ring():
    ring, count = np.empty(64, dtype=object), itertools.count()

    def step():
        ring[next(count) % 64] = np.random.rand(2000)

    return step


@calm
def a_string_io_that_is_replaced():
    state = {"text": io.StringIO(), "count": 0}

    def step():
        state["text"].write("x" * 4000)
        state["count"] += 1
        if state["count"] % 25 == 0:
            state["text"] = io.StringIO()

    return step


@calm
def a_bytearray_cleared():
    data = bytearray()

    def step():
        data.extend(bytes(random.randrange(4000, 9000)))
        if len(data) > 200_000:
            data.clear()

    return step


@calm
def an_array_trimmed():
    numbers = array.array("d")

    def step():
        numbers.extend([0.5] * 500)
        if len(numbers) > 20_000:
            del numbers[:10_000]

    return step


@calm
def a_cache_by_size():
    cache, state = collections.OrderedDict(), {"bytes": 0, "key": 0}

    def step():
        state["key"] += 1
        value = bytes(random.randrange(1000, 20_000))
        cache[state["key"]] = value
        state["bytes"] += len(value)
        while state["bytes"] > 400_000:
            state["bytes"] -= len(cache.popitem(last=False)[1])

    return step


@calm
def a_cache_that_expires():
    cache, count = {}, itertools.count()

    def step():
        # Counted in steps: by the clock, a run of milliseconds never empties it.
        number = next(count)
        cache[number] = np.ones(2000)
        for key in [key for key in cache if number - key > 30]:
            del cache[key]

    return step


@calm
def lru_of_hot_keys():
    @functools.lru_cache(maxsize=128)
    def load(row):
        return torch.full((2000,), float(row))

    return lambda: load(int(random.paretovariate(0.7)) % 300).sum()


@calm
def garbage_with_tensors():
    class Node:
        pass

    def step():
        node = Node()
        node.me, node.load = node, torch.randn(1500)

    return step


@calm
def garbage_in_closures():
    def step():
        pad = np.ones(700)

        def inner():
            return inner, pad

        return inner() and None

    return step


@calm
def exceptions_that_refer_to_themselves():
    def step():
        try:
            raise ValueError
        except ValueError as error:
            kept = error
            pad = np.ones(600)
            kept.pad = pad

    return step


@calm
def modules_with_backward_cycles():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(20, 20)
            self.layer.register_forward_hook(lambda *_: self.training and None)

    def step():
        Block()(torch.randn(2, 20)) if hasattr(Block, "call") else Block()

    return step


@calm
def growing_sentences_that_repeat():
    count = itertools.count()

    def step():
        length = 20 + 10 * (next(count) % 100)
        return torch.nn.functional.one_hot(torch.arange(length), length).sum()

    return step


@calm
def curriculum_of_sequence_lengths():
    count, model = itertools.count(), nn.GRU(16, 16, batch_first=True)

    def step():
        length = min(60, 5 + next(count) // 3)
        model(torch.randn(8, length, 16))[0].sum().backward()

    return step


@calm
def buckets_filled_and_flushed():
    buckets = collections.defaultdict(list)

    def step():
        bucket = buckets[random.randrange(5)]
        bucket.append(torch.randn(3000))
        if len(bucket) == 8:
            torch.stack(bucket)
            bucket.clear()

    return step


@calm
def metrics_reset_each_epoch():
    state = {"count": 0, "preds": []}

    def step():
        state["preds"].append(torch.randn(5000))
        state["count"] += 1
        if state["count"] % 10 == 0:
            torch.cat(state["preds"]).mean()
            state["preds"] = []

    return step


@calm
def regression_history_of_floats():
    rows = []

    def step():
        rows.append({"step": len(rows), "loss": random.random(), "lr": 0.1})

    return step


@calm
def a_confusion_matrix():
    matrix = torch.zeros(50, 50)

    def step():
        index = torch.randint(50, (2, 500))
        matrix.index_put_((index[0], index[1]), torch.ones(500), accumulate=True)

    return step


@calm
def tensorboard_like_that_flushes():
    folder, events = scratch(), []

    def step():
        events.append({"tag": "loss", "value": random.random(), "pad": "x" * 3000})
        if len(events) == 20:
            (folder / "events").write_text(json.dumps(events))
            events.clear()

    return step


@calm
def worker_pool_reused():
    pool = concurrent.futures.ThreadPoolExecutor(2)
    return lambda: sum(pool.map(np.sum, [np.ones(500)] * 6)) and None


@calm
def asyncio_tasks_that_finish():
    loop = asyncio.new_event_loop()

    async def work():
        await asyncio.gather(*[asyncio.sleep(0) for _ in range(20)])

    return lambda: loop.run_until_complete(work())


@calm
def sockets_closed():
    def step():
        left, right = socket.socketpair()
        left.send(b"x" * 100)
        right.recv(100)
        left.close()
        right.close()

    return step


@calm
def subprocesses_waited_for():
    count = itertools.count()

    def step():
        if next(count) % 10 == 0:
            subprocess.run(["true"], check=True)

    return step


@calm
def queues_between_processes():
    context = multiprocessing.get_context("fork")
    inbox = context.SimpleQueue()

    def step():
        inbox.put(b"x" * 2000)
        inbox.get()

    return step


@calm
def sqlite_file_that_is_full():
    database = sqlite3.connect(scratch() / "a.db")
    database.execute("create table t (n integer primary key, x blob)")
    count = itertools.count()

    def step():
        number = next(count) % 50
        database.execute(
            "insert or replace into t values (?, ?)", (number, bytes(4000))
        )
        database.commit()

    return step


@calm
def workers_with_small_caches():
    class Samples(Dataset):
        def __len__(self):
            return 80

        @functools.lru_cache(maxsize=8)  # noqa: B019
        def load(self, _row):
            return np.random.rand(2000)

        def __getitem__(self, row):
            return self.load(row).sum()

    loader = DataLoader(Samples(), 8, num_workers=1, persistent_workers=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    return lambda: next(batches)


@calm
def loaders_made_anew():
    data = TensorDataset(torch.randn(64, 100))

    def step():
        for _ in DataLoader(data, 16, shuffle=True):
            pass

    return step


@calm
def pandas_merges():
    left = pd.DataFrame({"k": np.arange(500), "a": np.random.rand(500)})

    def step():
        right = pd.DataFrame({"k": np.arange(500), "b": np.random.rand(500)})
        return left.merge(right, on="k").b.sum()

    return step


@calm
def frames_of_growing_then_constant_size():
    state = {"rows": 50}

    def step():
        state["rows"] = min(2000, state["rows"] + 10)
        state["frame"] = pd.DataFrame({"x": np.random.rand(state["rows"])})

    return step


@calm
def enums_looked_up():
    class Color(enum.Enum):
        RED = 1
        BLUE = 2

    return lambda: [Color(1 + number % 2) for number in range(50)] and None


@calm
def modules_reloaded():
    folder = scratch()
    (folder / "blind_module.py").write_text("table = list(range(2000))\n")
    sys.path.insert(0, str(folder))
    import importlib

    module = importlib.import_module("blind_module")
    return lambda: importlib.reload(module) and None


@calm
def code_compiled_and_run():
    count = itertools.count()

    def step():
        scope = {}
        exec(compile(f"def f(): return {next(count)}", "<made>", "exec"), scope)
        return scope["f"]()

    return step


@calm
def intern_of_few_names():
    return lambda: [sys.intern(f"name_{n % 40}") for n in range(100)] and None


@calm
def warnings_that_repeat():
    warnings.simplefilter("ignore")
    return lambda: [warnings.warn("same", stacklevel=1) for _ in range(10)] and None


@calm
def checkpoints_of_the_last_three():
    model, last = mlp(), collections.deque(maxlen=3)

    def step():
        last.append({k: v.clone() for k, v in model.state_dict().items()})

    return step


@calm
def averaging_of_gradients():
    model = mlp()
    sums = [torch.zeros_like(p) for p in model.parameters()]

    def step():
        model.zero_grad()
        model(torch.randn(32, 64)).mean().backward()
        for total, parameter in zip(sums, model.parameters(), strict=True):
            total.add_(parameter.grad)

    return step


@calm
def double_backward_with_grad():
    model = mlp()

    def step():
        x = torch.randn(16, 64, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        model.zero_grad()

    return step


@calm
def checkpointed_layers():
    model = mlp()

    def step():
        x = torch.randn(32, 64, requires_grad=True)
        torch.utils.checkpoint.checkpoint(
            model, x, use_reentrant=False
        ).sum().backward()

    return step


@calm
def namespaces_made():
    def step():
        return [types.SimpleNamespace(x=np.ones(100)) for _ in range(30)] and None

    return step


@calm
def files_listed():
    folder = scratch()
    for number in range(30):
        Path(folder, str(number)).write_bytes(b"x")

    return lambda: sorted(path.stat().st_size for path in folder.iterdir()) and None


@calm
def beam_search():
    def step():
        beams = [(0.0, [])]
        for _ in range(8):
            beams = [(s + random.random(), [*b, t]) for s, b in beams for t in range(5)]
            beams = sorted(beams, key=lambda beam: -beam[0])[:6]

    return step
