"""Samples of different lengths, on numbers small enough to see."""

import dataclasses
import functools
import inspect
import math
import random
import re
from typing import NamedTuple, get_args

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import loaderkit
from loaderkit.datasets.collate_errors import Collating
from loaderkit.datasets.padding import fill_padding
from loaderkit.datasets.ragged import (
    END_TO_END,
    PADDED,
    Packed,
    Padded,
    RaggedLayout,
    concatenate,
    layout_names,
    mask_of,
    pad,
)
from loaderkit.errors import DatasetError, LoaderkitError, OptionError
from loaderkit.habits import REDUCTIONS
from loaderkit.testing import assert_same

VALUES, OFFSETS = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 2, 2, 3])
SAMPLES = [VALUES[:2], VALUES[:0], VALUES[2:]]


def test_shorter_samples_are_filled_with_zeros():
    padded = pad(SAMPLES)

    assert padded.values.squeeze(-1).tolist() == [[1, 2], [0, 0], [3, 0]]
    assert padded.mask.tolist() == [[True, True], [False, False], [True, False]]
    assert [len(tensor) for tensor in padded.to_list()] == [2, 0, 1]


DTYPES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32"
)
DTYPES += " float64 complex64 complex32 float8_e4m3fn float8_e5m2"
# torch 2.5 has none of them.
DTYPES += " float8_e8m0fnu" if hasattr(torch, "float8_e8m0fnu") else ""


@pytest.mark.parametrize("name", DTYPES.split())
def test_any_dtype_can_be_padded(name):
    samples = [tensor.to(getattr(torch, name)) for tensor in SAMPLES]

    padded = pad(samples)

    for row, sample in zip(padded.to_list(), samples, strict=True):
        assert_same(row.clone(), sample.clone())


@pytest.mark.parametrize("longest", [0, 9, 1_000, 1_001, 70_000])
def test_the_mask_says_where_samples_are(longest):
    lengths = torch.tensor([3, 0, longest])

    mask = mask_of(lengths.numpy(), longest)

    assert torch.equal(mask, torch.arange(longest) < lengths[:, None])


def test_samples_without_rows_are_an_empty_batch():
    assert pad([VALUES[:0], VALUES[:0]]).values.shape == (2, 0, 1)


def test_packed_samples_are_given_back():
    packed = Packed(*concatenate(SAMPLES))

    assert_same(packed.to_list(), [VALUES[:2], VALUES[:0], VALUES[2:]])


def test_tensors_are_put_end_to_end():
    values, offsets = concatenate(SAMPLES)

    assert_same((values, offsets), (VALUES, OFFSETS))


@pytest.mark.parametrize("join_or_pad", [concatenate, pad])
@pytest.mark.parametrize(
    "other",
    [torch.ones(1, 2), torch.ones(1), torch.ones(1, 1).double(), torch.tensor(1.0)],
)
def test_tensors_that_differ_in_more_are_named(other, join_or_pad):
    with pytest.raises(
        DatasetError, match="Samples 0 and 1 of a batch cannot be joined"
    ):
        join_or_pad([VALUES, other])


@pytest.mark.parametrize("make", [pad, lambda parts: Packed(*concatenate(parts))])
def test_a_batch_is_moved_whole_and_only_its_values_are_cast(make):
    batch = make([torch.arange(2.0), torch.arange(3.0)])

    cast = batch.to(torch.float16)
    moved = batch.to("meta", non_blocking=True)

    assert type(cast) is type(moved) is type(batch)
    assert cast.values.dtype is torch.float16
    assert [part.dtype for part in cast[1:]] == [part.dtype for part in batch[1:]]
    assert {part.device.type for part in moved} == {"meta"}


