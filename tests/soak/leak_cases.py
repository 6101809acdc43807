"""A table of leaks and look-alikes that were written without looking at the detector.

Each is a function that returns a step; ten steps are an epoch. A line that makes memory
grow is marked with ``# grows``: that, or none, is the line a report may name.
"""

import array
import atexit
import bisect
import collections
import contextlib
import contextvars
import copy
import ctypes
import functools
import gc
import hashlib
import heapq
import inspect
import io
import itertools
import json
import logging
import logging.handlers
import math
import multiprocessing
import os
import queue
import random
import re
import sqlite3
import string
import tempfile
import threading
import time
import traceback
import types
import uuid
import weakref
import zlib
from dataclasses import dataclass, field
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


@dataclass(frozen=True)
class Case:
    make: object
    leaks: bool
    names: tuple = ()
    """Of which a named cause has one: the variable, or the resource."""


class CaseTable(dict[str, Case]):
    """Cases by name, which decorators put into it."""

    def leak(self, *names):
        """Make a decorator for a function that returns a leaking step."""

        def register(make):
            self[make.__name__] = Case(make, True, names)
            return make

        return register

    def lookalike(self, make):
        """Register a function whose step leaks nothing."""
        self[make.__name__] = Case(make, False)
        return make


CASES = CaseTable()
leak, calm = CASES.leak, CASES.lookalike


def scratch():
    return Path(tempfile.mkdtemp())


def mlp(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


GLOBAL_LOSSES = []
GLOBAL_TABLE = {}
GLOBAL_BUFFER = io.BytesIO()
GLOBAL_NUMBERS = array.array("d")
GLOBAL_BYTES = bytearray()
LOCAL = threading.local()
RECENT = contextvars.ContextVar("recent")


class Registered:
    """Whose subclasses and instances are kept by the class."""

    subclasses: list = []  # noqa: RUF012
    instances: dict = {}  # noqa: RUF012

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        Registered.subclasses.append(cls)  # grows


# ---- leaks: plain containers


@leak("GLOBAL_LOSSES")
def losses_in_a_global_list():
    model = mlp()
    return lambda: GLOBAL_LOSSES.append(model(torch.randn(64, 64)).mean())  # grows


@leak("GLOBAL_TABLE")
def rows_in_a_global_dict():
    count = itertools.count()

    def step():
        GLOBAL_TABLE[next(count)] = np.random.rand(1000)  # grows

    return step


@leak("results")
def results_of_a_class_attribute():
    class Trainer:
        results: list = []  # noqa: RUF012

        def step(self):
            self.results.append({"logits": torch.randn(1500), "step": 1})  # grows

    return lambda: Trainer().step()


@leak("instances")
def instances_in_a_registry():
    count = itertools.count()

    class Plugin:
        def __init__(self):
            self.weights = np.ones(1200)
            Registered.instances[next(count)] = self  # grows

    return Plugin


@leak("subclasses", "Registered")
def classes_in_a_registry():
    def step():
        for _ in range(4):
            type("Sample", (Registered,), {"pad": 1})

    return step


@leak("classes", "schemas")
def dataclasses_made_each_step():
    schemas = []

    def step():
        for _ in range(4):
            kind = type("Row", (), {"x": 1})
            schemas.append(kind)  # grows

    return step


@leak("best")
def a_heap_never_popped():
    best, count = [], itertools.count()
    return lambda: heapq.heappush(  # grows
        best, (random.random(), next(count), torch.randn(1500))
    )


@leak("ordered")
def insort_of_arrays():
    ordered, count = [], itertools.count()
    return lambda: bisect.insort(ordered, (next(count), b"x" * 6000))  # grows


@leak("pending")
def a_queue_nobody_reads():
    pending = queue.Queue()
    return lambda: pending.put(torch.randn(40, 40))  # grows


@leak("by_kind")
def a_defaultdict_of_lists():
    by_kind = collections.defaultdict(list)
    return lambda: by_kind[random.randrange(4)].append(np.zeros(1500))  # grows


@leak("seen")
def a_set_of_long_texts():
    seen = set()

    def step():
        seen.add("".join(random.choices(string.ascii_letters, k=6000)))  # grows

    return step


@leak("buffer")
def a_deque_without_maxlen():
    buffer = collections.deque()
    return lambda: buffer.appendleft(torch.zeros(1500))  # grows


@leak("tree")
def a_nested_dict():
    tree, count = {}, itertools.count()

    def step():
        number = next(count)
        branch = tree.setdefault(number % 5, {}).setdefault(number % 3, {})
        branch[number] = np.ones(1200)  # grows

    return step


@leak("head", "chain")
def a_linked_list():
    class Node:
        def __init__(self, following):
            self.following, self.payload = following, torch.randn(1500)

    chain = {"head": None}

    def step():
        chain["head"] = Node(chain["head"])  # grows

    return step


# ---- leaks: buffers of C


@leak("GLOBAL_BUFFER")
def a_bytes_io_in_a_module():
    return lambda: GLOBAL_BUFFER.write(os.urandom(8192))  # grows


@leak("text")
def a_string_io():
    text = io.StringIO()
    return lambda: text.write("loss 0.125\n" * 800)  # grows


@leak("GLOBAL_NUMBERS")
def an_array_of_numbers():
    return lambda: GLOBAL_NUMBERS.extend([0.5] * 1000)  # grows


@leak("GLOBAL_BYTES")
def a_bytearray():
    return lambda: GLOBAL_BYTES.extend(b"\0" * 8000)  # grows


@leak("packed")
def an_array_on_an_object():
    class Log:
        def __init__(self):
            self.packed = array.array("f")

        def add(self):
            self.packed.frombytes(bytes(8000))  # grows

    log = Log()
    return log.add


@leak("table")
def an_object_array_that_fills():
    table, count = np.empty(10_000, dtype=object), itertools.count()

    def step():
        table[next(count)] = np.ones(1200)  # grows

    return step


@leak("cells")
def an_object_array_of_tensors():
    class Store:
        def __init__(self):
            self.cells = np.full(10_000, None, dtype=object)
            self.used = 0

        def put(self):
            self.cells[self.used] = torch.randn(1500)  # grows
            self.used += 1

    return Store().put


@leak("archive")
def compressed_blobs_in_a_list():
    archive = []
    return lambda: archive.append(zlib.compress(os.urandom(6000)))  # grows


@leak("database", "native")
def sqlite_in_memory():
    database = sqlite3.connect(":memory:")
    database.execute("create table t (x blob)")

    def step():
        database.execute("insert into t values (?)", (os.urandom(8000),))  # grows
        database.commit()

    return step


@leak("hashers")
def digests_kept():
    hashers = []

    def step():
        hashers.extend(hashlib.sha256(os.urandom(8)) for _ in range(40))  # grows

    return step


@leak("native")
def a_ctypes_buffer_kept_by_c():
    def step():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(bytes(9000)))

    return step


