"""Keys are named as the plain values that they stand for, whatever made them."""

from __future__ import annotations

import collections
import enum
import pickle
import re
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import loaderkit
from loaderkit.cli.main import main
from loaderkit.datasets.fingerprint import fingerprint_of
from loaderkit.datasets.key_index import first_doubled
from loaderkit.datasets.key_texts import key_in_code, key_text
from loaderkit.datasets.pack_options import PackOptions
from loaderkit.errors import DatasetError, OptionError
from loaderkit.value_words import show_value

if TYPE_CHECKING:
    import random


class _Color(enum.Enum):
    RED = 1


class _Number(enum.IntEnum):
    THREE = 3


class _Word(str, enum.Enum):
    A = "a"


_Pair = collections.namedtuple("_Pair", "name number")  # noqa: PYI024 -- of a user

_NUMBERS = {
    code: np.dtype(code).type(1)
    for code in (*np.typecodes["AllInteger"], "e", "f", "d", "?", "F", "D")
}
"""A scalar of every type of numpy that Python has a type for."""
_PLAIN: dict[str, tuple[Any, Any]] = {
    **{f"numpy {code}": (value, value.item()) for code, value in _NUMBERS.items()},
    "numpy text": (np.str_("a b"), "a b"),
    "numpy bytes": (np.bytes_(b"a"), b"a"),
    "torch integer": (torch.tensor(3), 3),
    "torch float": (torch.tensor(0.5, dtype=torch.float16), 0.5),
    "torch bool": (torch.tensor(True), True),
    "row of an array": (np.array([1, 2]), [1, 2]),
    "row of a tensor": (torch.tensor([1, 2]), [1, 2]),
    "tuple": ((np.int64(1), "a"), (1, "a")),
    "tuple of one": ((np.int64(1),), (1,)),
    "empty tuple": ((), ()),
    "nested": (((np.int8(1), torch.tensor(2)), np.str_("a")), ((1, 2), "a")),
    "named tuple": (_Pair("a", np.int64(3)), _Pair("a", 3)),
    "list": ([np.float32(0.5)], [0.5]),
    "bytes": (b"a", b"a"),
    "enum": (_Color.RED, _Color.RED),
    "number of an enum": (_Number.THREE, _Number.THREE),
    "word of an enum": (_Word.A, "a"),
    "none": (None, None),
    "frozen set": (frozenset({np.int64(3)}), frozenset({3})),
}
_FOREIGN = ("np.", "tensor(", "array(", "dtype")
"""What the writing of another library would be known by."""


_ONE_PROCESS = PackOptions(workers=0)


class _Keyed(loaderkit.SafeDataset):
    def __init__(self, *keys: Any, fails: bool = False, **options: Any) -> None:
        self.names = list(keys)
        self.fails = fails
        super().__init__(**options)

    def keys(self) -> list[Any]:
        return self.names

    def load(self, key: Any) -> Any:  # noqa: ARG002 -- all are alike
        if self.fails:
            raise ValueError
        return {"x": torch.ones(2)}


@pytest.mark.parametrize("name", _PLAIN)
def test_a_key_is_written_as_the_plain_value(name: str) -> None:
    key, plain = _PLAIN[name]

    assert key_in_code(key) == repr(plain)
    assert key_text(key) == (plain if isinstance(plain, str) else repr(plain))
    assert type(key_text(key)) is str


@pytest.mark.parametrize("name", _PLAIN)
def test_a_cache_of_plain_keys_is_one_of_these_keys_too(name: str) -> None:
    key, plain = _PLAIN[name]

    assert fingerprint_of(print, [key]) == fingerprint_of(print, [plain])


def test_a_cache_names_its_samples_by_plain_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Keys that are called alike, or are equal as 1 and True, are refused.
    keys: list[Any] = []
    for key, _ in _PLAIN.values():
        keys += [key] if first_doubled([*keys, key]) is None else []
    dataset = _Keyed(*keys, cache=tmp_path / "data.lk", packing=_ONE_PROCESS)

    rows = range(len(dataset))
    assert [dataset.key(row) for row in rows] == list(map(key_text, keys))
    assert [_Keyed(*keys).key(row) for row in rows] == list(map(key_text, keys))
    main(["inspect", str(tmp_path / "data.lk")])
    assert not any(word in capsys.readouterr().out for word in _FOREIGN)


@pytest.mark.parametrize(
    "name", ["numpy i", "numpy text", "torch float", "nested", "word of an enum"]
)
def test_an_error_names_a_sample_by_the_plain_value(tmp_path: Path, name: str) -> None:
    key, _ = _PLAIN[name]
    failing = _Keyed(key, fails=True, cache=tmp_path / "b.lk", packing=_ONE_PROCESS)

    with pytest.raises(DatasetError) as caught:
        failing[0]

    assert f"Sample {key_text(key)!r} (row 0" in caught.value.what
    assert not any(word in str(caught.value) for word in _FOREIGN)