@pytest.mark.slow
@pytest.mark.needs("accelerate")
@pytest.mark.needs("lightning")
@pytest.mark.parametrize(
    ("make", "batch_size"),
    # In packed rows Accelerate takes the length of the first tensor, as of any.
    [(pad, 2), (lambda parts: Packed(*concatenate(parts)), 5)],
    ids=["padded", "packed"],
)
def test_trainers_move_such_a_batch_to_the_device(make, batch_size):
    from accelerate.utils import find_batch_size, send_to_device
    from lightning.fabric.utilities.apply_func import move_data_to_device

    batch = {"ids": make([torch.arange(2.0), torch.arange(3.0)])}

    for move in (send_to_device, move_data_to_device):
        moved = move(batch, torch.device("meta"))["ids"]

        assert type(moved) is type(batch["ids"])
        assert {part.device.type for part in moved} == {"meta"}
    assert find_batch_size(batch) == batch_size


@pytest.fixture
def words(tmp_path):
    samples = [
        {"tokens": torch.arange(1, n + 1), "labels": torch.arange(n), "n": n}
        for n in (2, 4, 3)
    ]
    loaderkit.pack(samples, tmp_path / "words.lk")
    return tmp_path / "words.lk"


def test_padding_is_what_was_asked_for_field_by_field(words):
    batch = loaderkit.open_cache(words, pad_value={"labels": -100}).batch([0, 1])

    assert batch["tokens"].values.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]
    assert batch["labels"].values.tolist() == [[0, 1, -100, -100], [0, 1, 2, 3]]
    assert batch["labels"].lengths.tolist() == [2, 4]


@pytest.mark.parametrize("transform", [None, dict], ids=["gathered", "joined"])
def test_padding_equals_that_of_torch(words, transform):
    dataset = loaderkit.open_cache(words, pad_value=7, transform=transform)

    batch = dataset.collate(dataset.__getitems__([2, 0, 1]))

    samples = [dataset[row]["labels"] for row in (2, 0, 1)]
    wanted = torch.nn.utils.rnn.pad_sequence(samples, True, padding_value=7)
    assert_same(batch["labels"].values, wanted)
    assert_same(batch["labels"].to_list()[1], samples[1])


class LeftPadded(NamedTuple):
    """Each sample at the end of its row, as decoders want prompts."""

    values: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of_runs(cls, values, offsets):
        lengths = offsets.diff()
        longest = int(lengths.max())
        mask = torch.arange(longest) >= longest - lengths[:, None]
        padded = values.new_zeros(len(lengths), longest, *values.shape[1:])
        padded[mask] = values
        return cls(padded, lengths, mask)

    def to_list(self):
        rows = zip(self.values, self.lengths, strict=True)
        return [row[len(row) - length :] for row, length in rows]

    def pad_to(self, length):
        missing = length - self.values.shape[1]
        values = torch.nn.functional.pad(self.values, (missing, 0))
        mask = torch.nn.functional.pad(self.mask, (missing, 0))
        return LeftPadded(values, self.lengths, mask)


def test_type_checkers_know_the_names_of_all_layouts():
    assert get_args(RaggedLayout) == layout_names()


def test_a_layout_that_is_added_by_its_rows_is_padded_filled_and_lengthened(
    words, monkeypatch
):
    monkeypatch.setitem(END_TO_END, "left", LeftPadded.of_runs)
    monkeypatch.setitem(PADDED, "left", LeftPadded)

    dataset = loaderkit.open_cache(words, ragged="left", pad_value={"labels": -100})
    loader = loaderkit.build_loader(
        dataset, batch_size=2, bucket_by="tokens", buckets=1, num_workers=0
    )
    samples = [dataset[row] for row in range(len(dataset))]
    longest = max(
        len(sample[name]) for sample in samples for name in ("labels", "tokens")
    )
    batches = [batch["labels"] for batch in loader]

    joined = [sample.tolist() for batch in batches for sample in batch.to_list()]
    assert sorted(joined) == sorted(sample["labels"].tolist() for sample in samples)
    assert {batch.values.shape[1] for batch in batches} == {longest}
    assert all((batch.values[~batch.mask] == -100).all() for batch in batches)
    in_memory = dataset.collate(samples)["labels"]
    assert_same(in_memory.to_list(), [sample["labels"] for sample in samples])
    with pytest.raises(OptionError, match="'left'"):
        loaderkit.open_cache(words, ragged="lift")


