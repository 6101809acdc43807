"""The detector in this process: each way to use it, with a leak planted and without."""

import gc
import json
import linecache
import os
import subprocess
import sys
import time
import warnings

import pytest
import torch

import loaderkit
from loaderkit import LeakDetector, assert_no_leak
from loaderkit.errors import LeakError, LeakWarning, NotJudgedWarning, OptionError
from loaderkit.leaks.detector import JUDGED_AFTER
from loaderkit.memory import process
from loaderkit.memory.probes import present_devices, present_kinds

SIZE = 30_000  # float32 numbers a step: 117 KiB


def growing_epoch():
    retained = []
    return lambda: retained.append(torch.randn(SIZE))


def flat_epoch():
    return lambda: torch.randn(SIZE)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu", "mps", "mps:7"])
def test_a_device_that_is_not_here_is_refused_and_one_that_is_here_is_watched(device):
    kind, index = torch.device(device).type, torch.device(device).index or 0
    here = {present.type for present in present_devices()}
    if kind in here and index < torch.get_device_module(kind).device_count():
        assert LeakDetector(device).device.type == kind
        return

    with pytest.raises(OptionError, match="there is no such device here"):
        LeakDetector(device)
    with pytest.raises(OptionError, match="fix: device=None"):
        assert_no_leak(flat_epoch(), device=device)


def test_without_a_device_the_first_that_is_here_is_watched():
    [first, *_] = [*present_kinds(), torch.device("cpu")]

    assert LeakDetector().device == first


@pytest.mark.slow
def test_epochs_gives_what_the_iterable_gives_and_raises_at_the_end():
    step, seen = growing_epoch(), []

    def train():
        for epoch in LeakDetector("cpu").epochs(range(10)):
            seen.append(epoch)
            step()

    with pytest.raises(LeakError) as caught:
        train()

    assert seen == list(range(10))
    report = caught.value.report
    assert report.leaking
    assert report.bytes_per_epoch == pytest.approx(SIZE * 4, rel=0.1)
    assert "`retained`" in str(caught.value)
    assert report.growths[0].holder.line.startswith("test_detector.py:")


@pytest.mark.slow
def test_a_flat_loop_is_steady():
    report = LeakDetector("cpu").run(flat_epoch(), epochs=10)

    assert report.ok
    assert report.verdict == "steady"
    assert report.epochs_left is None
    # Or "steady within the tolerance": noise of resident memory may look like growth.
    assert str(report).startswith("steady")


@pytest.mark.slow
def test_it_warns_if_asked_to():
    with pytest.warns(loaderkit.errors.LeakWarning, match="leaking"):
        LeakDetector("cpu", on_leak="warn").run(growing_epoch(), epochs=10)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LeakDetector("cpu", on_leak="warn").run(flat_epoch(), epochs=10)


WARNS = """
import warnings
from loaderkit.errors import LeakWarning
def watch():
    warnings.warn("leaking", LeakWarning, stacklevel=2)
watch()
"""


def test_the_warning_is_shown_by_a_python_that_was_told_nothing(tmp_path):
    file = tmp_path / "library.py"
    file.write_text(WARNS)
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import library"

    done = subprocess.run(
        [sys.executable, "-c", code], env=plain, capture_output=True, text=True
    )

    assert "LeakWarning: leaking" in done.stderr


@pytest.mark.slow
def test_a_long_run_is_judged_while_it_runs_and_once():
    step, reports = growing_epoch(), []
    detector = LeakDetector("cpu", on_leak=reports.append)

    for _ in detector.epochs(range(40)):
        step()

    assert [report.epochs for report in reports] == [30]


@pytest.mark.slow
def test_steps_are_put_together_to_epochs():
    step, detector = growing_epoch(), LeakDetector("cpu", every=5)

    def train():
        with detector:
            for _ in range(60):
                step()
                detector.step()

    with pytest.raises(LeakError):
        train()

    assert detector.report().epochs == 12
    assert detector.report().bytes_per_epoch == pytest.approx(SIZE * 4 * 5, rel=0.1)


@pytest.mark.slow
def test_an_error_inside_the_block_is_not_replaced_by_a_verdict():
    step = growing_epoch()

    def train():
        with LeakDetector("cpu", every=1) as detector:
            for _ in range(10):
                step()
                detector.step()
            raise KeyError(step)

    with pytest.raises(KeyError):
        train()


@pytest.mark.slow
def test_a_decorated_function_is_an_epoch():
    step, reports = growing_epoch(), []
    detector = LeakDetector("cpu", on_leak=reports.append)

    @detector
    def train(times):
        """Train."""
        return [step() for _ in range(times)]

    for _ in range(30):
        assert train(2) == [None, None]

    assert train.__doc__ == "Train."
    assert reports[0].leaking


