"""A run that was begun is judged, or it is said that it was not, however it ends."""

import collections
import contextlib
import subprocess
import sys
import textwrap
import warnings

import pytest

from loaderkit import LeakDetector, assert_no_leak
from loaderkit.errors import LeakError, LeakWarning, NotJudgedWarning, OptionError

EPOCHS = 12


def epochs_of(detector, step, *, leave_after=EPOCHS, error=None):
    for epoch in detector.epochs(range(100)):
        step()
        if epoch == leave_after:
            if error is not None:
                raise error
            break


def by_break(step):
    epochs_of(LeakDetector("cpu"), step)


def by_return(step):
    for epoch in LeakDetector("cpu").epochs(range(100)):
        step()
        if epoch == EPOCHS:
            return


def by_an_error(step):
    with contextlib.suppress(KeyError):
        epochs_of(LeakDetector("cpu"), step, error=KeyError(1))


def by_ctrl_c(step):
    with contextlib.suppress(KeyboardInterrupt):
        epochs_of(LeakDetector("cpu"), step, error=KeyboardInterrupt())


def by_break_in_a_block(step):
    with LeakDetector("cpu") as detector:
        epochs_of(detector, step)


def by_an_error_in_a_block(step):
    with contextlib.suppress(KeyError), LeakDetector("cpu") as detector:
        epochs_of(detector, step, error=KeyError(1))


def by_break_and_finish(step):
    detector = LeakDetector("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epochs_of(detector, step)
    detector.finish()


def by_an_error_in_run(step):
    calls = []

    def epoch():
        step()
        calls.append(1)
        if len(calls) > EPOCHS:
            raise KeyError(1)

    with contextlib.suppress(KeyError):
        LeakDetector("cpu").run(epoch, epochs=100)


def by_nothing(step):
    detector = LeakDetector("cpu")
    for _ in range(EPOCHS):
        step()
        detector.end_epoch()


def by_nothing_of_a_decorator(step):
    train = LeakDetector("cpu")(step)
    for _ in range(EPOCHS):
        train()


def by_closing_the_generator(step):
    epochs = LeakDetector("cpu").epochs(range(100))
    for _ in range(EPOCHS):
        next(epochs)
        step()
    epochs.close()


RAISED = (by_break_in_a_block, by_break_and_finish)
JUDGED = (
    by_break,
    by_return,
    by_an_error,
    by_ctrl_c,
    by_an_error_in_a_block,
    by_an_error_in_run,
    by_closing_the_generator,
)
TOLD_TO_ASK = (by_nothing, by_nothing_of_a_decorator)


def keep_bytes():
    kept = []
    return lambda: kept.append(bytearray(300_000))


def keep_nothing():
    return lambda: bytearray(300_000)


@pytest.mark.slow
@pytest.mark.parametrize("end", [*RAISED, *JUDGED, *TOLD_TO_ASK])
def test_a_leak_is_told_however_the_loop_ends(end):
    if end in RAISED:
        with pytest.raises(LeakError, match=r"leaking: 29\d KiB"):
            end(keep_bytes())
        return
    kind, words = LeakWarning, r"leaking: 29\d KiB more each epoch"
    if end in TOLD_TO_ASK:
        kind, words = NotJudgedWarning, r"watched 12 epochs, and nobody asked.*29\d KiB"

    with pytest.warns(kind, match=words) as caught:
        end(keep_bytes())

    [told] = [warning for warning in caught if warning.category is kind]
    assert told.filename == __file__


@pytest.mark.slow
@pytest.mark.parametrize("end", [*RAISED, *JUDGED, *TOLD_TO_ASK])
def test_its_twin_that_keeps_nothing_ends_in_silence(end):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        end(keep_nothing())


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_error_reaches_the_user_where_warnings_are_errors(error):
    def train():
        with LeakDetector("cpu") as detector:
            epochs_of(detector, keep_nothing(), leave_after=2, error=error())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error) as raised:
            train()

    assert raised.value.__context__ is None


def few_epochs(detector):
    epochs_of(detector, keep_nothing(), leave_after=2)


def all_of_few_epochs(detector):
    for _ in detector.epochs(range(3)):
        pass


def no_epoch(detector):
    with detector:
        pass


def an_empty_loop(detector):
    for _ in detector.epochs([]):
        pass


