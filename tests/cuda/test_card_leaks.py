"""Leaks of a GPU's memory, and what only looks like one."""

import ctypes
import random

import pytest
import torch
from torch import nn

from loaderkit import LeakDetector

KIB = 2**10
EPOCHS = 30


def watch(step, *, trace=False):
    detector = LeakDetector("cuda", on_leak=lambda _: None)
    return detector.run(step, epochs=EPOCHS, trace=trace)


class Trainer:
    """An object that keeps what a step gives it."""

    def __init__(self):
        self.history = []
        self.by_epoch = {}
        self.model = nn.Linear(64, 64, device="cuda")
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def train(self):
        loss = self.model(torch.randn(512, 64, device="cuda")).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


def kept_in_a_list():
    kept_activations = []

    def step():
        kept_activations.append(torch.randn(64 * KIB, device="cuda"))

    return step, "kept_activations"


def kept_in_a_dict():
    trainer = Trainer()

    def step():
        trainer.by_epoch[len(trainer.by_epoch)] = torch.randn(8, 4096, device="cuda")

    return step, "by_epoch"


def losses_with_their_graphs():
    trainer = Trainer()

    def step():
        loss = trainer.model(torch.randn(512, 64, device="cuda")).square().mean()
        trainer.history.append(loss)

    return step, "history"


def hooks_that_pile_up():
    trainer = Trainer()

    def step():
        rows = torch.randn(16 * KIB, device="cuda")
        trainer.model.register_forward_hook(lambda *_, rows=rows: None)
        trainer.train()

    return step, "_forward_hooks"


def buffers_that_grow():
    trainer = Trainer()
    trainer.model.register_buffer("memory_bank", torch.empty(0, 64, device="cuda"))

    def step():
        trainer.train()
        rows = torch.randn(1024, 64, device="cuda")
        trainer.model.memory_bank = torch.cat([trainer.model.memory_bank, rows])

    return step, "memory_bank"


LEAKS = [
    kept_in_a_list,
    kept_in_a_dict,
    losses_with_their_graphs,
    hooks_that_pile_up,
    buffers_that_grow,
]


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_of_the_gpu_is_called_one_and_its_holder_named(card, leak):
    step, holder = leak()

    report = watch(step)

    print(report)
    assert report.leaking
    assert "allocated" in [counter.name for counter in report.leaks]
    assert holder in str(report)


def varying_batches():
    trainer, generator = Trainer(), random.Random(0)

    def step():
        for _ in range(5):
            rows = torch.randn(generator.randint(64, 4096), 64, device="cuda")
            trainer.model(rows).mean().backward()

    return step


def a_cache_that_fills_up():
    newest = {}

    def step():
        newest[len(newest) % 4] = torch.randn(64 * KIB, device="cuda")
        if len(newest) > 4:
            newest.clear()

    return step


def an_optimizer_made_late():
    trainer = Trainer()

    def step():
        for _ in range(3):
            trainer.train()

    return step


def caches_emptied_every_epoch():
    def step():
        torch.randn(1024 * KIB, device="cuda").sum().item()
        torch.cuda.empty_cache()

    return step


def convolutions_of_many_sizes():
    net = nn.Conv2d(3, 16, 5, device="cuda")
    generator = random.Random(0)

    def step():
        size = 16 * generator.randint(2, 12)
        net(torch.randn(4, 3, size, size, device="cuda")).mean().backward()

    return step


CALM = [
    varying_batches,
    a_cache_that_fills_up,
    an_optimizer_made_late,
    caches_emptied_every_epoch,
    convolutions_of_many_sizes,
]


@pytest.mark.parametrize("calm", CALM)
def test_what_only_looks_like_a_leak_is_none(card, calm):
    report = watch(calm())

    print(report)
    assert not report.leaking


def test_memory_taken_beside_torch_is_seen_by_the_drivers_figure(card):
    """As by an extension's own kernels: torch's counters stand still."""
    driver = ctypes.CDLL("libcuda.so.1")
    taken = []

    def step():
        pointer = ctypes.c_uint64()
        assert driver.cuMemAlloc_v2(ctypes.byref(pointer), 4096 * KIB) == 0
        taken.append(pointer)

    try:
        report = watch(step)
    finally:
        for pointer in taken:
            driver.cuMemFree_v2(pointer)

    print(report)
    assert report.leaking
    assert "device_free" in str(report) or "driver" in str(report)


def test_the_allocators_history_names_the_line(card):
    kept = []

    def step():
        kept.append(torch.randn(64 * KIB, device="cuda"))

    report = watch(step, trace=True)

    line = f"test_card_leaks.py:{step.__code__.co_firstlineno + 1}"
    of_the_gpu = [site for site in report.sites if site.memory == f"on {card}"]
    assert line in of_the_gpu[0].lines[-1]
    assert of_the_gpu[0].bytes_per_epoch == pytest.approx(256 * KIB, rel=0.01)
