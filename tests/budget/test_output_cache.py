"""Law: what is remembered of a call is what torch's own mode for fakes gives."""

import random

import pytest
import torch
from drawn import draw_step
from drawn_models import draw_model_step
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from loaderkit.budget.step import tracker
from loaderkit.budget.step.output_cache import OutputCache
from loaderkit.budget.step.track import track_step

aten = torch.ops.aten


def described(out):
    """All that a tracked step reads of what a call gives."""
    if isinstance(out, FakeTensor):
        storage = out.untyped_storage()
        layout = (tuple(out.shape), out.stride(), out.storage_offset(), out.dtype)
        keys = str(torch._C._dispatch_key_set(out))
        return (*layout, storage.nbytes(), out.device, out.requires_grad, keys)
    if isinstance(out, (tuple, list)):
        return tuple(map(described, out))
    return out


def storages_shared(args, out):
    """Whose storage each output has."""
    operands = [leaf for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor)]
    keys = [operand.untyped_storage()._cdata for operand in operands]
    outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, FakeTensor)]
    return [
        [i for i, key in enumerate(keys) if key == output.untyped_storage()._cdata]
        for output in outputs
    ]


class Compared(OutputCache):
    """Asks torch's mode too, whatever it remembers."""

    def __init__(self):
        super().__init__()
        self.remembered, self.unlike = 0, []

    def run(self, fake, func, args, kwargs, dispatch):
        asked = []

        def counted():
            asked.append(func)
            return dispatch()

        out = super().run(fake, func, args, kwargs, counted)
        if not asked:
            self.remembered += 1
            truth = dispatch()
            is_like = described(out) == described(truth)
            if not is_like or storages_shared(args, out) != storages_shared(
                args, truth
            ):
                self.unlike.append((func, described(out), described(truth)))
        return out


