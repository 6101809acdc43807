"""An error of the user's own code arrives whole: type, message, traceback, key."""

import builtins
import dataclasses
import datetime
import decimal
import enum
import fractions
import itertools
import pathlib
import pickle
import sys
import traceback
import types
import uuid

import faulty
import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    default_collate,
)

from loaderkit import build_loader, open_cache, pack
from loaderkit.errors import DatasetError, LoaderError
from loaderkit.fixes import Pack, Python
from loaderkit.loader.users_errors import error_about, loader_error_like
from loaderkit.sending import how_to_unpickle

OPTIONS = {"batch_size": 2, "probe": False, "persistent_workers": False}
NOT_REBUILT = {"two parts", "holding"}
"""Errors that cannot be sent: their type and message come as text."""


def raised_by(loader):
    with pytest.raises(Exception) as caught:  # noqa: PT011 -- which one is the question
        list(loader)
    return caught.value


def original(name):
    """Raise the error alone, as the user would see it without any loader."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        faulty.ERRORS[name]()
    return caught.value


def check(error, name):
    """Find type, message and traceback of the user's error in what was raised."""
    users = original(name)
    shown = "".join(traceback.format_exception(error))
    assert f"{type(users).__name__}: {users}" in f"{error}\n{shown}"
    assert 'faulty.py", line' in shown
    assert "died" not in str(error)
    if name == "chained":
        assert "ValueError: invalid literal for int()" in shown


def check_cause(error, name):
    """Find the user's error itself, as the cause, and its type."""
    users = original(name)
    # A StopIteration would end the user's loop; it is the cause of another error.
    if not isinstance(users, StopIteration):
        assert isinstance(error, type(users))
    if name not in NOT_REBUILT:
        assert type(error.__cause__) is type(users)
        assert str(error.__cause__) == str(users)


@pytest.mark.many_cases
@pytest.mark.parametrize("name", faulty.ERRORS)
@pytest.mark.parametrize("raised_in", faulty.SAMPLES)
def test_a_sample_that_fails_is_named_with_the_error_as_its_cause(raised_in, name):
    make, key = faulty.SAMPLES[raised_in]
    loader = build_loader(make(faulty.ERRORS[name]), num_workers=0, **OPTIONS)

    error = raised_by(loader)

    assert isinstance(error, LoaderError)
    assert error.what.startswith(f"Sample {key} could not be read: ")
    assert "correct this sample" in error.fix
    assert type(error.__cause__) is type(original(name))
    check(error, name)
    check_cause(error, name)


@pytest.mark.many_cases
@pytest.mark.parametrize(
    ("raised_in", "name"),
    [
        *zip(faulty.SAMPLES, faulty.ERRORS, strict=False),
        ("named", "message"),
        ("plain", "chained"),
    ],
)
def test_it_arrives_from_a_worker_as_it_does_without(raised_in, name):
    make, _ = faulty.SAMPLES[raised_in]
    alone, sent = (
        raised_by(build_loader(make(faulty.ERRORS[name]), num_workers=n, **OPTIONS))
        for n in (0, 1)
    )

    assert type(sent).__bases__ == type(alone).__bases__
    assert (sent.what, sent.why) == (alone.what, alone.why)
    # Who reads in this process can step through already.
    assert sent.fix == f"{alone.fix}; num_workers=0 to step through"
    check(sent, name)
    check_cause(sent, name)


@pytest.mark.slow
def test_it_arrives_from_a_spawned_worker():
    loader = build_loader(
        faulty.Named(faulty.chained),
        num_workers=1,
        multiprocessing_context="spawn",
        **OPTIONS,
    )

    error = raised_by(loader)

    assert error.what.startswith("Sample 'sample-5' (row 5) could not be read: ")
    check(error, "chained")
    check_cause(error, "chained")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["key", "worker", "two parts"])
def test_a_collate_function_that_fails_is_told_apart_from_a_sample(name, workers):
    collate = faulty.FailingCall(faulty.ERRORS[name])
    loader = build_loader(
        faulty.Named(print), collate_fn=collate, num_workers=workers, **OPTIONS
    )

    error = raised_by(loader)

    assert isinstance(error, LoaderError)
    assert "'sample-0' (row 0), 'sample-1' (row 1) were read, but not" in error.what
    assert error.fix.startswith("correct FailingCall")
    assert ("num_workers=0" in error.fix) == (workers > 0)
    check(error, name)
    check_cause(error, name)


