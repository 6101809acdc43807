"""A verdict with its shortfall for every message, and for real exceptions."""

import asyncio
import inspect
import os
import signal
import sys
import weakref

import numpy as np
import pytest
import torch
from models import Attention

from loaderkit import diagnose_oom, oom_guard, plan_batch
from loaderkit.budget.diagnosis.diagnose import diagnose
from loaderkit.budget.diagnosis.judge import VERDICTS, judge
from loaderkit.budget.diagnosis.messages import Message
from loaderkit.budget.remedies import COSTS, REMEDIES, remedies_for
from loaderkit.errors import OptionError

GIB = 2**30
FULL = {"is_oom": True, "backend": "cuda", "kind": "device_oom", "capacity": 40 * GIB}


def advice_by_remedy(diagnosis):
    return {advice.remedy.name: advice for advice in diagnosis.advice}


def cuda(**sizes_gib):
    return Message(**FULL | {name: int(n * GIB) for name, n in sizes_gib.items()})


def test_a_request_larger_than_the_device_is_impossible():
    assert judge(cuda(requested=50, free=39)) == ("request exceeds device", 10 * GIB)


def test_enough_in_pieces_is_fragmentation():
    message = cuda(requested=4, free=3, allocated=30, reserved_unallocated=2)

    assert judge(message) == ("fragmentation", GIB)


def test_enough_free_is_the_platforms_limit():
    assert judge(cuda(requested=4, free=9))[0] == "platform limit"


def test_a_small_request_needs_a_whole_segment():
    message = cuda(requested=0.00109375, free=0.0035, allocated=39)

    verdict, shortfall = judge(message)

    assert verdict == "true shortage"
    assert shortfall == 20 * 2**20 - message.free


def test_what_others_hold_is_told_from_a_shortage():
    held = cuda(requested=4, free=3, in_use=10, allocated=10)
    own = cuda(requested=4, free=3, in_use=37, allocated=36)

    assert judge(held) == ("held by others", GIB)
    assert judge(own) == ("true shortage", GIB)


def test_a_limit_set_by_software_is_named():
    message = cuda(requested=4, free=30, allocated=8, limit=10, reserved=8)

    assert judge(message) == ("software limit", 2 * GIB)


def test_the_parts_of_a_metal_message_need_not_add_up():
    fits = Message(
        is_oom=True,
        backend="mps",
        kind="device_limit",
        requested=1,
        reserved=5,
        other=3,
        limit=20,
    )

    assert judge(fits) == ("true shortage", None)


def test_expandable_segments_are_advised_only_where_they_help():
    message = cuda(requested=4, free=3, allocated=30, reserved_unallocated=2)
    already = "expandable_segments:True"

    advice = advice_by_remedy(diagnose(message))
    again = advice_by_remedy(diagnose(message, settings=already))
    short = diagnose(cuda(requested=4, free=1, allocated=39, reserved_unallocated=0))

    assert advice["expandable segments"].brings == 2 * GIB
    assert advice["expandable segments"].enough
    assert "expandable segments" not in again
    assert "expandable segments" not in advice_by_remedy(short)


def test_advice_stands_cheapest_first():
    for verdict in VERDICTS:
        for backend in ("cuda", "mps", "host", "cpu"):
            remedies = remedies_for(verdict, backend)
            costs = [COSTS.index(remedy.cost) for remedy in remedies]
            assert costs == sorted(costs)
    advised = {verdict for remedy in REMEDIES for verdict in remedy.against}
    assert advised == set(VERDICTS) - {"not memory"}


def test_a_diagnosis_prints_numbers_shortfall_and_advice():
    message = cuda(requested=4, free=3, allocated=30, reserved_unallocated=2)

    text = str(diagnose(message))

    assert "Out of memory: enough is free, in pieces too small" in text
    assert "short of: 1.00 GiB" in text
    assert "requested 4.00 GiB, free 3.00 GiB" in text
    assert "(up to 2.00 GiB, enough)" in text


def test_the_machine_is_read_from_metals_cap():
    text = (
        "MPS backend out of memory (MPS allocated: 1.45 GB, other allocations: 7.42 GB,"
        " max allowed: 9.07 GB). Tried to allocate 563.62 MB on private pool."
    )

    diagnosis = diagnose_oom(text)

    assert diagnosis.verdict == "held by others"
    assert any("a machine of 8 GiB" in note for note in diagnosis.notes)


def test_a_real_numpy_error_is_read():
    with pytest.raises(MemoryError) as caught:
        np.empty((2**20, 2**20, 8))

    diagnosis = diagnose_oom(caught.value)

    assert (diagnosis.kind, diagnosis.shape) == ("host_alloc", [2**20, 2**20, 8])
    assert diagnosis.verdict == "host shortage"


