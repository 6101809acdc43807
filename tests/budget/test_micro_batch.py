"""Gradients of pieces equal the whole's, also after running out of memory."""

import contextlib
import copy
import gc
import resource
import sys
import weakref

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from fresh_process import in_fresh_process
from models import TwoLayers, graphs
from process_groups import connected
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GCNConv

from loaderkit import MicroBatcher, oom_guard, transactional_step
from loaderkit.budget.cutting import count_samples, cut, weight_of
from loaderkit.budget.pieces.micro_batch import StepResult
from loaderkit.errors import BudgetError, OptionError, StepError
from loaderkit.memory.process import malloc_heap


@pytest.fixture(autouse=True)
def exactly():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class SmallError(RuntimeError):
    """What a device of a few samples raises."""

    def __init__(self, count):
        super().__init__(
            f"CUDA out of memory. Tried to allocate {count}.00 GiB (GPU 0; 8.00 GiB "
            "total capacity; 7.00 GiB already allocated; 0 bytes free; 7.00 GiB "
            "reserved in total by PyTorch)"
        )


class Limited(nn.Module):
    """Runs out of memory above so many rows, at a chosen place."""

    def __init__(self, inner, most, where="forward"):
        super().__init__()
        self.inner, self.most, self.where, self.failed = inner, most, where, 0
        self.seen = []

    def forward(self, x):
        self.seen.append(len(x))
        out = self.inner(x)
        if len(x) > self.most:
            self.failed += 1
            self.held = weakref.ref(out)
            if self.where == "forward":
                raise SmallError(len(x))
            return Bomb.apply(out)
        return out