@pytest.mark.parametrize("samples", [[torch.zeros(2), torch.zeros(3)], [{1}, {2}]])
def test_samples_that_do_not_join_blame_no_function_that_the_user_never_wrote(samples):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(samples)

    for dataset in (samples, Stream()):
        error = raised_by(build_loader(dataset, num_workers=0, **OPTIONS))

        assert "correct" not in error.fix
        assert "collate_fn" in error.fix


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_that_fails_names_the_sample_of_the_cache(tmp_path, workers):
    pack([{"row": row} for row in range(8)], tmp_path / "c.lk", workers=0)
    transform = faulty.FailingTransform(faulty.ERRORS["size"])
    data = open_cache(tmp_path / "c.lk", transform=transform)

    error = raised_by(build_loader(data, num_workers=workers, **OPTIONS))

    assert error.what.startswith("Sample '5' (row 5) could not be read: RuntimeError")
    check(error, "size")


def test_a_dataset_that_reads_many_at_once_has_them_all_named():
    error = raised_by(build_loader(faulty.Together(faulty.chained), **OPTIONS))

    assert error.what.startswith("The samples row 4, row 5 could not be read: ")
    check(error, "chained")


def stream_or_call(raised_in, explode):
    """Make a loader that fails in some place that is not about one sample."""
    call = faulty.FailingCall(explode)
    data, options = faulty.FailingStream(print), {}
    if raised_in == "stream":
        data = faulty.FailingStream(explode)
    elif raised_in == "beginning":
        data = faulty.UnbegunStream(explode)
    elif raised_in == "collate":
        options = {"collate_fn": call}
    elif raised_in == "init":
        options = {"worker_init_fn": call}
    elif raised_in == "init, rows":
        data, options = faulty.Named(print), {"worker_init_fn": call}
    return data, options


PLACES = {
    "stream": "The dataset failed after 3 samples: ",
    "beginning": "The dataset could not begin: ",
    "collate": "The samples of batch 1 were read, but not joined: ",
    "init": "worker_init_fn failed in worker 0: ",
    "init, rows": "worker_init_fn failed in worker 0: ",
}
OF_STREAMS = [name for name in faulty.ERRORS if name != "stop"]


@pytest.mark.parametrize("raised_in", [name for name in PLACES if "init" not in name])
@pytest.mark.parametrize("name", OF_STREAMS)
def test_errors_of_streams_arrive_whole(raised_in, name):
    data, options = stream_or_call(raised_in, faulty.ERRORS[name])

    error = raised_by(build_loader(data, num_workers=0, **OPTIONS, **options))

    assert isinstance(error, LoaderError)
    assert error.what.startswith(PLACES[raised_in])
    assert error.fix
    assert "num_workers=0" not in error.fix
    check(error, name)
    check_cause(error, name)


@pytest.mark.parametrize(
    ("raised_in", "name"),
    [
        *(("stream", name) for name in ("message", "strict", "two parts", "holding")),
        *((raised_in, "message") for raised_in in PLACES if raised_in != "stream"),
        ("init", "strict"),
    ],
)
def test_they_arrive_from_a_worker_too(raised_in, name):
    data, options = stream_or_call(raised_in, faulty.ERRORS[name])

    error = raised_by(build_loader(data, num_workers=1, **OPTIONS, **options))

    assert isinstance(error, LoaderError)
    assert error.what.startswith(PLACES[raised_in])
    check(error, name)
    check_cause(error, name)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_goes_on_after_an_error_loses_no_sample(workers):
    data = faulty.ResumingStream(faulty.ERRORS["key"])
    batches = iter(build_loader(data, num_workers=workers, **OPTIONS))

    given, errors = [], 0
    while True:
        try:
            given += next(batches).tolist()
        except KeyError:
            errors += 1
        except StopIteration:
            break

    assert (given, errors) == ([0, 1, 2, 3, 4, 6, 7, 8, 9], 1)


class ByName(Dataset):
    """Indexed by names, which a sampler of the user's gives."""

    def __len__(self):
        return 3

    def __getitem__(self, name):
        return {"a": torch.ones(1)}[name]


