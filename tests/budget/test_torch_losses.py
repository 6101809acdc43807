"""A law of pieces over every loss that torch has: equal to the whole, or refused.

The oracle is the whole batch's gradient in float64 (``deviations.deviation``).
"""

import inspect
import itertools
import random
import warnings

import pytest
import torch
from deviations import Case, deviation
from test_comparison import run
from torch import nn

CLASSES, FEATURES = 5, 6
WEIGHTS = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0])
OPTIONS = {
    "weight": [None, WEIGHTS],
    "pos_weight": [None, WEIGHTS],
    "ignore_index": [-100, 1],
    "label_smoothing": [0.0, 0.1],
    "reduction": ["mean", "sum"],
    "full": [False, True],
    "swap": [False, True],
}
# One keeps rows of classes of its own; the other takes the two sizes of such rows.
OTHERS = {"AdaptiveLogSoftmaxWithLoss", "LinearCrossEntropyLoss"}
NAMES = sorted(set(nn.modules.loss.__all__) - OTHERS)


def _labels(count):
    return torch.randint(0, CLASSES, (count,))


def _signs(*shape):
    return torch.randint(0, 2, shape) * 2.0 - 1.0


def _bits(count):
    return torch.randint(0, 2, (count, CLASSES)).float()


def _several_labels(count):
    target = torch.full((count, CLASSES), -1)
    target[:, 0] = _labels(count)
    return target


def _times(output, length, target_length):
    """Give CTC its log probabilities, and the lengths of inputs and targets."""
    log_probs = output.view(len(output), length, CLASSES).transpose(0, 1).log_softmax(2)
    lengths = (torch.full((len(output),), n) for n in (length, target_length))
    return log_probs, *lengths


def _ctc(loss, output, target):
    log_probs, lengths, target_lengths = _times(output, 8, 3)
    return loss(log_probs, target, lengths, target_lengths)


def _parts(output, count):
    return output.split(CLASSES, dim=1)[:count]


def _gaussian(loss, output, target):
    mean, log_variance = _parts(output, 2)
    return loss(mean, target, log_variance.exp() + 0.1)


def _direct(loss, output, target):
    return loss(output, target)


# By loss: outputs a sample, targets of a batch, and how the loss is called.
CALLS = {
    "BCELoss": (1, _bits, lambda loss, o, t: loss(o.sigmoid(), t)),
    "BCEWithLogitsLoss": (1, _bits, _direct),
    "CTCLoss": (8, lambda n: torch.randint(1, CLASSES, (n, 3)), _ctc),
    "CosineEmbeddingLoss": (2, _signs, lambda loss, o, t: loss(*_parts(o, 2), t)),
    "CrossEntropyLoss": (1, _labels, _direct),
    "GaussianNLLLoss": (2, lambda n: torch.randn(n, CLASSES), _gaussian),
    "HingeEmbeddingLoss": (1, lambda n: _signs(n, CLASSES), _direct),
    "KLDivLoss": (
        1,
        lambda n: torch.rand(n, CLASSES).softmax(1),
        lambda loss, o, t: loss(o.log_softmax(1), t),
    ),
    "MarginRankingLoss": (1, _signs, lambda loss, o, t: loss(o[:, 0], o[:, 1], t)),
    "MultiLabelMarginLoss": (1, _several_labels, _direct),
    "MultiLabelSoftMarginLoss": (1, _bits, _direct),
    "MultiMarginLoss": (1, _labels, _direct),
    "NLLLoss": (1, _labels, lambda loss, o, t: loss(o.log_softmax(1), t)),
    "NLLLoss2d": (1, _labels, lambda loss, o, t: loss(o.log_softmax(1), t)),
    "SoftMarginLoss": (1, lambda n: _signs(n, CLASSES), _direct),
    "TripletMarginLoss": (3, _signs, lambda loss, o, _: loss(*_parts(o, 3))),
    "TripletMarginWithDistanceLoss": (
        3,
        _signs,
        lambda loss, o, _: loss(*_parts(o, 3)),
    ),
}
_NUMBERS = (1, lambda n: torch.randn(n, CLASSES), _direct)
"""How all others are called: a number for each output."""


def _variants(name):
    """Give each choice of the options that a loss has."""
    parameters = inspect.signature(getattr(nn, name).__init__).parameters
    options = [option for option in OPTIONS if option in parameters]
    for values in itertools.product(*[OPTIONS[option] for option in options]):
        yield dict(zip(options, values, strict=True))


def _draw_case(name, options, seed):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    count = rng.randint(7, 24)
    width, draw_target, call = CALLS.get(name, _NUMBERS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NLLLoss2d's old name
        loss = getattr(nn, name)(**options)

    def loss_of_pair(output, target):
        is_label = not target.is_floating_point()
        return call(
            loss.to(output.dtype), output, target if is_label else target.to(output)
        )

    model = nn.Sequential(
        nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, width * CLASSES)
    )
    batch = (torch.randn(count, FEATURES), draw_target(count))
    return Case(model, batch, loss_of_pair, piece=rng.randint(2, 6))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", NAMES)
def test_pieces_of_a_loss_equal_the_whole_or_are_refused(name):
    wrong = []
    for options in _variants(name):
        case = _draw_case(name, options, seed=len(str(options)))
        share = deviation(case)
        is_refused = run(case) is not None
        is_false_alarm = is_refused and share < 1e-6
        is_silent = not is_refused and share > 2e-3
        if is_false_alarm or is_silent:
            wrong.append((options, share))

    assert wrong == []


def test_every_loss_of_torch_is_called_in_some_form():
    simple = {"HuberLoss", "L1Loss", "MSELoss", "PoissonNLLLoss", "SmoothL1Loss"}

    assert set(NAMES) == set(CALLS) | simple