# ---- leaks: functions, caches, weak references


@leak("encode", "lru_cache")
def an_unbounded_lru_cache():
    @functools.cache
    def encode(number):
        return np.full(1200, number)

    count = itertools.count()
    return lambda: encode(next(count))


@leak("normalise", "lru_cache")
def a_cache_of_a_static_method():
    class Tools:
        @staticmethod
        @functools.cache
        def normalise(text):
            return [text] * 800

    return lambda: Tools.normalise(uuid.uuid4().hex)


@leak("callbacks")
def partials_kept():
    callbacks = []

    def step():
        callbacks.append(functools.partial(print, torch.randn(1500)))  # grows

    return step


@leak("undo")
def lambdas_that_close_over_batches():
    undo = []

    def step():
        batch = torch.randn(1500)
        undo.append(lambda: batch.sum())  # grows

    return step


@leak("values", "alive")
def a_weak_value_dict_that_does_not_die():
    class Item:
        def __init__(self):
            self.weights = np.ones(1200)

    values, alive = weakref.WeakValueDictionary(), []

    def step():
        item = Item()
        values[len(alive)] = item
        alive.append(item)  # grows

    return step


@leak("weak", "models")
def a_weak_key_dict_whose_values_hold_the_keys():
    class Model:
        pass

    weak = weakref.WeakKeyDictionary()

    def step():
        model = Model()
        weak[model] = (model, torch.randn(1500))  # grows

    return step


@leak("waiting")
def generators_suspended():
    waiting = []

    def work():
        pad = np.ones(1200)
        yield
        yield pad

    def step():
        generator = work()
        next(generator)
        waiting.append(generator)  # grows

    return step


@leak("atexit")
def exit_handlers_of_methods():
    class Writer:
        def __init__(self):
            self.pad = torch.randn(1500)

        def close(self):
            return self.pad

    return lambda: atexit.register(Writer().close) and None


