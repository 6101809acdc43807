"""A third table, of registries, wrappers and libraries; written blind, and run once.

As in ``leak_cases``; nothing of the detector was changed between writing and running.
"""

import argparse
import asyncio
import bisect
import codecs
import collections
import configparser
import contextlib
import contextvars
import copy
import copyreg
import dataclasses
import decimal
import email.message
import functools
import gc
import heapq
import io
import itertools
import linecache
import logging
import operator
import os
import queue
import random
import re
import string
import sys
import tempfile
import threading
import tracemalloc
import types
import uuid
import warnings
import weakref
import xml.dom.minidom
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import torch
from leak_cases import CaseTable, mlp, scratch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASES = CaseTable()
leak, calm = CASES.leak, CASES.lookalike


# ---- leaks


@leak("collect_rows", "seen")
def a_mutable_default():
    def collect_rows(row, seen=[]):  # noqa: B006
        seen.append(row)  # grows
        return len(seen)

    return lambda: collect_rows(torch.randn(1500))


@leak("measure", "calls")
def an_attribute_of_a_function():
    def measure():
        measure.calls.append(np.random.rand(1000))  # grows

    measure.calls = []
    return measure


@leak("stack", "callbacks")
def an_exit_stack_never_closed():
    stack = contextlib.ExitStack()
    return lambda: stack.callback(print, np.ones(1200)) and None  # grows


@leak("describe", "registry")
def types_registered_for_dispatch():
    @functools.singledispatch
    def describe(_):
        return 0

    def step():
        for _ in range(4):
            kind = type("Row", (), {"pad": bytes(3000)})
            describe.register(kind, lambda _: 1)  # grows

    return step


@leak("modules")
def modules_put_into_sys():
    count = itertools.count()

    def step():
        module = types.ModuleType(f"third_{next(count)}")
        module.table = list(range(2000))
        sys.modules[module.__name__] = module  # grows

    return step


@leak("cache")
def lines_of_code_that_is_made():
    count = itertools.count()

    def step():
        name = f"<third {next(count)}>"
        lines = ["x = 1\n" + "#" * 200] * 1
        text = "y" * 8000 + name
        linecache.cache[name] = (len(text), None, [*lines, text], name)  # grows

    return step


@leak("filters")
def filters_of_warnings():
    def step():
        for _ in range(4):
            pattern = re.compile(re.escape(uuid.uuid4().hex * 20))
            warnings.filters.append(("ignore", pattern, UserWarning, None, 0))  # grows

    return step


@leak("callbacks")
def callbacks_of_the_collector():
    def step():
        pad = np.ones(1200)
        gc.callbacks.append(lambda *_: pad is None)  # grows

    return step


@leak("path")
def folders_added_to_sys_path():
    return lambda: sys.path.append("/nowhere/" + uuid.uuid4().hex * 200)  # grows


@leak("dispatch_table")
def reducers_registered():
    def step():
        kind = type("Packed", (), {"pad": bytes(4000)})
        copyreg.pickle(kind, operator.attrgetter("pad"))  # grows

    return step


@leak("first", "second", "pairs", "tee", "native")
def one_side_of_a_tee():
    first, second = itertools.tee(np.ones(1000) * n for n in itertools.count())
    return lambda: next(first) is second


@leak("items", "history")
def a_user_list():
    history = collections.UserList()
    return lambda: history.append(torch.randn(1500))  # grows


@leak("log", "recent")
def a_deque_filled_from_the_left():
    recent = collections.deque()
    return lambda: recent.appendleft({"row": np.random.rand(1000)})  # grows


@leak("scores", "best")
def sorted_pairs_never_cut():
    best = []

    def step():
        pair = (random.random(), len(best), torch.randn(1500))
        bisect.insort(best, pair)  # grows

    return step


@leak("parser", "_actions", "_option_string_actions")
def arguments_added_every_step():
    parser, count = argparse.ArgumentParser(), itertools.count()

    def step():
        for _ in range(4):
            name = f"--option-{next(count)}"
            parser.add_argument(name, default=[0] * 200, help=name * 20)  # grows

    return step


