"""What is no row, or no rows, is refused with what was meant; oracles are numpy, torch.

Each fix is code: it is run, and has to choose what numpy or torch chooses.
"""

import numpy as np
import pytest
import torch

from loaderkit import pack
from loaderkit.errors import NoSuchRowError, OptionError

COUNT = 6
NAMES = ["a", "b", "a", "c", "a", "b"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    samples = [{"name": name, "n": n} for n, name in enumerate(NAMES)]
    path = tmp_path_factory.mktemp("rows") / "rows.lk"
    return pack(samples, path, workers=0)


def numbers(part):
    return [sample["n"] for sample in part]


TRUTHS = [True, False, np.True_, np.False_, np.array(True), torch.tensor(False)]


@pytest.mark.parametrize("truth", TRUTHS, ids=repr)
def test_one_truth_value_is_no_row(dataset, truth):
    both = dataset + dataset
    for ask in (dataset.__getitem__, dataset.key, both.__getitem__, both.key):
        with pytest.raises(OptionError):
            ask(truth)


def test_a_list_compared_with_a_text_is_no_mask(dataset):
    with pytest.raises(OptionError, match="one truth value") as caught:
        dataset[dataset["name"] == "a"]
    part = eval(caught.value.fix.split(";")[0])
    assert numbers(part) == np.flatnonzero(np.array(NAMES) == "a").tolist()


@pytest.mark.parametrize("values", [[0, 0, 0, 0, 0, 0], [1, 0, 1, 0, 0, 1]])
@pytest.mark.parametrize("ask", ["__getitem__", "select", "batch"])
def test_a_tensor_of_uint8_is_a_mask_to_torch_and_rows_to_numpy(dataset, values, ask):
    mask = rows = torch.tensor(values, dtype=torch.uint8)
    with pytest.raises(OptionError, match="uint8") as caught:
        getattr(dataset, ask)(mask)
    for_a_mask, for_rows = caught.value.fix.split(", ")
    chosen = torch.arange(COUNT)[mask.bool()]
    assert numbers(eval(for_a_mask.removesuffix(" for a mask"))) == chosen.tolist()
    chosen = np.arange(COUNT)[rows.numpy()]
    assert numbers(eval(for_rows.removesuffix(" for rows"))) == chosen.tolist()


@pytest.mark.parametrize("shape", [(COUNT, 2), (COUNT, 3, 2)])
@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor])
def test_a_mask_of_several_axes_is_named_by_its_shape(dataset, shape, make):
    values = np.random.default_rng(0).random(shape) > 0.6
    mask = make(values)
    with pytest.raises(NoSuchRowError, match="a mask of shape") as caught:
        dataset[mask]
    by_any, by_all, by_column = caught.value.fix.replace("or one column: ", "").split(
        ", dataset"
    )
    flat = values.reshape(COUNT, -1)
    wanted = [flat.any(1), flat.all(1), flat[:, 0]]
    fixes = [by_any, f"dataset{by_all}", f"dataset{by_column}"]
    for fix, chosen in zip(fixes, wanted, strict=True):
        assert numbers(eval(fix)) == np.flatnonzero(chosen).tolist()


def test_a_mask_of_one_column_is_a_mask(dataset):
    mask = torch.arange(COUNT).view(-1, 1) > 3
    assert numbers(dataset[mask]) == [4, 5]


def test_a_mask_of_another_dataset_is_not_cut_to_fit(dataset):
    mask = np.arange(COUNT) > 3
    with pytest.raises(NoSuchRowError, match="a mask of 6") as caught:
        dataset[:3][mask]
    assert "[:len(dataset)]" not in caught.value.fix


@pytest.mark.parametrize("index", [(2, "name"), ("name", 2), (np.int64(2), "name")])
def test_a_row_and_a_field_are_asked_for_one_after_the_other(dataset, index):
    with pytest.raises(OptionError) as caught:
        dataset[index]
    assert eval(caught.value.fix) == NAMES[2]


@pytest.mark.parametrize("number", [2.0, np.float32(2), torch.tensor(2.0)], ids=repr)
def test_a_whole_float_is_answered_with_its_row(dataset, number):
    for ask in (dataset.__getitem__, dataset.key):
        with pytest.raises(OptionError, match="float") as caught:
            ask(number)
        assert "2" in caught.value.fix
        assert "0" not in caught.value.fix


def test_keys_of_several_rows_are_asked_for_one_by_one(dataset):
    rows = [1, 3]
    for several in (rows, tuple(rows), np.array(rows), torch.tensor(rows)):
        with pytest.raises(OptionError, match="several rows") as caught:
            dataset.key(several)
        given = {"dataset": dataset, "rows": rows}
        assert eval(caught.value.fix, given) == ["1", "3"]
