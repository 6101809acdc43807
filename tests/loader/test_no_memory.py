"""Where memory runs out, that is told: nothing is wrong with the samples.

What runs out is real: each case asks torch for 2**58 bytes, more than any machine maps.
"""

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torch_geometric.data import Data

from loaderkit import build_loader, diagnose_oom, pack
from loaderkit.errors import DatasetError, LoaderError

HUGE = 1 << 56
"""Numbers of 4 bytes."""


def ask_for_memory(*_arguments):
    return torch.zeros(HUGE)


def raise_other_error(*_arguments):
    return torch.stack([torch.zeros(1), torch.zeros(2)])


class Reading(Dataset):
    """Samples of which one cannot be read."""

    def __init__(self, read):
        self.read = read

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.read(index) if index == 3 else torch.zeros(2)


class Stream(IterableDataset):
    def __init__(self, read):
        self.read = read

    def __iter__(self):
        yield torch.zeros(2)
        yield self.read()


SAMPLES = [torch.zeros(2)] * 4
# Half of what is asked for in one sample, and it takes no memory: joining does.
EXPANDED = torch.zeros(1).expand(HUGE // 2)
CASES = {
    "a sample": lambda fail: build(Reading(fail)),
    "a stream": lambda fail: build(Stream(fail)),
    "collate_fn": lambda fail: build(SAMPLES, collate_fn=fail),
    "batch_transform": lambda fail: build(SAMPLES, batch_transform=fail),
    "a worker": lambda fail: build(Reading(fail), num_workers=1),
}
JOINED = {
    "tensors": [EXPANDED] * 4,
    "tuples": [(EXPANDED, 1)] * 4,
    "dicts": [{"x": EXPANDED}] * 4,
    "graphs": [Data(x=EXPANDED, num_nodes=1)] * 4,
}


def build(dataset, **options):
    options = {"batch_size": 4, "num_workers": 0, **options}
    return build_loader(dataset, "cpu", **options)


def error_of(loader):
    with pytest.raises(LoaderError) as caught:
        list(loader)
    return caught.value


@pytest.mark.parametrize("place", CASES)
def test_an_error_for_lack_of_memory_says_so(place):
    error = error_of(CASES[place](ask_for_memory))

    assert isinstance(error, RuntimeError)  # as the loop of torch's loader catches it
    assert "no memory was left" in error.why
    assert error.fix.startswith("a smaller batch_size")
    assert diagnose_oom(error).is_oom


@pytest.mark.parametrize("place", CASES)
def test_another_error_of_the_same_type_is_told_as_before(place):
    error = error_of(CASES[place](raise_other_error))

    assert isinstance(error, RuntimeError)
    assert "no memory" not in error.why
    assert "correct" in error.fix


@pytest.mark.parametrize("kind", JOINED)
def test_samples_that_need_too_much_memory_together_are_not_called_unlike(kind):
    error = error_of(build(JOINED[kind]))

    assert "no memory was left" in error.why
    assert error.fix.startswith("a smaller batch_size")
    assert "; or" not in error.fix  # no code of the user's ran


def test_packing_says_that_memory_ran_out(tmp_path):
    with pytest.raises(DatasetError) as caught:
        pack(Reading(ask_for_memory), tmp_path / "cache", workers=0)

    assert "Sample" in caught.value.what
    assert "fewer workers=" in caught.value.fix
