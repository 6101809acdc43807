"""Whatever is assigned to a loader counts in its next epoch, or is refused."""

import pickle
import time

import pytest
import torch
from torch.utils.data import DataLoader

from loaderkit import build_loader
from loaderkit.errors import LoaderkitError
from loaderkit.loader import assigned

NAMES = [name for name in vars(DataLoader([0])) if not name.startswith("_")]
"""What torch's DataLoader shows."""
NAMES += [
    name
    for name, member in vars(DataLoader).items()
    if isinstance(member, property) and not name.startswith("_")
]
MARKS = []
"""What ``worker_init_fn`` leaves in its worker."""


class Rows(torch.utils.data.Dataset):
    slow = 0.0

    def __len__(self):
        return 16

    def __getitem__(self, row):
        time.sleep(self.slow)
        return row, len(MARKS), torch.rand(()).item()


def mark(_worker):
    MARKS.append(1)


def negative(samples):
    return [-row for row, _, _ in samples]


def rows_of(epoch):
    return torch.cat([batch[0] for batch in epoch]).tolist()


def random_numbers_of(epoch):
    return torch.cat([batch[2] for batch in epoch]).tolist()


OTHERS = {
    "dataset": Rows(),
    "num_workers": 1,
    "prefetch_factor": 5,
    "pin_memory": True,
    "pin_memory_device": "cpu",
    "timeout": 0.2,
    "worker_init_fn": mark,
    "batch_size": 3,
    "drop_last": True,
    "sampler": range(16),
    "batch_sampler": [[0]],
    "generator": torch.Generator().manual_seed(9),
    "collate_fn": negative,
    "persistent_workers": None,
    "in_order": False,
    "multiprocessing_context": "spawn",
}
WORKERS = {
    "none": {"num_workers": 0},
    "new": {"num_workers": 2, "persistent_workers": False},
    "kept": {"num_workers": 2, "persistent_workers": True},
}
MOMENTS = ("before the first epoch", "after it", "in the middle of it", "after a break")


def loader_at(moment, workers):
    """Bring a loader to a moment.

    Returns:
        It, what is left of its running epoch, and the number of the next one.
    """
    loader = build_loader(Rows(), batch_size=4, shuffle=True, **workers)
    if moment == "after it":
        list(loader)
    running = None
    if moment in {"in the middle of it", "after a break"}:
        running = iter(loader)
        next(running)
    if moment == "after a break":
        running = None
    return loader, running, int(moment != "before the first epoch")


def test_every_attribute_of_torchs_loader_is_tried():
    assert set(NAMES) <= OTHERS.keys()


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("workers", WORKERS)
def test_what_was_decided_when_the_loader_was_built_is_refused(workers):
    for moment in ("before the first epoch", "after it"):
        loader, *_ = loader_at(moment, WORKERS[workers])
        for name in set(NAMES) - EFFECTS.keys():
            before = getattr(loader, name)
            with pytest.raises(LoaderkitError) as refused:
                setattr(loader, name, OTHERS[name])
            assert "build_loader(dataset, " in refused.value.fix
            assert getattr(loader, name) is before
        assert sorted(rows_of(loader)) == list(range(16))
        loader.close()


def test_what_has_no_effect_without_workers_is_refused():
    for name in ("timeout", "worker_init_fn"):
        loader, *_ = loader_at("after it", WORKERS["none"])
        with pytest.raises(LoaderkitError, match="without workers"):
            setattr(loader, name, OTHERS[name])


CASES = [
    (workers, name)
    for workers in WORKERS
    for name in ("generator", "collate_fn", "timeout", "worker_init_fn")
    if workers != "none" or name in {"generator", "collate_fn"}
]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "name"), CASES)
def test_what_is_assigned_counts_in_the_next_epoch(workers, name):
    for moment in MOMENTS[: 2 if name == "timeout" else 4]:
        loader, running, epoch = loader_at(moment, WORKERS[workers])
        OTHERS["generator"].manual_seed(9)

        setattr(loader, name, OTHERS[name])

        if running is not None:
            assert len(rows_of(running)) == 12, "the running epoch stays as it began"
        EFFECTS[name](loader, epoch)
        loader.close()