@pytest.mark.parametrize("wrong", ["b", (1, 2), None, 7, torch.tensor(7)])
def test_rows_that_are_no_numbers_are_named_too(wrong):
    loader = build_loader(ByName(), sampler=["a", wrong], **OPTIONS)

    error = raised_by(loader)

    assert type(error.__cause__) is KeyError
    assert "row " in error.what


def test_an_error_of_ours_keeps_its_parts_on_its_way_from_a_worker():
    class Ours(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, row):
            msg = "What."
            raise LoaderError(msg, why="Why.", fix="Fix.")

    error = raised_by(build_loader(Ours(), num_workers=1, **OPTIONS))

    assert (error.what, error.why, error.fix) == ("What.", "Why.", "Fix.")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_catches_its_own_errors_goes_on_doing_so(workers):
    options = OPTIONS | {"batch_size": 1}
    batches = iter(
        build_loader(
            faulty.Failing(faulty.ERRORS["two parts"]), num_workers=workers, **options
        )
    )

    given, parts = [], []
    while len(given) < 7:
        try:
            given.append(next(batches).item())
        except faulty.TwoPartsError as error:
            parts.append(getattr(error, "part", "left"))

    assert (given, parts) == ([0, 1, 2, 3, 4, 6, 7], ["left"])


class FinalError(type):
    """A metaclass that refuses classes with a second base."""

    def __new__(cls, name, bases, body):
        if len(bases) > 1:
            message = "no subclasses, please"
            raise TypeError(message)
        return super().__new__(cls, name, bases, body)


class RefusingError(Exception, metaclass=FinalError):
    """Cannot be the base of a second class."""


def test_a_type_that_allows_no_subclass_is_the_cause_all_the_same():
    def explode():
        raise RefusingError("no")  # noqa: EM101

    error = raised_by(build_loader(faulty.Failing(explode), num_workers=0, **OPTIONS))

    assert type(error) is LoaderError
    assert type(error.__cause__) is RefusingError


def test_an_error_that_cannot_be_shown_is_the_cause_all_the_same():
    explode = faulty.raising(faulty.SilentError)

    error = raised_by(build_loader(faulty.Named(explode), num_workers=0, **OPTIONS))

    assert "SilentError: <str() of it failed>" in error.what
    assert type(error.__cause__) is faulty.SilentError


def test_an_error_of_a_local_class_keeps_its_text_on_its_way_from_a_worker():
    class LocalError(Exception):
        pass

    def explode():
        raise LocalError("here")  # noqa: EM101

    error = raised_by(build_loader(faulty.Named(explode), num_workers=1, **OPTIONS))

    assert error.what == "Sample 'sample-5' (row 5) could not be read: LocalError: here"
    assert "correct this sample" in error.fix
    assert "in explode" in str(error.__cause__)


class Falters(IterableDataset):
    """20 numbers; fails in place of some of them, and goes on."""

    def __init__(self, failing):
        self.failing = failing

    def __iter__(self):
        return FalteringIterator(self.failing)


class FalteringIterator:
    def __init__(self, failing):
        self.failing, self.number = failing, -1

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        if self.number >= 20:
            raise StopIteration
        if self.number in self.failing:
            raise ValueError(self.number)
        return self.number


def rows_and_errors(loader):
    """Read a whole epoch of a stream that fails, and goes on."""
    iterator, rows, errors = iter(loader), [], 0
    while True:
        try:
            rows += next(iterator).tolist()
        except StopIteration:
            return rows, errors
        except ValueError:
            errors += 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("failing", [{5}, {0, 1, 7}, {19}])
def test_a_stream_that_goes_on_loses_no_sample_of_any_rank(failing, ranks, workers):
    epochs = [
        rows_and_errors(
            build_loader(
                Falters(failing),
                batch_size=2,
                rank=rank,
                world_size=ranks,
                num_workers=workers,
            )
        )
        for rank in range(ranks)
    ]

    rows = [rows for rows, _ in epochs]
    assert {row for rows_of_epoch in rows for row in rows_of_epoch} == set(
        range(20)
    ) - failing
    assert len({len(rows_of_epoch) for rows_of_epoch in rows}) == 1
    assert {errors for _, errors in epochs} == {len(failing)}


