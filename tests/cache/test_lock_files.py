"""A lock file is held by one thread of one process at a time."""

import itertools
import multiprocessing
import os
import threading

import pytest
from held_locks import call_when_logged, process_that_holds, stop_process

from loaderkit.cache.lock_files import (
    LockPatience,
    StuckHolderError,
    hold_lock_file,
    hold_lock_for_work,
)
from loaderkit.cache.process_identity import is_process_stopped

FORK = multiprocessing.get_context("fork")


def test_one_thread_holds_the_file_at_a_time(tmp_path):
    file = tmp_path / "lock"
    holders, most_at_once = [], []

    def hold_it_often():
        for _ in range(50):
            with hold_lock_file(file):
                holders.append(threading.get_ident())
                most_at_once.append(len(holders))
                holders.pop()

    threads = [threading.Thread(target=hold_it_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert most_at_once == [1] * 200


def _add_one(lock_file, counter_file):
    for _ in range(50):
        with hold_lock_file(lock_file):
            count = int(counter_file.read_text())
            counter_file.write_text(str(count + 1))


@pytest.mark.slow
def test_one_process_holds_the_file_at_a_time(tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    fork = multiprocessing.get_context("fork")

    arguments = (tmp_path / "lock", counter)
    processes = [fork.Process(target=_add_one, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()

    assert counter.read_text() == "150"


def test_a_process_forked_while_a_thread_holds_the_file_gets_it_later(tmp_path):
    """A copy of the thread's lock would never be let go of in the new process."""
    file = tmp_path / "lock"
    is_held, may_go = threading.Event(), threading.Event()

    def hold_it():
        with hold_lock_file(file):
            is_held.set()
            may_go.wait()

    holder = threading.Thread(target=hold_it)
    holder.start()
    is_held.wait()
    got_it = tmp_path / "got-it"

    def take_it():
        with hold_lock_file(file):
            got_it.touch()

    process = multiprocessing.get_context("fork").Process(target=take_it)
    process.start()
    may_go.set()
    holder.join()
    process.join()

    assert process.exitcode == 0
    assert got_it.exists()


@pytest.fixture
def held_lock(tmp_path):
    """A lock that another process holds until it is killed."""
    file = tmp_path / "lock"
    with process_that_holds(lambda: hold_lock_file(file)) as process:
        yield file, process


@pytest.mark.slow
def test_a_holder_that_is_stopped_is_named_and_one_that_is_killed_lets_go(held_lock):
    file, process = held_lock
    stop_process(process)
    assert is_process_stopped(process.pid)
    patience = LockPatience(silent_s=600.0, stopped_s=1.0)

    with pytest.raises(StuckHolderError) as caught, hold_lock_file(file, patience):
        pass

    assert caught.value.holder.process.number == process.pid
    assert caught.value.holder.is_stopped
    process.kill()
    with hold_lock_file(file, patience):
        assert not is_process_stopped(os.getpid())


@pytest.mark.slow
def test_a_holder_that_gives_no_sign_of_life_is_named(held_lock):
    file, process = held_lock
    patience = LockPatience(silent_s=1.0, stopped_s=600.0)

    with pytest.raises(StuckHolderError) as caught, hold_lock_file(file, patience):
        pass

    assert caught.value.holder.process.number == process.pid
    assert not caught.value.holder.is_stopped


@pytest.mark.slow
def test_a_holder_that_gives_signs_of_life_is_waited_for(held_lock):
    """The holder of the two tests above, with signs that change."""
    file, process = held_lock
    patience = LockPatience(silent_s=1.0, stopped_s=1.0)
    signs = itertools.count()

    def kill_at_third_sign():
        sign = next(signs)
        if sign == 2:
            process.kill()
        return sign

    with hold_lock_file(file, patience, kill_at_third_sign):
        assert next(signs) > 2


@pytest.fixture
def working_process(tmp_path):
    """A process whose work holds a lock until it is killed."""
    file = tmp_path / "lock"
    with process_that_holds(lambda: hold_lock_for_work(file, "works")) as process:
        yield file, process


def test_who_waits_for_the_work_of_a_process_says_its_number_at_once(working_process):
    file, process = working_process

    with (
        call_when_logged("waiting", process.kill) as lines,
        hold_lock_for_work(file, "works"),
    ):
        assert len(lines) == 1
        assert f"waiting for process {process.pid} on" in lines[0]
        assert "which works; 0 s so far" in lines[0]
        assert "stopped" not in lines[0]
    assert not file.with_name("lock.holder").exists()


def test_a_link_where_a_holder_would_be_named_is_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("years of work")
    (tmp_path / "lock.holder").symlink_to(elsewhere)

    with hold_lock_for_work(tmp_path / "lock", "works"):
        assert elsewhere.read_text() == "years of work"
