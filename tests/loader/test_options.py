"""Every option has its effect or is refused: what, why, fix."""

import os
import re
import resource
import sys
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from data import Counting, Graphs, Slow, graph
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch_geometric.data import Data

import loaderkit
from loaderkit import build_loader
from loaderkit.errors import LoaderError, LoaderkitError, OptionError
from loaderkit.loader.options import LoaderOptions, check_variables, parse_variable

pytestmark = pytest.mark.filterwarnings("ignore:. workers share")
NUMBERS = list(range(12))


class Mute:
    """Cannot even be shown."""

    def __repr__(self):
        raise RuntimeError

    def __eq__(self, other):
        raise RuntimeError

    __hash__ = object.__hash__


NO_COUNT = [0, -1, 2.5, "32", "many", True, None.__class__, [3], float("nan"), 1 + 1j]
NO_TRUTH = [1, 0, "yes", "x", 2.0, [], {}, torch.ones(2)]
NO_WORD = ["forks", "", 1, True, 2.5, ["fork"], b"fork"]
NO_FUNCTION = [5, "sum", [sum], {}]
NO_NAMES = ["x", 5, [1], [None], b"x"]
NO_SAMPLER = [5, "ab", 2.5, True, np.int64(2), np.array(2), torch.tensor(2)]
WRONG = {
    "batch_size": NO_COUNT,
    "max_nodes": NO_COUNT,
    "max_edges": NO_COUNT,
    "max_bytes": [*(v for v in NO_COUNT if v != "32"), "32 parsecs", "-1 MiB"],
    "max_tokens": NO_COUNT,
    "buckets": [*NO_COUNT, None],
    "prefetch_factor": NO_COUNT,
    "num_workers": NO_COUNT[1:],
    "read_ahead": NO_COUNT[1:],
    "pin_memory": NO_TRUTH,
    "persistent_workers": NO_TRUTH,
    "in_order": NO_TRUTH,
    "drop_last": [*NO_TRUTH, None],
    "lookahead": [*NO_TRUTH, None],
    "probe": [*NO_TRUTH, None],
    "multiprocessing_context": NO_WORD,
    "oversized": ["no", "", 1, True, None, None.__class__],
    "shuffle": ["yes", 1, "blocks", 2.5, [True]],
    "bucket_by": [5, True, ["nodes"], ""],
    "seed": ["a", "1", 1.5, True, 2**64, -(2**63) - 1, [1]],
    "timeout": [None, -1, "5", float("nan"), float("inf"), True, [1]],
    "collate_fn": NO_FUNCTION,
    "batch_transform": NO_FUNCTION,
    "worker_init_fn": NO_FUNCTION,
    "follow_batch": NO_NAMES,
    "exclude_keys": NO_NAMES,
    "sampler": NO_SAMPLER,
    "batch_sampler": NO_SAMPLER,
    "generator": [5, "a", np.random.default_rng(0)],
    "rank": [0, -1, "0", 1.5, True],
    "world_size": [0, -1, "2", 2.5, True],
}


def says_what_why_and_fix(error):
    return bool(error.what and error.fix)


def test_every_option_has_wrong_values_to_be_tried():
    assert set(WRONG) == set(LoaderOptions.__dataclass_fields__)


@pytest.mark.slow
@settings(max_examples=250)
@given(st.data())
def test_a_wrong_value_is_refused_by_the_options_name(data):
    name = data.draw(st.sampled_from(sorted(WRONG)))
    value = data.draw(st.sampled_from(WRONG[name]))

    with pytest.raises(OptionError, match=name) as caught:
        build_loader(NUMBERS, **{name: value})

    assert says_what_why_and_fix(caught.value)
    assert caught.value.why
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TypeError)
    code = caught.value.fix.partition(", or ")[0]
    values = r"[\d.-]+|True|False|'[^']*'|\[[^]]*\]|lambda .*|torch.Generator.*"
    if re.fullmatch(f"{name}=({values})", code):
        others = BELONGS_TO.get(name, {})
        LoaderOptions(**{**others, **eval(f"dict({code})", {"torch": torch})})


BELONGS_TO = {
    "rank": {"world_size": 9},
    "world_size": {"rank": 0},
    "buckets": {"bucket_by": "nodes"},
    "oversized": {"max_nodes": 3},
}
"""Options that others need beside them."""


