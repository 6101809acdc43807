"""What users of PyG, torch and Hugging Face reach for works, or says what to use.

Expected results are those of the same call on PyG's ``InMemoryDataset``, on a list, or
on Hugging Face's ``Dataset`` where that is installed.
"""

import inspect
import pickle
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import graphs, hetero_graphs
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterDataPipe,
    StackDataset,
    Subset,
    TensorDataset,
)
from torch_geometric.data import (
    Batch,
    Data,
    HeteroData,
    InMemoryDataset,
    OnDiskDataset,
)
from torch_geometric.loader import DataLoader
from torch_geometric.transforms import Compose, Constant, Distance

from loaderkit import (
    SafeDataset,
    SafeGraphDataset,
    build_loader,
    concat,
    extend,
    open_cache,
    owned_copy,
    pack,
)
from loaderkit.datasets.absent import ABSENT, OPTIONS, refuse_options
from loaderkit.errors import DatasetError, OptionError, StaleCacheError
from loaderkit.habits import KEYWORDS
from loaderkit.testing import assert_same

COUNT = 23


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Clip:
    text: torch.Tensor
    label: int


def graph(i):
    nodes = 1 + i % 4
    return Data(
        x=torch.arange(2.0 * nodes).view(nodes, 2) + i,
        edge_index=torch.arange(2 * (i % 3)).view(2, -1) % nodes,
        y=torch.tensor([i % 5]),
        number=i,
        name=f"g{i}",
        weight=i / 7,
    )


def row(i):
    return {
        "number": i,
        "label": i % 3,
        "text": f"t{i}",
        "ids": torch.arange(1 + i % 4),
    }


def in_memory(samples):
    dataset = InMemoryDataset()
    dataset.data, dataset.slices = dataset.collate(samples)
    return dataset


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    path = tmp_path_factory.mktemp("habits") / "graphs.lk"
    return pack([graph(i) for i in range(COUNT)], path, workers=0)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("habits") / "rows.lk"
    return pack([row(i) for i in range(COUNT)], path, workers=0)


@pytest.fixture(scope="module")
def pygs():
    return in_memory([graph(i) for i in range(COUNT)])


def numbers(dataset):
    return [sample["number"] for sample in dataset]


# ---- every name that those libraries' datasets have


def public_names(*kinds):
    return {name for kind in kinds for name in dir(kind) if not name.startswith("_")}


TORCHS = [
    Subset([1], [0]),
    ConcatDataset([[1]]),
    StackDataset([1]),
    TensorDataset(torch.zeros(1)),
    IterDataPipe,
]
HUGGING_FACE = """
add_column add_elasticsearch_index add_faiss_index add_faiss_index_from_external_arrays
add_item align_labels_with_mapping batch builder_name cache_files cast cast_column
citation class_encode_column cleanup_cache_files column_names config_name data
dataset_size description download_checksums download_size drop_index features filter
flatten flatten_indices format formatted_as from_buffer from_csv from_dict from_file
from_generator from_json from_list from_pandas from_parquet from_polars from_spark
from_sql from_text get_index get_nearest_examples get_nearest_examples_batch homepage
info is_index_initialized iter license list_indexes load_elasticsearch_index
load_faiss_index load_from_disk map num_columns num_rows push_to_hub remove_columns
rename_column rename_columns repeat reset_format save_faiss_index save_to_disk search
search_batch select select_columns set_format set_transform shape shard shuffle
size_in_bytes skip sort split supervised_keys take to_csv to_dict to_iterable_dataset
to_json to_list to_pandas to_parquet to_polars to_sql to_tf_dataset train_test_split
unique version with_format with_transform
"""
"""The public names of ``datasets.Dataset``, which need not be installed here."""
STREAMS = """
decode epoch load_state_dict n_shards num_shards reshard set_epoch state_dict
clear copy fromkeys get items keys pop popitem setdefault update values
aread_window frame_counts get_by_key get_len on_demand_bytes read_window reset
reset_state_dict set_batch_size set_drop_last set_num_workers set_shuffle subset
get_all_lens get_num_samples_yielded is_cycling is_infinite update_epoch_counters
size next_epoch cache_usage resample_streams evict_shard evict_coldest_shard
prepare_shard get_item
"""
"""Those of Hugging Face's streams and dicts of datasets, and of litdata's and
MosaicML's datasets."""
PIPELINES = """
as_numpy_iterator bucket_by_sequence_length cardinality choose_from_datasets concatenate
element_spec enumerate flat_map get_single_element ignore_errors interleave options
padded_batch prefetch ragged_batch rebatch reduce rejection_resample
sample_from_datasets scan snapshot sparse_batch take_while unbatch window with_options
zip with_epoch with_length unbatched batched map_dict map_tuple slice rsample to_tuple
compose rename rename_keys extract_keys iter_torch_batches iter_batches materialize
streaming_split split_at_indices random_shuffle count schema take_all show map_batches
to_torch height width with_columns row rows iter_rows is_empty lazy collect glimpse
n_unique clone train valid task_type eval_metric num_tasks train_dataloader
val_dataloader prepare_data dls one_batch show_batch attrs create_dataset visititems
"""
"""Those of pipelines and tables: TensorFlow's and Ray's datasets, WebDataset, polars,
OGB, Lightning's and fastai's data, and h5py."""