# ---- leaks: threads and contexts


@leak("LOCAL", "rows")
def rows_of_a_thread_local():
    LOCAL.rows = []
    return lambda: LOCAL.rows.append(np.ones(1200))  # grows


@leak("RECENT", "recent")
def a_context_variable_that_grows():
    RECENT.set([])
    return lambda: RECENT.get().append(torch.randn(1500))  # grows


@leak("thread")
def timers_that_wait():
    def step():
        timer = threading.Timer(10_000, print)
        timer.daemon = True
        timer.start()

    return step


@leak("locks", "events")
def events_kept():
    events = []

    def step():
        events.extend(threading.Event() for _ in range(20))  # grows

    return step


@leak("rows")
def a_list_of_a_running_thread():
    wake, done = queue.Queue(), queue.Queue()

    def work():
        rows = []
        while True:
            wake.get()
            rows.append(np.ones(1200))  # grows
            done.put(1)

    threading.Thread(target=work, daemon=True).start()

    def step():
        wake.put(1)
        done.get()

    return step


# ---- leaks: logging and exceptions


@leak("handlers")
def handlers_of_a_logger():
    logger = logging.getLogger("stranger.handlers")

    def step():
        for _ in range(5):
            logger.addHandler(logging.StreamHandler(io.StringIO()))  # grows

    return step


@leak("buffer")
def records_in_a_memory_handler():
    logger = logging.getLogger("stranger.memory")
    logger.propagate, logger.level = False, logging.INFO
    logger.addHandler(logging.handlers.MemoryHandler(10**9, flushLevel=100))
    return lambda: [logger.info("%s %d", "x" * 200, i) for i in range(10)] and None


@leak("loggerDict", "loggers", "manager")
def a_logger_for_each_sample():
    def step():
        for _ in range(10):
            logging.getLogger("stranger.sample." + uuid.uuid4().hex)

    return step


@leak("failures")
def exceptions_with_tracebacks():
    failures = []

    def risky():
        pad = np.ones(1200)
        raise ValueError(pad.sum())

    def step():
        try:
            risky()
        except ValueError as error:
            failures.append(error)  # grows

    return step


@leak("infos")
def tracebacks_kept():
    infos = []

    def step():
        try:
            pad = torch.randn(1500)
            raise KeyError(len(pad))
        except KeyError as error:
            infos.append(error.__traceback__)  # grows

    return step


@leak("contexts")
def chained_exceptions():
    contexts = {"last": None}

    def step():
        try:
            pad = np.ones(1200)
            raise RuntimeError(pad.size) from contexts["last"]
        except RuntimeError as error:
            contexts["last"] = error  # grows

    return step


# ---- leaks: torch


@leak("running", "total")
def a_running_loss_with_its_graph():
    model, running = mlp(), {"total": torch.zeros(())}

    def step():
        loss = model(torch.randn(64, 64)).square().mean()
        loss.backward(retain_graph=True)
        running["total"] = running["total"] + loss  # grows

    return step


@leak("hidden", "state")
def an_rnn_state_never_detached():
    cell, state = nn.GRUCell(16, 16), {"hidden": torch.zeros(8, 16)}

    def step():
        state["hidden"] = cell(torch.randn(8, 16), state["hidden"])  # grows

    return step


@leak("activations")
def activations_of_a_forward_hook():
    model, activations = mlp(), []
    model[0].register_forward_hook(lambda *parts: activations.append(parts[2]))  # grows
    return lambda: model(torch.randn(64, 64)).sum().backward()


@leak("_backward_hooks", "_forward_hooks", "hooks")
def hooks_registered_every_step():
    model = mlp()

    def step():
        pad = torch.randn(1500)
        model.register_forward_hook(lambda *_: pad.sum() and None)  # grows
        model(torch.randn(4, 64))

    return step


@leak("optimizer", "state")
def state_of_deleted_parameters():
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))])

    def step():
        head = nn.Parameter(torch.zeros(1500))
        optimizer.param_groups[0]["params"] = [head]
        head.grad = torch.ones(1500)
        optimizer.step()  # grows

    return step


@leak("snapshots")
def state_dicts_deep_copied():
    model, snapshots = mlp(), []
    return lambda: snapshots.append(copy.deepcopy(model.state_dict()))  # grows


