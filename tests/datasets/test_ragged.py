"""Samples of different lengths, on numbers small enough to see."""

import pytest
import torch

from loaderkit.datasets.ragged import jag, join, mask_of, pack_rows, pad
from loaderkit.errors import DatasetError
from loaderkit.testing import assert_same

VALUES, LENGTHS = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0, 1])
SAMPLES = [VALUES[:2], VALUES[:0], VALUES[2:]]


def test_shorter_samples_are_filled_with_zeros():
    padded = pad(SAMPLES)

    assert padded.values.squeeze(-1).tolist() == [[1, 2], [0, 0], [3, 0]]
    assert padded.mask.tolist() == [[True, True], [False, False], [True, False]]
    assert [len(each) for each in padded.to_list()] == [2, 0, 1]


DTYPES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32"
)
DTYPES += " float64 complex64 complex32 float8_e4m3fn float8_e5m2 float8_e8m0fnu"


@pytest.mark.parametrize("name", DTYPES.split())
def test_any_dtype_can_be_padded(name):
    samples = [each.to(getattr(torch, name)) for each in SAMPLES]

    padded = pad(samples)

    for made, sample in zip(padded.to_list(), samples, strict=True):
        assert_same(made.clone(), sample.clone())


@pytest.mark.parametrize("longest", [9, 20_000])
def test_the_mask_says_where_samples_are(longest):
    lengths = torch.tensor([3, 0, longest])

    mask = mask_of(lengths.numpy(), longest)

    assert torch.equal(mask, torch.arange(longest) < lengths[:, None])


def test_samples_without_rows_are_an_empty_batch():
    assert pad([VALUES[:0], VALUES[:0]]).values.shape == (2, 0, 1)


def test_packed_samples_say_where_they_begin():
    packed = pack_rows(VALUES, LENGTHS)

    assert packed.offsets.tolist() == [0, 2, 2, 3]
    assert packed.values is VALUES
    assert_same(packed.to_list(), [VALUES[:2], VALUES[:0], VALUES[2:]])


def test_jagged_samples_are_one_tensor():
    assert [each.tolist() for each in jag(VALUES, LENGTHS).unbind()] == [
        [[1], [2]],
        [],
        [[3]],
    ]


def test_tensors_are_put_end_to_end():
    values, lengths = join(SAMPLES)

    assert_same((values, lengths), (VALUES, LENGTHS))


@pytest.mark.parametrize("join_or_pad", [join, pad])
@pytest.mark.parametrize(
    "other",
    [torch.ones(1, 2), torch.ones(1), torch.ones(1, 1).double(), torch.tensor(1.0)],
)
def test_tensors_that_differ_in_more_are_named(other, join_or_pad):
    with pytest.raises(
        DatasetError, match="Samples 0 and 1 of a batch cannot be joined"
    ):
        join_or_pad([VALUES, other])


@pytest.mark.parametrize("make", [pad, lambda parts: pack_rows(*join(parts))])
def test_a_batch_is_moved_whole_and_only_its_values_are_cast(make):
    batch = make([torch.arange(2.0), torch.arange(3.0)])

    cast = batch.to(torch.float16)
    moved = batch.to("meta", non_blocking=True)

    assert type(cast) is type(moved) is type(batch)
    assert cast.values.dtype is torch.float16
    assert [part.dtype for part in cast[1:]] == [part.dtype for part in batch[1:]]
    assert {part.device.type for part in moved} == {"meta"}


@pytest.mark.needs("accelerate")
@pytest.mark.needs("lightning")
@pytest.mark.parametrize("make", [pad, lambda parts: pack_rows(*join(parts))])
def test_trainers_move_such_a_batch_to_the_device(make):
    from accelerate.utils import find_batch_size, send_to_device
    from lightning.fabric.utilities.apply_func import move_data_to_device

    batch = {"ids": make([torch.arange(2.0), torch.arange(3.0)])}

    for move in (send_to_device, move_data_to_device):
        moved = move(batch, torch.device("meta"))["ids"]

        assert type(moved) is type(batch["ids"])
        assert {part.device.type for part in moved} == {"meta"}
    assert find_batch_size(batch) in {2, 5}