def made(fake, shape, dtype=torch.float32, order=None, gaps=False):
    """A fake whose axes lie in an order."""
    order = order or range(len(shape))
    stored = [shape[axis] for axis in order]
    if gaps:
        stored[-1] *= 2
    tensor = torch.empty(stored, dtype=dtype, device="meta")
    tensor = tensor[..., : stored[-1] // 2] if gaps else tensor
    back = sorted(range(len(shape)), key=list(order).__getitem__)
    return FakeTensor(fake, tensor.permute(back), torch.device("cpu"))


def drawn_calls(seed, fake):
    """Calls of many operators, each with sizes of its own."""
    r = random.Random(seed)
    a, b, c = (r.choice([1, 2, 3, 5, 8, 13]) for _ in range(3))
    order, gaps = r.choice([(0, 1), (1, 0)]), r.random() < 0.3
    x = made(fake, (a, b), order=order, gaps=gaps)
    y = made(fake, (a, b), order=r.choice([(0, 1), (1, 0)]))
    w, bias = made(fake, (b, c), order=r.choice([(0, 1), (1, 0)])), made(fake, (c,))
    cube = made(fake, (a, b, c), order=r.choice([(0, 1, 2), (1, 0, 2), (2, 0, 1)]))
    short = made(fake, (a, 1), torch.bfloat16)
    rows = torch.zeros(c, dtype=torch.int64)
    spread = torch.zeros(c, 1, dtype=torch.int64).expand(c, b)
    return [
        (aten.mul.Tensor, (x, y)),
        (aten.add.Tensor, (x, short)),
        (aten.div.Tensor, (x, r.choice([2, 2.0, made(fake, ())]))),
        (aten.sub.Tensor, (cube, bias)),
        (aten.where.self, (made(fake, (a, b), torch.bool), x, y)),
        (aten.relu_.default, (x,)),
        (aten.sigmoid_backward.default, (x, y)),
        (aten.softplus_backward.default, (x, y, 1, 20)),
        (aten.threshold_backward.default, (y, x, 0)),
        (aten.lerp_.Scalar, (y, x, 0.1)),
        (aten.mm.default, (x, w)),
        (aten.addmm.default, (bias, x, w)),
        (aten.bmm.default, (cube, made(fake, (a, c, b)))),
        (aten.index_select.default, (x, 0, rows)),
        (aten.gather.default, (x, 0, spread)),
        (aten.scatter_add.default, (x, 0, spread, made(fake, (c, b)))),
        (aten.index_add.default, (x, 0, rows, made(fake, (c, b)))),
        (aten.index.Tensor, (x, [rows])),
        (aten.embedding.default, (w, rows)),
        (aten.sum.dim_IntList, (cube, [r.choice([0, 1, 2])], r.random() < 0.5)),
        (aten.mean.default, (x,)),
        (aten.max.dim, (x, 1)),
        (aten.var_mean.correction, (cube, [1])),
        (aten._softmax.default, (cube, r.choice([0, 1, 2]), False)),
        (aten.native_layer_norm.default, (cube, [c], bias, bias, 1e-5)),
        (aten.native_batch_norm.default, (x, *[None] * 4, True, 0.1, 1e-5)),
        (aten.new_zeros.default, (x, [c, b])),
        (aten.zeros_like.default, (x,)),
        (aten.clone.default, (cube,)),
        (aten._to_copy.default, (cube,)),
        (aten.slice_backward.default, (x, [2 * a, b], 0, a, 2 * a, 1)),
        (aten.select_backward.default, (bias, [a, c], 0, r.randrange(a))),
        (aten.cat.default, ([x, y], r.choice([0, 1]))),
        (aten.t.default, (x,)),
        (aten.slice.Tensor, (x, 0, r.randrange(a), a)),
        (aten.select.int, (cube, 1, r.randrange(b))),
        (aten.unsafe_split.Tensor, (y, 2, 1)),
        (aten.expand.default, (short, [a, c])),
        (aten.detach.default, (cube,)),
        (aten.unsqueeze.default, (x, 1)),
        (aten.linalg_vector_norm.default, (x, 2, [1], True)),
    ]


@pytest.mark.slow
def test_calls_of_other_sizes_give_what_torchs_mode_gives():
    cache, types = Compared(), (FakeTensor,)

    for seed in range(25):
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        for func, args in drawn_calls(seed, fake):

            def dispatch(fake=fake, func=func, args=args):
                return fake.__torch_dispatch__(func, types, args, {})

            cache.run(fake, func, args, {}, dispatch)

    assert not cache.unlike
    assert cache.remembered > 300


def test_a_size_that_was_remembered_wrongly_is_found():
    # The twin: an operator is said to turn a table round, and asked of a longer one.
    cache, fake = Compared(), FakeTensorMode(allow_non_fake_inputs=True)
    first, second = made(fake, (4, 3)), made(fake, (6, 3))

    cache.run(fake, aten.relu.default, (first,), {}, lambda: made(fake, (3, 4)))
    cache.run(
        fake,
        aten.relu.default,
        (second,),
        {},
        lambda: fake.__torch_dispatch__(aten.relu.default, (FakeTensor,), (second,)),
    )

    [(func, out, truth)] = cache.unlike
    assert func is aten.relu.default
    assert (out[0], truth[0]) == ((3, 6), (6, 3))


@pytest.mark.parametrize("value", [1, 1.0, True])
def test_numbers_that_are_equal_and_of_other_types_are_told_apart(value):
    cache, fake = Compared(), FakeTensorMode(allow_non_fake_inputs=True)
    numbers = made(fake, (4, 3), torch.int64)

    for other in (1, 1.0, True, value):
        args = (numbers, other)

        def dispatch(args=args):
            return fake.__torch_dispatch__(aten.mul.Tensor, (FakeTensor,), args, {})

        cache.run(fake, aten.mul.Tensor, args, {}, dispatch)

    assert cache.remembered == 1
    assert not cache.unlike


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", ["layers", "models", "graph models"])
def test_tracked_steps_have_what_torchs_mode_gives(family, seed, monkeypatch):
    drawn = draw_step(seed) if family == "layers" else draw_model_step(seed, family)
    compared = Compared()
    # In the place of our cache, one that asks torch each time and gives the same.
    monkeypatch.setattr(tracker, "OUTPUTS", compared)

    track_step(drawn.model, drawn.batch, drawn.step)

    assert not compared.unlike
    assert compared.remembered


def test_what_was_given_on_one_device_is_not_given_on_another():
    """As derivatives that go forward ask, of operands whose tangents are zeros."""
    cache, fake = Compared(), FakeTensorMode(allow_non_fake_inputs=True)
    x, w = made(fake, (4, 3)), made(fake, (3, 5))

    for device in ("cpu", "meta", "cpu"):
        with fake:
            args = x.to(device), w.to(device)

        def dispatch(args=args):
            return fake.__torch_dispatch__(aten.mm.default, (FakeTensor,), args, {})

        out = cache.run(fake, aten.mm.default, args, {}, dispatch)
        assert out.device.type == device
