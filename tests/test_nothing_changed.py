"""Law: a call changes nothing of the caller's that it does not say it changes.

Neither where it succeeds, nor where code of the caller's fails in it or is interrupted.
"""

import gc
import itertools
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from code_of_caller import (
    COUNT,
    FAILURES,
    WIDTH,
    Code,
    Join,
    Model,
    Samples,
    outcome_of,
)
from fresh_process import in_fresh_process
from observed_state import changes, process_state, state_of

import loaderkit
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.train_step import Step
from loaderkit.cli.main import main

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB"


CALLS = {}
"""By name: a function of a folder and a failure, which gives what is the caller's, and
a call."""


def calls(*names):
    """Note a call under each of some names, which it is given."""

    def note(make):
        for name in names:
            CALLS[name] = make
        return make

    return note


@calls("adam", "cuda", "half", "measured", "fits")
def step_of_a_model(name, _folder, failure):
    model, rows = Model(failure), torch.rand(8, WIDTH)
    ways = {
        "adam": lambda: loaderkit.estimate_step(model, rows),
        "cuda": lambda: loaderkit.estimate_step(model, rows, target="cuda"),
        "half": lambda: loaderkit.estimate_step(model, rows, autocast="bfloat16"),
        "measured": lambda: measure_step(model, rows, Step(None)),
        "fits": lambda: loaderkit.assert_fits(model, rows, "1 GiB", device="cpu"),
    }
    return [model, rows], ways[name]


@calls("optimizer and loss")
def step_with_a_loss(_name, _folder, failure):
    model, rows, code = Model(), torch.rand(8, WIDTH), Code(failure)
    adam = torch.optim.AdamW(model.parameters())

    def loss(output):
        code.run()
        return output.mean()

    return [model, rows, adam, loss], lambda: loaderkit.estimate_step(
        model, rows, loss=loss, optimizer=adam
    )


@calls("plan of a list")
def plan(_name, _folder, failure):
    model, rows = Model(failure), list(torch.rand(COUNT, WIDTH))
    return [model, rows], lambda: loaderkit.plan_batch(
        model, rows, "cpu", limit="1 GiB", epochs=1, batch_size=4
    )


@calls("plan of a dataset")
def plan_of_dataset(_name, _folder, failure):
    # Reading the samples is what the plan does with it.
    model, dataset = Model(), Samples(failure)
    return [model, dataset.rows], lambda: loaderkit.plan_batch(
        model, dataset, "cpu", limit="1 GiB", epochs=1, batch_size=4
    )


@calls("text", "error", "environment", "memory", "release", "holders", "owned_copy")
def looks(name, _folder, _failure):
    nest = {"x": torch.rand(3), "y": [np.ones(3)]}
    error = torch.cuda.OutOfMemoryError(OUT_OF_MEMORY)
    ways = {
        "text": lambda: loaderkit.diagnose_oom(OUT_OF_MEMORY),
        "error": lambda: loaderkit.diagnose_oom(error),
        "environment": lambda: loaderkit.check_environment(ask_torch=True),
        "memory": loaderkit.read_memory,
        "release": loaderkit.release,
        "holders": lambda: loaderkit.holders_of(nest["x"]),
        "owned_copy": lambda: loaderkit.owned_copy(nest),
    }
    return [nest, error], ways[name]


@calls("staged", "oom_guard", "meter", "sampling meter")
def blocks(name, _folder, failure):
    model, code = Model(), Code(failure)
    managers = {
        "staged": lambda: loaderkit.staged("model", model),
        "oom_guard": loaderkit.oom_guard,
        "meter": lambda: loaderkit.MemoryMeter("cpu", log=None),
        "sampling meter": lambda: loaderkit.MemoryMeter("cpu", every_s=0.01, log=None),
    }

    def call():
        with managers[name]():
            if code.failure is not None:
                raise code.failure

    return [model], call


