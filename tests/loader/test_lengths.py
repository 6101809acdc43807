"""Lengths that change, and lengths that are not true."""

import itertools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from loaderkit import build_loader
from loaderkit.errors import LoaderError

OPTIONS = st.fixed_dictionaries(
    {}, optional={"batch_size": st.integers(1, 5), "drop_last": st.booleans()}
)


@pytest.mark.slow
@given(st.integers(1, 9), st.lists(st.integers(-3, 6), max_size=4), OPTIONS)
@settings(max_examples=30)
def test_every_epoch_has_the_samples_that_the_dataset_has_then(count, changes, options):
    data = list(range(count))
    ours, torchs = (
        make(data, num_workers=0, **options) for make in (build_loader, DataLoader)
    )
    shuffled = build_loader(data, shuffle=True, num_workers=0)

    for change in (0, *changes):
        data[:] = range(max(1, len(data) + change))

        assert len(ours) == len(torchs)
        assert len(ours.batch_sampler) == len(torchs.batch_sampler)
        assert list(ours.batch_sampler) == list(torchs.batch_sampler)
        assert [b.tolist() for b in ours] == [b.tolist() for b in torchs]
        assert sorted(shuffled.sampler) == data
        assert len(shuffled) == len(data)
        assert sorted(int(batch) for batch in shuffled) == data


class Sized(list):
    """Numbers that say how large they are."""

    def sizes(self):
        return {"nodes": [1 + value % 4 for value in self]}


@pytest.mark.parametrize("ranks", [1, 3])
def test_samples_that_came_later_keep_to_the_limits_too(ranks):
    data = Sized(range(10))
    loaders = [
        build_loader(
            data,
            max_nodes=8,
            shuffle=True,
            seed=0,
            rank=rank,
            world_size=ranks,
            num_workers=0,
        )
        for rank in range(ranks)
    ]
    for loader in loaders:
        list(loader)
    data.extend(range(10, 40))

    rows = []
    for loader in loaders:
        batches = [batch.tolist() for batch in loader]
        assert max(sum(1 + row % 4 for row in batch) for batch in batches) <= 8
        assert len(batches) == len(loader)
        rows += itertools.chain(*batches)

    assert set(rows) == set(range(40))


@pytest.mark.slow
def test_workers_that_are_kept_read_samples_that_came_later():
    """They have copies of the dataset from before; torch's own fail there."""
    data = list(range(6))
    loader = build_loader(data, num_workers=1, persistent_workers=True)
    running = iter(loader)
    given_rows = [int(next(running))]
    data.extend(range(6, 9))

    given_rows += [int(batch) for batch in running]

    assert given_rows == list(range(6))
    assert [int(batch) for batch in loader] == list(range(9))


def test_an_epoch_that_has_begun_ends_as_it_was():
    data = list(range(6))
    loader = build_loader(data, shuffle=True, seed=0, num_workers=0)
    running = iter(loader)
    given_rows = [int(next(running)), int(next(running))]
    data.extend(range(6, 9))
    state = loader.state_dict()

    alike = build_loader(data[:6], shuffle=True, num_workers=0)
    alike.load_state_dict(state)

    remaining_rows = [int(batch) for batch in running]
    assert sorted(given_rows + remaining_rows) == list(range(6))
    assert [int(batch) for batch in alike] == remaining_rows
    with pytest.raises(LoaderError, match="of 6 samples, and this loader has 9"):
        build_loader(data, shuffle=True, num_workers=0).load_state_dict(state)


def test_a_dataset_that_grows_behind_a_loaded_state_is_refused():
    data = list(range(6))
    loader = build_loader(data, shuffle=True, num_workers=0)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    data.append(6)

    with pytest.raises(LoaderError, match="has changed since"):
        list(loader)

    loader.set_epoch(1)
    assert sorted(int(batch) for batch in loader) == data


def test_a_state_between_epochs_is_that_of_the_grown_dataset():
    data = list(range(6))
    loader = build_loader(data, shuffle=True, num_workers=0)
    list(loader)
    data.extend(range(6, 9))

    grown = build_loader(data, shuffle=True, num_workers=0)
    grown.load_state_dict(loader.state_dict())

    assert [int(batch) for batch in grown] == [int(batch) for batch in loader]


class Stream(IterableDataset):
    """Counts, or repeats one number, in one way or another for each worker."""

    def __init__(self, share):
        self.share = share

    def __iter__(self):
        worker = get_worker_info()
        if self.share == "by worker":
            return iter(range(worker.id, 60, worker.num_workers))
        return iter([1] * 60 if self.share == "constant" else range(60))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("share", ["by worker", "constant", "not at all"])
def test_a_stream_that_each_worker_reads_whole_is_told(share, workers):
    loader = build_loader(Stream(share), batch_size=4, num_workers=workers)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = sum(len(batch) for batch in loader)

    assert count == (60 if share == "by worker" else 60 * workers)
    told = [w.filename for w in caught if "give the same batches" in str(w.message)]
    assert told == ([__file__] if share == "not at all" else [])


class Claims(IterableDataset):
    """Says that it has so many samples, and has others.

    Args:
        says: Its length.
        has: The number of its samples.
        shared: Every worker reads a part of its own.
    """

    def __init__(self, says, has, *, shared=True):
        self.says, self.has, self.shared = says, has, shared

    def __len__(self):
        return self.says

    def __iter__(self):
        info = get_worker_info()
        if info is None or not self.shared:
            return iter(range(self.has))
        return iter(range(info.id, self.has, info.num_workers))


def warns_of_length(loader, *, asks):
    if asks:
        len(loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = [torch.as_tensor(batch).tolist() for batch in loader]
    texts = [
        str(warning.message)
        for warning in caught
        if "dataset says" in str(warning.message)
    ]
    return bool(texts), batches


@pytest.mark.slow
@given(st.integers(0, 9), st.integers(0, 9), OPTIONS, st.booleans())
@settings(max_examples=30)
def test_more_batches_than_were_said_are_warned_of(says, has, options, asks):
    ours, torchs = (
        make(Claims(says, has), num_workers=0, **options)
        for make in (build_loader, DataLoader)
    )
    warns, batches = warns_of_length(ours, asks=asks)
    torch_warns, torch_batches = warns_of_length(torchs, asks=asks)

    assert batches == torch_batches
    assert len(ours) == len(torchs)
    assert warns == (asks and len(batches) > len(ours))
    # torch compares batches with samples: it may not notice.
    assert warns >= torch_warns


def test_what_every_worker_reads_is_warned_of_and_where_to_look_is_said():
    loader = build_loader(Claims(6, 6, shared=False), num_workers=2)
    assert len(loader) == 6

    with (
        pytest.warns(RuntimeWarning, match="give the same batches") as first,
        pytest.warns(
            UserWarning, match="each of its workers reads all of it"
        ) as second,
    ):
        list(loader)
    # Where the loop is.  On one processor torch advises against two workers as well; of
    # a fork beside threads Python 3.14 warns.
    others = ("suggested max number of worker", "is multi-threaded")
    ours = [
        warning
        for warning in [*first, *second]
        if not any(words in str(warning.message) for words in others)
    ]
    assert {warning.filename for warning in ours} == {__file__}


def test_uneven_parts_of_workers_are_no_reason_to_warn():
    # Three and three samples make two batches each; five samples would make two.
    warnings_given, batches = warns_of_length(
        build_loader(Claims(6, 6), num_workers=2, batch_size=2), asks=True
    )

    assert not warnings_given
    assert len(batches) == 4
