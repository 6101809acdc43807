"""Workers that are kept read what torch's new workers of each epoch would read."""

import weakref

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from loaderkit import build_loader, open_cache, pack
from loaderkit.loader.dataset_changes import assigned_values, differ


class Plus:
    """A transform with a setting."""

    def __init__(self, number):
        self.number = number

    def __call__(self, sample):
        return sample + self.number


class Chain:
    """Several transforms, as torchvision's and PyG's Compose."""

    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, sample):
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class Rows(Dataset):
    """Numbers, with what people assign to datasets."""

    def __init__(self, transform):
        self.transform, self.epoch, self.data = transform, 0, torch.arange(8)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, row):
        return self.transform(self.data[row]) + 100 * self.epoch


def set_another_transform(dataset, epoch):
    dataset.transform = Plus(10 * epoch)


def set_in_the_transform(dataset, epoch):
    dataset.transform.transforms[0].number = epoch


def exchange_in_the_transform(dataset, epoch):
    dataset.transform.transforms = [Plus(epoch), Plus(1)]


def append_to_the_transform(dataset, _):
    dataset.transform.transforms.append(Plus(1))


def set_the_epoch(dataset, epoch):
    dataset.epoch = epoch


def set_other_data(dataset, epoch):
    dataset.data = torch.arange(8) * (epoch + 1)


def set_nothing(dataset, epoch):
    """The twin: workers go on."""


CHANGES = [
    *(set_another_transform, set_in_the_transform, exchange_in_the_transform),
    *(append_to_the_transform, set_the_epoch, set_other_data, set_nothing),
]
WRAPS = {
    "itself": lambda dataset: dataset,
    "subset": lambda dataset: Subset(dataset, [1, 3, 5, 7]),
    "concatenation": lambda dataset: ConcatDataset([dataset, Rows(Plus(0))]),
    "both": lambda dataset: Subset(ConcatDataset([Rows(Plus(0)), dataset]), [0, 9, 12]),
}


@pytest.mark.slow
@pytest.mark.long_cases
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_assigned_between_epochs_is_read_by_kept_workers(change, wrap):
    ours, theirs = Rows(Chain(Plus(0))), Rows(Chain(Plus(0)))
    options = {"batch_size": 2, "num_workers": 1}
    kept = build_loader(WRAPS[wrap](ours), persistent_workers=True, **options)
    new = DataLoader(WRAPS[wrap](theirs), **options)
    workers = set()
    for epoch in range(3):
        change(ours, epoch)
        change(theirs, epoch)
        assert [b.tolist() for b in kept] == [b.tolist() for b in new]
        workers |= {worker.pid for worker in kept._iterator._workers}

    assert (len(workers) == 1) == (change is set_nothing)


@pytest.mark.slow
def test_a_transform_assigned_to_a_packed_dataset_is_read_by_kept_workers(tmp_path):
    pack(list(range(6)), tmp_path / "a.lk", workers=0)
    dataset = open_cache(tmp_path / "a.lk")
    loader = build_loader(dataset, batch_size=3, num_workers=1, persistent_workers=True)
    seen = []
    for number in (0, 10):
        dataset.transform = Plus(number)
        seen.append([batch.tolist() for batch in loader])

    assert seen == [[[0, 1, 2], [3, 4, 5]], [[10, 11, 12], [13, 14, 15]]]


def test_data_that_was_replaced_is_not_kept_to_be_compared():
    dataset = Rows(Plus(0))
    before = assigned_values(dataset)
    old_data = weakref.ref(dataset.data)

    dataset.data = torch.arange(8)

    assert old_data() is None
    assert differ(before, assigned_values(dataset))
