"""Laws: an estimate changes nothing of the user's, and counts what the step reads."""

import functools

import pytest
import torch
from torch import nn

import loaderkit
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.train_step import Step

WIDTH, ROWS = 8, 6


class Everything(nn.Module):
    """A part of a step that changes all that a part may change."""

    def __init__(self, *, assigns=True):
        super().__init__()
        self.assigns = assigns
        self.teacher = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("center", torch.zeros(WIDTH))
        self.numbers = torch.zeros(4, dtype=torch.long)
        self.floats = torch.zeros(WIDTH)
        self.told = []

    def forward(self, hidden):
        with torch.no_grad():
            self.teacher.weight.mul_(0.5)
            self.floats += 1
        hidden = self.teacher(self.norm(hidden)) - self.center - self.floats
        self.numbers[0] += 1
        self.numbers.add_(1)
        if self.assigns:
            # Such as DINO's running mean.
            self.center = 0.9 * self.center + 0.1 * hidden.detach().mean(0)
            self.told = [*self.told, len(hidden)]
        return hidden.pow(2).mean()


class PlainObject:
    """The same as an object of a class of the user's own."""

    def __init__(self):
        self.part = Everything()
        self.calls = 0

    def __call__(self, output):
        self.calls += 1
        return self.part(output)

    def as_method(self, output):
        return self(output)


GLOBAL = Everything()
READ_BY_MODEL = Everything()


class ReadsGlobal(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows):
        return READ_BY_MODEL(self.layer(rows))


class WritesBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, WIDTH)

    def forward(self, numbers):
        numbers[:, 0] = 3
        return self.table(numbers)


def _loss_over_global(output):
    return _helper(output)


def _helper(output):
    return GLOBAL(output)


def _loss_that_calls_itself(output, *, again=True):
    if again:
        return _loss_that_calls_itself(output, again=False)
    _loss_that_calls_itself.calls += 1
    return GLOBAL(output)


_loss_that_calls_itself.calls = 0


def _ways_to_lose():
    """Losses that use what they change, each with what it uses."""
    part, held = Everything(), PlainObject()
    parts = [part]
    yield "a module", part, part
    yield "an object", held, held.part
    yield "a method", held.as_method, held.part
    yield "a partial", functools.partial(held.as_method), held.part
    yield "a closure", lambda output: part(output), part
    yield "a default", lambda output, *, part=part: part(output), part
    yield "a global", _loss_over_global, GLOBAL
    yield "a function that calls itself", _loss_that_calls_itself, GLOBAL

    def inner(output, *, again=True):
        return inner(output, again=False) if again else part(output)

    yield "an inner function that calls itself", inner, part
    parts.append(parts)
    yield "a list in a closure", lambda output: parts[0](output), part


LOSSES = list(_ways_to_lose())


def _list_of(gradient):
    return None if gradient is None else gradient.tolist()


def state_of(part):
    """All that can be seen of a part: types, values and gradients."""
    tensors = {**part.state_dict(keep_vars=True), "numbers": part.numbers}
    tensors["floats"] = part.floats
    seen = {
        name: (type(tensor), tensor.tolist(), _list_of(tensor.grad))
        for name, tensor in tensors.items()
    }
    return seen | {"told": list(part.told)}


def budget_calls(model, loss):
    rows = torch.rand(ROWS, WIDTH)
    samples = list(torch.rand(12, WIDTH))
    yield lambda: loaderkit.estimate_step(model, rows, loss=loss)
    yield lambda: loaderkit.estimate_step(model, rows, loss=loss, target="cuda")
    yield lambda: loaderkit.plan_batch(
        model, samples, "cpu", loss=loss, limit="1 GiB", epochs=1
    )
    yield lambda: loaderkit.assert_fits(model, rows, "1 GiB", device="cpu", loss=loss)
    yield lambda: measure_step(model, rows, Step(loss))


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "part"), [way[1:] for way in LOSSES], ids=[
    way[0] for way in LOSSES
])  # fmt: skip
def test_an_estimate_leaves_what_a_loss_uses_as_it_was(loss, part):
    model = nn.Linear(WIDTH, WIDTH)
    before = state_of(part)

    for call in budget_calls(model, loss):
        call()
        assert state_of(part) == before
        assert _loss_that_calls_itself.calls == 0

    # It is changed where it is called.
    loss(model(torch.rand(ROWS, WIDTH))).backward()
    assert state_of(part) != before
    _loss_that_calls_itself.calls = 0


