"""Tests of this room look at what they make themselves, not at all that is imported."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _only_new_objects_are_searched():
    """Take what was there before the test out of the collector's sight.

    A census walks every object, some 200,000 of torch and pytest: a second for each
    test, and twice that beside PyG.  ``test_cases.py`` looks at whole processes.
    """
    gc.freeze()
    yield
    gc.unfreeze()
