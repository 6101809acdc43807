"""A test in a process of its own fails as it fails there."""

import os

import pytest
from fresh_process import in_fresh_process

# The server imports torch and PyG first: 6 s of CPU.
pytestmark = pytest.mark.slow

HERE = os.getpid()


@in_fresh_process
def check_that_it_is_another_process(parent):
    assert os.getpid() != parent


@in_fresh_process
def fail_an_assertion():
    number = 2
    assert number == 3


@in_fresh_process
def fail_by_pytest():
    pytest.fail("nothing was raised")


@in_fresh_process
def end_at_once():
    os._exit(0)


def test_it_runs_in_a_process_of_its_own():
    check_that_it_is_another_process(HERE)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (fail_an_assertion, "number == 3"),
        (fail_by_pytest, "nothing was raised"),
        (end_at_once, "without an answer"),
    ],
)
def test_it_fails_as_it_fails_there(function, reason):
    with pytest.raises(AssertionError, match=reason):
        function()