@pytest.mark.parametrize("kind", ["ours", "rows"])
def test_every_public_name_works_or_names_the_nearest_thing(kind, request):
    dataset = request.getfixturevalue(kind)
    pandas = pytest.importorskip("pandas")
    arrays = (torch.Tensor, np.ndarray, pandas.DataFrame)
    kinds = (InMemoryDataset, OnDiskDataset, *TORCHS, *arrays)
    lists = (HUGGING_FACE, STREAMS, PIPELINES)
    names = public_names(*kinds).union(" ".join(lists).split())
    assert len(names) > 900
    own = {"transform", *dataset[0].keys()}
    for name in names - own:
        if hasattr(type(dataset), name):
            continue
        assert not hasattr(dataset, name)

        with pytest.raises(AttributeError) as caught:
            getattr(dataset, name)

        assert caught.value.why, name
        assert caught.value.fix, name
        # What is said of names that nobody has heard of.
        assert not caught.value.fix.startswith(("help(", "did you mean")), name


@pytest.mark.needs("datasets")
def test_the_list_of_hugging_faces_names_is_whole():
    from datasets import Dataset as Theirs
    from datasets import DatasetDict, IterableDataset

    known = {*HUGGING_FACE.split(), *STREAMS.split()}
    assert public_names(Theirs, IterableDataset, DatasetDict) <= known


METHODS = [
    *("shuffle", "map", "filter", "train_test_split"),
    *("select", "shard", "batch", "skip", "take"),
]


@pytest.mark.needs("datasets")
@pytest.mark.parametrize("method", METHODS)
def test_every_argument_of_hugging_faces_methods_is_taken_or_answered(method):
    from datasets import Dataset as Theirs
    from datasets import DatasetDict, IterableDataset

    theirs = {
        name
        for kind in (Theirs, IterableDataset, DatasetDict)
        for name in inspect.signature(getattr(kind, method, len)).parameters
    }
    ours = inspect.signature(getattr(SafeDataset, method)).parameters

    answered = {*OPTIONS} if "others" in ours else {*KEYWORDS.get(method, ())}
    assert theirs - {*ours} - {"obj"} <= answered


@pytest.mark.parametrize("method", ["shuffle", "map", "filter", "train_test_split"])
def test_an_argument_that_only_hugging_face_has_is_answered(rows, method):
    function = () if method in {"shuffle", "train_test_split"} else (len,)

    for name in OPTIONS:
        wanted = f"{method} has no option '{name}'"
        with pytest.raises(OptionError, match=wanted) as caught:
            getattr(rows, method)(*function, **{name: 1})

        assert caught.value.why
        assert caught.value.fix


def test_an_argument_that_nobody_has_is_answered_with_those_there_are(rows):
    for method in ("shuffle", "map", "filter", "train_test_split"):
        function = () if method in {"shuffle", "train_test_split"} else (len,)
        own = inspect.signature(getattr(SafeDataset, method)).parameters.values()
        named = [p.name for p in own if p.kind is not p.VAR_KEYWORD]

        with pytest.raises(OptionError) as told:
            getattr(rows, method)(*function, qqqq=1)

        assert told.value.fix == f"it is one of {', '.join(named[1:])}"


def test_what_is_said_to_be_absent_is():
    assert [name for name in ABSENT if hasattr(SafeGraphDataset, name)] == []


def test_a_misspelt_name_is_answered_with_the_nearest(ours, rows):
    with pytest.raises(AttributeError, match="did you mean 'num_features'"):
        _ = ours.num_feature
    with pytest.raises(AttributeError, match="did you mean 'weight'"):
        _ = ours.weigt
    with pytest.raises(AttributeError, match="did you mean 'shuffle'"):
        _ = rows.shuffl
    assert getattr(ours, "nothing_like_it", None) is None


def test_an_attribute_error_in_a_property_of_a_subclass_is_told_as_it_is():
    class Mine(SafeDataset):
        @property
        def size(self):
            return self.sizee_of_it

    with pytest.raises(AttributeError, match="no attribute 'sizee_of_it'"):
        _ = Mine().size


def test_a_name_that_load_misspells_is_told_and_asks_for_no_second_packing(tmp_path):
    class Mine(SafeGraphDataset):
        def keys(self):
            return range(self.how_many)

        def load(self, key):
            return graph(key)

    with pytest.raises(AttributeError, match="no attribute 'how_many'"):
        len(Mine(cache=tmp_path / "c.lk"))


def unmade(method):
    class Mine(SafeGraphDataset):
        def __init__(self):
            self.numbers = range(3, 6)

        def keys(self):
            return self.numbers

        def load(self, key):
            return graph(key)

    return method(Mine())