class SlottedError(Exception):
    __slots__ = ("code",)

    def __init__(self, message):
        super().__init__(message)
        self.code = 5


class WeirdError(Exception):
    """Is pickled as a text."""

    def __reduce__(self):
        return str, ("hello",)


def missing_file():
    return FileNotFoundError(2, "No such file", "/x/y")


def undecodable():
    return UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


HELD = {
    "errno filename strerror args": missing_file,
    "object start end reason encoding": undecodable,
    "name path args": lambda: ImportError("no", name="module", path="/p"),
    "code args": lambda: SlottedError("message"),
    "args": lambda: WeirdError("w"),
}


class Raises(Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 2

    def __getitem__(self, row):
        raise self.make()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("names", HELD)
def test_the_error_holds_what_the_users_held(names, workers):
    users = HELD[names]()
    loader = build_loader(Raises(HELD[names]), num_workers=workers)

    with pytest.raises(type(users)) as caught:
        next(iter(loader))

    assert isinstance(caught.value, LoaderError)
    assert f"Sample row 0 could not be read: {type(users).__name__}" in str(
        caught.value
    )
    for name in names.split():
        assert getattr(caught.value, name) == getattr(users, name)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 has groups")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_group_is_caught_as_one(workers):
    def make():
        return builtins.ExceptionGroup("several", [ValueError("v"), KeyError("k")])

    with pytest.raises(builtins.ExceptionGroup) as caught:
        next(iter(build_loader(Raises(make), num_workers=workers)))

    assert [type(error) for error in caught.value.exceptions] == [ValueError, KeyError]


class ReadsThroughALoader(Dataset):
    """Reads its samples through a loader that fails.

    Args:
        name: Of the error.
    """

    def __init__(self, name):
        self.name = name

    def __len__(self):
        return 2

    def __getitem__(self, row):
        make, _ = faulty.SAMPLES["plain"]
        loader = build_loader(make(faulty.ERRORS[self.name]), num_workers=0, **OPTIONS)
        return list(loader)


@pytest.mark.parametrize("name", faulty.ERRORS)
def test_its_type_can_be_sent_too(name):
    make, _ = faulty.SAMPLES["plain"]
    kind = type(raised_by(build_loader(make(faulty.ERRORS[name]), num_workers=0)))

    again = pickle.loads(pickle.dumps(kind))

    assert again.__mro__[1:] == kind.__mro__[1:]


class LocalError(Exception):
    """Is of a module, but pickle does not find it there."""


LocalError.__qualname__ = "somewhere.<locals>.LocalError"


def test_of_a_type_that_cannot_be_sent_ours_is_sent():
    kind = loader_error_like(LocalError)

    assert issubclass(kind, LocalError)
    assert pickle.loads(pickle.dumps(kind)) is LoaderError


@pytest.mark.slow
@pytest.mark.parametrize("name", ["key", "strict", "two parts"])
def test_torchs_worker_sends_it_on(name):
    # A worker that could not send it would leave this loop waiting.
    loader = DataLoader(ReadsThroughALoader(name), num_workers=1)

    error = raised_by(loader)

    assert "could not be read" in str(error)
    assert "died" not in str(error)


def test_an_error_about_one_of_ours_has_the_fix_of_its_own():
    users = DatasetError("no sample", why="x", fix=Pack("[1]"))

    combined = error_about("It was not read: ", users, "correct it")

    for error in (combined, pickle.loads(pickle.dumps(combined))):
        assert error.fix == error.fix_in(Python()) == "correct it"


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    n: int


class Colour(enum.Enum):
    RED = 1


_NAMESPACE = {"np": np, "torch": torch, "dataclasses": dataclasses}
_NEVER_JOINED = [
    np.array(["a", "b"]),
    np.array([b"a"]),
    np.array(["2020-01-01"], "datetime64[D]"),
    np.datetime64("2020-01-01"),
    np.timedelta64(3, "s"),
    np.array([(1, 2.0)], [("a", "i4"), ("b", "f4")]),
    np.array([1.0, 2.0], ">f4"),
    np.arange(4)[::-1],
    np.array([1, 2], object),
    np.array([1], np.longdouble),
    torch.eye(2).to_sparse(),
    torch.eye(2).to_sparse_csr(),
    torch.ones(2).to_mkldnn(),
    1j,
    1 << 70,
    {1, 2},
    frozenset({3}),
    Point(torch.ones(2), 3),
    Colour.RED,
    datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc),
    datetime.date(2020, 1, 1),
    datetime.timedelta(1),
    decimal.Decimal(1),
    fractions.Fraction(1, 3),
    pathlib.PurePath("a"),
    uuid.UUID(int=3),
]


