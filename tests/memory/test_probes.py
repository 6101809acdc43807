"""What devices can do: replayed for those that are not here."""

from types import SimpleNamespace

import pytest
import torch

from loaderkit.memory.probes import Accelerator, Unified, probe_of, read_capability


def module(*, integrated=False, started=False):
    return SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: started,
        get_device_properties=lambda _: SimpleNamespace(is_integrated=integrated),
    )


def test_a_card_with_memory_of_its_own_pins_and_copies_beside():
    found = Accelerator(module()).capability(torch.device("cuda", 0))

    assert found.pins
    assert found.asynchronous
    assert not found.unified


def test_a_card_that_shares_the_hosts_memory_does_not_pin():
    found = Accelerator(module(integrated=True)).capability(torch.device("cuda"))

    assert found.unified
    assert not found.pins


def test_a_driver_in_use_is_seen():
    found = Accelerator(module(started=True)).capability(torch.device("cuda"))

    assert found.started


def test_apples_device_never_pins():
    found = Unified().capability(torch.device("mps"))

    assert found.unified
    assert not found.pins
    assert not found.asynchronous
    assert isinstance(probe_of(torch.device("mps")), Unified)


def test_the_processor_is_always_there():
    assert not read_capability("cpu").pins


@pytest.mark.parametrize("device", ["nonsense", "cuda:0:1"])
def test_what_is_no_device_is_refused(device):
    with pytest.raises(ValueError, match="device must be"):
        read_capability(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_here_is_refused_with_the_fix():
    with pytest.raises(ValueError, match="device='cpu'"):
        read_capability("cuda")