@leak("scalars", "events")
def a_writer_that_never_flushes():
    class Writer:
        def __init__(self):
            self.events = collections.defaultdict(list)

        def add_histogram(self, tag, values):
            self.events[tag].append((time.time(), np.asarray(values)))  # grows

    writer, model = Writer(), mlp()
    return lambda: writer.add_histogram("weight", model[0].weight.detach().clone())


@leak("pairs")
def rows_of_a_large_tensor():
    pairs = []
    return lambda: pairs.append(torch.randn(3000, 2)[0])  # grows


@leak("parameters", "extra", "_parameters")
def parameters_registered_every_step():
    model, count = mlp(), itertools.count()
    return lambda: model.register_parameter(  # grows
        f"extra{next(count)}", nn.Parameter(torch.zeros(1500))
    )


@leak("blocks", "_modules")
def modules_added_every_step():
    blocks = nn.ModuleList()
    return lambda: blocks.append(nn.Linear(40, 40)) and None  # grows


@leak("iterators")
def loader_iterators_kept():
    loader = DataLoader(TensorDataset(torch.randn(400, 16)), 8, shuffle=True)
    iterators = []

    def step():
        iterator = iter(loader)
        next(iterator)
        iterators.append(iterator)  # grows

    return step


@leak("fake", "blocks", "allocations")
def a_counter_like_that_of_a_device():
    class FakeDevice:
        def __init__(self):
            self.allocations = {}

        def malloc(self, size):
            self.allocations[len(self.allocations)] = bytearray(size)  # grows

    device = FakeDevice()
    return lambda: device.malloc(8192)


@leak("cache")
def a_dataset_that_caches():
    class Samples(Dataset):
        def __init__(self):
            self.cache = {}

        def __len__(self):
            return 10**6

        def __getitem__(self, row):
            if row not in self.cache:
                self.cache[row] = torch.randn(1500)  # grows
            return self.cache[row]

    samples, count = Samples(), itertools.count()
    return lambda: samples[next(count)]


@leak("worker")
def caches_of_worker_processes():
    class Samples(Dataset):
        def __init__(self):
            self.cache = []

        def __len__(self):
            return 40

        def __getitem__(self, row):
            self.cache.append(torch.randn(5000))
            return row

    loader = DataLoader(Samples(), 4, num_workers=1, persistent_workers=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    return lambda: next(batches)


@leak("stranger_")
def shared_memory_never_unlinked():
    def step():
        segment = shared_memory.SharedMemory(
            f"stranger_{uuid.uuid4().hex}", create=True, size=16_384
        )
        segment.buf[0] = 1
        segment.close()
        from multiprocessing import resource_tracker

        resource_tracker.unregister(segment._name, "shared_memory")
        SEGMENTS.append(segment.name)

    return step


SEGMENTS = []
"""Names of what the case above leaves, for whoever cleans up."""


@leak("frames")
def pandas_frames_kept():
    frames = []
    return lambda: frames.append(pd.DataFrame({"x": np.random.rand(800)}))  # grows


@leak("frame")
def a_pandas_frame_that_is_joined():
    state = {"frame": pd.DataFrame({"x": np.zeros(1)})}

    def step():
        more = pd.DataFrame({"x": np.random.rand(800)})
        state["frame"] = pd.concat([state["frame"], more])  # grows

    return step


@leak("descriptors", "open files", "pipe")
def descriptors_duplicated():
    file = os.open(scratch() / "a", os.O_CREAT | os.O_RDWR)
    return lambda: os.dup(file) and None


@leak("compiled", "patterns")
def patterns_kept():
    compiled = []

    def step():
        patterns = [f"a{random.random()}(b|c)+" * 3 for _ in range(5)]
        compiled.extend(map(re.compile, patterns))  # grows

    return step


@leak("documents")
def parsed_json_kept():
    documents, text = {}, json.dumps([{"id": i, "v": [i] * 5} for i in range(20)])
    return lambda: documents.update({uuid.uuid4(): json.loads(text)})  # grows


# ---- look-alikes


@calm
def a_cache_of_a_hundred_rows():
    cache, count = {}, itertools.count()

    def step():
        row = next(count) % 100
        if row not in cache:
            cache[row] = torch.randn(4000)

    return step


@calm
def an_lru_cache_that_is_full_after_eight_epochs():
    count = itertools.count()

    @functools.lru_cache(maxsize=80)
    def load(row):
        return np.full(4000, row)

    return lambda: load(next(count))


@calm
def a_deque_with_maxlen():
    recent = collections.deque(maxlen=50)
    return lambda: recent.append(torch.randn(5000))


@calm
def an_ordered_dict_that_evicts():
    cache, count = collections.OrderedDict(), itertools.count()

    def step():
        cache[next(count)] = np.ones(3000)
        if len(cache) > 64:
            cache.popitem(last=False)

    return step


@calm
def adam_of_a_model():
    model = mlp(128)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randn(32, 128)).square().mean().backward()
        optimizer.step()

    return step