READINGS = {
    "length": len,
    "sample": lambda mine: mine[0],
    "rows": lambda mine: mine[:2],
    "batch": lambda mine: mine.batch([0]),
    "sizes": lambda mine: mine.sizes(),
    "field": lambda mine: mine["x"],
    "text": repr,
    "samples": list,
    "cache": lambda mine: mine.cache,
    "transform": lambda mine: mine.transform,
    "loader": lambda mine: build_loader(mine, batch_size=2),
    "pygs loader": lambda mine: list(DataLoader(mine, batch_size=2)),
}


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_a_constructor_that_does_not_call_ours_is_told(reading):
    with pytest.raises(AttributeError, match=r"has not called super\(\).__init__"):
        unmade(reading)


WRONG_KEYS = {
    "a number": (10, "range(10)"),
    "nothing": (None, "range(100)"),
    "one name": ("a.pt", "['a.pt']"),
    "one path": (Path("raw"), "listdir"),
    "a function": (len, "range(100)"),
}


@pytest.mark.parametrize("name", WRONG_KEYS)
@pytest.mark.parametrize("has_cache", [True, False])
def test_what_is_no_list_of_keys_is_told(name, has_cache, tmp_path):
    keys, fix = WRONG_KEYS[name]

    class Mine(SafeGraphDataset):
        def keys(self):
            return keys

        def load(self, key):
            return graph(key)

    with pytest.raises(DatasetError, match=r"Mine\.keys\(\) gave") as caught:
        len(Mine(cache=tmp_path / "c.lk" if has_cache else None))

    assert fix in caught.value.fix


def test_keys_that_are_no_method_and_no_keys_are_told(tmp_path):
    class Listed(SafeDataset):
        keys = range(3)

        def load(self, key):
            return {"x": key}

    class Empty(Listed):
        def keys(self):
            return []

    with pytest.raises(DatasetError, match=r"Listed\.keys is no method") as caught:
        len(Listed(cache=tmp_path / "a.lk"))
    assert caught.value.fix == "def keys(self): return range(0, 3)"
    with pytest.raises(DatasetError, match="nothing to pack: Empty"):
        len(Empty(cache=tmp_path / "b.lk"))
    assert len(Empty()) == 0


@pytest.mark.parametrize(
    "load",
    [lambda _: None, lambda _, key, folder: (key, folder), lambda _, *, key: key],
    ids=["too few", "too many", "by name"],
)
def test_a_load_that_takes_no_key_is_told_before_any_worker_starts(load, tmp_path):
    kind = type("Mine", (SafeDataset,), {"keys": lambda _: range(3), "load": load})

    with pytest.raises(DatasetError, match=r"Mine\.load cannot be called") as caught:
        len(kind(cache=tmp_path / "c.lk"))

    assert "load(key)" in caught.value.why


def test_a_source_of_spans_that_takes_no_span_is_told(tmp_path):
    with pytest.raises(OptionError, match="cannot be called for a span"):
        pack(lambda span: [span], tmp_path / "c.lk", spans=3)


@pytest.mark.parametrize("name", ["mesh", ("mesh", "to", "mesh")], ids=str)
def test_a_type_asked_as_a_field_is_answered_with_the_type(name, tmp_path):
    sample = HeteroData()
    sample["mesh"].x = torch.ones(3, 2)
    sample["mesh", "to", "mesh"].edge_index = torch.zeros(2, 1, dtype=torch.long)
    dataset = pack([sample, sample], tmp_path / "c.lk", workers=0)

    with pytest.raises(DatasetError) as caught:
        dataset.column(name)
    assert len(eval(caught.value.fix)) > 0
    if isinstance(name, str):
        with pytest.raises(AttributeError, match=r"dataset\['mesh'\]"):
            getattr(dataset, name)


# ---- choosing rows


INDICES = st.one_of(
    st.builds(
        slice,
        st.none() | st.integers(-30, 30) | st.floats(-1, 1),
        st.none() | st.integers(-30, 30) | st.floats(-1, 1),
        st.none() | st.integers(-3, 4).filter(bool),
    ),
    st.lists(st.integers(-COUNT, COUNT - 1), max_size=9),
    st.lists(st.integers(-COUNT, COUNT - 1), max_size=9).map(tuple),
    st.lists(st.integers(-COUNT, COUNT - 1), max_size=9).map(
        lambda rows: torch.tensor(rows, dtype=torch.long)
    ),
    st.lists(st.integers(-COUNT, COUNT - 1), max_size=9).map(
        lambda rows: np.array(rows, np.int64)
    ),
    st.integers(0, 2**COUNT - 1).map(
        lambda bits: torch.tensor([bits >> i & 1 == 1 for i in range(COUNT)])
    ),
    st.integers(0, 2**COUNT - 1).map(
        lambda bits: np.array([bits >> i & 1 == 1 for i in range(COUNT)])
    ),
    st.just(torch.arange(12).view(4, 3)),
    st.just(torch.tensor([[True] * COUNT])),
)


def by_brackets(dataset, index):
    return dataset[index]


def by_method(dataset, index):
    return dataset.index_select(index)


