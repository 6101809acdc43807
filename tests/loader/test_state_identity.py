"""A state is that of its samples: over another cache it is refused, however long."""

import itertools
import json
import re
import shutil

import pytest
import torch
from torch.utils.data import Subset

from loaderkit import build_loader, concat, extend, open_cache, pack
from loaderkit.errors import LoaderError

COUNT = 24


def samples(first=0):
    return [{"x": torch.full((2,), n)} for n in range(first, first + COUNT)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("caches")
    for name, first in (("a", 0), ("again", 0), ("other", 100)):
        pack(samples(first), path / name, workers=0)
    pack(samples(), path / "small shards", workers=0, shard_bytes=200)
    shutil.copytree(path / "a", path / "copy")
    concat([path / "a"], path / "linked")
    return path


SAME = {
    "the same": lambda path: open_cache(path / "a"),
    "packed again": lambda path: open_cache(path / "again"),
    "copied": lambda path: open_cache(path / "copy"),
    "behind a URL": lambda path: open_cache(
        f"file://{path}/a", mirror=path.parent / "mirror"
    ),
    "with a transform": lambda path: open_cache(path / "a", transform=dict),
}
OTHERS = {
    "other samples": lambda path: open_cache(path / "other"),
    "other shards": lambda path: open_cache(path / "small shards"),
    "joined": lambda path: open_cache(path / "linked"),
    "in another order": lambda path: open_cache(path / "a")[::-1],
    "rows that repeat": lambda path: open_cache(path / "a")[[0] * COUNT],
    "a subset of another": lambda path: Subset(open_cache(path / "other"), ROWS),
    "another subset": lambda path: Subset(open_cache(path / "a"), ROWS[::-1]),
}
UNKNOWN = {
    "a list": lambda path: list(open_cache(path / "a")),
    "code of the user's": lambda path: Subset(list(open_cache(path / "a")), ROWS),
}
ROWS = list(range(COUNT))
LOADERS = {
    "in order": {"batch_size": 4},
    "shuffled": {"batch_size": 4, "shuffle": True, "seed": 0},
    "blocks": {"batch_size": 4, "shuffle": "block", "seed": 0},
    "a sampler": {"batch_size": 4, "sampler": range(COUNT)},
}


def loader_over(dataset, how):
    return build_loader(dataset, num_workers=0, **LOADERS[how])


def state_after(loader, batches):
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return loader.state_dict()


@pytest.mark.many_cases(quick=8)
@pytest.mark.parametrize("how", sorted(LOADERS))
@pytest.mark.parametrize("batches", [0, 2, 6])
@pytest.mark.parametrize("kind", [*SAME, *OTHERS, *UNKNOWN])
def test_a_state_is_refused_over_the_samples_of_another_cache(
    folder, kind, batches, how
):
    state = state_after(loader_over(open_cache(folder / "a"), how), batches)
    loader = loader_over({**SAME, **OTHERS, **UNKNOWN}[kind](folder), how)

    if kind == "behind a URL" and how == "blocks":
        # There blocks go shard by shard, which is another order of the same samples.
        with pytest.raises(LoaderError, match="The state has"):
            loader.load_state_dict(state)
    elif kind in OTHERS:
        with pytest.raises(LoaderError, match="another cache, or over other rows"):
            loader.load_state_dict(state)
        with pytest.raises(LoaderError, match=r"set_epoch\(state\['epoch'\] \+ 1\)"):
            loader.load_state_dict(state)
    else:
        loader.load_state_dict(state)


def test_a_part_goes_on_with_the_same_part_alone(folder):
    part = open_cache(folder / "a")[ROWS[::2]]
    state = state_after(build_loader(part, batch_size=2, num_workers=0), 2)

    again = build_loader(open_cache(folder / "a")[::2], batch_size=3, num_workers=0)
    again.load_state_dict(state)
    assert [int(n) for batch in again for n in batch["x"][:, 0]] == ROWS[8::2]

    others = build_loader(open_cache(folder / "a")[1::2], batch_size=2, num_workers=0)
    with pytest.raises(LoaderError, match="another cache, or over other rows"):
        others.load_state_dict(state)


def test_a_state_of_the_version_before_says_of_no_cache_and_is_read(folder):
    state = state_after(loader_over(open_cache(folder / "a"), "shuffled"), 2)
    before = {**state, "version": 7}
    del before["dataset"]

    loader = loader_over(open_cache(folder / "other"), "shuffled")
    loader.load_state_dict(before)

    assert len(list(loader)) == 4
    assert loader.state_dict()["version"] == 8


def test_a_state_of_no_cache_is_read_over_one(folder):
    state = state_after(loader_over(samples(), "shuffled"), 2)

    loader_over(open_cache(folder / "a"), "shuffled").load_state_dict(state)

    assert state["dataset"] is None


@pytest.mark.parametrize("value", [3, ["a"], b"a"])
def test_what_is_no_name_of_a_cache_is_refused(folder, value):
    loader = loader_over(open_cache(folder / "a"), "shuffled")

    with pytest.raises(LoaderError, match="dataset must be a text"):
        loader.load_state_dict({**loader.state_dict(), "dataset": value})


def test_a_state_within_a_checkpoint_or_a_file_is_answered_with_how_to_get_it(
    tmp_path, folder
):
    loader = build_loader(open_cache(folder / "a"), batch_size=2)
    state = loader.state_dict()
    torch.save(state, tmp_path / "loader.pt")
    given = {
        "a checkpoint": {"model": {}, "loader": state},
        "a file": str(tmp_path / "loader.pt"),
        "a text": json.dumps(state),
    }
    for name, wrong in given.items():
        with pytest.raises(LoaderError, match="no state of a loader") as raised:
            loader.load_state_dict(wrong)
        names = {"json": json, "torch": torch, "state": wrong, "text": wrong}
        call = f"loader.{raised.value.fix}"
        eval(call, {"loader": loader, **names})
        assert loader.state_dict()["batches"] == 0, name


def numbers(start, stop):
    return [{"x": torch.tensor([number])} for number in range(start, stop)]


@pytest.mark.many_cases(quick=3)
@pytest.mark.parametrize("shuffle", [True, "block"])
@pytest.mark.parametrize(("batches", "given_before"), [(None, 5), (2, 2), (5, 5)])
def test_with_samples_that_were_added_it_says_which_epoch_has_them_all(
    tmp_path, shuffle, batches, given_before
):
    options = {"batch_size": 4, "shuffle": shuffle, "seed": 1}
    loader = build_loader(pack(numbers(0, 20), tmp_path / "c.lk", workers=0), **options)
    batches_of_epoch = list(itertools.islice(loader, batches))
    state = loader.state_dict()

    dataset = extend(tmp_path / "c.lk", numbers(20, 26), workers=0)
    grown = build_loader(dataset, **options)
    with pytest.raises(LoaderError, match=r"of 20 samples, and .* 26") as caught:
        grown.load_state_dict(state)
    [call] = re.findall(r"loader\.set_epoch\(.*?\)", caught.value.fix)
    eval(call, {"loader": grown, "state": state})

    # An epoch that had begun is over; of one that had not, none is left out.
    assert grown.state_dict()["epoch"] == 1
    given = torch.cat([batch["x"] for batch in grown]).flatten().tolist()
    assert sorted(given) == list(range(26))
    assert len(batches_of_epoch) == given_before