@calls("assert_no_leak", "run", "traced", "epochs", "with detector")
def detectors(name, _folder, failure):
    epochs = itertools.count()

    def epoch():
        if failure is not None and next(epochs) == 5:
            raise failure

    def loop():
        for _ in loaderkit.LeakDetector("cpu").epochs(range(8)):
            epoch()

    def with_detector():
        with loaderkit.LeakDetector("cpu") as detector:
            for _ in range(8):
                epoch()
                detector.end_epoch()

    ways = {
        "assert_no_leak": lambda: loaderkit.assert_no_leak(epoch, device="cpu"),
        "run": lambda: loaderkit.LeakDetector("cpu").run(epoch, epochs=8),
        "traced": lambda: loaderkit.LeakDetector("cpu").run(
            epoch, epochs=8, trace=True
        ),
        "epochs": loop,
        "with detector": with_detector,
    }
    return [], ways[name]


@calls("pack", "pack in processes", "pack a stream", "extend", "map", "map to a cache")
def packing(name, folder, failure):
    dataset, rows, join = Samples(failure), list(torch.rand(3, WIDTH)), Code(failure)

    def stream():
        for row in rows:
            join.run()
            yield row

    def double(row):
        join.run()
        return row * 2

    def packed():
        return loaderkit.pack(rows, folder / "rows.lk", workers=0)

    ways = {
        "pack": lambda: loaderkit.pack(dataset, folder / "new.lk", workers=0),
        "pack in processes": lambda: loaderkit.pack(
            dataset, folder / "new.lk", workers=2
        ),
        "pack a stream": lambda: loaderkit.pack(stream, folder / "new.lk"),
        "extend": lambda: loaderkit.extend(packed(), dataset, workers=0),
        "map": lambda: packed().map(double),
        "map to a cache": lambda: packed().map(double, cache=folder / "new.lk"),
    }
    # Here it is the dataset that is read; in processes it is their copies.
    is_read_here = name in {"pack", "extend"}
    return [rows, dataset.rows if is_read_here else dataset], ways[name]


@calls("concat", "verify", "inspect", "read rows", "split", "push and pull", "lacks")
def caches(name, folder, _failure):
    for part in ("a.lk", "b.lk"):
        loaderkit.pack(list(torch.rand(6, WIDTH)), folder / part, workers=0)
    paths, options = [str(folder / "a.lk"), str(folder / "b.lk")], {"auto_mkdir": True}
    numbers = [[1, 2], np.arange(3), torch.arange(3)]
    url = f"file://{folder}/store/a"
    dataset = loaderkit.open_cache(paths[0])
    # What is mapped stays mapped as long as the dataset.
    dataset[0]

    def push_and_pull():
        loaderkit.push(paths[0], url, storage_options=options)
        loaderkit.pull(url, folder / "c.lk", storage_options=options)

    ways = {
        "concat": lambda: loaderkit.concat(paths, folder / "c.lk"),
        "verify": lambda: loaderkit.verify(paths[0]),
        "inspect": lambda: loaderkit.inspect_cache(paths[0]),
        "read rows": lambda: [dataset[some] for some in numbers],
        "split": lambda: dataset.train_test_split(0.5, seed=0),
        "push and pull": push_and_pull,
        "lacks": lambda: loaderkit.open_cache(folder / "none.lk"),
    }
    return [paths, options, numbers], ways[name]


@calls("of a dataset", "of a list", "of a cache", "with workers", "unprobed")
def building(name, folder, failure):
    dataset, join = Samples(failure), Join(failure)
    rows, options = list(torch.rand(COUNT, WIDTH)), {"batch_size": 4, "shuffle": True}
    options |= {"seed": 0, "collate_fn": join}
    cache = loaderkit.pack(rows, folder / "rows.lk", workers=0)
    cache[0]
    ways = {
        "of a dataset": (dataset, {}),
        "of a list": (rows, {}),
        "of a cache": (cache, {}),
        "with workers": (dataset, {"num_workers": 2, "worker_init_fn": join}),
        "unprobed": (dataset, {"probe": False}),
    }
    data, more = ways[name]
    own = [dataset, rows, join, options]
    return own, lambda: loaderkit.build_loader(data, **options, **more)


