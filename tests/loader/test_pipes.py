"""Data pipes: shuffled, shared out among workers and ranks, and resumed."""

import collections
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph_settings import apply_sharding, apply_shuffle_settings

from loaderkit import build_loader
from loaderkit.errors import LoaderError, OptionError


def doubled(value):
    return 2 * value


def is_small(value):
    return value < 40


STAGES = {
    "shuffle": lambda pipe: pipe.shuffle(buffer_size=7),
    "share": lambda pipe: pipe.sharding_filter(),
    "map": lambda pipe: pipe.map(doubled),
    "filter": lambda pipe: pipe.filter(is_small),
}


def pipe_of(samples, stages):
    pipe = IterableWrapper(list(range(samples)))
    for stage in stages:
        pipe = STAGES[stage](pipe)
    return pipe


def rows(batches):
    return [value for batch in batches for value in batch.tolist()]


def torchs_rows(samples, stages, *, num_workers, shuffle, batch_size, drop_last):
    """Give what torch's DataLoader gives, in its order, without starting its workers.

    They ended in a wrong way once, on a busy machine; and what each does is public: its
    pipe is shuffled or not and shared out, and batches are taken from each in turn.
    """
    batches = []
    for worker in range(max(1, num_workers)):
        pipe = apply_shuffle_settings(pipe_of(samples, stages), shuffle)
        pipe = apply_sharding(pipe, max(1, num_workers), worker)
        batches.append(list(pipe.batch(batch_size, drop_last=drop_last)))
    turns = itertools.zip_longest(*batches, fillvalue=())
    return [value for turn in turns for batch in turn for value in batch]


STAGE_LISTS = st.lists(st.sampled_from(sorted(STAGES)), max_size=4).filter(
    lambda stages: stages.count("share") <= 1  # torch refuses a second one
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.shuffle=True. was set")  # torch's own
@pytest.mark.filterwarnings("ignore:the . workers give the same batches")
@settings(max_examples=12)
@given(
    st.integers(0, 30),
    STAGE_LISTS,
    st.sampled_from([0, 1, 2]),
    st.integers(1, 4),
    st.sampled_from([None, False, True]),
    st.booleans(),
)
def test_workers_give_what_torch_gives(samples, stages, workers, size, shuffle, drop):
    options = {"batch_size": size, "num_workers": workers, "drop_last": drop}
    torchs = torchs_rows(samples, stages, shuffle=shuffle, **options)
    loader = build_loader(
        pipe_of(samples, stages), shuffle=shuffle, probe=False, **options
    )

    ours = rows(loader)

    shuffled = shuffle or (shuffle is None and "shuffle" in stages)
    if not shuffled:
        assert ours == torchs
    elif not drop:  # which samples are left out follows from the order
        assert collections.Counter(ours) == collections.Counter(torchs)
    else:
        assert len(ours) == len(torchs)


@pytest.mark.slow
@settings(max_examples=6)
@given(
    st.integers(0, 20),
    st.integers(1, 3),
    st.sampled_from([0, 2]),
    st.booleans(),
)
def test_ranks_share_a_pipe_in_equal_steps(samples, ranks, workers, drop):
    rows_of_ranks = []
    for rank in range(ranks):
        loader = build_loader(
            pipe_of(samples, ["shuffle", "share"]),
            rank=rank,
            world_size=ranks,
            num_workers=workers,
            drop_last=drop,
            probe=False,
        )
        rows_of_ranks.append(rows(loader))

    assert len({len(part) for part in rows_of_ranks}) == 1
    given_rows = collections.Counter(itertools.chain(*rows_of_ranks))
    if not drop:
        assert set(given_rows) == set(range(samples))
        assert sum(given_rows.values()) - samples <= (ranks - 1) * max(1, workers)
    else:
        assert max(given_rows.values(), default=1) == 1


@pytest.mark.parametrize(
    ("workers", "persistent"),
    [
        (0, False),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_each_epoch_has_an_order_of_its_own_that_follows_from_the_seed(
    workers, persistent
):
    def make():
        return build_loader(
            pipe_of(20, ["shuffle", "share"]),
            seed=3,
            num_workers=workers,
            persistent_workers=persistent,
            probe=False,
        )

    loader, again = make(), make()
    first, second = rows(loader), rows(loader)

    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert [rows(again), rows(again)] == [first, second]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_rest_of_a_shuffled_pipe_is_equal(workers):
    def make():
        return build_loader(
            pipe_of(20, ["shuffle", "share"]),
            num_workers=workers,
            probe=False,
            batch_size=2,
        )

    loader, fresh = make(), make()
    list(loader)
    running = iter(loader)
    rows(itertools.islice(running, 3))
    state = loader.state_dict()

    fresh.load_state_dict(state)

    assert rows(fresh) == rows(running)
    assert rows(fresh) == rows(loader)


def test_shuffle_turns_the_shufflers_of_a_pipe_off():
    loader = build_loader(pipe_of(20, ["shuffle"]), shuffle=False, num_workers=0)

    assert rows(loader) == list(range(20))


def test_a_pipe_that_shares_itself_out_needs_no_word_on_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    loader = build_loader(pipe_of(10, ["share"]), num_workers=0)

    assert rows(loader) == [1, 3, 5, 7, 9]
    with pytest.raises(LoaderError, match="rank 1 of 2"):
        build_loader(pipe_of(10, []), num_workers=0)


def test_a_pipe_has_no_blocks_to_shuffle():
    with pytest.raises(OptionError, match="shuffle"):
        build_loader(pipe_of(10, []), shuffle="block")