class Bomb(torch.autograd.Function):
    """Lets the backward pass fill the last layer's gradients and then fails."""

    @staticmethod
    def forward(_ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(_ctx, grad):
        raise SmallError(len(grad))


def deep():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def whole_gradient(model, batch, loss):
    model.zero_grad()
    loss(model(batch[0]), batch[1]).backward()
    return [p.grad.clone() for p in model.parameters()]


def far(model, expected):
    got = [p.grad for p in model.parameters()]
    pairs = zip(got, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def plain(model):
    """An optimizer that leaves gradients where they can be looked at."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


BATCH = (torch.randn(11, 6), torch.randint(0, 3, (11,)))


@pytest.mark.parametrize("size", [1, 3, 4, 10, 11, 99, None])
def test_pieces_make_the_gradient_of_the_whole(size):
    model, loss = deep().double(), nn.functional.cross_entropy
    batch = (BATCH[0].double(), BATCH[1])
    expected = whole_gradient(model, batch, loss)

    result = MicroBatcher(model, plain(model), loss, micro_batch=size).step(batch)

    assert far(model, expected) < 1e-12
    assert float(result.loss) == pytest.approx(loss(model(batch[0]), batch[1]).item())


def test_dividing_by_the_number_of_pieces_would_be_wrong():
    model, loss = deep().double(), nn.functional.cross_entropy
    batch = (BATCH[0].double(), BATCH[1])
    expected = whole_gradient(model, batch, loss)

    model.zero_grad()
    for start in (0, 4, 8):
        rows = slice(start, start + 4)
        (loss(model(batch[0][rows]), batch[1][rows]) / 3).backward()

    assert far(model, expected) > 0.01  # the uneven last piece counts too much


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_running_out_anywhere_leaves_the_gradient_equal(where, most):
    model, loss = Limited(deep().double(), most, where), nn.functional.cross_entropy
    batch = (BATCH[0].double(), BATCH[1])
    expected = whole_gradient(model.inner, batch, loss)
    trainer = MicroBatcher(model, plain(model), loss)

    first = trainer.step(batch)
    failed = model.failed
    second = trainer.step(batch)

    assert far(model.inner, expected) < 1e-12
    assert first.retries == failed > 0
    assert second.retries == 0  # the answer is kept
    assert first.micro_batch <= most


@pytest.mark.slow
def test_a_piece_that_fails_later_keeps_the_earlier_ones():
    model, loss = Limited(deep().double(), 99), nn.functional.cross_entropy
    batch = (BATCH[0].double(), BATCH[1])
    expected = whole_gradient(model.inner, batch, loss)

    def tighten(module, _args):
        if len(module.seen) == 2:
            module.most = 2

    model.register_forward_pre_hook(tighten)
    result = MicroBatcher(model, plain(model), loss, micro_batch=4).step(batch)

    assert model.seen[:2] == [4, 4]
    assert result.retries == 1
    assert far(model.inner, expected) < 1e-12


@pytest.mark.slow
def test_the_failed_piece_lets_go_of_its_tensors_before_the_next():
    model = Limited(deep().double(), 5)
    alive = []

    def look(module, _args):
        if module.failed and len(module.seen) == module.failed:
            alive.append(module.held())

    model.register_forward_pre_hook(look)
    gc.disable()
    try:
        MicroBatcher(model, plain(model)).step(BATCH[0].double())
    finally:
        gc.enable()

    assert alive
    assert all(tensor is None for tensor in alive)


@pytest.mark.slow
def test_random_numbers_and_buffers_are_put_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 1)
            self.register_buffer("calls", torch.zeros(()))
            self.drawn = []

        def forward(self, x):
            self.calls += 1
            self.drawn.append(float(torch.rand(())))
            if len(x) > 6:
                raise SmallError(len(x))
            return self.inner(x)

    model = Counting()
    result = MicroBatcher(model, plain(model)).step(BATCH[0].double())

    assert float(model.calls) == result.pieces == 2
    assert model.drawn[0] == model.drawn[1]  # the retry draws what the failure drew


@pytest.mark.slow
def test_one_sample_that_does_not_fit_raises_the_original_with_its_diagnosis():
    model = Limited(deep().double(), 0)
    before = [p.detach().clone() for p in model.parameters()]

    with pytest.raises(SmallError) as caught:
        MicroBatcher(model, plain(model)).step(BATCH[0].double())

    assert caught.value.diagnosis.requested == 2**30
    assert all(p.grad is None for p in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))


def test_other_errors_pass_through_and_leave_gradients_as_they_were():
    model = deep().double()
    model[0].weight.grad = torch.ones_like(model[0].weight)

    def broken(piece, _share):
        model(piece).sum().backward()
        msg = "a bug"
        raise RuntimeError(msg)

    with pytest.raises(RuntimeError, match="a bug"):
        transactional_step(model, BATCH[0].double(), broken, micro_batch=4)

    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[2].weight.grad is None


def test_a_transaction_adds_to_the_gradients_there_are():
    model = deep().double()
    x = BATCH[0].double()
    model(x).mean().backward()
    twice = [2 * p.grad for p in model.parameters()]

    def backward(piece, share):
        value = model(piece).mean() * share
        value.backward()
        return value.detach()

    result = transactional_step(model, x, backward, micro_batch=3)

    assert far(model, twice) < 1e-12
    assert result.pieces == 4


@pytest.mark.slow
def test_graphs_are_weighted_by_nodes():
    batch, model = graphs(9, nodes=20), TwoLayers(GCNConv).double()
    batch.x, batch.y = batch.x.double(), torch.randn(batch.num_nodes).double()
    nodewise = nn.Linear(64, 1)

    class Nodes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = model.first, nodewise

        def forward(self, data):
            return self.last(self.inner(data.x, data.edge_index)).view(-1)

    def loss(out, data):
        return nn.functional.mse_loss(out, data.y)

    whole = Nodes()
    loss(whole(batch), batch).backward()
    expected = [p.grad.clone() for p in whole.parameters()]

    batch._slice_dict["y"] = batch.ptr
    batch._inc_dict["y"] = torch.zeros(9, dtype=torch.long)
    result = MicroBatcher(whole, plain(whole), loss, 4, "nodes").step(batch)

    assert far(whole, expected) < 1e-12
    assert result.weight == batch.num_nodes


def test_sequences_are_weighted_by_tokens():
    lengths = torch.tensor([5, 2, 7, 1, 4])
    mask = torch.arange(7) < lengths[:, None]
    batch = {"x": torch.randn(5, 7, 6), "mask": mask}

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 1)

        def forward(self, x, mask):
            return (self.inner(x).squeeze(-1) * mask).sum() / mask.sum()

    model = Tokens()
    model(**batch).backward()
    expected = [p.grad.clone() for p in model.parameters()]

    trainer = MicroBatcher(model, plain(model), lambda out: out, 2, "tokens")
    trainer.step(batch)

    assert far(model, expected) < 1e-12


def test_the_gradient_is_clipped_once_and_as_a_whole():
    model, loss = deep().double(), nn.functional.cross_entropy
    batch = (BATCH[0].double(), BATCH[1])
    whole_gradient(model, batch, loss)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    expected = [p.grad.clone() for p in model.parameters()]

    MicroBatcher(model, plain(model), loss, micro_batch=3, clip_norm=0.01).step(batch)

    assert far(model, expected) < 1e-12


def test_the_last_window_is_not_lost():
    model, loss = deep().double(), nn.functional.mse_loss
    batches = [(torch.randn(n, 6), torch.randn(n, 3)) for n in (4, 4, 4, 4, 3)]
    joined = tuple(torch.cat(part) for part in zip(*batches[3:], strict=True))
    expected = whole_gradient(model, joined, loss)

    results = list(MicroBatcher(model, plain(model), loss).windows(batches, 3))

    assert [result.weight for result in results] == [12, 7]
    assert far(model, expected) < 1e-12


def test_a_grad_scaler_scales_and_unscales():
    model, loss = deep().double(), nn.functional.mse_loss
    batch = (torch.randn(8, 6), torch.randn(8, 3))
    expected = whole_gradient(model, batch, loss)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    trainer = MicroBatcher(
        model, plain(model), loss, micro_batch=3, scaler=scaler, clip_norm=1e9
    )
    trainer.step(batch)

    assert far(model, expected) < 1e-12


def test_autocast_reaches_the_forward_pass():
    seen = []
    model = deep().float()
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    trainer = MicroBatcher(model, plain(model), autocast=torch.bfloat16)

    trainer.step(torch.randn(4, 6, dtype=torch.float32))

    assert seen == [torch.bfloat16]


def test_batch_statistics_refuse_pieces_with_the_reason():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    x = BATCH[0].double()

    assert MicroBatcher(model, plain(model)).step(x).pieces == 1
    with pytest.raises(BudgetError, match="statistics of its batch") as caught:
        MicroBatcher(model, plain(model), micro_batch=4).step(x)
    assert "get_submodule('1').eval()" in caught.value.fix
    model[1].eval()
    assert MicroBatcher(model, plain(model), micro_batch=4).step(x).pieces == 3


@pytest.mark.slow
def test_contrastive_losses_refuse_pieces():
    model = Limited(deep().double(), 5)

    with pytest.raises(BudgetError, match="cannot be computed in pieces") as caught:
        MicroBatcher(model, plain(model), independent=False).step(BATCH[0].double())

    assert caught.value.__cause__.diagnosis.is_oom


def test_batches_of_every_form_are_cut():
    pair = ({"x": torch.arange(5), "n": 7}, torch.arange(5) * 2)
    named = {"x": torch.zeros(5, 2), "names": list("abcde"), "scale": torch.ones(3)}

    assert cut(pair, 1, 3)[1].tolist() == [2, 4]
    assert cut(pair, 1, 3)[0]["n"] == 7
    assert cut(named, 3, 5)["names"] == ["d", "e"]
    assert cut(named, 3, 5)["scale"].shape == (3,)
    assert cut(graphs(4), 1, 3).num_graphs == 2
    assert count_samples(graphs(4)[0]) == 1
    assert weight_of(torch.zeros(3, 5, 2), "tokens") == 15
    assert weight_of(torch.zeros(3), lambda piece: 2 * len(piece)) == 6


def test_wrong_arguments_are_refused():
    model = deep().double()
    with pytest.raises(ValueError, match="of at least 1"):
        next(MicroBatcher(model, plain(model)).windows([], 0))
    with pytest.raises(ValueError, match="to be cut"):
        count_samples("text")
    with pytest.raises(ValueError, match="a mask, lengths"):
        weight_of({"x": torch.zeros(3)}, "tokens")


WRONG_OPTIONS = {
    "micro_batch": [0, -3, 2.5, "4", True, [2]],
    "loss_mean_over": ["words", "token", 3, None],
    "clip_norm": [0, -1, "0.5", True, float("inf"), float("nan"), [1]],
    "scaler": [True, "gradscaler", torch.amp.GradScaler],
    "autocast": [True, "bf16", "float16", torch.float32, torch.int8],
    "independent": [None, 0, "no", "False"],
    "verify": [None, 1, "yes", 2.0],
}
"""Of ``MicroBatcher``; what other libraries take for these, and mistyped values."""


@pytest.mark.parametrize("option", WRONG_OPTIONS)
def test_an_option_with_a_wrong_value_is_refused_when_it_is_given(option):
    model = deep().double()
    for value in WRONG_OPTIONS[option]:
        with pytest.raises(OptionError, match=f"^{option} must be") as raised:
            MicroBatcher(model, plain(model), **{option: value})
        advised = eval(f"dict({raised.value.fix})", {"torch": torch})
        assert list(advised) == [option]
        MicroBatcher(model, plain(model), **advised)


def descent(model, *others):
    return torch.optim.SGD([*model.parameters(), *others], lr=0.1)


def _replaced_head(model):
    optimizer = descent(model)
    model[-1] = nn.Linear(model[-1].in_features, 3)
    return model, optimizer


def _frozen_trunk(model):
    model[0].requires_grad_(requires_grad=False)
    return model, descent(model[-1])


OPTIMIZERS = {
    "the model's": (lambda model: (model, descent(model)), "trains"),
    "of a part": (lambda model: (model, descent(model[-1])), "trains"),
    "of a part, the others frozen": (_frozen_trunk, "trains"),
    "of a copy": (lambda model: (model, descent(copy.deepcopy(model))), "refused"),
    "of one built again": (lambda model: (model, descent(deep())), "refused"),
    "of one whose head was replaced": (_replaced_head, "warned of"),
    "of two": (
        lambda model: (model, descent(model, nn.Parameter(ONE))),
        "trains",
    ),
}
"""How an optimizer was made beside a model, and what becomes of it."""
ONE = torch.ones(())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_another_model_is_told(name):
    make, expected = OPTIMIZERS[name]
    model, optimizer = make(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1)))
    if expected == "refused":
        with pytest.raises(OptionError, match="none of the parameters") as raised:
            MicroBatcher(model, optimizer)
        code = raised.value.fix.partition("=")[2]
        optimizer = eval(code, {"torch": torch, "model": model})
    before = [p.detach().clone() for p in model.parameters()]
    warns = pytest.warns(RuntimeWarning, match="was probably replaced")

    with warns if expected == "warned of" else contextlib.nullcontext():
        MicroBatcher(model, optimizer, lambda out: out.pow(2).mean()).step(
            torch.ones(2, 6)
        )

    assert any(not p.equal(b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_step_without_a_gradient_says_why_there_is_none():
    model = nn.Linear(6, 1)
    trainer = MicroBatcher(model, descent(model), lambda out: out.pow(2).mean())
    causes = {
        "no_grad": (torch.no_grad(), r"torch.no_grad\(\) is on"),
        "frozen": (contextlib.nullcontext(), "no parameter of model requires one"),
        "detached": (contextlib.nullcontext(), "was probably detached"),
    }

    for name, (context, why) in causes.items():
        model.requires_grad_(name != "frozen")
        if name == "detached":
            trainer.loss = lambda out: out.detach().mean()
        with context, pytest.raises(StepError, match=why):
            trainer.step(torch.ones(2, 6))


def test_an_optimizer_that_was_exchanged_is_looked_at_again():
    model = nn.Linear(6, 1)
    trainer = MicroBatcher(model, descent(model), lambda out: out.pow(2).mean())
    trainer.step(torch.ones(2, 6))

    trainer.optimizer = descent(nn.Linear(6, 1))
    with pytest.raises(BudgetError, match="trains nothing"):
        trainer.step(torch.ones(2, 6))


def test_what_others_call_the_options_of_a_trainer_in_pieces_is_answered():
    model = nn.Linear(6, 1)
    keywords = {
        "criterion": ("loss=f", len),
        "max_grad_norm": ("clip_norm=2.0", 2.0),
        "batch_size": ("micro_batch=8", 8),
        "accumulation_steps": ("batcher.windows(loader, 4)", 4),
    }
    for name, (fix, value) in keywords.items():
        with pytest.raises(OptionError, match=f"no option {name!r}") as raised:
            MicroBatcher(model, descent(model), **{name: value})
        assert raised.value.fix == fix
    trainer = MicroBatcher(model, descent(model))
    for name in ("state_dict", "zero_grad", "train", "fit", "backward", "lr"):
        with pytest.raises(AttributeError, match=r"fix: .*(batcher\.|step)"):
            getattr(trainer, name)


def test_a_loss_that_is_learned_trains_beside_the_model_or_alone():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output):
            return (output * self.scale).pow(2).mean()

    model, loss = nn.Linear(6, 1), Scaled()
    both = [*model.parameters(), *loss.parameters()]
    for parameters in (both, loss.parameters()):
        before = loss.scale.item()
        sgd = torch.optim.SGD(parameters, lr=0.1)
        MicroBatcher(model, sgd, loss).step(torch.ones(2, 6))
        assert loss.scale.item() != before

    model.requires_grad_(requires_grad=False)
    sgd = torch.optim.SGD(loss.parameters(), lr=0.1)
    MicroBatcher(model, sgd, lambda out: loss(out)).step(torch.ones(2, 6))
    other = torch.optim.SGD(nn.Linear(6, 1).parameters(), lr=0.1)
    with pytest.raises(BudgetError, match="trains nothing"):
        MicroBatcher(model, other, loss).step(torch.ones(2, 6))


class RunsOutOnOneRank(nn.Module):
    """Runs out of memory above two rows, on the second rank only."""

    def __init__(self, inner, rank):
        super().__init__()
        self.inner, self.rank = inner, rank

    def forward(self, x):
        if self.rank == 1 and len(x) > 2:
            msg = "Invalid buffer size: 9.00 GB"
            raise RuntimeError(msg)
        return self.inner(x)


def train_one_rank(rank, folder, store):
    """Train on half of a batch, and write whether the gradient is the whole's."""
    torch.set_num_threads(1)  # OpenMP does not survive a fork with more
    torch.set_default_dtype(torch.float64)  # the fixture is the other process's
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / store}", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(12, 6)
    model(x).pow(2).mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    wrapped = DistributedDataParallel(RunsOutOnOneRank(model, rank))
    sgd = torch.optim.SGD(wrapped.parameters(), lr=0.0)
    trainer = MicroBatcher(wrapped, sgd, lambda out: out.pow(2).mean(), micro_batch=5)
    result = trainer.step(x[rank * 6 : rank * 6 + 6])

    equal = far(model, expected) < 1e-12
    (folder / f"rank{rank}").write_text(f"retries={result.retries} equal={equal}")
    # Freed after the group, the wrapper would end gloo's threads while it holds the
    # GIL, which one that lets go of a tensor may be waiting for (pytorch#56297).
    del wrapped, sgd, trainer
    dist.destroy_process_group()


@pytest.mark.slow
@in_fresh_process  # threads that earlier tests started do not survive the forks
def test_two_ranks_average_once_although_one_runs_out(tmp_path):
    connected(
        lambda attempt: torch.multiprocessing.start_processes(
            train_one_rank,
            (tmp_path, f"store {attempt}"),
            nprocs=2,
            start_method="fork",  # torch and PyG are imported already
        )
    )

    assert (tmp_path / "rank0").read_text() == "retries=0 equal=True"
    assert (tmp_path / "rank1").read_text() == "retries=2 equal=True"


def train_wrapped_and_not(rank, folder, store):
    """Write what a step does of the wrapped model, and of what is in or around it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / store}", rank=rank, world_size=2
    )

    def loss(output):
        return output.pow(2).mean()

    def step(model):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        MicroBatcher(model, sgd, loss, micro_batch=2).step(x)

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    torch.manual_seed(rank)
    x = torch.randn(4, 6)
    ours, theirs = (DistributedDataParallel(make()) for _ in range(2))
    step(ours)
    loss(theirs(x)).backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    same = [torch.allclose(*both) for both in zip(*map(weights, (ours, theirs)))]  # noqa: B905
    lines = [f"wrapped {all(same)}"]

    alone = make()
    later = MicroBatcher(alone, torch.optim.SGD(alone.parameters(), lr=0.1), loss)
    wrapped_later = DistributedDataParallel(alone)
    attempts = {
        "module": lambda: step(ours.module),
        "part": lambda: step(ours.module[0]),
        "compiled": lambda: step(torch.compile(ours, backend="eager")),
        "around": lambda: step(nn.Sequential(ours)),
        "later": lambda: later.step(x),
        "not wrapped": lambda: step(make()),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            lines.append(f"{name} trained")
        except OptionError as error:
            lines.append(f"{name} {error.what.split('which is ')[-1]}")
    (folder / f"rank{rank}").write_text("\n".join(lines))
    attempts.clear()
    ours = theirs = alone = later = wrapped_later = None  # noqa: F841 -- before the group
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.slow
@in_fresh_process  # threads that earlier tests started do not survive the forks
def test_what_is_in_a_wrapper_or_around_one_is_refused_on_every_rank(tmp_path):
    connected(
        lambda attempt: torch.multiprocessing.start_processes(
            train_wrapped_and_not,
            (tmp_path, f"store {attempt}"),
            nprocs=2,
            start_method="fork",
        )
    )

    with_one = "with a DistributedDataParallel inside."
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text().splitlines() == [
            "wrapped True",
            "module inside a DistributedDataParallel.",
            "part inside a DistributedDataParallel.",
            f"compiled MicroBatcher was given OptimizedModule {with_one}",
            f"around MicroBatcher was given Sequential {with_one}",
            "later inside a DistributedDataParallel.",
            "not wrapped trained",
        ]


class Full(torch.optim.SGD):
    """An optimizer whose update runs out of memory when told to, half-way."""

    def __init__(self, parameters, error=None, **options):
        super().__init__(parameters, lr=0.1, **options)
        self.error = error

    def step(self, closure=None):
        result = super().step(closure)
        if self.error is not None:
            with torch.no_grad():
                self.param_groups[0]["params"][-1].fill_(float("nan"))
            raise self.error
        return result


FULL = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of "
    "8.00 GiB of which 10.00 MiB is free."
)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def test_a_first_update_that_runs_out_is_undone_and_can_be_tried_again():
    model, twin = deep().double(), deep().double()
    twin.load_state_dict(model.state_dict())
    optimizer = Full(model.parameters(), FULL, momentum=0.9)
    trainer, before = MicroBatcher(model, optimizer), weights(model)

    with pytest.raises(BudgetError, match="first update of Full ran out") as caught:
        trainer.step(BATCH[0].double())

    assert all(map(torch.equal, weights(model), before))
    assert not optimizer.state
    assert caught.value.__cause__ is FULL
    assert "was undone" in caught.value.what
    assert "foreach=False" in caught.value.fix

    optimizer.error = None
    trainer.step(BATCH[0].double())
    twins = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    MicroBatcher(twin, twins).step(BATCH[0].double())
    assert all(map(torch.equal, weights(model), weights(twin)))


@contextlib.contextmanager
def little_address_space(optimizer, more_bytes):
    """Let an optimizer's updates map no more than so much."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    # What earlier tests left to the collector would be given back during the update.
    gc.collect()
    taken = []

    def narrow(*_):
        # Here and not before: the backward pass leaves free heap behind, too.
        taken.extend(take_free_heap())
        mapped = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (mapped + more_bytes, before[1]))

    hook = optimizer.register_step_pre_hook(narrow)
    try:
        yield
    finally:
        hook.remove()
        resource.setrlimit(resource.RLIMIT_AS, before)
        taken.clear()