@pytest.mark.parametrize("workers", [0, 1])
def test_padding_up_to_a_bucket_is_filled_too(words, workers):
    dataset = loaderkit.open_cache(words, pad_value={"labels": -100})
    loader = loaderkit.build_loader(
        torch.utils.data.Subset(dataset, [0, 1, 2]),
        batch_size=1,
        bucket_by="tokens",
        buckets=1,
        num_workers=workers,
    )

    labels = [batch["labels"].values.tolist() for batch in loader]

    assert [[0, 1, -100, -100]] in labels
    assert [[0, 1, 2, -100]] in labels


def test_a_column_is_padded_like_a_batch(words):
    dataset = loaderkit.open_cache(words, pad_value={"labels": -100})

    assert dataset["labels"].values[0].tolist() == [0, 1, -100, -100]
    assert dataset["tokens"].values[0].tolist() == [1, 2, 0, 0]


def test_a_field_is_found_in_any_nest():
    @dataclasses.dataclass
    class Pair:
        labels: object
        others: list

    first, second, third = (pad([VALUES[:1], VALUES[:2]]) for _ in range(3))

    fill_padding([Pair(first, [second]), {"a": (third,)}], {"labels": 1, "a": 2})

    filled = [tensor.values[0, 1].item() for tensor in (first, second, third)]
    assert filled == [1, 0, 2]


NAMES = ["ids", "a", "a.b", "", "0", "answer"]


def draw_nest(chance, depth):
    """Draw how samples are built: None stands for a ragged tensor."""
    if depth == 0 or chance.random() < 0.3:
        return None
    count = chance.randint(1, 3)
    kind = chance.choice([dict, dict, list, tuple])
    if kind is dict:
        names = chance.sample(NAMES, count)
        return {name: draw_nest(chance, depth - 1) for name in names}
    return kind(draw_nest(chance, depth - 1) for _ in range(count))


def fill_nest(nest, make):
    if nest is None:
        return make()
    if isinstance(nest, dict):
        return {name: fill_nest(part, make) for name, part in nest.items()}
    return type(nest)(fill_nest(part, make) for part in nest)


def leaves_of(nest):
    if isinstance(nest, dict):
        nest = list(nest.values())
    if isinstance(nest, Padded) or not isinstance(nest, list | tuple):
        return [nest]
    return [leaf for part in nest for leaf in leaves_of(part)]


@pytest.mark.many_cases
@pytest.mark.parametrize("seed", range(16))
def test_every_padded_field_can_be_named_by_the_path_that_is_shown(tmp_path, seed):
    chance = random.Random(seed)
    nest = {"top": draw_nest(chance, 3), "ids": draw_nest(chance, 2)}
    nest = chance.choice([nest, [nest, None], (None, nest)])
    samples = [
        fill_nest(nest, lambda n=n: torch.ones(n, dtype=torch.long)) for n in (1, 3)
    ]
    loaderkit.pack(samples, tmp_path / "a.lk", workers=0)
    fields = loaderkit.inspect_cache(tmp_path / "a.lk").fields
    paths = [field.name for field in fields if field.kind == "tensor"]
    numbers = {path: -number for number, path in enumerate(paths, start=1)}

    padded = loaderkit.open_cache(tmp_path / "a.lk", pad_value=numbers)
    leaves = leaves_of(padded.batch([0, 1]))

    assert [leaf.values[0, -1].item() for leaf in leaves] == [*numbers.values()]
    by_hand = padded.collate(samples)
    assert_same(by_hand, padded.batch([0, 1]))
    with pytest.raises(DatasetError, match="no field") as caught:
        loaderkit.open_cache(tmp_path / "a.lk", pad_value={"to.p": 1}).batch([0])
    assert paths[0] in caught.value.why