@pytest.mark.slow
@given(
    index=INDICES,
    choose=st.sampled_from([by_brackets, by_method]),
    seed=st.integers(0, 9),
)
def test_rows_are_chosen_and_shuffled_as_in_pyg(ours, pygs, index, choose, seed):
    actual, wanted = choose(ours, index), choose(pygs, index)
    assert numbers(actual) == [int(row_number) for row_number in numbers(wanted)]

    torch.manual_seed(seed)
    shuffled, order = actual.shuffle(return_perm=True)
    torch.manual_seed(seed)
    wanted, wanted_order = wanted.shuffle(return_perm=True)
    assert_same(order, wanted_order)
    assert numbers(shuffled) == [int(row_number) for row_number in numbers(wanted)]


@pytest.mark.parametrize("share", [1.5, -2.0, float("nan"), float(COUNT)])
def test_a_share_of_more_than_all_rows_is_refused(ours, share):
    with pytest.raises(TypeError, match="a share of the rows is from -1 to 1"):
        ours[:share]


def test_the_order_and_the_parts_of_a_seed_are_numpys(rows):
    order = np.random.default_rng(7).permutation(COUNT)

    shuffled = rows.shuffle(seed=7)
    parts = rows.train_test_split(0.3, seed=7)

    assert numbers(shuffled) == order.tolist()
    assert numbers(parts["test"]) == order[:7].tolist()
    assert numbers(parts["train"]) == order[7:].tolist()
    generator = torch.Generator().manual_seed(3)
    wanted = torch.randperm(COUNT, generator=torch.Generator().manual_seed(3))
    assert numbers(rows.shuffle(generator=generator)) == wanted.tolist()


SIZES = st.none() | st.integers(-1, COUNT + 1) | st.floats(-0.1, 1.1)
CHOICES = st.one_of(
    st.tuples(st.just("select"), st.tuples(st.lists(st.integers(0, COUNT - 1)))),
    st.tuples(st.just("take"), st.integers(0, 30).map(lambda n: (n,))),
    st.tuples(st.just("skip"), st.integers(0, 30).map(lambda n: (n,))),
    st.tuples(
        st.just("shard"),
        st.integers(1, 9).flatmap(
            lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.booleans())
        ),
    ),
    st.tuples(
        st.just("filter"),
        st.integers(1, 5).map(lambda n: (lambda sample: sample["number"] % n == 0,)),
    ),
    st.tuples(
        st.just("filter"),
        st.integers(1, 5).map(lambda n: (lambda sample, row: row % n == 0, True)),
    ),
)


def error_or(make):
    try:
        return make()
    except (ValueError, TypeError, IndexError) as error:
        return type(error)


@pytest.mark.needs("datasets")
@given(choice=CHOICES)
@settings(max_examples=25)
def test_rows_are_chosen_as_in_hugging_faces_datasets(rows, theirs, choice):
    method, arguments = choice

    actual = getattr(rows, method)(*arguments)
    wanted = getattr(theirs, method)(*arguments)

    assert numbers(actual) == numbers(wanted)


