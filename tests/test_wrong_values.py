"""Wrong values and a wrong order of arguments are answered with a call that works."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import loaderkit
from loaderkit import (
    LeakDetector,
    MemoryMeter,
    MicroBatcher,
    SafeDataset,
    assert_no_leak,
    build_loader,
    configure_allocator,
    extend,
    open_cache,
    pack,
    push,
)
from loaderkit.arguments import kind_of, with_article
from loaderkit.cli.main import COMMANDS, build_parser
from loaderkit.datasets.pack import PackOptions
from loaderkit.errors import CacheError, DatasetError, LoaderkitError, OptionError
from loaderkit.units import parse_bytes, size_in_bytes

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


def test_a_trainer_in_pieces_takes_the_model_first():
    with pytest.raises(OptionError, match=r"MicroBatcher\(model, optimizer, loss\)"):
        MicroBatcher(SGD, MODEL)
    with pytest.raises(OptionError, match="optimizer must be"):
        MicroBatcher(MODEL, torch.nn.functional.mse_loss)


# ---- paths


@pytest.mark.parametrize("written", ["s3:/bucket/rows", "gs:/bucket/rows"])
def test_a_url_with_a_slash_too_few_is_not_packed_into(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(LoaderkitError, match="a URL begins with ://") as raised:
        pack(SAMPLES, written, workers=0)

    assert written.replace(":/", "://") in raised.value.fix
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("asked", ["rows", "row.lk", "rows.l", "Rows.lk"])
def test_a_path_that_is_not_there_is_answered_with_the_cache_beside_it(dataset, asked):
    with pytest.raises(CacheError, match="no such folder") as raised:
        open_cache(dataset.cache.parent / asked)

    assert raised.value.fix == f"did you mean {str(dataset.cache)!r}?"


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