@pytest.mark.many_cases(quick=6)
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("value", _NEVER_JOINED, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    ("path", "sample_of"),
    [
        ("['meta'][1]", lambda value: {"meta": [torch.ones(1), value], "y": 1}),
        ("a sample", lambda value: value),
    ],
    ids=["in a nest", "alone"],
)
def test_what_torch_never_joins_is_named_and_its_stand_in_is_joined(
    value, path, sample_of
):
    samples = [sample_of(value)] * 2
    with pytest.raises((TypeError, RuntimeError, ValueError, OverflowError)):
        torch.utils.data.default_collate(samples)

    with pytest.raises(LoaderError) as caught:
        next(iter(build_loader(samples, batch_size=2)))

    assert caught.value.why.startswith(f"{path} is ")
    assert "one shape" not in caught.value.fix
    code = caught.value.fix.removeprefix("give ").split(" in place of it, x;")[0]
    for alternative in code.split(", or "):
        stand_in = eval(alternative.split(" where ")[0], {**_NAMESPACE, "x": value})
        torch.utils.data.default_collate([sample_of(stand_in)] * 2)


@pytest.mark.slow
def test_only_what_a_packed_dataset_pads_is_advised_to_be_packed(tmp_path):
    shapes = [(2,), (3,), (3, 1), (2, 2)]
    for one, other in itertools.combinations(shapes, 2):
        samples = [{"x": torch.ones(one)}, {"x": torch.ones(other)}]
        with pytest.raises(LoaderError) as caught:
            next(iter(build_loader(samples, batch_size=2)))
        path = tmp_path / f"{one} {other}.lk"
        if "loaderkit.pack(" in caught.value.fix:
            next(iter(build_loader(pack(samples, path, workers=0), batch_size=2)))
        else:
            with pytest.raises(DatasetError):
                next(iter(build_loader(pack(samples, path, workers=0), batch_size=2)))


def test_a_tuple_of_columns_is_called_that():
    columns = torch.ones(4, 2), torch.ones(4)

    with pytest.raises(LoaderError, match="of columns") as caught:
        next(iter(build_loader(columns, batch_size=2)))

    dataset = eval(caught.value.fix, {"torch": torch, "dataset": columns})
    assert [part.shape for part in next(iter(build_loader(dataset, batch_size=2)))] == [
        (2, 2),
        (2,),
    ]


# Objects that cannot be unpickled


class FailsAsItIsUnpickled:
    def __init__(self, error):
        self.error = error

    def __setstate__(self, state):
        raise state["error"]