@calls("doctor", "explain", "version", "verify in a shell", "wrong arguments")
def commands(name, folder, _failure):
    loaderkit.pack(list(torch.rand(3, WIDTH)), folder / "rows.lk", workers=0)
    arguments = {
        "doctor": ["doctor"],
        "explain": ["explain", OUT_OF_MEMORY],
        "version": ["--version"],
        "verify in a shell": ["verify", str(folder / "rows.lk"), "--json"],
        "wrong arguments": ["inspect"],
    }[name]
    return [arguments], lambda: main(arguments)


FAIL_NOWHERE = {looks, caches, commands}
CASES = [
    (name, ending)
    for name, make in CALLS.items()
    for ending in FAILURES
    if ending == "done" or make not in FAIL_NOWHERE
]


BEGUN = set()
"""Names of calls that this process has made: the first may import what stays."""


@pytest.mark.many_cases(quick=2)
@pytest.mark.usefixtures("own_folder_of_temporary_files")
@pytest.mark.parametrize(("name", "ending"), CASES)
def test_a_call_changes_nothing_that_it_does_not_say(name, ending, tmp_path):
    if name not in BEGUN:
        BEGUN.add(name)
        (tmp_path / "before").mkdir()
        _own, call = CALLS[name](name, tmp_path / "before", FAILURES["done"])
        outcome_of(call)

    assert changes_of(name, ending, tmp_path / "now") == []


def changes_of(name, ending, folder):
    folder.mkdir()
    own, call = CALLS[name](name, folder, FAILURES[ending])
    before = process_state(), state_of(own)
    # Until the second look: what it has given lives.
    result = outcome_of(call)
    after = process_state(), state_of(own)
    del result
    return [*changes(before[0], after[0]), *changes(before[1], after[1])]


def one_of_each_kind():
    model = Model()
    event, handle = threading.Event(), []
    yield "random: torch", lambda: torch.rand(1)
    yield "random: numpy", np.random.rand
    yield "random: python", random.random
    yield "default dtype", lambda: torch.set_default_dtype(torch.float64)
    yield "torch: grad", lambda: torch.set_grad_enabled(False)
    yield "deterministic", lambda: torch.use_deterministic_algorithms(True)
    yield "cudnn", lambda: setattr(torch.backends.cudnn, "benchmark", True)
    yield "warnings", lambda: warnings.simplefilter("ignore", SyntaxWarning)
    yield "logging", lambda: logging.getLogger().addHandler(logging.NullHandler())
    yield "sys.path", lambda: sys.path.append("/nowhere")
    yield "hooks", lambda: setattr(sys, "excepthook", print)
    yield "signals", lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    yield "collector", gc.disable
    yield "frozen objects", gc.freeze
    yield "tracemalloc", tracemalloc.start
    yield "environment", lambda: os.environ.update(OF_A_TEST="1")
    yield "files", lambda: handle.append(os.open(__file__, os.O_RDONLY))
    yield "threads", lambda: started(threading.Thread(target=event.wait, daemon=True))
    yield "temporary files", lambda: tempfile.mkdtemp()
    yield "training", model.eval
    yield "requires grad", lambda: model.first.requires_grad_(False)
    yield "gradient", lambda: model.first.weight.grad.zero_()
    yield "version", lambda: model.norm.running_mean.add_(0)
    yield "kept", lambda: model.kept.append(1)
    yield "generator", lambda: torch.rand(1, generator=model.generator)
    yield "numbers", model.numbers.random
    yield "_forward_hooks", lambda: model.drop.register_forward_hook(print)
    yield "own", lambda: (model, event)


def started(thread):
    thread.start()


@pytest.mark.slow
@in_fresh_process
def test_each_kind_of_change_is_seen():
    kinds = dict(one_of_each_kind())
    model, event = kinds.pop("own")()
    unseen = []
    for kind, change in kinds.items():
        before = process_state(), state_of(model)
        change()
        after = process_state(), state_of(model)
        seen = [*changes(before[0], after[0]), *changes(before[1], after[1])]
        if not any(kind in told for told in seen):
            unseen.append((kind, seen))
    event.set()

    assert unseen == []
