"""Names and things from other libraries work, or are answered with what we have."""

import ast
import copy
import inspect
import logging
import multiprocessing
import operator
import pickle
import re
import sys
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest
import torch
import torch.utils.data
import torch_geometric.data
import torch_geometric.loader
from torch.utils.data import DataLoader, TensorDataset

import loaderkit
from loaderkit import (
    LeakDetector,
    MemoryMeter,
    SafeDataset,
    SafeGraphDataset,
    assert_fits,
    assert_no_leak,
    build_loader,
    concat,
    diagnose_oom,
    estimate_step,
    extend,
    inspect_cache,
    open_cache,
    pack,
    plan_batch,
    verify,
)
from loaderkit.budget.batch.assertions import FitOptions
from loaderkit.budget.batch.plan import PlanOptions
from loaderkit.call_keywords import refuse_keyword
from loaderkit.datasets.absent import CONSTRUCTORS
from loaderkit.datasets.open import BatchKeywords
from loaderkit.errors import (
    DatasetError,
    LoaderError,
    LoaderkitError,
    NoSuchAttributeError,
    NotChangeableError,
    OptionError,
)
from loaderkit.front_door import defining_module, no_such_name
from loaderkit.habits import (
    CALL_HINTS,
    DEVICES,
    DOOR,
    FILE_READERS,
    KEYWORDS,
    LOADER,
    OF_OTHER_LIBRARIES,
    ON_LEAK,
    SIZE_NAMES,
    reader_of,
)
from loaderkit.loader.options import LoaderOptions
from loaderkit.nearest_names import nearest_name, suggest_device

MODEL = torch.nn.Linear(1, 1)
SAMPLES = [torch.ones(1)] * 4
CALLS = {
    "build_loader": (build_loader, (SAMPLES,), LoaderOptions),
    "pack": (pack, (SAMPLES, "never.lk"), None),
    "extend": (extend, ("never.lk", SAMPLES), None),
    "open_cache": (open_cache, ("never.lk",), BatchKeywords),
    "SafeDataset": (SafeDataset, (), None),
    "SafeGraphDataset": (SafeGraphDataset, (), None),
    "LeakDetector": (LeakDetector, (), None),
    "assert_no_leak": (assert_no_leak, (list,), None),
    "estimate_step": (estimate_step, (MODEL, torch.ones(1, 1)), None),
    "plan_batch": (plan_batch, (MODEL, SAMPLES, "cpu"), PlanOptions),
    "assert_fits": (assert_fits, (MODEL, torch.ones(1, 1), "1GiB"), FitOptions),
}
"""Each with arguments that it takes, and the class of its options if it has one."""


def keywords_of(name):
    function, _, options = CALLS[name]
    names = set(inspect.signature(function).parameters) - {"options"}
    if options is BatchKeywords:
        names |= set(BatchKeywords.__annotations__)
    elif options is not None:
        names |= set(inspect.signature(options).parameters)
    return names


def error_of_keyword(name, keyword):
    """Call a function with a keyword that it lacks, and give its answer."""
    function, arguments, _ = CALLS[name]
    with pytest.raises(OptionError) as raised:
        function(*arguments, **{keyword: 3})
    return raised.value


# ---- keywords


def calls_with_keywords(names_of):
    return [(name, keyword) for name in CALLS for keyword in sorted(names_of(name))]


@pytest.mark.slow
def test_every_call_at_the_front_door_with_answers_is_asked_for_them():
    others = {"concat", "push", "pull", "MicroBatcher", "transactional_step"}
    at_the_door = {name for name in KEYWORDS if hasattr(loaderkit, name)}

    assert at_the_door - others <= {*CALLS}
    for name in others:
        taken = inspect.signature(getattr(loaderkit, name)).parameters
        advised = [re.match(r"(\w+)=", hint.fix) for hint in KEYWORDS[name].values()]
        assert {found[1] for found in advised if found} <= {*taken}


@pytest.mark.many_cases
@pytest.mark.parametrize(
    ("name", "keyword"), calls_with_keywords(lambda name: KEYWORDS[name])
)
def test_a_keyword_of_another_library_is_answered(name, keyword):
    answer = error_of_keyword(name, keyword)

    assert keyword not in keywords_of(name), "a hint that nobody would ever read"
    assert answer.what == f"{name} has no option {keyword!r}."
    assert answer.fix
    advised = re.match(r"(\w+)=", answer.fix)
    if advised:
        assert advised[1] in keywords_of(name)


def test_the_value_goes_with_the_name_where_it_can_be_meant():
    with pytest.raises(OptionError) as device:
        estimate_step(torch.nn.Linear(2, 1), torch.zeros(1, 2), device="mps")
    with pytest.raises(OptionError) as mode:
        build_loader([1, 2], mode="node")

    assert device.value.fix == "target='mps'"
    assert mode.value.fix == "max_nodes=1000"


def options_in(fix):
    """Options with an example value each: ``{"tolerance": 16384, "limit": "1MiB"}``."""
    options = {}
    for part in fix.split(", or "):
        name, equals, example = part.partition("=")
        try:
            value = ast.literal_eval(example)
        except (ValueError, SyntaxError):
            continue
        if equals and name.isidentifier():
            options[name] = value
    return options


OTHER_VALUES = [7, 5_000_000, "3 MiB", "3mib", "other", 0.25, True, None]


@pytest.mark.parametrize("name", CALLS)
def test_no_answer_to_a_keyword_drops_a_value_that_would_do(name):
    sizes = {"tolerance", "limit", "shard_bytes", "max_bytes", "mirror_bytes"}
    for keyword, hint in KEYWORDS[name].items():
        if hint.why:
            continue
        examples = options_in(hint.fix)
        for value in OTHER_VALUES:
            is_size = value in (5_000_000, "3 MiB", "3mib")
            answered = options_in(refuse_keyword(name, keyword, [], value=value).fix)
            for option, example in examples.items():
                fits = type(value) is type(example) or (is_size and option in sizes)
                assert answered[option] == (value if fits else example), keyword


