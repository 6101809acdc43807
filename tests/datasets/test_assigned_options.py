"""Options set as attributes count as those of the constructor do, or are refused.

What a batch has to be is asked of a dataset that was opened with the option.
"""

import pickle

import pytest
import torch
from torch_geometric.data import Data

from loaderkit import SafeDataset, SafeGraphDataset, open_cache, pack
from loaderkit.datasets.pack import PackOptions
from loaderkit.errors import NotChangeableError, OptionError
from loaderkit.testing import assert_same

ROWS = [0, 2, 1]


@pytest.fixture(scope="module")
def rows_path(tmp_path_factory):
    samples = [{"x": torch.full((n + 1,), 1.0), "y": torch.ones(n)} for n in range(3)]
    path = tmp_path_factory.mktemp("assigned") / "rows.lk"
    pack(samples, path, workers=0)
    return path


@pytest.fixture(scope="module")
def graphs_path(tmp_path_factory):
    samples = [Data(x=torch.ones(n + 1, 2), y=torch.ones(1)) for n in range(3)]
    path = tmp_path_factory.mktemp("assigned") / "graphs.lk"
    pack(samples, path, workers=0)
    return path


OF_READING = [
    ("rows_path", "ragged", "packed"),
    ("rows_path", "ragged", "jagged"),
    ("rows_path", "pad_value", -1),
    ("rows_path", "pad_value", {"y": 7}),
    ("rows_path", "pad_value", torch.tensor(3.0)),
    ("graphs_path", "follow_batch", ["x"]),
    ("graphs_path", "exclude_keys", ["y"]),
]
RELATIVES = {
    "the dataset": lambda dataset: dataset,
    "a part of it": lambda dataset: dataset[:],
    "a copy that was pickled": lambda dataset: pickle.loads(pickle.dumps(dataset)),
}


def parts_of(batch):
    """Give a batch's values as a dict; nested tensors are compared by their parts."""
    items = batch.items() if isinstance(batch, dict) else batch.to_dict().items()
    return {
        name: value.unbind() if getattr(value, "is_nested", False) else value
        for name, value in items
    }


def differ(one, other):
    try:
        assert_same(parts_of(one), parts_of(other))
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(("kind", "name", "value"), OF_READING)
@pytest.mark.parametrize("relative", RELATIVES)
def test_what_is_assigned_behind_a_batch_counts_from_then_on(
    request, kind, name, value, relative
):
    path = request.getfixturevalue(kind)
    dataset = open_cache(path)
    before = dataset.batch(ROWS)

    setattr(dataset, name, value)
    actual = RELATIVES[relative](dataset).batch(ROWS)

    wanted = open_cache(path, **{name: value}).batch(ROWS)
    assert_same(parts_of(actual), parts_of(wanted))
    assert differ(before, wanted)  # else an option that is ignored would pass


def test_parts_of_one_dataset_may_have_layouts_of_their_own(rows_path):
    dataset = open_cache(rows_path)
    part = dataset[:]
    part.ragged = "packed"
    for _ in range(2):
        assert type(part.batch(ROWS)["x"]).__name__ == "Packed"
        assert type(dataset.batch(ROWS)["x"]).__name__ == "Padded"


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("rows_path", "ragged", "list"),
        ("rows_path", "ragged", None),
        ("rows_path", "pad_value", "a"),
        ("rows_path", "pad_value", None),
        ("graphs_path", "follow_batch", "x"),
        ("graphs_path", "exclude_keys", [1]),
        ("rows_path", "transform", "f"),
    ],
)
def test_a_value_is_refused_in_the_constructors_words(request, kind, name, value):
    path = request.getfixturevalue(kind)
    with pytest.raises(OptionError) as wanted:
        open_cache(path, **{name: value}).batch(ROWS)
    dataset = open_cache(path)
    with pytest.raises(OptionError) as caught:
        setattr(dataset, name, value)
    assert str(caught.value) == str(wanted.value)