def test_a_column_is_padded_by_paths_too(tmp_path):
    samples = [
        {"a": {"ids": torch.ones(n)}, "b": {"ids": torch.ones(n)}} for n in (1, 2)
    ]
    loaderkit.pack(samples, tmp_path / "a.lk")
    dataset = loaderkit.open_cache(
        tmp_path / "a.lk", pad_value={"a.ids": 5, "b": 6, "ids": 7}
    )

    assert dataset["a"]["ids"].values[0].tolist() == [1, 5]
    assert dataset["b"]["ids"].values[0].tolist() == [1, 7]
    with_container = loaderkit.open_cache(dataset.cache, pad_value={"b": 6})
    assert with_container.batch([0, 1])["b"]["ids"].values[0].tolist() == [1, 6]
    assert with_container.batch([0, 1])["a"]["ids"].values[0].tolist() == [1, 0]


@pytest.mark.parametrize("name", DTYPES.split())
def test_padding_of_any_dtype_can_be_filled(name):
    padded = pad([tensor.to(getattr(torch, name)) for tensor in SAMPLES])

    fill_padding(padded, 1)

    assert_same(padded.values[1].clone(), torch.ones(2, 1).to(padded.values.dtype))


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        *((torch.bool, 2), (torch.uint8, -100), (torch.int64, 0.5)),
        *((torch.float16, 1e9), (torch.int8, float("nan"))),
    ],
)
def test_a_number_that_the_dtype_cannot_hold_is_refused(dtype, number):
    padded = pad([tensor.to(dtype) for tensor in SAMPLES])

    with pytest.raises(DatasetError, match="cannot be written into field 'labels'"):
        fill_padding({"labels": padded}, number)


def test_a_misspelt_field_is_refused_and_one_that_some_samples_lack_is_not(tmp_path):
    samples = [{"a": torch.ones(1)}, {"a": torch.ones(2), "b": torch.ones(1)}]
    loaderkit.pack(samples, tmp_path / "cache.lk")

    loaderkit.open_cache(tmp_path / "cache.lk", pad_value={"b": 1}).batch([0, 0])

    with pytest.raises(DatasetError, match="'bb', which is no field") as caught:
        loaderkit.open_cache(tmp_path / "cache.lk", pad_value={"bb": 1})
    assert caught.value.fix == "did you mean 'b'?"


@pytest.mark.parametrize(
    "options",
    [{"pad_value": "0"}, {"pad_value": {1: 0}}, {"pad_value": 1, "ragged": "packed"}],
)
def test_what_is_no_padding_is_refused(words, options):
    with pytest.raises(OptionError, match="pad_value"):
        loaderkit.open_cache(words, **options)


def pack_together(tensors):
    return Packed(*concatenate(tensors))


SYMBOLS = ["+", "-", "*", "/", "//", "%", "**", "&", "|", "^", "<", "<=", ">", ">="]
ALL_SYMBOLS = [*SYMBOLS, "==", "!="]
EXPRESSIONS = [
    *("batch == 2", "batch != 2", "2 == batch", "2 != batch"),
    *(f"batch {symbol} 2" for symbol in ALL_SYMBOLS),
    *(f"2 {symbol} batch" for symbol in ALL_SYMBOLS),
    *(f"tensor {symbol} batch" for symbol in ["+", "-", "*", "/", "@", "==", "<"]),
    *(f"batch {symbol} tensor" for symbol in ["+", "-", "*", "/", "@", "==", "<"]),
    *("array + batch", "batch * array", "batch + batch", "batch * batch"),
    *("-batch", "~batch", "abs(batch)"),
]


@pytest.mark.many_cases
@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("make", [pad, pack_together])
def test_computing_with_a_batch_says_whose_values_are_meant(make, expression):
    batch = make([torch.arange(3), torch.arange(3)])
    names = {"batch": batch, "tensor": torch.ones(3), "array": np.ones(3)}

    with pytest.raises(OptionError) as caught:
        eval(expression, names)

    kind = type(batch).__name__.lower()
    assert f"{kind}.values" in caught.value.fix
    shown = "".join(caught.value.fix.split()).replace(f"{kind}.values", "batch")
    wanted = expression.replace("array", "tensor")
    left, symbol, right = wanted.split() if " " in wanted else ("", "", "")
    # "2 < batch" is asked of the batch as "batch > 2".
    mirrored = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}.get(symbol, symbol)
    assert shown in {wanted.replace(" ", ""), f"{right}{mirrored}{left}"}