@pytest.mark.slow
@pytest.mark.needs("datasets")
@given(test=SIZES, train=SIZES, shuffle=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_rows_are_divided_as_in_hugging_faces_datasets(
    rows, theirs, test, train, shuffle, seed
):
    def divide(data):
        parts = data.train_test_split(test, train, shuffle, seed=seed)
        return {name: numbers(part) for name, part in parts.items()}

    actual, wanted = (
        error_or(lambda: divide(rows)),
        error_or(lambda: divide(theirs)),
    )

    if isinstance(wanted, type):
        assert isinstance(actual, type)
    else:
        assert actual == wanted


@pytest.fixture(scope="module")
def theirs():
    from datasets import Dataset as Theirs
    from datasets import disable_progress_bars

    disable_progress_bars()
    return Theirs.from_list(
        [row(i) | {"ids": list(range(1 + i % 4))} for i in range(COUNT)]
    )


@pytest.mark.parametrize(
    "sizes",
    [(0.5, 0.6), (0.01, 0.995), (12, 12), (0,), (COUNT,), (1.0,), (True,), (None, "a")],
)
def test_parts_that_cannot_be_are_refused(rows, sizes):
    with pytest.raises(OptionError):
        rows.train_test_split(*sizes)


@pytest.mark.slow
@pytest.mark.needs("sklearn")
def test_the_splitters_of_sklearn_divide_it_as_they_divide_a_list(rows):
    from sklearn import model_selection

    listed = [row(i) for i in range(COUNT)]
    labels = [i % 3 for i in range(COUNT)]
    splitters = {
        model_selection.KFold(4, shuffle=True, random_state=0): None,
        model_selection.StratifiedKFold(3): None,
        model_selection.ShuffleSplit(2, random_state=1): None,
        model_selection.GroupKFold(3): labels,
    }
    for splitter, groups in splitters.items():
        actual = splitter.split(rows, labels, groups)
        for parts, wanted in zip(
            actual, splitter.split(listed, labels, groups), strict=True
        ):
            assert [numbers(rows[part]) for part in parts] == [
                part.tolist() for part in wanted
            ]
    parts = model_selection.train_test_split(
        rows, stratify=rows["label"], random_state=0
    )
    wanted = model_selection.train_test_split(listed, stratify=labels, random_state=0)
    assert [numbers(part) for part in parts] == [numbers(part) for part in wanted]


# ---- a column


@pytest.mark.slow
@given(samples=graphs(), chosen=st.lists(st.integers(0, 8), min_size=1, max_size=9))
@settings(max_examples=12)
def test_a_field_of_all_graphs_is_that_of_pygs_batch(tmp_path_factory, samples, chosen):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = pack(samples, tmp_path_factory.mktemp("c") / "c.lk", workers=0)
        rows = [row % len(samples) for row in chosen]
        part = dataset[rows]
        part.transform = lambda graph: None
        names = set().union(*(sample.keys() for sample in samples))
        for name in names:
            if hasattr(SafeGraphDataset, name):
                continue
            try:
                # Of this field alone: another that cannot be joined is not asked for.
                batch = Batch.from_data_list(
                    [owned_copy(samples[row]) for row in rows],
                    exclude_keys=list(names - {name}),
                )
                wanted = batch[name]
            except Exception:  # noqa: BLE001 -- PyG cannot join them: nor can we
                with pytest.raises((DatasetError, AttributeError)):
                    part.column(name)
                continue
            if not all(name in samples[row] for row in rows):
                with pytest.raises(DatasetError, match="has no field"):
                    part.column(name)
                continue
            assert_same(part.column(name), wanted, name)
            assert_same(getattr(part, name), wanted, name)


@pytest.mark.parametrize("name", ["x", "y", "edge_index", "name", "weight", "number"])
def test_a_field_is_what_pygs_dataset_gives(ours, pygs, name):
    assert_same(getattr(ours, name), getattr(pygs, name))
    assert_same(getattr(ours[3:9], name), getattr(pygs[3:9], name))


@given(samples=hetero_graphs())
@settings(max_examples=3)
def test_a_field_of_heterogeneous_graphs_is_asked_of_a_type(tmp_path_factory, samples):
    dataset = pack(samples, tmp_path_factory.mktemp("c") / "c.lk", workers=0)

    with pytest.raises(DatasetError, match="has no field 'x'"):
        dataset.column("x")

    assert not hasattr(dataset, "x")


@pytest.mark.slow
@given(samples=hetero_graphs(), chosen=st.lists(st.integers(0, 8), min_size=1))
@settings(max_examples=12)
def test_a_field_of_a_type_is_that_of_pygs_batch(tmp_path_factory, samples, chosen):
    dataset = pack(samples, tmp_path_factory.mktemp("c") / "c.lk", workers=0)
    rows = [row % len(samples) for row in chosen]
    part = dataset[rows]
    part.transform = lambda graph: None
    batch = Batch.from_data_list([owned_copy(samples[row]) for row in rows])
    for key in samples[0].node_types + samples[0].edge_types:
        fields = [name for name in samples[0][key] if name not in {"batch", "ptr"}]
        if not all(name in samples[row][key] for row in rows for name in fields):
            continue
        assert set(fields) <= set(part[key].keys())
        for name in fields:
            assert_same(part[key][name], batch[key][name], f"{key} {name}")


def papers(number):
    graph = HeteroData()
    graph["paper"].x = torch.full((number, 2), float(number))
    graph["author"].x = torch.zeros(number + 1, 3)
    edges = torch.arange(number).repeat(2, 1)
    graph["author", "writes", "paper"].edge_index = edges
    graph.y = torch.tensor([number])
    return graph


@pytest.fixture
def typed(tmp_path):
    return pack([papers(2), papers(3)], tmp_path / "typed.lk", workers=0)


def test_types_are_named_as_heterogeneous_graphs_have_it(typed):
    edges = typed["author", "writes", "paper"].edge_index

    assert edges.tolist() == [[0, 1, 3, 4, 5], [0, 1, 2, 3, 4]]
    assert_same(typed["writes"].edge_index, edges)
    assert_same(typed["author", "paper"].edge_index, edges)
    assert typed["paper"].x[:, 0].tolist() == [2, 2, 3, 3, 3]
    assert typed[1:]["paper"].x.shape == (3, 2)
    assert typed.y.tolist() == [2, 3]
    assert dict(typed["paper"])["x"].shape == (5, 2)
    assert repr(typed["paper"]) == "TypeColumns('paper': x)"
    assert "x" in dir(typed["paper"])


def test_only_the_field_that_is_asked_for_counts_as_bytes(typed):
    typed.largest_column_bytes = 40  # of papers; authors have 84

    assert typed["paper"].x is not None
    with pytest.raises(DatasetError, match="largest_column_bytes"):
        _ = typed["author"].x


def test_a_type_or_a_field_of_it_that_is_not_there_is_told(typed):
    with pytest.raises(DatasetError, match="has no field 'papr'") as caught:
        _ = typed["papr"]
    assert "paper" in f"{caught.value.why} {caught.value.fix}"
    with pytest.raises(DatasetError, match="has no field 'x'") as caught:
        typed.column("x")
    assert caught.value.fix == "dataset['paper'].x"
    with pytest.raises(AttributeError, match="'paper' has no field 'z'"):
        _ = typed["paper"].z
    with pytest.raises(TypeError, match="rows are integers"):
        _ = typed["author", "reads", "paper"]


@pytest.mark.parametrize("ragged", ["padded", "packed", "jagged"])
def test_a_field_of_dicts_is_what_a_batch_of_all_has(rows, ragged):
    dataset = open_cache(rows.cache, ragged=ragged)
    whole = dataset.batch(range(COUNT))

    for name in ("label", "text", "number", "ids"):
        assert_same(list(dataset[name]), list(whole[name]))


@pytest.mark.parametrize(
    "make",
    [
        lambda i: Clip(torch.arange(i + 1), i),
        lambda i: Pair(torch.ones(2), i),
        lambda i: {"label": i} if i % 2 else {"label": i, "more": 1},
    ],
)
def test_fields_of_other_samples_have_names_too(tmp_path, make):
    dataset = pack([make(i) for i in range(5)], tmp_path / "c.lk", workers=0)
    name = "right" if isinstance(dataset[0], Pair) else "label"

    assert dataset[name].tolist() == [0, 1, 2, 3, 4]


def test_a_field_that_is_not_in_every_sample_is_refused_by_the_first(tmp_path):
    dataset = pack([{"a": 1}, {"b": 2}], tmp_path / "c.lk", workers=0)

    with pytest.raises(DatasetError, match=r"field 'a': sample 1 of .* has none"):
        dataset.column("a")
    assert dataset[:1]["a"].tolist() == [1]


def test_samples_without_names_have_no_columns(tmp_path):
    dataset = pack([torch.ones(2), torch.ones(2)], tmp_path / "c.lk", workers=0)

    with pytest.raises(DatasetError, match="no fields with names") as caught:
        _ = dataset["x"]
    assert caught.value.fix == "dataset.batch(range(len(dataset)))"


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [1, 9, 1, 1]])
def test_a_column_is_gathered_up_to_the_stated_bytes(tmp_path, lengths):
    samples = [{"a": torch.ones(length)} for length in lengths]
    dataset = pack(samples, tmp_path / "c.lk", workers=0)
    padded_bytes = 4 * len(lengths) * max(lengths)

    dataset.largest_column_bytes = padded_bytes
    assert dataset.column("a") is not None
    dataset.largest_column_bytes = padded_bytes - 1
    with pytest.raises(DatasetError, match="largest_column_bytes") as caught:
        dataset.column("a")
    assert caught.value.fix.endswith(f"largest_column_bytes = {padded_bytes}")