MEANT = {
    **dict.fromkeys(["False", "false", "no", "off", "0", "n", "None", "", 0.0], False),
    **dict.fromkeys(["True", "TRUE", "yes", "on", "1", "y", 2, 1.0], True),
}
TRUTHS = ["shuffle", "drop_last", "pin_memory", "persistent_workers", "in_order"]
TRUTHS += ["lookahead", "probe"]


@pytest.mark.parametrize("name", TRUTHS)
def test_the_fix_for_a_truth_in_other_words_is_what_was_meant(name):
    for given_value, meant in MEANT.items():
        with pytest.raises(OptionError) as caught:
            LoaderOptions(**{name: given_value})
        assert caught.value.fix == f"{name}={meant}", given_value


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("1k", 1000),
        ("32", 32),
        ("1,000", 1000),
        ("1 000", 1000),
        ("1_000", 1000),
        ("1e3", 1000),
    ],
)
@pytest.mark.parametrize("name", ["batch_size", "max_nodes", "num_workers", "rank"])
def test_the_fix_for_a_number_in_other_words_is_what_was_meant(name, text, meant):
    others = {"world_size": 2000} if name == "rank" else {}

    with pytest.raises(OptionError) as caught:
        LoaderOptions(**{name: text}, **others)

    assert caught.value.fix == f"{name}={meant}"


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("batch_size", "32", "batch_size=32"),
        ("num_workers", 2.0, "num_workers=2"),
        ("oversized", "skipped", "oversized='skip'"),
        ("shuffle", 1, "shuffle=True"),
        ("follow_batch", "x", "follow_batch=['x']"),
    ],
)
def test_the_fix_is_the_nearest_value(name, value, fix):
    with pytest.raises(OptionError) as caught:
        build_loader(NUMBERS, **{name: value})

    assert caught.value.fix == fix


def edit_distance(word, other):
    """Count the letters to change, leave out or put in between two words."""
    distances = list(range(len(other) + 1))
    for row, letter in enumerate(word, 1):
        before, distances[0] = distances[0], row
        for column, other_letter in enumerate(other, 1):
            changed = before + (letter != other_letter)
            before = distances[column]
            distances[column] = min(changed, before + 1, distances[column - 1] + 1)
    return distances[-1]


@given(st.sampled_from(sorted(WRONG)), st.integers(0, 30), st.characters(codec="ascii"))
def test_a_misspelt_option_is_refused_with_the_nearest(name, at, letter):
    misspelt = name[: at % len(name)] + letter + name[at % len(name) + 1 :]
    assume(misspelt not in WRONG)

    with pytest.raises(OptionError) as caught:
        build_loader(NUMBERS, **{misspelt: 1})

    [nearest] = re.findall(r"did you mean '(\w+)'", caught.value.fix)
    assert nearest in WRONG
    # Another option may be as near: "max_ndges" is one letter off "max_edges", two off
    # "max_nodes".
    assert edit_distance(misspelt, nearest) <= 2


def test_values_of_numpy_are_values():
    loader = build_loader(
        NUMBERS,
        batch_size=np.int64(5),
        drop_last=np.bool_(True),
        seed=np.uint64(7),
        num_workers=np.int8(0),
    )

    assert [len(batch) for batch in loader] == [5, 5]


def test_a_context_says_how_workers_start():
    loader = build_loader(
        NUMBERS,
        num_workers=1,
        multiprocessing_context=get_context("spawn"),
        probe=False,
    )

    assert loader.plan.multiprocessing_context.value == "spawn"


NAMES_OF_VARIABLES = [
    "NUM_WORKERS",
    "MAX_WORKERS",
    "PIN_MEMORY",
    "PREFETCH_FACTOR",
    "READ_AHEAD",
    "IN_ORDER",
    "PERSISTENT_WORKERS",
    "MULTIPROCESSING_CONTEXT",
]


@given(
    st.sampled_from(NAMES_OF_VARIABLES),
    st.sampled_from(["two", "-1", "1.5", "nix", " "]),
)
def test_a_variable_that_makes_no_sense_is_refused(name, text):
    with pytest.raises(OptionError, match=name) as caught:
        check_variables({f"LOADERKIT_{name}": text})

    assert says_what_why_and_fix(caught.value)
    assert "str" not in caught.value.why  # as all variables are
    variable, _, advised = caught.value.fix.partition("=")
    check_variables({variable: advised})