FIRST_ARGUMENTS = {"dataset", "more", "name", "path", "source"}
"""What is passed by position, and stands for many things."""
OPTIONS_OF_ALL = set().union(*map(keywords_of, CALLS)) - FIRST_ARGUMENTS


@pytest.mark.parametrize("name", CALLS)
def test_an_option_of_another_call_of_ours_is_answered_with_who_has_it(name):
    for keyword in OPTIONS_OF_ALL - keywords_of(name) - {*KEYWORDS[name]}:
        answer = error_of_keyword(name, keyword)

        call = answer.why.removesuffix(" has it")
        assert call != answer.why, f"{keyword} is not in _HOMES of habits.py"
        assert answer.fix.startswith(f"{call}("), (keyword, answer)
        assert keyword in keywords_of(call) | keywords_of("SafeGraphDataset")


@pytest.mark.parametrize("size", sorted(SIZE_NAMES))
def test_a_limit_by_another_name_of_a_size_is_answered_with_ours(size):
    # max_steps is a trainer's, of epochs.
    # A sample's longest length is no limit of a batch.
    of_samples = {"length", "len", "seq_len", "seqlen", "seq_length", "sequence_length"}
    for name in SIZE_NAMES[size] - of_samples - {size, "steps"}:
        answer = error_of_keyword("build_loader", f"max_{name}")
        assert answer.fix == f"max_{size}=3"


def long_keywords_of(name):
    """Of shorter ones, a letter less leaves too little to be recognised."""
    return {keyword for keyword in keywords_of(name) if len(keyword) >= 5}


@pytest.mark.many_cases
@pytest.mark.parametrize(("name", "keyword"), calls_with_keywords(long_keywords_of))
def test_a_misspelt_keyword_is_answered_with_the_nearest(name, keyword):
    misspelt = keyword[:2] + keyword[3:]  # as in "bach_size"

    assert repr(keyword) in error_of_keyword(name, misspelt).fix


def classes_of(*modules, named):
    """List the public classes of libraries whose names end so, by name."""
    return {
        name: kind
        for module in modules
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and name.endswith(named) and name[0] != "_"
    }


LIBRARIES = (torch.utils.data, torch_geometric.loader)
LOADERS_ELSEWHERE = classes_of(*LIBRARIES, named=("Loader", "Sampler"))


def keywords_in(kind):
    """Name the keywords of a class of another library, but for what it reads."""
    parameters = inspect.signature(kind).parameters.values()
    names = {
        p.name for p in parameters if p.kind not in {p.VAR_KEYWORD, p.VAR_POSITIONAL}
    }
    return names - {"data", "dataset"}


@pytest.mark.parametrize("name", sorted(LOADERS_ELSEWHERE))
def test_every_keyword_of_other_loaders_is_taken_or_answered_by_name(name):
    keywords = keywords_in(LOADERS_ELSEWHERE[name])

    assert keywords - keywords_of("build_loader") <= {*KEYWORDS["build_loader"]}


STREAMS_ELSEWHERE = {
    "litdata": """
        input_dir cache_dir item_loader shuffle drop_last seed serializers
        max_cache_size subsample encryption storage_options session_options
        max_pre_download index_path force_override_state_dict transform
        num_canonical_nodes batch_decode item_shuffle_window window_direct_io
        datasets weights iterate_over_all batching_method length resume reset_rngs
    """,
    "MosaicML streaming": """
        streams remote local split download_retry download_timeout validate_hash
        keep_zip epoch_size predownload cache_limit sampling_method
        sampling_granularity partition_algo num_canonical_nodes batch_size shuffle
        shuffle_algo shuffle_seed shuffle_block_size batching_method
        allow_unsafe_types replication stream_name stream_config
    """,
}
"""The arguments of their datasets, which need not be installed here."""
MAKING_DATASETS = {
    **{name: set(names.split()) for name, names in STREAMS_ELSEWHERE.items()},
    **{
        name: keywords_in(kind)
        for name, kind in classes_of(
            torch.utils.data, torch_geometric.data, named="Dataset"
        ).items()
    },
}


@pytest.mark.parametrize("name", sorted(MAKING_DATASETS))
@pytest.mark.parametrize("ours", ["SafeDataset", "SafeGraphDataset"])
def test_every_keyword_of_other_datasets_is_taken_or_answered_by_name(name, ours):
    # A subset has rows of its own, which are given in brackets here.
    unknown = MAKING_DATASETS[name] - keywords_of(ours) - {"indices", "tensors"}

    assert unknown <= {*KEYWORDS[ours]}


