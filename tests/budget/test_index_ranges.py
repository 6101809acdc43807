"""Laws: a step that reads beyond a table is refused, and no other; torch says which."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it

from loaderkit import estimate_step
from loaderkit.budget.step import tracker
from loaderkit.errors import StepError

ROWS, WIDTH = 7, 4


def _zeros_like_rows(hidden):
    return torch.zeros(ROWS, hidden.size(1))


def _rows_of_index(hidden, index):
    return hidden[: len(index)]


def _index_of_columns(index):
    return index[:, None].expand(-1, WIDTH)


LOOKUPS = {
    "embedding": lambda h, i: F.embedding(i, h),
    "embedding bag": lambda h, i: F.embedding_bag(i[None], h, mode="mean"),
    "embedding bag, max": lambda h, i: F.embedding_bag(i[None], h, mode="max"),
    "index": lambda h, i: h[i],
    "index, second axis": lambda h, i: h.t()[:, i],
    "index, int32": lambda h, i: h[i.int()],
    "assign": lambda h, i: _zeros_like_rows(h).index_put((i,), _rows_of_index(h, i)),
    "assign in place": lambda h, i: _zeros_like_rows(h).index_put_(
        (i,), _rows_of_index(h, i)
    ),
    "index_select": lambda h, i: h.index_select(0, i),
    "index_select, last axis": lambda h, i: h.t().index_select(-1, i),
    "index_add": lambda h, i: _zeros_like_rows(h).index_add(0, i, _rows_of_index(h, i)),
    "index_copy": lambda h, i: _zeros_like_rows(h).index_copy(
        0, i, _rows_of_index(h, i)
    ),
    "index_fill": lambda h, i: h.index_fill(0, i, 1.0),
    "gather": lambda h, i: h.gather(0, _index_of_columns(i)),
    "scatter": lambda h, i: _zeros_like_rows(h).scatter(
        0, _index_of_columns(i), _rows_of_index(h, i)
    ),
    "scatter a number": lambda h, i: h.scatter(0, _index_of_columns(i), 1.0),
    "scatter_add": lambda h, i: _zeros_like_rows(h).scatter_add(
        0, _index_of_columns(i), _rows_of_index(h, i)
    ),
    "scatter_reduce": lambda h, i: _zeros_like_rows(h).scatter_reduce(
        0, _index_of_columns(i), _rows_of_index(h, i), "amax", include_self=False
    ),
    "take": lambda h, i: h[:, 0].take(i),
    "put": lambda h, i: h[:, 0].put(i, h[: len(i), 1]),
    "cross entropy": lambda h, i: F.cross_entropy(h.t()[: len(i)], i),
    "cross entropy, weighted": lambda h, i: F.cross_entropy(
        h.t()[: len(i)], i, torch.ones(ROWS), label_smoothing=0.1
    ),
    "nll, none ignored": lambda h, i: F.nll_loss(h.t()[: len(i)], i, ignore_index=ROWS),
    "nll of images": lambda h, i: F.nll_loss(
        h.t()[None, : len(i)].transpose(1, 2)[..., None], i[None, :, None]
    ),
    "nll of one": lambda h, i: F.nll_loss(h[:, 0], i[-1]),
}
INDICES = {
    "within": [0, 6, 3],
    "from the end": [0, 2, -1],
    "one beyond": [0, 3, 7],
    "far beyond": [1, 2, 5000],
    "far below": [0, 1, -5000],
    "below by one": [0, 1, -8],
    "one that is ignored": [1, 2, -100],
}


class LooksUp(nn.Module):
    """A layer, then an operator with an index; and a table too large to be trained."""

    def __init__(self, function, index, large_rows):
        super().__init__()
        self.inner = nn.Linear(3, WIDTH)
        self.function = function
        self.register_buffer("index", index)
        self.large = nn.Parameter(torch.empty(large_rows, 100))

    def forward(self, x):
        return self.function(self.inner(x), self.index).sum() + self.large.sum()


@pytest.mark.many_cases(quick=24)
@pytest.mark.parametrize("numbers", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("name", LOOKUPS)
def test_the_step_is_refused_if_and_only_if_torch_refuses_it(name, numbers):
    index, x = torch.tensor(numbers), torch.randn(ROWS, 3)
    small = LooksUp(LOOKUPS[name], index, 1)
    # So large that the step is not tried for real.
    large = LooksUp(LOOKUPS[name], index, 100_000)
    try:
        small(x).backward()
    except (IndexError, RuntimeError):
        with pytest.raises(StepError, match="out of range"):
            estimate_step(large, x)
    else:
        assert estimate_step(large, x).method == "tracked"


def test_its_twin_that_does_not_look_would_be_seen(monkeypatch):
    # The same index, by a tracker that does not look at it.
    monkeypatch.setattr(tracker, "index_error_of", lambda *_: None)
    beyond = torch.tensor([9])

    estimated = estimate_step(
        LooksUp(LOOKUPS["embedding"], beyond, 9), torch.randn(ROWS, 3)
    )

    assert estimated.peak


@pytest.mark.parametrize("count", [ROWS - 1, ROWS + 1])
def test_a_mask_of_another_length_is_refused(count):
    mask = torch.ones(count, dtype=torch.bool)
    large = LooksUp(lambda h, i: h[i], mask, 100_000)

    with pytest.raises(IndexError):
        LooksUp(lambda h, i: h[i], mask, 1)(torch.randn(ROWS, 3))
    with pytest.raises(StepError, match="IndexError"):
        estimate_step(large, torch.randn(ROWS, 3))


def test_the_module_and_the_range_are_in_the_message():
    model = nn.Sequential(nn.Embedding(10, 4_000_000, device="meta"), nn.ReLU())

    with pytest.raises(StepError, match=r"0 Embedding: .*index 10 .* from 0 to 9"):
        estimate_step(model, torch.tensor([[1, 10]]))
