"""A chain hangs on the link that is nearest to a variable."""

import contextvars

import pytest
import torch

from loaderkit.memory.holders import holders_of
from loaderkit.memory.root_search import closest_to_a_root

STATE = {"head": None}
CURRENT = contextvars.ContextVar("CURRENT", default=None)


def hang_chain(length):
    """Hang a chain of lists on a module's variable; return its tensors' numbers."""
    for number in range(length):
        STATE["head"] = [torch.full((), number), STATE["head"]]


def tensors_of_chain():
    """List the tensors of the chain, without keeping them in a variable."""
    tensors, link = [], STATE["head"]
    while link is not None:
        tensors.append(link[0])
        link = link[1]
    return tensors[::-1]


@pytest.mark.slow
def test_the_newest_link_is_the_nearest_however_long_the_chain():
    hang_chain(2_000)

    # called from here, a list in a variable would be the shortest way
    close = nearest_through_no_variable()

    assert close == 1_999
    STATE["head"] = None


def nearest_through_no_variable():
    return int(closest_to_a_root(tensors_of_chain()))


@pytest.mark.slow
def test_its_twin_the_search_from_an_old_link_does_not_arrive():
    hang_chain(50)

    assert kind_of_the_oldest() == "cycle"
    STATE["head"] = None


def kind_of_the_oldest():
    return holders_of(tensors_of_chain()[0], most=1)[0].kind


@pytest.mark.slow
def test_what_no_variable_leads_to_is_not_found():
    unreachable = closest_to_a_root([object()])  # the list is no variable's

    assert unreachable is None


@pytest.mark.slow
def test_a_context_variable_is_named():
    def inside():
        CURRENT.set({"previous": [torch.zeros(3)]})
        holders = holders_of(CURRENT.get()["previous"][0], most=1)
        return holders[0]

    holder = contextvars.copy_context().run(inside)

    assert holder.kind == "context variable"
    assert holder.path == "CURRENT['previous'][0]"
