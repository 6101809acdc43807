"""What devices can do: replayed for those that are not here."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from loaderkit.memory import probes
from loaderkit.memory.host import available_memory
from loaderkit.memory.probes import (
    CudaLikeProbe,
    MpsProbe,
    free_bytes,
    is_present,
    present_devices,
    present_kinds,
    probe_of,
    read_blocks,
    read_capability,
    read_device,
    read_device_used,
    with_index,
)
from loaderkit.memory.release import release


def cuda_module(*, integrated=False, started=False, count=1):
    return SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: count,
        is_initialized=lambda: started,
        get_device_properties=lambda _: SimpleNamespace(is_integrated=integrated),
    )


def test_a_card_with_memory_of_its_own_pins_and_copies_beside():
    capability = CudaLikeProbe("cuda", cuda_module()).capability(
        torch.device("cuda", 0)
    )

    assert capability.pins
    assert capability.asynchronous
    assert not capability.unified


def test_a_card_that_shares_the_hosts_memory_does_not_pin():
    capability = CudaLikeProbe("cuda", cuda_module(integrated=True)).capability(
        torch.device("cuda")
    )

    assert capability.unified
    assert not capability.pins


@pytest.mark.parametrize(
    ("device", "count", "is_here"),
    [("cuda", 1, True), ("cuda:0", 1, True), ("cuda:1", 1, False), ("cuda:7", 8, True)],
)
def test_a_device_whose_index_is_beyond_those_of_this_machine_is_not_here(
    device, count, is_here, monkeypatch
):
    module = cuda_module(count=count)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)

    assert is_present(torch.device(device)) == is_here
    if not is_here:
        with pytest.raises(ValueError, match="'cuda:1' here; pass device='cuda'"):
            read_capability(device)
        assert free_bytes(torch.device(device)) is None
        missing = read_device(torch.device(device)).missing
        assert missing == {"allocated": "there is no device 'cuda:1' here"}


@pytest.mark.parametrize("current", [0, 1])
def test_a_device_without_an_index_is_the_current_one_once_one_was_used(
    current, monkeypatch
):
    module = cuda_module(count=2)
    module.current_device = lambda: current
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    named, cuda, second = (
        torch.device("cpu"),
        torch.device("cuda"),
        torch.device("cuda", 1),
    )

    # The question would start the driver, and the program may choose another one yet.
    assert with_index(cuda) == cuda
    module.is_initialized = lambda: True

    assert with_index(cuda) == torch.device("cuda", current)
    assert with_index(second) == second
    assert with_index(named) == named


def test_all_devices_of_a_kind_are_listed_with_their_index(monkeypatch):
    module = cuda_module(count=2)
    real = torch.get_device_module
    monkeypatch.setattr(
        torch,
        "get_device_module",
        lambda kind: module if kind == "cuda" else real(kind),
    )

    assert list(map(str, present_devices()))[:2] == ["cuda:0", "cuda:1"]
    assert list(map(str, present_kinds()))[:1] == ["cuda"]


def test_a_driver_in_use_is_seen():
    capability = CudaLikeProbe("cuda", cuda_module(started=True)).capability(
        torch.device("cuda")
    )

    assert capability.started


def test_apples_device_never_pins():
    capability = MpsProbe().capability(torch.device("mps"))

    assert capability.unified
    assert not capability.pins
    assert not capability.asynchronous
    assert isinstance(probe_of(torch.device("mps")), MpsProbe)


def test_the_processor_is_always_there():
    assert not read_capability("cpu").pins


@pytest.mark.parametrize("device", ["nonsense", "cuda:0:1"])
def test_what_is_no_device_is_refused(device):
    with pytest.raises(ValueError, match="device must be"):
        read_capability(device)


@pytest.mark.parametrize(
    "device", ["cpu", "meta", "hip", "vulkan", "xla", "fpga", "maia", "ve", "lazy"]
)
def test_a_kind_of_device_is_here_when_torch_makes_a_tensor_on_it(device):
    try:
        torch.empty(0, device=device)
    except NotImplementedError:  # torch knows the name, and has no code for it
        with pytest.raises(ValueError, match=f"there is no device '{device}' here"):
            read_capability(device)
    else:
        assert read_capability(device).device == device


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_here_is_refused_with_the_fix():
    with pytest.raises(ValueError, match="device='cpu'"):
        read_capability("cuda")


def started_card(**more):
    """A card in use, whose functions answer with what a real one said."""
    card = cuda_module(started=True)
    blocks = [
        {"size": 2 << 20, "state": "active_allocated"},
        {"size": 512 << 10, "state": "inactive"},
        {"size": 6 << 20, "state": "inactive"},
    ]
    answers = {
        "memory_allocated": lambda _: 36_780,
        "memory_reserved": lambda _: 40_340,
        "max_memory_allocated": lambda _: 39_000,
        "memory_stats": lambda _: {"inactive_split_bytes.all.current": 3_560},
        "host_memory_stats": lambda: {"allocated_bytes.current": 4096},
        "mem_get_info": lambda _: (3_840, 44_520),
        "memory_snapshot": lambda: [{"device": 0, "blocks": blocks}],
        "current_device": lambda: 0,
    }
    card.__dict__.update(answers | more)
    return CudaLikeProbe("cuda", card)


def test_a_card_in_use_gives_all_its_counters():
    values, missing = read_device(torch.device("cuda", 0), probe=started_card())

    assert not missing
    assert values == {
        "allocated": 36_780,
        "reserved": 40_340,
        "peak": 39_000,
        "pinned": 4096,
        "inactive_split": 3_560,
        "device_free": 3_840,
        "device_limit": 44_520,
        "largest_free": 6 << 20,
    }


def test_a_card_that_cannot_tell_what_is_free_says_so_and_tells_the_rest():
    def unsupported(_):
        message = "The device doesn't support querying the available free memory."
        raise RuntimeError(message)

    card = started_card(mem_get_info=unsupported)

    values, missing = read_device(torch.device("xpu", 0), probe=card)

    assert values["allocated"] == 36_780
    assert "doesn't support" in missing["device_free"]


def test_a_card_that_nobody_used_is_not_woken_to_be_asked():
    values, missing = read_device(
        torch.device("cuda"), probe=CudaLikeProbe("cuda", cuda_module())
    )

    assert not values
    assert "has not used" in missing["allocated"]


def share_of(share):
    """Answer for a card as torch does: for an index, and not for a plain "cuda"."""

    def get_per_process_memory_fraction(device):
        if not isinstance(device, int) and device.index is None:
            message = "Expected a torch.device with a specified index or an integer"
            raise ValueError(message)
        return share

    return get_per_process_memory_fraction


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
@pytest.mark.parametrize("started", [False, True])
def test_what_is_free_is_asked_of_a_card_that_nobody_used_too(started, name):
    card = started_card(
        is_initialized=lambda: started, get_per_process_memory_fraction=share_of(1.0)
    )

    free = free_bytes(torch.device(name), probe=card)

    assert free.amount == 3_840 + 40_340 - 36_780
    assert free.known_from.startswith(f"the driver of {name}")
    assert free.known_from.endswith("started to ask it") == (not started)


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_what_is_free_is_the_share_that_this_process_may_take(name):
    card = started_card(
        mem_get_info=lambda _: (30_000, 100_000),
        get_per_process_memory_fraction=share_of(0.5),
    )

    free = free_bytes(torch.device(name), probe=card)

    assert free.amount == 50_000 - 36_780
    assert "the share" in free.known_from


def test_what_is_free_for_the_processor_is_what_the_host_has():
    free = free_bytes(torch.device("cpu"))

    assert free.amount > 0
    assert free.known_from == available_memory()[1]
    assert free_bytes(torch.device("meta")) is None


def test_apples_device_tells_what_metal_holds():
    metal = SimpleNamespace(
        current_allocated_memory=lambda: 8_140,
        driver_allocated_memory=lambda: 8_977,
        recommended_max_memory=lambda: 5_330,
    )
    probe = MpsProbe(metal)
    probe.available = lambda _: True

    values, missing = read_device(torch.device("mps"), probe=probe)

    assert values == {"allocated": 8_140, "driver": 8_977, "device_limit": 5_330}
    assert not missing


def kinds_that_torch_names():
    """What its error says that a device can be."""
    with pytest.raises(RuntimeError) as raised:
        torch.device("unheard_of")
    names = re.search("one of (.+) device type", str(raised.value))[1].split(", ")
    # torch takes "mkldnn" with a warning that it is no device any more.
    return [name for name in names if name not in {"cpu", "mkldnn"}]


@pytest.mark.slow
def test_kinds_that_are_not_here_break_nothing_for_the_others(monkeypatch):
    absent = {*kinds_that_torch_names(), "npu", "made_up"}
    absent -= set(map(str, present_kinds()))
    for name in absent:
        monkeypatch.setitem(probes.PROBES, name, partial(CudaLikeProbe, name))

    assert present_devices() == list(filter(is_present, present_devices()))
    assert release().seconds > 0
    for device in map(torch.device, absent & set(kinds_that_torch_names())):
        assert not is_present(device)
        assert not read_device(device).values
        assert read_device_used(device) is None
        assert free_bytes(device) is None
        assert with_index(device) == device
        with probe_of(device).recording():
            assert read_blocks(device) == []


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_reading_a_device_that_is_not_here_gives_the_reason(device):
    if torch.device(device) in present_kinds():
        pytest.skip(f"this machine has {device}")

    values, missing = read_device(torch.device(device))

    assert not values
    assert "there is no device" in missing["allocated"]


def test_memory_in_use_is_listed_with_who_asked_for_it():
    lines = [{"filename": "model.py", "line": 7}, {"filename": "train.py", "line": 3}]
    used = {"size": 512, "state": "active_allocated", "frames": lines}
    blocks = [used, used | {"state": "inactive"}, used | {"frames": []}]
    card = started_card(memory_snapshot=lambda: [{"device": 0, "blocks": blocks}])

    with_frames, without = read_blocks(torch.device("cuda", 0), probe=card)

    assert with_frames.frames == (("train.py", 3), ("model.py", 7))
    assert without.size == 512
    assert not without.frames


def test_the_history_that_is_recorded_is_not_asked_for():
    asked = []

    def snapshot(**settings):
        asked.append(settings)
        return []

    card = started_card(memory_snapshot=snapshot)

    assert read_blocks(torch.device("cuda", 0), probe=card) == []
    assert asked == [{"include_traces": False}]


def test_an_allocator_without_snapshots_or_history_is_no_error():
    def unsupported(*_, **__):
        message = "cudaMallocAsync does not yet support snapshot"
        raise RuntimeError(message)

    memory = SimpleNamespace(_record_memory_history=unsupported)
    card = started_card(memory_snapshot=unsupported, memory=memory)

    with card.recording():
        assert read_blocks(torch.device("cuda", 0), probe=card) == []


@pytest.mark.parametrize("device", ["cpu", "mps", "cuda", "xpu"])
def test_a_device_that_tells_nothing_of_its_memory_gives_none(device):
    if torch.device(device) in present_kinds():
        pytest.skip(f"this machine has {device}")

    with probe_of(torch.device(device)).recording():
        assert read_blocks(torch.device(device)) == []


def test_emptying_reaches_the_cache_of_the_device():
    emptied = []
    card = started_card(empty_cache=lambda: emptied.append("cache"))

    card.empty()

    assert emptied == ["cache"]
