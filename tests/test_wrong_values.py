"""Wrong values and a wrong order of arguments are answered with a call that works."""

import functools
import os
import re
import shutil
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.transforms import Constant

import loaderkit
from loaderkit import (
    LeakDetector,
    MemoryMeter,
    MicroBatcher,
    SafeDataset,
    assert_fits,
    assert_no_leak,
    build_loader,
    configure_allocator,
    estimate_step,
    extend,
    open_cache,
    pack,
    plan_batch,
    pull,
    push,
    read_memory,
)
from loaderkit.arguments import check_number
from loaderkit.cli.main import COMMANDS, build_parser, main
from loaderkit.datasets.pack import PackOptions
from loaderkit.datasets.rows import normalize_indices
from loaderkit.errors import (
    CacheError,
    DatasetError,
    LoaderError,
    LoaderkitError,
    NotChangeableError,
    OptionError,
    StepError,
)
from loaderkit.testing import assert_same
from loaderkit.units import parse_bytes, size_in_bytes
from loaderkit.value_words import kind_of, with_article


@dataclass
class Clip:
    sample: object


SAMPLES = [{"x": torch.ones(2)}] * 4
MODEL = torch.nn.Linear(1, 1)
SGD = torch.optim.SGD(MODEL.parameters())


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return pack(SAMPLES, tmp_path_factory.mktemp("values") / "rows.lk", workers=0)


# ---- values

