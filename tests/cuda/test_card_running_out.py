"""Running out of a GPU's memory for real: what is said of it, and what survives it."""

import copy

import pytest
import torch
from torch import nn

from loaderkit import MicroBatcher, diagnose_oom, oom_guard, plan_batch
from loaderkit.errors import BudgetError

MIB = 2**20


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 8))

    def forward(self, x):
        return self.layers(x)


def test_a_batch_that_does_not_fit_is_trained_in_pieces_with_the_same_gradient(
    small_card,
):
    torch.manual_seed(0)
    model = Wide()
    reference = copy.deepcopy(model).double()
    x, y = torch.randn(60_000, 64), torch.randn(60_000, 8)
    nn.functional.mse_loss(reference(x.double()), y.double()).backward()
    model.to(small_card)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = x.to(small_card), y.to(small_card)
    with pytest.raises(torch.OutOfMemoryError):
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.zero_grad()

    trainer = MicroBatcher(model, optimizer, nn.functional.mse_loss)
    result = trainer.step(batch)

    assert result.retries > 0
    assert result.pieces > 1
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        error = (mine.grad.cpu().double() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 1e-4


def test_a_guard_gives_the_diagnosis_and_lets_the_frames_go(small_card):
    taken = torch.cuda.memory_allocated()

    def keep_more_and_more():
        kept = [torch.empty(256 * MIB, dtype=torch.uint8, device=small_card)]
        with oom_guard():
            while True:
                kept.append(torch.empty_like(kept[0]))

    with pytest.raises(torch.OutOfMemoryError) as caught:
        keep_more_and_more()

    assert diagnose_oom(caught.value).verdict == "software limit"
    del caught
    assert torch.cuda.memory_allocated() <= taken + 2 * MIB


def test_an_update_that_runs_out_is_undone(small_card):
    model = nn.Linear(9000, 9000, device=small_card)
    before = model.weight.detach().clone().cpu()
    optimizer = torch.optim.Adam(model.parameters())
    trainer = MicroBatcher(model, optimizer, nn.functional.mse_loss)
    batch = (
        torch.randn(4, 9000, device=small_card),
        torch.randn(4, 9000, device=small_card),
    )

    with pytest.raises((torch.OutOfMemoryError, BudgetError)):
        trainer.step(batch)

    assert torch.equal(model.weight.detach().cpu(), before)
    assert not optimizer.state


def train_twice(model, count, card):
    """Give the most that two steps take beyond what was taken before; bytes."""
    taken = torch.cuda.memory_allocated()
    twin = copy.deepcopy(model).to(card)
    optimizer = torch.optim.Adam(twin.parameters())
    x = torch.randn(count, 64, device=card)
    y = torch.randn(count, 8, device=card)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.mse_loss(twin(x), y).backward()
        optimizer.step()
    return torch.cuda.max_memory_allocated() - taken


def test_the_largest_planned_batch_fits_and_a_much_larger_one_does_not(card):
    model, limit = Wide(), 96 * MIB
    samples = [(torch.randn(64), torch.randn(8)) for _ in range(4000)]

    plan = plan_batch(
        model, samples, "cuda", limit=limit, loss=nn.functional.mse_loss,
        batch_size=4000,
    )  # fmt: skip

    train_twice(model, 8, card)  # cuBLAS takes its workspaces
    largest = train_twice(model, plan.micro_batch, card)
    assert 0.5 * limit < largest <= limit
    assert train_twice(model, 4000, card) > limit


@pytest.mark.usefixtures("card")
def test_without_a_limit_the_plan_asks_the_gpu():
    samples = [(torch.randn(64), torch.randn(8)) for _ in range(100)]

    plan = plan_batch(Wide(), samples, "cuda", loss=nn.functional.mse_loss)

    free = torch.cuda.mem_get_info()[0]
    assert plan.limit == pytest.approx(0.9 * free, rel=0.05)
