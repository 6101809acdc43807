"""Streams and samplers that fail at any moment: no sample is lost or given twice.

A loop catches the errors and reads on, saves a state after any batch or error, and
another loader goes on from there.  Whatever the stream can say of its own state, and
whoever reads it, the samples of both are those of the stream, and errors arrive whole.
"""

import json
from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from loaderkit import build_loader

SAMPLES = 24


class BrokenStreamError(Exception):
    """Says where it was raised, in an attribute too."""

    def __init__(self, position):
        super().__init__(f"broken before sample {position}")
        self.position = position


class Reading:
    """Reads the samples of one worker, and fails once before some of them."""

    def __init__(self, stream):
        info = get_worker_info()
        self.position = 0 if info is None else info.id
        self.step = 1 if info is None else info.num_workers
        self.failing = set(stream.failing)
        self.stream = stream

    def __iter__(self):
        return self

    def __next__(self):
        if self.position in self.failing:
            self.failing.discard(self.position)
            raise BrokenStreamError(self.position)
        if self.position >= SAMPLES:
            raise StopIteration
        sample = torch.tensor(self.position)
        self.position += self.step
        self.stream.position = self.position
        return sample


class StatefulReading(Reading):
    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Stream(IterableDataset):
    """Tells no state."""

    reading = Reading

    def __init__(self, failing):
        self.failing = frozenset(failing)
        self.position = None

    def __iter__(self):
        return self.reading(self)


class StreamOfStatefulReadings(Stream):
    reading = StatefulReading


class StatefulStream(Stream):
    """Goes on where it was told to."""

    begin_at = None

    def __iter__(self):
        reading = super().__iter__()
        if self.begin_at is not None:
            reading.position, self.begin_at = self.begin_at, None
        return reading

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.begin_at = state["position"]


STREAMS = [Stream, StreamOfStatefulReadings, StatefulStream]


class FailingSampler(Sampler):
    """Gives all rows in order, and fails before some."""

    def __init__(self, failing):
        # As a method, which is no part of a sampler's state: the mended one has others.
        self.fails_at = frozenset(failing).__contains__

    def __iter__(self):
        for row in range(SAMPLES):
            if self.fails_at(row):
                raise BrokenStreamError(row)
            yield row

    def __len__(self):
        return SAMPLES


def outcomes(iterator, most=None):
    """Give what comes of an epoch: lists of samples, and errors that are caught."""
    count = 0
    while most is None or count < most:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except BrokenStreamError as error:
            yield error
        else:
            yield batch.tolist()
        count += 1


def samples_of(results):
    return [n for result in results if isinstance(result, list) for n in result]


def check_errors(results, failing):
    """See that each error says what the stream said, and is one of those planted."""
    errors = [result for result in results if isinstance(result, BrokenStreamError)]
    for error in errors:
        assert error.position in failing
        assert f"broken before sample {error.position}" in str(error)
        cause = error.__cause__
        assert isinstance(cause, BrokenStreamError)
        assert cause.position == error.position
    return len(errors)


def read_in_two_parts(make, given, failing):
    """Read some batches and errors, save a state, and let another loader go on.

    Returns:
        The samples of both, and those of the first one if it had gone on itself.
    """
    stopped = make()
    iterator = iter(stopped)
    first = list(outcomes(iterator, given))
    state = json.loads(json.dumps(stopped.state_dict()))
    rest = list(outcomes(iterator))
    # When all were given, the next epoch may follow.
    assume(len(samples_of(first)) < SAMPLES)

    resumed = make()
    resumed.load_state_dict(state)
    other_rest = list(outcomes(iter(resumed)))

    assert check_errors(first + rest, failing) <= len(failing)
    check_errors(other_rest, failing)
    return samples_of(first) + samples_of(other_rest), samples_of(first + rest)


def check_all_once(samples):
    assert Counter(samples) == Counter(range(SAMPLES))


failing_places = st.sets(st.integers(0, SAMPLES - 1), max_size=5)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(STREAMS), failing_places, st.integers(1, 5), st.integers(0, 12))
def test_a_stream_that_fails_loses_no_sample_and_gives_none_twice(
    kind, failing, batch_size, given
):
    def make():
        return build_loader(kind(failing), batch_size=batch_size, num_workers=0, seed=0)

    resumed, went_on = read_in_two_parts(make, given, failing)

    check_all_once(went_on)
    check_all_once(resumed)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.sampled_from(STREAMS), failing_places, st.integers(1, 5), st.integers(0, 12))
