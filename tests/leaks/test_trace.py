"""Where what stays was allocated: on the host really, on a card replayed."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from loaderkit import LeakDetector
from loaderkit.leaks.trace import allocation_sites, device_sites

CARD = torch.device("cuda", 0)
MIB = 1 << 20


class Card:
    """Answers as torch.cuda does, of an allocator that only counts."""

    def __init__(self, *, recorded=False):
        self.blocks = []
        self.current = 0
        self.recorded = recorded
        self.calls = []
        self.memory = SimpleNamespace(_record_memory_history=self.record)

    def record(self, enabled, **settings):
        self.calls.append((enabled, settings))
        self.recorded = enabled is not None

    def allocate(self, size):
        """Take memory; who asks is written down if that is on, innermost first."""
        frame, frames = sys._getframe(1), []
        while frame is not None and self.recorded:
            location = {"filename": frame.f_code.co_filename, "line": frame.f_lineno}
            frames.append(location)
            frame = frame.f_back
        self.blocks.append(
            {"size": size, "state": "active_allocated", "frames": frames}
        )
        return self.blocks[-1]

    def free(self, block):
        block["state"] = "inactive"

    def memory_snapshot(self):
        other = 1 - self.current
        return [
            {"device": self.current, "blocks": self.blocks},
            {"device": other, "blocks": [{}]},
        ]

    def is_available(self):
        return True

    def device_count(self):
        return 2

    def current_device(self):
        return self.current

    is_initialized = is_available

    def get_device_properties(self, _):
        return SimpleNamespace(is_integrated=False)

    def memory_allocated(self, _):
        used = [block for block in self.blocks if block["state"] == "active_allocated"]
        return sum(block["size"] for block in used)

    memory_reserved = max_memory_allocated = memory_allocated


@pytest.fixture
def card(monkeypatch):
    fake_card = Card()
    real = torch.get_device_module
    monkeypatch.setattr(
        torch,
        "get_device_module",
        lambda kind: fake_card if kind == "cuda" else real(kind),
    )
    monkeypatch.setattr(
        torch._C, "_cuda_isHistoryEnabled", lambda: fake_card.recorded, raising=False
    )
    return fake_card


@pytest.mark.slow
def test_the_lines_that_allocate_are_traced_when_asked_for():
    retained = []

    def epoch():
        retained.append(bytearray(50_000))

    report = LeakDetector("cpu", on_leak=id).run(epoch, epochs=8, trace=True)

    (site, *_) = report.sites
    assert site.bytes_per_epoch == pytest.approx(50_000, rel=0.1)
    assert site.lines[-1].startswith("test_trace.py:")
    assert "allocations stay each epoch, 48.9 KiB of Python's: " in str(report)
    assert len(retained) == 8 + 6


def test_of_a_library_only_the_innermost_line_is_named():
    retained = []

    def epoch():
        layer = torch.nn.Linear(4, 4)
        retained.append(torch.nn.Sequential(layer, layer).state_dict())

    sites = allocation_sites(epoch)

    for site in sites:
        ours = [line for line in site.lines if line.startswith("test_trace.py:")]
        assert ours
        assert len(site.lines) - len(ours) <= 1


def test_a_cards_memory_is_traced_to_the_line_that_asked_for_it(card):
    def model():
        return card.allocate(2 * MIB)

    def epoch():
        model()
        card.free(model())

    sites = allocation_sites(epoch, device=CARD)

    assert [site.memory for site in sites if site.memory != "of Python's"] == [
        "on cuda:0"
    ]
    assert sites[0].bytes_per_epoch == 2 * MIB
    assert sites[0].per_epoch == 1
    assert len(sites[0].lines) >= 2
    assert all(line.startswith("test_trace.py:") for line in sites[0].lines[-2:])
    assert "2.00 MiB on cuda:0: " in str(sites[0])


@pytest.mark.parametrize("index", [0, 1])
def test_a_card_without_an_index_is_the_current_one(card, index):
    card.current = index

    def epoch():
        card.allocate(2 * MIB)

    sites = allocation_sites(epoch, device=torch.device("cuda"))

    assert sites[0].memory == f"on cuda:{index}"
    assert sites[0].bytes_per_epoch == 2 * MIB


def test_a_card_records_only_the_blocks_alive_and_only_meanwhile(card):
    allocation_sites(lambda: None, device=CARD)

    (on, settings), (off, _) = card.calls
    assert on == "state"
    assert settings["max_entries"] == 1
    assert off is None


def test_recording_ends_when_the_function_fails(card):
    with pytest.raises(ZeroDivisionError):
        allocation_sites(lambda: 1 / 0, device=CARD)

    assert not card.recorded


def test_a_recording_of_the_users_goes_on(card):
    card.recorded = True

    sites = allocation_sites(lambda: card.allocate(64), device=CARD)

    assert not card.calls
    assert sites[0].memory == "on cuda:0"


def test_a_card_that_nobody_used_is_not_woken(card):
    card.is_initialized = lambda: False

    allocation_sites(lambda: None, device=CARD)

    assert not card.calls


def test_memory_asked_for_by_another_thread_of_native_code_says_so(card):
    card.allocate(64)

    def backward():
        card.blocks.append({"size": MIB, "state": "active_allocated"})

    def epoch():
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()

    sites = allocation_sites(epoch, device=CARD)

    assert "backward()" in sites[0].lines[0]
    assert sites[0].bytes_per_epoch == MIB


@pytest.mark.slow
def test_what_stays_on_a_card_is_named_at_once_where_its_history_is_recorded(card):
    card.recorded = True
    cache = []
    detector = LeakDetector(CARD, on_leak=id)

    for _ in detector.epochs(range(12)):
        card.free(card.allocate(8 * MIB))
        cache.append(card.allocate(3 * MIB))

    report = detector.finish()
    assert report.leaking
    assert [site.bytes_per_epoch for site in report.sites] == [3 * MIB]
    assert "allocated: 1 allocation stays each epoch, 3.00 MiB on cuda:0" in str(report)
    assert report.sites[0].lines[-1].startswith("test_trace.py:")


@pytest.mark.slow
def test_its_twin_that_keeps_nothing_names_nothing(card):
    card.recorded = True
    detector = LeakDetector(CARD, on_leak=id)

    for _ in detector.epochs(range(12)):
        card.free(card.allocate(8 * MIB))

    assert detector.finish().ok
    assert not detector.finish().sites


@pytest.mark.slow
def test_a_leak_that_is_traced_names_the_cards_line_in_the_report(card):
    report = LeakDetector(CARD, on_leak=id).run(
        lambda: card.allocate(3 * MIB), epochs=8, trace=True
    )

    assert report.leaking
    assert "3.00 MiB on cuda:0" in str(report)


def test_memory_that_comes_and_goes_is_no_site():
    a, b, c = (("a.py", 1),), (("b.py", 2),), (("c.py", 3),)
    blocks = [
        {a: (1, 100), b: (1, 100), c: (1, 100)},
        {a: (2, 200), b: (1, 150), c: (3, 400)},
        {a: (3, 300), b: (1, 200), c: (1, 100)},
        {a: (4, 400), b: (1, 250), c: (4, 900)},
    ]

    sites = device_sites(blocks, CARD, epochs=3)

    assert [(site.lines, site.per_epoch) for site in sites] == [
        (("a.py:1",), 1.0),
        (("b.py:2",), 0.0),
    ]