def test_without_a_cache_there_is_no_column():
    with pytest.raises(DatasetError, match="columns are read from a cache"):
        SafeDataset().column("a")


# ---- map


def with_length(sample):
    return {"length": len(sample["ids"]), "number": sample["number"] + 100}


def doubled(data):
    data.x = data.x * 2
    return data


def test_map_packs_what_a_function_makes_of_each_sample(rows, tmp_path):
    mapped = rows[3:9].map(with_length, remove_columns="text", cache=tmp_path / "m.lk")

    wanted = [row(i) | with_length(row(i)) for i in range(3, 9)]
    for sample in wanted:
        del sample["text"]
    assert_same(list(mapped), wanted)
    assert mapped.cache == tmp_path / "m.lk"


@pytest.mark.many_cases(quick=2)
@pytest.mark.needs("datasets")
@pytest.mark.parametrize("removed", [None, "text", ["text", "number"]])
@pytest.mark.parametrize("with_indices", [True, False])
def test_map_gives_the_fields_that_hugging_faces_gives(
    rows, theirs, tmp_path, removed, with_indices
):
    def change(sample, *row):
        return {"number": sample["number"] + 1, "new": [*row, sample["label"]]}

    options = {"with_indices": with_indices, "remove_columns": removed}
    actual = rows.map(change, **options, cache=tmp_path / "m.lk")
    wanted = theirs.map(change, **options)

    for ours, sample in zip(actual, wanted, strict=True):
        ours["ids"] = ours["ids"].tolist()
        assert ours == sample


@pytest.mark.slow
def test_map_of_graphs_gives_graphs(ours, tmp_path):
    mapped = ours.map(doubled, cache=tmp_path / "m.lk")

    assert type(mapped) is SafeGraphDataset
    assert_same(
        mapped.batch([4, 1]),
        Batch.from_data_list([doubled(graph(4)), doubled(graph(1))]),
    )


@pytest.mark.slow
def test_map_of_graphs_may_give_dicts_and_of_dicts_graphs(ours, tmp_path):
    dicts = ours.map(lambda graph: {"x": graph.x}, cache=tmp_path / "dicts.lk")
    regained = dicts.map(lambda sample: Data(**sample), cache=tmp_path / "graphs.lk")

    assert type(dicts) is SafeDataset
    assert type(regained) is SafeGraphDataset
    for again in (regained, pickle.loads(pickle.dumps(regained))):
        wanted = [Data(x=ours[row].x) for row in (2, 0)]
        assert_same(again.batch([2, 0]), Batch.from_data_list(wanted))