class Unpicklable(Dataset):
    """Its sixth sample is an object that can be pickled, and not unpickled."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 8

    def __getitem__(self, row):
        return FailsAsItIsUnpickled(self.error) if row == 5 else row


class UnpicklableStream(IterableDataset):
    def __init__(self, error):
        self.rows = Unpicklable(error)

    def __iter__(self):
        return map(self.rows.__getitem__, range(8))


# StopIteration ended the loop behind the batches before, without a word.
@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        (ValueError, ValueError),
        (StopIteration, LoaderError),
        (FileNotFoundError, FileNotFoundError),
    ],
)
def test_a_batch_that_cannot_be_unpickled_is_named(kind, raised):
    dataset = Unpicklable(kind(2, "no licence"))
    loader = build_loader(dataset, batch_size=2, collate_fn=list, num_workers=1)
    batches, errors = [], []
    iterator = iter(loader)
    for _ in range(4):
        try:
            batches.append(next(iterator))
        except LoaderError as error:
            errors.append(error)

    assert batches == [[0, 1], [2, 3], [6, 7]]
    [error] = errors
    assert isinstance(error, raised)
    assert str(error).startswith("The batch of row 4, row 5 could not be unpickled")
    assert "test_users_errors.py" in error.why
    assert type(error.__cause__) is kind


def test_a_batch_of_a_stream_that_cannot_be_unpickled_has_a_number():
    stream = UnpicklableStream(ValueError("no licence"))
    loader = build_loader(stream, batch_size=2, collate_fn=list, num_workers=1)

    with pytest.raises(ValueError, match="Batch 3 of worker 0 could not be unpickled"):
        list(loader)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["dataset", "worker_init_fn"])
def test_what_cannot_be_unpickled_in_a_spawned_worker_is_told(part):
    """torch tells of a worker that "exited unexpectedly"."""
    dataset = faulty.RowsOnlyHere() if part == "dataset" else range(8)
    options = {} if part == "dataset" else {part: faulty.OnlyHere()}
    loader = build_loader(
        dataset,
        batch_size=2,
        num_workers=1,
        multiprocessing_context="spawn",
        **options,
    )

    with pytest.raises(PermissionError, match="could not be unpickled") as caught:
        next(iter(loader))

    assert "licence is in use" in str(caught.value)
    assert part in str(caught.value)


@pytest.mark.slow
def test_a_worker_that_is_killed_as_it_unpickles_the_dataset_may_not_have_begun():
    loader = build_loader(
        faulty.KilledAsItIsUnpickled(),
        batch_size=2,
        num_workers=1,
        multiprocessing_context="spawn",
    )

    with pytest.raises(LoaderError, match="died as it unpickled the dataset, or while"):
        next(iter(loader))


def _no_licence(sent, state):
    return sent.licence[state]


@pytest.mark.parametrize(
    ("module", "name", "told"),
    [
        ("__main__", "Sent", "define Sent at the top of the script, or in a module"),
        ("of_this_test", "Sent", "define Sent at the top of of_this_test: it is not"),
        ("of_this_test", "Outer.Sent", "define Outer at the top of of_this_test:"),
        ("gone", "Sent", "have gone where new processes find modules"),
        ("own code", "Sent", "correct its __setstate__"),
    ],
)
def test_what_a_new_process_lacks_is_named(monkeypatch, module, name, told):
    """Pickled here, and unpickled where the name or the module is gone."""
    home = types.ModuleType("of_this_test" if module == "own code" else module)
    sent_class = type("Sent", (), {"__module__": home.__name__, "__qualname__": name})
    home.Sent, home.Outer = sent_class, types.SimpleNamespace(Sent=sent_class)
    if module == "own code":
        sent_class.__setstate__ = _no_licence
    sent = sent_class()
    sent.number = 1
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, home.__name__, home)
        pickled = pickle.dumps(sent)
        if module == "gone":
            patch.delitem(sys.modules, "gone")
        elif module != "own code":
            del home.Sent, home.Outer
        with pytest.raises((AttributeError, ModuleNotFoundError)) as raised:
            pickle.loads(pickled)

    fix = how_to_unpickle(raised.value, "correct its __setstate__")

    assert fix.replace("Outer.Sent", "Outer").startswith(told)


RAGGED = [
    [{"ids": torch.arange(n + 1), "label": n} for n in range(8)],
    [(torch.ones(n + 1, 3), torch.zeros(n + 2)) for n in range(8)],
    [{"nest": {"sound": np.zeros((n + 1, 2))}} for n in range(8)],
    [torch.arange(n + 1) for n in range(8)],
]


@pytest.mark.parametrize("samples", RAGGED)
@pytest.mark.parametrize(
    "select", [lambda rows: rows, lambda rows: Subset(rows, [0, 5, 2])]
)
def test_torchs_collate_over_a_packed_dataset_is_to_be_left_out(
    tmp_path, samples, select
):
    rows = select(pack(samples, tmp_path / "rows.lk"))
    with pytest.raises(LoaderError) as caught:
        next(iter(build_loader(rows, batch_size=3, collate_fn=default_collate)))
    assert caught.value.fix.startswith("leave collate_fn out")
    assert "collate.py" not in caught.value.why
    next(iter(build_loader(rows, batch_size=3)))  # that works
    # A collate function of the user's may be at fault itself, and is named.
    with pytest.raises(LoaderError, match="correct by_hand"):
        next(iter(build_loader(rows, batch_size=3, collate_fn=by_hand)))


def by_hand(samples):
    return default_collate(samples)