INDICES = ["[:, 0]", "[0, 1]", "[..., 0]", "[None]", "[rows]", "['x']"]


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("make", [pad, pack_together])
def test_an_index_of_a_tensor_says_whose_values_are_meant(make, index):
    names = {"batch": make([torch.arange(3)]), "rows": torch.tensor([0])}

    with pytest.raises(OptionError) as caught:
        eval(f"batch{index}", names)

    assert caught.value.fix == f"{type(names['batch']).__name__.lower()}.values{index}"


@pytest.mark.parametrize("make", [pad, pack_together])
def test_a_batch_is_read_by_numbers_and_slices_as_a_tuple(make):
    batch = make([torch.arange(3)])

    assert batch[0] is batch.values
    assert batch[-1] is tuple(batch)[-1]
    assert batch[:1] == (batch.values,)
    with pytest.raises(OptionError, match=r"fix: \w+\.values$"):
        batch["values"]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("make", [pad, pack_together])
def test_a_batch_is_a_tuple_of_its_tensors_as_its_docstring_says(make, count):
    batch = make([torch.zeros(0), *[torch.arange(3.0)] * count][-count:])
    samples = batch.to_list()

    # Of a tuple, whatever is in it: torch's own tools go through it as through one.
    assert len(batch) == len(list(batch)) == len(batch._fields)
    assert bool(batch)
    assert all(part is getattr(batch, name) for name, part in batch._asdict().items())
    assert [*reversed(batch)] == [*batch][::-1]
    with pytest.raises(OptionError, match=r"5 in \w+\.values"):
        assert 5 in batch
    counts = {Padded: len(batch[1]), Packed: len(batch[1]) - 1}
    assert counts[type(batch)] == len(samples) == count
    leaves, spec = torch.utils._pytree.tree_flatten(batch)
    assert_same(torch.utils._pytree.tree_unflatten(leaves, spec), batch)


@pytest.mark.parametrize("make", [pad, pack_together])
def test_a_batch_is_compared_with_other_tuples_and_hashed_as_one(make):
    batch = make([torch.arange(3)])

    assert batch == tuple(batch)
    assert batch != ()
    assert batch != "text"
    assert batch is not None
    assert hash(batch) == hash(tuple(batch))


# ---- functions of torch