def test_times_are_written_as_numpy_writes_them() -> None:
    assert key_text(np.datetime64("2020-01-01T00:00:00.000000001")) == (
        "'2020-01-01T00:00:00.000000001'"
    )
    assert key_text(np.timedelta64(3, "ns")) == "'3 nanoseconds'"


def test_a_path_is_written_as_posix_does() -> None:
    assert key_text(PurePosixPath("a/b.pt")) == "a/b.pt"


def test_keys_of_one_text_and_another_type_differ() -> None:
    texts = fingerprint_of(print, ["1"])

    assert fingerprint_of(print, [1]) != texts
    assert fingerprint_of(print, [np.int64(1)]) != texts
    assert fingerprint_of(print, [(1,)]) != fingerprint_of(print, [[1]])


def test_an_array_of_keys_is_kept_as_an_array(tmp_path: Path) -> None:
    class Rows(_Keyed):
        def keys(self) -> Any:
            return np.arange(3)

        def load(self, key: Any) -> Any:
            return {"x": torch.tensor(int(key)), "type": type(key).__name__}

    rows = Rows(cache=tmp_path / "data.lk", packing=_ONE_PROCESS)

    assert [rows.key(row) for row in range(3)] == ["0", "1", "2"]
    assert rows[2] == {"x": torch.tensor(2), "type": "int64"}


def test_a_set_of_texts_is_written_alike_in_every_process() -> None:
    written = ", ".join(map(repr, "abcdefgh"))

    assert key_text(frozenset("hgfedcba")) == f"frozenset({{{written}}})"


class _Drinks(loaderkit.SafeDataset):
    def keys(self) -> list[str]:
        return ["tea", "mate", "x"]

    def load(self, key: str) -> Any:
        return {"x": torch.tensor(len(key))}


def test_a_key_that_is_asked_for_as_a_field_is_told_with_its_row(
    tmp_path: Path,
) -> None:
    drinks = _Drinks(cache=tmp_path / "data.lk", packing=_ONE_PROCESS)

    for dataset in (drinks, drinks[[2, 1]]):
        with pytest.raises(DatasetError, match="'mate' is the key of a") as caught:
            dataset["mate"]
        assert eval(caught.value.fix, {"dataset": dataset}) == {"x": torch.tensor(4)}
    assert drinks["x"].tolist() == [3, 4, 1]
    for dataset, text in ((drinks, "milk"), (drinks[[0]], "mate")):
        with pytest.raises(DatasetError, match="has no field"):
            dataset[text]


class _Letters(_Drinks):
    def load(self, key: str) -> Any:
        return key.upper() if key == "mate" else key


def test_a_key_that_is_looked_for_among_the_samples_is_told(tmp_path: Path) -> None:
    drinks = _Drinks(cache=tmp_path / "data.lk", packing=_ONE_PROCESS)

    with pytest.raises(OptionError, match="'mate' is the key of a") as caught:
        "mate" in drinks  # noqa: B015
    assert eval(caught.value.fix, {"dataset": drinks}) is True
    with pytest.raises(OptionError, match="'milk' cannot be among the samples") as no:
        "milk" in drinks  # noqa: B015
    assert eval(no.value.fix, {"dataset": drinks}) is False
    assert {"x": torch.tensor(3)} in drinks

    letters = _Letters(cache=tmp_path / "letters.lk", packing=_ONE_PROCESS)
    assert "MATE" in letters
    assert "tea" in letters  # a sample that is its own key
    with pytest.raises(OptionError, match="'mate' is the key of a"):
        "mate" in letters  # noqa: B015


