"""On a CUDA GPU; every test here is skipped, by name, where there is none."""

import gc

import pytest
import torch

MIB = 2**20


def pytest_itemcollected(item):
    """Mark the tests of this folder: pytest asks its conftest.py about no others."""
    item.add_marker(pytest.mark.needs("cuda"))


@pytest.fixture
def card():
    """The GPU, with nothing of torch's on it but what libraries took for themselves."""
    device = torch.device("cuda", torch.cuda.current_device())
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield device
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def small_card(card):
    """The GPU, of which this process may take 1 GiB more than it has."""
    total = torch.cuda.mem_get_info()[1]
    allowed = torch.cuda.memory_reserved() + 1024 * MIB
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    return card
