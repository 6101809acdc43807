"""Trainers and torch's own tools take a ragged field as the tuple that it is.

What they do with it is why its length, its items and its iteration are those of a
tuple of tensors, and not of the samples.
"""

import copy
import pickle

import pytest
import torch

from loaderkit.datasets.ragged import Packed, pad
from loaderkit.testing import assert_same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("accelerate", "lightning", "transformers"),
]


def end_to_end(tensors):
    lengths = [len(tensor) for tensor in tensors]
    return Packed(torch.cat(tensors), torch.tensor([0, *lengths]).cumsum(0))


BATCHES = {"padded": pad, "packed": end_to_end}


def a_batch(kind, lengths=(1, 3, 2)):
    return BATCHES[kind]([torch.arange(length) for length in lengths])


def by_trainer(batch):
    import transformers

    class Mover(transformers.Trainer):
        """A Trainer of which only the moving of batches is used."""

        def __init__(self):
            self.args = transformers.TrainingArguments(use_cpu=True, report_to=[])
            self.is_deepspeed_enabled = False

    return Mover()._prepare_input(batch)


def by_accelerate(batch):
    from accelerate.utils import send_to_device

    return send_to_device(batch, "cpu")


def cut_by_accelerate(batch):
    from accelerate.utils import slice_tensors

    return slice_tensors(batch, slice(None))


def joined_by_accelerate(*batches):
    from accelerate.utils import concatenate

    return concatenate(batches)


def by_lightning(batch):
    from lightning.fabric.utilities import move_data_to_device

    return move_data_to_device(batch, torch.device("cpu"))


def by_collections_of_lightning(batch):
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(batch, torch.Tensor, torch.clone)


def by_ddp(batch):
    device = torch.device("cpu")
    [moved] = torch.distributed.utils._recursive_to(
        batch, device, use_side_stream_for_tensor_copies=False
    )
    return moved


def by_checkpoint(batch):
    return torch.utils.checkpoint.checkpoint(
        lambda part: part, batch, use_reentrant=False
    )


TOOLS = {
    "torch's conversion": torch.utils.data.default_convert,
    "torch's trees": lambda batch: torch.utils._pytree.tree_map(torch.clone, batch),
    "copies": copy.deepcopy,
    "pickles": lambda batch: pickle.loads(pickle.dumps(batch)),
    "DDP": by_ddp,
    "a checkpoint": by_checkpoint,
    "HF's Trainer": by_trainer,
    "accelerate": by_accelerate,
    "accelerate's slices": cut_by_accelerate,
    "accelerate's sums": joined_by_accelerate,
    "Lightning": by_lightning,
    "Lightning's collections": by_collections_of_lightning,
}
"""What libraries do with a batch, in their own functions; each gives an equal one."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("tool", TOOLS)
def test_other_libraries_take_a_ragged_field_as_the_tuple_that_it_is(tool, kind):
    batch = a_batch(kind)

    taken = TOOLS[tool](batch)

    assert type(taken) is type(batch)
    for part, expected in zip(taken, batch, strict=True):
        assert torch.equal(part, expected)


def test_other_libraries_find_the_size_of_a_batch_in_a_padded_field():
    from accelerate.utils import find_batch_size
    from lightning.pytorch.utilities.data import extract_batch_size

    batch = {"x": a_batch("padded")}

    assert find_batch_size(batch) == extract_batch_size(batch) == 3


def test_two_batches_of_equal_widths_are_joined_by_accelerate():
    joined = joined_by_accelerate(a_batch("padded"), a_batch("padded", (3, 3)))

    assert_same(joined, a_batch("padded", (1, 3, 2, 3, 3)))


def test_a_tuple_whose_length_were_its_samples_could_not_be_joined():
    class Counted(tuple):
        """What ``Padded`` would be, if its length were the number of its samples."""

        def __len__(self):
            return 5

    with pytest.raises(IndexError):
        joined_by_accelerate(Counted(a_batch("padded")))