def test_nor_does_one_that_workers_read(kind, failing, batch_size, given):
    def make():
        return build_loader(kind(failing), batch_size=batch_size, num_workers=2, seed=0)

    resumed, went_on = read_in_two_parts(make, given, failing)

    check_all_once(went_on)
    check_all_once(resumed)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, row):
        return torch.tensor(row)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(failing_places, st.integers(1, 5), st.integers(0, 12))
def test_a_sampler_that_fails_says_so_and_a_state_before_it_goes_on(
    failing, batch_size, given
):
    def make(failing):
        return build_loader(
            Numbers(),
            sampler=FailingSampler(failing),
            batch_size=batch_size,
            num_workers=0,
            seed=0,
        )

    stopped = make(failing)
    state = stopped.state_dict()
    iterator = iter(stopped)
    results = []
    for result in outcomes(iterator, given):
        results.append(result)
        if isinstance(result, list):
            state = json.loads(json.dumps(stopped.state_dict()))
    first = samples_of(results)
    assume(len(first) < SAMPLES)

    # A generator ends with its error, which is the user's own and no copy.
    errors = [result for result in results if isinstance(result, BrokenStreamError)]
    assert [error.position for error in errors] == sorted(failing)[: len(errors)]
    assert all(
        str(error) == f"broken before sample {error.position}" for error in errors
    )
    mended = make(())
    mended.load_state_dict(state)
    check_all_once(first + samples_of(outcomes(iter(mended))))


def test_a_loader_that_gave_a_sample_twice_would_be_seen():
    with pytest.raises(AssertionError):
        check_all_once([*range(SAMPLES), 3])
    with pytest.raises(AssertionError):
        check_all_once(range(1, SAMPLES))


class ReadOnce(IterableDataset):
    def __init__(self, samples):
        self.samples = iter(samples)

    def __iter__(self):
        return self.samples


class ReadAgain(ReadOnce):
    def __iter__(self):
        return iter(range(SAMPLES))


def test_a_stream_that_is_empty_from_its_second_epoch_on_is_told(recwarn):
    loader = build_loader(ReadOnce(range(SAMPLES)), batch_size=5)
    assert len(list(loader)) == 5
    assert not recwarn.list

    with pytest.warns(RuntimeWarning, match="epoch 1 has no batches") as told:
        assert list(loader) == []
    assert told[0].filename == __file__


def test_a_stream_that_begins_anew_is_not(recwarn):
    loader = build_loader(ReadAgain(()), batch_size=5)
    assert [len(list(loader)) for _ in range(3)] == [5, 5, 5]

    resumed = build_loader(ReadAgain(()), batch_size=5)
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == 5
    assert not recwarn.list


# The epoch behind an error


class KeepsItsPlace(IterableDataset):
    """Goes on where it was, whoever iterates over it; fails once."""

    def __init__(self):
        self.place, self.has_failed = 0, False

    def __iter__(self):
        while self.place < 8:
            self.place += 1
            if self.place == 6 and not self.has_failed:
                self.has_failed = True
                raise BrokenStreamError(self.place)
            yield self.place
        self.place = 0


class SaysItsPlace(KeepsItsPlace):
    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def read_epochs(loader, leaves):
    """What three epochs give, the first of which may be left."""
    epochs = []
    for epoch in range(3):
        batches = []
        try:
            for batch in loader:
                batches.append(batch.tolist())
                if leaves and epoch == 0:
                    break
        except BrokenStreamError:
            batches.append("an error")
        epochs.append(batches)
    return epochs


@pytest.mark.parametrize("kind", [KeepsItsPlace, SaysItsPlace])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_stream_that_keeps_its_place_goes_on_as_with_torch(kind, leaves):
    epochs = read_epochs(build_loader(kind(), batch_size=2, num_workers=0), leaves)

    assert epochs == read_epochs(DataLoader(kind(), batch_size=2), leaves)
    assert epochs[1] not in (epochs[0], epochs[2])


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("kind", [KeepsItsPlace, SaysItsPlace])
@pytest.mark.parametrize("is_kept", [False, True])
def test_in_a_kept_worker_it_goes_on_too_and_a_new_one_has_a_copy(kind, is_kept):
    # Not those of torch's workers, whose end took 5 s in one of three runs.
    in_this_process = read_epochs(DataLoader(kind(), batch_size=2), leaves=False)
    loader = build_loader(
        kind(), batch_size=2, num_workers=1, persistent_workers=is_kept
    )

    epochs = read_epochs(loader, leaves=False)

    assert epochs == (in_this_process if is_kept else 3 * in_this_process[:1])