def test_an_estimate_leaves_what_a_model_reads_as_it_was():
    model = ReadsGlobal()
    before = state_of(READ_BY_MODEL)

    loaderkit.estimate_step(model, torch.rand(ROWS, WIDTH))

    assert state_of(READ_BY_MODEL) == before
    model(torch.rand(ROWS, WIDTH)).backward()
    assert state_of(READ_BY_MODEL) != before


class Table:
    """An object that keeps what it has made."""

    values = None

    def get(self, rows):
        if self.values is None:
            self.values = _made(rows)
        return self.values


def _made(rows):
    # Of the batch, and too large to be computed beside: both are fake in an estimate.
    return rows.new_ones(WIDTH) + torch.zeros(100_000)[:WIDTH]


IN_DICT, IN_OBJECT, IN_LIST = {}, Table(), []
IN_GLOBAL = None


@functools.cache
def _cached(count):
    return torch.eye(1000)[0, :WIDTH] * count


class Keeps(nn.Module):
    """A model that keeps a table outside of itself."""

    on_class = None
    in_class = {}  # noqa: RUF012 -- as many write it

    def __init__(self, way):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.way, self.kept = way, []
        if way == "a hook":
            self.layer.register_forward_hook(
                lambda _module, _inputs, output: self.kept.append(output)
            )

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def static(_count):
        return torch.eye(1000)[0, :WIDTH]

    @functools.cache  # noqa: B019 -- as many write it
    def method(self, _count):
        return torch.eye(1000)[0, :WIDTH]

    def table(self, rows):
        global IN_GLOBAL
        kind, count = type(self), len(rows)
        if self.way == "a global":
            IN_GLOBAL = _made(rows) if IN_GLOBAL is None else IN_GLOBAL
            return IN_GLOBAL
        if self.way == "an attribute of the class":
            kind.on_class = _made(rows) if kind.on_class is None else kind.on_class
            return kind.on_class
        if self.way == "a dict of the class":
            return self.in_class.setdefault(count, _made(rows))
        if self.way == "a dict":
            return IN_DICT.setdefault(count, _made(rows))
        if self.way == "a list":
            IN_LIST.append(_made(rows))
            return IN_LIST[0]
        if self.way == "an object":
            return IN_OBJECT.get(rows)
        calls = {"a cache": _cached, "a static": Keeps.static, "a method": self.method}
        return calls.get(self.way, lambda _count: _made(rows))(count)

    def forward(self, rows):
        return self.layer(rows + self.table(rows))


WAYS_TO_KEEP = [
    *("a global", "an attribute of the class", "a dict of the class", "a dict"),
    *("a list", "an object", "a cache", "a static", "a method", "a hook"),
]


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("way", WAYS_TO_KEEP)
def test_the_training_finds_no_fakes_in_what_a_model_keeps(way):
    rows = torch.rand(ROWS, WIDTH)
    in_caches = [cache.cache_info() for cache in (_cached, Keeps.static, Keeps.method)]
    for call in budget_calls(Keeps(way), loss=None):
        call()
    kept = [IN_GLOBAL, Keeps.on_class, IN_OBJECT.values]
    assert (kept, Keeps.in_class, IN_DICT, IN_LIST) == ([None] * 3, {}, {}, [])
    after = [cache.cache_info() for cache in (_cached, Keeps.static, Keeps.method)]
    assert after == in_caches

    model = Keeps(way)
    model(rows).sum().backward()
    assert type(model.layer.weight.grad) is torch.Tensor

    # The training keeps it; the next case begins anew.
    assert len(model.kept) == (1 if way == "a hook" else 0)
    forget_what_was_kept()


def forget_what_was_kept():
    global IN_GLOBAL
    IN_GLOBAL = Keeps.on_class = IN_OBJECT.values = None
    for container in (IN_DICT, Keeps.in_class, IN_LIST):
        container.clear()


@pytest.mark.slow
def test_a_hook_that_keeps_outputs_keeps_none_of_an_estimate():
    model = Keeps("a hook")

    for call in budget_calls(model, loss=None):
        call()

    assert model.kept == []
    # One that has kept some is estimated as well.
    model(torch.rand(ROWS, WIDTH))
    loaderkit.estimate_step(model, torch.rand(ROWS, WIDTH))
    assert len(model.kept) == 1


