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
    """An object that trains, and has attributes that a step may fill."""

    def __init__(self):
        self.history = []
        self.by_epoch = {}
        self.model = nn.Linear(64, 64, device="cuda")
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def loss(self):
        return self.model(torch.randn(512, 64, device="cuda")).square().mean()

    def train(self):
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


# Each leak gives a step, and a word of the path to who holds what grows.


def a_list():
    activations = []

    def step():
        activations.append(torch.randn(64 * KIB, device="cuda"))

    return step, "activations"


def a_dict():
    trainer = Trainer()

    def step():
        trainer.by_epoch[len(trainer.by_epoch)] = torch.randn(8, 4096, device="cuda")

    return step, "by_epoch"


def losses_with_their_graphs():
    trainer = Trainer()

    def step():
        trainer.history.append(trainer.loss())

    return step, "history"


def hooks_that_pile_up():
    trainer = Trainer()

    def step():
        rows = torch.randn(16 * KIB, device="cuda")
        trainer.model.register_forward_hook(lambda *_, rows=rows: None)
        trainer.train()

    return step, "_forward_hooks"


def a_buffer_that_gets_longer():
    trainer = Trainer()
    trainer.model.register_buffer("memory_bank", torch.empty(0, 64, device="cuda"))

    def step():
        trainer.train()
        rows = torch.randn(1024, 64, device="cuda")
        trainer.model.memory_bank = torch.cat([trainer.model.memory_bank, rows])

    return step, "memory_bank"


def a_tuple_made_anew():
    trainer = Trainer()
    trainer.history = ()

    def step():
        rows = torch.randn(1024, 64, device="cuda")
        trainer.history = (*trainer.history, rows)

    return step, "history"


LEAKS = [
    a_list,
    a_dict,
    losses_with_their_graphs,
    hooks_that_pile_up,
    a_buffer_that_gets_longer,
    a_tuple_made_anew,
]


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_of_the_gpu_is_called_one_and_its_holder_named(card, leak):
    step, holder = leak()

    report = watch(step)

    assert report.leaking
    assert report.device == str(card)
    assert "allocated" in [counter.name for counter in report.leaks]
    assert holder in str(report)


def batches_of_many_sizes():
    trainer, generator = Trainer(), random.Random(0)

    def step():
        for _ in range(5):
            rows = torch.randn(generator.randint(64, 4096), 64, device="cuda")
            trainer.model(rows).mean().backward()

    return step


def a_cache_of_a_bounded_size():
    newest = {}

    def step():
        newest[len(newest) % 4] = torch.randn(64 * KIB, device="cuda")

    return step


def an_optimizer_whose_state_comes_late():
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
    batches_of_many_sizes,
    a_cache_of_a_bounded_size,
    an_optimizer_whose_state_comes_late,
    caches_emptied_every_epoch,
    convolutions_of_many_sizes,
]


# What fills slowly, such as the plans of cuDNN for each size, may need more epochs.
@pytest.mark.filterwarnings("ignore::loaderkit.errors.NotJudgedWarning")
@pytest.mark.parametrize("calm", CALM)
@pytest.mark.usefixtures("card")
def test_what_only_looks_like_a_leak_is_none(calm):
    report = watch(calm())

    assert not report.leaking, report


@pytest.mark.filterwarnings("ignore::loaderkit.errors.NotJudgedWarning")
@pytest.mark.usefixtures("card")
def test_memory_taken_beside_torch_is_seen_by_the_drivers_figure():
    """As by an extension's own kernels: torch's counters stand still.

    Other processes on the GPU show in the driver's figure too, so that growth of it
    alone is told, and not called a leak of this process.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    pointers = []

    def step():
        pointer = ctypes.c_uint64()
        assert driver.cuMemAlloc_v2(ctypes.byref(pointer), 4096 * KIB) == 0
        pointers.append(pointer)

    try:
        report = watch(step)
    finally:
        for pointer in pointers:
            driver.cuMemFree_v2(pointer)

    [used_bytes] = [c.values for c in report.counters if c.name == "device_used"]
    # It is not read in every epoch, the last one included.
    assert used_bytes[-1] - used_bytes[0] >= EPOCHS / 2 * 4096 * KIB
    assert "device_used" in str(report)
    assert not report.leaking


def test_the_allocators_history_names_the_line(card):
    rows_of_epochs = []

    def step():
        rows_of_epochs.append(torch.randn(64 * KIB, device="cuda"))

    report = watch(step, trace=True)

    line = f"test_card_leaks.py:{step.__code__.co_firstlineno + 1}"
    on_card = [site for site in report.sites if site.memory == f"on {card}"]
    assert line in on_card[0].lines[-1]
    assert on_card[0].bytes_per_epoch == pytest.approx(256 * KIB, rel=0.01)