@pytest.mark.parametrize(
    "name", ["NUMWORKERS", "NUM_WORKER", "BATCH_SIZE", "PINMEMORY"]
)
def test_a_misspelt_variable_is_refused(name, monkeypatch):
    monkeypatch.setenv(f"LOADERKIT_{name}", "1")

    with pytest.raises(OptionError, match=f"no variable LOADERKIT_{name}"):
        build_loader(NUMBERS)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("SEED", "build_loader(..., seed=1)"),
        ("BATCH_SIZE", "build_loader(..., batch_size=1)"),
        ("WORKERS", "did you mean 'LOADERKIT_NUM_WORKERS'?"),
        ("PINMEMORY", "did you mean 'LOADERKIT_PIN_MEMORY'?"),
        ("DEBUG", "it is one of LOADERKIT_NUM_WORKERS, "),
        ("HOME", "it is one of LOADERKIT_NUM_WORKERS, "),
    ],
)
def test_a_variable_that_there_is_not_is_not_taken_for_any_other(name, fix):
    # All begin alike, which makes none of them near.
    with pytest.raises(OptionError) as caught:
        check_variables({f"LOADERKIT_{name}": "1"})

    assert caught.value.fix.startswith(fix)


@pytest.mark.parametrize("given", [{"rank": 3}, {"world_size": 4}, {"rank": 0}])
def test_half_of_a_rank_is_answered_with_the_half_that_was_given(given):
    with pytest.raises(OptionError, match="belong together") as caught:
        LoaderOptions(**given)

    advised = eval(f"dict({caught.value.fix.partition(', or ')[0]})")
    assert given.items() <= advised.items()
    LoaderOptions(**advised)


@pytest.mark.parametrize(
    ("word", "meant"),
    [("drop", "skip"), ("ignore", "skip"), ("error", "raise"), ("keep", "alone")],
)
def test_what_becomes_of_large_samples_is_known_under_other_names(word, meant):
    with pytest.raises(OptionError) as caught:
        LoaderOptions(oversized=word, max_nodes=3)

    assert caught.value.fix == f"oversized={meant!r}"


def test_variables_take_the_values_of_their_options():
    assert parse_variable("LOADERKIT_NUM_WORKERS", " 2 ") == 2
    assert parse_variable("LOADERKIT_PIN_MEMORY", "0") is False
    assert parse_variable("LOADERKIT_IN_ORDER", "Yes") is True
    check_variables({"LOADERKIT_NUM_WORKERS": "", "HOME": "x"})


def test_a_warning_about_a_loader_is_of_the_line_that_builds_it():
    with pytest.warns(RuntimeWarning) as caught:
        build_loader(NUMBERS, pin_memory=True, probe=False)

    assert {warning.filename for warning in caught} == {__file__}


class Unsized:
    def __getitem__(self, row):
        return row


class Table:
    iloc = None

    def __len__(self):
        return 3

    def __getitem__(self, name):
        raise KeyError(name)


NO_DATASETS = {
    "path": lambda: "molecules.lk",
    "bytes": lambda: b"molecules",
    "Path": lambda: __import__("pathlib").Path("molecules.lk"),
    "nothing": lambda: None,
    "number": lambda: 5,
    "class": lambda: Slow,
    "loader": lambda: DataLoader(NUMBERS),
    "our loader": lambda: build_loader(NUMBERS),
    "graph": lambda: graph(3),
    "model": lambda: torch.nn.Sequential(torch.nn.Linear(1, 1)),
    "dict by name": lambda: {"a": 1, "b": 2},
    "dict with a gap": lambda: {0: 1, 2: 2},
    "set": lambda: {1, 2},
    "generator": lambda: (number for number in NUMBERS),
    "iterator": lambda: iter(NUMBERS),
    "table": Table,
    "without length": Unsized,
    "scalar": lambda: torch.tensor(3),
    "function": lambda: len,
}


@pytest.mark.parametrize("kind", sorted(NO_DATASETS))
def test_what_is_no_dataset_is_refused(kind):
    with pytest.raises(OptionError) as caught:
        build_loader(NO_DATASETS[kind]())

    assert says_what_why_and_fix(caught.value)
    assert caught.value.why


def test_a_batch_size_in_place_of_the_device_is_refused():
    with pytest.raises(OptionError) as caught:
        build_loader(NUMBERS, 32)

    assert "batch_size=32" in caught.value.fix


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_value_that_cannot_be_shown_is_refused_by_its_type(name):
    with pytest.raises(OptionError, match=f"(?s){name}.*Mute"):
        build_loader(NUMBERS, **{name: Mute()})