def few_calls(detector):
    detector.run(keep_nothing(), epochs=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("use", "words"),
    [
        (few_epochs, "2 epochs are too few to tell"),
        (all_of_few_epochs, "3 epochs are too few to tell"),
        (few_calls, "3 epochs are too few to tell"),
        (no_epoch, "No epoch has ended"),
        (an_empty_loop, "No epoch has ended"),
    ],
)
def test_a_run_that_is_too_short_says_so(use, words):
    with pytest.warns(NotJudgedWarning, match=words) as caught:
        use(LeakDetector("cpu"))

    assert [warning.filename for warning in caught] == [__file__]
    assert "fix: " in str(caught[0].message)


def seven_steps(detector):
    with detector:
        for _ in range(7):
            detector.step()


@pytest.mark.slow
def test_steps_that_make_no_epoch_say_so():
    with pytest.warns(NotJudgedWarning, match="7 steps were counted"):
        seven_steps(LeakDetector("cpu", every=100))


def test_steps_of_a_detector_that_counts_epochs_are_refused():
    with pytest.raises(OptionError, match="every=100"):
        LeakDetector("cpu").step()


@pytest.mark.slow
def test_a_loop_that_is_run_again_tells_its_leak_again():
    step, told = keep_bytes(), []
    detector = LeakDetector("cpu", on_leak=told.append)

    for _ in range(2):
        for _ in detector.epochs(range(8)):
            step()

    assert [report.epochs for report in told] == [8, 16]


@pytest.mark.slow
def test_who_has_looked_at_the_report_is_told_nothing_more():
    detector = LeakDetector("cpu")
    detector.start()
    detector.end_epoch()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert detector.report().verdict == "needs more epochs"
        detector.finish()
        del detector


def keep_from_a_call_on(first, last):
    kept, calls = [], []

    def epoch():
        calls.append(1)
        if first <= len(calls) <= last:
            kept.append(bytearray(400_000))

    return epoch


@pytest.mark.slow
def test_a_check_goes_on_until_growth_that_has_just_begun_is_known_to_be_a_leak():
    with pytest.raises(LeakError) as raised:
        assert_no_leak(keep_from_a_call_on(7, 100), epochs=8)

    assert 8 < raised.value.report.epochs <= 24


@pytest.mark.slow
def test_its_twin_that_keeps_something_once_in_the_last_call_is_steady():
    report = assert_no_leak(keep_from_a_call_on(8, 8), epochs=8)

    assert report.verdict == "steady"


@pytest.mark.slow
def test_a_check_that_cannot_be_decided_says_so():
    ring = collections.deque(maxlen=500)

    with pytest.warns(NotJudgedWarning, match="fix: epochs=") as caught:
        report = assert_no_leak(
            lambda: ring.extend(bytearray(4000) for _ in range(10)), epochs=8
        )

    assert report.epochs == 24
    assert caught[0].filename == __file__


AT_THE_END_OF_THE_PROCESS = """
    from loaderkit import LeakDetector
    kept = []
    detector = LeakDetector("cpu")
    {loop}
        kept.append(bytearray(300_000))
        {end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "end", "words"),
    [
        (
            "epochs = detector.epochs(range(100))\n    for epoch in epochs:",
            "if epoch == 12: break",
            "nobody asked for its verdict",
        ),
        (
            "for epoch in detector.epochs(range(100)):",
            "if epoch == 12: break",
            "list `__main__.kept`",
        ),
    ],
)
def test_it_is_told_when_the_process_ends(loop, end, words):
    program = textwrap.dedent(AT_THE_END_OF_THE_PROCESS.format(loop=loop, end=end))

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert words in done.stderr
    assert done.stderr.count("Warning: ") == 1


@pytest.mark.slow
def test_a_child_process_says_nothing_of_its_parents_run():
    import multiprocessing

    detector = LeakDetector("cpu")
    detector.start()
    child = multiprocessing.get_context("fork").Process(
        target=_end_as_a_child, args=(detector,)
    )

    child.start()
    child.join()

    assert child.exitcode == 0
    detector.report()


def _end_as_a_child(detector):
    warnings.simplefilter("error")
    detector._run.end_unasked()
    detector._run.leave_early("", stacklevel=1)