def take_free_heap():
    """Take what malloc keeps free, which needs no address that is not mapped yet."""
    taken = []
    for block_bytes in (16 << 20, 1 << 20):
        was_free = True
        while was_free:
            free_bytes = malloc_heap().free_bytes
            # One that had to be mapped is kept too: dropped, it would be free heap.
            taken.append(torch.empty(block_bytes, dtype=torch.uint8))
            was_free = free_bytes - malloc_heap().free_bytes >= block_bytes // 2
    return taken


def wide():
    """Three layers of 37 MiB each."""
    options = {"bias": False, "dtype": torch.float64}
    layers = [nn.Linear(2200, 2200, **options) for _ in range(3)]
    return nn.Sequential(*layers), torch.randn(2, 2200, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of mappings")
@in_fresh_process
def test_an_update_that_runs_out_half_way_says_what_it_changed():
    model, batch = wide()
    trainer = MicroBatcher(model, torch.optim.Adam(model.parameters(), foreach=True))
    trainer.step(batch)
    before = weights(model)

    with (
        little_address_space(trainer.optimizer, 48 * 2**20),
        pytest.raises(
            BudgetError, match=r"update of Adam ran out .* half-way"
        ) as caught,
    ):
        trainer.step(batch)

    # the moments are updated in place; then all roots need room at once
    assert all(map(torch.equal, weights(model), before))
    assert "0 of 3 parameters and 9 of 9 tensors of its state" in caught.value.why
    assert "load model and optimizer from the last checkpoint" in caught.value.fix


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of mappings")
@in_fresh_process
def test_an_update_that_runs_out_before_it_changed_anything_can_be_called_again():
    model, batch = wide()
    sgd = torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9, weight_decay=0.1, foreach=True
    )
    trainer = MicroBatcher(model, sgd)
    trainer.step(batch)
    before = weights(model)

    with (
        little_address_space(sgd, 48 * 2**20),
        pytest.raises(BudgetError, match="before it changed anything") as caught,
    ):
        trainer.step(batch)

    assert all(map(torch.equal, weights(model), before))
    assert "optimizer.step() again" in caught.value.fix
    sgd.step()
    assert not any(map(torch.equal, weights(model), before))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of mappings")
