"""The sizes of samples are those that Python counts in them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

from loaderkit import build_loader, pack
from loaderkit.errors import LoaderError

SEQUENCES = {
    "tensor": lambda n: torch.arange(n),
    "float tensor": lambda n: torch.ones(n, 2),
    "bool tensor": lambda n: torch.ones(n, dtype=torch.bool),
    "two axes": lambda n: torch.ones(n, n),
    "array": lambda n: np.arange(n),
    "small array": lambda n: np.ones(n, np.int16),
    "float array": lambda n: np.ones((n, 3), np.float32),
    "list": lambda n: list(range(n)),
    "tuple": lambda n: tuple(range(n)),
    "floats": lambda n: [0.5] * n,
    "words": lambda n: ["a,b", "[", "{"] * (n // 3) + ["c"] * (n % 3),
    "lists": lambda n: [[1, 2]] * n,
    "bools": lambda n: [True] * n,
}
OTHERS = {
    "number": 3,
    "float": 0.5,
    "text": "ten, letters",
    "none": None,
    "bytes": b"1234",
    "scalar": torch.tensor(3),
    "numpy scalar": np.float32(2),
}


@st.composite
def columns(draw, lengths):
    """Draw fields, each as long in every sample as its list of lengths says."""
    fields = {}
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(sorted(SEQUENCES)))
        fixed = draw(st.booleans())
        sizes = [draw(st.integers(0, 4))] * lengths if fixed else None
        sizes = sizes or draw(
            st.lists(st.integers(0, 6), min_size=lengths, max_size=lengths)
        )
        fields[f"f{number}"] = (kind, sizes)
    for name in draw(st.sets(st.sampled_from(sorted(OTHERS)))):
        fields[name] = (name, None)
    return fields


def sample_of(fields, row, *, nested):
    values = {
        name: OTHERS[kind] if sizes is None else SEQUENCES[kind](sizes[row])
        for name, (kind, sizes) in fields.items()
    }
    return {"inner": values, "number": 1} if nested else values


def longest(fields, count):
    """Count by hand: the longest of the fields whose length differs, or of all."""
    sizes = [sizes for _, sizes in fields.values() if sizes is not None]
    ragged = [field_sizes for field_sizes in sizes if len(set(field_sizes)) > 1]
    return [
        max(field_sizes[row] for field_sizes in ragged or sizes) for row in range(count)
    ]


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_tokens_are_the_length_of_the_longest_field_that_differs(
    tmp_path_factory, data
):
    count = data.draw(st.integers(1, 7))
    fields = data.draw(columns(count))
    nested = data.draw(st.booleans())
    samples = [sample_of(fields, row, nested=nested) for row in range(count)]
    path = tmp_path_factory.mktemp("c") / "c.lk"
    dataset = pack(
        samples, path, workers=0, shard_bytes=data.draw(st.integers(40, 400))
    )
    rows = data.draw(st.lists(st.integers(0, count - 1), min_size=1))

    assert dataset.sizes().tokens.tolist() == longest(fields, count)
    some = [longest(fields, count)[row] for row in rows]
    assert dataset[rows].sizes().tokens.tolist() == some


@pytest.mark.many_cases(quick=7)
@pytest.mark.parametrize("kind", sorted(SEQUENCES.keys() - {"two axes"}))
def test_no_batch_holds_more_tokens_than_it_may(tmp_path, kind):
    lengths = [5, 9, 2, 7, 3, 8, 1, 6]
    samples = [{"ids": SEQUENCES[kind](n), "row": row} for row, n in enumerate(lengths)]
    dataset = pack(samples, tmp_path / "c.lk", workers=0)

    batches = [batch["row"].tolist() for batch in build_loader(dataset, max_tokens=12)]

    assert [row for batch in batches for row in batch] == list(range(8))
    assert max(sum(lengths[row] for row in batch) for batch in batches) <= 12


def test_a_field_that_some_samples_keep_with_another_dtype_is_one_field(tmp_path):
    samples = [{"ids": torch.arange(n)} for n in (3, 5)]
    samples += [{"ids": np.ones(n, np.float32)} for n in (2, 9)]
    samples += [{"ids": [1] * 7, "more": torch.tensor(1)}]

    tokens = pack(samples, tmp_path / "c.lk", workers=0).sizes().tokens

    assert tokens.tolist() == [3, 5, 2, 9, 7]


@pytest.mark.slow
def test_samples_that_are_sequences_themselves_are_counted(tmp_path):
    for name, make in SEQUENCES.items():
        if name in {"words", "lists", "tuple"}:
            continue  # bare tuples and lists of these are nests of fields
        samples = [make(n) for n in (4, 1, 6)]
        tokens = pack(samples, tmp_path / f"{name}.lk", workers=0).sizes().tokens
        assert tokens.tolist() == [4, 1, 6], name


@pytest.mark.parametrize(
    "samples",
    [
        [{"text": "a b c", "y": 1}, {"text": "d", "y": 2}],
        [{"ids": torch.arange(4)}, {"ids": None}],
        [{"x": torch.tensor(3.0)}] * 2,
    ],
    ids=["texts and numbers", "a sample without the field", "scalars"],
)
def test_what_is_not_known_is_none_and_never_zero(tmp_path, samples):
    dataset = pack(samples, tmp_path / "c.lk", workers=0)

    assert dataset.sizes().tokens is None
    with pytest.raises(LoaderError, match="tokens of the samples are not known"):
        build_loader(dataset, max_tokens=10)


def nbytes(sample):
    return sum(np.asarray(value).nbytes for value in sample.values())


@pytest.mark.slow
@settings(max_examples=25)
@given(st.data())
def test_bytes_are_those_of_the_tensors(tmp_path_factory, data):
    dtypes = st.sampled_from([torch.int64, torch.float32, torch.int8, torch.bool])
    shapes = st.lists(st.integers(0, 4), max_size=3)
    widths = data.draw(st.lists(shapes, min_size=1, max_size=6))
    dtype = data.draw(dtypes)
    samples = [{"x": torch.zeros(shape, dtype=dtype), "n": 1} for shape in widths]
    path = tmp_path_factory.mktemp("c") / "c.lk"

    dataset = pack(samples, path, workers=0, shard_bytes=data.draw(st.integers(8, 90)))

    assert dataset.sizes().bytes.tolist() == [nbytes(sample) for sample in samples]


def test_sizes_are_shown_by_their_spread(tmp_path):
    graphs = [
        Data(x=torch.ones(n, 1), edge_index=torch.ones(2, 3).long()) for n in (2, 9, 4)
    ]
    clips = [{"tokens": torch.arange(n)} for n in (1, 5, 3)]

    assert repr(pack(graphs, tmp_path / "g.lk", workers=0).sizes()) == (
        "GraphSizes(3 samples, nodes 2 to 9 (median 4), edges 3 to 3 (median 3), "
        "56 B to 84 B each)"
    )
    assert repr(pack(clips, tmp_path / "c.lk", workers=0).sizes()) == (
        "SampleSizes(3 samples, tokens 1 to 5 (median 3), 8 B to 40 B each)"
    )
