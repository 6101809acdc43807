"""A Ctrl-C is raised though it was dropped, and waits for what must be done whole."""

import contextlib
import gc
import os
import signal
import sys
import threading
import weakref

import pytest

from loaderkit.interrupts import Interrupts


def interrupt(*_):
    signal.raise_signal(signal.SIGINT)


class InterruptsAtItsEnd:
    def __del__(self):
        interrupt()


def in_a_destructor():
    InterruptsAtItsEnd()


def in_a_callback_of_a_weak_reference():
    thing = threading.Event()
    reference = weakref.ref(thing, interrupt)
    del thing
    assert reference() is None


def in_a_callback_of_the_garbage_collector():
    gc.callbacks.append(interrupt)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(interrupt)


def in_a_fork():
    # A hook stays for as long as the process lives; this one does its work once.
    interrupts_left = [interrupt]
    os.register_at_fork(before=lambda: interrupts_left and interrupts_left.pop()())
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def in_code_that_drops_all_errors():
    with contextlib.suppress(BaseException):
        interrupt()


DROPPED = [
    in_a_destructor,
    in_a_callback_of_a_weak_reference,
    in_a_callback_of_the_garbage_collector,
    in_a_fork,
    in_code_that_drops_all_errors,
]


@pytest.fixture(autouse=True)
def _heed_interrupts(monkeypatch):
    """As a terminal's processes do; those of background jobs ignore SIGINT."""
    # Where pytest would make an error of what Python drops.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("come", DROPPED)
def test_python_drops_an_interrupt(come):
    come()  # and no KeyboardInterrupt ends the test


def what_leaves(block):
    """Run a block inside of Interrupts; give the error that comes out, if one does."""
    try:
        with Interrupts() as interrupts:
            block(interrupts)
    except BaseException as error:  # noqa: BLE001 -- the test looks at it
        return error
    return None


@pytest.mark.parametrize("come", DROPPED)
def test_an_interrupt_that_was_dropped_is_raised_at_the_end(come):
    error = what_leaves(lambda _: come())

    assert type(error) is KeyboardInterrupt


@pytest.mark.parametrize("come", DROPPED)
def test_an_interrupt_that_was_dropped_is_raised_where_it_is_asked_for(come):
    reached = []

    def block(interrupts):
        interrupts.check()
        come()
        reached.append("behind it")
        interrupts.check()
        reached.append("behind the check")

    assert type(what_leaves(block)) is KeyboardInterrupt
    assert reached == ["behind it"]


def test_an_interrupt_is_raised_where_it_comes():
    reached = []

    def block(_):
        interrupt()
        reached.append("behind it")

    assert type(what_leaves(block)) is KeyboardInterrupt
    assert reached == []


def test_an_interrupt_waits_for_what_is_held_also_within_another():
    reached = []

    def block(interrupts):
        with interrupts.held():
            with interrupts.held():
                interrupt()
            reached.append("held")
        reached.append("not held")

    assert type(what_leaves(block)) is KeyboardInterrupt
    assert reached == ["held"]


def test_an_interrupt_does_not_hide_the_error_of_what_is_held_but_ends_all():
    def block(interrupts):
        try:
            with interrupts.held():
                interrupt()
                raise OSError
        except OSError as error:
            raise ValueError from error

    error = what_leaves(block)

    assert type(error) is KeyboardInterrupt
    assert isinstance(error.__context__, ValueError)


def test_errors_are_left_alone_where_nothing_interrupts():
    own_error = ValueError("mine")

    def block(interrupts):
        with interrupts.held():
            interrupts.check()
        raise own_error

    assert what_leaves(block) is own_error


@pytest.mark.parametrize("come", [interrupt, in_a_destructor])
def test_what_was_in_the_block_ends_with_the_error(come):
    references = []

    def block(interrupts):
        thing = threading.Event()
        references.append(weakref.ref(thing))
        with interrupts.held():
            come()

    gc.disable()
    try:
        assert type(what_leaves(block)) is KeyboardInterrupt
        assert references[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("ignores", "status"), [(False, 3), (True, 0)])
def test_a_child_that_is_forked_where_it_is_held_does_not_hold(ignores, status):
    def block(interrupts):
        with interrupts.held(ignored_by_forked=ignores):
            child = os.fork()
            if child == 0:
                try:
                    interrupt()
                except KeyboardInterrupt:
                    os._exit(3)
                os._exit(0)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    statuses = []

    assert what_leaves(block) is None
    assert statuses == [status]


def test_a_handler_that_returns_has_dealt_with_it_and_is_told_of_what_waited():
    calls = []
    signal.signal(signal.SIGINT, lambda number, _: calls.append(number))

    with Interrupts() as interrupts:
        interrupt()
        with interrupts.held():
            interrupt()
            assert len(calls) == 1
        interrupts.check()

    assert calls == [signal.SIGINT] * 2


class StopError(Exception):
    """A trainer's own way to end."""


def stop(*_):
    raise StopError


def test_what_a_handler_of_the_users_raises_is_raised():
    signal.signal(signal.SIGINT, stop)

    assert type(what_leaves(lambda _: interrupt())) is StopError
    assert type(what_leaves(lambda _: in_a_destructor())) is StopError


@pytest.mark.parametrize("handler", [signal.SIG_IGN, stop], ids=["ignored", "own"])
def test_the_handler_is_there_again_behind_it(handler):
    signal.signal(signal.SIGINT, handler)

    with Interrupts():
        pass

    assert signal.getsignal(signal.SIGINT) == handler


def test_the_handler_is_there_again_behind_an_interrupt():
    what_leaves(lambda _: interrupt())

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_was_set_meanwhile_stays():
    with Interrupts():
        signal.signal(signal.SIGINT, stop)

    assert signal.getsignal(signal.SIGINT) is stop


def test_one_within_another_holds_for_both():
    reached = []

    def block(outer):
        with outer.held():
            with Interrupts() as inner:
                interrupt()
                inner.check()
            reached.append("inner")
        reached.append("outer")

    assert type(what_leaves(block)) is KeyboardInterrupt
    assert reached == ["inner"]


def test_in_another_thread_it_changes_nothing():
    handlers = []

    def look():
        with Interrupts() as interrupts, interrupts.held():
            interrupts.check()
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()

    assert handlers == [signal.default_int_handler]
