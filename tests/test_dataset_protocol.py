"""What a dataset says of itself, whatever stands between it and whoever asks."""

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Subset

from loaderkit import dataset_protocol as protocol
from loaderkit import pack
from loaderkit.composed_joining import fill_padding, own_collate

ROWS = [4, 0, 2]


class Sized(list):
    """A list that says sizes, as a dataset of a user's may."""

    def sizes(self):
        return {"nodes": np.arange(len(self)) * 10}


class Doubled(Subset):
    """Changes the samples of what it is a part of."""

    def __getitem__(self, row):
        return 2 * self.dataset[self.indices[row]]

    def __getitems__(self, rows):
        return [self[row] for row in rows]


@pytest.fixture
def packed(tmp_path):
    return pack([np.arange(n + 1.0) for n in range(6)], tmp_path / "a.lk", workers=0)


@pytest.mark.parametrize("other", [[1, 2], ConcatDataset([[1], [2]]), {"a": 1}])
def test_a_dataset_that_says_nothing_is_asked_in_vain_and_without_an_error(other):
    for dataset in (other, Subset(other, [0])):
        assert protocol.as_cached(dataset) is None
        assert not protocol.gathers_batches(dataset)
        assert own_collate(dataset) is None
        assert protocol.ask_sizes(dataset).sizes is None
        assert protocol.ask_size_counter(dataset) is None
        assert protocol.ask_graph_fields(dataset) is None
        assert protocol.ask_stored_rows(dataset) is None
        assert protocol.ask_stored_arrays(dataset) is None
        protocol.let_go_of_shards(dataset)
        fill_padding(dataset, {})


def test_a_subset_of_a_subset_asks_what_it_is_a_part_of(packed):
    part = Subset(Subset(packed, [5, 4, 3, 2, 1, 0]), ROWS)

    asked = protocol.ask_sizes(part)

    assert asked.dataset is packed
    assert asked.rows.tolist() == [1, 5, 3]
    assert protocol.gathers_batches(part)
    assert own_collate(part) == packed.collate
    assert protocol.ask_stored_arrays(part).samples == 6


def test_the_sizes_that_a_user_says_are_told():
    asked = protocol.ask_sizes(Subset(Sized(range(5)), ROWS))

    assert asked.sizes["nodes"][asked.rows].tolist() == [40, 0, 20]


def test_a_subset_that_changes_its_samples_is_none_to_gather_from(packed):
    doubled = Doubled(packed, ROWS)

    assert not protocol.gathers_batches(doubled)
    assert own_collate(doubled) == packed.collate
    assert protocol.ask_size_counter(doubled) is not None
    assert protocol.ask_size_counter(Subset(packed, ROWS)) is None