@in_fresh_process
def test_a_guard_around_an_update_says_that_it_may_be_half_done():
    model, batch = wide()
    adam = torch.optim.Adam(model.parameters(), foreach=True)
    model(batch).mean().backward()
    adam.step()

    with (
        pytest.raises(RuntimeError) as caught,
        # Not one temporary of 37 MiB.
        little_address_space(adam, 24 * 2**20),
        oom_guard(),
    ):
        adam.step()

    assert any("update was running" in note for note in caught.value.diagnosis.notes)


def test_a_later_update_that_runs_out_is_not_undone_and_names_the_checkpoint():
    model = deep().double()
    optimizer = Full(model.parameters(), momentum=0.9)
    trainer = MicroBatcher(model, optimizer)
    trainer.step(BATCH[0].double())
    before, optimizer.error = weights(model), FULL

    with pytest.raises(
        BudgetError, match=r"update of Full ran out .* half-way"
    ) as caught:
        trainer.step(BATCH[0].double())

    assert "may be changed in part" in caught.value.why
    assert "from the last checkpoint" in caught.value.fix
    assert caught.value.__cause__ is FULL
    assert optimizer.state
    assert not all(map(torch.equal, weights(model), before))


def test_another_error_of_the_optimizer_reaches_the_user_whole():
    model, bug = deep().double(), RuntimeError("a bug")

    with pytest.raises(RuntimeError, match=r"^a bug$") as caught:
        MicroBatcher(model, Full(model.parameters(), bug)).step(BATCH[0].double())

    assert caught.value is bug


