"""Tests of this room look at what they make themselves, not at all that is imported."""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="session", autouse=True)
def _hypothesis_knows_its_random_numbers():
    """Have Hypothesis look for who holds them while the collector still sees that.

    It does so once in a process, and on Python 3.14 it warns where nobody seems to.
    """
    given(st.none())(lambda _: None)()


@pytest.fixture(autouse=True)
def _only_new_objects_are_searched():
    """Take what was there before the test out of the collector's sight.

    A census walks every object, some 200,000 of torch and pytest: a second for each
    test, and twice that beside PyG.  ``test_cases.py`` judges the corpus in whole
    processes.
    """
    gc.freeze()
    yield
    gc.unfreeze()
