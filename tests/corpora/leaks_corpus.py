"""Ways to leak, and look-alikes, that people met; cases.py has those that came later.

Each case is a factory of a training step.  ``CASES`` says whether it leaks, what grows,
about how many bytes a step, and what a good report names.
"""

from __future__ import annotations

import collections
import functools
import gc
import mmap
import os
import socket
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    make: Callable[[], Step]
    leaks: bool
    grows: str  # "host" | "fd" | "thread" | "child" | "shm" | "nothing"
    bytes_per_step: int  # about; 0 when it does not leak or is not memory
    blame: str  # what a good report names
    source: str  # where people met it


CASES: dict[str, Case] = {}


def case(leaks: bool, grows: str, bytes_per_step: int, blame: str, source: str):
    def keep(make):
        CASES[make.__name__] = Case(make, leaks, grows, bytes_per_step, blame, source)
        return make

    return keep


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 16)
    )


# Leaks.
@case(
    True,
    "host",
    197_000,
    "a float accumulator keeps every step's autograd graph",
    "PyTorch FAQ 'My model reports OOM'; the post-mortem's loop",
)
def loss_accumulated_with_graph():
    net, state = model(), {"total": 0.0}

    def step():
        state["total"] = state["total"] + net(torch.randn(64, 256)).pow(2).mean()

    return step


@case(
    True,
    "host",
    1_048_000,
    "a list keeps predictions of 64 KiB (each also pins the freed MiB it was cut from)",
    "prediction lists in evaluation loops",
)
def predictions_appended():
    kept, net = [], model()

    def step():
        with torch.no_grad():
            kept.append(net(torch.randn(1024, 256)))

    return step


@case(
    True,
    "host",
    524_000,
    "forward hook stores activations",
    "feature-extraction threads",
)
def hook_keeps_activation():
    net, seen = model(), []
    net[0].register_forward_hook(lambda m, i, o: seen.append(o.detach()))
    return lambda: net(torch.randn(256, 256))


@case(
    True, "host", 263_000, "hooks registered in every step", "register_hook in the loop"
)
def hook_registered_every_step():
    net = model()

    def step():
        pad = torch.randn(256, 256)
        net[0].register_forward_pre_hook(lambda m, i, pad=pad: None)
        net(torch.randn(4, 256))

    return step


@case(
    True,
    "host",
    102_400,
    "lru_cache without bound on a method keyed by floats",
    "functools.lru_cache threads",
)
def unbounded_cache():
    @functools.cache
    def make(key):
        return torch.full((160, 160), key)

    state = {"i": 0}

    def step():
        state["i"] += 1
        return make(float(state["i"]))

    return step


@case(
    True,
    "host",
    400_000,
    "a slice keeps the storage of the whole batch",
    "torch view/storage threads",
)
def small_view_of_large_storage():
    kept = []
    return lambda: kept.append(torch.randn(100_000)[:2])


@case(
    True,
    "host",
    200_000,
    "exceptions kept with their traceback frames",
    "Python traceback reference threads",
)
def exceptions_kept():
    kept = []

    def work():
        big = torch.randn(50_000)  # noqa: F841 -- the frame of the error keeps it
        msg = "bad sample"
        raise ValueError(msg)

    def step():
        try:
            work()
        except ValueError as e:
            kept.append(e)

    return step


@case(
    True, "host", 80_000, "closures in a callback list", "Lightning/HF callback threads"
)
def closures_kept():
    callbacks = []

    def step():
        x = torch.randn(20_000)
        callbacks.append(lambda: x.sum())

    return step


@case(
    True,
    "host",
    131_072,
    "attribute of the dataset grows (InMemoryDataset-like cache)",
    "PyG InMemoryDataset._data_list",
)
def dataset_fills_private_cache():
    class Data(torch.utils.data.Dataset):
        def __init__(self):
            self.cache = {}

        def __len__(self):
            return 1 << 30

        def __getitem__(self, i):
            return self.cache.setdefault(i, torch.full((128, 256), float(i)))

    data, state = Data(), {"i": 0}

    def step():
        state["i"] += 1
        return data[state["i"]]

    return step


@case(
    True,
    "host",
    40_000,
    "reference cycle with __del__-less gc disabled",
    "gc.disable() in training scripts",
)
def cycles_with_gc_off():
    gc.disable()

    class Node:
        pass

    def step():
        n = Node()
        n.me = n
        n.payload = torch.randn(10_000)

    return step


@case(
    True,
    "host",
    197_000,
    "defaultdict metrics history of tensors",
    "metric logger threads",
)
def metric_history_of_tensors():
    history, net = collections.defaultdict(list), model()

    def step():
        y = net(torch.randn(64, 256))
        history["loss"].append(y.mean())
        history["y"].append(y)

    return step


@case(
    True,
    "host",
    80_000,
    "thread-local buffers of threads that never end",
    "worker thread threads",
)
def threads_never_end():
    stop = threading.Event()

    def step():
        pad = np.ones(10_000)
        t = threading.Thread(target=lambda pad=pad: stop.wait(), daemon=True)
        t.start()

    return step


@case(True, "fd", 0, "file handles", "h5py/PIL 'too many open files'")
def files_never_closed():
    kept, name = [], tempfile.mkstemp()[1]
    return lambda: kept.append(Path(name).open("rb"))


@case(True, "fd", 0, "sockets", "queue and logger threads")
def sockets_never_closed():
    kept = []
    return lambda: kept.extend(socket.socketpair())