@pytest.mark.parametrize("bound", [None, "many", 1.5, -1])
def test_the_bound_of_columns_is_a_size(rows_path, bound):
    dataset = open_cache(rows_path)
    with pytest.raises(OptionError, match="largest_column_bytes must be"):
        dataset.largest_column_bytes = bound
    dataset.largest_column_bytes = "1 KB"
    assert dataset.largest_column_bytes == 1000
    assert dataset["x"].lengths.tolist() == [1, 2, 3]


@pytest.mark.parametrize("name", ["raw", "cache", "packing", "classes", "checksums"])
def test_what_is_open_cannot_be_opened_otherwise(rows_path, name):
    dataset = open_cache(rows_path)
    kept = getattr(dataset, name)
    with pytest.raises(NotChangeableError, match="what is read is what was opened"):
        setattr(dataset, name, "other.lk")
    assert getattr(dataset, name) == kept


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        ("rows_path", "transformm", "transform"),
        ("rows_path", "transforms", "transform"),
        ("rows_path", "pad_val", "pad_value"),
        ("graphs_path", "exclude_key", "exclude_keys"),
        ("rows_path", "follow_batch", None),
    ],
)
def test_an_attribute_that_is_nearly_an_option_is_refused(request, kind, name, meant):
    dataset = open_cache(request.getfixturevalue(kind))
    with pytest.raises(OptionError, match=f"no option '{name}'") as caught:
        setattr(dataset, name, str)
    wanted = "drop it" if meant is None else f"dataset.{meant} = "
    assert wanted in caught.value.fix


@pytest.mark.parametrize("name", ["name", "split", "train_transform", "padding"])
def test_other_attributes_are_the_users(rows_path, name):
    dataset = open_cache(rows_path)
    setattr(dataset, name, "train")
    assert getattr(dataset[:], name) == "train"


# ---- in the body of a class, or before the constructor


class Rows(SafeDataset):
    def keys(self):
        return range(3)

    def load(self, n):
        return {"x": torch.ones(n + 1)}


class Graphs(SafeGraphDataset):
    def keys(self):
        return range(3)

    def load(self, n):
        return Data(x=torch.ones(n + 1, 2))


def change(sample):
    return sample


IN_A_CLASS = [
    (Rows, "raw", "folder"),
    (Rows, "cache", "rows.lk"),
    (Rows, "transform", change),
    (Rows, "transform", staticmethod(change)),
    (Rows, "ragged", "packed"),
    (Rows, "pad_value", -1),
    (Rows, "packing", PackOptions(workers=0)),
    (Rows, "classes", [Data]),
    (Rows, "checksums", "never"),
    (Rows, "mirror", "folder"),
    (Rows, "mirror_bytes", "1 GB"),
    (Rows, "storage_options", {"anon": True}),
    (Graphs, "follow_batch", ["x"]),
    (Graphs, "exclude_keys", ["x"]),
]


@pytest.mark.parametrize(("base", "name", "value"), IN_A_CLASS)
def test_an_option_in_the_body_of_a_class_is_refused(base, name, value):
    named = type("Named", (base,), {name: value})
    inherits = type("Inherits", (named,), {})
    for kind in (named, inherits):
        with pytest.raises(OptionError, match=f"Named.{name} is an attribute of the"):
            kind()


@pytest.mark.parametrize(("base", "name", "value"), IN_A_CLASS[:9] + IN_A_CLASS[12:])
def test_an_option_set_before_the_constructor_is_refused(base, name, value):
    def set_it_first(self):
        setattr(self, name, value)
        base.__init__(self)

    early = type("Early", (base,), {"__init__": set_it_first})
    with pytest.raises(OptionError, match=f"self.{name} was set before super"):
        early()


def test_an_option_of_the_class_that_is_handed_on_counts(tmp_path):
    class Named(Rows):
        ragged, pad_value, raw = "packed", 0, None

        def __init__(self):
            super().__init__(cache=tmp_path / "rows.lk", ragged=self.ragged)

    class Read(Rows):
        """A property gives it."""

        @property
        def mirror(self):
            return "folder"

    assert type(Named().batch([0, 1])["x"]).__name__ == "Packed"
    assert len(Read()) == 3