CALLED_LIKE = [
    ("build_loader", "accelerate.utils", "DataLoaderConfiguration"),
    ("build_loader", "accelerate.data_loader", "prepare_data_loader"),
    ("build_loader", "lightning", "LightningDataModule.from_datasets"),
    ("build_loader", "torch_geometric.data.lightning", "LightningDataset"),
    ("build_loader", "datasets", "Dataset.to_tf_dataset"),
    ("pack", "datasets", "Dataset.save_to_disk"),
    ("pack", "datasets", "Dataset.from_generator"),
    ("pack", "datasets", "Dataset.from_list"),
    ("pack", "datasets", "Dataset.push_to_hub"),
    ("pack", "datasets", "Dataset.map"),
    ("open_cache", "datasets", "load_dataset"),
    ("concat", "datasets", "concatenate_datasets"),
    ("concat", "datasets", "interleave_datasets"),
    ("push", "datasets", "Dataset.push_to_hub"),
    ("push", "huggingface_hub", "upload_folder"),
    ("pull", "huggingface_hub", "snapshot_download"),
    ("plan_batch", "lightning.pytorch.tuner", "Tuner.scale_batch_size"),
    ("plan_batch", "accelerate.utils", "find_executable_batch_size"),
]
"""Functions of ours, and those of other libraries that do alike."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module", "path"), CALLED_LIKE, ids=lambda part: str(part)
)
def test_every_keyword_of_what_does_alike_is_taken_or_answered(name, module, path):
    like = operator.attrgetter(path)(pytest.importorskip(module))
    taken = {*inspect.signature(getattr(loaderkit, name)).parameters}
    taken |= keywords_of(name) if name in CALLS else set()
    # Those that do not stand for a keyword of their own.
    ours = {"self", "kwargs", "config_kwargs", "dataloader", "hub_kwargs"}

    assert keywords_in(like) - taken - ours <= {*KEYWORDS[name]}


# ---- things


THINGS = {
    "named datasets": (
        {"train": TensorDataset(torch.ones(3)), "test": TensorDataset(torch.ones(2))},
        "it holds the datasets train, test",
        "datasets['train']",
    ),
    "several datasets": (
        [TensorDataset(torch.ones(3)), TensorDataset(torch.ones(2))],
        "it holds 2 datasets",
        "ConcatDataset(datasets)",
    ),
    "columns": (
        {"x": torch.ones(5, 2), "y": np.ones(5)},
        "it holds columns",
        "StackDataset(**columns)",
    ),
}
TAKING_DATASETS = {
    "build_loader": lambda given, _: build_loader(given, probe=False),
    "pack": lambda given, path: pack(given, path, workers=0),
    "plan_batch": lambda given, _: plan_batch(MODEL, given, "cpu", limit="1GiB"),
}


@pytest.mark.parametrize("name", THINGS)
@pytest.mark.parametrize("call", TAKING_DATASETS)
def test_several_datasets_and_columns_are_answered_with_one_dataset(
    tmp_path, name, call
):
    given, why, instead = THINGS[name]

    with pytest.raises(LoaderkitError) as raised:
        TAKING_DATASETS[call](given, tmp_path / "c.lk")

    assert why in raised.value.why
    assert instead in raised.value.fix


def test_the_advice_on_columns_and_several_datasets_works(tmp_path):
    columns, datasets = THINGS["columns"][0], THINGS["several datasets"][0]

    rows = pack(torch.utils.data.StackDataset(**columns), tmp_path / "a.lk", workers=0)
    both = pack(torch.utils.data.ConcatDataset(datasets), tmp_path / "b.lk", workers=0)

    assert (len(rows), sorted(rows[0])) == (5, ["x", "y"])
    assert len(both) == 5


def test_a_dataset_dict_of_hugging_face_is_answered_with_one_of_its_datasets():
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_dict({"a": [1, 2]})

    for kind, dataset in [
        (datasets.DatasetDict, part),
        (datasets.IterableDatasetDict, part.to_iterable_dataset()),
    ]:
        with pytest.raises(OptionError, match="no dataset") as raised:
            build_loader(kind({"train": dataset}))
        assert raised.value.fix == "build_loader(datasets['train'])"


def test_texts_of_numpy_from_hugging_face_are_answered_with_its_torch_format(tmp_path):
    datasets = pytest.importorskip("datasets")
    texts = datasets.Dataset.from_dict({"caption": ["a cat", "a dog"], "label": [0, 1]})

    with pytest.raises(DatasetError) as raised:
        pack(texts.with_format("numpy"), tmp_path / "a.lk", workers=0)

    assert 'pack(dataset.with_format("torch"), path)' in raised.value.fix
    packed = pack(texts.with_format("torch"), tmp_path / "b.lk", workers=0)
    assert [sample["caption"] for sample in packed] == texts["caption"][:]


def test_samples_that_are_lists_or_tensors_are_samples():
    assert len(build_loader([[1, 2], [3, 4]], probe=False)) == 2
    assert len(build_loader([torch.ones(2)] * 3, probe=False)) == 3


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("habits") / "rows.lk"
    return pack([{"label": i % 2} for i in range(4)], path, workers=0)


TAKING_PATHS = {
    "open_cache": open_cache,
    "inspect_cache": inspect_cache,
    "verify": verify,
    "SafeDataset": lambda path: SafeDataset(cache=path),
    "pack": lambda path: pack(SAMPLES, path),
}


@pytest.mark.parametrize("call", TAKING_PATHS)
def test_what_is_no_path_is_answered(dataset, call):
    answers = {}
    for name, given in {
        "paths": ["a.lk", "b.lk"],
        "named paths": {"train": "a.lk"},
        "samples": SAMPLES,
        "dataset": dataset,
        "number": 3,
    }.items():
        with pytest.raises(OptionError, match="named by a path or a URL") as raised:
            TAKING_PATHS[call](given)
        answers[name] = raised.value.fix

    assert answers["paths"].startswith("concat(paths, path)")
    assert "open_cache(path) for name, path" in answers["named paths"]
    assert answers["samples"].startswith("pack(samples, path)")
    assert answers["dataset"] == "dataset.cache is its path"


def test_no_path_at_all_is_answered():
    with pytest.raises(OptionError, match="named by a path or a URL, got None"):
        open_cache(None)


def test_one_path_is_no_list_of_caches():
    with pytest.raises(OptionError, match="takes a list of caches"):
        loaderkit.concat("a.lk", "b.lk")


@pytest.mark.parametrize(
    "methods",
    [
        {"get": lambda self, i: i, "len": lambda self: 3},
        {"process": lambda self: None},
        {"keys": lambda self: range(3)},
    ],
)
def test_a_class_written_for_another_library_is_told_what_it_lacks(tmp_path, methods):
    kind = type("Molecules", (SafeGraphDataset,), methods)

    with pytest.raises(DatasetError, match="Molecules cannot pack the cache") as raised:
        len(kind(cache=tmp_path / "c.lk"))

    assert "def load(self, key)" in raised.value.fix


def test_a_subclass_without_load_opens_what_is_packed(dataset):
    kind = type("Rows", (SafeDataset,), {})

    assert kind(cache=dataset.cache)[3] == {"label": 1}


def test_a_field_of_samples_that_are_no_graphs_is_asked_by_its_name(dataset):
    with pytest.raises(AttributeError, match="dataset\\['label'\\]"):
        _ = dataset.label


def test_a_share_that_is_no_slice_is_answered(dataset):
    with pytest.raises(TypeError, match=r"a share of the rows is a slice: \[:0.8\]"):
        dataset[0.8]


# ---- the front door


@pytest.mark.parametrize("name", DOOR)
def test_a_name_of_another_library_is_answered_at_the_door(name):
    with pytest.raises(AttributeError) as raised:
        getattr(loaderkit, name)

    advised = re.match(r"loaderkit\.(\w+)", DOOR[name].fix)
    assert advised[1] in {*loaderkit.__all__, "__version__"}
    assert DOOR[name].fix in str(raised.value)


def test_what_is_in_a_room_is_told_with_its_module():
    with pytest.raises(AttributeError) as raised:
        _ = loaderkit.LeakReport

    assert "from loaderkit.leaks.report import LeakReport" in str(raised.value)
    assert defining_module("_OfSomebody") is None


@pytest.mark.slow
def test_a_misspelt_name_of_the_door_is_answered_with_the_nearest():
    for name in sorted(set(loaderkit.__all__) - {"__version__"}):
        with pytest.raises(AttributeError, match=f"did you mean {name!r}"):
            getattr(loaderkit, name[:2] + name[3:])


# ---- devices

TAKE_A_DEVICE = {
    "build_loader": lambda device: build_loader(SAMPLES, device, batch_size=2),
    "estimate_step": lambda d: estimate_step(MODEL, torch.ones(1, 1), target=d),
    "plan_batch": lambda device: plan_batch(MODEL, SAMPLES, device, limit="1GiB"),
    "assert_fits": lambda device: assert_fits(
        MODEL, torch.ones(1, 1), "1GiB", device=device
    ),
    "LeakDetector": LeakDetector,
    "MemoryMeter": MemoryMeter,
}


@pytest.mark.parametrize("call", TAKE_A_DEVICE)
@pytest.mark.parametrize("name", [*DEVICES, "GPU", "cdua"])
def test_a_device_by_another_name_is_answered_with_torchs(name, call):
    with pytest.raises(ValueError, match=re.escape(repr(name))) as raised:
        TAKE_A_DEVICE[call](name)

    [*_, meant] = re.findall(r"'(\w+)'", str(raised.value))
    assert meant == DEVICES.get(name.lower(), "cuda")
    assert torch.device(meant).type == meant


@pytest.mark.parametrize("call", TAKE_A_DEVICE)
@pytest.mark.parametrize("name", [*sorted(OF_OTHER_LIBRARIES), "hpu:1", "gaudi3"])
def test_a_device_whose_library_is_missing_is_not_taken_for_another_one(name, call):
    with pytest.raises(ValueError, match=re.escape(repr(name))) as raised:
        TAKE_A_DEVICE[call](name)

    others = {"cuda", "mps", "xpu"} & set(re.findall(r"'(\w+)'", raised.value.fix))
    assert not others, raised.value


# ---- attributes of loaders


def test_an_attribute_of_other_loaders_is_answered_and_shadows_none():
    loader = build_loader(SAMPLES, batch_size=2)

    for name in LOADER:
        assert not hasattr(torch.utils.data.DataLoader(SAMPLES), name)
        with pytest.raises(NoSuchAttributeError, match="fix: ") as raised:
            getattr(loader, name)
        assert raised.value.why
        assert isinstance(raised.value, AttributeError)
        assert not hasattr(loader, name)  # as trainers ask
    with pytest.raises(AttributeError, match="no attribute 'anything'"):
        _ = loader.anything


@pytest.mark.parametrize("name", sorted(LOADERS_ELSEWHERE))
def test_every_attribute_of_other_loaders_is_there_or_answered_by_name(name):
    theirs = dir(LOADERS_ELSEWHERE[name])
    ours = dir(build_loader(SAMPLES, batch_size=2))

    missing = {*theirs} - {*ours} - {*LOADER}

    assert {attribute for attribute in missing if attribute[0] != "_"} == set()


PIPELINES = """
batched unbatched rebatch map_dict map_tuple to_tuple decode compose rename rename_keys
extract_keys repeat with_epoch with_length next_epoch snapshot_every_n_steps num_yielded
prefetch cache cardinality padded_batch unbatch bucket_by_sequence_length enumerate zip
concatenate as_numpy_iterator with_options one_batch show_batch iter_torch_batches
map_batches to_torch bs train valid after_batch before_batch after_item
"""
"""Attributes of loaders that need not be installed: of WebDataset, torchdata, fastai,
and of the pipelines of TensorFlow and Ray."""


def test_every_attribute_of_pipelines_is_answered_by_name():
    assert {*PIPELINES.split()} <= {*LOADER}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DataLoaderShard", "DataLoaderDispatcher"])
def test_every_attribute_of_accelerates_loaders_is_there_or_answered(name):
    elsewhere = pytest.importorskip("accelerate.data_loader")
    ours = build_loader(SAMPLES, batch_size=2)
    theirs = getattr(elsewhere, name)(SAMPLES, batch_size=2)

    names = {attribute for attribute in dir(theirs) if attribute[0] != "_"}

    # Of torch's loader too: the property that a field of the same name would hide.
    assert names - {*dir(ours)} <= {*LOADER}


def test_what_the_dataset_has_is_said_to_be_its():
    loader = build_loader(TensorDataset(torch.ones(4)), batch_size=2)

    with pytest.raises(NoSuchAttributeError, match=r"loader\.dataset\.tensors"):
        _ = loader.tensors
    # Not asked for where it would have to be computed.
    with pytest.raises(NoSuchAttributeError, match="has no attribute 'anything'"):
        _ = loader.anything


def test_common_words_alone_are_not_what_was_meant():
    assert nearest_name("num_columns", ["num_workers", "batch_size"]) is None
    assert nearest_name("num_worker_threads", ["num_workers", "num_samples"])


def test_a_loader_in_a_block_is_closed_behind_it():
    with build_loader(SAMPLES, batch_size=2, num_workers=1) as loader:
        batches = iter(loader)
        next(batches)

    assert multiprocessing.active_children() == []
    assert len(list(loader)) == len(SAMPLES) // 2


SET_BY_TRAINERS = {"collate_fn", "generator", "timeout", "worker_init_fn"}
"""Of what Lightning and accelerate set on a loader; what is called anew is read."""


def names_of_loaders():
    own = [
        *dir(build_loader(SAMPLES)),
        *(field.name for field in fields(LoaderOptions)),
    ]
    return sorted({name for name in [*own, *LOADER] if not name.startswith("_")})


@pytest.mark.many_cases(quick=140)
@pytest.mark.parametrize("name", names_of_loaders())
def test_what_was_decided_of_a_loader_is_not_changed_in_silence(name):
    loader = build_loader(SAMPLES, batch_size=2)
    if name in SET_BY_TRAINERS:
        setattr(loader, name, getattr(loader, name))
        return

    for change in (lambda: setattr(loader, name, 3), lambda: delattr(loader, name)):
        with pytest.raises(NotChangeableError, match=f"loader.{name}") as raised:
            change()
        assert raised.value.why
        assert raised.value.fix.startswith("loader = build_loader(dataset, ")


@pytest.mark.parametrize("name", ["batchsize", "drop_lst", "num_worker", "max_node"])
def test_a_misspelt_setting_of_a_loader_is_not_set(name):
    with pytest.raises(NotChangeableError, match=r"fix: loader = build_loader"):
        setattr(build_loader(SAMPLES), name, 3)


def test_its_twin_a_note_of_the_owner_and_another_function_are_kept():
    loader = build_loader(SAMPLES, batch_size=2)

    loader.name = "train"
    loader.collate_fn = len

    assert copy.copy(loader).name == pickle.loads(pickle.dumps(loader)).name == "train"
    assert list(loader) == [2] * (len(SAMPLES) // 2)


def test_a_batch_asked_of_a_loader_by_its_number_is_answered():
    loader = build_loader(SAMPLES, batch_size=2)

    with pytest.raises(OptionError, match="fix: next\\(iter\\(loader\\)\\)"):
        loader[0]
    assert not isinstance(loader, Iterator), "trainers would go on with a part of it"


def test_what_torchs_loader_does_not_do_a_loader_does_not_do_either():
    """Compared with torch, whose loader is neither a sequence nor an iterator."""
    loaders = [kind(SAMPLES, batch_size=2) for kind in (build_loader, DataLoader)]
    for use in (next, reversed, len, bool, iter, lambda loader: len(iter(loader))):
        results = []
        for loader in loaders:
            try:
                result = use(loader)
            except TypeError as error:
                result = str(error).replace(type(loader).__name__, "loader")
            results.append(result if isinstance(result, int | str) else None)
        assert results[0] == results[1]


def test_the_next_of_old_tutorials_is_answered():
    dataiter = iter(build_loader(SAMPLES, batch_size=2))

    with pytest.raises(AttributeError) as raised:
        dataiter.next()

    assert len(eval(raised.value.fix, {"dataiter": dataiter})) == 2
    with pytest.raises(AttributeError, match="did you mean 'progress'"):
        _ = dataiter.progress_


def test_batches_of_a_number_of_samples_are_the_loaders(dataset):
    with pytest.raises(OptionError, match="fix: build_loader"):
        dataset.batch(batch_size=2)


# ---- calls

CALLED_WRONGLY = {
    "release": lambda: loaderkit.release(MODEL),
    "assert_no_leak": lambda: assert_no_leak(epochs=8),
    "concat": lambda: loaderkit.concat(["a.lk", "b.lk"]),
    "pack": lambda: pack(SAMPLES),
    "extend": lambda: extend("never.lk"),
    "build_loader": lambda: build_loader(SAMPLES, 32, True),
    "diagnose_oom": lambda: loaderkit.diagnose_oom(),
    "oom_guard": lambda: loaderkit.oom_guard(MODEL),
}


@pytest.mark.parametrize("name", CALLED_WRONGLY)
def test_a_call_with_more_or_fewer_arguments_is_answered_with_one_that_works(name):
    with pytest.raises(OptionError, match=f"{name} was called with") as raised:
        CALLED_WRONGLY[name]()

    assert isinstance(raised.value, TypeError)
    assert raised.value.fix == CALL_HINTS[name].fix
    assert raised.value.why


BY_NAME = {
    "LeakDetector.run": lambda *rest: LeakDetector("cpu").run(list, *rest),
    "open_cache": lambda *rest: open_cache("never.lk", *rest),
    "LeakDetector": lambda *rest: LeakDetector("cpu", *rest),
    "inspect_cache": lambda *rest: inspect_cache("never.lk", *rest),
}
"""Calls that take some arguments by name alone, given more by position."""


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("value", [3, None, "text", True, torch.ones(3)])
def test_an_argument_by_position_is_answered_with_the_name_it_takes(name, value):
    with pytest.raises(OptionError, match="too many positional arg") as raised:
        BY_NAME[name](value)

    assert isinstance(raised.value, TypeError)
    call = ast.parse(raised.value.fix, mode="eval").body
    assert ast.unparse(call.func) == name
    keyword = call.keywords[0]
    assert len(call.keywords) == 1
    parameters = inspect.signature(operator.attrgetter(name)(loaderkit)).parameters
    assert parameters[keyword.arg].kind is inspect.Parameter.KEYWORD_ONLY
    if not isinstance(value, torch.Tensor):
        assert ast.literal_eval(keyword.value) == value


@pytest.mark.parametrize("word", [*ON_LEAK, "Ignore", None, False])
def test_what_others_call_the_reaction_to_a_leak_is_answered(word):
    with pytest.raises(OptionError, match="on_leak must be 'raise', 'warn'") as raised:
        LeakDetector("cpu", on_leak=word)

    names = {"logging": logging, "sys": sys}
    LeakDetector("cpu", **eval(f"dict({raised.value.fix})", names))


def test_every_call_with_an_answer_is_one_that_is_refused():
    assert CALLED_WRONGLY.keys() == CALL_HINTS.keys()


class Case:
    def test_method(self):
        """As in a ``unittest.TestCase``."""


@pytest.mark.slow
@pytest.mark.parametrize("call", [assert_no_leak, LeakDetector("cpu").run])
def test_a_function_that_needs_arguments_is_told_before_it_is_called(call):
    with pytest.raises(OptionError, match="test_method needs self") as raised:
        call(Case.test_method)

    assert raised.value.fix.startswith("@pytest.mark.leak_free above test_method")
    with pytest.raises(OptionError, match="model needs input") as raised:
        call(MODEL)
    assert raised.value.fix == "lambda: model(input)"
    call(Case().test_method)
    call(lambda *args, count=3: None)


@pytest.mark.parametrize("kind", [SafeDataset, SafeGraphDataset])
def test_a_cache_in_the_place_of_raw_data_is_answered(kind, tmp_path, dataset):
    for path in [tmp_path / "new.lk", dataset.cache]:
        with pytest.raises(OptionError, match="as its raw data") as raised:
            kind(path)
        assert raised.value.fix == f"{kind.__name__}(cache={str(path)!r})"
    assert kind(tmp_path).raw == tmp_path


@pytest.mark.parametrize("written", ["s3:/bucket/rows", "s3//bucket/rows"])
def test_a_url_with_a_slash_too_few_is_answered_with_the_url(written):
    with pytest.raises(LoaderkitError, match="a URL begins with ://") as raised:
        open_cache(written)

    assert raised.value.fix == "open_cache('s3://bucket/rows')"


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_a_url_of_a_file_with_one_slash_is_answered_with_three(tmp_path, scheme):
    path = pack([1, 2], tmp_path / "c").cache
    url = f"{scheme}:{path}"
    with pytest.raises(LoaderkitError, match="a URL begins with ://") as raised:
        open_cache(url)
    with pytest.raises(OptionError, match="a URL begins with ://"):
        pack([1, 2], url)

    assert list(eval(raised.value.fix)) == [1, 2]


@pytest.mark.parametrize("name", CONSTRUCTORS)
@pytest.mark.parametrize("kind", [SafeDataset, SafeGraphDataset])
def test_a_constructor_of_other_libraries_is_answered_at_the_class(kind, name):
    class Own(kind):
        pass

    for asked in (kind, Own, kind()):
        with pytest.raises(NoSuchAttributeError, match=name) as caught:
            getattr(asked, name)
        assert caught.value.fix.startswith("loaderkit.")
        assert caught.value.why
    assert not hasattr(kind, name)


def test_a_constructor_of_the_users_own_is_theirs():
    class Own(SafeDataset):
        @classmethod
        def from_csv(cls, file):
            return file

    assert Own.from_csv("a.csv") == "a.csv"


@pytest.mark.parametrize(
    "text", ["log.txt", "runs/7/slurm-123.out", "/var/log/train.err", "{folder}/notes"]
)
def test_a_path_where_a_text_is_meant_is_told(tmp_path, text):
    (tmp_path / "notes").write_text("CUDA out of memory")

    with pytest.raises(OptionError, match="takes an error or a text") as caught:
        diagnose_oom(text.format(folder=tmp_path))

    assert "read_text" in caught.value.fix


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Killed",
        "CUDA out of memory",
        "error in a.txt",
        "Killed\nlog.txt",
        "x" * 9999,
    ],
)
def test_a_text_is_not_taken_for_a_path(text):
    diagnose_oom(text)


WHOLE_CACHES = {
    "it has a transform": lambda cache: open_cache(cache.cache, transform=dict),
    "it has 2 of the 4 samples": lambda cache: cache[:2],
    "a method of its own": lambda cache: Changing(cache=cache.cache),
}


class Changing(SafeDataset):
    def __getitem__(self, row):
        return 2 * super().__getitem__(row)


@pytest.mark.parametrize(("why", "change"), WHOLE_CACHES.items())
def test_caches_that_cannot_be_joined_have_one_reason(tmp_path, why, change):
    cache = pack(SAMPLES, tmp_path / "c.lk", workers=0)

    with pytest.raises(OptionError) as caught:
        concat([cache, change(cache)], tmp_path / "both.lk")

    assert why in caught.value.why
    assert [other for other in WHOLE_CACHES if other in caught.value.why] == [why]


def change(dataset):
    dataset[0] = 1


def delete(dataset):
    del dataset[0]


def enter(dataset):
    with dataset:
        pass


PROTOCOLS = {
    "change": (change, "cannot be changed"),
    "delete": (delete, "cannot be changed"),
    "opening": (enter, "loaderkit.open_cache(path)"),
    "samples": (lambda _: SafeDataset([1, 2]), "takes a path as raw"),
    "sizes": (lambda dataset: dataset.sizes()["bytes"], "sizes.bytes"),
    "size of one": (lambda dataset: dataset.sizes()[0], "read by attributes"),
    "device": (lambda _: MemoryMeter(0.1), "no device of that name"),
    "size": (
        lambda dataset: plan_batch(MODEL, dataset, "cpu", batch_size="32"),
        "batch_size=32",
    ),
}


@pytest.mark.parametrize(("use", "words"), PROTOCOLS.values(), ids=PROTOCOLS)
def test_what_pythons_own_objects_do_and_ours_do_not_is_answered(tmp_path, use, words):
    dataset = pack(SAMPLES, tmp_path / "c.lk", workers=0)

    with pytest.raises(LoaderkitError) as caught:
        use(dataset)

    assert words in str(caught.value)
    assert caught.value.why
    assert caught.value.fix


SIZES_ELSEWHERE = [(size, name) for size in SIZE_NAMES for name in SIZE_NAMES[size]]


@pytest.mark.parametrize(("size", "name"), sorted(SIZES_ELSEWHERE))
def test_a_size_of_another_name_is_answered_with_ours(size, name):
    class Sized:
        def __len__(self):
            return 2

        def __getitem__(self, row):
            return torch.ones(1)

        def sizes(self):
            return {known: np.ones(2, np.int64) for known in SIZE_NAMES}

    with pytest.raises(LoaderError) as raised:
        build_loader(Sized(), max_tokens=8, bucket_by=name, shuffle=True, probe=False)
    assert raised.value.fix == f"did you mean {size!r}?"


@pytest.mark.parametrize("name", ["key_padding_mask", "pack_padded_sequence"])
def test_what_torchs_layers_take_of_padded_fields_is_answered_as_they_mean_it(
    tmp_path, name
):
    """Compared with the layer over each sample alone."""
    fields = [torch.rand(length, 4) for length in (2, 5, 3)]
    packed = pack([{"x": field} for field in fields], tmp_path / "c.lk", workers=0)
    padded = packed.batch(range(3))["x"]
    with pytest.raises(NoSuchAttributeError) as raised:
        getattr(padded, name)
    answer = eval(raised.value.fix, {"padded": padded, **vars(torch.nn.utils.rnn)})

    if name == "key_padding_mask":
        layer = torch.nn.MultiheadAttention(4, 1, batch_first=True)
        together = layer(*[padded.values] * 3, key_padding_mask=answer)[0]
        alone = [layer(*[field[None]] * 3)[0][0] for field in fields]
    else:
        layer = torch.nn.GRU(4, 4, batch_first=True)
        together = torch.nn.utils.rnn.pad_packed_sequence(layer(answer)[0], True)[0]
        alone = [layer(field[None])[0][0] for field in fields]

    for ours, wanted in zip(together, alone, strict=True):
        torch.testing.assert_close(ours[: len(wanted)], wanted)


def test_the_length_of_samples_is_their_tokens(tmp_path):
    rows = [{"text": torch.ones(2 + row)} for row in range(4)]
    dataset = pack(rows, tmp_path / "c.lk", workers=0)

    with pytest.raises(LoaderError, match="did you mean 'tokens'"):
        build_loader(dataset, batch_size=2, bucket_by="length", shuffle=True)


# ---- functions of the user's that answer nothing


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "return True or False"),
        (torch.tensor([True, False]), "or .any()"),
        (np.array([True, False]), "or .any()"),
    ],
    ids=["nothing", "tensor", "array"],
)
def test_a_filter_that_says_neither_yes_nor_no_is_told(dataset, answer, words):
    with pytest.raises(OptionError) as raised:
        dataset.filter(lambda _: answer)

    assert "for row 0" in raised.value.what
    assert words in raised.value.fix


@pytest.mark.parametrize("answer", [1, torch.tensor(True), np.True_, "yes", [0]])
def test_a_filter_takes_whatever_python_takes_for_true(dataset, answer):
    assert len(dataset.filter(lambda _: answer)) == len(dataset)


def test_a_transform_that_returns_nothing_is_told_where_samples_are_joined(tmp_path):
    pack([{"x": torch.ones(2)}] * 4, tmp_path / "a.lk", workers=0)
    forgotten = open_cache(tmp_path / "a.lk", transform=lambda _: None)

    for join in (
        lambda: forgotten.batch([0, 1]),
        lambda: next(iter(build_loader(forgotten, batch_size=2, num_workers=0))),
    ):
        with pytest.raises(DatasetError) as raised:
            join()
        assert raised.value.fix.startswith("return the sample")

    by_hand = build_loader(forgotten, batch_size=2, collate_fn=len, num_workers=0)
    assert list(by_hand) == [2, 2]  # it may leave out what is None


def test_a_transform_that_fails_is_what_is_to_be_mended(tmp_path):
    pack([{"x": torch.ones(2)}] * 4, tmp_path / "a.lk", workers=0)

    def divide(sample):
        return sample["width"]

    broken = open_cache(tmp_path / "a.lk", transform=divide)
    with pytest.raises(LoaderError, match=r"correct .*divide, or this sample"):
        next(iter(build_loader(broken, batch_size=2, num_workers=0, probe=False)))


UNLIKE = {
    "lengths": ([{"x": torch.ones(1)}, {"x": torch.ones(2)}], "['x'] has shapes [1]"),
    "kinds": ([{"x": 1}, torch.ones(1)], "some samples are a dict, others a Tensor"),
    "lists": ([{"x": [1]}, {"x": [1, 2]}], "['x'] has 1 items in one sample and 2"),
    "deep": (
        [({"x": 1},), ({"x": "a"},)],
        "[0]['x'] is an int in one sample and a str",
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_why_samples_are_not_joined_is_said_by_their_field(name):
    samples, words = UNLIKE[name]

    with pytest.raises(LoaderError) as raised:
        next(iter(build_loader(samples, batch_size=2, num_workers=0, probe=False)))

    assert raised.value.why.startswith(words)


# ---- files of other formats, and fields within fields


@pytest.mark.parametrize("ending", FILE_READERS)
def test_a_file_of_another_format_is_answered_with_what_reads_it(ending, tmp_path):
    path = tmp_path / f"data{ending}"
    path.touch()
    reader = reader_of(str(path))

    for call in (
        lambda: pack(path, tmp_path / "a.lk"),
        lambda: open_cache(path),
        lambda: build_loader(path),
    ):
        with pytest.raises(LoaderkitError) as raised:
            call()
        assert reader in raised.value.fix
        assert compile(reader, "fix", "eval")


def test_arrays_in_a_file_are_packed_by_the_advice(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2)), y=np.arange(3))
    np.save(tmp_path / "a.npy", np.ones((4, 2)))

    names = {"numpy": np, "torch": torch}
    packed = {
        ending: pack(
            eval(reader_of(str(tmp_path / f"a{ending}")), names),
            tmp_path / f"a{ending}.lk",
            workers=0,
        )
        for ending in (".npz", ".npy")
    }

    assert packed[".npz"][2]["y"] == 2
    assert packed[".npy"][3].tolist() == [1, 1]


def test_a_path_into_a_sample_is_answered_with_brackets(tmp_path):
    sample = {"meta": {"seed": 3, "deep": {"x": torch.ones(1)}}}
    dataset = pack([sample] * 2, tmp_path / "a.lk", workers=0)

    for path in ("meta.seed", "meta/deep/x"):
        with pytest.raises(DatasetError) as raised:
            dataset[path]
        assert len(eval(raised.value.fix, {"dataset": dataset})) == 2


def test_texts_in_the_place_of_rows_are_keys_or_fields(dataset):
    for rows in (["a", "b"], ("meta", "seed"), np.array(["a"])):
        with pytest.raises(TypeError) as raised:
            dataset.batch(rows)
        assert "got texts" in raised.value.what
        assert "row_of" in raised.value.fix


def test_a_part_that_a_split_lacks_is_told(dataset):
    split = dataset.train_test_split(0.5, seed=0)

    with pytest.raises(KeyError, match="its parts are 'train' and 'test'"):
        split["validation"]
    assert split.get("validation") is None
    assert list(split) == ["train", "test"]


# ---- rooms


ROOMS = ["budget", "cache", "cli", "datasets", "integrations", "leaks", "loader"]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_that_is_not_imported_is_told(room):
    error = str(no_such_name(room, loaderkit.__all__))

    assert f"from loaderkit.{room}.FILE import NAME" in error


def test_what_tests_of_users_need_is_at_the_door():
    loaderkit.testing.assert_same(torch.ones(1), torch.ones(1))


@pytest.mark.slow
@pytest.mark.needs("lightning")
@pytest.mark.needs("transformers")
@pytest.mark.filterwarnings("ignore")
def test_a_callback_of_another_trainer_is_answered_with_the_right_one():
    from lightning.pytorch import Callback
    from transformers import TrainerCallback

    from loaderkit.integrations import lightning, transformers

    events = {
        kind: {name for name in dir(kind) if name.startswith("on_")}
        for kind in (Callback, TrainerCallback)
    }
    callbacks = {
        Callback: (lightning.LeakCallback(), "transformers"),
        TrainerCallback: (transformers.LeakCallback(), "lightning"),
    }
    asked_first = {Callback: "on_init_end", TrainerCallback: "state_key"}
    for kind, (callback, other) in callbacks.items():
        assert isinstance(callback, kind)
        assert all(hasattr(callback, name) for name in events[kind])
        with pytest.raises(AttributeError, match=f"integrations.{other} import"):
            getattr(callback, asked_first[kind])


def kinds_of_torch():
    """Ask torch which kinds of devices it has code for."""
    with pytest.raises(RuntimeError, match="Expected one of") as raised:
        torch.device("nonsense")
    listed = str(raised.value).split("one of ")[1].split(" device type")[0]
    return listed.split(", ")


def test_another_kind_of_device_is_no_misspelt_one():
    ours = {"cuda", "mps", "xpu"}
    kinds = kinds_of_torch()
    assert ours < set(kinds)

    others = {*kinds, "tpu", "npu", "vpu", "dpu", "apu", "fpga"} - ours - {*DEVICES}
    assert {kind for kind in others if suggest_device(kind) in ours} == set()


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_its_twin_with_a_letter_at_the_wrong_place_is_that_device(kind):
    doubled = {kind[: at + 1] + kind[at:] for at in range(len(kind))}
    swapped = {
        kind[:at] + kind[at + 1] + kind[at] + kind[at + 2 :]
        for at in range(len(kind) - 1)
        if len(kind) > 3  # of three letters two agree, as with another device
    }
    assert {suggest_device(f"{typo}:1") for typo in swapped | doubled} == {f"{kind}:1"}