@pytest.mark.slow
def test_the_same_map_is_not_called_again_and_another_has_another_folder(rows):
    calls = Path(rows.cache).with_name("calls")

    def noted(sample):
        with calls.open("a") as file:
            file.write("x")
        return sample

    def noted_otherwise(sample):
        noted(sample)
        return {"other": 1}

    first = rows.map(noted, workers=0)
    calls_of_first = calls.read_text()
    again = rows.map(noted, workers=0)
    assert len(calls_of_first) >= COUNT
    assert calls.read_text() == calls_of_first
    assert first.cache == again.cache
    others = [
        rows.map(noted_otherwise, workers=0),
        rows[:5].map(noted, workers=0),
        rows.map(noted, workers=0, remove_columns=["text"]),
        open_cache(rows.cache, transform=dict).map(noted, workers=0),
    ]

    assert len({dataset.cache for dataset in (first, *others)}) == 5


def test_a_folder_of_another_map_is_refused(rows, tmp_path):
    rows.map(with_length, cache=tmp_path / "m.lk", workers=0)

    with pytest.raises(StaleCacheError, match="another function's") as caught:
        rows.map(dict, cache=tmp_path / "m.lk")

    assert "another folder" in caught.value.fix


def test_a_function_that_forgets_to_return_is_told(rows, tmp_path):
    with pytest.raises(DatasetError, match="returned None for sample 0"):
        rows.map(lambda sample: None, cache=tmp_path / "m.lk", workers=0)


def test_map_without_a_folder_to_put_it_beside_asks_for_one():
    class Numbers(SafeDataset):
        def keys(self):
            return range(3)

        def load(self, key):
            return {"a": key}

    with pytest.raises(OptionError, match="where to pack"):
        Numbers().map(dict)


@pytest.mark.slow
def test_transforms_of_pyg_can_be_mapped(tmp_path):
    transform = Compose([Distance(norm=False), Constant()])
    samples = [graph(i) for i in range(COUNT)]
    for sample in samples:
        sample.pos = sample.x
    dataset = pack(samples, tmp_path / "c.lk", workers=0)

    mapped = dataset.map(transform, workers=0)

    assert_same(mapped[5], transform(samples[5].clone()))
    assert dataset.map(transform, workers=0).cache == mapped.cache
    other = Compose([Distance(norm=True), Constant()])
    assert dataset.map(other, workers=0).cache != mapped.cache


# ---- the rest


def test_a_summary_has_the_figures_of_pygs(ours, pygs):
    actual, wanted = vars(ours.get_summary()), vars(pygs.get_summary())

    assert actual["name"] == "SafeGraphDataset"
    assert_same(actual | {"name": ""}, wanted | {"name": ""})


@pytest.mark.skipif(find_spec("tabulate") is not None, reason="tabulate is installed")
def test_a_summary_that_cannot_be_printed_says_what_to_install(ours):
    with pytest.raises(DatasetError, match="fix: pip install tabulate"):
        ours.print_summary()


@pytest.mark.slow
@pytest.mark.needs("lightning")
def test_a_lightning_datamodule_of_pyg_gives_what_it_gives_over_pygs(ours, pygs):
    # 2 s, which every process that collects tests would take
    from torch_geometric.data.lightning import LightningDataset

    def batches(dataset):
        module = LightningDataset(
            dataset[:0.8], dataset[0.8:], batch_size=4, pin_memory=False
        )
        torch.manual_seed(5)
        return [*module.train_dataloader(), *module.val_dataloader()]

    for actual, wanted in zip(batches(ours), batches(pygs), strict=True):
        assert actual.number.tolist() == wanted.number.tolist()
        assert_same(actual.edge_index, wanted.edge_index)


def test_datasets_are_added_as_torchs_are(ours):
    both = ours[:2] + ours[3:4]

    assert isinstance(both, ConcatDataset)
    assert numbers(both) == [0, 1, 3]
    assert isinstance(ours, Dataset)


def test_batch_of_a_number_names_the_loader(rows):
    with pytest.raises(OptionError, match="batch takes the rows") as caught:
        rows.batch(32)

    assert caught.value.fix.endswith("build_loader(dataset, batch_size=32)")


def test_the_seed_as_first_argument_of_shuffle_is_told(rows):
    with pytest.raises(OptionError, match="return_perm, as in PyG: 42") as caught:
        rows.shuffle(42)

    assert caught.value.fix == "shuffle(seed=42)"


def test_a_subset_is_a_dataset_of_the_same_class_and_generic():
    class Mine(SafeGraphDataset[Data]):
        def keys(self):
            return range(4)

        def load(self, key):
            return graph(key)

    assert type(Mine()[1:]) is Mine
    assert SafeDataset[dict[str, torch.Tensor]].__origin__ is SafeDataset


# ---- what is no field of the graphs, or of another kind


def hetero(i):
    graph = HeteroData()
    graph["paper"].x = torch.ones(2 + i, 3)
    graph["author"].pos = torch.ones(2, 1)
    graph["author", "writes", "paper"].edge_index = torch.zeros(2, 1, dtype=torch.long)
    return graph