@pytest.mark.slow
@given(st.lists(st.integers(-15, 15), min_size=1, max_size=6), st.booleans())
def test_a_subset_is_refused_exactly_where_torch_cannot_read_it(indices, is_tensor):
    whole = TensorDataset(torch.arange(12)) if is_tensor else NUMBERS
    subset = Subset(Subset(whole, range(12)[::-1]), indices)
    try:
        samples = [subset[row] for row in range(len(subset))]
    except IndexError:
        samples = None

    if samples is not None:
        assert len(build_loader(subset, batch_size=1, probe=False)) == len(samples)
        return
    with pytest.raises(OptionError, match="A Subset names row") as caught:
        build_loader(subset, batch_size=1, probe=False)
    assert any(f"row {index} of 12" in str(caught.value) for index in indices)


def test_a_dataset_that_repeats_its_samples_has_more_rows_than_its_length():
    class Repeated(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, row):
            return row % 4

    repeated = Subset(Repeated(), [0, 7])

    assert len(build_loader(repeated, batch_size=1, probe=False)) == 2


@pytest.mark.parametrize("device", ["x", "", "cuda:x", "auto", Mute(), None])
def test_what_is_no_device_is_refused(device):
    with pytest.raises(OptionError, match="device") as caught:
        build_loader(NUMBERS, device)

    assert says_what_why_and_fix(caught.value)


def test_more_ranks_than_there_can_be_are_refused():
    with pytest.raises(OptionError, match="world_size"):
        build_loader(NUMBERS, rank=0, world_size=2**70)


@pytest.mark.parametrize("number", [torch.tensor([1, 2]), np.array([1, 2]), [1, 2]])
def test_rows_in_place_of_batches_are_refused(number):
    with pytest.raises(OptionError, match="as a batch"):
        list(build_loader(NUMBERS, batch_sampler=number, num_workers=0))


def test_an_empty_batch_is_told_as_such():
    loader = build_loader(NUMBERS, batch_sampler=[[1], []], num_workers=0)

    with pytest.raises(LoaderError, match="A batch without samples") as caught:
        list(loader)

    assert "batch_sampler" in caught.value.fix
    lengths = build_loader(NUMBERS, batch_sampler=[[1], []], collate_fn=len)
    assert list(lengths) == [1, 0]


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_a_sampler_that_has_ended_for_good_is_warned_of(name):
    rows = iter([3, 4]) if name == "sampler" else BatchSampler(iter([3, 4]), 1, False)
    loader = build_loader(NUMBERS, **{name: rows}, num_workers=0)

    assert [int(batch) for batch in loader] == [3, 4]
    with pytest.warns(RuntimeWarning, match="can be read only once"):
        assert list(loader) == []


def test_dicts_and_unsized_datasets_work_where_torch_takes_them():
    by_name = build_loader({"a": 1, "b": 2}, sampler=["b", "a"], batch_size=2)
    by_number = build_loader({0: 5, 1: 6}, batch_size=2)
    unsized = build_loader(Unsized(), batch_sampler=[[4, 2], [7]])

    assert [batch.tolist() for batch in by_name] == [[2, 1]]
    assert [batch.tolist() for batch in by_number] == [[5, 6]]
    assert [batch.tolist() for batch in unsized] == [[4, 2], [7]]


CONTRADICTIONS = [
    {"sampler": NUMBERS, "shuffle": True},
    {"sampler": NUMBERS, "batch_sampler": [[1]]},
    {"batch_sampler": [[1]], "batch_size": 2},
    {"batch_sampler": [[1]], "drop_last": True},
    {"batch_sampler": [[1]], "max_nodes": 2},
    {"sampler": NUMBERS, "bucket_by": "nodes"},
    {"collate_fn": list, "follow_batch": ["x"]},
    {"collate_fn": list, "exclude_keys": ["x"]},
    {"seed": 1, "generator": torch.Generator()},
    {"rank": 0},
    {"world_size": 2},
    {"rank": 2, "world_size": 2},
    {"oversized": "skip"},
    {"buckets": 3},
    {"num_workers": 0, "prefetch_factor": 2},
    {"num_workers": 0, "persistent_workers": True},
    {"num_workers": 0, "multiprocessing_context": "fork"},
    {"num_workers": 0, "timeout": 5},
    {"num_workers": 0, "worker_init_fn": print},
    {"num_workers": 0, "in_order": False},
]