def calls_of_torch(field):
    """Give each function of torch that can be overridden, called with a ragged field.

    The other arguments are tensors, so some refuse those before they look at the field.
    """
    for function, dummy in torch.overrides.get_testing_overrides().items():
        name = torch.overrides.resolve_name(function) or ""
        if name.rpartition(".")[0] not in {"torch", "torch.nn.functional"}:
            continue
        needed = [
            parameter
            for parameter in inspect.signature(dummy).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        takes_list = bool(needed) and needed[0].name in {"tensors", "tensor_list"}
        first = [field, field] if takes_list else field
        others = [torch.ones(1)] * (len(needed) - 1)
        yield name, functools.partial(function, first, *others)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ragged", ["padded", "packed"])
def test_every_function_of_torch_answers_a_ragged_field_with_its_values(words, ragged):
    batch = loaderkit.open_cache(words, ragged=ragged).batch([0, 1])
    field = next(part for part in batch.values() if isinstance(part, Padded | Packed))
    answered = set()

    for name, call in calls_of_torch(field):
        with pytest.raises((TypeError, RuntimeError)) as caught:
            call()
        # Not a complaint about the field: "must be Tensor, not Padded".  (torch names
        # the input of polygamma first, and takes it last: there an int is asked for.)
        complaint = str(caught.value).replace("must be int, not", "must be int:")
        assert f"not {type(field).__name__}" not in complaint, name
        if isinstance(caught.value, OptionError):
            assert f"{ragged}.values" in caught.value.fix, name
            answered.add(name)

    assert {"torch.relu", "torch.cat", "torch.nn.functional.linear"} <= answered
    assert len(answered) > 300


@pytest.mark.parametrize(
    "make", [np.asarray, np.array, np.mean], ids=["asarray", "array", "mean"]
)
def test_numpy_makes_no_array_of_a_ragged_field(words, make):
    batch = loaderkit.open_cache(words).batch([0, 1])
    field = next(part for part in batch.values() if isinstance(part, Padded))

    with pytest.raises(OptionError, match=r"padded\.values"):
        make(field)


def test_the_advice_on_a_call_of_torch_can_be_pasted(words):
    batch = loaderkit.open_cache(words).batch([0, 1])
    padded = next(part for part in batch.values() if isinstance(part, Padded))
    tensor = torch.ones(())

    for call in (
        lambda: torch.relu(padded),
        lambda: torch.cat([padded, padded], 1),
        lambda: torch.mul(tensor, padded),
        lambda: torch.sum(padded, dim=0),
        lambda: torch.Tensor.add(tensor, padded),
        lambda: torch.lt(padded, tensor),
    ):
        with pytest.raises(OptionError) as caught:
            call()
        eval(caught.value.fix, {"torch": torch, "padded": padded, "tensor": tensor})


@pytest.mark.slow
def test_a_compiled_model_reads_the_parts_of_a_ragged_field(words):
    batch = loaderkit.open_cache(words).batch([0, 1])
    field = next(part for part in batch.values() if isinstance(part, Padded))
    model = torch.compile(lambda padded: padded.values * 2, backend="eager")

    assert torch.equal(model(field), field.values * 2)


NUMBERS_THAT_DO_NOT_FIT = {
    "a fraction": (torch.int64, 1.5, 1),
    "a negative one": (torch.uint8, -100, 0),
    "a large one": (torch.int8, 1000, 127),
    "NaN": (torch.int64, math.nan, 0),
    "infinity": (torch.int32, math.inf, 2**31 - 1),
    "of bool": (torch.bool, 7, 0),
    "of half": (torch.float16, 1e6, 65504),
}


@pytest.mark.parametrize("name", NUMBERS_THAT_DO_NOT_FIT)
def test_a_number_that_does_not_fit_is_answered_with_one_that_does(name, tmp_path):
    dtype, number, nearest = NUMBERS_THAT_DO_NOT_FIT[name]
    samples = [{"a": torch.ones(length, dtype=dtype)} for length in (1, 2)]
    path = loaderkit.pack(samples, tmp_path / "a.lk", workers=0).cache

    with pytest.raises(DatasetError, match="cannot be written") as raised:
        loaderkit.open_cache(path, pad_value=number).batch([0, 1])

    advised = eval(f"dict({raised.value.fix})")
    batch = loaderkit.open_cache(path, **advised).batch([0, 1])
    assert batch["a"].values[0, 1].item() == nearest


@pytest.mark.parametrize(
    "scalar",
    [np.int64(-100), np.array(-100), torch.tensor(-100), np.float32(-100)],
    ids=["int64", "array", "tensor", "float32"],
)
@pytest.mark.parametrize("is_named", [False, True])
def test_scalars_of_numpy_and_torch_fill_as_numbers_do(scalar, is_named, tmp_path):
    samples = [{"a": torch.arange(length)} for length in (1, 2)]
    path = loaderkit.pack(samples, tmp_path / "a.lk", workers=0).cache

    pad_value = {"a": scalar} if is_named else scalar
    batch = loaderkit.open_cache(path, pad_value=pad_value).batch([0, 1])

    assert batch["a"].values.tolist() == [[0, -100], [0, 1]]


@pytest.mark.parametrize("kind", [dict, Data])
def test_a_field_that_some_samples_lack_is_named(kind, tmp_path):
    samples = [kind(x=torch.ones(1), label=torch.ones(1)), kind(x=torch.ones(1))]
    rows = loaderkit.pack(samples, tmp_path / "a.lk", workers=0)

    with pytest.raises(DatasetError, match=r"lacks \['label'\], which"):
        rows.batch([0, 1])


def test_a_key_that_code_of_the_users_misses_is_no_field():
    error = r"cannot be joined: KeyError\('y'\)"
    with pytest.raises(DatasetError, match=error), Collating():
        {"x": 0}["y"]


@pytest.mark.parametrize("place", [1, 2])
def test_none_among_graphs_is_told_and_can_be_left_out(place, tmp_path):
    samples = [Data(x=torch.ones(1)), Data(x=torch.ones(2))]
    samples.insert(place, Data(x=torch.ones(9)))
    rows = loaderkit.pack(samples, tmp_path / "a.lk", workers=0)
    rows.transform = lambda graph: None if len(graph.x) == 9 else graph

    with pytest.raises(DatasetError, match="one is None") as raised:
        rows.batch([0, 1, 2])

    kept = eval(raised.value.fix, {"dataset": rows})
    assert kept.batch([0, 1])["x"].shape == (3,)


BATCHES = {"padded": pad, "packed": pack_together}


def a_batch(kind, lengths=(1, 3, 2)):
    return BATCHES[kind]([torch.ones(length, 2) for length in lengths])


# ---- what is no tensor says so in operations of plain Python

PLAIN_PYTHON = {
    "x == other": "x == other",
    "x != other": "x != other",
    "x in a list": "x in [other]",
    "count": "x.count(1)",
    "index": "x.index(1)",
    "+": "x + other",
    "[:, 0]": "x[:, 0]",
    "< 3": "x < 3",
    "round": "x.round()",
    "[4]": "x[4]",
    "page-locked for a device": "x.pin_memory()",
    "to a device": "x.to('cuda')",
    "to no device": "x.to('cdua:0')",
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", PLAIN_PYTHON)
def test_an_operation_of_a_tensor_is_answered_with_one_that_works(name, kind):
    if "device" in name and torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA device")
    names = {"x": a_batch(kind), "other": a_batch(kind), "torch": torch}

    with pytest.raises(LoaderkitError) as caught:
        eval(PLAIN_PYTHON[name], names)

    fix = re.split(", which|, as it is", caught.value.fix)[0]
    if name == "[4]":
        assert isinstance(caught.value, IndexError)
        fix = fix.replace("[4]", "[0]")
    eval(fix, {kind: names["x"], "tensor": 1, **names})


@pytest.mark.parametrize("name", sorted(REDUCTIONS))
def test_what_is_advised_for_one_number_of_all_values_is_that_of_the_samples(name):
    samples = [torch.rand(length, 2) for length in (1, 3, 2)]
    batch = pad(samples)
    fill_padding(batch, -7)
    rows = torch.cat(samples)
    if name in {"any", "all"}:
        batch, rows = batch._replace(values=batch.values > 0), rows > 0
    expected = getattr(rows, name)()

    for call in (f"padded.{name}()", f"torch.{name}(padded)"):
        if not hasattr(torch, name):
            continue
        with pytest.raises(LoaderkitError) as caught:
            eval(call, {"padded": batch, "torch": torch})
        advised = eval(caught.value.fix, {"padded": batch, "torch": torch})
        assert torch.allclose(advised, expected)


def test_a_batch_of_the_same_tensors_is_equal_and_hashable():
    batch = a_batch("padded")

    assert batch == type(batch)(*batch) == tuple(batch)
    assert batch in [None, (), "text", batch]
    assert len({batch, type(batch)(*batch)}) == 1


@pytest.mark.parametrize("length", [0, 2, "5", 3.0])
def test_a_batch_is_filled_up_to_no_less_than_it_has(length):
    with pytest.raises(OptionError, match="length must be") as caught:
        a_batch("padded").pad_to(length)

    a_batch("padded").pad_to(**eval(f"dict({caught.value.fix})"))
