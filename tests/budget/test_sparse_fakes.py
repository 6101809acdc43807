"""Laws: a fake sparse tensor has as many elements as the real one, and takes its bytes.

Small steps with sparse tensors are also run for real; here they are tracked alone.
"""

import itertools

import pytest
import torch
from drawn_graph_fields import draw_graph_field_step
from drawn_storage import draw_storage_step
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from loaderkit.budget.step import kernel_calls
from loaderkit.budget.step.call_arguments import tensors_in
from loaderkit.budget.step.estimate import summarise
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.sparse_fakes import SparseFakes
from loaderkit.budget.step.track import track_step
from loaderkit.budget.step.train_step import Step

aten = torch.ops.aten


class Table(nn.Module):
    """Words of a table, read once or twice."""

    def __init__(self, rows, *, twice, padding):
        super().__init__()
        self.table = nn.Embedding(rows, 16, sparse=True, padding_idx=padding)
        self.twice = twice

    def forward(self, words):
        rows = self.table(words)
        if self.twice:
            rows = rows + self.table((words + 1) % self.table.num_embeddings)
        return rows.sum(1)


OPTIMIZERS = {
    "none": None,
    "sgd": torch.optim.SGD,
    "momentum": lambda p: torch.optim.SGD(p, 0.1, 0.9),
    "adagrad": torch.optim.Adagrad,
    "sparse adam": torch.optim.SparseAdam,
}


@pytest.mark.many_cases(quick=4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("padding", [None, 0])
# The second table has fewer rows than words are read.
@pytest.mark.parametrize("rows", [20_000, 700])
def test_sparse_gradients_and_their_updates_are_tracked(name, twice, padding, rows):
    model = Table(rows, twice=twice, padding=padding)
    words = torch.randint(rows, (300, 10))
    step = Step(optimizer=OPTIMIZERS[name])

    estimated = summarise(track_step(model, words, step), step)

    truth = max(measure_step(model, words, step).values())
    assert estimated.low <= truth <= estimated.high
    assert estimated.peak == pytest.approx(truth, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [101, 106, 112, 182, 192, 226, 238, 291, *range(340, 346)]
)
def test_so_they_are_in_drawn_steps(seed):
    drawn = draw_storage_step(seed, "sparse")
    try:
        truth = max(measure_step(drawn.model, drawn.batch, drawn.step).values())
    except RuntimeError as error:
        pytest.skip(f"torch itself cannot make this step: {error}")

    log = track_step(drawn.model, drawn.batch, drawn.step)

    estimated = summarise(log, drawn.step)
    assert estimated.low <= truth <= estimated.high
    if estimated.exact:
        assert estimated.peak == pytest.approx(truth, rel=0.005)


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("kind", ["walks", "reversible"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_so_they_are_in_models_of_graphs(kind, seed):
    drawn = draw_graph_field_step(seed, kind)

    log = track_step(drawn.model, drawn.batch, drawn.step)

    truth = max(measure_step(drawn.model, drawn.batch, drawn.step).values())
    assert summarise(log, drawn.step).peak == pytest.approx(truth, rel=0.005)


def draw_sparse(count, *, coalesced):
    places = torch.randint(40, (count,)) if not coalesced else torch.arange(count)
    return torch.sparse_coo_tensor(
        places[None], torch.rand(count, 3), (40, 3), is_coalesced=coalesced
    )


CALLS = {
    "a sum": (aten.add.Tensor, lambda a, b: (a, b)),
    "a sum in place": (aten.add_.Tensor, lambda a, b: (a, b)),
    "coalescing": (aten._coalesce.default, lambda a, _: (a,)),
    "a copy": (aten.clone.default, lambda a, _: (a,)),
    "a product": (aten.mul.Tensor, lambda a, _: (a, 2.0)),
    "a mask": (aten.sparse_mask.default, lambda a, _: (torch.rand(40, 3), a)),
}


# Torch coalesces no tensor that is, takes masks apart that are not, and a coalesced
# tensor of 40 places has at most 40 elements.
OF_COALESCED = [name for name in CALLS if name != "coalescing"]
OF_OTHERS = [name for name in CALLS if name != "a mask"]


@pytest.mark.parametrize(
    ("name", "count", "coalesced"),
    [
        *itertools.product(OF_OTHERS, [7, 30, 200], [False]),
        *itertools.product(OF_COALESCED, [7, 30], [True]),
    ],
)
def test_an_operator_gives_as_many_elements_as_for_real(name, count, coalesced):
    func, arguments_of = CALLS[name]
    left, right = (draw_sparse(count, coalesced=coalesced) for _ in "ab")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = SparseFakes(fake)
    fake_left, fake_right = fake.from_tensor(left), fake.from_tensor(right)
    assert fakes.name_elements(fake_left, left)
    assert fakes.name_elements(fake_right, right)
    with fake:
        # A mask's first operand is made here, without memory.
        fake_arguments = arguments_of(fake_left, fake_right)

    made = fakes.run(func, fake_arguments, {}, tensors_in(fake_arguments))

    real = func(*arguments_of(left, right))
    indices, values = fakes.parts_of(made)
    assert torch.equal(indices, real._indices())
    assert values.shape == real._values().shape
    assert (
        values.untyped_storage().nbytes() == real._values().untyped_storage().nbytes()
    )


def test_no_two_sizes_of_small_calls_lie_on_a_line():
    """A sum of two operands would look like a constant and one of them."""
    for rows in (*kernel_calls._SHRUNK_SIZES.values(), kernel_calls._SHRUNK_SPATIAL):
        for row in rows:
            columns = list(zip(*row, strict=True))
            for (x0, x1, x2), (y0, y1, y2) in itertools.combinations(columns, 2):
                assert (x1 - x0) * (y2 - y0) != (x2 - x0) * (y1 - y0), row