def _distinct(keys: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(keys, min_size=1, max_size=9, unique=True)


KEYS_OF_ALL_KINDS = st.one_of(
    _distinct(st.text(max_size=4)),
    _distinct(st.integers(-(2**70), 2**70)),
    _distinct(st.tuples(st.integers(0, 3), st.text(max_size=2))),
    st.integers(1, 9).map(lambda n: np.arange(n) * 7),
    st.integers(1, 9).map(lambda n: [PurePath("a") / f"{i}.pt" for i in range(n)]),
)


class _NamedBy(loaderkit.SafeDataset):
    def __init__(self, keys: Any, cache: Path | None = None) -> None:
        super().__init__(cache=cache, packing=_ONE_PROCESS)
        self.given = keys

    def keys(self) -> Any:
        return self.given

    def load(self, key: Any) -> Any:
        return {"x": torch.zeros(len(str(key)))}


@pytest.mark.slow
@settings(max_examples=12)
@given(keys=KEYS_OF_ALL_KINDS, order=st.randoms(use_true_random=False))
def test_a_row_is_found_by_the_key_that_names_it(
    tmp_path_factory: pytest.TempPathFactory, keys: Any, order: random.Random
) -> None:
    path = tmp_path_factory.mktemp("keyed") / "data.lk"
    packed = _NamedBy(keys, path)
    packed[0]
    opened = loaderkit.open_cache(path)
    rows = order.choices(range(len(keys)), k=4)

    for dataset, given_keys in (
        (_NamedBy(keys), list(keys)),
        (packed, list(keys)),
        (opened, list(keys)),
        (packed[rows], [keys[row] for row in rows]),
        (opened[rows], [keys[row] for row in rows]),
        (pickle.loads(pickle.dumps(opened[rows])), [keys[row] for row in rows]),
    ):
        texts = [dataset.key(row) for row in range(len(dataset))]
        for key, text in zip(given_keys, texts, strict=True):
            assert dataset.row_of(key) == dataset.row_of(text) == texts.index(text)
        with pytest.raises(KeyError, match="is the key of no sample") as caught:
            dataset.row_of("no such key")
        assert show_value(texts[0]) in caught.value.why


def test_a_key_that_is_no_text_is_told_too(tmp_path: Path) -> None:
    keys = [(3, "a"), (4, "b"), 70, 80.5]
    packed = _NamedBy(keys, tmp_path / "data.lk")
    packed[0]

    for dataset in (packed, loaderkit.open_cache(tmp_path / "data.lk")):
        for key in keys:
            with pytest.raises(OptionError, match="is the key of a sample") as caught:
                key in dataset  # noqa: B015
            advised = caught.value.fix.removesuffix(" is its row")
            assert eval(advised, {"dataset": dataset}) == (
                True if dataset is packed else keys.index(key)
            )
        with pytest.raises(IndexError, match="it is the key of row 2") as missing:
            dataset[70]
        assert "dataset.row_of(70)" in missing.value.fix
        with pytest.raises(IndexError, match="from -1 back"):
            dataset[71]


def test_a_key_that_nobody_has_is_answered_with_what_was_meant(tmp_path: Path) -> None:
    drinks = _Drinks(cache=tmp_path / "data.lk", packing=_ONE_PROCESS)
    drinks[0]
    opened = loaderkit.open_cache(tmp_path / "data.lk")

    for key, fix in {
        "matte": "did you mean 'mate'?",
        ("tea", 3): "dataset.key(row) names the sample of a row",
        3: "dataset.key(row) names the sample of a row",
    }.items():
        with pytest.raises(KeyError) as caught:
            opened.row_of(key)
        assert caught.value.fix == fix
    with pytest.raises(KeyError, match="no samples has no keys"):
        opened[:0].row_of("tea")
    with pytest.raises(KeyError, match="for key in keys"):
        opened.row_of(["tea", "x"])
    for wrong in (opened.__getitem__, opened.select, opened.batch):
        with pytest.raises(OptionError) as listed:
            wrong(["tea", "x"])
        [advised] = re.findall(r"of keys, (.*)", listed.value.fix)
        chosen = eval(advised, {"dataset": opened, "keys": ["tea", "x"]})
        assert chosen["x"].tolist() == [3, 1]
    with pytest.raises(OptionError, match=r"dataset.row_of\('tea'\)"):
        opened.key("tea")


def test_numbers_that_are_samples_are_looked_for_among_them(tmp_path: Path) -> None:
    numbers = loaderkit.pack([5, 7, 1], tmp_path / "data.lk", workers=0)

    assert [number in numbers for number in (7, 2, 0)] == [True, False, False]
    tensors = loaderkit.pack([torch.ones(2)], tmp_path / "t.lk", workers=0)
    for sought in (3, torch.ones(2), torch.ones(3)):
        with pytest.raises(OptionError, match="value by value") as caught:
            sought in tensors  # noqa: B015
        assert "torch.equal" in caught.value.fix


class _Unnamed:
    pass


@pytest.mark.parametrize(
    "key",
    [_Unnamed(), (3, _Unnamed()), [_Unnamed()], lambda: 3, {"a": object()}, _Drinks],
    ids=["alone", "in a tuple", "in a list", "function", "in a dict", "class"],
)
def test_a_key_is_refused_if_another_process_would_write_it_otherwise(
    tmp_path: Path, key: Any
) -> None:
    has_address = "0x" in str(key)
    packed = _NamedBy(["first", key], tmp_path / "data.lk")

    if not has_address:
        assert packed.key(1) == str(key)
        return
    with pytest.raises(DatasetError, match="in row 1") as caught:
        packed[0]
    assert "another one in each process" in caught.value.why


def test_sets_within_keys_are_written_alike_in_every_process() -> None:
    words = ["b", "a", "dd", "c"]
    assert key_text((1, set(words))) == "(1, {'a', 'b', 'c', 'dd'})"
    assert eval(key_text((1, set(words)))) == (1, set(words))
