"""Giving back: what came back is measured, and who keeps the rest is named."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import loaderkit
from loaderkit.errors import OptionError
from loaderkit.memory.cache_cleaner import EpochCacheCleaner
from loaderkit.memory.release import cached_bytes

MIB = 1 << 20


@pytest.mark.slow
def test_a_release_collects_cycles_and_says_what_it_brought():
    class Node:
        pass

    # Python's own collector must not come first; when it does differs by version.
    gc.disable()
    try:
        for _ in range(5):
            node = Node()
            node.me, node.load = node, torch.ones(4 * MIB)
        del node

        released = loaderkit.release()
    finally:
        gc.enable()

    assert released.returned_bytes["host"] > 48 * MIB
    assert released.collected >= 5
    assert "objects collected" in str(released)


class Cards:
    """What torch says of two devices whose allocators keep what is not in use."""

    def __init__(self, error=None):
        self.reserved, self.allocated = [100 * MIB, 60 * MIB], [30 * MIB, 60 * MIB]
        self.error, self.current = error, 0

    def is_available(self):
        return True

    def device_count(self):
        return 2

    def is_initialized(self):
        return True

    def get_device_properties(self, _):
        return SimpleNamespace(is_integrated=False)

    def current_device(self):
        return self.current

    def index_of(self, device):
        return self.current if device.index is None else device.index

    def memory_allocated(self, device):
        return self.allocated[self.index_of(device)]

    def memory_reserved(self, device):
        return self.reserved[self.index_of(device)]

    def empty_cache(self):
        """Empty the caches of all devices, as torch does."""
        if self.error is not None:
            raise self.error
        self.reserved = list(self.allocated)


@pytest.fixture
def install(monkeypatch):
    """Give torch devices of a kind that this machine may lack, as their module."""

    def install(cards):
        real = torch.get_device_module
        monkeypatch.setattr(
            torch,
            "get_device_module",
            lambda kind: cards if kind == "cuda" else real(kind),
        )
        return cards

    return install


@pytest.mark.slow
@pytest.mark.parametrize("current", [0, 1])
def test_what_each_device_gives_back_is_told_by_its_name(install, current):
    cards = install(Cards())
    cards.current = current
    cards.reserved[1] += 20 * MIB
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert cached_bytes(first) == (100 * MIB, 70 * MIB)
    assert cached_bytes(second) == (80 * MIB, 20 * MIB)

    released = loaderkit.release()

    returned_bytes = dict(released.returned_bytes)
    del returned_bytes["host"]
    assert returned_bytes == {"cuda:0": 70 * MIB, "cuda:1": 20 * MIB}
    assert cached_bytes(first).unused == cached_bytes(second).unused == 0
    assert "70.0 MiB of cuda:0, 20.0 MiB of cuda:1" in str(released)


@pytest.mark.slow
def test_a_device_that_gave_nothing_back_is_not_named(install):
    install(Cards())

    assert "cuda:1" not in str(loaderkit.release())


@pytest.mark.slow
def test_a_stage_counts_each_device_by_itself(install):
    cards = install(Cards())
    with FakeTensorMode():
        weights = [torch.ones(MIB, device=f"cuda:{index}") for index in (0, 1, 1)]
    cards.allocated = [4 * MIB, 8 * MIB]

    with loaderkit.staged("two devices", *weights) as stage:
        weights.clear()
        cards.allocated = [0, 1 * MIB]

    expected, returned = stage.receipt.expected_bytes, stage.receipt.returned_bytes
    assert expected == {"cuda:0": 4 * MIB, "cuda:1": 8 * MIB}
    assert (returned["cuda:0"], returned["cuda:1"]) == (4 * MIB, 7 * MIB)
    assert "4.00 MiB of 4.00 MiB came back on cuda:0" in str(stage.receipt)
    assert "7.00 MiB of 8.00 MiB came back on cuda:1" in str(stage.receipt)


@pytest.mark.slow
def test_a_device_that_fails_does_not_keep_the_host_from_giving_back(install):
    install(Cards(RuntimeError("CUDA error: an illegal memory access")))

    released = loaderkit.release()

    assert released.returned_bytes["cuda:0"] == 0
    assert "host" in released.returned_bytes


def test_a_device_that_is_not_here_holds_nothing():
    assert cached_bytes(torch.device("cpu")) == (None, 0)


def train_in_a_stage():
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.Adam(model.parameters())
    with loaderkit.staged("model A", model, optimizer) as stage:
        model(torch.ones(2, 1000)).sum().backward()
        optimizer.step()
        del model, optimizer
    return stage.receipt


@pytest.mark.slow
def test_a_stage_whose_model_is_gone_gets_its_bytes_back():
    train_in_a_stage()  # the first time, modules are imported and workspaces made

    receipt = train_in_a_stage()

    expected = receipt.expected_bytes["host"]
    assert receipt.ok, receipt
    assert expected == (1000 * 1000 + 1000) * 4
    assert receipt.returned_bytes["host"] == pytest.approx(expected, rel=0.01)
    assert str(receipt).startswith("stage 'model A': 3.82 MiB of 3.82 MiB came back")


@pytest.mark.slow
def test_a_stage_has_no_receipt_before_its_end():
    stage = loaderkit.staged("early")

    with pytest.raises(OptionError, match=r"read stage\.receipt after"), stage:
        _ = stage.receipt

    assert stage.receipt.ok


@pytest.mark.slow
def test_a_model_made_inside_is_added():
    with loaderkit.staged("model B") as stage:
        model = stage.add(torch.nn.Linear(1000, 1000))
        del model

    receipt = stage.receipt
    assert receipt.ok
    expected = receipt.expected_bytes["host"]
    assert receipt.returned_bytes["host"] == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_every_holder_of_a_model_that_stays_is_named():
    class Trainer:
        pass

    def crash(batch):
        raise ValueError(batch)

    model, trainer, errors = torch.nn.Linear(500, 500), Trainer(), []
    trainer.model = model
    try:
        crash(model)
    except ValueError as error:
        errors.append(error.with_traceback(error.__traceback__.tb_next))

    with loaderkit.staged("model C", model) as stage:
        del model

    (survivor,) = stage.receipt.survivors
    paths = {(holder.kind, holder.path) for holder in survivor.holders}
    assert survivor.what == "Linear"
    assert survivor.bytes == (500 * 500 + 500) * 4
    assert ("local variable", "trainer.model") in paths
    assert any(kind == "traceback" and path == "batch" for kind, path in paths)
    assert "is still held by" in str(stage.receipt)
    assert errors


@pytest.mark.slow
def test_a_loss_that_keeps_the_parameters_is_named():
    model = torch.nn.Linear(500, 500)

    with loaderkit.staged("model D", model) as stage:
        loss = model(torch.ones(2, 500)).sum()
        del model

    holders = [str(h) for s in stage.receipt.survivors for h in s.holders]
    assert any("autograd graph" in text and "`loss`" in text for text in holders)
    assert loss.requires_grad


def test_what_cannot_be_watched_is_refused():
    with pytest.raises(ValueError, match="a list cannot") as refused:
        loaderkit.staged("list", [1])

    assert refused.value.fix == "name what is in the list"


@pytest.mark.slow
def test_hygiene_switches_itself_off_when_it_brings_nothing():
    keeper = EpochCacheCleaner("cpu")

    for _ in range(10):
        keeper.end_epoch()

    assert not keeper.report.active
    assert keeper.report.times == 3
    assert "switched off" in str(keeper.report)


@pytest.mark.slow
def test_hygiene_that_brings_something_goes_on():
    class Node:
        pass

    keeper = EpochCacheCleaner("cpu", every=2)
    for _ in range(8):
        node = Node()
        node.me, node.load = node, torch.ones(24 * MIB)
        del node
        keeper.step()

    assert keeper.report.active
    assert keeper.report.times == 4
    assert keeper.report.returned_bytes > 4 * 64 * MIB


@pytest.mark.slow
def test_hygiene_empties_a_device_only_when_much_lies_unused(install):
    cards = install(Cards())
    keeper = EpochCacheCleaner("cuda")

    cards.reserved, cards.allocated = [1000 * MIB, 0], [990 * MIB, 0]
    keeper.end_epoch()
    assert cards.reserved[0] == 1000 * MIB

    cards.allocated = [500 * MIB, 0]
    keeper.end_epoch()
    assert cards.reserved[0] == 500 * MIB

    assert keeper.report.skipped == 1
    assert keeper.report.times == 1


@pytest.mark.slow
def test_freezing_takes_what_exists_out_of_the_collectors_sight():
    keeper = EpochCacheCleaner("cpu", freeze=True)

    keeper.end_epoch()

    assert gc.get_freeze_count() > 1000
    gc.unfreeze()


def test_hygiene_of_no_batches_is_refused():
    with pytest.raises(ValueError, match="from 1, got 0"):
        EpochCacheCleaner("cpu", every=0)