@pytest.mark.slow
def test_the_limit_gives_the_epochs_that_are_left():
    report = LeakDetector("cpu", limit="1000 GiB", on_leak=id).run(
        growing_epoch(), epochs=10
    )

    assert report.limit_from == "the limit that was set"
    left = (1000 * 2**30) / report.bytes_per_epoch
    assert report.epochs_left == pytest.approx(left, rel=0.1)
    assert "are used up in about" in str(report)


@pytest.mark.slow
def test_passing_the_limit_counts_at_once():
    used = loaderkit.read_memory("cpu").get("anonymous")
    detector = LeakDetector("cpu", limit=used + (200 << 20))
    kept = []

    with pytest.raises(LeakError, match=r"over the limit: .* are used") as raised:
        detector.run(lambda: kept.append(torch.ones(80 << 20)), epochs=10)

    assert detector.report().epochs == 1
    assert "are used up in about" not in str(raised.value)


@pytest.mark.slow
def test_a_limit_below_what_is_used_already_is_refused():
    with pytest.raises(OptionError, match=r"limit=1\.00 MiB is less") as raised:
        LeakDetector("cpu", limit="1 MiB").run(flat_epoch(), epochs=10)

    size = raised.value.fix.partition("=")[2].strip("'")
    # Six epochs were too few in about one process of ten: what is freed becomes pages
    # that malloc keeps, until it gives the same ones out again.  It asked for 14.
    assert LeakDetector("cpu", limit=size).run(flat_epoch(), epochs=30).ok


@pytest.mark.slow
def test_a_tolerance_lets_slow_growth_pass():
    report = LeakDetector("cpu", tolerance="1 MiB").run(growing_epoch(), epochs=10)

    assert report.ok


@pytest.mark.slow
def test_growth_below_the_tolerance_is_said():
    retained = []

    report = LeakDetector("cpu").run(
        lambda: retained.append(bytearray(4096)), epochs=12
    )

    assert report.ok
    assert report.headline.startswith("steady within the tolerance: 4.0")
    assert "malloc" in [counter.name for counter in report.tolerated]


@pytest.mark.slow
def test_its_twin_with_a_smaller_tolerance_is_a_leak():
    retained = []

    report = LeakDetector("cpu", tolerance="1 KiB", on_leak=id).run(
        lambda: retained.append(bytearray(4096)), epochs=12
    )

    assert report.leaking
    assert "`retained`" in str(report)


@pytest.fixture
def collector_that_never_comes():
    """Leave the collector on, but so that only the detector has it run."""
    thresholds = gc.get_threshold()
    gc.set_threshold(10**9)
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.slow
@pytest.mark.usefixtures("collector_that_never_comes")
def test_garbage_that_the_collector_will_free_is_no_leak():
    class Node:
        pass

    def epoch():
        node = Node()
        node.me, node.load = node, torch.randn(SIZE)

    report = LeakDetector("cpu").run(epoch, epochs=10)

    assert report.verdict == "steady"
    assert "what had grown was garbage" in str(report)


class Node:
    """A node of a cycle."""


def cycle(size):
    node = type("Node", (), {})()
    node.me, node.load = node, torch.randn(size)


@pytest.mark.slow
def test_garbage_that_goes_when_objects_are_counted_is_no_leak():
    # a census had the collector run within what is subtracted as the detector's own
    def epoch():
        for _ in range(10):
            node = Node()
            node.me, node.load = node, torch.randn(4096)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotJudgedWarning)
        report = LeakDetector("cpu").run(epoch, epochs=30)

    assert report.verdict != "leaking"


@pytest.mark.slow
def test_garbage_from_before_hides_no_leak():
    gc.disable()
    for _ in range(100):
        cycle(SIZE)
    gc.enable()

    report = LeakDetector("cpu", on_leak=id).run(growing_epoch(), epochs=10)

    assert report.leaking
    assert "`retained`" in str(report)


@pytest.mark.slow
def test_a_leak_beneath_garbage_is_found():
    retained = []

    def epoch():
        cycle(4 * SIZE)
        retained.append(torch.randn(SIZE))

    report = LeakDetector("cpu", on_leak=id).run(epoch, epochs=10)

    assert report.leaking
    assert "`retained`" in str(report)


@pytest.mark.slow
def test_the_same_garbage_is_a_leak_while_the_collector_is_off():
    class Node:
        pass

    def epoch():
        node = Node()
        node.me, node.load = node, torch.randn(SIZE)

    gc.disable()
    try:
        report = LeakDetector("cpu", on_leak=id).run(epoch, epochs=10)
    finally:
        gc.enable()

    assert report.leaking
    report_text = " ".join(str(report).split())
    assert "the garbage collector is off" in report_text, report_text


