"""Keys come back as they were given, whatever they are."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.datasets.compact_keys import compact_keys

texts = st.text(st.characters(categories=None), max_size=5)
keys = st.one_of(
    st.lists(texts),
    st.lists(st.integers()),
    st.lists(st.integers(-(2**63), 2**63 - 1)),
    st.lists(st.one_of(texts, st.integers(), st.booleans(), st.tuples(texts))),
)


@given(keys=keys)
def test_keys_come_back_with_their_types(keys):
    compact = compact_keys(keys)

    for given_keys in (compact, pickle.loads(pickle.dumps(compact))):
        assert [(type(key), key) for key in given_keys] == [
            (type(key), key) for key in keys
        ]
    assert len(compact) == len(keys)
    assert list(compact[1:3]) == keys[1:3]
    for row in range(-len(keys), len(keys)):
        assert compact[row] == keys[row]


@pytest.mark.parametrize("keys", [[], ["a"], [1], range(3)])
def test_a_key_that_is_not_there_is_an_error(keys):
    with pytest.raises(IndexError):
        compact_keys(keys)[len(keys)]


class Text(str):
    """A text that knows more than its characters."""

    __slots__ = ()


def test_a_key_of_a_class_of_its_own_stays_the_object_it_is():
    key = Text("a")

    assert compact_keys([key])[0] is key


def test_keys_are_those_of_the_moment():
    keys = ["a", "b"]
    compact = compact_keys(keys)

    keys[0] = "c"

    assert compact[0] == "a"