def test_an_estimate_leaves_its_batch_as_it_was():
    numbers = torch.arange(6).view(3, 2)

    loaderkit.estimate_step(WritesBatch(), numbers)

    assert numbers.tolist() == [[0, 1], [2, 3], [4, 5]]


class Both(nn.Module):
    """A model and its loss as one module: the profiler sees all of it."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs, target):
        output = self.model(inputs)
        # A training loop holds the output too until the step ends.
        return self.loss(output, target), output


class Classes(nn.Module):
    """A loss with parameters, as ArcFace has."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(256, 300, bias=False)

    def forward(self, output, target):
        return nn.functional.cross_entropy(self.last(output), target)


class Teacher(nn.Module):
    """A loss that compares with what a frozen model gives."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 500), nn.ReLU(), nn.Linear(500, 256))
        self.requires_grad_(False)

    def forward(self, output, _target):
        return (self.layers(output) - output).pow(2).mean()


HOW_USED = {
    "itself": lambda loss: loss,
    "in a closure": lambda loss: lambda output, target: loss(output, target),
    "as a method": lambda loss: loss.forward,
}


@pytest.mark.many_cases(quick=6)
@pytest.mark.parametrize("kind", [Classes, Teacher])
@pytest.mark.parametrize("way", HOW_USED)
@pytest.mark.parametrize("optimizer", ["adam", "instance", "sgd"])
def test_what_a_loss_has_counts_as_if_it_were_the_models(kind, way, optimizer):
    model, part = nn.Linear(128, 256), kind()
    both = Both(model, part)
    batch = torch.rand(64, 128), torch.zeros(64, dtype=torch.long)
    if optimizer == "instance":
        parameters = [p for p in both.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters)

    estimated = loaderkit.estimate_step(
        model, batch, loss=HOW_USED[way](part), optimizer=optimizer
    )

    step = Step(lambda output, _target: output[0], optimizer)
    assert estimated.peak == max(measure_step(both, (batch, 0), step).values())


def test_a_tensor_that_a_closure_or_a_global_holds_is_captured():
    table = torch.rand(1000, 16)
    numbers = torch.randint(0, 1000, (50,))

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(16, 1)

        def forward(self, rows):
            return self.last(table[numbers] + rows)

    estimated = loaderkit.estimate_step(Looks(), torch.rand(50, 16))

    assert estimated.parts["captured"] == table.nbytes + numbers.nbytes
    [line] = [line for line in str(estimated).splitlines() if "captured" in line]
    assert "62.9 KiB" in line
    assert "captured" not in str(
        loaderkit.estimate_step(nn.Linear(4, 1), torch.ones(4))
    )


def test_a_loss_that_calls_its_model_uses_the_copy_of_it():
    model = nn.Linear(64, 64)
    rows = torch.rand(32, 64)

    with_model = loaderkit.estimate_step(
        model, rows, loss=lambda output: model(output).mean()
    )

    assert model.weight.grad is None
    assert with_model.parts["parameters"] == sum(p.nbytes for p in model.parameters())
    assert with_model.parts["captured"] == 0


class ReadsMemory(nn.Module):
    """Cannot be tracked: a fake has no address."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(4, width)

    def forward(self, rows):
        assert rows.data_ptr()
        return self.layer(rows)


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("width", [8, 2048])
def test_where_a_step_is_run_for_real_its_loss_is_copied_or_it_is_not_run(width):
    model, teacher = ReadsMemory(width), nn.Linear(width, width)
    before = [p.detach().clone() for p in teacher.parameters()]

    def loss(output):
        with torch.no_grad():
            teacher.weight.mul_(0.5)
        return teacher(output).mean()

    estimated = loaderkit.estimate_step(model, torch.rand(16, 4), loss=loss)

    # What is larger than a real step may be is not copied.
    assert estimated.method == ("formula" if width > 8 else "measured and extended")
    for parameter, values in zip(teacher.parameters(), before, strict=True):
        assert torch.equal(parameter, values)
        assert parameter.grad is None


def test_a_list_too_long_to_be_a_loss_is_not_copied():
    graphs = [torch.rand(2) for _ in range(5000)]

    def loss(output):
        return (output - graphs[7]).mean()

    estimated = loaderkit.estimate_step(nn.Linear(4, 2), torch.rand(3, 4), loss=loss)

    assert graphs[7].grad is None
    assert estimated.parts["captured"] == graphs[7].nbytes