def new_seed_counts(loader, epoch):
    wanted = build_loader(
        Rows(),
        batch_size=4,
        shuffle=True,
        num_workers=0,
        generator=torch.Generator().manual_seed(9),
    )
    wanted.set_epoch(epoch)
    expected = list(wanted)
    batches = list(loader)
    assert rows_of(batches) == rows_of(expected)
    assert random_numbers_of(batches) == random_numbers_of(expected)
    assert loader.plan.seed.value == wanted.plan.seed.value
    assert loader.state_dict()["seed"] == wanted.state_dict()["seed"]
    assert len(list(pickle.loads(pickle.dumps(loader)))) == 4


def timeout_counts(loader, _):
    assert loader.timeout == 0.2
    loader.dataset.slow = 0.1
    with pytest.raises(RuntimeError, match=r"timed out|timeout"):
        list(loader)


def init_counts(loader, _):
    assert [mark for batch in loader for mark in batch[1].tolist()] == [1] * 16


def collate_counts(loader, _):
    assert sorted(row for batch in loader for row in batch) == list(range(-15, 1))


EFFECTS = {
    "generator": new_seed_counts,
    "timeout": timeout_counts,
    "worker_init_fn": init_counts,
    "collate_fn": collate_counts,
}


def test_what_may_be_assigned_is_what_has_an_effect():
    assert EFFECTS.keys() == assigned.MAY_BE_ASSIGNED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("collate_fn", value) for value in (None, 3, "f")),
        *(("generator", value) for value in (3, "g", torch.Generator)),
        *(("timeout", value) for value in (-1, "5", None)),
        *(("worker_init_fn", value) for value in (3, "f")),
    ],
)
def test_what_an_option_cannot_be_is_refused_when_it_is_assigned(name, value):
    loader = build_loader(Rows(), batch_size=4, num_workers=0)
    before = getattr(loader, name)

    with pytest.raises(LoaderkitError):
        setattr(loader, name, value)

    assert getattr(loader, name) is before


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"seed": 1}, "generator", torch.Generator()),
        ({"follow_batch": ["x"]}, "collate_fn", negative),
        ({"exclude_keys": ["x"]}, "collate_fn", negative),
        ({"batch_transform": list}, "collate_fn", negative),
        ({}, "timeout", 5),
        ({}, "worker_init_fn", mark),
    ],
)
def test_what_puts_an_option_out_of_effect_is_refused(options, name, value):
    loader = build_loader(Rows(), batch_size=4, num_workers=0, **options)

    with pytest.raises(LoaderkitError, match=r"given with|without workers|changed"):
        setattr(loader, name, value)


@pytest.mark.slow
def test_the_seeds_of_workers_that_a_library_sets_pass_without_workers():
    # Lightning does so for every loader after seed_everything(workers=True).
    from lightning.fabric.utilities.seed import pl_worker_init_function

    loader = build_loader(Rows(), batch_size=4, num_workers=0)

    loader.worker_init_fn = pl_worker_init_function

    assert len(list(loader)) == 4


def test_a_seed_that_is_drawn_anew_waits_for_the_end_of_an_epoch_that_was_loaded():
    options = {"batch_size": 4, "shuffle": True, "num_workers": 0}
    loader = build_loader(Rows(), **options)
    epoch = iter(loader)
    first = next(epoch)
    state = loader.state_dict()
    rest = rows_of(epoch)

    again = build_loader(Rows(), **options)
    again.load_state_dict(state)
    again.generator = torch.Generator().manual_seed(9)

    assert rows_of(again) == rest
    assert sorted(rest + first[0].tolist()) == list(range(16))
    new_seed_counts(again, 1)


def test_no_attribute_of_a_loader_can_be_deleted():
    loader = build_loader(Rows(), batch_size=4, num_workers=0)
    for name in NAMES:
        with pytest.raises((LoaderkitError, AttributeError)):
            delattr(loader, name)
    assert len(list(loader)) == 4