@case(
    True,
    "shm",
    400_000,
    "shared-memory tensors kept (list of worker batches)",
    "pytorch #973, #11201",
)
def shared_tensors_kept():
    kept = []
    return lambda: kept.append(torch.randn(100_000).share_memory_())


@case(
    True,
    "shm",
    65_536,
    "anonymous shared mmaps never unmapped",
    "native buffers without Python payload",
)
def mmaps_kept():
    kept = []

    def step():
        m = mmap.mmap(-1, 65_536)
        m.write(b"x" * 65_536)
        kept.append(m)

    return step


@case(
    True,
    "host",
    100_000,
    "native memory with no Python object (malloc never freed)",
    "C extension leaks",
)
def native_malloc():
    import ctypes

    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]

    def step():
        p = libc.malloc(100_000)
        ctypes.memset(p, 1, 100_000)

    return step


@case(True, "host", 4_096, "slow leak: one page a step", "slow leaks over days")
def slow_leak():
    kept = []
    return lambda: kept.append(bytearray(os.urandom(4_096)))


@case(
    True,
    "host",
    40_000,
    "optimizer made anew each step and kept by its hook handles",
    "optimizer re-creation threads",
)
def parameters_added_to_optimizer():
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return lambda: opt.add_param_group(
        {"params": [torch.nn.Parameter(torch.randn(10_000))]}
    )


@case(
    True,
    "host",
    80_000,
    "weakref callbacks and a registry keyed by id",
    "registry threads",
)
def registry_by_id():
    registry = {}

    def step():
        x = torch.randn(20_000)
        registry[len(registry)] = (x, weakref.ref(x))

    return step


@case(
    True,
    "child",
    0,
    "worker processes of iterators never finished",
    "persistent_workers + break",
)
def children_never_joined():
    import subprocess

    kept = []
    return lambda: kept.append(
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    )


# Look-alikes: they grow for a while, or look as if they did, and are no leak.
@case(
    False,
    "nothing",
    0,
    "warm-up",
    "first steps allocate gradients, buffers and kernels",
)
def training_with_adam():
    net = model()
    opt = torch.optim.Adam(net.parameters())

    def step():
        opt.zero_grad()
        net(torch.randn(512, 256)).pow(2).mean().backward()
        opt.step()

    return step


@case(False, "nothing", 0, "bounded cache fills, then stays", "lru_cache(maxsize)")
def bounded_cache_fills():
    @functools.lru_cache(maxsize=40)
    def make(key):
        return torch.full((25_000,), key)

    state = {"i": 0}

    def step():
        state["i"] += 1
        return make(float(state["i"] % 60))

    return step


@case(False, "nothing", 0, "page cache of a mapped file", "huggingface/datasets #4883")
def reading_a_mapped_file():
    with tempfile.TemporaryFile() as file:
        file.truncate(256 << 20)
        a, rng = np.memmap(file, mode="r", dtype="u1"), np.random.default_rng(0)
    return lambda: int(a[rng.integers(0, a.size, 2_000)].sum())


@case(False, "nothing", 0, "batch sizes vary", "dynamic batching")
def varying_batches():
    net, rng = model(), np.random.default_rng(0)
    return lambda: net(torch.randn(int(rng.integers(1, 2_000)), 256)).sum().backward()


@case(
    False,
    "nothing",
    0,
    "one late jump: a module imported in the 60th step",
    "lazy imports",
)
def late_import():
    state = {"i": 0}

    def step():
        state["i"] += 1
        if state["i"] == 60:
            state["pad"] = torch.randn(2_000_000)

    return step


@case(False, "nothing", 0, "ring buffer", "replay buffers")
def ring_buffer_fills():
    ring = collections.deque(maxlen=100)
    return lambda: ring.append(torch.randn(20_000))


@case(
    False,
    "nothing",
    0,
    "cycles freed by the collector now and then: a saw",
    "gc generations",
)
def cycles_with_gc_on():
    class Node:
        pass

    def step():
        for _ in range(30):
            n = Node()
            n.me = n
            n.payload = torch.randn(1_000)

    return step


@case(
    False,
    "nothing",
    0,
    "malloc arenas and fragmentation under many sizes",
    "glibc arenas",
)
def fragmentation_plateau():
    rng, kept = np.random.default_rng(0), collections.deque(maxlen=200)
    return lambda: kept.append(bytearray(int(rng.integers(100, 60_000))))


@case(
    False,
    "nothing",
    0,
    "Python lists touched in a loop (reference counts)",
    "pytorch #13246 in one process",
)
def list_of_strings_read():
    data = [f"sample-{i}" for i in range(50_000)]
    return lambda: sum(len(s) for s in data)


@case(False, "nothing", 0, "statistics kept as Python floats", "loss.item() history")
def float_history():
    history, net = [], model()

    def step():
        history.append(net(torch.randn(64, 256)).mean().item())

    return step


@case(False, "nothing", 0, "threads that end", "thread pools")
def short_threads():
    def step():
        t = threading.Thread(target=lambda: np.ones(10_000))
        t.start()
        t.join()

    return step


@case(
    False, "nothing", 0, "a schedule that doubles the batch once", "batch-size warm-up"
)
def batch_doubles_once():
    net, state = model(), {"i": 0}

    def step():
        state["i"] += 1
        net(torch.randn(1_000 if state["i"] < 100 else 2_000, 256)).sum().backward()

    return step