@pytest.mark.parametrize("options", CONTRADICTIONS, ids=" ".join)
def test_a_contradiction_is_refused(options):
    with pytest.raises(LoaderkitError) as caught:
        build_loader(NUMBERS, **options)

    assert says_what_why_and_fix(caught.value)
    assert caught.value.why
    assert any(name in str(caught.value) for name in options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_nodes": 3},
        {"max_bytes": 10},
        {"shuffle": True},
        {"sampler": [1]},
        {"batch_sampler": [[1]]},
        {"bucket_by": "nodes"},
    ],
    ids=str,
)
def test_what_an_iterable_dataset_cannot_follow_is_refused(options):
    with pytest.raises(OptionError, match="iterable"):
        build_loader(Counting(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch_factor": 3},
        {"persistent_workers": True},
        {"timeout": 60},
        {"multiprocessing_context": "fork"},
        {"worker_init_fn": print},
        {"in_order": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("dataset", [NUMBERS, Counting()], ids=["list", "iterable"])
def test_what_only_workers_can_follow_gets_a_worker(dataset, options):
    plan = build_loader(dataset, batch_size=4, **options).plan

    assert plan.num_workers.value >= 1
    assert next(iter(options)) in plan.num_workers.reason


def test_a_variable_that_forbids_workers_contradicts_what_needs_one(monkeypatch):
    monkeypatch.setenv("LOADERKIT_NUM_WORKERS", "0")

    with pytest.raises(OptionError, match="timeout was given without workers"):
        build_loader(NUMBERS, timeout=5)


def test_a_generator_chooses_the_order():
    def rows(seed):
        generator = torch.Generator().manual_seed(seed)
        loader = build_loader(NUMBERS, shuffle=True, generator=generator)
        return [batch.item() for batch in loader]

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


@pytest.mark.parametrize(
    "options", [{"max_nodes": 9}, {"batch_size": 3, "bucket_by": "nodes"}]
)
def test_drop_last_leaves_out_what_the_end_cut_short(cache, options):
    every = [b.num_graphs for b in build_loader(cache, **options)]
    full = [b.num_graphs for b in build_loader(cache, drop_last=True, **options)]

    assert sum(full) < sum(every) == 40
    assert set(full) <= set(every)


def test_a_loader_without_any_batch_says_so():
    with pytest.warns(RuntimeWarning, match="no batches"):
        loader = build_loader(NUMBERS, batch_size=50, drop_last=True)

    assert list(loader) == []


def test_sizes_that_do_not_match_the_samples_are_refused():
    class Short(Graphs):
        def sizes(self):
            return {"nodes": [1, 2]}

    with pytest.raises(LoaderError, match="for 40 samples"):
        build_loader(Short(), max_nodes=5)


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "batch_size": st.integers(1, 5),
        "drop_last": st.booleans(),
        "num_workers": st.integers(0, 2),
        "timeout": st.sampled_from([0, 9.5]),
        "shuffle": st.booleans(),
        "prefetch_factor": st.integers(1, 3),
        "persistent_workers": st.booleans(),
    },
)


@pytest.mark.slow
@given(SETTINGS)
def test_the_attributes_of_a_dataloader_say_what_was_asked(options):
    options.setdefault("num_workers", 0)
    try:
        theirs = DataLoader(NUMBERS, **options)
    except ValueError:
        with pytest.raises(ValueError, match="fix: "):
            build_loader(NUMBERS, **options)
        return
    if options.get("timeout") and not options.get("num_workers"):
        return  # torch finds out in the first iteration

    ours = build_loader(NUMBERS, probe=False, **options)

    for name in ("batch_size", "drop_last", "num_workers", "timeout", "dataset"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in set(options) & {"prefetch_factor", "persistent_workers"}:
        assert getattr(ours, name) == getattr(theirs, name)
    assert len(ours) == len(theirs)
    assert len(ours.sampler) == len(theirs.sampler)
    assert len(ours.batch_sampler) == len(theirs.batch_sampler)
    assert sorted(ours.sampler) == sorted(theirs.sampler)
    if not options.get("shuffle"):
        assert list(ours.batch_sampler) == list(theirs.batch_sampler)
        assert type(ours.sampler) is type(theirs.sampler)


def test_a_given_sampler_is_the_samplers_attribute():
    rows, batches = WeightedRandomSampler([1.0] * 12, 12), [[1, 2], [3]]

    by_row = build_loader(NUMBERS, sampler=rows, batch_size=4)
    by_batch = build_loader(NUMBERS, batch_sampler=batches)

    assert by_row.sampler is rows
    assert by_row.batch_size == 4
    assert by_batch.batch_sampler is batches
    assert by_batch.batch_size is None


class Asked(Slow):
    """Says in which process it was read, and whether that worker knows it."""

    def __getitem__(self, row):
        info = torch.utils.data.get_worker_info()
        return torch.tensor([os.getpid(), info is not None and info.dataset is self])


def test_a_worker_knows_the_users_dataset():
    loader = build_loader(Asked(), batch_size=32, num_workers=1)

    drawn = torch.cat(list(loader))

    assert drawn[:, 1].all()
    assert os.getpid() not in drawn[:, 0]


def test_nothing_is_read_here_where_workers_were_asked_for():
    class Refusing(Slow):
        def __getitem__(self, row):
            assert torch.utils.data.get_worker_info() is not None
            return row

    loader = build_loader(Refusing(), batch_size=32, num_workers=1)

    assert len(list(loader)) == 2


@pytest.mark.parametrize("pause_s", [0, 0.003])
def test_the_probe_calls_collate_twice_at_most_and_with_whole_batches(pause_s):
    import time

    calls = []

    class Paused(Slow):
        def __getitem__(self, row):
            time.sleep(pause_s)
            return torch.tensor([row])

    def collate(samples):
        calls.append(len(samples))
        return torch.stack(samples)

    build_loader(Paused(), batch_size=8, collate_fn=collate)

    assert len(calls) <= 2
    assert set(calls) <= {8}


@pytest.mark.slow
def test_the_plan_says_what_a_long_probe_took():
    import time

    class Slower(Slow):
        def __getitem__(self, row):
            time.sleep(0.25)
            return row

    quick, slow = build_loader(NUMBERS), build_loader(Slower(), batch_size=4)

    assert "probe=False reads none" in str(slow.plan)
    assert slow.plan.probe.startswith("took")
    assert not quick.plan.probe


def test_a_path_names_the_way_to_open_it(tmp_path):
    loaderkit.pack([{"x": torch.ones(1)}], tmp_path / "a.lk", workers=0)

    with pytest.raises(OptionError) as caught:
        build_loader(str(tmp_path / "a.lk"))

    assert f"open_cache({str(tmp_path / 'a.lk')!r})" in caught.value.fix


class EqualSizes(list):
    """Samples of three nodes each."""

    def sizes(self):
        return {"nodes": [3] * len(self)}


class Rows(IterableDataset):
    """Twelve rows, one after the other."""

    def __iter__(self):
        return iter(range(12))

    def __len__(self):
        return 12


HUGE = {
    "batch_size": lambda most: build_loader(list(range(12)), batch_size=most),
    "shuffled": lambda most: build_loader(
        list(range(12)), batch_size=most, shuffle=True
    ),
    "sampler": lambda most: build_loader(
        list(range(12)), sampler=list(range(12)), batch_size=most
    ),
    "stream": lambda most: build_loader(Rows(), batch_size=most),
    "max_nodes": lambda most: build_loader(EqualSizes(range(12)), max_nodes=most),
    "both": lambda most: build_loader(
        EqualSizes(range(12)), max_nodes=100, batch_size=most
    ),
    "bucket_by": lambda most: build_loader(
        EqualSizes(range(12)), bucket_by="nodes", batch_size=most
    ),
}


@pytest.mark.many_cases
@pytest.mark.parametrize("power", [31, 53, 57, 62, 63, 64, 100])
@pytest.mark.parametrize("kind", HUGE)
def test_a_size_above_all_samples_gives_one_batch(kind, power):
    for most in (2**power - 1, 2**power):
        loader = HUGE[kind](most)

        assert len(loader) == 1
        assert [sorted(batch.tolist()) for batch in loader] == [list(range(12))]


NO_SIZES = {
    "NaN": [5, float("nan"), 3, 4],
    "infinity": [1, float("inf"), 1, 1],
    "fractions": [1.9] * 4,
    "complex": [1 + 2j, 1, 1, 1],
    "None": [1, None, 2, 3],
    "texts": ["1", "2", "3", "4"],
    "truths": [True] * 4,
    "beyond int64": np.array([1, 2**63 + 5, 1, 1], np.uint64),
    "beyond int64 together": [2**60] * 4,
    "objects": np.array([1, 2, 3, "x"], object),
    "masked": np.ma.array([1, 9, 1, 1], mask=[0, 1, 0, 0]),
    "tensor": torch.tensor([1.0, float("nan"), 1, 1]),
}


class OtherSizes(list):
    def __init__(self, sizes):
        super().__init__(range(4))
        self.nodes = sizes

    def sizes(self):
        return {"nodes": self.nodes}


@pytest.mark.parametrize("options", [{"max_nodes": 5}, {"bucket_by": "nodes"}])
@pytest.mark.parametrize("kind", NO_SIZES)
def test_sizes_that_are_no_whole_numbers_are_refused(kind, options):
    with pytest.raises(LoaderError, match=r"sizes\(\) says") as caught:
        build_loader(OtherSizes(NO_SIZES[kind]), num_workers=0, **options)

    assert caught.value.why
    assert caught.value.fix


def test_whole_numbers_may_be_floats():
    loader = build_loader(OtherSizes([3.0, 1.0, 1.0, 2.0]), max_nodes=4, num_workers=0)

    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


ROWS = {
    "sampler": [[3, 1, 2], np.array([3, 1, 2]), torch.tensor([3, 1, 2]), range(3)],
    "batch_sampler": [
        [[0, 1], [3, 2]],
        np.array([[0, 1], [3, 2]]),
        torch.tensor([[0, 1], [3, 2]]),
    ],
}


@pytest.mark.parametrize("name", ROWS)
def test_arrays_choose_rows_as_in_torch(name):
    data = list(range(4))
    for rows in ROWS[name]:
        expected = [batch.tolist() for batch in DataLoader(data, **{name: rows})]
        for workers in (0, None):
            loader = build_loader(data, num_workers=workers, **{name: rows})
            assert [batch.tolist() for batch in loader] == expected


@pytest.mark.parametrize("wrong", [[[0, 1], None, [2]], [0, 1], [[0], "ab"]])
def test_a_batch_that_is_no_list_of_rows_is_refused(wrong):
    loader = build_loader(list(range(4)), batch_sampler=wrong, num_workers=0)

    with pytest.raises(OptionError, match="as a batch"):
        list(loader)


@pytest.mark.parametrize("shuffle", ["", [], {}])
def test_what_is_empty_is_no_order(shuffle):
    with pytest.raises(OptionError, match="shuffle must be"):
        build_loader([1, 2], shuffle=shuffle)


def test_the_class_of_generators_is_none():
    with pytest.raises(OptionError, match="generator must be"):
        build_loader([1, 2], shuffle=True, generator=torch.Generator)


@pytest.mark.parametrize("epoch", [-1, None, 2**63, "3", 1.7, True])
def test_what_is_no_epoch_is_refused(epoch):
    with pytest.raises(OptionError, match="epoch must be"):
        build_loader([1, 2], shuffle=True).set_epoch(epoch)


class SecondHalf(torch.utils.data.Dataset):
    """Rows below 5 cannot be read."""

    def __len__(self):
        return 10

    def __getitem__(self, row):
        if row < 5:
            raise OSError(row)
        return row


def test_the_probe_ends_no_build():
    loader = build_loader(SecondHalf(), sampler=[7, 8])
    assert [batch.item() for batch in loader] == [7, 8]

    asked_of_nobody = build_loader(SecondHalf(), sampler=iter([7, 8]))
    assert "not known before" in asked_of_nobody.plan.num_workers.reason

    failing = build_loader(SecondHalf(), sampler=[0])
    assert "reading failed" in failing.plan.num_workers.reason


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_samples_read_together_are_joined_as_in_torch(kind):
    class Together(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, row):
            return torch.tensor([row])

        def __getitems__(self, rows):
            return kind([self[row] for row in rows])

    batches = list(build_loader(Together(), batch_size=2, num_workers=0))

    assert [batch.tolist() for batch in batches] == [[[0], [1]], [[2], [3]]]


def test_reading_users_code_ahead_in_a_thread_is_warned_of():
    with pytest.warns(RuntimeWarning, match="random numbers"):
        build_loader(Slow(), num_workers=0, read_ahead=2)


def test_an_epoch_without_batches_says_why():
    with pytest.warns(RuntimeWarning, match="above the limits"):
        build_loader(OtherSizes([9] * 4), max_nodes=3, oversized="skip", num_workers=0)


@pytest.mark.parametrize(
    "make", [torch.arange, np.arange, range], ids=["tensor", "array", "list"]
)
def test_inputs_and_targets_side_by_side_are_answered_with_a_dataset_of_both(make):
    inputs, targets = make(6), make(6)
    if make is range:
        inputs, targets = list(inputs), list(targets)
    with pytest.raises(OptionError, match="as many items") as raised:
        build_loader(inputs, targets, batch_size=32)

    names = {"inputs": inputs, "targets": targets, "torch": torch}
    loader = eval(raised.value.fix, {"build_loader": build_loader, **names})

    [batch] = loader
    assert torch.equal(batch[0], batch[1])
    assert batch[0].tolist() == list(range(6))


@pytest.mark.skipif(sys.platform != "linux", reason="counts the files of a process")
@pytest.mark.parametrize("prefetch_factor", [10**6, 10**9, 2**63])
def test_more_batches_ahead_than_files_are_refused_with_a_limit_that_would_do(
    prefetch_factor,
):
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    options = {"num_workers": 1, "probe": False}
    numbers = range(2 * soft)

    with pytest.raises(LoaderError, match="of open files") as refused:
        build_loader(numbers, prefetch_factor=prefetch_factor, **options)

    [enough_files] = re.findall(r"ulimit -n (\d+)", refused.value.fix)
    assert int(enough_files) > min(prefetch_factor, len(numbers))
    assert "a smaller prefetch_factor" in refused.value.fix
    assert build_loader(numbers, prefetch_factor=9, **options)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch_factor", [10**6, 10**9, 2**63])
def test_an_epoch_of_fewer_batches_than_are_asked_for_ahead_begins_at_once(
    prefetch_factor,
):
    """torch goes round a loop so many times before the first: 10**6 take it 0.4 s."""
    numbers = build_loader(
        range(2), num_workers=1, prefetch_factor=prefetch_factor, probe=False
    )

    assert [batch.tolist() for batch in numbers] == [[0], [1]]


class Words(torch.utils.data.IterableDataset):
    """A stream of ragged samples."""

    def __iter__(self):
        return ({"words": torch.arange(n % 5 + 1)} for n in range(20))


@pytest.mark.parametrize(
    "option",
    [
        {"shuffle": True},
        {"shuffle": "block"},
        {"max_tokens": 10},
        {"max_bytes": 200},
        {"batch_size": 4, "bucket_by": "tokens"},
        {"batch_size": 4, "sampler": range(20)},
        {"batch_sampler": [[0, 1], [2, 3]]},
    ],
)
def test_what_a_stream_cannot_have_a_cache_of_it_has(tmp_path, option):
    given = {"batch_size": 4, **option} if "shuffle" in option else option
    with pytest.raises(OptionError) as caught:
        build_loader(Words(), **given)
    # Both fixes, as they are written: what is dropped, and what is packed.
    dropped, packed = caught.value.fix.split("; or ")
    name = dropped.removeprefix("drop ")
    assert name in option
    rest = {key: value for key, value in given.items() if key != name}
    rest = {"batch_size": 4, "collate_fn": list, **rest}  # torch joins no ragged texts
    assert len(list(build_loader(Words(), **rest))) == 5
    assert packed.startswith("pack(dataset, path)")
    rows = loaderkit.pack(Words(), tmp_path / "rows.lk")
    assert list(build_loader(rows, **given))


@pytest.mark.parametrize("wrong", [len, ["nodes"], 5, ""])
@pytest.mark.parametrize(
    "samples",
    [
        [{"ids": torch.zeros(length)} for length in (3, 1, 2)],
        [Data(x=torch.zeros(nodes, 2)) for nodes in (3, 1, 2)],
    ],
    ids=["texts", "graphs"],
)
def test_the_fix_of_a_bucket_that_is_no_name_holds_for_any_samples(samples, wrong):
    with pytest.raises(OptionError, match="the name of a size") as raised:
        build_loader(samples, batch_size=1, bucket_by=wrong)

    [name] = re.findall(r"^bucket_by='(\w+)'", raised.value.fix)
    assert len(build_loader(samples, batch_size=1, bucket_by=name)) == 3