def test_a_real_torch_error_is_read():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)

    assert diagnose_oom(caught.value).requested == 2**50


def test_the_cause_of_an_error_is_read():
    with pytest.raises(ValueError, match="step 3") as caught:
        _fail_in_step_three()

    diagnosis = diagnose_oom(caught.value)

    assert (diagnosis.is_oom, diagnosis.kind) == (True, "host_alloc")


def _fail_in_step_three():
    try:
        np.empty((2**20, 2**20, 8))
    except MemoryError as error:
        msg = "step 3 failed"
        raise ValueError(msg) from error


class Greedy(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return np.empty((2**20, 2**20, 8))


class Killing(Greedy):
    def __getitem__(self, i):
        os.kill(os.getpid(), signal.SIGKILL)


def one_worker(dataset):
    """Forked: from 3.14 on Python would import this test file anew, by its name."""
    return torch.utils.data.DataLoader(
        dataset, num_workers=1, multiprocessing_context="fork"
    )


def test_an_error_raised_in_a_worker_is_read():
    loader = one_worker(Greedy())

    with pytest.raises(Exception, match="Unable to allocate") as caught:
        next(iter(loader))

    assert diagnose_oom(caught.value).shape == [2**20, 2**20, 8]


@pytest.mark.slow
def test_a_killed_worker_is_read():
    loader = one_worker(Killing())

    with pytest.raises(RuntimeError, match="worker") as caught:
        next(iter(loader))

    diagnosis = diagnose_oom(caught.value)
    assert (diagnosis.kind, diagnosis.verdict) == ("killed", "killed")
    assert diagnosis.pid


def test_other_errors_are_not_memory():
    for error in (KeyError("memory"), ValueError("out of range"), StopIteration()):
        diagnosis = diagnose_oom(error)
        assert diagnosis.is_oom is False
        assert diagnosis.ok
        assert str(diagnosis).startswith("Not out of memory")


def test_the_guard_adds_the_diagnosis_and_frees_the_frames():
    freed = []

    with pytest.raises(MemoryError) as caught, oom_guard():
        _hold_and_fail(freed)

    assert caught.value.diagnosis.kind == "host_alloc"
    assert freed[0]() is None
    if sys.version_info >= (3, 11):
        assert "Out of memory" in caught.value.__notes__[0]


def test_without_the_guard_the_frames_keep_their_tensors():
    freed = []

    with pytest.raises(MemoryError) as caught:
        _hold_and_fail(freed)

    assert freed[0]() is not None
    assert caught.value


def test_the_guard_lets_other_errors_be():
    with pytest.raises(KeyError) as caught, oom_guard():
        raise KeyError

    assert not hasattr(caught.value, "diagnosis")


def test_above_a_coroutine_the_guard_awaits_it():
    freed = []

    @oom_guard()
    async def train(freed):
        await asyncio.sleep(0)
        _hold_and_fail(freed)

    assert inspect.iscoroutinefunction(train)
    with pytest.raises(MemoryError) as caught:
        asyncio.run(train(freed))

    assert caught.value.diagnosis.kind == "host_alloc"
    assert freed[0]() is None


def test_above_a_generator_the_guard_iterates_it():
    freed = []

    @oom_guard()
    def losses(freed):
        sent = yield 1
        yield sent
        _hold_and_fail(freed)

    assert inspect.isgeneratorfunction(losses)
    steps = losses(freed)
    assert [next(steps), steps.send("two")] == [1, "two"]
    with pytest.raises(MemoryError) as caught:
        next(steps)

    assert caught.value.diagnosis.kind == "host_alloc"
    assert freed[0]() is None


def test_above_a_generator_that_is_given_up_the_guard_closes_it():
    ends = []

    @oom_guard()
    def losses():
        try:
            yield 1
        finally:
            ends.append("closed")

    steps = losses()
    next(steps)
    steps.close()

    assert ends == ["closed"]


def test_above_a_function_the_guard_names_it_as_before():
    @oom_guard()
    def train(freed):
        """Train."""
        _hold_and_fail(freed)

    assert (train.__name__, train.__doc__) == ("train", "Train.")
    for _ in range(2):
        with pytest.raises(MemoryError) as caught:
            train([])
        assert caught.value.diagnosis.kind == "host_alloc"


def test_above_an_asynchronous_generator_the_guard_says_where_to_put_it():
    async def losses():
        yield 1

    with pytest.raises(OptionError, match="asynchronous generator") as caught:
        oom_guard()(losses)

    assert "with oom_guard():" in caught.value.fix


def _hold_and_fail(freed):
    activations = torch.ones(1000)
    freed.append(weakref.ref(activations))
    np.empty((2**20, 2**20, 8))


def test_the_whole_diagnosis_goes_to_json():
    diagnosis = diagnose_oom("RuntimeError: Invalid buffer size: 9.75 GB")

    values = diagnosis.to_json()

    assert values["verdict"] == "request exceeds device"
    assert values["requested"] == 10468982784
    assert values["advice"][0]["cost"] == "free"


def test_without_free_bytes_capacity_and_held_bytes_decide():
    def xpu(**sizes_gib):
        sizes = {name: int(size * GIB) for name, size in sizes_gib.items()}
        return Message(**FULL | {"backend": "xpu"} | sizes)

    assert judge(xpu(requested=50)) == ("request exceeds device", 10 * GIB)
    assert judge(xpu(requested=4)) == ("unclear", None)
    assert judge(xpu(requested=4, allocated=10, reserved=10))[0] == "platform limit"
    assert judge(xpu(requested=4, allocated=39, reserved=39)) == (
        "true shortage",
        3 * GIB,
    )
    assert judge(xpu(requested=4, allocated=30, reserved=38)) == (
        "fragmentation",
        2 * GIB,
    )
    nothing = Message(is_oom=True, backend="cuda", kind="device_oom_async")
    assert judge(nothing) == ("unclear", None)


def test_a_request_above_metals_cap_is_impossible():
    text = (
        "MPS backend out of memory (MPS allocated: 0 bytes, other allocations: 1.00 GB,"
        " max allowed: 4.00 GB). Tried to allocate 6.00 GB on shared pool."
    )

    diagnosis = diagnose_oom(text)

    assert (diagnosis.verdict, diagnosis.shortfall) == (
        "request exceeds device",
        2 * GIB,
    )


def test_old_messages_print_the_difference_as_cached():
    old = cuda(requested=3, free=1, allocated=36, reserved=2.5)

    assert judge(old) == ("fragmentation", 2 * GIB)


def test_a_container_that_counts_sixteen_exbibytes_is_explained():
    diagnosis = diagnose_oom(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "8.00 GiB of which 1.00 GiB is free. Process 7 has 17179869184.00 GiB memory "
        "in use. Of the allocated memory 1.00 GiB is allocated by PyTorch, and 0 bytes "
        "is reserved by PyTorch but unallocated."
    )

    assert diagnosis.verdict == "held by others"
    assert any("16 EiB" in note for note in diagnosis.notes)
    assert not any("process 7 holds" in note for note in diagnosis.notes)


def test_who_holds_it_is_listed():
    diagnosis = diagnose_oom(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "8.00 GiB of which 1.00 GiB is free. Process 7 has 5.00 GiB memory in use. "
        "Including non-PyTorch memory, this process has 2.00 GiB memory in use. Of the "
        "allocated memory 1.50 GiB is allocated by PyTorch, and 0 bytes is reserved by "
        "PyTorch but unallocated."
    )

    assert diagnosis.notes == ["process 7 holds 5.00 GiB"]
    advice = advice_by_remedy(diagnosis)
    assert advice["other processes"].brings == 5 * GIB


def test_a_group_of_errors_is_searched():
    if sys.version_info < (3, 11):
        pytest.skip("exception groups came with Python 3.11")
    text = "Invalid buffer size: 9.00 GB"
    group = ExceptionGroup("two", [KeyError("x"), RuntimeError(text)])  # noqa: F821

    assert diagnose_oom(group).kind == "buffer_too_large"


@pytest.mark.slow
def test_with_a_plan_each_advice_has_its_bytes():
    data = list(torch.zeros(16, 40, 7))
    plan = plan_batch(Attention(layers=2), data, "cuda", limit="1 GiB", batch_size=16)
    text = (
        "CUDA out of memory. Tried to allocate 4.00 MiB (GPU 0; 16.00 MiB total "
        "capacity; 15.00 MiB already allocated; 1.00 MiB free; 15.00 MiB reserved in "
        "total by PyTorch)"
    )

    advice = advice_by_remedy(diagnose_oom(text, plan=plan))
    without_plan = advice_by_remedy(diagnose_oom(text))

    savings = {gain.remedy.name: gain.saves for gain in plan.savings}
    assert advice["micro-batches"].brings == savings["micro-batches"] > 0
    assert advice["checkpointing"].enough == (savings["checkpointing"] >= 3 * 2**20)
    assert without_plan["checkpointing"].brings is None
