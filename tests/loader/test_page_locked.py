"""A loader without workers for a device that wants page-locked batches, replayed."""

import copy
import dataclasses
import logging

import pytest
import torch
from data import Graphs
from replayed_page_locking import ReplayedMemory, blocks_of, dense_tensors
from torch.utils.data import Subset

from loaderkit import build_loader, pack
from loaderkit.errors import LoaderError
from loaderkit.loader.planned import PlannedLoader
from loaderkit.memory.page_locked import PageLockedMemory
from loaderkit.nests import map_tensors
from loaderkit.testing import assert_same


def for_a_device(loader, replay):
    """The loader that ``build_loader`` makes where a device wants page-locked batches.

    The plan itself needs such a device: ``loader`` was built for the CPU.
    """
    setup = dataclasses.replace(
        loader._setup, page_locked=PageLockedMemory(replay.make)
    )
    return PlannedLoader(
        loader.dataset,
        setup=setup,
        batch_sampler=loader.batch_sampler,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=True,
    )


def texts(tmp_path):
    samples = [{"ids": torch.arange(n % 7 + 1), "n": n} for n in range(40)]
    return pack(samples, tmp_path / "t.lk", workers=0)


def halves(batch):
    return map_tensors(lambda tensor: tensor[: len(tensor) // 2].clone(), batch)


CASES = {
    "graphs": (lambda cache, _: cache, {}),
    "a part of them": (lambda cache, _: Subset(cache, [5, 3, 30, 7, 9]), {}),
    "a field left out": (lambda cache, _: cache, {"exclude_keys": ["x"]}),
    "follow_batch": (lambda cache, _: cache, {"follow_batch": ["x"]}),
    "transformed": (lambda cache, _: cache, {"batch_transform": halves}),
    "texts": (lambda _, folder: texts(folder), {}),
    "buckets": (lambda _, folder: texts(folder), {"bucket_by": "tokens"}),
    "changed samples": (lambda cache, _: Changed(cache.cache), {}),
}


class Changed(Graphs):
    """Reads each sample by itself, so nothing is gathered."""

    def __init__(self, cache):
        super().__init__(cache=cache, transform=lambda graph: graph)


COPIED = {"transformed", "changed samples"}
"""Where a function of the user's made the batches, or samples."""


@pytest.mark.many_cases(quick=3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(CASES))
def test_epochs_are_the_same_and_all_of_each_batch_is_made_there(
    cache, tmp_path, name, monkeypatch
):
    make, options = CASES[name]
    dataset = make(cache, tmp_path)
    arguments = {"batch_size": 6, "shuffle": True, "seed": 3, "num_workers": 0}
    wanted = build_loader(dataset, **arguments, **options)
    replay = ReplayedMemory()
    loader = for_a_device(build_loader(dataset, **arguments, **options), replay)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: replay.pin(tensor))
    blocks = []

    assert loader.pin_memory
    for _ in range(2):
        batches = list(loader)
        assert_same(batches, list(wanted))
        for batch in batches:
            assert all(map(replay.has, dense_tensors(batch)))
            blocks += blocks_of(batch)
    assert len(set(blocks)) == len(blocks)
    assert bool(replay.copied) == (name in COPIED)


@pytest.mark.slow
def test_workers_use_nothing_of_it(cache):
    wanted = list(build_loader(cache, batch_size=6, seed=3, num_workers=0))
    replay = ReplayedMemory(blocks=0)  # in a worker, too, it would refuse
    loader = build_loader(cache, batch_size=6, seed=3, num_workers=2)
    setup = dataclasses.replace(
        loader._setup, page_locked=PageLockedMemory(replay.make)
    )
    sent = PlannedLoader(
        cache,
        setup=setup,
        batch_sampler=loader.batch_sampler,
        collate_fn=loader.collate_fn,
        num_workers=2,
        multiprocessing_context=loader.multiprocessing_context,
    )

    assert_same(list(sent), wanted)
    assert not replay.made
    assert not replay.refused


@pytest.mark.slow
def test_a_refusal_in_an_epoch_loses_no_batch(cache, caplog):
    wanted = list(build_loader(cache, batch_size=6, seed=3, num_workers=0))
    total = sum(len(dense_tensors(batch)) for batch in wanted)

    for blocks in (0, 1, 7, total - 1):
        replay = ReplayedMemory(blocks)
        plain = build_loader(cache, batch_size=6, seed=3, num_workers=0)
        loader = for_a_device(plain, replay)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "loaderkit"):
            assert_same(list(loader), wanted)
            assert_same(list(loader), wanted)
        assert len(caplog.records) == replay.refused == 1
        assert not loader.plan.pin_memory.value
        assert "refused more" in loader.plan.pin_memory.reason
        assert len(replay.made) == blocks


def test_its_twin_with_an_error_of_another_kind_is_told(cache):
    class Broken(ReplayedMemory):
        def make(self, *_):
            raise ZeroDivisionError

    plain = build_loader(cache, batch_size=6, num_workers=0)

    with pytest.raises((LoaderError, ZeroDivisionError)):
        list(for_a_device(plain, Broken()))


@pytest.mark.slow
def test_batches_of_a_thread_are_made_there_too(cache):
    """A step as long as making a batch has a thread make the next ones."""
    replay = ReplayedMemory()
    plain = build_loader(cache, batch_size=2, seed=3, num_workers=0)
    wanted = list(plain)
    loader = for_a_device(plain, replay)
    batches = []

    iterator = iter(loader)
    for batch in iterator:
        batches.append(batch)
        torch.ones(800, 800) @ torch.ones(800, 800)

    assert iterator._deliveries.threaded
    assert_same(batches, wanted)
    assert not replay.copied
    assert loader.plan == plain.plan  # nothing was refused


def test_a_copy_of_the_loader_has_it_too(cache):
    plain = build_loader(cache, batch_size=6, seed=3, num_workers=0)
    loader = for_a_device(plain, ReplayedMemory())

    copied = copy.copy(loader)

    assert_same(list(copied), list(loader))
    assert copied._setup.page_locked.refusal is None


def test_a_loader_for_the_cpu_makes_batches_in_ordinary_memory(cache):
    loader = build_loader(cache, batch_size=6, num_workers=0)

    assert loader._setup.page_locked is None
    assert not loader.pin_memory