@leak("config", "_sections", "_proxies")
def sections_of_a_configuration():
    config, count = configparser.ConfigParser(), itertools.count()

    def step():
        section = f"s{next(count)}"
        config[section] = {f"key{k}": f"{section}{k}" * 20 for k in range(20)}  # grows

    return step


@leak("message", "_headers")
def headers_of_a_message():
    message = email.message.Message()
    return lambda: message.add_header("X-Row", uuid.uuid4().hex * 150)  # grows


@leak("root", "document", "childNodes")
def nodes_of_a_document():
    document = xml.dom.minidom.Document()
    root = document.appendChild(document.createElement("rows"))

    def step():
        for _ in range(20):
            root.appendChild(document.createElement("row"))  # grows

    return step


@leak("archive", "filelist", "NameToInfo", "buffer")
def a_zip_in_memory():
    buffer, count = io.BytesIO(), itertools.count()
    archive = zipfile.ZipFile(buffer, "w")
    return lambda: archive.writestr(f"{next(count)}.bin", os.urandom(6000))


@leak("folders")
def temporary_folders_kept():
    folders = []

    def step():
        folders.append((tempfile.TemporaryDirectory(), np.ones(1000)))  # grows

    return step


@leak("waiting", "tasks", "events")
def events_that_nobody_sets():
    loop, waiting = asyncio.new_event_loop(), []

    async def wait(event, pad):
        await event.wait()
        return pad

    def step():
        event = asyncio.Event()
        task = loop.create_task(wait(event, np.ones(1000)))
        waiting.append((event, task))  # grows
        loop.run_until_complete(asyncio.sleep(0))

    return step


@leak("streams")
def async_generators_left_open():
    loop, streams = asyncio.new_event_loop(), []

    async def rows():
        pad = np.ones(1200)
        while True:
            yield pad

    def step():
        stream = rows()
        loop.run_until_complete(stream.__anext__())
        streams.append(stream)  # grows

    return step


@leak("contexts")
def contexts_kept():
    variable, contexts = contextvars.ContextVar("row"), []

    def step():
        context = contextvars.copy_context()
        context.run(variable.set, np.ones(1200))
        contexts.append(context)  # grows

    return step


@leak("methods", "bound")
def bound_methods_of_samples():
    class Sample:
        def __init__(self):
            self.pad = np.ones(1200)

        def load(self):
            return self.pad

    bound = set()
    return lambda: bound.add(Sample().load)  # grows


@leak("getters", "properties")
def classes_with_properties():
    getters = {}

    def step():
        pad = np.ones(1200)
        name = f"field{len(getters)}"
        getters[name] = property(lambda _, pad=pad: pad)  # grows

    return step


@leak("proxies", "alive")
def proxies_with_what_they_stand_for():
    class Row:
        def __init__(self):
            self.pad = np.ones(1200)

    alive = []

    def step():
        row = Row()
        alive.append((weakref.proxy(row), row))  # grows

    return step


@leak("views")
def reversed_views_of_arrays():
    views = []
    return lambda: views.append(np.random.rand(1200)[::-1])  # grows


@leak("masked")
def masked_arrays():
    masked = []

    def step():
        masked.append(np.ma.masked_less(np.random.rand(800), 0.5))  # grows

    return step


@leak("records")
def structured_rows():
    records = []
    dtype = [("x", "f8"), ("name", "U20")]
    return lambda: records.append(np.zeros(100, dtype=dtype))  # grows


@leak("index", "state")
def an_index_of_pandas_that_grows():
    state = {"index": pd.Index([], dtype=float)}

    def step():
        more = pd.Index(np.random.rand(1000))
        state["index"] = state["index"].append(more)  # grows

    return step


@leak("groups", "kept")
def groups_of_one_h5_file():
    file = h5py.File(scratch() / "third.h5", "w")
    file.create_group("g")
    kept = []

    def step():
        kept.extend((file["g"], bytes(1200)) for _ in range(5))  # grows

    return step