def test_a_field_of_a_type_is_answered_with_the_type(tmp_path):
    ours = pack([hetero(i) for i in range(3)], tmp_path / "h.lk", workers=0)

    for name in ("x", "pos", "edge_index"):
        with pytest.raises(AttributeError, match="fix: dataset\\[") as raised:
            getattr(ours, name)
        values = eval(raised.value.fix, {"dataset": ours})
        assert isinstance(values, torch.Tensor)


def test_a_field_comes_before_the_advice_on_its_name(tmp_path):
    ours = pack([{"mean": 1.0, "values": 2.0}], tmp_path / "m.lk", workers=0)

    for name in ("mean", "values"):
        with pytest.raises(AttributeError, match=f"dataset\\['{name}'\\]"):
            getattr(ours, name)


def test_a_transform_can_be_set_on_chosen_rows_and_leaves_the_others(rows):
    part = rows[rows["label"] == 1]
    part.transform = lambda sample: {**sample, "label": 7}

    assert {sample["label"] for sample in part} == {7}
    assert {sample["label"] for sample in rows} == {0, 1, 2}


@pytest.mark.parametrize("method", ["filter", "map", "train_test_split"])
def test_the_advice_on_an_option_is_one_that_the_method_takes(rows, method):
    taken = inspect.signature(getattr(rows, method)).parameters

    for option in OPTIONS.keys() - taken.keys():
        with pytest.raises(OptionError) as raised:
            refuse_options(method, {option: 2}, taken)
        advised, equals, _ = raised.value.fix.partition("=")
        if equals and advised.isidentifier():
            assert advised in taken, (option, raised.value.fix)


def test_fields_asked_as_a_list_are_answered(rows):
    with pytest.raises(
        TypeError, match=r"(?s)name fields, which are asked .* dataset\[name\]"
    ):
        rows[["label", "text"]]
    with pytest.raises(TypeError, match=r"a share of the rows is a slice"):
        rows[[0.1, 0.2]]


def test_samples_of_another_kind_are_not_added_to_graphs(tmp_path, ours, rows):
    for cache, more in [(ours, [row(0)]), (rows, [graph(0)])]:
        before = len(open_cache(cache.cache))
        with pytest.raises(DatasetError, match="are not of one kind"):
            extend(cache.cache, more, workers=0)
        assert len(open_cache(cache.cache)) == before
        assert not (cache.cache / ".extending").exists()
    with pytest.raises(DatasetError, match="are not of one kind"):
        concat([ours, rows], tmp_path / "both.lk")


def test_graphs_of_other_fields_are_added(tmp_path):
    ours = pack([graph(0)], tmp_path / "g.lk", workers=0)

    assert len(extend(ours, [Data(x=torch.ones(1, 1)), hetero(0)], workers=0)) == 3


class ReadsItself(SafeDataset):
    """A dataset as torch's tutorials have it."""

    def __len__(self):
        return 3

    def __getitem__(self, row):
        return {"x": torch.ones(row)}


def test_a_cache_that_nobody_packs_is_refused(tmp_path):
    with pytest.raises(OptionError, match="never packed") as refused:
        ReadsItself(cache=tmp_path / "a.lk")
    assert "loaderkit.pack(ReadsItself(), path)" in refused.value.fix

    pack([{"x": torch.ones(row)} for row in range(3)], tmp_path / "a.lk", workers=0)
    assert len(ReadsItself(cache=tmp_path / "a.lk")) == 3
    assert open_cache(tmp_path / "a.lk")[2]["x"].tolist() == [1, 1]


def test_a_graph_is_not_looked_for_among_copies(tmp_path):
    graphs = [Data(x=torch.ones(n, 1)) for n in (1, 2)]
    packed = pack(graphs, tmp_path / "a.lk", workers=0)

    for graph in (graphs[0], packed[0]):
        with pytest.raises(OptionError, match="cannot be looked for"):
            graph in packed  # noqa: B015
    assert 2 not in pack([3, 1], tmp_path / "c.lk", workers=0, overwrite=True)


@pytest.mark.parametrize("call", ["map", "filter"])
def test_a_function_that_cannot_be_called_with_a_sample_is_refused(tmp_path, call):
    dataset = pack([(1, 2), (3, 4)], tmp_path / "a.lk", workers=0)

    for function, fix in ((lambda a, b: a, "f(*sample)"), (lambda: 1, "lambda sample")):
        with pytest.raises(OptionError, match="function cannot be called") as refused:
            getattr(dataset, call)(function)
        assert fix in refused.value.fix
    with pytest.raises(OptionError, match="with the sample and its row"):
        getattr(dataset, call)(lambda sample: sample, with_indices=True)
    assert len(getattr(dataset, call)(lambda a, b: a[0] > b, with_indices=True)) > 0


def test_a_column_is_asked_for_by_a_name(tmp_path):
    dataset = pack([{"x": 6}], tmp_path / "a.lk", workers=0)

    for wrong in (2, None, 1.5):
        with pytest.raises(OptionError, match="the name of a field"):
            dataset.column(wrong)