WRONG_VALUES = {
    "ragged": lambda given: SafeDataset(cache="a.lk", ragged=given),
    "unknown_classes": lambda given: open_cache("a.lk", unknown_classes=given),
    "on_leak": lambda given: LeakDetector("cpu", on_leak=given),
    "every": lambda given: LeakDetector("cpu", every=given),
    "warmup": lambda given: LeakDetector("cpu", warmup=given),
    "tolerance": lambda given: LeakDetector("cpu", tolerance=given),
    "limit": lambda given: LeakDetector("cpu", limit=given),
    "epochs": lambda given: assert_no_leak(list, epochs=given),
    "packing": lambda given: SafeDataset(cache="a.lk", packing=given),
    "transform": lambda given: SafeDataset(cache="a.lk", transform=given),
    "storage_options": lambda given: open_cache("s3://b/a", storage_options=given),
    "shard_bytes": lambda given: pack(SAMPLES, "a.lk", shard_bytes=given),
    "mps_fraction": lambda given: configure_allocator(mps_fraction=given),
    "seed": lambda given: build_loader(SAMPLES, shuffle=True, seed=given),
    "executor": lambda given: PackOptions(executor=given),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
@pytest.mark.parametrize("given", ["nonsense", -1.5, [3], {"workers": 2}], ids=repr)
def test_a_wrong_value_is_answered_with_one_that_works(name, given):
    if name == "storage_options" and isinstance(given, dict):
        return

    with pytest.raises(OptionError) as raised:
        WRONG_VALUES[name](given)

    assert raised.value.fix
    if given != -1.5:
        assert "out of range" not in str(raised.value)


MEANT_NUMBERS = {
    "a share": (lambda value, rows: rows.train_test_split(value), "0.25", 0.25),
    "per cent": (lambda value, rows: rows.train_test_split(value), "25%", 0.25),
    "a share of the training": (
        lambda value, rows: rows.train_test_split(train_size=value),
        "0.5",
        0.5,
    ),
    "a fraction": (lambda value, _: check_number("x", value, least=0), "0.8", 0.8),
    "bytes of a shard": (
        lambda value, _: PackOptions(shard_bytes=value),
        1e6,
        1_000_000,
    ),
    "bytes an epoch": (
        lambda value, _: LeakDetector("cpu", tolerance=value),
        64e3,
        64_000,
    ),
    "bytes of a mirror": (
        lambda value, _: open_cache("file:///no/rows", mirror_bytes=value),
        1e9,
        10**9,
    ),
    "nodes": (lambda value, _: build_loader(SAMPLES, max_nodes=value), "400", 400),
}
"""A call, a value of the wrong type, and the number that it obviously means."""


@pytest.mark.parametrize("name", MEANT_NUMBERS)
def test_a_number_of_the_wrong_type_is_answered_with_the_same_number(name, dataset):
    call, given, meant = MEANT_NUMBERS[name]

    with pytest.raises(OptionError) as raised:
        call(given, dataset)

    assert float(raised.value.fix.partition("=")[2]) == meant


SIZES_MEANT = {
    "1,000 MB": 10**9,
    "1 000 MB": 10**9,
    "1_000_000": 10**6,
    "1,000,000": 10**6,
    "1e9": 10**9,
    "2,5 GB": 2_500_000_000,
    "2.5 GiBs": 5 * 2**29,
    "1 TiB/s": 2**40,
    "8 gigs": 8 * 10**9,
    "64 megabytes": 64 * 10**6,
}


@pytest.mark.parametrize("text", SIZES_MEANT)
def test_a_size_that_cannot_be_read_is_answered_with_the_same_amount(text):
    with pytest.raises(OptionError) as raised:
        parse_bytes(text)

    assert parse_bytes(raised.value.fix.strip("'")) == SIZES_MEANT[text]


@pytest.mark.parametrize("text", ["0x10", "much", "-5 MB", "", "1.2.3 GB"])
def test_a_text_that_says_no_amount_is_answered_with_a_size(text):
    with pytest.raises(OptionError) as raised:
        parse_bytes(text)

    assert parse_bytes(raised.value.fix.strip("'")) > 0


@pytest.mark.parametrize("share", ["50%", " 12.5 %", "90 %", "0%", "100%"])
def test_a_share_is_answered_with_the_share_of_all_bytes(share):
    with pytest.raises(OptionError, match="of what it is a share") as raised:
        parse_bytes(share)

    nbytes = eval(raised.value.fix, {"total_bytes": 8_000})
    assert nbytes == float(share.strip(" %")) * 80
    with pytest.raises(OptionError, match=r"fix: limit=int\("):
        size_in_bytes("limit", share)


HAS_RUN = []


def _generator():
    HAS_RUN.append(True)
    yield


async def _coroutine():
    HAS_RUN.append(True)


async def _asynchronous_generator():
    HAS_RUN.append(True)
    yield


DEFERRED = {
    "a generator": _generator,
    "a coroutine": _coroutine,
    "an asynchronous generator": _asynchronous_generator,
    "a lambda": lambda: HAS_RUN.append((yield)),
    "a partial": functools.partial(_generator),
}


@pytest.mark.parametrize("name", DEFERRED)
def test_a_function_whose_call_runs_none_of_its_code_is_refused(name):
    with pytest.raises(OptionError, match="none of its code has run") as raised:
        assert_no_leak(DEFERRED[name], epochs=8)

    *preparation, wanted = raised.value.fix.splitlines()
    names = {**globals(), "function": DEFERRED[name]}
    exec("\n".join(preparation), names)
    HAS_RUN.clear()
    eval(wanted, names)()
    assert HAS_RUN


@pytest.mark.parametrize("option", ["transform", "collate_fn", "batch_transform"])
def test_a_function_of_samples_that_is_awaited_is_refused(tmp_path, option):
    async def double(samples):
        return samples * 2

    loaderkit.pack([1], tmp_path / "c.lk", workers=0)
    calls = {
        "transform": lambda: loaderkit.open_cache(tmp_path / "c.lk", transform=double)
    }
    for name in ("collate_fn", "batch_transform"):
        calls[name] = functools.partial(
            build_loader, [1], probe=False, **{name: double}
        )
    with pytest.raises(OptionError, match=f"{option} must do its work") as raised:
        calls[option]()

    *preparation, wanted = raised.value.fix.splitlines()
    names = {"double": double}
    exec("\n".join(preparation), names)
    assert eval(wanted, names)(2) == 4


def test_a_load_that_is_awaited_is_refused(tmp_path):
    class Awaited(loaderkit.SafeDataset):
        def keys(self):
            return range(2)

        async def load(self, key):
            return {"x": key}

    with pytest.raises(loaderkit.errors.DatasetError, match="load is async"):
        len(Awaited(cache=tmp_path / "c.lk"))


def test_what_a_lambda_needs_is_answered_with_code():
    with pytest.raises(OptionError) as raised:
        assert_no_leak(lambda batch: None, epochs=8)

    compile(raised.value.fix, "fix", "eval")


def test_a_transform_that_cannot_be_called_is_refused_where_it_is_set(dataset):
    with pytest.raises(OptionError, match="transform must be a function"):
        dataset.transform = 3


def test_numbers_of_bytes_may_be_written_as_texts(tmp_path):
    rows = pack(SAMPLES * 50, tmp_path / "a.lk", workers=0, shard_bytes="1 KB")

    assert len(rows) == 200
    assert size_in_bytes("limit", "1.5 KiB") == parse_bytes("1.5 KiB") == 1536
    with pytest.raises(OptionError, match="fix: '8 GB'"):
        parse_bytes("8 gigs")


def test_a_class_of_executors_makes_one(tmp_path):
    rows = pack(SAMPLES, tmp_path / "a.lk", executor=ThreadPoolExecutor)

    assert len(rows) == 4


@pytest.mark.parametrize(
    "index", [slice(0, 4, 0), slice("a", 3), slice(None, None, 0.5), slice([1], None)]
)
def test_a_slice_that_names_no_rows_is_refused_with_slices_that_do(dataset, index):
    with pytest.raises(OptionError, match="a slice of rows") as raised:
        dataset[index]

    for call in re.findall(r"dataset\[[^]]*\]", raised.value.fix):
        assert len(eval(call, {"dataset": dataset}))


@pytest.mark.parametrize("length", [5, 9])
def test_a_mask_that_is_too_long_is_not_cut_to_fit(dataset, length):
    with pytest.raises(IndexError, match="a mask of") as raised:
        dataset[torch.ones(length, dtype=torch.bool)]

    assert "dataset that the mask was made of" in raised.value.fix


@pytest.mark.parametrize("length", [1, 3])
def test_a_mask_that_is_too_short_is_answered_with_rows(dataset, length):
    mask = torch.ones(length, dtype=torch.bool)

    with pytest.raises(IndexError, match="a mask of") as raised:
        dataset[mask]

    rows = eval(raised.value.fix, {"dataset": dataset, "mask": mask})
    assert len(rows) == length


@pytest.mark.parametrize("row", ["a key", 1.5, None, [0]])
def test_the_key_of_no_row_is_refused(dataset, row):
    with pytest.raises(OptionError, match="a row is an integer"):
        dataset.key(row)


BESIDE_NONE = {
    "tensor": torch.ones(1),
    "number in a tensor": torch.tensor(1),
    "array": np.ones(2),
    "list": [1.0],
    "tuple": (torch.ones(1),),
    "dict": {"a": 1},
    "text": "a",
    "bytes": b"a",
}


FIELDS = {
    "sample['x']": lambda value: {"x": value},
    "sample['x']['y'][1]": lambda value: {"n": 1, "x": {"y": (torch.ones(1), value)}},
    "sample[0]": lambda value: (value, 1),
}


@pytest.mark.many_cases(quick=11)
@pytest.mark.parametrize("name", BESIDE_NONE)
@pytest.mark.parametrize("field", FIELDS)
def test_none_is_joined_or_named_in_every_order_as_torch_does(name, field, tmp_path):
    wrap = FIELDS[field]
    samples = [wrap(BESIDE_NONE[name]), wrap(None)]
    rows = pack(samples, tmp_path / "a.lk", workers=0)
    try:
        expected = default_collate(samples)
    except (TypeError, RuntimeError):
        for order in ([0, 1], [1, 0]):
            said = f"{field} is None in sample {order.index(1)} of the batch, and "
            with pytest.raises(DatasetError, match=re.escape(said)):
                rows.batch(order)
        column = field.split("'")[1::2]
        if column:
            with pytest.raises(DatasetError, match=re.escape(field)):
                rows[column[0]]
    else:
        assert_same(rows.batch([0, 1]), expected)
        assert type(rows.batch([1, 0])) is type(expected)


def test_samples_with_and_without_axes_are_named_in_their_error(tmp_path):
    shapes = [(), (), (2,)]
    samples = [{"x": torch.ones(shape)} for shape in shapes]

    rows = pack(samples, tmp_path / "a.lk", workers=0)
    with pytest.raises(DatasetError, match=r"Samples 0 and 2 .*: \[\] .*, \[2\]"):
        rows.batch([0, 1, 2])


def test_rows_that_are_one_number_are_answered_with_a_list(dataset):
    with pytest.raises(TypeError, match=r"of one row: \[3\]"):
        dataset.select(3)


def test_what_is_looped_over_as_epochs_is_no_number():
    with pytest.raises(OptionError, match=r"fix: epochs\(range\(10\)\)"):
        next(LeakDetector("cpu").epochs(10))


def test_a_sampler_of_batches_is_answered_with_its_option():
    sampler = torch.utils.data.BatchSampler(range(4), 2, drop_last=False)

    with pytest.raises(OptionError, match="fix: batch_sampler=sampler"):
        build_loader(SAMPLES, sampler=sampler)
    with pytest.raises(OptionError, match="fix: generator=generator"):
        build_loader(SAMPLES, shuffle=True, seed=torch.Generator())


def test_a_device_that_is_not_here_is_refused_by_the_meter_too():
    missing = "mps" if not torch.backends.mps.is_available() else "xpu"

    with pytest.raises(OptionError, match="no such device here"):
        MemoryMeter(missing)


def test_fields_whose_shapes_cannot_be_joined_are_told_of_columns_too(tmp_path):
    shapes = [(3, 8 + i, 8 - i) for i in range(3)]
    rows = pack([{"x": torch.ones(s)} for s in shapes], tmp_path / "a.lk", workers=0)

    with pytest.raises(DatasetError, match="Field 'x' has shapes"):
        rows.column("x")


def test_an_estimate_of_bytes_is_never_below_none():
    for width in (1, 2, 5):
        step = loaderkit.estimate_step(
            torch.nn.Linear(width, 1), torch.ones(2, width), optimizer="sgd"
        )
        assert 0 <= step.low <= step.peak <= step.high


# ---- order

EXCHANGED = {
    "pack": (lambda path: pack(path, SAMPLES), "pack(samples, "),
    "extend": (lambda path: extend(SAMPLES, path), "extend("),
    "push": (lambda path: push("s3://bucket/rows", path), "push("),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_arguments_that_were_exchanged_are_put_right(name, tmp_path):
    call, fix = EXCHANGED[name]

    with pytest.raises(OptionError, match="exchanged") as raised:
        call(str(tmp_path / "rows.lk"))

    assert raised.value.fix.startswith(fix)
    assert "rows.lk" in raised.value.fix


@pytest.mark.parametrize("call", [push, pull])
def test_from_store_to_store_a_cache_goes_by_way_of_a_folder(call):
    with pytest.raises(OptionError, match="in a store") as raised:
        call("s3://one/rows", "s3://two/rows")

    fix = "pull('s3://one/rows', 'rows'); push('rows', 's3://two/rows')"
    assert raised.value.fix == fix


def test_a_trainer_in_pieces_takes_the_model_first():
    with pytest.raises(OptionError, match=r"fix: MicroBatcher\(model, optimizer\)$"):
        MicroBatcher(SGD, MODEL)
    with pytest.raises(OptionError, match="mse_loss was given as optimizer"):
        MicroBatcher(MODEL, torch.nn.functional.mse_loss)


FUNCTIONS = {
    "transform": lambda given: SafeDataset(cache="a.lk", transform=given),
    "batch_transform": lambda given: build_loader(SAMPLES, batch_transform=given),
    "collate_fn": lambda given: build_loader(SAMPLES, collate_fn=given),
    "worker_init_fn": lambda given: build_loader(SAMPLES, worker_init_fn=given),
    "loss": lambda given: estimate_step(MODEL, torch.zeros(2, 1), loss=given),
    "loss of a plan": lambda given: plan_batch(MODEL, SAMPLES, "cpu", loss=given),
    "loss in pieces": lambda given: MicroBatcher(MODEL, SGD, given),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", [torch.nn.MSELoss, torch.nn.ReLU, Constant])
def test_a_class_whose_instances_are_functions_is_told_to_be_called(name, kind):
    with pytest.raises(OptionError, match="got the class") as raised:
        FUNCTIONS[name](kind)

    assert raised.value.fix.endswith(f"={kind.__name__}(...)")


CALLED_WITH_ONE = ["transform", "batch_transform", "collate_fn", "worker_init_fn"]


@pytest.mark.parametrize("name", CALLED_WITH_ONE)
@pytest.mark.parametrize(
    "function",
    [lambda: 3, lambda first, second: first, lambda *, sample: sample],
    ids=["too few", "too many", "by name"],
)
def test_a_function_that_does_not_take_what_it_is_given_is_told(name, function):
    with pytest.raises(OptionError, match=f"{name} cannot be called") as raised:
        FUNCTIONS[name](function)

    FUNCTIONS[name](eval(raised.value.fix.partition("=")[2]))


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize(
    "function",
    [lambda *all_of_it: all_of_it, lambda sample, seed=0: sample, len, Constant()],
    ids=["any", "more with defaults", "of C", "a transform"],
)
def test_a_function_that_can_be_called_with_one_is_taken(function):
    for name in CALLED_WITH_ONE:
        FUNCTIONS[name](function)


@pytest.mark.parametrize("kind", [dict, list, Clip], ids=repr)
def test_a_class_that_makes_plain_values_is_a_function(kind):
    assert SafeDataset(cache="a.lk", transform=kind).transform is kind


LOSSES = [
    name
    for name in dir(torch.nn.functional)
    if name.endswith(("_loss", "cross_entropy"))
]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_by_name_is_answered_with_torchs_function(loss):
    modules = {name.lower(): name for name in dir(torch.nn) if name.endswith("Loss")}
    as_module = modules.get(loss.replace("_", ""), loss)

    for name in {loss, loss.removesuffix("_loss"), as_module}:
        with pytest.raises(OptionError) as raised:
            estimate_step(MODEL, torch.zeros(2, 1), loss=name)
        if name != as_module or name == loss:
            assert raised.value.fix == f"loss=torch.nn.functional.{loss}"


WRONG_STEPS = {
    "of the model": (torch.nn.Linear(5, 1), None),
    "of the loss": (MODEL, lambda output, batch: output.nothing_like_it),
    "of a loss of torch": (MODEL, torch.nn.NLLLoss()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_plan_says_of_a_wrong_step_what_an_estimate_says(name):
    model, loss = WRONG_STEPS[name]
    samples = [torch.zeros(1) for _ in range(8)]

    with pytest.raises(StepError) as of_estimate:
        estimate_step(model, torch.zeros(2, 1), loss=loss)
    with pytest.raises(StepError) as of_plan:
        plan_batch(model, samples, "cuda", limit="1 MiB", loss=loss)

    assert of_plan.value.why == of_estimate.value.why
    assert of_plan.value.fix == of_estimate.value.fix


@pytest.mark.parametrize("epochs", [0, -1, "many"])
def test_a_plan_is_for_one_epoch_at_least(epochs):
    with pytest.raises(OptionError, match="epochs must be"):
        plan_batch(MODEL, SAMPLES, "cpu", epochs=epochs)


@pytest.mark.parametrize("name", ["zip", "gz", "none", 9])
def test_a_compression_that_there_is_not_is_answered_with_one_that_there_is(name):
    with pytest.raises(OptionError, match="compression must be") as raised:
        PackOptions(compression=name)

    advised = re.match(r"compression='(\w+)'", raised.value.fix)
    assert PackOptions(compression=advised[1])


def test_a_function_that_makes_no_executor_is_told(tmp_path):
    with pytest.raises(OptionError, match="which is no executor"):
        pack(SAMPLES, tmp_path / "a.lk", executor=lambda: 3)


@pytest.mark.parametrize("size", ["1 MiB", "64 KB", "500 B"])
def test_the_bytes_of_a_batch_may_be_written_as_a_text(dataset, size):
    by_text = build_loader(dataset, max_bytes=size, num_workers=0)
    by_number = build_loader(dataset, max_bytes=parse_bytes(size), num_workers=0)

    assert by_text.plan.batching == by_number.plan.batching


MAPPINGS = {
    "fields": ({"x": torch.ones(2), "name": "a"}, "pack([sample], path)", 1),
    "numbers": ({"x": 3, "y": 4}, "pack([sample], path)", 1),
    "samples": (
        {"a": {"x": torch.ones(2)}, "b": {"x": torch.ones(3)}},
        "pack(list(samples.values()), path)",
        2,
    ),
    "columns": (
        {"ids": [[1, 2], [3], [4]], "label": [0, 1, 0]},
        "pack(torch.utils.data.StackDataset(**columns), path)",
        3,
    ),
    "arrays of columns": (
        {"x": torch.ones(3, 4), "y": torch.arange(3)},
        "pack(torch.utils.data.StackDataset(**columns), path)",
        3,
    ),
    "splits": (
        {"train": [{"x": 1}, {"x": 2}], "test": [{"x": 3}, {"x": 4}]},
        "pack(list(samples.values()), path)",
        2,
    ),
    "one text": (UserDict(ids=[1, 2], mask=[1, 1]), "pack([dict(sample)], path)", 1),
    "texts": (
        UserDict(ids=[[1, 2], [3]], mask=[[1, 1], [1]]),
        "pack(torch.utils.data.StackDataset(**encoding), path)",
        2,
    ),
}
"""What is given, the advice, and how many samples are packed by it."""


@pytest.mark.parametrize("name", MAPPINGS)
def test_a_mapping_is_answered_with_what_can_be_packed_of_it(name, tmp_path):
    given, fix, samples = MAPPINGS[name]

    with pytest.raises(DatasetError) as raised:
        pack(given, tmp_path / "a.lk")

    assert raised.value.fix == fix
    names = dict.fromkeys(("sample", "samples", "encoding", "columns"), given)
    packed = eval(fix, {"pack": pack, "torch": torch, "path": tmp_path / "b", **names})
    assert len(packed) == samples


@pytest.mark.parametrize("limit", ["8 GiB", "500MB", "1.5 kb"])
def test_a_limit_in_the_place_of_a_batch_is_told(limit):
    with pytest.raises(
        OptionError, match="was given as batch, and a Tensor was given as limit"
    ):
        assert_fits(MODEL, limit, torch.zeros(2, 1))


# ---- paths


HOME_CALLS = {
    "pack": lambda path: pack(SAMPLES, path),
    "open_cache": open_cache,
    "dataset": lambda path: SafeDataset(cache=path),
    "inspect_cache": loaderkit.inspect_cache,
    "verify": loaderkit.verify,
    "push": lambda path: push(path, "memory://rows"),
    "pull": lambda path: loaderkit.pull("memory://rows", path),
    "extend": lambda path: extend(path, SAMPLES),
    "concat": lambda path: loaderkit.concat([path], "all.lk"),
    "concat into": lambda path: loaderkit.concat(["rows.lk"], path),
}


@pytest.mark.parametrize("name", HOME_CALLS)
@pytest.mark.parametrize("kind", [str, Path])
def test_the_home_folder_of_a_shell_is_told_to_be_expanded(
    name, kind, tmp_path, monkeypatch, dataset
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(dataset.cache, tmp_path / "rows.lk")

    with pytest.raises(OptionError, match="home folder") as raised:
        HOME_CALLS[name](kind("~/rows.lk"))

    assert raised.value.fix == "os.path.expanduser('~/rows.lk')"
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("name", HOME_CALLS)
@pytest.mark.parametrize("path", ["", "rows\0.lk"])
def test_a_path_that_no_system_has_is_refused(name, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(OptionError, match=r"zero byte|is empty"):
        HOME_CALLS[name](path)

    assert not list(tmp_path.iterdir())


def test_a_path_of_bytes_is_answered_with_its_text(dataset):
    with pytest.raises(OptionError) as raised:
        open_cache(os.fsencode(dataset.cache))

    assert eval(raised.value.fix, {"os": os}) == str(dataset.cache)


@pytest.mark.parametrize("name", ["a" * 300, "loop", "dangling", "file", "file/cache"])
def test_a_path_that_cannot_be_a_folder_is_not_blamed_on_the_disk(name, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    expected = {
        "loop": "leads back to itself",
        "dangling": "dangling is a link to .*nowhere, which is not there",
        "file": "a file has that name",
        "file/cache": "file is a file, and no folder",
    }

    with pytest.raises(CacheError, match=expected.get(name, "up to 255 bytes")):
        pack(SAMPLES, tmp_path / name, workers=0)


def test_a_cache_that_was_moved_while_it_is_open_is_told_to_be_gone(tmp_path):
    pack(SAMPLES, tmp_path / "a.lk", workers=0)
    opened = open_cache(tmp_path / "a.lk")
    moved = (tmp_path / "a.lk").rename(tmp_path / "b.lk")

    with pytest.raises(CacheError, match="was moved, renamed or deleted"):
        opened[0]

    assert len(open_cache(moved)) == len(SAMPLES)


class Rows(SafeDataset):
    def keys(self):
        return range(2)

    def load(self, n):
        return n


WRITERS = {
    "pack": lambda path, _: pack(SAMPLES, path, workers=0),
    "class": lambda path, _: Rows(cache=path)[0],
    "map": lambda path, cache: open_cache(cache).map(lambda n: n, cache=path),
    "concat": lambda path, cache: loaderkit.concat([cache, cache], path),
    "pull": lambda path, cache: loaderkit.pull(f"file://{cache}", path),
    "mirror": lambda path, cache: open_cache(f"file://{cache}", mirror=path),
}
"""What makes a folder for a cache, of a path and a cache that is there."""


@pytest.mark.many_cases(quick=16)
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "written",
    [
        "s3:/bucket/rows",
        "gs:/bucket/rows",
        "S3:/bucket/rows",
        Path("s3://bucket/rows"),  # which pathlib cuts
        Path("hf://datasets/user/name/rows"),
        "HERE/s3:/bucket/rows",  # of os.path.abspath
        "file:/rows",
    ],
    ids=str,
)
def test_a_url_with_a_slash_too_few_is_not_written_into(
    name, written, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    cache = pack([1, 2], "there.lk", workers=0).cache
    before = sorted(tmp_path.iterdir())
    path = written
    if isinstance(written, str):
        path = written.replace("HERE", str(tmp_path))

    with pytest.raises(LoaderkitError, match="a URL begins with ://") as raised:
        WRITERS[name](path, cache)

    if name != "mirror":
        url = str(written).removeprefix("HERE/").replace("S3", "s3")
        assert url.replace(":/", "://") in str(raised.value.fix).replace(":///", "://")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.many_cases(quick=5)
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "written", ["s3", "s3/rows", "run:1/s3/rows", "2026-11-27T18:30"]
)
def test_its_twin_a_folder_that_only_looks_like_one_is(
    name, written, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    cache = pack([1, 2], "there.lk", workers=0).cache

    WRITERS[name](written, cache)


@pytest.mark.slow
def test_a_scheme_in_capitals_is_answered_with_small_letters():
    with pytest.raises(LoaderkitError) as raised:
        open_cache("S3://bucket/rows")
    assert raised.value.fix == "'s3://bucket/rows'"


@pytest.mark.parametrize("path", ["file:/data/rows", "local:/data/rows"])
def test_the_url_of_a_path_of_this_machine_has_three_slashes(path):
    with pytest.raises(LoaderkitError) as raised:
        loaderkit.push("rows.lk", path)
    assert ":///data/rows" in raised.value.fix


@pytest.mark.parametrize("asked", ["rows", "row.lk", "rows.l", "Rows.lk"])
def test_a_path_that_is_not_there_is_answered_with_the_cache_beside_it(dataset, asked):
    with pytest.raises(CacheError, match="no such folder") as raised:
        open_cache(dataset.cache.parent / asked)

    assert raised.value.fix == f"did you mean {str(dataset.cache)!r}?"


@pytest.mark.parametrize("part", ["manifest.json", "*.h5", "absent.h5"])
def test_a_path_inside_of_a_cache_is_answered_with_the_cache(dataset, part):
    names = [file.name for file in dataset.cache.glob(part)] or [part]

    with pytest.raises(CacheError) as raised:
        open_cache(dataset.cache / names[0])

    assert raised.value.fix == f"open_cache({str(dataset.cache)!r})"


def test_a_folder_of_caches_is_answered_with_one_of_them(dataset):
    with pytest.raises(CacheError, match=r"it holds rows\.lk") as raised:
        open_cache(dataset.cache.parent)

    assert raised.value.fix == f"open_cache({str(dataset.cache)!r})"


@pytest.mark.parametrize("value", [True, False, "sometimes", None, 3])
def test_checksums_of_other_words_are_answered_with_one_of_three(dataset, value):
    with pytest.raises(OptionError) as raised:
        open_cache(dataset.cache, checksums=value)

    open_cache(dataset.cache, **eval(f"dict({raised.value.fix})"))


@pytest.mark.parametrize("given", [Clip, "Clip", ["Clip"], 3], ids=repr)
@pytest.mark.parametrize(
    "call",
    [open_cache, lambda path, **o: SafeDataset(cache=path, **o)],
    ids=["open_cache", "SafeDataset"],
)
def test_classes_that_are_no_list_of_classes_are_told(dataset, given, call):
    with pytest.raises(OptionError, match="classes must be") as raised:
        call(dataset.cache, classes=given)

    assert raised.value.fix.startswith("classes=[")


def test_keys_in_a_set_are_refused(tmp_path):
    class Named(SafeDataset):
        def keys(self):
            return {"a", "b"}

        def load(self, key):
            return {"x": key}

    with pytest.raises(DatasetError, match="has no order") as raised:
        len(Named(cache=tmp_path / "a.lk"))

    assert raised.value.fix == "return sorted(keys)"


def test_raw_data_that_is_not_there_is_told_where_there_are_no_keys(tmp_path):
    class Files(SafeDataset):
        def keys(self):
            return sorted(self.raw.glob("*.txt"))

        def load(self, key):
            return {"x": key}

    with pytest.raises(DatasetError, match=r"there is no .*absent, its raw data"):
        len(Files(tmp_path / "absent", cache=tmp_path / "a.lk"))


@pytest.mark.parametrize("nest", [list, tuple, dict])
def test_a_graph_inside_of_a_sample_is_told_to_be_one(nest, tmp_path):
    graph = Data(x=torch.ones(2, 1))
    sample = {"graph": graph} if nest is dict else nest([graph])

    with pytest.raises(DatasetError, match="one graph a sample"):
        pack([sample], tmp_path / "a.lk")


NOT_ADDED = {
    "one sample": {"x": torch.ones(2)},
    "samples by name": {"a": {"x": torch.ones(2)}, "b": {"x": torch.ones(2)}},
    "columns": {"x": torch.ones(3, 2), "y": torch.ones(3)},
    "another cache": "another.lk",
}
"""What ``extend`` does not take."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_ADDED)
def test_extend_is_answered_with_a_call_of_extend(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = NOT_ADDED[name]
    cache = pack(SAMPLES, tmp_path / "rows.lk", workers=0).cache
    pack(SAMPLES, tmp_path / "another.lk", workers=0)

    with pytest.raises(DatasetError) as raised:
        extend(cache, given, workers=0)

    assert raised.value.fix in str(raised.value)
    names = dict.fromkeys(("sample", "samples", "columns"), given)
    calls = {"extend": extend, "open_cache": open_cache, "torch": torch}
    added = eval(raised.value.fix, {**calls, "cache": cache, **names})
    assert len(added) > len(SAMPLES)


@pytest.mark.parametrize("given", [None, 3, [], SAMPLES], ids=repr)
def test_what_is_verified_is_named_by_a_path(given):
    with pytest.raises(OptionError, match="named by a path"):
        loaderkit.verify(given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("is_built", [False, True])
def test_a_device_that_is_not_here_lacks_a_build_or_a_driver(is_built, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)

    with pytest.raises(OptionError) as raised:
        build_loader(SAMPLES, "cuda", batch_size=2)

    assert ("is built for cuda" in str(raised.value)) == is_built
    assert ("install the build" in str(raised.value)) != is_built


def test_the_columns_of_a_type_are_not_assigned_to(tmp_path):
    graph = HeteroData(paper={"x": torch.ones(2, 1)})
    papers = pack([graph] * 2, tmp_path / "a.lk", workers=0)["paper"]

    with pytest.raises(NotChangeableError):
        papers.x = torch.zeros(4, 1)
    with pytest.raises(NotChangeableError):
        papers["x"] = torch.zeros(4, 1)

    assert papers.x.sum() == 4


# ---- words


@pytest.mark.parametrize("value", [3, [], "x", {}, object(), int, MODEL])
def test_a_kind_has_its_article(value):
    assert re.match(r"an [aeioAEIO]|a [^aeioAEIO]", kind_of(value))


def test_none_has_no_article():
    assert kind_of(None) == with_article("NoneType") == "None"


# ---- the command line


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_a_misspelt_command_is_answered_with_the_nearest(command, capsys):
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args([command[:1] + command[2:]])

    assert ended.value.code == 2
    assert f"did you mean {command!r}?" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--help"])
def test_a_misspelt_option_is_answered_by_its_command(option, capsys):
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["inspect", "a.lk", option[:3] + option[4:]])

    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"did you mean {option!r}?" in error
    assert "usage: loaderkit inspect" in error


def test_an_option_in_front_of_the_command_is_told_its_place(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--json", "doctor"])

    assert "write it behind the command" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["LIMIT", "Wide"])
def test_what_makes_no_model_is_told(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "import torch\nLIMIT = [3]\n"
    text += "class Wide(torch.nn.Module):\n    def __init__(self, width): ...\n"
    Path("net.py").write_text(text, encoding="utf-8")

    assert main(["plan", f"net.py:{name}", "3x4"]) == 1

    error = capsys.readouterr().err
    assert "make_model" in error
    assert "Traceback" not in error


# ---- assertions


@pytest.mark.slow
def test_what_asserts_raises_an_assertion_error():
    kept = []
    calls = {
        "assert_no_leak": lambda: assert_no_leak(lambda: kept.append(bytearray(10**6))),
        "assert_fits": lambda: assert_fits(MODEL, torch.zeros(2, 1), "1 B"),
    }
    assert set(calls) == {n for n in loaderkit.__all__ if n.startswith("assert_")}

    for call in calls.values():
        with pytest.raises(AssertionError):
            call()


def test_a_number_that_is_out_of_range_is_not_blamed_for_its_type():
    for given in (80, -1.0, 0):
        with pytest.raises(OptionError, match="out of range"):
            configure_allocator(mps_fraction=given)
    with pytest.raises(OptionError, match="its type is str"):
        configure_allocator(mps_fraction="most")
    with pytest.raises(OptionError, match="its type is float"):
        assert_no_leak(list, epochs=8.5)


def test_a_limit_that_is_a_share_is_told_to_be_bytes():
    with pytest.raises(OptionError, match="no share of a memory"):
        plan_batch(MODEL, SAMPLES, "cpu", limit=0.8)


@pytest.mark.parametrize("limit", [1, 24, np.int64(80), 4095])
def test_a_limit_without_a_unit_is_not_taken_for_bytes(limit):
    for call in (plan_batch, assert_fits):
        args = (MODEL, SAMPLES, "cpu") if call is plan_batch else (MODEL, SAMPLES)
        with pytest.raises(OptionError, match="without a unit it is bytes") as raised:
            call(*args, limit=limit)
        assert raised.value.fix == f"limit='{limit} GB', or limit='{limit} B'"


NO_TARGETS = {
    "a dict": ({"x": torch.ones(4, 1), "label": torch.zeros(4, 1)}, "batch['label']"),
    "three": ((torch.ones(4, 1), torch.zeros(4, 1), torch.ones(4)), "batch[1]"),
    "a graph": (
        Batch.from_data_list([Data(x=torch.ones(1, 1), y=torch.zeros(1, 1))] * 4),
        "batch.y",
    ),
}


class First(torch.nn.Linear):
    """Takes batches of any form."""

    def forward(self, *parts, **fields):
        given = parts[0] if parts else fields["x"]
        return super().forward(given if isinstance(given, torch.Tensor) else given.x)


@pytest.mark.parametrize("name", NO_TARGETS)
@pytest.mark.parametrize(
    "loss",
    [torch.nn.functional.mse_loss, torch.nn.MSELoss(), torch.nn.functional.l1_loss],
)
def test_a_loss_of_torch_is_not_given_a_whole_batch_as_its_target(name, loss):
    batch, target = NO_TARGETS[name]
    model = First(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = (
        lambda loss: estimate_step(model, batch, loss=loss),
        lambda loss: MicroBatcher(model, sgd, loss, micro_batch=2).step(batch),
    )

    for call in calls:
        with pytest.raises(StepError, match="the whole batch as its target") as raised:
            call(loss)
        assert raised.value.fix.endswith(f"(output, {target})")
        call(eval(raised.value.fix.partition("=")[2], {"torch": torch}))


def test_a_scheduler_is_no_optimizer():
    scheduler = torch.optim.lr_scheduler.StepLR(SGD, 1)

    with pytest.raises(OptionError, match="it is a scheduler") as raised:
        MicroBatcher(MODEL, scheduler)

    code = raised.value.fix.partition("=")[2]
    MicroBatcher(MODEL, eval(code, {"scheduler": scheduler}))


def test_a_function_that_needs_arguments_is_told_on_the_command_line(tmp_path, capsys):
    file = tmp_path / "sources.py"
    file.write_text("def samples(number): return [number]\n")

    assert main(["pack", f"{file}:samples", str(tmp_path / "a.lk")]) == 1

    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "cannot be called" in error


@pytest.mark.parametrize(
    "given",
    [["cpu", "cuda:0"], (torch.device("cpu"),), b"cpu", -1],
    ids=["names", "devices", "bytes", "none of them"],
)
def test_what_names_a_device_in_another_way_is_answered_with_the_device(given):
    with pytest.raises(OptionError) as caught:
        build_loader([1, 2], given)

    assert len(eval(f"build_loader([1, 2], {caught.value.fix})", globals())) == 2


class GivesNothing(torch.utils.data.IterableDataset):
    def __iter__(self):
        iter([1])


class GivesAList(GivesNothing):
    def __iter__(self):
        return [1]


@pytest.mark.parametrize("kind", [GivesNothing, GivesAList])
def test_a_stream_that_returns_no_iterator_is_told_to_return_one(kind):
    with pytest.raises(LoaderError, match="returned non-iterator") as caught:
        list(build_loader(kind(), batch_size=1))

    assert "return iter(samples)" in caught.value.fix


def test_an_empty_batch_is_told_alike_of_a_list_and_of_a_cache(tmp_path):
    rows = [{"x": torch.ones(2)}] * 3
    packed = pack(rows, tmp_path / "a.lk", workers=0)

    told = []
    for dataset in (rows, packed, torch.utils.data.Subset(packed, [0, 1])):
        with pytest.raises(LoaderError, match="without samples") as caught:
            list(build_loader(dataset, batch_sampler=[[0], []]))
        told.append(str(caught.value))

    assert len(set(told)) == 1
    assert "leave empty batches out of the batch_sampler" in told[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_rows_of_floats_are_told_with_their_own_dtype(dtype):
    packed_rows = torch.tensor([1.0, 2.0], dtype=dtype)
    named = str(dtype).removeprefix("torch.")

    with pytest.raises(OptionError, match=f"Tensor of {named}"):
        normalize_indices(packed_rows, 3)


def test_a_function_that_takes_nothing_is_told_to_take_the_sample(tmp_path):
    numbers = pack([1, 2, 3], tmp_path / "a.lk", workers=0)

    with pytest.raises(OptionError) as caught:
        numbers.filter(lambda: True)

    kept = numbers.filter(eval(caught.value.fix.replace("...", "sample > 1")))
    assert len(kept) == 2


def test_a_sampler_that_is_a_class_is_told_to_be_called():
    with pytest.raises(OptionError) as caught:
        build_loader([1, 2], sampler=torch.utils.data.RandomSampler)

    assert caught.value.fix == "sampler=RandomSampler(...)"


def test_a_number_that_is_read_as_a_size_is_told_what_takes_both():
    with pytest.raises(OptionError, match="is a text, such as '256 MiB', got 3"):
        parse_bytes(3)


def test_every_counter_of_a_reading_is_found_by_its_name():
    reading = read_memory()
    fields = {"tensors"}  # a counter, and the tensors themselves

    for name, value in reading.values.items():
        if name in fields:
            continue
        with pytest.raises(AttributeError) as caught:
            getattr(reading, name)
        assert eval(caught.value.fix, {"sample": reading}) == value


class OfFiles(SafeDataset):
    def keys(self):
        return sorted(self.raw.glob("*.npz"))

    def load(self, key):
        return key.name


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (None, "there is no {raw}, its raw data"),
        ([], "{raw}, its raw data, is an empty folder"),
        (["a.npy"], "{raw}, its raw data, holds a.npy"),
        (list("abcdef"), "{raw}, its raw data, holds a, b, c and 3 more"),
    ],
)
def test_a_class_without_keys_is_told_what_its_raw_data_is(tmp_path, files, told):
    raw = tmp_path / "raw"
    if files is not None:
        raw.mkdir()
    for name in files or []:
        (raw / name).touch()

    with pytest.raises(DatasetError, match="nothing to pack") as raised:
        OfFiles(raw=raw, cache=tmp_path / "a.lk")[0]

    assert raised.value.why == told.format(raw=raw)


def test_raw_data_that_is_a_file_is_told_where_there_are_no_keys(tmp_path):
    raw = tmp_path / "raw.h5"
    raw.touch()
    with pytest.raises(DatasetError, match="is a file") as raised:
        OfFiles(raw=raw, cache=tmp_path / "a.lk")[0]
    assert raised.value.fix.endswith(f"or at raw={str(raw)!r}")


def test_a_url_is_no_folder_of_files():
    with pytest.raises(DatasetError, match="is a URL, and no folder") as raised:
        pack("s3://bucket/x", "x.lk")
    assert raised.value.fix.startswith("open_cache('s3://bucket/x')")


@pytest.mark.parametrize(
    "damage", ["missing", "no manifest", "newer", "cut", "torn manifest", "no shard"]
)
def test_what_was_not_read_is_not_said_to_be_damaged(dataset, tmp_path, damage):
    path = Path(shutil.copytree(dataset.cache, tmp_path / "copy.lk"))
    manifest, [shard] = path / "manifest.json", list(path.glob("*.h5"))
    if damage == "missing":
        shutil.rmtree(path)
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "newer":
        text = manifest.read_text()
        manifest.write_text(re.sub(r'"version": ?\d+', '"version": 999', text, count=1))
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:100])
    elif damage == "torn manifest":
        manifest.write_text(manifest.read_text()[:50])
    else:
        shard.unlink()

    verification = loaderkit.verify(path)

    was_read = damage in {"cut", "torn manifest", "no shard"}
    word = "damaged" if was_read else "not verified"
    assert not verification.ok
    assert str(verification).startswith(f"{path}: {word}\n")


def test_no_sample_in_any_span_is_told_in_one_negative(tmp_path):
    with pytest.raises(DatasetError) as raised:
        pack(lambda span, spans: (), tmp_path / "x.lk", spans=3)
    assert (
        raised.value.what == "There is nothing to pack: none of 3 spans has a sample."
    )


@pytest.mark.parametrize(
    "ask",
    [len, list, lambda rows: rows[0], lambda rows: build_loader(rows, batch_size=2)],
    ids=["len", "loop", "row", "loader"],
)
def test_a_dataset_without_cache_whose_raw_folder_is_not_there_is_told(
    tmp_path, monkeypatch, ask
):
    """Its path was relative, say, and the current folder is another one now."""
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.npz").touch()
    monkeypatch.chdir(tmp_path)
    rows = OfFiles(raw="raw")
    monkeypatch.chdir(tmp_path.parent)

    with pytest.raises(DatasetError, match="there is no raw, its raw data"):
        ask(rows)
    monkeypatch.chdir(tmp_path)
    assert list(rows) == ["a.npz"]


def test_its_twin_a_raw_folder_in_which_there_is_nothing_yet_is_empty(tmp_path):
    assert len(OfFiles(raw=tmp_path)) == 0