@leak("nested")
def jagged_tensors():
    nested = []

    def step():
        parts = [torch.randn(n, 8) for n in (40, 60, 90)]
        nested.append(torch.nested.nested_tensor(parts, layout=torch.jagged))  # grows

    return step


@leak("adjacency")
def sparse_matrices():
    adjacency = {}

    def step():
        index = torch.randint(100, (2, 400))
        matrix = torch.sparse_coo_tensor(index, torch.ones(400), (100, 100))
        adjacency[len(adjacency)] = matrix  # grows

    return step


@leak("spectra")
def complex_results():
    spectra = []
    return lambda: spectra.append(torch.fft.rfft(torch.randn(1500)))  # grows


@leak("layers", "_modules")
def a_module_dict_that_grows():
    layers = nn.ModuleDict()
    return lambda: layers.add_module(f"l{len(layers)}", nn.Linear(40, 40))  # grows


@leak("prompts", "_parameters")
def a_parameter_list_that_grows():
    prompts = nn.ParameterList()
    return lambda: prompts.append(nn.Parameter(torch.randn(1500))) and None  # grows


@leak("handles")
def handles_with_their_modules():
    handles = []

    def step():
        model = nn.Linear(40, 40)
        handle = model.register_forward_hook(lambda *_: None)
        handles.append((handle, model))  # grows

    return step


@leak("traced", "graphs")
def graphs_of_fx():
    graphs = []
    return lambda: graphs.append(torch.fx.symbolic_trace(nn.Linear(30, 30)))  # grows


@leak("momenta", "history")
def states_of_an_optimizer_copied():
    model, history = mlp(), []
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        history.append(copy.deepcopy(optimizer.state_dict()))  # grows

    return step


@leak("generators")
def generators_of_random_numbers():
    generators = []
    return lambda: generators.append(torch.Generator().manual_seed(1))  # grows


@leak("states")
def states_of_random_numbers():
    states = []
    return lambda: states.append((random.getstate(), torch.get_rng_state()))  # grows


@leak("targets", "ground_truth")
def validation_targets_of_every_epoch():
    class Evaluation:
        def __init__(self):
            self.ground_truth = collections.defaultdict(list)

        def update(self, key):
            self.ground_truth[key].append(torch.randint(9, (900,)))  # grows

    evaluation, count = Evaluation(), itertools.count()
    return lambda: evaluation.update(next(count) % 7)