@calm
def first_epochs_import():
    names = ["fractions", "statistics", "difflib", "pdb", "imaplib", "mailbox"]
    count = itertools.count()

    def step():
        number = next(count)
        if number % 10 == 0 and number // 10 < len(names):
            __import__(names[number // 10])

    return step


@calm
def a_table_built_at_first_use():
    state, count = {}, itertools.count()

    def step():
        if next(count) == 55:
            state["table"] = np.random.rand(200_000)
        return state.get("table")

    return step


@calm
def tables_built_for_each_length():
    tables = {}

    def step():
        length = random.randrange(1, 16)
        if length not in tables:
            tables[length] = torch.randn(length, 5000)
        return tables[length]

    return step


@calm
def batches_of_growing_size_that_stop():
    count, model = itertools.count(), mlp()

    def step():
        rows = min(1500, 10 + 10 * next(count))
        model(torch.randn(rows, 64)).sum().backward()

    return step


@calm
def fragments_of_many_sizes():
    kept = [None] * 200

    def step():
        kept[random.randrange(200)] = bytes(random.randrange(100, 40_000))

    for row in range(200):
        kept[row] = bytes(random.randrange(100, 40_000))
    return step


@calm
def pieces_freed_in_another_order():
    def step():
        pieces = [bytes(random.randrange(64, 9000)) for _ in range(300)]
        random.shuffle(pieces)
        while pieces:
            pieces.pop()

    return step


@calm
def allocator_stairs():
    count, kept = itertools.count(), []

    def step():
        number = next(count)
        if number in {40, 80, 120}:
            kept.append(np.ones(150_000))

    return step


@calm
def another_process_in_dev_shm():
    program = (
        "import os, time\n"
        "for i in range(2000):\n"
        "    open(f'/dev/shm/stranger_{os.getpid()}_{i}', 'wb').write(b'x' * 9000)\n"
        "    time.sleep(.02)\n"
        "    if i > 40: os.unlink(f'/dev/shm/stranger_{os.getpid()}_{i - 40}')\n"
    )
    import subprocess
    import sys

    child = subprocess.Popen([sys.executable, "-S", "-c", program])
    SIDE_PROCESSES.append(child)

    def step():
        time.sleep(0.004)
        torch.randn(100, 100) @ torch.randn(100, 100)

    return step


SIDE_PROCESSES = []


@calm
def gradients_accumulated_over_eight():
    model, count = mlp(), itertools.count()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        model(torch.randn(16, 64)).mean().backward()
        if next(count) % 8 == 7:
            optimizer.step()
            optimizer.zero_grad()

    return step


@calm
def losses_cleared_every_third_epoch():
    losses, model = [], mlp()

    def step():
        losses.append(model(torch.randn(64, 64)).mean())
        if len(losses) == 30:
            losses.clear()

    return step


@calm
def a_history_of_floats():
    history, model = {"loss": [], "lr": []}, mlp()

    def step():
        history["loss"].append(model(torch.randn(8, 64)).mean().item())
        history["lr"].append(0.1)

    return step


@calm
def cycles_that_the_collector_frees():
    class Node:
        pass

    def step():
        for _ in range(30):
            node = Node()
            node.me, node.pad = node, [0] * 200

    return step


@calm
def exceptions_caught_and_dropped():
    def step():
        for _ in range(20):
            try:
                raise ValueError(np.ones(1000))
            except ValueError:
                traceback.format_exc()

    return step


@calm
def threads_that_end():
    def step():
        threads = [threading.Thread(target=np.ones, args=(1000,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return step


@calm
def files_that_are_closed():
    folder = scratch()

    def step():
        with (folder / "a.json").open("w") as file:
            json.dump(list(range(500)), file)
        return json.loads((folder / "a.json").read_text())

    return step


@calm
def a_memory_handler_that_flushes():
    logger = logging.getLogger("stranger.flushing")
    logger.propagate, logger.level = False, logging.INFO
    target = logging.NullHandler()
    logger.addHandler(logging.handlers.MemoryHandler(200, target=target))
    return lambda: [logger.info("x" * 200) for _ in range(10)] and None


@calm
def a_bytes_io_that_is_truncated():
    buffer, count = io.BytesIO(), itertools.count()

    def step():
        buffer.write(bytes(8000))
        if next(count) % 7 == 6:
            buffer.seek(0)
            buffer.truncate()

    return step


@calm
def sqlite_that_deletes():
    database = sqlite3.connect(":memory:")
    database.execute("create table t (n integer primary key, x blob)")
    count = itertools.count()

    def step():
        number = next(count)
        database.execute("insert into t values (?, ?)", (number, bytes(8000)))
        database.execute("delete from t where n < ?", (number - 30,))
        database.commit()

    return step


@calm
def patterns_in_the_cache_of_re():
    count = itertools.count()
    return lambda: [re.match(f"x{next(count)}(a|b)*", "x") for _ in range(4)] and None


@calm
def a_loader_without_workers():
    loader = DataLoader(TensorDataset(torch.randn(80, 16)), 8, shuffle=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    return lambda: next(batches)


@calm
def persistent_workers_that_keep_nothing():
    loader = DataLoader(
        TensorDataset(torch.randn(80, 1000)), 8, num_workers=1, persistent_workers=True
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    return lambda: next(batches)


@calm
def a_worker_that_caches_its_forty_rows():
    class Samples(Dataset):
        def __init__(self):
            self.cache = {}

        def __len__(self):
            return 40

        def __getitem__(self, row):
            return self.cache.setdefault(row, torch.randn(3000))

    loader = DataLoader(Samples(), 4, num_workers=1, persistent_workers=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    return lambda: next(batches)


@calm
def a_pool_that_is_closed():
    state = itertools.count()

    def step():
        if next(state) % 10 == 0:
            with multiprocessing.get_context("fork").Pool(1) as pool:
                pool.map(math.sqrt, range(10))

    return step


@calm
def shared_memory_unlinked():
    def step():
        segment = shared_memory.SharedMemory(create=True, size=65_536)
        segment.buf[:10] = bytes(10)
        segment.close()
        segment.unlink()

    return step


@calm
def pandas_groups():
    frame = pd.DataFrame({"k": np.arange(2000) % 7, "v": np.random.rand(2000)})
    return lambda: frame.groupby("k").v.mean().to_dict()


@calm
def ema_of_a_model():
    model = mlp()
    average = copy.deepcopy(model)

    def step():
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)

    return step


@calm
def checkpoint_to_memory_and_away():
    model = mlp()

    def step():
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)

    return step


@calm
def hooks_removed():
    model = mlp()

    def step():
        handle = model[0].register_forward_hook(lambda *_: None)
        model(torch.randn(16, 64))
        handle.remove()

    return step


@calm
def weak_values_that_die():
    class Item:
        def __init__(self):
            self.pad = np.ones(2000)

    values, count = weakref.WeakValueDictionary(), itertools.count()

    def step():
        item = Item()
        values[next(count)] = item

    return step


@calm
def a_top_ten():
    best, count = [], itertools.count()

    def step():
        entry = (random.random(), next(count), torch.randn(2000))
        if len(best) < 10:
            heapq.heappush(best, entry)
        else:
            heapq.heappushpop(best, entry)

    return step


@calm
def reservoir_sampling():
    reservoir, count = [], itertools.count(1)

    def step():
        number = next(count)
        if len(reservoir) < 60:
            reservoir.append(np.random.rand(2000))
        elif random.random() < 60 / number:
            reservoir[random.randrange(60)] = np.random.rand(2000)

    return step


@calm
def words_of_a_small_vocabulary():
    vocabulary = {}

    def step():
        for _ in range(50):
            word = "w" + str(int(random.paretovariate(1.0)) % 3000)
            vocabulary.setdefault(word, len(vocabulary))

    return step


@calm
def graphs_drawn_at_random():
    def step():
        nodes = random.randrange(10, 500)
        edges = torch.randint(nodes, (2, nodes * 4))
        x = torch.randn(nodes, 8)
        torch.zeros(nodes, 8).index_add_(0, edges[1], x[edges[0]])

    return step


@calm
def an_lstm_truncated():
    cell, state = nn.LSTMCell(16, 16), {"h": (torch.zeros(8, 16), torch.zeros(8, 16))}

    def step():
        h, c = cell(torch.randn(8, 16), state["h"])
        h.sum().backward()
        state["h"] = h.detach(), c.detach()

    return step


@calm
def learning_rates_of_a_scheduler():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    def step():
        model(torch.randn(8, 64)).mean().backward()
        optimizer.step()
        scheduler.step()

    return step


@calm
def validation_every_fifth_epoch():
    model, count = mlp(), itertools.count()

    def step():
        number = next(count)
        model(torch.randn(16, 64)).mean().backward()
        if number % 50 == 49:
            outputs = [model(torch.randn(256, 64)).detach() for _ in range(40)]
            torch.cat(outputs).mean()

    return step


@calm
def early_best_checkpoints():
    best, model = {"score": -1.0, "state": None}, mlp()

    def step():
        score = random.random()
        if score > best["score"]:
            best.update(score=score, state=copy.deepcopy(model.state_dict()))

    return step


@calm
def a_string_builder():
    def step():
        text = io.StringIO()
        for number in range(400):
            text.write(f"{number},")
        return text.getvalue()

    return step


@calm
def arrays_reused_in_place():
    buffer = np.zeros(40_000)

    def step():
        buffer[: random.randrange(40_000)] += 1

    return step


@calm
def generators_that_finish():
    def step():
        return sum(np.ones(100).sum() for _ in range(20))

    return step


@calm
def a_queue_that_is_read():
    pending = queue.Queue()

    def step():
        pending.put(np.ones(5000))
        if pending.qsize() > 8:
            pending.get()

    return step


@calm
def contexts_copied():
    def step():
        context = contextvars.copy_context()
        context.run(RECENT.set, [0] * 500)

    return step


@calm
def deep_copies_dropped():
    model = mlp()
    return lambda: copy.deepcopy(model) and None


@calm
def sorted_samples_of_varying_length():
    def step():
        texts = ["x" * random.randrange(5, 3000) for _ in range(64)]
        return max(map(len, sorted(texts, key=len)))

    return step


@calm
def sparse_products():
    def step():
        index = torch.randint(100, (2, 500))
        matrix = torch.sparse_coo_tensor(index, torch.ones(500), (100, 100))
        return torch.sparse.mm(matrix, torch.randn(100, 8)).sum()

    return step


@calm
def classes_made_and_dropped():
    def step():
        for _ in range(3):
            type("Temporary", (), {"x": 1})()

    return step


@calm
def modules_replaced():
    state = {}

    def step():
        state["head"] = nn.Linear(64, 64)
        state["head"](torch.randn(8, 64)).sum().backward()

    return step


@calm
def objects_inspected():
    def step():
        frame = inspect.currentframe()
        names = list(frame.f_locals)
        del frame
        return names

    return step


@calm
def weak_methods():
    class Bus:
        def __init__(self):
            self.listeners = weakref.WeakSet()

    class Listener:
        def __init__(self):
            self.pad = np.ones(2000)

    bus = Bus()

    def step():
        listener = Listener()
        bus.listeners.add(listener)

    return step


@calm
def temporary_folders():
    def step():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "a").write_bytes(bytes(1000))

    return step


@calm
def random_states_saved_and_set():
    def step():
        state = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.random()
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])

    return step


@calm
def stack_of_contexts():
    def step():
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.callback(np.ones, 500)

    return step


@calm
def a_buffer_that_doubles_until_full():
    state = {"buffer": np.zeros(64), "used": 0}

    def step():
        if state["used"] < 20_000:
            state["used"] += 250
            if state["used"] > len(state["buffer"]):
                wider = np.zeros(2 * state["used"])
                wider[: len(state["buffer"])] = state["buffer"]
                state["buffer"] = wider

    return step


@calm
def tensors_passed_through_numpy():
    def step():
        return torch.from_numpy(torch.randn(2000).numpy()).sum().item()

    return step


@calm
def garbage_in_frames():
    def step():
        frame = types.SimpleNamespace(pad=np.ones(500))
        frame.me = frame
        if gc.get_count()[0] < 0:
            frame.me = None

    return step


@calm
def fields_of_a_dataclass():
    @dataclass
    class Batch:
        x: torch.Tensor
        meta: dict = field(default_factory=dict)

    return lambda: Batch(torch.randn(2000), {"n": 1}) and None
