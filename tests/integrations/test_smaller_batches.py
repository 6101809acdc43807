"""What tries a smaller batch where memory runs out knows the loader's errors."""

import pytest
import torch

from loaderkit import build_loader

HUGE = 1 << 56
"""Numbers of 4 bytes, more than any machine maps."""


@pytest.mark.slow
@pytest.mark.needs("accelerate")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_accelerate_tries_a_smaller_batch(num_workers):
    from accelerate import find_executable_batch_size

    tried = []

    def join(samples):
        # In the process that reads: the real allocator refuses.
        return torch.zeros(HUGE if len(samples) > 2 else len(samples))

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size):
        tried.append(batch_size)
        options = {"num_workers": num_workers, "collate_fn": join}
        loader = build_loader(list(range(8)), batch_size=batch_size, **options)
        return [len(batch) for batch in loader]

    assert train() == [2, 2, 2, 2]
    assert tried[0] == 8
    assert tried[-1] == 2