@pytest.mark.slow
def test_a_bounded_cache_that_fills_needs_more_epochs():
    import collections

    ring = collections.deque(maxlen=500)

    with pytest.warns(NotJudgedWarning, match="deque `ring` has a bound"):
        report = LeakDetector("cpu").run(
            lambda: ring.extend(torch.randn(10, 1000)), epochs=10
        )

    assert report.verdict == "needs more epochs"
    assert "has a bound" in str(report)
    assert 40 < report.more_epochs < 60


def keeping_numbers(count, seconds=0.0):
    """Keep numbers an epoch; a training of 700 steps keeps as many losses."""
    history = []

    def epoch():
        history.extend(float(i) for i in range(count))
        time.sleep(seconds)

    return epoch


@pytest.mark.slow
def test_a_history_of_plain_numbers_is_no_leak():
    report = LeakDetector("cpu").run(keeping_numbers(700, seconds=0.1), epochs=10)

    assert report.ok
    assert "plain numbers" in str(report)


@pytest.mark.slow
def test_its_twin_that_comes_faster_than_any_metric_is_one():
    # So many that a machine which takes two seconds for an epoch is quick enough.
    epoch = keeping_numbers(20_000)

    report = LeakDetector("cpu", on_leak=id).run(epoch, epochs=10)

    assert report.leaking
    assert "`history`" in str(report)
    assert "running mean" in str(report)


@pytest.mark.slow
def test_a_report_prints_in_25_lines_and_as_json():
    report = LeakDetector("cpu", on_leak=id).run(growing_epoch(), epochs=10)

    values = json.loads(json.dumps(report.to_json()))

    assert len(str(report).splitlines()) <= 25
    assert values["verdict"] == "leaking"
    assert values["growths"][0]["text"] in " ".join(str(report).split())
    assert values["bytes_per_epoch"] == report.bytes_per_epoch


@pytest.mark.slow
def test_an_error_with_its_report_survives_a_pickle():
    import pickle

    with pytest.raises(LeakError) as caught:
        assert_no_leak(growing_epoch())

    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


@pytest.mark.slow
def test_assert_no_leak_gives_the_report_of_a_flat_function():
    assert assert_no_leak(flat_epoch(), device="cpu").verdict == "steady"


def test_too_few_epochs_are_refused():
    with pytest.raises(ValueError, match="at least 6"):
        assert_no_leak(flat_epoch(), epochs=3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warmup": -1}, "warmup must be"),
        ({"warmup": "often"}, "warmup must be"),
        ({"on_leak": "shout"}, "on_leak must be"),
        ({"every": 0}, "every must be"),
        ({"limit": "a lot"}, "must be a size such as"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        LeakDetector("cpu", **settings)


@pytest.mark.slow
def test_the_detector_itself_keeps_next_to_nothing():
    detector = LeakDetector("cpu")
    detector.start()
    loaderkit.read_memory("cpu")  # its first call loads modules
    for _ in range(JUDGED_AFTER + 1):  # judging loads modules too
        detector.end_epoch()
    before = loaderkit.read_memory("cpu").get("malloc")

    for _ in range(100):
        detector.end_epoch()

    grown = loaderkit.read_memory("cpu").get("malloc") - before
    assert grown < 100 * 1024
    assert detector.finish().ok


GROWING_PROGRAM = """
import sys
retained = []
for line in sys.stdin:
    retained.append(bytearray(400_000))
    print(len(retained), flush=True)
"""


@pytest.mark.slow
def test_a_program_that_has_just_been_started_is_given_time(monkeypatch):
    # On one busy processor these epochs can take longer than a start may.
    monkeypatch.setattr(process, "_START_UP_S", 3600.0)
    child = subprocess.Popen(
        [sys.executable, "-c", GROWING_PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def epoch():
        print("more", file=child.stdin, flush=True)
        child.stdout.readline()

    with child:
        with pytest.warns(NotJudgedWarning, match="still starting up"):
            report = LeakDetector("cpu", on_leak=id).run(epoch, epochs=20)
        child.stdin.close()

    assert report.verdict == "needs more epochs"
    assert "it is still starting up" in str(report)
    assert "private memory of worker" in report.headline


@pytest.mark.slow
def test_a_search_for_holders_leaves_no_lines_behind():
    retained = []
    linecache.clearcache()

    with pytest.warns(LeakWarning):  # it shows the line of the run
        LeakDetector("cpu", on_leak="warn").run(
            lambda: retained.append(bytearray(300_000)), epochs=12
        )

    assert set(linecache.cache) <= {__file__}
    # The twin: what was asked of linecache stays there.
    linecache.getlines(pytest.__file__)
    assert pytest.__file__ in linecache.cache
