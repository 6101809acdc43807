"""Running out of a GPU's memory for real: what is said of it, and what survives it."""

import copy
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cuda_failures import FAILURES
from torch import nn

from loaderkit import MicroBatcher, diagnose_oom, oom_guard, plan_batch
from loaderkit.errors import BudgetError

MIB = 2**20
FOLDER = Path(__file__).parent


def run_failures(names):
    """Run some in one process; give what each told, by its name."""
    environ = dict(os.environ)
    settings = FAILURES[names[0]]["settings"]
    if settings:
        environ["PYTORCH_CUDA_ALLOC_CONF"] = settings
    command = [sys.executable, FOLDER / "cuda_failures.py", *names]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environ,
            timeout=60,
            check=False,
        )
        printed, stderr = done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        printed, stderr = (error.stdout or b"").decode(), f"timed out: {error}"
    told = {name: {"text": None, "stderr": stderr[-1500:]} for name in names}
    for line in printed.splitlines():
        if line.startswith("{"):
            failure = json.loads(line)
            told[failure["name"]] = failure
    return told


@pytest.fixture(scope="module")
def failures():
    """What each failure told, by its name."""
    together = [name for name, failure in FAILURES.items() if not failure["alone"]]
    alone = [name for name, failure in FAILURES.items() if failure["alone"]]
    filling = ("expandable", "the_drivers", "a_librarys")
    last = [name for name in alone if name.startswith(filling)]
    told = run_failures(together)
    with ThreadPoolExecutor(12) as pool:
        for one in pool.map(run_failures, [[n] for n in alone if n not in last]):
            told |= one
    for name in last:  # each of these fills the whole GPU
        told |= run_failures([name])
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "failures.json").write_text(json.dumps(told, indent=1))
    return told


@pytest.mark.parametrize("name", FAILURES)
def test_what_is_said_of_a_failure_is_what_happened(failures, name):
    failure, expected = failures[name], FAILURES[name]
    if failure["text"] is None:
        pytest.skip(f"it did not fail here: {failure.get('stderr', '')[-300:]}")

    print(failure["text"][:1500], failure["printed"], sep="\n\n")
    for read in (failure["read"], failure["of_text"]):
        is_oom = read.get("is_oom", False)
        if expected["is_oom"] is False:
            assert is_oom is False
        else:
            assert is_oom
        for amount, size in expected["states"].items():
            assert read.get(amount) == pytest.approx(size, rel=0.01), amount
    if expected["verdicts"]:
        assert failure["read"]["verdict"] in expected["verdicts"]
    told = failure["torch"]
    for amount in ("capacity", "allocated"):
        if amount in failure["read"] and amount in told:
            assert failure["read"][amount] == pytest.approx(
                told[amount], rel=0.02, abs=64 * MIB
            )


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
    with pytest.raises(torch.OutOfMemoryError) as caught, oom_guard():
        kept = [torch.empty(256 * MIB, dtype=torch.uint8, device=small_card)]
        while True:
            kept.append(torch.empty_like(kept[0]))

    assert "software limit" in str(diagnose_oom(caught.value).verdict)
    del kept, caught
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

    with pytest.raises((torch.OutOfMemoryError, BudgetError)) as caught:
        trainer.step(batch)

    print(caught.value)
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

    print(plan)
    train_twice(model, 8, card)  # cuBLAS takes its workspaces
    largest = train_twice(model, plan.micro_batch, card)
    print(plan.micro_batch, largest / MIB, train_twice(model, 4000, card) / MIB)
    assert 0.5 * limit < largest <= limit
    assert train_twice(model, 4000, card) > limit


def test_without_a_limit_the_plan_asks_the_gpu(card):
    samples = [(torch.randn(64), torch.randn(8)) for _ in range(100)]

    plan = plan_batch(Wide(), samples, "cuda", loss=nn.functional.mse_loss)

    free = torch.cuda.mem_get_info()[0]
    print(plan)
    assert plan.limit == pytest.approx(0.9 * free, rel=0.05)