def test_an_update_by_a_scaler_that_runs_out_is_undone_too():
    model = deep().double()
    optimizer, before = Full(model.parameters(), FULL, momentum=0.9), weights(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    with pytest.raises(BudgetError, match="was undone"):
        MicroBatcher(model, optimizer, scaler=scaler).step(BATCH[0].double())

    assert all(map(torch.equal, weights(model), before))


def summed(out):
    """A loss that is no mean: pieces of it weigh too little."""
    return out.pow(2).sum()


def test_a_loss_that_is_no_mean_is_told_by_how_far_pieces_are_off():
    model = deep().double()
    before = weights(model)
    trainer = MicroBatcher(model, plain(model), summed, micro_batch=4)

    with pytest.raises(BudgetError, match=r"gradients differ by \d+\.\d%") as caught:
        trainer.step(BATCH[0].double())

    assert "no mean over 'samples'" in caught.value.why
    assert "verify=False" in caught.value.fix
    assert all(map(torch.equal, weights(model), before))


def test_a_difference_that_is_meant_is_let_through():
    model = deep().double()

    result = MicroBatcher(
        model, plain(model), summed, micro_batch=4, verify=False
    ).step(BATCH[0].double())

    assert result.pieces == 3


class FailsInEval(nn.Module):
    """Draws random numbers, so that it is compared in evaluation; there it raises."""

    def __init__(self, error):
        super().__init__()
        self.inner, self.error, self.compared = deep().double(), error, 0

    def forward(self, x):
        if not self.training:
            self.compared += 1
            raise self.error
        return self.inner(x) + torch.rand(1) * 0


def test_a_comparison_that_runs_out_of_memory_is_made_at_a_later_step():
    model = FailsInEval(FULL)
    expected = whole_gradient(model, (BATCH[0].double(), 0), lambda out, _: out.mean())
    trainer = MicroBatcher(model, plain(model), lambda out: out.mean(), micro_batch=4)

    trainer.step(BATCH[0].double())
    trainer.step(BATCH[0].double())

    assert model.compared == 2
    assert model.training
    assert far(model, expected) < 1e-12


def test_another_error_of_the_comparison_reaches_the_user_whole():
    bug = RuntimeError("a bug")
    model = FailsInEval(bug)
    before = weights(model)

    with pytest.raises(RuntimeError, match=r"^a bug$") as caught:
        MicroBatcher(model, plain(model), micro_batch=4).step(BATCH[0].double())

    assert caught.value is bug
    assert model.training
    assert all(map(torch.equal, weights(model), before))


@pytest.mark.parametrize(
    ("retries", "text"),
    [(0, "loss 2.5, 4 pieces"), (2, "loss 2.5, 4 pieces, 2 tried again")],
)
def test_a_result_prints_what_was_tried_again(retries, text):
    result = StepResult(
        torch.tensor(2.5), pieces=4, micro_batch=3, retries=retries, weight=11
    )

    assert str(result) == text


@pytest.mark.parametrize(
    "norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm]
)
def test_pieces_of_a_spectral_norm_begin_where_the_whole_does(norm):
    # each forward pass changes its vectors: gradients were 30 % off, in silence
    torch.manual_seed(0)
    batch = torch.randn(24, 5), torch.randn(24, 1)
    results = []
    for size in (None, 7):
        torch.manual_seed(1)
        model = nn.Sequential(norm(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 1))
        model = model.double()
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        trainer = MicroBatcher(model, sgd, nn.functional.mse_loss, micro_batch=size)
        for _ in range(3):
            trainer.step(tuple(tensor.double() for tensor in batch))
        results.append(model.state_dict())

    whole, pieces = results
    for name, value in whole.items():
        assert torch.allclose(value, pieces[name], rtol=1e-9), name


def test_arrays_beside_a_tensor_are_cut_as_it_is():
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(output, target):
        return nn.functional.mse_loss(output, torch.as_tensor(target))

    batch = torch.ones(10, 3), np.ones((10, 1), np.float32)
    assert MicroBatcher(model, sgd, loss, micro_batch=4).step(batch).pieces == 3


def test_jagged_batches_are_cut_by_samples():
    jagged = torch.nested.nested_tensor(
        [torch.full((n, 2), float(n)) for n in (1, 3, 2, 4)], layout=torch.jagged
    )
    batch = {"clip": jagged, "label": torch.arange(4)}

    piece = cut(batch, 1, 3)

    assert count_samples(batch) == 4
    assert [tensor.tolist() for tensor in piece["clip"].unbind()] == [
        [[3.0, 3.0]] * 3,
        [[2.0, 2.0]] * 2,
    ]
    assert piece["label"].tolist() == [1, 2]