@leak("worker")
def a_worker_whose_transform_keeps():
    class Jitter:
        def __init__(self):
            self.drawn = []

        def __call__(self, x):
            self.drawn.append(np.random.rand(4000))
            return x

    class Rows(Dataset):
        def __init__(self):
            self.transform = Jitter()

        def __len__(self):
            return 10

        def __getitem__(self, row):
            return self.transform(torch.ones(4) * row)

    loader = DataLoader(Rows(), 1, num_workers=1, persistent_workers=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    return lambda: next(batches)


@leak("threads", "threading", "rooms")
def a_local_of_many_threads():
    rooms = []
    stop = threading.Event()

    def work(pad):
        local = threading.local()
        local.pad = pad
        stop.wait()

    def step():
        thread = threading.Thread(target=work, args=(np.ones(900),), daemon=True)
        thread.start()
        rooms.append(thread)  # grows

    return step


@leak("queues", "inbox")
def a_priority_queue():
    inbox = queue.PriorityQueue()
    return lambda: inbox.put((random.random(), uuid.uuid4().hex, [0.5] * 900))


@leak("snapshots")
def snapshots_of_counters():
    snapshots = []

    def step():
        words = collections.Counter(random.randrange(400) for _ in range(400))
        snapshots.append(words)  # grows

    return step


@leak("decimals", "totals")
def numbers_of_many_digits():
    totals = []

    def step():
        with decimal.localcontext() as context:
            context.prec = 8000
            totals.append(decimal.Decimal(1) / decimal.Decimal(7))  # grows

    return step


# ---- look-alikes


@calm
def a_default_that_is_cleared():
    def collect_rows(row, seen=[]):  # noqa: B006
        seen.append(row)
        if len(seen) > 40:
            seen.clear()

    return lambda: collect_rows(torch.randn(2000))


@calm
def exit_stacks_closed():
    def step():
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.callback(len, np.ones(200))

    return step


@calm
def modules_put_into_sys_and_out():
    def step():
        module = types.ModuleType("third_gone")
        module.table = list(range(2000))
        sys.modules[module.__name__] = module
        del sys.modules[module.__name__]

    return step


@calm
def a_tee_read_on_both_sides():
    first, second = itertools.tee(np.ones(1000) * n for n in itertools.count())

    def step():
        next(first)
        next(second)

    return step


@calm
def a_tee_that_lags():
    first, second = itertools.tee(np.ones(1000) * n for n in itertools.count())
    count = itertools.count()

    def step():
        next(first)
        if next(count) > 55:
            next(second)

    return step


@calm
def a_heap_of_the_fifty_best():
    best = []

    def step():
        pair = (random.random(), uuid.uuid4().hex, torch.randn(1500))
        if len(best) < 50:
            heapq.heappush(best, pair)
        else:
            heapq.heapreplace(best, pair)

    return step


@calm
def a_configuration_read_anew():
    text = "\n".join(f"[s{n}]\nkey = {n}" for n in range(30))

    def step():
        config = configparser.ConfigParser()
        config.read_string(text)

    return step


@calm
def documents_unlinked():
    def step():
        document = xml.dom.minidom.parseString("<a>" + "<b>1</b>" * 60 + "</a>")
        document.unlink()

    return step


@calm
def documents_that_are_cycles():
    text = "<a>" + "<b>1</b>" * 60 + "</a>"
    return lambda: xml.dom.minidom.parseString(text) and None


@calm
def zips_closed():
    def step():
        with zipfile.ZipFile(io.BytesIO(), "w") as archive:
            archive.writestr("a", os.urandom(5000))

    return step


@calm
def async_generators_closed():
    loop = asyncio.new_event_loop()

    async def rows():
        for number in range(10):
            yield np.ones(200) * number

    async def read():
        async for _ in rows():
            pass

    return lambda: loop.run_until_complete(read())


@calm
def contexts_run_and_dropped():
    variable = contextvars.ContextVar("calm_row")

    def step():
        contextvars.copy_context().run(variable.set, np.ones(1200))

    return step


@calm
def bound_methods_of_few():
    class Sample:
        def load(self):
            return self

    samples = [Sample() for _ in range(20)]
    bound = {}

    def step():
        for number, sample in enumerate(samples):
            bound[number] = sample.load

    return step


@calm
def a_weak_set_of_rows():
    class Row:
        def __init__(self):
            self.pad = np.ones(1200)

    rows = weakref.WeakSet()
    return lambda: rows.add(Row())


@calm
def masked_means():
    return lambda: np.ma.masked_less(np.random.rand(5000), 0.5).mean() and None


@calm
def one_h5_dataset_read():
    file = h5py.File(scratch() / "calm.h5", "w")
    file["x"] = np.random.rand(2000, 10)

    def step():
        for _ in range(20):
            row = random.randrange(1900)
            file["x"][row : row + 50].sum()

    return step


@calm
def jagged_batches():
    def step():
        sizes = [random.randrange(1, 90) for _ in range(4)]
        parts = [torch.randn(n, 8) for n in sizes]
        torch.nested.nested_tensor(parts, layout=torch.jagged).values().sum()

    return step


@calm
def spectra_of_any_length():
    return lambda: torch.fft.rfft(torch.randn(random.randrange(10, 3000))).abs().sum()


@calm
def modules_traced_and_dropped():
    return lambda: torch.fx.symbolic_trace(nn.Linear(30, 30)) and None


@calm
def optimizers_made_anew():
    model = mlp()

    def step():
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@calm
def a_state_kept_for_going_back():
    model, state = mlp(), {"best": None}

    def step():
        if random.random() < 0.3:
            state["best"] = copy.deepcopy(model.state_dict())

    return step


@calm
def a_running_mean_and_variance():
    layer = nn.BatchNorm1d(64)
    return lambda: layer(torch.randn(32, 64)).sum().backward()


@calm
def labels_of_one_epoch():
    targets, count = [], itertools.count()

    def step():
        targets.append(torch.randint(9, (900,)))
        if next(count) % 10 == 9:
            torch.cat(targets)
            targets.clear()

    return step


@calm
def loaders_with_fresh_workers():
    class Rows(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, row):
            return torch.ones(100) * row

    loader = DataLoader(Rows(), 4, num_workers=1)
    count = itertools.count()

    def step():
        if next(count) % 10 == 0:
            for _ in loader:
                pass

    return step


@calm
def counters_of_words():
    words = collections.Counter()
    return lambda: words.update(random.randrange(500) for _ in range(400))


@calm
def numbers_of_many_digits_dropped():
    def step():
        with decimal.localcontext() as context:
            context.prec = 5000
            return decimal.Decimal(1) / decimal.Decimal(7) and None

    return step


@calm
def templates_filled():
    template = string.Template("$a and $b " * 50)
    return lambda: template.substitute(a=random.random(), b="x" * 100) and None


@calm
def threads_with_locals_that_end():
    local = threading.local()

    def work():
        local.pad = np.ones(2000)

    def step():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    return step


@calm
def dataclasses_replaced():
    @dataclasses.dataclass(frozen=True)
    class State:
        step: int = 0
        pad: tuple = ()

    kept = {"state": State()}

    def step():
        now = kept["state"].step + 1
        kept["state"] = dataclasses.replace(
            kept["state"], step=now, pad=tuple(range(now % 500))
        )

    return step


@calm
def encoders_looked_up():
    def step():
        for name in ("utf-8", "latin-1", "utf-16", "cp1252"):
            codecs.lookup(name)
            ("row " * 200).encode(name)

    return step


@calm
def environment_set_and_unset():
    def step():
        os.environ["THIRD_ROW"] = "x" * 3000
        del os.environ["THIRD_ROW"]

    return step


@calm
def environment_overwritten():
    count = itertools.count()

    def step():
        os.environ["THIRD_STEP"] = str(next(count)) * 3

    return step


@calm
def a_logger_with_filters_removed():
    logger = logging.getLogger("third.calm")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())

    def step():
        kept = logging.Filter("x")
        logger.addFilter(kept)
        logger.warning("row")
        logger.removeFilter(kept)

    return step


@calm
def a_trace_started_and_stopped():
    def step():
        tracemalloc.start()
        [0] * 1000  # noqa: B018
        tracemalloc.stop()

    return step


@calm
def a_cache_that_doubles_and_halves():
    cache, state = {}, {"most": 40, "key": 0}

    def step():
        state["key"] += 1
        cache[state["key"]] = np.ones(1500)
        while len(cache) > state["most"]:
            del cache[next(iter(cache))]
        state["most"] = 40 if random.random() < 0.5 else 60

    return step


@calm
def a_history_that_is_thinned():
    history = []

    def step():
        history.append(torch.randn(1000))
        if len(history) > 64:
            del history[::2]

    return step


@calm
def losses_as_floats_by_name():
    losses = collections.defaultdict(list)
    model = mlp()

    def step():
        loss = model(torch.randn(16, 64)).mean()
        losses["train"].append(loss.item())
        losses["rate"].append(0.1)

    return step


@calm
def paths_resolved():
    folder = scratch()
    return lambda: [Path(folder, str(n)).resolve() for n in range(40)] and None


@calm
def kernels_of_a_few_shapes():
    # Of 380 lengths oneDNN goes on making kernels for more than 30 epochs, and keeps
    # them: called a leak, see "What it cannot see" in docs/leaks.md.
    layer = nn.Conv1d(4, 8, 3)

    def step():
        layer(torch.randn(2, 4, 20 * random.randrange(1, 9))).sum().backward()

    return step


@calm
def results_of_a_process_pool_read():
    count = itertools.count()
    rows = {}

    def step():
        number = next(count) % 30
        rows[number] = [random.random() for _ in range(500)]

    return step
